"""A table as you can use it without the right to write it: readers and figures.

`lakeupsert.api.Table` adds what changes a table. The signatures of public methods are a contract with users.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, Self, TypeVar, get_args, get_origin

import pyarrow as pa

from lakeupsert.config import TableSettings, load, refuse_in_zones
from lakeupsert.config.messages import did_you_mean
from lakeupsert.engine.by_name import HostName, host_by_name
from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.events import Sink
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.operations.ddl import Engine, Statements, ddl
from lakeupsert.operations.diff import Difference, diff
from lakeupsert.operations.doctor import Finding, doctor
from lakeupsert.operations.explain.explain import Explanation, explain
from lakeupsert.operations.plan.plan import Plan, plan
from lakeupsert.operations.quarantine import quarantined_rows
from lakeupsert.operations.schema import Column, columns
from lakeupsert.operations.snapshots import list_snapshots, list_tags, lost_snapshots
from lakeupsert.pipeline.append.discover import discover, skipped_files
from lakeupsert.pipeline.append.landing_dates import Skipped
from lakeupsert.pipeline.by_folder import is_folder, open_folder
from lakeupsert.pipeline.merge.latest import latest
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.standing import account, tries
from lakeupsert.pipeline.stored_objects import StoredObjects
from lakeupsert.read.arrow import first_rows, reader_schema, to_arrow
from lakeupsert.read.duckdb import to_duckdb
from lakeupsert.read.export import export
from lakeupsert.read.history import history_to_arrow
from lakeupsert.read.native import require
from lakeupsert.read.polars import to_polars
from lakeupsert.read.query import QueryResult, query
from lakeupsert.read.view import SnapshotFigures, View, ViewFile, latest_has_no_files, newest_snapshot
from lakeupsert.report import summary
from lakeupsert.report.nights import observe
from lakeupsert.report.page import page
from lakeupsert.report.status import Status, status
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import Reason, Scope
from lakeupsert.table.snapshot import Snapshot

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    from duckdb import DuckDBPyConnection, DuckDBPyRelation
    from pyspark.sql import DataFrame, SparkSession

Given = ParamSpec("Given")
Found = TypeVar("Found")
Itself = TypeVar("Itself", bound="ReadOnlyTable")

LISTED = 10_000
"""Names below landing that `skipped_files` lists. More: `status` takes longer (S3: 0.1 s for 1,000). Fewer: it misses files
that `append` warns about every night."""


def accounted(method: Callable[Concatenate[Itself, Given], Found]) -> Callable[Concatenate[Itself, Given], Found]:
    """For methods that may commit: refuse words that no `Literal` names, and write into an error what the call committed."""
    signature = inspect.signature(method)
    words = {name: allowed for name, given in signature.parameters.items() if (allowed := _words(given.annotation))}

    @wraps(method)
    def call(table: Itself, /, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        since = tries(table._table.history)
        try:
            given = signature.bind(table, *args, **kwargs).arguments
            for name in words.keys() & given.keys():
                if given[name] not in words[name]:
                    raise _not_a_word(f"{method.__name__}({name}=…)", given[name], words[name])
            return method(table, *args, **kwargs)
        except LakeupsertError as e:
            account(table._table, e, since)
            raise

    return call


def configured(method: Callable[Concatenate[Itself, Given], Found]) -> Callable[Concatenate[Itself, Given], Found]:
    """For methods that need landing zone, queue, publishers or limits: refuse a table that was opened by its folder."""

    @wraps(method)
    def call(table: Itself, /, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        if table._table.declaration.by_folder:
            raise ConfigurationError(
                "opened-by-folder",
                f"{method.__name__} needs the landing zone, queue, publishers or limits of lakeupsert.toml, and "
                f"{table.settings.processed} was opened by its folder, which is for reading only. Nothing was changed.",
                next="open the table with its configuration: Table.open('lakeupsert.toml')",
            )
        return method(table, *args, **kwargs)

    return call


def _words(hint: object) -> tuple[object, ...]:
    """The values that a type hint allows, if it is a `Literal` or a union with one; otherwise ()."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    words = [word for part in get_args(hint) for word in _words(part)]
    return (*words, None) if words and type(None) in get_args(hint) else tuple(words)


def _not_a_word(where: str, given: object, words: Sequence[object]) -> ConfigurationError:
    choices = ", ".join(map(repr, words))
    hint = did_you_mean(str(given), [str(word) for word in words if word is not None])
    return ConfigurationError(
        "unknown-word",
        f"{where} is {given!r}. It takes one of: {choices}.{hint}",
        next=f"give one of: {choices}",
    )


class ReadOnlyTable:
    """The methods of `Table` that change nothing in the table."""

    def __init__(self, name: str, settings: TableSettings, *, origins: Mapping[str, str] | None = None) -> None:
        """``origins``: where each setting comes from, as in `Config.origins`."""
        self.name = name
        self.settings = settings
        self._table = OpenTable(name, settings, origins=origins or {})

    @classmethod
    def of(cls, opened: OpenTable) -> Self:
        """The table over open objects that the caller has, for example over a store that injects faults."""
        table = cls(opened.name, opened.settings)
        table._table = opened
        return table

    @classmethod
    def open(cls, config: str | Path, name: str | None = None, *, profile: str | None = None) -> Self:
        """Open the table ``name`` of a `lakeupsert.toml`. Leave ``name`` out if the file has only one table.

        ``config`` may also be the folder or address of a table, like ``lake/processed/orders`` or ``s3://lake/processed/orders``.
        You can only read such a table (`opened-by-folder`). ``name`` is then the table's name in `query` (default: the folder's).
        ``profile``: settings of ``[profiles.NAME]`` override the others. Default: the profile that LAKEUPSERT_PROFILE names.
        """
        if is_folder(str(config)):
            return cls.of(open_folder(str(config), name, profile))
        loaded = load(str(config), profile=profile)
        name, settings = loaded.table(name)
        return cls.of(OpenTable(name, settings, origins=loaded.origins[name], sources=loaded.sources_of(name)))

    def close(self) -> None:
        """Close the queue."""
        self._table.resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
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
        """The newest published snapshot: its number, time, rows, partitions and bytes. None before the first publish.

        Each access costs a few small reads of the store, and opens no manifest and no data file.
        """
        link = newest_snapshot(self._table.history.objects)
        return None if link is None else SnapshotFigures.of(link)

    @property
    def objects(self) -> StoredObjects:
        """The table's chains, files and messages, to look at."""
        return StoredObjects(self._table)

    @property
    def requests(self) -> dict[str, int]:
        """Requests that this object and its workers sent to the store of the processed zone, by kind."""
        return self._table.resources.store.requests.as_dict()

    def listen(self, sink: Sink) -> None:
        """Give ``sink`` every event of this table from now on, as it happens: batches, merges, publishes, failures.

        Events of worker processes arrive too. The sink is called in the thread that does the work.
        """
        self._table.resources.sinks.append(sink)

    def account(self, error: LakeupsertError, *, named: bool = False) -> None:
        """Write into the error what was committed since the table was opened, and what readers see; ``named`` adds the table."""
        account(self._table, error, named=named)

    def exists(self) -> bool:
        """Whether anything was ever appended or adopted."""
        return self._table.history.head_spec() is not None

    @configured
    def new_files(self) -> tuple[LandingInput, ...]:
        """List the landing files that the next `append` would take."""
        return discover(self._table).inputs

    @configured
    def skipped_files(self) -> Skipped | None:
        """Describe the landing files that have no date by `landing_dates`, among the first ones below landing."""
        return skipped_files(self._table, LISTED)

    @configured
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

    @configured
    def status(self) -> Status:
        """Count partitions, rows and messages by the newest snapshot, the ledger and the queue."""
        return status(self._table)

    @configured
    def report(self, nights: int = 30) -> str:
        """Return a self-contained HTML page about the table and its last ``nights`` batches."""
        return page(self.name, observe(self._table, nights, LISTED))

    @configured
    def doctor(self) -> list[Finding]:
        """Check the table and this machine; see `lakeupsert.operations.doctor`."""
        return doctor(self._table)

    @accounted
    @configured
    def ddl(self, engine: Engine) -> Statements:
        """The statements that make the table known to an engine. Nothing is run."""
        return ddl(self._table, engine)

    @accounted
    def quarantine(self, reason: Reason | None = None, files: Sequence[str] = ()) -> pa.RecordBatchReader:
        """Read the refused rows that wait in quarantine, newest batch first.

        Columns: batch (its number), batch_id, reason_code, reason, file, line (from 1; null in typed formats), position (row in a
        typed file, byte in text), raw. ``files``: only these quarantine files, also of a batch that was refused as a whole.
        """
        return quarantined_rows(self._table, reason, files)

    def columns(self) -> list[Column]:
        """List the columns under which the next batch is written."""
        return columns(self._table.history.existing_spec())

    def explain(self, key: Mapping[str, object], partition: str | None = None) -> Explanation:
        """Show every stored version of a key, where it is, and why the current one wins."""
        return explain(self._table, key, partition)

    def snapshots(self) -> list[Link[Snapshot]]:
        """List the snapshots that can be read, newest first.

        A snapshot that only changes tags or expiry shows the same as the one before, and is left out.
        """
        return list_snapshots(self._table.history.objects)

    def lost_snapshots(self) -> list[int]:
        """List numbers of snapshots that are gone without having expired: something other than lakeupsert deleted them."""
        return lost_snapshots(self._table.history.objects)

    def tags(self) -> dict[str, int]:
        """Map each tag to the number of its snapshot."""
        return list_tags(self._table.history.objects)

    def diff(
        self,
        before: str | int | date,
        after: str | int | date = "published",
        *,
        key: Mapping[str, object] | None = None,
        collect: Callable[[pa.Table], object] | None = None,
    ) -> Difference:
        """Count the keys that were inserted, updated and deleted from one snapshot to another.

        Partitions and files that both snapshots share are not read. ``key``: count only keys with these values. ``collect``
        takes tables of the keys that differ: change, partition, and as structs key, before and after.
        """
        return diff(self.name, self.view(before), self.view(after), key, collect)

    def view(self, snapshot: str | int | date = "published") -> View:
        """Open the table as of a snapshot: ``"published"``, a number, a tag, or a time. A date is its first moment in UTC.

        ``"latest"`` includes everything that was appended. It is merged now, into temporary files that live as long as the
        view or a reader of it (in Spark: as long as the session).
        """
        return self._view(snapshot, None)

    def _view(self, snapshot: str | int | date, where: str | None, *, versions: bool = False) -> View:
        """A view for readers of ``where`` only: for `latest`, other partitions are not merged, and missing from the view."""
        if snapshot == "latest":
            view = latest(self._table, where)
        else:
            view = View.open(self._table.history.objects, self._table.history.existing_spec(), snapshot)
        return view.with_versions(self._table.history.headers) if versions else view

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

        ``columns``: read only these columns (default: all), and what the filter and a merge of files need.

        ``history``: read all versions of the rows, newest first, with columns `valid_from` and `valid_to`, which the filter may
        name. The setting `history` must have been true since the table was created.

        ``versions``: rows also have `_lakeupsert_batch`, the number of their batch (0: they were adopted), and
        `_lakeupsert_received_at`, when it was received. ``columns`` and the filter may name both. The setting `versions` must
        have been true since the table was created (`no-versions`).
        """
        read = history_to_arrow if history else to_arrow
        return read(self._view(snapshot, None if history else where, versions=versions), where, columns=columns)

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

    def query(self, sql: str, snapshot: str | int | date = "published") -> QueryResult:
        """Run one SELECT of DuckDB's SQL over the exact rows. The table has its own name there. The result shows its first rows.

        The query can only read these rows. Use `to_duckdb` to join them with files and other tables. Times are UTC.
        """
        return query({self.name: self.view(snapshot)}, sql)

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
        """Return a Spark DataFrame, with filters and columns pushed down. ``history`` and ``versions``: as in `to_arrow`."""
        from lakeupsert.read.spark import history_to_spark, to_spark

        read = history_to_spark if history else to_spark
        view = self._view(snapshot, None if history else where, versions=versions)
        return read(spark, view, where=where, columns=columns)

    def to_duckdb(
        self,
        connection: "DuckDBPyConnection | None" = None,
        snapshot: str | int | date = "published",
        *,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        versions: bool = False,
    ) -> "DuckDBPyRelation":
        """Return a DuckDB relation, which you can query more than once. Its rows are in no particular order.

        ``connection``: default: the one that `duckdb.sql` uses. DuckDB scans the files itself if the table is local and no file
        has superseded rows or older types: then it reads only the columns and row groups that a query needs. Otherwise, and with
        ``where`` or ``versions``, it reads `to_arrow`, with all ``columns`` and only the files that may have rows of the filter.
        The logger `lakeupsert.read.native` says which, and why.
        """
        return to_duckdb(self._view(snapshot, where, versions=versions), connection, where=where, columns=columns)

    def to_polars(
        self,
        snapshot: str | int | date = "published",
        *,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        versions: bool = False,
    ) -> "pl.LazyFrame":
        """Return a Polars LazyFrame. Polars scans the files itself if DuckDB would; otherwise it reads `to_arrow`."""
        return to_polars(self._view(snapshot, where, versions=versions), where=where, columns=columns)

    def to_pandas(
        self,
        columns: Sequence[str] | int | date | None = None,
        snapshot: str | int | date = "published",
        where: str | None = None,
        *,
        versions: bool = False,
    ) -> "pd.DataFrame":
        """Return a pandas DataFrame of the rows of `to_arrow`, with the types of Arrow's `to_pandas`.

        The first argument may also be the snapshot: ``to_pandas(7)``.
        """
        if isinstance(columns, int | date):
            snapshot, columns = columns, None
        require("pandas")
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
        """Write the rows to a file (.parquet, .csv, .jsonl), or a Hive folder if ``output`` ends in `/`. Returns their number.

        ``history`` and ``versions``: as in `to_arrow`. An address of a store becomes a Hive folder too, and ``host`` writes it.
        """
        refuse_in_zones(self.settings, str(output))
        view = self._view(snapshot, None if history else where, versions=versions)
        elsewhere = None if host == "local" else host_by_name(host)
        return export(view, str(output), where=where, overwrite=overwrite, history=history, host=elsewhere)
