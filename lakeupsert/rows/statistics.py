"""Statistics of a data file for its manifest entry, from the footer that was just written: no row is read for them."""

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.table.manifest import Bound, ColumnStatistics
from lakeupsert.table.spec import TableSpec, field_id
from lakeupsert.table.types import leaves

MOST_COLUMNS = 32
"""Columns of a file that have statistics. More: manifests and Delta logs grow, and every reader and publish reads them. Less: a
filter on one of the others opens files in vain."""
MOST_A_PARTITION = 512
"""Columns that have statistics in all buckets of a partition together. The rows of a bucket are a sample of the partition's, so
many buckets have nearly the same statistics. More: the manifest of a large partition grows. Less: see `MOST_COLUMNS`."""
CHARACTERS = 32
"""Characters of a bound of text; Delta's writers take as many."""


_Chunks = Sequence[pq.Statistics]
"""The statistics of a column in each row group that has a value of it."""
_Bounds = tuple[Bound, Bound]


class StatisticsColumn(NamedTuple):
    """A column that has statistics.

    Attributes:
        leaf: its place among the leaf columns of a base file.
        bounds: no value is below the first or above the second.
    """

    id: int
    leaf: int
    bounds: Callable[[_Chunks], _Bounds]


def columns_with_statistics(spec: TableSpec, bits: int) -> Sequence[StatisticsColumn]:
    """Those of a file of one of 2^``bits`` buckets: key and ordering columns first, then others in their order."""
    return _columns(spec)[: min(MOST_COLUMNS, MOST_A_PARTITION >> bits)]


@lru_cache(maxsize=64)  # each merge of a bucket asks
def _columns(spec: TableSpec) -> list[StatisticsColumn]:
    begins = accumulate((len(leaves("", type_)) for type_ in spec.base_schema.types), initial=0)
    places = dict(zip(spec.base_schema.names, begins, strict=False))
    names = dict.fromkeys((*spec.stored_key, *spec.order_by, *spec.stored_schema.names))
    fields = [(field, _bounds_of(field.type)) for field in map(spec.schema.field, names)]
    return [StatisticsColumn(field_id(field), places[field.name], bounds) for field, bounds in fields if bounds]


def has_bounds(type_: pa.DataType) -> bool:
    """Whether columns of the type have statistics. Floats have none: their bounds would leave out NaN."""
    return _bounds_of(type_) is not None


def statistics_of(footer: pq.FileMetaData, columns: Sequence[StatisticsColumn]) -> tuple[ColumnStatistics, ...]:
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    found = []
    for column in columns:
        chunks = [group.column(column.leaf).statistics for group in groups]
        nulls = sum(chunk.null_count for chunk in chunks)
        chunks = [chunk for chunk in chunks if chunk.num_values]
        # Parquet has no bounds of a chunk with a very long text.
        known = chunks and all(chunk.has_min_max for chunk in chunks)
        found.append(ColumnStatistics(column.id, nulls, *(column.bounds(chunks) if known else ())))
    return tuple(found)


def _bounds_of(type_: pa.DataType) -> Callable[[_Chunks], _Bounds] | None:
    """How to read the bounds of columns of the type; None if they have none."""
    t = pa.types
    if t.is_timestamp(type_):
        return partial(_raw_bounds, scale=1000 if type_.unit in ("s", "ms") else 1)  # Parquet has no seconds
    if t.is_date32(type_):
        return _raw_bounds
    if t.is_string(type_) or t.is_large_string(type_):
        return _text_bounds
    if t.is_decimal(type_):
        return _decimal_bounds
    return _plain_bounds if t.is_integer(type_) or t.is_boolean(type_) else None


def _raw_bounds(chunks: _Chunks, scale: int = 1) -> _Bounds:
    least, greatest = min(chunk.min_raw for chunk in chunks) * scale, max(chunk.max_raw for chunk in chunks) * scale
    fits = least >= -(2**63) and greatest < 2**63  # readers take microseconds as 64 bits
    return (least, greatest) if fits else (None, None)


def _plain_bounds(chunks: _Chunks) -> _Bounds:
    return min(chunk.min for chunk in chunks), max(chunk.max for chunk in chunks)


def _decimal_bounds(chunks: _Chunks) -> _Bounds:
    return f"{min(chunk.min for chunk in chunks):f}", f"{max(chunk.max for chunk in chunks):f}"


def _text_bounds(chunks: _Chunks) -> _Bounds:
    try:
        low, high = min(chunk.min_raw for chunk in chunks).decode(), max(chunk.max_raw for chunk in chunks).decode()
    except UnicodeDecodeError:  # Arrow does not look at the bytes of a landing file's text
        return None, None
    return low[:CHARACTERS], high if len(high) <= CHARACTERS else _greater(high[:CHARACTERS])


def _greater(text: str) -> str | None:
    """A text that is greater than all that begin with this one; None if there is none that is no longer."""
    for length in range(len(text), 0, -1):
        code = ord(text[length - 1]) + 1
        if code <= sys.maxunicode:
            return text[: length - 1] + chr(0xE000 if code == 0xD800 else code)  # surrogates are no characters
    return None
