"""The figures of the page. Each is a section, or a line if there is nothing to draw."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from itertools import islice, pairwise
from xml.etree.ElementTree import Element

from lakeupsert.phrases import count, duration, size, when
from lakeupsert.report.attention import REPLAY, replay
from lakeupsert.report.charts import MANY, Bar, Day, Mark, Span, Tick, bars, calendar, columns, lanes, legend, line
from lakeupsert.report.html import details, e, prose, section, table
from lakeupsert.report.nights import PAUSE, Merge, Night, Partition, ReportData
from lakeupsert.table.layout import partition_text
from lakeupsert.table.manifest import Changes

REASONS = 6
"""How many quarantine reasons have their own colour; the others share one."""
RANKED = 10
"""How many partitions a ranking shows."""
LISTED = 100
"""How many rows a table shows before it only counts the rest."""
MONTHS = 36
"""How many months the calendar shows."""
OPEN = 30
"""How many batches the table of batches shows before it folds the others."""
LANES = 32
"""How many workers the timeline shows."""
SHORTEST_RUN = timedelta(seconds=1)
"""A shorter run has no timeline."""
CLASSES = 8
"""Into how many classes the ages of rows are put."""
SIGNS = {"failed": "\N{MULTIPLICATION SIGN}", "lagging": "\N{LEFTWARDS ARROW}", "dirty": "\N{BULLET}"}
NO_NIGHT = "No batch was appended yet."
SHARED = "Partitions merged in one call share its time evenly."


@dataclass(frozen=True)
class Line:
    """A figure of which one line says everything."""

    title: str
    text: str


Figure = Element | Line


# ---------------------------------------------------------------- partitions


def _calendar(data: ReportData) -> Figure:
    if not data.by_date:
        return _most_touched(data)
    title = f"Calendar of the partitions, by {data.column}"
    if not data.partitions:
        return Line(title, "No partition yet.")
    most = max(p.times for p in data.partitions)
    # Up to four shades for the counts that occur: if partitions are touched at most twice, there are two.
    bounds = sorted({-(-most * k // 4) for k in (1, 2, 3, 4)} - {0})
    days: dict[date, Day] = {}
    for p in data.partitions:
        if p.day is not None:
            level = sum(p.times > b for b in [0, *bounds[:-1]])
            class_ = " ".join((f"h{level}", *p.marks[:1]))
            days[p.day] = Day(class_, SIGNS[p.marks[0]] if p.marks else "", _partition_tip(p))
    months = sorted({(d.year, d.month) for d in days})[-MONTHS:]
    shown = {d: v for d, v in days.items() if (d.year, d.month) in months}
    keys = [("h0", "0")]
    for level, (low, high) in enumerate(pairwise([0, *bounds]), start=1):
        keys.append((f"h{level}", f"{high}" if low + 1 == high else f"{low + 1} to {high}"))
    keys[-1] = (keys[-1][0], f"{keys[-1][1]} batches")
    keys += [(mark, f"{SIGNS[mark]} {mark}") for mark in SIGNS if any(mark in p.marks for p in data.partitions)]
    left_out = f"Months before {months[0][0]}-{months[0][1]:02d} are left out." if len(shown) < len(days) else ""
    return section(
        title,
        left_out,
        legend(keys),
        e("div", e("div", calendar(shown), class_="months"), _touched_table(data), class_="beside"),
        wide=True,
    )


def _most_touched(data: ReportData) -> Figure:
    title = f"Most touched partitions{f', by {data.column}' if data.column else ''}"
    return section(title, "", _touched_table(data), wide=True) if data.partitions else Line(title, "No partition yet.")


def _touched_table(data: ReportData) -> Element:
    rows = [
        (p.value, f"{p.times:,}", f"{p.last:,}", f"{p.rows:,}", size(p.bytes), ", ".join(p.marks) or "whole")
        for p in sorted(data.partitions, key=lambda p: (-p.times, -p.last, p.name))[:RANKED]
    ]
    return table(("most touched", ">batches", ">last batch", ">rows", ">size", "state"), rows, len(data.partitions))


def _partition_tip(p: Partition) -> str:
    marks = f"; {', '.join(p.marks)}" if p.marks else ""
    stored = f"{count(p.rows, 'row')}, {size(p.bytes)}"
    return f"{p.value}: touched by {count(p.times, 'batch', 'es')}, last by batch {p.last}; {stored}{marks}"


# ---------------------------------------------------------------- merges


def _timeline(data: ReportData) -> Figure:
    run = data.last_run()
    by_worker: dict[str, list[Merge]] = defaultdict(list)
    for merge in run:
        by_worker[merge.worker].append(merge)
    title = "Last run"
    if not by_worker:
        return Line(title, "No merge in these batches.")
    placed = {worker: _one_by_one(merges) for worker, merges in sorted(by_worker.items())}
    in_order = sorted((merge for merges in placed.values() for merge in merges), key=lambda m: m.began)
    begin, end = in_order[0].began, max(merge.ended for merge in in_order)
    length = (end - begin).total_seconds()
    summary = (
        f"{count(len(in_order), 'merge')} up to batch {run[-1].batch} by {count(len(placed), 'worker')}, "
        f"from {when(begin)}, in {duration(length)}."
    )
    if end - begin < SHORTEST_RUN:
        return Line(title, summary)
    unit, per = next(
        (u, n) for u, n in (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)) if length > 2 * n or n == 1
    )
    bars_of_worker = {
        f"{worker}: {count(len(merges), 'merge')}, {duration(sum(m.seconds for m in merges))}": [
            Span((m.began - begin).total_seconds() / per, (m.ended - begin).total_seconds() / per, _merge_tip(m))
            for m in merges
        ]
        for worker, merges in islice(placed.items(), LANES)
    }
    more = f" {len(placed) - LANES:,} more workers are left out." if len(placed) > LANES else ""
    return section(
        title,
        f"{summary}{more}",
        lanes(bars_of_worker, text="{:,.0f}".format, x=f"{unit} since its first merge began"),
        details("These merges", _merge_table(in_order)),
        wide=True,
        tip=f"A run ends at a pause of {duration(PAUSE.total_seconds())}, or at the next batch. {SHARED}",
    )


def _merge_table(merges: Sequence[Merge]) -> Element:
    rows = [
        (m.partition, m.worker, when(m.began), duration(m.seconds), f"{m.batch:,}", f"{m.rows:,}")
        for m in merges[:LISTED]
    ]
    return table(("partition", "worker", "began", ">took", ">batch", ">rows"), rows, len(merges))


def _one_by_one(merges: Sequence[Merge]) -> list[Merge]:
    """A worker's merges, placed one before the other from the last one on.

    A worker merges one partition after the other, but commits the partitions of one call together.
    """
    placed: list[Merge] = []
    for merge in reversed(merges):
        placed.append(replace(merge, ended=min(merge.ended, placed[-1].began)) if placed else merge)
    return placed[::-1]


def _merge_tip(merge: Merge) -> str:
    took = duration(merge.seconds)
    return f"{merge.partition}, batch {merge.batch}: {took}, {count(merge.rows, 'row')}, {size(merge.bytes_written)} written"


def _slowest(data: ReportData) -> Figure:
    slowest: dict[str, Merge] = {}
    for merge in sorted(data.merges, key=lambda m: m.seconds):
        slowest[merge.partition] = merge
    rows = sorted(slowest.values(), key=lambda m: -(m.seconds))[:RANKED]
    title = "Slowest partitions"
    if not rows:
        return Line(title, "No merge in these batches says how long it took.")
    ranking = [
        Bar(
            partition_text(m.partition),
            m.seconds,
            (duration(m.seconds), f"{m.batch:,}", f"{m.rows:,}", size(m.bytes_written)),
        )
        for m in rows
    ]
    heads = ("partition", "took", "batch", "rows", "written")
    return section(title, _rest(len(slowest)), bars(ranking, heads), tip=f"The longest single merge of each. {SHARED}")


def _rest(n: int) -> str:
    return f"The first {RANKED} of {n:,}." if n > RANKED else ""


# ---------------------------------------------------------------- nights


def _rows(data: ReportData) -> Figure:
    def stack(n: Night) -> list[Mark]:
        tip = f"{count(n.rows, 'row')} appended, {n.superseded:,} of them superseded"
        superseded = Mark(n.superseded, f"{count(n.superseded, 'row')} superseded", "fill2")
        return [Mark(n.rows - n.superseded, tip, "fill"), superseded]

    keys = [("fill", "to be merged"), ("fill2", "superseded within the batch")]
    return _per_batch(data, "Rows appended per batch", keys, stack, _axis_number, "rows")


def _bytes(data: ReportData) -> Figure:
    def stack(n: Night) -> list[Mark]:
        written = f"{size(n.bytes_written)} written by {'' if n.whole else 'known '}merges"
        appended = Mark(n.bytes_appended, f"{size(n.bytes_appended)} appended", "fill2")
        return [appended, Mark(n.bytes_written, written, "fill")]

    keys = [("fill2", "appended"), ("fill", "written by merges")]
    return _per_batch(
        data, "Bytes written per batch", keys, stack, lambda n: size(n).replace(".0 ", " "), "compressed bytes"
    )


def _per_batch(
    data: ReportData,
    title: str,
    keys: Sequence[tuple[str, str]],
    stack: Callable[[Night], Sequence[Mark]],
    text: Callable[[float], str],
    y: str,
    *below: Element,
) -> Figure:
    """A section with a stack for each night. ``below``: what follows the chart."""
    nights = data.nights
    stacks = [stack(night) for night in nights]
    if not any(mark.value for marks in stacks for mark in marks):
        return Line(title, "None in these batches." if nights else NO_NIGHT)
    named = [
        [
            Mark(m.value, f"{_batch_title(n)}: {m.tip}", f"{m.class_} withdrawn" if n.withdrawn else m.class_)
            for m in marks
        ]
        for n, marks in zip(nights, stacks, strict=True)
    ]
    pale = [("fill withdrawn", "withdrawn")] if any(n.withdrawn for n in nights) else []
    chart = columns(named, _ticks(nights), text=text, y=y)
    return section(title, "", legend([*keys, *pale, *_event_key(nights)]), chart, *below, wide=len(nights) > MANY)


def _amplification(data: ReportData) -> Figure:
    nights = data.nights
    points = [
        Mark(a, f"{_batch_title(n)}: {a:,.1f} bytes written per byte appended")
        if (a := _factor(n)) is not None
        else None
        for n in nights
    ]
    title = "Write amplification per batch"
    if not any(points):
        return Line(
            title, "None of these batches is merged in every partition that it touches." if nights else NO_NIGHT
        )
    unknown = sum(p is None and n.kind == "batch" for p, n in zip(points, nights, strict=True))
    return section(
        title,
        f"Left out: {count(unknown, 'batch', 'es')} not merged in every partition, or with trimmed versions."
        if unknown
        else "",
        legend([("fill", "bytes that merges wrote per byte appended"), *_event_key(nights)]),
        line(points, _ticks(nights), text="{:,g}\N{MULTIPLICATION SIGN}".format, y="written / appended"),
        wide=len(nights) > MANY,
    )


def _factor(night: Night) -> float | None:
    return night.bytes_written / night.bytes_appended if night.whole and night.bytes_appended else None


def _ages(data: ReportData) -> Figure:
    title = "Age of the data that comes"
    if not data.ages:
        what = "The table has no partition columns" if data.column is None else f"{data.column} is not a date"
        no_date = f"{what}, so rows have no age."
        return Line(title, NO_NIGHT if data.by_date or not data.nights else no_date)
    total = sum(data.ages.values())
    rows = [
        Bar(f"{low:,}" if low == high else f"{low:,} to {high:,}", n, (f"{n:,}", f"{n / total:.1%}"))
        for low, high, n in _classes(data.ages)
    ]
    tip = f"Days from a partition's {data.column} to the receipt of its rows; negative: received before that day."
    return section(title, "", bars(rows, ("days late", "rows", "share")), tip=tip)


def _classes(ages: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Up to `CLASSES` ranges of ages, with their rows: neighbours that together have the fewest rows share one."""
    classes = [(age, age, rows) for age, rows in sorted(ages.items())]
    while len(classes) > CLASSES:
        i = min(range(len(classes) - 1), key=lambda i: classes[i][2] + classes[i + 1][2])
        (low, _, one), (_, high, other) = classes[i : i + 2]
        classes[i : i + 2] = [(low, high, one + other)]
    return classes


def _quarantine(data: ReportData) -> Figure:
    totals: Counter[str] = Counter()
    for night in data.nights:
        totals.update(night.quarantined)
    reasons = [reason for reason, _ in totals.most_common()]
    class_ = {reason: f"c{min(i, REASONS)}" for i, reason in enumerate(reasons)}

    def stack(n: Night) -> list[Mark]:
        return [Mark(n.quarantined[r], f"{n.quarantined[r]:,} {r}", class_[r]) for r in reasons if r in n.quarantined]

    keys = [(class_[r], r) for r in reasons[:REASONS]] + ([(f"c{REASONS}", "others")] if reasons[REASONS:] else [])
    rows = [
        (r, f"{totals[r]:,}", *((x.where, x.reason) if (x := data.examples.get(r)) else ("not found", "")))
        for r in reasons
    ]
    examples = table(("reason", ">rows", "for example", "why"), rows, len(rows))
    take, merge = replay(data.table)
    again = e("p", *prose(f"{REPLAY[:1].upper()}{REPLAY[1:]}: `{take}`, then `{merge}`."), class_="note")
    below = (examples, *([again] if data.status.quarantined else []))
    return _per_batch(data, "Quarantined rows per batch, by reason", keys, stack, _axis_number, "rows", *below)


def _numbers(data: ReportData) -> Figure:
    title = "The batches in numbers"
    if not data.nights:
        return Line(title, NO_NIGHT)
    changes = _shown_changes(data.nights)
    heads = [
        ">batch",
        "received",
        "state",
        ">partitions",
        ">rows",
        ">superseded",
        ">quarantined",
        *(f">{name.replace('_', ' ')}" for name in changes),
        ">appended",
        ">written",
        ">factor",
        "id",
    ]
    rows = [_numbers_row(n, changes) for n in reversed(data.nights)]
    classes = ["withdrawn" if n.withdrawn else None for n in reversed(data.nights)]
    older = (
        [details(f"{len(rows) - OPEN:,} older batches", table(heads, rows[OPEN:], 0, classes[OPEN:]))]
        if len(rows) > OPEN
        else []
    )
    return section(title, "Newest first.", table(heads, rows[:OPEN], 0, classes[:OPEN]), *older, wide=True)


def _shown_changes(nights: Sequence[Night]) -> list[str]:
    """The names of the changes that have a column: rare ones have none if nothing was counted."""
    rare = {"newer_than_extract", "deletes_without_row"}
    names = Changes.__struct_fields__
    return [name for name in names if name not in rare or any(getattr(night.changes, name) for night in nights)]


def _numbers_row(n: Night, changes: Sequence[str]) -> Sequence[str]:
    if n.kind == "schema":
        return f"{n.number:,}", when(n.received), _state(n), *[""] * (8 + len(changes))
    return (
        f"{n.number:,}",
        when(n.received),
        _state(n),
        f"{n.touched:,}",
        f"{n.rows:,}",
        f"{n.superseded:,}",
        f"{sum(n.quarantined.values()):,}",
        *(f"{getattr(n.changes, name):,}" for name in changes),
        size(n.bytes_appended),
        size(n.bytes_written),
        "" if (a := _factor(n)) is None else f"{a:,.1f}",
        n.batch_id,
    )


def _batch_title(night: Night) -> str:
    state = f" ({_state(night)})" if _state(night) else ""
    return f"Batch {night.number}{state}, {when(night.received)}"


def _state(night: Night) -> str:
    """The state of a batch that is not a usual one."""
    return ", ".join(filter(None, ["withdrawn" if night.withdrawn else "", night.note]))


def _event_key(nights: Sequence[Night]) -> list[tuple[str, str]]:
    return [("event", "restore, replay, update, delete or change of the schema")] if any(n.note for n in nights) else []


def _ticks(nights: Sequence[Night]) -> list[Tick]:
    return [Tick(f"{n.number}", f"{n.received:%m-%d}", _batch_title(n) if n.note else "") for n in nights]


def _axis_number(n: float) -> str:
    """A short number for an axis, where 12,000,000 would not fit."""
    return next(
        (f"{n / unit:,g}{letter}" for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if n >= unit), f"{n:g}"
    )


FIGURES: list[Callable[[ReportData], Figure]] = [
    _calendar,
    _timeline,
    _rows,
    _bytes,
    _amplification,
    _ages,
    _quarantine,
    _slowest,
    _numbers,
]
