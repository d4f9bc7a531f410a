"""The queue between the phases: one small message per partition that a batch touched.

A queue is a hint. Ledger and manifests alone say which partitions are dirty. So a lost, repeated or late message changes when a
partition is merged, never its rows, and `lakeupsert run` sends missing messages again. Every backend must pass
`lakeupsert.testing.queue_contract.WorkQueueContract`.

    send -> visible -- receive --> leased -- ack --> gone
               ^                     |
               |-- release, or time -'-- bury --> dead letters
               '-------------- redrive --------------'
"""

from collections.abc import Collection, Iterable
from typing import Literal, Protocol

import msgspec

from lakeupsert.decoding import UNREADABLE, decoder_of
from lakeupsert.errors import ConfigurationError


class MessageError(ConfigurationError):
    """A queue contains something that is not a message that this version can read."""


class Message(msgspec.Struct, frozen=True):
    """Merge ``partition`` of ``table`` up to ``batch``. A message says where to look, never where data are stored.

    Attributes:
        work: a work object of the table: do what it says about the partition, which was at ``batch`` when it was written.
        unit: merge only this unit of the partition's next step.
    """

    table: str
    partition: str
    batch: int
    work: str | None = None
    unit: int | None = None

    def __post_init__(self) -> None:
        if not self.table or not self.partition or self.batch < 0:
            raise ValueError("a message needs a table, a partition and a batch number from 0 on")

    def encode(self) -> str:
        fields = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.json.encode({"v": 1, **fields}).decode()

    @staticmethod
    def decode(body: str | bytes) -> "Message":
        """Raises MessageError if the body is damaged or from a later version. Unknown fields are ignored."""
        try:
            content = _decode(body)
        except UNREADABLE as e:
            raise MessageError(
                "unreadable-message",
                f"A message on the queue can't be read: {e}. Expected version 1 (`v`) with `table`, `partition` and "
                "`batch`.",
                next="if a later version sends to this queue, upgrade lakeupsert here; `lakeupsert run` sends the messages of "
                "all dirty partitions again",
            ) from e
        return Message(content.table, content.partition, content.batch, content.work, content.unit)


class _Body(Message, frozen=True, kw_only=True):
    v: Literal[1]


_decode = decoder_of(_Body).decode


class Lease(msgspec.Struct, frozen=True):
    """One receive of one message.

    Attributes:
        receives: how often the message was received, including this time.
        token: the backend's id for this receive; nobody else reads it.
    """

    message: Message
    receives: int
    token: str


class QueueStats(msgspec.Struct, frozen=True):
    """How many messages are visible to a receive, hidden (leased, or released with a delay), and dead."""

    visible: int
    leased: int
    dead: int


class DeadLetter(msgspec.Struct, frozen=True):
    """``message`` is None if it can't be read; the reason then says why."""

    message: Message | None
    reason: str
    receives: int


NOTHING_DONE = "This call sent, received and acknowledged no message."
"""For errors of calls that changed nothing."""
ALONE_FROM = 3
"""From this receive on, a message is delivered alone."""


class WorkQueue(Protocol):
    """Messages are delivered at least once, roughly in the order of sending. Equal messages are all kept.

    A lease is stale once its message is received again. Calls with a lease return whether it was still valid; a stale lease
    changes nothing. (SQS also confirms a stale ack, so True does not prove that the message is gone.)
    """

    @property
    def max_receives(self) -> int:
        """How many tries a message has: 5, and on SQS one fewer than its `maxReceiveCount`. At the last try a failure buries it;
        one that is received even more often is buried without a try (`worker`). Higher: a message that kills its worker kills
        more of them. Too low: a few restarts bury good messages until the next `run`."""

    def send(self, messages: Iterable[Message]) -> None:
        """Send messages, as durably as the backend can. After an error, some may have been sent."""

    def receive(self, limit: int, lease_seconds: float, wait_seconds: float = 0.0) -> list[Lease]:
        """Receive up to ``limit`` visible messages, oldest first, and hide them from everybody for ``lease_seconds``.

        If no message is visible, a backend whose server supports it may wait for ``wait_seconds``. It must not report too early
        that there is none, which takes SQS a second.

        A message that can't be read goes to the dead letters, so that it does not block those behind it. A message that was
        received twice before is delivered alone if the backend can do that, because it may kill its worker.
        """

    def extend(self, lease: Lease, lease_seconds: float) -> bool:
        """Hide the message for ``lease_seconds`` from now."""

    def ack(self, lease: Lease) -> bool:
        """The work is done: delete the message."""

    def release(self, lease: Lease, delay_seconds: float = 0.0) -> bool:
        """Return the message, visible after ``delay_seconds``. The receive stays counted, and the lease ends."""

    def bury(self, lease: Lease, reason: str) -> bool:
        """Move the message to the dead letters, because another try would fail the same way."""

    def stats(self) -> QueueStats:
        """Exact if the backend can count, otherwise its estimate."""

    def dead_letters(self, limit: int | None = None) -> list[DeadLetter]:
        """Up to ``limit`` dead letters, or all. They stay."""

    def redrive(self, again: Collection[Message], drop: Collection[Message] = ()) -> tuple[int, int]:
        """Make the dead letters in ``again`` visible now, as if never received, and delete those in ``drop``.

        Returns how many of each there were. All others stay, also those that can't be read. If several callers redrive a dead
        letter at the same time, it returns once.
        """

    def close(self) -> None:
        """Close connections. Leases stay."""
