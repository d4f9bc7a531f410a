"""One Spark session and one server of each kind for the whole run, and folders in memory."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lakeupsert import clock
from lakeupsert.testing import servers

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    builder = (
        SparkSession.builder.master("local[2]")
        .appName("lakeupsert-tests")
        .config("spark.driver.memory", "2g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.jars", ",".join(map(str, servers.HADOOP_AWS.glob("*.jar"))))
    )
    with pytest.MonkeyPatch.context() as environment:
        for name, value in servers.CREDENTIALS.items():
            environment.setenv(name, value)  # the JVM keeps what it began with
        session = builder.getOrCreate()
    yield session
    session.stop()


def _in_memory() -> Iterator[Path]:
    """A folder, in memory where possible: thousands of syncs would take minutes, and no test of these is about them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as path:
        yield Path(path)


folder = pytest.fixture(_in_memory)
module_folder = pytest.fixture(_in_memory, scope="module")


@pytest.fixture(scope="session")
def elasticmq() -> Iterator[servers.Server]:
    with servers.elasticmq() as server:
        yield server


@pytest.fixture
def new_sqs_queue() -> Callable[..., str]:
    """Makes a standard queue, in the SQS of this test's environment, whose dead letters go to another; returns its name."""

    def make(**settings: int) -> str:
        servers.new_queue(name := f"q-{clock.new_id()[:12]}", **settings)
        return name

    return make


@pytest.fixture(scope="session")
def moto() -> Iterator[servers.Server]:
    with servers.moto() as server:
        yield server


@pytest.fixture(scope="session")
def versitygw() -> Iterator[servers.Server]:
    with servers.versitygw() as server:
        yield server


@pytest.fixture(params=["moto", "versitygw"])
def s3_server(request: pytest.FixtureRequest) -> servers.Server:
    """Each S3 server in turn."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def new_bucket(monkeypatch: pytest.MonkeyPatch) -> Callable[[servers.Server], str]:
    """Makes an empty bucket and lets this test's boto3 use that server; returns the bucket's name."""

    def make(server: servers.Server) -> str:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        servers.new_bucket(bucket := f"b-{clock.new_id()[:12]}")
        return bucket

    return make
