"""Phase one as a job of EMR Serverless: append what is new, then tell CloudWatch that the night's append ended.

Called with the configuration's address, the stack's name and, where there are several, the table's. Safe to repeat, as
`append` is. A job that fails tells nothing, so the alarm on nights that are missing covers it.
"""

import sys

import boto3

from lakeupsert import Table


def main(config: str, stack: str, table: str | None = None) -> None:
    result = Table.open(config, table).append(host="spark")
    print("nothing new" if result is None else f"batch {result.number}")
    boto3.client("cloudwatch").put_metric_data(
        Namespace="lakeupsert",
        MetricData=[{"MetricName": "AppendFinished", "Value": 1, "Dimensions": [{"Name": "service", "Value": stack}]}],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
