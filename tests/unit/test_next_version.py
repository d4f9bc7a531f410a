"""What the next manifest of a partition says, by the step and the outputs of its tasks alone."""

from dataclasses import replace
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from lakeupsert.engine.merge import MergeOutput, MergeTask
from lakeupsert.errors import DamagedTableError
from lakeupsert.pipeline.merge.next_version import version_after
from lakeupsert.pipeline.merge.steps import Step
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import LedgerEntry, Touched
from lakeupsert.table.manifest import (
    NO_CHANGES,
    NO_DIGESTS,
    NO_ROWS,
    BucketEntry,
    Changes,
    Counters,
    DataFile,
    DeletionVector,
    Digests,
    FailedMark,
    Manifest,
    TombstoneFile,
    check_manifest,
)
from tests.harness.specs import create

PARTITION = "d=2020-01-01"
SPEC = create(
    pa.schema({"k": pa.string(), "d": pa.date32()}),
    key=("k",),
    order_by=("ts",),
    partition_by=("d",),
    stamped=True,
)


def digest(number: int) -> str:
    """Of so many equal rows: digests add up in 64 bits."""
    return f"{number * 0xFEDC_BA98_7654_3211 % 2**64:016x}"


def file(name: str, rows: int, superseded: int = 0) -> DataFile:
    deleted = DeletionVector(rows=superseded, size=1, inline=b"x") if superseded else None
    return DataFile(name=name, rows=rows, bytes=100 * rows, deleted=deleted)


def link(number: int, body: Any) -> Link[Any]:
    return Link(number, write_id=f"w{number}", parent=None, written_at="", body=body, read_at=0.0)


def batch(number: int, rows: int, superseded: int = 0) -> Link[LedgerEntry]:
    """A ledger entry that brings ``rows`` for the partition; ``superseded`` of them lost within the batch."""
    touched = Touched(
        files=(file(f"appended{number}", rows - superseded),),
        rows=rows,
        superseded=superseded,
        bytes=100 * rows,
        digest=digest(rows),
        superseded_digest=digest(superseded),
    )
    entry = LedgerEntry(
        kind="batch", batch_id=str(number), received_at=number, spec_version=0, touched={PARTITION: touched}
    )
    return link(number, entry)


def stored(rows: int = 10, bucket: int = 0, bits: int = 0, **gone: int) -> BucketEntry:
    """A bucket with ``rows`` in one base; ``gone`` are counters of rows that it has no more."""
    counters = Counters(appended=rows + sum(gone.values()), live=rows, **gone)
    digests = Digests(
        adopted=NO_ROWS, **{"superseded": NO_ROWS, "withdrawn": NO_ROWS, **{n: digest(r) for n, r in gone.items()}}
    )
    name = f"base{bucket}of{1 << bits}"
    return BucketEntry(id=name, bucket=bucket, bits=bits, base=(file(name, rows),), counters=counters, digests=digests)


def manifest(*buckets: BucketEntry, merged: int = 1, **fields: Any) -> Manifest:
    return Manifest(partition=PARTITION, merged=merged, spec_version=0, buckets=buckets, **fields)


def step(base: Manifest, *pending: Link[LedgerEntry], tasks: tuple[MergeTask, ...] = (), **fields: Any) -> Step:
    numbers = [entry.number for entry in pending]
    usual: dict[str, Any] = {
        "active": frozenset(numbers),
        "up_to": max(numbers, default=base.merged),
        "bucket_bytes": 0,
    }
    given = {"head": link(4, base), "base": base, "pending": pending, "tasks": tasks, "spec": SPEC, **usual, **fields}
    return Step(**given)


def task(
    bucket: BucketEntry, *, bits: int = 0, part: int = 0, kept: tuple[DataFile, ...] = (), **fields: Any
) -> MergeTask:
    """Merges a bucket; with ``bits``, ``part`` of the 2^bits that it is split into."""
    usual: dict[str, Any] = {"base": () if kept else bucket.base, "kept": kept, "settled": bucket.settled}
    numbers = {"bucket": (bucket.bucket << bits) + part, "bits": bucket.bits + bits}
    given = {"tombstones": bucket.tombstones, "batches": (), "up_to": 2, "start": 5, **usual, **numbers, **fields}
    return MergeTask(partition=PARTITION, **given)


def output(*written: DataFile, superseded: int = 0, **fields: Any) -> MergeOutput:
    return MergeOutput(
        **{
            "written": written,
            "tombstones": (),
            "superseded": superseded,
            "superseded_digest": digest(superseded),
            **fields,
        }
    )


def after(what: Step, *outputs: MergeOutput, head: Manifest | None = None) -> Manifest:
    """The version that follows, which has to be accepted behind its head."""
    before = link(4, head) if head is not None else what.head
    found = version_after(what, before, outputs, {"engine": "test"})
    check_manifest(before.body if before else None, found)
    return found


def test_rewritten_bucket_has_the_new_base_alone_and_counts_what_lost() -> None:
    old = stored(10, superseded=4)
    before = manifest(old)
    found = after(step(before, batch(2, 3), tasks=(task(old),)), output(file("new", 11), superseded=2))
    [bucket] = found.buckets
    assert (bucket.base, bucket.deltas, bucket.tombstones) == ((file("new", 11),), (), ())
    assert bucket.id != old.id, "who lost the race to this has to see it"
    assert bucket.counters == Counters(appended=14 + 3, live=11, superseded=4 + 2)
    assert bucket.digests == Digests(adopted=NO_ROWS, superseded=digest(6), withdrawn=NO_ROWS)
    assert (found.merged, found.partition, found.made) == (2, PARTITION, {"engine": "test"})


def test_first_version_of_a_partition_begins_from_an_empty_bucket() -> None:
    base = manifest(merged=0)
    first = step(base, batch(1, 5, superseded=1), head=None)
    [empty] = first.buckets
    found = after(replace(first, tasks=(task(empty),)), output(file("new", 4)))
    [bucket] = found.buckets
    assert (bucket.bucket, bucket.bits, bucket.base) == (0, 0, (file("new", 4),))
    assert bucket.counters == Counters(appended=5, live=4, superseded=1)
    assert bucket.digests.superseded == digest(1), "what append settled within the batch"


def test_delta_keeps_the_base_and_older_deltas_in_place() -> None:
    delta = file("older", 2)
    old = msgspec.structs.replace(stored(10), deltas=(delta,), counters=Counters(appended=12, live=12))
    marked = file("base0of1", 10, superseded=3)
    merged = output(file("newer", 4), superseded=3, kept=(marked, delta))
    [bucket] = after(step(manifest(old), batch(2, 4), tasks=(task(old, kept=(*old.base, delta)),)), merged).buckets
    assert (bucket.base, bucket.deltas) == ((marked,), (delta, file("newer", 4)))
    assert bucket.counters == Counters(appended=16, live=13, superseded=3)


def test_everything_that_a_task_forgets_refuses_or_deletes_is_counted_with_its_digest() -> None:
    old = stored(10, tombstones_dropped=1, refused=2)
    tombstones = (TombstoneFile(name="", rows=2, bytes=9, inline=b"x"),)
    merged = output(
        file("new", 8),
        superseded=2,
        tombstones=tombstones,
        dropped=3,
        dropped_digest=digest(30),
        refused=4,
        refused_digest=digest(40),
        floor="f",
        history=(file("past", 5),),
        quarantine=("refused",),
    )
    found = after(step(manifest(old, quarantine=("earlier",)), batch(2, 9), tasks=(task(old),)), merged)
    [bucket] = found.buckets
    assert bucket.counters == Counters(
        appended=22, live=8, tombstones=2, superseded=2, tombstones_dropped=1 + 3, refused=2 + 4
    )
    assert (bucket.digests.tombstones_dropped, bucket.digests.refused) == (digest(31), digest(42))
    assert (bucket.tombstones, bucket.floor, bucket.history) == (tombstones, "f", (file("past", 5),))
    assert found.quarantine == ("earlier", "refused")


def test_buckets_without_a_task_stay_as_they_are_in_the_order_of_their_hashes() -> None:
    left, right = stored(10, 0, 1, superseded=1), stored(20, 1, 1)
    found = after(step(manifest(left, right), batch(2, 3), tasks=(task(right),)), output(file("new", 23)))
    assert found.buckets[0] == left
    assert [(b.bucket, b.bits, b.counters.live) for b in found.buckets] == [(0, 1, 10), (1, 1, 23)]
    assert found.buckets[1].counters == Counters(appended=23, live=23)


def test_first_part_of_a_split_counts_what_the_whole_bucket_had_counted() -> None:
    old = stored(10, superseded=4, withdrawn=1)
    tasks = tuple(task(old, bits=2, part=part) for part in range(4))
    outputs = [output(file(f"new{part}", part + 1), superseded=1, dropped=part, refused=part) for part in range(4)]
    found = after(step(manifest(old), batch(2, 17, superseded=1), tasks=tasks), *outputs)
    assert [(b.bucket, b.bits, b.base) for b in found.buckets] == [(n, 2, (file(f"new{n}", n + 1),)) for n in range(4)]
    first, *others = found.buckets
    assert first.counters == Counters(appended=32 - 24, live=1, superseded=4 + 1 + 1, withdrawn=1)
    assert first.digests == Digests(adopted=NO_ROWS, superseded=digest(6), withdrawn=digest(1))
    assert [b.counters for b in others] == [
        Counters(appended=3 * n + 2, live=n + 1, superseded=1, tombstones_dropped=n, refused=n) for n in (1, 2, 3)
    ]
    assert {b.digests.withdrawn for b in others} == {NO_ROWS}


def test_each_bucket_counts_its_own_deletes() -> None:
    left, right = stored(10, 0, 1), stored(20, 1, 1)
    merged = step(manifest(left, right), batch(2, 4), tasks=(task(left), task(right)))
    dead = (TombstoneFile(name="t", rows=2, bytes=1),)
    found = after(merged, output(file("l", 11)), output(file("r", 21), tombstones=dead))
    assert [b.counters for b in found.buckets] == [
        Counters(appended=11, live=11),
        Counters(appended=23, live=21, tombstones=2),
    ]


def test_joined_buckets_count_what_both_had_counted() -> None:
    left, right = stored(10, 0, 1, superseded=4), stored(20, 1, 1, superseded=5)
    joined = BucketEntry(id="", deltas=(*left.data, *right.data))
    compacted = step(manifest(left, right), tasks=(task(joined),), work="work")
    [bucket] = after(compacted, output(file("new", 30))).buckets
    assert (bucket.bits, bucket.counters) == (0, Counters(appended=39, live=30, superseded=9))
    assert bucket.digests.superseded == digest(9)


def test_rows_of_batches_that_do_not_count_are_withdrawn() -> None:
    old = stored(10)
    pending = (batch(2, 3), batch(3, 7, superseded=2), batch(5, 1))
    merged = step(manifest(old), *pending, tasks=(task(old),), active=frozenset({2, 5}))
    found = after(merged, output(file("new", 14)))
    assert found.buckets[0].counters == Counters(appended=21, live=14, withdrawn=7)
    assert found.buckets[0].digests.withdrawn == digest(7)
    assert found.merged == 5


def test_restore_alone_moves_no_row_and_keeps_what_was_counted() -> None:
    goes_back_to = stored(10, superseded=4, withdrawn=1, tombstones_dropped=2, refused=3)
    base, head = manifest(goes_back_to), manifest(stored(50), merged=3, quarantine=("later",))
    restored = step(base, batch(3, 40), head=link(4, head), active=frozenset(), up_to=4)
    found = after(restored)
    [bucket] = found.buckets
    assert bucket.base == goes_back_to.base
    assert bucket.id != goes_back_to.id, "who merges into the version before has lost"
    assert bucket.counters == msgspec.structs.replace(goes_back_to.counters, appended=20 + 40, withdrawn=1 + 40)
    assert bucket.digests == msgspec.structs.replace(goes_back_to.digests, withdrawn=digest(41))
    assert (found.merged, found.quarantine) == (4, ()), (
        "the rows that a withdrawn batch had refused are refused no more"
    )


def test_restore_of_a_split_partition_leaves_all_but_the_first_bucket_alone() -> None:
    left, right = stored(10, 0, 1), stored(20, 1, 1)
    found = after(step(manifest(left, right), batch(2, 5), active=frozenset(), up_to=3))
    assert found.buckets[1] == right
    assert found.buckets[0].counters == Counters(appended=15, live=10, withdrawn=5)


def test_adopted_rows_are_known_after_the_merge_that_settles_them() -> None:
    adopted = msgspec.structs.replace(stored(10), settled=False, digests=Digests(superseded=NO_ROWS, withdrawn=NO_ROWS))
    [bucket] = after(
        step(manifest(adopted), batch(2, 1), tasks=(task(adopted),)), output(file("n", 11), adopted=digest(9))
    ).buckets
    assert bucket.digests.adopted == digest(9)
    assert bucket.settled
    [again] = after(step(manifest(bucket), batch(3, 1), tasks=(task(bucket),)), output(file("n", 12))).buckets
    assert again.digests.adopted == digest(9)


def test_adopted_rows_stay_unknown_while_nothing_settles_them() -> None:
    adopted = msgspec.structs.replace(stored(10), settled=False, digests=Digests(superseded=NO_ROWS, withdrawn=NO_ROWS))
    [bucket] = after(step(manifest(adopted), batch(2, 1), active=frozenset(), up_to=3)).buckets
    assert (bucket.digests.adopted, bucket.settled) == (None, False)


def test_digest_that_one_part_does_not_know_stays_unknown() -> None:
    old = msgspec.structs.replace(
        stored(10, superseded=2), digests=msgspec.structs.replace(NO_DIGESTS, superseded=None)
    )
    [bucket] = after(step(manifest(old), batch(2, 1), tasks=(task(old),)), output(file("new", 11))).buckets
    assert bucket.digests.superseded is None


@pytest.mark.parametrize("lost", [-1, 1])
def test_version_that_lost_a_row_or_has_one_too_many_is_refused(lost: int) -> None:
    old = stored(10)
    merged = step(manifest(old), batch(2, 3), tasks=(task(old),))
    with pytest.raises(DamagedTableError) as raised:
        after(merged, output(file("new", 13 - lost)))
    assert raised.value.code == "broken-invariant"


@pytest.mark.parametrize(("failed", "stays"), [(2, False), (3, True)])
def test_failed_mark_goes_with_the_merge_of_its_batch(failed: int, stays: bool) -> None:
    mark = FailedMark(batch=failed, reason="a test")
    old = stored(10)
    found = after(step(manifest(old, failed=mark), batch(2, 3), tasks=(task(old),)), output(file("new", 13)))
    assert found.failed == (mark if stays else None)


def test_version_behind_a_newer_head_keeps_what_that_says_beside_its_buckets() -> None:
    old = stored(10)
    merged = step(manifest(old), batch(2, 3), tasks=(task(old),), entry="w2")
    newer = manifest(old, fence=5, failed=FailedMark(batch=9, reason="a test"), reprocessed="before")
    found = after(merged, output(file("new", 13)), head=newer)
    assert (found.fence, found.failed, found.reprocessed, found.entry) == (5, newer.failed, "before", "w2")


def test_changes_are_the_sum_over_all_tasks() -> None:
    left, right = stored(10, 0, 1), stored(20, 1, 1)
    outputs = [
        output(file(n, r), changes=Changes(inserted=1, late=i)) for i, (n, r) in enumerate([("l", 11), ("r", 21)])
    ]
    merged = step(manifest(left, right, changes=Changes(deleted=7)), batch(2, 2), tasks=(task(left), task(right)))
    assert after(merged, *outputs).changes == Changes(inserted=2, late=1)


def test_compaction_repeats_the_changes_and_names_its_work_object() -> None:
    old = stored(10, superseded=2, refused=1)
    before = manifest(old, changes=Changes(deleted=7), quarantine=("refused",))
    found = after(step(before, tasks=(task(old),), work="work"), output(file("new", 10), changes=NO_CHANGES))
    assert (found.changes, found.reprocessed, found.merged) == (Changes(deleted=7), "work", 1)
    assert found.quarantine == ("refused",)
    assert found.buckets[0].counters == old.counters


def test_rebuild_from_landing_counts_rows_that_merges_refused_as_refused_again() -> None:
    """It reads what landed without them, so they come as superseded of their batch."""
    head = manifest(stored(10, superseded=3, refused=2), merged=3, quarantine=("refused",))
    rebuilt = step(manifest(merged=0), batch(3, 15, superseded=5), head=link(4, head), up_to=3, work="work")
    [empty] = rebuilt.buckets
    found = after(replace(rebuilt, tasks=(task(empty),)), output(file("new", 10)))
    assert found.buckets[0].counters == Counters(appended=15, live=10, superseded=3, refused=2)
    assert found.buckets[0].digests == Digests(
        adopted=NO_ROWS, superseded=digest(5 - 2), refused=digest(2), withdrawn=NO_ROWS
    )
    assert found.quarantine == ("refused",)
    assert found.merged == 3


def test_version_has_the_newest_spec_of_batch_head_and_work_object() -> None:
    old = stored(10)
    entry = batch(2, 3)
    newer = replace(entry, body=msgspec.structs.replace(entry.body, spec_version=4))
    assert after(step(manifest(old), newer, tasks=(task(old),)), output(file("new", 13))).spec_version == 4
    compacted = step(manifest(old), tasks=(task(old),), work="work", work_spec_version=6)
    assert after(compacted, output(file("new", 10))).spec_version == 6
