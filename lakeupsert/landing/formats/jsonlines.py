"""Landing files of JSON: one object a line, or an array of objects. An object is the row, or an envelope around the row.

Numbers keep the digits that were written: 8.70 stays 8.70 in a decimal, and 12345678901234567890 stays itself in text. Objects
may have different names; each name is a column, and null in objects without it. An empty string is not null, because JSON has
null for that.
"""

import gc
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial, reduce
from itertools import chain, compress, islice
from typing import Self

import msgspec
import numpy as np
import pyarrow as pa

from lakeupsert.config import Reading
from lakeupsert.decoding import UNREADABLE, decoder_of
from lakeupsert.landing.formats import blocks, connect, dominant
from lakeupsert.landing.formats.blocks import (
    Columns,
    Contents,
    FileBlock,
    LandingInput,
    MalformedRecord,
    Source,
    UnreadableFileError,
    find_missing,
    flaw_of,
    given_types,
    line_numbers,
)
from lakeupsert.landing.formats.connect import NO_SCHEMA, RowSchema
from lakeupsert.landing.formats.dominant import DominantType
from lakeupsert.landing.formats.envelopes import NoEnvelopeError, Row, RowsOf, TruncateError, unwrap_of
from lakeupsert.landing.formats.inference import unify
from lakeupsert.landing.formats.jsonarray import Elements, array_begin, cut_elements, cut_lines
from lakeupsert.landing.formats.jsonvalues import (
    convert_values,
    decode,
    dominant_of,
    infer_values,
    text_of,
    with_new_fields,
)
from lakeupsert.landing.formats.limits import MOST_VALUES, check_cells, check_columns, check_names, check_values
from lakeupsert.landing.formats.lines import BOM, TextLines
from lakeupsert.landing.formats.nested import nulls
from lakeupsert.landing.formats.only import own_rows
from lakeupsert.rows.arrays import Indices, Mask
from lakeupsert.rows.convert import Converted
from lakeupsert.table.types import widen

_HEAD_BYTES = 1 << 8  # enough to see whether a file is an array
_SHARE = 4  # a line as Python objects takes several times the memory of its text
_NAN = re.compile(rb"[:\[,]\s*-?(?:NaN|Infinity)\b")
_NO_NUMBER = ". NaN and Infinity are not JSON: the program that writes the file must write null or text for them."


class _Stated(msgspec.Struct, forbid_unknown_fields=True):
    """A message with its schema, both as text."""

    schema: msgspec.Raw
    payload: msgspec.Raw


_stated = decoder_of(_Stated)


@dataclass(frozen=True)
class JsonBlock(FileBlock):
    """A block of decoded objects, see `blocks.Block`.

    Attributes:
        written: the objects as they are in the file; None if they are envelopes around rows.
        text: the part of the file that has them.
        schemas: for each row what its columns are, if messages say it (`connect`).
    """

    rows: Sequence[Row]
    written: Sequence[bytes] | None
    places: Indices
    malformed: Sequence[MalformedRecord]
    text: TextLines | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    schemas: Sequence[RowSchema] = ()

    def choose(self, rows: Mask, malformed: Sequence[MalformedRecord], skipped: Mapping[str, int]) -> Self:
        kept = np.flatnonzero(rows).tolist()
        written = None if self.written is None else [self.written[i] for i in kept]
        own, schemas = [self.rows[i] for i in kept], [self.schemas[i] for i in kept] if self.schemas else ()
        block = replace(self, rows=own, written=written, places=self.places[rows], schemas=schemas)
        return replace(block, malformed=malformed, skipped=skipped)

    @cached_property
    def names(self) -> dict[str, None]:
        return dict.fromkeys(chain.from_iterable(self.rows))

    def stated_type(self, name: str) -> pa.DataType | None:
        """The type that messages state for the values of a column; None if none does."""
        types = [one.meanings[name].type for one in self._stating if name in one.meanings]
        if 0 < len(types) < len(self._stating):
            pairs = zip(self.rows, self.schemas, strict=True)
            types.append(infer_values([row.get(name) for row, one in pairs if name not in one.meanings]))
        return reduce(partial(unify, typed=False), types) if types else None

    @cached_property
    def _stating(self) -> list[RowSchema]:
        """Each of the schemas once."""
        return list({id(one): one for one in self.schemas}.values())

    def values(self, name: str) -> list[object]:
        if not any(one.wraps(name) for one in self._stating):
            return [row.get(name) for row in self.rows]
        return [one.wrap(name, row.get(name)) for row, one in zip(self.rows, self.schemas, strict=True)]

    def convert(self, name: str, type_: pa.DataType) -> Converted:
        return convert_values(self.values(name), type_)

    def texts(self, name: str) -> Converted | None:
        return self.convert(name, pa.string()) if name in self.names else None

    def type_of(self, name: str, rows: Mask, *, typed: bool) -> pa.DataType:
        return self.stated_type(name) or infer_values(list(compress(self.values(name), rows)))

    def brings(self, name: str) -> Mask:
        return ~nulls(self.values(name))

    def has(self, name: str) -> Mask:
        return np.fromiter((name in row for row in self.rows), bool, len(self.rows))

    is_valid = brings

    def originals(self, name: str, rows: Sequence[int]) -> list[object]:
        return [self.rows[i].get(name) for i in rows]

    def raw(self, rows: Sequence[int]) -> list[str]:
        if self.written is None:
            schemas = self.schemas or [NO_SCHEMA] * len(self.rows)
            return [text_of(schemas[i].kept(self.rows[i])) or "" for i in rows]
        return [self.written[i].rstrip(b"\r").decode() for i in rows]

    def arrow(self, rows: Sequence[int]) -> list[bytes | None]:
        return [None] * len(rows)


def schema_of(
    source: Source, file: LandingInput, reading: Reading, known: pa.Schema | None, text_columns: frozenset[str]
) -> Columns:
    """The columns of all objects, in the order in which they first appear. Types that are not given are inferred."""
    types: dict[str, pa.DataType] = {}
    all_stated: set[str] = set()
    dominant_types: dict[str, DominantType | None] = {}
    flaw = None
    given, text = given_types(known, frozenset()), given_types(None, text_columns)
    for block in _blocks(source, file, reading):
        block = block.without(file.refused) if file.refused else block
        flaw = flaw_of([*([flaw] if flaw else []), *block.malformed])
        for name in block.names:
            stated = block.stated_type(name)
            all_stated |= {name} if stated is not None else set()
            fixed = given(name) or (text(name) if stated is None else None)
            if name not in types:
                types[name] = fixed or pa.null()
            if fixed is not None and pa.types.is_nested(fixed):
                types[name] = unify(types[name], with_new_fields(block.values(name), fixed), typed=False)
            elif fixed is not None:
                grows = stated is not None and pa.types.is_decimal(fixed) and pa.types.is_decimal(stated)
                types[name] = unify(types[name], widen(fixed, stated) if grows else fixed, typed=False)
            elif stated is not None:
                types[name] = unify(types[name], stated, typed=False)
            else:
                values, type_ = block.values(name), pa.string()
                if not pa.types.is_string(types[name]):  # no type is wider than text
                    type_ = infer_values(values)
                    types[name] = unify(types[name], type_, typed=False)
                more = dominant_of(values, type_, block.places, file.path)
                dominant_types[name] = dominant.combine(dominant_types.get(name), more)
    found = {name: one for name, one in dominant_types.items() if one}
    schema = pa.schema(list(types.items()))
    check_columns(file.path, schema)
    return Columns(
        schema,
        found,
        rowless=not types and not flaw,
        flaw=None if types else flaw,
        stated=frozenset(all_stated),
    )


def open_blocks(
    source: Source, file: LandingInput, reading: Reading, required: frozenset[str], only: Collection[str] | None = None
) -> Contents:
    """``only`` has no effect: whole objects are decoded, and columns are converted when a caller asks for them.

    A required column is missing if no object of the file has it, so objects are read ahead until all required columns were seen.
    """
    read = _blocks(source, file, reading)
    first = list(islice(read, 1))
    missing = find_missing(required, chain.from_iterable(block.names for block in first))
    if not missing:
        return Contents(missing, chain(first, read))
    for block in read:
        missing = find_missing(missing, block.names)
        if not missing:
            break
    source.seek(0)
    return Contents(missing, _blocks(source, file, reading))


def _blocks(source: Source, file: LandingInput, reading: Reading) -> Iterator[JsonBlock]:
    return own_rows(_all_blocks(source, file, reading), reading)


def _all_blocks(source: Source, file: LandingInput, reading: Reading) -> Iterator[JsonBlock]:
    unwrap = unwrap_of(reading)
    seen: dict[str, None] = {}
    for part, found in _pieces(source, file):
        places = part.offset + found.starts
        with _no_collection():
            try:
                rows = list(map(decode, found.texts)) if unwrap is None else []
            except UNREADABLE:
                rows = []
            if set(map(type, rows)) == {dict}:
                block = JsonBlock(rows, found.texts, places, (), part)
            else:
                block = decode_each(found.texts, places, unwrap, part, stated=reading.types)
        check_cells(file.path, len(block.names), len(block.rows))
        if not block.names.keys() <= seen.keys():
            seen |= block.names
            check_names(file.path, list(seen))
        yield block


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable Python's garbage collector, which otherwise takes half of the time to scan the new objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def decode_each(
    texts: Sequence[bytes],
    places: Indices,
    unwrap: RowsOf | None = None,
    part: TextLines | None = None,
    *,
    stated: bool = False,
) -> JsonBlock:
    """A block of texts that are decoded one by one: some are blank or not JSON objects, or all are envelopes.

    ``part`` is the part of a file that has them. ``stated``: messages may state what their values are.
    """
    rows, numbers, offsets = [], [], list[int]()
    schemas: list[RowSchema] = []
    refused: list[tuple[int, int, NoEnvelopeError]] = []
    skipped: Counter[str] = Counter()
    for i, text in enumerate(texts):
        if not text.strip():
            continue
        try:
            value, schema = _decode_stated(text) if stated and unwrap else (decode(text), b"")
            found: Sequence[object] = unwrap(value) if unwrap else [value]
        except UNREADABLE as e:
            found = [NoEnvelopeError(f"Not JSON: {e}{_NO_NUMBER if _NAN.search(text) else ''}")]
        except NoEnvelopeError as e:
            found = [e]
        for number, row in enumerate(found):  # each of a message begins at a byte of its own, since a row has several
            if type(row) is dict:
                rows.append(row)
                numbers.append(i)
                offsets.append(number)
                schemas += [_stated_by(schema) if schema else connect.schema_of(value)] if stated else []
            elif unwrap and isinstance(row, str):
                skipped.update([row] if row else [])
            else:
                why = row if isinstance(row, NoEnvelopeError) else NoEnvelopeError("Not a JSON object.")
                refused.append((i, number, why))
    lines = line_numbers(part, places, [i for i, _, _ in refused])
    records = []
    for (i, number, why), line in zip(refused, lines, strict=True):
        raw = texts[i].rstrip(b"\r") if why.part is None else (text_of(why.part) or "").encode()
        truncate = (why.event, why.version) if isinstance(why, TruncateError) else ()
        records.append(MalformedRecord(int(places[i]) + number, str(why), raw, line, *truncate))
    written = None if unwrap else [texts[i] for i in numbers]
    own = schemas if any(one is not NO_SCHEMA for one in schemas) else ()
    return JsonBlock(rows, written, places[numbers] + np.array(offsets, np.int64), records, part, skipped, own)


def _decode_stated(text: bytes) -> tuple[object, bytes]:
    """A message, and the text of its schema; no text if it has no schema, or more than that."""
    with suppress(*UNREADABLE):
        parts = _stated.decode(text)
        schema = bytes(parts.schema)
        return {"schema": _schema(schema), "payload": decode(parts.payload)}, schema
    return decode(text), b""


# All messages of a topic have the same schema until the table changes.
_schema = lru_cache(maxsize=64)(decode)


@lru_cache(maxsize=64)
def _stated_by(schema: bytes) -> RowSchema:
    return connect.schema_of({"schema": _schema(schema), "payload": None})


def _pieces(source: Source, file: LandingInput) -> Iterator[tuple[TextLines, Elements]]:
    """The lines of the file, or the elements of its array, about a block at a time, each with the part of the file that has them.

    Raises UnreadableFileError if a line or element is too long, and at the end if an array is not closed (a part of the file is
    missing), or if the file goes on after it.
    """
    data, size = b"", max(1, blocks.BLOCK_BYTES // _SHARE)
    while (read := source.read(size)) and len(data := data + read) < _HEAD_BYTES:
        pass
    begin = array_begin(data)
    what, cut = ("line", cut_lines) if begin is None else ("element", cut_elements)
    offset = begin or (len(BOM) if data.startswith(BOM) else 0)
    part = TextLines(1, 0, data).behind(TextLines(1, 0, data[:offset]))
    closed = final = False
    while True:
        if not closed:
            found = cut(part.text, final=final)
            closed = found.closed
            whole = TextLines(part.first, part.offset, part.text[: found.used])
            if max(map(len, found.texts), default=0) > MOST_VALUES:
                for text, start in zip(found.texts, found.starts, strict=True):
                    check_values(file.path, f"The {what} at byte {part.offset + start}", text)
            if found.texts:
                yield whole, found
            part = part.behind(whole)
            if len(part.text) > blocks.LONGEST_RECORD:
                why = f"The {what} at byte {part.offset} is longer than {blocks.LONGEST_RECORD} bytes."
                raise UnreadableFileError(file.path, why)
        if closed and part.text.strip():
            why = f"After its JSON array, the file continues in line {part.first}."
            raise UnreadableFileError(file.path, f"{why} Expected one array of objects, or one object a line.")
        if final:
            break
        final = not (read := source.read(size))
        part = TextLines(part.first, part.offset, part.text + read)
    if begin is not None and not closed:
        why = f"the file ends in the element that begins in line {part.first} (byte {part.offset})."
        raise UnreadableFileError(file.path, f"Its JSON array is not closed: {why}")
