"""The command line. `main` is the program: call it without arguments, or run it with click's test runner."""

from lakeupsert.cli import doctor, explain, init, redrive, report, reprocess, upkeep  # noqa: F401 - their commands register themselves
from lakeupsert.cli.commands import main

__all__ = ["main"]
