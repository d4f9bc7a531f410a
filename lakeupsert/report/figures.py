"""The figures of the page. Each has a title, a note with its unit, and a text for when there is nothing to show."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from itertools import islice, pairwise
from xml.etree.ElementTree import Element

from lakeupsert.report.charts import Bar, Day, Mark, Span, bars, breaking, calendar, columns, lanes, legend, line
from lakeupsert.report.html import e
from lakeupsert.report.nights import PAUSE, Merge, Night, Partition, ReportData
from lakeupsert.report.numbers import count, duration, size
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
LANES = 32
"""How many workers the timeline shows."""
SIGNS = {"failed": "\N{MULTIPLICATION SIGN}", "lagging": "\N{LEFTWARDS ARROW}", "dirty": "\N{BULLET}"}
UNLIMITED = 10**7
AGES = [
    ("before the day", -UNLIMITED, -1),
    ("0", 0, 0),
    ("1", 1, 1),
    ("2 to 3", 2, 3),
    ("4 to 7", 4, 7),
    ("8 to 14", 8, 14),
    ("15 to 30", 15, 30),
    ("31 to 90", 31, 90),
    ("91 to 180", 91, 180),
    ("181 to 365", 181, 365),
    ("over 365", 366, UNLIMITED),
]
BY_RECEIPT = "batch, by its date of receipt"
NO_NIGHT = "No batch was appended yet."


def _attention(data: ReportData) -> Element:
    marked = [p for p in data.partitions if p.marks]
    marked.sort(key=lambda p: ("failed" not in p.marks, "lagging" not in p.marks, p.name))
    rows = [(p.name, ", ".join(p.marks), p.reason or _explain_mark(p)) for p in marked[:LISTED]]
    return _figure(
        "What needs attention",
        "Partitions that failed, lag behind or are not merged yet, and why.",
        marked and _table(("partition", "state", "why"), rows, len(marked)),
        "Nothing: every batch is merged in every partition that it touches." if data.nights else "Nothing yet.",
    )


def _explain_mark(partition: Partition) -> str:
    if "lagging" in partition.marks:
        return "readers see it without its newest batches"
    return f"not all batches up to {partition.last} that touch it are merged"


# ---------------------------------------------------------------- partitions


def _calendar(data: ReportData) -> Element:
    if not data.by_date:
        return _most_touched(data)
    most = max((p.times for p in data.partitions), default=0)
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
    keys += [(mark, f"{SIGNS[mark]} {mark}") for mark in SIGNS]
    left_out = f" Months before {months[0][0]}-{months[0][1]:02d} are left out." if len(shown) < len(days) else ""
    return _figure(
        f"Calendar of the partitions, by {data.column}",
        f"How many of the batches touched each day's partition.{left_out}",
        days and e("div", legend(keys), e("div", calendar(shown), class_="months"), _touched_table(data)),
        "No partition yet.",
        wide=True,
    )


def _most_touched(data: ReportData) -> Element:
    return _figure(
        "Most touched partitions" + (f", by {data.column}" if data.column else ""),
        "How many of the batches touched each partition.",
        data.partitions
        and bars(
            [
                Bar(p.value, p.times, (f"{p.times:,}", f"{p.last:,}", f"{p.rows:,}", ", ".join(p.marks) or "whole"))
                for p in _by_touches(data)
            ],
            ("partition", "batches", "last batch", "rows", "state"),
        ),
        "No partition yet.",
        wide=True,
    )


def _touched_table(data: ReportData) -> Element:
    rows = [
        (p.value, f"{p.times:,}", f"{p.last:,}", f"{p.rows:,}", size(p.bytes), ", ".join(p.marks) or "whole")
        for p in _by_touches(data)
    ]
    return _details(
        "Most touched partitions",
        _table(("partition", ">batches", ">last batch", ">rows", ">size", "state"), rows, len(data.partitions)),
    )


def _by_touches(data: ReportData) -> list[Partition]:
    return sorted(data.partitions, key=lambda p: (-p.times, -p.last, p.name))[:RANKED]


def _partition_tip(p: Partition) -> str:
    marks = f"; {', '.join(p.marks)}" if p.marks else ""
    return f"{p.value}: touched by {_batches(p.times)}, last by batch {p.last}; {count(p.rows, 'row')}, {size(p.bytes)}{marks}"


# ---------------------------------------------------------------- merges


def _timeline(data: ReportData) -> Element:
    run = data.last_run()
    by_worker: dict[str, list[Merge]] = defaultdict(list)
    for merge in run:
        if merge.seconds is not None:
            by_worker[merge.worker or "unknown worker"].append(merge)
    title = "Timeline of the last run, by worker"
    if not by_worker:
        no_times = "The manifests don't say how long they took: an earlier lakeupsert wrote them."
        return _figure(title, "", None, no_times if run else "No merge in these batches.", wide=True)
    spans = {worker: _merge_spans(merges) for worker, merges in sorted(by_worker.items())}
    in_order = sorted((s for of_worker in spans.values() for s in of_worker), key=lambda s: s.began)
    begin, end = in_order[0].began, max(s.ended for s in in_order)
    length = (end - begin).total_seconds()
    unit, per = next(
        (u, n)
        for u, n in (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0), ("ms", 0.001))
        if length > 2 * n or u == "ms"
    )
    bars_of_worker = {
        f"{worker}: {count(len(of_worker), 'merge')}, {duration(sum(s.merge.took for s in of_worker))}": [
            Span((s.began - begin).total_seconds() / per, (s.ended - begin).total_seconds() / per, _merge_tip(s.merge))
            for s in of_worker
        ]
        for worker, of_worker in islice(spans.items(), LANES)
    }
    more = f" {len(spans) - LANES:,} more workers are left out." if len(spans) > LANES else ""
    return _figure(
        title,
        f"When each worker merged which partition: {count(len(in_order), 'merge')} up to batch {run[-1].batch}, "
        f"from {begin:%Y-%m-%d %H:%M:%S} UTC, {duration(length)} in total. A run ends at a pause of "
        f"{duration(PAUSE.total_seconds())}, or at the next batch. Partitions merged in one call share its time "
        f"evenly.{more}",
        e(
            "div",
            lanes(bars_of_worker, text="{:,.0f}".format, x=f"{unit} since the start of the run's first merge"),
            _details("These merges", _merge_table(in_order)),
        ),
        "",
        wide=True,
    )


@dataclass(frozen=True)
class _MergeSpan:
    began: datetime
    ended: datetime
    merge: Merge


def _merge_table(spans: Sequence[_MergeSpan]) -> Element:
    rows = [
        (
            s.merge.partition,
            s.merge.worker or "unknown worker",
            f"{s.began:%H:%M:%S.%f}"[:-3],
            f"{s.ended:%H:%M:%S.%f}"[:-3],
            f"{s.merge.batch:,}",
            f"{s.merge.rows:,}",
        )
        for s in spans[:LISTED]
    ]
    return _table(("partition", "worker", "from", "to", ">batch", ">rows"), rows, len(spans))


def _merge_spans(merges: Sequence[Merge]) -> list[_MergeSpan]:
    """The times of a worker's merges, placed one before the other from the last one on.

    A worker merges one partition after the other, but commits the partitions of one call together.
    """
    spans: list[_MergeSpan] = []
    for merge in reversed(merges):
        ended = min(merge.ended, spans[-1].began) if spans and merge.worker else merge.ended
        spans.append(_MergeSpan(ended - timedelta(seconds=merge.took), ended, merge))
    return spans[::-1]


def _merge_tip(merge: Merge) -> str:
    took = duration(merge.took)
    return f"{merge.partition}, batch {merge.batch}: {took}, {count(merge.rows, 'row')}, {size(merge.bytes_written)} written"


def _slowest(data: ReportData) -> Element:
    slowest: dict[str, Merge] = {}
    for merge in sorted(data.merges, key=lambda m: m.took):
        if merge.seconds is not None:
            slowest[merge.partition] = merge
    rows = sorted(slowest.values(), key=lambda m: -(m.took))[:RANKED]
    return _figure(
        "Slowest partitions",
        f"The longest single merge of each{f': the first {RANKED} of {len(slowest):,}' if len(slowest) > RANKED else ''}. "
        "Partitions merged in one call share its time evenly.",
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


def _rows(data: ReportData) -> Element:
    nights = data.nights
    groups = [
        [
            Mark(
                n.rows - n.superseded,
                f"{_batch_title(n)}: {count(n.rows, 'row')} appended, {n.superseded:,} of them superseded in the batch",
                _bar_class("fill", n),
            ),
            Mark(
                n.superseded,
                f"{_batch_title(n)}: {count(n.superseded, 'row')} superseded in the batch",
                _bar_class("fill2", n),
            ),
        ]
        for n in nights
    ]
    return _figure(
        "Rows appended per batch",
        f"Accepted rows of each night.{_withdrawn_note(nights)}",
        groups
        and e(
            "div",
            legend([("fill", "to be merged"), ("fill2", "superseded within the batch")]),
            columns(groups, _ticks(nights), text=_axis_number, y="rows", x=BY_RECEIPT),
        ),
        NO_NIGHT,
    )


def _bytes(data: ReportData) -> Element:
    nights = data.nights
    groups = [
        [
            Mark(n.bytes_appended, f"{_batch_title(n)}: {size(n.bytes_appended)} appended", _bar_class("fill2", n)),
            Mark(
                n.bytes_written,
                f"{_batch_title(n)}: {size(n.bytes_written)} written by {'' if n.whole else 'known '}merges",
                _bar_class("fill", n),
            ),
        ]
        for n in nights
    ]
    return _figure(
        "Bytes per batch",
        f"Compressed bytes appended, and written by the merges of each batch.{_withdrawn_note(nights)}",
        groups
        and e(
            "div",
            legend([("fill2", "appended"), ("fill", "written by merges")]),
            columns(groups, _ticks(nights), text=_axis_size, y="bytes", x=BY_RECEIPT, side_by_side=True),
        ),
        NO_NIGHT,
    )


def _amplification(data: ReportData) -> Element:
    nights = data.nights
    points = [
        Mark(a, f"{_batch_title(n)}: {a:,.1f} bytes written per byte appended")
        if (a := _factor(n)) is not None
        else None
        for n in nights
    ]
    unknown = sum(p is None and n.restored is None for p, n in zip(points, nights, strict=True))
    left_out = (
        f" Left out: {_batches(unknown)} not merged in every partition, or with trimmed versions." if unknown else ""
    )
    return _figure(
        "Write amplification per batch",
        f"Bytes that merges wrote per byte appended.{left_out}",
        any(points)
        and line(
            points,
            _ticks(nights),
            text="{:,.0f}\N{MULTIPLICATION SIGN}".format,
            y="bytes written / bytes appended",
            x=BY_RECEIPT,
        ),
        "None of these batches is merged in every partition that it touches." if nights else NO_NIGHT,
    )


def _factor(night: Night) -> float | None:
    return night.bytes_written / night.bytes_appended if night.whole and night.bytes_appended else None


def _ages(data: ReportData) -> Element:
    total = sum(data.ages.values())
    classes = [(label, sum(n for age, n in data.ages.items() if low <= age <= high)) for label, low, high in AGES]
    used = [i for i, (_, rows) in enumerate(classes) if rows]
    return _figure(
        "Age of the data that comes",
        f"Days from a partition's {data.column or 'date'} to the receipt of its rows.",
        total
        and bars(
            [
                Bar(label, rows, (f"{rows:,}", f"{rows / total:.1%}"))
                for label, rows in classes[min(used) : max(used) + 1]
            ],
            ("days late", "rows", "share"),
        ),
        NO_NIGHT if data.by_date or not data.nights else f"{data.column} is not a date, so rows have no age.",
    )


def _quarantine(data: ReportData) -> Element:
    nights = data.nights
    totals: Counter[str] = Counter()
    for night in nights:
        totals.update(night.quarantined)
    reasons = [reason for reason, _ in totals.most_common()]
    class_ = {reason: f"c{min(i, REASONS)}" for i, reason in enumerate(reasons)}
    groups = [
        [
            Mark(n.quarantined[r], f"{_batch_title(n)}: {n.quarantined[r]:,} {r}", _bar_class(class_[r], n))
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
        f"Refused rows. They are in _lakeupsert/quarantine/, with reason and place.{_withdrawn_note(nights)}",
        totals
        and e("div", legend(entries), columns(groups, _ticks(nights), text=_axis_number, y="rows", x=BY_RECEIPT)),
        "No row was refused in these batches." if nights else NO_NIGHT,
    )


def _numbers(data: ReportData) -> Element:
    nights = data.nights
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
        "Newest first. Struck through: a later restore withdrew the batch, so its rows do not count."
        if any(n.withdrawn for n in nights)
        else "Newest first.",
        rows and _table(heads, rows, len(rows), ["withdrawn" if n.withdrawn else None for n in reversed(nights)]),
        NO_NIGHT,
        wide=True,
    )


def _batch_title(night: Night) -> str:
    state = f" ({_state(night)})" if _state(night) else ""
    return f"Batch {night.number}{state}, {night.received:%Y-%m-%d %H:%M}"


def _state(night: Night) -> str:
    """The state of a batch that is not a usual one."""
    if night.restored is not None:
        return f"restore to snapshot {night.restored.snapshot}"
    return "withdrawn" if night.withdrawn else ""


def _bar_class(class_: str, night: Night) -> str:
    """The CSS class of a bar, pale if the batch was withdrawn."""
    return f"{class_} withdrawn" if night.withdrawn else class_


def _withdrawn_note(nights: Sequence[Night]) -> str:
    return " Pale: withdrawn by a restore." if any(n.withdrawn for n in nights) else ""


def _ticks(nights: Sequence[Night]) -> list[str]:
    return [f"{n.received:%m-%d}" for n in nights]


def _batches(n: int) -> str:
    return f"{n:,} batch{'' if n == 1 else 'es'}"


def _axis_number(n: float) -> str:
    """A short number for an axis, where 12,000,000 would not fit."""
    return next(
        (f"{n / unit:,g}{letter}" for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if n >= unit), f"{n:g}"
    )


def _axis_size(n: float) -> str:
    return size(n).replace(".0 ", " ")


# ---------------------------------------------------------------- parts


def _figure(title: str, note: str, content: Element | object, empty: str, *, wide: bool = False) -> Element:
    """A section with ``content``, or with the text ``empty`` if ``content`` is not an element."""
    return e(
        "section",
        e("h2", title),
        e("p", note, class_="note") if note else [],
        content if isinstance(content, Element) else e("p", empty, class_="empty"),
        class_="wide" if wide else None,
    )


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], total: int, row_classes: Sequence[str | None] = ()
) -> Element:
    """A heading that starts with `>` aligns its column to the right. ``row_classes``: the CSS class of each row, if given."""
    classes = ["n" if head[0] == ">" else None for head in heads]
    headings = [e("th", head.removeprefix(">"), class_=class_) for head, class_ in zip(heads, classes, strict=True)]
    body = [
        e(
            "tr",
            [e("td", cell, class_=class_ or breaking(cell, 40)) for cell, class_ in zip(row, classes, strict=True)],
            class_=row_class,
        )
        for row, row_class in zip(rows, row_classes or [None] * len(rows), strict=True)
    ]
    more = [e("p", f"{total - len(rows):,} more are left out.", class_="note")] if total > len(rows) else []
    return e("div", e("table", e("thead", e("tr", headings)), e("tbody", body)), more, class_="scroll")


def _details(summary: str, content: Element) -> Element:
    return e("details", e("summary", summary), content)


FIGURES: list[Callable[[ReportData], Element]] = [
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
