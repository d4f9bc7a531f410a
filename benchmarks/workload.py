"""The benchmarks' workloads: the base of a table, nights that change it, and what a reader has to see after each night.

Reads     nothing (every value of the sales comes from a hash of its row number), the receipts, or what tpchgen-cli makes
Writes    FOLDER/base.parquet, FOLDER/night-1.parquet, ..., and last FOLDER/workload.json (`Workload`)
Repeat    safe: a finished workload of the same size is kept

What a reader has to see is computed by DuckDB's window: newest row per partition and key, without the deleted ones.

    night       a year of sales; a night updates rows in all partitions (60 %) and inserts into the newest three days (40 %)
    today       the same, 1 % updates and 99 % inserts
    reprocess   30 % of the rows of 30 dates change
    hot         60 partitions of 400,000 rows, of which each of 20 nights changes a tenth
    large       24 partitions of 500,000 rows, nights such as those of `night`
    tpch        TPC-H's lineitem by month of shipping; the nights are derived, since the generator makes no refreshes:
                orders that were held back come, others are deleted, one line in a hundred comes back
    receipts    lakeupsert/receipts.py, by day

Of a night of sales about 3 % of the rows come twice (the second an hour newer), 2 % of the updates are older than what
the table holds, 1 % are deletes.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any, ClassVar, Protocol

TPCHGEN = Path("build/peers/tpchgen/bin/tpchgen-cli")


@dataclass(frozen=True)
class Size:
    """By default a year of 8,000 rows a day, and nights of 60,000 changes."""

    partitions: int = 365
    """Of the receipts: the days that the base holds."""
    rows_per_partition: int = 8000
    batch_rows: int = 60_000
    nights: int = 4
    scale_factor: float = 1.0
    """Of TPC-H alone, which has no use for the numbers of partitions and rows."""


@dataclass(frozen=True)
class Night:
    """What a night brings (its rows, and how many partitions they touch), and the figures of `Workload` after it."""

    file: str
    rows: int
    touched: int
    full: dict[str, str]
    filtered: dict[str, str]


@dataclass(frozen=True)
class Workload:
    """A finished workload. This much of it has to be importable where there is nothing but Python's own library.

    Attributes:
        delete: the column, and its value in a row that deletes its key; None where no row does.
        figures: SQL of the aggregates that a reader computes, which DuckDB and Spark both take; ``filter`` likewise.
        every_night: whether its nights count together, and not each as a sample of the same.
    """

    name: str
    size: dict[str, float]
    key: Sequence[str]
    partition: str
    delete: Sequence[str] | None
    figures: dict[str, str]
    filter: str
    every_night: bool
    nights: Sequence[Night]

    order = "record_timestamp"

    @classmethod
    def open(cls, folder: Path) -> "Workload":
        found = json.loads((folder / "workload.json").read_text())
        nights = tuple(Night(**night) for night in found.pop("nights"))
        return cls(**{**found, "nights": nights})

    @property
    def visible(self) -> str:
        """SQL that is true for a row that a reader sees."""
        return f"{self.delete[0]} <> '{self.delete[1]}'" if self.delete else "true"

    def comparable(self, values: Any) -> dict[str, str]:
        """Values of ``figures`` from any engine, in one form."""
        return {name: "0" if v is None else str(v) for name, v in zip(self.figures, values, strict=True)}


class Source(Protocol):
    """Where a workload comes from: SQL for its rows, and the facts that `Workload` has about it."""

    size: Size
    facts: Mapping[str, Any]
    every_night: bool

    def base(self, db: Any, size: Size) -> str:
        """The query of the base; what it needs is made in the connection."""

    def filter(self, size: Size) -> str: ...

    def night(self, number: int, size: Size) -> str:
        """The query of a night, which may read the table ``current``."""


def make(name: str, size: Size, folder: Path) -> Workload:
    """Write the workload, unless it is there already."""
    import duckdb  # not at the top: see `Workload`

    source = WORKLOADS[name]
    path = folder / "workload.json"
    if path.is_file():
        found = Workload.open(folder)
        if found.name == name and found.size == asdict(size):
            return found
    making = folder / "making"  # on disk, for `hot` does not fit into memory
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    workload = Workload(
        name=name,
        size=asdict(size),
        filter=source.filter(size),
        every_night=source.every_night,
        nights=(),
        **source.facts,
    )
    settings = {"threads": 2, "memory_limit": "6GB", "preserve_insertion_order": False}
    with duckdb.connect(str(making / "db"), config=settings) as db:
        db.execute("CREATE TABLE current AS " + source.base(db, size))
        order = ", ".join((workload.partition, *workload.key))
        db.execute(
            f"COPY (FROM current ORDER BY {order}) TO '{folder}/base.parquet' (FORMAT parquet, COMPRESSION zstd)"
        )
        nights = [
            _night(db, workload, source.night(number, size), folder / f"night-{number}.parquet")
            for number in range(1, size.nights + 1)
        ]
    shutil.rmtree(making)
    path.write_text(json.dumps({**asdict(workload), "nights": [asdict(night) for night in nights]}, indent=1))
    return Workload.open(folder)


def _night(db: Any, workload: Workload, query: str, file: Path) -> Night:
    """Write a night's rows, merge them into ``current``, and tell what is there now."""
    db.execute("CREATE OR REPLACE TABLE batch AS FROM current LIMIT 0")  # its types, whatever the query computes with
    db.execute(f"INSERT INTO batch BY NAME {query}")
    order = ", ".join((workload.order, *workload.key))
    db.execute(f"COPY (FROM batch ORDER BY {order}) TO '{file}' (FORMAT parquet, COMPRESSION zstd)")
    key = (workload.partition, *workload.key)
    # A key that did not come stays as it was, so the window is over those alone that did.
    db.execute(f"""CREATE OR REPLACE TABLE newest AS
        SELECT * FROM (SELECT * FROM current SEMI JOIN batch USING ({", ".join(key)}) UNION ALL BY NAME FROM batch)
        QUALIFY row_number() OVER (PARTITION BY {", ".join(key)} ORDER BY {workload.order} DESC) = 1""")
    same = " AND ".join(f"current.{column} = newest.{column}" for column in key)
    db.execute(f"DELETE FROM current USING newest WHERE {same}")
    db.execute("INSERT INTO current BY NAME FROM newest")
    rows, touched = db.execute(f"SELECT count(*), count(DISTINCT {workload.partition}) FROM batch").fetchall()[0]
    seen = "SELECT " + ", ".join(workload.figures.values()) + f" FROM current WHERE {workload.visible}"
    full, filtered = (db.execute(query).fetchall()[0] for query in (seen, f"{seen} AND {workload.filter}"))
    return Night(file.name, rows, touched, workload.comparable(full), workload.comparable(filtered))


@dataclass(frozen=True)
class Sales:
    """Keys are (transaction_date, order_id). ``updates`` is their share of a night; ``within`` the dates that they change."""

    size: Size
    updates: float = 0.6
    within: int | None = None
    every_night: bool = False

    facts: ClassVar = {
        "key": ("order_id",),
        "partition": "transaction_date",
        "delete": ("op", "D"),
        "figures": {
            "rows": "count(*)",
            "quantity": "sum(quantity)",
            "price_cents": "sum(price_cents)",
            "mixed": "sum(price_cents * (1 + store_id) + product_id * quantity)",
            "partitions": "count(distinct transaction_date)",
            "returned": "sum(case when status = 'returned' then quantity end)",
            "newest": "cast(max(record_timestamp) as string)",
        },
    }
    _first = date(2025, 1, 1)

    def base(self, db: Any, size: Size) -> str:
        return f"""
            SELECT (DATE '{self._first}' + CAST(i % {size.partitions} AS INT))::DATE AS transaction_date,
                   'O' || lpad((i * 2654435761 % 4294967296)::BIGINT::VARCHAR, 10, '0')
                       || lpad((i // {size.partitions})::VARCHAR, 6, '0') AS order_id,
                   {attributes("i", "i", "'I'", "TIMESTAMP '2026-01-01' + to_seconds((hash(i) % 80000)::BIGINT)")}
            FROM range({size.partitions * size.rows_per_partition}) t(i)"""

    def filter(self, size: Size) -> str:
        return f"{self._dates(size, max(1, size.partitions // 12))} AND channel = 'web'"

    def _dates(self, size: Size, number: int) -> str:
        """SQL for so many dates from the middle on."""
        since = self._first + timedelta(days=(size.partitions - number) // 2)
        return f"transaction_date >= '{since}' AND transaction_date < '{since + timedelta(days=number)}'"

    def night(self, number: int, size: Size) -> str:
        """Updates ``u`` of picked rows, inserts ``n``, and a second, newer copy of some of both."""
        night = f"TIMESTAMP '2026-01-01' + INTERVAL {number} DAY"
        updates = int(size.batch_rows * self.updates)
        inserts = size.batch_rows - updates
        late = "CASE WHEN h % 50 = 0 THEN INTERVAL 900 DAY ELSE INTERVAL 0 DAY END"
        updated_at = f"{night} + to_seconds((h % 80000)::BIGINT) - {late}"
        operation = "CASE WHEN h % 100 = 1 THEN 'D' ELSE 'U' END"
        inserted_at = f"{night} + to_seconds((hash(i) % 80000)::BIGINT)"
        picked = "op <> 'D'" + (f" AND {self._dates(size, min(self.within, size.partitions))}" if self.within else "")
        return f"""
            WITH candidates AS (FROM current WHERE {picked}), pick AS (
                SELECT transaction_date, order_id, hash(order_id || '{number}') AS h FROM candidates
                WHERE hash('pick {number}' || order_id) % 1000000 < {updates}e6 / (SELECT count(*) FROM candidates)
            ), u AS (
                SELECT transaction_date, order_id, {attributes(f"(h // 64 + {number})", "h", operation, updated_at)}
                FROM pick
            ), n AS (
                SELECT (DATE '{self._first}' + CAST({size.partitions - 3 + number} + i % 3 AS INT))::DATE
                           AS transaction_date,
                       'N{number}-' || lpad(i::VARCHAR, 13, '0') AS order_id, {attributes("i", "i", "'I'", inserted_at)}
                FROM range({inserts}) t(i)
            ), once AS (FROM u UNION ALL FROM n)
            FROM once UNION ALL
            SELECT * REPLACE (quantity + 1 AS quantity, record_timestamp + INTERVAL 1 HOUR AS record_timestamp)
            FROM once WHERE hash(order_id) % 33 = 0"""


def attributes(seed: str, text: str, operation: str, record_timestamp: str) -> str:
    """The columns beside the key, from a number in SQL."""

    def pick(n: int) -> str:
        return f"hash({seed} * 7 + {n})"

    return f"""({pick(1)} % 2000)::INT AS store_id, ({pick(2)} % 500000)::BIGINT AS customer_id,
        ({pick(3)} % 80000)::INT AS product_id,
        ['web', 'app', 'store', 'phone'][1 + ({pick(4)} % 4)::INT] AS channel,
        ['new', 'paid', 'shipped', 'returned'][1 + ({pick(5)} % 4)::INT] AS status,
        (1 + {pick(6)} % 9)::INT AS quantity, (100 + {pick(7)} % 90000)::BIGINT AS price_cents,
        substr(md5({text}::VARCHAR), 1, 18) AS comment, {operation} AS op, {record_timestamp} AS record_timestamp"""


@dataclass(frozen=True)
class TpcH:
    """Of every thousand orders one comes in each night and another is deleted; one line in a hundred is sent back."""

    size: Size
    every_night: bool = False

    facts: ClassVar = {
        "key": ("l_orderkey", "l_linenumber"),
        "partition": "l_shipmonth",
        "delete": ("op", "D"),
        "figures": {
            "rows": "count(*)",
            "quantity": "sum(cast(l_quantity as bigint))",
            "cents": "sum(cast(l_extendedprice * 100 as bigint) * cast(100 - l_discount * 100 as bigint))",
            "partitions": "count(distinct l_shipmonth)",
            "returned": "sum(case when l_returnflag = 'R' then l_orderkey end)",
            "newest": "cast(max(record_timestamp) as string)",
        },
    }

    def base(self, db: Any, size: Size) -> str:
        if not TPCHGEN.exists():
            raise SystemExit(f"There is no {TPCHGEN}, which makes the lines of `tpch`: run `make peers` first.")
        made = TPCHGEN.parents[1] / f"scale-{size.scale_factor:g}"
        if not (made / "lineitem.parquet").exists():
            options = ["--scale-factor", f"{size.scale_factor:g}", "--tables", "lineitem", "--output-dir", made]
            subprocess.run([TPCHGEN, "parquet", *options], check=True)
        db.execute(f"""CREATE TEMP VIEW lines AS
            SELECT date_trunc('month', l_shipdate)::DATE AS l_shipmonth, *, 'I' AS op,
                   TIMESTAMP '2026-01-01' AS record_timestamp, hash(l_orderkey) % 1000 AS place
            FROM '{made}/lineitem.parquet'""")
        return f"SELECT * EXCLUDE place FROM lines WHERE place >= {size.nights}"

    def filter(self, size: Size) -> str:
        return "l_shipmonth >= '1995-01-01' AND l_shipmonth < '1995-07-01' AND l_shipmode = 'AIR'"

    def night(self, number: int, size: Size) -> str:
        arrived = f"TIMESTAMP '2026-01-01' + INTERVAL {number} DAY AS record_timestamp"
        return f"""
            SELECT * EXCLUDE place REPLACE ({arrived}) FROM lines WHERE place = {number - 1} UNION ALL
            SELECT * EXCLUDE place REPLACE (CASE WHEN place = {999 - number} THEN 'D' ELSE 'U' END AS op,
                                            'R' AS l_returnflag, l_quantity - 1 AS l_quantity, {arrived})
            FROM lines WHERE place >= {size.nights} AND (
                place = {999 - number} OR hash(l_orderkey, l_linenumber) % 100 = {number % 100} AND place < 900)"""


@dataclass(frozen=True)
class Receipts:
    """The lines of the first days are the base, as the nights until then left them."""

    size: Size
    every_night: bool = False

    facts: ClassVar = {
        "key": ("basket_id", "product_id"),
        "partition": "transaction_date",
        "delete": None,
        "figures": {
            "rows": "count(*)",
            "quantity": "sum(quantity)",
            "cents": "sum(cast(sales_value * 100 as bigint) * (1 + store_id))",
            "discounts": "sum(cast((retail_disc + coupon_disc + coupon_match_disc) * 100 as bigint))",
            "partitions": "count(distinct transaction_date)",
            "newest": "cast(max(record_timestamp) as string)",
        },
    }
    _first = date(2017, 1, 1)

    def base(self, db: Any, size: Size) -> str:
        from lakeupsert.receipts import COLUMNS, derive

        derive(db)
        db.execute(f"CREATE TEMP VIEW lines AS SELECT night, {', '.join(COLUMNS)} FROM arrivals")
        return f"""SELECT * EXCLUDE night FROM lines WHERE night < DATE '{self._first}' + {size.partitions}
            QUALIFY row_number() OVER (PARTITION BY transaction_date, basket_id, product_id
                                       ORDER BY record_timestamp DESC) = 1"""

    def filter(self, size: Size) -> str:
        since = self._first + timedelta(days=size.partitions // 2)
        until = since + timedelta(days=max(1, size.partitions // 12))
        return f"transaction_date >= '{since}' AND transaction_date < '{until}' AND store_id < 400"

    def night(self, number: int, size: Size) -> str:
        return f"SELECT * EXCLUDE night FROM lines WHERE night = DATE '{self._first}' + {size.partitions + number - 1}"


WORKLOADS: dict[str, Source] = {
    "night": Sales(Size()),
    "today": Sales(Size(), updates=0.01),
    "reprocess": Sales(Size(batch_rows=72_000), updates=1, within=30),
    "hot": Sales(Size(60, 400_000, 2_400_000, 20), updates=1, every_night=True),
    "large": Sales(Size(24, 500_000, 120_000)),
    "tpch": TpcH(Size()),
    "receipts": Receipts(Size(partitions=360)),
}
