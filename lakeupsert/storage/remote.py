"""Shared by the stores behind a network: files read by ranges, uploads in parts, a check that creates are exclusive, the rate of
requests, an error.

A server or proxy that ignores the condition of a create would silently let one commit replace another. So before its first
create, a store tries to create the existing object `PROBE` (one request), and refuses the server if that succeeds. A server that
is not the vendor's own may also let two creates win that come at the same time. Before a table's first write through such a
server, `RACES` races try that; an object named after `PROBE`, the endpoint and the server remembers that it was right.
"""

import hashlib
import io
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Protocol

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.retries import LONGEST_PAUSE_SECONDS, PAUSE_SECONDS
from lakeupsert.storage.base import (
    ObjectInfo,
    ObjectReader,
    ObjectStore,
    Requests,
    StoreUnavailableError,
    UnknownOutcomeError,
    not_as_listed,
    parts_of,
)
from lakeupsert.storage.races import Create, race

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PROBE = "_lakeupsert/conditions"
"""An empty object that shows whether the server honours conditions. What begins with its name is hidden from listings, and but
for the objects of races never deleted by us."""
RACES = 40
"""A server on which a third of the races have several winners (see `races`) passes so many once in 6 million times."""
PART_BYTES = 16 << 20
MULTIPART_BYTES = 64 << 20
"""Objects up to this size are one put from memory. Larger ones are sent in parts, `PARTS_AT_ONCE` at the same time."""
PARTS_AT_ONCE = 4

START_RATE = 300.0
"""Requests a second at which a process begins. A new prefix of S3 takes the reads of 18 such processes (5,500). Higher: a first
night with many workers begins with more refusals. Lower: each new process is slower for some seconds."""
LEAST_RATE = 1.0
GROWTH = 1.2
GROWTH_AFTER_REFUSAL = 1.1
SHRINKAGE = 0.7
STEP_SECONDS = 1.0
BURST_SECONDS = 0.2
"""Each second in which a process wants to send more and is refused nothing raises its rate by a fifth, and by a tenth after the
first refusal. A refusal lowers it to 30 % less than was really sent, once a second, since the requests on their way are refused
too. Faster: more is refused. Slower: a process stays below what it could send (tests/unit/test_pace.py plays both)."""

UNTOUCHED = "Earlier commits are untouched."
"""For errors of requests: no request undoes a commit."""

_probing = threading.Lock()


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of an object, with the object's size and etag."""

    data: bytes
    size: int
    etag: str


def unreachable(uri: str, what: str) -> StoreUnavailableError:
    """The error for a request without a reliable answer."""
    return StoreUnavailableError(
        "store-unreachable",
        f"{uri}: {what.rstrip('.')}. {UNTOUCHED}",
        next="check the network and the endpoint, then run the same command again",
    )


class ConditionError(Exception):
    """The object exists (create), or was replaced (read)."""


class RangeError(Exception):
    """The range is behind the end of the object."""


class TooManyRequestsError(StoreUnavailableError):
    """The store refused a request because it gets too many."""


def too_many_requests(uri: str, what: str) -> TooManyRequestsError:
    return TooManyRequestsError(
        "store-unreachable",
        f"{uri}: {what.rstrip('.')}. {UNTOUCHED}",
        next="run the same command again, with fewer workers at the same time",
    )


class Conditions:
    """Whether the server honours the condition of a create. Each store checks once per process.

    ``endpoint``: the address of a server that is not the vendor's own; None: the vendor's. ``server`` returns what the last
    answer says of the server behind it: another one, or another version, is raced again.
    """

    def __init__(self, server: Callable[[], str] = str) -> None:  # no lambda: it is pickled with its store
        self._hold = False
        self._server = server

    def prove(self, store: ObjectStore, create: Create, endpoint: str | None) -> None:
        """Raises ConfigurationError if an existing object can be created again, or if two can create one object."""
        with _probing:  # if several threads create at once, one of them checks
            if not self._hold:
                # The first create ever returns True. Then the object exists, and the second one must not.
                if create(PROBE, b"") and create(PROBE, b""):
                    raise _conditions_ignored(
                        store,
                        "an existing object could be created again, so the server or a proxy in front of it ignores "
                        "`If-None-Match`",
                    )
                if endpoint is not None:
                    self._prove_races(store, create, endpoint)
                self._hold = True

    def prove_before_write(self, store: ObjectStore, create: Create, endpoint: str | None) -> None:
        """`prove`, so that an unfit server gets no object at all. The vendor's own is believed until the first create."""
        if endpoint is None:
            return
        for is_last in (False, False, True):
            try:
                self.prove(store, create, endpoint)
                return
            except UnknownOutcomeError as e:  # whatever the lost request did, the whole check may be made again
                if is_last:
                    raise unreachable(store.uri(), str(e)) from e

    def _prove_races(self, store: ObjectStore, create: Create, endpoint: str) -> None:
        identity = f"{endpoint} {self._server()}".rstrip()
        raced = f"{PROBE}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        if store.head(raced) is not None:
            return
        stem = f"{PROBE}-race-{clock.new_id()}-"
        names = [f"{stem}{number:02}" for number in range(RACES)]
        try:
            wrong = race(store, create, names)
        finally:
            with suppress(LakeupsertError):  # without the right to delete, these few objects stay, unseen
                store.delete(names)
        if wrong is not None:
            raise _conditions_ignored(store, f"{wrong}. The server {endpoint} does not keep `If-None-Match` in a race")
        create(raced, b"")


def _conditions_ignored(store: ObjectStore, what: str) -> ConfigurationError:
    return ConfigurationError(
        "conditions-ignored",
        f"{store.uri()}: {what}. One writer's commit could replace another's. Nothing was committed.",
        next="use a server that honours this header, for example Amazon S3, Azure Storage, or one that docs/STORES.md names as "
        "safe, and no proxy that strips headers",
    )


class ServerClock:
    """By how much this machine's clock is ahead of a server's, by the `Date` of its answers; and its name, by their `Server`."""

    def __init__(self) -> None:
        self.ahead: float | None = None
        self.server = ""

    def note(self, headers: Mapping[str, str]) -> None:
        """An answer with these headers has just come."""
        self.server = headers.get("server", "")
        if date := headers.get("date"):
            with suppress(ValueError):
                self.ahead = clock.now().timestamp() - parsedate_to_datetime(date).timestamp()


class Pace:
    """The rate at which one process sends requests to one bucket. Thread-safe.

    The store's limit is shared with other processes and grows with the load, so it is found out by trying: the rate rises while
    it is used up and nothing is refused, and falls after a refusal.
    """

    def __init__(self) -> None:
        self.rate = START_RATE
        self._free = START_RATE * BURST_SECONDS
        """Requests that may be sent at once; below 0, so many wait already."""
        self._counted_at = self._grown_at = clock.elapsed()
        self._refused_at: float | None = None
        self._sent: deque[float] = deque()
        """When the requests of the last second were sent."""
        self._lock = threading.Lock()

    def reserve(self) -> float:
        """Reserve a request. Returns how many seconds it must wait."""
        with self._lock:
            now = clock.elapsed()
            self._free = min(self.rate * BURST_SECONDS, self._free + (now - self._counted_at) * self.rate) - 1
            self._counted_at = now
            wait = max(0.0, -self._free / self.rate)
            self._sent.append(now + wait)
            self._forget(now)
            if wait and now - self._grown_at >= STEP_SECONDS:
                self.rate *= GROWTH if self._refused_at is None else GROWTH_AFTER_REFUSAL
                self._grown_at = now
            return wait

    def wait(self) -> None:
        """Wait until a request may be sent."""
        if seconds := self.reserve():
            clock.sleep(seconds)

    def slow_down(self) -> None:
        """The store refused a request because there are too many."""
        with self._lock:
            now = clock.elapsed()
            if self._refused_at is None or now - self._refused_at >= STEP_SECONDS:
                self._forget(now)
                sent = sum(at <= now for at in self._sent)
                self.rate = max(LEAST_RATE, SHRINKAGE * min(self.rate, sent))
                self._refused_at = self._grown_at = now

    def _forget(self, now: float) -> None:
        while self._sent and self._sent[0] < now - 1:
            self._sent.popleft()


def pause(attempt: int) -> None:
    """Wait before the next attempt; ``attempt`` counts from 0. Twice as long each time, with jitter."""
    clock.sleep(clock.jitter(min(LONGEST_PAUSE_SECONDS, PAUSE_SECONDS * 2.0**attempt)))


class PlacedReader(io.RawIOBase):
    """The parts of a file besides its bytes that Arrow needs: the size, and the position of the next read."""

    def __init__(self, size: int) -> None:
        self._size, self._place = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence] + offset
        return self._place

    def _go_on(self, size: int) -> tuple[int, int]:
        """The range that a read of ``size`` bytes (-1: to the end) covers. Moves the position to its end."""
        start = self._place
        self._place = max(start, self._size if size < 0 else min(self._size, start + size))
        return start, self._place


class RangeReader(PlacedReader):
    """An object as it was when it was opened, read with as few requests as a columnar file allows.

    Opening already fetches some bytes. Every other read is one request: Arrow's Parquet reader reads all that it needs of a row
    group at once, and the text readers read a block. Arrow makes one call at a time.
    """

    def __init__(
        self,
        store: ObjectReader,
        opened: ObjectInfo,
        read: Callable[[int, int], bytes],
        held: bytes = b"",
        held_at: int = 0,
    ) -> None:
        """``read`` fetches the bytes from one position up to another. ``held``: bytes already fetched, from ``held_at`` on."""
        super().__init__(opened.size)
        self._store, self._opened, self._fetch = store, opened, read
        self._held, self._begin, self._end = memoryview(held), held_at, held_at + len(held)

    def read(self, size: int = -1) -> bytes | memoryview:
        start, end = self._go_on(size)
        held = self._held[max(start - self._begin, 0) : max(end - self._begin, 0)]
        before, after = min(end, self._begin), max(start, self._end)
        if start >= before and after >= end:
            return held
        # Every range is within the object, so another number of bytes is not its content.
        return b"".join(
            (self._read(start, before) if start < before else b"", held, self._read(after, end) if after < end else b"")
        )

    def _read(self, start: int, end: int) -> bytes:
        data = self._fetch(start, end)
        if len(data) != end - start:
            what = f"for the {end - start:,} bytes from byte {start:,} on it gave {len(data):,}"
            raise not_as_listed(self._store, self._opened, what)
        return data


class Parts(Protocol):
    """How to send one object to a server."""

    def put(self, data: bytes) -> None:
        """Send the whole object."""

    def begin(self) -> None:
        """Start an upload in parts, if the server must know."""
        return

    def send(self, number: int, data: bytes) -> str:
        """Send a part, numbered from 1. Returns the server's id for it."""

    def join(self, parts: list[str], size: int) -> None:
        """Make the object of ``size`` bytes appear from these parts."""

    def drop(self) -> None:
        """Discard the parts that were sent, unless the server does that by itself."""
        return


class Upload(io.RawIOBase):
    """A sink whose bytes go to the server in one put at the end, or in parts as they fill."""

    def __init__(self, parts: Parts) -> None:
        self._server = parts
        self._held = bytearray()
        self._size = 0
        self._pool = ThreadPoolExecutor(PARTS_AT_ONCE)  # starts no thread before it is used
        self._sent: list[Future[str]] = []  # one per part

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: "ReadableBuffer") -> int:
        view = memoryview(data)
        self._held += view
        self._size += view.nbytes
        while len(self._held) >= (PART_BYTES if self._sent else MULTIPART_BYTES):
            self._send_part()
        return view.nbytes

    def finish(self) -> None:
        """Make the object appear."""
        if not self._sent:
            self._server.put(bytes(self._held))
            return
        if self._held:
            self._send_part()
        self._server.join([part.result() for part in self._sent], self._size)

    def stop(self, *, abort: bool) -> None:
        """Stop the threads. With ``abort``, discard what was sent."""
        self._pool.shutdown(cancel_futures=True)  # a part that arrives after the discard would stay
        if abort and self._sent:
            self._server.drop()

    def _send_part(self) -> None:
        if not self._sent:
            self._server.begin()
        if len(self._sent) >= PARTS_AT_ONCE:
            self._sent[-PARTS_AT_ONCE].result()  # holds no more parts in memory than are being sent
        body = bytes(self._held[:PART_BYTES])
        del self._held[:PART_BYTES]
        self._sent.append(self._pool.submit(self._server.send, len(self._sent) + 1, body))


class ServerStore(ObjectStore):
    """A store whose server decides who creates an object. The server is checked before the first one."""

    pinned = True

    def __init__(self) -> None:
        self._requests = Requests()
        self._conditions = Conditions(self._server)

    @property
    def requests(self) -> Requests:
        return self._requests

    def create(self, name: str, data: bytes) -> bool:
        parts_of(name)
        self._conditions.prove(self, self._create, self._others_endpoint)
        return self._create(name, data)

    @contextmanager
    def write(self, name: str) -> Iterator[Upload]:
        parts_of(name)
        self._conditions.prove_before_write(self, self._create, self._others_endpoint)
        upload = Upload(self._parts(name))
        try:
            yield upload
            upload.finish()
        except BaseException:
            upload.stop(abort=True)
            raise
        upload.stop(abort=False)

    @abstractmethod
    def _create(self, name: str, data: bytes) -> bool:
        """`create` without the check of the server."""

    @abstractmethod
    def _parts(self, name: str) -> Parts: ...

    @abstractmethod
    def _server(self) -> str:
        """The server's name and version, by its last answer."""

    @property
    @abstractmethod
    def _others_endpoint(self) -> str | None:
        """The address of a server that is not the vendor's own; None: the vendor's."""
