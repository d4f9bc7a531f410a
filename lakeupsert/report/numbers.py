"""Numbers as text for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lakeupsert.phrases import count as count
from lakeupsert.phrases import duration as duration
from lakeupsert.phrases import when as when

if TYPE_CHECKING:
    from lakeupsert.queue import QueueStats


MOST_NAMES = 3
"""How many partitions a text names before it only counts the rest."""


def short_list(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def size(n: float) -> str:
    """A number of bytes in decimal units."""
    units = ["TB", "GB", "MB", "kB", "B"]
    while n >= 1000 and len(units) > 1:
        n, _ = n / 1000, units.pop()
    return f"{n:,.{0 if units[-1] == 'B' else 1}f} {units[-1]}"


def messages(queue: "QueueStats | None") -> str:
    """The messages of the queue. None: the queue can't be read."""
    if queue is None:
        return "unknown: the queue can't be read"
    return f"{queue.visible:,} waiting, {queue.leased:,} being worked on, {queue.dead:,} dead"
