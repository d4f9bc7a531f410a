"""`lakeupsert adopt`: make a table of an existing folder."""

import shlex
from typing import TYPE_CHECKING

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import prepare_spark, read_host_option
from lakeupsert.cli.program import main
from lakeupsert.config import canonical_address
from lakeupsert.errors import ConfigurationError
from lakeupsert.phrases import count, size

if TYPE_CHECKING:
    from lakeupsert.engine.by_name import HostName


@main.command()
@click.argument("path", required=False)
@read_host_option
def adopt(call: Call, path: str | None, host: "HostName") -> Answer:
    """Make a table of an existing Hive-partitioned Parquet folder.

    Reads only the footers of the files. The files become the table's first batch; none is rewritten. PATH is the `processed`
    setting of a table; leave it out if the configuration has one table, or give --table.

    \b
    Example:
      lakeupsert adopt lake/sales
    """
    if path is not None and call.table is None:
        config = call.config()
        names = [
            name
            for name, table in config.tables.items()
            if canonical_address(path) == canonical_address(table.processed)
        ]
        if not names:
            raise ConfigurationError(
                "no-table-there",
                f"No table in {config.path} has `processed` = {path}.",
                next=f"write a configuration with `lakeupsert init {shlex.quote(path)}`, or correct `processed`",
            )
        call.table = names[0]
    with call.open_table() as table, call.progress(table.name) as progress:
        prepare_spark(table, host=host)
        found = table.adopt(progress, host=host)
        facts = [
            (
                "adopted",
                f"{count(found.files, 'file')}, {count(found.rows, 'row')}, {size(found.bytes)}",
            ),
            ("partitions", f"{found.partitions:,}"),
            ("published", f"snapshot {found.snapshot}"),
        ]
        warnings = found.warnings
        if found.left:
            warnings += (f"not part of the table: {count(len(found.left), 'object')}, for example {found.left[0]}",)
        return Answer(
            output.fields(found, "files", "partitions", "rows", "bytes", "snapshot", "left"),
            output.block(f"Table {table.name}", facts),
            warnings,
        )
