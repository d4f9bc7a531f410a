"""The simulation itself: some of its schedules, and that it finds, shrinks and shows again what is wrong."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lakeupsert.engine.batch import AppendJob
from lakeupsert.pipeline.append import commit
from lakeupsert.pipeline.history import History
from lakeupsert.queue import WorkQueue
from lakeupsert.storage import ObjectStore
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.testing.contracts import ObjectStoreContract
from lakeupsert.testing.queue_contract import WorkQueueContract
from tests.simulate.exhaust import Exhaust
from tests.simulate.explore import Chance, Runner, follow, read, shrink, written
from tests.simulate.memory import MemoryQueue, MemoryStore
from tests.simulate.scenarios import SCENARIOS, constants
from tests.simulate.scheduler import Call

SCHEDULES = 300
"""As many as a core runs in less than a minute."""


@pytest.fixture(autouse=True)
def _constants() -> Iterator[None]:
    with constants():
        yield


class TestMemoryStore(ObjectStoreContract):
    # It is the memory of one process.
    test_race_of_processes_for_a_name_has_one_winner = None  # type: ignore[assignment]
    test_pickled_store_is_the_same_store = None  # type: ignore[assignment]

    def new_store(self, tmp_path: Path) -> ObjectStore:
        return MemoryStore()


class TestMemoryQueue(WorkQueueContract):
    # Only one actor moves at a time.
    test_concurrent_consumers_never_hold_one_message_at_once = None  # type: ignore[assignment]
    test_concurrent_redrives_bring_each_dead_letter_back_once = None  # type: ignore[assignment]

    def new_queue(self) -> WorkQueue:
        return MemoryQueue(max_receives=3)


def test_random_schedules_of_every_scenario_hold(tmp_path: Path) -> None:
    """The same ones each time; `make simulate` draws others."""
    command = ["-m", "tests.simulate", "--schedules", str(SCHEDULES), "--progress", str(tmp_path / "progress.json")]
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_all_schedules_of_two_appends_with_one_preemption_hold() -> None:
    search = Exhaust(Runner(), "two appends", preemptions=1, faults=0)
    assert search.run(100) is None
    assert search.is_done
    assert len(search.runner.checked) > 3  # either may win, before or after it has read, or not be needed


def test_a_search_that_stopped_goes_on_where_it_was() -> None:
    whole, stopped = Exhaust(Runner(), "append, vacuum", 1, 1), Exhaust(Runner(), "append, vacuum", 1, 1)
    assert whole.run(60) is None
    assert stopped.run(30) is None
    again = Exhaust(Runner(), "append, vacuum", 1, 1)
    again.go_on_from(stopped.to_text())
    assert again.run(30) is None
    assert again.to_text() == whole.to_text()


def test_a_schedule_that_is_written_down_makes_the_same_calls_again() -> None:
    for name in ("leader, night", "night, vacuum"):
        drawn = Runner().run(name, Chance(name, 100))
        again = Runner().run(name, follow(read(drawn.schedule)))
        assert [*again.steps] == [*drawn.steps]
        assert written(read(drawn.schedule)) == drawn.schedule


def test_a_fault_is_found_and_shown_by_few_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two appends take the same file twice if the one that lost does not look at what won."""

    def rebase(
        history: History, job: AppendJob, entry: LedgerEntry, head: object, newer: Link[LedgerEntry]
    ) -> LedgerEntry:
        return msgspec.structs.replace(entry, received_at=newer.body.received_at + 1)

    monkeypatch.setattr(commit, "_rebase", rebase)
    runner = Runner()
    drawn = (runner.run("two appends", Chance(str(seed), 45)) for seed in range(200))
    found = next(one for one in drawn if one.problem)
    small = shrink(runner, found, most=60)
    assert "counts twice" in small.problem
    assert small.switches <= min(2, found.switches)
    assert Runner().run("two appends", follow(read(small.schedule))).problem == small.problem
    exhausted = Exhaust(Runner(), "two appends", preemptions=1, faults=0).run(100)
    assert exhausted is not None
    assert "counts twice" in exhausted.problem


def test_calls_conflict_that_meet_at_an_object_of_which_one_is_written() -> None:
    head, create, other = Call("list", "c/v"), Call("create", "c/v1"), Call("create", "d/v1")
    assert head.conflicts(create)
    assert create.conflicts(head)
    assert create.conflicts(create)
    assert not head.conflicts(other)
    assert not create.conflicts(other)
    assert not head.conflicts(Call("get", "c/v1"))
    assert Call("queue").conflicts(Call("queue"))


def test_each_actor_has_a_name_that_a_schedule_can_have() -> None:
    for scenario in SCENARIOS.values():
        assert all(name.isalnum() for name in scenario.actors)
    assert os.sep not in "".join(SCENARIOS)
