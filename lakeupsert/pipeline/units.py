"""A step that is too big for one worker: each of its tasks is a unit, merged by whoever comes; the last one commits all.

Reads     what the unit's task names, and the results of the others
Writes    the task's files, then its result, an object that is created if absent
Repeat    safe: a unit whose result is there is not merged again, and what of two workers comes second is dropped

A result's name is made of everything that its task reads and of the chain's last fence, so it is found by those alone who
mean the same merge, and by nobody once vacuum may have taken its files.
"""

import hashlib
from contextlib import suppress
from dataclasses import replace

import msgspec

from lakeupsert.engine.merge import MergeOutput, MergeTask
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.steps import Step
from lakeupsert.storage import UnknownOutcomeError
from lakeupsert.table.layout import TableObjects

ALONE_BUCKETS = 4
"""Bytes of how many buckets one worker merges without asking others. More: a night waits longer for its largest partition.
Fewer: more messages and objects for work that one worker does in a minute."""


def is_shared(table: OpenTable, step: Step) -> bool:
    """Whether the step is merged in units."""
    return len(step.tasks) > 1 and step.bytes > ALONE_BUCKETS * table.settings.bucket_bytes


class Units:
    """The results of a step's units, as they were at the last look."""

    def __init__(self, table: OpenTable, step: Step) -> None:
        self._table, self._step = table, step
        self._keys = [_key(step, task) for task in step.tasks]
        self._there: dict[str, str] = {}

    def look(self) -> int:
        """How many are missing."""
        listed = self._table.store.list(TableObjects.unit_results(self._step.partition))
        named = {TableObjects.unit_key(found.name): found.name for found in listed}
        self._there = {key: named[key] for key in self._keys if key in named}
        return len(self._keys) - len(self._there)

    def has(self, number: int) -> bool:
        return self._keys[number] in self._there

    def put(self, number: int, output: MergeOutput) -> None:
        task = self._step.tasks[number]
        name = TableObjects.new_unit_result(task.partition, task.start, self._keys[number])
        with suppress(UnknownOutcomeError):  # whoever looks next finds it, or merges the unit again
            if not self._table.store.create(name, msgspec.json.encode(output)):
                self._table.discard(output.objects - {name for file in task.read for name in file.objects})

    def outputs(self) -> list[MergeOutput]:
        """One for each task, where none is missing. Raises NotFoundError where somebody has committed them meanwhile."""
        data = self._table.at_once(self._table.store.get, [self._there[key] for key in self._keys])
        return [msgspec.json.decode(found, type=MergeOutput) for found in data]

    def forget(self) -> None:
        """After the commit."""
        self._table.discard(self._there.values())


def _key(step: Step, task: MergeTask) -> str:
    fence = step.head.body.fence if step.head else None
    meant = msgspec.json.encode((replace(task, start=0), step.spec_version, fence))
    return hashlib.sha256(meant).hexdigest()[:32]
