"""`ingest`: batch after batch by one process, while others wait, stop, or help."""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert import clock
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError
from lakeupsert.operations import ingest as ingesting
from lakeupsert.operations import rounds
from lakeupsert.pipeline.append.append import append
from lakeupsert.pipeline.append.commit import AppendResult
from lakeupsert.pipeline.append.discover import AppendOptions
from lakeupsert.pipeline.leadership import Leadership
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import PublishResult
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.workers.drain_queues import DrainOptions
from lakeupsert.retries import LEADER_SECONDS, REMIND_SECONDS, TICK_SECONDS
from lakeupsert.storage import ObjectInfo, StoreUnavailableError
from tests.harness.faults import FAULTS, Fault
from tests.harness.lake import Lake, row, without_base
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

    assert all(strike(number) for number in range(0, 54, 3))


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
    lake, base = without_base(tmp_path)
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
    other.land("0.jsonl", [row("a", 0, 0, 0)])

    def took(result: Result) -> None:
        if isinstance(result, PublishResult) and result.batch == 2:
            stop.set()
        elif isinstance(result, PublishResult) and result.batch == 1 and "1.jsonl" not in other.landed:
            other.land("1.jsonl", [row("a", 0, 1, 1)])
            other.table.append(host="local")

    lake.table.ingest(seconds=0.001, stop=stop, max_seconds=20, collect=took)
    assert stop.is_set()
    other.check()


def test_a_new_table_without_retention_begins(tmp_path: Path) -> None:
    lake = Lake(tmp_path, keep_snapshots=1, superseded_retention="0s")
    feed = Feed(lake, 2)
    lake.table.ingest(seconds=0.001, stop=feed.stop, max_seconds=20, collect=feed.took)
    assert feed.stop.is_set()
    lake.check()


def test_a_file_is_taken_only_as_it_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It rested for two looks, and its writer goes on before `append` lists it."""
    lake, stop, real = Lake(tmp_path), Stop(), append
    rows = [row(f"k{n}", 0, n, n) for n in range(4)]
    writes = iter([2, 3, 4])
    lake.land("1.jsonl", rows[:1])

    def write_on(table: OpenTable, options: AppendOptions) -> AppendResult | None:
        if options.only and (number := next(writes, None)):
            lake.land("1.jsonl", rows[:number])
        return real(table, options)

    def took(result: Result) -> None:
        if isinstance(result, AppendResult):
            assert result.entry.rows_read == 4
            stop.set()

    monkeypatch.setattr("lakeupsert.operations.ingest.append", write_on)
    lake.table.ingest(seconds=0.001, stop=stop, max_seconds=20, collect=took)
    assert stop.is_set()
    lake.check()


def test_a_file_that_changes_at_every_look_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakeupsert.operations.ingest.WHOLE_SECONDS", 0.05)
    lake, stop, looks, warnings = Lake(tmp_path), Stop(), count(1), list[str]()

    def write_on() -> None:
        lake.land("log.jsonl", [row("a", 0, k, k) for k in range(next(looks))])

    def warn(text: str) -> None:
        warnings.append(text)
        stop.set()

    lake.table.ingest(seconds=0.001, max_seconds=20, stop=stop, alive=write_on, warn=warn)
    assert "log.jsonl" in warnings[0]


class Hours(clock.Source):
    """Time that passes only while `Sleep` waits."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def elapsed(self) -> float:
        return self.seconds


class Sleep(Stop):
    def __init__(self, hours: Hours) -> None:
        super().__init__()
        self.hours = hours

    def wait(self, timeout: float | None = None) -> bool:
        self.hours.seconds += timeout or 0.0
        return self.is_set()


@pytest.fixture
def hours() -> Iterator[Hours]:
    source = Hours()
    with clock.use(source):
        yield source


@pytest.mark.parametrize(
    ("limits", "batches"),
    [({}, [5]), ({"batch_bytes": 1}, [1] * 5), ({"batch_rows": 4}, [1, 2, 2]), ({"batch_rows": 99}, [1, 4])],
    ids=str,
)
@pytest.mark.few(4)
def test_a_backlog_is_batches_that_follow_at_once(
    tmp_path: Path, hours: Hours, limits: dict[str, int], batches: list[int]
) -> None:
    """In the order that ranks their rows, and without the files of months that batches have taken."""
    lake, found = Lake(tmp_path), list[AppendResult]()
    for number in range(90, 99):
        lake.land(f"{number}.jsonl", [row("old", 0, number, number), row("older", 1, number)])
    lake.run()
    for number in range(100, 105):
        lake.land(f"{number}.jsonl", [row("a", 0, 7, number), row("b", 0, 7, number)])

    def took(result: Result) -> None:
        found.extend([result] if isinstance(result, AppendResult) else [])

    options = {"seconds": 60.0, "max_seconds": 119.0, "stop": Sleep(hours), **limits}
    lake.table.ingest(**options, collect=took)
    assert [len(one.entry.files) for one in found] == batches
    assert [file.path for one in found for file in one.entry.files] == [f"{number}.jsonl" for number in range(100, 105)]
    lake.check()


def test_a_partition_that_can_not_be_merged_is_tried_again_after_growing_pauses(
    tmp_path: Path, hours: Hours, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ingesting, "LONGEST_FAILED_SECONDS", 900.0)
    lake, failures = Lake(tmp_path), dict[float, None]()
    lake.land("0.jsonl", [row("z", 0, 0, 0), row("y", 1, 0, 0)])
    lake.run()
    [base] = (tmp_path / "processed/d=2020-01-01").glob("*.parquet")
    kept = base.read_bytes()
    base.write_bytes(b"")
    lake.land("1.jsonl", [row("z", 0, 1, 1), row("y", 1, 1, 1)])

    def took(result: Result) -> None:
        if isinstance(result, PartitionResult) and result.status == "failed":
            failures[hours.seconds] = None
        if len(failures) == 5 and "2.jsonl" not in lake.landed:
            lake.land("2.jsonl", [row("z", 0, 2, 2), row("y", 1, 2, 2)])
        if len(failures) == 8:
            base.write_bytes(kept)

    options = {"seconds": 60.0, "max_seconds": 6000.0, "stop": Sleep(hours)}
    lake.table.ingest(**options, collect=took)
    pauses = [round(b - a) for a, b in pairwise(failures)]
    assert pauses == [60, 120, 240, 480, 120, 780, 900], "the batch tries it once more"
    assert len([r for r in caplog.records if "tried again" in r.message and r.levelname == "WARNING"]) == 1
    lake.check()


def test_an_outage_is_told_again_but_not_at_each_look(
    tmp_path: Path, hours: Hours, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, real, told, troubles = Lake(tmp_path), ingesting.list_landing, list[float](), list[str]()
    lake.run()

    def listing(table: OpenTable, **given: Any) -> Iterator[ObjectInfo]:
        if 1000 < hours.seconds < 1400 or 5000 < hours.seconds < 9000:
            raise StoreUnavailableError("store-unreachable", "The store is away.", next="wait")
        return real(table, **given)

    def trouble(reason: str) -> None:
        troubles.extend([] if [reason] == troubles[-1:] else [reason])

    monkeypatch.setattr(ingesting, "list_landing", listing)
    options = {"seconds": 1.0, "max_seconds": 10_000.0, "stop": Sleep(hours)}
    lake.table.ingest(**options, warn=lambda text: told.append(hours.seconds), trouble=trouble)
    assert troubles == ["", "The store is away."] * 2 + [""]
    assert told[0] < 1002
    assert told[1] < 5002
    assert 6 <= len(told) <= 8
    assert hours.seconds == 10_000


def test_it_ends_in_time_and_is_alive_also_in_an_outage(
    tmp_path: Path, hours: Hours, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, alive = Lake(tmp_path), list[float]()
    lake.run()

    def away(table: OpenTable, **given: Any) -> Iterator[ObjectInfo]:
        raise StoreUnavailableError("store-unreachable", "The store is away.", next="wait")

    monkeypatch.setattr(ingesting, "list_landing", away)
    options = {"seconds": 20.0, "max_seconds": 70.0, "stop": Sleep(hours)}
    lake.table.ingest(**options, alive=lambda: alive.append(hours.seconds), warn=lambda text: None)
    assert hours.seconds == 70
    assert max(b - a for a, b in pairwise(alive)) <= TICK_SECONDS


def test_warnings_that_it_remembers_are_bounded(hours: Hours) -> None:
    shown = list[str]()
    warn = rounds.Warner(shown.append)
    for number in range(2 * rounds.KEPT_WARNINGS):
        hours.seconds += 1
        warn(f"{number}")
        warn(f"{number}")
    assert len(shown) == 2 * len(warn.shown_at) == 2 * rounds.KEPT_WARNINGS
    warn("0")
    hours.seconds += REMIND_SECONDS
    warn("0")
    assert shown[-2:] == ["0", "0"]


def test_the_health_file_says_why_it_can_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake, health, looks = Lake(tmp_path), tmp_path / "health", count()
    lake.run()
    said = set[str]()
    real = ingesting.list_landing

    def listing(table: OpenTable, **given: Any) -> Iterator[ObjectInfo]:
        said.add(health.read_text())
        if next(looks) % 2:
            raise StoreUnavailableError("store-unreachable", "The store is away.", next="wait")
        return real(table, **given)

    monkeypatch.setattr(ingesting, "list_landing", listing)
    arguments = ["ingest", "--seconds", "0.01", "--max-seconds", "0.3", "--health-file", str(health)]
    done = CliRunner().invoke(main, [*arguments, "--config", str(lake.configure()), "--json"])
    assert (done.exit_code, said) == (0, {"", "t: The store is away.\n"})


@pytest.mark.parametrize("command", ["ingest", "worker"])
def test_tables_of_one_process_share_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    lake, shares = Lake(tmp_path), set[int]()
    lake.run()
    config = lake.configure()
    text, zone = config.read_text(), str(tmp_path / "processed")
    config.write_text("\n".join(text.replace("[tables.t]", f"[tables.{n}]").replace(zone, f"{zone}-{n}") for n in "ab"))

    def drained(table: OpenTable, options: DrainOptions) -> list[PartitionResult]:
        shares.add(options.calls_at_once)
        return []

    for module in ("lakeupsert.operations.ingest", "lakeupsert.api"):
        monkeypatch.setattr(f"{module}.drain_queues", drained)
    done = CliRunner().invoke(main, [command, "--max-seconds", "0.1", "--config", str(config), "--json"])
    assert (done.exit_code, shares) == (0, {2}), done.output
