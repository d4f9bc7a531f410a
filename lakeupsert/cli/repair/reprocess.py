"""`lakeupsert reprocess`: rewrite partitions from the stored files or from landing files."""

from typing import TYPE_CHECKING

import click

from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import (
    PartitionChoice,
    log_option,
    partition_options,
    prepare_spark,
    processes,
    processes_option,
    rewrite_host_option,
)
from lakeupsert.cli.problems import failed_partitions_error, failure_reasons, publish_warnings
from lakeupsert.cli.program import main
from lakeupsert.errors import LakeupsertError, RefusedError
from lakeupsert.phrases import count, short_list, size

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.engine.by_name import HostChoice
    from lakeupsert.operations.reprocess import ReprocessResult
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
@rewrite_host_option
@processes_option
@click.option("--dry-run", is_flag=True, help="Show what would be read and written. Writes nothing.")
@log_option
def reprocess(
    call: Call, chosen: PartitionChoice, source: "Source", host: "HostChoice", workers: int | None, dry_run: bool
) -> Answer:
    """Rewrite partitions while nights go on. No row changes unless a file was damaged, or is read in another way now.

    Each partition stays at the batch that it is merged up to. With --source landing, its rows come from the landing files of
    all its batches, ranked as they were then, without batches that a restore withdrew. A warning counts keys whose rows differ.

    \b
    Example:
      lakeupsert reprocess --from 2020-01-01 --to 2020-01-31 --source landing
    """
    if not chosen or (chosen.partitions and (chosen.first or chosen.last)):
        raise click.UsageError("Give either --partition, or --from and --to.")
    with call.open_table() as table:
        if not dry_run:
            prepare_spark(table, host=host, engine=None, large=True)
        with call.progress(table.name) as progress, call.stoppable() as stop:
            rewrite = table.reprocess(
                chosen.of(table),
                source=source,
                host=host,
                workers=processes(host, workers),
                dry=dry_run,
                stop=stop,
                progress=progress,
            )
        return rewrite_answer(call, table, rewrite)


def rewrite_answer(call: Call, table: "Table", rewrite: "ReprocessResult") -> Answer:
    """The answer of `reprocess` and `compact`."""
    plan, published = rewrite.plan, rewrite.publish
    result = {
        "source": plan.source,
        "partitions": list(plan.heads),
        **output.fields(plan, "batches", "files", "bytes"),
        "host": output.host_result(plan.host),
        "dedupe": output.dedupe_result(rewrite.dedupe),
        "publish": output.publish_result(published) if published else None,
        **output.fields(rewrite, "left", "unseen"),
    }
    if not plan.heads:
        return Answer(result, output.block(f"Table {table.name}", [("", "nothing to do: no partition matches")]))
    read = f"{count(plan.files, 'file')}, {size(plan.bytes)}"
    facts = [
        ("partitions", f"{len(plan.heads):,}: {short_list(list(plan.heads))}"),
        (
            plan.source,
            f"{read} of {len(plan.batches):,} batch{'' if len(plan.batches) == 1 else 'es'}" if plan.batches else read,
        ),
    ]
    facts += output.host_facts(plan.host)
    if published is None:
        return Answer(result, output.block(f"Table {table.name}", [*facts, ("", "nothing was changed")]))
    facts += [*output.dedupe_facts(rewrite.dedupe), *output.publish_facts(published)]
    warnings = (*(plan.host.warnings if plan.host else ()), *publish_warnings(published), *rewrite.warnings)
    failed = [partition for partition in published.failed if partition in published.waiting]
    if failed:
        warnings += (
            f"newer batches of {count(len(failed), 'partition')} ({short_list(failed)}) failed to merge earlier; "
            "`lakeupsert run` tries them again",
        )
    return Answer(
        result, output.block(f"Table {table.name}", facts), warnings, error=_rewrite_error(call, table, rewrite)
    )


def _rewrite_error(call: Call, table: "Table", rewrite: "ReprocessResult") -> LakeupsertError | None:
    published = rewrite.publish
    changed = published is not None and published.partitions_changed > 0
    call.changed = call.changed or changed
    if reasons := failure_reasons(rewrite.dedupe):
        return failed_partitions_error(table, reasons, changed=changed)
    if rewrite.left:
        return RefusedError(
            "not-reprocessed",
            f"Table {table.name!r}: no worker rewrote {count(len(rewrite.left), 'partition')}, which did not change: "
            f"{short_list(rewrite.left)}.",
            data_changed=changed,
            next="run `lakeupsert redrive`, which reports why if they are dead letters; otherwise run the same command again",
            partition=rewrite.left[0],
        )
    if published is None or not rewrite.unseen:
        return None
    held = failed_partitions_error(table, published.failed) if published.failed else None
    reason = held.message if held else f"Table {table.name!r}: batches after {published.batch} are not published yet."
    return RefusedError(
        "not-shown",
        f"{reason} So readers still see the old files of {count(len(rewrite.unseen), 'partition')}, whose new files "
        f"include newer batches: {short_list(rewrite.unseen)}.",
        data_changed=changed,
        next=held.next if held else "run `lakeupsert run`, which merges what no worker is merging, and publishes",
        partition=rewrite.unseen[0],
    )
