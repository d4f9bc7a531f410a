"""A user who may read a table and write nothing there: every command that only looks works, and says so if it can't."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lakeupsert.queue import Message, SqliteQueue
from tests.harness.lake import Lake, row

CALL = """
import shlex, sys
from click.testing import CliRunner
from lakeupsert.cli import main
for command in sys.argv[1:]:
    print(CliRunner().invoke(main, [*shlex.split(command), "--json"]).stdout, end="")
"""
SEND_AND_STAY = """
import sys
from lakeupsert.queue import Message, SqliteQueue
queue = SqliteQueue(sys.argv[1])
queue.send([Message("t", "d=2020-01-01", 1)] * 3)
print("sent", flush=True)
sys.stdin.readline()
"""
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
PATIENCE = 60.0


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    """Three batches, the last not merged yet; nobody may write below its folder."""
    lake = Lake(tmp_path / "lake")
    for number in range(2):
        lake.land(f"{number}.jsonl", [row("a", 0, number), row("b", number, number)])
        lake.run()
    lake.land("2.jsonl", [row("a", 0, 9)])
    lake.table.append(host="local")
    lake.configure()
    lake.table.close()
    (tmp_path / "own").mkdir()
    _permit(lake.root, writing=False)
    yield lake
    _permit(lake.root, writing=True)


def _permit(root: Path, *, writing: bool) -> None:
    """Let the owner write below ``root``, or not."""
    root.chmod(0o755 if writing else 0o555)
    for path in root.rglob("*"):
        path.chmod((0o755 if writing else 0o555) if path.is_dir() else (0o644 if writing else 0o444))


def queue_file(lake: Lake) -> Path:
    return lake.root / "processed/_lakeupsert/queue.sqlite"


def _drop_rights() -> None:
    """Root opens every file, whatever its mode says; without these capabilities it is a user like others."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None)
        for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def call(lake: Lake, *commands: str) -> list[Any]:
    """What a guest's calls answer, all of them in one process of its own."""
    found = subprocess.run(
        [sys.executable, "-c", CALL, *commands],
        cwd=lake.root,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
        preexec_fn=_drop_rights,
    )
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_commands_that_only_look_work_and_leave_nothing(lake: Lake) -> None:
    before = sorted(lake.root.rglob("*"))
    own = lake.root.with_name("own")
    commands = [
        "status",
        "history",
        f"report --output {own}/report.html",
        "files",
        "explain k=a l=0",
        "quarantine",
        "head",
        "query from(t)",
        "diff 0 latest --rows",
        f"export --output {own}/rows.csv",
        f"export --snapshot latest --output {own}/latest.csv",
        "plan",
        "run --dry-run",
        "schema",
        "config",
        "reprocess --partition d=2020-01-01 --dry-run",
        "restore 0",
    ]
    found = dict(zip(commands, call(lake, *commands), strict=True))
    assert {command: (answer["error"], answer["warnings"]) for command, answer in found.items()} == dict.fromkeys(
        commands, (None, [])
    )
    assert found["status"]["result"]["queue"] == {"visible": 1, "leased": 0, "dead": 0}
    assert sorted(lake.root.rglob("*")) == before


@pytest.mark.long
def test_reconcile_that_has_nothing_to_change_works(lake: Lake) -> None:
    _permit(lake.root, writing=True)
    lake.run()
    lake.table.close()
    _permit(lake.root, writing=False)
    [found] = call(lake, "reconcile")
    assert found["error"] is None
    assert all(partition["balanced"] for partition in found["result"]["proof"])


@pytest.mark.long
def test_queue_that_a_writer_has_open_or_left_open_is_read_as_it_is(lake: Lake) -> None:
    _permit(lake.root, writing=True)
    writer = subprocess.Popen(
        [sys.executable, "-c", SEND_AND_STAY, str(queue_file(lake))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"sent\n"
    _permit(lake.root, writing=False)
    try:
        assert call(lake, "status")[0]["result"]["queue"]["visible"] == 4, "what lies in the -wal file counts"
    finally:
        writer.kill()
        writer.communicate()
    assert call(lake, "status")[0]["result"]["queue"]["visible"] == 4, "and what a killed writer left there"

    _permit(lake.root, writing=True)
    Path(f"{queue_file(lake)}-shm").unlink()
    _permit(lake.root, writing=False)
    [found] = call(lake, "status")  # what the -wal file has can't be told without it
    assert (found["ok"], found["result"]["queue"]) == (True, {"visible": None, "leased": None, "dead": None})
    assert str(queue_file(lake)) in found["warnings"][0]


@pytest.mark.long
def test_queue_that_may_not_be_read_is_a_warning(lake: Lake) -> None:
    queue_file(lake).chmod(0)
    [found] = call(lake, "status")
    assert (found["exit_code"], found["result"]["queue"]["visible"]) == (0, None)
    assert str(queue_file(lake)) in found["warnings"][0]
    assert found["result"]["rows"] == 3


@pytest.mark.long
def test_table_that_may_not_be_read_is_named(lake: Lake) -> None:
    (lake.root / "processed").chmod(0)
    for found in call(lake, "status", "history", "files", "explain k=a l=0", "plan"):
        assert (found["exit_code"], found["error"]["code"]) == (2, "not-permitted")
        assert str(lake.root / "processed") in found["error"]["message"]


@pytest.mark.long
def test_reading_sees_every_change_of_a_queue_that_others_open_and_close(lake: Lake) -> None:
    """Between two reads others come and go; a file is read as it is, however it was opened last."""
    _permit(lake.root, writing=True)
    reader = SqliteQueue(queue_file(lake))
    for number in range(20):
        assert reader.stats().visible == 1 + number
        with closing(SqliteQueue(queue_file(lake))) as writer:
            writer.send([Message("t", "d=2020-01-01", number)])
            assert reader.stats().visible == 2 + number
    assert len(reader.messages()) == 21
    assert not Path(f"{queue_file(lake)}-wal").exists(), "the reader left nothing beside it"
