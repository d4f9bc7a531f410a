"""An open table: its settings, stores, queues and chains, and what was read of them."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import msgspec

from lakeupsert import clock, tracing
from lakeupsert.config import PUBLISHERS, Reading, TableSettings, is_remote, of_table
from lakeupsert.errors import ConfigurationError, DamagedTableError, LakeupsertError, Standing
from lakeupsert.events import Event, Sink
from lakeupsert.landing.table_logs import TableLog, likely_log_above, log_in
from lakeupsert.pipeline.declared import Declaration
from lakeupsert.pipeline.strategy import Strategy
from lakeupsert.publishers import hides_vectors
from lakeupsert.queue import QueueStats, WorkQueue, open_queue
from lakeupsert.storage import (
    LocalStore,
    NotFoundError,
    ObjectReader,
    ObjectStore,
    StoreUnavailableError,
    UnknownOutcomeError,
    open_landing,
    open_store,
)
from lakeupsert.table import metadata
from lakeupsert.table.chain import FORMAT, Link, refuse_newer
from lakeupsert.table.layout import HOME, TableObjects, rebuild_command
from lakeupsert.table.ledger import HEADERS_TOGETHER, Headers, LedgerEntry, without_touched
from lakeupsert.table.manifest import BucketEntry, Manifest
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.work import RewriteOrder, read_order

log = logging.getLogger(__name__)

CONCURRENT_REQUESTS = 16
"""Requests that one process sends at the same time."""
KEPT_ENTRIES = 64
"""How many ledger entries that readers see a worker remembers. More: it grows by about 2 kB for each partition that a batch
touches. Fewer: a partition that lags behind reads them more often."""
KEPT_OBJECTS = 256
"""How many objects `OpenTable.get_once` keeps: results of cuts of some 10 kB, which every unit of a partition reads."""

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass
class OpenTable:
    """One configured table. Versions of a chain are immutable, so specs, ledger entries and heads are read once and kept."""

    name: str
    settings: TableSettings
    origins: Mapping[str, str] = field(default_factory=dict)
    """The environment variables that settings came from, as in `Config.origins`."""
    read_only: bool = False
    """It was opened by its folder (`pipeline.by_folder`), so no configuration says what it must be."""
    sinks: list[Sink] = field(default_factory=lambda: [tracing.record], repr=False)
    """Who takes the events of this table."""
    failing_causes: set[str] = field(default_factory=set, repr=False)
    """Why partitions failed since the last one that did not; each cause is logged once."""
    _entries: dict[int, Link[LedgerEntry]] = field(default_factory=dict, repr=False)
    _specs: dict[int, TableSpec] = field(default_factory=dict, repr=False)
    _headers: list[LedgerEntry] = field(default_factory=list, repr=False)
    _snapshot: Link[Snapshot] | None = field(default=None, repr=False)
    _heads: dict[str, Link[Manifest]] = field(default_factory=dict, repr=False)
    _newest: dict[str, Link[Manifest]] = field(default_factory=dict, repr=False)
    _works: dict[str, RewriteOrder] = field(default_factory=dict, repr=False)
    _immutable: dict[str, bytes] = field(default_factory=dict, repr=False)

    @cached_property
    def objects(self) -> TableObjects:
        return TableObjects(self.store)

    @cached_property
    def declaration(self) -> Declaration:
        return Declaration(self.name, self.settings, self.origins)

    @cached_property
    def reading(self) -> Reading:
        """How landing files are read today, asked after the ledger's head was read. Columns that folders once gave they give for
        good, whoever names them now."""
        head = self._entries.get(max(self._entries, default=-1))
        names = dict.fromkeys(self.declaration.folder_columns)
        if head is not None:
            before = (name for e in self.headers(head.number) if e.reading is not None for name in e.reading.folders)
            spec = self.spec(head.body.spec_version)
            known = {*spec.schema.names, *(one.name for one in spec.renames if one.id in spec.names_by_id)}
            names |= dict.fromkeys(name for name in before if name in known)
        return msgspec.structs.replace(self.settings.reading, folders=tuple(names))

    def strategy_of(self, partition: str) -> Strategy:
        """How merges of a partition write: as configured, or rewrite if some reader would otherwise show superseded rows.

        With `auto`, that is if nothing superseded is kept, since readers then list folders. With a Delta log, it is if the
        folder's name has a character that URLs escape, since Polars finds no deletion vector of a file there. Readers of Hive's
        and Glue's tables know no deletion vectors.
        """
        by_folder = not self.settings.retention and self.settings.strategy == "auto"
        kinds = [PUBLISHERS[name] for name in self.settings.publishers]
        by_reader = any(kind.plain_files or (kind.plain_folders and hides_vectors(partition)) for kind in kinds)
        return "rewrite" if by_folder or by_reader else self.settings.strategy

    @cached_property
    def store(self) -> ObjectStore:
        return open_store(self.settings.processed)

    @cached_property
    def landing(self) -> ObjectReader:
        return open_landing(self.settings.landing)

    @cached_property
    def landing_log(self) -> TableLog | None:
        """The log of a table of another format in the landing zone or above it; None also if the zone can't be listed."""
        with suppress(LakeupsertError, OSError):
            return log_in(self.landing) or likely_log_above(self.settings.landing)
        return None

    @cached_property
    def queue(self) -> WorkQueue:
        if self.settings.queue != "auto":
            return open_queue(self.settings.queue)
        processed = open_store(self.settings.processed)
        if isinstance(processed, LocalStore):
            return open_queue(str(Path(processed.root) / HOME / "queue.sqlite"))
        raise ConfigurationError(
            "no-queue",
            f"Table {self.name!r} is remote and its configuration names no queue.",
            next=f"set `queue` in [tables.{self.name}]",
        )

    @cached_property
    def large_queue(self) -> WorkQueue | None:
        """The queue that workers of `queue` pass large partitions on to; None: they merge all partitions."""
        return open_queue(self.settings.large.queue) if self.settings.large else None

    @property
    def queues(self) -> list[WorkQueue]:
        return [self.queue, *([self.large_queue] if self.large_queue else [])]

    def queue_stats(self) -> QueueStats:
        """The sums over all queues."""
        found = [queue.stats() for queue in self.queues]
        return QueueStats(sum(x.visible for x in found), sum(x.leased for x in found), sum(x.dead for x in found))

    def at_large_queue(self) -> "OpenTable":
        """The same table for the workers of its large partitions: they receive from `large_queue` and pass nothing on."""
        _ = self.objects  # one store, which counts the requests of both
        other = copy(self)
        if self.large_queue is not None:
            other.queue, other.large_queue = self.large_queue, None
        return other

    def head_spec(self) -> Link[TableSpec] | None:
        """The newest spec; None if the table does not exist yet. Raises ConfigurationError if it is the spec of another table."""
        head = self.objects.specs.head()
        known = self._entries.get(max(self._entries, default=-1))
        if known is not None and known.body.spec_version > (head.number if head else -1):
            raise self._lost_spec(known.body.spec_version, f"Ledger entry {known.number}")
        if head is not None:
            if not self.read_only:
                self.declaration.refuse_other(head.body)
            self._specs[head.number] = head.body
        return head

    def _lost_spec(self, version: int, named_by: str) -> DamagedTableError:
        return DamagedTableError(
            "missing-version",
            f"{named_by} was written under version {version} of the spec, which is missing: "
            f"{self.store.uri(self.objects.specs.name(version))}. Something other than lakeupsert deleted it.",
            next=metadata.FROM_BACKUP,
        )

    def spec(self, version: int) -> TableSpec:
        if version not in self._specs:
            self._specs.update({link.number: link.body for link in self.objects.specs.between(version - 1, version)})
        return self._specs[version]

    def existing_spec(self) -> TableSpec:
        """The newest spec. Raises the error of `no_table_yet` if there is none."""
        head = self.head_spec()
        if head is None:
            raise self.no_table_yet()
        return head.body

    def no_table_yet(self) -> LakeupsertError:
        """The error if no spec is found: nothing was ever appended, or the spec was lost and the ledger is still there."""
        if self.objects.ledger.newest_number() is not None:
            return self._lost_spec(0, "The ledger")
        return ConfigurationError(
            "no-table-yet",
            f"Table {self.name!r} does not exist yet: nothing was ever appended to {self.settings.processed}.",
            next="put files into the landing zone and run `lakeupsert run`",
        )

    def entry(self, number: int) -> Link[LedgerEntry] | None:
        """One ledger entry; None if the ledger has no entry of that number."""
        if number not in self._entries:
            found = self.objects.ledger.get(number)
            if found is None:
                return None
            self._entries[number] = found
        return self._entries[number]

    def refuse_another_entry(self, manifest: Manifest, snapshot: Snapshot | None) -> None:
        """Raises DamagedTableError if the ledger entry that ``manifest`` merged last is missing or was replaced by another one,
        whose batch would count as merged here.

        A version that ``snapshot`` shows was checked when it was published; it is not checked again.
        """
        shown = snapshot.partitions.get(manifest.partition) if snapshot else None
        if manifest.entry is None or (shown is not None and shown.merged >= manifest.merged):
            return
        link = self.entry(manifest.merged)
        if link is not None and link.write_id == manifest.entry:
            return
        rebuild, again = f"`{rebuild_command(manifest.partition)}`", "which takes the landing files of that entry again"
        repair = (
            f"run `lakeupsert append`, {again}, then {rebuild}, then `lakeupsert run`"
            if link is None
            else f"run {rebuild}, then `lakeupsert run`, {again}"
        )
        raise DamagedTableError(
            "missing-version",
            f"{manifest.partition} has merged ledger entry {manifest.merged}, which "
            f"{'is missing' if link is None else 'was replaced by another one of the same number'}: "
            f"{self.store.uri(self.objects.ledger.name(manifest.merged))}. Something other than lakeupsert deleted "
            "it. The partition was not changed.",
            next=f"{metadata.FROM_BACKUP}; without one, {repair}. Other partitions may have merged it too: `lakeupsert "
            "reconcile` names each partition that does not balance",
            partition=manifest.partition,
        )

    def entries(self, low: int, high: int) -> list[Link[LedgerEntry]]:
        """Ledger entries with low < number <= high, in ascending order."""
        for number in range(low + 1, high + 1):
            if number not in self._entries:
                self._entries.update({link.number: link for link in self.objects.ledger.between(number - 1, number)})
        return [self._entries[number] for number in range(low + 1, high + 1)]

    def forget_published(self) -> None:
        """Drop ledger entries that the last snapshot shows, if there are many: a worker may live for months. An entry that is
        needed again is read again. No other thread may use the table meanwhile."""
        shown = self._snapshot.body.batch if self._snapshot else 0
        old = [number for number in self._entries if number < min(shown, max(self._entries))]
        if len(old) > KEPT_ENTRIES:
            for number in old:
                del self._entries[number]

    def ledger_head(self) -> Link[LedgerEntry] | None:
        """The newest ledger entry; None if the table does not exist yet.

        Raises DamagedTableError as `newest_entry` does, and if the snapshot that the entry's writer saw is missing: the next
        publish would show readers the snapshot before it.
        """
        head = self.newest_entry()
        lost = self.lost_snapshot(head)
        if head is not None and lost is not None:
            raise self.objects.missing_snapshot(lost, head.number, self._snapshot.number if self._snapshot else None)
        return head

    def lost_snapshot(self, head: Link[LedgerEntry] | None) -> int | None:
        """The number of the snapshot that the writer of ``head`` saw, if that snapshot is missing; else None."""
        known = head.body.snapshot if head is not None else None
        if known is None or (self._snapshot is not None and self._snapshot.number >= known):
            return None
        newest = self.last_snapshot()  # somebody may have published between the two reads
        return known if newest is None or newest.number < known else None

    def newest_entry(self, snapshot: Link[Snapshot] | None = None) -> Link[LedgerEntry] | None:
        """The newest ledger entry; None if the table does not exist yet.

        Raises DamagedTableError if ``snapshot`` (None: the one read last) shows a later entry. The next append would take the
        number of a lost entry, and no worker would merge that batch.
        """
        head = self.objects.ledger.head(self._entries.get(max(self._entries, default=-1)))
        snapshot = snapshot or self._snapshot
        shown = snapshot.body.batch if snapshot else -1
        if shown > (head.number if head else -1):
            raise DamagedTableError(
                "missing-version",
                f"Readers see batch {shown}, and the ledger entry of that batch is missing: "
                f"{self.store.uri(self.objects.ledger.name(shown))}. Something other than lakeupsert deleted it.",
                next="restore that object from a backup or from the bucket's own versions; without one, `lakeupsert export "
                "--output FOLDER/` still writes what readers see, for `lakeupsert adopt` of a new table",
            )
        if head is not None:
            self._entries[head.number] = head
        return head

    def headers(self, high: int, *, write: bool = False) -> list[LedgerEntry]:
        """Entries 0 to ``high`` without the partitions that they touched, at one GET for every 64.

        ``write``: write the objects that hold 64 entries each if they are missing.
        """
        while len(self._headers) <= high:
            first = len(self._headers)
            last = first + HEADERS_TOGETHER - 1
            if last > high:
                return self._headers + [without_touched(link.body) for link in self.entries(first - 1, high)]
            name = TableObjects.ledger_headers(first)
            try:
                found = metadata.decode(
                    self.store.get(name),
                    Headers,
                    partial(self.store.uri, name),
                    f"the headers of ledger entries {first} to {last}",
                    next="delete that object: it only repeats what the ledger says, and the next append writes it again",
                )
                refuse_newer(self.store.uri(name), found.format)
            except NotFoundError:
                entries = tuple(without_touched(link.body) for link in self.entries(first - 1, last))
                found = Headers(format=FORMAT, first=first, entries=entries)
                if write:
                    with suppress(UnknownOutcomeError):  # the next append finds it or writes it
                        self.store.create(name, metadata.encode(found))
            self._headers += found.entries
        return self._headers[: high + 1]

    def extend_snapshots(self, build: Callable[[Link[Snapshot] | None], Snapshot | None]) -> Link[Snapshot] | None:
        """As `Chain.extend`; raises DamagedTableError if the newest snapshot is missing, since its number would be taken."""
        self.last_snapshot()
        self.ledger_head()
        return self.objects.snapshots.extend(build)

    def last_snapshot(self) -> Link[Snapshot] | None:
        self._snapshot = self.objects.snapshots.head(self._snapshot)
        return self._snapshot

    @property
    def known_snapshot(self) -> Link[Snapshot] | None:
        """The snapshot that was read last, without a request; None if there was none."""
        return self._snapshot

    def heads(self, partitions: Iterable[str]) -> dict[str, Link[Manifest]]:
        """The newest version of each partition that has one. Versions that the last call returned are not read again."""
        partitions = list(partitions)
        found = self.map_concurrently(lambda p: self.objects.partition(p).head(self._heads.get(p)), partitions)
        heads = {p: head for p, head in zip(partitions, found, strict=True) if head is not None}
        self._heads = heads
        return heads  # not `self._heads`, which another thread may have replaced

    def newest(
        self,
        partition: str,
        snapshot: Link[Snapshot] | None,
        *,
        from_landing: bool = False,
        up_to: int | None = None,
    ) -> Link[Manifest] | None:
        """The newest version of a partition; None if there is none yet.

        Raises DamagedTableError if ``snapshot``, read before, shows a version that is missing: a version appended behind the
        remaining ones would lose its rows silently. Two callers need nothing of the missing version and get a stand-in to
        append behind, so that their version takes its place: a rebuild ``from_landing``, and a merge ``up_to`` a batch
        behind a restore, which begins from the version that the restore names.
        """
        head = self.objects.partition(partition).head(self._newest.get(partition))
        if head is not None:
            _keep(self._newest, partition, head, CONCURRENT_REQUESTS)
        if snapshot is None or not snapshot.body.lost(partition, head):
            return head
        shown = snapshot.body.partitions[partition]
        restored = up_to is not None and any(
            link.body.restored is not None and partition in link.body.touched
            for link in self.entries(shown.merged, up_to)
        )
        if not from_landing and not restored:
            raise self.objects.missing(partition, shown.version, f"Snapshot {snapshot.number}", lost=True)
        body = head.body if head else Manifest(partition=partition, merged=0, spec_version=0)
        return Link(
            number=max(shown.version - 1, head.number if head else -1),
            write_id=head.write_id if head else "",
            parent=None,
            written_at="",
            body=msgspec.structs.replace(body, merged=shown.merged, entry=None, buckets=(BucketEntry(id=""),)),
            read_at=clock.elapsed(),
        )

    def unpublished(self, snapshot: Snapshot | None, up_to: int) -> dict[str, int]:
        """Partitions that ``snapshot`` does not show at their last batch <= ``up_to``, each with that batch."""
        touched = _last_touches(self.entries(snapshot.batch if snapshot else -1, up_to))
        if snapshot is not None:
            for partition in snapshot.lagging:
                since = self.entries(snapshot.partitions[partition].merged, snapshot.batch)
                touched.setdefault(partition, _last_touches(since)[partition])
        return touched

    def is_through(self) -> bool:
        """Whether there is something to publish and every unpublished partition is merged or marked failed.

        It reads the partition whose message was sent last first, then `CONCURRENT_REQUESTS` at a time, and stops at the first
        one that is still to be merged: as long as much is left, that takes few requests.
        """
        snapshot, last = self.last_snapshot(), self.ledger_head()
        behind = self.unpublished(snapshot.body if snapshot else None, last.number) if last else {}

        def is_done(due: tuple[str, int]) -> bool:
            partition, batch = due
            head = self.objects.partition(partition).head()
            return head is not None and (head.body.merged >= batch or head.body.failed is not None)

        waiting, count = list(behind.items()), 1
        while waiting:
            if not all(self.map_concurrently(is_done, [waiting.pop() for _ in range(min(count, len(waiting)))])):
                return False
            count = CONCURRENT_REQUESTS
        return bool(behind)

    def merged(self, partition: str, batch: int) -> bool:
        """Whether the partition's newest version includes ``batch``."""
        head = self.objects.partition(partition).head()
        return head is not None and head.body.merged >= batch

    def version(self, partition: str, number: int) -> Manifest:
        """One version of a partition; -1 is the empty one before the first."""
        if number < 0:
            return Manifest(partition=partition, merged=0, spec_version=0)
        known = self._heads.get(partition)
        found = known if known and known.number == number else self.objects.partition(partition).get(number)
        if found is None:
            head = self.objects.partition(partition).head()
            lost = head is None or head.number < number
            raise self.objects.missing(partition, number, "A snapshot or a restore", lost=lost)
        return found.body

    def get_once(self, name: str) -> bytes:
        """An object that never changes. The last ones are kept for those who ask again. Raises NotFoundError."""
        if name not in self._immutable:
            _keep(self._immutable, name, self.store.get(name), KEPT_OBJECTS)
        return self._immutable[name]

    def missing_manifests(self, snapshots: Mapping[int, Snapshot]) -> dict[str, DamagedTableError]:
        """The partitions of which one of these snapshots names a manifest that is missing, with the error for it.

        One LIST for every 1,000 manifests that are stored. One that the listing lacks is asked for before it counts as missing:
        listings of network file systems may be old.
        """
        wanted: dict[str, tuple[int, str, int]] = {}
        for number, snapshot in sorted(snapshots.items()):
            for partition, shown in snapshot.partitions.items():
                name = self.objects.partition(partition).name(shown.version)
                wanted[name] = number, partition, shown.version
        for info in self.store.list(f"{HOME}/partitions/"):
            wanted.pop(info.name, None)
        absent = [(name, *one) for name, one in wanted.items() if self.store.head(name) is None]
        return {
            partition: self.objects.missing(partition, version, f"Snapshot {number}", lost=number == max(snapshots))
            for _, number, partition, version in absent
        }

    def work(self, name: str) -> RewriteOrder:
        if name not in self._works:
            self._works[name] = read_order(self.store, name)
        return self._works[name]

    def failed(self, partitions: Iterable[str], snapshot: Link[Snapshot] | None) -> dict[str, str]:
        """The partitions that are marked failed, or of which ``snapshot`` shows a version that is missing, with the reason."""
        found = {}
        for partition in partitions:
            try:
                head = self.newest(partition, snapshot)
            except DamagedTableError as e:
                found[partition] = str(e)
            else:
                if head is not None and head.body.failed is not None:
                    found[partition] = head.body.failed.reason
        return found

    def tries(self) -> tuple[int, int]:
        """How often this object tried to append to the ledger and to the snapshots; `account` counts from there."""
        if "objects" not in self.__dict__:  # the store is not open yet, and opening it may fail
            return 0, 0
        return self.objects.ledger.tries(), self.objects.snapshots.tries()

    def account(self, error: LakeupsertError, since: tuple[int, int] = (0, 0), *, named: bool = False) -> None:
        """Write the table's standing into the error: what was committed ``since`` then, and what readers see.

        ``since`` are earlier `tries`; ``named``: the standing names the table. What can't be read is left out, since the error
        itself matters more.
        """
        error.message, error.next = of_table(error.message, self.name), of_table(error.next, self.name)
        committed: int | None = None
        seen = self._snapshot
        certain, published = True, False
        if "objects" in self.__dict__:
            if not isinstance(error, StoreUnavailableError):  # else it would wait for the store again
                with suppress(Exception):
                    seen = self.last_snapshot()
            try:
                entries, certain = self.objects.ledger.find_appended(since[0])
                committed = max(filter(self._is_batch, entries), default=None)
                snapshots, _ = self.objects.snapshots.find_appended(since[1])
                published = bool(snapshots)
                error.data_changed |= any(map(self._changes, snapshots))
            except Exception:
                certain = False
        error.standing = Standing(
            committed=committed,
            readers_see=seen.number if seen else None,
            certain=certain,
            table=self.name if named else None,
            published=published,
        )

    def _is_batch(self, number: int) -> bool:
        """Whether a ledger entry brought anything. A fence did not; entry 0 did if it adopted files."""
        link = self.entry(number)
        return link is not None and link.body.kind != "fence" and (number > 0 or bool(link.body.touched))

    def _changes(self, number: int) -> bool:
        """Whether this snapshot shows readers something else than the one before."""
        now, before = (self.objects.snapshots.get(n) if n >= 0 else None for n in (number, number - 1))
        return now is not None and (before is None or not now.body.shows(before.body))

    def discard(self, names: Iterable[str]) -> None:
        """Delete files that no version names and none will. What can't be deleted is left to `vacuum`."""
        try:
            if listed := [*names]:
                self.store.delete(listed)
        except LakeupsertError as e:
            log.warning("files that no version names are kept until the next vacuum: %s", e.message)

    def map_concurrently(self, call: Callable[[Item], Found], items: Collection[Item]) -> list[Found]:
        """The results of ``call`` for each item, in their order. For requests to the store, which mostly wait.

        Local files are read one after the other: 365 commits took 2.0 s in turn and 2.6 s in threads.
        """
        if len(items) <= 1 or not is_remote(self.settings.processed):
            return [call(item) for item in items]
        with ThreadPoolExecutor(min(CONCURRENT_REQUESTS, len(items))) as pool:
            # In the caller's context, so that spans of what the threads do are below the caller's span.
            contexts = [copy_context() for _ in items]
            return list(pool.map(lambda context, item: context.run(call, item), contexts, items))

    def emit(self, event: Event) -> None:
        """Give an event to every sink. A sink that fails must not turn a commit into an error, so that is a warning."""
        for sink in self.sinks:
            try:
                sink(event)
            except Exception as e:
                log.warning("an event of table %s was lost: %r", self.name, e)

    def close(self) -> None:
        for queue in (self.__dict__.get("queue"), self.__dict__.get("large_queue")):
            if queue is not None:
                queue.close()


def _keep(known: dict[str, Found], name: str, value: Found, most: int) -> None:
    """Add to a dict the ``most`` newest entries of which stay."""
    known.pop(name, None)
    known[name] = value
    for oldest in list(known)[:-most]:
        known.pop(oldest, None)  # another thread may have been faster


def _last_touches(links: Iterable[Link[LedgerEntry]]) -> dict[str, int]:
    """For each partition the last of these batches that touches it; ``links`` in ascending order."""
    return {partition: link.number for link in links for partition in link.body.touched}
