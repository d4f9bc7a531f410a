"""Two nights on any version of Spark, in this process and through Spark Connect, and a Connect server that goes away.

`make test-spark-versions` runs them with other versions than the locked one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest

from lakeupsert import sparkenv
from lakeupsert.api import Table
from lakeupsert.engine.by_name import EngineName
from tests.harness import servers
from tests.harness.processes import PATIENCE_SECONDS, wait_until

INT64 = pa.int64()
ADOPTED = date(2019, 12, 30)
DAYS = [date(2019, 12, 31), date(2020, 1, 1), date(2020, 1, 2), date(2020, 1, 3)]
ENGINES: tuple[EngineName, ...] = ("arrow", "spark")
CONFIG = """
[tables.sales]
landing = "landing"
processed = "processed"
key = ["k"]
partition_by = ["day"]
order_by = ["ts"]
strategy = "delta"
[tables.sales.delete]
column = "op"
values = ["D"]
"""


def rows(keys: range, ts: datetime, v: int, type_: pa.DataType, type_of_n: pa.DataType = INT64) -> pa.Table:
    columns = {"k": keys, "ts": pa.array([ts] * len(keys), pa.timestamp("us")), "v": pa.array([v] * len(keys), type_)}
    return pa.table({**columns, "n": pa.array(keys, type_of_n)})


def two_nights(folder: Path, spark: Any, engine: EngineName) -> None:
    """What Spark reads after each of two nights over two partitions that were there before, against a dict. Both phases run in
    Spark's tasks.

    The second night leaves deltas, deletes, a new partition, a column `v` that became wider, and one partition as it was
    adopted, with a column `n` that was narrower there from the beginning.
    """
    expected: dict[tuple[date, int], tuple[datetime, int]] = {}
    for day, type_ in ((ADOPTED, pa.int32()), (DAYS[0], pa.int64())):
        place = folder / "processed" / f"day={day}"
        place.mkdir(parents=True)
        keys = range(10_000, 10_100)
        pq.write_table(rows(keys, datetime(2019, 12, 31), 0, pa.int32(), type_), place / "part-0.parquet")
        expected |= {(day, k): (datetime(2019, 12, 31), 0) for k in keys}
    (folder / "landing").mkdir(parents=True)
    (folder / "lakeupsert.toml").write_text(CONFIG)
    table = Table.open(folder / "lakeupsert.toml")
    table.adopt()
    nights = [
        [("U", range(2000), 1, pa.int32())],
        [("U", range(0, 2000, 7), 2**40, pa.int64()), ("D", range(5, 2000, 50), 3, pa.int8())],
    ]
    for number, files in enumerate(nights, 1):
        ts, open_days = datetime(2020, 1, number), DAYS[: number + 2]
        for place, (op, keys, v, type_) in enumerate(files):
            days = [open_days[k % len(open_days)] for k in keys]
            landed = rows(keys, ts, v, type_).append_column("day", pa.array(days))
            landed = landed.append_column("op", pa.array([op] * len(keys)))
            pq.write_table(landed, folder / "landing" / f"{number}-{place}.parquet")
            expected |= dict.fromkeys(zip(days, keys, strict=True), (ts, v))
            if op == "D":
                expected = {key: row for key, row in expected.items() if row != (ts, v)}
        table.run(host="spark", engine=engine)
        found = table.to_spark(spark).select("day", "k", "ts", "v", "n").collect()
        assert sorted(map(tuple, found)) == sorted((*key, *row, key[1]) for key, row in expected.items())
    stored = {file.name: pq.read_schema(file.path) for file in table.files()}
    types = {(str(schema.field("v").type), str(schema.field("n").type)) for schema in stored.values()}
    assert types == {("int32", "int32"), ("int32", "int64"), ("int64", "int64")}
    assert any(file.superseded for file in table.files())
    table.close()


@pytest.mark.core
@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_two_nights_are_exact(tmp_path: Path, spark: Any, engine: EngineName) -> None:
    two_nights(tmp_path, spark, engine)


@pytest.mark.long
def test_spark_starts_without_a_word() -> None:
    """But for a line that the JVM itself writes about a module of Spark 4."""
    start = "from lakeupsert import sparkenv; sparkenv.prepare(); from lakeupsert.engine.spark_session import session; session()"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True)
    assert [line for line in done.stderr.splitlines() if "jdk.incubator.vector" not in line] == []


# ---------------------------------------------------------------- Spark Connect


@pytest.fixture(scope="module")
def connect() -> Iterator[servers.Server]:
    with servers.spark_connect() as server:
        yield server


@pytest.mark.long
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


HELD = """
import sys
from pathlib import Path
from lakeupsert.engine import spark_host, spark_session

LAKE = Path(sys.argv[1])

def hold(*_):
    (LAKE / "held").touch()
    (LAKE / "fifo").read_text()

spark_host._map_side = hold
"""
"""Tasks wait for ever once the server runs them."""


@pytest.fixture
def mortal() -> Iterator[servers.Server]:
    with servers.spark_connect() as server:
        yield server


@contextmanager
def append(lake: Path, server: servers.Server, before: str = "") -> Iterator[subprocess.Popen[str]]:
    """`lakeupsert append` in a process that runs some lines before."""
    program = lake / "program.py"  # of a process without a file, Spark 4.3 thinks that it runs doctests
    program.write_text(f"{before}\nfrom lakeupsert.cli import main\nmain(['append', '--host', 'spark', '--json'])\n")
    env = {**os.environ, **server.env}
    process = subprocess.Popen([sys.executable, program, lake], cwd=lake, env=env, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def answered(process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    """Exit code and error code."""
    answer, _ = process.communicate(timeout=seconds)
    return process.returncode, json.loads(answer)["error"]["code"]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    (tmp_path / "landing").mkdir()
    (tmp_path / "lakeupsert.toml").write_text(CONFIG)
    landed = rows(range(5), datetime(2020, 1, 1), 1, pa.int64()).append_column("day", pa.array(DAYS[:1] * 5))
    pq.write_table(landed.append_column("op", pa.array(["U"] * 5)), tmp_path / "landing" / "1.parquet")
    return tmp_path


def kill(server: servers.Server) -> None:
    assert server.process is not None
    server.process.kill()
    server.process.wait()


@pytest.mark.long
def test_client_without_its_packages_names_the_extra(lake: Path) -> None:
    nowhere = servers.Server(1, {"SPARK_REMOTE": "sc://127.0.0.1:1"})
    with append(lake, nowhere, "import sys; sys.modules['grpc'] = None") as process:
        answer, _ = process.communicate(timeout=PATIENCE_SECONDS)
    error = json.loads(answer)["error"]
    assert (process.returncode, error["code"]) == (2, "extra-missing")
    assert "[connect]" in error["next"]


@pytest.mark.crash
def test_append_ends_within_a_minute_if_the_server_is_gone(lake: Path, mortal: servers.Server) -> None:
    kill(mortal)
    with append(lake, mortal) as process:
        assert answered(process, seconds=60) == (75, "spark-unreachable")


@pytest.mark.crash
def test_append_ends_within_a_minute_if_the_server_dies_while_it_works(lake: Path, mortal: servers.Server) -> None:
    os.mkfifo(lake / "fifo")
    with append(lake, mortal, HELD) as process:
        wait_until((lake / "held").exists, "a task runs")
        kill(mortal)
        assert answered(process, seconds=60) == (75, "spark-unreachable")
    assert Table.open(lake / "lakeupsert.toml").append(host="local") is not None, "nothing was committed"


@pytest.mark.crash
@pytest.mark.skipif(pyspark.__version__.startswith("3."), reason="Spark 3.5 asks how long to wait before it waits")
def test_append_that_waits_for_a_lost_server_obeys_sigterm(lake: Path, mortal: servers.Server) -> None:
    os.mkfifo(lake / "fifo")
    with append(lake, mortal, f"{HELD}\nspark_session.SPARK_LOST_RETRIES = 1_000_000") as process:
        wait_until((lake / "held").exists, "a task runs")
        kill(mortal)
        process.terminate()
        assert answered(process, PATIENCE_SECONDS) == (75, "terminated")


if __name__ == "__main__":
    from pyspark.sql import SparkSession

    sparkenv.prepare()
    for engine in ENGINES:
        two_nights(Path(sys.argv[1]) / engine, SparkSession.builder.getOrCreate(), engine)
