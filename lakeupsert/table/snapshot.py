"""A snapshot: a manifest version for every partition, the one thing that readers begin from. A chain."""

import msgspec

from lakeupsert.errors import DamagedTableError
from lakeupsert.table.chain import Link
from lakeupsert.table.manifest import NO_CHANGES, Changes, Manifest


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """One partition in a snapshot: its manifest version, and what that says in short.

    ``files``: how many data files it has; -1 in snapshots of a lakeupsert that did not say.
    """

    version: int
    merged: int
    rows: int
    bytes: int
    files: int = -1


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All partitions at batch ``batch``; those in ``lagging`` lack newer batches and are named because of it.

    ``tags`` are names that people gave to snapshots, with their numbers; ``expired``: snapshots below this number are, but
    for those with a tag. Each snapshot carries both on. ``changes``: by the merges that the snapshot before did not
    show; a snapshot of tags or expiry alone repeats it.
    """

    batch: int
    spec_version: int
    partitions: dict[str, Shown] = {}
    lagging: tuple[str, ...] = ()
    tags: dict[str, int] = {}
    expired: int = 0
    changes: Changes = NO_CHANGES

    def keeps(self, number: int) -> bool:
        """Whether snapshot ``number`` may still be read, as the newest snapshot has it."""
        return number >= self.expired or number in self.tags.values()

    def lost(self, partition: str, head: Link[Manifest] | None) -> bool:
        """Whether the version that this shows of a partition is gone: its ``head``, read later, is from before it.

        A fence that was appended behind what is left has its number, and a smaller `merged`.
        """
        shown = self.partitions.get(partition)
        return shown is not None and (head is None or head.number < shown.version or head.body.merged < shown.merged)

    def shows(self, other: "Snapshot") -> bool:
        """Whether readers of both see the same."""
        return (self.batch, self.partitions, self.lagging) == (other.batch, other.partitions, other.lagging)

    @property
    def partitions_with_rows(self) -> int:
        """How many partitions readers see. One whose rows were all deleted, or withdrawn by a restore, stays listed."""
        return sum(p.rows > 0 for p in self.partitions.values())

    @property
    def rows(self) -> int:
        return sum(p.rows for p in self.partitions.values())

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.partitions.values())


def check_snapshot(old: Snapshot | None, new: Snapshot) -> None:
    """Invariants of the chain of snapshots: batch and versions never fall, no partition vanishes."""
    wrong = []
    if old is not None:
        if new.expired < old.expired:
            wrong.append(f"expired snapshots would come back: {new.expired} after {old.expired}")
        if new.batch < old.batch:
            wrong.append(f"batch falls from {old.batch} to {new.batch}")
        for partition, shown in old.partitions.items():
            now = new.partitions.get(partition)
            if now is None or now.version < shown.version or now.merged < shown.merged:
                wrong.append(f"{partition} falls back from version {shown.version}")
    wrong += [f"{p} is merged beyond batch {new.batch}" for p, s in new.partitions.items() if s.merged > new.batch]
    wrong += [f"{p} lags and is not listed" for p in new.lagging if p not in new.partitions]
    if wrong:
        raise DamagedTableError(
            "broken-invariant",
            f"The next snapshot contradicts itself: {'; '.join(wrong[:5])}. It was not written; readers keep the one before.",
            next="report this as a bug of lakeupsert",
        )
