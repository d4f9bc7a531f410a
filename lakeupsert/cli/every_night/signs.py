"""Signs of life of a command without an end: a health file for probes, metrics for Prometheus."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click

from lakeupsert.extras import needs_extra
from lakeupsert.retries import GRACE_SECONDS

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.cli.every_night.metrics import WorkerMetrics

Given = ParamSpec("Given")
Found = TypeVar("Found")


def signs_options(command: Callable[Given, Found]) -> Callable[Given, Found]:
    """The options of `signs_of_life`, and ``--grace-seconds``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class Signs:
    """Signs of life of one command.

    Args:
        health_file: touched by `alive`.
        metrics: counts what happens to the tables that it watches.
    """

    def __init__(self, health_file: Path | None, metrics: "WorkerMetrics | None") -> None:
        self._health_file, self._metrics = health_file, metrics
        self._troubles: dict[str, str] = {}

    def watch(self, table: "Table") -> None:
        if self._metrics is not None:
            self._metrics.watch(table)

    def look(self, table: "Table") -> None:
        """Read the table's freshness for the metrics. Call it in the thread that uses the table."""
        if self._metrics is not None:
            self._metrics.look(table)

    def alive(self) -> None:
        if self._health_file is not None:
            self._health_file.touch()
        if self._metrics is not None:
            self._metrics.tick()

    def trouble(self, table: str, reason: str) -> None:
        """Write into the health file why a table, or a source, is late; "": it is not. A restart does not end an outage."""
        if self._health_file is not None and self._troubles.get(table, "") != reason:
            self._troubles[table] = reason
            self._health_file.write_text("".join(f"{t}: {why}\n" for t, why in {**self._troubles}.items() if why))


@contextmanager
def signs_of_life(health_file: Path | None, metrics_file: Path | None) -> Iterator[Signs]:
    """Writes the metrics a last time at the end. Raises UsageError if a folder is missing."""
    for option, path in (("--health-file", health_file), ("--metrics-file", metrics_file)):
        if path is not None and not path.parent.is_dir():
            raise click.UsageError(f"{option}: the folder {path.parent} does not exist.")
    metrics = _metrics_into(metrics_file) if metrics_file is not None else None
    try:
        yield Signs(health_file, metrics)
    finally:
        if metrics is not None:
            metrics.write()


def _metrics_into(path: Path) -> "WorkerMetrics":
    with needs_extra("--metrics-file", "prometheus"):
        from lakeupsert.cli.every_night.metrics import WorkerMetrics
    return WorkerMetrics(path)


health_option = click.option(
    "--health-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="Touch this file every few seconds (for a liveness probe). `ingest` and `capture` write into it why they "
    "can't work, and `capture` how many messages of Kafka it has not landed.",
)
_OPTIONS = (
    click.option(
        "--grace-seconds",
        type=click.FloatRange(min=0),
        default=GRACE_SECONDS,
        show_default=True,
        metavar="S",
        help="After SIGTERM, return unfinished messages to the queue after this many seconds.",
    ),
    health_option,
    click.option(
        "--metrics-file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="PATH",
        help="Write metrics for Prometheus to this file every few seconds. The node exporter reads names that end in .prom.",
    ),
)
