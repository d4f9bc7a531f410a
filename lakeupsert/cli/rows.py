"""Rows as JSON, as a text table and as a file, for the commands that show rows."""

import json
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from lakeupsert.cli.options import together
from lakeupsert.config import refuse_in_zones
from lakeupsert.phrases import without_controls

if TYPE_CHECKING:
    import pyarrow as pa

    from lakeupsert.api import Table

MOST_ROWS = 10_000
"""Rows that a command shows. More: they are Python objects here, which take many times the memory of Arrow rows."""
_WHOLE_SECONDS = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.0+(Z?)")
CELL = 60
"""Characters of a value in a text table. More: fewer columns fit beside each other."""


output_options = together(
    click.option("--overwrite", is_flag=True, help="Replace an existing file."),
    click.option("--output", "target", metavar="FILE", help="Write all rows to a file (.parquet, .csv or .jsonl)."),
)


def write_rows(table: "Table", rows: "pa.RecordBatchReader", target: str, *, overwrite: bool) -> int:
    """Write rows to a file outside of the table's zones. Returns how many."""
    from lakeupsert.read.export import write_file  # imports Arrow

    refuse_in_zones(table.settings, target)
    return write_file(rows, target, overwrite=overwrite)


def rows_result(rows: "pa.Table") -> list[dict[str, object]]:
    """The rows as JSON objects."""
    names, columns = rows.schema.names, _values(rows)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def rows_text(rows: "pa.Table") -> str:
    """A line for each row; on a terminal that is too narrow a block for each row, with a line for each value."""
    from lakeupsert.table.types import is_number  # imports Arrow

    cells = [[cell_text(value) for value in column] for column in _values(rows)]
    right = list(map(is_number, rows.schema.types))
    lines = table_lines(rows.schema.names, [[cut_text(cell) for cell in column] for column in cells], right)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if width is None or max(map(len, lines)) <= width:
        return "\n".join(lines)
    label = max(map(len, rows.schema.names))
    blocks = [
        [f"row {number}", *(f"  {n:<{label}}  {c[number - 1]}" for n, c in zip(rows.schema.names, cells, strict=True))]
        for number in range(1, rows.num_rows + 1)
    ]
    return "\n".join(line for block in blocks for line in block)


def table_lines(names: Sequence[str], columns: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """A header, a rule and a line for each row; the cells of a column are as wide as its widest. ``right``: align them there."""
    widths = [max(map(len, (name, *cells))) for name, cells in zip(names, columns, strict=True)]
    aligned = [
        [cell.rjust(width) if is_right else cell.ljust(width) for cell in (name, "-" * width, *cells)]
        for name, cells, width, is_right in zip(names, columns, widths, right, strict=True)
    ]
    return ["  ".join(line).rstrip() for line in zip(*aligned, strict=True)]


def cell_text(value: object) -> str:
    """A JSON value on one line."""
    if isinstance(value, str):
        if moment := _WHOLE_SECONDS.fullmatch(value):
            return moment[1] + moment[2]
        return value if value.isprintable() else without_controls(json.dumps(value, ensure_ascii=False)[1:-1])
    return json.dumps(value, ensure_ascii=False)


def pairs_text(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={cut_text(cell_text(value))}" for name, value in values.items())


def more_text(shown: int, total: int, ways: str) -> Iterable[str]:
    """A line if not all rows are shown."""
    return [f"… and {total - shown:,} more: {ways}"] if total > shown else []


def _values(rows: "pa.Table") -> list[list[object]]:
    from lakeupsert.rows.tojson import to_json_values  # imports Arrow

    return [to_json_values(column.combine_chunks()) for column in rows.columns]


def cut_text(text: str, width: int = CELL) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
