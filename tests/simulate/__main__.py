"""Interleavings of the real code. `make simulate`

python -m tests.simulate                              the next 1,000 random schedules, from where the last call ended
python -m tests.simulate --schedules 1000000          so many; it may be stopped and goes on where it was
python -m tests.simulate --exhaust "two appends"      every schedule of that scenario, within --preemptions and --faults; the next
                                                      --schedules of them
python -m tests.simulate --replay "two appends" "one:12 two one!"       one schedule, call by call
python -m tests.simulate --list                       the scenarios
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import pyarrow as pa

from tests.simulate.exhaust import Exhaust
from tests.simulate.explore import Chance, Outcome, Runner, follow, read, shrink
from tests.simulate.scenarios import SCENARIOS, constants

PROGRESS = Path(__file__).resolve().parents[2] / "build" / "simulate.json"
"""What calls before this one did: by scenario, how many schedules were drawn, and how many calls one has."""


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    if options.list:
        print(*SCENARIOS, sep="\n")
        return 0
    with constants():
        if options.replay:
            return _replay(*options.replay)
        if options.exhaust:
            search = Exhaust(Runner(), options.exhaust, options.preemptions, options.faults)
            bounds = f"{options.preemptions} preemptions and {options.faults} faults"
            place = Path(options.progress).with_name(f"simulate {options.exhaust}, {bounds}.json")
            return _exhaust(search, f"{options.exhaust}, at most {bounds}", place, options.schedules, options.shrink)
        return _random(options.schedules, Path(options.progress), options.shrink)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.simulate")
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--progress", default=str(PROGRESS))
    parser.add_argument("--exhaust", metavar="SCENARIO", choices=SCENARIOS)
    parser.add_argument("--preemptions", type=int, default=1)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--replay", nargs=2, metavar=("SCENARIO", "SCHEDULE"))
    parser.add_argument("--shrink", type=int, default=200, help="schedules to run for a shorter one that fails, too")
    parser.add_argument("--list", action="store_true")
    return parser


def _random(schedules: int, progress: Path, shrinks: int) -> int:
    """Draw so many schedules, some of each scenario in turn. Stops at the first failure."""
    done: dict[str, list[int]] = json.loads(progress.read_text()) if progress.exists() else {}
    runner, begun = Runner(), time.monotonic()
    while runner.schedules < schedules:
        name = min(SCENARIOS, key=lambda name: done.get(name, [0])[0])
        drawn, length = done.get(name, [0, 100])
        outcome = runner.run(name, Chance(f"{name} {drawn}", length))
        if outcome.problem:
            return _report(runner, outcome, shrinks)
        done[name] = [drawn + 1, len(outcome.steps)]
        progress.parent.mkdir(exist_ok=True)
        progress.write_text(json.dumps(done))
    seconds = time.monotonic() - begun
    every = sum(drawn for drawn, _ in done.values())
    print(
        f"{runner.schedules:,} schedules of {len(SCENARIOS)} scenarios hold in {seconds:,.0f} s "
        f"({runner.schedules / seconds:.1f} a second), which end in {len(runner.checked):,} states; {every:,} so far"
    )
    return 0


def _exhaust(search: Exhaust, what: str, progress: Path, most: int, shrinks: int) -> int:
    """Run so many more schedules of a search, which the last call may have begun."""
    begun, before = time.monotonic(), 0
    if progress.exists():
        before, frames = json.loads(progress.read_text())
        search.go_on_from(frames)
    outcome, run = None, search.runner
    while outcome is None and not search.is_done and run.schedules < most:
        outcome = search.run(min(most, run.schedules + 50))
        progress.parent.mkdir(exist_ok=True)
        progress.write_text(json.dumps([before + run.schedules, search.to_text()]))
    if outcome is not None:
        return _report(run, outcome, shrinks)
    if search.is_done:
        progress.unlink()
    print(
        f"{what}: {'all' if search.is_done else 'the first'} {before + run.schedules:,} schedules hold; {run.schedules:,} "
        f"in {time.monotonic() - begun:,.0f} s, which end in {len(run.checked):,} states"
    )
    return 0


def _report(runner: Runner, outcome: Outcome, shrinks: int) -> int:
    print(f"after {runner.schedules:,} schedules: {outcome.scenario}: {outcome.problem}", flush=True)
    small = shrink(runner, outcome, shrinks)
    print(f"\n{small.problem}\n\nShow it again, call by call:")
    print(f'  python -m tests.simulate --replay "{small.scenario}" "{small.schedule}"')
    print(f"({small.switches} switches; as it was found, {outcome.switches}: {outcome.schedule})")
    return 1


def _replay(name: str, schedule: str) -> int:
    outcome = Runner().run(name, follow(read(schedule)))
    for number, step in enumerate(outcome.steps):
        print(f"{number:4} {step.choice.actor:10}{step.choice.act:1} {step.call.kind} {step.call.name}")
    print(outcome.problem or "all invariants hold")
    return bool(outcome.problem)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of a set may choose the next call
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulate", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    sys.exit(main(sys.argv[1:]))
