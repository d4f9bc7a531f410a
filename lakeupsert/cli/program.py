"""`main`, the program that all commands belong to.

The function of a command has one parameter for each of its options, however many: click passes them by name.
"""

import click

from lakeupsert import __version__
from lakeupsert.cli.frame import Program, common

COMMANDS = (
    *("init", "adopt", "config", "doctor", "demo"),
    *("run", "plan", "append", "dedupe", "worker", "publish"),
    *("status", "history", "report", "quarantine", "diff", "explain", "reconcile", "redrive"),
    *("head", "query", "files", "export", "ddl"),
    *("schema", "restore", "reprocess", "compact", "vacuum"),
)
"""Each has a module of its name. In the order of `lakeupsert --help`: start, nights, inspect, read, maintain."""


@click.group(cls=Program)
@click.version_option(__version__, message="lakeupsert %(version)s")
@common
def main() -> None:
    """Upserts for plain Parquet data lakes: newest record wins, per partition and key.

    \b
    Example:
      lakeupsert config --example > lakeupsert.toml
      lakeupsert run
    """
