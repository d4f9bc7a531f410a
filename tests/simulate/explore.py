"""Schedules: run one, write one down and read it again, draw one at random, and shrink one that fails.

A schedule is text, for example `one:12 two:3 one! network two`: twelve calls of one, three of two, one dies at its next call, a
delayed create arrives, a call of two. `?` is a create whose answer is lost, `~` one that is delayed, `time:130` 130 seconds that
pass. After its end, each actor goes on until it ends.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from tests.simulate import invariants
from tests.simulate.scenarios import SCENARIOS, prepared
from tests.simulate.scheduler import NETWORK, TIME, Act, Call, Choice, Choose, Step
from tests.simulate.world import World

JUMPS = (130.0, 4_000.0, 90_000.0, 8 * 86_400.0)
"""Seconds that may pass at a time: a lease, a head that counts as new, an orphan, a trimmed version."""


@dataclass(frozen=True)
class Outcome:
    """``problem`` is empty if all invariants hold."""

    scenario: str
    steps: Sequence[Step]
    problem: str

    @property
    def schedule(self) -> str:
        return written(step.choice for step in self.steps)

    @property
    def switches(self) -> int:
        return len([*groupby(step.choice.actor for step in self.steps)]) - 1


class Runner:
    """Runs schedules, and checks each state once that schedules lead to."""

    def __init__(self) -> None:
        self.checked: set[tuple[str, bytes]] = set()
        self.schedules = 0

    def run(self, scenario: str, choose: Choose) -> Outcome:
        world = prepared(scenario).fork()
        world.scheduler.choose = choose
        self.schedules += 1
        with world.time():
            problem = self._run(world, scenario)
        return Outcome(scenario, world.scheduler.steps, problem)

    def _run(self, world: World, scenario: str) -> str:
        try:
            world.scheduler.run({name: _bind(world, body) for name, body in SCENARIOS[scenario].actors.items()})
            state = scenario, invariants.state(world)
            if state not in self.checked:
                invariants.check(world)
                self.checked.add(state)
        except Exception as e:
            return " ".join((f"{type(e).__name__}: {e}", *getattr(e, "__notes__", ())))
        return ""


def _bind(world: World, body: Callable[..., object]) -> Callable[[], object]:
    return lambda: body(world, world.open())


def written(choices: Iterable[Choice]) -> str:
    """The schedule as text."""
    parts = []
    for choice, several in groupby(choices):
        count = len([*several])
        if choice.act is not Act.GO:
            parts += [f"{choice.actor}{choice.act}"] * count
        else:
            parts.append(
                choice.actor + (f":{choice.seconds:g}" if choice.seconds else f":{count}" if count > 1 else "")
            )
    return " ".join(parts)


def read(schedule: str) -> Iterator[Choice]:
    """The choices of a schedule that is text."""
    for part in schedule.split():
        if part[-1] in "!?~":
            yield Choice(part[:-1], Act(part[-1]))
            continue
        actor, _, number = part.partition(":")
        if actor == TIME:
            yield Choice(TIME, seconds=float(number))
        else:
            yield from [Choice(actor)] * int(number or 1)


def follow(choices: Iterable[Choice]) -> Choose:
    """Make these choices, and leave out those of actors that have ended by then."""
    left = iter(choices)

    def choose(number: int, actor: str, pending: Mapping[str, Call]) -> Choice:
        for choice in left:
            if choice.actor in pending or choice.actor == TIME:
                return choice
        return Choice(go_on(actor, pending))

    return choose


def go_on(actor: str, pending: Mapping[str, Call]) -> str:
    """The actor that moves if nobody is preferred: the same one, unless it waits or has ended."""
    awake = [name for name in pending if pending[name].kind != "pause" or pending[name].name == "begins"]
    if actor in awake:
        return actor
    return (awake or [*pending])[0]


class Chance:
    """Draws a schedule from a seed: priorities with some changes (as PCT does), or a walk; and up to two faults."""

    def __init__(self, seed: str, length: int) -> None:
        """``length``: about how many calls there will be."""
        chance = self._chance = random.Random(seed)
        self._ranks: dict[str, float] = {}
        self._walk = 0.0 if chance.random() < 0.7 else 10 ** chance.uniform(-2, -0.3)
        self._changes = {chance.randrange(length) for _ in range(chance.randint(1, 6))}
        self._faults: dict[int, Act | float] = {}
        for _ in range(chance.choice([0, 1, 1, 2, 2])):
            faults: list[Act | float] = [Act.KILL, Act.LOSE, Act.DELAY, *chance.sample(JUMPS, 2)]
            self._faults[chance.randrange(length)] = chance.choice(faults)
        self._due: list[Act] = []

    def __call__(self, number: int, actor: str, pending: Mapping[str, Call]) -> Choice:
        chance, fault = self._chance, self._faults.pop(number, None)
        if isinstance(fault, float):
            return Choice(TIME, seconds=fault)
        if fault is not None:
            self._due.append(fault)
        for name in pending:
            self._ranks.setdefault(name, chance.random() + 1)
        if number in self._changes and actor in self._ranks:
            self._ranks[actor] = -number
        if NETWORK in pending and (len(pending) == 1 or chance.random() < 0.1):
            return Choice(NETWORK)
        alive = {name: call for name, call in pending.items() if name != NETWORK}
        awake = {name: call for name, call in alive.items() if (call.kind, call.name) != ("pause", "waits")} or alive
        if self._walk:
            chosen = actor if actor in awake and chance.random() > self._walk else chance.choice(sorted(awake))
        else:
            chosen = max(awake, key=lambda name: self._ranks[name])
        for act in self._due:
            if act is Act.KILL or pending[chosen].kind == "create":
                self._due.remove(act)
                return Choice(chosen, act)
        return Choice(chosen)


def shrink(runner: Runner, outcome: Outcome, most: int = 300) -> Outcome:
    """A schedule with fewer switches and faults that fails, too, after at most so many runs."""
    runner.checked.clear()
    best, tries = outcome, 0
    progress = True
    while progress and tries < most:
        progress = False
        for candidate in _simpler([step.choice for step in best.steps]):
            tries += 1
            found = runner.run(outcome.scenario, follow(candidate))
            if found.problem and _size(found) < _size(best):
                best, progress = found, True
                break
            if tries >= most:
                break
    return best


def _size(outcome: Outcome) -> tuple[int, int, int]:
    odd = sum(step.choice.act is not Act.GO or step.choice.actor in (TIME, NETWORK) for step in outcome.steps)
    return odd, outcome.switches, len(outcome.steps)


def _simpler(choices: Sequence[Choice]) -> Iterator[list[Choice]]:
    """The schedule without one fault, without its end, and with two turns of an actor made one."""
    for place, choice in enumerate(choices):
        if choice.act is not Act.GO or choice.actor == TIME:
            instead = [] if choice.actor == TIME else [Choice(choice.actor)]
            yield [*choices[:place], *instead, *choices[place + 1 :]]
    turns = [[*turn] for _, turn in groupby(choices, key=lambda choice: choice.actor)]
    for size in _halves(len(turns)):
        yield [choice for turn in turns[:-size] for choice in turn]
    for place, turn in enumerate(turns):
        for later in range(place + 2, len(turns)):
            if turns[later][0].actor == turn[0].actor:
                joined = [*turns[: place + 1], turns[later], *turns[place + 1 : later], *turns[later + 1 :]]
                yield [choice for one in joined for choice in one]
                joined = [*turns[:place], *turns[place + 1 : later], turn, *turns[later:]]
                yield [choice for one in joined for choice in one]
                break


def _halves(number: int) -> Iterator[int]:
    for power in range(int(math.log2(max(number, 1))), -1, -1):
        yield 2**power
