"""Digests of rows by key and order: what came must be what is stored and what lost, so `reconcile` adds them up.

A row's hash has 64 bits, over its key and ordering columns alone; a digest is the sum of hashes, modulo 2^64, as 16
hexadecimal digits. It does not depend on the order of rows, on chunks, on the machine, or on a type that was widened.
docs/FORMAT.md, "Digests", says how others compute it; a change here makes every stored digest wrong.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from lakeupsert.engine.rank import sortable
from lakeupsert.table.spec import TableSpec

_FACTOR, _LAST = np.uint64(0x9FB21C651E98DF25), np.uint64(0xD6E8FEB86659FD93)
_HALF, _NULL = np.uint64(32), np.uint64(0xA0761D6478BD642F)
_PRIMES = (2**31 - 1, 2**31 - 19)
_MICROSECONDS = {"s": 10**6, "ms": 10**3}
_FIRST_BYTES = np.array([(1 << 8 * i) - 1 for i in range(9)], np.uint64)
"""Masks that leave so many bytes of a word."""


class Digest:
    """Adds up rows of one table. ``rows`` is their number; its text is the digest."""

    def __init__(self, spec: TableSpec) -> None:
        self.rows = 0
        self._columns = hashed_columns(spec)
        self._sum = 0

    def add(self, rows: Any) -> None:
        """Take a table that has the key and ordering columns."""
        self.rows += rows.num_rows
        self._sum += int(row_hashes(rows, self._columns).sum())

    def __str__(self) -> str:
        return as_text(self._sum)


def digests(groups: Sequence[Sequence[Any]], spec: TableSpec) -> list[str]:
    """The digest of each group of tables. They are hashed together: of a few rows each, the calls cost more than the rows."""
    tables = [rows for group in groups for rows in group]
    if not tables:
        return [as_text(0)] * len(groups)
    sums = np.cumsum(np.append(row_hashes(pa.concat_tables(tables), hashed_columns(spec)), np.uint64(0)))
    ends = np.cumsum([sum(rows.num_rows for rows in group) for group in groups])
    totals = [int(sums[end - 1]) if end else 0 for end in ends]
    return [as_text(total - before) for before, total in zip([0, *totals], totals, strict=False)]


def hashed_columns(spec: TableSpec) -> tuple[str, ...]:
    return (*spec.stored_key, *spec.order_by)


def as_text(total: int) -> str:
    return f"{total % 2**64:016x}"


def row_hashes(rows: Any, columns: Sequence[str]) -> Any:
    """The hash of every row of a table over these columns, in their order (numpy, uint64)."""
    hashes = np.zeros(rows.num_rows, np.uint64)
    for name in columns if rows.num_rows else ():
        column = rows[name]
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        null = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
        factor, kind = _plan(array.type)
        if kind == "bytes":
            hashes = _with_bytes(hashes, array, null)
        else:
            words = _words(array, factor, kind)
            hashes = _mixed(hashes, words if null is None else np.where(null, _NULL, words))
    hashes *= _LAST
    hashes ^= hashes >> _HALF
    return hashes


def _mixed(hashes: Any, words: Any) -> Any:
    hashes = (hashes ^ words) * _FACTOR
    hashes ^= hashes >> _HALF
    return hashes


def _words(array: Any, factor: int, kind: str) -> Any:
    """A word of 64 bits for each value; equal values have equal ones, whatever they were widened to. Any, where null."""
    if kind == "decimal":
        return _decimal_words(array)
    if kind == "null":
        return np.full(len(array), _NULL)
    if kind == "float":
        array, kind = sortable(array), "i8"
    elif kind == "bool":
        array, kind = array.cast(pa.uint8()), "u1"
    words = _values(array, kind).astype(np.uint64)
    return words if factor == 1 else words * np.uint64(factor)


@lru_cache
def _plan(type_: Any) -> tuple[int, str]:
    """How values of a type become words: what they are multiplied by, and their kind or numpy's name for them."""
    t = pa.types
    if _is_text(type_) or t.is_binary(type_) or t.is_large_binary(type_) or t.is_fixed_size_binary(type_):
        return 1, "bytes"
    for is_one, kind in (
        (t.is_decimal, "decimal"),
        (t.is_null, "null"),
        (t.is_floating, "float"),
        (t.is_boolean, "bool"),
    ):
        if is_one(type_):
            return 1, kind
    factor = _MICROSECONDS.get(type_.unit, 1) if t.is_timestamp(type_) else 1
    return factor, f"{'u' if t.is_unsigned_integer(type_) else 'i'}{type_.bit_width // 8}"


def _is_text(type_: Any) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _values(array: Any, dtype: str) -> Any:
    return np.frombuffer(array.buffers()[1], dtype)[array.offset : array.offset + len(array)]


def _decimal_words(array: Any) -> Any:
    """The number itself modulo two primes, so that neither scale nor width matters: 2.5 is 25 / 10 and 250 / 100 there."""
    type_ = array.type
    limbs = type_.bit_width // 32
    digits = _values(array, f"({limbs},)u4").astype(np.int64)
    digits[:, -1] = digits[:, -1].astype(np.int32)  # the sign is in the last
    rests = []
    for prime in _PRIMES:
        factors = np.array([pow(10, -type_.scale, prime) * pow(2, 32 * i, prime) % prime for i in range(limbs)])
        rests.append((digits % prime * factors % prime).sum(axis=1) % prime)
    return (rests[0] << 32 | rests[1]).astype(np.uint64)


def _with_bytes(hashes: Any, array: Any, null: Any) -> Any:
    """Text and binary: their length in bytes, then the bytes, eight to a word."""
    n, type_ = len(array), array.type
    if pa.types.is_fixed_size_binary(type_):
        borders = np.arange(array.offset, array.offset + n + 1) * type_.byte_width
    else:
        large = pa.types.is_large_string(type_) or pa.types.is_large_binary(type_)
        borders = np.frombuffer(array.buffers()[1], "i8" if large else "i4")[array.offset : array.offset + n + 1]
        borders = borders.astype(np.int64)
    at, left = borders[:-1] - borders[0], np.diff(borders)
    words = left.astype(np.uint64)
    if null is not None:
        words[null], left[null] = _NULL, 0
    hashes = _mixed(hashes, words)
    longest = int(left.max())
    if longest == 0:
        return hashes
    data = np.frombuffer(array.buffers()[-1], np.uint8)[borders[0] : borders[-1]]
    padded = np.concatenate((data, np.zeros(8, np.uint8)))
    at_every_byte = np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))
    here: Any = slice(None)
    for _ in range(0, longest, 8):
        if left.min() <= 0:
            longer = left > 0
            here, at, left = np.arange(n)[here][longer], at[longer], left[longer]
        words = at_every_byte[at] & _FIRST_BYTES[np.minimum(left, 8)]
        hashes[here] = _mixed(hashes[here], words)
        at, left = at + 8, left - 8
    return hashes
