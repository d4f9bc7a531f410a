"""Settle a batch of a table whose keys are unique in the whole table: the record of greatest rank of every key stays.

Reads     the rows that a batch appended, and the key index as of one ledger entry
Writes    the batch's changes of the index, the index with these changes in it, and what `batch` writes. Commits nothing: a
          ledger entry names all of it (`LedgerEntry.keys`, `.index`)
Repeat    safe: every object has a new name, and the same ledger gives the same answer

    appended rows -> spill by hash -> for each range: look up in the index, place by rank -> effects -> the batch is written

A record without a partition is appended to `landing.partitions.UNPLACED`. `placing` gives it one, and it is written again, into a
file of that partition. Its first file is in no ledger entry. `rank.sort_by_rank` decides which record wins, as everywhere.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.keys.batch import Batch
from lakeupsert.engine.keys.effects import Indexed, Refused
from lakeupsert.engine.keys.index import (
    HASH,
    IndexTarget,
    StoredIndex,
    add_hashes,
    is_among_hashes,
    key_schema,
    write_index,
)
from lakeupsert.engine.keys.lives import UnknownKeys
from lakeupsert.engine.keys.placing import place
from lakeupsert.engine.keys.spill import Ranges
from lakeupsert.rows.arrays import Mask, Rows, repeat
from lakeupsert.rows.datafiles import align
from lakeupsert.rows.filewriter import DataFileWriter
from lakeupsert.rows.floor import PARTITION
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import Reason, Touched
from lakeupsert.table.manifest import WHOLE, DataFile
from lakeupsert.table.spec import FILE, PLACE, TableSpec


@dataclass(frozen=True)
class Settled:
    """A batch after it was settled against the index.

    Attributes:
        touched: without rows that are late for another partition, which are superseded, and with deletes in partitions that
            keys left.
        keys: the batch's changes of the index.
        index: the index from before the batch with all changes in it; None if it was not rewritten.
        objects: all objects that were written.
        unknown: how many deletes have no more than the key of a key without a record.
        refused: rows that no file has, with all their columns, by reason. `PARTITION` is what a row named, or null. Those of
            `OF_EARLIER_BATCH` are parts of rows that were stored.
    """

    touched: dict[str, Touched]
    keys: tuple[DataFile, ...]
    index: tuple[DataFile, ...] | None
    objects: frozenset[str]
    unknown: int = 0
    refused: Mapping[Reason, Rows] = field(default_factory=dict)


def settle(
    to: IndexTarget,
    touched: dict[str, Touched],
    index: StoredIndex,
    *,
    fold: bool,
    carry: Callable[[Rows], Rows],
    unknown: UnknownKeys | None = None,
    unreadable: Collection[str] = (),
) -> Settled:
    """Settle the rows of a batch against the index.

    The record of greatest rank of every key stays, wherever it came from; between equal orders an incoming one wins. Incoming
    rows that lose to a record in another partition are superseded here. A row that loses within its own partition stays, for
    its merge to count. If a row wins against a record in another partition, a delete of the row's rank goes there. ``fold``:
    rewrite the index. ``carry`` returns `carry.carried_rows` of keys that move, in mode columns. ``unknown``: needed if
    ``touched`` has `UNPLACED` rows, which get their partitions here. ``unreadable``: see `place`.
    """
    spec, batch = to.spec, Batch(to, touched)
    folded: list[DataFile] = []
    keys = DataFileWriter(
        to.store, partial(TableObjects.new, "keys", to.start), key_schema(spec), to.footer("keys"), ()
    )
    with keys, Ranges(batch.rows + sum(file.rows for file in index.all)) as arrived:
        for block in batch.arrived():
            arrived.add(block)
        for range_ in arrived.ranges:
            incoming = arrived.take(range_)
            if incoming is None and not fold:
                continue
            hashes = np.empty(0, np.uint64) if incoming is None else np.unique(incoming[HASH].to_numpy())
            stored = index.read(to.store, spec, range_, None if fold else hashes)
            if fold:
                folded += write_index(to, range_, stored)
                stored = stored.filter(pa.array(is_among_hashes(stored, hashes)))
            if incoming is None:
                continue
            for effect in place(incoming, stored, batch.partitions_of(incoming), spec, unknown, unreadable):
                batch.take(effect)
                if isinstance(effect, Indexed):
                    keys.write(align(effect.rows.take(pc.sort_indices(effect.rows[HASH])), key_schema(spec)))
    out = batch.written(carry)
    return Settled(
        {partition: t for partition, t in sorted(out.touched.items()) if t.rows},  # all rows of the others are refused
        tuple(keys.files),
        tuple(folded) if fold else None,
        frozenset(out.objects | {f.name for f in (*keys.files, *folded)}),
        batch.unknown,
        out.refused,
    )


def find_refused(
    store: ObjectStore, spec: TableSpec, index: StoredIndex, rows: Rows, unknown: UnknownKeys
) -> dict[Reason, Mask]:
    """Which accepted ``rows`` of a file `settle` would refuse, by reason."""
    partitions = rows[PARTITION].combine_chunks()
    incoming = add_hashes(rows.drop_columns([PARTITION]), spec).append_column(FILE, repeat(0, pa.int32(), rows))
    stored = index.read(store, spec, WHOLE, np.unique(incoming[HASH].to_numpy()))
    effects = place(incoming, stored, partitions, spec, unknown)
    refused = {effect.reason: effect.rows for effect in effects if isinstance(effect, Refused)}
    return {reason: np.isin(rows[PLACE].to_numpy(), found[PLACE].to_numpy()) for reason, found in refused.items()}
