"""Landing files of Avro (object container files): types from the schema in the file, rows by block.

Stored values become Arrow values without fastavro's logical types, which use Python's dates and times: these end at
microseconds and at the year 9999. A row's place is its index in the file.
"""

import bz2
import io
import json
import lzma
import struct
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    Columns,
    Contents,
    LandingInput,
    MalformedRecord,
    Source,
    find_missing,
    select_names,
    unreadable_if_damaged,
)
from lakeupsert.landing.formats.envelopes import NoEnvelopeError, Row, RowsOf, TruncateError, has_no_row, unwrap_of
from lakeupsert.landing.formats.limits import MOST_LEAVES, check_columns, check_rows, check_unpacked
from lakeupsert.landing.formats.nested import flatten, nulls, offsets
from lakeupsert.landing.formats.oldcalendar import OldCalendar
from lakeupsert.landing.formats.positions import LOG_POSITION, NEEDED
from lakeupsert.landing.formats.unpacked import XZ_MEMORY, read_varint, unpack_snappy
from lakeupsert.rows.leaves import leaf_types, map_leaves
from lakeupsert.table.types import decimal_type

Schema = str | list[Any] | dict[str, Any]
"""A schema of Avro: the name of a type, a union of schemas, or a type with its attributes."""
Values = Sequence[Any]
"""Decoded values of one type of Avro, or null; which Python type that is depends on the schema in the file."""
LARGEST_BLOCK = 1 << 28
"""Most bytes of a block, unpacked. Writers begin another block after some megabytes at most."""
_SHARE = 4  # a row as Python objects takes several times the memory that it takes in the file
_SYNC_BYTES = 16
HEADER = fastavro.parse_schema(
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
DAMAGED = (
    ValueError, KeyError, IndexError, TypeError, AttributeError, MemoryError, EOFError, OverflowError, RecursionError,
    struct.error, zlib.error, lzma.LZMAError, fastavro.schema.SchemaParseException,
    fastavro.schema.UnknownType,
)  # fmt: skip
"""What fastavro, the decompressors and Arrow raise if the bytes do not fit the schema."""
_EXACT = Context(prec=100)
_read_record: Callable[..., Any] = fastavro.schemaless_reader  # what it returns depends on the schema


@dataclass(frozen=True)
class _Column:
    """The Arrow type for a type of Avro, and the function that makes an array of decoded values."""

    type: pa.DataType
    array: Callable[[Values], pa.Array]


@dataclass(frozen=True)
class _Header:
    """What the header says: the columns, the schema to decode records with, the codec of blocks, and which dates are old."""

    columns: Mapping[str, _Column]
    schema: Schema
    unpack: Callable[[bytes], bytes]
    sync: bytes
    old: OldCalendar


def schema_of(source: Source, file: LandingInput, reading: Reading, *_: object) -> Columns:
    """The columns; for envelopes those of the flattened rows: none if its messages have no row."""
    columns = _read_header(source, file, reading).columns
    return Columns(pa.schema([(name, column.type) for name, column in columns.items()]), rowless=not columns)


def open_blocks(
    source: Source, file: LandingInput, reading: Reading, required: frozenset[str], only: Collection[str] | None = None
) -> Contents:
    header = _read_header(source, file, reading)
    return Contents(find_missing(required, header.columns), _blocks(source, file, reading, header, only))


def _read_header(source: Source, file: LandingInput, reading: Reading) -> _Header:
    with unreadable_if_damaged(file, "Avro", *DAMAGED):
        header = _read_record(source, HEADER, None)
        if header["magic"] != b"Obj\x01":
            raise ValueError("it does not begin with the mark of a container file")
        schema = json.loads(header["meta"]["avro.schema"])
        codec = header["meta"].get("avro.codec", b"null").decode()
        if codec not in _UNPACK:
            raise ValueError(f"codec {codec!r} is not supported; these are: {', '.join(_UNPACK)}")
        # Defaults are for fields that are not in the file, and many writers write defaults that do not fit their type.
        parsed: Any = fastavro.parse_schema(without(schema, "default"))
        columns = _columns(parsed, reading)
        plain = fastavro.parse_schema(without(schema, "default", "logicalType"))
    check_columns(file.path, pa.schema([(name, column.type) for name, column in columns.items()]))
    old = OldCalendar.of({key.encode(): value for key, value in header["meta"].items()})
    return _Header(columns, plain, _UNPACK[codec], header["sync"], old)


def _blocks(
    source: Source, file: LandingInput, reading: Reading, header: _Header, only: Collection[str] | None
) -> Iterator[ArrowBlock]:
    wanted = {name: _in_our_calendar(header.columns[name], header.old) for name in select_names(header.columns, only)}
    unwrap = unwrap_of(reading)
    place, pending_bytes = 0, 0
    rows: list[Row] = []
    with unreadable_if_damaged(file, "Avro", *DAMAGED):
        for count, data in _unpacked_blocks(source, file, header):
            text, begin = io.BytesIO(data), 0
            for _ in range(count):
                rows.append(_read_record(text, header.schema, None))
                if (
                    len(rows) >= blocks.BLOCK_ROWS
                    or pending_bytes + text.tell() - begin >= blocks.BLOCK_BYTES // _SHARE
                ):
                    yield _block(rows, place, wanted, unwrap)
                    place, rows, pending_bytes, begin = place + len(rows), [], 0, text.tell()
            if text.tell() < len(data):
                raise ValueError("a block has more bytes than its records")
            pending_bytes += len(data) - begin
        if rows:
            yield _block(rows, place, wanted, unwrap)


def _in_our_calendar(column: _Column, old: OldCalendar) -> _Column:
    changes = [old.change(type_) for type_ in leaf_types(column.type)]
    if not any(changes):
        return column
    return _Column(column.type, lambda values: map_leaves(column.array(values), iter(changes)))


def _block(rows: Sequence[Row], place: int, wanted: Mapping[str, _Column], unwrap: RowsOf | None) -> ArrowBlock:
    places = np.arange(place, place + len(rows))
    malformed = []
    skipped: Counter[str] = Counter()
    if unwrap is not None:
        flat_rows, numbers = [], []
        for i, row in enumerate(rows):
            try:
                [found] = unwrap(row)
            except NoEnvelopeError as e:
                found = e
            if isinstance(found, NoEnvelopeError):
                raw = json.dumps(row, default=str).encode()
                truncate = found.event if isinstance(found, TruncateError) else None
                malformed.append(MalformedRecord(place + i, str(found), raw, truncate=truncate))
            elif isinstance(found, str):
                skipped[found] += 1
            else:
                flat_rows.append(found)
                numbers.append(i)
        rows, places = flat_rows, places[numbers]
    columns = {name: _array(name, column, rows) for name, column in wanted.items()}
    return ArrowBlock(columns, places, malformed, skipped=skipped)


def _array(name: str, column: _Column, rows: Sequence[Row]) -> pa.Array:
    try:
        return column.array([row.get(name) for row in rows])
    except DAMAGED as e:
        raise ValueError(f"column {name!r}: {e}") from e


# -- blocks as they are stored


def _unpacked_blocks(source: Source, file: LandingInput, header: _Header) -> Iterator[tuple[int, bytes]]:
    """The number of records in each block, and their bytes."""
    rows = unpacked = 0
    while (count := _number(source)) is not None:
        size = _number(source)
        if size is None or not 0 <= size <= LARGEST_BLOCK or count < 0:
            raise ValueError(f"a block of {count} records and {size} bytes")
        data = header.unpack(source.read(size))
        if len(data) > LARGEST_BLOCK:
            raise ValueError(f"a block of more than {LARGEST_BLOCK} bytes")
        if source.read(_SYNC_BYTES) != header.sync:
            raise ValueError("a block does not end after the size that it states")
        rows, unpacked = rows + count, unpacked + len(data)
        check_rows(file, rows)  # records without any bytes may be as many as a block says
        check_unpacked(file, unpacked)
        yield count, data


def _number(source: Source) -> int | None:
    """A zigzag number of variable length; None at the end of the file."""
    value = read_varint(source)
    return None if value is None else (value >> 1) ^ -(value & 1)


def _snappy(data: bytes) -> bytes:
    text = unpack_snappy(data[:-4], LARGEST_BLOCK)
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


# -- types


def without(schema: object, *attributes: str) -> Any:  # a part of any schema is JSON of any kind
    if isinstance(schema, list):
        return [without(part, *attributes) for part in schema]
    if isinstance(schema, dict):
        return {key: without(value, *attributes) for key, value in schema.items() if key not in attributes}
    return schema


def _columns(schema: Schema, reading: Reading) -> dict[str, _Column]:
    """The columns of a record's schema, which `fastavro.parse_schema` returned: names in it are full names."""
    named = dict(_named(schema))
    record = _record(schema, named)
    if record is None:
        raise ValueError("its schema is not a record: it holds no records")
    # 30 records, each with two of the one before, are 10^9 fields.
    if _count_leaves(schema, named, {}) > MOST_LEAVES:
        raise ValueError(f"it has more than {MOST_LEAVES:,} fields in its records")
    if reading.envelope is None:
        return _of_fields(record, named)
    fields = {f["name"]: f["type"] for f in record["fields"]}
    row = _record(fields.get("after"), named)
    if row is None and has_no_row(fields):
        return {}
    if row is None or "op" not in fields:
        raise ValueError("its records are not change events of Debezium: they have no `op`, or `after` is not a record")
    columns = _of_fields(row, named)
    columns["__op"] = _column(fields["op"], named)
    columns["__ts_ms"] = _column(fields.get("ts_ms", "null"), named)
    for f in (_record(fields.get("source"), named) or {"fields": ()})["fields"]:
        column = _column(f["type"], named)
        if not pa.types.is_nested(column.type):
            columns[f"__source_{f['name']}"] = column
    if reading.positions and any(all(f"__source_{name}" in columns for name in needed) for needed in NEEDED.values()):
        columns[LOG_POSITION] = _plain(pa.string())
    return columns


def _of_fields(record: Mapping[str, Any], named: Mapping[str, dict[str, Any]]) -> dict[str, _Column]:
    columns = {}
    for field in record["fields"]:
        try:
            columns[field["name"]] = _column(field["type"], named)
        except ValueError as e:
            raise ValueError(f"column {field['name']!r}: {e}") from e
    return columns


def _named(schema: Schema | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every type that has a name in the schema, by this name."""
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


def _record(schema: Schema | None, named: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The record's schema if ``schema`` is a record, or a union of null and one; else None."""
    if isinstance(schema, list):
        records = [record for one in schema if (record := _record(one, named)) is not None]
        if len(records) > 1:
            raise ValueError("a union of several records is not supported")
        return records[0] if records else None
    if isinstance(schema, str):
        return _record(named[schema], named) if schema in named else None
    return schema if isinstance(schema, dict) and schema["type"] in ("record", "error") else None


def _column(schema: Schema, named: Mapping[str, dict[str, Any]], inside: tuple[str, ...] = ()) -> _Column:
    if isinstance(schema, list):
        some = [one for one in schema if one != "null"]
        for numbers in ({"int", "long"}, {"float", "double"}):
            if len(some) == 2 and all(isinstance(one, str) for one in some) and set(some) == numbers:
                some = [max(numbers, key=("int", "float", "long", "double").index)]
        if len(some) > 1:
            what = ", ".join(str(one["type"] if isinstance(one, dict) else one) for one in some)
            raise ValueError(f"a union of {what} does not fit one column")
        return _column(some[0] if some else "null", named, inside)
    if isinstance(schema, str):
        return _column(named[schema], named, inside) if schema in named else _plain(_PRIMITIVES[schema])
    kind = schema["type"]
    if not isinstance(kind, str):
        return _column(kind, named, inside)
    if kind == "array":
        if _has_no_bytes(schema["items"], named):
            raise ValueError("an array whose items take no bytes: a few bytes may say that it has any number of them")
        return _list(_column(schema["items"], named, inside))
    if kind == "map":
        return _map(_column(schema["values"], named, inside))
    if kind == "fixed" and schema["size"] == 0:
        raise ValueError(f"{schema['name']} has a size of 0, which a column can't have")
    if kind in ("record", "error"):
        if schema["name"] in inside:
            raise ValueError(f"record {schema['name']} contains itself, and no column can have such a type")
        within = (*inside, schema["name"])
        return _struct({f["name"]: _column(f["type"], named, within) for f in schema["fields"]})
    return _logical(kind, schema) or _plain(
        pa.string() if kind == "enum" else pa.binary(schema["size"]) if kind == "fixed" else _PRIMITIVES[kind]
    )


def _count_leaves(schema: Schema, named: Mapping[str, dict[str, Any]], counted: dict[str, int]) -> int:
    if isinstance(schema, list):
        return sum(_count_leaves(one, named, counted) for one in schema)
    if isinstance(schema, str):
        return _count_leaves(named[schema], named, counted) if schema in named else 1
    if "fields" not in schema:
        return sum(_count_leaves(schema[part], named, counted) for part in ("items", "values") if part in schema) or 1
    if schema["name"] not in counted:
        counted[schema["name"]] = 0  # of one that contains itself, which `_column` refuses
        counted[schema["name"]] = sum(_count_leaves(f["type"], named, counted) for f in schema["fields"])
    return counted[schema["name"]]


def _has_no_bytes(schema: Schema, named: Mapping[str, dict[str, Any]]) -> bool:
    if isinstance(schema, list):
        return False  # a union says of which type a value is
    if isinstance(schema, str):
        return schema == "null" or (schema in named and _has_no_bytes(named[schema], named))
    if "fields" in schema:
        return all(_has_no_bytes(f["type"], named) for f in schema["fields"])
    return bool(schema["type"] == "null")


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


def _logical(kind: str, schema: dict[str, Any]) -> _Column | None:
    """None without a logical type, or if it does not fit: the specification says to ignore it then."""
    logical, size = str(schema.get("logicalType")), schema.get("size")
    if (kind, logical) in _TEMPORAL:
        type_, stored = _TEMPORAL[kind, logical], _PRIMITIVES[kind]
        return _Column(type_, lambda values: pa.array(values, stored).view(type_))
    if logical == "uuid" and size == 16:
        return _Column(
            pa.string(),
            lambda values: pa.array([None if v is None else str(uuid.UUID(bytes=v)) for v in values], pa.string()),
        )
    if logical == "big-decimal" and kind == "bytes":
        raise ValueError(
            "a big-decimal is not supported, because each value has its own scale: write decimal(precision, scale) or text"
        )
    if logical == "decimal" and kind in ("bytes", "fixed"):
        return _decimal(schema["precision"], schema.get("scale", 0))
    return None


def _decimal(precision: int, scale: int) -> _Column | None:
    type_ = decimal_type(precision, scale)
    if type_ is None:
        return None

    def value(stored: bytes | None) -> Decimal | None:
        return None if stored is None else _EXACT.scaleb(Decimal(int.from_bytes(stored, "big", signed=True)), -scale)

    return _Column(type_, lambda values: pa.array([value(v) for v in values], type_))


def _plain(type_: pa.DataType) -> _Column:
    return _Column(type_, lambda values: pa.array(values, type_))


def _list(item: _Column) -> _Column:
    type_ = pa.list_(item.type)

    def array(values: Values) -> pa.Array:
        return pa.ListArray.from_arrays(offsets(values, pa.ListArray), item.array(flatten(values)), type=type_)

    return _Column(type_, array)


def _map(item: _Column) -> _Column:
    type_ = pa.map_(pa.string(), item.type)

    def array(values: Values) -> pa.Array:
        keys = pa.array(flatten(values), pa.string())
        items = item.array(flatten([None if v is None else v.values() for v in values]))
        return pa.MapArray.from_arrays(offsets(values, pa.ListArray), keys, items, type=type_)

    return _Column(type_, array)


def _struct(fields: Mapping[str, _Column]) -> _Column:
    if not fields:
        raise ValueError("a record without fields, which Parquet can't store")
    type_ = pa.struct([(name, field.type) for name, field in fields.items()])

    def array(values: Values) -> pa.Array:
        children = [field.array([None if v is None else v[name] for v in values]) for name, field in fields.items()]
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=pa.array(nulls(values)))

    return _Column(type_, array)
