"""The rank of a record, which decides which record of a key wins (the promise "order").

Engine spark states the same order in SQL (`spark_window`), on purpose: `tests/property/test_engines_agree.py` compares both.

Rank = (ordering columns, each with its direction and its rule for null; with `ties` content, whether the record is a delete and
all its other columns; then what the caller names: in a merge batch, file and place in the file, `engine.resolve.TIES`). pyarrow
sorts and compares. Floats are converted to integers first, because pyarrow puts NaN next to null; here NaN is the greatest value
and -0.0 equals 0.0, as in Spark and DuckDB.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.rows.arrays import Column, Indices, Mask, Rows
from lakeupsert.rows.convert import as_mask
from lakeupsert.table.roles import Ordering
from lakeupsert.table.spec import DELETE_FLAG, TableSpec


def sort_by_rank(
    rows: Rows, spec: TableSpec, ties: Sequence[str], by: Sequence[str] = (), first: Sequence[str] = ()
) -> tuple[pa.Array, pa.Array]:
    """Sort rows by key and rank, and mark the row that wins each key.

    n rows in, with the columns of the spec's `deciding_schema`; two arrays out. ``order`` (n indices) sorts the rows by key,
    greatest rank first. ``wins`` (n booleans, in that order) marks the first row of each key.

    Args:
        ties: integer columns that decide last. Together they must differ between any two rows of a key.
        by: columns that belong to the key, in front of the spec's key columns.
        first: columns that decide before all others between rows with equal ordering values.

    Key columns must not contain nulls.
    """
    key = (*by, *spec.stored_key)
    columns = {f"k{i}": sortable(rows[name]) for i, name in enumerate(key)}
    sort_keys = [(name, "ascending", "at_end") for name in columns]
    deciding = [DELETE_FLAG] if spec.ties == "content" and DELETE_FLAG in rows.schema.names else []
    orderings = (*spec.ordering, *map(Ordering, (*first, *deciding, *spec.content, *ties)))
    for i, ordering in enumerate(orderings):
        columns[f"o{i}"] = sortable(rows[ordering.column])
        sort_keys.append(sort_key(f"o{i}", ordering))
    order = pc.sort_indices(pa.table(columns), sort_keys=sort_keys)
    return order, _first_of_each([columns[f"k{i}"] for i in range(len(key))], order)


def sort_key(name: str, ordering: Ordering) -> tuple[str, str, str]:
    """pyarrow's sort key for a column ``name`` that puts the value that wins first."""
    direction = "ascending" if ordering.ascending else "descending"
    return name, direction, "at_start" if ordering.nulls_first else "at_end"


def equal_rows(rows: Rows, names: Sequence[str], one: Indices, other: Indices) -> Mask:
    """For n pairs of rows, by index: whether both are equal in these columns, as `sort_by_rank` compares. Null equals null."""
    equal = np.ones(len(one), bool)
    for name in names:
        left, right = sortable(rows[name].take(one)), sortable(rows[name].take(other))
        both_null = (
            as_mask(left.is_null()) & as_mask(right.is_null()) if left.null_count and right.null_count else False
        )
        equal &= as_mask(pc.equal(left, right)) | both_null
    return equal


def mark_versions(rows: Rows, spec: TableSpec, order: Indices, wins: Mask) -> Mask:
    """Mark the first row of each key and ordering value, among n rows in the order of `sort_by_rank`."""
    differs = ~equal_rows(rows, spec.order_by, order[1:], order[:-1])
    first: Mask = np.append(True, differs)[: len(order)]
    return wins | first


def sortable(column: Column) -> Column:
    """A column that pyarrow sorts in rank order: floats as integers, small decimals as decimal128, others unchanged.

    (pyarrow 26 sorts decimal32 and decimal64 wrongly, without an error, if there are several sort keys.)
    """
    if pa.types.is_decimal(column.type) and column.type.bit_width < 128:
        return column.cast(pa.decimal128(column.type.precision, column.type.scale))
    if not pa.types.is_floating(column.type):
        return column
    values = (column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column).cast(pa.float64())
    plain = pc.fill_null(values, 0.0).to_numpy() + 0.0  # -0.0 + 0.0 is 0.0
    bits = np.where(np.isnan(plain), np.float64("nan"), plain).view(np.int64)
    # The bits of negative floats count down. With all bits but the sign flipped, integer order is float order.
    ordered = np.where(bits < 0, bits ^ np.int64(0x7FFF_FFFF_FFFF_FFFF), bits)
    return pa.array(ordered, mask=pc.is_null(values).to_numpy(zero_copy_only=False))


def sort_by_key(rows: Rows, key: Sequence[str]) -> pa.Array:
    """Indices that sort the rows by key."""
    columns = {f"k{i}": sortable(rows[name]) for i, name in enumerate(key)}
    return pc.sort_indices(pa.table(columns), sort_keys=[(name, "ascending") for name in columns])


def count_rows_up_to(rows: Rows, key: Sequence[str], last: Sequence[pa.Scalar]) -> int:
    """How many of ``rows``, sorted by key, have a key that is not greater than ``last`` (one scalar per key column)."""
    up_to = pa.scalar(True)
    for name, scalar in zip(reversed(key), reversed(last), strict=True):
        column = sortable(rows[name])
        value = scalar.cast(column.type)
        up_to = pc.or_(pc.less(column, value), pc.and_(pc.equal(column, value), up_to))
    return int(pc.sum(up_to).as_py() or 0)


def _first_of_each(key_columns: Sequence[Column], order: pa.Array) -> pa.Array:
    ordered = [column.take(order) for column in key_columns]
    differs = [as_mask(pc.not_equal(column.slice(1), column.slice(0, len(column) - 1))) for column in ordered if order]
    return pa.array(np.append(True, np.logical_or.reduce(differs))[: len(order)], pa.bool_())
