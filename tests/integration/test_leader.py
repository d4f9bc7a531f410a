"""A process that leads a table takes from memory what it read or wrote before, and others may commit beside it at any time."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from lakeupsert import Table
from lakeupsert.config import ReadSettings, TableSettings
from lakeupsert.errors import RefusedError
from lakeupsert.pipeline import previews, strategy
from lakeupsert.pipeline.messages import send_missing
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.storage import keeping
from lakeupsert.table import chain
from tests.harness.lake import Lake, row

DAYS = range(4)
STEPS = ("append", "dedupe", "publish")


class Leader:
    """A long-running process, which takes each batch through all steps."""

    def __init__(self, lake: Lake) -> None:
        self.lake, self.batch, self.looks = lake, 0, False
        self.opened = OpenTable("t", lake.settings)
        self.table = Table.of(self.opened)

    def land(self, days: Sequence[int] = DAYS) -> None:
        self.batch += 1
        self.lake.land(f"leader-{self.batch}.jsonl", [row(k, day, self.batch) for day in days for k in "ab"])

    def ingest(self, days: Sequence[int] = DAYS, before: str = "", amid: Callable[[], object] = lambda: None) -> None:
        """Take a batch in these partitions through all steps; ``amid`` runs ``before`` one of them."""
        self.land(days)
        for step in STEPS:
            if step == before:
                amid()
            with self.opened.leading(look=self.looks):
                if step == "append":
                    self.table.append(host="local")
                elif step == "dedupe":
                    assert {result.status for result in self.table.dedupe()} <= {"merged", "clean"}
                else:
                    self.table.publish()


@pytest.fixture
def leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Leader]:
    monkeypatch.setattr(strategy, "SMALL_BYTES", 0)
    leader = Leader(Lake(tmp_path, strategy="delta", keep_snapshots=1, superseded_retention="0s"))
    leader.ingest()
    leader.ingest()
    yield leader
    leader.table.close()


def another_night(lake: Lake) -> None:
    lake.land("another.jsonl", [row("c", day, 50) for day in DAYS])
    lake.table.append(host="local")
    lake.table.dedupe()
    lake.table.publish()


def batch_that_nobody_merged(lake: Lake) -> None:
    lake.land("another.jsonl", [row("c", day, 50) for day in DAYS])
    lake.table.append(host="local")


def compact(lake: Lake) -> None:
    lake.table.compact(full=True)


def compact_and_vacuum(lake: Lake) -> None:
    compact(lake)
    lake.table.vacuum(dry=False)


def restore(lake: Lake) -> None:
    lake.table.tag("here")
    another_night(lake)
    lake.table.restore("here", dry=False)


def merge_and_publish(lake: Lake) -> None:
    lake.table.dedupe()
    lake.table.publish()


def rename(lake: Lake) -> None:
    lake.table.rename_column("v", "w")
    lake.table.rename_column("w", "v")


OTHERS = [another_night, batch_that_nobody_merged, compact, compact_and_vacuum, restore, merge_and_publish, rename]


@pytest.mark.parametrize(
    ("kept_bytes", "fresh_seconds", "looks"), [(0, 3600, False), (1 << 20, 3600, True), (1 << 20, 0, False)]
)
@pytest.mark.parametrize("before", STEPS)
@pytest.mark.parametrize("other", OTHERS)
def test_what_another_process_commits_in_between_is_exact(
    leader: Leader,
    other: Callable[[Lake], None],
    before: str,
    kept_bytes: int,
    fresh_seconds: int,
    looks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``fresh_seconds``: 0 is a leader whose heads are all older than an hour."""
    lake = leader.lake
    monkeypatch.setattr(keeping, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(chain, "FRESH_SECONDS", fresh_seconds)
    leader.table.close()
    leader.opened = OpenTable("t", lake.settings)
    leader.table = Table.of(leader.opened)
    leader.ingest()
    leader.looks = looks
    leader.ingest(days=DAYS[1:], before=before, amid=lambda: other(lake))
    leader.ingest()
    lake.reopen()
    head = lake.table.objects.ledger.newest_number()
    lake.check()
    snapshot = lake.table.snapshot
    assert snapshot is not None
    assert snapshot.batch == head
    assert not lake.table.status().failed
    leader.ingest(days=DAYS[:2])
    lake.finish_and_check()


def test_a_file_that_a_vacuum_took_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process compacts and vacuums between a merge's look at the head and its look at the files."""
    monkeypatch.setattr(strategy, "SMALL_BYTES", 0)
    lake = Lake(tmp_path, strategy="delta", keep_snapshots=1, superseded_retention="0s")
    other = Lake(tmp_path, **lake.given)
    for ts in (1, 2, 3):
        lake.land(f"{ts}.jsonl", [row(k, 0, ts) for k in "ab"])
        if ts < 3:
            lake.run()
    lake.table.append(host="local")
    lake.points.amid(0, lambda: compact_and_vacuum(other), "open _lakeupsert/data/d=2020-01-01/delta-")
    assert [result.status for result in lake.table.dedupe()] == ["merged"]
    assert lake.points.struck
    assert not caplog.records, "no try failed"
    lake.points.disarm()
    lake.finish_and_check()


def test_leader_publishes_what_only_others_merged(leader: Leader) -> None:
    """Nothing to show is concluded from a new look only: no create would have lost."""
    lake = leader.lake
    batch_that_nobody_merged(lake)
    lake.table.dedupe()
    with leader.opened.leading():
        assert leader.table.publish().batch == lake.table.objects.ledger.newest_number()
    lake.check()


def test_a_look_finds_what_another_process_appended(leader: Leader) -> None:
    batch_that_nobody_merged(leader.lake)
    leader.lake.table.dedupe()
    with leader.opened.leading(look=True):
        assert send_missing(leader.opened) == len(DAYS), "heads of partitions are still those from memory"


def test_only_the_thread_that_leads_takes_heads_from_memory(leader: Leader) -> None:
    """A reader in the same process sees what another process has published."""
    another_night(leader.lake)
    seen: list[int] = []
    with leader.opened.leading():
        reader = Thread(target=lambda: seen.append(leader.table.view().snapshot.batch))
        reader.start()
        reader.join()
    assert seen == [leader.lake.table.view().snapshot.batch]


class Singer:
    """Two processes on a table whose source says from when on its rows are another copy."""

    def __init__(self, root: Path) -> None:
        self.landing = root / "landing"
        self.landing.mkdir()
        zones = {"landing": str(self.landing), "processed": str(root / "processed")}
        columns = {"key": ("id",), "partition_by": (), "order_by": ("at",), "schema": {"id": "bigint"}}
        settings = TableSettings(**zones, **columns, read=ReadSettings(envelope="singer"))
        self.leader, self.other = OpenTable("t", settings), Table("t", settings)

    def land(self, number: int, *messages: dict[str, Any]) -> Path:
        path = self.landing / f"{number}.jsonl"
        path.write_text("".join(json.dumps({"stream": "s", **message}) + "\n" for message in messages))
        return path

    def lead(self) -> None:
        with self.leader.leading():
            Table.of(self.leader).append(host="local")


def record(id: int, version: int) -> dict[str, Any]:
    return {"type": "RECORD", "record": {"id": id, "at": id}, "version": version}


def activate(version: int) -> dict[str, Any]:
    return {"type": "ACTIVATE_VERSION", "version": version}


def test_a_batch_that_lost_is_judged_by_what_won(tmp_path: Path) -> None:
    """Another process brought older rows, which the leader did not know when it took its own batch."""
    table = Singer(tmp_path)
    table.land(1, activate(2), record(1, 2))
    table.lead()
    late = table.land(2, record(2, 1))
    table.other.append(host="local")
    late.unlink()
    table.land(3, activate(2), record(3, 2))
    with pytest.raises(RefusedError, match="ACTIVATE_VERSION"):
        table.lead()


def test_a_batch_is_not_refused_because_of_what_the_leader_remembers(tmp_path: Path) -> None:
    """Another process has done what the refusal would ask for."""
    table = Singer(tmp_path)
    table.land(1, record(1, 1))
    table.lead()
    table.land(2, activate(2), record(1, 2))
    table.other.append(host="local", full="table")
    table.land(3, activate(2), record(2, 2))
    table.lead()
    assert [len(link.body.files) for link in table.other.objects.ledger.between(0, 3)] == [1, 1, 1]


@pytest.mark.parametrize(("days", "batches"), [(3, 70), (20, 5)])
def test_batch_asks_for_nothing_that_the_leader_knows(tmp_path: Path, days: int, batches: int) -> None:
    """It writes a pack, an entry, a group of manifests and a snapshot, for each partition a delta, and up to four versions.
    Each 8th batch also repeats the headers of the ledger in an object, and each 64th in another one."""
    leader = Leader(Lake(tmp_path, strategy="delta"))
    for _ in range(3):  # the third one allows groups
        leader.ingest(range(days))
    for number in range(batches):
        before = Counter(leader.table.requests)
        leader.ingest(range(days))
        sent = +(Counter(leader.table.requests) - before)
        headers = ((number + 2) % 8 == 6) + ((number + 2) % 64 == 62)
        versions = range(min(days, previews.VERSIONS_A_BATCH) + 1)
        # A group is not written if each partition gets a version.
        bounds = (Counter(put=days + 1 + (n < days), create=2 + n + headers, get=min(headers, 1)) for n in versions)
        assert any(sent == +bound for bound in bounds), (number, sent)
    leader.lake.finish_and_check()
