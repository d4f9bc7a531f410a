"""`lakeupsert run`: run a night."""

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from lakeupsert import clock
from lakeupsert.cli import output
from lakeupsert.cli.every_night.plan import plan_answer, unknown_time_warning
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import (
    batch_id_option,
    check_full,
    engine_option,
    full_extract_options,
    host_option,
    limit_options,
    log_option,
    prepare_spark,
    processes_option,
    refuse_workers_of_spark,
)
from lakeupsert.cli.problems import append_warnings, merge_error, publish_warnings, quarantine_warning
from lakeupsert.cli.program import main
from lakeupsert.cli.tables import for_each_table
from lakeupsert.config import cores

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.engine.by_name import EngineName, HostChoice
    from lakeupsert.operations.run import RunResult
    from lakeupsert.table.ledger import Scope

    class RunFlags(TypedDict):
        """Flags that are options of `Table.run` as they are."""

        host: HostChoice
        workers: int | None
        engine: EngineName | None
        batch_id: str | None
        full: Scope | None
        may_shrink: bool
        prices: Path | None
        max_bytes: int | None
        max_cost: float | None


@main.command()
@host_option
@processes_option
@engine_option
@batch_id_option
@full_extract_options
@click.option(
    "--parallel",
    type=click.IntRange(min=1),
    metavar="N",
    help="Run N tables of the configuration at the same time. They share cores and memory. Default: one after the other.",
)
@click.option("--dry-run", is_flag=True, help="Show what it would do, like `lakeupsert plan`. Writes nothing.")
@limit_options
@log_option
def run(call: Call, parallel: int | None, dry_run: bool, **options: "Unpack[RunFlags]") -> Answer:
    """Run a night: append new landing files, merge, publish.

    Every step looks at the state of the table, so a run also finishes what an earlier run left. Runs all tables of the
    configuration unless you give --table; one that fails does not stop the others. At the end it calls `on_success` or
    `on_failure` of the configuration.

    \b
    Example:
      lakeupsert run
    """
    check_full(options["full"], may_shrink=options["may_shrink"])
    limits = options["max_bytes"], options["max_cost"]
    call.hooked = not dry_run
    tables = len(call.config().tables)
    if parallel is not None and (call.table is not None or tables == 1):
        raise click.UsageError("--parallel is for several tables, and this call runs one. Leave it out.")
    at_once = min(parallel or 1, tables)

    def run_table(table: "Table") -> Answer:
        if dry_run:
            return plan_answer(call, table, options["prices"], *limits, full=options["full"])
        refuse_workers_of_spark(table, options["workers"], options["engine"])
        prepare_spark(table, host=options["host"], engine=options["engine"], large=True)
        begun = clock.elapsed()
        early_warnings: list[str] = []
        with call.progress(table.name) as progress, call.stoppable() as stop:
            ran = table.run(
                **options,
                local_workers=max(1, cores() // at_once),
                calls_at_once=at_once,
                stop=stop,
                progress=progress,
                warn=early_warnings.append,
            )
        warnings = (
            *append_warnings(ran.append, early_warnings),
            *unknown_time_warning(ran.planned, options["max_cost"]),
            *publish_warnings(ran.publish),
        )
        return _answer(call, table, ran, warnings, seconds=clock.elapsed() - begun)

    return for_each_table(call, run_table, parallel=at_once)


def _answer(call: Call, table: "Table", ran: "RunResult", warnings: tuple[str, ...], *, seconds: float) -> Answer:
    requests = table.requests
    facts = [
        *output.append_facts(ran.append, table.settings),
        *output.dedupe_facts(ran.dedupe),
        *output.predicted_facts(ran),
        *output.publish_facts(ran.publish),
        *output.host_facts(ran.host),
        output.took_fact(seconds, requests),
    ]
    return Answer(
        output.run_result(ran, requests),
        output.block(f"Table {table.name}", facts),
        warnings,
        quarantine_warning(ran.append, table.settings),
        merge_error(call, table, ran.dedupe, ran.publish),
    )
