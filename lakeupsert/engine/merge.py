"""What phase two asks of an engine, and what it gets back. Engines agree row by row; see `arrow` and `spark`."""

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.datafiles import DataFileWriter, Footer, to_bytes
from lakeupsert.engine.vectors import with_deleted
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

    Of files whose keys are in a larger bucket, such as that which is split, only the rows count that are in this one.

    Attributes:
        base, deltas, tombstones: what is stored and written anew: base files in key order, then rows that supersede none of
            them and are not superseded, one row per key altogether; keys that are deleted.
        kept: stored files that stay: base files, deltas. Rows that are superseded in them are marked by deletion vectors,
            and winners go to a new delta (strategy delta). Where there are none, all is written into a new base (rewrite).
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
    deltas: tuple[DataFile, ...] = ()
    kept: tuple[DataFile, ...] = ()
    bucket: int = 0
    bits: int = 0

    @property
    def strategy(self) -> Literal["rewrite", "delta"]:
        return "delta" if self.kept else "rewrite"

    @property
    def stored(self) -> tuple[DataFile, ...]:
        """All files of rows that live."""
        return (*self.kept, *self.base, *self.deltas)

    @property
    def read(self) -> list[DataFile]:
        """All files that the merge reads."""
        return [*self.stored, *self.tombstones, *itertools.chain.from_iterable(self.batches)]

    @property
    def bytes(self) -> int:
        """Compressed bytes that the merge reads, at most: of what is kept it reads keys and ordering columns alone."""
        return sum(f.bytes for f in self.read)


@dataclass(frozen=True)
class MergeOutput:
    """What replaces the bucket: files in key order; how many rows lost to a greater one, and their digest.

    Attributes:
        written: new files of rows that live, a base or a delta as the task's strategy says.
        kept: those of the task that still have such rows, with their deletion vectors of now.
        adopted: the digest of all rows that were stored, where they had to be settled.
    """

    written: tuple[DataFile, ...]
    tombstones: tuple[TombstoneFile, ...]
    superseded: int
    superseded_digest: str = NO_ROWS
    adopted: str | None = None
    kept: tuple[DataFile, ...] = ()

    @property
    def objects(self) -> set[str]:
        """What it needs in the store."""
        return {name for file in (*self.kept, *self.written, *self.tombstones) for name in file.objects}


class Engine(Protocol):
    """Leaves the row of greatest rank of every key (G1); a stored row loses a tie, a winning delete becomes a tombstone."""

    name: str
    partitions_per_call: int
    """How many partitions a worker brings to one call: few where a call costs nothing, so that workers end together."""
    memory_limit: int | None
    """Bytes that a merge may take; None: as many as it likes, or it spills."""
    shares_units: bool
    """Whether workers share what is too big for one; False: a call spreads over machines by itself."""

    def memory_of(self, spec: TableSpec, task: MergeTask) -> int:
        """About how many bytes of memory the merge takes at its peak."""

    def merge(
        self, store: ObjectStore, spec: TableSpec, spec_version: int, tasks: Sequence[MergeTask]
    ) -> list[MergeOutput]:
        """One output a task, in their order. Writes files; commits nothing."""


class MergeWriter:
    """Where an engine puts winners, in key order: live rows into base or delta files, deletes into tombstone files."""

    def __init__(self, store: ObjectStore, spec: TableSpec, spec_version: int, task: MergeTask) -> None:
        footer = partial(
            Footer,
            table=spec.table_id,
            batch=str(task.up_to),
            spec_version=spec_version,
            partition=task.partition,
            bucket=task.bucket,
            bits=task.bits,
        )
        self._store, self._task = store, task
        self._stack = ExitStack()
        self._few: list[Any] | None = []  # None: they were too many
        new_name, kind = (TableObjects.new_delta, "delta") if task.kept else (TableObjects.new_base, "base")
        self.live = DataFileWriter(
            store,
            partial(new_name, task.partition, task.start),
            spec.stored_schema,
            footer(kind=kind),
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
        self._stack.enter_context(self.live)
        self._stack.enter_context(self._tombstones)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def write(self, rows: Any, winners: Any) -> None:
        """Those of ``rows`` (the stored columns and `DELETE_FLAG`) whose indices are ``winners``, in that order."""
        deleted = rows[DELETE_FLAG].take(winners)
        self._bury(rows.select(self._tombstones.schema.names).take(winners.filter(deleted)))
        self.live.write(rows.select(self.live.schema.names).take(winners.filter(pc.invert(deleted))))

    def _bury(self, tombstones: Any) -> None:
        if self._few is not None:
            self._few.append(tombstones)
            if sum(t.nbytes for t in self._few) <= INLINE_BYTES:
                return
            tombstones, self._few = pa.concat_tables(self._few), None
        self._tombstones.write(tombstones)

    def output(
        self,
        superseded: int,
        superseded_digest: str = NO_ROWS,
        adopted: str | None = None,
        positions: Sequence[Any] = (),
    ) -> MergeOutput:
        """After the block: what was written; ``positions`` are those of rows that lost in each file that is kept."""
        files = [TombstoneFile(**msgspec.structs.asdict(f)) for f in self._tombstones.files]
        few = pa.concat_tables([self._tombstones.schema.empty_table(), *(self._few or [])])
        if few.num_rows:
            inline = to_bytes(few.combine_chunks())
            task = self._task
            few_file = TombstoneFile(
                name="", rows=few.num_rows, bytes=len(inline), inline=inline, bucket=task.bucket, bits=task.bits
            )
            files.append(few_file)
        new_vectors = partial(TableObjects.new_vectors, self._task.partition, self._task.start)
        kept = with_deleted(self._store, self._task.kept, positions, new_vectors) if self._task.kept else ()
        return MergeOutput(tuple(self.live.files), tuple(files), superseded, superseded_digest, adopted, tuple(kept))
