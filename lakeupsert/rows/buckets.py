"""Buckets: ranges of the hashes of keys, which every host, engine and release has to compute alike.

The hash is XXH64 over a key's canonical bytes (docs/FORMAT.md, "Buckets"), and our own: those of Spark, Arrow and Polars
differ by type or release. A change here puts stored rows into other buckets than incoming ones, and a key would be there twice.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from lakeupsert.rows.words import byte_words, extents, is_bytes, number_words, values
from lakeupsert.table.manifest import Bucketed, share
from lakeupsert.table.spec import TableSpec

BLOCK_ROWS = 1 << 13
"""Rows hashed at once: the dozen arrays of a step stay in the processor's cache, and numpy's calls cost little a row."""

_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
)
_STARTS = tuple(np.uint64(x % 2**64) for x in (int(_P1) + int(_P2), int(_P2), 0, -int(_P1)))


def key_hashes(rows: Any, spec: TableSpec) -> Any:
    """The hash of the key of every row of a table that has the key columns (numpy, uint64).

    Raises:
        ValueError: a key is null, or a column has another type than the spec and a value that the spec's can't hold exactly.
    """
    fields = [spec.schema.field(name).remove_metadata().with_nullable(False) for name in spec.stored_key]
    keys = rows.select(spec.stored_key).cast(pa.schema(fields)).combine_chunks()
    blocks = [_hashes(block.columns) for block in keys.to_batches(max_chunksize=BLOCK_ROWS) if block.num_rows]
    return np.concatenate([np.empty(0, np.uint64), *blocks])


def buckets(hashes: Any, bits: int) -> Any:
    """The bucket of each hash, of 2^``bits`` (numpy, int64)."""
    return (hashes >> np.uint64(64 - bits)).astype(np.int64) if bits else np.zeros(len(hashes), np.int64)


def in_bucket(rows: Any, of: Bucketed, within: Bucketed, spec: TableSpec) -> Any:
    """Those of a file's rows whose keys are in a bucket that is part of the file's."""
    if share(of, within) == 1:
        return rows
    return rows.filter(pa.array(buckets(key_hashes(rows, spec), within.bits) == within.bucket))


def _hashes(columns: Sequence[Any]) -> Any:
    """The hash of each of n > 0 rows of some arrays."""
    n = len(columns[0])
    fixed = [[] if is_bytes(column.type) else _fixed_words(column) for column in columns]
    texts = [extents(column) if is_bytes(column.type) else None for column in columns]
    sizes = np.full(n, sum(map(len, fixed)))
    for text in texts:
        if text is not None:
            sizes += 1 + _word_count(text[2])
    longest = sizes.max()
    if sizes.min() == longest:
        return _xxh64(_lanes(fixed, texts, sizes), sizes)
    # Longest first: the rows that have a j-th word are then those at the front. (numpy sorts small integers by radix.)
    order = np.argsort((longest - sizes).astype(np.min_scalar_type(longest)), kind="stable")
    fixed = [[words[order] for words in of_column] for of_column in fixed]
    texts = [text and (text[0], text[1][order], text[2][order]) for text in texts]
    hashes = np.empty(n, np.uint64)
    sizes = sizes[order]
    hashes[order] = _xxh64(_lanes(fixed, texts, sizes), sizes)
    return hashes


def _lanes(fixed: Sequence[Sequence[Any]], texts: Sequence[Any], sizes: Any) -> list[Any]:
    """The j-th words of all rows that have one, for each j; rows have ``sizes`` words, never more than the row before."""
    n = len(sizes)
    ends = np.cumsum(n - np.cumsum(np.bincount(sizes))[:-1])
    begins = np.append(0, ends)
    words = np.empty(begins[-1], np.uint64)
    rows = np.arange(n)

    def put(place: Any, here: Any, found: Any) -> None:
        """Words into the rows ``here``, at a place that is one number, or one for each row."""
        if isinstance(place, np.ndarray):
            words[begins[place[here]] + rows[here]] = found
        elif isinstance(here, slice):
            words[begins[place] : begins[place] + here.stop] = found
        else:
            words[begins[place] + here] = found

    place: Any = 0
    for numbers, text in zip(fixed, texts, strict=True):
        for found in numbers:
            put(place, slice(n), found)
            place = place + 1
        if text is not None:
            data, at, lengths = text
            put(place, slice(n), lengths.astype(np.uint64))
            for i, (here, found) in enumerate(byte_words(data, at, lengths), start=1):
                put(place + i, here, found)
            counts = 1 + _word_count(lengths)
            place = place + (counts[0] if counts.min() == counts.max() else counts)
    return np.split(words, ends[:-1])


def _word_count(lengths: Any) -> Any:
    return (lengths + 7) >> 3


def _fixed_words(array: Any) -> list[Any]:
    """The canonical bytes of a column that is no text or binary, as one array for each word."""
    t, type_ = pa.types, array.type
    if t.is_date64(type_):
        array = array.cast(pa.date32())
    if not t.is_decimal(type_):
        return [number_words(array)]
    if type_.bit_width < 128:
        array = array.cast(pa.decimal128(type_.precision, type_.scale))
    limbs = values(array, f"({array.type.bit_width // 64},)u8")
    return [limbs[:, i] for i in range(2 if type_.precision <= 38 else 4)]


def _xxh64(lanes: Sequence[Any], sizes: Any) -> Any:
    """XXH64 of messages of 8-byte words: the j-th words of all that have one, for each j; ``sizes`` never grow.

    https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md: step by step, on all messages at once.
    """
    hashes = np.full(len(sizes), _P5)
    # Four words are a stripe. Of each word, how many messages have the whole stripe: the first ones, as they are the longest.
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
            rest[:] = _rotated(rest, 27)
            rest *= _P1
            rest += _P4
    hashes ^= hashes >> np.uint64(33)
    hashes *= _P2
    hashes ^= hashes >> np.uint64(29)
    hashes *= _P3
    hashes ^= hashes >> np.uint64(32)
    return hashes


def _round(words: Any, total: Any = None) -> Any:
    words = words * _P2
    if total is not None:
        words += total
    words = _rotated(words, 31)
    words *= _P1
    return words


def _rotated(words: Any, bits: int) -> Any:
    """To the left; ``words`` is used up."""
    high = words << np.uint64(bits)
    words >>= np.uint64(64 - bits)
    high |= words
    return high
