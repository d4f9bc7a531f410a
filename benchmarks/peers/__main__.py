"""Workloads against ours and the peers: each side in a process and environment of its own, each result compared.

Reads     what `make peers` got, and the workloads (benchmarks/workload.py), made below build/bench on the first run
Writes    build/bench, and WORKLOAD.md, .json and .svg in benchmarks/results
Repeat    goes on where it stopped: a result that is there is kept, until `--again`

    python -m benchmarks.peers night hot --sides plain iceberg-mor ours-rewrite

A side loads the base, then does night after night in one warm session; the first night of a process counts as its
warming up. Where a night takes under 20 s, the median of nights 2 to 4 counts, else night 2; of `hot` every night.
A process leaves to a new one what it has not begun after 200 s, and one that takes over ten minutes is stopped: that
side has failed. Exit code 1: a side failed, or one of its reads differs from DuckDB's figures.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.peers.ours import settings
from benchmarks.peers.report import write
from benchmarks.peers.run import finished, nights_done
from benchmarks.peers.sides import SIDES, Side
from benchmarks.workload import WORKLOADS, Size, Workload, make
from lakeupsert import sparkenv

BEGIN_SECONDS, LIMIT_SECONDS = 200, 600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"{', '.join(WORKLOADS)} (default: all)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, metavar="SIDE", help=f"{', '.join(SIDES)} (default: all)")
    for field in dataclasses.fields(Size):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(field.default), help="instead of the workload's own")
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="default: %(default)s")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="default: %(default)s")
    parser.add_argument("--again", action="store_true", help="forget earlier results of these sides")
    given = parser.parse_args()
    if unknown := set(given.workloads) - WORKLOADS.keys():
        parser.error(f"no such workload: {', '.join(unknown)}")
    sparkenv.prepare()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the side's processes end, too
    good = True
    for name in given.workloads or WORKLOADS:
        wanted = {f.name: value for f in dataclasses.fields(Size) if (value := getattr(given, f.name)) is not None}
        size = dataclasses.replace(WORKLOADS[name].size, **wanted)
        folder = place(given.work.absolute(), name, size)
        print(f"{name}: {folder}", file=sys.stderr, flush=True)
        workload = make(name, size, folder / "workload")
        for side in given.sides or SIDES:
            if refused := unavailable(side, workload):
                print(f"{name}: {side}: left out: {refused}", file=sys.stderr, flush=True)
                good = good and not given.sides
                continue
            results = folder / "results" / side
            if given.again:
                shutil.rmtree(results, ignore_errors=True)
            run_side(side, workload, folder, results)
        good = write(workload, folder / "results", given.results) and good
    return 0 if good else 1


def place(work: Path, name: str, size: Size) -> Path:
    """The folder for a workload of this size, and for its results."""
    return work / f"{name}-{hashlib.sha256(repr(size).encode()).hexdigest()[:8]}"


def unavailable(name: str, workload: Workload) -> str | None:
    """Why a side can't run here."""
    side = SIDES[name]
    if side.missing():
        return f"its environment is missing; {side.needs}"
    if "strategy" in side.options:
        try:
            settings(workload, Path(), str(side.options["strategy"]))
        except msgspec.ValidationError as e:
            return f"this version of lakeupsert has no such strategy: {e}"
    return None


def run_side(name: str, workload: Workload, folder: Path, results: Path) -> None:
    """One process after the other, until every night that is wanted has its result or the side has failed."""
    work = folder / f"table-{name}"
    while not finished(workload, results) and not (results / "failed.json").exists():
        if (results / "begun").exists() or not (results / "load.json").exists() or not work.exists():
            for begun in (results, work):
                shutil.rmtree(begun, ignore_errors=True)
                begun.mkdir(parents=True)
        print(f"{workload.name}: {name}: night {nights_done(results) + 1}", file=sys.stderr, flush=True)
        failure = _process(name, SIDES[name], folder / "workload", work, results)
        if failure:
            (results / "failed.json").write_text(json.dumps(failure))
            print(f"{workload.name}: {name}: {failure}; see {results / 'log'}", file=sys.stderr, flush=True)
    shutil.rmtree(work, ignore_errors=True)  # copy-on-write with all its versions takes gigabytes


def _process(name: str, side: Side, workload: Path, work: Path, results: Path) -> str | None:
    """What went wrong, if anything did. What the process says goes to the side's log."""
    python = side.python.absolute()  # not resolved: the program that it is a link to knows no environment
    jars = [path.absolute() for path in side.paths()]
    command: list[Any] = [python, "-m", "benchmarks.peers.run", name, workload, work, results, BEGIN_SECONDS, *jars]
    environment = {**os.environ, "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}
    with (results / "log").open("ab") as log:
        process = subprocess.Popen(
            list(map(str, command)), stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            code = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"not through after {LIMIT_SECONDS // 60} minutes"
        finally:  # Spark, and workers: also of a process that died, or when this one is interrupted
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"exit code {code}" if code else None


if __name__ == "__main__":
    sys.exit(main())
