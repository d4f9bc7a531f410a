"""The functions of AWS Lambda, called as its runtime calls them: zones and configuration on versitygw, the queue in ElasticMQ.

The event source is played here: `deliver` receives, calls, and deletes what the answer does not list. EMR Serverless is
moto's, in this process, which keeps the token of a job run and does not act on it.
"""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.emrserverless.models import emrserverless_backends
from moto.moto_server.threaded_moto_server import ThreadedMotoServer

from lakeupsert import ConfigurationError, DamagedTableError, RefusedError, TryAgainError, clock
from lakeupsert.operations import reprocess
from lakeupsert.pipeline.workers import worker
from lakeupsert.queue import Message, QueueStats, SqsQueue
from lakeupsert.storage import s3
from lambdas.append_nightly.night import ATTEMPTS
from tests.harness.damage import damage
from tests.harness.lake import Lake, row
from tests.harness.processes import PATIENCE_SECONDS, wait_until
from tests.harness.proxy import Rule, fault_proxy, refuse
from tests.harness.servers import HOST, Server, free_port

ROOT = Path(__file__).parents[2]
FUNCTIONS = ("append_nightly", "dedupe_worker", "reconcile", "reprocess", "vacuum")
HANDLERS = {name: import_module(f"lambdas.{name}.handler").handler for name in FUNCTIONS}
PLENTY_MILLIS = 900_000
ARN = "arn:aws:sqs:us-east-1:000000000000:"
NIGHTS = [
    [row("a", day, 1, 1) for day in range(12)] + [row("b", 0, 1, 1), row("b", 1, 1, 1)],
    [row("a", day, 2, 2) for day in range(0, 12, 2)] + [row("b", 0, 2, 2, op="D"), row("c", 13, 1, 2)],
]


class Context:
    """What a handler asks of the runtime's context object."""

    function_name = "function"
    memory_limit_in_mb = "3008"  # a string, as the runtime has it
    invoked_function_arn = "arn:aws:lambda:us-east-1:000000000000:function:function"
    aws_request_id = "8f507cfc-1f4c-4e0b-9f5c-6d1f0a9a0001"

    def __init__(self, millis: Callable[[], int] = lambda: PLENTY_MILLIS) -> None:
        self.get_remaining_time_in_millis = millis


def file(function: str, name: str) -> Any:
    return json.loads((ROOT / "lambdas" / function / f"{name}.json").read_text())


def invoke(function: str, event: Any, context: Context | None = None) -> Any:
    return HANDLERS[function](event, context or Context())


RUNTIME = """
import json, os, sys, time
from importlib import import_module
module, _, name = sys.argv[1].rpartition(".")
handler = getattr(import_module(module), name)
ends = time.monotonic() + float(sys.argv[2])
class Context:
    function_name = invoked_function_arn = aws_request_id = "function"
    memory_limit_in_mb = "3008"
    def get_remaining_time_in_millis(self):
        return int(1000 * (ends - time.monotonic()))
answer = handler(json.load(sys.stdin), Context())
unwanted = sorted({"pyspark", "duckdb"} & sys.modules.keys())
print(json.dumps({"answer": answer, "unwanted": unwanted}))
sys.stdout.flush()
os._exit(0)  # as Lambda does: threads that still run are frozen, and nobody waits for them
"""


def invoke_alone(function: str, event: Any, seconds: float = 900, log: list[Any] | None = None) -> Any:
    """In a process of its own, by the name that the image's command has; what it logged is put into ``log``."""
    command = [sys.executable, "-c", RUNTIME, f"lambdas.{function}.handler.handler", str(seconds)]
    done = subprocess.run(command, input=json.dumps(event), capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    *logged, told = map(json.loads, done.stdout.splitlines())
    if log is not None:
        log += logged
    assert told["unwanted"] == []
    return told["answer"]


def fits(found: Any, example: Any) -> bool:
    """Whether it has the example's shape; null is of any."""
    if isinstance(example, dict):
        if "tables" in example:  # by their names
            example = example | {"tables": dict.fromkeys(found["tables"], *example["tables"].values())}
        return found.keys() == example.keys() and all(fits(found[k], v) for k, v in example.items())
    if isinstance(example, list):
        return isinstance(found, list) and all(fits(x, y) for x in found for y in example[:1])
    return None in (found, example) or type(found) is type(example)


@pytest.fixture
def lake(
    versitygw: Server,
    elasticmq: Server,
    new_bucket: Callable[[Server], str],
    new_sqs_queue: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Lake]:
    """Of two tries a message; its first night has landed."""
    bucket = new_bucket(versitygw)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", elasticmq.url)
    zones = {"landing": f"s3://{bucket}/landing", "processed": f"s3://{bucket}/processed"}
    lake = Lake(tmp_path, **zones, queue=f"sqs://{new_sqs_queue(max_receive_count=3)}")
    boto3.client("s3").put_object(Bucket=bucket, Key="lakeupsert.toml", Body=lake.configure().read_bytes())
    monkeypatch.setenv("LAKEUPSERT_CONFIG", f"s3://{bucket}/lakeupsert.toml")
    monkeypatch.setenv("LAKEUPSERT_LOCAL_BYTES", "1000000")
    monkeypatch.setenv("POWERTOOLS_SERVICE_NAME", "sales")
    lake.land("1.jsonl", NIGHTS[0])
    yield lake
    lake.table.close()


@pytest.fixture
def appended(lake: Lake) -> Lake:
    lake.table.append(host="local")
    return lake


def queue_url(lake: Lake) -> str:
    return _url_of(lake.settings.queue.removeprefix("sqs://"))


@cache
def _url_of(name: str) -> str:
    return str(boto3.client("sqs").get_queue_url(QueueName=name)["QueueUrl"])


def receive(lake: Lake, limit: int = 10) -> Any:
    """An event of the messages that are visible now, hidden for as long as the queue says; None where there are none."""
    found = boto3.client("sqs").receive_message(
        QueueUrl=queue_url(lake), MaxNumberOfMessages=limit, WaitTimeSeconds=1, AttributeNames=["All"]
    )
    [example] = file("dedupe_worker", "event")["Records"]
    records = [
        {
            **example,
            "messageId": m["MessageId"],
            "receiptHandle": m["ReceiptHandle"],
            "body": m["Body"],
            "attributes": {k: m["Attributes"][k] for k in example["attributes"]},
            "md5OfBody": m["MD5OfBody"],
            "eventSourceARN": ARN + lake.settings.queue.removeprefix("sqs://"),
        }
        for m in found.get("Messages", ())
    ]
    return {"Records": records} if records else None


def settle(lake: Lake, event: Any, answer: Any) -> list[Any]:
    """What Lambda does with an answer: it deletes what is not listed; the records that are."""
    assert fits(answer, file("dedupe_worker", "answer"))
    listed = {failure["itemIdentifier"] for failure in answer["batchItemFailures"]}
    assert listed <= {r["messageId"] for r in event["Records"]}
    sqs = boto3.client("sqs")
    for record in event["Records"]:
        if record["messageId"] not in listed:
            with suppress(sqs.exceptions.ReceiptHandleIsInvalid):  # ElasticMQ's word for one that is gone; SQS has none
                sqs.delete_message(QueueUrl=queue_url(lake), ReceiptHandle=record["receiptHandle"])
    return [r for r in event["Records"] if r["messageId"] in listed]


def deliver(lake: Lake, call: Callable[..., Any] = invoke) -> int:
    """Call the worker until nothing is visible; how often."""
    calls = 0
    while event := receive(lake):
        settle(lake, event, call("dedupe_worker", event))
        calls += 1
    return calls


def partitions(records: list[Any]) -> list[str]:
    return sorted(json.loads(r["body"])["partition"] for r in records)


def heads(lake: Lake) -> dict[str, Any]:
    lake.reopen()
    touched = {p for _, entry in lake.entries() for p in entry.touched}
    return lake.table.objects.heads(touched)


def dead(lake: Lake) -> list[Any]:
    return lake.table.objects.queue.dead_letters()


# -- a night


@pytest.mark.long
def test_nights_through_the_functions_equal_the_model(lake: Lake) -> None:
    for number, rows in enumerate(NIGHTS, 1):
        if number > 1:
            lake.land(f"{number}.jsonl", rows)
        answer = invoke_alone("append_nightly", file("append_nightly", "event"))
        assert fits(answer, file("append_nightly", "answer"))
        assert (answer["tables"]["t"]["files"], answer["tables"]["t"]["batch"]) == (1, number)
        assert deliver(lake, invoke_alone) == (2 if number == 1 else 1)
        proved = invoke_alone("reconcile", file("reconcile", "event"))
        assert fits(proved, file("reconcile", "answer"))
        assert proved["tables"]["t"]["proof"]
        assert all(p["balanced"] for p in proved["tables"]["t"]["proof"])
        lake.reopen()
        assert lake.rows() == lake.expected(number)
    assert invoke_alone("append_nightly", {})["tables"]["t"] == {"files": 0, "bytes": 0, "batch": None, "job_run": None}
    lake.check()


def test_event_that_is_played_has_the_shape_of_the_file(appended: Lake) -> None:
    event = receive(appended)
    assert len(event["Records"]) == 10
    assert fits(event, file("dedupe_worker", "event"))


# -- append_nightly


def test_append_that_ended_is_measured(lake: Lake) -> None:
    log: list[Any] = []
    invoke_alone("append_nightly", {}, log=log)
    of_table, told = [line for line in log if "_aws" in line]
    [metrics] = told["_aws"]["CloudWatchMetrics"]
    assert (metrics["Namespace"], metrics["Dimensions"]) == ("lakeupsert", [["service"]])
    assert [m["Name"] for m in metrics["Metrics"]] == ["AppendFinished"]
    assert (told["service"], told["AppendFinished"]) == ("sales", [1.0])
    assert (of_table["AppendedRows"], of_table["QuarantinedRows"]) == ([len(NIGHTS[0])], [0.0])


def measured(written: str) -> dict[str, list[float]]:
    """The metrics of table t in what a function wrote, each with its values."""
    found: dict[str, list[float]] = {}
    for line in map(json.loads, written.splitlines()):
        if "_aws" in line and "Table" in line:
            [metrics] = line["_aws"]["CloudWatchMetrics"]
            assert (metrics["Namespace"], metrics["Dimensions"], line["Table"]) == ("lakeupsert", [["Table"]], "t")
            for metric in metrics["Metrics"]:
                assert metric["Unit"] == next((u for u in ("Bytes", "Seconds") if u in metric["Name"]), "Count")
                found.setdefault(metric["Name"], []).extend(line[metric["Name"]])
    return found


def test_merges_are_measured(appended: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    deliver(appended)
    found = measured(capsys.readouterr().out)
    assert found["MergedPartitions"] == [1.0] * 12
    for name in ("MergeSeconds", "ReadBytes", "WrittenBytes"):
        assert len(found[name]) == 12
        assert min(found[name]) > 0
    assert sum(found["WrittenBytes"]) == sum(head.body.bytes for head in heads(appended).values())
    assert "FailedPartitions" not in found


class Later(clock.Source):
    """The day after."""

    def now(self) -> datetime:
        return super().now() + timedelta(hours=30)


@pytest.mark.long
def test_what_is_left_and_how_old_data_are_is_measured(appended: Lake, capsys: pytest.CaptureFixture[str]) -> None:
    invoke("reconcile", {})
    first = measured(capsys.readouterr().out)
    assert (first["DirtyPartitions"], first["FailedPartitions"]) == ([12.0], [0.0])
    deliver(appended)
    capsys.readouterr()
    received = datetime.fromtimestamp(dict(appended.entries())[1].received_at / 1e6, UTC)
    with clock.use(Later()):
        before = clock.now()
        invoke("reconcile", {})
        after = clock.now()
    found = measured(capsys.readouterr().out)
    [age] = found["FreshnessSeconds"]
    assert (before - received).total_seconds() <= age <= (after - received).total_seconds()
    assert found["DirtyPartitions"] == [0.0]


@pytest.mark.long
def test_failed_partitions_are_measured_until_they_are_mended(
    appended: Lake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "RETRY_SECONDS", 0.0)
    small = Context()
    small.memory_limit_in_mb = "150"
    deliver(appended, lambda function, event: invoke(function, event, small))
    assert measured(capsys.readouterr().out) == {"FailedPartitions": [1.0] * 12}
    invoke("reconcile", {})
    assert measured(capsys.readouterr().out)["FailedPartitions"] == [12.0]


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An application of EMR Serverless."""
    port = free_port()
    server = ThreadedMotoServer(HOST, port, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_EMR_SERVERLESS", f"http://{HOST}:{port}")
    emr = boto3.client("emr-serverless", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="s")
    made = emr.create_application(name="sales", releaseLabel="emr-7.0.0", type="SPARK")["applicationId"]
    monkeypatch.setenv("LAKEUPSERT_EMR_APPLICATION", made)
    monkeypatch.setenv("LAKEUPSERT_EMR_ROLE", "arn:aws:iam::123456789012:role/spark")
    monkeypatch.setenv("LAKEUPSERT_EMR_ENTRYPOINT", "s3://lake/code/append.py")
    monkeypatch.setenv("LAKEUPSERT_LOCAL_BYTES", "10")
    yield made
    server.stop()


def test_large_night_is_a_job_run_and_a_repeated_call_the_same(
    lake: Lake, application: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = {"night": "2020-01-01"}
    session, asked = boto3.Session(), []  # moto does not keep how often EMR is to start a job
    session.events.register(
        "provide-client-params.emr-serverless.StartJobRun", lambda params, **_: asked.append(params)
    )
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", session)
    answers = [invoke("append_nightly", event) for _ in range(2)]
    assert fits(answers[0], file("append_nightly", "answer"))
    invoke("append_nightly", {"night": "2020-01-02"})
    lake.land("late.jsonl", NIGHTS[1])
    invoke("append_nightly", event)
    runs = emrserverless_backends["123456789012"]["us-east-1"].job_runs[application]
    same, again, next_night, more_files = [run.client_token for run in runs]
    assert same == again
    assert len({same, next_night, more_files}) == 3
    assert [call["retryPolicy"] for call in asked] == [{"maxAttempts": ATTEMPTS}] * 4
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,64}", run.client_token) for run in runs)
    assert answers[0]["tables"]["t"]["job_run"] == runs[0].id
    assert runs[0].job_driver == {
        "sparkSubmit": {
            "entryPoint": "s3://lake/code/append.py",
            "entryPointArguments": [os.environ["LAKEUPSERT_CONFIG"], "sales", "t"],
        }
    }
    assert not lake.table.exists()


@pytest.mark.core
def test_large_night_that_only_this_function_could_append_is_refused(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKEUPSERT_LOCAL_BYTES", "10")
    with pytest.raises(ConfigurationError, match=r"more than LAKEUPSERT_LOCAL_BYTES \(10\)") as refused:
        invoke("append_nightly", {})
    assert "LocalBytes" in refused.value.next
    assert not lake.table.exists()


def test_table_that_fails_does_not_keep_the_next_from_its_night(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = lake.settings.landing.split("/")[2]
    text = (lake.root / "lakeupsert.toml").read_text()
    other = (
        text.replace("[tables.t", "[tables.first")
        .replace("/processed", "/first")
        .replace(lake.settings.queue, "sqs://another")
    )
    boto3.client("s3").put_object(Bucket=bucket, Key="lakeupsert.toml", Body=(other + text).encode())
    with pytest.raises(ConfigurationError, match="another"):
        invoke("append_nightly", {})
    assert [number for number, entry in lake.entries() if entry.kind == "batch"] == [1]


# -- dedupe_worker


@pytest.mark.core
def test_bad_messages_are_buried_and_the_others_merged(appended: Lake) -> None:
    bodies = [
        '{"v":2,"table":"t","partition":"d=2020-01-01","batch":1}',
        "<html>",
        '{"v":1,"table":"t"}',
        '{"v":1,"table":"unknown","partition":"d=2020-01-01","batch":1}',
        '{"v":1,"table":"s3://elsewhere/t","partition":"d=2020-01-01","batch":1,"work":"s3://elsewhere/work"}',
        '{"v":1,"table":"t","partition":"d=2020-01-01","batch":99}',
    ]
    for body in bodies:
        boto3.client("sqs").send_message(QueueUrl=queue_url(appended), MessageBody=body)
    listed = []
    while event := receive(appended):
        listed += settle(appended, event, invoke("dedupe_worker", event))
    assert listed == []
    letters = dead(appended)
    assert len(letters) == len(bodies)
    assert sum(letter.message is None for letter in letters) == 3
    assert sum("Expected version 1" in letter.reason for letter in letters) == 3
    assert sum("'t' has no such batch" in letter.reason for letter in letters) == 3
    appended.reopen()
    assert appended.rows() == appended.expected(1)


@pytest.mark.long
def test_poison_partition_is_given_back_alone_and_buried_at_its_last_try(
    appended: Lake, versitygw: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "RETRY_SECONDS", 0.0)
    [*_, (_, entry)] = appended.entries()
    poison, touched = next(iter(entry.touched.items()))
    assert versitygw.root is not None
    processed = appended.settings.processed.removeprefix("s3://")
    bucket, _, folder = processed.partition("/")
    pack = versitygw.root / processed / touched.files[0].name

    def put() -> None:
        """What the file has now becomes the object, with a checksum of the store's own: the pack is read as a whole."""
        boto3.client("s3").put_object(Bucket=bucket, Key=f"{folder}/{touched.files[0].name}", Body=pack.read_bytes())

    mend = damage(versitygw.root / processed, touched.files[0])
    put()
    given_back = []
    while event := receive(appended):
        given_back += settle(appended, event, invoke("dedupe_worker", event))
    assert partitions(given_back) == [poison]
    [letter] = dead(appended)
    assert (letter.message.partition, letter.receives) == (poison, 2)
    assert heads(appended)[poison].body.failed.reason == letter.reason
    assert sum(head.body.merged for head in heads(appended).values()) == len(entry.touched) - 1
    told = invoke("reconcile", {})
    assert (told["waiting"], told["failed"], told["queued"]) == (12, 1, 0)
    mend()
    put()
    appended.table.redrive()
    told = invoke("reconcile", {})
    assert (told["waiting"], told["failed"], told["queued"]) == (12, 1, 1)
    deliver(appended)
    appended.check()
    assert appended.rows() == appended.expected(1)


def test_time_that_is_up_gives_the_rest_back_at_once(appended: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    queue, event = appended.opened.resources.queue, receive(appended)

    def millis() -> int:
        return PLENTY_MILLIS if queue.stats().leased == 10 else 0  # up as soon as one is done

    listed = partitions(settle(appended, event, invoke("dedupe_worker", event, Context(millis))))
    assert queue.stats() == QueueStats(
        visible=2 + 9, leased=0, dead=0
    )  # the queue itself hides for a quarter of an hour
    again: list[Any] = []
    while more := receive(appended):
        again += more["Records"]
    assert len(again) == 2 + 9
    assert listed == []  # another message took the place of each
    assert {r["attributes"]["ApproximateReceiveCount"] for r in again} == {"1"}  # nobody had begun them
    assert invoke("dedupe_worker", {"Records": again}) == {"batchItemFailures": []}
    appended.reopen()
    appended.check()
    assert appended.rows() == appended.expected(1)


def test_tries_are_used_up_where_nothing_is_ever_begun(appended: Lake) -> None:
    event = receive(appended)
    listed = settle(appended, event, invoke("dedupe_worker", event, Context(lambda: 0)))
    assert partitions(listed) == partitions(event["Records"])
    again = [record for _ in range(2) for record in receive(appended)["Records"]]
    assert sorted(r["attributes"]["ApproximateReceiveCount"] for r in again) == ["1"] * 2 + ["2"] * 10


def test_merge_that_takes_too_long_is_given_back_while_it_runs(
    appended: Lake, versitygw: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    [*_, (_, entry)] = appended.entries()
    slow = next(iter(entry.touched))
    event = receive(appended)
    assert slow in partitions(event["Records"])
    with (
        monkeypatch.context() as patch,
        fault_proxy(versitygw, Rule("delay", "PUT", f"{slow}/base-", seconds=3600)) as proxy,
    ):
        patch.setenv("AWS_ENDPOINT_URL", proxy.server.url)
        answer = invoke_alone("dedupe_worker", event, seconds=15 + 5)
    assert slow in partitions(settle(appended, event, answer))
    visible = []
    while event := receive(appended):
        visible += event["Records"]
    assert slow in partitions([r for r in visible if r["attributes"]["ApproximateReceiveCount"] == "2"])


LEASE_SECONDS = 3
HASTY = f"import lakeupsert.pipeline.workers.drain_queues as d; d.LEASE_SECONDS = {LEASE_SECONDS}"


@pytest.mark.long
def test_messages_of_a_killed_function_come_back_long_before_the_queue_shows_them(
    appended: Lake, versitygw: Server, elasticmq: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writes are held, so it extends all ten beyond its lease, until it is killed."""
    queue, event = appended.opened.resources.queue, receive(appended)
    assert SqsQueue(appended.settings.queue.removeprefix("sqs://")).visibility_seconds() > 100 * LEASE_SECONDS
    extends = Rule("delay", path="ChangeMessageVisibility", seconds=0.0)
    with (
        monkeypatch.context() as patch,
        fault_proxy(versitygw, Rule("hold", "PUT", "/base-")) as store,
        fault_proxy(elasticmq, extends) as queues,
    ):
        patch.setenv("AWS_ENDPOINT_URL", store.server.url)
        patch.setenv("AWS_ENDPOINT_URL_SQS", queues.server.url)
        command = [sys.executable, "-c", HASTY + RUNTIME, "lambdas.dedupe_worker.handler.handler", "900"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT
        ) as function:
            assert function.stdin is not None
            try:
                json.dump(event, function.stdin)
                function.stdin.close()
                assert store.holds.wait(PATIENCE_SECONDS)
                # once at its start, then every third of the lease
                wait_until(lambda: queues.struck("delay") >= 10 * (1 + 2 * 3), "all were extended beyond their lease")
                assert queue.stats() == QueueStats(visible=2, leased=10, dead=0)
            finally:
                function.kill()
        store.go()
    wait_until(lambda: queue.stats() == QueueStats(visible=12, leased=0, dead=0), "all are visible again")
    deliver(appended)
    appended.reopen()
    appended.check()
    assert appended.rows() == appended.expected(1)


@pytest.mark.long
def test_messages_come_back_later_where_the_store_is_away(
    appended: Lake, versitygw: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "AWAY_SECONDS", 1.0)
    monkeypatch.setattr(s3, "REFUSED_ATTEMPTS", 1)
    event = receive(appended)
    with monkeypatch.context() as patch, fault_proxy(versitygw, refuse(503, "SlowDown", "PUT")) as proxy:
        patch.setenv("AWS_ENDPOINT_URL", proxy.server.url)
        with pytest.raises(TryAgainError):
            invoke("dedupe_worker", event)
    assert not any(h.body.merged for h in heads(appended).values())
    wait_until(lambda: appended.table.objects.queue.stats().visible == 12, "all are visible again")
    assert deliver(appended) == 2
    assert appended.rows() == appended.expected(1)


def test_messages_that_were_received_often_come_last_and_alone(appended: Lake) -> None:
    event = receive(appended)
    suspicious = event["Records"][0]
    suspicious["attributes"]["ApproximateReceiveCount"] = str(3)
    # two tries: the third is for workers that die, and tells of it
    settle(appended, event, invoke("dedupe_worker", event))
    found = {p: head for p, head in heads(appended).items() if p in partitions(event["Records"])}
    assert len(found) == 10
    last = max(found, key=lambda p: found[p].written_at)
    assert [last] == partitions([suspicious])
    assert found[last].body.failed.reason == worker.UNANSWERED


@pytest.mark.long
def test_partition_that_needs_more_memory_than_the_function_has_is_not_begun(
    appended: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "RETRY_SECONDS", 0.0)
    small = Context()
    small.memory_limit_in_mb = "150"  # as much as Python, Arrow and boto3 take
    deliver(appended, lambda function, event: invoke(function, event, small))
    found = heads(appended)
    assert len(found) == 12
    reasons = [head.body.failed.reason for head in found.values()]
    assert all("MB of memory" in reason and "0 MB" in reason and "--engine spark" in reason for reason in reasons)


def test_event_of_a_queue_of_no_table_is_refused_and_left_alone(appended: Lake) -> None:
    event = receive(appended)
    for record in event["Records"]:
        record["eventSourceARN"] = ARN + "another"
    with pytest.raises(ConfigurationError, match="another") as refused:
        invoke("dedupe_worker", event)
    assert refused.value.code == "no-table-of-queue"
    assert appended.table.objects.queue.stats().leased == 10


@pytest.mark.core
def test_who_merges_the_last_partition_publishes_whatever_the_queue_counts(appended: Lake) -> None:
    queue, events = appended.opened.resources.queue, [receive(appended) for _ in range(2)]
    queue.send([Message.decode(events[0]["Records"][0]["body"])])
    assert queue.receive(1, 3600)
    for event, published in zip(events, (0, 1), strict=True):
        invoke("dedupe_worker", event)
        assert appended.table.status().batch == published
    assert queue.stats() == QueueStats(visible=0, leased=1, dead=0)


@pytest.mark.long
def test_damaged_partition_fails_no_call_that_merged_others(appended: Lake) -> None:
    deliver(appended)
    appended.land("2.jsonl", NIGHTS[1])
    appended.table.append(host="local")
    event = receive(appended)
    [*_, (_, entry)] = appended.entries()
    damaged = list(entry.touched)[-2]  # the last one is new
    event["Records"] = [r for r in event["Records"] if partitions([r]) != [damaged]]
    head = heads(appended)[damaged]
    chain = appended.opened.history.objects.partition(damaged)
    bucket, client = appended.settings.landing.split("/")[2], boto3.client("s3")
    client.put_object(Bucket=bucket, Key=f"processed/{chain.name(head.number)}", Body=b"{")
    assert invoke("dedupe_worker", event) == {"batchItemFailures": []}
    with pytest.raises(DamagedTableError, match=damaged.partition("=")[2]):
        invoke("reconcile", {})


def test_worker_that_has_no_time_left_to_publish_leaves_it_to_reconcile(appended: Lake) -> None:
    for _ in range(2):
        invoke("dedupe_worker", receive(appended), Context(lambda: 19_000))
    assert appended.table.status().batch == 0
    invoke("reconcile", {})
    assert appended.table.status().batch == 1


# -- reconcile


def test_reconcile_sends_what_got_lost_and_publishes_without_reading_data(appended: Lake) -> None:
    boto3.client("sqs").purge_queue(QueueUrl=queue_url(appended))
    first = invoke("reconcile", {})
    assert first["waiting"] == 12
    told = {"resent": 12, "published": 0, "waiting": 12, "failed": 0, "queued": 12, "proof": []}  # a table without rows
    assert first["tables"]["t"] == told
    appended.reopen()
    appended.table.dedupe()
    second = invoke("reconcile", {})
    assert fits(second, file("reconcile", "answer"))
    told = {"resent": 0, "published": 1, "waiting": 0, "failed": 0, "queued": 0, "proof": []}
    assert second["tables"]["t"] == told
    appended.reopen()
    assert appended.rows() == appended.expected(1)


def test_reconcile_fails_where_rows_are_missing(appended: Lake) -> None:
    deliver(appended)
    first, *_, last = [found.name for found in appended.table.objects.store.list("d=")]
    bucket, client = appended.settings.landing.split("/")[2], boto3.client("s3")
    other = client.get_object(Bucket=bucket, Key=f"processed/{last}")["Body"].read()
    client.put_object(Bucket=bucket, Key=f"processed/{first}", Body=other)
    assert invoke("reconcile", {})["tables"]["t"]["waiting"] == 0
    with pytest.raises(RefusedError, match=first.partition("/")[0]) as wrong:
        invoke("reconcile", {"prove": True})
    assert wrong.value.code == "not-balanced"


def test_reconcile_before_the_first_night_has_nothing_to_tell(lake: Lake) -> None:
    assert invoke("reconcile", {}) == {"waiting": 0, "failed": 0, "queued": 0, "tables": {}}


# -- reprocess


@pytest.mark.few(1)
@pytest.mark.parametrize("source", ["stored", "landing"])
def test_reprocess_waits_for_the_workers_and_publishes(
    appended: Lake, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(appended)
    before = {p: head.number for p, head in heads(appended).items()}
    monkeypatch.setattr(reprocess, "OTHERS_SECONDS", 0.05)
    event = {**file("reprocess", "event"), "table": "t", "to": "2020-01-03", "source": source}
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(invoke("reprocess", event)))
    asking.start()
    while asking.is_alive():
        deliver(appended)
    [answer] = answers
    assert fits(answer, file("reprocess", "answer"))
    assert answer["partitions"] == ["d=2020-01-01", "d=2020-01-02", "d=2020-01-03"]
    assert answer["left"] == []
    after = {p: head.number for p, head in heads(appended).items()}
    assert {p for p in after if after[p] > before[p]} == set(answer["partitions"])
    snapshot = appended.table.snapshots()[0]
    assert snapshot.number == answer["snapshot"]
    assert {p: shown.version for p, shown in snapshot.body.partitions.items()} == after
    appended.check()


@pytest.mark.long
def test_reprocess_whose_time_is_up_tells_what_is_left(appended: Lake) -> None:
    deliver(appended)
    event = {**file("reprocess", "event"), "table": "t", "to": "2020-01-03"}
    answer = invoke("reprocess", event, Context(lambda: 0))
    assert answer["left"] == answer["partitions"] == ["d=2020-01-01", "d=2020-01-02", "d=2020-01-03"]
    deliver(appended)
    appended.check()


def test_reprocess_of_an_unknown_table_names_those_that_are(lake: Lake) -> None:
    with pytest.raises(ConfigurationError, match=r"no table 'sales'.* It has t"):
        invoke("reprocess", file("reprocess", "event"))


# -- vacuum


def test_vacuum_deletes_what_no_snapshot_needs_and_needs_no_table(lake: Lake) -> None:
    assert invoke("vacuum", file("vacuum", "event")) == {"tables": {}}
    leftover = lake.opened.resources.store
    invoke("append_nightly", {})
    deliver(lake)
    with leftover.write("d=2020-01-01/base-0-nobody.parquet") as sink:
        sink.write(b"x")
    names = {found.name for found in leftover.list("")}
    answer = invoke("vacuum", file("vacuum", "event"))
    assert fits(answer, file("vacuum", "answer"))
    left = {found.name for found in leftover.list("")}
    assert answer["tables"]["t"]["deleted"] == len(names - left)
    lake.reopen()
    lake.check()
    assert lake.rows() == lake.expected(1)
