"""Restore the table to a snapshot: a ledger entry withdraws later batches, and merges put the old versions back.

Reads     the snapshot, the whole ledger, and the version of each changing partition that the snapshot names; the rows of
          partitions that were reprocessed since
Writes    quarantine files, if rows come back with values that a retype since does not convert; ONE ledger entry, which is the
          commit; then a message for each partition. Nothing is deleted or rewritten
Repeat    safe: if the table is at the snapshot already, no entry is written, and missing messages are sent

A restore is always of the whole table, since a snapshot shows whole batches. Landing files of withdrawn batches count as taken;
`append --again` loads them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import date

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, LakeupsertError, RefusedError
from lakeupsert.operations.diff import difference_of
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.messages import send_missing
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.retypes import count_unfit, quarantine_unfit, restored_files, retypes_between
from lakeupsert.pipeline.standing import unpublished
from lakeupsert.queue import Message
from lakeupsert.read.view import choose, expired_snapshot
from lakeupsert.table.chain import LOST, Link, Lost, until_won
from lakeupsert.table.ledger import NOTHING, LedgerEntry, QuarantineFile, RestorePoint, active_batches, next_stamp
from lakeupsert.table.snapshot import Snapshot


@dataclass(frozen=True)
class RestorePlan:
    """What a restore to ``snapshot`` changes.

    Attributes:
        withdrawn, brought_back: batches that stop counting, and that count again, with their rows.
        partitions: those that change.
        rewritten: those of them that no such batch touches: their rows are other ones since `reprocess` read landing files.
        unpublished: if none changes, those that readers still see as before: an earlier restore is not finished.
        unfit: rows that come back with a value that a retype since does not convert. The column is null in them, and the entry
            names quarantine files with a copy of each.
        entry: the number of the ledger entry; None if nothing was written.
    """

    snapshot: int
    batch: int
    withdrawn: dict[int, int]
    brought_back: dict[int, int]
    partitions: tuple[str, ...]
    rewritten: tuple[str, ...] = ()
    unpublished: tuple[str, ...] = ()
    unfit: int = 0
    entry: int | None = None


def restore(table: OpenTable, snapshot: str | int | date, *, dry: bool) -> RestorePlan:
    """Withdraw every batch that does not count in a snapshot; with ``dry`` only plan it.

    Raises DamagedTableError if a version that must come back is gone; TryAgainError after too many lost races.
    """
    to = choose(table.history.objects, snapshot)
    if to is None:
        raise ConfigurationError(
            "unknown-snapshot", "Nothing was published yet.", next="run `lakeupsert history` to see what there is"
        )
    table.history.existing_spec()

    def attempt() -> RestorePlan | Lost:
        table.history.last_snapshot()  # before the ledger, so that the ledger has everything that it shows
        head = table.history.ledger_head()
        assert head is not None, "there is a snapshot, so there is a ledger"
        headers = list(enumerate(table.history.headers(head.number)))
        now, then = active_batches(headers), active_batches(headers[: to.body.batch + 1])
        changed = now ^ then
        newest = table.history.last_snapshot()  # after the ledger's head: the commit fails if a fence came later
        if newest is None or not newest.body.keeps(to.number):  # a vacuum may have expired it meanwhile
            raise expired_snapshot(to.number, newest)
        entries = {number: table.history.entries(number - 1, number)[0].body for number in sorted(changed)}
        touched = {p for entry in entries.values() for p in entry.touched}
        rewritten = _rewritten(table, to, newest, touched)
        partitions = sorted({*touched, *rewritten})
        plan = RestorePlan(
            snapshot=to.number,
            batch=to.body.batch,
            withdrawn={n: entries[n].rows_appended for n in sorted(now - then)},
            brought_back={n: entries[n].rows_appended for n in sorted(then - now)},
            partitions=tuple(partitions),
            rewritten=rewritten,
            unpublished=() if partitions else tuple(unpublished(table.history, newest, head)),
        )
        versions = {p: _version(table.history, to, p) for p in partitions}
        retypes = retypes_between(table.history, 0, head.body.spec_version)
        back = restored_files(table.history, versions, to.body.batch, then)
        if dry:
            return replace(plan, unfit=count_unfit(table.resources.store, retypes, back))
        if not partitions:
            send_missing(table)
            return plan
        batch_id = clock.new_id()
        refused = quarantine_unfit(table.resources.store, retypes, back, head.number + 1, batch_id)
        point = RestorePoint(snapshot=to.number, batch=to.body.batch, versions=versions)
        entry = _entry(head, newest, point, batch_id, [report.file for report in refused])
        outcome = table.history.objects.ledger.append(entry, head)
        if outcome.result == "lost":
            table.resources.discard(report.file.name for report in refused)
        if (link := outcome.link) is not None:
            try:
                table.resources.queue.send([Message(table.name, partition, link.number) for partition in partitions])
            except LakeupsertError as e:
                e.data_changed = True  # the restore is committed; if repeated, it sends its messages again
                raise
            return replace(plan, unfit=entry.rows_quarantined, entry=link.number)
        return LOST

    return until_won(table.resources.store.uri(), attempt)


def _rewritten(
    table: OpenTable, to: Link[Snapshot], newest: Link[Snapshot], others: Collection[str]
) -> tuple[str, ...]:
    """The partitions besides ``others`` in which a reprocess, or a restore that took one back, left other rows than ``to`` shows.

    One whose old rows can't be read any more is not among them: its rewrite was the repair.
    """
    since = table.history.entries(to.body.batch, newest.body.batch)
    back = {p for link in since if link.body.restored is not None for p in link.body.touched}

    def differs(partition: str) -> bool:
        then, now = to.body.partitions[partition], newest.body.partitions[partition]
        works = {table.history.version(partition, shown).reprocessed for shown in (then, now)}
        if partition not in back and len(works) == 1:
            return False
        found = difference_of(table, partition, then, now)
        return not isinstance(found, str) and bool(found.partitions)

    shown = newest.body.partitions
    several = [
        p for p, one in to.body.partitions.items() if p not in others and p in shown and one.version != shown[p].version
    ]
    return tuple(p for p, does in zip(several, table.resources.map_concurrently(differs, several), strict=True) if does)


def _entry(
    head: Link[LedgerEntry],
    newest: Link[Snapshot],
    point: RestorePoint,
    batch_id: str,
    quarantine: Sequence[QuarantineFile],
) -> LedgerEntry:
    rows = sum(file.rows for file in quarantine)
    return LedgerEntry(
        kind="restore",
        batch_id=batch_id,
        received_at=next_stamp(head.body),
        spec_version=head.body.spec_version,
        touched=dict.fromkeys(point.versions, NOTHING),
        restored=point,
        rows_read=rows,
        quarantined={"retyped": rows} if rows else {},
        quarantine=tuple(quarantine),
        snapshot=newest.number,
    )


def _version(history: History, snapshot: Link[Snapshot], partition: str) -> int:
    """The version that a restore to ``snapshot`` goes back to.

    Refused if the snapshot lags across an earlier restore: the version would be the one that the earlier restore named, and
    nothing keeps its files once that restore is merged.
    """
    shown = snapshot.body.partitions.get(partition)
    version, merged = (shown.version, shown.merged) if shown else (-1, 0)
    for link in history.entries(merged, snapshot.body.batch):
        if link.body.restored is not None and partition in link.body.touched:
            raise RefusedError(
                "snapshot-lags",
                f"Snapshot {snapshot.number} shows {partition} as it was before the restore of batch {link.number}, which was "
                "not merged then. Nothing was changed.",
                next="restore a snapshot that lists no partition as lagging (`lakeupsert history`)",
                partition=partition,
            )
    history.version(partition, version)  # raises if it is gone
    return version
