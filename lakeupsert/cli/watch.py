"""`lakeupsert status --watch`: the status on the screen, again every second, until somebody presses Ctrl-C.

One `Table` is asked again and again, so each look reads only what is new (`lakeupsert.report.status`).
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lakeupsert import clock
from lakeupsert.cli import output
from lakeupsert.cli.frame import Call
from lakeupsert.errors import ConfigurationError
from lakeupsert.report.numbers import count

if TYPE_CHECKING:
    from rich.panel import Panel

    from lakeupsert.api import Table
    from lakeupsert.report.status import Status

SECONDS = 1.0
BAR = 40
"""Columns of the progress bar: it has room beside its text on a terminal of 80."""
FAILURES = 5
"""How many failed partitions are shown with their reasons."""


def watch(call: Call, tables: "Sequence[Table]") -> None:
    """Show the tables' status until Ctrl-C or SIGTERM; refuses where nobody would see it."""
    from rich.console import Console, Group
    from rich.live import Live

    console = Console()
    if call.as_json or not (sys.stdout.isatty() and console.is_interactive):
        why = "--json asks for one object" if call.as_json else "standard output is none"
        raise ConfigurationError(
            "no-terminal",
            f"--watch draws on a terminal, and {why}.",
            next="leave out --watch; a program calls `lakeupsert status --json` as often as it needs",
        )

    def look() -> Group:
        return Group(
            *(panel(t.name, t.status()) for t in tables), f" {clock.now():%Y-%m-%d %H:%M:%S} UTC. Ctrl-C ends it."
        )

    with call.stoppable() as stop, Live(look(), console=console, auto_refresh=False, transient=True) as live:
        try:
            while not stop.wait(SECONDS):
                live.update(look(), refresh=True)
        except KeyboardInterrupt:
            pass  # that is how it ends, so it is no failure


def panel(name: str, status: "Status") -> "Panel":
    """One table: its facts, how far the merge of what came is, and what fails."""
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    for label, text in output.status_facts(status):
        if label != "failed":  # told below, with the reasons
            grid.add_row(label, Text(text, "bold red" if label == "lagging" and status.lagging else ""))
    came = len(status.behind)
    merged = came - status.dirty
    progress = Grid.grid(padding=(0, 1))
    told = f"{merged:,} of {count(came, 'partition')}" if came else "all, and published"
    progress.add_row(
        ProgressBar(total=came or 1, completed=merged if came else 1, width=BAR, complete_style="green"), told
    )
    grid.add_row("merged", progress)
    shown = list(status.failed.items())[:FAILURES]
    for partition, reason in shown:
        grid.add_row("failed", Text.assemble((partition, "bold red"), f": {reason.partition(chr(10))[0]}"))
    if len(status.failed) > len(shown):
        grid.add_row("", f"and {len(status.failed) - len(shown):,} more")
    return Panel(grid, title=Text(name), title_align="left")
