"""Cut lines, or an array of JSON values, without decoding them: a part of the file at a time, so memory is bounded."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lakeupsert.landing.formats.lines import find_escaped
from lakeupsert.rows.arrays import Indices

_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\[(?=[ \t\r\n]*[{\]])")
_QUOTE, _COMMA = b'",'
_DEPTHS = np.zeros(256, np.int8)
_DEPTHS[list(b"{[")] = 1
_DEPTHS[list(b"}]")] = -1
_IS_MARK = _DEPTHS != 0
_IS_MARK[_COMMA] = True


def array_begin(data: bytes) -> int | None:
    """Where the first element of a file begins that is an array of objects; None if the file is none, by its first bytes."""
    match = _ARRAY.match(data)
    return match.end() if match else None


@dataclass(frozen=True)
class Elements:
    """Lines, or elements of an array, that are complete in some text.

    Attributes:
        texts: without line ends, and elements without the white space around them; an empty one if nothing is there.
        starts: where they begin in the text.
        used: the bytes of the text that are done with: also the comma after the last element, or the end of the array.
        closed: whether the array ends in the text.
    """

    texts: Sequence[bytes]
    starts: Indices
    used: int
    closed: bool


def cut_lines(text: bytes, *, final: bool) -> Elements:
    """The lines of ``text``. If it is the ``final`` part of the file, its last line needs no end."""
    used = len(text) if final else text.rfind(b"\n") + 1
    texts = text[:used].removesuffix(b"\n").split(b"\n") if used else []
    sizes = np.fromiter(map(len, texts), np.int64, len(texts)) + 1
    return Elements(texts, np.cumsum(sizes) - sizes, used, False)


def cut_elements(text: bytes, *, final: bool = False) -> Elements:
    """The elements of an array in ``text``, which begins after the opening bracket, or after a comma between elements."""
    characters = np.frombuffer(text, np.uint8)
    quotes = np.flatnonzero(characters == _QUOTE)
    if b"\\" in text:
        quotes = quotes[~find_escaped(text, b"\\")[quotes]]
    marks = np.flatnonzero(_IS_MARK[characters])
    marks = marks[np.searchsorted(quotes, marks) % 2 == 0]  # behind an odd number of quotes, a mark is in a string
    kinds = characters[marks]
    depths = np.cumsum(_DEPTHS[kinds], dtype=np.int64)
    closing = np.flatnonzero(depths < 0)
    closed = len(closing) > 0
    ends = marks[(kinds == _COMMA) & (depths == 0)]
    if closed:
        end = marks[closing[0]]
        ends = np.append(ends[ends < end], end)
    used = int(ends[-1]) + 1 if len(ends) else 0
    begins = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    texts = [text[begin:end].lstrip() for begin, end in zip(begins, ends, strict=True)]
    starts = ends - np.fromiter(map(len, texts), np.int64, len(texts))
    return Elements([t.rstrip() for t in texts], starts, used, closed)


def cut_off(head: bytes) -> bytes:
    """The beginning of a file that is an array of objects, as an array of its whole elements."""
    begin = array_begin(head) or 0
    cut = cut_elements(head[begin:])
    return head[: begin + cut.used] if cut.closed else head[: begin + max(0, cut.used - 1)] + b"]"
