"""The workload `night`: a sales table of daily partitions, and nightly batches of late updates, inserts and deletes.

Reads     nothing; every value comes from a hash of its row number
Writes    OUT/base.parquet, OUT/batch-1.parquet, ..., OUT/expected.json (one entry a batch, see `Expected`)
Repeat    safe: a finished workload of the same size is kept

The key is (transaction_date, order_id). Of a batch 60 % updates rows all over the partitions, 40 % inserts into the
newest three days; about 3 % of the rows come twice (the second an hour newer), 2 % of the updates are older than what
the table holds, 1 % are deletes. What a reader has to see after each batch is computed by DuckDB's own window over base
and batches.

    python -m benchmarks.workload OUT [--partitions P] [--rows-per-partition N] [--batch-rows B] [--batches K]
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import duckdb

KEY = ("transaction_date", "order_id")
FIGURES = {
    "rows": "count(*)",
    "quantity": "sum(quantity)",
    "price_cents": "sum(price_cents)",
    "partitions": "count(distinct transaction_date)",
    "returned": "sum(case when status = 'returned' then quantity end)",
    "newest": "cast(max(record_timestamp) as varchar(30))",
}
"""What a reader of the table without its deleted rows computes, in SQL that DuckDB and Spark both take."""


@dataclass(frozen=True)
class Size:
    """The size that the design is measured at by default: a year of 8,000 rows a day, and a night of 60,000 changes."""

    partitions: int = 365
    rows_per_partition: int = 8000
    batch_rows: int = 60_000
    batches: int = 1


@dataclass(frozen=True)
class Expected:
    """After one batch: the table's figures (by `FIGURES`), and how many rows and partitions the batch has."""

    figures: dict[str, Any]
    batch_rows: int
    touched: int


def make(out: Path, size: Size) -> list[Expected]:
    """Write the workload, unless it is there already; what to expect after each batch."""
    path = out / "expected.json"
    if path.is_file():
        found = json.loads(path.read_text())
        if found["size"] == asdict(size):
            return [Expected(**e) for e in found["expected"]]
    out.mkdir(parents=True, exist_ok=True)
    with duckdb.connect(config={"threads": 2, "preserve_insertion_order": False}) as db:
        db.execute("CREATE TABLE log AS " + _base(size))
        db.execute(f"COPY (FROM log ORDER BY ALL) TO '{out}/base.parquet' (FORMAT parquet, COMPRESSION zstd)")
        expected = []
        for number in range(1, size.batches + 1):
            db.execute("CREATE OR REPLACE TABLE batch AS " + _batch(size, number))
            target = f"'{out}/batch-{number}.parquet' (FORMAT parquet, COMPRESSION zstd)"
            db.execute(f"COPY (FROM batch ORDER BY record_timestamp, order_id) TO {target}")
            db.execute("INSERT INTO log FROM batch")
            expected.append(_expected(db))
    path.write_text(json.dumps({"size": asdict(size), "expected": [asdict(e) for e in expected]}, indent=1))
    return expected


def _expected(db: Any) -> Expected:
    current = f"""(SELECT * FROM log
        QUALIFY row_number() OVER (PARTITION BY {", ".join(KEY)} ORDER BY record_timestamp DESC) = 1)"""
    figures = db.sql(f"SELECT {', '.join(FIGURES.values())} FROM {current} WHERE op <> 'D'").fetchall()[0]
    rows, touched = db.sql("SELECT count(*), count(DISTINCT transaction_date) FROM batch").fetchall()[0]
    return Expected(comparable(figures), rows, touched)


def comparable(figures: Any) -> dict[str, Any]:
    """Values of `FIGURES` from any engine, in one form."""
    *numbers, newest = figures
    return dict(zip(FIGURES, [*map(int, numbers), str(newest)], strict=True))


def _base(size: Size) -> str:
    return f"""
        SELECT (DATE '2025-01-01' + CAST(i % {size.partitions} AS INT))::DATE AS transaction_date,
               'O' || lpad((i * 2654435761 % 4294967296)::BIGINT::VARCHAR, 10, '0')
                   || lpad((i // {size.partitions})::VARCHAR, 6, '0') AS order_id,
               {_attributes("i", "i", "'I'", "TIMESTAMP '2026-01-01' + to_seconds((hash(i) % 80000)::BIGINT)")}
        FROM range({size.partitions * size.rows_per_partition}) t(i)"""


def _batch(size: Size, number: int) -> str:
    """Updates ``u`` of picked rows, inserts ``n``, and a second, newer copy of some of both."""
    night = f"TIMESTAMP '2026-01-01' + INTERVAL {number} DAY"
    updates, inserts = int(size.batch_rows * 0.6), int(size.batch_rows * 0.4)
    late = "CASE WHEN h % 50 = 0 THEN INTERVAL 900 DAY ELSE INTERVAL 0 DAY END"
    updated_at = f"{night} + to_seconds((h % 80000)::BIGINT) - {late}"
    operation = "CASE WHEN h % 100 = 1 THEN 'D' ELSE 'U' END"
    inserted_at = f"{night} + to_seconds((hash(i) % 80000)::BIGINT)"
    return f"""
        WITH pick AS (
            SELECT transaction_date, order_id, hash(order_id || '{number}') AS h FROM log WHERE op <> 'D'
            ORDER BY hash('pick {number}' || order_id), transaction_date LIMIT {updates}
        ), u AS (
            SELECT transaction_date, order_id, {_attributes(f"(h // 64 + {number})", "h", operation, updated_at)}
            FROM pick
        ), n AS (
            SELECT (DATE '2025-01-01' + CAST({size.partitions - 3 + number} + i % 3 AS INT))::DATE AS transaction_date,
                   'N{number}' || lpad(i::VARCHAR, 15, '0') AS order_id, {_attributes("i", "i", "'I'", inserted_at)}
            FROM range({inserts}) t(i)
        ), once AS (FROM u UNION ALL FROM n)
        FROM once UNION ALL
        SELECT * REPLACE (quantity + 1 AS quantity, record_timestamp + INTERVAL 1 HOUR AS record_timestamp)
        FROM once WHERE hash(order_id) % 33 = 0"""


def _attributes(seed: str, text: str, operation: str, record_timestamp: str) -> str:
    """The columns beside the key, from a number in SQL."""

    def pick(n: int) -> str:
        return f"hash({seed} * 7 + {n})"

    return f"""({pick(1)} % 2000)::INT AS store_id, ({pick(2)} % 500000)::BIGINT AS customer_id,
        ({pick(3)} % 80000)::INT AS product_id,
        ['web', 'app', 'store', 'phone'][1 + ({pick(4)} % 4)::INT] AS channel,
        ['new', 'paid', 'shipped', 'returned'][1 + ({pick(5)} % 4)::INT] AS status,
        (1 + {pick(6)} % 9)::INT AS quantity, (100 + {pick(7)} % 90000)::BIGINT AS price_cents,
        substr(md5({text}::VARCHAR), 1, 18) AS comment, {operation} AS op, {record_timestamp} AS record_timestamp"""


def size_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default in asdict(Size()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def size_of(given: argparse.Namespace) -> Size:
    return Size(**{name: getattr(given, name) for name in asdict(Size())})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    size_arguments(parser)
    given = parser.parse_args()
    for entry in make(given.out, size_of(given)):
        print(entry)
