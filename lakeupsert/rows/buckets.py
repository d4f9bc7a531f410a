"""Buckets: ranges of key hashes, which every host, engine and release must compute alike.

The hash is XXH64 over a key's canonical bytes (docs/FORMAT.md, "Buckets"). It is our own, because the hashes of Spark, Arrow and
Polars differ by type or release. A change here would put stored and incoming rows of one key into different buckets, and the key
would be stored twice.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from lakeupsert.rows.arrays import Hashes, Indices, Mask, Rows
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.words import Texts, Words, byte_words, few_long, is_bytes, number_words, texts_of, values
from lakeupsert.table.manifest import Bucketed, share
from lakeupsert.table.spec import TableSpec

BLOCK_ROWS = 1 << 13
"""Rows hashed at once: few enough that a step's dozen arrays stay in the processor's cache, enough that numpy's calls cost
little per row."""

_DAY = 86_400_000  # milliseconds

_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
)
_STARTS = tuple(np.uint64(x % 2**64) for x in (int(_P1) + int(_P2), int(_P2), 0, -int(_P1)))


def key_hashes(rows: Rows, spec: TableSpec, columns: Sequence[str] | None = None) -> Hashes:
    """The hash of the key of every row. ``columns``: of these instead of the key columns in files.

    Raises:
        ValueError: a key is null, or a key column has a value that the spec's type can't hold exactly.
    """
    names = spec.stored_key if columns is None else columns
    fields = [spec.schema.field(name).remove_metadata().with_nullable(False) for name in names]
    return _hashes_of(rows.select(names).cast(pa.schema(fields)))


def hash_numbers(columns: Sequence[pa.Array], count: int) -> pa.Array:
    """The value of `bucket(count, …)` for each row of some columns of a key: the hash of its values modulo ``count``.

    The columns have the spec's types. Null where a value is null, or is a date64 with a time of day.
    """
    rows = pa.table(dict(zip(map(str, range(len(columns))), columns, strict=True)))
    fit = np.logical_and.reduce([as_mask(column.is_valid()) & _is_whole(column) for column in columns])
    numbers = np.zeros(len(fit), np.int32)
    numbers[fit] = _hashes_of(rows.filter(pa.array(fit))) % np.uint64(count)
    return pa.array(numbers, mask=~fit)


def _is_whole(column: pa.Array) -> Mask:
    """Which values have canonical bytes."""
    if not pa.types.is_date64(column.type):
        return np.ones(len(column), bool)
    whole: Mask = np.asarray(column.view(pa.int64()).fill_null(0)) % _DAY == 0
    return whole


def _hashes_of(rows: Rows) -> Hashes:
    """The hash of each row over all its columns, none of them null."""
    whole = rows.combine_chunks()
    blocks = [_hashes(block.columns) for block in whole.to_batches(max_chunksize=BLOCK_ROWS) if block.num_rows]
    return np.concatenate([np.empty(0, np.uint64), *blocks])


def buckets(hashes: Hashes, bits: int) -> Indices:
    """The bucket of each hash, of 2^``bits`` buckets."""
    return (hashes >> np.uint64(64 - bits)).astype(np.int64) if bits else np.zeros(len(hashes), np.int64)


def may_be_in(hashes: Hashes, of: Bucketed) -> bool:
    """Whether one of the keys with these hashes may be in a bucket."""
    return bool((buckets(hashes, of.bits) == of.bucket).any())


def in_bucket(rows: Rows, of: Bucketed, within: Bucketed, spec: TableSpec) -> Rows:
    """The rows of a file (bucket ``of``) whose keys are in ``within``, a part of that bucket."""
    if share(of, within) == 1:
        return rows
    return rows.filter(pa.array(buckets(key_hashes(rows, spec), within.bits) == within.bucket))


def cut_by_number(rows: Rows, numbers: Indices) -> Iterator[tuple[int, Rows]]:
    """A table for each number, of the rows that have it, in their order."""
    if (numbers[1:] < numbers[:-1]).any():
        # numpy sorts small integers by radix.
        order = np.argsort(numbers.astype(np.min_scalar_type(numbers.max())), kind="stable")
        rows, numbers = rows.take(pa.array(order)), numbers[order]
    ends = np.append(np.flatnonzero(np.diff(numbers)) + 1, len(numbers)).tolist()
    for begin, end in itertools.pairwise([0, *ends] if len(numbers) else []):
        yield int(numbers[begin]), rows.slice(begin, end - begin)


def cut_into_pieces(rows: Rows, of: Bucketed, bits: int, spec: TableSpec) -> list[Rows]:
    """The rows of a bucket in its 2^``bits`` parts, each in their order."""
    numbers = buckets(key_hashes(rows.select(spec.stored_key), spec), of.bits + bits) - (of.bucket << bits)
    found = dict(cut_by_number(rows, numbers))
    return [found.get(number, rows.slice(0, 0)) for number in range(1 << bits)]


def _hashes(columns: Sequence[pa.Array]) -> Hashes:
    """The hash of each of n > 0 rows of some columns."""
    n = len(columns[0])
    fixed = [[] if is_bytes(column.type) else _fixed_words(column) for column in columns]
    texts = [texts_of(column) if is_bytes(column.type) else None for column in columns]
    sizes = np.full(n, sum(map(len, fixed)))
    for text in texts:
        if text is not None:
            sizes += 1 + _word_count(text.lengths)
    hashes = np.empty(n, np.uint64)
    if len(long := few_long(sizes << 3)):
        for row in long.tolist():
            words: list[int] = []
            for numbers, text in zip(fixed, texts, strict=True):
                words += map(int, (one[row] for one in numbers))
                words += [int(text.lengths[row]), *text.words_of(row)] if text else []
            hashes[row] = _xxh64_of_one(words)
        if len(rest := np.delete(np.arange(n), long)):
            fixed = [[one[rest] for one in numbers] for numbers in fixed]
            texts = [text and text.take(rest) for text in texts]
            hashes[rest] = _hashes_together(fixed, texts, sizes[rest])
        return hashes
    return _hashes_together(fixed, texts, sizes)


def _hashes_together(fixed: Sequence[Sequence[Words]], texts: Sequence[Texts | None], sizes: Indices) -> Hashes:
    """The hashes of rows with so many words, by a few calls of numpy for each word of the longest."""
    longest = sizes.max()
    if sizes.min() == longest:
        return _xxh64(_lanes(fixed, texts, sizes), sizes)
    # Longest first, so that the rows that have a j-th word are at the front. (numpy sorts small integers by radix.)
    order = np.argsort((longest - sizes).astype(np.min_scalar_type(longest)), kind="stable")
    fixed = [[words[order] for words in of_column] for of_column in fixed]
    texts = [text and text.take(order) for text in texts]
    hashes = np.empty(len(sizes), np.uint64)
    sizes = sizes[order]
    hashes[order] = _xxh64(_lanes(fixed, texts, sizes), sizes)
    return hashes


def _lanes(fixed: Sequence[Sequence[Words]], texts: Sequence[Texts | None], sizes: Indices) -> list[Words]:
    """The j-th words of all rows that have one, for each j. ``sizes``: words per row, in descending order."""
    n = len(sizes)
    ends = np.cumsum(n - np.cumsum(np.bincount(sizes))[:-1])
    lanes = _Lanes(np.append(0, ends), np.empty(ends[-1], np.uint64), np.arange(n))
    place: int | Indices = 0
    for numbers, text in zip(fixed, texts, strict=True):
        for words in numbers:
            lanes.put(place, slice(n), words)
            place = place + 1
        if text is not None:
            lanes.put(place, slice(n), text.lengths.astype(np.uint64))
            for i, (here, words) in enumerate(byte_words(text), start=1):
                lanes.put(place + i, here, words)
            counts = 1 + _word_count(text.lengths)
            place = place + (counts[0] if counts.min() == counts.max() else counts)
    return np.split(lanes.words, ends[:-1])


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The lanes of `_lanes` one behind the other in ``words``; lane j begins at ``begins[j]``. ``rows``: 0, 1, … n - 1."""

    begins: Indices
    words: Words
    rows: Indices

    def put(self, place: int | Indices, here: slice | Indices, words: Words) -> None:
        """Write words of the rows ``here`` into the lane ``place``, which is one number or one per row."""
        if isinstance(place, np.ndarray):
            self.words[self.begins[place[here]] + self.rows[here]] = words
        elif isinstance(here, slice):
            self.words[self.begins[place] : self.begins[place] + here.stop] = words
        else:
            self.words[self.begins[place] + here] = words


def _word_count(lengths: Indices) -> Indices:
    return (lengths + 7) >> 3


def _fixed_words(array: pa.Array) -> list[Words]:
    """The canonical bytes of a column that is neither text nor binary: one array per word."""
    t, type_ = pa.types, array.type
    if t.is_date64(type_):
        array = array.cast(pa.date32())
    if not t.is_decimal(type_):
        return [number_words(array)]
    if type_.bit_width < 128:
        array = array.cast(pa.decimal128(type_.precision, type_.scale))
    limbs = values(array, f"({array.type.bit_width // 64},)u8")
    return [limbs[:, i] for i in range(2 if type_.precision <= 38 else 4)]


def _xxh64(lanes: Sequence[Words], sizes: Indices) -> Hashes:
    """XXH64 of messages of 8-byte words, given as in `_lanes`.

    https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, each step on all messages at once.
    """
    hashes = np.full(len(sizes), _P5)
    # Four words are a stripe. For each word, how many messages have its whole stripe; these come first, as they are the longest.
    whole = [len(lanes[j | 3]) if j | 3 < len(lanes) else 0 for j in range(len(lanes))]
    if many := whole[0]:
        sums = [_round(lane[:many], start) for lane, start in zip(lanes, _STARTS, strict=False)]
        for j in range(4, len(lanes)):
            some = sums[j % 4][: whole[j]]
            some[:] = _round(lanes[j][: whole[j]], some)
        long = hashes[:many]
        long[:] = 0
        for total, bits in zip(sums, (1, 7, 12, 18), strict=True):
            long += total << np.uint64(bits)
            long += total >> np.uint64(64 - bits)
        for total in sums:
            long ^= _round(total)
            long *= _P1
            long += _P4
    hashes += sizes.astype(np.uint64) << np.uint64(3)
    for lane, done in zip(lanes, whole, strict=True):
        if done < len(lane):
            rest = hashes[done : len(lane)]
            rest ^= _round(lane[done:])
            rest[:] = _rotate(rest, 27)
            rest *= _P1
            rest += _P4
    hashes ^= hashes >> np.uint64(33)
    hashes *= _P2
    hashes ^= hashes >> np.uint64(29)
    hashes *= _P3
    hashes ^= hashes >> np.uint64(32)
    return hashes


def _xxh64_of_one(words: Sequence[int]) -> int:
    """As `_xxh64`, of one message."""
    p1, p2, p3, p4, whole = int(_P1), int(_P2), int(_P3), int(_P4), len(words) & ~3

    def rotate(word: int, bits: int) -> int:
        return (word << bits | word >> (64 - bits)) % 2**64

    def mixed(word: int, total: int = 0) -> int:
        return rotate((total + word * p2) % 2**64, 31) * p1 % 2**64

    hash_, sums = int(_P5), list(map(int, _STARTS))
    for i in range(0, whole, 4):
        sums = [mixed(word, total) for word, total in zip(words[i : i + 4], sums, strict=True)]
    if whole:
        hash_ = sum(rotate(total, bits) for total, bits in zip(sums, (1, 7, 12, 18), strict=True))
        for total in sums:
            hash_ = ((hash_ ^ mixed(total)) * p1 + p4) % 2**64
    hash_ += len(words) << 3
    for word in words[whole:]:
        hash_ = rotate((hash_ ^ mixed(word)) % 2**64, 27) * p1 + p4
    hash_ %= 2**64
    hash_ = (hash_ ^ hash_ >> 33) * p2 % 2**64
    hash_ = (hash_ ^ hash_ >> 29) * p3 % 2**64
    return hash_ ^ hash_ >> 32


def _round(words: Words, total: Words | np.uint64 | None = None) -> Words:
    words = words * _P2
    if total is not None:
        words += total
    words = _rotate(words, 31)
    words *= _P1
    return words


def _rotate(words: Words, bits: int) -> Words:
    """``words`` rotated to the left by ``bits``; overwrites ``words``."""
    high = words << np.uint64(bits)
    words >>= np.uint64(64 - bits)
    high |= words
    return high
