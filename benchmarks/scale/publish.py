"""What a publish takes of a night that touches 545 partitions, with strategy delta, without and with a publisher of Delta's log.

The first night writes 40 rows a partition, and four nights behind it 4 updates each. Medians of these, in one process; files
are on a local disk, so requests say more than seconds.
"""

import shutil
import statistics
from pathlib import Path
from time import perf_counter

import duckdb

from benchmarks.rows import coming, settings
from lakeupsert.api import Table
from lakeupsert.config import PublisherName

PARTITIONS = 545
NIGHTS = 5
SHOWN = {
    "night": "s night",
    "publish": "s publish",
    "share": "% of the night",
    "create": "its creates",
    "get": "gets",
    "list": "lists",
}


def measured(home: Path, publishers: tuple[PublisherName, ...]) -> dict[str, float]:
    """Medians of the nights behind the first."""
    lake = home / "publish"
    shutil.rmtree(lake, ignore_errors=True)
    given = settings(lake, "delta", publishers=publishers)
    nights = []
    for night in range(NIGHTS):
        each = 4 if night else 40
        rows = " UNION ALL ".join(coming(number, each, "i * 2", night) for number in range(PARTITIONS))
        duckdb.sql(f"COPY ({rows}) TO '{given.landing}/{night}.parquet' (FORMAT parquet)")
        with Table("publish", given) as table:
            nights.append(_timed(table))
    return {name: round(statistics.median(n[name] for n in nights[1:]), 3) for name in SHOWN}


def _timed(table: Table) -> dict[str, float]:
    begun = perf_counter()
    table.append(host="local")
    table.dedupe()
    merged, before = perf_counter(), table.requests
    table.publish()
    ended = perf_counter()
    share = 100 * (ended - merged) / (ended - begun)
    asked = {call: count - before[call] for call, count in table.requests.items()}
    return {"night": ended - begun, "publish": ended - merged, "share": share, **asked}
