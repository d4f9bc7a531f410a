"""Digests of rows by key and order. `reconcile` adds them up: the rows that arrived must be the stored rows plus those that lost.

A row's hash has 64 bits and covers its key and ordering columns only. A digest is the sum of the hashes modulo 2^64, as 16
hexadecimal digits. It does not depend on the order of rows, on chunks, on the machine, or on a type that was widened.
docs/FORMAT.md, "Digests", defines the computation; a change here makes every stored digest wrong.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from lakeupsert.rows.arrays import Hashes, Mask, Rows
from lakeupsert.rows.rank import sortable
from lakeupsert.rows.words import Words, byte_words, few_long, is_bytes, number_words, texts_of, values
from lakeupsert.table.spec import TableSpec

_FACTOR, _LAST = np.uint64(0x9FB21C651E98DF25), np.uint64(0xD6E8FEB86659FD93)
_HALF, _NULL = np.uint64(32), np.uint64(0xA0761D6478BD642F)
_PRIMES = (2**31 - 1, 2**31 - 19)


class Digest:
    """Adds up the hashes of rows of one table. ``rows`` counts the rows; ``str()`` gives the digest."""

    def __init__(self, spec: TableSpec) -> None:
        self.rows = 0
        self._columns = hashed_columns(spec)
        self._sum = 0

    def add(self, rows: Rows) -> None:
        """Add rows that have the key and ordering columns."""
        self.rows += rows.num_rows
        self._sum += int(row_hashes(rows, self._columns).sum())

    def __str__(self) -> str:
        return digest_text(self._sum)

    def negative(self) -> str:
        """What takes these rows out of a digest that has them."""
        return digest_text(-self._sum)


def digests(groups: Sequence[Sequence[Rows]], spec: TableSpec) -> list[str]:
    """The digest of each group of tables. One call hashes them all, because calls for a few rows cost more than the rows."""
    tables = [rows for group in groups for rows in group]
    if not tables:
        return [digest_text(0)] * len(groups)
    sums = np.cumsum(np.append(row_hashes(pa.concat_tables(tables), hashed_columns(spec)), np.uint64(0)))
    ends = np.cumsum([sum(rows.num_rows for rows in group) for group in groups])
    totals = [int(sums[end - 1]) if end else 0 for end in ends]
    return [digest_text(total - before) for before, total in zip([0, *totals], totals, strict=False)]


def hashed_columns(spec: TableSpec) -> tuple[str, ...]:
    return (*spec.stored_key, *spec.order_by)


def digest_text(total: int) -> str:
    return f"{total % 2**64:016x}"


def row_hashes(rows: Rows, columns: Sequence[str]) -> Hashes:
    """The hash of every row over these columns, in their order."""
    hashes = np.zeros(rows.num_rows, np.uint64)
    for name in columns if rows.num_rows else ():
        column = rows[name]
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        null = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
        if is_bytes(array.type):
            hashes = _with_bytes(hashes, array, null)
        else:
            words = _words(array)
            hashes = _mix(hashes, words if null is None else np.where(null, _NULL, words))
    hashes *= _LAST
    hashes ^= hashes >> _HALF
    return hashes


def _mix(hashes: Hashes, words: Words) -> Hashes:
    hashes = (hashes ^ words) * _FACTOR
    hashes ^= hashes >> _HALF
    return hashes


def _words(array: pa.Array) -> Words:
    """One word per value of a column that is neither text nor binary. Nulls have arbitrary words."""
    t = pa.types
    if t.is_decimal(array.type):
        return _decimal_words(array)
    if t.is_null(array.type):
        return np.full(len(array), _NULL)
    return number_words(sortable(array))


def _decimal_words(array: pa.Array) -> Words:
    """The number modulo two primes, so that scale and width do not matter: 25 / 10 and 250 / 100 are the same there."""
    type_ = array.type
    limbs = type_.bit_width // 32
    digits = values(array, f"({limbs},)u4").astype(np.int64)
    digits[:, -1] = digits[:, -1].astype(np.int32)  # the last limb has the sign
    remainders = []
    for prime in _PRIMES:
        factors = np.array([pow(10, -type_.scale, prime) * pow(2, 32 * i, prime) % prime for i in range(limbs)])
        remainders.append((digits % prime * factors % prime).sum(axis=1) % prime)
    words: Words = (remainders[0] << 32 | remainders[1]).astype(np.uint64)
    return words


def _with_bytes(hashes: Hashes, array: pa.Array, null: Mask | None) -> Hashes:
    """Add a text or binary column: the length in bytes, then the bytes, eight per word."""
    texts = texts_of(array)
    words = texts.lengths.astype(np.uint64)
    if null is not None:
        words[null], texts.lengths[null] = _NULL, 0
    hashes = _mix(hashes, words)
    for row in few_long(texts.lengths).tolist():
        one = int(hashes[row])
        for word in texts.words_of(row):
            one = (one ^ word) * int(_FACTOR) % 2**64
            one ^= one >> 32
        hashes[row], texts.lengths[row] = one, 0
    for here, words in byte_words(texts):
        hashes[here] = _mix(hashes[here], words)
    return hashes
