"""Every object that readers of a kept snapshot or the next commands need, in one walk.

Reads     specs, the ledger, the kept snapshots, the manifests and groups that they show, one listing
Writes    nothing
Repeat    safe

    kept snapshots, newest first -> manifests, groups -> data files, deletion vectors
    ledger -> its headers, rows of statements, quarantine, key index, rows that are not merged yet

It leaves out the work of an unfinished reprocess, which can be started again.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TypeVar

import pyarrow as pa

from lakeupsert import clock
from lakeupsert.engine.attempts import attempt
from lakeupsert.errors import DamagedTableError, TryAgainError
from lakeupsert.operations.kept_snapshots import KeptSnapshots
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.standing import unpublished_up_to
from lakeupsert.pipeline.table_keys import named_index
from lakeupsert.progress import Share
from lakeupsert.rows.datafiles import explain_damage
from lakeupsert.storage import NotFoundError
from lakeupsert.table.chain import Chain, Link
from lakeupsert.table.erasure import read_erasures
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import LedgerEntry, header_blocks, without_touched
from lakeupsert.table.manifest import BucketEntry, DataFile, Manifest
from lakeupsert.table.snapshot import PartitionVersion, Snapshot
from lakeupsert.table.spec import TableSpec

VACUUM_SECONDS = 600
"""How long a vacuum that began before the walk may still delete. Longer: damage is reported later."""

Body = TypeVar("Body")
Found = TypeVar("Found")


@dataclass(frozen=True)
class NeededBucket:
    """A bucket whose files are there, in the sizes that its manifest says.

    Attributes:
        needed_by: for example ``snapshot 7``, the newest that needs it.
        spec: the newest.
    """

    needed_by: str
    partition: str
    spec: TableSpec
    entry: BucketEntry


class Needed:
    """The walk: once `buckets` has ended, the attributes have all names.

    Args:
        damaged: takes what is missing or damaged, and who needs it. If it returns, the walk continues without that object.
        proven: the ledger entries up to this one are known to be whole, and read in short.

    Attributes:
        metadata: names of versions of chains, of groups and of headers.
        files: names of all other objects: data files, vectors, quarantine files, the key index.
        sizes: the bytes of each object of the table.
        snapshots: the numbers of the kept ones, newest first.
    """

    def __init__(
        self,
        table: OpenTable,
        damaged: Callable[[str, DamagedTableError], None],
        progress: Callable[[str], None] = lambda text: None,
        *,
        proven: int = -1,
    ) -> None:
        self._resources, self._proven = table.resources, proven
        self._history, self._store, self._progress = table.history, table.resources.store, progress
        self._objects = table.history.objects
        self._damaged = damaged
        self._kept = KeptSnapshots(self._objects.snapshots)
        self._seen: set[tuple[tuple[str, int], str]] = set()  # files, each with its deletion vector
        self._due: dict[str, int] = {}  # partitions that the next snapshot must show, each with its last batch
        self.metadata: set[str] = set()
        self.files: set[str] = set()
        self.sizes: dict[str, int] = {}
        self.snapshots: tuple[int, ...] = ()
        self._newest: Snapshot | None = None
        self._head: Link[LedgerEntry] | None = None

    def buckets(self) -> Iterator[NeededBucket]:
        """Every bucket that is needed, unless all its files were in one before. Raises ConfigurationError without a table."""
        self._progress("reading the ledger")
        if (spec := self.look("every command", self._history.existing_spec)) is None:
            return
        self._snapshots()
        for number in range((self._objects.specs.newest_number() or 0) + 1):
            self.look("files of its time", partial(self._version, self._objects.specs, number))
        # After the snapshots: what these need is not deleted. An object that was created since is asked for.
        self.sizes = {found.name: found.size for found in self._store.list("")}
        yield from self._ledger(spec)
        if self._head is not None:
            unpublished = partial(unpublished_up_to, self._history, self._newest, self._head.number)
            self._due = self.look("the next snapshot", unpublished) or {}
        partitions = sorted({*self._due, *self._kept.partitions})
        for at, partition in enumerate(partitions):
            self._progress(Share(f"checking {partition}", at, len(partitions)))
            yield from self._partition(spec, partition)

    def look(self, needed_by: str, read: Callable[[], Found]) -> Found | None:
        """The result of ``read``; None if it found damage. Raises TryAgainError if a vacuum may have deleted the object."""
        try:
            return read()
        except DamagedTableError as e:
            self._refuse_vacuumed()
            self._damaged(needed_by, e)
            return None

    def _refuse_vacuumed(self) -> None:
        """Raises TryAgainError if a vacuum may be at work. It fences the ledger before it deletes."""
        with suppress(DamagedTableError):
            now = self._objects.ledger.head()
            later = self._history.entries(self._head.number - 1, now.number) if now and self._head else []
            fences = [link for link in later if link.body.kind == "fence"]
            if any(link.number > self.batch or _age(link) < VACUUM_SECONDS for link in fences):
                raise TryAgainError(
                    "vacuumed-meanwhile",
                    f"{self._store.uri()}: an object is missing, and a vacuum began after this call or in the ten minutes "
                    "before. It may have deleted the object. Nothing was changed.",
                    next="run the same command again ten minutes later",
                )

    @property
    def batch(self) -> int:
        """The newest entry of the ledger; -1: there is none."""
        return self._head.number if self._head else -1

    # -- chains

    def _version(self, versions: Chain[Body], number: int) -> Link[Body]:
        [link] = versions.between(number - 1, number)
        self.metadata.add(versions.name(number))
        return link

    def _snapshots(self) -> None:
        """The newest snapshot, and a ledger that has its batch and names no newer one; and older snapshots."""
        while True:
            newest = self.look("every reader", self._history.last_snapshot)
            head = self.look("every writer", self._history.ledger_head)
            named = head.body.snapshot if head else None
            if newest is None or named is None or named <= newest.number:
                break
        self._head = head or self.look("every writer", self._objects.ledger.head)  # also if a snapshot is lost
        self._newest = newest.body if newest else None
        numbers = (
            {newest.number, *range(newest.body.expired, newest.number), *newest.body.tags.values()} if newest else ()
        )
        self.snapshots = tuple(sorted(numbers, reverse=True))
        for number in self.snapshots:
            link = self.look(f"snapshot {number}", partial(self._kept_snapshot, number))
            if link is not None:
                self._kept.add(link)
        self._kept.find_awaited()

    def _kept_snapshot(self, number: int) -> Link[Snapshot]:
        try:
            return self._version(self._objects.snapshots, number)
        except DamagedTableError as e:
            if number < self.snapshots[0]:
                e.next += "; or leave it: newer snapshots do not need it, and nothing looks for it once it has expired"
            raise

    def _entries(self, count: int) -> Iterator[LedgerEntry]:
        """The entries that read. One that is known to be whole is in short, unless it is a statement."""
        last = sum(size for _, size in header_blocks(min(self._proven + 1, count))) - 1
        known = self.look("every writer", partial(self._history.headers, last)) if last > 0 else ()
        whole = [number for number in range(count) if number >= len(known or ()) or (known and known[number].statement)]
        read = partial(attempt, partial(self._version, self._objects.ledger))
        found = dict(zip(whole, self._resources.map_concurrently(read, whole), strict=True))
        for number in range(count):
            self.metadata.add(self._objects.ledger.name(number))
            if number not in found and known:
                yield known[number]
            elif (link := self.look("every writer", partial(_result, found[number]))) is not None:
                yield link.body

    def _ledger(self, spec: TableSpec) -> Iterator[NeededBucket]:
        """All entries, and the objects that are needed by the table as a whole. The buckets have rows of statements."""
        count = self._head.number + 1 if self._head else 0
        entries: list[LedgerEntry] = []
        erased = set[str]()
        for found, erasure in self.look("`erase`", lambda: [*read_erasures(self._store)]) or ():
            self.metadata.add(found.name)
            erased.update(erasure.statements)
        for entry in self._entries(count):
            entries.append(without_touched(entry))
            for partition, touched in entry.touched.items() if entry.statement else ():
                stored = tuple(file for file in touched.files if file.name not in erased)
                rows = BucketEntry(id="", settled=False, base=stored)
                yield from self._bucket("`reprocess --source landing`", partition, spec, rows)
        for entry in entries:
            for file in entry.quarantine:  # also replayed ones: a restore may withdraw the replay
                self._has("`quarantine`", file.name)
        if len(entries) < count:
            return  # nobody knows which of the others count
        for block in header_blocks(count):
            if self.look("`append`", partial(self._history.stored_headers, *block)) is not None:
                self.metadata.add(TableObjects.ledger_headers(*block))
        index = named_index(entries) if spec.key_scope == "table" else None
        for keys in index.all if index else ():
            self._file("`append`", keys)

    # -- partitions

    def _partition(self, spec: TableSpec, partition: str) -> Iterator[NeededBucket]:
        """Its versions that are shown, its newest one, and the rows that may be merged into one of them."""
        shown = self._newest.partitions.get(partition) if self._newest else None
        for version, number in self._kept.shown(partition).items():
            needed_by = f"snapshot {number}"
            for read in (self._shown, self._grouped):
                manifest = self.look(needed_by, partial(read, partition, version, number))
                yield from self._buckets(needed_by, spec, manifest)
        ranges = list(self._kept.awaited(partition))
        if partition in self._due:
            merged, chain = shown.merged_in_chain if shown else -1, self._objects.partition(partition)
            head = self.look("the next snapshot", chain.head)
            first = shown.version + 1 if shown else 0
            for number in range(first, head.number + 1 if head else first):  # a later snapshot counts what each changed
                found = self.look("the next snapshot", partial(chain.get, number))
                if found is not None and merged <= found.body.merged <= self.batch:  # else newer than this walk
                    self.metadata.add(chain.name(number))
                    yield from self._buckets("the next snapshot", spec, found.body)
                    merged = found.body.merged
            ranges.append((merged, self._due[partition]))
        for low, high in ranges:
            for link in self.look("the next merges", partial(self._history.entries, low, high)) or ():
                needed_by = f"the merge of batch {link.number}"
                if touched := link.body.touched.get(partition):
                    waiting = BucketEntry(id="", settled=False, base=touched.files)
                    yield from self._bucket(needed_by, partition, spec, waiting)
                    if (point := link.body.restored) and point.versions[partition] >= 0:
                        manifest = self.look(needed_by, partial(self._stored, partition, point.versions[partition]))
                        yield from self._buckets(needed_by, spec, manifest)
                        ranges.append((manifest.merged if manifest else point.batch, point.batch))

    def _shown(self, partition: str, shown: PartitionVersion, snapshot: int) -> Manifest:
        """The chain's version. If a group is shown, what is lost of that is merged again from there."""
        found = self._stored(partition, shown.version)
        if shown.version >= 0 and found.merged != shown.merged_in_chain:  # another one took its number
            is_newest = snapshot == self.snapshots[0]
            raise self._objects.missing(partition, shown.version, f"Snapshot {snapshot}", lost=is_newest)
        return found

    def _grouped(self, partition: str, shown: PartitionVersion, snapshot: int) -> Manifest | None:
        if shown.group is None:
            return None
        self.metadata.add(shown.group.name)
        return self._objects.grouped(partition, shown).body

    def _stored(self, partition: str, number: int) -> Manifest:
        found = self._history.version(partition, number)
        if number >= 0:
            self.metadata.add(self._objects.partition(partition).name(number))
        return found

    def _buckets(self, needed_by: str, spec: TableSpec, manifest: Manifest | None) -> Iterator[NeededBucket]:
        if manifest is not None:
            for name in manifest.quarantine:
                self._has("`quarantine`", name)
            for bucket in manifest.buckets:
                yield from self._bucket(needed_by, manifest.partition, spec, bucket)

    def _bucket(self, needed_by: str, partition: str, spec: TableSpec, bucket: BucketEntry) -> Iterator[NeededBucket]:
        files = (*bucket.data, *bucket.tombstones, *bucket.history)
        new = {(file.place, file.deleted.identity if file.deleted else "") for file in files} - self._seen
        self._seen |= new
        are_there = [self._file(needed_by, file) for file in files]  # also behind one that is not
        if new and all(are_there):
            yield NeededBucket(needed_by, partition, spec, bucket)

    # -- files

    def _file(self, needed_by: str, file: DataFile) -> bool:
        is_part = file.at is not None or file.row is not None
        is_there = not file.name or self._has(needed_by, file.name, (file.at or 0) + file.bytes, is_part=is_part)
        vector = file.deleted
        if vector is not None and vector.name:
            return self._has(needed_by, vector.name, vector.at + vector.size) and is_there
        return is_there

    def _has(self, needed_by: str, name: str, size: int = 0, *, is_part: bool = True) -> bool:
        """Whether the object is there. ``size``: its bytes, or the end of a part of it."""
        return self.look(needed_by, partial(self._compare, name, size, is_part)) is not None

    def _compare(self, name: str, size: int, is_part: bool) -> str:
        with explain_damage(self._store, name):
            if name not in self.sizes:
                found = self._store.head(name)
                if found is None:
                    raise NotFoundError(name)
                self.sizes[name] = found.size
            self.files.add(name)
            there = self.sizes[name]
            if there < size or (there > size and not is_part):
                raise pa.ArrowInvalid(f"it has {there:,} bytes, not {size:,}")
        return name


def _result(found: Found | Exception) -> Found:
    if isinstance(found, Exception):
        raise found
    return found


def refuse_damage(needed_by: str, error: DamagedTableError) -> None:
    """Let the walk end with the first damage."""
    raise error


def _age(link: Link[LedgerEntry]) -> float:
    return (clock.now() - datetime.fromisoformat(link.written_at)).total_seconds()
