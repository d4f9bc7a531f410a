"""Landing files of CSV: as in RFC 4180 (comma, double quotes, a header) unless `[read]` says otherwise.

pyarrow cuts records into fields. Its streaming reader does not report at which byte a record begins, so the file is cut into
records here, by the same rules as its parser's.
"""

import csv
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv as pa_csv

from lakeupsert.config import Reading
from lakeupsert.landing.formats.lines import line_ends
from lakeupsert.landing.formats.records import Fields, HeaderError, record_ends
from lakeupsert.rows.arrays import Indices

_BOM = b"\xef\xbb\xbf"
_LF, _CR = b"\n\r"


_SEP_LINE = re.compile(rb"(?i)sep=([^\r\n])(?:\r\n|\n|\r)")
"""The first line of CSV that Excel reads everywhere: it names the delimiter."""


def choose_dialect(reading: Reading, head: bytes) -> tuple["Csv", int]:
    """The dialect of a file that begins with ``head``, and how many of these bytes only say what it is."""
    dialects = [(reading.delimiter, reading.decimal_separator)]
    dialects += [(one.delimiter, one.decimal_separator) for one in reading.dialects]
    sep = _SEP_LINE.match(head)
    if sep and sep[1].isascii() and sep[1].decode() != reading.quote:
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

    @cached_property
    def _record(self) -> re.Pattern[bytes]:
        # The rule of pyarrow's parser: a quote counts only at the beginning of a field; text after the closing quote is plain.
        quote, comma = re.escape(self.reading.quote.encode()), re.escape(self.reading.delimiter.encode())
        field = rb"(?:Q(?:[^Q]++|QQ)*+Q[^,\r\n]*+|[^Q,\r\n][^,\r\n]*+|)".replace(b",", comma).replace(b"Q", quote)
        return re.compile(field + rb"(?:" + comma + field + rb")*+(?:\r\n|\n|\r|\Z)")

    def ends(self, data: bytes, *, final: bool) -> tuple[Indices, bool]:
        breaks = line_ends(data, final=final)
        unclosed = False
        quote = self.reading.quote.encode()
        if quote and quote in data:
            characters = np.frombuffer(data, np.uint8)
            quotes = np.flatnonzero(characters == quote[0])
            if not self._quotes_alternate(characters, quotes):
                return self.ends_by_field(data, final=final)
            breaks = breaks[np.searchsorted(quotes, breaks) % 2 == 0]
            unclosed = len(quotes) % 2 == 1
        return record_ends(breaks, data, final=final), unclosed and final

    def _quotes_alternate(self, characters: NDArray[np.uint8], quotes: Indices) -> bool:
        """Whether every other quote opens: it begins a field, or is the second of a doubled quote.

        Otherwise (`5" pipe`) some quotes are plain characters, and counting quotes does not show which text is quoted.
        """
        opening, closing = quotes[0::2], quotes[1::2]
        before = characters[opening - 1]
        begins = (opening == 0) | (before == ord(self.reading.delimiter)) | (before == _LF) | (before == _CR)
        begins[1:] |= opening[1:] == closing[: len(opening) - 1] + 1
        return bool(begins.all())

    def ends_by_field(self, data: bytes, *, final: bool) -> tuple[Indices, bool]:
        """The same as `ends`, field by field: takes five times as long, and very few blocks need it."""
        ends: list[int] = []
        at = 0
        while at < len(data):
            record = self._record.match(data, at)
            if record is None:  # a quote is open
                return np.array([*ends, len(data)] if final else ends, np.int64), final
            at = record.end()
            if at == len(data) and not final and data[-1] != _LF:
                break
            ends.append(at)
        return np.array(ends, np.int64), False

    def fields_in(self, line: bytes) -> int:
        """About how many fields a line has."""
        try:
            return len(self.names(line))
        except (HeaderError, UnicodeDecodeError):
            return 0

    def names(self, record: bytes) -> list[str]:
        quote = self.reading.quote or None
        try:
            rows = csv.reader(
                [record.decode()],
                delimiter=self.reading.delimiter,
                quotechar=quote,
                quoting=csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE,
            )
            return next(rows)
        except csv.Error as e:
            raise HeaderError(str(e)) from e

    def count(self, record: bytes) -> int:
        text = _BOM + record + b"\n"
        read = pa_csv.ReadOptions(autogenerate_column_names=True, block_size=len(text), use_threads=False)
        types = pa_csv.ConvertOptions(check_utf8=False)
        return int(pa_csv.read_csv(pa.py_buffer(text), read, self._parsing, types).num_columns)

    def split(self, text: bytes, names: Sequence[str], wanted: Sequence[str]) -> Fields:
        if not text:  # pyarrow refuses an empty file
            return Fields({name: pa.array([], pa.string()) for name in wanted}, {})
        miscounted: dict[int, int] = {}

        def skip(row: pa_csv.InvalidRow) -> Literal["skip"]:  # pyarrow reports such rows by this call alone
            miscounted[row.number - 1] = row.actual_columns
            return "skip"

        parsing = self._parsing
        parsing.invalid_row_handler = skip
        table = pa_csv.read_csv(
            pa.py_buffer(_BOM + text),  # pyarrow skips one byte order mark: this one, not one that begins a value
            # pyarrow's row numbers are right only with one block and one thread.
            read_options=pa_csv.ReadOptions(column_names=names, block_size=len(text) + len(_BOM), use_threads=False),
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

    @property
    def _parsing(self) -> pa_csv.ParseOptions:
        quote = self.reading.quote
        return pa_csv.ParseOptions(
            delimiter=self.reading.delimiter, quote_char=quote or False, newlines_in_values=bool(quote)
        )
