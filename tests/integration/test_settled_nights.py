"""A command sends as many requests after many nights as after few, if they are merged, published and vacuumed."""

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lakeupsert import Table, clock
from lakeupsert.operations import arrived, vacuum
from lakeupsert.table import ledger, metadata
from tests.harness.faults import Fault
from tests.harness.lake import Lake, made_once, row
from tests.integration.test_reconcile import double, lose, reconcile, tamper

FEW, MANY = 20, 52
MORE = 8
"""Requests that the later call may send more. A request for each night would be 32."""
COMMANDS: dict[str, Callable[[Table], object]] = {
    "plan": lambda table: table.plan(),
    "append": lambda table: table.append(host="local"),
    "dedupe": lambda table: table.dedupe(),
    "publish": lambda table: table.publish(),
    "status": lambda table: table.status(),
    "reconcile": lambda table: table.reconcile(),
    "history": lambda table: table.snapshots(),
    "explain": lambda table: table.explain({"k": "a", "l": 0}),
    "explain a part": lambda table: table.explain({"k": "a"}),
    "vacuum": lambda table: table.vacuum(dry=False),
}


class Nights(clock.Source):
    passed = timedelta()

    def now(self) -> datetime:
        return super().now() + self.passed


@pytest.fixture(autouse=True)
def few_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "HEADERS_TOGETHER", (32, 8, 2))
    monkeypatch.setattr(arrived, "PROVED_TOGETHER", 4)


def test_settled_nights_cost_no_request(tmp_path: Path) -> None:
    lake, time, costs = Lake(tmp_path, keep_snapshots=2), Nights(), list[dict[str, int]]()
    with clock.use(time):
        for night in range(MANY):
            time.passed = timedelta(days=night)
            lake.land(f"{night}.jsonl", [row("a", 0, night, night), row("b", 1, night, night)])
            lake.run()
            if night % 4 == 3:
                lake.table.vacuum(dry=False)
                lake.table.reconcile()
            if night + 1 in (FEW, MANY):
                lake.land(f"{night} again.jsonl", [row("a", 0, night, night + 1)])
                costs.append({name: _requests(lake, command) for name, command in COMMANDS.items()})
    few, many = costs
    assert {name: many[name] - few[name] for name in COMMANDS if many[name] > few[name] + MORE} == {}
    lake.finish_and_check()


def _requests(lake: Lake, command: Callable[[Table], object]) -> int:
    lake.reopen()
    command(lake.table)
    return sum(lake.table.requests.values())


@made_once
def proved(folder: Path) -> Lake:
    """Four nights that are proved, and two more."""
    lake = Lake(folder, strategy="rewrite")
    for night in range(6):
        lake.land(f"{night}.jsonl", [row(k, day, night, night) for day in range(3) for k in "ab"])
        lake.run()
        if night == 3:
            lake.table.reconcile()
    return lake


@pytest.mark.few(2)
@pytest.mark.parametrize("change", [lose(0), double(0)], ids=["lost", "doubled"])
def test_what_was_proved_before_hides_no_row_that_is_wrong_since(proved: Lake, change: Callable[[Any], Any]) -> None:
    assert not reconcile(proved)
    tamper(proved, "d=2020-01-02", change)
    assert [*reconcile(proved)] == ["d=2020-01-02"]


def test_restore_behind_a_proof_is_proved_once_by_the_whole_ledger(proved: Lake) -> None:
    proved.table.restore(1, dry=False)
    proved.run()
    entries = proved.table.objects.ledger.newest_number()
    read = []
    for _ in range(2):
        proved.reopen()
        proved.points.arm(-1, Fault.KILL_AFTER)
        found = proved.table.reconcile()
        assert not found.unbalanced
        assert sum(p.withdrawn for p in found.proof) == 24
        read.append(sum(call.startswith("get _lakeupsert/ledger/") for call in proved.points.seen))
    assert entries == 7
    assert read[0] >= entries
    assert read[1] <= 3, "the proof before says the rest"


def test_a_proof_of_another_ledger_is_not_believed(proved: Lake) -> None:
    written = _newest_proof(proved)
    document = json.loads(written.read_bytes())
    document["entry"] = "another"
    written.write_bytes(metadata.encode(document))
    assert not reconcile(proved)


def test_a_batch_that_does_not_add_up_is_said_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrived, "PROVED_TOGETHER", 2)
    lake = Lake(tmp_path)
    for number in range(4):
        _night(lake, number)
    place = next((tmp_path / "processed/_lakeupsert/ledger").glob("*97.json"))
    entry = json.loads(place.read_bytes())
    entry.pop("digest", None)
    entry["body"]["rows_read"] += 5
    place.write_bytes(metadata.encode(entry))
    for _ in range(2):
        lake.reopen()
        assert len(lake.table.reconcile().batches) == 1


def test_a_wrong_proof_is_not_the_beginning_of_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrived, "PROVED_TOGETHER", 2)
    lake = Lake(tmp_path)
    for number in range(4):
        _night(lake, number)
    lake.table.reconcile()
    place = _newest_proof(lake)
    proof = json.loads(place.read_bytes())
    proof.pop("digest", None)
    right = proof["partitions"]["d=2020-01-01"]["rows"]
    proof["partitions"]["d=2020-01-01"]["rows"] += 1
    place.write_bytes(metadata.encode(proof))
    for number in range(4, 8):
        _night(lake, number)
    lake.reopen()
    assert not lake.table.reconcile().unbalanced
    assert json.loads(_newest_proof(lake).read_bytes())["partitions"]["d=2020-01-01"]["rows"] == right + 4


def test_a_vacuum_keeps_the_newest_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrived, "PROVED_TOGETHER", 1)
    monkeypatch.setattr(vacuum, "VERSIONS_KEPT", timedelta(0))
    lake = Lake(tmp_path)
    for number in range(3):
        _night(lake, number)
        lake.table.reconcile()
    newest = _newest_proof(lake)
    lake.table.vacuum(dry=False)
    assert [*newest.parent.glob("arrived-*")] == [newest]


def _night(lake: Lake, number: int) -> None:
    lake.land(f"{number}.jsonl", [row("a", 0, number, number)])
    lake.run()


def _newest_proof(lake: Lake) -> Path:
    return max((lake.root / "processed/_lakeupsert/headers").glob("arrived-*"))
