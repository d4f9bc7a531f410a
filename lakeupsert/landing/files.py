"""What a landing file is and what it holds: format, columns, first rows, partitions, content hash.

Reads     one landing file, block by block; memory follows the block (for Parquet, also a stored row group; for ORC, a stripe)
Writes    nothing
Repeat    safe: the same file gives the same result

The columns of JSON lines are known only once all lines are read. So these files are not surveyed for an existing table, unless
one of them has a new column.
"""

import dataclasses
import hashlib
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.config import Reading
from lakeupsert.landing.formats import avrofile, blocks, csvfile, delimited, jsonlines, orcfile, parquetfile, records
from lakeupsert.landing.formats.blocks import (
    Block,
    ChangedFileError,
    Columns,
    Contents,
    DamagedFileError,
    LandingInput,
    MalformedRecord,
    RenamedBlock,
    Source,
    UnreadableFileError,
)
from lakeupsert.landing.formats.dates import dated, formats_of, type_by_formats
from lakeupsert.landing.formats.dominant import DominantType, Example
from lakeupsert.landing.formats.folders import add_folder_columns, folder_values, missing_values, with_folders
from lakeupsert.landing.formats.jsonarray import array_begin, cut_off
from lakeupsert.landing.formats.only import names_in_files, own_rows
from lakeupsert.landing.formats.records import ChooseDialect
from lakeupsert.landing.formats.unpacked import (
    ReadAhead,
    compression_of,
    is_plain,
    is_utf16,
    open_text,
    several_members,
    without_compression,
)
from lakeupsert.landing.partitions import derived_columns, partition_names, partition_sources
from lakeupsert.rows.arrays import Rows
from lakeupsert.storage import DamagedObjectError, NotFoundError, ObjectInfo, ObjectReader, open_listed
from lakeupsert.table.spec import TableSpec

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

_ENDINGS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".avro": "avro",
    ".orc": "orc",
}
_DIALECTS: dict[str, ChooseDialect] = {"csv": csvfile.choose_dialect, "delimited": delimited.choose_dialect}
_TEXT = (*_DIALECTS, "jsonl")
TYPED = ("parquet", "avro", "orc")
"""Formats whose files have types of their own. The others are text, and such files may be compressed as a whole."""
_SEEKABLE = ("parquet", "orc")  # read at many places, not from the beginning to the end
_DEFAULT_READING = Reading()
WHOLE_BYTES = 1 << 26
"""Parquet and ORC files up to this many bytes are read at once, because the hash needs all bytes in order."""
_PIECES, _PIECE_BYTES = 16, 1 << 13  # most places to read in a text file for a preview, and the fewest bytes at each


@dataclass(frozen=True)
class Survey:
    """What a file holds, before any row is accepted.

    Attributes:
        schema: columns in the types that a table would store them in; None if they can't be read. A column of a text file
            without any value has the null type (see `without_nulls`).
        typed: whether the types are the file's own. The types of text are inferred, or the table's.
        unreadable: why the file as a whole can't be read, or None.
        damaged: it is unreadable since the store can't give its bytes.
        changed: the file was deleted or replaced since it was listed; it belongs to the next batch.
        row_groups: number of row groups of a Parquet file; 0 for other formats, whose files tasks can't share.
        rows: number of rows in the footer of a Parquet file; None for other formats.
        dominant_types: the type of most values of each text column whose type was inferred.
        own: the file's own name of each column that `aliases` rename.
        rowless: it has a header, or messages of an envelope, and no row.
        flaw, stated: as in `blocks.Columns`.
    """

    path: str
    schema: pa.Schema | None = None
    typed: bool = False
    unreadable: str | None = None
    damaged: bool = False
    changed: bool = False
    row_groups: int = 0
    rows: int | None = None
    dominant_types: dict[str, DominantType] = dataclasses.field(default_factory=dict)
    own: dict[str, str] = dataclasses.field(default_factory=dict)
    rowless: bool = False
    flaw: MalformedRecord | None = None
    stated: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Preview:
    """Which partitions a file touches, by its partition column alone.

    Attributes:
        partitions: rows by partition, without rows that have no valid partition (they go to quarantine).
        unplaced: rows that name no partition, if the key index may place them.
        share: the fraction of the file's bytes that was read; below 1, these are estimates for the whole file.
        unreadable: why the file as a whole can't be read, or None.
    """

    path: str
    partitions: dict[str, int]
    share: float = 1.0
    unreadable: str | None = None
    unplaced: int = 0


def format_of(path: str, configured: str) -> str | None:
    """The configured format, or for `auto` the format by the ending of the name; None if the ending is unknown."""
    if configured != "auto":
        return configured
    name = without_compression(path).lower()
    kind = next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), None)
    return None if kind in TYPED and name != path.lower() else kind


@contextmanager
def open_landed(store: ObjectReader, path: str, listed: ObjectInfo | None = None) -> Iterator[pa.NativeFile]:
    """A landing file, as `open_listed` opens it (None: as it is now). Raises DamagedFileError if it is a damaged member of an
    archive."""
    try:
        with store.open(path) if listed is None else open_listed(store, listed) as source:
            yield source
    except DamagedObjectError as e:
        raise DamagedFileError.because(path, str(e)) from e


def survey(
    store: ObjectReader, file: LandingInput, reading: Reading, known: pa.Schema | None, text_columns: frozenset[str]
) -> Survey:
    """Columns and types of a file. A file that can't be read, or changed, is reported in the result and not raised.

    Of typed files the footer or the header is read. Of CSV and delimited text the header is read, and all values of columns
    that are neither in ``known`` nor in ``text_columns``. Of JSON lines everything is read, because each line has its own names.

    Args:
        known: the table's columns, None at creation. Text columns have these types.
        text_columns: columns of text files that stay strings unless ``known`` has a type for them: keys without a given
            type, the operation column.
    """
    try:
        kind = kind_of(file, reading)
        with open_landed(store, file.path, file.listed) as source:
            if kind == "parquet":
                schema, footer = parquetfile.schema_of(source, file)
                columns = _columns_in_table(Columns(schema), file.path, reading, known, text_columns)
                groups, rows = footer.num_row_groups, footer.num_rows
                own = columns.own
                return Survey(file.path, columns.schema, True, row_groups=groups, rows=rows, own=own, rowless=not rows)
            columns = Reader.of(source, file, kind, reading).columns(known, text_columns)
            return Survey(
                file.path,
                columns.schema,
                kind in TYPED,
                dominant_types=columns.dominant_types,
                own=columns.own,
                rowless=columns.rowless,
                flaw=columns.flaw,
                stated=columns.stated,
            )
    except NotFoundError:
        return Survey(file.path, changed=True)
    except UnreadableFileError as e:
        # A file that is still being written is not damaged: as unreadable it would be set aside for good.
        unchanged = store.head(file.path) == file.listed
        damaged = isinstance(e, DamagedFileError)
        return Survey(file.path, unreadable=e.reason, damaged=damaged) if unchanged else Survey(file.path, changed=True)


def kind_of(file: LandingInput, reading: Reading) -> str:
    """The file's format. Raises UnreadableFileError if its name has no known ending, or the format does not fit `envelope`."""
    kind = format_of(file.path, reading.format)
    if kind is None and compression_of(file.path) == "zip":
        raise UnreadableFileError(file.path, several_members(file.path))
    if kind is None:
        endings = f"{', '.join(_ENDINGS)} (text may be compressed, for example .csv.gz)"
        raise UnreadableFileError(file.path, f"`format` is auto, and its name does not end in one of {endings}.")
    if reading.envelope and kind != "jsonl" and (reading.envelope, kind) != ("debezium", "avro"):
        raise UnreadableFileError(
            file.path, f"`envelope` is {reading.envelope}, which is not supported for {kind} files."
        )
    return kind


@dataclass(frozen=True)
class Reader:
    """Reads one opened landing file of any format, with its columns renamed by `aliases`."""

    source: Source
    file: LandingInput
    kind: str
    reading: Reading

    @classmethod
    def of(cls, source: Source, file: LandingInput, kind: str, reading: Reading) -> "Reader":
        """Decompresses and decodes text, and reads Avro in few large parts."""
        if kind in _TEXT:
            source = open_text(source, file, reading.encoding)
        return cls(ReadAhead.of(source) if kind == "avro" else source, file, kind, reading)

    def columns(self, known: pa.Schema | None, text_columns: frozenset[str]) -> Columns:
        """The columns of the file; the arguments are those of `survey`."""
        aliases, given = self.reading.aliases, known
        dates = {name: type_by_formats(formats_of(self.reading, name)) for name in self.reading.dates}
        if dates:
            types = {name.lower(): type_ for name, type_ in dates.items()}
            types |= {field.name.lower(): field.type for field in known or ()}
            known = pa.schema(list(types.items()))
        if aliases and known is not None:
            types = {field.name.lower(): field.type for field in known}
            types |= {old.lower(): types.get(new.lower()) for old, new in aliases.items()}
            known = pa.schema([(name, type_) for name, type_ in types.items() if type_ is not None])
        wanted = {name.lower() for name in text_columns}
        own_texts = text_columns | {old for old, new in aliases.items() if new.lower() in wanted}
        columns = self._own_columns(known, own_texts)
        return _columns_in_table(columns, self.file.path, self.reading, given, text_columns)

    def blocks(self, required: frozenset[str], only: Collection[str] | None = None) -> Contents:
        """The rows of the file. ``required`` and ``only`` are names after the renaming."""
        aliases, path, reading = self.reading.aliases, self.file.path, self.reading
        given = folder_values(path, reading)
        required = frozenset(missing_values(given, dict.fromkeys(required))) if given else required
        if given and only is not None and not missing_values(given, dict.fromkeys(only)):
            only = None  # of no column, Parquet and ORC read no row
        if not aliases:
            own = self._own_blocks(required, only)
            return Contents(own.missing, (dated(with_folders(block, path, reading), reading) for block in own.blocks))
        olds = {name: [old for old, new in aliases.items() if new.lower() == name.lower()] for name in required}
        wanted = {name.lower() for name in only or ()}
        more = [old for old, new in aliases.items() if new.lower() in wanted]
        own = self._own_blocks(required.union(*olds.values()), None if only is None else [*only, *more])
        missing = frozenset(name for name in required if own.missing.issuperset([name, *olds[name]]))
        return Contents(missing, _aliased_blocks(own.blocks, path, reading))

    def _own_columns(self, known: pa.Schema | None, text_columns: frozenset[str]) -> Columns:
        source, file, kind, reading = self.source, self.file, self.kind, self.reading
        if kind in _DIALECTS:
            return records.schema_of(source, file, reading, _DIALECTS[kind], known, text_columns)
        if kind == "jsonl":
            return jsonlines.schema_of(source, file, reading, known, text_columns)
        if kind == "avro":
            schema = avrofile.schema_of(source, file, reading)
            return Columns(schema, rowless=not schema.names)
        return Columns(orcfile.schema_of(source, file) if kind == "orc" else parquetfile.schema_of(source, file)[0])

    def _own_blocks(self, required: frozenset[str], only: Collection[str] | None) -> Contents:
        if only is not None and self.reading.only:
            only = [*only, *names_in_files(self.reading)]
        contents = self._all_blocks(required, only)
        own = contents.blocks if self.kind == "jsonl" else own_rows(contents.blocks, self.reading)
        return Contents(contents.missing, own)

    def _all_blocks(self, required: frozenset[str], only: Collection[str] | None) -> Contents:
        source, file, kind, reading = self.source, self.file, self.kind, self.reading
        if kind in _DIALECTS:
            return records.open_blocks(source, file, reading, _DIALECTS[kind], required, only)
        if kind == "jsonl":
            return jsonlines.open_blocks(source, file, reading, required, only)
        if kind == "avro":
            return avrofile.open_blocks(source, file, reading, required, only)
        open_blocks = orcfile.open_blocks if kind == "orc" else parquetfile.open_blocks
        return open_blocks(source, file, required, only)


def _columns_in_table(
    columns: Columns, path: str, reading: Reading, known: pa.Schema | None, text_columns: frozenset[str]
) -> Columns:
    """The columns under their names in the table, those with formats of `dates` in the types of these, and those of folders.

    A column that is ``known`` in another type keeps it, and so does one that the file has as dates already.
    """
    columns = _aliased_columns(columns, path, reading)
    others = set() if known is None else {name.lower() for name in known.names}
    schema = columns.schema
    for i, field in enumerate(schema):
        formats = formats_of(reading, field.name)
        is_written = pa.types.is_string(field.type) or pa.types.is_integer(field.type)
        if formats and is_written and field.name.lower() not in others:
            schema = schema.set(i, field.with_type(type_by_formats(formats)))
    schema = add_folder_columns(schema, path, reading, known, text_columns)
    return dataclasses.replace(columns, schema=schema)


def _aliased_columns(columns: Columns, path: str, reading: Reading) -> Columns:
    if not reading.aliases:
        return columns
    own_names = _own_names(path, columns.schema.names, reading)
    schema = pa.schema([(new, columns.schema.field(own).type) for new, own in own_names.items()])
    dominant_types = {reading.table_name_of(own): one for own, one in columns.dominant_types.items()}
    renamed = {new: own for new, own in own_names.items() if new != own}
    stated = frozenset(map(reading.table_name_of, columns.stated))
    return Columns(schema, dominant_types, renamed, columns.rowless, columns.flaw, stated)


def _own_names(path: str, names: Iterable[str], reading: Reading) -> dict[str, str]:
    """The file's names of its columns, by their names after `aliases`. Raises UnreadableFileError if two become the same."""
    own: dict[str, str] = {}
    seen: dict[str, str] = {}
    for name in names:
        new = reading.table_name_of(name)
        other = seen.setdefault(new.lower(), name)
        if other.lower() != name.lower():
            raise UnreadableFileError(
                path,
                f"The file has both {other!r} and {name!r}, and `aliases` under [read] makes both the column {new!r}. "
                "Which value counts is unknown, so no row was taken. Land the rows in two files, each with one of these names.",
            )
        own[new] = name
    return own


def _aliased_blocks(own_blocks: Iterator[Block], path: str, reading: Reading) -> Iterator[Block]:
    seen: dict[str, None] = {}
    for block in own_blocks:
        if not seen.keys() >= set(block.names):
            seen |= dict.fromkeys(block.names)
            _own_names(path, seen, reading)
        yield dated(with_folders(apply_aliases(block, path, reading), path, reading), reading)


def apply_aliases(block: Block, path: str, reading: Reading) -> Block:
    """The block with its columns renamed by `aliases`. Raises UnreadableFileError if two become the same."""
    own = _own_names(path, block.names, reading) if reading.aliases else {}
    return RenamedBlock(block, own) if any(map(operator.ne, own.keys(), own.values())) else block


def first_rows(
    store: ObjectReader, file: LandingInput, rows: int, size: int, reading: Reading = _DEFAULT_READING
) -> Rows:
    """The rows of `read_beginning`."""
    return read_beginning(store, file, rows, size, reading).rows


def read_head(store: ObjectReader, file: LandingInput, size: int) -> bytes:
    """Up to ``size`` bytes of whole lines at the beginning of a text file, in UTF-8 and without a byte order mark.

    Raises UnreadableFileError, and NotFoundError if the file was deleted.
    """
    with open_landed(store, file.path) as source:
        head = _read_up_to(open_text(source, file, _DEFAULT_READING.encoding), size)
    whole = head if len(head) < size else head[: head.rfind(b"\n") + 1]
    return whole.removeprefix(b"\xef\xbb\xbf")


@dataclass(frozen=True)
class Beginning:
    """The first rows of a file, and a survey of them. ``whole``: there are no others."""

    rows: Rows
    survey: Survey
    whole: bool


def read_beginning(
    store: ObjectReader,
    file: LandingInput,
    rows: int,
    size: int,
    reading: Reading = _DEFAULT_READING,
    known: pa.Schema | None = None,
    text_columns: frozenset[str] = frozenset(),
) -> Beginning:
    """The first rows of a file, in the types that `survey` reports for the part that was read.

    At most ``rows`` rows. At most ``size`` bytes of text are read; of other formats the first blocks. A text column without
    any value has the null type. Malformed records are left out.

    Raises:
        UnreadableFileError: the file can't be read, or its name has no known ending.
        NotFoundError: the file was deleted.
    """
    kind, whole = kind_of(file, reading), True
    with open_landed(store, file.path) as source:
        reader = Reader.of(source, file, kind, reading)
        if kind in _TEXT:
            head = _read_up_to(reader.source, size)
            whole = len(head) < size
            # A record that is cut off would be malformed, or its last value would be too short.
            if not whole:
                head = cut_off(head) if _is_array(kind, head) else head[: head.rfind(b"\n") + 1]
            reader = Reader(pa.BufferReader(head), file, kind, reading)
        columns = reader.columns(known, text_columns)
        schema = columns.schema
        reader.source.seek(0)
        tables, wanted = [schema.empty_table()], rows
        for block in reader.blocks(frozenset()).blocks if rows else ():
            values = [block.convert(f.name, f.type)[0] for f in schema]
            tables.append(pa.Table.from_arrays(values, schema=schema).slice(0, wanted))
            wanted -= len(block.places)
            if wanted <= 0:
                break
    first = Survey(file.path, schema, kind in TYPED, dominant_types=columns.dominant_types, own=columns.own)
    return Beginning(pa.concat_tables(tables), first, whole and wanted > 0)


def line_of(store: ObjectReader, example: Example, reading: Reading) -> int | None:
    """The line of a text file that a value is in, counted from 1; None if the file was deleted or can't be read."""
    file = LandingInput(example.path, 0, "", place=0)
    distance, line = example.place, 1
    try:
        with open_landed(store, example.path) as source:
            text = Reader.of(source, file, kind_of(file, reading), reading).source
            while distance > 0 and (read := text.read(min(distance, blocks.BLOCK_BYTES))):
                line += read[:distance].count(b"\n")  # more may come than was asked for
                distance -= len(read)
    except (NotFoundError, UnreadableFileError):
        return None
    return line


def _read_up_to(text: Source, size: int) -> bytes:
    """``size`` bytes, or all if there are fewer."""
    data = b""
    while len(data) < size and (read := text.read(size - len(data))):
        data += read
    return data


def preview(store: ObjectReader, file: LandingInput, reading: Reading, spec: TableSpec, size: int) -> Preview:
    """Count rows by partition. Of Parquet and ORC the partition columns are read, of other formats about ``size`` bytes at most.

    These bytes are spread over the file, or are its beginning if it can only be read from there. Raises NotFoundError if the file
    was deleted or replaced.
    """
    sources = partition_sources(spec)
    # Of no column, Parquet and ORC read no row.
    in_folders = bool(folder_values(file.path, reading))
    alone = bool(sources) and not spec.takes_key_alone and not in_folders
    columns = sources if alone else tuple(dict.fromkeys((*sources, *spec.key[: None if in_folders else 1])))
    partitions: Counter[str] = Counter()
    unplaced = 0
    share = 1.0
    try:
        kind = kind_of(file, reading)
        with open_landed(store, file.path, file.listed) as source:
            sampled = kind not in _SEEKABLE and file.size > size
            pieces = None
            if sampled and kind in _TEXT and is_plain(file.path, reading.encoding):
                pieces = _pieces_of(source, file.size, size, kind)
            spread = pieces is not None
            ahead = ReadAhead(source)
            if pieces is not None:
                share = pieces.share
                reader = Reader(pieces.text, file, kind, reading)
            else:
                reader = Reader.of(ahead if sampled else source, file, kind, reading)
            contents = reader.blocks(required_columns(spec), columns)
            for block in () if contents.missing else contents.blocks:
                block = under_table_names(block, spec)
                values = {column: block.convert(column, spec.schema.field(column).type)[0] for column in columns}
                names = partition_names(spec, values | derived_columns(spec, values), len(block.places))
                unplaced += names.null_count if spec.takes_key_alone else 0
                counts = pc.value_counts(names.drop_null())
                partitions.update({c["values"]: c["counts"] for c in counts.to_pylist()})
                if sampled and not spread and ahead.tell() >= size:
                    share = ahead.tell() / file.size
                    break
    except UnreadableFileError as e:
        return Preview(file.path, {}, share, unreadable=e.reason)
    by_name = {name: round(rows / share) for name, rows in partitions.items()}
    return Preview(file.path, by_name, share, unplaced=round(unplaced / share))


@dataclass(frozen=True)
class _Pieces:
    """Lines of a text file, and their share of its bytes."""

    text: Source
    share: float


def _pieces_of(source: pa.NativeFile, length: int, size: int, kind: str) -> _Pieces | None:
    """Lines from places spread evenly over a text file, the header first, as one file. None if its records are not lines.

    A line end in quotes may count as the end of a record, which is good enough for an estimate.
    """
    pieces = []
    count = max(1, min(_PIECES, size // _PIECE_BYTES))
    for i in range(count):
        source.seek(i * (length - size // count) // max(1, count - 1))
        piece = source.read(size // count)
        if not i and (is_utf16(piece) or _is_array(kind, piece)):
            source.seek(0)
            return None
        pieces.append(piece[piece.find(b"\n") + 1 if i else 0 : piece.rfind(b"\n") + 1])
    some = b"".join(pieces)
    return _Pieces(pa.BufferReader(some), max(len(some), 1) / length)


def _is_array(kind: str, head: bytes) -> bool:
    return kind == "jsonl" and array_begin(head) is not None


class _HashedFile:
    """Hashes a file while it is read, each byte once even if it is read again from the beginning."""

    def __init__(self, source: pa.NativeFile, sha256: "Hash") -> None:
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


def hashed_source(source: pa.NativeFile, file: LandingInput, kind: str, sha256: "Hash") -> Source | None:
    """``source``, hashing the whole file while it is read; None if the file must be read again for its hash."""
    if kind not in _SEEKABLE:
        return _HashedFile(source, sha256)
    if file.size > WHOLE_BYTES:
        return None
    whole = source.read_buffer()
    sha256.update(whole)
    in_memory: Source = pa.BufferReader(whole)
    return in_memory


def content_hash(store: ObjectReader, path: str, listed: ObjectInfo | None = None) -> str:
    """SHA-256 of a whole object, in hexadecimal digits. Empty if the store can't give its bytes.

    Raises ChangedFileError if the object was deleted, or may have been replaced since it was ``listed``.
    """
    sha256 = hashlib.sha256()
    try:
        hash_object(store, path, listed, sha256)
    except NotFoundError as e:
        raise ChangedFileError(path) from e
    except DamagedFileError:
        return ""
    if listed is not None and not store.pinned:
        check_unchanged(store, listed)
    return sha256.hexdigest()


def hash_object(store: ObjectReader, path: str, listed: ObjectInfo | None, sha256: "Hash") -> None:
    """Update ``sha256`` with the content of a whole object. Raises what `open_landed` does."""
    with open_landed(store, path, listed) as source:
        while read := source.read(blocks.BLOCK_BYTES):
            sha256.update(read)


def check_unchanged(store: ObjectReader, listed: ObjectInfo) -> None:
    """Raise ChangedFileError if the object was deleted or replaced since it was ``listed``."""
    if store.head(listed.name) != listed:
        raise ChangedFileError(listed.name)


def required_columns(spec: TableSpec) -> frozenset[str]:
    """The columns that every landing file of the table must have."""
    in_files = () if spec.stamped or spec.order_in_name or spec.groups else spec.order_by
    absent = {one.column for one in spec.partition_from} | set(() if in_files else spec.order_by)
    placing = () if spec.takes_key_alone else partition_sources(spec)
    return frozenset((*spec.key, *placing, *in_files)) - absent


def under_table_names(block: Block, spec: TableSpec) -> Block:
    """The block with the table's names, which may differ from the file's by case."""
    own = {spec.table_name_of(name): name for name in block.names}
    return block if all(map(operator.eq, own.keys(), own.values())) else RenamedBlock(block, own)
