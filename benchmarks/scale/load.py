"""Processor time, memory and requests as one thing grows: landing files of a night, batches that wait, garbage, columns, workers.

Each case is measured at a quarter, a half and the whole of its size, in a process of its own, of which the peak is that of the
measured step (VmHWM; of workers the sum over all processes, sampled). The table is made before that. `growth` in the report is
the power of the size by which a figure grew from the half to the whole: 1 is in proportion.

    landing    so many files of ten rows in one night: append, and the first call of the night after
    waiting    one partition with so many appended files, one of each batch: dedupe and publish
    garbage    so many files that no version needs: vacuum
    columns    a night of 1,000 rows with so many columns over 1,000 stored ones
    workers    a night that touches 2,000 partitions, with so many worker processes
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import log2
from pathlib import Path
from time import perf_counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.memory import peak_bytes
from benchmarks.peers.processes import PeakMemory
from lakeupsert import clock
from lakeupsert.api import Table
from lakeupsert.config import TableSettings

SIZES = {"landing": 20_000, "waiting": 10_000, "garbage": 100_000, "columns": 5_000, "workers": 64}
SHOWN = {
    "seconds": "s",
    "processor": "processor, s",
    "mb": "MB",
    "requests": "requests",
    "after_processor": "processor after, s",
    "after_mb": "MB after",
    "after_requests": "requests after",
}
PARTITIONS = 2_000
Steps = dict[str, Callable[[Table], object]]


def measured(home: Path, case: str, size: int) -> dict[str, float]:
    lake = home / "load"
    shutil.rmtree(lake, ignore_errors=True)
    command = [sys.executable, "-m", __spec__.name, str(lake), case, str(size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def growth(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """For each case the powers of its last doubling."""
    for case, size in SIZES.items():
        half, whole = (found.get(f"{case} {n}") for n in (size // 2, size))
        if half and whole:
            powers = (
                f"{name} {log2(whole[figure] / half[figure]):.2f}" for figure, name in SHOWN.items() if half[figure]
            )
            yield f"growth of {case} from {size // 2:,} to {size:,}: {', '.join(powers)}"


def _landing(table: Table, size: int) -> Steps:
    for number in range(size):
        _land(table, f"{number:06}", [number % 10] * 10, [f"{number}-{k}" for k in range(10)])
    return {"": lambda new: new.append(host="local"), "after_": lambda new: new.append(host="local")}


def _waiting(table: Table, size: int) -> Steps:
    for number in range(size):
        _land(table, f"{number:06}", [0], [str(number % 100)])
        table.append(host="local")
    return {"": lambda new: new.dedupe(), "after_": lambda new: new.publish()}


def _garbage(table: Table, size: int) -> Steps:
    for night in range(2):
        _land(table, str(night), list(range(100)), ["a"] * 100)
        table.run(host="local")
    for number in range(size):
        path = Path(table.settings.processed) / f"d={number % 100}" / f"base-0-{clock.new_id()}.parquet"
        path.touch()
        os.utime(path, (0, 0))
    return {"": lambda new: new.vacuum(dry=False), "after_": lambda new: new.vacuum(dry=False)}


def _columns(table: Table, size: int) -> Steps:
    for night in range(2):
        more = {f"column_{n}": pa.array(range(night, 1000 + night)) for n in range(size - 3)}
        _land(table, str(night), [0] * 1000, [str(k) for k in range(1000)], **more)
        if not night:
            table.run(host="local")
    return {"": lambda new: new.run(host="local"), "after_": lambda new: new.to_arrow().read_all()}


def _workers(table: Table, size: int) -> Steps:
    for night in range(2):
        _land(table, str(night), [n // 5 for n in range(PARTITIONS * 5)], [str(n % 5) for n in range(PARTITIONS * 5)])
        if not night:
            table.run(host="local")
    table.append(host="local")
    return {"": lambda new: new.dedupe(workers=size), "after_": lambda new: new.publish()}


def _land(table: Table, name: str, partitions: list[int], keys: list[str], **more: Any) -> None:
    n = len(keys)
    columns = {"k": pa.array(keys), "d": pa.array([str(p) for p in partitions]), "ts": pa.array([n] * n), **more}
    pq.write_table(pa.table(columns), Path(table.settings.landing) / f"{name}.parquet")


@contextmanager
def _peak(case: str) -> Iterator[dict[str, float]]:
    found: dict[str, float] = {}
    if case == "workers":
        with PeakMemory() as peak:
            yield found
        found["mb"] = peak.mb
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        yield found
        found["mb"] = round(peak_bytes() / 1e6)


def main(lake: Path, case: str, size: int) -> None:
    (lake / "landing").mkdir(parents=True)
    zones = {"landing": str(lake / "landing"), "processed": str(lake / "table")}
    given = TableSettings(**zones, key=("k",), partition_by=("d",), order_by=("ts",))
    steps = {"landing": _landing, "waiting": _waiting, "garbage": _garbage, "columns": _columns, "workers": _workers}
    found: dict[str, float] = {}
    for name, step in steps[case](Table("t", given), size).items():
        used, begun = sum(os.times()[:4]), perf_counter()
        with _peak(case) as peak, Table("t", given) as table:
            step(table)
            found[f"{name}requests"] = sum(table.requests.values())
        found |= {f"{name}seconds": round(perf_counter() - begun, 2), f"{name}mb": peak["mb"]}
        found[f"{name}processor"] = round(sum(os.times()[:4]) - used, 2)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
