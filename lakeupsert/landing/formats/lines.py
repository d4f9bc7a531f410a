"""Lines of text: where they end, and which line of a file a record begins in."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lakeupsert.rows.arrays import Indices, Mask

BOM = b"\xef\xbb\xbf"
LF, CR = b"\n\r"


def line_ends(data: bytes, *, final: bool) -> Indices:
    """The last character of every line end. Unless ``final``, a last CR does not count, since a LF may follow."""
    characters = np.frombuffer(data, np.uint8)
    is_end = characters == LF
    if b"\r" in data:
        alone = characters == CR
        alone[:-1] &= ~is_end[1:]
        alone[-1] &= final
        is_end |= alone
    return np.flatnonzero(is_end)


def find_escaped(data: bytes, sign: bytes) -> Mask:
    """Which characters have an escape before them: the ``sign``, if no sign escapes it. ``data`` begins with no escaped one."""
    escaped = np.zeros(len(data), bool)
    signs = np.flatnonzero(np.frombuffer(data, np.uint8) == sign[0])
    if len(signs):
        begins = np.diff(signs, prepend=-2) != 1
        in_run = np.arange(len(signs)) - np.flatnonzero(begins)[np.cumsum(begins) - 1]
        after = signs[in_run % 2 == 0] + 1
        escaped[after[after < len(data)]] = True
    return escaped


@dataclass(frozen=True)
class TextLines:
    """A part of a text file.

    Attributes:
        first: the line in which it begins, counted from 1.
        offset: the byte of the file at which it begins.
    """

    first: int
    offset: int
    text: bytes

    def numbers(self, places: Iterable[int]) -> list[int]:
        """The lines of bytes of the file that are in this part, counted from 1."""
        within = np.fromiter(places, np.int64) - self.offset
        return [self.first + n for n in np.searchsorted(line_ends(self.text, final=True), within).tolist()]

    @property
    def count(self) -> int:
        """How many lines end in this part."""
        ends = self.text.count(b"\n")
        return ends + self.text.count(b"\r") - self.text.count(b"\r\n") if b"\r" in self.text else ends

    def behind(self, begin: "TextLines") -> "TextLines":
        """The part without ``begin``, its first bytes."""
        used = len(begin.text)
        return TextLines(self.first + begin.count, self.offset + used, self.text[used:])


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
