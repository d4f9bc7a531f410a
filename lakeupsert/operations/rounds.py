"""The loop of `ingest` and of `maintain`: one process leads and does round after round, the others wait.

Reads     the newest lease
Writes    a lease
Repeat    safe: a round looks at the table, and what an earlier one left is found by the next

    lead? -> round -> wait
      '---- another process leads: wait ---^
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from lakeupsert import clock
from lakeupsert.errors import LakeupsertError, TryAgainError
from lakeupsert.pipeline.audit import AuditError
from lakeupsert.pipeline.leadership import Leadership
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.stop import Stop
from lakeupsert.retries import KEPT_WARNINGS, LEADER_SECONDS, LONGEST_AWAY_SECONDS, REMIND_SECONDS, TICK_SECONDS

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RoundOptions:
    """How long a process works, and who hears of it.

    Attributes:
        max_seconds: end after the first round that ends later than this; None: no limit.
        stop: once set, the merges that run are finished and published, and no others are begun.
        calls_at_once: how many calls run in threads of this process; each takes its share of the memory.
        alive: called before each look, and every few seconds while it merges or waits, also in another thread.
        trouble: takes the reason why a look failed, before the next one, and "" after one that did not fail.
        warn: takes each warning once in `REMIND_SECONDS`.
        leader_seconds: how long the leading process may give no sign before another one takes over.
    """

    seconds: float
    max_seconds: float | None = None
    stop: Stop | None = None
    calls_at_once: int = 1
    alive: Callable[[], object] = lambda: None
    trouble: Callable[[str], object] = lambda text: None
    warn: Callable[[str], None] = log.warning
    leader_seconds: float = LEADER_SECONDS


class Warner:
    """Shows warnings, each once in `REMIND_SECONDS`."""

    def __init__(self, show: Callable[[str], object]) -> None:
        self._show = show
        self.shown_at: dict[str, float] = {}
        """When each of the last `KEPT_WARNINGS` was shown."""

    def __call__(self, text: str) -> None:
        if clock.elapsed() - self.shown_at.get(text, float("-inf")) >= REMIND_SECONDS:
            self.shown_at[text] = clock.elapsed()
            if len(self.shown_at) > KEPT_WARNINGS:
                del self.shown_at[min(self.shown_at, key=self.shown_at.__getitem__)]
            self._show(text)


class Rounds:
    """Does round after round. A subclass says what a round does, and remembers what it found."""

    def __init__(self, table: OpenTable, leadership: Leadership, options: RoundOptions, what: str) -> None:
        """``what``: what the leading process does, for people."""
        self.table, self.leadership, self._rounds, self._what = table, leadership, options, what
        self.warn = options.warn if isinstance(options.warn, Warner) else Warner(options.warn)
        self.has_more = False
        """Whether the next round follows without a pause."""

    def work(self, stop: Stop) -> None:
        """Do a round; this process leads."""
        raise NotImplementedError

    def give_way(self) -> None:
        """Note that another process leads."""

    def end(self) -> None:
        """Finish what the rounds left, unless an error ended them."""

    def once(self, stop: Stop) -> None:
        """Do a round if this process leads."""
        if self.leadership.lead():
            self.work(stop)
        else:
            self.give_way()
            leader = self.leadership.leader
            self.warn(f"Table {self.table.name!r}: {leader} {self._what}. This process waits until that one ends.")

    def repeat(self) -> None:
        """Go on until ``stop`` is set or ``max_seconds`` are over. It waits while the store is away, or an audit fails."""
        options, stop = self._rounds, self._rounds.stop or Stop()
        end = clock.elapsed() + (float("inf") if options.max_seconds is None else options.max_seconds)
        failures, ended_by = 0, ""
        try:
            while not stop.is_set() and clock.elapsed() < end:
                options.alive()
                pause, looked_at = options.seconds, clock.elapsed()
                try:
                    self.once(stop)
                    failures, pause = 0, 0.0 if self.has_more else pause
                    options.trouble("")
                except (TryAgainError, AuditError) as e:
                    failures += 1
                    pause = min(options.seconds * 2 ** min(failures, 10), LONGEST_AWAY_SECONDS)
                    options.trouble(e.message)
                    self.warn(f"{e.message} It tries again until that ends.")
                then = min(looked_at + pause, end)
                while not stop.wait(max(0.0, min(then - clock.elapsed(), TICK_SECONDS))) and clock.elapsed() < then:
                    options.alive()
            if self.leadership.leads:
                self.end()
        except LakeupsertError as e:
            ended_by = e.code
            raise
        finally:
            with suppress(TryAgainError):  # then the next process waits until the lease is old
                self.leadership.release(ended_by)

    def beat(self) -> None:
        self._rounds.alive()
        with suppress(TryAgainError):  # the next round finds out who leads
            self.leadership.lead()
