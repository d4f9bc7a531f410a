"""What the first merge of an adopted partition takes, which cuts its files and leaves one row per key in each bucket.

Two partitions, with a `bucket` of an eighth to a sixteenth of a partition: so one that is split as a large one is, in the size
that fits a benchmark. `compact` merges them, one worker in this process. The result is compared with DuckDB's count and sums.
"""

import shutil
from pathlib import Path
from time import perf_counter, process_time

import duckdb

from benchmarks.rows import settings
from benchmarks.scale.rows import CHECKED, base_of, io_bytes
from lakeupsert.api import Table

PARTITIONS = 2
PARTS = 16
SHOWN = {
    "seconds": "s",
    "processor": "processor, s",
    "mb_adopted": "MB adopted",
    "mb_read": "MB read",
    "mb_written": "MB written",
    "mb_stored": "MB stored then",
    "buckets": "buckets of a partition",
    "requests": "requests",
}


def measured(home: Path, millions: int) -> dict[str, float]:
    """Ends the program where a row is not exact."""
    lake = home / "adopted"
    shutil.rmtree(lake, ignore_errors=True)
    base = base_of(home, f"adopted-{millions}", millions * 1_000_000 // PARTITIONS, PARTITIONS)
    shutil.copytree(base, lake / "table")
    size = sum(path.stat().st_size for path in base.rglob("*.parquet"))
    table = Table("scale", settings(lake, "auto", bucket=f"{size // PARTITIONS // PARTS // 1024}KiB"))
    table.adopt()
    requests = sum(table.requests.values())
    read, written = io_bytes()
    begun, worked = perf_counter(), process_time()
    table.compact(full=True)
    took, processor = perf_counter() - begun, process_time() - worked
    now_read, now_written = io_bytes()
    requests = sum(table.requests.values()) - requests
    with duckdb.connect() as db:
        reader = table.to_arrow()
        found = db.register("reader", reader).execute(f"SELECT {CHECKED} FROM reader").fetchall()
        if found != db.execute(f"SELECT {CHECKED} FROM read_parquet('{base}/*/*')").fetchall():
            raise SystemExit(f"not exact: {millions} million adopted rows")
    [newest, *_] = table.snapshots()
    stored = newest.body.partitions.values()
    table.close()
    return {
        "seconds": round(took, 3),
        "processor": round(processor, 3),
        "mb_adopted": round(size / 1e6, 3),
        "mb_read": round((now_read - read) / 1e6, 3),
        "mb_written": round((now_written - written) / 1e6, 3),
        "mb_stored": round(sum(p.bytes for p in stored) / 1e6, 3),
        "buckets": 2 ** max(p.bits for p in stored),
        "requests": requests,
    }
