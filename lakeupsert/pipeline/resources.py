"""The stores of a table's zones, its queues, and the sinks of its events. A store or a queue is opened when it is first used."""

import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from lakeupsert import tracing
from lakeupsert.config import TableSettings, is_remote
from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.events import Event, Sink
from lakeupsert.landing.table_logs import TableLog, likely_log_above, log_in
from lakeupsert.queue import QueueStats, WorkQueue, open_queue
from lakeupsert.storage import LocalStore, ObjectReader, ObjectStore, open_landing, open_store
from lakeupsert.table.layout import LOCAL_QUEUE

log = logging.getLogger(__name__)

CONCURRENT_REQUESTS = 16
"""Requests that one process sends at the same time."""

Item = TypeVar("Item")
Found = TypeVar("Found")


class Resources:
    """The resources of one table.

    Attributes:
        table: the table's name.
        sinks: take the events of this table.
        failing_causes: why each partition failed that was not merged since; of those with equal causes one is logged.
    """

    def __init__(self, table: str, settings: TableSettings, sinks: Iterable[Sink] = (tracing.record,)) -> None:
        self.table, self._settings = table, settings
        self.sinks = [*sinks]
        self.failing_causes: dict[str, str] = {}

    @cached_property
    def store(self) -> ObjectStore:
        """The processed zone."""
        return open_store(self._settings.processed)

    @cached_property
    def landing(self) -> ObjectReader:
        return open_landing(self._settings.landing)

    @cached_property
    def landing_log(self) -> TableLog | None:
        """The log of a table of another format in the landing zone or above it; None also if the zone can't be listed."""
        with suppress(LakeupsertError, OSError):
            return log_in(self.landing) or likely_log_above(self._settings.landing)
        return None

    @cached_property
    def queue(self) -> WorkQueue:
        if self._settings.queue != "auto":
            return open_queue(self._settings.queue)
        processed = open_store(self._settings.processed)
        if isinstance(processed, LocalStore):
            return open_queue(str(Path(processed.root) / LOCAL_QUEUE))
        raise ConfigurationError(
            "no-queue",
            f"Table {self.table!r} is remote and its configuration names no queue.",
            next=f"set `queue` in [tables.{self.table}]",
        )

    @cached_property
    def large_queue(self) -> WorkQueue | None:
        """The queue that workers of `queue` pass large partitions on to; None: they merge all partitions."""
        return open_queue(self._settings.large.queue) if self._settings.large else None

    @property
    def most_bytes(self) -> int | None:
        """A merge that reads more is passed on to `large_queue`; None: this worker merges all partitions."""
        large = self._settings.large
        return large.most_bytes if large is not None and self.large_queue is not None else None

    @property
    def queues(self) -> list[WorkQueue]:
        return [self.queue, *([self.large_queue] if self.large_queue else [])]

    def queue_stats(self) -> QueueStats:
        """The sums over all queues."""
        found = [queue.stats() for queue in self.queues]
        return QueueStats(sum(x.visible for x in found), sum(x.leased for x in found), sum(x.dead for x in found))

    def at_queue(self, queue: WorkQueue) -> "Resources":
        """The same for workers of another queue, for example of `large_queue`, who pass nothing on."""
        _ = self.store  # one store, which counts the requests of both
        other = copy(self)
        other.queue, other.large_queue = queue, None
        return other

    def discard(self, names: Iterable[str]) -> None:
        """Delete files that no version names and none will. If that fails, `vacuum` deletes them."""
        try:
            if listed := [*names]:
                self.store.delete(listed)
        except LakeupsertError as e:
            log.warning("files that no version names are kept until the next vacuum: %s", e.message)

    def map_concurrently(self, call: Callable[[Item], Found], items: Collection[Item]) -> list[Found]:
        """The results of ``call`` for each item, in their order. For requests to the store, which mostly wait.

        Local files are read one after the other: 365 commits took 2.0 s in turn and 2.6 s in threads.
        """
        if len(items) <= 1 or not is_remote(self._settings.processed):
            return [call(item) for item in items]
        with ThreadPoolExecutor(min(CONCURRENT_REQUESTS, len(items))) as pool:
            # In the caller's context, so that spans of what the threads do are below the caller's span.
            contexts = [copy_context() for _ in items]
            return list(pool.map(lambda context, item: context.run(call, item), contexts, items))

    def emit(self, event: Event) -> None:
        """Give an event to every sink. A sink that fails must not turn a commit into an error, so that is a warning."""
        for sink in self.sinks:
            try:
                sink(event)
            except Exception as e:
                log.warning("an event of table %s was lost: %r", self.table, e)

    def close(self) -> None:
        for queue in (self.__dict__.get("queue"), self.__dict__.get("large_queue")):
            if queue is not None:
                queue.close()
