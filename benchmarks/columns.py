"""What it costs that records bring some of the columns only, or that a history is kept: the same nights in tables of each kind.

Reads     nothing; DuckDB makes every row from its number
Writes    build/columns, and benchmarks/results/columns.json and columns.md
Repeat    safe: it begins with new tables

    make bench-columns                                # or with COLUMNS_ARGS="--partitions 24 --rows 400000"

Partitions of so many rows get some rows every night, anywhere among their keys, three of four updates. Side `rows`
is a table of whole rows, `whole` one in mode columns whose records bring all columns, and `part` gets three of the nine columns
beside key and order. Side `history` is `rows` with a history. The sides take turns, night by night; a night is append, dedupe
and publish by one process. What counts is its processor time, which other work on the machine changes little. The medians leave
the first night out. The last night is compared with DuckDB.
Exit code 1: a row differs.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb

from benchmarks.machine import commit, facts, sentence, versions
from benchmarks.rows import COLUMNS, coming, day, settings, stored
from lakeupsert.api import Table

WORK = Path("build/columns")
RESULTS = Path(__file__).parent / "results"
PART = ("k", "ts", "d", "amount", "note", "c3")
SIDES: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({}, "*"),
    "history": ({"history": True}, "*"),
    "whole": ({"mode": "columns"}, "*"),
    "part": ({"mode": "columns"}, ", ".join(PART)),
}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--partitions", type=int, default=24)
    options.add_argument("--rows", type=int, default=200_000)
    options.add_argument("--nights", type=int, default=6)
    options.add_argument("--changed", type=int, help="rows of a partition that come a night; default: two per cent")
    options.add_argument("--strategies", nargs="+", choices=["rewrite", "delta"], default=["rewrite", "delta"])
    options.add_argument(
        "--sides", nargs="+", choices=list(SIDES), default=list(SIDES), help="the first is the measure"
    )
    given = options.parse_args()
    changed = given.changed or given.rows // 50
    shutil.rmtree(WORK, ignore_errors=True)
    results: dict[str, Any] = {"partitions": given.partitions, "rows": given.rows, "changed": changed}
    lines = [
        "| strategy | side | append | dedupe | publish | night | ratio, dedupe | ratio, night | MB written |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    different = 0
    for strategy in given.strategies:
        nights, wrong = _nights(strategy, given.sides, given.partitions, given.rows, changed, given.nights)
        different += wrong
        results[strategy] = nights
        medians = {
            side: {step: statistics.median(n[step] for n in found[1:]) for step in found[0]}
            for side, found in nights.items()
        }
        for side, median in medians.items():
            of_first = medians[given.sides[0]]
            ratios = " | ".join(f"{median[step] / of_first[step]:.2f}" for step in ("dedupe", "night"))
            steps = " | ".join(f"{median[step]:.2f}" for step in ("append", "dedupe", "publish", "night"))
            lines.append(f"| {strategy} | {side} | {steps} | {ratios} | {median['written']:.1f} |")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "columns.json").write_text(json.dumps(results, indent=1))
    ran_on = (
        f"{sentence(facts())} {', '.join(versions('lakeupsert', 'pyarrow'))}, {commit()}, {datetime.now(UTC):%Y-%m-%d}."
    )
    size = f"{given.partitions} partitions of {given.rows:,} rows, {changed:,} come a night. {different} rows differ."
    text = "\n".join(["# Records that bring some of the columns, and a history", "", ran_on, size, "", *lines, ""])
    (RESULTS / "columns.md").write_text(text)
    print(text)
    return 1 if different else 0


def _nights(
    strategy: str, sides: list[str], partitions: int, rows: int, changed: int, nights: int
) -> tuple[dict[str, list[dict[str, float]]], int]:
    """Of each side the processor seconds of each step of each night, and MB that dedupe wrote; and how many rows are wrong."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with duckdb.connect(config={"threads": 2}) as db:
        base = " UNION ALL ".join(f"SELECT DATE '{day(p)}' AS d, * FROM ({stored(p, rows)})" for p in range(partitions))
        db.execute(f"CREATE TABLE came AS SELECT 0 AS night, * FROM ({base})")
        tables = {}
        for side in sides:
            given = settings(WORK / strategy / side, strategy, **SIDES[side][0])
            db.execute(f"COPY (SELECT * EXCLUDE (night) FROM came) TO '{given.landing}/0.parquet' (FORMAT parquet)")
            tables[side] = Table("t", given)
            tables[side].run(host="local")
        for night in range(1, nights + 1):
            key = f"(hash(i, {night}) % {rows})::BIGINT * 2 + (i % 4 = 0)::INTEGER"
            query = " UNION ALL ".join(coming(p, changed, key, night) for p in range(partitions))
            db.execute(f"INSERT INTO came SELECT {night}, * FROM ({query})")
            for side in sides:
                columns, landing = SIDES[side][1], WORK / strategy / side / "landing"
                db.execute(f"COPY (SELECT {columns} FROM ({query})) TO '{landing}/{night}.parquet' (FORMAT parquet)")
                found[side].append(_night(tables[side]))
        return found, sum(_different(db, side, table) for side, table in tables.items())


def _night(table: Table) -> dict[str, float]:
    begun = time.process_time()
    table.append(host="local")
    appended = time.process_time()
    written = sum(result.bytes_written for result in table.dedupe())
    merged = time.process_time()
    table.publish()
    done = time.process_time()
    return {
        "append": appended - begun,
        "dedupe": merged - appended,
        "publish": done - merged,
        "night": done - begun,
        "written": written / 1e6,
    }


def _different(db: Any, side: str, table: Table) -> int:
    brings = {name: "true" if side != "part" or name in PART else "night = 0" for name in COLUMNS if name != "k"}
    values = ", ".join(f"max_by({name}, night) FILTER ({of_it}) AS {name}" for name, of_it in brings.items())
    db.register("published", table.to_arrow())
    columns = ", ".join(["d", *COLUMNS])
    query = f"SELECT d, k, {values} FROM came GROUP BY d, k"
    [(different,)] = db.execute(
        f"""WITH e AS (SELECT {columns} FROM ({query})), p AS MATERIALIZED (SELECT {columns} FROM published)
        SELECT (SELECT count(*) FROM (FROM e EXCEPT ALL FROM p)) + (SELECT count(*) FROM (FROM p EXCEPT ALL FROM e))"""
    ).fetchall()
    return int(different)


if __name__ == "__main__":
    sys.exit(main())
