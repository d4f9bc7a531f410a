"""Digests of rows by key and order: what came must be what is stored and what lost, so `reconcile` adds them up.

A row's hash has 64 bits, over its key and ordering columns alone; a digest is the sum of hashes, modulo 2^64, as 16
hexadecimal digits. It does not depend on the order of rows, on chunks, on the machine, or on a type that was widened.
docs/FORMAT.md, "Digests", says how others compute it; a change here makes every stored digest wrong.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from lakeupsert.rows.rank import sortable
from lakeupsert.rows.words import byte_words, extents, is_bytes, number_words, values
from lakeupsert.table.spec import TableSpec

_FACTOR, _LAST = np.uint64(0x9FB21C651E98DF25), np.uint64(0xD6E8FEB86659FD93)
_HALF, _NULL = np.uint64(32), np.uint64(0xA0761D6478BD642F)
_PRIMES = (2**31 - 1, 2**31 - 19)


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
        if is_bytes(array.type):
            hashes = _with_bytes(hashes, array, null)
        else:
            words = _words(array)
            hashes = _mixed(hashes, words if null is None else np.where(null, _NULL, words))
    hashes *= _LAST
    hashes ^= hashes >> _HALF
    return hashes


def _mixed(hashes: Any, words: Any) -> Any:
    hashes = (hashes ^ words) * _FACTOR
    hashes ^= hashes >> _HALF
    return hashes


def _words(array: Any) -> Any:
    """A word for each value that is no text or binary. Any, where null."""
    t = pa.types
    if t.is_decimal(array.type):
        return _decimal_words(array)
    if t.is_null(array.type):
        return np.full(len(array), _NULL)
    return number_words(sortable(array))


def _decimal_words(array: Any) -> Any:
    """The number itself modulo two primes, so that neither scale nor width matters: 2.5 is 25 / 10 and 250 / 100 there."""
    type_ = array.type
    limbs = type_.bit_width // 32
    digits = values(array, f"({limbs},)u4").astype(np.int64)
    digits[:, -1] = digits[:, -1].astype(np.int32)  # the sign is in the last
    rests = []
    for prime in _PRIMES:
        factors = np.array([pow(10, -type_.scale, prime) * pow(2, 32 * i, prime) % prime for i in range(limbs)])
        rests.append((digits % prime * factors % prime).sum(axis=1) % prime)
    return (rests[0] << 32 | rests[1]).astype(np.uint64)


def _with_bytes(hashes: Any, array: Any, null: Any) -> Any:
    """Text and binary: their length in bytes, then the bytes, eight to a word."""
    data, at, lengths = extents(array)
    words = lengths.astype(np.uint64)
    if null is not None:
        words[null], lengths[null] = _NULL, 0
    hashes = _mixed(hashes, words)
    for here, words in byte_words(data, at, lengths):
        hashes[here] = _mixed(hashes[here], words)
    return hashes
