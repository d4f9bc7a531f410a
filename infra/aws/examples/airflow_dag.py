"""An example: a night as an Airflow DAG, where Airflow already runs your nights. For Airflow 3 with its Amazon provider.

Deploy service.yaml with Schedule=DISABLED and a SparkImage, and set the Airflow variable `lakeupsert` to its outputs as JSON:
    {"stack": "…", "application": "…", "role": "…", "bucket": "…"}
The worker's AWS connection may do what NightRole in step_functions.yaml may; vacuum runs under the profile `lakeupsert-vacuum`
of the worker, which takes the stack's VacuumRole.

    append -> published -> vacuum

Each task looks at the table and not at what the one before said, so clearing any of them in the UI is safe.
"""

import json
from datetime import UTC, datetime, timedelta

from airflow.providers.amazon.aws.hooks.lambda_function import LambdaHook
from airflow.providers.amazon.aws.operators.emr import EmrServerlessStartJobOperator
from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.standard.sensors.python import PythonSensor
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowException
from airflow.timetables.trigger import CronTriggerTimetable
from botocore.config import Config


def is_published(function: str) -> bool:
    """Have lost messages sent again and what is whole published, and tell whether that is all of it."""
    # The function may take its 15 minutes, and is not to be called again meanwhile.
    hook = LambdaHook(config=Config(read_timeout=900, retries={"total_max_attempts": 1}))
    answer = hook.invoke_lambda(function_name=function, payload="{}")
    told = json.loads(answer["Payload"].read())
    if "FunctionError" in answer:
        raise AirflowException(f"{function}: {told}")
    # What failed in an earlier night, and is tried again in this one, counts as failed until it is merged. SQS counts what
    # the append sent only after a while; so this is no AirflowFailException, and the retries look again.
    if told["failed"] and not told["queued"]:
        raise AirflowException(f"{told['failed']} partitions failed. `lakeupsert status` tells why and what mends it.")
    return bool(told["waiting"] == 0)


with DAG(
    dag_id="lakeupsert_night",
    schedule=CronTriggerTimetable("0 2 * * *", timezone="America/New_York"),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,  # one run takes whatever no batch took yet, also of nights that were missed
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=1)},
) as dag:
    append = EmrServerlessStartJobOperator(
        task_id="append",
        retries=0,  # EMR starts a failed job again itself
        config={"retryPolicy": {"maxAttempts": 3}},
        application_id="{{ var.json.lakeupsert.application }}",
        execution_role_arn="{{ var.json.lakeupsert.role }}",
        job_driver={
            "sparkSubmit": {
                "entryPoint": "s3://{{ var.json.lakeupsert.bucket }}/code/append.py",
                "entryPointArguments": [
                    "s3://{{ var.json.lakeupsert.bucket }}/lakeupsert.toml",
                    "{{ var.json.lakeupsert.stack }}",
                ],
            }
        },
    )
    published = PythonSensor(
        task_id="published",
        python_callable=is_published,
        op_args=["{{ var.json.lakeupsert.stack }}-reconcile"],
        poke_interval=300,
        timeout=6 * 3600,
        mode="reschedule",  # holds no worker while it waits
    )
    vacuum = BashOperator(
        task_id="vacuum",
        bash_command="lakeupsert vacuum --yes --config s3://{{ var.json.lakeupsert.bucket }}/lakeupsert.toml",
        env={"AWS_PROFILE": "lakeupsert-vacuum"},
        append_env=True,
    )
    append >> published >> vacuum
