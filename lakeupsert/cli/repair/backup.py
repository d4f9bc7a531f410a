"""`lakeupsert backup`: copy the table to another address."""

from typing import TYPE_CHECKING

import click

from lakeupsert.cli import output as shapes
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import log_option
from lakeupsert.cli.program import main
from lakeupsert.phrases import count, size

if TYPE_CHECKING:
    from lakeupsert.operations.backup import CopyResult


@main.command()
@click.option(
    "--output", required=True, metavar="ADDRESS", help="A folder or an address of a store, for this table only."
)
@log_option
def backup(call: Call, output: str) -> Answer:
    """Copy the table to another address.

    Copies what readers of the kept snapshots and the next commands need. Objects that the copy has already are not copied again.
    Landing files, the queue and tables of other formats are not part of it. Writers may go on meanwhile.

    \b
    Example:
      lakeupsert backup --output s3://backups/sales
    """
    with call.open_table() as table, call.progress(table.name) as progress:
        found = table.backup(output, progress=progress)
        return copy_answer(table.name, found, output, f"`lakeupsert recover {output}` makes a table of it")


def copy_answer(table: str, found: "CopyResult", address: str, next: str) -> Answer:
    """The answer of `backup` and `recover`."""
    shown = "nothing published" if found.snapshot is None else f"snapshot {found.snapshot}"
    facts = [
        ("backup", f"{found.number} at {address}: {shown}, batch {found.batch}"),
        ("copied", f"{count(found.objects, 'object')} with {size(found.bytes)}"),
        ("was there", count(found.kept, "object")),
        ("next", next),
    ]
    result = {"address": address, **shapes.fields(found, "number", "snapshot", "batch", "objects", "bytes", "kept")}
    return Answer(result, shapes.block(f"Table {table}", facts))
