"""What CSV and delimited text share: cut text files into records at line ends, and blocks of records into columns.

This module cuts records and the dialect cuts fields, so that the byte at which each row's record begins is known. Both must find
the same records, which is checked for each block.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import pyarrow as pa

from lakeupsert.config import Reading
from lakeupsert.landing.formats import blocks, dominant
from lakeupsert.landing.formats.blocks import (
    ArrowBlock,
    Columns,
    Contents,
    LandingInput,
    MalformedRecord,
    Source,
    UnreadableFileError,
    check_names,
    find_missing,
    given_types,
    select_names,
)
from lakeupsert.landing.formats.dominant import DominantType
from lakeupsert.landing.formats.inference import FROM_TEXT, infer_type, unify
from lakeupsert.rows.arrays import Indices, Mask

_HEADER_BYTES = 1 << 16
_BOM = b"\xef\xbb\xbf"
_LF, _CR = b"\n\r"


class HeaderError(Exception):
    """The first record can't be cut into names."""


@dataclass(frozen=True)
class Fields:
    """Records as text columns.

    Attributes:
        columns: the values of the records with as many fields as there are columns; null if there is no value.
        miscounted: the number of fields of every other record, by its index.
    """

    columns: dict[str, pa.Array]
    miscounted: dict[int, int]


class Dialect(Protocol):
    """How text is cut into records and records into fields."""

    reading: Reading

    def ends(self, data: bytes, *, final: bool) -> tuple[Indices, bool]:
        """Where the records of ``data``, which begins with one, end, line ends included; and whether a quote stays open.

        Unless ``final``, a record that may continue in the next bytes has no end yet; nor has a last CR, which a LF may follow.
        """

    def names(self, record: bytes) -> list[str]:
        """The fields of a header. Raises HeaderError, UnicodeDecodeError."""

    def count(self, record: bytes) -> int:
        """The number of fields in a record, whatever they hold."""

    def split(self, text: bytes, names: Sequence[str], wanted: Sequence[str]) -> Fields:
        """Cut whole records into the ``wanted`` columns of ``names``."""


@dataclass(frozen=True)
class _Records:
    """Whole records: bytes ``starts[i]`` to ``ends[i]`` of ``data``, which begins at byte ``offset`` of the file.

    ``unclosed``: the last record opens a quote that the file never closes.
    """

    offset: int
    data: bytes
    starts: Indices
    ends: Indices
    unclosed: bool

    def text(self, i: int) -> bytes:
        return self.data[self.starts[i] : self.ends[i]].rstrip(b"\r\n")


def schema_of(
    source: Source, file: LandingInput, dialect: Dialect, known: pa.Schema | None, text_columns: frozenset[str]
) -> Columns:
    """The columns of a file. Types that are neither in ``known`` nor in ``text_columns`` are inferred from all values."""
    pieces = _pieces(source, file, dialect)
    names, first = _columns(pieces, file, dialect)
    given = given_types(known, text_columns)
    types = {name: given(name) or pa.null() for name in names}
    unknown = [name for name in names if given(name) is None]
    dominant_types: dict[str, DominantType | None] = {}
    for block in _blocks(chain(first, pieces), names, unknown, file, dialect) if unknown else ():
        for name in unknown:
            text, type_ = block.columns[name], pa.string()
            if not pa.types.is_string(types[name]):  # no type is wider
                type_ = infer_type(text, FROM_TEXT)
                types[name] = unify(types[name], type_, typed=False)
            more = dominant.from_text(text, type_, FROM_TEXT, block.places, file.path)
            dominant_types[name] = dominant.combine(dominant_types.get(name), more)
    return Columns(pa.schema(list(types.items())), {name: one for name, one in dominant_types.items() if one})


def open_blocks(
    source: Source, file: LandingInput, dialect: Dialect, required: frozenset[str], only: Collection[str] | None = None
) -> Contents:
    pieces = _pieces(source, file, dialect)
    names, first = _columns(pieces, file, dialect)
    return Contents(
        find_missing(required, names), _blocks(chain(first, pieces), names, select_names(names, only), file, dialect)
    )


def line_ends(data: bytes, *, final: bool) -> Indices:
    """The last character of every line end. Unless ``final``, a last CR does not count, since a LF may follow."""
    characters = np.frombuffer(data, np.uint8)
    is_end = characters == _LF
    if b"\r" in data:
        alone = characters == _CR
        alone[:-1] &= ~is_end[1:]
        alone[-1] &= final
        is_end |= alone
    return np.flatnonzero(is_end)


def record_ends(breaks: Indices, data: bytes, *, final: bool) -> Indices:
    """Where records end, after their line ends ``breaks``. If ``final``, a last record without a line end counts too."""
    ends = breaks + 1
    if final and len(data) and (not len(ends) or ends[-1] < len(data)):
        ends = np.append(ends, len(data))
    return ends


def _columns(pieces: Iterator[_Records], file: LandingInput, dialect: Dialect) -> tuple[list[str], list[_Records]]:
    """The column names, and the first records after the header, which were read with it; neither in an empty file."""
    reading = dialect.reading
    for piece in pieces:
        filled = np.flatnonzero(~_blank(piece))
        if not len(filled):
            continue
        at = int(filled[0])
        if not reading.has_header:
            try:
                names = list(reading.columns) or [f"_c{i}" for i in range(dialect.count(piece.text(at)))]
            except pa.ArrowInvalid as e:
                raise UnreadableFileError(
                    file.path, f"The number of columns in its first record can't be found: {e}"
                ) from e
            return names, [piece]
        try:
            if piece.unclosed and at == len(piece.starts) - 1:
                raise UnreadableFileError(file.path, "The header has a quote that is never closed.")
            names = dialect.names(piece.text(at))
        except (UnicodeDecodeError, HeaderError) as e:
            raise UnreadableFileError(file.path, f"The header is not CSV in {reading.encoding.upper()}: {e}") from e
        check_names(file.path, names)
        rest = _Records(piece.offset, piece.data, piece.starts[at + 1 :], piece.ends[at + 1 :], piece.unclosed)
        return names, [rest]
    return [], []


def _blocks(
    pieces: Iterator[_Records], names: Sequence[str], wanted: Sequence[str], file: LandingInput, dialect: Dialect
) -> Iterator[ArrowBlock]:
    for piece in pieces:
        if len(piece.starts):
            yield _block(piece, names, wanted, file, dialect)


def _block(
    piece: _Records, names: Sequence[str], wanted: Sequence[str], file: LandingInput, dialect: Dialect
) -> ArrowBlock:
    reading = dialect.reading
    is_row = ~_blank(piece)
    refused: list[tuple[int, str]] = []
    if piece.unclosed:
        refused.append((len(is_row) - 1, "A quote is opened and never closed."))
    text = piece.data[piece.starts[0] :]
    if not text.isascii() and not _is_utf8(text):
        what = f"Not {reading.encoding.upper()}."
        refused += [(i, what) for i in np.flatnonzero(is_row).tolist() if not _is_utf8(piece.text(i))]
    is_row[[i for i, _ in refused]] = False
    records = np.flatnonzero(is_row)
    if not is_row.all():
        text = b"".join(piece.data[piece.starts[i] : piece.ends[i]] for i in records)

    fields = dialect.split(text, names, wanted)
    where = "the header" if reading.has_header else "`columns`" if reading.columns else "the first record"
    what = f"fields, but {where} has {len(names)}."
    refused += [(int(records[row]), f"{count} {what}") for row, count in fields.miscounted.items()]
    is_row[[i for i, _ in refused]] = False
    starts = piece.starts[is_row] + piece.offset
    if any(len(column) != len(starts) for column in fields.columns.values()):
        raise UnreadableFileError(file.path, f"Its records can't be told apart from byte {piece.offset} on.")
    malformed = [
        MalformedRecord(int(piece.starts[i]) + piece.offset, reason, piece.text(i)) for i, reason in sorted(refused)
    ]
    return ArrowBlock(fields.columns, starts, malformed)


def _pieces(source: Source, file: LandingInput, dialect: Dialect) -> Iterator[_Records]:
    """The file's records, about a block at a time. The first piece is small, for callers that need only the header."""
    offset, data, size = 0, b"", min(_HEADER_BYTES, blocks.BLOCK_BYTES)
    final = False
    while not final:
        read = source.read(size)
        final, data, size = not read, data + read, blocks.BLOCK_BYTES
        if offset == 0:
            if len(data) < len(_BOM) and not final:
                continue
            if data.startswith(_BOM):
                offset, data = len(_BOM), data[len(_BOM) :]
        ends, unclosed = dialect.ends(data, final=final)
        longest = max(np.diff(ends, prepend=0).max(initial=0), 0 if len(ends) else len(data))
        if longest > blocks.LONGEST_RECORD:
            raise UnreadableFileError(
                file.path,
                f"After byte {offset}, a record has more than {blocks.LONGEST_RECORD} bytes: "
                "probably a quote that is never closed.",
            )
        if len(ends):
            used = int(ends[-1])
            yield _Records(offset, data[:used], np.concatenate(([0], ends[:-1])), ends, unclosed)
            offset, data = offset + used, data[used:]


def _blank(piece: _Records) -> Mask:
    first = np.frombuffer(piece.data, np.uint8)[piece.starts]
    blank: Mask = (first == _LF) | (first == _CR)
    return blank


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
