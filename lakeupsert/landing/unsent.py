"""Values that a source did not send for a row: what PostgreSQL's replica identity and TOAST leave out of a change.

With the default replica identity Debezium knows only the key of a deleted row. It sends null for the other columns, and for those
that are NOT NULL it invents 0, false, an empty text or the first moment of 1970. So the delete names a partition that has nothing
to do with its row. Of an update, a long value that did not change is left out (wal2json) or a placeholder (Debezium).
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.landing.formats.blocks import Block
from lakeupsert.landing.formats.unavailable import find_unavailable, is_unavailable
from lakeupsert.landing.partitions import partition_sources
from lakeupsert.landing.refusals import Refusals
from lakeupsert.rows.arrays import Mask
from lakeupsert.rows.convert import as_mask
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.types import is_number, is_text

_ZERO = r"^(0*(\.0+)?|false|\{\}|\[\]|A+=*|P0Y0M0DT0H0M0S|00:00:00(\.0+)?Z?|1970-01-01(Z|[T ]00:00:00(\.0+)?Z?)?)$"
"""The same values as text: of numbers, decimals in base64, dates and times; and empty objects and lists."""


def find_hollow_deletes(columns: Mapping[str, pa.Array], is_delete: Mask, spec: TableSpec) -> Mask:
    """Which rows are such deletes and name a partition by an invented value; none if the key alone finds the partition."""
    sources = {*partition_sources(spec)} - {*spec.key}
    if not sources or spec.takes_key_alone or not is_delete.any():
        return np.zeros(len(is_delete), bool)
    hollow: Mask = is_delete & np.logical_and.reduce([_is_zero(columns[name]) for name in sources])
    ours = {*spec.key, *sources, *(one.column for one in spec.partition_from), *(spec.order_by if spec.stamped else ())}
    for name, column in columns.items():
        if hollow.any() and name not in ours and not name.startswith("_"):  # names of the event itself begin so
            hollow &= _is_zero(column) | as_mask(column.is_null())
    return hollow


def drop_empty_texts(columns: dict[str, pa.Array], is_delete: Mask, spec: TableSpec) -> None:
    """Let deletes by the key name no partition by an empty text, which no folder can have."""
    for name in spec.partition_by if spec.takes_key_alone else ():
        if is_text(columns[name].type):
            empty = is_delete & as_mask(pc.equal(columns[name], "").fill_null(False))
            columns[name] = pc.if_else(pa.array(empty), None, columns[name])


def _is_zero(column: pa.Array) -> Mask:
    t, type_ = pa.types, column.type
    if is_text(type_):
        return as_mask(pc.match_substring_regex(column, _ZERO))
    if t.is_boolean(type_):
        return as_mask(pc.invert(column))
    if t.is_date32(type_) or t.is_time32(type_):
        column = column.view(pa.int32())
    elif t.is_temporal(type_):
        column = column.view(pa.int64())
    elif not is_number(type_):
        return as_mask(column.is_valid())  # bytes and nested values say nothing
    return as_mask(pc.equal(column.cast(pa.float64(), safe=False), 0.0))


def find_unsent(block: Block, name: str, column: pa.Array, unfit: Mask) -> Mask:
    """Which values of a column are Debezium's placeholder, also where they do not fit the column's type."""
    found = find_unavailable(column)
    if rows := np.flatnonzero(unfit).tolist():
        found[rows] = [is_unavailable(value) for value in block.originals(name, rows)]
    return found


def find_incomplete_creates(block: Block, unavailable: Mapping[str, Mask]) -> Mask:
    """Which rows lack an unavailable value and begin, so no stored row has it: the key of a row changed at the source."""
    if not unavailable:
        return np.zeros(len(block.places), bool)
    incomplete: Mask = np.logical_or.reduce([*unavailable.values()])
    return incomplete & as_mask(pc.is_in(block.convert("__op", pa.string())[0], pa.array(["c", "r"])))


def _long_columns(spec: TableSpec) -> list[str]:
    """Columns whose values PostgreSQL may store apart (TOAST). Numbers, dates and times are short."""
    computed = {one.column for one in spec.partition_from}
    fields = (f for f in spec.schema if not pa.types.is_primitive(f.type) and f.name not in computed)
    return [f.name for f in fields if not f.name.startswith("__")]


def find_moved_without_value(block: Block, spec: TableSpec) -> Mask:
    """Which rows of wal2json are new ones of a changed identity, after its delete, and lack a long value.

    The delete of a whole row (REPLICA IDENTITY FULL) has all columns, and so has the row after it.
    """
    action = block.convert("__action", pa.string())[0]
    is_delete, found = as_mask(pc.equal(action, "D")), as_mask(pc.equal(action, "U"))
    follows = np.flatnonzero(is_delete[:-1] & found[1:] & (np.diff(block.places) == 1))
    found[:] = False
    if len(follows):
        has = [block.has(name) for name in block.names]
        is_whole = ~np.logical_or.reduce([one[follows + 1] & ~one[follows] for one in has])
        lacks = np.logical_or.reduce([~block.has(name)[follows + 1] for name in _long_columns(spec)] or [is_whole])
        found[follows + 1] = lacks & ~is_whole
    return found


def refuse_incomplete(block: Block, is_delete: Mask, refusals: Refusals, spec: TableSpec) -> None:
    """Refuse updates of wal2json without a column that may be stored apart (TOAST): it is left out if it did not change."""
    update = as_mask(pc.equal(block.convert("__action", pa.string())[0], "U")) & ~is_delete
    for name in _long_columns(spec):
        reason = (
            f"The update lacks column {name!r}: PostgreSQL does not send a long value that stayed. "
            '`mode = "columns"` keeps it, and `ALTER TABLE … REPLICA IDENTITY FULL` sends it. If the source dropped the '
            "column, drop it here: `lakeupsert schema drop`."
        )
        refusals.add("bad_type", update & ~block.has(name), reason)
