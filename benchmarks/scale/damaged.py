"""What one damaged file costs the other partitions of a `dedupe` on Spark: the same night with it and without, in turns.

21 partitions of 50,000 rows, each touched by as many updates, local[2], strategy rewrite; engine arrow in Spark's tasks, and
engine spark. A damaged file is cut off. Each call is compared: its partition alone fails. Medians behind a first pair.
"""

import shutil
import statistics
from pathlib import Path
from time import perf_counter

import duckdb

from benchmarks.rows import coming, day, settings
from lakeupsert import sparkenv
from lakeupsert.api import Table
from lakeupsert.engine.by_name import EngineName

PARTITIONS = 21
ROWS = 50_000
PAIRS = 4
ENGINES: tuple[EngineName, ...] = ("arrow", "spark")
SHOWN = {
    "arrow": "s, arrow in tasks",
    "arrow_damaged": "s, a file damaged",
    "arrow_times": "times",
    "spark": "s, engine spark",
    "spark_damaged": "s, a file damaged",
    "spark_times": "times",
}


def measured(home: Path) -> dict[str, float]:
    sparkenv.prepare()
    found: dict[str, float] = {}
    for engine in ENGINES:
        pairs = [[_dedupe(home / "damaged", engine, damaged) for damaged in (0, 1)] for _ in range(PAIRS)]
        whole, damaged = (statistics.median(seconds) for seconds in zip(*pairs[1:], strict=True))
        found |= {engine: round(whole, 2), f"{engine}_damaged": round(damaged, 2)}
        found[f"{engine}_times"] = round(damaged / whole, 2)
    return found


def _dedupe(lake: Path, engine: EngineName, damaged: int) -> float:
    """Seconds of a `dedupe` with so many damaged files; ends the program if other partitions than theirs fail."""
    shutil.rmtree(lake, ignore_errors=True)
    given = settings(lake, "rewrite")
    with Table("damaged", given) as table:
        for night in (0, 1):
            rows = " UNION ALL ".join(coming(number, ROWS, "i * 2", night) for number in range(PARTITIONS))
            duckdb.sql(f"COPY ({rows}) TO '{given.landing}/{night}.parquet' (FORMAT parquet)")
            table.append(host="local")
            if not night:
                table.dedupe(workers=2)
        for number in range(damaged):
            [stored] = Path(given.processed, f"d={day(number)}").glob("base-*")
            stored.write_bytes(stored.read_bytes()[:100])
        begun = perf_counter()
        results = table.dedupe(host="spark", engine=engine)
        seconds = perf_counter() - begun
    wrong = {result.partition for result in results if result.status == "failed"}
    merged = sum(result.status == "merged" for result in results)
    if (wrong, merged) != ({f"d={day(number)}" for number in range(damaged)}, PARTITIONS - damaged):
        raise SystemExit(f"{merged} partitions are merged, and {wrong} failed")
    return seconds
