"""Hosts and engines by the names that users give them. Spark is imported only when it is asked for."""

from typing import Literal

from lakeupsert.engine.hosts import Host, LocalHost
from lakeupsert.engine.merge import Engine

HostName = Literal["spark", "local"]
EngineName = Literal["arrow", "spark"]


def host_by_name(name: HostName) -> Host:
    if name == "local":
        return LocalHost()
    from lakeupsert.engine.spark_host import SparkHost

    return SparkHost()


def spark_engine(of_machine: int) -> Engine:
    """``of_machine``: bytes that all tasks together may take if Spark runs on this machine alone."""
    from lakeupsert.engine.spark_window import SparkEngine

    return SparkEngine(of_machine)


def arrow_on_spark(of_machine: int) -> Engine:
    """Engine arrow in Spark tasks. ``of_machine``: as above."""
    from lakeupsert.engine.hosted import HostedEngine
    from lakeupsert.engine.spark_host import SparkHost

    host = SparkHost()
    return HostedEngine(host, host.memory_of_a_task(of_machine))
