"""How old the newest data are that readers see, and what holds newer data back. A part of `status`.

Reads     what `status` has read; the newest lease of `ingest` if something is held back
Writes    nothing
Repeat    safe
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from lakeupsert import clock
from lakeupsert.phrases import count, duration
from lakeupsert.pipeline.append.discover import is_landing_file
from lakeupsert.pipeline.append.landing_dates import received_on
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.retries import LEADER_SECONDS, UNREAD_SECONDS
from lakeupsert.storage import NotFoundError, ObjectInfo
from lakeupsert.table.chain import Chain, Link
from lakeupsert.table.lease import Lease
from lakeupsert.table.ledger import LedgerEntry, active_batches
from lakeupsert.table.taken import TakenFiles, source_of

_SOURCE = re.compile(r"[^/=]*[^\W\d_][^/=]*(?=/)")
"""The first folder of a path, if it has a letter and is not like `day=2020-01-01`: other folders are dates."""


@dataclass(frozen=True)
class SourceFreshness:
    """As `Freshness`, for landing files below one folder.

    Attributes:
        behind: how many messages of a source `capture` had not landed some seconds ago; None: nobody knows.
        trouble: what holds `capture` of the source up or threatens to, or that none runs.
    """

    age_seconds: float | None
    waiting_files: int
    unpublished_batches: int
    behind: int | None = None
    trouble: str = ""

    @property
    def text(self) -> str:
        """For people, for example ``5.0 s (12 messages behind)``."""
        behind = f" ({count(self.behind, 'message')} behind)" if self.behind else ""
        return f"{'none' if self.age_seconds is None else duration(self.age_seconds)}{behind}"


@dataclass(frozen=True)
class Freshness:
    """How old the newest data are that readers see.

    Attributes:
        age_seconds: since the newest batch that readers see was received; None: they see none.
        held_by: how many ``waiting_files`` (that no batch took), ``unmerged_partitions``, ``failed_partitions`` and
            ``unpublished_batches`` hold newer data back. If something does and the last `ingest` has ended, ``no_leader`` (1)
            or the code of the error that ended it, for example ``quarantine-limit`` (1).
        oldest_waiting_seconds: the age of the oldest waiting file, by the store's clock.
        sources: by the first folder of landing files. Folders of dates do not count.
    """

    age_seconds: float | None
    held_by: Mapping[str, int]
    oldest_waiting_seconds: float | None
    sources: Mapping[str, SourceFreshness]

    @property
    def troubles(self) -> list[str]:
        return [f"Source {name}: {one.trouble}" for name, one in self.sources.items() if one.trouble]

    @property
    def held_text(self) -> str:
        """`held_by` for people, for example ``waiting files: 2 (oldest 5.0 s), no leader: 1``."""
        texts = {cause: f"{cause.replace('_', ' ')}: {number:,}" for cause, number in self.held_by.items()}
        if self.oldest_waiting_seconds is not None:
            texts["waiting_files"] += f" (oldest {duration(self.oldest_waiting_seconds)})"
        return ", ".join(texts.values())


def freshness(
    table: OpenTable,
    headers: Sequence[LedgerEntry],
    landed: Iterable[ObjectInfo],
    shown: int,
    behind: Mapping[str, bool],
    failed: Mapping[str, str],
) -> Freshness:
    """Judge by what `status` found: ``headers`` of the ledger, the first ``landed`` files, the batch ``shown`` (-1: none), and
    partitions as in `Status`."""
    batches = sorted(active_batches(enumerate(headers)), reverse=True)
    seen = [n for n in batches if n <= shown] or [0] * (shown >= 0)
    later = [n for n in batches if n > shown]
    waiting = _waiting(table, headers, landed)
    held = {
        "waiting_files": len(waiting),
        "unmerged_partitions": sum(dirty and partition not in failed for partition, dirty in behind.items()),
        "failed_partitions": len(failed),
        "unpublished_batches": len(later),
    }
    if any(held.values()) and (cause := _why_nobody_leads(table)):
        held[cause] = 1
    now = clock.now().timestamp()
    return Freshness(
        age_seconds=_age(headers[seen[0]]) if seen else None,
        held_by={cause: number for cause, number in held.items() if number},
        oldest_waiting_seconds=max((max(0.0, now - one.modified) for one in waiting), default=None),
        sources={} if table.settings.landing_dates else _sources(table, headers, seen, later, waiting),
    )


def _age(entry: LedgerEntry) -> float:
    return max(0.0, (clock.now() - entry.received).total_seconds())


def _waiting(table: OpenTable, headers: Sequence[LedgerEntry], landed: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    taken, pattern = TakenFiles(headers), table.settings.landing_dates
    files = [one for one in landed if is_landing_file(one.name) and not one.is_foreign]
    return [one for one in files if not taken.has(one) and received_on(one.name, pattern) is not None]


def _why_nobody_leads(table: OpenTable) -> str:
    """As `Freshness.held_by`; nothing if a process leads, or none ever did: then `run` or workers do the work."""
    lease = _newest(table.history.objects.leases)
    return lease.body.ended_by or "no_leader" if lease and _has_ended(lease) else ""


def _newest(leases: Chain[Lease]) -> Link[Lease] | None:
    with suppress(NotFoundError):  # its successor was appended meanwhile
        return leases.head()
    return None


def _has_ended(lease: Link[Lease]) -> bool:
    silent = (clock.now() - datetime.fromisoformat(lease.written_at)).total_seconds()
    return lease.body.released or silent > LEADER_SECONDS


def _sources(
    table: OpenTable,
    headers: Sequence[LedgerEntry],
    seen: Sequence[int],
    later: Sequence[int],
    waiting: Sequence[ObjectInfo],
) -> dict[str, SourceFreshness]:
    """``seen`` and ``later``: batches in descending order."""
    ages = {source: _age(headers[n]) for n in reversed(seen) for source in _named(f.path for f in headers[n].files)}
    unpublished = Counter(source for n in later for source in {*_named(f.path for f in headers[n].files)})
    waits = Counter(_named(one.name for one in waiting))
    names = sorted(ages.keys() | unpublished.keys() | waits.keys())
    paths = {*(file.path for n in (*seen, *later) for file in headers[n].files), *(one.name for one in waiting)}
    captured = {*filter(None, map(source_of, paths))}
    leases = {name: lease for name in captured if (lease := _newest(table.history.objects.leases_of_source(name)))}
    behind = {name: lease.body.behind for name, lease in leases.items() if not _has_ended(lease)}
    troubles = {name: _trouble(lease) for name, lease in leases.items()}
    return {
        name: SourceFreshness(ages.get(name), waits[name], unpublished[name], behind.get(name), troubles.get(name, ""))
        for name in names
    }


def _trouble(lease: Link[Lease]) -> str:
    silent = (clock.now() - datetime.fromisoformat(lease.written_at)).total_seconds()
    if silent > UNREAD_SECONDS:
        return f"no `capture` has run for {duration(silent)}. Its database keeps the log meanwhile."
    return lease.body.trouble


def _named(paths: Iterable[str]) -> list[str]:
    return [found[0] for path in paths if (found := _SOURCE.match(path))]
