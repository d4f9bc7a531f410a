"""Settle a batch against the key index of a table with `key_scope = "table"`, and rebuild that index.

Reads     the ledger's headers, which name the index and its changes by batch; the files that the batch appended
Writes    objects of the index, deletes in partitions that a key has left, records that brought their key alone, or a
          quarantine file with some; the batch's ledger entry names and commits them
Repeat    safe: the index at a ledger number is a function of the ledger; whoever loses the race for the next number starts again

The index at N is that of the last entry that names one, and the changes of every entry since. No index includes a restore: behind
one, or if an object of the index is damaged, it is rebuilt from the key and ordering columns of everything that counts at N.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert import clock
from lakeupsert.engine.attempts import all_or_raise, attempt
from lakeupsert.engine.hosts import Host, map_counted
from lakeupsert.engine.keys.carry import Leaving, Source, UnreadableError, carried_rows, read_leaving
from lakeupsert.engine.keys.index import HASH, IndexTarget, StoredIndex, add_hashes, by_partition
from lakeupsert.engine.keys.lives import UnknownKeys
from lakeupsert.engine.keys.rebuild import rebuild_index
from lakeupsert.engine.keys.refused import quarantine_refused
from lakeupsert.engine.keys.settle import find_refused, settle
from lakeupsert.errors import DamagedTableError, RefusedError
from lakeupsert.landing.partitions import UNPLACED
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.merge.state import state_at
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.resources import Resources
from lakeupsert.rows.arrays import Mask, Rows
from lakeupsert.rows.buckets import may_be_in
from lakeupsert.rows.floor import PARTITION
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import KeyIndex, LedgerEntry, Reason, fence_behind
from lakeupsert.table.manifest import BucketEntry, DataFile, Manifest
from lakeupsert.table.spec import FILE, OF_EARLIER_BATCH, TableSpec

log = logging.getLogger(__name__)

MOST_CHANGED = 1 / 4
"""The index is rewritten once its changes exceed this share of it. More: an append reads more. Less: it writes more."""
MOST_DELTAS = 32
"""The index is rewritten once more batches than these have changed it: each is at least one object to read."""


@dataclass(frozen=True)
class SettledBatch:
    """A batch's entry after it was settled against the index, and the objects that were written for it.

    ``examples``: one row for each reason why rows were refused, for people.
    """

    entry: LedgerEntry
    objects: frozenset[str]
    examples: Mapping[str, str] = field(default_factory=dict)


def settle_keys(
    table: OpenTable,
    host: Host,
    spec: TableSpec,
    head: Link[LedgerEntry] | None,
    entry: LedgerEntry,
    progress: Callable[[str], None] = lambda text: None,
) -> SettledBatch | None:
    """``entry``, settled as the one behind ``head``; it can't be appended behind another one. None if ``head`` is not the head
    any more, and what it was settled against is gone.

    ``host`` rebuilds the index. Raises DamagedTableError if an appended file can't be read, or if the index can't be rebuilt.
    """
    number = head.number if head else 0
    to = IndexTarget(table.resources.store, spec, entry.spec_version, entry.batch_id, head.number + 1 if head else 0)
    try:
        return _by_index(table, host, to, entry, number, progress)
    except (DamagedTableError, RefusedError):
        if _is_overtaken(table.history.objects, number):
            # A vacuum deleted what the newer entry replaced, or behind its fence what this append wrote. Or partitions were
            # merged beyond the head meanwhile, so that their contents belong to different ledger numbers.
            return None
        raise


def _by_index(
    table: OpenTable, host: Host, to: IndexTarget, entry: LedgerEntry, number: int, progress: Callable[[str], None]
) -> SettledBatch:
    index = named_index(table.history.headers(number) if to.start else [])
    if index is not None:
        progress("looking keys up in the key index")
        try:
            return _settle(table, host, to, entry, number, index, fold=_is_due(index))
        except DamagedTableError as e:
            if _is_overtaken(table.history.objects, number):
                raise
            log.warning("the key index is rebuilt: %s", e.message)
    progress("rebuilding the key index")
    files = rebuild_index(
        to, host, _sources(table.history, number), _rows(table.history, number), table.resources.discard
    )
    settled = _settle(table, host, to, entry, number, StoredIndex(files), fold=False)
    entry = msgspec.structs.replace(settled.entry, index=KeyIndex(up_to=number, files=files))
    return replace(settled, entry=entry, objects=settled.objects | {f.name for f in files})


def name_rebuilt_index(table: OpenTable, host: Host) -> None:
    """Append a fence that stops nobody and names the key index, rebuilt on ``host``."""
    history, resources = table.history, table.resources
    snapshot = history.last_snapshot()

    def build(head: Link[LedgerEntry] | None) -> LedgerEntry:
        assert head is not None, "the index is of a table that exists"
        version, known = head.body.spec_version, snapshot.number if snapshot else None
        to = IndexTarget(resources.store, history.spec(version), version, clock.new_id(), head.number + 1)
        sources = _sources(history, head.number)
        files = rebuild_index(to, host, sources, _rows(history, head.number), resources.discard)
        index = KeyIndex(up_to=head.number, files=files)
        return msgspec.structs.replace(fence_behind(head.body, -1, known), index=index)

    history.objects.ledger.extend(build)


def _is_overtaken(objects: TableObjects, number: int) -> bool:
    objects.held.forget()
    newest = objects.ledger.newest_number()
    return newest is not None and newest > number


def first_index(
    resources: Resources, host: Host, spec: TableSpec, buckets: Mapping[str, Sequence[BucketEntry]]
) -> KeyIndex:
    """The index of what a table begins with, made on ``host``. Raises RefusedError if a key has rows in several partitions."""
    sources = itertools.chain.from_iterable(_of_bucket(p, bucket) for p, of in buckets.items() for bucket in of)
    rows = sum(bucket.counters.appended for of in buckets.values() for bucket in of)
    to = IndexTarget(resources.store, spec, 0, "", 0)
    return KeyIndex(up_to=0, files=rebuild_index(to, host, sources, rows, resources.discard))


def named_index(entries: list[LedgerEntry]) -> StoredIndex | None:
    """The index that the ledger's ``entries`` name; None if it must be rebuilt."""
    deltas: list[DataFile] = []
    for number in range(len(entries) - 1, -1, -1):
        entry = entries[number]
        if entry.index is not None and entry.index.up_to == number:  # entry 0: with the files that it adopted
            return StoredIndex(entry.index.files, tuple(reversed(deltas)))
        if entry.restored is not None:
            return None
        deltas += reversed(entry.keys)
        if entry.index is not None:  # the index as it was before this entry
            return StoredIndex(entry.index.files, tuple(reversed(deltas)))
    return StoredIndex((), tuple(reversed(deltas)))


def _is_due(index: StoredIndex) -> bool:
    changed = sum(f.rows for f in index.deltas)
    return len(index.deltas) > MOST_DELTAS or changed > MOST_CHANGED * sum(f.rows for f in index.files)


def _settle(
    table: OpenTable, host: Host, to: IndexTarget, entry: LedgerEntry, number: int, index: StoredIndex, *, fold: bool
) -> SettledBatch:
    unknown = _unknown_keys(table, to, entry, number)
    carry = partial(_carry, table, host, to.spec, number)
    settle_with = partial(settle, to, entry.touched, index, fold=fold, carry=carry, unknown=unknown)
    try:
        settled = settle_with()
    except UnreadableError as e:
        for partition, error in e.why.items():
            log.warning("records that move keys from %s are in quarantine: %s", partition, error.message)
        settled = settle_with(unreadable=e.why)
    entry = msgspec.structs.replace(
        entry,
        touched=settled.touched,
        keys=settled.keys,
        index=None if settled.index is None else KeyIndex(up_to=number, files=settled.index),
        unknown_deletes=settled.unknown,
    )
    batch = SettledBatch(entry, settled.objects)
    return _with_refused(to, batch, settled.refused) if settled.refused else batch


def _carry(table: OpenTable, host: Host, spec: TableSpec, number: int, moves: Rows) -> Rows:
    """What is known at a ledger number of keys that move: `carried_rows`. Raises UnreadableError.

    This process reads all partitions together. If a file is damaged, or on a host with tasks, each partition is read by itself.
    """
    parts, leaving = by_partition(add_hashes(moves, spec), spec), []
    heads = table.history.heads([partition for partition, _ in parts])
    for partition, keys in parts:
        hashes, sources = keys[HASH].to_numpy(), _sources_of(table.history, partition, heads.get(partition), number)
        leaving.append(Leaving(keys, tuple(one for one in sources if may_be_in(hashes, one.file))))
    sizes = [float(sum(source.file.bytes for source in one.sources)) for one in leaving]
    store = table.resources.store
    read = partial(read_leaving, store, spec)
    found = [attempt(read, leaving)] if host.in_process else []
    if not found or isinstance(found[0], DamagedTableError):
        found = [*map_counted(host, store, read, [[one] for one in leaving], sizes)]
        errors = {partition: error for (partition, _), error in zip(parts, found, strict=True)}
        why = {partition: error for partition, error in errors.items() if isinstance(error, DamagedTableError)}
        if why and not _is_overtaken(table.history.objects, number):
            raise UnreadableError(why)
    return carried_rows(spec, pa.concat_tables(all_or_raise(found)), pa.concat_tables([keys for _, keys in parts]))


def _unknown_keys(table: OpenTable, to: IndexTarget, entry: LedgerEntry, number: int) -> UnknownKeys | None:
    """What becomes of deletes that bring an unknown key alone; None if the batch has no record without a partition."""
    if UNPLACED not in entry.touched:
        return None
    home = max(entry.touched.keys() - {UNPLACED}, default=None) or (
        _last_partition(table.history, number) if to.start else None
    )
    if home is None:
        rows = entry.touched[UNPLACED].rows
        raise RefusedError(
            "no-partition-yet",
            f"The batch for table {table.name!r} has {rows:,} rows, and all have only their key. The table has no partition "
            "yet, so none of the keys has a row. Nothing was committed.",
            next="land the rows first, in this batch or an earlier one, then run `lakeupsert run` again",
        )
    return UnknownKeys(home, table.settings.unknown_deletes == "keep")


def _last_partition(history: History, number: int) -> str | None:
    """A partition of the last batch that touches one: the ledger may have many entries, and each is a request."""
    entries = (history.entries(at - 1, at)[0].body for at in range(number, -1, -1))
    return next((max(entry.touched) for entry in entries if entry.touched), None)


def _with_refused(to: IndexTarget, batch: SettledBatch, refused: Mapping[Reason, Rows]) -> SettledBatch:
    """``batch`` with these rows in quarantine."""
    entry = batch.entry
    reports = quarantine_refused(to, entry, refused)
    counts: Counter[str] = Counter(entry.quarantined)
    counts.update({reason: rows.num_rows for reason, rows in refused.items()})
    orphans = sum(int(np.sum(rows[FILE].to_numpy() == OF_EARLIER_BATCH)) for rows in refused.values())
    entry = msgspec.structs.replace(
        entry,
        rows_read=entry.rows_read + orphans,
        orphans=orphans,
        quarantined=dict(sorted(counts.items())),
        quarantine=(*entry.quarantine, *(report.file for report in reports)),
    )
    return SettledBatch(entry, batch.objects | {report.file.name for report in reports}, reports[0].examples)


def find_refused_again(
    table: OpenTable, spec: TableSpec, head: Link[LedgerEntry] | None, rows: Rows
) -> Mapping[Reason, Mask]:
    """Which accepted rows of a replay need no batch, since `settle_keys` would refuse them, by reason.

    It refuses more if they exclude each other, or if the index has to be rebuilt first, which a batch does.
    """
    unknown = UnknownKeys("", table.settings.unknown_deletes == "keep")
    may_refuse = not unknown.kept and pc.any(pc.equal(rows[PARTITION], UNPLACED)).as_py()
    if head is None or not spec.takes_key_alone or (spec.mode == "rows" and not may_refuse):
        return {}
    index = named_index(table.history.headers(head.number))
    if index is None:
        return {}
    try:
        return find_refused(table.resources.store, spec, index, rows, unknown)
    except DamagedTableError:  # the batch rebuilds the index, or a newer entry has replaced it
        return {}


def _rows(history: History, number: int) -> int:
    """How many rows ever came: about as many as the index has, or more."""
    return sum(entry.rows_read for entry in history.headers(number))


def _sources(history: History, number: int) -> Iterator[Source]:
    """What counts at a ledger number: for each partition its stored files, and its batches that are still to be merged.

    If a partition was merged beyond that number, the ledger has moved on too, and the entry made of this can't be appended.
    """
    for partition in sorted({p for link in history.entries(-1, number) for p in link.body.touched}):
        yield from _sources_of(history, partition, history.objects.partition(partition).head(), number)


def _sources_of(history: History, partition: str, head: Link[Manifest] | None, number: int) -> Iterator[Source]:
    state = state_at(history, partition, head, head.body.merged if head else 0, number)
    for bucket in state.base.buckets:
        yield from _of_bucket(partition, bucket)
    for link in state.counted:
        yield from _of_files(partition, link.number, link.body.touched[partition].files)


def _of_bucket(partition: str, bucket: BucketEntry) -> Iterator[Source]:
    yield from _of_files(partition, 0, bucket.data, unsettled=not bucket.settled)
    yield from _of_files(partition, 0, bucket.tombstones)


def _of_files(partition: str, age: int, files: Sequence[DataFile], *, unsettled: bool = False) -> Iterator[Source]:
    return (Source(partition, age, number, file, unsettled) for number, file in enumerate(files))
