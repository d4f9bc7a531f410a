"""All schedules of a scenario with a bounded number of preemptions, less those that only swap independent calls.

Depth first: each run follows a prefix, then lets each actor go on as long as it can. Two calls of its trace that conflict, of two
actors, are a race: whoever came second gets a turn before the first, and at the beginning of that turn, too, since fewer
preemptions may be left in between (dynamic partial-order reduction with a bound; Coons, Musuvathi, McKinley 2013).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.simulate.explore import JUMPS, Outcome, Runner, go_on, read, written
from tests.simulate.scheduler import NETWORK, TIME, Act, Call, Choice, Step


@dataclass
class _Frame:
    """A step of the present schedule: what was tried there, and what is still to be tried."""

    choice: Choice
    tried: set[Choice] = field(default_factory=set)
    to_try: list[Choice] = field(default_factory=list)

    def add(self, choice: Choice) -> None:
        if choice != self.choice and choice not in self.tried and choice not in self.to_try:
            self.to_try.append(choice)


class Exhaust:
    """Runs schedule after schedule; ``is_done`` once there is no other.

    A fault is a death before a call that writes, a create whose answer is lost, or time that passes between two turns. A death
    before a read leaves as much as one before the next write, and an actor that stalls is one that another preempts.
    """

    def __init__(self, runner: Runner, scenario: str, preemptions: int, faults: int) -> None:
        self.runner, self._scenario, self._preemptions, self._faults = runner, scenario, preemptions, faults
        self._frames: list[_Frame] = []
        self.is_done = False

    def to_text(self) -> list[list[str]]:
        """Where the search is, for `go_on_from`."""
        return [[written(choices) for choices in ([f.choice], f.tried, f.to_try)] for f in self._frames]

    def go_on_from(self, text: Sequence[Sequence[str]]) -> None:
        for choice, tried, to_try in text:
            self._frames.append(_Frame(next(read(choice)), set(read(tried)), [*read(to_try)]))

    def run(self, most: int) -> Outcome | None:
        """The first schedule that fails, or None if none does after at most so many runs."""
        while not self.is_done and self.runner.schedules < most:
            outcome = self.runner.run(self._scenario, self._choose)
            if outcome.problem:
                return outcome
            steps = outcome.steps
            self._frames += [_Frame(step.choice) for step in steps[len(self._frames) :]]
            self._find_races(steps)
            self._go_back()
        return None

    def _choose(self, number: int, actor: str, pending: Mapping[str, Call]) -> Choice:
        return self._frames[number].choice if number < len(self._frames) else Choice(go_on(actor, pending))

    def _find_races(self, steps: Sequence[Step]) -> None:
        preempted = _preemptions(steps)
        begins = _turns(steps)
        faults = [0]
        for step in steps:
            faults.append(faults[-1] + (step.choice.act is not Act.GO or step.choice.actor == TIME))
        for later, second in enumerate(steps):
            for earlier in range(later):
                first = steps[earlier]
                if first.choice.actor == second.choice.actor or not first.call.conflicts(second.call):
                    continue
                for place in {earlier, begins[earlier]}:
                    if self._try(steps, place, Choice(second.choice.actor), preempted):
                        self._pass_time(place, faults)
            if faults[later] < self._faults and second.call.writes and second.choice.actor not in (NETWORK, TIME):
                self._frames[later].add(Choice(second.choice.actor, Act.KILL))
                if second.call.kind == "create":
                    self._frames[later].add(Choice(second.choice.actor, Act.LOSE))
            if begins[later] == later:
                self._pass_time(later, faults)

    def _try(self, steps: Sequence[Step], place: int, choice: Choice, preempted: Sequence[int]) -> bool:
        costs = preempted[place] + _preempts(steps, place, choice)
        if choice.actor not in steps[place].pending or costs > self._preemptions:
            return False
        self._frames[place].add(choice)
        return True

    def _pass_time(self, place: int, faults: Sequence[int]) -> None:
        if faults[place] < self._faults and self._frames[place].choice.actor != TIME:
            for seconds in JUMPS:
                self._frames[place].add(Choice(TIME, seconds=seconds))

    def _go_back(self) -> None:
        while self._frames and not self._frames[-1].to_try:
            self._frames.pop()
        if not self._frames:
            self.is_done = True
            return
        frame = self._frames[-1]
        frame.tried.add(frame.choice)
        frame.choice = frame.to_try.pop()


def _preempts(steps: Sequence[Step], place: int, choice: Choice) -> bool:
    """Whether it takes the turn of an actor that could go on."""
    before = steps[place - 1].choice.actor if place else choice.actor
    return choice.actor != before and steps[place].pending.get(before, Call("pause")).kind != "pause"


def _preemptions(steps: Sequence[Step]) -> list[int]:
    """How many there are before each step."""
    counts = [0]
    for place, step in enumerate(steps):
        counts.append(counts[-1] + _preempts(steps, place, step.choice))
    return counts


def _turns(steps: Sequence[Step]) -> list[int]:
    """For each step, the first one of its actor's turn."""
    begins: list[int] = []
    for place, step in enumerate(steps):
        begins.append(begins[-1] if place and steps[place - 1].choice.actor == step.choice.actor else place)
    return begins
