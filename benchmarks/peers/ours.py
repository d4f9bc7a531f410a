"""Our sides: `append --host spark`, `dedupe`, `publish`, all durable; read by `to_spark`.

By default two worker processes merge, beside Spark in the same two cores. Others merge in Spark's tasks: by engine arrow, by
engine spark, or by engine arrow on a cluster of processes, where two workers have a core each and do both phases.
"""

import atexit
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq

from benchmarks.peers.spark import session, timed
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
        self.workload = workload
        self.work = work
        self.settings = settings(workload, work, strategy)
        self._merges = MERGES[merges]
        self.spark = session(work, conf=_start_cluster(work) if cluster else None)
        self._requests: Counter[str] = Counter()

    def load(self, base: Path) -> None:
        """In the session, as the other sides do; worker processes would count as the night's."""
        self.land(base)
        table = Table("t", self.settings)
        table.run(host="spark", workers=1)
        table.close()

    def land(self, night: Path) -> None:
        (self.work / "landing").mkdir(exist_ok=True)
        shutil.copy(night, self.work / "landing")

    def apply(self) -> dict[str, float]:
        table = Table("t", self.settings)  # a new process would know nothing either
        steps = {
            "append": lambda: table.append(host="spark"),
            "dedupe": lambda: table.dedupe(**self._merges),
            "publish": table.publish,
        }
        seconds = timed(steps)
        self._requests.update(table.requests)
        table.close()
        return seconds

    def read(self, where: str) -> Any:
        table = Table("t", self.settings)
        frame = table.to_spark(self.spark, where=None if where == "true" else where)
        figures = frame.selectExpr(*self.workload.figures.values()).collect()[0]
        table.close()
        return figures

    def bytes_counted(self) -> int:
        return 0

    def requests(self) -> dict[str, int]:
        return dict(self._requests)


class Floor(Ours):
    """No upsert can be faster: pyarrow alone reads what came and the base files that our night wrote, and writes them again.

    The packs of the night, with many small files in each, are copied as they are. All is synced, one file after the other.
    """

    def land(self, night: Path) -> None:
        super().land(night)
        self.night = night

    def apply(self) -> dict[str, float]:
        before = set((self.work / "table").rglob("*"))
        super().apply()
        scratch = self.work / "floor"
        scratch.mkdir(exist_ok=True)
        new = set((self.work / "table").rglob("*")) - before
        files = [self.night, *(file for file in new if file.suffix in (".parquet", ".delta", ".roaring", ".pack"))]
        seconds = timed({"read and write": lambda: [_copy(file, scratch / str(n)) for n, file in enumerate(files)]})
        shutil.rmtree(scratch)
        return seconds


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


def _copy(file: Path, to: Path) -> None:
    with to.open("wb") as sink:
        if file.suffix in (".parquet", ".delta"):
            pq.write_table(pq.ParquetFile(file).read(), sink, compression="zstd")
        else:
            sink.write(file.read_bytes())
        sink.flush()
        os.fsync(sink.fileno())
