"""The state of a partition before its next version: where a merge starts, and which batches it merges.

Reads     ledger entries, work objects, and the version that a restore names
Writes    nothing
Repeat    safe: for the same head and batch everybody finds the same state
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from lakeupsert.errors import RefusedError
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.integrity import refuse_another_entry
from lakeupsert.pipeline.previews import Preview
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import LedgerEntry, active_batches
from lakeupsert.table.manifest import NO_DIGESTS, BucketEntry, Manifest
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.work import PartitionRewrite


@dataclass(frozen=True)
class PartitionState:
    """A partition before the version that follows ``head``.

    Attributes:
        base: what the merge starts from: the head, or the version that a restore goes back to.
        pending: ledger entries above ``base`` that touch the partition, up to ``up_to``.
        active: the numbers of those entries whose rows are merged; the others are withdrawn.
        up_to: the batch that `merged` will be.
        entry: the write id of ledger entry ``up_to``.
        work: the work object to rewrite the partition for, at the `merged` that it has.
        work_spec_version: the work object's spec version.
        erased: as in `PartitionRewrite`.
    """

    head: Link[Manifest] | None
    base: Manifest
    pending: tuple[Link[LedgerEntry], ...]
    active: frozenset[int]
    up_to: int
    entry: str | None = None
    work: str | None = None
    work_spec_version: int = 0
    erased: bytes = b""

    @property
    def partition(self) -> str:
        return self.base.partition

    @property
    def start(self) -> int:
        """The number of versions in the chain; see `TableObjects`."""
        return self.head.number + 1 if self.head else 0

    @property
    def buckets(self) -> tuple[BucketEntry, ...]:
        """The buckets that the merge starts from."""
        return self.base.buckets or (BucketEntry(id="", digests=NO_DIGESTS),)

    @property
    def stored_objects(self) -> set[str]:
        """The objects of these buckets."""
        return {name for bucket in self.buckets for name in bucket.objects}

    @property
    def counted(self) -> list[Link[LedgerEntry]]:
        """The pending entries whose rows are merged."""
        return [link for link in self.pending if link.number in self.active]

    @property
    def spec_version(self) -> int:
        """A version is written under its own batch's spec. Under a newer one, readers of that batch would find files that their
        spec does not describe. Readers see a rewritten partition only in a snapshot later than the work object's."""
        last = self.pending[-1].body.spec_version if self.pending else 0
        return max(
            last, self.base.spec_version, self.head.body.spec_version if self.head else 0, self.work_spec_version
        )


def read_states(
    history: History,
    snapshot: Link[Snapshot] | None,
    heads: Mapping[str, Link[Manifest]],
    wanted: Mapping[str, int],
    work: str | None,
) -> dict[str, tuple[Link[Manifest] | None, PartitionState | None]]:
    """For each partition the version to append behind, and its state, None if nothing is left to do. ``heads`` were read after
    ``snapshot``, or committed since."""
    found: dict[str, tuple[Link[Manifest] | None, PartitionState | None]] = {}
    for partition, batch in wanted.items():
        head, shows = heads.get(partition), snapshot.body if snapshot else None
        if isinstance(head, Preview) and head.is_unseen(shows) and batch > head.body.merged:
            head = head.base  # so that each batch gets a version, and can be published if a later one can't
        if work is None:
            head = history.behind(snapshot, partition, head, up_to=batch)
            state = next_state(history, partition, batch, shows, head)
        elif head is not None and head.body.reprocessed == work:
            state = None  # The message came again. Vacuum may have deleted the work object, so that must not be read.
        else:
            head = history.behind(snapshot, partition, head, from_landing=history.work(work).source == "landing")
            shown = shows.partitions.get(partition) if shows else None
            if shown is not None and head is not None and head.body.merged < shown.merged:
                # Readers see later batches in a group. A rewrite without them would be shown only when they are merged.
                state = next_state(history, partition, shown.merged, shows, head)
            else:
                state = rewrite_state(history, head, partition, work)
        found[partition] = head, state
    return found


def merged_up_to(partition: str, head: Link[Manifest] | None, snapshot: Snapshot | None) -> int:
    """A partition has every entry up to this number: by its head, or by the snapshot if that does not list it as lagging, or
    show more of it in a group."""
    merged = head.body.merged if head else 0
    shown = snapshot.partitions.get(partition) if snapshot else None
    if snapshot is None or partition in snapshot.lagging or (shown is not None and merged < shown.merged):
        return merged
    return max(merged, snapshot.batch)


def next_state(
    history: History, partition: str, batch: int, snapshot: Snapshot | None, head: Link[Manifest] | None
) -> PartitionState | None:
    """The state before the next version on the way to ``batch``, or None if nothing is left."""
    if head is not None:
        refuse_another_entry(history, head.body, snapshot)
        if head.body.merged >= batch:
            return None
    low = merged_up_to(partition, head, snapshot)
    pending = [link for link in history.entries(low, batch) if partition in link.body.touched]
    if not pending:
        return None
    # One version a batch, except for withdrawn or published batches: nobody needs a snapshot of those.
    merge_together = 0 if snapshot is None or merges_one_by_one(head, pending, partition) else snapshot.batch
    counts = [count for count, link in enumerate(pending, 1) if link.number <= merge_together or link.body.restored]
    return state_at(history, partition, head, low, pending[max(counts, default=1) - 1].number)


def merges_one_by_one(head: Link[Manifest] | None, pending: Sequence[Link[LedgerEntry]], partition: str) -> bool:
    """Whether no two of these batches of a partition may be merged together, because each is judged by what the batches before it
    left."""
    if head is not None and any(bucket.floor for bucket in head.body.buckets):
        return True
    entries = [link.body for link in pending]
    return any(e.retention is not None or e.full or e.touched[partition].extract is not None for e in entries)


def state_at(history: History, partition: str, head: Link[Manifest] | None, low: int, number: int) -> PartitionState:
    """The state before the version at ledger ``number``, if ``head`` has every entry up to ``low``.

    With a restore among the entries, the merge starts from the version that the restore names, and merges the batches above it
    that still count.
    """
    base = head.body if head else Manifest(partition=partition, merged=0, spec_version=0)
    entries = history.entries(low, number)
    restores = [link.body.restored for link in entries if link.body.restored and partition in link.body.touched]
    if restores:
        base = history.version(partition, restores[-1].versions[partition])
        entries = history.entries(base.merged, number)
    pending = tuple(link for link in entries if partition in link.body.touched)
    active = frozenset(active_batches((link.number, link.body) for link in entries))
    return PartitionState(head, base, pending, active, number, _write_id(history, number))


def rewrite_state(
    history: History, head: Link[Manifest] | None, partition: str, work_name: str
) -> PartitionState | None:
    """The state before the partition is rewritten at the `merged` of ``head``, or None if that is done or nothing is stored."""
    work = history.work(work_name)
    rebuilt = work.partitions.get(partition)
    if rebuilt is None or head is None or not head.body.buckets or head.body.reprocessed == work_name:
        return None
    merged = head.body.merged
    if work.source == "stored":
        of_work = work_name, work.spec_version, rebuilt.erased
        return PartitionState(head, head.body, (), frozenset(), merged, head.body.entry, *of_work)
    if rebuilt.refused != head.body.quarantine:
        why = "merges have refused rows since its reprocess began, so the reprocess would leave out the wrong rows"
        raise _outdated(partition, why)
    adopted, *entries = history.entries(-1, merged)
    # Which batches count at the `merged` that is kept: later entries have no say.
    active = frozenset(active_batches((link.number, link.body) for link in entries))
    first = adopted.body.touched.get(partition)
    buckets = (first.as_adopted(),) if first is not None else ()
    base = Manifest(partition=partition, merged=0, spec_version=0, buckets=buckets)
    pending = tuple(
        _with_rebuilt_files(link, partition, rebuilt) if link.number in active else link
        for link in entries
        if partition in link.body.touched
    )
    entry = _write_id(history, merged)
    return PartitionState(head, base, pending, active, merged, entry, work_name, work.spec_version)


def _write_id(history: History, number: int) -> str | None:
    link = history.entry(number)
    return link.write_id if link else None


def _with_rebuilt_files(link: Link[LedgerEntry], partition: str, rebuilt: PartitionRewrite) -> Link[LedgerEntry]:
    """The entry with the files that were rebuilt from landing. A batch merged since the rebuild keeps its appended files."""
    if link.number > rebuilt.merged:
        return link
    if link.number not in rebuilt.batches:
        raise _outdated(partition, f"a restore has added batch {link.number} again since its reprocess began")
    touched = {**link.body.touched, partition: rebuilt.batches[link.number]}
    return replace(link, body=msgspec.structs.replace(link.body, touched=touched))


def _outdated(partition: str, why: str) -> RefusedError:
    return RefusedError(
        "work-outdated",
        f"{partition}: {why}. The partition is unchanged.",
        next="run `lakeupsert reprocess` again",
        partition=partition,
    )
