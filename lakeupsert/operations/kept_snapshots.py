"""Snapshots, versions and ledger entries as `vacuum` remembers them: a process reads each of them once.

Reads     the list of snapshots; snapshots, versions and ledger entries that it has not read yet
Writes    nothing
Repeat    safe: both stay as they are

A table that gets a batch every few seconds has ten thousand snapshots a day. Each shows all partitions, and differs in a few.
"""

import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import msgspec

from lakeupsert import clock
from lakeupsert.errors import DamagedTableError
from lakeupsert.pipeline.history import History
from lakeupsert.table.chain import Chain, Link
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import RestorePoint, Touched
from lakeupsert.table.manifest import Manifest
from lakeupsert.table.snapshot import PartitionVersion, Snapshot


@dataclass(frozen=True, slots=True)
class Facts:
    """A snapshot without its partitions.

    Attributes:
        lagging: the batch that each lagging partition has merged.
        tagged: the snapshots that have a tag.
        digest: equal if readers see the same.
    """

    written_at: datetime
    batch: int
    lagging: Mapping[str, int]
    tagged: frozenset[int]
    expired: int
    digest: bytes


class KeptSnapshots:
    """The snapshots that somebody may read, recently expired ones included.

    Attributes:
        newest: the newest one of all.
        oldest: none below this number is kept, except those in ``tagged``.
        settled: the batch of the newest one that is older than the retention; -1: there is none.
    """

    newest: Link[Snapshot] | None = None
    oldest, settled, tagged = 0, -1, frozenset[int]()

    def __init__(self, chain: Chain[Snapshot]) -> None:
        self._chain = chain
        self._facts: dict[int, Facts] = {}
        # A version is shown by one snapshot after the other, until one shows a newer version: the first of them and the last.
        self._shown: defaultdict[str, dict[PartitionVersion, tuple[int, int]]] = defaultdict(dict)
        self._awaited: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)

    def add(self, link: Link[Snapshot]) -> Facts:
        """Remember a snapshot that was read, or that is planned."""
        number, body = link.number, link.body
        if self.newest is None or number > self.newest.number:
            self.newest = link
        if number not in self._facts:
            shows = msgspec.json.encode((body.batch, body.partitions, body.lagging), order="deterministic")
            self._facts[number] = Facts(
                written_at=datetime.fromisoformat(link.written_at),
                batch=body.batch,
                lagging={partition: body.partitions[partition].merged for partition in body.lagging},
                tagged=frozenset(body.tags.values()),
                expired=body.expired,
                digest=hashlib.sha256(shows).digest(),
            )
            for partition, version in body.partitions.items():
                shown = self._shown[partition]
                first, last = shown.get(version, (number, number))
                shown[version] = min(first, number), max(last, number)
        return self._facts[number]

    def read(self, number: int) -> Facts | None:
        """One snapshot; None if it is not there."""
        if number not in self._facts:
            link = self._chain.get(number)
            return self.add(link) if link else None
        return self._facts[number]

    def choose(self, retention: timedelta, least_shown: int | None) -> Link[Snapshot] | None:
        """Read all kept ones, and forget the others. Returns the newest one, or None if there is none.

        Args:
            retention: how long a snapshot is kept after it expired.
            least_shown: the oldest one that a publisher shows.
        """
        numbers = sorted({*self._chain.numbers(), *self._facts}, reverse=True)
        recent: list[Facts] = []
        then = None  # the snapshot that says what had expired before the retention began
        for facts in filter(None, map(self.read, numbers)):
            recent.append(facts)
            if clock.now() - facts.written_at >= retention:
                then = facts
                break
        self.tagged = frozenset().union(*(facts.tagged for facts in recent))
        expired, self.settled = (then.expired, then.batch) if then else (0, -1)
        self.oldest = expired if least_shown is None else min(expired, least_shown)
        for number in filter(self.keeps, numbers):
            self.read(number)
        self._forget()
        return self.newest

    def keeps(self, number: int) -> bool:
        return number >= self.oldest or number in self.tagged

    @property
    def partitions(self) -> Iterable[str]:
        """All that kept snapshots show."""
        return self._shown

    def shown(self, partition: str) -> dict[PartitionVersion, int]:
        """The partition's versions that kept snapshots show, newest first, each with the newest of these snapshots."""
        shown = self._shown.get(partition, {})
        return {version: shown[version][1] for version in sorted(shown, key=lambda one: shown[one], reverse=True)}

    def grouped(self) -> dict[tuple[str, str], PartitionVersion]:
        """The versions that kept snapshots show in groups, by group and partition."""
        return {
            (version.group.name, partition): version
            for partition, shown in self._shown.items()
            for version in shown
            if version.group is not None
        }

    def awaits(self, partition: str, batch: int) -> bool:
        """Whether a reader may merge the batch where a kept snapshot shows the partition lagging, or a restore to a group may."""
        return any(merged < batch <= last for merged, last in self.awaited(partition))

    def awaited(self, partition: str) -> Iterable[tuple[int, int]]:
        """The batches of `awaits`: those above the first number up to the second one."""
        return self._awaited.get(partition, ())

    def _forget(self) -> None:
        self._facts = {number: facts for number, facts in self._facts.items() if self.keeps(number)}
        for partition, shown in self._shown.items():
            self._shown[partition] = {
                version: (first, last)
                for version, (first, last) in shown.items()
                if last >= self.oldest or any(first <= number <= last for number in self.tagged)
            }
        self.find_awaited()

    def find_awaited(self) -> None:
        """Let `awaited` know all snapshots that were added."""
        self._awaited.clear()
        for facts in self._facts.values():
            for partition, merged in facts.lagging.items():
                self._awaited[partition].add((merged, facts.batch))
        for (_, partition), version in self.grouped().items():
            # A group is restored as the version below it, which merges again.
            self._awaited[partition].add((version.merged_in_chain, version.merged))


class KeptGroups:
    """The groups that kept snapshots name.

    Attributes:
        names: theirs.
        files: the files of each partition in groups.
        unknown: partitions of which an older snapshot names a lost group. Nobody knows which files that one needs.
    """

    names: frozenset[str] = frozenset()

    def __init__(self, objects: TableObjects) -> None:
        self._objects = objects
        self._read: dict[tuple[str, str], tuple[str, ...]] = {}
        self.files: defaultdict[str, set[str]] = defaultdict(set)
        self.unknown: set[str] = set()

    def look(self, kept: KeptSnapshots) -> None:
        """Read the groups that are new. Raises DamagedTableError if the newest snapshot names a lost one."""
        shown, known = kept.grouped(), self._read
        self.names = frozenset(name for name, _ in shown)
        self._read, self.unknown = {}, set()
        self.files.clear()
        for (name, partition), version in sorted(shown.items(), key=lambda one: one[0]):
            try:
                files = known.get((name, partition)) or self._objects.grouped(partition, version).body.objects
            except DamagedTableError:
                if kept.newest is None or kept.newest.body.partitions.get(partition) == version:
                    raise
                self.unknown.add(partition)
                continue
            self._read[name, partition] = tuple(map(sys.intern, files))
            self.files[partition].update(files)


class EntryObjects:
    """The objects that ledger entries name."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._entries: dict[int, tuple[Mapping[str, tuple[str, ...]], RestorePoint | None]] = {}
        self._restores: dict[str, list[tuple[int, RestorePoint]]] = {}

    def look(self, low: int, high: int) -> None:
        """Read the entries with low < number <= high, and forget those below."""
        self._entries = {number: entry for number, entry in self._entries.items() if number > low}
        for number in range(low + 1, high + 1):
            if number not in self._entries:
                [link] = self._history.entries(number - 1, number)
                self._entries[number] = _objects_of(link.body.touched), link.body.restored
        self._restores = {}
        for number, (touched, restored) in self._entries.items():
            if restored is not None:
                for partition in touched:
                    self._restores.setdefault(partition, []).append((number, restored))

    @property
    def partitions(self) -> set[str]:
        """All that the entries touched."""
        return {partition for touched, _ in self._entries.values() for partition in touched}

    def of_batches(self) -> Iterator[tuple[int, str, tuple[str, ...]]]:
        """The number of each entry, each partition that it touched, and the objects with rows for it."""
        for number, (touched, _) in self._entries.items():
            for partition, objects in touched.items():
                yield number, partition, objects

    def restores(self, partition: str) -> Iterable[tuple[int, RestorePoint]]:
        """The restores that touched the partition, with the numbers of their entries."""
        return self._restores.get(partition, ())


def _objects_of(touched: Mapping[str, Touched]) -> dict[str, tuple[str, ...]]:
    """Equal texts are one in memory: an entry has the same object for most partitions, and others have the same partitions."""
    same: dict[tuple[str, ...], tuple[str, ...]] = {}
    named = ((sys.intern(p), tuple(name for file in one.files for name in file.objects)) for p, one in touched.items())
    return {partition: same.setdefault(names, names) for partition, names in named}


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version of a partition's chain.

    Attributes:
        link: without its buckets.
        objects: those with rows or deletion vectors that it needs.
    """

    link: Link[Manifest]
    objects: tuple[str, ...]


class StoredVersions:
    """The versions that somebody may need, and what they need.

    If a version is lost and another one takes its number, this has the lost one. Files of the other one are kept all the
    same, because the fence before each deletion is a version that names them, too.
    """

    def __init__(self, objects: TableObjects) -> None:
        self._objects = objects
        self._before: dict[str, StoredVersion] = {}
        self._read: dict[str, StoredVersion] = {}

    def begin(self) -> None:
        """Forget the versions that nobody has asked for since the last call."""
        self._before, self._read = self._read, {}

    def look(self, partition: str, name: str) -> StoredVersion | None:
        """A version that was listed; None if another vacuum has trimmed it since."""
        version = self._read.get(name) or self._before.get(name)
        if version is None:
            chain = self._objects.partition(partition)
            link = chain.get(chain.number(name))
            if link is None:
                return None
            objects = tuple(sys.intern(name) for bucket in link.body.buckets for name in bucket.objects)
            version = StoredVersion(replace(link, body=msgspec.structs.replace(link.body, buckets=())), objects)
        self._read[name] = version
        return version
