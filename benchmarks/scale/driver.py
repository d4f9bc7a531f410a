"""How much memory the driver takes for 10 to 2,000 touched partitions: `append --host spark`, and publish.

Each is a process of its own, whose peak (VmHWM) is told at its end: of Python, and of its JVM, which is driver and executor in
one (`local[*]`, a heap of 1 GB, which it fills before it collects, so its peak tells no more than that this is enough). Every
partition gets 50 rows; the night that counts is the second, so publish has a snapshot of all partitions before it.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb

from benchmarks.peers.processes import tree
from benchmarks.rows import day, settings
from lakeupsert import sparkenv
from lakeupsert.api import Table

ROWS = 50
SHOWN = {"append": "MB append", "append_jvm": "MB its JVM", "publish": "MB publish"}


def measured(home: Path, partitions: int) -> dict[str, float]:
    """Peak memory in MB."""
    lake = home / "driver"
    shutil.rmtree(lake, ignore_errors=True)
    given = settings(lake, "auto")
    peaks = {}
    for night in range(2):
        duckdb.sql(f"COPY ({_rows(partitions, night)}) TO '{given.landing}/{night}.parquet' (FORMAT parquet)")
        peaks = {step: _peak(lake, step) for step in ("append", "dedupe", "publish")}
    found = Table("t", given).status()
    if (found.partitions, found.rows, found.dirty) != (partitions, partitions * ROWS * 3 // 2, 0):
        raise SystemExit(f"not exact: {found.rows} rows in {found.partitions} partitions")
    return {
        "append": round(peaks["append"]["python"]),
        "append_jvm": round(peaks["append"]["java"]),
        "publish": round(peaks["publish"]["python"]),
    }


def _rows(partitions: int, night: int) -> str:
    """SQL: half of a partition's rows in the second night are updates."""
    key = f"lpad((i % {ROWS} + {night * ROWS // 2})::VARCHAR, 16, '0')"
    return f"""SELECT DATE '{day(0)}' + (i // {ROWS})::INTEGER AS d, {key} AS k,
        TIMESTAMP '2026-01-01' + INTERVAL {night} DAY AS ts, (hash(i, {night}) % 1000)::INTEGER AS amount
        FROM range({partitions * ROWS}) t(i)"""


def _peak(lake: Path, step: str) -> dict[str, float]:
    command = [sys.executable, "-m", __spec__.name, str(lake), step]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(lake: str, step: str) -> None:
    """Do the step, and print the peaks of this process and of its JVM in MB."""
    sparkenv.prepare()
    table = Table("t", settings(Path(lake), "auto"))
    steps = {"append": lambda: table.append(host="spark"), "dedupe": table.dedupe, "publish": table.publish}
    steps[step]()
    own, *others = (Path(f"/proc/{pid}/status").read_text() for pid in tree())
    java = [_high_water(status) for status in others if status.startswith("Name:\tjava")]
    print(json.dumps({"python": _high_water(own), "java": max(java, default=0.0)}))


def _high_water(status: str) -> float:
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
