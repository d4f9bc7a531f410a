"""Change the innermost values of an array, however deep in structs, lists and maps they are."""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from lakeupsert.rows.arrays import Mask

Change = Callable[[pa.Array], pa.Array]
"""Makes n other values of n values, null for null."""


def leaf_types(type_: pa.DataType) -> Iterator[pa.DataType]:
    """The types of the innermost values, in the order in which Parquet has them as columns."""
    if not pa.types.is_nested(type_):
        yield type_
        return
    for i in range(type_.num_fields):
        yield from leaf_types(type_.field(i).type)


def map_leaves(array: pa.Array, changes: Iterator[Change | None]) -> pa.Array:
    """The array with its innermost values changed. ``changes``: one for each of `leaf_types`; None keeps the values.

    The array has no dictionaries and views (`convert.decode`).
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
