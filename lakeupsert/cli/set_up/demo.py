"""`lakeupsert demo`: run the demonstration."""

import sys
from contextlib import redirect_stdout

import click

from lakeupsert.cli.frame import JSON, Answer, Call
from lakeupsert.cli.program import main
from lakeupsert.errors import RefusedError


@main.command(cls=click.Command, params=[JSON], context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@click.pass_obj
def demo(call: Call, arguments: tuple[str, ...]) -> Answer:
    """Load real purchases night by night, and check every row.

    `lakeupsert demo -- --help` lists its own options.

    \b
    Example:
      lakeupsert demo --nights 30
    """
    from lakeupsert.demo import main as demonstrate  # imports Arrow

    try:
        with redirect_stdout(sys.stderr if call.as_json else sys.stdout):
            code = demonstrate(list(arguments))
    except SystemExit as e:  # it parses its own arguments
        if not e.code:
            raise
        raise click.UsageError("The demonstration does not accept these arguments.") from e
    error = None
    if code:
        error = RefusedError(
            "demo-failed",
            "The demo did not end with an exact table; its output shows where.",
            next="report this output as a bug in lakeupsert",
        )
    return Answer({"exact": not code}, error=error)
