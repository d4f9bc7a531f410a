"""The table's columns as a Delta schema."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import pyarrow as pa

from lakeupsert.errors import ConfigurationError
from lakeupsert.rows.leaves import leaf_types
from lakeupsert.table.spec import TableSpec, field_id
from lakeupsert.table.types import is_common_decimal, is_list

Json = str | int | None | Mapping[str, "Json"] | list["Json"]
NaiveTime = Literal["timestamp_ntz", "timestamp"]
"""As what readers see times without a zone."""

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
}


@dataclass(frozen=True)
class DeltaSchema:
    """How the columns are shown. ``mapped``: with what each is called in files, because some names differ."""

    naive_time: NaiveTime
    mapped: bool

    def text(self, spec: TableSpec) -> str:
        """The schema in Delta's JSON.

        Raises ConfigurationError if Delta has no type for a column, or one that some engine reads wrongly.
        """
        unfit = {field.name: str(field.type) for field in spec.schema if self._type(field.type) is None}
        if unfit:
            columns = ", ".join(f"{name!r} is {type_}" for name, type_ in unfit.items())
            raise ConfigurationError(
                "unfit-for-delta",
                f"Delta has no type for some columns: {columns}. The Delta log "
                "was not changed; readers of lakeupsert are not affected.",
                next="declare another type in [tables.NAME.schema] of a new table, or remove 'delta' from `publishers`",
            )
        return json.dumps(self._struct(spec.schema, spec.names_written), ensure_ascii=False, separators=(",", ":"))

    def _struct(
        self, fields: pa.Schema | pa.StructType, names_written: Mapping[str, str] = MappingProxyType({})
    ) -> Json:
        def metadata(field: pa.Field) -> Json:
            if not self.mapped:
                return {}
            return {
                "delta.columnMapping.id": field_id(field),
                "delta.columnMapping.physicalName": names_written.get(field.name, field.name),
            }

        shown: list[Json] = [
            {"name": f.name, "type": self._type(f.type), "nullable": True, "metadata": metadata(f)} for f in fields
        ]
        return {"type": "struct", "fields": shown}

    def _type(self, type_: pa.DataType) -> Json:
        """Delta's name or JSON of a type; None if it has none: unsigned integers, nanoseconds, float16, times of day."""
        t = pa.types
        if t.is_timestamp(type_):
            return None if type_.unit == "ns" else "timestamp" if type_.tz else self.naive_time
        if is_common_decimal(type_):
            return f"decimal({type_.precision},{type_.scale})"
        if t.is_struct(type_):
            return self._struct(type_) if all(self._type(field.type) for field in type_) else None
        if is_list(type_):
            element = self._type(type_.value_type)
            return element and {"type": "array", "elementType": element, "containsNull": True}
        if t.is_map(type_):
            key, value = self._type(type_.key_type), self._type(type_.item_type)
            return key and value and {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
        return _NAMES.get(type_)


def has_naive_times(types: Sequence[pa.DataType]) -> bool:
    """Whether a type is, or has in it, a time without a zone."""
    leaves = (leaf for type_ in types for leaf in leaf_types(type_))
    return any(pa.types.is_timestamp(leaf) and not leaf.tz for leaf in leaves)
