"""What a merge leaves in place and what it writes anew: the one place that trades writing now for reading later.

Rewrite writes the whole partition. Delta writes what arrived, and leaves a debt to every reader: bytes of deltas, and rows
in the base that are superseded. Three rules bound it, for a base of B bytes and nights of d bytes:

    debt <= `MOST_DEBT` x B          what a reader reads beyond the live rows; the merge that would pass it rewrites
    `TOGETHER` deltas of a size are folded into one, the new one among them: so there are at most `TOGETHER` - 1 of each of
                                     log8(MOST_DEBT x B / d) sizes, and a row is folded once for each
    below `SMALL_BYTES` of base      all is rewritten: there a request costs more than the bytes

A byte that arrives is so written once, at most once more for each size, and 2 / `MOST_DEBT` times in the rewrite that
pays the debt off (ADR 0014). Beside that a merge writes the base's deletion vector anew: two bytes a superseded row, or a bit
a row of the base where that is less, which for nights below a thousandth of a large base is more than what came.

A bucket is split by the merge that writes it anew and finds that it outgrows `bucket_bytes`: no night pays for it.
"""

from collections.abc import Sequence
from math import ceil, log2
from typing import Literal

from lakeupsert.table.manifest import BucketEntry, DataFile

Strategy = Literal["auto", "rewrite", "delta"]

MOST_DEBT = 0.5
"""Debt, as a share of the base's bytes. More: slower reads. Less: the base is rewritten more often."""
TOGETHER = 8
"""How many deltas of about one size make one. More: readers open more files. Less: rows are folded more often."""
SAME_SIZE = 2
"""A delta is of a size with those that are not so many times smaller."""
SMALL_BYTES = 4 << 20
"""Compressed bytes of a base that `auto` always rewrites. More: more bytes are written. Less: readers open more small files."""
SMALL_FILE = 64 << 10
"""Bytes of a history file that counts as no smaller: of a few rows most are its footer. More: rows are folded more often."""


def in_place(
    strategy: Strategy, bucket: BucketEntry, incoming_bytes: float, bucket_bytes: int
) -> tuple[tuple[DataFile, ...], tuple[DataFile, ...]]:
    """Stored files that the next merge keeps, and deltas that it folds into the new one; none and all where it rewrites."""
    if not bucket.base or not bucket.settled or strategy == "rewrite":
        return (), bucket.deltas
    if _live_bytes(bucket) + incoming_bytes > 2 * bucket_bytes:  # strategy delta would never split it
        return (), bucket.deltas
    base_bytes = sum(file.bytes for file in bucket.base)
    most = debt(bucket) + 2 * incoming_bytes  # each row that comes may supersede one in the base
    if strategy == "auto" and (base_bytes < SMALL_BYTES or most > MOST_DEBT * base_bytes):
        return (), bucket.deltas
    kept = unfolded(bucket.deltas, incoming_bytes)
    return (*bucket.base, *bucket.deltas[:kept]), bucket.deltas[kept:]


def unfolded(files: Sequence[DataFile], size: float) -> int:
    """How many files, from the oldest on, stay as they are when one of ``size`` bytes comes; the others are folded into it."""
    kept = len(files)
    while True:
        run = kept
        while run and files[run - 1].bytes <= SAME_SIZE * size:
            run -= 1
        if kept - run < TOGETHER - 1:
            return kept
        size += sum(file.bytes for file in files[run:kept])
        kept = run


def bits_more(bucket: BucketEntry, incoming_bytes: float, bucket_bytes: int) -> int:
    """Into how many a bucket that is written anew is split, as a power of two, so that none has more than ``bucket_bytes``."""
    return max(0, ceil(log2(max(1, _live_bytes(bucket) + incoming_bytes) / bucket_bytes)))


def as_whole_rows(bucket: BucketEntry, incoming_bytes: float, rows: float) -> float:
    """Bytes of so many incoming rows where each may bring some columns only, and is written as a whole row."""
    stored = sum(file.live for file in bucket.data)
    return max(incoming_bytes, rows * _live_bytes(bucket) / max(1, stored))


def _live_bytes(bucket: BucketEntry) -> float:
    return sum(file.bytes * file.live / max(1, file.rows) for file in bucket.data)


def worth_compacting(bucket: BucketEntry, *, full: bool) -> bool:
    """Whether the bucket should be written anew between the nights: then it owes readers half of what a merge bears, or is
    small. ``full``: whether that would change anything."""
    if not bucket.settled:
        return True
    owed = debt(bucket)
    base_bytes = sum(file.bytes for file in bucket.base)
    return owed > (0 if full or base_bytes < SMALL_BYTES else MOST_DEBT / 2 * base_bytes)


def debt(bucket: BucketEntry) -> float:
    """Bytes that a reader reads beyond one base of the rows that live."""
    superseded = sum(file.bytes * file.deleted.rows / file.rows for file in bucket.base if file.deleted)
    return sum(file.bytes for file in bucket.deltas) + superseded
