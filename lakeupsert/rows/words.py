"""Columns as words of 64 bits, which `digest` and `buckets` hash: equal values have equal ones, whatever they were widened to."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

_MICROSECONDS = {"s": 10**6, "ms": 10**3}
_FIRST_BYTES = np.array([(1 << 8 * i) - 1 for i in range(9)], np.uint64)
"""Masks that leave so many bytes of a word."""


def values(array: Any, dtype: str) -> Any:
    """The values of a column of fixed width, without copying them. Any, where null."""
    return np.frombuffer(array.buffers()[1], dtype)[array.offset : array.offset + len(array)]


def number_words(array: Any) -> Any:
    """A word for each integer, boolean, date, time, duration or timestamp, which is in microseconds unless its unit is ns."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    factor, dtype = _number(array.type)
    words = values(array, dtype).astype(np.uint64)
    return words if factor == 1 else words * np.uint64(factor)


@lru_cache
def _number(type_: Any) -> tuple[int, str]:
    """What values of a type are multiplied by, and numpy's name for them."""
    t = pa.types
    factor = _MICROSECONDS.get(type_.unit, 1) if t.is_timestamp(type_) else 1
    return factor, f"{'u' if t.is_unsigned_integer(type_) else 'i'}{type_.bit_width // 8}"


@lru_cache
def is_bytes(type_: Any) -> bool:
    """Whether values are text or binary."""
    t = pa.types
    return bool(
        t.is_string(type_) or t.is_large_string(type_)
        or t.is_binary(type_) or t.is_large_binary(type_) or t.is_fixed_size_binary(type_)
    )  # fmt: skip


def extents(array: Any) -> tuple[Any, Any, Any]:
    """Of n texts or binaries all their bytes and 9 to 16 zeros behind, whole words; where each begins; how many bytes it has."""
    n, type_ = len(array), array.type
    if pa.types.is_fixed_size_binary(type_):
        borders = np.arange(array.offset, array.offset + n + 1) * type_.byte_width
    else:
        large = pa.types.is_large_string(type_) or pa.types.is_large_binary(type_)
        borders = np.frombuffer(array.buffers()[1], "i8" if large else "i4")[array.offset : array.offset + n + 1]
        borders = borders.astype(np.int64)
    data = array.buffers()[-1]
    used = np.frombuffer(data or b"", np.uint8)[borders[0] : borders[-1]]
    return np.concatenate((used, np.zeros(16 - len(used) % 8, np.uint8))), borders[:-1] - borders[0], np.diff(borders)


def byte_words(data: Any, at: Any, left: Any) -> Iterator[tuple[Any, Any]]:
    """Bytes of many values, eight to a word, zeros behind the last: first words, then second ones, and so on.

    Each with the numbers of the values that have as many (a slice of them, or an array), in their order. The arguments are
    those of `extents`, or a permutation of them.
    """
    n = len(left)
    shortest, longest = (int(left.min()), int(left.max())) if n else (0, 0)
    # All as long, one behind the other: nothing to look up.
    if shortest == longest and n > 1 and (at[1:] - at[:-1] == longest).all():
        for done in range(0, longest, 8):
            words = np.ndarray((n,), "<u8", data, offset=int(at[0]) + done, strides=(longest,))
            yield slice(n), words & _FIRST_BYTES[min(longest - done, 8)]
        return
    # Two aligned words and a shift: numpy gathers words that are not aligned one by one.
    aligned, word = data.view("<u8"), at >> 3
    right = ((at & 7) << 3).astype(np.uint64)
    up = np.uint64(64) - right  # a shift by 64 gives 0
    low = aligned[word]
    here: Any = slice(n)
    for done in range(0, longest, 8):
        if shortest <= done:
            longer = left > 0
            many = np.count_nonzero(longer)
            if longer[:many].all():  # the longest come first
                kept: Any = slice(many)
                here = slice(many) if isinstance(here, slice) else here[:many]
            else:
                kept, here = longer, np.arange(n)[here][longer]
            word, right, up, low, left = (x[kept] for x in (word, right, up, low, left))
        word = word + 1
        high = aligned[word]
        words = low >> right
        words |= high << up
        if shortest < done + 8:
            words &= _FIRST_BYTES.take(left, mode="clip")
        yield here, words
        low, left = high, left - 8
