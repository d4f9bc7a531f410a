"""What a filter means, row by row, and what is refused. That readers agree about it: tests/integration/test_readers.py."""

import math
import re
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from lakeupsert.errors import ConfigurationError
from lakeupsert.read.where import ArrowTerms, all_of, parse_where
from lakeupsert.rows.convert import convert

NAN = math.nan
SCHEMA = pa.schema(
    [
        ("n", pa.int64()),
        ("small", pa.uint8()),
        ("f", pa.float64()),
        ("f4", pa.float32()),
        ("f2", pa.float16()),
        ("dec", pa.decimal128(10, 2)),
        ("dec4", pa.decimal32(9, 2)),
        ("dec32", pa.decimal256(50, 2)),
        ("fixed", pa.binary(1)),
        ("s", pa.string()),
        ("ls", pa.large_string()),
        ("b", pa.bool_()),
        ("d", pa.date32()),
        ("ts", pa.timestamp("us")),
        ("tz", pa.timestamp("us", "America/New_York")),
        ("ns", pa.timestamp("ns")),
        ("t", pa.time64("us")),
        ("bin", pa.binary()),
        ("l", pa.list_(pa.int32())),
        ("st", pa.struct([("n", pa.int64())])),
        ("u", pa.uuid()),
        ("a.b", pa.int64()),
        ("a`b", pa.int64()),
        ('a "b"', pa.int64()),
        ("order", pa.int64()),
    ]
)


def of(name: str, *values: Any) -> Any:
    """A table of the schema with these values in one column, and null in all others."""
    columns = {f.name: pa.nulls(len(values), f.type) for f in SCHEMA}
    columns[name] = pa.array(values, SCHEMA.field(name).type)
    return pa.table(columns, schema=SCHEMA)


def kept(where: str, table: Any) -> list[int]:
    """Places of the rows that the filter keeps."""
    table = table.append_column("place", pa.array(range(table.num_rows)))
    found: list[int] = table.filter(all_of(parse_where(where, SCHEMA, ArrowTerms())))["place"].to_pylist()
    return found


@pytest.mark.parametrize(
    ("where", "column", "values", "places"),
    [
        ("n = 2", "n", [1, 2, 3, None], [1]),
        ("n == 2", "n", [1, 2, 3, None], [1]),
        ("n <> 2", "n", [1, 2, 3, None], [0, 2]),
        ("n != -2", "n", [1, -2, 3, None], [0, 2]),
        ("2 < n", "n", [1, 2, 3, None], [2]),
        ("2 >= n", "n", [1, 2, 3, None], [0, 1]),
        ("n > '2'", "n", [1, 2, 3], [2]),
        ("(n) >= (2)", "n", [1, 2, 3], [1, 2]),
        ("n = 9223372036854775807", "n", [2**63 - 1, 2**63 - 2], [0]),
        ("small < 255", "small", [0, 255], [0]),
        ("dec = 1.5", "dec", [Decimal("1.50"), Decimal("1.51")], [0]),
        ("dec > -0.01", "dec", [Decimal("0.00"), Decimal("-0.01")], [0]),
        ("s = 'it''s'", "s", ["it's", "its"], [0]),
        (r"s = 'a\b'", "s", ["a\\b", "ab"], [0]),
        ("s > 'Z'", "s", ["a", "Z", "é", ""], [0, 2]),
        ("ls = ''", "ls", ["", None, " "], [0]),
        ("b", "b", [True, False, None], [0]),
        ("NOT b", "b", [True, False, None], [1]),
        ("b = false", "b", [True, False, None], [1]),
        ("b <> 'true'", "b", [True, False, None], [1]),
        ("d = '2020-02-29'", "d", [date(2020, 2, 29), date(2020, 3, 1)], [0]),
        ("d >= DATE '9999-12-31'", "d", [date(1, 1, 1), date(9999, 12, 31)], [1]),
        ("ts < '2020-01-02'", "ts", [datetime(2020, 1, 1, 23, 59), datetime(2020, 1, 2)], [0]),
        ("ts = TIMESTAMP '2020-01-01 00:00:00.000001'", "ts", [datetime(2020, 1, 1, 0, 0, 0, 1)], [0]),
        ("tz = '2020-01-01 05:00:00'", "tz", [datetime(2020, 1, 1, 5, tzinfo=UTC)], [0]),
        ("tz = '2020-01-01T00:00:00-05:00'", "tz", [datetime(2020, 1, 1, 5, tzinfo=UTC)], [0]),
        ("ns > '1970-01-01 00:00:00.000000001'", "ns", [1, 2], [1]),
        ("t >= '10:00:00'", "t", [time(9, 59), time(10, 0)], [1]),
        ("bin = 'x'", "bin", [b"x", b"y"], [0]),
        ("n IN (1, 3)", "n", [1, 2, 3, None], [0, 2]),
        ("n NOT IN (1, 3)", "n", [1, 2, 3, None], [1]),
        ("d IN ('2020-01-01', DATE '2020-01-03')", "d", [date(2020, 1, n) for n in (1, 2, 3)], [0, 2]),
        ("n BETWEEN 2 AND 3", "n", [1, 2, 3, 4, None], [1, 2]),
        ("n NOT BETWEEN 2 AND 3", "n", [1, 2, 3, 4, None], [0, 3]),
        ("n BETWEEN 3 AND 2", "n", [2, 3], []),
        ("s LIKE 'a%'", "s", ["a", "ab", "ba", "a\nb", None], [0, 1, 3]),
        ("s NOT LIKE 'a%'", "s", ["a", "ab", "ba", "a\nb", None], [2]),
        ("s LIKE '_'", "s", ["", "a", "🦆", "ab"], [1, 2]),
        ("s LIKE 'a.c'", "s", ["a.c", "abc"], [0]),
        (r"s LIKE 'a\_c'", "s", ["a_c", "abc"], [0]),
        (r"s LIKE '%\\%'", "s", ["a\\b", "ab"], [0]),
        ("s LIKE 'A'", "s", ["a", "A"], [1]),
        ("ls LIKE '%b'", "ls", ["ab", "a"], [0]),
        ("s IS NULL", "s", ["", None], [1]),
        ("s IS NOT NULL", "s", ["", None], [0]),
        ("l IS NULL", "l", [[], None], [1]),
        ("st IS NOT NULL", "st", [{"n": None}, None], [0]),
        ("u IS NULL", "u", [b"1" * 16, None], [1]),
        ("`a.b` = 1", "a.b", [1, 2], [0]),
        ('"a.b" = 1', "a.b", [1, 2], [0]),
        ("`a``b` = 1", "a`b", [1, 2], [0]),
        ('"a ""b""" = 1', 'a "b"', [1, 2], [0]),
        ("ORDER = 1", "order", [1, 2], [0]),
        ("N = 1 AND `A.B` IS NULL", "n", [1, 2], [0]),
    ],
)
def test_condition_keeps_the_rows_that_it_describes(
    where: str, column: str, values: list[Any], places: list[int]
) -> None:
    assert kept(where, of(column, *values)) == places


@pytest.mark.parametrize(
    ("where", "places"),
    [
        ("f = 1", [0]),
        ("f <> 1", [1, 2, 3, 4, 5]),
        ("f < 1", [1, 4, 5]),
        ("f <= 1", [0, 1, 4, 5]),
        ("f > 1", [2, 3]),
        ("f >= 1", [0, 2, 3]),
        ("NOT f < 1", [0, 2, 3]),
        ("NOT (f > 1 OR f = 0)", [0, 5]),
        ("f = 0", [1, 4]),
        ("f = -0.0", [1, 4]),
        ("f = 'NaN'", [2]),
        ("f <> 'nan'", [0, 1, 3, 4, 5]),
        ("f < 'NaN'", [0, 1, 3, 4, 5]),
        ("f <= 'NaN'", [0, 1, 2, 3, 4, 5]),
        ("f > 'NaN'", []),
        ("f >= 'NaN'", [2]),
        ("f = 'inf'", [3]),
        ("f > '-Infinity'", [0, 1, 2, 3, 4]),
        ("f IN (1, 'NaN')", [0, 2]),
        ("f NOT IN (1, 'NaN')", [1, 3, 4, 5]),
        ("f BETWEEN 1 AND 'NaN'", [0, 2, 3]),
        ("f NOT BETWEEN 0 AND 1", [2, 3, 5]),
        ("f IS NOT NULL", [0, 1, 2, 3, 4, 5]),
        ("f = f", [0, 1, 2, 3, 4, 5]),
        ("f < f", []),
    ],
)
@pytest.mark.parametrize("column", ["f", "f4", "f2"])
def test_nan_is_greatest_and_both_zeros_are_one(where: str, places: list[int], column: str) -> None:
    """As in the rank, Spark and DuckDB, and not as Arrow's kernels have it."""
    table = of(column, 1.0, -0.0, NAN, math.inf, 0.0, -math.inf, None)
    assert kept(re.sub(r"\bf\b", column, where), table) == places


def test_literal_takes_the_nearest_value_of_a_float_column() -> None:
    assert kept("f4 = 0.1", of("f4", 0.1)) == [0]
    assert kept("f2 = 0.1", of("f2", 0.1)) == [0]


@pytest.mark.parametrize(
    ("where", "places"),
    [  # rows: n is 1, 2, null; b is true, null, false
        ("n = 1 AND b", [0]),
        ("n = 1 OR b", [0]),
        ("NOT (n = 1 AND b)", [1, 2]),
        ("NOT (n = 1 OR b)", []),
        ("n = 2 AND NOT b", []),
        ("n = 2 OR NOT b", [1, 2]),
        ("NOT n = 1", [1]),
        ("NOT NOT n = 1", [0]),
        ("n IS NULL AND NOT b", [2]),
        ("n = 1 OR n = 2 AND b", [0]),
        ("(n = 1 OR n = 2) AND b IS NULL", [1]),
        ("NOT n = 1 AND NOT b IS NULL", []),
    ],
)
def test_condition_that_is_null_keeps_no_row(where: str, places: list[int]) -> None:
    table = of("n", 1, 2, None)
    table = table.set_column(SCHEMA.get_field_index("b"), "b", pa.array([True, None, False]))
    assert kept(where, table) == places


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("nope = 1", "there is no column 'nope'; the columns are n, small, f"),
        ("st.n = 1", "there is no column 'st.n'"),
        ("a.b = 1", "a name with a dot needs quotes"),
        ("n", "'n' is int64, not a condition by itself"),
        ("n = 1.5", "'1.5' is not a valid int64, the type of 'n'"),
        ("n = 9223372036854775808", "is not a valid int64"),
        ("small = -1", "'-1' is not a valid uint8"),
        ("n = true", "'true' is not a valid int64"),
        ("b = 1", "'1' is not a valid bool"),
        ("s < 7", "'7' is not a valid string, the type of 's'; write text in quotes"),
        ('s = "x"', "there is no column 'x'"),
        ("dec = 1.234", "'1.234' is not a valid decimal128(10, 2)"),
        ("f = 1e999", "'1e999' is not a valid double"),
        ("d = '2020-02-30'", "is not a valid date32[day]"),
        ("d = '2020-01-01 00:00:00'", "is not a valid date32[day]"),
        ("d = 20200101", "is not a valid date32[day]"),
        ("d = 2020-01-01", "dates need quotes: '2020-01-01'"),
        ("d BETWEEN '2020-01-01' AND 2020-1-2", "dates need quotes: '2020-1-2'"),
        ("n = 2020-01-01", "'2020 - 01 - 01' is not a literal"),
        ("ts = '2020-01-01 00:00:00.0000001'", "is not a valid timestamp[us]"),
        ("l = 1", "is not a valid list<item: int32>"),
        ("u = 'x'", "is not a valid extension<arrow.uuid>"),
        ("n = small", "'n' is int64 and 'small' is uint8: these types can't be compared"),
        ("l = l", "can't be compared"),
        ("n = NULL", "'NULL' is not a literal"),
        ("n IN (1, NULL)", "'NULL' is not a literal"),
        ("n IN (SELECT 1)", "not supported"),
        ("n = 1 + 1", "'1 + 1' is not a literal"),
        ("upper(s) = 'A'", "'UPPER(s)' is not a column"),
        ("s ILIKE 'a'", "not supported"),
        ("s LIKE 'a' ESCAPE '!'", "not supported"),
        ("s LIKE ANY ('a', 'b')", "not supported"),
        (r"s LIKE 'a\b'", r"`\` must stand before `%`, `_` or another `\`"),
        ("s LIKE 'a\\", "does not parse"),
        ("n LIKE '1'", "LIKE takes text, and 'n' is int64"),
        ("n BETWEEN SYMMETRIC 2 AND 1", "not supported"),
        ("n IS DISTINCT FROM 1", "not supported"),
        ("b IS TRUE", "not supported"),
        ("n = CAST('1' AS INT)", "is not a literal"),
        ("true", "not supported"),
        ("", "does not parse"),
        ("n =", "does not parse"),
        ("s = 'x", "does not parse"),
        ("n = 1; n = 2", "does not parse|not supported"),
        ("n = 1 LIMIT 5", "does not parse"),
        ("s = '\udcff'", "does not parse"),
        ("(" * 3000 + "n = 1" + ")" * 3000, "nested too deeply"),
    ],
)
def test_unsupported_condition_is_refused_with_the_reason(where: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_where(where, SCHEMA, ArrowTerms())
    assert refused.value.code == "unfit-filter"
    assert any(part in refused.value.message for part in why.split("|")), refused.value.message
    assert "IS NULL" in refused.value.next


def test_long_list_is_one_comparison_and_a_long_condition_is_refused() -> None:
    """Arrow goes through expressions by recursion: ten thousand comparisons end the process."""
    many = range(10_000)
    table = of("n", -1, 0, 9_999, 10_000, None)
    assert kept(f"n IN ({', '.join(map(str, many))})", table) == [1, 2]
    assert kept(f"n NOT IN ({', '.join(map(str, many))})", table) == [0, 3]
    assert kept(" OR ".join(f"n = {i}" for i in range(200)), table) == [1]
    for column, count in (("n", 201), ("n", 1_000)):
        with pytest.raises(ConfigurationError, match="more than 200 comparisons"):
            kept(" OR ".join(f"{column} = {i}" for i in range(count)), table)
    with pytest.raises(ConfigurationError, match="more than 200 comparisons"):
        kept(f"f IN ({', '.join(map(str, range(201)))})", table)


@pytest.mark.parametrize("field", [f for f in SCHEMA if f.name not in ("l", "st", "u")], ids=lambda f: str(f.type))
def test_in_is_the_same_as_equal_for_every_type(field: Any) -> None:
    a, b = {
        "b": ("true", "false"), "d": ("'2020-01-01'", "'2020-01-02'"), "t": ("'10:00:00'", "'11:00:00'"),
        "ts": ("'2020-01-01'", "'2020-01-02'"), "tz": ("'2020-01-01'", "'2020-01-02'"), "ns": ("'2020-01-01'", "'2020-01-02'"),
        "s": ("'a'", "'b'"), "ls": ("'a'", "'b'"), "bin": ("'a'", "'b'"), "fixed": ("'a'", "'b'"),
    }.get(field.name, ("1", "2"))  # fmt: skip
    name = '"{}"'.format(field.name.replace('"', '""'))
    values = pa.concat_arrays([convert(pa.array([x.strip("'")]), field.type)[0] for x in (a, b)])
    table = of(field.name, None, None, None)
    table = table.set_column(
        SCHEMA.get_field_index(field.name), field, pa.concat_arrays([values, pa.nulls(1, field.type)])
    )
    assert kept(f"{name} IN ({a})", table) == kept(f"{name} = {a}", table) == [0]
    assert kept(f"NOT {name} IN ({a})", table) == kept(f"{name} <> {a}", table) == [1]
    assert kept(f"{name} IN ({a}, {b})", table) == [0, 1]


@pytest.mark.parametrize(
    ("where", "prunes"),
    [
        ("n = 1", [True]),
        ("n = 1 AND (s = 'a' OR d IS NULL) AND b", [True, True, True]),
        ("n = 1 AND f > 1", [True, False]),
        ("f > 1 AND n = 1", [False, True]),
        ("n = 1 AND (s = 'a' OR NOT (b AND f2 < 1))", [True, False]),
    ],
)
def test_conjunct_with_a_float_is_never_decided_by_statistics(where: str, prunes: list[bool]) -> None:
    assert [c.prunes for c in parse_where(where, SCHEMA, ArrowTerms())] == prunes


def test_no_filter_is_no_condition() -> None:
    assert parse_where(None, SCHEMA, ArrowTerms()) == []
    assert all_of([]) is None
