"""`lakeupsert schema`: list, rename, drop and retype the columns of a table."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.problems import merge_error
from lakeupsert.cli.program import main
from lakeupsert.cli.rows import cell_text, cut_text, more_text, table_lines
from lakeupsert.cli.set_up.aliasfile import plan_alias
from lakeupsert.phrases import count

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.operations.schema import Column, SchemaChange
    from lakeupsert.pipeline.retypes import Conversion

MOST_UNFIT = 20
"""Unfit values that the text of a retype lists."""
WIDTH = 40
"""Characters of such a value."""

_yes = click.option("--yes", is_flag=True, help="Do it. Without --yes, only show what the columns would be.")


@main.group(invoke_without_command=True)
@click.pass_context
def schema(context: click.Context) -> Answer | None:
    """List the columns of a table, or rename, drop or retype one.

    A column keeps its id until it is retyped. New columns and wider types need no command: landing files bring them.

    \b
    Example:
      lakeupsert schema
    """
    if context.invoked_subcommand is not None:
        return None
    call: Call = context.obj
    with call.open_table() as table:
        columns = table.columns()
        return Answer({"columns": _result(columns)}, _text(f"Table {table.name}", columns))


@schema.command()
@click.argument("old")
@click.argument("new")
@click.option(
    "--alias", is_flag=True, help="Add an alias to the configuration, so that landing files may keep the old name."
)
@_yes
def rename(call: Call, old: str, new: str, alias: bool, yes: bool) -> Answer:
    """Rename a column in every row of the table. No file is rewritten.

    Without --yes, only show what the columns would be. Landing files that still use the old name create a new column with that
    name, unless you give --alias.

    \b
    Example:
      lakeupsert schema rename price unit_price --alias --yes
    """
    config = call.config()
    name, settings = config.table(call.table)
    edit = plan_alias(config, name, old, new) if alias else None
    stale = [alias_name for alias_name, column in settings.read.aliases.items() if column.lower() == old.lower()]
    warnings: tuple[str, ...] = ()
    if stale and edit is None:
        warnings = (
            f"`aliases` in [tables.{name}.read] still maps {', '.join(map(repr, stale))} to {old!r}; change that to {new!r}, "
            "or run the same command with --alias",
        )

    def change(table: "Table") -> "SchemaChange":
        done = table.rename_column(old, new, dry=not yes)
        if edit is not None and yes:
            edit.write(f"The column {old!r} is now {new!r}")
        return done

    answer = _change_columns(call, change, dry_run=not yes, warnings=warnings)
    if edit is None:
        return answer
    if edit.is_change:
        written = f"  {'wrote' if yes else 'would write'} to {edit.path}: {edit.aliases}"
    else:
        written = f"  {edit.path} needs no alias: names that differ only by case are one column"
    return replace(answer, result={**(answer.result or {}), "aliases": edit.aliases}, text=f"{answer.text}\n{written}")


@schema.command()
@click.argument("name")
@_yes
def drop(call: Call, name: str, yes: bool) -> Answer:
    """Drop a column. No file is rewritten: older snapshots still show it, and its values stay in old files.

    Landing files that still contain it create a new column with that name, without the old values.

    \b
    Example:
      lakeupsert schema drop discount --yes
    """
    return _change_columns(call, lambda table: table.drop_column(name, dry=not yes), dry_run=not yes)


@schema.command()
@click.argument("column")
@click.argument("type", metavar="TYPE")
@click.option(
    "--quarantine-unfit",
    is_flag=True,
    help="If a value does not convert, set it to null and keep a copy of the row in quarantine.",
)
@click.option("--yes", is_flag=True, help="Do it. Without --yes, only show which values convert.")
def retype(call: Call, column: str, type: str, quarantine_unfit: bool, yes: bool) -> Answer:
    """Give a column another type. No file is rewritten.

    Without --yes, it counts the values that convert, and lists those that do not. TYPE is a name as under [tables.NAME.schema].
    Old files are converted when they are read, and for good by merges and `compact --full`.

    \b
    Example:
      lakeupsert schema retype price "decimal(12,2)"
    """

    def change(table: "Table") -> "SchemaChange":
        with call.progress(table.name) as progress:
            return table.retype_column(column, type, quarantine_unfit=quarantine_unfit, dry=not yes, progress=progress)

    return _change_columns(call, change, dry_run=not yes)


def _change_columns(
    call: Call, change: "Callable[[Table], SchemaChange]", *, dry_run: bool, warnings: tuple[str, ...] = ()
) -> Answer:
    from lakeupsert.operations.schema import columns  # imports Arrow

    with call.open_table() as table:
        found = change(table)
        now = columns(found.spec)
        result: dict[str, object] = {"columns": _result(now), "dry": dry_run, "entry": found.entry, "published": False}
        if found.conversion is not None:
            result |= _conversion_result(found.conversion, found.quarantined)
        if dry_run:
            text = [
                _text(f"Table {table.name} would be", now),
                *_conversion_lines(found),
                "  nothing was changed; --yes does it",
            ]
            return Answer(result, "\n".join(text), warnings)
        if found.quarantined:
            warnings += (
                f"{count(found.quarantined, 'row')} with values that do not convert: a copy is in quarantine "
                "(`lakeupsert quarantine --reason retyped`), and the column is null in them",
            )
        published = table.publish()
        shown = table.shows(found)
        call.changed = call.changed or shown
        result["published"] = shown
        if not shown:
            warnings += (
                f"readers see the old columns until all batches before ledger entry {found.entry} are merged: `lakeupsert run`",
            )
        text = [_text(f"Table {table.name}", now), *_conversion_lines(found)]
        return Answer(result, "\n".join(text), warnings, error=merge_error(call, table, (), published))


def _conversion_result(found: "Conversion", quarantined: int) -> dict[str, object]:
    values = [asdict(one) for one in found.values.values()]
    listed = sum(one.rows for one in found.values.values())
    return {
        "converted": found.converted,
        "unfit": found.unfit,
        "unfit_values": values,
        "unfit_not_listed": found.unfit - listed,
        "quarantined": quarantined,
    }


def _conversion_lines(change: "SchemaChange") -> Iterator[str]:
    from lakeupsert.table.types import type_name  # imports Arrow

    found = change.conversion
    if found is None:
        return
    was, becomes = map(type_name, found.change)
    yield ""
    yield f"  {found.column}: {was} to {becomes}"
    yield f"  {count(found.converted, 'value')} {'converts' if found.converted == 1 else 'convert'}"
    if not found.unfit:
        return
    yield f"  {count(found.unfit, 'value')} {'does' if found.unfit == 1 else 'do'} not:"
    yield ""
    shown = list(found.values.values())[:MOST_UNFIT]
    columns = [
        [cut_text(json.dumps(one.value, ensure_ascii=False), WIDTH) for one in shown],
        [f"{one.rows:,}" for one in shown],
        [
            cell_text(f"{one.partition}, {' '.join(f'{name}={value}' for name, value in one.key.items())}")
            for one in shown
        ],
    ]
    yield from (f"  {line}" for line in table_lines(["value", "rows", "one of them"], columns, [False, True, False]))
    yield from (f"  {line}" for line in more_text(len(shown), len(found.values), "--json lists more"))
    if change.entry is None:
        yield ""
        yield "  next: correct these rows at their source and land them again, or add --quarantine-unfit to --yes"


def _result(columns: "list[Column]") -> list[dict[str, object]]:
    return [asdict(column) for column in columns]


def _text(heading: str, columns: "list[Column]") -> str:
    rows = [("id", "column", "type", "named by"), *((str(c.id), c.name, c.type, c.role or "") for c in columns)]
    return "\n".join([heading, *(f"  {line}" for line in output.columns(rows, str.ljust))])
