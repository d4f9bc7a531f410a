"""Charts: SVG with positions in percent and text in pixels, sharp and readable at any width."""

from calendar import Calendar, month_name
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import cycle, pairwise
from xml.etree.ElementTree import Element

from lakeupsert.report.html import e

LANE = 26
"""Height of a worker's line in the timeline, in pixels."""
FEWEST = 10
"""A chart has room for at least this many bars, because a single bar as wide as the chart looks like a block."""
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


def columns(
    bars: Sequence[Sequence[Mark]],
    ticks: Sequence[str],
    *,
    text: Callable[[float], str],
    y: str,
    x: str,
    side_by_side: bool = False,
) -> Element:
    """A group of bars for each tick, stacked or ``side_by_side``."""
    most = max((max if side_by_side else sum)(bar.value for bar in group) for group in bars if group)
    top, lines = _scale(most)
    width = 100 / max(len(bars), FEWEST)
    marks = []
    for i, group in enumerate(bars):
        left, wide, level = (i + 0.12) * width, 0.76 * width, 0.0
        for bar in group:
            if side_by_side:
                wide, level = 0.76 * width / len(group), 0.0
            high = 100 * bar.value / top
            marks.append(_rect(left, 100 - level - high, wide, high, bar.class_, bar.tip))
            if side_by_side:
                left += wide
            level += high
    return _plot(marks, top, lines, ticks, text=text, y=y, x=x)


def line(
    points: Sequence[Mark | None], ticks: Sequence[str], *, text: Callable[[float], str], y: str, x: str
) -> Element:
    """A point for each tick, joined to the previous point if there is one."""
    top, lines = _scale(max(p.value for p in points if p))
    at = [(100 * (i + 0.5) / max(len(points), FEWEST), p) for i, p in enumerate(points)]
    marks = [
        e(
            "line",
            x1=_pc(x1),
            y1=_pc(100 - 100 * p.value / top),
            x2=_pc(x2),
            y2=_pc(100 - 100 * q.value / top),
            class_="line",
        )
        for (x1, p), (x2, q) in pairwise(at)
        if p and q
    ]
    marks += [
        e("circle", e("title", p.tip), cx=_pc(x), cy=_pc(100 - 100 * p.value / top), r=4, class_="dot")
        for x, p in at
        if p
    ]
    return _plot(marks, top, lines, ticks, text=text, y=y, x=x)


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
                    e("th", row.label, class_=breaking(row.label), title=row.label),
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


def breaking(text: str, longest: int = 24) -> str:
    """The CSS class of a text. Up to ``longest`` letters it stays on one line; otherwise `2020-01-01` would break at a hyphen."""
    return "short" if len(text) <= longest else "long"


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
    at = [e("span", text(v), style=f"left:{_pc(100 * v / top)}", class_=_edge(v / top)) for v in lines]
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
        "svg", drawn, viewBox=f"0 0 {7 * CELL} {6 * CELL + 30}", role="img", aria_label=f"{month_name[month]} {year}"
    )


def _plot(
    marks: Sequence[Element],
    top: float,
    lines: Sequence[float],
    ticks: Sequence[str],
    *,
    text: Callable[[float], str],
    y: str,
    x: str,
) -> Element:
    grid = [
        e("line", x1="0", x2="100%", y1=_pc(100 - 100 * v / top), y2=_pc(100 - 100 * v / top), class_="grid")
        for v in lines
    ]
    every = -(-len(ticks) // 6)  # six labels fit on a phone
    labelled = [(100 * (i + 0.5) / max(len(ticks), FEWEST), tick) for i, tick in enumerate(ticks) if i % every == 0]
    return e(
        "div",
        e("div", y, class_="unit"),
        e("div", [e("span", text(v), style=f"bottom:{_pc(100 * v / top)}") for v in lines], class_="y"),
        e("svg", grid, marks, width="100%", height="100%", role="img", aria_label=y),
        e("div", [e("span", tick, style=f"left:{_pc(at)}") for at, tick in labelled], class_="x"),
        e("div", x, class_="unit end"),
        class_="plot",
    )


def _rect(x: float, y: float, width: float, height: float, class_: str, tip: str) -> Element:
    title = [e("title", tip)] if tip else []
    return e("rect", title, x=_pc(x), y=_pc(y), width=_pc(width), height=_pc(height), class_=class_)


def _scale(most: float) -> tuple[float, list[float]]:
    """The end of an axis up to ``most``, and its grid lines: round whole numbers, at most 5 above 0."""
    step = 10 ** max(0, len(f"{most:.0f}") - 2)
    step *= next(n for n in (1, 2, 5, 10, 20) if step * n * 5 >= most)
    lines = max(1, -int(-most // step))
    return float(step * lines), [float(step * i) for i in range(lines + 1)]


def _edge(share: float) -> str | None:
    return "first" if share == 0 else "last" if share == 1 else None


def _pc(percent: float) -> str:
    return f"{percent:.3f}".rstrip("0").rstrip(".") + "%"
