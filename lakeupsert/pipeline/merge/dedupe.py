"""Phase two: bring dirty partitions up to a batch, one row per key.

Reads     the head manifest of each partition, its pending ledger entries, and the files that both list
Writes    new base, delta, vector and tombstone files, then the next manifest version (the only commit here; readers see
          it with the next snapshot)
Repeat    safe: twice, late, or beside another worker on the same partition

    find the next step -> choose its route -> engine.merge -> commit
             ^-------------------- lost race --------------------'

The caller only says where to look. What is left to merge is the ledger's entries above the manifest's `merged`, so a lost or
repeated message changes when a partition is merged, never what it becomes.
"""

import logging
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from lakeupsert import clock, events
from lakeupsert.engine.attempts import all_or_raise
from lakeupsert.engine.merge import Engine, MergeOutput, MergeTask
from lakeupsert.engine.runs import runs
from lakeupsert.errors import DamagedTableError, RefusedError, TryAgainError
from lakeupsert.pipeline.merge.cuts import cut_alone, packs_of
from lakeupsert.pipeline.merge.next_version import version_after
from lakeupsert.pipeline.merge.state import read_states
from lakeupsert.pipeline.merge.steps import Step, step_of
from lakeupsert.pipeline.merge.units import Unit, UnitResult, UnitResults, is_shared
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.retries import CHAIN_ATTEMPTS
from lakeupsert.rows.vectors import store_vectors
from lakeupsert.storage import NotFoundError, ObjectStore
from lakeupsert.table.chain import Link, races_exhausted
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.manifest import NO_CHANGES, BucketEntry, Changes, Manifest

log = logging.getLogger(__name__)

MOST_TASKS = 8192
"""One call of the engine gets up to so many tasks, then its merges are committed. More: a driver keeps more outputs. Fewer: the
tasks of a cluster wait more often for the longest."""


@dataclass(frozen=True)
class Here:
    """This worker merges the step."""


@dataclass(frozen=True)
class Units:
    """All workers share the step; these of its units still have to be merged."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Large:
    """A worker for large partitions merges the step."""


Route = Here | Units | Large
"""Who merges a step."""


@dataclass(frozen=True)
class PartitionResult:
    """What happened to one partition.

    Attributes:
        rows_in: rows read: stored rows, tombstones and appended rows. They equal ``rows_out`` + ``rows_superseded`` +
            ``rows_deleted`` + ``rows_refused`` + the tombstones that were dropped.
        rows_deleted: tombstones that the partition has now.
        rows_refused: rows below a floor.
        changes: counts keys.
        bytes_read, bytes_written: compressed bytes.
        status: ``clean``: nothing was committed. ``large``, ``shared``: the next step is left to the workers of large
            partitions, or to all workers in ``units``; smaller batches before it may be merged already. ``outdated``: another
            writer committed while a unit was merged, or the last file was cut, so the step has to be found again.
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


@dataclass(frozen=True)
class _Merge:
    """A step that was merged: one output for each of its tasks, the engine's name, and the seconds that it took. ``units``: 0, or
    in how many units."""

    step: Step
    outputs: Sequence[MergeOutput]
    engine: str
    seconds: float
    units: int = 0


def dedupe_partitions(
    table: OpenTable, engine: Engine, wanted: dict[str, int], work: str | None = None
) -> list[PartitionResult]:
    """Bring each partition of ``wanted`` up to its batch, in shared calls of the engine. Returns one result for each.

    Every pending batch that is not published yet gets a version of its own, so that each batch can be published however fast
    new batches arrive. With ``work``, the name of a work object, each partition is rewritten once as that object says.
    A partition whose merge raises an error is ``failed``. Raises TryAgainError, and what keeps a step from being found. Some
    partitions may then be merged; the call can be repeated.
    """
    snapshot = table.history.last_snapshot()
    results = {partition: PartitionResult(partition) for partition in wanted}
    lost_races = dict.fromkeys(wanted, 0)
    todo = dict(wanted)
    heads: dict[str, Link[Manifest]] = {}  # what this call committed last is taken for the head
    while todo:
        begun = clock.elapsed()
        steps: list[Step] = []
        for partition, (head, state) in read_states(
            table.resources, table.history, snapshot, todo, work, heads
        ).items():
            results[partition] = result = _at_head(results[partition], head)
            if state is None:
                del todo[partition]
                continue
            step = step_of(table.history, table.settings, state)
            match choose_route(table, engine, step):
                case Here():
                    steps.append(step)
                case Units(numbers):
                    del todo[partition]
                    results[partition] = replace(result, status="shared", units=numbers)
                case Large():
                    del todo[partition]
                    results[partition] = replace(result, status="large")
        heads = {}
        for run in _calls(steps):
            merges, failures = _merge(table, engine, run, begun)
            links = table.resources.map_concurrently(partial(_commit, table), merges)
            for merge, link in zip(merges, links, strict=True):
                partition = merge.step.partition
                if link is None:
                    lost_races[partition] += 1
                    if lost_races[partition] > CHAIN_ATTEMPTS:
                        raise races_exhausted(table.resources.store.uri(partition), CHAIN_ATTEMPTS)
                else:
                    heads[partition] = link
                    results[partition] = _add(results[partition], merge, link)
            for failure in failures.values():
                if isinstance(failure, TryAgainError):  # what was merged is committed
                    raise failure
            for partition, failure in failures.items():
                log.debug("partition failed: %s", partition, exc_info=failure)
                del todo[partition]
                results[partition] = failed(partition, engine, failure)
            begun = clock.elapsed()
    return list(results.values())


def _calls(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Steps that a call of the engine merges together: they have one spec version."""
    for version in sorted({step.spec_version for step in steps}):
        of_spec = (step for step in steps if step.spec_version == version)
        yield from runs(of_spec, lambda step: len(step.tasks), MOST_TASKS)


def choose_route(table: OpenTable, engine: Engine, step: Step) -> Route:
    """Raises RefusedError if the step does not fit into this worker's memory and no other worker can take it."""
    shared = engine.shares_units and is_shared(step, table.settings.bucket_bytes)
    if (table.resources.large_queue is not None or not shared) and _is_large(table, engine, step, step.tasks):
        return Large()
    if shared:
        # If every unit is done, one more message of any unit is needed for what follows.
        try:
            return Units(tuple(UnitResults(table, step).find_missing() or [0]))
        except NotFoundError:  # another worker commits the step just now
            return Units((0,))
    return Here()


def dedupe_unit(
    table: OpenTable, engine: Engine, wanted: dict[str, int], work: str | None = None, *, unit: int
) -> list[PartitionResult]:
    """Merge one unit of each partition's next step, and commit the step if no other unit is missing.

    A partition is ``clean`` if other units are missing, or if its next step has no such unit.
    """
    snapshot = table.history.last_snapshot()
    results = []
    for partition, (head, state) in read_states(table.resources, table.history, snapshot, wanted, work, {}).items():
        result = _at_head(PartitionResult(partition), head)
        step = None if state is None else step_of(table.history, table.settings, state)
        if step is not None and is_shared(step, table.settings.bucket_bytes):
            result = _do_unit(table, engine, step, unit, result)
        results.append(result)
    return results


def _do_unit(table: OpenTable, engine: Engine, step: Step, number: int, result: PartitionResult) -> PartitionResult:
    begun = clock.elapsed()
    try:
        results = UnitResults(table, step)
    except NotFoundError:  # another worker committed the step, and deleted what was cut
        return result
    step, missing = results.step, results.find_missing()
    if number in missing:
        unit = results.units[number]
        if _is_large(table, engine, step, unit.merges):
            return replace(result, status="large")
        try:
            done = _run_unit(table.resources.store, engine, step, unit)
        except DamagedTableError:
            number_now = table.history.objects.partition(step.partition).newest_number()
            if number_now == (step.head.number if step.head else None):
                raise
            return result  # another worker committed the step, and deleted what was cut
        results.put(number, done)
        table.resources.emit(_unit_event(table, engine, results, number, done, clock.elapsed() - begun))
        missing = results.find_missing()
    if missing or number >= len(results.units):
        return result
    if results.units[number].cut:
        return replace(result, status="outdated")
    try:
        outputs = results.read()
    except NotFoundError:  # another worker committed the step and deleted them
        return result
    merge = _Merge(step, outputs, engine.name, clock.elapsed() - begun, units=len(results.units))
    link = _commit(table, merge, own_files=False)
    if link is None:
        return replace(result, status="outdated")
    results.delete()
    return _add(result, merge, link)


def _run_unit(store: ObjectStore, engine: Engine, step: Step, unit: Unit) -> UnitResult:
    if unit.cut:
        [output] = all_or_raise(engine.cut(store, step.spec, step.spec_version, [unit.cut]))
        return UnitResult(cut=output)
    return UnitResult(merged=tuple(all_or_raise(engine.merge(store, step.spec, step.spec_version, unit.merges))))


def _merge(
    table: OpenTable, engine: Engine, steps: Sequence[Step], begun: float
) -> tuple[list[_Merge], dict[str, Exception]]:
    """The steps that were merged, since ``begun``, and the error of each other partition. All have one spec version."""
    store, spec, version = table.resources.store, steps[0].spec, steps[0].spec_version
    after = cut_alone(engine, store, steps, table.settings.bucket_bytes, table.resources.discard)
    failures = {s.partition: e for s, e in zip(steps, after, strict=True) if isinstance(e, Exception)}
    cut = [step for step in after if not isinstance(step, Exception)]
    try:
        tasks = [task for step in cut for task in step.tasks]
        outputs = iter(engine.merge(store, spec, version, tasks) if tasks else ())
    finally:
        table.resources.discard({name for step in cut for name in packs_of(step)})
    found: list[tuple[Step, list[MergeOutput]]] = []
    for step in cut:
        of_step = [next(outputs) for _ in step.tasks]
        failure = next((output for output in of_step if isinstance(output, Exception)), None)
        merged = [output for output in of_step if not isinstance(output, Exception)]
        if failure:
            failures[step.partition] = failure
            table.resources.discard({name for output in merged for name in output.objects} - _stored_objects(step))
        else:
            found.append((step, merged))
    seconds = (clock.elapsed() - begun) / max(1, len(steps))
    return [_Merge(step, outputs, engine.name, seconds) for step, outputs in found], failures


def _is_large(table: OpenTable, engine: Engine, step: Step, tasks: Sequence[MergeTask]) -> bool:
    """Whether the workers of large partitions merge these tasks. RefusedError if they don't fit here and there are no such
    workers."""
    large = table.settings.large
    needs = max((engine.memory_of(step.spec, task) for task in tasks), default=0)
    size = sum(file.bytes for file in dict.fromkeys(file for task in tasks for file in task.read))
    fits = engine.memory_limit is None or needs <= engine.memory_limit
    if large is not None and table.resources.large_queue is not None:
        return not fits or size > large.most_bytes
    if fits:
        return False
    raise RefusedError(
        "too-large-for-worker",
        f"{step.partition}: merging its {size / 1e6:,.1f} MB needs about {needs / 1e6:,.0f} MB of memory, and this worker "
        f"may use {max(0, engine.memory_limit or 0) / 1e6:,.0f} MB. The merge was not started; the partition is unchanged.",
        next=f"give workers more memory or start fewer (--workers), or let Spark merge it: `--engine spark`, or "
        f"[tables.{table.name}.large] for all such partitions",
        partition=step.partition,
    )


def _commit(table: OpenTable, merge: _Merge, *, own_files: bool = True) -> Link[Manifest] | None:
    """The committed version, or None if the step has to be merged again because another writer changed a bucket.

    With ``own_files`` nobody else can commit these files, so they are deleted after a lost race.
    """
    step, head = merge.step, merge.step.head
    chain = table.history.objects.partition(step.partition)
    new_vectors = partial(TableObjects.new, "vectors", step.start, step.partition)
    kept = store_vectors(table.resources.store, [output.kept for output in merge.outputs], new_vectors)
    outputs = [replace(output, kept=tuple(files)) for output, files in zip(merge.outputs, kept, strict=True)]
    provenance: dict[str, str | float | int] = {
        "engine": merge.engine,
        "strategy": step.strategy,
        "seconds": round(merge.seconds, 3),
        "worker": f"{socket.gethostname()}:{os.getpid()}",
    }
    begun = clock.elapsed()
    while True:
        outcome = chain.append(version_after(step, head, outputs, provenance), head)
        if outcome.link is not None:
            table.resources.emit(_merge_event(table, merge, outcome.link, clock.elapsed() - begun))
        if outcome.result != "lost":
            return outcome.link  # None if unknown: vacuum deals with the files, and the head says what is left to do
        newer = chain.head()
        # Behind a fence our files may be deleted already.
        fenced = newer is not None and newer.body.fence is not None and newer.body.fence >= step.start
        if fenced or _buckets(newer) != _buckets(head):
            of_units = set() if own_files else {name for output in merge.outputs for name in output.objects}
            written = {name for output in outputs for name in output.objects}
            table.resources.discard(written - _stored_objects(step) - of_units)
            return None
        head = newer  # the new version, for example a mark, changed no bucket: the merge still holds


def _stored_objects(step: Step) -> set[str]:
    return {name for bucket in step.buckets for name in bucket.objects}


def failed(partition: str, engine: Engine, error: Exception) -> PartitionResult:
    """The result of a partition that can't be merged."""
    return PartitionResult(partition, status="failed", error=str(error) or repr(error), engine=engine.name)


def _buckets(link: Link[Manifest] | None) -> tuple[BucketEntry, ...]:
    return link.body.buckets if link else ()


def _at_head(result: PartitionResult, head: Link[Manifest] | None) -> PartitionResult:
    return result if head is None else replace(result, version=head.number, merged=head.body.merged)


def _add(result: PartitionResult, merge: _Merge, link: Link[Manifest]) -> PartitionResult:
    """The result with one more committed version."""
    step, outputs = merge.step, merge.outputs
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
        engine=merge.engine,
        strategy=step.strategy,
        seconds=result.seconds + merge.seconds,
        status="merged",
    )


def _new_bytes(old: Iterable[BucketEntry], new: Iterable[BucketEntry]) -> int:
    """Bytes of the files and deletion vectors that a merge wrote."""
    before = {f.name: f.deleted for b in old for f in b.data}
    stay = {f for b in old for f in (*b.tombstones, *b.history)}
    data = [f for b in new for f in b.data]
    others = [f for b in new for f in (*b.tombstones, *b.history) if f not in stay]
    files = sum(f.bytes for f in (*data, *others) if f.name not in before)
    return files + sum(f.deleted.size for f in data if f.deleted and f.deleted != before.get(f.name))


def _merge_event(table: OpenTable, merge: _Merge, link: Link[Manifest], commit_seconds: float) -> events.Merge:
    step, result = merge.step, _add(PartitionResult(merge.step.partition), merge, link)
    return events.Merge(
        table=table.name,
        batch=result.merged,
        entry=link.body.entry,
        seconds=round(result.seconds + commit_seconds, 6),
        requests=table.resources.store.requests.take(),
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


def _unit_event(
    table: OpenTable, engine: Engine, results: UnitResults, number: int, result: UnitResult, seconds: float
) -> events.UnitWork:
    step, unit = results.step, results.units[number]
    outputs = [
        *(result.cut.files if result.cut else ()),
        *(f for x in result.merged for f in (*x.written, *x.tombstones)),
    ]
    return events.UnitWork(
        table=table.name,
        batch=step.up_to,
        entry=step.entry,
        seconds=round(seconds, 6),
        requests=table.resources.store.requests.take(),
        partition=step.partition,
        unit=number,
        units=len(results.units),
        cut=unit.cut is not None,
        bytes_read=unit.cut.bytes if unit.cut else replace(step, tasks=unit.merges, cut_bytes=0).bytes,
        bytes_written=sum(file.bytes for file in outputs),
        engine=engine.name,
        strategy=step.strategy,
    )
