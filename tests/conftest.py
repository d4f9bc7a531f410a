"""One Spark session and one server of each kind for the whole run."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lakeupsert import clock
from lakeupsert.testing import servers

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    session = (
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
        .getOrCreate()
    )
    yield session
    session.stop()


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
        bucket = f"b-{clock.new_id()[:12]}"
        import boto3

        boto3.client("s3").create_bucket(Bucket=bucket)
        return bucket

    return make
