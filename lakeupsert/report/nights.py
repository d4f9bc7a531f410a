"""What happened in the last nights. A night is a batch, a restore, or a change of the schema.

Reads     status and ledger; for each partition that these nights touch, its manifests back to the first of them; a few quarantine
          files, for an example of each reason; the first names in the landing zone
Repeat    safe; reads only. Trimmed versions are not an error: the page says what it leaves out because of them
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from typing import Literal

import pyarrow as pa

from lakeupsert import clock
from lakeupsert.errors import LakeupsertError
from lakeupsert.phrases import count
from lakeupsert.pipeline.append.discover import skipped_files
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.report.examples import Example, find_examples
from lakeupsert.report.status import NIGHTS, Status, status
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import TableObjects, partition_scalars, partition_text, ranged_column
from lakeupsert.table.ledger import LedgerEntry, active_batches
from lakeupsert.table.manifest import NO_CHANGES, Changes, Manifest
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.types import type_name

CHAINS_AT_ONCE = 16
PAUSE = timedelta(minutes=10)
"""A longer pause between two merges ends a run."""


@dataclass(frozen=True)
class Merge:
    """A version of a partition that a merge wrote.

    Partitions that were merged in one call share its time evenly, so ``began`` is exact for the call, not for each partition.
    ``refused``: rows below the floor.
    """

    partition: str
    batch: int
    ended: datetime
    seconds: float
    worker: str
    rows: int
    bytes_written: int
    refused: int
    changes: Changes

    @property
    def began(self) -> datetime:
        return self.ended - timedelta(seconds=self.seconds)


@dataclass(frozen=True)
class Night:
    """One batch, or another ledger entry that changes what the table is.

    Attributes:
        note: what is unusual about it: what a restore goes back to, what was renamed, a statement, or that rows were replayed.
        quarantined: rows that it refused, by reason.
        refused_by_merges: rows below a floor.
        whole: the merges of all touched partitions are known, so ``bytes_written`` and ``changes`` are complete.
        withdrawn: a later restore withdrew the batch; its rows no longer count.
    """

    number: int
    kind: Literal["batch", "restore", "schema"]
    note: str
    batch_id: str
    received: datetime
    touched: int
    rows: int
    superseded: int
    quarantined: dict[str, int]
    refused_by_merges: int
    bytes_appended: int
    bytes_written: int
    changes: Changes
    whole: bool
    withdrawn: bool = False


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

    Attributes:
        by_date: the partition column is a date.
        ages: rows of batches that count, by the days from the partition's date to the receipt of the row.
        examples: a refused row of each reason, as far as one was found.
        unaccounted: partitions that have other rows than these nights appended, by the counters of their manifests; None: not
            known of the newest batch, because versions before it are gone.
        older: whether there are batches before ``nights``.
        skipped: which landing files no batch takes, or why that is not known; "" if none.
    """

    status: Status
    at: datetime
    table: str = ""
    column: str | None = None
    by_date: bool = False
    nights: Sequence[Night] = ()
    merges: Sequence[Merge] = ()
    partitions: Sequence[Partition] = ()
    ages: dict[int, int] = field(default_factory=dict)
    examples: Mapping[str, Example] = field(default_factory=dict)
    unaccounted: Sequence[str] | None = None
    older: bool = False
    skipped: str = ""

    @property
    def age(self) -> timedelta | None:
        """How old the newest data are that readers see; None if they see nothing."""
        return self.at - datetime.fromisoformat(self.status.received_at) if self.status.received_at else None

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


def observe(table: OpenTable, nights: int, landing_names: int) -> ReportData:
    """Read the last ``nights`` batches of the table, and all its partitions.

    ``landing_names``: how many names in the landing zone it looks at.
    """
    now = status(table)
    head, spec = table.history.ledger_head(), table.history.head_spec()
    if head is None or spec is None:
        return ReportData(now, clock.now(), table.name, skipped=_skipped(table, landing_names))
    headers = table.history.headers(head.number)
    numbers = [number for number, entry in enumerate(headers) if entry.kind == "batch"]
    first = numbers[-nights] if len(numbers) > nights else 1
    links = [x for x in table.history.entries(first - 1, head.number) if x.body.kind in (*NIGHTS, "schema")]
    batches = active_batches(enumerate(headers))
    touches: dict[str, list[int]] = defaultdict(list)
    for link in links:
        for partition in link.body.touched:
            touches[partition].append(link.number)
    heads = _heads(table, touches)
    with ThreadPoolExecutor(CHAINS_AT_ONCE) as pool:
        found = pool.map(lambda link: _walk(table.history.objects, link, first - 1, head.number), heads.values())
        walks = dict(zip(heads, found, strict=True))
    merges = sorted((merge for walk in walks.values() for merge in walk.merges), key=lambda m: m.ended)
    by_night: dict[int, list[Merge]] = defaultdict(list)
    for merge in merges:
        by_night[merge.batch].append(merge)
    column = ranged_column(spec.body)
    by_date = column is not None and pa.types.is_date(spec.body.schema.field(column).type)
    days = {p: _day(spec.body, p) for p in touches} if by_date else {}
    ages: dict[int, int] = defaultdict(int)
    for link in links:
        for partition, touched in link.body.touched.items():
            if by_date and link.number in batches:
                ages[(link.body.received.date() - days[partition]).days] += touched.rows
    refused = [(x.body.quarantined, [f.name for f in x.body.quarantine]) for x in reversed(links)]
    return ReportData(
        status=now,
        at=clock.now(),
        table=table.name,
        column=column,
        by_date=by_date,
        nights=[_night(table.history, link, by_night[link.number], walks, batches) for link in links],
        merges=merges,
        partitions=_partitions(table.history, now, spec.body, touches, batches, by_date=by_date),
        ages=dict(ages),
        examples=find_examples(table.resources.store, refused),
        unaccounted=_unaccounted(table.history, walks, links),
        older=first > 1,
        skipped=_skipped(table, landing_names),
    )


def _heads(table: OpenTable, touches: Mapping[str, Sequence[int]]) -> dict[str, Link[Manifest]]:
    """A version of each partition that has merged the last batch that touches it, or its newest one.

    The snapshot names most of them, so they are read without a LIST.
    """
    snapshot = table.history.last_snapshot()
    shown = snapshot.body.partitions if snapshot else {}
    named = [p for p, numbers in touches.items() if p in shown and shown[p].merged >= numbers[-1]]
    objects = table.history.objects

    def read(partition: str) -> Link[Manifest] | None:
        version = shown[partition]
        if version.group is None:
            return objects.partition(partition).get(version.version)
        return replace(objects.grouped(partition, version), number=version.version + 1)  # it follows that version

    found = table.resources.map_concurrently(read, named)
    heads = {p: link for p, link in zip(named, found, strict=True) if link is not None}
    return heads | table.history.heads(touches.keys() - heads.keys())


def _skipped(table: OpenTable, landing_names: int) -> str:
    try:
        return str(skipped_files(table, landing_names) or "")
    except (LakeupsertError, OSError) as e:  # the table can be looked at without its landing zone
        return f"not known: {e.message if isinstance(e, LakeupsertError) else e}"


@dataclass(frozen=True)
class _Walk:
    """What the versions of a partition say.

    Attributes:
        known: the batches for which ``merges`` are complete.
        gained: rows that were appended after batch ``since``, up to batch ``up_to``, by the counters.
    """

    merges: list[Merge]
    known: range
    since: int
    up_to: int
    gained: int


def _walk(objects: TableObjects, head: Link[Manifest], after: int, last: int) -> _Walk:
    """Walk the versions of a partition that merged batches after ``after``, up to ``last``: a night may be running."""
    chain = objects.partition(head.body.partition)
    found = []
    newest: Manifest | None = None
    newer = head
    while newer.body.merged > after:
        if newest is None and newer.body.merged <= last:
            newest = newer.body
        older = chain.get(newer.number - 1) if newer.number else None
        # A failure mark repeats the version below it except for `failed`. A reprocess merges no batch either.
        merged_nothing = older.body.merged == newer.body.merged if older else newer.body.failed is not None
        if newest is not None and not merged_nothing:
            found.append(_merge(older, newer))
        if older is None:
            begin = 0 if newer.number == 0 else newer.body.merged + merged_nothing
            break
        newer = older
    else:
        begin = newer.body.merged + 1
    newest = newest or newer.body
    is_first = newer.number == 0 and newer.body.merged > after
    oldest = Manifest(partition=newest.partition, merged=-1, spec_version=0) if is_first else newer.body
    return _Walk(
        merges=found,
        known=range(begin, newest.merged + 1),
        since=oldest.merged,
        up_to=newest.merged,
        gained=_counted(newest, "appended") - _counted(oldest, "appended"),
    )


def _counted(manifest: Manifest, name: str) -> int:
    return sum(getattr(bucket.counters, name) for bucket in manifest.buckets)


def _unaccounted(
    history: History, walks: Mapping[str, _Walk], links: Sequence[Link[LedgerEntry]]
) -> Sequence[str] | None:
    """As `ReportData.unaccounted`. Batches that are not merged yet do not matter."""
    for link in reversed(links):
        if link.body.touched and all(p in walks and walks[p].up_to >= link.number for p in link.body.touched):
            if any(walks[p].since >= link.number for p in link.body.touched):
                return None
            break
    else:
        return None
    return [p for p, walk in walks.items() if not _is_accounted(history, p, walk, links[0].number - 1)]


def _is_accounted(history: History, partition: str, walk: _Walk, after: int) -> bool:
    """Whether a partition has the rows that the ledger says were appended to it.

    The first version of a partition may have merged batches before those shown. Then the ledger is read back to the beginning.
    """

    def appended(since: int) -> int:
        entries = history.entries(since, walk.up_to)
        return sum(link.body.touched[partition].rows for link in entries if partition in link.body.touched)

    return any(walk.gained == appended(since) for since in (max(walk.since, after), walk.since))


def _merge(older: Link[Manifest] | None, link: Link[Manifest]) -> Merge:
    manifest = link.body
    before = {f.name for b in older.body.buckets for f in (*b.base, *b.deltas, *b.history)} if older else set()
    files = [f for b in manifest.buckets for f in (*b.base, *b.deltas, *b.tombstones, *b.history)]
    return Merge(
        partition=manifest.partition,
        batch=manifest.merged,
        ended=datetime.fromisoformat(link.written_at),
        seconds=float(manifest.made["seconds"]),
        worker=str(manifest.made["worker"]),
        rows=manifest.rows,
        bytes_written=sum(f.bytes for f in files if f.name not in before),
        refused=max(0, _counted(manifest, "refused") - (_counted(older.body, "refused") if older else 0)),
        changes=manifest.changes,
    )


def _night(
    history: History,
    link: Link[LedgerEntry],
    merges: Sequence[Merge],
    walks: Mapping[str, _Walk],
    batches: Collection[int],
) -> Night:
    entry = link.body
    return Night(
        number=link.number,
        kind="restore" if entry.restored else "batch" if entry.kind == "batch" else "schema",
        note=_note(history, entry),
        batch_id=entry.batch_id,
        received=link.body.received,
        touched=len(entry.touched),
        rows=entry.rows_appended,
        superseded=entry.rows_superseded,
        quarantined=entry.quarantined,
        refused_by_merges=sum(merge.refused for merge in merges),
        bytes_appended=sum(t.bytes for t in entry.touched.values()),
        bytes_written=sum(merge.bytes_written for merge in merges),
        changes=sum((merge.changes for merge in merges), NO_CHANGES),
        whole=all(p in walks and link.number in walks[p].known for p in entry.touched),
        withdrawn=entry.kind == "batch" and link.number not in batches,
    )


def _note(history: History, entry: LedgerEntry) -> str:
    if entry.restored is not None:
        return f"restore to snapshot {entry.restored.snapshot}"
    if entry.kind == "schema":
        before, after = history.spec(entry.spec_version - 1), history.spec(entry.spec_version)
        names = after.changed_names(len(before.renames))
        changes = [f"{old} renamed {new}" if new else f"{old} dropped" for old, new in names.items()]
        retypes = after.conversions(len(before.renames)).items()
        changes += [f"{name} became {type_name(steps[-1].after)}" for name, steps in retypes]
        changes += [f"{count(entry.rows_quarantined, 'row')} quarantined"] if entry.rows_quarantined else []
        return ", ".join(changes) or "new schema"
    if entry.statement is not None:
        return str(entry.statement)
    return "replay" if entry.replayed else ""


def _partitions(
    history: History,
    now: Status,
    spec: TableSpec,
    touches: dict[str, list[int]],
    batches: Collection[int],
    *,
    by_date: bool,
) -> list[Partition]:
    snapshot = history.last_snapshot()
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
                day=_day(spec, name) if by_date else None,
                times=sum(number in batches for number in touches.get(name, ())),
                last=touches[name][-1] if name in touches else shown[name].merged if name in shown else 0,
                rows=shown[name].rows if name in shown else 0,
                bytes=shown[name].bytes if name in shown else 0,
                marks=tuple(mark for mark, is_set in marks.items() if is_set),
                reason=now.failed.get(name, ""),
            )
        )
    return found


def _day(spec: TableSpec, partition: str) -> date:
    """The date of a partition of a table that has them by date."""
    found: date = partition_scalars(spec, partition)[ranged_column(spec) or ""].as_py()
    return found
