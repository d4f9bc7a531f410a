"""`lakeupsert ingest`: batches that follow each other within seconds."""

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from lakeupsert.cli import output
from lakeupsert.cli.every_night.signs import Signs, signs_of_life, signs_options
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import log_option
from lakeupsert.cli.problems import append_warnings, merge_error, publish_warnings, quarantine_warning
from lakeupsert.cli.program import main
from lakeupsert.cli.tables import for_each_table

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.errors import LakeupsertError
    from lakeupsert.pipeline.append.commit import AppendResult
    from lakeupsert.pipeline.merge.commit import PartitionResult
    from lakeupsert.pipeline.publish import PublishResult

    class IngestFlags(TypedDict):
        """Flags that are options of `Table.ingest` as they are."""

        seconds: float
        publish_seconds: float
        max_seconds: float | None


log = logging.getLogger(__name__)


@main.command()
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.01),
    default=1.0,
    show_default=True,
    metavar="S",
    help="From one look at the landing zone to the next. Each look makes one batch.",
)
@click.option(
    "--publish-seconds",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="S",
    help="The longest time between a merge and the snapshot that shows it. 0: publish after each batch.",
)
@click.option("--max-seconds", type=click.FloatRange(min=0), metavar="S", help="Stop after this many seconds.")
@signs_options
@log_option
def ingest(
    call: Call,
    grace_seconds: float,
    health_file: Path | None,
    metrics_file: Path | None,
    **options: "Unpack[IngestFlags]",
) -> Answer:
    """Take what lands every second, merge and publish it, until you stop it.

    It does what `run` does, batch after batch, in one process that keeps what it has read. Start it a second time, on another
    machine, and that one waits until the first one ends. On SIGTERM it finishes its batch. Other workers may help it. Works on
    all tables of the configuration unless you give --table.

    \b
    Example:
      lakeupsert ingest --seconds 2 --publish-seconds 10
    """
    call.stop.grace_seconds = grace_seconds

    def work_on(table: "Table") -> Answer:
        signs.watch(table)
        account = _Account(call, table, signs)
        with call.stoppable() as stop:
            table.ingest(
                **options,
                stop=stop,
                calls_at_once=len(call.tables),
                alive=signs.alive,
                trouble=partial(signs.trouble, table.name),
                collect=account.add,
                warn=account.warn,
            )
        return account.answer()

    with signs_of_life(health_file, metrics_file) as signs:
        return for_each_table(call, work_on, concurrently=True)


class _Account:
    """Sums over all rounds of one table, and the warnings that it gave."""

    def __init__(self, call: Call, table: "Table", signs: Signs) -> None:
        from lakeupsert.operations.rounds import Warner  # imports Arrow, as the next ones
        from lakeupsert.report.totals import MergeTotals

        self._call, self._table, self._signs = call, table, signs
        self.warn = Warner(partial(log.warning, "%s: %s", table.name))
        self.merges = MergeTotals()
        self.published: PublishResult | None = None
        self.error: LakeupsertError | None = None
        """Why the last publish left batches out."""
        self.batches = dict.fromkeys(("batches", "files", "rows_read", "rows_appended", "rows_quarantined"), 0)

    def add(self, result: "AppendResult | PartitionResult | PublishResult") -> None:
        from lakeupsert.pipeline.append.commit import AppendResult
        from lakeupsert.pipeline.merge.commit import PartitionResult
        from lakeupsert.pipeline.publish import PublishResult

        warnings: tuple[str, ...] = ()
        match result:
            case AppendResult(entry=entry):
                counts = (1, len(entry.files), entry.rows_read, entry.rows_appended, entry.rows_quarantined)
                for name, number in zip(self.batches, counts, strict=True):
                    self.batches[name] += number
                warnings = (*append_warnings(result, ()), *quarantine_warning(result, self._table.settings))
            case PartitionResult():
                self.merges.add(result)
            case PublishResult():
                self.published = result
                self._signs.look(self._table)
                self.error = merge_error(self._call, self._table, list(self.merges.failures.values()), result)
                held = (f"{self.error.message} Next: {self.error.next}",) if self.error else ()
                warnings = (*publish_warnings(result), *held)
        for text in warnings:
            self.warn(text)

    def answer(self) -> Answer:
        published = self.published
        sums = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in self.batches.items() if number)
        facts = [("appended", sums or "nothing"), *output.totals_facts(self.merges)]
        return Answer(
            {
                **self.batches,
                "totals": output.totals_result(self.merges),
                "publish": published and output.publish_result(published),
            },
            output.block(f"Table {self._table.name}", facts + (output.publish_facts(published) if published else [])),
            json_warnings=tuple(self.warn.shown_at),
            error=self.error,
        )
