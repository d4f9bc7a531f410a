"""What a night costs as the table grows: the same 60,000 rows come to 1, 5, 20, 50 million that are stored.

Reads     nothing; DuckDB makes every row from its number
Writes    build/scale, and benchmarks/results/scale.json and scale.md, a line for each measurement
Repeat    safe: measurements that are in scale.json already are kept (--again makes them anew)

    make bench-scale                                    # or with SCALE_ARGS="--millions 1 5 --strategy rewrite"

The table has 20 partitions, a text key of 16 characters and 10 other columns, and is adopted and compacted untimed. Of what a
night brings half is updates and half is new. *clustered*: the keys of a night lie close together, as order numbers of recent
days do; *scattered*: anywhere. A night is append (host local), dedupe (one worker, in this process) and publish; bytes are
what the process asked the kernel to read and write (`/proc/self/io`), so reads that a page cache answers count. Medians of
three nights after a first. Each night is compared with DuckDB's count and sums.
"""

import argparse
import json
import platform
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb

from lakeupsert.api import Table
from lakeupsert.config import TableSettings

PARTITIONS = 20
NIGHT_ROWS = 60_000
NIGHTS = 4
HOME = Path("build/scale")
RESULTS = Path(__file__).parent / "results"
HEAD = "| million rows, strategy, keys | s | s append | s dedupe | MB read | MB written |"
FIGURES = "count(*), sum(amount), sum(quantity)"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--millions", type=int, nargs="+", default=[1, 5, 20, 50])
    options.add_argument("--strategy", nargs="+", default=["delta", "rewrite"])
    options.add_argument("--again", action="store_true")
    given = options.parse_args()
    RESULTS.mkdir(exist_ok=True)
    kept = RESULTS / "scale.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() and not given.again else {}
    for millions in given.millions:
        for strategy in given.strategy:
            for keys in ("clustered", "scattered"):
                name = f"{millions} {strategy} {keys}"
                if name not in found:
                    found[name] = measured(millions, strategy, keys)
                    kept.write_text(json.dumps(found, indent=1))
                print(_line(name, found[name]), flush=True)
    lines = [f"{_machine()}\n", HEAD, re.sub("[^|]+", "---", HEAD), *(_line(*item) for item in found.items())]
    (RESULTS / "scale.md").write_text("\n".join(lines) + "\n")
    shutil.rmtree(HOME)
    return 0


def measured(millions: int, strategy: str, keys: str) -> dict[str, float]:
    """Medians of the nights; ends the program where a night is not exact."""
    lake = HOME / "lake"
    shutil.rmtree(lake, ignore_errors=True)
    (lake / "landing").mkdir(parents=True)
    settings = TableSettings(
        landing=str(lake / "landing"),
        processed=str(lake / "table"),
        key=("k",),
        partition_by=("d",),
        order_by=("ts",),
        strategy=strategy,  # type: ignore[arg-type]
    )
    stored = millions * 1_000_000 // PARTITIONS
    shutil.copytree(_base(millions, stored), lake / "table")
    table = Table("scale", settings)
    table.adopt()
    table.compact(full=True)
    nights = []
    with duckdb.connect() as db:
        db.execute(
            f"CREATE TABLE seen AS SELECT d, k, amount, quantity, ts FROM read_parquet('{_base(millions, stored)}/*/*')"
        )
        for night in range(1, NIGHTS + 1):
            landed = lake / "landing" / f"{night}.parquet"
            db.execute(f"COPY ({_rows_of_night(night, stored, keys)}) TO '{landed}' (FORMAT parquet, COMPRESSION zstd)")
            table = Table("scale", settings)
            nights.append(dict(_timed(table)))
            db.execute(f"""CREATE OR REPLACE TABLE came AS SELECT d, k, amount, quantity, ts FROM '{landed}';
                DELETE FROM seen USING came WHERE seen.d = came.d AND seen.k = came.k; INSERT INTO seen FROM came""")
            expected = db.execute(f"SELECT {FIGURES} FROM seen").fetchall()
            reader = table.to_arrow()
            if db.register("reader", reader).execute(f"SELECT {FIGURES} FROM reader").fetchall() != expected:
                raise SystemExit(f"not exact: {millions} million rows, {strategy}, {keys}, night {night}")
            table.close()
    return {name: round(statistics.median(n[name] for n in nights[1:]), 3) for name in nights[0]}


def _base(millions: int, stored: int) -> Path:
    """A folder of plain Parquet, as somebody else wrote it."""
    folder = HOME / f"base-{millions}"
    if not folder.exists():
        unfinished = HOME / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        with duckdb.connect(config={"threads": 2}) as db:
            for number in range(PARTITIONS):
                target = unfinished / f"d={_day(number)}"
                target.mkdir(parents=True)
                rows = _columns(f"range({stored})", "i * 2", "TIMESTAMP '2026-01-01'")  # odd numbers are new keys
                db.execute(
                    f"COPY (SELECT * FROM ({rows}) ORDER BY k) TO '{target}/0.parquet' (FORMAT parquet, COMPRESSION zstd)"
                )
        unfinished.rename(folder)
    return folder


def _rows_of_night(night: int, stored: int, keys: str) -> str:
    each = NIGHT_ROWS // PARTITIONS
    if keys == "clustered":
        key = f"{2 * (stored // 2) + night * 4 * each} + i"
    else:
        key = f"(hash(i + {night * NIGHT_ROWS}) % {stored})::BIGINT * 2 + i % 2"
    parts = []
    for number in range(PARTITIONS):
        rows = _columns(f"range({each})", key, f"TIMESTAMP '2026-02-01' + INTERVAL {night} DAY")
        parts.append(
            f"SELECT DATE '{_day(number)}' AS d, * FROM ({rows} QUALIFY row_number() OVER (PARTITION BY k) = 1)"
        )
    return " UNION ALL ".join(parts)


def _columns(source: str, key: str, stamp: str) -> str:
    values = ", ".join(f"(hash(n + {c}) % 1000)::INTEGER AS c{c}" for c in range(6))
    return f"""SELECT lpad(n::VARCHAR, 16, '0') AS k, {stamp} AS ts, (hash(n) % 100000)::BIGINT AS amount,
        (hash(n) % 9)::INTEGER AS quantity, substr(md5(n::VARCHAR), 1, 12) AS note, {values}
        FROM (SELECT {key} AS n FROM {source} t(i))"""


def _timed(table: Table) -> Iterator[tuple[str, float]]:
    read, written = _io()
    seconds = {}
    steps: dict[str, Callable[[], object]] = {
        "append": lambda: table.append(host="local"),
        "dedupe": lambda: table.dedupe(workers=1),
        "publish": table.publish,
    }
    for name, step in steps.items():
        begun = time.perf_counter()
        step()
        seconds[name] = time.perf_counter() - begun
    now_read, now_written = _io()
    yield "seconds", sum(seconds.values())
    yield "append", seconds["append"]
    yield "dedupe", seconds["dedupe"]
    yield "mb_read", (now_read - read) / 1e6
    yield "mb_written", (now_written - written) / 1e6


def _io() -> tuple[int, int]:
    """Bytes that this process read and wrote."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"]), int(counts["wchar"])


def _day(number: int) -> date:
    return date(2026, 1, 1) + timedelta(days=number)


def _line(name: str, m: dict[str, float]) -> str:
    figures = (m["seconds"], m["append"], m["dedupe"], m["mb_read"], m["mb_written"])
    return f"| {name} | " + " | ".join(f"{figure:,.2f}" for figure in figures) + " |"


def _machine() -> str:
    return f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}"


if __name__ == "__main__":
    raise SystemExit(main())
