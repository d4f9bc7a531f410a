"""A manifest: one version of what a partition consists of. Each partition has its own chain, so partitions never conflict.

docs/FORMAT.md, "Manifest", says what each field of a manifest and its files means.
"""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from lakeupsert.errors import DamagedTableError

HASH_BITS = 64
NO_ROWS = "0" * 16
"""The digest of nothing; see docs/FORMAT.md, "Digests"."""


class Bucketed(Protocol):
    """Something with all its keys in one of 2^``bits`` buckets (docs/FORMAT.md, "Buckets")."""

    @property
    def bucket(self) -> int: ...

    @property
    def bits(self) -> int: ...


@dataclass(frozen=True)
class Part:
    """A bucket that is no entry of a manifest."""

    bucket: int
    bits: int


WHOLE = Part(0, 0)
"""A partition that is one bucket."""


def share(of: Bucketed, within: Bucketed) -> float:
    """The share of the keys of bucket ``of`` that are in ``within``: 0, 1, or a fraction if ``within`` is a part of it."""
    finer = within.bits - of.bits
    if finer <= 0:
        return float(of.bucket >> -finer == within.bucket)
    return 0.5**finer if within.bucket >> finer == of.bucket else 0.0


def first_hash(of: Bucketed) -> int:
    """The lowest hash in a bucket. The buckets of a partition are in this order."""
    return of.bucket << HASH_BITS - of.bits


class DeletionVector(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The superseded rows of a data file: a Roaring bitmap of their positions. A small bitmap is stored here."""

    rows: int
    size: int
    name: str = ""
    at: int = 0
    inline: bytes = b""
    crc: int | None = None

    @property
    def identity(self) -> str:
        """Tells it from other vectors of its file: a restore may bring back one that has as many rows."""
        return f"{self.name}:{self.at}" if self.name else f"{zlib.crc32(self.inline):08x}:{self.rows}"


class PieceEnd(msgspec.Struct, frozen=True, array_like=True):
    """Where a piece of a data file ends: how many rows and compressed bytes the file has up to there."""

    rows: int
    bytes: int


_BEGIN = PieceEnd(0, 0)

Bound = int | str | bool | None
"""A value of a column in a manifest (docs/FORMAT.md, "Statistics"). None: not known."""


class ColumnStatistics(msgspec.Struct, frozen=True, array_like=True):
    """What the values of a column in a file are, superseded rows included."""

    id: int
    nulls: int
    least: Bound = None
    greatest: Bound = None


class DataFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An immutable Parquet file, or some row groups of one that is a pack."""

    name: str
    rows: int
    bytes: int
    at: int | None = None
    row: int | None = None
    deleted: DeletionVector | None = None
    bucket: int = 0
    bits: int = 0
    renames: int = 0
    pieces: tuple[PieceEnd, ...] = ()
    statistics: tuple[ColumnStatistics, ...] = ()

    @property
    def live(self) -> int:
        """Rows that readers see."""
        return self.rows - (self.deleted.rows if self.deleted else 0)

    @property
    def place(self) -> tuple[str, int]:
        """The object, and where it begins there; no two files of a table have one place."""
        return self.name, self.row or self.at or 0

    @property
    def objects(self) -> list[str]:
        """The objects that it needs in the store."""
        return [name for name in (self.name, self.deleted.name if self.deleted else "") if name]

    def within(self, of: Bucketed) -> "DataFile":
        """The smallest part of the file that has all its rows with keys in a bucket. A deletion vector counts the rows of all
        pieces, so a file that has one is not cut."""
        most = len(self.pieces).bit_length() - 1
        bits = min(most, of.bits - self.bits)
        if bits <= 0 or self.deleted is not None:
            return self
        each = len(self.pieces) >> bits
        number = of.bucket >> (of.bits - self.bits - bits) & ((1 << bits) - 1)
        begin = self.pieces[number * each - 1] if number else _BEGIN
        ends = self.pieces[number * each : (number + 1) * each]
        own = tuple(PieceEnd(end.rows - begin.rows, end.bytes - begin.bytes) for end in ends)
        return msgspec.structs.replace(
            self,
            at=None if self.at is None else self.at + begin.bytes,
            row=None if self.row is None else self.row + begin.rows,
            rows=own[-1].rows,
            bytes=own[-1].bytes,
            bucket=(self.bucket << bits) + number,
            bits=self.bits + bits,
            pieces=own if each > 1 else (),
        )

    @property
    def in_pieces(self) -> "list[DataFile]":
        """A file for each piece that has rows. Each is in key order."""
        bits = len(self.pieces).bit_length() - 1
        if bits <= 0 or self.deleted is not None:
            return [self]
        numbers = range(self.bucket << bits, (self.bucket + 1) << bits)
        parts = [self.within(Part(number, self.bits + bits)) for number in numbers]
        return [part for part in parts if part.rows]


class TombstoneFile(DataFile, frozen=True, kw_only=True, omit_defaults=True):
    """A file of deleted keys. A few keys are stored here instead of in the store (ADR 0007)."""

    inline: bytes = b""
    since: int | None = None


class Counters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of every row that was ever appended to a bucket; `appended` is the sum of all others.

    Some rows never reach a bucket, because append or a restore drops them. The first bucket of the partition that a merge writes
    counts these, and also the rows from before a split.
    """

    appended: int = 0
    live: int = 0
    tombstones: int = 0
    superseded: int = 0
    tombstones_dropped: int = 0
    refused: int = 0
    withdrawn: int = 0


class Digests(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Digests of rows that are in no file of a bucket any more. None: not known.

    Each is the digest of the rows in the counter of the same name. `adopted` is the digest of batch 0, which is not known before
    the first merge reads its files.
    """

    adopted: str | None = None
    superseded: str | None = None
    withdrawn: str | None = None
    tombstones_dropped: str = NO_ROWS
    refused: str = NO_ROWS


class Changes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a batch did to its keys (docs/SEMANTICS.md, "What a batch changed"). Each key is counted once.

    ``deletes_without_row``: keys with a delete of which nothing was stored; they are among the ``unchanged``.
    ``newer_than_extract``: keys that a full extract lacks and whose row stays, because its order is above the extract's greatest.
    """

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    unchanged: int = 0
    late: int = 0
    newer_than_extract: int = 0
    deletes_without_row: int = 0

    def __add__(self, other: "Changes") -> "Changes":
        return Changes(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


NO_CHANGES = Changes()
GONE = ("superseded", "tombstones_dropped", "refused", "withdrawn")
"""Counters of rows that are in no file of a bucket any more. Each has a digest of the same name."""
NO_DIGESTS = Digests(adopted=NO_ROWS, superseded=NO_ROWS, withdrawn=NO_ROWS)


class BucketEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One bucket of a partition."""

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
    def debt(self) -> float:
        """Bytes that a reader reads beyond one base of the live rows."""
        superseded = sum(file.bytes * file.deleted.rows / file.rows for file in self.base if file.deleted)
        return sum(file.bytes for file in self.deltas) + superseded

    @property
    def objects(self) -> set[str]:
        """The objects that it needs in the store."""
        return {name for file in (*self.data, *self.tombstones, *self.history) for name in file.objects}


class FailedMark(msgspec.Struct, frozen=True, kw_only=True):
    """The merge of batch ``batch`` failed at its last attempt; `merged` did not change. A merge of ``batch`` clears the mark."""

    batch: int
    reason: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One version of a partition. For its fields see docs/FORMAT.md, "Manifest"."""

    partition: str
    merged: int
    spec_version: int
    buckets: tuple[BucketEntry, ...] = ()
    failed: FailedMark | None = None
    fence: int | None = None
    quarantine: tuple[str, ...] = ()
    reprocessed: str | None = None
    entry: str | None = None
    changes: Changes = NO_CHANGES
    added: int = 0
    made: dict[str, str | float | int] = {}

    @property
    def rows(self) -> int:
        return sum(f.live for b in self.buckets for f in b.data)

    @property
    def bytes(self) -> int:
        files = [f for b in self.buckets for f in (*b.data, *b.tombstones)]
        return sum(f.bytes + (f.deleted.size if f.deleted else 0) for f in files)

    @property
    def objects(self) -> set[str]:
        """The objects that it needs in the store. Tombstones and vectors inside the manifest are not objects."""
        return {name for bucket in self.buckets for name in bucket.objects}

    @property
    def files(self) -> int:
        """How many objects it has in the store."""
        return len(self.objects)


def add_digests(digests: Iterable[str | None]) -> str | None:
    """The sum of some digests: the digest of all their rows. None if one is not known."""
    total = 0
    for digest in digests:
        if digest is None:
            return None
        total += int(digest, 16)
    return f"{total % 2**64:016x}"


def check_manifest(old: Manifest | None, new: Manifest) -> None:
    """Check the invariants of a partition's manifests."""
    wrong = []
    if new.buckets and sum(1 << HASH_BITS - b.bits for b in new.buckets) != 1 << HASH_BITS:
        wrong.append(f"its buckets do not cover each hash once: {[(b.bucket, b.bits) for b in new.buckets]}")
    if old is not None and new.partition != old.partition:
        wrong.append(f"it is for {new.partition}, the version before for {old.partition}")
    if old is not None and new.merged < old.merged:
        wrong.append(f"`merged` decreases from {old.merged} to {new.merged}")
    if new.failed is not None and new.failed.batch <= new.merged:
        wrong.append(f"batch {new.failed.batch} is marked failed but is merged")
    for bucket in new.buckets:
        c = bucket.counters
        accounted = c.live + c.tombstones + sum(getattr(c, name) for name in GONE)
        if c.appended != accounted:
            wrong.append(f"bucket {bucket.bucket}: {c.appended} rows appended, {accounted} accounted for")
        if c.live != sum(f.live for f in bucket.data) or c.tombstones != sum(f.rows for f in bucket.tombstones):
            wrong.append(f"bucket {bucket.bucket}: its counters differ from its files")
    if wrong:
        raise DamagedTableError(
            "broken-invariant",
            f"The next manifest of {new.partition} contradicts itself: {'; '.join(wrong)}. It was not written.",
            next="report this as a bug of lakeupsert; readers keep the previous version",
            partition=new.partition,
        )
