"""Both strategies on Arrow, in this process: the base streams by in key order and meets the few incoming rows.

The base has one row per key and is sorted by it, so nothing is windowed again: of a block of the base and the incoming
rows that fall in its key range, keys and ordering columns alone decide; the payload is moved and never looked at.
Strategy rewrite works the incoming rows in. Strategy delta reads keys and ordering columns alone, and of these only row
groups that may hold an incoming key; it notes the positions of rows that lost.
Memory: the incoming rows of the partition, one block of the base, and keys and order of rows that lost; of an adopted
partition, once, the whole of it.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.merge import AGE, MergeOutput, MergeTask, MergeWriter
from lakeupsert.landing.adopted import adopted_rows
from lakeupsert.rows.buckets import in_bucket, key_hashes
from lakeupsert.rows.changes import Tally, of_keys, same_content
from lakeupsert.rows.columns import combined
from lakeupsert.rows.convert import true
from lakeupsert.rows.datafiles import POSITION, read_file, stream_file
from lakeupsert.rows.digest import Digest, digests
from lakeupsert.rows.floor import DELETED_AT, lacking, since
from lakeupsert.rows.rank import latest, rows_up_to, sortable, sorted_by
from lakeupsert.rows.vectors import deleted_positions
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import DataFile, share
from lakeupsert.table.spec import DELETE_FLAG, FILE, PLACE, TableSpec

PEAK = 3.5
"""Memory that incoming rows take at the peak, while they are sorted, of what they are decoded (ADR 0012)."""
EXPANSION = 3
"""Decoded bytes of a compressed one, in columns whose width the schema does not tell; see ADR 0012 for data where it is more."""
TEXT_BYTES = 16
"""Decoded bytes of a value whose width its type does not tell, at least."""
BLOCKS_BYTES = 256 << 20
"""What the blocks of a base take, from reading to writing, where it has more than one or two."""
TOGETHER_ROWS = 1 << 14
"""Rows of small files that meet the incoming ones at once."""

_DELETED, _FILE, _PLACE = pa.field(DELETE_FLAG, pa.bool_()), pa.field(FILE, pa.int32()), pa.field(PLACE, pa.int64())
_AGE = pa.field(AGE, pa.int32())
"""Decides between equal ordering values."""
_KNOWN = "_lakeupsert_known"
"""Boolean column of incoming rows that were settled: something is stored of the key. Null for what is stored itself."""
_TIES = (AGE, FILE, PLACE)
_RANKS = pa.schema([_DELETED, _FILE, _PLACE, _AGE])


def _width(type_: Any) -> int:
    """Bytes of a value, decoded."""
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
        if not spec.settles_early and task.kept:  # of each incoming row the whole row that it meets
            rows = sum(f.rows * share(f, task) for f in incoming)
            met = rows * decoded(task.kept) / max(1, sum(f.rows * share(f, task) for f in task.kept))
        sorting = int(PEAK * (decoded(incoming) + met))
        blocks = min(BLOCKS_BYTES, int(PEAK * decoded(stored)))
        read_ahead = max((f.bytes for f in stored), default=0)
        # Rows of other buckets are there until their file is read.
        others = max((whole(f) * (1 - share(f, task)) for f in incoming), default=0.0)
        streaming = decoded(incoming) + blocks + read_ahead  # the base streams by when the others are sorted
        return int(max(sorting, streaming) + others)

    def merge(
        self, store: ObjectStore, spec: TableSpec, spec_version: int, tasks: Sequence[MergeTask]
    ) -> list[MergeOutput]:
        lost: list[list[Any]] = [[] for _ in tasks]
        outputs = [
            (_delta if task.kept else _rewrite)(store, spec, spec_version, task, to)
            for task, to in zip(tasks, lost, strict=True)
        ]
        found = zip(outputs, digests(lost, spec), strict=True)
        return [replace(output, superseded_digest=digest) for output, digest in found]


def _rewrite(store: ObjectStore, spec: TableSpec, spec_version: int, task: MergeTask, lost: list[Any]) -> MergeOutput:
    """Rows that lost, their key and ordering columns, are put into ``lost``."""
    adopted, tally = Digest(spec), Tally()
    incoming = _incoming(store, spec, task, adopted)
    known = None
    whole = spec.history or bool(task.full)
    if whole:  # all versions meet what is stored: which an extract deletes, and which it has, depends on all of them
        rest = incoming.take(sorted_by(incoming, spec.stored_key))
    else:
        settled, winners, known = _winners(incoming, spec, task, lost, tally)
        rest = settled.take(winners)
        if known is not None:
            rest = rest.append_column(_KNOWN, pa.array(known))
        del settled
    del incoming
    with MergeWriter(store, spec, spec_version, task, tally) as out:
        past = out if spec.history else None
        for file in task.base if task.settled else ():
            for block in stream_file(store, file, spec.base_schema, spec=spec):
                stored = in_bucket(block, file, task, spec)
                if not stored.num_rows:
                    continue
                met = rows_up_to(rest, spec.stored_key, [stored[name][-1] for name in spec.stored_key])
                if not met and not task.full:
                    out.live.write(stored)
                    continue
                tables = [_tagged(stored, age=0, deleted=False), rest.slice(0, met)]
                both = pa.concat_tables(tables, promote_options="default" if _has_more(rest) else "none")
                rest = rest.slice(met)
                if task.full:
                    both = _without_lacking(both, spec, task, lost, tally, past)
                out.write(*_winners(both, spec, task, lost, tally, past, again=not whole))
        if whole:
            if task.full:
                rest = _without_lacking(rest, spec, task, lost, tally, past)
            out.write(*_winners(rest, spec, task, lost, tally, past))
        elif known is not None or pc.any(rest[DELETE_FLAG]).as_py():
            out.write(rest, *_all(rest, known is not None))
        else:
            out.live.write(rest)
    return out.output(sum(rows.num_rows for rows in lost), adopted=None if task.settled else str(adopted))


def _delta(store: ObjectStore, spec: TableSpec, spec_version: int, task: MergeTask, lost: list[Any]) -> MergeOutput:
    """Rows that lost, their key and ordering columns, are put into ``lost``."""
    incoming = _incoming(store, spec, task, Digest(spec))
    begins = np.cumsum([0, *(file.rows for file in task.kept)])
    met, number = _met(store, spec, task.kept, begins, incoming)
    both = pa.concat_tables([met, incoming.select(met.schema.names)])
    order, wins = latest(both, spec, _TIES)
    losers = order.filter(pc.invert(wins))
    lost.append(both.select(spec.tombstone_schema.names).take(losers))
    winners = order.filter(wins)
    is_new = true(pc.greater_equal(winners, met.num_rows))
    tally = Tally()
    if spec.mode == "columns":
        rows, chosen, uses = combined(both, spec, order, wins, _TIES)
        _count(tally, both, spec, order, wins, uses)
        is_new = of_keys(true(wins), (uses & (np.arange(both.num_rows) >= met.num_rows))[order.to_numpy()])
        superseded, chosen = order.to_numpy()[is_new[np.cumsum(true(wins)) - 1]], chosen.filter(pa.array(is_new))
    else:
        rows = incoming
        _count(tally, both, spec, order, wins)
        superseded, chosen = losers.to_numpy(), pc.subtract(winners.filter(pa.array(is_new)), met.num_rows)
    superseded = superseded[superseded < met.num_rows]
    known = _known(both, order, wins) if task.refuses else None
    with MergeWriter(store, spec, spec_version, task, tally) as out:
        out.write(rows, chosen, None if known is None else known[is_new])
        if spec.history:
            out.keep_past(both, order, wins, known)
    dead = np.sort(number[superseded])
    ends = np.searchsorted(dead, begins)
    positions = [dead[ends[i] : ends[i + 1]] - begins[i] for i in range(len(task.kept))]
    return out.output(sum(rows.num_rows for rows in lost), positions=positions)


def _met(store: ObjectStore, spec: TableSpec, files: Sequence[DataFile], begins: Any, incoming: Any) -> tuple[Any, Any]:
    """Stored rows that may have the key of an incoming one, the columns that decide; and each one's number.

    The rows of all ``files`` are numbered through, those of each from its number in ``begins`` on. A row is taken whose every
    key column has a value that an incoming row has there, and of keys of several columns, whose values may all be there in
    other rows, the hash of an incoming key.
    """
    schema = spec.deciding_schema if spec.settles_early else spec.base_schema
    schema = schema.append(pa.field(POSITION, pa.int64()))
    keys = {name: sortable(incoming[name]).combine_chunks() for name in spec.stored_key}
    near = next(iter(keys.items()))
    hashes = key_hashes(incoming, spec) if len(keys) > 1 else None
    # Superseded rows are left out of the few that are near, not of all.
    superseded = [deleted_positions(store, f).astype(np.int64) + begin for f, begin in zip(files, begins, strict=False)]
    dead = pa.array(np.concatenate(superseded))
    tables = [schema.empty_table()]
    streams = (
        stream_file(store, msgspec.structs.replace(file, deleted=None), schema, near, begin, spec)
        for file, begin in zip(files, begins, strict=False)
    )
    for rows in _together(itertools.chain.from_iterable(streams)):
        is_near = [pc.is_in(sortable(rows[name]), values) for name, values in keys.items()]
        rows = rows.filter(reduce(pc.and_, is_near))
        if hashes is not None:
            rows = rows.filter(pa.array(np.isin(key_hashes(rows, spec), hashes)))
        tables.append(rows.filter(pc.invert(pc.is_in(rows[POSITION], dead))) if len(dead) else rows)
    met = pa.concat_tables(tables)
    return _tagged(met.drop_columns(POSITION), age=0, deleted=False), met[POSITION].to_numpy()


def _together(tables: Iterable[Any]) -> Iterator[Any]:
    """Small tables as one: what is done for each takes longer than what is done for its rows."""
    held: list[Any] = []
    for table in tables:
        held.append(table)
        if sum(t.num_rows for t in held) >= TOGETHER_ROWS:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def _incoming(store: ObjectStore, spec: TableSpec, task: MergeTask, adopted: Digest) -> Any:
    """Tombstones, deltas, appended rows and ``adopted`` ones in one table, which holds a key as often as they do."""
    tables: list[Any] = []

    def add(rows: Any, file: DataFile, age: int, deleted: bool) -> None:
        tables.append(_tagged(in_bucket(rows, file, task, spec), age, deleted))

    for number, file in enumerate(() if task.settled else task.base):
        rows = adopted_rows(store, file, spec, task.partition)
        columns = [pa.repeat(pa.scalar(number, _FILE.type), rows.num_rows), pa.array(np.arange(rows.num_rows))]
        add(rows.append_column(_FILE, columns[0]).append_column(_PLACE, columns[1]), file, age=0, deleted=False)
        adopted.add(tables[-1])
    for delta in task.deltas:
        add(read_file(store, delta, spec.base_schema, spec), delta, age=0, deleted=False)
    stored = spec.base_schema.append(DELETED_AT) if task.forgets else spec.base_schema
    for tombstones in task.tombstones:
        add(read_file(store, tombstones, stored), tombstones, age=0, deleted=True)
    for age, files in enumerate(task.batches, start=1):
        for file in files:
            add(read_file(store, file, spec.arriving_schema, spec), file, age, deleted=False)
    if not task.forgets:
        return pa.concat_tables(tables or [_tagged(stored.empty_table(), age=0, deleted=False)])
    tables.append(_tagged(stored.empty_table(), age=0, deleted=False))
    rows = pa.concat_tables(tables, promote_options="default")
    return since(rows, rows[AGE], task.forgets)


def _tagged(rows: Any, age: int, deleted: bool) -> Any:
    """``rows`` with every column that ranks them; those that they bring themselves are kept."""
    given = {_DELETED.name: deleted, FILE: 0, PLACE: 0, _AGE.name: age}
    brought = [name for name in given if name in rows.schema.names]
    tagged = rows.drop_columns(brought) if brought else rows
    for field in _RANKS:
        column = (
            rows[field.name]
            if field.name in brought
            else pa.repeat(pa.scalar(given[field.name], field.type), rows.num_rows)
        )
        tagged = tagged.append_column(field, column)
    return tagged


def _winners(
    rows: Any,
    spec: TableSpec,
    task: MergeTask,
    lost: list[Any],
    tally: Tally,
    past: MergeWriter | None = None,
    *,
    again: bool = False,
) -> tuple[Any, Any, Any]:
    """Rows, and indices of what each key comes to, in key order; those that lost are put into ``lost``, and into the history of
    ``past``. And where the task refuses rows, of whose keys something is stored."""
    order, wins = latest(rows, spec, _TIES)
    winners = order.filter(wins)
    if len(winners) < rows.num_rows:
        lost.append(rows.select(spec.tombstone_schema.names).take(order.filter(pc.invert(wins))))
    if spec.mode == "columns":
        settled, found, uses = combined(rows, spec, order, wins, _TIES)
        _count(tally, rows, spec, order, wins, uses, again=again)
        return settled, found, None
    _count(tally, rows, spec, order, wins, again=again)
    known = _known(rows, order, wins) if task.refuses else None
    if past is not None:
        past.keep_past(rows, order, wins, known)
    return rows, winners, known


def _count(
    tally: Tally, rows: Any, spec: TableSpec, order: Any, wins: Any, uses: Any = None, *, again: bool = False
) -> None:
    """``uses`` (numpy, a boolean for each row) tells which are in what their key comes to; None: those that win."""
    places = order.to_numpy()
    ages, deleted = rows[AGE].to_numpy()[places], true(rows[DELETE_FLAG])[places]
    same = same_content(rows, spec)
    tally.meet(
        true(wins),
        ages,
        deleted,
        same and (lambda one, other: same(places[one], places[other])),
        None if uses is None else uses[places],
        again=again,
    )


def _without_lacking(
    rows: Any, spec: TableSpec, task: MergeTask, lost: list[Any], tally: Tally, past: MergeWriter | None = None
) -> Any:
    """``rows`` without those that a full extract deletes, which are put into ``lost`` and the history of ``past``."""
    order, wins = latest(rows, spec, _TIES)
    ages = rows[AGE].to_numpy()
    killed_by = lacking(rows, order, wins, ages, task.full, spec, task.forgets)
    dead = killed_by >= 0
    if not dead.any():
        return rows
    lost.append(rows.select(spec.tombstone_schema.names).filter(pa.array(dead)))
    tally.lacking(ages[dead], true(rows[DELETE_FLAG])[dead])
    if past is not None:
        past.keep_lacking(rows, killed_by)
    return rows.filter(pa.array(~dead))


def _known(rows: Any, order: Any, wins: Any) -> Any:
    """For each winner, in their order, whether something is stored of its key (numpy)."""
    stored = true(pc.equal(rows[AGE], 0))
    if _KNOWN in rows.schema.names:
        stored |= true(rows[_KNOWN])
    key = np.cumsum(true(wins)) - 1
    known = np.zeros(len(wins) and key[-1] + 1, bool)
    known[key[stored[order.to_numpy()]]] = True
    return known


def _all(rows: Any, refuses: bool) -> tuple[Any, Any]:
    """As of `_winners`, where each row is one."""
    return pa.array(np.arange(rows.num_rows)), true(rows[_KNOWN]) if refuses else None


def _has_more(rest: Any) -> bool:
    """Whether incoming rows have columns that stored ones have not."""
    return not {_KNOWN, DELETED_AT.name}.isdisjoint(rest.schema.names)
