"""Runs actors in threads of which only one moves at any moment, and chooses at each call of a store or a queue who goes on.

scheduler = Scheduler(choose)
scheduler.run({"append": lambda: table.append(), "worker": lambda: table.dedupe()})

A choice is the name of an actor and what happens to its next call. Time, ids and pauses are simulated, so equal choices give
equal runs. Only the threads of actors may call a store or a queue.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from lakeupsert import clock
from lakeupsert.storage import UnknownOutcomeError
from tests.harness.faults import Killed

MOST_STEPS = 5_000
"""A schedule of more calls than this never ends."""
NETWORK, TIME = "network", "time"
"""Names in schedules of what is no actor: a delayed create that arrives, and time that passes."""


class Act(StrEnum):
    """What happens to a call. A lost answer and a delay only befall creates; a jump of time befalls nobody's call."""

    GO = ""
    KILL = "!"
    LOSE = "?"
    DELAY = "~"


@dataclass(frozen=True)
class Call:
    """The next call of an actor: ``kind`` of the store's or the queue's, and the object, or the beginning of the names listed."""

    kind: str
    name: str = ""

    @property
    def writes(self) -> bool:
        return self.kind in ("create", "put", "delete", "queue")

    def conflicts(self, other: "Call") -> bool:
        """Whether the order of the two may matter: they have an object in common, and one of them writes it."""
        if not (self.writes or other.writes) or self.kind == "pause" or other.kind == "pause":
            return False
        if self.kind == "list":
            return other.name.startswith(self.name) and other.kind != "queue"
        if other.kind == "list":
            return other.conflicts(self)
        return self.name == other.name


@dataclass(frozen=True)
class Choice:
    """Who goes on, and what happens to that call. Of `TIME`, ``seconds`` pass."""

    actor: str
    act: Act = Act.GO
    seconds: float = 0.0


@dataclass(frozen=True)
class Step:
    """A choice, with the next calls of all actors at that moment."""

    choice: Choice
    pending: Mapping[str, Call]

    @property
    def call(self) -> Call:
        return self.pending.get(self.choice.actor, Call("pause"))


@dataclass(eq=False)
class _Actor:
    name: str
    body: Callable[[], object]
    call: Call = field(default_factory=lambda: Call("pause", "begins"))
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    act: Act = Act.GO
    wakes_at: float = 0.0
    is_dead: bool = False
    thread: threading.Thread = field(default_factory=threading.current_thread)
    error: Exception | None = None


class SimulatedTime(clock.Source):
    """Time that passes while actors pause. Ids count for each actor.

    `elapsed` also gets a millisecond a call, so that no two calls are at the same moment. `now` does not: it is written into
    objects, and equal states of two schedules should have equal bytes.
    """

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self.seconds = 0.0
        self.calls = 0
        self.ids: Counter[str] = Counter()

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)

    def elapsed(self) -> float:
        return self.seconds + self.calls / 1000

    def new_id(self) -> str:
        actor = self._scheduler.actor
        self.ids[actor] += 1
        return hashlib.md5(f"{actor} {self.ids[actor]}".encode(), usedforsecurity=False).hexdigest()

    def sleep(self, seconds: float) -> None:
        self._scheduler.pause(seconds)

    def jitter(self, seconds: float) -> float:
        return seconds / 2


Choose = Callable[[int, str, Mapping[str, Call]], Choice]
"""Chooses a step by its number, the actor that has moved last, and the next calls of all actors that can move."""


class Scheduler:
    """Moves one actor at a time. Outside of `run`, every call just happens.

    Attributes:
        choose: who goes on.
        steps: all that was chosen.
        deliveries: delayed creates that have not arrived yet. Who chooses `NETWORK` lets the first one arrive.
        errors: the errors that ended actors.
        killed: actors that died.
    """

    def __init__(self) -> None:
        self.time = SimulatedTime(self)
        self.actor = "setup"
        self.choose: Choose = lambda number, actor, pending: Choice(actor if actor in pending else next(iter(pending)))
        self.steps: list[Step] = []
        self.deliveries: list[tuple[Call, Callable[[], object]]] = []
        self.errors: dict[str, Exception] = {}
        self.killed: set[str] = set()
        self.delays = False
        """The create that happens now is delayed: the store puts it into ``deliveries``."""
        self._actors: dict[str, _Actor] = {}
        self._end = threading.Semaphore(0)
        self._broken: BaseException | None = None

    def run(self, bodies: Mapping[str, Callable[[], object]]) -> None:
        """Run all actors to their ends, or deaths. Raises what `choose` raises, or RuntimeError if there is no end."""
        self._actors = {name: _Actor(name, body) for name, body in bodies.items()}
        actors = [*self._actors.values()]
        for actor in actors:
            actor.thread = threading.Thread(target=self._live, args=(actor,), daemon=True)
            actor.thread.start()
        self._hand_on(None)
        if not self._end.acquire(timeout=60):
            raise RuntimeError(f"{self.actor} waits for another actor outside of a store or a queue")
        for actor in actors:
            actor.thread.join()
        self._actors, self.actor = {}, "setup"
        while self.deliveries:
            self.deliveries.pop(0)[1]()
        if self._broken is not None:
            raise self._broken

    @contextmanager
    def at(self, name: str, commit: bool = False) -> Iterator[None]:
        """One call, as `tests.harness.faults.Points.at`."""
        if not self._actors:
            yield
            return
        kind, _, of = name.removeprefix("landing ").partition(" ")
        if kind == "queue":
            of = ""
        act = self._step(Call(kind, f"landing {of}" if name.startswith("landing ") else of))
        self.delays = act is Act.DELAY and commit
        yield
        if act is Act.LOSE and commit:
            raise UnknownOutcomeError(name)

    def pause(self, seconds: float) -> None:
        """Let an actor wait. Others go on meanwhile, or time passes."""
        if self._actors:
            actor = self._actors[self.actor]
            actor.wakes_at = self.time.seconds + seconds
            self._step(Call("pause", "waits"))
        else:
            self.time.seconds += seconds

    # -- how

    def _live(self, actor: _Actor) -> None:
        actor.turn.acquire()
        try:
            if actor.act is Act.KILL:
                raise Killed(actor.name)
            actor.body()
        except Killed:
            self.killed.add(actor.name)
        except Exception as e:
            self.errors[actor.name] = e
        del self._actors[actor.name]
        self._hand_on(None)

    def _step(self, call: Call) -> Act:
        actor = self._actors[self.actor]
        if actor.thread is not threading.current_thread():
            self._broken = self._broken or RuntimeError(f"a thread that is not {actor.name}'s calls {call}")
            raise self._broken
        if actor.is_dead:
            raise Killed(actor.name)  # a dead process does not run its `finally` blocks either
        actor.call = call
        self._hand_on(actor)
        if actor.act is Act.KILL:
            actor.is_dead = True
            raise Killed(actor.name)
        return actor.act

    def _hand_on(self, mover: _Actor | None) -> None:
        """Let the chosen actor move; returns when ``mover`` is chosen, or at once if it has ended (None)."""
        chosen = self._next()
        if chosen is None:
            self._end.release()
        elif chosen is not mover:
            chosen.turn.release()
        if mover is not None and chosen is not mover:
            mover.turn.acquire()

    def _next(self) -> _Actor | None:
        while self._actors:
            pending = {name: one.call for name, one in self._actors.items()}
            if self.deliveries:
                pending[NETWORK] = self.deliveries[0][0]
            try:
                if len(self.steps) == MOST_STEPS:
                    raise RuntimeError(
                        f"no end after {MOST_STEPS} calls; the last: {[s.choice for s in self.steps[-5:]]}"
                    )
                choice = self.choose(len(self.steps), self.actor, pending) if not self._broken else None
            except BaseException as e:
                self._broken, choice = e, None
            choice = choice or Choice(next(iter(self._actors)), Act.KILL)
            self.steps.append(Step(choice, pending))
            self.time.calls += 1
            self.time.seconds += choice.seconds
            if choice.actor == NETWORK:
                self.deliveries.pop(0)[1]()
            elif choice.actor != TIME:
                actor = self._actors[choice.actor]
                self.time.seconds = max(self.time.seconds, actor.wakes_at)
                self.actor, actor.act, actor.wakes_at = actor.name, choice.act, 0.0
                return actor
        return None
