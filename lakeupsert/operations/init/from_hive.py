"""A table's settings from Hive's CREATE TABLE statements: that of the table, which names its key, and that of its staging table.

Reads     the file
Writes    nothing
Repeat    safe: the same file gives the same settings

    statements -> tables (`hive_ddl`) -> the one with a key, and its staging table -> settings · what has no counterpart
"""

import shlex
from collections.abc import Iterator, Sequence

from lakeupsert.errors import ConfigurationError
from lakeupsert.operations.init.hive_ddl import HiveTable, Text, read_tables
from lakeupsert.operations.init.propose import processed_zone
from lakeupsert.operations.init.translation import Leftover, Setting, SourceFile, Translation
from lakeupsert.storage import can_commit

OPTION = "--from-hive"
KEY, OPERATION, VERSION = "primary_key_columns", "op_code_column", "version_id_column"
_HEADER = "skip.header.line.count"
_READABLE = ("text", "csv", "jsonl", "parquet", "orc", "avro")
_GIVEN = "as it was given"
_STAMP = "record_timestamp"
_DELETED = "D"
"""A guess: the statements name the operation's column, and not the values that delete."""


def translate_ddl(path: str, landing: str | None, table: str | None) -> Translation:
    """The settings of the table whose CREATE TABLE is in the file ``path``.

    Args:
        landing: the landing zone; None: the LOCATION of the staging table.
        table: which table, if several have a key; otherwise the table's name here.

    Raises:
        ConfigurationError: the file can't be read, contradicts itself, has no table with a key, several of them, or none or
            several staging tables, or says something that lakeupsert can't do.
    """
    source = SourceFile(path, OPTION)
    tables, statements = read_tables(source)
    move = _Move(source, tables, landing, table)
    settings = [*move.zones(), *move.keys(), *move.reading(), *move.schema(), *move.delete()]
    adopts = move.adopted_location is not None
    first = "`lakeupsert adopt` with the processed zone, then " if adopts else ""
    return Translation(
        table=table or move.main.name,
        settings=tuple(settings),
        leftovers=tuple(sorted([*statements, *move.leftovers()], key=lambda one: one.line)),
        warnings=tuple(move.warnings),
        next=f"{first}`lakeupsert run`",
    )


class _Move:
    """The settings of one table, and what is left."""

    def __init__(self, source: SourceFile, tables: Sequence[HiveTable], landing: str | None, name: str | None) -> None:
        self.source = source
        self.main = _choose_main(source, tables, name)
        self.staging = _choose_staging(source, tables, self.main)
        self.others = [one for one in tables if one is not self.main and one is not self.staging]
        self.landed = self.staging or self.main
        self.warnings: list[str] = []
        self.version = self._version()
        self.partitions = [one for one in self.main.partitions if one != self.version]
        self.key, self.key_origin = _key(source, self.main)
        self.columns = [name for name in self.landed.all_columns if self.staging or name != self.version]
        self._check_columns()
        self.landing_address, self.landing, self.landing_origin = self._landing(landing)

    def _version(self) -> str | None:
        found = self.main.properties.get(VERSION)
        if found is None:
            return None
        name = found.value.strip().lower()
        if name not in self.main.partitions:
            raise self.source.contradiction(
                found.line, VERSION, found.value, f"{self.main.name} is not partitioned by it"
            )
        return name

    def _check_columns(self) -> None:
        """Landing files must bring the key and the partition columns."""
        for column in (*self.key, *self.partitions):
            if column not in self.columns:
                raise self.source.error(
                    "contradictory-source",
                    self.landed.line,
                    f"{self.main.name} needs column {column!r}, which {self.landed.name} does not have.",
                )
        if self.staging is None:
            return
        main, staging = self.main.name, self.staging.name
        self.warnings += [
            f"the table lacks column {column!r} of {main}, because {staging} does not have it"
            for column in self.main.columns
            if column not in self.columns
        ]
        self.warnings += [
            f"column {column!r} of {staging} is not in {main}: the table gets it, too"
            for column in self.columns
            if column not in self.main.all_columns and column != self._operation
        ]

    @property
    def _operation(self) -> str | None:
        found = self.main.properties.get(OPERATION)
        return found.value.strip().lower() if found else None

    # -- settings

    def zones(self) -> Iterator[Setting]:
        yield Setting("landing", self.landing, self.landing_origin)
        found = self.adopted_location
        if found:
            yield Setting("processed", found.value, f"LOCATION of {self.main.name} (line {found.line})")
        else:
            yield Setting("processed", processed_zone(self.landing_address, self.landing), "a new folder")

    @property
    def adopted_location(self) -> Text | None:
        """Where the table's files are, if lakeupsert can adopt them."""
        found = self.main.location
        fits = self.main.kind == "parquet" and self.version is None
        return found if found and fits and can_commit(found.value) else None

    def keys(self) -> Iterator[Setting]:
        yield Setting("key", self.key, self.key_origin)
        origin = f"PARTITIONED BY of {self.main.name} (line {self.main.line})"
        without = f", without {self.version}" if self.version else ""
        yield Setting(
            "partition_by",
            tuple(self.partitions),
            f"{origin}{without}" if self.main.partitions else "no PARTITIONED BY",
        )
        is_stamped = _STAMP not in self.columns
        why = (
            "the later batch wins, as with versions: rows are stamped on receipt"
            if is_stamped
            else f"{self.landed.name} has it"
        )
        yield Setting("order_by", (_STAMP,), why)

    def reading(self) -> Iterator[Setting]:
        of, kind = f"{self.landed.name} (line {self.landed.line})", self.landed.kind
        if kind not in _READABLE:
            raise self.source.error(
                "no-counterpart",
                self.landed.line,
                f"the files of {self.landed.name} are {kind}, which lakeupsert does not read.",
                change="add the CREATE TABLE of a staging table of text, Parquet, ORC, Avro or JSON",
            )
        yield Setting("format", "csv" if kind == "text" else kind, f"the files of {of}")
        if kind not in ("text", "csv"):
            return
        given = self.landed.delimiter
        if given and (len(given) != 1 or not given.isascii() or given in "\r\n\0"):
            why = f"fields of {self.landed.name} end in {given!r}; expected one character of ASCII."
            raise self.source.error("no-counterpart", self.landed.line, why)
        default = "\x01" if kind == "text" else ","
        yield Setting("read.delimiter", given or default, f"the fields of {of}" if given else "Hive's own")
        escaped = kind == "text" and self.landed.escaped
        if escaped:
            yield Setting("read.escape", "hive", f"ESCAPED BY of {of}")
        elif kind == "text":
            yield Setting("read.quote", "", "Hive's text knows no quotes")
        null = self.landed.null if self.landed.null is not None else ("\\N" if kind == "text" else "")
        if null and not (escaped and null == "\\N"):
            yield Setting("read.null", null, f"NULL DEFINED AS of {of}" if self.landed.null else "Hive's own")
        yield from self._header(of)

    def _header(self, of: str) -> Iterator[Setting]:
        found = self.landed.properties.get(_HEADER)
        if found is None or found.value.strip() == "0":
            yield Setting("read.header", False, "the files name no columns")
            yield Setting("read.columns", tuple(self.columns), f"the columns of {of}")
        elif found.value.strip() == "1":
            yield Setting("read.header", True, f"{_HEADER} (line {found.line})")
            self.warnings.append(f"the headers of the files name the columns: they must be those of {self.landed.name}")
        else:
            raise self.source.error(
                "no-counterpart", found.line, f"{_HEADER} is {found.value!r}; lakeupsert skips one line at most."
            )

    def schema(self) -> Iterator[Setting]:
        keeps = self._operation in self.main.columns
        for name in self.columns:
            type_ = self.main.all_columns.get(name, self.landed.all_columns[name])
            if type_ is not None and (name != self._operation or keeps):
                yield Setting(f"schema.{name}", type_, "")

    def delete(self) -> Iterator[Setting]:
        found, name = self.main.properties.get(OPERATION), self._operation
        if found is None or name is None:
            self.warnings.append(f"no {OPERATION} in TBLPROPERTIES of {self.main.name}: no record deletes")
            return
        if name not in self.columns:
            raise self.source.contradiction(
                found.line, OPERATION, found.value, f"{self.landed.name} has no such column"
            )
        self.warnings.append(
            f"delete.values = [{_DELETED!r}] is a guess: the statements do not say which values of {name!r} delete; correct it "
            "before the first run"
        )
        if self.partitions:
            self.warnings.append(
                f"a delete must have the partition columns ({', '.join(self.partitions)}) as well as the key, as records of "
                f'{self.landed.name} do. If deletes have only the key, set key_scope = "table" before the first run: a key '
                "then has one row in the table"
            )
        origin = f"{OPERATION} (line {found.line})"
        yield Setting("delete.column", name, origin)
        yield Setting("delete.values", (_DELETED,), "a guess: correct it")
        if name in self.main.columns:
            yield Setting("delete.keep", True, f"{self.main.name} has the column")

    def _landing(self, given: str | None) -> tuple[str, str, str]:
        """Address, root and origin of the landing zone."""
        found = self.staging.location if self.staging else None
        if given is not None:
            return given, self.source.open_landing(given, None)[1], _GIVEN
        if found is None:
            raise ConfigurationError(
                "no-landing",
                f"{self.source.path} has no staging table with a LOCATION, so it does not say where files land. Nothing was "
                "written.",
                next=f"name the landing zone: {self.source.command_with_path}",
            )
        root = self.source.open_landing(found.value, found.line)[1]
        return found.value, root, f"LOCATION of {self.landed.name} (line {found.line})"

    # -- what is left

    def leftovers(self) -> Iterator[Leftover]:
        for table in (self.main, self.staging):
            if table is None:
                continue
            yield from table.leftovers
            if table is not self.landed or table.kind not in ("text", "csv"):
                clauses = {"FIELDS TERMINATED BY": table.delimiter, "NULL DEFINED AS": table.null}
                for clause, sign in clauses.items():
                    if sign is not None:
                        reason = f"the files of {table.name} are not CSV that lands"
                        yield Leftover(clause, repr(sign), table.line, reason)
            for name, text in table.properties.items():
                if table is self.main and name in (KEY, OPERATION):
                    continue
                if table is self.landed and name == _HEADER:
                    continue
                reason = "a property of Hive and its readers"
                if table is self.main and name == VERSION:
                    reason = (
                        "a published night is a snapshot, which takes the place of a version's partition; "
                        "with `versions = true` readers can ask for the number of each row's batch"
                    )
                yield Leftover(f"TBLPROPERTIES {name}", text.value, text.line, reason)
        if self.staging and self.main.kind != "parquet":
            yield Leftover("files", self.main.kind, self.main.line, f"the files of {self.main.name} become Parquet")
        is_adopted, is_landing = self.adopted_location is not None, self.landing_origin != _GIVEN
        for table, is_kept in ((self.main, is_adopted), (self.staging, is_landing)):
            if table and table.location and not is_kept:
                yield Leftover("LOCATION", table.location.value, table.location.line, "another folder takes its place")
        for table in self.others:
            yield Leftover("table", table.name, table.line, f"not the staging table of {self.main.name}")


def _choose_main(source: SourceFile, tables: Sequence[HiveTable], name: str | None) -> HiveTable:
    keyed = [one for one in tables if KEY in one.properties or one.constraint]
    if len(keyed) > 1 and name:
        keyed = [one for one in keyed if one.name == name.lower()] or keyed
    if len(keyed) == 1:
        return keyed[0]
    if keyed:
        raise source.error(
            "which-table",
            keyed[1].line,
            f"several tables have a key: {', '.join(one.name for one in keyed)}.",
            next=f"choose one: `lakeupsert init {OPTION} {shlex.quote(source.path)} --table {keyed[0].name}`",
        )
    found = (
        f"none of the tables ({', '.join(one.name for one in tables)}) has a key"
        if tables
        else "there is no CREATE TABLE"
    )
    raise source.error(
        "no-key" if tables else "unreadable-source",
        tables[0].line if tables else None,
        f"{found}.",
        change=f"add TBLPROPERTIES ('{KEY}'='...') to the CREATE TABLE of the table",
    )


def _choose_staging(source: SourceFile, tables: Sequence[HiveTable], main: HiveTable) -> HiveTable | None:
    """The table without a key that has all columns of the key and the partitions, except that of the version."""
    version = main.properties.get(VERSION)
    needed = {*_key(source, main)[0], *main.partitions} - ({version.value.strip().lower()} if version else set())
    found = [
        one
        for one in tables
        if one is not main and not one.constraint and KEY not in one.properties and needed <= set(one.all_columns)
    ]
    if len(found) > 1:
        raise source.error(
            "contradictory-source",
            found[1].line,
            f"two tables could be the staging table of {main.name}: {', '.join(one.name for one in found)}.",
            change="remove one",
        )
    return found[0] if found else None


def _key(source: SourceFile, main: HiveTable) -> tuple[tuple[str, ...], str]:
    """The key's columns, and what says so."""
    named = main.names_in(KEY)
    line = main.properties[KEY].line if KEY in main.properties else main.line
    if KEY in main.properties and not named:
        raise source.error("no-key", line, f"{KEY} of {main.name} is empty.")
    if named and main.constraint and set(named) != set(main.constraint):
        raise source.error(
            "contradictory-source",
            line,
            f"{KEY} is {', '.join(named)}, but PRIMARY KEY is {', '.join(main.constraint)}.",
        )
    key = named or main.constraint
    for column in key:
        if column not in main.all_columns:
            raise source.error(
                "contradictory-source", line, f"the key of {main.name} names {column!r}, which it does not have."
            )
    return key, f"{KEY} (line {line})" if named else f"PRIMARY KEY of {main.name} (line {line})"
