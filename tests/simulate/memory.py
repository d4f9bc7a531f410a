"""A store and a queue in memory: a schedule takes milliseconds, and a world is copied by copying a dict."""

import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice

import pyarrow as pa

from lakeupsert import clock
from lakeupsert.queue import DeadLetter, Lease, Message, QueueStats
from lakeupsert.storage import NotFoundError, ObjectInfo, Requests, UnknownOutcomeError
from lakeupsert.storage.base import NOTHING, last_left_out, parts_of


@dataclass(frozen=True)
class Stored:
    """An object, with its place among all that were ever stored."""

    data: bytes
    number: int
    modified: float

    def info(self, name: str) -> ObjectInfo:
        return ObjectInfo(name, len(self.data), str(self.number), self.modified)


class MemoryStore:
    """See `lakeupsert.storage.base.ObjectStore`.

    Attributes:
        objects: what is stored now.
        created: every object that `create` has ever stored, also those that were deleted since.
        delay: takes the rest of a create that is delayed, or returns False.
    """

    pinned = True

    def __init__(self, label: str = "processed") -> None:
        self.label = label
        self.requests = Requests()
        self.objects: dict[str, Stored] = {}
        self.created: list[tuple[str, bytes]] = []
        self.delay: Callable[[str, Callable[[], object]], bool] = _never
        self._number = 0

    def copy(self) -> "MemoryStore":
        other = MemoryStore(self.label)
        other.objects, other.created, other._number = dict(self.objects), list(self.created), self._number
        return other

    def uri(self, name: str = "") -> str:
        return f"file:///simulated/{self.label}/{name}".rstrip("/")

    def clock_ahead(self) -> float | None:
        return 0.0

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        self.requests.count("get")
        data = self._stored(name).data
        return data if part is None else data[part[0] : part[0] + part[1]]

    def head(self, name: str) -> ObjectInfo | None:
        self.requests.count("head")
        return self.objects[name].info(name) if name in self.objects else None

    def list(
        self, prefix: str, *, limit: int | None = None, above: Mapping[str, str] = NOTHING
    ) -> Iterator[ObjectInfo]:
        self.requests.count("list")
        names = sorted(n for n in self.objects if n.startswith(prefix) and not last_left_out(n, above))
        yield from [self.objects[name].info(name) for name in islice(names, limit)]

    def open(self, name: str, etag: str | None = None) -> pa.NativeFile:
        self.requests.count("get")
        stored = self._stored(name)
        if etag not in (None, str(stored.number)):
            raise NotFoundError(name)
        return pa.BufferReader(stored.data)

    def create(self, name: str, data: bytes) -> bool:
        self.requests.count("create")
        parts_of(name)
        if self.delay(name, lambda: self._create(name, data)):
            raise UnknownOutcomeError(name)
        return self._create(name, data)

    @contextmanager
    def write(self, name: str) -> Iterator[io.BytesIO]:
        self.requests.count("put")
        sink = _Sink()
        yield sink
        self._put(name, sink.whole())

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.requests.count("delete")
            self.objects.pop(name, None)

    def _stored(self, name: str) -> Stored:
        parts_of(name)
        if name not in self.objects:
            raise NotFoundError(name)
        return self.objects[name]

    def _create(self, name: str, data: bytes) -> bool:
        if name in self.objects:
            return False
        self._put(name, data)
        self.created.append((name, data))
        return True

    def _put(self, name: str, data: bytes) -> None:
        self._number += 1
        self.objects[name] = Stored(data, self._number, clock.now().timestamp())


def _never(name: str, rest: Callable[[], object]) -> bool:
    return False


class _Sink(io.BytesIO):
    """Keeps what Arrow has written when it closes the sink."""

    _data: bytes | None = None

    def close(self) -> None:
        self._data = self.whole()
        super().close()

    def whole(self) -> bytes:
        return self.getvalue() if self._data is None else self._data


@dataclass(frozen=True)
class _Waiting:
    message: Message
    visible_at: float
    receives: int = 0
    token: str = ""
    buried: str | None = None


@dataclass
class MemoryQueue:
    """See `lakeupsert.queue.base.WorkQueue`. A receive takes one message, so that workers share the messages of a batch."""

    max_receives: int = 5
    waiting: dict[int, _Waiting] = field(default_factory=dict)
    sent: int = 0

    def copy(self) -> "MemoryQueue":
        return replace(self, waiting=dict(self.waiting))

    def send(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.sent += 1
            self.waiting[self.sent] = _Waiting(Message.decode(message.encode()), self._now())

    def receive(self, limit: int, lease_seconds: float, wait_seconds: float = 0.0) -> list[Lease]:
        for number, one in sorted(self.waiting.items()):
            if one.buried is None and one.visible_at <= self._now():
                lease = Lease(one.message, one.receives + 1, clock.new_id())
                until = self._now() + lease_seconds
                self.waiting[number] = replace(one, receives=lease.receives, token=lease.token, visible_at=until)
                return [lease]
        return []

    def extend(self, lease: Lease, lease_seconds: float) -> bool:
        return self._change(lease, lambda one: replace(one, visible_at=self._now() + lease_seconds))

    def ack(self, lease: Lease) -> bool:
        return self._change(lease, lambda one: None)

    def release(self, lease: Lease, delay_seconds: float = 0.0) -> bool:
        return self._change(lease, lambda one: replace(one, visible_at=self._now() + delay_seconds, token=""))

    def bury(self, lease: Lease, reason: str) -> bool:
        return self._change(lease, lambda one: replace(one, buried=reason, token=""))

    def stats(self) -> QueueStats:
        alive = [one.visible_at <= self._now() for one in self.waiting.values() if one.buried is None]
        return QueueStats(sum(alive), len(alive) - sum(alive), len(self.waiting) - len(alive))

    def dead_letters(self, limit: int | None = None) -> list[DeadLetter]:
        found = (one for _, one in sorted(self.waiting.items()))
        dead = (DeadLetter(one.message, one.buried, one.receives) for one in found if one.buried is not None)
        return [*islice(dead, limit)]

    def redrive(self, again: Collection[Message], drop: Collection[Message] = ()) -> tuple[int, int]:
        dead = [(number, one) for number, one in self.waiting.items() if one.buried is not None]
        returned = [(number, one) for number, one in dead if one.message in again]
        dropped = [number for number, one in dead if one.message in drop]
        for number, one in returned:
            self.waiting[number] = _Waiting(one.message, self._now())
        for number in dropped:
            del self.waiting[number]
        return len(returned), len(dropped)

    def close(self) -> None:
        pass

    def _change(self, lease: Lease, change: Callable[[_Waiting], _Waiting | None]) -> bool:
        for number, one in self.waiting.items():
            if one.token == lease.token:
                changed = change(one)
                if changed is None:
                    del self.waiting[number]
                else:
                    self.waiting[number] = changed
                return True
        return False

    @staticmethod
    def _now() -> float:
        return clock.now().timestamp()
