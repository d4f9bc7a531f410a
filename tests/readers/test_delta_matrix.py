"""Other engines read tables that `publishers = ["delta"]` shows: each row as our own readers do, or a refusal recorded here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.harness import typed_lake
from tests.harness.readers import FORMATS, Place, Readers, Refusal, as_shown, compare
from tests.harness.typed_lake import KINDS, PARTITIONS, TypedLake, days, schema_without

READERS = [name for name, formats in FORMATS.items() if "delta" in formats]
SCHEMA = schema_without("tiny", "real", "at_ms", "at_s", "counts")
rows = partial(typed_lake.rows, SCHEMA)


class Lake(TypedLake):
    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **{"publishers": ("delta",), "strategy": "delta", **settings})


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


def of_kind(kind: str, folder: Path) -> Lake:
    return Lake(folder, partition_by=KINDS[kind]).run_changes(SCHEMA)


def many_days(folder: Path, **settings: Any) -> Lake:
    return Lake(folder, partition_by=("day",), **settings).run(*days())


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
    **{kind: partial(of_kind, kind) for kind in KINDS},
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
