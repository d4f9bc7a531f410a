"""`--host auto`: where a night runs, by its landing bytes, and that the answer, `--json` and `status` say so."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert import sparkenv
from lakeupsert.cli import main
from lakeupsert.engine import by_name
from lakeupsert.engine.by_name import SPARK_PAYS_BYTES, choose_host
from lakeupsert.operations import run as run_module
from tests.harness.lake import DAY, Lake, row


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    lake = Lake(tmp_path)
    lake.land("1.jsonl", [row("a", 0, 1)])
    monkeypatch.chdir(lake.configure().parent)
    return lake


def answer(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(main, [*args, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every night is large, and pyspark is not installed."""
    monkeypatch.setattr(by_name, "SPARK_PAYS_BYTES", 1)
    monkeypatch.setattr(sparkenv.importlib.util, "find_spec", lambda name: None)


def landed(lake: Lake) -> int:
    return sum(path.stat().st_size for path in Path(lake.settings.landing).iterdir())


def test_small_night_runs_here_and_everything_says_why(lake: Lake) -> None:
    found = answer("run")
    host = found["result"]["host"]
    assert (host["name"], host["landing_bytes"]) == ("local", landed(lake))
    assert "1.0 GB" in host["reason"]
    assert found["result"]["append"]["batches"][0]["host"] == host
    assert answer("status")["result"]["host"] == host
    assert not found["warnings"]
    for command in ("run", "status"):
        assert "local: " in CliRunner().invoke(main, [command]).stdout


@pytest.mark.parametrize("command", ["run", "append"])
def test_large_night_without_pyspark_runs_here_and_warns(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    no_spark(monkeypatch)
    [warning] = answer(command)["warnings"]
    assert "pyspark" in warning
    host = answer("status")["result"]["host"]
    assert host["name"] == "local"
    assert "pyspark" in host["reason"]


def test_host_that_is_named_is_obeyed_without_a_warning(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    no_spark(monkeypatch)
    found = answer("run", "--host", "local")
    assert not found["warnings"]
    assert (found["result"]["host"]["name"], found["result"]["host"]["landing_bytes"]) == ("local", None)


def test_batches_that_an_earlier_run_left_count_too(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    answer("append")
    no_spark(monkeypatch)
    found = answer("run")
    assert found["result"]["append"]["batches"] == []
    assert found["result"]["host"]["landing_bytes"] == landed(lake)
    assert len(found["warnings"]) == 1
    assert answer("run")["result"]["host"]["landing_bytes"] == 0, "the snapshot shows them now"


def test_spark_is_taken_from_so_many_bytes_and_then_merges_too(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparkenv, "prepare", lambda: None)
    assert choose_host("auto", SPARK_PAYS_BYTES).name == "spark"
    assert choose_host("auto", SPARK_PAYS_BYTES - 1).name == "local"
    answer("append")
    merges = []
    monkeypatch.setattr(by_name, "SPARK_PAYS_BYTES", 1)

    def drained(table: Any, options: Any) -> list[Any]:
        merges.append(options.host)
        return []

    monkeypatch.setattr(run_module, "drain_queues", drained)
    answer("run")
    answer("run", "--workers", "2")
    assert merges == ["spark", "local"]


def test_replay_takes_no_host_because_it_has_no_choice(lake: Lake) -> None:
    error = answer("append", "--replay-quarantine", "--host", "spark", code=2)["error"]
    assert error["code"] == "usage"
    assert "--host" in error["message"]


def test_landing_files_are_reprocessed_where_their_bytes_say(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    answer("run")
    rewrite = ("reprocess", "--partition", str(DAY), "--source", "landing", "--workers", "1")
    assert answer(*rewrite)["result"]["host"]["name"] == "local"
    no_spark(monkeypatch)
    found = answer(*rewrite)
    assert "pyspark" in found["result"]["host"]["reason"]
    assert len(found["warnings"]) == 1


@pytest.mark.parametrize("command", ["run", "dedupe"])
def test_processes_of_engine_spark_are_refused_because_it_has_none(lake: Lake, command: str) -> None:
    error = answer(command, "--engine", "spark", "--workers", "2", code=2)["error"]
    assert error["code"] == "usage"
    assert "--workers" in error["message"]
