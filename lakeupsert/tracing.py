"""Events as spans of OpenTelemetry, if whoever runs this process has set OpenTelemetry up. Otherwise nothing is even imported.

A span is made when its event is known, from the event's own seconds. So merges of worker processes, where nobody has set anything
up, are spans of the process that started the workers, and the pipeline knows nothing of spans.
"""

import sys
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import msgspec

from lakeupsert.events import BatchCommit, Event, Failure, Merge, Publish, UnitWork, Work

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

NAMES: dict[type[Event], str] = {
    BatchCommit: "append",
    Merge: "merge",
    UnitWork: "unit",
    Publish: "publish",
    Failure: "merge",
}
"""The spans of events; a batch and a merge also have a span `commit` within."""


def record(event: Event) -> None:
    """Record a finished span below the current one. Attributes are the event's fields, as `lakeupsert.entry`."""
    if "opentelemetry.trace" not in sys.modules or type(event) not in NAMES:
        return
    from opentelemetry import trace

    tracer = trace.get_tracer("lakeupsert")
    end = datetime.fromisoformat(event.at)
    seconds = event.seconds if isinstance(event, Work) else 0.0
    span = tracer.start_span(f"lakeupsert.{NAMES[type(event)]}", start_time=_nanoseconds(end, seconds))
    if span.is_recording():
        span.set_attributes(_attributes(event))
    if isinstance(event, Failure):
        span.set_status(trace.StatusCode.ERROR, event.message)
    if isinstance(event, BatchCommit | Merge):
        within = trace.set_span_in_context(span)
        start = _nanoseconds(end, event.commit_seconds)
        tracer.start_span("lakeupsert.commit", within, start_time=start).end(_nanoseconds(end))
    span.end(_nanoseconds(end))


def _nanoseconds(end: datetime, before: float = 0.0) -> int:
    """Since 1970, ``before`` seconds earlier than ``end``."""
    return int((end - timedelta(seconds=before)).timestamp() * 1_000_000) * 1000


def _attributes(event: Event) -> "dict[str, AttributeValue]":
    found: dict[str, AttributeValue] = {}
    for name, value in msgspec.structs.asdict(event).items():
        if isinstance(value, Mapping):
            found |= {f"lakeupsert.{name}.{key}": number for key, number in value.items()}
        elif value is not None and name != "at":
            found[f"lakeupsert.{name}"] = value
    return found
