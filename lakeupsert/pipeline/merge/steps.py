"""What has to be merged next into a partition. Only this module works that out, from ledger, manifest and work object.

Reads     ledger entries, specs, work objects, and the version that a restore names
Writes    nothing
Repeat    safe: for the same head and batch everybody finds the same step, so workers can share one (`units`)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from lakeupsert.engine.arrow import SHARED_BYTES
from lakeupsert.engine.merge import MergeTask
from lakeupsert.errors import RefusedError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.strategy import (
    SMALL_FILE,
    Incoming,
    SplitRule,
    Strategy,
    as_whole_rows,
    in_place,
    unfolded_count,
)
from lakeupsert.rows.floor import Extract, Forgetting
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import LedgerEntry, active_batches
from lakeupsert.table.manifest import NO_DIGESTS, Bucketed, BucketEntry, DataFile, Manifest, share
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.work import PartitionRewrite


@dataclass(frozen=True)
class Step:
    """What makes one version of one partition, to follow ``head``.

    Attributes:
        base: what the merge starts from: the head, or the version that a restore goes back to.
        pending: ledger entries above ``base`` that touch the partition, up to ``up_to``.
        active: the numbers of those entries whose rows are merged; the others are withdrawn.
        up_to: the batch that `merged` will be.
        tasks: one for each bucket that gets rows. Buckets without a task stay; a restore alone has no task.
        work: the work object to rewrite the partition for, at the `merged` that it has.
        work_spec_version: the work object's spec version.
        cut_bytes: what a cut has read of files that were replaced by pieces (`cuts`).
        entry: the write id of ledger entry ``up_to``.
    """

    head: Link[Manifest] | None
    base: Manifest
    pending: tuple[Link[LedgerEntry], ...]
    active: frozenset[int]
    up_to: int
    tasks: tuple[MergeTask, ...]
    work: str | None = None
    work_spec_version: int = 0
    entry: str | None = None
    cut_bytes: int = 0

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
    def spec_version(self) -> int:
        """A version is written under its own batch's spec. Under a newer one, readers of that batch would find files that their
        spec does not describe. Readers see a rewritten partition only in a snapshot later than the work object's."""
        last = self.pending[-1].body.spec_version if self.pending else 0
        return max(
            last, self.base.spec_version, self.head.body.spec_version if self.head else 0, self.work_spec_version
        )

    @property
    def strategy(self) -> str:
        return "delta" if any(task.kept for task in self.tasks) else "rewrite"

    @property
    def read(self) -> list[DataFile]:
        """The files that the tasks read, each once."""
        return list(dict.fromkeys(file for task in self.tasks for file in task.read))

    @property
    def bytes(self) -> int:
        """The compressed bytes that are read, at most: a file counts for each task that reads it, a small one once."""
        once = sum(f.bytes for f in self.read if f.bytes <= SHARED_BYTES)
        each = sum(f.bytes for task in self.tasks for f in task.read if f.bytes > SHARED_BYTES)
        return self.cut_bytes + once + each + sum(f.bytes for task in self.tasks for f in task.folded)


def next_step(
    table: OpenTable, partition: str, batch: int, snapshot: Snapshot | None, head: Link[Manifest] | None
) -> Step | None:
    """What has to be merged next into ``head`` on the way to ``batch``, or None if nothing is left."""
    merged = head.body.merged if head else 0
    published = snapshot.batch if snapshot else 0
    if head is not None:
        table.refuse_another_entry(head.body, snapshot)
    if merged >= batch:
        return None
    # Everything up to the snapshot's batch is merged, unless the snapshot lists this partition as lagging.
    low = merged if snapshot and partition in snapshot.lagging else max(merged, published)
    pending = [link for link in table.entries(low, batch) if partition in link.body.touched]
    if not pending:
        return None
    # One version a batch, except for withdrawn or published batches: nobody needs a snapshot of those.
    merge_together = 0 if merges_one_by_one(head, pending, partition) else published
    counts = [count for count, link in enumerate(pending, 1) if link.number <= merge_together or link.body.restored]
    return step_to(table, head, partition, low, pending[max(counts, default=1) - 1].number)


def merges_one_by_one(head: Link[Manifest] | None, pending: Sequence[Link[LedgerEntry]], partition: str) -> bool:
    """Whether no two of these batches of a partition may be merged at once, because each is judged by what the batches before it
    left."""
    if head is not None and any(bucket.floor for bucket in head.body.buckets):
        return True
    entries = [link.body for link in pending]
    return any(e.retention is not None or e.full or e.touched[partition].extract is not None for e in entries)


def step_to(table: OpenTable, head: Link[Manifest] | None, partition: str, low: int, number: int) -> Step:
    """What brings a partition from ``head``, which has every entry up to ``low``, to ledger number ``number``.

    With a restore among the entries, the merge starts from the version that the restore names, and merges the batches above it
    that still count.
    """
    base = head.body if head else Manifest(partition=partition, merged=0, spec_version=0)
    restores = [
        link.body.restored
        for link in table.entries(low, number)
        if link.body.restored and partition in link.body.touched
    ]
    if restores:
        base = table.version(partition, restores[-1].versions[partition])
        low = base.merged
    entries = table.entries(low, number)
    pending = tuple(link for link in entries if partition in link.body.touched)
    counts = frozenset(active_batches((link.number, link.body) for link in entries))
    return _step(table, head, base, pending, counts, number)


def rewrite_step(table: OpenTable, head: Link[Manifest] | None, partition: str, work_name: str) -> Step | None:
    """What rewrites a partition at the `merged` of ``head``, or None if that is done or nothing is stored."""
    work = table.work(work_name)
    rebuilt = work.partitions.get(partition)
    if rebuilt is None or head is None or not head.body.buckets or head.body.reprocessed == work_name:
        return None
    if work.source == "landing" and rebuilt.refused != head.body.quarantine:
        raise RefusedError(
            "work-outdated",
            f"{partition}: merges have refused rows since its reprocess began, so the reprocess would leave out the wrong "
            "rows. The partition is unchanged.",
            next="run `lakeupsert reprocess` again",
            partition=partition,
        )
    merged = head.body.merged
    if work.source == "stored":
        return _step(table, head, head.body, (), frozenset(), merged, work_name)
    adopted, *entries = table.entries(-1, merged)
    # Which batches count at the `merged` that is kept: later entries have no say.
    counts = frozenset(active_batches((link.number, link.body) for link in entries))
    first = adopted.body.touched.get(partition)
    buckets = (first.as_adopted(),) if first is not None else ()
    base = Manifest(partition=partition, merged=0, spec_version=0, buckets=buckets)
    pending = tuple(
        _with_rebuilt_files(link, partition, rebuilt) if link.number in counts else link
        for link in entries
        if partition in link.body.touched
    )
    return _step(table, head, base, pending, counts, merged, work_name)


def _step(
    table: OpenTable,
    head: Link[Manifest] | None,
    base: Manifest,
    pending: tuple[Link[LedgerEntry], ...],
    counts: frozenset[int],
    number: int,
    work: str | None = None,
) -> Step:
    found = table.work(work) if work else None
    if found is not None and found.source == "stored":
        entry = base.entry
    else:
        link = table.entry(number)
        entry = link.write_id if link else None
    step = Step(head, base, pending, counts, number, (), work, found.spec_version if found else 0, entry)
    batches = tuple(link.body.touched[base.partition].files for link in pending if link.number in counts)
    if not batches and (work is None or not base.buckets):
        return step
    strategy = table.strategy_of(base.partition) if work is None else "rewrite"
    rows = sum(f.rows for files in batches for f in files)
    types = table.spec(step.spec_version).base_schema.types
    rule = SplitRule.of(table.settings.bucket_bytes, types, step.buckets, rows)
    tasks: list[MergeTask] = []
    for bucket in step.buckets if work is None else rule.join(step.buckets):
        tasks += _tasks(table, step, bucket, batches, strategy, rule)
    return replace(step, tasks=tuple(tasks))


def _tasks(
    table: OpenTable,
    step: Step,
    bucket: BucketEntry,
    batches: tuple[tuple[DataFile, ...], ...],
    strategy: Strategy,
    rule: SplitRule,
) -> Iterator[MergeTask]:
    """One task for the bucket, or one for each bucket that it is split into; none if nothing arrives for it."""
    shares = [(f, share(f, bucket)) for files in batches for f in _files_within(bucket, files)]
    incoming = Incoming(
        sum(f.bytes * part for f, part in shares),
        sum(f.rows * part for f, part in shares),
        sum(f.files * part for f, part in shares),
    )
    if table.spec(step.spec_version).mode == "columns":
        incoming = as_whole_rows(bucket, incoming)
    counted = [link for link in step.pending if link.number in step.active]
    full = tuple(
        Extract(age, link.body.full.order, link.body.full.replaces)
        for age, link in enumerate(counted, 1)
        if link.body.full
    )
    forgets = _forgetting(bucket, counted)
    expires = forgets is not None and any((t.since or 0) < forgets.dropped_before for t in bucket.tombstones)
    if not shares and not (step.work or full):
        if not expires:
            return
        strategy = "delta"  # no row arrives, so its files stay
    floors = _floors(table, step, counted)
    # A rebuild from landing refuses nothing: the rows that were refused are left out already.
    sources = tuple((link.body.batch_id, link.body.sources) for link in counted) if floors and not step.work else ()
    kept, folded = in_place("rewrite" if full else strategy, bucket, incoming, rule)
    splits = not kept and table.spec(step.spec_version).stored_key
    bits = rule.extra_bits(bucket, incoming) if splits else 0
    for number in range(2**bits):
        history = () if number else bucket.history
        stay = unfolded_count(history, max(incoming.bytes, SMALL_FILE))
        task = MergeTask(
            partition=step.partition,
            base=() if kept else bucket.base,
            deltas=folded,
            kept=kept,
            tombstones=bucket.tombstones,
            batches=(),
            up_to=step.up_to,
            start=step.start,
            settled=bucket.settled,
            bucket=(bucket.bucket << bits) + number,
            bits=bucket.bits + bits,
            floors=tuple(sorted(floors)),
            forgets=forgets,
            sources=sources,
            full=full,
            history=history[:stay],
            folded=history[stay:],
            numbers=(step.base.merged, *(link.number for link in counted)),
        )
        yield replace(task, batches=tuple(tuple(_files_within(task, files)) for files in batches))


def _floors(table: OpenTable, step: Step, counted: Sequence[Link[LedgerEntry]]) -> set[str]:
    """The floors that hold in every bucket of the partition before the step, so it does not matter how it is split.

    A partition without one has that of the full extract in whose scope it was before it existed. ``counted``: the batches of the
    step that count.
    """
    replaced = any(link.body.full and link.body.full.replaces for link in counted)
    stored = step.head.body if step.head and step.work else step.base
    floors = {bucket.floor for bucket in stored.buckets if bucket.floor} if step.work or not replaced else set()
    if floors or replaced or not counted:
        return floors
    extract = counted[0].body.touched[step.partition].extract
    link = table.entry(extract) if extract is not None else None
    return {link.body.full.order} if link is not None and link.body.full else set()


def _files_within(of: Bucketed, files: Iterable[DataFile]) -> list[DataFile]:
    """The files, or parts of files, that have rows of a bucket."""
    return [part for file in files if share(file, of) and (part := file.within(of)).rows]


def _forgetting(bucket: BucketEntry, counted: Sequence[Link[LedgerEntry]]) -> Forgetting | None:
    """Which tombstones a merge drops. The batches decide this, not a clock or today's settings, so every merge of them drops the
    same tombstones.

    A compaction has no batch: it drops no tombstone, and keeps when the tombstones came.
    """
    batches = tuple((link.body.received_at, link.body.retention) for link in counted)
    if all(kept is None for _, kept in batches) and all(t.since is None for t in bucket.tombstones):
        return None
    return Forgetting(batches)


def _with_rebuilt_files(link: Link[LedgerEntry], partition: str, rebuilt: PartitionRewrite) -> Link[LedgerEntry]:
    """The entry with the files that were rebuilt from landing. A batch merged since the rebuild keeps its appended files."""
    if link.number > rebuilt.merged:
        return link
    if link.number not in rebuilt.batches:
        raise RefusedError(
            "work-outdated",
            f"{partition}: a restore has added batch {link.number} again since its reprocess began. The partition is unchanged.",
            next="run `lakeupsert reprocess` again",
            partition=partition,
        )
    touched = {**link.body.touched, partition: rebuilt.batches[link.number]}
    return replace(link, body=msgspec.structs.replace(link.body, touched=touched))
