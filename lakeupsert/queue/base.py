"""The queue between the phases: one small message per partition that a batch touched.

A queue is a hint. What is dirty is the ledger less the manifests' `merged`, so a message that is lost, repeated or late
changes when a partition is merged, never what it becomes; `lakeupsert run` sends what is missing again. What a backend
must keep is `lakeupsert.testing.queue_contract.WorkQueueContract`.

    send -> visible -- receive --> leased -- ack --> gone
               ^                     |
               |-- release, or time -'-- bury --> dead letters
               '-------------- redrive --------------'
"""

from collections.abc import Collection, Iterable
from typing import Literal, Protocol

import msgspec

from lakeupsert.errors import ConfigurationError


class MessageError(ConfigurationError):
    """What lies on a queue is no message that this version can read."""


class Message(msgspec.Struct, frozen=True):
    """Bring ``partition`` of ``table`` up to ``batch``. It tells where to look, never where data are stored.

    With ``work``, the name of an object of the table: do what that says of the partition, which was at ``batch`` then.
    With ``unit``, a number: of what is next to do there, merge that unit alone.
    """

    table: str
    partition: str
    batch: int
    work: str | None = None
    unit: int | None = None

    def __post_init__(self) -> None:
        if not self.table or not self.partition or self.batch < 0:
            raise ValueError("a message names a table, a partition and a batch number from 0 on")

    def encode(self) -> str:
        fields = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.json.encode({"v": 1, **fields}).decode()

    @staticmethod
    def decode(body: str | bytes) -> "Message":
        """Raises MessageError where the body is damaged, or comes from a later version; unknown fields are ignored."""
        try:
            found = msgspec.json.decode(body, type=_Body)
        except msgspec.MsgspecError as e:
            raise MessageError(
                "unreadable-message",
                f"A message on the queue can't be read: {e}. Expected version 1 (`v`) with `table`, `partition` and "
                "`batch`.",
                next="upgrade lakeupsert here if a later version sends to this queue; `lakeupsert run` sends again what "
                "is still to merge",
            ) from e
        return Message(found.table, found.partition, found.batch, found.work, found.unit)


class _Body(Message, frozen=True, kw_only=True):
    v: Literal[1]


class Lease(msgspec.Struct, frozen=True):
    """One receive of one message.

    Attributes:
        receives: how often the message was received, this time included; 1 is the first.
        token: what the backend knows this receive by; nobody else reads it.
    """

    message: Message
    receives: int
    token: str


class QueueStats(msgspec.Struct, frozen=True):
    """How many messages a receive would find, how many are hidden (leased, or released with a delay), how many dead."""

    visible: int
    leased: int
    dead: int


class DeadLetter(msgspec.Struct, frozen=True):
    """``message`` is None where it can't be read; the reason then says why."""

    message: Message | None
    reason: str
    receives: int


ALONE_FROM = 3
"""The receive from which on a message comes alone."""


class WorkQueue(Protocol):
    """Messages are delivered at least once, roughly in the order of sending; equal messages are each kept.

    A lease is stale once its message was received again. The calls that take a lease return whether it still counted;
    a stale one changes nothing. (SQS answers yes to a stale ack as well, so True is no proof that the message is gone.)
    """

    @property
    def max_receives(self) -> int:
        """Who receives a message more often than this does not try it, but buries it (`dedupe`). Higher: a message that
        kills its worker kills more of them. Too low: a few restarts bury good work until the next `run`."""

    def send(self, messages: Iterable[Message]) -> None:
        """Durable as far as the backend goes when it returns; after an error some may have been sent."""

    def receive(self, limit: int, lease_seconds: float, wait_seconds: float = 0.0) -> list[Lease]:
        """Up to ``limit`` visible messages, oldest first, hidden from everybody for ``lease_seconds``.

        Where none is visible, a backend whose server can wait for one may do so for ``wait_seconds`` (and must not answer
        too early that there is none, which takes SQS a second).

        One that can't be read goes to the dead letters, so that it keeps nobody from those behind it. One that was received
        twice before comes alone, where the backend can: it may kill its worker, and take the others along.
        """

    def extend(self, lease: Lease, lease_seconds: float) -> bool:
        """Hide the message for ``lease_seconds`` from now."""

    def ack(self, lease: Lease) -> bool:
        """The work is done: delete the message."""

    def release(self, lease: Lease, delay_seconds: float = 0.0) -> bool:
        """Give the message back, visible after ``delay_seconds``; the receive stays counted and the lease is over."""

    def bury(self, lease: Lease, reason: str) -> bool:
        """Put the message with the dead letters: another try would fail the same way."""

    def stats(self) -> QueueStats:
        """Exact where the backend can count, otherwise its estimate."""

    def dead_letters(self, limit: int | None = None) -> list[DeadLetter]:
        """Up to ``limit`` dead letters, or all; they stay."""

    def redrive(self, again: Collection[Message], drop: Collection[Message] = ()) -> tuple[int, int]:
        """Make the dead letters of ``again`` visible at once, as if never received, and delete those of ``drop``.

        How many it were of each. All others stay, and so do those that can't be read. Of several that redrive a dead
        letter at once, one brings it back.
        """

    def close(self) -> None:
        """Let go of connections; leases stay."""
