"""Send lost messages again, publish complete batches, and prove that every row that was ever appended is accounted for.

Reads     dead letters; for the proof, the ledger since the last one that held (`arrived`), the published manifests, and key and
          ordering columns of their files
Writes    lost messages; `failed` marks for dead letters; the next snapshot; what `arrived` writes. It does not repair rows
Repeat    safe: the proof is about a snapshot, which does not change while workers go on

    rows read = appended + quarantined                                                          every batch, by the ledger
    appended  = live + tombstones + superseded + tombstones dropped + refused + withdrawn       every partition, in rows
                                                                       and in digests of key and order, if they are known

The ledger says what was appended, the manifest what lost, and the rows that are stored are counted in the files.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from lakeupsert.engine.attempts import all_or_raise
from lakeupsert.engine.count import StoredRows, count_rows, total
from lakeupsert.engine.hosts import Host, map_counted
from lakeupsert.engine.runs import runs
from lakeupsert.errors import DamagedTableError
from lakeupsert.operations.arrived import (
    NOT_KNOWN,
    AllArrived,
    Arrived,
    entries_by_partition,
    read_arrived,
    write_arrived,
)
from lakeupsert.operations.recompute.recompute import Comparison, Recomputation, recompute
from lakeupsert.operations.recompute.sql import import_duckdb
from lakeupsert.operations.redrive import is_ours
from lakeupsert.phrases import count, short_list
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.messages import send_missing
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import PublishResult, publish
from lakeupsert.pipeline.standing import failed_partitions
from lakeupsert.pipeline.workers.worker import UNANSWERED, mark_failed
from lakeupsert.progress import Share
from lakeupsert.storage import ObjectStore
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import Touched, active_batches
from lakeupsert.table.manifest import GONE, BucketEntry, Counters, DataFile, Manifest, add_digests
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import TableSpec

log = logging.getLogger(__name__)

PARTITIONS_TOGETHER = 256
"""The manifests of so many partitions are in memory at a time."""
BUCKETS_A_CALL = 4096
"""Buckets that one call of the host counts, at most. More: each task of a cluster unpickles the files of more buckets, 1 kB each.
Fewer: its cores wait more often for the longest."""


@dataclass(frozen=True)
class Proof:
    """Where the rows of one partition are. ``rows_live`` and ``tombstones`` are counted in the files, the others as recorded.

    Attributes:
        difference: what does not add up, or None.
        by_digest: digests add up, too; False if they are not known, for example of adopted files before their first merge.
    """

    partition: str
    rows_appended: int
    rows_live: int
    tombstones: int
    rows_superseded: int
    tombstones_dropped: int
    refused: int
    withdrawn: int
    difference: str | None
    by_digest: bool

    @property
    def balanced(self) -> bool:
        return self.difference is None


@dataclass(frozen=True)
class ReconcileResult:
    """``resent`` counts messages; ``published`` is the snapshot that this call appended, or None; ``publish`` says what is left.

    Attributes:
        queued: messages on their way before it published, including those that it sent. If there are none, no worker is at the
            partitions that ``publish`` waits for.
        batches: what does not add up in the ledger, in one sentence per batch.
        recomputed: with ``deep``, DuckDB's comparison.
    """

    resent: int
    queued: int
    published: int | None
    publish: PublishResult
    proof: tuple[Proof, ...]
    batches: tuple[str, ...]
    recomputed: Recomputation | None = None

    @property
    def gone(self) -> dict[int, str]:
        """With ``deep``, the batches whose landing files are gone or changed, with the first of these."""
        return self.recomputed.gone if self.recomputed else {}

    @property
    def unbalanced(self) -> list[Proof]:
        return [p for p in self.proof if not p.balanced]


def reconcile(
    table: OpenTable,
    host: Host | None,
    *,
    deep: bool = False,
    selected: Callable[[str], bool] = lambda partition: True,
    progress: Callable[[str], None] = lambda text: None,
) -> ReconcileResult:
    """Bring queue, marks and snapshot up to date with the ledger, then prove the selected partitions of the published snapshot.

    ``host`` counts the rows. Without one there is no proof: no data file is read, and of the ledger only what is not published.
    With ``deep``, the whole ledger is read, and DuckDB recomputes the rows of partitions that balance from what landed, to
    compare every column.
    Raises ConfigurationError if the table does not exist, or ``deep`` lacks DuckDB. An imbalance raises nothing.
    """
    table.history.existing_spec()
    if deep:
        import_duckdb()  # raises before anything is done
    letters = _dead_letters(table, selected)
    failed = failed_partitions(table.history, letters, table.history.last_snapshot())
    for partition, letter in letters.items():
        if failed.get(partition, UNANSWERED) == UNANSWERED:  # otherwise the mark has a reason already
            mark_failed(table.history, partition, letter.batch, letter.reason)
    # A partition that had failed before and is a dead letter is not sent again from here: it would fail again after every
    # reconcile, with one more dead letter each time. A redrive or a run brings it back. A partition that was marked just now
    # is sent, whatever is queued: the next call finds that it has failed before.
    # Queued messages count as on their way: otherwise a call every 10 minutes would send the rest of a long night again.
    stats = table.resources.queue_stats()
    queued = stats.visible + stats.leased
    resent = send_missing(
        table,
        lambda partition: selected(partition) and partition not in failed,
        queued=queued,
        dead=frozenset(letters.keys() - failed.keys()),
    )
    before = table.history.last_snapshot()
    published = publish(table)
    now = table.history.last_snapshot()
    known = read_arrived(table, now.body.batch) if now and host and not deep else NOT_KNOWN
    proof, known = _prove_behind(table, now, host, selected, progress, known) if now and host else ([], known)
    batches = tuple(_unbalanced_batches(table.history, known.up_to)) if host else ()
    is_whole = now is not None and not now.body.lagging and len(proof) == len(now.body.partitions)
    if now and proof and is_whole and all(p.balanced for p in proof) and not batches:
        write_arrived(table, known, now.body.batch)
    recomputed = None
    if deep and now:
        readable = [p.partition for p in proof if p.balanced]  # others are reported already, and may be unreadable
        recomputed = recompute(table, now, readable, progress)
        proof = [_with_comparison(p, recomputed.partitions.get(p.partition)) for p in proof]
    return ReconcileResult(
        resent=resent,
        queued=queued + resent,
        published=published.snapshot if before is None or published.snapshot != before.number else None,
        publish=published,
        proof=tuple(proof),
        batches=batches,
        recomputed=recomputed,
    )


def prove(
    table: OpenTable,
    snapshot: Link[Snapshot],
    host: Host,
    selected: Callable[[str], bool] = lambda partition: True,
    progress: Callable[[str], None] = lambda text: None,
    known: AllArrived = NOT_KNOWN,
) -> list[Proof]:
    """Prove each selected partition that the snapshot shows, or that a batch up to it touches.

    Of entries that are ``known``, it takes what came to each partition; it reads the others.
    """
    entries = table.history.entries(known.up_to, snapshot.body.batch)
    [first] = table.history.entries(-1, 0)
    batches = {p: due for p, due in entries_by_partition(entries).items() if selected(p)}
    versions = {p: shown for p, shown in snapshot.body.partitions.items() if selected(p)}
    active: dict[int, set[int]] = {}
    partitions = sorted({*batches, *versions, *filter(selected, known.partitions)})
    proofs: list[Proof] = []

    def read(partition: str) -> Manifest | DamagedTableError:
        try:
            return table.history.version(partition, versions.get(partition, -1))
        except DamagedTableError as e:
            return e

    for at in range(0, len(partitions), PARTITIONS_TOGETHER):
        together = partitions[at : at + PARTITIONS_TOGETHER]
        # Executors count all of these before the first one is told below.
        progress(Share(f"counting the rows of {count(len(partitions), 'partition')}", at, len(partitions)))
        manifests = table.resources.map_concurrently(read, together)
        counts = _count(table, snapshot, host, [m for m in manifests if isinstance(m, Manifest)])
        for number, (partition, manifest) in enumerate(zip(together, manifests, strict=True), at + 1):
            progress(Share(f"counting the rows of {partition}", number - 1, len(partitions)))
            due, before = batches.get(partition, []), known.partitions.get(partition, Arrived())
            if isinstance(manifest, DamagedTableError):
                arrived = before.and_then(partition, due, ())
                message = manifest.message.rstrip(".")
                proofs.append(Proof(partition, arrived.rows, 0, 0, 0, 0, 0, 0, message, by_digest=False))
                continue
            if manifest.merged not in active:
                upto = max(0, manifest.merged - known.up_to)
                active[manifest.merged] = active_batches((link.number, link.body) for link in entries[:upto])
            if partition in snapshot.body.lagging:
                due = [link for link in due if link.number <= manifest.merged]
            arrived = before.and_then(partition, due, active[manifest.merged])
            proofs.append(_prove_partition(manifest, next(counts), arrived, first.body.touched.get(partition)))
    return proofs


def _prove_behind(
    table: OpenTable,
    snapshot: Link[Snapshot],
    host: Host,
    selected: Callable[[str], bool],
    progress: Callable[[str], None],
    known: AllArrived,
) -> tuple[list[Proof], AllArrived]:
    """As `prove`, by what is ``known`` of earlier entries. If a partition does not balance by that, nothing is."""
    proofs = prove(table, snapshot, host, selected, progress, known)
    wrong = {p.partition for p in proofs if not p.balanced}
    if known.up_to < 0 or not wrong:
        return proofs, known
    again = {p.partition: p for p in prove(table, snapshot, host, wrong.__contains__, progress)}
    if any(p.balanced for p in again.values()):
        log.warning("table %r: the last proof was wrong for %s", table.name, short_list(sorted(wrong)))
    return [again.get(p.partition, p) for p in proofs], NOT_KNOWN


@dataclass(frozen=True)
class _Letter:
    """The batch of a dead letter, and its reason."""

    batch: int
    reason: str


def _dead_letters(table: OpenTable, selected: Callable[[str], bool]) -> dict[str, _Letter]:
    """The dead letter of each selected partition: of its highest batch, and if there are several, one with a worker's reason."""
    letters: dict[str, _Letter] = {}
    for letter in (letter for queue in table.resources.queues for letter in queue.dead_letters()):
        message = letter.message
        if message is None or message.work is not None:  # a reprocess that failed leaves its partition as it was
            continue
        if not is_ours(table, message) or not selected(message.partition):
            continue
        last = letters.get(message.partition)
        if last is None or (message.batch, letter.reason != UNANSWERED) > (
            last.batch,
            last.reason != UNANSWERED,
        ):
            letters[message.partition] = _Letter(message.batch, letter.reason)
    return letters


def _unbalanced_batches(history: History, after: int) -> Iterator[str]:
    head = history.ledger_head()
    for link in history.entries(after, head.number) if head else ():
        entry = link.body
        if entry.rows_read != entry.rows_appended + entry.rows_quarantined:
            yield (
                f"batch {link.number}: {entry.rows_read:,} rows read are not {entry.rows_appended:,} appended + "
                f"{entry.rows_quarantined:,} quarantined"
            )


def _with_comparison(proof: Proof, comparison: Comparison | None) -> Proof:
    if comparison is None or comparison.equal:
        return proof
    return replace(proof, difference=f"readers see other rows than landed: {comparison}")


def _count(
    table: OpenTable, snapshot: Link[Snapshot], host: Host, manifests: Sequence[Manifest]
) -> Iterator[StoredRows]:
    """What is stored of each partition. Raises what keeps it from being read, except damage, which is a finding."""
    for run in runs(manifests, lambda manifest: len(manifest.buckets), BUCKETS_A_CALL):
        items = [
            (table.history.spec(max(snapshot.body.spec_version, manifest.spec_version)), bucket)
            for manifest in run
            for bucket in manifest.buckets
        ]
        sizes = [float(sum(file.bytes for file in bucket.data)) for _, bucket in items]
        found = iter(
            map_counted(host, table.resources.store, partial(_count_bucket, table.resources.store), items, sizes)
        )
        for manifest in run:
            yield total(all_or_raise(itertools.islice(found, len(manifest.buckets))))


def _count_bucket(store: ObjectStore, item: tuple[TableSpec, BucketEntry]) -> StoredRows:
    return count_rows(store, *item)


def _bare(files: Sequence[DataFile]) -> list[DataFile]:
    """Without their statistics, which the ledger does not have."""
    return [msgspec.structs.replace(file, statistics=()) for file in files]


def _prove_partition(manifest: Manifest, stored: StoredRows, arrived: Arrived, adopted: Touched | None) -> Proof:
    """``arrived``: the rows that this version should hold; ``adopted``: the part of batch 0."""
    wrong = []
    if arrived.last not in (-1, manifest.merged):
        wrong.append(f"it is merged up to batch {manifest.merged}, but batch {arrived.last} touches it")
    counters = [bucket.counters for bucket in manifest.buckets]
    recorded = Counters(**{name: sum(getattr(c, name) for c in counters) for name in Counters.__struct_fields__})
    files = _bare(adopted.files) if adopted else []
    if any(not bucket.settled and _bare(bucket.base) != files for bucket in manifest.buckets):
        wrong.append("its files are not the adopted ones")
    wrong += stored.wrong
    gone = sum(getattr(recorded, name) for name in GONE)
    for what, (one, expected), (other, actual) in (
        ("rows appended", ("by the ledger", arrived.rows), ("by the manifest", recorded.appended)),
        ("rows withdrawn", ("by the ledger", arrived.withdrawn), ("by the manifest", recorded.withdrawn)),
        ("live rows", ("by the manifest", recorded.live), ("in its files", stored.live)),
        ("tombstones", ("by the manifest", recorded.tombstones), ("in its files", stored.tombstones)),
        ("rows appended", ("by the ledger", arrived.rows), ("accounted for", stored.live + stored.tombstones + gone)),
    ):
        if expected != actual:
            wrong.append(f"{what}: {expected:,} {one}, {actual:,} {other}")
    digests = [bucket.digests for bucket in manifest.buckets]
    came = add_digests([*(d.adopted for d in digests if adopted), arrived.digest])
    gone_digests = [getattr(d, name) for d in digests for name in GONE]
    found = add_digests([stored.live_digest, stored.tombstone_digest, *gone_digests])
    if None not in (came, found) and came != found and not wrong:
        wrong.append(
            f"the number of rows is right, but they are not the rows that were appended: found digest {found}, expected "
            f"{came}"
        )
    return Proof(
        partition=manifest.partition,
        rows_appended=arrived.rows,
        rows_live=stored.live,
        tombstones=stored.tombstones,
        rows_superseded=recorded.superseded,
        tombstones_dropped=recorded.tombstones_dropped,
        refused=recorded.refused,
        withdrawn=recorded.withdrawn,
        difference="; ".join(wrong) or None,
        by_digest=None not in (came, found),
    )
