"""`lakeupsert config`: print the effective settings."""

import json
from pathlib import Path

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.program import main

EXAMPLE = Path(__file__).with_name("example.toml")


@main.command()
@click.option("--example", is_flag=True, help="Print a commented example configuration instead.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of the configuration file instead, for editors.")
def config(call: Call, example: bool, schema: bool) -> Answer:
    """Print the effective settings and where each comes from.

    Prints all tables of the configuration unless you give --table.

    \b
    Example:
      lakeupsert config --example > lakeupsert.toml
      lakeupsert config --schema > lakeupsert.schema.json
    """
    if example and schema:
        raise click.UsageError("Give either --example or --schema.")
    if example:
        text = EXAMPLE.read_text("utf-8")
        return Answer({"example": text}, text.rstrip("\n"))
    if schema:
        from lakeupsert.cli.set_up.settings_schema import settings_schema  # no other call needs it

        found_schema = settings_schema()
        return Answer({"schema": found_schema}, json.dumps(found_schema, indent=2))
    found, names = call.config(), call.names()
    return Answer(output.config_result(found, names), output.config_text(found, names))
