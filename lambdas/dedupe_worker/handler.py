"""Phase two, fed by the queue: merge the partitions that the messages name.

Reads     an event of the SQS source: up to ten messages of one table's queue
Writes    what `lakeupsert worker` writes; publishes where no partition is left to merge
Answers   the messages that it gave back, which Lambda must not delete; it has answered all of them itself
Repeat    safe
"""

import os
from typing import Any

from aws_lambda_powertools import Logger
from aws_lambda_powertools.utilities.typing import LambdaContext

from lambdas.metrics import measured
from lambdas.tables import of_queue

MARGIN_SECONDS = 15.0
"""Unfinished work goes back to the queue so long before the function's time is up. Longer: less time to merge. Too short: the
function is killed first, and its messages stay hidden for two minutes (`lakeupsert.retries.LEASE_SECONDS`)."""

logger = Logger()


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    def seconds_left() -> float:
        return context.get_remaining_time_in_millis() / 1000 - MARGIN_SECONDS

    records = event["Records"]
    with of_queue(records[0]["eventSourceARN"]) as table, measured(table):
        back = table.dedupe_received(
            records,
            workers=os.cpu_count() or 1,
            memory_bytes=int(context.memory_limit_in_mb) << 20,  # the runtime gives a string, whatever its type says
            seconds_left=seconds_left,
        )
    logger.info("messages answered", extra={"table": table.name, "received": len(records), "given_back": len(back)})
    # Without an answer Lambda would delete these too, and a listed one alone stays hidden: so they are both.
    return {"batchItemFailures": [{"itemIdentifier": record["messageId"]} for record in back]}
