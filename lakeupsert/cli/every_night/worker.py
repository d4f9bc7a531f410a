"""`lakeupsert worker`: merge partitions as their messages arrive."""

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from lakeupsert import clock
from lakeupsert.cli.every_night.dedupe import merge_answer
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import engine_option, log_option, prepare_spark, workers_option
from lakeupsert.cli.program import main
from lakeupsert.cli.tables import for_each_table
from lakeupsert.errors import ConfigurationError
from lakeupsert.phrases import install_extra
from lakeupsert.retries import GRACE_SECONDS

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.cli.every_night.metrics import WorkerMetrics
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
@click.option(
    "--grace-seconds",
    type=click.FloatRange(min=0),
    default=GRACE_SECONDS,
    show_default=True,
    metavar="S",
    help="After SIGTERM, return unfinished messages to the queue after this many seconds.",
)
@click.option(
    "--health-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="Touch this file every few seconds (for a liveness probe).",
)
@click.option(
    "--metrics-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="Write metrics for Prometheus to this file every few seconds. The node exporter reads names that end in .prom.",
)
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
    for option, path in (("--health-file", health_file), ("--metrics-file", metrics_file)):
        if path is not None and not path.parent.is_dir():
            raise click.UsageError(f"{option}: the folder {path.parent} does not exist.")
    metrics = _metrics_into(metrics_file) if metrics_file is not None else None

    def alive() -> None:
        if health_file is not None:
            health_file.touch()
        if metrics is not None:
            metrics.tick()

    def work_on(table: "Table") -> Answer:
        prepare_spark(table, engine=options["engine"])
        if metrics is not None:
            metrics.watch(table)
        left = None if max_seconds is None else max(0.0, max_seconds - (clock.elapsed() - begun))
        return merge_answer(call, table, **options, both_queues=False, max_seconds=left, alive=alive)

    try:
        return for_each_table(call, work_on, concurrently=not options["until_empty"])
    finally:
        if metrics is not None:
            metrics.write()


def _metrics_into(path: Path) -> "WorkerMetrics":
    try:
        from lakeupsert.cli.every_night.metrics import WorkerMetrics
    except ImportError as e:
        raise ConfigurationError(
            "extra-missing",
            f"--metrics-file needs {e.name or e}, which is not installed. Nothing was done.",
            next=install_extra("prometheus"),
        ) from e
    return WorkerMetrics(path)
