"""A database flows into the landing zone of a table: a snapshot of its tables, then each change, transaction by transaction.

Reads     the source's position; the database, by Debezium's engine
Writes    landing files, each with the position behind it (`sources.files`); then the database hears what it may forget
Repeat    safe: the next process continues behind the last landing file

    lead? -> begin -> check the database -> snapshot, unless it is done -> changes, until somebody stops it
      '---- another process reads the source: wait ----^

A snapshot that was interrupted begins again. The changes begin where the slot does, which is older than the first snapshot: so
deletes between two snapshots are not missed, and changes of that time come once more.
"""

import logging
import threading
from collections.abc import Callable, Iterable

import msgspec

from lakeupsert import clock
from lakeupsert.config import DatabaseSource
from lakeupsert.decoding import decoder_of
from lakeupsert.errors import ConfigurationError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.retries import SOURCE_IDLE_SECONDS, SOURCE_LOOK_SECONDS, SOURCE_TICK_SECONDS
from lakeupsert.sources.debezium import Engine, Java, Lines, Position, position_of
from lakeupsert.sources.draft import ENDING, Draft
from lakeupsert.sources.files import SourceFiles
from lakeupsert.sources.follow import CaptureOptions, follow
from lakeupsert.sources.jdbc import StatementError, unfit, unreachable
from lakeupsert.sources.postgresql import MUCH_LOG, Postgresql

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
        snapshot: the position that the whole snapshot shows; None: it is not done.
        stream: the position behind the last change that has landed; None: no change has.
    """

    tables: tuple[str, ...]
    snapshot: Position | None = None
    stream: Position | None = None


def refuse_added_tables(source: DatabaseSource, place: Place) -> None:
    """Raise ConfigurationError if the source names tables that it did not when it began."""
    if more := ", ".join(sorted({*source.tables} - {*place.tables})):
        raise ConfigurationError(
            "source-tables-added",
            f"{source.from_}: {more} was not followed so far. Its rows that are there already would be missing.",
            next="name these tables in another source, which begins with a snapshot",
        )


def follow_database(
    table: OpenTable, name: str, source: DatabaseSource, password: str, options: CaptureOptions
) -> None:
    """Land the rows of a database until `stop` is set.

    It waits while the database or a store does not answer, or another process reads the source. Raises ConfigurationError.
    """
    files = SourceFiles(table, name, ENDING, options.leader_seconds)
    one = _Capture(files, source, Postgresql(name, source, password, table.settings.mode), options)
    follow(name, files, one.run, options)


class _Capture:
    """Runs one engine after another."""

    def __init__(
        self, files: SourceFiles, source: DatabaseSource, database: Postgresql, options: CaptureOptions
    ) -> None:
        self._files, self._source, self._database, self._options = files, source, database, options

    def run(self) -> None:
        """Capture until `stop` is set, or until this process no longer reads the source."""
        text = self._files.begin()
        place = decoder_of(Place).decode(text) if text is not None else None
        if place is not None:
            refuse_added_tables(self._source, place)
        try:
            prepared = self._database.prepare(is_new=place is None)
        except StatementError as e:
            problem = str(e), f"give {self._source.server.username} the right that is missing"
            raise unfit(self._source, [problem]) from e
        for warning in prepared.warnings:
            self._options.warn(warning)
        properties = {**_COMMON, **self._database.properties(prepared.left_out)}
        if place is None or place.snapshot is None:
            place = self._run(_Snapshot(self._files, self._source, self._options.collect), properties, None)
        if place.snapshot is not None:
            changes = _Changes(self._files, self._source, self._options.collect)
            if place.stream is None:
                changes.hold_until(place.snapshot, self._database.order)
            self._run(changes, properties, place.stream)

    def _run(self, landing: "_Landing", properties: dict[str, str], position: Position | None) -> Place:
        """Run one engine until the landing is done, `stop` is set, or another process leads. Raises what ended it otherwise."""
        engine = Engine({**properties, "snapshot.mode": landing.snapshot_mode}, position, landing.take)
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
            raise unreachable(self._source, engine.failure or "Debezium has ended")
        if leadership.leads:
            landing.finish()
        return landing.place

    def _look(self) -> None:
        """Say how much of its log the database keeps for the source, if that is too much."""
        kept, said = self._database.kept_log() // MUCH_LOG, ""
        if kept:
            said = (
                f"{self._source.from_} keeps more than {1 << kept.bit_length() - 1} GB of its log for this source, and its disk "
                "may fill. Either a transaction has been open for long, or changes come faster than they land."
            )
            self._options.warn(said)
        self._files.leadership.trouble = said
        self._options.trouble(said)


class _Landing:
    """Takes the events of one engine, and lands them when they are due."""

    snapshot_mode: str
    wants_sign = False
    """Whether the database should write something, since nothing has come for a while. True once for that time."""

    def __init__(self, files: SourceFiles, source: DatabaseSource, collect: Callable[[int], object]) -> None:
        self._files, self._collect = files, collect
        self._draft = Draft(source.seconds, source.rows, source.most_bytes)
        self._lines, self._lock = Lines(), threading.Lock()
        self.place = Place(tables=source.tables)
        self.done = False

    def take(self, events: Iterable[Java], acknowledge: Callable[[Java], None]) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        """Called several times a second."""

    def finish(self) -> None:
        """Called when the engine has ended as it should."""

    def _land(self) -> None:
        rows = self._draft.rows
        self._files.land(self._draft.take(), msgspec.json.encode(self.place).decode())
        if rows:
            self._collect(rows)


class _Snapshot(_Landing):
    """A snapshot. Its files end by rows or bytes only, so that a small one lands whole or not at all."""

    snapshot_mode = "initial"
    _shows: Java = None

    def take(self, events: Iterable[Java], acknowledge: Callable[[Java], None]) -> None:
        for event in events:
            record = event.record()
            if self.done or not record.sourceOffset().containsKey("snapshot"):
                self.done = True  # the changes are for the next engine
                self._shows = record if self._shows is None else self._shows
                return
            self._shows = record
            if _is_row(record):
                self._draft.add(self._lines.line(record))
                if self._draft.is_full:
                    self._land()

    def finish(self) -> None:
        if self.done:
            self.place = msgspec.structs.replace(self.place, snapshot=position_of(self._shows))
            self._land()


class _Changes(_Landing):
    """Changes, transaction by transaction."""

    snapshot_mode = "no_data"

    def __init__(self, files: SourceFiles, source: DatabaseSource, collect: Callable[[int], object]) -> None:
        super().__init__(files, source, collect)
        self._behind: Java = None
        """The end of the newest transaction; None: the next one has begun, or it has landed. The position of a heartbeat may be
        behind changes that are still to come, so it is not used."""
        self._is_early: Callable[[Java], bool] = lambda record: False
        self._heard_at = self._landed_at = clock.elapsed()

    def hold_until(self, snapshot: Position, order: Callable[[Position], tuple[int, ...]]) -> None:
        """Land nothing until all changes have come that the snapshot shows: in between, rows would go back to older values."""
        self._is_early = lambda record: order(position_of(record)) < order(snapshot)
        self._heard_at = float("-inf")  # a quiet database has to write something behind the snapshot

    def take(self, events: Iterable[Java], acknowledge: Callable[[Java], None]) -> None:
        with self._lock:
            self._acknowledge = acknowledge
            for event in events:
                record = event.record()
                if _is_row(record):
                    self._draft.add(self._lines.line(record))
                    self._behind = None
                elif _ends_transaction(record) and not self._is_early(record):
                    self._behind, self._heard_at, self._is_early = event, clock.elapsed(), lambda record: False
                    if self._draft.is_due:
                        self._land_behind()

    def tick(self) -> None:
        with self._lock:
            is_old = not self._draft.rows and clock.elapsed() - self._landed_at >= SOURCE_IDLE_SECONDS
            if self._behind is not None and (is_old or self._draft.is_due):
                self._land_behind()
        self.wants_sign = clock.elapsed() - self._heard_at >= SOURCE_IDLE_SECONDS
        if self.wants_sign:
            self._heard_at = clock.elapsed()

    def finish(self) -> None:
        with self._lock:
            if self._behind is not None:
                self._land_behind()

    def _land_behind(self) -> None:
        event, self._behind = self._behind, None
        self.place = msgspec.structs.replace(self.place, snapshot={}, stream=position_of(event.record()))
        self._land()
        self._acknowledge(event)
        self._landed_at = clock.elapsed()


def _is_row(record: Java) -> bool:
    """Whether it is a change of a row, or a truncate: not a heartbeat, a message of an application or a mark of a transaction."""
    schema = record.valueSchema()
    return schema is not None and schema.field("after") is not None


def _ends_transaction(record: Java) -> bool:
    schema = record.valueSchema()
    return schema is not None and schema.field("status") is not None and str(record.value().get("status")) == "END"
