"""`lakeupsert update`: set columns of rows."""

from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import log_option, prepare_spark, together, where_option, workers_option
from lakeupsert.cli.problems import merge_error, publish_warnings
from lakeupsert.cli.program import main
from lakeupsert.cli.rows import rows_result, rows_text
from lakeupsert.phrases import count, short_list

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from lakeupsert.api import Table
    from lakeupsert.operations.statement.statement import Seen, StatementResult

    class StatementFlags(TypedDict):
        """Flags that are options of `Table.update` and `Table.delete` as they are."""

        where: str | None
        keys: str | None
        snapshot: Seen
        batch_id: str | None
        workers: int


statement_options = together(
    workers_option,
    click.option("--yes", is_flag=True, help="Do it. Without --yes, only count the rows and show some."),
    click.option(
        "--batch-id",
        metavar="ID",
        help="Your own name for the change. A repeated call with the same name changes nothing again; it finishes the first.",
    ),
    click.option(
        "--snapshot",
        type=click.Choice(["published", "latest"]),
        default="published",
        show_default=True,
        help="Read the rows as readers see them, or with all appended rows.",
    ),
    click.option(
        "--from",
        "keys",
        metavar="FILE",
        help="Only rows whose key is in this file: CSV, JSON lines, Parquet, Avro or ORC with the key columns.",
    ),
    where_option,
)


@main.command()
@click.option(
    "--set",
    "assignments",
    metavar="COLUMN=SQL",
    multiple=True,
    required=True,
    help='The new value of a column, for example "amount = round(amount * 0.87, 2)". Repeatable.',
)
@statement_options
@log_option
def update(call: Call, assignments: tuple[str, ...], yes: bool, **options: "Unpack[StatementFlags]") -> Answer:
    """Set columns of the rows that a filter or a list of keys chooses.

    The changed rows become one batch, which is merged and published. A new value is an expression in DuckDB's SQL over the
    columns of the row, and must fit its column exactly. Key, partition and ordering columns can't be set. A record that lands
    later with the same or a greater ordering value replaces the changed row.

    \b
    Example:
      lakeupsert update --set "amount = round(amount * 0.87, 2)" --where "order_id in (7, 8)" --yes
    """
    values = _values(assignments)
    return change_rows(call, yes, lambda table, **how: table.update(values, **options, **how))


def _values(assignments: tuple[str, ...]) -> dict[str, str]:
    values: dict[str, str] = {}
    for text in assignments:
        column, equals, expression = (part.strip() for part in text.partition("="))
        column = column[1:-1] if len(column) > 1 and column[0] == column[-1] == '"' else column
        if not (column and equals and expression):
            raise click.UsageError(f'--set takes COLUMN=SQL, for example "amount = amount * 2", and got {text!r}.')
        if column in values:
            raise click.UsageError(f"--set gives column {column!r} two values.")
        values[column] = expression
    return values


def change_rows(call: Call, yes: bool, change: "Callable[..., StatementResult]") -> Answer:
    """Run `update` or `delete`: ``change`` the only table, or with ``yes`` missing, look at what it would change."""
    with call.open_table() as table:
        if yes:
            prepare_spark(table, engine=None, large=True)
        with call.progress(table.name) as progress, call.stoppable() as stop:
            done = change(table, dry=not yes, stop=stop, progress=progress)
        return _answer(call, table, done)


def _answer(call: Call, table: "Table", done: "StatementResult") -> Answer:
    total, kind, published = sum(done.rows.values()), done.statement.kind, done.publish
    result = {
        "statement": {"kind": kind, "set": done.statement.set, "where": done.statement.where},
        "rows": total,
        "partitions": dict(done.rows),
        "sample": _sample(done),
        "keys": {"listed": done.keys, "without_row": done.unseen_keys} if done.keys else None,
        "batch": done.append.number if done.append else None,
        "repeated": done.repeated,
        "dedupe": output.dedupe_result(done.dedupe) if published else None,
        "publish": output.publish_result(published) if published else None,
    }
    title = f"Table {table.name}"
    if not total:
        facts = [("", f"no row matches: nothing to {kind}")]
        return Answer(result, output.block(title, facts), done.warnings)
    number = done.append.number if done.append else None
    partitions = f"{count(len(done.rows), 'partition')}: {short_list(list(done.rows))}"
    facts = [("updates" if kind == "update" else "deletes", f"{count(total, 'row')} in {partitions}")]
    if done.repeated:
        facts.append(("", f"done before, as batch {number} with this --batch-id"))
    elif number is not None:
        facts.append(("appended", f"batch {number}"))
    if published is not None:
        call.changed = call.changed or not done.repeated
        facts += [*output.dedupe_facts(done.dedupe), *output.publish_facts(published)]
    else:
        facts.append(("", "nothing was changed; the same command with --yes does it"))
    text = output.block(title, facts)
    if done.before is not None:
        text += f"\n\n{_sample_text(table, done)}"
        text += f"\n… and {total - done.before.num_rows:,} more" if total > done.before.num_rows else ""
    if published is None:
        return Answer(result, text, done.warnings)
    warnings = (*done.warnings, *publish_warnings(published))
    return Answer(result, text, warnings, error=merge_error(call, table, done.dedupe, published))


def _sample(done: "StatementResult") -> list[dict[str, object]]:
    if done.before is None:
        return []
    before = rows_result(done.before)
    after = rows_result(done.after) if done.after is not None else [None] * len(before)
    return [{"before": one, "after": other} for one, other in zip(before, after, strict=True)]


def _sample_text(table: "Table", done: "StatementResult") -> str:
    """The first rows; of an update the key, and the old and new values of what is set."""
    assert done.before is not None, "there are rows"
    shown: pa.Table = done.before
    if done.after is not None:
        key = {name.lower() for name in table.settings.key}
        names = [name for name in shown.schema.names if name.lower() in key or name in done.statement.set]
        shown = shown.select(names)
        for name in done.statement.set:
            at = shown.schema.get_field_index(name)
            shown = shown.add_column(at + 1, f"new {name}", done.after[name])
    return rows_text(shown)
