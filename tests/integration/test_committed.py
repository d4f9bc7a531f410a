"""However a call fails, it says what it committed and what readers see; to people, to programs, and in Python."""

import errno
import json
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert import LakeupsertError, RefusedError, Table, TryAgainError
from lakeupsert.cli import main
from lakeupsert.errors import Standing, split_text
from lakeupsert.operations import run
from lakeupsert.pipeline.append import append
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.workers import drain_queues
from lakeupsert.queue.sqlite import SqliteQueue
from lakeupsert.storage import LocalStore
from tests.harness.faults import Fault
from tests.harness.lake import Lake, row


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """One night is published, as snapshot 0 of batch 1, and files for the next are there."""
    monkeypatch.chdir(tmp_path)
    lake = Lake(tmp_path, quarantine_limit="0%")
    lake.land("1.jsonl", [row("a", 0, 1), row("b", 1, 1)])
    lake.run()
    lake.land("2.jsonl", [row("a", 0, 2), row("b", 1, 2)])
    lake.configure()
    return lake


def call(*args: str) -> Any:
    result = CliRunner().invoke(main, [*args, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return json.loads(result.stdout)


def failed(*args: str) -> tuple[str, int | None, int | None, bool]:
    error = call(*args)["error"]
    return error["code"], error["committed"], error["readers_see"], error["data_changed"]


def interrupt(*args: Any, **options: Any) -> Any:
    raise KeyboardInterrupt


def terminate(*args: Any, **options: Any) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # the second one ends it at once


def fill_the_disk(*args: Any, **options: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def fail(*args: Any, **options: Any) -> Any:
    raise RuntimeError("a bug")


RUN = ("run", "--host", "local", "--workers", "1")


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (interrupt, "interrupted"),
        (terminate, "terminated"),
        (fill_the_disk, "disk-full"),
        (fail, "internal-error"),
    ],
)
def test_run_that_ends_amid_says_what_stands(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, end: Callable[..., Any], code: str
) -> None:
    monkeypatch.setattr(append, "host_by_name", end)
    assert failed(*RUN) == (code, None, 0, False), "nothing is committed yet"
    monkeypatch.undo()
    monkeypatch.chdir(lake.root)
    monkeypatch.setattr(drain_queues, "drain_in_processes", end)
    assert failed(*RUN) == (code, 2, 0, False), "batch 2 is committed, and readers still see the first"
    monkeypatch.undo()
    monkeypatch.chdir(lake.root)
    publish = run.publish

    def publish_and_end(table: OpenTable) -> Any:
        publish(table)
        end()

    monkeypatch.setattr(run, "publish", publish_and_end)
    assert failed(*RUN) == (code, None, 1, True), "an earlier call committed the batch, this one published it"


def test_append_commits_though_its_queue_does_not_answer(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*args: Any) -> None:
        raise TryAgainError("queue-unreachable", "The queue does not answer.", next="run the same command again")

    with monkeypatch.context() as patched:
        patched.setattr(SqliteQueue, "send", away)
        appended = call("append", "--host", "local")
    assert (appended["exit_code"], len(appended["result"]["batches"])) == (0, 1)
    assert any("reconcile" in warning for warning in appended["warnings"])
    assert call("reconcile")["result"]["resent"] == 2
    assert call("run", "--host", "local")["exit_code"] == 0
    assert lake.rows() == lake.expected(2)


def test_interrupt_just_after_the_commit_is_after_it(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    create = LocalStore.create

    def create_and_interrupt(store: LocalStore, name: str, data: bytes) -> bool:
        created = create(store, name, data)
        if "/ledger/" in name:
            raise KeyboardInterrupt
        return created

    monkeypatch.setattr(LocalStore, "create", create_and_interrupt)
    assert failed("append", "--host", "local") == ("interrupted", 2, 0, False)


def test_partition_that_can_not_be_merged(lake: Lake) -> None:
    assert call("append", "--host", "local")["ok"]
    lake.land("3.jsonl", [row("b", 1, 3)])
    [name] = {f.name for f in lake.entries()[2][1].touched["d=2020-01-01"].files}
    (lake.root / "processed" / name).write_bytes(b"damaged")
    found = call(*RUN)["error"]
    assert (found["code"], found["committed"], found["readers_see"]) == ("failed-partitions", 3, 0)
    assert (found["data_changed"], found["partition"]) == (False, "d=2020-01-01")
    for command in ("status", "dedupe", "publish"):
        assert failed(command)[:3] == ("failed-partitions", None, 0)


def test_file_over_the_limit_and_unknown_table(lake: Lake) -> None:
    lake.land("3.jsonl", [], [{**row("x", 0, 1), "k": None} for _ in range(2000)])
    assert failed(*RUN)[1:] == (None, 0, False)
    assert failed("run", "--table", "x") == ("unknown-table", None, None, False)


def test_restore_rename_and_later_calls(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.run()
    monkeypatch.setattr(drain_queues, "drain_in_processes", interrupt)
    found = failed("restore", "0", "--yes")
    assert found[:3] == ("interrupted", 3, 1), "the restore is a batch of its own"
    assert failed("restore", "0", "--yes")[:3] == ("interrupted", None, 1), "and it is committed once"
    monkeypatch.setattr(Table, "publish", interrupt)
    assert failed("schema", "rename", "v", "w", "--yes")[:3] == ("interrupted", 4, 1)


def test_fence_of_a_vacuum_is_not_a_batch(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.configure(superseded_retention="0s", keep_snapshots=1)  # each run ends with a vacuum
    monkeypatch.setattr(LocalStore, "delete", interrupt)
    code, committed, seen, changed = failed(*RUN)
    assert (code, committed, seen, changed) == (
        "interrupted",
        2,
        lake.table.objects.snapshots.head().number,
        True,
    )
    assert lake.entries()[-1][1].kind == "fence"
    assert lake.entries()[-1][0] > 2
    assert failed(*RUN)[:2] == ("interrupted", None)


def test_of_several_tables_each_failure_is_its_own(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Lake(lake.root / "other")
    other.land("1.jsonl", [row("a", 0, 1)])
    both = lake.configure().read_text() + other.configure().read_text().replace("[tables.t]", "[tables.u]")
    Path("lakeupsert.toml").write_text(both)
    drain = drain_queues.drain_in_processes
    monkeypatch.setattr(
        drain_queues,
        "drain_in_processes",
        lambda table, *a, **o: interrupt() if table.name == "u" else drain(table, *a, **o),
    )
    found = call(*RUN)
    assert (found["error"]["code"], found["error"]["committed"], found["error"]["readers_see"]) == (
        "interrupted",
        1,
        None,
    )
    assert found["result"]["tables"]["t"]["publish"]["snapshot"] == 1, "what was done before is told"


def test_people_are_told_the_same(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_queues, "drain_in_processes", interrupt)
    told = CliRunner().invoke(main, RUN).stderr.splitlines()
    assert told[-2] == "Committed: batch 2 · Readers see: snapshot 0"
    assert told[-1].startswith("Next: ")


def test_python_is_told_the_same_of_each_call(lake: Lake) -> None:
    lake.points.arm(0, Fault.BEFORE, "queue receive")
    with pytest.raises(TryAgainError) as caught:
        lake.table.run(host="local")
    assert caught.value.standing == Standing(committed=2, readers_see=0)
    assert "Committed: batch 2" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).standing == caught.value.standing
    lake.land("3.jsonl", [], [{**row("x", 0, 1), "k": None} for _ in range(2000)])
    with pytest.raises(RefusedError) as refused:
        lake.table.run(host="local")
    assert refused.value.standing == Standing(committed=None, readers_see=1, published=True), (
        "batch 2 was another call's"
    )


def test_commit_without_an_answer_that_is_not_there_may_still_appear(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.reopen()
    create = LocalStore.create
    monkeypatch.setattr(LocalStore, "create", lambda s, n, d: interrupt() if "/ledger/" in n else create(s, n, d))
    with pytest.raises(KeyboardInterrupt):
        lake.table.append(host="local")
    error = LakeupsertError("x", "x", next="x")
    lake.table.account(error)
    assert error.standing == Standing(committed=None, readers_see=0, certain=False)


def test_text_of_an_error_is_taken_apart() -> None:
    error = LakeupsertError("x", "it broke\nhere", next="mend it")
    assert split_text(str(error)) == ("it broke\nhere", "mend it")
    error.standing = Standing(3, None)
    assert split_text(str(error)) == ("it broke\nhere", "mend it")
    assert split_text("it broke") == ("it broke", "")
