"""`lakeupsert compact`: rewrite partitions that have become slow to read."""

from typing import TYPE_CHECKING

import click

from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import log_option, merge_host_option, prepare_spark, processes_if_local, processes_option
from lakeupsert.cli.program import main
from lakeupsert.cli.repair.reprocess import rewrite_answer

if TYPE_CHECKING:
    from lakeupsert.engine.by_name import HostName


@main.command()
@click.option(
    "--full", is_flag=True, help="Leave no deltas and no superseded rows (needed by readers that list folders)."
)
@merge_host_option
@processes_option
@log_option
def compact(call: Call, full: bool, host: "HostName", workers: int | None) -> Answer:
    """Rewrite partitions that have become slow to read.

    These have many deltas or superseded rows, or were adopted. Nights and readers do not need it, but are faster afterwards,
    and may run at the same time. For readers that list folders, run it with `--full`, then run `vacuum`.

    \b
    Example:
      lakeupsert compact
    """
    local_processes = processes_if_local(host, workers)
    with call.open_table() as table:
        prepare_spark(table, host=host)
        with call.progress(table.name) as progress, call.stoppable() as stop:
            rewrite = table.compact(full=full, host=host, workers=local_processes, stop=stop, progress=progress)
        return rewrite_answer(call, table, rewrite)
