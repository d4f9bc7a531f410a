"""Keys of a batch that the table's order would leave with an older event of Debezium than the last one (ADR 0045)."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.landing.formats.positions import CHANGE_PLACES, EVENT_TIMES, LOG_POSITION
from lakeupsert.rows.arrays import Indices, Mask, Rows
from lakeupsert.rows.columns import find_rows_that_bring
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.rank import equal_rows
from lakeupsert.table.spec import DELETE_FLAG, FILE, PLACE, TableSpec


def count_misplaced(rows: Rows, spec: TableSpec, order: pa.Array, wins: pa.Array) -> int:
    """How many keys have an event that is later than their winner both in the log and in the landing files, with other values.

    ``order``, ``wins``: as of `rank.sort_by_rank`. 0 if the table has no positions, or orders by a column of its own.
    One witness is not enough: files may arrive late, and the snapshot of a connector that began again has no position.
    """
    if LOG_POSITION not in rows.schema.names or spec.order_by[0] not in (*CHANGE_PLACES, *EVENT_TIMES):
        return 0
    positions = pc.rank(pc.fill_null(rows[LOG_POSITION], ""), tiebreaker="min").to_numpy()
    files, places = rows[FILE].to_numpy(), rows[PLACE].to_numpy()
    by_order: Indices = order.to_numpy()
    first = as_mask(wins)
    keys = np.cumsum(first) - 1
    by_log = by_order[np.lexsort((places[by_order], files[by_order], positions[by_order], keys))]
    winners, last = by_order[first], by_log[np.append(first[1:], True)[: len(first)]]
    later: Mask = (files[last] > files[winners]) | ((files[last] == files[winners]) & (places[last] > places[winners]))
    later &= positions[last] > positions[winners]
    return int(np.count_nonzero(~_equal_where_both_have(rows, spec, winners[later], last[later])))


def _equal_where_both_have(rows: Rows, spec: TableSpec, one: Indices, other: Indices) -> Mask:
    """For n pairs of rows, by index: whether they have equal values. In mode columns a column counts that both rows bring."""
    equal = np.ones(len(one), bool)
    brought = [find_rows_that_bring(rows, spec, some) for some in (one, other)]
    for name in (name for name in rows.schema.names if name == DELETE_FLAG or not name.startswith("_")):
        if pa.types.is_nested(rows.schema.field(name).type):  # pyarrow does not compare these
            pairs = zip(rows[name].take(one).to_pylist(), rows[name].take(other).to_pylist(), strict=True)
            same = np.fromiter((repr(a) == repr(b) for a, b in pairs), bool, len(one))
        else:
            same = equal_rows(rows, [name], one, other)
        equal &= same | (~(brought[0][name] & brought[1][name]) if name in brought[0] else False)
    return equal
