"""The page: one self-contained HTML file. It loads nothing, runs no script, and shows only what `ReportData` has."""

from collections.abc import Sequence
from importlib.resources import files
from xml.etree.ElementTree import Element

from lakeupsert.report.figures import FIGURES
from lakeupsert.report.html import document, e
from lakeupsert.report.nights import Night, ReportData
from lakeupsert.report.numbers import messages, size, when

# Browsers then refuse scripts and loads from anywhere, even if an escape were missing somewhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


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
    body = e("body", _header(name, data), e("main", [figure(data) for figure in FIGURES]))
    return document(e("html", head, body, lang="en"))


def _header(name: str, data: ReportData) -> Element:
    status = data.status
    if status.snapshot is None or status.published_at is None:
        published = "no snapshot yet"
    else:
        published = f"snapshot {status.snapshot}, published {when(status.published_at)}, up to batch {status.batch}"
    facts = {
        "rows": f"{status.rows:,}",
        "partitions": f"{status.partitions:,}",
        "size": size(status.bytes),
        "dirty": f"{status.dirty:,}",
        "lagging": f"{len(status.lagging):,}",
        "failed": f"{len(status.failed):,}",
        "quarantined rows": f"{status.quarantined:,}",
        "queue": messages(status.queue),
        **{
            name: "not known" if standing.behind is None else f"{standing.behind:,} behind"
            for name, standing in status.publishers.items()
        },
    }
    bad = {"failed"} if status.failed else set()
    bad |= {"lagging"} if status.lagging else set()
    bad |= {name for name, standing in status.publishers.items() if not standing.is_newest}
    return e(
        "header",
        e("h1", f"Table {name}"),
        e("p", f"As of {data.at:%Y-%m-%d %H:%M:%S} UTC: {published}."),
        e(
            "dl",
            [
                e(
                    "div",
                    e("dt", label),
                    e("dd", text),
                    class_="bad" if label in bad else "wide" if label == "queue" else None,
                )
                for label, text in facts.items()
            ],
        ),
        e("p", _span(data.nights)),
    )


def _span(nights: Sequence[Night]) -> str:
    if not nights:
        return "No batch was appended yet."
    first, last = nights[0], nights[-1]
    batches = (
        f"batch {last.number}"
        if first is last
        else f"the last {len(nights):,} batches, {first.number} to {last.number}"
    )
    exceptions = {
        "restored an earlier snapshot": sum(n.restored is not None for n in nights),
        "withdrawn": sum(n.withdrawn for n in nights),
    }
    note = ", ".join(f"{number:,} {kind}" for kind, number in exceptions.items() if number)
    days = sorted({f"{first.received:%Y-%m-%d}", f"{last.received:%Y-%m-%d}"})
    return (
        f"The figures show {batches}{f' ({note})' if note else ''}, received {' to '.join(days)}. "
        f"{'Older batches are not shown. ' if first.number > 1 else ''}"
        "All times are UTC; 1 kB is 1,000 bytes."
    )
