"""How old a row is when readers see it first: a file lands every second, and `ingest` takes it.

Reads     nothing; makes a table of 100 dates and 100,000 rows
Writes    a temporary folder; prints a line for each size of batch
Repeat    safe: begins anew

The time of a batch begins when its file has its name in the landing zone, and ends when the snapshot that shows it is published.
Exit code 1 if a batch was never published.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from threading import Thread

from lakeupsert.api import Table
from lakeupsert.config import TableSettings
from lakeupsert.pipeline.append.commit import AppendResult
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.publish import PublishResult
from lakeupsert.pipeline.stop import Stop

SCHEMA = {"k": "string", "d": "date", "ts": "bigint", "v": "double"}
DATES = [f"2020-{1 + n // 25:02}-{1 + n % 25:02}" for n in range(100)]


class Clocked:
    """A table in ``root``, and the seconds of each batch."""

    def __init__(self, root: Path) -> None:
        self.landing = root / "landing"
        self.landing.mkdir()
        zones = {"landing": str(self.landing), "processed": str(root / "processed")}
        columns = {"key": ("k",), "partition_by": ("d",), "order_by": ("ts",), "schema": SCHEMA}
        self.table = Table("t", TableSettings(**zones, **columns, strategy="delta"))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=60)
    options = parser.parse_args()
    sizes = [(60, 3, 0.5), (1000, 20, 0.5), (1000, 20, 1.0)]
    published = [measure(rows, partitions, options.batches, seconds) for rows, partitions, seconds in sizes]
    raise SystemExit(0 if all(published) else 1)


if __name__ == "__main__":
    main()
