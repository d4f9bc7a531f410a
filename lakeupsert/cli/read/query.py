"""`lakeupsert query`: run a SELECT over the table."""

import click

from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import snapshot_option
from lakeupsert.cli.program import main
from lakeupsert.cli.rows import MOST_ROWS, output_options, rows_result, rows_text, write_rows
from lakeupsert.phrases import count


@main.command()
@click.argument("sql")
@output_options
@snapshot_option
def query(call: Call, sql: str, target: str | None, overwrite: bool, snapshot: str) -> Answer:
    """Run one SELECT in DuckDB's SQL. The table has its own name there.

    The query sees the exact rows of a snapshot and can change nothing: it has access to no other file, table or setting. Times
    are UTC. It needs DuckDB (`pip install duckdb`). To join the table with other files, use Python: docs/engines/DUCKDB.md.

    \b
    Example:
      lakeupsert query "select store, sum(amount) from sales group by store order by store"
    """
    from lakeupsert.read.arrow import first_rows  # imports Arrow

    if overwrite and target is None:
        raise click.UsageError("--overwrite replaces a file. Give it with --output.")
    with call.open_table() as table, call.progress(table.name) as progress:
        number = None if snapshot == "latest" else table.view(snapshot).number
        progress("running the query")
        found = table.query(sql, snapshot if number is None else number)
        types = [{"name": field.name, "type": str(field.type)} for field in found.schema]
        result: dict[str, object] = {"snapshot": number, "columns": types, "output": target}
        if target is not None:
            written = write_rows(table, found, target, overwrite=overwrite)
            return Answer({**result, "rows": None, "written": written}, f"{count(written, 'row')} to {target}")
        rows = first_rows(found, MOST_ROWS + 1)
        warnings: tuple[str, ...] = ()
        if rows.num_rows > MOST_ROWS:
            rows = rows.slice(0, MOST_ROWS)
            warnings = (
                f"only the first {MOST_ROWS:,} rows are shown; --output FILE writes all of them, LIMIT takes fewer",
            )
        text = f"{rows_text(rows)}\n({count(rows.num_rows, 'row')})"
        return Answer({**result, "rows": rows_result(rows), "written": None}, text, warnings)
