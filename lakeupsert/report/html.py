"""Elements of HTML and SVG. They stay a tree until the end, so everything that comes from the data is escaped."""

import re
from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, tostring

GENERATED = re.compile("[0-9a-f]{32}")
LONG_NUMBER = re.compile("[0-9,]{10,}")
SHORT = 24
"""Letters of a text that stays on one line."""

Child = Element | str | Iterable[Element]


def e(tag: str, *children: Child, **attributes: object) -> Element:
    """An element. ``class_`` sets the attribute `class`, ``stroke_width`` sets `stroke-width`; None omits an attribute."""
    element = Element(tag, {k.rstrip("_").replace("_", "-"): str(v) for k, v in attributes.items() if v is not None})
    for child in children:
        if not isinstance(child, str):
            element.extend([child] if isinstance(child, Element) else child)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + child
        else:
            element.text = (element.text or "") + child
    return element


def prose(text: str) -> list[Child]:
    """A text in which `backticks` are code."""
    return [e("code", part) if i % 2 else part for i, part in enumerate(text.split("`"))]


def section(title: str, note: str, *content: Element, wide: bool = False, tip: str = "") -> Element:
    """``tip``: what the figure means, shown by the mouse over its title."""
    return e(
        "section",
        e("h2", title, title=tip or None),
        e("p", note, class_="note") if note else [],
        content,
        class_="wide" if wide else None,
    )


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], total: int, row_classes: Sequence[str | None] = ()
) -> Element:
    """A table. On a phone each row becomes a paragraph, and each cell says its heading.

    A heading that starts with `>` aligns its column to the right. ``row_classes``: the CSS class of each row, if given.
    """
    names = [head.removeprefix(">") for head in heads]
    classes = ["n" if head[0] == ">" else None for head in heads]
    body = [
        e(
            "tr",
            [_cell(cell, name, class_) for cell, class_, name in zip(row, classes, names, strict=True)],
            class_=row_class,
        )
        for row, row_class in zip(rows, row_classes or [None] * len(rows), strict=True)
    ]
    headings = [e("th", name, class_=class_) for name, class_ in zip(names, classes, strict=True)]
    more = [e("p", f"and {total - len(rows):,} more", class_="note")] if total > len(rows) else []
    return e("div", e("table", e("thead", e("tr", headings)), e("tbody", body), class_="rows"), more, class_="scroll")


def _cell(text: str, head: str, class_: str | None) -> Element:
    """A cell. The tooltip has the whole of a shortened text."""
    shown = _shorten(text)
    # `2020-01-01` would break at a hyphen, and `null_key` anywhere.
    classes = [class_ or ("short" if len(text) <= SHORT else ""), "zero" if text in ("0", "0 B") else ""]
    return e(
        "td",
        shown,
        class_=" ".join(filter(None, classes)) or None,
        data_head=head,
        title=text if shown != text else None,
    )


def _shorten(text: str) -> str:
    """A generated id by its first digits, as Git shows its own; a number above 10 million in millions."""
    if GENERATED.fullmatch(text):
        return text[:8]
    return f"{int(text.replace(',', '')) / 1e6:,.1f} M" if LONG_NUMBER.fullmatch(text) else text


def details(summary: str, content: Element) -> Element:
    return e("details", e("summary", summary), content)


def document(root: Element) -> str:
    # A reason that quotes raw bytes may contain control characters, which HTML does not allow.
    text = tostring(root, encoding="unicode", method="html")
    return "<!doctype html>\n" + "".join(c if c >= " " or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
