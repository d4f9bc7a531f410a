"""Every call of append, dedupe and publish fails before its effect, after it, and kills the step: nothing is lost or wrong.

On S3 and Azure Storage also every single request goes wrong on its way. `make test` has the local store; `make test-crash` has
these.
"""

import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from lakeupsert.errors import ConfigurationError
from tests.harness.faults import Fault
from tests.harness.lake import Lake
from tests.harness.proxy import Rule, fault_proxy, refuse
from tests.harness.servers import Server

STEPS: dict[str, Callable[[Lake], object]] = {
    "append": lambda lake: lake.table.append(host="local"),
    "dedupe": lambda lake: lake.table.dedupe(),
    "publish": lambda lake: lake.table.publish(),
}
NEVER = -1


@pytest.mark.few(2)
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("step", ["first append", "append", "dedupe", "publish"])
def test_struck_step_loses_nothing_and_shows_nothing_wrong(lakes: dict[str, Lake], step: str, fault: Fault) -> None:
    lakes[step].strike_every_call(fault, STEPS[step.split()[-1]], check)


@pytest.mark.crash
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("step", ["first append", "append", "dedupe", "publish"])
def test_struck_step_far_away_loses_nothing_and_shows_nothing_wrong(
    lakes_far_away: dict[str, Lake], step: str, fault: Fault
) -> None:
    assert lakes_far_away[step].strike_every_call(fault, STEPS[step.split()[-1]], check) > 5


@pytest.mark.crash
@pytest.mark.parametrize(
    ("rule", "passes"),
    [
        pytest.param(Rule("lose"), True, id="its answer is lost"),
        pytest.param(Rule("cut"), True, id="its answer breaks off"),
        pytest.param(refuse(503, "SlowDown"), True, id="503"),
        pytest.param(refuse(401, "ExpiredToken"), False, id="the token expired"),
    ],
)
@pytest.mark.parametrize("step", ["first append", "append", "dedupe", "publish"])
def test_request_that_goes_wrong_loses_nothing_and_shows_nothing_wrong(
    lakes_far_away: dict[str, Lake],
    server: Server,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    rule: Rule,
    passes: bool,
) -> None:
    with fault_proxy(server) as proxy:
        for name, value in proxy.server.env.items():
            monkeypatch.setenv(name, value)

        def struck(number: int) -> Lake:
            lake = lakes_far_away[step].copy(folder / str(number))
            proxy.log.clear()
            proxy.rules = (replace(rule, skip=number, times=1),) if number >= 0 else ()
            with nullcontext() if passes else suppress(ConfigurationError):
                STEPS[step.split()[-1]](lake)
            proxy.rules = ()
            return lake

        struck(NEVER)
        for number in range(len(proxy.log)):
            try:
                lake = struck(number)
                assert proxy.struck(rule.act) == 1
                lake.reopen()
                check(lake)
            except BaseException as e:
                e.add_note(f"struck at request {number} of {step}")
                raise
            lake.table.close()


def check(lake: Lake) -> None:
    lake.check()
    lake.finish_and_check()


@pytest.mark.parametrize("step", ["first append", "append", "dedupe", "publish"])
def test_no_call_of_a_step_is_without_its_point(lakes: dict[str, Lake], step: str) -> None:
    """The stores' own counters and the queue's calls are all there in what the faults can strike."""
    folder = lakes[step].root.with_name(f"counted {step}")
    lake = lakes[step].copy(folder)
    inner = lake.opened
    before = Counter(inner.resources.store.requests.as_dict()) + Counter(inner.resources.landing.requests.as_dict())
    lake.points.arm(NEVER, Fault.BEFORE)
    STEPS[step.split()[-1]](lake)
    seen = Counter(name.removeprefix("landing ").split()[0] for name in lake.points.seen)
    after = Counter(inner.resources.store.requests.as_dict()) + Counter(inner.resources.landing.requests.as_dict())
    counted = after - before
    del seen["queue"]
    seen["get"] += seen.pop("open", 0)
    assert +seen == counted
    lake.table.close()
    shutil.rmtree(folder)
