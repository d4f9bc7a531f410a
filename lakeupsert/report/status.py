"""What there is and what is still to do, now.

Reads     the last snapshot, the ledger, the heads of partitions that are not published, the queue's counts
Repeat    cheap on one `OpenTable`: only what is new since the last call is read, beside a LIST for each of these partitions
"""

from dataclasses import dataclass

from lakeupsert.errors import LakeupsertError
from lakeupsert.pipeline.next_spec import without_operations
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.queue import QueueStats
from lakeupsert.table.ledger import still_quarantined
from lakeupsert.table.snapshot import Snapshot


@dataclass(frozen=True)
class Status:
    """What there is and what is still to do.

    ``behind`` are the partitions that readers don't see at their last batch, and whether they are dirty: have batches that
    are not merged. ``dirty`` counts those; ``failed`` are those that can't be merged, with the reason.
    ``queue`` counts the messages of both queues, where there is a ``large_queue``; both are None if they can't be read,
    and a warning then says why.
    ``quarantined`` counts refused rows of batches that count, but for those that a replay took up.
    ``warnings`` are for people: what is not as it was meant, and stops nothing.
    """

    snapshot: int | None
    published_at: str | None
    batch: int
    partitions: int
    dirty: int
    behind: dict[str, bool]
    lagging: tuple[str, ...]
    failed: dict[str, str]
    queue: QueueStats | None
    large_queue: QueueStats | None
    rows: int
    bytes: int
    quarantined: int
    warnings: tuple[str, ...] = ()


def status(table: OpenTable) -> Status:
    """Counts from the newest snapshot, the ledger and the queue."""
    snapshot = table.last_snapshot()
    head = table.ledger_head()
    body = snapshot.body if snapshot else Snapshot(batch=0, spec_version=0)
    headers = table.headers(head.number) if head else []
    wanted = table.unpublished(snapshot.body if snapshot else None, head.number) if head else {}
    heads = table.heads(wanted)
    behind = {p: p not in heads or heads[p].body.merged < batch for p, batch in wanted.items()}
    marks = {p: heads[p].body.failed for p, dirty in behind.items() if dirty and p in heads}
    queue: QueueStats | None = QueueStats(0, 0, 0)
    large_queue: QueueStats | None = None
    unread: tuple[str, ...] = ()
    try:
        if head:
            queue, large_queue = table.queue_stats(), table.large_queue.stats() if table.large_queue else None
    except LakeupsertError as e:  # who only reads may have no right to the queue; a full disk keeps it from all
        if e.code not in ("queue-not-permitted", "queue-disk"):
            raise
        queue, unread = None, (e.message,)
    return Status(
        snapshot=snapshot.number if snapshot else None,
        published_at=snapshot.written_at if snapshot else None,
        batch=body.batch,
        partitions=body.partitions_with_rows,
        dirty=sum(behind.values()),
        behind=behind,
        lagging=body.lagging,
        failed={p: mark.reason for p, mark in marks.items() if mark},
        queue=queue,
        large_queue=large_queue,
        rows=body.rows,
        bytes=body.bytes,
        quarantined=sum(f.rows for f in still_quarantined(headers)),
        warnings=(*without_operations(table, headers), *unread),
    )
