"""Writes what a merge comes to, the same for both engines: base, delta, tombstone, history and quarantine files."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.merge import AGE, MergeOutput, MergeTask
from lakeupsert.engine.quarantine import QUARANTINE_SCHEMA
from lakeupsert.engine.resolve import Resolved, Rules
from lakeupsert.landing.formats.blocks import ArrowBlock
from lakeupsert.rows.arrays import Indices, Rows
from lakeupsert.rows.changes import Tally
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.datafiles import from_bytes, stream_file, to_bytes
from lakeupsert.rows.digest import Digest
from lakeupsert.rows.filewriter import DataFileWriter, Footer
from lakeupsert.rows.floor import DELETED_AT, greatest_floor, is_among
from lakeupsert.rows.rank import sort_by_key
from lakeupsert.rows.statistics import StatisticsColumn, columns_with_statistics
from lakeupsert.rows.vectors import mark_deleted
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import FileKind, TableObjects, partition_scalars
from lakeupsert.table.manifest import NO_ROWS, TombstoneFile
from lakeupsert.table.spec import DELETE_FLAG, FILE, PLACE, TableSpec

INLINE_BYTES = 4 << 10
"""Tombstones of a partition stay in its manifest up to this many Arrow bytes. More: manifests grow, and every publish reads
them. Less: each merge of the partition writes one more file, and the next merge reads it."""


@dataclass(frozen=True)
class Block:
    """Rows of a base, in key order. The ones at the places ``ranked`` are the `Resolved.kept_rows`."""

    rows: Rows
    ranked: Indices


class MergeWriter(ExitStack):
    """Writes resolved rows in key order: live rows to base or delta files, deletes to tombstone files, versions to the history.

    Refused rows go to quarantine, and are taken out of ``tally``, which has counted them. Rows that full extracts lack and that
    stay are added to it.
    """

    def __init__(
        self, store: ObjectStore, spec: TableSpec, spec_version: int, task: MergeTask, rules: Rules, tally: Tally
    ) -> None:
        super().__init__()

        def writer(
            kind: FileKind, schema: pa.Schema, key: tuple[str, ...] = (), statistics: Sequence[StatisticsColumn] = ()
        ) -> DataFileWriter:
            place = task.partition, task.bucket, task.bits
            footer = Footer(spec.table_id, kind, str(task.up_to), spec_version, *place, len(spec.renames))
            new_name = partial(TableObjects.new, kind, task.start, None if kind == "quarantine" else task.partition)
            names = {} if kind in ("tombstones", "quarantine") else spec.names_written
            return DataFileWriter(store, new_name, schema, footer, key, names, statistics)

        self._store, self._spec, self._task, self._tally = store, spec, task, tally
        self._dropped, self._refused = Digest(spec), Digest(spec)
        floors = task.floors_after
        self._floor = greatest_floor(floors, spec.tombstone_schema.empty_table(), spec) if floors else None
        self._since: int | None = None
        self._inline: list[Rows] | None = []  # None: too many tombstones to be inline
        kind: FileKind = "delta" if task.kept else "base"
        self.live = writer(kind, spec.base_schema, spec.stored_key, columns_with_statistics(spec, 1 << task.bits))
        self._tombstones = writer("tombstones", rules.with_times(spec.tombstone_schema), spec.stored_key)
        self._history = writer("history", spec.history_schema)
        self._quarantine = writer("quarantine", QUARANTINE_SCHEMA)

    def __enter__(self) -> Self:
        for writer in (self.live, self._tombstones, self._quarantine, self._history):
            self.enter_context(writer)
        for file in self._task.folded:
            for block in stream_file(self._store, file, self._history.schema, spec=self._spec):
                self._history.write(without_erased(self._task, block, self._spec)[0])
        return self

    def write(self, found: Resolved, block: Block | None = None) -> None:
        """Write what some keys come to. ``block``: together with the other rows of a base, of which ``found`` has some."""
        for past in found.past:
            self._history.write(past)
        if len(refused := found.turned_away):
            self._refuse(found.take(refused, [*self._spec.stored_schema.names, DELETE_FLAG, AGE, FILE, PLACE]))
        written = found.winners[found.goes]
        [deleted] = found.take(written, [DELETE_FLAG], shared=True).columns
        dies = as_mask(deleted)
        if dies.any():
            self._bury(found.take(written[dies], self._tombstones.schema.names))
        live = written[~dies]
        if found.lacked is not None:
            self._tally.newer_than_extract(int(np.count_nonzero(found.lacked[live])))
        rows = found.take(live, self.live.schema.names, shared=True)
        keys = np.flatnonzero(found.goes)[~dies]
        self.live.write(_splice(block, found, rows, keys, self._spec.stored_key) if block else rows)

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
            "line": pa.nulls(rows.num_rows, pa.int64()),  # the landing file may be gone
            "raw": block.raw(every),
            "arrow": block.arrow(every),
            "batch": [batch for batch, _ in sources],
        }
        self._quarantine.write(pa.table(refused, schema=QUARANTINE_SCHEMA))

    def _bury(self, tombstones: Rows) -> None:
        forgets = self._task.forgets
        if forgets is not None:
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
        new_vectors = partial(TableObjects.new, "vectors", self._task.start, self._task.partition)
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
            changes=self._tally.changes(per_partition=self._spec.key_scope == "partition"),
            history=(*self._task.history, *self._history.files),
        )


def without_erased(task: MergeTask, rows: Rows, spec: TableSpec) -> tuple[Rows, Rows]:
    """The rows whose keys the task does not erase, and the others."""
    if not task.erased:
        return rows, rows.slice(0, 0)
    erased = pa.array(is_among(rows, from_bytes(task.erased), spec.stored_key))
    return rows.filter(pc.invert(erased)), rows.filter(erased)


def _splice(block: Block, found: Resolved, rows: Rows, keys: Indices, key: Sequence[str]) -> Rows:
    """The block in key order, with ``rows`` of these ``keys``, by number, instead of its rows that are superseded."""
    both = pa.concat_tables([block.rows, pa.Table.from_arrays(rows.columns, schema=block.rows.schema)])
    place_of = np.full(len(found.winners), -1)
    place_of[found.keys[found.superseded]] = gone = block.ranked[found.order[found.superseded]]
    at, new = place_of[keys], np.arange(block.rows.num_rows, both.num_rows)
    places = np.arange(block.rows.num_rows)
    places[gone] = -1
    places[at[at >= 0]] = new[at >= 0]
    places = np.append(places[places >= 0], new[at < 0])
    if (at < 0).any():  # keys are inserted
        places = places[sort_by_key(both.select(key).take(pa.array(places)), key)]
    return both.take(pa.array(places))
