"""The processes in which this one reads bodies, so that the server outlives a body which ends its reader (ADR 0069)."""

import threading
from collections.abc import Callable
from typing import TypeVar

from lakeupsert.endpoint.gate import LATER
from lakeupsert.errors import TryAgainError
from lakeupsert.pipeline.child import Children, KilledError
from lakeupsert.retries import READ_BODY_SECONDS

Found = TypeVar("Found")
MOST = 4
"""Processes. More: they may take more memory together. Fewer: a body that is never read to its end keeps others waiting."""
BYTES_A_SECOND = 1_000_000


class Readers:
    """Calls functions in other processes, from any thread. One starts when it is needed, and stays for later calls."""

    def __init__(self) -> None:
        self._turns = threading.BoundedSemaphore(MOST)
        self._children = Children()

    def call(self, size: int, function: Callable[..., Found], *args: object) -> Found:
        """Return what a picklable function does that reads a body of ``size`` bytes, or raise what it raises.

        Raises EndedError if the body ends its reader, or TryAgainError if somebody else has ended two of them.
        """
        try:
            with self._turns:
                return self._children.call(READ_BODY_SECONDS + size / BYTES_A_SECOND, function, *args)
        except KilledError as e:
            raise TryAgainError("worker-died", f"{e} Nothing was stored.", next=LATER) from e


READERS = Readers()
"""Of this process, for all tables."""
