"""The only source of time, ids and randomness. A test replaces it with `use`, so that a failure can be replayed from its seed."""

import os
import random
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime


class Source:
    """Time, ids and randomness. A subclass in tests makes them repeatable."""

    def now(self) -> datetime:
        """The wall clock in UTC, with microseconds."""
        return datetime.now(UTC)

    def elapsed(self) -> float:
        """Seconds on a clock that never goes back, and that continues while the machine is suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()

    def new_id(self) -> str:
        """32 hexadecimal digits that are unique across processes."""
        return uuid.UUID(bytes=os.urandom(16), version=4).hex

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def jitter(self, seconds: float) -> float:
        """A random duration between 0 and ``seconds``."""
        return random.uniform(0, seconds)


_source = Source()


@contextmanager
def use(source: Source) -> Iterator[None]:
    """Replace the source for this process while the block runs."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before


def now() -> datetime:
    return _source.now()


def elapsed() -> float:
    return _source.elapsed()


def new_id() -> str:
    return _source.new_id()


def sleep(seconds: float) -> None:
    _source.sleep(seconds)


def jitter(seconds: float) -> float:
    return _source.jitter(seconds)
