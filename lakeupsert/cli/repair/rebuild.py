"""`lakeupsert rebuild`: make a table of data files whose metadata is lost."""

from typing import TYPE_CHECKING

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import log_option, prepare_spark, read_host_option
from lakeupsert.cli.program import main
from lakeupsert.phrases import count, size

if TYPE_CHECKING:
    from lakeupsert.engine.by_name import HostName


@main.command()
@click.argument("address", metavar="ADDRESS")
@read_host_option
@log_option
def rebuild(call: Call, address: str, host: "HostName") -> Answer:
    """Make the table from data files whose metadata is lost.

    ADDRESS is the folder of the lost table, which stays as it is. The folder of the new one, `processed`, must be empty. Each
    manifest, ledger entry and spec that still reads is used. Warnings say what can't be known without the others. If you have a
    backup, take `recover`.

    \b
    Example:
      lakeupsert rebuild s3://lake/sales
    """
    with call.open_table() as table, call.progress(table.name) as progress:
        prepare_spark(table, host=host)
        found = table.rebuild(address, progress=progress, host=host)
        facts = [
            ("rebuilt", f"{count(found.files, 'file')}, {count(found.rows, 'row')}, {size(found.bytes)}"),
            ("partitions", f"{found.partitions:,}, {len(found.guessed):,} of them without a manifest"),
            ("taken", f"{count(found.taken, 'landing file')}"),
            ("published", f"snapshot {found.snapshot}"),
            ("next", "read the warnings, look at the rows, then `lakeupsert run`"),
        ]
        result = {
            "address": address,
            **output.fields(
                found, "partitions", "files", "rows", "bytes", "snapshot", "taken", "waiting", "lost_entries"
            ),
            "guessed": {name: output.fields(one, "why", "doubtful") for name, one in found.guessed.items()},
        }
        return Answer(result, output.block(f"Table {table.name}", facts), found.warnings)
