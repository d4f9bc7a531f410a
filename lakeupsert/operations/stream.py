"""A batch of a Spark stream becomes one batch of the table, once, by the ids of its query and of itself.

Reads     the ledger; the rows, in Spark's tasks
Writes    landing files in a folder that no other append looks at; then what `append`, `dedupe` and `publish` write
Repeat    safe: the ledger knows the batch by its id, also in other files than before, and when these are gone

    is its id in the ledger? -- no --> landing files -> append with that id --> merge -> publish
                             '- yes -------------------------------------------^
"""

import logging
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

log = logging.getLogger(__name__)

FOLDER = "_spark"
"""The folder of the landing files."""
_done: dict[tuple[str, str], int] = {}
"""The last micro-batch that this process has done, for each table and run of a query. Spark repeats none within a run."""


def take_stream(table: OpenTable, rows: "DataFrame", number: int) -> PublishResult:
    """Append batch ``number`` of a streaming query, unless the table has it, then merge and publish."""
    from lakeupsert.engine.spark_landing import query_of  # only who has a DataFrame has pyspark

    query, run = query_of(rows) or (None, "")
    place = (table.resources.store.uri(), run)
    if (why := _unfit(table, query)) is not None:
        raise _not_streamable(table, f"{why}. Nothing was written")
    if _done.get(place) == number:
        why = f"`foreach_batch` was called before in micro-batch {number}, and these rows would count as its repetition"
        raise _not_streamable(table, f"{why}. None of them was written; unite the frames, and call it once")
    send_missing(table)  # an earlier try may have died behind its append
    batch_id = f"spark-{query}-{number}"
    if not _is_taken(table, batch_id):
        _append(table, rows, batch_id, f"{FOLDER}/{query}/{number}/{clock.new_id()}/")
    published = merge_and_publish(table, DrainOptions(), lambda text: None)[1]
    _done[place] = number
    for partition, reason in published.failed.items():
        log.error(
            "%s: readers do not see the newest rows of %s, which can't be merged: %s", table.name, partition, reason
        )
    stale = [
        f"{name}: {one.problem or 'it is behind'}" for name, one in published.publishers.items() if not one.is_newest
    ]
    for text in (*published.warnings, *stale):
        log.warning("%s: %s", table.name, text)
    return published


def _not_streamable(table: OpenTable, why: str) -> ConfigurationError:
    found = f"Table {table.name!r} can't take batches of this stream: {why}."
    return ConfigurationError("not-streamable", found, next="docs/SPARK.md lists what a stream needs")


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
    if len(only) < len({*names}):
        why = f"the driver finds {len(only)} of the {len({*names})} files that Spark's tasks have written to {landing.uri()}"
        raise _not_streamable(table, f"{why}, as if executors had another disk. No row was appended")
    try:
        appended = append(table, AppendOptions(batch_id=batch_id, folder=folder, only=only))
        refused = appended.entry.rows_quarantined if appended else 0
        quarantined = (f"batch {batch_id}: {refused} rows went to quarantine",) if refused else ()
        for text in (*(appended.warnings if appended else ()), *quarantined):
            log.warning("%s: %s", table.name, text)
    except ConfigurationError as e:
        if e.code != "batch-id-taken":  # else another driver of this query, whose end Spark has not noticed, was faster
            raise
