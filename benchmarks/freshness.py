"""How old a row is when readers see it first: a file lands every second, and `ingest` takes it.

Reads     nothing; makes a table of 100 dates and 100,000 rows
Writes    a temporary folder; prints a line for each size of batch
Repeat    safe: begins anew

The time of a batch begins when its file has its name in the landing zone, and ends when the snapshot that shows it is published.
Exit code 1 if a batch was never published.

With --flat, a file lands as soon as readers see the one before, and each line says what a batch of that tenth cost: is batch
10,000 as cheap as batch 40? Every `UPKEEP` batches another process compacts and vacuums.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from statistics import median
from threading import Thread

from lakeupsert.api import Table
from lakeupsert.config import TableSettings
from lakeupsert.pipeline.append.commit import AppendResult
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.publish import PublishResult
from lakeupsert.pipeline.stop import Stop

SCHEMA = {"k": "string", "d": "date", "ts": "bigint", "v": "double"}
UPKEEP = 200
"""Batches between two compactions. Fewer: the lines tell more of these than of batches."""
DATES = [f"2020-{1 + n // 25:02}-{1 + n % 25:02}" for n in range(100)]


class Clocked:
    """A table in ``root``, and the seconds of each batch."""

    def __init__(self, root: Path) -> None:
        self.landing = root / "landing"
        self.landing.mkdir()
        zones = {"landing": str(self.landing), "processed": str(root / "processed")}
        columns = {"key": ("k",), "partition_by": ("d",), "order_by": ("ts",), "schema": SCHEMA}
        self.settings = TableSettings(**zones, **columns, strategy="delta")
        self.table = Table("t", self.settings)
        self.chance = random.Random(1)
        self.landed: dict[str, float] = {}
        self.batches: dict[str, int] = {}
        self.seconds: list[float] = []

    def land(self, number: int, rows: int, dates: list[str]) -> None:
        records = (
            {
                "k": f"k{self.chance.randrange(100_000)}",
                "d": dates[n % len(dates)],
                "ts": number,
                "v": self.chance.random(),
            }
            for n in range(rows)
        )
        unfinished = self.landing / f".{number}.jsonl"
        unfinished.write_text("".join(json.dumps(record) + "\n" for record in records))
        self.landed[f"{number}.jsonl"] = time.perf_counter()
        unfinished.rename(self.landing / f"{number}.jsonl")

    def took(self, result: AppendResult | PartitionResult | PublishResult) -> None:
        match result:
            case AppendResult(number=number, entry=entry):
                self.batches |= {file.path: number for file in entry.files}
            case PublishResult(batch=batch):
                shown = [path for path in self.landed if self.batches.get(path, batch + 1) <= batch]
                self.seconds += [time.perf_counter() - self.landed.pop(path) for path in shown]


def measure(rows: int, partitions: int, batches: int, seconds: float) -> bool:
    """Print the line of one size. Returns whether all batches were published."""
    with tempfile.TemporaryDirectory() as root:
        clocked, stop = Clocked(Path(root)), Stop()
        clocked.land(0, len(DATES) * 1000, DATES)

        def feed() -> None:
            while not clocked.seconds:
                time.sleep(0.1)
            clocked.seconds.clear()
            for number in range(1, batches + 1):
                clocked.land(number, rows, clocked.chance.sample(DATES, partitions))
                time.sleep(1)
            deadline = time.perf_counter() + 30
            while clocked.landed and time.perf_counter() < deadline:
                time.sleep(0.1)
            stop.set()

        feeding = Thread(target=feed)
        feeding.start()
        clocked.table.ingest(seconds=seconds, stop=stop, collect=clocked.took)
        feeding.join()
        found = sorted(clocked.seconds)
    print(
        f"{rows:,} rows in {partitions} partitions each second, a look each {seconds:g} s: "
        f"median {found[len(found) // 2]:.2f} s, p95 {found[len(found) * 95 // 100]:.2f} s, longest {found[-1]:.2f} s"
    )
    return len(found) == batches


def measure_flat(rows: int, partitions: int, batches: int) -> bool:
    """Print a line for each tenth of the batches. Returns whether all were published."""
    with tempfile.TemporaryDirectory() as root:
        clocked, stop = Clocked(Path(root)), Stop()
        costs: list[tuple[int, float]] = []
        before, begun, number = Counter[str](), 0.0, 0

        def took(result: AppendResult | PartitionResult | PublishResult) -> None:
            nonlocal before, begun, number
            clocked.took(result)
            if clocked.landed or stop.is_set():
                return
            if number:  # batch 0 has all partitions
                costs.append(((Counter(clocked.table.requests) - before).total(), time.process_time() - begun))
            if number and number % (batches // 10) == 0:
                print(
                    f"{rows:,} rows in {partitions} partitions, up to batch {number:,}: {_cost(costs)}, {_held(root)}"
                )
                costs.clear()
            if number and number % UPKEEP == 0:
                with closing(
                    Table("t", clocked.settings)
                ) as other:  # as another process, which would keep nothing here
                    other.compact()
                    other.vacuum(dry=False)
            if number == batches:
                stop.set()
                return
            number += 1
            before, begun = Counter(clocked.table.requests), time.process_time()
            clocked.land(number, rows, clocked.chance.sample(DATES, partitions))

        clocked.land(0, len(DATES) * 1000, DATES)
        clocked.table.ingest(seconds=0.001, stop=stop, collect=took)
    return number == batches


def _cost(costs: list[tuple[int, float]]) -> str:
    requests, seconds = zip(*costs, strict=True)
    mean = sum(requests) / len(requests)
    return f"requests {median(requests):g} (mean {mean:.1f}, most {max(requests)}), processor {median(seconds):.3f} s"


def _held(root: str) -> str:
    """What this process and its table have by now."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files = [entry.stat() for entry in Path(root, "processed").rglob("*") if entry.is_file()]
    stored = f"{len(files):,} objects of {sum(one.st_size for one in files) / 1e6:.0f} MB"
    return f"{resident >> 20} MiB, {sum(1 for _ in Path('/proc/self/fd').iterdir())} descriptors, {stored}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--flat", action="store_true")
    options = parser.parse_args()
    if options.flat:
        flat = [measure_flat(*size, options.batches) for size in ((60, 3), (1000, 20))]
        raise SystemExit(0 if all(flat) else 1)
    sizes = [(60, 3, 0.5), (1000, 20, 0.5), (1000, 20, 1.0)]
    published = [measure(rows, partitions, options.batches, seconds) for rows, partitions, seconds in sizes]
    raise SystemExit(0 if all(published) else 1)


if __name__ == "__main__":
    main()
