"""Landing files of delimited text: a regular expression cuts lines into fields; no quotes, and by default no header."""

import re
from collections.abc import Sequence

import msgspec
import pyarrow as pa

from lakeupsert.config import Reading
from lakeupsert.landing.formats.csvfile import Csv
from lakeupsert.landing.formats.lines import line_ends
from lakeupsert.landing.formats.records import Dialect, Fields, record_ends
from lakeupsert.rows.arrays import Indices

_LINES = 10_000
"""Most lines that are Python objects at once: these take several times the memory of their text."""
_ONE_SIGN = re.compile(r"[^\\.^$*+?{}\[\]|()\r\n\0]|\\[^\w\s]")


def choose_dialect(reading: Reading, head: bytes) -> tuple[Dialect, int]:
    """See `records.ChooseDialect`. A pattern that matches just one character uses CSV's dialect, which is ten times as fast."""
    if reading.delimiter.isascii() and _ONE_SIGN.fullmatch(reading.delimiter):
        return Csv(msgspec.structs.replace(reading, delimiter=reading.delimiter[-1], quote="")), 0
    return _Delimited(reading), 0


class _Delimited:
    """See `records.Dialect`."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self._fields = re.compile(reading.delimiter).split

    def ends(self, data: bytes, *, final: bool) -> tuple[Indices, bool]:
        return record_ends(line_ends(data, final=final), data, final=final), False

    def names(self, record: bytes) -> list[str]:
        return self._fields(record.decode())

    def count(self, record: bytes) -> int:
        return len(self._fields(record.decode(errors="replace")))

    def flaws(self, data: bytes, starts: Indices, ends: Indices) -> dict[int, str]:
        return {}

    def split(self, text: bytes, names: Sequence[str], wanted: Sequence[str]) -> Fields:
        lines = text.splitlines()
        null: dict[str, None] = dict.fromkeys(("", *self.reading.null_words))
        parts: dict[str, list[pa.Array]] = {name: [] for name in wanted}
        miscounted: dict[int, int] = {}
        for begin in range(0, len(lines), _LINES):
            rows = []
            for i, line in enumerate(lines[begin : begin + _LINES], begin):
                fields = self._fields(line.decode())
                if len(fields) == len(names):
                    rows.append(fields)
                else:
                    miscounted[i] = len(fields)
            for name, values in zip(names, zip(*rows, strict=True), strict=True) if rows else ():
                if name in parts:
                    parts[name].append(pa.array([null.get(v, v) for v in values], pa.string()))
        empty = pa.array([], pa.string())
        return Fields({name: pa.concat_arrays([empty, *arrays]) for name, arrays in parts.items()}, miscounted)
