"""Real processes die by SIGKILL, at calls and by events: nothing is lost, nothing counts twice, nothing waits for the dead.

The four moments that hurt most are in `make test`; `make test-crash` has every call of every step, Spark, and workers.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime, timedelta
from fnmatch import fnmatch
from pathlib import Path
from sqlite3 import connect
from typing import Any, Literal

import pytest

from lakeupsert import clock
from lakeupsert.errors import TaskDiedError, TryAgainError
from lakeupsert.pipeline.workers.worker import UNANSWERED
from lakeupsert.queue import QueueStats
from tests.harness.faults import Fault
from tests.harness.lake import Lake, row
from tests.harness.processes import (
    PATIENCE_SECONDS,
    Died,
    LakeProcess,
    Strike,
    end_session,
    processes_of_session,
    wait_until,
)

KILLED = -signal.SIGKILL
NEVER = -1


def kill(lake: Lake, step: str, strike: Strike) -> None:
    with LakeProcess(lake) as process, pytest.raises(Died) as died:
        process.do(step.split()[-1], strike=strike)
    assert died.value.code == KILLED


def finish_and_check(lake: Lake) -> None:
    """What readers see is right at once, the dead process holds no lease, and one undisturbed run finishes exactly."""
    lake.reopen()
    lake.check()
    if lake.entries():
        assert lake.table.objects.queue.stats().leased == 0
    lake.finish_and_check()
    assert lake.named_files() <= lake.stored_files()
    assert lake.table.objects.queue.stats() == QueueStats(visible=0, leased=0, dead=0)


# ---------------------------------------------------------------- the four moments that hurt most


def test_append_killed_between_its_files_and_the_ledger_entry_has_not_happened(
    lakes: dict[str, Lake], folder: Path
) -> None:
    lake = lakes["append"].copy(folder / "lake")
    before = lake.entries()
    kill(lake, "append", Strike("create _lakeupsert/ledger", when="before"))
    assert lake.entries() == before
    assert lake.stored_files() - lake.named_files(), "the files were written already"
    finish_and_check(lake)


def test_append_killed_between_ledger_entry_and_messages_has_happened(lakes: dict[str, Lake], folder: Path) -> None:
    lake = lakes["append"].copy(folder / "lake")
    before = lake.entries()
    kill(lake, "append", Strike("create _lakeupsert/ledger", when="after"))
    committed = lake.entries()
    assert len(committed) == len(before) + 1
    assert lake.table.objects.queue.stats().visible == 0, "nobody was told"
    finish_and_check(lake)
    assert lake.entries() == committed, "the batch counts once"


def test_dedupe_killed_between_base_file_and_manifest_is_done_again(lakes: dict[str, Lake], folder: Path) -> None:
    lake = lakes["dedupe"].copy(folder / "lake")
    stored = lake.stored_files()
    kill(lake, "dedupe", Strike("create _lakeupsert/partitions", when="before"))
    assert any("/base-" in name for name in lake.stored_files() - stored), "the base file was written already"
    assert lake.stored_files() - lake.named_files()
    finish_and_check(lake)


def test_dedupe_killed_between_manifest_and_ack_merges_no_row_twice(lakes: dict[str, Lake], folder: Path) -> None:
    lake = lakes["dedupe"].copy(folder / "lake")
    kill(lake, "dedupe", Strike("queue ack", when="before"))
    merged = [p for p in lake.entries()[-1][1].touched if lake.is_merged(p, 2)]
    assert merged
    heads = {p: lake.table.objects.partition(p).head() for p in merged}
    finish_and_check(lake)
    assert {p: lake.table.objects.partition(p).head().write_id for p in merged} == {
        p: head.write_id for p, head in heads.items() if head
    }


# ---------------------------------------------------------------- every call


def calls_of(lake: Lake, step: str) -> list[str]:
    lake.points.arm(NEVER, Fault.BEFORE)
    options = {"host": "local"} if step.endswith("append") else {}
    getattr(lake.table, step.split()[-1])(**options)
    return lake.points.seen


@pytest.mark.crash
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["first append", "append", "dedupe", "publish"])
def test_process_killed_at_any_call_is_survived(
    lakes: dict[str, Lake], folder: Path, step: str, when: Literal["before", "after"]
) -> None:
    counted = lakes[step].copy(folder / "counted")
    calls = calls_of(counted, step)
    counted.table.close()
    for number, call in enumerate(calls):
        lake = lakes[step].copy(folder / str(number))
        try:
            kill(lake, step, Strike(number=number, when=when))
            finish_and_check(lake)
        except BaseException as e:
            e.add_note(f"{step}, killed {when} call {number}, {call}")
            raise
        lake.table.close()
        shutil.rmtree(lake.root)


@pytest.mark.long
@pytest.mark.parametrize(
    "poisonous", [(1, 4), *(pytest.param(n, marks=pytest.mark.long) for n in ((0,), (1,), (5,), (0, 3), (0, 2, 5)))]
)
def test_partitions_that_kill_every_worker_are_marked_and_the_others_are_merged(
    folder: Path, poisonous: tuple[int, ...]
) -> None:
    """The worker takes its other messages along each time; they must get through all the same."""
    lake = Lake(folder / "lake")
    lake.land("1.jsonl", [row("a", day, 1) for day in range(6)])
    lake.table.append(host="local")
    names = sorted(lake.entries()[-1][1].touched)
    poison = {names[n] for n in poisonous}
    kills = Strike(tuple(f"put {p}" for p in poison))
    for _ in range(4 * len(poison) + 3):
        with LakeProcess(lake) as process:
            try:
                process.do("dedupe", strike=kills)
                break
            except Died as e:
                assert e.code == KILLED
    queue = lake.opened.resources.queue
    assert {letter.message.partition for letter in queue.dead_letters(99) if letter.message} == poison
    assert queue.stats() == QueueStats(visible=0, leased=0, dead=len(poison))
    assert lake.table.status().failed == lake.table.publish().failed == dict.fromkeys(poison, UNANSWERED)
    assert {p for p in names if lake.is_merged(p, 1)} == set(names) - poison
    lake.finish_and_check()
    assert lake.table.status().dirty == 0


@pytest.mark.crash
@pytest.mark.parametrize("seed", range(10))
def test_lake_survives_processes_that_work_at_once_and_die(folder: Path, seed: int) -> None:
    """Three processes run nights over one lake, again and again, and most of them are killed at a call or from outside."""
    chance = random.Random(seed)
    lake = Lake(folder / "lake")
    died = 0
    for number in range(8):
        for file in range(2):
            rows = [row(chance.choice("abc"), chance.randrange(9), chance.randrange(4), number) for _ in range(12)]
            lake.land(f"{number}-{file}.jsonl", [{**r, "op": chance.choice([None, None, "D"])} for r in rows])
        with ExitStack() as stack:
            workers = [stack.enter_context(LakeProcess(lake)) for _ in range(3)]
            for worker in workers:
                kind, most = chance.choice([("", 300), ("create", 20), ("queue", 12), ("put", 12)])
                when: Literal["before", "after"] = chance.choice(["before", "after"])
                worker.begin("run", strike=Strike(kind, chance.randrange(most), when))
            if chance.random() < 0.3:
                workers[0].kill()
            for worker in workers:
                try:
                    worker.end()
                except Died as e:
                    assert e.code == KILLED
                    died += 1
        lake.reopen()
        lake.check()
    assert died > 4
    finish_and_check(lake)


# ---------------------------------------------------------------- vacuum


class NineDaysAgo(clock.Source):
    def now(self) -> datetime:
        return super().now() - timedelta(days=9)


def littered(root: Path) -> Lake:
    """Nine days ago: nights, attempts that died, a vacuum that expired snapshots, and a reprocess. Today: nights again, attempts
    that died, a batch that nobody has merged, and nothing deleted yet."""
    lake = Lake(root, keep_snapshots=2)

    def night(number: int) -> None:
        rows = [
            row(k, day, number, number, op="D" if k == "b" and number == 3 else None) for k in "ab" for day in (0, 1)
        ]
        lake.land(f"{number}.jsonl", rows)

    def nights_and_deaths(numbers: range) -> None:
        for number in numbers:
            night(number)
            kill(lake, "append", Strike("create _lakeupsert/ledger"))
            lake.table.append(host="local")
            kill(lake, "dedupe", Strike("create _lakeupsert/partitions"))
            lake.reopen()
            lake.run()

    with clock.use(NineDaysAgo()):
        nights_and_deaths(range(1, 5))
        lake.table.tag("second", 1)
        lake.table.vacuum(dry=False)
        lake.table.reprocess(source="landing", host="local")
    for path in root.rglob("*"):
        then = path.stat().st_mtime - timedelta(days=9).total_seconds()
        os.utime(path, (then, then))
    nights_and_deaths(range(5, 7))
    night(7)
    lake.table.append(host="local")
    return lake


def objects(lake: Lake) -> set[str]:
    return {found.name for found in lake.table.objects.store.list("") if "/queue.sqlite" not in found.name}


@pytest.mark.crash
def test_vacuum_killed_again_and_again_loses_nothing_and_leaves_no_garbage(folder: Path) -> None:
    """Fifty times, at calls drawn from all that it makes."""
    first = littered(folder / "first")
    before, named = objects(first), first.named_files()
    whole = first.copy(folder / "whole")
    whole.points.arm(NEVER, Fault.BEFORE)
    garbage = {g.name for g in whole.table.vacuum(dry=False).garbage}
    calls, kept = len(whole.points.seen), [link.number for link in whole.table.snapshots()]
    assert garbage == before - objects(whole)
    for kind in ("d=*/base-*", "_lakeupsert/data/*.pack"):
        found = {name for name in garbage if fnmatch(name, kind)}
        assert found & named, f"{kind} that is superseded or merged"
        assert found - named, f"{kind} of an attempt that died"
        assert {name for name in before - garbage if fnmatch(name, kind)} - named, f"{kind} of one that may be at work"
    for kind in ("partitions/*/v*", "snapshots/v*", "units/*"):
        assert any(fnmatch(name, f"_lakeupsert/{kind}") for name in garbage), kind

    chance = random.Random(1)
    for _ in range(50):
        lake = first.copy(folder / "killed")
        struck: list[Strike] = []
        while not struck or chance.random() < 0.5:
            struck.append(Strike("", chance.randrange(calls), chance.choice(["before", "after"])))
            with LakeProcess(lake) as process:
                try:
                    process.do("vacuum", strike=struck[-1], dry=False)
                    assert struck[1:], "what was counted came to no end"
                except Died as e:
                    assert e.code == KILLED
            lake.reopen()
            lake.check()
        lake.table.vacuum(dry=False)
        lake.check()
        assert objects(lake) & before == before - garbage, f"{struck} of {whole.points.seen}"
        assert [link.number for link in lake.table.snapshots()] == kept
        assert not lake.table.vacuum().garbage
        lake.finish_and_check()
        lake.table.close()
        shutil.rmtree(lake.root)


# ---------------------------------------------------------------- Spark


DAYS = 30


def night(lake: Lake, number: int) -> None:
    """Three files, many partitions, ties, deletes, and a row to refuse."""
    for file in range(3):
        rows: list[Mapping[str, Any]] = [
            row(f"k{(i * 7 + file) % 11}", (i + file) % DAYS, (i * number) % 4, i, op="D" if i % 13 == number else None)
            for i in range(300)
        ]
        lake.land(f"{number}-{file}.jsonl", rows, refused=[{**row("x", 0, 1), "v": "no number"}])


@pytest.fixture(scope="module")
def nights(module_folder: Path) -> dict[int, Lake]:
    """A lake whose first night landed, and one whose first night is published and whose second landed."""
    first = Lake(module_folder / "1")
    night(first, 1)
    second = first.copy(module_folder / "2")
    second.run()
    night(second, 2)
    return {1: first, 2: second}


@pytest.fixture
def spark_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Lake], LakeProcess]]:
    """Begins a process whose Spark leaves its own litter below ``tmp_path``, killed or not."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", f"-Djava.io.tmpdir={tmp_path} -XX:TieredStopAtLevel=1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    begun: list[LakeProcess] = []

    def begin(lake: Lake) -> LakeProcess:
        begun.append(LakeProcess(lake, start="spawn"))
        return begun[-1]

    yield begin
    for process in begun:
        process.__exit__()


@pytest.mark.crash
@pytest.mark.parametrize(
    ("number", "strike"),
    [
        pytest.param(2, Strike("landing open", 1), id="while it surveys"),
        pytest.param(2, Strike("create _lakeupsert/ledger"), id="before the ledger entry"),
        pytest.param(2, Strike("create _lakeupsert/ledger", when="after"), id="after the ledger entry"),
        pytest.param(2, Strike("queue send", when="after"), id="after the messages"),
        pytest.param(1, Strike("create _lakeupsert/spec"), id="before the spec"),
        pytest.param(1, Strike("create _lakeupsert/spec", when="after"), id="after the spec"),
        pytest.param(1, Strike("create _lakeupsert/ledger", when="after"), id="after the ledger's beginning"),
    ],
)
def test_spark_append_whose_driver_is_killed_is_survived(
    nights: dict[int, Lake],
    folder: Path,
    spark_process: Callable[[Lake], LakeProcess],
    number: int,
    strike: Strike,
) -> None:
    lake = nights[number].copy(folder / "lake")
    process = spark_process(lake)
    with pytest.raises(Died) as died:
        process.do("append", strike=strike, host="spark")
    assert died.value.code == KILLED
    process.kill()
    finish_and_check(lake)


def stored(lake: Lake, pattern: str) -> int:
    return sum(1 for _ in (lake.root / "processed/_lakeupsert").glob(pattern))


def task_processes(process: LakeProcess) -> list[int]:
    """Spark's Python workers (and the daemon that forks them)."""
    return [pid for pid, _, command in processes_of_session(process.pid) if "pyspark.daemon" in command]


def tasks_began(lake: Lake, process: LakeProcess) -> bool:
    return len(task_processes(process)) > 1


def rows_were_refused(lake: Lake, process: LakeProcess) -> bool:
    return stored(lake, "quarantine/*") > 1


def pack_is_being_written(lake: Lake, process: LakeProcess) -> bool:
    return stored(lake, "quarantine/*") > 1 and stored(lake, "tmp/*") > 0


def first_pack_appeared(lake: Lake, process: LakeProcess) -> bool:
    return stored(lake, "data/*.pack") > 1


@pytest.mark.crash
@pytest.mark.parametrize("reached", [tasks_began, rows_were_refused, pack_is_being_written, first_pack_appeared])
def test_spark_append_killed_with_its_tasks_is_survived(
    nights: dict[int, Lake],
    folder: Path,
    spark_process: Callable[[Lake], LakeProcess],
    reached: Callable[[Lake, LakeProcess], bool],
) -> None:
    lake = nights[2].copy(folder / "lake")
    entries = len(lake.entries())
    process = spark_process(lake)
    process.begin("append", host="spark")
    wait_until(lambda: reached(lake, process), reached.__name__)
    process.kill()
    assert len(lake.entries()) == entries, "it came to its end before it was killed"
    finish_and_check(lake)


@pytest.mark.crash
def test_spark_append_whose_driver_alone_is_killed_while_tasks_write_is_survived(
    nights: dict[int, Lake], folder: Path, spark_process: Callable[[Lake], LakeProcess]
) -> None:
    """What it leaves behind may still write while the rerun works: files that nobody names."""
    lake = nights[2].copy(folder / "lake")
    process = spark_process(lake)
    process.begin("append", host="spark")
    wait_until(lambda: pack_is_being_written(lake, process), "the beginning of a pack")
    process.kill(only_itself=True)
    finish_and_check(lake)


@pytest.mark.crash
def test_spark_append_whose_tasks_are_killed_fails_without_a_commit(
    nights: dict[int, Lake], folder: Path, spark_process: Callable[[Lake], LakeProcess]
) -> None:
    lake = nights[2].copy(folder / "lake")
    entries = lake.entries()
    process = spark_process(lake)
    process.begin("append", host="spark")
    wait_until(lambda: pack_is_being_written(lake, process), "the beginning of a pack")
    for pid in task_processes(process):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(TaskDiedError):
        process.end()
    assert lake.entries() == entries
    finish_and_check(lake)


def spark_itself(process: LakeProcess) -> list[int]:
    return [pid for pid, _, command in processes_of_session(process.pid) if "org.apache.spark" in command]


@pytest.mark.crash
@pytest.mark.parametrize("victims", [task_processes, spark_itself])
def test_spark_dedupe_whose_spark_is_killed_blames_no_partition(
    nights: dict[int, Lake],
    folder: Path,
    spark_process: Callable[[Lake], LakeProcess],
    victims: Callable[[LakeProcess], list[int]],
) -> None:
    """An executor out of memory says nothing about the data: messages go back, and nothing is marked failed."""
    lake = nights[2].copy(folder / "lake")
    lake.table.append(host="local")
    messages = lake.table.objects.queue.stats().visible
    process = spark_process(lake)
    process.begin("dedupe", engine="spark")
    wait_until(lambda: tasks_began(lake, process), "tasks")
    while not process.answered():  # once is not enough: between two tasks Spark takes new processes and goes on
        for pid in victims(process):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with pytest.raises(TryAgainError):
        process.end()
    assert lake.table.objects.queue.stats() == QueueStats(visible=messages, leased=0, dead=0)
    finish_and_check(lake)


@pytest.mark.crash
def test_spark_append_killed_at_night_is_finished_by_spark(
    nights: dict[int, Lake], folder: Path, spark_process: Callable[[Lake], LakeProcess], spark: Any
) -> None:
    lake = nights[2].copy(folder / "lake")
    process = spark_process(lake)
    process.begin("append", host="spark")
    wait_until(lambda: pack_is_being_written(lake, process), "the beginning of a pack")
    process.kill()
    lake.reopen()
    lake.run(host="spark")
    assert len(lake.entries()) == 3
    finish_and_check(lake)


# ---------------------------------------------------------------- worker processes

PROGRAM = [sys.executable, "-c", "from lakeupsert.cli import main; main()"]


@pytest.fixture
def dirty(folder: Path) -> Lake:
    """Two hundred partitions to merge."""
    lake = Lake(folder / "lake")
    lake.land("1.jsonl", [row(k, day, 1, day) for day in range(200) for k in "abc"])
    lake.table.append(host="local")
    return lake


@contextmanager
def command(lake: Lake, *args: str) -> Iterator[subprocess.Popen[str]]:
    """The program in a session of its own; whatever of it still lives after the block is killed."""
    arguments = [*PROGRAM, "--config", str(lake.configure()), "--json", *args]
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        end_session(process.pid)
        process.communicate()


def kill_a_worker_with_leases(lake: Lake, session: int) -> None:
    """SIGKILL to one of the processes that hold leases, while the queue is locked, so that it can't answer meanwhile."""
    path = str(Path(lake.settings.processed) / "_lakeupsert/queue.sqlite")
    with closing(connect(path, timeout=60, isolation_level=None)) as db:

        def killed() -> bool:
            if db.execute("SELECT 1 FROM messages WHERE owner IS NOT NULL").fetchone() is None:
                return False
            db.execute("BEGIN IMMEDIATE")
            try:
                for (owner,) in db.execute("SELECT DISTINCT owner FROM messages WHERE owner IS NOT NULL").fetchall():
                    pid = json.loads(owner)["pid"]
                    if pid in worker_processes(session):
                        os.kill(pid, signal.SIGKILL)
                        return True
            finally:
                db.execute("ROLLBACK")
            return False

        wait_until(killed, "a worker holds leases")


@pytest.mark.crash
def test_new_workers_take_over_from_a_killed_one(dirty: Lake) -> None:
    with command(dirty, "dedupe", "--workers", "2") as process:
        kill_a_worker_with_leases(dirty, process.pid)
        out, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, json.loads(out)["exit_code"]) == (0, 0), errors
    assert "a worker process died" in errors
    assert dirty.table.status().dirty == 0
    finish_and_check(dirty)


@pytest.mark.crash
def test_machine_on_which_no_worker_lives_ends_the_command_with_75(dirty: Lake) -> None:
    with command(dirty, "dedupe", "--workers", "2") as process:

        def ended() -> bool:
            for pid in worker_processes(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return process.poll() is not None

        wait_until(ended, "the end of the command")
        out, errors = process.communicate()
    answer = json.loads(out)
    assert (process.returncode, answer["exit_code"], answer["error"]["code"]) == (75, 75, "worker-died"), errors
    finish_and_check(dirty)


def worker_processes(session: int) -> list[int]:
    """Those that the server forked, which look like it."""
    alike = {pid: parent for pid, parent, line in processes_of_session(session) if "multiprocessing.forkserver" in line}
    return sorted(pid for pid, parent in alike.items() if parent in alike)


def all_merged(lake: Lake) -> Callable[[], bool]:
    return lambda: lake.table.status().dirty == 0


@pytest.mark.crash
@pytest.mark.parametrize("which", [0, 1])
def test_killed_waiting_worker_process_is_replaced(dirty: Lake, which: int) -> None:
    """Whichever of them it is, and also where it had nothing to do: messages of later must find all of them."""
    with command(dirty, "worker", "--workers", "2") as process:
        wait_until(all_merged(dirty), "all is merged")
        wait_until(lambda: dirty.table.objects.queue.stats() == QueueStats(0, 0, 0), "the queue is empty")
        before = worker_processes(process.pid)
        os.kill(before[which], signal.SIGKILL)
        wait_until(lambda: len(set(worker_processes(process.pid)) - set(before)) == 1, "another worker process")
        process.terminate()
        process.communicate(timeout=PATIENCE_SECONDS / 4)


@pytest.mark.crash
@pytest.mark.parametrize("arguments", [("dedupe",), ("worker",)])
def test_worker_processes_end_when_their_parent_is_killed(dirty: Lake, arguments: tuple[str, ...]) -> None:
    """Nobody else will end them: they would hold memory for ever, and a waiting one would go on merging unseen."""
    with command(dirty, *arguments, "--workers", "2") as process:
        wait_until(lambda: dirty.table.status().dirty < 200, "the first partition is merged")
        process.kill()
        process.wait(PATIENCE_SECONDS)
        wait_until(lambda: not worker_processes(process.pid), "the end of the worker processes")
    finish_and_check(dirty)
