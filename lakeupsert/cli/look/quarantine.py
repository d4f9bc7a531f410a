"""`lakeupsert quarantine`: show the refused rows."""

from collections import Counter
from collections.abc import Iterator, Set
from typing import TYPE_CHECKING, Any, get_args

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.program import main
from lakeupsert.cli.rows import (
    MOST_ROWS,
    cell_text,
    cut_text,
    more_text,
    output_options,
    rows_result,
    table_lines,
    write_rows,
)
from lakeupsert.phrases import count, describe_place
from lakeupsert.table.ledger import Reason

if TYPE_CHECKING:
    import pyarrow as pa

MOST_FILES = 20
"""Landing files that the text lists."""
RAW = 100
"""Characters of a refused row in the text."""


@main.command()
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option("--reason", type=click.Choice(get_args(Reason)), metavar="R", help="Only rows that were refused for it.")
@click.option(
    "--head",
    type=click.IntRange(0, MOST_ROWS),
    default=10,
    show_default=True,
    metavar="N",
    help="How many rows to show.",
)
@output_options
def quarantine(
    call: Call, files: tuple[str, ...], reason: Reason | None, head: int, target: str | None, overwrite: bool
) -> Answer:
    """Show refused rows by reason, file and line.

    These are the rows that wait in quarantine, those of the newest batch first.
    FILE is a quarantine file that an error names, for example of a batch that was refused as a whole.

    \b
    Example:
      lakeupsert quarantine --reason bad_type --head 20
      lakeupsert quarantine --output refused.csv
    """
    if overwrite and target is None:
        raise click.UsageError("--overwrite replaces a file. Give it with --output.")
    seen = _Seen(head)
    with call.open_table() as table, call.progress(table.name) as progress:
        progress("reading the quarantine")
        rows = seen.watch(table.quarantine(reason, files))
        if target is not None:
            write_rows(table, rows, target, overwrite=overwrite)
        else:
            for _ in rows:
                pass
        total = seen.files.total()
        result = {
            "rows": total,
            "reasons": seen.reasons,
            "files": [{"reason_code": code, "file": file, "rows": n} for (code, file), n in seen.files.most_common()],
            "shown": seen.rows,
            "output": target,
        }
        facts = [("quarantined", _total(seen, reason))]
        if target is not None:
            facts.append(("written", f"{count(total, 'row')} to {target}"))
        if not files and table.exists():  # else they wait for no replay
            facts += [("" if number else "next", text) for number, text in enumerate(_what_next(seen.reasons.keys()))]
        lines = [output.block(f"Table {table.name}", facts), *(f"  {line}".rstrip() for line in _lists(seen, total))]
        return Answer(result, "\n".join(lines))


class _Seen:
    """What passed by on the way to its reader: rows by reason and file, and the first rows as JSON objects."""

    def __init__(self, head: int) -> None:
        self.files: Counter[tuple[str, str]] = Counter()
        self.rows: list[dict[str, Any]] = []  # JSON
        self._head = head

    @property
    def reasons(self) -> dict[str, int]:
        by_reason: Counter[str] = Counter()
        for (code, _), rows in self.files.items():
            by_reason[code] += rows
        return dict(by_reason.most_common())

    def watch(self, rows: "pa.RecordBatchReader") -> "pa.RecordBatchReader":
        """The same rows, counted as they are read."""
        import pyarrow as pa

        def watched() -> Iterator[pa.RecordBatch]:
            for batch in rows:
                table = pa.Table.from_batches([batch])
                counts = table.group_by(["reason_code", "file"]).aggregate([([], "count_all")]).to_pylist()
                self.files.update({(one["reason_code"], one["file"]): one["count_all"] for one in counts})
                self.rows += rows_result(table.slice(0, self._head - len(self.rows)))
                yield batch

        return pa.RecordBatchReader.from_batches(rows.schema, watched())


def _total(seen: _Seen, reason: Reason | None) -> str:
    reasons = ", ".join(f"{rows:,} {code}" for code, rows in seen.reasons.items())
    nothing = f"no row was refused for {reason}" if reason else "no row"
    return f"{count(seen.files.total(), 'row')}: {reasons}" if reasons else nothing


def _what_next(reasons: Set[str]) -> Iterator[str]:
    """What to do about the rows that wait, by whether a replay may take them."""
    from lakeupsert.engine.replay import UNTRIED  # brings Arrow

    known = sorted(reasons & output.REMEDIES.keys() - set(UNTRIED))
    yield from (f"{reason}: {output.REMEDIES[reason]}" for reason in known)
    if reasons - set(UNTRIED) - set(known):
        yield "fix the cause, then `lakeupsert append --replay-quarantine`"
    if unread := [reason for reason in UNTRIED if reason in reasons and reason != "retyped"]:
        yield f"{', '.join(unread)}: correct them at the source and land them again; a replay can't take them"
    if "retyped" in reasons:
        yield "retyped: land corrected rows with a newer order; a replay takes no copy of a stored row"


def _lists(seen: _Seen, total: int) -> Iterator[str]:
    listed = seen.files.most_common(MOST_FILES)
    if listed:
        columns = [
            [code for (code, _), _ in listed],
            [f"{rows:,}" for _, rows in listed],
            [cell_text(file) for (_, file), _ in listed],
        ]
        yield ""
        yield from table_lines(["reason", "rows", "file"], columns, [False, True, False])
        yield from more_text(len(listed), len(seen.files), "--json lists all files")
    if seen.rows:
        yield ""
        label = max(len(one["reason_code"]) for one in seen.rows)
        for one in seen.rows:
            where = cell_text(one["file"]) + describe_place(one["position"], one["line"])
            yield f"{one['reason_code']:<{label}}  {where}: {cell_text(one['reason'])}"
            if one["raw"] is not None:
                yield f"{'':<{label}}  {cut_text(cell_text(one['raw']), RAW)}"
        yield from more_text(len(seen.rows), total, "--head N shows more, --output FILE writes all")
