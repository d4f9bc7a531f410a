"""`lakeupsert.Table`: everything that the command line does, from Python.

The signatures of its public methods are a contract with users. The work is done in `operations`, `pipeline`, `read` and `report`,
where the options of a method with many are a dataclass (`_takes`).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from difflib import get_close_matches
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, get_args, get_origin

import pyarrow as pa

from lakeupsert.config import PublisherName, TableSettings, load, refuse_in_zones
from lakeupsert.engine.by_name import EngineName, HostName, host_by_name
from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.events import Sink
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.operations.adopt import AdoptResult, adopt
from lakeupsert.operations.compact import compact
from lakeupsert.operations.ddl import Engine, Statements, ddl
from lakeupsert.operations.diff import Difference, diff
from lakeupsert.operations.doctor import Finding, doctor
from lakeupsert.operations.explain.explain import Explanation, explain
from lakeupsert.operations.plan.plan import Plan, plan
from lakeupsert.operations.quarantine import quarantined_rows
from lakeupsert.operations.reconcile import ReconcileResult, reconcile
from lakeupsert.operations.redrive import RedriveResult, redrive
from lakeupsert.operations.replay import replay
from lakeupsert.operations.reprocess import ReprocessOptions, ReprocessResult, reprocess_and_publish
from lakeupsert.operations.restore import RestorePlan, restore
from lakeupsert.operations.run import RunOptions, RunResult, run
from lakeupsert.operations.schema import Column, SchemaChange, change, columns, retype_to
from lakeupsert.operations.snapshots import list_snapshots, list_tags, lost_snapshots, tag
from lakeupsert.operations.statement.statement import StatementOptions, StatementResult, UpdateOptions, run_statement
from lakeupsert.operations.vacuum import VacuumResult, vacuum
from lakeupsert.pipeline.append.append import append
from lakeupsert.pipeline.append.commit import AppendResult
from lakeupsert.pipeline.append.discover import AppendOptions, new_files, skipped_files
from lakeupsert.pipeline.append.landing_dates import Skipped
from lakeupsert.pipeline.by_folder import is_folder, open_folder
from lakeupsert.pipeline.merge.dedupe import PartitionResult
from lakeupsert.pipeline.merge.latest import latest
from lakeupsert.pipeline.messages import send_missing
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import PublishResult, publish, publish_to
from lakeupsert.pipeline.stop import Stop
from lakeupsert.pipeline.stored_objects import StoredObjects
from lakeupsert.pipeline.workers.drain_queues import DrainOptions, drain_queues, merge_received
from lakeupsert.read.arrow import first_rows, reader_schema, to_arrow
from lakeupsert.read.export import export
from lakeupsert.read.history import history_to_arrow
from lakeupsert.read.native import missing
from lakeupsert.read.view import SnapshotFigures, View, ViewFile, latest_has_no_files, newest_snapshot
from lakeupsert.report import summary
from lakeupsert.report.nights import observe
from lakeupsert.report.page import page
from lakeupsert.report.status import Status, status
from lakeupsert.table.chain import Link
from lakeupsert.table.evolution import drop, rename
from lakeupsert.table.ledger import Reason, Scope
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.types import named_type

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    from duckdb import DuckDBPyConnection, DuckDBPyRelation
    from pyspark.sql import DataFrame, SparkSession

    from lakeupsert.read.query import QueryResult

__all__ = ["EngineName", "HostName", "ReprocessResult", "RunResult", "SnapshotFigures", "StatementResult", "Table"]

Given = ParamSpec("Given")
Found = TypeVar("Found")
Options = TypeVar("Options")

LISTED = 10_000
"""Names below landing that `skipped_files` lists. More: `status` waits longer for a large landing zone, 0.1 s for 1,000 names on
S3. Fewer: it misses more of the files that `append` warns about every night."""


def _public(method: Callable[Given, Found]) -> Callable[Given, Found]:
    """For methods that may commit: refuse arguments that their `Literal`s do not name, and write into an error what the call
    committed."""
    signature = inspect.signature(method)
    words = {name: allowed for name, given in signature.parameters.items() if (allowed := _words(given.annotation))}

    @wraps(method)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        table = args[0]
        assert isinstance(table, Table)
        since = table._table.tries()
        try:
            given = signature.bind(*args, **kwargs).arguments
            for name in words.keys() & given.keys():
                if given[name] not in words[name]:
                    raise _not_a_word(f"{method.__name__}({name}=…)", given[name], words[name])
            return method(*args, **kwargs)
        except LakeupsertError as e:
            table._table.account(e, since)
            raise

    return call


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
        call.__doc__ = "\n".join([inspect.getdoc(method) or "", "", "Args:", *_described(kind)])
        return call

    return decorate


def _described(kind: Callable[..., object]) -> list[str]:
    """How the dataclass and its bases describe their fields."""
    assert isinstance(kind, type)
    texts = [inspect.cleandoc(one.__doc__ or "") for one in reversed(kind.__mro__)]
    return [text.split("Attributes:\n", 1)[1] for text in texts if "Attributes:\n" in text]


def _configured(method: Callable[Given, Found]) -> Callable[Given, Found]:
    """For methods that need more than the table's folder: landing zone, queue, publishers. Refuses a table that was opened by its
    folder."""

    @wraps(method)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        table = args[0]
        assert isinstance(table, Table)
        if table._table.read_only:
            raise ConfigurationError(
                "opened-by-folder",
                f"{method.__name__} needs the configuration of the table. {table.settings.processed} was opened by its folder, "
                "which is for reading only: landing zone, queue, publishers and limits are settings of lakeupsert.toml. Nothing "
                "was changed.",
                next="open the table with its configuration: Table.open('lakeupsert.toml')",
            )
        return method(*args, **kwargs)

    return call


def _words(hint: object) -> tuple[object, ...]:
    """The values that a type hint allows, if it is a `Literal` or a union with one; otherwise ()."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = [_words(part) for part in get_args(hint) if part is not type(None)]
    optional = type(None) in get_args(hint)
    return (*(word for words in parts for word in words), *([None] if optional else [])) if any(parts) else ()


def _not_a_word(where: str, given: object, words: Sequence[object]) -> ConfigurationError:
    choices = ", ".join(map(repr, words))
    near = get_close_matches(str(given), [str(word) for word in words if word is not None], 1)
    return ConfigurationError(
        "unknown-word",
        f"{where} is {given!r}. It takes one of: {choices}." + (f" Did you mean {near[0]!r}?" if near else ""),
        next=f"give one of: {choices}",
    )


class Table:
    """A configured table. Opening it only reads the configuration; the first `append` creates the table."""

    def __init__(self, name: str, settings: TableSettings, *, origins: Mapping[str, str] | None = None) -> None:
        """``origins``: where each setting comes from, as in `Config.origins`."""
        self.name = name
        self.settings = settings
        self._table = OpenTable(name, settings, origins=origins or {})

    @classmethod
    def of(cls, opened: OpenTable) -> "Table":
        """The table over open objects that the caller has, for example over a store that injects faults."""
        table = cls(opened.name, opened.settings)
        table._table = opened
        return table

    def __enter__(self) -> "Table":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return summary.as_text(self._table)

    def _repr_html_(self) -> str:
        return summary.as_html(self._table)

    @property
    def schema(self) -> pa.Schema:
        """The columns and types that readers see; before the first publish, those of the next batch.

        Raises ConfigurationError if nothing was ever appended or adopted.
        """
        return reader_schema(self.view().spec)

    @property
    def snapshot(self) -> SnapshotFigures | None:
        """The newest published snapshot: its number, time, rows, partitions and bytes; None if there is none yet.

        Each access looks at the store: a few small reads, none of them a manifest or a data file.
        """
        link = newest_snapshot(self._table.objects)
        return None if link is None else SnapshotFigures.of(link)

    @property
    def objects(self) -> StoredObjects:
        """The objects that the table consists of, to look at: its chains, files and messages."""
        return StoredObjects(self._table)

    @classmethod
    def open(cls, config: str | Path, name: str | None = None, *, profile: str | None = None) -> "Table":
        """Open the table ``name`` of a `lakeupsert.toml`; without a name, the only table in it.

        ``config`` may also be the folder or address of a table, like ``lake/processed/orders`` or ``s3://lake/processed/orders``.
        Then its own spec says what the table is, ``name`` is what `query` calls it (by default the folder's name), and it can
        only be read (`opened-by-folder`).
        ``profile``: of ``[profiles.NAME]``, whose settings override the others; by default that of LAKEUPSERT_PROFILE.
        """
        if is_folder(str(config)):
            return cls.of(open_folder(str(config), name, profile))
        loaded = load(str(config), profile=profile)
        name, settings = loaded.table(name)
        return cls(name, settings, origins=loaded.origins[name])

    def listen(self, sink: Sink) -> None:
        """Give ``sink`` every event of this table from now on, when it happens: batches, merges, publishes, failures.

        Events of worker processes arrive too. The sink is called in the thread that does the work.
        """
        self._table.sinks.append(sink)

    @property
    def requests(self) -> dict[str, int]:
        """Requests to the store of the processed zone, by kind, from this object and its workers."""
        return self._table.store.requests.as_dict()

    def account(self, error: LakeupsertError, *, named: bool = False) -> None:
        """Write into the error what was committed since the table was opened, and what readers see; ``named`` adds the table."""
        self._table.account(error, named=named)

    def exists(self) -> bool:
        """Whether anything was ever appended or adopted."""
        return self._table.head_spec() is not None

    @_public
    @_configured
    def adopt(self, progress: Callable[[str], None] = lambda text: None, *, host: HostName = "local") -> AdoptResult:
        """Turn the Hive-partitioned Parquet folder at `processed` into a table, without rewriting a file.

        ``host``: where the footers of its files are read, and its key index is made.
        """
        return adopt(self._table, host_by_name(host), progress)

    @_public
    @_configured
    @_takes(AppendOptions)
    def append(self, options: AppendOptions) -> AppendResult | None:
        """Phase one: commit all new landing files as one batch. Returns None if there are none."""
        return (replay if options.replay_quarantine else append)(self._table, options)

    @_configured
    def new_files(self) -> tuple[LandingInput, ...]:
        """List the landing files that the next `append` would take."""
        return new_files(self._table)

    @_configured
    def skipped_files(self) -> Skipped | None:
        """Describe the landing files that have no date by `landing_dates`, among the first ones below landing."""
        return skipped_files(self._table, LISTED)

    @_public
    @_configured
    def send_missing(self, selected: Callable[[str], bool] = lambda partition: True) -> int:
        """Send a message for every selected partition that has batches to merge; returns how many were sent."""
        return send_missing(self._table, selected)

    @_public
    @_configured
    @_takes(DrainOptions)
    def dedupe(self, options: DrainOptions) -> list[PartitionResult]:
        """Phase two: merge the partitions on the queue until it is empty, or (``until_empty=False``) until ``stop``.

        On host spark, engine arrow runs in Spark tasks, and ``workers`` do nothing. If the table has [large], Spark merges large
        partitions afterwards. With ``collect`` the returned list is empty.
        """
        return drain_queues(self._table, options)

    @_public
    @_configured
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

    @_public
    @_configured
    def publish(self, *, to: PublisherName | None = None, reset: bool = False) -> PublishResult:
        """Show readers the newest batch that is merged in every partition.

        Args:
            to: raise the error of this publisher, which otherwise is in the result.
            reset: let that publisher first delete what it has written; its readers see nothing meanwhile.
        """
        return publish(self._table) if to is None and not reset else publish_to(self._table, to, reset=reset)

    @_public
    @_configured
    @_takes(RunOptions)
    def run(self, options: RunOptions) -> RunResult:
        """A night: send missing messages, append, dedupe, publish. Safe to repeat: after a crash, the next run finishes it.

        Raises RefusedError before anything is written if its `plan` is above ``max_bytes`` or ``max_cost``.
        """
        return run(self._table, options)

    @_configured
    def plan(
        self,
        *,
        selected: Callable[[str], bool] = lambda partition: True,
        prices: str | Path | None = None,
        full: Scope | None = None,
    ) -> Plan:
        """Predict what `run` would do now: files, partitions, bytes, requests, seconds and money. Nothing is written.

        ``prices`` is a file like `lakeupsert/operations/plan/prices.toml`, which is the default. ``full``: as in `run`.
        """
        return plan(self._table, selected, prices, full)

    @_public
    @_configured
    @_takes(ReprocessOptions)
    def reprocess(self, options: ReprocessOptions) -> ReprocessResult:
        """Rewrite the selected partitions, each at its batch, and publish them. No row changes.

        The work goes through the queue, and the call waits for partitions that other workers have taken.
        """
        return reprocess_and_publish(self._table, options)

    @_public
    @_configured
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
        return compact(self._table, full=full, host=host, workers=workers, stop=stop or Stop(), progress=progress)

    @_public
    @_configured
    @_takes(UpdateOptions)
    def update(self, options: UpdateOptions) -> StatementResult:
        """Set columns of the rows of a filter or of a list of keys: one batch, merged and published. ``dry``: only count them.

        Raises ConfigurationError if the table does not support it, or an argument can't be used; RefusedError if a new value
        does not fit its column exactly, or a batch that touches the rows' partitions is not published yet.
        """
        return run_statement(self._table, options)

    @_public
    @_configured
    @_takes(StatementOptions)
    def delete(self, options: StatementOptions) -> StatementResult:
        """Delete the rows of a filter or of a list of keys. Errors are those of `update`."""
        return run_statement(self._table, options)

    @_public
    @_configured
    def restore(self, to: str | int | date, *, dry: bool = True) -> RestorePlan:
        """Restore the table to a snapshot, by number, tag or time; `dedupe` and `publish` then finish it.

        With ``dry`` nothing is written, and the plan says what would change.
        """
        return restore(self._table, to, dry=dry)

    @_public
    @_configured
    def vacuum(self, *, dry: bool = True, progress: Callable[[str], None] = lambda text: None) -> VacuumResult:
        """Expire all but tagged snapshots and the newest `keep_snapshots`, and delete files that only expired ones need."""
        return vacuum(self._table, dry=dry, progress=progress)

    @_public
    @_configured
    def tag(self, name: str, snapshot: str | int | date | None = "published") -> Link[Snapshot] | None:
        """Tag a snapshot, which is kept as long as it has a tag; None removes the tag. Returns None if nothing had to change.

        Raises ConfigurationError if there is no such snapshot, or no such tag to remove.
        """
        return tag(self._table, name, snapshot)

    def columns(self) -> list[Column]:
        """List the columns under which the next batch is written."""
        return columns(self._table.existing_spec())

    @_public
    @_configured
    def rename_column(self, column: str, name: str, *, dry: bool = False) -> SchemaChange:
        """Rename a column from the next ledger number on, without rewriting a file. Readers see it after the next publish.

        Raises ConfigurationError if there is no such column, ``name`` is taken, or a setting names the column.
        """
        one_name = self._table.settings.one_name_in_files
        return change(self._table, lambda spec: rename(spec, column, name, one_name=one_name), dry=dry)

    @_public
    @_configured
    def drop_column(self, column: str, *, dry: bool = False) -> SchemaChange:
        """Drop a column from the next ledger number on, as `rename_column` renames one. A later column of that name is a new
        one."""
        one_name = self._table.settings.one_name_in_files
        return change(self._table, lambda spec: drop(spec, column, one_name=one_name), dry=dry)

    @_public
    @_configured
    def retype_column(
        self,
        column: str,
        type: str,
        *,
        quarantine_unfit: bool = False,
        dry: bool = False,
        progress: Callable[[str], None] = lambda text: None,
    ) -> SchemaChange:
        """Give a column another type from the next ledger number on, without rewriting a file.

        Its values are converted when old files are read, and for good when merges and `compact` rewrite these. Readers see it
        after the next publish.

        Args:
            type: as under `[tables.NAME.schema]`, for example ``double`` or ``decimal(12,2)``.
            quarantine_unfit: where a value does not convert, the column becomes null, and a copy of the row goes to quarantine.
            dry: change nothing; `SchemaChange.conversion` counts the values that convert, and lists those that do not.

        Raises:
            ConfigurationError: there is no such column, or it can't have that type.
            RefusedError: values do not convert (``unfit-values``), and ``quarantine_unfit`` is not set.
        """
        to = retype_to(self._table, column, named_type(type, "the type of a retype"))
        return change(self._table, to, dry=dry, quarantine_unfit=quarantine_unfit, progress=progress)

    def shows(self, change: SchemaChange) -> bool:
        """Whether readers see a change of the columns already."""
        snapshot = self._table.last_snapshot()
        return snapshot is not None and snapshot.body.spec_version >= change.version

    @_public
    def quarantine(self, reason: Reason | None = None, files: Sequence[str] = ()) -> pa.RecordBatchReader:
        """Read the refused rows that wait in quarantine, newest batch first.

        Columns: batch (its number), batch_id, reason_code, reason, file, line (from 1; null in typed formats), position (row in a
        typed file, byte in text), raw. ``files``: only these quarantine files, also of a batch that was refused as a whole.
        """
        return quarantined_rows(self._table, reason, files)

    @_configured
    def status(self) -> Status:
        """Count partitions, rows and messages by the newest snapshot, the ledger and the queue."""
        return status(self._table)

    @_configured
    def report(self, nights: int = 30) -> str:
        """Return a self-contained HTML page about the table and its last ``nights`` batches."""
        return page(self.name, observe(self._table, nights, LISTED))

    @_public
    @_configured
    def redrive(self, selected: Callable[[str], bool] = lambda partition: True) -> RedriveResult:
        """Return the dead letters of the selected partitions to the queue; those of merged partitions are deleted."""
        return redrive(self._table, selected)

    @_public
    @_configured
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

        Without ``counted`` there is no proof, and no data file is read. With ``deep``, DuckDB recomputes the published rows
        from the landing files on this machine, and all columns are compared. ``host``: where the rows of files are counted.
        """
        counting = host_by_name(host) if counted else None
        return reconcile(self._table, counting, deep=deep, selected=selected, progress=progress)

    def explain(self, key: Mapping[str, object], partition: str | None = None) -> Explanation:
        """Show every stored version of a key, where it is, and why the current one wins."""
        return explain(self._table, key, partition)

    def snapshots(self) -> list[Link[Snapshot]]:
        """List the snapshots that can be read, newest first.

        Tags and expiry are kept in snapshots that show the same as the one before; these are left out.
        """
        return list_snapshots(self._table)

    def lost_snapshots(self) -> list[int]:
        """List numbers of snapshots that are gone without having expired: something other than lakeupsert deleted them."""
        return lost_snapshots(self._table)

    def tags(self) -> dict[str, int]:
        """Map each tag to the number of its snapshot."""
        return list_tags(self._table)

    def view(self, snapshot: str | int | date = "published") -> View:
        """Open the table as of a snapshot: ``"published"``, a number, a tag, or a time; a date is its first moment in UTC.

        ``"latest"`` includes everything that was appended. It is merged now, into temporary files that live as long as the
        view or a reader of it (in Spark: as long as the session).
        """
        return self._view(snapshot, None)

    def _view(self, snapshot: str | int | date, where: str | None, *, versions: bool = False) -> View:
        """A view for readers of ``where`` only: for `latest`, other partitions are not merged, and missing from the view.

        ``versions``: its rows have the columns `VERSION_FIELDS`."""
        if snapshot == "latest":
            view = latest(self._table, where)
        else:
            view = View.open(self._table.objects, self._table.existing_spec(), snapshot)
        return view.with_versions(self._table.headers) if versions else view

    @_public
    @_configured
    def ddl(self, engine: Engine) -> Statements:
        """The statements that make the table known to an engine. Nothing is run."""
        return ddl(self._table, engine)

    def files(self, snapshot: str | int | date = "published", where: str | None = None) -> Sequence[ViewFile]:
        """List the files that a reader of the snapshot opens for the filter; not available for ``"latest"``."""
        if snapshot == "latest":
            raise latest_has_no_files()
        return list(self.view(snapshot).files(where))

    def to_arrow(
        self,
        snapshot: str | int | date = "published",
        where: str | None = None,
        *,
        columns: Sequence[str] | None = None,
        history: bool = False,
        versions: bool = False,
    ) -> pa.RecordBatchReader:
        """Read rows, ordered by partition and key. Polars and DuckDB accept the reader as it is.

        Beside ``columns`` (default: all), only those of the filter are read, and those of the key if files have to be merged.
        With ``history``, read all versions of the rows, newest first, with columns `valid_from` and `valid_to`, which the
        filter may name; the setting `history` must have been true since the table was created.

        With ``versions``, rows also have `_lakeupsert_batch`, the number of the batch that they came with (0: they were
        adopted), and `_lakeupsert_received_at`, when it was received. ``columns`` and the filter may name both. The setting
        `versions` must have been true since the table was created (`no-versions`).
        """
        if history:
            return history_to_arrow(self._view(snapshot, None, versions=versions), where, columns=columns)
        return to_arrow(self._view(snapshot, where, versions=versions), where, columns=columns)

    def head(
        self,
        rows: int = 10,
        *,
        snapshot: str | int | date = "published",
        where: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> pa.Table:
        """Read the first rows by partition and key, and no more files than they are in."""
        return first_rows(to_arrow(self._view(snapshot, where), where, columns=columns), rows)

    def diff(
        self,
        before: str | int | date,
        after: str | int | date = "published",
        *,
        key: Mapping[str, object] | None = None,
        collect: Callable[[pa.Table], object] | None = None,
    ) -> Difference:
        """Count the keys that were inserted, updated and deleted from one snapshot to another.

        Only partitions that differ are read, and of these only files that the snapshots do not share. ``key``: only keys with
        these values. ``collect`` takes tables of the keys that differ: change, partition, and as structs key, before and after.
        """
        return diff(self.name, self.view(before), self.view(after), key, collect)

    def query(self, sql: str, snapshot: str | int | date = "published") -> "QueryResult":
        """Run one SELECT of DuckDB's SQL over the exact rows. The table has its own name there. The result shows its first rows.

        The query can only read these rows: no file, no setting, no other table. `to_duckdb` gives a relation that can be joined
        with them. Times are UTC.
        """
        from lakeupsert.read.query import query

        return query(self.view(snapshot), self.name, sql)

    def to_spark(
        self,
        spark: "SparkSession",
        snapshot: str | int | date = "published",
        where: str | None = None,
        *,
        columns: Sequence[str] | None = None,
        history: bool = False,
        versions: bool = False,
    ) -> "DataFrame":
        """Return a Spark DataFrame: a native Parquet scan with filters and columns pushed down; ``history`` and ``versions`` as
        in `to_arrow`."""
        from lakeupsert.read.spark import history_to_spark, to_spark

        if history:
            return history_to_spark(spark, self._view(snapshot, None, versions=versions), where=where, columns=columns)
        return to_spark(spark, self._view(snapshot, where, versions=versions), where=where, columns=columns)

    def to_duckdb(
        self,
        connection: "DuckDBPyConnection | None" = None,
        snapshot: str | int | date = "published",
        *,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        versions: bool = False,
    ) -> "DuckDBPyRelation":
        """Return a DuckDB relation, which can be queried more than once; its rows are in no particular order.

        ``connection``: default: the one that `duckdb.sql` uses. DuckDB scans the files by itself, with filters and columns
        pushed down, if the table is local and no file has superseded rows or older types. Otherwise it reads `to_arrow`, which
        reads all ``columns``, whatever the query needs. The logger `lakeupsert.read.native` tells which, and why.

        With ``where``, a filter in SQL, it reads `to_arrow` too, which opens only files that may have such rows: of a table by
        hash of the key, those of the key's partition. With ``versions``, as in `to_arrow`, it also reads `to_arrow`.
        """
        from lakeupsert.read.duckdb import to_duckdb

        return to_duckdb(self._view(snapshot, where, versions=versions), connection, where=where, columns=columns)

    def to_polars(
        self,
        snapshot: str | int | date = "published",
        *,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        versions: bool = False,
    ) -> "pl.LazyFrame":
        """Return a Polars LazyFrame; filters and columns are pushed down.

        Polars scans the files by itself if `to_duckdb` would, otherwise it reads `to_arrow`; the same logger tells. ``where`` and
        ``versions`` as in `to_duckdb`.
        """
        from lakeupsert.read.polars import to_polars

        return to_polars(self._view(snapshot, where, versions=versions), where=where, columns=columns)

    def to_pandas(
        self,
        columns: Sequence[str] | int | date | None = None,
        snapshot: str | int | date = "published",
        where: str | None = None,
        *,
        versions: bool = False,
    ) -> "pd.DataFrame":
        """Return a pandas DataFrame, ordered by partition and key, with the types of Arrow's `to_pandas`.

        Arrow reads the files, as in `to_arrow`, which also explains ``versions``. As there, the first argument may also be the
        snapshot: ``to_pandas(7)``.
        """
        if isinstance(columns, int | date):
            snapshot, columns = columns, None
        if find_spec("pandas") is None:
            raise missing("pandas")
        frame: pd.DataFrame = self.to_arrow(snapshot, where, columns=columns, versions=versions).read_pandas()
        return frame

    def export(
        self,
        output: str | Path,
        *,
        snapshot: str | int | date = "published",
        where: str | None = None,
        overwrite: bool = False,
        history: bool = False,
        versions: bool = False,
        host: HostName = "local",
    ) -> int:
        """Write the rows to a file (.parquet, .csv, .jsonl), or a Hive folder if ``output`` ends in `/`; returns their number.

        With ``history``, write all versions of the rows; with ``versions``, add the columns of their batches (see `to_arrow`).
        An address of a store becomes a Hive folder too, and ``host`` is where it is written.
        """
        refuse_in_zones(self.settings, str(output))
        view = self._view(snapshot, None if history else where, versions=versions)
        elsewhere = None if host == "local" else host_by_name(host)
        return export(view, str(output), where=where, overwrite=overwrite, history=history, host=elsewhere)

    @_configured
    def doctor(self) -> list[Finding]:
        """Check the table and this machine; see `lakeupsert.operations.doctor`."""
        return doctor(self._table)

    def close(self) -> None:
        """Close the queue."""
        self._table.close()
