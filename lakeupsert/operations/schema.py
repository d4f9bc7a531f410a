"""Rename, drop and retype columns from one ledger number on, without rewriting a file.

Reads     the ledger's head, the newest spec; for a retype what `pipeline.retypes` reads
Writes    the next spec, then ONE ledger entry that names it, which orders the change among batches: batches before it have the
          old names and types, batches after it the new ones. An `append` that loses the race to it starts again
Repeat    safe: if the newest spec has the change already, only a missing entry is written

After a crash between the two writes, the next batch is written under the new spec, and its own entry names the spec. If a column
was retyped, it first writes the missing entry, because that one names the rows that do not convert.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from lakeupsert.config import toml_key
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.pipeline.declared import Declaration
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.retypes import Conversion, enter, look
from lakeupsert.table.chain import LOST, Link, Lost, until_won
from lakeupsert.table.evolution import retype, roles
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.types import type_name


@dataclass(frozen=True)
class Column:
    """A column of the table. ``role``: the setting that names it, so that it can't be renamed or dropped, or None."""

    id: int
    name: str
    type: str
    role: str | None


@dataclass(frozen=True)
class SchemaChange:
    """The spec after a change, and its version.

    Attributes:
        entry: the first ledger number with it; None if nothing was written.
        conversion: of a retype, what becomes of the values that the table held when it was looked at. None if it is not a retype,
            or if an earlier call that broke off had looked.
        quarantined: rows that the ledger entry put into quarantine, because their values do not convert.
    """

    spec: TableSpec
    version: int
    entry: int | None = None
    conversion: Conversion | None = None
    quarantined: int = 0


def columns(spec: TableSpec) -> list[Column]:
    """List the columns of a spec."""
    named = roles(spec)
    return [Column(f.id, f.name, type_name(spec.schema.field(f.name).type), named.get(f.name)) for f in spec.fields]


def change(
    table: OpenTable,
    to: Callable[[TableSpec], TableSpec],
    *,
    dry: bool,
    quarantine_unfit: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> SchemaChange:
    """Replace the spec by what ``to`` (`evolution.rename`, `drop` or `retype`) returns for it; with ``dry`` only plan it.

    Raises ConfigurationError if ``to`` does; RefusedError (``unfit-values``) if values do not convert, unless
    ``quarantine_unfit``; TryAgainError after too many lost races.
    """

    def attempt() -> SchemaChange | Lost:
        table.history.last_snapshot()  # before the ledger, so that the ledger has everything that it shows
        ledger, head = table.history.ledger_head(), table.history.head_spec()
        if ledger is None or head is None:
            raise table.history.no_table_yet()
        spec = _change_spec(table.history, head, to)
        version = head.number + (spec is not head.body)
        found = None if spec is head.body else look(table, ledger, head.body, spec, progress)
        if dry:
            return SchemaChange(spec, version, conversion=found)
        if found is not None and found.unfit and not quarantine_unfit:
            raise _unfit_values(table, found)
        if spec is head.body or table.history.objects.specs.append(spec, head).result == "won":
            number = enter(table, version)
            return SchemaChange(spec, version, number, found, _quarantined_at(table.history, number))
        return LOST

    return until_won(table.resources.store.uri(), attempt)


def retype_to(declaration: Declaration, column: str, type_: pa.DataType) -> Callable[[TableSpec], TableSpec]:
    """The change of a retype, for `change`. Raises ConfigurationError if the configuration gives the column another type."""
    one_name, given = declaration.settings.one_name_in_files, declaration.given_types(())[1]

    def to(spec: TableSpec) -> TableSpec:
        changed = retype(spec, column, type_, one_name=one_name)
        name = spec.table_name_of(column)
        other = next((t for own, t in given.items() if own.lower() == name.lower()), type_)
        if not other.equals(type_):
            where = f"[tables.{declaration.name}.schema]"
            raise ConfigurationError(
                "other-type-declared",
                f"{where} gives the column {name!r} the type {type_name(other)}, which each batch would compare with "
                f"{type_name(type_)}. Nothing was changed.",
                next=f'set `{toml_key(name)} = "{type_name(type_)}"` there, or remove the column from it; then run the same '
                "command again",
            )
        return changed

    return to


def _unfit_values(table: OpenTable, found: Conversion) -> RefusedError:
    first = next(iter(found.values.values()))
    type_, key = type_name(found.change.after), ", ".join(f"{name}={value}" for name, value in first.key.items())
    command = shlex.join(["lakeupsert", "schema", "retype", found.column, type_])
    return RefusedError(
        "unfit-values",
        f"{found.unfit:,} of {found.unfit + found.converted:,} values of {found.column!r} in table {table.name!r} do not convert "
        f"to {type_}, for example {first.value!r} of {key} in {first.partition}. Nothing was changed.",
        next="correct these rows at their source and land them again; or add --quarantine-unfit, which sets the column "
        f"to null in these rows and keeps a copy of them in quarantine. `{command}` lists the values",
    )


def _quarantined_at(history: History, number: int) -> int:
    entry = history.entries(number - 1, number)[0].body
    return entry.quarantined.get("retyped", 0) if entry.kind == "schema" else 0


def _change_spec(history: History, head: Link[TableSpec], to: Callable[[TableSpec], TableSpec]) -> TableSpec:
    """The spec after the change: the head itself, if the head is the result of the same change to the spec before."""
    try:
        return to(head.body)
    except ConfigurationError:
        if head.number and _leads_to(to, history.spec(head.number - 1), head.body):
            return head.body
        raise


def _leads_to(to: Callable[[TableSpec], TableSpec], before: TableSpec, after: TableSpec) -> bool:
    try:
        return to(before) == after
    except ConfigurationError:
        return False
