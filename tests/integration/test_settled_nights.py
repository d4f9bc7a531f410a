"""A command sends as many requests after many nights as after few, if they are merged, published and vacuumed."""

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lakeupsert import Table, clock
from lakeupsert.operations import arrived
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
    written = max((proved.root / "processed/_lakeupsert/headers").glob("arrived-*"))
    document = json.loads(written.read_bytes())
    document["entry"] = "another"
    written.write_bytes(metadata.encode(document))
    assert not reconcile(proved)
