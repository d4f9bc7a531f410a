"""Engine arrow: both strategies in this process. The base streams by in key order and meets the few incoming rows.

The base has one row per key and is sorted by key, so it needs no window. For a block of the base and the incoming rows in its
key range, key and ordering columns alone decide; the payload is moved and never looked at.
Strategy rewrite merges the incoming rows into the base. Strategy delta reads only key and ordering columns, and of these only
row groups that may hold an incoming key; it records the positions of rows that lose.
Memory: the incoming rows of the bucket, one block of the base, and key and order of rows that lose. An adopted partition is in
memory as a whole, once.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.merge import AGE, MergeOutput, MergeTask, MergeWriter
from lakeupsert.landing.adopted import read_adopted
from lakeupsert.rows.arrays import Column, Indices, Mask, Rows
from lakeupsert.rows.buckets import in_bucket, key_hashes
from lakeupsert.rows.changes import Tally, any_per_key, content_comparison
from lakeupsert.rows.columns import combine_columns
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.datafiles import POSITION, read_file, stream_file
from lakeupsert.rows.digest import Digest, digests
from lakeupsert.rows.floor import DELETED_AT, add_deletion_times, find_missing_keys
from lakeupsert.rows.rank import count_rows_up_to, sort_by_key, sort_by_rank, sortable
from lakeupsert.rows.vectors import deleted_positions
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import DataFile, share
from lakeupsert.table.spec import DELETE_FLAG, FILE, PLACE, TableSpec

PEAK = 3.5
"""Peak memory of sorting incoming rows, as a multiple of their decoded bytes (ADR 0012)."""
EXPANSION = 3
"""Decoded bytes for each compressed byte, if the schema does not give a column's width. ADR 0012 has data where it is more."""
TEXT_BYTES = 16
"""Minimum decoded bytes of a value whose type has no fixed width."""
BLOCKS_BYTES = 256 << 20
"""Memory for the blocks of a base, from reading to writing, if there are more than one or two."""
TOGETHER_ROWS = 1 << 14
"""Rows of small files that are compared with the incoming rows in one call."""

_DELETED, _FILE, _PLACE = pa.field(DELETE_FLAG, pa.bool_()), pa.field(FILE, pa.int32()), pa.field(PLACE, pa.int64())
_AGE = pa.field(AGE, pa.int32())
"""Decides between equal ordering values."""
_KNOWN = "_lakeupsert_known"
"""Boolean column of settled incoming rows: the table stores something under this key. Null in stored rows."""
_TIES = (AGE, FILE, PLACE)
_RANKS = pa.schema([_DELETED, _FILE, _PLACE, _AGE])


def _width(type_: pa.DataType) -> int:
    """Decoded bytes of a value."""
    try:
        return int(type_.bit_width + 7) // 8
    except ValueError:
        return TEXT_BYTES


class ArrowEngine:
    """See `lakeupsert.engine.merge.Engine`."""

    name = "arrow"
    partitions_per_call = 8
    shares_units = True

    def __init__(self, memory_limit: int | None = None) -> None:
        self.memory_limit = memory_limit

    def memory_of(self, spec: TableSpec, task: MergeTask) -> int:
        stored, adopted = ((*task.kept, *task.base), ()) if task.settled else ((), task.base)
        incoming = [f for files in (adopted, task.deltas, task.tombstones, *task.batches) for f in files]
        width = sum(_width(type_) for type_ in (*spec.base_schema.types, *_RANKS.types))

        def whole(file: DataFile) -> int:
            return max(EXPANSION * file.bytes, width * file.rows)

        def decoded(files: Sequence[DataFile]) -> float:
            return sum(whole(f) * share(f, task) for f in files)

        met = 0.0
        if not spec.settles_early and task.kept:  # each incoming row brings the whole stored row of its key
            rows = sum(f.rows * share(f, task) for f in incoming)
            met = rows * decoded(task.kept) / max(1, sum(f.rows * share(f, task) for f in task.kept))
        sorting = int(PEAK * (decoded(incoming) + met))
        blocks = min(BLOCKS_BYTES, int(PEAK * decoded(stored)))
        read_ahead = max((f.bytes for f in stored), default=0)
        # Rows of other buckets stay in memory until their file is read.
        others = max((whole(f) * (1 - share(f, task)) for f in incoming), default=0.0)
        streaming = decoded(incoming) + blocks + read_ahead  # the base streams only after incoming rows are sorted
        return int(max(sorting, streaming) + others)

    def merge(
        self, store: ObjectStore, spec: TableSpec, spec_version: int, tasks: Sequence[MergeTask]
    ) -> list[MergeOutput]:
        merges = [_Merge(store, spec, spec_version, task) for task in tasks]
        outputs = [merge.run() for merge in merges]
        superseded = digests([merge.lost for merge in merges], spec)
        return [replace(output, superseded_digest=d) for output, d in zip(outputs, superseded, strict=True)]


@dataclass(frozen=True)
class _Winners:
    """What some keys come to: the rows at the indices ``winners``, in key order.

    Attributes:
        known: for each winner, whether the table stores something under its key; None if the task refuses no rows.
    """

    rows: Rows
    winners: Column
    known: Mask | None


class _Merge:
    """One task. ``lost`` collects key and ordering columns of the rows that lose."""

    def __init__(self, store: ObjectStore, spec: TableSpec, spec_version: int, task: MergeTask) -> None:
        self.lost: list[Rows] = []
        self._store, self._spec, self._spec_version, self._task = store, spec, spec_version, task
        self._tally = Tally()
        self._adopted = Digest(spec)

    def run(self) -> MergeOutput:
        return self._delta() if self._task.kept else self._rewrite()

    def _writer(self) -> MergeWriter:
        return MergeWriter(self._store, self._spec, self._spec_version, self._task, self._tally)

    def _rewrite(self) -> MergeOutput:
        spec, task = self._spec, self._task
        incoming = self._incoming()
        # Which keys an extract deletes, and which it has, depends on all versions, so they meet the stored rows unsettled.
        unsettled = spec.history or bool(task.full)
        refuses = False
        if unsettled:
            rest = incoming.take(sort_by_key(incoming, spec.stored_key))
        else:
            found = self._settle(incoming)
            rest = found.rows.take(found.winners)
            if found.known is not None:
                refuses, rest = True, rest.append_column(_KNOWN, pa.array(found.known))
            del found
        del incoming
        with self._writer() as out:
            past = out if spec.history else None
            for file in task.base if task.settled else ():
                for block in stream_file(self._store, file, spec.base_schema, spec=spec):
                    stored = in_bucket(block, file, task, spec)
                    if not stored.num_rows:
                        continue
                    met = count_rows_up_to(rest, spec.stored_key, [stored[name][-1] for name in spec.stored_key])
                    if not met and not task.full:
                        out.live.write(stored)
                        continue
                    tables = [_add_ranks(stored, age=0, deleted=False), rest.slice(0, met)]
                    both = pa.concat_tables(tables, promote_options="default" if _has_more_columns(rest) else "none")
                    rest = rest.slice(met)
                    if task.full:
                        both = self._without_lacking(both, past)
                    self._write_winners(out, both, past, again=not unsettled)
            if unsettled:
                if task.full:
                    rest = self._without_lacking(rest, past)
                self._write_winners(out, rest, past)
            elif refuses or pc.any(rest[DELETE_FLAG]).as_py():
                every = pa.array(np.arange(rest.num_rows))
                out.write(rest, every, as_mask(rest[_KNOWN]) if refuses else None)
            else:
                out.live.write(rest)
        return out.output(self._lost_rows, adopted=None if task.settled else str(self._adopted))

    def _delta(self) -> MergeOutput:
        spec, task = self._spec, self._task
        incoming = self._incoming()
        begins = np.cumsum([0, *(file.rows for file in task.kept)])
        met, number = self._met(begins, incoming)
        both = pa.concat_tables([met, incoming.select(met.schema.names)])
        order, wins = sort_by_rank(both, spec, _TIES)
        losers = order.filter(pc.invert(wins))
        self.lost.append(both.select(spec.tombstone_schema.names).take(losers))
        winners = order.filter(wins)
        is_new = as_mask(pc.greater_equal(winners, met.num_rows))
        if spec.mode == "columns":
            rows, chosen, uses = combine_columns(both, spec, order, wins, _TIES)
            self._count(both, order, wins, uses)
            is_new = any_per_key(as_mask(wins), (uses & (np.arange(both.num_rows) >= met.num_rows))[order.to_numpy()])
            superseded, chosen = order.to_numpy()[is_new[np.cumsum(as_mask(wins)) - 1]], chosen.filter(pa.array(is_new))
        else:
            rows = incoming
            self._count(both, order, wins)
            superseded, chosen = losers.to_numpy(), pc.subtract(winners.filter(pa.array(is_new)), met.num_rows)
        superseded = superseded[superseded < met.num_rows]
        known = _known(both, order, wins) if task.refuses else None
        with self._writer() as out:
            out.write(rows, chosen, None if known is None else known[is_new])
            if spec.history:
                out.keep_past(both, order, wins, known)
        dead = np.sort(number[superseded])
        ends = np.searchsorted(dead, begins)
        positions = [dead[ends[i] : ends[i + 1]] - begins[i] for i in range(len(task.kept))]
        return out.output(self._lost_rows, positions=positions)

    @property
    def _lost_rows(self) -> int:
        return sum(rows.num_rows for rows in self.lost)

    def _met(self, begins: Indices, incoming: Rows) -> tuple[Rows, Indices]:
        """Deciding columns of the stored rows that may have the key of an incoming row, and the number of each.

        Rows of all kept files are numbered consecutively; ``begins`` has the first number of each file. A row is included if
        the value of every key column occurs there in an incoming row. Values of a key with several columns may all occur
        in different rows, so the key's hash must occur too.
        """
        spec, files = self._spec, self._task.kept
        schema = spec.deciding_schema if spec.settles_early else spec.base_schema
        schema = schema.append(pa.field(POSITION, pa.int64()))
        keys = {name: sortable(incoming[name]).combine_chunks() for name in spec.stored_key}
        near = next(iter(keys.items()))
        hashes = key_hashes(incoming, spec) if len(keys) > 1 else None
        # Superseded rows are dropped from the few candidates, not from all rows.
        superseded = [
            deleted_positions(self._store, f).astype(np.int64) + begin for f, begin in zip(files, begins, strict=False)
        ]
        dead = pa.array(np.concatenate(superseded))
        tables = [schema.empty_table()]
        streams = (
            stream_file(self._store, msgspec.structs.replace(file, deleted=None), schema, near, begin, spec)
            for file, begin in zip(files, begins, strict=False)
        )
        for rows in _concat_small(itertools.chain.from_iterable(streams)):
            is_near = [pc.is_in(sortable(rows[name]), values) for name, values in keys.items()]
            rows = rows.filter(reduce(pc.and_, is_near))
            if hashes is not None:
                rows = rows.filter(pa.array(np.isin(key_hashes(rows, spec), hashes)))
            tables.append(rows.filter(pc.invert(pc.is_in(rows[POSITION], dead))) if len(dead) else rows)
        met = pa.concat_tables(tables)
        return _add_ranks(met.drop_columns(POSITION), age=0, deleted=False), met[POSITION].to_numpy()

    def _incoming(self) -> Rows:
        """Tombstones, deltas, appended rows and adopted rows in one table, with every version of a key that they have."""
        store, spec, task = self._store, self._spec, self._task
        tables: list[Rows] = []
        for number, file in enumerate(() if task.settled else task.base):
            rows = read_adopted(store, file, spec, task.partition)
            rows = rows.append_column(_FILE, pa.repeat(pa.scalar(number, _FILE.type), rows.num_rows))
            rows = rows.append_column(_PLACE, pa.array(np.arange(rows.num_rows)))
            tables.append(self._own(rows, file, age=0))
            self._adopted.add(tables[-1])
        for file in task.deltas:
            tables.append(self._own(read_file(store, file, spec.base_schema, spec), file, age=0))
        stored = spec.base_schema.append(DELETED_AT) if task.forgets else spec.base_schema
        for file in task.tombstones:
            tables.append(self._own(read_file(store, file, stored), file, age=0, deleted=True))
        for age, files in enumerate(task.batches, start=1):
            for file in files:
                tables.append(self._own(read_file(store, file, spec.arriving_schema, spec), file, age=age))
        if not task.forgets:
            return pa.concat_tables(tables or [_add_ranks(stored.empty_table(), age=0, deleted=False)])
        tables.append(_add_ranks(stored.empty_table(), age=0, deleted=False))
        rows = pa.concat_tables(tables, promote_options="default")
        return add_deletion_times(rows, rows[AGE], task.forgets)

    def _own(self, rows: Rows, file: DataFile, *, age: int, deleted: bool = False) -> Rows:
        """The rows of a file that belong to the task's bucket, with every column that ranks them."""
        return _add_ranks(in_bucket(rows, file, self._task, self._spec), age=age, deleted=deleted)

    def _settle(self, rows: Rows, past: MergeWriter | None = None, *, again: bool = False) -> _Winners:
        """Find the winners. Losers go to `lost`, and to the history of ``past``.

        ``again``: the incoming rows are winners of an earlier call.
        """
        spec = self._spec
        order, wins = sort_by_rank(rows, spec, _TIES)
        winners = order.filter(wins)
        if len(winners) < rows.num_rows:
            self.lost.append(rows.select(spec.tombstone_schema.names).take(order.filter(pc.invert(wins))))
        if spec.mode == "columns":
            settled, chosen, uses = combine_columns(rows, spec, order, wins, _TIES)
            self._count(rows, order, wins, uses, again=again)
            return _Winners(settled, chosen, None)
        self._count(rows, order, wins, again=again)
        known = _known(rows, order, wins) if self._task.refuses else None
        if past is not None:
            past.keep_past(rows, order, wins, known)
        return _Winners(rows, winners, known)

    def _write_winners(self, out: MergeWriter, rows: Rows, past: MergeWriter | None, *, again: bool = False) -> None:
        found = self._settle(rows, past, again=again)
        out.write(found.rows, found.winners, found.known)

    def _count(self, rows: Rows, order: Column, wins: Column, uses: Mask | None = None, *, again: bool = False) -> None:
        """``uses`` marks rows that are part of what their key comes to; None: the winners."""
        places = order.to_numpy()
        ages, deleted = rows[AGE].to_numpy()[places], as_mask(rows[DELETE_FLAG])[places]
        same = content_comparison(rows, self._spec)
        self._tally.meet(
            as_mask(wins),
            ages,
            deleted,
            same and (lambda one, other: same(places[one], places[other])),
            None if uses is None else uses[places],
            again=again,
        )

    def _without_lacking(self, rows: Rows, past: MergeWriter | None) -> Rows:
        """``rows`` without those that a full extract deletes. These go to `lost`, and to the history of ``past``."""
        spec, task = self._spec, self._task
        order, wins = sort_by_rank(rows, spec, _TIES)
        ages = rows[AGE].to_numpy()
        killed_by = find_missing_keys(rows, order, wins, ages, task.full, spec, task.forgets)
        dead = killed_by >= 0
        if not dead.any():
            return rows
        self.lost.append(rows.select(spec.tombstone_schema.names).filter(pa.array(dead)))
        self._tally.lacking(ages[dead], as_mask(rows[DELETE_FLAG])[dead])
        if past is not None:
            past.keep_lacking(rows, killed_by)
        return rows.filter(pa.array(~dead))


def _concat_small(tables: Iterable[Rows]) -> Iterator[Rows]:
    """Small tables concatenated: comparing them one by one costs more for the calls than for the rows."""
    held: list[Rows] = []
    for table in tables:
        held.append(table)
        if sum(t.num_rows for t in held) >= TOGETHER_ROWS:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _add_ranks(rows: Rows, *, age: int, deleted: bool) -> Rows:
    """``rows`` with every column that ranks them, in one order. Columns that they already have keep their values."""
    defaults = {_DELETED.name: deleted, FILE: 0, PLACE: 0, _AGE.name: age}
    brought = [name for name in defaults if name in rows.schema.names]
    tagged = rows.drop_columns(brought) if brought else rows
    for field in _RANKS:
        column = (
            rows[field.name]
            if field.name in brought
            else pa.repeat(pa.scalar(defaults[field.name], field.type), rows.num_rows)
        )
        tagged = tagged.append_column(field, column)
    return tagged


def _known(rows: Rows, order: Column, wins: Column) -> Mask:
    """For each winner, in their order, whether the table stores something under its key."""
    stored = as_mask(pc.equal(rows[AGE], 0))
    if _KNOWN in rows.schema.names:
        stored |= as_mask(rows[_KNOWN])
    key = np.cumsum(as_mask(wins)) - 1
    known = np.zeros(len(wins) and key[-1] + 1, bool)
    known[key[stored[order.to_numpy()]]] = True
    return known


def _has_more_columns(rest: Rows) -> bool:
    """Whether incoming rows have columns that stored rows lack."""
    return not {_KNOWN, DELETED_AT.name}.isdisjoint(rest.schema.names)
