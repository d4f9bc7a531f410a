"""A stream of small batches, hour after hour: what lands every few seconds is merged and read, by ours and by Spark's MERGE.

Reads     the feed (benchmarks/stream/feed.py), made below build/bench on the first run; the jars that `make peers` got; for
          `captured` and `flink-cdc`, what `make capture` got, and PostgreSQL 15
Writes    build/bench/stream, and NAME.md, .json and, by side, .svg in benchmarks/results
Repeat    begins anew

    python -m benchmarks.stream --sides ours delta-dv iceberg-mor ours --minutes 10 --parts 2
    python -m benchmarks.stream --name hour --every 6 --minutes 60 --parts 10
    python -m benchmarks.stream --name curve --sides ours captured --every 1 --look 0.5 --minutes 1 --rates 1000 2000 4000 8000

One side after the other takes the same files at the same pace, in processes of its own. After each part, the feed waits until
readers see all of it, then it is read, and then the next part begins. At the end, each row is compared with DuckDB's.
Exit code 1: a side died, was not through in time, or has other rows.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import facts
from benchmarks.peers.processes import descriptors, memory_mb
from benchmarks.peers.sides import SIDES
from benchmarks.stream.feed import Feed
from benchmarks.stream.process import Side, started
from benchmarks.stream.report import write
from benchmarks.stream.sides import OF_DATABASE, Options
from lakeupsert import sparkenv

WORK, RESULTS = Path("build/bench/stream"), Path("benchmarks/results")
LATE_SECONDS = 600
"""A side that needs longer than this behind a part is not through."""


def measure(name: str, feed: Feed, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The parts of one side. Raises RuntimeError if it did not come to its end."""
    bucket = "lake" if given.s3 else ""
    options = Options(look=given.look, trigger=given.every, vacuum=given.vacuum, bucket=bucket)
    work = (WORK / name).absolute()
    with started(name, feed, folder, work, options) as side:
        ready = side.ask()
        land(side, folder, feed.names[: given.warm], given.every, wait=given.wait)
        first, each, parts = side.ask("read"), (feed.files - given.warm) // given.parts, []
        for begin in range(given.warm, feed.files, each):
            parts.append(measure_part(side, folder, feed.names[begin : begin + each], given))
            print(f"{name}: {json.dumps(parts[-1])}", file=sys.stderr, flush=True)
        different = side.different(feed, folder)
    shutil.rmtree(work)
    began = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "load": round(os.getloadavg()[0], 1)}
    return {**ready, **began, "rows": feed.rows, "first_read": first, "parts": parts, "different": different}


def measure_part(side: Side, folder: Path, names: Sequence[str], given: argparse.Namespace) -> dict[str, Any]:
    before, begun = side.figures(), time.monotonic()
    most = land(side, folder, names, given.every, wait=given.wait)
    seconds, after = time.monotonic() - begun, side.figures()
    objects, mb = side.objects()
    return {
        **{what: round(after[what] - before[what], 2) for what in after},
        **most,
        **_lags(side, side.names(names)),
        "files": len(names),
        "seconds": round(seconds, 1),
        "objects": objects,
        "mb": round(mb, 1),
        "reads": side.ask("read"),
    }


def land(side: Side, folder: Path, names: Sequence[str], every: float, *, wait: bool) -> dict[str, int]:
    """Land the files at their pace, and wait until readers see all; the most memory and descriptors that the side held.

    ``wait``: until readers see the file before, too.
    """
    begun, most = time.monotonic(), {"memory_mb": 0, "descriptors": 0}
    for number, name in enumerate(names):
        while (left := begun + number * every - time.monotonic()) > 0:
            time.sleep(min(left, 1))
        if wait and number:
            side.wait_for(side.names(names[number - 1 : number]), LATE_SECONDS)
        side.land(folder, name)
        side.look()
        now = {"memory_mb": memory_mb(side.process.pid)[0], "descriptors": descriptors(side.process.pid)}
        most = {what: max(value, now[what]) for what, value in most.items()}
    side.wait_for(side.names(names), LATE_SECONDS)
    return most


def _lags(side: Side, names: Sequence[str]) -> dict[str, float]:
    """Seconds from a file's name to what readers see: median, 95 of 100, the longest."""
    found = {}
    for what, seen in (("published", side.shown), ("latest", side.latest)):
        if lags := sorted(seen[name] - side.landed[name] for name in names if name in seen):
            ranks = {"p50": len(lags) // 2, "p95": len(lags) * 95 // 100, "longest": len(lags) - 1}
            found |= {f"{what}_{rank}": round(lags[at], 2) for rank, at in ranks.items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = ["ours", *OF_DATABASE, *(name for name, side in SIDES.items() if side.program.startswith("spark:"))]
    parser.add_argument("--name", default="stream", help="of the results (default: %(default)s)")
    parser.add_argument(
        "--sides", nargs="+", choices=choices, default=["ours"], metavar="SIDE", help=", ".join(choices)
    )
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--parts", type=int, default=1, help="reads, and figures of their own, in so many equal parts")
    parser.add_argument("--warm", type=int, default=3, help="files before the first part (default: %(default)s)")
    parser.add_argument("--every", type=float, default=5, help="seconds between two files, and of Spark's trigger")
    wait = "land a file no sooner than readers see the one before, so that each batch is one file, also on busy cores"
    parser.add_argument("--wait", action="store_true", help=wait)
    parser.add_argument("--look", type=float, default=1, help="seconds between two looks of `ingest`")
    parser.add_argument("--vacuum", type=float, default=300, help="seconds between two vacuums of `maintain`")
    parser.add_argument("--rates", type=int, nargs="+", default=[1000], help="rows a second, one run after the other")
    parser.add_argument("--partitions", type=int, default=100)
    parser.add_argument("--touched", type=int, default=20, help="partitions of a file")
    parser.add_argument("--base-rows", type=int, default=10_000, help="of a partition")
    parser.add_argument("--s3", action="store_true", help="tables in a bucket of versitygw, which counts all requests")
    given = parser.parse_args()
    sparkenv.prepare()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the side's processes end, too
    files = given.warm + int(given.minutes * 60 / given.every) // given.parts * given.parts
    found: list[dict[str, Any]] = []
    for rate in given.rates:
        feed = Feed(files, int(rate * given.every), given.partitions, given.touched, given.base_rows)
        folder = feed.make(WORK.absolute())
        for name in given.sides:
            print(f"{name}: {rate} rows a second, {files} files", file=sys.stderr, flush=True)
            try:
                result = measure(name, feed, folder, given)
            except RuntimeError as e:
                result = {"failed": str(e)}
            found.append({"side": name, "rate": rate, **result})
    report = {"options": vars(given), "machine": facts(), "runs": found}
    write(given.name, report, RESULTS)
    return 0 if all(run.get("different") == 0 for run in found) else 1


if __name__ == "__main__":
    sys.exit(main())
