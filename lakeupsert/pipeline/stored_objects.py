"""The objects that a table consists of, to look at: chains, files and queue. Tests, benchmarks and tools read a table by it.

Reads     whatever it is asked for
Writes    nothing
Repeat    safe
"""

from collections.abc import Collection, Iterator
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

Body = TypeVar("Body")


class Versions(Protocol[Body]):
    """A `Chain` without its appends."""

    def head(self) -> Link[Body] | None: ...
    def newest_number(self) -> int | None: ...
    def get(self, number: int) -> Link[Body] | None: ...
    def numbers(self) -> Iterator[int]: ...
    def between(self, low: int, high: int) -> Iterator[Link[Body]]: ...
    def name(self, number: int) -> str: ...


class Files(Protocol):
    """An `ObjectStore` without its writes."""

    @property
    def requests(self) -> Requests: ...
    def uri(self, name: str = "") -> str: ...
    def get(self, name: str) -> bytes: ...
    def head(self, name: str) -> ObjectInfo | None: ...
    def list(self, prefix: str) -> Iterator[ObjectInfo]: ...
    def open(self, name: str) -> pa.NativeFile: ...


class Messages(Protocol):
    """A `WorkQueue` without its sends and answers."""

    def stats(self) -> QueueStats: ...
    def dead_letters(self) -> list[DeadLetter]: ...


class StoredObjects:
    """The chains, files and messages of one open table, to look at (`lakeupsert.Table.objects`)."""

    def __init__(self, opened: OpenTable) -> None:
        self._opened = opened

    @property
    def specs(self) -> Versions[TableSpec]:
        return self._opened.history.objects.specs

    @property
    def ledger(self) -> Versions[LedgerEntry]:
        return self._opened.history.objects.ledger

    @property
    def snapshots(self) -> Versions[Snapshot]:
        return self._opened.history.objects.snapshots

    def partition(self, partition: str) -> Versions[Manifest]:
        """The manifests of one partition."""
        return self._opened.history.objects.partition(partition)

    @property
    def store(self) -> Files:
        """The processed zone."""
        return self._opened.resources.store

    @property
    def landing(self) -> Files:
        """The landing zone."""
        return self._opened.resources.landing

    @property
    def queue(self) -> Messages:
        return self._opened.resources.queue

    def spec(self) -> TableSpec:
        """The newest spec. Raises ConfigurationError if the table does not exist yet."""
        return self._opened.history.existing_spec()

    def heads(self, partitions: Collection[str]) -> dict[str, Link[Manifest]]:
        """The newest manifest of each partition that has one."""
        return self._opened.history.heads(partitions)
