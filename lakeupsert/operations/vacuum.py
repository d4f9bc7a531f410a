"""Expire old snapshots, and delete what nobody can need any more: by lineage and behind fences, never by age alone.

Reads     one listing of the table, the kept snapshots, each partition's head and the versions that are needed
Writes    a snapshot that says which are expired; a fence in the ledger and in each partition's chain where files go; then
          it deletes, data before the versions that name them
Repeat    safe at any point: what is left over is found by the next listing

    expire -> look -> fence -> look again -> delete
                        '--- a writer that began below it gives up, so no file that is deleted can be committed later

A file is needed where a kept snapshot shows it, or a version that may still be published, or a restore that is not merged.
Snapshots that expired less than `superseded_retention` ago are kept for who reads them now.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise

import msgspec

from lakeupsert import clock
from lakeupsert.errors import DamagedTableError, RefusedError
from lakeupsert.pipeline.key_places import named_index
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.storage import SCRATCH, ObjectInfo
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import HOME, KEYS, TableObjects
from lakeupsert.table.ledger import LedgerEntry, Restored, next_stamp
from lakeupsert.table.manifest import DataFile, Manifest
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.work import Work

VERSIONS_KEPT = timedelta(days=7)
"""Versions younger than this stay: a writer that stalled must not take a number that once existed."""
ORPHANS_KEPT = timedelta(hours=1)
"""Files that no version ever named are not looked at before: most are those of a merge at work, which a fence would undo."""
ORPHANED_PACKS_KEPT = timedelta(days=1)
"""The same for those of `append`, which works on a whole night, where a merge works on a partition."""
UNITS_KEPT = timedelta(days=1)
"""A partition where workers finished a unit more recently waits for a later vacuum: a fence would undo hours of many. A merge
in units that nobody goes on with keeps its garbage so long."""
UNFINISHED_KEPT = timedelta(days=1)
"""Objects that are not whole yet get no name later than that."""
_CHAINS = f"{HOME}/partitions/"


@dataclass(frozen=True)
class Garbage:
    """An object that may go, and why.

    ``partition`` is whose chain its writer commits to (None: the ledger); ``start`` how long that was when the writer
    began, or None where no writer can name it any more.
    """

    name: str
    bytes: int
    why: str
    partition: str | None
    start: int | None


@dataclass(frozen=True)
class Vacuumed:
    """What was deleted, or with ``dry`` would be; ``expired`` are snapshots that readers can't choose from now on."""

    expired: tuple[int, ...]
    garbage: tuple[Garbage, ...]
    dry: bool

    @property
    def bytes(self) -> int:
        return sum(g.bytes for g in self.garbage)


def vacuum(table: OpenTable, *, dry: bool, progress: Callable[[str], None] = lambda text: None) -> Vacuumed:
    """Keep `keep_snapshots` snapshots and those with a tag, and delete what only others need; ``dry`` only tells what."""
    table.existing_spec()
    table.last_snapshot()  # a ledger that ends before what it shows is found by it
    expired, newest = _expire(table, dry)
    progress("looking for what nobody needs")
    look = _Look(table, newest)
    if dry or not look.garbage:
        return Vacuumed(expired, tuple(look.garbage), dry)
    progress("fencing off writers that began before")
    fence = max((g.start for g in look.garbage if g.partition is None and g.start is not None), default=-1)
    snapshot = table.last_snapshot()  # which the ledger then knows
    known = snapshot.number if snapshot else None
    table.objects.ledger.extend(lambda head: _ledger_fence(head, fence, known))
    for partition in sorted({g.partition for g in look.garbage if g.partition is not None}):
        table.objects.partition(partition).extend(lambda head, p=partition: _fence(p, head))  # type: ignore[misc]
    progress("looking again")
    look = _Look(table, before=look)
    garbage = [g for g in look.garbage if look.fenced(g, fence)]
    progress(f"deleting {len(garbage)} objects")
    versions = [g.name for g in garbage if g.name.endswith(".json")]
    table.store.delete([g.name for g in garbage if not g.name.endswith(".json")])
    # After the data: a version whose files are gone names garbage, files without one hide it.
    table.store.delete(versions)
    return Vacuumed(expired, tuple(garbage), dry)


def _expire(table: OpenTable, dry: bool) -> tuple[tuple[int, ...], Link[Snapshot] | None]:
    """Say in the newest snapshot which are expired: their numbers, and with ``dry`` what that snapshot would be."""
    gone: list[int] = []
    planned: Link[Snapshot] | None = None

    def build(head: Link[Snapshot] | None) -> Snapshot | None:
        nonlocal planned
        gone.clear()
        if head is None:
            return None
        oldest, kept, last = head.number, 0, None
        for number in table.objects.snapshots.numbers():
            link = head if number == head.number else table.objects.snapshots.get(number)
            if link is None or number < head.body.expired:
                break
            # Tags and expiry make snapshots that show what the one before did; together they count as one.
            kept += last is None or not link.body.shows(last)
            last = link.body
            if kept <= table.settings.keep_snapshots:
                oldest = number
            elif number not in head.body.tags.values():
                gone.append(number)
        body = msgspec.structs.replace(head.body, expired=oldest)
        if gone and dry:
            planned = replace(head, number=head.number + 1, body=body, written_at=clock.now().isoformat())
        return body if gone and not dry else None

    table.extend_snapshots(build)
    return tuple(sorted(gone)), planned


def _ledger_fence(head: Link[LedgerEntry] | None, fence: int, snapshot: int | None) -> LedgerEntry:
    assert head is not None, "there is a spec that somebody published under"
    return LedgerEntry(
        kind="fence",
        batch_id=clock.new_id(),
        received_at=next_stamp(head.body),
        spec_version=head.body.spec_version,
        fence=fence,
        snapshot=snapshot,
    )


def _fence(partition: str, head: Link[Manifest] | None) -> Manifest:
    if head is None:
        return Manifest(partition=partition, merged=0, spec_version=0, fence=0)
    return msgspec.structs.replace(head.body, fence=head.number + 1)


class _Look:
    """One look at the table: what is there, what is needed, and so what is garbage.

    ``planned`` is a snapshot that is looked at as if it were there. What the look ``before`` has read of the chains, which
    is immutable, is not read again.
    """

    def __init__(self, table: OpenTable, planned: Link[Snapshot] | None = None, before: "_Look | None" = None) -> None:
        self._table = table
        self._versions: dict[tuple[str, int], Link[Manifest] | None] = before._versions if before else {}
        self._now = clock.now()
        self.garbage: list[Garbage] = []
        chain = table.objects.snapshots
        known: dict[int, Link[Snapshot]] = before._snapshots if before else {}
        links = {n: known.get(n) or chain.get(n) for n in chain.numbers()}
        self._snapshots: dict[int, Link[Snapshot]] = {n: link for n, link in links.items() if link is not None}
        if planned is not None:
            self._snapshots[planned.number] = planned
        ledger = table.ledger_head()  # after the snapshots, so that it has whatever they show
        if ledger is None or not self._snapshots:
            return
        self._hold()
        self._objects: defaultdict[str, dict[str, ObjectInfo]] = defaultdict(dict)  # by folder and name
        for found in table.store.list(""):
            self._objects[found.name.rpartition("/")[0]][found.name] = found
        self._works = self._look_at_works()
        packs = {name: TableObjects.start_of(name) or 0 for name in self._objects[f"{HOME}/data"]}
        # An entry that names a pack comes after its start. Restores below the newest snapshot are merged where none lags.
        low = min(
            [
                self._newest.batch + 1,
                *packs.values(),
                *(self._newest.partitions[p].merged + 1 for p in self._newest.lagging),
            ]
        )
        self._entries = table.entries(low - 1, ledger.number)
        chains = {f.removeprefix(_CHAINS) for f in self._objects if f.startswith(_CHAINS)}
        touched = {partition for link in self._entries for partition in link.body.touched}
        for partition in sorted(chains | touched | self._newest.partitions.keys()):  # other folders are somebody else's
            self._look_at_partition(partition)
        self._look_at_packs(packs)
        self._look_at_keys(ledger.number)
        self._look_at_snapshots()
        for found in table.store.list(f"{SCRATCH}/"):
            if self._is_older(found, UNFINISHED_KEPT):
                self._add(found, "its writer died before it was whole", None, None)

    def fenced(self, garbage: Garbage, fence: int) -> bool:
        """Whether its writer can't commit any more, ``fence`` being the ledger's."""
        if garbage.start is None:
            return True
        if garbage.partition is None:
            return garbage.start <= fence
        head = self._head(garbage.partition)
        return head is not None and head.body.fence is not None and garbage.start <= head.body.fence

    def _hold(self) -> None:
        """Which snapshots somebody may read, also those that expired only now."""
        newest = max(self._snapshots)
        self._newest: Snapshot = self._snapshots[newest].body
        since = max(
            (n for n, s in self._snapshots.items() if self._age(s.written_at) >= self._table.settings.retention),
            default=None,
        )
        recent = [s.body for n, s in self._snapshots.items() if since is None or n >= since]
        expired = 0 if since is None else self._snapshots[since].body.expired
        tagged = {number for s in recent for number in s.tags.values()}
        self._held = {n: s.body for n, s in self._snapshots.items() if n >= expired or n in tagged}
        self._covered = -1 if since is None else self._snapshots[since].body.batch

    def _age(self, written_at: str) -> timedelta:
        return self._now - datetime.fromisoformat(written_at)

    def _look_at_partition(self, partition: str) -> None:
        chain = self._table.objects.partition(partition)
        versions = self._numbers(partition)
        last = self._newest.partitions.get(partition)
        folders = (partition, f"{HOME}/data/{partition}", f"{HOME}/units/{partition}")
        data = {name: found for folder in folders for name, found in self._objects[folder].items()}
        # Most partitions of an old table: no older version, and no file but those that the newest snapshot shows.
        if last and versions[:1] == [last.version] and len(data) == last.files:
            return
        head = self._head(partition)
        if self._newest.lost(partition, head):  # its files look like garbage, and a fence would take the number
            shown = self._newest.partitions[partition].version
            raise self._table.objects.missing(partition, shown, f"Snapshot {max(self._snapshots)}", lost=True)
        if not all(self._is_older(found, UNITS_KEPT) for found in self._objects[f"{HOME}/units/{partition}"].values()):
            return
        merged = head.body.merged if head else 0
        needed = {s.partitions[partition].version for s in self._held.values() if partition in s.partitions}
        needed |= {n for n in versions if last is None or n >= last.version}  # any of them may be published next
        needed |= {r.versions[partition] for n, r in self._restores(partition) if merged < n}
        named = {name for n in needed & set(versions) for name in self._data(partition, n)}
        if any(work.source == "landing" and partition in work.partitions for work in self._works):
            named |= {f.name for f in self._adopted(partition)}  # it begins from them
        unnamed = [found for name, found in data.items() if name not in named]
        if unnamed:
            # Who reads `latest`, or merges, began from a version that was the newest then, also where no snapshot shows it.
            for number, successor in pairwise(versions):
                after = self._version(partition, successor)
                if number not in needed and after and self._age(after.written_at) < self._table.settings.retention:
                    needed.add(number)
                    named |= self._data(partition, number)
            unnamed = [found for found in unnamed if found.name not in named]
            superseded = {name for n in set(versions) - needed for name in self._data(partition, n)}
            superseded |= {f.name for f in self._adopted(partition)}
        for found in unnamed:
            start = TableObjects.start_of(found.name)
            if found.name in superseded:
                self._add(found, "superseded, and no kept snapshot shows it", partition, start)
            elif start is not None and self._is_older(found, ORPHANS_KEPT):
                self._add(found, "its writer did not commit it", partition, start)
        for number in versions:
            link = self._version(partition, number) if number < min(needed, default=0) else None
            if link is not None and self._age(link.written_at) > VERSIONS_KEPT:
                name = chain.name(number)
                found = self._objects[f"{_CHAINS}{partition}"][name]
                self._add(found, "an old version, and no kept snapshot goes back so far", partition, None)

    def _numbers(self, partition: str) -> list[int]:
        return sorted(map(self._table.objects.partition(partition).number, self._objects[f"{_CHAINS}{partition}"]))

    def _head(self, partition: str) -> Link[Manifest] | None:
        versions = self._numbers(partition)
        return self._version(partition, versions[-1]) if versions else None

    def _restores(self, partition: str) -> Iterable[tuple[int, Restored]]:
        for link in self._entries:
            if link.body.restored is not None and partition in link.body.touched:
                yield link.number, link.body.restored

    def _data(self, partition: str, number: int) -> set[str]:
        """Objects with rows or vectors that a version needs."""
        link = self._version(partition, number) if number >= 0 else None
        return {name for bucket in (link.body.buckets if link else ()) for name in bucket.objects}

    def _version(self, partition: str, number: int) -> Link[Manifest] | None:
        """None where another vacuum has trimmed it since it was listed."""
        if (partition, number) not in self._versions:
            self._versions[partition, number] = self._table.objects.partition(partition).get(number)
        return self._versions[partition, number]

    def _adopted(self, partition: str) -> Iterable[DataFile]:
        """Files that others wrote: only those that the table adopted are its to delete."""
        touched = self._table.entries(-1, 0)[0].body.touched.get(partition)
        return touched.files if touched else ()

    def _look_at_works(self) -> list[Work]:
        """Reprocesses that are neither done nor given up; the others are garbage."""
        unfinished = []
        for name, found in self._objects[f"{HOME}/units"].items():
            work = None
            if not self._is_older(found, VERSIONS_KEPT):
                try:
                    work = self._table.work(name)
                except (RefusedError, DamagedTableError):
                    continue  # of a later version, or damaged: kept until it is old
            heads = [self._table.objects.partition(p).head() for p in work.partitions] if work else []
            if work is None or all(head is not None and head.body.reprocessed == name for head in heads):
                self._add(found, "a reprocess that is done, or was given up", None, None)
            else:
                unfinished.append(work)
        return unfinished

    def _look_at_packs(self, packs: dict[str, int]) -> None:
        rebuilt = [t for work in self._works for p in work.partitions.values() for t in p.batches.values()]
        named = {name for touched in rebuilt for f in touched.files for name in f.objects}
        needed = set(named)
        for link in self._entries:
            for partition, touched in link.body.touched.items():
                names = {name for f in touched.files for name in f.objects}
                named |= names
                if names and self._needs(partition, link.number):
                    needed |= names
        for name, start in packs.items():
            found = self._objects[f"{HOME}/data"][name]
            if name in named - needed:
                self._add(found, "merged, and every kept snapshot has it", None, None)
            elif name not in named and self._is_older(found, ORPHANED_PACKS_KEPT):
                self._add(found, "its writer did not commit it", None, start)

    def _look_at_keys(self, number: int) -> None:
        """Objects of the key index: who appends needs those of the ledger's head, and who loses that place looks again."""
        if not self._objects[KEYS]:
            return
        entries = self._table.headers(number)
        named = {f.name for e in entries for f in (*e.keys, *(e.index.files if e.index else ()))}
        needed = {f.name for files in named_index(entries) or () for f in files}
        for name, found in self._objects[KEYS].items():
            if name in named - needed:
                self._add(found, "a part of the key index that was written anew since", None, None)
            elif name not in named and self._is_older(found, ORPHANED_PACKS_KEPT):
                self._add(found, "its writer did not commit it", None, TableObjects.start_of(name))

    def _needs(self, partition: str, batch: int) -> bool:
        """Whether somebody may still merge what the batch brought for the partition."""
        head = self._head(partition)
        if batch > self._covered or head is None or head.body.merged < batch:
            return True
        if any(head.body.merged < n for n, _ in self._restores(partition)):
            return True
        if any(batch > work.partitions[partition].merged for work in self._works if partition in work.partitions):
            return True
        return any(
            partition in s.lagging and s.partitions[partition].merged < batch <= s.batch for s in self._held.values()
        )

    def _look_at_snapshots(self) -> None:
        for number, link in self._snapshots.items():
            if number not in self._held and self._age(link.written_at) > VERSIONS_KEPT:
                found = self._objects[f"{HOME}/snapshots"].get(self._table.objects.snapshots.name(number))
                if found is not None:
                    self._add(found, "expired", None, None)

    def _is_older(self, found: ObjectInfo, age: timedelta) -> bool:
        return self._now.timestamp() - found.modified > age.total_seconds()

    def _add(self, found: ObjectInfo, why: str, partition: str | None, start: int | None) -> None:
        self.garbage.append(Garbage(found.name, found.size, why, partition, start))
