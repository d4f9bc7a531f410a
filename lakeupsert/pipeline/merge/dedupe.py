"""Phase two: bring dirty partitions up to a batch, one row per key.

Reads     the head manifest of each partition, its pending ledger entries, and the files that both list
Writes    new base, delta, vector and tombstone files, then the next manifest version (the only commit here; readers see
          it with the next snapshot)
Repeat    safe: twice, late, or beside another worker on the same partition

    find the next step -> pass it on, or merge it here -> commit
             ^----------------- lost race ----------------'

The caller only says where to look. What is left to merge is the ledger's entries above the manifest's `merged`, so a lost or
repeated message changes when a partition is merged, never what it becomes.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from lakeupsert import clock, events
from lakeupsert.engine.attempts import all_or_raise
from lakeupsert.engine.merge import Engine
from lakeupsert.engine.runs import runs
from lakeupsert.errors import DamagedTableError, TryAgainError
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.merge.commit import PartitionResult, commit
from lakeupsert.pipeline.merge.cuts import Merge, merge_steps
from lakeupsert.pipeline.merge.state import merges_one_by_one, read_states
from lakeupsert.pipeline.merge.steps import Step, step_of
from lakeupsert.pipeline.merge.units import Unit, UnitResult, UnitResults, is_large, is_shared, pass_on
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.resources import Resources
from lakeupsert.pipeline.standing import unpublished_up_to
from lakeupsert.retries import CHAIN_ATTEMPTS
from lakeupsert.storage import NotFoundError, ObjectStore
from lakeupsert.storage.keeping import KeepingStore
from lakeupsert.table.chain import Link, races_exhausted
from lakeupsert.table.group import FEATURE
from lakeupsert.table.manifest import Manifest
from lakeupsert.table.snapshot import Snapshot

log = logging.getLogger(__name__)

MOST_TASKS = 8192
"""One call of the engine gets up to so many tasks, then its merges are committed. More: a driver keeps more outputs. Fewer: the
tasks of a cluster wait more often for the longest."""


def dedupe_partitions(
    table: OpenTable, engine: Engine, wanted: dict[str, int], work: str | None = None
) -> list[PartitionResult]:
    """Bring each partition of ``wanted`` up to its batch, in shared calls of the engine. Returns one result for each.

    Every pending batch that is not published yet gets a version of its own, so that each batch can be published however fast
    new batches arrive. With ``work``, the name of a work object, each partition is rewritten once as that object says.
    A partition whose merge raises an error is ``failed``. Raises TryAgainError, and what keeps a step from being found. Some
    partitions may then be merged; the call can be repeated.
    """
    resources, history = table.resources, table.history
    snapshot, listed = history.look(len(wanted))
    results = {partition: PartitionResult(partition) for partition in wanted}
    lost_races = dict.fromkeys(wanted, 0)
    todo = dict(wanted)
    heads: dict[str, Link[Manifest]] = {}  # what this call committed last is taken for the head
    while todo:
        begun = clock.elapsed()
        steps: list[Step] = []
        heads |= history.heads([partition for partition in todo if partition not in heads], listed)
        listed = None  # who lost a race asks again
        for partition, (head, state) in read_states(history, snapshot, heads, todo, work).items():
            results[partition] = result = results[partition].at(head)
            if state is not None:
                step = step_of(history, table.settings, state)
                passed_on = pass_on(resources, history, engine, step, result)
                if passed_on is None:
                    steps.append(step)
                    continue
                results[partition] = passed_on
            del todo[partition]
        heads = {}
        for run in _calls(steps):
            found = merge_steps(engine, resources.store, run, resources.discard, begun)
            links = _commit_all(table, snapshot, todo, [one for one in found if not isinstance(one, Exception)])
            failures: dict[str, Exception] = {}
            for step, one in zip(run, found, strict=True):
                partition, link = step.partition, next(links) if isinstance(one, Merge) else None
                if isinstance(one, Merge) and link is not None:
                    heads[partition] = link
                    results[partition] = results[partition].after(one, link)
                elif isinstance(one, Exception) and not _is_overtaken(history, step, one):
                    failures[partition] = one
                else:
                    lost_races[partition] += 1
                    if lost_races[partition] > CHAIN_ATTEMPTS:
                        raise races_exhausted(resources.store.uri(partition), CHAIN_ATTEMPTS)
            history.keep_heads(heads)
            if failures and isinstance(resources.store, KeepingStore):
                resources.store.forget()  # a damaged file may be mended while this process lives
            for failure in failures.values():
                if isinstance(failure, TryAgainError):  # what was merged is committed
                    raise failure
            for partition, failure in failures.items():
                log.debug("partition failed: %s", partition, exc_info=failure)
                del todo[partition]
                results[partition] = PartitionResult(partition).failed(engine.name, failure)
            begun = clock.elapsed()
    return list(results.values())


def _commit_all(
    table: OpenTable, snapshot: Link[Snapshot] | None, wanted: Mapping[str, int], merges: Sequence[Merge]
) -> Iterator[Link[Manifest] | None]:
    """The `commit` of each merge; a preview if it needs no version, and no batch that is ``wanted`` follows it."""
    last = [one for one in merges if one.step.up_to == wanted[one.step.partition]]
    previews = frozenset(one.step.partition for one in last if _may_be_preview(table.history, snapshot, one))
    each = partial(commit, table.resources, table.history, previews=previews)
    return iter(table.resources.map_concurrently(each, merges))


def _may_be_preview(history: History, snapshot: Link[Snapshot] | None, merge: Merge) -> bool:
    """Whether the merge needs no version, because a leader shows it in a group: it is of one batch, the first that readers do not
    see, and everybody else would merge that batch to the same rows."""
    step, head = merge.step, merge.step.head
    shown = snapshot.body.partitions.get(step.partition) if snapshot else None
    if snapshot is None or shown is None or head is None or step.work is not None or len(step.pending) != 1:
        return False
    entry = step.pending[0].body
    is_plain = entry.kind == "batch" and head.body.failed is None and not any(o.quarantine for o in merge.outputs)
    is_next = (
        shown.version == head.number
        and shown.merged == head.body.merged
        and step.partition not in snapshot.body.lagging
    )
    if not is_plain or not is_next or merges_one_by_one(head, step.pending, step.partition):
        return False
    if unpublished_up_to(history, snapshot.body, step.up_to - 1):
        return False
    if not history.previews.may_add(head, step.up_to, len(entry.touched)):
        return False
    if FEATURE not in step.spec.requires:
        history.previews.wanted = True
        return False
    return True


def _is_overtaken(history: History, step: Step, error: Exception) -> bool:
    """Whether a file may be missing because the head has moved on, and a vacuum deleted the file."""
    if not isinstance(error, DamagedTableError):
        return False
    history.objects.held.forget()
    newest = history.objects.partition(step.partition).newest_number()
    return newest is not None and newest > (step.head.number if step.head else -1)


def _calls(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Steps that a call of the engine merges together: they have one spec version."""
    for version in sorted({step.spec_version for step in steps}):
        of_spec = (step for step in steps if step.spec_version == version)
        yield from runs(of_spec, lambda step: len(step.tasks), MOST_TASKS)


def dedupe_unit(
    table: OpenTable, engine: Engine, wanted: dict[str, int], work: str | None = None, *, unit: int
) -> list[PartitionResult]:
    """Merge one unit of each partition's next step, and commit the step if no other unit is missing.

    A partition is ``clean`` if other units are missing, or if its next step has no such unit.
    """
    resources, history = table.resources, table.history
    results, snapshot = [], history.last_snapshot()
    for partition, (head, state) in read_states(history, snapshot, history.heads(wanted), wanted, work).items():
        result = PartitionResult(partition).at(head)
        step = None if state is None else step_of(history, table.settings, state)
        if step is not None and is_shared(step):
            result = _do_unit(resources, history, engine, step, unit, result)
        results.append(result)
    return results


def _do_unit(
    resources: Resources, history: History, engine: Engine, step: Step, number: int, result: PartitionResult
) -> PartitionResult:
    begun = clock.elapsed()
    try:
        results = UnitResults(resources, history, step)
    except NotFoundError:  # another worker committed the step, and deleted what was cut
        return result
    step, missing = results.step, results.find_missing()
    if number in missing:
        unit = results.units[number]
        if is_large(resources, engine, step, unit.merges):
            return replace(result, status="large")
        try:
            done = _run_unit(resources.store, engine, step, unit)
        except DamagedTableError as e:
            if not _is_overtaken(history, step, e):
                raise
            return result  # another worker committed the step, and deleted what was cut
        results.put(number, done)
        resources.emit(_unit_event(resources, engine, results, number, done, clock.elapsed() - begun))
        missing = results.find_missing()
    if missing or number >= len(results.units):
        return result
    if results.units[number].cut:
        return replace(result, status="outdated")
    try:
        outputs = results.read()
    except NotFoundError:  # another worker committed the step and deleted them
        return result
    merge = Merge(step, outputs, engine.name, clock.elapsed() - begun, units=len(results.units))
    link = commit(resources, history, merge)
    if link is None:
        return replace(result, status="outdated")
    results.delete()
    return result.after(merge, link)


def _run_unit(store: ObjectStore, engine: Engine, step: Step, unit: Unit) -> UnitResult:
    if unit.cut:
        [output] = all_or_raise(engine.cut(store, step.spec, step.spec_version, [unit.cut]))
        return UnitResult(cut=output)
    return UnitResult(merged=tuple(all_or_raise(engine.merge(store, step.spec, step.spec_version, unit.merges))))


def _unit_event(
    resources: Resources, engine: Engine, results: UnitResults, number: int, result: UnitResult, seconds: float
) -> events.UnitWork:
    step, unit = results.step, results.units[number]
    written = result.cut.files if result.cut else [f for x in result.merged for f in (*x.written, *x.tombstones)]
    return events.UnitWork(
        table=resources.table,
        batch=step.up_to,
        entry=step.entry,
        seconds=round(seconds, 6),
        requests=resources.store.requests.take(),
        partition=step.partition,
        unit=number,
        units=len(results.units),
        cut=unit.cut is not None,
        bytes_read=unit.cut.bytes if unit.cut else replace(step, tasks=unit.merges, cut_bytes=0).bytes,
        bytes_written=sum(file.bytes for file in written),
        engine=engine.name,
        strategy=step.strategy,
    )
