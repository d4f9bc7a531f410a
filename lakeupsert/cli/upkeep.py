"""The commands around the nights: begin from what exists, and keep the table well."""

import click

from lakeupsert.cli import output
from lakeupsert.cli.commands import main, workers_option
from lakeupsert.cli.frame import Answer, Call, common
from lakeupsert.cli.shared import merge
from lakeupsert.config import place
from lakeupsert.errors import ConfigurationError


@main.command()
@click.argument("path", required=False)
@common
@click.pass_obj
def adopt(call: Call, path: str | None) -> Answer:
    """Make a table of an existing Hive-partitioned Parquet folder.

    No file is rewritten: their footers are read, and they become the table's first batch. PATH is `processed` of a table
    of the configuration; it may be left out.

    \b
    Example:
      lakeupsert adopt lake/sales
    """
    if path is not None and call.table is None:
        config = call.config()
        named = [name for name, table in config.tables.items() if place(path) == place(table.processed)]
        if not named:
            raise ConfigurationError(
                "no-table-there",
                f"No table of {config.path} has {path} as `processed`.",
                next=f"write a configuration with `lakeupsert init {path}`, or correct `processed`",
            )
        call.table = named[0]
    with call.open_table() as table, call.progress(table.name) as progress:
        found = table.adopt(progress)
        facts = [
            (
                "adopted",
                f"{output.count(found.files, 'file')}, {output.count(found.rows, 'row')}, {output.size(found.bytes)}",
            ),
            ("partitions", f"{found.partitions:,}"),
            ("published", f"snapshot {found.snapshot}"),
        ]
        warnings = found.warnings
        if found.left:
            warnings += (
                f"{output.count(len(found.left), 'object')} are no part of the table, such as {found.left[0]}",
            )
        return Answer(
            {
                "files": found.files,
                "partitions": found.partitions,
                "rows": found.rows,
                "bytes": found.bytes,
                "snapshot": found.snapshot,
                "left": list(found.left),
            },
            output.block(f"Table {table.name}", facts),
            warnings,
        )


@main.command()
@click.argument("to", metavar="ID|TIME|TAG")
@click.option("--yes", is_flag=True, help="Do it; without, it only tells what would change.")
@workers_option
@common
@click.pass_obj
def restore(call: Call, to: str, yes: bool, workers: int) -> Answer:
    """Go back to a snapshot: what came later is withdrawn, and readers see the table as it was.

    Nothing is deleted: it is one more batch, and a restore to a newer snapshot takes it back. Landing files of withdrawn
    batches are taken again by `lakeupsert append --again` only.

    \b
    Example:
      lakeupsert restore 2026-01-31T04:00:00Z --yes
    """
    with call.open_table() as table:
        plan = table.restore(to, dry=not yes)
        result = {
            "snapshot": plan.snapshot,
            "batch": plan.batch,
            "withdrawn": [{"batch": n, "rows": rows} for n, rows in plan.withdrawn.items()],
            "brought_back": [{"batch": n, "rows": rows} for n, rows in plan.brought_back.items()],
            "partitions": list(plan.partitions),
            "entry": plan.entry,
        }
        facts = [("back to", f"snapshot {plan.snapshot} (batch {plan.batch})")]
        if plan.withdrawn or plan.brought_back:
            facts += [
                ("withdraws", _batches(plan.withdrawn)),
                ("brings back", _batches(plan.brought_back)),
                ("changes", output.count(len(plan.partitions), "partition")),
            ]
        elif plan.unpublished:
            unseen = output.count(len(plan.unpublished), "partition")
            facts.append(("", f"the ledger says so already, but readers still see {unseen} as before"))
        else:
            facts.append(("", "nothing to do: it is so already"))
            return Answer(result, output.block(f"Table {table.name}", facts))
        if not yes:
            facts.append(("", f"nothing was changed; `lakeupsert restore {to} --yes` does it"))
            return Answer(result, output.block(f"Table {table.name}", facts))
        call.changed = call.changed or plan.entry is not None
        merged = merge(call, table, workers, engine=None, until_empty=True)
        text = f"{output.block(f'Table {table.name}', facts)}\n{merged.text}"
        return Answer(result, text, merged.warnings, error=merged.error)


@main.command()
@click.option("--yes", is_flag=True, help="Do it; without, it only tells what would go.")
@common
@click.pass_obj
def vacuum(call: Call, yes: bool) -> Answer:
    """Expire old snapshots, and delete what nobody needs any more.

    The newest `keep_snapshots` snapshots and those with a tag are kept. Beside running nights it is safe, at any time.

    \b
    Example:
      lakeupsert vacuum --yes
    """
    with call.open_table() as table, call.progress(table.name) as progress:
        found = table.vacuum(dry=not yes, progress=progress)
        sums: dict[str, list[int]] = {}
        for garbage in found.garbage:
            sums.setdefault(garbage.why, []).append(garbage.bytes)
        facts = [("expired" if yes else "would expire", _numbers(found.expired))]
        facts += [
            (
                "deleted" if yes else "would delete",
                f"{output.count(len(sizes), 'object')}, {output.size(sum(sizes))}: {why}",
            )
            for why, sizes in sorted(sums.items())
        ]
        if not sums:
            facts.append(("", "nothing to delete"))
        elif not yes:
            facts.append(("", "nothing was changed; `lakeupsert vacuum --yes` does it"))
        result = {
            "dry": found.dry,
            "expired": list(found.expired),
            "objects": len(found.garbage),
            "bytes": found.bytes,
            "garbage": [{"name": g.name, "bytes": g.bytes, "why": g.why} for g in found.garbage],
        }
        call.changed = call.changed or (yes and bool(found.garbage))
        return Answer(result, output.block(f"Table {table.name}", facts))


def _numbers(snapshots: tuple[int, ...]) -> str:
    if not snapshots:
        return "no snapshot"
    return f"{output.count(len(snapshots), 'snapshot')} ({snapshots[0]} to {snapshots[-1]})"


def _batches(rows: dict[int, int]) -> str:
    if not rows:
        return "no batch"
    batches = "batch" if len(rows) == 1 else "batches"
    return f"{len(rows):,} {batches} ({min(rows)} to {max(rows)}, {output.count(sum(rows.values()), 'row')})"
