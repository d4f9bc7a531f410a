"""Arrays without dictionaries and views, and their innermost values, however deep in structs, lists and maps these are."""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.rows.arrays import Column, Mask
from lakeupsert.table.types import normalize

Change = Callable[[pa.Array], pa.Array]
"""Makes n other values of n values, null for null."""


def decode(array: Column) -> Column:
    """The same values without dictionaries, run-end encoding and views, which many pyarrow kernels do not support."""
    type_ = array.type
    if pa.types.is_run_end_encoded(type_):
        return decode(pc.run_end_decode(array))
    plain_type = normalize(type_)
    if plain_type.equals(type_):
        return array
    return _without_list_views(array, plain_type) if _has_list_view(type_) else array.cast(plain_type)


def _has_list_view(type_: pa.DataType) -> bool:
    t = pa.types
    if t.is_list_view(type_) or t.is_large_list_view(type_):
        return True
    return t.is_nested(type_) and any(_has_list_view(type_.field(i).type) for i in range(type_.num_fields))


def _without_list_views(array: pa.Array, plain_type: pa.DataType) -> pa.Array:
    """List views as plain lists. (pyarrow 26's own cast silently loses values if a list is null.)"""
    t, type_ = pa.types, array.type
    absent = array.is_null()
    if t.is_struct(type_):
        children = [decode(child) for child in array.flatten()]
        return pa.StructArray.from_arrays(children, fields=list(plain_type), mask=absent)
    if t.is_map(type_) or t.is_fixed_size_list(type_):
        return pa.array(array.to_pylist(), plain_type)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    large = t.is_large_list(plain_type)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64 if large else np.int32)
    kind = pa.LargeListArray if large else pa.ListArray
    return kind.from_arrays(pa.array(ends), decode(array.flatten()), type=plain_type, mask=absent)


def leaf_types(type_: pa.DataType) -> Iterator[pa.DataType]:
    """The types of the innermost values, in the order in which Parquet has them as columns."""
    if not pa.types.is_nested(type_):
        yield type_
        return
    for i in range(type_.num_fields):
        yield from leaf_types(type_.field(i).type)


def map_leaves(array: pa.Array, changes: Iterator[Change | None]) -> pa.Array:
    """The array with its innermost values changed. ``changes``: one for each of `leaf_types`; None keeps the values.

    The array has no dictionaries and views (`decode`).
    """
    t, type_ = pa.types, array.type
    if not t.is_nested(type_):
        change = next(changes)
        return change(array) if change else array
    if t.is_struct(type_):
        children = [map_leaves(child, changes) for child in array.flatten()]  # unlike field(i), with the struct's nulls
        fields = [type_.field(i).with_type(child.type) for i, child in enumerate(children)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())
    array = array.take(pa.array(np.arange(len(array))))  # drops child values that no list of this slice uses
    if t.is_fixed_size_list(type_):
        values = map_leaves(array.values, changes)
        kind = pa.list_(type_.value_field.with_type(values.type), type_.list_size)
        return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=array.is_null())
    begins = pa.array(array.offsets.to_numpy(), mask=np.append(array.is_null().to_numpy(zero_copy_only=False), False))
    if t.is_map(type_):
        keys, items = map_leaves(array.keys, changes), map_leaves(array.items, changes)
        kind = pa.map_(keys.type, type_.item_field.with_type(items.type), type_.keys_sorted)
        return pa.MapArray.from_arrays(begins, keys, items, type=kind)
    values = map_leaves(array.values, changes)
    large = t.is_large_list(type_)
    kind = (pa.large_list if large else pa.list_)(type_.value_field.with_type(values.type))
    return (pa.LargeListArray if large else pa.ListArray).from_arrays(begins, values, type=kind)


def rows_with(array: pa.Array, is_one: Callable[[pa.Array], Mask]) -> Mask:
    """Which values have, at any depth, an innermost value that ``is_one`` finds."""
    t, type_ = pa.types, array.type
    if isinstance(type_, pa.BaseExtensionType):
        return rows_with(array.storage, is_one)
    if not t.is_nested(type_):
        return is_one(array)
    found = np.zeros(len(array), bool)
    if t.is_struct(type_):
        for child in array.flatten():
            found |= rows_with(child, is_one)
        return found
    array = array.take(pa.array(np.arange(len(array))))
    children = [array.keys, array.items] if t.is_map(type_) else [array.values]
    if t.is_fixed_size_list(type_):
        owner = np.repeat(np.arange(len(array)), type_.list_size)
    else:
        owner = np.repeat(np.arange(len(array)), np.diff(array.offsets.to_numpy()))
    for child in children:
        found[owner[rows_with(child, is_one)]] = True
    return found
