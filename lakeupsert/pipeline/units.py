"""A step that is too big for one worker: each of its tasks is a unit, merged by whoever comes; the last one commits all.

Reads     what the unit's task names, and the results of the others
Writes    the task's files, then its result, an object that is created if absent
Repeat    safe: a unit whose result is there is not merged again, and what of two workers comes second is dropped

A result's name is made of everything that its task reads and of the chain's last fence, so it is found by those alone who
mean the same merge, and by nobody once vacuum may have taken its files.
"""

import hashlib
from dataclasses import replace
from functools import partial

import msgspec

from lakeupsert.engine.merge import MergeOutput, MergeTask
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.steps import Step
from lakeupsert.storage import StoreUnavailableError, UnknownOutcomeError
from lakeupsert.table import metadata
from lakeupsert.table.layout import TableObjects

ALONE_BUCKETS = 4
"""Bytes of how many buckets one worker merges without asking others. More: a night waits longer for its largest partition.
Fewer: more messages and objects for work that one worker does in a minute."""
MERGE_AGAIN = "delete that object and run `lakeupsert run`: the unit is then merged again"
ATTEMPTS = 3
"""How often a result is sent where the store does not answer."""


def is_shared(table: OpenTable, step: Step) -> bool:
    """Whether the step is merged in units."""
    return len(step.tasks) > 1 and step.bytes > ALONE_BUCKETS * table.settings.bucket_bytes


class Units:
    """The results of a step's units, as they were at the last look."""

    def __init__(self, table: OpenTable, step: Step) -> None:
        self._table, self._step = table, step
        self._keys = [_key(step, task) for task in step.tasks]
        self._there: dict[str, str] = {}

    def look(self) -> list[int]:
        """The numbers of those that are missing."""
        listed = self._table.store.list(TableObjects.unit_results(self._step.partition))
        named = {TableObjects.unit_key(found.name): found.name for found in listed}
        self._there = {key: named[key] for key in self._keys if key in named}
        return [number for number, key in enumerate(self._keys) if key not in self._there]

    def put(self, number: int, output: MergeOutput) -> None:
        """Raises StoreUnavailableError where the store does not say that the result, or another worker's, is there."""
        task = self._step.tasks[number]
        name = TableObjects.new_unit_result(task.partition, task.start, self._keys[number])
        for attempt in range(ATTEMPTS):
            try:
                created = self._table.store.create(name, metadata.encode(output))
            except UnknownOutcomeError:
                continue
            if not created and not attempt:  # else what is there may be ours
                self._table.discard(output.objects - {name for f in (*task.read, *task.history) for name in f.objects})
            return
        raise StoreUnavailableError(
            "store-unreachable",
            f"{self._table.store.uri(name)}: {ATTEMPTS} times no answer to a create. The partition stays as it was.",
            next="run the same command again",
            partition=task.partition,
        )

    def outputs(self) -> list[MergeOutput]:
        """One for each task, where none is missing. Raises NotFoundError where somebody has committed them meanwhile."""
        names = [self._there[key] for key in self._keys]
        data = self._table.at_once(self._table.store.get, names)
        return [
            metadata.decode(
                found, MergeOutput, partial(self._table.store.uri, name), "the result of a unit", next=MERGE_AGAIN
            )
            for name, found in zip(names, data, strict=True)
        ]

    def forget(self) -> None:
        """After the commit."""
        self._table.discard(self._there.values())


def _key(step: Step, task: MergeTask) -> str:
    fence = step.head.body.fence if step.head else None
    meant = msgspec.json.encode((replace(task, start=0), step.spec_version, fence))
    return hashlib.sha256(meant).hexdigest()[:32]
