"""The Python blocks of docs/engines/: each runs and shows the table. `test_documentation.py` has the blocks of other kinds."""

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert.api import Table
from tests.harness.readers import canonical, compare, program

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/engines").glob("*.md"))
BLOCK = re.compile(r"(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)```\n", re.DOTALL)
READERS = "run by make test-readers"
LISTING = {"keep_snapshots": "1", "superseded_retention": '"0s"'}
SETTINGS: Mapping[str, dict[str, str]] = {"FOLDERS": LISTING}
"""Of the table that a page is about; that of the others has deletion vectors."""


@dataclass(frozen=True)
class Block:
    page: str
    place: int
    note: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}-{self.place}"


def blocks() -> list[Block]:
    return [
        Block(page.stem, place, found["note"] or "", found["kind"], found["text"])
        for page in PAGES
        for place, found in enumerate(BLOCK.finditer(page.read_text()))
    ]


PYTHON = [block for block in blocks() if block.kind == "python"]
HERE = [block for block in PYTHON if not block.note]
ELSEWHERE = [block for block in PYTHON if block.note == READERS]


def marked(block: Block) -> Any:
    return pytest.param(block, marks=pytest.mark.spark if "spark" in block.text else (), id=str(block))


def night(number: int, keys: range) -> pa.Table:
    moments = [datetime(2020, 7, number, 1, 2, 3, key, UTC) for key in keys]
    return pa.table(
        {
            "order_id": pa.array(keys, pa.int64()),
            "transaction_date": [date(2020, 1 + key % 2, 1) for key in keys],
            "item": pa.array([None if key % 5 == 3 else f"é {key}" for key in keys], pa.string()),
            "amount": pa.array([Decimal(key * number).scaleb(-2) for key in keys], pa.decimal128(12, 2)),
            "record_timestamp": pa.array(moments, pa.timestamp("us", "UTC")),
        }
    )


@pytest.fixture
def lake(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    """The table of the page, in the working directory: two nights, the second of which changes half of the rows."""
    settings = SETTINGS.get(block.page, {"strategy": '"delta"'}) | {"publishers": '["delta"]'}
    lines = ["[tables.sales]", 'landing = "landing"', 'processed = "processed/sales"', 'key = ["order_id"]']
    lines += ['partition_by = ["transaction_date"]', *(f"{name} = {value}" for name, value in settings.items())]
    (tmp_path / "lakeupsert.toml").write_text("\n".join(lines))
    (tmp_path / "landing").mkdir()
    monkeypatch.chdir(tmp_path)
    table = Table.open("lakeupsert.toml")
    for number, keys in enumerate((range(20), range(10, 24)), start=1):
        pq.write_table(night(number, keys), tmp_path / "landing" / f"{number}.parquet")
        table.run(host="local")
    assert any(file.superseded for file in table.files()) == ("strategy" in settings)
    return table


def as_arrow(rows: Any) -> pa.Table:
    """The value that a block calls `sales`."""
    for method in ("collect", "to_arrow_table", "toArrow", "to_table", "to_arrow"):
        if hasattr(rows, method) and not (method == "collect" and hasattr(rows, "toArrow")):
            return as_arrow(getattr(rows, method)())
    return rows if isinstance(rows, pa.Table) else pa.Table.from_pandas(rows, preserve_index=False)


def assert_shows(rows: pa.Table, table: Table) -> None:
    difference = compare(canonical(rows), canonical(table.to_arrow().read_all()), ["order_id"])
    assert difference.exact, str(difference)


@pytest.mark.parametrize("block", [marked(block) for block in HERE])
def test_block_shows_the_table(block: Block, lake: Table, request: pytest.FixtureRequest) -> None:
    names: dict[str, Any] = {}
    text = block.text
    if "spark" in text:
        names["spark"] = request.getfixturevalue("spark")
        text = text.replace("processed/sales", f"{Path.cwd()}/processed/sales")  # Spark stays where it was started
    exec(compile(text, str(block), "exec"), names)
    assert_shows(as_arrow(names["sales"]), lake)


@pytest.mark.readers
@pytest.mark.parametrize("block", ELSEWHERE, ids=str)
def test_block_shows_the_table_in_an_environment_of_its_own(block: Block, lake: Table) -> None:
    """`make readers` has what the blocks would download."""
    interpreter, text, end = Path(sys.executable), block.text, "sales.to_arrow_table()"
    if block.page == "DUCKDB":
        interpreter = program("venv") / "bin/python"
        (extension,) = program("venv").rglob("delta.duckdb_extension")
        text = text.replace("INSTALL delta; LOAD delta", f"LOAD '{extension}'; SET TimeZone = 'UTC'")
    if block.page == "SPARK":
        jars, end = ",".join(map(str, program("jars").glob("*.jar"))), "sales.toArrow()"
        text = re.sub(r'\("spark.jars.packages", ".*?"\)', f'("spark.jars", "{jars}")', text)
    assert text != block.text
    script = f"{text}\nimport pyarrow.parquet as pq\npq.write_table({end}, 'shown.parquet')\n"
    done = subprocess.run([interpreter, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_shows(pq.read_table("shown.parquet"), lake)


def test_pages_that_need_nothing_else_run_here() -> None:
    assert {block.page for block in HERE} >= {"DUCKDB", "POLARS", "PANDAS", "SPARK", "FOLDERS"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_says_on_its_first_screen_not_to_list_the_folder(page: Path) -> None:
    first = "\n".join(page.read_text().splitlines()[:25])
    assert "FOLDERS.md" in first or page.stem == "FOLDERS"
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def test_every_page_is_in_the_list_and_the_readme_links_to_it() -> None:
    listed = (ROOT / "docs/engines/README.md").read_text()
    assert not [page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in listed]
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:25])
    assert "docs/engines/FOLDERS.md" in first
