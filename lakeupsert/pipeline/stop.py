"""How long workers work, and how they are asked to stop."""

import _thread
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lakeupsert.retries import GRACE_SECONDS

if TYPE_CHECKING:  # the command line needs `Stop` before it needs Arrow
    from lakeupsert.pipeline.merge.commit import PartitionResult


class Stop(threading.Event):
    """Once set, workers take no new messages and finish what they have.

    After ``grace_seconds``, unfinished messages go back to the queue. Then ``abandon`` is called in another thread, to end the
    merge that nobody waits for any more.
    """

    def __init__(self, grace_seconds: float = GRACE_SECONDS, abandon: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.grace_seconds = grace_seconds
        self.abandon = abandon

    def set_from_signal(self) -> None:
        """`set`, for signal handlers. A handler may interrupt a `wait` that holds the event's lock; only another thread can then
        set the event."""
        _thread.start_new_thread(self.set, ())


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How long a worker works, and who hears of it.

    Attributes:
        until_empty: return when no message is visible; otherwise wait for messages.
        max_seconds: start nothing that would pass this, if it took as long as the longest call so far; None: no limit.
        stop: once set, the worker finishes what it has and returns.
        progress: called with the number of messages that are left.
        alive: called every few seconds, also in another thread.
        collect: takes each result as soon as its message is answered; then none is kept.
    """

    until_empty: bool = True
    max_seconds: float | None = None
    stop: Stop | None = None
    progress: Callable[[int], None] | None = None
    alive: Callable[[], object] = lambda: None
    collect: "Callable[[PartitionResult], object] | None" = None
