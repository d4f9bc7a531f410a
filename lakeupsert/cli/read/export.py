"""`lakeupsert export`: write rows to a file or folder."""

from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import prepare_spark, read_host_option, snapshot_option, where_option
from lakeupsert.cli.program import main
from lakeupsert.phrases import count

if TYPE_CHECKING:
    from lakeupsert.engine.by_name import HostName

    class ExportFlags(TypedDict):
        """Flags that are options of `Table.export` as they are."""

        where: str | None
        history: bool
        versions: bool
        overwrite: bool
        host: HostName


@main.command()
@click.option(
    "--output",
    "target",
    required=True,
    metavar="X",
    help="A file (.parquet, .csv or .jsonl), or a path or an address of a store ending in / for a Hive folder.",
)
@snapshot_option
@where_option
@click.option("--history", is_flag=True, help="Write all versions of the rows, with valid_from and valid_to.")
@click.option("--versions", is_flag=True, help="Add the batch that each row came with, and when it was received.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file or folder.")
@read_host_option
def export(call: Call, target: str, snapshot: str, **options: "Unpack[ExportFlags]") -> Answer:
    """Write the rows of a snapshot to a file or folder.

    Rows are ordered by partition and key. The file appears only when it is complete. A folder in a store is complete once it
    has `_common_metadata`; --host spark writes such a folder in Spark tasks.

    \b
    Example:
      lakeupsert export --output january.csv --where "transaction_date < '2020-02-01'"
    """
    with call.open_table() as table, call.progress(table.name) as progress:
        chosen = snapshot if snapshot == "latest" else table.view(snapshot).number
        prepare_spark(table, host=options["host"])
        progress(f"writing {target}")
        rows = table.export(target, snapshot="published" if chosen is None else chosen, **options)
        source = "there is no snapshot yet" if chosen is None else f"snapshot {chosen}"
        text = f"{count(rows, 'row')} to {target} ({source})"
        return Answer({"snapshot": chosen, "output": target, "rows": rows}, text)
