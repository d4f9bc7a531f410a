"""Workers as containers run them: signals, a kill, memory, a health file, and large partitions that Spark merges."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert import clock
from lakeupsert.cli import main
from lakeupsert.config import LargeSettings
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.pipeline import resources
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.merge.dedupe import dedupe_partitions
from lakeupsert.pipeline.resources import CONCURRENT_REQUESTS
from lakeupsert.pipeline.standing import failed_partitions, is_through
from lakeupsert.pipeline.stop import Stop, WorkerOptions
from lakeupsert.pipeline.workers import pool as worker_pool
from lakeupsert.pipeline.workers.worker import UNANSWERED, drain, drain_received, mark_failed
from lakeupsert.queue import Lease, QueueStats
from lakeupsert.table.layout import TableObjects
from tests.harness.faults import Fault
from tests.harness.lake import Lake, row
from tests.harness.processes import PATIENCE_SECONDS, wait_until
from tests.harness.proxy import FaultProxy, Rule
from tests.harness.servers import Server

PARTITIONS = [f"d=2020-01-{day:02}" for day in range(1, 5)]
FIRST_BASE = Rule("hold", "PUT", "/processed/d=", times=1)
LARGE = PARTITIONS[2]


Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Begins the command in a process of its own, as in a container; one that a test left is killed."""
    with ExitStack() as left:

        def begin(lake: Lake, *args: str) -> subprocess.Popen[str]:
            config = str(lake.configure())
            code = "from lakeupsert.cli import main; main()"
            command = [sys.executable, "-c", code, *args, "--config", config, "--json"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            left.callback(process.kill)
            return process

        yield begin


def end(process: subprocess.Popen[str], code: int = 0) -> Any:
    out, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == code, errors
    return json.loads(out)


def call(lake: Lake, *args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(main, [*args, "--config", str(lake.configure()), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def count(lake: Lake) -> QueueStats:
    return lake.table.objects.queue.stats()


# ---------------------------------------------------------------- on S3 and SQS


@pytest.fixture
def proxy(moto: Server, new_proxy: Callable[[Server], FaultProxy]) -> Iterator[FaultProxy]:
    proxy = new_proxy(moto)
    yield proxy
    proxy.go()


@pytest.fixture
def lake(
    tmp_path: Path,
    proxy: FaultProxy,
    elasticmq: Server,
    new_bucket: Callable[[Server], str],
    new_sqs_queue: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Lake]:
    """A batch of four partitions that is appended; a message is hidden from others for a quarter of an hour."""
    bucket = new_bucket(proxy.server)
    for name, value in elasticmq.env.items():
        monkeypatch.setenv(name, value)
    zones = {"landing": f"s3://{bucket}/landing", "processed": f"s3://{bucket}/processed"}
    lake = Lake(tmp_path, **zones, queue=f"sqs://{new_sqs_queue()}")
    lake.land("1.jsonl", [row("a", day, 1, 1) for day in range(len(PARTITIONS))])
    lake.table.append(host="local")
    yield lake
    lake.table.close()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_sigterm_lets_a_merge_be_finished(begin: Begin, lake: Lake, proxy: FaultProxy, processes: str) -> None:
    proxy.rules = (FIRST_BASE,)
    worker = begin(lake, "worker", "--workers", processes)
    wait_until(proxy.holds.is_set, "a merge writes its file")
    worker.terminate()
    proxy.go()
    answer = end(worker, 75)
    assert answer["error"]["code"] == "terminated"
    merged = answer["result"]["totals"]["merged"]
    assert merged > 0
    assert count(lake) == QueueStats(len(PARTITIONS) - merged, 0, 0)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_sigterm_gives_back_what_takes_longer_than_the_grace(
    begin: Begin, lake: Lake, proxy: FaultProxy, processes: str
) -> None:
    """With more processes the others may have merged theirs meanwhile."""
    proxy.rules = (FIRST_BASE,)
    worker = begin(lake, "worker", "--workers", processes, "--grace-seconds", "0")
    wait_until(proxy.holds.is_set, "a merge writes its file")
    worker.terminate()
    assert end(worker, 75)["error"]["code"] == "terminated"
    found = count(lake)
    assert (found.leased, found.dead) == (0, 0)
    assert 0 < found.visible <= len(PARTITIONS)
    proxy.go()
    call(lake, "dedupe")
    lake.check()
    assert lake.rows() == lake.expected(1)


def test_run_finishes_after_a_worker_was_killed(begin: Begin, lake: Lake, proxy: FaultProxy) -> None:
    proxy.rules = (FIRST_BASE,)
    worker = begin(lake, "worker", "--workers", "1")
    wait_until(proxy.holds.is_set, "a merge writes its file")
    worker.kill()
    worker.communicate()
    proxy.go()
    assert count(lake).leased == len(PARTITIONS)  # SQS knows nothing of the worker's death
    call(lake, "run", "--host", "local")
    lake.check()
    assert lake.rows() == lake.expected(1)


@pytest.mark.parametrize("processes", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_health_file_is_touched_while_it_merges_and_while_it_waits(
    begin: Begin, lake: Lake, proxy: FaultProxy, tmp_path: Path, processes: str
) -> None:
    health = tmp_path / "health"
    proxy.rules = (FIRST_BASE,)
    worker = begin(lake, "worker", "--workers", processes, "--health-file", str(health))

    def touched_again(times: int = 2) -> None:
        for _ in range(times):
            health.unlink(missing_ok=True)
            wait_until(health.exists, "the health file is touched")

    wait_until(proxy.holds.is_set, "a merge writes its file")
    touched_again()
    proxy.go()
    wait_until(lambda: count(lake) == QueueStats(0, 0, 0), "all is merged", 0.05)
    touched_again()
    worker.terminate()
    end(worker, 75)


def test_health_file_in_no_folder_is_refused(lake: Lake, tmp_path: Path) -> None:
    error = call(lake, "worker", "--health-file", str(tmp_path / "none/health"), code=2)["error"]
    assert error["code"] == "usage"


# ---------------------------------------------------------------- on a local disk


@pytest.fixture
def local(folder: Path) -> Lake:
    """Four partitions, of which Spark has to merge one; rows that don't compress, since bytes decide."""
    large = LargeSettings(queue=str(folder / "large.sqlite"), bytes="10kB")
    lake = Lake(folder, large=large)
    chance = random.Random(0)
    rows = [row("a", day, 1, 1) for day in range(len(PARTITIONS))]
    lake.land("1.jsonl", rows + [row(chance.randbytes(20).hex(), PARTITIONS.index(LARGE), 1) for _ in range(1000)])
    lake.table.append(host="local")
    return lake


def test_worker_begins_nothing_after_sigterm(local: Lake) -> None:
    stop = Stop()
    local.points.amid(0, stop.set, "queue receive")
    options = WorkerOptions(until_empty=False, stop=stop, collect=lambda result: pytest.fail("it merged"))
    drain(local.opened, ArrowEngine(), options)
    assert count(local) == QueueStats(len(PARTITIONS), 0, 0)


class _Clock(clock.Source):
    """Time goes on by merging alone."""

    seconds = 0.0

    def elapsed(self) -> float:
        return self.seconds


class _Slow(ArrowEngine):
    """Ten seconds a call, of one partition."""

    partitions_per_call = 1

    def __init__(self, source: _Clock) -> None:
        super().__init__()
        self._source = source

    def merge(self, *args: Any) -> Any:
        self._source.seconds += 10
        return super().merge(*args)


@pytest.mark.parametrize(("max_seconds", "merged"), [(5, 1), (25, 2), (31, 3)])
def test_worker_begins_nothing_that_would_pass_its_time(folder: Path, max_seconds: float, merged: int) -> None:
    lake = Lake(folder)
    lake.land("1.jsonl", [row("a", day, 1) for day in range(len(PARTITIONS))])
    lake.table.append(host="local")
    source = _Clock()
    results: list[PartitionResult] = []
    with clock.use(source):
        drain(lake.opened, _Slow(source), WorkerOptions(collect=results.append, max_seconds=max_seconds))
    assert len(results) == merged


class _DiesEarly(ProcessPoolExecutor):
    """Its process is killed when it has started, before it is given work."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        found = super().submit(call, *args, **kwargs)
        if call is os.getpid:
            os.kill(found.result(), signal.SIGKILL)
            assert super().submit(time.sleep, PATIENCE_SECONDS).exception() is not None
        return found


def test_process_that_is_killed_before_it_has_work_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "ProcessPoolExecutor", _DiesEarly)
    monkeypatch.setattr(worker_pool, "FEW_MESSAGES", 0)
    monkeypatch.setattr(worker_pool, "MOST_DEATHS", 3)
    lake = Lake(folder)
    lake.land("1.jsonl", [row("a", 0, 1, 1)])
    call(lake, "append", "--host", "local")
    assert call(lake, "dedupe", "--workers", "2", code=75)["error"]["code"] == "worker-died"
    assert lake.table.status().queue == QueueStats(1, 0, 0)


def test_partition_that_does_not_fit_into_memory_is_refused_and_merged_where_it_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(folder)
    lake.land("1.jsonl", [row("a", 0, 1, 1)])
    call(lake, "append", "--host", "local")
    with monkeypatch.context() as patched:
        patched.setattr(worker_pool, "PROCESS_BYTES", 1 << 60)
        error = call(lake, "dedupe", code=1)["error"]
    assert error["code"] == "failed-partitions"
    assert error["partition"] == PARTITIONS[0]
    assert "MB of memory" in error["message"]
    assert "--workers" in error["next"]
    assert call(lake, "status", code=1)["result"]["queue"] == {"visible": 0, "leased": 0, "dead": 1}
    call(lake, "redrive")
    call(lake, "worker", "--until-empty")
    assert lake.rows() == lake.expected(1)


def test_partition_that_does_not_fit_into_memory_is_handed_to_spark(local: Lake) -> None:
    results: list[PartitionResult] = []
    drain(local.opened, ArrowEngine(memory_limit=0), WorkerOptions(collect=results.append))
    assert {r.status for r in results} == {"large"}
    assert local.table.status().large_queue == QueueStats(len(PARTITIONS), 0, 0)


def test_large_partition_is_handed_from_arrow_to_spark(local: Lake, spark: Any) -> None:
    small = call(local, "worker", "--until-empty", "--workers", "1")
    found = {p["partition"]: p["status"] for p in small["result"]["partitions"]}
    assert found == {p: "large" if p == LARGE else "merged" for p in PARTITIONS}
    status = call(local, "status")["result"]
    assert status["queue"] == status["large_queue"] == {"visible": 1, "leased": 0, "dead": 0}
    large = call(local, "worker", "--until-empty", "--engine", "spark")
    [merged] = large["result"]["partitions"]
    assert (merged["partition"], merged["engine"], merged["status"]) == (LARGE, "spark", "merged")
    assert local.table.status().queue == QueueStats(0, 0, 0)
    local.check()
    assert local.rows() == local.expected(1)


def test_worker_processes_hand_large_partitions_on(begin: Begin, local: Lake) -> None:
    worker = begin(local, "worker", "--workers", "2")
    wait_until(lambda: count(local) == QueueStats(0, 0, 0), "the usual queue is empty", 0.05)
    worker.terminate()
    totals = end(worker, 75)["result"]["totals"]
    assert (totals["merged"], totals["large"]) == (len(PARTITIONS) - 1, 1)
    assert [message.partition for message in local.opened.resources.large_queue.messages()] == [LARGE]


@pytest.mark.core
def test_run_finishes_both_queues(local: Lake, spark: Any) -> None:
    local.land("2.jsonl", [row("a", day, 2, 2) for day in range(len(PARTITIONS))])
    results = local.table.run(host="local").dedupe
    assert {r.partition: r.engine for r in results if r.status == "merged"} == {
        p: "spark" if p == LARGE else "arrow" for p in PARTITIONS
    }
    local.check()
    assert local.rows() == local.expected(2)


def test_run_finishes_what_an_earlier_one_left_for_spark(local: Lake, spark: Any) -> None:
    call(local, "worker", "--until-empty", "--workers", "1")
    local.table.dedupe()
    local.finish_and_check()


def test_reprocess_goes_through_both_queues(local: Lake, spark: Any) -> None:
    local.run()
    before = local.rows()
    done = local.table.reprocess()
    assert not done.left
    assert {r.partition: r.engine for r in done.dedupe if r.status == "merged"} == {
        p: "spark" if p == LARGE else "arrow" for p in PARTITIONS
    }
    assert local.rows() == before


def test_dead_letters_of_both_queues_are_counted_and_brought_back_to_their_own(local: Lake) -> None:
    table = local.opened
    call(local, "worker", "--until-empty", "--workers", "1")
    local.land("2.jsonl", [row("a", 0, 2, 2)])
    local.table.append(host="local")
    for queue in table.resources.queues:
        [lease] = queue.receive(10, 60)
        queue.bury(lease, f"buried in {queue!r}")
    status = call(local, "status", code=1)
    assert status["error"]["code"] == "dead-letters"
    assert (status["result"]["queue"]["dead"], status["result"]["large_queue"]["dead"]) == (2, 1)
    dead = [x for x in local.table.doctor() if x.check == "queue" and x.level == "warning"]
    assert ["large partitions" in x.found for x in dead] == [False, True]
    assert call(local, "redrive")["result"] == {"redriven": 2, "dropped": 0, "left": 0}
    assert [queue.stats() for queue in table.resources.queues] == [QueueStats(1, 0, 0)] * 2
    for queue in table.resources.queues:
        [lease] = queue.receive(10, 60)
        queue.bury(lease, "again")
    local.table.reconcile()
    assert set(local.table.status().failed) == {PARTITIONS[0], LARGE}


# -- messages that were received elsewhere


def drain_all(lake: Lake, seconds_left: Callable[[], float] = lambda: 3600) -> list[Lease]:
    """All messages, hidden for an hour, given to one thread; what it gave back."""
    table = lake.opened
    leases = table.resources.queue.receive(len(PARTITIONS), 3600)
    return drain_received(table, lambda threads: ArrowEngine(), leases, workers=1, seconds_left=seconds_left)


def until_first_ack(lake: Lake) -> Callable[[], float]:
    """No time is left for a second partition. Who waits has time, or it would give back a message that is being acked."""
    lake.points.seen.clear()
    waiting = threading.current_thread()
    return lambda: 3600 if threading.current_thread() is waiting or "queue ack" not in lake.points.seen else 0


def test_partition_that_nobody_begins_uses_up_no_try(local: Lake) -> None:
    queue = local.opened.resources.queue
    for left in reversed(range(len(PARTITIONS))):
        assert drain_all(local, until_first_ack(local)) == []
        assert queue.stats() == QueueStats(visible=left, leased=0, dead=0)
        leases = queue.receive(len(PARTITIONS), 60)
        assert [lease.receives for lease in leases] == [1] * left
        queue.send([lease.message for lease in leases])
        for lease in leases:
            queue.ack(lease)


@pytest.mark.parametrize(("call", "back", "hidden"), [("send", 3, 0), ("ack", 0, 1)])
def test_refused_answer_about_what_was_not_begun_keeps_nobody_from_the_others(
    local: Lake, call: str, back: int, hidden: int
) -> None:
    local.points.arm(
        1, Fault.BEFORE, ("queue ack", f"queue {call}")
    )  # the first is the ack of the partition that is merged
    assert len(drain_all(local, until_first_ack(local))) == back
    assert local.table.objects.queue.stats() == QueueStats(visible=3, leased=hidden, dead=0)


def test_refused_release_keeps_nobody_from_the_others(local: Lake) -> None:
    local.points.arm(1, Fault.BEFORE, "queue release")
    assert len(drain_all(local, lambda: 0)) == len(PARTITIONS)
    assert local.table.objects.queue.stats() == QueueStats(visible=3, leased=1, dead=0)


def received(lake: Lake) -> list[Lease]:
    """All messages that are visible, those too that a receive gives alone: as Lambda's event source has them."""
    queue = lake.opened.resources.queue
    return list(chain.from_iterable(iter(lambda: queue.receive(1, 3600), [])))


@pytest.mark.parametrize("workers", [1, 2])
def test_partitions_that_are_too_slow_for_a_call_are_buried_in_the_end(folder: Path, workers: int) -> None:
    begun, frozen = threading.Event(), threading.Event()

    class Slow(ArrowEngine):
        def merge(self, *arguments: Any) -> Any:
            begun.set()
            frozen.wait()
            raise InterruptedError

    lake = Lake(folder)
    lake.land("1.jsonl", [row("a", day, 1) for day in range(2)])
    lake.table.append(host="local")
    table = lake.opened
    try:
        for _ in range(20):
            begun.clear()
            drain_received(
                table,
                lambda threads: Slow(),
                received(lake),
                workers=workers,
                seconds_left=lambda: 0 if begun.is_set() else 3600,
            )
            if not table.resources.queue.stats().visible:
                break
        assert table.resources.queue.stats() == QueueStats(visible=0, leased=0, dead=2)
        assert failed_partitions(table.history, PARTITIONS, None) == dict.fromkeys(PARTITIONS[:2], UNANSWERED)
    finally:
        frozen.set()
        for thread in [t for t in threading.enumerate() if t.name.startswith("dedupe")]:
            thread.join()


@pytest.mark.parametrize(("partitions", "third"), [(1, False), (2, True)])
def test_partition_that_needs_all_the_memory_gets_it_alone_or_at_its_third_try(
    folder: Path, partitions: int, third: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakeupsert.pipeline.workers.worker.RETRY_SECONDS", 0.0)
    lake = Lake(folder)
    lake.land("1.jsonl", [row("a", day, 1) for day in range(partitions)])
    lake.table.append(host="local")
    table = lake.opened
    for done in (not third, not third, True):
        drain_received(
            table,
            lambda threads: ArrowEngine(1 << 30 if threads == 1 else 0),
            received(lake),
            workers=2,
            seconds_left=lambda: 3600,
        )
        assert [lake.is_merged(p, 1) for p in PARTITIONS[:partitions]] == [done] * partitions


def test_table_is_through_where_each_partition_is_merged_or_marked_failed(folder: Path) -> None:
    lake = Lake(folder)
    lake.land("1.jsonl", [row("a", day, 1) for day in range(2)])
    lake.table.append(host="local")
    table = lake.opened
    assert not is_through(table.history)
    dedupe_partitions(table, ArrowEngine(), {PARTITIONS[1]: 1})
    assert not is_through(table.history)
    mark_failed(table.history, PARTITIONS[0], 1, "a test")
    assert is_through(table.history)
    lake.table.dedupe()
    assert is_through(table.history)
    lake.table.publish()
    assert not is_through(table.history)


def test_last_worker_looks_at_many_partitions_at_once_and_others_at_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(folder)
    lake.land("1.jsonl", [row("a", day, 1) for day in range(1 + CONCURRENT_REQUESTS)])
    lake.table.append(host="local")
    lake.reopen()
    *_, last = (p for _, entry in lake.entries() for p in entry.touched)
    monkeypatch.setattr(resources, "is_remote", lambda address: True)  # local files are looked at one after the other
    looked: list[str] = []
    together = threading.Barrier(CONCURRENT_REQUESTS)
    partition = TableObjects.partition

    def looks(objects: TableObjects, name: str) -> Any:
        looked.append(name)
        if name != last:
            together.wait(PATIENCE_SECONDS)
        return partition(objects, name)

    with monkeypatch.context() as patch:
        patch.setattr(TableObjects, "partition", looks)
        assert not is_through(lake.opened.history)
    assert looked == [last]
    lake.table.dedupe()
    monkeypatch.setattr(TableObjects, "partition", looks)
    assert is_through(lake.opened.history)
    assert len(looked) == 1 + 1 + CONCURRENT_REQUESTS


def test_partition_that_cannot_be_handed_on_fails_with_that_reason(
    local: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakeupsert.pipeline.workers.worker.RETRY_SECONDS", 0.0)
    table = local.opened
    (local.root / "large.sqlite").write_text("not a queue")
    while table.resources.queue.stats().visible:
        drain_all(local)
    [letter] = table.resources.queue.dead_letters()
    assert (letter.message.partition, letter.receives) == (LARGE, table.resources.queue.max_receives)
    assert "large.sqlite" in letter.reason
    assert failed_partitions(table.history, [LARGE], None) == {LARGE: letter.reason}
