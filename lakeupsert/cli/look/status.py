"""`lakeupsert status`: show what readers see and what is still to do."""

from typing import TYPE_CHECKING

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.look.watch import watch
from lakeupsert.cli.problems import failed_partitions_error, lagging_error, publisher_warnings, skipped_files_warning
from lakeupsert.cli.program import main
from lakeupsert.cli.tables import for_each_table
from lakeupsert.errors import RefusedError
from lakeupsert.phrases import count
from lakeupsert.report.attention import verdict

if TYPE_CHECKING:
    from lakeupsert.api import Table


@main.command()
@click.option("--watch", "watching", is_flag=True, help="Refresh every second until Ctrl-C. Needs a terminal.")
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

    def table_status(table: "Table") -> Answer:
        found = table.status()
        error = None
        warnings = (*found.warnings, *publisher_warnings(found.publishers), *skipped_files_warning(table))
        dead = found.queue.dead if found.queue else 0
        letters = count(dead, "dead letter")
        if found.failed:
            error = failed_partitions_error(table, found.failed)
        elif found.lagging:
            error = lagging_error(table, found.lagging)
        elif dead and found.dirty:
            error = RefusedError(
                "dead-letters",
                f"Table {table.name!r}: {letters} (messages that failed at every attempt), and "
                f"{count(found.dirty, 'partition')} still to merge.",
                next="run `lakeupsert redrive`, which lists the reasons and returns the messages to the workers; if no worker "
                "is running, then run `lakeupsert dedupe`",
            )
        elif dead:
            warnings += (
                f"{letters} in the queue, although every partition is merged: they are obsolete, and "
                "`lakeupsert redrive` deletes them",
            )
        now = ("verdict", verdict(table.name, found).what)
        text = output.block(f"Table {table.name}", [now, *output.status_facts(found)])
        return Answer(output.status_result(found), text, warnings, error=error)

    return for_each_table(call, table_status)
