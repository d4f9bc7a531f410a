"""The table's columns as an Iceberg schema, with the field ids of the spec, and statistics of files in its types."""

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import NamedTuple

import pyarrow as pa
from pyiceberg.conversions import to_bytes
from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    PrimitiveType,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from lakeupsert.errors import ConfigurationError
from lakeupsert.table.manifest import Bound, DataFile
from lakeupsert.table.spec import TableSpec, field_id
from lakeupsert.table.types import is_common_decimal, is_list

UNFIT = "unfit-for-iceberg"
_SIGNED = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
_TYPES: dict[pa.DataType, IcebergType] = {
    pa.string(): StringType(),
    pa.large_string(): StringType(),
    pa.int64(): LongType(),
    pa.int32(): IntegerType(),
    pa.int16(): IntegerType(),
    pa.int8(): IntegerType(),
    pa.float32(): FloatType(),
    pa.float64(): DoubleType(),
    pa.bool_(): BooleanType(),
    pa.binary(): BinaryType(),
    pa.large_binary(): BinaryType(),
    pa.date32(): DateType(),
}


class ColumnMetrics(NamedTuple):
    """Of a column in a file: its field id, how many rows the file has and in how many it is null, and its bounds in Iceberg's
    binary form; None: not known."""

    id: int
    values: int
    nulls: int
    lower: bytes | None
    upper: bytes | None


def iceberg_schema(spec: TableSpec, schema_id: int) -> Schema:
    """Raises ConfigurationError (``unfit-for-iceberg``) if Iceberg has no such type, or one that some engine reads wrongly."""
    types = {field.name: _type(field.type) for field in spec.schema}
    unfit = {name: str(spec.schema.field(name).type) for name, type_ in types.items() if type_ is None}
    if unfit:
        columns = ", ".join(f"{name!r} is {type_}" for name, type_ in unfit.items())
        raise _unfit(f"Iceberg has no type for some columns: {columns}.")
    fields = [
        NestedField(field_id(field), field.name, type_, required=False)
        for field in spec.schema
        if (type_ := types[field.name])
    ]
    try:
        return Schema(*fields, schema_id=schema_id)
    except ValueError as e:  # such as a column `a.b`, and a field `b` in a column `a`
        raise _unfit(f"{e}.") from e


def primitive_types(schema: Schema) -> dict[int, PrimitiveType]:
    """The types of columns that have no fields, by field id."""
    types = {field.field_id: field.field_type for field in schema.fields}
    return {id_: type_ for id_, type_ in types.items() if isinstance(type_, PrimitiveType)}


def metrics_of(file: DataFile, types: Mapping[int, PrimitiveType]) -> tuple[ColumnMetrics, ...]:
    """Statistics of each column of ``types`` that has some. Spark answers MIN and MAX from bounds (not of text), so these are
    values that the file has."""
    return tuple(
        ColumnMetrics(one.id, file.rows, one.nulls, _bytes(type_, one.least), _bytes(type_, one.greatest))
        for one in file.statistics
        if (type_ := types.get(one.id))
    )


def _bytes(type_: PrimitiveType, bound: Bound) -> bytes | None:
    if bound is None:
        return None
    return to_bytes(type_, Decimal(bound) if isinstance(type_, DecimalType) else bound)


def partition_spec(spec: TableSpec) -> PartitionSpec:
    """By the values of the partition columns. It never changes."""
    fields = [
        PartitionField(
            field_id(spec.schema.field(column)), PARTITION_FIELD_ID_START + place, IdentityTransform(), column
        )
        for place, column in enumerate(spec.partition_by)
    ]
    return PartitionSpec(*fields, spec_id=0)


def refuse_other_growth(spec: TableSpec, earlier: Iterable[TableSpec]) -> None:
    """Raise ConfigurationError (``unfit-for-iceberg``) if a column has grown as Iceberg's columns may not. Engines would read the
    values of older files wrongly: those of a decimal, for example, under the scale of now."""
    now = _leaves(spec.schema)
    for other in earlier:
        for id_, (name, was) in _leaves(other.schema).items():
            if id_ in now and not _may_grow(was, now[id_][1]):
                raise _unfit(f"Column {name!r} has grown from {was} to {now[id_][1]}, which Iceberg does not allow.")


def _unfit(why: str) -> ConfigurationError:
    return ConfigurationError(
        UNFIT,
        f"{why} The Iceberg table was not changed; readers of lakeupsert are not affected.",
        next="declare another type in [tables.NAME.schema] of a new table, or remove 'iceberg' from `publishers`",
    )


def _type(type_: pa.DataType) -> IcebergType | None:
    """None if there is none: for unsigned integers, float16, times of day and others.

    Files have timestamps in microseconds by Iceberg's format. Its own readers take milliseconds for these when they skip row
    groups, so a filter would lose rows.
    """
    t = pa.types
    if t.is_timestamp(type_) and type_.unit == "us":
        return TimestampType() if type_.tz is None else TimestamptzType()
    if is_common_decimal(type_):
        return DecimalType(type_.precision, type_.scale)
    if t.is_struct(type_):
        inner = [(field, _type(field.type)) for field in type_]
        fields = [NestedField(field_id(field), field.name, fit, required=False) for field, fit in inner if fit]
        return StructType(*fields) if len(fields) == len(inner) else None
    if is_list(type_):
        element = _type(type_.value_type)
        return element and ListType(field_id(type_.value_field), element, element_required=False)
    if t.is_map(type_):
        key, value = _type(type_.key_type), _type(type_.item_type)
        if key is None or value is None:
            return None
        return MapType(field_id(type_.key_field), key, field_id(type_.item_field), value, value_required=False)
    return _TYPES.get(type_)


def _leaves(fields: pa.Schema) -> dict[int, tuple[str, pa.DataType]]:
    """Name and type of every field without fields of its own, by id."""

    def of(field: pa.Field) -> Iterator[tuple[int, tuple[str, pa.DataType]]]:
        if not field.type.num_fields:
            yield field_id(field), (field.name, field.type)
        for place in range(field.type.num_fields):
            yield from of(field.type.field(place))

    return dict(leaf for field in fields for leaf in of(field))


def _may_grow(was: pa.DataType, now: pa.DataType) -> bool:
    t = pa.types
    if was in _SIGNED and now in _SIGNED:
        return _SIGNED.index(was) <= _SIGNED.index(now)
    if t.is_decimal(was) and t.is_decimal(now):
        return bool(was.scale == now.scale and was.precision <= now.precision)
    if t.is_timestamp(was) and t.is_timestamp(now):
        return bool(was.unit == now.unit) and (was.tz is None) == (now.tz is None)
    return was.equals(now) or (was, now) == (pa.float32(), pa.float64()) or _type(was) == _type(now) is not None
