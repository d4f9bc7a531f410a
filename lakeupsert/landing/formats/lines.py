"""Lines of text: where they end, and which line of a file a record begins in."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lakeupsert.rows.arrays import Indices

_LF, _CR = b"\n\r"


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
