"""Which columns of a file have statistics, and that no value is beyond their bounds."""

import json
import math
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from lakeupsert.publishers.delta_stats import DeltaStats
from lakeupsert.rows import datafiles
from lakeupsert.rows.filewriter import DataFileWriter, Footer
from lakeupsert.rows.statistics import columns_with_statistics
from lakeupsert.storage import LocalStore
from lakeupsert.table.evolution import evolve, rename
from lakeupsert.table.manifest import Bound, ColumnStatistics, DataFile
from lakeupsert.table.spec import TableSpec
from tests.harness.specs import create

HIGHEST = "\U0010ffff"


def spec_of(columns: pa.Schema) -> TableSpec:
    keys = pa.schema([("p", pa.date32()), ("k", pa.string()), ("ts", pa.int64())])
    schema = pa.schema([*columns, *keys])
    return create(schema, table_id="t", key=("k",), order_by=("ts",), partition_by=("p",), delete=None, stamped=False)


def written(tmp_path: Path, values: pa.Array, groups: int = 1) -> ColumnStatistics:
    """The statistics of a column, behind a nested one, of a file to which the rows are written in so many parts."""
    spec = spec_of(pa.schema([("nested", pa.struct([("a", pa.int64()), ("b", pa.int64())])), ("x", values.type)]))
    count = len(values)
    rows = pa.table(
        {
            "nested": pa.array([{"a": -9, "b": 9}] * count, spec.schema.field("nested").type),
            "x": values,
            "k": [str(number) for number in range(count)],
            "ts": pa.array(range(count), pa.int64()),
        }
    )
    columns = columns_with_statistics(spec, 1)
    footer = Footer("t", "base", "1", 0)
    with DataFileWriter(
        LocalStore(tmp_path), lambda: "x.parquet", spec.base_schema, footer, ("k",), statistics=columns
    ) as out:
        for number in range(groups):
            out.write(rows.slice(number * count // groups, count // groups))
    (file,) = out.files
    assert file.rows == count
    own = [one for one in file.statistics if one.id == id_of(spec, "x")]
    return own[0] if own else ColumnStatistics(0, 0)


def id_of(spec: TableSpec, name: str) -> int:
    return next(field.id for field in spec.fields if field.name == name)


LOW, HIGH = datetime(1969, 12, 31, 23, 59, 59, 999_999), datetime(2020, 1, 1)
US = 1_577_836_800_000_000


@pytest.mark.parametrize(
    ("values", "nulls", "least", "greatest"),
    [
        (pa.array([3, None, -2], pa.int8()), 1, -2, 3),
        (pa.array([2**64 - 1, 5], pa.uint64()), 0, 5, 2**64 - 1),
        (pa.array([True, None, False]), 1, False, True),
        (pa.array([date(1969, 12, 31), date(1, 1, 1)]), 0, -719162, -1),
        (pa.array([LOW, HIGH], pa.timestamp("us")), 0, -1, US),
        (pa.array([LOW, HIGH], pa.timestamp("us", "America/New_York")), 0, -1, US),
        (pa.array([-1, 1], pa.timestamp("s")), 0, -1_000_000, 1_000_000),
        (pa.array([-1, 1], pa.timestamp("ms")), 0, -1000, 1000),
        (pa.array([-1, 1], pa.timestamp("ns")), 0, -1, 1),
        (pa.array([-(2**62), 2**62], pa.timestamp("ms")), 0, None, None),
        (pa.array([-(2**62), 2**62], pa.timestamp("us")), 0, -(2**62), 2**62),
        (pa.array([Decimal("-0.10"), Decimal("1.00")], pa.decimal128(5, 2)), 0, "-0.10", "1.00"),
        (pa.array([Decimal("-1E+3"), Decimal("2.5")], pa.decimal32(7, 1)), 0, "-1000.0", "2.5"),
        (pa.array([Decimal(10) ** 50, None], pa.decimal256(60, 2)), 1, f"1{'0' * 50}.00", f"1{'0' * 50}.00"),
        (pa.array(["b", "", None]), 1, "", "b"),
        (pa.array(["\uffee", "🦆"]), 0, "\uffee", "🦆"),
        (pa.array(["a" * 33, "b" * 40], pa.large_string()), 0, "a" * 32, "b" * 31 + "c"),
        (pa.array(["a" * 32]), 0, "a" * 32, "a" * 32),
        (pa.array(["a" + HIGHEST * 40]), 0, "a" + HIGHEST * 31, "b"),
        (pa.array([HIGHEST * 40]), 0, HIGHEST * 32, None),
        (pa.array(["\ud7ff" * 33]), 0, "\ud7ff" * 32, "\ud7ff" * 31 + "\ue000"),
        (pa.array(["a", "b" * 5000]), 0, None, None),  # Parquet has none then
        (pa.array([b"a", b"\xff"]).cast(pa.string(), safe=False), 0, None, None),
        (pa.array([None, None], pa.string()), 2, None, None),
    ],
    ids=repr,
)
def test_bounds_of_every_type(tmp_path: Path, values: pa.Array, nulls: int, least: Bound, greatest: Bound) -> None:
    found = written(tmp_path, values)
    assert (found.nulls, found.least, found.greatest) == (nulls, least, greatest)
    assert type(found.least) is type(least)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1.0, math.nan]),
        pa.array([1.0], pa.float32()),
        pa.array([b"a"]),
        pa.array([[1]]),
        pa.array([1], pa.time64("us")),
        pa.array([1], pa.duration("us")),
    ],
    ids=lambda values: str(values.type),
)
def test_types_without_statistics(tmp_path: Path, values: pa.Array) -> None:
    assert written(tmp_path, values).id == 0


def test_row_groups_are_taken_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them has nulls alone."""
    monkeypatch.setattr(datafiles, "ROW_GROUP_BYTES", 1)
    values = pa.array([None, None, 5, 1, 9, None], pa.int64())
    found = written(tmp_path, values, groups=3)
    assert (found.nulls, found.least, found.greatest) == (3, 1, 9)
    unknown = written(tmp_path / "other", pa.array(["a", "b" * 5000]), groups=2)
    assert (unknown.nulls, unknown.least, unknown.greatest) == (0, None, None)


def test_key_and_order_come_first_and_many_buckets_have_few_columns() -> None:
    spec = spec_of(pa.schema([(f"c{number}", pa.int64()) for number in range(60)]))
    names = {field.id: field.name for field in spec.fields}

    def chosen(bits: int) -> list[str]:
        return [names[column.id] for column in columns_with_statistics(spec, 1 << bits)]

    assert chosen(0) == ["k", "ts", *(f"c{number}" for number in range(30))]
    assert [len(chosen(bits)) for bits in (4, 5, 7, 9, 10, 32)] == [32, 16, 4, 1, 0, 0]
    assert chosen(8) == ["k", "ts"]


def test_statistics_are_in_no_file_that_nobody_filters(tmp_path: Path) -> None:
    schema = pa.schema([("k", pa.int64())])
    with DataFileWriter(LocalStore(tmp_path), lambda: "x", schema, Footer("t", "history", "1", 0), ()) as out:
        out.write(pa.table({"k": [1]}))
    assert out.files[0].statistics == ()
    assert b"statistics" not in msgspec.json.encode(out.files[0])


def delta_stats(type_: pa.DataType, least: Bound, greatest: Bound, naive_time: Any = "timestamp_ntz") -> dict[str, Any]:
    spec = spec_of(pa.schema([("x", type_)]))
    one = ColumnStatistics(id_of(spec, "x"), 1, least, greatest)
    gone = ColumnStatistics(1000, 0, 1, 2)
    file = DataFile(name="f", rows=3, bytes=1, statistics=(one, gone))
    found: dict[str, Any] = json.loads(DeltaStats.of(spec, naive_time).text(file), parse_float=Decimal)
    assert found.pop("numRecords") == 3
    assert found.pop("nullCount") == {"x": 1}
    return found


@pytest.mark.parametrize(
    ("type_", "bounds", "shown"),
    [
        (pa.int64(), (-(2**63), 2**63 - 1), (-(2**63), 2**63 - 1)),
        (pa.bool_(), (False, True), (None, None)),
        (pa.date32(), (-1, 2932896), ("1969-12-31", "9999-12-31")),
        (pa.date32(), (-719163, 2932897), (None, None)),
        (pa.timestamp("us"), (-1, 1), ("1969-12-31T23:59:59.999", "1970-01-01T00:00:00.001")),
        (pa.timestamp("us", "UTC"), (1000, 2000), ("1970-01-01T00:00:00.001Z", "1970-01-01T00:00:00.002Z")),
        (pa.timestamp("us"), (-62135596800000000, 253402300799999001), ("0001-01-01T00:00:00.000", None)),
        (pa.timestamp("us"), (-62135596800000001, 2**62), (None, None)),
        (pa.decimal128(38, 10), ("-0.0000000001", f"1{'0' * 27}.0"), (Decimal("-1E-10"), Decimal("1E+27"))),
        (pa.decimal128(38, 2), ("-1234567890123.45", "12345678901234.56"), (Decimal("-1234567890123.45"), None)),
        (pa.string(), ('"\n\x00', None), ('"\n\x00', None)),
    ],
    ids=repr,
)
def test_bounds_in_delta(type_: pa.DataType, bounds: tuple[Bound, Bound], shown: tuple[Any, Any]) -> None:
    low, high = shown
    assert delta_stats(type_, *bounds) == {
        "minValues": {} if low is None else {"x": low},
        "maxValues": {} if high is None else {"x": high},
    }


def test_times_that_delta_shows_as_instants_have_a_zone() -> None:
    found = delta_stats(pa.timestamp("us"), 0, 0, naive_time="timestamp")
    assert found["minValues"] == found["maxValues"] == {"x": "1970-01-01T00:00:00.000Z"}


def test_columns_have_the_names_that_delta_finds_them_by_in_files() -> None:
    """After a rename, another column may have the old name."""
    before = spec_of(pa.schema([("x", pa.int64())]))
    spec = evolve(rename(before, "x", "y", one_name=True), pa.schema([("x", pa.int64())]))
    new, old = ColumnStatistics(id_of(spec, "x"), 0, 1, 1), ColumnStatistics(id_of(spec, "y"), 0, 2, 2)
    file = DataFile(name="f", rows=1, bytes=1, statistics=(new, old))
    found = json.loads(DeltaStats.of(spec, "timestamp_ntz").text(file))
    assert found["minValues"] == {"x": 2, spec.names_written["x"]: 1}
