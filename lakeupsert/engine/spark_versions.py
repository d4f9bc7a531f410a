"""What differs between the versions of Spark from 3.5 on: a function for each difference, with its reason (ADR 0028).

Under Spark Connect, methods of Python follow the client's version, options and SQL follow the server's.
"""

import os
import threading
from collections.abc import Callable, Mapping

import pyarrow as pa
import pyspark
from pyspark import InheritableThread
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.utils import is_remote


def _is_3(version: str) -> bool:
    return version.startswith("3.")


def frame_of(spark: SparkSession, table: pa.Table) -> DataFrame:
    """A DataFrame of an Arrow table. `createDataFrame` takes one from 4.0 on; in 3.5 it takes a frame of pandas instead.

    There it can't convert structs, so their fields cross as columns.
    """
    if not _is_3(pyspark.__version__):
        return spark.createDataFrame(table)
    structs = {field.name: field.type for field in table.schema if pa.types.is_struct(field.type)}
    with_arrow = "spark.sql.execution.arrow.pyspark.enabled"  # off by default: each value would be pickled
    before = spark.conf.get(with_arrow)
    spark.conf.set(with_arrow, "true")
    try:
        flat = table.flatten()
        # pandas 3 has a type of its own for texts.
        texts = {field.name: object for field in flat.schema if pa.types.is_string(field.type)}
        frame = spark.createDataFrame(flat.to_pandas().astype(texts))
    finally:
        spark.conf.set(with_arrow, before)
    return frame.select(
        [
            f.struct(*[f.col(f"`{name}.{child.name}`").alias(child.name) for child in structs[name]]).alias(name)
            if name in structs
            else f.col(f"`{name}`")
            for name in table.schema.names
        ]
    )


def scans_one_root(spark: SparkSession) -> bool:
    """Whether partition folders must be below one folder in a scan. The option `ignoreInvalidPartitionPaths` came with 4.0."""
    return _is_3(spark.version)


def reads_wider(spark: SparkSession) -> bool:
    """Whether a Parquet column may be read as a wider type than the file's, which its reader can do from 4.0 on (SPARK-40876)."""
    return not _is_3(spark.version)


def hadoop_version(spark: SparkSession) -> str:
    return str(spark.sql("SELECT java_method('org.apache.hadoop.util.VersionInfo', 'getVersion')").collect()[0][0])


def s3a_settings_of(spark: SparkSession, wanted: Mapping[str, str]) -> dict[str, str]:
    """Settings of S3A for the session's Hadoop. The 3.3 of Spark 3.5 has Amazon's first client with other names of classes."""
    settings, provider = dict(wanted), "aws.credentials.provider"
    if provider in settings and _is_3(spark.version) and hadoop_version(spark).startswith("3.3."):
        settings[provider] = "com.amazonaws.auth.DefaultAWSCredentialsProviderChain"
    return settings


def connect_session(address: str) -> SparkSession:
    """A new session on a Spark Connect server, which was not called yet. `getOrCreate` of 3.5 calls it, and repeats the call.

    Raises ImportError if a package of the client is missing.
    """
    if not _is_3(pyspark.__version__):
        return SparkSession.builder.remote(address).getOrCreate()
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"  # functions then make columns of Connect
    spark = ConnectSession(connection=address)
    ConnectSession._set_default_and_active_session(spark)
    return spark


def thread_of(spark: SparkSession, run: Callable[[], None], tag: str) -> threading.Thread:
    """A thread for the session's jobs, which have the properties and tags of this thread's, and ``tag``."""

    def run_with_tag() -> None:
        if is_remote():
            spark.addTag(tag)
        else:
            spark.sparkContext.addJobTag(tag)
        run()

    if _is_3(pyspark.__version__):  # its InheritableThread knows no sessions
        return (threading.Thread if is_remote() else InheritableThread)(target=run_with_tag)
    thread: threading.Thread = InheritableThread(target=run_with_tag, session=spark)
    return thread


def cancel_jobs(spark: SparkSession, tag: str) -> None:
    """Cancel the jobs that run with this tag, and no others of the session."""
    if is_remote():
        spark.interruptTag(tag)
    else:
        spark.sparkContext.cancelJobsWithTag(tag)


def retry_lost_calls(spark: SparkSession, times: int) -> None:
    """Let the client of Spark Connect repeat a call that its server does not take, once a second and so many times.

    By default it goes on for ten minutes. From 4.0 on this also holds for a call that is being repeated.
    """
    settings = {"max_retries": times, "initial_backoff": 1000, "max_backoff": 1000, "jitter": 0}  # milliseconds
    if _is_3(pyspark.__version__):  # it has these settings in a dict
        spark.client._retry_policy.update(settings)
        return
    for policy in spark.client.get_retry_policies():
        vars(policy).update(settings)
