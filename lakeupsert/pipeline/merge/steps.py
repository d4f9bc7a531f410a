"""The tasks of a partition's next version. Only this module works them out, from the partition's state.

Reads     specs, and the ledger entry of a full extract
Writes    nothing
Repeat    safe: for the same state everybody finds the same step, so workers can share one (`units`)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lakeupsert.config import TableSettings
from lakeupsert.engine.arrow import SHARED_BYTES
from lakeupsert.engine.merge import MergeTask
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.merge.state import PartitionState
from lakeupsert.pipeline.strategy import (
    SMALL_FILE,
    Incoming,
    SplitRule,
    Strategy,
    strategy_of,
    unfolded_count,
)
from lakeupsert.rows.buckets import key_hashes, may_be_in
from lakeupsert.rows.datafiles import from_bytes
from lakeupsert.rows.floor import Extract, Forgetting
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.table.manifest import Bucketed, BucketEntry, DataFile, share
from lakeupsert.table.spec import TableSpec


@dataclass(frozen=True, kw_only=True)
class Step(PartitionState):
    """What makes one version of one partition.

    Attributes:
        spec: version `spec_version` of the spec.
        bucket_bytes: the setting `bucket`.
        tasks: one for each bucket that gets rows. Buckets without a task stay; a restore alone has no task.
        cut_bytes: what a cut has read of files that were replaced by pieces (`cuts`).
    """

    spec: TableSpec
    bucket_bytes: int
    tasks: tuple[MergeTask, ...] = ()
    cut_bytes: int = 0

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


def step_of(history: History, settings: TableSettings, state: PartitionState) -> Step:
    """The step from a state to the next version."""
    spec = history.spec(state.spec_version)
    step = Step(**vars(state), spec=spec, bucket_bytes=settings.bucket_bytes)
    batches = tuple(link.body.touched[state.partition].files for link in state.counted)
    if not batches and (state.work is None or not state.base.buckets):
        return step
    strategy = strategy_of(settings, state.partition) if state.work is None else "rewrite"
    rows = sum(f.rows for files in batches for f in files)
    rule = SplitRule.of(settings.bucket_bytes, spec.base_schema.types, state.buckets, rows)
    floors = _floors(history, state)
    buckets = state.buckets if state.work is None else rule.join(state.buckets)
    if state.erased and spec.stored_key:
        hashes = key_hashes(from_bytes(state.erased), spec)
        buckets = tuple(bucket for bucket in buckets if may_be_in(hashes, bucket))
    tasks = [task for bucket in buckets for task in _tasks(step, bucket, batches, strategy, rule, floors)]
    return replace(step, tasks=tuple(tasks))


def _tasks(
    step: Step,
    bucket: BucketEntry,
    batches: tuple[tuple[DataFile, ...], ...],
    strategy: Strategy,
    rule: SplitRule,
    floors: tuple[str, ...],
) -> Iterator[MergeTask]:
    """One task for the bucket, or one for each bucket that it is split into; none if nothing arrives for it."""
    shares = [(f, share(f, bucket)) for files in batches for f in _files_within(bucket, files)]
    incoming = Incoming(
        sum(f.bytes * part for f, part in shares),
        sum(f.rows * part for f, part in shares),
    )
    if step.spec.mode == "columns":
        incoming = incoming.as_whole_rows(bucket)
    counted = step.counted
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
    # A rebuild from landing refuses nothing: the rows that were refused are left out already.
    sources = tuple((link.body.batch_id, link.body.sources) for link in counted) if floors and not step.work else ()
    kept, folded = rule.in_place("rewrite" if full else strategy, bucket, incoming)
    splits = not kept and step.spec.stored_key
    bits = rule.extra_bits(bucket, incoming) if splits else 0
    for number in range(2**bits):
        history = () if number else bucket.history
        stay = 0 if step.erased else unfolded_count(history, max(incoming.bytes, SMALL_FILE))
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
            floors=floors,
            forgets=forgets,
            sources=sources,
            full=full,
            history=history[:stay],
            folded=history[stay:],
            numbers=(step.base.merged, *(link.number for link in counted)),
            erased=step.erased,
        )
        yield replace(task, batches=tuple(tuple(_files_within(task, files)) for files in batches))


def _floors(history: History, state: PartitionState) -> tuple[str, ...]:
    """The floors that hold in every bucket of the partition before the step, so it does not matter how it is split.

    A partition without one has that of the full extract in whose scope it was before it existed.
    """
    counted = state.counted
    replaced = any(link.body.full and link.body.full.replaces for link in counted)
    stored = state.head.body if state.head and state.work else state.base
    floors = {bucket.floor for bucket in stored.buckets if bucket.floor} if state.work or not replaced else set()
    if floors or replaced or not counted:
        return tuple(sorted(floors))
    extract = counted[0].body.touched[state.partition].extract
    link = history.entry(extract) if extract is not None else None
    return (link.body.full.order,) if link is not None and link.body.full else ()


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
