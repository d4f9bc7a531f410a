"""Column types: their names in Spark SQL and Arrow, how they widen, and what each may be used for."""

import re
from collections.abc import Callable
from itertools import accumulate

import pyarrow as pa

from lakeupsert.errors import ConfigurationError

_NAMES = {
    "string": pa.string(),
    "text": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ltz": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_DECIMAL = re.compile(r"(?:decimal|decimal128|numeric)\((\d+),(\d+)\)")
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:,tz=([^\]]+))?\]")


def named_type(text: str, where: str) -> pa.DataType:
    """The type with a name like ``bigint``, ``int64``, ``decimal(12,2)`` or ``timestamp_ntz``.

    Raises ConfigurationError, which says ``where`` the name is.
    """
    name = text.replace(" ", "")
    if match := _TIMESTAMP.fullmatch(name):
        return pa.timestamp(match[1], tz=match[2])
    name = name.lower()
    if name in _NAMES:
        return _NAMES[name]
    try:
        if match := _DECIMAL.fullmatch(name):
            return pa.decimal128(int(match[1]), int(match[2]))
        return pa.type_for_alias(name)
    except ValueError as e:
        raise ConfigurationError(
            "unknown-type",
            f"{where}: {text!r} is not a type.",
            next=f"use one of {', '.join(_NAMES)}, decimal(p,s), or a name of Arrow, for example int64 or timestamp[us, tz=UTC]",
        ) from e


def type_name(type_: pa.DataType) -> str:
    """The first name that `named_type` accepts for a type; Arrow's name if there is no other."""
    if pa.types.is_decimal128(type_):
        return f"decimal({type_.precision},{type_.scale})"
    return next((name for name, named in _NAMES.items() if named.equals(type_)), str(type_))


def is_number(type_: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_integer(type_) or t.is_floating(type_) or t.is_decimal(type_))


def decimal_type(precision: int, scale: int) -> pa.DataType | None:
    """The type of decimals of so many digits, ``scale`` of them behind the point; None if there is none."""
    if not 0 <= scale <= precision <= 76:
        return None
    return pa.decimal128(precision, scale) if precision <= 38 else pa.decimal256(precision, scale)


def is_common_decimal(type_: pa.DataType) -> bool:
    """Whether it is a decimal that other formats of tables have too."""
    return bool(pa.types.is_decimal(type_)) and type_.precision <= 38 and 0 <= type_.scale <= type_.precision


def is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def is_binary(type_: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_binary(type_) or t.is_large_binary(type_) or t.is_fixed_size_binary(type_))


def is_list(type_: pa.DataType) -> bool:
    """Whether it is a list of any length."""
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_))


def normalize(type_: pa.DataType) -> pa.DataType:
    """The type in which a table stores a landing column: without encodings, nested fields nullable. It holds the same values."""
    t = pa.types
    if t.is_dictionary(type_) or t.is_run_end_encoded(type_):
        return normalize(type_.value_type)
    if t.is_string_view(type_):
        return pa.string()  # pyarrow's filter and take have no kernels for views
    if t.is_binary_view(type_):
        return pa.binary()
    return with_fields(type_, lambda field: pa.field(field.name, normalize(field.type), nullable=True))


def with_fields(type_: pa.DataType, changed: Callable[[pa.Field], pa.Field]) -> pa.DataType:
    """A type with its own fields changed, views as lists; one without fields as it is. A map's key is never nullable."""
    t = pa.types
    if t.is_list(type_) or t.is_list_view(type_):
        return pa.list_(changed(type_.value_field))
    if t.is_large_list(type_) or t.is_large_list_view(type_):
        return pa.large_list(changed(type_.value_field))
    if t.is_fixed_size_list(type_):
        return pa.list_(changed(type_.value_field), type_.list_size)
    if t.is_map(type_):
        key = changed(type_.key_field).with_name("key").with_nullable(False)
        return pa.map_(key, changed(type_.item_field), type_.keys_sorted)
    return pa.struct([changed(f) for f in type_]) if t.is_struct(type_) else type_


_SIGNED = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
_UNSIGNED = [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
_FLOATS = [pa.float32(), pa.float64()]  # not float16: Spark can't read such files, not even as a wider type
_SMALL = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
_UNITS = ["s", "ms", "us"]  # not ns: years after 2262 would no longer fit


def widen(current: pa.DataType, incoming: pa.DataType) -> pa.DataType:
    """The smallest type that holds all values of both types unchanged, or ``current`` if there is none.

    A struct gets missing fields behind its own, whose places and ids stay. In lists and maps, the element types widen.
    """
    t = pa.types
    if t.is_null(current):
        return incoming
    if t.is_struct(current) and t.is_struct(incoming):
        types = {f.name: f.type for f in incoming}
        own = [f.with_type(widen(f.type, types.pop(f.name, f.type))) for f in current]
        return pa.struct([*own, *(f for f in incoming if f.name in types)])
    for is_list, list_of in ((t.is_list, pa.list_), (t.is_large_list, pa.large_list)):
        if is_list(current) and is_list(incoming):
            return list_of(current.value_field.with_type(widen(current.value_type, incoming.value_type)))
    if t.is_map(current) and t.is_map(incoming):
        item = current.item_field.with_type(widen(current.item_type, incoming.item_type))
        return pa.map_(current.key_field, item, current.keys_sorted)
    for family in (_SIGNED, _UNSIGNED, _FLOATS):
        if current in family and incoming in family:
            return family[max(family.index(current), family.index(incoming))]
    if current in _UNSIGNED[:3] and incoming in _SIGNED:
        return _SIGNED[max(_UNSIGNED.index(current) + 1, _SIGNED.index(incoming))]
    if current in _SIGNED and incoming in _UNSIGNED[:3]:
        return _SIGNED[max(_SIGNED.index(current), _UNSIGNED.index(incoming) + 1)]
    if t.is_decimal(current) and t.is_decimal(incoming):
        scale = max(current.scale, incoming.scale)
        precision = max(current.precision - current.scale, incoming.precision - incoming.scale) + scale
        if precision <= 38:
            return (
                current if (precision, scale) == (current.precision, current.scale) else pa.decimal128(precision, scale)
            )
        return current if precision > 76 else pa.decimal256(precision, scale)
    are_times = t.is_timestamp(current) and t.is_timestamp(incoming)
    if are_times and current.tz == incoming.tz and {current.unit, incoming.unit} <= {*_UNITS}:
        return max(current, incoming, key=lambda one: _UNITS.index(one.unit))
    return incoming if current.equals(_SMALL.get(incoming, pa.null())) else current


def same_values(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether two types hold the same values. The width of storage and the zone of a timestamp do not matter."""
    return bool(_bare(normalize(one)).equals(_bare(normalize(other))))


def _bare(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_decimal(type_):
        return pa.decimal256(type_.precision, type_.scale)
    with_zone = pa.types.is_timestamp(type_) and type_.tz
    return pa.timestamp(type_.unit, "UTC") if with_zone else _SMALL.get(type_, type_)


def is_key_type(t: pa.DataType) -> bool:
    p = pa.types
    is_moment = p.is_date(t) or p.is_timestamp(t)
    return bool(p.is_integer(t) or p.is_decimal(t) or p.is_boolean(t) or is_moment or is_text(t) or is_binary(t))


def is_order_type(t: pa.DataType) -> bool:
    return is_key_type(t) or bool(pa.types.is_floating(t) or pa.types.is_time(t) or pa.types.is_duration(t))


def is_partition_type(t: pa.DataType) -> bool:
    p = pa.types
    return bool(p.is_date32(t) or p.is_integer(t) or p.is_boolean(t) or is_text(t))


def leaf_places(schema: pa.Schema) -> dict[str, range]:
    """The places of each column's leaves in a Parquet file. Paths are not enough: a column may be called ``a.b``, too."""
    sizes = [len(leaves("", type_)) for type_ in schema.types]
    begins = accumulate(sizes, initial=0)
    return {name: range(begin, begin + size) for name, begin, size in zip(schema.names, begins, sizes, strict=False)}


def leaves(path: str, type_: pa.DataType) -> list[str]:
    """Parquet's names of the leaf columns of a column."""
    t = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        return leaves(path, type_.storage_type)
    if t.is_struct(type_):
        inner = [(f.name, f.type) for f in type_]
    elif t.is_map(type_):
        inner = [("key_value.key", type_.key_type), ("key_value.value", type_.item_type)]
    elif t.is_nested(type_):
        inner = [("list.element", type_.value_type)]
    else:
        return [path]
    return [leaf for name, child in inner for leaf in leaves(f"{path}.{name}", child)]
