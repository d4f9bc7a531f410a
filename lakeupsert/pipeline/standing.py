"""The standing of a table: the batches to merge and to publish, and the commits of a call that failed."""

from collections.abc import Iterable
from contextlib import suppress

from lakeupsert.config import of_table
from lakeupsert.errors import DamagedTableError, LakeupsertError, Standing
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.resources import CONCURRENT_REQUESTS
from lakeupsert.storage import StoreUnavailableError
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.table.snapshot import Snapshot


def unpublished(history: History, snapshot: Link[Snapshot] | None, head: Link[LedgerEntry] | None) -> dict[str, int]:
    """`unpublished_up_to` the ledger's ``head``; no partition if there is none."""
    return unpublished_up_to(history, snapshot.body if snapshot else None, head.number) if head else {}


def unpublished_up_to(history: History, snapshot: Snapshot | None, up_to: int) -> dict[str, int]:
    """Partitions that ``snapshot`` does not show at their last batch <= ``up_to``, each with that batch."""
    touched = _last_touches(history.entries(snapshot.batch if snapshot else -1, up_to))
    if snapshot is not None:
        for partition in snapshot.lagging:
            since = history.entries(snapshot.partitions[partition].merged, snapshot.batch)
            touched.setdefault(partition, _last_touches(since)[partition])
    return touched


def is_through(history: History) -> bool:
    """Whether there is something to publish and every unpublished partition is merged or marked failed.

    It reads the partition whose message was sent last first, then `CONCURRENT_REQUESTS` at a time, and stops at the first
    one that is still to be merged: as long as much is left, that takes few requests.
    """
    behind = unpublished(history, history.last_snapshot(), history.ledger_head())
    waiting, count = list(behind), 1
    while waiting:
        asked = [waiting.pop() for _ in range(min(count, len(waiting)))]
        heads = history.heads(asked)
        done = [p for p, head in heads.items() if head.body.merged >= behind[p] or head.body.failed is not None]
        if len(done) < len(asked):
            return False
        count = CONCURRENT_REQUESTS
    return bool(behind)


def failed_partitions(history: History, partitions: Iterable[str], snapshot: Link[Snapshot] | None) -> dict[str, str]:
    """The partitions that are marked failed, or of which ``snapshot`` shows a version that is missing, with the reason."""
    found = {}
    for partition in partitions:
        try:
            head = history.behind(snapshot, partition, history.heads([partition]).get(partition))
        except DamagedTableError as e:
            found[partition] = str(e)
        else:
            if head is not None and head.body.failed is not None:
                found[partition] = head.body.failed.reason
    return found


def tries(history: History) -> tuple[int, int]:
    """How often this object tried to append to the ledger and to the snapshots; `account` counts from there."""
    if not history.has_objects:  # the store is not open yet, and opening it may fail
        return 0, 0
    return history.objects.ledger.tries(), history.objects.snapshots.tries()


def account(table: OpenTable, error: LakeupsertError, since: tuple[int, int] = (0, 0), *, named: bool = False) -> None:
    """Write the table's standing into the error: what was committed ``since`` then, and what readers see.

    ``since`` are earlier `tries`; ``named``: the standing names the table. If the store can't be read, a part of it is missing,
    since the error itself matters more.
    """
    error.message, error.next = of_table(error.message, table.name), of_table(error.next, table.name)
    committed: int | None = None
    seen = table.history.known_snapshot
    certain, published = True, False
    if table.history.has_objects:
        if not isinstance(error, StoreUnavailableError):  # else it would wait for the store again
            with suppress(Exception):
                seen = table.history.last_snapshot()
        try:
            objects = table.history.objects
            entries, certain = objects.ledger.find_appended(since[0])
            committed = max((number for number in entries if _is_batch(table.history, number)), default=None)
            snapshots, _ = objects.snapshots.find_appended(since[1])
            published = bool(snapshots)
            error.data_changed |= any(_is_change(objects, number) for number in snapshots)
        except Exception:
            certain = False
    error.standing = Standing(
        committed=committed,
        readers_see=seen.number if seen else None,
        certain=certain,
        table=table.name if named else None,
        published=published,
    )


def _is_batch(history: History, number: int) -> bool:
    """Whether a ledger entry has rows. A fence has none; entry 0 has some if it adopted files."""
    link = history.entry(number)
    return link is not None and link.body.kind != "fence" and (number > 0 or bool(link.body.touched))


def _is_change(objects: TableObjects, number: int) -> bool:
    """Whether this snapshot shows readers something else than the one before."""
    now, before = (objects.snapshots.get(n) if n >= 0 else None for n in (number, number - 1))
    return now is not None and (before is None or not now.body.shows(before.body))


def _last_touches(links: Iterable[Link[LedgerEntry]]) -> dict[str, int]:
    """For each partition the last of these batches that touches it; ``links`` in ascending order."""
    return {partition: link.number for link in links for partition in link.body.touched}
