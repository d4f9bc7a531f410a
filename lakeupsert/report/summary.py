"""What `repr` and a notebook show of a table: where it is, its published snapshot in figures, and its columns.

Reads     the newest snapshot and its spec; no manifest and no data file
Writes    nothing
Repeat    safe
"""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import tostring

from lakeupsert.errors import LakeupsertError
from lakeupsert.phrases import count, size, when
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.read.arrow import reader_schema
from lakeupsert.read.view import SnapshotFigures, View, newest_snapshot
from lakeupsert.report.html import e
from lakeupsert.table.spec import TableSpec


@dataclass(frozen=True)
class Summary:
    """``state`` is a sentence. The columns, each with its type and its role, are unknown if the table can't be read."""

    title: str
    state: str
    columns: Sequence[tuple[str, str, str]] = ()


def summarize(table: OpenTable) -> Summary:
    """What can be seen of the table now. An error becomes the state: `repr` must not raise."""
    title = f"Table {table.name!r} at {table.settings.processed}"
    try:
        link = newest_snapshot(table.history.objects)
        spec = View.of(table.history.objects, table.history.existing_spec(), link).spec
        columns = [(field.name, str(field.type), _role(spec, field.name)) for field in reader_schema(spec)]
        return Summary(title, "nothing is published yet" if link is None else _state(SnapshotFigures.of(link)), columns)
    except LakeupsertError as error:
        return Summary(title, f"{error.code}: {error.message}")


def as_text(table: OpenTable) -> str:
    """The summary in lines, the columns below each other."""
    found = summarize(table)
    widths = [max(map(len, cells)) for cells in zip(*found.columns, strict=True)]
    rows = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in found.columns)
    return "\n".join([found.title, found.state, *(f"  {row}" for row in rows)])


def as_html(table: OpenTable) -> str:
    """The summary for a notebook."""
    found = summarize(table)
    head = e("tr", [e("th", name) for name in ("column", "type", "role")])
    rows = [e("tr", [e("td", cell) for cell in row]) for row in found.columns]
    shown = e("div", e("b", found.title), e("br"), found.state, e("table", head, rows) if rows else ())
    return tostring(shown, encoding="unicode", method="html")


def _state(shown: SnapshotFigures) -> str:
    held = f"{count(shown.rows, 'row')} in {count(shown.partitions, 'partition')}, {size(shown.bytes)}"
    return f"snapshot {shown.number} (batch {shown.batch}), published {when(shown.published_at)}: {held}"


def _role(spec: TableSpec, column: str) -> str:
    roles = {"key": spec.key, "partition": spec.partition_by, "order": spec.order_by}
    return ", ".join(role for role, columns in roles.items() if column in columns)
