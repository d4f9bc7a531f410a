"""The process of one side: load the base, then one night after the other, each applied, read and compared.

Reads     the workload's files
Writes    RESULTS/load.json and RESULTS/night-1.json, ...; the side's table below WORK
Repeat    goes on after the last night that has a result; the table of a night that broke off is in no known state,
          so `begun` stays there, and whoever started this begins anew

    python -m benchmarks.peers.run SIDE WORKLOAD WORK RESULTS SECONDS [JAR...]

After so many seconds it leaves what is left to another process, but not after one night: that one warmed it up.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from benchmarks.machine import commit, versions
from benchmarks.peers.processes import PeakMemory, cpu_seconds
from benchmarks.peers.sides import SIDES
from benchmarks.workload import Night, Workload

REPEATED_SECONDS = 20.0
"""A night that takes as long is measured once; of shorter ones the nights after are samples, too."""


class Table(Protocol):
    """What a side does. Its table is below ``work / "table"``."""

    def load(self, base: Path) -> None: ...

    def land(self, night: Path) -> None:
        """Make a night's file known, before the clock runs."""

    def apply(self) -> dict[str, float]:
        """Upsert what landed; the seconds of each step."""

    def reads(self) -> Mapping[str, Callable[[str], Any]]:
        """By engine: the values of the workload's figures for the rows of a filter."""

    def bytes_counted(self) -> int:
        """What this process wrote, files that are gone again included; 0 where a night deletes none, or nobody counts."""

    def requests(self) -> dict[str, int]:
        """Calls to the table's store, as far as the side counts them."""


def main() -> None:
    name, *places, seconds = sys.argv[1:6]
    folder, work, results = map(Path, places)
    side, workload = SIDES[name], Workload.open(folder)
    module, _, class_ = side.program.partition(":")
    opened = import_module(f"benchmarks.peers.{module}")
    begun = perf_counter()
    jars = list(map(Path, sys.argv[6:]))
    table: Table = getattr(opened, class_)(workload, work, jars, **side.options)
    if not (results / "load.json").exists():
        facts = {
            "date": datetime.now(UTC).isoformat(timespec="minutes"),
            "load_before": round(os.getloadavg()[0], 1),
            "commit": commit(),
            "versions": versions(*side.versions) + [jar.stem for jar in jars],
        }
        table.load(folder / "base.parquet")
        _save(results / "load.json", facts)
    done = 0
    while (number := nights_done(results)) < len(workload.nights):
        if finished(workload, results) or (done != 1 and perf_counter() - begun > float(seconds)):
            return
        night = workload.nights[number]
        (results / "begun").touch()
        table.land(folder / night.file)
        result = _measure(table, workload, night, work / "table")
        _save(results / f"night-{number + 1}.json", {**result, "warm": done > 0})
        (results / "begun").unlink()
        done += 1


def nights_done(results: Path) -> int:
    return len(list(results.glob("night-*.json")))


def finished(workload: Workload, results: Path) -> bool:
    """Whether no further night is wanted."""
    done = nights_done(results)
    if done == len(workload.nights):
        return True
    if done == 0 or workload.every_night:
        return False
    last = json.loads((results / f"night-{done}.json").read_text())
    return bool(last["warm"]) and sum(last["seconds"].values()) >= REPEATED_SECONDS


def _measure(table: Table, workload: Workload, night: Night, folder: Path) -> dict[str, Any]:
    counted, requests, cpu, before = table.bytes_counted(), table.requests(), cpu_seconds(), _sizes(folder)
    with PeakMemory() as peak:
        seconds = table.apply()
    cpu = cpu_seconds() - cpu - peak.cpu_seconds
    sizes, after = _sizes(folder), table.requests()
    result: dict[str, Any] = {
        "seconds": seconds,
        "cpu_seconds": round(cpu, 2),
        "peak_mb": peak.mb,
        "peak_jvm_mb": peak.jvm_mb,
        "bytes_written": max(table.bytes_counted() - counted, sum(sizes) - sum(before)),
        "files": len(sizes),
        "requests": {call: n - requests.get(call, 0) for call, n in after.items()},
        "read_seconds": {},
        "wrong": {},
    }
    for kind, where, expected in (("full", "true", night.full), ("filtered", workload.filter, night.filtered)):
        for engine, read in table.reads().items():
            begun = perf_counter()
            figures = read(where)
            result["read_seconds"][f"{kind} in {engine}"] = round(perf_counter() - begun, 2)
            found = workload.comparable(figures)
            wrong = {name: [found[name], value] for name, value in expected.items() if found[name] != value}
            if wrong:
                result["wrong"][f"{kind} in {engine}"] = wrong
    return result


def _sizes(folder: Path) -> list[int]:
    """Bytes of every file of the table; Hadoop's checksums and the queue of ours are no part of it."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".crc")
    return [path.stat().st_size for path in files if not path.name.startswith("queue.sqlite")]


def _save(path: Path, result: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1))
    part.rename(path)


if __name__ == "__main__":
    main()
