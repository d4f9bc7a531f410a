"""Correct timestamps without a zone that the ORC library inside pyarrow 26 reads otherwise than they were written.

ORC stores such a timestamp as a moment in the writer's time zone. pyarrow makes it the time that a clock there showed, and errs
twice:
- Writers cut the fraction of a moment before 1970 towards zero, and pyarrow undoes this if the clock, not the moment, is before
  1970. Between the two, timestamps with a fraction are a second early (west of UTC) or late (east of it).
- Before 1900, Java knows no other offset of a zone than today's standard one, and pyarrow the zone's history; before the first
  change in that, it takes the offset after the change. They differ by minutes or hours.
"""

import os
import struct
from functools import cache, partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.rows.arrays import Indices
from lakeupsert.rows.calendar import UTC_1900, standard_offset, where_below
from lakeupsert.rows.leaves import Change

_SECOND = 10**9
_DAY = 86_400
_MILLISECOND = 999_999
"""Only fractions above so many nanoseconds are cut: the writer takes whole milliseconds apart."""


class _Beginning(NamedTuple):
    """The first change of a zone's offset, in seconds since 1970, and the offset that pyarrow takes before it."""

    moment: int
    offset: int


def corrections(zone: str, *, by_java: bool) -> Change:
    """Corrects the timestamps of a stripe, by its writer's time zone. ``by_java``: ORC's library for Java wrote it."""
    return partial(_correct, zone, by_java)


def _correct(zone: str, by_java: bool, array: pa.Array) -> pa.Array:
    array = where_below(array, _DAY * _SECOND, partial(_undo_cut, zone))
    beginning = _beginning(zone)
    if not by_java or beginning is None:
        return array
    limit = max(UTC_1900, beginning.moment) + 2 * _DAY
    return where_below(array, limit * _SECOND, partial(_as_in_java, zone, beginning))


def _undo_cut(zone: str, clocks: Indices) -> Indices:
    seconds, rest = np.divmod(clocks, _SECOND)
    # A writer that cuts leaves no fraction in the second before 1970; there it is from one that does not cut, as pyarrow.
    near = (np.abs(seconds) <= _DAY) & (rest > _MILLISECOND) & (seconds != -1)
    if not near.any():
        return clocks
    stored = np.where(seconds < 0, seconds + 1, seconds)[near]
    clocks[near] += (stored - seconds[near] - (_moments(zone, stored, "earliest") < 0)) * _SECOND
    return clocks


def _as_in_java(zone: str, beginning: _Beginning, clocks: Indices) -> Indices:
    seconds, rest = np.divmod(clocks, _SECOND)
    moments = seconds - beginning.offset
    later = moments >= beginning.moment
    moments[later] = _moments(zone, seconds[later], "latest")  # the first change makes no clock of pyarrow ambiguous
    history = pc.local_timestamp(pa.array(moments).view(pa.timestamp("s", "UTC")).cast(pa.timestamp("s", zone)))
    then = np.where(moments < UTC_1900, moments + standard_offset(zone), history.view(pa.int64()).to_numpy())
    same: Indices = then * _SECOND + rest
    return same


def _moments(zone: str, clocks: Indices, ambiguous: Literal["earliest", "latest"]) -> Indices:
    """The moments at which clocks in a zone show these seconds."""
    naive = pa.array(clocks, pa.int64()).view(pa.timestamp("s"))
    moments = pc.assume_timezone(naive, zone, ambiguous=ambiguous, nonexistent="earliest")
    seconds: Indices = moments.view(pa.int64()).to_numpy()
    return seconds


@cache
def _beginning(zone: str) -> _Beginning | None:
    """What the zone's file says, which pyarrow's ORC reads, too; None if the offset never changes. RFC 8536 has the format."""
    data = Path(os.environ.get("TZDIR", "/usr/share/zoneinfo"), zone).read_bytes()
    for width in (4, 8):  # the second part has the same with 64 bits
        counts = struct.unpack_from(">6l", data, 20)
        of_utc, standard, leaps, changes, kinds, letters = counts
        if width == 8 or data[4:5] == b"\0":
            break
        data = data[44 + changes * 5 + kinds * 6 + letters + leaps * 8 + standard + of_utc :]
    if not changes:
        return None
    moments = struct.unpack_from(f">{changes}{'q' if width == 8 else 'l'}", data, 44)
    after = data[44 + changes * width : 44 + changes * (width + 1)]
    offsets = [struct.unpack_from(">l?", data, 44 + changes * (width + 1) + i * 6) for i in range(kinds)]
    chosen = next((offsets[i] for i in after if not offsets[i][1]), offsets[0])
    return _Beginning(moments[0], chosen[0])
