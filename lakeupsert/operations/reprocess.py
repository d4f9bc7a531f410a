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
from itertools import chain
from typing import Literal

from lakeupsert.engine.batch import AppendJob
from lakeupsert.engine.by_name import EngineName, HostChoice, choose_host, host_by_name
from lakeupsert.engine.hosts import Host, survey_files
from lakeupsert.engine.replay import replay_rows
from lakeupsert.engine.reports import FileFailed, FileRead, Report, touched_by
from lakeupsert.errors import RefusedError, TryAgainError
from lakeupsert.landing.accept import RowRules
from lakeupsert.landing.content import content_hash
from lakeupsert.landing.files import share_row_groups
from lakeupsert.landing.formats.blocks import ChangedFileError, LandingInput
from lakeupsert.landing.formats.registry import format_of
from lakeupsert.operations.diff import Difference, difference_by_rewrite
from lakeupsert.operations.replay import renames_of
from lakeupsert.phrases import count
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import PublishResult, publish
from lakeupsert.pipeline.resources import Resources
from lakeupsert.pipeline.standing import unpublished
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.workers.drain_queues import DrainOptions, drain_queues
from lakeupsert.progress import Countdown
from lakeupsert.queue import Message
from lakeupsert.retries import IDLE_SECONDS, OTHERS_SECONDS
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.floor import read_refused_keys
from lakeupsert.table.chain import FORMAT, Link
from lakeupsert.table.erasure import read_erasures, unite
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import NOTHING, ChosenHost, LandingFile, LedgerEntry, Touched, find_counting
from lakeupsert.table.manifest import DataFile, Manifest
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.work import PartitionRewrite, RewriteOrder, Source, write_order

AT_ONCE = 16
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
        now = table.history.heads(self.heads)
        return [p for p, old in self.heads.items() if p not in now or now[p].body.reprocessed == old.body.reprocessed]

    def unseen(self, table: OpenTable) -> list[str]:
        """Partitions whose old files readers still see: the new version has a newer batch in it, which is not published."""
        snapshot = table.history.last_snapshot()
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
        calls_at_once, engine, alive: as for `dedupe`.
        erased: keys that are left out, by partition, as in `PartitionRewrite`; only with source `stored`.
        dry: only plan it.
        stop: once set, the merges that run are finished, and no others are begun.
    """

    selected: Callable[[str], bool] = lambda partition: True
    _: KW_ONLY
    source: Source = "stored"
    host: HostChoice = "auto"
    workers: int | None = None
    calls_at_once: int = 1
    engine: EngineName | None = None
    erased: Mapping[str, bytes] = field(default_factory=dict)
    dry: bool = False
    stop: Stop | None = None
    alive: Callable[[], object] = lambda: None
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


def reprocess(table: OpenTable, options: ReprocessOptions) -> ReprocessPlan:
    """Send the selected partitions to the workers to be rewritten; with ``dry`` only plan it.

    Raises:
        RefusedError: a landing or adopted file is gone or changed. Nothing was written then.
    """
    choice, dry, progress = options.host if options.source == "landing" else None, options.dry, options.progress
    if choice is not None and table.settings.key_scope == "table":
        raise RefusedError(
            "keys-of-the-table",
            f'Table {table.name!r} has `key_scope = "table"`: its landing files do not say which keys moved to other '
            "partitions, so they can't rebuild one partition. No partition was changed.",
            next=_WITHOUT_LANDING,
        )
    snapshot, last = table.history.last_snapshot(), table.history.ledger_head()
    shown = snapshot.body if snapshot else None
    known = {*(shown.partitions if shown else ()), *unpublished(table.history, snapshot, last)}
    wanted = sorted(filter(options.selected, known))
    found, from_landing = table.history.heads(wanted), choice is not None
    newest = {p: table.history.behind(snapshot, p, found.get(p), from_landing=from_landing) for p in wanted}
    heads = {p: head for p, head in newest.items() if head is not None and head.body.buckets}
    if choice is None:
        stored = [head.body for head in heads.values()]
        plan = ReprocessPlan("stored", heads, (), sum(m.files for m in stored), sum(m.bytes for m in stored))
        return plan if dry or not heads else _send_work(table, plan, snapshot, {}, None, options.erased)
    batches = _batches(table.history, {p: head.body.merged for p, head in heads.items()})
    first = table.history.entries(-1, 0)[0].body.touched if heads else {}
    adopted = [f for p in heads if p in first for f in (*first[p].files, *first[p].tombstones) if f.name]
    progress(f"checking the landing files of {count(len(batches), 'batch', 'es')}")
    inputs = _check_sources(table.resources, batches, adopted)
    taken = [i for of_batch in inputs.values() for i in of_batch]
    landed = sum(i.size for i in taken)
    size, host = sum(f.bytes for f in adopted) + landed, choose_host(choice, landed)
    plan = ReprocessPlan("landing", heads, tuple(inputs), len(adopted) + len(taken), size, host)
    return plan if dry or not heads else _read_again(table, plan, snapshot, batches, inputs, progress)


def reprocess_and_publish(table: OpenTable, options: ReprocessOptions) -> ReprocessResult:
    """Rewrite the selected partitions, wait until no worker has one of them any more, and publish them."""
    table.history.existing_spec()
    progress, stop = options.progress, options.stop or Stop()
    plan = reprocess(table, options)
    if plan.work is None:
        return ReprocessResult(plan)
    drain_options = DrainOptions(
        host="spark" if options.host == "spark" and not options.workers else "local",
        workers=options.workers or 1,
        calls_at_once=options.calls_at_once,
        engine=options.engine,
        stop=stop,
        alive=options.alive,
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
        stats = table.resources.queue_stats()
        if not left or not stats.visible + stats.leased or stop.wait(IDLE_SECONDS):
            break
    progress("publishing")
    published = publish(table, also=plan.heads)
    warnings: tuple[str, ...] = ()
    if plan.source == "landing":
        progress("comparing with the rows of before")
        warnings = tuple(_warnings(table, plan, [p for p in plan.heads if p not in left]))
    return ReprocessResult(plan, results, published, tuple(left), tuple(plan.unseen(table)), warnings)


def _warnings(table: OpenTable, plan: ReprocessPlan, partitions: Sequence[str]) -> Iterator[str]:
    """What differs between the version that names the work object and the one before it, in each of these partitions.

    The ledger has digests of keys and orders. Other columns may be read in another way than then without a trace there.
    """
    heads, work = plan.heads, plan.work
    found = table.resources.map_concurrently(
        lambda p: difference_by_rewrite(table, p, heads[p].number, work), partitions
    )
    if changed := [one for one in found if isinstance(one, Difference) and one.total]:
        parts = [f"{one.partitions[0].partition} ({count(one.total, 'key')})" for one in changed[:3]]
        yield (
            f"the landing files gave other rows for {count(sum(one.total for one in changed), 'key')} than were stored, in "
            f"{count(len(changed), 'partition')}, for example {', '.join(parts)}. Either this lakeupsert reads the files in "
            "another way than the one that took them, or stored files were damaged. `lakeupsert diff` of the snapshots before "
            "and after shows the rows; the one before has the old rows for as long as it is kept"
        )
    if unknown := [one for one in found if isinstance(one, str)]:
        yield f"the rows of {count(len(unknown), 'partition')} can't be compared with those from before. The first: {unknown[0]}"


class FencedError(TryAgainError):
    """A vacuum ran meanwhile, and may have deleted the new files, which nothing named yet."""


def _send_work(
    table: OpenTable,
    plan: ReprocessPlan,
    snapshot: Link[Snapshot] | None,
    rebuilt: Mapping[str, dict[int, Touched]],
    start: int | None,
    erased: Mapping[str, bytes],
) -> ReprocessPlan:
    """Write the work object and send its messages. ``start``: the ledger's length before the packs were written."""
    name = TableObjects.new_work()
    partitions = {
        p: PartitionRewrite(
            merged=head.body.merged, batches=rebuilt.get(p, {}), refused=head.body.quarantine, erased=erased.get(p, b"")
        )
        for p, head in plan.heads.items()
    }
    spec_version = snapshot.body.spec_version if snapshot else 0
    write_order(table.resources.store, name, RewriteOrder(FORMAT, plan.source, partitions, spec_version))
    head = table.history.objects.ledger.head()
    # After the work object is written: a vacuum whose fence is later finds it, and keeps the files that it names.
    entries = table.history.entries(start - 1, head.number) if start is not None and head else ()
    if any(e.body.kind == "fence" for e in entries):
        table.resources.discard([name])
        raise FencedError(
            "fenced",
            "A vacuum ran while landing files were read again, and may have deleted the new files. No partition was changed.",
            next="run the same command again",
        )
    table.resources.queue.send([Message(table.name, p, head.body.merged, name) for p, head in plan.heads.items()])
    return replace(plan, work=name)


@dataclass(frozen=True)
class Batch:
    """A batch that counts in some of the partitions."""

    number: int
    entry: LedgerEntry
    partitions: frozenset[str]


def _batches(history: History, merged: Mapping[str, int]) -> list[Batch]:
    """The batches, in order, that count in some of these partitions at its `merged`, without what was adopted."""
    entries = [link.body for link in history.entries(-1, max(merged.values(), default=-1))]
    return [Batch(n, entries[n], frozenset(of)) for n, of in find_counting(entries, merged).items() if n]


def _check_sources(
    resources: Resources, batches: Sequence[Batch], adopted: Sequence[DataFile]
) -> dict[int, tuple[LandingInput, ...]]:
    """The landing files of each batch, as they are now. Raises RefusedError if one is gone or changed, or what is stored of
    adopted files and of statements is gone."""

    def check(batch: Batch, place: int, file: LandingFile) -> LandingInput | _Unfit:
        where, found = resources.landing.uri(file.path), resources.landing.head(file.path)
        if found is None:
            return _Unfit("source-gone", batch.number, where)
        if not found.is_same(file.size, file.etag):
            try:
                if content_hash(resources.landing, file.path) != file.sha256:
                    return _Unfit("source-changed", batch.number, where)
            except ChangedFileError:
                return _Unfit("source-gone", batch.number, where)
        return LandingInput(file.path, found.size, found.etag, place)

    def check_stored(number: int, name: str, size: int | None) -> _Unfit | None:
        found = resources.store.head(name)
        if found is not None and size in (None, found.size):
            return None
        return _Unfit("source-changed" if found else "source-gone", number, resources.store.uri(name))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        landed = {
            batch.number: [
                pool.submit(check, batch, place, file)
                for place, file in enumerate(batch.entry.files)
                if file.sha256  # otherwise it could not be read then, and brought no rows
            ]
            for batch in batches
        }
        stored = [pool.submit(check_stored, 0, file.name, file.bytes) for file in adopted]
        statements = [(batch.number, batch.entry.statement) for batch in batches if batch.entry.statement]
        stored += [pool.submit(check_stored, number, name, None) for number, one in statements for name in one.objects]
    inputs = {number: [one.result() for one in checks] for number, checks in landed.items()}
    found = [*chain.from_iterable(inputs.values()), *(one.result() for one in stored)]
    if unfit := [one for one in found if isinstance(one, _Unfit)]:
        raise unfit[0].error(others=len(unfit) - 1)
    return {number: tuple(one for one in of if isinstance(one, LandingInput)) for number, of in inputs.items()}


def _read_again(
    table: OpenTable,
    plan: ReprocessPlan,
    snapshot: Link[Snapshot] | None,
    batches: Sequence[Batch],
    inputs: Mapping[int, tuple[LandingInput, ...]],
    progress: Callable[[str], None],
) -> ReprocessPlan:
    """Write the rows of the batches once more, and send the work object that names them."""
    assert plan.host is not None, "landing files are read somewhere"
    host, head = host_by_name(plan.host.name), table.history.ledger_head()
    start = head.number + 1 if head else 0
    rebuilt: dict[str, dict[int, Touched]] = defaultdict(dict)
    packs: set[str] = set()
    erasures = [one for _, one in read_erasures(table.resources.store)]
    below_floor = read_refused_keys(
        table.resources.store, [head.body for head in plan.heads.values()], table.history.existing_spec()
    )
    try:
        for batch in batches:
            touched = batch.entry.touched
            if batch.entry.statement is None:  # the rows of a statement are stored, and not read again
                files = inputs[batch.number]
                progress(f"reading batch {batch.number} again, {count(len(files), 'landing file')}")
                erased = unite(one for one in erasures if one.batch >= batch.number)
                job = replace(job_of(table, host, batch, files, start, below_floor), erased=erased)
                replayed = batch.entry.replayed
                renames = renames_of(table.history, job.spec, batch.number) if replayed else None
                reports = replay_rows(job, replayed, renames)[1] if renames else host.run(job)
                touched = touched_by(reports)
                packs |= {file.name for one in touched.values() for file in one.files}
                _verify(table.resources, batch, reports, touched)
            for partition in batch.partitions:  # a full extract also touches partitions that it has no rows of
                rebuilt[partition][batch.number] = touched.get(partition, NOTHING)
        return _send_work(table, plan, snapshot, rebuilt, start, {})
    except (RefusedError, FencedError):  # nothing names these files
        table.resources.discard(packs)
        raise


def job_of(
    table: OpenTable,
    host: Host,
    batch: Batch,
    inputs: tuple[LandingInput, ...],
    start: int,
    below_floor: Mapping[str, Rows],
) -> AppendJob:
    """The row work of the batch, with its own spec and receipt stamp, for these partitions."""
    entry = batch.entry
    spec, reading = table.history.spec(entry.spec_version), entry.reading_of_files
    shared = [i for i in inputs if format_of(i.path, reading.format).shared]
    surveys = survey_files(host, table.resources.landing, shared, reading, spec.schema, frozenset())
    return AppendJob(
        landing=table.resources.landing,
        store=table.resources.store,
        inputs=share_row_groups(inputs, surveys),
        reading=reading,
        rules=RowRules(spec, entry.received_at, entry.clock_ahead, table.name, reading.envelope),
        batch_id=entry.batch_id,
        spec_version=entry.spec_version,
        start=start,
        only=batch.partitions,
        left_out=below_floor.get(entry.batch_id),
    )


def _verify(resources: Resources, batch: Batch, reports: Sequence[Report], rebuilt: Mapping[str, Touched]) -> None:
    """Refuse a result that differs from the batch: other bytes, an unreadable file, other rows by number, keys or orders."""
    hashes = {f.path: f.sha256 for f in batch.entry.files}
    for report in reports:
        match report:
            case FileFailed(changed=is_changed):
                pass
            case FileRead(sha256=found):
                is_changed = found not in (None, hashes[report.path])
            case _:
                continue
        if is_changed:
            raise _Unfit("source-changed", batch.number, resources.landing.uri(report.path)).error()
    for why in _differences(resources, batch, reports, rebuilt):
        raise RefusedError(
            "source-differs",
            f"The landing files of batch {batch.number} have not changed, but are read differently now: {why} "
            "No partition was changed.",
            next="use the version of lakeupsert that wrote the batch, with the `format` that the table had then; "
            f"{_WITHOUT_LANDING}",
        )


def _differences(
    resources: Resources, batch: Batch, reports: Sequence[Report], rebuilt: Mapping[str, Touched]
) -> Iterator[str]:
    for report in reports:
        if isinstance(report, FileFailed):
            yield f"{resources.landing.uri(report.path)} can't be read now: {report.reason}"
    for partition in batch.partitions:
        now, then = rebuilt.get(partition, NOTHING), batch.entry.touched[partition]
        if now.rows != then.rows:
            yield f"they give {now.rows} rows of {partition}, but the ledger says {then.rows}."
        elif then.digest not in (None, now.digest):
            yield (
                f"they give {now.rows} rows of {partition}, as the ledger says, but with other values in key or ordering "
                f"columns. Their digest is {now.digest}, and the ledger says {then.digest}."
            )
