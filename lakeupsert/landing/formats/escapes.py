r"""Escapes: in CSV a character before a quote, as Spark writes `"say \"hi\""`; in the text formats of databases a backslash.

pyarrow's parser knows no such text, so records that have it are written again as CSV that it knows.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lakeupsert.config import Reading
from lakeupsert.landing.formats.lines import find_escaped
from lakeupsert.rows.arrays import Mask

LETTERS: dict[str, dict[bytes, bytes]] = {
    "postgresql": {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"},
    "mysql": {b"0": b"\0", b"b": b"\b", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"Z": b"\x1a"},
    "hive": {b"n": b"\n", b"r": b"\r"},
}
"""What a letter behind a backslash stands for; any other character stands for itself. As PostgreSQL 15.18, MariaDB 10.11 and
Hive's LazySimpleSerDe 2.3.10 read it."""
_LINE_END = re.compile(rb"(?:\r\n|\n|\r)\Z")


def without_line_end(record: bytes) -> bytes:
    return _LINE_END.sub(b"", record)


@dataclass(frozen=True)
class Escapes:
    """The escapes of a dialect.

    Attributes:
        sign: the character that escapes; empty if none does.
        letters: what it makes of letters, also outside of quotes. None: in quotes it escapes the quote and itself, and is a
            character like any other before anything else.
        codes: `\\x41` and `\\101` are bytes.
        lf_only: a CR that no LF follows ends no record.
        quote: the character that quotes, or empty.
        delimiter: the character between fields.
    """

    sign: bytes
    letters: Mapping[bytes, bytes] | None
    codes: bool
    lf_only: bool
    quote: bytes
    delimiter: bytes

    @classmethod
    def of(cls, reading: Reading) -> "Escapes":
        letters = LETTERS.get(reading.escape)
        return cls(
            sign=b"\\" if letters is not None else reading.escape.encode(),
            letters=letters,
            codes=reading.escape == "postgresql",
            lf_only=reading.escape == "mysql",
            quote=reading.quote_sign.encode(),
            delimiter=reading.delimiter.encode(),
        )

    @property
    def written_quote(self) -> bytes:
        """The quote of records that `rewrite` returns."""
        return self.quote or (b"'" if self.delimiter == b'"' else b'"')

    def find_escaped(self, data: bytes) -> Mask:
        """Which characters of ``data``, which begins with a record, have an escape before them."""
        return find_escaped(data, self.sign) if self.sign and self.sign in data else np.zeros(len(data), bool)

    @cached_property
    def record(self) -> re.Pattern[bytes]:
        """A record with its line end, which is the group `end`: as pyarrow's parser cuts it.

        A quote counts only at the beginning of a field, and text after the closing quote is plain.
        """
        return self._compile(strict=False)

    @cached_property
    def strict_record(self) -> re.Pattern[bytes]:
        """A record without text after a closing quote, and without an escape of nothing."""
        return self._compile(strict=True)

    def _compile(self, *, strict: bool) -> re.Pattern[bytes]:
        quoted, plain = self._field_patterns()
        tail = b"" if strict else plain + b"*+"
        field = rb"(?:%b%b|(?!%b)%b*+)" % (quoted, tail, re.escape(self.quote), plain) if self.quote else plain + b"*+"
        end = rb"(?P<end>\r\n|\n|\Z)" if self.lf_only else rb"(?P<end>\r\n|\n|\r|\Z)"
        if not strict and self.letters is not None:
            end = rb"(?:%b\Z)?%b" % (re.escape(self.sign), end)
        return re.compile(rb"%b(?:%b%b)*+%b" % (field, re.escape(self.delimiter), field, end), re.DOTALL)

    def _field_patterns(self) -> tuple[bytes, bytes]:
        """The patterns of a quoted field, and of some characters of another one."""
        quote, sign, delimiter = re.escape(self.quote), re.escape(self.sign), re.escape(self.delimiter)
        escape = rb"|%b." % sign if self.sign else b""
        quoted = rb"%b(?:[^%b%b]++|%b%b%b)*+%b" % (quote, quote, sign, quote, quote, escape, quote)
        if self.letters is None:
            return quoted, rb"[^%b\r\n]" % delimiter
        alone = rb"|\r(?!\n)" if self.lf_only else b""
        return quoted, rb"(?:%b.|[^%b%b\r\n]++%b)" % (sign, delimiter, sign, alone)

    def concerns(self, record: bytes) -> bool:
        """Whether pyarrow would read a record otherwise."""
        if not self.sign:
            return False
        if self.letters is None:
            return self.sign in record
        return self.sign in record or (not self.quote and self.written_quote in record) or b"\r" in record[:-2]

    def rewrite(self, record: bytes) -> bytes:
        """A record that `strict_record` matches, with its values in quotes and without escapes."""
        text, at, values = without_line_end(record), 0, []
        while True:
            field = self._field.match(text, at)
            assert field is not None, "the record is a strict one"
            values.append(self._written(field["quoted"], field["plain"]))
            at = field.end()
            if at == len(text):
                return self.delimiter.join(values) + b"\n"
            at += 1

    @cached_property
    def _field(self) -> re.Pattern[bytes]:
        quoted, plain = self._field_patterns()
        return re.compile(rb"(?P<quoted>%b)|(?P<plain>%b*+)" % (quoted if self.quote else b"(?!)", plain), re.DOTALL)

    def _written(self, quoted: bytes | None, plain: bytes) -> bytes:
        quote = self.written_quote
        text = plain if quoted is None else quoted[1:-1]
        if self.letters is not None and text == self.sign + b"N":
            text = b""
        elif quoted is not None or self.letters is not None:
            text = self._pair.sub(self._meaning, text)
        return quote + text.replace(quote, quote * 2) + quote

    @cached_property
    def _pair(self) -> re.Pattern[bytes]:
        quote, sign = re.escape(self.quote), re.escape(self.sign)
        doubled = rb"|(?P<doubled>%b)%b" % (quote, quote) if self.quote else b""
        if self.letters is None:
            return re.compile(rb"%b(?P<one>[%b%b])%b" % (sign, quote, sign, doubled))
        codes = rb"x(?P<hex>[0-9A-Fa-f]{1,2})|(?P<octal>[0-7]{1,3})|" if self.codes else rb"(?P<hex>(?!))(?P<octal>)|"
        return re.compile(rb"%b(?:%b(?P<one>.))%b" % (sign, codes, doubled), re.DOTALL)

    def _meaning(self, pair: re.Match[bytes]) -> bytes:
        one = pair["one"]
        if self.letters is None:
            return one or self.quote
        if pair["hex"] is not None:
            return bytes([int(pair["hex"], 16)])
        if pair["octal"] is not None:
            return bytes([int(pair["octal"], 8) & 0xFF])
        return self.quote if one is None else self.letters.get(one, one)
