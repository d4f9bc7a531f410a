"""`status --watch`: what it draws, what it reads to do so, and how it ends."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from lakeupsert.cli import main
from lakeupsert.cli.look.watch import overview, panel
from lakeupsert.pipeline.workers.worker import mark_failed
from tests.harness.lake import Lake, row

PATIENCE = 60.0
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """A published night of three partitions, and its configuration in the working directory."""
    monkeypatch.chdir(tmp_path)
    lake = Lake(tmp_path)
    lake.configure()
    lake.land("1.jsonl", [row("a", day, 1) for day in range(3)])
    lake.run()
    return lake


def dirty(lake: Lake) -> None:
    """Three dirty partitions, the first marked failed."""
    lake.land("2.jsonl", [row("a", day, 2) for day in range(3)])
    lake.table.append(host="local")
    mark_failed(
        lake.opened.history, "d=2020-01-01", 2, f"no [bold]row[/bold] group can be read {'x' * 90}\nNext: mend it"
    )


@contextmanager
def on_a_terminal(*args: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The program on a terminal of 80 columns; its process, and where to read what it draws."""
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "30"}
    with subprocess.Popen(
        [sys.executable, "-c", "from lakeupsert.cli import main; main()", *args],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        os.close(theirs)
        try:
            yield process, ours
        finally:
            process.kill()
            os.close(ours)


def drawn_until(terminal: int, text: str) -> str:
    """What it draws until ``text`` is there; fails where it ends before."""
    found, deadline = "", time.monotonic() + PATIENCE
    while text not in found:
        assert time.monotonic() < deadline, f"{text!r} never came: {found}"
        try:
            part = os.read(terminal, 10_000)
        except OSError:  # how Linux says that nobody draws any more
            part = b""
        assert part, f"it ended before {text!r}: {found}"
        found += CONTROLS.sub("", part.decode(errors="ignore"))
    return found


@pytest.mark.parametrize("args", [[], ["--json"]])
def test_watch_without_a_terminal_is_refused_with_what_to_use(lake: Lake, args: list[str]) -> None:
    result = CliRunner().invoke(main, ["status", "--watch", *args])
    assert result.exit_code == 2
    if args:
        error = json.loads(result.stdout)["error"]
        assert error["code"] == "no-terminal"
        assert "lakeupsert status --json" in error["next"]
    else:
        assert result.stdout == ""
        assert "lakeupsert status --json" in result.stderr


def test_watch_shows_what_changes_and_ends_with_ctrl_c(lake: Lake) -> None:
    with on_a_terminal("status", "--watch") as (process, terminal):
        assert "all, and published" in drawn_until(terminal, "Ctrl-C ends it")
        lake.land("2.jsonl", [row("a", day, 2) for day in range(2)])
        lake.table.append(host="local")
        assert "2 waiting" in drawn_until(terminal, "0 of 2 partitions")
        lake.run()
        drawn_until(terminal, "1, published")
        process.send_signal(signal.SIGINT)
        assert "up to batch 2" in drawn_until(terminal, "0 rows now\r\n").partition("Table t")[2]
        assert process.stderr
        assert (process.wait(PATIENCE), process.stderr.read()) == (0, b"")


@pytest.mark.long
def test_watch_that_gets_sigterm_exits_75(lake: Lake) -> None:
    with on_a_terminal("status", "--watch") as (process, terminal):
        drawn_until(terminal, "Ctrl-C ends it")
        process.send_signal(signal.SIGTERM)
        drawn_until(terminal, "Table t")
        assert process.wait(PATIENCE) == 75


def test_second_look_reads_only_what_is_new(lake: Lake) -> None:
    dirty(lake)
    lake.reopen()
    lake.table.status()
    lake.points.seen.clear()
    again = lake.table.status()
    assert (again.dirty, list(again.failed)) == (3, ["d=2020-01-01"])
    assert [name for name in lake.points.seen if name.startswith("get")] == []
    lake.run()
    lake.points.seen.clear()
    now = lake.table.status()
    assert (now.dirty, now.failed, now.snapshot, now.batch) == (0, {}, 1, 2)


@pytest.mark.parametrize("width", [80, 200])
def test_panel_tells_all_of_it_at_any_width(lake: Lake, width: int) -> None:
    dirty(lake)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(panel("t", lake.table.status()))
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    assert text.index("batch 2") < text.index("0 of 3 partitions"), "the verdict is on top"
    for told in (
        "lakeupsert run --table t",
        "0 of 3 partitions",
        "3 waiting, 0 being worked on, 0 dead",
        "d=2020-01-01: no [bold]row[/bold] group",
    ):
        assert told in text
    assert "Next: mend it" not in text
    assert text.count("x") == 90, "the reason is cut"


def test_tables_without_room_for_their_panels_have_a_line_each(lake: Lake) -> None:
    dirty(lake)
    status = lake.table.status()
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(overview({f"t{n}": status for n in range(9)}))
    _, *lines = console.export_text().strip().splitlines()
    assert [line.split()[0] for line in lines if re.match(r"\s*t\d", line)] == [f"t{n}" for n in range(9)]
    assert all("batch 2" in line and "0 of 3" in line for line in lines)
