"""What a night costs as the table grows: the same 60,000 rows come to 1, 5, 20, 50 million that are stored.

The table has 20 partitions, a text key of 16 characters and 10 other columns, and is adopted and compacted untimed. Of what a
night brings half is updates and half is new. *clustered*: the keys of a night lie close together, as order numbers of recent
days do; *scattered*: anywhere. A night is append (host local), dedupe (one worker, in this process) and publish; bytes are
what the process asked the kernel to read and write (`/proc/self/io`), so reads that a page cache answers count. Seconds of
processor are those of all its threads, and stay what they are if others use the machine. Medians of three nights after a
first. Each night is compared with DuckDB's count and sums.
"""

import shutil
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, process_time

import duckdb

from benchmarks.rows import coming, day, settings, stored
from lakeupsert.api import Table

PARTITIONS = 20
NIGHT_ROWS = 60_000
NIGHTS = 4
SHOWN = {
    "seconds": "s",
    "append": "s append",
    "dedupe": "s dedupe",
    "append_processor": "processor, s append",
    "dedupe_processor": "processor, s dedupe",
    "mb_read": "MB read",
    "mb_written": "MB written",
    "dedupe_mb_read": "MB that dedupe read",
    "mb_stored": "MB stored",
    "requests": "requests",
}
CHECKED = "count(*), sum(amount), sum(quantity)"


def measured(home: Path, millions: int, strategy: str, keys: str) -> dict[str, float]:
    """Medians of the nights; ends the program where a night is not exact."""
    lake = home / "lake"
    shutil.rmtree(lake, ignore_errors=True)
    each = millions * 1_000_000 // PARTITIONS
    base = base_of(home, millions, each)
    shutil.copytree(base, lake / "table")
    given = settings(lake, strategy)
    table = Table("scale", given)
    table.adopt()
    table.compact(full=True)
    nights = []
    # In a file, which DuckDB compresses: in memory 200 million rows would take over 10 GB.
    with duckdb.connect(lake / "seen.duckdb") as db:
        db.execute(f"CREATE TABLE seen AS SELECT d, k, amount, quantity, ts FROM read_parquet('{base}/*/*')")
        for night in range(1, NIGHTS + 1):
            landed = lake / "landing" / f"{night}.parquet"
            query = _rows_of_night(night, each, keys)
            db.execute(f"COPY ({query}) TO '{landed}' (FORMAT parquet, COMPRESSION zstd)")
            table = Table("scale", given)
            [newest, *_] = table.snapshots()
            facts = {
                "mb_stored": sum(p.bytes for p in newest.body.partitions.values()) / 1e6,
                "mb_landed": landed.stat().st_size / 1e6,
            }
            nights.append({**facts, **dict(_timed(table))})
            db.execute(f"""CREATE OR REPLACE TABLE came AS SELECT d, k, amount, quantity, ts FROM '{landed}';
                DELETE FROM seen USING came WHERE seen.d = came.d AND seen.k = came.k; INSERT INTO seen FROM came""")
            expected = db.execute(f"SELECT {CHECKED} FROM seen").fetchall()
            reader = table.to_arrow()
            if db.register("reader", reader).execute(f"SELECT {CHECKED} FROM reader").fetchall() != expected:
                raise SystemExit(f"not exact: {millions} million rows, {strategy}, {keys}, night {night}")
            table.close()
    return {name: round(statistics.median(n[name] for n in nights[1:]), 3) for name in nights[0]}


def base_of(home: Path, name: object, each: int, partitions: int = PARTITIONS) -> Path:
    """A folder of plain Parquet, as somebody else wrote it; partitions that are there already are kept."""
    folder = home / f"base-{name}"
    with duckdb.connect(config={"threads": 2}) as db:
        for number in range(partitions):
            target = folder / f"d={day(number)}/0.parquet"
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                part = home / "part"
                db.execute(f"COPY ({stored(number, each)}) TO '{part}' (FORMAT parquet, COMPRESSION zstd)")
                part.rename(target)
    return folder


def _rows_of_night(night: int, there: int, keys: str) -> str:
    each = NIGHT_ROWS // PARTITIONS
    if keys == "clustered":
        key = f"{2 * (there // 2) + night * 4 * each} + i"
    else:
        key = f"(hash(i + {night * NIGHT_ROWS}) % {there})::BIGINT * 2 + i % 2"
    return " UNION ALL ".join(coming(number, each, key, night) for number in range(PARTITIONS))


def _timed(table: Table) -> Iterator[tuple[str, float]]:
    """Seconds of the night and of its steps, by the clock and of the processor; MB that they read and wrote; and requests."""
    steps: dict[str, Callable[[], object]] = {
        "append": lambda: table.append(host="local"),
        "dedupe": lambda: table.dedupe(workers=1),
        "publish": table.publish,
    }
    total = [0.0, 0.0, 0.0]
    for name, step in steps.items():
        read, written = io_bytes()
        begun, worked = perf_counter(), process_time()
        step()
        now_read, now_written = io_bytes()
        took = (perf_counter() - begun, (now_read - read) / 1e6, (now_written - written) / 1e6)
        yield f"{name}_processor", process_time() - worked
        yield from zip((name, f"{name}_mb_read", f"{name}_mb_written"), took, strict=True)
        total = [a + b for a, b in zip(total, took, strict=True)]
    yield from zip(("seconds", "mb_read", "mb_written"), total, strict=True)
    yield "requests", sum(table.requests.values())


def io_bytes() -> tuple[int, int]:
    """Bytes that this process read and wrote."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"]), int(counts["wchar"])
