"""Text files cut into records at line ends, and blocks of records into columns: what CSV and delimited text share.

Records are cut here and fields by the dialect, so that each row has the byte at which its record begins. Both must see the
same records; each block compares.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from lakeupsert.config import Reading
from lakeupsert.landing.formats import blocks, leaning
from lakeupsert.landing.formats.blocks import (
    ArrowBlock,
    Columns,
    LandingInput,
    Malformed,
    Opened,
    UnreadableFileError,
    absent,
    among,
    check_names,
    given_types,
)
from lakeupsert.landing.formats.inference import FROM_TEXT, inferred, unify
from lakeupsert.landing.formats.leaning import Leaning

_HEADER_BYTES = 1 << 16
_BOM = b"\xef\xbb\xbf"
_LF, _CR = b"\n\r"

Refuse = Callable[[int, int], None]
"""Called with the number of a row that has another number of fields than there are columns, and that number."""


class HeaderError(Exception):
    """The first record can't be cut into names."""


class Dialect(Protocol):
    """How records are told apart and cut into fields."""

    reading: Reading

    def ends(self, data: bytes, final: bool) -> tuple[Any, bool]:
        """Where the records of ``data``, which begins with one, end behind their line ends; and whether a quote stays open.

        Without ``final``, what may go on in the next bytes has no end yet: also a last CR, which a LF may follow.
        """

    def names(self, record: bytes) -> list[str]:
        """The fields of a header. Raises HeaderError, UnicodeDecodeError."""

    def count(self, record: bytes) -> int:
        """How many fields a record has, whatever is in them."""

    def split(self, text: bytes, names: Sequence[str], wanted: Sequence[str], refuse: Refuse) -> dict[str, Any]:
        """Whole records as text columns, null where there is no value; those that are refused are left out."""


@dataclass(frozen=True)
class _Records:
    """Whole records: bytes ``starts[i]`` to ``ends[i]`` of ``data``, which begins at byte ``offset`` of the file.

    ``unclosed``: the last one begins a quote that the file never closes.
    """

    offset: int
    data: bytes
    starts: Any
    ends: Any
    unclosed: bool

    def text(self, i: int) -> bytes:
        return self.data[self.starts[i] : self.ends[i]].rstrip(b"\r\n")


def schema_of(source: Any, file: LandingInput, dialect: Dialect, known: Any, text_columns: frozenset[str]) -> Columns:
    """The file's columns; types of those neither known nor text come from all their values."""
    pieces = _pieces(source, file, dialect)
    names, first = _columns(pieces, file, dialect)
    given = given_types(known, text_columns)
    types = {name: given(name) or pa.null() for name in names}
    unknown = [name for name in names if given(name) is None]
    leanings: dict[str, Leaning | None] = {}
    for block in _blocks(chain(first, pieces), names, unknown, file, dialect) if unknown else ():
        for name in unknown:
            text, type_ = block.columns[name], pa.string()
            if not pa.types.is_string(types[name]):  # nothing is wider
                type_ = inferred(text, FROM_TEXT)
                types[name] = unify(types[name], type_, typed=False)
            more = leaning.of_text(text, type_, FROM_TEXT, block.places, file.path)
            leanings[name] = leaning.together(leanings.get(name), more)
    return Columns(pa.schema(list(types.items())), {name: one for name, one in leanings.items() if one})


def open_blocks(
    source: Any, file: LandingInput, dialect: Dialect, required: frozenset[str], only: Collection[str] | None = None
) -> Opened:
    pieces = _pieces(source, file, dialect)
    names, first = _columns(pieces, file, dialect)
    return Opened(absent(required, names), _blocks(chain(first, pieces), names, among(names, only), file, dialect))


def line_ends(data: bytes, final: bool) -> Any:
    """Where lines end, before their line ends; without ``final`` a last CR ends none, since a LF may follow."""
    characters = np.frombuffer(data, np.uint8)
    is_end = characters == _LF
    if b"\r" in data:
        alone = characters == _CR
        alone[:-1] &= ~is_end[1:]
        alone[-1] &= final
        is_end |= alone
    return np.flatnonzero(is_end)


def behind(ends: Any, data: bytes, final: bool) -> Any:
    """The places behind these line ends; with ``final`` also that behind what has no line end."""
    ends = ends + 1
    if final and len(data) and (not len(ends) or ends[-1] < len(data)):
        ends = np.append(ends, len(data))
    return ends


def _columns(pieces: Iterator[_Records], file: LandingInput, dialect: Dialect) -> tuple[list[str], list[_Records]]:
    """The column names, and the records that were read along; nothing of both in an empty file."""
    reading = dialect.reading
    for piece in pieces:
        written = np.flatnonzero(~_blank(piece))
        if not len(written):
            continue
        at = int(written[0])
        if not reading.has_header:
            try:
                names = list(reading.columns) or [f"_c{i}" for i in range(dialect.count(piece.text(at)))]
            except pa.ArrowInvalid as e:
                raise UnreadableFileError(
                    file.path, f"Its first record does not tell how many columns it has: {e}"
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
    left = ~_blank(piece)
    refused: list[tuple[int, str]] = []
    if piece.unclosed:
        refused.append((len(left) - 1, "A quote is opened and never closed."))
    text = piece.data[piece.starts[0] :]
    if not text.isascii() and not _is_utf8(text):
        what = f"Not {reading.encoding.upper()}."
        refused += [(i, what) for i in np.flatnonzero(left).tolist() if not _is_utf8(piece.text(i))]
    left[[i for i, _ in refused]] = False
    places = np.flatnonzero(left)
    if not left.all():
        text = b"".join(piece.data[piece.starts[i] : piece.ends[i]] for i in places)

    where = "the header" if reading.has_header else "`columns`" if reading.columns else "the first record"

    def refuse(row: int, fields: int) -> None:
        refused.append((int(places[row]), f"{fields} fields, where {where} has {len(names)}."))

    columns = dialect.split(text, names, wanted, refuse)
    left[[i for i, _ in refused]] = False
    starts = piece.starts[left] + piece.offset
    if any(len(column) != len(starts) for column in columns.values()):
        raise UnreadableFileError(file.path, f"Its records from byte {piece.offset} on can't be told apart.")
    malformed = [Malformed(int(piece.starts[i]) + piece.offset, why, piece.text(i)) for i, why in sorted(refused)]
    return ArrowBlock(columns, starts, malformed)


def _pieces(source: Any, file: LandingInput, dialect: Dialect) -> Iterator[_Records]:
    """The file's records, about a block of them at a time; the first piece is small, for who needs the header only."""
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
        ends, unclosed = dialect.ends(data, final)
        longest = max(np.diff(ends, prepend=0).max(initial=0), 0 if len(ends) else len(data))
        if longest > blocks.LONGEST_RECORD:
            raise UnreadableFileError(
                file.path,
                f"A record of more than {blocks.LONGEST_RECORD} bytes begins after byte {offset}: "
                "probably a quote that is never closed.",
            )
        if len(ends):
            used = int(ends[-1])
            yield _Records(offset, data[:used], np.concatenate(([0], ends[:-1])), ends, unclosed)
            offset, data = offset + used, data[used:]


def _blank(piece: _Records) -> Any:
    first = np.frombuffer(piece.data, np.uint8)[piece.starts]
    return (first == _LF) | (first == _CR)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
