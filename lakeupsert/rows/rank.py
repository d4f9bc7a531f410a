"""G1's order of rows, the one place that decides which row of a key wins.

Rank = (ordering columns, each by its direction and its rule for null; where `ties` is content whether it is a delete, and
all other columns; then the tie-breaks that the caller names, such as batch, file, place in the file). Sorting and comparing
are pyarrow's; floats are turned into integers first, because pyarrow puts NaN beside null, and here NaN is greatest and -0.0
equals 0.0, as Spark and DuckDB have it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.rows.convert import true
from lakeupsert.table.spec import DELETE_FLAG, Ordering, TableSpec


def latest(
    table: Any, spec: TableSpec, ties: Sequence[str], by: Sequence[str] = (), first: Sequence[str] = ()
) -> tuple[Any, Any]:
    """Where the row of greatest rank of every key is.

    n rows in, with the columns of the spec's `deciding_schema`; two arrays out. ``order`` (n indices) sorts the rows by key,
    greatest rank first; ``wins`` (n booleans, in that order) marks the first row of each key. Keys are told apart by the
    columns ``by``, too, and first. Columns ``first`` decide between equal ordering values before all else. Key columns hold no
    null; ``ties`` are integers and tell all rows apart that a key can have.
    """
    key = (*by, *spec.stored_key)
    columns = {f"k{i}": sortable(table[name]) for i, name in enumerate(key)}
    sort_keys = [(name, "ascending", "at_end") for name in columns]

    def then(name: str, ordering: Ordering) -> None:
        columns[name] = sortable(table[ordering.column])
        direction = "ascending" if ordering.ascending else "descending"
        sort_keys.append((name, direction, "at_start" if ordering.nulls_first else "at_end"))

    for i, ordering in enumerate(spec.ordering):
        then(f"o{i}", ordering)
    deciding = [DELETE_FLAG] if spec.ties == "content" and DELETE_FLAG in table.schema.names else []
    for i, name in enumerate((*first, *deciding, *spec.content, *ties)):
        then(f"t{i}", Ordering(name))
    order = pc.sort_indices(pa.table(columns), sort_keys=sort_keys)
    return order, _first_of_each([columns[f"k{i}"] for i in range(len(key))], order)


def equal_rows(rows: Any, names: Sequence[str], one: Any, other: Any) -> Any:
    """For pairs of places whether their rows are equal in these columns, as `latest` compares them; null equals null (numpy)."""
    equal = np.ones(len(one), bool)
    for name in names:
        left, right = sortable(rows[name].take(one)), sortable(rows[name].take(other))
        both_null = true(left.is_null()) & true(right.is_null()) if left.null_count and right.null_count else False
        equal &= true(pc.equal(left, right)) | both_null
    return equal


def versions(rows: Any, spec: TableSpec, order: Any, wins: Any) -> Any:
    """Of n rows as `latest` orders them, the greatest of each key and ordering value (n booleans; numpy, as ``wins`` is)."""
    differs = ~equal_rows(rows, spec.order_by, order[1:], order[:-1])
    return wins | np.append(True, differs)[: len(order)]


def sortable(column: Any) -> Any:
    """A column whose pyarrow order is G1's: itself; for floats an integer of the same order; for small decimals a wide one.

    (pyarrow 26 sorts decimal32 and decimal64 wrongly, without a word, where there are several sort keys.)
    """
    if pa.types.is_decimal(column.type) and column.type.bit_width < 128:
        return column.cast(pa.decimal128(column.type.precision, column.type.scale))
    if not pa.types.is_floating(column.type):
        return column
    values = (column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column).cast(pa.float64())
    plain = pc.fill_null(values, 0.0).to_numpy(zero_copy_only=False) + 0.0  # -0.0 + 0.0 is 0.0
    bits = np.where(np.isnan(plain), np.float64("nan"), plain).view(np.int64)
    # Negative floats count down in their bits: flip all but the sign, and integer order is float order.
    ordered = np.where(bits < 0, bits ^ np.int64(0x7FFF_FFFF_FFFF_FFFF), bits)
    return pa.array(ordered, mask=pc.is_null(values).to_numpy(zero_copy_only=False))


def sorted_by(table: Any, key: Sequence[str]) -> Any:
    """Indices of the rows in key order."""
    columns = {f"k{i}": sortable(table[name]) for i, name in enumerate(key)}
    return pc.sort_indices(pa.table(columns), sort_keys=[(name, "ascending") for name in columns])


def rows_up_to(table: Any, key: Sequence[str], last: Sequence[Any]) -> int:
    """How many rows of ``table``, sorted by key, have a key that is not above ``last`` (one scalar a key column)."""
    up_to = equal = None
    for name, scalar in zip(key, last, strict=True):
        column = sortable(table[name])
        less = pc.less(column, scalar.cast(column.type))
        same = pc.equal(column, scalar.cast(column.type))
        up_to = less if up_to is None else pc.or_(up_to, pc.and_(equal, less))
        equal = same if equal is None else pc.and_(equal, same)
    return int(pc.sum(pc.or_(up_to, equal)).as_py() or 0)


def _first_of_each(key_columns: Sequence[Any], order: Any) -> Any:
    n = len(order)
    if n == 0:
        return pa.array([], pa.bool_())
    differs = None
    for column in key_columns:
        ordered = column.take(order)
        here = pc.not_equal(ordered.slice(1), ordered.slice(0, n - 1))
        differs = here if differs is None else pc.or_(differs, here)
    return pa.chunked_array([pa.array([True]), *_chunks(differs)], pa.bool_()).combine_chunks()


def _chunks(array: Any) -> list[Any]:
    return array.chunks if isinstance(array, pa.ChunkedArray) else [array]
