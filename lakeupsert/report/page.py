"""The page: one HTML file that stands by itself. It loads nothing, runs no script, and is drawn from `Observed` alone."""

from collections.abc import Sequence
from importlib.resources import files
from xml.etree.ElementTree import Element

from lakeupsert.report.figures import FIGURES
from lakeupsert.report.html import document, e
from lakeupsert.report.nights import Night, Observed
from lakeupsert.report.numbers import messages, size, when

# What a browser refuses even if an escape were missing somewhere: scripts, and loads from anywhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(name: str, seen: Observed) -> str:
    """The page as text, UTF-8; ``name`` is the table's."""
    style = files("lakeupsert.report").joinpath("page.css").read_text("utf-8")
    head = e(
        "head",
        e("meta", charset="utf-8"),
        e("meta", name="viewport", content="width=device-width, initial-scale=1"),
        e("meta", name="color-scheme", content="light dark"),
        e("meta", http_equiv="Content-Security-Policy", content=POLICY),
        e("title", f"{name}: lakeupsert report, {seen.at:%Y-%m-%d}"),
        e("style", style),
    )
    body = e("body", _header(name, seen), e("main", [figure(seen) for figure in FIGURES]))
    return document(e("html", head, body, lang="en"))


def _header(name: str, seen: Observed) -> Element:
    status = seen.status
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
    }
    bad = {"failed"} if status.failed else set()
    bad |= {"lagging"} if status.lagging else set()
    return e(
        "header",
        e("h1", f"Table {name}"),
        e("p", f"As of {seen.at:%Y-%m-%d %H:%M:%S} UTC: {published}."),
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
        e("p", _span(seen.nights)),
    )


def _span(nights: Sequence[Night]) -> str:
    if not nights:
        return "No batch was appended yet."
    first, last = nights[0], nights[-1]
    which = (
        f"batch {last.number}"
        if first is last
        else f"the last {len(nights):,} batches, {first.number} to {last.number}"
    )
    kinds = {
        "restored an earlier snapshot": sum(n.restored is not None for n in nights),
        "withdrawn": sum(n.withdrawn for n in nights),
    }
    told = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items() if number)
    days = sorted({f"{first.received:%Y-%m-%d}", f"{last.received:%Y-%m-%d}"})
    return (
        f"The figures show {which}{f' ({told})' if told else ''}, received {' to '.join(days)}. "
        f"{'Older ones are left out. ' if first.number > 1 else ''}"
        "All times are UTC; 1 kB is 1,000 bytes."
    )
