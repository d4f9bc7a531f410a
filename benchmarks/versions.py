"""What `versions = true` costs: bytes of the same nights in a table without the setting and in one with it.

Reads     nothing; numpy makes every row
Writes    build/versions; the table of results to standard output
Repeat    safe: it begins with new tables

    python -m benchmarks.versions                     # or with --rows 100000

The table has one partition, in key order; every merge rewrites it. Kinds: `few` changes a thousandth of the rows once, `updates`
changes 3.3 % of them each night, anywhere among the keys, and `appends` brings new rows only, whose keys follow each other.
"""

import argparse
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.api import Table
from lakeupsert.config import TableSettings

WORK = Path("build/versions")
KINDS = {"few": 2, "updates": 30, "appends": 30, "more updates": 100}
"""Nights of each kind."""


class Cost(NamedTuple):
    """Bytes of the base files, of the batch's column in them, their rows, and processor time of all nights in seconds."""

    bytes: int
    column: int
    rows: int
    seconds: float


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=1_000_000)
    rows = options.parse_args().rows
    print("| kind | nights | bytes without | with | | column, bytes a row | seconds without | with |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for kind, nights in KINDS.items():
        off, on = (measure(kind, nights, rows, versions=versions) for versions in (False, True))
        more, each = f"+{on.bytes / off.bytes - 1:.2%}", f"{on.column / on.rows:.3f}"
        figures = (nights, f"{off.bytes:,}", f"{on.bytes:,}", more, each, f"{off.seconds:.1f}", f"{on.seconds:.1f}")
        print(f"| {kind} | {' | '.join(map(str, figures))} |")


def measure(kind: str, nights: int, rows: int, *, versions: bool) -> Cost:
    shutil.rmtree(WORK, ignore_errors=True)
    landing = WORK / "landing"
    landing.mkdir(parents=True)
    table = Table(
        "t",
        TableSettings(
            landing=str(landing),
            processed=str(WORK / "processed"),
            key=("order_id", "line_no"),
            partition_by=(),
            order_by=("at",),
            versions=versions,
            strategy="rewrite",
        ),
    )
    rng, seconds = np.random.default_rng(7), 0.0
    changed = rows // 1000 if kind == "few" else rows * 33 // 1000
    for night in range(nights):
        if kind == "appends":
            ids = np.arange(night * changed, (night + 1) * changed)
        else:
            ids = np.arange(rows) if night == 0 else np.sort(rng.choice(rows, changed, replace=False))
        pq.write_table(records(rng, ids, night), landing / f"{night}.parquet")
        begun = time.process_time()
        table.run(host="local", workers=1)
        seconds += time.process_time() - begun
    files = table.files()
    column = sum(column_bytes(file.path) for file in files)
    return Cost(sum(file.bytes for file in files), column, sum(file.rows for file in files), seconds)


def records(rng: np.random.Generator, ids: np.ndarray, night: int) -> pa.Table:
    n = len(ids)
    at = np.datetime64("2020-01-01", "us") + np.full(n, night).astype("timedelta64[D]")
    return pa.table(
        {
            "order_id": ids // 3,
            "line_no": pa.array(ids % 3, pa.int32()),
            "at": at + rng.integers(0, 86_400_000_000, n).astype("timedelta64[us]"),
            "product": rng.integers(0, 5000, n),
            "quantity": pa.array(rng.integers(1, 20, n), pa.int32()),
            "amount": rng.integers(1, 100_000, n) / 100,
            "status": pa.array(np.array(["open", "paid", "sent", "back"])[rng.integers(0, 4, n)]),
        }
    )


def column_bytes(path: str) -> int:
    footer = pq.read_metadata(path)
    chunks = (footer.row_group(g).column(c) for g in range(footer.num_row_groups) for c in range(footer.num_columns))
    return sum(chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema == "_lakeupsert_batch")


if __name__ == "__main__":
    main()
