"""Landing files of CSV: as in RFC 4180 (comma, double quotes, a header) unless `[read]` says otherwise.

pyarrow cuts records into fields. Its streaming reader does not report at which byte a record begins, so the file is cut into
records here, by the same rules as its parser's.
"""

import csv
import re
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv as pa_csv

from lakeupsert.config import Reading
from lakeupsert.landing.formats.escapes import Escapes
from lakeupsert.landing.formats.lines import BOM, CR, LF, is_utf8, line_ends
from lakeupsert.landing.formats.records import Fields, HeaderError, record_ends
from lakeupsert.rows.arrays import Indices, Mask

_MISQUOTED = (
    "Text follows a closing quote. If a backslash stands before quotes in the text, set `escape` under [tables.….read]."
)
_SEP_LINE = re.compile(rb"(?i)sep=([^\r\n])(?:\r\n|\n|\r)")
"""The first line of CSV that Excel reads everywhere: it names the delimiter."""


def choose_dialect(reading: Reading, head: bytes) -> tuple["Csv", int]:
    """The dialect of a file that begins with ``head``, and how many of these bytes only say what it is."""
    dialects = [(reading.delimiter, reading.decimal_separator)]
    dialects += [(one.delimiter, one.decimal_separator) for one in reading.dialects]
    sep = _SEP_LINE.match(head)
    if sep and sep[1].isascii() and sep[1].decode() != reading.quote_sign:
        decimals = dict(reversed(dialects))
        delimiter = sep[1].decode()
        dialects = [(delimiter, decimals.get(delimiter, reading.decimal_separator))]
    used = sep.end() if sep else 0
    of_each = [
        Csv(msgspec.structs.replace(reading, delimiter=delimiter, decimal_separator=decimal))
        for delimiter, decimal in dialects
    ]
    if len(of_each) == 1:
        return of_each[0], used
    first = re.split(rb"[\r\n]", head.lstrip(b"\r\n"), maxsplit=1)[0]
    return max(of_each, key=lambda one: one.fields_in(first)), used


class Csv:
    """See `records.Dialect`."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self._escapes = Escapes.of(reading)

    def ends(self, data: bytes, *, final: bool) -> tuple[Indices, bool]:
        escapes = self._escapes
        breaks = line_ends(data, final=final)
        unclosed = False
        characters, escaped = np.frombuffer(data, np.uint8), escapes.find_escaped(data)
        if escapes.lf_only:
            breaks = breaks[characters[breaks] == LF]
        if escapes.letters is not None:
            breaks = breaks[~escaped[breaks]]
        quotes = self._quotes(data, escaped)
        if len(quotes):
            if not self._quotes_alternate(characters, quotes, escaped):
                return self.ends_by_field(data, final=final)
            breaks = breaks[np.searchsorted(quotes, breaks) % 2 == 0]
            unclosed = len(quotes) % 2 == 1
        return record_ends(breaks, data, final=final), unclosed and final

    def _quotes(self, data: bytes, escaped: Mask) -> Indices:
        """Where quotes are that no escape precedes."""
        quote = self._escapes.quote
        if not quote or quote not in data:
            return np.array([], np.int64)
        return np.flatnonzero((np.frombuffer(data, np.uint8) == quote[0]) & ~escaped)

    def _quotes_alternate(self, characters: NDArray[np.uint8], quotes: Indices, escaped: Mask) -> bool:
        """Whether every other quote opens: it begins a field, or is the second of a doubled quote.

        Otherwise (`5" pipe`) some quotes are plain characters, and counting quotes does not show which text is quoted.
        """
        opening, closing = quotes[0::2], quotes[1::2]
        before = characters[opening - 1]
        begins = (before == ord(self.reading.delimiter)) | (before == LF)
        begins |= (before == CR) & (not self._escapes.lf_only)
        if self._escapes.letters is not None:
            begins &= ~escaped[opening - 1]
        begins |= opening == 0
        begins[1:] |= opening[1:] == closing[: len(opening) - 1] + 1
        return bool(begins.all())

    def ends_by_field(self, data: bytes, *, final: bool) -> tuple[Indices, bool]:
        """The same as `ends`, field by field: takes five times as long, and very few blocks need it."""
        ends: list[int] = []
        at = 0
        while at < len(data):
            record = self._escapes.record.match(data, at)
            if record is None:  # a quote is open
                return np.array([*ends, len(data)] if final else ends, np.int64), final
            at = record.end()
            if at == len(data) and not final and record["end"] in (b"", b"\r"):
                break
            ends.append(at)
        return np.array(ends, np.int64), False

    def flaws(self, data: bytes, starts: Indices, ends: Indices) -> dict[int, str]:
        return dict.fromkeys(self._misquoted(data, starts, ends), _MISQUOTED) | self._wrong_escapes(data, starts, ends)

    def _misquoted(self, data: bytes, starts: Indices, ends: Indices) -> list[int]:
        """The records with text after a closing quote."""
        characters, escaped = np.frombuffer(data, np.uint8), self._escapes.find_escaped(data)
        quotes = self._quotes(data, escaped)
        quotes = quotes[(quotes >= starts[0]) & (quotes < ends[-1])]
        if self._quotes_alternate(characters, quotes, escaped):
            closing = quotes[1::2]
            followed = closing[closing + 1 < ends[-1]]
            after = characters[followed + 1]
            stray = ~np.isin(
                after, np.frombuffer(f"{self.reading.delimiter}{self.reading.quote_sign}\r\n".encode(), np.uint8)
            )
            return sorted(set(np.searchsorted(ends, followed[stray], side="right").tolist()))
        strict = self._escapes.strict_record
        return [
            i
            for i in np.unique(np.searchsorted(ends, quotes, side="right")).tolist()
            if not strict.fullmatch(data[starts[i] : ends[i]])
        ]

    def _wrong_escapes(self, data: bytes, starts: Indices, ends: Indices) -> dict[int, str]:
        """The records that end in an escape, and those whose escapes make text that is not UTF-8."""
        sign = self._escapes.sign
        if self._escapes.letters is None or sign not in data:
            return {}
        signs = np.flatnonzero(np.frombuffer(data, np.uint8) == sign[0])
        signs = signs[(signs >= starts[0]) & (signs < ends[-1])]
        flaws = {}
        for i in np.unique(np.searchsorted(ends, signs, side="right")).tolist():
            record = data[starts[i] : ends[i]]
            if not self._escapes.strict_record.fullmatch(record):
                flaws[i] = "Its last character escapes nothing."
            elif self._escapes.codes and not is_utf8(self._escapes.rewrite(record)):
                flaws[i] = "Its escapes make text that is not UTF-8."
        return flaws

    def fields_in(self, line: bytes) -> int:
        """About how many fields a line has."""
        try:
            return len(self.names(line))
        except (HeaderError, UnicodeDecodeError):
            return 0

    def names(self, record: bytes) -> list[str]:
        record, quote = self._plain(record)
        try:
            rows = csv.reader(
                [record.decode()],
                delimiter=self.reading.delimiter,
                quotechar=quote.decode() or None,
                quoting=csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE,
            )
            return next(rows)
        except csv.Error as e:
            raise HeaderError(str(e)) from e

    def count(self, record: bytes) -> int:
        record, quote = self._plain(record)
        text = BOM + record + b"\n"
        read = pa_csv.ReadOptions(autogenerate_column_names=True, block_size=len(text), use_threads=False)
        types = pa_csv.ConvertOptions(check_utf8=False)
        return int(pa_csv.read_csv(pa.py_buffer(text), read, self._parsing(quote), types).num_columns)

    def split(self, text: bytes, names: Sequence[str], wanted: Sequence[str]) -> Fields:
        if not text:  # pyarrow refuses an empty file
            return Fields({name: pa.array([], pa.string()) for name in wanted}, {})
        text, quote = self._plain(text)
        miscounted: dict[int, int] = {}

        def skip(row: pa_csv.InvalidRow) -> Literal["skip"]:  # pyarrow reports such rows by this call alone
            miscounted[row.number - 1] = row.actual_columns
            return "skip"

        parsing = self._parsing(quote)
        parsing.invalid_row_handler = skip
        table = pa_csv.read_csv(
            pa.py_buffer(BOM + text),  # pyarrow skips one byte order mark: this one, not one that begins a value
            # pyarrow's row numbers are right only with one block and one thread.
            read_options=pa_csv.ReadOptions(column_names=names, block_size=len(text) + len(BOM), use_threads=False),
            parse_options=parsing,
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),  # never inferred: 0042 would become 42
                include_columns=list(wanted),
                null_values=["", *self.reading.null_words],
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
                check_utf8=False,
            ),
        )
        return Fields({name: table[name].combine_chunks() for name in wanted}, miscounted)

    def _plain(self, text: bytes) -> tuple[bytes, bytes]:
        """Whole records as pyarrow can read them, and their quote."""
        escapes = self._escapes
        if not escapes.concerns(text):
            return text, escapes.quote
        ends = self.ends(text, final=True)[0].tolist()
        records = (text[begin:end] for begin, end in zip([0, *ends], ends, strict=False))
        return b"".join(
            escapes.rewrite(one) if escapes.concerns(one) else one for one in records
        ), escapes.written_quote

    def _parsing(self, quote: bytes) -> pa_csv.ParseOptions:
        return pa_csv.ParseOptions(
            delimiter=self.reading.delimiter, quote_char=quote.decode() or False, newlines_in_values=bool(quote)
        )
