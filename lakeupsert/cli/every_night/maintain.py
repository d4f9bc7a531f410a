"""`lakeupsert maintain`: upkeep in the background."""

from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from lakeupsert.cli import output
from lakeupsert.cli.every_night.account import Account
from lakeupsert.cli.every_night.signs import Signs, signs_of_life, signs_options
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import log_option
from lakeupsert.cli.program import main
from lakeupsert.cli.repair.reprocess import rewrite_answer
from lakeupsert.cli.tables import for_each_table

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.operations.reprocess import ReprocessResult
    from lakeupsert.operations.vacuum import VacuumResult

    class MaintainFlags(TypedDict):
        """Flags that are options of `Table.maintain` as they are."""

        seconds: float
        vacuum_seconds: float
        max_seconds: float | None


_SECONDS = click.FloatRange(min=0.01)


@main.command()
@click.option("--seconds", type=_SECONDS, default=60.0, show_default=True, metavar="S", help="From look to look.")
@click.option(
    "--vacuum-seconds", type=_SECONDS, default=3600.0, show_default=True, metavar="S", help="From vacuum to vacuum."
)
@click.option("--max-seconds", type=click.FloatRange(min=0), metavar="S", help="Stop after this many seconds.")
@signs_options
@log_option
def maintain(
    call: Call,
    grace_seconds: float,
    health_file: Path | None,
    metrics_file: Path | None,
    **flags: "Unpack[MaintainFlags]",
) -> Answer:
    """Compact, expire and vacuum in the background, until you stop it.

    It does what `compact` and `vacuum --yes` do, again and again, while `ingest`, workers and readers go on. Start it a second
    time, on another machine, and that one waits until the first one ends. Works on all tables of the configuration unless you
    give --table.

    \b
    Example:
      lakeupsert maintain --vacuum-seconds 600
    """
    call.stop.grace_seconds = grace_seconds

    def work_on(table: "Table") -> Answer:
        account = _Maintained(call, table, signs)
        account.repeat(table.maintain, **flags, collect=account.add)
        return account.in_all()

    with signs_of_life(health_file, metrics_file) as signs:
        return for_each_table(call, work_on, concurrently=True)


class _Maintained(Account):
    """Rewrites and vacuums."""

    def __init__(self, call: Call, table: "Table", signs: Signs) -> None:
        super().__init__(call, table, signs)
        self.sums.update(partitions_rewritten=0, vacuums=0, snapshots_expired=0, objects_deleted=0, bytes_deleted=0)

    def add(self, result: "ReprocessResult | VacuumResult") -> None:
        from lakeupsert.operations.vacuum import VacuumResult  # imports Arrow

        if isinstance(result, VacuumResult):
            self.sums.update(vacuums=1, snapshots_expired=len(result.expired))
            self.sums.update(objects_deleted=len(result.garbage), bytes_deleted=result.bytes)
        else:
            rewrite = rewrite_answer(self.call, self.table, result)
            self.sums.update(partitions_rewritten=len(result.plan.heads) - len(result.left))
            self.error = rewrite.error
            self.show(rewrite.warnings, rewrite.error)
        self.signs.look(self.table)

    def in_all(self) -> Answer:
        text = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in self.sums.items())
        return self.answer({**self.sums}, output.block(f"Table {self.table.name}", [("upkeep", text)]))
