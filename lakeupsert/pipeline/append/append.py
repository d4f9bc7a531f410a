"""Phase one: take every landing file that no batch took, as one batch.

Reads     what `discover` finds, and the landing files
Writes    appended and quarantine files under names of their own; then what `commit_batch` writes
Repeat    safe: a landing file counts once, by path and content; a crash before the ledger entry leaves files that nobody names

    discover -> survey -> plan the spec -> row work -> commit: spec -> ledger entry -> messages
      ^                                   |              |
      '-- a file failed: go on without it-'              '-- race lost: discard and begin again, or take the next number
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lakeupsert.engine.batch import AppendJob, quarantine_unreadable
from lakeupsert.engine.by_name import choose_host, host_by_name
from lakeupsert.engine.hosts import Host, survey_files
from lakeupsert.engine.reports import FileFailed, FileRead, Refused, Report, appended_names, touched_by, written_names
from lakeupsert.engine.settle import count_keys_in_several_partitions
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.landing.files import Survey, share_row_groups
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.landing.formats.folders import reading_of
from lakeupsert.landing.formats.positions import noted_positions
from lakeupsert.landing.formats.registry import format_of
from lakeupsert.landing.origins import Origins, all_origins
from lakeupsert.phrases import count
from lakeupsert.pipeline.append.commit import AppendResult, batch_job, commit_batch, examples_of, send_messages
from lakeupsert.pipeline.append.discover import AppendOptions, Ground, contents_of, discover, refuse_all_skipped
from lakeupsert.pipeline.append.event_order import (
    hollow_deletes,
    incomplete_creates,
    misplaced_events,
    misplaced_snapshots,
    no_own_rows,
    refuse_misplaced,
    several_tables,
)
from lakeupsert.pipeline.append.full_extract import (
    NO_EXTRACT,
    full_extract_entry,
    refuse_extract_again,
    refuse_full_extract,
    refuse_other_than_one_batch,
    refuse_part_of_extract,
)
from lakeupsert.pipeline.append.next_spec import (
    contrary_rows,
    fruitless_files,
    is_planned_by,
    plan_spec,
    under_old_names,
    unfit_files,
    without_operations,
)
from lakeupsert.pipeline.append.quarantine_limit import refuse_above_limit, refuse_new_versions, refuse_truncate
from lakeupsert.pipeline.append.trial import Trial
from lakeupsert.pipeline.open_columns import waiting_columns
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.table.chain import Link, Lost, Repeat, until_won
from lakeupsert.table.ledger import ChosenHost, LandingFile, LedgerEntry, QuarantineFile
from lakeupsert.table.reading import StoredReading

UNFIT = Repeat()
"""A file did not fit the attempt: it changed, can't be read, or has rows for another spec. The next one knows (`_FileNotes`)."""
COMPARED_BYTES = 8 << 20
"""Up to this many landing bytes, every key of a batch is checked for records in several partitions; of a larger batch a sample
of the keys. More: the driver holds 8 bytes for each of these keys."""


@dataclass
class _FileNotes:
    """What earlier attempts found out about landing files; the next attempt treats these files otherwise.

    Attributes:
        changed: files that changed or vanished while they were read; the next batch takes them.
        unreadable: why a file can't be read, by path and etag: a file that is whole by now has another etag.
        damaged: paths of unreadable files whose etag may be the same once they are whole.
        wider: files in which a row brought a column that the table lacks; the next attempt surveys them.
        planned: files without an accepted row: whether their columns and types are planned all the same.
        refused: places of refused rows, by file: the next attempt takes no type from their values.
    """

    changed: list[str] = field(default_factory=list)
    unreadable: dict[tuple[str, str], str] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    wider: set[str] = field(default_factory=set)
    planned: dict[str, bool] = field(default_factory=dict)
    refused: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, failed: Sequence[FileFailed], inputs: Iterable[LandingInput]) -> None:
        """``failed`` may have several reports of one file, which tasks share."""
        etags = {i.path: i.etag for i in inputs}
        wider = {
            f.path for f in failed if f.unplanned and (f.path not in self.wider or not self.planned.get(f.path, True))
        }
        self.wider |= wider
        self.planned |= dict.fromkeys(wider & self.planned.keys(), True)  # under the other types it has accepted rows
        self.changed += [f.path for f in failed if f.changed]
        self.damaged |= {f.path for f in failed if f.damaged}
        self.unreadable |= {(f.path, etags[f.path]): f.reason for f in failed if not f.changed and f.path not in wider}

    @property
    def warnings(self) -> list[str]:
        return [f"{path} changed or vanished while it was read; it is left to the next batch" for path in self.changed]


@dataclass(frozen=True)
class _Plan:
    """The row work of an attempt.

    Attributes:
        chosen, host: where it is done.
        surveys: those that the spec was planned with.
        unreadable: files that can't be read, with the reason; each becomes one quarantined row.
        damaged: those of them whose etag says nothing. Every night reads them again, until they are whole.
        warnings: of the spec.
        unfit: why the settings refuse the types that the files show. The spec has others: maybe only refused rows show these.
    """

    chosen: ChosenHost
    host: Host
    job: AppendJob
    surveys: tuple[Survey, ...]
    unreadable: dict[str, str]
    damaged: frozenset[str]
    warnings: tuple[str, ...]
    unfit: ConfigurationError | None


@dataclass(frozen=True)
class _RowWork:
    """The row work of an attempt after it was done; nothing of it is committed."""

    plan: _Plan
    reports: Sequence[Report]

    @property
    def read(self) -> list[FileRead]:
        """A report for each file that was read, in the order of the landing files."""
        places = {file.path: place for place, file in enumerate(self.plan.job.inputs)}
        return sorted((r for r in self.reports if isinstance(r, FileRead)), key=lambda r: places[r.path])


def append(table: OpenTable, options: AppendOptions) -> AppendResult | None:
    """Commit one batch of all new landing files; None if there is none.

    Raises:
        RefusedError: more rows were refused than `quarantine_limit` allows, or the landing zone has files and all of them are
            skipped. Nothing is committed; the landing zone is untouched.
        ConfigurationError: the batch id belongs to other files; the landing zone is missing.
        TryAgainError: lost races, or a store that does not answer. Nothing is lost; the next call finds what was committed.
    """
    if options.full:
        refuse_full_extract(table.declaration)
    trial, held = Trial(table, options), table.history.objects.held
    begin = partial(_attempt, table, options, _FileNotes(), trial)
    with trial.attempts():
        try:
            return until_won(table.resources.store.uri(), begin)
        except (ConfigurationError, RefusedError):
            if not held.leads:
                raise
            held.forget()  # no create has checked what refuses the batch
            return until_won(table.resources.store.uri(), begin)


def _attempt(table: OpenTable, options: AppendOptions, notes: _FileNotes, trial: Trial) -> AppendResult | Repeat | None:
    ground = discover(table, options, frozenset(notes.changed))
    refuse_all_skipped(table.name, ground)
    if not ground.inputs:
        lacking, no_extract = without_operations(table, ground.entries), [NO_EXTRACT] if options.full else []
        misplaced = misplaced_events(table.declaration, ground.spec) if ground.spec else []
        for warning in (*ground.warnings, *notes.warnings, *no_extract, *lacking, *misplaced):
            options.warn(warning)
        return None
    if options.full:
        refuse_part_of_extract(table.name, ground, notes.changed)
        if options.again:
            refuse_other_than_one_batch(ground)
    elif options.again:
        refuse_extract_again(ground)
    chosen = choose_host(options.host, ground.night_bytes)
    host = host_by_name(chosen.name)
    notes.unreadable |= trial.set_aside(ground, host)
    plan = _plan(table, options, ground, notes, chosen, host)
    if isinstance(plan, Repeat):
        return plan
    if plan is None:
        options.warn(
            f"table {table.name!r} is not created yet: its {count(len(ground.inputs), 'landing file')} have no row of it, only "
            "headers, messages without a row (heartbeats, for example) or rows of other tables (`only`). The next run reads them "
            "again."
        )
        return None
    options.progress(f"reading, splitting and writing the rows of {count(len(plan.job.inputs), 'landing file')}")
    reports = [*plan.host.run(plan.job, options.progress), *quarantine_unreadable(plan.job, plan.unreadable)]
    work = _RowWork(plan, reports)
    try:
        if _note_failures(table, ground, work, notes) or _note_refused(table, ground, work, notes):
            table.resources.discard(written_names(work.reports))
            return UNFIT
    except ConfigurationError:
        table.resources.discard(written_names(work.reports))
        raise
    origins = all_origins(r.origins for r in work.read)
    link = _commit(table, options, ground, work, origins)
    if isinstance(link, Lost):
        return link
    unsent = send_messages(table, link)  # behind the commit: an error must not delete files that are committed
    warnings = (
        *unsent,
        *plan.chosen.warnings,
        *ground.warnings,
        *plan.warnings,
        *trial.warnings,
        *_warnings_of(table, work, link, origins, notes),
    )
    in_several = count_keys_in_several_partitions(plan.job, reports)
    return AppendResult(link.number, link.body, warnings, in_several, examples_of(reports))


def _warnings_of(
    table: OpenTable, work: _RowWork, link: Link[LedgerEntry], origins: Origins, notes: _FileNotes
) -> tuple[str, ...]:
    """The warnings about the rows of a batch."""
    spec, before = work.plan.job.spec, table.history.headers(link.number - 1)
    snapshots = {one for r in work.read for one in r.snapshots}
    return (
        *without_operations(table, [*before, link.body]),
        *waiting_columns(sorted({n for r in work.read for n in r.waiting})),
        *under_old_names(table, ((r.path, r.renamed) for r in work.reports if isinstance(r, FileRead))),
        *notes.warnings,
        *misplaced_events(table.declaration, spec),
        *hollow_deletes(table, spec, [link.body]),
        *no_own_rows(table.declaration, link.body),
        *several_tables(table.name, origins),
        *incomplete_creates([link.body]),
        *contrary_rows(table.declaration, [link.body]),
        *misplaced_snapshots(table.name, spec, link.body, before, incremental="incremental" in snapshots),
    )


def _commit(
    table: OpenTable, options: AppendOptions, ground: Ground, work: _RowWork, origins: Origins
) -> Link[LedgerEntry] | Lost:
    """Check the batch as a whole, and commit it. Raises RefusedError if a check fails; its appended files are deleted then."""
    plan, reports = work.plan, work.reports
    try:
        refuse_truncate(table, ground, reports)
        refuse_new_versions(table, ground, origins, options)
        refuse_misplaced(table.name, plan.job.spec, reports)
        entry = _entry(table, ground, work, origins)
        refuse_above_limit(table, ground, entry, examples_of(reports))
        if options.full:
            entry = full_extract_entry(table, plan.job.spec, ground, options, entry, reports)
        return commit_batch(table, plan.host, ground, plan.job, entry, written_names(work.reports), options.progress)
    except RefusedError:
        table.resources.discard(appended_names(work.reports))  # the refused rows stay: somebody has to look at them
        raise


def _plan(
    table: OpenTable, options: AppendOptions, ground: Ground, notes: _FileNotes, chosen: ChosenHost, host: Host
) -> _Plan | Repeat | None:
    """Survey the landing files and plan the spec; `UNFIT` if a file turned out not to fit. None if a new table gets no row."""
    reasons = notes.unreadable
    unreadable = {i.path: reasons[i.path, i.etag] for i in ground.inputs if (i.path, i.etag) in reasons}
    readable = [i for i in ground.inputs if i.path not in unreadable]
    surveys = _survey(table, host, ground, readable, notes, options.progress)
    failed = [
        FileFailed(s.path, s.changed, s.unreadable or "", damaged=s.damaged)
        for s in surveys
        if s.changed or s.unreadable is not None
    ]
    if ground.spec is not None:
        failed += unfit_files(ground.spec, surveys)
    if failed:
        notes.add(failed, ground.inputs)
        return UNFIT
    if ground.spec is None and not surveys:
        path, reason = next(iter(unreadable.items()))
        raise RefusedError(
            "no-readable-file",
            f"Table {table.name!r} can't be created: 0 of its {count(len(unreadable), 'landing file')} can be read. "
            f"The first is {table.resources.landing.uri(path)}: {reason}",
            next="correct or remove these files, then run `lakeupsert run` again",
        )
    rowless = ground.spec is None and not unreadable and all(s.rowless for s in surveys)
    if rowless and table.settings.read.envelope:
        return None
    planned = tuple(s for s in surveys if notes.planned.get(s.path, True))
    unfit = None
    try:
        spec, warnings = plan_spec(table, ground.spec, planned)
    except ConfigurationError as e:
        if rowless and (e.code == "open-column" or not any(s.schema for s in surveys)):
            return None
        if e.code != "unfit-type" or all(s.typed for s in planned):
            raise
        unfit = e
        spec, warnings = plan_spec(table, ground.spec, planned, fitted=True)
    surveyed = {s.path for s in surveys}
    job = replace(
        batch_job(table, ground, spec),
        inputs=tuple(replace(i, surveyed=i.path in surveyed) for i in share_row_groups(readable, surveys)),
        full=options.full is not None,
        inferred=spec is not ground.spec and not all(s.typed for s in planned),
        compared=min(1.0, COMPARED_BYTES / max(1, sum(i.size for i in readable))),
    )
    damaged = frozenset(notes.damaged & unreadable.keys())
    return _Plan(chosen, host, job, planned, unreadable, damaged, tuple(warnings), unfit)


def _survey(
    table: OpenTable,
    host: Host,
    ground: Ground,
    inputs: Iterable[LandingInput],
    notes: _FileNotes,
    progress: Callable[[str], None],
) -> list[Survey]:
    reading, wider = table.history.reading, notes.wider
    # JSON lines would be decoded whole for the names of their columns, which are seldom new: their rows are read first.
    surveyed = [
        replace(i, refused=notes.refused.get(i.path, ()))
        for i in inputs
        if ground.spec is None or i.path in wider or not format_of(i.path, reading.format).names_by_row
    ]
    progress(f"surveying {count(len(surveyed), 'landing file')}")
    schema = ground.spec.schema if ground.spec else None
    return survey_files(host, table.resources.landing, surveyed, reading, schema, table.declaration.text_columns)


def _note_failures(table: OpenTable, ground: Ground, work: _RowWork, notes: _FileNotes) -> bool:
    """Add what the row work found out about files to ``notes``; whether it found anything."""
    plan, reports = work.plan, work.reports
    failed = [r for r in reports if isinstance(r, FileFailed)]
    if failed:
        notes.add(failed, ground.inputs)
        return True
    undecided = [s for s in plan.surveys if s.path not in notes.planned]
    fruitless = fruitless_files(table, ground.spec, plan.job.spec, undecided, plan.surveys, reports)
    notes.planned |= dict.fromkeys(fruitless, False)
    return bool(fruitless)


def _note_refused(table: OpenTable, ground: Ground, work: _RowWork, notes: _FileNotes) -> bool:
    """Add rows that were refused to ``notes``; whether the spec would be another one without the types that their values show.

    Raises ConfigurationError if accepted rows, too, show types that the settings refuse, or if no row is accepted.
    """
    plan, read = work.plan, [r for r in work.reports if isinstance(r, FileRead)]
    found = {r.path: r.refused for r in read if set(r.refused) - {*notes.refused.get(r.path, ())}}
    if not found or not any(r.accepted for r in read):
        if plan.unfit is not None:
            raise plan.unfit
        return False
    for path, places in found.items():
        notes.refused[path] = tuple(sorted({*places, *notes.refused.get(path, ())}))
    again = [replace(i, refused=notes.refused[i.path]) for i in plan.job.inputs if i.path in found and i.surveyed]
    known = ground.spec.schema if ground.spec else None
    text_columns = table.declaration.text_columns
    found_now = survey_files(plan.host, table.resources.landing, again, table.history.reading, known, text_columns)
    surveys = {s.path: s for s in found_now}
    try:
        planned = [surveys.get(s.path, s) for s in plan.surveys]
        return not is_planned_by(table, ground.spec, plan.job.spec, planned)
    except (ConfigurationError, RefusedError):
        return True  # the next attempt plans so, too


def _entry(table: OpenTable, ground: Ground, work: _RowWork, origins: Origins) -> LedgerEntry:
    plan, reports, job = work.plan, work.reports, work.plan.job
    rows: Counter[str] = Counter()
    hashes: dict[str, str] = {}
    reasons: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    contrary: Counter[str] = Counter()
    quarantine: list[QuarantineFile] = []
    positions = set[str]()
    operations = False
    for report in reports:
        if isinstance(report, FileRead):
            rows[report.path] += report.rows
            operations |= report.operations
            skipped.update(report.skipped)
            contrary.update(report.contrary)
            positions |= {*report.snapshots}
            if report.sha256 is not None:
                hashes[report.path] = report.sha256
        elif isinstance(report, Refused):
            reasons.update(report.reasons)
            quarantine.append(report.file)
    return LedgerEntry(
        kind="batch",
        batch_id=ground.batch_id,
        received_at=ground.received_at,
        clock_ahead=ground.clock_ahead,
        spec_version=job.spec_version,
        reading=StoredReading.of(reading_of((i.path for i in job.inputs), job.reading)),
        files=tuple(
            LandingFile(
                path=i.path,
                size=i.size,
                etag="" if i.path in plan.damaged else i.etag,
                sha256=hashes.get(i.path, ""),
                rows=rows[i.path],
            )
            for i in ground.inputs
        ),
        # An unreadable file that comes again with the same content is known by it.
        seen=ground.seen
        + contents_of(table.resources, (i for i in ground.inputs if i.path in plan.unreadable.keys() - plan.damaged)),
        touched=touched_by(reports),
        rows_read=sum(rows.values()) + len(plan.unreadable),  # an unreadable file counts as one row
        quarantined=dict(sorted(reasons.items())),
        quarantine=tuple(quarantine),
        retention=table.settings.tombstones_kept,
        snapshot=ground.snapshot_number,
        hollow_deletes=sum(r.hollow_deletes for r in reports if isinstance(r, FileRead)),
        incomplete_creates=sum(r.incomplete_creates for r in reports if isinstance(r, FileRead)),
        contrary=dict(contrary),
        positions=tuple(sorted(noted_positions(positions))),
        skipped=dict(sorted(skipped.items())),
        versions=dict(sorted(origins.versions.items())) if job.reading.envelope == "singer" else None,
        host=plan.chosen,
        operations=operations if rows.total() and job.spec.delete and job.spec.delete.operation else None,
    )
