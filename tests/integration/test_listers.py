"""Programs that list the folder: exact between runs with the settings of docs/engines/FOLDERS.md, and wrong without them."""

from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from lakeupsert.api import Table
from lakeupsert.config import DeleteSettings, TableSettings

DAYS = [date(2020, 1, day) for day in (1, 2, 3)]
NIGHTS = 12
"""Enough for a checkpoint of a Delta log, and for a vacuum that deletes older ones."""
COLUMNS = ["k", "d", "v"]
EXACT = {"keep_snapshots": 1, "superseded_retention": "0s"}
Rows = list[tuple[int, str, int]]


def with_duckdb(folder: Path, spark: Any) -> Rows:
    glob = f"{folder}/d=*/*.parquet"
    return as_rows(duckdb.sql(f"FROM read_parquet('{glob}', hive_partitioning = true)").to_arrow_table())


def with_polars(folder: Path, spark: Any) -> Rows:
    frame = pl.scan_parquet(f"{folder}/d=*/*.parquet", hive_partitioning=True, extra_columns="ignore")
    return as_rows(frame.collect().to_arrow())


def with_pandas(folder: Path, spark: Any) -> Rows:
    return as_rows(pa.Table.from_pandas(pd.read_parquet(folder)))


def with_pyarrow(folder: Path, spark: Any) -> Rows:
    return as_rows(ds.dataset(folder, partitioning="hive").to_table())


def with_spark(folder: Path, spark: Any) -> Rows:
    return as_rows(spark.read.parquet(str(folder)).toArrow())


LISTERS = [with_duckdb, with_polars, with_pandas, with_pyarrow, with_spark]
ONLY_PYTHON = LISTERS[:-1]


def as_rows(table: pa.Table) -> Rows:
    return sorted((k, str(d), v) for k, d, v in zip(*(table[name].to_pylist() for name in COLUMNS), strict=True))


def shown(table: Table) -> Rows:
    return as_rows(table.to_arrow().read_all())


class Lake:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.landing, self.nights = folder / "processed", folder / "landing", 0
        self.landing.mkdir(parents=True)
        self.settings: dict[str, Any] = {
            "landing": str(self.landing),
            "processed": str(self.folder),
            "key": ("k",),
            "partition_by": ("d",),
            "order_by": ("ts",),
            "delete": DeleteSettings(column="op", values=("D",)),
        }
        self.configure(**settings)

    def configure(self, **settings: Any) -> None:
        self.settings |= settings
        self.table = Table("t", TableSettings(**self.settings))

    def land(self, keys: Sequence[int] = (), **more: pa.Array) -> None:
        """Nine rows by default. The night before had five of their keys; one is deleted."""
        n = self.nights = self.nights + 1
        keys = keys or range(4 * n, 4 * n + 9)
        columns = {"k": keys, "d": [DAYS[k % 3] for k in keys], "v": [n * k for k in keys], "ts": [n] * len(keys)}
        columns["op"] = ["D", *["U"] * (len(keys) - 1)]
        pq.write_table(pa.table({**columns, **more}), self.landing / f"{n}.parquet")

    def run(self, nights: int = 1) -> "Lake":
        for _ in range(nights):
            self.land()
            self.table.run(host="local")
        return self


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"publishers": ("delta",)},
        {"publishers": ("delta",), "history": True},
        {"key_scope": "table"},
    ],
    ids=str,
)
def test_exact_after_every_run(settings: dict[str, Any], tmp_path: Path, spark: Any) -> None:
    lake = Lake(tmp_path, **EXACT, **settings)
    for night in range(1, NIGHTS + 1):
        lake.run()
        for read in LISTERS if night in (1, NIGHTS) else ONLY_PYTHON:
            assert read(lake.folder, spark) == shown(lake.table), (read.__name__, night)
    checkpoints = list(lake.folder.glob("_delta_log/*.checkpoint.parquet"))
    assert bool(checkpoints) == ("publishers" in settings), "what the readers above did not read"


def without_settings(folder: Path) -> Lake:
    return Lake(folder).run(2)


def with_deltas(folder: Path, **settings: Any) -> Lake:
    lake = Lake(folder, **EXACT, **settings).run()
    lake.configure(strategy="delta")
    return lake.run()


def before_publish(folder: Path) -> Lake:
    lake = Lake(folder, **EXACT).run()
    lake.land()
    lake.table.append(host="local")
    lake.table.dedupe()
    return lake


def after_publish(folder: Path) -> Lake:
    lake = before_publish(folder)
    lake.table.publish()
    return lake


def reprocessed(folder: Path) -> Lake:
    lake = Lake(folder, **EXACT).run()
    lake.table.reprocess()
    return lake


def tagged(folder: Path) -> Lake:
    lake = Lake(folder, **EXACT).run()
    lake.table.tag("audit")
    return lake.run()


def with_publisher_behind(folder: Path) -> Lake:
    """Delta has no unsigned integers, so its readers still need the files of the first night."""
    lake = Lake(folder, **EXACT, publishers=("delta",)).run()
    lake.land(more=pa.array([1] * 9, pa.uint32()))
    lake.table.run(host="local")
    assert lake.table.status().publishers["delta"].behind
    return lake


WRONG = [without_settings, with_deltas, before_publish, after_publish, reprocessed, tagged, with_publisher_behind]


@pytest.mark.few(2)
@pytest.mark.parametrize("made", WRONG)
def test_wrong_otherwise(made: Callable[[Path], Lake], tmp_path: Path, spark: Any) -> None:
    """As documented. What is exact one day leaves this list and that of the page."""
    lake = made(tmp_path)
    rows = shown(lake.table)
    assert [read.__name__ for read in LISTERS if read(lake.folder, spark) == rows] == []


@pytest.mark.parametrize("made", [before_publish, after_publish, reprocessed])
@pytest.mark.parametrize("mend", ["run", "vacuum"])
def test_next_run_or_vacuum_makes_it_exact(made: Callable[[Path], Lake], mend: str, tmp_path: Path) -> None:
    lake = made(tmp_path)
    if mend == "run":
        lake.table.run(host="local")
    else:
        lake.table.publish()
        lake.table.vacuum(dry=False)
    assert {read.__name__: read(lake.folder, None) for read in ONLY_PYTHON} == {
        read.__name__: shown(lake.table) for read in ONLY_PYTHON
    }


@pytest.mark.parametrize("reader", ["duckdb", "pyarrow", "pandas"])
def test_new_column_is_not_shown_until_all_files_have_it(reader: str, tmp_path: Path) -> None:
    lake = Lake(tmp_path, **EXACT).run()
    lake.land(keys=[5, 8], more=pa.array([1, 2]))
    lake.table.run(host="local")

    def columns() -> list[str]:
        match reader:
            case "duckdb":
                return list(duckdb.read_parquet(f"{lake.folder}/d=*/*.parquet", hive_partitioning=True).columns)
            case "pyarrow":
                return list(ds.dataset(lake.folder, partitioning="hive").schema.names)
            case _:
                return list(pd.read_parquet(lake.folder).columns)

    assert "more" not in columns()
    lake.table.reprocess()
    lake.table.vacuum(dry=False)
    assert "more" in columns()


def test_append_alone_changes_nothing(tmp_path: Path) -> None:
    lake = Lake(tmp_path, **EXACT).run()
    before = shown(lake.table)
    lake.land()
    lake.table.append(host="local")
    for read in ONLY_PYTHON:
        assert read(lake.folder, None) == shown(lake.table) == before


@pytest.mark.long
def test_pattern_of_all_files_takes_the_checkpoint_of_a_delta_log(tmp_path: Path) -> None:
    """With an error at best: readers that accept other columns show its rows."""
    lake = Lake(tmp_path, **EXACT, publishers=("delta",)).run(NIGHTS)
    everything, rows = f"{lake.folder}/**/*.parquet", len(shown(lake.table))
    with pytest.raises(duckdb.Error, match="Hive partition mismatch"):
        duckdb.sql(f"FROM read_parquet('{everything}', hive_partitioning = true)").fetchall()
    with pytest.raises(pl.exceptions.PolarsError, match="extra column"):
        pl.scan_parquet(everything).collect()
    assert len(duckdb.sql(f"FROM read_parquet('{everything}', union_by_name = true)").fetchall()) > rows
    assert pl.scan_parquet(everything, missing_columns="insert", extra_columns="ignore").collect().height > rows


def test_vector_objects_break_a_listing_loudly(tmp_path: Path, spark: Any) -> None:
    """A Delta table whose strategy is `delta` has objects in `dv/`, which is no partition."""
    lake = Lake(tmp_path, **EXACT, publishers=("delta",), strategy="delta").run(4)
    assert list(lake.folder.glob("dv/*.bin"))
    for read in (with_pyarrow, with_pandas, with_spark):
        with pytest.raises(Exception, match=r"Parquet|CONFLICTING_PARTITION|Conflicting"):
            read(lake.folder, spark)
