"""Messages that name the cause: files without a row, settings in the wrong place, rows with several faults."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert.cli import main

CONFIG = """\
[tables.orders]
landing = "landing"
processed = "processed"
key = ["id"]
partition_by = ["day"]
order_by = ["version"]
quarantine_limit = 100
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("landing").mkdir()
    Path("lakeupsert.toml").write_text(CONFIG)


def call(*words: str, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code == code, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.mark.parametrize(
    ("text", "line"),
    [("id,v\n1,2\n", 1), ("\n\nnothing\n", 3), ('{"id": 1, "v": NaN}\n', 1), ('[1, 2]\n"x"\n', 1), ("5\n", 1)],
)
def test_first_file_of_json_without_json_is_named_with_its_line(text: str, line: int) -> None:
    Path("landing/f.jsonl").write_text(text)
    error = call("run", "--host", "local", code=1)["error"]
    assert error["code"] == "no-readable-file"
    assert f"f.jsonl, line {line}: Not " in error["message"]
    assert ("NaN and Infinity are not JSON" in error["message"]) == ("NaN" in text)
    Path("landing/g.csv").write_text("id,day,version\n1,2020-01-01,1\n")
    assert call("run", "--host", "local")["error"] is None, (
        "another file makes the table, and these lines are malformed"
    )


def test_setting_in_the_wrong_place_is_told_its_place() -> None:
    for key, wrong, right in (
        ('dates = { day = "%d/%m/%Y" }', "tables.orders", "tables.orders.read"),
        ('escape = "mysql"', "tables.orders", "tables.orders.read"),
        ('dates = { day = "%d/%m/%Y" }', "tables.orders.schema", "tables.orders.read"),
        ('order_by = ["version"]', "tables.orders.read", "tables.orders"),
        ('upserts = ["I"]', "tables.orders.read", "tables.orders.delete"),
    ):
        Path("lakeupsert.toml").write_text(CONFIG + (key if wrong == "tables.orders" else f"[{wrong}]\n{key}") + "\n")
        error = call("run", "--host", "local", code=2)["error"]
        assert error["code"] == "unknown-setting"
        assert f"It is a setting of [{right}]." in error["message"]
        assert "Did you mean" not in error["message"]


def test_row_with_several_faults_tells_them_all_with_the_settings_of_its_table() -> None:
    with Path("lakeupsert.toml").open("a") as config:
        config.write('[tables.orders.schema]\nday = "date"\nprice = "double"\nat = "timestamp"\n')
    Path("landing/a.csv").write_text(
        "id,day,version,price,at\n1,2020-01-01,1,1.5,2020-01-01 10:00:00\n2,31/01/2020,1,cheap,yesterday\n,2020-01-01,1,x,\n"
    )
    run = CliRunner().invoke(main, ["run", "--host", "local"])
    assert run.exit_code == 0
    assert "…" not in run.output
    rows = {row["line"]: row for row in call("quarantine", "--head", "9")["result"]["shown"]}
    reason = rows[3]["reason"]
    assert rows[3]["reason_code"] == "bad_type", "the first reason counts"
    for told in ("'price': 'cheap'", "'at': 'yesterday'", "'day': '31/01/2020'", "[tables.orders.read]"):
        assert told in reason
    assert reason.count("If it is a date") == 1
    assert "'price': 'x'" in rows[4]["reason"]
    assert "Key column 'id' is null." in rows[4]["reason"]


def test_remedy_is_what_the_reason_says() -> None:
    with Path("lakeupsert.toml").open("a") as config:
        config.write('[tables.orders.schema]\nday = "date"\n')
    Path("landing/a.csv").write_text("id,day,version\n1,2020-01-01,1\n2,31/01/2020,1\n")
    said = CliRunner().invoke(main, ["run", "--host", "local"]).output
    assert "bad_partition: set that, then `lakeupsert append --replay-quarantine`" in said
    assert "at the source" not in said


def test_error_names_the_table() -> None:
    Path("landing/a.csv").write_text("id,day,version,op\n1,2020-01-01 10:00:00,1,I\n")
    error = call("run", "--host", "local", code=2)["error"]
    assert "…" not in error["message"] + error["next"]
    assert "[tables.orders.schema]" in error["next"]
