"""The table's columns as Hive's types, which Glue, Trino and Athena have too."""

import re
from typing import NamedTuple

import pyarrow as pa

from lakeupsert.table.types import is_common_decimal, is_list

_NAMES = {
    pa.string(): "string",
    pa.large_string(): "string",
    pa.int64(): "bigint",
    pa.int32(): "int",
    pa.int16(): "smallint",
    pa.int8(): "tinyint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.bool_(): "boolean",
    pa.binary(): "binary",
    pa.large_binary(): "binary",
    pa.date32(): "date",
}
_FIELD = re.compile(r"[A-Za-z0-9_]+")
"""Names of fields in structs: Hive parses types as text, in which other characters end a name."""


class Column(NamedTuple):
    """A column of a catalog: its name in lower case, as catalogs keep it, and its type."""

    name: str
    type: str


def columns_of(schema: pa.Schema) -> tuple[Column, ...]:
    """The columns of a schema that `unfit_columns` finds nothing in."""
    return tuple(Column(field.name.lower(), str(_type(field.type))) for field in schema)


def unfit_columns(schema: pa.Schema) -> dict[str, str]:
    """The columns that Hive has no type for, or that some engine reads wrongly, each with what it is."""
    found = {field.name: str(field.type) for field in schema if _type(field.type) is None}
    return found | {name: "a name with a comma" for name in schema.names if "," in name}


def _type(type_: pa.DataType) -> str | None:
    """Hive's text for a type; None if it has none. Unsigned integers, nanoseconds, float16 and times of day have none."""
    t = pa.types
    if t.is_timestamp(type_) and type_.unit != "ns":
        return "timestamp"
    if is_common_decimal(type_):
        return f"decimal({type_.precision},{type_.scale})"
    if t.is_struct(type_):
        fields = [(field.name, _type(field.type)) for field in type_]
        fits = all(_FIELD.fullmatch(name) and kind for name, kind in fields)
        return f"struct<{','.join(f'{name.lower()}:{kind}' for name, kind in fields)}>" if fits and fields else None
    if is_list(type_) and (element := _type(type_.value_type)):
        return f"array<{element}>"
    if t.is_map(type_) and (key := _type(type_.key_type)) and (value := _type(type_.item_type)):
        return f"map<{key},{value}>"
    return _NAMES.get(type_)
