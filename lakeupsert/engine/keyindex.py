"""The key index of a table whose keys are unique in the whole table: where the record of greatest rank of every key is.

Reads     the rows that a batch appended, and the index as of one ledger entry; to rebuild it, all rows that count there
Writes    the batch's changes of the index, the index with these changes in it, deletes for partitions that keys leave, and
          deletion vectors of appended files. Commits nothing: a ledger entry names all of it (`LedgerEntry.keys`, `.index`).
          While tasks of a host rebuild the index, packs that go from one task to another
Repeat    safe: objects have names of their own, and the same ledger gives the same answer

    appended rows -> spill by hash -> for each range: settle by rank -> look up in the index -> late, other partition: superseded
                                                                                          '-> won, other partition: delete there
    all rows -> spill, or on a host with tasks: packs in pieces -> for each range: settle by rank -> the index

A row of the index has the key columns and the ordering columns, no payload. Hashes only find candidates: rows are compared by
their keys, so two keys with the same hash stay two keys. A delete stays in the index, so that older records of its key stay
dead in every partition. `rank.sort_by_rank` decides which record wins, as everywhere.

A record that brings its key alone is appended without a partition (`landing.partitions.UNPLACED`). `placing` gives it one, and it
is written again, into a file of that partition. Its first file is in no ledger entry.

Memory: the rows of one range, and key and order of the keys that move; in mode columns, their whole rows. Ranges grow beyond
2^`MOST_BITS` of them.
"""

import itertools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert import clock
from lakeupsert.engine.attempts import all_or_raise
from lakeupsert.engine.carry import Source, as_carried, newer_parts
from lakeupsert.engine.cut import HeldPieces, write_packs
from lakeupsert.engine.hosts import Host, map_counted
from lakeupsert.engine.merge import AGE
from lakeupsert.engine.placing import ALONE, HASH, NAMED, NAMING, Placed, UnknownKeys, by_age, is_among_hashes, place
from lakeupsert.engine.runs import runs
from lakeupsert.errors import RefusedError
from lakeupsert.landing.adopted import refuse_null_keys
from lakeupsert.landing.partitions import UNPLACED
from lakeupsert.rows.arrays import Column, Hashes, Indices, Mask, Rows
from lakeupsert.rows.buckets import buckets, key_hashes
from lakeupsert.rows.columns import all_named, find_naming
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.datafiles import (
    POSITION,
    DataFileWriter,
    Footer,
    Pack,
    align,
    read_file,
    stream_file,
    write_to_pack,
)
from lakeupsert.rows.digest import Digest
from lakeupsert.rows.floor import PARTITION
from lakeupsert.rows.rank import sort_by_key, sort_by_rank
from lakeupsert.rows.vectors import mark_deleted
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import NOTHING, Reason, Touched
from lakeupsert.table.manifest import Bucketed, DataFile, TombstoneFile, add_digests, share
from lakeupsert.table.spec import DELETE_FLAG, FILE, HAS, MOVED_FROM, MOVED_TO, OLDER, PLACE, TableSpec

PACK_BYTES = 64 << 20
"""A pack up to this size is read by one request for all of its files."""
RANGE_ROWS = 1 << 20
"""Approximate rows of a range, of the index and incoming. More: memory. Less: objects."""
HELD_ROWS = 1 << 17
"""Rows that are cut into ranges in one call: appended files are many and small."""
MOST_BITS = 8
"""Ranges are cut by at most this many bits of the hash; each has an open temporary file."""
RUN_ROWS = 1 << 20
"""Rows of the files that a task of a host cuts, at least. Only key and order are read of them, so their bytes say little."""
CUT_BYTES = 64 << 20
"""Compressed bytes that such a task holds before it writes them. More: fewer and larger pieces. Less: memory."""
MOST_RUNS = 512
"""Larger tables are cut by about so many tasks. Each range reads a piece of each. More: requests. Fewer: cores wait."""
FILE_ROWS = 1 << 12
"""A file with fewer rows counts as so many: it has to be opened."""
FILES_A_CALL = 1 << 14
"""So many files are handed to the host at a time, and so many the driver holds."""

_SOURCE = "_lakeupsert_source"
_ALIVE = "_lakeupsert_alive"
_CARRIED = "_lakeupsert_carried"


@dataclass(frozen=True)
class IndexTarget:
    """The batch that objects are written for; ``start`` is as in `TableObjects`."""

    store: ObjectStore
    spec: TableSpec
    spec_version: int
    batch_id: str
    start: int

    def footer(self, kind: str, partition: str | None = None, bucket: int = 0, bits: int = 0) -> Footer:
        renames = len(self.spec.renames)
        return Footer(self.spec.table_id, kind, self.batch_id, self.spec_version, partition, bucket, bits, renames)


@dataclass(frozen=True)
class Settled:
    """A batch after it was settled against the index.

    Attributes:
        touched: without rows that are late for another partition, which are superseded, and with deletes in partitions that
            keys left.
        keys: the batch's changes of the index.
        index: the index from before the batch with all changes in it; None if it was not rewritten.
        objects: all objects that were written.
        unknown: how many deletes brought the key alone of a key that has no record.
        refused: rows that no file has, with all their columns, by reason. `PARTITION` is what a row named, or null. Those of
            `OF_EARLIER_BATCH` are parts of rows that were stored.
    """

    touched: dict[str, Touched]
    keys: tuple[DataFile, ...]
    index: tuple[DataFile, ...] | None
    objects: frozenset[str]
    unknown: int = 0
    refused: Mapping[Reason, Rows] = field(default_factory=dict)


@dataclass(frozen=True)
class _Range:
    bucket: int
    bits: int


@dataclass(frozen=True)
class _Ranked:
    """A range after its rows were ranked.

    Attributes:
        files: its part of the index.
        several: rows of keys that have one in another partition, too; then there are no files.
        example: one of these rows, for people.
    """

    files: tuple[DataFile, ...] = ()
    several: int = 0
    example: str = ""


def key_schema(spec: TableSpec) -> pa.Schema:
    """The schema of the index."""
    place = [pa.field(PARTITION, pa.string()), pa.field(DELETE_FLAG, pa.bool_())]
    return pa.schema([pa.field(HASH, pa.uint64()), *spec.tombstone_schema, *place, *_named(spec)])


def _named(spec: TableSpec) -> list[pa.Field]:
    if spec.mode == "rows":
        return []
    orders = pa.struct([(name, spec.schema.field(name).type) for name in spec.order_by])
    return [pa.field(NAMED, pa.bool_()), pa.field(NAMING, orders)]


def settle(
    to: IndexTarget,
    touched: dict[str, Touched],
    index: Sequence[DataFile],
    deltas: Sequence[DataFile],
    *,
    fold: bool,
    carry: Callable[[Rows], Rows],
    unknown: UnknownKeys | None = None,
    unreadable: Collection[str] = (),
) -> Settled:
    """Settle the rows of a batch against the index: ``index`` with the changes ``deltas``, oldest first.

    The record of greatest rank of every key stays, wherever it came from; between equal orders an incoming one wins. Incoming
    rows that lose to a record in another partition are superseded here; those that lose within their own partition stay, for
    its merge to count. If a row wins against a record in another partition, a delete of the row's rank goes there. ``fold``:
    rewrite the index. ``carry`` returns `carry.carried_rows` of keys that move, in mode columns. ``unknown``: needed if
    ``touched`` has `UNPLACED` rows, which get their partitions here. ``unreadable``: see `place`.
    """
    spec = to.spec
    files = [(partition, file) for partition, t in touched.items() for file in t.files]
    files.sort(key=lambda pair: (pair[1].name, pair[1].at or 0))
    packs = _Packs(to.store, [file for _, file in files])
    partitions = pa.array([partition for partition, _ in files], pa.string())
    rows = sum(file.rows for _, file in files) + sum(file.rows for file in (*index, *deltas))
    batch = _Batch(spec, files)
    moved: list[Rows] = []
    moves: list[Rows] = []
    copies: list[Rows] = []
    ended: list[Rows] = []
    folded: list[DataFile] = []
    keys = DataFileWriter(to.store, partial(TableObjects.new_keys, to.start), key_schema(spec), to.footer("keys"), ())
    with keys, _Ranges(rows) as arrived:
        for number, (_, file) in enumerate(files):
            for block in stream_file(packs, file, _arrived_schema(spec)):
                arrived.add(_add_hashes(block.append_column(_SOURCE, _repeat(number, pa.int32(), block)), spec))
        for range_ in arrived.ranges:
            incoming = arrived.take(range_)
            if incoming is None and not fold:
                continue
            hashes = np.empty(0, np.uint64) if incoming is None else np.unique(incoming[HASH].to_numpy())
            stored = _read_index(to.store, spec, index, deltas, range_, None if fold else hashes)
            if fold:
                folded += _write_index(to, range_, stored)
                stored = stored.filter(pa.array(is_among_hashes(stored, hashes)))
            if incoming is None:
                continue
            named = partitions.take(incoming[_SOURCE].combine_chunks())
            placed = place(incoming, stored, named, spec, unknown, unreadable)
            batch.take(placed)
            if placed.changes is not None:  # in mode columns every record counts, and `placing` knows where
                changes = placed.changes
                moved += placed.left
                moves += placed.moves
                copies += placed.copies
                ended += placed.ended
                batch.place(placed.rows)
            else:
                order, wins = sort_by_rank(placed.rows, spec, (FILE, PLACE))
                best = placed.rows.take(order.filter(wins))
                found = _look_up(best, stored, spec)
                changes = found.changes
                moved.append(found.moved)
                batch.place(best)
                batch.lose(placed.rows.take(order.filter(pc.invert(wins))))
                batch.lose(found.late)
            keys.write(align(changes.take(pc.sort_indices(changes[HASH])), key_schema(spec)))
    carried = carry(pa.concat_tables(moves)) if moves else None
    result, vectors = _drop_losers(to, touched, batch, unknown)
    for some, follows in ((moved, False), (copies, True)):
        if any(rows.num_rows for rows in some):
            rows = pa.concat_tables([rows.select(_moved_columns(spec)) for rows in some])
            result = _add_rows(to, result, rows, follows=follows)
    refused = batch.refused(packs)
    if ended and carried is not None:
        nowhere = pc.equal(carried[PARTITION], UNPLACED)
        orphans, carried = carried.filter(nowhere), carried.filter(pc.invert(nowhere))
        deletes = as_carried(pa.concat_tables(ended), spec)
        result = _add_rows(to, result, deletes, follows=True)
        refused["unknown_key"] = _with_orphans(refused.get("unknown_key"), newer_parts(orphans, deletes, spec), spec)
    if carried is not None and carried.num_rows:
        result = _add_rows(to, result, carried, follows=True)
    for rows in batch.placed(packs):
        result = _add_rows(to, result, rows)
    written = {f.name for t in result.values() for f in t.files if TableObjects.is_moved(f.name)}
    objects = vectors | written | {f.name for f in (*keys.files, *folded)}
    counted = {partition: t for partition, t in sorted(result.items()) if t.rows}  # all rows of the others are refused
    return Settled(
        counted,
        tuple(keys.files),
        tuple(folded) if fold else None,
        frozenset(objects),
        batch.unknown,
        refused,
    )


def _with_orphans(refused: Rows | None, orphans: Rows, spec: TableSpec) -> Rows:
    schema = spec.ranked_schema.append(pa.field(PARTITION, pa.string()))
    orphans = align(orphans.drop_columns([PARTITION]), schema)
    return orphans if refused is None else pa.concat_tables([align(refused, schema), orphans])


def find_refused(
    store: ObjectStore,
    spec: TableSpec,
    index: Sequence[DataFile],
    deltas: Sequence[DataFile],
    rows: Rows,
    unknown: UnknownKeys,
) -> dict[Reason, Mask]:
    """Which accepted ``rows`` of a file `settle` would refuse, by reason, with the index ``index`` and its changes ``deltas``."""
    partitions = rows[PARTITION].combine_chunks()
    incoming = _add_hashes(rows.drop_columns([PARTITION]), spec).append_column(FILE, _repeat(0, pa.int32(), rows))
    stored = _read_index(store, spec, index, deltas, _Range(0, 0), np.unique(incoming[HASH].to_numpy()))
    refused = place(incoming, stored, partitions, spec, unknown).refused
    return {reason: np.isin(rows[PLACE].to_numpy(), found[PLACE].to_numpy()) for reason, found in refused.items()}


def rebuild_index(
    to: IndexTarget, host: Host, sources: Iterable[Source], rows: int, discard: Callable[[Iterable[str]], None]
) -> tuple[DataFile, ...]:
    """Rebuild the index from all live rows and deletes in these files, about ``rows``; files of a partition rank by their age.

    ``discard`` gets the objects that are left over. Raises RefusedError if a key has rows in several partitions.
    """
    ranges = _ranges_of(rows)
    if host.in_process or len(ranges) == 1:
        ranked = _rank_here(to, sources, rows)
    else:
        ranked = _rank_on_host(to, host, sources, rows, discard)
    files = tuple(file for of_range in ranked for file in of_range.files)
    wrong = [of_range for of_range in ranked if of_range.several]
    if wrong:
        discard([file.name for file in files])
        raise _several_partitions(sum(of_range.several for of_range in wrong), wrong[0].example)
    return files


def _rank_here(to: IndexTarget, sources: Iterable[Source], rows: int) -> list[_Ranked]:
    with _Ranges(rows) as spilled:
        for source in sources:
            for block in _source_blocks(to.store, to.spec, source):
                spilled.add(_add_hashes(block, to.spec))
        return [_rank(to, range_, spilled.take(range_)) for range_ in spilled.ranges]


def _rank_on_host(
    to: IndexTarget, host: Host, sources: Iterable[Source], rows: int, discard: Callable[[Iterable[str]], None]
) -> list[_Ranked]:
    """The rows go to the tasks of their ranges through packs in the store, which are deleted afterwards."""
    ranges, rebuild = _ranges_of(rows), clock.new_id()[:16]
    cut = partial(_cut, to, ranges[0].bits, rebuild)
    packs: list[DataFile] = []
    try:
        for call in runs(sources, lambda source: 1, FILES_A_CALL):
            items = list(runs(call, lambda source: max(source.file.rows, FILE_ROWS), max(RUN_ROWS, rows // MOST_RUNS)))
            sizes = [float(sum(source.file.bytes for source in run)) for run in items]
            for of_run in all_or_raise(map_counted(host, to.store, cut, items, sizes)):
                packs += of_run
        rank = partial(_rank_pieces, to, packs)
        sizes = [float(sum(file.within(range_).bytes for file in packs)) for range_ in ranges]
        return all_or_raise(map_counted(host, to.store, rank, ranges, sizes))
    finally:
        discard(found.name for found in to.store.list(TableObjects.key_cuts(to.start, rebuild)))


def _cut(to: IndexTarget, bits: int, rebuild: str, run: Sequence[Source]) -> tuple[DataFile, ...]:
    """Copy what the index needs of some files into pieces, one for each range."""
    blocks = itertools.chain.from_iterable(_source_blocks(to.store, to.spec, source) for source in run)
    held = HeldPieces(to.spec, _source_schema(to.spec), to.footer("cut"), bits)
    return write_packs(to.store, partial(TableObjects.new_key_cut, to.start, rebuild), blocks, held, CUT_BYTES)


def _rank_pieces(to: IndexTarget, packs: Sequence[DataFile], range_: _Range) -> _Ranked:
    pieces = [piece for pack in packs if (piece := pack.within(range_)).rows]
    tables = [read_file(to.store, piece, _source_schema(to.spec)) for piece in pieces]
    return _rank(to, range_, _add_hashes(pa.concat_tables(tables), to.spec) if tables else None)


def _rank(to: IndexTarget, range_: _Range, rows: Rows | None) -> _Ranked:
    """Write the record of greatest rank of every key, unless a key has a row in several partitions."""
    if rows is None:
        return _Ranked()
    if to.spec.mode == "columns":
        rows = _with_naming(rows, to.spec)
    order, wins = sort_by_rank(rows, to.spec, (AGE, FILE, PLACE), by=[PARTITION])
    best = rows.take(order.filter(wins))
    # When a key moves, the delete that it leaves behind has the same order.
    best = best.append_column(_ALIVE, pa.array((~as_mask(best[DELETE_FLAG])).astype(np.int8)))
    order, wins = sort_by_rank(best, to.spec, (_ALIVE,))
    others = best.take(order.filter(pc.invert(wins)))
    others = others.filter(pc.equal(others[_ALIVE], 1))
    if others.num_rows:
        first = others.slice(0, 1).to_pylist()[0]
        key = " ".join(f"{name}={first[name]}" for name in to.spec.key)
        return _Ranked(several=others.num_rows, example=f"{key} in {first[PARTITION]}")
    best = best.take(order.filter(wins))
    return _Ranked(tuple(_write_index(to, range_, best.take(pc.sort_indices(best[HASH])))))


def _with_naming(rows: Rows, spec: TableSpec) -> Rows:
    """The records of a range that count, each with the order by which its key's partition was named last."""
    order, wins = sort_by_rank(rows, _without_order(spec), (AGE, FILE, PLACE), by=[PARTITION])
    rows = rows.take(order)
    key = np.cumsum(as_mask(wins)) - 1
    ages, since = rows[AGE].to_numpy(), np.zeros(int(key[-1]) + 1 if len(key) else 0, np.int64)
    carried = as_mask(rows[_CARRIED])
    np.maximum.at(since, key[carried], ages[carried])
    counts = ages >= since[key]
    names = rows.filter(pa.array(counts & as_mask(rows[NAMING].is_valid())))
    last = np.full(len(since), -1)
    if names.num_rows:
        orders = names[NAMING].combine_chunks()
        ranked = names
        for name in spec.order_by:
            at = ranked.schema.get_field_index(name)
            ranked = ranked.set_column(at, ranked.schema.field(at), orders.field(name))
        by_rank, first = sort_by_rank(ranked, spec, (AGE, FILE, PLACE), by=[PARTITION])
        greatest = by_rank.filter(first).to_numpy()
        places = np.flatnonzero(counts & as_mask(rows[NAMING].is_valid()))[greatest]
        last[key[places]] = places
    own = as_mask(rows[NAMED]) | (last[key] < 0)
    found = rows[NAMING].combine_chunks().take(pa.array(last[key], mask=own))
    at = rows.schema.get_field_index(NAMING)
    return rows.set_column(at, rows.schema.field(at), found).filter(pa.array(counts))


def _write_index(to: IndexTarget, range_: _Range, rows: Rows) -> list[DataFile]:
    footer = to.footer("keys", bucket=range_.bucket, bits=range_.bits)
    new_name = partial(TableObjects.new_keys, to.start)
    with DataFileWriter(to.store, new_name, key_schema(to.spec), footer, ()) as out:
        out.write(align(rows, key_schema(to.spec)))
    return out.files


def _several_partitions(rows: int, example: str) -> RefusedError:
    return RefusedError(
        "key-in-several-partitions",
        f"At least {rows} keys have a row in several partitions, for example {example}. With "
        '`key_scope = "table"` a key has one row. Nothing was changed.',
        next='leave one row of each key in these files, or set `key_scope = "partition"`',
    )


# ---------------------------------------------------------------- one range


@dataclass(frozen=True)
class _Found:
    """Incoming rows after the look-up.

    Attributes:
        changes: what changes in the index.
        late: rows that lost to another partition.
        moved: rows that won, with the key's partition before in `PARTITION` and their own in `MOVED_TO`.
    """

    changes: Rows
    late: Rows
    moved: Rows


@dataclass(frozen=True)
class _Pairs:
    """Incoming and stored rows of the same keys: indices of the first, the second themselves, and if their partitions differ."""

    incoming: Column
    stored: Rows
    apart: Mask


def _look_up(best: Rows, stored: Rows, spec: TableSpec) -> _Found:
    """``best`` and ``stored`` each have a key once."""
    n = stored.num_rows
    both = by_age((stored, best), spec.tombstone_schema.names)
    order, wins = sort_by_rank(both, spec, (AGE,))
    places, begins = order.to_numpy(), np.flatnonzero(as_mask(wins))
    alone = np.diff(np.append(begins, len(places))) == 1
    first = places[begins]
    second = np.where(alone, 0, places[np.minimum(begins + 1, len(places) - 1)])
    won = first >= n
    here = best[PARTITION].combine_chunks()

    def pairs(incoming: Indices, known: Indices) -> _Pairs:
        mine, theirs = pa.array(incoming - n), stored.take(pa.array(known))
        return _Pairs(mine, theirs, as_mask(pc.not_equal(here.take(mine), theirs[PARTITION].combine_chunks())))

    newer = pairs(first[won & ~alone], second[won & ~alone])
    leaves = pa.array(newer.apart & ~as_mask(newer.stored[DELETE_FLAG]))
    movers = newer.incoming.filter(leaves)
    moved = best.take(movers).drop_columns([DELETE_FLAG, PARTITION])
    moved = moved.append_column(DELETE_FLAG, _repeat(True, pa.bool_(), moved))
    moved = moved.append_column(PARTITION, newer.stored[PARTITION].filter(leaves))
    moved = moved.append_column(MOVED_TO, here.take(movers))
    older = pairs(second[~won & ~alone], first[~won & ~alone])
    late = best.take(older.incoming.filter(pa.array(older.apart)))
    winners = pa.array(first[won] - n)
    changes = best.take(winners).select(key_schema(spec).names)
    return _Found(changes, late, moved)


def _read_index(
    store: ObjectStore,
    spec: TableSpec,
    index: Sequence[DataFile],
    deltas: Sequence[DataFile],
    range_: _Range,
    hashes: Hashes | None,
) -> Rows:
    """The rows of the index in a range, one for each key, sorted by hash. With ``hashes``, only rows that have one of these."""
    schema = key_schema(spec)

    def read(files: Iterable[DataFile]) -> Rows:
        tables = [schema.empty_table()]
        near = (HASH, _span(range_) if hashes is None else pa.array(hashes))
        for file in files:
            if share(file, range_):
                for block in stream_file(store, file, schema, near):
                    own = block[HASH].to_numpy()
                    wanted = (
                        buckets(own, range_.bits) == range_.bucket if hashes is None else is_among_hashes(block, hashes)
                    )
                    tables.append(block.filter(pa.array(wanted)))
        return pa.concat_tables(tables)

    base, changes = read(index), [read([file]) for file in deltas]
    # A change is later than what it changes. It may have a lower order: that of a late delete which ends a key (`placing`).
    newer = pa.concat_tables(
        [rows.append_column(AGE, _repeat(age, pa.int32(), rows)) for age, rows in enumerate(changes, 1)]
        or [schema.append(pa.field(AGE, pa.int32())).empty_table()]
    )
    if not newer.num_rows:
        return base
    contested = is_among_hashes(base, np.unique(newer[HASH].to_numpy()))
    older = base.filter(pa.array(contested))
    both = pa.concat_tables([older.append_column(AGE, _repeat(0, pa.int32(), older)), newer])
    order, wins = sort_by_rank(both, _without_order(spec), (AGE,))
    rows = pa.concat_tables([base.filter(pa.array(~contested)), both.take(order.filter(wins)).select(schema.names)])
    return rows.take(pc.sort_indices(rows[HASH]))


def _without_order(spec: TableSpec) -> TableSpec:
    return msgspec.structs.replace(spec, order_by=(), ascending=(), nulls_first=())


def _span(range_: Bucketed) -> slice:
    """The least and the greatest hash of a range."""
    width = 1 << 64 - range_.bits
    return slice(range_.bucket * width, (range_.bucket + 1) * width - 1)


def _add_hashes(rows: Rows, spec: TableSpec) -> Rows:
    return rows.append_column(HASH, pa.array(key_hashes(rows, spec)))


def _repeat(value: object, type_: pa.DataType, rows: Rows) -> Column:
    return pa.repeat(pa.scalar(value, type_), rows.num_rows)


# ---------------------------------------------------------------- what a batch becomes


class _Batch:
    """What becomes of rows of a batch that do not stay where they were appended.

    Attributes:
        files: the batch's files, each with its partition; `_SOURCE` is a place in this list.
        lost: digests of the rows that are superseded, by partition.
        lost_alone: of those of them that brought their key alone, by the partition that they got.
        away: of the rows that do not count in the partition where they landed, and are not superseded, by that partition.
        unknown: see `Settled`.
    """

    def __init__(self, spec: TableSpec, files: Sequence[tuple[str, DataFile]]) -> None:
        self.files = files
        self.lost: defaultdict[str, Digest] = defaultdict(lambda: Digest(spec))
        self.lost_alone: defaultdict[str, Digest] = defaultdict(lambda: Digest(spec))
        self.away: defaultdict[str, Digest] = defaultdict(lambda: Digest(spec))
        self.unknown = 0
        self._spec = spec
        self._gone: defaultdict[int, list[Indices]] = defaultdict(list)
        self._placed: defaultdict[int, list[Rows]] = defaultdict(list)
        self._refused: dict[Reason, list[Rows]] = {}

    def lose(self, rows: Rows) -> None:
        """These rows are superseded."""
        self._leave(rows.filter(pc.invert(rows[ALONE])), self.lost)
        alone = rows.filter(rows[ALONE])
        for partition in pc.unique(alone[PARTITION]).to_pylist():
            self.lost_alone[partition].add(alone.filter(pc.equal(alone[PARTITION], partition)))

    def place(self, rows: Rows) -> None:
        """Those of these rows that brought their key alone count in their partitions."""
        self._place(rows.filter(rows[ALONE]))

    def _place(self, rows: Rows) -> None:
        for number, of_file in self._by_file(rows):
            self._placed[number].append(of_file.select([POSITION, PARTITION]))

    def take(self, placed: Placed) -> None:
        """Take what does not stay of a range."""
        self.unknown += placed.unknown
        if placed.superseded is not None:
            self.lose(placed.superseded)
        if placed.elsewhere is not None:
            self._leave(placed.elsewhere, self.away)
            self._place(placed.elsewhere)
        for reason, rows in placed.refused.items():
            self._leave(rows.filter(pc.invert(rows[ALONE])), self.away)
            self._refused.setdefault(reason, []).append(rows.select([_SOURCE, POSITION, PARTITION, ALONE]))

    def _leave(self, rows: Rows, digests: defaultdict[str, Digest]) -> None:
        for number, of_file in self._by_file(rows):
            self._gone[number].append(of_file[POSITION].to_numpy())
            digests[self.files[number][0]].add(of_file)

    def _by_file(self, rows: Rows) -> Iterator[tuple[int, Rows]]:
        for number in pc.unique(rows[_SOURCE]).to_pylist():
            yield number, rows.filter(pc.equal(rows[_SOURCE], number))

    def gone(self) -> tuple[list[DataFile], list[Indices]]:
        """The files of partitions, and for each the positions of its rows that do not count."""
        nothing = np.empty(0, np.int64)
        stay = [(n, file) for n, (partition, file) in enumerate(self.files) if partition != UNPLACED]
        return [file for _, file in stay], [np.concatenate([nothing, *self._gone.get(n, [])]) for n, _ in stay]

    def placed(self, store: ObjectStore) -> Iterator[Rows]:
        """The rows that `place` got, with all their columns and with `PARTITION`, file by file."""
        for number, found in sorted(self._placed.items()):
            at = pa.concat_tables(found)
            yield self._read(store, number, at).append_column(PARTITION, at[PARTITION])

    def refused(self, store: ObjectStore) -> dict[Reason, Rows]:
        """The refused rows, see `Settled`."""
        found = {}
        for reason, tables in self._refused.items():
            parts = []
            for number, at in self._by_file(pa.concat_tables(tables)):
                own = pc.if_else(at[ALONE], None, at[PARTITION])
                parts.append(self._read(store, number, at).append_column(PARTITION, own))
            found[reason] = pa.concat_tables(parts)
        return found

    def _read(self, store: ObjectStore, number: int, at: Rows) -> Rows:
        file = msgspec.structs.replace(self.files[number][1], deleted=None)
        return read_file(store, file, self._spec.ranked_schema, self._spec).take(at[POSITION])


def _drop_losers(
    to: IndexTarget, touched: dict[str, Touched], batch: _Batch, unknown: UnknownKeys | None
) -> tuple[dict[str, Touched], set[str]]:
    """``touched`` without the rows that do not count and without `UNPLACED`, and the objects that were written for it."""
    files, positions = batch.gone()
    live = mark_deleted(to.store, files, positions, partial(TableObjects.new_late, to.start))
    by_name = {(f.name, f.at): f for f in live}
    result = dict(touched)
    alone = result.pop(UNPLACED, NOTHING)
    for partition in batch.lost.keys() | batch.away.keys():
        before, lost, away = result[partition], batch.lost[partition], batch.away[partition]
        result[partition] = msgspec.structs.replace(
            before,
            files=tuple(by_name[f.name, f.at] for f in before.files if (f.name, f.at) in by_name),
            rows=before.rows - away.rows,
            digest=add_digests((before.digest, away.negative())),
            superseded=before.superseded + lost.rows,
            superseded_digest=add_digests((before.superseded_digest, str(lost))),
        )
    result = {partition: t for partition, t in result.items() if t.rows or partition not in batch.away}
    for partition, digest in batch.lost_alone.items():
        result[partition] = _with_lost(result.get(partition, NOTHING), digest.rows, str(digest))
    if unknown is not None and alone.superseded:
        before = result.get(unknown.partition, NOTHING)
        result[unknown.partition] = _with_lost(before, alone.superseded, alone.superseded_digest)
    return result, {name for f in live for name in f.objects} - {name for f in files for name in f.objects}


def _with_lost(touched: Touched, rows: int, digest: str | None) -> Touched:
    """``touched`` with more rows, which are superseded."""
    return msgspec.structs.replace(
        touched,
        rows=touched.rows + rows,
        superseded=touched.superseded + rows,
        digest=add_digests((touched.digest, digest)),
        superseded_digest=add_digests((touched.superseded_digest, digest)),
    )


def _moved_columns(spec: TableSpec) -> list[str]:
    return [*spec.tombstone_schema.names, FILE, PLACE, DELETE_FLAG, PARTITION, MOVED_TO]


def _add_rows(to: IndexTarget, touched: dict[str, Touched], rows: Rows, *, follows: bool = False) -> dict[str, Touched]:
    """``touched`` with these rows, in the partitions that they have in `PARTITION`.

    With `MOVED_TO` or `MOVED_FROM` they did not land: they are deletes for partitions that keys leave, of another record's rank,
    or (``follows``) deletes and rows for those that keys come to.
    """
    spec, result = to.spec, dict(touched)
    schema, landed = spec.ranked_schema, False
    if MOVED_TO in rows.schema.names:
        schema = schema.append(pa.field(MOVED_TO, pa.string()))
    elif MOVED_FROM in rows.schema.names:
        schema = schema.append(spec.base_schema.field(OLDER)).append(pa.field(MOVED_FROM, pa.string()))
    else:
        landed = True
    with Pack(to.store, TableObjects.new_moved(to.start)) as pack:
        for partition in sorted(pc.unique(rows[PARTITION]).to_pylist()):
            coming = align(rows.filter(pc.equal(rows[PARTITION], partition)), schema)
            digest = Digest(spec)
            digest.add(coming)
            ordered = coming.take(sort_by_key(coming, spec.stored_key))
            files = write_to_pack(pack, ordered, schema, to.footer("appended", partition), spec)
            before = result.get(partition, NOTHING)
            result[partition] = msgspec.structs.replace(
                before,
                files=(*before.files, *files),
                rows=before.rows + digest.rows,
                moved=before.moved + (0 if landed else digest.rows),
                followed=before.followed + (digest.rows if follows else 0),
                bytes=before.bytes + sum(f.bytes for f in files),
                digest=add_digests((before.digest, str(digest))),
            )
    return result


def _arrived_schema(spec: TableSpec) -> pa.Schema:
    """Columns that are read of appended rows."""
    ranks = [spec.ranked_schema.field(name) for name in (FILE, PLACE, DELETE_FLAG)]
    return pa.schema([*spec.tombstone_schema, *ranks, pa.field(POSITION, pa.int64())])


def _source_schema(spec: TableSpec) -> pa.Schema:
    """Columns that the index is rebuilt from."""
    ranks = [
        (FILE, pa.int32()),
        (PLACE, pa.int64()),
        (DELETE_FLAG, pa.bool_()),
        (AGE, pa.int64()),
        (PARTITION, pa.string()),
    ]
    carried = [pa.field(_CARRIED, pa.bool_())] if spec.mode == "columns" else []
    return pa.schema([*spec.tombstone_schema, *(pa.field(*rank) for rank in ranks), *_named(spec), *carried])


def _source_blocks(store: ObjectStore, spec: TableSpec, source: Source) -> Iterator[Rows]:
    """The rows of a file with rank and partition."""
    file = source.file
    given = {
        FILE: source.number,
        DELETE_FLAG: isinstance(file, TombstoneFile),
        AGE: source.age,
        PARTITION: source.partition,
    }
    result = _source_schema(spec)
    schema = _arrived_schema(spec)
    if not source.age:
        schema = pa.schema([*spec.tombstone_schema, pa.field(POSITION, pa.int64())])
    if spec.mode == "columns" and not source.unsettled:
        schema = pa.schema([*schema, *(spec.base_schema.field(name) for name in (HAS, OLDER))])
    for block in stream_file(store, file, schema):
        if source.unsettled:
            refuse_null_keys(store, file, spec, block, source.partition)
        if PLACE not in block.schema.names:
            block = block.append_column(PLACE, block[POSITION])
        for name, value in given.items():
            if name in result.names and name not in block.schema.names:
                block = block.append_column(name, _repeat(value, result.field(name).type, block))
        if spec.mode == "columns":
            naming = all_named(block, spec) if source.unsettled else find_naming(block, spec)
            for name, column in zip((NAMED, NAMING, _CARRIED), naming, strict=True):
                block = block.append_column(name, pa.array(column))
        yield pa.table([block[name] for name in result.names], schema=result)


class _Packs:
    """A store for files that are read pack by pack. A pack up to `PACK_BYTES` is read once, and kept until the next one."""

    def __init__(self, store: ObjectStore, files: Iterable[DataFile]) -> None:
        self._store = store
        self._sizes: defaultdict[str, int] = defaultdict(int)
        for file in files:
            self._sizes[file.name] = max(self._sizes[file.name], (file.at or 0) + file.bytes)
        self._held = ("", b"")

    def __getattr__(self, name: str) -> Any:  # any other method of the store
        return getattr(self._store, name)

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        if part is None or not part[1] < self._sizes[name] <= PACK_BYTES:
            return self._store.get(name, part)
        if self._held[0] != name:
            self._held = (name, self._store.get(name))
        at, size = part
        return self._held[1][at : at + size]


def _ranges_of(rows: int) -> list[_Range]:
    bits = min(MOST_BITS, (rows // RANGE_ROWS).bit_length())
    return [_Range(bucket, bits) for bucket in range(1 << bits)]


class _Ranges:
    """Rows by ranges of their hashes: in memory if there is one range, otherwise in temporary Arrow files."""

    def __init__(self, rows: int) -> None:
        self.ranges = _ranges_of(rows)
        self._bits = self.ranges[0].bits
        self._tables: list[Rows] = []
        self._held = 0
        self._writers: dict[int, pa.RecordBatchStreamWriter] = {}

    def __enter__(self) -> "_Ranges":
        self._folder = tempfile.TemporaryDirectory(prefix="lakeupsert-") if self._bits else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers.values():
            writer.close()
        if self._folder is not None:
            self._folder.cleanup()

    def add(self, rows: Rows) -> None:
        self._tables.append(rows)
        self._held += rows.num_rows
        if self._bits and self._held >= HELD_ROWS:
            self._spill()

    def _spill(self) -> None:
        if not self._held:
            return
        rows = pa.concat_tables(self._tables)
        self._tables, self._held = [], 0
        numbers = buckets(rows[HASH].to_numpy(), self._bits)
        order = np.argsort(numbers.astype(np.min_scalar_type(1 << self._bits)), kind="stable")
        rows, numbers = rows.take(pa.array(order)), numbers[order]
        for number in np.unique(numbers).tolist():
            begin, end = np.searchsorted(numbers, [number, number + 1]).tolist()
            if number not in self._writers:
                self._writers[number] = pa.ipc.new_stream(
                    self._path(number), rows.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")
                )
            self._writers[number].write_table(rows.slice(begin, end - begin))

    def take(self, range_: _Range) -> Rows | None:
        """Hand out the rows of a range, once. None if there are none."""
        if not self._bits:
            tables, self._tables = self._tables, []
            return pa.concat_tables(tables) if tables else None
        self._spill()
        writer = self._writers.pop(range_.bucket, None)
        if writer is None:
            return None
        writer.close()
        with pa.OSFile(self._path(range_.bucket)) as source, pa.ipc.open_stream(source) as reader:
            return reader.read_all()

    def _path(self, number: int) -> str:
        assert self._folder is not None, "there are several ranges"
        return str(Path(self._folder.name) / f"{number}.arrow")
