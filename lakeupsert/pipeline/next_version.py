"""The next version of a partition's manifest: a step and what the engine made of its tasks in, the manifest out.

Reads     nothing
Writes    nothing; `dedupe` appends what it returns
"""

from collections.abc import Sequence

import msgspec

from lakeupsert import clock
from lakeupsert.engine.merge import MergeOutput, MergeTask
from lakeupsert.pipeline.steps import Step
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
    added,
    first_hash,
    share,
)


def version_after(
    step: Step,
    head: Link[Manifest] | None,
    outputs: Sequence[MergeOutput],
    made: dict[str, str | float | int],
) -> Manifest:
    """The next version; without ``outputs`` no row moves, and some may be withdrawn."""
    before = head.body if head else Manifest(partition=step.partition, merged=0, spec_version=0)
    return msgspec.structs.replace(
        before,
        merged=step.up_to,
        spec_version=step.spec_version,
        buckets=_buckets_with(step, outputs),
        failed=before.failed if before.failed and before.failed.batch > step.up_to else None,
        quarantine=(
            *(before if step.work else step.base).quarantine,
            *(name for output in outputs for name in output.quarantine),
        ),
        reprocessed=step.work or before.reprocessed,
        entry=step.entry,
        changes=before.changes if step.work else sum((output.changes for output in outputs), NO_CHANGES),
        made=made,
    )


def _buckets_with(step: Step, outputs: Sequence[MergeOutput]) -> tuple[BucketEntry, ...]:
    """The partition's buckets after the step, in the order of their hashes.

    Rows that met no bucket are the first one's that is new, and so is what was counted before: a row that a merge lost is
    then missing there, and the version refused.
    """
    done = list(zip(step.tasks, outputs, strict=True))
    old = [b for b in step.buckets if any(share(b, task) for task in step.tasks)] or step.buckets[:1]
    made = [_made(next(b for b in old if share(b, task)), task, output) for task, output in done]
    if not made:
        counters = msgspec.structs.replace(old[0].counters, **dict.fromkeys(GONE, 0))
        made = [msgspec.structs.replace(old[0], id=clock.new_id(), counters=counters, digests=NO_DIGESTS)]
    brought = {link.number: link.body.touched[step.partition] for link in step.pending}
    merged = [t for number, t in brought.items() if number in step.counting]
    withdrawn = [t for number, t in brought.items() if number not in step.counting]
    first, *others = made
    appended = sum(b.counters.appended for b in old) + sum(t.rows for t in brought.values())
    first = msgspec.structs.replace(
        first,
        counters=msgspec.structs.replace(
            first.counters,
            appended=appended - sum(b.counters.appended for b in others),
            superseded=sum(b.counters.superseded for b in [first, *old]) + sum(t.superseded for t in merged),
            tombstones_dropped=sum(b.counters.tombstones_dropped for b in [first, *old]),
            refused=sum(b.counters.refused for b in [first, *old]),
            withdrawn=sum(b.counters.withdrawn for b in old) + sum(t.rows for t in withdrawn),
        ),
        digests=Digests(
            adopted=added([first.digests.adopted, *(b.digests.adopted for b in old if b.settled or not done)]),
            superseded=added([b.digests.superseded for b in [first, *old]] + [t.superseded_digest for t in merged]),
            tombstones_dropped=added(b.digests.tombstones_dropped for b in [first, *old]) or NO_ROWS,
            refused=added(b.digests.refused for b in [first, *old]) or NO_ROWS,
            withdrawn=added([b.digests.withdrawn for b in old] + [t.digest for t in withdrawn]),
        ),
    )
    if step.work is not None and step.pending and step.head is not None:
        first = _with_refused(first, step.head.body.buckets)
    stay = [b for b in step.buckets if b not in old]
    return tuple(sorted([*stay, first, *others], key=first_hash))


def _with_refused(first: BucketEntry, head: Sequence[BucketEntry]) -> BucketEntry:
    """Rows that merges refused count as such again: what is made anew of landing leaves them out, as superseded. So does what
    lost to them, which was superseded all along."""
    refused = sum(b.counters.refused for b in head)
    digest = added(b.digests.refused for b in head) or NO_ROWS
    superseded = first.digests.superseded
    without = None if superseded is None else f"{(int(superseded, 16) - int(digest, 16)) % 2**64:016x}"
    counters = msgspec.structs.replace(first.counters, refused=refused, superseded=first.counters.superseded - refused)
    return msgspec.structs.replace(
        first,
        counters=counters,
        digests=msgspec.structs.replace(first.digests, refused=digest, superseded=without),
    )


def _made(was: BucketEntry, task: MergeTask, output: MergeOutput) -> BucketEntry:
    """What a task made of its bucket; of what was counted before it counts nothing."""
    base = {file.name for file in was.base}
    kept = [[file for file in output.kept if (file.name in base) == is_base] for is_base in (True, False)]
    written = ((), output.written) if task.kept else (output.written, ())
    live, tombstones = sum(f.live for f in (*output.kept, *output.written)), sum(f.rows for f in output.tombstones)
    return BucketEntry(
        id=clock.new_id(),
        bucket=task.bucket,
        bits=task.bits,
        base=(*kept[0], *written[0]),
        deltas=(*kept[1], *written[1]),
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
