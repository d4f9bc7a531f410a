"""`lakeupsert dedupe`: merge the queued partitions, once."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict, Unpack

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import (
    PartitionChoice,
    engine_option,
    log_option,
    merge_host_option,
    partition_options,
    prepare_spark,
    processes_if_local,
    processes_option,
    refuse_workers_of_spark,
)
from lakeupsert.cli.problems import merge_error, publish_warnings
from lakeupsert.cli.program import main
from lakeupsert.progress import Countdown

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.engine.by_name import EngineName, HostName

    class DrainFlags(TypedDict, total=False):
        """Options of `Table.dedupe` that commands choose."""

        host: HostName
        workers: int
        engine: EngineName | None
        until_empty: bool
        both_queues: bool
        calls_at_once: int
        max_seconds: float | None
        alive: Callable[[], object]


@main.command()
@partition_options
@merge_host_option
@processes_option
@engine_option
@log_option
def dedupe(
    call: Call, chosen: PartitionChoice, host: "HostName", workers: int | None, engine: "EngineName | None"
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
        if chosen:
            table.send_missing(chosen.of(table))
        return merge_answer(call, table, host=host, workers=local_processes, engine=engine)


def merge_answer(call: Call, table: "Table", **options: "Unpack[DrainFlags]") -> Answer:
    """Merge queued partitions and publish. The options are those of `Table.dedupe`."""
    from lakeupsert.report.totals import MergeTotals  # imports Arrow

    totals, until_empty = MergeTotals(), options.get("until_empty", True)
    with call.progress(table.name) as progress, call.stoppable() as stop:
        # A worker that waits for messages may live for months: it keeps what failed, and sums.
        progress_of_merges = Countdown("merging partitions", progress)
        collect = None if until_empty else totals.add
        results = table.dedupe(**options, stop=stop, progress=progress_of_merges, collect=collect)
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
