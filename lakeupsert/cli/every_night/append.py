"""`lakeupsert append`: append landing files as one batch."""

from datetime import datetime
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import (
    batch_id_option,
    check_full,
    full_extract_options,
    host_option,
    log_option,
    prepare_spark,
)
from lakeupsert.cli.problems import append_warnings, quarantine_warning
from lakeupsert.cli.program import main
from lakeupsert.errors import ConfigurationError, RefusedError

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.engine.by_name import HostChoice
    from lakeupsert.table.ledger import Scope

    class AppendFlags(TypedDict):
        """Flags that are options of `Table.append` as they are."""

        host: HostChoice
        batch_id: str | None
        full: Scope | None
        may_shrink: bool
        again: bool
        replay_quarantine: bool


@main.command()
@host_option
@click.option(
    "--received-from",
    type=click.DateTime(["%Y-%m-%d"]),
    metavar="DATE",
    help="First date of the landing folders to append, for example 2020-01-31.",
)
@click.option(
    "--received-to",
    type=click.DateTime(["%Y-%m-%d"]),
    metavar="DATE",
    help="Last date of the landing folders to append.",
)
@batch_id_option
@full_extract_options
@click.option(
    "--again",
    is_flag=True,
    help="Append the landing files of batches that a restore withdrew, and no others.",
)
@click.option(
    "--replay-quarantine",
    is_flag=True,
    help="Try the quarantined rows again, after you fixed why they were refused. Appends no landing files.",
)
@log_option
def append(
    call: Call, received_from: datetime | None, received_to: datetime | None, **options: "Unpack[AppendFlags]"
) -> Answer:
    """Append all new landing files as one batch.

    Puts a message for each touched partition into the queue. If the queue does not answer, the batch is committed all the
    same, with a warning; `reconcile` sends the messages. Readers see the batch once `dedupe` or a `worker` has merged it and
    `publish` has run.

    \b
    Example:
      lakeupsert append --received-from 2020-01-01 --received-to 2020-01-31
    """
    check_full(options["full"], may_shrink=options["may_shrink"])
    host, replay_quarantine = options["host"], options["replay_quarantine"]
    if replay_quarantine and host != "auto":
        raise click.UsageError("--replay-quarantine always works in this process: leave out --host.")
    received = (
        received_from.date() if received_from else None,
        received_to.date() if received_to else None,
    )
    with call.open_table() as table:
        if any(received) and not table.settings.landing_dates:
            raise ConfigurationError(
                "no-landing-dates",
                f"Table {table.name!r} has no `landing_dates`, so landing files can't be selected by date.",
                next=f'set `landing_dates` in [tables.{table.name}], for example "%Y-%m-%d", or omit --received-from '
                "and --received-to",
            )
        if not replay_quarantine:
            prepare_spark(table, host=host)
        early_warnings: list[str] = []
        with call.progress(table.name) as progress, call.stoppable():  # on SIGTERM it still finishes the whole batch
            appended = table.append(**options, received=received, progress=progress, warn=early_warnings.append)
        facts = output.append_facts(appended, table.settings)
        if appended is not None:
            facts += output.host_facts(appended.entry.host)
        if replay_quarantine and appended is None:
            _refuse_waiting(table)
            facts = [("replayed", "nothing: no row is quarantined")]
        text = output.block(f"Table {table.name}", facts)
        return Answer(
            output.append_result(appended),
            text,
            append_warnings(appended, early_warnings),
            quarantine_warning(appended, table.settings),
        )


def _refuse_waiting(table: "Table") -> None:
    if waiting := sum(batch.num_rows for batch in table.quarantine()):
        raise RefusedError(
            "nothing-passes",
            f"No row of the {waiting:,} in quarantine of table {table.name!r} passes now. Nothing was changed.",
            next="see `lakeupsert quarantine` for the reasons, and correct the setting or the source that they name",
        )
