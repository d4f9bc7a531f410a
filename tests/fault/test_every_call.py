"""Every call of append, dedupe and publish fails before its effect, after it, and kills the step: nothing is lost or wrong."""

import shutil
from collections import Counter
from collections.abc import Callable

import pytest

from lakeupsert.testing.faults import Fault
from lakeupsert.testing.lake import Lake

STEPS: dict[str, Callable[[Lake], object]] = {
    "append": lambda lake: lake.table.append(host="local"),
    "dedupe": lambda lake: lake.table.dedupe(),
    "publish": lambda lake: lake.table.publish(),
}
NEVER = -1


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("step", ["first append", "append", "dedupe", "publish"])
def test_struck_step_loses_nothing_and_shows_nothing_wrong(lakes: dict[str, Lake], step: str, fault: Fault) -> None:
    def check(lake: Lake) -> None:
        lake.check()
        lake.finish_and_check()

    lakes[step].strike_every_call(fault, STEPS[step.split()[-1]], check)


@pytest.mark.parametrize("step", ["first append", "append", "dedupe", "publish"])
def test_no_call_of_a_step_is_without_its_point(lakes: dict[str, Lake], step: str) -> None:
    """The stores' own counters and the queue's calls are all there in what the faults can strike."""
    folder = lakes[step].root.with_name(f"counted {step}")
    lake = lakes[step].copy(folder)
    inner = lake.table._table
    before = Counter(inner.store.requests.as_dict()) + Counter(inner.landing.requests.as_dict())
    lake.points.arm(NEVER, Fault.BEFORE)
    STEPS[step.split()[-1]](lake)
    seen = Counter(name.removeprefix("landing ").split()[0] for name in lake.points.seen)
    after = Counter(inner.store.requests.as_dict()) + Counter(inner.landing.requests.as_dict())
    counted = after - before
    del seen["queue"]
    seen["get"] += seen.pop("open", 0)
    assert +seen == counted
    lake.table.close()
    shutil.rmtree(folder)
