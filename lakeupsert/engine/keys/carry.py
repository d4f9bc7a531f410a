"""Mode columns: what a partition knows of keys that leave it, to be carried to the partitions that they move to.

Reads     stored, tombstone and appended files of the partition that may have one of the keys
Writes    nothing; `batch` writes the rows, and they are appended with the batch that moves the keys
Repeat    safe: the same ledger gives the same rows
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.arrow import add_ranks, is_near
from lakeupsert.engine.keys.index import HASH
from lakeupsert.engine.merge import AGE
from lakeupsert.engine.resolve import TIES, rank
from lakeupsert.errors import DamagedTableError
from lakeupsert.landing.adopted import stream_adopted
from lakeupsert.rows.arrays import Rows, with_column, with_value
from lakeupsert.rows.buckets import key_hashes
from lakeupsert.rows.columns import combine_columns, mark_carried, parts_of, put_counting_first
from lakeupsert.rows.datafiles import Near, align, stream_file
from lakeupsert.rows.floor import PARTITION, is_among
from lakeupsert.rows.rank import sort_by_key, sortable
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import DataFile, TombstoneFile
from lakeupsert.table.spec import BATCH, DELETE_FLAG, FILE, MOVED_FROM, MOVED_TO, OF_EARLIER_BATCH, PLACE, TableSpec


class WrongIndexError(DamagedTableError):
    """The key index has keys where they are not."""


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


def carried_rows(store: ObjectStore, spec: TableSpec, leaving: Leaving) -> Rows:
    """One row for each key, with what came of it up to now, for the partition in its `PARTITION`.

    Raises DamagedTableError if a file can't be read; WrongIndexError if a key has no row.
    """
    keys = leaving.keys
    hashes = keys[HASH].to_numpy() if len(spec.stored_key) > 1 else None
    near = {name: sortable(keys[name]).combine_chunks() for name in spec.stored_key}
    tables = [add_ranks(spec.base_schema.empty_table(), age=0, deleted=False)]
    for source in leaving.sources:
        for block in _stream(store, spec, source, near):
            some = block.filter(is_near(block, near))
            tables.append(some if hashes is None else some.filter(pa.array(np.isin(key_hashes(some, spec), hashes))))
    found = rank(pa.concat_tables(tables), spec)
    order = put_counting_first(found.rows, spec, found.order, found.wins, AGE)
    combined = combine_columns(found.rows, spec, order, found.wins, TIES)
    rows = combined.rows.take(pa.array(combined.chosen))
    rows = rows.filter(pc.invert(rows[DELETE_FLAG]))
    rows = rows.append_column(PARTITION, pa.repeat(keys[PARTITION][0], rows.num_rows))
    rows = rows.filter(pa.array(is_among(rows, keys, spec)))
    if rows.num_rows != keys.num_rows:
        raise WrongIndexError(
            "broken-invariant",
            f"The key index has {keys.num_rows} keys in {keys[PARTITION][0]}, and {rows.num_rows} of them have a row there.",
            next="run `lakeupsert reconcile` to see what differs",
        )
    rows = _of_earlier_batch(mark_carried(rows.take(sort_by_key(rows, spec.stored_key)), spec))
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


def _stream(store: ObjectStore, spec: TableSpec, source: Source, near: Near) -> Iterator[Rows]:
    if source.unsettled:
        blocks = stream_adopted(store, source.file, spec, source.partition, source.number)
    else:
        schema = spec.arriving_schema if source.age else spec.base_schema
        blocks = stream_file(store, source.file, schema, near, spec=spec)
    for block in blocks:
        if source.age and spec.versions:
            block = with_column(block, BATCH, pc.if_else(pc.equal(block[BATCH], 0), source.age, block[BATCH]))
        yield add_ranks(block, age=source.age, deleted=isinstance(source.file, TombstoneFile))
