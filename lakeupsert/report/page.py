"""The page: one self-contained HTML file. It loads nothing, runs no script, and shows only what `ReportData` has."""

from collections.abc import Sequence
from datetime import timedelta
from importlib.resources import files
from xml.etree.ElementTree import Element

from lakeupsert.phrases import duration, size, when
from lakeupsert.report.attention import Finding, findings, verdict
from lakeupsert.report.figures import FIGURES, Line
from lakeupsert.report.html import document, e, prose
from lakeupsert.report.nights import ReportData

# Browsers then refuse scripts and loads from anywhere, even if an escape were missing somewhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
LISTED = 20
"""How many findings the page lists."""


def page(name: str, data: ReportData) -> str:
    """The page as text, to be written as UTF-8. ``name`` is the table's name."""
    style = files("lakeupsert.report").joinpath("page.css").read_text("utf-8")
    head = e(
        "head",
        e("meta", charset="utf-8"),
        e("meta", name="viewport", content="width=device-width, initial-scale=1"),
        e("meta", name="color-scheme", content="light dark"),
        e("meta", http_equiv="Content-Security-Policy", content=POLICY),
        e("title", f"{name}: lakeupsert report, {data.at:%Y-%m-%d}"),
        e("style", style),
    )
    figures = [figure(data) for figure in FIGURES]
    drawn = [one for one in figures if isinstance(one, Element)]
    # Problems come first, then figures.
    tiles = e("dl", [e("div", e("dt", label), e("dd", text), class_=class_) for label, text, class_ in _tiles(data)])
    body = e("body", _header(name, data), _attention(name, data), tiles, e("main", drawn, _lines(figures)))
    return document(e("html", head, body, lang="en"))


def _header(name: str, data: ReportData) -> Element:
    return e("header", e("h1", f"Table {name}"), _finding("div", verdict(name, data.status, data)), e("p", _span(data)))


def _finding(tag: str, one: Finding) -> Element:
    # Every command is a block of its own, which one click or tap selects.
    return e(
        tag,
        e("strong", one.what),
        e("p", *prose(one.why)) if one.why else [],
        e("p", *prose(f"Next: {one.remedy}.")) if one.remedy else [],
        [e("pre", e("code", command)) for command in one.commands],
        class_=f"finding {one.level}",
    )


def _attention(name: str, data: ReportData) -> list[Element]:
    found = findings(name, data)
    more = [e("p", f"{len(found) - LISTED:,} more are left out.", class_="note")] if len(found) > LISTED else []
    listed = e("ul", [_finding("li", one) for one in found[:LISTED]])
    return [e("section", e("h2", "What needs attention"), listed, more, class_="wide")] if found else []


def _tiles(data: ReportData) -> list[tuple[str, str, str | None]]:
    """Figures at first sight: label, text, CSS class."""
    status, queue = data.status, data.status.queue
    messages = (None, None, None) if queue is None else (queue.visible, queue.leased, queue.dead)
    return [
        ("newest data", "none" if data.age is None else _age(data.age), None),
        ("held back by", status.freshness.held_text or "nothing", "warn" if status.freshness.held_by else None),
        ("rows", f"{status.rows:,}", None),
        ("partitions", f"{status.partitions:,}", None),
        ("size", size(status.bytes), None),
        ("dirty", f"{status.dirty:,}", None),
        ("lagging", f"{len(status.lagging):,}", "bad" if status.lagging else None),
        ("failed", f"{len(status.failed):,}", "bad" if status.failed else None),
        ("quarantined", f"{status.quarantined:,}", "warn" if status.quarantined else None),
        *(
            (label, "unknown" if n is None else f"{n:,}", "bad" if n and label == "dead letters" else None)
            for label, n in zip(("waiting", "in work", "dead letters"), messages, strict=True)
        ),
        *(
            (
                publisher,
                "not known" if standing.behind is None else f"{standing.behind:,} behind",
                None if standing.is_newest else "warn",
            )
            for publisher, standing in status.publishers.items()
        ),
    ]


def _age(age: timedelta) -> str:
    seconds = max(0.0, age.total_seconds())
    return duration(seconds if seconds < 60 else seconds // 60 * 60)


def _span(data: ReportData) -> str:
    numbers = [n.number for n in data.nights]
    batches = (
        f"Batch {numbers[0]}"
        if len(numbers) == 1
        else f"Batches {numbers[0]} to {numbers[-1]}"
        if numbers
        else "No batch"
    )
    older = " Older batches are not shown." if data.older else ""
    return f"{batches} as of {when(data.at)}.{older} 1 kB is 1,000 bytes."


def _lines(figures: Sequence[Element | Line]) -> list[Element]:
    titles: dict[str, list[str]] = {}
    for one in figures:
        if isinstance(one, Line):
            titles.setdefault(one.text, []).append(one.title)
    lines = [e("p", e("b", "; ".join(names)), f": {text}") for text, names in titles.items()]
    return [e("section", lines, class_="wide lines")] if lines else []
