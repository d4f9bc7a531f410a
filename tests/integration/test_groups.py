"""Merges of a leader that get no version of their own: a snapshot names a group of manifests (ADR 0066)."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lakeupsert import Table
from lakeupsert.errors import DamagedTableError
from lakeupsert.operations import vacuum as vacuuming
from lakeupsert.pipeline import previews, strategy
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import PublishResult
from lakeupsert.pipeline.stop import Stop
from lakeupsert.table.group import FEATURE
from tests.harness.faults import Fault
from tests.harness.lake import Lake, row

DAYS = range(4)
KEPT: dict[str, Any] = {"strategy": "delta", "keep_snapshots": 2, "superseded_retention": "0s"}


class Leader:
    """A process that leads for long, one step at a time."""

    def __init__(self, lake: Lake) -> None:
        self.lake, self.batch = lake, 0
        self.opened = OpenTable("t", lake.settings)
        self.table = Table.of(self.opened)

    def append(self, days: Sequence[int] = DAYS) -> None:
        self.batch += 1
        rows = [row(k, day, self.batch, self.batch) for day in days for k in "ab"]
        self.lake.land(f"leader-{self.batch}.jsonl", rows)
        with self.opened.leading():
            self.table.append(host="local")

    def dedupe(self) -> None:
        with self.opened.leading():
            assert {result.status for result in self.table.dedupe()} <= {"merged", "clean"}

    def publish(self, *, look: bool = False) -> PublishResult:
        with self.opened.leading(look=look):
            return self.table.publish()

    def ingest(self, days: Sequence[int] = DAYS, times: int = 1) -> None:
        for _ in range(times):
            self.append(days)
            self.dedupe()
            self.publish()


@pytest.fixture
def leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Leader]:
    """Its third batch allows groups, and its fourth has one."""
    monkeypatch.setattr(strategy, "SMALL_BYTES", 0)
    leader = Leader(Lake(tmp_path, **KEPT))
    leader.ingest(times=4)
    yield leader
    leader.table.close()


def grouped(lake: Lake) -> dict[str, int]:
    """The partitions that the newest snapshot shows in groups, with the numbers of their versions."""
    lake.reopen()
    shown = lake.table.snapshots()[0].body.partitions
    return {partition: one.version for partition, one in shown.items() if one.group is not None}


def numbers(lake: Lake) -> dict[str, int | None]:
    shown = lake.table.snapshots()[0].body.partitions
    return {partition: lake.table.objects.partition(partition).newest_number() for partition in shown}


def objects(lake: Lake, folder: str) -> list[str]:
    return sorted(path.name for path in (lake.root / "processed/_lakeupsert" / folder).glob("*"))


def test_batches_that_are_merged_together_get_versions(leader: Leader) -> None:
    before = numbers(leader.lake)
    leader.append()
    leader.append()
    leader.dedupe()
    leader.publish()
    assert all(number >= (before[partition] or 0) + 2 for partition, number in numbers(leader.lake).items() if number)
    leader.lake.check()


def test_a_batch_of_many_partitions_has_one_object_of_manifests(leader: Leader) -> None:
    lake = leader.lake
    before = numbers(lake)
    assert set(grouped(lake)) == set(before)
    leader.ingest(times=2)
    assert numbers(lake) == before, "a version was appended"
    assert len(objects(lake, "groups")) >= 2
    lake.check()
    lake.finish_and_check()


def test_a_table_that_no_process_leads_has_none(tmp_path: Path) -> None:
    lake = Lake(tmp_path, strategy="delta")
    for number in range(4):
        lake.land(f"{number}.jsonl", [row("a", day, number) for day in DAYS])
        lake.run()
    assert not objects(lake, "groups")
    spec = lake.table.objects.specs.head()
    assert spec is not None
    assert (spec.number, spec.body.requires) == (0, ())


def test_a_small_batch_needs_no_feature(tmp_path: Path) -> None:
    leader = Leader(Lake(tmp_path, strategy="delta"))
    leader.ingest(range(2), times=4)
    spec = leader.lake.table.objects.specs.head()
    assert spec is not None
    assert spec.body.requires == ()
    leader.table.close()


def test_requests_of_a_batch_stay_within_their_bounds(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each partition gets a version in time, and never many in one batch."""
    monkeypatch.setattr(previews, "VERSIONS_A_BATCH", 1)
    last, longest = numbers(leader.lake), 0
    for _ in range(40):
        leader.ingest()
        now = numbers(leader.lake)
        longest = max(longest, sum(now[p] != last[p] for p in now))
        last = now
    assert longest == 1
    assert all(number is not None and number >= 4 for number in last.values())
    leader.lake.check()


def another_batch(lake: Lake) -> None:
    lake.land("another.jsonl", [row("c", day, 50) for day in DAYS])
    lake.run()


def merge_what_is_shown(lake: Lake) -> None:
    """A worker that gets an old message merges what readers see in groups once more."""
    shown = lake.table.snapshots()[0].body
    for partition in shown.partitions:
        lake.table.reprocess(lambda one, partition=partition: one == partition, host="local")


def reprocess(lake: Lake) -> None:
    lake.table.reprocess(source="landing", host="local")


def compact(lake: Lake) -> None:
    lake.table.compact(full=True)


def vacuum(lake: Lake) -> None:
    lake.table.vacuum(dry=False)


def compact_and_vacuum(lake: Lake) -> None:
    compact(lake)
    vacuum(lake)


def restore(lake: Lake) -> None:
    lake.table.tag("here")
    another_batch(lake)
    lake.table.restore("here", dry=False)
    lake.run()


OTHERS = [another_batch, merge_what_is_shown, reprocess, compact, vacuum, compact_and_vacuum, restore]


@pytest.mark.few(7)
@pytest.mark.parametrize("before", ["append", "dedupe", "publish"])
@pytest.mark.parametrize("other", OTHERS)
def test_what_another_process_commits_to_a_chain_is_kept(
    leader: Leader, other: Callable[[Lake], None], before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = leader.lake
    for hours in ("ORPHANS_KEPT", "ORPHANED_PACKS_KEPT", "UNITS_KEPT", "VERSIONS_KEPT"):
        monkeypatch.setattr(vacuuming, hours, vacuuming.timedelta(0))  # so that fences alone protect
    for step in ("append", "dedupe", "publish"):
        if step == before:
            other(lake)
        getattr(leader, step)()
    leader.dedupe()
    leader.publish()
    leader.ingest(times=2)
    lake.reopen()
    lake.check()
    for partition, version in grouped(lake).items():
        assert version == lake.table.objects.partition(partition).newest_number(), (
            "another's version is not below the preview"
        )
    lake.finish_and_check()


@pytest.mark.few(2)
@pytest.mark.parametrize("look", [False, True])
def test_a_leader_that_stalls_names_no_file_that_a_vacuum_took(
    tmp_path: Path, look: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its merges are a week old when it publishes, and no version names their files. No snapshot expires meanwhile."""
    monkeypatch.setattr(strategy, "SMALL_BYTES", 0)
    monkeypatch.setattr(vacuuming, "ORPHANS_KEPT", vacuuming.timedelta(0))
    leader = Leader(Lake(tmp_path, **KEPT | {"keep_snapshots": 100}))
    leader.ingest(times=4)
    leader.append()
    leader.dedupe()
    vacuum(leader.lake)
    leader.publish(look=look)
    leader.lake.reopen()
    leader.lake.check()
    leader.dedupe()
    leader.table.close()
    leader.lake.finish_and_check()


def test_a_vacuum_keeps_what_a_kept_snapshot_names_in_a_group(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacuuming, "ORPHANS_KEPT", vacuuming.timedelta(0))
    leader.ingest(times=5)
    leader.lake.reopen()
    vacuum(leader.lake)
    kept = {
        one.group.name for link in leader.lake.table.snapshots() for one in link.body.partitions.values() if one.group
    }
    assert sorted(name.rpartition("/")[2] for name in kept) == objects(leader.lake, "groups")
    leader.lake.check()
    leader.lake.finish_and_check()


def test_a_vacuum_keeps_what_it_cannot_account_for(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of an older snapshot is lost, and comes back from a backup."""
    monkeypatch.setattr(vacuuming, "ORPHANS_KEPT", vacuuming.timedelta(0))
    lake = leader.lake
    lake.table.tag("here")
    wanted, number = lake.rows(), lake.table.snapshots()[0].number
    groups = {path: path.read_bytes() for path in (lake.root / "processed/_lakeupsert/groups").iterdir()}
    lose_groups(lake)
    another_batch(lake)
    compact_and_vacuum(lake)
    for path, group in groups.items():
        path.write_bytes(group)
    assert lake.rows(number) == wanted


def test_a_group_can_be_restored(leader: Leader) -> None:
    lake = leader.lake
    wanted = lake.rows()
    lake.table.tag("here")
    leader.ingest(times=3)
    lake.reopen()
    vacuum(lake)
    lake.table.restore("here", dry=False)
    lake.run()
    assert lake.rows() == wanted
    lake.check()


def test_a_leader_that_begins_anew_merges_again_from_chains(leader: Leader) -> None:
    leader.table.close()
    leader.opened = OpenTable("t", leader.lake.settings)
    leader.table = Table.of(leader.opened)
    before = grouped(leader.lake)
    leader.ingest(times=2)
    assert all(grouped(leader.lake)[partition] > number for partition, number in before.items())
    leader.lake.check()


# The thread that extends leases renews the leader's, and may be the one that dies.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("fault", "batches"),
    [(Fault.KILL_AFTER, 2), *(pytest.param(fault, 3, marks=pytest.mark.crash) for fault in Fault)],
)
def test_a_death_at_any_call_of_grouped_batches_loses_nothing(
    tmp_path: Path, fault: Fault, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch of a process gets versions, and the others are grouped. Of three batches, vacuums follow each."""
    monkeypatch.setattr(strategy, "SMALL_BYTES", 0)
    monkeypatch.setattr(previews, "LEAST_PARTITIONS", 2)
    first = Leader(Lake(tmp_path / "first", **(KEPT if batches == 3 else {"strategy": "delta"})))
    first.ingest(range(2), times=4)
    first.table.close()
    first.lake.reopen()

    def take_batches(lake: Lake) -> None:
        left, stop = iter(range(batches)), Stop()

        def land() -> None:
            number = next(left, None)
            if number is None:
                stop.set()
            else:
                lake.land(f"feed {number}.jsonl", [row(f"k{number}", day, 90 + number) for day in range(2)])

        seen = [first.batch]

        def took(result: object) -> None:
            if isinstance(result, PublishResult) and result.batch > seen[0]:
                seen[0] = result.batch
                land()

        land()
        lake.table.ingest(seconds=0.001, leader_seconds=0, stop=stop, collect=took, max_seconds=60)

    def others_finish(lake: Lake) -> None:
        lake.run()
        lake.check()

    assert first.lake.strike_every_call(fault, take_batches, others_finish) > 20
    before = {*objects(first.lake, "groups")}
    take_batches(first.lake)
    assert {*objects(first.lake, "groups")} - before, "vacuums leave the last group at least"


def lose_groups(lake: Lake) -> None:
    for name in objects(lake, "groups"):
        (lake.root / "processed/_lakeupsert/groups" / name).unlink()
    lake.reopen()


def test_a_group_that_is_gone_is_named_and_merged_again(leader: Leader) -> None:
    lake = leader.lake
    wanted, data = lake.rows(), objects(lake, "data")
    lose_groups(lake)
    for reader in (lake.rows, lambda: vacuum(lake)):
        with pytest.raises(DamagedTableError, match="group of manifests that is missing") as caught:
            reader()
        assert f"lakeupsert reprocess --partition {caught.value.partition}" in caught.value.next
    named = [one.next for one in lake.table.doctor() if one.check == "manifests" and one.level == "problem"]
    assert len(named) == len(DAYS)
    assert objects(lake, "data") == data, "a vacuum deleted what it could not account for"
    for partition in grouped(lake):
        lake.table.reprocess(lambda one, partition=partition: one == partition, host="local")
    assert lake.rows() == wanted


def test_the_next_batch_needs_no_group_that_is_gone(leader: Leader) -> None:
    lake = leader.lake
    lose_groups(lake)
    leader.table.close()
    another_batch(lake)
    vacuum(lake)
    assert len(lake.rows()) == 3 * len(DAYS)


def test_another_feature_is_refused(leader: Leader) -> None:
    spec = leader.lake.table.objects.specs.head()
    assert spec is not None
    assert spec.body.requires == (FEATURE,)
