"""`lakeupsert status --watch`: the status on the terminal, refreshed every second until Ctrl-C.

It keeps its tables open, so each refresh reads only what is new (`lakeupsert.report.status`).
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lakeupsert import clock
from lakeupsert.cli import output
from lakeupsert.cli.frame import Call
from lakeupsert.errors import ConfigurationError
from lakeupsert.phrases import count, when, without_controls
from lakeupsert.report.attention import Level, verdict

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.table import Table as Grid

    from lakeupsert.api import Table
    from lakeupsert.report.status import Status

SECONDS = 1.0
STYLES: dict[Level, str] = {"good": "bold green", "note": "bold", "warn": "bold yellow", "bad": "bold red"}
BAR = 40
"""Width of the progress bar. With its text it fits on a terminal of 80 columns."""
PANEL, WIDEST = 80, 120
"""Width that a panel needs at least, and has at most: longer lines are hard to read."""
FAILURES = 5
"""How many failed partitions are shown with their reasons."""


def watch(call: Call, tables: "Sequence[Table]") -> None:
    """Show the status of the tables until Ctrl-C or SIGTERM. Raises ConfigurationError if there is no terminal."""
    from rich.columns import Columns
    from rich.console import Console, Group
    from rich.live import Live

    console = Console()
    if call.as_json or not (sys.stdout.isatty() and console.is_interactive):
        reason = "--json prints one object" if call.as_json else "output is redirected"
        raise ConfigurationError(
            "no-terminal",
            f"--watch needs a terminal, but {reason}.",
            next="omit --watch; a program can run `lakeupsert status --json` as often as it needs",
        )

    def draw() -> Group:
        found = {t.name: t.status() for t in tables}
        end = f" {when(clock.now())}. Ctrl-C ends it."
        side_by_side = min(len(found), max(1, console.width // PANEL))
        panels = Group(
            Columns(
                [panel(name, status) for name, status in found.items()],
                width=min(WIDEST, console.width // side_by_side),
                padding=0,
            ),
            end,
        )
        fits = len(console.render_lines(panels)) <= console.height
        return panels if fits or len(found) == 1 else Group(overview(found), end)

    with call.stoppable() as stop, Live(draw(), console=console, auto_refresh=False, transient=True) as live:
        try:
            while not stop.wait(SECONDS):
                live.update(draw(), refresh=True)
        except KeyboardInterrupt:
            pass  # the normal end, not a failure


def panel(name: str, status: "Status") -> "Panel":
    """One table: its status, the progress of its merges, and the partitions that fail."""
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table as Grid
    from rich.text import Text

    found = verdict(name, status)
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_row("verdict", Text(found.what, STYLES[found.level]))
    for command in found.commands:
        grid.add_row("type", Text(command, "bold"))
    for label, text in output.status_facts(status):
        if label != "failed" or not status.failed:  # else shown below, with the reasons
            grid.add_row(label, Text(without_controls(text), _style(label, status)))
    touched = len(status.behind)
    progress = Grid.grid(padding=(0, 1))
    progress.add_row(
        ProgressBar(
            total=touched or 1, completed=touched - status.dirty if touched else 1, width=BAR, complete_style="green"
        ),
        _merged(status),
    )
    grid.add_row("merged", progress)
    shown = list(status.failed.items())[:FAILURES]
    for partition, reason in shown:
        why = without_controls(reason.partition("\n")[0])
        grid.add_row("failed", Text.assemble((without_controls(partition), "bold red"), f": {why}"))
    if len(status.failed) > len(shown):
        grid.add_row("", f"and {len(status.failed) - len(shown):,} more")
    return Panel(grid, title=Text(name), title_align="left")


def overview(found: "Mapping[str, Status]") -> "Grid":
    """A line for each table, for a terminal that has no room for their panels."""
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=None, expand=True)
    for head in ("table", "verdict", "merged"):
        grid.add_column(head, overflow="fold")
    for name, status in found.items():
        one = verdict(name, status)
        grid.add_row(Text(name), Text(one.what, STYLES[one.level]), _merged(status))
    return grid


def _merged(status: "Status") -> str:
    touched = len(status.behind)
    return f"{touched - status.dirty:,} of {count(touched, 'partition')}" if touched else "all, and published"


def _style(label: str, status: "Status") -> str:
    dead = status.queue is not None and status.queue.dead > 0
    if (label == "lagging" and status.lagging) or (label == "queue" and dead):
        return STYLES["bad"]
    behind = label in status.publishers and not status.publishers[label].is_newest
    return STYLES["warn"] if behind or (label == "quarantined" and status.quarantined) else ""
