"""Statistics of a data file for its manifest entry, from the footer that was just written: no row is read for them."""

import sys
from collections.abc import Sequence
from functools import lru_cache
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


class StatisticsColumn(NamedTuple):
    """A column that has statistics. ``leaf``: its place among the leaf columns of a base file."""

    id: int
    leaf: int
    type: pa.DataType


def columns_with_statistics(spec: TableSpec, bits: int) -> Sequence[StatisticsColumn]:
    """Those of a file of one of 2^``bits`` buckets: key and ordering columns first, then others in their order."""
    return _columns(spec)[: min(MOST_COLUMNS, MOST_A_PARTITION >> bits)]


@lru_cache(maxsize=64)  # each merge of a bucket asks
def _columns(spec: TableSpec) -> list[StatisticsColumn]:
    begins = accumulate((len(leaves("", type_)) for type_ in spec.base_schema.types), initial=0)
    places = dict(zip(spec.base_schema.names, begins, strict=False))
    names = dict.fromkeys((*spec.stored_key, *spec.order_by, *spec.stored_schema.names))
    fields = [field for field in map(spec.schema.field, names) if has_bounds(field.type)]
    return [StatisticsColumn(field_id(field), places[field.name], field.type) for field in fields]


def has_bounds(type_: pa.DataType) -> bool:
    """Whether columns of the type have statistics. Floats have none: their bounds would leave out NaN."""
    t = pa.types
    tests = (t.is_integer, t.is_boolean, t.is_date32, t.is_timestamp, t.is_decimal, t.is_string, t.is_large_string)
    return any(test(type_) for test in tests)


def statistics_of(footer: pq.FileMetaData, columns: Sequence[StatisticsColumn]) -> tuple[ColumnStatistics, ...]:
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    found = []
    for column in columns:
        chunks = [group.column(column.leaf).statistics for group in groups]
        nulls = sum(chunk.null_count for chunk in chunks)
        found.append(ColumnStatistics(column.id, nulls, *_bounds(chunks, column.type)))
    return tuple(found)


def _bounds(chunks: Sequence[pq.Statistics], type_: pa.DataType) -> tuple[Bound, Bound]:
    """No value is below the first or above the second. None: not known, or there is no value."""
    chunks = [chunk for chunk in chunks if chunk.num_values]
    if not chunks or not all(chunk.has_min_max for chunk in chunks):  # a value of text may be too long for Parquet's
        return None, None
    t = pa.types
    if t.is_timestamp(type_):
        scale = {"s": 1000, "ms": 1000}.get(type_.unit, 1)  # Parquet has no seconds
        return min(chunk.min_raw for chunk in chunks) * scale, max(chunk.max_raw for chunk in chunks) * scale
    if t.is_date(type_):
        return min(chunk.min_raw for chunk in chunks), max(chunk.max_raw for chunk in chunks)
    if t.is_string(type_) or t.is_large_string(type_):
        return _text_bounds(min(chunk.min_raw for chunk in chunks), max(chunk.max_raw for chunk in chunks))
    least, greatest = min(chunk.min for chunk in chunks), max(chunk.max for chunk in chunks)
    return (f"{least:f}", f"{greatest:f}") if t.is_decimal(type_) else (least, greatest)


def _text_bounds(least: bytes, greatest: bytes) -> tuple[str | None, str | None]:
    try:
        low, high = least.decode(), greatest.decode()
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
