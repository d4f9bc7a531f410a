"""A landing file from a part of it: its first rows, its first bytes, the line of a value, about how many rows a partition has."""

from collections import Counter
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.config import Reading
from lakeupsert.landing.content import open_landed
from lakeupsert.landing.files import Reader, Survey, required_columns, under_table_names
from lakeupsert.landing.formats import blocks
from lakeupsert.landing.formats.blocks import LandingInput, Source, UnreadableFileError
from lakeupsert.landing.formats.dominant import Example
from lakeupsert.landing.formats.folders import folder_values
from lakeupsert.landing.formats.jsonarray import array_begin, cut_off
from lakeupsert.landing.formats.registry import LandingFormat, readable_format
from lakeupsert.landing.formats.unpacked import ReadAhead, is_plain, is_utf16, open_text
from lakeupsert.landing.partitions import derived_columns, partition_names, partition_sources
from lakeupsert.rows.arrays import Rows
from lakeupsert.storage import NotFoundError, ObjectReader
from lakeupsert.table.spec import TableSpec

_DEFAULT_READING = Reading()
_PIECES, _PIECE_BYTES = 16, 1 << 13  # most places to read in a text file for a preview, and the fewest bytes at each


@dataclass(frozen=True)
class Preview:
    """Which partitions a file touches, by its partition columns.

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
    kind, whole = readable_format(file, reading), True
    with open_landed(store, file.path) as source:
        reader = Reader.of(source, file, kind, reading)
        if not kind.typed:
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
    first = Survey(
        path=file.path, schema=schema, typed=kind.typed, dominant_types=columns.dominant_types, own=columns.own
    )
    return Beginning(pa.concat_tables(tables), first, whole and wanted > 0)


def line_of(store: ObjectReader, example: Example, reading: Reading) -> int | None:
    """The line of a text file that a value is in, counted from 1; None if the file was deleted or can't be read."""
    file = LandingInput(example.path, 0, "", place=0)
    distance, line = example.place, 1
    try:
        with open_landed(store, example.path) as source:
            text = Reader.of(source, file, readable_format(file, reading), reading).source
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
        kind = readable_format(file, reading)
        with open_landed(store, file.path, file.listed) as source:
            sampled = not kind.seekable and file.size > size
            pieces = None
            if sampled and not kind.typed and is_plain(file.path, reading.encoding):
                pieces = _pieces_of(source, file.size, size, kind)
            ahead = ReadAhead(source)
            if pieces is not None:
                share = max(len(pieces), 1) / file.size
                reader = Reader(pa.BufferReader(pieces), file, kind, reading)
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
                if sampled and pieces is None and ahead.tell() >= size:
                    share = ahead.tell() / file.size
                    break
    except UnreadableFileError as e:
        return Preview(file.path, {}, share, unreadable=e.reason)
    by_name = {name: round(rows / share) for name, rows in partitions.items()}
    return Preview(file.path, by_name, share, unplaced=round(unplaced / share))


def _pieces_of(source: pa.NativeFile, length: int, size: int, kind: LandingFormat) -> bytes | None:
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
    return b"".join(pieces)


def _is_array(kind: LandingFormat, head: bytes) -> bool:
    return kind.names_by_row and array_begin(head) is not None
