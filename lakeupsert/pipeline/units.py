"""A step that is too big for one worker. Each of its tasks is a unit; any worker may merge one, and the last one commits all.

Reads     what the unit's task names, and the results of the other units
Writes    the task's files, then its result, an object that is created only if it is absent
Repeat    safe: a unit whose result exists is not merged again, and of two workers the second drops its files

A result's name is a hash of everything that its task reads and of the chain's last fence. So only workers that do the same
merge find it, and nobody does once vacuum may have deleted its files.
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
"""One worker merges the bytes of so many buckets without sharing them. More: a night waits longer for its largest partition.
Fewer: more messages and objects for work that one worker does in a minute."""
MERGE_AGAIN = "delete that object and run `lakeupsert run`, which merges the unit again"
ATTEMPTS = 3
"""How often a result is sent if the store does not answer."""


def is_shared(table: OpenTable, step: Step) -> bool:
    """Whether the step is merged in units."""
    return len(step.tasks) > 1 and step.bytes > ALONE_BUCKETS * table.settings.bucket_bytes


class UnitResults:
    """The results of a step's units, as the last `find_missing` saw them."""

    def __init__(self, table: OpenTable, step: Step) -> None:
        self._table, self._step = table, step
        self._keys = [_key(step, task) for task in step.tasks]
        self._names: dict[str, str] = {}

    def find_missing(self) -> list[int]:
        """The numbers of the units without a result."""
        listed = self._table.store.list(TableObjects.unit_results(self._step.partition))
        names = {TableObjects.unit_key(found.name): found.name for found in listed}
        self._names = {key: names[key] for key in self._keys if key in names}
        return [number for number, key in enumerate(self._keys) if key not in self._names]

    def put(self, number: int, output: MergeOutput) -> None:
        """Write the result of a unit. If another worker's result is there already, ``output``'s new files are deleted.

        Raises StoreUnavailableError if the store does not confirm that either result exists.
        """
        task = self._step.tasks[number]
        name = TableObjects.new_unit_result(task.partition, task.start, self._keys[number])
        for attempt in range(ATTEMPTS):
            try:
                created = self._table.store.create(name, metadata.encode(output))
            except UnknownOutcomeError:
                continue
            if not created and not attempt:  # at a later attempt, the result that exists may be ours
                self._table.discard(output.objects - {name for f in (*task.read, *task.history) for name in f.objects})
            return
        raise StoreUnavailableError(
            "store-unreachable",
            f"{self._table.store.uri(name)}: {ATTEMPTS} attempts to create it got no answer. The partition is unchanged.",
            next="run the same command again",
            partition=task.partition,
        )

    def read(self) -> list[MergeOutput]:
        """One output for each task; none may be missing. Raises NotFoundError if another worker has committed them meanwhile."""
        names = [self._names[key] for key in self._keys]
        data = self._table.map_concurrently(self._table.store.get, names)
        return [
            metadata.decode(
                found, MergeOutput, partial(self._table.store.uri, name), "the result of a unit", next=MERGE_AGAIN
            )
            for name, found in zip(names, data, strict=True)
        ]

    def delete(self) -> None:
        """Delete the results, after the commit."""
        self._table.discard(self._names.values())


def _key(step: Step, task: MergeTask) -> str:
    fence = step.head.body.fence if step.head else None
    meant = msgspec.json.encode((replace(task, start=0), step.spec_version, fence))
    return hashlib.sha256(meant).hexdigest()[:32]
