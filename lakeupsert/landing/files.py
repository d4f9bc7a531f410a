"""What a landing file is and what it holds, before any of its rows is accepted.

Reads     one landing file, block by block; memory follows the block (for Parquet: and a row group, as it is stored; for ORC: a
          stripe)
Writes    nothing
Repeat    safe: the same file gives the same answers

Of JSON lines only reading all tells the columns, so those of a table that exists are not surveyed before one has a new column.
"""

import dataclasses
import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

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
    UnreadableFileError,
)
from lakeupsert.landing.formats.leaning import Found, Leaning
from lakeupsert.landing.formats.unpacked import ReadAhead, is_plain, unpacked, without_compression
from lakeupsert.landing.partitions import derived_columns, partition_names, partition_sources
from lakeupsert.storage import NotFoundError, ObjectStore
from lakeupsert.table.spec import TableSpec

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
WHOLE_BYTES = 1 << 26
"""Parquet and ORC files up to this size are read at once, since their content is hashed from the first byte to the last."""
_PIECES, _PIECE_BYTES = 16, 1 << 13  # most places that are looked at in a text file, and the least of each


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
        kind = kind_of(file, reading)
        with store.open(file.path, file.etag) as source:
            if kind == "parquet":
                schema, footer = parquetfile.schema_of(source, file)
                found = _aliased_columns(Columns(schema, {}), file.path, reading)
                groups, rows = footer.num_row_groups, footer.num_rows
                return Survey(file.path, found.schema, True, row_groups=groups, rows=rows, own=found.own)
            text = text_of(source, file, kind, reading)
            found = _columns_of(text, file, kind, reading, known, text_columns)
            return Survey(file.path, found.schema, kind in TYPED, leanings=found.leanings, own=found.own)
    except NotFoundError:
        return Survey(file.path, changed=True)
    except UnreadableFileError as e:
        # A file that is still being written is no broken file: it would be set aside for good.
        unchanged = _is_unchanged(store, file.path, file.etag)
        return Survey(file.path, unreadable=e.reason) if unchanged else Survey(file.path, changed=True)


def kind_of(file: LandingInput, reading: Reading) -> str:
    """The file's format. Raises UnreadableFileError where its name tells none, or one that can't be read so."""
    kind = format_of(file.path, reading.format)
    if kind is None:
        endings = f"{', '.join(_ENDINGS)} (of text also such as .csv.gz)"
        raise UnreadableFileError(file.path, f"Its name ends in none of {endings}, and `format` is auto.")
    if reading.envelope and kind not in _ENVELOPED[reading.envelope]:
        raise UnreadableFileError(file.path, f"`envelope` is {reading.envelope}, and no {kind} comes in one.")
    return kind


def text_of(source: Any, file: LandingInput, kind: str, reading: Reading) -> Any:
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


def open_blocks(
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
    kind = kind_of(file, reading)
    with store.open(file.path) as source:
        text = text_of(source, file, kind, reading)
        if kind in _TEXT:
            head = _beginning(text, size)
            # A record that is cut off would be malformed, or end in a shorter value.
            text = pa.BufferReader(head if len(head) < size else head[: head.rfind(b"\n") + 1])
        found = _columns_of(text, file, kind, reading, known, text_columns)
        schema = found.schema
        text.seek(0)
        tables, left = [schema.empty_table()], rows
        for block in open_blocks(text, file, kind, reading, frozenset()).blocks if rows else ():
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
            text = text_of(source, file, kind_of(file, reading), reading)
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
    columns = partition_sources(spec)
    found: Counter[str] = Counter()
    share = 1.0
    try:
        kind = kind_of(file, reading)
        with store.open(file.path, file.etag) as source:
            part = kind not in _SOUGHT and file.size > size
            spread = part and kind in _TEXT and is_plain(file.path, reading.encoding)
            ahead = ReadAhead(source)
            if spread:
                text, share = _pieces_of(source, file.size, size)
            else:
                text = text_of(ahead if part else source, file, kind, reading)
            opened = open_blocks(text, file, kind, reading, required_columns(spec), columns)
            for block in () if opened.missing else opened.blocks:
                block = under_table_names(block, spec)
                values = {column: block.convert(column, spec.schema.field(column).type)[0] for column in columns}
                counts = pc.value_counts(partition_names(spec, values | derived_columns(spec, values)).drop_null())
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


def hashed_source(source: Any, file: LandingInput, kind: str, sha256: Any) -> Any:
    """What reads like ``source`` and hashes the whole file on the way; None where only reading it again can."""
    if kind not in _SOUGHT:
        return _Hashed(source, sha256)
    if file.size > WHOLE_BYTES:
        return None
    whole = source.read_buffer()
    sha256.update(whole)
    return pa.BufferReader(whole)


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
        check_unchanged(store, path, etag)
    return sha256.hexdigest()


def read_again(store: ObjectStore, path: str, etag: str | None, sha256: Any) -> None:
    """Give a whole object's content to a hash of `hashlib`. Raises NotFoundError as `ObjectStore.open` does."""
    with store.open(path, etag) as source:
        while read := source.read(blocks.BLOCK_BYTES):
            sha256.update(read)


def _is_unchanged(store: ObjectStore, path: str, etag: str) -> bool:
    found = store.head(path)
    return found is not None and found.etag == etag


def check_unchanged(store: ObjectStore, path: str, etag: str) -> None:
    if not _is_unchanged(store, path, etag):
        raise ChangedFileError(path)


def required_columns(spec: TableSpec) -> frozenset[str]:
    in_files = () if spec.stamped or spec.order_in_name or spec.groups else spec.order_by
    absent = {one.column for one in spec.partition_from} | set(() if in_files else spec.order_by)
    return frozenset((*spec.key, *partition_sources(spec), *in_files)) - absent


def under_table_names(block: Block, spec: TableSpec) -> Block:
    """The block with the table's names where the file has them in another case."""
    own = {spec.called(name): name for name in block.names}
    return block if all(map(operator.eq, own.keys(), own.values())) else Renamed(block, own)
