"""A queue of Azure Queue Storage, for workers on any number of machines.

Reads     the queue and `NAME-poison`, where Azure Functions also put dead letters
Writes    both queues; it creates none
Repeat    safe: a message that is sent or received twice finds its partition merged

Azure never gives a message up, so workers bury it after `MAX_RECEIVES`. It can't wait for a message, and it does not count
visible messages. A message is base64 text, as Functions expect it, and never expires.
"""

import base64
import binascii
import json
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

import msgspec

from lakeupsert.decoding import UNREADABLE, decoder_of
from lakeupsert.errors import ConfigurationError, LakeupsertError, TryAgainError
from lakeupsert.extras import needs_extra
from lakeupsert.queue.base import NOTHING_DONE, DeadLetter, Lease, Message, MessageError, QueueStats
from lakeupsert.queue.service import Received, Record, ServiceQueue
from lakeupsert.retries import LONGEST_AZURE_LEASE_SECONDS, PEEK_SECONDS
from lakeupsert.storage import azureaccount
from lakeupsert.storage.clients import kept

if TYPE_CHECKING:
    from azure.storage.queue import QueueClient, QueueMessage

ADDRESS = re.compile(r"azqueue://(?P<account>[a-z0-9]{3,24})/(?P<name>[a-z0-9](?:-?[a-z0-9]){2,55})")
MAX_RECEIVES = 5
"""A message is buried after this many receives without an acknowledgement. Functions give it up after one more (host.json)."""
POISON = "-poison"
TOGETHER = 32
"""Maximum messages that Azure returns, or shows, in one request."""
REASON_CHARACTERS = 3_500
BODY_BYTES = 3_500
"""Reason and body together stay below Azure's 64 KiB, even with six characters of JSON per character, in base64. Only messages of
other programs are longer."""

_STALE = {"MessageNotFound", "PopReceiptMismatch"}


class _Letter(msgspec.Struct):
    """The fields of a dead letter besides its message. Letters from the Functions host have none."""

    reason: str | None = None
    receives: int | None = None
    unreadable: str | None = None


class AzureQueue(ServiceQueue["QueueMessage"]):
    """See `lakeupsert.queue.base.WorkQueue` and `lakeupsert.queue.service` for what each method promises.

    While an Azure Function runs, its host extends the lease, which replaces our receipt. Our answers then change nothing; only
    the end of the function counts. To bury a message, a letter is sent anyway: the host deletes the message if the function
    succeeds, and one extra letter is harmless.
    """

    together = TOGETHER

    def __init__(self, account: str, name: str, max_receives: int = MAX_RECEIVES) -> None:
        self.account = account
        self.name = name
        self._max_receives = max_receives
        # Each extension replaces a receipt by another one, but the lease only has the first.
        self._receipts: dict[str, str] = {}
        self._hosted: set[str] = set()
        """Tokens of leases that the Functions host extends too."""
        self._answering = threading.Lock()

    def __repr__(self) -> str:
        return f"AzureQueue({self.account!r}, {self.name!r})"

    def __reduce__(self) -> tuple[type["AzureQueue"], tuple[str, str, int]]:
        return AzureQueue, (self.account, self.name, self._max_receives)

    @property
    def max_receives(self) -> int:
        return self._max_receives

    def send(self, messages: Iterable[Message]) -> None:
        for sent, message in enumerate(messages):
            self._send(self.name, message.encode().encode(), progress=f"{sent} messages were sent before.")

    def extend(self, lease: Lease, lease_seconds: float) -> bool:
        return self._hide(lease.token, lease_seconds)

    def ack(self, lease: Lease) -> bool:
        return self._delete(self.name, lease.token)

    def release(self, lease: Lease, delay_seconds: float = 0.0) -> bool:
        with self._answering:  # an extension that waits for this finds nothing to extend
            try:
                return self._update(self.name, lease.token, _seconds(delay_seconds))
            finally:
                self._receipts.pop(lease.token, None)

    def bury(self, lease: Lease, reason: str) -> bool:
        return self._bury(lease.token, json.loads(lease.message.encode()), lease.receives, reason)

    def stats(self) -> QueueStats:
        visible, leased = self._counts(self.name)
        return QueueStats(visible, leased, sum(self._counts(self.name + POISON)))

    def close(self) -> None:
        self._receipts.clear()
        self._hosted.clear()

    # -- one of the two queues

    def _send(self, name: str, body: bytes, progress: str = NOTHING_DONE) -> None:
        text = base64.b64encode(body).decode()
        self._call(name, "send_message", lambda client: client.send_message(text, time_to_live=-1), progress)

    def _receive(self, name: str, number: int, lease_seconds: float) -> list["QueueMessage"]:
        hidden = max(1, _seconds(lease_seconds))
        options = {"messages_per_page": number, "max_messages": number, "visibility_timeout": hidden}
        return list(self._call(name, "receive_messages", lambda client: list(client.receive_messages(**options))))

    def _counts(self, name: str) -> tuple[int, int]:
        """How many messages are visible and hidden. If `TOGETHER` or more are visible, all count as visible."""
        visible = len(self._call(name, "peek_messages", lambda client: client.peek_messages(max_messages=TOGETHER)))
        properties = self._call(name, "get_queue_properties", lambda client: client.get_queue_properties())
        total = max(visible, int(properties.approximate_message_count))
        return (total, 0) if visible == TOGETHER else (visible, total - visible)

    def _hide(self, token: str, seconds: float) -> bool:
        """Hide a message. Returns whether the receipt was still valid."""
        with self._answering:  # two at once would invalidate each other's receipt
            return self._update(self.name, token, _seconds(seconds))

    def _update(self, name: str, token: str, seconds: int) -> bool:
        id_, receipt = self._receipts.get(token, token).split(" ")
        answer = self._call(
            name,
            "update_message",
            lambda client: client.update_message(id_, receipt, visibility_timeout=seconds),
            stale=None,
        )
        if answer is None:
            self._receipts.pop(token, None)
            return False
        self._receipts[token] = _token(answer)
        return True

    def _delete(self, name: str, token: str) -> bool:
        """Delete a message. Returns whether the receipt was still valid."""
        with self._answering:
            id_, receipt = self._receipts.pop(token, token).split(" ")
            deleted = self._call(
                name, "delete_message", lambda client: client.delete_message(id_, receipt) or True, stale=False
            )
            return bool(deleted)

    def _bury(self, token: str, body: dict[str, object], receives: int, reason: str) -> bool:
        # Two queues need two requests: a process that dies in between leaves a letter and the message.
        if not self._hide(token, PEEK_SECONDS) and token not in self._hosted:
            return False
        letter = {**body, "reason": reason[:REASON_CHARACTERS] or "no reason was given", "receives": receives}
        self._send(self.name + POISON, msgspec.json.encode(letter))
        return self._delete(self.name, token) or token in self._hosted

    def _receive_one(self, lease_seconds: float, wait_seconds: float | None) -> Received | None:
        for message in self._receive(self.name, 1, lease_seconds):
            return self._received(_decode(message.content), _token(message), int(message.dequeue_count))
        return None

    def _of_record(self, record: Record) -> Received:
        """``record``: `id`, `popReceipt`, `body` (decoded), `dequeueCount`."""
        token = f"{record['id']} {record['popReceipt']}"
        self._hosted.add(token)
        return self._received(record["body"], token, record["dequeueCount"])

    def _received(self, body: bytes, token: str, receives: int) -> Received:
        unreadable: dict[str, object] = {"unreadable": body[:BODY_BYTES].decode(errors="replace")}
        return Received(body, receives, token, partial(self._bury, token, unreadable, receives))

    def _receive_dead(self, number: int) -> dict[str, "QueueMessage"]:
        return {letter.id: letter for letter in self._receive(self.name + POISON, number, PEEK_SECONDS)}

    def _dead_letter(self, letter: "QueueMessage") -> DeadLetter:
        body = _decode(letter.content)
        try:  # another program may have written it
            found = decoder_of(_Letter).decode(body)
        except UNREADABLE:
            found = _Letter()
        receives = found.receives if found.receives is not None else MAX_RECEIVES + 1
        reason = found.reason or f"given up without a reason after {receives} receives, usually by the Functions host"
        try:
            return DeadLetter(Message.decode(body), reason, receives)
        except MessageError as e:
            return DeadLetter(None, found.reason or e.message, receives)

    def _delete_dead(self, held: "dict[str, QueueMessage]", ids: Sequence[str]) -> None:
        for id_ in ids:
            self._delete(self.name + POISON, _token(held.pop(id_)))

    def _return_dead(self, letters: "Sequence[QueueMessage]") -> None:
        for letter in letters:
            with suppress(LakeupsertError):  # it becomes visible by itself later
                self._update(self.name + POISON, _token(letter), 0)
            self._receipts.pop(_token(letter), None)

    # -- requests

    def _call(
        self,
        name: str,
        operation: str,
        call: Callable[["QueueClient"], Any],
        progress: str = NOTHING_DONE,
        stale: object = ...,
    ) -> Any:
        """Azure's answer (Any: each operation has its own); ``stale`` if given and if Azure reports an invalid receipt."""
        client = _client(self.account, name)
        from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError

        try:
            return call(client)
        except HttpResponseError as e:
            if e.response is None:
                if isinstance(e, ClientAuthenticationError):  # before anything was sent
                    raise self._refusal(name, operation, 401, e.message or "", progress) from e
                raise self._unreachable(name, e, progress) from e
            code = azureaccount.error_code(e)
            if stale is not ... and code in _STALE:
                return stale
            reason = f"{code} {e.message}".partition("\n")[0]
            raise self._refusal(name, operation, e.status_code or 0, reason, progress) from e
        except (AzureError, OSError) as e:
            raise self._unreachable(name, e, progress) from e

    def _unreachable(self, name: str, e: Exception, progress: str) -> TryAgainError:
        return TryAgainError(
            "queue-unreachable",
            f"The queue {name!r} of {self.account!r}: {e}. {progress}",
            next="check the network connection to it, then run the same command again",
        )

    def _refusal(self, name: str, operation: str, status: int, reason: str, progress: str) -> LakeupsertError:
        """The error for Azure's answer, by what the operator does next."""
        what = f"Azure refused {operation} for the queue {name!r} of account {self.account!r}: {status} {reason}. {progress}"
        if status == 404:
            return ConfigurationError(
                "no-such-queue",
                f"There is no queue {name!r} in account {self.account!r}. {progress}",
                next=f"create {self.name!r} and {self.name + POISON!r}, or correct `queue`",
            )
        if status == 401 or reason.startswith(("AuthenticationFailed", "InvalidAuthenticationInfo")):
            return ConfigurationError(
                "bad-credentials",
                what,
                next="log in (`az login`), give this machine a managed identity, or correct the AZURE_STORAGE_… variable in use",
            )
        if status == 403:
            return ConfigurationError(
                "queue-not-permitted",
                what,
                next=f"give this identity the role `Storage Queue Data Contributor` on {self.name!r} and {self.name + POISON!r}, "
                "let this machine through the account's firewall, or correct its credentials",
            )
        if azureaccount.is_busy(status):
            return TryAgainError("queue-busy", what, next="run the same command again")
        return ConfigurationError("queue-unusable", what, next="correct what the message says about the queue")


@kept("AZURE_", 8)
def _client(account: str, name: str) -> "QueueClient":
    with needs_extra(f"The queue {name!r}", "azure", NOTHING_DONE):
        from azure.storage.queue import ExponentialRetry, QueueClient

        from lakeupsert.storage.adls_client import credential
    options: dict[str, object] = {
        "transport": azureaccount.transport(),
        "retry_policy": ExponentialRetry(**azureaccount.backoff()),
    }
    if connection := azureaccount.connection_string(account):
        with azureaccount.readable():
            return QueueClient.from_connection_string(connection, name, **options)
    url = f"https://{account}.queue.core.windows.net"
    return QueueClient(url, name, credential=credential(account), **options)


def _token(message: "QueueMessage") -> str:
    return f"{message.id} {message.pop_receipt}"


def _decode(content: str) -> bytes:
    """The bytes of a message. Messages of other programs may not be base64."""
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        return content.encode()


def _seconds(seconds: float) -> int:
    return min(LONGEST_AZURE_LEASE_SECONDS, ceil(seconds))
