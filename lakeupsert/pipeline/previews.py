"""Merges whose partitions get no version: a leader publishes them in a group (ADR 0066).

Reads     nothing
Writes    a group, before the snapshot that names it
Repeat    safe: until a snapshot names a group, nothing has happened; a merge that is forgotten is still to be done by its chain

    merge -> preview in memory -> group -> snapshot: committed and published in one create
               '--- another's commit or snapshot: forgotten, and merged again from the chain

A chain stays the only thing that writers build on, so a preview needs no owner and no hand-over: who commits to the chain merges
the batches of the preview once more. Every `MOST_MERGES` batches the leader commits a version, too.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from lakeupsert import clock
from lakeupsert.table.chain import Held, Link
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.manifest import Manifest, check_manifest
from lakeupsert.table.snapshot import Grouped, PartitionVersion, Snapshot

LEAST_PARTITIONS = 3
"""A batch that touches fewer is not worth a group, which costs a request itself."""
MOST_MERGES = 8
"""A preview has up to so many batches that its chain lacks. More: others merge more of them again, and their packs stay longer.
Fewer: more requests."""
MOST_BATCHES = 64
"""A version is due, too, if the chain's is so many batches old. More: who merges them again reads more entries of the ledger."""
KEPT_PREVIEWS = 1024
"""Previews that stay in memory, some 10 MB. Fewer: a partition whose preview is forgotten gets a version in its next batch."""
VERSIONS_A_BATCH = 4
"""So many versions are due in a batch at most, or one for each `MOST_MERGES` partitions: others wait for a later batch."""


@dataclass(frozen=True, kw_only=True)
class Preview(Link[Manifest]):
    """A version of a chain, with what a leader made of it and of later batches as its body. The next version is appended behind
    that one.

    Attributes:
        id: identifies it, as a version's write id.
        base: the version.
        merges: how many merges it is ahead of that one.
    """

    id: str
    base: Link[Manifest]
    merges: int

    @classmethod
    def after(cls, head: Link[Manifest], body: Manifest) -> "Preview":
        check_manifest(head.body, body)
        base, merges = (head.base, head.merges) if isinstance(head, Preview) else (head, 0)
        return cls(**(vars(base) | {"body": body}), id=clock.new_id(), base=base, merges=merges + 1)

    def is_unseen(self, snapshot: Snapshot | None) -> bool:
        """Whether readers of this snapshot lack its last batch."""
        shown = snapshot.partitions.get(self.body.partition) if snapshot else None
        return shown is None or shown.merged < self.body.merged


class Previews:
    """The previews of a leader. It forgets all if another process may have changed what they were made of.

    Attributes:
        wanted: a batch would have had a group if the spec allowed it; the next batch's does.
    """

    def __init__(self, held: Held) -> None:
        self._held = held
        self._previews: dict[str, Preview] = {}
        self._since = float("-inf")
        self._published = -1
        self._of_batch = (-1, 0)
        self.wanted = False

    def add(self, head: Link[Manifest], body: Manifest) -> Preview:
        preview = Preview.after(head, body)
        self._previews.pop(body.partition, None)
        self._previews[body.partition] = preview
        for oldest in list(self._previews)[:-KEPT_PREVIEWS]:
            self._previews.pop(oldest, None)
        return preview

    def store(self, objects: TableObjects, number: int, snapshot: Snapshot) -> Snapshot:
        """Write the manifests of the previews that snapshot ``number`` shows first, and name their group there."""
        new = {p: shown for p, shown in snapshot.partitions.items() if shown.group is not None and not shown.group.name}
        if not new:
            return snapshot
        name = objects.store_group(number, {partition: self._previews[partition].body for partition in new})
        named = {p: replace(shown, group=Grouped(name=name, merged=shown.merged_in_chain)) for p, shown in new.items()}
        return replace(snapshot, partitions=snapshot.partitions | named)

    def forgotten(self, partitions: Collection[str]) -> bool:
        """Whether a preview of one of these has been forgotten since the last call, so that its batch is to be merged again."""
        gone = [partition for partition, preview in self._previews.items() if not self.is_known(preview)]
        for partition in gone:
            del self._previews[partition]
        return not set(gone).isdisjoint(partitions)

    def seen(self, snapshot: int) -> None:
        """A leader saw this one as the newest. Behind another's, a vacuum may have deleted what heads read before it need."""
        if snapshot > self._published:
            self._published = snapshot
            self.forget()

    def forget(self) -> None:
        """Read all heads again. A vacuum that began before the spec allowed groups fences chains, and not the snapshots."""
        self._since = clock.elapsed()

    def published(self, snapshot: int) -> None:
        self._published = snapshot

    def over(self, heads: Mapping[str, Link[Manifest]]) -> dict[str, Link[Manifest]]:
        """The heads, with the previews on them in their place."""
        found = dict(heads)
        for partition, head in heads.items() if self._held.leads else ():
            preview = self._previews.get(partition)
            if preview is not None and self.is_known(preview) and preview.write_id == head.write_id:
                found[partition] = preview
        return found

    def is_known(self, head: Link[Manifest]) -> bool:
        """Whether what was read then still counts: no other process has been seen to commit or publish since."""
        return self._held.covers(head.read_at, partition=True) and head.read_at > self._since

    def may_add(self, head: Link[Manifest], batch: int, touched: int) -> bool:
        """Whether a merge of ``batch``, which touches so many partitions, becomes a preview; if not, it becomes a version."""
        if not self.is_known(head) or touched < LEAST_PARTITIONS:
            return False
        known, versions = self._of_batch
        versions = versions if known == batch else 0
        due = isinstance(head, Preview) and (
            head.merges >= MOST_MERGES - 1 or batch - head.base.body.merged >= MOST_BATCHES
        )
        if due and versions < max(VERSIONS_A_BATCH, touched // MOST_MERGES):
            self._of_batch = batch, versions + 1
            return False
        return True


def shown_version(link: Link[Manifest]) -> PartitionVersion:
    """A version or a preview as a snapshot has it; `Previews.store` says where a preview is."""
    if not isinstance(link, Preview):
        return PartitionVersion.of(link.body, link.number, link.write_id)
    return replace(
        PartitionVersion.of(link.body, link.number, link.id), group=Grouped(name="", merged=link.base.body.merged)
    )
