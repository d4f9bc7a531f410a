"""Which snapshot publish appends: each reason to wait, to hold, to list a partition as lagging, and to do nothing.

The chains are written by hand: publish reads no data file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from lakeupsert.config import TableSettings
from lakeupsert.errors import DamagedTableError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import PublishResult, publish
from lakeupsert.table.ledger import LedgerEntry, Touched
from lakeupsert.table.manifest import BucketEntry, Changes, Counters, DataFile, FailedMark, Manifest
from lakeupsert.table.snapshot import PartitionVersion, Snapshot
from tests.harness.faults import Fault, Points
from tests.harness.lake import FaultyResources

A, B = "d=2020-01-01", "d=2020-01-02"


class Chains:
    """A table of which a test writes every version itself. Ledger entry 0 is there."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        zones = {"landing": str(folder / "landing"), "processed": str(folder / "processed")}
        self.settings = TableSettings(key=("k",), partition_by=("d",), **zones, **settings)
        self._entry(kind="create")

    @property
    def table(self) -> OpenTable:
        """As another process opens it."""
        return OpenTable("t", self.settings)

    def publish(self, *also: str) -> PublishResult:
        return publish(self.table, also)

    def batch(self, *partitions: str, **fields: Any) -> None:
        """A batch with a row for each of these."""
        touched = {p: Touched(files=(_file("a", 1),), rows=1, superseded=0, bytes=1) for p in partitions}
        self._entry(kind="batch", touched=touched, rows_read=len(partitions), **fields)

    def fence(self) -> None:
        self._entry(kind="fence", fence=1)

    def merge(self, partition: str, up_to: int, rows: int = 1, **fields: Any) -> None:
        """A version of the partition with so many rows, and every batch up to ``up_to`` in it."""
        counters = Counters(appended=rows, live=rows)
        bucket = BucketEntry(id="", base=(_file(f"b{up_to}", rows),), counters=counters)
        entry = self.table.history.entry(up_to)
        merged = {"buckets": (bucket,), "merged": up_to, "failed": None, "entry": entry.write_id if entry else None}
        self.version(partition, **{**merged, **fields})

    def fail(self, partition: str, batch: int) -> None:
        """Mark that the partition's next batch can't be merged."""
        self.version(partition, failed=FailedMark(batch=batch, reason="a test"))

    def version(self, partition: str, **fields: Any) -> None:
        chain = self.table.history.objects.partition(partition)
        head = chain.head()
        body = head.body if head else Manifest(partition=partition, merged=0, spec_version=0)
        assert chain.append(msgspec.structs.replace(body, **fields), head).link

    def snapshots(self) -> dict[int, Snapshot]:
        chain = self.table.history.objects.snapshots
        return {link.number: link.body for n in chain.numbers() if (link := chain.get(n)) is not None}

    def newest(self) -> Snapshot:
        found = self.snapshots()
        return found[max(found)]

    def lose(self, name: str) -> None:
        (Path(self.settings.processed) / name).unlink()

    def lose_version(self, partition: str, number: int) -> None:
        self.lose(self.table.history.objects.partition(partition).name(number))

    def lose_snapshot(self, number: int) -> None:
        self.lose(self.table.history.objects.snapshots.name(number))

    def _entry(self, **fields: Any) -> None:
        chain = self.table.history.objects.ledger
        head = chain.head()
        number = head.number + 1 if head else 0
        newest = self.table.history.last_snapshot()
        usual = {"batch_id": str(number), "received_at": number, "spec_version": 0}
        snapshot = newest.number if newest else None
        assert chain.append(LedgerEntry(**{"snapshot": snapshot, **usual, **fields}), head).link


def _file(name: str, rows: int) -> DataFile:
    return DataFile(name=name, rows=rows, bytes=rows)


Make = Callable[..., Chains]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda **settings: Chains(tmp_path, **settings)


def figures(chains: Chains, partition: str) -> PartitionVersion:
    """What the newest snapshot shows of a partition, whoever wrote it."""
    return msgspec.structs.replace(chains.newest().partitions[partition], write_id="")


def merged_twice(chains: Chains) -> None:
    """Batches 1 and 2 touch both partitions; one is merged and published."""
    for number in (1, 2):
        chains.batch(A, B)
        if number == 1:
            chains.merge(A, 1)
            chains.merge(B, 1)
            assert chains.publish().snapshot == 0


# ---------------------------------------------------------------- nothing to do


def test_table_without_a_ledger_has_nothing_to_publish(tmp_path: Path) -> None:
    settings = TableSettings(
        landing=str(tmp_path / "l"), processed=str(tmp_path / "p"), key=("k",), partition_by=("d",)
    )
    assert publish(OpenTable("t", settings)) == PublishResult(None, 0, 0, 0, ())


def test_created_table_without_a_batch_is_published_empty(make: Make) -> None:
    assert make().publish() == PublishResult(snapshot=0, batch=0, partitions_changed=0, rows=0, lagging=())


def test_publishing_again_appends_nothing_and_says_what_is_shown(make: Make) -> None:
    chains = make()
    chains.batch(A, B)
    chains.merge(A, 1, rows=3)
    chains.merge(B, 1, rows=4)
    assert chains.publish() == PublishResult(snapshot=0, batch=1, partitions_changed=2, rows=7, lagging=())
    assert chains.publish() == PublishResult(snapshot=0, batch=1, partitions_changed=0, rows=7, lagging=())
    assert list(chains.snapshots()) == [0]


def test_batch_that_brought_nothing_is_published_all_the_same(make: Make) -> None:
    chains = make()
    chains.batch()
    chains.publish()
    chains.batch(spec_version=1)
    assert chains.publish().batch == 2
    assert chains.newest().spec_version == 1


def test_event_names_the_batches_with_rows_that_readers_see_now(make: Make) -> None:
    chains, events = make(), list[Any]()

    def publish_and_tell() -> None:
        table = chains.table
        table.resources.sinks = [events.append]
        publish(table)

    for partition in A, B, A:
        chains.batch(partition)
    chains.merge(A, 3)
    chains.merge(B, 2)
    publish_and_tell()
    chains.batch()
    chains.batch(A)
    chains.merge(A, 5)
    publish_and_tell()
    ids = [link.write_id for link in chains.table.history.objects.ledger.between(-1, 5)]
    told = [(event.snapshot, event.batch, event.entry, event.earlier) for event in events]
    assert told == [(0, 3, ids[3], (ids[1], ids[2])), (1, 5, ids[5], ())]


def test_fence_is_no_batch_to_show(make: Make) -> None:
    chains = make()
    chains.batch(A)
    chains.merge(A, 1)
    chains.fence()
    assert chains.publish().batch == 1
    chains.fence()
    assert (chains.publish().batch, list(chains.snapshots())) == (1, [0])


def test_version_that_was_written_again_with_equal_figures_is_another(make: Make) -> None:
    chains = make()
    merged_twice(chains)
    chains.merge(A, 2)
    chains.merge(B, 2)
    chains.publish()
    before = figures(chains, A)
    chains.lose_version(A, 1)
    chains.merge(A, 2)
    assert chains.publish(A).partitions_changed == 1
    assert figures(chains, A) == before
    assert chains.publish(A).partitions_changed == 0


# ---------------------------------------------------------------- waiting


def test_partition_that_nobody_merged_is_waited_for(make: Make) -> None:
    chains = make(on_failed_partition="skip")
    merged_twice(chains)
    chains.merge(A, 2)
    found = chains.publish()
    assert (found.snapshot, found.batch, found.waiting, found.failed) == (0, 1, (A, B), {})
    chains.merge(B, 2)
    assert chains.publish() == PublishResult(snapshot=1, batch=2, partitions_changed=2, rows=2, lagging=())


def test_partition_without_any_version_is_waited_for(make: Make) -> None:
    chains = make(on_failed_partition="skip")
    chains.publish()
    chains.batch(A)
    found = chains.publish()
    assert (found.batch, found.waiting) == (0, (A,))


def test_greatest_batch_that_is_whole_is_shown_with_versions_of_its_time(make: Make) -> None:
    chains = make()
    merged_twice(chains)
    chains.batch(A)
    chains.merge(A, 2, rows=5)
    chains.merge(A, 3, rows=6)
    chains.merge(B, 2)
    chains.batch(B)
    found = chains.publish()
    assert (found.batch, found.waiting) == (3, (B,))
    assert figures(chains, A) == PartitionVersion(version=2, merged=3, rows=6, bytes=6, files=1, added=0, write_id="")
    chains.batch(A, B)
    chains.merge(A, 5, rows=7)
    chains.merge(B, 4)
    assert chains.publish().batch == 4
    assert chains.newest().partitions[A].rows == 6, "batch 5 is not whole yet"


def test_partition_that_jumped_beyond_a_batch_makes_it_wait_for_a_later_one(make: Make) -> None:
    chains = make(on_failed_partition="skip")
    merged_twice(chains)
    chains.batch(A, B)
    chains.merge(A, 3)
    chains.merge(B, 2)
    assert chains.publish().batch == 1, "of A there is no version at batch 2"
    chains.merge(B, 3)
    assert chains.publish().batch == 3


def test_mark_for_a_later_batch_does_not_excuse_a_slow_partition(make: Make) -> None:
    chains = make(on_failed_partition="skip")
    merged_twice(chains)
    chains.merge(A, 2)
    chains.batch(A, B)
    chains.fail(B, 3)
    assert chains.publish().batch == 1, "batch 3 waits for A, and the mark is no reason to show batch 2"


# ---------------------------------------------------------------- holding


def test_failed_partition_holds_the_night_back(make: Make) -> None:
    chains = make()
    merged_twice(chains)
    chains.merge(A, 2)
    chains.fail(B, 2)
    found = chains.publish()
    assert (found.snapshot, found.batch, found.lagging) == (0, 1, ())
    assert (found.waiting, found.failed) == ((A, B), {B: "a test"})


def test_lost_version_holds_the_night_back(make: Make) -> None:
    chains = make()
    merged_twice(chains)
    chains.merge(A, 2)
    chains.lose_version(B, 0)
    found = chains.publish()
    assert (found.batch, set(found.failed)) == (1, {B})
    assert "version 0" in found.failed[B]


# ---------------------------------------------------------------- lagging


def test_failed_partition_that_may_be_skipped_is_listed_with_what_it_has(make: Make) -> None:
    chains = make(on_failed_partition="skip")
    merged_twice(chains)
    chains.merge(A, 2)
    chains.fail(B, 2)
    found = chains.publish()
    assert (found.batch, found.lagging, found.waiting, found.failed) == (2, (B,), (B,), {B: "a test"})
    assert {p: s.merged for p, s in chains.newest().partitions.items()} == {A: 2, B: 1}


def test_partition_that_failed_from_its_first_batch_on_is_listed_without_rows(make: Make) -> None:
    chains = make(on_failed_partition="skip")
    chains.batch(A, B)
    chains.merge(A, 1)
    chains.fail(B, 1)
    assert chains.publish().lagging == (B,)
    assert figures(chains, B) == PartitionVersion(version=0, merged=0, rows=0, bytes=0, files=0, added=0, write_id="")


def test_lagging_partition_that_advances_is_shown_at_the_same_batch(make: Make) -> None:
    chains = make(on_failed_partition="skip")
    merged_twice(chains)
    chains.merge(A, 2)
    chains.fail(B, 2)
    chains.publish()
    assert chains.publish().snapshot == 1, "nothing advanced"
    chains.merge(B, 2, rows=9)
    assert chains.publish() == PublishResult(snapshot=2, batch=2, partitions_changed=1, rows=10, lagging=())


def test_lagging_partition_goes_on_lagging_while_others_advance(make: Make) -> None:
    chains = make(on_failed_partition="skip")
    merged_twice(chains)
    chains.merge(A, 2)
    chains.fail(B, 2)
    chains.publish()
    chains.batch(A)
    chains.merge(A, 3)
    found = chains.publish()
    assert (found.batch, found.lagging) == (3, (B,))


def test_lost_version_that_may_be_skipped_lags_and_shows_what_it_showed(make: Make) -> None:
    chains = make(on_failed_partition="skip")
    merged_twice(chains)
    before = chains.newest().partitions[B]
    chains.merge(A, 2)
    chains.lose_version(B, 0)
    chains.version(B, merged=0)
    found = chains.publish()
    assert (found.batch, found.lagging, set(found.failed)) == (2, (B,), {B})
    assert chains.newest().partitions[B] == before, "what is left of the chain must not be shown instead"


@pytest.mark.parametrize(("policy", "batch"), [("hold", 2), ("skip", 3)])
def test_lost_version_of_a_partition_that_is_not_touched_is_noticed(
    make: Make, policy: Literal["hold", "skip"], batch: int
) -> None:
    chains = make(on_failed_partition=policy)
    merged_twice(chains)
    chains.merge(A, 2)
    chains.merge(B, 2)
    chains.publish()
    chains.lose_version(B, 1)
    chains.batch(A)
    chains.merge(A, 3)
    found = chains.publish(B)
    assert (found.batch, found.lagging, set(found.failed)) == (batch, (), {B})
    assert chains.newest().partitions[B].version == 1


# ---------------------------------------------------------------- newer versions at the same `merged`


def test_rewritten_partition_is_shown_to_whoever_asks_for_it(make: Make) -> None:
    chains = make()
    merged_twice(chains)
    chains.merge(A, 1, rows=8)
    assert chains.publish().snapshot == 0
    found = chains.publish(A, B, "d=2021-01-01")
    assert (found.snapshot, found.batch, found.partitions_changed, found.rows) == (1, 1, 1, 9)


def test_rewritten_partition_that_no_batch_is_pending_for_is_shown(make: Make) -> None:
    chains = make()
    chains.batch(A, B)
    chains.merge(A, 1)
    chains.merge(B, 1)
    chains.publish()
    chains.merge(A, 1, rows=8)
    found = chains.publish(A)
    assert (found.snapshot, found.batch, found.partitions_changed, found.rows) == (1, 1, 1, 9)


def test_rewritten_partition_beyond_the_batch_is_shown_as_rewritten_at_it(make: Make) -> None:
    chains = make()
    merged_twice(chains)
    chains.merge(A, 1, rows=8)
    chains.merge(A, 2, rows=20)
    found = chains.publish(A)
    assert (found.batch, found.rows) == (1, 9)


# ---------------------------------------------------------------- damage


def test_version_that_merged_another_ledger_entry_of_the_number_is_not_shown(make: Make) -> None:
    chains = make()
    chains.batch(A)
    chains.merge(A, 1, entry="of another")
    with pytest.raises(DamagedTableError) as raised:
        chains.publish()
    assert (raised.value.code, raised.value.partition) == ("missing-version", A)
    assert not chains.snapshots()


def test_lost_snapshot_is_replaced_under_the_next_number(make: Make) -> None:
    chains = make(keep_snapshots=1)
    merged_twice(chains)
    chains.merge(A, 2)
    chains.merge(B, 2)
    chains.publish()
    chains.batch(A)
    chains.merge(A, 3, rows=5)
    chains.lose_snapshot(1)
    found = chains.publish()
    assert found == PublishResult(snapshot=2, batch=3, partitions_changed=2, rows=6, lagging=(), lost=1)
    assert chains.newest().expired == 1, (
        "the lost snapshot may have expired the one before, and a vacuum deleted its files"
    )


def test_lost_snapshot_is_replaced_also_if_only_rewritten_versions_are_new(make: Make) -> None:
    """It may have shown them, and the files of the older ones may be gone."""
    chains = make()
    merged_twice(chains)
    chains.merge(A, 1, rows=8)
    chains.publish(A)
    chains.batch(A)
    chains.lose_snapshot(1)
    found = chains.publish()
    assert (found.snapshot, found.batch, found.rows, found.lost) == (2, 1, 9, 1)


def test_only_snapshot_that_was_lost_is_replaced_from_nothing(make: Make) -> None:
    chains = make()
    chains.batch(A)
    chains.merge(A, 1)
    chains.publish()
    chains.batch()
    chains.lose_snapshot(0)
    found = chains.publish()
    assert (found.snapshot, found.batch, found.rows, found.lost) == (1, 2, 1, 0)


def test_lost_snapshot_that_only_had_a_tag_is_replaced_by_what_was_shown_before(make: Make) -> None:
    chains = make()
    merged_twice(chains)
    objects = chains.table.history.objects
    tagged = msgspec.structs.replace(chains.newest(), tags={"good": 0})
    assert objects.snapshots.append(tagged, objects.snapshots.head()).link
    chains.batch(A)
    chains.lose_snapshot(1)
    found = chains.publish()
    assert (found.snapshot, found.batch, found.rows, found.lost) == (2, 1, 2, 1)


def test_snapshot_that_another_publisher_appends_meanwhile_is_not_taken_for_lost(make: Make) -> None:
    """The ledger is read after the newest snapshot, so it may name a newer one."""
    chains, points = make(), Points()
    merged_twice(chains)
    chains.merge(A, 2)
    chains.merge(B, 2)

    def meanwhile() -> None:
        chains.publish()
        chains.batch(A)

    points.amid(0, meanwhile, "list _lakeupsert/ledger/")
    found = publish(OpenTable("t", chains.settings, resources=FaultyResources("t", chains.settings, points)))
    assert points.struck
    assert (found.snapshot, found.batch, found.lost, found.waiting) == (1, 2, None, (A,))


# ---------------------------------------------------------------- what else a snapshot says


def test_tags_and_expiry_are_carried_on(make: Make) -> None:
    chains = make()
    merged_twice(chains)
    tagged = msgspec.structs.replace(chains.newest(), tags={"good": 0}, expired=0)
    objects = chains.table.history.objects
    assert objects.snapshots.append(tagged, objects.snapshots.head()).link
    assert objects.snapshots.append(msgspec.structs.replace(tagged, expired=1), objects.snapshots.head()).link
    chains.merge(A, 2)
    chains.merge(B, 2)
    chains.publish()
    assert (chains.newest().tags, chains.newest().expired, chains.newest().batch) == ({"good": 0}, 1, 2)


def test_objects_that_a_version_added_are_known_unless_one_that_was_not_shown_added_others(make: Make) -> None:
    chains = make()
    added = []
    for number, versions in enumerate([(2,), (1, 3), (0, 5)], 1):
        chains.batch(A)
        for count in versions:
            chains.merge(A, number, added=count)
        chains.publish()
        added.append(chains.newest().partitions[A].added)
    assert added == [2, -1, 5]


def test_changes_of_a_partitions_first_merge_are_shown(make: Make) -> None:
    chains = make()
    chains.batch(A)
    chains.merge(A, 1, changes=Changes(inserted=1))
    chains.publish()
    assert chains.newest().changes == Changes(inserted=1)


def test_changes_are_of_every_merge_that_was_not_shown_before(make: Make) -> None:
    chains = make()
    merged_twice(chains)
    chains.batch(A)
    chains.merge(A, 2, changes=Changes(inserted=1))
    chains.merge(A, 3, changes=Changes(updated=2))
    chains.merge(A, 3, changes=Changes(updated=2))  # a compaction repeats them
    chains.merge(B, 2, changes=Changes(deleted=4))
    chains.publish()
    assert chains.newest().changes == Changes(inserted=1, updated=2, deleted=4)
    chains.batch(A)
    chains.merge(A, 4, changes=Changes(late=8))
    points = Points()
    points.arm(-1, Fault.BEFORE, "get ")
    publish(OpenTable("t", chains.settings, resources=FaultyResources("t", chains.settings, points)))
    assert chains.newest().changes == Changes(late=8)
    folder = chains.table.history.objects.partition(A).name(0).rpartition("/")[0]
    assert sum(folder in call for call in points.seen) == 1, "a version that is shown already tells no changes"


def test_changes_end_at_the_restore_that_withdrew_what_came_before(make: Make) -> None:
    chains = make()
    chains.batch(A)
    chains.batch(A)
    chains.batch(A)
    chains.merge(A, 1, changes=Changes(inserted=1))
    withdrawn = Counters(appended=3, live=1, withdrawn=2)
    bucket = BucketEntry(id="", base=(_file("b", 1),), counters=withdrawn)
    chains.merge(A, 2, changes=Changes(), buckets=(bucket,))
    chains.merge(A, 3, changes=Changes(updated=1), buckets=(bucket,))
    chains.publish()
    assert chains.newest().changes == Changes(updated=1)
