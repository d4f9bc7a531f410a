"""`lakeupsert redrive`: list dead letters with their reasons, and return them to the queue."""

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import PartitionChoice, partitions_option
from lakeupsert.cli.program import main
from lakeupsert.phrases import count


@main.command()
@partitions_option("Only this partition, by its value (2020-01-01) or its folder. Repeatable.")
def redrive(call: Call, partitions: tuple[str, ...]) -> Answer:
    """Return dead letters to the queue after you fixed the cause.

    Lists each dead letter with its reason. Deletes those whose partition was merged in the meantime. Waiting workers take
    the others at once. If no worker is running, run `lakeupsert dedupe`.

    \b
    Example:
      lakeupsert redrive --partition 2020-01-01
    """
    with call.open_table() as table:
        found = table.redrive(PartitionChoice(partitions=partitions).of(table)) if partitions else table.redrive()
        facts = []
        for letter in found.letters:
            message, reason = letter.message, letter.reason.partition("\n")[0]
            facts += [
                ("dead letter", f"{message.partition}, batch {message.batch}" if message else "unreadable"),
                ("", f"after {count(letter.receives, 'attempt')}: {reason}"),
            ]
        facts += [
            ("redriven", f"{found.redriven:,}" if found.redriven else "none"),
            ("deleted", f"{found.dropped:,}, already merged" if found.dropped else "none"),
            ("left", f"{found.left:,}" if found.left else "none"),
        ]
        warnings: tuple[str, ...] = ()
        if found.left and not partitions:
            warnings = (
                f"{count(found.left, 'dead letter')} left in the queue: unreadable, or of no batch of this table",
            )
        return Answer(
            output.fields(found, "redriven", "dropped", "left"),
            output.block(f"Table {table.name}", facts),
            warnings,
        )
