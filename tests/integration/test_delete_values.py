"""Which rows `[delete]` takes for deletes: TOML values of every type, compared with a column's text; and which it refuses."""

import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert import Table
from lakeupsert.errors import ConfigurationError
from tests.harness.proof import assert_proved

MOMENT = datetime(2020, 1, 2, 3, 4, 5, 500_000)


class Feed:
    """A table whose rows `a` and `b` came before; `b` is what the next file marks as deleted."""

    def __init__(self, root: Path, delete: str, *, strategy: str = "rewrite", more: str = "") -> None:
        self.root = root
        (root / "landing").mkdir()
        self.configure(delete, strategy=strategy, more=more)
        self.land("1.csv", "id,day,version,gone\na,2020-01-01,1,no\nb,2020-01-01,1,no\n")

    def configure(self, delete: str, *, strategy: str = "rewrite", more: str = "") -> None:
        (self.root / "lakeupsert.toml").write_text(
            '[tables.t]\nlanding = "landing"\nprocessed = "processed"\nkey = ["id"]\npartition_by = ["day"]\n'
            f'order_by = ["version"]\nstrategy = "{strategy}"\n{more}[tables.t.delete]\ncolumn = "gone"\n{delete}\n'
        )
        self.table = Table.open(self.root / "lakeupsert.toml")

    def land(self, name: str, content: str | pa.Table) -> None:
        path = self.root / "landing" / name
        if isinstance(content, str):
            path.write_text(content)
        else:
            pq.write_table(content, path)

    def ids(self, host: Any = "local", engine: Any = "arrow") -> list[str]:
        """The keys that readers see, once DuckDB has found the same in what landed."""
        self.table.run(host=host, engine=engine)
        assert_proved(self.table)
        return sorted(self.table.to_arrow().read_all()["id"].to_pylist())


def rows(values: list[Any], type_: pa.DataType) -> pa.Table:
    return pa.table(
        {"id": ["a", "b"], "day": [date(2020, 1, 1)] * 2, "version": [2, 2], "gone": pa.array(values, type_)}
    )


TYPED = {
    "boolean": ("[true]", pa.bool_(), [False, True]),
    "false": ("[false]", pa.bool_(), [None, False]),
    "integer": ("[1]", pa.int8(), [0, 1]),
    "hexadecimal": ("[0x1F]", pa.int64(), [1, 31]),
    "whole float": ("[1.0]", pa.float64(), [0.0, 1.0]),
    "whole float, narrow": ("[1.0]", pa.float32(), [0.0, 1.0]),
    "whole float of an integer": ("[1.0]", pa.int32(), [0, 1]),
    "integer of a float": ("[1]", pa.float64(), [1.5, 1.0]),
    "small float": ("[1e-7]", pa.float64(), [1e-6, 1e-7]),
    "date": ("[9999-12-31]", pa.date32(), [date(2020, 1, 1), date(9999, 12, 31)]),
    "datetime": ("[2020-01-02T03:04:05.5]", pa.timestamp("us"), [None, MOMENT]),
    "datetime with a zone": (
        "[2020-01-02T04:04:05.5+01:00]",
        pa.timestamp("us", "UTC"),
        [None, MOMENT.replace(tzinfo=UTC)],
    ),
    "several types": ('["D", 1, true]', pa.string(), ["0", "true"]),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(("values", "type_", "gone"), TYPED.values(), ids=TYPED)
def test_value_of_its_type_deletes(values: str, type_: pa.DataType, gone: list[Any], tmp_path: Path) -> None:
    feed = Feed(tmp_path, f"values = {values}")
    assert feed.ids() == ["a", "b"]
    feed.land("2.parquet", rows(gone, type_))
    assert feed.ids() == ["a"]


DAY, NOON = date(2020, 1, 31), datetime(2020, 1, 31, 10)
FLOATS = ["0.1", "1e-5", "1e-7", "1e6", "1e16", "1e20", "123456.5"]
# TOML's value, a column with that value, and whether it deletes: whether its text is the column's.
EQUAL_VALUES: list[tuple[str, pa.Array, bool]] = [
    ("true", pa.array([True]), True),
    ("1", pa.array([True]), False),
    *((n, pa.array([float(n)], type_), True) for n in FLOATS for type_ in (pa.float64(),)),
    ("0.1", pa.array([0.1], pa.float32()), True),
    ("1.0", pa.array([1.0], pa.float32()), True),
    ("1", pa.array([Decimal("1.00")]), False),
    ('"1.00"', pa.array([Decimal("1.00")]), True),
    ('"1E-9"', pa.array([Decimal("0.000000001")], pa.decimal128(18, 9)), True),
    ("2020-01-31", pa.array([DAY]), True),
    ("2020-01-31T00:00:00", pa.array([DAY]), False),
    *(("2020-01-31T10:00:00", pa.array([NOON], pa.timestamp(unit)), unit == "us") for unit in ("s", "ms", "us", "ns")),
    ('"2020-01-31 10:00:00.000"', pa.array([NOON], pa.timestamp("ms")), True),
    ("2020-01-31T11:00:00+01:00", pa.array([NOON], pa.timestamp("us", "UTC")), True),
    ("2020-01-31T10:00:00Z", pa.array([NOON], pa.timestamp("us", "Europe/Berlin")), False),
    ('"2020-01-31 11:00:00.000000+0100"', pa.array([NOON], pa.timestamp("us", "Europe/Berlin")), True),
    ("10:00:00", pa.array([time(10)], pa.time64("us")), True),
    ("10:00:00.5", pa.array([time(10, 0, 0, 500_000)], pa.time64("us")), True),
    ("10:00:00", pa.array([time(10)], pa.time32("ms")), False),
    ('"10:00:00"', pa.array([time(10)], pa.time64("us")), False),
    ('"D"', pa.array([b"D"]), True),
    ('"D"', pa.array(["D"]).dictionary_encode(), True),
    ("1", pa.array([1]).dictionary_encode(), True),
    ('"D"', pa.array(["D"], pa.large_string()), True),
    *(("1", pa.array([1], type_), True) for type_ in (pa.int8(), pa.uint16(), pa.int64(), pa.uint64())),
    ("1000", pa.array([1], pa.int8()), False),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("value", "column", "deletes", "kept"),
    [(*case, number % 2 == 1) for number, case in enumerate(EQUAL_VALUES)],
    ids=lambda x: str(getattr(x, "type", x)),
)
def test_typed_column_deletes_by_its_text_or_is_told(
    value: str, column: pa.Array, deletes: bool, kept: bool, tmp_path: Path
) -> None:
    """`ids` has DuckDB agree."""
    feed = Feed(tmp_path, f"values = [{value}]\nkeep = {str(kept).lower()}")
    (tmp_path / "landing/1.csv").unlink()
    row = pa.table({"id": ["a"], "day": [DAY], "version": [1]})
    feed.land("1.parquet", row)
    assert feed.ids() == ["a"]
    feed.land("2.parquet", row.set_column(2, "version", [[2]]).append_column("gone", column))
    notes = feed.table.plan().notes
    appended = feed.table.append(host="local")
    assert appended is not None
    for told in notes, appended.warnings:
        assert len([warning for warning in told if "2.parquet" in warning]) == (not deletes)
    assert feed.ids() == ([] if deletes else ["a"])


def test_typed_column_of_the_first_batch_is_told(tmp_path: Path) -> None:
    feed = Feed(tmp_path, "values = [1, 2]")
    (tmp_path / "landing/1.csv").unlink()
    feed.land("1.parquet", rows([True, False], pa.bool_()))
    result = feed.table.run(host="local").append
    assert result is not None
    assert [("1.parquet" in w, "'1', '2'" in w) for w in result.warnings] == [(True, True)]


def test_values_for_several_types_are_not_told(tmp_path: Path) -> None:
    feed = Feed(tmp_path, 'values = ["D", 1, true]')
    assert feed.ids() == ["a", "b"]
    feed.land("2.parquet", rows([False, True], pa.bool_()))
    result = feed.table.run(host="local").append
    assert result is not None
    assert result.warnings == ()
    feed.land("3.parquet", rows([None, None], pa.null()))
    result = feed.table.run(host="local").append
    assert result is not None
    assert result.warnings == ()


@pytest.mark.long
@pytest.mark.usefixtures("spark")
def test_spark_compares_the_same_texts(tmp_path: Path) -> None:
    feed = Feed(tmp_path, "values = [true, 1.0]")
    feed.land("2.parquet", rows([False, True], pa.bool_()))
    assert feed.ids("spark", "spark") == ["a"]
    feed.land("3.parquet", rows([1.0, 0.0], pa.float64()).set_column(2, "version", pa.array([3, 1])))
    assert feed.ids("spark", "spark") == []


@pytest.mark.parametrize(
    ("values", "text", "left"),
    [
        ("[true]", "true", ["a"]),
        ("[true]", "True", ["a", "b"]),
        ('[true, "True"]', "True", ["a"]),
        ("[1]", "1", ["a"]),
        ("[1.0]", "1", ["a"]),
        ("[1.0]", "1.0", ["a", "b"]),
        ('["1.0"]', "1.0", ["a"]),
        ("[2020-01-31]", "2020-01-31", ["a"]),
    ],
)
def test_text_of_a_file_is_compared_as_it_is_written(values: str, text: str, left: list[str], tmp_path: Path) -> None:
    feed = Feed(tmp_path, f"values = {values}")
    feed.land("2.csv", f"id,day,version,gone\nb,2020-01-01,2,{text}\n")
    assert feed.ids() == left


@pytest.mark.parametrize("value", [True, 1])
def test_values_of_json_lines(value: object, tmp_path: Path) -> None:
    feed = Feed(tmp_path, "values = [true, 1]")
    feed.land("2.jsonl", json.dumps({"id": "b", "day": "2020-01-01", "version": 2, "gone": value}))
    assert feed.ids() == ["a"]


def test_upserts_of_every_type(tmp_path: Path) -> None:
    feed = Feed(tmp_path, 'values = [true]\nupserts = [false, 0, "no"]')
    feed.land("2.parquet", rows([False, True], pa.bool_()))
    assert feed.ids() == ["a"]
    with pytest.raises(ConfigurationError, match=r"'1' .*`delete.values`"):
        feed.configure('values = [1]\nupserts = ["1"]')


def test_values_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKEUPSERT__TABLES__T__DELETE__VALUES", "[true, 1]")
    feed = Feed(tmp_path, 'values = ["D"]')
    feed.land("2.parquet", rows([False, True], pa.bool_()))
    assert feed.ids() == ["a"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('["true"]', "[true]"),
        ("[true]", '["true"]'),
        ("[1.0]", '["1"]'),
        ('["true"]', "[true, true]"),
        ('["true"]', '[true, "true"]'),
        ('[true, "true"]', "[true]"),
        ('["D", "U"]', '["U", "D"]'),
        ('["D"]\nupserts = ["no", "U"]', '["D"]\nupserts = ["U", "no", "no"]'),
    ],
)
def test_table_that_exists_has_the_same_values_as_text(before: str, after: str, tmp_path: Path) -> None:
    feed = Feed(tmp_path, f"values = {before}")
    assert feed.ids() == ["a", "b"]
    feed.configure(f"values = {after}")
    assert feed.ids() == ["a", "b"]
    feed.configure(f"values = [false]{after.partition(']')[2]}")
    with pytest.raises(ConfigurationError) as caught:
        feed.ids()
    assert caught.value.code == "another-table"


@pytest.mark.parametrize("values", ["[[1]]", "[{ a = 1 }]", "true"])
def test_what_is_no_scalar_is_refused(values: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Feed(tmp_path, f"values = {values}")
    assert caught.value.code == "bad-setting"


def test_delete_without_an_order_is_refused_also_where_no_stored_row_has_one(tmp_path: Path) -> None:
    feed = Feed(tmp_path, 'values = ["D"]')
    feed.land("1.csv", "id,day,version,gone\na,2020-01-01,1,\nb,2020-01-01,,\n")
    assert feed.ids() == ["a", "b"]
    feed.land("2.csv", "id,day,version,gone\na,2020-01-01,2,\nb,2020-01-01,,D\n")
    result = feed.table.run(host="local")
    assert result.append is not None
    assert result.append.entry.quarantined == {"order_missing": 1}
    assert feed.table.to_arrow().read_all()["id"].to_pylist() == ["a", "b"]
