"""Erase keys: in the end no object of the table has their values, and the last call proves it.

Reads     all that has key columns, once to find the keys and once more to see what is left
Writes    a record; rewritten partitions and their snapshot; redacted quarantine files; a ledger entry with the key index, if
          that had a key. It deletes packs of statements and, with `landing`, landing files that had a key; then it vacuums
Repeat    needed, until nothing is left: versions are kept for 7 days after the last snapshot that shows them. Safe at any point

    find -> record -> rewrite partitions -> publish -> statements, quarantine, key index, landing -> vacuum -> find again
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace

import msgspec

from lakeupsert import clock
from lakeupsert.engine.hosts import LocalHost
from lakeupsert.errors import RefusedError
from lakeupsert.operations.erase.find import Found, Keys, find
from lakeupsert.operations.erase.redact import finish, redact
from lakeupsert.operations.reprocess import ReprocessOptions, reprocess_and_publish
from lakeupsert.operations.statement.key_list import read_keys
from lakeupsert.operations.vacuum import ORPHANS_KEPT, vacuum
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.standing import unpublished
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.table_keys import name_rebuilt_index
from lakeupsert.rows.datafiles import to_bytes
from lakeupsert.storage import SCRATCH, ObjectInfo, ObjectStore, open_store
from lakeupsert.table.chain import Link
from lakeupsert.table.erasure import Erasure, read_erasures, write_erasure
from lakeupsert.table.layout import DATA, GROUPS, HOME, KEYS, PARTITIONS, QUARANTINE, STATEMENT_ROWS, TableObjects
from lakeupsert.table.snapshot import Snapshot

_WITH_VALUES = (PARTITIONS, GROUPS, DATA, STATEMENT_ROWS, KEYS, QUARANTINE, f"{HOME}/units/", f"{SCRATCH}/")
_PUBLISHED = ("_delta_log/", f"{HOME}/iceberg/")
OF_VACUUM = "objects that nobody needs, of the time before: `vacuum` keeps them for a while, versions for 7 days"
OF_PUBLISHERS = (
    "objects of publishers, of the time before: later nights replace them, "
    "and `lakeupsert publish --to NAME --reset` does now"
)


@dataclass(frozen=True)
class EraseOptions:
    """The keys to erase, and the reason.

    Attributes:
        keys: a file with a list of keys, as for `StatementOptions.keys`.
        reason: for the record.
        landing: delete landing files that have a key, too.
        dry: only look where the keys are.
        stop: once set, no further partition is rewritten.
    """

    keys: str
    reason: str
    _: KW_ONLY
    landing: bool = False
    dry: bool = True
    stop: Stop | None = None
    progress: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class EraseResult:
    """The objects that had the keys, and how many are left.

    Attributes:
        keys: how many were listed.
        partitions: those whose newest version had a key, each with how many.
        statements, quarantine, landing: objects that had one: packs of statements, quarantine files, landing files.
        older: partitions in which only an older snapshot or a later command needs files with a key, and who.
        deleted: how many objects the vacuum deleted.
        left: why objects are still there that have a key or may have one, each with how many.
        record: the name of the record of this call; None if it was dry.
    """

    keys: int
    partitions: dict[str, int]
    statements: tuple[str, ...]
    quarantine: tuple[str, ...]
    landing: tuple[str, ...]
    older: dict[str, str]
    deleted: int = 0
    left: dict[str, int] | None = None
    record: str | None = None

    @property
    def is_erased(self) -> bool:
        """Whether nothing is left."""
        return self.left == {}


def erase(table: OpenTable, options: EraseOptions) -> EraseResult:
    """Erase the keys of a list, as far as that is possible today.

    Raises:
        ConfigurationError: the file is not a list of keys, or there is no table.
        RefusedError: batches are not published yet.
        DamagedTableError: an object is missing or damaged, so nobody knows whether it has a key.
    """
    history, store, progress = table.history, table.resources.store, options.progress
    keys = Keys(read_keys(options.keys, history.existing_spec()).rows, history.existing_spec())
    if waiting := unpublished(history, history.last_snapshot(), history.ledger_head()):
        raise RefusedError(
            "unpublished-batch",
            f"Table {table.name!r}: {len(waiting)} partitions, for example {min(waiting)}, have batches that are not published "
            "yet. Their rows would not be searched. Nothing was changed.",
            next="run `lakeupsert run`, then the same command again",
        )
    if not options.dry:
        finish(store)
    found = find(table, keys, landing=options.landing, progress=progress)
    result = EraseResult(
        keys.rows.num_rows,
        {partition: rows.num_rows for partition, rows in found.partitions.items()},
        tuple(sorted(found.statements)),
        tuple(sorted(found.quarantine)),
        tuple(sorted(found.landing)),
        found.older,
    )
    if options.dry:
        return result
    record, begun = None, _erasure(keys, options.reason, result, found.needed.batch)
    if found.is_there or not _last_found(store, keys):
        record = write_erasure(store, begun)
    if found.partitions:
        erased = {partition: to_bytes(rows.combine_chunks()) for partition, rows in found.partitions.items()}
        chosen = ReprocessOptions(erased.__contains__, erased=erased, stop=options.stop, progress=progress)
        reprocess_and_publish(table, chosen)
    for name in sorted(found.quarantine):
        redact(store, name, keys, history.reading)
    if found.keys:
        progress("rebuilding the key index")
        name_rebuilt_index(table, LocalHost())
    store.delete(sorted(found.statements))
    if found.landing:
        open_store(table.settings.landing).delete(sorted(found.landing))
    progress("deleting what nobody needs now")
    strict = msgspec.structs.replace(table.settings, keep_snapshots=1, superseded_retention="0s")
    deleted = vacuum(OpenTable(table.name, strict, resources=table.resources), dry=False, progress=progress)
    if found.is_there:  # once more: what is older than this may have been written from what had a key
        write_erasure(store, begun)
    progress("looking again")
    left = _left(table, find(table, keys, landing=options.landing, progress=progress), _last_found(store, keys))
    if not left:
        record = write_erasure(store, msgspec.structs.replace(begun, at=clock.now().isoformat(), ended=True))
    return replace(result, deleted=len(deleted.garbage), left=left, record=record)


def _erasure(keys: Keys, reason: str, result: EraseResult, batch: int) -> Erasure:
    return Erasure(
        at=clock.now().isoformat(),
        reason=reason,
        batch=batch,
        columns=keys.columns,
        keys=keys.hashes,
        partitions=tuple(sorted(result.partitions)),
        statements=result.statements,
        quarantine=result.quarantine,
        landing=result.landing,
    )


def _last_found(store: ObjectStore, keys: Keys) -> float:
    """When the last call found one of the keys, by the store's clock; 0: none has."""
    return max(
        (
            found.modified
            for found, one in read_erasures(store)
            if one.is_of(keys.columns, keys.hashes) and not one.ended
        ),
        default=0,
    )


def _left(table: OpenTable, found: Found, last_found: float) -> dict[str, int]:
    """Why objects with one of the keys are still there, or objects that may have one, each with how many."""
    snapshot = table.history.last_snapshot()
    tags = {f"snapshot {number}": name for name, number in (snapshot.body.tags if snapshot else {}).items()}
    left = Counter[str]()
    left["partitions of the newest snapshot: rows came again, or no worker has rewritten them yet"] = len(
        found.partitions
    )
    for needed_by in found.older.values():
        tag = tags.get(needed_by)
        left[f"partitions of {needed_by}" + (f", which has the tag {tag}" if tag else "")] += 1
    for kind in ("statements", "keys", "quarantine", "landing"):
        left[f"objects ({kind}): they came while this call ran"] = len(getattr(found, kind))
    left.update(found.unsearched.values())
    needed = found.needed.files | found.needed.metadata
    for other in _others(table.resources.store):
        is_published = other.name.startswith(_PUBLISHED)
        if other.name in needed or other.modified > last_found + (0 if is_published else ORPHANS_KEPT.total_seconds()):
            continue
        if _is_newer(table.history.objects, snapshot, other.name):
            continue
        left[OF_PUBLISHERS if is_published else OF_VACUUM] += 1
    return dict(+left)


def _is_newer(objects: TableObjects, snapshot: Link[Snapshot] | None, name: str) -> bool:
    """Whether it is a version of a partition that came after the one that readers see, which has no key."""
    partition, _, _ = name.removeprefix(PARTITIONS).rpartition("/")
    shown = snapshot.body.partitions.get(partition) if snapshot and name.startswith(PARTITIONS) else None
    return shown is not None and objects.partition(partition).number(name) > shown.version


def _others(store: ObjectStore) -> Iterator[ObjectInfo]:
    """Objects of the table of kinds that have values of rows."""
    for found in (*store.list(""), *store.list(f"{SCRATCH}/")):
        is_base = not found.name.startswith(f"{HOME}/") and TableObjects.start_of(found.name) is not None
        if is_base or found.name.startswith((*_WITH_VALUES, *_PUBLISHED)):
            yield found
