"""Text files for `reconcile --deep`, read by Python's own readers, which `append` does not use.

Reads     one file
Writes    nothing
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa

from lakeupsert.config import Reading
from lakeupsert.landing.formats.envelopes import UNWRAP
from lakeupsert.landing.formats.unpacked import UNDECODABLE, is_utf8

_MARKED = "\ue000{}\ue000"
"""A number of JSON, as it was written: Python's own would lose digits, also within lists and objects."""


def lines_of(path: str, compression: str | None, encoding: str, newline: str) -> Iterator[str]:
    """The lines of a text file. What is not in its encoding was refused; until such a row is left out it must not stop us."""
    by_python: dict[str | None, Any] = {None: open, "gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
    opened = by_python[compression](path, "rb") if compression in by_python else pa.input_stream(path, compression)
    errors = "surrogateescape" if is_utf8(encoding) else UNDECODABLE  # as append has them, which takes UTF-8 as it is
    with opened, io.TextIOWrapper(opened, encoding, errors, newline) as text:
        yield from text


class Lines:
    """The lines of a text file without its byte order mark; ``place`` is the byte at which the next one begins."""

    def __init__(self, lines: Iterator[str]) -> None:
        first = next(lines, "")
        self.place = 3 if first.startswith("\ufeff") else 0
        self._lines = self._read(chain([first.removeprefix("\ufeff")], lines))

    def _read(self, lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            self.place += len(line.encode(errors="surrogateescape"))
            yield line

    def __iter__(self) -> Iterator[str]:
        return self._lines


def _csv_rows(lines: Lines, refused: frozenset[int], reading: Reading) -> Iterator[dict[str, str | None]]:
    """The records that do not begin at a refused byte."""
    quoting: dict[str, Any] = {"quotechar": reading.quote} if reading.quote else {"quoting": csv.QUOTE_NONE}
    return _named(_csv_records(lines, csv.reader(lines, delimiter=reading.delimiter, **quoting)), refused, reading)


def _csv_records(lines: Lines, records: Any) -> Iterator[tuple[int, list[str]]]:
    while True:
        begin = lines.place
        before = csv.field_size_limit(1 << 30)  # of the whole process, where others want their own
        try:
            fields = next(records, None)
        finally:
            csv.field_size_limit(before)
        if fields is None:
            return
        if fields:
            yield begin, fields


def _delimited_rows(lines: Lines, refused: frozenset[int], reading: Reading) -> Iterator[dict[str, str | None]]:
    """The same of text without quotes."""

    def records() -> Iterator[tuple[int, list[str]]]:
        begin = lines.place
        for line in lines:
            if line.rstrip("\r\n"):
                yield begin, re.split(reading.delimiter, line.rstrip("\r\n"))
            begin = lines.place

    return _named(records(), refused, reading)


def _named(
    records: Iterator[tuple[int, list[str]]], refused: frozenset[int], reading: Reading
) -> Iterator[dict[str, str | None]]:
    """Fields by name; text that is empty, or what `null` says, is null."""
    null = {"": None, reading.null: None}
    names: Sequence[str] = ()
    for begin, fields in records:
        if not names:
            names = fields if reading.has_header else reading.columns or [f"_c{i}" for i in range(len(fields))]
            if reading.has_header:
                continue
        if begin not in refused:
            yield {name: null.get(value, value) for name, value in zip(names, fields, strict=True)}


def _json_rows(lines: Lines, refused: frozenset[int], reading: Reading) -> Iterator[dict[str, str | None]]:
    """The objects of lines that do not begin at a refused byte, out of their envelopes; numbers keep their digits."""
    begin = lines.place
    for line in lines:
        if line.strip() and begin not in refused:
            row = json.loads(line, parse_float=_MARKED.format, parse_int=_MARKED.format)
            if reading.envelope:
                row = UNWRAP[reading.envelope](row)
            if row is not None:
                yield {name: _json_text(value) for name, value in row.items()}
        begin = lines.place


ROWS = {"csv": _csv_rows, "delimited": _delimited_rows, "jsonl": _json_rows}


def _json_text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return re.sub('"?\ue000([^\ue000]*)\ue000"?', r"\1", text)
