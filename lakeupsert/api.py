"""`lakeupsert.Table`: everything that the command line does, from Python.

`lakeupsert.readonly` has the methods that change nothing. A method with many options takes the fields of a dataclass (`_takes`).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, TypeVar

from lakeupsert.config import PublisherName
from lakeupsert.engine.by_name import EngineName, HostName, host_by_name
from lakeupsert.operations.adopt.adopt import AdoptResult, adopt
from lakeupsert.operations.backup import CopyResult, backup, recover
from lakeupsert.operations.changes import Changes, changes, changes_to_spark
from lakeupsert.operations.compact import compact
from lakeupsert.operations.erase.erase import EraseOptions, EraseResult, erase
from lakeupsert.operations.fsck import FsckResult, fsck
from lakeupsert.operations.ingest import IngestOptions, ingest
from lakeupsert.operations.maintain import MaintainOptions, Upkeep
from lakeupsert.operations.rebuild.rebuild import RebuildResult, rebuild
from lakeupsert.operations.reconcile import ReconcileResult, reconcile
from lakeupsert.operations.redrive import RedriveResult, redrive
from lakeupsert.operations.replay import replay
from lakeupsert.operations.reprocess import ReprocessOptions, ReprocessResult, reprocess_and_publish
from lakeupsert.operations.restore import RestorePlan, restore
from lakeupsert.operations.run import RunOptions, RunResult, run
from lakeupsert.operations.schema import SchemaChange, change, retype_to
from lakeupsert.operations.snapshots import tag
from lakeupsert.operations.statement.statement import StatementOptions, StatementResult, UpdateOptions, run_statement
from lakeupsert.operations.stream import take_stream
from lakeupsert.operations.vacuum import VacuumResult, vacuum
from lakeupsert.pipeline.append.append import append
from lakeupsert.pipeline.append.commit import AppendResult
from lakeupsert.pipeline.append.discover import AppendOptions
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.messages import send_missing
from lakeupsert.pipeline.publish import PublishResult, publish, publish_to
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.workers.drain_queues import DrainOptions, drain_queues, merge_received
from lakeupsert.read.view import SnapshotFigures
from lakeupsert.readonly import Found, Given, ReadOnlyTable, accounted, configured
from lakeupsert.table.chain import Link
from lakeupsert.table.evolution import drop, rename
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.types import named_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["EngineName", "HostName", "ReprocessResult", "RunResult", "SnapshotFigures", "StatementResult", "Table"]

Options = TypeVar("Options")


def _commits(method: Callable[Concatenate["Table", Given], Found]) -> Callable[Concatenate["Table", Given], Found]:
    return accounted(configured(method))


def _takes(
    kind: Callable[Given, Options],
) -> Callable[[Callable[["Table", Options], Found]], Callable[Concatenate["Table", Given], Found]]:
    """Callers give the fields of the dataclass ``kind`` as arguments: their names, types, defaults and meaning are written there,
    and nowhere else. `help` lists them."""

    def decorate(method: Callable[["Table", Options], Found]) -> Callable[Concatenate["Table", Given], Found]:
        @wraps(method)
        def call(table: "Table", /, *args: Given.args, **kwargs: Given.kwargs) -> Found:
            return method(table, kind(*args, **kwargs))

        own, fields = inspect.signature(method), inspect.signature(kind).parameters.values()
        itself = next(iter(own.parameters.values()))
        call.__signature__ = own.replace(parameters=[itself, *fields])  # type: ignore[attr-defined]  # for `inspect` and `help`
        assert isinstance(kind, type)
        of_classes = [inspect.cleandoc(one.__doc__ or "") for one in reversed(kind.__mro__)]
        described = [text.split("Attributes:\n", 1)[1] for text in of_classes if "Attributes:\n" in text]
        call.__doc__ = "\n".join([inspect.getdoc(method) or "", "", "Args:", *described])
        return call

    return decorate


class Table(ReadOnlyTable):
    """A configured table. Opening it only reads the configuration; the first `append` creates the table."""

    # -- a night

    @_commits
    @_takes(RunOptions)
    def run(self, options: RunOptions) -> RunResult:
        """Run a night: send missing messages, append, dedupe, publish. You may repeat it: after a crash, the next run finishes.

        Raises RefusedError before anything is written if its `plan` is above ``max_bytes`` or ``max_cost``.
        """
        return run(self._table, options)

    @_commits
    @_takes(IngestOptions)
    def ingest(self, options: IngestOptions) -> None:
        """Take what lands, batch after batch, merge and publish it, until ``stop`` is set or ``max_seconds`` are over."""
        ingest(self._table, options)

    @_commits
    def foreach_batch(self, rows: "DataFrame", batch_id: int) -> PublishResult:
        """Take a batch of a Spark stream, once: ``stream.writeStream.foreachBatch(table.foreach_batch)``.

        It appends, merges and publishes. If Spark repeats the batch, the ledger knows it by the ids of query and batch.
        Raises ConfigurationError if the rows do not come from a stream, or the table can't take one (`not-streamable`).
        """
        return take_stream(self._table, rows, batch_id)

    @_commits
    @_takes(AppendOptions)
    def append(self, options: AppendOptions) -> AppendResult | None:
        """Phase one: commit all new landing files as one batch. Returns None if there are none."""
        return (replay if options.replay_quarantine else append)(self._table, options)

    @_commits
    def send_missing(self, selected: Callable[[str], bool] = lambda partition: True) -> int:
        """Send a message for every selected partition that has batches to merge. Returns how many were sent."""
        return send_missing(self._table, selected)

    @_commits
    @_takes(DrainOptions)
    def dedupe(self, options: DrainOptions) -> list[PartitionResult]:
        """Phase two: merge the partitions on the queue until it is empty, or (``until_empty=False``) until ``stop``.

        On host spark, engine arrow runs in Spark tasks, and ``workers`` do nothing. If the table has [large], Spark merges large
        partitions afterwards. With ``collect`` the returned list is empty.
        """
        return drain_queues(self._table, options)

    @_commits
    def dedupe_received(
        self,
        records: Sequence[Mapping[str, Any]],  # JSON of AWS or Azure
        *,
        workers: int,
        memory_bytes: int,
        seconds_left: Callable[[], float],
    ) -> list[Mapping[str, Any]]:
        """Phase two for messages that AWS Lambda or Azure Functions received (see the queue's `received`).

        Returns the records to give back; `pipeline.workers.drain_queues.merge_received` says what becomes of the others.
        """
        return merge_received(
            self._table, records, workers=workers, memory_bytes=memory_bytes, seconds_left=seconds_left
        )

    @_commits
    def publish(self, *, to: PublisherName | None = None, reset: bool = False, audited: bool = True) -> PublishResult:
        """Show readers the newest batch that is merged in every partition.

        Args:
            to: raise the error of this publisher, which otherwise is in the result.
            reset: let that publisher first delete what it has written; its readers see nothing meanwhile.
            audited: ask the queries of the setting `audit` first.
        """
        if to is None and not reset:
            return publish(self._table, audited=audited)
        return publish_to(self._table, to, reset=reset, audited=audited)

    # -- rows and columns

    @_commits
    @_takes(UpdateOptions)
    def update(self, options: UpdateOptions) -> StatementResult:
        """Set columns of the rows of a filter or of a list of keys: one batch, merged and published.

        Raises ConfigurationError if the table does not support it, or an argument can't be used; RefusedError if a new value
        does not fit its column exactly, or a batch that touches the rows' partitions is not published yet.
        """
        return run_statement(self._table, options)

    @_commits
    @_takes(StatementOptions)
    def delete(self, options: StatementOptions) -> StatementResult:
        """Delete the rows of a filter or of a list of keys. Errors are those of `update`."""
        return run_statement(self._table, options)

    @_commits
    def rename_column(self, column: str, name: str, *, dry: bool = False) -> SchemaChange:
        """Rename a column from the next ledger number on, without rewriting a file. Readers see it after the next publish.

        Raises ConfigurationError if there is no such column, ``name`` is taken, or a setting names the column.
        """
        one_name = self._table.settings.one_name_in_files
        return change(self._table, lambda spec: rename(spec, column, name, one_name=one_name), dry=dry)

    @_commits
    def drop_column(self, column: str, *, dry: bool = False) -> SchemaChange:
        """Drop a column as `rename_column` renames one. A later column of that name is a new one."""
        one_name = self._table.settings.one_name_in_files
        return change(self._table, lambda spec: drop(spec, column, one_name=one_name), dry=dry)

    @_commits
    def retype_column(
        self,
        column: str,
        type: str,
        *,
        quarantine_unfit: bool = False,
        dry: bool = False,
        progress: Callable[[str], None] = lambda text: None,
    ) -> SchemaChange:
        """Give a column another type as `rename_column` gives it another name.

        Readers convert the values of old files; merges and `compact` convert them for good.

        Args:
            type: as under `[tables.NAME.schema]`, for example ``double`` or ``decimal(12,2)``.
            quarantine_unfit: where a value does not convert, the column becomes null, and a copy of the row goes to quarantine.
            dry: change nothing; `SchemaChange.conversion` counts the values that convert, and lists those that do not.

        Raises:
            ConfigurationError: there is no such column, or it can't have that type.
            RefusedError: values do not convert (``unfit-values``), and ``quarantine_unfit`` is not set.
        """
        to = retype_to(self._table.declaration, column, named_type(type, "the type of a retype"))
        return change(self._table, to, dry=dry, quarantine_unfit=quarantine_unfit, progress=progress)

    def shows(self, change: SchemaChange) -> bool:
        """Whether readers see a change of the columns already."""
        snapshot = self._table.history.last_snapshot()
        return snapshot is not None and snapshot.body.spec_version >= change.version

    # -- upkeep

    @_commits
    def adopt(self, progress: Callable[[str], None] = lambda text: None, *, host: HostName = "local") -> AdoptResult:
        """Turn the Hive-partitioned Parquet folder at `processed` into a table, without rewriting a file.

        ``host`` reads the footers of its files, and makes its key index.
        """
        return adopt(self._table, host_by_name(host), progress)

    @_commits
    @_takes(ReprocessOptions)
    def reprocess(self, options: ReprocessOptions) -> ReprocessResult:
        """Rewrite the selected partitions, each at its batch, and publish them. No row changes.

        The work goes through the queue, and the call waits for partitions that other workers have taken.
        """
        return reprocess_and_publish(self._table, options)

    @_commits
    def compact(
        self,
        *,
        full: bool = False,
        host: HostName = "local",
        workers: int = 1,
        stop: Stop | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> ReprocessResult:
        """Rewrite partitions that have become slow to read (``full``: all that a rewrite improves). No row changes."""
        merges = None if host == "spark" else workers
        how = ReprocessOptions(host=host, workers=merges, stop=stop, progress=progress)
        return compact(self._table, how, full=full)

    @_commits
    @_takes(MaintainOptions)
    def maintain(self, options: MaintainOptions) -> None:
        """Compact, expire and vacuum again and again, until ``stop`` is set or ``max_seconds`` are over."""
        Upkeep(self._table, options).repeat()

    @_commits
    def tag(self, name: str, snapshot: str | int | date | None = "published") -> Link[Snapshot] | None:
        """Tag a snapshot, which is kept as long as it has a tag; None removes the tag. Returns None if nothing had to change.

        Raises ConfigurationError if there is no such snapshot, or no such tag to remove.
        """
        return tag(self._table, name, snapshot)

    @_commits
    def restore(self, to: str | int | date, *, dry: bool = True) -> RestorePlan:
        """Restore the table to a snapshot, by number, tag or time; `dedupe` and `publish` then finish it.

        With ``dry`` nothing is written, and the plan says what would change.
        """
        return restore(self._table, to, dry=dry)

    @_commits
    def vacuum(self, *, dry: bool = True, progress: Callable[[str], None] = lambda text: None) -> VacuumResult:
        """Expire all but tagged snapshots and the newest `keep_snapshots`, and delete files that only expired ones need."""
        return vacuum(self._table, dry=dry, progress=progress)

    @_commits
    @_takes(EraseOptions)
    def erase(self, options: EraseOptions) -> EraseResult:
        """Make keys vanish from every object of the table: rows, deletes, older versions, the key index, quarantine, statements.

        Call it again until `EraseResult.is_erased`. Readers of older snapshots end with an error. Raises RefusedError if a batch
        is not published yet.
        """
        return erase(self._table, options)

    @_commits
    def redrive(self, selected: Callable[[str], bool] = lambda partition: True) -> RedriveResult:
        """Return the dead letters of the selected partitions to the queue, and delete those of merged partitions."""
        return redrive(self._table, selected)

    def changes(self, since: str | int | date | None, until: str | int | date = "published") -> Changes:
        """Read the rows that changed behind one snapshot (None: before the first) up to another one.

        Name your position by a tag, which also keeps its snapshot: ``found = table.changes("mirror")``, read ``found.rows``, then
        ``table.tag("mirror", found.snapshot)``.
        """
        history = self._table.history
        return changes(history.objects, history.existing_spec(), since, until)

    def changes_to_spark(
        self, spark: "SparkSession", since: str | int | date | None, until: str | int | date = "published"
    ) -> "tuple[DataFrame, int | None]":
        """As `changes`: a Spark DataFrame, and the number of the later snapshot."""
        history = self._table.history
        return changes_to_spark(spark, history.objects, history.existing_spec(), since, until)

    def fsck(
        self, *, deep: bool = False, host: HostName = "local", progress: Callable[[str], None] = lambda text: None
    ) -> FsckResult:
        """Check each object that readers of a kept snapshot or the next commands need. Damage is a finding, and raises nothing.

        Without ``deep``, only names and sizes of data files are compared with the listing. With it, ``host`` reads all of them.
        """
        return fsck(self._table, host_by_name(host) if deep else None, progress=progress)

    def backup(self, output: str, *, progress: Callable[[str], None] = lambda text: None) -> CopyResult:
        """Copy the table to another address. The second time, only objects that the copy lacks are copied."""
        return backup(self._table, output, progress)

    @_commits
    def recover(
        self, address: str, number: int | None = None, *, progress: Callable[[str], None] = lambda text: None
    ) -> CopyResult:
        """Make the table, which does not exist, as it was at a backup; None: the newest one at that address."""
        return recover(self._table, address, number, progress)

    @_commits
    def rebuild(
        self, address: str, *, host: HostName = "local", progress: Callable[[str], None] = lambda text: None
    ) -> RebuildResult:
        """Make the table, which does not exist, of what is left of another whose metadata is lost. ``host`` merges its rows."""
        return rebuild(self._table, address, host_by_name(host), progress)

    @_commits
    def reconcile(
        self,
        *,
        deep: bool = False,
        counted: bool = True,
        host: HostName = "local",
        selected: Callable[[str], bool] = lambda partition: True,
        progress: Callable[[str], None] = lambda text: None,
    ) -> ReconcileResult:
        """Send lost messages again, publish complete batches, and prove that every appended row is accounted for.

        ``host`` counts the rows of files. Without ``counted`` there is no proof, and no data file is read. With ``deep``, DuckDB
        recomputes the published rows from the landing files on this machine, and all columns are compared.
        """
        counting = host_by_name(host) if counted else None
        return reconcile(self._table, counting, deep=deep, selected=selected, progress=progress)
