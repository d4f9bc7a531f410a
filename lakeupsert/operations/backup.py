"""Copy a table to another address, again and again, and make a table of one of these backups.

Reads     `backup`: all that is needed (`needed`), one listing of the copy and the metadata that both have
          `recover`: one entry of the copy's chain, and the objects that it names
Writes    at the other address each object that it lacks; `backup` then an entry with the names of the backup's objects
Repeat    safe: a call that broke off is continued. Until the entry is there, the backups before it are all there are

Objects have the same names in the copy. None that an entry names is ever deleted there, and readers of a copy take no others. So
nothing depends on the order of copying: the ledger names snapshots and snapshots name batches, and a vacuum may have trimmed what
was between two of them.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache

import pyarrow as pa

from lakeupsert.config import refuse_in_zones
from lakeupsert.errors import ConfigurationError, DamagedTableError, RefusedError
from lakeupsert.operations.needed import Needed, refuse_damage
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.resources import Resources
from lakeupsert.progress import Share
from lakeupsert.rows.datafiles import explain_damage
from lakeupsert.storage import ObjectStore, StoreUnavailableError, UnknownOutcomeError, open_store
from lakeupsert.table.backup import BackupEntry
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import HOME, LOCAL_QUEUE, TableObjects

COPIED_TOGETHER = 256
"""Objects that are copied between two signs of progress."""
COPY_BYTES = 8 << 20
"""Bytes of an object in memory. Fewer: more calls."""
OF_OTHERS = (f"{HOME}/sources/", f"{HOME}/batches/")
"""`capture` and `serve` read them when they start: which changes have landed?"""
_OF_A_TABLE = (f"{HOME}/reading/", f"{HOME}/leases/", f"{HOME}/upkeep/", LOCAL_QUEUE)
"""Names of objects that a table at work has, and no copy."""


@dataclass(frozen=True)
class CopyResult:
    """A backup, and what the call copied.

    Attributes:
        number: counts the backups of a copy from 1.
        snapshot: the newest one in it; None: nothing is published.
        batch: the newest one of its ledger; -1: none.
        objects, bytes: that were copied.
        kept: how many objects of the backup were there before.
    """

    number: int
    snapshot: int | None
    batch: int
    objects: int
    bytes: int
    kept: int


def backup(table: OpenTable, output: str, progress: Callable[[str], None] = lambda text: None) -> CopyResult:
    """Copy the table to the address ``output``, which is empty or has earlier backups. Others may write to the table meanwhile.

    Raises:
        ConfigurationError: there is no table, or ``output`` is in a zone of the table.
        DamagedTableError: an object that is needed is missing or has another size.
        RefusedError: ``output`` has other objects.
        TryAgainError: a vacuum deleted an object before it was copied.
    """
    refuse_in_zones(table.settings, output)
    copy = TableObjects(open_store(output))
    last = _begin(copy, table.history.existing_spec().table_id, output)
    # A ledger entry has the id of the one before. So if the newest one of the last backup is the same, all before it are.
    needed = Needed(table, refuse_damage, progress, proven=last.body.batch)
    for _ in needed.buckets():
        pass
    if needed.batch < last.body.batch:
        raise _others(
            f"{output} has a backup up to batch {last.body.batch}, and the table ends with {needed.batch}", _PARTED
        )
    ledger = table.history.objects.ledger
    entries = [ledger.name(number) for number in range(needed.batch + 1)]
    files = {name: needed.sizes[name] for name in sorted(needed.files)}
    older = entries[: max(0, min(needed.batch, last.body.batch))]
    sizes = files | {name: needed.sizes[name] for name in older if name in needed.sizes}
    is_needed = _find_needed(copy)
    copying = _Copying(table.resources, table.resources.store, copy.store, sizes, is_needed, _PARTED, progress)
    of_others = {name for name in needed.sizes if name.startswith(OF_OTHERS) and "leases" not in name.split("/")[3:4]}
    needed.look(
        "the backup", lambda: copying.copy([*files, *entries, *needed.metadata.difference(entries), *of_others])
    )
    entry = BackupEntry(
        table_id=last.body.table_id,
        snapshot=needed.snapshots[0] if needed.snapshots else None,
        batch=needed.batch,
        metadata=sorted((needed.metadata | of_others) - {*entries} - copying.trimmed),
        files=files,
    )
    copy.backups.extend(lambda head: None if head and (head.body == entry or _is_newer(head.body, entry)) else entry)
    head = copy.backups.head()
    assert head is not None, "it was there or was appended"
    return copying.result(head.number, head.body)


def recover(
    table: OpenTable, address: str, number: int | None = None, progress: Callable[[str], None] = lambda text: None
) -> CopyResult:
    """Make the table as it was at a backup. ``address``: the `output` of `backup`. ``number``: None is the newest one.

    Raises:
        ConfigurationError: there is no such backup, or a table already.
        DamagedTableError: an object of the backup is missing or has another size.
        RefusedError: the processed zone has other objects.
    """
    copy = TableObjects(open_store(address))
    chosen = _choose(copy, address, number)
    store, objects = table.resources.store, table.history.objects
    copying = _Copying(table.resources, copy.store, store, chosen.body.files, lambda name: True, _EMPTY_ZONE, progress)
    entries = [objects.ledger.name(number) for number in range(chosen.body.batch + 1)]
    spec = min(name for name in chosen.body.metadata if name.startswith(objects.specs.prefix))  # the newest
    if spec in copying.there:
        raise ConfigurationError(
            "already-a-table",
            f"{store.uri()} is a table already. Nothing was copied.",
            next="name an empty folder in `processed`",
        )
    others = copying.there.keys() - {*entries, *chosen.body.metadata, *chosen.body.files}
    if other := min((name for name in others if not name.startswith(LOCAL_QUEUE)), default=None):
        raise _others(f"{store.uri(other)} is not of that backup", _EMPTY_ZONE)
    copying.copy([*chosen.body.files, *entries, *sorted({*chosen.body.metadata} - {spec})])
    copying.copy([spec])
    return copying.result(chosen.number, chosen.body)


class _Copying:
    """Copies objects under their names, unless they are there.

    Attributes:
        there: the bytes of each object that was at the other address before.
        trimmed: names of objects of `capture` that it has deleted meanwhile, since it needs them no longer.
    """

    def __init__(
        self,
        resources: Resources,
        source: ObjectStore,
        target: ObjectStore,
        sizes: Mapping[str, int],
        is_needed: Callable[[str], bool],
        advice: str,
        progress: Callable[[str], None],
    ) -> None:
        """
        Args:
            sizes: bytes of objects whose name and size say what they are. Others are compared byte by byte.
            is_needed: whether an object that differs must stay. Otherwise it is replaced.
            advice: if it must.
        """
        self._resources, self._source, self._target, self._progress = resources, source, target, progress
        self._sizes, self._is_needed, self._advice = sizes, is_needed, advice
        self.there = {found.name: found.size for found in self._target.list("")}
        self.trimmed: set[str] = set()
        self._objects = self._bytes = self._kept = 0

    def copy(self, names: Collection[str]) -> None:
        ordered = list(names)
        for at in range(0, len(ordered), COPIED_TOGETHER):
            self._progress(Share(f"copying {len(ordered):,} objects", at, len(ordered)))
            some = ordered[at : at + COPIED_TOGETHER]
            copied = [size for size in self._resources.map_concurrently(self._copy, some) if size is not None]
            self._objects, self._bytes = self._objects + len(copied), self._bytes + sum(copied)
            self._kept += len(some) - len(copied)

    def result(self, number: int, entry: BackupEntry) -> CopyResult:
        return CopyResult(number, entry.snapshot, entry.batch, self._objects, self._bytes, self._kept)

    def _copy(self, name: str) -> int | None:
        """Returns the bytes; None if nothing was to copy."""
        if name in self.there:
            if self._is_same(name):
                return None
            if self._is_needed(name):
                raise self._differs(name)
            self._target.delete([name])
        size = 0
        try:
            if name not in self._sizes:
                return self._create(name)
            with self._target.write(name) as sink, explain_damage(self._source, name), self._source.open(name) as data:
                while chunk := data.read(COPY_BYTES):
                    sink.write(chunk)
                    size += len(chunk)
                if self._sizes[name] != size:
                    raise pa.ArrowInvalid(f"it has {size:,} bytes, not {self._sizes[name]:,}")
        except FileExistsError:  # another call was faster
            if self._is_same(name):
                return None
            raise self._differs(name) from None
        except DamagedTableError:
            if not name.startswith(OF_OTHERS) or self._source.head(name) is not None:
                raise
            self.trimmed.add(name)
            return None
        return size

    def _create(self, name: str) -> int:
        """Copy metadata as the table commits them: a bucket may refuse every other put of such a name."""
        with explain_damage(self._source, name):
            data = self._source.get(name)
        try:
            if not self._target.create(name, data):
                raise FileExistsError(name)
        except UnknownOutcomeError as e:
            found = (
                f"{self._target.uri(name)}: the store did not answer, so whether this object was copied is not known."
            )
            raise StoreUnavailableError("store-unreachable", found, next="run the same command again") from e
        return len(data)

    def _is_same(self, name: str) -> bool:
        """Whether the two objects of a name are equal. The names of files are never used twice, numbers are."""
        if name in self._sizes:
            return self.there.get(name, self._sizes[name]) == self._sizes[name]
        return self._target.get(name) == self._source.get(name)

    def _differs(self, name: str) -> RefusedError:
        return _others(f"{self._target.uri(name)} differs from {self._source.uri(name)}", self._advice)


def _begin(copy: TableObjects, table_id: str, output: str) -> Link[BackupEntry]:
    """The newest entry of the copy, which is made if ``output`` is empty."""
    head = copy.backups.head()
    if head is None and (other := next(iter(copy.store.list("", limit=1)), None)) is not None:
        raise _others(f"{copy.store.uri(other.name)} does not belong to a backup", _EMPTY)
    first = BackupEntry(table_id=table_id)
    head = head or copy.backups.extend(lambda head: None if head else first) or copy.backups.head()
    assert head is not None, "it was there or was appended"
    if head.body.table_id != table_id:
        raise _others(f"{output} has backups of another table", _EMPTY)
    return head


def _is_newer(one: BackupEntry, other: BackupEntry) -> bool:
    """Whether the walk of ``one`` came later. Two backups at the same time may end in the other order."""
    ends = [(entry.batch, -1 if entry.snapshot is None else entry.snapshot) for entry in (one, other)]
    return ends[0] > ends[1]


def _find_needed(copy: TableObjects) -> Callable[[str], bool]:
    """Whether a backup needs an object, or somebody has used the copy as a table. A backup that broke off has left others."""

    @cache
    def read() -> tuple[bool, list[BackupEntry]]:
        is_used = any(next(iter(copy.store.list(sign, limit=1)), None) for sign in _OF_A_TABLE)
        return is_used, [link.body for link in copy.backups.between(-1, copy.backups.newest_number() or 0)]

    def is_needed(name: str) -> bool:
        is_used, entries = read()
        number = copy.ledger.number(name) if name.startswith(copy.ledger.prefix) else None
        return is_used or any(
            name in one.files or name in one.metadata or (number is not None and number <= one.batch) for one in entries
        )

    return is_needed


def _choose(copy: TableObjects, address: str, number: int | None) -> Link[BackupEntry]:
    head = copy.backups.head()
    count = head.number if head else 0
    chosen = head if number is None else copy.backups.get(number)
    if chosen is None or chosen.number == 0:
        there = f"it has backups 1 to {count}" if count else "no backup to this address has ended"
        raise ConfigurationError(
            "no-backup",
            f"{address} has no {'backup' if number is None else f'backup {number}'}: {there}. Nothing was copied.",
            next="give the --output of `lakeupsert backup`" + (", and one of these numbers" if count else ""),
        )
    return chosen


_EMPTY_ZONE = "name an empty folder in `processed`"
_PARTED = (
    "give another --output, which is empty: after damage that was repaired, or after `recover --number`, a table is another one "
    "than its earlier backups"
)
_EMPTY = "give an --output that is empty, or that has backups of this table"


def _others(found: str, advice: str) -> RefusedError:
    return RefusedError(
        "not-a-backup", f"{found}. Nothing that was there is changed, and backups there stay whole.", next=advice
    )
