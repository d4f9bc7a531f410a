"""Phase one as a job of EMR Serverless: append what is new, then tell CloudWatch that the night's append ended, and its rows.

Called with the configuration's address, the stack's name and, where there are several, the table's. Safe to repeat, as
`append` is. A job that fails tells nothing, so the alarm on nights that are missing covers it. A job that can't reach
CloudWatch has appended all the same: that is a warning in its log, and the alarm says the rest.
"""

import sys

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from lakeupsert import Table


def main(config: str, stack: str, table: str | None = None) -> None:
    warnings: list[str] = []
    opened = Table.open(config, table)
    result = opened.append(host="spark", warn=warnings.append)
    for warning in result.warnings if result else warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print("nothing new" if result is None else f"batch {result.number}")
    figures = [("AppendFinished", 1, "service", stack)]
    if result is not None:
        figures += [
            ("AppendedRows", result.entry.rows_appended, "Table", opened.name),
            ("QuarantinedRows", result.entry.rows_quarantined, "Table", opened.name),
        ]
    try:
        boto3.client("cloudwatch", config=Config(connect_timeout=5)).put_metric_data(
            Namespace="lakeupsert",
            MetricData=[
                {"MetricName": metric, "Value": figure, "Dimensions": [{"Name": by, "Value": name}]}
                for metric, figure, by, name in figures
            ],
        )
    except (BotoCoreError, ClientError) as e:
        print(f"warning: the append ended, but its metric AppendFinished was not sent: {e}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
