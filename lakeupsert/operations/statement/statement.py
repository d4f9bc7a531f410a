"""Update or delete the rows of a filter or of a list of keys: one batch of what they become, whose rank is above theirs.

Reads     the heads of the chains; the rows in one snapshot, of partitions that may have such rows
Writes    packs of the new rows; then what `commit_batch` writes; then what a night writes behind its append
Repeat    safe with a batch id: what was committed under it is only finished. Without one, a repeated call is refused until the
          first one's batch is published, and would then change the rows again

    read heads -> view -> rows -> new rows -> commit: spec -> ledger entry -> messages -> merge -> publish
     ^                                 |             |
     |        a batch of theirs that the view lacks  '- race lost, and the winner touches one of their partitions
     '------------------------------------------------'

A row keeps its ordering values (in a stamped table it gets the new receipt stamp) and wins by the later batch. Nobody may have
changed it between the view and the ledger entry: if a batch in between touches its partition, the call begins again, or fails if
the view is a snapshot that lacks the batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from lakeupsert.engine.batch import AppendJob
from lakeupsert.engine.hosts import LocalHost
from lakeupsert.engine.reports import touched_by
from lakeupsert.errors import ConfigurationError, LakeupsertError, RefusedError
from lakeupsert.operations.run import merge_and_publish
from lakeupsert.operations.statement.assignments import Assignments
from lakeupsert.operations.statement.key_list import KeyList, read_keys
from lakeupsert.operations.statement.rows import Changes, RowChoice
from lakeupsert.phrases import count
from lakeupsert.pipeline.append.commit import AppendResult, batch_job, commit_batch, send_messages
from lakeupsert.pipeline.append.discover import Ground, read_heads
from lakeupsert.pipeline.history import History
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.merge.latest import latest
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import PublishResult
from lakeupsert.pipeline.standing import unpublished
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.workers.drain_queues import DrainOptions
from lakeupsert.progress import Countdown
from lakeupsert.read.view import View, partitions_of
from lakeupsert.rows.arrays import Rows
from lakeupsert.table.chain import LOST, Lost, until_won
from lakeupsert.table.ledger import LedgerEntry, Statement, active_batches
from lakeupsert.table.spec import TableSpec

Seen = Literal["published", "latest"]


@dataclass(frozen=True, kw_only=True)
class StatementOptions:
    """Which rows a statement is for, and how it is done.

    Attributes:
        where: a filter as in `to_arrow`.
        keys: a file with the key columns (CSV, JSON lines, Parquet, Avro or ORC), and if you like partition columns.
        snapshot: read the rows as readers see them, or with all that was appended.
        batch_id: a repeated call with the same id changes nothing again; it only finishes the first one.
        dry: only count the rows.
        workers: processes of this machine that merge.
        stop: once set, the merges that run are finished, and no others are begun.
    """

    where: str | None = None
    keys: str | Path | None = None
    snapshot: Seen = "published"
    batch_id: str | None = None
    dry: bool = True
    workers: int = 1
    stop: Stop | None = None
    progress: Callable[[str], None] = lambda text: None

    @property
    def expressions(self) -> Mapping[str, str] | None:
        """The new value of each column, in DuckDB's SQL; None: the rows are deleted."""
        return None


@dataclass(frozen=True)
class UpdateOptions(StatementOptions):
    """Which columns are set.

    Attributes:
        set: by column, an expression in DuckDB's SQL over the columns of the row, for example ``{"amount": "amount * 0.87"}``.
    """

    set: Mapping[str, str]

    @property
    def expressions(self) -> Mapping[str, str]:
        return self.set


@dataclass(frozen=True)
class StatementResult:
    """What an update or delete did; with ``dry`` what it would do.

    Attributes:
        statement: as it is in the ledger. Its packs are empty if nothing was committed.
        rows: how many rows it is for, by partition.
        before, after: the first of these rows, and what they become (None: they are deleted). Both None if there is no row.
        keys, unseen_keys: how many keys were listed, and how many of these have no row that it is for.
        append: its batch; None if it was dry, or there is no row.
        repeated: an earlier call had committed it under the same batch id.
    """

    statement: Statement
    rows: Mapping[str, int]
    before: Rows | None = None
    after: Rows | None = None
    keys: int = 0
    unseen_keys: int = 0
    append: AppendResult | None = None
    repeated: bool = False
    dedupe: list[PartitionResult] = field(default_factory=list)
    publish: PublishResult | None = None
    warnings: tuple[str, ...] = ()


def _refuse_untyped(expressions: object) -> None:
    """Callers of Python pass text as on the command line, or the new value itself."""
    if isinstance(expressions, Mapping | None) and all(isinstance(x, str) for x in (expressions or {}).values()):
        return
    raise ConfigurationError(
        "unfit-expression",
        f"set={expressions!r} is not an expression in SQL for each column. Nothing was changed.",
        next="""pass texts by column: update({"amount": "amount * 0.87", "note": "'paid'", "shipped": "true"}, where=…)""",
    )


def run_statement(table: OpenTable, options: StatementOptions) -> StatementResult:
    """Change the rows, merge and publish; with ``dry`` only count them.

    Raises:
        ConfigurationError: the statement can't be used on this table, or the batch id belongs to another batch.
        RefusedError: a new value does not fit; or a row is in a partition with a batch that ``snapshot`` lacks.
    """
    _refuse_untyped(options.expressions)
    spec = table.history.existing_spec()
    _refuse_unsupported(table, spec, options)
    keys = read_keys(str(options.keys), spec) if options.keys is not None else None
    done = until_won(table.resources.store.uri(), partial(_attempt, table, options, keys))
    if options.dry or done.append is None:
        return done
    drain = DrainOptions(
        workers=options.workers, stop=options.stop, progress=Countdown("merging partitions", options.progress)
    )
    try:
        merged, published = merge_and_publish(table, drain, options.progress)
    except LakeupsertError as e:
        e.data_changed |= not done.repeated
        raise
    return replace(done, dedupe=merged, publish=published)


def _attempt(table: OpenTable, options: StatementOptions, keys: KeyList | None) -> StatementResult | Lost:
    ground = read_heads(table, options.batch_id)
    if ground.head is None or ground.spec is None:
        raise table.history.no_table_yet()
    spec = msgspec.structs.replace(ground.spec, statements=True)
    assignments = None if options.expressions is None else Assignments(spec.schema, options.expressions)
    asked = Statement(
        set=assignments.texts if assignments else {},
        where=options.where,
        keys=keys.sha256 if keys else None,
        seen=0,
        objects=(),
    )
    if options.batch_id is not None and (earlier := _committed(table.history, ground, options.batch_id, asked)):
        return earlier
    view = _view(table, options, ground, spec)
    behind = unpublished(table.history, ground.snapshot, ground.head)
    lacking = behind if options.snapshot == "published" else {}
    choice = RowChoice(view, options.where, keys)
    job = replace(batch_job(table, ground, spec), pack="statement")
    changes = Changes(spec, assignments, None if options.dry else job)
    try:
        for chosen in choice.rows():
            if chosen.partition in lacking:
                raise _not_seen(table.name, lacking, chosen.partition)
            changes.add(chosen)
            options.progress(f"{count(changes.rows.total(), 'row')} to {asked.kind} so far, in {chosen.partition}")
        changes.flush()
    except BaseException:
        table.resources.discard(changes.packs)
        raise
    result = StatementResult(
        msgspec.structs.replace(asked, seen=view.snapshot.batch, objects=tuple(sorted(changes.packs))),
        dict(changes.rows),
        changes.before,
        changes.after,
        keys.rows.num_rows if keys else 0,
        choice.unseen,
    )
    result = replace(result, warnings=_warnings(result, spec, lacking, options.where))
    if changes.job is None or not changes.rows:
        return result
    return _commit(table, ground, changes.job, changes, result, options.progress)


def _view(table: OpenTable, options: StatementOptions, ground: Ground, spec: TableSpec) -> View:
    """The rows, in the columns of the newest spec, in which the batch is written."""
    if options.snapshot == "latest":
        options.progress("merging what is not published yet, to read it")
        return replace(latest(table, options.where), spec=spec)
    return replace(View.of(table.history.objects, spec, ground.snapshot), spec=spec)


def _commit(
    table: OpenTable,
    ground: Ground,
    job: AppendJob,
    changes: Changes,
    result: StatementResult,
    progress: Callable[[str], None],
) -> StatementResult | Lost:
    touched = touched_by(changes.reports)
    entry = LedgerEntry(
        kind="batch",
        batch_id=ground.batch_id,
        received_at=ground.received_at,
        spec_version=job.spec_version,
        touched=touched,
        rows_read=sum(t.rows for t in touched.values()),
        statement=result.statement,
        retention=table.settings.tombstones_kept,
        snapshot=ground.snapshot_number,
    )
    link = commit_batch(table, LocalHost(), ground, job, entry, changes.packs, progress)
    if isinstance(link, Lost):
        return LOST
    unsent = send_messages(table, link)
    return replace(result, append=AppendResult(link.number, link.body, unsent), warnings=(*unsent, *result.warnings))


def _committed(history: History, ground: Ground, batch_id: str, asked: Statement) -> StatementResult | None:
    """The statement that an earlier call committed under this batch id; None if the id is free."""
    for number, header in enumerate(ground.entries):
        if header.kind != "batch" or header.batch_id != batch_id:
            continue
        same = header.statement is not None and header.statement.is_same(asked)
        if not same or number not in active_batches(enumerate(ground.entries)):
            what = "a restore has withdrawn since" if same else "is another one"
            raise ConfigurationError(
                "batch-id-taken",
                f"Batch id {batch_id!r} belongs to batch {number}, which {what}"
                f"{f': {header.statement}' if header.statement else ''}. Nothing was committed.",
                next=f"give this {asked.kind} another --batch-id, or none",
            )
        entry = history.entries(number - 1, number)[0].body
        assert entry.statement is not None, "the header has it"
        rows = {partition: touched.rows for partition, touched in entry.touched.items()}
        return StatementResult(entry.statement, rows, append=AppendResult(number, entry, ()), repeated=True)
    return None


def _warnings(
    result: StatementResult, spec: TableSpec, lacking: Mapping[str, int], where: str | None
) -> tuple[str, ...]:
    warnings: list[str] = []
    if result.unseen_keys:
        warnings.append(
            f"{result.unseen_keys:,} of {count(result.keys, 'listed key')} have no row that the {result.statement.kind} is for"
        )
    if others := list(partitions_of(spec, lacking, where)):
        warnings.append(
            f"{count(len(others), 'partition')}, for example {others[0]}, have batches that are not published yet. Rows that "
            "only these batches have are not read, and stay as they are; `--snapshot latest` reads them."
        )
    return tuple(warnings)


def _not_seen(name: str, lacking: Mapping[str, int], partition: str) -> RefusedError:
    return RefusedError(
        "unpublished-batch",
        f"Table {name!r}: batch {lacking[partition]} touches {partition} and is not published yet. The statement "
        "matches rows there. It would compute them from the published rows and replace newer ones. Nothing was changed.",
        next="run `lakeupsert run`, then the same command again; or give it --snapshot latest, which reads that batch too",
        partition=partition,
    )


# ---------------------------------------------------------------- what a table does not support


def _refuse_unsupported(table: OpenTable, spec: TableSpec, options: StatementOptions) -> None:
    """Raises ConfigurationError if the statement can't be exact on this table, or names no rows."""
    if options.where is None and options.keys is None:
        raise ConfigurationError(
            "no-rows-chosen",
            "An update or delete needs a filter or a list of keys. Nothing was changed.",
            next=f'give --where or --from; for every row of the table: --where "{spec.key[0]} is not null"',
        )
    if spec.history and not spec.stamped:
        raise ConfigurationError(
            "history-needs-order",
            f"Table {table.name!r} has `history = true` and is ordered by {', '.join(spec.order_by)}. A changed row keeps its "
            "ordering values, and the history has one version for each value. So the changed row would replace the present "
            "version there. Nothing was changed.",
            next="land records, or deletes, with greater ordering values, and run `lakeupsert run`",
        )
    if options.expressions is None:
        if spec.groups:
            raise ConfigurationError(
                "delete-of-groups",
                f"Table {table.name!r} has [groups]. Each group has its own order, but a delete has only the order of the "
                "whole row. Nothing was changed.",
                next="set the columns to null with `lakeupsert update`",
            )
    else:
        _refuse_update(table, spec, options.expressions)


def _refuse_update(table: OpenTable, spec: TableSpec, expressions: Mapping[str, str]) -> None:
    if not expressions:
        raise ConfigurationError(
            "nothing-to-set", "An update sets at least one column. Nothing was changed.", next="give --set"
        )
    if spec.ties == "content":
        raise ConfigurationError(
            "content-decides",
            f'Table {table.name!r} has `ties = "content"`. A changed row keeps its ordering values, so its content would decide '
            "whether it wins. Nothing was changed.",
            next=f"land records with greater values in {', '.join(spec.order_by)}, and run `lakeupsert run`",
        )
    fixed = {
        **dict.fromkeys(spec.all_orders, "an ordering column, which decides between records"),
        **{one.source: "what the partition is computed from" for one in spec.partition_from if one.source},
        **dict.fromkeys(spec.partition_by, "a partition column; a row can't move"),
        **dict.fromkeys(spec.key, "a key column, which says which row it is"),
    }
    for name in expressions:
        column = spec.table_name_of(name)
        if column in fixed:
            raise ConfigurationError(
                "column-in-use",
                f"Column {column!r} of table {table.name!r} can't be set: it is {fixed[column]}. Nothing was changed.",
                next="delete the rows and land them again with the other value, or set other columns",
            )
