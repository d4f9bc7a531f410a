"""`lakeupsert redrive`: dead letters, why they are dead, and back to the queue with them."""

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call, common
from lakeupsert.cli.options import selection
from lakeupsert.cli.program import main


@main.command()
@click.option(
    "--partition",
    "partitions",
    metavar="V",
    multiple=True,
    help="Only that partition's: 2020-01-01, or its folder; repeatable.",
)
@common
@click.pass_obj
def redrive(call: Call, partitions: tuple[str, ...]) -> Answer:
    """Give dead letters back to the queue, once what made them fail is mended.

    It lists them, with the reason of each. Those of partitions that were merged meanwhile are deleted. Workers that are
    waiting take up the others at once; `lakeupsert dedupe` does where there are none.

    \b
    Example:
      lakeupsert redrive --partition 2020-01-01
    """
    with call.open_table() as table:
        found = table.redrive(selection(table, None, None, partitions)) if partitions else table.redrive()
        facts = []
        for letter in found.letters:
            message, reason = letter.message, letter.reason.partition("\n")[0]
            facts += [
                ("dead letter", f"{message.partition}, batch {message.batch}" if message else "can't be read"),
                ("", f"after {output.count(letter.receives, 'receive')}: {reason}"),
            ]
        facts += [
            ("redriven", f"{found.redriven:,}" if found.redriven else "none"),
            ("deleted", f"{found.dropped:,}, merged meanwhile" if found.dropped else "none"),
            ("left", f"{found.left:,}" if found.left else "none"),
        ]
        warnings: tuple[str, ...] = ()
        if found.left and not partitions:
            warnings = (f"{output.count(found.left, 'dead letter')} can't be read, or name no batch of this table",)
        return Answer(
            {"redriven": found.redriven, "dropped": found.dropped, "left": found.left},
            output.block(f"Table {table.name}", facts),
            warnings,
        )
