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
from lakeupsert.pipeline.opened import OpenTable, at_once
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.strategy import Strategy, in_place
from lakeupsert.queue import Lease, Message
from lakeupsert.queue.base import ALONE_FROM
from lakeupsert.table.chain import Link, races_exhausted
from lakeupsert.table.ledger import LedgerEntry, counting
from lakeupsert.table.manifest import NO_DIGESTS, BucketEntry, Failed, Manifest, added
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.work import Rebuilt

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
    last being the tombstones that it has now; bytes are compressed. One that is ``large`` is left for the workers of large
    partitions, perhaps after batches that were small.
    """

    partition: str
    version: int = -1
    merged: int = 0
    rows_in: int = 0
    rows_out: int = 0
    rows_superseded: int = 0
    rows_deleted: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    engine: str = ""
    strategy: str = ""
    seconds: float = 0.0
    status: Literal["merged", "clean", "failed", "large"] = "clean"
    error: str | None = None


@dataclass(frozen=True)
class Step:
    """One version of one partition to be made, in ``head``'s place.

    Attributes:
        base: what the merge begins from: the head, or the version that a restore goes back to.
        pending: ledger entries above ``base`` that touch the partition, up to the one that `merged` will be.
        counting: numbers of those among them whose rows are merged; the others are withdrawn.
        work: the work object that asks for it, where the partition is written anew at the `merged` that it has.
    """

    head: Link[Manifest] | None
    base: Manifest
    pending: tuple[Link[LedgerEntry], ...]
    counting: frozenset[int]
    task: MergeTask
    work: str | None = None

    @property
    def merges(self) -> bool:
        """Whether rows are written; a restore puts a version back as it is."""
        return bool(self.task.batches) or (self.work is not None and bool(self.task.stored or self.task.tombstones))


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
    if work is not None:
        for partition, there in table.heads(wanted).items():
            if there.body.reprocessed == work:  # a message that came again: vacuum may have deleted the work object
                results[partition] = replace(results[partition], version=there.number, merged=there.body.merged)
                del todo[partition]
    from_landing = work is not None and bool(todo) and table.work(work).source == "landing"
    heads: dict[str, Link[Manifest] | None] = {}  # what we committed last is the head, as far as we know
    while todo:
        begun = clock.elapsed()
        unknown = [partition for partition in todo if partition not in heads]
        found = at_once(
            lambda partition: table.newest(
                partition, snapshot, from_landing=from_landing, up_to=todo[partition] if work is None else None
            ),
            unknown,
        )
        heads.update(zip(unknown, found, strict=True))
        steps: list[Step] = []
        for partition, batch in list(todo.items()):
            head = heads.pop(partition)
            if work is None:
                step = next_step(table, partition, batch, snapshot.body if snapshot else None, head)
            else:
                step = _step_anew(table, head, partition, work)
            if head is not None:
                results[partition] = replace(results[partition], version=head.number, merged=head.body.merged)
            if step is None:
                del todo[partition]
            elif _is_large(table, engine, step):
                del todo[partition]
                results[partition] = replace(results[partition], status="large")
            else:
                steps.append(step)
        if not steps:
            break
        # A version is written under its own batch's spec: under a newer one, readers of that batch would meet files that
        # their spec does not describe.
        by_spec: dict[int, list[Step]] = {}
        merged: list[tuple[Step, MergeOutput | None]] = []
        for step in steps:
            if step.merges:
                by_spec.setdefault(_spec_version(step), []).append(step)
            else:
                merged.append((step, None))
        for version, of_spec in by_spec.items():
            outputs = engine.merge(table.store, table.spec(version), version, [step.task for step in of_spec])
            merged += zip(of_spec, outputs, strict=True)
        seconds = (clock.elapsed() - begun) / len(steps)
        links = at_once(partial(_commit, table, engine.name, seconds), merged)
        for (step, output), link in zip(merged, links, strict=True):
            partition = step.task.partition
            if link is None:
                lost[partition] += 1
                if lost[partition] > ATTEMPTS:
                    raise races_exhausted(table.store.uri(partition), ATTEMPTS)
            else:
                heads[partition] = link
                results[partition] = _added(results[partition], step, output, link, engine.name, seconds)
    return list(results.values())


def _is_large(table: OpenTable, engine: Engine, step: Step) -> bool:
    """Whether it is for the workers of large partitions; an error where it does not fit into memory and there are none."""
    if not step.merges:
        return False
    task, large = step.task, table.settings.large
    needs = engine.memory_of(table.spec(_spec_version(step)), task)
    fits = engine.memory_limit is None or needs <= engine.memory_limit
    if large is not None and table.large_queue is not None:
        return not fits or task.bytes > large.most_bytes
    if fits:
        return False
    raise RefusedError(
        "too-large-for-worker",
        f"{task.partition}: to merge its {task.bytes / 1e6:,.1f} MB takes about {needs / 1e6:,.0f} MB of memory, and this "
        f"worker may take {max(0, engine.memory_limit or 0) / 1e6:,.0f} MB. It was not begun.",
        next=f"give workers more memory or begin fewer (--workers), or let Spark merge it: `--engine spark`, or "
        f"[tables.{table.name}.large] for all such partitions",
        partition=task.partition,
    )


def next_step(
    table: OpenTable, partition: str, batch: int, snapshot: Snapshot | None, head: Link[Manifest] | None
) -> Step | None:
    """What is to be merged next into ``head`` on the way to ``batch``; None where nothing is left."""
    merged = head.body.merged if head else 0
    if merged >= batch:
        return None
    published = snapshot.batch if snapshot else 0
    # Up to the snapshot's batch everything is merged, unless it says that this partition lags.
    low = merged if snapshot and partition in snapshot.lagging else max(merged, published)
    pending = [link for link in table.entries(low, batch) if partition in link.body.touched]
    if not pending:
        return None
    # One version a batch, but for batches that are published or withdrawn: nobody needs a snapshot of these.
    needed = [number for number, link in enumerate(pending, 1) if link.number <= published or link.body.restored]
    return step_to(table, head, partition, low, pending[max(needed, default=1) - 1].number)


def step_to(table: OpenTable, head: Link[Manifest] | None, partition: str, low: int, number: int) -> Step:
    """What brings a partition from ``head`` to ledger number ``number``; no entry up to ``low`` is missing in ``head``.

    A restore among the entries means: begin from the version that it names, and merge the batches that still count above it.
    """
    base = head.body if head else Manifest(partition=partition, merged=0, spec_version=0)
    restores = [
        link.body.restored
        for link in table.entries(low, number)
        if link.body.restored and partition in link.body.touched
    ]
    if restores:
        base = table.version(partition, restores[-1].versions[partition])
        low = base.merged
    entries = table.entries(low, number)
    pending = tuple(link for link in entries if partition in link.body.touched)
    counts = frozenset(counting((link.number, link.body) for link in entries))
    return _step(head, base, pending, counts, number, strategy=table.strategy)


def _step_anew(table: OpenTable, head: Link[Manifest] | None, partition: str, name: str) -> Step | None:
    """What writes a partition anew at the `merged` of ``head``; None where that is done, or nothing is stored."""
    work = table.work(name)
    asked = work.partitions.get(partition)
    if asked is None or head is None or not head.body.buckets or head.body.reprocessed == name:
        return None
    merged = head.body.merged
    base, counts = head.body, frozenset[int]()
    pending: tuple[Link[LedgerEntry], ...] = ()
    if work.source == "landing":
        adopted, *entries = table.entries(-1, merged)
        counts = frozenset(
            counting((link.number, link.body) for link in entries)
        )  # at the `merged` that is kept: what came later says nothing about it
        first = adopted.body.touched.get(partition)
        base = Manifest(
            partition=partition, merged=0, spec_version=0, buckets=(first.as_adopted(),) if first is not None else ()
        )
        pending = tuple(
            _rebuilt(link, partition, asked) if link.number in counts else link
            for link in entries
            if partition in link.body.touched
        )
    return _step(head, base, pending, counts, merged, name)


def _step(
    head: Link[Manifest] | None,
    base: Manifest,
    pending: tuple[Link[LedgerEntry], ...],
    counts: frozenset[int],
    number: int,
    work: str | None = None,
    strategy: Strategy = "rewrite",
) -> Step:
    bucket = base.buckets[0] if base.buckets else BucketEntry(id="")
    batches = tuple(link.body.touched[base.partition].files for link in pending if link.number in counts)
    kept, folded = in_place(strategy, bucket, sum(f.bytes for files in batches for f in files))
    task = MergeTask(
        partition=base.partition,
        base=() if kept else bucket.base,
        deltas=folded,
        kept=kept,
        tombstones=bucket.tombstones,
        batches=batches,
        up_to=number,
        start=head.number + 1 if head else 0,
        settled=bucket.settled,
    )
    return Step(head, base, pending, counts, task, work)


def _rebuilt(link: Link[LedgerEntry], partition: str, asked: Rebuilt) -> Link[LedgerEntry]:
    """A batch with what was made of its landing files; one that was merged since then has its appended files."""
    if link.number > asked.merged:
        return link
    if link.number not in asked.batches:
        raise RefusedError(
            "work-outdated",
            f"Batch {link.number} counts again by a restore, and the reprocess of {partition} began before that. The "
            "partition stays as it is.",
            next="run `lakeupsert reprocess` again",
            partition=partition,
        )
    touched = {**link.body.touched, partition: asked.batches[link.number]}
    return replace(link, body=msgspec.structs.replace(link.body, touched=touched))


def _spec_version(step: Step) -> int:
    last = step.pending[-1].body.spec_version if step.pending else 0
    return max(last, step.base.spec_version, step.head.body.spec_version if step.head else 0)


def _commit(
    table: OpenTable, engine: str, seconds: float, merged: tuple[Step, MergeOutput | None]
) -> Link[Manifest] | None:
    """The committed version, or None where the race was lost to a writer that changed the bucket: then it is redone."""
    step, output = merged
    partition, head = step.task.partition, step.head
    chain = table.objects.partition(partition)
    made: dict[str, str | float | int] = {
        "engine": engine,
        "strategy": step.task.strategy,
        "seconds": round(seconds, 3),
        "worker": f"{socket.gethostname()}:{os.getpid()}",
    }
    while True:
        outcome = chain.append(_merged(step, head, output, made), head)
        if outcome.link is not None or outcome.result == "unknown":
            return outcome.link  # unknown: the files stay for vacuum, the head tells whether anything is left to do
        newer = chain.head()
        # What changed the bucket makes us redo it; behind a fence what we wrote may be gone already.
        fenced = newer is not None and newer.body.fence is not None and newer.body.fence >= step.task.start
        if fenced or _bucket(newer) != _bucket(head):
            if output is not None:
                table.discard(output.objects - _old_bucket(step).objects)
            return None
        head = newer  # something else was appended, such as a mark; what we read still stands


def _merged(
    step: Step,
    head: Link[Manifest] | None,
    output: MergeOutput | None,
    made: dict[str, str | float | int],
) -> Manifest:
    """The next version; without ``output`` no row moves, and some may be withdrawn."""
    task, old = step.task, _old_bucket(step)
    brought = {link.number: link.body.touched[task.partition] for link in step.pending}
    merged = [t for number, t in brought.items() if number in step.counting]
    withdrawn = [t for number, t in brought.items() if number not in step.counting]
    bucket = msgspec.structs.replace(
        old,
        id=clock.new_id(),
        counters=msgspec.structs.replace(
            old.counters,
            appended=old.counters.appended + sum(t.rows for t in brought.values()),
            superseded=old.counters.superseded + sum(t.superseded for t in merged),
            withdrawn=old.counters.withdrawn + sum(t.rows for t in withdrawn),
        ),
        digests=msgspec.structs.replace(
            old.digests,
            superseded=added((old.digests.superseded, *(t.superseded_digest for t in merged))),
            withdrawn=added((old.digests.withdrawn, *(t.digest for t in withdrawn))),
        ),
    )
    if output is not None:
        bucket = _with_output(bucket, task, output)
    before = head.body if head else Manifest(partition=task.partition, merged=0, spec_version=0)
    return msgspec.structs.replace(
        before,
        merged=task.up_to,
        spec_version=_spec_version(step),
        buckets=(bucket,),
        failed=before.failed if before.failed and before.failed.batch > task.up_to else None,
        reprocessed=step.work or before.reprocessed,
        made=made,
    )


def _with_output(bucket: BucketEntry, task: MergeTask, output: MergeOutput) -> BucketEntry:
    base = {file.name for file in bucket.base}
    kept = [[file for file in output.kept if (file.name in base) == is_base] for is_base in (True, False)]
    written = ((), output.written) if task.kept else (output.written, ())
    return msgspec.structs.replace(
        bucket,
        settled=True,
        base=(*kept[0], *written[0]),
        deltas=(*kept[1], *written[1]),
        tombstones=output.tombstones,
        counters=msgspec.structs.replace(
            bucket.counters,
            live=sum(f.live for f in (*output.kept, *output.written)),
            tombstones=sum(f.rows for f in output.tombstones),
            superseded=bucket.counters.superseded + output.superseded,
        ),
        digests=msgspec.structs.replace(
            bucket.digests,
            adopted=bucket.digests.adopted if task.settled else output.adopted,
            superseded=added((bucket.digests.superseded, output.superseded_digest)),
        ),
    )


def _old_bucket(step: Step) -> BucketEntry:
    """What the merge begins from."""
    return step.base.buckets[0] if step.base.buckets else BucketEntry(id="", digests=NO_DIGESTS)


def _bucket(link: Link[Manifest] | None) -> BucketEntry | None:
    return link.body.buckets[0] if link and link.body.buckets else None


def _added(
    result: PartitionResult, step: Step, output: MergeOutput | None, link: Link[Manifest], engine: str, seconds: float
) -> PartitionResult:
    task, old = step.task, _old_bucket(step)
    new = link.body.buckets[0]
    read = [f for files in (task.stored, task.tombstones, *task.batches) for f in files]
    return replace(
        result,
        version=link.number,
        merged=link.body.merged,
        rows_in=result.rows_in + sum(f.live for f in read),
        rows_out=link.body.rows,
        rows_superseded=result.rows_superseded + (output.superseded if output else 0),
        rows_deleted=new.counters.tombstones,
        bytes_read=result.bytes_read + (task.bytes if output else 0),
        bytes_written=result.bytes_written + (_new_bytes(old, new) if output else 0),
        engine=engine,
        strategy=task.strategy,
        seconds=result.seconds + seconds,
        status="merged",
    )


def _new_bytes(old: BucketEntry, new: BucketEntry) -> int:
    """Of the files that a merge wrote, and of the vectors."""
    before = {f.name: f.deleted for f in old.data}
    files = sum(f.bytes for f in (*new.data, *new.tombstones) if f.name not in before)
    return files + sum(f.deleted.size for f in new.data if f.deleted and f.deleted != before.get(f.name))


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
    max_seconds: float | None = None,
    lease_seconds: float = LEASE_SECONDS,
    progress: Callable[[int], None] | None = None,
    alive: Callable[[], object] = lambda: None,
) -> list[PartitionResult]:
    """Work on the queue's messages until none is visible (``until_empty``), it is stopped, or time is up.

    Nothing is begun that would pass ``max_seconds``, should it take as long as the longest call so far. ``progress`` is
    told how many messages are left; ``alive`` is called every few seconds, in another thread too.
    A partition that fails goes back to the queue; at its last receive it is marked failed and buried, and so is one whose
    workers never answered. TryAgainError (the store, the disk) gives the messages back and ends the work.
    """
    begun, longest = clock.elapsed(), 0.0
    results: list[PartitionResult] = []
    while not stop.is_set() and (max_seconds is None or clock.elapsed() - begun + longest < max_seconds):
        alive()
        leases = table.queue.receive(engine.partitions_per_call, lease_seconds, 0.0 if until_empty else WAIT_SECONDS)
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
            results += _work(table, engine, leases, [], retry_seconds=0.0 if until_empty else RETRY_SECONDS)
        longest = max(longest, clock.elapsed() - received)
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
    of_partition: dict[tuple[str | None, str], list[Lease]] = {}
    for lease in leases:
        of_partition.setdefault((lease.message.work, lease.message.partition), []).append(lease)
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
        for _ in _work(table, of_threads, of_it, back, RETRY_SECONDS, AWAY_SECONDS):
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
    retry_seconds: float,
    away_seconds: float = 0.0,
) -> Iterator[PartitionResult]:
    """What became of the partitions of these messages; every lease is acked, released or buried, also where this fails.

    Those whose partition failed are released for ``retry_seconds``, and put into ``back``. Where this fails itself, all that
    are left are released for ``away_seconds``.
    """
    unanswered = set(leases)

    def answer(call: Callable[..., bool], answered: Sequence[Lease], *arguments: object) -> None:
        for lease in answered:
            call(lease, *arguments)
            unanswered.remove(lease)

    queue = table.queue
    held: dict[str | None, dict[str, list[Lease]]] = {}
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
                held.setdefault(message.work, {}).setdefault(message.partition, []).append(lease)
        for work, of_work in held.items():
            wanted = {partition: max(x.message.batch for x in of_it) for partition, of_it in of_work.items()}
            receives = {partition: max(x.receives for x in of_it) for partition, of_it in of_work.items()}
            to_try = {p: batch for p, batch in wanted.items() if receives[p] <= queue.max_receives}
            given_up = [
                PartitionResult(p, status="failed", error=UNANSWERED, engine=engine.name)
                for p in wanted
                if p not in to_try
            ]
            for result in itertools.chain(given_up, _each(table, engine, to_try, work)):
                of_it = of_work[result.partition]
                if result.status == "large" and table.large_queue is not None:
                    try:
                        table.large_queue.send([Message(table.name, result.partition, wanted[result.partition], work)])
                    except TryAgainError:
                        raise
                    except LakeupsertError as e:  # such as a send that is not permitted: told like a failed merge
                        result = replace(result, status="failed", error=str(e))
                if result.status != "failed":
                    answer(queue.ack, of_it)
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


def _each(table: OpenTable, engine: Engine, wanted: dict[str, int], work: str | None) -> Iterator[PartitionResult]:
    """One shared call; where that fails, each partition alone, since only that shows whose fault it was."""
    try:
        yield from dedupe_partitions(table, engine, wanted, work)
        return
    except TryAgainError:
        raise
    except Exception as e:
        log.debug("a shared call failed, trying each partition alone: %r", e)
    for partition, batch in wanted.items():
        try:
            yield from dedupe_partitions(table, engine, {partition: batch}, work)
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
