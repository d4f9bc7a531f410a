"""`lakeupsert changes`: write the rows that changed since a reader's last call."""

import click

from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.program import main
from lakeupsert.cli.rows import write_rows
from lakeupsert.phrases import count


@main.command()
@click.option("--reader", required=True, metavar="NAME", help="Who reads. The position is a tag of this name.")
@click.option("--output", "target", required=True, metavar="FILE", help="A file (.parquet, .csv or .jsonl).")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
def changes(call: Call, reader: str, target: str, overwrite: bool) -> Answer:
    """Write the rows that changed since the last call of this reader.

    The first call writes all rows. To the table's columns come _change_type, _commit_version and _commit_timestamp. The
    reader's tag moves to the newest snapshot when the file is complete.

    \b
    Example:
      lakeupsert changes --reader mirror --output changes.parquet
    """
    with call.open_table() as table, call.progress(table.name) as progress:
        from lakeupsert.operations.snapshots import refuse_unfit_tag  # brings Arrow

        refuse_unfit_tag(reader)
        since = table.tags().get(reader)
        found = table.changes(since)
        progress(f"writing {target}")
        written = write_rows(table, found.rows, target, overwrite=overwrite)
        if found.snapshot is not None:
            table.tag(reader, found.snapshot)
        begin = "the beginning" if since is None else f"snapshot {since}"
        end = "nothing is published yet" if found.snapshot is None else f"from {begin} to snapshot {found.snapshot}"
        result = {"reader": reader, "since": since, "snapshot": found.snapshot, "output": target, "rows": written}
        return Answer(result, f"{count(written, 'row')} to {target} ({end})")
