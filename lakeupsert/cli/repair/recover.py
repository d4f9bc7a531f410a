"""`lakeupsert recover`: make a table of a backup."""

import click

from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import log_option
from lakeupsert.cli.program import main
from lakeupsert.cli.repair.backup import copy_answer


@main.command()
@click.argument("address", metavar="ADDRESS")
@click.option("--number", type=click.IntRange(1), metavar="N", help="Which backup; the newest one by default.")
@log_option
def recover(call: Call, address: str, number: int | None) -> Answer:
    """Make the table from a backup.

    ADDRESS is the --output of `lakeupsert backup`. The folder of the table, `processed`, must be empty. If the command breaks
    off, run it again.

    \b
    Example:
      lakeupsert recover s3://backups/sales
    """
    with call.open_table() as table, call.progress(table.name) as progress:
        found = table.recover(address, number, progress=progress)
        return copy_answer(table.name, found, address, "`lakeupsert fsck --deep` proves it, `lakeupsert run` continues")
