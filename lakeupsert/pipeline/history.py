"""The specs, ledger entries, snapshots and manifests that were read of a table. None ever changes, so each is read once."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial

import msgspec

from lakeupsert import clock
from lakeupsert.config import Reading
from lakeupsert.errors import ConfigurationError, DamagedTableError, LakeupsertError
from lakeupsert.pipeline.declared import Declaration
from lakeupsert.pipeline.previews import Preview, Previews
from lakeupsert.pipeline.resources import Resources
from lakeupsert.storage import NotFoundError, UnknownOutcomeError
from lakeupsert.table import metadata
from lakeupsert.table.chain import FORMAT, Link, refuse_newer
from lakeupsert.table.layout import LISTED_TOGETHER, Manifests, TableObjects
from lakeupsert.table.ledger import Headers, LedgerEntry, blocks_around, header_blocks, without_touched
from lakeupsert.table.manifest import BucketEntry, Manifest
from lakeupsert.table.snapshot import PartitionVersion, Snapshot
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.taken import TakenFiles
from lakeupsert.table.work import RewriteOrder, read_order

KEPT_ENTRIES = 64
"""How many ledger entries that readers see a worker remembers. More: it grows by about 2 kB for each partition that a batch
touches. Fewer: a partition that lags behind reads them more often."""
KEPT_BUCKETS = 1024
"""Buckets of the manifests that stay in memory, the last ones first: some 10 MB. Fewer: `publish` reads again what it merged."""
LOOK_SECONDS = 30.0
"""How long workers take heads from one listing. Longer: who gets a message that another worker has answered merges in vain."""
LISTED_SECONDS = 3600.0
"""How often a leader looks whether all manifests are stored. More often: of a million versions it is a thousand requests."""
KEPT_OBJECTS = 256
"""How many objects `History.get_once` keeps: results of cuts of some 10 kB, which every unit of a partition reads."""
KEPT_WORKS = 16
"""How many work objects stay in memory. More: `maintain` makes one a minute, for months. Fewer: workers read one again."""


class History:
    """The chains of one table, as far as they were read. A head that is older than what was read before is an error."""

    def __init__(self, declaration: Declaration, resources: Resources) -> None:
        self._declaration, self._resources = declaration, resources
        self._entries: dict[int, Link[LedgerEntry]] = {}  # `forget_published` drops most that readers see
        self._specs: dict[int, TableSpec] = {}  # kept for good
        self._headers: list[LedgerEntry] = []  # kept for good, and grown
        self.known_taken = TakenFiles()  # of the last `taken`; kept for good, and grown
        self.known_snapshot: Link[Snapshot] | None = None  # the last one read; one LIST finds a newer one
        self.kept_heads: dict[str, Link[Manifest]] = {}  # the last ones; replaced, never changed
        self._look: tuple[Link[Snapshot] | None, Manifests | None] = None, None  # of the last `look`
        self._listed_at = float("-inf")  # of the last `list_all`
        self._works: dict[str, RewriteOrder] = {}  # the last `KEPT_WORKS`
        self._immutable: dict[str, bytes] = {}  # the last `KEPT_OBJECTS`

    @cached_property
    def objects(self) -> TableObjects:
        return TableObjects(self._resources.store)

    @cached_property
    def previews(self) -> Previews:
        return Previews(self.objects.held)

    @property
    def has_objects(self) -> bool:
        """Whether `objects` are there yet. The store that they need may fail to open."""
        return "objects" in self.__dict__

    @cached_property
    def reading(self) -> Reading:
        """How landing files are read today, asked after the ledger's head was read. A column that folders once gave keeps
        coming from folders, also if the configuration names it no more."""
        head = self._entries.get(max(self._entries, default=-1))
        names = dict.fromkeys(self._declaration.folder_columns)
        if head is not None:
            before = (name for e in self.headers(head.number) if e.reading is not None for name in e.reading.folders)
            spec = self.spec(head.body.spec_version)
            known = {*spec.schema.names, *(one.name for one in spec.renames if one.id in spec.names_by_id)}
            names |= dict.fromkeys(name for name in before if name in known)
        return msgspec.structs.replace(self._declaration.settings.reading, folders=tuple(names))

    def head_spec(self) -> Link[TableSpec] | None:
        """The newest spec; None if the table does not exist yet. Raises ConfigurationError if it is the spec of another table."""
        known = self._entries.get(max(self._entries, default=-1))
        head = self.objects.specs.head(least=known.body.spec_version if known else -1)
        if known is not None and known.body.spec_version > (head.number if head else -1):
            raise self.objects.missing_spec(known.body.spec_version, f"Ledger entry {known.number}")
        if head is not None:
            self._declaration.refuse_other(head.body)
            self._specs[head.number] = head.body
        return head

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
            return self.objects.missing_spec(0, "The ledger")
        name, settings = self._declaration.name, self._declaration.settings
        return ConfigurationError(
            "no-table-yet",
            f"Table {name!r} does not exist yet: nothing was ever appended to {settings.processed}.",
            next="put files into the landing zone and run `lakeupsert run`",
        )

    def entry(self, number: int) -> Link[LedgerEntry] | None:
        """One ledger entry; None if the ledger has no entry of that number."""
        found = self._entries.get(number) or self.objects.ledger.get(number)
        if found is not None:
            self._entries[number] = found
        return found

    def entries(self, low: int, high: int) -> list[Link[LedgerEntry]]:
        """Ledger entries with low < number <= high, in ascending order."""
        for number in range(low + 1, high + 1):
            if number not in self._entries:
                [self._entries[number]] = self.objects.ledger.between(number - 1, number)
        return [self._entries[number] for number in range(low + 1, high + 1)]

    def forget_published(self) -> None:
        """Drop ledger entries that the last snapshot shows, but the last ones: a worker may live for months. An entry that is
        needed again is read again. No other thread may use the table meanwhile."""
        shown = self.known_snapshot.body.batch if self.known_snapshot else 0
        least = min(shown, max(self._entries, default=0))
        for number in sorted(number for number in self._entries if number < least)[:-KEPT_ENTRIES]:
            del self._entries[number]

    def ledger_head(self) -> Link[LedgerEntry] | None:
        """The newest ledger entry; None if the table does not exist yet.

        Raises DamagedTableError as `newest_entry` does, and if the snapshot that the entry's writer saw is missing: the next
        publish would show readers the snapshot before it.
        """
        head = self.newest_entry()
        lost = self.lost_snapshot(head)
        if head is not None and lost is not None:
            raise self.objects.missing_snapshot(
                lost, head.number, self.known_snapshot.number if self.known_snapshot else None
            )
        return head

    def lost_snapshot(self, head: Link[LedgerEntry] | None) -> int | None:
        """The number of the snapshot that the writer of ``head`` saw, if that snapshot is missing; else None."""
        known = head.body.snapshot if head is not None else None
        if known is None or (self.known_snapshot is not None and self.known_snapshot.number >= known):
            return None
        newest = self.last_snapshot(least=known)  # somebody may have published between the two reads
        return known if newest is None or newest.number < known else None

    def newest_entry(self, snapshot: Link[Snapshot] | None = None) -> Link[LedgerEntry] | None:
        """The newest ledger entry; None if the table does not exist yet.

        Raises DamagedTableError if ``snapshot`` (None: the one read last) shows a later entry. The next append would take the
        number of a lost entry, and no worker would merge that batch.
        """
        snapshot = snapshot or self.known_snapshot
        shown = snapshot.body.batch if snapshot else -1
        head = self.objects.ledger.head(self._entries.get(max(self._entries, default=-1)), least=shown)
        if shown > (head.number if head else -1):
            raise DamagedTableError(
                "missing-version",
                f"Readers see batch {shown}, and the ledger entry of that batch is missing: "
                f"{self.objects.store.uri(self.objects.ledger.name(shown))}. Something other than lakeupsert deleted it.",
                next="restore that object from a backup or from the bucket's own versions; without one, `lakeupsert export "
                "--output FOLDER/` still writes what readers see, for `lakeupsert adopt` of a new table",
            )
        if head is not None:
            self.keep_entry(head)
        return head

    def keep_entry(self, link: Link[LedgerEntry]) -> None:
        self._entries[link.number] = link

    def headers(self, high: int, *, write: bool = False) -> list[LedgerEntry]:
        """Entries 0 to ``high`` without the partitions that they touched, at one GET for up to 4096.

        ``write``: write the objects that hold several entries if they are missing.
        """
        for first, count in header_blocks(high + 1, len(self._headers)):
            self._headers += self._read_headers(first, count, write=write)
            for larger in blocks_around(first + count, count) if write else ():  # which this process need not read
                self._write_headers(*larger, self._headers[-larger[1] :])
        tail = self.entries(len(self._headers) - 1, high)
        return self._headers[: high + 1] + [without_touched(link.body) for link in tail]

    def _read_headers(self, first: int, count: int, *, write: bool) -> Sequence[LedgerEntry]:
        found = self.stored_headers(first, count)
        if found is None:
            smaller = header_blocks(first + count, first, count)
            found = tuple(entry for block in smaller for entry in self._read_headers(*block, write=write)) or tuple(
                without_touched(link.body) for link in self.entries(first - 1, first + count - 1)
            )
            if write:
                self._write_headers(first, count, found)
        return found

    def _write_headers(self, first: int, count: int, entries: Sequence[LedgerEntry]) -> None:
        headers = metadata.encode(Headers(format=FORMAT, first=first, entries=tuple(entries)))
        with suppress(UnknownOutcomeError):  # an append that needs it finds it or writes it
            self.objects.store.create(TableObjects.ledger_headers(first, count), headers)

    def stored_headers(self, first: int, count: int) -> tuple[LedgerEntry, ...] | None:
        """The object that has so many entries from ``first`` on in short; None if it is missing. Raises DamagedTableError."""
        name = TableObjects.ledger_headers(first, count)
        with suppress(NotFoundError):
            found = metadata.decode(
                self.objects.store.get(name),
                Headers,
                partial(self.objects.store.uri, name),
                f"the headers of ledger entries {first} to {first + count - 1}",
                next="delete that object: it only repeats what the ledger says, and the next append writes it again",
            )
            refuse_newer(self.objects.store.uri(name), found.format)
            return found.entries
        return None

    def taken(self, high: int) -> TakenFiles:
        """The landing files of entries 0 to ``high``."""
        if self.known_taken.entries > high + 1:
            return TakenFiles(self.headers(high))
        self.known_taken.add(self.headers(high)[self.known_taken.entries :])
        return self.known_taken

    def last_snapshot(self, *, least: int = -1) -> Link[Snapshot] | None:
        return self.see(self.objects.snapshots.head(self.known_snapshot, least=least))

    def see(self, newest: Link[Snapshot] | None) -> Link[Snapshot] | None:
        """Remember the newest snapshot, which was read just now."""
        self.known_snapshot = newest
        if newest is not None and self.objects.held.leads:
            self.previews.seen(newest.number)
        return newest

    def heads(self, partitions: Collection[str], listed: Manifests | None = None) -> dict[str, Link[Manifest]]:
        """The newest version of each partition that has one, now or when it was ``listed``. A kept one is not read again. A
        leader gets its preview, if it has one."""
        known = self.kept_heads
        held = {partition: link for partition in partitions if (link := self._held_head(partition)) is not None}
        asked = [partition for partition in partitions if partition not in held]
        listed = listed or self._list_for(len(asked))

        def head(partition: str) -> Link[Manifest] | None:
            chain, kept = self.objects.partition(partition), known.get(partition)
            if listed is None:
                return chain.head(kept)
            if kept is not None and kept.read_at > listed.read_at:
                return kept  # read or committed since
            info = listed.heads.get(partition)
            return chain.listed_head(info, listed.read_at, kept) if info else None

        found = zip(asked, self._resources.map_concurrently(head, asked), strict=True)
        heads = held | {partition: link for partition, link in found if link is not None}
        self.keep_heads(heads)
        return self.previews.over(heads)

    def _held_head(self, partition: str) -> Link[Manifest] | None:
        """The head of a partition that a leader has in memory."""
        kept = self.kept_heads.get(partition)
        return kept if kept is not None and self.previews.is_known(kept) else None

    def list_all(self, snapshots: Iterable[Snapshot]) -> Manifests | None:
        """A listing of all manifests that is to find those of these snapshots; None: the leader's last one is young enough."""
        if self.objects.held.leads and clock.elapsed() - self._listed_at < LISTED_SECONDS:
            return None
        listed = self.objects.list_manifests(snapshots)
        self._listed_at = listed.read_at
        return listed

    def keep_heads(self, heads: Mapping[str, Link[Manifest]]) -> None:
        """Keep these newest versions, and the last ones before up to `KEPT_BUCKETS`. A preview is none."""
        kept, buckets = {p: link for p, link in heads.items() if not isinstance(link, Preview)}, 0
        for partition, link in self.kept_heads.items():
            buckets += len(link.body.buckets)
            if buckets <= KEPT_BUCKETS:
                kept.setdefault(partition, link)
        self.kept_heads = kept

    def look(self, asked: int) -> tuple[Link[Snapshot] | None, Manifests | None]:
        """The newest snapshot, and a listing for `heads` of so many partitions that was made after it; None: they need none.

        Both may be those of an earlier call, `LOOK_SECONDS` ago at most. A commit behind an old head finds its number taken.
        """
        if self.objects.held.leads:
            return self.last_snapshot(), None
        _, listed = self._look
        if asked == 1 or listed is None or clock.elapsed() - listed.read_at > LOOK_SECONDS:
            # In this order: with an older listing, a version published meanwhile would look lost.
            self._look = self.last_snapshot(), self._list_for(asked)
        return self._look

    def forget_look(self) -> None:
        self._look = None, None

    def _list_for(self, asked: int) -> Manifests | None:
        """A listing of all manifests, if that takes fewer requests than a LIST for each of so many partitions."""
        stored = self.known_snapshot.body.manifests if self.known_snapshot and asked > 1 else 0
        return self.objects.list_manifests() if 0 < stored <= (asked - 1) * LISTED_TOGETHER else None

    def behind(
        self,
        snapshot: Link[Snapshot] | None,
        partition: str,
        head: Link[Manifest] | None,
        *,
        from_landing: bool = False,
        up_to: int | None = None,
    ) -> Link[Manifest] | None:
        """The version of a partition to append behind: its ``head``, None if it has no version yet.

        Raises DamagedTableError if ``snapshot``, read before, shows a version that is missing: a version appended behind the
        remaining ones would lose its rows silently. Two callers need nothing of the missing version and get a stand-in to
        append behind, so that their version takes its place: a rebuild ``from_landing``, and a merge ``up_to`` a batch
        behind a restore, which begins from the version that the restore names.
        """
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

    def version(self, partition: str, number: int | PartitionVersion) -> Manifest:
        """One version of a partition, or what a snapshot shows of it; -1 is the empty one before the first."""
        if isinstance(number, PartitionVersion):
            if number.group is not None:
                return self.objects.grouped(partition, number).body
            number = number.version
        if number < 0:
            return Manifest(partition=partition, merged=0, spec_version=0)
        known = self.kept_heads.get(partition)
        found = known if known and known.number == number else self.objects.partition(partition).get(number)
        if found is None:
            head = self.objects.partition(partition).head()
            lost = head is None or head.number < number
            raise self.objects.missing(partition, number, "A snapshot or a restore", lost=lost)
        return found.body

    def get_once(self, name: str) -> bytes:
        """An object that never changes. The last ones are kept for those who ask again. Raises NotFoundError."""
        found = self._immutable.get(name)
        if found is None:
            found = self._immutable[name] = self.objects.store.get(name)
            for oldest in list(self._immutable)[:-KEPT_OBJECTS]:
                self._immutable.pop(oldest, None)  # another thread may have been faster
        return found

    def work(self, name: str) -> RewriteOrder:
        found = self._works.get(name)
        if found is None:
            found = self._works[name] = read_order(self.objects.store, name)
            for oldest in list(self._works)[:-KEPT_WORKS]:
                self._works.pop(oldest, None)  # another thread may have been faster
        return found
