"""A snapshot: one manifest version per partition. Every reader starts from a snapshot. A chain."""

import msgspec

from lakeupsert.errors import DamagedTableError
from lakeupsert.table.chain import Link
from lakeupsert.table.manifest import NO_CHANGES, Changes, Manifest

WRITE_ID_DIGITS = 8
"""Of a manifest's write id in a snapshot. More: each snapshot of a table of many partitions grows. Less: two may be equal."""


class Grouped(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a manifest that a snapshot shows instead of a version of the partition's chain.

    Attributes:
        name: of the group, an object with the manifests of several partitions.
        merged: of the chain's version, which is older. Batches above it are not merged there.
    """

    name: str
    merged: int


class PartitionVersion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One partition in a snapshot: its manifest version and that version's figures.

    Attributes:
        files: how many objects it has in the store.
        added: `Manifest.added`, if the versions since the one that the snapshot before shows added none; else -1.
        bits: the most bits of its buckets. `append` cuts what arrives accordingly.
        deltas: the most delta files of a bucket.
        debt: see `BucketEntry.debt`, of all buckets.
        write_id: the first digits of the manifest's. A version that was lost and written again has another one, and may have the
            same figures.
        group: if it shows a manifest in a group: ``version`` is then the newest of the chain, on which that one is based.
    """

    version: int
    merged: int
    rows: int
    bytes: int
    files: int
    added: int = -1
    bits: int = 0
    deltas: int = 0
    debt: int = 0
    write_id: str
    group: Grouped | None = None

    @property
    def merged_in_chain(self) -> int:
        """`Manifest.merged` of ``version`` itself."""
        return self.group.merged if self.group else self.merged

    @classmethod
    def of(cls, manifest: Manifest, version: int, write_id: str = "") -> "PartitionVersion":
        """The figures of a manifest. ``version`` is its number and ``write_id`` its writer's; -1 and none if it is not stored."""
        return cls(
            version=version,
            merged=manifest.merged,
            rows=manifest.rows,
            bytes=manifest.bytes,
            files=manifest.files,
            bits=max((bucket.bits for bucket in manifest.buckets), default=0),
            deltas=max((len(bucket.deltas) for bucket in manifest.buckets), default=0),
            debt=round(sum(bucket.debt for bucket in manifest.buckets)),
            write_id=write_id[:WRITE_ID_DIGITS],
        )


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All partitions at batch ``batch``.

    Attributes:
        lagging: partitions that lack newer batches.
        tags: names that people gave to snapshots, with the snapshots' numbers. Each snapshot repeats them.
        expired: snapshots below this number are expired, except those with a tag. Each snapshot repeats it.
        changes: what the merges since the previous snapshot changed. A snapshot that only changes tags or expiry repeats it.
    """

    batch: int
    spec_version: int
    partitions: dict[str, PartitionVersion] = {}
    lagging: tuple[str, ...] = ()
    tags: dict[str, int] = {}
    expired: int = 0
    changes: Changes = NO_CHANGES

    def keeps(self, number: int) -> bool:
        """Whether snapshot ``number`` may still be read. Only the newest snapshot knows."""
        return number >= self.expired or number in self.tags.values()

    def lost(self, partition: str, head: Link[Manifest] | None) -> bool:
        """Whether the partition's version in this snapshot is lost: its ``head``, read later, is older.

        A fence that was appended to the remaining versions may have that number, but it has a smaller `merged`.
        """
        shown = self.partitions.get(partition)
        return shown is not None and (
            head is None or head.number < shown.version or head.body.merged < shown.merged_in_chain
        )

    def shows(self, other: "Snapshot") -> bool:
        """Whether readers of both snapshots see the same."""
        return (self.batch, self.partitions, self.lagging) == (other.batch, other.partitions, other.lagging)

    @property
    def partitions_with_rows(self) -> int:
        """How many partitions readers see. A partition whose rows were all deleted or withdrawn stays in the snapshot."""
        return sum(p.rows > 0 for p in self.partitions.values())

    @property
    def bits(self) -> dict[str, int]:
        """The most bits of the buckets of each partition that has several."""
        return {name: shown.bits for name, shown in self.partitions.items() if shown.bits}

    @property
    def manifests(self) -> int:
        """How many manifests are stored at most, up to its own: then none is trimmed."""
        return sum(shown.version + 1 for shown in self.partitions.values())

    @property
    def rows(self) -> int:
        return sum(p.rows for p in self.partitions.values())

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.partitions.values())


def check_snapshot(old: Snapshot | None, new: Snapshot) -> None:
    """Check the invariants of snapshots: batch and versions never decrease, and no partition disappears."""
    wrong = []
    if old is not None:
        if new.expired < old.expired:
            wrong.append(f"expired snapshots would become readable again: {new.expired} after {old.expired}")
        if new.batch < old.batch:
            wrong.append(f"batch decreases from {old.batch} to {new.batch}")
        for partition, shown in old.partitions.items():
            now = new.partitions.get(partition)
            if now is None or now.version < shown.version or now.merged < shown.merged:
                wrong.append(f"{partition} goes back from version {shown.version}")
    wrong += [f"{p} is merged beyond batch {new.batch}" for p, s in new.partitions.items() if s.merged > new.batch]
    wrong += [f"{p} lags and is not in the snapshot" for p in new.lagging if p not in new.partitions]
    if wrong:
        raise DamagedTableError(
            "broken-invariant",
            f"The next snapshot contradicts itself: {'; '.join(wrong[:5])}. It was not written; readers keep the previous one.",
            next="report this as a bug of lakeupsert",
        )
