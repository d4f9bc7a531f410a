"""What a change feed's events show: orders under which they are misplaced (docs/FORMATS.md, "The order of events"), and
deletes that do not say where their rows are, and rows that begin without a value.

Reads     the spec, and what the row work noted of a batch
Writes    nothing
Repeat    safe
"""

from collections.abc import Iterable, Sequence

import msgspec

from lakeupsert.engine.reports import Written
from lakeupsert.errors import RefusedError
from lakeupsert.landing.formats.only import OTHER_TABLE
from lakeupsert.landing.formats.positions import LOG_POSITION, began_again
from lakeupsert.landing.origins import Origins
from lakeupsert.landing.partitions import partition_sources
from lakeupsert.phrases import count, with_advice
from lakeupsert.pipeline.declared import Declaration
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.table.ledger import LedgerEntry, active_batches
from lakeupsert.table.spec import TableSpec

_OF_A_CHANGE = (
    "a transaction that was open while the snapshot was read then loses to the snapshot, and an insert that waited for another "
    "transaction loses to the delete before it"
)
_MISPLACED = {
    "__source_lsn": f"is the place of a change in PostgreSQL's log and not of its commit: {_OF_A_CHANGE}",
    "__lsn": f"is the place of a change in PostgreSQL's log and not of its commit: {_OF_A_CHANGE}",
    "__source_change_lsn": f"is the place of a change in SQL Server's log and not of its commit: {_OF_A_CHANGE}",
    "__source_file": "is the name of a binary log, compared as text: binlog.1000000 is below binlog.999999",
}
"""By the first ordering column, why its order is not that of the changes."""


def misplaced_events(declaration: Declaration, spec: TableSpec) -> list[str]:
    """A warning if the table's order is not the order in which the source database made the changes."""
    why = _MISPLACED.get(spec.order_by[0])
    if why is None:
        return []
    if LOG_POSITION in spec.schema.names or declaration.settings.read.envelope == "debezium":
        order, place = LOG_POSITION, ""
    elif spec.order_by[0] in ("__source_lsn", "__lsn"):
        order = f'__source_ts_us", "{spec.order_by[0]}'
        place = (
            " (which misplaces incremental snapshots, and changes that were committed just before a first one; exact is "
            f"`{LOG_POSITION}`: remove the transform ExtractNewRecordState, so that whole events land, and set `envelope`)"
        )
    else:
        order, place = LOG_POSITION, " (and land whole events, with `envelope`)"
    another = _another_order(declaration.name, order, place)
    return [with_advice(f"`order_by` begins with {spec.order_by[0]!r}, which {why}. Rows may be wrong", another)]


def _another_order(name: str, order: str, place: str = "") -> str:
    return (
        "the order is fixed when a table is created: give the table another `processed`, set "
        f'`order_by = ["{order}"]`{place} in [tables.{name}], and `lakeupsert run` takes all landing files again'
    )


def refuse_misplaced(name: str, spec: TableSpec, reports: Iterable[object]) -> None:
    """Raise RefusedError if the batch itself shows that the table's order keeps older events than the last ones."""
    number = sum(report.misplaced for report in reports if isinstance(report, Written))
    if number:
        raise RefusedError(
            "misplaced-events",
            f"Table {name!r}: {count(number, 'key')} of the batch would keep an older row. `order_by` begins with "
            f"{spec.order_by[0]!r}, by which an event loses to one that came before it in the landing files and in the source's "
            f"log (`{LOG_POSITION}`). Nothing was committed.",
            next=_another_order(name, LOG_POSITION),
        )


def hollow_deletes(table: OpenTable, spec: TableSpec, entries: Iterable[LedgerEntry]) -> list[str]:
    """A warning if deletes of these batches have invented values in place of those of their rows, also in the partition."""
    number = sum(entry.hollow_deletes for entry in entries)
    if not number or spec.takes_key_alone:
        return []
    columns = ", ".join(repr(name) for name in partition_sources(spec) if name not in spec.key)
    has = "has" if number == 1 else "have"
    return [
        f"{count(number, 'delete')} {has} only the key: all other values are empty or zero, also {columns}. Debezium invents "
        "them under PostgreSQL's default replica identity. So such a delete names a wrong partition, and the row stays. At "
        'the source, `ALTER TABLE … REPLICA IDENTITY FULL` sends whole rows. Here, `key_scope = "table"` deletes by the key. '
        f"It is fixed when a table is created: give [tables.{table.name}] another `processed`, and `lakeupsert run` takes all "
        "landing files again"
    ]


def incomplete_creates(entries: Iterable[LedgerEntry]) -> list[str]:
    """A warning if rows of these batches began with values that the source did not send."""
    number = sum(entry.incomplete_creates for entry in entries)
    if not number:
        return []
    has = "has" if number == 1 else "have"
    return [
        f"{count(number, 'new row')} {has} null for a value that the source did not send: a key changed there, and "
        "PostgreSQL did not send the long values that stayed. `ALTER TABLE … REPLICA IDENTITY FULL` at the source sends them "
        "from then on. So does an update that sets such a value"
    ]


def no_own_rows(declaration: Declaration, entry: LedgerEntry) -> list[str]:
    """A warning if a batch has rows, and `only` leaves out all of them."""
    others = entry.skipped.get(OTHER_TABLE, 0)
    if entry.rows_read or not others:
        return []
    texts = declaration.settings.reading.own_texts.items()
    own = " and ".join(f"{name} is {' or '.join(map(repr, several))}" for name, several in texts)
    return [
        f"the batch has {count(others, 'record')} of other tables, and none in which {own}: check `only` in "
        f"[tables.{declaration.name}.read]"
    ]


def several_tables(name: str, origins: Origins) -> list[str]:
    """A warning if a batch has rows of several tables, and no `only` says which are this one's."""
    column, names = next(((column, names) for column, names in origins.tables.items() if len(names) > 1), ("", ()))
    if not names:
        return []
    setting = f"`only = {{ {column} = "
    listed = ", ".join(map(repr, names))
    return [
        f"the batch has rows of several tables by {column!r}: {listed}. Rows with the same key replace each other, even across "
        f'these tables. If the table is one of them, set {setting}"{names[0]}" }}` in [tables.{name}.read] and give it '
        "another `processed`: `lakeupsert run` takes all landing files again. If all belong to this table, say so: "
        f"{setting}{msgspec.json.encode(names).decode()} }}`"
    ]


def misplaced_snapshots(
    name: str, spec: TableSpec, batch: LedgerEntry, before: Sequence[LedgerEntry], *, incremental: bool
) -> list[str]:
    """Warnings about snapshots in a batch that lose to stored rows, or beat newer ones.

    ``before``: all entries before it. ``incremental``: the batch has an incremental snapshot that the table's order misplaces.
    """
    if incremental:
        return [
            f"the batch has rows of an incremental snapshot, whose {spec.order_by[0]!r} is the time at which they were sent: "
            "they beat changes that were committed before that and come later. Such rows may stay wrong until their next change. "
            f"`{LOG_POSITION}` orders them, in a new table (docs/FORMATS.md)"
        ]
    counted = [before[number] for number in sorted(active_batches(enumerate(before)))]
    extracts = [n for n, one in enumerate(counted) if one.full and one.full.replaces and one.full.scope == "table"]
    known = {position for one in counted[extracts[-1] if extracts else 0 :] for position in one.positions}
    if batch.full or not began_again({*known, *batch.positions}, known) - began_again(known, known):
        return []
    again = f"lakeupsert run --full table --again --table {name}"
    return [
        "the batch has the snapshot of a connector that began again without its offsets, or changes from before such a snapshot. "
        "The snapshot loses to all these changes, and it does not say which rows were deleted meanwhile. If the connector missed "
        "changes, go back with "
        f'`lakeupsert restore`, set `full_extract = "replace"` in [tables.{name}] and take the batch with `{again}`; or '
        "land the snapshot in a new table"
    ]
