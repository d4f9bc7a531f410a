"""What the merges of the next run will read and write, partition by partition.

Reads     the newest snapshot; the manifests of partitions that are dirty, or whose merge depends on their files. Never a data
          file
Writes    nothing

    batches of before -> step by step, as dedupe merges them -> then what arrives -> bytes, versions, objects
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import pyarrow as pa

from lakeupsert.config import TableSettings
from lakeupsert.operations.plan.habits import Night, Sizes, last_batches, learn_sizes
from lakeupsert.pipeline.append.commit import AppendResult
from lakeupsert.pipeline.merge.cuts import MOST_READS, cuts_of
from lakeupsert.pipeline.merge.state import next_state
from lakeupsert.pipeline.merge.steps import step_of
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.standing import unpublished_up_to
from lakeupsert.pipeline.strategy import SMALL_BYTES, Incoming, SplitRule, Strategy, strategy_of
from lakeupsert.table.chain import Link
from lakeupsert.table.manifest import BucketEntry, DataFile, Manifest, share
from lakeupsert.table.snapshot import PartitionVersion


@dataclass(frozen=True, kw_only=True)
class PlannedPartition:
    """The merges of a run in one partition.

    Attributes:
        buckets: as they are after these merges.
        exists: it has a manifest.
        rows: rows of it in new landing files.
        dirty: earlier batches are to be merged, too.
        bytes_read: of all files that the merges open; if these stay in place, only keys and ordering columns are read.
        versions: how many manifests will be written.
        objects: how many data files the merges read.
    """

    partition: str
    buckets: tuple[BucketEntry, ...] = (BucketEntry(id=""),)
    exists: bool = False
    rows: int = 0
    dirty: bool = False
    bytes_read: int = 0
    bytes_written: int = 0
    versions: int = 0
    objects: int = 0

    @property
    def strategy(self) -> Strategy:
        """Of the last of these merges, rewrite or delta."""
        return "delta" if any(b.deltas for b in self.buckets) else "rewrite"

    def add(
        self, buckets: tuple[BucketEntry, ...], read: int = 0, written: int = 0, objects: int = 0
    ) -> "PlannedPartition":
        """With one more merge, after which the partition has these buckets."""
        return replace(
            self,
            buckets=buckets,
            bytes_read=self.bytes_read + read,
            bytes_written=self.bytes_written + written,
            versions=self.versions + 1,
            objects=self.objects + objects,
        )


@dataclass(frozen=True)
class Prediction:
    """Bytes that the merges of a run will read and write."""

    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class Arrival:
    """What one batch brings for one partition: accepted rows, and the bytes and number of its appended files."""

    rows: int
    bytes: float
    files: int = 1


def predict_merges(table: OpenTable, appended: AppendResult | None, nights: Sequence[Night]) -> Prediction | None:
    """Predict what `dedupe` will read and write once the batch is committed, when rows by partition are no estimate any more.

    The manifests that it reads are kept for the merges of this process. Returns None if there is nothing to merge.
    """
    head = table.history.ledger_head()
    if head is None:
        return None
    entry = appended.entry if appended else None
    before = appended.number - 1 if appended else head.number
    batches = [*(b.body for b in last_batches(table.history, before)), *([entry] if entry else [])]
    sizes = learn_sizes(table.history.spec(head.body.spec_version), nights, batches, ())
    touched = entry.touched if entry else {}
    arrivals = {p: Arrival(sum(f.rows for f in t.files), t.bytes, len(t.files)) for p, t in touched.items()}
    full = entry is not None and entry.full is not None
    merges = plan_merges(table, replace(sizes, kept=1.0), arrivals, before, lambda partition: True, full=full)
    if not merges:
        return None
    return Prediction(sum(m.bytes_read for m in merges), sum(m.bytes_written for m in merges))


def plan_merges(
    table: OpenTable,
    sizes: Sizes,
    arrivals: Mapping[str, Arrival],
    up_to: int,
    selected: Callable[[str], bool],
    *,
    full: bool = False,
) -> tuple[PlannedPartition, ...]:
    """Plan each selected partition that a run would merge: what the ledger has up to ``up_to``, then what arrives. A ``full``
    extract rewrites its partitions, whatever their strategy."""
    snapshot = table.history.last_snapshot()
    shown = snapshot.body.partitions if snapshot else {}
    behind = unpublished_up_to(table.history, snapshot.body if snapshot else None, up_to) if up_to >= 0 else {}
    spec = table.history.head_spec() if arrivals else None
    types = spec.body.base_schema.types if spec else ()
    chosen = [partition for partition in sorted({*behind, *arrivals}) if selected(partition)]
    enough = {p: _one_file(table, p, shown[p]) for p in chosen if p in shown and p not in behind}
    heads = table.history.heads([p for p in chosen if p in behind or enough.get(p) == ()])  # merges find them kept
    plans = []
    for partition in chosen:
        head = table.history.behind(snapshot, partition, heads.get(partition)) if not enough.get(partition) else None
        if partition in behind:
            plan = _merge_batches(table, sizes, partition, behind[partition], head)
        elif partition in shown:
            buckets = enough[partition] or (head.body.buckets if head else ())
            plan = PlannedPartition(partition=partition, buckets=buckets, exists=True)
        else:
            plan = PlannedPartition(partition=partition)
        if arrival := arrivals.get(partition):
            strategy = "rewrite" if full else strategy_of(table.settings, partition)
            plan = _merge_arrival(table.settings, strategy, types, sizes, plan, arrival)
        plans += [plan] if plan.versions else []
    return tuple(plans)


def _merge_batches(
    table: OpenTable, sizes: Sizes, partition: str, up_to: int, head: Link[Manifest] | None
) -> PlannedPartition:
    """Merge the batches that the ledger has, step by step."""
    snapshot = table.history.known_snapshot
    plan = PlannedPartition(partition=partition, exists=head is not None)
    plan = replace(plan, buckets=head.body.buckets) if head and head.body.buckets else plan
    while state := next_state(table.history, partition, up_to, snapshot.body if snapshot else None, head):
        step = step_of(table.history, table.settings, state)
        if step.tasks:
            rows = sum(f.rows for f in dict.fromkeys(f for t in step.tasks for b in t.batches for f in b))
            kept = [next((t.kept for t in step.tasks if share(b, t)), ()) for b in step.buckets]
            buckets, written = _merge_buckets(step.buckets, kept, rows, sizes)
            cut = sum(one.task.bytes for one in cuts_of(step))
            read = cut + sum(f.bytes for f in step.read) if cut else step.bytes
            plan = plan.add(buckets, read, written + cut, len(step.read))
        else:  # a restore alone moves no bytes
            plan = plan.add(step.buckets)
        # The version that the step would commit, from which the next one begins.
        body = Manifest(partition=partition, merged=step.up_to, spec_version=0, buckets=plan.buckets)
        head = Link(number=0, write_id="", parent=None, written_at="", body=body, read_at=0.0)
    return replace(plan, dirty=plan.versions > 0)


def _merge_arrival(
    settings: TableSettings,
    strategy: Strategy,
    types: Sequence[pa.DataType],
    sizes: Sizes,
    plan: PlannedPartition,
    arrival: Arrival,
) -> PlannedPartition:
    """The same merges, and one more of what arrives."""
    buckets, rows = plan.buckets, arrival.rows
    stored = [f for b in buckets for f in (*b.data, *b.tombstones)]
    rule = SplitRule.of(settings.bucket_bytes, types, buckets, rows)
    incoming = {b: Incoming(arrival.bytes * 0.5**b.bits, rows * 0.5**b.bits) for b in buckets}
    if settings.mode == "columns":
        incoming = {b: of_bucket.as_whole_rows(b) for b, of_bucket in incoming.items()}
    kept = [rule.in_place(strategy, b, of_bucket)[0] for b, of_bucket in incoming.items()]
    after, written = _merge_buckets(buckets, kept, rows * sizes.kept, sizes)
    many = [b for b, of_bucket in incoming.items() if 2 ** rule.extra_bits(b, of_bucket) > MOST_READS]
    cut = sum(f.bytes for b in many for f in b.data)  # written once more, and read once more
    read = sum(f.bytes for f in stored) + cut + round(arrival.bytes)
    objects = arrival.files + sum(len(b.data) for b in buckets)
    return replace(plan.add(after, read, written + cut, objects), rows=rows)


def _one_file(table: OpenTable, partition: str, shown: PartitionVersion) -> tuple[BucketEntry, ...]:
    """What a clean partition has stored, as one base file; empty if that is not enough to know how it will be merged."""
    strategy = strategy_of(table.settings, partition)
    if strategy == "rewrite" or (strategy == "auto" and shown.bytes < SMALL_BYTES):
        file = DataFile(name="", rows=shown.rows, bytes=shown.bytes)
        return (BucketEntry(id="", base=(file,) if file.rows else ()),)
    return ()


def _merge_buckets(
    buckets: Sequence[BucketEntry], kept: Sequence[Sequence[DataFile]], rows: float, sizes: Sizes
) -> tuple[tuple[BucketEntry, ...], int]:
    """The buckets after a merge of ``rows`` that keeps these files of each, and about how many bytes it writes. A split changes
    neither."""
    pairs = zip(buckets, kept, strict=True)
    merges = [_merge_bucket(b, of_bucket, rows * 0.5**b.bits, sizes) for b, of_bucket in pairs]
    return tuple(bucket for bucket, _ in merges), sum(written for _, written in merges)


def _merge_bucket(bucket: BucketEntry, kept: Sequence[DataFile], rows: float, sizes: Sizes) -> tuple[BucketEntry, int]:
    if not kept:
        file = _rewrite(bucket, rows, sizes)
        base = (file,) if file.rows else ()
        return msgspec.structs.replace(bucket, settled=True, base=base, deltas=(), tombstones=()), file.bytes
    folded = [f for f in bucket.deltas if f not in kept]
    delta = DataFile(
        name="",
        rows=round(rows) + sum(f.rows for f in folded),
        bytes=round(sizes.stored.at(rows)) + sum(f.bytes for f in folded),
    )
    return msgspec.structs.replace(bucket, deltas=(*(f for f in bucket.deltas if f in kept), delta)), delta.bytes


def _rewrite(bucket: BucketEntry, rows: float, sizes: Sizes) -> DataFile:
    """The base file that a rewrite of the bucket makes."""
    stored = sum(f.live for f in bucket.data)
    if not stored:
        return DataFile(name="", rows=round(rows), bytes=round(sizes.stored.at(rows)))
    gained = max(rows * sizes.growth, -stored)
    stored_bytes = sum(f.bytes for f in (*bucket.data, *bucket.tombstones))
    size = max(0.0, stored_bytes + gained * sizes.stored.slope)
    return DataFile(name="", rows=round(stored + gained), bytes=round(size))
