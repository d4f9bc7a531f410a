"""`lakeupsert.Table`: everything that the command line does, from Python.

The signatures of its public methods are a contract with users, so some have more than seven parameters; they become options
here, and the work is done in `operations`, `pipeline`, `read` and `report`.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from lakeupsert.config import TableSettings, load
from lakeupsert.engine.by_name import EngineName, HostName, host_by_name
from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.landing.accept import LandingInput
from lakeupsert.operations.adopt import Adopted, adopt
from lakeupsert.operations.compact import compact
from lakeupsert.operations.doctor import Finding, doctor
from lakeupsert.operations.explain import Explanation, explain
from lakeupsert.operations.plan import Plan, plan
from lakeupsert.operations.reconcile import ReconcileResult, reconcile
from lakeupsert.operations.redrive import RedriveResult, redrive
from lakeupsert.operations.replay import replay
from lakeupsert.operations.reprocess import ReprocessOptions, ReprocessResult, reprocess_and_publish
from lakeupsert.operations.restore import RestorePlan, restore
from lakeupsert.operations.run import RunOptions, RunResult, run
from lakeupsert.operations.schema import Column, SchemaChange, change, columns
from lakeupsert.operations.snapshots import list_snapshots, list_tags, lost_snapshots, tag
from lakeupsert.operations.vacuum import Vacuumed, vacuum
from lakeupsert.pipeline.append import AppendResult, append, new_files, skipped_files
from lakeupsert.pipeline.dedupe import PartitionResult, send_missing
from lakeupsert.pipeline.drain_queues import DrainOptions, drain_queues, merge_received
from lakeupsert.pipeline.landing_dates import Skipped
from lakeupsert.pipeline.latest import latest
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.publish import PublishResult, publish
from lakeupsert.pipeline.stop import Stop
from lakeupsert.read.arrow import to_arrow
from lakeupsert.read.export import export
from lakeupsert.read.history import history_to_arrow
from lakeupsert.read.view import View, ViewFile, no_files
from lakeupsert.report.nights import observe
from lakeupsert.report.page import page
from lakeupsert.report.status import Status, status
from lakeupsert.table.chain import Link
from lakeupsert.table.evolution import drop, rename
from lakeupsert.table.ledger import Scope
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.work import Source

__all__ = ["EngineName", "HostName", "ReprocessResult", "RunResult", "Table"]

Given = ParamSpec("Given")
Found = TypeVar("Found")

log = logging.getLogger(__name__)

LISTED = 10_000
"""Names below landing that `skipped_files` looks at. More: `status` waits longer for a large landing zone, 0.1 s for 1,000 names
on S3. Fewer: it misses more of the files that `append` tells of every night."""


def _public(method: Callable[Given, Found]) -> Callable[Given, Found]:
    """What holds for every method that may commit: it takes no word but those of its `Literal`s, and an error of it says
    what it committed."""
    signature, hints = inspect.signature(method), get_type_hints(method)
    words = {name: found for name, hint in hints.items() if (found := _words(hint))}

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


def _words(hint: Any) -> tuple[object, ...]:
    """The values that a `Literal`, or one beside others such as None, allows; () of any other type."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    found = [_words(part) for part in get_args(hint) if part is not type(None)]
    optional = type(None) in get_args(hint)
    return (*(word for words in found for word in words), *([None] if optional else [])) if any(found) else ()


def _not_a_word(where: str, given: object, words: Sequence[object]) -> ConfigurationError:
    choices = ", ".join(map(repr, words))
    near = get_close_matches(str(given), [str(word) for word in words if word is not None], 1)
    return ConfigurationError(
        "unknown-word",
        f"{where} is {given!r}. It takes one of: {choices}." + (f" Did you mean {near[0]!r}?" if near else ""),
        next=f"give one of: {choices}",
    )


class Table:
    """A configured table. Opening reads the configuration alone; the first `append` creates the table."""

    def __init__(self, name: str, settings: TableSettings, *, origins: Mapping[str, str] | None = None) -> None:
        """``origins`` as `Config.origins` of this table."""
        self.name = name
        self.settings = settings
        self._table = OpenTable(name, settings, origins=origins or {})

    @classmethod
    def open(cls, config: str | Path, name: str | None = None) -> "Table":
        """The table ``name`` of a `lakeupsert.toml` (the only one there, if no name is given)."""
        loaded = load(str(config))
        name, settings = loaded.table(name)
        return cls(name, settings, origins=loaded.origins[name])

    @property
    def requests(self) -> dict[str, int]:
        """How often each kind of call reached the processed zone's store through this object and its workers."""
        return self._table.store.requests.as_dict()

    def account(self, error: LakeupsertError, *, named: bool = False) -> None:
        """Write into the error what was committed since the table was opened, and what readers see; ``named``: of which table."""
        self._table.account(error, named=named)

    def exists(self) -> bool:
        """Whether anything was ever appended or adopted."""
        return self._table.head_spec() is not None

    @_public
    def adopt(self, progress: Callable[[str], None] = lambda text: None) -> Adopted:
        """Make a table of the Hive-partitioned Parquet folder that `processed` is; no file is rewritten."""
        return adopt(self._table, progress)

    @_public
    def append(
        self,
        *,
        host: HostName = "spark",
        batch_id: str | None = None,
        received: tuple[date | None, date | None] = (None, None),
        again: bool = False,
        full: Scope | None = None,
        may_shrink: bool = False,
        replay_quarantine: bool = False,
        progress: Callable[[str], None] = lambda text: None,
        warn: Callable[[str], None] = log.warning,
    ) -> AppendResult | None:
        """Phase one: commit all new landing files as one batch; None where there is none, with warnings to ``warn``.

        With ``again`` those files of which a restore withdrew every batch; with ``replay_quarantine`` instead the
        quarantined rows that pass now (in this process, whatever the host). A batch that is ``full`` deletes the keys that it
        lacks, in the table or in the partitions that its rows are in; one that would delete 40 % only if it ``may_shrink``.
        """
        if replay_quarantine:
            if again or full or any(received):
                raise ConfigurationError(
                    "two-sources",
                    "Quarantined rows and landing files are never one batch, so no landing files can be chosen here.",
                    next="replay the quarantine alone, and append landing files in a call of their own",
                )
            return replay(self._table, batch_id=batch_id, progress=progress, warn=warn)
        return append(
            self._table,
            host_by_name(host),
            batch_id=batch_id,
            received=received,
            again=again,
            full=full,
            may_shrink=may_shrink,
            progress=progress,
            warn=warn,
        )

    def new_files(self) -> tuple[LandingInput, ...]:
        """The landing files that the next `append` would take."""
        return new_files(self._table)

    def skipped_files(self) -> Skipped | None:
        """What to say of landing files that have no date by `landing_dates`, among the first ones below landing."""
        return skipped_files(self._table, LISTED)

    @_public
    def send_missing(self, selected: Callable[[str], bool] = lambda partition: True) -> int:
        """Send a message for every selected partition that the ledger is ahead of; how many were sent."""
        return send_missing(self._table, selected)

    @_public
    def dedupe(
        self,
        *,
        workers: int = 1,
        engine: EngineName | None = None,
        until_empty: bool = True,
        both_queues: bool = True,
        max_seconds: float | None = None,
        stop: Stop | None = None,
        progress: Callable[[int], None] | None = None,
        alive: Callable[[], object] = lambda: None,
    ) -> list[PartitionResult]:
        """Phase two: work on the queue, until it is empty or (``until_empty=False``) until stopped.

        More than one worker means processes; a script that asks for them needs the usual `if __name__ == "__main__":`.
        Of a table with [large], Spark then merges the large partitions; without ``both_queues``, and where it waits, engine
        spark works on their queue alone, and engine arrow on the other. ``alive`` is called every few seconds.
        """
        return drain_queues(
            self._table,
            DrainOptions(
                workers=workers,
                engine=engine,
                until_empty=until_empty,
                both_queues=both_queues,
                max_seconds=max_seconds,
                stop=stop or Stop(),
                progress=progress,
                alive=alive,
            ),
        )

    @_public
    def dedupe_received(
        self,
        records: Sequence[Mapping[str, Any]],
        *,
        workers: int,
        memory_bytes: int,
        seconds_left: Callable[[], float],
    ) -> list[Mapping[str, Any]]:
        """Phase two for messages that AWS Lambda or Azure's Functions received (see the queue's `received`); those given back.

        All others were acked, sent anew or buried. Engine arrow, in ``workers`` threads that share ``memory_bytes`` (or what
        this process may take, where that is less), as long as ``seconds_left`` is above 0. It publishes
        where no partition is left to merge, if there is time and no object is damaged; else that is left to `reconcile`.
        """
        return merge_received(
            self._table, records, workers=workers, memory_bytes=memory_bytes, seconds_left=seconds_left
        )

    @_public
    def publish(self) -> PublishResult:
        """Show readers the newest batch that is whole in every partition."""
        return publish(self._table)

    @_public
    def run(
        self,
        *,
        host: HostName = "spark",
        workers: int = 1,
        engine: EngineName | None = None,
        batch_id: str | None = None,
        full: Scope | None = None,
        may_shrink: bool = False,
        max_bytes: int | None = None,
        max_cost: float | None = None,
        prices: str | Path | None = None,
        stop: Stop | None = None,
        progress: Callable[[str], None] = lambda text: None,
        warn: Callable[[str], None] = log.warning,
    ) -> RunResult:
        """A night: send what an earlier run left, append, dedupe, publish. Safe to repeat; after a crash it finishes.

        Raises RefusedError before anything is written, where its `plan` has more bytes or cost than these allow.
        """
        options = RunOptions(
            host=host,
            workers=workers,
            engine=engine,
            batch_id=batch_id,
            full=full,
            may_shrink=may_shrink,
            max_bytes=max_bytes,
            max_cost=max_cost,
            prices=prices,
            stop=stop or Stop(),
            progress=progress,
            warn=warn,
        )
        return run(self._table, options)

    def plan(
        self, *, selected: Callable[[str], bool] = lambda partition: True, prices: str | Path | None = None
    ) -> Plan:
        """What `run` would do now: files, partitions, bytes, requests, seconds and money. Nothing is written.

        ``prices`` is a file such as `lakeupsert/operations/prices.toml`, which holds where none is given.
        """
        return plan(self._table, selected, prices)

    @_public
    def reprocess(
        self,
        selected: Callable[[str], bool] = lambda partition: True,
        *,
        source: Source = "stored",
        host: HostName = "spark",
        workers: int = 1,
        engine: EngineName | None = None,
        dry: bool = False,
        stop: Stop | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> ReprocessResult:
        """Write the selected partitions anew at the batch that each has, and publish them; no row changes.

        From what is ``stored``, or from the ``landing`` files of all their batches; with ``dry`` it tells what that takes.
        It goes through the queue, and waits for partitions that other workers have taken; with 0 ``workers`` they take all,
        and it waits until ``stop`` for them.
        """
        options = ReprocessOptions(
            source=source,
            host=host,
            workers=workers,
            engine=engine,
            dry=dry,
            stop=stop or Stop(),
            progress=progress,
        )
        return reprocess_and_publish(self._table, selected, options)

    @_public
    def compact(
        self,
        *,
        full: bool = False,
        workers: int = 1,
        stop: Stop | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> ReprocessResult:
        """Rewrite partitions that have become slow to read (``full``: any that a rewrite improves). No row changes.

        These are partitions whose deltas and superseded rows cost readers much, those whose buckets are far smaller than `bucket`
        and are joined, and those that were adopted and not merged since.
        """
        return compact(self._table, full=full, workers=workers, stop=stop or Stop(), progress=progress)

    @_public
    def restore(self, to: str | int | date, *, dry: bool = True) -> RestorePlan:
        """Go back to a snapshot by its number, a tag or a time; `dedupe` and `publish` then finish it.

        With ``dry`` nothing is written: it tells what would change.
        """
        return restore(self._table, to, dry=dry)

    @_public
    def vacuum(self, *, dry: bool = True, progress: Callable[[str], None] = lambda text: None) -> Vacuumed:
        """Expire all but the newest `keep_snapshots` snapshots and those with a tag, and delete what only others need."""
        return vacuum(self._table, dry=dry, progress=progress)

    @_public
    def tag(self, name: str, snapshot: str | int | date | None = "published") -> Link[Snapshot] | None:
        """Name a snapshot, which is then kept as long as it has a name; None takes the name away."""
        return tag(self._table, name, snapshot)

    def columns(self) -> list[Column]:
        """The table's columns as the next batch is written under them."""
        return columns(self._table.existing_spec())

    @_public
    def rename_column(self, column: str, name: str, *, dry: bool = False) -> SchemaChange:
        """Call a column ``name`` from the next ledger number on; no file is rewritten. Publish shows it to readers.

        Raises ConfigurationError where there is no such column, there is one of that name, or settings name it.
        """
        return change(self._table, lambda spec: rename(spec, column, name), dry=dry)

    @_public
    def drop_column(self, column: str, *, dry: bool = False) -> SchemaChange:
        """Take a column away from the next ledger number on, as `rename_column` renames one. One that comes under its name
        later is another one."""
        return change(self._table, lambda spec: drop(spec, column), dry=dry)

    def shows(self, change: SchemaChange) -> bool:
        """Whether readers see the columns as a rename or drop left them."""
        snapshot = self._table.last_snapshot()
        return snapshot is not None and snapshot.body.spec_version >= change.version

    def status(self) -> Status:
        """Counts from the newest snapshot, the ledger and the queue."""
        return status(self._table)

    def report(self, nights: int = 30) -> str:
        """One HTML page that stands by itself, about the table and its last ``nights`` batches."""
        return page(self.name, observe(self._table, nights))

    @_public
    def redrive(self, selected: Callable[[str], bool] = lambda partition: True) -> RedriveResult:
        """Give the selected partitions' dead letters back to the queue; those of merged partitions are deleted."""
        return redrive(self._table, selected)

    @_public
    def reconcile(
        self,
        *,
        deep: bool = False,
        counted: bool = True,
        selected: Callable[[str], bool] = lambda partition: True,
        progress: Callable[[str], None] = lambda text: None,
    ) -> ReconcileResult:
        """Send lost messages again, publish what is whole, and prove that every row that came is accounted for.

        Without ``counted`` there is no proof, and no data file is read.
        With ``deep`` DuckDB computes the published rows anew from what landed, and all columns are compared.
        """
        return reconcile(self._table, deep=deep, counted=counted, selected=selected, progress=progress)

    def explain(self, key: Mapping[str, Any], partition: str | None = None) -> Explanation:
        """Every version of a key that the table knows, where it is, and why the winner won."""
        return explain(self._table, key, partition)

    def snapshots(self) -> list[Link[Snapshot]]:
        """Every snapshot that can be read, newest first.

        Tags and expiry are kept in snapshots that show what the one before did; these are left out.
        """
        return list_snapshots(self._table)

    def lost_snapshots(self) -> list[int]:
        """Numbers of snapshots that nobody expired and that are not there: something other than lakeupsert deleted them."""
        return lost_snapshots(self._table)

    def tags(self) -> dict[str, int]:
        """The names of snapshots, with their numbers."""
        return list_tags(self._table)

    def view(self, snapshot: str | int | date = "published") -> View:
        """The table as of a snapshot: ``"published"``, its number, a tag, or a time; a date is its first moment in UTC.

        ``"latest"``: as it will be when all that was appended is merged and published. It is merged now, into temporary
        files that live as long as the view or a reader of it (of Spark: as long as the session).
        """
        return self._view(snapshot, None)

    def _view(self, snapshot: str | int | date, where: str | None) -> View:
        """For readers of ``where`` alone: of `latest`, other partitions are not merged and not there."""
        if snapshot == "latest":
            return latest(self._table, where)
        return View.open(self._table.objects, self._table.existing_spec(), snapshot)

    def files(self, snapshot: str | int | date = "published", where: str | None = None) -> Sequence[ViewFile]:
        """The files that a reader of the snapshot opens for the filter; those of ``"latest"`` can't be told."""
        if snapshot == "latest":
            raise no_files()
        return list(self.view(snapshot).files(where))

    def to_arrow(
        self, snapshot: str | int | date = "published", where: str | None = None, *, history: bool = False
    ) -> Any:
        """A ``pyarrow.RecordBatchReader``, ordered by partition and key; Polars and DuckDB take it as it is.

        With ``history``, all versions of the rows, newest first, with columns `valid_from` and `valid_to`, which the filter
        may name; the table's setting `history` has to be true since it began.
        """
        if history:
            return history_to_arrow(self.view(snapshot), where)
        return to_arrow(self._view(snapshot, where), where)

    def to_spark(
        self,
        spark: Any,
        snapshot: str | int | date = "published",
        where: str | None = None,
        *,
        history: bool = False,
    ) -> Any:
        """A Spark DataFrame: a native Parquet scan, with filters and columns pushed down; with ``history`` as in `to_arrow`."""
        from lakeupsert.read.spark import history_to_spark, to_spark

        if history:
            return history_to_spark(spark, self.view(snapshot), where)
        return to_spark(spark, self._view(snapshot, where), where)

    def export(
        self,
        output: str | Path,
        *,
        snapshot: str | int | date = "published",
        where: str | None = None,
        overwrite: bool = False,
        history: bool = False,
    ) -> int:
        """Write the rows to one file (.parquet, .csv, .jsonl), or a Hive folder where ``output`` ends in `/`; how many.

        With ``history``, all versions of the rows (see `to_arrow`).
        """
        view = self.view(snapshot) if history else self._view(snapshot, where)
        return export(view, str(output), where=where, overwrite=overwrite, history=history)

    def doctor(self) -> list[Finding]:
        """What is wrong, or may be, with the table and its machine; see `lakeupsert.operations.doctor`."""
        return doctor(self._table)

    def close(self) -> None:
        """Let go of the queue."""
        self._table.close()
