"""What every work queue must guarantee, as a pytest class: subclass it and define `new_queue`.

A lost message costs only time (see `lakeupsert.queue.base`), but a queue that loses messages, or delivers one to two workers,
costs that time every night.
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from threading import Barrier, Lock

import pytest

from lakeupsert import clock
from lakeupsert.queue.base import DeadLetter, Lease, Message, QueueStats, WorkQueue

HOLD = 600.0
"""A lease time in seconds that outlives every test."""

PARTITIONS = (
    "transaction_date=2020-01-01",
    "region=Zürich/city=北京 🚲",
    'name=it\'s "quoted" `here`; DROP TABLE messages; --',
    "note=line one\nline two\r\n\ttab \\ backslash",
    "share=100%/path=a%2Fb&c=<d>",
    "blank= ",
    "no character=\ufffe\uffff",
    "null=\x00",
)


def message(batch: int, partition: str = PARTITIONS[0]) -> Message:
    return Message("sales", partition, batch)


def messages(number: int) -> list[Message]:
    return [message(batch) for batch in range(number)]


def drain(queue: WorkQueue, lease_seconds: float = HOLD) -> list[Lease]:
    """Receive and hold messages until none is visible."""
    leases: list[Lease] = []
    for _ in range(1000):  # a queue that delivers leased messages again must fail here, not hang
        received = queue.receive(10, lease_seconds)
        if not received:
            return leases
        leases += received
    raise AssertionError(f"the queue does not run empty: {len(leases)} leases")


class StoppedClock(clock.Source):
    """A clock that stands still except for `skip`."""

    def __init__(self) -> None:
        self._now = super().now()

    def now(self) -> datetime:
        return self._now

    def skip(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)


class WorkQueueContract:
    lease_seconds = 60.0
    """The lease time of tests that let a lease run out. A queue that needs real time to pass sets it to a few seconds."""

    def new_queue(self) -> WorkQueue:
        """An empty queue with ``max_receives`` = 3 that no other test uses."""
        raise NotImplementedError

    def let_time_pass(self, seconds: float) -> None:
        """Move our own clock forward. A queue that uses a server's clock overrides this to let that time pass."""
        self._clock.skip(seconds)

    @pytest.fixture(autouse=True)
    def _stopped_clock(self) -> Iterator[None]:
        self._clock = StoppedClock()
        with clock.use(self._clock):
            yield

    @pytest.fixture
    def queue(self) -> Iterator[WorkQueue]:
        queue = self.new_queue()
        yield queue
        queue.close()

    def receive_one(self, queue: WorkQueue, lease_seconds: float = HOLD) -> Lease:
        """Receive the only visible message."""
        [lease] = drain(queue, lease_seconds)
        return lease

    def receive_twice(self, queue: WorkQueue) -> tuple[Lease, Lease]:
        """Send a message and receive it twice: its stale lease, and the current one."""
        queue.send([message(1)])
        stale = self.receive_one(queue, self.lease_seconds)
        self.let_time_pass(self.lease_seconds)
        return stale, self.receive_one(queue, self.lease_seconds)

    def receive_last(self, queue: WorkQueue, lease_seconds: float = HOLD) -> Lease:
        """Send a message and receive it as often as it may be."""
        queue.send([message(1)])
        for _ in range(queue.max_receives - 1):
            queue.release(self.receive_one(queue))
        return self.receive_one(queue, lease_seconds)

    def buried(self, queue: WorkQueue, number: int) -> list[Message]:
        """Send and bury this many messages."""
        queue.send(messages(number))
        for lease in drain(queue):
            queue.bury(lease, "no such table")
        return messages(number)

    # -- send and receive

    def test_empty_queue_gives_nothing(self, queue: WorkQueue) -> None:
        assert queue.receive(10, HOLD) == []
        assert queue.dead_letters(10) == []
        assert queue.stats() == QueueStats(visible=0, leased=0, dead=0)

    def test_sending_nothing_leaves_the_queue_empty(self, queue: WorkQueue) -> None:
        queue.send([])
        assert drain(queue) == []

    def test_suspicious_messages_come_alone_and_wait_for_nobody(self, queue: WorkQueue) -> None:
        """Eight messages whose workers were killed twice: none may use up its attempts while it waits for the others."""
        queue.send(messages(8))
        for _ in range(2):
            for lease in drain(queue):
                queue.release(lease)
        queue.send([message(99)])
        received = [queue.receive(8, HOLD) for _ in range(10)]
        suspicious = [
            [lease.receives for lease in leases] for leases in received if leases[:1] and leases[0].receives >= 3
        ]
        assert suspicious == [[3]] * 8
        assert sum(len(leases) for leases in received) == 9

    def test_sent_messages_are_each_received_once(self, queue: WorkQueue) -> None:
        queue.send(iter(messages(120)))
        leases = drain(queue)
        assert Counter(lease.message for lease in leases) == Counter(messages(120))
        assert {lease.receives for lease in leases} == {1}

    def test_receive_gives_no_more_than_its_limit(self, queue: WorkQueue) -> None:
        queue.send(messages(5))
        assert len(queue.receive(2, HOLD)) <= 2

    def test_equal_messages_are_each_kept(self, queue: WorkQueue) -> None:
        queue.send([message(7), message(7)])
        queue.send([message(7)])
        leases = drain(queue, self.lease_seconds)
        assert [lease.message for lease in leases] == [message(7)] * 3
        queue.ack(leases[0])
        self.let_time_pass(self.lease_seconds)
        assert [lease.message for lease in drain(queue)] == [message(7)] * 2

    @pytest.mark.parametrize("partition", PARTITIONS)
    def test_partition_name_arrives_as_it_was_sent(self, queue: WorkQueue, partition: str) -> None:
        queue.send([message(1, partition)])
        lease = self.receive_one(queue)
        assert lease.message == message(1, partition)
        queue.bury(lease, f"no rows in {partition!r}")
        assert queue.dead_letters(10) == [DeadLetter(message(1, partition), f"no rows in {partition!r}", 1)]

    def test_work_that_a_message_names_arrives_and_tells_it_from_others(self, queue: WorkQueue) -> None:
        sent = [
            message(1),
            Message("sales", PARTITIONS[0], 1, unit=3),
            Message("sales", PARTITIONS[0], 1, "_lakeupsert/units/reprocess-1.json"),
        ]
        queue.send(sent)
        leases = drain(queue)
        assert {lease.message for lease in leases} == set(sent)
        for lease in leases:
            queue.bury(lease, "no")
        assert queue.redrive(sent[1:], drop=sent[:1]) == (2, 1)
        assert {lease.message for lease in drain(queue)} == set(sent[1:])

    def test_counts_tell_visible_leased_and_dead(self, queue: WorkQueue) -> None:
        queue.send(messages(4))
        _held, buried, *others = drain(queue)
        queue.bury(buried, "no such table")
        for lease in others:
            queue.release(lease)
        assert queue.stats() == QueueStats(visible=2, leased=1, dead=1)

    def test_concurrent_consumers_never_hold_one_message_at_once(self, queue: WorkQueue) -> None:
        queue.send(messages(120))
        start, lock = Barrier(4), Lock()
        held: set[Message] = set()
        done: list[Message] = []

        def consume(_: int) -> None:
            start.wait()
            while leases := queue.receive(3, HOLD):
                got = {lease.message for lease in leases}
                with lock:
                    assert not got & held
                    held.update(got)
                for lease in leases:
                    with lock:  # before the ack, after which another consumer may receive it
                        held.remove(lease.message)
                        done.append(lease.message)
                    assert queue.ack(lease)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(consume, range(4)))
        assert Counter(done) == Counter(messages(120))

    # -- the end of a lease

    def test_leased_message_is_invisible_until_its_time_is_up(self, queue: WorkQueue) -> None:
        queue.send([message(1)])
        self.receive_one(queue, HOLD)
        self.let_time_pass(self.lease_seconds)
        assert drain(queue) == []

    def test_lease_that_ran_out_is_received_again_and_counted(self, queue: WorkQueue) -> None:
        queue.send([message(1)])
        assert self.receive_one(queue, self.lease_seconds).receives == 1
        self.let_time_pass(self.lease_seconds)
        again = self.receive_one(queue)
        assert (again.message, again.receives) == (message(1), 2)

    def test_acked_message_never_returns(self, queue: WorkQueue) -> None:
        queue.send(messages(2))
        first, second = drain(queue, self.lease_seconds)
        assert queue.ack(first)
        self.let_time_pass(self.lease_seconds)
        assert self.receive_one(queue).message == second.message

    def test_ack_after_the_lease_ran_out_counts_while_nobody_received_again(self, queue: WorkQueue) -> None:
        queue.send([message(1)])
        late = self.receive_one(queue, self.lease_seconds)
        self.let_time_pass(self.lease_seconds)
        assert queue.ack(late)
        assert drain(queue) == []

    def test_stale_ack_deletes_nothing(self, queue: WorkQueue) -> None:
        """A backend may answer true or false, because SQS can't know."""
        stale, current = self.receive_twice(queue)
        queue.ack(stale)
        self.let_time_pass(self.lease_seconds)
        assert self.receive_one(queue).message == current.message

    def test_stale_ack_leaves_the_newer_lease_in_force(self, queue: WorkQueue) -> None:
        stale, current = self.receive_twice(queue)
        queue.ack(stale)
        assert drain(queue) == []
        assert queue.ack(current)
        self.let_time_pass(self.lease_seconds)
        assert drain(queue) == []

    def test_extended_lease_outlives_its_first_time(self, queue: WorkQueue) -> None:
        queue.send([message(1)])
        lease = self.receive_one(queue, self.lease_seconds)
        assert queue.extend(lease, HOLD)
        self.let_time_pass(self.lease_seconds)
        assert drain(queue) == []

    def test_extended_lease_ends_its_new_time_from_the_extension_on(self, queue: WorkQueue) -> None:
        queue.send([message(1)])
        lease = self.receive_one(queue, HOLD)
        assert queue.extend(lease, self.lease_seconds)
        assert drain(queue) == []
        self.let_time_pass(self.lease_seconds)
        assert self.receive_one(queue).receives == 2

    def test_extended_lease_can_be_acked(self, queue: WorkQueue) -> None:
        queue.send([message(1)])
        lease = self.receive_one(queue, self.lease_seconds)
        assert queue.extend(lease, self.lease_seconds)
        assert queue.ack(lease)
        self.let_time_pass(self.lease_seconds)
        assert drain(queue) == []

    def test_released_message_is_visible_at_once_and_stays_counted(self, queue: WorkQueue) -> None:
        queue.send([message(1)])
        assert queue.release(self.receive_one(queue))
        assert self.receive_one(queue).receives == 2

    def test_message_released_with_a_delay_is_invisible_until_then(self, queue: WorkQueue) -> None:
        queue.send([message(1)])
        assert queue.release(self.receive_one(queue), delay_seconds=self.lease_seconds)
        assert drain(queue) == []
        self.let_time_pass(self.lease_seconds)
        assert self.receive_one(queue).receives == 2

    # -- dead letters

    def test_buried_message_is_a_dead_letter_and_not_received_again(self, queue: WorkQueue) -> None:
        queue.send([message(1)])
        assert queue.bury(self.receive_one(queue, self.lease_seconds), "file 'a' is gone\nsee the log")
        self.let_time_pass(self.lease_seconds)
        assert drain(queue) == []
        assert queue.dead_letters(10) == [DeadLetter(message(1), "file 'a' is gone\nsee the log", 1)]

    def test_dead_letters_stay_when_listed(self, queue: WorkQueue) -> None:
        letters = self.buried(queue, 3)
        assert len(queue.dead_letters(2)) == 2
        assert {dead.message for dead in queue.dead_letters(10)} == set(letters)
        assert queue.stats() == QueueStats(visible=0, leased=0, dead=3)

    @pytest.mark.parametrize("ending", ["ran out", "released"])
    def test_message_received_too_often_still_comes_once_for_its_receiver_to_bury(
        self, queue: WorkQueue, ending: str
    ) -> None:
        queue.send([message(1)])
        for receive in range(queue.max_receives):
            lease = self.receive_one(queue, self.lease_seconds)
            assert lease.receives == receive + 1
            if ending == "released":
                queue.release(lease)
            else:
                self.let_time_pass(self.lease_seconds)
        assert queue.bury(self.receive_one(queue), "killed its workers")
        assert queue.dead_letters(10) == [DeadLetter(message(1), "killed its workers", queue.max_receives + 1)]

    def test_message_acked_at_its_last_receive_is_no_dead_letter(self, queue: WorkQueue) -> None:
        assert queue.ack(self.receive_last(queue, self.lease_seconds))
        self.let_time_pass(self.lease_seconds)
        assert drain(queue) == []
        assert queue.dead_letters(10) == []

    def test_message_at_its_last_receive_is_still_held(self, queue: WorkQueue) -> None:
        last = self.receive_last(queue)
        assert drain(queue) == []
        assert queue.dead_letters(10) == []
        assert queue.ack(last)

    def test_redriven_message_is_visible_at_once_as_if_never_received(self, queue: WorkQueue) -> None:
        last = self.receive_last(queue)
        queue.bury(last, "file 'a' is gone")
        assert queue.redrive([message(1)]) == (1, 0)
        assert queue.dead_letters(10) == []
        assert queue.stats() == QueueStats(visible=1, leased=0, dead=0)
        queue.ack(last)  # stale
        again = self.receive_one(queue)
        assert (again.message, again.receives) == (message(1), 1)

    def test_redriven_message_that_fails_again_is_a_dead_letter_again(self, queue: WorkQueue) -> None:
        self.buried(queue, 1)
        queue.redrive([message(0)])
        assert queue.bury(self.receive_one(queue), "still gone")
        assert queue.dead_letters(10) == [DeadLetter(message(0), "still gone", 1)]

    def test_redrive_takes_the_dead_letters_that_are_named_and_leaves_the_others(self, queue: WorkQueue) -> None:
        self.buried(queue, 5)
        assert queue.redrive([message(0), message(2), message(99)], drop=[message(3)]) == (2, 1)
        assert {dead.message for dead in queue.dead_letters(10)} == {message(1), message(4)}
        assert Counter(lease.message for lease in drain(queue)) == Counter([message(0), message(2)])

    def test_redrive_brings_equal_dead_letters_all_back(self, queue: WorkQueue) -> None:
        queue.send([message(7), message(7)])
        for lease in drain(queue):
            queue.bury(lease, "no such table")
        assert queue.redrive([message(7)]) == (2, 0)
        assert [lease.message for lease in drain(queue)] == [message(7)] * 2

    def test_redrive_leaves_messages_alone_that_are_no_dead_letters(self, queue: WorkQueue) -> None:
        queue.send(messages(2))
        held = drain(queue)
        queue.send(messages(2))
        assert queue.redrive([message(0)], drop=[message(1)]) == (0, 0)
        assert queue.stats() == QueueStats(visible=2, leased=2, dead=0)
        assert all(queue.ack(lease) for lease in held)

    def test_concurrent_redrives_bring_each_dead_letter_back_once(self, queue: WorkQueue) -> None:
        letters = self.buried(queue, 60)
        start = Barrier(4)

        def redrive(_: int) -> tuple[int, int]:
            start.wait()
            return queue.redrive(letters[:40], drop=letters[40:])

        with ThreadPoolExecutor(4) as threads:
            counts = list(threads.map(redrive, range(4)))
        assert [sum(count) for count in zip(*counts, strict=True)] == [40, 20]
        assert Counter(lease.message for lease in drain(queue)) == Counter(letters[:40])
        assert queue.stats() == QueueStats(visible=0, leased=40, dead=0)
