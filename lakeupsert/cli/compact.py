"""`lakeupsert compact`: rewrite partitions that have become slow to read."""

import click

from lakeupsert.cli.frame import Answer, Call, common
from lakeupsert.cli.options import log_option, workers_option
from lakeupsert.cli.program import main
from lakeupsert.cli.reprocess import rewrite_answer


@main.command()
@click.option(
    "--full", is_flag=True, help="Leave no deltas and no superseded rows (needed by readers that list folders)."
)
@workers_option
@log_option
@common
@click.pass_obj
def compact(call: Call, full: bool, workers: int) -> Answer:
    """Rewrite partitions that have become slow to read.

    These have many deltas or superseded rows, or were adopted. Nights and readers do not need it, but are faster afterwards,
    and may run at the same time. For readers that list folders, run it with `--full`, then run `vacuum`.

    \b
    Example:
      lakeupsert compact
    """
    with call.open_table() as table:
        with call.progress(table.name) as progress, call.stoppable() as stop:
            rewrite = table.compact(full=full, workers=workers, stop=stop, progress=progress)
        return rewrite_answer(call, table, rewrite)
