"""Columns as 64-bit words, which `digest` and `buckets` hash. Equal values have equal words, also after a type was widened."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lakeupsert.rows.arrays import Indices
from lakeupsert.table.types import is_binary, is_text

Words = NDArray[np.uint64]
"""One 64-bit word of each of n values."""
_MICROSECONDS = {"s": 10**6, "ms": 10**3}
_FIRST_BYTES = np.array([(1 << 8 * i) - 1 for i in range(9)], np.uint64)
"""Masks that keep the first i bytes of a word."""


LONG_BYTES, FEW = 1 << 12, 40
"""Up to so many rows, the longest of those with more bytes than this, are hashed one by one with Python's integers. For one row
that takes a thirtieth of the time of numpy, whose calls cost the same for each word of the longest row."""


@dataclass(frozen=True, slots=True)
class Texts:
    """The bytes of n texts or binaries.

    Attributes:
        data: all bytes, then 9 to 16 zeros, so that the length is a whole number of words.
        begins: where each value begins in ``data``.
        lengths: how many bytes each value has.
    """

    data: NDArray[np.uint8]
    begins: Indices
    lengths: Indices

    def take(self, order: Indices) -> "Texts":
        return Texts(self.data, self.begins[order], self.lengths[order])

    def words_of(self, row: int) -> list[int]:
        """The bytes of one value, as `byte_words` gives those of many."""
        begin, length = int(self.begins[row]), int(self.lengths[row])
        own = np.zeros(length + -length % 8, np.uint8)
        own[:length] = self.data[begin : begin + length]
        return own.view("<u8").tolist()


# Any: numpy's own type of an array depends on ``dtype``, a text.
def values(array: pa.Array, dtype: str) -> NDArray[Any]:
    """The values of a fixed-width column, without a copy. Nulls have arbitrary values."""
    return np.frombuffer(array.buffers()[1], dtype)[array.offset : array.offset + len(array)]


def number_words(array: pa.Array) -> Words:
    """One word per integer, boolean, date, time, duration or timestamp (in microseconds unless its unit is ns)."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    factor, dtype = _number(array.type)
    words = values(array, dtype).astype(np.uint64)
    return words if factor == 1 else words * np.uint64(factor)


@lru_cache
def _number(type_: pa.DataType) -> tuple[int, str]:
    """The factor that converts values of a type to their word, and numpy's name for the type."""
    t = pa.types
    factor = _MICROSECONDS.get(type_.unit, 1) if t.is_timestamp(type_) else 1
    return factor, f"{'u' if t.is_unsigned_integer(type_) else 'i'}{type_.bit_width // 8}"


@lru_cache
def is_bytes(type_: pa.DataType) -> bool:
    """Whether values of the type are text or binary."""
    return is_text(type_) or is_binary(type_)


def texts_of(array: pa.Array) -> Texts:
    """The bytes of a column of texts or binaries."""
    n, type_ = len(array), array.type
    if pa.types.is_fixed_size_binary(type_):
        borders = np.arange(array.offset, array.offset + n + 1) * type_.byte_width
    else:
        large = pa.types.is_large_string(type_) or pa.types.is_large_binary(type_)
        borders = np.frombuffer(array.buffers()[1], "i8" if large else "i4")[array.offset : array.offset + n + 1]
        borders = borders.astype(np.int64)
    buffer = array.buffers()[-1]
    used = np.frombuffer(buffer or b"", np.uint8)[borders[0] : borders[-1]]
    data = np.concatenate((used, np.zeros(16 - len(used) % 8, np.uint8)))
    return Texts(data, borders[:-1] - borders[0], np.diff(borders))


def few_long(lengths: Indices) -> Indices:
    """The rows that are hashed one by one, by their lengths in bytes."""
    long = np.flatnonzero(lengths > LONG_BYTES)
    return long if len(long) <= FEW else long[np.argpartition(lengths[long], -FEW)[-FEW:]]


def byte_words(texts: Texts) -> Iterator[tuple[slice | Indices, Words]]:
    """The bytes of many values, eight per word, the last word padded with zeros: all first words, then all second ones, …

    Each item holds which values have such a word (a slice or indices of them), and these words in the same order.
    """
    at, rest = texts.begins, texts.lengths
    n = len(rest)
    shortest, longest = (int(rest.min()), int(rest.max())) if n else (0, 0)
    # All values have one length and follow each other: no gather is needed.
    if shortest == longest and n > 1 and (at[1:] - at[:-1] == longest).all():
        for done in range(0, longest, 8):
            words: Words = np.ndarray((n,), "<u8", texts.data, offset=int(at[0]) + done, strides=(longest,))
            yield slice(n), words & _FIRST_BYTES[min(longest - done, 8)]
        return
    # Two aligned words and a shift, because numpy gathers unaligned words one by one.
    aligned, word = texts.data.view("<u8"), at >> 3
    right = ((at & 7) << 3).astype(np.uint64)
    up = np.uint64(64) - right  # a shift by 64 gives 0
    low = aligned[word]
    here: slice | Indices = slice(n)
    for done in range(0, longest, 8):
        if shortest <= done:
            longer = rest > 0
            many = np.count_nonzero(longer)
            kept: slice | NDArray[np.bool_] = longer
            if longer[:many].all():  # the longest come first
                kept = slice(many)
                here = slice(many) if isinstance(here, slice) else here[:many]
            else:
                here = np.arange(n)[here][longer]
            word, right, up, low, rest = word[kept], right[kept], up[kept], low[kept], rest[kept]
        word = word + 1
        high = aligned[word]
        words = low >> right
        words |= high << up
        if shortest < done + 8:
            words &= _FIRST_BYTES.take(rest, mode="clip")
        yield here, words
        low, rest = high, rest - 8
