"""Full extracts: batches whose missing keys are deleted. What refuses one, its ledger entry, and which rows stay in spite of it.

The merge deletes the keys: `floor.find_missing_keys`.

Reads     the entries of the ledger since the last snapshot
Writes    nothing
Repeat    safe
"""

from collections.abc import Collection, Sequence
from functools import cache

import msgspec

from lakeupsert.engine.reports import Report, Written
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.phrases import count
from lakeupsert.pipeline.append.discover import AppendOptions, Ground
from lakeupsert.pipeline.declared import Declaration
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.rows.floor import greatest_floor, rank_floors
from lakeupsert.table.layout import partition_name, partition_texts
from lakeupsert.table.ledger import NOTHING, FullExtract, LedgerEntry, Scope, active_batches
from lakeupsert.table.manifest import Changes
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import TableSpec

MOST_SHRINKING = 0.4
"""By what share a full extract may have fewer rows than are stored, unless it may shrink the table."""

NO_EXTRACT = "no landing file is new, so there is no full extract and no key is deleted; a file counts once"


def newer_than_extract(declaration: Declaration, changes: Changes) -> tuple[str, ...]:
    """A warning if a snapshot with these ``changes`` shows rows that a full extract lacks."""
    stay = changes.newer_than_extract
    if not stay:
        return ()
    one = stay == 1
    remedy = f'set `full_extract = "replace"` in [tables.{declaration.name}] before the next extract'
    if declaration.settings.history or declaration.settings.ties == "content":
        remedy = "land deletes of these keys with a greater order"
    return (
        f"{count(stay, 'row')} of table {declaration.name!r} {'stays' if one else 'stay'}, although the full extract lacks "
        f"{'its key' if one else 'their keys'}: {'its' if one else 'their'} order is above the greatest of the extract. If the "
        f"extract is right, {remedy}.",
    )


def refuse_full_extract(declaration: Declaration) -> None:
    """Raises ConfigurationError if the table's settings do not support full extracts."""
    name = declaration.name
    if declaration.settings.key_scope == "table":
        raise ConfigurationError(
            "full-extract-of-keys",
            f'Table {name!r} has `key_scope = "table"`, which does not support full extracts: keys that the extract lacks '
            "would stay in the key index. Nothing was done.",
            next="append the files without --full, and send deletes for the missing keys",
        )
    if declaration.settings.mode == "columns":
        raise ConfigurationError(
            "full-extract-of-columns",
            f'Table {name!r} has `mode = "columns"`, which does not support full extracts yet: keys that the extract lacks '
            "can't be deleted there. Nothing was done.",
            next="append the files without --full, and send deletes for the missing keys",
        )


def refuse_part_of_extract(name: str, ground: Ground, changed: Sequence[str]) -> None:
    """Raises RefusedError if some file of the extract would not be taken: its keys would be deleted."""
    why = [f"{path} changed or vanished while it was read" for path in changed]
    why += [
        f"{f.path} has the content that an earlier batch took under this name, and counts once" for f in ground.seen
    ]
    why += ground.warnings
    if why:
        more = f" (and {len(why) - 1} more)" if len(why) > 1 else ""
        raise RefusedError(
            "full-extract-incomplete",
            f"Full extract for table {name!r}: {why[0]}{more}. The keys of the files left out would be deleted. Nothing "
            "was committed.",
            next="land the whole extract under new file names and run the same command again; or append without --full",
        )


def refuse_extract_again(ground: Ground) -> None:
    """Raises RefusedError if a withdrawn full extract would be taken again as a batch like others."""
    inputs = {(i.path, i.size) for i in ground.inputs}
    for entry in ground.entries:
        if entry.full and any((f.path, f.size) in inputs for f in entry.files):
            raise RefusedError(
                "full-extract-incomplete",
                f"Batch {entry.batch_id} was a full extract ({entry.full.scope}) before a restore withdrew it. Without --full "
                "its files would be taken as ordinary rows. Nothing was committed.",
                next=f"run `lakeupsert append --again --full {entry.full.scope}` if no other batch is withdrawn; else "
                "land the files that are wanted under other names",
            )


def refuse_other_than_one_batch(ground: Ground) -> None:
    """Raises RefusedError if several withdrawn batches, or a part of one, would be taken again as one full extract."""
    paths = {i.path for i in ground.inputs}
    if any(paths == {f.path for f in entry.files} for entry in ground.entries):
        return
    raise RefusedError(
        "full-extract-incomplete",
        f"{count(len(paths), 'withdrawn file')} would be taken as one full extract, but no withdrawn batch had exactly these "
        "files: it would delete or restore other keys than the extract did then. Nothing was committed.",
        next="if the folders of the landing zone have dates, take one batch after the other with --received-from and "
        "--received-to; otherwise land the files that you want under other names",
    )


def full_extract_entry(
    table: OpenTable,
    spec: TableSpec,
    ground: Ground,
    options: AppendOptions,
    entry: LedgerEntry,
    reports: Sequence[Report],
) -> LedgerEntry:
    """``entry`` as a full extract, which touches every partition in its scope. Raises RefusedError if it may be incomplete."""
    assert options.full is not None, "the batch is a full extract"
    _refuse_quarantined(table.name, entry)
    snapshot = table.history.last_snapshot()  # another process may have published while the rows were read
    shown = snapshot.body if snapshot else None
    last = ground.head.number if ground.head else -1
    scope = partitions_in_scope(table.history, spec, options.full, entry.touched, shown, last)
    touched = {partition: entry.touched.get(partition, NOTHING) for partition in sorted(scope)}
    written = [r for r in reports if isinstance(r, Written)]
    _refuse_shrinking(table.name, options, touched.keys(), sum(r.live for r in written), shown)
    orders = [r.order for r in written if r.order]
    order = greatest_floor(orders, spec.tombstone_schema.empty_table(), spec)
    assert order is not None, "it has rows"
    hashed = options.full == "partitions" and bool(spec.hash_columns)
    full = FullExtract(
        scope=options.full,
        order=order,
        replaces=table.settings.full_extract == "replace",
        within=tuple(sorted({_without_hashes(spec, partition) for partition in touched})) if hashed else (),
    )
    return msgspec.structs.replace(entry, touched=touched, full=full)


def _refuse_quarantined(name: str, entry: LedgerEntry) -> None:
    if entry.quarantined:
        reasons = ", ".join(f"{n} {reason}" for reason, n in entry.quarantined.items())
        raise RefusedError(
            "full-extract-incomplete",
            f"Full extract for table {name!r}: {entry.rows_quarantined} of {entry.rows_read} rows would be quarantined "
            f"({reasons}), and their keys deleted. Nothing was committed.",
            next=f"look at them (`lakeupsert quarantine {entry.quarantine[0].name}`), then correct these rows or files in the "
            "landing zone and run the same command again; or append without --full",
        )
    if not entry.rows_appended:
        raise RefusedError(
            "empty-full-extract",
            f"Full extract for table {name!r}: there is no row in its {count(len(entry.files), 'file')}. Nothing was "
            "committed.",
            next="find out why the files are empty; remove them from the landing zone, or append them without --full",
        )


def partitions_in_scope(
    history: History, spec: TableSpec, scope: Scope, named: Collection[str], shown: Snapshot | None, last: int
) -> set[str]:
    """The partitions of a full extract behind ledger number ``last``, with those in which it has no row.

    A hash does not limit a scope: an extract of a date is of all partitions of that date, wherever the hash puts its keys.

    Args:
        named: the partitions that its rows are in.
    """
    if scope == "partitions" and not spec.hash_columns:
        return {*named}
    since = history.entries(shown.batch if shown else -1, last)
    stored = {*(shown.partitions if shown else ()), *(p for link in since for p in link.body.touched)}
    if scope == "partitions":
        within = {_without_hashes(spec, partition) for partition in named}
        stored = {partition for partition in stored if _without_hashes(spec, partition) in within}
    return {*named, *stored}


def _without_hashes(spec: TableSpec, partition: str) -> str:
    """The name of a partition without its hashes, the same for all partitions that differ in nothing else."""
    hashed = {one.column for one in spec.hash_columns}
    rest = {column: text for column, text in partition_texts(partition).items() if column not in hashed}
    return partition_name(rest) or partition


def with_floors(table: OpenTable, spec: TableSpec, entries: Sequence[LedgerEntry], entry: LedgerEntry) -> LedgerEntry:
    """``entry``, with the full extract whose order is the floor of each partition that it touches (`Touched.extract`).

    A partition that an extract touches keeps the floor itself. This is for partitions that come later, and for those that a
    restore empties. The batches that count when a batch is appended count as long as it does, so a restore changes nothing here.

    Args:
        entries: all of the ledger before it, without the partitions that they touched.
    """
    numbers = [n for n in sorted(active_batches(enumerate(entries))) if entries[n].full]
    if not numbers or spec.stamped:  # nothing that comes later is below a stamp
        return entry
    extracts = [full for n in numbers if (full := entries[n].full)]
    places = rank_floors([full.order for full in extracts], spec)

    @cache
    def floor_of(scope: str) -> int | None:
        best: int | None = None
        for i, full in enumerate(extracts):
            if full.scope == "table" or scope in full.within:
                best = i if best is None or full.replaces or places[i] < places[best] else best
        return None if best is None else numbers[best]

    floors = {partition: floor_of(_without_hashes(spec, partition)) for partition in entry.touched}
    touched = {p: msgspec.structs.replace(t, extract=floors[p]) for p, t in entry.touched.items()}
    return msgspec.structs.replace(entry, touched=touched)


def _refuse_shrinking(
    name: str, options: AppendOptions, partitions: Collection[str], rows: int, shown: Snapshot | None
) -> None:
    stored = sum(shown.partitions[p].rows for p in partitions if p in shown.partitions) if shown else 0
    if rows < (1 - MOST_SHRINKING) * stored and not options.may_shrink:
        raise RefusedError(
            "full-extract-shrinks",
            f"Full extract for table {name!r}: it has {rows:,} rows, but its {count(len(partitions), 'partition')} in the "
            f"table have {stored:,}: that is over {MOST_SHRINKING:.0%} fewer. Nothing was committed.",
            next="check whether the extract is complete; if it is, run the same command with --may-shrink",
        )
