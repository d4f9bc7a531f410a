"""What one column of a table in many files costs a reader in this process, against the engine on the plain list of files.

Reads     nothing; makes a table of 600 partitions, which one night wrote
Writes    build/bench/readers, and benchmarks/results/readers.md
Repeat    safe: begins anew

All sides read in turns, so a busy machine slows them all, and each is compared with what DuckDB takes for `read_parquet` of the
same files in the same round. Ours open the table anew each time, as a new process would, and planning counts. The sum of the
column has to be the same for all; otherwise exit code 1.
"""

import argparse
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import NamedTuple

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.machine import commit, facts, sentence, versions
from benchmarks.rows import coming, settings
from lakeupsert.api import Table

RESULTS = Path(__file__).parent / "results"
COLUMN = "amount"
ENGINE = "DuckDB, list of files"
Read = Callable[[], pa.Table]


class Taken(NamedTuple):
    """Seconds by the clock, and of all processors."""

    clock: float
    processors: float


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--partitions", type=int, default=600)
    options.add_argument("--rows", type=int, default=2000, help="of a partition; default: %(default)s")
    options.add_argument(
        "--rounds", type=int, default=9, help="default: %(default)s, of which the first does not count"
    )
    options.add_argument("--work", type=Path, default=Path("build/bench"), help="default: %(default)s")
    given = options.parse_args()
    lake = given.work.absolute() / "readers"
    shutil.rmtree(lake, ignore_errors=True)
    table = make(lake, given.partitions, given.rows)
    taken, same = measure(sides(table), given.rounds)
    report(taken, len(table.files()), given)
    shutil.rmtree(lake)
    return 0 if same else 1


def make(lake: Path, partitions: int, rows: int) -> Table:
    """A table that one night wrote: one base file in each partition."""
    table = Table("t", settings(lake, "rewrite"))
    selects = " UNION ALL ".join(f"({coming(number, rows, 'i * 2', 0)})" for number in range(partitions))
    duckdb.connect().execute(f"COPY ({selects}) TO '{lake}/landing/1.parquet' (FORMAT parquet)")
    table.run(host="local", workers=1)
    return table


def sides(table: Table) -> Mapping[str, Read]:
    listed = [file.path for file in table.files()]

    def anew() -> Table:
        return Table("t", table.settings)

    return {
        ENGINE: lambda: (
            duckdb.connect()
            .sql(f"SELECT {COLUMN} FROM read_parquet({listed}, hive_partitioning = true)")
            .to_arrow_table()
        ),
        "Polars, list of files": lambda: (
            pl.scan_parquet(listed, hive_partitioning=True).select(COLUMN).collect().to_arrow()
        ),
        "pyarrow, one file after the other": lambda: pa.concat_tables(
            [pq.ParquetFile(path).read(columns=[COLUMN], use_threads=False) for path in listed]
        ),
        "`to_duckdb`": lambda: anew().to_duckdb(duckdb.connect()).select(COLUMN).to_arrow_table(),
        "`to_polars`": lambda: anew().to_polars().select(COLUMN).collect().to_arrow(),
        "`to_arrow`": lambda: anew().to_arrow(columns=[COLUMN]).read_all(),
        "`to_pandas`": lambda: pa.table({COLUMN: anew().to_pandas(columns=[COLUMN])[COLUMN]}),
        "planning alone (`files`)": lambda: pa.table({COLUMN: [len(anew().files())]}),
    }


def measure(sides: Mapping[str, Read], rounds: int) -> tuple[dict[str, Sequence[Taken]], bool]:
    """What each round took, and whether all sides saw the same."""
    taken: dict[str, list[Taken]] = {name: [] for name in sides}
    sums = {}
    for _ in range(rounds):
        for name, read in sides.items():
            begun = Taken(perf_counter(), process_time())
            rows = read()
            taken[name].append(Taken(perf_counter() - begun.clock, process_time() - begun.processors))
            sums[name] = pc.sum(rows[COLUMN]).as_py()
    seen = {total for name, total in sums.items() if "files`" not in name}
    return {name: seconds[1:] for name, seconds in taken.items()}, len(seen) == 1


def report(taken: Mapping[str, Sequence[Taken]], files: int, given: argparse.Namespace) -> None:
    rows = []
    for name, rounds in taken.items():
        times = [median(own[i] / engine[i] for own, engine in zip(rounds, taken[ENGINE], strict=True)) for i in (0, 1)]
        spent = [median(own[i] for own in rounds) * 1000 for i in (0, 1)]
        rows.append(f"| {name} | {spent[0]:.0f} | {times[0]:.2f} | {spent[1]:.0f} | {times[1]:.2f} |")
    lines = [
        "# One column of many files",
        "",
        f"{sentence(facts())} {', '.join(versions('lakeupsert', 'duckdb', 'polars', 'pyarrow', 'pandas'))},",
        f"commit {commit()}, {datetime.now(UTC):%Y-%m-%d}. `python -m benchmarks.readers`: {files} files of {given.rows:,} rows, "
        f"medians of {given.rounds - 1}.",
        "",
        "| side | ms | times DuckDB | processor ms | times DuckDB |",
        "|---|---:|---:|---:|---:|",
        *rows,
        "",
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "readers.md").write_text("\n".join(lines))
    print(*lines, sep="\n")


if __name__ == "__main__":
    raise SystemExit(main())
