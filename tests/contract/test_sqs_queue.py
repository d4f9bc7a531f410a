"""The SQS queue: the contract of all queues, on ElasticMQ and moto, and what is SQS's own: batches, receipts, redrive, errors."""

import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from typing import Any

import boto3
import pytest
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from moto.sqs import models as moto_sqs

from lakeupsert import clock, retries
from lakeupsert.errors import ConfigurationError, LakeupsertError, TryAgainError
from lakeupsert.queue import Message, QueueStats, SqsQueue, open_queue
from lakeupsert.queue.base import NOTHING_DONE
from lakeupsert.testing.queue_contract import HOLD, WorkQueueContract, drain, message, messages
from tests.harness.servers import HOST, Server, free_port


class MotoClock:
    """What moto takes for the time."""

    def __init__(self) -> None:
        self.ahead_seconds = 0.0
        self._millis = moto_sqs.unix_time_millis

    def millis(self) -> float:
        return self._millis() + self.ahead_seconds * 1000


@pytest.fixture(scope="module")
def moto_clock() -> Iterator[MotoClock]:
    moto_clock, one_at_a_time = MotoClock(), threading.Lock()
    receive, delete = moto_sqs.SQSBackend.receive_message, moto_sqs.Queue.delete_message

    def receive_alone(*args: Any, **kwargs: Any) -> Any:
        with one_at_a_time:  # moto gives one message to two threads, which SQS does but very rarely
            return receive(*args, **kwargs)

    def delete_as_sqs(self: moto_sqs.Queue, receipt_handle: str) -> None:
        """moto deletes by any receipt there ever was; SQS says yes to a stale one, and keeps the message."""
        if all(x.receipt_handle == receipt_handle for x in self._messages if x.had_receipt_handle(receipt_handle)):
            delete(self, receipt_handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moto_sqs, "unix_time_millis", moto_clock.millis)
        patch.setattr(moto_sqs.SQSBackend, "receive_message", receive_alone)
        patch.setattr(moto_sqs.Queue, "delete_message", delete_as_sqs)
        yield moto_clock


@pytest.fixture(scope="module")
def moto_endpoint(moto_clock: MotoClock) -> Iterator[str]:
    """In this process, so that its time can be put forward."""
    port = free_port()
    server = ThreadedMotoServer(HOST, port, verbose=False)
    server.start()
    yield f"http://{HOST}:{port}"
    server.stop()


@pytest.fixture(params=["elasticmq", pytest.param("moto", marks=pytest.mark.long)])
def endpoint(request: pytest.FixtureRequest) -> str:
    """Of each server in turn."""
    found: str | Server = request.getfixturevalue({"moto": "moto_endpoint"}.get(request.param, request.param))
    return found if isinstance(found, str) else found.url


@pytest.fixture(autouse=True)
def _environment(endpoint: str, _aws_models: None, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "AWS_ENDPOINT_URL_SQS": endpoint,
        "AWS_DEFAULT_REGION": "eu-west-1",
        "AWS_ACCESS_KEY_ID": "access",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retries, "LEAST_WAIT_SECONDS", 0)  # these are one server each, and know what they have


def client() -> Any:
    return boto3.client("sqs")


def url(name: str) -> str:
    return str(client().get_queue_url(QueueName=name)["QueueUrl"])


class SqsContract(WorkQueueContract):
    @pytest.fixture(autouse=True)
    def _maker(self, new_sqs_queue: Callable[..., str], _environment: None) -> None:
        self.make = new_sqs_queue

    def new_queue(self) -> SqsQueue:
        return SqsQueue(self.make(max_receive_count=4))

    def test_stale_bury_keeps_the_message_and_the_newer_lease(self, queue: SqsQueue) -> None:
        queue.send([message(1)])
        stale = self.receive_one(queue, self.lease_seconds)
        self.let_time_pass(self.lease_seconds)
        current = self.receive_one(queue)
        queue.bury(stale, "no such table")
        assert drain(queue) == []
        assert queue.release(current)
        assert self.receive_one(queue).receives == 3

    @pytest.mark.parametrize("ending", ["ran out", "released"])
    def test_sqs_itself_gives_up_a_message_that_nobody_buries(self, queue: SqsQueue, ending: str) -> None:
        queue.send([message(1)])
        for _ in range(4):
            lease = self.receive_one(queue, self.lease_seconds)
            if ending == "ran out":
                self.let_time_pass(self.lease_seconds)
            else:
                queue.release(lease)
        assert drain(queue) == []
        [letter] = queue.dead_letters()
        assert (letter.message, letter.receives) == (message(1), 4)
        assert "after 4 receives" in letter.reason
        assert queue.redrive([message(1)]) == (1, 0)
        assert self.receive_one(queue).receives == 1


class TestOnElasticMq(SqsContract):
    lease_seconds = 2.0

    @pytest.fixture
    def endpoint(self, elasticmq: Server) -> str:
        return elasticmq.url

    @pytest.mark.parametrize("answer", ["ack", "extend", "release", "bury"])
    def test_stale_answer_is_refused_and_changes_nothing(self, queue: SqsQueue, answer: str) -> None:
        """ElasticMQ says so; SQS says yes to an ack at least, and changes nothing."""
        queue.send([message(1)])
        stale = self.receive_one(queue, self.lease_seconds)
        self.let_time_pass(self.lease_seconds)
        self.receive_one(queue)
        more = {"ack": (), "extend": (HOLD,), "release": (), "bury": ("no such table",)}[answer]
        assert getattr(queue, answer)(stale, *more) is False
        assert queue.stats() == QueueStats(visible=0, leased=1, dead=0)

    def let_time_pass(self, seconds: float) -> None:
        """The server says when: it hides a message of another queue for so long."""
        sqs = client()
        alarm = sqs.create_queue(QueueName=f"q-{clock.new_id()}")["QueueUrl"]
        sqs.send_message(QueueUrl=alarm, MessageBody="now", DelaySeconds=int(seconds))
        while not sqs.receive_message(QueueUrl=alarm, WaitTimeSeconds=20).get("Messages"):
            pass


@pytest.mark.long
class TestOnMoto(SqsContract):
    @pytest.fixture
    def endpoint(self, moto_endpoint: str) -> str:
        return moto_endpoint

    @pytest.fixture(autouse=True)
    def _moto_clock(self, moto_clock: MotoClock) -> None:
        self.moto_clock = moto_clock

    def let_time_pass(self, seconds: float) -> None:
        self.moto_clock.ahead_seconds += seconds


@pytest.fixture
def queue(new_sqs_queue: Callable[..., str]) -> Iterator[SqsQueue]:
    queue = SqsQueue(new_sqs_queue(max_receive_count=4))
    yield queue
    queue.close()


class Requests:
    """What a queue sends by kind, with answers of ours before the server's where `answer` gives one."""

    def __init__(self, queue: SqsQueue) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.answer: Callable[[str, dict[str, Any]], dict[str, Any] | None] = lambda operation, parameters: None
        call = queue._call

        def calling(operation: str, parameters: dict[str, Any], *args: Any, **options: Any) -> Any:
            self.sent.append((operation, parameters))
            return self.answer(operation, parameters) or call(operation, parameters, *args, **options)

        queue._call = calling  # type: ignore[method-assign]

    def kinds(self) -> list[str]:
        return [operation for operation, _ in self.sent]


@pytest.fixture
def requests(queue: SqsQueue) -> Requests:
    return Requests(queue)


# -- batches


def test_messages_are_sent_in_tens(queue: SqsQueue, requests: Requests) -> None:
    queue.send(messages(23))
    batches = [len(p["Entries"]) for operation, p in requests.sent if operation == "SendMessageBatch"]
    assert batches == [10, 10, 3]


@pytest.mark.core
def test_messages_that_sqs_did_not_take_are_sent_again_alone(queue: SqsQueue, requests: Requests) -> None:
    refused = {3, 7}

    def refuse_two_once(operation: str, parameters: dict[str, Any]) -> dict[str, Any] | None:
        if operation != "SendMessageBatch" or not refused:
            return None
        entries = parameters["Entries"]
        failed = [e for e in entries if Message.decode(e["MessageBody"]).batch in refused]
        refused.clear()
        taken = client().send_message_batch(QueueUrl=url(queue.name), Entries=[e for e in entries if e not in failed])
        away = {"Code": "InternalError", "SenderFault": False}
        return {"Successful": taken["Successful"], "Failed": [{"Id": e["Id"], **away} for e in failed]}

    requests.answer = refuse_two_once
    queue.send(messages(12))
    batches = [len(p["Entries"]) for operation, p in requests.sent if operation == "SendMessageBatch"]
    assert batches == [10, 2, 2]
    assert sorted(lease.message.batch for lease in drain(queue)) == list(range(12))


def test_messages_that_sqs_never_takes_end_in_an_error_that_counts_the_others(
    queue: SqsQueue, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_the_last(operation: str, parameters: dict[str, Any]) -> dict[str, Any] | None:
        if operation != "SendMessageBatch" or Message.decode(parameters["Entries"][-1]["MessageBody"]).batch < 11:
            return None
        *others, last = parameters["Entries"]
        if others:
            client().send_message_batch(QueueUrl=url(queue.name), Entries=others)
        failed = [{"Id": last["Id"], "Code": "ServiceUnavailable", "SenderFault": False}]
        return {"Successful": [{"Id": e["Id"]} for e in others], "Failed": failed}

    requests.answer = refuse_the_last
    monkeypatch.setattr(retries, "SQS_PAUSE_SECONDS", 0)
    with pytest.raises(TryAgainError, match=r"ServiceUnavailable. 11 of 12 messages were sent.") as caught:
        queue.send(messages(12))
    assert caught.value.code == "queue-busy"
    assert requests.kinds().count("SendMessageBatch") == 1 + retries.SQS_ATTEMPTS
    assert sorted(lease.message.batch for lease in drain(queue)) == list(range(11))


def test_message_above_the_queues_limit_is_refused_at_once(queue: SqsQueue, requests: Requests) -> None:
    with pytest.raises(ConfigurationError, match="messages were sent") as caught:
        queue.send([Message("sales", "d=" + "x" * 1_100_000, 1)])
    assert caught.value.code == "queue-unusable"
    assert requests.kinds() == ["GetQueueUrl", "SendMessageBatch"]


# -- receiving


def test_waiting_receive_waits_for_sqs_and_others_do_not(queue: SqsQueue, requests: Requests) -> None:
    queue.send(messages(2))
    assert len(queue.receive(8, HOLD, 5.0)) == 2
    assert len(queue.receive(8, HOLD)) == 0
    assert [p["WaitTimeSeconds"] for operation, p in requests.sent if operation == "ReceiveMessage"] == [5, 0, 0, 0]


def test_what_came_before_a_suspicious_message_is_given_back(queue: SqsQueue) -> None:
    queue.send([message(1)])
    [before] = drain(queue)
    queue.send([message(2)])
    for _ in range(2):
        queue.release(*drain(queue))
    queue.release(before)
    found = {tuple(lease.message.batch for lease in queue.receive(8, HOLD)) for _ in range(2)}
    assert found == {(1,), (2,)}


def test_what_was_received_before_a_failure_is_worked_on(queue: SqsQueue, requests: Requests) -> None:
    queue.send(messages(2))

    def fail_the_second(operation: str, parameters: dict[str, Any]) -> None:
        if operation == "ReceiveMessage" and requests.kinds().count("ReceiveMessage") == 2:
            raise TryAgainError("queue-busy", "SQS is busy.", next="wait")

    requests.answer = fail_the_second
    assert len(queue.receive(8, HOLD)) == 1


@pytest.mark.core
@pytest.mark.few(3)
@pytest.mark.parametrize(
    "body",
    [
        '{"v":2,"table":"sales","partition":"d=1","batch":1}',
        "not JSON",
        '{"v":1,"table":"","partition":"d","batch":1}',
        "https://example.com/queue " + "é" * 90_000,
    ],
    ids=["newer", "not JSON", "no table", "long"],
)
def test_unreadable_message_is_buried_and_keeps_nobody_from_the_next(queue: SqsQueue, body: str) -> None:
    client().send_message(QueueUrl=url(queue.name), MessageBody=body)
    queue.send([message(2)])
    received = queue.receive(1, HOLD) + queue.receive(1, HOLD)
    assert [lease.message for lease in received] == [message(2)]
    assert queue.stats() == QueueStats(visible=0, leased=1, dead=1)
    [letter] = queue.dead_letters()
    assert letter.message is None
    assert "Expected version 1" in letter.reason
    assert queue.redrive([message(1)], drop=[message(2)]) == (0, 0)
    assert queue.dead_letters() == [letter]


def test_reason_that_sqs_would_not_take_is_shortened_and_cleaned(queue: SqsQueue) -> None:
    queue.send([message(1)])
    [lease] = drain(queue)
    assert queue.bury(lease, "\x00\ufffe" + "é" * 400_000)
    [letter] = queue.dead_letters()
    assert letter.reason.startswith("\ufffd\ufffdééé")


def test_dead_letter_of_somebody_else_is_listed_with_what_it_has(queue: SqsQueue) -> None:
    attributes = {
        "receives": {"DataType": "String", "StringValue": "many"},
        "reason": {"DataType": "Binary", "BinaryValue": b"\x00"},
    }
    client().send_message(QueueUrl=url(f"{queue.name}-dead"), MessageBody="not JSON", MessageAttributes=attributes)
    [letter] = queue.dead_letters()
    assert (letter.message, letter.receives) == (None, 4)


# -- processes


def _drained(pickled: bytes) -> int:
    queue: SqsQueue = pickle.loads(pickled)
    return sum(queue.ack(lease) for lease in drain(queue))


@pytest.mark.few(1)
def test_pickled_queue_is_the_same_queue_in_another_process(queue: SqsQueue) -> None:
    queue.send(messages(3))
    with get_context("spawn").Pool(1) as pool:
        assert pool.apply(_drained, (pickle.dumps(queue),)) == 3
    assert queue.stats() == QueueStats(visible=0, leased=0, dead=0)


# -- what an operator must mend


def refused(queue: SqsQueue, code: str, kind: type[LakeupsertError], match: str) -> LakeupsertError:
    """That of every call, which are all to say the same."""
    caught = {}
    calls: dict[str, Callable[[], object]] = {
        "send": lambda: queue.send([message(1)]),
        "receive": lambda: queue.receive(1, HOLD),
        "stats": queue.stats,
        "dead_letters": queue.dead_letters,
        "redrive": lambda: queue.redrive([message(1)]),
    }
    for name, call in calls.items():
        with pytest.raises(kind, match=match) as failure:
            call()
        caught[name] = failure.value
    assert {name: error.code for name, error in caught.items()} == dict.fromkeys(calls, code)
    return caught["send"]


def test_queue_that_is_not_there_is_named_with_its_region() -> None:
    error = refused(SqsQueue("nowhere"), "no-such-queue", ConfigurationError, "no queue 'nowhere' in region eu-west-1")
    assert NOTHING_DONE in error.message


def test_queue_that_was_deleted_meanwhile_is_missing_too(queue: SqsQueue) -> None:
    queue.send([message(1)])
    client().delete_queue(QueueUrl=url(queue.name))
    with pytest.raises(ConfigurationError, match="At least 0 of 1 messages were sent") as caught:
        queue.send([message(2)])
    assert caught.value.code == "no-such-queue"


@pytest.mark.core
def test_queue_without_dead_letters_is_refused_before_anything_is_received(queue: SqsQueue) -> None:
    name = f"q-{clock.new_id()}"
    client().create_queue(QueueName=name)
    bare = SqsQueue(name)
    bare.send([message(1)])
    with pytest.raises(ConfigurationError, match="no redrive policy") as caught:
        bare.receive(1, HOLD)
    assert caught.value.code == "no-dead-letter-queue"
    about = client().get_queue_attributes(QueueUrl=url(name), AttributeNames=["ApproximateNumberOfMessages"])
    assert about["Attributes"]["ApproximateNumberOfMessages"] == "1"


class Answering:
    """A server that gives one answer to everything."""

    def __init__(self, status: int, body: bytes, content_type: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self.endpoint = f"http://{HOST}:{self._server.server_port}"

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self.endpoint

    def __exit__(self, *error: Any) -> None:
        self._server.shutdown()
        self._server.server_close()


def aws_error(code: str) -> bytes:
    return json.dumps({"__type": f"com.amazonaws.sqs#{code}", "message": "says AWS"}).encode()


no_server = pytest.mark.parametrize("endpoint", [f"http://{HOST}:1"], ids=["no server"])
JSON, HTML = "application/x-amz-json-1.0", b"<html><body>Log in to the hotel's network</body></html>"


@no_server
@pytest.mark.parametrize(
    ("status", "body", "code", "kind"),
    [
        (400, aws_error("AccessDeniedException"), "queue-not-permitted", ConfigurationError),
        (403, aws_error("InvalidClientTokenId"), "bad-credentials", ConfigurationError),
        (403, aws_error("SignatureDoesNotMatch"), "bad-credentials", ConfigurationError),
        (403, aws_error("ExpiredToken"), "bad-credentials", ConfigurationError),
        (400, aws_error("RequestThrottled"), "queue-busy", TryAgainError),
        (503, aws_error("ServiceUnavailable"), "queue-busy", TryAgainError),
        (200, HTML, "queue-unusable", ConfigurationError),
        (404, HTML, "queue-unusable", ConfigurationError),
        (415, b"Unsupported Media Type", "queue-unusable", ConfigurationError),  # sqslite 2.1.1
        (
            400,
            b"<ErrorResponse><Error><Code>X</Code></Error></ErrorResponse>",
            "queue-unusable",
            ConfigurationError,
        ),  # goaws
        (503, HTML, "queue-busy", TryAgainError),
    ],
)
def test_answer_of_another_kind_says_what_to_do(
    status: int, body: bytes, code: str, kind: type[LakeupsertError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "SQS_ATTEMPTS", 1)
    with Answering(status, body, JSON if body.startswith(b"{") else "text/html") as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", endpoint)
        error = refused(SqsQueue("sales"), code, kind, NOTHING_DONE)
    if code == "queue-unusable" and status != 200:
        assert ("JSON protocol" in error.message, "ElasticMQ" in error.next) == (True, True)
    if code == "queue-not-permitted":
        assert "`sqs:GetQueueUrl`" in error.next


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("call", "action"),
    [
        (lambda queue, lease: queue.send([message(2)]), "SendMessage"),
        (lambda queue, lease: queue.receive(1, HOLD), "ReceiveMessage"),
        (lambda queue, lease: queue.ack(lease), "DeleteMessage"),
        (lambda queue, lease: queue.extend(lease, HOLD), "ChangeMessageVisibility"),
        (lambda queue, lease: queue.release(lease), "ChangeMessageVisibility"),
        (lambda queue, lease: queue.stats(), "GetQueueAttributes"),
    ],
)
def test_permission_that_is_missing_is_named(
    queue: SqsQueue, call: Callable[[SqsQueue, Any], object], action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.send([message(1)])
    [lease] = drain(queue)
    with Answering(400, aws_error("AccessDeniedException"), JSON) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", endpoint)
        queue.close()
        with pytest.raises(ConfigurationError) as caught:
            call(queue, lease)
    assert caught.value.code == "queue-not-permitted"
    assert f"`sqs:{action}`" in caught.value.next


@no_server
def test_endpoint_that_nobody_listens_at_asks_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "SQS_ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", f"http://{HOST}:{free_port()}")
    refused(SqsQueue("sales"), "queue-unreachable", TryAgainError, NOTHING_DONE)


@no_server
@pytest.mark.parametrize(
    ("unset", "code"),
    [("AWS_DEFAULT_REGION", "queue-unusable"), ("AWS_ACCESS_KEY_ID", "bad-credentials")],
)
def test_missing_setting_of_aws_is_told(unset: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(unset)
    if unset == "AWS_ACCESS_KEY_ID":
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    refused(SqsQueue("sales"), code, ConfigurationError, NOTHING_DONE)


@no_server
def test_endpoint_that_is_no_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", "localhost")
    refused(SqsQueue("sales"), "queue-unusable", ConfigurationError, "Invalid endpoint: localhost")


# -- addresses


def test_address_names_queue_and_account(queue: SqsQueue) -> None:
    queue.send([message(1)])
    opened = open_queue(f"sqs://{queue.name}")
    assert opened.stats().visible == 1
    opened.close()
    account = url(queue.name).split("/")[-2]
    owned = open_queue(f"sqs://{account}/{queue.name}")
    assert owned.stats().visible == 1
    owned.close()
