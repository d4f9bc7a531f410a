"""The object store below a table: the few calls that everything else is built on.

Names are relative to the store's root, with `/` between parts, and mean the same on every backend. Only `create` commits. An
object from `write` has a unique name and does not count until a created object names it. Every backend must pass
`lakeupsert.testing.contracts.ObjectStoreContract`.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import pyarrow as pa

from lakeupsert.errors import ConfigurationError, TryAgainError

SIZE_ONLY = "size {}"
"""The etag of an object of which its store says nothing else."""
FOREIGN = "foreign"
"""The etag of a name in a landing zone that is not read: a link that leads out of it, a device, a pipe."""
Call = Literal["get", "head", "list", "put", "create", "delete"]
NOTHING: Mapping[str, str] = {}
CALLS: tuple[Call, ...] = ("get", "head", "list", "put", "create", "delete")


class NotFoundError(Exception):
    """No object has this name now. This is an answer, not a failure."""


class ForeignObjectError(Exception):
    """The object is not read, since those who land files may not be allowed to. Only from a landing zone."""


class DamagedObjectError(Exception):
    """The store has the object and can't give its bytes: it is a damaged member of an archive."""


class UnknownOutcomeError(Exception):
    """The answer to a create was lost, so the object may or may not exist. Read it back, never guess."""


class StoreUnavailableError(TryAgainError):
    """The store did not answer, or is full. Earlier commits are untouched."""


@dataclass(frozen=True)
class ObjectInfo:
    """One object in a listing. An equal ``etag`` means 'unchanged since listed'; it never says who wrote the object.

    ``modified`` is in seconds since 1970 UTC, by the store's clock, which may differ from this machine's.
    """

    name: str
    size: int
    etag: str
    modified: float = field(compare=False)  # S3's HEAD and LIST round it differently

    def is_same(self, size: int, etag: str) -> bool:
        """Whether the object is unchanged since it had these."""
        return (self.size, self.etag) == (size, etag)

    @property
    def is_foreign(self) -> bool:
        """Whether it is not read (`FOREIGN`)."""
        return self.etag == FOREIGN

    @property
    def is_by_size(self) -> bool:
        """Whether another object of the same size would have the same etag, because its store says nothing else."""
        return self.etag == SIZE_ONLY.format(self.size)


def parts_of(name: str) -> list[str]:
    """The parts of an object's name. Raises ValueError if some store could take the name for another object or for none."""
    parts = name.split("/") if name else []
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"not an object name: {name!r}")
    return parts


class Requests:
    """Counts the calls of each kind that reached the store. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()

    def count(self, call: Call) -> None:
        with self._lock:
            self._counts[call] += 1

    def add(self, counts: Mapping[str, int]) -> None:
        """Add the counts of another process."""
        with self._lock:
            self._counts.update(counts)
            self._taken.update(counts)

    def take(self) -> dict[str, int]:
        """The calls of this process since the last `take`."""
        with self._lock:
            new: dict[str, int] = {call: self._counts[call] - self._taken[call] for call in CALLS}
            self._taken = self._counts.copy()
        return new

    def as_dict(self) -> dict[str, int]:
        return {call: self._counts[call] for call in CALLS}

    def __reduce__(self) -> tuple[type["Requests"], tuple[()]]:
        return Requests, ()  # a copy in another process starts at 0


class Sink(Protocol):
    """Where the bytes of an object are written: a binary file of Arrow or Python."""

    def write(self, data: bytes, /) -> object: ...


class ObjectReader(Protocol):
    """Objects below one root, which are only read: a landing zone. Instances are pickled to other processes."""

    @property
    def requests(self) -> Requests:
        """The calls so far."""

    def uri(self, name: str = "") -> str:
        """The address of an object, for messages and for engines that open the object themselves."""

    @property
    def pinned(self) -> bool:
        """Whether reads of an open object fail once it is replaced. If not, the reader must check its etag again."""

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        """The whole object, or a ``part`` of it: where it begins, and how many bytes. Raises NotFoundError."""

    def head(self, name: str) -> ObjectInfo | None:
        """Size and etag, or None if there is no such object."""

    def list(
        self, prefix: str, *, limit: int | None = None, above: Mapping[str, str] = NOTHING
    ) -> Iterator[ObjectInfo]:
        """The objects whose names begin with ``prefix``, ordered by name (by code point).

        Of each folder in ``above``, the objects up to that one, which is directly in it, are left out. No page of
        them costs a request on S3.
        """

    def open(self, name: str, etag: str | None = None) -> pa.NativeFile:
        """A seekable input.

        Raises NotFoundError if there is no such object, or if its etag is not the one given. A `pinned` store also raises it
        during reads, once the object is replaced. DamagedObjectError, also during reads, only comes from a landing zone.
        """


def last_left_out(name: str, above: Mapping[str, str]) -> str:
    """The last object that `ObjectReader.list` leaves out together with this one; "" if it does not leave it out."""
    return next((last for folder, last in above.items() if name <= last and name.startswith(f"{folder}/")), "")


def open_listed(store: ObjectReader, listed: ObjectInfo) -> pa.NativeFile:
    """Open an object as `ObjectReader.open` does, if its size is the listed one. Raises what `not_as_listed` returns."""
    source = store.open(listed.name, listed.etag)
    size = source.size()
    if size != listed.size:
        source.close()
        raise not_as_listed(store, listed, f"opened, it has {size:,} bytes")
    return source


def not_as_listed(store: ObjectReader, listed: ObjectInfo, found: str) -> Exception:
    """The error for an object whose bytes are not those that ``listed`` says: NotFoundError if it was replaced since.

    If it was not, the store contradicts itself, and rows of a file would be lost silently.
    """
    now = store.head(listed.name)
    if now is None or (now.size, now.etag) != (listed.size, listed.etag):
        return NotFoundError(listed.name)
    return ConfigurationError(
        "store-contradicts-itself",
        f"{store.uri(listed.name)}: the store says that it has {listed.size:,} bytes and did not change; {found}. Its rows "
        "would be lost. Earlier commits are untouched.",
        next="if the server unpacks what it sends (Content-Encoding), turn that off; otherwise use another server or file "
        "system, or copy the files to one",
    )


class ObjectStore(ObjectReader, Protocol):
    """An object store below one root."""

    def create(self, name: str, data: bytes) -> bool:
        """Create the object if the name is free: True for exactly one caller, ever; False if the name was taken.

        The object is durable when this returns. Raises UnknownOutcomeError if the outcome is not known.
        """

    def write(self, name: str) -> AbstractContextManager[Sink]:
        """A sink for an object under a unique name.

        The object appears, complete and durable, when the block ends without an error. Otherwise it never appears.
        """

    def clock_ahead(self) -> float | None:
        """By how many seconds this machine's clock is ahead of the store's, to about a second; None if it is not known, since the
        store does not say or has not answered yet."""

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects. A missing object is not an error."""
