"""Called by hand: rewrite the partitions of a range of dates; the rows stay.

Reads     an event with `table`, `from`, `to` (inclusive), and `source`: stored (default) or landing
Writes    what `lakeupsert reprocess` writes; the workers merge. It waits for them until its time is up, then publishes
Answers   what was asked for, and `left`: partitions that no worker had written by then. Choose ranges that fit
Repeat    safe, and does all of it again
"""

import os
import threading
from contextlib import closing
from typing import Any

from aws_lambda_powertools import Logger
from aws_lambda_powertools.utilities.typing import LambdaContext

from lakeupsert import Table
from lakeupsert.cli.options import PartitionChoice
from lakeupsert.pipeline.stop import Stop
from lambdas.metrics import measured

PUBLISH_SECONDS = 60.0
"""Kept of the function's time, to publish."""

logger = Logger()


@logger.inject_lambda_context(log_event=True)
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    stop = Stop()
    timer = threading.Timer(context.get_remaining_time_in_millis() / 1000 - PUBLISH_SECONDS, stop.set)
    timer.daemon = True  # nobody waits for it where the work is done before
    timer.start()
    with closing(Table.open(os.environ["LAKEUPSERT_CONFIG"], event["table"])) as table, measured(table):
        selected = PartitionChoice(event["from"], event["to"]).of(table)
        done = table.reprocess(selected, source=event.get("source", "stored"), host="local", workers=0, stop=stop)
    answer = {"table": table.name, "partitions": list(done.plan.heads), "left": list(done.left)}
    return {**answer, "snapshot": done.publish.snapshot if done.publish else None}
