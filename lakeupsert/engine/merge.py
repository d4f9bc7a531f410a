"""What phase two asks of an engine, and what it gets back. Engines agree row by row; see `arrow` and `spark`."""

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.quarantine import QUARANTINE_SCHEMA
from lakeupsert.landing.formats.blocks import ArrowBlock
from lakeupsert.rows.changes import Tally, of_keys
from lakeupsert.rows.convert import true
from lakeupsert.rows.datafiles import DataFileWriter, Footer, stream_file, to_bytes
from lakeupsert.rows.digest import Digest
from lakeupsert.rows.floor import DELETED_AT, Forgetting, below, forgotten, greatest, scalars
from lakeupsert.rows.rank import latest, versions
from lakeupsert.rows.vectors import with_deleted
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import TableObjects, partition_scalars
from lakeupsert.table.manifest import NO_CHANGES, NO_ROWS, Changes, DataFile, TombstoneFile
from lakeupsert.table.spec import BATCH, DELETE_FLAG, FILE, PLACE, TableSpec

AGE = "_lakeupsert_age"
"""Integer column of rows in a merge: 0 for a stored row, then 1, 2, … for the batches in ledger order."""
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
        floors: the greatest orders that the bucket forgot tombstones of (see `rows.floor`).
        forgets: which tombstones it forgets now; None: none.
        history, folded: files of superseded versions that stay, and those that are written anew with the versions to come.
        numbers: of tables with a history, the ledger numbers of what is stored and of each batch.
        full: ages and greatest orders of the batches that are full extracts: of keys that one lacks, what was there before
            dies up to that order. They have nothing that is kept.
        sources: of each batch its id and what its rows came from, for those that are below a floor; empty: none is refused.
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
        """Whether rows below a floor are refused, whose key nothing is stored of."""
        return bool(self.floors and self.sources)

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
        return sum(f.bytes for f in (*self.read, *self.folded))


@dataclass(frozen=True)
class MergeOutput:
    """What replaces the bucket: files in key order; how many rows lost to a greater one, and their digest.

    Attributes:
        written: new files of rows that live, a base or a delta as the task's strategy says.
        kept: those of the task that still have such rows, with their deletion vectors of now.
        adopted: the digest of all rows that were stored, where they had to be settled.
        dropped, refused: how many tombstones were forgotten, and rows refused, which lie in the objects ``quarantine``.
        floor: see `rows.floor.greatest`.
        changes: what became of the keys of the task's batches.
        history: all of the bucket's.
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
        """What it needs in the store."""
        files = (*self.kept, *self.written, *self.tombstones, *self.history)
        return {*self.quarantine, *(name for file in files for name in file.objects)}


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
    """Where an engine puts winners, in key order: live rows into base or delta files, deletes into tombstone files.

    ``tally`` counted them, but for those that are refused here.
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
            self._floor = greatest(floors, spec.tombstone_schema.empty_table(), spec)
        self._stack = ExitStack()
        self._few: list[Any] | None = []  # None: they were too many
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

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def write(self, rows: Any, winners: Any, known: Any = None) -> None:
        """Those of ``rows`` whose indices are ``winners``, in that order.

        ``rows`` has the stored columns and `DELETE_FLAG`; where the task forgets, `DELETED_AT`; where it refuses, `AGE`, `FILE`
        and `PLACE`, and ``known`` (numpy, a boolean for each winner) tells of whose keys something is stored.
        """
        if known is not None and (late := self._late(rows, winners, known)).any():
            self._refuse(rows.take(winners.filter(pa.array(late))))
            winners = winners.filter(pa.array(~late))
        deleted = rows[DELETE_FLAG].take(winners)
        self._bury(rows.select(self._tombstones.schema.names).take(winners.filter(deleted)))
        self.live.write(rows.select(self.live.schema.names).take(winners.filter(pc.invert(deleted))))

    def keep_past(self, rows: Any, order: Any, wins: Any, known: Any = None) -> None:
        """Put what is superseded into the history: of all rows of some keys, as `rank.latest` puts them into order.

        Of rows with one ordering value the greatest alone was ever a version. A delete that wins goes there, too, where it ends
        one; so who reads the history needs no tombstones. ``known`` is as in `write`: of a key that is refused there is nothing.
        """
        if not rows.num_rows:
            return
        wins, deleted = true(wins), true(rows[DELETE_FLAG].take(order))
        of_key = np.cumsum(wins) - 1
        ends = of_keys(wins, ~wins & ~deleted)[of_key]
        if self._task.floors or self._task.forgets:  # a key of which nothing is known any more may have versions
            ends |= rows[AGE].take(order).to_numpy() > 0
        goes = versions(rows, self._spec, order, wins) & (~wins | (deleted & ends))
        if known is not None:
            goes &= ~self._late(rows, order.filter(pa.array(wins)), known)[of_key]
        self._put_past(rows.take(order.filter(pa.array(goes))))

    def keep_lacking(self, rows: Any, killed_by: Any) -> None:
        """Put what full extracts delete into the history: of all rows of some keys, ``killed_by`` as `floor.lacking` tells.

        The one that lived, or was known to be deleted, ends at the extract's greatest order; others had been superseded before.
        """
        ages = rows[AGE].to_numpy()
        for number, (age, floor) in enumerate(self._task.full):
            there = (ages < age) & ((killed_by < 0) | (killed_by >= number))
            came = rows.filter(pa.array(there))
            order, wins = latest(came, self._spec, (AGE, FILE, PLACE))
            dead, wins = (killed_by[there] == number)[order.to_numpy()], true(wins)
            void = forgotten(came, self._task.forgets, age) if self._task.forgets else np.zeros(came.num_rows, bool)
            self._put_past(came.take(order.filter(pa.array(dead & versions(came, self._spec, order, wins)))))
            ended = came.take(order.filter(pa.array(dead & wins & ~void[order.to_numpy()])))
            for name, value in {AGE: age, DELETE_FLAG: True, **scalars(floor, self._spec)}.items():
                at = ended.schema.get_field_index(name)
                column = pa.repeat(pa.scalar(value, ended.schema.field(at).type), ended.num_rows)
                ended = ended.set_column(at, ended.schema.field(at), column)
            self._put_past(ended)

    def _put_past(self, rows: Any) -> None:
        numbers = pa.array(self._task.numbers, pa.int64())
        self._history.write(rows.append_column(BATCH, numbers.take(rows[AGE].combine_chunks())))

    def _late(self, rows: Any, winners: Any, known: Any) -> Any:
        """Which winners (numpy) are refused. Deletes are, too: the key would be known by one that is below what was forgotten."""
        if known.all():
            return ~known
        # What a full extract has is there, however old it is.
        extracts = pa.array([age for age, _ in self._task.full], pa.int32())
        late = ~known & ~true(pc.is_in(rows[AGE].take(winners), extracts))
        late[late] = below(rows.take(winners.filter(pa.array(late))), self._task.floors, self._spec)
        return late

    def _refuse(self, rows: Any) -> None:
        self._refused.add(rows)
        self._tally.refused(true(rows[DELETE_FLAG]))
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

    def _bury(self, tombstones: Any) -> None:
        forgets = self._task.forgets
        if forgets is not None and tombstones.num_rows:
            deleted_at = pc.fill_null(tombstones[DELETED_AT.name], forgets.dropped_before)  # not known: not old
            is_old = pc.less(deleted_at, forgets.dropped_before)
            old, tombstones = tombstones.filter(is_old), tombstones.filter(pc.invert(is_old))
            if old.num_rows:
                self._dropped.add(old)
                self._floor = greatest([self._floor] if self._floor else [], old, self._spec)
            if tombstones.num_rows:
                least = pc.min(pc.fill_null(tombstones[DELETED_AT.name], 0)).as_py()
                self._since = least if self._since is None else min(self._since, least)
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
        files = [TombstoneFile(**msgspec.structs.asdict(f), since=self._since) for f in self._tombstones.files]
        few = pa.concat_tables([self._tombstones.schema.empty_table(), *(self._few or [])])
        if few.num_rows:
            inline = to_bytes(few.combine_chunks())
            task = self._task
            few_file = TombstoneFile(
                name="", rows=few.num_rows, bytes=len(inline), inline=inline, bucket=task.bucket, bits=task.bits
            )
            files.append(msgspec.structs.replace(few_file, since=self._since))
        new_vectors = partial(TableObjects.new_vectors, self._task.partition, self._task.start)
        kept = with_deleted(self._store, self._task.kept, positions, new_vectors) if self._task.kept else ()
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
