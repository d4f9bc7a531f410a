"""PostgreSQL as a source: what must be true before it starts, its publication and slot, and Debezium's settings."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from urllib.parse import unquote

from lakeupsert.config import DatabaseSource
from lakeupsert.sources.debezium import Position
from lakeupsert.sources.jdbc import BEGIN_AGAIN, Connection, Prepared, Problem, StatementError, unfit, unreachable

_TABLES = """select n.nspname || '.' || c.relname, c.relkind, c.relreplident, has_table_privilege(c.oid, 'select'),
    exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary),
    (select coalesce(bool_or(a.attstorage in ('x', 'e') and a.attlen < 0), false) from pg_attribute a
        where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped),
    format('%I.%I', n.nspname, c.relname), has_schema_privilege(n.oid, 'usage'), row_security_active(c.oid),
    exists (select from pg_inherits i where i.inhparent = c.oid),
    (select min(string_agg(a.attname, ' and ' order by a.attname)) over () from pg_attribute a
        where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped group by lower(a.attname) having count(*) > 1 limit 1)
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname || '.' || c.relname = any (string_to_array(?, E'\\n'))"""
_COLUMNS = """select n.nspname || '.' || c.relname, a.attname, format_type(a.atttypid, null), a.attgenerated <> '',
    t.typtype in ('c', 'm') or a.attndims > 1 or t.typname in ('box', 'pg_lsn', 'xid8', '_interval', '_name', 'name')
    from pg_attribute a join pg_class c on c.oid = a.attrelid join pg_namespace n on n.oid = c.relnamespace
    join pg_type t on t.oid = a.atttypid
    where a.attnum > 0 and not a.attisdropped and n.nspname || '.' || c.relname = any (string_to_array(?, E'\\n'))"""
_MINE = """select current_setting('wal_level'), rolreplication or rolsuper, current_setting('server_version_num')
    from pg_roles where rolname = current_user"""
_PUBLICATION = (
    "select puballtables, pubinsert and pubupdate and pubdelete and pubtruncate from pg_publication where pubname = ?"
)
_PUBLISHED = "select schemaname || '.' || tablename from pg_publication_tables where pubname = ?"
_PARTLY = """select p.prrelid::regclass::text from pg_publication_rel p join pg_publication b on b.oid = p.prpubid
    where b.pubname = ? and (p.prattrs is not null or p.prqual is not null)"""
MUCH_LOG = 1_000_000_000
"""Bytes of its log that a server keeps for a source: more is a warning. It keeps as much anyway (`max_wal_size`)."""
_OLDEST, _LISTS = 130000, 150000
"""Versions of PostgreSQL: the first with all that these queries name, and the first with lists of columns and row filters."""
_KEPT = (
    "select pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint from pg_replication_slots where slot_name = ?"
)
_SLOT = "select plugin, database = current_database(), active, wal_status from pg_replication_slots where slot_name = ?"
_HAS_FREE_SLOT = "select count(*) < current_setting('max_replication_slots')::int from pg_replication_slots"
_MAY_PUBLISH = """select coalesce((select pg_has_role(pubowner, 'usage') from pg_publication where pubname = ?),
        has_database_privilege(current_database(), 'create')) and bool_and(pg_has_role(c.relowner, 'usage'))
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname || '.' || c.relname = any (string_to_array(?, E'\\n'))"""


class Postgresql:
    """One PostgreSQL database, followed by a slot and a publication that are named after the source."""

    kind = "postgresql"
    ends_at_truncates = False

    def __init__(self, name: str, settings: DatabaseSource, password: str, mode: str) -> None:
        self._settings, self._password, self._mode = settings, password, mode
        self._name, self._slot = name, f"lakeupsert_{name}"
        self._sql: dict[str, str] = {}
        self._warnings: list[Problem] = []
        self._long: list[str] = []
        self._only_look = self._is_read = False

    def properties(self, left_out: Iterable[str]) -> dict[str, str]:
        """Debezium's settings. ``left_out``: columns that are not followed."""
        server = self._settings.server
        return {
            "name": self._name,
            "topic.prefix": self._name,
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "plugin.name": "pgoutput",
            "database.hostname": server.hostname or "",
            "database.port": str(server.port or 5432),
            "database.user": unquote(server.username or ""),
            "database.password": self._password,
            "database.dbname": unquote(server.path[1:]),
            "slot.name": self._slot,
            "publication.name": self._slot,
            "publication.autocreate.mode": "disabled",
            "table.include.list": ",".join(map(re.escape, self._settings.tables)),
            "column.exclude.list": ",".join(map(re.escape, left_out)),
            "interval.handling.mode": "string",
            "status.update.interval.ms": "1000",
        }

    def prepare(self, position: Position | None = None, *, is_new: bool, only_look: bool = False) -> Prepared:
        """Check the database, and create the publication and, if the source ``is_new``, the slot.

        The slot keeps the ``position``. ``only_look``: create nothing, and say whether that would work. The slot may be in use.

        Raises ConfigurationError (``source-unfit``, with all that is wrong) and TryAgainError.
        """
        self._only_look = only_look
        with Connection(self.kind, self._settings, self._password) as database:
            problems = [*self._server(database), *self._tables(database)]
            if not problems:
                problems = [*self._publication(database, is_new=is_new), *self._slot_of(database, is_new=is_new)]
            if problems:
                raise unfit(self._settings, problems)
            return Prepared(tuple(self._left_out(database)), tuple(self._warnings), bool(self._long), self._is_read)

    @staticmethod
    def order(position: Position) -> tuple[int, ...]:
        """Sorts the ends of transactions, and snapshots among them."""
        return (int(str(position["offset"]["lsn"])),)

    @staticmethod
    def begin(position: Position) -> Position | None:
        return None

    @staticmethod
    def shown(position: Position) -> Position:
        return position

    def keep_alive(self) -> None:
        """Write something that the slot passes on, so that it also advances while only other tables change."""
        with Connection(self.kind, self._settings, self._password) as database, suppress(StatementError):
            database.rows("select pg_logical_emit_message(true, 'lakeupsert', '')::text")

    def kept_log(self) -> int:
        """How many bytes of its log the server keeps for the source. 0: not known."""
        with Connection(self.kind, self._settings, self._password) as database, suppress(StatementError):
            return int(next((row[0] for row in database.rows(_KEPT, self._slot)), None) or 0)
        return 0

    def _server(self, database: Connection) -> Iterator[Problem]:
        [(level, may_replicate, version)] = database.rows(_MINE)
        self._version = int(str(version))
        if self._version < _OLDEST:
            yield "its version is older than 13", "follow a database of PostgreSQL 13 or newer"
        if level != "logical":
            yield f"wal_level is {level}", "set wal_level = logical in postgresql.conf and restart the server"
        if may_replicate != "t":
            user = self._settings.server.username
            yield f"the user {user} may not replicate", f"run `alter role {user} replication`"

    def _tables(self, database: Connection) -> Iterator[Problem]:
        found = {str(row[0]): row[1:] for row in database.rows(_TABLES, "\n".join(self._settings.tables))}
        for name in self._settings.tables:
            if name not in found:
                yield f"there is no table {name}", "correct `tables`: each name has its schema, as in public.orders"
                continue
            kind, identity, may_read, has_key, has_long, sql, may_enter, is_filtered, has_children, alike = found[name]
            self._sql[name] = str(sql)
            if kind != "r":
                yield f"{name} is not an ordinary table", "name its partitions, or the tables behind the view"
            elif has_children == "t":
                yield (
                    f"other tables inherit from {name}, and their changes would be missing",
                    "name a table without heirs",
                )
            elif may_enter != "t":
                schema, user = str(sql).rpartition(".")[0], self._settings.server.username
                yield f"the user may not use the schema of {name}", f"run `grant usage on schema {schema} to {user}`"
            elif is_filtered == "t":
                user = self._settings.server.username
                yield f"row-level security hides rows of {name}", f"run `alter role {user} bypassrls`"
            elif may_read != "t":
                yield (
                    f"the user may not read {name}",
                    f"run `grant select on {sql} to {self._settings.server.username}`",
                )
            elif alike is not None:
                yield (
                    f"columns {alike} of {name} differ in upper and lower case only, which lakeupsert ignores",
                    "rename one of them",
                )
            elif identity in ("n", "i") or (identity == "d" and has_key != "t"):
                yield (
                    f"updates and deletes of {name} do not say which row they change",
                    f"give it a primary key and its default replica identity, or run `alter table {sql} replica identity full`",
                )
            elif identity == "d" and has_long == "t":
                self._long.append(name)
                if self._mode == "rows":
                    self._warnings.append(
                        (
                            f"{name} may have long values. PostgreSQL does not send one that an update left as it was, and the "
                            "row goes to quarantine",
                            f'run `alter table {sql} replica identity full`, or set mode = "columns"',
                        )
                    )

    def _publication(self, database: Connection, *, is_new: bool) -> Iterator[Problem]:
        tables = ", ".join(self._sql.values())
        found = database.rows(_PUBLICATION, self._slot)
        published = {row[0] for row in database.rows(_PUBLISHED, self._slot)}
        missing = [self._sql[name] for name in self._settings.tables if name not in published]
        statement = None
        if not found:
            statement = f"create publication {self._slot} for table {tables}"
        elif found[0][1] != "t":
            statement = f"alter publication {self._slot} set (publish = 'insert, update, delete, truncate')"
        elif missing:
            statement = f"alter publication {self._slot} add table {', '.join(missing)}"
        partly = database.rows(_PARTLY, self._slot) if self._version >= _LISTS else []
        for (table,) in partly:
            yield f"the publication {self._slot} has only a part of {table}", "publish it without columns and `where`"
        if statement and not is_new:
            why = f"the publication {self._slot} lacks changes that came since the last landing file"
            yield f"{why} (a table, the publication or its `publish` was changed)", BEGIN_AGAIN
        elif statement:
            advice = f"let the owner of the tables run `{statement}`"
            try:
                if not self._only_look:
                    database.rows(statement)
                elif database.rows(_MAY_PUBLISH, self._slot, "\n".join(self._settings.tables)) != [("t",)]:
                    yield f"the user may not make the publication {self._slot}", advice
            except StatementError as e:
                yield f"the publication {self._slot} can't be made: {e}", advice

    def _slot_of(self, database: Connection, *, is_new: bool) -> Iterator[Problem]:
        found = database.rows(_SLOT, self._slot)
        drop = f"select pg_drop_replication_slot('{self._slot}')"
        if found:
            plugin, is_here, is_active, status = found[0]
            self._is_read = is_active == "t"
            if self._is_read and not self._only_look:
                raise unreachable(self._settings, f"another program reads the slot {self._slot}")
            if plugin != "pgoutput" or is_here != "t":
                yield (
                    f"the slot {self._slot} is of another kind, or of another database",
                    f"run `{drop}`, or rename the source",
                )
            elif status == "lost":
                yield f"the server has removed changes that the slot {self._slot} needs", BEGIN_AGAIN
        elif not is_new:
            yield f"the slot {self._slot} is gone, and with it the changes since", BEGIN_AGAIN
        else:
            advice = "drop a slot, or set a larger max_replication_slots"
            try:
                if not self._only_look:
                    database.rows("select pg_create_logical_replication_slot(?, 'pgoutput')", self._slot)
                elif database.rows(_HAS_FREE_SLOT) != [("t",)]:
                    yield "all replication slots of the server are taken", advice
            except StatementError as e:
                yield f"the slot {self._slot} can't be made: {e}", advice

    def _left_out(self, database: Connection) -> Iterator[str]:
        """Columns that Debezium does not send, or not as they are."""
        for table, column, type_, is_generated, is_unfit in database.rows(_COLUMNS, "\n".join(self._settings.tables)):
            if "t" in (is_generated, is_unfit):
                why = "is generated" if is_generated == "t" else f"has the type {type_}"
                self._warnings.append(
                    (
                        f"Column {column} of {table} is left out, because it {why}, which Debezium does not send",
                        "leave it, or give the column another type",
                    )
                )
                yield f"{table}.{column}"
