"""Limits of what a landing file holds, and of what it says that it holds. A file above one is set aside, and the others land.

Without limits, a small file could take a night's memory or time. Each is far above what writers produce.
"""

import re
from collections.abc import Sequence

import pyarrow as pa

from lakeupsert.landing.formats.blocks import LandingInput, UnreadableFileError

MOST_COLUMNS = 10_000
MOST_LEAVES = 40_000
"""Values of one row without lists and maps, in all levels of its structs."""
DEEPEST = 64
"""Lists, maps and structs within each other. Arrow and readers of Parquet go through a type by recursion."""
MOST_OF_A_BYTE = 1_000
"""Rows, or unpacked bytes, for each byte of a file. gzip packs up to 1,030 equal bytes into one."""
MOST_VALUES = 1 << 22
"""Values of one record of JSON, each of which takes 60 bytes of memory or more, and maybe two in the file."""
MOST_CELLS = 1 << 27
"""Columns, or fields of an object, by the rows of a block of JSON, which names them in each row: 10 seconds for 4 MB."""
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_FREE_ROWS = 1 << 20
_FREE_BYTES = 1 << 30


def check_rows(file: LandingInput, rows: int) -> None:
    """Raise UnreadableFileError if a file has, or says that it has, too many rows for its bytes."""
    _check(file, rows, _FREE_ROWS, "rows")


def check_unpacked(file: LandingInput, size: int) -> None:
    """As `check_rows`, for bytes that its compressed ones have become so far, or become by its footer."""
    _check(file, size, _FREE_BYTES, "bytes, unpacked")


def _check(file: LandingInput, found: int, free: int, what: str) -> None:
    most = free + MOST_OF_A_BYTE * file.size
    if found > most:
        raise UnreadableFileError(
            file.path,
            f"It has at least {found:,} {what}, and a file of {file.size:,} bytes may have {most:,} at most "
            f"({free:,}, and {MOST_OF_A_BYTE:,} for each byte). If it should, write it in smaller files.",
        )


def check_values(path: str, where: str, record: bytes) -> None:
    """Raise UnreadableFileError if a record of JSON has too many values."""
    bare = _TEXT.sub(b"", record)
    if sum(map(bare.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise UnreadableFileError(path, f"{where} has more than {MOST_VALUES:,} values.")


def check_cells(path: str, columns: int, rows: int) -> None:
    """Raise UnreadableFileError if a block of JSON has too many columns for its rows, of which each has only a few."""
    if columns * rows > MOST_CELLS:
        raise UnreadableFileError(
            path, f"In {rows:,} rows, it has {columns:,} columns: more than {MOST_CELLS:,} cells, and most are empty."
        )


def check_columns(path: str, schema: pa.Schema) -> None:
    """As `check_names`, also for types."""
    check_names(path, schema.names)
    level: list[tuple[str, pa.DataType]] = [(field.name, field.type) for field in schema]
    for _ in range(DEEPEST + 1):
        if len(level) > MOST_LEAVES:
            raise UnreadableFileError(path, f"It has more than {MOST_LEAVES:,} fields in its structs.")
        level = [(name, type_.field(i).type) for name, type_ in level for i in range(type_.num_fields)]
    if level:
        raise UnreadableFileError(
            path, f"Column {level[0][0]!r} has more than {DEEPEST} lists, maps and structs within each other."
        )


def check_names(path: str, names: Sequence[str]) -> None:
    """Raise UnreadableFileError if two columns have the same name to a table, one has no usable name, or they are too many."""
    if len(names) > MOST_COLUMNS:
        raise UnreadableFileError(
            path, f"It has {len(names):,} columns, and {MOST_COLUMNS:,} is the most that are read."
        )
    seen: dict[str, str] = {}
    for name in names:
        other = seen.get(name.lower())
        if other is not None:
            what = f"more than one column named {name!r}" if other == name else f"columns {other!r} and {name!r}"
            why = "" if other == name else ", which differ only by case and are the same column to a table"
            raise UnreadableFileError(path, f"The file has {what}{why}.")
        seen[name.lower()] = name
    blank = [i + 1 for i, name in enumerate(names) if not name.strip()]
    if blank:
        raise UnreadableFileError(path, f"Column {blank[0]} of {len(names)} has no name.")
    nul = next((name for name in names if "\0" in name), None)  # C libraries end a name there
    if nul is not None:
        raise UnreadableFileError(path, f"The column name {nul!r} has a NUL character.")
