"""Every code block of README.md and docs/ runs, or the parser of its kind reads it, or a comment above it says why not.

A shell block runs in a copy of a lake after two nights. Commands of lakeupsert alone run in this process, all others in bash,
where `lakeupsert` is this one.
A page of STORIES is one script from an empty folder.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.config import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "adr")]
BLOCK = re.compile(r"(?ms)^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<kind>\w*)(?: (?P<name>[^\n]*))?\n(?P<text>.*?)^```$")
NOT_RUN, READERS = "not run: ", "run by make test-readers"
BEFORE, EXISTING = "run before the first night", "run over an existing lake"
STORIES = ("docs/CHANGING_ROWS.md", "docs/MOVING.md", "docs/TUTORIAL.md")
ELSEWHERE = {
    "test_semantics.py": ("docs/SEMANTICS.md", "docs/PEERS.md"),
    "test_engine_pages.py": tuple(f"docs/engines/{path.name}" for path in (ROOT / "docs/engines").glob("*.md")),
}
"""Pages whose examples another test runs, of the kinds that stand below."""
EXAMPLES = {"test_semantics.py": ("toml", "csv", "jsonl", "sh"), "test_engine_pages.py": ("python",)}
REQUIRED = {"landing": "/lake/landing", "processed": "/lake/processed", "key": ["id"], "partition_by": ["day"]}
VARIABLES = {"LAKE": "/lake", "PAGER_URL": "https://pager.example", "HEARTBEAT_URL": "https://heartbeat.example"}
SETTINGS = """[tables.sales]
landing = "landing/sales"
processed = "processed/sales"
key = ["order_id", "line_no"]
partition_by = ["transaction_date"]
history = true
versions = true
"""
HEADER = "order_id,line_no,transaction_date,item,price,discount,amount,record_timestamp\n"
NIGHTS = {
    "01/02/2020": "7,1,2020-01-01,shoes,10,0,10.00,2020-01-02T02:00:00\n7,2,2020-01-01,socks,3,0,3.00,2020-01-02T02:00:00\n",
    "07/07/2020": "7,1,2020-01-01,shoes,10,2,8.67,2020-07-08T02:00:00\n9,1,2020-07-07,shorts,5,1,4.33,2020-07-08T02:00:00\n",
}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    note: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs_elsewhere(self) -> bool:
        return any(self.page in ELSEWHERE[test] and self.kind in kinds for test, kinds in EXAMPLES.items())


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start("text"))
            name = str(page.relative_to(ROOT))
            found.append(Block(name, line, block["note"] or "", block["kind"], block["text"]))
    return found


BLOCKS = blocks()


def of_kind(*kinds: str) -> list[Any]:
    return [
        pytest.param(
            block, id=str(block), marks=pytest.mark.spark if kinds == ("python",) and "spark" in block.text else ()
        )
        for block in BLOCKS
        if block.kind in kinds
        and not block.note.startswith((NOT_RUN, READERS))
        and not block.runs_elsewhere
        and block.page not in STORIES
    ]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake after two nights."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "lakeupsert.toml").write_text(SETTINGS)
    for night, rows in NIGHTS.items():
        landed = folder / "landing/sales" / night
        landed.mkdir(parents=True)
        (landed / "sales.csv").write_text(HEADER + rows)
        with Table.open(folder / "lakeupsert.toml") as table:
            table.run(host="local", workers=1)
    shim(folder / ".venv/bin/lakeupsert")
    return folder


def shim(path: Path) -> None:
    """The program of an environment."""
    path.parent.mkdir(parents=True)
    code = "from lakeupsert.cli import main; main(prog_name='lakeupsert')"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$@"\n')
    path.chmod(0o755)


@pytest.fixture
def lake(template: Path, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a block: a copy of the template, or as much of it as its note says."""
    folder = tmp_path / "lake"
    shutil.copytree(template, folder, symlinks=True)
    if block.note in (BEFORE, EXISTING):
        table = Table.open(folder / "lakeupsert.toml")
        rows = table.to_arrow().read_all().drop_columns(["transaction_date"])
        shutil.rmtree(folder / "processed")
        if block.note == BEFORE:
            (folder / "lakeupsert.toml").unlink()
        else:
            there = folder / "processed/sales/transaction_date=2020-01-01"
            there.mkdir(parents=True)
            pq.write_table(rows, there / "rows.parquet")
    monkeypatch.chdir(folder)
    return folder


def commands(block: Block) -> list[str]:
    """The commands of a block, whose lines may go on in the next one. In a `console` they stand behind `$ `."""
    lines = re.sub(r"\\\n\s*", " ", block.text).splitlines()
    if block.kind == "console":
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    if block.kind == "crontab":
        return [line.split(maxsplit=5)[5] for line in lines if line[0].isdigit()]
    return lines


def run(block: Block, lake: Path) -> None:
    called = [re.sub(r"(?<![\w:/.])/lake\b", str(lake), line) for line in commands(block)]
    words = [shlex.split(line, comments=True) for line in called]
    simple = all(line[:1] in (["lakeupsert"], []) for line in words)
    if not simple or any({"|", ">", ">>", "&&"} & set(line) for line in words):
        bash("\n".join(called), lake)
        return
    for arguments in filter(None, words):
        done = CliRunner().invoke(main, arguments[1:], prog_name="lakeupsert")
        assert done.exit_code == 0, f"{shlex.join(arguments)} ended with {done.exit_code}:\n{done.output}"


def bash(script: str, folder: Path, **variables: str) -> str:
    program = os.pathsep.join((f"{folder}/.venv/bin", str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": program, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("block", of_kind("sh", "console", "crontab"))
def test_commands_run(block: Block, lake: Path) -> None:
    assert commands(block)
    run(block, lake)


@pytest.mark.parametrize("block", of_kind("python"))
def test_python_runs(block: Block, lake: Path, request: pytest.FixtureRequest) -> None:
    names = {"spark": request.getfixturevalue("spark")} if "spark" in block.text else {}
    exec(compile(block.text, str(block), "exec"), names)


def completed(text: str) -> str:
    """Settings of a table as a file: with its section and the settings that every table needs, where they are missing. A table
    that is not `sales` has all of them."""
    if re.search(r"^\[tables\.(?!sales\b)", text, re.MULTILINE):
        return text
    there = {line.partition("=")[0].strip() for line in text.splitlines()}
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in REQUIRED.items() if name not in there)
    section = "[tables.sales]\n"
    return text.replace(section, section + lines) if section in text else section + lines + text


@pytest.mark.parametrize("block", of_kind("toml"))
def test_settings_are_those_of_a_table(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"\$\{(\w+)\}", block.text):
        monkeypatch.setenv(name, f"s3://{name.lower()}")
    file = tmp_path / "lakeupsert.toml"
    file.write_text(completed(block.text))
    config = load(str(file), VARIABLES)
    for table, given in tomllib.loads(file.read_text())["tables"].items():
        _, settings = config.table(table)
        assert all(getattr(settings, name) is not None for name in given)


def read_yaml(text: str) -> list[object]:
    return list(yaml.safe_load_all(text))


PARSERS = {"json": json.loads, "yaml": read_yaml}


@pytest.mark.parametrize("block", of_kind(*PARSERS))
def test_data_parse(block: Block) -> None:
    assert PARSERS[block.kind](block.text)


@pytest.mark.long
@pytest.mark.parametrize("page", STORIES)
def test_story_runs_from_its_first_block_to_its_last(page: str, tmp_path: Path) -> None:
    parts = [
        block.text if block.kind == "sh" else f"python - <<'END_OF_BLOCK'\n{block.text}END_OF_BLOCK\n"
        for block in BLOCKS
        if block.page == page and not block.note.startswith(NOT_RUN)
    ]
    shim(tmp_path / ".venv/bin/lakeupsert")
    bash("".join(parts), tmp_path)


def unsettled(found: Sequence[Block]) -> list[str]:
    """The blocks that nobody runs and that do not say why."""
    kinds = {"sh", "console", "crontab", "python", "toml", *PARSERS}
    return [
        str(block)
        for block in found
        if block.kind not in kinds and not block.runs_elsewhere and len(block.note.removeprefix(NOT_RUN)) < 5
    ]


def test_every_block_runs_or_says_why_not() -> None:
    assert len(BLOCKS) > 100
    fences = {str(page.relative_to(ROOT)): len(re.findall(r"(?m)^\s*```", page.read_text())) for page in PAGES}
    found: Mapping[str, int] = {name: sum(block.page == name for block in BLOCKS) for name in fences}
    assert fences == {name: 2 * number for name, number in found.items()}, "a block that the pattern does not find"
    assert not unsettled(BLOCKS)
    assert unsettled([Block("x.md", 1, "", "text", "a drawing"), Block("x.md", 2, NOT_RUN, "sql", "SELECT 1")])


def test_what_make_and_python_are_told_to_run_is_there() -> None:
    text = "\n".join(block.text for block in BLOCKS if block.kind == "sh")
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    modules = {f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").iterdir()}
    named = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", text)), set(re.findall(r"python -m (benchmarks\.\w+)", text))
    assert all(named)
    assert (named[0] - targets, named[1] - modules) == (set(), set())
