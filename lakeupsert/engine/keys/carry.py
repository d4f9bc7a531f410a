"""Mode columns: what a partition knows of keys that leave it, to be carried to the partitions that they move to.

Reads     stored, tombstone and appended files of the partition that may have one of the keys
Writes    nothing; `batch` writes the rows, and they are appended with the batch that moves the keys
Repeat    safe: the same ledger gives the same rows
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.arrow import add_ranks, is_near
from lakeupsert.engine.keys.index import HASH
from lakeupsert.engine.merge import AGE
from lakeupsert.engine.resolve import TIES, rank
from lakeupsert.engine.runs import runs
from lakeupsert.errors import DamagedTableError
from lakeupsert.landing.adopted import stream_adopted
from lakeupsert.rows.arrays import Rows, repeat, with_column, with_value
from lakeupsert.rows.buckets import key_hashes
from lakeupsert.rows.columns import combine_columns, mark_carried, parts_of, put_counting_first
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.datafiles import Near, align, read_together, stream_file
from lakeupsert.rows.floor import PARTITION, is_among
from lakeupsert.rows.rank import sort_by_key, sort_by_rank, sortable
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import DataFile, TombstoneFile
from lakeupsert.table.spec import BATCH, DELETE_FLAG, FILE, MOVED_FROM, MOVED_TO, OF_EARLIER_BATCH, PLACE, TableSpec

TOGETHER_BYTES = 16 << 20
"""Compressed bytes of a pack that are decoded in one call. More: memory. Less: calls."""
_PARTITION = pa.field(PARTITION, pa.string())


class UnreadableError(Exception):
    """Keys can't leave some partitions. ``why``: the error of each."""

    def __init__(self, why: dict[str, DamagedTableError]) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True)
class Source:
    """A file of a partition. Of greater ``age`` it is later; in ``unsettled`` (adopted) files keys may repeat.

    ``number`` is its place among the partition's files of that age. Rows without rank columns rank by it, and by their position.
    """

    partition: str
    age: int
    number: int
    file: DataFile
    unsettled: bool = False


@dataclass(frozen=True)
class Leaving:
    """Sorted keys that leave a partition, each with its hash, `PARTITION` and `MOVED_TO`; and the files that may have them."""

    keys: Rows
    sources: tuple[Source, ...]


def read_leaving(store: ObjectStore, spec: TableSpec, some: Sequence[Leaving]) -> Rows:
    """All rows and deletes that the files have of the keys, with what ranks them and with their `PARTITION`.

    Files that share a pack are read in one call: for most partitions they have a few rows. Raises DamagedTableError if a file
    can't be read.
    """
    empty = add_ranks(spec.base_schema.empty_table(), age=0, deleted=False)
    found: defaultdict[_Kind, list[Rows]] = defaultdict(list)
    packed: defaultdict[tuple[str, int, _Kind], list[Source]] = defaultdict(list)
    for leaving in some:
        near, find = _finder(spec, leaving.keys)
        for source in leaving.sources:
            if len(some) > 1 and source.file.row is not None:
                packed[source.file.name, source.file.renames, _Kind.of(source)].append(source)
                continue
            for rows in _stream(store, spec, source, near, find):
                partitions = repeat(source.partition, pa.string(), rows)
                found[_Kind.of(source)].append(rows.append_column(_PARTITION, partitions))
    _, find = _finder(spec, pa.concat_tables([leaving.keys for leaving in some]))
    for (_, _, kind), sources in packed.items():
        for run in runs(sources, lambda source: source.file.bytes, TOGETHER_BYTES):
            rows, numbers = read_together(store, [source.file for source in run], _schema(spec, kind.age), spec)
            places = find(rows)
            partitions = pa.array([source.partition for source in run]).take(pa.array(numbers).take(places))
            found[kind].append(rows.take(places).append_column(_PARTITION, partitions))
    ranked = [_ranked(pa.concat_tables(tables), spec, kind) for kind, tables in found.items()]
    return pa.concat_tables([empty.append_column(_PARTITION, pa.array([], pa.string())), *ranked])


class _Kind(NamedTuple):
    """Rows of files of one kind are ranked together. ``unsettled``: they have `ADOPTED_RANK`."""

    age: int
    unsettled: bool
    deleted: bool

    @staticmethod
    def of(source: Source) -> "_Kind":
        return _Kind(source.age, source.unsettled, isinstance(source.file, TombstoneFile))


def _finder(spec: TableSpec, keys: Rows) -> tuple[Near, Callable[[Rows], pa.Array]]:
    """The values of the keys by column, and a function that returns the places of rows that may have one of the keys."""
    hashes = keys[HASH].to_numpy() if len(spec.stored_key) > 1 else None
    near = {name: sortable(keys[name]).combine_chunks() for name in spec.stored_key}

    def find(rows: Rows) -> pa.Array:
        places = pc.indices_nonzero(is_near(rows, near))
        if hashes is None:
            return places
        own = key_hashes(rows.select(spec.stored_key).take(places), spec)
        return places.filter(pa.array(np.isin(own, hashes)))

    return near, find


def _ranked(rows: Rows, spec: TableSpec, kind: _Kind) -> Rows:
    """Rows of files, with `PARTITION` as their last column and all that ranks them before it."""
    if kind.age and spec.versions:
        rows = with_column(rows, BATCH, pc.if_else(pc.equal(rows[BATCH], 0), kind.age, rows[BATCH]))
    ranked = add_ranks(rows.drop_columns([PARTITION]), age=kind.age, deleted=kind.deleted)
    return ranked.append_column(_PARTITION, rows[PARTITION])


def carried_rows(spec: TableSpec, found: Rows, keys: Rows) -> Rows:
    """One row for each key, in their order, with what came of it up to now, for the partition in its `PARTITION`.

    ``found``: what `read_leaving` returns for the partitions that keys leave. All are combined in one call, since the calls cost
    more than the few rows that a partition has. Raises DamagedTableError if a key has no row: then the key index is wrong.
    """
    by_rank, first = sort_by_rank(found, spec, TIES, by=[PARTITION])
    order, wins = by_rank.to_numpy().view(np.int64), as_mask(first)
    order = put_counting_first(found, spec, order, wins, AGE)
    combined = combine_columns(found, spec, order, wins, TIES)
    rows = combined.rows.take(pa.array(combined.chosen))
    rows = rows.filter(pc.invert(rows[DELETE_FLAG]))
    rows = rows.filter(pa.array(is_among(rows, keys, [PARTITION, *spec.stored_key])))
    if rows.num_rows != keys.num_rows:
        wanted, there = (Counter(some[PARTITION].to_pylist()) for some in (keys, rows))
        partition = next(partition for partition in wanted if wanted[partition] != there[partition])
        raise DamagedTableError(
            "broken-invariant",
            f"The key index has {wanted[partition]} keys in {partition}, and {there[partition]} of them have a row there.",
            next="run `lakeupsert reconcile` to see what differs",
        )
    rows = _of_earlier_batch(mark_carried(rows.take(sort_by_key(rows, (PARTITION, *spec.stored_key))), spec))
    return with_column(rows, PARTITION, keys[MOVED_TO]).append_column(MOVED_FROM, keys[PARTITION])


def as_carried(deletes: Rows, spec: TableSpec) -> Rows:
    """Deletes, with their partition in `PARTITION` and `MOVED_TO`: nothing counts there that was stored of their keys."""
    schema = pa.schema([*spec.ranked_schema, *(deletes.schema.field(name) for name in (PARTITION, MOVED_TO))])
    return mark_carried(_of_earlier_batch(align(deletes, schema)), spec)


def _of_earlier_batch(rows: Rows) -> Rows:
    return with_value(with_value(rows, FILE, OF_EARLIER_BATCH), PLACE, OF_EARLIER_BATCH)


def newer_parts(rows: Rows, deletes: Rows, spec: TableSpec) -> Rows:
    """What is left of some ``rows``, of one of `carried_rows` a key, after ``deletes`` of the same keys: the records that are
    newer, see `columns.parts_of`."""
    found = rank(with_value(pa.concat_tables([rows, align(deletes, rows.schema)]), AGE, 0), spec)
    combined = combine_columns(found.rows, spec, found.order, found.wins, TIES)
    return parts_of(combined.rows.take(pa.array(combined.chosen)), spec)


def _stream(
    store: ObjectStore, spec: TableSpec, source: Source, near: Near, find: Callable[[Rows], pa.Array]
) -> Iterator[Rows]:
    if source.unsettled:
        yield from stream_adopted(store, source.file, spec, source.partition, source.number, near, find)
        return
    for rows in stream_file(store, source.file, _schema(spec, source.age), near, spec=spec):
        yield rows.take(find(rows))


def _schema(spec: TableSpec, age: int) -> pa.Schema:
    return spec.arriving_schema if age else spec.base_schema
