"""What phase two asks of an engine, and what it gets back. Engines agree row by row; see `arrow` and `spark`."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.datafiles import DataFileWriter, Footer, to_bytes
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.manifest import NO_ROWS, DataFile, TombstoneFile
from lakeupsert.table.spec import DELETE_FLAG, TableSpec

INLINE_BYTES = 4 << 10
"""Tombstones of a partition up to so many Arrow bytes lie in its manifest. More: manifests, which every publish reads,
grow. Less: a file more to write in each merge of the partition, and to read in the next."""


@dataclass(frozen=True)
class MergeTask:
    """One bucket of one partition, to be merged with the appended files of some batches.

    Attributes:
        base, tombstones: what is stored: base files in key order, one row per key; keys that are deleted.
        batches: per batch, in ledger order, its appended files; a key may be in several of them, and their rank columns decide.
        up_to: the batch that `merged` will be.
        start: how many versions the partition's chain has; it is in the new files' names.
        settled: what is stored has a key once, in key order. Otherwise it is adopted, and settled like rows that come in;
            between equal ordering values the later file wins, and in it the later row.
    """

    partition: str
    base: tuple[DataFile, ...]
    tombstones: tuple[TombstoneFile, ...]
    batches: tuple[tuple[DataFile, ...], ...]
    up_to: int
    start: int
    settled: bool = True

    @property
    def bytes(self) -> int:
        """Compressed bytes that the merge reads."""
        return sum(f.bytes for files in (self.base, self.tombstones, *self.batches) for f in files)


@dataclass(frozen=True)
class MergeOutput:
    """What replaces the bucket: files in key order; how many rows lost to a greater one, and their digest.

    ``adopted`` is the digest of all rows that were stored, where they had to be settled.
    """

    base: tuple[DataFile, ...]
    tombstones: tuple[TombstoneFile, ...]
    superseded: int
    superseded_digest: str = NO_ROWS
    adopted: str | None = None

    @property
    def names(self) -> list[str]:
        """What was written to the store."""
        return [f.name for f in (*self.base, *self.tombstones) if f.name]


class Engine(Protocol):
    """Leaves the row of greatest rank of every key (G1); a stored row loses a tie, a winning delete becomes a tombstone."""

    name: str
    partitions_per_call: int
    """How many partitions a worker brings to one call: few where a call costs nothing, so that workers end together."""
    memory_limit: int | None
    """Bytes that a merge may take; None: as many as it likes, or it spills."""

    def memory_of(self, spec: TableSpec, task: MergeTask) -> int:
        """About how many bytes of memory the merge takes at its peak."""

    def merge(
        self, store: ObjectStore, spec: TableSpec, spec_version: int, tasks: Sequence[MergeTask]
    ) -> list[MergeOutput]:
        """One output a task, in their order. Writes files; commits nothing."""


class MergeWriter:
    """Where an engine puts winners, in key order: live rows into base files, deletes into tombstone files."""

    def __init__(self, store: ObjectStore, spec: TableSpec, spec_version: int, task: MergeTask) -> None:
        footer = partial(
            Footer, table=spec.table_id, batch=str(task.up_to), spec_version=spec_version, partition=task.partition
        )
        self._stack = ExitStack()
        self._few: list[Any] | None = []  # None: they were too many
        self.base = DataFileWriter(
            store,
            partial(TableObjects.new_base, task.partition, task.start),
            spec.stored_schema,
            footer(kind="base"),
            spec.stored_key,
        )
        self._tombstones = DataFileWriter(
            store,
            partial(TableObjects.new_tombstones, task.partition, task.start),
            spec.tombstone_schema,
            footer(kind="tombstones"),
            spec.stored_key,
        )

    def __enter__(self) -> "MergeWriter":
        self._stack.enter_context(self.base)
        self._stack.enter_context(self._tombstones)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def write(self, rows: Any, winners: Any) -> None:
        """Those of ``rows`` (the stored columns and `DELETE_FLAG`) whose indices are ``winners``, in that order."""
        deleted = rows[DELETE_FLAG].take(winners)
        self._bury(rows.select(self._tombstones.schema.names).take(winners.filter(deleted)))
        self.base.write(rows.select(self.base.schema.names).take(winners.filter(pc.invert(deleted))))

    def _bury(self, tombstones: Any) -> None:
        if self._few is not None:
            self._few.append(tombstones)
            if sum(t.nbytes for t in self._few) <= INLINE_BYTES:
                return
            tombstones, self._few = pa.concat_tables(self._few), None
        self._tombstones.write(tombstones)

    def output(self, superseded: int, superseded_digest: str = NO_ROWS, adopted: str | None = None) -> MergeOutput:
        """After the block: what was written."""
        files = [TombstoneFile(name=f.name, rows=f.rows, bytes=f.bytes) for f in self._tombstones.files]
        few = pa.concat_tables([self._tombstones.schema.empty_table(), *(self._few or [])])
        if few.num_rows:
            inline = to_bytes(few.combine_chunks())
            files.append(TombstoneFile(name="", rows=few.num_rows, bytes=len(inline), inline=inline))
        return MergeOutput(tuple(self.base.files), tuple(files), superseded, superseded_digest, adopted)
