"""Phase one as a job of EMR Serverless: append what is new, then tell CloudWatch that the night's append ended, and its rows.

Called with the configuration's address, the stack's name and, where there are several, the table's. Safe to repeat, as
`append` is. A job that fails tells nothing, so the alarm on nights that are missing covers it.
"""

import sys

import boto3

from lakeupsert import Table


def main(config: str, stack: str, table: str | None = None) -> None:
    opened = Table.open(config, table)
    result = opened.append(host="spark")
    print("nothing new" if result is None else f"batch {result.number}")
    of_stack, of_table = ([{"Name": n, "Value": v}] for n, v in (("service", stack), ("Table", opened.name)))
    metrics = [{"MetricName": "AppendFinished", "Value": 1, "Dimensions": of_stack}]
    if result is not None:  # as `lambdas/metrics.py` does for nights that a function appends
        rows = {"AppendedRows": result.entry.rows_appended, "QuarantinedRows": result.entry.rows_quarantined}
        metrics += [{"MetricName": n, "Value": v, "Unit": "Count", "Dimensions": of_table} for n, v in rows.items()]
    boto3.client("cloudwatch").put_metric_data(Namespace="lakeupsert", MetricData=metrics)


if __name__ == "__main__":
    main(*sys.argv[1:])
