"""`lakeupsert restore`: restore an earlier snapshot."""

import click

from lakeupsert.cli import output
from lakeupsert.cli.every_night.dedupe import merge_answer
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import workers_option
from lakeupsert.cli.program import main
from lakeupsert.phrases import count


@main.command()
@click.argument("to", metavar="ID|TIME|TAG")
@click.option("--yes", is_flag=True, help="Do it. Without --yes, only show what would change.")
@workers_option
def restore(call: Call, to: str, yes: bool, workers: int) -> Answer:
    """Restore the table to an earlier snapshot.

    Readers see the table as it was. Later batches are withdrawn, but no file is deleted: the restore is one more entry in
    the ledger, and restoring a newer snapshot brings published batches back. Only `lakeupsert append --again` appends the
    landing files of withdrawn batches again. A date means its first moment in UTC.

    \b
    Example:
      lakeupsert restore 2026-01-31T04:00:00Z --yes
    """
    with call.open_table() as table:
        plan = table.restore(to, dry=not yes)
        result = {
            **output.fields(plan, "snapshot", "batch"),
            "withdrawn": [{"batch": n, "rows": rows} for n, rows in plan.withdrawn.items()],
            "brought_back": [{"batch": n, "rows": rows} for n, rows in plan.brought_back.items()],
            **output.fields(plan, "partitions", "rewritten", "unfit", "entry"),
        }
        facts = [("restores", f"snapshot {plan.snapshot} (batch {plan.batch})")]
        if plan.partitions:
            facts += [
                ("withdraws", _batches(plan.withdrawn)),
                ("brings back", _batches(plan.brought_back)),
                ("changes", count(len(plan.partitions), "partition")),
            ]
            if plan.rewritten:
                several = count(len(plan.rewritten), "partition")
                facts.append(("", f"{several} of them for rows that a reprocess changed"))
        elif plan.unpublished:
            unseen = count(len(plan.unpublished), "partition")
            facts.append(("", f"the ledger is at this snapshot already, but readers still see {unseen} as before"))
        else:
            facts.append(("", "nothing to do: the table is at this snapshot already"))
            return Answer(result, output.block(f"Table {table.name}", facts))
        if plan.unfit:
            which = f"{count(plan.unfit, 'value')} that a retype since does not convert: null"
            facts.append(("brings back", f"{which}, with a copy of the row in quarantine"))
        if not yes:
            facts.append(("", f"nothing was changed; `lakeupsert restore {to} --yes` does it"))
            return Answer(result, output.block(f"Table {table.name}", facts))
        call.changed = call.changed or plan.entry is not None
        merged = merge_answer(call, table, workers=workers)
        text = f"{output.block(f'Table {table.name}', facts)}\n{merged.text}"
        return Answer(result, text, merged.warnings, error=merged.error)


def _batches(rows: dict[int, int]) -> str:
    if not rows:
        return "no batch"
    batches = "batch" if len(rows) == 1 else "batches"
    return f"{len(rows):,} {batches} ({min(rows)} to {max(rows)}, {count(sum(rows.values()), 'row')})"
