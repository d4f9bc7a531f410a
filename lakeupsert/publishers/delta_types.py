"""The table's columns as a Delta schema."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pyarrow as pa

from lakeupsert.errors import ConfigurationError
from lakeupsert.table.spec import TableSpec, field_id

Json = str | int | None | Mapping[str, "Json"] | list["Json"]

_NAIVE_TIME = "timestamp_ntz"
_NAMES = {
    pa.string(): "string",
    pa.large_string(): "string",
    pa.int64(): "long",
    pa.int32(): "integer",
    pa.int16(): "short",
    pa.int8(): "byte",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.bool_(): "boolean",
    pa.binary(): "binary",
    pa.large_binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us"): _NAIVE_TIME,
    pa.timestamp("ms"): _NAIVE_TIME,
    pa.timestamp("s"): _NAIVE_TIME,
}


def schema_string(spec: TableSpec, *, mapped: bool) -> str:
    """The table's schema in Delta's JSON, if ``mapped`` with what each column is called in files.

    Raises ConfigurationError if Delta has no type for a column, or one that some engine reads wrongly.
    """
    schema = spec.schema
    unfit = {field.name: str(field.type) for field in schema if _type(field.type) is None}
    if unfit:
        columns = ", ".join(f"{name!r} is {type_}" for name, type_ in unfit.items())
        raise ConfigurationError(
            "unfit-for-delta",
            f"Delta has no type for some columns: {columns}. The Delta log "
            "was not changed; readers of lakeupsert are not concerned.",
            next="declare another type in [tables.NAME.schema] of a new table, or remove 'delta' from `publishers`",
        )
    struct = _struct(schema, mapped=mapped, names=spec.names_written)
    return json.dumps(struct, ensure_ascii=False, separators=(",", ":"))


def has_naive_times(types: Sequence[pa.DataType]) -> bool:
    """Whether readers need the feature `timestampNtz`."""
    inner = ([type_.field(i).type for i in range(type_.num_fields)] for type_ in types if pa.types.is_nested(type_))
    return any(_NAMES.get(type_) == _NAIVE_TIME for type_ in types) or any(map(has_naive_times, inner))


def _struct(
    fields: pa.Schema | pa.StructType, *, mapped: bool, names: Mapping[str, str] = MappingProxyType({})
) -> Json:
    """``names``: what top-level fields are called in files."""
    return {
        "type": "struct",
        "fields": [
            {
                "name": f.name,
                "type": _type(f.type, mapped=mapped),
                "nullable": True,
                "metadata": {
                    "delta.columnMapping.id": field_id(f),
                    "delta.columnMapping.physicalName": names.get(f.name, f.name),
                }
                if mapped
                else {},
            }
            for f in fields
        ],
    }


def _type(type_: pa.DataType, *, mapped: bool = False) -> Json:
    """Delta's name or JSON of a type; None if it has none. Unsigned integers, nanoseconds, float16 and times of day have none."""
    t = pa.types
    if t.is_timestamp(type_) and type_.tz is not None and type_.unit != "ns":
        return "timestamp"
    if t.is_decimal(type_) and type_.precision <= 38 and 0 <= type_.scale <= type_.precision:
        return f"decimal({type_.precision},{type_.scale})"
    if t.is_struct(type_) and all(_type(field.type) for field in type_):
        return _struct(type_, mapped=mapped)
    if t.is_list(type_) or t.is_large_list(type_):
        element = _type(type_.value_type, mapped=mapped)
        return element and {"type": "array", "elementType": element, "containsNull": True}
    if t.is_map(type_):
        key, value = (_type(inner, mapped=mapped) for inner in (type_.key_type, type_.item_type))
        return key and value and {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    return _NAMES.get(type_)
