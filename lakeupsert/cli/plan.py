"""`lakeupsert plan`, and `run --dry-run`: what the next run will do."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lakeupsert.cli.frame import Answer, Call, common, each
from lakeupsert.cli.options import limit_options, partition_options, selection
from lakeupsert.cli.planned import planned
from lakeupsert.cli.program import main

if TYPE_CHECKING:
    from lakeupsert.api import Table


@main.command()
@partition_options
@limit_options
@common
@click.pass_obj
def plan(
    call: Call,
    first: str | None,
    last: str | None,
    partitions: tuple[str, ...],
    prices: Path | None,
    max_bytes: int | None,
    max_cost: float | None,
) -> Answer:
    """Show what the next run will do. Writes nothing.

    Shows new files, partitions to merge, bytes, requests, seconds and cost. --partition, or --from and --to, limit the plan
    to these partitions. Plans all tables of the configuration unless you give --table.

    \b
    Example:
      lakeupsert plan --max-bytes 50GB
    """

    def one(table: "Table") -> Answer:
        if partitions or first or last:
            return planned(call, table, prices, max_bytes, max_cost, selection(table, first, last, partitions))
        return planned(call, table, prices, max_bytes, max_cost)

    return each(call, one)
