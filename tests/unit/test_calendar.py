"""Dates and timestamps of the hybrid calendar, against a calendar that counts days and against Spark's own tables."""

import json
import zipfile
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyspark
import pytest

from lakeupsert.rows.calendar import dates, instants_of
from lakeupsert.rows.leaves import map_leaves

FIRST_GREGORIAN = -141_427  # 1582-10-15


def hybrid_days() -> dict[tuple[int, int, int], int]:
    """Days since 1970 of every date of the hybrid calendar from 0001-01-01 to 1582-10-04."""
    found, day = {}, FIRST_GREGORIAN - 1
    for year in range(1582, 0, -1):
        lengths = [31, 29 if year % 4 == 0 else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
        for month in range(12, 0, -1):
            for of_month in range(lengths[month - 1], 0, -1):
                if (year, month, of_month) <= (1582, 10, 4):
                    found[year, month, of_month] = day
                    day -= 1
    return found


def test_every_day_keeps_its_name() -> None:
    days = hybrid_days()
    assert days[1582, 10, 4] == FIRST_GREGORIAN - 1
    named = {name: day for name, day in days.items() if name[1:] != (2, 29) or name[0] % 100 or name[0] % 400 == 0}
    found = dates(pa.array(list(named.values()), pa.int32()).view(pa.date32())).view(pa.int32()).to_pylist()
    assert found == [date(*name).toordinal() - date(1970, 1, 1).toordinal() for name in named]
    leap = dates(pa.array([days[1500, 2, 29], None, FIRST_GREGORIAN, 0], pa.int32()).view(pa.date32()))
    assert leap.to_pylist() == [date(1500, 3, 1), None, date(1582, 10, 15), date(1970, 1, 1)]


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_instants_are_those_of_spark(unit: str) -> None:
    """Spark has a table of the differences by zone, whose moments are in seconds."""
    name = "julian-gregorian-rebase-micros.json"
    jars = Path(pyspark.__file__).parent.glob("jars/spark-*.jar")
    (jar,) = [jar for jar in jars if name in zipfile.ZipFile(jar).namelist()]
    table = {one["tz"]: one for one in json.loads(zipfile.ZipFile(jar).read(name))}
    per_second = {"s": 1, "ms": 10**3, "us": 10**6}[unit]
    moments = np.arange(-62_135_000_000, -2_208_000_000, 86_400 * 371 + 3601)
    for zone in (
        "UTC",
        "America/New_York",
        "America/Los_Angeles",
        "Europe/Paris",
        "Europe/London",
        "Asia/Kolkata",
        "Asia/Tokyo",
    ):
        switches, differences = np.array(table[zone]["switches"]), np.array(table[zone]["diffs"])
        expected = moments + differences[np.searchsorted(switches, moments, "right") - 1]
        given = pa.array(moments * per_second + per_second // 2).view(pa.timestamp(unit, "UTC"))
        found = instants_of(zone)(given).view(pa.int64()).to_numpy()
        assert (found == expected * per_second + per_second // 2).all(), zone


def test_zones_are_those_of_java() -> None:
    """What Spark 4.1.4 (Java 17) reads from its own file with this zone in the footer: 1850-01-01 in UTC, and before 1582."""
    moments = pa.array([-3_786_825_600, -14_829_222_400], pa.timestamp("s", "UTC"))
    for zone, minutes, seconds in (
        ("Asia/Shanghai", 343, 777_943),
        ("CTT", 343, 777_943),
        ("PST", 422, 778_022),
        *(
            (zone, 0, 777_600)
            for zone in ("EST", "Z", "UTC", "GMT", "GMT0", "+08:00", "-8:00", "+8", "+0800", "GMT+8", "UT-02:30")
        ),
    ):
        found = instants_of(zone)(moments).view(pa.int64()).to_numpy()
        assert (moments.view(pa.int64()).to_numpy() - found).tolist() == [minutes, seconds], zone
    with pytest.raises(pa.ArrowInvalid, match="'Mars/X'"):
        instants_of("Mars/X")(moments)
    assert instants_of("Mars/X")(pa.array([0], pa.timestamp("s", "UTC"))).to_pylist()[0].year == 1970


def test_leaves_are_changed_wherever_they_are() -> None:
    struct = pa.struct([("d", pa.date32()), ("n", pa.int8())])
    type_ = pa.struct(
        [
            ("list", pa.list_(struct)),
            ("large", pa.large_list(pa.date32())),
            ("fixed", pa.list_(pa.date32(), 2)),
            ("map", pa.map_(pa.date32(), pa.list_(pa.date32()))),
        ]
    )
    old, new = date(1500, 1, 10), date(1500, 1, 1)  # the same number of a day, in either calendar

    def value(day: date) -> dict[str, object]:
        return {
            "list": [{"d": day, "n": 1}, None, {"d": None, "n": 2}],
            "large": [day, None],
            "fixed": [day, date(2020, 1, 1)],
            "map": [(day, [day, None]), (date(2020, 1, 1), None)],
        }

    nothing = dict.fromkeys(value(old))
    array = pa.array([None, value(old), nothing, value(old), {**value(old), "list": []}], type_)
    expected = pa.array([value(new), nothing, None, {**value(new), "list": []}], type_)
    changes = [dates, None, dates, dates, dates, dates]
    assert map_leaves(array.take([1, 2, 0, 4]), iter(changes)).equals(expected)
    assert map_leaves(array.slice(1, 2), iter(changes)).equals(expected.slice(0, 2))
