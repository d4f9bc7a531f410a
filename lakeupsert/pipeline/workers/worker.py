"""A worker: receive messages, have their partitions merged, and answer each message.

Reads     the queue
Writes    answers to the queue, messages for what is left, and `failed` marks into the chains of partitions; `dedupe` writes
          the rest
Repeat    safe: a message that comes again finds its partition merged

    receive -> dedupe -> hand on what is left -> ack
                 '------- failed -------> release; at the last receive mark the partition failed and bury the message
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from lakeupsert import clock
from lakeupsert.engine.merge import Engine
from lakeupsert.errors import ExecutorError, LakeupsertError, TryAgainError, cause_of, split_text
from lakeupsert.events import Failure
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.merge.dedupe import dedupe_partitions, dedupe_unit
from lakeupsert.pipeline.messages import pending_messages
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.resources import Resources
from lakeupsert.pipeline.stop import Stop, WorkerOptions
from lakeupsert.queue import Lease, Message
from lakeupsert.queue.base import ALONE_FROM
from lakeupsert.retries import (
    AWAY_SECONDS,
    IDLE_SECONDS,
    LEASE_SECONDS,
    LOOK_SECONDS,
    RETRY_SECONDS,
    TICK_SECONDS,
    WAIT_SECONDS,
)
from lakeupsert.table.chain import Link
from lakeupsert.table.manifest import FailedMark, Manifest

log = logging.getLogger(__name__)

UNANSWERED = "every worker that tried to merge it crashed or lost its storage."


def drain(
    table: OpenTable,
    engine: Engine,
    options: WorkerOptions,
    *,
    most_messages: int | None = None,
    lease_seconds: float = LEASE_SECONDS,
) -> None:
    """Work on the queue's messages until none is visible, ``stop`` is set, or time is up.

    A partition that fails goes back to the queue. At its last receive it is marked failed and its message is buried; so is one
    whose workers never answered. TryAgainError (the store, the disk) returns the messages and ends the work.

    ``most_messages``: it also ends when more messages are visible, which may be the units of one partition.
    """
    queue, until_empty, stop = table.resources.queue, options.until_empty, options.stop or Stop()
    begun, longest = clock.elapsed(), 0.0
    # A compaction or a fence may make a step void while its units are merged; their messages are then acked for nothing.
    # So whoever acked one checks, when the queue is empty, that nothing is left.
    unconfirmed: set[Message] = set()
    table.history.forget_look()
    while not stop.is_set() and (
        options.max_seconds is None or clock.elapsed() - begun + longest < options.max_seconds
    ):
        options.alive()
        table.history.forget_published()
        leases = queue.receive(engine.partitions_per_call, lease_seconds, 0.0 if until_empty else WAIT_SECONDS)
        if not leases:
            if unconfirmed and (until_empty or not queue.stats().leased):
                # With ``until_empty`` it does not wait for units that other workers hold: those are merged twice.
                queue.send(pending_messages(table, unconfirmed))
                unconfirmed.clear()
            elif until_empty:
                break
            else:
                stop.wait(IDLE_SECONDS)
            continue
        if stop.is_set():  # set while it waited for these
            for lease in leases:
                queue.release(lease)
            break
        received = clock.elapsed()
        retry_seconds = 0.0 if until_empty else RETRY_SECONDS
        delivery = _Delivery(table, engine, leases, retry_seconds, collect=options.collect or (lambda result: None))
        with _lease_extension(table, [delivery], lease_seconds, stop=stop, alive=options.alive):
            delivery.work()
        unconfirmed |= delivery.unconfirmed
        longest = max(longest, clock.elapsed() - received)
        if most_messages is not None and queue.stats().visible > most_messages:
            break
        if options.progress is not None:
            stats = queue.stats()
            options.progress(stats.visible + stats.leased)


def drain_received(
    table: OpenTable,
    engine: Callable[[int], Engine],
    leases: Sequence[Lease],
    *,
    workers: int,
    seconds_left: Callable[[], float],
    lease_seconds: float | None = LEASE_SECONDS,
) -> list[Lease]:
    """Work on messages that were received elsewhere, one partition a thread. Returns the leases that were given back.

    When ``seconds_left`` reaches 0, what is not done is given back and visible at once. A merge that is running then goes on
    alone, as any late worker's does.
    At its first receive, a message that nobody started is sent again and acked instead, so it has used up no try. Later receives
    count even if nobody started, or two partitions that are too slow for a call would reset each other's tries for ever.
    Messages that were received often come last and alone: they may kill this process and the others with it, or need all its
    memory. A partition that fails goes back, or is marked failed and buried, as in `drain`; if the store is away, its message
    stays hidden for a while.

    Args:
        engine: makes the engine for one of so many threads; there are no more threads than partitions.
        lease_seconds: from the start on, hide the messages for this long only, and extend that as in `drain`. So if this process
            is killed, they come again soon, however long whoever received them hid them. None: whoever received them extends.
    """
    groups = _group_by_partition(leases)
    together = [group for group in groups if max(lease.receives for lease in group) < ALONE_FROM]
    alone = [group for group in groups if group not in together]
    parts: list[tuple[int, list[_Delivery]]] = []
    for most, part in ((workers, together), (1, alone)):
        threads = max(1, min(most, len(part)))
        parts.append(
            (threads, [_Delivery(table, engine(threads), group, RETRY_SECONDS, AWAY_SECONDS) for group in part])
        )
    deliveries = [delivery for _, part in parts for delivery in part]
    extension = _lease_extension(table, deliveries, lease_seconds, at_once=True) if lease_seconds else nullcontext()
    with extension:  # ends before anything is given back, or it would hide that again
        futures = [f for threads, part in parts for f in _work_in_threads(part, threads, seconds_left)]
    return _give_back(table, deliveries, futures)


def _give_back(table: OpenTable, deliveries: Sequence["_Delivery"], futures: Sequence[Future[None]]) -> list[Lease]:
    """Give back what was not finished, or not started, and return these leases. Raises the first failure of a delivery."""
    returned: list[Lease] = []
    not_started: list[Lease] = []
    failures: list[BaseException] = []
    for delivery, future in zip(deliveries, futures, strict=True):
        if not delivery.started:
            not_started += delivery.leases
        elif not future.done():
            returned += delivery.leases
            _answer(delivery.leases, table.resources.queue.release)
        elif (failure := future.exception()) is not None:
            partition = delivery.leases[0].message.partition
            told = {"table": table.name, "partition": partition}
            log.warning("partition was not merged: %s: %s", partition, failure, extra=told)
            failures.append(failure)
        else:
            returned += delivery.returned
    # If nothing is ever started, tries must come to an end too.
    any_started = any(delivery.started for delivery in deliveries)
    fresh = [lease for lease in not_started if any_started and lease.receives == 1]
    if fresh and _requeue(table.resources, fresh):
        not_started = [lease for lease in not_started if lease not in fresh]
    returned += not_started
    _answer(not_started, table.resources.queue.release)
    if failures:
        raise failures[0]
    return returned


def _group_by_partition(leases: Iterable[Lease]) -> list[list[Lease]]:
    """Leases of different work objects or units are in different groups, too."""
    groups: dict[tuple[str | None, int | None, str], list[Lease]] = {}
    for lease in leases:
        message = lease.message
        groups.setdefault((message.work, message.unit, message.partition), []).append(lease)
    return list(groups.values())


def _work_in_threads(
    deliveries: Sequence["_Delivery"], threads: int, seconds_left: Callable[[], float]
) -> list[Future[None]]:
    """A future for each, as they are when all are done or time is up. No delivery is started after that."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="dedupe")
    futures = [pool.submit(copy_context().run, _work_in_time, delivery, seconds_left) for delivery in deliveries]
    pending = set(futures)
    while pending and seconds_left() > 0:
        _, pending = wait(pending, LOOK_SECONDS, FIRST_COMPLETED)
    pool.shutdown(wait=False, cancel_futures=True)
    return futures


def _work_in_time(delivery: "_Delivery", seconds_left: Callable[[], float]) -> None:
    if seconds_left() > 0:
        delivery.work()


def _requeue(resources: Resources, leases: Sequence[Lease]) -> bool:
    """Whether these messages were replaced by equal ones that nobody has received yet."""
    try:
        resources.queue.send([lease.message for lease in leases])
    except LakeupsertError as e:
        log.warning("messages that nobody started could not be sent again and are given back instead: %s", e.message)
        return False
    _answer(leases, resources.queue.ack)
    return True


def _answer(leases: Iterable[Lease], answer: Callable[[Lease], bool]) -> None:
    """Answer each lease, also after one answer fails: that message comes back when its lease ends, and somebody repeats the
    work."""
    for lease in leases:
        try:
            answer(lease)
        except LakeupsertError as e:
            log.warning("the queue did not take an answer about %s: %s", lease.message.partition, e.message)


@dataclass
class _Delivery:
    """Some leases, and what became of their messages.

    Attributes:
        retry_seconds: how long a message stays hidden if its partition failed.
        away_seconds: how long all messages without an answer stay hidden if the work itself fails.
        collect: takes the results of the partitions that are finished here: merged, with nothing to do, handed on, or failed
            for good.
        started: whether somebody works on it, or did.
        returned: leases that were given back because their partition failed.
        unconfirmed: messages of units that committed nothing.
        unanswered: leases that are neither acked nor given back nor buried yet.
    """

    table: OpenTable
    engine: Engine
    leases: Sequence[Lease]
    retry_seconds: float
    away_seconds: float = 0.0
    collect: Callable[[PartitionResult], object] = lambda result: None
    started: bool = False
    returned: list[Lease] = field(default_factory=list)
    unconfirmed: set[Message] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.unanswered = set(self.leases)

    def work(self) -> None:
        """Ack, release or bury every lease, also if this raises."""
        self.started = True
        try:
            for (work, unit), by_partition in self._sort().items():
                self._merge(work, unit, by_partition)
        finally:
            _answer(self.unanswered, lambda lease: self.table.resources.queue.release(lease, self.away_seconds))

    def _sort(self) -> dict[tuple[str | None, int | None], dict[str, list[Lease]]]:
        """The leases by work object and unit, then by partition. Messages that ask for nothing are answered here."""
        table, queue = self.table, self.table.resources.queue
        found: dict[tuple[str | None, int | None], dict[str, list[Lease]]] = {}
        for lease in self.leases:
            message = lease.message
            entry = table.history.entry(message.batch) if message.table == table.name else None
            if entry is None:  # queues outlive tables, and the batches of a table that is created again count from 0
                reason = f"it is for table {message.table!r}, batch {message.batch}; {table.name!r} has no such batch"
                self._answer([lease], partial(queue.bury, reason=reason))
            elif message.work is None and message.partition not in entry.body.touched:
                self._answer([lease], queue.ack)
            else:
                by_partition = found.setdefault((message.work, message.unit), {})
                by_partition.setdefault(message.partition, []).append(lease)
        return found

    def _merge(self, work: str | None, unit: int | None, by_partition: dict[str, list[Lease]]) -> None:
        table, engine = self.table, self.engine
        wanted = {partition: max(x.message.batch for x in leases) for partition, leases in by_partition.items()}
        receives = {partition: max(x.receives for x in leases) for partition, leases in by_partition.items()}
        to_try = {p: batch for p, batch in wanted.items() if receives[p] <= table.resources.queue.max_receives}
        given_up = [PartitionResult(p).failed(engine.name, UNANSWERED) for p in wanted if p not in to_try]
        merge = dedupe_partitions if unit is None else partial(dedupe_unit, unit=unit)
        for result in itertools.chain(given_up, _merge_partitions(table, engine, merge, to_try, work)):
            message = Message(table.name, result.partition, wanted[result.partition], work, unit)
            try:
                _hand_on(table, result, message)
            except TryAgainError:
                raise
            except LakeupsertError as e:  # for example, sending is not permitted: reported like a failed merge
                result = replace(result, status="failed", error=str(e))
            self._finish(result, message, by_partition[result.partition], receives[result.partition])

    def _finish(self, result: PartitionResult, message: Message, leases: Sequence[Lease], receives: int) -> None:
        """Answer the leases of one partition."""
        table, queue, error = self.table, self.table.resources.queue, result.error or ""
        if result.status != "failed":
            table.resources.failing_causes.pop(result.partition, None)
            self._answer(leases, queue.ack)
            if message.unit is not None and result.status == "clean":
                self.unconfirmed.add(message)
            elif result.status not in ("shared", "outdated"):
                self.collect(result)
        elif receives < queue.max_receives:
            # What to do about it is reported once, by whoever finds the partition failed for good.
            reason = error.partition("\n")[0]
            causes, cause = table.resources.failing_causes, cause_of(error, result.partition)
            log.log(
                logging.INFO if cause in [*causes.values()] else logging.WARNING,
                "partition failed, will be tried again (others of the same cause are not named): %s: %s",
                result.partition,
                reason,
                extra={"table": table.name, "partition": result.partition},
            )
            causes[result.partition] = cause
            self.returned += leases
            self._answer(leases, lambda lease: queue.release(lease, self.retry_seconds))
        else:
            if message.work is None:
                mark_failed(table.history, result.partition, message.batch, error)
            self._answer(leases, partial(queue.bury, reason=error))
            text, advice = split_text(error)
            table.resources.emit(
                Failure(
                    table=table.name,
                    partition=result.partition,
                    batch=message.batch,
                    engine=result.engine,
                    message=text,
                    next=advice,
                )
            )
            self.collect(result)

    def _answer(self, leases: Iterable[Lease], answer: Callable[[Lease], bool]) -> None:
        for lease in leases:
            answer(lease)
            self.unanswered.remove(lease)


def _hand_on(table: OpenTable, result: PartitionResult, message: Message) -> None:
    """Send what is left of a message to the workers that are to do it, before it is acked."""
    if result.status == "large" and table.resources.large_queue is not None:
        table.resources.large_queue.send([message])
    elif result.status == "shared":
        table.resources.queue.send([msgspec.structs.replace(message, unit=unit) for unit in result.units])
    elif message.unit is not None and result.status in ("merged", "outdated"):
        # Other messages may be acked by now: units that began from the version before, or units of this step.
        table.resources.queue.send(pending_messages(table, [message]))


def _merge_partitions(
    table: OpenTable,
    engine: Engine,
    merge: Callable[[OpenTable, Engine, dict[str, int], str | None], list[PartitionResult]],
    wanted: dict[str, int],
    work: str | None,
) -> Iterator[PartitionResult]:
    """Merge in one shared call. If that fails, merge each partition alone, since only that shows which one fails."""
    try:
        yield from merge(table, engine, wanted, work)
        return
    except (TryAgainError, ExecutorError):
        raise
    except Exception as e:
        log.debug("a shared call failed, trying each partition in its own call: %r", e)
    for partition, batch in wanted.items():
        try:
            yield from merge(table, engine, {partition: batch}, work)
        except (TryAgainError, ExecutorError):
            raise
        except Exception as e:
            log.debug("partition failed: %s", partition, exc_info=True)
            yield PartitionResult(partition).failed(engine.name, e)


def mark_failed(history: History, partition: str, batch: int, reason: str) -> None:
    """Record in the partition's own chain that its next batch does not merge. Publish and status read it there."""
    snapshot = history.last_snapshot()

    def add_mark(head: Link[Manifest] | None) -> Manifest | None:
        if snapshot is not None and snapshot.body.lost(partition, head):
            return None  # the mark would take the number of the lost version
        merged = head.body.merged if head else 0
        first = next((n.number for n in history.entries(merged, batch) if partition in n.body.touched), None)
        if first is None:
            return None  # another worker merged it meanwhile
        base = head.body if head else Manifest(partition=partition, merged=0, spec_version=0)
        if base.failed and base.failed.batch == first and (reason == base.failed.reason or reason == UNANSWERED):
            return None  # the mark that is there says as much, or more
        return msgspec.structs.replace(base, failed=FailedMark(batch=first, reason=reason), added=0)

    history.objects.partition(partition).extend(add_mark)


@contextmanager
def _lease_extension(
    table: OpenTable,
    deliveries: Sequence[_Delivery],
    lease_seconds: float,
    *,
    at_once: bool = False,
    stop: Stop | None = None,
    alive: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Extend the unanswered leases in the background while the block works on them. After ``stop``, give them back if the block
    does not end within the grace period.

    Whoever receives them then repeats the work. If the block still commits, one of the two loses the race.

    Args:
        at_once: begin with an extension, because the leases were not received for ``lease_seconds``.
    """
    done = threading.Event()

    def answer(each: Callable[[Lease], bool]) -> None:
        for delivery in deliveries:
            for lease in tuple(delivery.unanswered):
                if lease in delivery.unanswered:  # by now it may be given back, and hidden for a while on purpose
                    _answer([lease], each)

    def extend() -> None:
        extended, stopping = clock.elapsed(), None
        if at_once:
            answer(lambda lease: table.resources.queue.extend(lease, lease_seconds))
        while not done.wait(TICK_SECONDS):
            with suppress(OSError):
                alive()
            now = clock.elapsed()
            if stop is not None and stop.is_set():
                stopping = now if stopping is None else stopping
                if now - stopping >= stop.grace_seconds:
                    answer(table.resources.queue.release)
                    stop.abandon()
                    return
            if now - extended >= lease_seconds / 3:
                answer(lambda lease: table.resources.queue.extend(lease, lease_seconds))
                extended = now

    thread = threading.Thread(target=extend, name="extend-leases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
