"""What happened in the last nights. A night is a batch or a restore.

Reads     status and ledger; for each partition that these nights touch, its manifests back to the first of them
Repeat    safe; reads only. Trimmed versions are not an error: the page says what it leaves out because of them
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta

import pyarrow as pa

from lakeupsert import clock
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.report.status import Status, status
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import partition_scalars, partition_text, ranged_column
from lakeupsert.table.ledger import LedgerEntry, RestorePoint, active_batches
from lakeupsert.table.manifest import NO_CHANGES, Changes, Manifest
from lakeupsert.table.spec import TableSpec

CHAINS_AT_ONCE = 16
PAUSE = timedelta(minutes=10)
"""A longer pause between two merges ends a run."""


@dataclass(frozen=True)
class Merge:
    """A version of a partition that a merge wrote.

    ``seconds`` and ``worker`` are None if an earlier lakeupsert wrote the version. Partitions that were merged in one call
    share its time evenly, so ``began`` is exact for the call, not for each partition.
    """

    partition: str
    batch: int
    ended: datetime
    seconds: float | None
    worker: str | None
    rows: int
    bytes_written: int
    changes: Changes

    @property
    def took(self) -> float:
        """``seconds``, or 0 if unknown."""
        return self.seconds or 0.0

    @property
    def began(self) -> datetime:
        return self.ended - timedelta(seconds=self.took)


@dataclass(frozen=True)
class Night:
    """One batch, or one restore.

    Attributes:
        whole: the merges of all touched partitions are known, so ``bytes_written`` and ``changes`` are complete.
        withdrawn: a later restore withdrew the batch; its rows no longer count.
        restored: what a restore went back to; None for a batch.
    """

    number: int
    batch_id: str
    received: datetime
    touched: int
    rows: int
    superseded: int
    quarantined: dict[str, int]
    bytes_appended: int
    bytes_written: int
    changes: Changes
    whole: bool
    withdrawn: bool = False
    restored: RestorePoint | None = None


@dataclass(frozen=True)
class Partition:
    """``times``: how many batches that count touched it. ``last``: the last night that touched it, 0 if unknown."""

    name: str
    value: str
    day: date | None
    times: int
    last: int
    rows: int
    bytes: int
    marks: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True)
class ReportData:
    """Everything that the page shows. ``nights`` are in ascending order, ``merges`` in the order of their ends.

    ``by_date``: the partition column is a date. ``ages``: rows of batches that count, by the days from the partition's date to
    the receipt of the row.
    """

    status: Status
    at: datetime
    column: str | None = None
    by_date: bool = False
    nights: Sequence[Night] = ()
    merges: Sequence[Merge] = ()
    partitions: Sequence[Partition] = ()
    ages: dict[int, int] = field(default_factory=dict)

    def last_run(self) -> list[Merge]:
        """The last merges without a pause between them, since their last batch was received, in the order of their ends."""
        run: list[Merge] = []
        received = {night.number: night.received for night in self.nights}
        began = datetime.max.replace(tzinfo=UTC)
        for merge in reversed(self.merges):
            if run and (began - merge.ended > PAUSE or merge.ended < received[run[0].batch]):
                break
            run.append(merge)
            began = min(began, merge.began)
        return run[::-1]


def observe(table: OpenTable, nights: int) -> ReportData:
    """Read the last ``nights`` batches of the table, and all its partitions."""
    now = status(table)
    head, spec = table.ledger_head(), table.head_spec()
    if head is None or spec is None:
        return ReportData(now, clock.now())
    links = [x for x in table.entries(max(0, head.number - nights), head.number) if x.body.kind in ("batch", "restore")]
    batches = active_batches(enumerate(table.headers(head.number)))
    touches: dict[str, list[int]] = defaultdict(list)
    for link in links:
        for partition in link.body.touched:
            touches[partition].append(link.number)
    merges: list[Merge] = []
    known: dict[str, range] = {}
    heads = table.heads(touches)
    with ThreadPoolExecutor(CHAINS_AT_ONCE) as pool:
        chains = pool.map(lambda link: _merges(table, link, links[0].number - 1), heads.values())
        for partition, (found, covered) in zip(heads, chains, strict=True):
            merges += [merge for merge in found if merge.batch <= head.number]  # a night may be running
            known[partition] = covered
    by_night: dict[int, list[Merge]] = defaultdict(list)
    for merge in merges:
        by_night[merge.batch].append(merge)
    column = ranged_column(spec.body)
    by_date = pa.types.is_date(spec.body.schema.field(column).type)
    days = {p: partition_scalars(spec.body, p)[column].as_py() for p in touches} if by_date else {}
    ages: dict[int, int] = defaultdict(int)
    for link in links:
        for partition, touched in link.body.touched.items():
            if by_date and link.number in batches:
                ages[(_received(link).date() - days[partition]).days] += touched.rows
    return ReportData(
        status=now,
        at=clock.now(),
        column=column,
        by_date=by_date,
        nights=[_night(link, by_night[link.number], known, batches) for link in links],
        merges=sorted(merges, key=lambda m: m.ended),
        partitions=_partitions(table, now, spec.body, touches, batches, by_date=by_date),
        ages=dict(ages),
    )


def _merges(table: OpenTable, head: Link[Manifest], after: int) -> tuple[list[Merge], range]:
    """The partition's merges after batch ``after``, and the range of batches for which they are complete."""
    chain = table.objects.partition(head.body.partition)
    found = []
    newer = head
    while newer.body.merged > after:
        older = chain.get(newer.number - 1) if newer.number else None
        # A failure mark repeats the version below it except for `failed`. A reprocess merges no batch either.
        merged_nothing = older.body.merged == newer.body.merged if older else newer.body.failed is not None
        if not merged_nothing:
            found.append(_merge(older, newer))
        if older is None:
            begin = 0 if newer.number == 0 else newer.body.merged + merged_nothing
            return found, range(begin, head.body.merged + 1)
        newer = older
    return found, range(newer.body.merged + 1, head.body.merged + 1)


def _merge(older: Link[Manifest] | None, link: Link[Manifest]) -> Merge:
    manifest = link.body
    before = {f.name for b in older.body.buckets for f in (*b.base, *b.deltas, *b.history)} if older else set()
    files = [f for b in manifest.buckets for f in (*b.base, *b.deltas, *b.tombstones, *b.history)]
    seconds, worker = manifest.made.get("seconds"), manifest.made.get("worker")
    return Merge(
        partition=manifest.partition,
        batch=manifest.merged,
        ended=datetime.fromisoformat(link.written_at),
        seconds=float(seconds) if isinstance(seconds, (int, float)) else None,
        worker=worker if isinstance(worker, str) else None,
        rows=manifest.rows,
        bytes_written=sum(f.bytes for f in files if f.name not in before),
        changes=manifest.changes,
    )


def _night(
    link: Link[LedgerEntry], merges: Sequence[Merge], known: dict[str, range], batches: Collection[int]
) -> Night:
    entry = link.body
    return Night(
        number=link.number,
        batch_id=entry.batch_id,
        received=_received(link),
        touched=len(entry.touched),
        rows=entry.rows_appended,
        superseded=entry.rows_superseded,
        quarantined=entry.quarantined,
        bytes_appended=sum(t.bytes for t in entry.touched.values()),
        bytes_written=sum(merge.bytes_written for merge in merges),
        changes=sum((merge.changes for merge in merges), NO_CHANGES),
        whole=all(link.number in known.get(p, ()) for p in entry.touched),
        withdrawn=entry.kind == "batch" and link.number not in batches,
        restored=entry.restored,
    )


def _partitions(
    table: OpenTable,
    now: Status,
    spec: TableSpec,
    touches: dict[str, list[int]],
    batches: Collection[int],
    *,
    by_date: bool,
) -> list[Partition]:
    snapshot = table.last_snapshot()
    shown = snapshot.body.partitions if snapshot else {}
    found = []
    for name in sorted({*shown, *touches, *now.behind}):
        marks = {
            "failed": name in now.failed,
            "lagging": name in now.lagging,
            "dirty": now.behind.get(name, False) and name not in now.failed,
        }
        found.append(
            Partition(
                name=name,
                value=partition_text(name),
                day=partition_scalars(spec, name)[ranged_column(spec)].as_py() if by_date else None,
                times=sum(number in batches for number in touches.get(name, ())),
                last=touches[name][-1] if name in touches else shown[name].merged if name in shown else 0,
                rows=shown[name].rows if name in shown else 0,
                bytes=shown[name].bytes if name in shown else 0,
                marks=tuple(mark for mark, is_set in marks.items() if is_set),
                reason=now.failed.get(name, ""),
            )
        )
    return found


def _received(link: Link[LedgerEntry]) -> datetime:
    return datetime.fromtimestamp(link.body.received_at / 1e6, UTC)
