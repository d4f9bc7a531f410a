"""Deletes that bring nothing but their key, although each column has a value.

With PostgreSQL's default replica identity Debezium knows only the key of a deleted row. It sends null for the other columns, and
for those that are NOT NULL it invents 0, false, an empty text or the first moment of 1970. So the delete names a partition that
has nothing to do with its row.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.landing.partitions import partition_sources
from lakeupsert.rows.arrays import Mask
from lakeupsert.rows.convert import as_mask
from lakeupsert.table.spec import TableSpec

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
        if pa.types.is_string(columns[name].type) or pa.types.is_large_string(columns[name].type):
            empty = is_delete & as_mask(pc.equal(columns[name], "").fill_null(False))
            columns[name] = pc.if_else(pa.array(empty), None, columns[name])


def _is_zero(column: pa.Array) -> Mask:
    t, type_ = pa.types, column.type
    if t.is_string(type_) or t.is_large_string(type_):
        return as_mask(pc.match_substring_regex(column, _ZERO))
    if t.is_boolean(type_):
        return as_mask(pc.invert(column))
    if t.is_date32(type_) or t.is_time32(type_):
        column = column.view(pa.int32())
    elif t.is_temporal(type_):
        column = column.view(pa.int64())
    elif not (t.is_integer(type_) or t.is_floating(type_) or t.is_decimal(type_)):
        return as_mask(column.is_valid())  # bytes and nested values say nothing
    return as_mask(pc.equal(column.cast(pa.float64(), safe=False), 0.0))
