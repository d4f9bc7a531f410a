"""From how many landing bytes Spark is the faster host of a night: `lakeupsert run --host local` and `--host spark`, by turns.

Reads     nothing; makes CSV files of some sizes, whose rows go to 30 partitions
Writes    build/bench, and benchmarks/results/hosts.md
Repeat    safe: begins anew

Each run is a process of its own, as at night, so it includes the start of Python and of Spark. The first night of a table is
measured, and a second one, which updates half of its rows. Both tables must have equal rows in the end. Processor seconds are of
all processes of a run, also of Spark's JVM; on a machine that others use they say more than seconds.
"""

import argparse
import ctypes
import os
import resource
import shutil
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import duckdb

from benchmarks.machine import commit, facts, sentence, versions
from lakeupsert.api import Table

RESULTS = Path(__file__).parent / "results"
PARTITIONS = 30
ROW_BYTES = 75
FILES = 16
HOSTS = ("local", "spark")
PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--megabytes", type=float, nargs="+", default=[0.001, 64, 256, 1024], help="default: %(default)s"
    )
    options.add_argument("--work", type=Path, default=Path("build/bench"), help="default: %(default)s")
    given = options.parse_args()
    # Spark's JVM outlives the process that started it. Then it becomes our child, whose processor time counts.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    lines = [measured(size, given.work.absolute() / "hosts") for size in given.megabytes]
    told = [
        "# Hosts",
        "",
        f"{sentence(facts())} {', '.join(versions('lakeupsert', 'pyarrow', 'pyspark'))}, commit {commit()}, "
        f"{datetime.now(UTC):%Y-%m-%d}.",
        f"`python -m benchmarks.hosts --megabytes {' '.join(f'{size:g}' for size in given.megabytes)}`: seconds of "
        "`lakeupsert run`, first and second night.",
        "",
        "| landing MB, each night | local | spark | processor seconds, local | spark |",
        "|---:|---:|---:|---:|---:|",
        *lines,
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "hosts.md").write_text("\n".join(told))
    return 0


def measured(megabytes: float, folder: Path) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    seconds: dict[str, list[float]] = {host: [] for host in HOSTS}
    worked: dict[str, list[float]] = {host: [] for host in HOSTS}
    for host in HOSTS:
        (folder / host / "landing").mkdir(parents=True)
        (folder / host / "lakeupsert.toml").write_text(
            '[tables.t]\nlanding = "landing"\nprocessed = "processed"\nkey = ["k"]\npartition_by = ["d"]\norder_by = ["ts"]\n'
        )
    for night in (1, 2):
        landed = land(folder / "local" / "landing", megabytes, night)
        for path in landed:
            shutil.copy2(path, folder / "spark" / "landing")
        for host in HOSTS if night == 1 else reversed(HOSTS):
            before = processor_seconds()
            seconds[host].append(run(folder / host, host))
            worked[host].append(processor_seconds() - before)
    rows = {host: digest(folder / host) for host in HOSTS}
    assert rows["local"] == rows["spark"], rows
    size = sum(path.stat().st_size for path in landed) / 1e6
    shutil.rmtree(folder)
    cells = [", ".join(f"{s:.1f}" for s in of[host]) for of in (seconds, worked) for host in HOSTS]
    line = f"| {size:,.4g} | {' | '.join(cells)} |"
    print(line, flush=True)
    return line


def land(landing: Path, megabytes: float, night: int) -> list[Path]:
    rows = max(1, int(megabytes * 1e6 / ROW_BYTES))
    files = FILES if rows > FILES else 1
    each = -(-rows // files)
    step = 1 if night == 1 else 2
    for number in range(files):
        first = number * each * step
        duckdb.sql(
            f"""COPY (SELECT hash(i)::VARCHAR AS k, (DATE '2026-01-01' + (i % {PARTITIONS})::INTEGER) AS d,
                TIMESTAMP '2026-03-01' + INTERVAL {night} DAY AS ts, (hash(i, {night}) % 1000000)::INTEGER AS amount,
                substr(md5(i::VARCHAR), 1, 12) AS note FROM range({first}, {first + each * step}, {step}) r(i))
                TO '{landing}/{night}-{number:02}.csv' (FORMAT csv, HEADER)"""
        )
    return sorted(landing.glob(f"{night}-*.csv"))


def run(folder: Path, host: str) -> float:
    program = [sys.executable, "-c", "from lakeupsert.cli import main; main()", "run", "--host", host, "--json"]
    begun = perf_counter()
    subprocess.run(program, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return perf_counter() - begun


def processor_seconds() -> float:
    """Of all processes that were started here and have ended; waits for them."""
    with suppress(ChildProcessError):
        while True:
            os.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def digest(folder: Path) -> tuple[object, ...]:
    table = Table.open(folder / "lakeupsert.toml")
    rows = duckdb.from_arrow(table.to_arrow())
    found = rows.aggregate("count(*), sum(amount), bit_xor(hash(k, d, ts, amount, note))").fetchall()[0]
    table.close()
    return tuple(found)


if __name__ == "__main__":
    sys.exit(main())
