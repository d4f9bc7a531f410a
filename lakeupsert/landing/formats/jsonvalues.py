"""Decoded JSON values: as columns of a type, the type that they have, and as text."""

from collections import Counter
from collections.abc import Callable, Sequence, Sized
from functools import partial, reduce
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.landing.formats import dominant
from lakeupsert.landing.formats.connect import Encoded
from lakeupsert.landing.formats.dominant import DominantType, Example
from lakeupsert.landing.formats.envelopes import Row
from lakeupsert.landing.formats.inference import TEMPORAL, convert_text, infer_type, unify
from lakeupsert.landing.formats.limits import MOST_CELLS
from lakeupsert.landing.formats.nested import flatten, lengths, nulls, offsets
from lakeupsert.landing.formats.unavailable import is_unavailable
from lakeupsert.rows.arrays import Indices, Mask
from lakeupsert.rows.convert import Converted, convert
from lakeupsert.table.types import is_list, is_number, is_text

_DEEPEST = 20
"""Levels of lists and objects that become a type. Values nested deeper are stored as JSON text, as are objects that have too many
fields for their number (`MOST_CELLS`)."""


class _Number(str):
    """A number with a point or an exponent, with the digits that were written."""

    __slots__ = ()


decode = msgspec.json.Decoder(float_hook=_Number).decode  # noqa: TID251 - of no class
_encode = msgspec.json.Encoder(
    enc_hook=lambda one: one.value if isinstance(one, Encoded) else msgspec.Raw(str.encode(one))
).encode


def convert_values(values: Sequence[object], type_: pa.DataType) -> Converted:
    """Decoded JSON values, also of several kinds, in ``type_``; and which of them do not fit it."""
    kinds = set(map(type, values)) - {type(None)}
    parts = [
        _FROM[kind](values if len(kinds) == 1 else [v if type(v) is kind else None for v in values], type_)
        for kind in kinds
    ]
    if not parts:
        return pa.nulls(len(values), type_), np.zeros(len(values), bool)
    array, bad = parts[0]
    for more, more_bad in parts[1:]:
        array, bad = pc.coalesce(array, more), bad | more_bad
    return array, bad


def _from_int(values: Sequence[int | None], type_: pa.DataType) -> Converted:
    if not pa.types.is_floating(type_):  # a float takes the nearest value, as from text
        try:
            return convert(pa.array(values, pa.int64()), type_)
        except OverflowError:
            pass
    return _from_digits([None if v is None else str(v) for v in values], type_)


def _from_number(values: Sequence[_Number | None], type_: pa.DataType) -> Converted:
    if pa.types.is_integer(type_):
        exact, bad = _from_digits(values, pa.decimal128(38, 18))  # 8.0 is an integer, 8.5 is not
        out, unfit = convert(exact, type_)
        return out, bad | unfit
    return _from_digits(values, type_)


def _from_digits(values: Sequence[str | None], type_: pa.DataType) -> Converted:
    takes = is_number(type_) or is_text(type_)
    return convert(pa.array(values, pa.string()), type_) if takes else _all_bad(values, type_)


def _from_object(values: Sequence[Row | None], type_: pa.DataType) -> Converted:
    if pa.types.is_struct(type_):
        return _struct(values, type_)
    if pa.types.is_map(type_):
        return _map(values, type_)
    return _json_text(values, type_)


def _from_list(values: Sequence[list[object] | None], type_: pa.DataType) -> Converted:
    lists = is_list(type_) or pa.types.is_fixed_size_list(type_)
    return _list(values, type_) if lists else _json_text(values, type_)


def _from_encoded(values: Sequence[Encoded | None], type_: pa.DataType) -> Converted:
    array, bad = pa.nulls(len(values), type_), np.zeros(len(values), bool)
    for encoding in {v.encoding for v in values if v is not None}:
        own = [v.value if v is not None and v.encoding is encoding else None for v in values]
        part, unfit = encoding.decode(own, type_) if encoding.fits(type_) else convert_values(own, type_)
        array, bad = pc.coalesce(array, part), bad | unfit
    return array, bad


# Any: the values are null or of the type that the function is listed under, which Python's types can't say.
_FROM: dict[type, Callable[[Sequence[Any], pa.DataType], Converted]] = {
    str: lambda values, type_: convert_text(pa.array(values, pa.string()), type_),
    bool: lambda values, type_: convert(pa.array(values, pa.bool_()), type_),
    int: _from_int,
    _Number: _from_number,
    dict: _from_object,
    list: _from_list,
    Encoded: _from_encoded,
}


def _json_text(values: Sequence[object], type_: pa.DataType) -> Converted:
    if not is_text(type_):
        return _all_bad(values, type_)
    texts = [None if v is None else text_of(v) for v in values]
    return pa.array(texts, type_), nulls(texts) & ~nulls(values)


def text_of(value: object) -> str | None:
    try:
        return _encode(value).decode()
    except RecursionError:  # nested so deep that it could just be decoded, with a little less on the stack
        return None


def _all_bad(values: Sequence[object], type_: pa.DataType) -> Converted:
    return pa.nulls(len(values), type_), ~nulls(values)


def _struct(values: Sequence[Row | None], type_: pa.StructType) -> Converted:
    """An object with a value under a name that the struct lacks is bad: the value would be lost."""
    names = {f.name for f in type_}
    bad = np.fromiter(
        (v is not None and any(v[name] is not None for name in v.keys() - names) for v in values), bool, len(values)
    )
    children = []
    for f in type_:
        child, child_bad = convert_values([None if v is None else v.get(f.name) for v in values], f.type)
        children.append(child)
        bad |= child_bad
    return pa.StructArray.from_arrays(children, fields=list(type_), mask=pa.array(nulls(values))), bad


def _list(values: Sequence[list[object] | None], type_: pa.DataType) -> Converted:
    if pa.types.is_fixed_size_list(type_):
        size = type_.list_size
        wrong = np.fromiter((v is not None and len(v) != size for v in values), bool, len(values))
        filler = [None] * size
        filled = [filler if v is None or len(v) != size else v for v in values]
        items, items_bad = convert_values(flatten(filled), type_.value_type)
        bad = wrong | items_bad.reshape(len(values), size).any(axis=1)
        return pa.FixedSizeListArray.from_arrays(items, type=type_, mask=pa.array(nulls(values) | wrong)), bad
    items, items_bad = convert_values(flatten(values), type_.value_type)
    kind = pa.LargeListArray if pa.types.is_large_list(type_) else pa.ListArray
    return kind.from_arrays(offsets(values, kind), items, type=type_), _any_in(values, items_bad)


def _map(values: Sequence[Row | None], type_: pa.MapType) -> Converted:
    _, keys_bad = convert_values(flatten(values), type_.key_type)
    bad = _any_in(values, keys_bad)
    values = [None if is_bad else v for v, is_bad in zip(values, bad, strict=True)]  # a map can't hold a null key
    keys, _ = convert_values(flatten(values), type_.key_type)
    items, items_bad = convert_values(flatten([None if v is None else v.values() for v in values]), type_.item_type)
    return pa.MapArray.from_arrays(offsets(values, pa.ListArray), keys, items, type=type_), bad | _any_in(
        values, items_bad
    )


def _any_in(values: Sequence[Sized | None], bad: Mask) -> Mask:
    """Which lists have a bad item; ``bad`` is a mask of the items of all lists."""
    owner = np.repeat(np.arange(len(values)), lengths(values))
    return np.bincount(owner[bad], minlength=len(values)) > 0


# -- types from values


def infer_values(values: Sequence[object], depth: int = 0) -> pa.DataType:
    """The type of decoded JSON values. At the top level, text whose values are all dates or timestamps has that type."""
    kinds = set(map(type, values)) - {type(None)}
    if not kinds:
        return pa.null()
    if kinds == {bool}:
        return pa.bool_()
    if kinds <= {int, _Number}:
        type_ = pa.float64() if _Number in kinds else pa.int64()
        return pa.string() if convert_values(values, type_)[1].any() else type_
    if kinds == {Encoded}:
        types = {v.encoding: v.encoding.type for v in values if type(v) is Encoded}
        return reduce(partial(unify, typed=False), types.values())
    if kinds == {str}:
        return infer_type(pa.array(values, pa.string()), [] if depth else TEMPORAL)
    if depth == _DEEPEST:
        return pa.string()
    if kinds == {dict}:
        objects = _objects(values)
        names = dict.fromkeys(chain.from_iterable(objects))
        if len(names) * len(objects) > MOST_CELLS:
            return pa.string()
        fields = [(n, infer_values([v.get(n) for v in objects], depth + 1)) for n in names]
        if not objects:
            return pa.null()
        return pa.struct(fields) if fields else pa.string()  # Parquet can't store a struct without fields
    if kinds == {list}:
        return pa.list_(infer_values(flatten([v for v in values if type(v) is list]), depth + 1))
    return pa.string()


def _objects(values: Sequence[object]) -> list[Row]:
    """The objects among some values. A placeholder, which Debezium writes for a map, has no field of its column."""
    return [v for v in values if type(v) is dict and not is_unavailable(v)]


def dominant_of(values: Sequence[object], type_: pa.DataType, places: Indices, path: str) -> DominantType | None:
    """The type of most of the values, all of which fit ``type_``."""
    kinds = Counter(map(type, values))
    numbers = kinds[int] + kinds[_Number]
    valid = ~nulls(values)

    def example(row: int) -> Example:
        return Example(str(values[row]), int(places[row]), path)

    if pa.types.is_nested(type_):
        return dominant.from_masks(valid, valid, None, example)
    if not pa.types.is_string(type_):
        return dominant.from_masks(valid, ~valid, type_, example)
    if kinds[str] + kinds[list] + kinds[dict] >= numbers + kinds[bool]:
        text = pa.array([v if v is None or type(v) is str else str(v) for v in values], pa.string())
        return dominant.from_text(text, type_, TEMPORAL, places, path)
    of_numbers = pa.float64() if kinds[_Number] else pa.int64()
    type_ = pa.bool_() if kinds[bool] > numbers else of_numbers
    codes = dominant.has_codes(pa.array([v for v in values if type(v) is str], pa.string()))
    return dominant.from_masks(valid, convert_values(values, type_)[1], type_, example, codes=codes)


def with_new_fields(values: Sequence[object], type_: pa.DataType) -> pa.DataType:
    """A column's type, and in it the fields that only objects among its values have."""
    t = pa.types
    objects = _objects(values)
    if t.is_struct(type_):
        names = dict.fromkeys(chain.from_iterable(objects))
        if len(names) * len(objects) > MOST_CELLS:
            return type_  # such objects do not fit it
        types = {f.name: with_new_fields([v.get(f.name) for v in objects], f.type) for f in type_}
        for name in names:
            types[name] = types.get(name) or infer_values([v.get(name) for v in objects], depth=1)
        return pa.struct(list(types.items()))
    if is_list(type_):
        kind = pa.list_ if t.is_list(type_) else pa.large_list
        return kind(with_new_fields(flatten([v for v in values if type(v) is list]), type_.value_type))
    if t.is_map(type_):
        return pa.map_(type_.key_type, with_new_fields(flatten([v.values() for v in objects]), type_.item_type))
    return type_
