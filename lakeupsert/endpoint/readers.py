"""The processes in which this one reads bodies, so that the server outlives a body which ends its reader (ADR 0069)."""

import threading
from collections.abc import Callable
from typing import TypeVar

from lakeupsert.pipeline.child import Child, EndedError
from lakeupsert.retries import READ_BODY_SECONDS

Found = TypeVar("Found")
MOST = 4
"""Processes. More: they may take more memory together. Fewer: a body that is never read to its end keeps others waiting."""
BYTES_A_SECOND = 1_000_000


class Readers:
    """Calls functions in other processes, from any thread. One starts when it is needed, and stays for later calls."""

    def __init__(self) -> None:
        self._turns = threading.BoundedSemaphore(MOST)
        self._idle: list[Child] = []

    def call(self, size: int, function: Callable[..., Found], *args: object) -> Found:
        """Return what a picklable function does that reads a body of ``size`` bytes, or raise what it raises, or EndedError."""
        with self._turns:
            child = self._take()
            try:
                found = child.call(READ_BODY_SECONDS + size / BYTES_A_SECOND, function, *args)
            except EndedError:
                raise
            except Exception:  # the function's
                self._idle.append(child)
                raise
            self._idle.append(child)  # else its answer is still to come, and would be the next body's
            return found

    def _take(self) -> Child:
        """One that waits, or a new one. The system may have ended some that waited, for lack of memory."""
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
            child.end()
        return Child()


READERS = Readers()
"""Of this process, for all tables."""
