"""`lakeupsert ddl`: print the statements that make the table known to an engine."""

import dataclasses
from typing import TYPE_CHECKING

import click

from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.program import main

if TYPE_CHECKING:
    from lakeupsert.operations.ddl import Engine

ENGINES = ("athena", "bigquery", "databricks", "duckdb", "snowflake", "spark", "trino")


@main.command()
@click.option("--for", "engine", type=click.Choice(ENGINES), required=True, help="The engine.")
def ddl(call: Call, engine: "Engine") -> Answer:
    """Print the statements that make the table known to an engine.

    Nothing is run, and nothing is read but the configuration.

    \b
    Example:
      lakeupsert ddl --for trino
    """
    with call.open_table() as table:
        found = table.ddl(engine)
        return Answer({**dataclasses.asdict(found), "replace": dict(found.replace)}, str(found))
