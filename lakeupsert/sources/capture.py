"""A database flows into the landing zone of a table: a snapshot of its tables, then each change, transaction by transaction.

Reads     the source's position; the database, by Debezium's engine
Writes    landing files, each with the position behind it (`sources.files`); then the database hears what it may forget
Repeat    safe: the next process continues behind the last landing file

    lead? -> begin -> check the database -> snapshot, unless it is done -> changes, until somebody stops it
      '---- another process reads the source: wait ----^

A snapshot that was interrupted begins again. The changes begin where the slot of PostgreSQL does, or before the first snapshot of
another database. So deletes between two snapshots are not missed, and changes of that time come once more.
"""

import logging
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from lakeupsert import clock
from lakeupsert.config import DatabaseSource
from lakeupsert.decoding import decoder_of
from lakeupsert.errors import ConfigurationError
from lakeupsert.phrases import with_advice
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.retries import SOURCE_IDLE_SECONDS, SOURCE_LOOK_SECONDS, SOURCE_TICK_SECONDS
from lakeupsert.sources.debezium import HISTORY, Engine, Java, Lines, Message, Position, position_of
from lakeupsert.sources.draft import ENDING, Draft
from lakeupsert.sources.files import SourceFiles
from lakeupsert.sources.follow import CaptureOptions, follow
from lakeupsert.sources.jdbc import Prepared, StatementError, unfit, unreachable
from lakeupsert.sources.mariadb import Mariadb
from lakeupsert.sources.postgresql import MUCH_LOG, Postgresql
from lakeupsert.sources.truncates import Truncates

log = logging.getLogger(__name__)

_COMMON = {
    "provide.transaction.metadata": "true",
    "tombstones.on.delete": "false",
    "skipped.operations": "none",
    "errors.max.retries": "0",  # Debezium would try for ever, also what can't work any more; here each try begins with checks
    "poll.interval.ms": "50",
    "heartbeat.interval.ms": "1000",
    "max.queue.size.in.bytes": str(64 << 20),
}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a source, as its entries keep it.

    Attributes:
        tables: the tables that are followed.
        snapshot: what the whole snapshot shows is not behind this position; None: it is not done.
        stream: the position behind the last change that has landed, or the first one's; None: they begin where the slot does.
        history: the name of the definitions of tables at that position, for connectors that need them.
    """

    tables: tuple[str, ...]
    snapshot: Position | None = None
    stream: Position | None = None
    history: str = ""


class Database(Protocol):
    """One kind of database.

    Attributes:
        ends_at_truncates: whether a truncate is a whole transaction. Debezium does not say that it ends then.
    """

    ends_at_truncates: bool

    def properties(self, left_out: Iterable[str]) -> dict[str, str]:
        """Debezium's settings. ``left_out``: columns that are not followed."""

    def prepare(self, position: Position | None = None, *, is_new: bool, only_look: bool = False) -> Prepared:
        """Check the database, and create what the source needs, unless ``only_look``. ``position``: where changes go on; None: at
        the beginning.

        Raises ConfigurationError (``source-unfit``, with all that is wrong) and TryAgainError.
        """

    def order(self, position: Position) -> tuple[int, ...]:
        """Sorts the ends of transactions, and snapshots among them."""

    def begin(self, position: Position) -> Position | None:
        """The place of the first change if the first record of a first snapshot has this position; None: where the slot does."""

    def shown(self, position: Position) -> Position:
        """A position that a snapshot is not behind. It is done now, and its last record has this position."""

    def keep_alive(self) -> None:
        """Write something that comes as a change, so that the position also advances while only other tables change."""

    def kept_log(self) -> int:
        """How many bytes of its log the database keeps for the source. 0: not known, or none."""


DATABASES: dict[str, Callable[[str, DatabaseSource, str, str], Database]] = {
    "postgresql": Postgresql,
    "mariadb": Mariadb,
}


def refuse_added_tables(source: DatabaseSource, place: Place) -> None:
    """Raise ConfigurationError if the source names tables that it did not when it began."""
    if more := ", ".join(sorted({*source.tables} - {*place.tables})):
        raise ConfigurationError(
            "source-tables-added",
            f"{source.from_}: {more} was not followed so far. Its rows that are there already would be missing.",
            next="name these tables in another source, which begins with a snapshot",
        )


def follow_database(
    table: OpenTable,
    name: str,
    source: DatabaseSource,
    password: str,
    options: CaptureOptions,
    others: Iterable[OpenTable] = (),
) -> None:
    """Land the rows of a database until `stop` is set. ``others``: the other tables that take landing files from that zone.

    It waits while the database or a store does not answer, or another process reads the source. Raises ConfigurationError.
    """
    files = SourceFiles(table, name, ENDING, options.leader_seconds)
    database = DATABASES[source.server.scheme](name, source, password, table.settings.mode)
    reading, key = table.settings.reading, {column.lower() for column in table.settings.key}
    lines = Lines(lambda column: reading.table_name_of(column).lower() in key, options.warn)
    truncates = Truncates(name, [table, *others], options.stop)
    one = _Capture(_Source(files, source, database, lines, truncates, options.collect), options)
    follow(name, files, one.run, options)


@dataclass(frozen=True)
class _Source:
    """All that one engine after another works with. ``collect`` takes the number of rows that landed."""

    files: SourceFiles
    settings: DatabaseSource
    database: Database
    lines: Lines
    truncates: Truncates
    collect: Callable[[int], object]


class _Capture:
    """Runs one engine after another."""

    def __init__(self, source: _Source, options: CaptureOptions) -> None:
        self._source, self._files, self._settings, self._database = (
            source,
            source.files,
            source.settings,
            source.database,
        )
        self._options = options

    def run(self) -> None:
        """Capture until `stop` is set, or until this process no longer reads the source."""
        text = self._files.begin()
        place = decoder_of(Place).decode(text) if text is not None else Place(tables=self._settings.tables)
        refuse_added_tables(self._settings, place)
        try:
            prepared = self._database.prepare(place.stream, is_new=text is None)
        except StatementError as e:
            problem = str(e), f"give {self._settings.server.username} the right that is missing"
            raise unfit(self._settings, [problem]) from e
        for found, advice in prepared.warnings:
            self._options.warn(f"{with_advice(found, advice)}.")
        properties = {**_COMMON, **self._database.properties(prepared.left_out)}
        if place.snapshot is None:
            place = self._run(_Snapshot(self._source, place), properties)
        if place.snapshot is not None:
            self._run(_Changes(self._source, place), properties)

    def _run(self, landing: "_Landing", properties: dict[str, str]) -> Place:
        """Run one engine until the landing is done, `stop` is set, or another process leads. Raises what ended it otherwise."""
        with tempfile.TemporaryDirectory(prefix="lakeupsert-capture-") as folder:
            return self._run_in(Path(folder), landing, properties)

    def _run_in(self, folder: Path, landing: "_Landing", properties: dict[str, str]) -> Place:
        position = landing.open(folder / HISTORY)
        engine = Engine({**properties, "snapshot.mode": landing.snapshot_mode}, position, landing.take, folder)
        stop, leadership, looked_at = self._options.stop, self._files.leadership, float("-inf")
        try:
            while not (landing.done or engine.ended or stop.wait(SOURCE_TICK_SECONDS)) and leadership.lead():
                self._options.alive()
                landing.tick()
                if landing.wants_sign:
                    self._database.keep_alive()
                if clock.elapsed() - looked_at >= SOURCE_LOOK_SECONDS:
                    self._look()
                    looked_at = clock.elapsed()
        finally:
            engine.close()
        if isinstance(engine.failure, BaseException):
            raise engine.failure
        if engine.ended and not landing.done and not stop.is_set():
            raise unreachable(self._settings, engine.failure or "Debezium has ended")
        if leadership.leads:
            landing.finish()
        return landing.place

    def _look(self) -> None:
        """Say how much of its log the database keeps for the source, if that is too much."""
        kept, said = self._database.kept_log() // MUCH_LOG, ""
        if kept:
            said = (
                f"{self._settings.from_} keeps more than {1 << kept.bit_length() - 1} GB of its log for this source, and its "
                "disk may fill. Either a transaction has been open for long, or changes come faster than they land."
            )
            self._options.warn(said)
        self._files.leadership.trouble = said
        self._options.trouble(said)


class _Landing:
    """Takes the events of one engine, and lands them when they are due."""

    snapshot_mode: str
    wants_sign = False
    """Whether the database should write something, since nothing has come for a while. True once for that time."""

    def __init__(self, source: _Source, place: Place) -> None:
        self._source, self.place, settings = source, place, source.settings
        self._draft = Draft(settings.seconds, settings.rows, settings.most_bytes)
        self._lock = threading.Lock()
        self.done = False
        self._kept_bytes = 0

    def open(self, history: Path) -> Position | None:
        """The place at which the engine begins: its own beginning, or behind this position, whose ``history`` is then there."""
        self._history = history
        return None

    def take(self, events: Iterable[Java], acknowledge: Callable[[Java], None]) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        """Called several times a second."""

    def finish(self) -> None:
        """Called when the engine has ended as it should."""

    def _read(self, event: Java) -> Message:
        return self._source.lines.read(event.record())

    def _add(self, message: Message) -> None:
        lines: Iterable[bytes] = self._source.lines.of(message)
        if message.is_truncate:
            [line] = lines
            lines = self._source.truncates.deletes(line, self._draft.lines())
        for line in lines:
            self._draft.add(line)

    def _land(self, **changes: object) -> None:
        """Land what came. ``changes``: of the place."""
        rows = self._draft.rows
        self.place = msgspec.structs.replace(self.place, **changes)
        self._source.files.land(self._draft.take(), msgspec.json.encode(self.place).decode())
        if rows:
            self._source.collect(rows)

    def _keep_history(self) -> str:
        data = self._history.read_bytes() if self._history.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]  # the connector may be writing a line
        if len(whole) == self._kept_bytes:  # it only grows
            return self.place.history
        self._kept_bytes = len(whole)
        return self._source.files.keep(whole)


class _Snapshot(_Landing):
    """A snapshot. Its files end by rows or bytes only, so that a small one lands whole or not at all."""

    snapshot_mode = "initial"
    _last: Java = None

    def take(self, events: Iterable[Java], acknowledge: Callable[[Java], None]) -> None:
        for event in events:
            message = self._read(event)
            if self.done:
                return
            self.done = not message.is_of_snapshot  # changes are for the next engine
            if self.done or message.is_row:
                self._begin(message.record)
            if not self.done and message.is_row:
                self._last = message.record
                self._add(message)
                if self._draft.is_full:
                    self._land()

    def _begin(self, record: Java) -> None:
        """Keep where changes begin, before any row of a first snapshot lands."""
        if self._last is not None:
            return
        self._last = record
        begun = self._source.database.begin(position_of(record)) if self.place.stream is None else None
        if begun is not None:
            self._land(stream=begun, history=self._keep_history())

    def finish(self) -> None:
        if self.done:
            self._land(snapshot=self._source.database.shown(position_of(self._last)))


class _Changes(_Landing):
    """Changes, transaction by transaction."""

    snapshot_mode = "no_data"

    def __init__(self, source: _Source, place: Place) -> None:
        super().__init__(source, place)
        self._behind: Java = None
        """The end of the newest transaction; None: the next one has begun, or it has landed. The position of a heartbeat may be
        behind changes that are still to come, so it is not used."""
        self._is_early: Callable[[Java], bool] = lambda record: False
        self._heard_at = self._landed_at = clock.elapsed()
        if place.snapshot:
            self._hold_until(source.database.order(place.snapshot))

    def open(self, history: Path) -> Position | None:
        super().open(history)
        if self.place.history:
            self._kept_bytes = history.write_bytes(self._source.files.kept(self.place.history))
        return self.place.stream

    def _hold_until(self, shown: tuple[int, ...]) -> None:
        """Land nothing until all changes have come that the snapshot shows: in between, rows would go back to older values."""
        self._is_early = lambda record: self._source.database.order(position_of(record)) < shown
        self._heard_at = float("-inf")  # a quiet database has to write something behind the snapshot

    def take(self, events: Iterable[Java], acknowledge: Callable[[Java], None]) -> None:
        with self._lock:
            self._acknowledge = acknowledge
            for event in events:
                message = self._read(event)
                ends = message.is_end
                if message.is_row:
                    if message.is_truncate and self._behind is not None:
                        self._land_behind()  # it may have to wait until a batch has taken these rows
                    self._add(message)
                    self._behind = None
                    ends = message.is_truncate and self._source.database.ends_at_truncates
                if ends and not self._is_early(message.record):
                    self._behind, self._heard_at, self._is_early = event, clock.elapsed(), lambda record: False
                    if self._draft.is_due:
                        self._land_behind()

    def tick(self) -> None:
        if self._lock.acquire(blocking=False):  # `take` may be busy for minutes, and this process has to go on leading
            try:
                is_old = not self._draft.rows and clock.elapsed() - self._landed_at >= SOURCE_IDLE_SECONDS
                if self._behind is not None and (is_old or self._draft.is_due):
                    self._land_behind()
            finally:
                self._lock.release()
        self.wants_sign = clock.elapsed() - self._heard_at >= SOURCE_IDLE_SECONDS
        if self.wants_sign:
            self._heard_at = clock.elapsed()

    def finish(self) -> None:
        with self._lock:
            if self._behind is not None:
                self._land_behind()

    def _land_behind(self) -> None:
        event, self._behind = self._behind, None
        self._land(snapshot={}, stream=position_of(event.record()), history=self._keep_history())
        self._acknowledge(event)
        self._landed_at = clock.elapsed()
