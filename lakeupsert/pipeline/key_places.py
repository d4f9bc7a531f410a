"""Settle a batch against the key index of a table with `key_scope = "table"`, and rebuild that index.

Reads     the ledger's headers, which name the index and its changes by batch; the files that the batch appended
Writes    objects of the index, deletes in partitions that a key has left, deletes that brought their key alone, or a quarantine
          file with these; the batch's ledger entry names and commits them
Repeat    safe: the index at a ledger number is a function of the ledger; whoever loses the race for the next number starts again

The index at N is that of the last entry that names one, and the changes of every entry since. No index includes a restore: behind
one, or if an object of the index is damaged, it is rebuilt from the key and ordering columns of everything that counts at N.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.hosts import Host
from lakeupsert.engine.keyindex import IndexTarget, Settled, Source, UnknownKeys, find_known, rebuild_index, settle
from lakeupsert.engine.quarantine import QUARANTINE_SCHEMA, QuarantineWriter
from lakeupsert.errors import DamagedTableError, RefusedError
from lakeupsert.landing.formats.blocks import ArrowBlock
from lakeupsert.landing.partitions import UNPLACED
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.steps import step_to
from lakeupsert.rows.arrays import Mask, Rows
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.floor import PARTITION
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import KeyIndex, LedgerEntry, Touched
from lakeupsert.table.manifest import DataFile
from lakeupsert.table.spec import FILE, PLACE, TableSpec

log = logging.getLogger(__name__)

MOST_CHANGED = 1 / 4
"""The index is rewritten once its changes exceed this share of it. More: an append reads more. Less: it writes more."""
MOST_DELTAS = 32
"""The index is rewritten once more batches than these have changed it: each is at least one object to read."""


@dataclass(frozen=True)
class SettledBatch:
    """A batch's entry after it was settled against the index, and the objects that were written for it."""

    entry: LedgerEntry
    objects: frozenset[str]


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
    to = IndexTarget(table.store, spec, entry.spec_version, entry.batch_id, head.number + 1 if head else 0)
    try:
        return _by_index(table, host, to, entry, number, progress)
    except (DamagedTableError, RefusedError):
        if _is_overtaken(table, number):
            # A vacuum deleted what the newer entry replaced, or behind its fence what this append wrote. Or partitions were
            # merged beyond the head meanwhile, so that their contents belong to different ledger numbers.
            return None
        raise


def _by_index(
    table: OpenTable,
    host: Host,
    to: IndexTarget,
    entry: LedgerEntry,
    number: int,
    progress: Callable[[str], None],
) -> SettledBatch:
    index = named_index(table.headers(number) if to.start else [])
    if index is not None:
        progress("looking keys up in the key index")
        try:
            return _settle(table, to, entry, number, index, fold=_is_due(index))
        except DamagedTableError as e:
            if _is_overtaken(table, number):
                raise
            log.warning("the key index is rebuilt: %s", e.message)
    progress("rebuilding the key index")
    files = rebuild_index(to, host, _sources(table, number), _rows(table, number), table.discard)
    settled = _settle(table, to, entry, number, (files, ()), fold=False)
    entry = msgspec.structs.replace(settled.entry, index=KeyIndex(up_to=number, files=files))
    return SettledBatch(entry, settled.objects | {f.name for f in files})


def _is_overtaken(table: OpenTable, number: int) -> bool:
    newer = table.objects.ledger.head()
    return newer is not None and newer.number > number


def adopted_index(table: OpenTable, host: Host, spec: TableSpec, touched: dict[str, Touched]) -> KeyIndex:
    """The index of adopted files, made on ``host``. Raises RefusedError if a key has rows in several partitions."""
    sources = itertools.chain.from_iterable(
        _of_files(partition, 0, t.files, unsettled=True) for partition, t in touched.items()
    )
    rows = sum(t.rows for t in touched.values())
    to = IndexTarget(table.store, spec, 0, "", 0)
    return KeyIndex(up_to=0, files=rebuild_index(to, host, sources, rows, table.discard))


def named_index(entries: list[LedgerEntry]) -> tuple[tuple[DataFile, ...], tuple[DataFile, ...]] | None:
    """The files of the index, and of its changes since, that the ledger's ``entries`` name; None if it must be rebuilt."""
    deltas: list[DataFile] = []
    for number in range(len(entries) - 1, -1, -1):
        entry = entries[number]
        if entry.index is not None and entry.index.up_to == number:  # entry 0: with the files that it adopted
            return entry.index.files, tuple(reversed(deltas))
        if entry.restored is not None:
            return None
        deltas += reversed(entry.keys)
        if entry.index is not None:  # the index as it was before this entry
            return entry.index.files, tuple(reversed(deltas))
    return (), tuple(reversed(deltas))


def _is_due(index: tuple[tuple[DataFile, ...], tuple[DataFile, ...]]) -> bool:
    files, deltas = index
    changed = sum(f.rows for f in deltas)
    return len(deltas) > MOST_DELTAS or changed > MOST_CHANGED * sum(f.rows for f in files)


def _settle(
    table: OpenTable,
    to: IndexTarget,
    entry: LedgerEntry,
    number: int,
    index: tuple[tuple[DataFile, ...], tuple[DataFile, ...]],
    *,
    fold: bool,
) -> SettledBatch:
    unknown = _unknown_keys(table, to, entry, number)
    settled: Settled = settle(to, entry.touched, *index, fold=fold, unknown=unknown)
    entry = msgspec.structs.replace(
        entry,
        touched=settled.touched,
        keys=settled.keys,
        index=None if settled.index is None else KeyIndex(up_to=number, files=settled.index),
        unknown_deletes=settled.unknown,
    )
    if settled.refused:
        entry = _with_refused(to, entry, pa.concat_tables(settled.refused))
    return SettledBatch(entry, settled.objects | {f.name for f in entry.quarantine})


def _unknown_keys(table: OpenTable, to: IndexTarget, entry: LedgerEntry, number: int) -> UnknownKeys | None:
    """What becomes of deletes that bring an unknown key alone; None if the batch has no delete without a partition."""
    if UNPLACED not in entry.touched:
        return None
    links = table.entries(-1, number) if to.start else []
    partitions = entry.touched.keys() - {UNPLACED} or {p for link in links for p in link.body.touched}
    if not partitions:
        rows = entry.touched[UNPLACED].rows
        raise RefusedError(
            "no-partition-yet",
            f"The batch for table {table.name!r} has only deletes that bring their key alone: {rows:,} rows. The table has no "
            "partition yet, so there is nothing to delete. Nothing was committed.",
            next="land the rows first, in this batch or an earlier one, then run `lakeupsert run` again",
        )
    return UnknownKeys(max(partitions), table.settings.unknown_deletes == "keep")


def _with_refused(to: IndexTarget, entry: LedgerEntry, rows: Rows) -> LedgerEntry:
    """``entry`` with these deletes in quarantine. They are written as they landed, so that a replay knows them for deletes."""
    spec = to.spec
    given = {*spec.partition_by, *(spec.order_by if spec.stamped or spec.order_in_name else ())}
    columns = {name: rows[name].combine_chunks() for name in spec.tombstone_schema.names if name not in given}
    if spec.delete and spec.delete.column and spec.delete.values:
        columns[spec.delete.column] = pa.repeat(spec.delete.values[0], rows.num_rows)
    block = ArrowBlock(columns, rows[PLACE].to_numpy())
    every, paths = range(rows.num_rows), [file.path for file in entry.files]
    reason = "It is a delete that brings its key alone, and no record has come for the key (`unknown_deletes`)."
    refused = {
        "reason_code": ["unknown_key"] * rows.num_rows,
        "reason": [reason] * rows.num_rows,
        "file": [paths[file] for file in rows[FILE].to_pylist()],
        "position": rows[PLACE],
        "line": pa.nulls(rows.num_rows, pa.int64()),
        "raw": block.raw(every),
        "arrow": block.arrow(every),
    }
    schema = pa.schema([field for field in QUARANTINE_SCHEMA if field.name != "batch"])
    with QuarantineWriter(to.store, to.start, to.footer("quarantine")) as out:
        out.write(pa.table(refused, schema=schema))
    quarantined = {**entry.quarantined, "unknown_key": rows.num_rows}
    return msgspec.structs.replace(
        entry,
        quarantined=dict(sorted(quarantined.items())),
        quarantine=(*entry.quarantine, *(report.file for report in out.reports())),
    )


def find_placed(table: OpenTable, spec: TableSpec, head: Link[LedgerEntry] | None, rows: Rows) -> Mask:
    """Which rows of a replay get a partition. If deletes of unknown keys are refused, others need a key with a record.

    If the index has to be rebuilt first, which the next append does, only those that name one.
    """
    alone = as_mask(pc.equal(rows[PARTITION], UNPLACED))
    if not alone.any() or table.settings.unknown_deletes == "keep":
        return np.ones(rows.num_rows, bool)
    index = named_index(table.headers(head.number)) if head else None
    if index is not None:
        alone[alone] = ~find_known(table.store, spec, *index, rows.filter(pa.array(alone)))
    return ~alone


def _rows(table: OpenTable, number: int) -> int:
    """How many rows ever came: about as many as the index has, or more."""
    return sum(entry.rows_read for entry in table.headers(number))


def _sources(table: OpenTable, number: int) -> Iterator[Source]:
    """What counts at a ledger number: for each partition its stored files, and its batches that are still to be merged.

    If a partition was merged beyond that number, the ledger has moved on too, and the entry made of this can't be appended.
    """
    entries = table.entries(-1, number)
    for partition in sorted({p for link in entries for p in link.body.touched}):
        head = table.objects.partition(partition).head()
        step = step_to(table, head, partition, head.body.merged if head else 0, number)
        for bucket in step.base.buckets:
            yield from _of_files(partition, 0, bucket.data, unsettled=not bucket.settled)
            yield from _of_files(partition, 0, bucket.tombstones)
        for link in step.pending:
            if link.number in step.active:
                yield from _of_files(partition, link.number, link.body.touched[partition].files)


def _of_files(partition: str, age: int, files: Sequence[DataFile], *, unsettled: bool = False) -> Iterator[Source]:
    return (Source(partition, age, number, file, unsettled) for number, file in enumerate(files))
