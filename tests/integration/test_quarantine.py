"""`lakeupsert quarantine` and `Table.quarantine`: which refused rows are shown, and where they came from."""

import csv
import json
from datetime import date, datetime
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError, DamagedTableError, RefusedError
from lakeupsert.table.ledger import Reason
from tests.harness.lake import Lake, row

LARGE = 1 << 40
NARROW = {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz", "v": "int", "op": "string"}
NOT_A_NUMBER = {**row("x", 0, 1), "v": "no number"}


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Two published nights: one refused a row of JSON and one of Parquet, the next two of JSON."""
    lake = Lake(tmp_path, schema=NARROW)
    lake.land("1.jsonl", [row("a", 0, 1, 1)], refused=[row("b", 0, 1, LARGE)])
    typed = {"k": ["c", None], "l": [0, 0], "d": [date(2020, 1, 1)] * 2, "ts": [datetime(2020, 1, 1)] * 2, "v": [1, 1]}
    pq.write_table(pa.table(typed), tmp_path / "landing/2.parquet")
    lake.run()
    lake.land("3.jsonl", [row("d", 0, 2, 1)], refused=[NOT_A_NUMBER, row("e", 0, 2, LARGE)])
    lake.run()
    return lake


def places(lake: Lake, *args: Any, **options: Any) -> list[tuple[Any, ...]]:
    found = lake.table.quarantine(*args, **options).read_all().to_pylist()
    return [(r["batch"], r["reason_code"], r["file"], r["position"]) for r in found]


def answer(lake: Lake, *args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(main, ["quarantine", "--config", str(lake.configure()), "--json", *args])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)["result" if code == 0 else "error"]


def text(lake: Lake, *args: str) -> str:
    result = CliRunner().invoke(main, ["quarantine", "--config", str(lake.configure()), *args])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_newest_batch_comes_first_with_file_and_place_of_each_row(lake: Lake) -> None:
    lines = (lake.root / "landing/3.jsonl").read_text().splitlines()
    first = len(lines[0]) + 1
    assert places(lake) == [
        (2, "bad_type", "3.jsonl", first),
        (2, "bad_type", "3.jsonl", first + len(lines[1]) + 1),
        (1, "bad_type", "1.jsonl", len((lake.root / "landing/1.jsonl").read_text().splitlines()[0]) + 1),
        (1, "null_key", "2.parquet", 1),
    ]
    rows = lake.table.quarantine().read_all().to_pylist()
    assert [r["raw"] for r in rows[:2]] == lines[1:]
    assert rows[0]["batch_id"] == lake.entries()[2][1].batch_id
    assert "'no number'" in rows[0]["reason"]


def test_reason_selects(lake: Lake) -> None:
    assert [r[:2] for r in places(lake, "null_key")] == [(1, "null_key")]
    assert places(lake, "future_order") == []
    with pytest.raises(ConfigurationError) as raised:
        lake.table.quarantine("null-key")  # type: ignore[arg-type]
    assert raised.value.code == "unknown-word"


@pytest.mark.long
def test_rows_that_a_replay_took_and_batches_that_a_restore_withdrew_are_not_shown(lake: Lake) -> None:
    lake.mend(lambda r: r["v"] == LARGE, schema={**NARROW, "v": "bigint"})
    assert lake.table.append(replay_quarantine=True) is not None
    lake.run()
    assert [(batch, file) for batch, _, file, _ in places(lake)] == [(1, "2.parquet"), (2, "3.jsonl")]
    assert len(places(lake)) == lake.table.status().quarantined
    lake.table.restore(0, dry=False)
    assert [batch for batch, *_ in places(lake)] == [1, 1]


def test_rows_that_a_merge_refused_are_shown_and_without_such_merges_no_manifest_is_read(tmp_path: Path) -> None:
    nights = [[row("a", 0, 1), row("b", 0, 1)], [row("a", 0, 5, op="D")], [row("b", 0, 2)], [row("a", 0, 4, 7)]]
    for retention, expected in ((None, []), ("0s", [(4, "below_floor", "3.jsonl", 0)])):
        lake = Lake(tmp_path / str(retention), tombstone_retention=retention)
        for number, rows in enumerate(nights):
            lake.land(f"{number}.jsonl", rows)
            lake.run()
        lake.reopen()
        lake.points.seen.clear()
        assert places(lake) == expected
        assert any("/partitions/" in call for call in lake.points.seen) is bool(expected)


def test_line_is_shown_if_the_file_has_one(lake: Lake) -> None:
    [file] = lake.entries()[2][1].quarantine
    path = lake.root / "processed" / file.name
    stored = pq.read_table(path).replace_schema_metadata()
    lines = pa.array([2, 3])
    if "line" in stored.column_names:
        stored = stored.drop_columns("line")
    pq.write_table(stored.append_column("line", lines), path)
    assert lake.table.quarantine().read_all()["line"].to_pylist()[:2] == [2, 3]
    assert "line 2" in text(lake)


@pytest.mark.long
def test_rows_of_a_batch_that_was_refused_as_a_whole_are_shown_by_the_name_in_its_error(tmp_path: Path) -> None:
    lake = Lake(tmp_path, schema=NARROW, quarantine_limit=0)
    lake.land("1.jsonl", [row("a", 0, 1, 1)], refused=[NOT_A_NUMBER])
    with pytest.raises(RefusedError) as raised:
        lake.run()
    command = raised.value.next.partition("`lakeupsert quarantine ")[2].partition("`")[0]
    uri = (tmp_path / "processed" / command).as_uri()
    for name in (command, uri, str(tmp_path / "processed" / command)):
        assert places(lake, files=[name]) == [(None, "bad_type", "1.jsonl", 87)]
    assert answer(lake, command)["rows"] == 1
    for name in ("other.parquet", "_lakeupsert/quarantine/none", "../lakeupsert.toml"):
        assert answer(lake, name, code=2)["code"] == "no-quarantine-file"
    assert answer(lake)["rows"] == 1
    with pytest.raises(RefusedError):
        lake.run()
    assert answer(lake)["rows"] == 1


def test_rows_for_which_a_full_extract_was_refused_are_shown_by_the_name_in_its_error(lake: Lake) -> None:
    lake.land("full.jsonl", [row("a", 0, 3, 1)], refused=[NOT_A_NUMBER])
    with pytest.raises(RefusedError) as raised:
        lake.table.append(host="local", full="table")
    name = raised.value.next.partition("`lakeupsert quarantine ")[2].partition("`")[0]
    assert [r[:3] for r in places(lake, files=[name])] == [(None, "bad_type", "full.jsonl")]
    assert len(places(lake)) == 4


def test_quarantine_file_that_is_gone_is_an_error(lake: Lake) -> None:
    [file] = lake.entries()[2][1].quarantine
    (lake.root / "processed" / file.name).unlink()
    with pytest.raises(DamagedTableError) as raised:
        lake.table.quarantine().read_all()
    assert raised.value.code == "damaged-data-file"


def test_command_counts_by_reason_and_file_and_shows_the_first_rows(lake: Lake) -> None:
    found = answer(lake)
    assert (found["rows"], found["reasons"]) == (4, {"bad_type": 3, "null_key": 1})
    assert found["files"][0] == {"reason_code": "bad_type", "file": "3.jsonl", "rows": 2}
    assert len(found["files"]) == 3
    assert [r["file"] for r in found["shown"]] == ["3.jsonl", "3.jsonl", "1.jsonl", "2.parquet"]
    assert list(found["shown"][0]) == ["batch", "batch_id", "reason_code", "reason", "file", "line", "position", "raw"]
    assert len(answer(lake, "--head", "1")["shown"]) == 1
    found = answer(lake, "--reason", "null_key", "--head", "0")
    assert (found["rows"], found["reasons"], found["shown"]) == (1, {"null_key": 1}, [])
    lines = text(lake, "--head", "2").splitlines()
    assert sum("3.jsonl" in line for line in lines) == 3
    assert any("2 more" in line for line in lines)
    assert "--replay-quarantine" in text(lake)


@pytest.mark.long
def test_command_says_what_no_replay_can_take(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("1.jsonl", [row("a", 0, 1)])
    (tmp_path / "landing/2.jsonl").write_text("{broken\n")
    lake.table.run(host="local")
    assert answer(lake)["reasons"] == {"malformed": 1}
    assert "land them again" in text(lake)
    assert "--replay-quarantine" not in text(lake)
    lake.land("3.jsonl", [], refused=[NOT_A_NUMBER])
    lake.table.run(host="local")
    [first, second] = [line for line in text(lake).splitlines() if "--replay" in line or "land them again" in line]
    assert "--replay-quarantine" in first
    assert "malformed:" in second
    assert "--replay-quarantine" not in text(lake, "--reason", "malformed")


def test_command_says_that_nothing_is_in_quarantine(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.run()
    assert answer(lake) == {"rows": 0, "reasons": {}, "files": [], "shown": [], "output": None}
    assert "replay" not in text(lake)


@pytest.mark.long
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_output_has_every_row_whatever_is_shown(lake: Lake, suffix: str) -> None:
    target = lake.root / f"refused{suffix}"
    found = answer(lake, "--output", str(target), "--head", "1")
    assert (found["rows"], found["output"], len(found["shown"])) == (4, str(target), 1)
    if suffix == ".csv":
        with target.open(newline="") as file:
            rows = list(csv.DictReader(file))
    elif suffix == ".jsonl":
        rows = [json.loads(line) for line in target.read_text().splitlines()]
    else:
        rows = pq.read_table(target).to_pylist()
    assert [row["raw"] for row in rows] == [row["raw"] for row in lake.table.quarantine().read_all().to_pylist()]
    assert answer(lake, "--output", str(target), code=2)["code"] == "output-exists"
    assert answer(lake, "--output", str(target), "--overwrite")["rows"] == 4
    assert answer(lake, "--overwrite", code=2)["code"] == "usage"
    assert answer(lake, "--output", str(lake.root / "landing/r.csv"), code=2)["code"] == "overlapping-zones"


def test_every_reason_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs/WHEN_SOMETHING_BROKE.md").read_text()
    table = page.partition("| reason | why the row was refused |")[2].partition("\n\n")[0]
    assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")] == list(get_args(Reason))


def test_who_appends_or_replays_is_told_of_the_command(lake: Lake) -> None:
    lake.land("4.jsonl", [row("f", 0, 3, 1)], refused=[NOT_A_NUMBER])
    config = str(lake.configure())
    for command in (["run", "--host", "local"], ["append", "--replay-quarantine"], ["status"]):
        result = CliRunner().invoke(main, [*command, "--config", config])
        assert "lakeupsert quarantine" in result.output, command
    lake.land("5.jsonl", [], refused=[NOT_A_NUMBER])
    found = json.loads(CliRunner().invoke(main, ["append", "--host", "local", "--json", "--config", config]).stdout)
    assert any("lakeupsert quarantine" in warning for warning in found["warnings"])
