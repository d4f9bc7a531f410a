"""Landing files of JSON: one object a line, or an array of objects. An object is the row, or an envelope around the row.

Numbers keep the digits that were written: 8.70 stays 8.70 in a decimal, and 12345678901234567890 stays itself in text. Objects
may have different names; each name is a column, and null in objects without it. An empty string is not null, because JSON has
null for that.
"""

import gc
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from itertools import chain, compress, islice
from typing import Any, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.config import Reading
from lakeupsert.landing.formats import blocks, connect, dominant
from lakeupsert.landing.formats.blocks import (
    Columns,
    Contents,
    FileBlock,
    LandingInput,
    MalformedRecord,
    Source,
    UnreadableFileError,
    check_names,
    find_missing,
    flaw_of,
    given_types,
    line_numbers,
)
from lakeupsert.landing.formats.connect import NO_SCHEMA, Encoded, RowSchema
from lakeupsert.landing.formats.dominant import DominantType, Example
from lakeupsert.landing.formats.envelopes import NoEnvelopeError, Row, RowsOf, TruncateError, unwrap_of
from lakeupsert.landing.formats.inference import TEMPORAL, convert_text, infer_type, is_text, unify
from lakeupsert.landing.formats.jsonarray import array_begin, cut_elements
from lakeupsert.landing.formats.lines import TextLines
from lakeupsert.landing.formats.nested import flatten, lengths, nulls, offsets
from lakeupsert.landing.formats.only import own_rows
from lakeupsert.landing.formats.unavailable import is_unavailable
from lakeupsert.rows.arrays import Indices, Mask
from lakeupsert.rows.convert import Converted, convert
from lakeupsert.table.types import widen

_BOM = b"\xef\xbb\xbf"
_HEAD_BYTES = 1 << 8  # enough to see whether a file is an array
_SHARE = 4  # a line as Python objects takes several times the memory of its text

_DEEPEST = 20
"""Levels of lists and objects that become a type. Values nested deeper are stored as JSON text."""


class _Number(str):
    """A number with a point or an exponent, with the digits that were written."""

    __slots__ = ()


_NAN = re.compile(rb"[:\[,]\s*-?(?:NaN|Infinity)\b")
_NO_NUMBER = ". NaN and Infinity are not JSON: the program that writes the file must write null or text for them."
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode = msgspec.json.Decoder(float_hook=_Number).decode  # noqa: TID251 - of no class
_encode = msgspec.json.Encoder(
    enc_hook=lambda one: one.value if isinstance(one, Encoded) else msgspec.Raw(str.encode(one))
).encode


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
        stated = {id(one): one.meanings[name].type for one in self.schemas if name in one.meanings}
        if not stated:
            return None
        others = [r.get(name) for r, one in zip(self.rows, self.schemas, strict=True) if name not in one.meanings]
        types = [*stated.values(), *([_infer(others)] if others else [])]
        return reduce(partial(unify, typed=False), types)

    def values(self, name: str) -> list[object]:
        if not self.schemas:
            return [row.get(name) for row in self.rows]
        return [one.wrap(name, row.get(name)) for row, one in zip(self.rows, self.schemas, strict=True)]

    def convert(self, name: str, type_: pa.DataType) -> tuple[pa.Array, Mask]:
        return _array(self.values(name), type_)

    def texts(self, name: str) -> Converted | None:
        return self.convert(name, pa.string()) if name in self.names else None

    def type_of(self, name: str, rows: Mask, *, typed: bool) -> pa.DataType:
        return self.stated_type(name) or _infer(list(compress(self.values(name), rows)))

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
            return [_text_of(schemas[i].kept(self.rows[i])) or "" for i in rows]
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
                types[name] = unify(types[name], _with_new_fields(block.values(name), fixed), typed=False)
            elif fixed is not None:
                grows = stated is not None and pa.types.is_decimal(fixed) and pa.types.is_decimal(stated)
                types[name] = unify(types[name], widen(fixed, stated) if grows else fixed, typed=False)
            elif stated is not None:
                types[name] = unify(types[name], stated, typed=False)
            else:
                values, type_ = block.values(name), pa.string()
                if not pa.types.is_string(types[name]):  # no type is wider than text
                    type_ = _infer(values)
                    types[name] = unify(types[name], type_, typed=False)
                more = _dominant(values, type_, block.places, file.path)
                dominant_types[name] = dominant.combine(dominant_types.get(name), more)
    found = {name: one for name, one in dominant_types.items() if one}
    return Columns(
        pa.schema(list(types.items())),
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
    for items in _items(source, file):
        with _no_collection():
            try:
                rows = list(map(_decode, items.texts)) if unwrap is None else []
            except _NOT_JSON:
                rows = []
            if set(map(type, rows)) == {dict}:
                block = JsonBlock(rows, items.texts, items.places, (), items.part)
            else:
                block = decode_each(items.texts, items.places, unwrap, items.part, stated=reading.types)
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
            value = _decode(text)
            found: Sequence[object] = unwrap(value) if unwrap else [value]
        except _NOT_JSON as e:
            found = [NoEnvelopeError(f"Not JSON: {e}{_NO_NUMBER if _NAN.search(text) else ''}")]
        except NoEnvelopeError as e:
            found = [e]
        for number, row in enumerate(found):  # each of a message begins at a byte of its own, since a row has several
            if type(row) is dict:
                rows.append(row)
                numbers.append(i)
                offsets.append(number)
                schemas += [connect.schema_of(value)] if stated else []
            elif unwrap and isinstance(row, str):
                skipped.update([row] if row else [])
            else:
                why = row if isinstance(row, NoEnvelopeError) else NoEnvelopeError("Not a JSON object.")
                refused.append((i, number, why))
    lines = line_numbers(part, places, [i for i, _, _ in refused])
    records = []
    for (i, number, why), line in zip(refused, lines, strict=True):
        raw = texts[i].rstrip(b"\r") if why.part is None else (_text_of(why.part) or "").encode()
        truncate = (why.event, why.version) if isinstance(why, TruncateError) else ()
        records.append(MalformedRecord(int(places[i]) + number, str(why), raw, line, *truncate))
    written = None if unwrap else [texts[i] for i in numbers]
    own = schemas if any(one is not NO_SCHEMA for one in schemas) else ()
    return JsonBlock(rows, written, places[numbers] + np.array(offsets, np.int64), records, part, skipped, own)


@dataclass(frozen=True)
class _Items:
    """Lines, or elements of an array, each with the byte of the file at which it begins. They are all in ``part``."""

    part: TextLines
    texts: Sequence[bytes]
    places: Indices


def _items(source: Source, file: LandingInput) -> Iterator[_Items]:
    """The lines of the file, or the elements of its array, about a block at a time."""
    data = b""
    while (read := source.read(_read_bytes())) and len(data := data + read) < _HEAD_BYTES:
        pass
    begin = array_begin(data)
    offset = begin or (len(_BOM) if data.startswith(_BOM) else 0)
    part = TextLines(1 + TextLines(1, 0, data[:offset]).count, offset, data[offset:])
    return _lines(source, file, part) if begin is None else _elements(source, file, part)


def _lines(source: Source, file: LandingInput, part: TextLines) -> Iterator[_Items]:
    """Whole lines without their line ends. ``part`` has been read already."""
    final = False
    while part.text or not final:
        end = len(part.text) if final else part.text.rfind(b"\n") + 1
        if end:
            whole = TextLines(part.first, part.offset, part.text[:end])
            texts = whole.text.removesuffix(b"\n").split(b"\n")
            sizes = np.fromiter(map(len, texts), np.int64, len(texts)) + 1
            yield _Items(whole, texts, part.offset + np.cumsum(sizes) - sizes)
            part = part.behind(whole)
        _refuse_long(part, file, "line")
        final = not (read := source.read(_read_bytes()))
        part = TextLines(part.first, part.offset, part.text + read)


def _elements(source: Source, file: LandingInput, part: TextLines) -> Iterator[_Items]:
    """The elements of an array. ``part`` has been read already, and begins after the opening bracket.

    Raises UnreadableFileError at the end if the array is not closed (a part of the file is missing), or if the file goes on after
    it.
    """
    closed = final = False
    while not final:
        if not closed:
            cut = cut_elements(part.text)
            closed = cut.closed
            whole = TextLines(part.first, part.offset, part.text[: cut.used])
            if cut.texts:
                yield _Items(whole, cut.texts, part.offset + cut.starts)
            part = part.behind(whole)
            _refuse_long(part, file, "element")
        if closed and part.text.strip():
            raise UnreadableFileError(
                file.path,
                f"After its JSON array, the file continues in line {part.first}. "
                "Expected one array of objects, or one object a line.",
            )
        final = not (read := source.read(_read_bytes()))
        part = TextLines(part.first, part.offset, part.text + read)
    if not closed:
        raise UnreadableFileError(
            file.path,
            f"Its JSON array is not closed: the file ends in the element that begins in line {part.first} (byte {part.offset}).",
        )


def _read_bytes() -> int:
    return max(1, blocks.BLOCK_BYTES // _SHARE)


def _refuse_long(part: TextLines, file: LandingInput, what: str) -> None:
    if len(part.text) > blocks.LONGEST_RECORD:
        raise UnreadableFileError(
            file.path, f"The {what} at byte {part.offset} is longer than {blocks.LONGEST_RECORD} bytes."
        )


# -- values into columns


def _array(values: Sequence[object], type_: pa.DataType) -> tuple[pa.Array, Mask]:
    """Decoded JSON values, also of several kinds, in ``type_``; and which of them do not fit it."""
    kinds = set(map(type, values)) - {type(None)}
    parts = [
        _FROM[kind](values if len(kinds) == 1 else [v if type(v) is kind else None for v in values], type_)
        for kind in kinds
    ]
    if not parts:
        return pa.nulls(len(values), type_), np.zeros(len(values), bool)
    array, bad = parts[0]
    for more, more_bad in parts[1:]:
        array, bad = pc.coalesce(array, more), bad | more_bad
    return array, bad


def _from_int(values: Sequence[int | None], type_: pa.DataType) -> tuple[pa.Array, Mask]:
    if not pa.types.is_floating(type_):  # a float takes the nearest value, as from text
        try:
            return convert(pa.array(values, pa.int64()), type_)
        except OverflowError:
            pass
    return _from_digits([None if v is None else str(v) for v in values], type_)


def _from_number(values: Sequence[_Number | None], type_: pa.DataType) -> tuple[pa.Array, Mask]:
    if pa.types.is_integer(type_):
        exact, bad = _from_digits(values, pa.decimal128(38, 18))  # 8.0 is an integer, 8.5 is not
        out, unfit = convert(exact, type_)
        return out, bad | unfit
    return _from_digits(values, type_)


def _from_digits(values: Sequence[str | None], type_: pa.DataType) -> tuple[pa.Array, Mask]:
    t = pa.types
    takes = t.is_integer(type_) or t.is_floating(type_) or t.is_decimal(type_) or is_text(type_)
    return convert(pa.array(values, pa.string()), type_) if takes else _all_bad(values, type_)


def _from_object(values: Sequence[Row | None], type_: pa.DataType) -> tuple[pa.Array, Mask]:
    if pa.types.is_struct(type_):
        return _struct(values, type_)
    if pa.types.is_map(type_):
        return _map(values, type_)
    return _json_text(values, type_)


def _from_list(values: Sequence[list[object] | None], type_: pa.DataType) -> tuple[pa.Array, Mask]:
    t = pa.types
    lists = t.is_list(type_) or t.is_large_list(type_) or t.is_fixed_size_list(type_)
    return _list(values, type_) if lists else _json_text(values, type_)


def _from_encoded(values: Sequence[Encoded | None], type_: pa.DataType) -> tuple[pa.Array, Mask]:
    array, bad = pa.nulls(len(values), type_), np.zeros(len(values), bool)
    for encoding in {v.encoding for v in values if v is not None}:
        own = [v.value if v is not None and v.encoding is encoding else None for v in values]
        part, unfit = encoding.decode(own, type_) if encoding.fits(type_) else _array(own, type_)
        array, bad = pc.coalesce(array, part), bad | unfit
    return array, bad


# Any: the values are null or of the type that the function is listed under, which Python's types can't say.
_FROM: dict[type, Callable[[Sequence[Any], pa.DataType], tuple[pa.Array, Mask]]] = {
    str: lambda values, type_: convert_text(pa.array(values, pa.string()), type_),
    bool: lambda values, type_: convert(pa.array(values, pa.bool_()), type_),
    int: _from_int,
    _Number: _from_number,
    dict: _from_object,
    list: _from_list,
    Encoded: _from_encoded,
}


def _json_text(values: Sequence[object], type_: pa.DataType) -> tuple[pa.Array, Mask]:
    if not is_text(type_):
        return _all_bad(values, type_)
    texts = [None if v is None else _text_of(v) for v in values]
    return pa.array(texts, type_), nulls(texts) & ~nulls(values)


def _text_of(value: object) -> str | None:
    try:
        return _encode(value).decode()
    except RecursionError:  # nested so deep that it could just be decoded, with a little less on the stack
        return None


def _all_bad(values: Sequence[object], type_: pa.DataType) -> tuple[pa.Array, Mask]:
    return pa.nulls(len(values), type_), ~nulls(values)


def _struct(values: Sequence[Row | None], type_: pa.StructType) -> tuple[pa.Array, Mask]:
    """An object with a value under a name that the struct lacks is bad: the value would be lost."""
    names = {f.name for f in type_}
    bad = np.fromiter(
        (v is not None and any(v[name] is not None for name in v.keys() - names) for v in values), bool, len(values)
    )
    children = []
    for f in type_:
        child, child_bad = _array([None if v is None else v.get(f.name) for v in values], f.type)
        children.append(child)
        bad |= child_bad
    return pa.StructArray.from_arrays(children, fields=list(type_), mask=pa.array(nulls(values))), bad


def _list(values: Sequence[list[object] | None], type_: pa.DataType) -> tuple[pa.Array, Mask]:
    if pa.types.is_fixed_size_list(type_):
        size = type_.list_size
        wrong = np.fromiter((v is not None and len(v) != size for v in values), bool, len(values))
        filler = [None] * size
        filled = [filler if v is None or len(v) != size else v for v in values]
        items, items_bad = _array(flatten(filled), type_.value_type)
        bad = wrong | items_bad.reshape(len(values), size).any(axis=1)
        return pa.FixedSizeListArray.from_arrays(items, type=type_, mask=pa.array(nulls(values) | wrong)), bad
    items, items_bad = _array(flatten(values), type_.value_type)
    kind = pa.LargeListArray if pa.types.is_large_list(type_) else pa.ListArray
    return kind.from_arrays(offsets(values, kind), items, type=type_), _any_in(values, items_bad)


def _map(values: Sequence[Row | None], type_: pa.MapType) -> tuple[pa.Array, Mask]:
    _, keys_bad = _array(flatten(values), type_.key_type)
    bad = _any_in(values, keys_bad)
    values = [None if is_bad else v for v, is_bad in zip(values, bad, strict=True)]  # a map can't hold a null key
    keys, _ = _array(flatten(values), type_.key_type)
    items, items_bad = _array(flatten([None if v is None else v.values() for v in values]), type_.item_type)
    return pa.MapArray.from_arrays(offsets(values, pa.ListArray), keys, items, type=type_), bad | _any_in(
        values, items_bad
    )


def _any_in(values: Sequence[Sized | None], bad: Mask) -> Mask:
    """Which lists have a bad item; ``bad`` is a mask of the items of all lists."""
    owner = np.repeat(np.arange(len(values)), lengths(values))
    return np.bincount(owner[bad], minlength=len(values)) > 0


# -- types from values


def _infer(values: Sequence[object], depth: int = 0) -> pa.DataType:
    """The type of decoded JSON values. At the top level, text whose values are all dates or timestamps has that type."""
    kinds = set(map(type, values)) - {type(None)}
    if not kinds:
        return pa.null()
    if kinds == {bool}:
        return pa.bool_()
    if kinds <= {int, _Number}:
        type_ = pa.float64() if _Number in kinds else pa.int64()
        return pa.string() if _array(values, type_)[1].any() else type_
    if kinds == {Encoded}:
        types = {v.encoding: v.encoding.type for v in values if type(v) is Encoded}
        return reduce(partial(unify, typed=False), types.values())
    if kinds == {str}:
        return infer_type(pa.array(values, pa.string()), [] if depth else TEMPORAL)
    if depth == _DEEPEST:
        return pa.string()
    if kinds == {dict}:
        objects = _objects(values)
        fields = [
            (n, _infer([v.get(n) for v in objects], depth + 1)) for n in dict.fromkeys(chain.from_iterable(objects))
        ]
        if not objects:
            return pa.null()
        return pa.struct(fields) if fields else pa.string()  # Parquet can't store a struct without fields
    if kinds == {list}:
        return pa.list_(_infer(flatten([v for v in values if type(v) is list]), depth + 1))
    return pa.string()


def _objects(values: Sequence[object]) -> list[Row]:
    """The objects among some values. A placeholder, which Debezium writes for a map, has no field of its column."""
    return [v for v in values if type(v) is dict and not is_unavailable(v)]


def _dominant(values: Sequence[object], type_: pa.DataType, places: Indices, path: str) -> DominantType | None:
    """The type of most of the values, all of which fit ``type_``."""
    kinds = Counter(map(type, values))
    numbers = kinds[int] + kinds[_Number]
    valid = ~nulls(values)

    def example(row: int) -> Example:
        return Example(str(values[row]), int(places[row]), path)

    if pa.types.is_nested(type_):
        return dominant.from_masks(valid, valid, None, example)
    if not pa.types.is_string(type_):
        return dominant.from_masks(valid, ~valid, type_, example)
    if kinds[str] + kinds[list] + kinds[dict] >= numbers + kinds[bool]:
        text = pa.array([v if v is None or type(v) is str else str(v) for v in values], pa.string())
        return dominant.from_text(text, type_, TEMPORAL, places, path)
    of_numbers = pa.float64() if kinds[_Number] else pa.int64()
    type_ = pa.bool_() if kinds[bool] > numbers else of_numbers
    codes = dominant.has_codes(pa.array([v for v in values if type(v) is str], pa.string()))
    return dominant.from_masks(valid, _array(values, type_)[1], type_, example, codes=codes)


def _with_new_fields(values: Sequence[object], type_: pa.DataType) -> pa.DataType:
    """A column's type, and in it the fields that only objects among its values have."""
    t = pa.types
    objects = _objects(values)
    if t.is_struct(type_):
        types = {f.name: _with_new_fields([v.get(f.name) for v in objects], f.type) for f in type_}
        for name in dict.fromkeys(chain.from_iterable(objects)):
            types[name] = types.get(name) or _infer([v.get(name) for v in objects], depth=1)
        return pa.struct(list(types.items()))
    if t.is_list(type_) or t.is_large_list(type_):
        kind = pa.list_ if t.is_list(type_) else pa.large_list
        return kind(_with_new_fields(flatten([v for v in values if type(v) is list]), type_.value_type))
    if t.is_map(type_):
        return pa.map_(type_.key_type, _with_new_fields(flatten([v.values() for v in objects]), type_.item_type))
    return type_
