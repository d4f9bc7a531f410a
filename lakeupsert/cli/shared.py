"""What several commands do: go through the tables, merge and publish, select partitions, find what is wrong."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from lakeupsert import sparkenv
from lakeupsert.cli import output
from lakeupsert.cli.frame import Answer, Call, Function, Terminated, as_ours
from lakeupsert.errors import LakeupsertError, RefusedError, parts

if TYPE_CHECKING:
    from lakeupsert.api import Table
    from lakeupsert.engine.by_name import EngineName, HostName
    from lakeupsert.pipeline.commit import AppendResult
    from lakeupsert.pipeline.dedupe import PartitionResult
    from lakeupsert.pipeline.publish import PublishResult


def each(call: Call, one: "Callable[[Table], Answer]", at_once: bool = False) -> Answer:
    """The command for each table: in the order of the file, or at once where each goes on until it is stopped.

    A table that fails does not keep the others from their turn; the first failure is the call's.
    """
    with call.open_tables() as tables:
        if len(tables) == 1:
            return one(tables[0])

        def guarded(table: "Table") -> Answer:
            try:
                answer = one(table)
            except (Exception, KeyboardInterrupt, Terminated) as e:
                answer = Answer(None, error=as_ours(e, call))
            if answer.error is not None:
                call.account(answer.error, table)
            return answer

        answers: dict[str, Answer] = {}
        if at_once:
            with ThreadPoolExecutor(len(tables)) as pool, call.stoppable() as stop:
                futures = {pool.submit(guarded, table): table.name for table in tables}
                try:
                    for future in as_completed(futures):
                        if future.result().error:
                            break  # who started us should know, and start us again
                finally:
                    stop.set()
            answers = {name: future.result() for future, name in futures.items()}
        else:
            for table in tables:
                if not call.stop.is_set():
                    answers[table.name] = answer = guarded(table)
                    if answer.error is not None and answer.error.code in ("interrupted", "terminated"):
                        break
    failed = [(name, a.error) for name, a in answers.items() if a.error]
    return Answer(
        {"tables": {name: a.result for name, a in answers.items()}},
        "\n\n".join(a.text for a in answers.values() if a.text),
        (
            *(f"{name}: {w}" for name, a in answers.items() for w in a.warnings),
            *(f"{name}: {e.message} Next: {e.next}" for name, e in failed[1:]),
        ),
        tuple(f"{name}: {w}" for name, a in answers.items() for w in a.told),
        failed[0][1] if failed else None,
    )


def merge(
    call: Call,
    table: "Table",
    workers: int,
    engine: "EngineName | None",
    until_empty: bool,
    both_queues: bool = True,
    max_seconds: float | None = None,
    alive: Callable[[], object] = lambda: None,
) -> Answer:
    with call.progress(table.name) as progress, call.stoppable() as stop:
        results = table.dedupe(
            workers=workers,
            engine=engine,
            until_empty=until_empty,
            both_queues=both_queues,
            max_seconds=max_seconds,
            stop=stop,
            alive=alive,
            progress=lambda left: progress(f"{output.count(left, 'partition')} to merge"),
        )
        published = None if stop.is_set() else table.publish()
    facts = output.dedupe_facts(results)
    if published is not None:
        facts += output.publish_facts(published)
    return Answer(
        output.dedupe_result(results),
        output.block(f"Table {table.name}", facts),
        waiting(published) if published else (),
        error=trouble(call, table, results, published),
    )


def need_spark(
    table: "Table", *, host: "HostName" = "local", engine: "EngineName | None" = "arrow", large: bool = False
) -> None:
    if host == "spark" or (engine or table.settings.engine) == "spark" or (large and table.settings.large):
        sparkenv.prepare()


def partition_options(command: Function) -> Function:
    """`--from`, `--to` and `--partition`; what `selection` takes."""
    for option in (
        click.option(
            "--partition",
            "partitions",
            metavar="V",
            multiple=True,
            help="One partition: 2020-01-01, or its folder; repeatable.",
        ),
        click.option("--to", "last", metavar="V", help="Last partition value, inclusive; of several, the date."),
        click.option(
            "--from",
            "first",
            metavar="V",
            help="First partition value, inclusive; of several, the date.",
        ),
    ):
        command = option(command)
    return command


def selection(table: "Table", first: str | None, last: str | None, partitions: Sequence[str]) -> Callable[[str], bool]:
    """Whether a partition is one of these, or has a value from ``first`` to ``last``, compared as its type compares."""
    if partitions and (first or last):
        raise click.UsageError("Give --partition, or --from and --to.")
    from lakeupsert.table.layout import parse_partition, parse_value, partition_scalars, ranged_column  # brings Arrow

    spec = table.view().spec
    column = ranged_column(spec)

    def value(partition: str) -> Any:
        return partition_scalars(spec, partition)[column].as_py()

    if partitions:
        wanted = {parse_partition(spec, p) for p in partitions}
        return wanted.__contains__
    low = parse_value(spec, column, first).as_py() if first else None
    high = parse_value(spec, column, last).as_py() if last else None
    if low is not None and high is not None and low > high:
        raise click.UsageError(f"--from {first} is after --to {last}.")
    return lambda p: (low is None or value(p) >= low) and (high is None or value(p) <= high)


def append_warnings(
    table: "Table", appended: "AppendResult | None", said: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those to be told, ``said`` where there is no batch, and the one about quarantined rows, that the text has already."""
    if appended is None:
        return tuple(said), ()
    if not appended.entry.rows_quarantined:
        return appended.warnings, ()
    places = ", ".join(output.quarantine_places(appended, table.settings))
    return appended.warnings, (f"quarantined {output.quarantined(appended)}; see {places}",)


def skipped(table: "Table") -> tuple[str, ...]:
    """A warning about landing files that no batch takes. Who may not list landing sees the table's status all the same."""
    with suppress(LakeupsertError, OSError):
        found = table.skipped_files()
        return (str(found),) if found else ()
    return ()


def waiting(published: "PublishResult") -> tuple[str, ...]:
    """Warnings where batches wait for partitions that are only slow (about those that fail `trouble` speaks), and where a
    snapshot was lost."""
    lost = (
        ()
        if published.lost is None
        else (
            f"snapshot {published.lost} was gone: something else deleted it. Snapshot {published.snapshot} shows "
            "the newest whole batch in its place. Tags that were set in the lost one are lost.",
        )
    )
    if published.failed or not published.waiting:
        return lost
    return (
        *lost,
        f"batches after {published.batch} are not published yet: they touch "
        f"{output.count(len(published.waiting), 'partition')} ({output.named(published.waiting)}), and not all are "
        "merged. `lakeupsert run` merges what nobody else is merging.",
    )


def trouble(
    call: Call, table: "Table", results: "Sequence[PartitionResult]", published: "PublishResult | None"
) -> LakeupsertError | None:
    """What is wrong although the command came to its end: partitions that fail, or that readers see as they were."""
    changed = published is not None and published.partitions_changed > 0
    call.changed = call.changed or changed
    failing = unmerged(results)
    if published:
        failing = {**published.failed, **failing}
    if failing:
        return failed(table, failing, changed)
    return lagging(table, published.lagging, changed) if published and published.lagging else None


def unmerged(results: "Sequence[PartitionResult]") -> dict[str, str]:
    """The partitions that failed at their last try, with what it said."""
    last = {r.partition: r for r in results}
    return {p: r.error or "" for p, r in last.items() if r.status == "failed"}


def failed(table: "Table", failed: Mapping[str, str], changed: bool = False) -> RefusedError:
    partition, told = next(iter(failed.items()))
    # The engine's own error ends with what to do about it, and that is the best advice there is.
    reason, advice = parts(told)
    others = [p for p in failed if p != partition]
    hold = table.settings.on_failed_partition == "hold"
    return RefusedError(
        "failed-partitions",
        f"Table {table.name!r}: {output.count(len(failed), 'partition')} can't be merged. {partition}: {reason} "
        + (f"The others are {output.named(others)}. " if others else "")
        + ("Readers keep" if hold else "Of these partitions readers keep")
        + f" the batch before (`on_failed_partition` is {table.settings.on_failed_partition!r}).",
        data_changed=changed,
        next=f"{advice or 'mend the cause'}; then run `lakeupsert redrive`, which gives these partitions "
        "back to the workers, or `lakeupsert run`, which merges them itself",
        partition=partition,
    )


def lagging(table: "Table", lagging: Sequence[str], changed: bool = False) -> RefusedError:
    return RefusedError(
        "lagging-partitions",
        f"Table {table.name!r}: readers see {output.count(len(lagging), 'partition')} without the newest batches: "
        f"{output.named(lagging)}.",
        data_changed=changed,
        next="`lakeupsert run` merges these again and tells why one fails",
        partition=lagging[0],
    )
