"""`lakeupsert compact`: rewrite partitions that have become slow to read."""

from typing import TYPE_CHECKING

import click

from lakeupsert.cli.frame import Answer, Call, common
from lakeupsert.cli.options import workers_option
from lakeupsert.cli.program import main
from lakeupsert.cli.reprocess import done_answer

if TYPE_CHECKING:
    pass


@main.command()
@click.option("--full", is_flag=True, help="Leave no delta and no superseded row, for readers that list folders.")
@workers_option
@common
@click.pass_obj
def compact(call: Call, full: bool, workers: int) -> Answer:
    """Write anew what is costly to read: partitions with many deltas or superseded rows, and adopted ones.

    Nights need none of it, since they pay for themselves; after it they are shorter, and so are reads. Nights and readers
    may go on beside it. Readers that list folders need `--full`, and `vacuum` after it.

    \b
    Example:
      lakeupsert compact
    """
    with call.open_table() as table:
        with call.progress(table.name) as progress, call.stoppable() as stop:
            done = table.compact(full=full, workers=workers, stop=stop, progress=progress)
        return done_answer(call, table, done)
