"""Keys of a batch that the table's order would leave with an older event of Debezium than the last one (ADR 0045)."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.landing.formats.positions import CHANGE_PLACES, EVENT_TIMES, LOG_POSITION
from lakeupsert.rows.arrays import Indices, Mask, Rows
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
    winners, last = winners[later], last[later]
    values = [field for field in rows.schema if field.name == DELETE_FLAG or not field.name.startswith("_")]
    if any(pa.types.is_nested(field.type) for field in values):  # they do not compare
        return len(last)
    return int(np.count_nonzero(~equal_rows(rows, [field.name for field in values], winners, last)))
