"""Hosts and engines by the names that users give them. Spark is imported only when it is needed."""

from typing import Literal

from lakeupsert import sparkenv
from lakeupsert.engine.hosts import Host, LocalHost
from lakeupsert.engine.merge import Engine
from lakeupsert.errors import ConfigurationError
from lakeupsert.table.ledger import ChosenHost
from lakeupsert.table.ledger import HostName as HostName  # re-exported, beside the choice of one

HostChoice = Literal["auto", "spark", "local"]
EngineName = Literal["arrow", "spark"]

SPARK_PAYS_BYTES = 1_000_000_000
"""Landing bytes from which host auto takes Spark (ADR 0037). More: a machine works alone for longer than Spark would take.
Fewer: more nights wait for Spark to start."""


def choose_host(choice: HostChoice, landing_bytes: int) -> ChosenHost:
    """The host of a night with so many landing bytes. If it is Spark, and ``choice`` is auto, this process is ready for it."""
    if choice != "auto":
        return ChosenHost(name=choice, landing_bytes=None, missing=None)
    if landing_bytes < SPARK_PAYS_BYTES:
        return ChosenHost(name="local", landing_bytes=landing_bytes, missing=None)
    missing = _prepare_spark()
    return ChosenHost(name="local" if missing else "spark", landing_bytes=landing_bytes, missing=missing)


def _prepare_spark() -> str | None:
    """Prepare this process for Spark. Returns why it can't; None if it can."""
    try:
        sparkenv.require_pyspark()
        from lakeupsert.engine.spark_session import has_session

        if not has_session():
            sparkenv.prepare()
    except ConfigurationError as e:
        return e.message
    return None


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
