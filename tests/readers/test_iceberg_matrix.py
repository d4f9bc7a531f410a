"""Other engines read tables that `publishers = ["iceberg"]` shows: each row as our own readers do, or a refusal recorded here."""

import datetime as dt
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pytest

from lakeupsert import clock
from lakeupsert.config import IcebergSettings
from tests.harness import typed_lake
from tests.harness.lake import iceberg_table
from tests.harness.readers import FORMATS, Place, Readers, Refusal, as_shown, compare
from tests.harness.servers import Server
from tests.harness.typed_lake import KINDS, TypedLake, days, schema_without

READERS = [name for name, formats in FORMATS.items() if "iceberg" in formats]
SCHEMA = schema_without("real", "at_ms", "at_s")
rows = partial(typed_lake.rows, SCHEMA)


class Lake(TypedLake):
    """A table with a catalog on SQLite beside it; with ``rest``, the address of a REST catalog, it has format version 3."""

    def __init__(self, folder: Path, rest: str = "", **settings: Any) -> None:
        uri = rest or f"sqlite:///{folder}/catalog.db"
        shown = IcebergSettings(
            catalog={"name": "lake", "type": "rest" if rest else "sql", "uri": uri},
            table=f"sales.t{clock.new_id()}",
            format_version=3 if rest else 2,
        )
        self.place = Place(
            "iceberg", str(folder / "processed"), rest or str(folder / "catalog.db"), f"lake.{shown.table}"
        )
        self.shown = shown
        super().__init__(folder, **{"publishers": ("iceberg",), "iceberg": shown, "strategy": "delta", **settings})

    @property
    def has_vectors(self) -> bool:
        """Whether some rows of its newest snapshot are superseded."""
        table = iceberg_table(self.shown)
        newest = table.current_snapshot() if table else None
        assert newest is not None
        assert newest.summary is not None
        return newest.summary["total-delete-files"] != "0"

    def snapshots(self) -> dict[int, int]:
        """The ids of Iceberg's snapshots by the number of ours."""
        table = iceberg_table(self.shown)
        assert table is not None
        return {int(s.summary["lakeupsert.snapshot"]): s.snapshot_id for s in table.metadata.snapshots if s.summary}


class New(Protocol):
    """`Lake` in a folder of its own."""

    def __call__(self, **settings: Any) -> Lake: ...


FIRST = rows(range(24), 1)
SECOND = rows([*range(0, 24, 5), *range(24, 30)], 2)


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    place = table.column_names.index(name) if name in table.column_names else None
    return table.append_column(name, values) if place is None else table.set_column(place, name, values)


def renamed(new: New) -> Lake:
    """A name goes to another column, and comes back for a new one; files are left as they are."""
    lake = new().run(FIRST)
    lake.table.rename_column("name", "title")
    lake.table.drop_column("small")
    again = SECOND.rename_columns({"name": "title"}).drop_columns("small")
    again = again.append_column("name", pa.array([None, *["again"] * (again.num_rows - 1)]))
    return lake.run(again.append_column("small", pa.array(["text"] * again.num_rows)))


def widened(new: New) -> Lake:
    lake = new().run(FIRST)
    wide = with_column(SECOND, "small", pa.array([1 << 40] * SECOND.num_rows, pa.int64()))
    wide = with_column(wide, "tiny", pa.array([1 << 14] * SECOND.num_rows, pa.int16()))
    return lake.run(with_column(wide, "amount", wide["amount"].cast(pa.decimal128(20, 2))))


def nested(new: New) -> Lake:
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
    return new().run(first, second)


def restored(new: New) -> Lake:
    lake = new().run(FIRST, SECOND)
    lake.table.restore(0, dry=False)
    return lake.run(rows([3], 3))


def in_between(new: New) -> Lake:
    lake = new().run(FIRST)
    lake.land(SECOND)
    lake.table.append(host="local")
    lake.table.dedupe(host="local")
    return lake


def compacted(new: New) -> Lake:
    lake = new().run(FIRST, SECOND)
    lake.table.compact(full=True)
    return lake.run(rows([3], 3))


def partition_types(new: New) -> Lake:
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
    return new(partition_by=("day", "store", "big", "open", "a b")).run(first, second)


def of_kind(kind: str, new: New) -> Lake:
    return new(partition_by=KINDS[kind]).run_changes(SCHEMA)


def many_days(new: New) -> Lake:
    return new(partition_by=("day",)).run(*days())


CASES: Mapping[str, Callable[[New], Lake]] = {
    "clean": lambda new: new(strategy="rewrite").run(FIRST, SECOND),
    "vectors": lambda new: new().run(FIRST, SECOND, rows(range(1, 30, 3), 3)),
    "many nights": lambda new: new().run(FIRST, *[rows(range(n % 3, 24, 3), n) for n in range(2, 12)]),
    "new column": lambda new: new().run(FIRST, SECOND.append_column("more", SECOND["id"])),
    "renamed": renamed,
    "widened": widened,
    "nested": nested,
    "partition types": partition_types,
    "mode columns": lambda new: new(mode="columns").run(FIRST, SECOND.select(["id", "part", "seen", "amount"])),
    "history": lambda new: new(history=True).run(FIRST, SECOND),
    "compacted": compacted,
    "restored": restored,
    "in between": in_between,
    **{kind: partial(of_kind, kind) for kind in KINDS},
    "545 vectors": many_days,
}
REFUSED: Mapping[tuple[str, int], str] = {
    ("trino", 3): "Unexpected PUFFIN file format",
    ("chdb", 3): "Position deletes are supported only for parquet format",
}
"""By reader and format version: what its message has if rows are superseded. Never other rows."""


@pytest.fixture(scope="module", params=[2, 3])
def new(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, iceberg_rest: Server
) -> tuple[int, New]:
    """Makes lakes of each format version."""
    rest = f"http://127.0.0.1:{iceberg_rest.port}" if request.param == 3 else ""
    return request.param, lambda **settings: Lake(tmp_path_factory.mktemp("lake"), rest, **settings)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, new: tuple[int, New]) -> tuple[str, int, Lake]:
    version, make = new
    lake = CASES[request.param](make)
    standing = lake.table.status().publishers["iceberg"]
    assert (standing.behind, standing.problem) == (0, None)
    return request.param, version, lake


@pytest.fixture(scope="module")
def earlier(new: tuple[int, New]) -> Lake:
    """Three nights, the last of which brings columns and drops one."""
    _, make = new
    lake = make().run(FIRST, SECOND)
    lake.table.drop_column("small")
    more = rows(range(1, 30, 3), 3).drop_columns("small").append_column("more", pa.array(["new"] * 10))
    return lake.run(more)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("number", [0, 1])
def test_earlier_snapshots_of_every_reader(readers: Readers, earlier: Lake, reader: str, number: int) -> None:
    columns = ["id", "part", "seen", "amount", "name"]
    expected = as_shown(reader, "iceberg", earlier.table.to_arrow(number).read_all()).select(columns)
    found = readers[reader].read(earlier.place, columns, version=earlier.snapshots()[number])
    difference = compare(found, expected, ["id"])
    assert difference.exact, str(difference)


@pytest.mark.parametrize("reader", READERS)
def test_rows_of_every_reader(readers: Readers, reader: str, case: tuple[str, int, Lake]) -> None:
    name, version, lake = case
    expected = as_shown(reader, "iceberg", lake.table.to_arrow().read_all())
    refused = REFUSED.get((reader, version)) if lake.has_vectors else None
    try:
        found = readers[reader].read(lake.place)
    except Refusal as refusal:
        assert refused, f"{reader} refused {name}: {refusal}"
        assert refused in str(refusal)
        return
    difference = compare(found, expected, ["id"])
    assert difference.exact, f"{reader} reads {name}: {difference}"
    assert not refused, "it reads what it was recorded to refuse"


@pytest.mark.parametrize("new", [3], indirect=True)
def test_rows_of_a_file_that_stays_keep_their_ids(readers: Readers, new: tuple[int, New]) -> None:
    """Spark shows the row ids of format version 3."""
    _, make = new
    lake = make().run(FIRST)
    seen: dict[tuple[object, object], object] = {}
    for night in (SECOND, rows(range(1, 30, 3), 3), rows([3], 4)):
        found = readers["spark"].read(lake.place, query="SELECT _file, _pos, _row_id FROM {table}").to_pylist()
        ids = {(one["_file"], one["_pos"]): one["_row_id"] for one in found}
        assert None not in ids.values()
        assert len(set(ids.values())) == len(found)
        kept = ids.keys() & seen.keys()
        assert kept or not seen
        assert {key: seen[key] for key in kept} == {key: ids[key] for key in kept}
        seen = ids
        lake.run(night)
