"""Try quarantined rows again: commit those that pass now as a batch. The others stay quarantined.

Reads     the ledger, the spec, and every quarantine file whose rows are still quarantined
Writes    files under names of their own; then what `commit_batch` writes. The ledger entry names the files that it replayed
Repeat    safe: rows that an entry replayed are not quarantined any more; if no row passes, nothing is written

    read heads -> plan the spec -> row work -> commit: spec -> ledger entry -> messages
     ^                                            |
     '--------------------------------- race lost '

After a lost race it always begins again and never takes the next number: the winner may have replayed the same rows, or
withdrawn their batch. All of it runs in this process, whatever the host: quarantine is small.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lakeupsert.config import TableSettings
from lakeupsert.engine.batch import AppendJob
from lakeupsert.engine.hosts import LocalHost
from lakeupsert.engine.replay import new_columns_of, replay_rows
from lakeupsert.engine.reports import Refused, Report, touched_by, written_names
from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.formats.folders import reading_of
from lakeupsert.pipeline.append.commit import AppendResult, batch_job, commit_batch, examples_of, send_messages
from lakeupsert.pipeline.append.discover import AppendOptions, Ground, read_heads
from lakeupsert.pipeline.append.next_spec import plan_spec, unfit_files
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.table_keys import find_refused_again
from lakeupsert.table.chain import Lost, until_won
from lakeupsert.table.ledger import LedgerEntry, ReplayedFile, find_quarantined
from lakeupsert.table.reading import StoredReading
from lakeupsert.table.spec import TableSpec


@dataclass(frozen=True)
class _Plan:
    """The row work of an attempt: ``renames_of`` as in `renames_of`, ``warnings`` of the spec."""

    job: AppendJob
    renames_of: Callable[[str], int]
    warnings: tuple[str, ...]


def replay(table: OpenTable, options: AppendOptions) -> AppendResult | None:
    """Commit one batch of all quarantined rows that pass now; None if no row passes.

    `quarantine_limit` does not apply: rows that stay quarantined were counted when they came.

    Raises:
        ConfigurationError: the batch id belongs to another batch, or an option chooses landing files.
        DamagedTableError: a quarantine file is missing.
        TryAgainError: lost races, or a store that does not answer. Nothing is lost; the next call finds what was committed.
    """
    if options.again or options.full or any(options.received):
        raise ConfigurationError(
            "two-sources",
            "Quarantined rows and landing files are never one batch, so no landing files can be chosen here.",
            next="replay the quarantine in one call, and append landing files in another",
        )
    return until_won(table.resources.store.uri(), partial(_attempt, table, options))


def renames_of(history: History, spec: TableSpec, last: int) -> Callable[[str], int]:
    """A function from a batch's id to the number of renames that the spec had when the batch was written.

    The rows of that batch have the column names of that time. ``last`` is the ledger's head.
    """
    if not spec.renames:
        return lambda batch_id: 0
    versions = {entry.batch_id: entry.spec_version for entry in history.headers(last)}
    return lambda batch_id: len(history.spec(versions[batch_id]).renames)


def _attempt(table: OpenTable, options: AppendOptions) -> AppendResult | Lost | None:
    ground = read_heads(table, options.batch_id)
    if ground.head is None or ground.spec is None:
        return None
    files = find_quarantined(ground.entries)
    rows = sum(f.rows for f in files)
    options.progress(f"trying {rows} quarantined rows again")
    plan = _plan(table, ground, ground.spec, files)
    by_key = partial(find_refused_again, table, plan.job.spec, ground.head)
    replayed, reports = replay_rows(plan.job, files, plan.renames_of, by_key)
    if not replayed:
        for warning in plan.warnings:
            options.warn(warning)
        if files:
            options.warn(f"none of the {rows} quarantined rows passes now; `lakeupsert quarantine` shows them")
        return None
    entry = _entry(table.settings, ground, plan.job, replayed, reports)
    names = written_names(reports)
    if any(e.kind == "batch" and e.batch_id == ground.batch_id for e in ground.entries):
        table.resources.discard(names)
        raise ConfigurationError(
            "batch-id-taken",
            f"Batch id {options.batch_id!r} belongs to another batch. Nothing was committed.",
            next="give the replay another --batch-id, or none",
        )
    link = commit_batch(table, LocalHost(), ground, plan.job, entry, names, options.progress)
    if isinstance(link, Lost):
        return link
    warnings = (*send_messages(table, link), *plan.warnings)
    return AppendResult(link.number, link.body, warnings, examples=examples_of(reports))


def _plan(table: OpenTable, ground: Ground, known: TableSpec, files: Sequence[ReplayedFile]) -> _Plan:
    """Plan the spec: with the given types, and with columns that only rows which pass now bring."""
    spec, warnings = plan_spec(table, known, ())
    job = batch_job(table, ground, spec)
    renames = renames_of(table.history, spec, ground.start - 1)
    if new := new_columns_of(job, files, renames):
        fit = [survey for survey in new if not list(unfit_files(spec, [survey]))]
        spec, warnings = plan_spec(table, known, fit)
        warnings += [f"rows of {one.path!r} stay quarantined: {one.reason}" for one in unfit_files(spec, new)]
        job = batch_job(table, ground, spec)
    return _Plan(job, renames, tuple(warnings))


def _entry(
    settings: TableSettings,
    ground: Ground,
    job: AppendJob,
    replayed: tuple[ReplayedFile, ...],
    reports: Sequence[Report],
) -> LedgerEntry:
    refused = [r for r in reports if isinstance(r, Refused)]
    return LedgerEntry(
        kind="batch",
        batch_id=ground.batch_id,
        received_at=ground.received_at,
        clock_ahead=ground.clock_ahead,
        spec_version=job.spec_version,
        reading=StoredReading.of(reading_of((), job.reading)),
        touched=touched_by(reports),
        rows_read=sum(f.rows for f in replayed),
        quarantined=dict(sorted(refused[0].reasons.items())) if refused else {},
        quarantine=tuple(r.file for r in refused),
        replayed=replayed,
        retention=settings.tombstones_kept,
        snapshot=ground.snapshot_number,
    )
