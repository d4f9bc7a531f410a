"""Phase one: take every landing file that no batch took, as one batch.

Reads     the landing zone's listing and files, the ledger, the spec
Writes    appended and quarantine files under names of their own, then (where columns came) the next spec, then ONE ledger
          entry: that put is the commit and the acknowledgement; then a message for each touched partition
Repeat    safe: a landing file counts once, by path and content; a crash before the ledger entry leaves files that nobody names

    list -> survey -> plan the spec -> row work -> spec -> ledger entry -> messages
      ^                                   |          |          |
      '-- a file failed: go on without it-'          '-- race lost: discard, begin again, or take the next number
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date

from lakeupsert import clock
from lakeupsert.engine.batch import (
    AppendJob,
    FileFailed,
    FileRead,
    Host,
    Refused,
    Report,
    Written,
    in_several_partitions,
    quarantine_files,
    touched_by,
)
from lakeupsert.errors import RefusedError
from lakeupsert.landing.accept import (
    RowRules,
    format_of,
)
from lakeupsert.pipeline.commit import AppendResult, BeginAgain, announce, commit_batch, examples_of
from lakeupsert.pipeline.discover import Ground, discover, refuse_all_skipped
from lakeupsert.pipeline.full_extract import (
    NO_EXTRACT,
    full_extract_of,
    refuse_extract_again,
    refuse_full_extract,
    refuse_part_of_extract,
)
from lakeupsert.pipeline.key_places import placed
from lakeupsert.pipeline.next_spec import fruitless_files, plan_spec, text_columns, under_old_names, unfit_files
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.table.chain import races_exhausted
from lakeupsert.table.ledger import (
    LandingFile,
    LedgerEntry,
    QuarantineFile,
    Scope,
)

log = logging.getLogger(__name__)

ATTEMPTS = 20
COMPARED_BYTES = 8 << 20
"""Landing bytes of which all keys are looked for in several partitions; of more, some stand for all. More: the driver holds 8
bytes for each of these keys."""


class _FilesFailed(Exception):
    """Landing files that this try must go on without."""

    def __init__(self, failed: Iterable[FileFailed]) -> None:
        self.failed = list(failed)


class _Fruitless(Exception):
    """Files of which no row was accepted brought columns or types, which come with accepted rows alone."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.paths = list(paths)


def append(
    table: OpenTable,
    host: Host,
    *,
    batch_id: str | None = None,
    received: tuple[date | None, date | None] = (None, None),
    again: bool = False,
    full: Scope | None = None,
    may_shrink: bool = False,
    progress: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = log.warning,
) -> AppendResult | None:
    """Commit one batch of all new landing files; None where there is none.

    Args:
        again: instead, take those landing files that batches took which a restore withdrew.
        batch_id: the client's name for the batch; with it a repeated call is recognised even before files are compared.
        full: the batch is a full extract of the whole table, or of the partitions that its rows are in: keys that it lacks
            are deleted there. ``may_shrink``: also where it has far fewer rows than are stored.
        received: first and last date (inclusive) of the landing folders to take, where `landing_dates` is set.
        warn: takes the warnings of a call that commits no batch; those of a batch are in the result.
    Raises:
        RefusedError: more rows were refused than `quarantine_limit` allows, or landing has files and all of them are skipped;
            nothing is committed, landing is untouched.
        ConfigurationError: the batch id belongs to other files; the landing zone is missing.
        TryAgainError: races or a silent store; nothing is lost, what was committed shows in the next call.
    """
    if full:
        refuse_full_extract(table)
    changed: list[str] = []
    unreadable: dict[tuple[str, str], str] = {}  # by path and etag: a file that is whole by now is another one
    wider: set[str] = set()
    plans: dict[str, bool] = {}  # files that had no accepted row: whether their columns are planned all the same
    for attempt in range(ATTEMPTS):
        ground = discover(table, batch_id, received, again, changed)
        refuse_all_skipped(table, ground)
        if not ground.inputs:
            lacking = table.without_operations(table.headers(ground.head.number)) if ground.head else []
            for warning in (*ground.warnings, *_late(changed), *([NO_EXTRACT] if full else []), *lacking):
                warn(warning)
            return None
        if full:
            refuse_part_of_extract(table, ground, changed)
        elif again:
            refuse_extract_again(table, ground)
        ground = replace(ground, full=full, may_shrink=may_shrink)
        try:
            result = _try(table, host, ground, unreadable, wider, plans, progress)
        except _Fruitless as e:
            plans |= dict.fromkeys(e.paths, False)
            continue
        except _FilesFailed as e:
            changed += [f.path for f in e.failed if f.changed]
            etags = {i.path: i.etag for i in ground.inputs}
            unplanned = {
                f.path for f in e.failed if f.unplanned and (f.path not in wider or not plans.get(f.path, True))
            }
            plans |= dict.fromkeys(unplanned & plans.keys(), True)  # under the other types it has accepted rows
            unreadable |= {
                (f.path, etags[f.path]): f.reason for f in e.failed if not f.changed and f.path not in unplanned
            }
            wider |= unplanned
            continue
        except BeginAgain:
            clock.sleep(clock.jitter(0.01 * 2 ** min(attempt, 7)))
            continue
        announce(table, result)
        return replace(result, warnings=(*ground.warnings, *result.warnings, *_late(changed)))
    raise races_exhausted(table.store.uri(), ATTEMPTS)


def _try(
    table: OpenTable,
    host: Host,
    ground: Ground,
    failing: dict[tuple[str, str], str],
    wider: Collection[str],
    plans: Mapping[str, bool],
    progress: Callable[[str], None],
) -> AppendResult:
    """``failing``: files that can't be read, and why; ``wider``: files that have a column which the table has not; ``plans``:
    of files that had no accepted row, whether their columns are planned."""
    unreadable = {i.path: failing[i.path, i.etag] for i in ground.inputs if (i.path, i.etag) in failing}
    given = [i for i in ground.inputs if i.path not in unreadable]
    known = ground.spec_head.body if ground.spec_head else None
    schema = known.schema if known else None
    reading = table.settings.reading
    # All of a file of JSON lines would be decoded for the names of its columns, which are seldom new.
    unsure = [i for i in given if known is None or i.path in wider or format_of(i.path, reading.format) != "jsonl"]
    progress(f"surveying {len(unsure)} landing files")
    surveys = host.survey(table.landing, unsure, reading, schema, text_columns(table))
    failed = [
        FileFailed(s.path, s.changed, s.unreadable or "") for s in surveys if s.changed or s.unreadable is not None
    ]
    if known is not None:
        failed += unfit_files(known, surveys)
    if failed:
        raise _FilesFailed(failed)
    if known is None and not surveys:
        path, reason = next(iter(unreadable.items()))
        raise RefusedError(
            "no-readable-file",
            f"Table {table.name!r} can't be created: none of its {len(unreadable)} landing files can be read. "
            f"The first is {table.landing.uri(path)}: {reason}",
            next="correct or remove these files, then run `lakeupsert run` again",
        )
    planned = [s for s in surveys if plans.get(s.path, True)]
    spec, warnings = plan_spec(table, known, planned)
    version = -1 if ground.spec_head is None else ground.spec_head.number
    groups = {s.path: (0, s.row_groups) for s in surveys if s.row_groups}
    surveyed = {s.path for s in surveys}
    job = AppendJob(
        landing=table.landing,
        store=table.store,
        inputs=tuple(replace(i, row_groups=groups.get(i.path), surveyed=i.path in surveyed) for i in given),
        reading=reading,
        rules=RowRules(spec, ground.received_at),
        batch_id=ground.batch_id,
        spec_version=version + (spec is not known),
        start=ground.head.number + 1 if ground.head else 0,
        full=ground.full is not None,
        compared=min(1.0, COMPARED_BYTES / max(1, sum(i.size for i in given))),
    )
    progress(f"reading, splitting and writing the rows of {len(given)} landing files")
    reports = [*host.run(job), *quarantine_files(job, unreadable)]
    written = list({f.name for r in reports if isinstance(r, Written) for f in r.files})
    refused = [r.file.name for r in reports if isinstance(r, Refused)]
    try:
        failed = [r for r in reports if isinstance(r, FileFailed)]
        if failed:
            raise _FilesFailed(failed)
        fruitless = fruitless_files(table, known, spec, [s for s in planned if s.path not in plans], planned, reports)
        if fruitless:
            raise _Fruitless(fruitless)
        entry = _entry(table, ground, job, reports, unreadable)
        _refuse_above_limit(table, ground, entry)
        if ground.full:
            entry = full_extract_of(table, spec, ground, entry, reports)
        if spec.key_scope == "table":
            in_table = placed(table, spec, ground.head, entry, progress)
            if in_table is None:
                raise BeginAgain(discard=True)
            entry = in_table.entry
            written += in_table.objects
        progress("committing")
        link = commit_batch(table, ground, job, entry)
    except RefusedError:
        table.discard(written)  # the refused rows stay, for who has to find out
        raise
    except (_FilesFailed, _Fruitless):
        table.discard([*written, *refused])
        raise
    except BeginAgain as e:
        if e.discard:
            table.discard([*written, *refused])
        raise
    warnings += table.without_operations([*table.headers(link.number - 1), link.body])
    warnings += under_old_names(table, ((r.path, r.renamed) for r in reports if isinstance(r, FileRead)))
    scattered = in_several_partitions(job, reports)
    return AppendResult(link.number, link.body, tuple(warnings), scattered, examples_of(reports))


def _late(changed: Sequence[str]) -> list[str]:
    return [f"{path} changed or vanished while it was read; it is left to the next batch" for path in changed]


def _entry(
    table: OpenTable, ground: Ground, job: AppendJob, reports: Sequence[Report], unreadable: dict[str, str]
) -> LedgerEntry:
    rows: Counter[str] = Counter()
    hashes: dict[str, str] = {}
    reasons: Counter[str] = Counter()
    quarantine: list[QuarantineFile] = []
    operations = False
    for report in reports:
        if isinstance(report, FileRead):
            rows[report.path] += report.rows
            operations |= report.operations
            if report.sha256 is not None:
                hashes[report.path] = report.sha256
        elif isinstance(report, Refused):
            reasons.update(report.reasons)
            quarantine.append(report.file)
    return LedgerEntry(
        kind="batch",
        batch_id=ground.batch_id,
        received_at=ground.received_at,
        spec_version=job.spec_version,
        reading=job.reading,
        files=tuple(
            LandingFile(path=i.path, size=i.size, etag=i.etag, sha256=hashes.get(i.path, ""), rows=rows[i.path])
            for i in ground.inputs
        ),
        seen=ground.seen,
        touched=touched_by(reports),
        rows_read=sum(rows.values()) + len(unreadable),  # an unreadable file counts as the one row that tells of it
        quarantined=dict(sorted(reasons.items())),
        quarantine=tuple(quarantine),
        retention=table.settings.tombstones_kept,
        snapshot=table.known_snapshot,
        operations=operations if rows.total() and job.spec.delete and job.spec.delete.column else None,
    )


def _refuse_above_limit(table: OpenTable, ground: Ground, entry: LedgerEntry) -> None:
    unreadable = entry.quarantined.get("unreadable_file", 0)  # each is one row, which tells of the file
    refused, rows = entry.rows_quarantined - unreadable, entry.rows_read - unreadable
    is_first = _is_first(table, ground)
    if table.settings.within_limit(refused, rows, is_first=is_first):
        return
    allowed = table.settings.limit_text(refused, rows, is_first=is_first)
    reasons = ", ".join(f"{n} {reason}" for reason, n in entry.quarantined.items())
    files = ", ".join(table.store.uri(f.name) for f in entry.quarantine[:3])
    raise RefusedError(
        "quarantine-limit",
        f"Batch of {len(entry.files)} files for table {table.name!r}: {refused} of {rows} rows would be quarantined "
        f"({reasons}). `quarantine_limit` allows {allowed}. Nothing was committed. The refused rows are in {files} (Parquet).",
        next="look at the refused rows; correct the landing files, or raise `quarantine_limit` and run the same command again",
    )


def _is_first(table: OpenTable, ground: Ground) -> bool:
    """Whether no batch is there yet, nor an adopted file: then this one decides which types the columns have."""
    if ground.head is None:
        return True
    begin = table.entry(0)
    return not any(e.kind == "batch" for e in table.headers(ground.head.number)) and not (begin and begin.body.touched)
