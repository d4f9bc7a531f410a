"""Phase two: bring dirty partitions up to a batch, one row per key.

Reads     the partition's head manifest, its pending ledger entries, and the files that both list
Writes    new base, delta, vector and tombstone files, then the next manifest version (the only commit here; readers see
          it with the next snapshot)
Repeat    safe: twice, late, or beside another worker on the same partition

    receive -> load manifest and pending -> engine.merge -> commit -> ack
                     ^------------------ lost race ----------'

The message only says where to look. What is still to merge is the ledger's entries above the manifest's `merged`, so a
lost or repeated message changes how soon, never what.
"""

import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import msgspec

from lakeupsert import clock
from lakeupsert.engine.merge import Engine, MergeOutput, MergeTask
from lakeupsert.errors import LakeupsertError, RefusedError, TryAgainError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.steps import Step, next_step, step_anew
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.units import Units, is_shared
from lakeupsert.queue import Lease, Message
from lakeupsert.queue.base import ALONE_FROM
from lakeupsert.storage import NotFoundError
from lakeupsert.table.chain import Link, races_exhausted
from lakeupsert.table.manifest import (
    GONE,
    NO_CHANGES,
    NO_DIGESTS,
    NO_ROWS,
    BucketEntry,
    Changes,
    Counters,
    Digests,
    Failed,
    Manifest,
    added,
    first_hash,
    share,
)
from lakeupsert.table.snapshot import Snapshot

log = logging.getLogger(__name__)

ATTEMPTS = 20
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


@dataclass(frozen=True)
class PartitionResult:
    """What happened to one partition.

    rows_in (stored rows, tombstones and appended rows that were read) = rows_out + rows_superseded + rows_deleted, the
    tombstones that it has now, + rows_refused, which are below a floor, + tombstones that were dropped; bytes are compressed.
    ``changes`` counts keys.
    One that is ``large`` is left for the workers of large partitions, one that is ``shared`` for all workers, in ``units``,
    perhaps after batches that were small.
    """

    partition: str
    version: int = -1
    merged: int = 0
    rows_in: int = 0
    rows_out: int = 0
    rows_superseded: int = 0
    rows_deleted: int = 0
    rows_refused: int = 0
    changes: Changes = NO_CHANGES
    bytes_read: int = 0
    bytes_written: int = 0
    engine: str = ""
    strategy: str = ""
    seconds: float = 0.0
    status: Literal["merged", "clean", "failed", "large", "shared"] = "clean"
    error: str | None = None
    units: tuple[int, ...] = ()


def dedupe_partitions(
    table: OpenTable, engine: Engine, wanted: dict[str, int], work: str | None = None
) -> list[PartitionResult]:
    """Bring each partition of ``wanted`` up to its batch, in shared calls of the engine; one result each.

    A version is committed for every pending batch that is not published yet, so that each batch can be published, however
    fast new ones come. With ``work``, the name of a work object, each is written anew as that says instead, once.
    Raises what engine and store raise; then some partitions may be merged, and the call can be repeated.
    """
    snapshot = table.last_snapshot()
    results = {partition: PartitionResult(partition) for partition in wanted}
    lost = dict.fromkeys(wanted, 0)
    todo = dict(wanted)
    heads: dict[str, Link[Manifest] | None] = {}  # what we committed last is the head, as far as we know
    while todo:
        begun = clock.elapsed()
        steps: list[Step] = []
        for partition, (head, step) in _looked(table, snapshot, todo, work, heads).items():
            result = results[partition]
            if head is not None:
                result = replace(result, version=head.number, merged=head.body.merged)
            shared = step is not None and engine.shares_units and is_shared(table, step)
            if step is None:
                del todo[partition]
            elif (table.large_queue is not None or not shared) and _is_large(table, engine, step, step.tasks):
                del todo[partition]
                result = replace(result, status="large")
            elif shared:
                del todo[partition]
                result = replace(result, status="shared", units=tuple(Units(table, step).look() or [0]))
            else:
                steps.append(step)
            results[partition] = result
        outputs = _outputs(table, engine, steps)
        seconds = (clock.elapsed() - begun) / max(1, len(steps))
        links = table.at_once(partial(_commit, table, engine.name, seconds), list(zip(steps, outputs, strict=True)))
        heads = {}
        for step, of_step, link in zip(steps, outputs, links, strict=True):
            partition = step.partition
            if link is None:
                lost[partition] += 1
                if lost[partition] > ATTEMPTS:
                    raise races_exhausted(table.store.uri(partition), ATTEMPTS)
            else:
                heads[partition] = link
                results[partition] = _added(results[partition], step, of_step, link, engine.name, seconds)
    return list(results.values())


def dedupe_unit(
    table: OpenTable, engine: Engine, wanted: dict[str, int], work: str | None = None, *, unit: int
) -> list[PartitionResult]:
    """Merge one unit of what is next in each partition, and commit the version where no other is missing.

    A partition is ``clean`` where others are, or something else is next there; and ``shared`` again, without units, where
    what was merged is of no use any more.
    """
    snapshot = table.last_snapshot()
    results = []
    for partition, (head, step) in _looked(table, snapshot, wanted, work, {}).items():
        result = PartitionResult(partition)
        if head is not None:
            result = replace(result, version=head.number, merged=head.body.merged)
        if step is not None and unit < len(step.tasks) and is_shared(table, step):
            result = _merge_unit(table, engine, step, unit, result)
        results.append(result)
    return results


def _merge_unit(table: OpenTable, engine: Engine, step: Step, number: int, result: PartitionResult) -> PartitionResult:
    begun = clock.elapsed()
    units = Units(table, step)
    missing = units.look()
    if number in missing:
        task = step.tasks[number]
        if _is_large(table, engine, step, [task]):
            return replace(result, status="large")
        [output] = engine.merge(table.store, table.spec(step.spec_version), step.spec_version, [task])
        units.put(number, output)
        missing = units.look()
    if missing:
        return result
    try:
        outputs = units.outputs()
    except NotFoundError:  # they are committed
        return result
    seconds = clock.elapsed() - begun
    link = _commit(table, engine.name, seconds, (step, outputs), alone=False)
    if link is None:
        return replace(result, status="shared")
    units.forget()
    return _added(result, step, outputs, link, engine.name, seconds)


def _looked(
    table: OpenTable,
    snapshot: Link[Snapshot] | None,
    wanted: dict[str, int],
    work: str | None,
    known: dict[str, Link[Manifest] | None],
) -> dict[str, tuple[Link[Manifest] | None, Step | None]]:
    """Head and next step of each partition, None where nothing is left to do; heads that are ``known`` are not read."""
    found: dict[str, tuple[Link[Manifest] | None, Step | None]] = {}
    if work is not None:
        for partition, there in {**table.heads(wanted.keys() - known.keys()), **known}.items():
            # A message that came again: vacuum may have deleted the work object.
            if there is not None and there.body.reprocessed == work:
                found[partition] = there, None
    left = {partition: batch for partition, batch in wanted.items() if partition not in found}
    from_landing = work is not None and bool(left) and table.work(work).source == "landing"
    unknown = [partition for partition in left if partition not in known]
    newest = table.at_once(
        lambda partition: table.newest(
            partition, snapshot, from_landing=from_landing, up_to=left[partition] if work is None else None
        ),
        unknown,
    )
    heads = {**known, **dict(zip(unknown, newest, strict=True))}
    for partition, batch in left.items():
        head = heads[partition]
        if work is None:
            step = next_step(table, partition, batch, snapshot.body if snapshot else None, head)
        else:
            step = step_anew(table, head, partition, work)
        found[partition] = head, step
    return found


def _outputs(table: OpenTable, engine: Engine, steps: Sequence[Step]) -> list[list[MergeOutput]]:
    """What the engine makes of the tasks of each step, in one call for all that have one spec."""
    by_spec: dict[int, list[MergeTask]] = {}
    for step in steps:
        by_spec.setdefault(step.spec_version, []).extend(step.tasks)
    merged = {
        version: iter(engine.merge(table.store, table.spec(version), version, tasks))
        for version, tasks in by_spec.items()
        if tasks
    }
    return [[next(merged[step.spec_version]) for _ in step.tasks] for step in steps]


def _is_large(table: OpenTable, engine: Engine, step: Step, tasks: Sequence[MergeTask]) -> bool:
    """Whether they are for the workers of large partitions; an error where they do not fit into memory and there are none."""
    spec, large = table.spec(step.spec_version), table.settings.large
    needs = max((engine.memory_of(spec, task) for task in tasks), default=0)
    size = sum(file.bytes for file in dict.fromkeys(file for task in tasks for file in task.read))
    fits = engine.memory_limit is None or needs <= engine.memory_limit
    if large is not None and table.large_queue is not None:
        return not fits or size > large.most_bytes
    if fits:
        return False
    raise RefusedError(
        "too-large-for-worker",
        f"{step.partition}: to merge its {size / 1e6:,.1f} MB takes about {needs / 1e6:,.0f} MB of memory, and this "
        f"worker may take {max(0, engine.memory_limit or 0) / 1e6:,.0f} MB. It was not begun.",
        next=f"give workers more memory or begin fewer (--workers), or let Spark merge it: `--engine spark`, or "
        f"[tables.{table.name}.large] for all such partitions",
        partition=step.partition,
    )


def _commit(
    table: OpenTable, engine: str, seconds: float, merged: tuple[Step, Sequence[MergeOutput]], *, alone: bool = True
) -> Link[Manifest] | None:
    """The committed version, or None where the race was lost to a writer that changed a bucket: then it is redone.

    ``alone``: whether nobody else may commit these files.
    """
    step, outputs = merged
    head = step.head
    chain = table.objects.partition(step.partition)
    made: dict[str, str | float | int] = {
        "engine": engine,
        "strategy": step.strategy,
        "seconds": round(seconds, 3),
        "worker": f"{socket.gethostname()}:{os.getpid()}",
    }
    while True:
        outcome = chain.append(version_after(step, head, outputs, made), head)
        if outcome.link is not None or outcome.result == "unknown":
            return outcome.link  # unknown: the files stay for vacuum, the head tells whether anything is left to do
        newer = chain.head()
        # What changed a bucket makes us redo it; behind a fence what we wrote may be gone already.
        fenced = newer is not None and newer.body.fence is not None and newer.body.fence >= step.start
        if fenced or _buckets(newer) != _buckets(head):
            if alone:
                there = {name for bucket in step.buckets for name in bucket.objects}
                table.discard({name for output in outputs for name in output.objects} - there)
            return None
        head = newer  # something else was appended, such as a mark; what we read still stands


def version_after(
    step: Step,
    head: Link[Manifest] | None,
    outputs: Sequence[MergeOutput],
    made: dict[str, str | float | int],
) -> Manifest:
    """The next version; without ``outputs`` no row moves, and some may be withdrawn."""
    before = head.body if head else Manifest(partition=step.partition, merged=0, spec_version=0)
    return msgspec.structs.replace(
        before,
        merged=step.up_to,
        spec_version=step.spec_version,
        buckets=_buckets_with(step, outputs),
        failed=before.failed if before.failed and before.failed.batch > step.up_to else None,
        quarantine=(
            *(before if step.work else step.base).quarantine,
            *(name for output in outputs for name in output.quarantine),
        ),
        reprocessed=step.work or before.reprocessed,
        entry=step.entry,
        changes=before.changes if step.work else sum((output.changes for output in outputs), NO_CHANGES),
        made=made,
    )


def _buckets_with(step: Step, outputs: Sequence[MergeOutput]) -> tuple[BucketEntry, ...]:
    """The partition's buckets after the step, in the order of their hashes.

    Rows that met no bucket are the first one's that is new, and so is what was counted before: a row that a merge lost is
    then missing there, and the version refused.
    """
    done = list(zip(step.tasks, outputs, strict=True))
    old = [b for b in step.buckets if any(share(b, task) for task in step.tasks)] or step.buckets[:1]
    made = [_made(next(b for b in old if share(b, task)), task, output) for task, output in done]
    if not made:
        counters = msgspec.structs.replace(old[0].counters, **dict.fromkeys(GONE, 0))
        made = [msgspec.structs.replace(old[0], id=clock.new_id(), counters=counters, digests=NO_DIGESTS)]
    brought = {link.number: link.body.touched[step.partition] for link in step.pending}
    merged = [t for number, t in brought.items() if number in step.counting]
    withdrawn = [t for number, t in brought.items() if number not in step.counting]
    first, *others = made
    appended = sum(b.counters.appended for b in old) + sum(t.rows for t in brought.values())
    first = msgspec.structs.replace(
        first,
        counters=msgspec.structs.replace(
            first.counters,
            appended=appended - sum(b.counters.appended for b in others),
            superseded=sum(b.counters.superseded for b in [first, *old]) + sum(t.superseded for t in merged),
            tombstones_dropped=sum(b.counters.tombstones_dropped for b in [first, *old]),
            refused=sum(b.counters.refused for b in [first, *old]),
            withdrawn=sum(b.counters.withdrawn for b in old) + sum(t.rows for t in withdrawn),
        ),
        digests=Digests(
            adopted=added([first.digests.adopted, *(b.digests.adopted for b in old if b.settled or not done)]),
            superseded=added([b.digests.superseded for b in [first, *old]] + [t.superseded_digest for t in merged]),
            tombstones_dropped=added(b.digests.tombstones_dropped for b in [first, *old]) or NO_ROWS,
            refused=added(b.digests.refused for b in [first, *old]) or NO_ROWS,
            withdrawn=added([b.digests.withdrawn for b in old] + [t.digest for t in withdrawn]),
        ),
    )
    if step.work is not None and step.pending and step.head is not None:
        first = _with_refused(first, step.head.body.buckets)
    stay = [b for b in step.buckets if b not in old]
    return tuple(sorted([*stay, first, *others], key=first_hash))


def _with_refused(first: BucketEntry, head: Sequence[BucketEntry]) -> BucketEntry:
    """Rows that merges refused count as such again: what is made anew of landing leaves them out, as superseded. So does what
    lost to them, which was superseded all along."""
    refused = sum(b.counters.refused for b in head)
    digest = added(b.digests.refused for b in head) or NO_ROWS
    superseded = first.digests.superseded
    without = None if superseded is None else f"{(int(superseded, 16) - int(digest, 16)) % 2**64:016x}"
    counters = msgspec.structs.replace(first.counters, refused=refused, superseded=first.counters.superseded - refused)
    return msgspec.structs.replace(
        first,
        counters=counters,
        digests=msgspec.structs.replace(first.digests, refused=digest, superseded=without),
    )


def _made(was: BucketEntry, task: MergeTask, output: MergeOutput) -> BucketEntry:
    """What a task made of its bucket; of what was counted before it counts nothing."""
    base = {file.name for file in was.base}
    kept = [[file for file in output.kept if (file.name in base) == is_base] for is_base in (True, False)]
    written = ((), output.written) if task.kept else (output.written, ())
    live, tombstones = sum(f.live for f in (*output.kept, *output.written)), sum(f.rows for f in output.tombstones)
    return BucketEntry(
        id=clock.new_id(),
        bucket=task.bucket,
        bits=task.bits,
        base=(*kept[0], *written[0]),
        deltas=(*kept[1], *written[1]),
        tombstones=output.tombstones,
        history=output.history,
        floor=output.floor,
        counters=Counters(
            appended=live + tombstones + output.superseded + output.dropped + output.refused,
            live=live,
            tombstones=tombstones,
            superseded=output.superseded,
            tombstones_dropped=output.dropped,
            refused=output.refused,
        ),
        digests=msgspec.structs.replace(
            NO_DIGESTS,
            adopted=NO_ROWS if task.settled else output.adopted,
            superseded=output.superseded_digest,
            tombstones_dropped=output.dropped_digest,
            refused=output.refused_digest,
        ),
    )


def _buckets(link: Link[Manifest] | None) -> tuple[BucketEntry, ...]:
    return link.body.buckets if link else ()


def _added(
    result: PartitionResult,
    step: Step,
    outputs: Sequence[MergeOutput],
    link: Link[Manifest],
    engine: str,
    seconds: float,
) -> PartitionResult:
    return replace(
        result,
        version=link.number,
        merged=link.body.merged,
        rows_in=result.rows_in + sum(f.live for f in step.read),
        rows_out=link.body.rows,
        rows_superseded=result.rows_superseded + sum(output.superseded for output in outputs),
        rows_deleted=sum(bucket.counters.tombstones for bucket in link.body.buckets),
        rows_refused=result.rows_refused + sum(output.refused for output in outputs),
        changes=result.changes if step.work else result.changes + link.body.changes,
        bytes_read=result.bytes_read + step.bytes,
        bytes_written=result.bytes_written + (_new_bytes(step.buckets, link.body.buckets) if outputs else 0),
        engine=engine,
        strategy=step.strategy,
        seconds=result.seconds + seconds,
        status="merged",
    )


def _new_bytes(old: Iterable[BucketEntry], new: Iterable[BucketEntry]) -> int:
    """Of the files that a merge wrote, and of the vectors."""
    before = {f.name: f.deleted for b in old for f in b.data}
    stay = {f for b in old for f in (*b.tombstones, *b.history)}
    data = [f for b in new for f in b.data]
    others = [f for b in new for f in (*b.tombstones, *b.history) if f not in stay]
    files = sum(f.bytes for f in (*data, *others) if f.name not in before)
    return files + sum(f.deleted.size for f in data if f.deleted and f.deleted != before.get(f.name))


# ---------------------------------------------------------------- the queue's side


def send_missing(
    table: OpenTable,
    selected: Callable[[str], bool] = lambda partition: True,
    *,
    queued: int = 0,
    dead: frozenset[str] = frozenset(),
) -> int:
    """Send a message for every selected partition where the ledger is ahead of the manifest; how many were sent.

    Of those that are not ``dead`` none is sent where there are no more of them than ``queued`` messages on their way, which
    are then taken for theirs. It reads the heads of the partitions that are not published up to the ledger's head, and no
    others.
    """
    snapshot = table.last_snapshot()
    head = table.ledger_head()
    if head is None:
        return 0
    wanted = {
        p: b for p, b in table.unpublished(snapshot.body if snapshot else None, head.number).items() if selected(p)
    }
    heads = table.heads(wanted)
    behind = {p: batch for p, batch in wanted.items() if p not in heads or heads[p].body.merged < batch}
    if len(behind.keys() - dead) <= queued:
        behind = {p: batch for p, batch in behind.items() if p in dead}
    # Also where there is none: a queue that can't be used is found out before anything is appended.
    table.queue.send([Message(table.name, p, batch) for p, batch in behind.items()])
    return len(behind)


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
                table.queue.send(_left(table, spare))
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
        table.queue.send(_left(table, [message]))


def _left(table: OpenTable, spare: Iterable[Message]) -> list[Message]:
    """Messages for all that is left to do in the partitions of units, but where it failed."""
    heads = table.heads({message.partition for message in spare})
    ledger = table.ledger_head()
    found: dict[Message, None] = {}
    for message in spare:
        head = heads.get(message.partition)
        if head is not None and head.body.failed is not None:
            continue
        if message.work is not None and (head is None or head.body.reprocessed != message.work):
            found[msgspec.structs.replace(message, unit=None)] = None
        since = table.entries(head.body.merged if head else 0, ledger.number) if ledger else []
        pending = [link.number for link in since if message.partition in link.body.touched]
        if pending:
            found[Message(table.name, message.partition, pending[-1])] = None
    return list(found)


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
