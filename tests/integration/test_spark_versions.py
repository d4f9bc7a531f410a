"""Two nights on any version of Spark, in this process and through Spark Connect, and a Connect server that goes away.

`make test-spark-versions` runs them with other versions than the locked one.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert import sparkenv
from lakeupsert.api import Table
from lakeupsert.testing import servers
from lakeupsert.testing.spark import collect

ADOPTED, DAYS = date(2019, 12, 30), [date(2019, 12, 31), date(2020, 1, 1), date(2020, 1, 2)]
CONFIG = """
[tables.sales]
landing = "landing"
processed = "processed"
key = ["k"]
partition_by = ["day"]
order_by = ["ts"]
strategy = "delta"
engine = "spark"
[tables.sales.delete]
column = "op"
values = ["D"]
"""


def rows(keys: range, ts: datetime, v: int, type_: pa.DataType) -> pa.Table:
    return pa.table(
        {"k": keys, "ts": pa.array([ts] * len(keys), pa.timestamp("us")), "v": pa.array([v] * len(keys), type_)}
    )


def two_nights(folder: Path, spark: Any) -> None:
    """What Spark reads after each of two nights over two partitions that were there before, against a dict.

    The second night leaves deltas, deletes, a column that became wider, and one partition as it was adopted.
    """
    expected: dict[tuple[date, int], tuple[datetime, int]] = {}
    for day, type_ in ((ADOPTED, pa.int16()), (DAYS[0], pa.int32())):
        place = folder / "processed" / f"day={day}"
        place.mkdir(parents=True)
        pq.write_table(rows(range(10_000, 10_100), datetime(2019, 12, 31), 0, type_), place / "part-0.parquet")
        expected |= {(day, k): (datetime(2019, 12, 31), 0) for k in range(10_000, 10_100)}
    (folder / "landing").mkdir()
    (folder / "lakeupsert.toml").write_text(CONFIG)
    table = Table.open(folder / "lakeupsert.toml")
    table.adopt()
    nights = [
        [("U", range(2000), 1, pa.int32())],
        [("U", range(0, 2000, 7), 2**40, pa.int64()), ("D", range(5, 2000, 50), 3, pa.int8())],
    ]
    for number, files in enumerate(nights, 1):
        ts = datetime(2020, 1, number)
        for place, (op, keys, v, type_) in enumerate(files):
            days = [DAYS[k % len(DAYS)] for k in keys]
            landed = (
                rows(keys, ts, v, type_)
                .append_column("day", pa.array(days))
                .append_column("op", pa.array([op] * len(keys)))
            )
            pq.write_table(landed, folder / "landing" / f"{number}-{place}.parquet")
            expected |= dict.fromkeys(zip(days, keys, strict=True), (ts, v))
            if op == "D":
                expected = {key: row for key, row in expected.items() if row != (ts, v)}
        table.run(host="spark")
        found = collect(table.to_spark(spark)).select(["day", "k", "ts", "v"]).to_pylist()
        assert sorted(tuple(row.values()) for row in found) == sorted((*key, *row) for key, row in expected.items())
    files = table.files()
    assert {str(pq.read_schema(file.path).field("v").type) for file in files} == {"int16", "int32", "int64"}
    assert any(file.superseded for file in files)
    table.close()


def test_two_nights_are_exact(tmp_path: Path, spark: Any) -> None:
    two_nights(tmp_path, spark)


# ---------------------------------------------------------------- Spark Connect


@pytest.fixture(scope="module")
def connect() -> Iterator[servers.Server]:
    with servers.spark_connect() as server:
        yield server


def test_two_nights_are_exact_through_spark_connect(tmp_path: Path, connect: servers.Server) -> None:
    """In a process of its own, since a process has one kind of session. There is no Java for it to find."""
    done = subprocess.run(
        [sys.executable, __file__, tmp_path],
        env={**os.environ, **connect.env, "JAVA_HOME": "", "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    from pyspark.sql import SparkSession

    sparkenv.prepare()
    two_nights(Path(sys.argv[1]), SparkSession.builder.getOrCreate())
