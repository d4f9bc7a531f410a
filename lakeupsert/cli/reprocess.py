"""`lakeupsert reprocess`: partitions rewritten, from what is stored or from landing."""

from typing import TYPE_CHECKING

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call, common
from lakeupsert.cli.options import host_option, need_spark, partition_options, selection, workers_option
from lakeupsert.cli.problems import failed, unmerged, waiting
from lakeupsert.cli.program import main
from lakeupsert.errors import LakeupsertError, RefusedError

if TYPE_CHECKING:
    from lakeupsert.api import HostName, ReprocessResult, Table
    from lakeupsert.table.work import Source


@main.command()
@partition_options
@click.option(
    "--source",
    type=click.Choice(["stored", "landing"]),
    default="stored",
    show_default=True,
    help="Rewrite from the stored files, or from the landing files of all batches.",
)
@host_option
@workers_option
@click.option("--dry-run", is_flag=True, help="Show what would be read and written. Writes nothing.")
@common
@click.pass_obj
def reprocess(
    call: Call,
    first: str | None,
    last: str | None,
    partitions: tuple[str, ...],
    source: "Source",
    host: "HostName",
    workers: int,
    dry_run: bool,
) -> Answer:
    """Rewrite partitions while nights go on. No row changes unless a file was damaged.

    Each partition stays at the batch that it is merged up to. With --source landing, its rows come from the landing files of
    all its batches, ranked as they were then, without batches that a restore withdrew. Stored files are not read.

    \b
    Example:
      lakeupsert reprocess --from 2020-01-01 --to 2020-01-31 --source landing
    """
    if bool(partitions) == bool(first or last):
        raise click.UsageError("Give --partition, or --from and --to.")
    with call.open_table() as table:
        if not dry_run:
            need_spark(table, host=host if source == "landing" else "local", engine=None, large=True)
        with call.progress(table.name) as progress, call.stoppable() as stop:
            done = table.reprocess(
                selection(table, first, last, partitions),
                source=source,
                host=host,
                workers=workers,
                dry=dry_run,
                stop=stop,
                progress=progress,
            )
        return done_answer(call, table, done)


def done_answer(call: Call, table: "Table", done: "ReprocessResult") -> Answer:
    plan, published = done.plan, done.publish
    result = {
        "source": plan.source,
        "partitions": list(plan.heads),
        "batches": list(plan.batches),
        "files": plan.files,
        "bytes": plan.bytes,
        "dedupe": output.dedupe_result(done.dedupe),
        "publish": output.publish_result(published) if published else None,
        "left": list(done.left),
        "unseen": list(done.unseen),
    }
    if not plan.heads:
        return Answer(result, output.block(f"Table {table.name}", [("", "nothing to do: no such partition")]))
    read = f"{output.count(plan.files, 'file')}, {output.size(plan.bytes)}"
    facts = [
        ("partitions", f"{len(plan.heads):,}: {output.named(list(plan.heads))}"),
        (
            plan.source,
            f"{read} of {len(plan.batches):,} batch{'' if len(plan.batches) == 1 else 'es'}" if plan.batches else read,
        ),
    ]
    if published is None:
        return Answer(result, output.block(f"Table {table.name}", [*facts, ("", "nothing was changed")]))
    facts += [*output.dedupe_facts(done.dedupe), *output.publish_facts(published)]
    warnings = waiting(published)
    if published.failed:
        warnings += (
            f"newer batches of {output.count(len(published.failed), 'partition')} "
            f"({output.named(list(published.failed))}) did not merge before; `lakeupsert run` tries them again",
        )
    return Answer(result, output.block(f"Table {table.name}", facts), warnings, error=_trouble(call, table, done))


def _trouble(call: Call, table: "Table", done: "ReprocessResult") -> LakeupsertError | None:
    changed = done.publish is not None and done.publish.partitions_changed > 0
    call.changed = call.changed or changed
    if failing := unmerged(done.dedupe):
        return failed(table, failing, changed)
    if done.left:
        return RefusedError(
            "not-reprocessed",
            f"Table {table.name!r}: no worker has written {output.count(len(done.left), 'partition')} anew: "
            f"{output.named(done.left)}. They are as they were.",
            data_changed=changed,
            next="`lakeupsert redrive` tells why where they are dead letters; else run the same command again",
            partition=done.left[0],
        )
    if done.publish is None or not done.unseen:
        return None
    held = failed(table, done.publish.failed) if done.publish.failed else None
    why = held.message if held else f"Table {table.name!r}: batches after {done.publish.batch} are not published yet."
    return RefusedError(
        "not-shown",
        f"{why} So readers still see the old files of {output.count(len(done.unseen), 'partition')}, written anew with "
        f"newer batches in: {output.named(done.unseen)}.",
        data_changed=changed,
        next=held.next if held else "`lakeupsert run` merges what nobody else is merging, and publishes",
        partition=done.unseen[0],
    )
