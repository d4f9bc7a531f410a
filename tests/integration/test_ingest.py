"""`ingest`: batch after batch by one process, while others wait, stop, or help."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lakeupsert import clock
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError
from lakeupsert.pipeline.append.commit import AppendResult
from lakeupsert.pipeline.leadership import Leadership
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.publish import PublishResult
from lakeupsert.pipeline.stop import Stop
from lakeupsert.retries import LEADER_SECONDS
from tests.harness.faults import FAULTS, Fault
from tests.harness.lake import Lake, row
from tests.harness.processes import wait_until

Result = AppendResult | PartitionResult | PublishResult


class Feed:
    """Lands the next file as soon as readers see the one before, and stops the process behind the last one."""

    def __init__(self, lake: Lake, batches: int) -> None:
        self.lake, self.left, self.stop = lake, iter(range(batches)), Stop()
        self.results: list[Result] = []
        self.seen = 0
        self.land()

    def land(self) -> None:
        number = next(self.left, None)
        if number is None:
            self.stop.set()
        else:
            rows = [row(f"k{number % 3}", number % 2, number, number), row(f"n{number}", number % 2, number, number)]
            self.lake.land(f"feed {number}.jsonl", rows)

    def took(self, result: Result) -> None:
        self.results.append(result)
        if isinstance(result, PublishResult) and result.batch > self.seen:
            self.seen = result.batch
            self.land()


def test_each_file_is_a_batch_that_readers_see_before_the_next_lands(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    feed = Feed(lake, 5)
    lake.table.ingest(seconds=0.001, stop=feed.stop, collect=feed.took)
    assert [len(r.entry.files) for r in feed.results if isinstance(r, AppendResult)] == [1] * 5
    assert [r.batch for r in feed.results if isinstance(r, PublishResult)] == [0, 1, 2, 3, 4, 5]
    assert [r.status for r in feed.results if isinstance(r, PartitionResult)] == ["merged"] * 5
    lake.check()


def test_readers_wait_for_their_own_interval(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("1.jsonl", [row("a", 0, 1, 1)])
    stop, published = Stop(), list[int]()

    def took(result: Result) -> None:
        if isinstance(result, PublishResult):
            published.append(result.batch)
        elif isinstance(result, PartitionResult) and result.merged == 1:
            lake.land("2.jsonl", [row("a", 0, 2, 2)])
        elif isinstance(result, PartitionResult):
            stop.set()

    lake.table.ingest(seconds=0.001, publish_seconds=1e9, stop=stop, collect=took)
    assert published == [2]
    lake.check()


def test_a_file_that_grows_is_taken_when_it_is_whole(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    rows = [row(f"k{n}", 0, n, n) for n in range(4)]
    stop, looks = Stop(), iter(range(1, 5))

    def grow() -> None:
        if number := next(looks, None):
            lake.land("1.jsonl", rows[:number])

    def took(result: Result) -> None:
        if isinstance(result, AppendResult):
            assert (result.entry.rows_read, result.entry.rows_quarantined) == (4, 0)
            stop.set()

    lake.table.ingest(seconds=0.001, stop=stop, alive=grow, collect=took)
    lake.check()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_killed_process_is_followed_by_another(tmp_path: Path, fault: Fault) -> None:
    first = Lake(tmp_path / "first", strategy="delta")
    first.land("0.jsonl", [row("k0", 0, 0, 0)])
    first.run()

    def two_batches(lake: Lake) -> None:
        feed = Feed(lake, 2)
        lake.table.ingest(seconds=0.001, leader_seconds=0, stop=feed.stop, collect=feed.took)

    def others_finish(lake: Lake) -> None:
        stop = Stop()

        def took(result: Result) -> None:
            taken = {f.path for _, entry in lake.entries() for f in entry.files}
            if isinstance(result, PublishResult) and taken == set(lake.landed):
                stop.set()

        lake.table.ingest(seconds=0.001, leader_seconds=0, max_seconds=60, stop=stop, collect=took)
        assert stop.is_set()
        lake.check()

    assert first.strike_every_call(fault, two_batches, others_finish) > 50


def test_a_store_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    first = Lake(tmp_path / "first")
    first.run()

    def strike(number: int) -> bool:
        lake = first.copy(tmp_path / f"{number}")
        feed, warnings = Feed(lake, 2), list[str]()
        lake.points.arm(number, Fault.BEFORE)
        lake.table.ingest(seconds=0.001, stop=feed.stop, max_seconds=20, collect=feed.took, warn=warnings.append)
        assert feed.stop.is_set()
        struck = lake.points.struck
        lake.points.disarm()
        lake.check()
        return struck is not None

    assert all(strike(number) for number in range(0, 60, 3))


def test_one_leads_and_the_next_one_waits(tmp_path: Path) -> None:
    lake, other = Lake(tmp_path), Lake(tmp_path)
    objects = lake.opened.history.objects, other.opened.history.objects
    one, two = (Leadership(each, 1e9) for each in objects)
    assert [one.lead(), two.lead(), one.lead(), two.lead()] == [True, False, True, False]
    assert two.leader == one.leader
    one.release()
    assert [two.lead(), one.lead()] == [True, False]
    hasty = Leadership(objects[0], 0)
    assert [hasty.lead(), hasty.lead()] == [True, True], "a leader that gives no sign has ended"
    assert len([*objects[0].leases.numbers()]) == 1


def test_a_leader_that_was_replaced_finds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the leases behind its own were deleted, whose numbers are free."""
    now = [0.0]
    monkeypatch.setattr(clock, "elapsed", lambda: now[0])
    objects = Lake(tmp_path).opened.history.objects
    slow, other = Leadership(objects), Leadership(objects)
    assert [slow.lead(), other.lead()] == [True, False]
    for _ in range(3):
        now[0] += LEADER_SECONDS
        assert other.lead()
    assert [slow.lead(), other.lead()] == [False, True]
    assert objects.leases.newest_number() == 3


def test_a_waiting_process_says_who_leads(tmp_path: Path) -> None:
    lake, other = Lake(tmp_path), Lake(tmp_path)
    leader = Leadership(lake.opened.history.objects)
    assert leader.lead()
    stop, warnings = Stop(), list[str]()

    def warn(text: str) -> None:
        warnings.append(text)
        stop.set()

    other.table.ingest(seconds=0.001, stop=stop, warn=warn)
    assert leader.leader is not None
    assert leader.leader in warnings[0]
    assert other.entries() == []


def test_a_missing_landing_zone_ends_it(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    (tmp_path / "landing").rmdir()
    with pytest.raises(ConfigurationError) as caught:
        lake.table.ingest(seconds=0.001)
    assert caught.value.code == "no-landing"
    lake.reopen()
    (tmp_path / "landing").mkdir()
    assert Leadership(lake.opened.history.objects).lead(), "it has released its lease"


def test_the_command_ends_by_sigterm_and_says_what_it_did(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("1.jsonl", [row("a", 0, 1, 1), row("a", 0, 2, 2)], [{**row("b", 0, 1, 1), "k": None}])
    health = tmp_path / "health"
    code = "from lakeupsert.cli import main; main()"
    options = ["--seconds", "0.05", "--health-file", str(health), "--config", str(lake.configure()), "--json"]
    process = subprocess.Popen([sys.executable, "-c", code, "ingest", *options], stdout=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: lake.table.snapshots() != [], "the batch is published")
        health.unlink()
        wait_until(health.exists, "the health file is touched")
        process.terminate()
        answer = json.loads(process.communicate()[0])
    finally:
        process.kill()
    assert (process.returncode, answer["error"]["code"]) == (75, "terminated")
    sums = {"batches": 1, "files": 1, "rows_read": 3, "rows_appended": 2, "rows_quarantined": 1}
    assert answer["result"].items() >= sums.items()
    assert answer["result"]["totals"]["merged"] == answer["result"]["publish"]["rows"] == len(answer["warnings"]) == 1
    assert Leadership(lake.opened.history.objects).lead(), "it has released its lease"
    lake.check()


def test_the_command_warns_of_a_batch_that_readers_do_not_see(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("1.jsonl", [row("a", 0, 1, 1), row("b", 1, 1, 1)])
    lake.run()
    [base, *_] = sorted((tmp_path / "processed").glob("d=*/base-*"))
    base.unlink()
    lake.land("2.jsonl", [row("a", 0, 2, 2), row("b", 1, 2, 2)])
    lake.table.append(host="local")
    arguments = ["ingest", "--max-seconds", "0.5", "--config", str(lake.configure()), "--json"]
    done = CliRunner().invoke(main, arguments)
    answer = json.loads(done.stdout)
    assert (done.exit_code, answer["error"]["code"]) == (1, "failed-partitions")
    assert any(base.name in warning for warning in answer["warnings"])
    assert answer["result"]["publish"]["batch"] == 1


def test_what_others_append_is_merged_at_the_next_look_at_the_whole_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakeupsert.operations.ingest.WHOLE_SECONDS", 0.05)
    lake, other, stop = Lake(tmp_path), Lake(tmp_path), Stop()

    def took(result: Result) -> None:
        if isinstance(result, PublishResult) and result.snapshot is None:
            other.land("1.jsonl", [row("a", 0, 1, 1)])
            other.table.append(host="local")
        elif isinstance(result, PublishResult) and result.batch:
            stop.set()

    lake.table.ingest(seconds=0.001, stop=stop, max_seconds=20, collect=took)
    assert stop.is_set()
    other.check()


def test_a_new_table_without_retention_begins(tmp_path: Path) -> None:
    lake = Lake(tmp_path, keep_snapshots=1, superseded_retention="0s")
    feed = Feed(lake, 2)
    lake.table.ingest(seconds=0.001, stop=feed.stop, max_seconds=20, collect=feed.took)
    assert feed.stop.is_set()
    lake.check()
