"""The objects that a table consists of, to look at: chains, files and queue. Tests, benchmarks and tools read a table by it.

Reads     whatever it is asked for
Writes    nothing
Repeat    safe
"""

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

import pyarrow as pa

from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.queue import QueueStats
from lakeupsert.queue.base import DeadLetter
from lakeupsert.storage import ObjectInfo
from lakeupsert.storage.base import Requests
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.table.manifest import Manifest
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.work import RewriteOrder

Body = TypeVar("Body")


class Versions(Protocol[Body]):
    """A `Chain` without its appends."""

    def head(self) -> Link[Body] | None:
        """The newest version, or None if the chain is empty."""

    def newest_number(self) -> int | None:
        """The head's number, or None if the chain is empty."""

    def get(self, number: int) -> Link[Body] | None:
        """One version, or None if that number does not exist."""

    def numbers(self) -> Iterator[int]:
        """The existing numbers, newest first."""

    def between(self, low: int, high: int) -> Iterator[Link[Body]]:
        """The versions with low < number <= high, ascending; all of them must exist."""

    def name(self, number: int) -> str:
        """The name of a version's object."""


class Files(Protocol):
    """An `ObjectStore` without its writes."""

    @property
    def requests(self) -> Requests:
        """The requests so far."""

    def uri(self, name: str = "") -> str:
        """The address of an object."""

    def get(self, name: str) -> bytes:
        """The whole object. Raises NotFoundError."""

    def head(self, name: str) -> ObjectInfo | None:
        """Size and etag, or None if there is no such object."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose name begins with ``prefix``."""

    def open(self, name: str) -> pa.NativeFile:
        """A seekable Arrow input. Raises NotFoundError."""


class Messages(Protocol):
    """A `WorkQueue` without what changes it."""

    def stats(self) -> QueueStats:
        """How many messages are visible, leased and dead."""

    def dead_letters(self) -> list[DeadLetter]:
        """Messages that failed too often."""


class StoredObjects:
    """The chains, files and messages of one open table, to look at (`lakeupsert.Table.objects`)."""

    def __init__(self, opened: OpenTable) -> None:
        self._opened = opened

    @property
    def specs(self) -> Versions[TableSpec]:
        return self._opened.objects.specs

    @property
    def ledger(self) -> Versions[LedgerEntry]:
        return self._opened.objects.ledger

    @property
    def snapshots(self) -> Versions[Snapshot]:
        return self._opened.objects.snapshots

    def partition(self, partition: str) -> Versions[Manifest]:
        """The manifests of one partition."""
        return self._opened.objects.partition(partition)

    @property
    def store(self) -> Files:
        """The processed zone."""
        return self._opened.store

    @property
    def landing(self) -> Files:
        """The landing zone."""
        return self._opened.landing

    @property
    def queue(self) -> Messages:
        return self._opened.queue

    def spec(self) -> TableSpec:
        """The newest spec. Raises ConfigurationError if the table does not exist yet."""
        return self._opened.existing_spec()

    def headers(self, high: int) -> list[LedgerEntry]:
        """Ledger entries 0 to ``high`` without the partitions that they touched."""
        return self._opened.headers(high)

    def heads(self, partitions: Iterable[str]) -> dict[str, Link[Manifest]]:
        """The newest manifest of each partition that has one."""
        return self._opened.heads(partitions)

    def version(self, partition: str, number: int) -> Manifest:
        """One manifest of a partition. Raises DamagedTableError if it is missing."""
        return self._opened.version(partition, number)

    def is_merged(self, partition: str, batch: int) -> bool:
        """Whether the partition's newest manifest includes ``batch``."""
        return self._opened.merged(partition, batch)

    def work(self, name: str) -> RewriteOrder:
        """One work object, which asks for partitions to be rewritten."""
        return self._opened.work(name)
