"""The rows that arrived in each partition, as `reconcile` knows them from its last proof.

Reads     the newest of these objects
Writes    one such object, once everything is proved and `PROVED_TOGETHER` batches came since the last one
Repeat    safe: it only repeats what the ledger says. If it is missing, or the ledger is another one, the whole ledger is read
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.storage import ObjectStore, UnknownOutcomeError
from lakeupsert.table import metadata
from lakeupsert.table.chain import FORMAT, Link, refuse_newer
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import LedgerEntry, active_batches
from lakeupsert.table.manifest import NO_ROWS, add_digests

PROVED_TOGETHER = 64
"""More: each `reconcile` reads more ledger entries. Fewer: it writes a list of all partitions more often."""


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that arrived in one partition.

    Attributes:
        last: the last batch that touches it; -1: none does.
        rows: of all batches.
        withdrawn: those of batches that do not count, batch 0 excepted.
        digest: of the rows of all batches except batch 0; None: not known.
    """

    last: int = -1
    rows: int = 0
    withdrawn: int = 0
    digest: str | None = NO_ROWS

    def and_then(self, partition: str, due: Sequence[Link[LedgerEntry]], active: Collection[int]) -> "Arrived":
        """With later entries that touch the partition. ``active``: the batches that count."""
        touched = {link.number: link.body.touched[partition] for link in due}
        return Arrived(
            last=max(touched, default=self.last),
            rows=self.rows + sum(t.rows for t in touched.values()),
            withdrawn=self.withdrawn + sum(t.rows for n, t in touched.items() if n and n not in active),
            digest=add_digests([self.digest, *(t.digest for n, t in touched.items() if n)]),
        )


class AllArrived(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that arrived in each partition up to a ledger entry. ``entry``: its write id, which also identifies all before it.

    ``format`` is as in a chain's version.
    """

    format: int = FORMAT
    up_to: int = -1
    entry: str = ""
    partitions: dict[str, Arrived] = {}


NOT_KNOWN = AllArrived()


def entries_by_partition(entries: Sequence[Link[LedgerEntry]]) -> dict[str, list[Link[LedgerEntry]]]:
    """For each partition the entries that touch it, in their order."""
    found: dict[str, list[Link[LedgerEntry]]] = {}
    for link in entries:
        for partition in link.body.touched:
            found.setdefault(partition, []).append(link)
    return found


def newest_arrived(store: ObjectStore, batch: int) -> AllArrived:
    """The newest one up to ``batch``; an empty one if there is none. Raises DamagedTableError."""
    names = [found.name for found in store.list(TableObjects.ARRIVED)]
    newest = max((name for name in names if name <= TableObjects.arrived(batch)), default=None)
    if newest is None:
        return NOT_KNOWN
    found = metadata.decode(
        store.get(newest),
        AllArrived,
        partial(store.uri, newest),
        "the rows that arrived in each partition",
        next="delete that object: it only repeats what the ledger says, and `lakeupsert reconcile` writes it again",
    )
    refuse_newer(store.uri(newest), found.format)
    return found


def read_arrived(table: OpenTable, batch: int) -> AllArrived:
    """As `newest_arrived`, and an empty one if the ledger is another one now, or a restore came since."""
    found, history = newest_arrived(table.resources.store, batch), table.history
    link = history.entry(found.up_to) if found.up_to >= 0 else None
    is_same = link is not None and link.write_id == found.entry
    return found if is_same and not any(x.body.restored for x in history.entries(found.up_to, batch)) else NOT_KNOWN


def write_arrived(table: OpenTable, known: AllArrived, batch: int) -> None:
    """Write the rows that arrived up to ``batch``, which are proved, if `PROVED_TOGETHER` batches are new."""
    if batch - known.up_to < PROVED_TOGETHER:
        return
    entries = table.history.entries(known.up_to, batch)
    active = active_batches((link.number, link.body) for link in entries)
    later = {
        p: known.partitions.get(p, Arrived()).and_then(p, due, active)
        for p, due in entries_by_partition(entries).items()
    }
    now = AllArrived(up_to=batch, entry=entries[-1].write_id, partitions={**known.partitions, **later})
    with suppress(UnknownOutcomeError):  # the next call finds it or writes it
        table.resources.store.create(TableObjects.arrived(batch), metadata.encode(now))
