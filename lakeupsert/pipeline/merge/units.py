"""Who merges a step: this worker, all workers together in units, or a worker for large partitions.

Reads     what a unit's tasks name, and the results of the other units
Writes    the tasks' files, then the unit's result, an object that is created only if it is absent
Repeat    safe: a unit whose result exists is not done again, and of two workers the second drops its files

    units that cut files (`cuts`; most steps need none) -> units that merge runs of buckets -> commit

Any worker may do a unit, and the last one commits all. A result's name is a hash of everything that its tasks read and of the
chain's last fence. So only workers that do the same work find it, and nobody does once vacuum may have deleted its files.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from lakeupsert.engine.cut import CutOutput, CutTask
from lakeupsert.engine.merge import Engine, MergeOutput, MergeTask
from lakeupsert.engine.runs import runs
from lakeupsert.errors import RefusedError
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.merge.cuts import ALONE_BUCKETS, after_cut, cuts_of
from lakeupsert.pipeline.merge.steps import Step
from lakeupsert.pipeline.resources import Resources
from lakeupsert.retries import UNIT_ATTEMPTS
from lakeupsert.rows.datafiles import decoded_width
from lakeupsert.storage import NotFoundError, StoreUnavailableError, UnknownOutcomeError
from lakeupsert.table import metadata
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.manifest import share

MERGE_AGAIN = "delete that object and run `lakeupsert run`, which does the unit again"


@dataclass(frozen=True)
class Unit:
    """What one worker does at once: some merges, or a cut."""

    merges: tuple[MergeTask, ...] = ()
    cut: CutTask | None = None

    @property
    def reads(self) -> set[str]:
        files = self.cut.files if self.cut else [f for t in self.merges for f in (*t.read, *t.history)]
        return {name for file in files for name in file.objects}


class UnitResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a unit wrote: an output for each of its merges, or that of its cut."""

    merged: tuple[MergeOutput, ...] = ()
    cut: CutOutput | None = None

    @property
    def objects(self) -> set[str]:
        outputs = (self.cut,) if self.cut else self.merged
        return {name for output in outputs for name in output.objects}


def pass_on(
    resources: Resources, history: History, engine: Engine, step: Step, result: PartitionResult
) -> PartitionResult | None:
    """``result`` as ``large`` or ``shared``, or None if this worker merges the step.

    Raises RefusedError if the step does not fit into this worker's memory and no other worker can take it.
    """
    shared = engine.shares_units and is_shared(step)
    if (resources.most_bytes is not None or not shared) and is_large(resources, engine, step, step.tasks):
        return replace(result, status="large")
    if not shared:
        return None
    try:
        missing = UnitResults(resources, history, step).find_missing()
    except NotFoundError:  # another worker commits the step just now
        missing = []
    # If every unit is done, one more message of any unit is needed for what follows.
    return replace(result, status="shared", units=tuple(missing or [0]))


def is_large(resources: Resources, engine: Engine, step: Step, tasks: Sequence[MergeTask]) -> bool:
    """Whether the workers of large partitions merge these tasks. Raises RefusedError if they don't fit here and no other
    workers exist."""
    needs = max((engine.memory_of(step.spec, task) for task in tasks), default=0)
    size = sum(file.bytes for file in dict.fromkeys(file for task in tasks for file in task.read))
    fits = engine.memory_limit is None or needs <= engine.memory_limit
    if resources.most_bytes is not None:
        return not fits or size > resources.most_bytes
    if fits:
        return False
    raise RefusedError(
        "too-large-for-worker",
        f"{step.partition}: merging its {size / 1e6:,.1f} MB needs about {needs / 1e6:,.0f} MB of memory, and this worker "
        f"may use {max(0, engine.memory_limit or 0) / 1e6:,.0f} MB. The merge was not started; the partition is unchanged.",
        next=f"give workers more memory or start fewer (--workers), or let Spark merge it: `--engine spark`, or "
        f"[tables.{resources.table}.large] for all such partitions",
        partition=step.partition,
    )


def is_shared(step: Step) -> bool:
    """Whether the step is done in units."""
    efforts = _efforts(step)
    return len(efforts) > 1 and sum(efforts) > ALONE_BUCKETS * step.bucket_bytes


class UnitResults:
    """The units of a step that have to be done now, and their results as the last `find_missing` saw them.

    ``step`` is the step of the units: if a cut precedes the merges and is done, the step that reads what was cut.
    Raises NotFoundError if another worker commits the step meanwhile.
    """

    def __init__(self, resources: Resources, history: History, step: Step) -> None:
        self._resources = resources
        self._earlier: set[str] = set()
        cuts = cuts_of(step)
        self._set_units(step, [Unit(cut=cut.task) for cut in cuts])
        if not cuts or not self.find_missing():
            outputs = [result.cut for result in self._read(history.get_once) if result.cut]
            self._earlier = {*self._names.values(), *(name for output in outputs for name in output.objects)}
            step = after_cut(step, cuts, outputs)
            each = runs(zip(step.tasks, _efforts(step), strict=True), lambda pair: pair[1], step.bucket_bytes)
            self._set_units(step, [Unit(tuple(task for task, _ in run)) for run in each])

    def _set_units(self, step: Step, units: Sequence[Unit]) -> None:
        self.step, self.units = step, units
        self._keys = [_key(step, unit) for unit in units]
        self._names: dict[str, str] = {}

    def find_missing(self) -> list[int]:
        """The numbers of the units without a result."""
        listed = self._resources.store.list(TableObjects.unit_results(self.step.partition))
        names = {TableObjects.unit_key(found.name): found.name for found in listed}
        self._names = {key: names[key] for key in self._keys if key in names}
        return [number for number, key in enumerate(self._keys) if key not in self._names]

    def put(self, number: int, result: UnitResult) -> None:
        """Write the result of a unit. If another worker's result is there already, the new files of ``result`` are deleted.

        Raises StoreUnavailableError if the store does not confirm that either result exists.
        """
        partition, store = self.step.partition, self._resources.store
        name = TableObjects.new_unit_result(partition, self.step.start, self._keys[number])
        for attempt in range(UNIT_ATTEMPTS):
            try:
                created = store.create(name, metadata.encode(result))
            except UnknownOutcomeError:
                continue
            if not created and not attempt:  # at a later attempt, the result that exists may be ours
                self._resources.discard(result.objects - self.units[number].reads)
            return
        raise StoreUnavailableError(
            "store-unreachable",
            f"{store.uri(name)}: {UNIT_ATTEMPTS} attempts to create it got no answer. The partition is unchanged.",
            next="run the same command again",
            partition=partition,
        )

    def read(self) -> list[MergeOutput]:
        """One output for each merge of the step. No unit may be missing, and none may cut. Raises NotFoundError as above."""
        return [output for result in self._read(self._resources.store.get) for output in result.merged]

    def _read(self, get: Callable[[str], bytes]) -> list[UnitResult]:
        names = [self._names[key] for key in self._keys]
        data, uri = self._resources.map_concurrently(get, names), self._resources.store.uri
        return [
            metadata.decode(found, UnitResult, partial(uri, name), "the result of a unit", next=MERGE_AGAIN)
            for name, found in zip(names, data, strict=True)
        ]

    def delete(self) -> None:
        """Delete the results and what was cut, after the commit."""
        self._resources.discard({*self._names.values(), *self._earlier})


def _efforts(step: Step) -> list[float]:
    """About how many compressed bytes each merge reads. Of files that stay it reads the columns that decide."""
    spec = step.spec
    widths = {field.name: decoded_width(field.type) for field in spec.base_schema}
    deciding = sum(widths[name] for name in spec.deciding_schema.names) / sum(widths.values())
    share_read = deciding if spec.settles_early else 1.0
    return [
        sum(f.bytes * share(f, task) for f in task.read if f not in task.kept)
        + sum(f.bytes for f in task.folded)
        + sum(f.bytes for f in task.kept) * share_read
        for task in step.tasks
    ]


def _key(step: Step, unit: Unit) -> str:
    fence = step.head.body.fence if step.head else None
    merges = [replace(task, start=0) for task in unit.merges]
    cut = unit.cut and replace(unit.cut, start=0)
    return hashlib.sha256(msgspec.json.encode((merges, cut, step.spec_version, fence))).hexdigest()[:32]
