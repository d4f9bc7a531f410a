"""A worker: receive messages of the queue, have their partitions merged, and answer each.

Reads     the queue
Writes    answers to the queue, messages of what is left, and `failed` marks into partitions' chains; the rest is `dedupe`
Repeat    safe: a message that comes again finds its partition merged

    receive -> dedupe -> hand on what is left -> ack
                  '----- failed ----------> release, or mark and bury
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import msgspec

from lakeupsert import clock
from lakeupsert.engine.merge import Engine
from lakeupsert.errors import LakeupsertError, TryAgainError
from lakeupsert.pipeline.dedupe import PartitionResult, dedupe_partitions, dedupe_unit
from lakeupsert.pipeline.messages import messages_left
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.stop import Stop
from lakeupsert.queue import Lease, Message
from lakeupsert.queue.base import ALONE_FROM
from lakeupsert.table.chain import Link
from lakeupsert.table.manifest import Failed, Manifest

log = logging.getLogger(__name__)

LEASE_SECONDS = 120.0
"""How long a worker owns a message between two extensions; it extends every third of it while it works, so its own work may
take any time. Longer: the message of a dead worker on another machine waits longer. Shorter than two extensions that fail:
a second worker repeats the work (harmless, but paid twice)."""
RETRY_SECONDS = 5.0
"""How long a waiting worker leaves a message alone that just failed; one that drains the queue tries again at once."""
IDLE_SECONDS = 1.0
"""How long a waiting worker leaves an empty queue alone before it looks again."""
WAIT_SECONDS = 5.0
"""How long a waiting worker lets a queue's server wait for a message. Longer: a worker that is told to stop takes longer."""
AWAY_SECONDS = 300.0
"""How long Lambda leaves messages alone when the store is away, as it would ask for them again at once. Longer: a night
waits longer after a short outage. Shorter: an outage may use up all tries, and `reconcile` sends them again only then."""
LOOK_SECONDS = 0.2
"""How often one who waits for threads looks at the time that is left."""
TICK_SECONDS = 1.0
"""How often a worker that merges says that it lives, and looks whether it should end."""
UNANSWERED = "no worker that began to merge it came to the end: killed, out of memory, or the store was away."


def drain(
    table: OpenTable,
    engine: Engine,
    *,
    until_empty: bool,
    stop: Stop,
    most_messages: int | None = None,
    max_seconds: float | None = None,
    lease_seconds: float = LEASE_SECONDS,
    progress: Callable[[int], None] | None = None,
    alive: Callable[[], object] = lambda: None,
) -> list[PartitionResult]:
    """Work on the queue's messages until none is visible (``until_empty``), it is stopped, or time is up.

    It also leaves off where more than ``most_messages`` are visible, which one partition may become.
    Nothing is begun that would pass ``max_seconds``, should it take as long as the longest call so far. ``progress`` is
    told how many messages are left; ``alive`` is called every few seconds, in another thread too.
    A partition that fails goes back to the queue; at its last receive it is marked failed and buried, and so is one whose
    workers never answered. TryAgainError (the store, the disk) gives the messages back and ends the work.
    """
    begun, longest = clock.elapsed(), 0.0
    results: list[PartitionResult] = []
    # A step may vanish while its units are merged, by a compaction or a fence, and messages of it be acked for nothing: whoever
    # acked one makes sure, when the queue is empty, that nothing is left.
    spare: set[Message] = set()
    while not stop.is_set() and (max_seconds is None or clock.elapsed() - begun + longest < max_seconds):
        alive()
        leases = table.queue.receive(engine.partitions_per_call, lease_seconds, 0.0 if until_empty else WAIT_SECONDS)
        if not leases and spare:
            # Units that others are at are merged twice, where nobody is to wait for them.
            if not until_empty and table.queue.stats().leased:
                stop.wait(IDLE_SECONDS)
            else:
                table.queue.send(messages_left(table, spare))
                spare.clear()
            continue
        if not leases:
            if until_empty:
                break
            stop.wait(IDLE_SECONDS)
            continue
        if stop.is_set():  # while it waited for these
            for lease in leases:
                table.queue.release(lease)
            break
        received = clock.elapsed()
        with _extended(table, leases, lease_seconds, stop, alive):
            results += _work(table, engine, leases, [], spare, retry_seconds=0.0 if until_empty else RETRY_SECONDS)
        longest = max(longest, clock.elapsed() - received)
        if most_messages is not None and table.queue.stats().visible > most_messages:
            break
        if progress is not None:
            stats = table.queue.stats()
            progress(stats.visible + stats.leased)
    return results


def drain_received(
    table: OpenTable,
    engine: Callable[[int], Engine],
    leases: Sequence[Lease],
    *,
    workers: int,
    seconds_left: Callable[[], float],
) -> list[Lease]:
    """Work on messages that were received elsewhere, in threads, each at one partition; the leases that were given back.

    Nothing is extended: whoever received them hid them for longer than ``seconds_left``. When that is at or below 0, what
    is not done is given back, visible at once. A merge under way then goes on alone, as any late worker's does.
    What nobody began at its first receive is sent anew and acked instead, as it has used up no try. Later receives count,
    begun or not: or two partitions that are too slow for a call would reset each other's for ever.
    What was received often comes last and alone, as it may kill this process, and the others with it; or as it needs all
    the memory. ``engine`` makes the engine of one of so many threads, of which there are no more than partitions.
    A partition that fails goes back, or is marked failed and buried, as in `drain`; where the store is away, for a while.
    """
    of_partition: dict[tuple[str | None, int | None, str], list[Lease]] = {}
    for lease in leases:
        message = lease.message
        of_partition.setdefault((message.work, message.unit, message.partition), []).append(lease)
    together = [x for x in of_partition.values() if max(lease.receives for lease in x) < ALONE_FROM]
    alone = [x for x in of_partition.values() if x not in together]
    back: list[Lease] = []
    begun: set[Lease] = set()
    left: list[Lease] = []
    failures: list[BaseException] = []

    def work(of_threads: Engine, of_it: Sequence[Lease]) -> None:
        if seconds_left() <= 0:
            return
        begun.update(of_it)
        for _ in _work(table, of_threads, of_it, back, set(), RETRY_SECONDS, AWAY_SECONDS):
            pass

    for most, groups in ((workers, together), (1, alone)):
        threads = max(1, min(most, len(groups)))
        pool = ThreadPoolExecutor(threads, thread_name_prefix="dedupe")
        futures = {pool.submit(work, engine(threads), of_it): of_it for of_it in groups}
        pending = set(futures)
        while pending and seconds_left() > 0:
            _, pending = wait(pending, LOOK_SECONDS, FIRST_COMPLETED)
        pool.shutdown(wait=False, cancel_futures=True)
        for future, of_it in futures.items():
            if not begun.issuperset(of_it):
                left += of_it
            elif not future.done():
                back += of_it
                _answered(table.queue.release, of_it)
            elif (failure := future.exception()) is not None:
                log.warning("partition was not merged: %s: %s", of_it[0].message.partition, failure)
                failures.append(failure)
    # Where nothing is ever begun, tries must come to an end too.
    anew = [lease for lease in left if begun and lease.receives == 1]
    if anew and _sent_anew(table, anew):
        left = [lease for lease in left if lease not in anew]
    back += left
    _answered(table.queue.release, left)
    if failures:
        raise failures[0]
    return back


def _sent_anew(table: OpenTable, leases: Sequence[Lease]) -> bool:
    """Whether equal messages, which nobody has received yet, took the place of these."""
    try:
        table.queue.send([lease.message for lease in leases])
    except LakeupsertError as e:
        log.warning("messages that nobody began are given back instead of sent anew: %s", e.message)
        return False
    _answered(table.queue.ack, leases)
    return True


def _answered(call: Callable[..., bool], leases: Iterable[Lease], *arguments: object) -> None:
    """One answer for each. One that fails keeps nobody from the others: its message comes back when its
    time is up, and somebody repeats the work."""
    for lease in leases:
        try:
            call(lease, *arguments)
        except LakeupsertError as e:
            log.warning("the queue did not take an answer about %s: %s", lease.message.partition, e.message)


def _work(
    table: OpenTable,
    engine: Engine,
    leases: Sequence[Lease],
    back: list[Lease],
    spare: set[Message],
    retry_seconds: float,
    away_seconds: float = 0.0,
) -> Iterator[PartitionResult]:
    """What became of the partitions of these messages; every lease is acked, released or buried, also where this fails.

    Messages of units that committed nothing are put into ``spare``.

    Those whose partition failed are released for ``retry_seconds``, and put into ``back``. Where this fails itself, all that
    are left are released for ``away_seconds``.
    """
    unanswered = set(leases)

    def answer(call: Callable[..., bool], answered: Sequence[Lease], *arguments: object) -> None:
        for lease in answered:
            call(lease, *arguments)
            unanswered.remove(lease)

    queue = table.queue
    held: dict[tuple[str | None, int | None], dict[str, list[Lease]]] = {}
    try:
        for lease in leases:
            message = lease.message
            entry = table.entry(message.batch) if message.table == table.name else None
            if entry is None:  # queues outlive tables, and one that is made anew counts from 0
                reason = f"it is for table {message.table!r}, batch {message.batch}; {table.name!r} has no such batch"
                answer(queue.bury, [lease], reason)
            elif message.work is None and message.partition not in entry.body.touched:
                answer(queue.ack, [lease])
            else:
                of_work = held.setdefault((message.work, message.unit), {})
                of_work.setdefault(message.partition, []).append(lease)
        for (work, unit), of_work in held.items():
            wanted = {partition: max(x.message.batch for x in of_it) for partition, of_it in of_work.items()}
            receives = {partition: max(x.receives for x in of_it) for partition, of_it in of_work.items()}
            to_try = {p: batch for p, batch in wanted.items() if receives[p] <= queue.max_receives}
            given_up = [
                PartitionResult(p, status="failed", error=UNANSWERED, engine=engine.name)
                for p in wanted
                if p not in to_try
            ]
            merge = dedupe_partitions if unit is None else partial(dedupe_unit, unit=unit)
            for result in itertools.chain(given_up, _each(table, engine, merge, to_try, work)):
                of_it = of_work[result.partition]
                try:
                    message = Message(table.name, result.partition, wanted[result.partition], work, unit)
                    _hand_on(table, result, message)
                except TryAgainError:
                    raise
                except LakeupsertError as e:  # such as a send that is not permitted: told like a failed merge
                    result = replace(result, status="failed", error=str(e))
                if result.status != "failed":
                    answer(queue.ack, of_it)
                    if unit is not None and result.status == "clean":
                        spare.add(message)
                    elif result.status != "shared":
                        yield result
                elif receives[result.partition] < queue.max_receives:
                    # What to do about it is told once, by who ends up with a failed partition.
                    reason, *_ = (result.error or "").partition("\n")
                    log.warning("partition failed, will be tried again: %s: %s", result.partition, reason)
                    back += of_it
                    answer(queue.release, of_it, retry_seconds)
                else:
                    if work is None:
                        mark_failed(table, result.partition, wanted[result.partition], result.error or "")
                    answer(queue.bury, of_it, result.error or "")
                    yield result
    finally:
        _answered(queue.release, unanswered, away_seconds)


def _hand_on(table: OpenTable, result: PartitionResult, message: Message) -> None:
    """Send what is left of a message to those whose work it is, before it is acked."""
    if result.status == "large" and table.large_queue is not None:
        table.large_queue.send([message])
    elif result.status == "shared" and result.units:
        table.queue.send([msgspec.structs.replace(message, unit=unit) for unit in result.units])
    elif message.unit is not None and result.status in ("merged", "shared"):
        # Units of whatever else was to be merged there may be acked that began from the version before, or were of this one.
        table.queue.send(messages_left(table, [message]))


def _each(
    table: OpenTable,
    engine: Engine,
    merge: Callable[[OpenTable, Engine, dict[str, int], str | None], list[PartitionResult]],
    wanted: dict[str, int],
    work: str | None,
) -> Iterator[PartitionResult]:
    """One shared call; where that fails, each partition alone, since only that shows whose fault it was."""
    try:
        yield from merge(table, engine, wanted, work)
        return
    except TryAgainError:
        raise
    except Exception as e:
        log.debug("a shared call failed, trying each partition alone: %r", e)
    for partition, batch in wanted.items():
        try:
            yield from merge(table, engine, {partition: batch}, work)
        except TryAgainError:
            raise
        except Exception as e:
            log.debug("partition failed: %s", partition, exc_info=True)
            yield PartitionResult(partition, status="failed", error=str(e) or repr(e), engine=engine.name)


def mark_failed(table: OpenTable, partition: str, batch: int, reason: str) -> None:
    """Say in the partition's own chain that its next batch does not merge; publish and status read it there."""
    snapshot = table.last_snapshot()

    def marked(head: Link[Manifest] | None) -> Manifest | None:
        if snapshot is not None and snapshot.body.lost(partition, head):
            return None  # the mark would take the number of the version that is gone
        merged = head.body.merged if head else 0
        first = next((n.number for n in table.entries(merged, batch) if partition in n.body.touched), None)
        if first is None:
            return None  # somebody merged it meanwhile
        base = head.body if head else Manifest(partition=partition, merged=0, spec_version=0)
        if base.failed and base.failed.batch == first and reason in (base.failed.reason, UNANSWERED):
            return None  # what is there says as much, or more
        return msgspec.structs.replace(base, failed=Failed(batch=first, reason=reason))

    table.objects.partition(partition).extend(marked)


@contextmanager
def _extended(
    table: OpenTable, leases: Sequence[Lease], lease_seconds: float, stop: Stop, alive: Callable[[], object]
) -> Iterator[None]:
    """Extend the leases in the background while the block works on them; at ``stop``, give them back where it takes too long.

    Whoever receives them then repeats the work; should the block commit all the same, one of both has lost a race.
    """
    done = threading.Event()

    def extend() -> None:
        extended, told = clock.elapsed(), None
        while not done.wait(TICK_SECONDS):
            with suppress(OSError):
                alive()
            now = clock.elapsed()
            if stop.is_set():
                told = now if told is None else told
                if now - told >= stop.grace_seconds:
                    _answered(table.queue.release, leases)
                    stop.abandon()
                    return
            if now - extended >= lease_seconds / 3:
                _answered(table.queue.extend, leases, lease_seconds)
                extended = now

    thread = threading.Thread(target=extend, name="extend-leases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
