"""Dates and timestamps that a writer stored in the hybrid calendar: Julian until 1582-10-04, Gregorian from 1582-10-15 on.

Spark 2, Hive and the ORC library of Java count so, Arrow and all readers of tables by the proleptic Gregorian calendar. A date
keeps what people read: the day that the writer calls 1500-01-01 becomes the one that readers call so.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.rows.arrays import Indices
from lakeupsert.rows.leaves import Change

_GREGORIAN = -141_427  # 1582-10-15 as days since 1970
_DAY = 86_400
_NOTHING = timedelta()
UTC_1900 = -2_208_988_800
"""1900-01-01 in UTC, as seconds since 1970. Before it, the old classes of Java know no other offset of a zone than today's
standard one, and java.time and Arrow those of the zone's history."""
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAYS_TO_1970 = 2_440_588  # of the Julian day number
_OFFSET = re.compile(r"(?=.)(?:UTC|GMT|UT)?(?:Z|0|([+-])(\d{1,2})(?::?(\d\d))?)?")
_IDS = (
    "EST=-05:00 HST=-10:00 MST=-07:00 ACT=Australia/Darwin AET=Australia/Sydney AGT=America/Argentina/Buenos_Aires "
    "ART=Africa/Cairo AST=America/Anchorage BET=America/Sao_Paulo BST=Asia/Dhaka CAT=Africa/Harare "
    "CNT=America/St_Johns CST=America/Chicago CTT=Asia/Shanghai EAT=Africa/Addis_Ababa ECT=Europe/Paris "
    "IET=America/Indiana/Indianapolis IST=Asia/Kolkata JST=Asia/Tokyo MIT=Pacific/Apia NET=Asia/Yerevan "
    "NST=Pacific/Auckland PLT=Asia/Karachi PNT=America/Phoenix PRT=America/Puerto_Rico PST=America/Los_Angeles "
    "SST=Pacific/Guadalcanal VST=Asia/Ho_Chi_Minh"
)
_SHORT_IDS = dict(pair.split("=") for pair in _IDS.split())
"""`ZoneId.SHORT_IDS` of Java 17."""


def change_of(
    type_: pa.DataType, dates: Change | None, instants: Change | None, clocks: Change | None = None
) -> Change | None:
    """The change for values of a type: ``instants`` for timestamps with a zone, ``clocks`` for others."""
    if pa.types.is_date(type_):
        return dates
    if pa.types.is_timestamp(type_):
        return instants if type_.tz else clocks
    return None


def instants_of(zone: str) -> Change:
    """Timestamps of Java's `Timestamp` and `GregorianCalendar`, in a program whose time zone was ``zone``, as Java calls it.

    The change raises pyarrow.ArrowInvalid for timestamps before 1900 if the zone is not known here.
    """
    return partial(_instants, _known_here(zone))


def _known_here(zone: str) -> str:
    """The name that the time zone database, or Arrow, has for an id of Java's `ZoneId`: GMT+8, Z, PST."""
    offset = _OFFSET.fullmatch(zone)
    if offset is None:
        return _SHORT_IDS.get(zone, zone)
    return f"{offset[1]}{int(offset[2]):02}:{offset[3] or '00'}" if offset[1] else "UTC"


def dates(array: pa.Array) -> pa.Array:
    """Dates."""
    per_day = 1 if pa.types.is_date32(array.type) else _DAY * 1000
    return where_below(array, _GREGORIAN * per_day, lambda early: _gregorian(early, per_day))


def where_below(array: pa.Array, limit: int, change: Callable[[Indices], Indices]) -> pa.Array:
    """The array with its values below ``limit`` changed."""
    stored = pa.int32() if array.type.bit_width == 32 else pa.int64()
    values = pc.fill_null(array.view(stored), 0).to_numpy().astype(np.int64)
    early = values < max(limit, -(2**63))
    if not early.any():
        return array
    values[early] = change(values[early])
    absent = array.is_null().to_numpy(zero_copy_only=False)
    return pa.array(values, pa.int64(), mask=absent).cast(stored).view(array.type)


def _gregorian(values: Indices, per_day: int) -> Indices:
    """Values before 1582-10-15 of the hybrid calendar, as those that the other calendar calls by the same day and time."""
    days, rest = np.divmod(values, per_day)
    # Days of the Julian calendar: years of 365.25 days that begin in March, so that leap days are at their ends.
    number = days + _DAYS_TO_1970 + 32_082
    year = (4 * number + 3) // 1461
    day_of_year = number - 1461 * year // 4
    month = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month + 2) // 5
    months = (year - 4800 + month // 10 - 1970) * 12 + month + 2 - 12 * (month // 10)
    first = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    # There is no 29 February 1500 in the other calendar: it becomes 1 March, as in Spark and ORC.
    same: Indices = np.where(days < _GREGORIAN, first + day, days) * per_day + rest
    return same


def _instants(zone: str, array: pa.Array) -> pa.Array:
    unit = array.type.unit
    second = PER_SECOND[unit]

    def change(values: Indices) -> Indices:
        local = _gregorian(values + standard_offset(zone) * second, _DAY * second)
        naive = pa.array(local, pa.int64()).view(pa.timestamp(unit))
        moments = pc.assume_timezone(naive, zone, ambiguous="earliest", nonexistent="earliest")
        changed: Indices = moments.view(pa.int64()).to_numpy()
        return changed

    return where_below(array, UTC_1900 * second, change)


@cache
def standard_offset(zone: str) -> int:
    """Seconds by which Java's `TimeZone.getRawOffset` is ahead of UTC: the zone's standard time of today.

    Where the clocks go back for a time, as in Morocco in Ramadan, Java takes that for the standard time.
    """
    try:
        place = ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError):  # +05:30, which has no history
        moment = pa.array([0], pa.int64()).view(pa.timestamp("s", "UTC")).cast(pa.timestamp("s", zone))
        try:
            return int(pc.local_timestamp(moment).view(pa.int64())[0].as_py())
        except pa.ArrowInvalid as e:
            why = "Timestamps before 1900 are what clocks showed in the time zone of its footer"
            raise pa.ArrowInvalid(f"{why}, {zone!r}, which is not known here.") from e
    weeks = [datetime(2025, 1, 15, tzinfo=UTC) - timedelta(weeks=week) for week in range(800)]
    local = [moment.astimezone(place) for moment in weeks]
    below = [one for one in local if (one.dst() or _NOTHING) < _NOTHING]
    standard = below[0].utcoffset() if below else (local[0].utcoffset() or _NOTHING) - (local[0].dst() or _NOTHING)
    return int((standard or _NOTHING).total_seconds())
