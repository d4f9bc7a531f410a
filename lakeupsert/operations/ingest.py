"""Batches that follow each other within seconds: one process takes what lands, merges it, publishes, and looks again.

Reads     the listing of the landing zone; what `append`, `dedupe` and `publish` read
Writes    what `append`, `dedupe` and `publish` write; its lease
Repeat    safe: the process keeps nothing that the table does not have, so after a crash the next one finishes

    lead? -> look at the landing zone -> append -> merge -> (publish) -> wait
      '---------- another process leads: wait ----------------------------^
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from lakeupsert import clock
from lakeupsert.config import is_remote
from lakeupsert.errors import LakeupsertError, TryAgainError
from lakeupsert.operations.run import show
from lakeupsert.pipeline.append.append import append
from lakeupsert.pipeline.append.commit import AppendResult
from lakeupsert.pipeline.append.discover import AppendOptions, is_landing_file, list_landing
from lakeupsert.pipeline.leadership import Leadership
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.messages import send_missing
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import PublishResult
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.workers.drain_queues import DrainOptions, drain_queues
from lakeupsert.retries import LEADER_SECONDS, LONGEST_AWAY_SECONDS, WHOLE_SECONDS
from lakeupsert.storage import ObjectInfo, can_commit

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class IngestOptions:
    """How often it looks, and who hears of what it did.

    Attributes:
        seconds: from one look at the landing zone to the next. Each look makes one batch. In a local landing zone, it leaves out
            files that have changed since the look before, since a copy into the zone takes time.
        publish_seconds: the longest time between a merge and the snapshot that shows it. 0: publish after each batch.
        max_seconds: end after the first batch that ends later than this; None: no limit.
        stop: once set, the merges that run are finished and published, and no others are begun.
        alive: called before each look, and every few seconds while it merges, also in another thread.
        collect: takes each result as soon as it is there. None is kept.
        warn: takes each warning once.
        leader_seconds: how long the leading process may give no sign before another one takes over.
    """

    seconds: float = 1.0
    publish_seconds: float = 0.0
    max_seconds: float | None = None
    stop: Stop | None = None
    alive: Callable[[], object] = lambda: None
    collect: Callable[[AppendResult | PartitionResult | PublishResult], object] = lambda result: None
    warn: Callable[[str], None] = log.warning
    leader_seconds: float = LEADER_SECONDS


def ingest(table: OpenTable, options: IngestOptions) -> None:
    """Take batch after batch, until ``stop`` is set or ``max_seconds`` are over.

    It waits while the store does not answer, or another process leads. Raises all other errors of `append`, `drain_queues`
    and `publish`; a batch that was committed before is merged and published by the next process.
    """
    rounds, stop = _Rounds(table, options), options.stop or Stop()
    begun, failures, ended_by = clock.elapsed(), 0, ""
    try:
        while not stop.is_set() and (options.max_seconds is None or clock.elapsed() - begun < options.max_seconds):
            options.alive()
            pause, looked_at = options.seconds, clock.elapsed()
            try:
                rounds.go(stop)
                if failures:
                    failures = 0
                    rounds.warned.clear()  # the next time is another one
            except TryAgainError as e:
                failures += 1
                pause = min(options.seconds * 2 ** min(failures, 10), LONGEST_AWAY_SECONDS)
                rounds.warn(f"{e.message} It tries again until that ends.")
            stop.wait(max(0.0, pause - (clock.elapsed() - looked_at)))
        rounds.publish_rest()
    except LakeupsertError as e:
        ended_by = e.code
        raise
    finally:
        with suppress(TryAgainError):  # then the next process waits until the lease is old
            rounds.leadership.release(ended_by)


class _Rounds:
    """Does round after round, and remembers the landing zone and when it published."""

    def __init__(self, table: OpenTable, options: IngestOptions) -> None:
        self._table, self._options = table, options
        self.leadership = Leadership(table.history.objects, options.leader_seconds)
        self._owed = True
        """There may be something to merge that this process, or another one, left."""
        self._looked_at = float("-inf")
        self._taken: dict[str, ObjectInfo] = {}
        """Landing files that `append` has looked at, as they were then."""
        self._seen: dict[str, ObjectInfo] = {}
        """The others, as they were at the last look."""
        self._unpublished_since: float | None = None
        self.warned: set[str] = set()

    def go(self, stop: Stop) -> None:
        is_time = clock.elapsed() - self._looked_at >= WHOLE_SECONDS
        owed, self._owed = self._owed or is_time, True  # until this round is done
        if not self.leadership.lead():
            leader = self.leadership.leader
            self.warn(f"Table {self._table.name!r}: {leader} takes what lands. This process waits until that one ends.")
            return
        appended = self._append(look=owed)
        if appended or owed:
            if owed:
                self._looked_at = clock.elapsed()
                send_missing(self._table)
            if self._unpublished_since is None:
                self._unpublished_since = clock.elapsed()
            drain_queues(self._table, DrainOptions(stop=stop, alive=self._beat, collect=self._options.collect))
        self._owed = False
        since = self._unpublished_since
        if since is not None and clock.elapsed() - since >= self._options.publish_seconds:
            self._publish()

    def publish_rest(self) -> None:
        if self.leadership.leads and self._unpublished_since is not None:
            self._publish()

    def warn(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            self._options.warn(text)

    def _append(self, *, look: bool) -> AppendResult | None:
        """``look``: call `append` also if no file is new, which checks the table and its landing zone."""
        found = {one.name: one for one in list_landing(self._table) if is_landing_file(one.name)}
        new = {name: one for name, one in found.items() if self._taken.get(name) != one}
        # An object store shows an object when it is whole. Other files may be in the middle of a copy.
        landing = self._table.settings.landing
        whole = is_remote(landing) and can_commit(landing)
        ready = {name: one for name, one in new.items() if whole or self._seen.get(name) == one}
        self._seen = new
        if not ready and not look:
            return None
        of_batch = AppendOptions(host="local", only=ready, progress=lambda text: self._beat(), warn=self.warn)
        appended = append(self._table, of_batch)
        self._taken = {name: one for name, one in found.items() if name not in new} | ready
        if appended is not None:
            self._options.collect(appended)
        return appended

    def _publish(self) -> None:
        published = show(self._table)
        if (
            not {*published.waiting} - published.failed.keys()
        ):  # other workers merge these, or the next look at the whole table
            self._unpublished_since = None
        self._options.collect(published)

    def _beat(self) -> None:
        self._options.alive()
        with suppress(TryAgainError):  # the next round finds out who leads
            self.leadership.lead()
