"""Try quarantined rows again: those that pass now are a batch, and the others stay quarantined.

Reads     the ledger, the spec, and every quarantine file whose rows are still quarantined
Writes    as `append` does: files under names of their own, then (where given types widen columns) the next spec, then ONE
          ledger entry, which says what it replayed; then a message for each touched partition
Repeat    safe: what an entry replayed is not quarantined any more, and where no row passes nothing is written

    look -> row work -> spec -> ledger entry -> messages
     ^                   |           |
     '------------------ race lost --'

Who loses a race always begins again, and never takes the next number: the winner may have replayed the same rows, or
withdrawn their batch. It all happens in this process, whatever the host: quarantine is small.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from lakeupsert import clock
from lakeupsert.engine.batch import AppendJob, Refused, Report, touched_by
from lakeupsert.engine.replay import new_columns_of, replay_rows
from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.accept import RowRules
from lakeupsert.pipeline.append import ATTEMPTS
from lakeupsert.pipeline.commit import AppendResult, announce, examples_of
from lakeupsert.pipeline.key_places import placed
from lakeupsert.pipeline.next_spec import plan_spec, unfit_files
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.table.chain import races_exhausted
from lakeupsert.table.ledger import LedgerEntry, Replayed, next_stamp, still_quarantined
from lakeupsert.table.spec import TableSpec

log = logging.getLogger(__name__)


def replay(
    table: OpenTable,
    *,
    batch_id: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = log.warning,
) -> AppendResult | None:
    """Commit one batch of all quarantined rows that pass now; None where none does (``warn`` takes what is to be said then).

    `quarantine_limit` does not hold here: who stays quarantined was counted when it came.

    Raises:
        ConfigurationError: the batch id belongs to another batch.
        DamagedTableError: a quarantine file is missing.
        TryAgainError: races or a silent store; nothing is lost, what was committed shows in the next call.
    """
    for attempt in range(ATTEMPTS):
        table.last_snapshot()  # before the ledger, which then has what it shows
        head = table.ledger_head()
        spec_head = table.head_spec()  # after the ledger: an entry's spec is never newer than the one read here
        if head is None or spec_head is None:
            return None
        entries = table.headers(head.number, write=True)
        files = still_quarantined(entries)
        spec, warnings = plan_spec(table, spec_head.body, ())
        job = AppendJob(
            landing=table.landing,
            store=table.store,
            inputs=(),
            reading=table.settings.reading,
            rules=RowRules(spec, next_stamp(head.body)),
            batch_id=batch_id or clock.new_id(),
            spec_version=spec_head.number + (spec is not spec_head.body),
            start=head.number + 1,
        )
        rows = sum(f.rows for f in files)
        progress(f"trying {rows} quarantined rows again")
        renames = renames_of(table, spec, head.number)
        if new := new_columns_of(job, files, renames):  # columns come with accepted rows, of whatever batch
            fit = [survey for survey in new if not list(unfit_files(spec, [survey]))]
            spec, warnings = plan_spec(table, spec_head.body, fit)
            warnings += [f"rows of {one.path!r} stay quarantined: {one.reason}" for one in unfit_files(spec, new)]
            rules = RowRules(spec, job.rules.received_at)
            job = replace(job, rules=rules, spec_version=spec_head.number + (spec is not spec_head.body))
        planned = spec is not spec_head.body
        replayed, reports = replay_rows(job, files, renames)
        if not replayed:
            for warning in (*warnings, *([f"none of the {rows} quarantined rows passes now"] if files else [])):
                warn(warning)
            return None
        entry = _entry(table, job, replayed, reports)
        names = {f.name for t in entry.touched.values() for f in t.files} | {f.name for f in entry.quarantine}
        if any(e.kind == "batch" and e.batch_id == job.batch_id for e in entries):
            table.discard(names)
            raise ConfigurationError(
                "batch-id-taken",
                f"Batch id {batch_id!r} is that of another batch. Nothing was committed.",
                next="give the replay a --batch-id of its own, or none",
            )
        if spec.key_scope == "table":
            in_table = placed(table, spec, head, entry, progress)
            if in_table is None:
                table.discard(names)
                continue
            entry, names = in_table.entry, names | in_table.objects
        progress("committing")
        if planned and table.objects.specs.append(spec, spec_head).result != "won":
            table.discard(names)
        else:
            outcome = table.objects.ledger.append(entry, head)
            if outcome.link is not None:
                result = AppendResult(outcome.link.number, entry, tuple(warnings), examples=examples_of(reports))
                announce(table, result)
                return result
            if outcome.result == "lost":
                table.discard(names)
        clock.sleep(clock.jitter(0.01 * 2 ** min(attempt, 7)))
    raise races_exhausted(table.store.uri(), ATTEMPTS)


def renames_of(table: OpenTable, spec: TableSpec, last: int) -> Callable[[str], int]:
    """How many of the spec's renames there had been when a batch, by its id, was written: its rows have the names of then."""
    if not spec.renames:
        return lambda batch_id: 0
    versions = {entry.batch_id: entry.spec_version for entry in table.headers(last)}
    return lambda batch_id: len(table.spec(versions[batch_id]).renames)


def _entry(table: OpenTable, job: AppendJob, replayed: tuple[Replayed, ...], reports: Sequence[Report]) -> LedgerEntry:
    refused = [r for r in reports if isinstance(r, Refused)]
    return LedgerEntry(
        kind="batch",
        batch_id=job.batch_id,
        received_at=job.rules.received_at,
        spec_version=job.spec_version,
        reading=job.reading,
        touched=touched_by(reports),
        rows_read=sum(f.rows for f in replayed),
        quarantined=dict(sorted(refused[0].reasons.items())) if refused else {},
        quarantine=tuple(r.file for r in refused),
        replayed=replayed,
        retention=table.settings.tombstones_kept,
        snapshot=table.known_snapshot,
    )
