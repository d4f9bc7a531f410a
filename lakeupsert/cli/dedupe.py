"""`lakeupsert dedupe`: merge what is queued, once."""

from typing import TYPE_CHECKING

import click

from lakeupsert.cli.frame import Answer, Call, common
from lakeupsert.cli.options import engine_option, need_spark, partition_options, selection, workers_option
from lakeupsert.cli.outcome import merge
from lakeupsert.cli.program import main

if TYPE_CHECKING:
    from lakeupsert.api import EngineName


@main.command()
@partition_options
@workers_option
@engine_option
@common
@click.pass_obj
def dedupe(
    call: Call,
    first: str | None,
    last: str | None,
    partitions: tuple[str, ...],
    workers: int,
    engine: "EngineName | None",
) -> Answer:
    """Merge the queued partitions once, then publish.

    With --partition, or --from and --to, first sends a message for each of these partitions that is not fully merged.

    \b
    Example:
      lakeupsert dedupe --from 2020-01-01 --to 2020-01-31
    """
    with call.open_table() as table:
        need_spark(table, engine=engine, large=True)
        if partitions or first or last:
            table.send_missing(selection(table, first, last, partitions))
        return merge(call, table, workers, engine, until_empty=True)
