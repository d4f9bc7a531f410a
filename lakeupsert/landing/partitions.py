"""The partition of a row: the name of its folder, by its partition columns."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.rows.buckets import hash_numbers
from lakeupsert.rows.convert import as_mask, convert
from lakeupsert.table.layout import WHOLE_TABLE, level_name
from lakeupsert.table.roles import PartitionColumn
from lakeupsert.table.spec import TableSpec

UNPLACED = "_lakeupsert_unplaced"
"""What a record that brings its key alone has as partition, until the key index gives it one (`engine.keys.placing`)."""


def partition_sources(spec: TableSpec) -> tuple[str, ...]:
    """The columns of landing files that decide a row's partition."""
    sources = {one.column: one.sources for one in spec.partition_from}
    named = (sources.get(column, (column,)) for column in spec.partition_by)
    return tuple(dict.fromkeys(chain.from_iterable(named)))


def derived_columns(spec: TableSpec, columns: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
    """The partition columns that are derived from other columns."""
    return {one.column: _derive(one, [columns[name] for name in one.sources]) for one in spec.partition_from}


def _derive(computed: PartitionColumn, values: Sequence[pa.Array]) -> pa.Array:
    if computed.count is not None:
        return hash_numbers(values, computed.count)
    return _OF_MOMENTS[computed.function or ""](_as_moment(values[0]))


def _as_moment(values: pa.Array) -> pa.Array:
    """Dates and timestamps as whole seconds in UTC; null outside the years 1 to 9999, which folder names can't hold."""
    t, type_ = pa.types, values.type
    if t.is_date32(type_):
        seconds = values.view(pa.int32()).fill_null(0).to_numpy().astype(np.int64) * 86400
    else:
        per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[type_.unit if t.is_timestamp(type_) else "ms"]
        seconds = values.view(pa.int64()).fill_null(0).to_numpy() // per_second
    unfit = as_mask(values.is_null()) | (seconds < _FIRST_SECOND) | (seconds > _LAST_SECOND)
    return pa.array(np.where(unfit, 0, seconds).astype(np.int64), pa.int64(), mask=unfit).view(pa.timestamp("s"))


_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799  # 0001-01-01 and the end of 9999
_OF_MOMENTS: dict[str, Callable[[pa.Array], pa.Array]] = {
    "year": lambda moments: pc.year(moments).cast(pa.int32()),
    "month": lambda moments: pc.strftime(moments, "%Y-%m"),
    "date": lambda moments: pc.floor_temporal(moments, unit="day").cast(pa.date32()),
    "hour": lambda moments: pc.strftime(moments, "%Y-%m-%d-%H"),
}


def partition_names(spec: TableSpec, columns: Mapping[str, pa.Array], count: int) -> pa.Array:
    """The name of every row's partition, of ``count`` rows; null if a value is missing or can't be in a folder's name."""
    return joined_names([folder_names(spec, name, columns[name]) for name in spec.partition_by], count)


def joined_names(folders: Sequence[pa.Array], count: int) -> pa.Array:
    """The partition names of ``count`` rows, from the folder names of each partition column."""
    if not folders:
        return pa.repeat(WHOLE_TABLE, count)
    return folders[0] if len(folders) == 1 else pc.binary_join_element_wise(*folders, "/")


def folder_names(spec: TableSpec, column: str, values: pa.Array) -> pa.Array:
    """The name of the folder of every value, for example `day=2026-01-02`; null for a value that can't be in one."""
    encoded = values.dictionary_encode()
    texts, _ = convert(encoded.dictionary, pa.string())
    names = [None if text is None else level_name(spec, column, text) for text in texts.to_pylist()]
    return pa.array(names, pa.string()).take(encoded.indices)
