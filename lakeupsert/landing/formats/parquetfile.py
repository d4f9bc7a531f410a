"""Landing files of Parquet: types from the footer, rows by row group.

Values become the ones that the writer meant, where Arrow reads others: UUID, JSON and ENUM are text, INT96 keeps its nanoseconds,
and dates of Spark's legacy mode are in the calendar of readers.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeupsert.config import Reading
from lakeupsert.landing.formats import blocks
from lakeupsert.landing.formats.blocks import (
    ArrowBlock,
    Columns,
    Contents,
    LandingInput,
    UnreadableFileError,
    find_missing,
    select_names,
    unreadable_if_damaged,
)
from lakeupsert.landing.formats.limits import check_columns, check_rows, check_unpacked
from lakeupsert.landing.formats.oldcalendar import OldCalendar, is_of_spark
from lakeupsert.rows.arrays import Indices, Mask
from lakeupsert.rows.checksums import MAGIC
from lakeupsert.rows.convert import READABLE_MOMENTS, as_text, unreadable_moments
from lakeupsert.rows.leaves import Change, decode, leaf_types, map_leaves, rows_with
from lakeupsert.table.types import normalize

_LARGE_ROW_GROUP = 1 << 28
_STREAM_BYTES = 1 << 18
_SCHEMA_ELEMENT = re.compile(rb"\x15\x0e\x15\x20\x15[\x00\x02\x04]\x18([\x01-\x7f])")
"""In Thrift's compact protocol: type 7 (bytes of one length), length 16, a repetition, then the length of the name."""
_VARIANT = re.compile(r"^\s*\w+ group field_id=\S+ (.+) \(Variant", re.MULTILINE)
_MICROS_IN_NANOS = (2**63 - 1) // 1000
"""Most microseconds from 1970 that are nanoseconds, too."""


@dataclass(frozen=True)
class _File:
    """An opened file.

    Attributes:
        types: the columns in the types that a table stores them in.
        changes: what to do to each innermost value of a column.
        nanos: the file with INT96 in nanoseconds; None if no column has them.
        fine: its columns that are read in nanoseconds, and those of them with values that are too far from 1970 for these.
    """

    parquet: pq.ParquetFile
    types: pa.Schema
    changes: Mapping[str, Sequence[Change | None]]
    nanos: pq.ParquetFile | None
    fine: Mapping[str, bool]

    def columns(self, micros: pa.RecordBatch, nanos: pa.RecordBatch | None) -> dict[str, pa.Array]:
        """The values of some rows, of which ``nanos`` has the columns of ``fine``."""
        columns = dict(zip(micros.schema.names, map(decode, micros.columns), strict=True))
        for name, is_far in self.fine.items():
            if nanos is not None and name in columns:
                exact = decode(nanos.column(name))
                columns[name] = _as_text(columns[name], exact) if is_far else exact
        return {
            name: map_leaves(column, iter(self.changes[name])) if any(self.changes[name]) else column
            for name, column in columns.items()
        }


def schema_of(source: pa.NativeFile, file: LandingInput, *_: object) -> Columns:
    """The columns in the types that a table stores them in, without metadata."""
    opened = _open(source, file)
    footer = opened.parquet.metadata
    rows = footer.num_rows
    return Columns(opened.types, rowless=not rows, row_groups=footer.num_row_groups, rows=rows)


def stored_schema_of(source: pa.NativeFile, file: LandingInput) -> tuple[pa.Schema, pq.FileMetaData]:
    """The columns of a file that stays where it is, since readers get its values as they are stored; and its footer."""
    parquet = _open_parquet(source, file, _read_footer(source, file), "us")
    return pa.schema([(f.name, normalize(f.type)) for f in parquet.schema_arrow]), parquet.metadata


def why_not_in_place(source: pa.NativeFile, file: LandingInput, footer: pq.FileMetaData) -> str | None:
    """Why a file can't stay as it is, in which readers see values as they are stored: it has dates or timestamps of another
    calendar, nanoseconds in INT96, or moments that readers can't show. Statistics decide, and values where these do not."""
    parquet = _open_parquet(source, file, footer, "us")
    fields = {field.name: normalize(field.type) for field in parquet.schema_arrow}
    changes = _changes(footer, fields)
    leaves = zip(_leaves(footer, fields), chain.from_iterable(changes.values()), strict=True)
    may_differ = (n for i, ((n, type_, _), change) in enumerate(leaves) if _may_differ(footer, i, type_, change))
    asked = list(dict.fromkeys(may_differ))
    with unreadable_if_damaged(file, "Parquet"):
        for batch in parquet.iter_batches(blocks.BLOCK_ROWS, columns=asked) if asked else ():
            for name in asked:
                values = decode(batch.column(name))
                if unreadable_moments(values).any():
                    return f"Column {name!r} has values that readers can't show: {READABLE_MOMENTS}."
                each = zip(changes[name], leaf_types(values.type), strict=False)
                ours = map_leaves(values, (change if pa.types.is_temporal(type_) else None for change, type_ in each))
                if not ours.equals(values):
                    return f"Column {name!r} has dates or timestamps in the calendar of Spark 2, which readers take for others."
        fine = [name for name in _int96_columns(footer, fields) if name in asked]
        if fine and (found := _fine_columns(parquet, _open_parquet(source, file, footer, "ns"), fine, file)):
            return f"Column {min(found)!r} has timestamps of INT96 with nanoseconds, which a table can't keep in this form."
    return None


def _may_differ(footer: pq.FileMetaData, leaf: int, type_: pa.DataType, change: Change | None) -> bool:
    """Whether moments in a leaf column may be old or unreadable. Without statistics they may, but for INT96 of Spark."""
    if not pa.types.is_temporal(type_) or pa.types.is_duration(type_):
        return False
    if footer.schema.column(leaf).physical_type == "INT96":
        return change is not None or not is_of_spark(footer.metadata or {})
    stored = _stored_type(footer.schema.column(leaf))
    for group in map(footer.row_group, range(footer.num_row_groups)):
        found = group.column(leaf).statistics
        if found is None or not found.has_min_max:
            if not (found and found.null_count == group.num_rows):
                return True
            continue
        bounds = pa.array([found.min_raw, found.max_raw], f"int{stored.bit_width}").view(stored)
        if unreadable_moments(bounds).any() or (change is not None and not change(bounds).equals(bounds)):
            return True
    return False


def _stored_type(column: pq.ColumnSchema) -> pa.DataType:
    """The type of dates, times and timestamps of a column as they are in the file, where Arrow may have another unit."""
    logical = json.loads(column.logical_type.to_json())
    if logical["Type"] == "Date":
        return pa.date32()
    unit = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}[logical["timeUnit"]]
    if logical["Type"] == "Timestamp":
        return pa.timestamp(unit, "UTC" if logical["isAdjustedToUTC"] else None)
    return pa.time32(unit) if unit == "ms" else pa.time64(unit)


def has_other_moments(source: pa.NativeFile, file: LandingInput) -> bool:
    """Whether a reader that knows Parquet only may give other dates or timestamps than `open_blocks`, or fail at a time."""
    footer = _read_footer(source, file)
    columns = list(map(footer.schema.column, range(footer.num_columns)))
    is_odd = any(one.physical_type == "INT96" or one.logical_type.type == "TIME" for one in columns)
    return is_odd or OldCalendar.of(footer.metadata or {}) != OldCalendar()


def open_blocks(
    source: pa.NativeFile, file: LandingInput, reading: Reading, required: frozenset[str], only: Collection[str] | None
) -> Contents:
    opened = _open(source, file)
    return Contents(find_missing(required, opened.types.names), _blocks(opened, file, only))


def _open(source: pa.NativeFile, file: LandingInput) -> _File:
    footer = _read_footer(source, file)
    parquet, nanos = _open_parquet(source, file, footer, "us"), None
    fields = {field.name: normalize(field.type) for field in parquet.schema_arrow}
    _refuse_variants(parquet, file)
    with unreadable_if_damaged(file, "Parquet"):
        fine = {}
        if int96 := _int96_columns(footer, fields):
            nanos = _open_parquet(source, file, footer, "ns")
            fine = _fine_columns(parquet, nanos, int96, file)
        changes = _changes(footer, fields)
        fields |= {name: nanos.schema_arrow.field(name).type for name in fine if nanos is not None and not fine[name]}
        empty = {name: map_leaves(pa.nulls(0, type_), iter(changes[name])) for name, type_ in fields.items()}
    return _File(parquet, pa.schema([(n, column.type) for n, column in empty.items()]), changes, nanos, fine)


def _read_footer(source: pa.NativeFile, file: LandingInput) -> pq.FileMetaData:
    with unreadable_if_damaged(file, "Parquet"):
        try:
            footer = pq.read_metadata(source)
        except pa.ArrowNotImplementedError as e:
            if "64 bits" not in str(e):
                raise
            names = ", ".join(map(repr, _of_16_bytes(source))) or "A column"
            why = f"{names}: integers of 128 bits, which Arrow can't read. Write them as decimal(38,0), text, or with 64 bits."
            raise UnreadableFileError(file.path, why) from e
        _refuse_appended(source, footer, file)
        source.seek(0)
    check_rows(file, _values_in(footer))
    groups = list(map(footer.row_group, range(footer.num_row_groups)))
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    check_unpacked(file, sum(one.total_uncompressed_size for one in chunks))
    if (stored := sum(one.total_compressed_size for one in chunks)) > source.size():
        why = f"Its columns have {stored:,} bytes by the footer, and the file has {source.size():,}."
        raise UnreadableFileError(file.path, why)
    return footer


def _values_in(footer: pq.FileMetaData) -> int:
    """The rows of a file, or the items of a list if they are more."""
    repeated = [i for i in range(footer.num_columns) if footer.schema.column(i).max_repetition_level]
    groups = map(footer.row_group, range(footer.num_row_groups))
    return sum(max(group.num_rows, *(group.column(i).num_values for i in repeated), 0) for group in groups)


def _refuse_appended(source: pa.NativeFile, footer: pq.FileMetaData, file: LandingInput) -> None:
    """Raise UnreadableFileError for Parquet behind Parquet, as `cat` or append mode leaves it.

    The last footer then counts from the start of the first file. If pages are as long in both, readers show rows of the first as
    those of the last. Then at least half of the bytes belong to no column.
    """
    groups = map(footer.row_group, range(footer.num_row_groups))
    chunks = chain.from_iterable(map(group.column, range(group.num_columns)) for group in groups)
    ends = ((c.dictionary_page_offset or c.data_page_offset) + c.total_compressed_size for c in chunks)
    named, tail = max(ends, default=len(MAGIC)), b""
    if source.size() - 8 - footer.serialized_size < 2 * named:
        return
    source.seek(named)
    while piece := source.read(_STREAM_BYTES):
        if MAGIC * 2 in tail + piece:
            raise UnreadableFileError(
                file.path,
                "It is several Parquet files, written one behind the other in append mode or by `cat` or `getmerge`: the last "
                "footer finds rows of the first. Write each to another path.",
            )
        tail = piece[-7:]


def _of_16_bytes(source: pa.NativeFile) -> list[str]:
    """The columns of 16 bytes without a logical type, by the bytes of a footer that Arrow refuses as a whole."""
    source.seek(source.size() - 8)
    size = int.from_bytes(source.read(4), "little")
    source.seek(source.size() - 8 - size)
    footer = source.read(size)
    found = [(m.end(), m.end() + m[1][0]) for m in _SCHEMA_ELEMENT.finditer(footer)]
    return [footer[begin:end].decode("utf-8", "replace") for begin, end in found if footer[end : end + 1] == b"\0"]


def _open_parquet(source: pa.NativeFile, file: LandingInput, footer: pq.FileMetaData, unit: str) -> pq.ParquetFile:
    with unreadable_if_damaged(file, "Parquet"):
        groups = map(footer.row_group, range(footer.num_row_groups))
        stored = (sum(g.column(i).total_compressed_size for i in range(g.num_columns)) for g in groups)
        # Few large reads if a row group, as it is stored, fits into memory; else many small ones.
        large = any(size > _LARGE_ROW_GROUP for size in stored)
        parquet = pq.ParquetFile(
            source,
            metadata=footer,
            pre_buffer=not large,
            buffer_size=_STREAM_BYTES if large else 0,
            # Spark still writes INT96; in nanoseconds the year 9999 would silently become 1816.
            coerce_int96_timestamp_unit=unit,
            # Spark writes checksums; without this a damaged page would be read as wrong values.
            page_checksum_verification=True,
        )
    check_columns(file.path, parquet.schema_arrow)
    return parquet


def _refuse_variants(parquet: pq.ParquetFile, file: LandingInput) -> None:
    """Raise UnreadableFileError if a column is a VARIANT, whose parts differ from file to file."""
    names = _VARIANT.findall(str(parquet.schema))
    if names:
        raise UnreadableFileError(
            file.path,
            f"Column {names[0]!r} is a VARIANT, which is not supported: files store its values in different ways. Write it as "
            "text (JSON), or as a column of another type.",
        )


def _blocks(opened: _File, file: LandingInput, only: Collection[str] | None) -> Iterator[ArrowBlock]:
    footer = opened.parquet.metadata
    first, last = file.row_groups or (0, footer.num_row_groups)
    place = sum(footer.row_group(i).num_rows for i in range(first))
    wanted = None if only is None else select_names(opened.types.names, only)
    for i in range(first, last):  # one at a time: the reader keeps the buffers of all row groups of a call
        group = footer.row_group(i)
        row_bytes = group.total_byte_size / max(group.num_rows, 1)
        rows = max(1, min(blocks.BLOCK_ROWS, int(blocks.BLOCK_BYTES / max(row_bytes, 1))))
        batches = opened.parquet.iter_batches(batch_size=rows, row_groups=[i], columns=wanted)
        fine: Iterator[pa.RecordBatch] = iter(())
        if opened.nanos is not None and opened.fine:
            fine = opened.nanos.iter_batches(batch_size=rows, row_groups=[i], columns=list(opened.fine))
        while True:
            with unreadable_if_damaged(file, "Parquet"):
                batch = next(batches, None)
                if batch is None:
                    break
                columns = opened.columns(batch, next(fine, None))
            yield ArrowBlock(columns, np.arange(place, place + batch.num_rows))
            place += batch.num_rows


# -- what the writer meant


def _leaves(
    footer: pq.FileMetaData, fields: Mapping[str, pa.DataType]
) -> Iterator[tuple[str, pa.DataType, pq.ColumnSchema]]:
    """The name of the column, the Arrow type and the Parquet type of each innermost value."""
    of_fields = ((name, type_) for name, whole in fields.items() for type_ in leaf_types(whole))
    for i, (name, type_) in enumerate(of_fields):
        yield name, type_, footer.schema.column(i)


def _changes(footer: pq.FileMetaData, fields: Mapping[str, pa.DataType]) -> dict[str, list[Change | None]]:
    old = OldCalendar.of(footer.metadata or {})
    changes: dict[str, list[Change | None]] = {name: [] for name in fields}
    for name, type_, column in _leaves(footer, fields):
        changes[name].append(_change(type_, column, old))
    return changes


def _change(type_: pa.DataType, column: pq.ColumnSchema, old: OldCalendar) -> Change | None:
    if isinstance(type_, pa.BaseExtensionType):
        return as_text
    if column.logical_type.type == "ENUM":
        # Whether it is UTF-8 is asked row by row, later.
        return lambda array: pc.cast(array, options=pc.CastOptions(pa.string(), allow_invalid_utf8=True))
    if pa.types.is_float16(type_):
        return lambda array: array.cast(pa.float32())  # Spark can't read files with half precision
    return old.int96 if column.physical_type == "INT96" else old.change(type_)


def _int96_columns(footer: pq.FileMetaData, fields: Mapping[str, pa.DataType]) -> list[str]:
    """The columns with INT96 that may have nanoseconds. Spark writes microseconds."""
    if is_of_spark(footer.metadata or {}):
        return []
    return list(dict.fromkeys(n for n, _, column in _leaves(footer, fields) if column.physical_type == "INT96"))


def _fine_columns(
    parquet: pq.ParquetFile, nanos: pq.ParquetFile, names: Sequence[str], file: LandingInput
) -> dict[str, bool]:
    """See `_File`. No statistics say which columns have nanoseconds, so their values are read."""
    fine, far = set(), set()
    both = (one.iter_batches(blocks.BLOCK_ROWS, columns=names) for one in (parquet, nanos))
    for micros, exact in zip(*both, strict=True):
        for name in names:
            some, others = (_moments(decode(batch.column(name))) for batch in (micros, exact))
            is_far = (((one > _MICROS_IN_NANOS) | (one < -_MICROS_IN_NANOS)).any() for one in some)
            far |= {name} if any(is_far) else set()
            fine |= {name} if any(_rests(*pair).any() for pair in zip(some, others, strict=True)) else set()
    nested = [name for name in fine & far if pa.types.is_nested(parquet.schema_arrow.field(name).type)]
    if nested:
        raise UnreadableFileError(
            file.path,
            f"Column {nested[0]!r} has timestamps with nanoseconds, and others outside 1678 to 2262, the range of nanoseconds.",
        )
    return {name: name in far for name in names if name in fine}


def _moments(array: pa.Array) -> list[Indices]:
    """The integers of the innermost timestamps of an array, without nulls; of other values none."""
    found: list[Indices] = []

    def keep(leaf: pa.Array) -> Mask:
        if pa.types.is_timestamp(leaf.type):
            found.append(leaf.drop_null().view(pa.int64()).to_numpy())
        return np.zeros(len(leaf), bool)

    rows_with(array, keep)
    return found


def _rests(micros: Indices, nanos: Indices) -> Indices:
    """The nanoseconds above whole microseconds. They are right even if ``nanos`` wrapped around, since both do then."""
    return nanos - micros * 1000


def _as_text(micros: pa.Array, nanos: pa.Array) -> pa.Array:
    """Timestamps with all their digits, as text: no type holds nanoseconds and the year 9999."""
    whole, exact = (pc.fill_null(one.view(pa.int64()), 0).to_numpy() for one in (micros, nanos))
    rests = pc.utf8_lpad(pa.array(_rests(whole, exact), pa.int64()).cast(pa.string()), 3, "0")
    return pc.binary_join_element_wise(micros.cast(pa.string()), rests, "")
