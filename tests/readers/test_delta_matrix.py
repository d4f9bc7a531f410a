"""Other engines read tables that `publishers = ["delta"]` shows: each row as our own readers do, or a refusal recorded here."""

import datetime as dt
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from lakeupsert.api import Table
from lakeupsert.config import TableSettings
from lakeupsert.testing.readers import FORMATS, Place, Readers, Refusal, as_shown, compare

READERS = [name for name, formats in FORMATS.items() if "delta" in formats]
PARTITIONS = ("a b", "x=y", "ü", "%41", "2026-01-01")
DAYS = 545

SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "part": pa.string(),
        "flag": pa.bool_(),
        "small": pa.int32(),
        "amount": pa.decimal128(12, 2),
        "ratio": pa.float64(),
        "at": pa.timestamp("us"),
        "seen": pa.timestamp("us", "UTC"),
        "day": pa.date32(),
        "name": pa.string(),
        "raw": pa.binary(),
        "tags": pa.list_(pa.string()),
        "spot": pa.struct({"height": pa.float64(), "names": pa.list_(pa.string())}),
    }
)


def row(number: int, night: int) -> dict[str, object]:
    """Every fifth row has nulls alone beside its key, order and partition."""
    moment = dt.datetime(2026, 1, night, 1, 2, 3, 456_000 + number)
    key = {"id": number, "part": PARTITIONS[number % len(PARTITIONS)], "seen": moment.replace(tzinfo=dt.UTC)}
    if number % 7 == 4:
        return {**dict.fromkeys(SCHEMA.names), **key}
    return {
        **key,
        "flag": number % 2 == 0,
        "small": -number,
        "amount": Decimal(number * night).scaleb(-2) - 5,
        "ratio": (math.nan, math.inf, -1.25)[number % 3],
        "at": moment,
        "day": dt.date(1969 + number, 12, 31),
        "name": ("", "Zoë", "'quoted'\n")[number % 3],
        "raw": bytes([0, 255, number]),
        "tags": ([], ["a", None, "ü"], None)[number % 3],
        "spot": ({"height": math.nan, "names": ["n"]}, {"height": None, "names": None}, None)[number % 3],
    }


def rows(numbers: Sequence[int], night: int, **columns: Any) -> pa.Table:
    table = pa.Table.from_pylist([row(number, night) for number in numbers], SCHEMA)
    for name, values in columns.items():
        place = table.column_names.index(name) if name in table.column_names else None
        table = table.append_column(name, values) if place is None else table.set_column(place, name, values)
    return table


class Lake:
    """A table below ``folder`` that takes a night at a time."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        (folder / "landing").mkdir(parents=True)
        defaults = {"key": ("id",), "partition_by": ("part",), "order_by": ("seen",), "strategy": "delta"}
        zones = {"landing": str(folder / "landing"), "processed": str(folder / "processed")}
        self.table = Table("t", TableSettings(**{**zones, **defaults, "publishers": ("delta",), **settings}))
        self.folder, self.count = folder, 0

    def land(self, night: pa.Table) -> None:
        self.count += 1
        pq.write_table(night, self.folder / "landing" / f"{self.count}.parquet")

    def run(self, *nights: pa.Table) -> "Lake":
        for night in nights:
            self.land(night)
            self.table.run(host="local")
        return self


FIRST = rows(range(24), 1)
SECOND = rows([*range(0, 24, 5), *range(24, 30)], 2)


def renamed(folder: Path) -> Lake:
    lake = Lake(folder).run(FIRST)
    lake.table.rename_column("name", "title")
    lake.table.drop_column("small")
    again = SECOND.rename_columns({"name": "title"}).drop_columns("small")
    return lake.run(again.append_column("name", pa.array([None, *["again"] * (again.num_rows - 1)])))


def widened(folder: Path) -> Lake:
    lake = Lake(folder).run(FIRST)
    at = SECOND.column_names.index("small")
    return lake.run(SECOND.set_column(at, "small", pa.array([1 << 40] * SECOND.num_rows, pa.int64())))


def restored(folder: Path) -> Lake:
    lake = Lake(folder).run(FIRST, SECOND)
    lake.table.restore(0, dry=False)
    return lake.run(rows([3], 3))


def adopted(folder: Path) -> Lake:
    """Files that another program wrote, with field ids of its own, before and after their first merge."""
    lake = Lake(folder)
    for number in (0, 4):
        own = FIRST.filter(pc.equal(FIRST["part"], PARTITIONS[number])).drop_columns("part")
        fields = [field.with_metadata({"PARQUET:field_id": str(40 - place)}) for place, field in enumerate(own.schema)]
        place = folder / "processed" / f"part={PARTITIONS[number]}"
        place.mkdir(parents=True)
        pq.write_table(own.cast(pa.schema(fields)), place / "part-0.parquet")
    lake.table.adopt()
    lake.table.rename_column("name", "title")
    return lake.run(rows([*range(0, 24, 10), 24], 2).rename_columns({"name": "title"}))


def in_between(folder: Path) -> Lake:
    lake = Lake(folder).run(FIRST, SECOND)
    lake.land(rows([3, 30], 3))
    lake.table.append(host="local")
    lake.table.dedupe(host="local")
    return lake


def many_days(folder: Path, **settings: Any) -> Lake:
    days = pa.array([dt.date(2020, 1, 1) + dt.timedelta(days=n) for n in range(DAYS)] * 3)
    ids = pa.array(range(3 * DAYS), pa.int64())
    first = pa.table({"id": ids, "day": days, "seen": pa.array([1] * len(ids), pa.int64())})
    second = first.slice(0, DAYS).set_column(2, "seen", pa.array([2] * DAYS, pa.int64()))
    return Lake(folder, partition_by=("day",), **settings).run(first, second)


CASES: Mapping[str, Callable[[Path], Lake]] = {
    "clean": lambda folder: Lake(folder, strategy="rewrite").run(FIRST, SECOND),
    "vectors": lambda folder: Lake(folder).run(FIRST, SECOND, rows(range(1, 30, 3), 3)),
    "checkpoint": lambda folder: Lake(folder).run(FIRST, *[rows(range(n % 3, 24, 3), n) for n in range(2, 12)]),
    "new column": lambda folder: Lake(folder).run(FIRST, SECOND.append_column("more", SECOND["id"])),
    "renamed": renamed,
    "adopted": adopted,
    "widened": widened,
    "mode columns": lambda folder: Lake(folder, mode="columns").run(
        FIRST, SECOND.select(["id", "part", "seen", "amount"])
    ),
    "history": lambda folder: Lake(folder, history=True).run(FIRST, SECOND),
    "restored": restored,
    "in between": in_between,
    "naive times as UTC": lambda folder: Lake(folder, delta_timestamps="utc").run(FIRST, SECOND),
    "545 vectors": many_days,
    "545 inline": partial(many_days, delta_vectors="inline"),
}
REFUSED: Mapping[tuple[str, str], str] = {
    ("polars", "renamed"): "columnMapping",
    ("polars", "adopted"): "columnMapping",
    ("trino", "545 inline"): "Unsupported storage type for deletion vector: i",
}
"""By reader and case: what its message has. Never other rows."""
HANGS = {("polars", "545 vectors"), ("delta-rs", "545 vectors")}
"""What may hang, and is not tried. The publisher warns of it."""


@dataclass(frozen=True)
class Case:
    """Snapshots of a table, by number, as `export --snapshot` gives them."""

    name: str
    lake: Lake
    exported: Mapping[int, pa.Table]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("lake")
    lake = CASES[request.param](folder)
    assert lake.table.status().publishers["delta"].behind == 0
    exported: dict[int, pa.Table] = {}
    for link in lake.table.snapshots():
        lake.table.export(folder / f"{link.number}.parquet", snapshot=link.number)
        exported[link.number] = as_declared(lake, pq.read_table(folder / f"{link.number}.parquet"))
    assert len(exported) > 1
    return Case(request.param, lake, exported)


def as_declared(lake: Lake, exported: pa.Table) -> pa.Table:
    if lake.table.settings.delta_timestamps == "naive":
        return exported
    return exported.set_column(exported.column_names.index("at"), "at", exported["at"].cast(SCHEMA.field("seen").type))


@pytest.mark.parametrize("reader", READERS)
def test_newest_version_by_every_reader(readers: Readers, reader: str, case: Case) -> None:
    if (reader, case.name) in HANGS:
        pytest.skip("it may hang, and `run` warns of it: delta-rs has 512 threads for deletion vectors")
    is_read = check(readers, reader, case, max(case.exported), version=None)
    assert is_read != ((reader, case.name) in REFUSED), "it reads what it was recorded to refuse"


@pytest.mark.parametrize("reader", READERS)
def test_earlier_versions_by_every_reader(readers: Readers, reader: str, case: Case) -> None:
    for number in sorted(case.exported)[:-1]:
        check(readers, reader, case, number, version=number)


def check(readers: Readers, reader: str, case: Case, number: int, version: int | None) -> bool:
    """Whether the reader read the version, which then was exact; otherwise it is recorded to refuse the table."""
    try:
        found = readers[reader].read(Place("delta", str(case.lake.folder / "processed")), version=version)
    except Refusal as refusal:
        assert REFUSED.get((reader, case.name), "nothing") in str(refusal), f"{reader} refused {case.name}: {refusal}"
        return False
    difference = compare(found, as_shown(reader, "delta", case.exported[number]), ["id"])
    assert difference.exact, f"{reader} reads version {number} of {case.name}: {difference}"
    return True
