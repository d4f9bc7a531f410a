"""What an update may set a column to: expressions that compute with one row, and values that fit."""

from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from lakeupsert.errors import ConfigurationError
from lakeupsert.operations.statement.assignments import Assignments, UnfitValueError

ROWS = pa.table(
    {
        "id": pa.array([1, 2], pa.int64()),
        "Name": pa.array(["Ann", None]),
        "amount": pa.array([Decimal("10.00"), Decimal("5.00")], pa.decimal128(9, 2)),
        "price": pa.array([10.0, 5.0]),
        "day": pa.array([date(2020, 1, 1), date(2020, 7, 7)]),
        "tags": pa.array([["a", "b"], []], pa.list_(pa.string())),
        "who": pa.array([{"city": "Rome"}, {"city": None}]),
        "small": pa.array([1, 2], pa.int8()),
        "current_date": pa.array([1, 2], pa.int64()),
        "or else": pa.array(["x", "y"]),
    }
)


def value_of(column: str, expression: str) -> list[Any]:
    values: list[Any] = Assignments(ROWS.schema, {column: expression}).of(ROWS)[column].to_pylist()
    return values


@pytest.mark.parametrize(
    ("column", "expression", "values"),
    [
        ("amount", "amount * 0.87", [Decimal("8.70"), Decimal("4.35")]),
        ("AMOUNT", "Amount - 1", [Decimal("9.00"), Decimal("4.00")]),
        ("price", "round(price * 13 / 15, 2)", [8.67, 4.33]),
        ("price", "1", [1.0, 1.0]),
        ("Name", "NULL", [None, None]),
        ("Name", "coalesce(name, 'nobody') || '!'", ["Ann!", "nobody!"]),
        ("Name", "case when id = 1 then 'one' else upper(\"or else\") end", ["one", "Y"]),
        ("Name", "who.city", ["Rome", None]),
        ("Name", "tags[1]", ["a", None]),
        ("Name", "split_part('a-b', '-', 2)", ["b", "b"]),
        ("Name", "nullif(name, 'Ann')", [None, None]),
        ("tags", "list_transform(tags, lambda x: x || id)", [["a1", "b1"], []]),
        ("tags", "[lower(t) for t in tags if t <> 'a']", [["b"], []]),
        ("day", "day + 1", [date(2020, 1, 2), date(2020, 7, 8)]),
        ("day", "DATE '2021-03-04'", [date(2021, 3, 4)] * 2),
        ("small", "small + 1", [2, 3]),
        ("id", "current_date + 1", [2, 3]),
        ("who", "{'city': 'Oslo'}", [{"city": "Oslo"}] * 2),
    ],
)
def test_value(column: str, expression: str, values: list[Any]) -> None:
    name = next(n for n in ROWS.schema.names if n.lower() == column.lower())
    found = Assignments(ROWS.schema, {column: expression}).of(ROWS)[name]
    assert found.type == ROWS.schema.field(name).type
    assert found.to_pylist() == values


def test_every_expression_sees_the_row_as_it_was() -> None:
    found = Assignments(ROWS.schema, {"id": "id + 1", "price": "id * 1.0"}).of(ROWS)
    assert (found["id"].to_pylist(), found["price"].to_pylist()) == ([2, 3], [1.0, 2.0])


def test_values_stay_at_their_rows_however_many() -> None:
    many = pa.table({"id": pa.array(range(300_000)), "v": pa.nulls(300_000, pa.int64())})
    assert Assignments(many.schema, {"v": "id * 2"}).of(many)["v"].to_pylist() == list(range(0, 600_000, 2))


@pytest.mark.parametrize(
    "expression",
    [
        "small * 100",  # DuckDB finds that it overflows
        "(select max(id) from read_parquet('x.parquet'))",
        "id in (select 1)",
        "exists (select 1)",
        "array(select 1)",
        "sum(id)",
        "list(name)",
        "geomean(price)",
        "row_number() over ()",
        "max(id) over (partition by name)",
        "random()",
        "uuid()",
        "now()",
        "current_timestamp",
        "today()",
        "current_localtimestamp()",
        "age(day)",
        "current_setting('threads')",
        "getvariable('x')",
        "nextval('s')",
        "current_user",
        "user()",
        "unnest(tags)",
        "read_text('/etc/passwd')",
        "nosuchfunction(id)",
        "nosuchcolumn + 1",
        "x + 1",
        "*",
        "columns('id')",
        "#1",
        "$1",
        "?",
        "default",
        "1, 2",
        "1 from t",
        "1 union select 2",
        "1; drop table t",
        "id +",
        "",
        "name + 1",
        "cast(name as int)",
        "error('x')",
        "sleep_ms(1)",
    ],
)
def test_refused_expression(expression: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        value_of("Name", expression)
    assert refused.value.code == "unfit-expression"


@pytest.mark.parametrize(
    ("column", "expression", "at"),
    [
        ("amount", "amount * 0.877", 1),
        ("small", "id * 100", 1),
        ("id", "price / 4", 0),
        ("day", "'no date'", 0),
        ("id", "id = 1", 0),
        ("Name", "id", 0),
    ],
)
def test_value_that_does_not_fit(column: str, expression: str, at: int) -> None:
    if column == "Name":  # a number has a text
        assert value_of(column, expression) == ["1", "2"]
        return
    with pytest.raises(UnfitValueError) as unfit:
        value_of(column, expression)
    assert unfit.value.at == at


def test_columns_that_are_not_there_or_set_twice() -> None:
    for expressions, code in (({"nosuch": "1"}, "unknown-column"), ({"name": "1", "Name": "2"}, "unfit-expression")):
        with pytest.raises(ConfigurationError) as refused:
            Assignments(ROWS.schema, expressions)
        assert refused.value.code == code


def test_other_types_pass_by() -> None:
    """Columns that DuckDB has no type for can stand beside what is computed."""
    rows = pa.table({"id": [1], "at": pa.array([1], pa.time64("ns")), "half": pa.array([1.0], pa.float16())})
    assert Assignments(rows.schema, {"id": "id + 1"}).of(rows)["id"].to_pylist() == [2]
