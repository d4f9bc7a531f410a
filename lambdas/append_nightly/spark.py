"""A night as a job of EMR Serverless: infra/aws/spark/append.py on the application that the environment names."""

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import boto3

from lakeupsert import ConfigurationError


def start_job(table: str, night: str, files: Sequence[Any]) -> str:
    """The id of a run that appends the table's new files. A second call for the same night and files starts none."""
    if "LAKEUPSERT_EMR_APPLICATION" not in os.environ:
        raise ConfigurationError(
            "no-spark",
            f"Table {table!r}: {sum(f.size for f in files):,} bytes are new, more than LAKEUPSERT_LOCAL_BYTES "
            f"({os.environ['LAKEUPSERT_LOCAL_BYTES']}), and there is no Spark application. Nothing was appended.",
            next="deploy with a SparkImage, or raise LocalBytes; `lakeupsert run` on a machine takes this night",
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
    )
    return str(answer["jobRunId"])
