"""Read a view with DuckDB: with its own Parquet scan if the files allow it, otherwise through Arrow."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING

import pyarrow as pa

from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.read.arrow import choose_columns, reader_schema, to_arrow
from lakeupsert.read.native import DUCKDB_PLACE, files_to_scan, require, superseded_rows
from lakeupsert.read.view import View, ViewFile
from lakeupsert.table.spec import FILE, PLACE

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, DuckDBPyRelation


class RowStream:
    """The rows of a view that pass a filter, which can be read more than once.

    ``error``: what ended a read. DuckDB passes on only its text.
    """

    def __init__(self, view: View, where: str | None = None, columns: Sequence[str] | None = None) -> None:
        self._open = partial(to_arrow, view, where, columns=columns)
        self.error: LakeupsertError | None = None

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        rows = self._open()
        return pa.RecordBatchReader.from_batches(rows.schema, self._read(rows)).__arrow_c_stream__(requested_schema)

    def _read(self, rows: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        try:
            yield from rows
        except LakeupsertError as e:
            self.error = e
            raise


def to_duckdb(
    view: View,
    connection: "DuckDBPyConnection | None" = None,
    *,
    where: str | None = None,
    columns: Sequence[str] | None = None,
) -> "DuckDBPyRelation":
    """A relation of the view's rows that pass the filter, in no particular order. With a filter they are read through Arrow.

    Args:
        connection: default: the one that `duckdb.sql` uses.
        columns: of the view, in this order; default: all.

    Raises:
        ConfigurationError: DuckDB is not installed or has no type for a column, there is no such column, or the filter can't be
            used.
    """
    require("duckdb")
    import duckdb

    schema = reader_schema(view)
    shown = choose_columns(schema, columns)
    connection = connection or duckdb.default_connection()
    files = files_to_scan(view, "DuckDB", where)
    if files is None:
        return relation_of(connection, RowStream(view, where, columns), shown)
    empty = connection.from_arrow(schema.empty_table())
    types = dict(zip(view.spec.schema.names, map(str, empty.types), strict=True))
    scans = [_scan(connection, view, types, renames, some) for renames, some in files.items()]
    found = reduce(lambda one, other: one.union(other), scans)
    return found if columns is None else found.project(", ".join(map(identifier, shown.names)))


def relation_of(connection: "DuckDBPyConnection", rows: object, schema: pa.Schema) -> "DuckDBPyRelation":
    """A relation of rows with this schema, which Arrow gives. Raises ConfigurationError if DuckDB has no type for a column."""
    import duckdb

    try:
        return connection.from_arrow(rows)
    except duckdb.Error as e:
        for field in schema:
            try:
                connection.from_arrow(pa.schema([field]).empty_table())
            except duckdb.Error:
                raise ConfigurationError(
                    "unfit-for-duckdb",
                    f"Column {field.name!r} is {field.type}, which DuckDB does not support. Nothing was read.",
                    next="leave it out (`columns` of to_duckdb), or read the table with to_arrow",
                ) from e
        raise


def _scan(
    connection: "DuckDBPyConnection", view: View, types: Mapping[str, str], renames: int, files: Sequence[ViewFile]
) -> "DuckDBPyRelation":
    """The rows of files whose columns have the names after so many renames. A column that no file has is null."""
    names = view.spec.names_in(renames)
    own = {name: names.get(name, name) for name in types}
    columns = ", ".join(f"CAST(NULL AS {type_}) AS {identifier(own[name])}" for name, type_ in types.items())
    hive = ", ".join(f"{identifier(own[name])}: {types[name]}" for name in view.spec.partition_by)
    listed = ", ".join(literal(file.path) for file in files)
    options = f"hive_partitioning = true, hive_types = {{{hive}}}" if hive else "hive_partitioning = false"
    if view.has_new_columns():
        options += ", union_by_name = true"  # for which DuckDB opens every file before it reads the first
    shown = ", ".join(
        f"CAST({identifier(own[name])} AS {type_}) AS {identifier(name)}" for name, type_ in types.items()
    )
    numbers, places = superseded_rows(view, files)
    if len(places):
        options += f", {DUCKDB_PLACE} = true, filename = '{FILE}'"
    scan = connection.sql(
        f"SELECT {columns} WHERE false UNION ALL BY NAME SELECT * FROM read_parquet([{listed}], {options})"
    )
    if len(places):
        names = pa.DictionaryArray.from_arrays(numbers, [file.path for file in files])
        marked = connection.from_arrow(pa.table({FILE: names, PLACE: places})).set_alias("dead")
        condition = f"live.{FILE} = dead.{FILE} AND live.{DUCKDB_PLACE} = dead.{PLACE}"
        scan = scan.set_alias("live").join(marked, condition, how="anti")
    return scan.project(shown)


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def literal(value: object) -> str:
    """A text of DuckDB's SQL, which takes the type of the column that it is compared with."""
    return "'" + str(value).replace("'", "''") + "'"
