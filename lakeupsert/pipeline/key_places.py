"""Settle a batch against the key index of a table whose keys are unique in the whole of it, and make that index anew.

Reads     the ledger's headers, which name the index and what batches changed in it; what the batch appended
Writes    objects of the index, deletes where keys were before; the batch's ledger entry names them, and commits them with it
Repeat    safe: the index at a ledger number is a function of the ledger, so whoever lost the race for the next one looks again

The index at N is that of the last entry which has one, and the changes of every entry since. A restore is in none of them: behind
it, and where an object of the index is damaged, it is made anew of all that counts at N, key and ordering columns alone.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from lakeupsert.engine.keyindex import Settled, Source, Writing, made_anew, settle
from lakeupsert.errors import DamagedTableError, RefusedError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.steps import step_to
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import KeyIndex, LedgerEntry, Touched
from lakeupsert.table.manifest import DataFile
from lakeupsert.table.spec import TableSpec

log = logging.getLogger(__name__)

MOST_CHANGED = 1 / 4
"""Share of the index that changes may have before it is written anew. More: who appends reads more. Less: it writes more."""
MOST_DELTAS = 32
"""Batches whose changes are read one by one, at most: each is an object or more."""


@dataclass(frozen=True)
class SettledBatch:
    """A batch's entry, settled by the index, and the objects that were written for it."""

    entry: LedgerEntry
    objects: frozenset[str]


def settle_keys(
    table: OpenTable,
    spec: TableSpec,
    head: Link[LedgerEntry] | None,
    entry: LedgerEntry,
    progress: Callable[[str], None] = lambda text: None,
) -> SettledBatch | None:
    """``entry`` behind ``head``; it can be appended behind no other. None where it lost that place and the index with it.

    Raises DamagedTableError where an appended file can't be read, or nothing is left of which the index could be made.
    """
    number = head.number if head else 0
    to = Writing(table.store, spec, entry.spec_version, entry.batch_id, head.number + 1 if head else 0)
    try:
        return _by_index(table, to, entry, number, progress)
    except (DamagedTableError, RefusedError):
        if _is_overtaken(table, number):
            # A vacuum took what the newer entry replaced, or behind its fence what this append wrote; or partitions are merged
            # beyond the head by now, and what they hold is not of one number.
            return None
        raise


def _by_index(
    table: OpenTable, to: Writing, entry: LedgerEntry, number: int, progress: Callable[[str], None]
) -> SettledBatch:
    index = named_index(table.headers(number) if to.start else [])
    if index is not None:
        progress("looking keys up in the key index")
        try:
            return _settle(to, entry, number, index, fold=_is_due(index))
        except DamagedTableError as e:
            if _is_overtaken(table, number):
                raise
            log.warning("the key index is made anew: %s", e.message)
    progress("making the key index anew")
    files = made_anew(to, _sources(table, number), _rows(table, number))
    made = _settle(to, entry, number, (files, ()), fold=False)
    named = msgspec.structs.replace(made.entry, index=KeyIndex(up_to=number, files=files))
    return SettledBatch(named, made.objects | {f.name for f in files})


def _is_overtaken(table: OpenTable, number: int) -> bool:
    newer = table.objects.ledger.head()
    return newer is not None and newer.number > number


def adopted_index(table: OpenTable, spec: TableSpec, touched: dict[str, Touched]) -> KeyIndex:
    """The index of adopted files. Raises RefusedError where they hold a key in several partitions."""
    sources = [Source(partition, 0, t.files, unsettled=True) for partition, t in touched.items()]
    files = made_anew(Writing(table.store, spec, 0, "", 0), sources, sum(t.rows for t in touched.values()))
    return KeyIndex(up_to=0, files=files)


def named_index(entries: list[LedgerEntry]) -> tuple[tuple[DataFile, ...], tuple[DataFile, ...]] | None:
    """Files of the index that ``entries``, all there are, name, and of what changed since; None where it must be made anew."""
    deltas: list[DataFile] = []
    for number in range(len(entries) - 1, -1, -1):
        entry = entries[number]
        if entry.index is not None and entry.index.up_to == number:  # adopted files are in their own entry's
            return entry.index.files, tuple(reversed(deltas))
        if entry.restored is not None:
            return None
        deltas += reversed(entry.keys)
        if entry.index is not None:  # that of before the entry
            return entry.index.files, tuple(reversed(deltas))
    return (), tuple(reversed(deltas))


def _is_due(index: tuple[tuple[DataFile, ...], tuple[DataFile, ...]]) -> bool:
    files, deltas = index
    changed = sum(f.rows for f in deltas)
    return len(deltas) > MOST_DELTAS or changed > MOST_CHANGED * sum(f.rows for f in files)


def _settle(
    to: Writing,
    entry: LedgerEntry,
    number: int,
    index: tuple[tuple[DataFile, ...], tuple[DataFile, ...]],
    *,
    fold: bool,
) -> SettledBatch:
    settled: Settled = settle(to, entry.touched, *index, fold=fold)
    entry = msgspec.structs.replace(
        entry,
        touched=settled.touched,
        keys=settled.keys,
        index=None if settled.index is None else KeyIndex(up_to=number, files=settled.index),
    )
    return SettledBatch(entry, settled.objects)


def _rows(table: OpenTable, number: int) -> int:
    """How many rows ever came, which is about how many the index may have, or more."""
    return sum(entry.rows_read for entry in table.headers(number))


def _sources(table: OpenTable, number: int) -> Iterator[Source]:
    """What counts at a ledger number: of each partition what is stored, and the batches that are to be merged.

    Where a partition is merged beyond it by now, the ledger is ahead, and what is made of this can't be appended.
    """
    entries = table.entries(-1, number)
    for partition in sorted({p for link in entries for p in link.body.touched}):
        head = table.objects.partition(partition).head()
        step = step_to(table, head, partition, head.body.merged if head else 0, number)
        for bucket in step.base.buckets:
            yield Source(partition, 0, bucket.data, unsettled=not bucket.settled)
            yield Source(partition, 0, bucket.tombstones)
        for link in step.pending:
            if link.number in step.counting:
                yield Source(partition, link.number, link.body.touched[partition].files)
