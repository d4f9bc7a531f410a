"""Statistics of files as Delta's logs have them."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec
import pyarrow as pa

from lakeupsert.publishers.delta_types import NaiveTime
from lakeupsert.table.manifest import Bound, DataFile
from lakeupsert.table.spec import TableSpec, field_id

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MOST_DIGITS = 15
"""Trino reads a decimal bound as a double, which keeps so many digits, and would then skip files with rows that pass."""
_Value = int | str | msgspec.Raw


@dataclass(frozen=True)
class DeltaStats:
    """Writes statistics of files. ``columns``: name in files and type by field id. ``naive_time``: as for the schema."""

    columns: Mapping[int, tuple[str, pa.DataType]]
    naive_time: NaiveTime

    @classmethod
    def of(cls, spec: TableSpec, naive_time: NaiveTime) -> "DeltaStats":
        written = spec.names_written
        columns = {field_id(field): (written.get(field.name, field.name), field.type) for field in spec.schema}
        return cls(columns, naive_time)

    def text(self, file: DataFile) -> str:
        """The statistics in JSON.

        Trino's ANALYZE reads files whose statistics lack one of the three objects, and commits its own in spite of the fence.
        """
        least: dict[str, _Value] = {}
        greatest: dict[str, _Value] = {}
        nulls: dict[str, int] = {}
        for one in file.statistics:
            if one.id not in self.columns:  # dropped since
                continue
            name, type_ = self.columns[one.id]
            nulls[name] = one.nulls
            if (low := self._value(one.least, type_, up=False)) is not None:
                least[name] = low
            if (high := self._value(one.greatest, type_, up=True)) is not None:
                greatest[name] = high
        found = {"numRecords": file.rows, "minValues": least, "maxValues": greatest, "nullCount": nulls}
        return msgspec.json.encode(found | ({"tightBounds": False} if file.deleted else {})).decode()

    def _value(self, bound: Bound, type_: pa.DataType, *, up: bool) -> _Value | None:
        """A bound as Delta has it, rounded ``up`` or down; None if it has no form for it."""
        t = pa.types
        if bound is None or isinstance(bound, bool):  # Delta's own writers give none of booleans
            return None
        if t.is_decimal(type_):
            return _number(str(bound))
        if isinstance(bound, str):
            return bound
        try:
            if t.is_date(type_):
                return (_EPOCH.date() + timedelta(days=bound)).isoformat()
            if t.is_timestamp(type_):
                zone = "Z" if type_.tz or self.naive_time == "timestamp" else ""
                moment = _EPOCH + timedelta(milliseconds=-(-bound // 1000) if up else bound // 1000)
                return moment.replace(tzinfo=None).isoformat(timespec="milliseconds") + zone
        except OverflowError:  # before the year 1, or after 9999
            return None
        return bound


def _number(text: str) -> msgspec.Raw | None:
    digits = text.strip("-0.").replace(".", "")
    return msgspec.Raw(text.encode()) if len(digits) <= _MOST_DIGITS else None
