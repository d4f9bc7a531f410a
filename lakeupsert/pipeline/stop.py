"""How workers are asked to stop."""

import _thread
import threading
from collections.abc import Callable

GRACE_SECONDS = 25.0
"""By default, Kubernetes and ECS kill a container 30 s after SIGTERM. Messages that are returned before then are free at once."""


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
