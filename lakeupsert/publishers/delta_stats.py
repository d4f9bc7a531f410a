"""Statistics of a file in Delta's JSON."""

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta

import msgspec
import pyarrow as pa

from lakeupsert.table.manifest import Bound, DataFile

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_Value = int | str | msgspec.Raw


def stats_json(file: DataFile, fields: Mapping[int, pa.Field]) -> str:
    """The statistics of a file. ``fields``: the table's columns by id.

    Without one of the three objects, even empty, Trino's ANALYZE reads the file and commits its own, in spite of the fence.
    """
    least: dict[str, _Value] = {}
    greatest: dict[str, _Value] = {}
    nulls: dict[str, int] = {}
    for one in file.statistics:
        field = fields.get(one.id)
        if field is None:  # dropped
            continue
        nulls[field.name] = one.nulls
        for found, bound, up in ((least, one.least, False), (greatest, one.greatest, True)):
            value = None if bound is None else _value(bound, field.type, up=up)
            if value is not None:
                found[field.name] = value
    stats: dict[str, object] = {
        "numRecords": file.rows,
        "minValues": least,
        "maxValues": greatest,
        "nullCount": nulls,
    }
    if file.deleted:
        stats["tightBounds"] = False
    return msgspec.json.encode(stats).decode()


def _value(bound: Bound, type_: pa.DataType, *, up: bool) -> _Value | None:
    """A bound as Delta has it, rounded ``up`` or down; None if it has no form for it."""
    t = pa.types
    if t.is_decimal(type_):
        return msgspec.Raw(str(bound).encode())
    if isinstance(bound, bool) or bound is None:  # Delta's own writers give none of booleans
        return None
    if isinstance(bound, str):
        return bound
    try:
        if t.is_date(type_):
            return (date(1970, 1, 1) + timedelta(days=bound)).isoformat()
        if t.is_timestamp(type_):
            milliseconds = -(-bound // 1000) if up else bound // 1000
            moment = _EPOCH + timedelta(milliseconds=milliseconds)
            return moment.replace(tzinfo=None).isoformat(timespec="milliseconds") + ("Z" if type_.tz else "")
    except OverflowError:  # its text has four digits for the year
        return None
    return bound
