"""The commit of a batch: the spec where it changes, then ONE ledger entry, then a message for each touched partition."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from lakeupsert.engine.batch import (
    AppendJob,
    Refused,
    Report,
)
from lakeupsert.errors import LakeupsertError
from lakeupsert.pipeline.discover import Ground
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.queue import Message
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import (
    LedgerEntry,
)


@dataclass(frozen=True)
class AppendResult:
    """The batch that was committed; ``warnings`` are for people.

    Attributes:
        scattered: see `batch.in_several_partitions`.
        examples: of each reason for which rows were refused one of these, for people.
    """

    number: int
    entry: LedgerEntry
    warnings: tuple[str, ...]
    scattered: int = 0
    examples: dict[str, str] = dataclasses.field(default_factory=dict)


class BeginAgain(Exception):
    """The heads are no longer those that this try stands on.

    ``discard``: no ledger entry can name its files, so they may go (G6: only after *lost*, never after *unknown*).
    """

    def __init__(self, *, discard: bool) -> None:
        self.discard = discard


def commit_batch(table: OpenTable, ground: Ground, job: AppendJob, entry: LedgerEntry) -> Link[LedgerEntry]:
    """Spec, then ledger entry. Raises BeginAgain where what was written does not fit the new heads."""
    ledger = table.objects.ledger
    planned = ground.spec_head is None or job.spec is not ground.spec_head.body
    if planned and table.objects.specs.append(job.spec, ground.spec_head).result != "won":
        raise BeginAgain(discard=True)
    head = ground.head
    if head is None:
        begin = LedgerEntry(kind="create", batch_id="", received_at=entry.received_at - 1, spec_version=0)
        head = ledger.append(begin, None).link
        if head is None:
            raise BeginAgain(discard=True)
    while True:
        outcome = ledger.append(entry, head)
        if outcome.link is not None:
            return outcome.link
        if outcome.result == "unknown":
            raise BeginAgain(discard=False)
        newer = ledger.head()
        if newer is None:
            raise BeginAgain(discard=True)
        entry = _rebased(table, job, entry, head, newer)
        head = newer


def _rebased(
    table: OpenTable, job: AppendJob, entry: LedgerEntry, head: Link[LedgerEntry], newer: Link[LedgerEntry]
) -> LedgerEntry:
    """The same batch behind a newer head, where nothing that it stands on has changed."""
    if job.spec.key_scope == "table":  # the winner may have moved the same keys
        raise BeginAgain(discard=True)
    won = [link.body for link in table.entries(head.number, newer.number)]
    paths = {f.path for f in entry.files}
    if any(f.path in paths for e in won for f in e.files) or any(e.batch_id == entry.batch_id for e in won):
        raise BeginAgain(discard=True)
    # After a restore it is another question which files are withdrawn; behind a fence our files may be gone already.
    if any(e.kind == "restore" or (e.fence is not None and job.start <= e.fence) for e in won):
        raise BeginAgain(discard=True)
    if newer.body.spec_version > entry.spec_version or entry.full:  # others may have begun partitions
        raise BeginAgain(discard=True)
    if newer.body.received_at < entry.received_at:
        return entry
    if job.spec.stamped:  # the stamp is in the rows already
        raise BeginAgain(discard=True)
    return msgspec.structs.replace(entry, received_at=newer.body.received_at + 1)


def announce(table: OpenTable, result: AppendResult) -> None:
    """Send a message for each partition that the batch touches."""
    try:
        table.queue.send([Message(table.name, partition, result.number) for partition in result.entry.touched])
    except LakeupsertError as e:
        e.data_changed = True  # the batch is committed; `run` sends its messages again
        raise


def examples_of(reports: Iterable[Report]) -> dict[str, str]:
    """Of each reason for which rows were refused one of these, for people."""
    return {code: text for r in reports if isinstance(r, Refused) for code, text in r.examples.items()}
