"""Charts: SVG with positions in percent and text in pixels, sharp and readable at any width."""

from calendar import Calendar, month_name
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import cycle, pairwise
from math import floor, log10
from xml.etree.ElementTree import Element

from lakeupsert.report.html import e

LANE = 26
"""Height of a worker's line in the timeline, in pixels."""
WIDEST = 10.0
"""A bar is at most this wide, in percent of the chart: the single bar of a first night would look like a block."""
MANY = 60
"""From so many bars on, they touch, and points are small: on a phone there is no room for gaps."""
LABELS = 6
"""Labels below a chart that fit on a phone."""
CELL = 20
"""Side of a day in the calendar before scaling, in pixels."""


@dataclass(frozen=True)
class Mark:
    """A part of a column, or the point of a line (without a CSS class)."""

    value: float
    tip: str
    class_: str = ""


@dataclass(frozen=True)
class Span:
    """A bar in a lane, from ``start`` to ``end``."""

    start: float
    end: float
    tip: str


@dataclass(frozen=True)
class Day:
    """A day of the calendar. ``sign`` replaces its number, unless empty."""

    class_: str
    sign: str
    tip: str


@dataclass(frozen=True)
class Tick:
    """A place on the axis. ``date`` is written above where it changes. ``event``: something that happened there, if any."""

    label: str
    date: str
    event: str = ""


def columns(bars: Sequence[Sequence[Mark]], ticks: Sequence[Tick], *, text: Callable[[float], str], y: str) -> Element:
    """A bar for each tick, whose parts are stacked."""
    top, lines = _scale(max(sum(part.value for part in parts) for parts in bars))
    wide = min((1 if len(bars) > MANY else 0.76) * 100 / len(bars), WIDEST)
    marks = []
    for i, parts in enumerate(bars):
        level = 0.0
        for part in parts:
            high = 100 * part.value / top
            marks.append(_rect(_at(i, ticks) - wide / 2, 100 - level - high, wide, high, part.class_, part.tip))
            level += high
    return _plot(marks, top, lines, ticks, text=text, y=y)


def line(points: Sequence[Mark | None], ticks: Sequence[Tick], *, text: Callable[[float], str], y: str) -> Element:
    """A point for each tick, joined to the previous point if there is one."""
    top, lines = _scale(max(p.value for p in points if p), whole=False)
    at = [(_pc(_at(i, ticks)), _pc(100 - 100 * p.value / top), p.tip) if p else None for i, p in enumerate(points)]
    marks = [e("line", x1=p[0], y1=p[1], x2=q[0], y2=q[1], class_="line") for p, q in pairwise(at) if p and q]
    radius = 1.5 if len(points) > MANY else 4
    marks += [e("circle", e("title", p[2]), cx=p[0], cy=p[1], r=radius, class_="dot") for p in at if p]
    return _plot(marks, top, lines, ticks, text=text, y=y)


@dataclass(frozen=True)
class Bar:
    """A row of `bars`. ``value`` is the length of the bar, ``cells`` are the texts after it."""

    label: str
    value: float
    cells: tuple[str, ...]
    class_: str = "fill"


def bars(rows: Sequence[Bar], heads: Sequence[str]) -> Element:
    """A table with a bar in each row. ``heads``: headings of the label and of the cells."""
    most = max(row.value for row in rows) or 1
    return e(
        "table",
        e("thead", e("tr", e("th", heads[0]), e("th"), *(e("th", h, class_="n") for h in heads[1:]))),
        e(
            "tbody",
            [
                e(
                    "tr",
                    e("th", row.label, title=row.label),
                    e(
                        "td",
                        e("svg", _rect(0, 15, 100 * row.value / most, 70, row.class_, ""), aria_hidden="true"),
                        class_="bar",
                    ),
                    *(e("td", cell, class_="n") for cell in row.cells),
                )
                for row in rows
            ],
        ),
        class_="bars",
    )


def lanes(rows: Mapping[str, Sequence[Span]], *, text: Callable[[float], str], x: str) -> Element:
    """A line with the spans of each name, in one unit of time from a common start."""
    top, lines = _scale(max(span.end for spans in rows.values() for span in spans))
    lined = []
    for name, spans in rows.items():
        shades = cycle(["fill", "fill2"])  # so that neighbours look different
        drawn = [
            _rect(100 * span.start / top, 8, 100 * (span.end - span.start) / top, 84, shade, span.tip)
            for shade, span in zip(shades, spans, strict=False)
        ]
        grid = [
            e("line", x1=_pc(100 * v / top), x2=_pc(100 * v / top), y1="0", y2="100%", class_="grid") for v in lines
        ]
        lined += [
            e("div", name, class_="lane"),
            e("svg", grid, drawn, height=LANE, width="100%", role="img", aria_label=name),
        ]
    edges = {0.0: "first", top: "last"}
    at = [e("span", text(v), style=f"left:{_pc(100 * v / top)}", class_=edges.get(v)) for v in lines]
    return e("div", *lined, e("div", at, class_="x"), e("div", x, class_="unit end"), class_="lanes")


def calendar(days: Mapping[date, Day]) -> list[Element]:
    """The months that contain ``days``."""
    return [_month(year, month, days) for year, month in sorted({(d.year, d.month) for d in days})]


def legend(entries: Sequence[tuple[str, str]]) -> Element:
    """``entries``: a CSS class and its meaning."""
    return e(
        "p",
        [
            e("span", e("svg", _rect(0, 0, 100, 100, class_, ""), class_="key", aria_hidden="true"), text)
            for class_, text in entries
        ],
        class_="legend",
    )


def _month(year: int, month: int, days: Mapping[date, Day]) -> Element:
    weeks = Calendar().monthdayscalendar(year, month)
    drawn = [e("text", f"{month_name[month]} {year}", x=0, y=11, class_="month")]
    drawn += [
        e("text", name, x=CELL * (i + 0.45), y=25, class_="weekday", text_anchor="middle")
        for i, name in enumerate("MTWTFSS")
    ]
    for row, week in enumerate(weeks):
        for i, number in enumerate(week):
            if number == 0:
                continue
            day = days.get(date(year, month, number), Day("none", "", ""))
            x, y = CELL * i, CELL * row + 30
            cell = [e("title", day.tip)] if day.tip else []
            cell.append(e("rect", x=x + 0.75, y=y + 0.75, width=CELL - 3, height=CELL - 3, rx=3))
            cell.append(e("text", day.sign or str(number), x=x + CELL / 2 - 0.75, y=y + 12.5, text_anchor="middle"))
            drawn.append(e("g", cell, class_=f"day {day.class_}"))
    return e(
        "svg",
        drawn,
        viewBox=f"0 0 {7 * CELL} {len(weeks) * CELL + 30}",
        role="img",
        aria_label=f"{month_name[month]} {year}",
    )


def _plot(
    marks: Sequence[Element],
    top: float,
    lines: Sequence[float],
    ticks: Sequence[Tick],
    *,
    text: Callable[[float], str],
    y: str,
) -> Element:
    grid = [
        e("line", x1="0", x2="100%", y1=_pc(100 - 100 * v / top), y2=_pc(100 - 100 * v / top), class_="grid")
        for v in lines
    ]
    events = [
        e("line", e("title", tick.event), x1=_pc(_at(i, ticks)), x2=_pc(_at(i, ticks)), y1=0, y2="100%", class_="event")
        for i, tick in enumerate(ticks)
        if tick.event
    ]
    every = -(-len(ticks) // LABELS)
    labels, date = [], ""
    for i in range((len(ticks) - 1) % every, len(ticks), every):  # the newest one has a label
        shown = ticks[i].date if ticks[i].date != date else "\N{NO-BREAK SPACE}"
        labels.append(e("span", shown, e("br"), e("b", ticks[i].label), style=f"left:{_pc(_at(i, ticks))}"))
        date = ticks[i].date
    return e(
        "div",
        e("div", y, class_="unit"),
        e("div", [e("span", text(v), style=f"bottom:{_pc(100 * v / top)}") for v in lines], class_="y"),
        e("svg", grid, marks, events, width="100%", height="100%", role="img", aria_label=y),
        e("div", labels, class_="x"),
        class_="plot",
    )


def _at(i: int, ticks: Sequence[Tick]) -> float:
    """Where a tick is, in percent of the axis."""
    return 100 * (i + 0.5) / len(ticks)


def _rect(x: float, y: float, width: float, height: float, class_: str, tip: str) -> Element:
    title = [e("title", tip)] if tip else []
    return e("rect", title, x=_pc(x), y=_pc(y), width=_pc(width), height=_pc(height), class_=class_)


def _scale(most: float, *, whole: bool = True) -> tuple[float, list[float]]:
    """The end of an axis up to ``most``, and its grid lines: round numbers, ``whole`` or not, at most 5 above 0."""
    digits = floor(log10(most)) if most else 0
    step = 10.0 ** (max(0, digits - 1) if whole else digits - 1)
    step *= next(n for n in (1, 2, 5, 10, 20) if step * n * 5 >= most)
    lines = max(1, -int(-most // step))
    return float(step * lines), [float(step * i) for i in range(lines + 1)]


def _pc(percent: float) -> str:
    return f"{percent:.3f}".rstrip("0").rstrip(".") + "%"
