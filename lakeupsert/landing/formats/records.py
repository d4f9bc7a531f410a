"""What CSV and delimited text share: cut text files into records at line ends, and blocks of records into columns.

This module cuts records and the dialect cuts fields, so that the byte at which each row's record begins is known. Both must find
the same records, which is checked for each block.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
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
    find_missing,
    flaw_of,
    given_types,
    select_names,
)
from lakeupsert.landing.formats.dominant import DominantType
from lakeupsert.landing.formats.escapes import without_line_end
from lakeupsert.landing.formats.inference import FROM_TEXT, infer_type, unify, with_points
from lakeupsert.landing.formats.limits import check_names
from lakeupsert.landing.formats.lines import BOM, CR, LF, TextLines, is_utf8
from lakeupsert.landing.formats.only import names_in_files, own_rows
from lakeupsert.rows.arrays import Indices, Mask
from lakeupsert.table.misnamed import describe_separator

_HEADER_BYTES = 1 << 16


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

    def flaws(self, data: bytes, starts: Indices, ends: Indices) -> dict[int, str]:
        """Why some of the records, bytes ``starts[i]`` to ``ends[i]`` of ``data``, can't be cut into fields: by their index."""

    def split(self, text: bytes, names: Sequence[str], wanted: Sequence[str]) -> Fields:
        """Cut whole records without `flaws` into the ``wanted`` columns of ``names``."""


ChooseDialect = Callable[[Reading, bytes], tuple[Dialect, int]]
"""The dialect of a file by its first bytes, and how many of these are not part of a record."""


@dataclass(frozen=True)
class _Records:
    """Whole records: bytes ``starts[i]`` to ``ends[i]`` of ``part``.

    ``unclosed``: the last record opens a quote that the file never closes.
    """

    part: TextLines
    starts: Indices
    ends: Indices
    unclosed: bool

    def text(self, i: int) -> bytes:
        return without_line_end(self.part.text[self.starts[i] : self.ends[i]])


def schema_of(
    choose: ChooseDialect,
    source: Source,
    file: LandingInput,
    reading: Reading,
    known: pa.Schema | None,
    text_columns: frozenset[str],
) -> Columns:
    """The columns of a file. Types that are neither in ``known`` nor in ``text_columns`` are inferred from all values."""
    dialect, pieces = _open(source, file, reading, choose)
    names, first = _columns(pieces, file, dialect)
    given = given_types(known, text_columns)
    types = {name: given(name) or pa.null() for name in names}
    unknown = [name for name in names if given(name) is None]
    dominant_types: dict[str, DominantType | None] = {}
    rows, flaw = 0, None
    wanted = select_names(names, [*unknown, *names_in_files(reading)])
    blocks = own_rows(_blocks(chain(first, pieces), names, wanted, file, dialect), reading)
    for block in blocks if unknown else ():
        block = block.without(file.refused) if file.refused else block
        rows += len(block.places)
        flaw = flaw or flaw_of(block.malformed)
        for name in unknown:
            written, type_ = block.columns[name], pa.string()
            text = with_points(written) if block.decimal_comma else written
            if not pa.types.is_string(types[name]):  # no type is wider
                type_ = infer_type(text, FROM_TEXT)
                types[name] = unify(types[name], type_, typed=False)
            more = dominant.from_text(text, type_, FROM_TEXT, block.places, file.path, written)
            dominant_types[name] = dominant.combine(dominant_types.get(name), more)
    found = {name: one for name, one in dominant_types.items() if one}
    rowless = not rows and not flaw and bool(unknown or not names)
    return Columns(pa.schema(list(types.items())), found, rowless=rowless, flaw=None if rows else flaw)


def open_blocks(
    choose: ChooseDialect,
    source: Source,
    file: LandingInput,
    reading: Reading,
    required: frozenset[str],
    only: Collection[str] | None = None,
) -> Contents:
    dialect, pieces = _open(source, file, reading, choose)
    names, first = _columns(pieces, file, dialect)
    return Contents(
        find_missing(required, names), _blocks(chain(first, pieces), names, select_names(names, only), file, dialect)
    )


def record_ends(breaks: Indices, data: bytes, *, final: bool) -> Indices:
    """Where records end, after their line ends ``breaks``. If ``final``, a last record without a line end counts too."""
    ends = breaks + 1
    if final and len(data) and (not len(ends) or ends[-1] < len(data)):
        ends = np.append(ends, len(data))
    return ends


def named(names: Sequence[str]) -> list[str]:
    """Column names, with those of Spark (`_c0`, `_c1`, ...) for columns that have none, as the row numbers of R and pandas."""
    taken = {name.lower() for name in names}
    free = (f"_c{i}" for i in count(len(names)) if f"_c{i}" not in taken)
    return [name if name.strip() else f"_c{i}" if f"_c{i}" not in taken else next(free) for i, name in enumerate(names)]


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
                names = list(reading.columns) or named([""] * dialect.count(piece.text(at)))
            except pa.ArrowInvalid as e:
                raise UnreadableFileError(
                    file.path, f"The number of columns in its first record can't be found: {e}"
                ) from e
            check_names(file.path, names)
            return names, [piece]
        try:
            if piece.unclosed and at == len(piece.starts) - 1:
                raise UnreadableFileError(file.path, "The header has a quote that is never closed.")
            names = named(dialect.names(piece.text(at)))
        except (UnicodeDecodeError, HeaderError) as e:
            raise UnreadableFileError(file.path, f"The header is not CSV in {reading.encoding.upper()}: {e}") from e
        check_names(file.path, names)
        rest = _Records(piece.part, piece.starts[at + 1 :], piece.ends[at + 1 :], piece.unclosed)
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
    text = piece.part.text[piece.starts[0] :]
    if not text.isascii() and not is_utf8(text):
        what = f"Not {reading.encoding.upper()}."
        refused += [(i, what) for i in np.flatnonzero(is_row).tolist() if not is_utf8(piece.text(i))]
    known = {i for i, _ in refused}
    flaws = dialect.flaws(piece.part.text, piece.starts, piece.ends)
    refused += [(i, what) for i, what in flaws.items() if is_row[i] and i not in known]
    is_row[[i for i, _ in refused]] = False
    records = np.flatnonzero(is_row)
    if not is_row.all():
        text = b"".join(piece.part.text[piece.starts[i] : piece.ends[i]] for i in records)

    fields = dialect.split(text, names, wanted)
    where = "the header" if reading.has_header else "`columns`" if reading.columns else "the first record"
    what = f"fields, but {where} has {len(names)}.{describe_separator(names) if reading.has_header else ''}"
    refused += [(int(records[row]), f"{count} {what}") for row, count in fields.miscounted.items()]
    is_row[[i for i, _ in refused]] = False
    starts = piece.starts[is_row] + piece.part.offset
    if any(len(column) != len(starts) for column in fields.columns.values()):
        raise UnreadableFileError(file.path, f"Its records can't be separated from byte {piece.part.offset} on.")
    refused.sort()
    places = [int(piece.starts[i]) + piece.part.offset for i, _ in refused]
    malformed = [
        MalformedRecord(place, reason, piece.text(i), line)
        for (i, reason), place, line in zip(refused, places, piece.part.numbers(places) if places else (), strict=True)
    ]
    return ArrowBlock(fields.columns, starts, malformed, piece.part, reading.decimal_separator == ",")


def _open(
    source: Source, file: LandingInput, reading: Reading, choose: ChooseDialect
) -> tuple[Dialect, Iterator[_Records]]:
    """The dialect and the records of a file."""
    head, size = b"", min(_HEADER_BYTES, blocks.BLOCK_BYTES)
    while (read := source.read(size)) and len(head := head + read) < _HEADER_BYTES:
        if head.lstrip(b"\xef\xbb\xbf\r\n").count(b"\n") > 1:
            break  # a line ends there that is neither blank nor says how Excel reads the others
    begin = len(BOM) if head.startswith(BOM) else 0
    dialect, used = choose(reading, head[begin:])
    whole = TextLines(1, 0, head)
    return dialect, _pieces(source, file, dialect, whole.behind(TextLines(1, 0, head[: begin + used])))


def _pieces(source: Source, file: LandingInput, dialect: Dialect, part: TextLines) -> Iterator[_Records]:
    """The file's records, about a block at a time. The first piece is small, for callers that need only the header.

    ``part`` has been read already.
    """
    final = False
    while part.text or not final:
        ends, unclosed = dialect.ends(part.text, final=final)
        longest = max(np.diff(ends, prepend=0).max(initial=0), 0 if len(ends) else len(part.text))
        if longest > blocks.LONGEST_RECORD:
            raise UnreadableFileError(
                file.path,
                f"After byte {part.offset}, a record has more than {blocks.LONGEST_RECORD} bytes: "
                "probably a quote that is never closed.",
            )
        if len(ends):
            whole = TextLines(part.first, part.offset, part.text[: int(ends[-1])])
            yield _Records(whole, np.concatenate(([0], ends[:-1])), ends, unclosed)
            part = part.behind(whole)
        final = not (read := source.read(blocks.BLOCK_BYTES))
        part = TextLines(part.first, part.offset, part.text + read)


def _blank(piece: _Records) -> Mask:
    first = np.frombuffer(piece.part.text, np.uint8)[piece.starts]
    blank: Mask = (first == LF) | (first == CR)
    return blank
