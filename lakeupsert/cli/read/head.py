"""`lakeupsert head`: show the first rows of the table."""

import csv

import click

from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import snapshot_option, where_option
from lakeupsert.cli.program import main
from lakeupsert.cli.rows import MOST_ROWS, rows_result, rows_text


@main.command()
@click.argument("rows", type=click.IntRange(1, MOST_ROWS), default=10, metavar="[N]")
@where_option
@click.option("--columns", metavar="A,B", help="Only these columns, in this order.")
@snapshot_option
def head(call: Call, rows: int, where: str | None, columns: str | None, snapshot: str) -> Answer:
    """Show the first N rows (10), by partition and key.

    Opens no more files than these rows are in.

    \b
    Example:
      lakeupsert head 20 --where "transaction_date = '2020-01-01'" --columns order_id,amount
    """
    wanted = None if columns is None else [name.strip() for name in next(csv.reader([columns]))]
    with call.open_table() as table:
        number = None if snapshot == "latest" else table.view(snapshot).number
        chosen: str | int = snapshot if number is None else number
        found = table.head(rows, where=where, columns=wanted, snapshot=chosen)
        types = [{"name": field.name, "type": str(field.type)} for field in found.schema]
        result = {"snapshot": number, "columns": types, "rows": rows_result(found)}
        return Answer(result, rows_text(found) if found.num_rows else "no rows")
