"""CloudWatch's embedded metrics of a table: lines that a function writes to its log, so they need no call and no right.

Namespace `lakeupsert`, with `Table` as the only dimension (README.md lists the names). Alarms name these.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.metrics.provider.cloudwatch_emf.cloudwatch import AmazonCloudWatchEMFProvider

from lakeupsert import Table, clock
from lakeupsert.events import BatchCommit, Event, Failure, Merge, UnitWork
from lakeupsert.report.status import Status

NAMESPACE = "lakeupsert"


class TableMetrics:
    """Counts the events of one table in one call of a function."""

    def __init__(self, table: str) -> None:
        # Without a service, which would be a second dimension.
        self._lines = AmazonCloudWatchEMFProvider(namespace=NAMESPACE, service="", default_dimensions={"Table": table})
        self._lock = threading.Lock()

    def add_event(self, event: Event) -> None:
        match event:
            case BatchCommit():
                self._add("AppendedRows", event.rows_appended)
                self._add("QuarantinedRows", event.rows_quarantined)
                self._add("AppendedBytes", event.bytes_written, MetricUnit.Bytes)
                self._add("AppendSeconds", event.seconds, MetricUnit.Seconds)
            case Merge():
                self._add("MergedPartitions", 1)
                if not event.units:  # else the units have counted
                    self._add_merge(event)
            case UnitWork():
                self._add_merge(event)
            case Failure():
                self._add("FailedPartitions", 1)

    def add_state(self, status: Status) -> None:
        """Record the snapshot that readers see now, and the work left."""
        if status.received_at is not None:
            age = clock.now() - datetime.fromisoformat(status.received_at)
            self._add("FreshnessSeconds", age.total_seconds(), MetricUnit.Seconds)
        self._add("DirtyPartitions", status.dirty)
        self._add("FailedPartitions", len(status.failed))

    def flush(self) -> None:
        with self._lock:
            if self._lines.metric_set:
                self._lines.flush_metrics()

    def _add_merge(self, event: Merge | UnitWork) -> None:
        self._add("MergeSeconds", event.seconds, MetricUnit.Seconds)
        self._add("ReadBytes", event.bytes_read, MetricUnit.Bytes)
        self._add("WrittenBytes", event.bytes_written, MetricUnit.Bytes)

    def _add(self, name: str, value: float, unit: MetricUnit = MetricUnit.Count) -> None:
        with self._lock:
            self._lines.add_metric(name=name, unit=unit, value=value)


@contextmanager
def measured(table: Table) -> Iterator[TableMetrics]:
    """Measure what the block does to the table, also if it raises."""
    metrics = TableMetrics(table.name)
    table.listen(metrics.add_event)
    try:
        yield metrics
    finally:
        metrics.flush()
