"""Show the published snapshots to other engines, in their own formats."""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar
from urllib.parse import quote

from lakeupsert.config import TableSettings
from lakeupsert.retries import SENDS
from lakeupsert.storage import NotFoundError, ObjectInfo, ObjectStore, StoreUnavailableError, UnknownOutcomeError
from lakeupsert.table.chain import Link, sends
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.manifest import Manifest
from lakeupsert.table.snapshot import PartitionVersion, Snapshot
from lakeupsert.table.spec import TableSpec

UNFINISHED = -1
"""Instead of a snapshot: readers see a part of one, because the first publish broke off or is under way."""
VECTOR_OBJECT_BYTES = 2 << 20
"""Deletion vectors share objects up to so many bytes. More: engines that fetch the whole object for each vector read more. Less:
more objects, and delta-rs hangs if a scan opens many hundreds."""
Item = TypeVar("Item")
Found = TypeVar("Found")


class Publisher(Protocol):
    """Shows the snapshots of one table in one format. What it writes is derived from committed snapshots alone."""

    def shown(self) -> int | None:
        """The snapshot that its readers see, or `UNFINISHED`; None if they see nothing yet."""

    def catch_up(self, newest: Link[Snapshot]) -> str | None:
        """Show every snapshot up to ``newest`` that its readers lack. Returns a warning about the newest one.

        Raises LakeupsertError if it can't; readers then see an older snapshot.
        """

    def check(self, newest: Link[Snapshot]) -> None:
        """Raise ConfigurationError if ``newest`` can't be shown to its readers. Writes nothing."""

    def reset(self) -> None:
        """Delete what it has written, so that `catch_up` begins anew."""

    def garbage(self, oldest: int, newest: int) -> list[ObjectInfo]:
        """Its objects that no snapshot from ``oldest`` on needs; none if it does not show ``newest``, the newest one.

        Objects that are being written may be among them, so young ones must be kept.
        """

    def mend(self) -> None:
        """Put right what a role that may not delete had to leave."""


class Concurrently(Protocol):
    """`pipeline.resources.Resources.map_concurrently`."""

    def __call__(self, call: Callable[[Item], Found], items: Collection[Item], /) -> list[Found]: ...


@dataclass(frozen=True)
class PublishedTable:
    """The parts of an open table that publishers need. ``version`` reads a partition's version, or one that was read before."""

    settings: TableSettings
    objects: TableObjects
    version: Callable[[str, int | PartitionVersion], Manifest]
    map_concurrently: Concurrently

    def put(self, name: str, data: bytes) -> None:
        with self.objects.store.write(name) as sink:
            sink.write(data)


@dataclass(frozen=True)
class TablePublisher:
    """A publisher of one table."""

    table: PublishedTable

    @property
    def objects(self) -> TableObjects:
        return self.table.objects

    @cached_property
    def newest_spec(self) -> TableSpec:
        spec = self.objects.specs.head()
        assert spec is not None, "a table that has a snapshot has a spec"
        return spec.body

    def spec_of(self, shown: Snapshot) -> TableSpec:
        spec = self.objects.specs.get(shown.spec_version)
        assert spec is not None, "a snapshot is published after its spec"
        return spec.body

    def mend(self) -> None:
        """See `Publisher`. Most leave nothing to others."""


def url_path(name: str) -> str:
    """The name of an object as logs of other formats have it."""
    return quote(name, safe="/=")


def hides_vectors(name: str) -> bool:
    """Whether Polars finds no deletion vector of a file of that name: it escapes some paths once more than others, and those of
    checkpoints not as it does those of commits."""
    return url_path(name) != name


def create_once(store: ObjectStore, name: str, data: bytes, publisher: str, seen: str) -> bool:
    """Whether this call surely created the object; False: it exists, maybe since this call.

    Raises StoreUnavailableError if the store gives no answer; ``seen`` says what the publisher's readers then see.
    """
    for _ in sends():
        try:
            return store.create(name, data)
        except UnknownOutcomeError:
            with suppress(NotFoundError, StoreUnavailableError):
                if store.get(name) == data:
                    return False
    raise not_created(store, name, publisher, f"{SENDS} attempts to create it got no answer. {seen}")


def not_created(store: ObjectStore, name: str, publisher: str, why: str) -> StoreUnavailableError:
    return StoreUnavailableError(
        "store-unreachable",
        f"{store.uri(name)}: {why}",
        next=f"run `lakeupsert publish --to {publisher}`",
    )
