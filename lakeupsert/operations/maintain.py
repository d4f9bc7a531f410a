"""Upkeep in the background, while `ingest` and workers go on: compact what is slow to read, expire and vacuum.

Reads     what `compact` and `vacuum` read
Writes    what `compact` and `vacuum` write; its lease
Repeat    safe: each round looks at the table, and two processes are as right as two `compact` and two `vacuum`

Its rewrites go through a private queue: `ingest` and workers never get one of them, and no append waits for upkeep.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from lakeupsert import clock
from lakeupsert.operations.compact import compact
from lakeupsert.operations.reprocess import ReprocessOptions, ReprocessResult
from lakeupsert.operations.rounds import RoundOptions, Rounds
from lakeupsert.operations.vacuum import VacuumMemory, VacuumResult, vacuum
from lakeupsert.pipeline.leadership import Leadership
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.strategy import MOST_DELTAS
from lakeupsert.queue import SqliteQueue


@dataclass(frozen=True, kw_only=True)
class MaintainOptions(RoundOptions):
    """When it works, and who hears of what it did.

    Attributes:
        seconds: from one look at the partitions to the next.
        vacuum_seconds: from one vacuum to the next.
        collect: takes each result as soon as it is there. None is kept.
    """

    seconds: float = 60.0
    vacuum_seconds: float = 3600.0
    collect: Callable[[ReprocessResult | VacuumResult], object] = lambda result: None


class Upkeep(Rounds):
    def __init__(self, table: OpenTable, options: MaintainOptions) -> None:
        objects = table.history.objects
        leadership = Leadership(objects, options.leader_seconds, objects.upkeep)
        super().__init__(table, leadership, options, "does the upkeep")
        self._options, self._vacuumed_at, self._has_failed = options, float("-inf"), False
        self._memory = VacuumMemory.of(table)

    def work(self, stop: Stop) -> None:
        if self.table.history.head_spec() is None:
            return
        with TemporaryDirectory() as folder, closing(SqliteQueue(Path(folder) / "queue.sqlite")) as queue:
            shared = self._options.calls_at_once
            how = ReprocessOptions(workers=1, calls_at_once=shared, stop=stop, alive=self.beat)
            done = compact(self.table.at_queue(queue), how, most_deltas=MOST_DELTAS)
        if done.plan.work is not None:  # only that queue named it, and vacuum would keep files for it until it is old
            self.table.resources.discard([done.plan.work])
        if done.plan.work is not None or self._has_failed:  # also that nothing fails any more
            self._options.collect(done)
        self._has_failed = any(one.status == "failed" for one in done.dedupe)
        if not stop.is_set() and clock.elapsed() - self._vacuumed_at >= self._options.vacuum_seconds:
            self._options.collect(vacuum(self.table, dry=False, progress=lambda text: self.beat(), memory=self._memory))
            self.table.history.forget_published()
            self._vacuumed_at = clock.elapsed()
