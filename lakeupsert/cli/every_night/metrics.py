"""`lakeupsert worker --metrics-file`: what a worker did, in a text file for Prometheus (the node exporter's text files)."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from lakeupsert import clock
from lakeupsert.events import Event, Failure, Merge, Publish, UnitWork, Work

if TYPE_CHECKING:
    from lakeupsert.api import Table

log = logging.getLogger(__name__)

WRITE_SECONDS = 1.0
"""How long a file is left as it is. Prometheus looks every 15 seconds or so."""

Family = CounterMetricFamily | GaugeMetricFamily


@dataclass
class _Figures:
    """Of one table, since the worker began. Times are in seconds since 1970 UTC, 0 if there was none."""

    merges: int = 0
    units: int = 0
    rows: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    failures: int = 0
    failed: set[str] = field(default_factory=set)
    last_merge: float = 0.0
    last_publish: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)


_FAMILIES: tuple[tuple[type[Family], str, str, Callable[[_Figures], float]], ...] = (
    (CounterMetricFamily, "merges", "Versions of partitions that this worker committed.", lambda f: f.merges),
    (CounterMetricFamily, "units", "Units of shared merges that this worker did.", lambda f: f.units),
    (CounterMetricFamily, "merged_rows", "Rows that merges read.", lambda f: f.rows),
    (CounterMetricFamily, "read_bytes", "Compressed bytes that merges and units read.", lambda f: f.bytes_read),
    (CounterMetricFamily, "written_bytes", "Compressed bytes that merges and units wrote.", lambda f: f.bytes_written),
    (CounterMetricFamily, "merge_seconds", "Seconds in merges and units.", lambda f: f.seconds),
    (CounterMetricFamily, "failures", "Partitions whose last try failed.", lambda f: f.failures),
    (
        GaugeMetricFamily,
        "failed_partitions",
        "Partitions whose last try failed here, and that this worker has not merged since.",
        lambda f: len(f.failed),
    ),
    (
        GaugeMetricFamily,
        "last_merge_timestamp_seconds",
        "When this worker last committed a version of a partition; 0: never.",
        lambda f: f.last_merge,
    ),
    (
        GaugeMetricFamily,
        "last_publish_timestamp_seconds",
        "When this worker last published a snapshot; 0: never.",
        lambda f: f.last_publish,
    ),
)
"""Kind, name after `lakeupsert_`, help, and value. Prometheus adds `_total` to the names of counters."""


class WorkerMetrics(Collector):
    """The figures of all tables of one worker, and the file that shows them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tables: dict[str, _Figures] = {}
        self._lock = threading.Lock()
        self._written, self._written_at = True, float("-inf")
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def watch(self, table: "Table") -> None:
        """Count the events of this table from now on."""
        with self._lock:
            self._tables[table.name] = _Figures()
        table.listen(self.add)

    def add(self, event: Event) -> None:
        with self._lock:
            figures = self._tables[event.table or ""]
            match event:
                case Merge():
                    figures.merges += 1
                    figures.rows += event.rows_in
                    figures.failed.discard(event.partition)
                    figures.last_merge = clock.now().timestamp()
                case UnitWork():
                    figures.units += 1
                case Failure():
                    figures.failures += 1
                    figures.failed.add(event.partition)
                case Publish():
                    figures.last_publish = clock.now().timestamp()
            if isinstance(event, UnitWork) or (isinstance(event, Merge) and not event.units):
                figures.bytes_read += event.bytes_read
                figures.bytes_written += event.bytes_written
                figures.seconds += event.seconds
            if isinstance(event, Work):
                figures.requests.update(event.requests)

    def collect(self) -> Iterator[Family]:
        for kind, name, help_, value in _FAMILIES:
            family = kind(f"lakeupsert_{name}", help_, labels=["table"])
            for table, figures in self._tables.items():
                family.add_metric([table], value(figures))
            yield family
        requests = CounterMetricFamily(
            "lakeupsert_requests", "Requests to the stores of tables, by kind.", labels=["table", "kind"]
        )
        for table, figures in self._tables.items():
            for call, number in figures.requests.items():
                requests.add_metric([table, call], number)
        yield requests

    def tick(self) -> None:
        """Write the file, if it was not written just now."""
        if clock.elapsed() - self._written_at >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Replace the file at once, so that nobody reads half of it. Merges go on if it can't be written, with one warning."""
        with self._lock:
            self._written_at = clock.elapsed()
            try:
                write_to_textfile(str(self._path), self._registry)
                self._written = True
            except OSError as e:
                if self._written:
                    log.warning("metrics are not written for now: %s: %s", self._path, e)
                self._written = False
