"""Statistics of files as Iceberg's manifests have them."""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import NamedTuple

from pyiceberg.conversions import to_bytes
from pyiceberg.schema import Schema
from pyiceberg.types import DecimalType, PrimitiveType

from lakeupsert.table.manifest import Bound, DataFile


class ColumnMetrics(NamedTuple):
    """What is known of a column in a file.

    Attributes:
        id: the field's.
        values: how many rows the file has, those with null included.
        nulls: how many of them have none.
        lower, upper: bounds as Iceberg has them in binary; None: not known.
    """

    id: int
    values: int
    nulls: int
    lower: bytes | None
    upper: bytes | None


@dataclass(frozen=True)
class IcebergStats:
    """Translates statistics of files. ``schema``: the table's."""

    schema: Schema

    def metrics(self, file: DataFile) -> tuple[ColumnMetrics, ...]:
        """Of each column that has statistics and was not dropped since.

        Spark answers MIN and MAX from bounds of columns other than text, so these are values that the file has.
        """
        return tuple(
            ColumnMetrics(one.id, file.rows, one.nulls, _bytes(type_, one.least), _bytes(type_, one.greatest))
            for one in file.statistics
            if (type_ := self._types.get(one.id))
        )

    @cached_property
    def _types(self) -> Mapping[int, PrimitiveType]:
        types = {field.field_id: field.field_type for field in self.schema.fields}
        return {id_: type_ for id_, type_ in types.items() if isinstance(type_, PrimitiveType)}


def _bytes(type_: PrimitiveType, bound: Bound) -> bytes | None:
    if bound is None:
        return None
    return to_bytes(type_, Decimal(bound) if isinstance(type_, DecimalType) else bound)
