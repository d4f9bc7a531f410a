"""Batches that follow each other within seconds: one process takes what lands, merges it, publishes, and looks again.

Reads     the listing of the landing zone; what `append`, `dedupe` and `publish` read
Writes    what `append`, `dedupe` and `publish` write; its lease
Repeat    safe: the process keeps nothing that the table does not have, so after a crash the next one finishes

    lead? -> look at the landing zone -> append -> merge -> (publish) -> wait
      '---------- another process leads: wait ----------------------------^
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from lakeupsert import clock
from lakeupsert.config import is_remote
from lakeupsert.operations.rounds import RoundOptions, Rounds
from lakeupsert.operations.run import clean
from lakeupsert.phrases import count, with_advice
from lakeupsert.pipeline.append.append import append
from lakeupsert.pipeline.append.commit import AppendResult
from lakeupsert.pipeline.append.discover import AppendOptions, is_landing_file, list_landing
from lakeupsert.pipeline.append.landing_dates import arrival_order
from lakeupsert.pipeline.leadership import Leadership
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.messages import send_missing
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import PublishResult, publish
from lakeupsert.pipeline.removed_files import removed_files
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.workers.drain_queues import DrainOptions, drain_queues
from lakeupsert.retries import LONGEST_FAILED_SECONDS, WHOLE_SECONDS
from lakeupsert.storage import ObjectInfo, can_commit
from lakeupsert.table.taken import TakenFiles, source_of


@dataclass(frozen=True, kw_only=True)
class IngestOptions(RoundOptions):
    """How often it looks, and who hears of what it did.

    Attributes:
        seconds: from one look at the landing zone to the next. A look ends a batch. In a local landing zone, it leaves out
            files of others that have changed since the look before, since a copy into the zone takes time.
        batch_bytes: a batch ends behind the landing file with which it has so many bytes. The next one follows without a pause.
        batch_rows: the same by rows, as many for each byte as in the batch before; the first batch of a process has one file.
        publish_seconds: the longest time between a merge and the snapshot that shows it. 0: publish after each batch.
        collect: takes each result as soon as it is there. None is kept. It reads the table by another `Table` only.
    """

    seconds: float = 1.0
    batch_bytes: int = 1 << 30
    batch_rows: int | None = None
    publish_seconds: float = 0.0
    collect: Callable[[AppendResult | PartitionResult | PublishResult], object] = lambda result: None


def ingest(table: OpenTable, options: IngestOptions) -> None:
    """Take batch after batch, until ``stop`` is set or ``max_seconds`` are over.

    It waits while the store does not answer, or another process leads. Raises all other errors of `append`, `drain_queues`
    and `publish`; a batch that was committed before is merged and published by the next process.
    """
    Intake(table, options).repeat()


class Intake(Rounds):
    """Does round after round, and remembers the landing zone and when it published."""

    def __init__(self, table: OpenTable, options: IngestOptions) -> None:
        leadership = Leadership(table.history.objects, options.leader_seconds)
        super().__init__(table, leadership, options, "takes what lands")
        self._options = options
        self._owed = True
        """There may be something to merge that this process, or another one, left."""
        self._looked_at = float("-inf")
        self._taken: dict[str, ObjectInfo] = {}
        """Landing files that `append` has looked at, as they were then."""
        self._seen: dict[str, ObjectInfo] = {}
        """The others, as they were at the last look."""
        self._restless: dict[str, float] = {}
        """Files that change from look to look, and when the first of these changes was found."""
        self._failed: dict[str, tuple[float, float]] = {}
        """Partitions that can't be merged: when the look at the whole table tries the merge again, and after which pause."""
        self._unpublished_since: float | None = None
        self._bytes_a_row = 0.0
        """Bytes of a row in the landing files of the last batch."""

    def work(self, stop: Stop) -> None:
        is_time = clock.elapsed() - self._looked_at >= WHOLE_SECONDS
        owed, self._owed = self._owed or is_time, True  # until this round is done
        with self.table.leading(look=owed):
            self._take(stop, look=owed)
        self._owed = False
        since = self._unpublished_since
        if since is not None and clock.elapsed() - since >= self._options.publish_seconds:
            self._publish()

    def _take(self, stop: Stop, *, look: bool) -> None:
        appended = self._append(look=look)
        if not appended and not look:
            return
        if look:
            self._looked_at = clock.elapsed()
            for found, advice in removed_files(self.table):
                self.warn(with_advice(found, advice))
            send_missing(self.table, lambda p: self._failed.get(p, (0.0,))[0] <= self._looked_at)
        if self._unpublished_since is None:
            self._unpublished_since = clock.elapsed()
        shared = self._options.calls_at_once
        drain = DrainOptions(stop=stop, calls_at_once=shared, alive=self.beat, collect=self._merged)
        drain_queues(self.table, drain)

    def give_way(self) -> None:
        self._owed, self.has_more = True, False

    def end(self) -> None:
        if self._unpublished_since is not None:
            self._publish()

    def _append(self, *, look: bool) -> AppendResult | None:
        """``look``: call `append` also if no file is new, which checks the table and its landing zone."""
        taken = None if look else self.table.history.known_taken
        listed = [*list_landing(self.table, taken=taken)]
        found = {one.name: one for one in listed}
        # Of years of files few are new, so the name of a known one is not looked at.
        others = (one for name, one in found.items() if self._taken.get(name) != one)
        new = {one.name: one for one in others if is_landing_file(one.name) and not one.is_foreign}
        ready = {name: one for name, one in new.items() if self._seen.get(name) == one or self._is_whole(name)}
        self._seen = new
        self._note_restless(new.keys() - ready.keys())
        self.has_more = False
        if not ready and not look:
            return None
        left = self._left(ready)
        self.has_more = bool(left)
        batch = {name: one for name, one in ready.items() if name not in left}
        careful = self.leadership.took_over
        of_batch = AppendOptions(
            host="local",
            only=batch,
            listed=listed,
            progress=lambda text: self.beat(),
            warn=self.warn,
            careful=careful,
        )
        appended = append(self.table, of_batch)
        self.leadership.took_over = careful and (self.has_more or not batch)
        self._taken = {name: one for name, one in found.items() if name not in new} | batch
        if appended is not None:
            if rows := sum(file.rows for file in appended.entry.files):
                self._bytes_a_row = sum(file.size for file in appended.entry.files) / rows
            self._options.collect(appended)
        return appended

    def _is_whole(self, name: str) -> bool:
        """An object store shows an object when it is whole, and so do our sources. Other files may be in the middle of a copy."""
        landing = self.table.settings.landing
        return (is_remote(landing) and can_commit(landing)) or source_of(name) in self.table.sources

    def _left(self, ready: Mapping[str, ObjectInfo]) -> set[str]:
        """Those of the files that are for later batches, as the next one is full without them."""
        most, rows = float(self._options.batch_bytes), self._options.batch_rows
        most = most if rows is None else min(most, rows * self._bytes_a_row)
        if sum(one.size for one in ready.values()) <= most:
            return set()
        head = self.table.history.ledger_head()  # a process that has just begun finds all files of months
        known = self.table.history.taken(head.number) if head else TakenFiles()
        new = [one for one in ready.values() if not known.has(one)]
        new.sort(key=lambda one: arrival_order(one.name, self.table.settings.landing_dates))
        before = accumulate((one.size for one in new), initial=0)
        return {one.name for one, size in zip(new, before, strict=False) if 0 < size >= most}

    def _note_restless(self, names: Iterable[str]) -> None:
        now, before = clock.elapsed(), self._restless
        self._restless = {name: before.get(name, now) for name in names}
        if late := [name for name, since in self._restless.items() if now - since >= WHOLE_SECONDS]:
            first = self.table.resources.landing.uri(min(late))
            found = f"{count(len(late), 'landing file')} changed at every look for a minute and can't be taken, the first is"
            self.warn(f"{found} {first}. Land each file as a whole, by a rename.")

    def _merged(self, result: PartitionResult) -> None:
        due, pause = self._failed.pop(result.partition, (0.0, WHOLE_SECONDS / 2))
        if result.status == "failed":
            now, longer = clock.elapsed(), min(2 * pause, LONGEST_FAILED_SECONDS)
            # A batch may try it before that time.
            self._failed[result.partition] = (due, pause) if now < due else (now + longer, longer)
        self._options.collect(result)

    def _publish(self) -> None:
        with self.table.leading():
            published = publish(self.table)
            self._owed |= self.table.history.previews.forgotten(published.waiting)
        clean(self.table, published)
        waiting = {
            *published.waiting
        } - published.failed.keys()  # until other workers or the next whole look merge them
        self._unpublished_since = self._unpublished_since if waiting else None
        self._options.collect(published)
