"""Faults at any call of a store or a queue: it fails before or after its effect, or the process dies there.

points = Points()
store = FaultyStore(LocalStore(root), points)
points.arm(7, Fault.AFTER)            # the eighth call has its effect, but its answer is lost
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, Protocol

import pyarrow as pa
import pytest

from lakeupsert.queue import DeadLetter, Lease, Message, QueueStats, WorkQueue
from lakeupsert.storage import ObjectInfo, ObjectStore, Requests, StoreUnavailableError, UnknownOutcomeError
from lakeupsert.storage.base import NOTHING


class Fault(Enum):
    """What happens at a point."""

    BEFORE = "fails before its effect"
    AFTER = "has its effect, and its answer is lost"
    KILL_BEFORE = "the process dies before its effect"
    KILL_AFTER = "the process dies after its effect"


FAULTS = [Fault.KILL_AFTER, *(pytest.param(f, marks=pytest.mark.crash) for f in Fault if f is not Fault.KILL_AFTER)]
"""For tests that strike every call. `make test` takes the one that leaves most behind: a death before a call leaves what a death
after the call before it left. `tests/fault/test_every_call.py` takes all of them, for the steps of a night."""


class Killed(BaseException):
    """Stands for the death of the process. No product code may catch it and continue."""


class Points:
    """Counts the calls of all threads and strikes one of them, once."""

    _counting = threading.Lock()  # of the class, because instances are sent to other processes

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.struck: str | None = None
        self._number: int | None = None
        self._fault = Fault.BEFORE
        self._kind: str | tuple[str, ...] = ""
        self._dead = False
        self._amid: Callable[[], object] | None = None

    def __getstate__(self) -> dict[str, object]:
        # Its function runs in this process only.
        return vars(self) if self._amid is None else {**vars(self), "_amid": None, "_number": None}

    def arm(self, number: int, fault: Fault, kind: str | tuple[str, ...] = "") -> None:
        """Strike call ``number`` (from 0, counted from now on) of those whose name begins with ``kind``."""
        self.seen, self.struck, self._dead = [], None, False
        self._number, self._fault, self._kind = number, fault, kind

    def amid(self, number: int, what: Callable[[], object], kind: str | tuple[str, ...] = "") -> None:
        """Run ``what`` once before that call (see `arm`), for example as another process would."""
        self.arm(number, Fault.BEFORE, kind)
        self._amid = what

    def disarm(self) -> None:
        self._number, self._dead, self._amid = None, False, None

    @contextmanager
    def at(self, name: str, commit: bool = False) -> Iterator[None]:
        """One call. ``commit`` marks a create: a lost answer is then an unknown outcome, not a failure."""
        if self._dead:
            raise Killed(name)  # a dead process does not run its `finally` blocks either
        strikes = False
        if name.startswith(self._kind):
            with self._counting:
                strikes = len(self.seen) == self._number
                self.seen.append(name)
        if strikes and self._amid is not None:
            self.struck = name
            what, self._amid, strikes = self._amid, None, False
            what()
        if strikes:
            self.struck = name
            self._strike_if(Fault.BEFORE, Fault.KILL_BEFORE, name, commit=commit)
        yield
        if strikes:
            self._strike_if(Fault.AFTER, Fault.KILL_AFTER, name, commit=commit)

    def _strike_if(self, fails: Fault, kills: Fault, name: str, *, commit: bool) -> None:
        if self._fault is kills:
            self._dead = True
            raise Killed(name)
        if self._fault is fails:
            if commit:
                raise UnknownOutcomeError(name)
            raise StoreUnavailableError("store-unreachable", f"injected at {name}", next="run it again")


class SeesCalls(Protocol):
    """`Points`, or another that is asked at each call."""

    def at(self, name: str, commit: bool = False) -> AbstractContextManager[None]: ...


class FaultyStore:
    """An object store with a point at each call."""

    def __init__(self, store: ObjectStore, points: SeesCalls, label: str = "") -> None:
        self._store = store
        self._points = points
        self._label = label

    @property
    def requests(self) -> Requests:
        return self._store.requests

    def _at(self, call: str, name: str, *, commit: bool = False) -> AbstractContextManager[None]:
        return self._points.at(f"{self._label}{call} {name}", commit=commit)

    def uri(self, name: str = "") -> str:
        return self._store.uri(name)

    @property
    def pinned(self) -> bool:
        return self._store.pinned

    def clock_ahead(self) -> float | None:
        return self._store.clock_ahead()

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        with self._at("get", name):
            return self._store.get(name, part)

    def head(self, name: str) -> ObjectInfo | None:
        with self._at("head", name):
            return self._store.head(name)

    def create(self, name: str, data: bytes) -> bool:
        with self._at("create", name, commit=True):
            return self._store.create(name, data)

    @contextmanager
    def write(self, name: str) -> Iterator[Any]:
        with self._at("put", name), self._store.write(name) as sink:
            yield sink

    def list(
        self, prefix: str, *, limit: int | None = None, above: Mapping[str, str] = NOTHING
    ) -> Iterator[ObjectInfo]:
        with self._at("list", prefix):
            found = list(self._store.list(prefix, limit=limit, above=above))
        yield from found

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with self._at("delete", name):
                self._store.delete([name])

    def open(self, name: str, etag: str | None = None) -> pa.NativeFile:
        with self._at("open", name):
            return self._store.open(name, etag)


class FaultyQueue:
    """A work queue with a point at each call."""

    def __init__(self, queue: WorkQueue, points: SeesCalls) -> None:
        self._queue = queue
        self._points = points

    @property
    def max_receives(self) -> int:
        return self._queue.max_receives

    def _at(self, call: str) -> AbstractContextManager[None]:
        return self._points.at(f"queue {call}")

    def send(self, messages: Iterable[Message]) -> None:
        with self._at("send"):
            self._queue.send(messages)

    def receive(self, limit: int, lease_seconds: float, wait_seconds: float = 0.0) -> list[Lease]:
        with self._at("receive"):
            return self._queue.receive(limit, lease_seconds, wait_seconds)

    def extend(self, lease: Lease, lease_seconds: float) -> bool:
        with self._at("extend"):
            return self._queue.extend(lease, lease_seconds)

    def ack(self, lease: Lease) -> bool:
        with self._at("ack"):
            return self._queue.ack(lease)

    def release(self, lease: Lease, delay_seconds: float = 0.0) -> bool:
        with self._at("release"):
            return self._queue.release(lease, delay_seconds)

    def bury(self, lease: Lease, reason: str) -> bool:
        with self._at("bury"):
            return self._queue.bury(lease, reason)

    def stats(self) -> QueueStats:
        with self._at("stats"):
            return self._queue.stats()

    def dead_letters(self, limit: int | None = None) -> list[DeadLetter]:
        with self._at("dead_letters"):
            return self._queue.dead_letters(limit)

    def redrive(self, again: Collection[Message], drop: Collection[Message] = ()) -> tuple[int, int]:
        with self._at("redrive"):
            return self._queue.redrive(again, drop)

    def close(self) -> None:
        self._queue.close()
