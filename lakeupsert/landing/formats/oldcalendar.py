"""Which dates and timestamps of a file are in the hybrid calendar, by the keys that Spark writes into Parquet and Avro."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from lakeupsert.rows.calendar import change_of, dates, instants_of
from lakeupsert.rows.leaves import Change

_SPARK = b"org.apache.spark."
_SCHEMA = _SPARK + b"sql.parquet.row.metadata"


@dataclass(frozen=True)
class OldCalendar:
    """What to do to values of a file.

    Attributes:
        instants: to timestamps of a file with old dates; None if its dates are not old.
        int96: to timestamps of INT96.
    """

    instants: Change | None = None
    int96: Change | None = None

    @classmethod
    def of(cls, keys: Mapping[bytes, bytes]) -> "OldCalendar":
        """By the rules of Spark's own reader; and Spark before 2.4.6 writes no version. Without a zone, timestamps are of UTC."""
        if not is_of_spark(keys):
            return cls()
        version = _version(keys)
        change = instants_of(keys.get(_SPARK + b"timeZone", b"UTC").decode())
        is_old = version < (3, 0) or _SPARK + b"legacyDateTime" in keys
        is_old_int96 = version < (3, 1) or _SPARK + b"legacyINT96" in keys
        return cls(change if is_old else None, change if is_old_int96 else None)

    def change(self, type_: pa.DataType) -> Change | None:
        return change_of(type_, dates, self.instants) if self.instants else None


def is_of_spark(keys: Mapping[bytes, bytes]) -> bool:
    return _SCHEMA in keys or _SPARK + b"version" in keys


def _version(keys: Mapping[bytes, bytes]) -> tuple[int, ...]:
    found = re.match(rb"(\d+)\.(\d+)", keys.get(_SPARK + b"version", b""))
    return tuple(map(int, found.groups())) if found else (2, 4)
