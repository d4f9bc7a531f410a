"""What phase two asks of an engine, and what it gets back. Engines agree row by row; see `arrow` and `spark`."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import pyarrow.compute as pc

from lakeupsert.engine.datafiles import DataFileWriter, Footer
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.manifest import DataFile
from lakeupsert.table.spec import DELETE_FLAG, TableSpec


@dataclass(frozen=True)
class MergeTask:
    """One bucket of one partition, to be merged with the appended files of some batches.

    Attributes:
        base, tombstones: what is stored: base files in key order, one row per key; keys that are deleted.
        batches: per batch, in ledger order, its appended files; a key may be in several of them, and their rank columns decide.
        up_to: the batch that `merged` will be.
    """

    partition: str
    base: tuple[DataFile, ...]
    tombstones: tuple[DataFile, ...]
    batches: tuple[tuple[DataFile, ...], ...]
    up_to: int

    @property
    def bytes(self) -> int:
        """Compressed bytes that the merge reads."""
        return sum(f.bytes for files in (self.base, self.tombstones, *self.batches) for f in files)


@dataclass(frozen=True)
class MergeOutput:
    """What replaces the bucket: files in key order, and how many rows lost to a greater one."""

    base: tuple[DataFile, ...]
    tombstones: tuple[DataFile, ...]
    superseded: int

    @property
    def files(self) -> tuple[DataFile, ...]:
        return (*self.base, *self.tombstones)


class Engine(Protocol):
    """Leaves the row of greatest rank of every key (G1); a stored row loses a tie, a winning delete becomes a tombstone."""

    name: str
    partitions_per_call: int
    """How many partitions a worker brings to one call: few where a call costs nothing, so that workers end together."""

    def merge(
        self, store: ObjectStore, spec: TableSpec, spec_version: int, tasks: Sequence[MergeTask]
    ) -> list[MergeOutput]:
        """One output a task, in their order. Writes files; commits nothing."""


class MergeWriter:
    """Where an engine puts winners, in key order: live rows into base files, deletes into tombstone files."""

    def __init__(self, store: ObjectStore, spec: TableSpec, spec_version: int, task: MergeTask) -> None:
        footer = partial(Footer, table=spec.table_id, batch=str(task.up_to), spec_version=spec_version)
        self._stack = ExitStack()
        self.base = DataFileWriter(
            store,
            partial(TableObjects.new_base, task.partition),
            spec.stored_schema,
            footer(kind="base"),
            spec.stored_key,
        )
        self.tombstones = DataFileWriter(
            store,
            partial(TableObjects.new_tombstones, task.partition),
            spec.tombstone_schema,
            footer(kind="tombstones"),
            spec.stored_key,
        )

    def __enter__(self) -> "MergeWriter":
        self._stack.enter_context(self.base)
        self._stack.enter_context(self.tombstones)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def write(self, winners: Any) -> None:
        """Rows with the stored columns and `DELETE_FLAG`."""
        deleted = winners[DELETE_FLAG]
        graves = winners.filter(deleted)
        self.tombstones.write(graves)
        self.base.write(winners.filter(pc.invert(deleted)) if graves.num_rows else winners)
