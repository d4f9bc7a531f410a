"""A queue of a service that counts a receive for each message and keeps dead letters in a second queue: SQS and Azure.

Messages are received one by one: returning the companions of a message that is delivered by itself would use up
their tries. If a process ends, its messages stay hidden until their time is up. Dead letters stay unseen while another process
lists them.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lakeupsert.errors import LakeupsertError
from lakeupsert.queue.base import ALONE_FROM, DeadLetter, Lease, Message, MessageError, WorkQueue

Record = Mapping[str, Any]
"""A message of a function's event, as JSON."""
Letter = TypeVar("Letter")
"""A message as the service's SDK gives it."""


@dataclass(frozen=True)
class Received:
    """One receive of one message. ``bury`` moves it to the dead letters, with a reason, if it is unreadable."""

    body: str | bytes
    receives: int
    token: str
    bury: Callable[[str], object]

    def lease(self) -> Lease:
        """Raises MessageError."""
        return Lease(Message.decode(self.body), self.receives, self.token)


class ServiceQueue(WorkQueue, Generic[Letter]):
    """See `lakeupsert.queue.base.WorkQueue` for what each method promises."""

    together: int
    """Maximum messages that the service returns in one request."""

    def receive(self, limit: int, lease_seconds: float, wait_seconds: float = 0.0) -> list[Lease]:
        leases: list[Lease] = []
        while len(leases) < limit:
            try:
                lease = self._next(lease_seconds, None if leases else wait_seconds)
            except LakeupsertError:
                if leases:
                    break  # the caller works on these; the next call reports the error
                raise
            if lease is None:
                break
            if lease.receives >= ALONE_FROM:
                for other in leases:  # was received less often, so it still has tries left
                    self.release(other)
                return [lease]
            leases.append(lease)
        return leases

    @contextmanager
    def leases_of(self, records: Iterable[Record]) -> Iterator[dict[Lease, Record]]:
        """Leases of messages that the service's functions received for us, each with its record.

        Unreadable messages go to the dead letters when the block ends, so that they do not block the others.
        """
        leases: dict[Lease, Record] = {}
        unreadable: list[tuple[Received, str]] = []
        for record in records:
            received = self._of_record(record)
            try:
                leases[received.lease()] = record
            except MessageError as e:
                unreadable.append((received, e.message))
        yield leases
        for received, reason in unreadable:
            received.bury(reason)

    def dead_letters(self, limit: int | None = None) -> list[DeadLetter]:
        with self._held_dead_letters(limit) as held:
            return [self._dead_letter(letter) for letter in held.values()]

    def redrive(self, again: Collection[Message], drop: Collection[Message] = ()) -> tuple[int, int]:
        again, drop = frozenset(again), frozenset(drop)
        if not again | drop:
            return 0, 0
        with self._held_dead_letters() as held:
            messages = {id_: self._dead_letter(letter).message for id_, letter in held.items()}
            again_ids = {id_: message for id_, message in messages.items() if message in again}
            dropped_ids = [id_ for id_, message in messages.items() if message in drop]
            self.send(message for message in again_ids.values() if message)
            self._delete_dead(held, [*again_ids, *dropped_ids])
        return len(again_ids), len(dropped_ids)

    def _next(self, lease_seconds: float, wait_seconds: float | None) -> Lease | None:
        """The next readable message; unreadable ones are buried."""
        while (received := self._receive_one(lease_seconds, wait_seconds)) is not None:
            try:
                return received.lease()
            except MessageError as e:
                received.bury(e.message)
        return None

    @contextmanager
    def _held_dead_letters(self, limit: int | None = None) -> Iterator[dict[str, Letter]]:
        """Up to ``limit`` dead letters by id, hidden from others. Those left at the end of the block become visible again."""
        held: dict[str, Letter] = {}
        try:
            while (number := min(self.together, self.together if limit is None else limit - len(held))) > 0:
                before = len(held)
                held.update(self._receive_dead(number))
                if len(held) == before:  # no more, or the first ones again because this took longer than `PEEK_SECONDS`
                    break
            yield held
        finally:
            if held:
                self._return_dead([*held.values()])

    @abstractmethod
    def _receive_one(self, lease_seconds: float, wait_seconds: float | None) -> Received | None:
        """The next message. ``wait_seconds``: how long to wait for it; None: not at all."""

    @abstractmethod
    def _of_record(self, record: Record) -> Received: ...

    @abstractmethod
    def _receive_dead(self, number: int) -> dict[str, Letter]:
        """Up to ``number`` dead letters by id, hidden for `PEEK_SECONDS`."""

    @abstractmethod
    def _dead_letter(self, letter: Letter) -> DeadLetter: ...

    @abstractmethod
    def _delete_dead(self, held: dict[str, Letter], ids: Sequence[str]) -> None:
        """Delete these dead letters, and remove them from ``held``."""

    @abstractmethod
    def _return_dead(self, letters: Sequence[Letter]) -> None:
        """Make dead letters visible again."""
