"""No engine writes to a table that `publishers = ["delta"]` shows, and what engines do below its log does no harm."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert.storage import open_store
from tests.harness.lake import Lake, row
from tests.harness.readers import FORMATS, HARMLESS, WRITES, Place, Readers, as_shown, compare
from tests.harness.servers import Server

READERS = [name for name, formats in FORMATS.items() if "delta" in formats]
KEY = ["k", "l", "d"]
LOG = ("_delta_log/", "dv/")
MONTHS = 40 * 86_400
LEAVES_FILES = {("spark", statement) for statement in ("INSERT", "MERGE", "overwrite", "OPTIMIZE")}
"""What is refused only when it commits. It leaves data files in the partitions' folders, or a deletion vector beside these."""


@dataclass(frozen=True)
class Shown:
    """A lake, and where readers find its table: Trino may have it on S3, whose server keeps it as plain files in ``folder``."""

    lake: Lake
    place: Place
    folder: Path

    def night(self, number: int) -> None:
        """Every night updates a third of the keys, deletes one and brings a new one."""
        keys = range(number % 3, 30, 3) if number else range(30)
        rows = [row(f"k{i:03}", day, number, number) for day in range(3) for i in keys]
        gone = [row(f"k{number:03}", day, number, op="D") for day in range(3)]
        self.lake.land(f"{number}.jsonl", [*rows, *gone, row(f"n{number}", number % 3, number, number)])
        standing = self.lake.table.run(host="local").publish.publishers["delta"]
        assert (standing.problem, standing.behind) == (None, 0)

    def objects(self) -> dict[str, bytes]:
        store = open_store(self.lake.settings.processed)
        return {found.name: store.get(found.name) for found in store.list("")}

    def log(self) -> dict[str, bytes]:
        return {name: data for name, data in self.objects().items() if name.startswith(LOG)}

    def check_upkeep(self) -> None:
        """Doctor finds nothing, every row is accounted for, and a vacuum that spares little deletes nothing that is needed."""
        assert [f for f in self.lake.table.doctor() if f.level == "problem"] == []
        proof = self.lake.table.reconcile()
        assert (proof.batches, [p for p in proof.proof if not p.balanced]) == ((), [])
        self.lake.mend(lambda row: False, keep_snapshots=1, superseded_retention="0s")
        self.lake.table.compact(full=True)
        assert self.lake.table.vacuum(dry=False).garbage

    def check(self, readers: Readers) -> None:
        """Every reader shows the newest snapshot, and delta-rs each version that the log has."""
        expected = self.lake.table.to_arrow().read_all()
        for reader in READERS:
            place = self.place if reader == "trino" else Place("delta", str(self.folder))
            difference = compare(readers[reader].read(place), as_shown(reader, "delta", expected), KEY)
            assert difference.exact, f"{reader}: {difference}"
        self.lake.check()


@pytest.fixture
def shown(
    versitygw: Server, new_bucket: Callable[[Server], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Shown]]:
    """Makes a table with vectors out of three nights, with superseded files. On S3 for Trino, which writes to no local folder."""
    made: list[Lake] = []

    def make(reader: str) -> Shown:
        settings = {"publishers": ("delta",), "strategy": "delta"}
        if reader == "trino":
            for name, value in {**versitygw.env, "AWS_ALLOW_HTTP": "true"}.items():
                monkeypatch.setenv(name, value)
            bucket = new_bucket(versitygw)
            assert versitygw.root is not None
            zones = {zone: f"s3://{bucket}/{zone}" for zone in ("landing", "processed")}
            lake = Lake(tmp_path / "lake", **settings, **zones, queue=str(tmp_path / "queue.sqlite"))
            found = Shown(lake, Place("delta", zones["processed"]), versitygw.root / bucket / "processed")
        else:
            lake = Lake(tmp_path / "lake", **settings)
            folder = tmp_path / "lake" / "processed"
            found = Shown(lake, Place("delta", str(folder)), folder)
        made.append(lake)
        for number in range(3):
            if number == 2:
                lake.table.compact(full=True)  # it supersedes files, which a vacuum would delete
            found.night(number)
        assert any(name.startswith("dv/") for name in found.objects()), "the table has no vectors"
        return found

    yield make
    for lake in made:
        lake.table.close()


@pytest.mark.parametrize(("reader", "statement"), [(r, s) for r, found in WRITES.items() for s in found])
def test_statement_is_refused_and_the_next_night_is_exact(
    readers: Readers, shown: Callable[..., Shown], reader: str, statement: str
) -> None:
    table = shown(reader)
    before = table.objects()
    refused = readers[reader].write(table.place, WRITES[reader][statement])
    after = table.objects()
    assert refused is not None
    assert "lakeupsert" in refused
    assert {name: after.get(name) for name in before} == before
    left = after.keys() - before.keys()
    assert bool(left) == ((reader, statement) in LEAVES_FILES)
    assert all(name.lstrip(".").startswith(("d=", "deletion_vector_")) for name in left)

    table.night(3)
    table.check(readers)
    if left:
        table.check_upkeep()
        table.night(4)
        table.check(readers)
        assert left <= table.objects().keys(), "our vacuum deletes what lakeupsert has not written"


@pytest.mark.parametrize(("reader", "statement"), [(r, s) for r, found in HARMLESS.items() for s in found])
def test_allowed_statement_changes_no_row_and_the_publisher_goes_on(
    readers: Readers, shown: Callable[..., Shown], reader: str, statement: str
) -> None:
    table = shown(reader)
    for number in range(3, 11):  # past a checkpoint of ours, without which the clean-up has nothing to do
        table.night(number)
    if statement == "clean-up":
        for path in (table.folder / "_delta_log").iterdir():
            os.utime(path, (path.stat().st_mtime - MONTHS,) * 2)
    before = table.objects()
    assert readers[reader].write(table.place, HARMLESS[reader][statement]) is None
    after = table.objects()
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert all(name.startswith("_delta_log/") for name in changed)
    assert not {name for name in changed & after.keys() if name.endswith(".json") and name in before}
    assert (f"_delta_log/{0:020}.json" in changed) == (statement == "clean-up")

    for number in range(11, 23):
        table.night(number)
        if number == 15 and statement == "checkpoint":
            assert readers[reader].write(table.place, statement) is None
    table.check(readers)


def test_a_foreign_checkpoint_without_our_tags_is_gone_on_from(
    readers: Readers, shown: Callable[..., Shown], tmp_path: Path
) -> None:
    """A checkpoint need not have an optional field, and our tags tell which vector a file has."""
    table = shown("delta-rs")
    assert readers["delta-rs"].write(table.place, "checkpoint") is None
    (path,) = (table.folder / "_delta_log").glob("*.checkpoint.parquet")
    rows = pq.read_table(path)
    at = rows.column_names.index("add")
    adds = rows.column("add").combine_chunks()
    kept = [field for field in adds.type if field.name != "tags"]
    bare = pa.StructArray.from_arrays([adds.field(f.name) for f in kept], fields=kept, mask=adds.is_null())
    assert adds.field("tags").drop_null()
    pq.write_table(rows.set_column(at, "add", bare), path)
    (table.folder / "_delta_log" / "_last_checkpoint").unlink()  # it has the size
    for number in range(3, 15):
        table.night(number)
    table.check(readers)
