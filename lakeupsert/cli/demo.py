"""`lakeupsert demo`: the demonstration."""

import sys
from contextlib import redirect_stdout

import click

from lakeupsert.cli.frame import Answer, Call, json_option
from lakeupsert.cli.program import main
from lakeupsert.errors import RefusedError


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@json_option
@click.pass_obj
def demo(call: Call, arguments: tuple[str, ...]) -> Answer:
    """Load real purchases night by night, and check every row.

    `lakeupsert demo -- --help` lists its own options.

    \b
    Example:
      lakeupsert demo --nights 30
    """
    from lakeupsert.demo import main as demonstrate  # brings Arrow and the data

    try:
        with redirect_stdout(sys.stderr if call.as_json else sys.stdout):
            code = demonstrate(list(arguments))
    except SystemExit as e:  # it parses its own arguments
        if not e.code:
            raise
        raise click.UsageError("The demonstration does not take these arguments.") from e
    error = None
    if code:
        error = RefusedError(
            "demo-failed",
            "The demonstration did not end exact; what it printed tells where.",
            next="report what it printed as a bug of lakeupsert",
        )
    return Answer({"exact": not code}, error=error)
