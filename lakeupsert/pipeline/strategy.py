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

A bucket is split by the merge that writes it anew and finds that it outgrows `bucket`: no night pays for it. It is never
split where no part can be smaller, whatever `bucket` asks for, so the same updates night after night split it once. A
compaction joins buckets that the same rule would not split by a quarter of `bucket`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Any, Literal

from lakeupsert.table.manifest import BucketEntry, DataFile, first_hash

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
FILE_BYTES = 1100
"""Bytes that a Parquet file of ours takes beside its rows, and for each column `COLUMN_BYTES`; measured with 1 to 100 columns."""
COLUMN_BYTES = 320
MOST_BITS = 32
"""No bucket gets more bits than so many. A partition would need four thousand million rows for the rule to ask for them."""
FAR_SMALLER = 4
"""A compaction joins two buckets whose rows together take no more than one of so many parts of `bucket`. More: buckets that
shrank stay apart. Less: the next nights split again what was joined."""


@dataclass(frozen=True)
class Incoming:
    """What comes for a bucket or a partition: compressed bytes of its files, rows, and how many files. A file that is for
    several buckets counts in parts."""

    bytes: float
    rows: float
    files: float = 0


@dataclass(frozen=True)
class SplitRule:
    """When the buckets of a partition are split.

    Attributes:
        bucket_bytes: the setting `bucket`.
        file_bytes: what a file takes beside its rows. No split makes that smaller, and no bucket's rows need to be.
        most_bits: with more, most buckets would be empty: 2^bits are no more than the partition has rows.
    """

    bucket_bytes: int
    file_bytes: int
    most_bits: int

    @classmethod
    def of(
        cls, bucket_bytes: int, types: Iterable[Any], buckets: Iterable[BucketEntry], incoming: float = 0
    ) -> "SplitRule":
        """For a partition whose files have columns of these types, and for which so many rows come. Each of them may be an
        update of a stored one."""
        file_bytes = FILE_BYTES + COLUMN_BYTES * sum(map(_leaves, types))
        stored = sum(file.live for bucket in buckets for file in bucket.data)
        return cls(bucket_bytes, file_bytes, min(MOST_BITS, _most_halvings(max(stored, incoming))))

    def bits_more(self, bucket: BucketEntry, incoming: Incoming) -> int:
        """Into how many a bucket that is written anew is split, as a power of two: so many that the rows of none take more
        than `bucket`, as far as it has rows for them."""
        return self._bits_more(bucket, incoming, self.bucket_bytes)

    def outgrown(self, bucket: BucketEntry, incoming: Incoming) -> bool:
        """Whether the bucket has to be written anew, under any strategy, so that it is split."""
        return self._bits_more(bucket, incoming, 2 * self.bucket_bytes) > 0

    def _bits_more(self, bucket: BucketEntry, incoming: Incoming, bucket_bytes: int) -> int:
        stored = sum(max(0, f.bytes - self.file_bytes) * f.live / max(1, f.rows) for f in bucket.data)
        size = stored + max(0.0, incoming.bytes - incoming.files * self.file_bytes)
        if size <= bucket_bytes:
            return 0
        wanted = ceil(log2(size / max(bucket_bytes, self.file_bytes)))
        keys = max(sum(f.live for f in bucket.data), incoming.rows)
        return max(0, min(wanted, _most_halvings(keys), self.most_bits - bucket.bits))

    def joined(self, buckets: Iterable[BucketEntry]) -> list[BucketEntry]:
        """The buckets, in the order of their hashes, with one for those that were split too far."""
        done: list[BucketEntry] = []
        for bucket in sorted(buckets, key=first_hash):
            while done and done[-1].bits == bucket.bits and done[-1].bucket == bucket.bucket ^ 1:
                both = _as_one(done[-1], bucket)
                if self._bits_more(both, Incoming(0, 0), self.bucket_bytes // FAR_SMALLER):
                    break
                done.pop()
                bucket = both
            done.append(bucket)
        return done


def _as_one(one: BucketEntry, other: BucketEntry) -> BucketEntry:
    """Two halves of a bucket as the one to merge next. No file stays in place, so all are deltas: the two bases have rows of
    the same key ranges, and a merge streams a base in key order."""
    return BucketEntry(
        id="",
        bucket=one.bucket >> 1,
        bits=one.bits - 1,
        deltas=(*one.data, *other.data),
        tombstones=(*one.tombstones, *other.tombstones),
        history=(*one.history, *other.history),
    )


def _most_halvings(rows: float) -> int:
    """How often so many rows can be halved before a part has less than one."""
    return max(1, int(rows)).bit_length() - 1


def _leaves(type_: Any) -> int:
    """Columns of a Parquet file that hold the values of a column of this type."""
    return sum(_leaves(type_.field(i).type) for i in range(type_.num_fields)) or 1


def in_place(
    strategy: Strategy, bucket: BucketEntry, incoming: Incoming, rule: SplitRule
) -> tuple[tuple[DataFile, ...], tuple[DataFile, ...]]:
    """Stored files that the next merge keeps, and deltas that it folds into the new one; none and all where it rewrites."""
    if not bucket.base or not bucket.settled or strategy == "rewrite":
        return (), bucket.deltas
    if rule.outgrown(bucket, incoming):  # strategy delta would never split it
        return (), bucket.deltas
    base_bytes = sum(file.bytes for file in bucket.base)
    most = debt(bucket) + 2 * incoming.bytes  # each row that comes may supersede one in the base
    if strategy == "auto" and (base_bytes < SMALL_BYTES or most > MOST_DEBT * base_bytes):
        return (), bucket.deltas
    kept = unfolded(bucket.deltas, incoming.bytes)
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


def as_whole_rows(bucket: BucketEntry, incoming: Incoming) -> Incoming:
    """Incoming rows of which each may bring some columns only, as the whole rows that are written."""
    stored = sum(file.live for file in bucket.data)
    stored_bytes = sum(file.bytes * file.live / max(1, file.rows) for file in bucket.data)
    return replace(incoming, bytes=max(incoming.bytes, incoming.rows * stored_bytes / max(1, stored)))


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
