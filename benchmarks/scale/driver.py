"""How much memory the driver takes for 100 to 5,000 touched partitions, if both phases run on Spark's executors.

The cluster is a master and two workers on this machine (`tests.harness.servers`), so that executors are not the driver. Each
step is a process of its own, whose peak (VmHWM) is read at its end: of Python, and of the JVM that Spark's driver is. The JVM may
take a heap of 512 MB, which it fills before it collects, so its peak shows no more than that this is enough. Every partition gets
50 rows a night. A first `run` makes the table, a second night goes step by step, and a third is a whole `run`.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import duckdb

from benchmarks.peers.processes import tree
from benchmarks.rows import day, settings
from lakeupsert import sparkenv
from lakeupsert.api import Table
from tests.harness import servers

ROWS = 50
NIGHTS = (("run",), ("append", "dedupe", "publish"), ("run",))
SPARK = {
    "spark.driver.memory": "512m",
    "spark.driver.host": servers.HOST,
    "spark.driver.bindAddress": servers.HOST,
    "spark.executor.memory": "600m",
    "spark.executor.memoryOverhead": "2g",
}
SHOWN = {
    "append": "MB append",
    "dedupe": "MB dedupe",
    "publish": "MB publish",
    "run": "MB run",
    "run_jvm": "MB its JVM",
    "run_seconds": "s run",
}


def measured(home: Path, partitions: int) -> dict[str, float]:
    """Peak memory in MB."""
    lake = home / "driver"
    shutil.rmtree(lake, ignore_errors=True)
    given = settings(lake, "auto")
    sparkenv.prepare()
    peaks: dict[str, dict[str, float]] = {}
    with servers.spark_cluster(lake) as cluster:
        for night, steps in enumerate(NIGHTS):
            duckdb.sql(f"COPY ({_rows(partitions, night)}) TO '{given.landing}/{night}.parquet' (FORMAT parquet)")
            peaks |= {step: _peak(lake, step, cluster.url) for step in steps}
    found = Table("t", given).status()
    if (found.partitions, found.rows, found.dirty) != (partitions, partitions * ROWS * (len(NIGHTS) + 1) // 2, 0):
        raise SystemExit(f"not exact: {found.rows} rows in {found.partitions} partitions")
    return {
        **{step: round(peak["python"]) for step, peak in peaks.items()},
        "run_jvm": round(peaks["run"]["java"]),
        "run_seconds": round(peaks["run"]["seconds"], 1),
    }


def _rows(partitions: int, night: int) -> str:
    """SQL: half of a partition's rows are updates of the night before."""
    key = f"lpad((i % {ROWS} + {night * ROWS // 2})::VARCHAR, 16, '0')"
    return f"""SELECT DATE '{day(0)}' + (i // {ROWS})::INTEGER AS d, {key} AS k,
        TIMESTAMP '2026-01-01' + INTERVAL {night} DAY AS ts, (hash(i, {night}) % 1000)::INTEGER AS amount
        FROM range({partitions * ROWS}) t(i)"""


def _peak(lake: Path, step: str, master: str) -> dict[str, float]:
    submit = " ".join(f"--conf {name}={value}" for name, value in SPARK.items())
    env = {**os.environ, "PYSPARK_SUBMIT_ARGS": f"--master {master} {submit} pyspark-shell"}
    command = [sys.executable, "-m", __spec__.name, str(lake), step]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(lake: str, step: str) -> None:
    """Do the step, and print its seconds and the peaks of this process and of its JVM in MB."""
    sparkenv.prepare()
    table = Table("t", settings(Path(lake), "auto"))
    steps = {
        "append": lambda: table.append(host="spark"),
        "dedupe": lambda: table.dedupe(host="spark"),
        "publish": table.publish,
        "run": lambda: table.run(host="spark"),
    }
    begun = perf_counter()
    steps[step]()
    seconds = perf_counter() - begun
    own, *others = (Path(f"/proc/{pid}/status").read_text() for pid in tree())
    java = [_high_water(status) for status in others if status.startswith("Name:\tjava")]
    print(json.dumps({"python": _high_water(own), "java": max(java, default=0.0), "seconds": seconds}))


def _high_water(status: str) -> float:
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
