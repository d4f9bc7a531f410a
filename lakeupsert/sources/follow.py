"""The loop of every source until somebody stops it: one process reads it, others wait, and so does this one after an outage."""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from lakeupsert import clock
from lakeupsert.errors import TryAgainError
from lakeupsert.pipeline.stop import Stop
from lakeupsert.retries import LEADER_SECONDS, LONGEST_AWAY_SECONDS, SOURCE_TICK_SECONDS, TICK_SECONDS
from lakeupsert.sources.files import SourceFiles

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """How long it captures, and who hears of what it did.

    Attributes:
        stop: once set, it lands what is whole, and ends.
        alive: called several times a second.
        collect: takes the number of rows of each landing file.
        trouble: takes the reason why it can't work for now, or what threatens to stop it; "" when it works.
        warn: takes each warning, also again.
        behind: takes the number of messages that the source has and did not land, if it knows that.
        leader_seconds: how long the process that reads the source may give no sign before another one takes over.
    """

    stop: Stop
    alive: Callable[[], object] = lambda: None
    collect: Callable[[int], object] = lambda rows: None
    trouble: Callable[[str], object] = lambda text: None
    warn: Callable[[str], None] = log.warning
    behind: Callable[[int], object] = lambda messages: None
    leader_seconds: float = LEADER_SECONDS


def follow(name: str, files: SourceFiles, run: Callable[[], None], options: CaptureOptions) -> None:
    """Call ``run`` whenever this process leads, until `stop` is set.

    It waits while the source or a store does not answer, or another process reads the source. Raises all other errors of ``run``.
    """
    failures = 0
    try:
        while not options.stop.is_set():
            pause, begun = SOURCE_TICK_SECONDS, clock.elapsed()
            try:
                if files.leadership.lead():
                    for text in files.removed():
                        options.warn(text)
                    run()
                    failures = 0
                else:
                    leader = files.leadership.leader
                    options.warn(f"Source {name!r}: {leader} reads it. This process waits until that one ends.")
            except TryAgainError as e:
                failures = 1 if clock.elapsed() - begun > LONGEST_AWAY_SECONDS else failures + 1  # it worked in between
                pause = min(2.0 ** min(failures, 10), LONGEST_AWAY_SECONDS)
                files.leadership.trouble = e.message
                options.trouble(e.message)
                options.warn(f"{e.message} It tries again until that ends.")
            then = clock.elapsed() + pause
            options.alive()
            while not options.stop.wait(max(0.0, min(then - clock.elapsed(), TICK_SECONDS))) and clock.elapsed() < then:
                options.alive()
    finally:
        with suppress(TryAgainError):  # then the next process waits until the lease is old
            files.leadership.release()
