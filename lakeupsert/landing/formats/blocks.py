"""What the readers of landing files (`csvfile`, `avrofile` and others, a module for each format) share: blocks of rows.

A row's place is its index in the file for typed formats and the byte of the text at which its record begins for the others (see
`unpacked`): increasing in file order, and the same however the file is cut into blocks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from lakeupsert.landing.formats.inference import FROM_TEXT, inferred
from lakeupsert.landing.formats.leaning import Leaning
from lakeupsert.rows.convert import convert, plain
from lakeupsert.rows.datafiles import to_bytes
from lakeupsert.storage import NotFoundError
from lakeupsert.table.types import normal

BLOCK_ROWS = 1 << 16
"""Most rows of a block of a typed file. More: fewer and larger kernel calls, and memory to hold them."""
BLOCK_BYTES = 1 << 24
"""About how many bytes of a file are in memory at once (its rows, decoded, take a few times that)."""
LONGEST_RECORD = 1 << 26
"""Bytes of the longest record of a text file. A quote that is never closed makes a record of the rest of its file."""


class UnreadableFileError(Exception):
    """The file as a whole can't be read: it is set aside with this reason, and the others go on without it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


class UnplannedColumnError(UnreadableFileError):
    """The table has no such column yet. A survey of the file finds it."""


class ChangedFileError(NotFoundError):
    """The listed file is not there any more, or another one is: the attempt is repeated without it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


@dataclass(frozen=True)
class LandingInput:
    """One landing file as the driver hands it to a task.

    Attributes:
        path: name in the landing store.
        size: bytes, as listed.
        etag: as listed; another one now means another file.
        place: index in the batch, whose files are in the order of their relative paths.
        row_groups: of a Parquet file, the half-open range to read, so that several tasks share a big file; None = all.
        surveyed: False where only reading it tells which columns and fields it has.
    """

    path: str
    size: int
    etag: str
    place: int
    row_groups: tuple[int, int] | None = None
    surveyed: bool = True


@dataclass(frozen=True)
class Malformed:
    """A record that can't be split into columns."""

    place: int
    reason: str
    raw: bytes


class Block(Protocol):
    """Some rows of one file, in file order. Masks are numpy booleans, rows are numbers within the block."""

    @property
    def places(self) -> Any:
        """int64 (numpy) of every row, increasing."""

    @property
    def malformed(self) -> Sequence[Malformed]:
        """Records between these rows that became no row."""

    @property
    def names(self) -> Iterable[str]:
        """The columns that rows of this block have."""

    def convert(self, name: str, type_: Any) -> tuple[Any, Any]:
        """See `rows.convert.convert`. A column that a row lacks is null in it."""

    def type_of(self, name: str, *, typed: bool) -> Any:
        """The type of one of its columns, as a survey tells it: the file's own where these are ``typed``."""

    def brings(self, name: str) -> Any:
        """A mask of the rows that have a value in this column; of all where the file has a header or a schema that names it."""

    def has(self, name: str) -> Any:
        """A mask of the rows that have this column, and be it null."""

    def found(self, name: str, rows: Sequence[int]) -> list[Any]:
        """The values as they came, for a reason that a person reads."""

    def raw(self, rows: Sequence[int]) -> list[str]:
        """The rows, whole, as they go to quarantine."""

    def arrow(self, rows: Sequence[int]) -> list[bytes | None]:
        """The rows exactly, where `raw` is for people: an Arrow IPC stream of all of them in the first, None in the others.

        None in all, where `raw` is the line as it came.
        """


@dataclass(frozen=True)
class Opened:
    """A file whose columns are known and whose blocks are yet to be read (of one column, where it was opened so).

    Attributes:
        missing: those of the required columns that the file, as a whole, lacks.
    """

    missing: frozenset[str]
    blocks: Iterator[Block]


@dataclass(frozen=True)
class ArrowBlock:
    """A block that came as Arrow arrays (`rows.convert.decoded`): typed files, and CSV with every column as text."""

    columns: dict[str, Any]
    places: Any
    malformed: Sequence[Malformed] = field(default=())

    @property
    def names(self) -> Iterable[str]:
        return self.columns.keys()

    def convert(self, name: str, type_: Any) -> tuple[Any, Any]:
        if name not in self.columns:
            return pa.nulls(len(self.places), type_), np.zeros(len(self.places), bool)
        return convert(self.columns[name], type_)

    def type_of(self, name: str, *, typed: bool) -> Any:
        return normal(self.columns[name].type) if typed else inferred(self.columns[name], FROM_TEXT)

    def brings(self, name: str) -> Any:
        return np.full(len(self.places), name in self.columns)

    has = brings

    def found(self, name: str, rows: Sequence[int]) -> list[Any]:
        return plain(self.columns[name].take(pa.array(rows, pa.int64())))

    def raw(self, rows: Sequence[int]) -> list[str]:
        if not self.columns:
            return ["{}"] * len(rows)
        columns = [self.found(name, rows) for name in self.columns]
        encode = msgspec.json.Encoder().encode
        return [encode(dict(zip(self.columns, row, strict=True))).decode() for row in zip(*columns, strict=True)]

    def arrow(self, rows: Sequence[int]) -> list[bytes | None]:
        if not self.columns or not rows:
            return [None] * len(rows)
        table = pa.table(self.columns).take(pa.array(rows, pa.int64()))
        return [to_bytes(table), *([None] * (len(rows) - 1))]


@dataclass(frozen=True)
class Renamed:
    """A block whose columns go by other names. What goes to quarantine keeps its own.

    Attributes:
        own: of every column that it brings, by the name that it goes by, its own name in ``block``.
    """

    block: Block
    own: Mapping[str, str]

    @property
    def places(self) -> Any:
        return self.block.places

    @property
    def malformed(self) -> Sequence[Malformed]:
        return self.block.malformed

    @property
    def names(self) -> Iterable[str]:
        return self.own.keys()

    def convert(self, name: str, type_: Any) -> tuple[Any, Any]:
        if name not in self.own:
            return pa.nulls(len(self.places), type_), np.zeros(len(self.places), bool)
        return self.block.convert(self.own[name], type_)

    def type_of(self, name: str, *, typed: bool) -> Any:
        return self.block.type_of(self.own[name], typed=typed)

    def brings(self, name: str) -> Any:
        return self.block.brings(self.own[name]) if name in self.own else np.zeros(len(self.places), bool)

    def has(self, name: str) -> Any:
        return self.block.has(self.own[name]) if name in self.own else np.zeros(len(self.places), bool)

    def found(self, name: str, rows: Sequence[int]) -> list[Any]:
        return self.block.found(self.own[name], rows)

    def raw(self, rows: Sequence[int]) -> list[str]:
        return self.block.raw(rows)

    def arrow(self, rows: Sequence[int]) -> list[bytes | None]:
        return self.block.arrow(rows)


def names_in_file(block: Block) -> dict[str, str]:
    """The block's columns, each with the name that its file has for it."""
    if not isinstance(block, Renamed):
        return {name: name for name in block.names}
    inner = names_in_file(block.block)
    return {name: inner[own] for name, own in block.own.items()}


@dataclass(frozen=True)
class Columns:
    """What a text file tells: its columns (``pyarrow.Schema``), of those whose type was inferred what most values are, and what
    it calls those that have another name by `aliases`."""

    schema: Any
    leanings: dict[str, Leaning]
    own: dict[str, str] = field(default_factory=dict)


def check_names(path: str, names: Sequence[str]) -> None:
    """Raise UnreadableFileError where columns could not be told apart, or have no name to call them by."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.get(name.lower())
        if other is not None:
            what = f"more than one column named {name!r}" if other == name else f"columns {other!r} and {name!r}"
            why = "" if other == name else ", which differ by case alone and are the same to a table"
            raise UnreadableFileError(path, f"The file has {what}{why}.")
        seen[name.lower()] = name
    blank = [i + 1 for i, name in enumerate(names) if not name.strip()]
    if blank:
        raise UnreadableFileError(path, f"Column {blank[0]} of {len(names)} has no name.")
    nul = next((name for name in names if "\0" in name), None)  # where libraries in C end a name
    if nul is not None:
        raise UnreadableFileError(path, f"The column name {nul!r} has a NUL character.")


def given_types(known: Any, text_columns: frozenset[str]) -> Callable[[str], Any]:
    """The type of a text column, where it is not inferred: the table's (``pyarrow.Schema`` or None), or text by decision."""
    given = dict.fromkeys(map(str.lower, text_columns), pa.string())
    given |= {f.name.lower(): f.type for f in known} if known is not None else {}
    return lambda name: given.get(name.lower())


def absent(required: Iterable[str], names: Iterable[str]) -> frozenset[str]:
    """Those of the required columns that are not among a file's, which may differ by case."""
    found = set(map(str.lower, names))
    return frozenset(name for name in required if name.lower() not in found)


def among(names: Iterable[str], only: Collection[str] | None) -> list[str]:
    """Those of a file's columns that are asked for, whatever their case; None asks for all."""
    wanted = None if only is None else set(map(str.lower, only))
    return [name for name in names if wanted is None or name.lower() in wanted]
