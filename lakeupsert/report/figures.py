"""The figures of the page. Each has a title, says what it shows in which unit, and has words for where there is nothing."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from itertools import islice, pairwise
from xml.etree.ElementTree import Element

from lakeupsert.report.charts import Bar, bars, breaking, calendar, columns, lanes, legend, line
from lakeupsert.report.html import e
from lakeupsert.report.nights import PAUSE, Merge, Night, Observed, Partition
from lakeupsert.report.numbers import count, duration, size
from lakeupsert.table.layout import partition_text
from lakeupsert.table.manifest import Changes

REASONS = 6
"""How many quarantine reasons have a colour of their own; the others share one."""
LONGEST = 10
"""How many partitions are shown of those that come first in something."""
LISTED = 100
"""How many rows a table has before it only counts the others."""
MONTHS = 36
"""How many months the calendar shows, the last ones."""
LANES = 32
"""How many workers the timeline shows."""
SIGNS = {"failed": "\N{MULTIPLICATION SIGN}", "lagging": "\N{LEFTWARDS ARROW}", "dirty": "\N{BULLET}"}
EVER = 10**7
AGES = [
    ("before the day", -EVER, -1),
    ("0", 0, 0),
    ("1", 1, 1),
    ("2 to 3", 2, 3),
    ("4 to 7", 4, 7),
    ("8 to 14", 8, 14),
    ("15 to 30", 15, 30),
    ("31 to 90", 31, 90),
    ("91 to 180", 91, 180),
    ("181 to 365", 181, 365),
    ("over 365", 366, EVER),
]
BY_RECEIPT = "batch, by its date of receipt"
NO_NIGHT = "No batch was appended yet."


def _attention(seen: Observed) -> Element:
    marked = [p for p in seen.partitions if p.marks]
    marked.sort(key=lambda p: ("failed" not in p.marks, "lagging" not in p.marks, p.name))
    rows = [(p.name, ", ".join(p.marks), p.reason or _meaning(p)) for p in marked[:LISTED]]
    return _figure(
        "What needs attention",
        "Partitions that are not as they should be, and why.",
        marked and _table(("partition", "state", "why"), rows, len(marked)),
        "Nothing: every batch is merged in every partition that it touches." if seen.nights else "Nothing yet.",
    )


def _meaning(partition: Partition) -> str:
    if "lagging" in partition.marks:
        return "readers see it without its newest batches"
    return f"batches up to {partition.last} touch it and are not all merged"


# ---------------------------------------------------------------- partitions


def _calendar(seen: Observed) -> Element:
    if not seen.by_date:
        return _most_touched(seen)
    most = max((p.times for p in seen.partitions), default=0)
    # Four shades over what there is: a table whose partitions are touched twice has two.
    bounds = sorted({-(-most * k // 4) for k in (1, 2, 3, 4)} - {0})
    days: dict[date, tuple[str, str, str]] = {}
    for p in seen.partitions:
        if p.day is not None:
            level = sum(p.times > b for b in [0, *bounds[:-1]])
            class_ = " ".join((f"h{level}", *p.marks[:1]))
            days[p.day] = (class_, SIGNS[p.marks[0]] if p.marks else "", _tip(p))
    months = sorted({(d.year, d.month) for d in days})[-MONTHS:]
    drawn = {d: v for d, v in days.items() if (d.year, d.month) in months}
    keys = [("h0", "0")]
    for level, (low, high) in enumerate(pairwise([0, *bounds]), start=1):
        keys.append((f"h{level}", f"{high}" if low + 1 == high else f"{low + 1} to {high}"))
    keys += [(mark, f"{SIGNS[mark]} {mark}") for mark in SIGNS]
    left_out = f" The months before {months[0][0]}-{months[0][1]:02d} are left out." if len(drawn) < len(days) else ""
    return _figure(
        f"Calendar of the partitions, by {seen.column}",
        f"How many of the batches touched each day's partition.{left_out}",
        days and e("div", legend(keys), e("div", calendar(drawn), class_="months"), _touched_table(seen)),
        "No partition yet.",
        wide=True,
    )


def _most_touched(seen: Observed) -> Element:
    return _figure(
        "Most touched partitions" + (f", by {seen.column}" if seen.column else ""),
        "How many of the batches touched each partition.",
        seen.partitions
        and bars(
            [
                Bar(p.value, p.times, (f"{p.times:,}", f"{p.last:,}", f"{p.rows:,}", ", ".join(p.marks) or "whole"))
                for p in _by_touches(seen)
            ],
            ("partition", "batches", "last batch", "rows", "state"),
        ),
        "No partition yet.",
        wide=True,
    )


def _touched_table(seen: Observed) -> Element:
    rows = [
        (p.value, f"{p.times:,}", f"{p.last:,}", f"{p.rows:,}", size(p.bytes), ", ".join(p.marks) or "whole")
        for p in _by_touches(seen)
    ]
    return _details(
        "The most touched ones",
        _table(("partition", ">batches", ">last batch", ">rows", ">size", "state"), rows, len(seen.partitions)),
    )


def _by_touches(seen: Observed) -> list[Partition]:
    return sorted(seen.partitions, key=lambda p: (-p.times, -p.last, p.name))[:LONGEST]


def _tip(p: Partition) -> str:
    marks = f"; {', '.join(p.marks)}" if p.marks else ""
    return f"{p.value}: touched by {_batches(p.times)}, last by batch {p.last}; {count(p.rows, 'row')}, {size(p.bytes)}{marks}"


# ---------------------------------------------------------------- merges


def _timeline(seen: Observed) -> Element:
    run = seen.last_run()
    by_worker: dict[str, list[Merge]] = defaultdict(list)
    for merge in run:
        if merge.seconds is not None:
            by_worker[merge.worker or "unknown worker"].append(merge)
    title = "Timeline of the last run, by worker"
    if not by_worker:
        untold = "Its versions don't say how long they took: an earlier lakeupsert wrote them."
        return _figure(title, "", None, untold if run else "No merge in these batches.", wide=True)
    spans = {worker: _laid(merges) for worker, merges in sorted(by_worker.items())}
    begin = min(s.began for of_it in spans.values() for s in of_it)
    end = max(s.ended for of_it in spans.values() for s in of_it)
    length = (end - begin).total_seconds()
    unit, per = next(
        (u, n)
        for u, n in (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0), ("ms", 0.001))
        if length > 2 * n or u == "ms"
    )
    drawn = {
        f"{worker}: {count(len(of_it), 'merge')}, {duration(sum(s.merge.took for s in of_it))}": [
            ((s.began - begin).total_seconds() / per, (s.ended - begin).total_seconds() / per, _told(s.merge))
            for s in of_it
        ]
        for worker, of_it in islice(spans.items(), LANES)
    }
    listed = sorted((s for of_it in spans.values() for s in of_it), key=lambda s: s.began)
    rows = [
        (
            s.merge.partition,
            worker,
            f"{s.began:%H:%M:%S.%f}"[:-3],
            f"{s.ended:%H:%M:%S.%f}"[:-3],
            f"{s.merge.batch:,}",
            f"{s.merge.rows:,}",
        )
        for s in listed[:LISTED]
        for worker in [s.merge.worker or "unknown worker"]
    ]
    more = f" {len(spans) - LANES:,} more workers are left out." if len(spans) > LANES else ""
    return _figure(
        title,
        f"Which partition was merged by whom from when to when: {count(len(listed), 'merge')} up to batch {run[-1].batch}, "
        f"begun {begin:%Y-%m-%d %H:%M:%S} UTC, {duration(length)} long. A run ends with a pause of "
        f"{duration(PAUSE.total_seconds())}, or the next batch. Partitions that were merged in one call share its time "
        f"evenly.{more}",
        e(
            "div",
            lanes(drawn, text="{:,.0f}".format, x=f"{unit} since the run's first merge began"),
            _details(
                "These merges", _table(("partition", "worker", "from", "to", ">batch", ">rows"), rows, len(listed))
            ),
        ),
        "",
        wide=True,
    )


@dataclass(frozen=True)
class _Span:
    began: datetime
    ended: datetime
    merge: Merge


def _laid(merges: Sequence[Merge]) -> list[_Span]:
    """A worker merges one partition after the other, and commits those of one call together: laid end to end, backwards."""
    spans: list[_Span] = []
    for merge in reversed(merges):
        ended = min(merge.ended, spans[-1].began) if spans and merge.worker else merge.ended
        spans.append(_Span(ended - timedelta(seconds=merge.took), ended, merge))
    return spans[::-1]


def _told(merge: Merge) -> str:
    took = duration(merge.took)
    return f"{merge.partition}, batch {merge.batch}: {took}, {count(merge.rows, 'row')}, {size(merge.bytes_written)} written"


def _slowest(seen: Observed) -> Element:
    slowest: dict[str, Merge] = {}
    for merge in sorted(seen.merges, key=lambda m: m.took):
        if merge.seconds is not None:
            slowest[merge.partition] = merge
    rows = sorted(slowest.values(), key=lambda m: -(m.took))[:LONGEST]
    return _figure(
        "Slowest partitions",
        f"The longest single merge of each{f': the first {LONGEST} of {len(slowest):,}' if len(slowest) > LONGEST else ''}. "
        "Partitions that were merged in one call share its time evenly.",
        rows
        and bars(
            [
                Bar(
                    partition_text(m.partition),
                    m.took,
                    (duration(m.took), f"{m.batch:,}", f"{m.rows:,}", size(m.bytes_written)),
                )
                for m in rows
            ],
            ("partition", "took", "batch", "rows", "written"),
        ),
        "No merge in these batches says how long it took.",
    )


# ---------------------------------------------------------------- nights


def _rows(seen: Observed) -> Element:
    nights = seen.nights
    groups = [
        [
            (
                n.rows - n.superseded,
                _pale("fill", n),
                f"{_called(n)}: {count(n.rows, 'row')} appended, {n.superseded:,} of them superseded in the batch",
            ),
            (n.superseded, _pale("fill2", n), f"{_called(n)}: {n.superseded:,} rows superseded in the batch"),
        ]
        for n in nights
    ]
    return _figure(
        "Rows appended per batch",
        f"Rows that each night accepted.{_withdrawn_note(nights)}",
        groups
        and e(
            "div",
            legend([("fill", "for the merge"), ("fill2", "superseded within the batch")]),
            columns(groups, _ticks(nights), text=_short, y="rows", x=BY_RECEIPT),
        ),
        NO_NIGHT,
    )


def _bytes(seen: Observed) -> Element:
    nights = seen.nights
    groups = [
        [
            (n.bytes_appended, _pale("fill2", n), f"{_called(n)}: {size(n.bytes_appended)} appended"),
            (
                n.bytes_written,
                _pale("fill", n),
                f"{_called(n)}: {size(n.bytes_written)} written by its merges{'' if n.whole else ', as far as they are known'}",
            ),
        ]
        for n in nights
    ]
    return _figure(
        "Bytes per batch",
        f"Compressed bytes that came, and that merging them wrote.{_withdrawn_note(nights)}",
        groups
        and e(
            "div",
            legend([("fill2", "appended"), ("fill", "written by merges")]),
            columns(groups, _ticks(nights), text=_axis_size, y="bytes", x=BY_RECEIPT, side_by_side=True),
        ),
        NO_NIGHT,
    )


def _amplification(seen: Observed) -> Element:
    nights = seen.nights
    points = [
        (a, f"{_called(n)}: {a:,.1f} bytes written for each appended") if (a := _factor(n)) is not None else None
        for n in nights
    ]
    unknown = sum(p is None and n.restored is None for p, n in zip(points, nights, strict=True))
    left_out = (
        f" Left out: {_batches(unknown)} not merged in every partition, or with versions that were trimmed."
        if unknown
        else ""
    )
    return _figure(
        "Write amplification per batch",
        f"Bytes written by merges for each byte appended.{left_out}",
        any(points)
        and line(
            points,
            _ticks(nights),
            text="{:,.0f}\N{MULTIPLICATION SIGN}".format,
            y="bytes written / bytes appended",
            x=BY_RECEIPT,
        ),
        "No batch of these is merged in every partition that it touches." if nights else NO_NIGHT,
    )


def _factor(night: Night) -> float | None:
    return night.bytes_written / night.bytes_appended if night.whole and night.bytes_appended else None


def _ages(seen: Observed) -> Element:
    total = sum(seen.ages.values())
    classes = [(label, sum(n for age, n in seen.ages.items() if low <= age <= high)) for label, low, high in AGES]
    used = [i for i, (_, rows) in enumerate(classes) if rows]
    return _figure(
        "Age of the data that comes",
        f"Days from a partition's {seen.column or 'date'} to the receipt of its rows.",
        total
        and bars(
            [
                Bar(label, rows, (f"{rows:,}", f"{rows / total:.1%}"))
                for label, rows in classes[min(used) : max(used) + 1]
            ],
            ("days late", "rows", "share"),
        ),
        NO_NIGHT if seen.by_date or not seen.nights else f"{seen.column} is no date, so rows have no age.",
    )


def _quarantine(seen: Observed) -> Element:
    nights = seen.nights
    totals: Counter[str] = Counter()
    for night in nights:
        totals.update(night.quarantined)
    reasons = [reason for reason, _ in totals.most_common()]
    class_ = {reason: f"c{min(i, REASONS)}" for i, reason in enumerate(reasons)}
    groups = [
        [
            (n.quarantined[r], _pale(class_[r], n), f"{_called(n)}: {n.quarantined[r]:,} {r}")
            for r in reasons
            if r in n.quarantined
        ]
        for n in nights
    ]
    entries = [(class_[r], f"{r} {totals[r]:,}") for r in reasons[:REASONS]]
    if others := reasons[REASONS:]:
        entries.append((f"c{REASONS}", f"others {sum(totals[r] for r in others):,}"))
    return _figure(
        "Quarantined rows per batch, by reason",
        f"Rows that were refused. They lie in _lakeupsert/quarantine/, with reason and place.{_withdrawn_note(nights)}",
        totals and e("div", legend(entries), columns(groups, _ticks(nights), text=_short, y="rows", x=BY_RECEIPT)),
        "No row was refused in these batches." if nights else NO_NIGHT,
    )


def _numbers(seen: Observed) -> Element:
    nights = seen.nights
    heads = [
        ">batch",
        "state",
        "received",
        ">partitions",
        ">rows",
        ">superseded",
        ">quarantined",
        *(f">{name}" for name in Changes.__struct_fields__),
        ">appended",
        ">written",
        ">factor",
        "id",
    ]
    rows = [
        (
            f"{n.number:,}",
            _state(n),
            f"{n.received:%Y-%m-%d %H:%M}",
            f"{n.touched:,}",
            f"{n.rows:,}",
            f"{n.superseded:,}",
            f"{sum(n.quarantined.values()):,}",
            *(f"{getattr(n.changes, name):,}" for name in n.changes.__struct_fields__),
            size(n.bytes_appended),
            size(n.bytes_written),
            "" if (a := _factor(n)) is None else f"{a:,.1f}",
            n.batch_id,
        )
        for n in reversed(nights)
    ]
    return _figure(
        "The batches in numbers",
        "Newest first. Struck through: a later restore withdrew the batch, and its rows do not count."
        if any(n.withdrawn for n in nights)
        else "Newest first.",
        rows and _table(heads, rows, len(rows), ["withdrawn" if n.withdrawn else None for n in reversed(nights)]),
        NO_NIGHT,
        wide=True,
    )


def _called(night: Night) -> str:
    state = f" ({_state(night)})" if _state(night) else ""
    return f"Batch {night.number}{state}, {night.received:%Y-%m-%d %H:%M}"


def _state(night: Night) -> str:
    """What people must know of a batch that is not a usual one."""
    if night.restored is not None:
        return f"restore to snapshot {night.restored.snapshot}"
    return "withdrawn" if night.withdrawn else ""


def _pale(class_: str, night: Night) -> str:
    """The CSS class of a night's bar."""
    return f"{class_} withdrawn" if night.withdrawn else class_


def _withdrawn_note(nights: Sequence[Night]) -> str:
    return " Pale: withdrawn by a restore." if any(n.withdrawn for n in nights) else ""


def _ticks(nights: Sequence[Night]) -> list[str]:
    return [f"{n.received:%m-%d}" for n in nights]


def _batches(n: int) -> str:
    return f"{n:,} batch{'' if n == 1 else 'es'}"


def _short(n: float) -> str:
    """A number for an axis: 12,000,000 would not fit."""
    return next(
        (f"{n / unit:,g}{letter}" for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if n >= unit), f"{n:g}"
    )


def _axis_size(n: float) -> str:
    return size(n).replace(".0 ", " ")


# ---------------------------------------------------------------- parts


def _figure(title: str, note: str, shown: Element | object, empty: str, wide: bool = False) -> Element:
    """``shown``, or ``empty`` in words where there is nothing to show."""
    return e(
        "section",
        e("h2", title),
        e("p", note, class_="note") if note else [],
        shown if isinstance(shown, Element) else e("p", empty, class_="empty"),
        class_="wide" if wide else None,
    )


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], total: int, row_classes: Sequence[str | None] = ()
) -> Element:
    """A head that begins with `>` aligns its column to the right; ``row_classes``: the CSS class of each row, if given."""
    classes = ["n" if head[0] == ">" else None for head in heads]
    named = [e("th", head.removeprefix(">"), class_=class_) for head, class_ in zip(heads, classes, strict=True)]
    body = [
        e(
            "tr",
            [e("td", cell, class_=class_ or breaking(cell, 40)) for cell, class_ in zip(row, classes, strict=True)],
            class_=row_class,
        )
        for row, row_class in zip(rows, row_classes or [None] * len(rows), strict=True)
    ]
    more = [e("p", f"{total - len(rows):,} more are left out.", class_="note")] if total > len(rows) else []
    return e("div", e("table", e("thead", e("tr", named)), e("tbody", body)), more, class_="scroll")


def _details(summary: str, shown: Element) -> Element:
    return e("details", e("summary", summary), shown)


FIGURES: list[Callable[[Observed], Element]] = [
    _attention,
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
