"""Blocks of rows: what the readers of all formats (`csvfile`, `avrofile` and others, a module for each) return.

A row's place is its index in a typed file, or the byte of the text at which its record begins (see `unpacked`). Places increase
in file order, and do not depend on how the file is cut into blocks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import msgspec
import numpy as np
import pyarrow as pa

from lakeupsert.landing.formats.dominant import DominantType
from lakeupsert.landing.formats.inference import FROM_TEXT, convert_text, infer_type, with_points
from lakeupsert.landing.formats.lines import TextLines
from lakeupsert.rows.arrays import Indices, Mask, Rows
from lakeupsert.rows.convert import Converted, as_mask, convert
from lakeupsert.rows.datafiles import to_bytes
from lakeupsert.rows.tojson import to_json_values
from lakeupsert.storage import DamagedObjectError, NotFoundError, ObjectInfo
from lakeupsert.table.types import is_number, normalize

BLOCK_ROWS = 1 << 16
"""Most rows in a block of a typed file. More rows mean fewer and larger kernel calls, and more memory."""
BLOCK_BYTES = 1 << 24
"""About how many bytes of a file are in memory at once. Its decoded rows take a few times that."""
LONGEST_RECORD = 1 << 26
"""Most bytes of one record of a text file. After a quote that is never closed, the rest of the file is one record."""


_DECIMAL_COMMA = {b"decimal_separator": b","}
"""In the schema's metadata of quarantined rows."""


class UnreadableFileError(Exception):
    """The file as a whole can't be read. It is set aside with this reason, and the others are read without it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


class DamagedFileError(UnreadableFileError):
    """The store can't give its bytes. Once it is mended, its etag may be the same."""

    @classmethod
    def because(cls, path: str, why: str) -> "DamagedFileError":
        return cls(path, f"Its bytes can't be read from the archive: {why}"[:500])


class UnplannedColumnError(UnreadableFileError):
    """The table does not have such a column yet. A survey of the file finds it."""


class ChangedFileError(NotFoundError):
    """The listed file was deleted or replaced. The attempt is repeated without it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Source(Protocol):
    """What a format's reader reads: an opened file (``pyarrow.NativeFile``), or one that is decompressed or hashed on the way."""

    def read(self, size: int, /) -> bytes: ...

    def seek(self, place: int, /) -> object: ...


@dataclass(frozen=True)
class LandingInput:
    """One landing file as the driver passes it to a task.

    Attributes:
        path: name in the landing store.
        size: bytes, as listed.
        etag: as listed; if it differs now, the file is another one.
        place: index in the batch, whose files are in the order of `landing_dates.arrival_order`.
        row_groups: the half-open range of a Parquet file to read, so that several tasks share a big file; None for all.
        surveyed: False if its columns and fields are known only once it is read.
        refused: places of rows that a survey of text leaves out: what goes to quarantine decides no type.
    """

    path: str
    size: int
    etag: str
    place: int
    row_groups: tuple[int, int] | None = None
    surveyed: bool = True
    refused: tuple[int, ...] = ()

    @property
    def listed(self) -> ObjectInfo:
        return ObjectInfo(self.path, self.size, self.etag, 0.0)


@contextmanager
def unreadable_if_damaged(file: LandingInput, kind: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise UnreadableFileError instead of Arrow's errors and of ``errors``: the bytes are not what ``kind`` says."""
    try:
        yield
    except (pa.ArrowException, OSError, *errors) as e:
        if isinstance(e, OSError) and e.errno is not None:
            raise  # the disk or the network, not the file
        if DamagedObjectError.__name__ in str(e):  # of which ORC's reader keeps the text alone
            raise DamagedFileError.because(file.path, str(e).partition(" Detail: ")[0]) from e
        what = f"{type(e).__name__}: {e}" if isinstance(e, errors) else e
        raise UnreadableFileError(file.path, f"Not readable as {kind} ({file.size} bytes): {what}"[:500]) from e


@dataclass(frozen=True)
class MalformedRecord:
    """A record that can't be split into columns; ``line`` is the line of a text file in which it begins, counted from 1.

    ``truncate``: the fields of the event itself if it is one that empties its source table; with a ``version``, only of rows of
    lower versions, so it may change nothing (`landing.origins`).
    """

    place: int
    reason: str
    raw: bytes
    line: int | None = None
    truncate: Mapping[str, object] | None = None
    version: int | None = None

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}".rstrip(".")


def flaw_of(malformed: Iterable[MalformedRecord]) -> MalformedRecord | None:
    """The `Columns.flaw` of a file without a row that has these records."""
    others = (one for one in malformed if one.version is None)
    first = min(others, key=lambda one: one.truncate is None, default=None)
    return first and replace(first, raw=b"")


class Block(Protocol):
    """Some rows of one file, in file order. Methods take rows by their number in the block."""

    @property
    def places(self) -> Indices:
        """The place of every row in the file, increasing."""

    @property
    def malformed(self) -> Sequence[MalformedRecord]:
        """Records between these rows that could not be split into columns."""

    @property
    def skipped(self) -> Mapping[str, int]:
        """How many messages between these rows hold none, by their kind."""

    @property
    def names(self) -> Iterable[str]:
        """The columns that rows of this block have."""

    def name_in_file(self, name: str) -> str:
        """What the file calls one of its columns."""

    def convert(self, name: str, type_: pa.DataType) -> tuple[pa.Array, Mask]:
        """See `rows.convert.convert`. A row without this column has null there."""

    def texts(self, name: str) -> Converted | None:
        """The values of a column that the file has as text or integers, as text; None for a column of another type."""

    def ambiguous(self, name: str, type_: pa.DataType) -> Mapping[int, str]:
        """The rows whose value has several meanings, with these: no one can tell which is right, so `convert` finds it unfit."""

    def type_of(self, name: str, rows: Mask, *, typed: bool) -> pa.DataType:
        """The type of one of its columns as a survey of some rows reports it: the file's own type if files of this format are
        ``typed``."""

    def brings(self, name: str) -> Mask:
        """Which rows have a value in this column; all rows if the file's header or schema names it."""

    def has(self, name: str) -> Mask:
        """Which rows have this column, even if it is null."""

    def is_valid(self, name: str) -> Mask:
        """Which rows have a value other than null in one of the block's columns."""

    def originals(self, name: str, rows: Sequence[int]) -> list[object]:
        """The values as they were in the file, for a reason that a person reads."""

    def line_numbers(self, rows: Sequence[int]) -> list[int] | list[None]:
        """The lines of a text file in which rows begin, counted from 1; None for each row of other files."""

    def raw(self, rows: Sequence[int]) -> list[str]:
        """Whole rows as text, for quarantine."""

    def arrow(self, rows: Sequence[int]) -> list[bytes | None]:
        """The exact rows, if `raw` does not hold them exactly: one Arrow IPC stream of all of them in the first, then None.

        None for every row if `raw` is the line as it was in the file.
        """


@dataclass(frozen=True)
class Contents:
    """A file whose columns are known and whose blocks are yet to be read.

    Attributes:
        missing: the required columns that the file, as a whole, lacks.
    """

    missing: frozenset[str]
    blocks: Iterator[Block]


class FileBlock:
    """A block with rows as they are in a file."""

    places: Indices
    malformed: Sequence[MalformedRecord]
    text: TextLines | None
    skipped: Mapping[str, int]

    def name_in_file(self, name: str) -> str:
        return name

    def ambiguous(self, name: str, type_: pa.DataType) -> Mapping[int, str]:
        return {}

    def line_numbers(self, rows: Sequence[int]) -> list[int] | list[None]:
        return line_numbers(self.text, self.places, rows)

    def choose(self, rows: Mask, malformed: Sequence[MalformedRecord], skipped: Mapping[str, int]) -> Self:
        """The block with these of its rows."""
        raise NotImplementedError

    def without(self, places: Collection[int]) -> Self:
        """The block without the rows at some places."""
        return self.choose(~np.isin(self.places, list(places)), self.malformed, self.skipped)


@dataclass(frozen=True)
class ArrowBlock(FileBlock):
    """A block of Arrow arrays (`rows.convert.decoded`): of a typed file, or of CSV with every column as text.

    Attributes:
        text: the part of the text file that it was cut from.
        decimal_comma: numbers in text have a comma before their fraction.
    """

    columns: dict[str, pa.Array]
    places: Indices
    malformed: Sequence[MalformedRecord] = field(default=())
    text: TextLines | None = None
    decimal_comma: bool = False
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> Iterable[str]:
        return self.columns.keys()

    def convert(self, name: str, type_: pa.DataType) -> Converted:
        if name not in self.columns:
            return pa.nulls(len(self.places), type_), np.zeros(len(self.places), bool)
        column = self.columns[name]
        if self.decimal_comma and is_number(type_):
            column = with_points(column)
        return convert_text(column, type_) if pa.types.is_string(column.type) else convert(column, type_)

    def texts(self, name: str) -> Converted | None:
        column = self.columns.get(name)
        is_text = column is not None and (pa.types.is_string(column.type) or pa.types.is_integer(column.type))
        return convert(column, pa.string()) if is_text else None

    def type_of(self, name: str, rows: Mask, *, typed: bool) -> pa.DataType:
        column = self.columns[name].filter(pa.array(rows))
        if typed:
            return normalize(column.type)
        return infer_type(with_points(column) if self.decimal_comma else column, FROM_TEXT)

    def brings(self, name: str) -> Mask:
        return np.full(len(self.places), name in self.columns)

    has = brings

    def is_valid(self, name: str) -> Mask:
        return as_mask(self.columns[name].is_valid())

    def originals(self, name: str, rows: Sequence[int]) -> list[object]:
        return to_json_values(self.columns[name].take(pa.array(rows, pa.int64())))

    def raw(self, rows: Sequence[int]) -> list[str]:
        if not self.columns:
            return ["{}"] * len(rows)
        columns = [self.originals(name, rows) for name in self.columns]
        encode = msgspec.json.Encoder().encode
        return [encode(dict(zip(self.columns, row, strict=True))).decode() for row in zip(*columns, strict=True)]

    def arrow(self, rows: Sequence[int]) -> list[bytes | None]:
        if not self.columns or not rows:
            return [None] * len(rows)
        table = pa.table(self.columns).take(pa.array(rows, pa.int64()))
        if self.decimal_comma:
            table = table.replace_schema_metadata(_DECIMAL_COMMA)
        return [to_bytes(table), *([None] * (len(rows) - 1))]

    def choose(self, rows: Mask, malformed: Sequence[MalformedRecord], skipped: Mapping[str, int]) -> Self:
        columns = {name: column.filter(pa.array(rows)) for name, column in self.columns.items()}
        return replace(self, columns=columns, places=self.places[rows], malformed=malformed, skipped=skipped)

    @classmethod
    def from_arrow(cls, rows: Rows, places: Indices) -> "ArrowBlock":
        """The block of rows that `arrow` kept."""
        columns = {name: rows[name].combine_chunks() for name in rows.schema.names}
        return cls(columns, places, decimal_comma=rows.schema.metadata == _DECIMAL_COMMA)


@dataclass(frozen=True)
class RenamedBlock:
    """A block whose columns have other names. Rows that go to quarantine keep the file's names.

    Attributes:
        own: the name in ``block`` of every column, by its new name.
    """

    block: Block
    own: Mapping[str, str]

    @property
    def places(self) -> Indices:
        return self.block.places

    @property
    def malformed(self) -> Sequence[MalformedRecord]:
        return self.block.malformed

    @property
    def skipped(self) -> Mapping[str, int]:
        return self.block.skipped

    @property
    def names(self) -> Iterable[str]:
        return self.own.keys()

    def name_in_file(self, name: str) -> str:
        return self.block.name_in_file(self.own[name])

    def convert(self, name: str, type_: pa.DataType) -> tuple[pa.Array, Mask]:
        if name not in self.own:
            return pa.nulls(len(self.places), type_), np.zeros(len(self.places), bool)
        return self.block.convert(self.own[name], type_)

    def texts(self, name: str) -> Converted | None:
        return self.block.texts(self.own[name]) if name in self.own else None

    def ambiguous(self, name: str, type_: pa.DataType) -> Mapping[int, str]:
        return self.block.ambiguous(self.own[name], type_) if name in self.own else {}

    def type_of(self, name: str, rows: Mask, *, typed: bool) -> pa.DataType:
        return self.block.type_of(self.own[name], rows, typed=typed)

    def brings(self, name: str) -> Mask:
        return self.block.brings(self.own[name]) if name in self.own else np.zeros(len(self.places), bool)

    def has(self, name: str) -> Mask:
        return self.block.has(self.own[name]) if name in self.own else np.zeros(len(self.places), bool)

    def is_valid(self, name: str) -> Mask:
        return self.block.is_valid(self.own[name])

    def originals(self, name: str, rows: Sequence[int]) -> list[object]:
        return self.block.originals(self.own[name], rows)

    def line_numbers(self, rows: Sequence[int]) -> list[int] | list[None]:
        return self.block.line_numbers(rows)

    def raw(self, rows: Sequence[int]) -> list[str]:
        return self.block.raw(rows)

    def arrow(self, rows: Sequence[int]) -> list[bytes | None]:
        return self.block.arrow(rows)


def line_numbers(text: TextLines | None, places: Indices, rows: Sequence[int]) -> list[int] | list[None]:
    """See `Block.line_numbers`; ``places`` are those of all rows of the block."""
    return text.numbers(places[list(rows)]) if text is not None and rows else [None] * len(rows)


def names_in_file(block: Block) -> dict[str, str]:
    """The name that the file has for each column of the block."""
    return {name: block.name_in_file(name) for name in block.names}


@dataclass(frozen=True)
class Columns:
    """The columns of a file.

    Attributes:
        dominant_types: the type of most values of each column whose type was inferred.
        own: the file's own name of each column that `aliases` rename.
        rowless: the file has a header, or messages of an envelope, and no row.
        flaw: of a text file without a row, its first truncate, or else its first record that can't be read; not its bytes.
        stated: of a text file, the columns whose types its messages state.
        row_groups: number of row groups of a Parquet file; 0 for other formats, whose files tasks can't share.
        rows: number of rows in the footer of a Parquet file; None for other formats.
    """

    schema: pa.Schema
    dominant_types: dict[str, DominantType] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)
    rowless: bool = False
    flaw: MalformedRecord | None = None
    stated: frozenset[str] = frozenset()
    row_groups: int = 0
    rows: int | None = None


def given_types(known: pa.Schema | None, text_columns: frozenset[str]) -> Callable[[str], pa.DataType | None]:
    """The type of a text column if it is not to be inferred: the table's type, or text for ``text_columns``."""
    given = dict.fromkeys(map(str.lower, text_columns), pa.string())
    given |= {f.name.lower(): f.type for f in known} if known is not None else {}
    return lambda name: given.get(name.lower())


def find_missing(required: Iterable[str], names: Iterable[str]) -> frozenset[str]:
    """The required columns that a file lacks; case does not matter."""
    own = set(map(str.lower, names))
    return frozenset(name for name in required if name.lower() not in own)


def select_names(names: Iterable[str], only: Collection[str] | None) -> list[str]:
    """The columns of a file that are in ``only``, whatever their case; None selects all."""
    wanted = None if only is None else set(map(str.lower, only))
    return [name for name in names if wanted is None or name.lower() in wanted]
