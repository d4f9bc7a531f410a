"""Our sides: `append`, `dedupe`, `publish`, all durable; read by `to_duckdb`, and by `to_spark` where there is a session.

Beside Spark two worker processes merge by default. Others merge in Spark's tasks: by engine arrow, by engine spark, or by engine
arrow on a cluster of processes, where two workers have a core each and do both phases.
"""

import atexit
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import duckdb
import msgspec

from benchmarks.peers.processes import timed
from benchmarks.peers.spark import session
from benchmarks.workload import Workload
from lakeupsert.api import Table
from lakeupsert.config import TableSettings
from tests.harness import servers

WORKERS = 2
MERGES: dict[str, dict[str, Any]] = {
    "processes": {"workers": WORKERS},
    "executors": {"host": "spark"},
    "window": {"engine": "spark"},
}
"""Arguments of `Table.dedupe`."""


class Ours:
    """On Python's processes, as deltalite and delta-rs are: ``append --host local``, and ``workers`` merge (1: this process)."""

    def __init__(self, workload: Workload, work: Path, jars: Sequence[Path], strategy: str, workers: int = 1) -> None:
        self.workload = workload
        self.work = work
        self.settings = settings(workload, work, strategy)
        self._append: dict[str, Any] = {"host": "local"}
        self._dedupe: dict[str, Any] = {"workers": workers}
        self._requests: Counter[str] = Counter()

    def load(self, base: Path) -> None:
        """With the session, if there is one, as the other sides do; worker processes would count as the night's."""
        self.land(base)
        table = Table("t", self.settings)
        table.run(**self._append, workers=1)
        table.close()

    def land(self, night: Path) -> None:
        (self.work / "landing").mkdir(exist_ok=True)
        shutil.copy(night, self.work / "landing")

    def apply(self) -> dict[str, float]:
        table = Table("t", self.settings)  # a new process would know nothing either
        steps = {
            "append": lambda: table.append(**self._append),
            "dedupe": lambda: table.dedupe(**self._dedupe),
            "publish": table.publish,
        }
        seconds = timed(steps)
        self._requests.update(table.requests)
        table.close()
        return seconds

    def reads(self) -> Mapping[str, Callable[[str], Any]]:
        return {"DuckDB": self._read_by_duckdb}

    def bytes_counted(self) -> int:
        return 0

    def requests(self) -> dict[str, int]:
        return dict(self._requests)

    def _read_by_duckdb(self, where: str) -> Any:
        table = Table("t", self.settings)
        with duckdb.connect(config={"threads": 2}) as db:
            rows = table.to_duckdb(db, where=None if where == "true" else where)
            figures = rows.aggregate(", ".join(self.workload.figures.values())).fetchall()[0]
        table.close()
        return figures


class OursBesideSpark(Ours):
    """``append --host spark``; then two worker processes merge, beside Spark in the same two cores, or Spark's tasks do."""

    def __init__(
        self,
        workload: Workload,
        work: Path,
        jars: Sequence[Path],
        strategy: str,
        merges: str = "processes",
        *,
        cluster: bool = False,
    ) -> None:
        super().__init__(workload, work, jars, strategy)
        self._append, self._dedupe = {"host": "spark"}, MERGES[merges]
        self.spark = session(work, conf=_start_cluster(work) if cluster else None)

    def reads(self) -> Mapping[str, Callable[[str], Any]]:
        return {"Spark": self._read_by_spark, **super().reads()}

    def _read_by_spark(self, where: str) -> Any:
        table = Table("t", self.settings)
        frame = table.to_spark(self.spark, where=None if where == "true" else where)
        figures = frame.selectExpr(*self.workload.figures.values()).collect()[0]
        table.close()
        return figures


def settings(workload: Workload, work: Path, strategy: str) -> TableSettings:
    """Raises msgspec.ValidationError where this version has no such strategy."""
    given = {
        "landing": str(work / "landing"),
        "processed": str(work / "table"),
        "key": workload.key,
        "partition_by": (workload.partition,),
        "order_by": (workload.order,),
        "strategy": strategy,
    }
    if workload.delete:
        given["delete"] = {"column": workload.delete[0], "values": workload.delete[1:]}
    return msgspec.convert(given, TableSettings)


def _start_cluster(work: Path) -> dict[str, str]:
    """The settings of a session on a cluster, which runs until this process ends."""
    folder = work / "cluster"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    running = ExitStack()
    cluster = running.enter_context(servers.spark_cluster(folder, WORKERS))
    atexit.register(running.close)
    # Memory is what a worker offers, and Python's is beside it.
    return {"spark.master": cluster.url, "spark.executor.memory": "900m", "spark.executor.memoryOverhead": "4g"}
