"""`lakeupsert delete`: delete rows."""

from typing import TYPE_CHECKING, Unpack

from lakeupsert.cli.change.update import statement_answer, statement_options
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import log_option, prepare_spark
from lakeupsert.cli.program import main

if TYPE_CHECKING:
    from lakeupsert.cli.change.update import StatementFlags


@main.command()
@statement_options
@log_option
def delete(call: Call, yes: bool, **options: "Unpack[StatementFlags]") -> Answer:
    """Delete the rows that a filter or a list of keys chooses.

    The deletes become one batch, which is merged and published. A deleted key stays deleted against every record with a lower
    ordering value; one that lands later with the same or a greater value brings it back. Earlier snapshots still show the
    rows until they expire.

    \b
    Example:
      lakeupsert delete --from customers-to-forget.csv --yes
    """
    with call.open_table() as table:
        if yes:
            prepare_spark(table, engine=None, large=True)
        with call.progress(table.name) as progress, call.stoppable() as stop:
            done = table.delete(**options, dry=not yes, stop=stop, progress=progress)
        return statement_answer(call, table, done, yes=yes)
