"""One night of the workload `night`: lakeupsert against the plain Spark window and overwrite, both in the same run.

Reads     benchmarks/workload.py's files, made below build/bench on the first run
Writes    build/bench, and benchmarks/results/night.json and night.md
Repeat    safe: every round begins with new tables

    make bench                                          # or with BENCH_ARGS="--rounds 3", "--partitions 30", ...

Each side runs in a process of its own: untimed it starts Spark and loads the base in that session, then it does the
night, then its table is compared with DuckDB's figures. `ours` is `append --host spark`, `dedupe` with two worker
processes, `publish`. `plain` is the pattern that it replaces: append the batch to the partitions, then window the
touched partitions by row_number and overwrite them. Both write zstd; ours also syncs every file to the disk, as its
promises ask, and keeps the last snapshot readable all the while.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.workload import FIGURES, KEY, comparable, make, size_arguments, size_of
from lakeupsert import sparkenv
from lakeupsert.config import DeleteSettings, TableSettings

if TYPE_CHECKING:  # each worker process imports this module, as it would a user's script
    from lakeupsert.api import Table

RESULTS = Path(__file__).parent / "results"
WORKERS = 2
SIDES = ("plain", "ours")


# ---------------------------------------------------------------- one side, in its own process


def ours(workload: Path, work: Path) -> dict[str, Any]:
    from lakeupsert.api import Table

    _spark(work)
    _load(workload, work)
    _land(workload / "batch-1.parquet", work)
    table = Table("sales", _settings(work))  # a new process would know nothing either
    before = table.requests
    cpu = _cpu_seconds()
    seconds: dict[str, float] = {}
    appended = _timed(seconds, "append", lambda: table.append(host="spark"))
    spark_workers = _descendants("python")
    spark_memory = max(map(_peak_mb, spark_workers))
    with _PeakMemory(except_for=spark_workers) as dedupe_memory:
        merged = _timed(seconds, "dedupe", lambda: table.dedupe(workers=WORKERS))
    _timed(seconds, "publish", table.publish)
    cpu = _cpu_seconds() - cpu
    requests = {call: n - before[call] for call, n in table.requests.items()}
    touched = len(merged)
    return {
        "seconds": seconds,
        "cpu_seconds": round(cpu, 1),
        "figures": _figures_by_duckdb(table),
        "touched": touched,
        "requests_per_partition": {call: round(n / touched, 2) for call, n in requests.items()},
        "kilobytes_per_partition": {
            "appended": round(sum(t.bytes for t in appended.entry.touched.values()) / touched / 1000, 1),
            "read by dedupe": round(sum(p.bytes_read for p in merged) / touched / 1000, 1),
            "written by dedupe": round(sum(p.bytes_written for p in merged) / touched / 1000, 1),
        },
        "peak_mb": {"Spark's Python worker": spark_memory, "dedupe worker": dedupe_memory.mb},
    }


def plain(workload: Path, work: Path) -> dict[str, Any]:
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812 - the name that all of Spark's documentation uses

    spark = _spark(work)
    table = str(work / "table")
    partition = KEY[0]

    def write(rows: Any, mode: str) -> None:
        rows.repartition(8, partition).write.mode(mode).partitionBy(partition).parquet(table)

    write(spark.read.parquet(str(workload / "base.parquet")), "append")
    batch = spark.read.parquet(str(workload / "batch-1.parquet"))
    newest_first = Window.partitionBy(*KEY).orderBy(F.col("record_timestamp").desc())

    def dedupe() -> int:
        touched = [row[0] for row in batch.select(partition).distinct().collect()]
        rows = spark.read.parquet(table).where(F.col(partition).isin(touched))
        # A delete has to stay as a row, or an older record that comes later would bring the key back.
        write(rows.withColumn("rn", F.row_number().over(newest_first)).where("rn = 1").drop("rn"), "overwrite")
        return len(touched)

    seconds: dict[str, float] = {}
    before = _bytes(work / "table")
    cpu = _cpu_seconds()
    _timed(seconds, "append", lambda: write(batch, "append"))
    appended = _bytes(work / "table") - before
    touched = _timed(seconds, "dedupe", dedupe)
    cpu = _cpu_seconds() - cpu
    rows = spark.read.parquet(table).where("op <> 'D'").selectExpr(*FIGURES.values()).collect()[0]
    return {
        "seconds": seconds,
        "cpu_seconds": round(cpu, 1),
        "figures": comparable(rows),
        "touched": touched,
        "kilobytes_per_partition": {
            "appended": round(appended / touched / 1000, 1),
            "read by dedupe": round((before + appended) / touched / 1000, 1),
            "written by dedupe": round(_bytes(work / "table") / touched / 1000, 1),
        },
        "peak_mb": {"Spark's JVM": max(_peak_mb(pid) for pid in _descendants("java"))},
    }


def _load(workload: Path, work: Path) -> None:
    """Load the base in the session, as the other side does. (Worker processes of now would count as the night's.)"""
    from lakeupsert.api import Table

    _land(workload / "base.parquet", work)
    table = Table("sales", _settings(work))
    table.run(host="spark", workers=1)
    table.close()


def _settings(work: Path) -> TableSettings:
    return TableSettings(
        landing=str(work / "landing"),
        processed=str(work / "processed"),
        key=(KEY[1],),
        partition_by=(KEY[0],),
        delete=DeleteSettings(column="op", values=("D",)),
    )


def _land(file: Path, work: Path) -> None:
    (work / "landing").mkdir(parents=True, exist_ok=True)
    shutil.copy(file, work / "landing")


def _figures_by_duckdb(table: "Table") -> dict[str, Any]:
    import duckdb

    with duckdb.connect() as db:
        db.register("reader", table.to_arrow())
        return comparable(db.execute(f"SELECT {', '.join(FIGURES.values())} FROM reader").fetchall()[0])


def _spark(work: Path) -> Any:
    """The session of both sides; after one small job, so that JVM and Python workers are up and have their imports."""
    from pyspark.sql import SparkSession

    sparkenv.prepare()
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.memory", "8g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.local.dir", str(work / "spark"))
        .config("spark.log.level", "ERROR")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "8")
        .config("spark.sql.parquet.compression.codec", "zstd")
        .config("spark.sql.sources.partitionOverwriteMode", "dynamic")
        .getOrCreate()
    )
    spark.range(0, 1000, 1, 2).mapInArrow(_warm, "id bigint").count()
    return spark


def _warm(batches: Iterator[Any]) -> Iterator[Any]:
    import lakeupsert.engine.spark  # noqa: F401 - what a worker of a cluster has imported by its second night

    yield from batches


def _timed(seconds: dict[str, float], step: str, do: Callable[[], Any]) -> Any:
    begun = time.perf_counter()
    result = do()
    seconds[step] = round(time.perf_counter() - begun, 2)
    return result


def _bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*.parquet"))


def _descendants(program: str = "") -> list[int]:
    """Processes below this one, all of them or those that run ``program``."""
    children: dict[int, list[tuple[int, str]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = stat.read_text().rpartition(")")
        except OSError:
            continue  # it has just ended
        children.setdefault(int(tail.split()[1]), []).append((int(head.split()[0]), head.split("(", 1)[1]))
    found, look = [], [os.getpid()]
    while look:
        below = children.get(look.pop(), [])
        found += [pid for pid, name in below if name.startswith(program)]
        look += [pid for pid, _ in below]
    return found


def _cpu_seconds() -> float:
    """What this process and all below it have used so far, those that have ended included.

    It tells the cost of a night also on a machine that others use at the same time, where seconds tell little.
    """
    ticks = 0
    for pid in [os.getpid(), *_descendants()]:
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _peak_mb(pid: int) -> int:
    """The most that a process has held so far; 0 where it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM")), 0)


class _PeakMemory:
    """The most that one Python process below this one held while the block ran.

    Watched from here, since what the kernel keeps of an ended process also counts the memory of whoever started it.
    """

    mb = 0

    def __init__(self, except_for: Sequence[int]) -> None:
        self._except_for = set(except_for)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "_PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            self.mb = max([self.mb, *map(_peak_mb, set(_descendants("python")) - self._except_for)])


# ---------------------------------------------------------------- both sides, and the report


def _run_side(side: str, workload: Path, work: Path) -> dict[str, Any]:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    answer = work / "answer.json"
    command = [sys.executable, "-m", "benchmarks.night", "--side", side, str(workload), str(work), str(answer)]
    subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _report(rounds: list[dict[str, Any]], expected: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    sides: dict[str, Any] = {}
    for side in SIDES:
        of_side = [r[side] for r in rounds]
        steps = {s: statistics.median(r["seconds"][s] for r in of_side) for s in of_side[0]["seconds"]}
        total = round(statistics.median(sum(r["seconds"].values()) for r in of_side), 2)
        exact = all(r["figures"] == expected for r in of_side)
        sides[side] = {**of_side[-1], "seconds": {**steps, "total": total}, "exact": exact}
    return {
        "size": vars(size_of(given)),
        "rounds": len(rounds),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "load_before": given.load_before,
            "system": platform.system(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("lakeupsert", "pyarrow", "pyspark")},
        },
        "expected": expected,
        "sides": sides,
        "times_faster": round(sides["plain"]["seconds"]["total"] / sides["ours"]["seconds"]["total"], 1),
    }


def _markdown(report: dict[str, Any]) -> str:
    size, machine, sides = report["size"], report["machine"], report["sides"]
    rows = size["partitions"] * size["rows_per_partition"]
    steps = sides["ours"]["seconds"]
    lines = [
        "# One night: lakeupsert and the plain Spark window",
        "",
        f"`make bench`, median of {report['rounds']} rounds. {rows:,} rows in {size['partitions']} partitions; a night "
        f"of {size['batch_rows']:,} changes (and 3 % of them twice) that touches {sides['ours']['touched']}.",
        "",
        f"{machine['cores']} cores (load before: {machine['load_before']}), {machine['memory_gb']} GB, "
        f"{machine['system']}, Python {machine['python']}, "
        f"pyspark {machine['pyspark']}, pyarrow {machine['pyarrow']}, lakeupsert {machine['lakeupsert']}.",
        "",
        "| | " + " | ".join(SIDES) + " |",
        "|---" * (len(SIDES) + 1) + "|",
    ]

    def line(name: str, values: Callable[[dict[str, Any]], Any]) -> None:
        lines.append(f"| {name} | " + " | ".join(str(values(sides[s])) for s in SIDES) + " |")

    for step in steps:
        line(f"{step}, s", lambda side, step=step: side["seconds"].get(step, "-"))
    line("processor time of all processes, s", lambda side: side["cpu_seconds"])
    line("exact", lambda side: "yes" if side["exact"] else "NO")
    for kind in sides["ours"]["kilobytes_per_partition"]:
        line(f"{kind}, kB a touched partition", lambda side, kind=kind: side["kilobytes_per_partition"][kind])
    for call in sides["ours"]["requests_per_partition"]:
        line(
            f"{call}, calls a touched partition",
            lambda side, call=call: side.get("requests_per_partition", {}).get(call, "-"),
        )
    line("peak memory, MB", lambda side: ", ".join(f"{name} {mb}" for name, mb in side["peak_mb"].items()))
    cheaper = round(sides["plain"]["cpu_seconds"] / sides["ours"]["cpu_seconds"], 1)
    lines += ["", f"**{report['times_faster']} times** as fast, for {cheaper} times less processor time.", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    size_arguments(parser)
    parser.add_argument("--rounds", type=int, default=1, help="how often both sides run; the median counts")
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="where to work (default: %(default)s)")
    parser.add_argument("--side", nargs=4, metavar=("SIDE", "WORKLOAD", "WORK", "ANSWER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        side, workload, work, answer = given.side
        result = {"plain": plain, "ours": ours}[side](Path(workload), Path(work))
        Path(answer).write_text(json.dumps(result))
        return 0
    given.load_before = round(os.getloadavg()[0], 1)
    work = given.work.absolute()
    (expected,) = make(work / "workload", size_of(given))
    rounds = []
    for number in range(1, given.rounds + 1):
        rounds.append({})
        for side in SIDES:
            print(f"round {number}: {side}", file=sys.stderr, flush=True)
            rounds[-1][side] = found = _run_side(side, work / "workload", work / side)
            print(f"round {number}: {side}: {found['seconds']}", flush=True)
    report = _report(rounds, expected.figures, given)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "night.json").write_text(json.dumps(report, indent=1) + "\n")
    (RESULTS / "night.md").write_text(_markdown(report))
    print(_markdown(report))
    return 0 if all(side["exact"] for side in report["sides"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
