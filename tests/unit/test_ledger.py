"""What the ledger says: which batches count, which rows wait in quarantine, and what an entry tells of itself."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from lakeupsert import clock
from lakeupsert.table.ledger import (
    LONGEST_STATEMENT,
    NOTHING,
    ChosenHost,
    LandingFile,
    LedgerEntry,
    QuarantineFile,
    ReplayedFile,
    RestorePoint,
    Statement,
    Touched,
    active_batches,
    fence_behind,
    find_counting,
    find_quarantined,
    next_stamp,
    without_touched,
)
from lakeupsert.table.manifest import Counters, DataFile, TombstoneFile

A, B = "d=2020-01-01", "d=2020-01-02"


def entry(kind: str = "batch", *partitions: str, **fields: Any) -> LedgerEntry:
    touched = dict.fromkeys(partitions, NOTHING)
    return LedgerEntry(
        **{"kind": kind, "batch_id": "", "received_at": 0, "spec_version": 0, "touched": touched, **fields}
    )


def restore(batch: int, *partitions: str) -> LedgerEntry:
    versions = dict.fromkeys(partitions, 0)
    return entry("restore", *partitions, restored=RestorePoint(snapshot=0, batch=batch, versions=versions))


@pytest.mark.parametrize(
    ("entries", "active"),
    [
        ([], set()),
        ([entry("create"), entry(), entry("fence"), entry()], {1, 3}),
        ([entry("create"), entry(), entry(), restore(1)], {1}),
        ([entry("create"), entry(), entry(), restore(1), entry()], {1, 4}),
        ([entry("create"), entry(), entry(), restore(1), entry(), restore(2)], {1, 2}),
        ([entry("create"), entry(), restore(0), entry("schema")], set()),
    ],
)
def test_batches_count_until_a_restore_goes_back_behind_them(entries: list[LedgerEntry], active: set[int]) -> None:
    assert active_batches(enumerate(entries)) == active


def test_batches_that_count_in_a_partition_are_those_up_to_its_merged() -> None:
    entries = [entry("create", A), entry("batch", A, B), entry("batch", A), restore(1, A, B), entry("batch", B)]
    assert find_counting(entries, {A: 2, B: 1}) == {0: [A], 1: [A, B], 2: [A]}
    assert find_counting(entries, {A: 3, B: 4}) == {0: [A], 1: [A, B], 4: [B]}
    assert find_counting(entries, {B: 0}) == {}


def test_rows_wait_in_quarantine_unless_a_batch_that_counts_replayed_them() -> None:
    def refused(*names: str) -> tuple[QuarantineFile, ...]:
        return tuple(QuarantineFile(name=name, rows=1) for name in names)

    first = entry(quarantine=refused("a", "b"))
    replay = entry(replayed=(ReplayedFile(batch=1, name="a", rows=1),), quarantine=refused("c"))
    retype = entry("schema", quarantine=refused("d"))
    for last, waiting in (retype, {1: "b", 2: "c", 3: "d"}), (restore(1), {1: "ab"}), (restore(0), {}):
        found = find_quarantined([entry("create"), first, replay, last])
        assert [(one.batch, one.name) for one in found] == [(n, name) for n, names in waiting.items() for name in names]


@pytest.mark.parametrize(("landing_bytes", "missing", "count"), [(None, "x.", 0), (2_500_000_000, None, 0)])
def test_host_that_nothing_is_missing_for_warns_of_nothing(landing_bytes: Any, missing: Any, count: int) -> None:
    assert len(ChosenHost(name="local", landing_bytes=landing_bytes, missing=missing).warnings) == count


def test_host_warns_of_a_large_night() -> None:
    [warning] = ChosenHost(name="local", landing_bytes=2_500_000_000, missing="No Java.").warnings
    assert warning.startswith("2.5 GB landed.")
    assert "No Java." in warning


def test_statement_says_what_was_asked_for() -> None:
    update = Statement(set={"v": "1", "w": "v"}, where="k > 2", seen=1, objects=())
    delete = Statement(keys="abc", seen=1, objects=())
    assert (update.kind, str(update)) == ("update", "update set v = 1, w = v where k > 2")
    assert (delete.kind, str(delete)) == ("delete", "delete for a list of keys")
    assert update.is_same(msgspec.structs.replace(update, seen=2))
    assert not update.is_same(msgspec.structs.replace(update, where=None))
    head = len("delete where ")
    for length, whole in (LONGEST_STATEMENT, True), (LONGEST_STATEMENT + 1, False):
        text = str(Statement(where="x" * (length - head), seen=1, objects=()))
        assert (len(text), text.endswith("…")) == (LONGEST_STATEMENT, not whole)
    assert entry(statement=update).sources == (str(update),)


def test_entry_has_the_figures_of_all_that_it_touched() -> None:
    one = Touched(files=(), rows=7, superseded=2, bytes=0, moved=3, followed=1)
    found = entry(touched={A: one, B: one}, quarantined={"malformed": 1, "null_key": 2}, received_at=1_500_000)
    assert (found.rows_appended, found.keys_moved, found.rows_superseded, found.rows_quarantined) == (8, 4, 4, 3)
    assert found.received == datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC)
    file = LandingFile(path="f", size=1, etag="", sha256="", rows=1)
    assert entry(files=(file,)).sources == ("f",)
    assert entry(replayed=(ReplayedFile(batch=1, name="q", rows=1),)).sources == ("q",)


def test_adopted_files_are_the_first_bucket_less_what_is_deleted() -> None:
    files = (DataFile(name="f", rows=5, bytes=1),)
    dead = (TombstoneFile(name="t", rows=2, bytes=1),)
    bucket = Touched(files=files, rows=7, superseded=0, bytes=1, tombstones=dead).as_adopted()
    assert (bucket.settled, bucket.base, bucket.tombstones) == (False, files, dead)
    assert bucket.counters == Counters(appended=7, live=5, tombstones=2)


def test_stamps_rise_even_if_the_clock_goes_back() -> None:
    class Stopped(clock.Source):
        def now(self) -> datetime:
            return datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC)

    with clock.use(Stopped()):
        assert next_stamp(None) == 2_000_000
        assert [next_stamp(entry(received_at=at)) for at in (1, 2_000_000, 2_000_001)] == [
            2_000_000,
            2_000_001,
            2_000_002,
        ]
        fence = fence_behind(entry(spec_version=3, received_at=5_000_000), 4, None)
        assert (fence.kind, fence.fence, fence.spec_version, fence.received_at) == ("fence", 4, 3, 5_000_001)


def test_header_has_all_but_what_an_entry_touched() -> None:
    assert without_touched(entry("batch", A, rows_read=3)) == entry(rows_read=3)
    assert without_touched(restore(1, A)) == restore(1)
