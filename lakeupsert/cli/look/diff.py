"""`lakeupsert diff`: show what changed between two snapshots."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import key_values
from lakeupsert.cli.program import main
from lakeupsert.cli.rows import MOST_ROWS, cell_text, more_text, pairs_text, rows_result, table_lines
from lakeupsert.phrases import count

if TYPE_CHECKING:
    import pyarrow as pa

    from lakeupsert.operations.diff import Difference

MOST_PARTITIONS = 20
"""Partitions that the text lists."""
_SIGNS = {"inserted": "+", "updated": "~", "deleted": "-"}


@main.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="[B]", default="published")
@click.option("--rows", "with_rows", is_flag=True, help="Also show the rows, by partition and key.")
@click.option("--key", "key", metavar="COLUMN=VALUE", multiple=True, help="Only keys with this value. Repeatable.")
def diff(call: Call, before: str, after: str, with_rows: bool, key: tuple[str, ...]) -> Answer:
    """Show what changed between two snapshots.

    Counts the rows that were inserted, updated and deleted from A to B. Both are numbers, times or tags, or the words published
    and latest. Without B, A is compared with what readers see.
    Only partitions that differ are read.

    \b
    Example:
      lakeupsert diff 30 31
      lakeupsert diff 30 --rows --key order_id=7
    """
    shown: list[dict[str, Any]] = []  # JSON

    def collect(rows: "pa.Table") -> None:
        if len(shown) < MOST_ROWS:
            shown.extend(rows_result(rows.slice(0, MOST_ROWS - len(shown))))

    with call.open_table() as table, call.progress(table.name) as progress:
        one, other = (name if name == "latest" else table.view(name).number for name in (before, after))
        progress("comparing")
        found = table.diff(
            "published" if one is None else one,
            "published" if other is None else other,
            key=key_values(key) or None,
            collect=collect if with_rows else None,
        )
        result = {
            "before": one,
            "after": other,
            **{kind: getattr(found, kind) for kind in _SIGNS},
            "partitions": [vars(one) for one in found.partitions],
            "rows": shown if with_rows else None,
        }
        warnings = tuple(_warnings(found, found.total if with_rows else 0))
        facts = [("compared", f"{_name(one)} with {_name(other)}")]
        return Answer(result, _text(f"Table {table.name}", facts, found, shown), warnings)


def _warnings(found: "Difference", listed: int) -> list[str]:
    warnings = []
    if found.not_compared:
        warnings.append(f"dropped columns are not compared: {', '.join(found.not_compared)}")
    if repeated := sum(one.repeated for one in found.partitions):
        warnings.append(
            f"{count(repeated, 'row')} of adopted files have a newer row of their key, and only the newest is compared"
        )
    if listed > MOST_ROWS:
        warnings.append(f"only the first {MOST_ROWS:,} of {listed:,} rows are shown; --key selects some")
    return warnings


def _name(snapshot: str | int | None) -> str:
    return "nothing (no snapshot yet)" if snapshot is None else f"snapshot {snapshot}"


def _text(heading: str, facts: list[output.Fact], found: "Difference", shown: Sequence[Mapping[str, Any]]) -> str:
    changes = [(kind, count(getattr(found, kind), "row")) for kind in _SIGNS]
    lines = [output.block(heading, [*facts, *changes])]
    if listed := found.partitions[:MOST_PARTITIONS]:
        columns = [[one.partition for one in listed]]
        columns += [[f"{getattr(one, kind):,}" for one in listed] for kind in _SIGNS]
        lines += [
            "",
            *(f"  {line}" for line in table_lines(["partition", *_SIGNS], columns, [False, True, True, True])),
        ]
        lines += [f"  {line}" for line in more_text(len(listed), len(found.partitions), "--json lists all partitions")]
    if shown:
        lines += ["", *(f"  {_row_text(row)}" for row in shown)]
    return "\n".join(lines)


def _row_text(row: Mapping[str, Any]) -> str:
    key, before, after = row["key"], row["before"], row["after"]
    some = after or before
    shown = {*key, *(folder.partition("=")[0] for folder in row["partition"].split("/"))}
    others = [name for name in some if name not in shown]
    if before and after:
        changed = [name for name in others if before[name] != after[name]]
        values = ", ".join(f"{name}: {cell_text(before[name])} -> {cell_text(after[name])}" for name in changed)
    else:
        values = pairs_text({name: some[name] for name in others})
    return f"{_SIGNS[row['change']]} {pairs_text(key)} in {row['partition']}: {values}"
