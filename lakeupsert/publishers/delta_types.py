"""The table's columns as a Delta schema."""

import json
from collections.abc import Mapping

import pyarrow as pa

from lakeupsert.errors import ConfigurationError

Json = str | bool | None | Mapping[str, "Json"] | list["Json"]

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
    pa.timestamp("us"): "timestamp_ntz",
    pa.timestamp("ms"): "timestamp_ntz",
    pa.timestamp("s"): "timestamp_ntz",
}


def schema_string(schema: pa.Schema) -> str:
    """The schema in Delta's JSON. Raises ConfigurationError if Delta has no such type, or one that some engine reads wrongly."""
    unfit = {field.name: str(field.type) for field in schema if _type(field.type) is None}
    if unfit:
        columns = ", ".join(f"{name!r} is {type_}" for name, type_ in unfit.items())
        raise ConfigurationError(
            "unfit-for-delta",
            f"Delta has no type for some columns: {columns}. The Delta log "
            "was not changed; readers of lakeupsert are not concerned.",
            next="declare another type in [tables.NAME.schema] of a new table, or remove 'delta' from `publishers`",
        )
    return json.dumps(_struct(schema), ensure_ascii=False, separators=(",", ":"))


def has_naive_times(schema: pa.Schema) -> bool:
    """Whether readers need the feature `timestampNtz`."""
    return '"timestamp_ntz"' in schema_string(schema)


def _struct(fields: pa.Schema | pa.StructType) -> Json:
    return {
        "type": "struct",
        "fields": [{"name": f.name, "type": _type(f.type), "nullable": True, "metadata": {}} for f in fields],
    }


def _type(type_: pa.DataType) -> Json:
    """Delta's name or JSON of a type; None if it has none. Unsigned integers, nanoseconds, float16 and times of day have none."""
    t = pa.types
    if t.is_timestamp(type_) and type_.tz is not None and type_.unit != "ns":
        return "timestamp"
    if t.is_decimal(type_) and type_.precision <= 38 and 0 <= type_.scale <= type_.precision:
        return f"decimal({type_.precision},{type_.scale})"
    if t.is_struct(type_) and all(_type(field.type) for field in type_):
        return _struct(type_)
    if (t.is_list(type_) or t.is_large_list(type_)) and (element := _type(type_.value_type)):
        return {"type": "array", "elementType": element, "containsNull": True}
    if t.is_map(type_) and (key := _type(type_.key_type)) and (value := _type(type_.item_type)):
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    return _NAMES.get(type_)
