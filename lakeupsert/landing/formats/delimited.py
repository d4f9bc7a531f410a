"""Landing files of text whose lines a regular expression cuts into fields: no quotes, and by default no header."""

import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from lakeupsert.config import Reading
from lakeupsert.landing.formats import records
from lakeupsert.landing.formats.blocks import Columns, LandingInput, Opened
from lakeupsert.landing.formats.csvfile import Csv
from lakeupsert.landing.formats.records import Dialect, Refuse, behind, line_ends

_LINES = 10_000
"""That are Python objects at once, which take several times the memory of their text."""
_ONE_SIGN = re.compile(r"[^\\.^$*+?{}\[\]|()\r\n\0]|\\[^\w\s]")


def schema_of(source: Any, file: LandingInput, reading: Reading, known: Any, text_columns: frozenset[str]) -> Columns:
    """See `records.schema_of`."""
    return records.schema_of(source, file, _dialect(reading), known, text_columns)


def open_blocks(
    source: Any, file: LandingInput, reading: Reading, required: frozenset[str], only: Collection[str] | None = None
) -> Opened:
    return records.open_blocks(source, file, _dialect(reading), required, only)


def _dialect(reading: Reading) -> Dialect:
    """A pattern that stands for one character is left to the reader of CSV, which is ten times as fast."""
    if reading.delimiter.isascii() and _ONE_SIGN.fullmatch(reading.delimiter):
        return Csv(msgspec.structs.replace(reading, delimiter=reading.delimiter[-1], quote=""))
    return _Delimited(reading)


class _Delimited:
    """See `records.Dialect`."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self._fields = re.compile(reading.delimiter).split

    def ends(self, data: bytes, final: bool) -> tuple[Any, bool]:
        return behind(line_ends(data, final), data, final), False

    def names(self, record: bytes) -> list[str]:
        return self._fields(record.decode())

    def count(self, record: bytes) -> int:
        return len(self._fields(record.decode(errors="replace")))

    def split(self, text: bytes, names: Sequence[str], wanted: Sequence[str], refuse: Refuse) -> dict[str, Any]:
        lines = text.splitlines()
        null = {"": None, self.reading.null: None}
        found: dict[str, list[Any]] = {name: [] for name in wanted}
        for begin in range(0, len(lines), _LINES):
            rows = []
            for i, line in enumerate(lines[begin : begin + _LINES], begin):
                fields = self._fields(line.decode())
                if len(fields) == len(names):
                    rows.append(fields)
                else:
                    refuse(i, len(fields))
            for name, values in zip(names, zip(*rows, strict=True), strict=True) if rows else ():
                if name in found:
                    found[name].append(pa.array([null.get(v, v) for v in values], pa.string()))
        return {name: pa.concat_arrays(parts) if parts else pa.array([], pa.string()) for name, parts in found.items()}
