"""What readers see: every type as it landed, one snapshot, the files of a filter; Arrow, Spark and DuckDB agree."""

import gc
import math
import os
import random
import struct
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert.api import Table
from lakeupsert.config import DeleteSettings, TableSettings
from lakeupsert.errors import ConfigurationError, DamagedTableError
from lakeupsert.read import arrow as reading
from lakeupsert.rows import datafiles
from tests.harness.spark import collect

DAY = date(2020, 1, 1)
NAN = math.nan


def opened(root: Path, **settings: Any) -> Table:
    given = {
        "landing": str(root / "landing"),
        "processed": str(root / "processed"),
        "key": ("k",),
        "partition_by": ("d",),
        "order_by": ("ts",),
        "quarantine_limit": "0",
    }
    return Table("t", TableSettings(**{**given, **settings}))


def nights(root: Path, *tables: Any, **settings: Any) -> Table:
    """A lake in which each of these tables came as one Parquet file in a night of its own."""
    table = opened(root, **settings)
    for number, rows in enumerate(tables):
        (root / "landing").mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, root / "landing" / f"{number}.parquet")
        table.run(host="local")
    return table


def rows(keys: Sequence[Any], columns: Mapping[str, Any] | None = None, ts: int = 1, d: Any = None) -> Any:
    """A landing table: key, partition (one for all rows, or given), ordering column, and others."""
    days = d if isinstance(d, pa.Array | list) else [d or DAY] * len(keys)
    return pa.table({"k": keys, "d": days, "ts": pa.array([ts] * len(keys), pa.int64()), **(columns or {})})


def exact(column: Any) -> Any:
    """Values that can be compared: NaN equals itself, -0.0 is not 0.0, and no moment is too far for Python."""
    if pa.types.is_temporal(column.type):
        return column.combine_chunks().view(pa.int32() if column.type.bit_width == 32 else pa.int64()).to_pylist()
    return repr(column.to_pylist())


def assert_same(found: Any, expected: Any) -> None:
    assert found.schema == expected.schema
    assert "field_id" not in found.schema.to_string(show_field_metadata=True), "metadata of ours"
    for name in expected.schema.names:
        assert exact(found[name]) == exact(expected[name]), name


# ---------------------------------------------------------------- every type

S = ["", "a", "ä", "🦆", "a\x00b", "x" * 1000]
B = [b"", b"\x00", b"\xff\xfe"]
MOMENTS = [
    datetime(1, 1, 1),
    datetime(1582, 10, 10),
    datetime(1969, 12, 31, 23, 59, 59),
    datetime(9999, 12, 31, 23, 59, 59),
]
ODD_NAN = struct.unpack("<d", b"\x01\0\0\0\0\0\xf8\xff")[0]

SIGNED, UNSIGNED = [pa.int8(), pa.int16(), pa.int32(), pa.int64()], [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]

# What Parquet holds, with the edges of each type.
VALUES: list[tuple[Any, list[Any]]] = [
    *[(t, [-(2 ** (t.bit_width - 1)), -1, 0, 2 ** (t.bit_width - 1) - 1]) for t in SIGNED],
    *[(t, [0, 1, 2**t.bit_width - 1]) for t in UNSIGNED],
    (pa.float32(), [0.0, -0.0, NAN, math.inf, -math.inf, 1e-45]),
    (pa.float64(), [0.0, -0.0, NAN, ODD_NAN, math.inf, -math.inf, 5e-324]),
    (pa.decimal32(9, 2), [Decimal("-1.50"), Decimal("9999999.99")]),
    (pa.decimal64(18, 3), [Decimal("0.000"), Decimal("-999999999999999.999")]),
    (pa.decimal128(38, 10), [Decimal("1E-10"), -Decimal(10) ** 27]),
    (pa.decimal256(76, 20), [Decimal("1E-20"), -Decimal(10) ** 55]),
    (pa.decimal256(20, 2), [Decimal("1.00")]),
    (pa.date32(), [m.date() for m in MOMENTS]),
    *[(pa.timestamp(unit), MOMENTS) for unit in ("ms", "us")],
    *[(pa.timestamp(unit, "UTC"), [m.replace(tzinfo=UTC) for m in MOMENTS]) for unit in ("ms", "us")],
    (pa.timestamp("us", "America/New_York"), [datetime(1999, 12, 31, tzinfo=UTC)]),
    (pa.timestamp("ns"), [-(2**63) + 1, -1, 0, 1, 2**63 - 1]),
    (pa.timestamp("ns", "UTC"), [-(2**63) + 1, -1, 0, 1, 2**63 - 1]),
    (pa.time32("ms"), [0, 86_399_999]),
    (pa.time64("us"), [0, 86_399_999_999]),
    (pa.time64("ns"), [0, 86_399_999_999_999]),
    *[(pa.duration(unit), [-(2**62), -1, 0, 1, 2**62]) for unit in ("s", "ms", "us", "ns")],
    (pa.bool_(), [True, False]),
    (pa.string(), S),
    (pa.large_string(), S),
    (pa.binary(), B),
    (pa.large_binary(), B),
    (pa.binary(2), [b"\0\0", b"\xff\xfe"]),
    (pa.list_(pa.int32()), [[], [1, None], [2, 3, 4]]),
    (pa.large_list(pa.string()), [[], ["a", None, ""]]),
    (pa.list_(pa.float64(), 2), [[1.0, NAN], [None, -0.0]]),
    (pa.map_(pa.string(), pa.int64()), [[], [("a", 1), ("b", None)], [("", 2)]]),
    (pa.map_(pa.int32(), pa.list_(pa.date32())), [[(1, [DAY, None]), (2, None)]]),
    (pa.struct([("x", pa.int32()), ("y", pa.binary())]), [{"x": 1, "y": b"\xff"}, {"x": None, "y": None}]),
    (
        pa.struct([("a", pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.list_(pa.decimal128(5, 2))))])))]),
        [{"a": [{"m": [("k", [Decimal("1.25"), None])]}, None, {"m": None}]}, {"a": []}, {"a": None}],
    ),
    (pa.list_(pa.list_(pa.timestamp("us", "UTC"))), [[[datetime(2020, 1, 1, tzinfo=UTC)], [], None]]),
    (pa.bool8(), [0, 1]),
]  # fmt: skip

# What Parquet or we keep under another type, with the same values: (landed, values, comes back as).
OTHERWISE: list[tuple[Any, list[Any], Any]] = [
    (pa.timestamp("s"), MOMENTS, pa.timestamp("ms")),  # Parquet has no seconds
    (pa.timestamp("s", "UTC"), [datetime(2020, 1, 1, tzinfo=UTC)], pa.timestamp("ms", "UTC")),
    (pa.time32("s"), [time(0), time(23, 59, 59)], pa.time32("ms")),
    (pa.date64(), [date(1, 1, 1), DAY], pa.date32()),  # Parquet counts days
    (pa.string_view(), S, pa.string()),
    (pa.binary_view(), B, pa.binary()),
    (pa.dictionary(pa.int8(), pa.string()), ["a", "b"], pa.string()),  # an encoding, and no type
    (pa.dictionary(pa.int32(), pa.int64()), [2**40, -1], pa.int64()),
    (pa.list_(pa.dictionary(pa.int32(), pa.string())), [["a", None], []], pa.list_(pa.string())),
    (pa.list_(pa.string_view()), [["a", None], []], pa.list_(pa.string())),
    (pa.float16(), [0.0, -0.0, NAN, math.inf, -math.inf, 65504.0], pa.float32()),  # Spark has none
    (pa.uuid(), [UUID(int=0), UUID(int=2**128 - 1)], pa.string()),
    (pa.json_(), ['{"a": [1]}', "null"], pa.string()),
]


def array(values: Sequence[Any], type_: Any) -> Any:
    if any(isinstance(one, UUID) for one in values):
        values = [one and (one.bytes if type_ == pa.uuid() else str(one)) for one in values]
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, pa.array(values, type_.storage_type))
    return pa.array(values, type_)


def cycled(values: Sequence[Any], count: int, start: int) -> list[Any]:
    all_ = [*values, None]
    return [all_[(start + i) % len(all_)] for i in range(count)]


def every_type(keys: Sequence[int], ts: int, days: Sequence[date], back: bool) -> Any:
    """A row for each key with the values of every type, and all nulls of it; ``back``: as it is to come back."""
    types = [(t, v, t) for t, v in VALUES] + OTHERWISE
    columns = {"ts": pa.array([ts] * len(keys), pa.int64())}
    for number, (landed, values, returned) in enumerate(types):
        type_ = returned if back else landed
        columns[f"v{number}"] = array(cycled(values, len(keys), keys[0] + ts), type_)
        columns[f"n{number}"] = array([None] * len(keys), type_)
        if number == 20:
            columns["d"] = pa.array(days)  # the partition column has its place in the schema too
    return pa.table({**columns, "k": pa.array(keys, pa.int32())})


def test_every_type_comes_back_as_it_landed(tmp_path: Path) -> None:
    """Through both merge paths: rows that a night creates, keeps, replaces and adds; a partition that it leaves alone."""
    days = [DAY + timedelta(days=i // 10) for i in range(20)]
    first, second = range(20), range(5, 13)
    other_days = [DAY] * 8
    lake = nights(tmp_path, every_type(first, 1, days, back=False), every_type(second, 2, other_days, back=False))
    before, after = every_type(first, 1, days, back=True), every_type(second, 2, other_days, back=True)
    expected = pa.concat_tables([before.slice(0, 5), after, before.slice(10, 10)])
    assert_same(lake.to_arrow().read_all(), expected)
    assert_same(lake.to_arrow(snapshot=0).read_all(), before)
    lake.export(tmp_path / "all.parquet")
    with pq.ParquetFile(tmp_path / "all.parquet") as file:
        assert_same(file.read(), expected)


# ---------------------------------------------------------------- schema evolution

WIDENED: list[tuple[Any, Any, list[Any], Any]] = [
    (pa.int8(), pa.int64(), [-128, 127, None], 2**40),
    (pa.uint8(), pa.int16(), [0, 255, None], -1),
    (pa.uint32(), pa.int64(), [2**32 - 1, 0, None], -1),
    (pa.int32(), pa.uint32(), [-1, 5, None], 2**32 - 1),
    (pa.float32(), pa.float64(), [0.1, NAN, None], 1e300),
    (pa.decimal128(5, 2), pa.decimal128(10, 4), [Decimal("-1.25"), Decimal("999.99"), None], Decimal("1.2345")),
    (pa.decimal128(5, 2), pa.decimal128(38, 2), [Decimal("1.25"), Decimal("0.00"), None], Decimal(10) ** 35),
    (pa.timestamp("ms"), pa.timestamp("us"), [MOMENTS[0], MOMENTS[3], None], datetime(2020, 1, 1, 0, 0, 0, 1)),
    (pa.string(), pa.large_string(), ["a", "", None], "b"),
    (pa.binary(), pa.large_binary(), [b"a", b"", None], b"b"),
]


def test_old_files_follow_the_schema_of_today(tmp_path: Path, spark: Any) -> None:
    """A column added and many widened in night 2, in another partition: what night 1 wrote reads as null and as widened."""
    narrow = {f"w{i}": pa.array(v, a) for i, (a, _, v, _) in enumerate(WIDENED)}
    wide = {f"w{i}": pa.array([v], b) for i, (_, b, _, v) in enumerate(WIDENED)}
    lake = nights(tmp_path, rows([1, 2, 3], narrow), rows([4], {**wide, "added": [7]}, d=date(2020, 1, 2)))
    found = lake.to_arrow().read_all()
    assert found["added"].to_pylist() == [None, None, None, 7]
    for i, (a, b, values, value) in enumerate(WIDENED):
        type_ = pa.int64() if (a, b) == (pa.int32(), pa.uint32()) else b
        assert found.schema.field(f"w{i}").type == type_
        expected = [*pa.array(values, a).cast(type_).to_pylist(), pa.scalar(value, type_).as_py()]
        assert repr(found[f"w{i}"].to_pylist()) == repr(expected)
        if f"w{i}" != "w4":  # NaN
            column, text = f"w{i}", str(expected[0]) if not isinstance(expected[0], bytes) else expected[0].decode()
            kept = lake.to_arrow(where=f"{column} = '{text}'").read_all()
            assert kept["k"].to_pylist() == [1], "statistics of an old file are of its own type"
    assert_same(collect(lake.to_spark(spark).orderBy("k")).cast(found.schema), found)
    assert lake.to_arrow(snapshot=0).schema.field("w0").type == pa.int8(), "an old snapshot has the schema of its time"
    assert "added" not in lake.to_arrow(snapshot=0).schema.names


# ---------------------------------------------------------------- Spark

UNFIT = [
    pa.timestamp("ns"), pa.timestamp("ns", "UTC"), pa.time32("ms"), pa.time64("us"), pa.decimal256(39, 2),
    pa.duration("us"), pa.list_(pa.time32("ms")), pa.map_(pa.string(), pa.time64("us")),
    pa.struct([("x", pa.struct([("y", pa.duration("us"))]))]),
]  # fmt: skip


def spark_values() -> list[tuple[Any, list[Any]]]:
    names = {str(t) for t in UNFIT} | {"extension<arrow.json>", "extension<arrow.bool8>"}
    beyond = {"time64[ns]", "duration[s]", "duration[ms]", "duration[ns]", "decimal256(76, 20)"}
    return [(t, v) for t, v in VALUES if str(t) not in names | beyond]


@pytest.mark.core
def test_spark_has_every_type_that_it_can_hold(tmp_path: Path, spark: Any) -> None:
    types = spark_values()
    assert len(types) > 25
    columns = {f"v{i}": array(cycled(v, 8, 0), t) for i, (t, v) in enumerate(types)}
    lake = nights(tmp_path, rows(list(range(8)), columns))
    frame, found = lake.to_spark(spark), lake.to_arrow().read_all()
    assert frame.schema.names == found.schema.names
    assert dict(frame.dtypes)[f"v{[t for t, _ in types].index(pa.uint64())}"] == "decimal(20,0)"
    back = collect(frame.orderBy("k"))
    for name in found.schema.names:
        assert exact(back[name].cast(found.schema.field(name).type)) == exact(found[name]), found.schema.field(name)


@pytest.mark.parametrize("type_", UNFIT, ids=str)
def test_column_that_spark_cannot_hold_is_named_with_its_type(type_: Any, tmp_path: Path) -> None:
    lake = nights(tmp_path, rows([1], {"my column": array([None], type_)}))
    with pytest.raises(ConfigurationError) as refused:
        lake.to_spark(None)  # no session is needed to tell
    assert refused.value.code == "unfit-for-spark"
    assert "'my column' is " in refused.value.message
    inner = {"list": "time32[ms]", "map": "time64[us]", "stru": "duration[us]"}
    assert inner.get(str(type_)[:4].rstrip("<"), str(type_)) in refused.value.message


def executed(frame: Any) -> str:
    return str(frame._jdf.queryExecution().executedPlan())


@pytest.mark.core
def test_spark_scan_is_native_and_takes_filters_and_columns_down(tmp_path: Path, spark: Any) -> None:
    days = [DAY + timedelta(days=i % 3) for i in range(9)]
    columns = {"store": [i % 2 for i in range(9)], "name": ["x"] * 9, "price": [1.5] * 9}
    lake = nights(tmp_path, rows(list(range(9)), columns, d=days))
    where = "store = 1 AND d >= '2020-01-02' AND d < '2020-01-03' AND price < 2"
    ours, theirs = lake.to_spark(spark, where=where), lake.to_spark(spark).where(where)
    for frame in (ours, theirs):
        selected = frame.select("k", "store")
        plan = executed(selected)
        assert "EqualTo(store,1)" in plan.split("PushedFilters: ")[1].split("\n")[0], plan
        assert "LessThan(price,2.0)" in plan
        assert "d#" in plan.split("PartitionFilters: ")[1].split("PushedFilters")[0], plan
        assert "ReadSchema: struct<k:bigint,store:bigint,price:double>" in plan
        assert "FileScan parquet" in plan
        assert "Python" not in plan
        assert sorted(r.k for r in selected.collect()) == [1, 7]
    assert [len(frame.inputFiles()) for frame in (ours, theirs)] == [1, 3]


@pytest.mark.parametrize("state", ["nothing published", "all rows deleted", "nothing in the filter"])
def test_table_without_rows_keeps_its_schema_in_every_reader(state: str, tmp_path: Path, spark: Any) -> None:
    columns = {
        "op": ["D"],
        "z": pa.array([None], pa.timestamp("us", "UTC")),
        "l": pa.array([None], pa.list_(pa.int8())),
    }
    lake = opened(tmp_path, delete=DeleteSettings(column="op", values=("D",)))
    (tmp_path / "landing").mkdir()
    if state == "nothing in the filter":
        columns["op"] = ["U"]
    pq.write_table(rows([1], columns), tmp_path / "landing" / "a.parquet")
    if state == "nothing published":
        lake.append(host="local")
    else:
        lake.run(host="local")
    where = "d = '1999-01-01'" if state == "nothing in the filter" else None
    schema = pa.schema(
        {"k": pa.int64(), "d": pa.date32(), "ts": pa.int64(), "z": pa.timestamp("us", "UTC"), "l": pa.list_(pa.int8())}
    )
    found = lake.to_arrow(where=where).read_all()
    assert (found.num_rows, found.schema) == (0, schema)
    assert list(lake.files(where=where)) == []
    frame = lake.to_spark(spark, where=where)
    assert frame.dtypes == [
        ("k", "bigint"),
        ("d", "date"),
        ("ts", "bigint"),
        ("z", "timestamp"),
        ("l", "array<tinyint>"),
    ]
    assert all(field.nullable for field in frame.schema)
    assert frame.where("k > 1").collect() == []
    assert "Python" not in executed(frame)
    for read in (lake.to_arrow, lake.files):
        with pytest.raises(ConfigurationError, match="no column 'nope'"):
            read(where="nope = 1")
    with pytest.raises(ConfigurationError, match="no column 'nope'"):
        lake.to_spark(spark, where="nope = 1")


def test_spark_session_with_other_settings_reads_the_same(tmp_path: Path, spark: Any) -> None:
    """Literals have the column's type whatever the session's zone is, and a missing file is an error."""
    stamps = pa.array([datetime(2020, 1, 1, h, tzinfo=UTC) for h in range(24)], pa.timestamp("us", "UTC"))
    lake = nights(tmp_path, rows(list(range(24)), {"z": stamps, "n": stamps.cast(pa.timestamp("us"))}))
    settings = {
        "spark.sql.session.timeZone": "Asia/Tokyo",
        "spark.sql.ansi.enabled": "false",
        "spark.sql.files.ignoreMissingFiles": "true",
    }
    before = {name: spark.conf.get(name) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        for column in ("z", "n"):
            where = f"{column} >= '2020-01-01 22:00:00'"
            assert sorted(r.k for r in lake.to_spark(spark, where=where).select("k").collect()) == [22, 23]
        frame = lake.to_spark(spark)
        Path(lake.files()[0].path).unlink()
        with pytest.raises(Exception, match=r"FILE_NOT_EXIST|does not exist"):
            frame.collect()
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


# ---------------------------------------------------------------- names and partition values

TEXTS = [
    "a/b", "100%", "%2F", "x y", " lead", "trail ", "🦆", "é", "e\u0301", "'q'", '"dq"', "new\nline", "tab\t", "..", ".", "a=b",
    "a,b", "{x}", "[y]", "a*b?", "a:b", "#h", "back\\slash", "a+b", "a&b;c", "null", "true", "1e5", "007", "2020-01-01", "_x",
    ".x", "\x7f", "x" * 150,
]  # fmt: skip


def hive_rows(files: str | list[str], columns: str, **types: str) -> list[Any]:
    """What DuckDB finds in files under Hive-style paths, with these types of the partition columns; sorted."""
    given = ", ".join(f"{name}: {type_}" for name, type_ in types.items())
    sql = f"SELECT {columns} FROM read_parquet(?, hive_partitioning = true, hive_types = {{{given}}})"
    return sorted(duckdb.execute(sql, [files]).fetchall())


@pytest.mark.parametrize("root", ["plain", "r b[c]{d}*?%41#é,x\\y"])
def test_partition_values_are_the_same_to_every_reader(root: str, tmp_path: Path, spark: Any) -> None:
    lake = nights(tmp_path / root, rows(list(range(len(TEXTS))), {"text": TEXTS}, d=TEXTS))
    expected = sorted(enumerate(TEXTS))
    found = lake.to_arrow().read_all()
    assert found["d"].equals(found["text"])
    assert sorted(zip(found["k"].to_pylist(), found["d"].to_pylist(), strict=True)) == expected
    assert found["d"].to_pylist() == sorted(TEXTS)
    frame = lake.to_spark(spark)
    assert sorted((r.k, r.d) for r in frame.select("k", "d").collect()) == expected
    for text in ("a/b", "%2F", "'q'", "new\nline", "🦆"):
        quoted = "d = '{}'".format(text.replace("'", "''"))
        assert [f.rows for f in lake.files(where=quoted)] == [1]
        assert lake.to_arrow(where=quoted).read_all()["d"].to_pylist() == [text]
    assert [r.d for r in lake.to_spark(spark, where=quoted).collect()] == [text]
    lake.export(f"{tmp_path}/hive/")
    hive = spark.read.schema(frame.schema).parquet(f"{tmp_path}/hive")
    assert sorted((r.k, r.d) for r in hive.select("k", "d").collect()) == expected
    assert hive_rows(f"{tmp_path}/hive/*/*.parquet", "k, d", d="VARCHAR") == expected
    if root == "plain":  # DuckDB takes a root with brackets for a pattern
        assert hive_rows([f.path for f in lake.files()], "k, d", d="VARCHAR") == expected


@pytest.mark.parametrize(
    ("values", "type_", "sql"),
    [
        ([date(1, 1, 1), date(1582, 10, 10), DAY, date(9999, 12, 31)], pa.date32(), "DATE"),
        ([-(2**63), -1, 0, 2**63 - 1], pa.int64(), "BIGINT"),
        ([False, True], pa.bool_(), "BOOLEAN"),
    ],
)
def test_partition_values_of_other_types_too(
    values: list[Any], type_: Any, sql: str, tmp_path: Path, spark: Any
) -> None:
    lake = nights(tmp_path, rows(list(range(len(values))), d=pa.array(values, type_)))
    expected = list(enumerate(values))
    assert [(r["k"], r["d"]) for r in lake.to_arrow().read_all().to_pylist()] == expected
    assert sorted((r["k"], r["d"]) for r in collect(lake.to_spark(spark)).to_pylist()) == expected
    assert hive_rows([f.path for f in lake.files()], "k, d", d=sql) == expected
    lake.export(f"{tmp_path}/hive/")
    assert hive_rows(f"{tmp_path}/hive/*/*.parquet", "k, d", d=sql) == expected
    hive = spark.read.schema(lake.to_spark(spark).schema).parquet(f"{tmp_path}/hive")
    assert sorted((r["k"], r["d"]) for r in collect(hive).to_pylist()) == expected
    last = str(values[-1]).lower()
    for found in (
        lake.to_arrow(where=f"d = '{last}'").read_all(),
        collect(lake.to_spark(spark, where=f"d = '{last}'")),
    ):
        assert found["d"].to_pylist() == [values[-1]]


def test_column_names_may_hold_anything(tmp_path: Path, spark: Any) -> None:
    names = ["a.b", "a`b", "a b", "(x)", "n\nl", 'q"q', "ü", "t,s;", "=", "_u", "select"]
    columns = {name: pa.array([i, i + 1, i + 2]) for i, name in enumerate(names)}
    columns = {"my key.": [1, 2, 3], "the `d` =%": [DAY, DAY, date(2020, 1, 2)], "t.s": [1, 1, 1], **columns}
    roles = {"key": ("my key.",), "partition_by": ("the `d` =%",), "order_by": ("t.s",)}
    lake = nights(tmp_path, pa.table(columns), **roles)
    found = lake.to_arrow().read_all()
    assert found.schema.names == ["my key.", "the `d` =%", "t.s", *names]
    assert_same(collect(lake.to_spark(spark)).sort_by("my key."), found)
    where = '`my key.` >= 2 AND "a`b" = 2 AND `the ``d`` =%` = \'2020-01-01\' AND "select" = 11'
    for kept in (lake.to_arrow(where=where).read_all(), collect(lake.to_spark(spark, where=where))):
        assert_same(kept, found.slice(1, 1))


# ---------------------------------------------------------------- files and snapshots


def test_files_are_what_is_on_disk_and_together_the_table(tmp_path: Path) -> None:
    days = [DAY + timedelta(days=i % 5) for i in range(50)]
    one = rows(list(range(50)), {"v": list(range(50))}, d=days)
    lake = nights(tmp_path, one, one.slice(3, 4).set_column(2, "ts", pa.array([2] * 4)))
    files = lake.files()
    assert [f.partition for f in files] == [f"d=2020-01-0{i}" for i in range(1, 6)]
    for file in files:
        assert file.bytes == Path(file.path).stat().st_size
        assert file.rows == pq.read_metadata(file.path).num_rows == 10
        assert Path(file.path) == tmp_path / "processed" / file.name
        assert file.uri == Path(file.path).as_uri()
    found = lake.to_arrow().read_all()
    expected = list(zip(*(column.to_pylist() for column in found.columns), strict=True))
    assert hive_rows([f.path for f in files], "k, d, ts, v", d="DATE") == sorted(expected)
    assert duckdb.from_arrow(lake.to_arrow()).aggregate("count(*), sum(v)").fetchall() == [(50, 1225)]


def test_reader_opened_before_a_publish_reads_the_old_rows_to_the_end(tmp_path: Path, spark: Any) -> None:
    days = [DAY + timedelta(days=i) for i in range(4)]
    lake = nights(tmp_path, rows([1, 2, 3, 4], {"v": ["old"] * 4}, d=days))
    reader, frame, view = lake.to_arrow(), lake.to_spark(spark), lake.view()
    begun = reader.read_next_batch()
    pq.write_table(rows([1, 2, 3, 4], {"v": ["new"] * 4}, ts=2, d=days), tmp_path / "landing" / "next.parquet")
    lake.run(host="local")
    assert lake.to_arrow().read_all()["v"].to_pylist() == ["new"] * 4
    assert begun["v"].to_pylist() + reader.read_all()["v"].to_pylist() == ["old"] * 4
    assert [r.v for r in frame.collect()] == ["old"] * 4
    assert [f.rows for f in view.files()] == [1] * 4


def test_snapshot_is_chosen_by_number_and_by_time(tmp_path: Path) -> None:
    lake = nights(tmp_path, *[rows([1], {"v": [n]}, ts=n) for n in range(3)])
    first, second, third = [datetime.fromisoformat(s.written_at) for s in lake.snapshots()[::-1]]
    moment = timedelta(microseconds=1)
    chosen = {
        0: 0, "1": 1, 2: 2, "published": 2, first: 0, second: 1, second - moment: 0, third + moment: 2,
        second.isoformat(): 1, second.replace(tzinfo=None): 1, second.replace(tzinfo=None).isoformat(): 1,
        second.astimezone().isoformat(): 1, "9999-12-31": 2,
    }  # fmt: skip
    for snapshot, number in chosen.items():
        assert lake.view(snapshot).number == number, snapshot
        assert lake.to_arrow(snapshot).read_all()["v"].to_pylist() == [number]


@pytest.mark.parametrize("snapshot", ["nonsense", "", "0_0", "-1", "3", 3, -1, "2019-12-31", datetime(1, 1, 1)])
@pytest.mark.parametrize("published", [True, False])
def test_snapshot_that_is_not_there_is_refused(snapshot: Any, published: bool, tmp_path: Path) -> None:
    lake = nights(tmp_path, rows([1]))
    if not published:
        for file in (tmp_path / "processed/_lakeupsert/snapshots").iterdir():
            file.unlink()
    for read in (lake.to_arrow, lake.files, lake.view):
        with pytest.raises(ConfigurationError) as refused:
            read(snapshot)
        assert refused.value.code == "unknown-snapshot"
    assert ("published" if snapshot in ("nonsense", "", "0_0") else "snapshot") in str(refused.value)


def test_time_is_answered_where_snapshots_in_between_are_trimmed(tmp_path: Path) -> None:
    """Tagged ones outlive those after them; which was the newest then is known only where the next one is there, too."""
    lake = nights(tmp_path, *(rows([night]) for night in range(5)))
    lake.tag("audit", 1)
    chain = lake.objects.snapshots
    at = {link.number: link.written_at for link in chain.between(-1, 4)}
    for number in (2, 3):
        (tmp_path / "processed" / chain.name(number)).unlink()
    assert [lake.view(at[number]).number for number in (0, 4)] == [0, 4]
    with pytest.raises(
        ConfigurationError, match="2 to 3 are expired and gone; the nearest before them is 1, tagged 'audit'"
    ):
        lake.view(at[3])


def test_spark_finds_a_damaged_page(spark: Any, tmp_path: Path) -> None:
    """The last byte of a column's only page: without its checksum Spark shows another value."""
    table = nights(tmp_path, rows(["a", "b"], {"v": pa.array([1.5, 2.5])}))
    [file] = table.files()
    chunks = pq.ParquetFile(file.path).metadata.row_group(0)
    [v] = [c for c in map(chunks.column, range(chunks.num_columns)) if c.path_in_schema == "v"]
    data = bytearray(Path(file.path).read_bytes())
    data[v.data_page_offset + v.total_compressed_size - 3] ^= 1
    Path(file.path).write_bytes(data)
    with pytest.raises(Exception, match=r"(?s)verify|CRC|checksum"):
        table.to_spark(spark).collect()


def test_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    lake = nights(tmp_path, rows([1, 2], d=[DAY, date(2020, 1, 2)]))
    path = Path(lake.files()[1].path)
    content = path.read_bytes()
    for damage in (path.unlink, lambda: path.write_bytes(content[: len(content) // 2])):
        damage()
        with pytest.raises(DamagedTableError) as damaged:
            lake.to_arrow().read_all()
        assert damaged.value.partition == "d=2020-01-02"
        assert path.as_uri() in damaged.value.message
        assert lake.to_arrow(where="d = '2020-01-01'").read_all().num_rows == 1


# ---------------------------------------------------------------- what is opened and held


def test_filter_on_the_partition_opens_its_manifest_and_file_alone(tmp_path: Path) -> None:
    days = [DAY + timedelta(days=i) for i in range(20)]
    lake = nights(tmp_path, rows(list(range(20)), d=days))

    def gets(where: str | None) -> int:
        before = lake.requests["get"]
        lake.to_arrow(where=where).read_all()
        return lake.requests["get"] - before

    everything = gets(None)
    for where, partitions in {
        "d = '2020-01-05'": 1,
        "d IN ('2020-01-05', '2020-01-06') AND k > 0": 2,
        "d < '2020-01-05' OR d IS NULL": 4,
        "NOT (d <> '2020-01-05')": 1,
        "k = 4 AND (d = '2020-01-05' OR d = '1999-01-01')": 1,
        "d BETWEEN '2020-01-19' AND '2030-01-01'": 2,
        "d > '2030-01-01'": 0,
    }.items():
        assert everything - gets(where) == 2 * (20 - partitions), where


def test_filter_on_any_column_opens_the_files_that_may_have_such_rows(tmp_path: Path) -> None:
    """All others are deleted here."""
    days = [DAY + timedelta(days=i) for i in range(20)]
    column = {"v": pa.array([f"{i:02}" for i in range(20)]), "n": pa.array([None, *range(19)], pa.int64())}
    lake = nights(tmp_path, rows(list(range(20)), column, d=days))
    everything = lake.files()
    before = lake.requests["get"]
    lake.to_arrow().read_all()
    gets = lake.requests["get"] - before
    wanted = {
        "k = 3 OR d = '2020-01-05'": [3, 4],
        "v = '03'": [3],
        "v LIKE '1%' AND k < 12": [10, 11],
        "n IS NULL": [0],
        "v IN ('01', '17') OR n > 17": [1, 17, 19],
        "NOT (v >= '02')": [0, 1],
    }
    listed = {where: lake.files(where=where) for where in wanted}
    for where, keys in wanted.items():
        before = lake.requests["get"]
        assert lake.to_arrow(where=where).read_all()["k"].to_pylist() == keys
        assert gets - (lake.requests["get"] - before) == len(everything) - len(keys), where
    (kept,) = listed["v = '03'"]
    for file in everything:
        if file.name != kept.name:
            Path(file.path).unlink()
    assert lake.to_pandas(where="v = '03'")["k"].tolist() == [3]
    assert lake.export(tmp_path / "out.csv", where="v = '03'") == 1
    assert lake.export(f"{tmp_path}/out/", where="v = '03'") == 1


def scattered(count: int) -> Any:
    return pa.array(random.Random(0).sample(range(2**62), count), pa.int64())


def test_filter_on_the_key_reads_only_its_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datafiles, "ROW_GROUP_BYTES", 400_000)
    lake = nights(tmp_path, rows(list(range(200_000)), {"v": scattered(200_000)}))
    path = Path(lake.files()[0].path)
    footer = pq.read_metadata(path)
    assert footer.num_row_groups > 5
    data = bytearray(path.read_bytes())
    for i in range(2, footer.num_row_groups):  # the second one's first block ends the first row group
        for j in range(footer.num_columns):
            chunk = footer.row_group(i).column(j)
            at = chunk.dictionary_page_offset or chunk.data_page_offset
            data[at : at + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(data)
    assert lake.to_arrow(where="k = 7 AND v > 0").read_all()["k"].to_pylist() == [7]
    assert lake.to_arrow(where="k < 100").read_all().num_rows == 100
    with pytest.raises(DamagedTableError, match="can't be read"):
        lake.to_arrow(where="v > 0").read_all()


def test_reader_holds_some_row_groups_and_not_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datafiles, "ROW_GROUP_BYTES", 100_000)
    lake = nights(tmp_path, rows(list(range(300_000)), {"v": scattered(300_000)}))
    size = lake.files()[0].bytes
    assert size > 2_500_000
    before, most, count = pa.total_allocated_bytes(), 0, 0
    for batch in lake.to_arrow():
        most, count = max(most, pa.total_allocated_bytes() - before), count + batch.num_rows
    assert count == 300_000
    # Four of 74 row groups on an idle machine, eight on a busy one: threads let go of them late.
    assert most < size / 3, f"{most} bytes held of a file of {size}"


def open_files(root: Path) -> list[str]:
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return [name for name in links if name.startswith(str(root)) and "/base-" in name]


@pytest.mark.few(2)
@pytest.mark.parametrize("columns", [None, ["v"], ["d", "v"], ["d"]])
@pytest.mark.parametrize("where", [None, "v < 1000"])
def test_rows_come_in_order_with_the_values_of_their_partition(
    columns: list[str] | None, where: str | None, tmp_path: Path
) -> None:
    """Ten rows a day, of which the second night changed every third."""
    keys = list(range(100))
    first = rows(keys, {"v": keys}, d=[DAY + timedelta(days=key // 10) for key in keys])
    then = first.take(pa.array(keys[::3])).set_column(2, "ts", pa.array([2] * len(keys[::3]), pa.int64()))
    then = then.set_column(3, "v", pa.array([1000 + key for key in keys[::3]], pa.int64()))
    lake = nights(tmp_path, first, then, strategy="delta")
    expected = [
        {"k": key, "d": DAY + timedelta(days=key // 10), "ts": 1 + (key % 3 == 0), "v": key + 1000 * (key % 3 == 0)}
        for key in keys
        if where is None or key % 3
    ]
    found = lake.to_arrow(where=where, columns=columns).read_all().to_pylist()
    assert found == [{name: row[name] for name in columns or row} for row in expected]


def test_reader_that_is_dropped_midway_closes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datafiles, "ROW_GROUP_BYTES", 20_000)
    lake = nights(tmp_path, rows(list(range(20_000)), {"v": scattered(20_000)}))

    reader = lake.to_arrow()
    reader.read_next_batch()
    assert len(open_files(tmp_path)) == 1
    del reader
    gc.collect()
    assert open_files(tmp_path) == []
    with lake.to_arrow() as reader:
        reader.read_next_batch()
    del reader
    gc.collect()
    assert open_files(tmp_path) == []


# ---------------------------------------------------------------- readers agree

COLUMNS: dict[str, tuple[Any, list[Any]]] = {
    "i": (pa.int32(), [-5, 0, 1, 2, 2**31 - 1]),
    "u": (pa.uint16(), [0, 1, 65535]),
    "f": (pa.float64(), [-math.inf, -1.5, -0.0, 0.0, 0.1, 5.0, 7.0, math.inf, NAN]),
    "g": (pa.float32(), [0.1, 5.0, NAN]),
    "dec": (pa.decimal128(10, 2), [Decimal("-1.50"), Decimal("0.00"), Decimal("0.10"), Decimal("5.00")]),
    "s": (pa.string(), ["", "a", "ab", "B", "it's", "ä", "a%b", "5"]),
    "b": (pa.bool_(), [True, False]),
    "day": (pa.date32(), [date(1, 1, 1), DAY, date(9999, 12, 31)]),
    "moment": (pa.timestamp("us"), [datetime(1, 1, 1), datetime(2020, 1, 1, 0, 0, 0, 1), datetime(9999, 12, 31)]),
    "z": (pa.timestamp("us", "UTC"), [datetime(1900, 1, 1, tzinfo=UTC), datetime(2020, 1, 1, tzinfo=UTC)]),
    "d": (pa.date32(), [DAY + timedelta(days=i) for i in range(12)]),
}


def literal(rng: random.Random, name: str) -> str:
    value = rng.choice(COLUMNS[name][1])
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | Decimal) or (isinstance(value, float) and math.isfinite(value)):
        return str(value)
    text = value.replace(tzinfo=None).isoformat(sep=" ") if isinstance(value, datetime) else str(value)
    return "'{}'".format(text.replace("'", "''"))


def condition(rng: random.Random, depth: int = 3) -> str:
    if depth and rng.random() < 0.6:
        kind = rng.choice(["AND", "OR", "AND", "OR", "NOT"])
        if kind == "NOT":
            return f"NOT ({condition(rng, depth - 1)})"
        return f"({condition(rng, depth - 1)} {kind} {condition(rng, depth - 1)})"
    name = rng.choice(list(COLUMNS))
    spelled = rng.choice([name, name.upper(), f'"{name}"'])
    kind = rng.choice(["compare"] * 4 + ["in", "between", "null", "like", "bool", "column"])
    negated = rng.choice(["", "NOT "])
    if kind == "in":
        return f"{spelled} {negated}IN ({', '.join(literal(rng, name) for _ in range(rng.randint(1, 3)))})"
    if kind == "between":
        return f"{spelled} {negated}BETWEEN {literal(rng, name)} AND {literal(rng, name)}"
    if kind == "null":
        return f"{spelled} IS {negated}NULL"
    if kind == "like":
        return f"s {negated}LIKE '{rng.choice(['a%', '%b', '_', '%', '', 'a_', 'its'])}'"
    if kind == "bool":
        return f"{negated}b"
    sign = rng.choice(["=", "<>", "<", "<=", ">", ">="])
    if kind == "column":
        return rng.choice([f"day {sign} d", f"f {sign} f"])
    return rng.choice([f"{spelled} {sign} {literal(rng, name)}", f"{literal(rng, name)} {sign} {spelled}"])


@pytest.mark.long
def test_readers_agree_on_generated_conditions(tmp_path: Path, spark: Any) -> None:
    """Partitions of one to six rows: then a file's least and greatest value say much, and all about NaN that can be wrong."""
    rng = random.Random(5)
    count = 40
    columns = {
        n: pa.array([rng.choice([*v, None]) for _ in range(count)], t) for n, (t, v) in COLUMNS.items() if n != "d"
    }
    days = [rng.choice(COLUMNS["d"][1]) for _ in range(count)]
    lake = nights(tmp_path, rows(list(range(count)), columns, d=days))
    with duckdb.connect() as db:
        db.execute("SET TimeZone = 'UTC'")
        db.register("landed", rows(list(range(count)), columns, d=days))
        # A table of its own, whose NaN is right; its scans of Arrow and of Parquet have it otherwise.
        db.execute("CREATE TABLE t AS FROM landed")
        kept: list[int] = []
        for number in range(150):
            where = condition(rng)
            expected = [k for (k,) in db.execute(f"SELECT k FROM t WHERE {where} ORDER BY k").fetchall()]
            assert sorted(lake.to_arrow(where=where).read_all()["k"].to_pylist()) == expected, where
            if number % 12 == 0:  # a Spark job each
                found = lake.to_spark(spark, where=where).select("k").collect()
                assert sorted(r.k for r in found) == expected, where
            kept.append(len(expected))
    assert len({*kept}) > 20, "the generator makes too few kinds of conditions"


def test_nan_behind_the_greatest_value_of_a_file_is_found(tmp_path: Path, spark: Any) -> None:
    """pyarrow's statistics leave NaN out, and Arrow, Spark and DuckDB then skip row groups that hold rows of the answer."""
    values = [[5.0, NAN], [5.0, 7.0, NAN], [NAN], [5.0], [5.0, None, NAN]]
    days = [DAY + timedelta(days=i) for i, group in enumerate(values) for _ in group]
    numbers = [v for group in values for v in group]
    lake = nights(tmp_path, rows(list(range(len(numbers))), {"f": pa.array(numbers, pa.float64())}, d=days))
    nan = [i for i, v in enumerate(numbers) if v is not None and v != v]
    five, seven, null = [i for i, v in enumerate(numbers) if v == 5], [numbers.index(7.0)], [numbers.index(None)]
    for where, kept in {
        "f > 8": nan,
        "f >= 8": nan,
        "NOT f < 8": nan,
        "f = 'NaN'": nan,
        "f <> 'NaN'": five + seven,
        "f <> 5": seven + nan,
        "f NOT IN (5, 7)": nan,
        "f = 5": five,
        "f <= 7": five + seven,
        "f IS NULL OR f > 6": seven + nan + null,
    }.items():
        assert lake.to_arrow(where=where).read_all()["k"].to_pylist() == sorted(kept), where
        assert sorted(r.k for r in lake.to_spark(spark, where=where).collect()) == sorted(kept), where


def test_rows_come_ordered_by_partition_and_key(tmp_path: Path) -> None:
    numbers = list(range(100))
    days = [DAY + timedelta(days=-(n % 10)) for n in numbers]
    lake = nights(tmp_path, rows(numbers[::-1], d=days[::-1]), rows(numbers[::3], d=days[::3], ts=2))
    found = lake.to_arrow().read_all()
    assert found.num_rows == 100
    assert found.equals(found.sort_by([("d", "ascending"), ("k", "ascending")]))


@pytest.mark.parametrize("most", [0, 1 << 16], ids=["in turns", "sorted"])
def test_deltas_are_worked_into_the_order(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "RUN_ROWS", most)
    changes = {1: range(0, 3000, 10), 2: range(0, 1500, 5), 3: range(0, 2970, 30)}
    days = {k: DAY + timedelta(days=k % 3) for keys in changes.values() for k in keys}
    landed = [rows(ks, {"v": [k * (-1) ** ts for k in ks]}, ts, [days[k] for k in ks]) for ts, ks in changes.items()]
    lake = nights(tmp_path, *landed, strategy="delta")
    assert sum(bool(file.superseded) for file in lake.files()) >= 4
    whole = lake.to_arrow().read_all()
    newest = {k: k * (-1) ** ts for ts, ks in changes.items() for k in ks}
    assert [(row["k"], row["d"], row["v"]) for row in whole.to_pylist()] == sorted(
        ((k, days[k], v) for k, v in newest.items()), key=lambda one: (one[1], one[0])
    )
    assert lake.to_arrow(columns=["v"]).read_all()["v"].equals(whole["v"])
    for where in ("v < -100", "k > 400 AND v >= 0"):
        found = duckdb.arrow(whole).filter(where).fetchall()
        assert [tuple(row.values()) for row in lake.to_arrow(where=where).read_all().to_pylist()] == found
