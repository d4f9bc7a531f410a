"""Landing files of CSV (RFC 4180: comma, double quotes, a header; UTF-8 with or without a byte order mark).

The file is cut into records here and into fields by pyarrow, so that each row has the byte at which its record begins.
pyarrow alone can't tell: its streaming reader counts no bytes. Both must see the same records; each block compares.
"""

import csv
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv as pa_csv

from lakeupsert.engine import blocks
from lakeupsert.engine.blocks import (
    ArrowBlock,
    LandingInput,
    Malformed,
    Opened,
    UnreadableFileError,
    check_names,
    given_types,
)
from lakeupsert.engine.inference import FROM_TEXT, inferred, unify

_HEADER_BYTES = 1 << 16
_BOM = b"\xef\xbb\xbf"
_LF, _CR, _QUOTE, _COMMA = b'\n\r",'
# As pyarrow's parser has it: a quote counts only where a field begins, and after its end the field goes on as it is.
_FIELD = rb'(?:"(?:[^"]++|"")*+"[^,\r\n]*+|[^",\r\n][^,\r\n]*+|)'
_RECORD = re.compile(_FIELD + rb"(?:," + _FIELD + rb")*+(?:\r\n|\n|\r|\Z)")


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


def schema_of(source: Any, file: LandingInput, known: Any, text_columns: frozenset[str]) -> Any:
    """The header's columns (``pyarrow.Schema``); types of those neither known nor text come from all their values."""
    pieces = _pieces(source, file)
    names, first = _header(pieces, file)
    given = given_types(known, text_columns)
    types = {name: given.get(name, pa.null()) for name in names}
    unknown = [name for name in names if name not in given]
    if unknown:
        for block in _blocks(chain(first, pieces), names, unknown, file):
            for name in unknown:
                if not pa.types.is_string(types[name]):  # nothing is wider
                    types[name] = unify(types[name], inferred(block.columns[name], FROM_TEXT), typed=False)
    return pa.schema(list(types.items()))


def open_blocks(
    source: Any, file: LandingInput, required: frozenset[str], only: Collection[str] | None = None
) -> Opened:
    pieces = _pieces(source, file)
    names, first = _header(pieces, file)
    wanted = [name for name in names if only is None or name in only]
    return Opened(required - set(names), _blocks(chain(first, pieces), names, wanted, file))


def _header(pieces: Iterator[_Records], file: LandingInput) -> tuple[list[str], list[_Records]]:
    """The column names, and the records behind them that were read along; nothing of both in an empty file."""
    for piece in pieces:
        written = np.flatnonzero(~_blank(piece))
        if not len(written):
            continue
        at = int(written[0])
        try:
            if piece.unclosed and at == len(piece.starts) - 1:
                raise UnreadableFileError(file.path, "The header has a quote that is never closed.")
            names = next(csv.reader([piece.text(at).decode()]))
        except (UnicodeDecodeError, csv.Error) as e:
            raise UnreadableFileError(file.path, f"The header is not CSV in UTF-8: {e}") from e
        check_names(file.path, names)
        rest = _Records(piece.offset, piece.data, piece.starts[at + 1 :], piece.ends[at + 1 :], piece.unclosed)
        return names, [rest]
    return [], []


def _blocks(
    pieces: Iterator[_Records], names: Sequence[str], wanted: Sequence[str], file: LandingInput
) -> Iterator[ArrowBlock]:
    for piece in pieces:
        if len(piece.starts):
            yield _block(piece, names, wanted, file)


def _block(piece: _Records, names: Sequence[str], wanted: Sequence[str], file: LandingInput) -> ArrowBlock:
    left = ~_blank(piece)
    refused: list[tuple[int, str]] = []
    if piece.unclosed:
        refused.append((len(left) - 1, "A quote is opened and never closed."))
    text = piece.data[piece.starts[0] :]
    if not text.isascii() and not _is_utf8(text):
        refused += [(i, "Not UTF-8.") for i in np.flatnonzero(left).tolist() if not _is_utf8(piece.text(i))]
    left[[i for i, _ in refused]] = False
    places = np.flatnonzero(left)
    if not left.all():
        text = b"".join(piece.data[piece.starts[i] : piece.ends[i]] for i in places)

    columns = _split(text, names, wanted, lambda row, why: refused.append((int(places[row]), why)))
    left[[i for i, _ in refused]] = False
    starts = piece.starts[left] + piece.offset
    if any(len(column) != len(starts) for column in columns.values()):
        raise UnreadableFileError(file.path, f"Its records from byte {piece.offset} on can't be told apart.")
    malformed = [Malformed(int(piece.starts[i]) + piece.offset, why, piece.text(i)) for i, why in sorted(refused)]
    return ArrowBlock(columns, starts, malformed)


def _split(
    text: bytes, names: Sequence[str], wanted: Sequence[str], refuse: Callable[[int, str], None]
) -> dict[str, Any]:
    """The records of ``text`` as text columns. Those with another number of fields are left out and told by row."""
    if not text:  # pyarrow takes no empty file
        return {name: pa.array([], pa.string()) for name in wanted}

    def skip(row: Any) -> str:
        refuse(row.number - 1, f"{row.actual_columns} fields, where the header has {len(names)}.")
        return "skip"

    table = pa_csv.read_csv(
        pa.py_buffer(_BOM + text),  # pyarrow skips one such mark, which must not be the first character of a value
        # One block and one thread: only so are its row numbers true.
        read_options=pa_csv.ReadOptions(column_names=names, block_size=len(text) + len(_BOM), use_threads=False),
        parse_options=pa_csv.ParseOptions(newlines_in_values=True, invalid_row_handler=skip),
        convert_options=pa_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),  # never inferred: 0042 would become 42
            include_columns=list(wanted),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=True,
            check_utf8=False,
        ),
    )
    return {name: table[name].combine_chunks() for name in wanted}


def _pieces(source: Any, file: LandingInput) -> Iterator[_Records]:
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
        ends, unclosed = _record_ends(data, final)
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


def _record_ends(data: bytes, final: bool) -> tuple[Any, bool]:
    """Where the records of ``data``, which begins with one, end behind their line ends; and whether a quote stays open.

    Without ``final``, what may go on in the next bytes has no end yet: also a last CR, which a LF may follow.
    """
    characters = np.frombuffer(data, np.uint8)
    is_end = characters == _LF
    if b"\r" in data:
        alone = characters == _CR
        alone[:-1] &= ~is_end[1:]
        alone[-1] &= final
        is_end |= alone
    ends = np.flatnonzero(is_end)
    unclosed = False
    if b'"' in data:
        quotes = np.flatnonzero(characters == _QUOTE)
        if _quotes_alternate(characters, quotes):
            ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
            unclosed = len(quotes) % 2 == 1
        else:
            return _record_ends_by_field(data, final)
    ends = ends + 1
    if final and len(data) and (not len(ends) or ends[-1] < len(data)):
        ends = np.append(ends, len(data))
    return ends, unclosed and final


def _quotes_alternate(characters: Any, quotes: Any) -> bool:
    """Whether every other quote opens: it begins a field, or continues one as the second of a doubled quote.

    Otherwise (`5" pipe`) some are plain characters, and counting them does not tell what is inside.
    """
    opening, closing = quotes[0::2], quotes[1::2]
    before = characters[opening - 1]
    begins = (opening == 0) | (before == _COMMA) | (before == _LF) | (before == _CR)
    begins[1:] |= opening[1:] == closing[: len(opening) - 1] + 1
    return bool(begins.all())


def _record_ends_by_field(data: bytes, final: bool) -> tuple[Any, bool]:
    """The same, by going through every field: five times as long, and needed for very few blocks."""
    ends: list[int] = []
    at = 0
    while at < len(data):
        record = _RECORD.match(data, at)
        if record is None:  # a quote is open
            return np.array([*ends, len(data)] if final else ends, np.int64), final
        at = record.end()
        if at == len(data) and not final and data[-1] != _LF:
            break
        ends.append(at)
    return np.array(ends, np.int64), False


def _blank(piece: _Records) -> Any:
    first = np.frombuffer(piece.data, np.uint8)[piece.starts]
    return (first == _LF) | (first == _CR)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
