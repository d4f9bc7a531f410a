"""`lakeupsert worker --metrics-file`: what a worker did, in a text file for Prometheus (the node exporter's text files)."""

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
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

LOOK_SECONDS = 15.0
"""How often a table's freshness is read: about as often as Prometheus looks. Shorter: more requests to an idle table."""

Family = CounterMetricFamily | GaugeMetricFamily


_FAMILIES: Mapping[str, tuple[type[Family], str]] = {
    "merges": (CounterMetricFamily, "Versions of partitions that this worker committed."),
    "units": (CounterMetricFamily, "Units of shared merges that this worker did."),
    "merged_rows": (CounterMetricFamily, "Rows that merges read."),
    "read_bytes": (CounterMetricFamily, "Compressed bytes that merges and units read."),
    "written_bytes": (CounterMetricFamily, "Compressed bytes that merges and units wrote."),
    "merge_seconds": (CounterMetricFamily, "Seconds in merges and units."),
    "failures": (CounterMetricFamily, "Partitions whose last try failed."),
    "failed_partitions": (
        GaugeMetricFamily,
        "Partitions whose last try failed here, and that this worker has not merged since.",
    ),
    "last_merge_timestamp_seconds": (
        GaugeMetricFamily,
        "When this worker last committed a version of a partition; 0: never.",
    ),
    "last_publish_timestamp_seconds": (
        GaugeMetricFamily,
        "When this worker last published a snapshot; 0: never.",
    ),
    "newest_batch_timestamp_seconds": (
        GaugeMetricFamily,
        "When the newest batch that readers see was received; 0: none, or not known.",
    ),
}
"""By their names after `lakeupsert_`, kind and help. Prometheus adds `_total` to the names of counters."""


@dataclass
class _Figures:
    """Of one table, since the worker began: values of `_FAMILIES`, and requests by kind."""

    values: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    failed: set[str] = field(default_factory=set)
    requests: Counter[str] = field(default_factory=Counter)
    held_by: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[str, float] = field(default_factory=dict)
    """When the newest batch of each was received."""


class WorkerMetrics(Collector):
    """The figures of all tables of one worker, and the file that shows them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tables: dict[str, _Figures] = {}
        self._lock = threading.Lock()
        self._looked_at: dict[str, float] = {}
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
            values, failed, now = figures.values, figures.failed, clock.now().timestamp()
            match event:
                case Merge():
                    values["merges"] += 1
                    values["merged_rows"] += event.rows_in
                    failed.discard(event.partition)
                    values["last_merge_timestamp_seconds"] = now
                case UnitWork():
                    values["units"] += 1
                case Failure():
                    values["failures"] += 1
                    failed.add(event.partition)
                case Publish():
                    values["last_publish_timestamp_seconds"] = now
            values["failed_partitions"] = len(failed)
            if isinstance(event, UnitWork) or (isinstance(event, Merge) and not event.units):
                values["read_bytes"] += event.bytes_read
                values["written_bytes"] += event.bytes_written
                values["merge_seconds"] += event.seconds
            if isinstance(event, Work):
                figures.requests.update(event.requests)

    def look(self, table: "Table") -> None:
        """Read the table's freshness, at most every `LOOK_SECONDS`. Call it in the thread that uses the table."""
        if clock.elapsed() - self._looked_at.get(table.name, float("-inf")) < LOOK_SECONDS:
            return
        found, now = table.status().freshness, clock.now().timestamp()
        with self._lock:
            figures, self._looked_at[table.name] = self._tables[table.name], clock.elapsed()
            figures.held_by, ages = found.held_by, {s: one.age_seconds for s, one in found.sources.items()}
            figures.sources = {source: now - age for source, age in ages.items() if age is not None}
            if found.age_seconds is not None:
                figures.values["newest_batch_timestamp_seconds"] = now - found.age_seconds

    def collect(self) -> Iterator[Family]:
        for name, (kind, help_) in _FAMILIES.items():
            family = kind(f"lakeupsert_{name}", help_, labels=["table"])
            for table, figures in self._tables.items():
                family.add_metric([table], figures.values[name])
            yield family
        requests = CounterMetricFamily(
            "lakeupsert_requests", "Requests to the stores of tables, by kind.", labels=["table", "kind"]
        )
        held = GaugeMetricFamily(
            "lakeupsert_held_back", "How many of each hold newer rows back from readers.", labels=["table", "cause"]
        )
        sources = GaugeMetricFamily(
            "lakeupsert_newest_source_batch_timestamp_seconds",
            "When the newest batch of landing files below this folder that readers see was received.",
            labels=["table", "source"],
        )
        for table, figures in self._tables.items():
            for family, values in ((requests, figures.requests), (held, figures.held_by), (sources, figures.sources)):
                for label, value in values.items():
                    family.add_metric([table, label], value)
        yield from (requests, held, sources)

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
