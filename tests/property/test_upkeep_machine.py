"""Nights, and between them everything an operator does to a table, in any order and struck at any call: it equals a dict."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lakeupsert.errors import TryAgainError
from lakeupsert.testing.faults import Fault, Killed
from lakeupsert.testing.lake import Lake, row

MEMORY = Path("/dev/shm")

# One night is one step here, and keys are fewer than in test_lake_machine: what matters is what upkeep does in between.
records = st.builds(
    row,
    k=st.sampled_from(["a", "b"]),
    day=st.integers(0, 1),
    ts=st.integers(0, 3),
    v=st.integers(0, 9),
    op=st.sampled_from([None, "D"]),
)
nights = st.lists(records, min_size=1, max_size=3)
calls = st.one_of(st.tuples(st.integers(0, 40), st.just("")), st.tuples(st.integers(0, 2), st.just("create")))
strikes = st.one_of(st.none(), st.none(), st.tuples(calls, st.sampled_from(Fault)))


class UpkeepMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.lake = Lake(self.root)
        self.number = 0
        self.checked = (-1, -1)

    def teardown(self) -> None:
        try:
            self.lake.finish_and_check()
        finally:
            self.lake.table.close()
            shutil.rmtree(self.root)

    def struck(self, strike: Any, step: Any) -> None:
        """Run a step; where it is struck, a new process goes on."""
        if strike is not None:
            (number, kind), fault = strike
            self.lake.points.arm(number, fault, kind)
        try:
            step()
        except (Killed, TryAgainError):
            self.lake.points.disarm()
            self.lake.reopen()
        finally:
            self.lake.points.disarm()

    def land(self, rows: list[Any]) -> None:
        self.number += 1
        self.lake.land(f"{self.number:03d}.jsonl", rows)

    @rule(rows=nights, strike=strikes)
    def night(self, rows: list[Any], strike: Any) -> None:
        self.land(rows)
        self.struck(strike, lambda: self.lake.table.run(host="local"))

    @rule(rows=nights)
    def append_alone(self, rows: list[Any]) -> None:
        self.land(rows)
        self.lake.table.append(host="local")

    @rule()
    def merge_without_publishing(self) -> None:
        if self.lake.entries():
            self.lake.table.dedupe()

    @precondition(lambda self: self.lake.table.snapshots())
    @rule(strike=strikes, data=st.data(), finish=st.booleans())
    def restore(self, strike: Any, data: Any, finish: bool) -> None:
        to = data.draw(st.sampled_from([link.number for link in self.lake.table.snapshots()]))
        self.struck(strike, lambda: self.lake.table.restore(to, dry=False))
        if finish:
            self.lake.table.run(host="local")

    @rule(strike=strikes)
    def append_what_was_withdrawn(self, strike: Any) -> None:
        self.struck(strike, lambda: self.lake.table.append(host="local", again=True))

    @invariant()
    def every_snapshot_is_right(self) -> None:
        """Snapshots are immutable, so each is compared once for each state of the chains below it."""
        snapshots = self.lake.table.snapshots()
        state = (len(snapshots), len(self.lake.entries()))
        if state != self.checked:
            self.checked = state
            self.lake.check()


def test_lake_under_upkeep_equals_a_dict_after_every_step() -> None:
    run_state_machine_as_test(
        UpkeepMachine,
        settings=settings(
            max_examples=150, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
