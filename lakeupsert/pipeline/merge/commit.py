"""The end of a merge: the partition's next version is committed, and its caller gets a result.

Reads     the partition's head, after a lost race
Writes    deletion vectors, then the next manifest version
Repeat    safe: only one writer appends a version; another writer's step becomes void, or is appended behind it
"""

import os
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from lakeupsert import clock, events
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.merge.cuts import Merge
from lakeupsert.pipeline.merge.next_version import version_after
from lakeupsert.pipeline.resources import Resources
from lakeupsert.rows.vectors import store_vectors
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.manifest import NO_CHANGES, BucketEntry, Changes, Manifest


@dataclass(frozen=True)
class PartitionResult:
    """The outcome of one partition.

    Attributes:
        rows_in: rows read: stored rows, tombstones and appended rows. They equal ``rows_out`` + ``rows_superseded`` +
            ``rows_deleted`` + ``rows_refused`` + the tombstones that were dropped.
        rows_deleted: tombstones that the partition has now.
        rows_refused: rows below a floor.
        changes: counts keys.
        bytes_read, bytes_written: compressed bytes.
        status: ``clean``: nothing was committed. ``large``, ``shared``: the next step is left to the workers of large
            partitions, or to all workers in ``units``; smaller batches before it may be merged already. ``outdated``: another
            writer committed while a unit was merged, or the last file was cut, so the step must be found again.
    """

    partition: str
    version: int = -1
    merged: int = 0
    rows_in: int = 0
    rows_out: int = 0
    rows_superseded: int = 0
    rows_deleted: int = 0
    rows_refused: int = 0
    changes: Changes = NO_CHANGES
    bytes_read: int = 0
    bytes_written: int = 0
    engine: str = ""
    strategy: str = ""
    seconds: float = 0.0
    status: Literal["merged", "clean", "failed", "large", "shared", "outdated"] = "clean"
    error: str | None = None
    units: tuple[int, ...] = ()

    def at(self, head: Link[Manifest] | None) -> "PartitionResult":
        return self if head is None else replace(self, version=head.number, merged=head.body.merged)

    def failed(self, engine: str, error: Exception | str) -> "PartitionResult":
        return replace(self, status="failed", error=str(error) or repr(error), engine=engine)

    def after(self, merge: Merge, link: Link[Manifest]) -> "PartitionResult":
        """The result with one more committed version."""
        step, outputs = merge.step, merge.outputs
        return replace(
            self,
            version=link.number,
            merged=link.body.merged,
            rows_in=self.rows_in + sum(f.live for f in step.read),
            rows_out=link.body.rows,
            rows_superseded=self.rows_superseded + sum(output.superseded for output in outputs),
            rows_deleted=sum(bucket.counters.tombstones for bucket in link.body.buckets),
            rows_refused=self.rows_refused + sum(output.refused for output in outputs),
            changes=self.changes if step.work else self.changes + link.body.changes,
            bytes_read=self.bytes_read + step.bytes,
            bytes_written=self.bytes_written + (_new_bytes(step.buckets, link.body.buckets) if outputs else 0),
            engine=merge.engine,
            strategy=step.strategy,
            seconds=self.seconds + merge.seconds,
            status="merged",
        )


def commit(
    resources: Resources, history: History, merge: Merge, previews: Collection[str] = ()
) -> Link[Manifest] | None:
    """Append the partition's next version, and delete the files that a lost race leaves over. A partition in ``previews`` gets a
    preview instead.

    Returns None if the step must be merged again, because another writer changed a bucket.
    """
    step, head = merge.step, merge.step.head
    buckets = head.body.buckets if head else ()
    chain = history.objects.partition(step.partition)
    new_vectors = partial(TableObjects.new, "vectors", step.start, step.partition)
    kept = store_vectors(resources.store, [output.kept for output in merge.outputs], new_vectors)
    outputs = [replace(output, kept=tuple(files)) for output, files in zip(merge.outputs, kept, strict=True)]
    provenance: dict[str, str | float | int] = {
        "engine": merge.engine,
        "strategy": step.strategy,
        "seconds": round(merge.seconds, 3),
        "worker": f"{socket.gethostname()}:{os.getpid()}",
    }
    begun = clock.elapsed()
    if step.partition in previews and head is not None:
        preview = history.previews.add(head, version_after(step, head, outputs, provenance))
        resources.emit(_event(resources, merge, preview, clock.elapsed() - begun))
        return preview
    while True:
        outcome = chain.append(version_after(step, head, outputs, provenance), head)
        if outcome.link is not None:
            resources.emit(_event(resources, merge, outcome.link, clock.elapsed() - begun))
        if outcome.result != "lost":
            return outcome.link  # None if unknown: vacuum deals with the files, and the head says what is left to do
        newer = chain.head()
        # Behind a fence our files may be deleted already.
        fenced = newer is not None and newer.body.fence is not None and newer.body.fence >= step.start
        if fenced or (newer.body.buckets if newer else ()) != buckets:
            written = {name for output in outputs for name in output.objects}
            of_units = {name for output in merge.outputs for name in output.objects} if merge.units else set()
            resources.discard(written - step.stored_objects - of_units)
            return None
        head = newer  # the new version, for example a mark, changed no bucket: the merge still holds


def _new_bytes(old: Iterable[BucketEntry], new: Iterable[BucketEntry]) -> int:
    """Bytes of the files and deletion vectors that a merge wrote."""
    before = {f.name: f.deleted for b in old for f in b.data}
    stay = {f for b in old for f in (*b.tombstones, *b.history)}
    data = [f for b in new for f in b.data]
    others = [f for b in new for f in (*b.tombstones, *b.history) if f not in stay]
    files = sum(f.bytes for f in (*data, *others) if f.name not in before)
    return files + sum(f.deleted.size for f in data if f.deleted and f.deleted != before.get(f.name))


def _event(resources: Resources, merge: Merge, link: Link[Manifest], commit_seconds: float) -> events.Merge:
    step, result = merge.step, PartitionResult(merge.step.partition).after(merge, link)
    return events.Merge(
        table=resources.table,
        batch=result.merged,
        entry=link.body.entry,
        seconds=round(result.seconds + commit_seconds, 6),
        requests=resources.store.requests.take(),
        partition=result.partition,
        version=result.version,
        rows_in=result.rows_in,
        rows_out=result.rows_out,
        rows_superseded=result.rows_superseded,
        rows_deleted=result.rows_deleted,
        rows_refused=result.rows_refused,
        bytes_read=result.bytes_read,
        bytes_written=result.bytes_written,
        engine=result.engine,
        strategy=result.strategy,
        commit_seconds=round(commit_seconds, 6),
        units=merge.units,
        earlier=() if step.work else tuple(x.write_id for x in step.pending if x.number in step.active - {step.up_to}),
        work=step.work,
    )
