"""Commit a batch, of landing files, of quarantined rows or of a statement.

Reads     the heads of spec and ledger after a lost race; if a retype broke off before its ledger entry, what `retypes` reads
Writes    the next spec if columns came or grew, then ONE ledger entry: that put is the commit and the acknowledgement; then a
          message for each touched partition
Repeat    safe: after a lost race the batch's files are deleted; after an unknown outcome they stay, since an entry may name them

    settle keys of the whole table -> spec -> ledger entry -> messages
                                       |          |
                                       '--- lost -'--- lost, and nothing that the batch stands on changed: the next number
"""

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import msgspec

from lakeupsert import clock
from lakeupsert.engine.batch import AppendJob
from lakeupsert.engine.hosts import Host
from lakeupsert.engine.reports import Refused, Report
from lakeupsert.errors import LakeupsertError, RefusedError, TryAgainError
from lakeupsert.events import BatchCommit
from lakeupsert.landing.accept import RowRules
from lakeupsert.pipeline.append.discover import Ground
from lakeupsert.pipeline.append.full_extract import with_floors
from lakeupsert.pipeline.append.quarantine_limit import refuse_above_limit
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.retypes import enter, is_waiting
from lakeupsert.pipeline.table_keys import settle_keys
from lakeupsert.queue import Message
from lakeupsert.table.chain import LOST, Link, Lost, Outcome
from lakeupsert.table.erasure import read_erasures, unite
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.table.spec import TableSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AppendResult:
    """A committed batch.

    Attributes:
        warnings: for people.
        scattered: see `settle.count_keys_in_several_partitions`.
        examples: one refused row for each reason, for people.
    """

    number: int
    entry: LedgerEntry
    warnings: tuple[str, ...]
    scattered: int = 0
    examples: dict[str, str] = dataclasses.field(default_factory=dict)


def examples_of(reports: Iterable[Report]) -> dict[str, str]:
    """One refused row for each reason, for people."""
    return {code: text for r in reports if isinstance(r, Refused) for code, text in r.examples.items()}


def batch_job(table: OpenTable, ground: Ground, spec: TableSpec) -> AppendJob:
    """The row work of a batch on this ground, without landing files."""
    refuses = table.settings.erased_keys == "refuse"
    return AppendJob(
        landing=table.resources.landing,
        store=table.resources.store,
        inputs=(),
        reading=table.history.reading,
        rules=RowRules(spec, ground.received_at, ground.clock_ahead, table.name, table.settings.read.envelope),
        batch_id=ground.batch_id,
        spec_version=ground.version_of(spec),
        start=ground.start,
        stored_bits=ground.stored_bits,
        bucket_bytes=table.settings.bucket_bytes,
        erased=unite(one for _, one in read_erasures(table.resources.store)) if refuses else (),
    )


def commit_batch(
    table: OpenTable,
    host: Host,
    ground: Ground,
    job: AppendJob,
    entry: LedgerEntry,
    files: Collection[str],
    progress: Callable[[str], None],
) -> Link[LedgerEntry] | Lost:
    """Append the spec of ``job`` if it is new, then ``entry``; `LOST` if the heads have moved on.

    ``files`` are all objects that the batch wrote. They are deleted after a lost race, and only then. ``host``: where a key index
    is rebuilt. Raises RefusedError if `quarantine_limit` does not allow what the key index refuses.
    """
    if ground.head and ground.spec_head and is_waiting(table.history, ground.spec_head, ground.head):
        number = enter(table, ground.spec_head.number)
        log.warning("the column change of a command that broke off is finished: ledger entry %d", number)
        table.resources.discard(files)
        return LOST
    if job.spec.key_scope == "table":
        settled = settle_keys(table, host, job.spec, ground.head, entry, progress)
        if settled is None:
            table.resources.discard(files)
            return LOST
        if entry.files and settled.examples:
            try:
                refuse_above_limit(table, ground, settled.entry, settled.examples)
            except RefusedError:
                table.resources.discard(settled.objects - {file.name for file in settled.entry.quarantine})
                raise
        entry, files = settled.entry, {*files, *settled.objects}
    entry = with_floors(table, job.spec, ground.entries, entry)
    progress("committing")
    begun = clock.elapsed()
    outcome = _append_entry(table.history, ground, job, entry)
    if outcome.result == "lost":
        table.resources.discard(files)
    if outcome.link is None:
        return LOST
    table.history.keep_entry(outcome.link)
    table.resources.emit(_event(table, outcome.link, begun=ground.begun, commit_begun=begun))
    return outcome.link


def _event(table: OpenTable, link: Link[LedgerEntry], *, begun: float, commit_begun: float) -> BatchCommit:
    entry, now = link.body, clock.elapsed()
    return BatchCommit(
        table=table.name,
        batch=link.number,
        entry=link.write_id,
        seconds=round(now - begun, 6),
        requests=table.resources.store.requests.take(),
        batch_id=entry.batch_id,
        files=len(entry.sources),
        rows_read=entry.rows_read,
        rows_appended=entry.rows_appended,
        rows_superseded=entry.rows_superseded,
        rows_quarantined=entry.rows_quarantined,
        bytes_written=sum(t.bytes for t in entry.touched.values()),
        partitions=len(entry.touched),
        commit_seconds=round(now - commit_begun, 6),
    )


def _append_entry(history: History, ground: Ground, job: AppendJob, entry: LedgerEntry) -> Outcome[LedgerEntry]:
    if job.spec is not ground.spec and history.objects.specs.append(job.spec, ground.spec_head).result != "won":
        return Outcome("lost")
    ledger, head = history.objects.ledger, ground.head
    if head is None:
        begin = LedgerEntry(kind="create", batch_id="", received_at=entry.received_at - 1, spec_version=0)
        head = ledger.append(begin, None).link
        if head is None:
            return Outcome("lost")
    while True:
        outcome = ledger.append(entry, head)
        if outcome.result != "lost" or history.objects.held.leads:
            return outcome  # a leader's batch begins again, as its ground may be old
        newer = ledger.head()
        rebased = _rebase(history, job, entry, head, newer) if newer else None
        if newer is None or rebased is None:
            return outcome
        entry, head = rebased, newer


def _rebase(
    history: History, job: AppendJob, entry: LedgerEntry, head: Link[LedgerEntry], newer: Link[LedgerEntry]
) -> LedgerEntry | None:
    """The same batch behind a newer head; None if something that the batch is based on has changed."""
    # The winner may have moved the same keys, or replayed the same rows.
    if job.spec.key_scope == "table" or entry.replayed:
        return None
    won = [link.body for link in history.entries(head.number, newer.number)]
    # The rows of a statement were computed from what these partitions had.
    if entry.statement is not None and any(entry.touched.keys() & e.touched.keys() for e in won):
        return None
    paths = {f.path for f in entry.files}
    if any(f.path in paths for e in won for f in e.files) or any(e.batch_id == entry.batch_id for e in won):
        return None
    # After a restore other files are withdrawn. Behind a fence a vacuum may have deleted this batch's files already.
    if any(e.kind == "restore" or (e.fence is not None and job.start <= e.fence) for e in won):
        return None
    if newer.body.spec_version > entry.spec_version or entry.full:  # a full extract touches partitions that may be new
        return None
    if any(e.full for e in won):  # its floor holds in partitions that are new
        return None
    if newer.body.received_at < entry.received_at:
        return entry
    if job.spec.stamped:  # the rows have the stamp already
        return None
    return msgspec.structs.replace(entry, received_at=newer.body.received_at + 1)


def send_messages(table: OpenTable, link: Link[LedgerEntry]) -> tuple[str, ...]:
    """Send a message for each partition that the batch touches, after its commit. Returns warnings for people.

    A queue that does not answer is a warning: the batch is committed, its partitions are dirty, and `reconcile` sends their
    messages. What somebody has to correct, for example a permission or a full disk, is raised: `reconcile` would meet it too.
    """
    try:
        table.resources.queue.send([Message(table.name, partition, link.number) for partition in link.body.touched])
    except LakeupsertError as e:
        if not isinstance(e, TryAgainError) or e.code != "queue-unreachable":
            e.data_changed = True  # the batch is committed; `run` sends its messages again
            raise
        return (
            f"batch {link.number} is committed, but not all messages for its {len(link.body.touched)} partitions were sent: "
            f"{e.message} Workers do not merge them until `lakeupsert reconcile` or `lakeupsert run` sends them again.",
        )
    return ()
