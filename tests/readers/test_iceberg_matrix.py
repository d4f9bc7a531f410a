"""Other engines read tables that `publishers = ["iceberg"]` shows: each row as our own readers do, or a refusal recorded here."""

import datetime as dt
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from lakeupsert.config import IcebergSettings
from lakeupsert.testing import typed_lake
from lakeupsert.testing.readers import FORMATS, Place, Readers, Refusal, as_shown, compare
from lakeupsert.testing.typed_lake import TypedLake, days, schema_without

READERS = [name for name, formats in FORMATS.items() if "iceberg" in formats]
SCHEMA = schema_without("real")
rows = partial(typed_lake.rows, SCHEMA)


class Lake(TypedLake):
    def __init__(self, folder: Path, **settings: Any) -> None:
        catalog = {"name": "lake", "type": "sql", "uri": f"sqlite:///{folder}/catalog.db"}
        shown = IcebergSettings(catalog=catalog, table="sales.receipts")
        super().__init__(folder, **{"publishers": ("iceberg",), "iceberg": shown, "strategy": "delta", **settings})

    @property
    def place(self) -> Place:
        return Place("iceberg", str(self.folder / "processed"), str(self.folder / "catalog.db"), "lake.sales.receipts")

    def snapshots(self) -> dict[int, int]:
        """The ids of Iceberg's snapshots by the number of ours."""
        catalog = SqlCatalog("lake", uri=f"sqlite:///{self.folder}/catalog.db")
        known = catalog.load_table("sales.receipts").metadata.snapshots
        catalog.close()
        return {int(s.summary["lakeupsert.snapshot"]): s.snapshot_id for s in known if s.summary}


FIRST = rows(range(24), 1)
SECOND = rows([*range(0, 24, 5), *range(24, 30)], 2)


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    place = table.column_names.index(name) if name in table.column_names else None
    return table.append_column(name, values) if place is None else table.set_column(place, name, values)


def renamed(folder: Path) -> Lake:
    """A name goes to another column, and comes back for a new one; files are left as they are."""
    lake = Lake(folder).run(FIRST)
    lake.table.rename_column("name", "title")
    lake.table.drop_column("small")
    again = SECOND.rename_columns({"name": "title"}).drop_columns("small")
    again = again.append_column("name", pa.array([None, *["again"] * (again.num_rows - 1)]))
    return lake.run(again.append_column("small", pa.array(["text"] * again.num_rows)))


def widened(folder: Path) -> Lake:
    lake = Lake(folder).run(FIRST)
    wide = with_column(SECOND, "small", pa.array([1 << 40] * SECOND.num_rows, pa.int64()))
    wide = with_column(wide, "tiny", pa.array([1 << 14] * SECOND.num_rows, pa.int16()))
    wide = with_column(wide, "at_s", wide["at"])
    return lake.run(with_column(wide, "amount", wide["amount"].cast(pa.decimal128(20, 2))))


def nested(folder: Path) -> Lake:
    """A struct gets a field, and the items of a list grow."""
    first = with_column(
        FIRST.select(["id", "part", "seen"]),
        "s",
        pa.array([{"a": 1, "l": [1]}] * FIRST.num_rows, pa.struct({"a": pa.int32(), "l": pa.list_(pa.int32())})),
    )
    wide = pa.struct({"a": pa.int32(), "l": pa.list_(pa.int64()), "b": pa.string()})
    second = with_column(
        SECOND.select(["id", "part", "seen"]),
        "s",
        pa.array([{"a": 2, "l": [1 << 40, None], "b": "ü"}, None, *[{"b": None}] * (SECOND.num_rows - 2)], wide),
    )
    return Lake(folder).run(first, second)


def restored(folder: Path) -> Lake:
    lake = Lake(folder).run(FIRST, SECOND)
    lake.table.restore(0, dry=False)
    return lake.run(rows([3], 3))


def in_between(folder: Path) -> Lake:
    lake = Lake(folder).run(FIRST)
    lake.land(SECOND)
    lake.table.append(host="local")
    lake.table.dedupe(host="local")
    return lake


def compacted(folder: Path) -> Lake:
    lake = Lake(folder).run(FIRST, SECOND)
    lake.table.compact(full=True)
    return lake.run(rows([3], 3))


def partition_types(folder: Path) -> Lake:
    count = 12
    columns = {
        "id": pa.array(range(count), pa.int64()),
        "seen": pa.array([1] * count, pa.int64()),
        "day": pa.array([dt.date(1969, 12, 30) + dt.timedelta(days=n % 4) for n in range(count)]),
        "store": pa.array([n % 2 - 1 for n in range(count)], pa.int32()),
        "big": pa.array([(1 << 40) - n % 2 for n in range(count)], pa.int64()),
        "open": pa.array([n % 3 == 0 for n in range(count)]),
        "a b": pa.array(["ä/b", "c"] * (count // 2)),
    }
    first = pa.table(columns)
    second = first.slice(0, 6).set_column(1, "seen", pa.array([2] * 6, pa.int64()))
    return Lake(folder, partition_by=("day", "store", "big", "open", "a b")).run(first, second)


def many_days(folder: Path) -> Lake:
    return Lake(folder, partition_by=("day",)).run(*days())


CASES: Mapping[str, Callable[[Path], Lake]] = {
    "clean": lambda folder: Lake(folder, strategy="rewrite").run(FIRST, SECOND),
    "vectors": lambda folder: Lake(folder).run(FIRST, SECOND, rows(range(1, 30, 3), 3)),
    "many nights": lambda folder: Lake(folder).run(FIRST, *[rows(range(n % 3, 24, 3), n) for n in range(2, 12)]),
    "new column": lambda folder: Lake(folder).run(FIRST, SECOND.append_column("more", SECOND["id"])),
    "renamed": renamed,
    "widened": widened,
    "nested": nested,
    "partition types": partition_types,
    "mode columns": lambda folder: Lake(folder, mode="columns").run(
        FIRST, SECOND.select(["id", "part", "seen", "amount"])
    ),
    "history": lambda folder: Lake(folder, history=True).run(FIRST, SECOND),
    "compacted": compacted,
    "restored": restored,
    "in between": in_between,
    "545 vectors": many_days,
}
REFUSED: Mapping[tuple[str, str], str] = {}
"""By reader and case: what its message has. Never other rows."""


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Lake]:
    lake = CASES[request.param](tmp_path_factory.mktemp("lake"))
    standing = lake.table.status().publishers["iceberg"]
    assert (standing.behind, standing.problem) == (0, None)
    return request.param, lake


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Three nights, the last of which brings columns and drops one."""
    lake = Lake(tmp_path_factory.mktemp("lake")).run(FIRST, SECOND)
    lake.table.drop_column("small")
    return lake.run(rows(range(1, 30, 3), 3).drop_columns("small").append_column("more", pa.array(["new"] * 10)))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("number", [0, 1])
def test_earlier_snapshots_of_every_reader(readers: Readers, earlier: Lake, reader: str, number: int) -> None:
    columns = ["id", "part", "seen", "amount", "name"]
    ours = earlier.table.to_arrow(number).read_all()
    expected = as_shown(reader, "iceberg", ours).select(columns)
    found = readers[reader].read(earlier.place, columns, version=earlier.snapshots()[number])
    difference = compare(found, expected, ["id"])
    assert difference.exact, str(difference)


@pytest.mark.parametrize("reader", READERS)
def test_rows_of_every_reader(readers: Readers, reader: str, case: tuple[str, Lake]) -> None:
    name, lake = case
    expected = as_shown(reader, "iceberg", lake.table.to_arrow().read_all())
    try:
        found = readers[reader].read(lake.place)
    except Refusal as refusal:
        assert (reader, name) in REFUSED, f"{reader} refused {name}: {refusal}"
        assert REFUSED[reader, name] in str(refusal)
        return
    difference = compare(found, expected, ["id"])
    assert difference.exact, f"{reader} reads {name}: {difference}"
    assert (reader, name) not in REFUSED, "it reads what it was recorded to refuse"
