"""Show readers the newest batch that is whole in every partition.

Reads     the last snapshot, the ledger entries above it, the manifests of partitions that they touch or that lag
Writes    the next snapshot, if there is anything new to show
Repeat    safe; beside other publishers one wins and the others find nothing left to do

Snapshot N needs, of every partition that is touched in (last snapshot's batch, N] or lagging, the version whose `merged` is
the last batch <= N that touches it. Where one has jumped beyond N, or is not there yet, another N is tried.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from lakeupsert import clock
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.table.manifest import NO_CHANGES, Changes, Manifest
from lakeupsert.table.snapshot import Shown, Snapshot


@dataclass(frozen=True)
class PublishResult:
    """``snapshot`` is the number of the newest snapshot (None: there is none), ``batch`` its batch.

    ``waiting`` are partitions whose newest batches are not in it, ``failed`` those among them that are marked failed, or
    whose shown version is gone, with the reason. ``lost``: the snapshot that was gone, and in whose place this one shows what is
    whole.
    """

    snapshot: int | None
    batch: int
    partitions_changed: int
    rows: int
    lagging: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    lost: int | None = None


class _OlderThanKnown(Exception):
    """The ledger knows a newer snapshot than the newest that was there: that is lost, or somebody published just now."""


def publish(table: OpenTable, also: Collection[str] = ()) -> PublishResult:
    """Append the newest possible snapshot; the result also where nothing was to do.

    ``also``: partitions of which there may be a newer version at the same `merged`. Nobody else looks at their heads.
    """
    before: Link[Snapshot] | None = None
    head: Link[LedgerEntry] | None = None
    left: Snapshot | None = None
    stand_in: Link[Snapshot] | None = None

    def build(last: Link[Snapshot] | None) -> Snapshot | None:
        nonlocal before, head
        before, head = last, table.newest_entry(last)
        if head is None:
            return None
        if (last.number if last else -1) < (-1 if head.body.snapshot is None else head.body.snapshot):
            raise _OlderThanKnown
        if last is None or last is not stand_in:
            return _candidate(table, last.body if last else None, head.number, also)
        # The lost snapshot may have shown newer versions at the same `merged`, and the files of the older ones may be gone.
        return _candidate(table, left, head.number, left.partitions if left else ()) or left

    while True:
        try:
            published = table.objects.snapshots.extend(build, behind=stand_in)
            break
        except _OlderThanKnown:
            left, stand_in = _stand_in(table)
    now = published or before
    body = now.body if now else None
    behind = table.unpublished(body, head.number) if head else {}
    changed = 0
    if published:
        old = before.body.partitions if before else {}
        changed = sum(old.get(p) != shown for p, shown in published.body.partitions.items())
    return PublishResult(
        snapshot=now.number if now else None,
        batch=body.batch if body else 0,
        partitions_changed=changed,
        rows=body.rows if body else 0,
        lagging=body.lagging if body else (),
        waiting=tuple(behind),
        failed=table.failed(behind, now),
        lost=stand_in.number if stand_in else None,
    )


def _stand_in(table: OpenTable) -> tuple[Snapshot | None, Link[Snapshot] | None]:
    """Where the newest snapshot is gone and the ledger knows it: what the one before shows, and with that the number to append
    behind. Twice None otherwise.

    What the lost one may have expired is expired: a vacuum may have deleted its files since.
    """
    newest = table.last_snapshot()
    lost = table.lost_snapshot(table.newest_entry())
    if lost is None:
        return None, None
    left = newest.body if newest else None
    body = left or Snapshot(batch=0, spec_version=0)
    body = msgspec.structs.replace(body, expired=max(body.expired, lost - table.settings.keep_snapshots + 1))
    link = Link(lost, write_id="", parent=None, written_at="", body=body, read_at=clock.elapsed())
    return (body if left else None), link


def _candidate(table: OpenTable, old: Snapshot | None, newest: int, also: Collection[str]) -> Snapshot | None:
    """The snapshot of the greatest batch up to ``newest`` that can be shown, or None where that is what ``old`` shows."""
    shown_batch = old.batch if old else 0
    behind = table.unpublished(old, newest)
    anew = {p: old.partitions[p].merged for p in also if p in old.partitions} if old else {}
    heads = table.heads({**behind, **anew})
    for batch in range(newest, shown_batch - 1, -1):
        if batch > shown_batch and table.entries(batch - 1, batch)[0].body.kind == "fence":
            continue  # nothing came with it
        new = _snapshot_of(table, old, batch, heads, anew)
        if new is not None:
            return None if old is not None and new.shows(old) else new
    return None


def _snapshot_of(
    table: OpenTable, old: Snapshot | None, batch: int, heads: dict[str, Link[Manifest]], anew: dict[str, int]
) -> Snapshot | None:
    partitions = dict(old.partitions) if old else {}
    lagging = []
    newer: list[Link[Manifest]] = []
    due = table.unpublished(old, batch)
    for partition, wanted in {**anew, **due}.items():
        head = heads.get(partition)
        if old is not None and old.lost(partition, head):  # what is left of its chain must not be shown instead
            if partition in due:
                if table.settings.on_failed_partition == "hold":
                    return None
                lagging.append(partition)
            continue
        found = _version_at(table, partition, head, wanted)
        if found is None or found.body.merged != wanted:
            failed = head.body.failed if head else None
            if table.settings.on_failed_partition == "hold" or failed is None or failed.batch > batch:
                return None  # only slow: it is waited for
            if found is None:
                return None
            lagging.append(partition)
        table.refuse_another_entry(found.body, old)
        newer.append(found)
        partitions[partition] = Shown(
            version=found.number,
            merged=found.body.merged,
            rows=found.body.rows,
            bytes=found.body.bytes,
            files=found.body.files,
        )
    entry = table.entries(batch - 1, batch)[0].body if batch else None
    spec_version = entry.spec_version if entry else 0
    return Snapshot(
        batch=batch,
        spec_version=spec_version,
        partitions=dict(sorted(partitions.items())),
        lagging=tuple(sorted(lagging)),
        tags=old.tags if old else {},
        expired=old.expired if old else 0,
        changes=sum(table.at_once(lambda link: _changes(table, link, old), newer), NO_CHANGES),
    )


def _changes(table: OpenTable, link: Link[Manifest], old: Snapshot | None) -> Changes:
    """What the merges of a partition changed that ``link`` has and ``old`` did not show, since the last restore."""
    shown = old.partitions.get(link.body.partition) if old else None
    version, merged = (shown.version, shown.merged) if shown else (-1, 0)
    chain = table.objects.partition(link.body.partition)
    total = NO_CHANGES
    while link.body.merged > merged:
        older = chain.get(link.number - 1) if link.number > version + 1 else None
        if older is None or older.body.merged < link.body.merged:  # else it repeats what the one below says
            total += link.body.changes
        if older is None or _withdrawn(link.body) > _withdrawn(older.body):
            break
        link = older
    return total


def _withdrawn(manifest: Manifest) -> int:
    return sum(bucket.counters.withdrawn for bucket in manifest.buckets)


def _version_at(table: OpenTable, partition: str, head: Link[Manifest] | None, wanted: int) -> Link[Manifest] | None:
    """The newest version whose `merged` is at most ``wanted``: one that jumped beyond is too new to be shown."""
    chain = table.objects.partition(partition)
    while head is not None and head.body.merged > wanted:
        head = chain.get(head.number - 1)
    return head
