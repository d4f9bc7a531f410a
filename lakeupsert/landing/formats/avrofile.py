"""Landing files of Avro (object container files): types from the schema in the file, rows by block.

Values are made of what stands in the file, without logical types: fastavro would take them by way of Python's dates and times,
which end at microseconds and at the year 9999. A row's place is its index in the file.
"""

import bz2
import io
import json
import lzma
import struct
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa

from lakeupsert.config import Reading
from lakeupsert.landing.formats import blocks
from lakeupsert.landing.formats.blocks import (
    ArrowBlock,
    LandingInput,
    Malformed,
    Opened,
    UnreadableFileError,
    absent,
    among,
    check_names,
)
from lakeupsert.landing.formats.envelopes import UNWRAP, NoEnvelopeError, Unwrap
from lakeupsert.landing.formats.nested import flat, nulls, offsets
from lakeupsert.landing.formats.unpacked import XZ_MEMORY

LARGEST_BLOCK = 1 << 28
"""Bytes of a block, unpacked; writers begin another one at some megabytes at the latest."""
_SHARE = 4  # a row as Python objects takes several times the memory that it takes in the file
_SYNC_BYTES = 16
_HEADER = fastavro.parse_schema(
    {
        "type": "record",
        "name": "header",
        "fields": [
            {"name": "magic", "type": {"type": "fixed", "name": "magic", "size": 4}},
            {"name": "meta", "type": {"type": "map", "values": "bytes"}},
            {"name": "sync", "type": {"type": "fixed", "name": "sync", "size": _SYNC_BYTES}},
        ],
    }
)
_DAMAGED = (
    ValueError, KeyError, IndexError, TypeError, AttributeError, MemoryError, EOFError, OverflowError, RecursionError,
    struct.error, zlib.error, lzma.LZMAError, pa.ArrowException, fastavro.schema.SchemaParseException,
    fastavro.schema.UnknownType,
)  # fmt: skip
"""What fastavro, the decompressors and Arrow raise of bytes that are not what the schema says."""
_EXACT = Context(prec=100)


@dataclass(frozen=True)
class _Column:
    """Arrow's type of a type of Avro, and what makes an array of decoded values."""

    type: Any
    array: Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class _File:
    """What the header says: the columns, how a record is decoded, and how a block is unpacked."""

    columns: Mapping[str, _Column]
    schema: Any
    unpack: Callable[[bytes], bytes]
    sync: bytes


def schema_of(source: Any, file: LandingInput, reading: Reading) -> Any:
    """The columns (``pyarrow.Schema``), of enveloped rows those that they have once they are flattened."""
    return pa.schema([(name, column.type) for name, column in _opened(source, file, reading).columns.items()])


def open_blocks(
    source: Any, file: LandingInput, reading: Reading, required: frozenset[str], only: Collection[str] | None = None
) -> Opened:
    opened = _opened(source, file, reading)
    return Opened(absent(required, opened.columns), _blocks(source, file, reading, opened, only))


def _opened(source: Any, file: LandingInput, reading: Reading) -> _File:
    with _failures(file):
        header: Any = fastavro.schemaless_reader(source, _HEADER, None)
        if header["magic"] != b"Obj\x01":
            raise ValueError("it does not begin as a container file does")
        schema = json.loads(header["meta"]["avro.schema"])
        codec = header["meta"].get("avro.codec", b"null").decode()
        if codec not in _UNPACK:
            raise ValueError(f"codec {codec!r}; {', '.join(_UNPACK)} can be read")
        # A default is for readers who look for a field that is not there; many writers make one that does not fit its type.
        parsed: Any = fastavro.parse_schema(_without(schema, "default"))
        columns = _columns(parsed, reading)
        plain = fastavro.parse_schema(_without(schema, "default", "logicalType"))
    check_names(file.path, list(columns))
    return _File(columns, plain, _UNPACK[codec], header["sync"])


def _blocks(
    source: Any, file: LandingInput, reading: Reading, opened: _File, only: Collection[str] | None
) -> Iterator[ArrowBlock]:
    wanted = {name: opened.columns[name] for name in among(opened.columns, only)}
    unwrap = UNWRAP[reading.envelope] if reading.envelope else None
    place, held = 0, 0
    rows: list[Any] = []
    with _failures(file):
        for count, data in _stored(source, opened):
            text, begin = io.BytesIO(data), 0
            for _ in range(count):
                rows.append(fastavro.schemaless_reader(text, opened.schema, None))
                if len(rows) >= blocks.BLOCK_ROWS or held + text.tell() - begin >= blocks.BLOCK_BYTES // _SHARE:
                    yield _block(rows, place, wanted, unwrap)
                    place, rows, held, begin = place + len(rows), [], 0, text.tell()
            if text.tell() < len(data):
                raise ValueError("a block has more bytes than its records take")
            held += len(data) - begin
        if rows:
            yield _block(rows, place, wanted, unwrap)


def _block(rows: Sequence[Any], place: int, wanted: Mapping[str, _Column], unwrap: Unwrap | None) -> ArrowBlock:
    places = np.arange(place, place + len(rows))
    malformed = []
    if unwrap is not None:
        found, left = [], []
        for i, row in enumerate(rows):
            try:
                flattened = unwrap(row)
            except NoEnvelopeError as e:
                malformed.append(Malformed(place + i, str(e), json.dumps(row, default=str).encode()))
            else:
                if flattened is not None:
                    found.append(flattened)
                    left.append(i)
        rows, places = found, places[left]
    columns = {name: column.array([row.get(name) for row in rows]) for name, column in wanted.items()}
    return ArrowBlock(columns, places, malformed)


# -- blocks as they are stored


def _stored(source: Any, opened: _File) -> Iterator[tuple[int, bytes]]:
    """The number of records of each block, and their bytes."""
    while (count := _number(source)) is not None:
        size = _number(source)
        if size is None or not 0 <= size <= LARGEST_BLOCK or count < 0:
            raise ValueError(f"a block of {count} records and {size} bytes")
        data = opened.unpack(source.read(size))
        if len(data) > LARGEST_BLOCK:
            raise ValueError(f"a block of more than {LARGEST_BLOCK} bytes")
        if source.read(_SYNC_BYTES) != opened.sync:
            raise ValueError("a block does not end where it says")
        yield count, data


def _number(source: Any) -> int | None:
    """A zigzag number of variable length; None where the file ends."""
    value, shift = 0, 0
    while byte := source.read(1):
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return int((value >> 1) ^ -(value & 1))
        shift += 7
    if shift:
        raise EOFError("it is cut off")
    return None


def _snappy(data: bytes) -> bytes:
    size = shift = 0
    for byte in data:  # Arrow wants to be told the size that the text begins with
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if size > LARGEST_BLOCK:
        raise ValueError(f"a block of {size} bytes")
    text: bytes = pa.decompress(data[:-4], size, "snappy", asbytes=True)
    if zlib.crc32(text) != int.from_bytes(data[-4:], "big"):
        raise ValueError("the checksum of a block is wrong")
    return text


_UNPACK: dict[str, Callable[[bytes], bytes]] = {
    "null": lambda data: data,
    "deflate": lambda data: zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, LARGEST_BLOCK + 1),
    "snappy": _snappy,
    "zstandard": lambda data: pa.CompressedInputStream(pa.BufferReader(data), "zstd").read(LARGEST_BLOCK + 1),
    "bzip2": lambda data: bz2.BZ2Decompressor().decompress(data, LARGEST_BLOCK + 1),
    "xz": lambda data: lzma.LZMADecompressor(memlimit=XZ_MEMORY).decompress(data, LARGEST_BLOCK + 1),
}


@contextmanager
def _failures(file: LandingInput) -> Iterator[None]:
    try:
        yield
    except (*_DAMAGED, OSError) as e:
        if isinstance(e, OSError) and e.errno is not None:
            raise  # the disk or the network, not the file
        reason = f"Not readable as Avro ({file.size} bytes): {type(e).__name__}: {e}"
        raise UnreadableFileError(file.path, reason[:500]) from e


# -- types


def _without(schema: Any, *attributes: str) -> Any:
    if isinstance(schema, list):
        return [_without(part, *attributes) for part in schema]
    if isinstance(schema, dict):
        return {key: _without(value, *attributes) for key, value in schema.items() if key not in attributes}
    return schema


def _columns(schema: Any, reading: Reading) -> dict[str, _Column]:
    """The columns of a record's schema, as `fastavro.parse_schema` gives it: with full names."""
    named = dict(_named(schema))
    record = _record(schema, named)
    if record is None:
        raise ValueError("it holds no records")
    if reading.envelope is None:
        return {f["name"]: _column(f["type"], named) for f in record["fields"]}
    fields = {f["name"]: f["type"] for f in record["fields"]}
    row = _record(fields.get("after"), named)
    if row is None or "op" not in fields:
        raise ValueError("its records are no change events of Debezium: they have no `op`, or `after` is no record")
    columns = {f["name"]: _column(f["type"], named) for f in row["fields"]}
    columns["__op"] = _column(fields["op"], named)
    columns["__ts_ms"] = _column(fields.get("ts_ms", "null"), named)
    for f in (_record(fields.get("source"), named) or {"fields": ()})["fields"]:
        column = _column(f["type"], named)
        if not pa.types.is_nested(column.type):
            columns[f"__source_{f['name']}"] = column
    return columns


def _named(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every type that the schema gives a name."""
    if isinstance(schema, list):
        for one in schema:
            yield from _named(one)
    elif isinstance(schema, dict):
        if "name" in schema and schema["type"] in ("record", "error", "enum", "fixed"):
            yield schema["name"], schema
        for part in (schema.get("type"), schema.get("items"), schema.get("values")):
            yield from _named(part)
        for f in schema.get("fields", ()):
            yield from _named(f["type"])


def _record(schema: Any, named: Mapping[str, Any]) -> Any:
    """The record that this is, or that it is where it is not null; else None."""
    if isinstance(schema, list):
        found = [record for one in schema if (record := _record(one, named)) is not None]
        if len(found) > 1:
            raise ValueError("a union of several records, of which each row would show one alone")
        return found[0] if found else None
    if isinstance(schema, str):
        return _record(named[schema], named) if schema in named else None
    return schema if isinstance(schema, dict) and schema["type"] in ("record", "error") else None


def _column(schema: Any, named: Mapping[str, Any], inside: tuple[str, ...] = ()) -> _Column:
    if isinstance(schema, list):
        some = [one for one in schema if one != "null"]
        for numbers in ({"int", "long"}, {"float", "double"}):
            if len(some) == 2 and all(isinstance(one, str) for one in some) and set(some) == numbers:
                some = [max(numbers, key=("int", "float", "long", "double").index)]
        if len(some) > 1:
            what = ", ".join(one if isinstance(one, str) else str(one["type"]) for one in some)
            raise ValueError(f"a union of {what}, which no column can be")
        return _column(some[0] if some else "null", named, inside)
    if isinstance(schema, str):
        return _column(named[schema], named, inside) if schema in named else _plain(_PRIMITIVES[schema])
    kind = schema["type"]
    if not isinstance(kind, str):
        return _column(kind, named, inside)
    if kind == "array":
        return _list(_column(schema["items"], named, inside))
    if kind == "map":
        return _map(_column(schema["values"], named, inside))
    if kind == "fixed" and schema["size"] == 0:
        raise ValueError(f"{schema['name']} has a size of 0, which no column can")
    if kind in ("record", "error"):
        if schema["name"] in inside:
            raise ValueError(f"{schema['name']} holds itself, which no column can")
        within = (*inside, schema["name"])
        return _struct({f["name"]: _column(f["type"], named, within) for f in schema["fields"]})
    return _logical(kind, schema) or _plain(
        pa.string() if kind == "enum" else pa.binary(schema["size"]) if kind == "fixed" else _PRIMITIVES[kind]
    )


_PRIMITIVES = {
    "null": pa.null(), "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(), "float": pa.float32(),
    "double": pa.float64(), "bytes": pa.binary(), "string": pa.string(),
}  # fmt: skip
_TEMPORAL = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time32("ms"),
    ("long", "time-micros"): pa.time64("us"),
    **{
        ("long", f"{local}timestamp-{name}"): pa.timestamp(unit, None if local else "UTC")
        for local in ("", "local-")
        for name, unit in (("millis", "ms"), ("micros", "us"), ("nanos", "ns"))
    },
}


def _logical(kind: str, schema: Mapping[str, Any]) -> _Column | None:
    """None where there is no logical type, or one that does not fit, which then does not count (as the specification says)."""
    logical, size = str(schema.get("logicalType")), schema.get("size")
    if (kind, logical) in _TEMPORAL:
        type_, stored = _TEMPORAL[kind, logical], _PRIMITIVES[kind]
        return _Column(type_, lambda values: pa.array(values, stored).view(type_))
    if logical == "uuid" and size == 16:
        return _Column(
            pa.string(),
            lambda values: pa.array([None if v is None else str(uuid.UUID(bytes=v)) for v in values], pa.string()),
        )
    if logical == "decimal" and kind in ("bytes", "fixed"):
        return _decimal(schema["precision"], schema.get("scale", 0))
    return None


def _decimal(precision: int, scale: int) -> _Column | None:
    if not 0 <= scale <= precision <= 76:
        return None
    type_ = pa.decimal128(precision, scale) if precision <= 38 else pa.decimal256(precision, scale)

    def value(stored: bytes | None) -> Decimal | None:
        return None if stored is None else _EXACT.scaleb(Decimal(int.from_bytes(stored, "big", signed=True)), -scale)

    return _Column(type_, lambda values: pa.array([value(v) for v in values], type_))


def _plain(type_: Any) -> _Column:
    return _Column(type_, lambda values: pa.array(values, type_))


def _list(item: _Column) -> _Column:
    type_ = pa.list_(item.type)

    def array(values: Sequence[Any]) -> Any:
        return pa.ListArray.from_arrays(offsets(values, pa.ListArray), item.array(flat(values)), type=type_)

    return _Column(type_, array)


def _map(item: _Column) -> _Column:
    type_ = pa.map_(pa.string(), item.type)

    def array(values: Sequence[Any]) -> Any:
        keys = pa.array(flat(values), pa.string())
        items = item.array(flat([None if v is None else v.values() for v in values]))
        return pa.MapArray.from_arrays(offsets(values, pa.ListArray), keys, items, type=type_)

    return _Column(type_, array)


def _struct(fields: Mapping[str, _Column]) -> _Column:
    if not fields:
        raise ValueError("a record without fields, which no column can be")
    type_ = pa.struct([(name, field.type) for name, field in fields.items()])

    def array(values: Sequence[Any]) -> Any:
        children = [field.array([None if v is None else v[name] for v in values]) for name, field in fields.items()]
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=pa.array(nulls(values)))

    return _Column(type_, array)
