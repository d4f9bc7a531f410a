"""Engine arrow: both strategies in this process. The base streams by in key order and meets the few incoming rows.

The base has one row per key and is sorted by key, so it needs no window. For a block of the base and the incoming rows in its
key range, key and ordering columns alone decide; the payload is moved and never looked at.
If more rows come than a worker has memory to sort, they are settled in parts by key hash, and the parts merged by key.
Strategy rewrite merges the incoming rows into the base. Strategy delta reads only key and ordering columns, and of these only
row groups that may hold an incoming key; it records the positions of rows that lose.
Memory: the incoming rows of the bucket, or a part of them and all of them compressed; one block of the base; key and order of
rows that lose.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import chain

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.attempts import attempt
from lakeupsert.engine.cut import Cuts, CutTask, columns_of, cut
from lakeupsert.engine.merge import AGE, Merged, MergeOutput, MergeTask
from lakeupsert.engine.merge_writer import Block, MergeWriter, without_erased
from lakeupsert.engine.resolve import Resolved, Rules, one_per_key, rank, resolve_together
from lakeupsert.engine.runs import runs
from lakeupsert.landing.adopted import stream_adopted
from lakeupsert.rows.arrays import Hashes, Indices, Rows, repeat
from lakeupsert.rows.buckets import buckets, cut_into_pieces, in_bucket, key_hashes
from lakeupsert.rows.changes import Tally, content_comparison
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.datafiles import EXPANSION, POSITION, ROW_GROUP_BYTES, decoded_width, stream_file
from lakeupsert.rows.digest import Digest, digests
from lakeupsert.rows.rank import sort_by_key, sortable
from lakeupsert.rows.streams import RUN_ROWS, KeyOrdered, compress, decompress, in_key_order
from lakeupsert.rows.vectors import deleted_positions
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import Bucketed, DataFile, share
from lakeupsert.table.spec import DELETE_FLAG, FILE, PLACE, TableSpec

PEAK = 3.5
"""Peak memory of sorting incoming rows, as a multiple of their decoded bytes (ADR 0012)."""
BLOCKS_BYTES = 256 << 20
"""Memory for the blocks of a base, from reading to writing, if there are more than one or two."""
MOST_PART_BITS = 6
"""Incoming rows are settled in at most 2^so many parts."""
RUN_EXPANSION = 2
"""Bytes of a compressed part in memory for each byte of its files."""
SHARED_BYTES = 4 << 20
"""A file of at most so many bytes stays in memory if it has rows for several tasks of a call; `SHARED_TOTAL` bytes of them."""
SHARED_TOTAL = 16 << 20
TOGETHER_ROWS = 1 << 14
"""Rows of small files that are compared with the incoming rows in one call: one by one, the calls cost more than the rows."""

_DELETED, _FILE, _PLACE = pa.field(DELETE_FLAG, pa.bool_()), pa.field(FILE, pa.int32()), pa.field(PLACE, pa.int64())
_AGE = pa.field(AGE, pa.int32())
"""Decides between equal ordering values."""
_RANKS = pa.schema([_DELETED, _FILE, _PLACE, _AGE])


class ArrowEngine:
    """See `lakeupsert.engine.merge.Engine`."""

    name = "arrow"
    partitions_per_call = 8
    shares_units = True

    def __init__(self, memory_limit: int | None = None) -> None:
        self.memory_limit = memory_limit

    def memory_of(self, spec: TableSpec, task: MergeTask) -> int:
        return self._memory_of(spec, task, self._part_bits(spec, task))

    def _part_bits(self, spec: TableSpec, task: MergeTask) -> int:
        """In how many parts, 2^bits, the incoming rows must be settled to fit into memory."""
        if self.memory_limit is None or task.kept or Rules(spec, task).needs_versions:
            return 0
        bits = range(MOST_PART_BITS)
        return next((n for n in bits if self._memory_of(spec, task, n) <= self.memory_limit), MOST_PART_BITS)

    @staticmethod
    def _memory_of(spec: TableSpec, task: MergeTask, part_bits: int) -> int:
        stored, adopted = ((*task.kept, *task.base), ()) if task.settled else ((), task.base)
        incoming = [f for files in (adopted, task.deltas, task.tombstones, *task.batches) for f in files]
        width = sum(decoded_width(type_) for type_ in (*spec.base_schema.types, *_RANKS.types))

        def whole(file: DataFile) -> int:
            return max(EXPANSION * file.bytes, width * file.rows)

        def decoded(files: Sequence[DataFile]) -> float:
            return sum(whole(f) * share(f, task) for f in files)

        met = 0.0
        if not spec.settles_early and task.kept:  # each incoming row brings the whole stored row of its key
            rows = sum(f.rows * share(f, task) for f in incoming)
            met = rows * decoded(task.kept) / max(1, sum(f.rows * share(f, task) for f in task.kept))
        parts = 1 << part_bits
        runs = RUN_EXPANSION * sum(f.bytes * share(f, task) for f in incoming) if part_bits else decoded(incoming)
        sorting = PEAK * (decoded(incoming) + met) / parts + (runs if part_bits else 0)
        blocks = min(BLOCKS_BYTES, int(PEAK * decoded(stored)))
        read_ahead = max((f.bytes for f in stored), default=0)
        # A block of rows of other buckets, and small files of which other tasks need rows.
        others = min(ROW_GROUP_BYTES + EXPANSION * SHARED_TOTAL, sum(whole(f) for f in incoming if share(f, task) < 1))
        streaming = runs + blocks + read_ahead  # the base streams only after incoming rows are sorted
        return int(max(sorting, streaming) + others)

    def merge(self, store: ObjectStore, spec: TableSpec, spec_version: int, tasks: Sequence[MergeTask]) -> Merged:
        shared = _SharedFiles(spec)
        merges = [_Merge(store, spec, spec_version, task, shared, self._part_bits(spec, task)) for task in tasks]
        ranked = ((merge, attempt(_Merge.rank, merge)) for merge in merges)
        most = TOGETHER_ROWS if spec.mode == "columns" else -1  # no other mode gains by it
        together = runs(ranked, lambda pair: pair[1].rows.num_rows if isinstance(pair[1], Resolved) else 0, most)
        outputs = [*chain.from_iterable(_finish(spec, run) for run in together)]
        superseded = digests([merge.lost for merge in merges], spec)
        return [
            output if isinstance(output, Exception) else replace(output, superseded_digest=digest)
            for output, digest in zip(outputs, superseded, strict=True)
        ]

    def cut(self, store: ObjectStore, spec: TableSpec, spec_version: int, tasks: Sequence[CutTask]) -> Cuts:
        return [attempt(partial(cut, store, spec, spec_version, self.memory_limit), task) for task in tasks]


class _SharedFiles:
    """Small files of which several tasks of a call need some rows: each is read once."""

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self._held: dict[DataFile, tuple[Rows, Hashes]] = {}

    def within(self, part: Bucketed, file: DataFile, read: Callable[[DataFile], Iterator[Rows]]) -> Iterator[Rows]:
        """The rows of a file that are in a bucket."""
        if share(file, part) == 1 or file.bytes > SHARED_BYTES:
            yield from (in_bucket(block, file, part, self._spec) for block in read(file))
            return
        if file not in self._held:
            blocks = list(read(file))
            if not blocks:
                return
            rows = pa.concat_tables(blocks)
            self._held[file] = rows, key_hashes(rows, self._spec)
            while sum(held.bytes for held in self._held) > SHARED_TOTAL:
                del self._held[next(iter(self._held))]
        rows, hashes = self._held[file]
        yield rows.filter(pa.array(buckets(hashes, part.bits) == part.bucket))


class _Merge:
    """One task. ``lost`` collects key and ordering columns of the rows that lose."""

    def __init__(
        self,
        store: ObjectStore,
        spec: TableSpec,
        spec_version: int,
        task: MergeTask,
        shared: _SharedFiles,
        part_bits: int,
    ) -> None:
        self.lost: list[Rows] = []
        self._store, self._spec, self._spec_version, self._task = store, spec, spec_version, task
        self._shared, self._part_bits = shared, part_bits
        self.rules = Rules(spec, task)
        self._begins = self._number = np.empty(0, np.int64)
        self._stored: list[Indices] = []
        self._tally = Tally()
        self._adopted = Digest(spec)

    def run(self, found: Resolved | None) -> MergeOutput:
        return self._rewrite() if found is None else self._delta(found)

    def _writer(self) -> MergeWriter:
        return MergeWriter(self._store, self._spec, self._spec_version, self._task, self.rules, self._tally)

    def _rewrite(self) -> MergeOutput:
        spec, task, rules = self._spec, self._task, self.rules
        settled = not rules.needs_versions
        rest = self._in_key_order()
        with self._writer() as out:
            for file in task.base if task.settled else ():
                for block in stream_file(self._store, file, spec.base_schema, spec=spec):
                    stored = self._without_erased(in_bucket(block, file, task, spec))
                    if not stored.num_rows:
                        continue
                    met = rest.up_to([stored[name][-1] for name in spec.stored_key])
                    if not met.num_rows and not rules.judges_all:
                        out.live.write(stored)
                        continue
                    keys = {name: sortable(met[name]).combine_chunks() for name in spec.stored_key}
                    # Full extracts also change keys that do not arrive.
                    block = None if rules.judges_all else Block(stored, np.flatnonzero(as_mask(is_near(stored, keys))))
                    near = stored.take(block.ranked) if block else stored
                    both = _concat([add_ranks(near, age=0, deleted=False), met])
                    self._write(out, rank(both, spec, len(near) if block else 0), block, again=settled)
            for rows in rest.rest():
                if settled:  # and accounted for
                    out.write(rules.resolve(one_per_key(rows)))
                else:  # all at once: a key has several rows
                    self._write(out, rank(rows, spec))
        return out.output(sum(map(len, self.lost)), adopted=None if task.settled else str(self._adopted))

    def _in_key_order(self) -> KeyOrdered:
        """The incoming rows in key order: if no rule needs all versions, what they come to among themselves."""
        key = self._spec.stored_key
        if not self._part_bits:
            return KeyOrdered(iter([self._settle(list(self._arriving()))]), key)
        runs = [compress(self._settle(part), RUN_ROWS >> self._part_bits) for part in self._parts()]
        schema = pa.ipc.open_stream(runs[0]).schema
        batches = in_key_order([decompress(run) for run in runs], key)
        return KeyOrdered(chain([schema.empty_table()], (pa.Table.from_batches([batch]) for batch in batches)), key)

    def _parts(self) -> Iterator[list[Rows]]:
        """The incoming rows in parts by key hash. Those of later parts are in memory compressed."""
        parts: list[list[bytes]] = [[] for _ in range(1 << self._part_bits)]
        for rows in self._arriving():
            for blocks, piece in zip(
                parts, cut_into_pieces(rows, self._task, self._part_bits, self._spec), strict=True
            ):
                if piece.num_rows:
                    blocks.append(compress(piece))
        for blocks in parts:
            tables = [pa.Table.from_batches(decompress(block)) for block in blocks]
            blocks.clear()
            yield tables

    def _settle(self, tables: list[Rows]) -> Rows:
        spec, rules = self._spec, self.rules
        incoming = self._together(tables)
        if rules.needs_versions:
            return incoming.take(sort_by_key(incoming, spec.stored_key))
        found = rules.settle(rank(incoming, spec))
        self._account(found)
        return found.take(found.winners, found.rows.schema.names, shared=True)

    def rank(self) -> Resolved | None:
        """Strategy delta: the incoming rows and the stored ones of their keys, ranked. None with strategy rewrite."""
        spec, task = self._spec, self._task
        if not task.kept:
            return None
        incoming = self._together(list(self._arriving()))
        self._begins = np.cumsum([0, *(file.rows for file in task.kept)])
        self._stored = [deleted_positions(self._store, file).astype(np.int64) for file in task.kept]
        met, self._number = self._met(self._begins, incoming, self._stored)
        both = pa.concat_tables([met, incoming.select(met.schema.names)])
        return rank(both, spec, kept_rows=met.num_rows, payload=incoming)

    def _delta(self, found: Resolved) -> MergeOutput:
        begins = self._begins
        with self._writer() as out:
            self._account(found)
            out.write(found)
        dead = np.sort(self._number[found.order[found.superseded]])
        ends = np.searchsorted(dead, begins)
        lost = [dead[ends[i] : ends[i + 1]] - begins[i] for i in range(len(self._task.kept))]
        positions = [np.concatenate(pair) for pair in zip(self._stored, lost, strict=True)]
        return out.output(sum(map(len, self.lost)), positions=positions)

    def _met(self, begins: Indices, incoming: Rows, stored: Sequence[Indices]) -> tuple[Rows, Indices]:
        """Deciding columns of the stored rows that may have the key of an incoming row, and the number of each.

        Rows of all kept files are numbered consecutively; ``begins`` has the first number of each file, and ``stored`` the
        positions in its vector. A row is included if the value of every key column occurs there in an incoming row. Values
        of a key with several columns may all occur in different rows, so the key's hash must occur too.
        """
        spec, files = self._spec, self._task.kept
        schema = spec.deciding_schema if spec.settles_early else spec.base_schema
        schema = schema.append(pa.field(POSITION, pa.int64()))
        keys = {name: sortable(incoming[name]).combine_chunks() for name in spec.stored_key}
        hashes = key_hashes(incoming, spec) if len(keys) > 1 else None
        # Superseded rows are dropped from the few candidates, not from all rows.
        dead = pa.array(np.concatenate([of_file + begin for of_file, begin in zip(stored, begins, strict=False)]))
        tables = [schema.empty_table()]
        streams = (
            stream_file(self._store, msgspec.structs.replace(file, deleted=None), schema, keys, begin, spec)
            for file, begin in zip(files, begins, strict=False)
        )
        for run in runs(chain.from_iterable(streams), lambda rows: rows.num_rows, TOGETHER_ROWS):
            rows = pa.concat_tables(run)
            places = pc.indices_nonzero(is_near(rows, keys))
            if len(dead):
                places = places.filter(pc.invert(pc.is_in(rows[POSITION].take(places), dead)))
            if hashes is not None:
                few = rows.select(spec.stored_key).take(places)
                places = places.filter(pa.array(np.isin(key_hashes(few, spec), hashes)))
            tables.append(rows.take(places))
        met = pa.concat_tables(tables)
        return add_ranks(met.drop_columns(POSITION), age=0, deleted=False), met[POSITION].to_numpy()

    def _arriving(self) -> Iterator[Rows]:
        """Adopted rows, deltas, tombstones and appended rows of the bucket, with every version of a key that they have."""
        store, spec, task = self._store, self._spec, self._task

        def stream(columns: pa.Schema, file: DataFile) -> Iterator[Rows]:
            return stream_file(store, file, columns, spec=spec)

        for number, file in enumerate(() if task.settled else task.base):
            read = partial(stream_adopted, store, spec=spec, partition=task.partition, number=number)
            for rows in self._within(file, partial(stream, columns_of(spec, "adopted")) if task.cut else read):
                self._adopted.add(rows)
                yield self._without_erased(rows)
        for file in task.deltas:
            yield from map(self._without_erased, self._within(file, partial(stream, spec.base_schema)))
        for file in task.tombstones:
            for rows in stream_file(store, file, self.rules.with_times(spec.base_schema)):
                dead = self._without_erased(in_bucket(rows, file, task, spec))
                if not task.settled:
                    self._adopted.add(dead)
                yield add_ranks(dead, age=0, deleted=True)
        for age, files in enumerate(task.batches, start=1):
            for file in files:
                yield from self._within(file, partial(stream, spec.arriving_schema), age)

    def _without_erased(self, rows: Rows) -> Rows:
        left, erased = without_erased(self._task, rows, self._spec)
        if erased.num_rows:
            self.lost.append(erased.select(self._spec.tombstone_schema.names))
        return left

    def _within(self, file: DataFile, read: Callable[[DataFile], Iterator[Rows]], age: int = 0) -> Iterator[Rows]:
        """The rows of a file that are in the bucket, with every column that ranks them."""
        for rows in self._shared.within(self._task, file, read):
            yield add_ranks(rows, age=age, deleted=False)

    def _together(self, tables: list[Rows]) -> Rows:
        stored = self.rules.with_times(self._spec.base_schema)
        if stored is not self._spec.base_schema or not tables:
            tables.append(add_ranks(stored.empty_table(), age=0, deleted=False))
        return self.rules.add_times(_concat(tables))

    def _write(self, out: MergeWriter, rows: Resolved, block: Block | None = None, *, again: bool = False) -> None:
        found = self.rules.resolve(rows)
        self._account(found, again=again)
        out.write(found, block)

    def _account(self, found: Resolved, *, again: bool = False) -> None:
        """Count what became of the keys, and keep the losers. ``again``: their incoming rows won in an earlier call."""
        rows, order = found.rows, found.order
        ages, deleted = rows[AGE].to_numpy(), as_mask(rows[DELETE_FLAG])
        if len(losers := found.losers):
            self.lost.append(rows.select(self._spec.tombstone_schema.names).take(pa.array(losers)))
        self._tally.lacking(ages[found.dead], deleted[found.dead])
        same = content_comparison(rows, self._spec)
        self._tally.meet(
            found.wins,
            ages[order],
            deleted[order],
            same and (lambda one, other: same(order[one], order[other])),
            None if found.uses is None else found.uses[order],
            again=again,
        )


def _finish(
    spec: TableSpec, run: list[tuple[_Merge, Resolved | Exception | None]]
) -> Iterator[MergeOutput | Exception]:
    given = [(merge.rules, found) for merge, found in run if isinstance(found, Resolved)]
    resolved = attempt(partial(resolve_together, spec), given)
    each = iter([] if isinstance(resolved, Exception) else resolved)
    for merge, found in run:
        if isinstance(found, Resolved):
            found = resolved if isinstance(resolved, Exception) else next(each)
        yield found if isinstance(found, Exception) else attempt(merge.run, found)


def is_near(rows: Rows, keys: Mapping[str, pa.Array]) -> pa.ChunkedArray:
    """Which rows may have the key of an incoming row: the value of every key column occurs in ``keys``."""
    return reduce(pc.and_, (pc.is_in(sortable(rows[name]), values) for name, values in keys.items()))


def _concat(tables: list[Rows]) -> Rows:
    """Tables of which some may lack columns."""
    lacks = len({table.num_columns for table in tables}) > 1
    return pa.concat_tables(tables, promote_options="default" if lacks else "none")


def add_ranks(rows: Rows, *, age: int, deleted: bool) -> Rows:
    """``rows`` with every column that ranks them, in one order. Columns that they already have keep their values."""
    defaults = {_DELETED.name: deleted, FILE: 0, PLACE: 0, _AGE.name: age}
    brought = [name for name in defaults if name in rows.schema.names]
    tagged = rows.drop_columns(brought) if brought else rows
    for field in _RANKS:
        column = rows[field.name] if field.name in brought else repeat(defaults[field.name], field.type, rows)
        tagged = tagged.append_column(field, column)
    return tagged
