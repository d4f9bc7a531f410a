"""The next version of a partition's manifest: a step and the outputs of its tasks go in, the manifest comes out.

Reads     nothing
Writes    nothing; `dedupe` appends the manifest
Repeat    safe: apart from the new ids of buckets, the same arguments give the same manifest
"""

from collections.abc import Sequence

import msgspec

from lakeupsert import clock
from lakeupsert.engine.merge import MergeOutput, MergeTask
from lakeupsert.pipeline.merge.steps import Step
from lakeupsert.table.chain import Link
from lakeupsert.table.manifest import (
    GONE,
    NO_CHANGES,
    NO_DIGESTS,
    NO_ROWS,
    BucketEntry,
    Counters,
    Digests,
    Manifest,
    add_digests,
    first_hash,
    share,
)


def version_after(
    step: Step,
    head: Link[Manifest] | None,
    outputs: Sequence[MergeOutput],
    provenance: dict[str, str | float | int],
) -> Manifest:
    """The version that follows ``head``, which may be newer than the step's. A step without tasks moves no row, but may withdraw
    some.

    Args:
        outputs: one for each task of the step.
        provenance: goes into the manifest as `made`.
    """
    before = head.body if head else Manifest(partition=step.partition, merged=0, spec_version=0)
    refused_before = before.quarantine if step.work else step.base.quarantine
    after = msgspec.structs.replace(
        before,
        merged=step.up_to,
        spec_version=step.spec_version,
        buckets=_buckets_after(step, outputs),
        failed=before.failed if before.failed and before.failed.batch > step.up_to else None,
        quarantine=(*refused_before, *(name for output in outputs for name in output.quarantine)),
        reprocessed=step.work or before.reprocessed,
        entry=step.entry,
        changes=before.changes if step.work else sum((output.changes for output in outputs), NO_CHANGES),
        made=provenance,
    )
    return msgspec.structs.replace(after, added=len(after.objects - before.objects))


def _buckets_after(step: Step, outputs: Sequence[MergeOutput]) -> tuple[BucketEntry, ...]:
    """The partition's buckets after the step, ordered by their hashes.

    The first new bucket counts the rows that met no bucket, and whatever the replaced buckets had counted before. If a merge
    lost a row, that row is missing from this bucket's counters, and the version is refused.
    """
    merged = list(zip(step.tasks, outputs, strict=True))
    replaced = [b for b in step.buckets if any(share(b, task) for task in step.tasks)] or step.buckets[:1]
    new = [_bucket_after(next(b for b in replaced if share(b, task)), task, output) for task, output in merged]
    if not new:
        counters = msgspec.structs.replace(replaced[0].counters, **dict.fromkeys(GONE, 0))
        new = [msgspec.structs.replace(replaced[0], id=clock.new_id(), counters=counters, digests=NO_DIGESTS)]
    touched = {link.number: link.body.touched[step.partition] for link in step.pending}
    counted = [t for number, t in touched.items() if number in step.active]
    withdrawn = [t for number, t in touched.items() if number not in step.active]
    first, *others = new
    appended = sum(b.counters.appended for b in replaced) + sum(t.rows for t in touched.values())
    first = msgspec.structs.replace(
        first,
        counters=msgspec.structs.replace(
            first.counters,
            appended=appended - sum(b.counters.appended for b in others),
            superseded=sum(b.counters.superseded for b in [first, *replaced]) + sum(t.superseded for t in counted),
            tombstones_dropped=sum(b.counters.tombstones_dropped for b in [first, *replaced]),
            refused=sum(b.counters.refused for b in [first, *replaced]),
            withdrawn=sum(b.counters.withdrawn for b in replaced) + sum(t.rows for t in withdrawn),
        ),
        digests=Digests(
            adopted=add_digests(
                [first.digests.adopted, *(b.digests.adopted for b in replaced if b.settled or not merged)]
            ),
            superseded=add_digests(
                [b.digests.superseded for b in [first, *replaced]] + [t.superseded_digest for t in counted]
            ),
            tombstones_dropped=add_digests(b.digests.tombstones_dropped for b in [first, *replaced]) or NO_ROWS,
            refused=add_digests(b.digests.refused for b in [first, *replaced]) or NO_ROWS,
            withdrawn=add_digests([b.digests.withdrawn for b in replaced] + [t.digest for t in withdrawn]),
        ),
    )
    if step.work is not None and step.pending and step.head is not None:
        first = _keep_refused(first, step.head.body.buckets)
    stay = [b for b in step.buckets if b not in replaced]
    return tuple(sorted([*stay, first, *others], key=first_hash))


def _keep_refused(first: BucketEntry, head: Sequence[BucketEntry]) -> BucketEntry:
    """Count the rows that merges of ``head`` had refused as refused again.

    A rebuild from landing leaves these rows out, and so counts them as superseded. Rows that had lost to them are superseded
    either way.
    """
    refused = sum(b.counters.refused for b in head)
    digest = add_digests(b.digests.refused for b in head) or NO_ROWS
    superseded = first.digests.superseded
    without = None if superseded is None else f"{(int(superseded, 16) - int(digest, 16)) % 2**64:016x}"
    counters = msgspec.structs.replace(first.counters, refused=refused, superseded=first.counters.superseded - refused)
    return msgspec.structs.replace(
        first,
        counters=counters,
        digests=msgspec.structs.replace(first.digests, refused=digest, superseded=without),
    )


def _bucket_after(before: BucketEntry, task: MergeTask, output: MergeOutput) -> BucketEntry:
    """The bucket that a task wrote. It counts only the rows of this merge, none that ``before`` had counted."""
    base = {file.name for file in before.base}
    kept_base = tuple(file for file in output.kept if file.name in base)
    kept_deltas = tuple(file for file in output.kept if file.name not in base)
    new_base, new_deltas = ((), output.written) if task.kept else (output.written, ())
    live, tombstones = sum(f.live for f in (*output.kept, *output.written)), sum(f.rows for f in output.tombstones)
    return BucketEntry(
        id=clock.new_id(),
        bucket=task.bucket,
        bits=task.bits,
        base=(*kept_base, *new_base),
        deltas=(*kept_deltas, *new_deltas),
        tombstones=output.tombstones,
        history=output.history,
        floor=output.floor,
        counters=Counters(
            appended=live + tombstones + output.superseded + output.dropped + output.refused,
            live=live,
            tombstones=tombstones,
            superseded=output.superseded,
            tombstones_dropped=output.dropped,
            refused=output.refused,
        ),
        digests=msgspec.structs.replace(
            NO_DIGESTS,
            adopted=NO_ROWS if task.settled else output.adopted,
            superseded=output.superseded_digest,
            tombstones_dropped=output.dropped_digest,
            refused=output.refused_digest,
        ),
    )
