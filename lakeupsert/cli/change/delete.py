"""`lakeupsert delete`: delete rows."""

from typing import TYPE_CHECKING, Unpack

from lakeupsert.cli.change.update import change_rows, statement_options
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import log_option
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
    return change_rows(call, yes, lambda table, **how: table.delete(**options, **how))
