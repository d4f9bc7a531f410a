"""A queue of Azure Queue Storage, for workers on any number of machines.

Reads     the queue and `NAME-poison`, where dead letters are, as Azure's Functions have it
Writes    both queues; it makes none
Repeat    safe: a message that is sent or received twice finds its partition merged

What Azure does not do: it never gives a message up, so workers bury it after `MAX_RECEIVES`; it can't wait for one; and it
does not count those that are visible. A message is the text that Functions expect, in base64, and never expires.
"""

import base64
import binascii
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from math import ceil
from typing import Any

import msgspec

from lakeupsert.errors import ConfigurationError, LakeupsertError, TryAgainError
from lakeupsert.queue.base import ALONE_FROM, DeadLetter, Lease, Message, MessageError, QueueStats
from lakeupsert.storage import azureaccount

ADDRESS = re.compile(r"azqueue://(?P<account>[a-z0-9]{3,24})/(?P<name>[a-z0-9](?:-?[a-z0-9]){2,55})")
MAX_RECEIVES = 5
"""After so many receives without an answer a message is buried. Functions give it up after one more (host.json)."""
POISON = "-poison"
TOGETHER = 32
"""How many messages Azure gives, or shows, in one request."""
LONGEST_LEASE_SECONDS = 7 * 86_400
PEEK_SECONDS = 120
"""How long dead letters are hidden from others while one looks at them. Too short for very many: they may come back
twice, which is harmless. Longer: those that a killed process looked at can't be seen until then."""
REASON_CHARACTERS = 3_500
BODY_BYTES = 3_500
"""Both, each character six in JSON at worst, and that in base64, are below Azure's 64 KiB; only a message that is not ours can be
longer."""

_NOTHING = "This call sent, received and answered nothing."
_STALE = {"MessageNotFound", "PopReceiptMismatch"}


class _Letter(msgspec.Struct):
    """What a dead letter says beside its message; those that the Functions' host buried say nothing."""

    reason: str | None = None
    receives: int | None = None
    unreadable: str | None = None


class AzureQueue:
    """See `lakeupsert.queue.base.WorkQueue` for what each method promises.

    Messages are received one by one, since Azure counts a receive for each that it gives: giving back those that came along
    with one that must come alone would use up their tries. A process that ends keeps its messages hidden until their time is
    up. Dead letters that another process looks at just then are neither listed nor redriven.
    """

    def __init__(self, account: str, name: str, max_receives: int = MAX_RECEIVES) -> None:
        self.account = account
        self.name = name
        self._max_receives = max_receives
        # Each extension makes a receipt void and gives another one, and who holds the lease has the first.
        self._receipts: dict[str, str] = {}
        self._hosted: set[str] = set()
        """Tokens of leases that the Functions' host extends too."""
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
            self._send(self.name, message.encode().encode(), told=f"{sent} messages were sent before.")

    def receive(self, limit: int, lease_seconds: float, wait_seconds: float = 0.0) -> list[Lease]:
        leases: list[Lease] = []
        while len(leases) < limit:
            try:
                lease = self._next(lease_seconds)
            except LakeupsertError:
                if leases:
                    break  # these are worked on; the next call tells what is wrong
                raise
            if lease is None:
                break
            if lease.receives >= ALONE_FROM:
                for other in leases:  # was received less often, so it can't be out of tries by this
                    self.release(other)
                return [lease]
            leases.append(lease)
        return leases

    def _next(self, lease_seconds: float) -> Lease | None:
        """The next message that can be read; others are buried."""
        while found := self._receive(self.name, 1, lease_seconds):
            token, body, receives = _token(found[0]), _decoded(found[0].content), int(found[0].dequeue_count)
            try:
                return Lease(Message.decode(body), receives, token)
            except MessageError as e:
                self._bury(token, {"unreadable": _text(body)}, receives, e.message)
        return None

    @contextmanager
    def received(self, records: Iterable[Mapping[str, Any]]) -> Iterator[dict[Lease, Mapping[str, Any]]]:
        """Leases of messages that Azure's Functions received for us, each with its own of ``records``: `id`, `popReceipt`, `body`
        (decoded), `dequeueCount`.

        Those that can't be read go to the dead letters when the block ends, so that they keep nobody from the others. While a
        function runs, its host extends the lease, which makes our receipt void: our answer then changes nothing, and the
        host's own, by how the function ends, is the one that counts. To bury, a letter is sent all the same: the host deletes the
        message of a function that ends well, and one letter more is harmless.
        """
        leases: dict[Lease, Mapping[str, Any]] = {}
        unreadable: list[tuple[str, dict[str, Any], int, str]] = []
        for record in records:
            body, token = record["body"], f"{record['id']} {record['popReceipt']}"
            self._hosted.add(token)
            try:
                leases[Lease(Message.decode(body), record["dequeueCount"], token)] = record
            except MessageError as e:
                unreadable.append((token, {"unreadable": _text(body)}, record["dequeueCount"], e.message))
        yield leases
        for letter in unreadable:
            self._bury(*letter)

    def extend(self, lease: Lease, lease_seconds: float) -> bool:
        return self._hide(lease.token, lease_seconds)

    def ack(self, lease: Lease) -> bool:
        return self._delete(self.name, lease.token)

    def release(self, lease: Lease, delay_seconds: float = 0.0) -> bool:
        with self._answering:  # an extension that waits for it finds nothing to extend
            try:
                return self._update(self.name, lease.token, _seconds(delay_seconds))
            finally:
                self._receipts.pop(lease.token, None)

    def bury(self, lease: Lease, reason: str) -> bool:
        return self._bury(lease.token, msgspec.json.decode(lease.message.encode()), lease.receives, reason)

    def stats(self) -> QueueStats:
        visible, leased = self._counts(self.name)
        return QueueStats(visible, leased, sum(self._counts(self.name + POISON)))

    def dead_letters(self, limit: int | None = None) -> list[DeadLetter]:
        with self._looking_at_dead_letters(limit) as held:
            return [_dead_letter(letter) for letter in held.values()]

    def redrive(self, again: Collection[Message], drop: Collection[Message] = ()) -> tuple[int, int]:
        again, drop = frozenset(again), frozenset(drop)
        if not again | drop:
            return 0, 0
        with self._looking_at_dead_letters() as held:
            messages = {id_: _dead_letter(letter).message for id_, letter in held.items()}
            back = {id_: message for id_, message in messages.items() if message in again}
            gone = [id_ for id_, message in messages.items() if message in drop]
            self.send(message for message in back.values() if message)
            for id_ in (*back, *gone):
                self._delete(self.name + POISON, _token(held.pop(id_)))
        return len(back), len(gone)

    def close(self) -> None:
        self._receipts.clear()
        self._hosted.clear()

    # -- one of the two queues

    def _send(self, name: str, body: bytes, told: str = _NOTHING) -> None:
        text = base64.b64encode(body).decode()
        self._call(name, "send_message", lambda client: client.send_message(text, time_to_live=-1), told)

    def _receive(self, name: str, number: int, lease_seconds: float) -> list[Any]:
        asked = {
            "messages_per_page": number,
            "max_messages": number,
            "visibility_timeout": max(1, _seconds(lease_seconds)),
        }
        return list(self._call(name, "receive_messages", lambda client: list(client.receive_messages(**asked))))

    def _counts(self, name: str) -> tuple[int, int]:
        """How many messages are visible, and how many hidden; beyond `TOGETHER` visible ones all count as visible."""
        visible = len(self._call(name, "peek_messages", lambda client: client.peek_messages(max_messages=TOGETHER)))
        properties = self._call(name, "get_queue_properties", lambda client: client.get_queue_properties())
        total = max(visible, int(properties.approximate_message_count))
        return (total, 0) if visible == TOGETHER else (visible, total - visible)

    def _hide(self, token: str, seconds: float) -> bool:
        """Whether the receipt still counted."""
        seconds = _seconds(seconds)
        with self._answering:  # two at once would make each other's receipt void
            return self._update(self.name, token, seconds)

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
        """Whether the receipt still counted."""
        with self._answering:
            id_, receipt = self._receipts.pop(token, token).split(" ")
            deleted = self._call(
                name, "delete_message", lambda client: client.delete_message(id_, receipt) or True, stale=False
            )
            return bool(deleted)

    def _bury(self, token: str, body: dict[str, Any], receives: int, reason: str) -> bool:
        # Two queues, two requests: a process that dies between them leaves a letter of a message that still lives.
        if not self._hide(token, PEEK_SECONDS) and token not in self._hosted:
            return False
        letter = {**body, "reason": reason[:REASON_CHARACTERS] or "none was given", "receives": receives}
        self._send(self.name + POISON, msgspec.json.encode(letter))
        return self._delete(self.name, token) or token in self._hosted

    @contextmanager
    def _looking_at_dead_letters(self, limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Up to ``limit`` dead letters by their ids, hidden from others; those that the block leaves there come back."""
        held: dict[str, Any] = {}
        try:
            while (number := min(TOGETHER, TOGETHER if limit is None else limit - len(held))) > 0:
                before = len(held)
                found = self._receive(self.name + POISON, number, PEEK_SECONDS)
                held.update({letter.id: letter for letter in found})
                if len(held) == before:  # no more, or the first ones again, as this took longer than they are hidden
                    break
            yield held
        finally:
            for letter in held.values():
                with suppress(LakeupsertError):  # it comes back by itself
                    self._update(self.name + POISON, _token(letter), 0)
                self._receipts.pop(_token(letter), None)

    # -- requests

    def _call(
        self, name: str, operation: str, call: Callable[[Any], Any], told: str = _NOTHING, stale: Any = ...
    ) -> Any:
        """Azure's answer; ``stale`` instead, where that is given and Azure says that the receipt is over."""
        client = _client(os.getpid(), azureaccount.environment(), self.account, name)
        from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError

        try:
            return call(client)
        except HttpResponseError as e:
            if e.response is None:
                if isinstance(e, ClientAuthenticationError):  # before anything was sent
                    raise self._refused(name, operation, 401, e.message or "", told) from e
                raise self._unreachable(name, e, told) from e
            code = azureaccount.error_code(e)
            if stale is not ... and code in _STALE:
                return stale
            said = f"{code} {e.message}".partition("\n")[0]
            raise self._refused(name, operation, e.status_code or 0, said, told) from e
        except (AzureError, OSError) as e:
            raise self._unreachable(name, e, told) from e

    def _unreachable(self, name: str, e: Exception, told: str) -> TryAgainError:
        return TryAgainError(
            "queue-unreachable",
            f"The queue {name!r} of {self.account!r}: {e}. {told}",
            next="see that the network leads there, then run the same command again",
        )

    def _refused(self, name: str, operation: str, status: int, said: str, told: str) -> LakeupsertError:
        """Azure's word, as what the operator does next."""
        what = f"Azure refused {operation} for the queue {name!r} of account {self.account!r}: {status} {said}. {told}"
        if status == 404:
            return ConfigurationError(
                "no-such-queue",
                f"There is no queue {name!r} in account {self.account!r}. {told}",
                next=f"create {self.name!r} and {self.name + POISON!r}, or correct `queue`",
            )
        if status == 401 or said.startswith(("AuthenticationFailed", "InvalidAuthenticationInfo")):
            return ConfigurationError(
                "bad-credentials",
                what,
                next="log in (`az login`), give this machine a managed identity, or correct AZURE_STORAGE_CONNECTION_STRING",
            )
        if status == 403:
            return ConfigurationError(
                "queue-not-permitted",
                what,
                next=f"give this identity the role `Storage Queue Data Contributor` on {self.name!r} and {self.name + POISON!r}, "
                "see that the account's firewall lets this machine in, or correct its credentials",
            )
        if azureaccount.is_busy(status):
            return TryAgainError("queue-busy", what, next="run the same command again")
        return ConfigurationError("queue-unusable", what, next="correct what that says of the queue")


@lru_cache(maxsize=8)
def _client(process: int, environment: azureaccount.Environment, account: str, name: str) -> Any:
    """Of this process: a connection that is shared with a parent would mix their answers."""
    try:
        from azure.storage.queue import ExponentialRetry, QueueClient
    except ModuleNotFoundError as e:
        raise ConfigurationError(
            "extra-missing",
            f"The queue {name!r} is in Azure, and {e.name} is not installed. {_NOTHING}",
            next="pip install 'lakeupsert[azure]'",
        ) from e
    options: dict[str, Any] = {
        "transport": azureaccount.transport(),
        "retry_policy": ExponentialRetry(**azureaccount.backoff()),
    }
    if given := azureaccount.connection_string(account):
        with azureaccount.readable():
            return QueueClient.from_connection_string(given, name, **options)
    url = f"https://{account}.queue.core.windows.net"
    return QueueClient(url, name, credential=azureaccount.credential(), **options)


def _token(message: Any) -> str:
    return f"{message.id} {message.pop_receipt}"


def _decoded(content: str) -> bytes:
    """What others sent may be no base64."""
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        return content.encode()


def _text(body: bytes) -> str:
    return body[:BODY_BYTES].decode(errors="replace")


def _dead_letter(letter: Any) -> DeadLetter:
    body = _decoded(letter.content)
    try:  # anybody may have written it
        said = msgspec.json.decode(body, type=_Letter)
    except msgspec.MsgspecError:
        said = _Letter()
    receives = said.receives if said.receives is not None else MAX_RECEIVES + 1
    reason = (
        said.reason or f"it was given up without a word, after {receives} receives: as a rule by the Functions' host"
    )
    try:
        return DeadLetter(Message.decode(body), reason, receives)
    except MessageError as e:
        return DeadLetter(None, said.reason or e.message, receives)


def _seconds(seconds: float) -> int:
    return min(LONGEST_LEASE_SECONDS, ceil(seconds))
