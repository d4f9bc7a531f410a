"""What a merge keeps in place and what it rewrites. This is the one place that trades writing now for reading later.

`steps` overrides it for full extracts, reprocesses and deletes that expire; `strategy_of` for readers that would show
superseded rows.

Rewrite writes the whole partition. Delta writes what arrived, and leaves a debt that every reader pays: the bytes of deltas, and
superseded rows in the base. Three rules bound the debt, for a base of B bytes and nights of d bytes:

    debt <= `MOST_DEBT` x B          what a reader reads beyond the live rows; a merge that would pass it rewrites
    `TOGETHER` deltas of a size are folded into one, the new one included: so there are at most `TOGETHER` - 1 of each of
                                     log8(MOST_DEBT x B / d) sizes, and a row is folded once for each size
    below `SMALL_BYTES` of base      everything is rewritten: there a request costs more than the bytes

So a byte that arrives is written once, at most once more for each size, and 2 / `MOST_DEBT` times in the rewrite that pays off
the debt (ADR 0014). A merge also rewrites the base's deletion vector: two bytes for each superseded row, or one bit for each row
of the base if that is less. For nights below a thousandth of a large base, that is more than what arrived.

A bucket is split by the merge that rewrites it and finds it larger than `bucket`, so no night pays for the split. A bucket is
not split if no part can be smaller, whatever `bucket` asks for, so the same updates night after night split it once. A
compaction joins buckets that the same rule would not split with a quarter of `bucket`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Literal

import pyarrow as pa

from lakeupsert.config import PUBLISHERS, TableSettings
from lakeupsert.publishers import hides_vectors
from lakeupsert.rows.datafiles import bytes_without_rows
from lakeupsert.table.manifest import BucketEntry, DataFile, first_hash
from lakeupsert.table.snapshot import PartitionVersion

Strategy = Literal["auto", "rewrite", "delta"]

MOST_DEBT = 0.5
"""The most debt, as a share of the base's bytes. More: slower reads. Less: the base is rewritten more often."""
TOGETHER = 8
"""So many deltas of about one size are folded into one. More: readers open more files. Less: rows are folded more often."""
SAME_SIZE = 2
"""A stored delta is folded with a new one, and counts as one of its size, if it is at most this many times as large."""
SMALL_BYTES = 4 << 20
"""Strategy `auto` rewrites any base of fewer compressed bytes. More: more bytes are written. Less: readers open more small
files."""
MOST_DELTAS = 4
"""`maintain` rewrites a base of less than `SMALL_BYTES` that has more deltas. More: readers open more files. Less: more is
written."""
SMALL_FILE = 64 << 10
"""A history file counts as at least this many bytes, because a file of a few rows is mostly footer. More: rows are folded more
often."""
MOST_BITS = 32
"""No bucket has more bits than this. The rule would ask for more only above four thousand million rows in a partition."""
FAR_SMALLER = 4
"""A compaction joins two buckets if their rows together take at most 1 / `FAR_SMALLER` of `bucket`. More: buckets that
shrank stay apart. Less: the next nights split again what was joined."""


@dataclass(frozen=True)
class Incoming:
    """What arrives for a bucket or a partition: compressed bytes and rows. A file for several buckets counts in parts."""

    bytes: float
    rows: float

    def as_whole_rows(self, bucket: BucketEntry) -> "Incoming":
        """These rows, which may have some of the columns only, counted as the whole rows that are written."""
        stored = sum(file.live for file in bucket.data)
        stored_bytes = sum(file.bytes * file.live / max(1, file.rows) for file in bucket.data)
        return replace(self, bytes=max(self.bytes, self.rows * stored_bytes / max(1, stored)))


@dataclass(frozen=True)
class SplitRule:
    """When the buckets of a partition are split, and which files a merge keeps that does not split them.

    Attributes:
        bucket_bytes: the setting `bucket`.
        file_bytes: a file's bytes apart from its rows. No split reduces them, and no bucket's rows need to take fewer.
        most_bits: 2^bits is at most the number of the partition's rows. With more bits, most buckets would be empty.
    """

    bucket_bytes: int
    file_bytes: int
    most_bits: int

    @classmethod
    def of(
        cls, bucket_bytes: int, types: Iterable[pa.DataType], buckets: Iterable[BucketEntry], incoming: float = 0
    ) -> "SplitRule":
        """The rule for a partition.

        Args:
            types: of the columns of its files.
            incoming: how many rows arrive. Each may be an update of a stored row.
        """
        stored = sum(file.live for bucket in buckets for file in bucket.data)
        return cls(bucket_bytes, bytes_without_rows(types), min(MOST_BITS, _most_halvings(max(stored, incoming))))

    def extra_bits(self, bucket: BucketEntry, incoming: Incoming) -> int:
        """By how many bits to split a bucket that is rewritten: into 2^bits buckets, so many that the rows of none take more than
        `bucket`, if there are rows for so many."""
        return self._extra_bits(bucket, incoming, self.bucket_bytes)

    def in_place(
        self, strategy: Strategy, bucket: BucketEntry, incoming: Incoming
    ) -> tuple[tuple[DataFile, ...], tuple[DataFile, ...]]:
        """The stored files that the next merge keeps, and the deltas that it folds into the new one. A rewrite keeps none and
        folds all."""
        if not bucket.base or not bucket.settled or strategy == "rewrite":
            return (), bucket.deltas
        if self._extra_bits(bucket, incoming, 2 * self.bucket_bytes):  # strategy delta would never split it
            return (), bucket.deltas
        base_bytes = sum(file.bytes for file in bucket.base)
        most = bucket.debt + 2 * incoming.bytes  # each incoming row may supersede one in the base
        if strategy == "auto" and (base_bytes < SMALL_BYTES or most > MOST_DEBT * base_bytes):
            return (), bucket.deltas
        kept = unfolded_count(bucket.deltas, incoming.bytes)
        return (*bucket.base, *bucket.deltas[:kept]), bucket.deltas[kept:]

    def _extra_bits(self, bucket: BucketEntry, incoming: Incoming, bucket_bytes: int) -> int:
        stored = sum(max(0, f.bytes - self.file_bytes) * f.live / max(1, f.rows) for f in bucket.data)
        size = stored + incoming.bytes
        if size <= bucket_bytes:
            return 0
        wanted = ceil(log2(size / max(bucket_bytes, self.file_bytes)))
        keys = max(sum(f.live for f in bucket.data), incoming.rows)
        return max(0, min(wanted, _most_halvings(keys), self.most_bits - bucket.bits))

    def join(self, buckets: Iterable[BucketEntry]) -> list[BucketEntry]:
        """The buckets in the order of their hashes, after joining those that were split too far."""
        done: list[BucketEntry] = []
        for bucket in sorted(buckets, key=first_hash):
            while done and done[-1].bits == bucket.bits and done[-1].bucket == bucket.bucket ^ 1:
                both = _join(done[-1], bucket)
                if self._extra_bits(both, Incoming(0, 0), self.bucket_bytes // FAR_SMALLER):
                    break
                done.pop()
                bucket = both
            done.append(bucket)
        return done


def _join(one: BucketEntry, other: BucketEntry) -> BucketEntry:
    """Two halves of a bucket as one bucket to merge next. All files become deltas, so none stays in place: both bases have rows
    of the same key ranges, and a merge streams a base in key order."""
    return BucketEntry(
        id="",
        bucket=one.bucket >> 1,
        bits=one.bits - 1,
        deltas=(*one.data, *other.data),
        tombstones=(*one.tombstones, *other.tombstones),
        history=(*one.history, *other.history),
    )


def _most_halvings(rows: float) -> int:
    """How often so many rows can be halved before a part has less than one row."""
    return max(1, int(rows)).bit_length() - 1


def strategy_of(settings: TableSettings, partition: str) -> Strategy:
    """How merges of a partition write: as configured, or rewrite if some reader would otherwise show superseded rows.

    With `auto`, that is if nothing superseded is kept, since readers then list folders. With a Delta log, it is if the folder's
    name has a character that URLs escape, since Polars finds no deletion vector of a file there. Readers of Hive's and Glue's
    tables know no deletion vectors.
    """
    by_folder = not settings.retention and settings.strategy == "auto"
    kinds = [PUBLISHERS[name] for name in settings.publishers]
    by_reader = any(kind.plain_files or (kind.plain_folders and hides_vectors(partition)) for kind in kinds)
    return "rewrite" if by_folder or by_reader else settings.strategy


def unfolded_count(files: Sequence[DataFile], size: float) -> int:
    """How many files, from the oldest on, stay when one of ``size`` bytes arrives. The others are folded into the new one."""
    kept = len(files)
    while True:
        run = kept
        while run and files[run - 1].bytes <= SAME_SIZE * size:
            run -= 1
        if kept - run < TOGETHER - 1:
            return kept
        size += sum(file.bytes for file in files[run:kept])
        kept = run


def worth_compacting(bucket: BucketEntry, *, full: bool, most_deltas: int | None = None) -> bool:
    """Whether to rewrite the bucket between nights: it has half the debt at which a merge rewrites, or it is small and has any;
    with ``most_deltas``, if it is small and has more deltas. With ``full``, any debt is enough."""
    if not bucket.settled:
        return True
    base_bytes = sum(file.bytes for file in bucket.base)
    if most_deltas is not None and base_bytes < SMALL_BYTES:
        return len(bucket.deltas) > most_deltas
    return bucket.debt > (0 if full or base_bytes < SMALL_BYTES else MOST_DEBT / 2 * base_bytes)


def is_due(shown: PartitionVersion) -> bool:
    """Whether `maintain` rewrites a partition, as `worth_compacting` of its buckets together. They may differ at the bounds."""
    needed = shown.bytes - shown.debt
    if needed < SMALL_BYTES << shown.bits:
        return shown.deltas > MOST_DELTAS
    return shown.debt > MOST_DEBT / 2 * needed
