"""The function `dedupe_worker` in a process of its own: how long until it is ready, and its peak memory on a large partition.

python -m benchmarks.worker_function [--mb 64] [--runs 5]     # needs `make servers`

The partition's base has that many compressed MB; the night brings every hundredth of its keys again. Zones are on versitygw,
the queue in ElasticMQ. The process runs here, with as many threads as processors, and not under Lambda's share of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert import Table, clock
from tests.harness import servers

ROOT = Path(__file__).parents[1]
ARN = "arn:aws:sqs:us-east-1:000000000000:work"
READY = """
import os, sys, time
import lambdas.dedupe_worker.handler
ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
print(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks)
"""
CALL = """
import json, re, sys
from lambdas.dedupe_worker.handler import handler
class Context:
    function_name = invoked_function_arn = aws_request_id = "function"
    memory_limit_in_mb = 3008
    def get_remaining_time_in_millis(self):
        return 900_000
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
before = peak()
answer = handler(json.load(sys.stdin), Context())
assert answer == {"batchItemFailures": []}, answer
print(json.dumps([before, peak()]))
"""


def call(program: str, text: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], input=text, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True
    )
    return done.stdout.splitlines()[-1]


def land(name: str, keys: np.ndarray, stamp: int) -> None:
    """Rows of 64 bytes that do not compress, all of one day."""
    rows = len(keys)
    payload = pa.FixedSizeBinaryArray.from_buffers(pa.binary(64), rows, [None, pa.py_buffer(os.urandom(64 * rows))])
    columns = {
        "id": pa.array(keys),
        "day": pa.repeat(pa.scalar("2020-01-01"), rows),
        "record_timestamp": pa.repeat(pa.scalar(stamp), rows),
        "payload": payload.cast(pa.binary()),
    }
    with tempfile.NamedTemporaryFile() as file:
        pq.write_table(pa.table(columns), file.name)
        boto3.client("s3").upload_file(file.name, "lake", f"landing/{name}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--mb", type=int, default=64)
    options.add_argument("--runs", type=int, default=5)
    given = options.parse_args()
    seconds = [float(call(READY)) for _ in range(given.runs)]
    print(
        f"ready after {statistics.median(seconds):.2f} s (median of {given.runs}; {min(seconds):.2f} to {max(seconds):.2f})"
    )
    with servers.versitygw() as s3, servers.elasticmq() as queue:
        os.environ.update({**s3.env, **queue.env, "LAKEUPSERT_CONFIG": "s3://lake/lakeupsert.toml"})
        sqs = boto3.client("sqs")
        dead = sqs.create_queue(QueueName="dead")["QueueUrl"]
        arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 6})
        url = sqs.create_queue(QueueName="work", Attributes={"RedrivePolicy": policy})["QueueUrl"]
        boto3.client("s3").create_bucket(Bucket="lake")
        text = """[tables.t]
        landing = "s3://lake/landing"
        processed = "s3://lake/processed"
        queue = "sqs://work"
        key = ["id"]
        partition_by = ["day"]
        """
        boto3.client("s3").put_object(Bucket="lake", Key="lakeupsert.toml", Body=text.encode())
        keys = np.arange(given.mb << 14)
        land("1.parquet", keys, 1)
        table = Table.open(os.environ["LAKEUPSERT_CONFIG"])
        table.run(host="local")
        land("2.parquet", keys[::100], 2)
        table.append(host="local")
        base = sum(p.bytes for s in table.snapshots()[:1] for p in s.body.partitions.values())
        [message] = sqs.receive_message(QueueUrl=url, AttributeNames=["All"], WaitTimeSeconds=20)["Messages"]
        record = {"messageId": "1", "receiptHandle": message["ReceiptHandle"], "body": message["Body"]}
        event = {"Records": [{**record, "attributes": message["Attributes"], "eventSourceARN": ARN}]}
        begun = clock.elapsed()
        before, peak = json.loads(call(CALL, json.dumps(event)))
        print(
            f"a base of {base / 1e6:.0f} MB: peak {peak:.0f} MB, {before:.0f} MB of them before the call; "
            f"{clock.elapsed() - begun:.1f} s with the start"
        )
        assert table.status().dirty == 0
        table.close()


if __name__ == "__main__":
    main()
