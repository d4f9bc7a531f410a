"""Read text files by Python's own readers, which `append` does not use, for `reconcile --deep`.

Reads     one landing file
Writes    nothing
Repeat    safe
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
from lakeupsert.landing.files import format_of
from lakeupsert.landing.formats.envelopes import UNWRAP
from lakeupsert.landing.formats.unpacked import UNDECODABLE, compression_of, is_utf8

_MARKED = "\ue000{}\ue000"
"""Marks a JSON number as it was written: as a Python float it would lose digits, also within lists and objects."""


def read_text(path: str, name: str, refused: frozenset[int], reading: Reading) -> Iterator[dict[str, str | None]]:
    """The rows of a text file that do not begin at a refused byte, as text by column; ``name`` says its format."""
    kind = format_of(name, reading.format) or ""
    return _READERS[kind](_Lines(_decoded_lines(path, name, reading, kind)), refused, reading)


def _decoded_lines(path: str, name: str, reading: Reading, kind: str) -> Iterator[str]:
    """The lines of a file. Bytes that can't be decoded must not stop the reader: it skips their rows, which were refused."""
    compression = compression_of(name)
    by_python: dict[str | None, Any] = {
        None: open,
        "gzip": gzip.open,
        "bz2": bz2.open,
        "xz": lzma.open,
    }  # without a common type
    opened = by_python[compression](path, "rb") if compression in by_python else pa.input_stream(path, compression)
    errors = "surrogateescape" if is_utf8(reading.encoding) else UNDECODABLE  # as `append` reads them
    newline = "\n" if kind == "jsonl" else ""
    with opened, io.TextIOWrapper(opened, reading.encoding, errors, newline) as text:
        yield from text


class _Lines:
    """The lines of a text file without a byte order mark; ``place`` is the byte at which the next line begins."""

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


def _csv_rows(lines: _Lines, refused: frozenset[int], reading: Reading) -> Iterator[dict[str, str | None]]:
    if reading.quote:
        records = csv.reader(lines, delimiter=reading.delimiter, quotechar=reading.quote)
    else:
        records = csv.reader(lines, delimiter=reading.delimiter, quoting=csv.QUOTE_NONE)
    return _rows(_csv_records(lines, records), refused, reading)


def _csv_records(lines: _Lines, records: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
    while True:
        begin = lines.place
        before = csv.field_size_limit(1 << 30)  # of the whole process, so it is set back
        try:
            fields = next(records, None)
        finally:
            csv.field_size_limit(before)
        if fields is None:
            return
        if fields:
            yield begin, fields


def _delimited_rows(lines: _Lines, refused: frozenset[int], reading: Reading) -> Iterator[dict[str, str | None]]:
    return _rows(_delimited_records(lines, reading.delimiter), refused, reading)


def _delimited_records(lines: _Lines, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    begin = lines.place
    for line in lines:
        if line.rstrip("\r\n"):
            yield begin, re.split(delimiter, line.rstrip("\r\n"))
        begin = lines.place


def _rows(
    records: Iterator[tuple[int, list[str]]], refused: frozenset[int], reading: Reading
) -> Iterator[dict[str, str | None]]:
    """Records as fields by name; empty text, and the text of `null`, is null."""
    null = {"": None, reading.null: None}
    names: Sequence[str] = ()
    for begin, fields in records:
        if not names:
            names = fields if reading.has_header else reading.columns or [f"_c{i}" for i in range(len(fields))]
            if reading.has_header:
                continue
        if begin not in refused:
            yield {name: null.get(value, value) for name, value in zip(names, fields, strict=True)}


def _json_rows(lines: _Lines, refused: frozenset[int], reading: Reading) -> Iterator[dict[str, str | None]]:
    """JSON objects, without their envelopes; numbers keep their digits."""
    begin = lines.place
    for line in lines:
        if line.strip() and begin not in refused:
            row = json.loads(line, parse_float=_MARKED.format, parse_int=_MARKED.format)
            if reading.envelope:
                row = UNWRAP[reading.envelope](row)
            if row is not None:
                yield {name: _json_text(value) for name, value in row.items()}
        begin = lines.place


_READERS = {"csv": _csv_rows, "delimited": _delimited_rows, "jsonl": _json_rows}


def _json_text(value: object) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return re.sub('"?\ue000([^\ue000]*)\ue000"?', r"\1", text)
