"""The lake of a simulation: stores and a queue in memory, shared by actors who each open the table as a process would."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lakeupsert import clock
from lakeupsert.api import Table
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.resources import Resources
from lakeupsert.storage.base import Sink
from lakeupsert.table.ledger import LedgerEntry
from tests.harness.faults import FaultyQueue, FaultyStore
from tests.harness.lake import Lake, json_lines
from tests.harness.model import Row
from tests.simulate.memory import MemoryQueue, MemoryStore
from tests.simulate.scheduler import Call, Scheduler


@dataclass(frozen=True)
class Read:
    """The rows that a reader got for ``batch``, and from which snapshot (None: `latest`)."""

    reader: str
    batch: int
    snapshot: int | None
    rows: list[dict[str, Any]]


class ScheduledStore(FaultyStore):
    """An object that is written appears at its actor's call, when all of it is written."""

    @contextmanager
    def write(self, name: str) -> Iterator[Sink]:
        with self._store.write(name) as sink:
            yield sink
            with self._at("put", name):
                pass


class ScheduledResources(Resources):
    def __init__(self, world: "World") -> None:
        super().__init__("t", world.settings)
        self.store = ScheduledStore(world.processed, world.scheduler)
        self.landing = ScheduledStore(world.landing, world.scheduler, "landing ")
        self.queue = FaultyQueue(world.messages, world.scheduler)
        self.landing_log = None


class World(Lake):
    """A `Lake` in memory.

    Attributes:
        acknowledged: what actors were told is committed: the folder of a chain, the number, and a part of that version.
        reads: what readers were shown.
    """

    def __init__(self, **settings: Any) -> None:
        self.scheduler = Scheduler()
        self.processed, self.landing, self.messages = MemoryStore(), MemoryStore("landing"), MemoryQueue()
        self.acknowledged: list[tuple[str, int, str]] = []
        self.reads: list[Read] = []
        self._entries: tuple[int, list[tuple[int, LedgerEntry]]] | None = None
        with self.time():
            super().__init__(_folder(), **settings)

    def time(self) -> AbstractContextManager[None]:
        """Simulated time, for all that is done with this world."""
        return clock.use(self.scheduler.time)

    def fork(self) -> "World":
        """The same world once more, in which nothing of the other one's future happens."""
        other = World(**self.given)
        other.processed, other.landing = self.processed.copy(), self.landing.copy()
        other.messages = self.messages.copy()
        other.processed.delay = other._delay
        other.landed, other.refused, other.statements = dict(self.landed), dict(self.refused), dict(self.statements)
        other.scheduler.time.seconds = self.scheduler.time.seconds
        other.scheduler.time.ids.update(self.scheduler.time.ids)
        with other.time():
            other.reopen()
        return other

    def open(self) -> Table:
        """The table, as a new process opens it."""
        return Table.of(OpenTable("t", self.settings, resources=ScheduledResources(self)))

    def reopen(self) -> None:
        self.table = self.open()
        self.opened = self.table._table

    def entries(self) -> list[tuple[int, LedgerEntry]]:
        """As they were at the last create. Nothing else changes them."""
        if self._entries is None or self._entries[0] != len(self.processed.created):
            self._entries = len(self.processed.created), super().entries()
        return self._entries[1]

    def land(self, path: str, rows: Sequence[Row], refused: Sequence[Row] = ()) -> None:
        store = ScheduledStore(self.landing, self.scheduler, "landing ")
        self.landed[path], self.refused[path] = list(rows), list(refused)
        with store.write(path) as sink:
            sink.write(json_lines([*rows, *refused]))

    def _delay(self, name: str, rest: Callable[[], object]) -> bool:
        delays, self.scheduler.delays = self.scheduler.delays, False
        if delays:
            self.scheduler.deliveries.append((Call("create", name), rest))
        return delays


@cache
def _folder() -> Path:
    """What `Lake` asks for; nothing is put there."""
    return Path(tempfile.mkdtemp())
