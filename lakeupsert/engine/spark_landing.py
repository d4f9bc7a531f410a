"""Rows of a Spark DataFrame as landing files, which its tasks write. Arrow's types reach Parquet as they are."""

import itertools
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from lakeupsert import clock
from lakeupsert.engine.spark_session import collect, explain_spark_failures
from lakeupsert.engine.spark_tasks import ship
from lakeupsert.storage import ObjectStore


def query_of(rows: DataFrame) -> tuple[str, str] | None:
    """The ids of the streaming query of this batch, kept by its checkpoint, and of the query's run, new at each start. None: it
    is of none, or of Spark Connect."""
    context = getattr(rows.sparkSession, "_sc", None)
    found: str | None = context and context.getLocalProperty("sql.streaming.queryId")
    return (found, context.getLocalProperty("spark.jobGroup.id")) if context and found else None


def land(rows: DataFrame, landing: ObjectStore, folder: str) -> list[str]:
    """Write the rows below ``folder``, a file a task. Returns the names, without those of tasks that Spark repeated."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first = next(batches, None)
        if first is not None:
            name = f"{folder}{clock.new_id()}.parquet"
            with landing.write(name) as sink, pq.ParquetWriter(sink, first.schema) as writer:
                for batch in itertools.chain([first], batches):
                    writer.write_batch(batch)
            yield pa.record_batch({"name": [name]})

    with explain_spark_failures():
        return [row.name for row in collect(rows.mapInArrow(ship(write), "name string"))]
