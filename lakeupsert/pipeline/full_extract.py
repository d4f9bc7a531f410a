"""Full extracts: what refuses them, and their ledger entry.

Reads     the last snapshot, the ledger
Writes    nothing
Repeat    safe
"""

from collections.abc import Sequence

import msgspec

from lakeupsert.engine.batch import (
    Report,
    Written,
)
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.pipeline.discover import Ground
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.rows.floor import greatest
from lakeupsert.table.ledger import (
    NOTHING,
    FullExtract,
    LedgerEntry,
)
from lakeupsert.table.spec import TableSpec

MOST_SHRINKING = 0.4
"""By how much fewer rows than are stored a full extract may have, unless it is told that it may shrink the table."""
NO_EXTRACT = "no landing file is new, so there is no full extract and no key is deleted; a file counts once"


def refuse_full_extract(table: OpenTable) -> None:
    if table.settings.key_scope == "table":
        raise ConfigurationError(
            "full-extract-of-keys",
            f'Table {table.name!r} has `key_scope = "table"`, and full extracts of such tables are not to be had: what an '
            "extract lacks would stay in the key index. Nothing was done.",
            next="append the files without --full, and send deletes for what is gone",
        )
    if table.settings.mode == "columns":
        raise ConfigurationError(
            "full-extract-of-columns",
            f'Table {table.name!r} has `mode = "columns"`, and full extracts of such tables are not to be had yet: what an '
            "extract lacks can't be deleted there. Nothing was done.",
            next="append the files without --full, and send deletes for what is gone",
        )


def refuse_part_of_extract(table: OpenTable, ground: Ground, changed: Sequence[str]) -> None:
    """Whatever is not taken of an extract would have its keys deleted."""
    why = [f"{path} changed or vanished while it was read" for path in changed]
    why += [
        f"{f.path} has the content that an earlier batch took under this name, and counts once" for f in ground.seen
    ]
    why += ground.warnings
    if why:
        more = f" (and {len(why) - 1} more)" if len(why) > 1 else ""
        raise RefusedError(
            "full-extract-incomplete",
            f"Full extract for table {table.name!r}: {why[0]}{more}. The keys of what is left out would be deleted. Nothing was "
            "committed.",
            next="land the whole extract under names of its own and run the same command again; or append without --full",
        )


def refuse_extract_again(table: OpenTable, ground: Ground) -> None:
    taken_again = {(i.path, i.size) for i in ground.inputs}
    for link in table.headers(ground.head.number) if ground.head else ():
        if link.full and any((f.path, f.size) in taken_again for f in link.files):
            raise RefusedError(
                "full-extract-incomplete",
                f"Batch {link.batch_id} was a full extract ({link.full.scope}) before a restore withdrew it; without --full its "
                "files would be rows like others. Nothing was committed.",
                next=f"run `lakeupsert append --again --full {link.full.scope}` where no other batch is withdrawn; else "
                "land the files that are wanted under other names",
            )


def full_extract_of(
    table: OpenTable, spec: TableSpec, ground: Ground, entry: LedgerEntry, reports: Sequence[Report]
) -> LedgerEntry:
    """The entry of a full extract, which touches all partitions that it is the extract of. Refuses one that may not be whole."""
    nothing = "Nothing was committed."
    if entry.quarantined:
        reasons = ", ".join(f"{n} {reason}" for reason, n in entry.quarantined.items())
        raise RefusedError(
            "full-extract-incomplete",
            f"Full extract for table {table.name!r}: {entry.rows_quarantined} of {entry.rows_read} rows would be quarantined "
            f"({reasons}), and their keys deleted. {nothing}",
            next="correct these rows or files in the landing zone and run the same command again; or append without --full",
        )
    if not entry.rows_appended:
        raise RefusedError(
            "empty-full-extract",
            f"Full extract for table {table.name!r}: its {len(entry.files)} files hold no row. {nothing}",
            next="look at what made the files; remove them from the landing zone, or append them without --full",
        )
    touched = dict(entry.touched)
    snapshot = table.last_snapshot()
    shown = snapshot.body.partitions if snapshot else {}
    if ground.full == "table" and ground.head:
        since = table.entries(snapshot.body.batch if snapshot else -1, ground.head.number)
        every = {*shown, *(p for link in since for p in link.body.touched)}
        touched |= dict.fromkeys(sorted(every - touched.keys()), NOTHING)
    stored = sum(shown[p].rows for p in touched if p in shown)
    came = sum(r.live for r in reports if isinstance(r, Written))
    if came < (1 - MOST_SHRINKING) * stored and not ground.may_shrink:
        raise RefusedError(
            "full-extract-shrinks",
            f"Full extract for table {table.name!r}: {came:,} rows for {len(touched)} partitions, which hold {stored:,}: "
            f"over {MOST_SHRINKING:.0%} fewer. {nothing}",
            next="look whether the extract is whole; if it is, run the same command with --may-shrink",
        )
    orders = [r.order for r in reports if isinstance(r, Written) and r.order]
    order = greatest(orders, spec.tombstone_schema.empty_table(), spec)
    assert order is not None, "it has rows"
    full = FullExtract(scope=ground.full or "table", order=order)
    return msgspec.structs.replace(entry, touched=dict(sorted(touched.items())), full=full)
