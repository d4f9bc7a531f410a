"""Phase one, by the schedule: a small night is appended here, a large one by Spark.

Reads     an event that may have `night`, any text that no other night has; by default the date (UTC)
Writes    what `lakeupsert append` writes, of each table in the order of the file; or starts a job run that will
Answers   of each table how many files and bytes are new, and the batch or the job run (both null: nothing is new)
Repeat    safe: appended files are not new, and of the same night and files one job run is started
"""

from typing import Any

from aws_lambda_powertools import Logger, Metrics
from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.utilities.typing import LambdaContext

from lakeupsert import LakeupsertError, clock
from lambdas.append_nightly.night import append_or_start
from lambdas.metrics import NAMESPACE, measured
from lambdas.tables import configured

logger, metrics = Logger(), Metrics(namespace=NAMESPACE)


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    answer, failures = {}, []
    with configured() as tables:
        for table in tables:
            try:
                with measured(table):
                    told = append_or_start(table, event.get("night") or str(clock.now().date()))
                answer[table.name] = told
                logger.info("appended", extra={"table": table.name, **told})
                if not told["job_run"]:  # else it is the job that tells when it ended
                    metrics.add_metric(name="AppendFinished", unit=MetricUnit.Count, value=1)
                    metrics.flush_metrics()
            except LakeupsertError as e:  # the other tables have their night all the same
                failures.append(e)
    if failures:
        raise failures[0]
    return {"tables": answer}
