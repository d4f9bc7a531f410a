"""`try`: a first look at a folder, of which nothing stays."""

import json
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert.cli import main


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


def call(path: str, code: int = 0) -> Any:
    before = sorted(Path().rglob("*"))
    result = CliRunner().invoke(main, ["try", path, "--json"])
    assert result.exit_code == code, result.output
    assert sorted(Path().rglob("*")) == before, "something stayed"
    return json.loads(result.stdout)


def lines(path: str, *rows: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("\n".join(rows) + "\n")


def test_rows_are_merged_and_shown_and_refused_ones_named() -> None:
    bad = [f"{i};2024-01-01;zero" for i in range(20)]  # more than a batch may have
    lines("landing/1.csv", "id;day;price", *(f"{i};2024-01-0{1 + i % 3};{i},5" for i in range(100, 400)), *bad)
    lines("landing/2.csv", "id;day;price", *(f"{i};2024-01-0{1 + i % 3};7,5" for i in range(100, 110)))
    Path("landing/3.csv.gz").write_bytes(b"\x1f\x8b\x08 torn")
    answer = call("landing")
    result = answer["result"]
    assert result["proposed"] == {"key": ["id"], "partition_by": ["day"], "order_by": ["record_timestamp"]}
    assert (result["rows"], result["partitions"], result["quarantined"]) == (
        300,
        3,
        {"bad_type": 20, "unreadable_file": 1},
    )
    assert result["first_rows"][0]["price"] == 7.5
    assert any("3.csv.gz" in warning for warning in answer["warnings"])
    shown = CliRunner().invoke(main, ["try", "landing"]).stdout
    assert all(
        part in shown for part in ("bad_type, for example 1.csv, line", "lakeupsert init landing", "20 bad_type")
    )


def test_what_can_not_be_tried_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    lines("open/a.csv", "day,amount", *(f"2024-01-0{1 + i % 3},{i % 7}" for i in range(100)))
    Path("lake/d=2024-01-01").mkdir(parents=True)
    pq.write_table(pa.table({"id": [1, 2]}), "lake/d=2024-01-01/a.parquet")
    for path, code in (("open", "no-key"), ("lake", "already-partitioned"), ("nowhere", "no-landing")):
        assert call(path, 2)["error"]["code"] == code
    monkeypatch.setattr(import_module("lakeupsert.cli.set_up.try"), "LARGEST", 100)
    assert call("open", 2)["error"]["code"] == "too-large-to-try"


def test_table_without_a_date_is_shown() -> None:
    lines("landing/a.jsonl", *(f'{{"id": {i}, "updated_date": "2024-01-0{1 + i % 3}"}}' for i in range(100)))
    assert call("landing")["result"]["rows"] == 100
