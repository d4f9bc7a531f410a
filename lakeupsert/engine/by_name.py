"""Hosts and engines by the names that users give them. Spark is imported only when it is asked for."""

from typing import Literal

from lakeupsert.engine.batch import Host
from lakeupsert.engine.local import LocalHost
from lakeupsert.engine.merge import Engine

HostName = Literal["spark", "local"]
EngineName = Literal["arrow", "spark"]


def host_by_name(name: HostName) -> Host:
    if name == "local":
        return LocalHost()
    from lakeupsert.engine.spark import SparkHost

    return SparkHost()


def spark_engine() -> Engine:
    from lakeupsert.engine.spark import SparkEngine

    return SparkEngine()
