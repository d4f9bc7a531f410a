"""The Azure queue: the contract of all queues, on Azurite, and what is Azure's own: receipts, base64, dead letters, errors."""

import base64
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from azure.storage.queue import QueueClient

from lakeupsert.errors import ConfigurationError, TryAgainError
from lakeupsert.queue import AzureQueue, DeadLetter, QueueStats, WorkQueue, open_queue
from lakeupsert.queue.azure import MAX_RECEIVES, POISON, REASON_CHARACTERS, TOGETHER
from lakeupsert.storage import azureaccount
from lakeupsert.storage.azureaccount import EMULATOR
from lakeupsert.testing.queue_contract import HOLD, WorkQueueContract, drain, message, messages
from tests.harness.processes import wait_until
from tests.harness.servers import Server, free_port

NewQueue = Callable[[], str]


@pytest.fixture
def queue(new_azure_queue: NewQueue) -> AzureQueue:
    return AzureQueue(EMULATOR, new_azure_queue())


def client(server: Server, name: str) -> Any:
    return QueueClient.from_connection_string(server.env["AZURE_STORAGE_CONNECTION_STRING"], name)


class TestAzureQueue(WorkQueueContract):
    lease_seconds = 2.0

    @pytest.fixture(autouse=True)
    def on_server(self, azure: Server, new_azure_queue: NewQueue) -> None:
        self.server, self.make = azure, new_azure_queue

    def new_queue(self) -> WorkQueue:
        return AzureQueue(EMULATOR, self.make(), max_receives=3)

    def let_time_pass(self, seconds: float) -> None:
        """The server says when: it hides a message of another queue for so long."""
        alarm = client(self.server, self.make())
        alarm.send_message("now", visibility_timeout=int(seconds))
        wait_until(lambda: alarm.receive_message() is not None, "Azurite's clock moves on")

    @pytest.mark.parametrize("answer", ["ack", "extend", "release", "bury"])
    def test_answer_to_a_stale_lease_is_no(self, queue: AzureQueue, answer: str) -> None:
        queue.send([message(1)])
        stale = self.receive_one(queue, self.lease_seconds)
        self.let_time_pass(self.lease_seconds)
        self.receive_one(queue)
        more = {"ack": (), "extend": (HOLD,), "release": (), "bury": ("no such table",)}[answer]
        assert getattr(queue, answer)(stale, *more) is False
        assert queue.stats() == QueueStats(visible=0, leased=1, dead=0)


def test_address_names_account_and_queue(queue: AzureQueue) -> None:
    queue.send([message(1)])
    found = open_queue(f"azqueue://{EMULATOR}/{queue.name}")
    assert [lease.message for lease in drain(found)] == [message(1)]
    assert found.max_receives == MAX_RECEIVES


@pytest.mark.parametrize("address", ["azqueue://lake", "azqueue://lake/Big", "azqueue://lake/a--b", "azqueue://lake/a"])
def test_address_that_azure_would_not_take_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="azqueue://ACCOUNT/QUEUE"):
        open_queue(address)


@pytest.mark.core
def test_message_is_the_base64_that_functions_expect_and_never_expires(queue: AzureQueue, azure: Server) -> None:
    queue.send([message(1)])
    found = client(azure, queue.name).receive_message()
    assert base64.b64decode(found.content) == message(1).encode().encode()
    assert found.expires_on.year == 9999


def test_copy_in_another_process_is_the_same_queue(queue: AzureQueue) -> None:
    queue.send([message(1)])
    assert [lease.message for lease in drain(pickle.loads(pickle.dumps(queue)))] == [message(1)]


@pytest.mark.parametrize(
    "body",
    ['{"v":2,"table":"sales","partition":"d=1","batch":1}', "not JSON", "é" * 10_000],
    ids=["newer", "not JSON", "long"],
)
@pytest.mark.parametrize(
    "encode", [lambda body: body, lambda body: base64.b64encode(body.encode()).decode()], ids=["text", "base64"]
)
def test_unreadable_message_is_buried_and_keeps_nobody_from_the_next(
    queue: AzureQueue, azure: Server, body: str, encode: Callable[[str], str]
) -> None:
    client(azure, queue.name).send_message(encode(body))
    queue.send([message(2)])
    received = queue.receive(1, HOLD) + queue.receive(1, HOLD)
    assert [lease.message for lease in received] == [message(2)]
    assert queue.stats() == QueueStats(visible=0, leased=1, dead=1)
    [letter] = queue.dead_letters()
    assert letter.message is None
    assert "Expected version 1" in letter.reason
    assert queue.redrive([message(1)], drop=[message(2)]) == (0, 0)
    assert queue.dead_letters() == [letter]


def test_letter_that_the_functions_host_buried_is_one_of_ours(queue: AzureQueue, azure: Server) -> None:
    body = base64.b64encode(message(1).encode().encode()).decode()
    client(azure, queue.name + POISON).send_message(body)
    [letter] = queue.dead_letters()
    assert (letter.message, letter.receives) == (message(1), MAX_RECEIVES + 1)
    assert f"after {MAX_RECEIVES + 1} receives" in letter.reason
    assert queue.redrive([message(1)]) == (1, 0)
    assert [lease.message for lease in drain(queue)] == [message(1)]


def test_reason_that_azure_would_not_take_is_shortened(queue: AzureQueue) -> None:
    queue.send([message(1)])
    [lease] = drain(queue)
    assert queue.bury(lease, "\x00\ufffe" + "é" * 400_000)
    [letter] = queue.dead_letters()
    assert letter == DeadLetter(message(1), ("\x00\ufffe" + "é" * 400_000)[:REASON_CHARACTERS], 1)


def test_counts_are_exact_while_few_are_visible(queue: AzureQueue) -> None:
    queue.send(messages(TOGETHER + 3))
    assert queue.stats() == QueueStats(visible=TOGETHER + 3, leased=0, dead=0)
    held = queue.receive(5, HOLD)
    assert len(held) == 5
    assert queue.stats() == QueueStats(visible=TOGETHER - 2, leased=5, dead=0)


def test_missing_queue_is_named(azure: Server) -> None:
    absent = AzureQueue(EMULATOR, "nobody-made-it")
    for call in (lambda: absent.send([message(1)]), lambda: absent.receive(1, HOLD), absent.stats, absent.dead_letters):
        with pytest.raises(ConfigurationError, match="nobody-made-it") as raised:
            call()
        assert raised.value.code == "no-such-queue"
    with pytest.raises(ConfigurationError, match="nobody-made-it"):
        absent.redrive([message(1)])


def test_wrong_key_is_told(queue: AzureQueue, azure: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    given = azure.env["AZURE_STORAGE_CONNECTION_STRING"]
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", given.replace("AccountKey=E", "AccountKey=F"))
    with pytest.raises(ConfigurationError) as raised:
        queue.send([message(1)])
    assert raised.value.code == "bad-credentials"


def test_nobody_listens(queue: AzureQueue, azure: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(azureaccount, "STORE_ATTEMPTS", 1)
    given = azure.env["AZURE_STORAGE_CONNECTION_STRING"]
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"{given.rpartition(':')[0]}:{free_port()}/{EMULATOR}")
    with pytest.raises(TryAgainError) as raised:
        queue.send(messages(3))
    assert raised.value.code == "queue-unreachable"
    assert "0 messages were sent before" in raised.value.message


def test_function_whose_host_extended_meanwhile_buries_all_the_same(queue: AzureQueue, azure: Server) -> None:
    """Its receipt is void then, and the host deletes the message, as the function ends well."""
    queue.send([message(1)])
    host = client(azure, queue.name)
    found = host.receive_message(visibility_timeout=60)
    body = base64.b64decode(found.content)
    record = {"id": found.id, "popReceipt": found.pop_receipt, "body": body, "dequeueCount": 5}
    with queue.leases_of([record]) as leases:
        host.update_message(found, visibility_timeout=60)
        [lease] = leases
        assert queue.bury(lease, "no room")
    assert [letter.reason for letter in queue.dead_letters()] == ["no room"]
    assert queue.receive(1, 60.0) == [], "still hidden, for the host to delete"


@pytest.mark.core
def test_release_ends_a_lease_also_for_who_waits_to_extend_it(queue: AzureQueue) -> None:
    queue.send([message(1)])
    [lease] = queue.receive(1, 60.0)
    assert queue.extend(lease, 60.0)
    assert queue.release(lease)
    assert not queue.extend(lease, 60.0)
    assert queue.receive(1, 60.0)


def test_connection_string_that_can_not_be_read_is_no_secret_told(
    queue: AzureQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName={EMULATOR};AccountKey=SECRET;rubbish")
    with pytest.raises(ConfigurationError) as raised:
        queue.stats()
    assert raised.value.code == "bad-setting"
    assert "SECRET" not in str(raised.value)


def test_message_that_grows_most_in_a_letter_is_buried(queue: AzureQueue, azure: Server) -> None:
    client(azure, queue.name).send_message(base64.b64encode(b"\0" * 9_000).decode())
    queue.send([message(1)])
    assert [lease.message for lease in queue.receive(2, 60.0)] == [message(1)]
    assert queue.stats().dead == 1
