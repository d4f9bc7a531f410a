"""What goes wrong with S3 and SQS, as the command line says it; afterwards the next run makes the table exact.

What every single call makes of every answer stands in tests/contract; messages of others, in test_sqs.py.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.testing.lake import Lake, row
from lakeupsert.testing.proxy import FaultProxy, Rule, fault_proxy, refuse
from lakeupsert.testing.servers import Server

PAGE = Rule("answer", body=b"<html><body>Log in to the hotel's network</body></html>", content_type="text/html")
NIGHTS = [[row(k, day, night, night) for day in range(3) for k in "ab"] for night in range(2)]


@dataclass
class Cloud:
    """A table on S3 and SQS, with one published night and another one landed, and the proxies in front of them."""

    lake: Lake
    s3: FaultProxy
    sqs: FaultProxy

    def call(self, *command: str, code: int) -> Any:
        result = CliRunner().invoke(main, [*command, "--config", str(self.lake.configure()), "--json"])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    def run(self, code: int = 0) -> Any:
        return self.call("run", "--host", "local", "--workers", "1", code=code)["error"]

    def appended(self) -> bool:
        """Whether the second night was committed."""
        self.s3.rules = self.sqs.rules = ()
        self.lake.reopen()
        return len(self.lake.entries()) > 2

    def check_the_next_run(self) -> None:
        """Readers see the first night, whole; then a run finishes, and nothing counts twice."""
        assert self.lake.rows() == self.lake.expected(1)
        self.lake.check()
        self.run()
        self.lake.reopen()
        self.lake.check()
        assert self.lake.rows() == self.lake.expected(2)
        assert [number for number, entry in self.lake.entries() if entry.kind == "batch"] == [1, 2]


@pytest.fixture
def cloud(
    moto: Server,
    elasticmq: Server,
    tmp_path: Path,
    new_bucket: Callable[[Server], str],
    new_sqs_queue: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Cloud]:
    with fault_proxy(moto) as s3, fault_proxy(elasticmq) as sqs:
        bucket = new_bucket(s3.server)
        for name, value in sqs.server.env.items():
            monkeypatch.setenv(name, value)
        zones = {zone: f"s3://{bucket}/{zone}" for zone in ("landing", "processed")}
        lake = Lake(tmp_path, **zones, queue=f"sqs://{new_sqs_queue()}")
        lake.land("0.jsonl", NIGHTS[0])
        lake.run()
        lake.land("1.jsonl", NIGHTS[1])
        lake.table.close()
        yield Cloud(lake, s3, sqs)
        lake.table.close()


@pytest.mark.parametrize(
    ("rule", "code", "error", "told"),
    [
        pytest.param(refuse(403, "AccessDenied", "GET", "list-type"), 2, "not-permitted", "s3:ListBucket", id="list"),
        pytest.param(refuse(403, "AccessDenied", "GET", "/[a-z]+/.+/"), 2, "not-permitted", "s3:GetObject", id="get"),
        pytest.param(refuse(403, "AccessDenied", "PUT"), 2, "not-permitted", "s3:PutObject", id="put"),
        pytest.param(refuse(403, "ExpiredToken"), 2, "bad-credentials", "renew", id="expired token"),
        pytest.param(refuse(403, "ExpiredToken", "PUT"), 2, "bad-credentials", "renew", id="token expires meanwhile"),
        pytest.param(Rule("strip", header="if-none-match"), 2, "conditions-ignored", "conditions", id="no conditions"),
        pytest.param(PAGE, 75, "store-unreachable", "endpoint", id="web page"),
        pytest.param(refuse(503, "SlowDown"), 75, "store-unreachable", "again", id="503 storm"),
        pytest.param(refuse(503, "SlowDown", "PUT"), 75, "store-unreachable", "again", id="503 storm on writes"),
    ],
)
def test_run_says_what_is_wrong_with_s3(cloud: Cloud, rule: Rule, code: int, error: str, told: str) -> None:
    cloud.s3.rules = (rule,)
    found = cloud.run(code)
    assert (found["code"], found["data_changed"]) == (error, cloud.appended())
    assert told in found["next"]
    cloud.check_the_next_run()


def test_doctor_says_that_deletes_are_not_permitted(cloud: Cloud) -> None:
    cloud.s3.rules = (refuse(403, "AccessDenied", "POST", "delete"),)
    answer = cloud.call("doctor", code=2)
    assert "s3:DeleteObject" in json.dumps(answer)
    assert not cloud.appended()
    cloud.check_the_next_run()


@pytest.mark.parametrize(
    "operation", ["GetQueueUrl", "GetQueueAttributes", "SendMessage", "ReceiveMessage", "DeleteMessage"]
)
def test_run_says_which_permission_of_the_queue_is_missing(cloud: Cloud, operation: str) -> None:
    denied = json.dumps({"__type": "com.amazonaws.sqs#AccessDeniedException", "message": "no"}).encode()
    cloud.sqs.rules = (
        Rule("answer", path=operation, status=400, body=denied, content_type="application/x-amz-json-1.0"),
    )
    found = cloud.run(2)
    assert (found["code"], found["data_changed"]) == ("queue-not-permitted", cloud.appended())
    assert f"`sqs:{operation}`" in found["next"]
    cloud.check_the_next_run()


@pytest.mark.parametrize(
    ("rule", "code", "error"),
    [
        pytest.param(PAGE, 2, "queue-unusable", id="web page"),
        pytest.param(Rule("answer", status=503), 75, "queue-busy", id="503 storm"),
        pytest.param(Rule("lose"), 75, "queue-unreachable", id="no answer"),
    ],
)
def test_run_says_what_is_wrong_with_sqs(cloud: Cloud, rule: Rule, code: int, error: str) -> None:
    cloud.sqs.rules = (rule,)
    found = cloud.run(code)
    assert (found["code"], found["data_changed"]) == (error, cloud.appended())
    cloud.check_the_next_run()


def test_bucket_and_queue_that_are_not_there_are_named(cloud: Cloud) -> None:
    for setting, address, error in (
        ("landing", "s3://no-such-bucket/landing", "no-bucket"),
        ("processed", "s3://no-such-bucket/processed", "no-bucket"),
        ("queue", "sqs://no-such-queue", "no-such-queue"),
    ):
        path = cloud.lake.configure(**{setting: address})
        result = CliRunner().invoke(main, ["run", "--host", "local", "--config", str(path), "--json"])
        assert result.exit_code == 2, result.output
        found = json.loads(result.stdout)["error"]
        assert found["code"] == error
        assert "no-such-" in found["message"]
    cloud.check_the_next_run()


def test_wrong_credentials_are_named(
    versitygw: Server, new_bucket: Callable[[Server], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = new_bucket(versitygw)
    lake = Lake(
        tmp_path, landing=f"s3://{bucket}/l", processed=f"s3://{bucket}/p", queue=str(tmp_path / "queue.sqlite")
    )
    lake.land("0.jsonl", NIGHTS[0])
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        result = CliRunner().invoke(main, ["run", "--host", "local", "--config", str(lake.configure()), "--json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, found["error"]["code"]) == (2, "bad-credentials")
    assert not found["error"]["data_changed"]
    lake.finish_and_check()
