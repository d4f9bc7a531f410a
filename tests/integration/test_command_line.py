"""What a person sees of the command line beside the answers: the list of commands, progress, and `--verbose`."""

import io
import json
import re
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lakeupsert import Table, clock
from lakeupsert.cli import main
from lakeupsert.cli.bar import bar
from lakeupsert.cli.program import GROUPS
from lakeupsert.progress import Share

TABLE = """
[tables.{name}]
landing = "landing/{name}"
processed = "processed/{name}"
key = ["id"]
partition_by = ["day"]
order_by = ["ts"]
"""


def configure(*names: str) -> None:
    for name in names:
        Path(f"landing/{name}").mkdir(parents=True, exist_ok=True)
        land(name)
    Path("lakeupsert.toml").write_text("".join(TABLE.format(name=name) for name in names))


def land(table: str, days: int = 2, file: str = "a.csv") -> None:
    rows = "".join(f"a,2020-01-{day:02},2020-02-01\n" for day in range(1, days + 1))
    Path(f"landing/{table}/{file}").write_text(f"id,day,ts\n{rows}")


def refuse_batch(table: str) -> None:
    Path(f"landing/{table}/bad.csv").write_text("id,day,ts\n" + ",,\n" * 20)


def call(*args: str) -> Result:
    return CliRunner().invoke(main, args)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- help


def test_help_lists_every_command_once_in_its_group_with_its_whole_summary() -> None:
    text = call("--help").stdout
    headings = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert [h for h in headings if h in GROUPS] == list(GROUPS)
    listed = re.findall(r"^  ([a-z]+) {2,}\S", text, re.MULTILINE)
    assert listed == [name for names in GROUPS.values() for name in names]
    words = " ".join(text.split())
    for name in listed:
        summary = main.commands[name].get_short_help_str(limit=1000)
        assert not summary.endswith("...")
        assert summary in words
    assert max(map(len, text.splitlines())) <= 80


def test_dates_are_called_dates() -> None:
    text = call("append", "--help").stdout
    assert "--received-from DATE" in text
    assert "%Y" not in text


# ---------------------------------------------------------------- several tables at once


def test_tables_run_at_once_and_one_that_fails_stops_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure("a", "b", "c")
    refuse_batch("b")
    together, real = threading.Barrier(3, timeout=60), Table.run

    def run(table: Table, **options: Any) -> Any:
        together.wait()  # nobody passes unless all three are here
        return real(table, **options)

    monkeypatch.setattr(Table, "run", run)
    result = call("run", "--parallel", "3", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["error"]["code"], found["error"]["table"]) == (1, "quarantine-limit", "b")
    tables = found["result"]["tables"]
    assert list(tables) == ["a", "b", "c"]
    assert tables["b"] is None
    assert [tables[name]["publish"]["rows"] for name in ("a", "c")] == [2, 2]


def test_first_failure_in_the_file_is_the_error_and_the_others_are_warnings(folder: Path) -> None:
    configure("a", "b", "c")
    for table in ("b", "c"):
        refuse_batch(table)
    for parallel in ([], ["--parallel", "2"]):
        result = call("run", *parallel, "--json")
        found = json.loads(result.stdout)
        assert (result.exit_code, found["error"]["table"]) == (1, "b")
        assert [w.partition(":")[0] for w in found["warnings"]] == ["c"]
        assert found["result"]["tables"]["a"]["publish"]["rows"] == 2


def test_tables_at_once_share_cores_and_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure("a", "b", "c")
    given: list[tuple[int, int]] = []
    real = Table.run

    def run(table: Table, **options: Any) -> Any:
        given.append((options["local_workers"], options["calls_at_once"]))
        return real(table, **options)

    monkeypatch.setattr(Table, "run", run)
    monkeypatch.setattr("lakeupsert.cli.every_night.run.cores", lambda: 8)
    assert call("run", "--parallel", "2").exit_code == 0
    assert call("run", "--parallel", "9").exit_code == 0
    assert call("run").exit_code == 0
    assert given == [(4, 2)] * 3 + [(2, 3)] * 3 + [(8, 1)] * 3


@pytest.mark.parametrize(("tables", "args"), [(("a",), ()), (("a", "b"), ("--table", "a"))])
def test_parallel_has_no_effect_on_one_table_and_is_refused(
    folder: Path, tables: tuple[str, ...], args: tuple[str, ...]
) -> None:
    configure(*tables)
    result = call("run", "--parallel", "2", *args, "--json")
    assert (result.exit_code, json.loads(result.stdout)["error"]["code"]) == (2, "usage")


# ---------------------------------------------------------------- progress and --verbose


def test_run_tells_its_shares(folder: Path) -> None:
    configure("sales")
    land("sales", days=20, file="b.csv")
    table = Table.open("lakeupsert.toml")
    texts: list[str] = []
    table.run(progress=texts.append)
    table.close()
    shares = [text for text in texts if isinstance(text, Share)]
    reading = [s for s in shares if s.startswith("reading")]
    size = sum(path.stat().st_size for path in Path("landing/sales").iterdir())
    assert [s.total for s in reading] == [size, size]
    assert 0 < reading[0].done < reading[1].done == size
    merging = [s for s in shares if s.startswith("merging")]
    assert merging[-1].done == merging[-1].total
    assert not any(share.whole for share in shares), "no earlier night tells what the steps take"


def test_share_and_time_left_are_of_the_whole_night_once_there_was_one(folder: Path) -> None:
    configure("sales")
    nights: list[list[str]] = []
    for night in range(4):
        texts: list[str] = []
        nights.append(texts)
        with Table.open("lakeupsert.toml") as table, clock.use(Steady()):
            if night == 3:  # merges that an earlier call left
                land("sales", days=20, file="d.csv")
                table.append(host="local")
            elif night:
                land("sales", days=20, file=f"{night}.csv")
                land("sales", days=20, file=f"{night}b.csv")
            table.run(host="local", workers=1, progress=texts.append)
    for texts in nights[1:]:
        shares = [text for text in texts if isinstance(text, Share)]
        done = [round(share.done / share.total, 9) for share in shares]
        assert all(share.whole for share in shares if share.startswith(("reading", "merging", "committing")))
        assert done == sorted(done)
        assert done[-1] == pytest.approx(1)
    _, second, third, left = nights
    for texts in (second, third):
        reading, committing = (next(t for t in texts[::-1] if t.startswith(word)) for word in ("reading", "committing"))
        assert isinstance(reading, Share)
        assert isinstance(committing, Share)
        assert 0 < reading.done / reading.total == committing.done / committing.total < 0.9, "merges are to come"
    shares = [text for text in left if isinstance(text, Share)]
    assert shares[0].done / shares[0].total < 0.1, "without new files, the night begins with its merges"


TIME_OF_DAY = re.compile(r"\d\d:\d\d:\d\d")
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC")


def test_people_see_times_in_one_form_and_programs_in_iso_8601(folder: Path) -> None:
    configure("sales")
    shown = [call("run", "--verbose").stderr]
    Path("landing/sales/future.csv").write_text("id,day,ts\nb,2020-01-01,2999-01-01\n")
    calls = [["run"], ["status"], ["history"], ["doctor"], ["query", "select 1"], ["quarantine"]]
    calls += [["explain", "id=a"], ["head", "--snapshot", "2001-02-03T04:05:06+02:00"]]
    for words in calls:
        result = call(*words)
        shown.append(f"{result.stdout}{result.stderr}")
    call("report")
    page = Path("report-sales.html").read_text()
    shown.append(page[page.index("<body>") :])
    for text in shown:
        assert len(TIME_OF_DAY.findall(text)) == len(TIME.findall(text)), text
    assert "2001-02-03 02:05:06 UTC" in shown[-2], "a time of another zone"
    published = json.loads(call("status", "--json").stdout)["result"]["published_at"]
    assert datetime.fromisoformat(published).utcoffset() == timedelta(0)


class Steady(clock.Source):
    """A second passes between two looks at the wall clock."""

    at = datetime(2026, 1, 1, 2, tzinfo=UTC)

    def now(self) -> datetime:
        Steady.at += timedelta(seconds=1)
        return Steady.at


class Ticks(clock.Source):
    """A second passes between two looks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def elapsed(self) -> float:
        self.seconds += 1.0
        return self.seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_line_shows_share_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with clock.use(Ticks()), bar("sales") as show:
        show("surveying 3 landing files")
        assert "surveying" in terminal.getvalue()
        assert "%" not in terminal.getvalue()
        for done in range(6):
            show(Share("merging [partitions]", done, 10))
        shown = terminal.getvalue()
        assert "sales: merging [partitions]" in shown
        assert "50 %" in shown
        assert re.search(r"50 %, about \d+\.\d s left of this step", shown)
        for done in range(6):
            show(Share("merging", done, 12, whole=True))
        assert re.search(r"42 %, about (\d+ min \d+|\d+\.\d) s left$", terminal.getvalue().rstrip())


def test_progress_needs_a_terminal(folder: Path) -> None:
    configure("sales")
    assert call("run").stderr == ""


def test_verbose_writes_each_event_and_the_answer_is_the_same(folder: Path) -> None:
    configure("sales")
    result = call("run", "--verbose")
    lines = [line.partition(" UTC ")[2].split()[:3] for line in result.stderr.splitlines()]
    assert [words[:2] for words in lines] == [
        ["sales", "batch"],
        ["sales", "merge"],
        ["sales", "merge"],
        ["sales", "publish"],
    ]
    assert "partition=day=2020-01-02" in result.stderr
    assert "rows_in=1" in result.stderr
    assert "Table sales" in result.stdout
    assert json.loads(call("run", "-v", "--json").stdout)["ok"]


def test_verbose_and_a_log_in_json_are_two_forms_of_one_thing(folder: Path) -> None:
    configure("sales")
    result = call("run", "--verbose", "--log", "json", "--json")
    assert (result.exit_code, json.loads(result.stdout)["error"]["code"]) == (2, "usage")
