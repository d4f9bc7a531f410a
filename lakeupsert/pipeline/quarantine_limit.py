"""Refuse a batch of which more rows were refused than `quarantine_limit` allows, or in which the source table was truncated.

Reads     the ledger's first entry
Writes    nothing
"""

import shlex
from collections.abc import Iterable, Mapping

from lakeupsert.engine.reports import Refused, Report
from lakeupsert.errors import RefusedError
from lakeupsert.phrases import count
from lakeupsert.pipeline.discover import Ground
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.table.ledger import LedgerEntry


def refuse_above_limit(table: OpenTable, ground: Ground, entry: LedgerEntry, examples: Mapping[str, str]) -> None:
    """Raise RefusedError if the batch has more refused rows than allowed. ``examples``: one of them for each reason."""
    # One row for each unreadable file, and rows that were stored.
    others = entry.quarantined.get("unreadable_file", 0) + entry.orphans
    refused, rows = entry.rows_quarantined - others, entry.rows_read - others
    is_first = _is_first(table, ground)
    if table.settings.within_limit(refused, rows, is_first=is_first):
        return
    allowed = table.settings.limit_text(refused, rows, is_first=is_first)
    reasons = ", ".join(f"{n} {reason}" for reason, n in entry.quarantined.items())
    usual = max(examples.keys() - {"unreadable_file"}, key=lambda reason: entry.quarantined[reason])
    names = [f.name for f in entry.quarantine[:3]]
    files = ", ".join(map(table.store.uri, names))
    raise RefusedError(
        "quarantine-limit",
        f"Batch of {count(len(entry.files), 'file')} for table {table.name!r}: {refused} of {rows} rows would be quarantined "
        f"({reasons}), but `quarantine_limit` allows {allowed}. For example {examples[usual]} Nothing was committed. The "
        f"refused rows are in {files} (Parquet).",
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
        if _is_first(table, ground)
        else (
            "land what came before the last truncate and run; then "
            f'`lakeupsert delete --table {shlex.quote(table.name)} --where "{table.settings.key[0]} is not null" --yes`; then '
        )
    )
    raise truncated(table, refused[0].examples["truncate"], f" The batch has {count(times, 'truncate')}.", first)


def truncated(table: OpenTable, example: str, times: str = "", first: str = "") -> RefusedError:
    """The error for a batch with a truncate. ``first``: what to do with stored rows."""
    return RefusedError(
        "truncated-source",
        f"Table {table.name!r}: {example} lakeupsert does not apply truncates: the rows from before it would stay.{times} "
        "Nothing was committed.",
        next=f"{first}land what came after the last truncate, in files without it, and run",
    )


def _is_first(table: OpenTable, ground: Ground) -> bool:
    """Whether the table has no batch and no adopted file yet: then this batch decides which types the columns have."""
    if ground.head is None:
        return True
    begin = table.entry(0)
    return not any(e.kind == "batch" for e in ground.entries) and not (begin and begin.body.touched)
