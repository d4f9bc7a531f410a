"""`main`, the program that all commands belong to.

The function of a command has one parameter for each of its options, however many: click passes them by name.
"""

import click

from lakeupsert import __version__
from lakeupsert.cli.frame import Program, common

GROUPS = {
    "Every night": ("run", "plan", "append", "dedupe", "worker", "publish"),
    "Look": ("status", "history", "report", "quarantine", "diff", "explain", "reconcile"),
    "Read": ("head", "query", "files", "export", "ddl"),
    "Change": ("update", "delete"),
    "Repair": ("redrive", "restore", "reprocess", "compact", "vacuum"),
    "Set up": ("try", "init", "adopt", "config", "doctor", "schema", "demo"),
}
"""The commands as `lakeupsert --help` lists them. Each has a module of its name in the room of its heading."""


@click.group(cls=Program, groups=GROUPS)
@click.version_option(__version__, message="lakeupsert %(version)s")
@common
def main() -> None:
    """Upserts for plain Parquet data lakes: newest record wins, per partition and key.

    \b
    Example:
      lakeupsert config --example > lakeupsert.toml
      lakeupsert run
    """
