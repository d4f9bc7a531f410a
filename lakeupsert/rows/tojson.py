"""Values as JSON values, which a person reads, or a program that knows no Arrow."""

import base64
import math

import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.rows.convert import in_our_years
from lakeupsert.rows.words import is_bytes


def to_json_values(array: pa.Array) -> list[object]:
    """The values as JSON values: numbers, booleans, texts, lists, objects. Never fails for a type.

    Dates, times, timestamps (UTC), decimals, and floats that JSON lacks become text; bytes become base64. A date, time or
    timestamp without a text form (year 30000) becomes the integer that the file holds. A map becomes a list of objects.
    """
    t, type_ = pa.types, array.type
    if t.is_dictionary(type_):
        return to_json_values(array.dictionary_decode())
    if t.is_run_end_encoded(type_):
        return to_json_values(pc.run_end_decode(array))
    if isinstance(type_, pa.BaseExtensionType):
        return to_json_values(array.storage)
    if t.is_string(type_) or t.is_large_string(type_) or t.is_string_view(type_):
        return [None if v is None else v.decode("utf-8", "backslashreplace") for v in _bytes(array)]
    if is_bytes(type_) or t.is_binary_view(type_):
        return [None if v is None else base64.b64encode(v).decode() for v in _bytes(array)]
    if t.is_floating(type_):
        return [v if v is None or math.isfinite(v) else str(v) for v in array.cast(pa.float64()).to_pylist()]
    if t.is_decimal(type_):
        return array.cast(pa.string()).to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types
    if t.is_temporal(type_):
        return _time_texts(array)
    if t.is_struct(type_):
        children = list(map(to_json_values, array.flatten()))  # unlike field(i), carries the struct's own nulls
        names = [field.name for field in type_]
        valid = array.is_valid().to_pylist()
        return [{n: c[i] for n, c in zip(names, children, strict=True)} if ok else None for i, ok in enumerate(valid)]
    if t.is_nested(type_):
        return [to_json_values(v.values) if v.is_valid else None for v in array]
    return array.to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types


def _bytes(array: pa.Array) -> list[bytes | None]:
    wide = array if pa.types.is_fixed_size_binary(array.type) else array.cast(pa.large_binary())
    return wide.to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types


def _time_texts(array: pa.Array) -> list[object]:
    type_ = array.type
    numbers = array.view(pa.int32() if type_.bit_width == 32 else pa.int64()).to_pylist()
    if pa.types.is_duration(type_):
        return numbers  # type: ignore[no-any-return]  # pyarrow has no types
    zone = "Z" if pa.types.is_timestamp(type_) and type_.tz else ""
    texts = (array.view(pa.timestamp(type_.unit)) if zone else array).cast(pa.string()).to_pylist()
    is_time = pa.types.is_time(type_)
    has_text = [not t.startswith("<") if t else False for t in texts] if is_time else in_our_years(array)
    return [t + zone if t and ok else n for t, n, ok in zip(texts, numbers, has_text, strict=True)]
