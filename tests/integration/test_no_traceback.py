"""Nothing prints a traceback: whatever standard streams, files, names and arguments are, an error says what to do."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert import ConfigurationError
from lakeupsert.cli import main
from tests.harness.lake import Lake, row

PROGRAM = f'{sys.executable} -c "from lakeupsert.cli import main; main()"'
PATIENCE = 60.0
QUEUE = Path("processed/_lakeupsert/queue.sqlite")
RUN = ("run", "--host", "local", "--workers", "1")


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """One night is published, one is appended and not merged."""
    monkeypatch.delenv("LAKEUPSERT_DEBUG", raising=False)
    lake = Lake(tmp_path / "lake")
    monkeypatch.chdir(lake.root)
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.run()
    lake.land("2.jsonl", [row("a", 0, 2)])
    lake.table.append(host="local")
    lake.table.close()
    lake.configure()
    return lake


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``command`` in a shell, with the program for LU and what it prints to descriptor 9 for its exit code."""
    found = subprocess.run(
        ["bash", "-c", command.replace("LU", PROGRAM)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        env={**os.environ, **environment},
    )
    assert "Traceback" not in found.stderr
    assert "Exception ignored" not in found.stderr
    return found


def error(*args: str) -> Any:
    result = CliRunner().invoke(main, [*args, "--json"])
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    return json.loads(result.stdout)["error"]


# ---------------------------------------------------------------- standard streams


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("as_json", ["", "--json"])
def test_answer_that_can_not_be_written_is_an_error(lake: Lake, as_json: str) -> None:
    found = shell(f"LU {' '.join(RUN)} {as_json} > /dev/full")
    assert found.returncode == 75
    first, standing, following = found.stderr.splitlines()
    assert first.startswith("Error: ")
    assert standing == "Committed: no batch · Readers see: snapshot 1, published by this call"
    assert following.startswith("Next: ")


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_error_that_can_not_be_written_keeps_its_exit_code(lake: Lake) -> None:
    assert shell("LU status --table x 2> /dev/full").returncode == 2
    assert shell("LU status --table x --json > /dev/full 2> /dev/full").returncode == 2


@pytest.mark.long
def test_pipe_that_nobody_reads_is_no_error(lake: Lake) -> None:
    for command, code in (("files", 0), ("run --help", 0), ("status --json", 0), ("status --table x 2>&1", 2)):
        found = shell(f"(exec 9>&1; (sleep 0.2; LU {command}; echo $? >&9) | true)")
        assert (found.stdout, found.stderr) == (f"{code}\n", ""), command


@pytest.mark.long
def test_process_without_standard_streams_does_its_work(lake: Lake) -> None:
    assert shell(f"LU {' '.join(RUN)} <&- >&- 2>&-").returncode == 0
    assert lake.rows() == lake.expected(2), "nothing was printed into a file of the table"
    assert shell("LU status --table x >&- 2>&-").returncode == 2
    assert shell("LU --help >&-").returncode == 0


@pytest.mark.long
def test_letters_that_a_terminal_does_not_have_are_escaped(lake: Lake) -> None:
    config = Path("lakeupsert.toml")
    config.write_text(config.read_text().replace("[tables.t]", '[tables."tü"]'))
    found = shell("LU status", PYTHONIOENCODING="ascii")
    assert (found.returncode, found.stdout.splitlines()[0]) == (0, r"Table t\xfc")


# ---------------------------------------------------------------- files that are not what they should be


def write(path: str | Path, data: bytes) -> Callable[[], None]:
    def prepare() -> None:
        shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink(missing_ok=True)
        Path(path).write_bytes(data)

    return prepare


def make_folder(path: str | Path) -> Callable[[], None]:
    def prepare() -> None:
        Path(path).unlink()
        Path(path).mkdir()

    return prepare


def loop(path: str | Path) -> Callable[[], None]:
    def prepare() -> None:
        Path(path).unlink()
        Path(path).symlink_to(Path(path).name)

    return prepare


def setting(name: str, value: str) -> Callable[[], None]:
    def prepare() -> None:
        given = {"landing": "l", "processed": "p", name: value}
        zones = "".join(f'{zone} = "{path}"\n' for zone, path in given.items())
        Path("lakeupsert.toml").write_text(f'[tables.t]\n{zones}key = ["k"]\npartition_by = ["d"]\n')

    return prepare


@pytest.mark.parametrize(
    ("prepare", "args", "code"),
    [
        (write("lakeupsert.toml", b"\xff\xfe"), ("status",), "unreadable-configuration"),
        (write("lakeupsert.toml", b"\0"), ("status",), "unreadable-configuration"),
        (write("lakeupsert.toml", b"tables = 3"), ("status",), "bad-setting"),
        (make_folder("lakeupsert.toml"), ("status", "--config", "lakeupsert.toml"), "unreadable-configuration"),
        (setting("processed", "p\\u0000"), ("status",), "unusable-path"),
        (setting("processed", "p" * 300), RUN, "unusable-path"),
        (setting("landing", "~no such user/x"), ("status",), "unusable-path"),
        (write("landing", b"x"), ("plan",), "no-landing"),
        (write("processed", b"x"), RUN, "unusable-path"),
        (write("processed/_lakeupsert/tmp", b"x"), RUN, "unusable-path"),
        (write(QUEUE, b"\0" * 8192), ("status",), "queue-unusable"),
        (write(QUEUE, b"orders\n" * 100), ("status",), "queue-unusable"),
        (make_folder(QUEUE), RUN, "queue-not-permitted"),
        (loop(QUEUE), ("redrive",), "queue-not-permitted"),
        (lambda: shutil.rmtree(Path.cwd()), ("status",), "unusable-path"),
        (lambda: None, ("export", "--output", f"{'x' * 300}.csv"), "unusable-path"),
        (lambda: None, ("report", "--output", f"{'x' * 300}.html"), "unusable-path"),
        (lambda: None, ("export", "--output", "\udcff.csv"), "unusable-path"),
        (lambda: None, ("publish", "--tag", "\udcff"), "unusable-path"),
        (lambda: None, ("history", "--table", "x" * 100_000), "unknown-table"),
    ],
)
def test_what_is_not_as_it_should_be_is_no_bug(
    lake: Lake, prepare: Callable[[], None], args: tuple[str, ...], code: str
) -> None:
    prepare()
    found = error(*args)
    assert found["code"] == code, found["message"]
    assert found["next"]


def test_lost_ledger_is_named_by_a_restore(lake: Lake) -> None:
    shutil.rmtree("processed/_lakeupsert/ledger")
    assert error("restore", "0")["code"] == "missing-version"


@pytest.mark.long
def test_interrupt_while_it_is_imported_is_silent(tmp_path: Path) -> None:
    # Stands for a Ctrl-C at any moment of the import. Not a signal: a job in the background ignores it.
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    found = shell(f"PYTHONPATH={tmp_path}:$PYTHONPATH LU status")
    assert (found.returncode, found.stderr) == (128 + signal.SIGINT, "")


# ---------------------------------------------------------------- Python


@pytest.mark.parametrize(
    ("method", "given", "choices"),
    [
        ("run", {"host": "locl"}, ["'spark'", "'local'"]),
        ("run", {"host": None}, ["'spark'", "'local'"]),
        ("run", {"host": "local", "engine": "arow"}, ["'arrow'", "'spark'"]),
        ("run", {"host": "local", "full": True}, ["'table'", "'partitions'"]),
        ("append", {"host": "Local"}, ["'spark'", "'local'"]),
        ("dedupe", {"engine": "duckdb"}, ["'arrow'", "'spark'"]),
        ("reprocess", {"source": "land"}, ["'stored'", "'landing'"]),
    ],
)
def test_word_that_a_parameter_does_not_take_is_refused(
    lake: Lake, method: str, given: dict[str, Any], choices: list[str]
) -> None:
    before = len(lake.entries())
    with pytest.raises(ConfigurationError) as refused:
        getattr(lake.table, method)(**given)
    assert refused.value.code == "unknown-word"
    assert all(choice in refused.value.message for choice in choices)
    assert len(lake.entries()) == before


def test_snapshot_may_be_a_date_which_is_its_first_moment(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.run()
    today = datetime.fromisoformat(lake.table.snapshots()[0].written_at).date()
    tomorrow = today + timedelta(days=1)
    assert lake.table.view(tomorrow).number == lake.table.view(str(tomorrow)).number == 0
    assert lake.table.to_arrow(tomorrow).read_all().to_pylist() == lake.rows()
    for before in (today, str(today), datetime.combine(today, datetime.min.time())):
        with pytest.raises(ConfigurationError) as none:
            lake.table.view(before)
        assert none.value.code == "unknown-snapshot"


@pytest.mark.parametrize("snapshot", [None, True, 1.0, b"1", date])
def test_what_can_not_name_a_snapshot_is_refused(lake: Lake, snapshot: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        lake.table.to_arrow(snapshot)
    assert refused.value.code == "unknown-snapshot"
