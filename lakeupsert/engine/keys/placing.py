"""Which partition each record of a batch gets, in a table whose keys are unique in the whole table, and which records lose.

Reads     no object: it gets the rows of a batch, and the records of the same keys in the key index
Writes    nothing; `batch` writes the effects
Repeat    safe

    rows of a batch + the index's records -> effects: superseded | placed | refused, deletes for more partitions, moves

In mode rows only a delete may have no more than its key. It counts as one for the partition where its key is, or was deleted.
The record of greatest rank of every key stays, wherever it came from. In mode columns, `lives` follows each key.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.keys import effects
from lakeupsert.engine.keys.effects import ALONE, Effect
from lakeupsert.engine.keys.index import HASH, NAMED, by_age, is_among_hashes, key_schema
from lakeupsert.engine.keys.lives import Lives, UnknownKeys
from lakeupsert.engine.merge import AGE
from lakeupsert.landing.partitions import UNPLACED
from lakeupsert.rows.arrays import Column, Indices, Mask, Rows, repeat, with_column
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.floor import PARTITION
from lakeupsert.rows.rank import sort_by_rank
from lakeupsert.table.ledger import Reason
from lakeupsert.table.spec import DELETE_FLAG, FILE, MOVED_TO, PLACE, TableSpec

WHY_REFUSED: dict[Reason, str] = {
    "unknown_key": "It has only its key, and the table has no row with this key: none has come, or it was deleted.",
    "unreadable_partition": "It moves its key from a partition that can't be read.",
}


def place(
    incoming: Rows,
    stored: Rows,
    partitions: Column,
    spec: TableSpec,
    unknown: UnknownKeys | None,
    unreadable: Collection[str] = (),
) -> Iterator[Effect]:
    """Place the rows of a batch. ``incoming`` has all of some keys, and ``stored`` each of these keys once, as the index has it.

    Between equal orders an incoming record wins. Rows that lose within their own partition are not settled here, if they landed
    there: its merge counts them.

    Args:
        partitions: those of the ``incoming`` rows, or `UNPLACED`.
        unknown: needed if a row landed without a partition.
        unreadable: partitions that no living key can leave; in mode columns.
    """
    alone = pc.equal(partitions, UNPLACED)
    rows = incoming.append_column(PARTITION, partitions).append_column(ALONE, alone)
    if spec.mode == "columns":
        rows = rows.append_column(NAMED, pc.invert(alone))
        yield from Lives(rows, stored, spec, unknown, unreadable).followed() if rows.num_rows else ()
        return
    if unknown is not None and pc.any(alone).as_py():
        lonely, others = rows.filter(alone), rows.filter(pc.invert(alone))
        found = _known_partitions(lonely, others, stored, spec)
        is_unknown = found.is_null()
        yield effects.Unknown(pc.sum(is_unknown).as_py())
        lonely = with_column(lonely, PARTITION, found.fill_null(unknown.partition))
        if not unknown.kept and is_unknown.true_count:
            yield effects.Refused(lonely.filter(is_unknown), "unknown_key")
            lonely = lonely.filter(pc.invert(is_unknown))
        rows = pa.concat_tables([others, lonely])
    order, wins = sort_by_rank(rows, spec, (FILE, PLACE))
    best = rows.take(order.filter(wins))
    yield effects.Placed(best.filter(best[ALONE]))
    yield effects.Superseded(rows.take(order.filter(pc.invert(wins))))
    yield from _look_up(best, stored, spec)


def _known_partitions(lonely: Rows, others: Rows, stored: Rows, spec: TableSpec) -> pa.Array:
    """For each ``lonely`` row the partition of its key's stored record, or else of another record of the batch, or null."""
    hashes = np.unique(lonely[HASH].to_numpy())
    near = [rows.filter(pa.array(is_among_hashes(rows, hashes))) for rows in (others, stored)]
    both = by_age((lonely, *near), [*spec.tombstone_schema.names, PARTITION])
    order, wins = sort_by_rank(both, spec, (AGE,))
    places, keys = order.to_numpy(), np.empty(both.num_rows, np.int64)
    keys[places] = np.cumsum(as_mask(wins)) - 1
    source = np.full(int(keys.max()) + 1, -1)
    ages = both[AGE].to_numpy()[places]
    for age in (1, 2):
        some = places[ages == age][::-1]  # the greatest of a key comes last, and stays
        source[keys[some]] = some
    own = source[keys[: lonely.num_rows]]
    return both[PARTITION].combine_chunks().take(pa.array(own, mask=own < 0))


@dataclass(frozen=True)
class _Pairs:
    """Incoming and stored rows of the same keys: indices of the first, the second themselves, and if their partitions differ."""

    incoming: Column
    stored: Rows
    apart: Mask


def _look_up(best: Rows, stored: Rows, spec: TableSpec) -> Iterator[Effect]:
    """Compare with the index. ``best`` and ``stored`` each have a key once. A delete of the winner's rank goes to the partition
    that its key leaves."""
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
    moved = moved.append_column(DELETE_FLAG, repeat(True, pa.bool_(), moved))
    moved = moved.append_column(PARTITION, newer.stored[PARTITION].filter(leaves))
    moved = moved.append_column(MOVED_TO, here.take(movers))
    older = pairs(second[~won & ~alone], first[~won & ~alone])
    yield effects.Superseded(best.take(older.incoming.filter(pa.array(older.apart))))
    yield effects.Left(moved)
    yield effects.Indexed(best.take(pa.array(first[won] - n)).select(key_schema(spec).names))
