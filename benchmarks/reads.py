"""What deltas cost a reader in Spark: the same rows read in turns, with deltas and vectors, and as plain Parquet.

Reads     what `make readers` got; makes the workload `large` (benchmarks/workload.py)
Writes    build/bench, and benchmarks/results/reads.md
Repeat    safe: begins anew

Two tables get the same nights, one by strategy `auto`, which leaves deltas and compacts by itself, one by `rewrite`. After the
first night and the last one session reads them in turns: ours through `to_spark`, planning included, and as a Delta table; the
other's files by `spark.read.parquet`. Neighbours of the machine slow down all. Every figure has to equal
DuckDB's; otherwise exit code 1.
"""

import argparse
import dataclasses
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import msgspec

from benchmarks.machine import commit, facts, sentence, versions
from benchmarks.peers.ours import settings
from benchmarks.peers.spark import session
from benchmarks.workload import WORKLOADS, Workload, make
from lakeupsert import sparkenv
from lakeupsert.api import Table

JARS = Path("build/readers/jars")
DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
RESULTS = Path(__file__).parent / "results"
ROUNDS = 9
WARMING = 3
"""Of these rounds, so many do not count: the JVM compiles."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--nights", type=int, default=10)
    options.add_argument("--work", type=Path, default=Path("build/bench"), help="default: %(default)s")
    given = options.parse_args()
    sparkenv.prepare()
    RESULTS.mkdir(exist_ok=True)
    folder = given.work.absolute() / "reads"
    size = dataclasses.replace(WORKLOADS["large"].size, nights=given.nights)
    workload = make("large", size, folder / "workload")
    tables = {}
    for strategy in ("auto", "rewrite"):
        shutil.rmtree(folder / strategy, ignore_errors=True)
        (folder / strategy / "landing").mkdir(parents=True)
        tables[strategy] = Table("t", settings(workload, folder / strategy, strategy))
    tables["auto"] = Table("t", msgspec.structs.replace(tables["auto"].settings, publishers=("delta",)))
    spark = session(folder, sorted(path.absolute() for path in JARS.glob("*.jar")), DELTA)
    lines, good = [], True
    for number, file in enumerate(["base.parquet", *(night.file for night in workload.nights)]):
        for strategy, table in tables.items():
            shutil.copy(folder / "workload" / file, folder / strategy / "landing")
            table.run(host="local", workers=2)
        if number in (1, given.nights):
            found, same = read(spark, workload, tables, number)
            lines += found
            good = good and same
            print(*found, sep="\n", flush=True)
    head = [
        "nights",
        "read",
        "plain, s",
        "`to_spark`, s",
        "times",
        "Delta, s",
        "times",
        "delta files",
        "superseded rows",
    ]
    told = [
        "# Reads after deltas",
        "",
        f"{sentence(facts())} {', '.join(versions('lakeupsert', 'pyspark', 'pyarrow'))},",
        f"commit {commit()}, {datetime.now(UTC):%Y-%m-%d}. `python -m benchmarks.reads`: medians of {ROUNDS - WARMING}.",
        "",
        f"| {' | '.join(head)} |",
        "|---:|---|" + "---:|" * (len(head) - 2),
        *lines,
        "",
    ]
    (RESULTS / "reads.md").write_text("\n".join(told))
    shutil.rmtree(folder)
    return 0 if good else 1


def read(spark: Any, workload: Workload, tables: dict[str, Table], number: int) -> tuple[list[str], bool]:
    """A line for the full and the filtered read; whether each saw what it had to."""
    lines, good, night = [], True, workload.nights[number - 1]
    root = tables["rewrite"].settings.processed
    plain = [f"{root}/{file.file.name}" for file in tables["rewrite"].files()]
    shown = [file.file for file in tables["auto"].files()]
    deltas = sum("/delta-" in file.name for file in shown)
    dead = sum(file.rows - file.live for file in shown)
    for name, where, expected in (("full", "true", night.full), ("filtered", workload.filter, night.filtered)):

        def ours(where: str = where) -> Any:
            table = Table("t", tables["auto"].settings)  # a new process would know nothing either
            return table.to_spark(spark, where=None if where == "true" else where)

        def theirs(where: str = where) -> Any:
            return spark.read.option("basePath", root).parquet(*plain).where(where)

        def by_delta(where: str = where) -> Any:
            return spark.read.format("delta").load(tables["auto"].settings.processed).where(where)

        seconds: dict[Callable[[], Any], list[float]] = {theirs: [], ours: [], by_delta: []}
        for _ in range(ROUNDS):
            for side, taken in seconds.items():
                begun = perf_counter()
                seen = side().selectExpr(*workload.figures.values()).collect()[0]
                taken.append(perf_counter() - begun)
                good = good and workload.comparable(seen) == expected
        plain_seconds, *others = (median(taken[WARMING:]) for taken in seconds.values())
        figures = " | ".join([f"{plain_seconds:.2f}", *(f"{s:.2f} | {s / plain_seconds:.2f}" for s in others)])
        lines.append(f"| {number} | {name} | {figures} | {deltas} | {dead:,} |")
    return lines, good


if __name__ == "__main__":
    raise SystemExit(main())
