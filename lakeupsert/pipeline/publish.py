"""Show readers the newest batch that is whole in every partition.

Reads     the last snapshot, the ledger entries above it, the listing of all manifests, those of partitions that the entries touch
          or that lag
Writes    the next snapshot, if there is anything new to show
Repeat    safe; of several publishers one wins, and the others find nothing left to do

Snapshot N needs one version of every partition that lags or is touched in (last snapshot's batch, N]: the version whose `merged`
is the last batch <= N that touches the partition. If a partition has jumped beyond N, or is not there yet, another N is tried.
Every manifest that it names must be stored, also those of partitions that nothing has touched.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import msgspec

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, DamagedTableError
from lakeupsert.events import Publish
from lakeupsert.pipeline.append.full_extract import newer_than_extract
from lakeupsert.pipeline.audit import AuditError, audit
from lakeupsert.pipeline.integrity import missing_manifests, refuse_another_entry
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.previews import Preview, shown_version
from lakeupsert.pipeline.publishers import PublisherStanding, catch_up, catch_up_one, publisher
from lakeupsert.pipeline.standing import failed_partitions, unpublished, unpublished_up_to
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import Manifests, TableObjects
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.table.manifest import NO_CHANGES, Changes, Manifest
from lakeupsert.table.snapshot import Snapshot


@dataclass(frozen=True)
class PublishResult:
    """The newest snapshot, and what it does not show.

    Attributes:
        snapshot: its number, or None if there is no snapshot.
        batch: its batch.
        waiting: partitions whose newest batches are not in it.
        failed: those of ``waiting`` that are marked failed, and all partitions whose manifest is missing, with the reason.
        lost: the number of a lost snapshot that this one takes the place of.
        publishers: how far each publisher is now.
        warnings: of what it shows since this call, for people.
    """

    snapshot: int | None
    batch: int
    partitions_changed: int
    rows: int
    lagging: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    lost: int | None = None
    publishers: dict[str, PublisherStanding] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class _SnapshotMissingError(Exception):
    """The ledger knows a newer snapshot than the newest that was read: it is lost, or was published just now."""


def publish(table: OpenTable, also: Collection[str] = (), *, audited: bool = True) -> PublishResult:
    """Append the newest possible snapshot. Returns a result also if there was nothing to do.

    Args:
        also: partitions that may have a newer version at the same `merged`; the heads of others are not read for that.
        audited: ask the queries of the setting `audit` first. Without them, it also shows what a reprocess repaired.

    Raises AuditError: a query finds a row, or can't be asked.
    """
    if not audited and (shown := table.history.last_snapshot()):
        also = shown.body.partitions
    begun, held = clock.elapsed(), table.history.objects.held
    snapshots = _Publisher(table, also, audited)
    try:
        published = snapshots.append()
    except AuditError:
        catch_up(table)  # with what is published
        raise
    if published is None and held.leads:
        held.look()  # no create has checked that there is nothing to show
        if unpublished(table.history, table.history.last_snapshot(), table.history.newest_entry()):
            held.forget()
            published = snapshots.append()
    now = published or snapshots.last
    body = now.body if now else None
    behind = unpublished(table.history, now, snapshots.head)
    changed = 0
    if published:
        old = snapshots.last.body.partitions if snapshots.last else {}
        changed = sum(old.get(p) != shown for p, shown in published.body.partitions.items())
        table.resources.emit(_event(table, snapshots.last, published, changed, begun))
    return PublishResult(
        snapshot=now.number if now else None,
        batch=body.batch if body else 0,
        partitions_changed=changed,
        rows=body.rows if body else 0,
        lagging=body.lagging if body else (),
        waiting=tuple(behind),
        failed=failed_partitions(table.history, behind, now) | {p: str(e) for p, e in snapshots.missing.items()},
        lost=snapshots.stand_in.number if snapshots.stand_in else None,
        publishers=catch_up(table),
        warnings=newer_than_extract(table.declaration, published.body.changes) if published else (),
    )


def publish_to(table: OpenTable, name: str | None, *, reset: bool, audited: bool = True) -> PublishResult:
    """As `publish`, and raises what stops a publisher, which otherwise is in the result. ``reset``: it first deletes what it has
    written, unless it can't show the newest snapshot. Raises ConfigurationError if the table has no such publisher."""
    if name is None:
        raise ConfigurationError(
            "no-such-publisher",
            "A reset needs the name of one publisher. Nothing was changed.",
            next='name it: `--to delta`, or to="delta"',
        )
    one = publisher(table, name)
    try:
        published = publish(table, audited=audited)
    except AuditError:
        if reset and (newest := table.history.last_snapshot()):
            one.check(newest)
            one.reset()
            catch_up_one(table, name, newest)
        raise
    newest, standing = table.history.last_snapshot(), published.publishers.get(name)
    if reset and newest is not None and not (standing and standing.is_silent):
        one.check(newest)
        one.reset()
        standing = catch_up_one(table, name, newest)
        published = replace(published, publishers={**published.publishers, name: standing})
    if standing is not None and standing.problem is not None:
        raise standing.problem
    return published


def _event(
    table: OpenTable, last: Link[Snapshot] | None, published: Link[Snapshot], changed: int, begun: float
) -> Publish:
    body = published.body
    *earlier, newest = table.history.entries(min(last.body.batch if last else -1, body.batch - 1), body.batch)
    return Publish(
        table=table.name,
        batch=body.batch,
        entry=newest.write_id,
        seconds=round(clock.elapsed() - begun, 6),
        requests=table.resources.store.requests.take(),
        snapshot=published.number,
        partitions_changed=changed,
        rows=body.rows,
        lagging=len(body.lagging),
        earlier=tuple(link.write_id for link in earlier if link.body.touched),
    )


@dataclass
class _Publisher:
    """Appends a snapshot, and remembers what the last attempt started from.

    Attributes:
        last: the last snapshot.
        head: the ledger's head.
        stand_in: takes the place of a lost snapshot, so that the next one is appended behind its number.
        before_lost: the snapshot before the lost one.
        missing: partitions whose manifest in the next snapshot, or in the last one if nothing is new, is missing.
    """

    table: OpenTable
    also: Collection[str]
    audited: bool
    last: Link[Snapshot] | None = None
    head: Link[LedgerEntry] | None = None
    stand_in: Link[Snapshot] | None = None
    before_lost: Snapshot | None = None
    missing: dict[str, DamagedTableError] = field(default_factory=dict)

    def append(self) -> Link[Snapshot] | None:
        """The snapshot that was appended, or None if there is nothing new to show."""
        while True:
            try:
                published = self.table.history.objects.snapshots.extend(self._build, behind=self.stand_in)
                if published is not None:
                    self.table.history.previews.published(published.number)
                return published
            except _SnapshotMissingError:
                self._replace_lost()

    def _build(self, last: Link[Snapshot] | None) -> Snapshot | None:
        table = self.table
        if last is not self.stand_in:
            table.history.see(last)
        head = table.history.newest_entry(last)
        self.last, self.head = last, head
        if head is None:
            return None
        if (last.number if last else -1) < (-1 if head.body.snapshot is None else head.body.snapshot):
            raise _SnapshotMissingError
        listed = table.history.list_all([last.body] if last else [])
        if last is None or last is not self.stand_in:
            new = _newest_snapshot(table, last.body if last else None, head.number, self.also, listed)
        else:
            # The lost snapshot may have shown newer versions at the same `merged`, and the files of the older ones may be gone.
            old = self.before_lost
            new = _newest_snapshot(table, old, head.number, old.partitions if old else (), listed) or old
        new = self._whole(last, new, listed)
        if new is None:
            return None
        new = table.history.previews.store(table.history.objects, last.number + 1 if last else 0, new)
        if self.audited:
            audit(table, last.body if last else None, new)
        return new

    def _whole(self, last: Link[Snapshot] | None, new: Snapshot | None, listed: Manifests | None) -> Snapshot | None:
        """``new``, unless it would name a missing manifest, and a failed partition holds the night back."""
        table, body, number = self.table, new or (last.body if last else None), last.number if last else -1
        objects = table.history.objects
        snapshots = {number + (new is not None): body} if body is not None and listed is not None else {}
        self.missing = missing_manifests(objects, snapshots, listed) if snapshots else {}
        newest = objects.snapshots.newest_number() if self.missing else None
        if newest is not None and newest > number:
            self.missing = {}  # somebody published meanwhile, and a vacuum may have trimmed what the older snapshot names
        return None if self.missing and table.settings.on_failed_partition == "hold" else new

    def _replace_lost(self) -> None:
        """Find the stand-in, if a snapshot is lost.

        Everything that the lost snapshot may have expired counts as expired, because a vacuum may have deleted the files.
        """
        self.table.history.objects.held.forget()
        newest = self.table.history.last_snapshot()
        lost = self.table.history.lost_snapshot(self.table.history.newest_entry())
        if lost is None:
            self.before_lost = self.stand_in = None
            return
        body = newest.body if newest else Snapshot(batch=0, spec_version=0)
        expired = max(body.expired, lost - self.table.settings.keep_snapshots + 1)
        body = msgspec.structs.replace(body, expired=expired)
        self.before_lost = body if newest else None
        self.stand_in = Link(lost, write_id="", parent=None, written_at="", body=body, read_at=clock.elapsed())


def _newest_snapshot(
    table: OpenTable, old: Snapshot | None, newest: int, also: Collection[str], listed: Manifests | None
) -> Snapshot | None:
    """The snapshot of the greatest batch up to ``newest`` that can be shown, or None if that shows what ``old`` does."""
    shown_batch = old.batch if old else 0
    behind = unpublished_up_to(table.history, old, newest)
    rewritten = {p: old.partitions[p].merged for p in also if p in old.partitions} if old else {}
    heads = table.history.heads({**behind, **rewritten}, listed)
    for batch in range(newest, shown_batch - 1, -1):
        if batch > shown_batch and table.history.entries(batch - 1, batch)[0].body.kind == "fence":
            continue  # it brought nothing
        new = _snapshot_at(table, old, batch, heads, rewritten)
        if new is not None:
            return None if old is not None and new.shows(old) else new
    return None


def _snapshot_at(
    table: OpenTable,
    old: Snapshot | None,
    batch: int,
    heads: dict[str, Link[Manifest]],
    rewritten: dict[str, int],
) -> Snapshot | None:
    """The snapshot of one batch, or None if it has to wait for a partition.

    A partition that failed is listed as lagging, or holds the snapshot back if the table says so. A slow one is waited for.

    Args:
        rewritten: partitions that may have a newer version at the `merged` that ``old`` shows, with that `merged`.
    """
    hold = table.settings.on_failed_partition == "hold"
    partitions = dict(old.partitions) if old else {}
    lagging = []
    newer: list[Link[Manifest]] = []
    due = unpublished_up_to(table.history, old, batch)
    for partition, wanted in {**rewritten, **due}.items():
        head = heads.get(partition)
        if old is not None and old.lost(partition, head):  # what is left of its chain must not be shown instead
            if partition in due:
                if hold:
                    return None
                lagging.append(partition)
            continue
        if partition not in due and head is not None and head.body.merged < wanted:
            continue  # readers see later batches in a group, and this version without them would go back
        found = _version_at(table.history.objects, partition, head, wanted)
        if found is None or found.body.merged != wanted:
            failed = head.body.failed if head else None
            if hold or found is None or failed is None or failed.batch > batch:
                return None
            lagging.append(partition)
        refuse_another_entry(table.history, found.body, old)
        newer.append(found)
        partitions[partition] = shown_version(found)
    [entry] = table.history.entries(batch - 1, batch)
    since = table.resources.map_concurrently(lambda link: _since(table.history.objects, link, old), newer)
    for found, (_, added) in zip(newer, since, strict=True):
        name = found.body.partition
        partitions[name] = msgspec.structs.replace(partitions[name], added=added)
    return Snapshot(
        batch=batch,
        spec_version=entry.body.spec_version,
        partitions=dict(sorted(partitions.items())),
        lagging=tuple(sorted(lagging)),
        tags=old.tags if old else {},
        expired=old.expired if old else 0,
        changes=sum((changes for changes, _ in since), NO_CHANGES),
    )


def _since(objects: TableObjects, link: Link[Manifest], old: Snapshot | None) -> tuple[Changes, int]:
    """What the merges since the last restore changed in a partition that ``link`` has and ``old`` does not show; and
    `PartitionVersion.added`."""
    shown = old.partitions.get(link.body.partition) if old else None
    version, merged = (shown.version, shown.merged) if shown else (-1, 0)
    chain = objects.partition(link.body.partition)
    total, added = NO_CHANGES, link.body.added
    while link.body.merged > merged:
        older = chain.get(link.number - 1) if link.number > version + 1 else None
        if older is None or older.body.merged < link.body.merged:  # else it repeats the changes of the older one
            total += link.body.changes
        if older is None or _rows_withdrawn(link.body) > _rows_withdrawn(older.body):
            break
        link, added = older, added if older.body.added == 0 or older.number == version else -1
    return total, added if link.number <= version + 1 else -1


def _rows_withdrawn(manifest: Manifest) -> int:
    return sum(bucket.counters.withdrawn for bucket in manifest.buckets)


def _version_at(
    objects: TableObjects, partition: str, head: Link[Manifest] | None, wanted: int
) -> Link[Manifest] | None:
    """The newest version whose `merged` is at most ``wanted``. Versions beyond it are too new to show."""
    chain = objects.partition(partition)
    while head is not None and head.body.merged > wanted:
        head = head.base if isinstance(head, Preview) else chain.get(head.number - 1)
    return head
