"""Entries of Iceberg's manifests have counts and bounds of columns, so engines skip files in which no row passes a filter."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import ManifestEntry, ManifestEntryStatus
from pyiceberg.table import Table as IcebergTable
from pyiceberg.types import PrimitiveType

from lakeupsert.api import Table
from lakeupsert.config import TableSettings
from lakeupsert.publishers import iceberg_files, iceberg_types
from tests.harness.lake import iceberg_settings, iceberg_table

MOMENT = datetime(1969, 12, 31, 23, 59, 59, 999_999)
BIG = Decimal("-1234567890123456789012345678.0123456789")
COLUMNS: dict[str, tuple[pa.DataType, Any, Any]] = {
    "flag": (pa.bool_(), False, True),
    "tiny": (pa.int8(), -128, 127),
    "small": (pa.int32(), -(2**31), 2**31 - 1),
    "amount": (pa.decimal128(6, 2), Decimal("-1.28"), Decimal("1.27")),
    "big": (pa.decimal128(38, 10), BIG, Decimal("0E-10")),
    "at": (pa.timestamp("us"), MOMENT, MOMENT + timedelta(microseconds=2)),
    "seen": (pa.timestamp("us", "UTC"), datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)),
    "day": (pa.date32(), date(1, 1, 1), date(9999, 12, 31)),
    "name": (pa.string(), "", "é"),
    "text": (pa.large_string(), "a" * 40, "ü" * 40),
    "top": (pa.string(), "\U0010ffff" * 40, "\U0010ffff" * 41),
    "empty": (pa.int64(), None, None),
    "real": (pa.float64(), float("nan"), 1.0),
    "raw": (pa.binary(), b"", b"\xff"),
    "list": (pa.list_(pa.int64()), [1], [2]),
}
"""Type, least and greatest value."""
NO_BOUNDS = {"real", "raw", "list"}
BEYOND = {"text": ("a" * 32, "ü" * 31 + "ý"), "top": ("\U0010ffff" * 32, None)}
"""Bounds that are no values: text is cut, and a greatest text then goes up, if anything is above."""


class Receipts:
    """A table of two rows in each of two partitions, whose landing files are Parquet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "landing").mkdir()
        self.nights = 0
        settings = TableSettings(
            landing=str(root / "landing"),
            processed=str(root / "processed"),
            key=("k",),
            partition_by=("part",),
            order_by=("ts",),
            strategy="rewrite",
            publishers=("iceberg",),
            iceberg=iceberg_settings(root),
        )
        self.table = Table("t", settings)

    def night(self, parts: str = "ab", **columns: pa.Array) -> None:
        """Replace both rows of the partitions."""
        self.nights += 1
        count = 2 * len(parts)
        own = {"k": [1, 2] * len(parts), "part": [p for p in parts for _ in range(2)], "ts": [self.nights] * count}
        pq.write_table(pa.table({**own, **columns}), self.root / "landing" / f"{self.nights}.parquet")
        self.table.run(host="local")

    @property
    def published(self) -> IcebergTable:
        table = iceberg_table(iceberg_settings(self.root))
        assert table is not None
        return table

    def entries(self) -> dict[str, ManifestEntry]:
        """By partition."""
        table = self.published
        snapshot = table.current_snapshot()
        assert snapshot is not None
        found = [
            entry for manifest in snapshot.manifests(table.io) for entry in manifest.fetch_manifest_entry(table.io)
        ]
        return {entry.data_file.partition[0]: entry for entry in found}

    def bounds(self, part: str, name: str) -> tuple[Any, Any]:
        field = self.published.schema().find_field(name)
        file = self.entries()[part].data_file
        assert isinstance(field.field_type, PrimitiveType)
        lower, upper = (bounds.get(field.field_id) for bounds in (file.lower_bounds or {}, file.upper_bounds or {}))
        return (
            None if lower is None else from_bytes(field.field_type, lower),
            None if upper is None else from_bytes(field.field_type, upper),
        )

    def planned(self, row_filter: str) -> set[str]:
        """The partitions of the files that pyiceberg would open."""
        tasks = self.published.scan(row_filter=row_filter).plan_files()
        return {task.file.partition[0] for task in tasks}


@pytest.fixture
def receipts(tmp_path: Path) -> Receipts:
    return Receipts(tmp_path)


def as_stored(value: Any) -> Any:
    if isinstance(value, datetime):
        return (value.replace(tzinfo=None) - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    return (value - date(1970, 1, 1)).days if isinstance(value, date) else value


def test_bounds_are_those_of_the_values(receipts: Receipts) -> None:
    receipts.night(**{name: pa.array([low, high, None, None], type_) for name, (type_, low, high) in COLUMNS.items()})
    schema = receipts.published.schema()
    for part, nulls in (("a", 0), ("b", 2)):
        file = receipts.entries()[part].data_file
        for name, (_, low, high) in COLUMNS.items():
            id_ = schema.find_field(name).field_id
            if name in NO_BOUNDS:
                assert id_ not in {*file.value_counts, *file.null_value_counts, *file.lower_bounds, *file.upper_bounds}
                continue
            assert file.value_counts[id_] == 2
            assert file.null_value_counts[id_] == (2 if name == "empty" else nulls)
            expected = (None, None) if part == "b" else BEYOND.get(name, (as_stored(low), as_stored(high)))
            assert receipts.bounds(part, name) == expected, name


def test_filter_opens_fewer_files(receipts: Receipts) -> None:
    receipts.night(n=pa.array([1, 5, 10, None]), name=pa.array(["ant", "bee", "cat", "dog"]))
    assert receipts.planned("n >= 6") == {"b"}
    assert receipts.planned("n is null") == {"b"}
    assert receipts.planned("name < 'c'") == {"a"}
    assert receipts.planned("n > 10") == set()
    assert receipts.planned("n > 4") == {"a", "b"}


def test_column_keeps_its_bounds_through_another_name_and_a_wider_type(receipts: Receipts) -> None:
    """Bounds are those of a column, whatever its name was. The file of partition a stays as it is."""
    receipts.night(n=pa.array([1, -5, 10, 20], pa.int32()))
    receipts.table.rename_column("n", "number")
    receipts.night("b", number=pa.array([2**40, 2**41]), n=pa.array(["x", "y"]))
    entries = receipts.entries()
    assert {part: entry.status for part, entry in entries.items()} == {
        "a": ManifestEntryStatus.EXISTING,
        "b": ManifestEntryStatus.ADDED,
    }
    assert receipts.bounds("a", "number") == (-5, 1)
    assert receipts.bounds("a", "n") == (None, None)
    assert receipts.bounds("b", "n") == ("x", "y")
    assert receipts.planned(f"number >= {2**40}") == {"b"}
    assert receipts.planned("number < 0") == {"a"}
    assert receipts.planned("n = 'x'") == {"a", "b"}, "nothing is known of it in a file that is older than the column"


def test_entries_of_earlier_commits_keep_what_they_have(receipts: Receipts, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(iceberg_files, "metrics_of", lambda file, types: ())
        receipts.night(n=pa.array([1, 2, 3, 4]))
    receipts.night("b", n=pa.array([30, 40]))
    assert receipts.bounds("a", "n") == (None, None)
    assert receipts.bounds("b", "n") == (30, 40)
    receipts.table.publish(to="iceberg", reset=True)
    assert receipts.bounds("a", "n") == (1, 2)


@pytest.fixture(params=["greatest is too low", "least is too high"])
def wrong_bound(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    right = iceberg_types._bytes
    by = 1 if request.param == "least is too high" else -1
    monkeypatch.setattr(iceberg_types, "_bytes", lambda type_, one: right(type_, one + by if one else one))


@pytest.mark.usefixtures("wrong_bound")
def test_readers_believe_the_bounds(receipts: Receipts) -> None:
    """So a wrong one would show in tests that compare rows."""
    receipts.night(n=pa.array([1, 5, 10, 20]))
    found = [receipts.published.scan(row_filter=f"n = {n}").to_arrow().num_rows for n in (1, 5, 10, 20)]
    assert 0 in found
