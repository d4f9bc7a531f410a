"""Expire old snapshots, and delete files that nobody can need any more: by lineage and behind fences, never by age alone.

Reads     one listing of the table, the kept snapshots, each partition's head and the versions that are needed
Writes    a snapshot that says which are expired; a fence in the ledger and in the chain of each partition that loses files;
          then it deletes files, data before the versions that name it
Repeat    safe at any point: the next listing finds what is left over

    expire -> survey -> fence -> survey again -> delete
                          '--- a writer that started below it gives up, so no deleted file can be committed later

A file is needed if a kept snapshot shows it, a version that may still be published, or a restore that is not merged. Snapshots
that expired less than `superseded_retention` ago, or that a publisher still shows, are kept for their readers. How a writer gives
up behind a fence: `commit` and `dedupe`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from types import MappingProxyType

import msgspec

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, DamagedTableError, RefusedError
from lakeupsert.operations.kept_snapshots import EntryObjects, KeptGroups, KeptSnapshots, StoredVersion, StoredVersions
from lakeupsert.pipeline.integrity import extend_snapshots
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publishers import Publishers, PublisherStanding
from lakeupsert.pipeline.table_keys import named_index
from lakeupsert.storage import SCRATCH, ObjectInfo
from lakeupsert.table.chain import Link
from lakeupsert.table.group import FEATURE
from lakeupsert.table.layout import GROUPS, HOME, KEYS, PARTITIONS, STATEMENT_ROWS, TableObjects, base_prefix
from lakeupsert.table.ledger import fence_behind
from lakeupsert.table.manifest import DataFile, Manifest
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.work import RewriteOrder

VERSIONS_KEPT = timedelta(days=7)
"""Younger versions are kept: a stalled writer must not take a number that once existed."""
ORPHANS_KEPT = timedelta(hours=1)
"""Younger files that no version ever named are kept: most belong to a running merge, which a fence would undo."""
SKEW = timedelta(hours=1)
"""How far the store's clock may be from ours. Larger: versions of more hours are read for their own times."""
ORPHANED_PACKS_KEPT = timedelta(days=1)
"""The same for files of `append`, which takes a whole night, while a merge takes one partition."""
UNITS_KEPT = timedelta(days=1)
"""Partitions with a more recent unit are left to a later vacuum: a fence would undo hours of work of many workers. The garbage of
an abandoned merge in units is kept as long."""
UNFINISHED_KEPT = timedelta(days=1)
"""Younger incomplete objects are kept: a writer may still complete them."""


@dataclass(frozen=True)
class Garbage:
    """An object that can be deleted, and why.

    ``partition``: the chain that its writer commits to (None: the ledger). ``start``: the head of that chain when the writer
    started, or None if no writer can name the object any more.
    """

    name: str
    bytes: int
    why: str
    partition: str | None
    start: int | None


@dataclass(frozen=True)
class VacuumMemory:
    """All that the next vacuum of this process need not read again."""

    snapshots: KeptSnapshots
    entries: EntryObjects
    groups: KeptGroups
    versions: StoredVersions

    @classmethod
    def of(cls, table: OpenTable) -> "VacuumMemory":
        objects = table.history.objects
        return cls(
            KeptSnapshots(objects.snapshots), EntryObjects(table.history), KeptGroups(objects), StoredVersions(objects)
        )


@dataclass(frozen=True)
class VacuumResult:
    """What was deleted, or with ``dry`` would be. ``expired``: snapshots that readers can't choose from now on."""

    expired: tuple[int, ...]
    garbage: tuple[Garbage, ...]
    dry: bool

    @property
    def bytes(self) -> int:
        return sum(g.bytes for g in self.garbage)


def vacuum(
    table: OpenTable,
    *,
    dry: bool,
    progress: Callable[[str], None] = lambda text: None,
    standings: Mapping[str, PublisherStanding] = MappingProxyType({}),
    memory: VacuumMemory | None = None,
) -> VacuumResult:
    """Keep `keep_snapshots` snapshots and tagged ones, and delete what only others need.

    Args:
        dry: delete nothing.
        standings: of the publishers, if the same command has just let them catch up.
        memory: of the vacuum before. Unless ``dry``.
    """
    memory = memory or VacuumMemory.of(table)
    publishers = Publishers(table, standings)
    table.history.existing_spec()
    table.history.last_snapshot()  # so that a ledger that ends before it is detected
    expired = _expire(table, memory.snapshots, dry=dry)
    if not dry:
        publishers.catch_up()  # one that is behind keeps files, and one that has died can commit nothing behind it
        publishers.mend()
    progress("looking for files that nobody needs")
    survey = _Survey(table, publishers, memory)
    if dry or not survey.garbage:
        return VacuumResult(expired, tuple(survey.garbage), dry)
    progress("fencing off writers that started before")
    fence = max((g.start for g in survey.garbage if g.partition is None and g.start is not None), default=-1)
    snapshot = table.history.last_snapshot()  # the entry names it
    known = snapshot.number if snapshot else None
    table.history.objects.ledger.extend(lambda head: fence_behind(head.body if head else None, fence, known))
    for partition in sorted({g.partition for g in survey.garbage if g.partition is not None}):
        table.history.objects.partition(partition).extend(partial(_fence, partition))
    if FEATURE in table.history.existing_spec().requires:
        # Last, because a leader then reads heads again that have our fences. It names files in snapshots, not in versions.
        extend_snapshots(table.history, lambda head: head.body if head else None)
    table.history.objects.held.forget()
    progress("looking again")
    survey = _Survey(table, publishers, memory)
    garbage = [g for g in survey.garbage if survey.is_fenced(g, fence)]
    progress(f"deleting {len(garbage)} objects")
    versions = [g.name for g in garbage if g.name.endswith(".json")]
    table.resources.store.delete([g.name for g in garbage if not g.name.endswith(".json")])
    # After the data: a version without its files still names garbage; files without their version would hide it.
    table.resources.store.delete(versions)
    return VacuumResult(expired, tuple(garbage), dry)


def _expire(table: OpenTable, kept: KeptSnapshots, *, dry: bool) -> tuple[int, ...]:
    """Append a snapshot that says which are expired; with ``dry`` only plan it."""
    expired: tuple[int, ...] = ()

    def build(head: Link[Snapshot] | None) -> Snapshot | None:
        nonlocal expired  # a lost race builds again
        planned, expired = _plan_expiry(table, kept, head) if head else (None, ())
        if planned and dry:
            kept.add(planned)
        return planned.body if planned and not dry else None

    extend_snapshots(table.history, build)
    return expired


def _plan_expiry(
    table: OpenTable, kept: KeptSnapshots, head: Link[Snapshot]
) -> tuple[Link[Snapshot] | None, tuple[int, ...]]:
    """The next snapshot, and what it expires; None if nothing does."""
    expired: list[int] = []
    oldest, different, last = head.number, 0, b""
    kept.add(head)
    for number in table.history.objects.snapshots.numbers():
        facts = kept.read(number)
        if facts is None or number < head.body.expired:
            break
        # Tags and expiry append snapshots that show the same as the one before; together they count as one.
        different += facts.digest != last
        last = facts.digest
        if different <= table.settings.keep_snapshots:
            oldest = number
        elif number not in head.body.tags.values():
            expired.append(number)
    if not expired:
        return None, ()
    body = msgspec.structs.replace(head.body, expired=oldest)
    planned = replace(head, number=head.number + 1, body=body, written_at=clock.now().isoformat())
    return planned, tuple(sorted(expired))


def _fence(partition: str, head: Link[Manifest] | None) -> Manifest:
    if head is None:
        return Manifest(partition=partition, merged=0, spec_version=0, fence=0)
    return msgspec.structs.replace(head.body, fence=head.number + 1, added=0)


class _Survey:
    """What is there, what is needed, and so what is garbage."""

    def __init__(self, table: OpenTable, publishers: Publishers, memory: VacuumMemory) -> None:
        self._table = table
        self._publishers = publishers
        self._kept, self._entries, self._groups = memory.snapshots, memory.entries, memory.groups
        self._versions = memory.versions
        self._now = clock.now()
        self.garbage: list[Garbage] = []
        newest = self._kept.choose(table.settings.retention, publishers.least_shown())
        ledger = table.history.ledger_head()  # after the snapshots, so that it has everything that they show
        if ledger is None or newest is None:
            return
        self._newest, self._number = newest.body, newest.number
        self._objects: defaultdict[str, dict[str, ObjectInfo]] = defaultdict(dict)  # by folder, then by name
        for found in table.resources.store.list(""):
            self._objects[found.name.rpartition("/")[0]][found.name] = found
        self._versions.begin()
        self._works = self._unfinished_works()
        packs = {name: TableObjects.start_of(name) or 0 for name in self._objects[f"{HOME}/data"]}
        # An entry that names a pack is above its start. Restores below the newest snapshot are merged, unless a partition lags.
        low = min(
            [
                self._newest.batch + 1,
                *packs.values(),
                *(self._newest.partitions[p].merged + 1 for p in self._newest.lagging),
            ]
        )
        self._entries.look(low - 1, ledger.number)
        self._groups.look(self._kept)
        chains = {f.removeprefix(PARTITIONS) for f in self._objects if f.startswith(PARTITIONS)}
        for partition in sorted(
            chains | self._entries.partitions | self._newest.partitions.keys()
        ):  # other folders are not ours
            self._survey_partition(partition)
        self._survey_packs(packs)
        self._survey_keys(ledger.number)
        self._survey_statements(ledger.number)
        self._survey_snapshots()
        self._survey_groups()
        self._survey_signs()
        self._survey_proofs()
        for found in publishers.garbage(self._kept.oldest, self._number):
            if self._is_older(found, ORPHANS_KEPT):
                self._add(found, "of a version of another format that is older than all kept snapshots", None, None)
        for found in table.resources.store.list(f"{SCRATCH}/"):
            if self._is_older(found, UNFINISHED_KEPT):
                self._add(found, "its writer died before it was whole", None, None)

    def is_fenced(self, garbage: Garbage, fence: int) -> bool:
        """Whether its writer can't commit any more. ``fence``: the ledger's."""
        if garbage.start is None:
            return True
        if garbage.partition is None:
            return garbage.start <= fence
        head = self._head(garbage.partition)
        return head is not None and head.body.fence is not None and garbage.start <= head.body.fence

    def _survey_partition(self, partition: str) -> None:
        chain = self._table.history.objects.partition(partition)
        versions = self._numbers(partition)
        last = self._newest.partitions.get(partition)
        folders = (base_prefix(partition).rstrip("/"), f"{HOME}/data/{partition}", f"{HOME}/units/{partition}")
        data = {name: found for folder in folders for name, found in self._objects[folder].items()}
        if last and self._is_whole(partition, versions, last.version, len(data)):
            return
        head = self._head(partition)
        if self._newest.lost(partition, head):  # its files would look like garbage, and a fence would take the number
            shown = self._newest.partitions[partition].version
            raise self._table.history.objects.missing(partition, shown, f"Snapshot {self._number}", lost=True)
        units = self._objects[f"{HOME}/units/{partition}"].values()
        if partition in self._groups.unknown or not all(self._is_older(found, UNITS_KEPT) for found in units):
            return
        merged = head.body.merged if head else 0
        needed = {shown.version for shown in self._kept.shown(partition)}
        needed |= {n for n in versions if last is None or n >= last.version}  # each may be published next
        needed |= {r.versions[partition] for n, r in self._entries.restores(partition) if merged < n}
        named = {name for n in needed & set(versions) for name in self._data(partition, n)}
        named |= self._groups.files.get(partition, set())
        if any(work.source == "landing" and partition in work.partitions for work in self._works):
            named |= {f.name for f in self._adopted(partition)}  # the reprocess starts from them
        stored = {n: self._objects[f"{PARTITIONS}{partition}"][chain.name(n)] for n in versions}
        unnamed = [found for name, found in data.items() if name not in named]
        if unnamed:
            # Readers of `latest` and merges started from the newest version of then, which no snapshot may show.
            for number, successor in pairwise(versions):
                if number in needed or self._is_older(stored[successor], self._table.settings.retention + SKEW):
                    continue
                after = self._version(partition, successor)
                if after and self._now - datetime.fromisoformat(after.link.written_at) < self._table.settings.retention:
                    needed.add(number)
                    named.update(self._data(partition, number))
            unnamed = [found for found in unnamed if found.name not in named]
            superseded = {f.name for f in self._adopted(partition)}
            # A young file may be of a running merge, unless a version, which came after it, has named it.
            young = [found.modified for found in unnamed if not self._is_older(found, ORPHANS_KEPT)]
            for number in set(versions) - needed:
                if young and stored[number].modified >= min(young):
                    superseded.update(self._data(partition, number))
        for found in unnamed:
            start = TableObjects.start_of(found.name)
            if found.name in superseded or (start is not None and self._is_older(found, ORPHANS_KEPT)):
                self._add(found, "no kept snapshot and no newer version needs it", partition, start)
        for number, found in stored.items():
            if number < min(needed, default=0) and self._is_older(found, VERSIONS_KEPT):
                self._add(found, "an old version, and no kept snapshot goes back so far", partition, None)

    def _is_whole(self, partition: str, versions: Sequence[int], shown: int, objects: int) -> bool:
        """Whether nothing can go, by listing and snapshots alone: no version is old, and the needed ones need all ``objects``.

        Snapshots say how many objects a version needs that the one shown before does not. ``versions``: all stored.
        """
        if any(partition in w.partitions for w in self._works) or [*self._entries.restores(partition)]:
            return False
        if partition in self._groups.files or partition in self._groups.unknown:
            return False
        figures = {version.version: version for version in self._kept.shown(partition)}
        chain, listed = self._table.history.objects.partition(partition), self._objects[f"{PARTITIONS}{partition}"]
        first, needed = shown, 0
        for number in sorted((n for n in figures if n < shown), reverse=True):
            if figures[first].added < 0:
                break
            first, needed = number, needed + figures[first].added
        if shown not in versions or needed + figures[first].files != objects:
            return False
        # Older versions: those that are held have files of their own, and others go when they are old.
        older = [n for n in versions if n < first]
        return not any(n in figures or self._is_older(listed[chain.name(n)], VERSIONS_KEPT) for n in older)

    def _numbers(self, partition: str) -> list[int]:
        chain = self._table.history.objects.partition(partition)
        return sorted(map(chain.number, self._objects[f"{PARTITIONS}{partition}"]))

    def _head(self, partition: str) -> Link[Manifest] | None:
        versions = self._numbers(partition)
        head = self._version(partition, versions[-1]) if versions else None
        return head.link if head else None

    def _data(self, partition: str, number: int) -> Sequence[str]:
        """The objects with rows or deletion vectors that a version needs."""
        version = self._version(partition, number)
        return version.objects if version else ()

    def _version(self, partition: str, number: int) -> StoredVersion | None:
        """None: it is not stored."""
        name = self._table.history.objects.partition(partition).name(number)
        return self._versions.look(partition, name) if name in self._objects[f"{PARTITIONS}{partition}"] else None

    def _adopted(self, partition: str) -> Iterable[DataFile]:
        """The adopted files. Of files that others wrote, these are the only ones that belong to the table."""
        touched = self._table.history.entries(-1, 0)[0].body.touched.get(partition)
        return (*touched.files, *touched.tombstones) if touched else ()

    def _unfinished_works(self) -> list[RewriteOrder]:
        """Reprocesses that are neither done nor abandoned; the work objects of others are garbage."""
        unfinished = []
        for name, found in self._objects[f"{HOME}/units"].items():
            work = None
            if not self._is_older(found, VERSIONS_KEPT):
                try:
                    work = self._table.history.work(name)
                except (ConfigurationError, RefusedError, DamagedTableError):
                    continue  # from a later lakeupsert, or damaged: kept until it is old
            heads = [self._table.history.objects.partition(p).head() for p in work.partitions] if work else []
            if work is None or all(head is not None and head.body.reprocessed == name for head in heads):
                self._add(found, "a reprocess that is done, or was abandoned", None, None)
            else:
                unfinished.append(work)
        return unfinished

    def _survey_packs(self, packs: dict[str, int]) -> None:
        rebuilt = [t for work in self._works for p in work.partitions.values() for t in p.batches.values()]
        named = {name for touched in rebuilt for f in touched.files for name in f.objects}
        needed = set(named)
        for number, partition, names in self._entries.of_batches():
            named.update(names)
            if names and self._needs(partition, number):
                needed.update(names)
        done = named - needed
        for name, start in packs.items():
            found = self._objects[f"{HOME}/data"][name]
            if name in done:
                self._add(found, "merged, and every kept snapshot has it", None, None)
            elif name not in named and self._is_older(found, ORPHANED_PACKS_KEPT):
                self._add(found, "its writer did not commit it", None, start)

    def _survey_keys(self, number: int) -> None:
        """Objects of the key index: `append` needs those that the ledger's head names, and reads it again after a lost race."""
        if not self._objects[KEYS]:
            return
        entries = self._table.history.headers(number)
        named = {f.name for e in entries for f in (*e.keys, *(e.index.files if e.index else ()))}
        needed = {f.name for f in index.all} if (index := named_index(entries)) else set()
        rewritten = named - needed
        for name, found in self._objects[KEYS].items():
            if name in rewritten:
                self._add(found, "a part of the key index that was rewritten since", None, None)
            elif name not in named and self._is_older(found, ORPHANED_PACKS_KEPT):
                self._add(found, "its writer did not commit it", None, TableObjects.start_of(name))

    def _survey_statements(self, number: int) -> None:
        """Rows of updates and deletes: those that the ledger names are kept, since no landing file has them."""
        if not self._objects[STATEMENT_ROWS]:
            return
        named = {name for e in self._table.history.headers(number) if e.statement for name in e.statement.objects}
        for name, found in self._objects[STATEMENT_ROWS].items():
            if name not in named and self._is_older(found, ORPHANED_PACKS_KEPT):
                self._add(found, "its writer did not commit it", None, TableObjects.start_of(name))

    def _needs(self, partition: str, batch: int) -> bool:
        """Whether the partition's files of the batch may still be merged."""
        if batch > self._kept.settled:
            return True
        head = self._head(partition)
        if head is None or head.body.merged < batch:
            return True
        if any(head.body.merged < n for n, _ in self._entries.restores(partition)):
            return True
        if any(batch > work.partitions[partition].merged for work in self._works if partition in work.partitions):
            return True
        return self._kept.awaits(partition, batch)

    def _survey_snapshots(self) -> None:
        chain = self._table.history.objects.snapshots
        for name, found in self._objects[f"{HOME}/snapshots"].items():
            if not self._kept.keeps(chain.number(name)) and self._is_older(found, VERSIONS_KEPT):
                self._add(found, "expired", None, None)

    def _survey_groups(self) -> None:
        for name, found in self._objects[GROUPS].items():
            is_over = (TableObjects.start_of(name) or 0) <= self._number  # else its snapshot may still be appended
            if name not in self._groups.names and is_over and self._is_older(found, ORPHANS_KEPT):
                self._add(found, "no kept snapshot names it", None, None)

    def _survey_signs(self) -> None:
        for _, found in sorted(self._objects[f"{HOME}/reading"].items())[1:]:  # the newest comes first
            if self._is_older(found, VERSIONS_KEPT):
                self._add(found, "an earlier run has read landing files", None, None)

    def _survey_proofs(self) -> None:
        headers = self._objects[f"{HOME}/headers"]
        for name in sorted(name for name in headers if name.startswith(TableObjects.ARRIVED))[:-1]:
            if self._is_older(headers[name], VERSIONS_KEPT):
                self._add(headers[name], "a later `reconcile` has proved more", None, None)

    def _is_older(self, found: ObjectInfo, age: timedelta) -> bool:
        return self._now.timestamp() - found.modified > age.total_seconds()

    def _add(self, found: ObjectInfo, why: str, partition: str | None, start: int | None) -> None:
        self.garbage.append(Garbage(found.name, found.size, why, partition, start))
