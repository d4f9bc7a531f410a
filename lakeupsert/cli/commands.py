"""The commands: each calls `lakeupsert.Table` and says what happened. What brings Arrow is imported inside."""

import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lakeupsert import clock
from lakeupsert.cli import output
from lakeupsert.cli.example import EXAMPLE
from lakeupsert.cli.frame import Answer, Call, Program, common, json_option
from lakeupsert.cli.planned import limits, planned, unknown_time
from lakeupsert.cli.shared import (
    append_warnings,
    each,
    failed,
    lagging,
    merge,
    need_spark,
    partition_options,
    selection,
    skipped,
    trouble,
    waiting,
)
from lakeupsert.cli.watch import watch
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.pipeline.stop import GRACE_SECONDS

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.engine.by_name import EngineName, HostName
    from lakeupsert.table.ledger import Scope


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


host_option = click.option(
    "--host",
    type=click.Choice(["spark", "local"]),
    default="spark",
    show_default=True,
    help="Where landing files are read and split: in Spark tasks, or in this process.",
)
_batch_id = click.option(
    "--batch-id", metavar="ID", help="Your name for the batch; files that come again under it are recognised."
)


def _full_extract(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--full` and `--may-shrink`."""
    for option in (
        click.option(
            "--may-shrink", is_flag=True, help="Even where a full extract has 40 % fewer rows than are stored."
        ),
        click.option(
            "--full",
            type=click.Choice(["table", "partitions"]),
            help="The landing files are a full extract, of the table or of the partitions that their rows are in: keys that they "
            "lack are deleted.",
        ),
    ):
        command = option(command)
    return command


def _check_full(full: "Scope | None", *, may_shrink: bool) -> None:
    if may_shrink and full is None:
        raise click.UsageError("--may-shrink is about a full extract: give --full, too.")


workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=_cores,
    metavar="N",
    help="Processes that merge partitions, with engine arrow; by default as many as there are cores.",
)
_engine = click.option(
    "--engine",
    type=click.Choice(["arrow", "spark"]),
    help="What merges: Arrow in worker processes, or Spark. By default what the configuration says.",
)
_where = click.option("--where", metavar="SQL", help='Only what holds rows of this condition, such as "store = 7".')
_snapshot = click.option(
    "--snapshot",
    metavar="ID|TIME|TAG|latest",
    default="published",
    show_default=True,
    help="A snapshot's number, its tag, or a time: the newest one published until then. For `export` also latest: "
    "all that was appended, merged for this reader.",
)


@click.group(cls=Program)
@common
def main() -> None:
    """Upserts for plain Parquet data lakes: newest record wins, per partition and key.

    \b
    Example:
      lakeupsert config --example > lakeupsert.toml
      lakeupsert run
    """


@main.command()
@host_option
@workers_option
@_engine
@_batch_id
@_full_extract
@click.option("--dry-run", is_flag=True, help="Only tell what it would do, as `lakeupsert plan` does.")
@limits
@common
@click.pass_obj
def run(
    call: Call,
    host: "HostName",
    workers: int,
    engine: "EngineName | None",
    batch_id: str | None,
    full: "Scope | None",
    may_shrink: bool,
    dry_run: bool,
    prices: Path | None,
    max_bytes: int | None,
    max_cost: float | None,
) -> Answer:
    """Append what is new, merge what is dirty, publish.

    Each step looks at the table's state, so a run also finishes what an earlier one left. Takes all tables of the file.

    \b
    Example:
      lakeupsert run --host local --workers 4
    """

    _check_full(full, may_shrink=may_shrink)

    def one(table: "Table") -> Answer:
        if dry_run:
            return planned(call, table, prices, max_bytes, max_cost)
        need_spark(table, host=host, engine=engine, large=True)
        begun = clock.elapsed()
        said: list[str] = []
        with call.progress(table.name) as progress, call.stoppable() as stop:
            ran = table.run(
                host=host,
                workers=workers,
                engine=engine,
                batch_id=batch_id,
                full=full,
                may_shrink=may_shrink,
                max_bytes=max_bytes,
                max_cost=max_cost,
                prices=prices,
                stop=stop,
                progress=progress,
                warn=said.append,
            )
        requests = table.requests
        facts = [
            *output.append_facts(ran.append, table.settings),
            *output.dedupe_facts(ran.dedupe),
            *output.predicted_facts(ran),
            *output.publish_facts(ran.publish),
            output.took_fact(clock.elapsed() - begun, requests),
        ]
        warnings, told = append_warnings(table, ran.append, said)
        return Answer(
            output.run_result(ran, requests),
            output.block(f"Table {table.name}", facts),
            (*warnings, *unknown_time(ran.planned, max_cost), *waiting(ran.publish)),
            told,
            trouble(call, table, ran.dedupe, ran.publish),
        )

    return each(call, one)


@main.command()
@host_option
@click.option("--received-from", type=click.DateTime(["%Y-%m-%d"]), help="First date of the landing folders to take.")
@click.option("--received-to", type=click.DateTime(["%Y-%m-%d"]), help="Last date of the landing folders to take.")
@_batch_id
@_full_extract
@click.option(
    "--again",
    is_flag=True,
    help="Take the landing files of withdrawn batches, which a restore left out, and no others.",
)
@click.option(
    "--replay-quarantine",
    is_flag=True,
    help="Try the quarantined rows again, and no landing files; after a cause of refusal was mended.",
)
@common
@click.pass_obj
def append(
    call: Call,
    host: "HostName",
    received_from: datetime | None,
    received_to: datetime | None,
    batch_id: str | None,
    full: "Scope | None",
    may_shrink: bool,
    again: bool,
    replay_quarantine: bool,
) -> Answer:
    """Append all new landing files as one batch.

    The partitions that it touches are queued for `dedupe` and `worker`.

    \b
    Example:
      lakeupsert append --host local --received-from 2020-01-01 --received-to 2020-01-31
    """
    _check_full(full, may_shrink=may_shrink)
    received = (
        received_from.date() if received_from else None,
        received_to.date() if received_to else None,
    )
    with call.open_table() as table:
        if any(received) and not table.settings.landing_dates:
            raise ConfigurationError(
                "no-landing-dates",
                f"Table {table.name!r} has no `landing_dates`, so no landing file has a date to select it by.",
                next=f'set `landing_dates` in [tables.{table.name}], such as "%Y-%m-%d", or leave out --received-from '
                "and --received-to",
            )
        if not replay_quarantine:
            need_spark(table, host=host)
        said: list[str] = []
        with call.progress(table.name) as progress, call.stoppable():  # it ends with the batch, all of it
            appended = table.append(
                host=host,
                batch_id=batch_id,
                received=received,
                again=again,
                full=full,
                may_shrink=may_shrink,
                replay_quarantine=replay_quarantine,
                progress=progress,
                warn=said.append,
            )
        warnings, told = append_warnings(table, appended, said)
        facts = output.append_facts(appended, table.settings)
        if replay_quarantine and appended is None:
            facts = [("replayed", "nothing: no quarantined row passes now")]
        text = output.block(f"Table {table.name}", facts)
        return Answer(output.append_result(appended), text, warnings, told)


@main.command()
@partition_options
@workers_option
@_engine
@common
@click.pass_obj
def dedupe(
    call: Call,
    first: str | None,
    last: str | None,
    partitions: tuple[str, ...],
    workers: int,
    engine: "EngineName | None",
) -> Answer:
    """Merge the queued partitions once, then try to publish.

    With partitions given, messages for those of them that the ledger is ahead of are sent first.

    \b
    Example:
      lakeupsert dedupe --from 2020-01-01 --to 2020-01-31
    """
    with call.open_table() as table:
        need_spark(table, engine=engine, large=True)
        if partitions or first or last:
            table.send_missing(selection(table, first, last, partitions))
        return merge(call, table, workers, engine, until_empty=True)


@main.command()
@workers_option
@click.option("--until-empty", is_flag=True, help="End when the queue is empty, instead of waiting for more.")
@click.option(
    "--max-seconds",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Begin nothing that would end later than after so many seconds, if it took as long as the longest so far.",
)
@click.option(
    "--grace-seconds",
    type=click.FloatRange(min=0),
    default=GRACE_SECONDS,
    show_default=True,
    metavar="S",
    help="After SIGTERM give back what is not finished in so many seconds.",
)
@click.option(
    "--health-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="A file to touch every few seconds, for a probe of who runs the worker.",
)
@_engine
@common
@click.pass_obj
def worker(
    call: Call,
    workers: int,
    until_empty: bool,
    max_seconds: float | None,
    grace_seconds: float,
    health_file: Path | None,
    engine: "EngineName | None",
) -> Answer:
    """Merge queued partitions as they come.

    On SIGTERM it finishes those at hand. Before it ends by itself it tries to publish. Takes all tables of the file. Of a
    table with [large], engine spark works on the large partitions' queue, and arrow on the other.

    \b
    Example:
      lakeupsert worker --workers 2 --until-empty
    """
    begun = clock.elapsed()
    call.stop.grace_seconds = grace_seconds
    if health_file is not None and not health_file.parent.is_dir():
        raise click.UsageError(f"--health-file: there is no folder {health_file.parent}.")
    alive = health_file.touch if health_file is not None else lambda: None

    def one(table: "Table") -> Answer:
        need_spark(table, engine=engine)
        left = None if max_seconds is None else max(0.0, max_seconds - (clock.elapsed() - begun))
        return merge(call, table, workers, engine, until_empty, both_queues=False, max_seconds=left, alive=alive)

    return each(call, one, at_once=not until_empty)


@main.command()
@click.option("--tag", metavar="NAME", help="Name what is published then; a snapshot is kept as long as it has a tag.")
@click.option("--untag", metavar="NAME", help="Take that name away.")
@common
@click.pass_obj
def publish(call: Call, tag: str | None, untag: str | None) -> Answer:
    """Show readers the newest batch that is whole in every partition.

    \b
    Example:
      lakeupsert publish --tag before-migration
    """
    with call.open_table() as table:
        published = table.publish()
        if untag is not None:
            table.tag(untag, None)
        if tag is not None:
            table.tag(tag)
        text = output.block(f"Table {table.name}", output.publish_facts(published))
        error = trouble(call, table, [], published)
        return Answer(output.publish_result(published), text, waiting(published), error=error)


@main.command()
@click.option("--watch", "watching", is_flag=True, help="Show it on the terminal, again every second, until Ctrl-C.")
@common
@click.pass_obj
def status(call: Call, watching: bool) -> Answer:
    """Tell what readers see and what is still to do. Takes all tables of the file.

    \b
    Example:
      lakeupsert status --json
    """
    if watching:
        with call.open_tables() as tables:
            watch(call, tables)

    def one(table: "Table") -> Answer:
        found = table.status()
        error = None
        warnings = (*found.warnings, *skipped(table))
        dead = found.queue.dead if found.queue else 0
        letters = output.count(dead, "dead letter")
        if found.failed:
            error = failed(table, found.failed)
        elif found.lagging:
            error = lagging(table, found.lagging)
        elif dead and found.dirty:
            error = RefusedError(
                "dead-letters",
                f"Table {table.name!r}: {letters}: these messages failed at every try, and "
                f"{output.count(found.dirty, 'partition')} still to be merged.",
                next="run `lakeupsert redrive`, which tells why each failed and gives it back to the workers; then "
                "`lakeupsert dedupe`, where none is at work",
            )
        elif dead:
            warnings += (
                f"{letters} in the queue, and every partition is merged: they are out of date, and "
                "`lakeupsert redrive` deletes them",
            )
        text = output.block(f"Table {table.name}", output.status_facts(found))
        return Answer(output.status_result(found), text, warnings, error=error)

    return each(call, one)


@main.command()
@common
@click.pass_obj
def history(call: Call) -> Answer:
    """List the snapshots, newest first.

    \b
    Example:
      lakeupsert history
    """
    with call.open_table() as table:
        snapshots, tags, lost = table.snapshots(), table.tags(), table.lost_snapshots()
        warnings = (
            f"{output.count(len(lost), 'snapshot')} that nobody expired can't be found: "
            f"{', '.join(map(str, lost))}. Something other than lakeupsert deleted them. Newer ones do not need them.",
        )
        text = output.history_text(snapshots, tags)
        return Answer(output.history_result(snapshots, tags), text, warnings if lost else ())


@main.command()
@click.option(
    "--output",
    "target",
    required=True,
    metavar="X",
    help="A file ending in .parquet, .csv or .jsonl, or a path ending in / for a Hive folder.",
)
@_snapshot
@_where
@click.option("--history", is_flag=True, help="All versions of the rows, with valid_from and valid_to.")
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
@common
@click.pass_obj
def export(call: Call, target: str, snapshot: str, where: str | None, history: bool, overwrite: bool) -> Answer:
    """Write the rows of a snapshot to a file or folder.

    They are ordered by partition and key. The file appears when it is whole.

    \b
    Example:
      lakeupsert export --output january.csv --where "transaction_date < '2020-02-01'"
    """
    with call.open_table() as table, call.progress(table.name) as progress:
        chosen = snapshot if snapshot == "latest" else table.view(snapshot).number
        progress(f"writing {target}")
        rows = table.export(
            target,
            snapshot="published" if chosen is None else chosen,
            where=where,
            overwrite=overwrite,
            history=history,
        )
        of = "there is no snapshot yet" if chosen is None else f"snapshot {chosen}"
        text = f"{output.count(rows, 'row')} to {target} ({of})"
        return Answer({"snapshot": chosen, "output": target, "rows": rows}, text)


@main.command()
@_snapshot
@_where
@common
@click.pass_obj
def files(call: Call, snapshot: str, where: str | None) -> Answer:
    """List the files that a reader of a snapshot opens.

    One path a line.

    \b
    Example:
      lakeupsert files --where "transaction_date = '2020-01-01'" | xargs ls -l
    """
    from lakeupsert.read.view import no_files  # brings Arrow

    with call.open_table() as table:
        if snapshot == "latest":
            raise no_files()
        view = table.view(snapshot)
        names = ("partition", "path", "rows", "superseded", "bytes")
        listed = list(view.files(where))
        found = [{name: getattr(file, name) for name in names} for file in listed]
        result = {"snapshot": view.number, "files": found}
        superseded = sum(bool(file["superseded"]) for file in found)
        if superseded:
            return Answer(result, "", error=_superseded(table.name, superseded, len(found)))
        older = sum(bool(view.spec.renamed_since(file.file.renames)) for file in listed)
        warnings = (
            (
                f"{older:,} of {len(found):,} files have columns that were renamed or dropped since under their old names; "
                "`lakeupsert reprocess` writes them anew",
            )
            if older
            else ()
        )
        return Answer(result, "\n".join(str(file["path"]) for file in found), warnings)


def _superseded(table: str, files: int, of: int) -> RefusedError:
    return RefusedError(
        "superseded-rows",
        f"{files:,} of {of:,} files of table {table!r} hold rows that newer ones supersede. Who opens the files alone, "
        "without their deletion vectors, reads both; so they are not listed here (--json lists them).",
        next="read it with to_arrow or to_spark, or `lakeupsert export`; or run `lakeupsert compact --full`, and set strategy = "
        '"rewrite" where readers open files themselves',
    )


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@json_option
@click.pass_obj
def demo(call: Call, arguments: tuple[str, ...]) -> Answer:
    """Load real purchases night by night, and check every row.

    `lakeupsert demo -- --help` lists its own options.

    \b
    Example:
      lakeupsert demo --nights 30
    """
    from lakeupsert.demo import main as demonstrate  # brings Arrow and the data

    try:
        with redirect_stdout(sys.stderr if call.as_json else sys.stdout):
            code = demonstrate(list(arguments))
    except SystemExit as e:  # it parses its own arguments
        if not e.code:
            raise
        raise click.UsageError("The demonstration does not take these arguments.") from e
    error = None
    if code:
        error = RefusedError(
            "demo-failed",
            "The demonstration did not end exact; what it printed tells where.",
            next="report what it printed as a bug of lakeupsert",
        )
    return Answer({"exact": not code}, error=error)


@main.command()
@click.option("--example", is_flag=True, help="Print a commented file to begin from, instead.")
@common
@click.pass_obj
def config(call: Call, example: bool) -> Answer:
    """Print the effective settings, and where each came from.

    Of all tables of the file, or the one of --table.

    \b
    Example:
      lakeupsert config --example > lakeupsert.toml
    """
    if example:
        return Answer({"example": EXAMPLE}, EXAMPLE.rstrip("\n"))
    found = call.config()
    if call.table is not None or len(found.tables) == 1:
        call.table, _ = found.table(call.table)
    names = list(found.tables) if call.table is None else [call.table]
    return Answer(output.config_result(found, names), output.config_text(found, names))
