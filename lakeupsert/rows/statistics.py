"""Statistics of a data file for its manifest entry, from its footer: no row is read for them."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.table.manifest import Bound, ColumnStatistics
from lakeupsert.table.spec import BATCH, TableSpec, field_id
from lakeupsert.table.types import is_text, leaf_places

MOST_COLUMNS = 32
"""Columns of a file that have statistics. More: manifests and Delta logs grow, and every reader and publish reads them. Less: a
filter on one of the others opens files in vain."""
MOST_A_PARTITION = 512
"""Columns that have statistics in all base files of a partition together. The rows of a bucket are a sample of the partition's,
so many buckets have nearly the same statistics. More: the manifest of a large partition grows. Less: see `MOST_COLUMNS`."""
CHARACTERS = 32
"""Characters of a bound of text; Delta's writers take as many."""


_Chunks = Sequence[pq.Statistics]
"""The statistics of a column in each row group that has a value of it."""
_Bounds = tuple[Bound, Bound]


class StatisticsColumn(NamedTuple):
    """A column that has statistics.

    Attributes:
        id: the field's; in a file of another program, the column's place.
        leaf: its place among the leaf columns of the file.
        bounds: no value is below the first or above the second.
    """

    id: int
    leaf: int
    bounds: Callable[[_Chunks], _Bounds]


def columns_with_statistics(spec: TableSpec, files: int) -> Sequence[StatisticsColumn]:
    """Those of each base file of a partition that has so many: key and ordering columns and the batch first, then others in their
    order."""
    return _columns(spec)[: min(MOST_COLUMNS, MOST_A_PARTITION // files)]


def foreign_columns(schema: pa.Schema, first: Iterable[str]) -> Sequence[StatisticsColumn]:
    """Those of a file that another program wrote, the ``first`` ones before all others."""
    places = {name: place for place, name in enumerate(schema.names)}
    names = dict.fromkeys([*(name for name in first if name in places), *places])
    return _among(schema, {name: places[name] for name in names})[:MOST_COLUMNS]


@lru_cache(maxsize=64)  # each merge of a bucket asks
def _columns(spec: TableSpec) -> list[StatisticsColumn]:
    batch = [BATCH] if spec.versions else []
    names = dict.fromkeys((*spec.stored_key, *spec.order_by, *batch, *spec.stored_schema.names))
    return _among(spec.base_schema, {name: field_id(spec.base_schema.field(name)) for name in names})


def _among(schema: pa.Schema, ids: Mapping[str, int]) -> list[StatisticsColumn]:
    """Those of the named columns that have bounds."""
    places = leaf_places(schema)
    found = [(id_, places[name].start, _bounds_of(schema.field(name).type)) for name, id_ in ids.items()]
    return [StatisticsColumn(id_, leaf, bounds) for id_, leaf, bounds in found if bounds]


def has_bounds(type_: pa.DataType) -> bool:
    """Whether columns of the type have statistics. Floats have none: their bounds would leave out NaN."""
    return _bounds_of(type_) is not None


def statistics_of(footer: pq.FileMetaData, columns: Sequence[StatisticsColumn]) -> tuple[ColumnStatistics, ...]:
    """The statistics of these columns; without those whose nulls the file has not counted."""
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    found = (_statistics([group.column(column.leaf) for group in groups], column) for column in columns)
    return tuple(one for one in found if one is not None)


def _statistics(chunks: Sequence[pq.ColumnChunkMetaData], column: StatisticsColumn) -> ColumnStatistics | None:
    counted = [chunk.statistics for chunk in chunks]
    if not all(one is not None and one.has_null_count for one in counted):
        return None
    nulls = sum(one.null_count for one in counted)
    # Parquet has no bounds of a chunk with a very long text. INT96 has no order, so what a file says of it means nothing.
    with_values = [one for one in counted if one.num_values]
    known = with_values and all(one.has_min_max and one.physical_type != "INT96" for one in with_values)
    return ColumnStatistics(column.id, nulls, *(column.bounds(with_values) if known else ()))


def _bounds_of(type_: pa.DataType) -> Callable[[_Chunks], _Bounds] | None:
    """How to read the bounds of columns of the type; None if they have none."""
    t = pa.types
    if t.is_timestamp(type_):
        return partial(_raw_bounds, scale=1000 if type_.unit in ("s", "ms") else 1)  # Parquet has no seconds
    if t.is_date32(type_):
        return _raw_bounds
    if is_text(type_):
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
