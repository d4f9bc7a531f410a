"""The examples of docs/SEMANTICS.md and docs/PEERS.md: settings, landing files night by night, what readers see."""

import csv
import io
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from msgspec.structs import asdict

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.pipeline import strategy
from lakeupsert.storage import open_store
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import LedgerEntry, find_quarantined

PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("SEMANTICS.md", "PEERS.md")]
READERS, HISTORY, QUARANTINE, CHANGED = "readers see", "readers of the history see", "quarantine", "changed"


@dataclass
class Example:
    """``blocks`` by what stands behind their language: a landing file's path, a night's commands, or what is to be found in
    the end."""

    name: str
    settings: str = ""
    blocks: dict[str, str] = field(default_factory=dict)

    @property
    def nights(self) -> dict[str, dict[str, str]]:
        """The landing files of each night, which is their first folder, and the commands that are given before it."""
        nights: dict[str, dict[str, str]] = {}
        for path, text in self.blocks.items():
            if "/" in path:
                nights.setdefault(path.partition("/")[0], {})[path] = text
        return nights


def examples() -> Iterator[Example]:
    for section in itertools.chain(*(re.split(r"(?m)^#{2,3} ", page.read_text())[1:] for page in PAGES)):
        example = Example(section.partition("\n")[0])
        for language, name, text in re.findall(r"(?ms)^```(\w+) ?([^\n]*)\n(.*?)^```$", section):
            if language == "toml":
                example.settings = text
            else:
                example.blocks[name] = text
        if example.blocks:
            yield example


def opened(example: Example, root: Path) -> Table:
    settings = re.sub(r"(?m)^\[", "[tables.t.", example.settings)
    usual = "" if "partition_by" in settings else 'partition_by = ["day"]\n'
    usual += "" if "quarantine_limit" in settings else 'quarantine_limit = "100%"\n'  # the nights are of a few rows
    file = root / "lakeupsert.toml"
    file.write_text(f'[tables.t]\nlanding = "landing"\nprocessed = "processed"\n{usual}{settings}')
    (root / "landing").mkdir()
    return Table.open(file)


def as_written(value: Any) -> str:
    return "" if value is None else str(value)


def _entries(table: Table) -> list[Link[LedgerEntry]]:
    ledger = table.objects.ledger
    return list(ledger.between(-1, ledger.head().number))  # type: ignore[union-attr]


def quarantined(table: Table) -> list[dict[str, str]]:
    """Rows that append refused and that are still quarantined, and those that merges refused."""
    objects, ledger = table.objects, _entries(table)
    names = [file.name for file in find_quarantined([link.body for link in ledger])]
    for head in objects.heads({p for link in ledger for p in link.body.touched}).values():
        names += head.body.quarantine
    rows = []
    for name in names:
        with open_store(table.settings.processed).open(name) as source:
            rows += pq.read_table(source).to_pylist()
    return [{name: as_written(value) for name, value in row.items()} for row in rows]


def expected(example: Example, block: str) -> tuple[list[str], list[list[str]]]:
    header, *rows = csv.reader(io.StringIO(example.blocks.get(block, "none\n")))
    return header, sorted(rows)


@pytest.mark.few(len(list(examples())) // 2)
@pytest.mark.parametrize("chosen", ["rewrite", "delta"])
@pytest.mark.parametrize("example", list(examples()), ids=lambda example: example.name)
def test_example_of_the_page(example: Example, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_nights(example, chosen, "arrow", tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("example", list(examples()), ids=lambda example: example.name)
def test_example_with_engine_spark(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_nights(example, "delta", "spark", tmp_path, monkeypatch)


@pytest.mark.few(2)
@pytest.mark.parametrize("chosen", ["rewrite", "delta"])
@pytest.mark.parametrize("example", list(examples()), ids=lambda example: example.name)
def test_example_is_proved_and_made_anew(
    example: Example, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = run_nights(example, chosen, "arrow", tmp_path, monkeypatch)
    from_landing = table.settings.key_scope == "partition"
    assert_proved(table)
    for source in ("stored", *(["landing"] if from_landing else [])):
        table.reprocess(source=source, host="local")
        assert_as_on_the_page(example, table)
    assert_proved(table)


def run_nights(example: Example, chosen: str, engine: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    """Run the nights of the example and compare what it says about rows, quarantine and figures."""
    monkeypatch.setenv("LAKEUPSERT__TABLES__T__STRATEGY", chosen)
    monkeypatch.setenv("LAKEUPSERT__TABLES__T__ENGINE", engine)  # of the nights' commands, too
    monkeypatch.setattr(strategy, "TOGETHER", 2)  # so that three nights fold deltas
    table = opened(example, root)
    assert table.settings.engine == engine
    for files in example.nights.values():
        scope: Any = None
        for name, text in files.items():
            if name.endswith("/commands"):
                run_commands(text, root)
                continue
            path, _, scope = name.partition(" --full ")
            file = root / "landing" / path
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        table.run(host="local", full=scope or None)
    assert_as_on_the_page(example, table)
    header, rows = expected(example, QUARANTINE)
    assert sorted([row[name] for name in header] for row in quarantined(table)) == rows
    if CHANGED in example.blocks:
        header, rows = expected(example, CHANGED)
        found = [{"snapshot": link.number, **asdict(link.body.changes)} for link in table.snapshots()]
        assert sorted([str(one[name]) for name in header] for one in found) == rows
    return table


def run_commands(lines: str, root: Path) -> None:
    for line in lines.splitlines():
        done = CliRunner().invoke(main, [*shlex.split(line)[1:], "--config", str(root / "lakeupsert.toml")])
        assert done.exit_code == 0, done.output


def assert_as_on_the_page(example: Example, table: Table) -> None:
    for block in {READERS, HISTORY} & set(example.blocks):
        header, rows = expected(example, block)
        read = table.to_arrow(history=block == HISTORY, versions=table.settings.versions)
        found = read.read_all().to_pylist()
        assert sorted([as_written(row[name]) for name in header] for row in found) == rows


def assert_proved(table: Table) -> None:
    checked = table.reconcile(deep=True)
    assert not checked.unbalanced
    assert set(checked.gone) == {link.number for link in _entries(table) if link.body.replayed}, (
        "only replayed rows have no landing file to be read again from"
    )


def test_every_rule_of_the_page_has_an_example() -> None:
    rules = [rule for page in PAGES for rule in re.findall(r"(?m)^### (.*)$", page.read_text())]
    assert rules == [example.name for example in examples() if READERS in example.blocks]
