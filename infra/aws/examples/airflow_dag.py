"""An example: a night as an Airflow DAG, where Airflow already runs your nights. For Airflow 3 with its Amazon provider.

Deploy service.yaml with Schedule=DISABLED and a SparkImage, and set the Airflow variable `lakeupsert` to its outputs as JSON:
    {"stack": "…", "application": "…", "role": "…", "bucket": "…", "queue_url": "…"}
The worker's AWS connection may do what NightRole in step_functions.yaml may; vacuum runs under the profile `lakeupsert-vacuum`
of the worker, which takes the stack's VacuumRole.

    append -> drained -> publish -> vacuum

Each task looks at the table and not at what the one before said, so clearing any of them in the UI is safe.
"""

from datetime import UTC, datetime, timedelta

from airflow.providers.amazon.aws.hooks.sqs import SqsHook
from airflow.providers.amazon.aws.operators.emr import EmrServerlessStartJobOperator
from airflow.providers.amazon.aws.operators.lambda_function import LambdaInvokeFunctionOperator
from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.standard.sensors.python import PythonSensor
from airflow.sdk import DAG
from airflow.timetables.trigger import CronTriggerTimetable

WAITING = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")


def queue_is_empty(queue_url: str) -> bool:
    """As far as SQS tells, which is about; `publish` tells what is true."""
    answer = SqsHook().get_conn().get_queue_attributes(QueueUrl=queue_url, AttributeNames=list(WAITING))
    return all(answer["Attributes"][name] == "0" for name in WAITING)


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
    drained = PythonSensor(
        task_id="drained",
        python_callable=queue_is_empty,
        op_args=["{{ var.json.lakeupsert.queue_url }}"],
        poke_interval=60,
        timeout=6 * 3600,
        mode="reschedule",  # holds no worker while it waits
    )
    publish = LambdaInvokeFunctionOperator(
        task_id="publish", function_name="{{ var.json.lakeupsert.stack }}-reconcile", payload="{}"
    )
    vacuum = BashOperator(
        task_id="vacuum",
        bash_command="lakeupsert vacuum --yes --config s3://{{ var.json.lakeupsert.bucket }}/lakeupsert.toml",
        env={"AWS_PROFILE": "lakeupsert-vacuum"},
        append_env=True,
    )
    append >> drained >> publish >> vacuum
