"""Phase one, by the schedule: a small night is appended here, a large one by Spark.

Reads     an event that may have `night`, any text that tells this night from others; by default the date (UTC)
Writes    what `lakeupsert append` writes, of each table in the order of the file; or starts a job run that will
Answers   of each table how many files and bytes are new, and the batch or the job run (both null: nothing is new)
Repeat    safe: appended files are not new, and of the same night and files one job run is started
"""

import os
from typing import Any

from aws_lambda_powertools import Logger, Metrics
from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.utilities.typing import LambdaContext

from lakeupsert import LakeupsertError, Table, clock
from lambdas.append_nightly.spark import start_job
from lambdas.tables import configured

logger, metrics = Logger(), Metrics(namespace="lakeupsert")


@logger.inject_lambda_context
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    answer, failures = {}, []
    with configured() as tables:
        for table in tables:
            try:
                answer[table.name] = append(table, event.get("night") or str(clock.now().date()))
                logger.info("appended", extra={"table": table.name, **answer[table.name]})
            except LakeupsertError as e:  # the other tables have their night all the same
                failures.append(e)
    if failures:
        raise failures[0]
    return {"tables": answer}


def append(table: Table, night: str) -> dict[str, Any]:
    files = table.new_files()
    size = sum(f.size for f in files)
    told = {"files": len(files), "bytes": size, "batch": None, "job_run": None}
    if size > int(os.environ["LAKEUPSERT_LOCAL_BYTES"]):
        return {**told, "job_run": start_job(table.name, night, files)}  # its end is the job's to tell
    batch = table.append(host="local")
    metrics.add_metric(name="AppendFinished", unit=MetricUnit.Count, value=1)
    metrics.flush_metrics()
    return {**told, "batch": batch.number if batch else None}
