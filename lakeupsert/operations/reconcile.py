"""Send what was lost, publish what is whole, and prove that every row that ever came is accounted for.

Reads     dead letters; to prove: the whole ledger, the published manifests, key and ordering columns of their files
Writes    messages that were lost; `failed` marks of dead letters; the next snapshot. It repairs no row
Repeat    safe: the proof is of a snapshot, which does not change while workers go on

    rows read = appended + quarantined                                                          every batch, by the ledger
    appended  = live + tombstones + superseded + tombstones dropped + refused + withdrawn       every partition, in rows
    appended  = live + tombstones + superseded + withdrawn                                      and in digests of them

What came is the ledger's word, what lost is the manifest's, and what is there is counted in the files.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.errors import DamagedTableError
from lakeupsert.operations.recompute import Comparison, Recomputed, recompute
from lakeupsert.operations.recompute_sql import import_duckdb
from lakeupsert.operations.redrive import is_ours
from lakeupsert.pipeline.dedupe import UNANSWERED, mark_failed, send_missing
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import PublishResult, publish
from lakeupsert.queue import Message
from lakeupsert.rows.datafiles import stream_file
from lakeupsert.rows.digest import Digest, row_hashes
from lakeupsert.rows.rank import sortable
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import LedgerEntry, counting
from lakeupsert.table.manifest import GONE, BucketEntry, Counters, Manifest, added
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import TableSpec


@dataclass(frozen=True)
class Proof:
    """Where the rows of one partition are: ``rows_live`` and ``tombstones`` as counted in the files, the others as recorded.

    Attributes:
        difference: what does not add up, or None.
        by_digest: digests add up too; False where they are not known, as of adopted files before their first merge.
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
    """``resent`` messages; ``published`` is the snapshot that this call made, or None; the state of publishing in ``publish``.

    Attributes:
        queued: messages that were on their way before it published, with those that it sent: what is not in ``publish``
            without any of them, nobody works on.
        batches: what does not add up in the ledger, a sentence each.
        recomputed: with ``deep``, what DuckDB computed anew, and of which batches the landing files are gone or changed:
            partitions that they touch could not be recomputed.
    """

    resent: int
    queued: int
    published: int | None
    publish: PublishResult
    proof: tuple[Proof, ...]
    batches: tuple[str, ...]
    recomputed: Recomputed | None = None

    @property
    def gone(self) -> dict[int, str]:
        """With ``deep``, batches whose landing files are gone or changed, with the first of these."""
        return self.recomputed.gone if self.recomputed else {}

    @property
    def unbalanced(self) -> list[Proof]:
        return [p for p in self.proof if not p.balanced]


def reconcile(
    table: OpenTable,
    *,
    deep: bool = False,
    counted: bool = True,
    selected: Callable[[str], bool] = lambda partition: True,
    progress: Callable[[str], None] = lambda text: None,
) -> ReconcileResult:
    """Bring queue, marks and snapshot up to the ledger, then prove the selected partitions of the published snapshot.

    Without ``counted`` that is left out: no data file is read, and of the ledger only what is not published yet.
    With ``deep`` DuckDB also computes the rows of those that balance anew from what landed, and every column is compared.
    Raises ConfigurationError where the table does not exist, or ``deep`` lacks DuckDB. What does not add up is no error here.
    """
    table.existing_spec()
    if deep:
        import_duckdb()  # so that the error comes before anything is done
    letters = _dead_letters(table, selected)
    failed = table.failed(letters, table.last_snapshot())
    for partition, (message, reason) in letters.items():
        if failed.get(partition, UNANSWERED) == UNANSWERED:  # else the mark says as much already
            mark_failed(table, partition, message.batch, reason)
    # A partition that failed before and lies there dead is brought back by a redrive, or by a run. Sent again from here,
    # it would fail again after every reconcile, each time with one dead letter more. One that is marked now is sent now,
    # whatever is queued: from the next call on it has failed before.
    # What is under way is not lost: a call every 10 minutes of a long night would send all that is left of it again.
    stats = table.queue_stats()
    queued = stats.visible + stats.leased
    resent = send_missing(
        table,
        lambda partition: selected(partition) and partition not in failed,
        queued=queued,
        dead=frozenset(letters.keys() - failed.keys()),
    )
    before = table.last_snapshot()
    published = publish(table)
    now = table.last_snapshot()
    proof = prove(table, now, selected, progress) if now and counted else []
    recomputed = None
    if deep and now:
        readable = [p.partition for p in proof if p.balanced]  # the others are told already, and may not be
        recomputed = recompute(table, now, readable, progress)
        proof = [_compared(p, recomputed.partitions.get(p.partition)) for p in proof]
    return ReconcileResult(
        resent=resent,
        queued=queued + resent,
        published=published.snapshot if before is None or published.snapshot != before.number else None,
        publish=published,
        proof=tuple(proof),
        batches=tuple(_unbalanced_batches(table)) if counted else (),
        recomputed=recomputed,
    )


def prove(
    table: OpenTable,
    snapshot: Link[Snapshot],
    selected: Callable[[str], bool] = lambda partition: True,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Proof]:
    """The proof of each selected partition that the snapshot shows, or that a batch up to the snapshot's touches."""
    entries = table.entries(-1, snapshot.body.batch)
    brought: dict[str, list[Link[LedgerEntry]]] = {}
    for link in entries:
        for partition in filter(selected, link.body.touched):
            brought.setdefault(partition, []).append(link)
    versions = {p: shown.version for p, shown in snapshot.body.partitions.items() if selected(p)}
    counts: dict[int, set[int]] = {}
    found: list[Proof] = []
    for partition in sorted({*brought, *versions}):
        progress(f"counting the rows of {partition}, {len(found) + 1:,} of {len(brought):,} partitions")
        due = brought.get(partition, [])
        try:
            manifest = table.version(partition, versions.get(partition, -1))
        except DamagedTableError as e:
            appended = sum(link.body.touched[partition].rows for link in due)
            found.append(Proof(partition, appended, 0, 0, 0, 0, 0, 0, e.message.rstrip("."), by_digest=False))
            continue
        if manifest.merged not in counts:
            counts[manifest.merged] = counting((link.number, link.body) for link in entries[: manifest.merged + 1])
        if partition in snapshot.body.lagging:
            due = [link for link in due if link.number <= manifest.merged]
        spec = table.spec(max(snapshot.body.spec_version, manifest.spec_version))
        found.append(_proof(table, spec, manifest, due, counts[manifest.merged]))
    return found


def _dead_letters(table: OpenTable, selected: Callable[[str], bool]) -> dict[str, tuple[Message, str]]:
    """Of each selected partition the dead letter of its highest batch, with a worker's reason rather than without one."""
    found: dict[str, tuple[Message, str]] = {}
    for letter in (letter for queue in table.queues for letter in queue.dead_letters()):
        message = letter.message
        if message is None or message.work is not None:  # of a reprocess that failed, the partition is as it was
            continue
        if not is_ours(table, message) or not selected(message.partition):
            continue
        last = found.get(message.partition)
        if last is None or (message.batch, letter.reason != UNANSWERED) > (last[0].batch, last[1] != UNANSWERED):
            found[message.partition] = (message, letter.reason)
    return found


def _unbalanced_batches(table: OpenTable) -> Iterator[str]:
    head = table.ledger_head()
    for link in table.entries(-1, head.number) if head else ():
        entry = link.body
        if entry.rows_read != entry.rows_appended + entry.rows_quarantined:
            yield (
                f"batch {link.number}: {entry.rows_read:,} rows read are not {entry.rows_appended:,} appended + "
                f"{entry.rows_quarantined:,} quarantined"
            )


def _compared(proof: Proof, comparison: Comparison | None) -> Proof:
    if comparison is None or comparison.equal:
        return proof
    return replace(proof, difference=f"readers see other rows than landed: {comparison}")


def _proof(
    table: OpenTable, spec: TableSpec, manifest: Manifest, due: Sequence[Link[LedgerEntry]], counts: set[int]
) -> Proof:
    """``due``: ledger entries that touch the partition and that this version should hold; ``counts``: those that count."""
    partition = manifest.partition
    touched = {link.number: link.body.touched[partition] for link in due}
    wrong = []
    if due and due[-1].number != manifest.merged:
        wrong.append(f"it is merged up to batch {manifest.merged}, and batch {due[-1].number} touches it")
    counters = [bucket.counters for bucket in manifest.buckets]
    recorded = Counters(**{name: sum(getattr(c, name) for c in counters) for name in Counters.__struct_fields__})
    live, tombstones = Digest(spec), Digest(spec)
    for bucket in manifest.buckets:
        if not bucket.settled and bucket.base != touched[0].files:
            wrong.append("its files are not those that were adopted")
        try:
            wrong += _read(table, spec, bucket, live, tombstones)
        except DamagedTableError as e:
            wrong.append(e.message)
    appended = sum(t.rows for t in touched.values())
    withdrawn = sum(t.rows for number, t in touched.items() if number and number not in counts)
    gone = sum(getattr(recorded, name) for name in GONE)
    for what, (one, expected), (other, actual) in (
        ("rows appended", ("by the ledger", appended), ("by the manifest", recorded.appended)),
        ("rows withdrawn", ("by the ledger", withdrawn), ("by the manifest", recorded.withdrawn)),
        ("live rows", ("by the manifest", recorded.live), ("in its files", live.rows)),
        ("tombstones", ("by the manifest", recorded.tombstones), ("in its files", tombstones.rows)),
        ("rows appended", ("by the ledger", appended), ("accounted for", live.rows + tombstones.rows + gone)),
    ):
        if expected != actual:
            wrong.append(f"{what}: {expected:,} {one}, {actual:,} {other}")
    digests = [bucket.digests for bucket in manifest.buckets]
    came = added([d.adopted for d in digests if 0 in touched] + [t.digest for number, t in touched.items() if number])
    gone_digests = [getattr(d, name) for d in digests for name in GONE]
    there = added([str(live), str(tombstones), *gone_digests])
    if None not in (came, there) and came != there and not wrong:
        wrong.append(
            f"as many rows as were appended, and not these: their digest is {there}, of what was appended {came}"
        )
    return Proof(
        partition=partition,
        rows_appended=appended,
        rows_live=live.rows,
        tombstones=tombstones.rows,
        rows_superseded=recorded.superseded,
        tombstones_dropped=recorded.tombstones_dropped,
        refused=recorded.refused,
        withdrawn=recorded.withdrawn,
        difference="; ".join(wrong) or None,
        by_digest=None not in (came, there),
    )


def _read(table: OpenTable, spec: TableSpec, bucket: BucketEntry, live: Digest, tombstones: Digest) -> list[str]:
    """Add up what the files of a bucket hold, key and ordering columns alone; what is wrong with the keys in them."""
    wrong = []
    before = np.empty(0, np.uint64)  # hashes of keys in other files
    runs = [(bucket.tombstones, tombstones), *(((delta,), live) for delta in bucket.deltas), (bucket.base, live)]
    for number, (files, total) in enumerate(runs, 1):
        last = spec.tombstone_schema.empty_table()
        keys = []
        for file in files:
            for rows in stream_file(table.store, file, spec.tombstone_schema):
                total.add(rows)
                if not bucket.settled:
                    continue
                name = file.name or "tombstones in the manifest"
                if not _ascends(pa.concat_tables([last, rows]), spec.stored_key):
                    wrong.append(f"{name}: keys are not there once and in their order")
                hashes = row_hashes(rows, spec.stored_key)
                if len(before) and np.isin(hashes, before).any():
                    wrong.append(f"{name}: rows whose keys are deleted, or in a delta")
                if number < len(runs):
                    keys.append(hashes)
                last = rows.slice(max(0, rows.num_rows - 1))
        before = np.concatenate([before, *keys])
    return list(dict.fromkeys(wrong))


def _ascends(rows: Any, key: Sequence[str]) -> bool:
    """Whether each row's key is above that of the row before; a null is above nothing."""
    ascends = None
    for name in reversed(key):
        column = sortable(rows[name])
        before, after = column.slice(0, max(0, len(column) - 1)), column.slice(1)
        less = pc.less(before, after)
        ascends = less if ascends is None else pc.or_(less, pc.and_(pc.equal(before, after), ascends))
    return bool(pc.all(ascends, skip_nulls=False, min_count=0).as_py())
