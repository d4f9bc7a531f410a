"""`redrive`: dead letters come back once, what is merged meanwhile does not, and the others stay."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.queue import Message, QueueStats
from tests.harness.damage import damage
from tests.harness.lake import Lake, row

PARTITIONS = ["d=2020-01-01", "d=2020-01-02", "d=2020-01-03"]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A published night, and one of three partitions that is appended."""
    lake = Lake(tmp_path)
    lake.land("1.jsonl", [row("a", day, 1, 1) for day in range(3)])
    lake.run()
    lake.land("2.jsonl", [row("a", day, 2, 2) for day in range(3)])
    lake.table.append(host="local")
    lake.configure()
    return lake


@pytest.fixture
def mend(lake: Lake) -> Callable[[], None]:
    """The first two partitions failed, and were buried; call it to mend them."""
    [*_, (_, entry)] = lake.entries()
    files = [entry.touched[p].files[0] for p in PARTITIONS[:2]]
    heal = damage(lake.root / "processed", *files)
    lake.table.dedupe()

    def mended() -> None:
        heal()

    return mended


def call(lake: Lake, *args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(main, [*args, "--config", str(lake.root / "lakeupsert.toml"), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def text(lake: Lake, *args: str) -> str:
    return CliRunner().invoke(main, [*args, "--config", str(lake.root / "lakeupsert.toml")]).stdout


def queue(lake: Lake) -> Any:
    return lake.opened.resources.queue


def test_redriven_partitions_are_merged_by_the_next_worker(lake: Lake, mend: Callable[[], None]) -> None:
    assert queue(lake).stats() == QueueStats(visible=0, leased=0, dead=2)
    assert "lakeupsert redrive" in call(lake, "status", code=1)["error"]["next"]
    mend()
    found = call(lake, "redrive")
    assert found["result"] == {"redriven": 2, "dropped": 0, "left": 0}
    assert found["warnings"] == []
    assert queue(lake).stats() == QueueStats(visible=2, leased=0, dead=0)
    merged = call(lake, "worker", "--until-empty", "--workers", "1")["result"]["partitions"]
    assert sorted(p["partition"] for p in merged) == PARTITIONS[:2]
    assert lake.rows() == lake.expected(2)
    assert call(lake, "redrive")["result"] == {"redriven": 0, "dropped": 0, "left": 0}


def test_redrive_lists_the_letters_with_their_reasons_before(lake: Lake, mend: Callable[[], None]) -> None:
    lines = text(lake, "redrive").splitlines()
    assert lines[0] == "Table t"
    assert [line.split() for line in lines if "dead letter" in line] == [
        ["dead", "letter", f"{partition},", "batch", "2"] for partition in PARTITIONS[:2]
    ]
    assert sum("after 5 attempts: Data file" in line for line in lines) == 2
    assert [line.split() for line in lines[-3:]] == [["redriven", "2"], ["deleted", "none"], ["left", "none"]]


@pytest.mark.long
def test_letter_that_fails_again_is_dead_again(lake: Lake, mend: Callable[[], None]) -> None:
    call(lake, "redrive")
    call(lake, "dedupe", "--workers", "1", code=1)
    assert [letter.receives for letter in queue(lake).dead_letters(9)] == [5, 5], "all its tries were given back"


@pytest.mark.long
def test_partition_that_is_given_comes_back_alone(lake: Lake, mend: Callable[[], None]) -> None:
    found = call(lake, "redrive", "--partition", "2020-01-02")
    assert found["result"] == {"redriven": 1, "dropped": 0, "left": 1}
    assert found["warnings"] == []
    assert [letter.message.partition for letter in queue(lake).dead_letters(9)] == PARTITIONS[:1]
    assert call(lake, "redrive", "--partition", "x", code=2)["error"]["code"] == "not-a-partition"


@pytest.mark.long
def test_letters_of_partitions_that_were_merged_meanwhile_are_deleted(lake: Lake, mend: Callable[[], None]) -> None:
    mend()
    lake.run()
    (warning,) = call(lake, "status")["warnings"]
    assert "`lakeupsert redrive` deletes them" in warning
    assert call(lake, "redrive")["result"] == {"redriven": 0, "dropped": 2, "left": 0}
    assert queue(lake).stats() == QueueStats(visible=0, leased=0, dead=0)


def test_letters_that_name_no_batch_of_the_table_stay(lake: Lake, mend: Callable[[], None]) -> None:
    """Queues outlive tables: a table that is made anew counts from 0."""
    queue(lake).send([Message("another", PARTITIONS[0], 2), Message("t", PARTITIONS[0], 99)])
    lake.table.dedupe()
    found = call(lake, "redrive")
    assert found["result"] == {"redriven": 2, "dropped": 0, "left": 2}
    assert found["warnings"][0].startswith("2 dead letters left in the queue")


def test_table_that_is_not_there_yet_has_no_letters(tmp_path: Path) -> None:
    found = Lake(tmp_path).table.redrive()
    assert (found.letters, found.redriven, found.left) == ((), 0, 0)
    assert not (tmp_path / "processed").exists()
