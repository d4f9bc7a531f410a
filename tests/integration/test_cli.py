"""The command line, through its interface: which stream, which exit code, and that every refusal says what to do."""

import csv
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import click
import pytest
from click.testing import CliRunner, Result

from lakeupsert import Table, __version__, sparkenv
from lakeupsert.cli import main
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.pipeline.append import append
from tests.harness.damage import damage
from tests.harness.processes import wait_until

PROGRAM = [sys.executable, "-c", "from lakeupsert.cli import main; main()"]
COMMANDS = [
    *(
        "run",
        "append",
        "dedupe",
        "worker",
        "ingest",
        "maintain",
        "capture",
        "publish",
        "serve",
        "status",
        "history",
        "export",
        "files",
        "demo",
        "config",
    ),
    *(
        "adopt",
        "restore",
        "doctor",
        "explain",
        "redrive",
        "init",
        "report",
        "vacuum",
        "reprocess",
        "plan",
        "reconcile",
        "compact",
        "schema",
        "ddl",
        "quarantine",
        "diff",
        "head",
        "query",
        "update",
        "delete",
        "erase",
        "try",
        "fsck",
        "changes",
        "backup",
        "recover",
        "rebuild",
    ),
]
FIELDS = [
    "schema_version",
    "command",
    "table",
    "ok",
    "exit_code",
    "started_at",
    "seconds",
    "result",
    "warnings",
    "error",
]
PATIENCE = 60.0

Row = tuple[Any, ...]


# ---------------------------------------------------------------- a small lake, and how it is called


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a configuration of one table, `sales`, and an empty landing zone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAKEUPSERT_DEBUG", raising=False)
    configure("sales")
    return tmp_path


def configure(*names: str, more: str = "") -> None:
    """Tables with key id, partition day, order ts; landing zone and table are called after them."""
    text = ""
    for name in names:
        Path(f"landing/{name}").mkdir(parents=True, exist_ok=True)
        text += f'[tables.{name}]\nlanding = "landing/{name}"\nprocessed = "processed/{name}"\n'
        text += f'key = ["id"]\npartition_by = ["day"]\norder_by = ["ts"]\n{more}\n'
    Path("lakeupsert.toml").write_text(text)


def land(rows: Sequence[Row], file: str = "a.csv", table: str = "sales") -> None:
    """Rows of (id, day, ts, value) as a landing file."""
    path = Path(f"landing/{table}/{file}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as f:
        csv.writer(f).writerows([("id", "day", "ts", "value"), *rows])


def night(number: int, days: Sequence[str] = ("2020-01-01", "2020-01-02")) -> list[Row]:
    return [(key, day, f"2020-02-{number:02d}T02:00:00", number) for day in days for key in "abc"]


def call(*args: str) -> Result:
    result = CliRunner().invoke(main, args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def done(*args: str) -> str:
    """Standard output of a call that ends well."""
    result = call(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def answer(*args: str, code: int = 0) -> Any:
    """The one JSON object of a call, after what holds for each: exactly these fields, and the exit code in it."""
    result = call(*args, "--json")
    assert result.exit_code == code, result.output
    return checked(result.stdout, code)


def checked(stdout: str, code: int) -> Any:
    found = json.loads(stdout)
    assert list(found) == FIELDS
    assert found["schema_version"] == 1
    assert found["exit_code"] == code
    assert found["ok"] is (code == 0)
    assert found["seconds"] >= 0
    assert found["started_at"].endswith("+00:00")
    if code == 0:
        assert found["error"] is None
    else:
        assert list(found["error"]) == [
            "code",
            "message",
            "data_changed",
            "committed",
            "certain",
            "readers_see",
            "table",
            "next",
            "partition",
        ]
        assert found["error"]["message"]
        assert found["error"]["next"]
    return found


def rows_seen(table: str = "sales") -> list[tuple[Any, ...]]:
    with opened(table) as found:
        return [(str(r["id"]), str(r["day"]), r["value"]) for r in found.to_arrow().read_all().to_pylist()]


@contextmanager
def opened(table: str = "sales") -> Iterator[Table]:
    found = Table.open("lakeupsert.toml", table)
    try:
        yield found
    finally:
        found.close()


# ---------------------------------------------------------------- run, and what it tells


def test_run_appends_merges_and_publishes(lake: Path) -> None:
    land([*night(1), ("a", "2020-01-01", "2020-02-01T03:00:00", 5)])
    found = answer("run", "--host", "local", "--batch-id", "first")
    assert (found["command"], found["table"]) == ("run", "sales")
    result = found["result"]
    assert list(result) == ["host", "append", "dedupe", "publish", "requests", "plan"]
    (batch,) = result["append"]["batches"]
    assert batch.pop("bytes_written") > 0
    assert batch == {
        "number": 1,
        "id": "first",
        "files": 1,
        "rows_read": 7,
        "rows_appended": 7,
        "rows_superseded": 1,
        "rows_quarantined": 0,
        "keys_in_several_partitions": 3,
        "keys_moved": 0,
        "unknown_deletes": 0,
        "hollow_deletes": 0,
        "incomplete_creates": 0,
        "contrary": {},
        "skipped": {},
        "touched_partitions": ["day=2020-01-01", "day=2020-01-02"],
        "host": result["host"],
    }
    merged = result["dedupe"]["partitions"]
    assert [(p["partition"], p["status"], p["rows_out"]) for p in merged] == [
        ("day=2020-01-01", "merged", 3),
        ("day=2020-01-02", "merged", 3),
    ]
    assert set(merged[0]) == {
        *("partition", "version", "merged", "rows_in", "rows_out", "rows_superseded", "rows_deleted", "rows_refused"),
        *("changes", "bytes_read", "bytes_written", "engine", "strategy", "seconds", "status"),
    }
    assert merged[0]["changes"] == {
        "inserted": 3,
        "updated": 0,
        "deleted": 0,
        "unchanged": 0,
        "late": 0,
        "newer_than_extract": 0,
        "deletes_without_row": 0,
    }
    assert result["publish"] == {
        "snapshot": 0,
        "batch": 1,
        "partitions_changed": 2,
        "rows": 6,
        "lagging": [],
        "publishers": {},
    }
    assert list(result["requests"]) == ["get", "head", "list", "put", "create", "delete"]
    assert result["requests"]["create"] > 0
    assert rows_seen()[0] == ("a", "2020-01-01", 5)


def test_run_tells_people_in_a_few_lines(lake: Path) -> None:
    configure("sales", more='quarantine_limit = "100%"')
    land([(key, "2020-01-01", "2020-02-01", 1) for key in range(1200)])
    land([("", "2020-01-01", "2020-02-01", 1)], "b.csv")
    result = call("run", "--host", "local", "--workers", "1")
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) <= 12
    assert lines[0] == "Table sales"
    assert "batch 1: 2 files, 1,200 rows" in lines[1]
    assert "1 partition: day=2020-01-01" in lines[2]
    assert "1 of 1,201 rows: 1 null_key" in lines[3]
    (place,) = re.findall(r"in (/.*)", lines[4])
    assert Path(place).is_file()
    assert lines[5].strip() == "null_key, for example b.csv, line 2 (byte 17): Key column 'id' is null."
    assert lines[6].strip().startswith("null_key: fix these rows at the source and land them again")
    assert "1 partition: 1,200 rows in, 1,200 out" in lines[7]
    assert lines[8].split() == ["keys", "1,200", "inserted"]
    assert re.search(r"predicted .* read, .* written; measured .* and ", lines[9])
    assert "snapshot 0: 1,200 rows, 1 partition changed" in lines[10]
    assert "requests" in lines[11]


def test_run_again_finds_nothing_to_do(lake: Path) -> None:
    land(night(1))
    done("run", "--host", "local")
    found = answer("run", "--host", "local")
    assert found["result"]["append"] == {"batches": []}
    assert found["result"]["dedupe"] == {"partitions": []}
    assert found["result"]["publish"]["partitions_changed"] == 0
    land(night(2), "_late.csv")
    said = done("run", "--host", "local")
    assert "nothing: no new file in" in said
    assert "(names that begin with _ or . do not count)" in said


def test_quarantined_rows_alone_are_a_warning(lake: Path) -> None:
    configure("sales", more="quarantine_limit = 1")
    land([*night(1), ("", "2020-01-01", "2020-02-01", 1)])
    found = answer("run", "--host", "local")
    (batch,) = found["result"]["append"]["batches"]
    assert (batch["rows_read"], batch["rows_appended"], batch["rows_quarantined"]) == (7, 6, 1)
    (warning,) = found["warnings"]
    assert "1 of 7 rows: 1 null_key" in warning
    assert str(lake / "processed/sales/_lakeupsert/quarantine") in warning


def test_rows_over_the_quarantine_limit_exit_1_and_commit_nothing(lake: Path) -> None:
    configure("sales", more="quarantine_limit = 0")
    land([*night(1), ("", "2020-01-01", "2020-02-01", 1)])
    found = answer("run", "--host", "local", code=1)
    assert found["error"]["code"] == "quarantine-limit"
    assert found["error"]["data_changed"] is False
    assert answer("status")["result"]["batch"] == 0


# ---------------------------------------------------------------- the steps by themselves


def test_steps_one_by_one_come_to_what_run_does(lake: Path) -> None:
    land(night(1))
    (batch,) = answer("append", "--host", "local")["result"]["batches"]
    assert batch["rows_appended"] == 6
    status = answer("status")["result"]
    assert status.pop("host")["name"] == "local"
    assert status.pop("reads")["due"] == []
    assert status.pop("freshness")["held_by"] == {"unmerged_partitions": 2, "unpublished_batches": 1}
    assert status == {
        "snapshot": None,
        "published_at": None,
        "batch": 0,
        "received_at": None,
        "partitions": 0,
        "dirty": 2,
        "unpublished_since": 1,
        "lagging": [],
        "queue": {"visible": 2, "leased": 0, "dead": 0},
        "rows": 0,
        "bytes": 0,
        "quarantined": 0,
        "deletes_without_row": 0,
        "skipped": {},
        "publishers": {},
    }
    merged = answer("dedupe")["result"]["partitions"]
    assert {p["status"] for p in merged} == {"merged"}
    status = answer("status")["result"]
    assert (status["snapshot"], status["dirty"], status["rows"]) == (0, 0, 6)
    assert answer("publish")["result"]["partitions_changed"] == 0


def test_publish_says_which_snapshot_has_the_tag(lake: Path) -> None:
    """Of those that show the same, as `history` lists it; not the one that only keeps the tag."""
    land(night(1))
    done("run")
    assert "tag of snapshot 0" in done("publish", "--tag", "first")
    found = answer("publish", "--tag", "again")["result"]
    assert found["tags"] == {"first": 0, "again": 0}
    assert answer("publish", "--untag", "first")["result"]["tags"] == {"again": 0}


def test_publish_refuses_a_tag_that_is_not_there_before_it_publishes(lake: Path) -> None:
    assert answer("publish", "--untag", "first", code=2)["error"]["code"] == "unknown-snapshot"
    land(night(1))
    done("append")
    with Table.open("lakeupsert.toml") as table:
        table.dedupe(workers=1)
    for option, name, code in (("--untag", "first", "unknown-snapshot"), ("--tag", "latest", "unfit-tag")):
        assert answer("publish", option, name, code=2)["error"]["code"] == code
        assert answer("status")["result"]["snapshot"] is None
    done("publish", "--tag", "first", "--tag", "second")
    error = answer("publish", "--untag", "first", code=2)["error"]
    assert error["code"] == "unknown-snapshot"
    assert "'second'" in error["message"]
    assert answer("publish", "--untag", "second", "--tag", "third")["result"]["tags"] == {"third": 0}


@pytest.mark.parametrize(
    ("word", "command"),
    [
        ("replay", "lakeupsert append --replay-quarantine"),
        ("tag", "lakeupsert publish --tag NAME"),
        ("rollback", "lakeupsert restore"),
        ("statu", "status"),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_one(word: str, command: str) -> None:
    result = call(word, "x")
    assert result.exit_code == 2
    assert command in result.stderr


def test_history_is_newest_first(lake: Path) -> None:
    for number in (1, 2):
        land(night(number), f"{number}.csv")
        done("run", "--host", "local")
    snapshots = answer("history")["result"]["snapshots"]
    assert [(s["number"], s["batch"], s["partitions"], s["rows"], s["lagging"]) for s in snapshots] == [
        (1, 2, 2, 6, []),
        (0, 1, 2, 6, []),
    ]
    assert set(snapshots[0]) == {
        *("number", "batch", "published_at", "partitions", "rows", "bytes", "lagging", "changes", "tags")
    }
    assert [(s["changes"]["inserted"], s["changes"]["updated"]) for s in snapshots] == [(0, 6), (6, 0)]
    assert [line.split()[0] for line in done("history").splitlines()] == ["snapshot", "1", "0"]


def test_files_are_paths_one_a_line_and_filtered(lake: Path) -> None:
    land(night(1))
    done("run", "--host", "local")
    paths = done("files").splitlines()
    assert len(paths) == 2
    assert all(Path(path).is_file() for path in paths)
    found = answer("files", "--where", "day = '2020-01-02'", "--snapshot", "0")["result"]
    assert found["snapshot"] == 0
    (file,) = found["files"]
    assert (file["partition"], file["path"], file["rows"]) == ("day=2020-01-02", paths[1], 3)
    assert file["bytes"] == Path(paths[1]).stat().st_size


def test_files_of_a_filter_on_any_column(lake: Path) -> None:
    land([("a", "2020-01-01", "2020-02-01", 1), ("b", "2020-01-02", "2020-02-01", 2)])
    done("run", "--host", "local")
    assert len(done("files").splitlines()) == 2
    (path,) = done("files", "--where", "value > 1 AND id < 'c'").splitlines()
    assert "day=2020-01-02" in path
    assert done("files", "--where", "value > 2").splitlines() == []


def test_export_writes_once_and_again_only_when_told_to(lake: Path) -> None:
    land(night(1))
    done("run", "--host", "local")
    assert answer("export", "--output", "out.csv")["result"] == {"snapshot": 0, "output": "out.csv", "rows": 6}
    with Path("out.csv").open(newline="") as f:
        assert [row["id"] for row in csv.DictReader(f)] == list("abcabc")
    assert answer("export", "--output", "out.csv", code=2)["error"]["code"] == "output-exists"
    done("export", "--output", "out.csv", "--overwrite", "--where", "id = 'b'")
    assert len(Path("out.csv").read_text().splitlines()) == 3


def test_latest_is_exported_and_has_no_files(lake: Path) -> None:
    land(night(1))
    done("append", "--host", "local")
    exported = answer("export", "--output", "out.csv", "--snapshot", "latest")["result"]
    assert exported == {"snapshot": "latest", "output": "out.csv", "rows": 6}
    error = answer("files", "--snapshot", "latest", code=2)["error"]
    assert error["code"] == "latest-has-no-files"
    assert "lakeupsert export --snapshot latest" in error["next"]


@pytest.mark.parametrize("command", [["files"], ["export", "--output", "out.csv"]])
def test_unknown_snapshot_is_refused_and_what_is_accepted_is_named(lake: Path, command: list[str]) -> None:
    land(night(1))
    done("run", "--host", "local")
    error = answer(*command, "--snapshot", "newest", code=2)["error"]
    assert error["code"] == "unknown-snapshot"
    for accepted in ("published", "number", "time"):
        assert accepted in error["next"]


def test_received_dates_without_landing_dates_are_refused(lake: Path) -> None:
    land(night(1))
    error = answer("append", "--host", "local", "--received-from", "2020-01-01", code=2)["error"]
    assert error["code"] == "no-landing-dates"


def test_received_dates_choose_landing_folders(lake: Path) -> None:
    configure("sales", more='landing_dates = "%Y-%m-%d"')
    for day in ("2020-02-01", "2020-02-02", "2020-02-03"):
        land(night(1), f"{day}/a.csv")
    chosen = ["--received-from", "2020-02-02", "--received-to", "2020-02-02"]
    assert answer("append", "--host", "local", *chosen)["result"]["batches"][0]["files"] == 1
    assert answer("append", "--host", "local")["result"]["batches"][0]["files"] == 2


# ---------------------------------------------------------------- dedupe over a range


@pytest.fixture
def lost_messages(lake: Path) -> None:
    """Partitions 2, 9, 10, 11 are dirty, and the queue has forgotten all of them."""
    configure("sales", more='schema = { day = "bigint" }')
    land(night(1, ["2", "9", "10", "11"]))
    done("append", "--host", "local")
    for file in Path("processed/sales/_lakeupsert").glob("queue.sqlite*"):
        file.unlink()


@pytest.mark.usefixtures("lost_messages")
@pytest.mark.parametrize(
    ("options", "merged"),
    [
        ([], set()),
        (["--from", "9", "--to", "10"], {"day=9", "day=10"}),
        (["--from", "10"], {"day=10", "day=11"}),
        (["--to", "day=9"], {"day=2", "day=9"}),
        (["--partition", "11", "--partition", "day=2"], {"day=2", "day=11"}),
    ],
)
def test_dedupe_of_a_range_sends_lost_messages_by_typed_value(options: list[str], merged: set[str]) -> None:
    found = answer("dedupe", *options)
    assert {p["partition"] for p in found["result"]["partitions"]} == merged
    assert "4 partitions (day=10, day=11, day=2 and 1 more)" in found["warnings"][0]
    assert "`lakeupsert run`" in found["warnings"][0]


@pytest.mark.usefixtures("lost_messages")
@pytest.mark.parametrize(
    "options", [["--partition", "2", "--from", "2"], ["--from", "10", "--to", "9"], ["--partition", "monday"]]
)
def test_dedupe_of_an_impossible_range_is_refused(options: list[str]) -> None:
    answer("dedupe", *options, code=2)


# ---------------------------------------------------------------- what is wrong with the data: exit 1


@pytest.fixture
def broken(lake: Path) -> Callable[[], None]:
    """A published night, then one whose first partition can't be merged; call it to mend that."""
    land(night(1))
    done("run", "--host", "local")
    land(night(2), "b.csv")
    done("append", "--host", "local")
    return damage_appended("day=2020-01-01")


def damage_appended(partition: str) -> Callable[[], None]:
    with opened() as table:
        last = table.objects.ledger.head()
    assert last
    [file] = last.body.touched[partition].files
    return damage(Path("processed/sales"), file)


def test_failed_partition_holds_the_night_back_until_it_is_mended(broken: Callable[[], None]) -> None:
    found = answer("dedupe", code=1)
    assert {p["partition"]: p["status"] for p in found["result"]["partitions"]} == {
        "day=2020-01-01": "failed",
        "day=2020-01-02": "merged",
    }
    error = found["error"]
    assert (error["code"], error["partition"]) == ("failed-partitions", "day=2020-01-01")
    assert error["data_changed"] is False
    assert "can't be read" in error["message"]
    assert answer("publish", code=1)["error"]["code"] == "failed-partitions"
    told = answer("status", code=1)
    assert (told["error"]["code"], told["error"]["partition"]) == ("failed-partitions", "day=2020-01-01")
    assert "can't be read" in told["error"]["message"]
    assert {value for *_, value in rows_seen()} == {1}
    broken()
    done("run", "--host", "local")
    assert {value for *_, value in rows_seen()} == {2}
    (warning,) = answer("status")["warnings"]
    assert warning.startswith("1 dead letter in the queue")
    assert "`lakeupsert redrive`" in warning


def test_skipped_partition_lags_and_is_told(broken: Callable[[], None]) -> None:
    configure("sales", more='on_failed_partition = "skip"')
    found = answer("run", "--host", "local", code=1)
    assert found["result"]["publish"]["lagging"] == ["day=2020-01-01"]
    assert found["error"]["data_changed"] is True
    error = answer("status", code=1)["error"]
    assert (error["code"], error["partition"]) == ("failed-partitions", "day=2020-01-01")


# ---------------------------------------------------------------- JSON, and nothing beside it


@pytest.mark.parametrize(
    ("args", "command", "message"),
    [
        (["run", "--hosst", "local"], "run", "No such option"),
        (["run", "--host", "cluster"], "run", "'cluster' is not one of"),
        (["append", "--dry-run"], "append", "No such option"),
        (["append", "--received-from", "yesterday"], "append", "yesterday"),
        (["export"], "export", "--output"),
        (["worker", "--workers", "0"], "worker", "0 is not in the range"),
        (["undelete"], None, "No such command"),
        ([], None, "Missing command"),
    ],
)
def test_usage_error_is_one_json_object(lake: Path, args: list[str], command: str | None, message: str) -> None:
    found = answer(*args, code=2)
    assert found["command"] == command
    assert found["error"]["code"] == "usage"
    assert message in found["error"]["message"]
    assert "--help" in found["error"]["next"]


def test_unforeseen_exception_is_one_json_object(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(table: Table) -> None:
        raise RuntimeError("from Spark\nTraceback (most recent call last):\n  somewhere\na bug")

    monkeypatch.setattr(Table, "status", fail)
    error = answer("status", code=1)["error"]
    assert error["code"] == "internal-error"
    assert error["message"].endswith("RuntimeError: a bug")
    assert "Traceback" not in call("status").stderr
    monkeypatch.setenv("LAKEUPSERT_DEBUG", "1")
    assert "Traceback" in call("status").stderr


def test_full_disk_asks_to_try_again(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(table: Table) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Table, "status", fail)
    assert answer("status", code=75)["error"]["code"] == "disk-full"


def test_error_for_people_says_what_whether_and_what_next(lake: Path) -> None:
    result = call("run", "--host", "local", "--table", "sale")
    assert result.exit_code == 2
    assert result.stdout == ""
    what, changed, following = result.stderr.splitlines()
    assert what.startswith("Error: ")
    assert "Did you mean 'sales'?" in what
    assert changed == "Committed: no batch"
    assert following.startswith("Next: ")


def test_process_prints_one_object_and_nothing_else(lake: Path) -> None:
    land(night(1))
    found = subprocess.run([*PROGRAM, "run", "--host", "local", "--json"], capture_output=True, text=True, check=False)
    assert checked(found.stdout, 0)["result"]["publish"]["rows"] == 6
    assert found.stderr == ""
    refused = call("run", "--json", "--nonsense")
    checked(refused.stdout, 2)
    assert refused.stderr == ""


def test_closed_pipe_is_no_error(lake: Path) -> None:
    land(night(1))
    done("run", "--host", "local")
    process = subprocess.Popen([*PROGRAM, "files"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, b"")


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("no_color", [False, True])
def test_colours_are_for_a_terminal_that_wants_them(lake: Path, no_color: bool) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color"} | ({"NO_COLOR": "1"} if no_color else {})
    ours, theirs = pty.openpty()
    command = [*PROGRAM, "status", "--table", "none"]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, check=False)
    os.close(theirs)
    text = os.read(ours, 10_000).decode()
    os.close(ours)
    assert found.returncode == 2
    assert "Error:" in text
    assert ("\x1b[1;31m" in text) is not no_color


@pytest.mark.parametrize("on_terminal", [True, False])
@pytest.mark.long
def test_terminal_gets_no_controls_out_of_the_data(lake: Path, on_terminal: bool) -> None:
    """A program that reads a pipe gets paths as they are."""
    land([("1", "\x9b31m", "2020-01-01", "\x7f\x1b[31m\u202e")], file="\x1b.csv")
    answer("run", "--host", "local")
    shown = ""
    for command in ("files", "status", "head", "query select * from sales"):
        ours, theirs = pty.openpty() if on_terminal else os.pipe()
        subprocess.run([*PROGRAM, *command.split(" ", 1)], stdout=theirs, check=True)
        os.close(theirs)
        shown += os.read(ours, 100_000).decode()
        os.close(ours)
    assert ("\x9b" in shown) is not on_terminal
    assert "\\x9b31m" in shown
    assert not {"\x1b", "\x7f", "\u202e"} & set(shown), "head shows rows to people only"


# ---------------------------------------------------------------- configuration


def test_unknown_key_is_refused_with_a_suggestion(lake: Path) -> None:
    configure("sales", more='quarantine_limt = "1%"')
    error = answer("run", "--host", "local", code=2)["error"]
    assert error["code"] == "unknown-setting"
    assert "Did you mean 'quarantine_limit'?" in error["message"]


def test_missing_landing_zone_is_refused(lake: Path) -> None:
    Path("landing/sales").rmdir()
    error = answer("run", "--host", "local", code=2)["error"]
    assert error["code"] == "no-landing"
    assert str(lake / "landing/sales") in error["message"]


def test_two_tables_on_one_processed_path_are_refused(lake: Path) -> None:
    configure("sales", "returns")
    text = Path("lakeupsert.toml").read_text().replace("processed/returns", "processed/sales")
    Path("lakeupsert.toml").write_text(text)
    assert answer("status", code=2)["error"]["code"] == "shared-processed"


def test_environment_wins_over_the_file(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    land([*night(1), ("", "2020-01-01", "2020-02-01", 1)])
    monkeypatch.setenv("LAKEUPSERT__TABLES__SALES__QUARANTINE_LIMIT", "0")
    assert answer("append", "--host", "local", code=1)["error"]["code"] == "quarantine-limit"


def test_configuration_is_found_from_below_and_by_name(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    land(night(1))
    below = lake / "some/where"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    done("append", "--host", "local")
    monkeypatch.chdir("/")
    done("dedupe", "--config", str(lake / "lakeupsert.toml"))
    assert (lake / "processed/sales/day=2020-01-01").is_dir()


def test_common_options_may_stand_before_the_command(lake: Path) -> None:
    result = call("--config", "lakeupsert.toml", "--table", "sales", "--json", "status")
    assert checked(result.stdout, 0)["table"] == "sales"


def test_config_tells_every_setting_and_where_it_came_from(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure("sales", "returns", more='schema = { "order id" = "string" }')
    monkeypatch.setenv("LAKEUPSERT__TABLES__SALES__ENGINE", "spark")
    text = done("config")
    read = tomllib.loads(text)["tables"]
    assert list(read) == ["sales", "returns"]
    assert (read["sales"]["engine"], read["returns"]["engine"]) == ("spark", "arrow")
    assert read["sales"]["landing"] == str(lake / "landing/sales")
    assert read["sales"]["schema"] == {"order id": "string"}
    assert re.search(r'^engine = "spark" +# LAKEUPSERT__TABLES__SALES__ENGINE$', text, re.MULTILINE)
    assert re.search(r'^format = "auto" +# default$', text, re.MULTILINE)
    found = answer("config", "--table", "sales")
    assert found["result"]["path"] == str(lake / "lakeupsert.toml")
    table = found["result"]["tables"]["sales"]
    assert table["settings"]["engine"] == "spark"
    assert table["settings"]["quarantine_limit"] == "1%"
    assert table["origins"]["engine"] == "LAKEUPSERT__TABLES__SALES__ENGINE"
    assert table["origins"]["key"] == "file"


def test_printed_configuration_means_the_same(lake: Path) -> None:
    configure("sales", more='[tables.sales.delete]\ncolumn = "op"\nvalues = ["D"]')
    Path("copy.toml").write_text(done("config"))
    before, after = answer("config")["result"], answer("config", "--config", "copy.toml")["result"]
    assert before["tables"]["sales"]["settings"] == after["tables"]["sales"]["settings"]


def test_example_is_a_configuration_to_begin_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lakeupsert.toml").write_text(done("config", "--example"))
    assert list(answer("config")["result"]["tables"]) == ["sales"]
    assert answer("config", "--example")["result"]["example"] == Path("lakeupsert.toml").read_text()


# ---------------------------------------------------------------- several tables


@pytest.mark.parametrize(
    "command",
    [["append"], ["dedupe"], ["publish"], ["history"], ["files"], ["export", "--output", "x.csv"]],
    ids=lambda c: c[0],
)
def test_command_on_one_table_asks_which(lake: Path, command: list[str]) -> None:
    configure("sales", "returns")
    error = answer(*command, code=2)["error"]
    assert error["code"] == "which-table"
    assert "sales, returns" in error["message"]
    assert "--table" in error["next"]


def test_run_status_and_worker_take_all_tables_in_the_order_of_the_file(lake: Path) -> None:
    configure("sales", "returns")
    for table in ("sales", "returns"):
        land(night(1), table=table)
    found = answer("run", "--host", "local")
    assert found["table"] is None
    assert list(found["result"]["tables"]) == ["sales", "returns"]
    assert found["result"]["tables"]["returns"]["publish"]["rows"] == 6
    assert list(answer("status")["result"]["tables"]) == ["sales", "returns"]
    assert list(answer("worker", "--until-empty")["result"]["tables"]) == ["sales", "returns"]
    assert answer("run", "--host", "local", "--table", "returns")["table"] == "returns"
    assert re.findall(r"^Table (\w+)$", done("status"), re.MULTILINE) == ["sales", "returns"]


def test_table_that_fails_does_not_keep_the_next_from_its_turn(lake: Path) -> None:
    configure("sales", "returns")
    Path("landing/sales").rmdir()
    land(night(1), table="returns")
    found = answer("run", "--host", "local", code=2)
    assert found["error"]["code"] == "no-landing"
    assert found["result"]["tables"]["sales"] is None
    assert found["result"]["tables"]["returns"]["publish"]["rows"] == 6


# ---------------------------------------------------------------- workers and signals


def test_worker_until_empty_publishes(lake: Path) -> None:
    land(night(1))
    done("append", "--host", "local")
    assert len(answer("worker", "--until-empty")["result"]["partitions"]) == 2
    assert answer("status")["result"]["rows"] == 6


def test_worker_without_time_takes_nothing(lake: Path) -> None:
    land(night(1))
    done("append", "--host", "local")
    found = answer("worker", "--max-seconds", "0", "--workers", "1")
    assert found["result"]["totals"]["merged"] == 0
    assert answer("status")["result"]["queue"]["visible"] == 2


@contextmanager
def started(*args: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*PROGRAM, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell starts what it puts in the background with SIGINT ignored, perhaps these tests as well
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def merged_by_workers(*tables: str) -> None:
    """A night comes for each of these tables, and who waits for it merges it."""
    for table in tables:
        land(night(1), table=table)
        done("append", "--host", "local", "--table", table)
    for table in tables:
        with opened(table) as found:
            wait_until(lambda: found.status().dirty == 0, f"{table} is merged", 0.05)


def ended(process: subprocess.Popen[str], number: signal.Signals, code: int) -> Any:
    process.send_signal(number)
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    return checked(out, code)


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("tables", [["sales"], ["sales", "returns"]])
def test_waiting_worker_that_gets_sigterm_exits_75(lake: Path, tables: list[str]) -> None:
    configure(*tables)
    with started("worker", "--workers", "1", "--json") as process:  # before the first append: it waits for that too
        merged_by_workers(*tables)
        answered = ended(process, signal.SIGTERM, 75)
    assert answered["error"]["code"] == "terminated"
    results = answered["result"]["tables"].values() if len(tables) > 1 else [answered["result"]]
    assert [(result["partitions"], result["totals"]["merged"]) for result in results] == [([], 2)] * len(tables)


@pytest.mark.long
def test_waiting_worker_that_is_interrupted_exits_130(lake: Path) -> None:
    with started("worker", "--workers", "1", "--json") as process:
        merged_by_workers("sales")
        assert ended(process, signal.SIGINT, 130)["error"]["code"] == "interrupted"


@pytest.mark.long
def test_worker_processes_stop_when_their_parent_gets_sigterm(lake: Path) -> None:
    with started("worker", "--workers", "2", "--json") as process:
        merged_by_workers("sales")
        answered = ended(process, signal.SIGTERM, 75)
    assert answered["result"]["totals"]["merged"] == 2


def test_sigterm_while_merging_finishes_the_call_at_hand_and_gives_the_rest_back(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    land(night(1, [f"2020-01-{day:02d}" for day in range(1, 11)]))
    done("append", "--host", "local")
    merge = ArrowEngine.merge

    def merge_and_be_told_to_end(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return merge(*args)

    monkeypatch.setattr(ArrowEngine, "merge", merge_and_be_told_to_end)
    found = answer("dedupe", code=75)
    assert found["error"]["code"] == "terminated"
    at_hand = ArrowEngine.partitions_per_call
    assert len(found["result"]["partitions"]) == at_hand
    assert answer("status")["result"]["queue"] == {"visible": 10 - at_hand, "leased": 0, "dead": 0}


def be_told_to_end() -> Any:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_while_appending_finishes_the_batch(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    land(night(1))
    host_by_name = append.host_by_name
    monkeypatch.setattr(append, "host_by_name", lambda name: be_told_to_end() or host_by_name(name))
    found = answer("append", "--host", "local", code=75)
    assert found["error"]["code"] == "terminated"
    assert found["result"]["batches"][0]["rows_appended"] == 6


def test_second_sigterm_ends_at_once(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def be_told_twice(*args: Any, **options: Any) -> None:
        be_told_to_end()
        be_told_to_end()
        pytest.fail("it went on")

    monkeypatch.setattr(Table, "append", be_told_twice)
    found = answer("append", "--host", "local", code=75)
    assert found["error"]["code"] == "terminated"
    assert found["result"] is None


def test_sigterm_where_nothing_can_be_asked_to_stop_ends_at_once(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Table, "snapshots", lambda table: be_told_to_end() or pytest.fail("it went on"))
    assert answer("history", code=75)["error"]["code"] == "terminated"


def test_failure_that_sigterm_brought_about_is_not_the_answer(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        """As with Spark, whose JVM is in the same process group and ends sooner."""
        be_told_to_end()
        raise ConnectionRefusedError

    monkeypatch.setattr(Table, "append", fail)
    assert answer("append", "--host", "local", code=75)["error"]["code"] == "terminated"


# ---------------------------------------------------------------- Spark that is not there, help, start-up


def test_run_without_java_says_which_package_to_install(
    lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparkenv, "JVM_FOLDERS", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    land(night(1))
    error = answer("run", "--host", "spark", code=2)["error"]
    assert error["code"] == "no-java"
    assert "openjdk-17-jre-headless" in error["next"]
    assert answer("dedupe", "--engine", "spark", code=2)["error"]["code"] == "no-java"
    done("run")


def test_commands_are_those_that_have_landed() -> None:
    assert set(main.commands) == set(COMMANDS)


@pytest.mark.few(len(COMMANDS))
@pytest.mark.parametrize("command", COMMANDS)
def test_command_has_help_with_an_example_and_the_common_options(command: str) -> None:
    text = done(command, "--help")
    assert f"Example:\n    lakeupsert {command}" in text
    assert "--json" in text
    if command != "demo":
        assert "--config" in text
        assert "--table" in text
    for parameter in main.commands[command].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{parameter.name} has no help"


def test_program_without_arguments_prints_its_help() -> None:
    text = done()
    assert all(f"\n  {command} " in text for command in COMMANDS)


def test_version_is_that_of_the_package() -> None:
    assert done("--version") == f"lakeupsert {__version__}\n"


@pytest.mark.parametrize(
    ("shell", "complete"),
    [
        ("bash", {"COMP_WORDS": "lakeupsert recon", "COMP_CWORD": "1"}),
        ("zsh", {"COMP_WORDS": "lakeupsert recon", "COMP_CWORD": "1"}),
        ("fish", {"COMP_WORDS": "lakeupsert recon", "COMP_CWORD": "recon"}),
    ],
)
def test_shell_gets_its_script_and_completes_commands(shell: str, complete: dict[str, str]) -> None:
    script = CliRunner().invoke(main, env={"_LAKEUPSERT_COMPLETE": f"{shell}_source"})
    assert script.exit_code == 0
    assert f"_LAKEUPSERT_COMPLETE={shell}_complete" in script.stdout
    found = CliRunner().invoke(main, env={"_LAKEUPSERT_COMPLETE": f"{shell}_complete", **complete})
    assert found.exit_code == 0
    assert re.findall(r"\breco\w*", found.stdout) == ["reconcile"]


def test_shell_completes_options_and_their_values() -> None:
    env = {"_LAKEUPSERT_COMPLETE": "bash_complete", "COMP_WORDS": "lakeupsert run --engine ", "COMP_CWORD": "3"}
    assert CliRunner().invoke(main, env=env).stdout.split() == ["plain,arrow", "plain,spark"]
    env |= {"COMP_WORDS": "lakeupsert schema rename --al", "COMP_CWORD": "3"}
    assert CliRunner().invoke(main, env=env).stdout.split() == ["plain,--alias"]


def test_help_brings_neither_arrow_nor_spark() -> None:
    program = "import sys\nfrom lakeupsert.cli import main\ntry: main(['run', '--help'])\nexcept SystemExit: pass\n"
    program += "sys.exit(', '.join({'numpy', 'pyarrow', 'pyspark', 'rich', 'sqlglot'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.stderr.strip() == ""


def test_demo_passes_its_arguments_on_and_its_code_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def demonstrate(arguments: list[str]) -> int:
        given.append(arguments)
        print("exact: 1 rows")
        return len(given) - 1

    monkeypatch.setattr("lakeupsert.demo.main", demonstrate)
    assert done("demo", "--nights", "3", "--check") == "exact: 1 rows\n"
    assert answer("demo", "--nights", "3", code=1)["result"] == {"exact": False}
    assert given == [["--nights", "3", "--check"], ["--nights", "3"]]
    monkeypatch.undo()
    assert answer("demo", "--nonsense", code=2)["error"]["code"] == "usage"


def test_file_of_an_error_can_be_copied_into_a_shell(lake: Path) -> None:
    land(night(1))
    done("run", "--host", "local")
    [damaged, *_] = done("files").splitlines()
    Path(damaged).unlink()
    told = call("export", "--output", "x.csv")
    assert told.exit_code == 1
    assert shlex.quote(damaged) in told.stderr
    assert "file:" not in told.stderr
    assert damaged in unquote(answer("export", "--output", "x.csv", code=1)["error"]["message"])
