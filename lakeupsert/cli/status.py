"""`lakeupsert status`: what readers see, and what is still to do."""

from typing import TYPE_CHECKING

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call, common, each
from lakeupsert.cli.problems import failed, lagging, skipped
from lakeupsert.cli.program import main
from lakeupsert.cli.watch import watch
from lakeupsert.errors import RefusedError

if TYPE_CHECKING:
    from lakeupsert.api import Table


@main.command()
@click.option("--watch", "watching", is_flag=True, help="Refresh every second until Ctrl-C. Needs a terminal.")
@common
@click.pass_obj
def status(call: Call, watching: bool) -> Answer:
    """Show what readers see and what is still to do.

    Reports all tables of the configuration unless you give --table.

    \b
    Example:
      lakeupsert status --json
    """
    if watching:
        with call.open_tables() as tables:
            watch(call, tables)

    def one(table: "Table") -> Answer:
        found = table.status()
        error = None
        warnings = (*found.warnings, *skipped(table))
        dead = found.queue.dead if found.queue else 0
        letters = output.count(dead, "dead letter")
        if found.failed:
            error = failed(table, found.failed)
        elif found.lagging:
            error = lagging(table, found.lagging)
        elif dead and found.dirty:
            error = RefusedError(
                "dead-letters",
                f"Table {table.name!r}: {letters}: these messages failed at every try, and "
                f"{output.count(found.dirty, 'partition')} still to be merged.",
                next="run `lakeupsert redrive`, which tells why each failed and gives it back to the workers; then "
                "`lakeupsert dedupe`, where none is at work",
            )
        elif dead:
            warnings += (
                f"{letters} in the queue, and every partition is merged: they are out of date, and "
                "`lakeupsert redrive` deletes them",
            )
        text = output.block(f"Table {table.name}", output.status_facts(found))
        return Answer(output.status_result(found), text, warnings, error=error)

    return each(call, one)
