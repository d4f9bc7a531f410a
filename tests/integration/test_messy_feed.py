"""The feed of examples/messy_feed.py: from nothing to exact by what `init` proposes, and what stops each mistake on the way."""

import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main

SCRIPT = Path(__file__).parents[2] / "examples/messy_feed.py"


@pytest.fixture
def feed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    runpy.run_path(str(SCRIPT))["write"](tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*args: str) -> Any:
    result = CliRunner().invoke(main, [*args, "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout)


def row_set(rows: Sequence[dict[str, Any]]) -> set[tuple[str, ...]]:
    return {tuple(str(value) for _, value in sorted(row.items())) for row in rows}


def assert_exact(feed: Path) -> None:
    truth = [json.loads(line) for line in (feed / "truth.jsonl").read_text().splitlines()]
    table = Table.open("lakeupsert.toml")
    rows = table.to_arrow().read_all().to_pylist()
    table.close()
    assert len(rows) == len(truth) == 4704
    assert row_set(rows) == row_set(truth)


def test_three_commands_make_an_exact_table(feed: Path) -> None:
    before = {path: path.read_bytes() for path in feed.rglob("landing/**/*") if path.is_file()}
    assert len(before) == 14
    proposed = call("init", "landing/orders")["result"]["proposed"]
    assert proposed["read"] == {
        "dialects": [{"delimiter": ";", "decimal_separator": ","}],
        "dates": {"order_date": ["%Y-%m-%d", "%d/%m/%Y"]},
    }
    assert proposed["schema"] == {"quantity": "bigint", "price": "double"}
    assert (proposed["key"], proposed["delete"]) == (["order_id"], {"column": "is_deleted", "values": ["Y"]})
    night = call("run", "--host", "local", "--workers", "1")
    (batch,) = night["result"]["append"]["batches"]
    assert (night["ok"], batch["rows_read"], batch["rows_appended"], batch["rows_quarantined"]) == (True, 5714, 5711, 3)
    assert_exact(feed)
    assert {path: path.read_bytes() for path in before} == before


MISTAKES = {
    "a misspelt delete column": (('column = "is_deleted"', 'column = "is_delted"'), "missing-column"),
    "dates that fit most files": (('"%Y-%m-%d", "%d/%m/%Y"', '"%Y-%m-%d"'), "quarantine-limit"),
    "days for months": (("%d/%m/%Y", "%m/%d/%Y"), "quarantine-limit"),
    "days or months": (('"%d/%m/%Y"', '"%d/%m/%Y", "%m/%d/%Y"'), "quarantine-limit"),
    "semicolons for commas": (("dialects =", "# dialects ="), "quarantine-limit"),
    "decimal points": (('decimal_separator = ","', 'decimal_separator = "."'), "quarantine-limit"),
    "folders of another form": (('landing_dates = "%Y-%m-%d"', 'landing_dates = "%Y%m%d"'), "landing-skipped"),
}


@pytest.mark.long
def test_each_mistake_is_caught_before_anything_is_committed(feed: Path) -> None:
    """And the table that is made in the end is the one that would have been made at once."""
    call("init", "landing/orders")
    config = feed / "lakeupsert.toml"
    right = config.read_text()
    for what, ((of, by), code) in MISTAKES.items():
        assert of in right, what
        config.write_text(right.replace(of, by))
        found = call("run", "--host", "local", "--workers", "1")
        assert (found["ok"], found["error"]["code"]) == (False, code), what
        assert found["error"]["data_changed"] is False, what
        assert not list(feed.glob("processed/orders/_lakeupsert/ledger/*")), what
    config.write_text(right)
    call("run", "--host", "local", "--workers", "1")
    assert call("reconcile", "--deep")["ok"]
    assert_exact(feed)
