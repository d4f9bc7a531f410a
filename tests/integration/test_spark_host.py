"""Both phases on Spark's executors: `--host spark` with engine arrow."""

import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.cli.signals import Terminated
from lakeupsert.engine.hosted import HostedEngine
from lakeupsert.errors import ConfigurationError, DamagedTableError, ExecutorError, RefusedError, TaskDiedError
from lakeupsert.operations import reconcile
from lakeupsert.pipeline.merge import dedupe
from tests.harness.lake import DAY, Lake, row
from tests.harness.processes import wait_until

pytestmark = pytest.mark.usefixtures("spark")
DAYS = 12


@pytest.mark.core
@pytest.mark.parametrize("chosen", ["rewrite", "delta"])
def test_nights_equal_the_model(tmp_path: Path, chosen: str) -> None:
    lake = Lake(tmp_path / "lake", strategy=chosen, bucket="8KiB")
    for night in range(3):
        rows = [row(f"k{i:04}", day, 10 * night + i % 3, i + night) for day in range(3) for i in range(night, 900, 7)]
        lake.land(f"{night}.jsonl", [*rows, row("gone", 1, night, op="D" if night == 1 else None)])
        ran = lake.table.run(host="spark")
        assert {(r.engine, r.status) for r in ran.dedupe} == {("arrow", "merged")}
        lake.check()
    lake.table.compact(full=True, host="spark")
    lake.check()
    lake.table.reprocess(source="landing", host="spark")
    lake.check()


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ["arrow", "spark"])
def test_a_damaged_file_fails_its_partition_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    from lakeupsert.engine.spark_window import SparkEngine

    kind = {"arrow": HostedEngine, "spark": SparkEngine}[engine]
    lake = Lake(tmp_path / "lake")
    lake.land("0.jsonl", [row(f"k{i}", day, 1) for day in range(DAYS) for i in range(20)])
    lake.run()
    [damaged] = (tmp_path / "lake/processed/d=2020-01-03").glob("base-*")
    damaged.write_bytes(damaged.read_bytes()[:100])
    lake.land("1.jsonl", [row(f"k{i}", day, 2) for day in range(DAYS) for i in range(0, 20, 2)])
    lake.table.append(host="local")
    calls = []
    merge = kind.merge
    monkeypatch.setattr(kind, "merge", lambda self, *given: (calls.append(len(given[3])), merge(self, *given))[1])
    results = lake.table.dedupe(host="spark", engine=engine)
    assert calls == [DAYS, *[1] * (lake.opened.resources.queue.max_receives - 1)], "the others are merged once"
    assert {r.partition for r in results if r.status == "failed"} == {"d=2020-01-03"}
    assert sum(r.status == "merged" for r in results) == DAYS - 1
    assert damaged.name in lake.table.status().failed["d=2020-01-03"]


def test_a_call_has_so_many_tasks_at_most_and_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake(tmp_path / "lake")
    lake.land("0.jsonl", [row(f"k{i}", day, 1) for day in range(DAYS) for i in range(3)])
    lake.table.append(host="local")
    monkeypatch.setattr(dedupe, "MOST_TASKS", 5)
    merge, calls = HostedEngine.merge, []

    def counted(self: HostedEngine, *given: Any) -> Any:
        committed = sum(
            lake.opened.history.objects.partition(f"d={DAY + timedelta(day)}").head() is not None for day in range(DAYS)
        )
        calls.append((len(given[3]), committed))
        return merge(self, *given)

    monkeypatch.setattr(HostedEngine, "merge", counted)
    lake.table.dedupe(host="spark")
    assert calls == [(5, 0), (5, 5), (2, 10)]
    lake.table.publish()
    lake.check()


@pytest.mark.core
def test_a_partition_whose_task_died_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its executors may be lost, and nothing be wrong with it."""
    lake = Lake(tmp_path / "lake")
    lake.land("0.jsonl", [row(f"k{i}", day, 1) for day in range(DAYS) for i in range(3)])
    lake.table.append(host="local")
    merge, calls = HostedEngine.merge, []

    def with_a_death(self: HostedEngine, *given: Any) -> Any:
        calls.append(len(given[3]))
        died = TaskDiedError("task-died", "Killed.", next="give it more")
        tasks = zip(given[3], merge(self, *given), strict=True)
        ill = {"d=2020-01-03"} if len(calls) == 1 else set()
        return [died if task.partition in ill | {"d=2020-01-04"} else output for task, output in tasks]

    monkeypatch.setattr(HostedEngine, "merge", with_a_death)
    results = lake.table.dedupe(host="spark")
    assert calls == [DAYS, 2, 1, 1, 1]
    assert [r.partition for r in results if r.status == "failed"] == ["d=2020-01-04"]
    assert list(lake.table.status().failed) == ["d=2020-01-04"]
    monkeypatch.undo()
    lake.finish_and_check()


def test_both_hosts_adopt_and_prove_the_same(tmp_path: Path) -> None:
    """Counts, digests, requests, and damage: a lost file, a file of other rows."""
    lakes = {host: Lake(tmp_path / host) for host in ("local", "spark")}
    found = {}
    for host, lake in lakes.items():
        for part in range(3):
            lake.lay(f"part-{part}.parquet", [row(f"k{part}-{i}", day, 1, i) for day in range(DAYS) for i in range(9)])
        adopted = lake.table.adopt(host=host)  # type: ignore[arg-type]
        lake.land("1.jsonl", [row(f"k0-{i}", day, 2) for day in range(DAYS - 1) for i in range(0, 9, 2)])
        lake.run()
        folders = tmp_path / host / "processed"
        next((folders / "d=2020-01-03").glob("base-*")).unlink()
        (other,), (here,) = ((folders / f"d=2020-01-0{day}").glob("base-*") for day in (4, 5))
        other.write_bytes(here.read_bytes()[:50])
        proof = lake.table.reconcile(host=host).proof  # type: ignore[arg-type]
        ids = re.compile(r"base-[^ ]*|/[^ ]*/")
        told = [replace(p, difference=p.difference and ids.sub("FILE", p.difference)) for p in proof]
        found[host] = replace(adopted, snapshot=None), told, lake.table.requests
    assert found["local"] == found["spark"]
    assert [p.partition for p in found["spark"][1] if not p.balanced] == ["d=2020-01-03", "d=2020-01-04"]


def test_buckets_are_counted_so_many_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lakeupsert.engine.spark_host import SparkHost

    lake = Lake(tmp_path, bucket="2KiB")
    chance = random.Random(0)
    rows = [row(chance.randbytes(20).hex(), day, 1, chance.randrange(1 << 60)) for day in (0, 1, 3) for _ in range(400)]
    lake.land("0.jsonl", [*rows, *(row(f"k{day}", day, 1) for day in range(4, DAYS))])
    lake.run()
    manifests = [lake.opened.history.objects.partition(f"d={DAY + timedelta(day)}").head() for day in (0, 1, 3)]
    buckets = [len(manifest.body.buckets) for manifest in manifests if manifest]
    assert min(buckets) > 1
    calls = []
    real = SparkHost.map
    monkeypatch.setattr(SparkHost, "map", lambda self, *given: (calls.append(len(given[1])), real(self, *given))[1])
    monkeypatch.setattr(reconcile, "BUCKETS_A_CALL", max(buckets))
    proof = lake.table.reconcile(host="spark").proof
    assert all(p.balanced and p.by_digest for p in proof)
    assert len(proof) == DAYS - 1
    assert sum(calls) == sum(buckets) + DAYS - 4
    assert max(calls) <= max(buckets)


def test_no_items_are_no_work(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    lake.land("0.jsonl", [row("k", 0, 1)])
    lake.run()
    assert lake.table.export(f"{(tmp_path / 'x').as_uri()}/", where="d = '2019-01-01'", host="spark") == 0
    assert [path.name for path in (tmp_path / "x").rglob("*") if path.is_file()] == ["_common_metadata"]
    assert not lake.table.reconcile(host="spark", selected=lambda partition: False).proof


def test_both_hosts_refuse_a_file_without_a_footer(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.lay("part-0.parquet", [row("k", day, 1) for day in range(DAYS)])
    damaged = tmp_path / "processed/d=2020-01-03/part-0.parquet"
    damaged.write_bytes(damaged.read_bytes()[:100])
    for host in ("local", "spark"):
        with pytest.raises(RefusedError, match="2020-01-03") as refused:
            lake.table.adopt(host=host)  # type: ignore[arg-type]
        assert refused.value.code == "unreadable-files"


def test_workers_and_host_spark_exclude_each_other(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    config = str(lake.configure())
    for command in ("dedupe", "compact"):
        done = CliRunner().invoke(main, [command, "--config", config, "--host", "spark", "--workers", "2"])
        assert done.exit_code == 2
        assert "--workers" in done.output


def test_longest_tasks_begin_first_and_small_ones_share(tmp_path: Path) -> None:
    from lakeupsert.engine.spark_host import LEAST_TASK, pack

    sizes = [LEAST_TASK * 8.0, *[LEAST_TASK / 10] * 40, LEAST_TASK * 20.0]
    packs = pack(sizes, tasks=8)
    assert sorted(place for places in packs for place in places) == list(range(len(sizes)))
    assert packs[:2] == [[41], [0]]
    assert len(packs) <= 8
    assert all(sum(sizes[place] for place in places) <= max(LEAST_TASK, sum(sizes) / 8) for places in packs[2:])


@pytest.mark.core
def test_errors_of_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all of them lack is theirs; what one item raises belongs to the item."""
    from lakeupsert.engine import spark_tasks
    from lakeupsert.engine.spark_host import SparkHost

    def refuse(item: int) -> int:
        if item:
            code = "bad-credentials" if item == 1 else "not-permitted"
            raise ConfigurationError(code, f"item {item}.", next="log in")
        return item

    found = SparkHost().map(refuse, [2, 0], [1.0, 1.0])
    assert found[1] == 0
    assert isinstance(found[0], ConfigurationError)
    assert not isinstance(found[0], ExecutorError), "that of an item, not of a machine"
    with pytest.raises(ExecutorError, match="item 1") as raised:
        SparkHost().map(refuse, [2, 0, 1], [1.0, 1.0, 1.0])
    assert raised.value.code == "bad-credentials"
    monkeypatch.setattr(spark_tasks, "OLDEST_PYARROW", 999)
    with pytest.raises(ExecutorError, match=f"pyarrow {pa.__version__}.*999") as raised:
        SparkHost().map(refuse, [0], [1.0])
    assert raised.value.code == "executors-unfit"


def test_an_error_of_phase_one_reaches_the_driver() -> None:
    from lakeupsert.engine.spark_session import explain_spark_failures, session
    from lakeupsert.engine.spark_tasks import ship

    def refuse(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        raise DamagedTableError("damaged-object", "it is gone", next="restore it", partition="d=2020-01-01")

    with pytest.raises(DamagedTableError, match="it is gone") as raised, explain_spark_failures():
        session().range(1).mapInArrow(ship(refuse), "id bigint").collect()
    assert (raised.value.code, raised.value.partition) == ("damaged-object", "d=2020-01-01")


@contextmanager
def terminated_once(reached: Callable[[], bool]) -> Iterator[None]:
    """SIGTERM ends the block as soon as ``reached`` returns true: its task has begun."""

    def stop() -> None:
        wait_until(reached, "the task has begun")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    stopper = threading.Thread(target=stop)
    stopper.start()
    try:
        with pytest.raises(Terminated):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
        stopper.join()


def test_a_stopped_command_takes_its_tasks_with_it(tmp_path: Path) -> None:
    from lakeupsert.engine.spark_host import SparkHost
    from lakeupsert.engine.spark_session import session

    begun, over = tmp_path / "begun", tmp_path / "over"

    def work_on(item: int) -> None:
        begun.touch()
        wait_until(over.exists, "the test is over")

    with terminated_once(begun.exists):
        SparkHost().map(work_on, [0], [1.0])
    tracker = session().sparkContext.statusTracker()
    try:
        wait_until(lambda: not tracker.getActiveJobsIds(), "Spark has cancelled the job")
    finally:
        over.touch()


def test_a_stopped_command_leaves_other_jobs_of_the_session_alone(tmp_path: Path) -> None:
    from lakeupsert.engine.spark_host import SparkHost
    from lakeupsert.engine.spark_session import session

    spark = session()
    over = tmp_path / "over"

    def wait_for_the_end(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wait_until(over.exists, "the other command has stopped")
        yield from batches

    def work_on(item: int) -> None:
        wait_until(over.exists, "the test is over")

    with ThreadPoolExecutor(1) as threads:
        frame = spark.range(0, 1, 1, 1).mapInArrow(wait_for_the_end, "id bigint")
        theirs = threads.submit(frame.collect)
        tracker = spark.sparkContext.statusTracker()
        wait_until(lambda: len(tracker.getActiveJobsIds()) == 1, "their job has begun")

        try:
            with terminated_once(lambda: len(tracker.getActiveJobsIds()) == 2):
                SparkHost().map(work_on, [0], [1.0])
        finally:
            over.touch()
        assert [row.id for row in theirs.result()] == [0]


def test_a_job_has_the_properties_of_the_callers_thread() -> None:
    from lakeupsert.engine.spark_session import collect, session

    def properties(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        names = ("spark.scheduler.pool", "spark.jobGroup.id", "spark.job.tags")
        for _ in batches:
            yield pa.record_batch({"found": [str(TaskContext.get().getLocalProperty(name)) for name in names]})

    spark = session()
    context = spark.sparkContext
    context.setLocalProperty("spark.scheduler.pool", "night")
    context.setJobGroup("of-the-user", "a night")
    tags_of_session = not spark.version.startswith("3.")
    (spark.addTag if tags_of_session else context.addJobTag)("tag-of-the-user")
    try:
        found = collect(spark.range(0, 1, 1, 1).mapInArrow(properties, "found string"))
    finally:
        for name in ("spark.scheduler.pool", "spark.jobGroup.id", "spark.job.description"):
            context.setLocalProperty(name, None)
        (spark.clearTags if tags_of_session else context.clearJobTags)()
    pool, group, tags = (row.found for row in found)
    assert (pool, group) == ("night", "of-the-user")
    assert "tag-of-the-user" in tags


def test_a_task_that_runs_out_of_memory_or_is_killed() -> None:
    """A local master starts no task again."""
    from lakeupsert.engine.spark_host import SparkHost

    def need_more(item: int) -> int:
        if item == 1:
            raise MemoryError("malloc of size 99 failed")
        if item == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    found = SparkHost().map(need_more, [0, 1, 3], [1.0, 1.0, 1.0])
    assert (found[0], found[2]) == (0, 3)
    assert isinstance(found[1], TaskDiedError)
    assert "99" in found[1].message
    with pytest.raises(TaskDiedError) as raised:
        SparkHost().map(need_more, [0, 2], [1.0, 1.0])
    assert raised.value.code == "task-died"
