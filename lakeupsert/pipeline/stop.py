"""How workers are told to end."""

import threading
from collections.abc import Callable

GRACE_SECONDS = 25.0
"""Kubernetes and ECS kill a container 30 s after SIGTERM unless told otherwise: what is given back before is free at once."""


class Stop(threading.Event):
    """Once set, workers take nothing more, and finish what they are at.

    What is not finished ``grace_seconds`` later goes back to the queue; then ``abandon`` is called, in another thread, to
    end the merge that nobody waits for any more.
    """

    def __init__(self, grace_seconds: float = GRACE_SECONDS, abandon: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.grace_seconds = grace_seconds
        self.abandon = abandon
