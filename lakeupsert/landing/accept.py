"""The row work of phase one on one landing file: what it holds, and which of its rows the table takes.

Reads     one landing file, block by block; memory follows the block (for Parquet: and a row group, as it is stored; for ORC: a
          stripe)
Writes    nothing: accepted and quarantined rows are handed to the caller
Repeat    safe: the same file gives the same rows at the same places, however it is cut into blocks

    survey -> (the driver plans the spec) -> read_rows -> accepted rows, quarantined rows

Of JSON lines only reading all tells the columns, so those of a table that exists are not surveyed before one has a new column.

A row is refused for the first of these reasons that applies: malformed, missing_column, bad_type, null_key,
bad_partition (also where the partition column alone does not convert), order_missing, future_order. An operation that
nobody declared is told before a null key.
"""

import dataclasses
import hashlib
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.config import Reading
from lakeupsert.landing.formats import avrofile, blocks, csvfile, delimited, jsonlines, orcfile, parquetfile
from lakeupsert.landing.formats.blocks import (
    Block,
    ChangedFileError,
    Columns,
    LandingInput,
    Opened,
    Renamed,
    UnplannedColumnError,
    UnreadableFileError,
    names_in_file,
)
from lakeupsert.landing.formats.inference import unify, without_nulls
from lakeupsert.landing.formats.leaning import Found, Leaning
from lakeupsert.landing.formats.unpacked import ReadAhead, is_plain, unpacked, without_compression
from lakeupsert.rows.columns import brought
from lakeupsert.rows.convert import convert, true
from lakeupsert.rows.floor import PARTITION
from lakeupsert.storage import NotFoundError, ObjectStore
from lakeupsert.table.layout import folder_name
from lakeupsert.table.spec import DELETE_FLAG, HAS, PLACE, TableSpec

__all__ = [
    "PARTITION",
    "TYPED",
    "WHOLE_BYTES",
    "ChangedFileError",
    "LandingInput",
    "Preview",
    "RowRules",
    "Rows",
    "Survey",
    "UnplannedColumnError",
    "UnreadableFileError",
    "aliased",
    "beginning",
    "content_hash",
    "first_rows",
    "format_of",
    "line_of",
    "new_columns",
    "preview",
    "read_rows",
    "survey",
    "take",
    "unify",
    "without_nulls",
]

_ENDINGS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".avro": "avro",
    ".orc": "orc",
}
_COLUMNS_OF_TEXT: dict[str, Callable[..., Columns]] = {
    "csv": csvfile.schema_of,
    "delimited": delimited.schema_of,
    "jsonl": jsonlines.schema_of,
}
_OPEN: dict[str, Callable[..., Opened]] = {
    "csv": csvfile.open_blocks,
    "delimited": delimited.open_blocks,
    "jsonl": jsonlines.open_blocks,
    "avro": avrofile.open_blocks,
}
_TEXT = tuple(_COLUMNS_OF_TEXT)
TYPED = ("parquet", "avro", "orc")
"""Formats whose files have types of their own; the others are text, which can be compressed as a whole."""
_SOUGHT = ("parquet", "orc")  # read here and there, not from the beginning to the end
_ENVELOPED = {"debezium": ("jsonl", "avro"), "dms": ("jsonl",)}
_DEFAULT_READING = Reading()
_LONGEST_REASON = 200
WHOLE_BYTES = 1 << 26
"""Parquet and ORC files up to this size are read at once, since their content is hashed from the first byte to the last."""
_PIECES, _PIECE_BYTES = 16, 1 << 13  # most places that are looked at in a text file, and the least of each
_DAY = 86_400_000_000
_QUARANTINED = pa.schema(
    [
        ("reason_code", pa.string()),
        ("reason", pa.string()),
        ("file", pa.string()),
        ("position", pa.int64()),
        ("raw", pa.string()),
        ("arrow", pa.binary()),
    ]
)


@dataclass(frozen=True)
class Survey:
    """What a file holds, before any row is taken.

    Attributes:
        schema: columns (``pyarrow.Schema``) under the types that a table would keep them in; None where it can't be
            told. A column of text files without any value has the null type (see `without_nulls`).
        typed: the types are the file's own; those of text are inferred, or the table's.
        unreadable: why the file as a whole can't be read, or None.
        changed: it vanished, or is another one than was listed; it belongs to the next batch.
        row_groups: of a Parquet file; 0 for the others, which can't be shared between tasks.
        rows: of a Parquet file, by its footer; None for the others.
        leanings: of text columns whose types were inferred what most of their values are.
        own: what the file itself calls the columns that have another name by `aliases`.
    """

    path: str
    schema: Any = None
    typed: bool = False
    unreadable: str | None = None
    changed: bool = False
    row_groups: int = 0
    rows: int | None = None
    leanings: dict[str, Leaning] = dataclasses.field(default_factory=dict)
    own: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Preview:
    """Which partitions a file touches, by its partition column alone.

    Attributes:
        partitions: rows by partition; those that name none, which quarantine takes, are left out.
        share: of the file's bytes, what was looked at; below 1, ``partitions`` has what that part tells of the whole.
        unreadable: why the file as a whole can't be read, or None.
    """

    path: str
    partitions: dict[str, int]
    share: float = 1.0
    unreadable: str | None = None


@dataclass(frozen=True)
class RowRules:
    """What decides whether a row is taken; ``received_at`` is the batch's receipt stamp, in microseconds UTC."""

    spec: TableSpec
    received_at: int


@dataclass(frozen=True)
class Rows:
    """One block's rows: each of them is either in ``accepted`` or in ``quarantined`` (both ``pyarrow.Table``)."""

    accepted: Any
    quarantined: Any
    names: dict[str, str]
    """The columns that rows of the block bring, as the table calls them, and as their file does."""


def format_of(path: str, configured: str) -> str | None:
    """As configured, or for `auto` by the name's ending; None where that tells nothing."""
    if configured != "auto":
        return configured
    name = without_compression(path).lower()
    kind = next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), None)
    return None if kind in TYPED and name != path.lower() else kind


def survey(
    store: ObjectStore, file: LandingInput, reading: Reading, known: Any, text_columns: frozenset[str]
) -> Survey:
    """Columns and types of a file; what it can't do is told in the answer, nothing is raised about the file.

    Of typed files the footer or the header is read. CSV and delimited text: the header, and all values of columns that are
    neither in ``known`` nor in ``text_columns``. JSON lines: all, for their names.

    Args:
        known: the table's ``pyarrow.Schema``, None at creation; text files take their columns' types from it.
        text_columns: columns that stay strings in text files where ``known`` does not say otherwise: keys without a
            given type, the operation column.
    """
    try:
        kind = _kind(file, reading)
        with store.open(file.path, file.etag) as source:
            if kind == "parquet":
                schema, footer = parquetfile.schema_of(source, file)
                found = _aliased_columns(Columns(schema, {}), file.path, reading)
                groups, rows = footer.num_row_groups, footer.num_rows
                return Survey(file.path, found.schema, True, row_groups=groups, rows=rows, own=found.own)
            text = _text(source, file, kind, reading)
            found = _columns_of(text, file, kind, reading, known, text_columns)
            return Survey(file.path, found.schema, kind in TYPED, leanings=found.leanings, own=found.own)
    except NotFoundError:
        return Survey(file.path, changed=True)
    except UnreadableFileError as e:
        # A file that is still being written is no broken file: it would be set aside for good.
        unchanged = _is_unchanged(store, file.path, file.etag)
        return Survey(file.path, unreadable=e.reason) if unchanged else Survey(file.path, changed=True)


def _kind(file: LandingInput, reading: Reading) -> str:
    """The file's format. Raises UnreadableFileError where its name tells none, or one that can't be read so."""
    kind = format_of(file.path, reading.format)
    if kind is None:
        endings = f"{', '.join(_ENDINGS)} (of text also such as .csv.gz)"
        raise UnreadableFileError(file.path, f"Its name ends in none of {endings}, and `format` is auto.")
    if reading.envelope and kind not in _ENVELOPED[reading.envelope]:
        raise UnreadableFileError(file.path, f"`envelope` is {reading.envelope}, and no {kind} comes in one.")
    return kind


def _text(source: Any, file: LandingInput, kind: str, reading: Reading) -> Any:
    """What the reader of a format reads."""
    if kind in _TEXT:
        return unpacked(source, file, reading.encoding)
    return ReadAhead.of(source) if kind == "avro" else source


def _columns_of(
    text: Any, file: LandingInput, kind: str, reading: Reading, known: Any, text_columns: frozenset[str]
) -> Columns:
    """The columns as the table calls them by `aliases`."""
    if not reading.aliases:
        return _own_columns_of(text, file, kind, reading, known, text_columns)
    if known is not None:
        types = {field.name.lower(): field.type for field in known}
        types |= {old.lower(): types.get(new.lower()) for old, new in reading.aliases.items()}
        known = pa.schema([(name, type_) for name, type_ in types.items() if type_ is not None])
    wanted = {name.lower() for name in text_columns}
    text_columns |= {old for old, new in reading.aliases.items() if new.lower() in wanted}
    return _aliased_columns(_own_columns_of(text, file, kind, reading, known, text_columns), file.path, reading)


def _aliased_columns(columns: Columns, path: str, reading: Reading) -> Columns:
    if not reading.aliases:
        return columns
    called = _as_aliased(path, columns.schema.names, reading)
    schema = pa.schema([(new, columns.schema.field(own).type) for new, own in called.items()])
    leanings = {reading.called(own): one for own, one in columns.leanings.items()}
    return Columns(schema, leanings, {new: own for new, own in called.items() if new != own})


def _as_aliased(path: str, names: Iterable[str], reading: Reading) -> dict[str, str]:
    """A file's columns by the names that `aliases` give them. Raises UnreadableFileError where two would be one."""
    own: dict[str, str] = {}
    seen: dict[str, str] = {}
    for name in names:
        new = reading.called(name)
        other = seen.setdefault(new.lower(), name)
        if other.lower() != name.lower():
            raise UnreadableFileError(
                path,
                f"The file has both {other!r} and {name!r}, and by `aliases` under [read] both are the column {new!r}. Nobody "
                "can tell which value counts, so no row was taken. Land the rows in two files, each with one of these names.",
            )
        own[new] = name
    return own


def _own_columns_of(
    text: Any, file: LandingInput, kind: str, reading: Reading, known: Any, text_columns: frozenset[str]
) -> Columns:
    if kind in _TEXT:
        return _COLUMNS_OF_TEXT[kind](text, file, reading, known, text_columns)
    if kind == "avro":
        return Columns(avrofile.schema_of(text, file, reading), {})
    return Columns(orcfile.schema_of(text, file) if kind == "orc" else parquetfile.schema_of(text, file)[0], {})


def _open(
    text: Any,
    file: LandingInput,
    kind: str,
    reading: Reading,
    required: frozenset[str],
    only: Collection[str] | None = None,
) -> Opened:
    """The file's blocks, their columns as the table calls them by `aliases`."""
    if not reading.aliases:
        return _own_blocks(text, file, kind, reading, required, only)
    olds = {name: [old for old, new in reading.aliases.items() if new.lower() == name.lower()] for name in required}
    either = required.union(*olds.values())
    wanted = {name.lower() for name in only or ()}
    more = [old for old, new in reading.aliases.items() if new.lower() in wanted]
    opened = _own_blocks(text, file, kind, reading, either, None if only is None else [*only, *more])
    missing = frozenset(name for name in required if opened.missing.issuperset([name, *olds[name]]))
    return Opened(missing, _aliased(opened.blocks, file.path, reading))


def _aliased(opened: Iterator[Block], path: str, reading: Reading) -> Iterator[Block]:
    seen: dict[str, None] = {}
    for block in opened:
        if not seen.keys() >= set(block.names):
            seen |= dict.fromkeys(block.names)
            _as_aliased(path, seen, reading)
        yield aliased(block, path, reading)


def aliased(block: Block, path: str, reading: Reading) -> Block:
    """The block with its columns called as `aliases` say. Raises UnreadableFileError where two would be one."""
    own = _as_aliased(path, block.names, reading) if reading.aliases else {}
    return Renamed(block, own) if any(map(operator.ne, own.keys(), own.values())) else block


def _own_blocks(
    text: Any,
    file: LandingInput,
    kind: str,
    reading: Reading,
    required: frozenset[str],
    only: Collection[str] | None,
) -> Opened:
    if kind in _OPEN:
        return _OPEN[kind](text, file, reading, required, only)
    return (orcfile.open_blocks if kind == "orc" else parquetfile.open_blocks)(text, file, required, only)


def first_rows(
    store: ObjectStore, file: LandingInput, rows: int, size: int, reading: Reading = _DEFAULT_READING
) -> Any:
    """The rows of `beginning`."""
    return beginning(store, file, rows, size, reading).rows


@dataclass(frozen=True)
class Beginning:
    """The first rows of a file (``pyarrow.Table``), and what a survey of them tells."""

    rows: Any
    survey: Survey


def beginning(
    store: ObjectStore,
    file: LandingInput,
    rows: int,
    size: int,
    reading: Reading = _DEFAULT_READING,
    known: Any = None,
    text_columns: frozenset[str] = frozenset(),
) -> Beginning:
    """The first rows of a file, in the types that `survey` tells for what is looked at.

    At most ``rows`` rows; of text at most ``size`` bytes are looked at, of other files their first blocks. A text column
    without any value has the null type. Records that are malformed are left out.

    Raises:
        UnreadableFileError: it can't be read, or its name does not tell its format.
        NotFoundError: it vanished.
    """
    kind = _kind(file, reading)
    with store.open(file.path) as source:
        text = _text(source, file, kind, reading)
        if kind in _TEXT:
            head = _beginning(text, size)
            # A record that is cut off would be malformed, or end in a shorter value.
            text = pa.BufferReader(head if len(head) < size else head[: head.rfind(b"\n") + 1])
        found = _columns_of(text, file, kind, reading, known, text_columns)
        schema = found.schema
        text.seek(0)
        tables, left = [schema.empty_table()], rows
        for block in _open(text, file, kind, reading, frozenset()).blocks if rows else ():
            columns = [block.convert(f.name, f.type)[0] for f in schema]
            tables.append(pa.Table.from_arrays(columns, schema=schema).slice(0, left))
            left -= len(tables[-1])
            if left <= 0:
                break
    return Beginning(
        pa.concat_tables(tables), Survey(file.path, schema, kind in TYPED, leanings=found.leanings, own=found.own)
    )


def line_of(store: ObjectStore, found: Found, reading: Reading) -> int | None:
    """The number of the line that a value of a text file is in, from 1; None where the file vanished or can't be read."""
    file = LandingInput(found.path, 0, "", place=0)
    left, lines = found.place, 1
    try:
        with store.open(found.path) as source:
            text = _text(source, file, _kind(file, reading), reading)
            while left and (read := text.read(min(left, blocks.BLOCK_BYTES))):
                left -= len(read)
                lines += read.count(b"\n")
    except (NotFoundError, UnreadableFileError):
        return None
    return lines


def _beginning(text: Any, size: int) -> bytes:
    found = b""
    while len(found) < size and (read := text.read(size - len(found))):
        found += read
    return found


def preview(store: ObjectStore, file: LandingInput, reading: Reading, spec: TableSpec, size: int) -> Preview:
    """Rows by partition: of Parquet and ORC the partition columns are read, of others at most about ``size`` bytes.

    Those are spread over the file, or are its beginning where it can only be read from there. Raises NotFoundError where it
    vanished, or is another one by now.
    """
    columns = _partition_sources(spec)
    found: Counter[str] = Counter()
    share = 1.0
    try:
        kind = _kind(file, reading)
        with store.open(file.path, file.etag) as source:
            part = kind not in _SOUGHT and file.size > size
            spread = part and kind in _TEXT and is_plain(file.path, reading.encoding)
            ahead = ReadAhead(source)
            if spread:
                text, share = _pieces_of(source, file.size, size)
            else:
                text = _text(ahead if part else source, file, kind, reading)
            opened = _open(text, file, kind, reading, _required(spec), columns)
            for block in () if opened.missing else opened.blocks:
                block = _as_called(block, spec)
                values = {column: block.convert(column, spec.schema.field(column).type)[0] for column in columns}
                counts = pc.value_counts(_partition_names(spec, values | _made(spec, values)).drop_null())
                found.update({c["values"]: c["counts"] for c in counts.to_pylist()})
                if part and not spread and ahead.tell() >= size:
                    share = ahead.tell() / file.size
                    break
    except UnreadableFileError as e:
        return Preview(file.path, {}, share, unreadable=e.reason)
    return Preview(file.path, {name: round(rows / share) for name, rows in found.items()}, share)


def _pieces_of(source: Any, length: int, size: int) -> tuple[Any, float]:
    """Whole lines from places spread evenly over a text file, its header first, as one file; and their share of the bytes.

    A line end within quotes may be taken for one of a record: good enough for an estimate.
    """
    pieces = []
    count = max(1, min(_PIECES, size // _PIECE_BYTES))
    for i in range(count):
        source.seek(i * (length - size // count) // max(1, count - 1))
        piece = source.read(size // count)
        pieces.append(piece[piece.find(b"\n") + 1 if i else 0 : piece.rfind(b"\n") + 1])
    some = b"".join(pieces)
    return pa.BufferReader(some), max(len(some), 1) / length


class _Hashed:
    """A file that is hashed as it is read, also where it is read again from its beginning."""

    def __init__(self, source: Any, sha256: Any) -> None:
        self._source = source
        self._sha256 = sha256
        self._done = 0

    def read(self, size: int) -> bytes:
        place = self._source.tell()
        data: bytes = self._source.read(size)
        self._sha256.update(memoryview(data)[max(0, self._done - place) :])
        self._done = max(self._done, place + len(data))
        return data

    def seek(self, place: int) -> None:
        self._source.seek(place)


def read_rows(
    store: ObjectStore, file: LandingInput, reading: Reading, rules: RowRules, sha256: Any = None
) -> Iterator[Rows]:
    """The rows of a file, block by block; ``sha256`` (of `hashlib`) takes the whole file's content, read once where possible.

    ``accepted`` has the columns of the spec's `appended_schema`, then ``_lakeupsert_partition`` (the folder's name)
    and ``_lakeupsert_place`` (increasing: the row's index in a typed file, the byte of the text at which a record begins).
    ``quarantined`` has reason_code, reason, file, position (the place), raw (the line, or the row as a JSON object) and
    arrow (see `blocks.Block.arrow`).

    Raises:
        UnreadableFileError: the file as a whole, or from here on, can't be read. What was yielded is to be dropped.
        UnplannedColumnError: the file has an accepted row, and a column that the spec lacks. The same.
        ChangedFileError: it vanished or changed, before the first block or until after the last one. The same.
    """
    try:
        kind = _kind(file, reading)
        with store.open(file.path, file.etag) as source:
            if sha256 is not None and kind not in _SOUGHT:
                source, sha256 = _Hashed(source, sha256), None
            elif sha256 is not None and file.size <= WHOLE_BYTES:
                whole = source.read_buffer()
                sha256.update(whole)
                source, sha256 = pa.BufferReader(whole), None
            text = _text(source, file, kind, reading)
            opened = _open(text, file, kind, reading, _required(rules.spec))
            new: set[str] = set()
            has_accepted = False
            for block in opened.blocks:
                if len(block.places) or block.malformed:
                    rows = take(block, opened.missing, file.path, rules, surveyed=file.surveyed)
                    new |= new_columns(block, rules.spec)
                    has_accepted |= rows.accepted.num_rows > 0
                    if new and has_accepted:  # a column must not go lost in silence; it comes with accepted rows alone
                        raise UnplannedColumnError(
                            file.path, f"Column {min(new)!r} came up after the table's columns were planned."
                        )
                    yield rows
        if sha256 is not None:
            read_again(store, file.path, file.etag, sha256)
    except NotFoundError as e:
        raise ChangedFileError(file.path) from e
    except UnreadableFileError:
        _check_unchanged(store, file.path, file.etag)
        raise
    if not store.pinned:
        _check_unchanged(store, file.path, file.etag)


def content_hash(store: ObjectStore, path: str, etag: str | None = None) -> str:
    """SHA-256 of a whole object, in hexadecimal digits.

    Raises ChangedFileError where it vanished, or may have been another one than ``etag`` says.
    """
    sha256 = hashlib.sha256()
    try:
        read_again(store, path, etag, sha256)
    except NotFoundError as e:
        raise ChangedFileError(path) from e
    if etag is not None and not store.pinned:
        _check_unchanged(store, path, etag)
    return sha256.hexdigest()


def read_again(store: ObjectStore, path: str, etag: str | None, sha256: Any) -> None:
    """Give a whole object's content to a hash of `hashlib`. Raises NotFoundError as `ObjectStore.open` does."""
    with store.open(path, etag) as source:
        while read := source.read(blocks.BLOCK_BYTES):
            sha256.update(read)


def _is_unchanged(store: ObjectStore, path: str, etag: str) -> bool:
    found = store.head(path)
    return found is not None and found.etag == etag


def _check_unchanged(store: ObjectStore, path: str, etag: str) -> None:
    if not _is_unchanged(store, path, etag):
        raise ChangedFileError(path)


def _required(spec: TableSpec) -> frozenset[str]:
    in_files = () if spec.stamped or spec.order_in_name or spec.groups else spec.order_by
    absent = {one.column for one in spec.partition_from} | set(() if in_files else spec.order_by)
    return frozenset((*spec.key, *_partition_sources(spec), *in_files)) - absent


def _partition_sources(spec: TableSpec) -> tuple[str, ...]:
    """The columns of landing files that tell a row's partition."""
    sources = {one.column: one.source for one in spec.partition_from}
    return tuple(dict.fromkeys(sources.get(column) or column for column in spec.partition_by))


def _made(spec: TableSpec, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The partition columns that are made of others."""
    return {one.column: _MAKE[one.function or ""](_as_moment(columns[one.source or ""])) for one in spec.partition_from}


def _as_moment(values: Any) -> Any:
    """Dates and timestamps as whole seconds in UTC, null outside the years that a folder is named by."""
    t, type_ = pa.types, values.type
    if t.is_date32(type_):
        seconds = values.view(pa.int32()).fill_null(0).to_numpy().astype(np.int64) * 86400
    else:
        per_second = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[type_.unit if t.is_timestamp(type_) else "ms"]
        seconds = values.view(pa.int64()).fill_null(0).to_numpy() // per_second
    unfit = true(values.is_null()) | (seconds < _FIRST_SECOND) | (seconds > _LAST_SECOND)
    return pa.array(np.where(unfit, 0, seconds).astype(np.int64), pa.int64(), mask=unfit).view(pa.timestamp("s"))


_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799  # 0001-01-01 and the end of 9999
_MAKE: dict[str, Callable[[Any], Any]] = {
    "year": lambda moments: pc.year(moments).cast(pa.int32()),
    "month": lambda moments: pc.strftime(moments, "%Y-%m"),
    "date": lambda moments: pc.floor_temporal(moments, unit="day").cast(pa.date32()),
    "hour": lambda moments: pc.strftime(moments, "%Y-%m-%d-%H"),
}


def _given(path: str, rules: RowRules) -> dict[str, Any]:
    """The column that a file's rows do not bring, and its value (``pyarrow.Array`` of one): the receipt stamp, or the order
    that stands in the file's name. Raises UnreadableFileError where none stands there."""
    spec = rules.spec
    if spec.stamped:
        value = pa.array([rules.received_at], pa.int64()).view(pa.timestamp("us", "UTC"))
    elif spec.order_in_name:
        name = path.rpartition("/")[2]
        found = re.search(spec.order_in_name, name)
        if found is None:
            raise UnreadableFileError(
                path, f"`order_in_name` ({spec.order_in_name}) finds no order in the name {name!r}."
            )
        value = pa.array([found[1]], pa.string())
    else:
        return {}
    column = spec.order_by[0]
    converted, unfit = convert(value, spec.schema.field(column).type)
    if unfit.any() or converted.null_count:
        what = f"{value[0].as_py()!r}, which is no {spec.schema.field(column).type} for column {column!r}"
        raise UnreadableFileError(path, f"`order_in_name` ({spec.order_in_name}) finds {what}.")
    return {column: converted}


# -- which rows are taken


class _Refusals:
    """Why rows of a block are refused. The first reason that a row is given stays."""

    def __init__(self, block: Block, path: str) -> None:
        self._block = block
        self._path = path
        self._found: dict[int, tuple[str, str]] = {}
        self.refused = np.zeros(len(block.places), bool)

    def add(self, code: str, mask: Any, reason: str) -> None:
        """Refuse the rows of a mask, all for the same reason."""
        for row in self._fresh(mask):
            self._found[row] = code, reason

    def add_values(self, code: str, mask: Any, name: str, what: str) -> None:
        """Refuse the rows of a mask for what each of them has in one column."""
        if name not in set(self._block.names):  # no row brings it
            self.add(code, mask, f"Column {name!r} {what}.")
        elif rows := self._fresh(mask):
            for row, value in zip(rows, self._block.found(name, rows), strict=True):
                self._found[row] = code, f"Column {name!r}: {_short(value)} {what}."

    def _fresh(self, mask: Any) -> list[int]:
        fresh = mask & ~self.refused
        self.refused |= fresh
        return np.flatnonzero(fresh).tolist()

    def table(self) -> Any:
        rows = sorted(self._found)
        raws = self._block.raw(rows) if rows else []
        places = self._block.places[rows].tolist()
        found = zip(rows, places, raws, self._block.arrow(rows), strict=True)
        refused = [(place, *self._found[row], raw, arrow) for row, place, raw, arrow in found]
        for one in self._block.malformed:
            refused.append((one.place, "malformed", one.reason, one.raw.decode("utf-8", "backslashreplace"), None))
        refused.sort(key=operator.itemgetter(0))
        return pa.Table.from_arrays(
            [
                pa.array([code for _, code, _, _, _ in refused], pa.string()),
                pa.array([reason[:_LONGEST_REASON] for _, _, reason, _, _ in refused], pa.string()),
                pa.array([self._path] * len(refused), pa.string()),
                pa.array([place for place, _, _, _, _ in refused], pa.int64()),
                pa.array([raw for _, _, _, raw, _ in refused], pa.string()),
                pa.array([arrow for _, _, _, _, arrow in refused], pa.binary()),
            ],
            schema=_QUARANTINED,
        )


def take(block: Block, missing: frozenset[str], path: str, rules: RowRules, *, surveyed: bool = True) -> Rows:
    """The rows of a block under the spec, each accepted or refused; see `read_rows`. ``missing`` columns refuse all.

    Columns that the spec lacks are left out (see `new_columns`). Raises UnplannedColumnError, of a file that was not
    ``surveyed``, where a nested value does not fit: it may have fields that are yet to be planned.
    """
    spec, count = rules.spec, len(block.places)
    block = _as_called(block, spec)
    refusals = _Refusals(block, path)
    if missing:
        names = ", ".join(sorted(missing))
        reason = f"The file has no column {names}, and every row needs one in its key, partition and order."
        refusals.add("missing_column", np.full(count, True), reason)
        return Rows(_accepted_schema(spec).empty_table(), refusals.table(), names_in_file(block))

    columns, partition_unfit, grown = _columns(block, refusals, rules, _given(path, rules))
    if grown and not surveyed:
        raise UnplannedColumnError(
            path, f"Column {grown[0]!r} has values that do not fit {spec.schema.field(grown[0]).type}."
        )
    is_delete = _deletes(block, refusals, spec, path)
    for name in spec.key:
        absent = true(columns[name].is_null())
        if name in spec.partition_by:
            absent &= ~partition_unfit[name]
        refusals.add("null_key", absent, f"Key column {name!r} is null.")
    sources = {one.column: one.source for one in spec.partition_from}
    folders = [_folder_names(name, columns[name]) for name in spec.partition_by]
    for name, of_name in zip(spec.partition_by, folders, strict=True):
        what = f"does not name a partition of {spec.schema.field(name).type}"
        refusals.add_values("bad_partition", true(of_name.is_null()), sources.get(name) or name, what)
    names = _joined(folders)
    _check_order(columns, is_delete, refusals, rules)
    if spec.mode == "columns":
        columns[HAS], unordered = brought(columns, block.has, spec)
        for reason, rows in unordered.items():
            refusals.add("order_missing", rows, reason)

    if spec.has_deletes:
        columns[DELETE_FLAG] = pa.array(is_delete)
    columns |= {PARTITION: names, PLACE: pa.array(block.places, pa.int64())}
    schema = _accepted_schema(spec)
    accepted = pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
    if refusals.refused.any():
        accepted = accepted.filter(pa.array(~refusals.refused))
    return Rows(accepted, refusals.table(), names_in_file(block))


def new_columns(block: Block, spec: TableSpec) -> set[str]:
    """Those columns of a block that the spec lacks."""
    known = {*spec.schema.names, *([spec.delete.column] if spec.delete else [])}
    return {name for name in block.names if spec.called(name) not in known}


def _as_called(block: Block, spec: TableSpec) -> Block:
    """The block with the table's names where the file has them in another case."""
    own = {spec.called(name): name for name in block.names}
    return block if all(map(operator.eq, own.keys(), own.values())) else Renamed(block, own)


def _accepted_schema(spec: TableSpec) -> Any:
    ours = [pa.field(PARTITION, pa.string(), nullable=False), pa.field(PLACE, pa.int64(), nullable=False)]
    return pa.schema([*spec.appended_schema, *ours])


def _columns(
    block: Block, refusals: _Refusals, rules: RowRules, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Every column in the table's type, where the partition columns' values have none there, and nested columns with values
    that do not fit."""
    columns: dict[str, Any] = {}
    partition_unfit = {}
    grown = []
    made = {one.column for one in rules.spec.partition_from}
    for field in rules.spec.schema:
        name, type_ = field.name, field.type
        if name in given:
            columns[name] = pa.repeat(given[name][0], len(block.places))
            source = "the table is stamped on receipt" if rules.spec.stamped else "its order is that in the file's name"
            refusals.add_values("bad_type", block.brings(name), name, f"must not come with a row: {source}")
            continue
        if name in made:
            partition_unfit[name] = np.zeros(len(block.places), bool)
            refusals.add_values(
                "bad_type", block.brings(name), name, "must not come with a row: it is made of another column"
            )
            continue
        columns[name], unfit = block.convert(name, type_)
        if name in rules.spec.partition_by:
            partition_unfit[name] = unfit
        else:
            refusals.add_values("bad_type", unfit, name, f"does not fit {type_}")
            grown += [name] if pa.types.is_nested(type_) and unfit.any() else []
    return columns | _made(rules.spec, columns), partition_unfit, grown


def _deletes(block: Block, refusals: _Refusals, spec: TableSpec, path: str) -> Any:
    """A mask of the rows that are deletes."""
    rule, count = spec.delete, len(block.places)
    if rule is None:
        return np.zeros(count, bool)
    if rule.file_prefix is not None and path.rpartition("/")[2].startswith(rule.file_prefix):
        return np.full(count, True)
    if rule.column is None:
        return np.zeros(count, bool)
    text, unfit = block.convert(rule.column, pa.string())
    refusals.add_values("bad_type", unfit, rule.column, "can't be compared with `delete.values` as text")
    is_delete = true(pc.is_in(text, pa.array(rule.values, pa.string())))
    if rule.upserts is not None:
        declared = is_delete | true(pc.is_in(text, pa.array(rule.upserts, pa.string())))
        what = "is neither in `delete.values` nor in `delete.upserts`"
        refusals.add_values("bad_operation", ~declared, rule.column, what)
    return is_delete


def _check_order(columns: dict[str, Any], is_delete: Any, refusals: _Refusals, rules: RowRules) -> None:
    spec = rules.spec
    if spec.stamped:
        return
    if not spec.nulls_first:
        absent = np.logical_and.reduce([true(columns[name].is_null()) for name in spec.order_by])
        reason = f"A delete without a value in {', '.join(spec.order_by)} loses to every row that has one."
        refusals.add("order_missing", is_delete & absent, reason)
    received = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=rules.received_at)
    what = f"is more than a day after its receipt, {received.isoformat()}"
    for name in (o.column for ordering, _ in spec.columns_of for o in ordering if not o.ascending):
        refusals.add_values("future_order", _is_after(columns[name], rules.received_at + _DAY), name, what)


def _is_after(column: Any, limit: int) -> Any:
    """A mask of the dates (as midnight) and timestamps beyond ``limit`` (microseconds UTC); other types never are."""
    t, type_ = pa.types, column.type
    if t.is_date32(type_):
        return true(pc.greater(column.view(pa.int32()), limit // _DAY))
    if t.is_date64(type_):
        return true(pc.greater(column.view(pa.int64()), limit // 1000))
    if t.is_timestamp(type_):
        per_unit = {"s": limit // 10**6, "ms": limit // 1000, "us": limit, "ns": min(limit * 1000, 2**63 - 1)}
        return true(pc.greater(column.view(pa.int64()), per_unit[type_.unit]))
    return np.zeros(len(column), bool)


def _partition_names(spec: TableSpec, columns: Mapping[str, Any]) -> Any:
    """The partition's name for every row; null where a value is missing, or is none that a folder can be named by."""
    return _joined([_folder_names(name, columns[name]) for name in spec.partition_by])


def _joined(folders: Sequence[Any]) -> Any:
    return folders[0] if len(folders) == 1 else pc.binary_join_element_wise(*folders, "/")


def _folder_names(column: str, values: Any) -> Any:
    encoded = values.dictionary_encode()
    texts, _ = convert(encoded.dictionary, pa.string())
    names = [None if text is None else folder_name(column, text) for text in texts.to_pylist()]
    return pa.array(names, pa.string()).take(encoded.indices)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = "a value that is nested too deep"
    return text if len(text) <= 80 else f"{text[:77]}..."
