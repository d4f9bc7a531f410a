"""What is to be merged next into a partition: the one place that reads it off ledger, manifest and work object.

Everybody who looks at the same head, up to the same batch, finds the same step; so workers can share one (`units`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from lakeupsert.engine.merge import MergeTask
from lakeupsert.errors import RefusedError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.strategy import SMALL_FILE, Incoming, SplitRule, Strategy, as_whole_rows, in_place, unfolded
from lakeupsert.rows.floor import Forgetting
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import LedgerEntry, counting
from lakeupsert.table.manifest import NO_DIGESTS, BucketEntry, DataFile, Manifest, share
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.work import Rebuilt


@dataclass(frozen=True)
class Step:
    """One version of one partition to be made, in ``head``'s place.

    Attributes:
        base: what the merge begins from: the head, or the version that a restore goes back to.
        pending: ledger entries above ``base`` that touch the partition, up to the one that `merged` will be, ``up_to``.
        counting: numbers of those among them whose rows are merged; the others are withdrawn.
        tasks: one for each bucket that rows are written into. Buckets that have none stay; a restore alone has none at all.
        work: the work object that asks for it, where the partition is written anew at the `merged` that it has.
        asked: the work object's spec version.
        entry: the write id of ledger entry ``up_to``.
    """

    head: Link[Manifest] | None
    base: Manifest
    pending: tuple[Link[LedgerEntry], ...]
    counting: frozenset[int]
    up_to: int
    tasks: tuple[MergeTask, ...]
    work: str | None = None
    asked: int = 0
    entry: str | None = None

    @property
    def partition(self) -> str:
        return self.base.partition

    @property
    def start(self) -> int:
        """How many versions the chain has; see `TableObjects`."""
        return self.head.number + 1 if self.head else 0

    @property
    def buckets(self) -> tuple[BucketEntry, ...]:
        """Those that it begins from."""
        return self.base.buckets or (BucketEntry(id="", digests=NO_DIGESTS),)

    @property
    def spec_version(self) -> int:
        """A version is written under its own batch's spec: under a newer one, readers of that batch would meet files that
        their spec does not describe. What is written anew is for the readers of a later snapshot than the work object's."""
        last = self.pending[-1].body.spec_version if self.pending else 0
        return max(last, self.base.spec_version, self.head.body.spec_version if self.head else 0, self.asked)

    @property
    def strategy(self) -> str:
        return "delta" if any(task.kept for task in self.tasks) else "rewrite"

    @property
    def read(self) -> list[DataFile]:
        """All files that its tasks read, each once."""
        return list(dict.fromkeys(file for task in self.tasks for file in task.read))

    @property
    def bytes(self) -> int:
        """Compressed bytes that its tasks read, at most."""
        return sum(f.bytes for f in self.read) + sum(f.bytes for task in self.tasks for f in task.folded)


def next_step(
    table: OpenTable, partition: str, batch: int, snapshot: Snapshot | None, head: Link[Manifest] | None
) -> Step | None:
    """What is to be merged next into ``head`` on the way to ``batch``; None where nothing is left."""
    merged = head.body.merged if head else 0
    published = snapshot.batch if snapshot else 0
    if head is not None:
        table.refuse_another_entry(head.body, snapshot)
    if merged >= batch:
        return None
    # Up to the snapshot's batch everything is merged, unless it says that this partition lags.
    low = merged if snapshot and partition in snapshot.lagging else max(merged, published)
    pending = [link for link in table.entries(low, batch) if partition in link.body.touched]
    if not pending:
        return None
    # One version a batch, but for batches that are withdrawn or published: nobody needs a snapshot of these.
    together = 0 if one_by_one(head, pending) else published
    needed = [number for number, link in enumerate(pending, 1) if link.number <= together or link.body.restored]
    return step_to(table, head, partition, low, pending[max(needed, default=1) - 1].number)


def one_by_one(head: Link[Manifest] | None, pending: Sequence[Link[LedgerEntry]]) -> bool:
    """Whether what a batch brings is judged by what the batches before it left, so that no two are merged at once."""
    floors = [bucket.floor for bucket in head.body.buckets if bucket.floor] if head else []
    return bool(floors) or any(link.body.retention is not None or link.body.full for link in pending)


def step_to(table: OpenTable, head: Link[Manifest] | None, partition: str, low: int, number: int) -> Step:
    """What brings a partition from ``head`` to ledger number ``number``; no entry up to ``low`` is missing in ``head``.

    A restore among the entries means: begin from the version that it names, and merge the batches that still count above it.
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
    counts = frozenset(counting((link.number, link.body) for link in entries))
    return _step(table, head, base, pending, counts, number)


def step_anew(table: OpenTable, head: Link[Manifest] | None, partition: str, name: str) -> Step | None:
    """What writes a partition anew at the `merged` of ``head``; None where that is done, or nothing is stored."""
    work = table.work(name)
    asked = work.partitions.get(partition)
    if asked is None or head is None or not head.body.buckets or head.body.reprocessed == name:
        return None
    if work.source == "landing" and asked.refused != head.body.quarantine:
        raise RefusedError(
            "work-outdated",
            f"Since the reprocess of {partition} began, merges refused other rows than those that it leaves out. The partition "
            "stays as it is.",
            next="run `lakeupsert reprocess` again",
            partition=partition,
        )
    merged = head.body.merged
    base, counts = head.body, frozenset[int]()
    pending: tuple[Link[LedgerEntry], ...] = ()
    if work.source == "landing":
        adopted, *entries = table.entries(-1, merged)
        counts = frozenset(
            counting((link.number, link.body) for link in entries)
        )  # at the `merged` that is kept: what came later says nothing about it
        first = adopted.body.touched.get(partition)
        base = Manifest(
            partition=partition, merged=0, spec_version=0, buckets=(first.as_adopted(),) if first is not None else ()
        )
        pending = tuple(
            _rebuilt(link, partition, asked) if link.number in counts else link
            for link in entries
            if partition in link.body.touched
        )
    return _step(table, head, base, pending, counts, merged, name)


def _step(
    table: OpenTable,
    head: Link[Manifest] | None,
    base: Manifest,
    pending: tuple[Link[LedgerEntry], ...],
    counts: frozenset[int],
    number: int,
    work: str | None = None,
) -> Step:
    asked = table.work(work) if work else None
    if asked is not None and asked.source == "stored":
        entry = base.entry
    else:
        link = table.entry(number)
        entry = link.write_id if link else None
    step = Step(head, base, pending, counts, number, (), work, asked.spec_version if asked else 0, entry)
    batches = tuple(link.body.touched[base.partition].files for link in pending if link.number in counts)
    if not batches and (work is None or not base.buckets):
        return step
    strategy = table.strategy if work is None else "rewrite"
    rows = sum(f.rows for files in batches for f in files)
    types = table.spec(step.spec_version).base_schema.types
    rule = SplitRule.of(table.settings.bucket_bytes, types, step.buckets, rows)
    tasks: list[MergeTask] = []
    for bucket in step.buckets if work is None else rule.joined(step.buckets):
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
    """What makes a bucket anew: one task, or one for each that it is split into; none where nothing comes for it."""
    parts = [(f, part) for files in batches for f in files if (part := share(f, bucket))]
    incoming = Incoming(
        sum(f.bytes * part for f, part in parts),
        sum(f.rows * part for f, part in parts),
        sum(part for _, part in parts),
    )
    if table.spec(step.spec_version).mode == "columns":
        incoming = as_whole_rows(bucket, incoming)
    counted = [link for link in step.pending if link.number in step.counting]
    full = tuple((age, link.body.full.order) for age, link in enumerate(counted, 1) if link.body.full)
    forgets = _forgets(bucket, counted)
    expires = forgets is not None and any((t.since or 0) < forgets.dropped_before for t in bucket.tombstones)
    if not parts and not (step.work or full):
        if not expires:
            return
        strategy = "delta"  # no row comes: its files stay
    # The greatest of all buckets holds in each, so that it does not matter how a partition is split.
    floors = {b.floor for b in (step.head.body if step.head and step.work else step.base).buckets if b.floor}
    # What is made anew of landing leaves out what was refused at its time.
    sources = tuple((link.body.batch_id, link.body.sources) for link in counted) if floors and not step.work else ()
    kept, folded = in_place("rewrite" if full else strategy, bucket, incoming, rule)
    splits = not kept and table.spec(step.spec_version).stored_key
    bits = rule.bits_more(bucket, incoming) if splits else 0
    for number in range(2**bits):
        history = () if number else bucket.history
        stay = unfolded(history, max(incoming.bytes, SMALL_FILE))
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
        yield replace(task, batches=tuple(tuple(f for f in files if share(f, task)) for files in batches))


def _forgets(bucket: BucketEntry, counted: Sequence[Link[LedgerEntry]]) -> Forgetting | None:
    """By what the batches say, not by a clock or by today's settings: whoever merges the same, and when, drops the same
    tombstones. Without a batch, what is stored is compacted without forgetting any, or when they came."""
    batches = tuple((link.body.received_at, link.body.retention) for link in counted)
    if all(kept is None for _, kept in batches) and all(t.since is None for t in bucket.tombstones):
        return None
    return Forgetting(batches)


def _rebuilt(link: Link[LedgerEntry], partition: str, asked: Rebuilt) -> Link[LedgerEntry]:
    """A batch with what was made of its landing files; one that was merged since then has its appended files."""
    if link.number > asked.merged:
        return link
    if link.number not in asked.batches:
        raise RefusedError(
            "work-outdated",
            f"Batch {link.number} counts again by a restore, and the reprocess of {partition} began before that. The "
            "partition stays as it is.",
            next="run `lakeupsert reprocess` again",
            partition=partition,
        )
    touched = {**link.body.touched, partition: asked.batches[link.number]}
    return replace(link, body=msgspec.structs.replace(link.body, touched=touched))
