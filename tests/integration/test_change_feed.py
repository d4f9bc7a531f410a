"""`changes`: whoever applies them to a copy has the table, whatever came between; and what they read and cost for it."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError
from lakeupsert.table.spec import RESERVED
from tests.harness.lake import Lake, row

KINDS: dict[str, dict[str, Any]] = {
    "rewrite": {"strategy": "rewrite"},
    "delta": {"strategy": "delta"},
    "table": {"key_scope": "table"},
    "columns": {"mode": "columns"},
    "history": {"history": True, "strategy": "delta"},
}
ADDED = ("_change_type", "_commit_version", "_commit_timestamp")


class Mirror:
    """A copy of a lake's rows by key, to which only changes are applied, each as its kind says."""

    def __init__(self, lake: Lake) -> None:
        self.lake, self.rows = lake, dict[tuple[Any, ...], dict[str, Any]]()
        self.position: str | None = None
        self.seen: list[str] = []

    def _key(self, one: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(one[name] for name in (("k", "l") if self.lake.settings.key_scope == "table" else ("k", "l", "d")))

    def follow(self, until: str | int = "published") -> None:
        found = self.lake.table.changes(self.position, until)
        for one in found.rows.read_all().to_pylist():
            kind, number, _ = (one.pop(name) for name in ADDED)
            assert number == found.snapshot
            self.seen.append(kind)
            match kind:
                case "delete" | "update_preimage":
                    assert self.rows.pop(self._key(one)) == one
                case _:
                    assert self._key(one) not in self.rows
                    self.rows[self._key(one)] = one
        self.lake.table.tag("mirror", found.snapshot)
        self.position = "mirror"

    def check(self) -> None:
        assert sorted(self.rows.values(), key=str) == sorted(self.lake.rows(), key=str)


def night(rng: random.Random, number: int) -> list[Any]:
    keys = rng.sample(range(60), 25)
    return [
        row(f"k{n}", rng.randrange(3), number * 10 + n % 3, rng.randrange(9), op=rng.choice([None, None, "D"]))
        for n in keys
    ]


@pytest.mark.few(len(KINDS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_copy_that_follows_is_the_table(tmp_path: Path, kind: str) -> None:
    rng = random.Random(kind)
    lake = Lake(tmp_path, keep_snapshots=1, superseded_retention="0s", **KINDS[kind])
    mirror = Mirror(lake)
    for number in range(1, 16):
        lake.land(f"{number}.jsonl", night(rng, number))
        lake.run()
        if number == 8:
            lake.table.compact(full=True)
        if number == 11:
            lake.table.tag("eleven")
        if number == 13 and kind != "table":
            lake.table.restore("eleven", dry=False)
            lake.run()
        if number % 5 == 0:
            lake.table.vacuum(dry=False)
        if rng.random() < 0.6:
            mirror.follow()
            mirror.check()
    mirror.follow()
    mirror.check()
    assert {*mirror.seen} == {"delete", "update_preimage", "update_postimage", "insert"}
    assert lake.table.changes("mirror").rows.read_all().num_rows == 0


def test_a_key_that_moves_is_deleted_before_it_is_inserted(tmp_path: Path) -> None:
    """Its new partition comes before the old one."""
    lake = Lake(tmp_path, key_scope="table")
    lake.land("1.jsonl", [row("a", 1, 1)])
    lake.run()
    lake.land("2.jsonl", [row("a", 0, 2)])
    lake.run()
    found = lake.table.changes(0).rows.read_all()
    assert found["_change_type"].to_pylist() == ["delete", "insert"]


def test_spark_reads_the_same_changes(tmp_path: Path, spark: Any) -> None:
    rng = random.Random(1)
    lake = Lake(tmp_path, strategy="delta")
    for number in range(1, 4):
        lake.land(f"{number}.jsonl", night(rng, number))
        lake.run()
    own = lake.table.changes(0)
    frame, snapshot = lake.table.changes_to_spark(spark, 0)
    assert snapshot == own.snapshot
    theirs = [{**one.asDict(), "_commit_timestamp": None} for one in frame.collect()]
    ours = [{**one, "_commit_timestamp": None} for one in own.rows.read_all().to_pylist()]
    assert sorted(theirs, key=str) == sorted(ours, key=str)
    assert theirs


def test_before_the_first_snapshot_and_beyond_the_last(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("1.jsonl", [row("a", 0, 1)])
    lake.table.append(host="local")
    nothing = lake.table.changes(None)
    assert (nothing.snapshot, nothing.rows.read_all().num_rows) == (None, 0)
    lake.run()
    lake.land("2.jsonl", [row("b", 0, 2)])
    lake.run()
    first = lake.table.changes(None, 0)
    assert (first.snapshot, first.rows.read_all()["k"].to_pylist()) == (0, ["a"])
    codes = []
    for since, until in ((1, 0), (7, "published"), ("nobody", "published"), (0, "latest")):
        with pytest.raises(ConfigurationError) as caught:
            lake.table.changes(since, until)
        codes.append(caught.value.code)
    assert codes == ["unfit-order", "unknown-snapshot", "unknown-snapshot", "unknown-snapshot"]


def test_what_both_snapshots_share_is_not_read(tmp_path: Path) -> None:
    lake = Lake(tmp_path, strategy="rewrite")
    lake.land("1.jsonl", [row(f"k{n}", n % 9, 1, n) for n in range(90)])
    lake.run()
    lake.land("2.jsonl", [row("k1", 1, 2, -1)])
    lake.run()
    lake.reopen()
    rows = lake.table.changes(0).rows.read_all()
    assert rows.num_rows == 2
    assert lake.table.requests["get"] < 12


def test_a_column_with_the_name_of_one_that_is_added(tmp_path: Path) -> None:
    lake = Lake(tmp_path, schema={**Lake(tmp_path / "other").settings.schema, "_change_type": "string"})
    lake.land("1.jsonl", [{**row("a", 0, 1), "_change_type": "x"}])
    lake.run()
    with pytest.raises(ConfigurationError) as caught:
        lake.table.changes(None)
    assert caught.value.code == "column-exists"
    assert not "_change_type".startswith(RESERVED)
    assert pa.types.is_string(lake.table.view().schema.field("_change_type").type)


def test_the_command_moves_the_position_when_the_file_is_whole(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    config, output = str(lake.configure()), tmp_path / "changes.jsonl"

    def call(*options: str) -> dict[str, Any]:
        done = CliRunner().invoke(
            main, ["changes", "--reader", "mirror", "--output", str(output), "--config", config, "--json", *options]
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    for night, rows in enumerate(([row("a", 0, 1), row("b", 1, 1)], [row("a", 0, 2, 7)])):
        lake.land(f"{night}.jsonl", rows)
        lake.run()
        assert call("--overwrite")["result"]["rows"] == 2
    assert [json.loads(line)["_change_type"] for line in output.read_text().splitlines()] == [
        "update_preimage",
        "update_postimage",
    ]
    lake.land("3.jsonl", [row("c", 0, 3)])
    lake.run()
    assert call()["error"]["code"] == "output-exists"
    assert call("--overwrite")["result"]["rows"] == 1
    assert call("--overwrite")["result"]["rows"] == 0
