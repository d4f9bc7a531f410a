"""By a schedule: send messages that got lost, mark what died, publish what is whole; on request, prove it.

Reads     an event that may have `"prove": true`
Writes    what `lakeupsert reconcile` writes. The proof reads keys and order of every row, so the schedule asks for none
Answers   how many partitions readers don't see up to date yet (`waiting`), how many of them `failed`, and how many messages
          are on their way (`queued`). The night is through where none waits; it failed where some failed and nothing is
          queued, as a failed one may be under way again, after the next append or a redrive. And of each table what
          `lakeupsert reconcile --json` reports, with the proof where asked for
Repeat    safe
"""

from collections import Counter
from dataclasses import asdict
from typing import Any

from aws_lambda_powertools import Logger
from aws_lambda_powertools.utilities.typing import LambdaContext

from lakeupsert import RefusedError
from lambdas.metrics import measured
from lambdas.tables import configured

logger = Logger()


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    totals, answer, wrong = Counter(waiting=0, failed=0, queued=0), {}, []
    with configured() as tables:
        for table in (t for t in tables if t.exists()):
            with measured(table) as metrics:
                found = table.reconcile(counted=event.get("prove", False))
                metrics.add_state(table.status())
            publish = found.publish
            state = {"waiting": len(publish.waiting), "failed": len(publish.failed), "queued": found.queued}
            told = {"resent": found.resent, "published": found.published, **state}
            totals.update(state)
            logger.info("reconciled", extra={"table": table.name, **told})
            answer[table.name] = {**told, "proof": [{**asdict(p), "balanced": p.balanced} for p in found.proof]}
            wrong += [*found.batches, *(f"{table.name}: {p.partition}: {p.difference}" for p in found.unbalanced)]
    if wrong:
        raise RefusedError("not-balanced", f"{wrong}", next="run `lakeupsert reconcile`, which says what mends it")
    return {**totals, "tables": answer}
