"""A table's night: in this process, or as a job of EMR Serverless that runs infra/aws/spark/append.py."""

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import boto3
from aws_lambda_powertools import Logger

from lakeupsert import ConfigurationError, Table

ATTEMPTS = 3
"""How often EMR starts a job that fails, from 7.1 on. Append is safe to repeat. More: the alarm of a job that can't succeed comes
later."""

logger = Logger()


def append_or_start(table: Table, night: str) -> dict[str, Any]:
    """The new files and their bytes, and the batch or the job run that has it."""
    files = table.new_files()
    size = sum(f.size for f in files)
    told = {"files": len(files), "bytes": size, "batch": None, "job_run": None}
    if size > int(os.environ["LAKEUPSERT_LOCAL_BYTES"]):
        return {**told, "job_run": start_job(table.name, night, files)}
    warnings: list[str] = []
    batch = table.append(host="local", warn=warnings.append)
    for warning in batch.warnings if batch else warnings:
        logger.warning(warning, extra={"table": table.name})
    return {**told, "batch": batch.number if batch else None}


def start_job(table: str, night: str, files: Sequence[Any]) -> str:
    """The id of a job run on the application that the environment names; of the same night and files it is one run."""
    if "LAKEUPSERT_EMR_APPLICATION" not in os.environ:
        raise ConfigurationError(
            "no-spark",
            f"Table {table!r}: {sum(f.size for f in files):,} bytes are new, more than LAKEUPSERT_LOCAL_BYTES "
            f"({os.environ['LAKEUPSERT_LOCAL_BYTES']}), and there is no Spark application. Nothing was appended.",
            next="deploy with a SparkImage, or raise LocalBytes and Memory; `lakeupsert run` on a machine takes this night",
        )
    said = "\n".join([table, night, *(f"{f.path} {f.etag}" for f in files)])
    answer = boto3.client("emr-serverless").start_job_run(
        applicationId=os.environ["LAKEUPSERT_EMR_APPLICATION"],
        clientToken=hashlib.sha256(said.encode("utf-8", "surrogateescape")).hexdigest(),
        executionRoleArn=os.environ["LAKEUPSERT_EMR_ROLE"],
        jobDriver={
            "sparkSubmit": {
                "entryPoint": os.environ["LAKEUPSERT_EMR_ENTRYPOINT"],
                "entryPointArguments": [os.environ["LAKEUPSERT_CONFIG"], os.environ["POWERTOOLS_SERVICE_NAME"], table],
            }
        },
        name=f"append {table} {night}"[:256],
        retryPolicy={"maxAttempts": ATTEMPTS},
    )
    return str(answer["jobRunId"])
