"""A manifest: what one partition consists of, at one version. A chain per partition, so partitions never conflict."""

from collections.abc import Iterable
from typing import Protocol

import msgspec

from lakeupsert.errors import DamagedTableError
from lakeupsert.table import metadata

HASH_BITS = 64
NO_ROWS = "0" * 16
"""The digest of nothing; see docs/FORMAT.md, "Digests"."""


class Bucketed(Protocol):
    """Of 2^``bits`` buckets, the one that all its keys are in (docs/FORMAT.md, "Buckets")."""

    @property
    def bucket(self) -> int: ...

    @property
    def bits(self) -> int: ...


def share(of: Bucketed, within: Bucketed) -> float:
    """Which part of the keys of the one bucket are in the other, as hashes go: 0, 1, or what splits of it leave."""
    finer = within.bits - of.bits
    if finer <= 0:
        return float(of.bucket >> -finer == within.bucket)
    return 0.5**finer if within.bucket >> finer == of.bucket else 0.0


def first_hash(of: Bucketed) -> int:
    """The least hash in a bucket; buckets of a partition are in its order."""
    return of.bucket << HASH_BITS - of.bits


class DeletionVector(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which rows of a data file are superseded: a Roaring bitmap of their positions. Few of them lie here.

    Attributes:
        rows: how many they are.
        size: bytes of the bitmap.
        name: the object that has it, beside others, ``at`` some place; empty where it is ``inline``.
        crc: the CRC-32 of the bitmap's bytes there; None in manifests of an earlier lakeupsert, and of what is ``inline``.
    """

    rows: int
    size: int
    name: str = ""
    at: int = 0
    inline: bytes = b""
    crc: int | None = None


class DataFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An immutable Parquet file.

    Attributes:
        name: the object's, relative to the table.
        at: where it begins in that object, which has ``bytes`` bytes of it and other files; None: it is the whole object.
        deleted: the rows that nobody is to see any more; None: they all live.
        bucket, bits: see `Bucketed`.
        renames: how many renames and drops of columns its spec has; its columns are called as then (`TableSpec.names_in`).
    """

    name: str
    rows: int
    bytes: int
    at: int | None = None
    deleted: DeletionVector | None = None
    bucket: int = 0
    bits: int = 0
    renames: int = 0

    @property
    def live(self) -> int:
        """Rows that readers see."""
        return self.rows - (self.deleted.rows if self.deleted else 0)

    @property
    def objects(self) -> list[str]:
        """What it needs in the store."""
        return [name for name in (self.name, self.deleted.name if self.deleted else "") if name]


class TombstoneFile(DataFile, frozen=True, kw_only=True, omit_defaults=True):
    """A file of deleted keys; where they are few, they lie here and not in the store (ADR 0007).

    Attributes:
        inline: an Arrow IPC stream of the rows; ``name`` is then empty, and ``bytes`` is its length.
        since: the least receipt stamp of the batches that deleted the keys; 0 where that of some is not known, None where
            it is not in it of any.
    """

    inline: bytes = b""
    since: int | None = None


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Where every row that was ever appended to a bucket is; `appended` is the sum of all others.

    Of rows that never met a bucket, as append settled them or a restore withdrew them, and of what was before a split, the
    first of the partition's buckets that a merge wrote keeps count.
    """

    appended: int = 0
    live: int = 0
    tombstones: int = 0
    superseded: int = 0
    tombstones_dropped: int = 0
    refused: int = 0
    withdrawn: int = 0


class Digests(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of rows that are in no file of a bucket any more; None: not known.

    They are of the rows that the counters of these names count; `adopted` is of what batch 0 brought, which nobody knows
    before the first merge reads it.
    """

    adopted: str | None = None
    superseded: str | None = None
    withdrawn: str | None = None
    tombstones_dropped: str = NO_ROWS
    refused: str = NO_ROWS


class Changes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of the keys that a batch brought (docs/SEMANTICS.md, "What a batch changed"); each is counted once."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    unchanged: int = 0
    late: int = 0

    def __add__(self, other: "Changes") -> "Changes":
        return Changes(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


NO_CHANGES = Changes()
GONE = ("superseded", "tombstones_dropped", "refused", "withdrawn")
"""Counters of rows that are in no file of a bucket any more; each has a digest of its name."""
NO_DIGESTS = Digests(adopted=NO_ROWS, superseded=NO_ROWS, withdrawn=NO_ROWS)


class BucketEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One bucket. ``id`` is new whenever rows were merged into it, even where none won: who lost a race redoes it.

    Attributes:
        bucket, bits: see `Bucketed`; those of a partition have every key in one of them.
        settled: a key lives once in all the files, and each is in key order. Not so in adopted files: the first merge
            settles them.
        base: in key order from file to file.
        deltas: newer rows, oldest file first; the rows that they supersede are marked in ``base`` and in older deltas.
        history: superseded versions, in tables that keep them; a split leaves those of all keys to its first bucket.
        floor: the greatest order that tombstones had which were dropped (see `rows.floor`); None: none was.
    """

    id: str
    bucket: int = 0
    bits: int = 0
    settled: bool = True
    base: tuple[DataFile, ...] = ()
    deltas: tuple[DataFile, ...] = ()
    tombstones: tuple[TombstoneFile, ...] = ()
    history: tuple[DataFile, ...] = ()
    floor: str | None = None
    counters: Counters = Counters()
    digests: Digests = Digests()

    @property
    def data(self) -> tuple[DataFile, ...]:
        """The files that readers read."""
        return (*self.base, *self.deltas)

    @property
    def objects(self) -> set[str]:
        """What it needs in the store."""
        return {name for file in (*self.data, *self.tombstones, *self.history) for name in file.objects}


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """Merging batch ``batch`` failed at the last receive; `merged` stays where it was. Cleared by the merge of ``batch``."""

    batch: int
    reason: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a partition.

    Attributes:
        merged: every batch up to this one that touches the partition is in it, and none beyond.
        spec_version: the spec that its newest files were written under.
        fence: the number of the last version that is a fence: writers that began below it may not commit.
        quarantine: objects with rows that dedupe itself refused.
        reprocessed: the last work object that was done to the partition, so that nobody does it twice.
        entry: the write id of ledger entry ``merged``, by which one is found that another batch has taken the number of; None in
            manifests of an earlier lakeupsert, and of adopted files.
        changes: what the merge of its batches changed; versions that merge none repeat it.
        made: how this version came about (engine, strategy, seconds, worker), for people.
    """

    partition: str
    merged: int
    spec_version: int
    buckets: tuple[BucketEntry, ...] = ()
    failed: Failed | None = None
    fence: int | None = None
    quarantine: tuple[str, ...] = ()
    reprocessed: str | None = None
    entry: str | None = None
    changes: Changes = NO_CHANGES
    made: dict[str, str | float | int] = {}

    @property
    def rows(self) -> int:
        return sum(f.live for b in self.buckets for f in b.data)

    @property
    def bytes(self) -> int:
        files = [f for b in self.buckets for f in (*b.data, *b.tombstones)]
        return sum(f.bytes + (f.deleted.size if f.deleted else 0) for f in files)

    @property
    def files(self) -> int:
        """Objects in the store; tombstones and vectors that lie in the manifest itself are in none."""
        return sum(len(b.objects) for b in self.buckets)


def added(digests: Iterable[str | None]) -> str | None:
    """The digest of all the rows that these are of; None where one is not known."""
    total = 0
    for digest in digests:
        if digest is None:
            return None
        try:
            total += int(digest, 16)
        except ValueError as e:  # of an object that an earlier lakeupsert wrote, which has no digest of its own
            raise metadata.damaged("A manifest or ledger entry", "one with digests of rows", str(e)) from e
    return f"{total % 2**64:016x}"


def check_manifest(old: Manifest | None, new: Manifest) -> None:
    """Invariants of a partition's chain."""
    wrong = []
    if new.buckets and sum(1 << HASH_BITS - b.bits for b in new.buckets) != 1 << HASH_BITS:
        wrong.append(f"its buckets are {[(b.bucket, b.bits) for b in new.buckets]}")
    if old is not None and new.partition != old.partition:
        wrong.append(f"it is of {new.partition}")
    if old is not None and new.merged < old.merged:
        wrong.append(f"`merged` falls from {old.merged} to {new.merged}")
    if new.failed is not None and new.failed.batch <= new.merged:
        wrong.append(f"batch {new.failed.batch} is marked failed and is merged")
    for bucket in new.buckets:
        c = bucket.counters
        accounted = c.live + c.tombstones + sum(getattr(c, name) for name in GONE)
        if c.appended != accounted:
            wrong.append(f"bucket {bucket.bucket}: {c.appended} rows appended, {accounted} accounted for")
        if c.live != sum(f.live for f in bucket.data) or c.tombstones != sum(f.rows for f in bucket.tombstones):
            wrong.append(f"bucket {bucket.bucket}: its counters are not what its files hold")
    if wrong:
        raise DamagedTableError(
            "broken-invariant",
            f"The next manifest of {new.partition} contradicts itself: {'; '.join(wrong)}. It was not written.",
            next="report this as a bug of lakeupsert; readers keep the version before",
            partition=new.partition,
        )
