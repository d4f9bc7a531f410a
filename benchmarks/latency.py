"""A night on a store that is far away: 30 ms are added to every request, to S3 and to SQS; do more workers make it shorter?

Reads     nothing; needs the servers that `make servers` gets
Writes    a table in a bucket of versitygw that is gone at the end; prints one line for each number of workers
Repeat    safe

    make bench-latency                                  # or with LATENCY_ARGS="--workers 1 8"

A night is the commands append (host local), dedupe and publish, one after the other, of one table of which every night
touches every partition with a few rows: almost all of its time is waiting. At the end every row is compared with the model.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.harness.lake import Lake, row
from tests.harness.proxy import Rule, fault_proxy
from tests.harness.servers import elasticmq, new_bucket, new_queue, versitygw

PROGRAM = [sys.executable, "-c", "from lakeupsert.cli import main; main()"]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--partitions", type=int, default=365)
    options.add_argument("--milliseconds", type=float, default=30.0)
    given = options.parse_args()
    slow = Rule("delay", seconds=given.milliseconds / 1000)
    with (
        versitygw() as s3,
        elasticmq() as sqs,
        fault_proxy(s3) as to_s3,
        fault_proxy(sqs) as to_sqs,
        tempfile.TemporaryDirectory(prefix="latency-") as folder,
    ):
        os.environ.update({**to_s3.server.env, **to_sqs.server.env})
        new_bucket("lake")
        new_queue("lake")
        lake = Lake(Path(folder), landing="s3://lake/landing", processed="s3://lake/processed", queue="sqs://lake")
        print(
            f"{given.partitions} partitions, {given.milliseconds:g} ms added to every request, {os.cpu_count()} cores"
        )
        print("workers   append   dedupe  publish   seconds  to S3  to SQS  load")
        for night, workers in enumerate([8, *given.workers]):
            rows = [row(k, day, night, night) for day in range(given.partitions) for k in "abc"[night % 2 :]]
            lake.land(f"{night}.jsonl", rows)
            if night:  # the first one makes the table
                to_s3.rules = to_sqs.rules = (slow,)
            before = len(to_s3.log), len(to_sqs.log)
            seconds = [
                _seconds(lake, "append", "--host", "local"),
                _seconds(lake, "dedupe", "--workers", str(workers)),
                _seconds(lake, "publish"),
            ]
            asked = len(to_s3.log) - before[0], len(to_sqs.log) - before[1]
            to_s3.rules = to_sqs.rules = ()
            if night:
                print(
                    f"{workers:7} "
                    + "".join(f"{s:9.1f}" for s in (*seconds, sum(seconds)))
                    + f"{asked[0]:8}{asked[1]:8}"
                    f"{os.getloadavg()[0]:6.1f}",
                    flush=True,
                )
        lake.finish_and_check()
        print("exact")
    return 0


def _seconds(lake: Lake, *command: str) -> float:
    """Of the command itself, in a process of its own."""
    line = [*PROGRAM, "--config", str(lake.configure()), "--json", *command]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    return float(answer["seconds"])


if __name__ == "__main__":
    sys.exit(main())
