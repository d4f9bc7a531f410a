"""`lakeupsert schema`: list, rename and drop the columns of a table."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from lakeupsert.cli import output
from lakeupsert.cli.aliasfile import plan_alias
from lakeupsert.cli.frame import Answer, Call, common
from lakeupsert.cli.problems import merge_error
from lakeupsert.cli.program import main

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.operations.schema import Column, SchemaChange

_dry_run = click.option("--dry-run", is_flag=True, help="Show the resulting columns. Changes nothing.")


@main.group(invoke_without_command=True)
@common
@click.pass_context
def schema(context: click.Context) -> Answer | None:
    """List the columns of a table, or rename or drop one.

    A column keeps its id for life. New columns and wider types need no command: landing files bring them.

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
@_dry_run
@common
@click.pass_obj
def rename(call: Call, old: str, new: str, alias: bool, dry_run: bool) -> Answer:
    """Rename a column in every row of the table. No file is rewritten.

    Landing files that still use the old name create a new column with that name, unless you give --alias.

    \b
    Example:
      lakeupsert schema rename price unit_price --alias
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
        done = table.rename_column(old, new, dry=dry_run)
        if edit is not None and not dry_run:
            edit.write(f"The column {old!r} is now {new!r}")
        return done

    answer = _change_columns(call, change, dry_run=dry_run, warnings=warnings)
    if edit is None:
        return answer
    if edit.is_change:
        written = f"  {'would write' if dry_run else 'wrote'} to {edit.path}: {edit.aliases}"
    else:
        written = f"  {edit.path} needs no alias: names that differ only by case are one column"
    return replace(answer, result={**(answer.result or {}), "aliases": edit.aliases}, text=f"{answer.text}\n{written}")


@schema.command()
@click.argument("name")
@_dry_run
@common
@click.pass_obj
def drop(call: Call, name: str, dry_run: bool) -> Answer:
    """Drop a column. No file is rewritten: older snapshots still show it, and its values stay in old files.

    Landing files that still contain it create a new column with that name, without the old values.

    \b
    Example:
      lakeupsert schema drop discount
    """
    return _change_columns(call, lambda table: table.drop_column(name, dry=dry_run), dry_run=dry_run)


def _change_columns(
    call: Call, change: "Callable[[Table], SchemaChange]", *, dry_run: bool, warnings: tuple[str, ...] = ()
) -> Answer:
    from lakeupsert.operations.schema import columns  # imports Arrow

    with call.open_table() as table:
        found = change(table)
        now = columns(found.spec)
        result: dict[str, object] = {"columns": _result(now), "dry": dry_run, "entry": found.entry, "published": False}
        if dry_run:
            return Answer(result, f"{_text(f'Table {table.name} would be', now)}\n  nothing was changed", warnings)
        published = table.publish()
        shown = table.shows(found)
        call.changed = call.changed or shown
        result["published"] = shown
        if not shown:
            warnings += (
                f"readers see the old columns until all batches before ledger entry {found.entry} are merged: `lakeupsert run`",
            )
        return Answer(
            result, _text(f"Table {table.name}", now), warnings, error=merge_error(call, table, (), published)
        )


def _result(columns: "list[Column]") -> list[dict[str, object]]:
    return [{"id": c.id, "name": c.name, "type": c.type, "role": c.role} for c in columns]


def _text(heading: str, columns: "list[Column]") -> str:
    rows = [("id", "column", "type", "named by"), *((str(c.id), c.name, c.type, c.role or "") for c in columns)]
    return "\n".join([heading, *(f"  {line}" for line in output.columns(rows, str.ljust))])
