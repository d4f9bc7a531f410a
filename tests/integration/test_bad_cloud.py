"""What goes wrong with a cloud's store and queues, as the command line says it; afterwards the next run makes the table exact.

What every single call makes of every answer stands in tests/contract; messages of others, in test_sqs.py and test_functions.py.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.storage import s3 as storage_s3
from lakeupsert.storage.azureaccount import EMULATOR
from tests.harness.lake import Lake, row
from tests.harness.proxy import FaultProxy, Rule, refuse
from tests.harness.servers import AZURITE_KEY, CREDENTIALS, Server

NewPlace = Callable[[Server], str]
NewProxy = Callable[[Server], FaultProxy]
PAGE = Rule("answer", body=b"<html><body>Log in to the hotel's network</body></html>", content_type="text/html")
NIGHTS = [[row(k, day, night, night) for day in range(2) for k in "ab"] for night in range(2)]


@dataclass
class Cloud:
    """A table with one published night and another one landed, and the proxies in front of its store and its queues."""

    lake: Lake
    store: FaultProxy
    queues: FaultProxy

    def call(self, *command: str, code: int) -> Any:
        result = CliRunner().invoke(main, [*command, "--config", str(self.lake.configure()), "--json"])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    def run(self, code: int = 0) -> Any:
        return self.call("run", "--host", "local", "--workers", "1", code=code)["error"]

    def appended(self) -> bool:
        """Whether the second night was committed."""
        self.store.rules = self.queues.rules = ()
        self.lake.reopen()
        return len(self.lake.entries()) > 2

    def check_the_next_run(self) -> None:
        """Readers see the first night, whole; then a run finishes, and nothing counts twice."""
        assert self.lake.rows() == self.lake.expected(1)
        self.run()
        self.lake.reopen()
        self.lake.check()
        assert self.lake.rows() == self.lake.expected(2)
        assert [number for number, entry in self.lake.entries() if entry.kind == "batch"] == [1, 2]


@contextmanager
def clouded(store: FaultProxy, queues: FaultProxy, place: str, queue: str, folder: Path) -> Iterator[Cloud]:
    lake = Lake(folder, landing=f"{place}/landing", processed=f"{place}/processed", queue=queue)
    lake.land("0.jsonl", NIGHTS[0])
    lake.run()
    lake.land("1.jsonl", NIGHTS[1])
    lake.table.close()
    yield Cloud(lake, store, queues)
    lake.table.close()


@pytest.fixture
def aws(
    versitygw: Server,
    elasticmq: Server,
    tmp_path: Path,
    new_proxy: NewProxy,
    new_place: NewPlace,
    new_sqs_queue: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Cloud]:
    monkeypatch.setattr(storage_s3, "REFUSED_ATTEMPTS", 3)  # a storm would last half a minute
    s3, sqs = new_proxy(versitygw), new_proxy(elasticmq)
    place = new_place(s3.server)
    for name, value in sqs.server.env.items():
        monkeypatch.setenv(name, value)
    with clouded(s3, sqs, place, f"sqs://{new_sqs_queue()}", tmp_path) as cloud:
        yield cloud


@pytest.fixture
def azure_cloud(
    azurite: Server,
    new_azure_queue: Callable[[], str],
    new_proxy: NewProxy,
    new_place: NewPlace,
    tmp_path: Path,
) -> Iterator[Cloud]:
    assert azurite.queues is not None
    queue = f"azqueue://{EMULATOR}/{new_azure_queue()}"
    blobs, queues = new_proxy(azurite), new_proxy(azurite.queues)
    env = {name: queues.moved(value) for name, value in blobs.server.env.items()}
    place = new_place(replace(blobs.server, env=env))
    with clouded(blobs, queues, place, queue, tmp_path) as cloud:
        yield cloud


S3 = [
    pytest.param(refuse(403, "AccessDenied", "GET", "list-type"), 2, "not-permitted", "s3:ListBucket", id="list"),
    pytest.param(refuse(403, "AccessDenied", "GET", "/[a-z]+/.+/"), 2, "not-permitted", "s3:GetObject", id="get"),
    pytest.param(refuse(403, "AccessDenied", "PUT"), 2, "not-permitted", "s3:PutObject", id="put"),
    pytest.param(refuse(403, "ExpiredToken"), 2, "bad-credentials", "renew", id="expired token"),
    pytest.param(refuse(403, "ExpiredToken", "PUT"), 2, "bad-credentials", "renew", id="token expires meanwhile"),
    pytest.param(PAGE, 75, "store-unreachable", "endpoint", id="web page"),
    pytest.param(refuse(503, "SlowDown"), 75, "store-unreachable", "again", id="503 storm", marks=pytest.mark.long),
    pytest.param(refuse(503, "SlowDown", "PUT"), 75, "store-unreachable", "again", id="503 storm on writes"),
]
# A header that is taken out breaks the signature, so this server takes everything. Of S3: tests/contract.
TAKES_ALL = Rule("answer", "PUT", "_lakeupsert/conditions", status=201)
DENIED, ROLE = "AuthorizationPermissionMismatch", "Storage Blob Data Contributor"
BLOBS = [
    pytest.param(refuse(403, DENIED, "GET", "comp=list"), 2, "not-permitted", ROLE, id="list"),
    pytest.param(refuse(403, DENIED, "GET", "/.+/.+/.+/"), 2, "not-permitted", ROLE, id="get"),
    pytest.param(refuse(403, DENIED, "PUT"), 2, "not-permitted", ROLE, id="put"),
    pytest.param(refuse(403, "AuthorizationFailure"), 2, "not-permitted", "firewall", id="firewall"),
    pytest.param(refuse(401, "InvalidAuthenticationInfo"), 2, "bad-credentials", "az login", id="expired token"),
    pytest.param(refuse(403, "AuthenticationFailed"), 2, "bad-credentials", "az login", id="wrong key"),
    pytest.param(refuse(401, "InvalidAuthenticationInfo", "PUT"), 2, "bad-credentials", "az login", id="token expires"),
    pytest.param(TAKES_ALL, 2, "conditions-ignored", "header", id="no conditions"),
    pytest.param(PAGE, 75, "store-unreachable", "endpoint", id="web page"),
    pytest.param(refuse(503, "ServerBusy"), 75, "store-unreachable", "again", id="503 storm", marks=pytest.mark.long),
    pytest.param(
        refuse(503, "ServerBusy", "PUT"),
        75,
        "store-unreachable",
        "again",
        id="503 storm on writes",
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize(("rule", "code", "error", "told"), S3)
@pytest.mark.long
def test_run_says_what_is_wrong_with_s3(aws: Cloud, rule: Rule, code: int, error: str, told: str) -> None:
    says_what_is_wrong_with_the_store(aws, rule, code, error, told)


@pytest.mark.parametrize(("rule", "code", "error", "told"), BLOBS)
@pytest.mark.long
def test_run_says_what_is_wrong_with_azure(azure_cloud: Cloud, rule: Rule, code: int, error: str, told: str) -> None:
    says_what_is_wrong_with_the_store(azure_cloud, rule, code, error, told)


def says_what_is_wrong_with_the_store(cloud: Cloud, rule: Rule, code: int, error: str, told: str) -> None:
    cloud.store.rules = (rule,)
    found = cloud.run(code)
    assert (found["code"], found["data_changed"]) == (error, cloud.appended())
    assert told in found["next"]
    cloud.check_the_next_run()


@pytest.mark.parametrize(
    ("of", "rule", "told"),
    [
        ("aws", refuse(403, "AccessDenied", "POST", "delete"), "s3:DeleteObject"),
        ("azure_cloud", refuse(403, DENIED, "POST", "comp=batch"), ROLE),
    ],
)
@pytest.mark.long
def test_doctor_says_that_deletes_are_not_permitted(
    of: str, rule: Rule, told: str, request: pytest.FixtureRequest
) -> None:
    cloud = request.getfixturevalue(of)
    cloud.store.rules = (rule,)
    answer = cloud.call("doctor", code=2)
    assert told in json.dumps(answer)
    assert not cloud.appended()
    cloud.check_the_next_run()


@pytest.mark.parametrize(
    "operation", ["GetQueueUrl", "GetQueueAttributes", "SendMessage", "ReceiveMessage", "DeleteMessage"]
)
@pytest.mark.long
def test_run_says_which_permission_of_sqs_is_missing(aws: Cloud, operation: str) -> None:
    denied = json.dumps({"__type": "com.amazonaws.sqs#AccessDeniedException", "message": "no"}).encode()
    aws.queues.rules = (
        Rule("answer", path=operation, status=400, body=denied, content_type="application/x-amz-json-1.0"),
    )
    found = aws.run(2)
    assert (found["code"], found["data_changed"]) == ("queue-not-permitted", aws.appended())
    assert f"`sqs:{operation}`" in found["next"]
    aws.check_the_next_run()


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
@pytest.mark.long
def test_run_says_which_role_of_azures_queues_is_missing(azure_cloud: Cloud, method: str) -> None:
    azure_cloud.queues.rules = (refuse(403, DENIED, method),)
    found = azure_cloud.run(2)
    assert (found["code"], found["data_changed"]) == ("queue-not-permitted", azure_cloud.appended())
    assert "Storage Queue Data Contributor" in found["next"]
    azure_cloud.check_the_next_run()


@pytest.mark.parametrize(
    ("of", "rule", "code", "error"),
    [
        pytest.param("aws", PAGE, 2, "queue-unusable", id="SQS: web page"),
        pytest.param("aws", Rule("answer", status=503), 75, "queue-busy", id="SQS: 503 storm"),
        pytest.param("aws", Rule("lose"), 75, "queue-unreachable", id="SQS: no answer", marks=pytest.mark.long),
        pytest.param("azure_cloud", PAGE, 2, "queue-unusable", id="Azure: web page"),
        pytest.param(
            "azure_cloud", refuse(503, "ServerBusy"), 75, "queue-busy", id="Azure: 503 storm", marks=pytest.mark.long
        ),
        pytest.param(
            "azure_cloud", Rule("lose"), 75, "queue-unreachable", id="Azure: no answer", marks=pytest.mark.long
        ),
    ],
)
def test_run_says_what_is_wrong_with_the_queue(
    of: str, rule: Rule, code: int, error: str, request: pytest.FixtureRequest
) -> None:
    cloud = request.getfixturevalue(of)
    cloud.queues.rules = (rule,)
    found = cloud.run(code)
    assert (found["code"], found["data_changed"]) == (error, cloud.appended())
    cloud.check_the_next_run()


@pytest.mark.parametrize(
    ("of", "scheme", "place", "queue"),
    [("aws", "s3", "no-bucket", "sqs://"), ("azure_cloud", "az", "no-container", f"azqueue://{EMULATOR}/")],
)
def test_place_and_queue_that_are_not_there_are_named(
    of: str, scheme: str, place: str, queue: str, request: pytest.FixtureRequest
) -> None:
    cloud = request.getfixturevalue(of)
    for setting, address, error in (
        ("landing", f"{scheme}://no-such-place/landing", place),
        ("processed", f"{scheme}://no-such-place/processed", place),
        ("queue", f"{queue}no-such-queue", "no-such-queue"),
    ):
        path = cloud.lake.configure(**{setting: address})
        result = CliRunner().invoke(main, ["run", "--host", "local", "--config", str(path), "--json"])
        assert result.exit_code == 2, result.output
        found = json.loads(result.stdout)["error"]
        assert found["code"] == error
        assert "no-such-" in found["message"]
    cloud.check_the_next_run()


# Azurite says of a wrong key what Azure says of its firewall; the answer that Azure gives is in `BLOBS`.
@pytest.mark.parametrize(("of", "code"), [("versitygw", "bad-credentials"), ("azurite", "not-permitted")])
def test_wrong_credentials_are_named(
    of: str,
    code: str,
    request: pytest.FixtureRequest,
    new_place: NewPlace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = request.getfixturevalue(of)
    place = new_place(server)
    lake = Lake(tmp_path, landing=f"{place}/l", processed=f"{place}/p", queue=str(tmp_path / "queue.sqlite"))
    lake.land("0.jsonl", NIGHTS[0])
    with monkeypatch.context() as wrong:
        for name, value in server.env.items():
            for right in (CREDENTIALS["AWS_SECRET_ACCESS_KEY"], AZURITE_KEY):
                value = value.replace(right, "AAAA")
            wrong.setenv(name, value)
        result = CliRunner().invoke(main, ["run", "--host", "local", "--config", str(lake.configure()), "--json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, found["error"]["code"]) == (2, code)
    assert "credentials" in found["error"]["next"]
    assert not found["error"]["data_changed"]
    lake.finish_and_check()


def test_missing_credentials_are_named(
    versitygw: Server, new_place: NewPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = new_place(versitygw)
    lake = Lake(tmp_path, landing=f"{place}/l", processed=f"{place}/p", queue=str(tmp_path / "queue.sqlite"))
    lake.land("0.jsonl", NIGHTS[0])
    with monkeypatch.context() as without:
        for name in CREDENTIALS:
            without.delenv(name)
        result = CliRunner().invoke(main, ["run", "--host", "local", "--config", str(lake.configure()), "--json"])
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["code"]) == (2, "bad-credentials")
    assert f"{place}/" in error["message"]
    lake.finish_and_check()
