"""Numbers and times as text for people."""

from datetime import datetime
from typing import TYPE_CHECKING

from lakeupsert.phrases import count as count

if TYPE_CHECKING:
    from lakeupsert.queue import QueueStats


def size(n: float) -> str:
    """A number of bytes in decimal units."""
    units = ["TB", "GB", "MB", "kB", "B"]
    while n >= 1000 and len(units) > 1:
        n, _ = n / 1000, units.pop()
    return f"{n:,.{0 if units[-1] == 'B' else 1}f} {units[-1]}"


def when(written_at: str) -> str:
    """A time from a chain, given in ISO 8601."""
    return f"{datetime.fromisoformat(written_at):%Y-%m-%d %H:%M:%S} UTC"


def messages(queue: "QueueStats | None") -> str:
    """The messages of the queue. None: the queue can't be read."""
    if queue is None:
        return "unknown: the queue can't be read"
    return f"{queue.visible:,} waiting, {queue.leased:,} being worked on, {queue.dead:,} dead"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:,.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24:,} d {hours % 24} h"
