"""What stores behind a network share: a file read by ranges, an upload in parts, the proof that creates exclude, an error.

A server or proxy that ignores the condition of a create would let one commit replace another, in silence. So before its
first create a store tries to create `PROBE` where it is already (one request), and refuses where that succeeds.
"""

import io
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from lakeupsert.errors import ConfigurationError
from lakeupsert.storage.base import StoreUnavailableError

PROBE = "_lakeupsert/conditions"
"""An empty object that tells whether conditions hold; hidden from listings, never deleted by us."""
PART_BYTES = 16 << 20
MULTIPART_BYTES = 64 << 20
"""Objects up to this size are one put from memory; greater ones go in parts, of which a few are on their way at once."""
PARTS_AT_ONCE = 4

UNTOUCHED = "What was committed before is untouched."
"""In errors of requests, none of which takes a commit back."""

_probing = threading.Lock()


def unreachable(uri: str, what: str) -> StoreUnavailableError:
    """The error of a request that got no answer to rely on."""
    return StoreUnavailableError(
        "store-unreachable",
        f"{uri}: {what.rstrip('.')}. {UNTOUCHED}",
        next="check the network and the endpoint, then run the same command again",
    )


class Conditions:
    """Whether the server keeps the condition of a create; asked once for each store in each process."""

    def __init__(self) -> None:
        self._hold = False

    def prove(self, create: Callable[[str, bytes], bool], uri: str) -> None:
        """Raises ConfigurationError where an object that exists can be created again."""
        with _probing:  # of threads that create at once, one asks
            if not self._hold:
                # True the first time ever, and then it is there.
                if create(PROBE, b"") and create(PROBE, b""):
                    raise ConfigurationError(
                        "conditions-ignored",
                        f"{uri}: an object that exists was created again, so the server, or a proxy before it, ignores "
                        "`If-None-Match`, and one writer's commit could replace another's. Nothing was committed.",
                        next="use a server that keeps conditions, such as Amazon S3 or Azure Storage, and no proxy that strips "
                        "headers",
                    )
                self._hold = True


class PlacedReader(io.RawIOBase):
    """What Arrow asks of a file besides its bytes: how large it is, and where the next read begins."""

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
        """From where to where a read of ``size`` bytes goes (-1: to the end); the next one begins there."""
        start = self._place
        self._place = max(start, self._size if size < 0 else min(self._size, start + size))
        return start, self._place


class RangeReader(PlacedReader):
    """One object as it was when it was opened, by as few requests as a columnar file allows.

    Some of its bytes come with the opening, and every other read is one request: Arrow's Parquet reader asks for all that it
    needs of a row group at once, the readers of text for a block. Arrow makes one call at a time.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, held: bytes, held_at: int) -> None:
        """``read`` gets the bytes from one place up to another; ``held`` are those from ``held_at`` on."""
        super().__init__(size)
        self._read = read
        self._held, self._begin, self._end = memoryview(held), held_at, held_at + len(held)

    def read(self, size: int = -1) -> Any:
        start, end = self._go_on(size)
        held = self._held[max(start - self._begin, 0) : max(end - self._begin, 0)]
        before, after = min(end, self._begin), max(start, self._end)
        if start >= before and after >= end:
            return held
        return b"".join(
            (
                self._read(start, before) if start < before else b"",
                held,
                self._read(after, end) if after < end else b"",
            )
        )


class Parts(Protocol):
    """How a server takes one object."""

    def put(self, data: bytes) -> None:
        """All of it."""

    def begin(self) -> None:
        """Before the first part."""

    def send(self, number: int, data: bytes) -> str:
        """A part, numbered from 1; what the server knows it by."""

    def join(self, parts: list[str], size: int) -> None:
        """Make the object of ``size`` bytes appear, of these parts."""

    def drop(self) -> None:
        """Forget the parts that were sent."""


class Upload(io.RawIOBase):
    """What is written goes to the server when it is complete: in one put, or in parts that are sent as they fill."""

    def __init__(self, parts: Parts) -> None:
        self._server = parts
        self._held = bytearray()
        self._size = 0
        self._pool = ThreadPoolExecutor(PARTS_AT_ONCE)  # starts no thread before it is used
        self._sent: list[Future[str]] = []  # of each part

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
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
        """End the threads; drop what was sent."""
        self._pool.shutdown(cancel_futures=True)  # a part that arrives after it was dropped would stay
        if abort and self._sent:
            self._server.drop()

    def _send_part(self) -> None:
        if not self._sent:
            self._server.begin()
        if len(self._sent) >= PARTS_AT_ONCE:
            self._sent[-PARTS_AT_ONCE].result()  # no more in memory than are on their way
        body = bytes(self._held[:PART_BYTES])
        del self._held[:PART_BYTES]
        self._sent.append(self._pool.submit(self._server.send, len(self._sent) + 1, body))
