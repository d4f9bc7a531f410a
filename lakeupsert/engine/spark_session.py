"""A Spark session, its failures, and what tasks need of it."""

import signal
import sys
import threading
import zipimport
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from lakeupsert.errors import TryAgainError
from lakeupsert.storage import StoreUnavailableError


def session() -> Any:
    """The active Spark session, or a new one under the machine's own Spark settings."""
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    with _interrupts_wait():
        return (
            SparkSession.builder.appName("lakeupsert")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.log.level", "ERROR")
            .config("spark.sql.session.timeZone", "UTC")
            .getOrCreate()
        )


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C while Spark starts leaves a JVM behind, and the handler that Spark puts in place calls the JVM within the call
    to it that was interrupted, which fails noisily: so it counts after the start, and the handler stays as it was."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: came.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came.is_set():
        raise KeyboardInterrupt


SPARKS_OWN = ("Py4JError", "Py4JNetworkError", "Py4JJavaError", "ConnectionRefusedError", "SparkConnectGrpcException")
"""By name, as a client of Spark Connect has no py4j, and one of py4j no gRPC."""


@contextmanager
def spark_may_fail() -> Iterator[None]:
    """Tell the end of Spark or of its task processes, which blames no data, from an error of our code in a task."""
    try:
        yield
    except Exception as e:
        outage = isinstance(e, PythonException) and StoreUnavailableError.__name__ in str(e)
        if not outage and type(e).__name__ not in SPARKS_OWN:
            raise
        raise TryAgainError(
            "spark-failed",
            f"Spark did not finish the job: {_first_lines(e)}",
            next="see Spark's log for the reason, often too little memory for a task; then run the same command again",
        ) from e


def _first_lines(e: Exception) -> str:
    try:
        lines = [line.strip(": ") for line in str(e).splitlines() if not line.startswith(("\tat ", "Caused by"))]
    except Exception:  # Py4J asks the JVM for the text, which may be gone
        lines = [type(e).__name__]
    return " ".join(lines[:3])


def ids(batches: Iterator[Any]) -> Iterator[int]:
    for batch in batches:
        yield from batch["id"].to_pylist()
    forget_zip_importers()


def forget_zip_importers() -> None:
    """Make the next task of this Python worker begin sooner.

    Before every task Spark calls importlib.invalidate_caches(), and Python 3.11 then reads `pyspark.zip` again for every
    package in it that was ever imported: a quarter of a second of processor time a task, measured on a small night.
    """
    for path, importer in list(sys.path_importer_cache.items()):
        if isinstance(importer, zipimport.zipimporter):
            del sys.path_importer_cache[path]


def parallelism(spark: Any) -> int:
    """Cores of the session, as far as it tells (Connect does not tell defaultParallelism)."""
    asked = spark.conf.get("spark.default.parallelism", None)
    return int(asked) if asked else int(spark.conf.get("spark.executor.instances", "0")) or _local_cores(spark)


def _local_cores(spark: Any) -> int:
    context = getattr(spark, "sparkContext", None)
    return int(context.defaultParallelism) if context is not None else 8
