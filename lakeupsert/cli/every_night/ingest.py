"""`lakeupsert ingest`: batches that follow each other within seconds."""

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from lakeupsert.cli import output
from lakeupsert.cli.every_night.account import Account
from lakeupsert.cli.every_night.signs import Signs, signs_of_life, signs_options
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import log_option, parse_size
from lakeupsert.cli.problems import append_warnings, merge_error, publish_warnings, quarantine_warning
from lakeupsert.cli.program import main
from lakeupsert.cli.tables import for_each_table

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.pipeline.append.commit import AppendResult
    from lakeupsert.pipeline.merge.commit import PartitionResult
    from lakeupsert.pipeline.publish import PublishResult

    class IngestFlags(TypedDict):
        """Flags that are options of `Table.ingest` as they are."""

        seconds: float
        batch_rows: int | None
        batch_bytes: int
        publish_seconds: float
        max_seconds: float | None


@main.command()
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.01),
    default=1.0,
    show_default=True,
    metavar="S",
    help="From one look at the landing zone to the next. A look ends a batch.",
)
@click.option(
    "--batch-rows",
    type=click.IntRange(min=1),
    metavar="N",
    help="End a batch behind the landing file with which it has about this many rows. The next one follows without a pause.",
)
@click.option(
    "--batch-bytes",
    default="1GiB",
    show_default=True,
    callback=parse_size,
    metavar="SIZE",
    help="The same by bytes of landing files. Seconds, rows or bytes end a batch, the first that is reached.",
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
        account = _Ingested(call, table, signs)
        account.repeat(table.ingest, **options, collect=account.add)
        return account.in_all()

    with signs_of_life(health_file, metrics_file) as signs:
        return for_each_table(call, work_on, concurrently=True)


class _Ingested(Account):
    """Batches, merges, and the last snapshot."""

    def __init__(self, call: Call, table: "Table", signs: Signs) -> None:
        from lakeupsert.report.totals import MergeTotals  # imports Arrow

        super().__init__(call, table, signs)
        self.sums.update(dict.fromkeys(("batches", "files", "rows_read", "rows_appended", "rows_quarantined"), 0))
        self._merges = MergeTotals()
        self._published: PublishResult | None = None

    def add(self, result: "AppendResult | PartitionResult | PublishResult") -> None:
        from lakeupsert.pipeline.append.commit import AppendResult  # imports Arrow, as the next ones
        from lakeupsert.pipeline.merge.commit import PartitionResult
        from lakeupsert.pipeline.publish import PublishResult

        match result:
            case AppendResult(entry=entry):
                self.sums.update(batches=1, files=len(entry.files), rows_read=entry.rows_read)
                self.sums.update(rows_appended=entry.rows_appended, rows_quarantined=entry.rows_quarantined)
                self.show((*append_warnings(result, ()), *quarantine_warning(result, self.table.settings)))
            case PartitionResult():
                self._merges.add(result)
            case PublishResult():
                self._published = result
                self.signs.look(self.table)
                self.error = merge_error(self.call, self.table, list(self._merges.failures.values()), result)
                self.show(publish_warnings(result), self.error)

    def in_all(self) -> Answer:
        published = self._published
        sums = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in self.sums.items() if number)
        facts = [("appended", sums or "nothing"), *output.totals_facts(self._merges)]
        return self.answer(
            {
                **self.sums,
                "totals": output.totals_result(self._merges),
                "publish": published and output.publish_result(published),
            },
            output.block(f"Table {self.table.name}", facts + (output.publish_facts(published) if published else [])),
        )
