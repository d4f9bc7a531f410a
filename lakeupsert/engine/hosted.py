"""Engine arrow on a host that has many machines: the driver sends merge tasks, and gets outputs or errors back.

A store, a spec and a task pickle as they are, in some kilobytes. Each merge is the one of `arrow`; only where it runs differs.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.engine.cut import Cuts, CutTask, cut
from lakeupsert.engine.hosts import Host, map_counted
from lakeupsert.engine.merge import Merged, MergeTask
from lakeupsert.engine.runs import runs
from lakeupsert.errors import ConfigurationError
from lakeupsert.storage import ObjectStore
from lakeupsert.table.spec import TableSpec

RUN_BYTES = 64 << 20
"""Tasks of a partition that read up to so many bytes are done together, and share what they read."""


class HostedEngine:
    """See `lakeupsert.engine.merge.Engine`. ``memory_limit``: bytes that each task on the host may take."""

    name = "arrow"
    partitions_per_call = 256
    shares_units = False

    def __init__(self, host: Host, memory_limit: int | None) -> None:
        self.memory_limit = memory_limit
        self._host = host

    def memory_of(self, spec: TableSpec, task: MergeTask) -> int:
        return ArrowEngine(self.memory_limit).memory_of(spec, task)

    def merge(self, store: ObjectStore, spec: TableSpec, spec_version: int, tasks: Sequence[MergeTask]) -> Merged:
        runs = list(_runs(tasks))
        sizes = [float(sum(task.bytes for task in run)) for run in runs]
        merge = partial(_merge, self.memory_limit, store, spec, spec_version)
        found = map_counted(self._host, store, merge, runs, sizes)
        outputs: Merged = []
        for run, of_run in zip(runs, found, strict=True):
            outputs += [of_run] * len(run) if isinstance(of_run, Exception) else of_run
        return outputs

    def cut(self, store: ObjectStore, spec: TableSpec, spec_version: int, tasks: Sequence[CutTask]) -> Cuts:
        sizes = [float(task.bytes) for task in tasks]
        function = partial(cut, store, spec, spec_version, self.memory_limit)
        return list(map_counted(self._host, store, function, tasks, sizes))


def _runs(tasks: Iterable[MergeTask]) -> Iterator[list[MergeTask]]:
    for _, of_partition in itertools.groupby(tasks, lambda task: task.partition):
        yield from runs(of_partition, lambda task: task.bytes, RUN_BYTES)


def _merge(
    memory_limit: int | None, store: ObjectStore, spec: TableSpec, spec_version: int, run: Sequence[MergeTask]
) -> Merged:
    outputs = ArrowEngine(memory_limit).merge(store, spec, spec_version, run)
    for output in outputs:
        if isinstance(output, MemoryError | ConfigurationError):  # the machine's, and the host explains it
            raise output
    return outputs
