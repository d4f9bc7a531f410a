"""Every call of append, dedupe and publish fails before its effect, after it, and kills the step: nothing is lost or wrong."""

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lakeupsert.errors import TryAgainError
from lakeupsert.testing.faults import Fault, Killed
from lakeupsert.testing.lake import Lake, row

STEPS: dict[str, Callable[[Lake], object]] = {
    "append": lambda lake: lake.table.append(host="local"),
    "dedupe": lambda lake: lake.table.dedupe(),
    "publish": lambda lake: lake.table.publish(),
}
NEVER = -1


@pytest.fixture(scope="module")
def lakes() -> Iterator[dict[str, Lake]]:
    """A lake before each step: nothing at all, one night published, and a second one that has come as far as the step."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    new = Lake(folder / "new")
    new.land("1.jsonl", [row("a", 0, 1, 1), row("b", 0, 1, 1), row("a", 1, 1, 1), row("c", 1, 5, 1)])
    second = new.copy(folder / "append")
    second.run()
    second.land("2.jsonl", [row("a", 0, 2, 2), row("b", 0, 2, 2, op="D"), row("c", 1, 4, 2), row("d", 2, 1, 2)])
    second.land("3.jsonl", [row("a", 0, 2, 3), row("a", 1, 1, 3)], refused=[{**row("x", 1, 1, 3), "v": "no number"}])
    appended = second.copy(folder / "dedupe")
    appended.table.append(host="local")
    deduped = appended.copy(folder / "publish")
    deduped.table.dedupe()
    yield {"first append": new, "append": second, "dedupe": appended, "publish": deduped}
    shutil.rmtree(folder)


def calls_of(lake: Lake, step: str) -> list[str]:
    lake.points.arm(NEVER, Fault.BEFORE)
    STEPS[step.split()[-1]](lake)
    return lake.points.seen


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("step", ["first append", "append", "dedupe", "publish"])
def test_struck_step_loses_nothing_and_shows_nothing_wrong(lakes: dict[str, Lake], step: str, fault: Fault) -> None:
    begun = lakes[step]
    folder = begun.root.with_name(f"struck {step}")
    calls = calls_of(begun.copy(folder), step)
    shutil.rmtree(folder)
    for number, call in enumerate(calls):
        lake = begun.copy(folder)
        lake.points.arm(number, fault)
        with contextlib.suppress(Killed, TryAgainError):
            STEPS[step.split()[-1]](lake)
        assert lake.points.struck is not None, f"{call} was not struck"
        lake.points.disarm()
        lake.reopen()
        try:
            lake.check()
            lake.finish_and_check()
        except Exception as e:
            e.add_note(f"{step}, call {number} ({call}): {fault.value}")
            raise
        lake.table.close()
        shutil.rmtree(folder)


@pytest.mark.parametrize("step", ["first append", "append", "dedupe", "publish"])
def test_no_call_of_a_step_is_without_its_point(lakes: dict[str, Lake], step: str) -> None:
    """The stores' own counters and the queue's calls are all there in what the faults can strike."""
    folder = lakes[step].root.with_name(f"counted {step}")
    lake = lakes[step].copy(folder)
    inner = lake.table._table
    before = Counter(inner.store.requests.as_dict()) + Counter(inner.landing.requests.as_dict())
    seen = Counter(name.removeprefix("landing ").split()[0] for name in calls_of(lake, step))
    after = Counter(inner.store.requests.as_dict()) + Counter(inner.landing.requests.as_dict())
    counted = after - before
    del seen["queue"]
    seen["get"] += seen.pop("open", 0)
    assert +seen == counted
    lake.table.close()
    shutil.rmtree(folder)
