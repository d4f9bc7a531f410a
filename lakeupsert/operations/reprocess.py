"""Rewrite partitions at their current `merged`, while nights go on: the same rows in new files.

Reads     the heads of the partitions; with source `landing`, the ledger and every landing file of the batches that count there
Writes    with source `landing`, packs of appended files; then ONE work object that names them; then a message for each partition
Repeat    safe: each call rewrites the partitions once more, and no row changes

    plan -> check the sources -> row work of append, by batch -> work object -> messages -> workers (`dedupe`) -> publish

Packs from landing files are where appended files are, and a worker merges them like those, into an empty partition or into what
was adopted. Packs and work object become garbage when every message is answered.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal

from lakeupsert.engine.batch import AppendJob
from lakeupsert.engine.by_name import EngineName, HostChoice, choose_host, host_by_name
from lakeupsert.engine.hosts import Host
from lakeupsert.engine.replay import replay_rows
from lakeupsert.engine.reports import FileFailed, FileRead, Report, touched_by
from lakeupsert.errors import RefusedError, TryAgainError
from lakeupsert.landing.accept import RowRules
from lakeupsert.landing.files import content_hash, format_of
from lakeupsert.landing.formats.blocks import ChangedFileError, LandingInput
from lakeupsert.operations.diff import Difference, difference_of
from lakeupsert.operations.replay import renames_of
from lakeupsert.phrases import count
from lakeupsert.pipeline.merge.dedupe import PartitionResult
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import PublishResult, publish
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.workers.drain_queues import DrainOptions, drain_queues
from lakeupsert.progress import Countdown
from lakeupsert.queue import Message
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.floor import read_refused_keys
from lakeupsert.table.chain import FORMAT, Link
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import NOTHING, ChosenHost, LandingFile, Touched, active_batches
from lakeupsert.table.manifest import DataFile, Manifest
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.work import PartitionRewrite, RewriteOrder, Source, write_order

AT_ONCE = 16
OTHERS_SECONDS = 10.0
"""How often a call that only waits for other workers looks at the partitions that are left: two requests for each."""
_WITHOUT_LANDING = (
    "without landing files: if the stored files are complete, `--source stored` is enough; if they are damaged or gone, restore "
    "them from a backup, or the whole table to a snapshot from before the partition last changed (`lakeupsert history`): "
    "`lakeupsert restore ID --yes`"
)


@dataclass(frozen=True)
class ReprocessPlan:
    """What is rewritten, and what is read for it.

    Attributes:
        heads: the version of each partition that is replaced.
        batches: those whose landing files are read again.
        files, bytes: landing and adopted files with source `landing`, otherwise stored files; bytes as they are stored.
        host: where landing files are read; None with stored files.
        work: the work object; None if nothing was written.
    """

    source: Source
    heads: dict[str, Link[Manifest]]
    batches: tuple[int, ...]
    files: int
    bytes: int
    host: ChosenHost | None = None
    work: str | None = None

    def left(self, table: OpenTable) -> list[str]:
        """Partitions that no worker has rewritten yet."""

        def is_left(partition: str) -> bool:
            now = table.objects.partition(partition).head()
            return (now.body.reprocessed if now else None) == self.heads[partition].body.reprocessed

        return [p for p in self.heads if is_left(p)]

    def unseen(self, table: OpenTable) -> list[str]:
        """Partitions whose old files readers still see: the new version has a newer batch in it, which is not published."""
        snapshot = table.last_snapshot()
        shown = snapshot.body.partitions if snapshot else {}
        return [p for p, head in self.heads.items() if p in shown and shown[p].version <= head.number]


@dataclass(frozen=True)
class ReprocessOptions:
    """Which partitions are rewritten (``selected``), and how.

    Attributes:
        source: from what is ``stored``, or from the ``landing`` files of all their batches.
        host: where landing files are read, and partitions merged; ``auto``: landing files where their bytes say, partitions
            here.
        workers: processes of this machine that merge, None: the host does, 0: other processes do, and this one waits for them.
        engine: as for `dedupe`.
        dry: only plan it.
        stop: once set, the merges that run are finished, and no others are begun.
    """

    selected: Callable[[str], bool] = lambda partition: True
    _: KW_ONLY
    source: Source = "stored"
    host: HostChoice = "auto"
    workers: int | None = None
    engine: EngineName | None = None
    dry: bool = False
    stop: Stop | None = None
    progress: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class ReprocessResult:
    """``left`` are partitions that no worker has rewritten, ``unseen`` those whose old files readers still see;
    ``publish`` is None if nothing was to do, or the call was dry. ``warnings``: rows that changed, or that can't be compared."""

    plan: ReprocessPlan
    dedupe: list[PartitionResult] = field(default_factory=list)
    publish: PublishResult | None = None
    left: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Unfit:
    """A landing file (of batch 0, an adopted file) that is gone or changed."""

    code: Literal["source-gone", "source-changed"]
    batch: int
    where: str

    def error(self, others: int = 0) -> RefusedError:
        what = "is gone" if self.code == "source-gone" else "has changed since"
        more = f" {others} more files are gone or changed." if others else ""
        return RefusedError(
            self.code,
            f"{self.where}, which {f'batch {self.batch} took' if self.batch else 'was adopted'}, {what}.{more} No partition "
            "was changed.",
            next=f"put the file back as it was and run the same command again; {_WITHOUT_LANDING}",
        )


def reprocess(
    table: OpenTable,
    choice: HostChoice | None,
    selected: Callable[[str], bool],
    *,
    dry: bool,
    progress: Callable[[str], None] = lambda text: None,
) -> ReprocessPlan:
    """Send the selected partitions to the workers to be rewritten; with ``dry`` only plan it.

    Args:
        choice: where landing files are read; None merges the stored files instead.
    Raises:
        RefusedError: a landing or adopted file is gone or changed. Nothing was written then.
    """
    if choice is not None and table.settings.key_scope == "table":
        raise RefusedError(
            "keys-of-the-table",
            f'Table {table.name!r} has `key_scope = "table"`: its landing files do not say which keys moved to other '
            "partitions, so they can't rebuild one partition. No partition was changed.",
            next=_WITHOUT_LANDING,
        )
    snapshot = table.last_snapshot()
    newest = {
        p: table.newest(p, snapshot, from_landing=choice is not None) for p in filter(selected, _partitions(table))
    }
    heads = {p: head for p, head in newest.items() if head is not None and head.body.buckets}
    if choice is None:
        stored = [head.body for head in heads.values()]
        plan = ReprocessPlan("stored", heads, (), sum(m.files for m in stored), sum(m.bytes for m in stored))
        return plan if dry or not heads else _send_work(table, plan, snapshot, {}, start=None)
    needed = _batches(table, {p: head.body.merged for p, head in heads.items()})
    statements = _statements(table, needed)
    adopted = [f for p in heads for f in _adopted(table, p)]
    progress(f"checking the landing files of {count(len(needed), 'batch', 'es')}")
    inputs = _check_sources(table, needed, adopted)
    taken = [i for of_batch in inputs.values() for i in of_batch]
    size = sum(f.bytes for f in adopted) + sum(i.size for i in taken)
    chosen = choose_host(choice, sum(i.size for i in taken))
    plan = ReprocessPlan("landing", heads, tuple(needed), len(adopted) + len(taken), size, chosen)
    if dry or not heads:
        return plan
    host = host_by_name(chosen.name)
    head = table.ledger_head()
    start = head.number + 1 if head else 0
    rebuilt: dict[str, dict[int, Touched]] = defaultdict(dict)
    below_floor = read_refused_keys(table.store, [head.body for head in heads.values()], table.existing_spec())
    try:
        for number, partitions in needed.items():
            if number in statements:
                continue
            progress(f"reading batch {number} again, {count(len(inputs[number]), 'landing file')}")
            job = _job(table, host, number, inputs[number], partitions, start, below_floor)
            replayed = table.entries(number - 1, number)[0].body.replayed
            renames = renames_of(table, job.spec, number) if replayed else None
            reports = replay_rows(job, replayed, renames)[1] if renames else host.run(job)
            touched = touched_by(reports)
            for partition in partitions:  # a full extract also touches partitions that it has no rows of
                rebuilt[partition][number] = touched.get(partition, NOTHING)
            _verify(table, number, reports, {p: rebuilt[p][number] for p in partitions})
        whole = {p: {**rebuilt[p], **{n: of[p] for n, of in statements.items() if p in of}} for p in heads}
        return _send_work(table, plan, snapshot, whole, start)
    except (RefusedError, FencedError):  # nothing names these files
        table.discard({f.name for batches in rebuilt.values() for t in batches.values() for f in t.files})
        raise


def reprocess_and_publish(table: OpenTable, options: ReprocessOptions) -> ReprocessResult:
    """Rewrite the selected partitions, wait until no worker has one of them any more, and publish them."""
    table.existing_spec()
    progress, stop = options.progress, options.stop or Stop()
    choice = options.host if options.source == "landing" else None
    plan = reprocess(table, choice, options.selected, dry=options.dry, progress=progress)
    if plan.work is None:
        return ReprocessResult(plan)
    drain_options = DrainOptions(
        host="spark" if options.host == "spark" and not options.workers else "local",
        workers=options.workers or 1,
        engine=options.engine,
        stop=stop,
        progress=Countdown("writing partitions", progress),
    )
    results: list[PartitionResult] = []
    while True:
        if options.workers == 0:
            if not (left := plan.left(table)) or stop.wait(OTHERS_SECONDS):
                break
            continue
        results += drain_queues(table, drain_options)
        left = plan.left(table)
        stats = table.queue_stats()
        if not left or not stats.visible + stats.leased or stop.wait(1.0):
            break
    progress("publishing")
    published = publish(table, also=plan.heads)
    warnings: tuple[str, ...] = ()
    if plan.source == "landing":
        progress("comparing with the rows of before")
        warnings = tuple(_warnings(table, plan, [p for p in plan.heads if p not in left]))
    return ReprocessResult(plan, results, published, tuple(left), tuple(plan.unseen(table)), warnings)


def _partitions(table: OpenTable) -> list[str]:
    snapshot, head = table.last_snapshot(), table.ledger_head()
    if head is None:
        return []
    shown = snapshot.body.partitions if snapshot else {}
    since = table.entries(snapshot.body.batch if snapshot else -1, head.number)
    return sorted({*shown, *(p for link in since for p in link.body.touched)})


def _warnings(table: OpenTable, plan: ReprocessPlan, partitions: Sequence[str]) -> Iterator[str]:
    """What differs between the version that names the work object and the one before it, in each of these partitions.

    The ledger has digests of keys and orders. Other columns may be read in another way than then without a trace there.
    """
    found = table.map_concurrently(lambda p: _difference(table, p, plan.heads[p].number, plan.work), partitions)
    changed = [
        (one, total)
        for one in found
        if not isinstance(one, str) and (total := one.inserted + one.updated + one.deleted)
    ]
    if changed:
        parts = [f"{one.partitions[0].partition} ({count(total, 'key')})" for one, total in changed[:3]]
        yield (
            f"the landing files gave other rows for {count(sum(total for _, total in changed), 'key')} than were stored, in "
            f"{count(len(changed), 'partition')}, for example {', '.join(parts)}. Either this lakeupsert reads the files in "
            "another way than the one that took them, or stored files were damaged. `lakeupsert diff` of the snapshots before "
            "and after shows the rows; the one before has the old rows for as long as it is kept"
        )
    if unknown := [one for one in found if isinstance(one, str)]:
        yield f"the rows of {count(len(unknown), 'partition')} can't be compared with those from before. The first: {unknown[0]}"


def _difference(table: OpenTable, partition: str, number: int, work: str | None) -> Difference | str:
    """What the rewrite changed; or why that is unknown."""
    chain = table.objects.partition(partition)
    before = chain.get(number)
    while (after := chain.get(number := number + 1)) and after.body.reprocessed != work:
        before = after
    if before is None or after is None or before.body.merged != after.body.merged:
        return f"{partition} was not rewritten at the batch that it had."
    return difference_of(table, partition, before.number, after.number)


class FencedError(TryAgainError):
    """A vacuum ran meanwhile, and may have deleted the new files, which nothing named yet."""


def _send_work(
    table: OpenTable,
    plan: ReprocessPlan,
    snapshot: Link[Snapshot] | None,
    rebuilt: Mapping[str, dict[int, Touched]],
    start: int | None,
) -> ReprocessPlan:
    """Write the work object and send its messages. ``start``: the ledger's length before the packs were written."""
    name = TableObjects.new_work()
    partitions = {
        p: PartitionRewrite(merged=head.body.merged, batches=rebuilt.get(p, {}), refused=head.body.quarantine)
        for p, head in plan.heads.items()
    }
    spec_version = snapshot.body.spec_version if snapshot else 0
    write_order(table.store, name, RewriteOrder(FORMAT, plan.source, partitions, spec_version))
    head = table.objects.ledger.head()
    # After the work object is written: a vacuum whose fence is later finds it, and keeps the files that it names.
    if start is not None and head and any(e.body.kind == "fence" for e in table.entries(start - 1, head.number)):
        table.discard([name])
        raise FencedError(
            "fenced",
            "A vacuum ran while landing files were read again, and may have deleted the new files. No partition was changed.",
            next="run the same command again",
        )
    table.queue.send([Message(table.name, p, head.body.merged, name) for p, head in plan.heads.items()])
    return replace(plan, work=name)


# ---------------------------------------------------------------- source `landing`


def _batches(table: OpenTable, merged: Mapping[str, int]) -> dict[int, frozenset[str]]:
    """The batches, in order, that count in some of these partitions at its `merged`, each with these partitions."""
    entries = table.entries(-1, max(merged.values(), default=-1))
    counted = [(link.number, link.body) for link in entries]
    counting = {number: active_batches(counted[: number + 1]) for number in set(merged.values())}
    partitions: dict[int, set[str]] = defaultdict(set)
    for partition, at in merged.items():
        for number in counting[at]:
            if partition in entries[number].body.touched:
                partitions[number].add(partition)
    return {number: frozenset(partitions[number]) for number in sorted(partitions)}


def _statements(table: OpenTable, needed: Mapping[int, frozenset[str]]) -> dict[int, dict[str, Touched]]:
    """What updates and deletes among the batches brought to these partitions. Their rows are stored, and not read again."""
    entries = {number: table.entries(number - 1, number)[0].body for number in needed}
    return {
        number: {p: entries[number].touched[p] for p in partitions}
        for number, partitions in needed.items()
        if entries[number].statement is not None
    }


def _adopted(table: OpenTable, partition: str) -> tuple[DataFile, ...]:
    first = table.entries(-1, 0)[0].body.touched.get(partition)
    return first.files if first else ()


@dataclass(frozen=True)
class _LandingSource:
    """A landing file of a batch, and its place in it."""

    batch: int
    place: int
    file: LandingFile


@dataclass(frozen=True)
class _Pack:
    """A pack with rows of an update or delete, and its batch."""

    batch: int
    name: str


def _check_sources(
    table: OpenTable, needed: Mapping[int, frozenset[str]], adopted: Sequence[DataFile]
) -> dict[int, tuple[LandingInput, ...]]:
    """The landing files of each batch, as they are now. Raises RefusedError if one is gone or changed, or a statement's pack is
    gone."""

    def check(source: _LandingSource) -> LandingInput | _Unfit:
        number, file = source.batch, source.file
        where = table.landing.uri(file.path)
        found = table.landing.head(file.path)
        if found is None:
            return _Unfit("source-gone", number, where)
        if not found.is_same(file.size, file.etag):
            try:
                if content_hash(table.landing, file.path) != file.sha256:
                    return _Unfit("source-changed", number, where)
            except ChangedFileError:
                return _Unfit("source-gone", number, where)
        return LandingInput(file.path, found.size, found.etag, source.place)

    def check_adopted(file: DataFile) -> _Unfit | None:
        found = table.store.head(file.name)
        if found is not None and found.size == file.bytes:
            return None
        return _Unfit("source-changed" if found else "source-gone", 0, table.store.uri(file.name))

    def check_pack(pack: _Pack) -> _Unfit | None:
        return None if table.store.head(pack.name) else _Unfit("source-gone", pack.batch, table.store.uri(pack.name))

    sources = [
        _LandingSource(number, place, file)
        for number in needed
        for place, file in enumerate(table.entries(number - 1, number)[0].body.files)
        if file.sha256  # otherwise it could not be read then, and brought no rows
    ]
    entries = ((number, table.entries(number - 1, number)[0].body) for number in needed)
    packs = [_Pack(number, name) for number, e in entries if e.statement for name in e.statement.objects]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        inputs = list(pool.map(check, sources))
        unfit = [
            r
            for r in (*inputs, *pool.map(check_adopted, adopted), *pool.map(check_pack, packs))
            if isinstance(r, _Unfit)
        ]
    if unfit:
        raise unfit[0].error(others=len(unfit) - 1)
    return {
        number: tuple(
            r for s, r in zip(sources, inputs, strict=True) if s.batch == number and isinstance(r, LandingInput)
        )
        for number in needed
    }


def _job(
    table: OpenTable,
    host: Host,
    number: int,
    inputs: tuple[LandingInput, ...],
    partitions: frozenset[str],
    start: int,
    below_floor: Mapping[str, Rows],
) -> AppendJob:
    """The row work of the batch, with its own spec and receipt stamp, for these partitions."""
    entry = table.entries(number - 1, number)[0].body
    spec, reading = table.spec(entry.spec_version), entry.reading_of_files
    parquet = [i for i in inputs if format_of(i.path, reading.format) == "parquet"]
    surveys = host.survey(table.landing, parquet, reading, spec.schema, frozenset())
    groups = {s.path: (0, s.row_groups) for s in surveys if s.row_groups}
    return AppendJob(
        landing=table.landing,
        store=table.store,
        inputs=tuple(replace(i, row_groups=groups.get(i.path)) for i in inputs),
        reading=reading,
        rules=RowRules(spec, entry.received_at, entry.clock_ahead, table.name, reading.envelope),
        batch_id=entry.batch_id,
        spec_version=entry.spec_version,
        start=start,
        only=partitions,
        left_out=below_floor.get(entry.batch_id),
    )


def _verify(table: OpenTable, number: int, reports: Sequence[Report], rebuilt: Mapping[str, Touched]) -> None:
    """Refuse a result that differs from the batch: other bytes, an unreadable file, other rows by number, keys or orders."""
    entry = table.entries(number - 1, number)[0].body
    hashes = {f.path: f.sha256 for f in entry.files}
    differs = None
    for report in reports:
        if isinstance(report, FileFailed) and not report.changed:
            differs = f"{table.landing.uri(report.path)} can't be read now: {report.reason}"
        elif isinstance(report, FileFailed) or (
            isinstance(report, FileRead) and report.sha256 not in (None, hashes[report.path])
        ):
            raise _Unfit("source-changed", number, table.landing.uri(report.path)).error()
    for partition, touched in rebuilt.items():
        expected = entry.touched[partition].rows
        if touched.rows != expected and differs is None:
            differs = f"they give {touched.rows} rows of {partition}, but the ledger says {expected}."
        digest = entry.touched[partition].digest
        if digest not in (None, touched.digest) and differs is None:
            differs = (
                f"they give {touched.rows} rows of {partition}, as the ledger says, but with other values in key or ordering "
                f"columns. Their digest is {touched.digest}, and the ledger says {digest}."
            )
    if differs is not None:
        raise RefusedError(
            "source-differs",
            f"The landing files of batch {number} have not changed, but are read differently now: {differs} "
            "No partition was changed.",
            next="use the version of lakeupsert that wrote the batch, with the `format` that the table had then; "
            f"{_WITHOUT_LANDING}",
        )
