"""Rename and drop columns from one ledger number on, without rewriting a file.

Reads     the ledger's head, the newest spec
Writes    the next spec, then ONE ledger entry that names it, which orders the change among batches: batches before it have the
          old names, batches after it the new ones. An `append` that loses the race to it starts again
Repeat    safe: if the newest spec has the change already, only a missing entry is written

After a crash between the two writes, the next batch is written under the new spec, and its own entry names the spec.
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
    """A column of the table. ``role``: the setting that names it, so that it can't be renamed or dropped, or None."""

    id: int
    name: str
    type: str
    role: str | None


@dataclass(frozen=True)
class SchemaChange:
    """The spec after a change, and its version. ``entry``: the first ledger number with it; None if nothing was written."""

    spec: TableSpec
    version: int
    entry: int | None = None


def columns(spec: TableSpec) -> list[Column]:
    """List the columns of a spec."""
    named = roles(spec)
    return [Column(f.id, f.name, f.type, named.get(f.name)) for f in spec.fields]


def change(table: OpenTable, to: Callable[[TableSpec], TableSpec], *, dry: bool) -> SchemaChange:
    """Replace the spec by what ``to`` (`evolution.rename`, `evolution.drop`) returns for it; with ``dry`` only plan it.

    Raises ConfigurationError if ``to`` does; TryAgainError after too many lost races.
    """

    def attempt() -> SchemaChange | Lost:
        table.last_snapshot()  # before the ledger, so that the ledger has everything that it shows
        ledger, head = table.ledger_head(), table.head_spec()
        if ledger is None or head is None:
            raise table.no_table_yet()
        spec = _change_spec(table, head, to)
        version = head.number + (spec is not head.body)
        if dry:
            return SchemaChange(spec, version)
        if spec is head.body or table.objects.specs.append(spec, head).result == "won":
            return SchemaChange(spec, version, _enter(table, version))
        return LOST

    return until_won(table.store.uri(), attempt)


def _change_spec(table: OpenTable, head: Link[TableSpec], to: Callable[[TableSpec], TableSpec]) -> TableSpec:
    """The spec after the change: the head itself, if the head is the result of the same change to the spec before."""
    try:
        return to(head.body)
    except ConfigurationError:
        if head.number and _leads_to(to, table.spec(head.number - 1), head.body):
            return head.body
        raise


def _leads_to(to: Callable[[TableSpec], TableSpec], before: TableSpec, after: TableSpec) -> bool:
    try:
        return to(before) == after
    except ConfigurationError:
        return False


def _enter(table: OpenTable, version: int) -> int:
    """Commit the spec by a ledger entry; returns the first ledger number with ``version`` or a newer one."""

    def build(head: Link[LedgerEntry] | None) -> LedgerEntry | None:
        assert head is not None, "the table exists"
        if head.body.spec_version >= version:  # by a batch, or by a later change
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
