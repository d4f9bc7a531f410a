"""Rename and drop columns: readers call them otherwise from one ledger number on, and no file is rewritten.

Reads     the ledger's head, the newest spec
Writes    the next spec, then ONE ledger entry that names it: that orders the change against batches. Those before it were read
          under the old names, those after it are under the new ones; an `append` that it overtakes begins again
Repeat    safe: a change that the newest spec has already only gets the entry that it lacks

After a crash between the two, the next batch is written under the new spec, and its own entry brings the change.
"""

from collections.abc import Callable
from dataclasses import dataclass

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.table.chain import LOST, Link, Lost, until_won
from lakeupsert.table.evolution import roles
from lakeupsert.table.ledger import LedgerEntry, next_stamp
from lakeupsert.table.spec import TableSpec


@dataclass(frozen=True)
class Column:
    """A column of the table; ``role``: which setting names it, so that it can't be renamed or dropped, or None."""

    id: int
    name: str
    type: str
    role: str | None


@dataclass(frozen=True)
class SchemaChange:
    """The spec after a change, and its version; ``entry``: the first ledger number with it, None where nothing was written."""

    spec: TableSpec
    version: int
    entry: int | None = None


def columns(spec: TableSpec) -> list[Column]:
    named = roles(spec)
    return [Column(f.id, f.name, f.type, named.get(f.name)) for f in spec.fields]


def change(table: OpenTable, to: Callable[[TableSpec], TableSpec], *, dry: bool) -> SchemaChange:
    """Put what ``to`` (`spec.rename`, `spec.drop`) makes of the spec in its place; with ``dry`` only tell what that is.

    Raises ConfigurationError where it can't be; TryAgainError after too many lost races.
    """

    def attempt() -> SchemaChange | Lost:
        table.last_snapshot()  # before the ledger, which then has what it shows
        ledger, head = table.ledger_head(), table.head_spec()
        if ledger is None or head is None:
            raise table.no_table_yet()
        spec = _changed(table, head, to)
        version = head.number + (spec is not head.body)
        if dry:
            return SchemaChange(spec, version)
        if spec is head.body or table.objects.specs.append(spec, head).result == "won":
            return SchemaChange(spec, version, _in_ledger(table, version))
        return LOST

    return until_won(table.store.uri(), attempt)


def _changed(table: OpenTable, head: Link[TableSpec], to: Callable[[TableSpec], TableSpec]) -> TableSpec:
    """The spec after the change: the head itself, where that is what it made of the one before."""
    try:
        return to(head.body)
    except ConfigurationError:
        if head.number and _gives(to, table.spec(head.number - 1), head.body):
            return head.body
        raise


def _gives(to: Callable[[TableSpec], TableSpec], before: TableSpec, after: TableSpec) -> bool:
    try:
        return to(before) == after
    except ConfigurationError:
        return False


def _in_ledger(table: OpenTable, version: int) -> int:
    """The first ledger number of which ``version``, or a newer one, is the spec."""

    def build(head: Link[LedgerEntry] | None) -> LedgerEntry | None:
        assert head is not None, "there was one"
        if head.body.spec_version >= version:  # a batch brought it, or who renamed next
            return None
        return LedgerEntry(
            kind="schema",
            batch_id=clock.new_id(),
            received_at=next_stamp(head.body),
            spec_version=version,
            snapshot=head.body.snapshot,
        )

    link = table.objects.ledger.extend(build)
    if link is not None:
        return link.number
    head = table.ledger_head()
    number = head.number if head else 0
    while number and table.entries(number - 2, number - 1)[0].body.spec_version >= version:
        number -= 1
    return number
