"""The Spark session, its failures, and what its tasks have in common. Works under Spark Connect: no JVM object, no RDD."""

import os
import re
import signal
import sys
import threading
import zipimport
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import FrameType

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession

from lakeupsert import clock, sparkenv
from lakeupsert.engine.spark_tasks import UNFIT, TaskMemory, passed_error
from lakeupsert.engine.spark_versions import cancel_jobs, connect_session, retry_lost_calls, thread_of
from lakeupsert.errors import ConfigurationError, ExecutorError, LakeupsertError, TryAgainError
from lakeupsert.phrases import install_extra
from lakeupsert.retries import SPARK_LOST_RETRIES, TICK_SECONDS

SPARK_ERRORS = (
    "Py4JError",
    "Py4JNetworkError",
    "Py4JJavaError",
    "ConnectionRefusedError",
    "SparkConnectGrpcException",
    "SparkException",
    "RetriesExceeded",
)
"""Names, not classes: a Spark Connect client has no py4j, and a client with py4j has no gRPC."""


_UNFIT = re.compile(
    rf"(?<={UNFIT})[^\n]*|No module named '[\w.]+'|ImportError: [^\n]*|Cannot run program \"[^\"]+\"[^\n]*"
    r"|(Python in worker has different version|PyArrow >= |Pandas >= )[^\n]*"
    r"|Error from python worker:(?s:.*?)\n  (?!Traceback)(?P<start>\S[^\n]*)"
)
"""What Spark says if an executor's Python lacks a package, or has another version, or is not there."""
_DIED = re.compile(
    r"Python worker exited unexpectedly \(crashed\)|[^\n]*exceeding (physical |virtual )?memory limits[^\n]*"
    r"|[^\n]*(exit code|exitCode|exit status)[: ]*137[^\n]*|(\w+\.)*(Arrow)?MemoryError[^\n]*|Cannot allocate memory[^\n]*"
    r"|can't start new thread"
)
"""What Spark says if a task's Python needed more memory than it may have, or was killed."""


def has_session() -> bool:
    """Whether this process has a Spark session already, for example in a notebook."""
    return SparkSession.getActiveSession() is not None


def session() -> SparkSession:
    """The active Spark session, or a new one with the machine's own Spark settings.

    Raises ConfigurationError if SPARK_REMOTE is set and the client's packages are missing (``extra-missing``).
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    if sparkenv.connect_server() is not None:
        return _connect()
    with _delay_interrupts():
        return (
            SparkSession.builder.appName("lakeupsert")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.log.level", "ERROR")
            .config("spark.sql.session.timeZone", "UTC")
            .getOrCreate()
        )


def _connect() -> SparkSession:
    """A session on the Spark Connect server of SPARK_REMOTE, whose other settings are the server's."""
    try:
        spark = connect_session(os.environ["SPARK_REMOTE"])
    except ImportError as e:
        raise ConfigurationError(
            "extra-missing", f"Spark Connect needs more packages: {e}", next=install_extra("connect")
        ) from e
    retry_lost_calls(spark, SPARK_LOST_RETRIES)  # before the first call
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    return spark


@contextmanager
def _delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until Spark has started, and restore the signal handler afterwards.

    Interrupting the start leaves a JVM behind. Spark also installs a handler that calls the JVM from within the interrupted
    call, which fails noisily.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted.is_set():
        raise KeyboardInterrupt


@contextmanager
def explain_spark_failures() -> Iterator[None]:
    """Raise an error of ours for what Spark raises: the one that a task raised, or one that says why no task could run."""
    try:
        with _stop_retries_on_sigterm():
            yield
    except LakeupsertError:
        raise
    except Exception as e:
        if isinstance(e, PySparkException) or type(e).__name__ in SPARK_ERRORS:
            explained = _explain(e)
            if explained is not None:
                raise explained from e
        raise


def _explain(e: Exception) -> LakeupsertError | None:
    """None: a task raised what is not an error of ours, so it is a bug."""
    text = str(e)
    if (passed := passed_error(text)) is not None:
        return passed
    died = _DIED.search(text)
    # Without that limit, the cause is a noexec mount.
    if "failed to map segment" in text and session().conf.get(_PYSPARK_MEMORY, None):
        died = re.search(r"[^\n]*failed to map segment[^\n]*", text)
    if died is not None:
        return task_memory(session()).died(died[0].strip(". "), then=", then run the same command again")
    if unfit := _UNFIT.search(text):
        return ExecutorError(
            "executors-unfit",
            f"Spark's executors can't run lakeupsert: {(unfit['start'] or unfit[0]).strip('. ')}. Their tasks "
            "committed nothing, so no reader sees what they wrote.",
            next="ship an environment with the job: build it with `make dist` on a machine like the executors, with their "
            "version of Python, and set spark.archives; or name a Python there with spark.pyspark.python (docs/SPARK.md)",
        )
    lost = "StatusCode.UNAVAILABLE" in text or type(e).__name__ == "RetriesExceeded"  # the latter in 4.0
    if lost and (server := sparkenv.connect_server()):
        _stop_retries()
        return TryAgainError(
            "spark-unreachable",
            f"The Spark Connect server {server} does not answer, or stopped while it worked. It committed nothing, so no "
            "reader sees what it had written.",
            next="start it, or correct SPARK_REMOTE, then run the same command again",
        )
    if type(e).__name__ not in SPARK_ERRORS:
        return None
    return TryAgainError(
        "spark-failed",
        f"Spark did not finish the job: {_first_lines(e)}",
        next="read Spark's log for the reason, which is often too little memory for a task; then run the same command again",
    )


@contextmanager
def _stop_retries_on_sigterm() -> Iterator[None]:
    """After SIGTERM, end a wait for a lost Spark Connect server: the work can't be finished. A job that runs goes on."""
    before = signal.getsignal(signal.SIGTERM)
    in_main = threading.current_thread() is threading.main_thread()
    if sparkenv.connect_server() is None or not in_main or not callable(before):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        _stop_retries()
        before(number, frame)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def collect(frame: DataFrame) -> list[Row]:
    """The rows. A signal that ends this call cancels its jobs, whose tasks would write on for nobody.

    The job runs in a thread of its own: a signal would break off this thread's call to the JVM, and the answer to that call
    would be taken for the answer to the next one.
    """
    rows: Future[list[Row]] = Future()

    def run() -> None:
        try:
            rows.set_result(frame.collect())
        except BaseException as e:
            rows.set_exception(e)

    tag = f"lakeupsert-{clock.new_id()}"
    thread_of(frame.sparkSession, run, tag).start()
    try:
        return rows.result()
    except Exception:
        raise
    except BaseException:
        while not rows.done():  # again: the job may not have begun
            cancel_jobs(frame.sparkSession, tag)
            wait([rows], timeout=TICK_SECONDS)
        raise


def _stop_retries() -> None:
    active = SparkSession.getActiveSession()
    if active is not None:
        retry_lost_calls(active, 0)


def _first_lines(e: Exception) -> str:
    try:
        lines = [line.strip(": ") for line in str(e).splitlines() if not line.startswith(("\tat ", "Caused by"))]
    except Exception:  # Py4J asks the JVM for the text, which may be gone
        lines = [type(e).__name__]
    return " ".join(lines[:3])


def ids(batches: Iterator[pa.RecordBatch]) -> Iterator[int]:
    """The numbers of `SparkSession.range` that a task got."""
    for batch in batches:
        yield from batch["id"].to_pylist()
    forget_zip_importers()


def forget_zip_importers() -> None:
    """Let the next task of this Python worker start sooner.

    Before every task Spark calls importlib.invalidate_caches(). Python 3.11 then reads `pyspark.zip` again for every package
    that was ever imported from it: a quarter of a second of processor time a task, measured on a small night.
    """
    for path, importer in list(sys.path_importer_cache.items()):
        if isinstance(importer, zipimport.zipimporter):
            del sys.path_importer_cache[path]


def parallelism(spark: SparkSession) -> int:
    """How many tasks the session can run at a time, as far as the client can see."""
    configured = spark.conf.get("spark.default.parallelism", None)
    if configured:
        return int(configured)
    most = spark.conf.get("spark.dynamicAllocation.maxExecutors", None) or spark.conf.get(
        "spark.executor.instances", "0"
    )
    executors = int(most) if most.isdigit() and int(most) < _NO_LIMIT else 0
    return max(executors * tasks_per_executor(spark), _known_cores(spark))


_NO_LIMIT = (1 << 31) - 1
"""Spark's own default of the most executors."""


def tasks_per_executor(spark: SparkSession) -> int:
    cores = int(spark.conf.get("spark.executor.cores", "1"))
    return max(1, cores // int(spark.conf.get("spark.task.cpus", "1")))


def task_memory(spark: SparkSession) -> TaskMemory:
    if is_local(spark):
        return TaskMemory(
            f"{parallelism(spark)} tasks at a time share the memory of this machine.",
            "give this machine more memory, or start Spark with fewer cores",
        )
    given, tasks = memory_beside_jvm(spark), tasks_per_executor(spark)
    setting = _PYSPARK_MEMORY if spark.conf.get(_PYSPARK_MEMORY, None) else "spark.executor.memoryOverhead"
    return TaskMemory(
        f"An executor has {given / 1e6:,.0f} MB ({setting}) for the Python of {tasks} {'task' if tasks == 1 else 'tasks'}.",
        f"raise {setting}" + (" or lower spark.executor.cores" if tasks > 1 else ""),
    )


def is_local(spark: SparkSession) -> bool:
    return bool(spark.conf.get("spark.master", "").startswith("local["))


def memory_beside_jvm(spark: SparkSession) -> int:
    """Bytes that an executor has for Python. If `spark.executor.pyspark.memory` is not set, it is the overhead."""
    own = spark.conf.get(_PYSPARK_MEMORY, None)
    if own:
        return _bytes(own)
    given = spark.conf.get("spark.executor.memoryOverhead", None)
    if given:
        return _bytes(given)
    factor = float(spark.conf.get("spark.executor.memoryOverheadFactor", "0.1"))
    return max(_LEAST_OVERHEAD, int(factor * _bytes(spark.conf.get("spark.executor.memory", "1g"))))


_PYSPARK_MEMORY = "spark.executor.pyspark.memory"
_LEAST_OVERHEAD = 384 << 20
_UNITS = {"k": 10, "m": 20, "g": 30, "t": 40}


def _bytes(text: str) -> int:
    """A size as Spark writes it, for example 4g; a number alone counts MiB."""
    number, unit = re.fullmatch(r"(\d+)\s*([kmgt]?)b?", text.strip().lower()).groups()  # type: ignore[union-attr] # Spark has checked it
    return int(number) << _UNITS[unit or "m"]


def _known_cores(spark: SparkSession) -> int:
    try:
        return int(spark.sparkContext.defaultParallelism)
    except (AttributeError, NotImplementedError):  # Spark Connect; the latter in 3.5
        return 8
