"""MariaDB as a source: what must be true before it starts, where its binary log is, and Debezium's settings.

Nothing is locked: the position of a snapshot is older than its rows, and changes land only when all have come that it may show.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from urllib.parse import unquote

from lakeupsert.config import DatabaseSource
from lakeupsert.errors import ConfigurationError, TryAgainError
from lakeupsert.sources.debezium import Position
from lakeupsert.sources.jdbc import BEGIN_AGAIN, Connection, Prepared, Problem, Row, StatementError, unfit

_SETTINGS = "select @@log_bin, @@binlog_format, @@binlog_row_image, @@log_bin_compress, @@sql_mode"
_TABLE = "select table_type from information_schema.tables where table_schema = ? and table_name = ?"
_COLUMNS = """select column_name, data_type, is_nullable, column_key
    from information_schema.columns where table_schema = ? and table_name = ?"""
_STATE = "select binlog_gtid_pos(?, ?)"
_UNREAD = frozenset({"inet4", "inet6"})
"""Types whose tables Debezium can't parse."""
_DATES = frozenset({"date", "datetime", "timestamp"})


class Mariadb:
    """One MariaDB database, followed by its binary log."""

    kind = "mariadb"
    ends_at_truncates = True

    def __init__(self, name: str, settings: DatabaseSource, password: str, mode: str) -> None:
        self._name, self._settings, self._password, self._mode = name, settings, password, mode
        self._user = unquote(settings.server.username or "")
        self._warnings: list[Problem] = []

    def properties(self, left_out: Iterable[str]) -> dict[str, str]:
        """As `Database` says. A replica's number that no other one has: of the name and the server."""
        server, tables = self._settings.server, self._settings.tables
        names = "|".join(re.escape(name.partition(".")[2]) for name in tables)
        number = int(hashlib.sha256(f"{self._name} {self._settings.from_}".encode()).hexdigest()[:7], 16)
        return {
            "name": self._name,
            "topic.prefix": self._name,
            "connector.class": "io.debezium.connector.mariadb.MariaDbConnector",
            "database.hostname": server.hostname or "",
            "database.port": str(server.port or 3306),
            "database.user": self._user,
            "database.password": self._password,
            "database.server.id": str((1 << 28) + number),
            "table.include.list": ",".join(map(re.escape, tables)),
            "column.exclude.list": ",".join(map(re.escape, left_out)),
            "include.schema.changes": "false",
            "snapshot.locking.mode": "none",
            "schema.history.internal": "io.debezium.storage.file.history.FileSchemaHistory",
            "schema.history.internal.store.only.captured.tables.ddl": "true",
            # Debezium parses each statement, and ends at one that it can't: none that names no table of ours.
            "schema.history.internal.ddl.filter": rf"(?is)(?!.*(?<!\w)({names})(?!\w)).*",
            "enable.time.adjuster": "false",
            "bigint.unsigned.handling.mode": "precise",
        }

    def prepare(self, position: Position | None = None, *, is_new: bool, only_look: bool = False) -> Prepared:
        """As `Database` says. Nothing is created. Also raises ``position-lost``."""
        with Connection(self.kind, self._settings, self._password) as database:
            problems = [*self._server(database), *self._tables(database, is_new=is_new)]
            if problems:
                raise unfit(self._settings, problems)
            self._definitions = self._definitions_of(database)
            if position is not None and not self._has(database, position):
                raise ConfigurationError(
                    "position-lost",
                    f"{self._settings.from_}: the server has removed a part of its binary log that was not read yet, or has "
                    f"another log than the one that was read up to {position['offset']}.",
                    next=BEGIN_AGAIN,
                )
            return Prepared((), tuple(self._warnings))

    @staticmethod
    def order(position: Position) -> tuple[int, ...]:
        offset = position["offset"]
        return _number(offset["file"]), int(str(offset["pos"]))

    def begin(self, position: Position) -> Position | None:
        """Debezium asks for the file, for the GTIDs and for the definitions of tables one after the other.

        The GTIDs may be further on: they count, and what is between is in the snapshot. The definitions must be of the same
        place, or rows do not fit them.
        """
        with Connection(self.kind, self._settings, self._password) as database:
            if self._definitions_of(database) != self._definitions:
                raise TryAgainError(
                    "source-unreachable",
                    f"{self._settings.from_}: a table was altered while the snapshot began. Nothing has landed.",
                    next="nothing: it begins again",
                )
        return {**position, "offset": {name: position["offset"].get(name) for name in ("file", "pos", "gtids")}}

    def _definitions_of(self, database: Connection) -> list[Row]:
        return [row for name in self._settings.tables for row in database.rows(f"show create table {_quoted(name)}")]

    def shown(self, position: Position) -> Position:
        with Connection(self.kind, self._settings, self._password) as database:
            [(file, place, *_)] = database.rows("show master status")
        return {**position, "offset": {"file": file, "pos": int(str(place))}}

    def keep_alive(self) -> None:
        """Nothing: the binary log is not kept for the source."""

    def kept_log(self) -> int:
        return 0

    def _server(self, database: Connection) -> Iterator[Problem]:
        [(log, format_, image, compresses, mode)] = database.rows(_SETTINGS)
        self._sql_mode = str(mode)
        if log != "1":
            yield "the server writes no binary log", "set log_bin and restart the server"
        if format_ != "ROW":
            yield f"binlog_format is {format_}", "set binlog_format = ROW"
        if image != "FULL":
            yield f"binlog_row_image is {image}", "set binlog_row_image = FULL"
        if compresses != "0":
            yield "log_bin_compress is on, and Debezium does not read such changes", "set log_bin_compress = OFF"
        grants = " ".join(str(row[0]) for row in database.rows("show grants") if " ON *.* TO " in str(row[0]))
        if not re.search("ALL PRIVILEGES|REPLICATION (SLAVE|REPLICA)(?! ADMIN)", grants):
            yield f"the user {self._user} may not replicate", f"run `grant replication slave on *.* to {self._user}`"
        try:
            database.rows("show master status")
        except StatementError:
            grant = f"grant binlog monitor on *.* to {self._user}"
            yield f"the user {self._user} may not see where the binary log is", f"run `{grant}`"

    def _tables(self, database: Connection, *, is_new: bool) -> Iterator[Problem]:
        for name in self._settings.tables:
            schema, _, table = name.partition(".")
            sql = _quoted(name)
            found = database.rows(_TABLE, schema, table)
            if not found:
                yield (
                    f"there is no table {name}, or the user {self._user} may not read it",
                    "correct `tables`: each name has its database, as in shop.orders; or run "
                    f"`grant select on {sql} to {self._user}`",
                )
            elif found[0][0] == "SYSTEM VERSIONED":
                yield (
                    f"{name} is system-versioned, and Debezium can't read its changes",
                    f"run `alter table {sql} drop system versioning`",
                )
            elif found[0][0] != "BASE TABLE":
                yield f"{name} is not an ordinary table", "name the tables behind the view"
            else:
                yield from self._columns(database, name, sql, is_new=is_new)

    def _columns(self, database: Connection, name: str, sql: str, *, is_new: bool) -> Iterator[Problem]:
        schema, _, table = name.partition(".")
        columns = database.rows(_COLUMNS, schema, table)
        if not any(key == "PRI" for *_, key in columns):
            yield f"changes of {name} do not say which row they change", "give it a primary key"
        zeros, filled = [], []
        for name_, type_, nullable, _ in columns:
            column = str(name_)
            quoted = "`" + column.replace("`", "``") + "`"
            if type_ in _UNREAD:
                yield (
                    f"column {column} of {name} has the type {type_}, which Debezium can't read",
                    "follow other tables",
                )
            elif type_ == "year":
                zeros.append((column, "the year 0000", f"{quoted} + 0 = 0"))
            elif type_ == "timestamp" or (type_ in _DATES and nullable == "NO"):
                filled += [column] if type_ != "timestamp" else []
                zeros.append((column, "days or months that are zero", f"day({quoted}) = 0 or month({quoted}) = 0"))
        for column, what, where in zeros if is_new else ():
            if database.rows(f"select 1 from {sql} where {where} limit 1"):
                yield (
                    f"column {column} of {name} has {what}, which Debezium does not send",
                    f"set them to null or a date in {name}",
                )
        if filled and "NO_ZERO_DATE" not in self._sql_mode:
            self._warnings.append(
                (
                    f"A zero date that comes in {', '.join(filled)} of {name} would land as 1970-01-01 or the column's default, "
                    "and the server accepts them",
                    "add NO_ZERO_DATE to sql_mode",
                )
            )

    def _has(self, database: Connection, position: Position) -> bool:
        """Whether the server has all changes behind the position: the GTIDs at the same place of its log were read."""
        offset = position["offset"]
        logs = [str(row[0]) for row in database.rows("show binary logs")]
        file, place = str(offset["file"]), str(offset["pos"])
        if file not in logs:  # nothing may have come in the files between
            if _number(file) > _number(logs[0]):
                return False
            file, place = logs[0], "4"
        [(state,)] = database.rows(_STATE, file, place)
        read = _sequences(str(offset.get("gtids") or ""))
        return state is not None and all(number <= read.get(domain, 0) for domain, number in _sequences(state).items())


def _quoted(table: str) -> str:
    schema, _, name = table.partition(".")
    return ".".join("`" + part.replace("`", "``") + "`" for part in (schema, name))


def _sequences(gtids: str) -> dict[str, int]:
    """The newest number of each domain and server."""
    parts = [one.rpartition("-") for one in gtids.split(",") if one]
    return {place: int(number) for place, _, number in parts}


def _number(file: object) -> int:
    """The number of a binary log, by its name."""
    return int(str(file).rpartition(".")[2])
