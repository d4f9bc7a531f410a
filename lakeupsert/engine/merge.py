"""Phase two's row work: what an engine gets, returns and writes. Engines `arrow` and `spark_window` agree row by row.

Reads     stored, tombstone and appended files of one bucket
Writes    base, delta, tombstone, history and quarantine files, under names of their own. Commits nothing
Repeat    safe: files that no manifest names count for nothing
"""

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Literal, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.quarantine import QUARANTINE_SCHEMA
from lakeupsert.landing.formats.blocks import ArrowBlock
from lakeupsert.rows.arrays import Column, Indices, Mask, Rows
from lakeupsert.rows.changes import Tally, any_per_key
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.datafiles import DataFileWriter, Footer, stream_file, to_bytes
from lakeupsert.rows.digest import Digest
from lakeupsert.rows.floor import DELETED_AT, Forgetting, find_below, find_forgotten, floor_values, greatest_floor
from lakeupsert.rows.rank import mark_versions, sort_by_rank
from lakeupsert.rows.vectors import mark_deleted
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import TableObjects, partition_scalars
from lakeupsert.table.manifest import NO_CHANGES, NO_ROWS, Changes, DataFile, TombstoneFile
from lakeupsert.table.spec import BATCH, DELETE_FLAG, FILE, PLACE, TableSpec

AGE = "_lakeupsert_age"
"""Integer column of rows in a merge: 0 for a stored row, then 1, 2, … for the batches in ledger order."""
INLINE_BYTES = 4 << 10
"""Tombstones of a partition stay in its manifest up to this many Arrow bytes. More: manifests grow, and every publish reads
them. Less: each merge of the partition writes one more file, and the next merge reads it."""


@dataclass(frozen=True)
class MergeTask:
    """One bucket of one partition, to be merged with the appended files of some batches.

    A file may belong to a larger bucket, for example the one that is split. Only its rows in this bucket count.

    Attributes:
        base: base files in key order, to be rewritten.
        deltas: files to be rewritten whose rows supersede nothing in ``base`` and are not superseded. Together with ``base``
            they have one row per key.
        tombstones: deleted keys, to be rewritten.
        kept: stored files that stay, bases or deltas (strategy delta). Deletion vectors mark superseded rows in them, and winners
            go to a new delta. If empty, everything is written to a new base (strategy rewrite).
        batches: for each batch, in ledger order, its appended files. A key may be in several of them; their rank columns decide.
        up_to: the batch that `merged` will be.
        start: how many versions the partition's chain has; the names of new files contain it.
        settled: the stored files have each key once, in key order. If False they were adopted, and are settled like incoming
            rows; between equal ordering values the later file wins, and within a file the later row.
        floors: the greatest orders among tombstones that the bucket has forgotten (see `rows.floor`).
        forgets: which tombstones to forget now; None: none.
        sources: for each batch its id and the files that its rows came from, to quarantine rows below a floor. If empty, no row
            is refused.
        full: ages and greatest orders of the batches that are full extracts. A key that an extract lacks loses its earlier rows
            up to that order. Such a task has nothing in ``kept``.
        history, folded: files of superseded versions that stay, and those that are rewritten together with the new versions.
        numbers: of tables with a history, the ledger numbers of what is stored and of each batch.
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
    floors: tuple[str, ...] = ()
    forgets: Forgetting | None = None
    sources: tuple[tuple[str, tuple[str, ...]], ...] = ()
    full: tuple[tuple[int, str], ...] = ()
    history: tuple[DataFile, ...] = ()
    folded: tuple[DataFile, ...] = ()
    numbers: tuple[int, ...] = ()

    @property
    def refuses(self) -> bool:
        """Whether a row below a floor is refused if the table stores nothing under its key."""
        return bool(self.floors and self.sources)

    @property
    def strategy(self) -> Literal["rewrite", "delta"]:
        return "delta" if self.kept else "rewrite"

    @property
    def stored(self) -> tuple[DataFile, ...]:
        """All files of live rows."""
        return (*self.kept, *self.base, *self.deltas)

    @property
    def read(self) -> list[DataFile]:
        """All files that the merge reads."""
        return [*self.stored, *self.tombstones, *itertools.chain.from_iterable(self.batches)]

    @property
    def bytes(self) -> int:
        """Compressed bytes that the merge reads, at most: of files in ``kept`` it reads key and ordering columns alone."""
        return sum(f.bytes for f in (*self.read, *self.folded))


@dataclass(frozen=True)
class MergeOutput:
    """What replaces the bucket.

    Attributes:
        written: new files of live rows in key order: a base or a delta, by the task's strategy.
        tombstones: deleted keys.
        superseded, superseded_digest: rows that lost to a greater one.
        adopted: digest of all stored rows, if they had to be settled.
        kept: files of the task's ``kept`` that still have live rows, with their new deletion vectors.
        dropped, dropped_digest: tombstones that were forgotten.
        refused, refused_digest: rows that were refused, and are in the objects ``quarantine``.
        floor: see `rows.floor.greatest_floor`.
        changes: what became of the keys in the task's batches.
        history: all history files of the bucket.
    """

    written: tuple[DataFile, ...]
    tombstones: tuple[TombstoneFile, ...]
    superseded: int
    superseded_digest: str = NO_ROWS
    adopted: str | None = None
    kept: tuple[DataFile, ...] = ()
    dropped: int = 0
    dropped_digest: str = NO_ROWS
    refused: int = 0
    refused_digest: str = NO_ROWS
    floor: str | None = None
    quarantine: tuple[str, ...] = ()
    changes: Changes = NO_CHANGES
    history: tuple[DataFile, ...] = ()

    @property
    def objects(self) -> set[str]:
        """Objects in the store that the output names."""
        files = (*self.kept, *self.written, *self.tombstones, *self.history)
        return {*self.quarantine, *(name for file in files for name in file.objects)}


class Engine(Protocol):
    """Keeps the row of greatest rank of every key. A stored row loses a tie; a winning delete becomes a tombstone.

    Attributes:
        partitions_per_call: how many partitions a worker passes to one call. Small if a call costs nothing, so that workers
            finish together.
        memory_limit: bytes that a merge may take; None if there is no limit or the engine spills.
        shares_units: whether several workers share a partition that is too big for one. False if a call already spreads
            over machines.
    """

    name: str
    partitions_per_call: int
    memory_limit: int | None
    shares_units: bool

    def memory_of(self, spec: TableSpec, task: MergeTask) -> int:
        """Estimate of the bytes of memory that the merge takes at its peak."""

    def merge(
        self, store: ObjectStore, spec: TableSpec, spec_version: int, tasks: Sequence[MergeTask]
    ) -> list[MergeOutput]:
        """One output for each task, in their order. Writes files; commits nothing."""


class MergeWriter:
    """Writes an engine's winners in key order: live rows to base or delta files, deletes to tombstone files.

    Winners that are refused here are taken out of ``tally``, which has counted them.
    """

    def __init__(self, store: ObjectStore, spec: TableSpec, spec_version: int, task: MergeTask, tally: Tally) -> None:
        footer = partial(
            Footer,
            table=spec.table_id,
            batch=str(task.up_to),
            spec_version=spec_version,
            partition=task.partition,
            bucket=task.bucket,
            bits=task.bits,
            renames=len(spec.renames),
        )
        self._store, self._spec, self._task, self._tally = store, spec, task, tally
        self._dropped, self._refused = Digest(spec), Digest(spec)
        self._floor: str | None = None
        self._since: int | None = None
        if floors := [*task.floors, *(order for _, order in task.full)]:
            self._floor = greatest_floor(floors, spec.tombstone_schema.empty_table(), spec)
        self._stack = ExitStack()
        self._inline: list[Rows] | None = []  # None: too many tombstones to be inline
        new_name, kind = (TableObjects.new_delta, "delta") if task.kept else (TableObjects.new_base, "base")
        self.live = DataFileWriter(
            store,
            partial(new_name, task.partition, task.start),
            spec.base_schema,
            footer(kind=kind),
            spec.stored_key,
        )
        self._tombstones = DataFileWriter(
            store,
            partial(TableObjects.new_tombstones, task.partition, task.start),
            spec.tombstone_schema.append(DELETED_AT) if task.forgets else spec.tombstone_schema,
            footer(kind="tombstones"),
            spec.stored_key,
        )
        self._history = DataFileWriter(
            store,
            partial(TableObjects.new_history, task.partition, task.start),
            spec.history_schema,
            footer(kind="history"),
            (),
        )
        self._quarantine = DataFileWriter(
            store, partial(TableObjects.new_quarantine, task.start), QUARANTINE_SCHEMA, footer(kind="quarantine"), ()
        )

    def __enter__(self) -> "MergeWriter":
        self._stack.enter_context(self.live)
        self._stack.enter_context(self._tombstones)
        self._stack.enter_context(self._quarantine)
        self._stack.enter_context(self._history)
        for file in self._task.folded:
            for block in stream_file(self._store, file, self._history.schema, spec=self._spec):
                self._history.write(block)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def write(self, rows: Rows, winners: Column, known: Mask | None = None) -> None:
        """Write the rows at the indices ``winners``, in that order.

        ``rows`` has the stored columns and `DELETE_FLAG`, and `DELETED_AT` if the task forgets tombstones. If the task refuses
        rows, it has `AGE`, `FILE` and `PLACE` too, and ``known`` says for each winner whether the table stores something under
        its key.
        """
        if known is not None and (late := self._late(rows, winners, known)).any():
            self._refuse(rows.take(winners.filter(pa.array(late))))
            winners = winners.filter(pa.array(~late))
        deleted = rows[DELETE_FLAG].take(winners)
        self._bury(rows.select(self._tombstones.schema.names).take(winners.filter(deleted)))
        self.live.write(rows.select(self.live.schema.names).take(winners.filter(pc.invert(deleted))))

    def keep_past(self, rows: Rows, order: Column, wins: Column, known: Mask | None = None) -> None:
        """Write superseded versions to the history, given all rows of some keys in the order of `rank.sort_by_rank`.

        Among rows with one ordering value only the greatest was ever a version. A winning delete that ends a version is written
        too, so readers of the history need no tombstones. ``known`` is as in `write`; a refused key has no history.
        """
        if not rows.num_rows:
            return
        wins, deleted = as_mask(wins), as_mask(rows[DELETE_FLAG].take(order))
        of_key = np.cumsum(wins) - 1
        ends = any_per_key(wins, ~wins & ~deleted)[of_key]
        if self._task.floors or self._task.forgets:  # a forgotten key may have versions
            ends |= rows[AGE].take(order).to_numpy() > 0
        goes = mark_versions(rows, self._spec, order, wins) & (~wins | (deleted & ends))
        if known is not None:
            goes &= ~self._late(rows, order.filter(pa.array(wins)), known)[of_key]
        self._put_past(rows.take(order.filter(pa.array(goes))))

    def keep_lacking(self, rows: Rows, killed_by: Indices) -> None:
        """Write what full extracts delete to the history, given all rows of keys; ``killed_by`` as of `floor.find_missing_keys`.

        The live version, or the known delete, ends at the extract's greatest order. Other rows had been superseded before.
        """
        ages = rows[AGE].to_numpy()
        for number, (age, floor) in enumerate(self._task.full):
            present = (ages < age) & ((killed_by < 0) | (killed_by >= number))
            earlier = rows.filter(pa.array(present))
            order, wins = sort_by_rank(earlier, self._spec, (AGE, FILE, PLACE))
            dead, wins = (killed_by[present] == number)[order.to_numpy()], as_mask(wins)
            void = (
                find_forgotten(earlier, self._task.forgets, age)
                if self._task.forgets
                else np.zeros(earlier.num_rows, bool)
            )
            self._put_past(earlier.take(order.filter(pa.array(dead & mark_versions(earlier, self._spec, order, wins)))))
            ends = earlier.take(order.filter(pa.array(dead & wins & ~void[order.to_numpy()])))
            for name, value in {AGE: age, DELETE_FLAG: True, **floor_values(floor, self._spec)}.items():
                at = ends.schema.get_field_index(name)
                column = pa.repeat(pa.scalar(value, ends.schema.field(at).type), ends.num_rows)
                ends = ends.set_column(at, ends.schema.field(at), column)
            self._put_past(ends)

    def _put_past(self, rows: Rows) -> None:
        numbers = pa.array(self._task.numbers, pa.int64())
        self._history.write(rows.append_column(BATCH, numbers.take(rows[AGE].combine_chunks())))

    def _late(self, rows: Rows, winners: Column, known: Mask) -> Mask:
        """Which winners are refused. A delete is refused too: its tombstone would make a key known again below the floor."""
        if known.all():
            return ~known
        # A full extract's own rows are never refused: they exist at the source, however old they are.
        extracts = pa.array([age for age, _ in self._task.full], pa.int32())
        late: Mask = ~known & ~as_mask(pc.is_in(rows[AGE].take(winners), extracts))
        late[late] = find_below(rows.take(winners.filter(pa.array(late))), self._task.floors, self._spec)
        return late

    def _refuse(self, rows: Rows) -> None:
        self._refused.add(rows)
        self._tally.refused(as_mask(rows[DELETE_FLAG]))
        columns = {name: rows[name].combine_chunks() for name in self._spec.stored_schema.names}
        for name, value in partition_scalars(self._spec, self._task.partition).items():
            columns[name] = pa.repeat(value, rows.num_rows)
        block = ArrowBlock(columns, rows[PLACE].to_numpy())
        every = range(rows.num_rows)
        sources = [self._task.sources[age - 1] for age in rows[AGE].to_pylist()]
        reason = (
            "Nothing is known of its key, and its order is below what the table has forgotten, or a full extract had."
        )
        refused = {
            "reason_code": ["below_floor"] * rows.num_rows,
            "reason": [reason] * rows.num_rows,
            "file": [paths[file] for (_, paths), file in zip(sources, rows[FILE].to_pylist(), strict=True)],
            "position": rows[PLACE],
            "raw": block.raw(every),
            "arrow": block.arrow(every),
            "batch": [batch for batch, _ in sources],
        }
        self._quarantine.write(pa.table(refused, schema=QUARANTINE_SCHEMA))

    def _bury(self, tombstones: Rows) -> None:
        forgets = self._task.forgets
        if forgets is not None and tombstones.num_rows:
            deleted_at = pc.fill_null(tombstones[DELETED_AT.name], forgets.dropped_before)  # unknown: not old
            is_old = pc.less(deleted_at, forgets.dropped_before)
            old, tombstones = tombstones.filter(is_old), tombstones.filter(pc.invert(is_old))
            if old.num_rows:
                self._dropped.add(old)
                self._floor = greatest_floor([self._floor] if self._floor else [], old, self._spec)
            if tombstones.num_rows:
                least = pc.min(pc.fill_null(tombstones[DELETED_AT.name], 0)).as_py()
                self._since = least if self._since is None else min(self._since, least)
        if self._inline is not None:
            self._inline.append(tombstones)
            if sum(t.nbytes for t in self._inline) <= INLINE_BYTES:
                return
            tombstones, self._inline = pa.concat_tables(self._inline), None
        self._tombstones.write(tombstones)

    def output(
        self,
        superseded: int,
        superseded_digest: str = NO_ROWS,
        adopted: str | None = None,
        positions: Sequence[Indices] = (),
    ) -> MergeOutput:
        """After the block: what was written. ``positions`` has, for each file in ``kept``, those of the rows that lost."""
        files = [TombstoneFile(**msgspec.structs.asdict(f), since=self._since) for f in self._tombstones.files]
        rows = pa.concat_tables([self._tombstones.schema.empty_table(), *(self._inline or [])])
        if rows.num_rows:
            inline, task = to_bytes(rows.combine_chunks()), self._task
            files.append(
                TombstoneFile(
                    name="",
                    rows=rows.num_rows,
                    bytes=len(inline),
                    inline=inline,
                    bucket=task.bucket,
                    bits=task.bits,
                    since=self._since,
                )
            )
        new_vectors = partial(TableObjects.new_vectors, self._task.partition, self._task.start)
        kept = mark_deleted(self._store, self._task.kept, positions, new_vectors) if self._task.kept else ()
        return MergeOutput(
            tuple(self.live.files),
            tuple(files),
            superseded,
            superseded_digest,
            adopted,
            tuple(kept),
            dropped=self._dropped.rows,
            dropped_digest=str(self._dropped),
            refused=self._refused.rows,
            refused_digest=str(self._refused),
            floor=self._floor,
            quarantine=tuple(file.name for file in self._quarantine.files),
            changes=self._tally.changes(),
            history=(*self._task.history, *self._history.files),
        )
