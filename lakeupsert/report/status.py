"""The current state of a table, and what is still to do. Its texts are in `cli/output`.

Reads     the last snapshot, the ledger, the heads of unpublished partitions, the counts of the queue, the first names in the
          landing zone, what `freshness` and `removed_files` read
Repeat    cheap on the same `OpenTable`: reads only what is new since the last call, and lists each unpublished partition
"""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from lakeupsert.errors import LakeupsertError, TryAgainError
from lakeupsert.landing.table_logs import holds_a_table
from lakeupsert.phrases import count, short_list, with_advice
from lakeupsert.pipeline.append.discover import foreign_files, list_landing
from lakeupsert.pipeline.append.event_order import hollow_deletes, incomplete_creates, misplaced_events
from lakeupsert.pipeline.append.full_extract import newer_than_extract
from lakeupsert.pipeline.append.next_spec import contrary_rows, without_operations
from lakeupsert.pipeline.audit import NOT_ASKED
from lakeupsert.pipeline.integrity import missing_manifests
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publishers import PublisherStanding, standings
from lakeupsert.pipeline.read_cost import ReadCost, read_cost
from lakeupsert.pipeline.removed_files import removed_files
from lakeupsert.pipeline.standing import unpublished
from lakeupsert.queue import QueueStats
from lakeupsert.report.freshness import Freshness, freshness
from lakeupsert.storage import ObjectInfo
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import ChosenHost, find_quarantined
from lakeupsert.table.snapshot import Snapshot

NIGHTS = ("batch", "restore")
"""The kinds of ledger entries that change what readers see."""
_LISTED = 1000
"""How many names of the landing zone are looked at: S3 gives as many for one request."""


@dataclass(frozen=True)
class Status:
    """The current state of a table.

    Attributes:
        received_at: when the ledger entry of ``batch`` was committed (its receipt stamp, ISO 8601 in UTC). Its age is how old
            the newest data are that readers see.
        behind: partitions whose last batch readers do not see yet, and whether the partition is dirty (has batches that are
            not merged).
        dirty: the number of dirty partitions.
        unpublished_since: the first batch (or restore) that no snapshot shows; None: all are published, some without the
            ``lagging`` partitions.
        failed: partitions that can't be merged, with the reason. If only publishing is left, also those whose manifest is
            missing: otherwise status does not look.
        queue: messages of the queue, or of both queues if there is a ``large_queue``. Both are None if they can't be read;
            then a warning says why.
        deletes_without_row: what the snapshot's batches deleted of which the partition had no row.
        skipped: records of all batches that are not the table's rows, by kind.
        quarantined: refused rows of batches that count, without those that a replay has appended.
        publishers: how far each publisher is.
        freshness: how old the newest data are that readers see, and what holds newer data back.
        reads: what a read of a partition costs at most, and where a compaction is due.
        host: where the landing files of the newest batch were read; None: it had none.
        warnings: problems that stop nothing, for people.
    """

    snapshot: int | None
    published_at: str | None
    batch: int
    received_at: str | None
    partitions: int
    dirty: int
    unpublished_since: int | None
    behind: dict[str, bool]
    lagging: tuple[str, ...]
    failed: dict[str, str]
    queue: QueueStats | None
    large_queue: QueueStats | None
    rows: int
    bytes: int
    deletes_without_row: int
    quarantined: int
    publishers: dict[str, PublisherStanding]
    skipped: dict[str, int]
    freshness: Freshness
    reads: ReadCost
    host: ChosenHost | None = None
    warnings: tuple[str, ...] = ()


def status(table: OpenTable) -> Status:
    """The state from the newest snapshot, the ledger and the queue."""
    snapshot = table.history.last_snapshot()
    head = table.history.ledger_head()
    body = snapshot.body if snapshot else Snapshot(batch=0, spec_version=0)
    headers = table.history.headers(head.number) if head else []
    later, wanted = headers[body.batch + 1 :], unpublished(table.history, snapshot, head)
    heads = table.history.heads(wanted)
    behind = {p: p not in heads or heads[p].body.merged < batch for p, batch in wanted.items()}
    failed = {p: mark.reason for p, dirty in behind.items() if dirty and p in heads and (mark := heads[p].body.failed)}
    if (is_merged := bool(behind) and not any(behind.values())) and snapshot is not None:  # why does nobody publish?
        missing = missing_manifests(table.history.objects, {snapshot.number: body})
        failed |= {partition: str(error) for partition, error in missing.items()}
    queue: QueueStats | None = QueueStats(0, 0, 0)
    large_queue: QueueStats | None = None
    queue_warning, landed = tuple[str, ...](), _landed(table)
    try:
        if head:
            large = table.resources.large_queue
            queue, large_queue = table.resources.queue_stats(), large.stats() if large else None
    except LakeupsertError as e:  # the table says what is dirty, also to a reader without permission for the queue
        if e.code not in ("queue-not-permitted", "queue-disk") and not isinstance(e, TryAgainError):
            raise
        queue, queue_warning = None, (e.message,)
    return Status(
        snapshot=snapshot.number if snapshot else None,
        published_at=snapshot.written_at if snapshot else None,
        batch=body.batch,
        received_at=datetime.fromtimestamp(headers[body.batch].received_at / 1_000_000, UTC).isoformat()
        if snapshot
        else None,
        partitions=body.partitions_with_rows,
        dirty=sum(behind.values()),
        unpublished_since=next((n for n, entry in enumerate(later, body.batch + 1) if entry.kind in NIGHTS), None),
        behind=behind,
        lagging=body.lagging,
        failed=failed,
        queue=queue,
        large_queue=large_queue,
        rows=body.rows,
        bytes=body.bytes,
        deletes_without_row=body.changes.deletes_without_row,
        quarantined=sum(f.rows for f in find_quarantined(headers)),
        publishers=standings(table),
        skipped=dict(sum((Counter(entry.skipped) for entry in headers), Counter[str]())),
        freshness=(fresh := freshness(table, headers, landed, body.batch if snapshot else -1, behind, failed)),
        reads=read_cost(body.partitions),
        host=next((entry.host for entry in reversed(headers) if entry.kind == "batch"), None),
        warnings=(
            *without_operations(table, headers),
            *newer_than_extract(table.declaration, body.changes),
            *(misplaced_events(table.declaration, table.history.spec(headers[-1].spec_version)) if headers else []),
            *(hollow_deletes(table, table.history.spec(headers[-1].spec_version), headers) if headers else []),
            *incomplete_creates(headers),
            *contrary_rows(table.declaration, headers),
            *([holds_a_table(table.resources.landing_log)] if table.resources.landing_log else []),
            *(*queue_warning, *_removed(table), *foreign_files([one.name for one in landed if one.is_foreign])),
            *(*fresh.troubles, *_held(table, snapshot, behind, is_merged=is_merged)),
        ),
    )


def _held(
    table: OpenTable, snapshot: Link[Snapshot] | None, behind: Collection[str], *, is_merged: bool
) -> Iterator[str]:
    """A warning if the setting `audit` may hold a night, or rewritten partitions."""
    if table.settings.audit is None:
        return
    if is_merged:
        yield NOT_ASKED
    if snapshot is None:
        return
    history, shown = table.history, snapshot.body.partitions
    listed = history.objects.list_manifests()
    ahead = [
        p
        for p, info in listed.heads.items()
        if p in shown and p not in behind and history.objects.partition(p).number(info.name) > shown[p].version
    ]
    heads = history.heads(ahead, listed)
    # A fence of `vacuum` is a later version, too.
    held = [p for p, one in heads.items() if one.body.reprocessed != history.version(p, shown[p]).reprocessed]
    if held:
        yield (
            f"{count(len(held), 'partition')} ({short_list(held)}) were rewritten, and readers still see the files of before. "
            "A query of the setting `audit` holds them, or the command broke off. Give `lakeupsert reprocess` again once that is "
            "corrected, or show them with `lakeupsert publish --without-audit`"
        )


def _landed(table: OpenTable) -> list[ObjectInfo]:
    if table.declaration.by_folder:  # it names no landing zone
        return []
    with suppress(LakeupsertError, OSError):  # readers need no right for the landing zone
        return [*list_landing(table, limit=_LISTED)]
    return []


def _removed(table: OpenTable) -> list[str]:
    with suppress(LakeupsertError, OSError):  # as in `_landed`
        return [with_advice(found, advice) for found, advice in removed_files(table)]
    return []
