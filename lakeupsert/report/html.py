"""Elements of HTML and SVG. They stay a tree until the end, so everything that comes from the data is escaped."""

from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring

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


def document(root: Element) -> str:
    # A reason that quotes raw bytes may contain control characters, which HTML does not allow.
    text = tostring(root, encoding="unicode", method="html")
    return "<!doctype html>\n" + "".join(c if c >= " " or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
