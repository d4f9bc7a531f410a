"""Phase two: bring dirty partitions up to a batch, one row per key.

Reads     the partition's head manifest, its pending ledger entries, and the files that both list
Writes    new base, delta, vector and tombstone files, then the next manifest version (the only commit here; readers see
          it with the next snapshot)
Repeat    safe: twice, late, or beside another worker on the same partition

    receive -> load manifest and pending -> engine.merge -> commit -> ack
                     ^------------------ lost race ----------'

The message only says where to look. What is still to merge is the ledger's entries above the manifest's `merged`, so a
lost or repeated message changes how soon, never what.
"""

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from lakeupsert import clock
from lakeupsert.engine.merge import Engine, MergeOutput, MergeTask
from lakeupsert.errors import RefusedError
from lakeupsert.pipeline.next_version import version_after
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.steps import Step, next_step, step_anew
from lakeupsert.pipeline.units import Units, is_shared
from lakeupsert.storage import NotFoundError
from lakeupsert.table.chain import Link, races_exhausted
from lakeupsert.table.manifest import NO_CHANGES, BucketEntry, Changes, Manifest
from lakeupsert.table.snapshot import Snapshot

ATTEMPTS = 20


@dataclass(frozen=True)
class PartitionResult:
    """What happened to one partition.

    rows_in (stored rows, tombstones and appended rows that were read) = rows_out + rows_superseded + rows_deleted, the
    tombstones that it has now, + rows_refused, which are below a floor, + tombstones that were dropped; bytes are compressed.
    ``changes`` counts keys.
    One that is ``large`` is left for the workers of large partitions, one that is ``shared`` for all workers, in ``units``,
    perhaps after batches that were small.
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
    status: Literal["merged", "clean", "failed", "large", "shared"] = "clean"
    error: str | None = None
    units: tuple[int, ...] = ()


def dedupe_partitions(
    table: OpenTable, engine: Engine, wanted: dict[str, int], work: str | None = None
) -> list[PartitionResult]:
    """Bring each partition of ``wanted`` up to its batch, in shared calls of the engine; one result each.

    A version is committed for every pending batch that is not published yet, so that each batch can be published, however
    fast new ones come. With ``work``, the name of a work object, each is written anew as that says instead, once.
    Raises what engine and store raise; then some partitions may be merged, and the call can be repeated.
    """
    snapshot = table.last_snapshot()
    results = {partition: PartitionResult(partition) for partition in wanted}
    lost = dict.fromkeys(wanted, 0)
    todo = dict(wanted)
    heads: dict[str, Link[Manifest] | None] = {}  # what we committed last is the head, as far as we know
    while todo:
        begun = clock.elapsed()
        steps: list[Step] = []
        for partition, (head, step) in _looked(table, snapshot, todo, work, heads).items():
            result = results[partition]
            if head is not None:
                result = replace(result, version=head.number, merged=head.body.merged)
            shared = step is not None and engine.shares_units and is_shared(table, step)
            if step is None:
                del todo[partition]
            elif (table.large_queue is not None or not shared) and _is_large(table, engine, step, step.tasks):
                del todo[partition]
                result = replace(result, status="large")
            elif shared:
                del todo[partition]
                result = replace(result, status="shared", units=tuple(Units(table, step).look() or [0]))
            else:
                steps.append(step)
            results[partition] = result
        outputs = _outputs(table, engine, steps)
        seconds = (clock.elapsed() - begun) / max(1, len(steps))
        links = table.at_once(partial(_commit, table, engine.name, seconds), list(zip(steps, outputs, strict=True)))
        heads = {}
        for step, of_step, link in zip(steps, outputs, links, strict=True):
            partition = step.partition
            if link is None:
                lost[partition] += 1
                if lost[partition] > ATTEMPTS:
                    raise races_exhausted(table.store.uri(partition), ATTEMPTS)
            else:
                heads[partition] = link
                results[partition] = _added(results[partition], step, of_step, link, engine.name, seconds)
    return list(results.values())


def dedupe_unit(
    table: OpenTable, engine: Engine, wanted: dict[str, int], work: str | None = None, *, unit: int
) -> list[PartitionResult]:
    """Merge one unit of what is next in each partition, and commit the version where no other is missing.

    A partition is ``clean`` where others are, or something else is next there; and ``shared`` again, without units, where
    what was merged is of no use any more.
    """
    snapshot = table.last_snapshot()
    results = []
    for partition, (head, step) in _looked(table, snapshot, wanted, work, {}).items():
        result = PartitionResult(partition)
        if head is not None:
            result = replace(result, version=head.number, merged=head.body.merged)
        if step is not None and unit < len(step.tasks) and is_shared(table, step):
            result = _merge_unit(table, engine, step, unit, result)
        results.append(result)
    return results


def _merge_unit(table: OpenTable, engine: Engine, step: Step, number: int, result: PartitionResult) -> PartitionResult:
    begun = clock.elapsed()
    units = Units(table, step)
    missing = units.look()
    if number in missing:
        task = step.tasks[number]
        if _is_large(table, engine, step, [task]):
            return replace(result, status="large")
        [output] = engine.merge(table.store, table.spec(step.spec_version), step.spec_version, [task])
        units.put(number, output)
        missing = units.look()
    if missing:
        return result
    try:
        outputs = units.outputs()
    except NotFoundError:  # they are committed
        return result
    seconds = clock.elapsed() - begun
    link = _commit(table, engine.name, seconds, (step, outputs), alone=False)
    if link is None:
        return replace(result, status="shared")
    units.forget()
    return _added(result, step, outputs, link, engine.name, seconds)


def _looked(
    table: OpenTable,
    snapshot: Link[Snapshot] | None,
    wanted: dict[str, int],
    work: str | None,
    known: dict[str, Link[Manifest] | None],
) -> dict[str, tuple[Link[Manifest] | None, Step | None]]:
    """Head and next step of each partition, None where nothing is left to do; heads that are ``known`` are not read."""
    found: dict[str, tuple[Link[Manifest] | None, Step | None]] = {}
    if work is not None:
        for partition, there in {**table.heads(wanted.keys() - known.keys()), **known}.items():
            # A message that came again: vacuum may have deleted the work object.
            if there is not None and there.body.reprocessed == work:
                found[partition] = there, None
    left = {partition: batch for partition, batch in wanted.items() if partition not in found}
    from_landing = work is not None and bool(left) and table.work(work).source == "landing"
    unknown = [partition for partition in left if partition not in known]
    newest = table.at_once(
        lambda partition: table.newest(
            partition, snapshot, from_landing=from_landing, up_to=left[partition] if work is None else None
        ),
        unknown,
    )
    heads = {**known, **dict(zip(unknown, newest, strict=True))}
    for partition, batch in left.items():
        head = heads[partition]
        if work is None:
            step = next_step(table, partition, batch, snapshot.body if snapshot else None, head)
        else:
            step = step_anew(table, head, partition, work)
        found[partition] = head, step
    return found


def _outputs(table: OpenTable, engine: Engine, steps: Sequence[Step]) -> list[list[MergeOutput]]:
    """What the engine makes of the tasks of each step, in one call for all that have one spec."""
    by_spec: dict[int, list[MergeTask]] = {}
    for step in steps:
        by_spec.setdefault(step.spec_version, []).extend(step.tasks)
    merged = {
        version: iter(engine.merge(table.store, table.spec(version), version, tasks))
        for version, tasks in by_spec.items()
        if tasks
    }
    return [[next(merged[step.spec_version]) for _ in step.tasks] for step in steps]


def _is_large(table: OpenTable, engine: Engine, step: Step, tasks: Sequence[MergeTask]) -> bool:
    """Whether they are for the workers of large partitions; an error where they do not fit into memory and there are none."""
    spec, large = table.spec(step.spec_version), table.settings.large
    needs = max((engine.memory_of(spec, task) for task in tasks), default=0)
    size = sum(file.bytes for file in dict.fromkeys(file for task in tasks for file in task.read))
    fits = engine.memory_limit is None or needs <= engine.memory_limit
    if large is not None and table.large_queue is not None:
        return not fits or size > large.most_bytes
    if fits:
        return False
    raise RefusedError(
        "too-large-for-worker",
        f"{step.partition}: to merge its {size / 1e6:,.1f} MB takes about {needs / 1e6:,.0f} MB of memory, and this "
        f"worker may take {max(0, engine.memory_limit or 0) / 1e6:,.0f} MB. It was not begun.",
        next=f"give workers more memory or begin fewer (--workers), or let Spark merge it: `--engine spark`, or "
        f"[tables.{table.name}.large] for all such partitions",
        partition=step.partition,
    )


def _commit(
    table: OpenTable, engine: str, seconds: float, merged: tuple[Step, Sequence[MergeOutput]], *, alone: bool = True
) -> Link[Manifest] | None:
    """The committed version, or None where the race was lost to a writer that changed a bucket: then it is redone.

    ``alone``: whether nobody else may commit these files.
    """
    step, outputs = merged
    head = step.head
    chain = table.objects.partition(step.partition)
    made: dict[str, str | float | int] = {
        "engine": engine,
        "strategy": step.strategy,
        "seconds": round(seconds, 3),
        "worker": f"{socket.gethostname()}:{os.getpid()}",
    }
    while True:
        outcome = chain.append(version_after(step, head, outputs, made), head)
        if outcome.link is not None or outcome.result == "unknown":
            return outcome.link  # unknown: the files stay for vacuum, the head tells whether anything is left to do
        newer = chain.head()
        # What changed a bucket makes us redo it; behind a fence what we wrote may be gone already.
        fenced = newer is not None and newer.body.fence is not None and newer.body.fence >= step.start
        if fenced or _buckets(newer) != _buckets(head):
            if alone:
                there = {name for bucket in step.buckets for name in bucket.objects}
                table.discard({name for output in outputs for name in output.objects} - there)
            return None
        head = newer  # something else was appended, such as a mark; what we read still stands


def _buckets(link: Link[Manifest] | None) -> tuple[BucketEntry, ...]:
    return link.body.buckets if link else ()


def _added(
    result: PartitionResult,
    step: Step,
    outputs: Sequence[MergeOutput],
    link: Link[Manifest],
    engine: str,
    seconds: float,
) -> PartitionResult:
    return replace(
        result,
        version=link.number,
        merged=link.body.merged,
        rows_in=result.rows_in + sum(f.live for f in step.read),
        rows_out=link.body.rows,
        rows_superseded=result.rows_superseded + sum(output.superseded for output in outputs),
        rows_deleted=sum(bucket.counters.tombstones for bucket in link.body.buckets),
        rows_refused=result.rows_refused + sum(output.refused for output in outputs),
        changes=result.changes if step.work else result.changes + link.body.changes,
        bytes_read=result.bytes_read + step.bytes,
        bytes_written=result.bytes_written + (_new_bytes(step.buckets, link.body.buckets) if outputs else 0),
        engine=engine,
        strategy=step.strategy,
        seconds=result.seconds + seconds,
        status="merged",
    )


def _new_bytes(old: Iterable[BucketEntry], new: Iterable[BucketEntry]) -> int:
    """Of the files that a merge wrote, and of the vectors."""
    before = {f.name: f.deleted for b in old for f in b.data}
    stay = {f for b in old for f in (*b.tombstones, *b.history)}
    data = [f for b in new for f in b.data]
    others = [f for b in new for f in (*b.tombstones, *b.history) if f not in stay]
    files = sum(f.bytes for f in (*data, *others) if f.name not in before)
    return files + sum(f.deleted.size for f in data if f.deleted and f.deleted != before.get(f.name))
