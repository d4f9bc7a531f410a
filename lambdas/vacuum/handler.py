"""By a schedule: expire old snapshots and delete what nobody needs, with the one role that may delete.

Reads     an event; nothing in it
Writes    what `lakeupsert vacuum --yes` writes
Answers   of each table how many snapshots expired, and how many files and bytes it deleted
Repeat    safe: a call that ran out of time is finished by the next
"""

from typing import Any

from aws_lambda_powertools import Logger
from aws_lambda_powertools.utilities.typing import LambdaContext

from lambdas.tables import configured

logger = Logger()


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    answer = {}
    with configured() as tables:
        for table in (t for t in tables if t.exists()):
            done = table.vacuum(dry=False)
            told = {"expired": len(done.expired), "deleted": len(done.garbage), "bytes": done.bytes}
            logger.info("vacuumed", extra={"table": table.name, **told})
            answer[table.name] = told
    return {"tables": answer}
