"""How much memory a merge takes for the bytes of its files, with engine arrow: `python -m benchmarks.memory`.

Each case merges one partition in a process of its own, whose peak (VmHWM) less what it had before is told beside the
compressed bytes that the merge read. `ArrowEngine.memory_of` rests on it (ADR 0012). With `--units` the stored bytes are
those of a unit, a fiftieth is changed by either strategy, and the whole process is held to 300 MB and twice these bytes.

    python -m benchmarks.memory --units 16 64 256
"""

import argparse
import gc
import random
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.api import Table
from lakeupsert.config import TableSettings
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.pipeline.merge.dedupe import dedupe_partitions
from lakeupsert.pipeline.merge.state import next_state
from lakeupsert.pipeline.merge.steps import step_of
from lakeupsert.pipeline.opened import OpenTable

WORDS = [
    f"{a} {b}" for a in ("blue", "red", "small", "large", "old") for b in ("shirt", "pump", "lamp", "table", "book")
]


def sales(rows: int, since: int, stamp: int) -> Any:
    """Lines of sales: numbers, amounts, words that repeat."""
    chance = np.random.default_rng(stamp)
    ids = np.arange(since, since + rows)
    columns = {
        "id": pa.array(ids),
        "store": pa.array(chance.integers(0, 500, rows)),
        "item": pa.array(chance.choice(WORDS, rows)),
        "amount": pa.array(chance.integers(1, 100_000, rows) / 100),
        "quantity": pa.array(chance.integers(1, 9, rows), pa.int32()),
        "sold_at": pa.array(ids * 1_000_000 + stamp, pa.timestamp("us")),
    }
    return _table(columns, rows, stamp)


def events(rows: int, since: int, stamp: int) -> Any:
    """Events: a key in text, and a text in which little repeats."""
    chance = random.Random(stamp)
    columns = {
        "id": pa.array([f"event-{n:012}" for n in range(since, since + rows)]),
        "text": pa.array([chance.randbytes(60).hex() for _ in range(rows)]),
    }
    return _table(columns, rows, stamp)


def repeated(rows: int, since: int, stamp: int) -> Any:
    """Log lines that compress to a fiftieth."""
    texts = [
        f"GET /shop/basket/{n % 50}?campaign=spring-sale&customer=returning HTTP/1.1 200 {'x' * 120}" for n in range(50)
    ]
    columns = {
        "id": pa.array(np.arange(since, since + rows)),
        "text": pa.array([texts[n % 50] for n in range(rows)]),
    }
    return _table(columns, rows, stamp)


def _table(columns: dict[str, Any], rows: int, stamp: int) -> Any:
    return pa.table({**columns, "day": pa.repeat("2020-01-01", rows), "ts": pa.repeat(stamp, rows)})


def peak_bytes() -> int:
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def measure(settings: TableSettings, shape: str, stored: int, incoming: int) -> None:
    table = OpenTable("t", settings)
    head = table.history.ledger_head()
    snapshot = table.history.last_snapshot()
    [partition] = head.body.touched
    newest = table.history.heads([partition])
    state = next_state(table.history, partition, head.number, snapshot and snapshot.body, newest.get(partition))
    step = step_of(table.history, table.settings, state)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_bytes()
    dedupe_partitions(table, ArrowEngine(), {partition: head.number})
    took = peak_bytes() - before
    told = ArrowEngine().memory_of(table.history.spec(0), step.tasks[0])
    came = sum(f.bytes for files in step.tasks[0].batches for f in files)
    base = sum(f.bytes for f in step.tasks[0].stored)
    whole = before + took
    megabytes = " ".join(f"{size / 1e6:9.1f}" for size in (base, came, took, told, whole))
    print(
        f"{step.strategy:7} {shape:9} {stored:10,} {incoming:10,} {megabytes} {300 + 2 * base / 1e6:9.1f}",
        flush=True,
    )


def land(settings: TableSettings, shape: str, number: int, rows: int, since: int) -> None:
    pq.write_table(globals()[shape](rows, since, number), Path(settings.landing) / f"{number}.parquet")
    Table("t", settings).append(host="local")


def case(shape: str, stored: int, incoming: int, strategy: Literal["rewrite", "delta"] = "rewrite") -> None:
    context = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        landing, processed = Path(folder) / "landing", Path(folder) / "processed"
        landing.mkdir()
        settings = TableSettings(
            landing=str(landing),
            processed=str(processed),
            key=("id",),
            partition_by=("day",),
            order_by=("ts",),
            strategy=strategy,
            bucket="1GiB",  # a unit is what the case says
        )

        def do(what: Any, *args: Any) -> None:
            process = context.Process(target=what, args=args)
            process.start()
            process.join()
            assert process.exitcode == 0

        if stored:
            do(land, settings, shape, 1, stored, 0)
            do(Table.run, Table("t", settings))  # host spark is not begun where nothing is new
        do(land, settings, shape, 2, incoming, stored // 2)
        do(measure, settings, shape, stored, incoming)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--units", type=int, nargs="+", metavar="MB")
    given = parser.parse_args()
    rows = given.rows
    print("merge   shape         stored   incoming   base MB   came MB   took MB   told MB  whole MB limit MB")
    if given.units:
        for megabytes in given.units:
            for shape, of_a_megabyte in (("sales", 112_000), ("events", 15_600)):
                for strategy in ("rewrite", "delta"):
                    case(shape, megabytes * of_a_megabyte, megabytes * of_a_megabyte // 50, strategy)
        return
    for shape in ("sales", "events", "repeated"):
        for stored, incoming in ((0, rows), (rows, rows // 100), (rows, rows // 4), (2 * rows, rows)):
            case(shape, stored, incoming)


if __name__ == "__main__":
    main()
