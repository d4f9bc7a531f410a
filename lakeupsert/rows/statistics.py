"""Statistics of a data file for its manifest entry, from the footer that was just written: no row is read for them."""

import sys
from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.table.manifest import Bound, ColumnStatistics
from lakeupsert.table.spec import TableSpec, field_id
from lakeupsert.table.types import leaves

MOST_COLUMNS = 32
"""Columns of a file that have statistics. More: manifests and Delta logs grow, and every reader and publish reads them. Less: a
filter on one of the others opens files in vain."""
MOST_A_PARTITION = 1024
"""Columns that have statistics in all buckets of a partition together. The rows of a bucket are a sample of the partition's, so
many buckets have nearly the same statistics. More: the manifest of a large partition grows. Less: see `MOST_COLUMNS`."""
CHARACTERS = 32
"""Characters of a bound of text; Delta's writers take as many."""


def columns_with_statistics(spec: TableSpec, bits: int) -> list[int]:
    """Field ids of the columns that have statistics in a file of one of 2^``bits`` buckets: first of key and ordering columns,
    then of others in their order."""
    names = dict.fromkeys((*spec.stored_key, *spec.order_by, *spec.stored_schema.names))
    fields = map(spec.schema.field, names)
    return [field_id(field) for field in fields if has_bounds(field.type)][
        : min(MOST_COLUMNS, MOST_A_PARTITION >> bits)
    ]


def has_bounds(type_: pa.DataType) -> bool:
    """Whether columns of the type have statistics. Floats have none: their bounds would leave out NaN."""
    t = pa.types
    tests = (t.is_integer, t.is_boolean, t.is_date32, t.is_timestamp, t.is_decimal, t.is_string, t.is_large_string)
    return any(test(type_) for test in tests)


def statistics_of(footer: pq.FileMetaData, schema: pa.Schema, ids: Sequence[int]) -> tuple[ColumnStatistics, ...]:
    """The statistics of these columns of a file that was written with ``schema``, whose fields have ids."""
    begins = accumulate((len(leaves("", type_)) for type_ in schema.types), initial=0)
    columns = {
        field_id(field): (place, field.type) for place, field in zip(begins, schema, strict=False) if field.metadata
    }
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    found = []
    for id_ in ids:
        place, type_ = columns[id_]
        chunks = [group.column(place).statistics for group in groups]
        found.append(ColumnStatistics(id_, sum(chunk.null_count for chunk in chunks), *_bounds(chunks, type_)))
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
