"""The key index: one row for each key of the table, in ranges of hashes.

Reads     the files of the index, and those of its changes
Writes    files of the index
Repeat    safe: every object has a new name

A row has the key columns and the ordering columns, no payload. A delete stays, so that older records of its key stay dead in
every partition. Hashes only find candidates: rows are compared by their keys, so two keys with the same hash stay two keys.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.merge import AGE
from lakeupsert.rows.arrays import Hashes, Mask, Rows, repeat, with_column
from lakeupsert.rows.buckets import buckets, cut_by_number, key_hashes
from lakeupsert.rows.datafiles import POSITION, align, stream_file
from lakeupsert.rows.filewriter import DataFileWriter, Footer
from lakeupsert.rows.floor import PARTITION
from lakeupsert.rows.rank import sort_by_key, sort_by_rank
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.manifest import WHOLE, Bucketed, DataFile, Part, share
from lakeupsert.table.spec import DELETE_FLAG, FILE, PLACE, TableSpec

HASH = "_lakeupsert_hash"
NAMED = "_lakeupsert_named"
"""Boolean column of the index, in mode columns: the record named its partition."""
NAMING = "_lakeupsert_naming"
"""Struct column: the order of the record that named the partition, if that is another one. Null for a deleted key, and if it is
not known."""


@dataclass(frozen=True)
class IndexTarget:
    """The batch that objects are written for; ``start`` is as in `TableObjects`."""

    store: ObjectStore
    spec: TableSpec
    spec_version: int
    batch_id: str
    start: int

    def footer(self, kind: str, of: Bucketed = WHOLE) -> Footer:
        place = None, of.bucket, of.bits, len(self.spec.renames)
        return Footer(self.spec.table_id, kind, self.batch_id, self.spec_version, *place)


def key_schema(spec: TableSpec) -> pa.Schema:
    """The schema of the index."""
    place = [pa.field(PARTITION, pa.string()), pa.field(DELETE_FLAG, pa.bool_())]
    return pa.schema([pa.field(HASH, pa.uint64()), *spec.tombstone_schema, *place, *naming_fields(spec)])


def arrived_schema(spec: TableSpec) -> pa.Schema:
    """Columns that are read of appended rows."""
    ranks = [spec.ranked_schema.field(name) for name in (FILE, PLACE, DELETE_FLAG)]
    return pa.schema([*spec.tombstone_schema, *ranks, pa.field(POSITION, pa.int64())])


def naming_fields(spec: TableSpec) -> list[pa.Field]:
    if spec.mode == "rows":
        return []
    orders = pa.struct([(name, spec.schema.field(name).type) for name in spec.order_by])
    return [pa.field(NAMED, pa.bool_()), pa.field(NAMING, orders)]


@dataclass(frozen=True)
class StoredIndex:
    """The index as of a ledger entry: ``files``, with the changes ``deltas`` since, oldest first."""

    files: tuple[DataFile, ...] = ()
    deltas: tuple[DataFile, ...] = ()

    @property
    def all(self) -> tuple[DataFile, ...]:
        return (*self.files, *self.deltas)

    def read(self, store: ObjectStore, spec: TableSpec, range_: Part, hashes: Hashes | None) -> Rows:
        """The rows in a range, one for each key, sorted by hash. With ``hashes``, only rows that have one of these."""
        schema = key_schema(spec)

        def read(files: Iterable[DataFile]) -> Rows:
            tables = [schema.empty_table()]
            near = {HASH: _span(range_) if hashes is None else pa.array(hashes)}
            for file in files:
                if share(file, range_):
                    for block in stream_file(store, file, schema, near):
                        own = block[HASH].to_numpy()
                        wanted = (
                            buckets(own, range_.bits) == range_.bucket
                            if hashes is None
                            else is_among_hashes(block, hashes)
                        )
                        tables.append(block.filter(pa.array(wanted)))
            return pa.concat_tables(tables)

        base, changes = read(self.files), [read([file]) for file in self.deltas]
        # A change is later than what it changes. It may have a lower order: that of a late delete which ends a key (`placing`).
        newer = pa.concat_tables(
            [rows.append_column(AGE, repeat(age, pa.int32(), rows)) for age, rows in enumerate(changes, 1)]
            or [schema.append(pa.field(AGE, pa.int32())).empty_table()]
        )
        if not newer.num_rows:
            return base
        contested = is_among_hashes(base, np.unique(newer[HASH].to_numpy()))
        older = base.filter(pa.array(contested))
        both = pa.concat_tables([older.append_column(AGE, repeat(0, pa.int32(), older)), newer])
        order, wins = sort_by_rank(both, without_order(spec), (AGE,))
        rows = pa.concat_tables([base.filter(pa.array(~contested)), both.take(order.filter(wins)).select(schema.names)])
        return rows.take(pc.sort_indices(rows[HASH]))


def write_index(to: IndexTarget, range_: Part, rows: Rows) -> list[DataFile]:
    footer = to.footer("keys", range_)
    new_name = partial(TableObjects.new, "keys", to.start)
    with DataFileWriter(to.store, new_name, key_schema(to.spec), footer, ()) as out:
        out.write(align(rows, key_schema(to.spec)))
    return out.files


def without_order(spec: TableSpec) -> TableSpec:
    return msgspec.structs.replace(spec, order_by=(), ascending=(), nulls_first=())


def _span(range_: Bucketed) -> slice:
    """The least and the greatest hash of a range."""
    width = 1 << 64 - range_.bits
    return slice(range_.bucket * width, (range_.bucket + 1) * width - 1)


def add_hashes(rows: Rows, spec: TableSpec) -> Rows:
    return rows.append_column(HASH, pa.array(key_hashes(rows, spec)))


def is_among_hashes(rows: Rows, hashes: Hashes) -> Mask:
    """The rows whose `HASH` is one of these, which are sorted."""
    own = rows[HASH].to_numpy()
    if not len(hashes):
        return np.zeros(len(own), bool)
    found: Mask = hashes[np.minimum(np.searchsorted(hashes, own), len(hashes) - 1)] == own
    return found


def by_age(tables: Sequence[Rows], columns: Sequence[str]) -> Rows:
    """The tables, one below the other. `AGE` is a row's table."""
    ages = [repeat(age, pa.int8(), rows) for age, rows in enumerate(tables)]
    return pa.concat_tables(
        [rows.select(columns).append_column(AGE, age) for rows, age in zip(tables, ages, strict=True)],
        promote_options="default",  # a column that can't be null in one of them may be so in another
    )


def by_partition(rows: Rows, spec: TableSpec) -> list[tuple[str, Rows]]:
    """The rows of each partition, in key order; first those of the partition with the least name."""
    rows = rows.take(sort_by_key(rows, (PARTITION, *spec.stored_key)))
    encoded = rows[PARTITION].combine_chunks().dictionary_encode()
    names = encoded.dictionary.to_pylist()
    return [(names[number], own) for number, own in cut_by_number(rows, encoded.indices.to_numpy())]


def with_naming_order(stored: Rows, spec: TableSpec) -> Rows:
    """Records of the index with the orders that named their partitions."""
    orders = stored[NAMING].combine_chunks()
    for name in spec.order_by:
        stored = with_column(stored, name, orders.field(name))
    return stored
