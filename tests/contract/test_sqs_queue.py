"""The SQS queue: the contract of all queues, on ElasticMQ and moto, and what is SQS's own: batches, receipts, redrive, errors."""

import json
import pickle
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from moto.sqs import models as moto_sqs

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, LakeupsertError, TryAgainError
from lakeupsert.queue import Message, QueueStats, SqsQueue, open_queue, sqs
from lakeupsert.testing.queue_contract import HOLD, WorkQueueContract, drain, message, messages
from lakeupsert.testing.servers import HOST, aws_environment, elasticmq, free_port, new_sqs_queue


@pytest.fixture(scope="module")
def elasticmq_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with elasticmq(tmp_path_factory.mktemp("elasticmq") / "log") as endpoint:
        yield endpoint


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
    receive = moto_sqs.SQSBackend.receive_message

    def receive_alone(*args: Any, **kwargs: Any) -> Any:
        with one_at_a_time:  # moto gives one message to two threads, which SQS does but very rarely
            return receive(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moto_sqs, "unix_time_millis", moto_clock.millis)
        patch.setattr(moto_sqs.SQSBackend, "receive_message", receive_alone)
        yield moto_clock


@pytest.fixture(scope="module")
def moto_endpoint(moto_clock: MotoClock) -> Iterator[str]:
    port = free_port()
    server = ThreadedMotoServer(HOST, port, verbose=False)
    server.start()
    yield f"http://{HOST}:{port}"
    server.stop()


@pytest.fixture(params=["elasticmq", "moto"])
def endpoint(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_endpoint"))


@pytest.fixture(autouse=True)
def _environment(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in aws_environment(endpoint, "sqs").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sqs, "LEAST_WAIT_SECONDS", 0)  # these are one server each, and know what they have


def client() -> Any:
    return boto3.session.Session().client("sqs")


def url(name: str) -> str:
    return str(client().get_queue_url(QueueName=name)["QueueUrl"])


def new_queue(max_receive_count: int = 4) -> SqsQueue:
    name = f"q-{clock.new_id()}"
    new_sqs_queue(max_receive_count=max_receive_count, endpoint=client().meta.endpoint_url, name=name)
    return SqsQueue(name)


class SqsContract(WorkQueueContract):
    def new_queue(self) -> SqsQueue:
        return new_queue()

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
    def endpoint(self, elasticmq_endpoint: str) -> str:
        return elasticmq_endpoint

    def let_time_pass(self, seconds: float) -> None:
        """The server says when: it hides a message of another queue for so long."""
        queue = SqsQueue(f"q-{clock.new_id()}")
        client().create_queue(QueueName=queue.name)
        client().send_message(QueueUrl=url(queue.name), MessageBody="now", DelaySeconds=int(seconds))
        while not client().receive_message(QueueUrl=url(queue.name), WaitTimeSeconds=20).get("Messages"):
            pass


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
def queue() -> Iterator[SqsQueue]:
    queue = new_queue()
    yield queue
    queue.close()
