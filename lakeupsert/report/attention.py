"""What is wrong with a table, worst first, each with the command to type: for the page and for the terminal. Nothing is read."""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Literal, get_args

from lakeupsert.errors import cause_of, split_text
from lakeupsert.phrases import count, duration, short_list, when

if TYPE_CHECKING:  # `lakeupsert --help` starts without what reads a table
    from lakeupsert.report.nights import Night, ReportData
    from lakeupsert.report.status import Status

Level = Literal["bad", "warn", "note", "good"]

SHORTEST_PAUSE = timedelta(hours=1)
"""The newest data are not old before this, however quickly the batches came one after the other."""


@dataclass(frozen=True)
class Finding:
    """One thing to know. ``bad``: readers miss rows, or nobody works on it any more.

    ``remedy``: what to do, where commands alone do not say it; ``commands``: what to type.
    """

    level: Level
    what: str
    why: str = ""
    remedy: str = ""
    commands: tuple[str, ...] = ()


def verdict(name: str, status: "Status", data: "ReportData | None" = None) -> Finding:
    """The state of the table in one sentence. It is "exact" only if ``data`` says that rows were counted, and why says how."""
    since, failed, run = status.unpublished_since, len(status.failed), _run(name)
    published = seen = ""
    if status.published_at is not None:
        published = f"Batch {status.batch} published {when(status.published_at)}"
        seen = f"Readers see batch {status.batch}, published {when(status.published_at)}."
    if since is not None and failed:
        return Finding("bad", f"HELD BACK since batch {since}: {_partitions(failed)}", seen, commands=run)
    if since is not None:
        merged = f"{len(status.behind) - status.dirty:,} of {_partitions(len(status.behind))} merged"
        is_dead = status.queue is not None and status.queue.dead > 0 and status.dirty > 0
        return Finding("bad" if is_dead else "warn", f"NOT PUBLISHED since batch {since}: {merged}", seen, commands=run)
    if not published:
        return Finding("warn", "Nothing published yet", "No batch was appended.", commands=run)
    if status.lagging:
        what = f"{published}, WITHOUT the newest rows of {_partitions(len(status.lagging))}"
        return Finding("bad", what, commands=run)
    reconcile = _command("reconcile", name)
    if data is None:
        return Finding("good", published)
    if data.unaccounted is None:
        why = f"Rows were not counted: versions of before batch {status.batch} are gone."
        return Finding("good", published, why, commands=(reconcile,))
    if data.unaccounted:
        return Finding("bad", f"{published}, NOT EXACT: {_partitions(len(data.unaccounted))}", commands=(reconcile,))
    first, last = data.nights[0].number, data.nights[-1].number
    batches = f"batch {first}" if first == last else f"batches {first} to {last}"
    why = (
        f"Counted {when(data.at)} by manifests: every partition that {batches} touched accounts for all rows that the ledger has "
        f"for it. No file was read: `{reconcile}` counts the rows in files, and `{reconcile} --deep` compares their values with "
        "what landed."
    )
    return Finding("good", f"{published}, exact", why)


def findings(name: str, data: "ReportData") -> list[Finding]:
    """Everything that somebody should look at."""
    found = [*_partitions_behind(name, data), *_messages(name, data.status), *_rows(name, data), *_arrivals(name, data)]
    found += _publishers(name, data.status)
    found += [Finding("warn", "Warning", warning) for warning in data.status.warnings]
    return sorted([*found, *_restores(data)], key=lambda one: get_args(Level).index(one.level))


def _partitions_behind(name: str, data: "ReportData") -> Iterator[Finding]:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    texts: dict[tuple[str, str], str] = {}
    for p in data.partitions:
        if p.marks:
            group = (p.marks[0], cause_of(p.reason, f"={p.value}"))
            groups[group].append(p.value)
            texts.setdefault(group, p.reason)
    for (mark, cause), names in groups.items():
        reason, advice = split_text(texts[mark, cause])
        what = f"{_partitions(len(names))} {mark}: {short_list(names)}"
        if mark == "dirty":
            yield Finding("warn", what, "Not all of its batches are merged.")
        else:
            commands = re.findall(r"`(lakeupsert [^`]+)`", advice)
            why = reason or "Readers see it without its newest batches."
            yield Finding("bad", what, why, advice, tuple(dict.fromkeys([*commands, *_run(name)])))
    if data.unaccounted:
        yield Finding(
            "bad",
            f"Rows of {_partitions(len(data.unaccounted))} are not accounted for: {short_list(data.unaccounted)}",
            "The manifests and the ledger count different numbers of rows.",
            commands=(_command("reconcile", name),),
        )


REPLAY = (  # the first three are `engine.replay.UNTRIED`
    "land a corrected file for unreadable_file, malformed and missing_column; for other reasons correct what they name, in the "
    "settings or at the source, then take these rows again"
)


def replay(name: str) -> tuple[str, ...]:
    """The commands that take the rows in quarantine again."""
    return (_command("append --replay-quarantine", name), *_run(name))


def _messages(name: str, status: "Status") -> Iterator[Finding]:
    if status.queue is not None and status.queue.dead:
        why = (
            "These messages failed at every attempt, and workers no longer try them."
            if status.dirty
            else "Every partition is merged, so they are obsolete."
        )
        yield Finding("bad", count(status.queue.dead, "dead letter"), why, commands=(_command("redrive", name),))


def _rows(name: str, data: "ReportData") -> Iterator[Finding]:
    look = _command("quarantine", name)
    counted = [n for n in data.nights if not n.withdrawn]
    if data.status.quarantined:
        last = next((n for n in reversed(counted) if n.quarantined), None)
        why = ""
        if last is not None:
            reasons = ", ".join(f"{rows:,} {reason}" for reason, rows in last.quarantined.items())
            why = f"The last ones came with batch {last.number}: {reasons}."
        what = f"{count(data.status.quarantined, 'refused row')} in quarantine"
        yield Finding("warn", what, why, REPLAY, (look, *replay(name)))
    if below := sum(n.refused_by_merges for n in counted):
        why = "They have unknown keys, and are older than forgotten deletes or than a full extract (below_floor)."
        yield Finding("warn", f"{count(below, 'row')} refused by merges", why, commands=(look,))


def _arrivals(name: str, data: "ReportData") -> Iterator[Finding]:
    if data.skipped:
        yield Finding("warn", "Landing files that no batch takes", f"{data.skipped[:1].upper()}{data.skipped[1:]}")
    pause = _usual_pause([n for n in data.nights if n.kind == "batch"])
    age = data.age
    if (
        pause is not None
        and age is not None
        and data.status.unpublished_since is None
        and age > max(2 * pause, SHORTEST_PAUSE)
    ):
        usual = duration(pause.total_seconds())
        what = f"The newest data that readers see are {duration(age.total_seconds())} old"
        yield Finding("warn", what, f"Batches usually come {usual} apart.", commands=_run(name))


def _restores(data: "ReportData") -> Iterator[Finding]:
    withdrawn = [n.number for n in data.nights if n.withdrawn]
    restore = next((n for n in reversed(data.nights) if n.kind == "restore"), None)
    if restore is not None and withdrawn:
        what = f"{restore.note.capitalize()}, by ledger entry {restore.number}"
        yield Finding("note", what, f"Batches withdrawn: {short_list(list(map(str, withdrawn)))}.")


def _publishers(name: str, status: "Status") -> Iterator[Finding]:
    for publisher, standing in status.publishers.items():
        if standing.is_newest:
            continue
        lacks = "not known" if standing.behind is None else f"{count(standing.behind, 'snapshot')} behind"
        seen = f"Its readers see snapshot {standing.snapshot}." if standing.snapshot is not None else ""
        problem = standing.problem
        why, remedy = (f"{seen} {problem.message}", problem.next) if problem else (seen, "")
        command = _command(f"publish --to {publisher}", name)
        yield Finding("warn", f"Publisher {publisher}: {lacks}", why.strip(), remedy, (command,))


def _usual_pause(batches: "Sequence[Night]") -> timedelta | None:
    pauses = [(b.received - a.received).total_seconds() for a, b in pairwise(batches)]
    return timedelta(seconds=median(pauses)) if len(pauses) > 1 else None


def _run(name: str) -> tuple[str, ...]:
    return (_command("run", name),)


def _command(words: str, table: str) -> str:
    return f"lakeupsert {words} --table {shlex.quote(table)}"


def _partitions(n: int) -> str:
    return count(n, "partition")
