"""`lakeupsert worker`: merge partitions as their messages arrive."""

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from lakeupsert import clock
from lakeupsert.cli.every_night.dedupe import merge_answer
from lakeupsert.cli.every_night.signs import signs_of_life, signs_options
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import engine_option, log_option, prepare_spark, workers_option
from lakeupsert.cli.program import main
from lakeupsert.cli.tables import for_each_table

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.engine.by_name import EngineName

    class WorkerFlags(TypedDict):
        """Flags that are options of `Table.dedupe` as they are."""

        workers: int
        until_empty: bool
        engine: EngineName | None


@main.command()
@workers_option
@click.option("--until-empty", is_flag=True, help="Stop when the queue is empty instead of waiting for messages.")
@click.option(
    "--max-seconds",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Stop taking new work when it would not finish within this many seconds, if it took as long as the longest so far.",
)
@signs_options
@engine_option
@log_option
def worker(
    call: Call,
    max_seconds: float | None,
    grace_seconds: float,
    health_file: Path | None,
    metrics_file: Path | None,
    **options: "Unpack[WorkerFlags]",
) -> Answer:
    """Merge partitions as their messages arrive.

    On SIGTERM it finishes the partitions it is merging. Before it ends by itself, it publishes what is complete. Works on all
    tables of the configuration unless you give --table. For a table with a [large] section, engine spark takes the queue of
    large partitions and engine arrow takes the other queue.

    \b
    Example:
      lakeupsert worker --workers 2 --until-empty
    """
    begun = clock.elapsed()
    call.stop.grace_seconds = grace_seconds

    def work_on(table: "Table") -> Answer:
        prepare_spark(table, engine=options["engine"])
        signs.watch(table)
        at_once = 1 if options["until_empty"] else len(call.tables)
        left = None if max_seconds is None else max(0.0, max_seconds - (clock.elapsed() - begun))
        return merge_answer(
            call, table, **options, both_queues=False, calls_at_once=at_once, max_seconds=left, alive=signs.alive
        )

    with signs_of_life(health_file, metrics_file) as signs:
        return for_each_table(call, work_on, concurrently=not options["until_empty"])
