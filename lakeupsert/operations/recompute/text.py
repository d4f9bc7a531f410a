"""Read text files by Python's own readers, which `append` does not use, for `reconcile --deep`.

Reads     one landing file
Writes    nothing
Repeat    safe
"""

import base64
import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import IO, Any

import pyarrow as pa
from msgspec.structs import asdict, replace

from lakeupsert.config import Reading
from lakeupsert.landing.formats.envelopes import Found, NoEnvelopeError, Row, TruncateError, unwrap_of
from lakeupsert.landing.formats.escapes import LETTERS
from lakeupsert.landing.formats.registry import format_of
from lakeupsert.landing.formats.unpacked import UNDECODABLE, compression_of, is_utf8
from lakeupsert.table.types import is_number, is_text

Types = Mapping[str, pa.DataType]
_MARKED = "\ue000{}\ue000"
"""Marks a JSON number as it was written: as a Python float it would lose digits, also within lists and objects."""


_CODE = re.compile(r"\\(?:x([0-9A-Fa-f]{1,2})|([0-7]{1,3}))")
BYTES = "\ue001"
"""Before bytes that are written as DuckDB casts them. Other text is cast to the bytes of its letters."""
_PIECES = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{},]|[^"\[\]{},]+')
"""The pieces of a line of JSON: strings, the signs around and between values, and what is between these."""


def read_text(
    path: str, name: str, refused: frozenset[int], reading: Reading, types: Types
) -> Iterator[dict[str, str | None]]:
    """The rows of a text file that do not begin at a refused byte, as text by column; ``name`` says its format.

    ``types``: of the table's columns, by their lower-case names. In numbers a decimal comma becomes a point.
    """
    kind = format_of(name, reading.format).name
    lines = _Lines(_decoded_lines(path, name, reading, kind))
    if kind == "csv":
        reading = _dialect(lines, reading)
    is_json = kind == "jsonl"
    rows = _json_rows(lines, refused, reading, types) if is_json else _READERS[kind](lines, refused, reading)
    if reading.only:
        rows = (row for row in rows if _is_own(row, reading))
    return _with_points(rows, reading, types) if not is_json and reading.decimal_separator == "," else rows


def _is_own(row: Mapping[str, str | None], reading: Reading) -> bool:
    values = {reading.table_name_of(name).lower(): value for name, value in row.items()}
    return all(values.get(name) in texts for name, texts in reading.own_texts.items())


def _with_points(
    rows: Iterator[dict[str, str | None]], reading: Reading, types: Types
) -> Iterator[dict[str, str | None]]:
    numbers = {name for name, type_ in types.items() if is_number(type_)}
    for row in rows:
        has_number = {name: reading.table_name_of(name).lower() in numbers for name in row}
        yield {n: _with_point(v) if v is not None and has_number[n] else v for n, v in row.items()}


def _with_point(number: str) -> str:
    """A number with a decimal comma, and perhaps with points between its thousands, as one with a decimal point."""
    whole, comma, fraction = number.partition(",")
    groups = whole.lstrip("+-").split(".")
    grouped = bool(comma and re.fullmatch(r"[1-9]\d{0,2}", groups[0]) and all(len(group) == 3 for group in groups[1:]))
    return f"{whole.replace('.', '') if grouped else whole}{'.' if comma else ''}{fraction}"


def _dialect(lines: "_Lines", reading: Reading) -> Reading:
    """How a CSV file is read: as its line `sep=;` says, or by the dialect that makes the most fields of its first record."""
    found = re.fullmatch(r"(?i)sep=([^\r\n])\r?\n?", lines.peek())
    given = [reading, *(replace(reading, **asdict(one)) for one in reading.dialects)]
    if found:
        lines.skip()
        same = [one for one in given if one.delimiter == found[1]]
        return same[0] if same else replace(reading, delimiter=found[1])
    return max(given, key=lambda one: len(next(_csv_reader(iter([lines.peek()]), one), [])))


def _open_zip(path: str, _: str) -> IO[bytes]:
    with zipfile.ZipFile(path) as archive:
        return archive.open(archive.filelist[0])  # it keeps the archive open


def _decoded_lines(path: str, name: str, reading: Reading, kind: str) -> Iterator[str]:
    """The lines of a file. Bytes that can't be decoded must not stop the reader: it skips their rows, which were refused."""
    compression = compression_of(name)
    by_python: dict[str | None, Any] = {
        None: open,
        "gzip": gzip.open,
        "bz2": bz2.open,
        "xz": lzma.open,
        "zip": _open_zip,
    }  # without a common type
    opened = by_python[compression](path, "rb") if compression in by_python else pa.input_stream(path, compression)
    newline = "\n" if kind == "jsonl" else ""
    with opened:
        buffered = io.BufferedReader(opened)
        wide = is_utf8(reading.encoding) and buffered.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        encoding = "utf-16" if wide else reading.encoding
        errors = "surrogateescape" if is_utf8(encoding) else UNDECODABLE  # as `append` reads them
        with io.TextIOWrapper(buffered, encoding, errors, newline) as text:
            yield from text


class _Lines:
    """The lines of a text file without a byte order mark; ``place`` is the byte at which the next line begins."""

    def __init__(self, lines: Iterator[str]) -> None:
        first = next(lines, "")
        self.place = 3 if first.startswith("\ufeff") else 0
        self._next: str | None = first.removeprefix("\ufeff")
        self._rest = lines

    def peek(self) -> str:
        """The next line that is not blank, or an empty one at the end; blank ones before it are passed over."""
        while self._next is not None and self._next in ("\n", "\r\n", "\r"):
            self.skip()
        return self._next or ""

    def skip(self) -> None:
        """Pass over the next line."""
        next(self, None)

    def placed(self) -> Iterator[tuple[int, str]]:
        """The lines, each with the byte at which it begins."""
        begin = self.place
        for line in self:
            yield begin, line
            begin = self.place

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._next
        if not line:
            raise StopIteration
        self._next = next(self._rest, None)
        self.place += len(line.encode(errors="surrogateescape"))
        return line


def _csv_rows(lines: _Lines, refused: frozenset[int], reading: Reading) -> Iterator[dict[str, str | None]]:
    if reading.escape:
        return _rows(iter(_Escaped(lines, reading)), refused, reading)
    return _rows(_csv_records(lines, _csv_reader(lines, reading)), refused, reading)


def _csv_reader(lines: Iterator[str], reading: Reading) -> Iterator[list[str]]:
    if reading.quote_sign:
        return csv.reader(lines, delimiter=reading.delimiter, quotechar=reading.quote_sign)
    return csv.reader(lines, delimiter=reading.delimiter, quoting=csv.QUOTE_NONE)


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


class _Escaped:
    """The records of text with escapes, character by character: Python's own reader has other rules for them."""

    def __init__(self, lines: _Lines, reading: Reading) -> None:
        self._lines = lines
        self._quote, self._delimiter = reading.quote_sign, reading.delimiter
        letters = LETTERS.get(reading.escape)
        self._letters = (
            None if letters is None else {letter.decode(): sign.decode() for letter, sign in letters.items()}
        )
        self._sign = "\\" if letters is not None else reading.escape
        self._codes, self._lf_only = reading.escape == "postgresql", reading.escape == "mysql"
        self._text, self._at = "", 0

    def __iter__(self) -> Iterator[tuple[int, list[str | None]]]:
        while self._lines.peek():
            begin, self._text, self._at = self._lines.place, next(self._lines), 0
            fields = [self._field()]
            while self._take(self._delimiter):
                fields.append(self._field())
            yield begin, fields

    def _next(self) -> str:
        """The next characters of the record, five at most; none at the end of the file."""
        if self._at >= len(self._text):
            self._text += next(self._lines, "")
        return self._text[self._at : self._at + 5]

    def _take(self, text: str) -> bool:
        found = bool(text) and self._next().startswith(text)
        self._at += len(text) if found else 0
        return found

    def _field(self) -> str | None:
        start, value, quoted = self._at, "", self._take(self._quote)
        while not self._is_end(quoted=quoted):
            value += self._one(quoted=quoted)
        raw = self._text[start : self._at].removeprefix(self._quote if quoted else "")
        if quoted:
            self._take(self._quote)
        if self._letters is not None and raw == "\\N":
            return None
        return value.encode(errors="surrogateescape").decode(errors="surrogateescape")

    def _is_end(self, *, quoted: bool) -> bool:
        found = self._next()
        if quoted:
            return not found or (found[0] == self._quote and found[:2] != self._quote * 2)
        is_line_end = found[:1] == "\n" or found[:2] == "\r\n" or (found[:1] == "\r" and not self._lf_only)
        return not found or is_line_end or found[0] == self._delimiter

    def _one(self, *, quoted: bool) -> str:
        found = self._next()
        if quoted and self._take(self._quote * 2):
            return self._quote
        if found[0] == self._sign and (
            self._letters is not None or (quoted and found[1:2] in (self._quote, self._sign))
        ):
            code = _CODE.match(found) if self._codes else None
            self._at += code.end() if code else 2
            if code:
                byte = int(code[1], 16) if code[1] else int(code[2], 8) & 0xFF
                return bytes([byte]).decode(errors="surrogateescape")
            return (self._letters or {}).get(found[1:2], found[1:2])
        self._at += 1
        return found[0]


def _delimited_rows(lines: _Lines, refused: frozenset[int], reading: Reading) -> Iterator[dict[str, str | None]]:
    records = ((begin, line.rstrip("\r\n")) for begin, line in lines.placed())
    return _rows(((begin, re.split(reading.delimiter, line)) for begin, line in records if line), refused, reading)


def _rows(
    records: Iterator[tuple[int, Sequence[str | None]]], refused: frozenset[int], reading: Reading
) -> Iterator[dict[str, str | None]]:
    """Records as fields by name; empty text, and the text of `null`, is null."""
    null = dict.fromkeys(("", *reading.null_words))
    names: Sequence[str] = ()
    for begin, fields in records:
        if not names:
            names = (
                [name if name and name.strip() else f"_c{i}" for i, name in enumerate(fields)]
                if reading.has_header
                else reading.columns or [f"_c{i}" for i in range(len(fields))]
            )
            if reading.has_header:
                continue
        if begin not in refused:
            yield {name: null.get(value or "", value) for name, value in zip(names, fields, strict=True)}


def _json_rows(
    lines: _Lines, refused: frozenset[int], reading: Reading, types: Types
) -> Iterator[dict[str, str | None]]:
    """JSON objects, without their envelopes; numbers keep their digits."""
    is_array = re.match(r"\s*\[\s*([{\]]|$)", lines.peek()) is not None
    unwrap = unwrap_of(reading)
    for begin, text in _elements(lines) if is_array else lines.placed():
        if not text.strip() or (unwrap is None and begin in refused):
            continue
        try:
            message = json.loads(text, parse_float=_MARKED.format, parse_int=_whole)
            rows: Sequence[Found] = [message] if unwrap is None else unwrap(message)
        except NoEnvelopeError as e:
            rows = [e]
        except ValueError:
            if begin in refused:
                continue
            raise
        for number, row in enumerate(rows):
            # A truncate is of another table, or there would be no such batch.
            if (
                isinstance(row, NoEnvelopeError)
                and not isinstance(row, TruncateError)
                and begin + number not in refused
            ):
                raise row
            # A message without a row is the name of its kind.
            if isinstance(row, dict) and begin + number not in refused:
                if reading.types and message.keys() == {"schema", "payload"}:
                    row = _as_stated(row, message["schema"], reading, types)
                yield {name: _json_text(value) for name, value in row.items()}


def _whole(digits: str) -> int | str:
    """An integer, which may be a part of an event's position, if it has the same digits again."""
    return int(digits) if len(digits) < 20 and digits != "-0" else _MARKED.format(digits)


def _as_stated(row: Row, schema: Any, reading: Reading, types: Types) -> Row:
    """The row with the values that the schema of its message states, where the table has columns for them."""
    sides = {one["field"]: one for one in (schema or {}).get("fields", ())}
    fields = {one["field"]: one for one in (sides.get("after") or {}).get("fields", ())}
    return {n: _stated(v, fields.get(n), types.get(reading.table_name_of(n).lower())) for n, v in row.items()}


def _stated(value: Any, schema: Any, type_: pa.DataType | None) -> object:
    if value is None or not schema or type_ is None or is_text(type_):
        return value
    kind, name = schema["type"], str(schema.get("name")).rpartition(".")[2]
    if pa.types.is_binary(type_):
        return BYTES + "".join(f"\\x{byte:02X}" for byte in base64.b64decode(value))
    if is_number(type_):
        scale = value["scale"] if kind == "struct" else (schema.get("parameters") or {}).get("scale", 0)
        text = value["value"] if kind == "struct" else value
        is_written = kind in ("bytes", "struct") and not text.startswith("\ue000")
        return _unscaled(text, int(scale)) if is_written else value
    if pa.types.is_list(type_) and kind == "array":
        return [_stated(one, schema["items"], type_.value_type) for one in value]
    if pa.types.is_map(type_) and kind == "map":
        return {key: _stated(one, schema["values"], type_.item_type) for key, one in value.items()}
    if pa.types.is_struct(type_) and kind == "struct":
        inner = {one["field"]: one for one in schema["fields"]}
        return {
            n: _stated(v, inner.get(n), type_.field(n).type if n in type_.names else None) for n, v in value.items()
        }
    return _moment(value, name) if kind in ("int32", "int64") else value


def _unscaled(text: str, scale: int) -> str:
    whole = int.from_bytes(base64.b64decode(text), "big", signed=True)
    digits = f"{abs(whole) * 10 ** max(0, -scale):0{max(0, scale) + 1}}"
    point = len(digits) - max(0, scale)
    return f"{'-' * (whole < 0)}{digits[:point]}.{digits[point:]}".removesuffix(".")


def _moment(value: int, name: str) -> object:
    """A date, time or timestamp as text, by the unit of the name in which its type ends."""
    if name == "Date":
        return (date(1970, 1, 1) + timedelta(value)).isoformat()
    unit = {"Micro": 10**6, "Nano": 10**9}.get(name.removesuffix("stamp").removesuffix("Time"), 1000)
    seconds, rest = divmod(value, unit)
    moment = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)).isoformat(" ")
    written = moment[:19] if name.endswith("stamp") else moment[11:19]
    return f"{written}.{rest:0{len(str(unit)) - 1}}" if name.endswith(("Time", "Timestamp")) else value


def _elements(lines: _Lines) -> Iterator[tuple[int, str]]:
    """The elements of an array, each with the byte at which it begins."""
    depth, text, begin, at = 0, "", 0, lines.place
    for line in lines:
        for piece in _PIECES.findall(line):
            if depth == 1 and piece in (",", "]"):
                yield begin, text
                text = ""
            elif text or (depth and not piece.isspace()):
                begin = begin if text else at + len(piece) - len(piece.lstrip())
                text += piece
            depth += (piece in ("[", "{")) - (piece in ("]", "}"))
            at += len(piece.encode(errors="surrogateescape"))


_READERS = {"csv": _csv_rows, "delimited": _delimited_rows}


def _json_text(value: object) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return re.sub('"?\ue000([^\ue000]*)\ue000"?', r"\1", text)
