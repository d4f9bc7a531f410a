"""`lakeupsert dedupe`: merge the queued partitions, once."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call, common
from lakeupsert.cli.options import (
    engine_option,
    log_option,
    merge_host_option,
    partition_options,
    prepare_spark,
    processes_if_local,
    processes_option,
    refuse_workers_of_spark,
    selection,
)
from lakeupsert.cli.problems import merge_error, publish_warnings
from lakeupsert.cli.program import main
from lakeupsert.progress import Countdown

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.engine.by_name import EngineName, HostName


@main.command()
@partition_options
@merge_host_option
@processes_option
@engine_option
@log_option
@common
@click.pass_obj
def dedupe(
    call: Call,
    first: str | None,
    last: str | None,
    partitions: tuple[str, ...],
    host: "HostName",
    workers: int | None,
    engine: "EngineName | None",
) -> Answer:
    """Merge the queued partitions once, then publish.

    With --partition, or --from and --to, first sends a message for each of these partitions that is not fully merged. Then
    it merges everything in the queue, not only these.

    \b
    Example:
      lakeupsert dedupe --from 2020-01-01 --to 2020-01-31
    """
    local_processes = processes_if_local(host, workers)
    with call.open_table() as table:
        refuse_workers_of_spark(table, workers, engine)
        prepare_spark(table, host=host, engine=engine, large=True)
        if partitions or first or last:
            table.send_missing(selection(table, first, last, partitions))
        return merge_answer(call, table, local_processes, engine, host=host, until_empty=True)


def merge_answer(
    call: Call,
    table: "Table",
    workers: int,
    engine: "EngineName | None",
    *,
    host: "HostName" = "local",
    until_empty: bool,
    both_queues: bool = True,
    max_seconds: float | None = None,
    alive: Callable[[], object] = lambda: None,
) -> Answer:
    """Merge queued partitions and publish. The parameters are those of `Table.dedupe`."""
    from lakeupsert.report.totals import MergeTotals  # imports Arrow

    totals = MergeTotals()
    with call.progress(table.name) as progress, call.stoppable() as stop:
        # A worker that waits for messages may live for months: it keeps what failed, and sums.
        results = table.dedupe(
            host=host,
            workers=workers,
            engine=engine,
            until_empty=until_empty,
            both_queues=both_queues,
            max_seconds=max_seconds,
            stop=stop,
            alive=alive,
            progress=Countdown("merging partitions", progress),
            collect=None if until_empty else totals.add,
        )
        published = None if stop.is_set() else table.publish()
    if until_empty:
        totals, facts = MergeTotals.of(results), output.dedupe_facts(results)
    else:
        results, facts = list(totals.failures.values()), output.totals_facts(totals)
    if published is not None:
        facts += output.publish_facts(published)
    return Answer(
        {**output.dedupe_result(results), "totals": output.totals_result(totals)},
        output.block(f"Table {table.name}", facts),
        publish_warnings(published) if published else (),
        error=merge_error(call, table, results, published),
    )
