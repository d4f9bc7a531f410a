"""The object store below a table: the few calls that everything above is built on.

Names are relative to the store's root, with `/` between parts, and mean the same on every backend. Only `create` is a
commit; everything that `write` makes has a name of its own and counts for nothing until a created object names it.
What a backend must keep is `lakeupsert.testing.contracts.ObjectStoreContract`.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from lakeupsert.errors import TryAgainError

Call = Literal["get", "head", "list", "put", "create", "delete"]
CALLS: tuple[Call, ...] = ("get", "head", "list", "put", "create", "delete")


class NotFoundError(Exception):
    """No object has this name (now); an answer, not a failure."""


class UnknownOutcomeError(Exception):
    """A create was sent and its answer is lost: it may or may not have had its effect. Read back, never guess."""


class StoreUnavailableError(TryAgainError):
    """The store did not answer, or has no room; whatever was committed before is untouched."""


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing tells of one object; an equal ``etag`` says 'unchanged since listed', never who wrote it.

    ``modified`` is in seconds since 1970 UTC, by the store's clock, which need not be this machine's.
    """

    name: str
    size: int
    etag: str
    modified: float = field(compare=False)  # S3's HEAD and LIST round it differently


def parts_of(name: str) -> list[str]:
    """The parts of an object's name. Raises ValueError where it could mean another object, or none, on some store."""
    parts = name.split("/") if name else []
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"not an object name: {name!r}")
    return parts


class Requests:
    """How often each kind of call reached the store; safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, call: Call) -> None:
        with self._lock:
            self._counts[call] += 1

    def add(self, counts: Mapping[str, int]) -> None:
        """Add what another process counted."""
        with self._lock:
            self._counts.update(counts)

    def as_dict(self) -> dict[str, int]:
        return {call: self._counts[call] for call in CALLS}

    def __reduce__(self) -> tuple[Any, ...]:
        return Requests, ()  # a copy in another process counts for itself


class ObjectStore(Protocol):
    """One root of an object store. Instances go to other processes by pickle."""

    @property
    def requests(self) -> Requests:
        """What was counted so far."""

    def uri(self, name: str = "") -> str:
        """The address of an object, for messages and for engines that open it themselves."""

    @property
    def pinned(self) -> bool:
        """Whether an opened object can only be read as it was when it was opened; else a reader looks at its etag again."""

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        """The whole object, or so many bytes from a place in it on. Raises NotFoundError."""

    def head(self, name: str) -> ObjectInfo | None:
        """Size and etag, or None where nothing has this name."""

    def create(self, name: str, data: bytes) -> bool:
        """Create the object if the name is free: True for exactly one caller, ever; False where it was taken.

        Durable when it returns. Raises UnknownOutcomeError where the effect can't be told.
        """

    def write(self, name: str) -> AbstractContextManager[Any]:
        """A sink (Arrow's or Python's binary file) for an object under a name that nobody else uses.

        It appears, whole and durable, when the block ends without an error; otherwise not at all.
        """

    def list(self, prefix: str, *, limit: int | None = None) -> Iterator[ObjectInfo]:
        """Objects whose name begins with ``prefix``, in the order of their names (by code point)."""

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; a name that is not there is no error."""

    def open(self, name: str, etag: str | None = None) -> Any:
        """A seekable Arrow input (``pyarrow.NativeFile``).

        Raises NotFoundError, also where the object has another etag than the one given; where the store is `pinned`, also
        while it is read, as soon as it is another object.
        """
