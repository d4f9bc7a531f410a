"""Refuse a batch of which more rows were refused than `quarantine_limit` allows, or in which the source table was truncated, also
in part.

Reads     the ledger's first entry
Writes    nothing
"""

import shlex
from collections.abc import Iterable, Mapping

from lakeupsert.engine.reports import Refused, Report
from lakeupsert.errors import RefusedError
from lakeupsert.landing.formats.envelopes import NEW_TABLE
from lakeupsert.landing.origins import UNKNOWN_VERSION, Origins
from lakeupsert.phrases import count
from lakeupsert.pipeline.append.discover import AppendOptions, Ground
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.table.ledger import LedgerEntry, active_batches


def refuse_above_limit(table: OpenTable, ground: Ground, entry: LedgerEntry, examples: Mapping[str, str]) -> None:
    """Raise RefusedError if the batch has more refused rows than allowed. ``examples``: one of them for each reason."""
    # One row for each unreadable file, and rows that were stored.
    others = entry.quarantined.get("unreadable_file", 0) + entry.orphans
    refused, rows = entry.rows_quarantined - others, entry.rows_read - others
    is_first = _is_first(table.history, ground)
    if table.settings.within_limit(refused, rows, is_first=is_first):
        return
    allowed = table.settings.limit_text(refused, rows, is_first=is_first)
    reasons = ", ".join(f"{n} {reason}" for reason, n in entry.quarantined.items())
    usual = max(examples.keys() - {"unreadable_file"}, key=lambda reason: entry.quarantined[reason])
    names = [f.name for f in entry.quarantine[:3]]
    files = ", ".join(map(table.resources.store.uri, names))
    raise RefusedError(
        "quarantine-limit",
        f"Batch of {count(len(entry.files), 'file')} for table {table.name!r}: {refused:,} of {rows:,} rows would be quarantined "
        f"({reasons}), but `quarantine_limit` allows {allowed}. For example {examples[usual].rstrip('.')}. Nothing was "
        f"committed. The refused rows are in {files} (Parquet).",
        next=f"look at them (`lakeupsert quarantine {' '.join(names)}`), then correct the setting that the reason "
        "names, or the landing files, or raise `quarantine_limit`, and run the same command again",
    )


def refuse_truncate(table: OpenTable, ground: Ground, reports: Iterable[Report]) -> None:
    """Raise RefusedError if a change event truncates the source table: every older row would have to go, and none would."""
    refused = [r for r in reports if isinstance(r, Refused) and "truncate" in r.reasons]
    if not refused:
        return
    times = sum(r.reasons["truncate"] for r in refused)
    first = (
        ""
        if _is_first(table.history, ground)
        else (
            "land what came before the last truncate and run; then "
            f'`lakeupsert delete --table {shlex.quote(table.name)} --where "{table.settings.key[0]} is not null" --yes`; then '
        )
    )
    raise truncated(table.name, refused[0].examples["truncate"], f" The batch has {count(times, 'truncate')}.", first)


def refuse_new_versions(table: OpenTable, ground: Ground, origins: Origins, options: AppendOptions) -> None:
    """Raise RefusedError if a message removes rows, in the batch or stored: ACTIVATE_VERSION of Singer those of lower versions, a
    control record of AWS DMS all before it.

    After a full extract of the table no stored row counts that it lacks. If other batches have rows of the version, it may lack
    these, so it needs `may_shrink`.
    """
    counted = _entries_since_full(table.history, ground) if origins.begun else []
    full = f"`lakeupsert run --full table --table {shlex.quote(table.name)}`"
    for stream, version in origins.begun.items():
        here = origins.versions.get(stream, version)
        stored = min((_lowest_version(entry, stream, version) for entry in counted), default=version)
        is_split = any(entry.versions and entry.versions.get(stream, UNKNOWN_VERSION) >= version for entry in counted)
        is_taken = (options.may_shrink or not is_split) if options.full == "table" else stored >= version
        if here >= version and is_taken:
            continue
        what, whole = f"begins version {version} (ACTIVATE_VERSION)", f"all rows of version {version}"
        if version == NEW_TABLE:
            what, whole = "was dropped or truncated (control record of AWS DMS)", "all rows since"
        if here < version:
            found, step = "This batch has rows from before", "land its files without rows from before, and run again"
        elif is_split:
            found = "Earlier batches have some of its rows, which a full extract without them would delete"
            step = (
                f"land {whole} again in new files, also rows that have landed before, and run {full[:-1]} --may-shrink`"
            )
        else:
            found = "The table has rows from before"
            step = f"if the new landing files have {whole}, run {full}; else land them first"
        raise RefusedError(
            "truncated-source",
            f"Table {table.name!r}: {stream!r} {what}, so at the source its rows from before are gone. {found}. lakeupsert does "
            "not remove rows by such a message. Nothing was committed.",
            next=step,
        )


def _entries_since_full(history: History, ground: Ground) -> list[LedgerEntry]:
    """The batches that count, from the last full extract of the whole table on; without one, also the adopted rows."""
    numbers = sorted(active_batches(enumerate(ground.entries)))
    counted = [ground.entries[number] for number in numbers]
    extracts = [n for n, one in enumerate(counted) if one.full and one.full.scope == "table"]
    begin = history.entry(0) if ground.entries and not extracts else None
    return [*([begin.body] if begin and begin.body.touched else []), *counted[extracts[-1] if extracts else 0 :]]


def _lowest_version(entry: LedgerEntry, stream: str, none: int) -> int:
    """The lowest version of a stream's rows that came with a batch; ``none`` if it has none, or only such that came before."""
    if entry.statement or entry.replayed or (entry.kind == "batch" and not entry.rows_read):
        return none
    return UNKNOWN_VERSION if entry.versions is None else entry.versions.get(stream, none)


def truncated(name: str, example: str, times: str = "", first: str = "") -> RefusedError:
    """The error for a batch with a truncate. ``first``: what to do with stored rows."""
    return RefusedError(
        "truncated-source",
        f"Table {name!r}: {example} lakeupsert does not apply truncates: the rows from before it would stay.{times} "
        "Nothing was committed.",
        next=f"{first}land what came after the last truncate, in files without it, and run",
    )


def _is_first(history: History, ground: Ground) -> bool:
    """Whether the table has no batch and no adopted file yet: then this batch decides which types the columns have."""
    if any(e.kind == "batch" for e in ground.entries):
        return False
    begin = history.entry(0) if ground.head else None
    return begin is None or not begin.body.touched
