"""A batch of a Spark stream becomes one batch of the table, once, by the ids of its query and of itself.

Reads     the ledger; the rows, in Spark's tasks
Writes    landing files in a folder that no other append looks at; then what `append`, `dedupe` and `publish` write
Repeat    safe: the ledger knows the batch by its id, also in other files than before, and when these are gone

    is its id in the ledger? -- no --> landing files -> append with that id --> merge -> publish
                             '- yes -------------------------------------------^
"""

from typing import TYPE_CHECKING

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError
from lakeupsert.operations.run import merge_and_publish
from lakeupsert.pipeline.append.append import append
from lakeupsert.pipeline.append.discover import AppendOptions
from lakeupsert.pipeline.messages import send_missing
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import PublishResult
from lakeupsert.pipeline.workers.drain_queues import DrainOptions
from lakeupsert.storage import can_commit, open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FOLDER = "_spark"
"""The folder of the landing files."""


def take_stream(table: OpenTable, rows: "DataFrame", number: int) -> PublishResult:
    """Append batch ``number`` of a streaming query, unless the table has it, then merge and publish."""
    from lakeupsert.engine.spark_landing import query_of  # only who has a DataFrame has pyspark

    query = query_of(rows)
    if (why := _unfit(table, query)) is not None:
        raise ConfigurationError(
            "not-streamable",
            f"Table {table.name!r} can't take batches of this stream: {why}. Nothing was written.",
            next="docs/SPARK.md lists what a stream needs",
        )
    send_missing(table)  # an earlier try may have died behind its append
    batch_id = f"spark-{query}-{number}"
    if not _is_taken(table, batch_id):
        _append(table, rows, batch_id, f"{FOLDER}/{query}/{number}/{clock.new_id()}/")
    return merge_and_publish(table, DrainOptions(), lambda text: None)[1]


def _unfit(table: OpenTable, query: str | None) -> str | None:
    settings = table.settings
    reasons = {
        "the rows do not come from `foreachBatch`, or Spark Connect runs the query": query is None,
        f"the landing zone {settings.landing} can only be read": not can_commit(settings.landing),
        "`landing_dates` is set": bool(settings.landing_dates),
        f"`format` is {settings.format}": settings.format not in ("auto", "parquet"),
        "`envelope` is set": bool(settings.read.envelope),
    }
    return next((why for why, is_so in reasons.items() if is_so), None)


def _is_taken(table: OpenTable, batch_id: str) -> bool:
    head = table.history.ledger_head()
    return head is not None and any(entry.batch_id == batch_id for entry in table.history.headers(head.number))


def _append(table: OpenTable, rows: "DataFrame", batch_id: str, folder: str) -> None:
    from lakeupsert.engine.spark_landing import land

    landing = open_store(table.settings.landing)
    names = land(rows, landing, folder)
    only = {one.name: one for one in landing.list(folder) if one.name in names}
    try:
        append(table, AppendOptions(batch_id=batch_id, folder=folder, only=only))
    except ConfigurationError as e:
        if e.code != "batch-id-taken":  # else another driver of this query, whose end Spark has not noticed, was faster
            raise
