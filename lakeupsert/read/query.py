"""One SELECT of DuckDB's SQL over the rows of a view, which can only read."""

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.read.arrow import reader_schema
from lakeupsert.read.duckdb import RowStream, identifier, literal, relation_of, to_duckdb
from lakeupsert.read.native import files_to_scan, require
from lakeupsert.read.view import View
from lakeupsert.table.types import is_text

if TYPE_CHECKING:
    import pandas as pd
    from duckdb import DuckDBPyConnection, DuckDBPyRelation

SHOWN = 20
"""Rows that a result shows as text."""
_WITHOUT_ARROW = {"bignum", "bit", "interval", "time with time zone", "union"}
"""Types of a query's result that become text, by DuckDB's ids."""
_MAKES_ROWS = {"generate_series", "json_each", "json_tree", "range", "repeat", "unnest"}
"""Table functions that a query may use. Others open files, or change DuckDB: `enable_logging` writes wherever it is told."""

_EQUAL = {"COMPARE_EQUAL", "COMPARE_NOTEQUAL", "COMPARE_IN", "COMPARE_NOT_IN"}
"""Comparisons in which an integer beside a column of text means its digits."""
_INTEGER = re.compile(rb"-?\d+(?![\w.])")


class QueryResult:
    """The rows of a query, read once: by `read_all`, `read_pandas`, batch by batch, or by any library that takes an Arrow stream
    (``pl.DataFrame(result)``, ``duckdb.from_arrow(result)``).

    As text it is its first `SHOWN` rows. Showing them does not use them up.
    """

    def __init__(self, rows: pa.RecordBatchReader) -> None:
        self._rows = rows

    @property
    def schema(self) -> pa.Schema:
        return self._rows.schema

    def __enter__(self) -> "QueryResult":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> "QueryResult":
        return self

    def __next__(self) -> pa.RecordBatch:
        return next(self._rows)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._rows.__arrow_c_stream__(requested_schema)

    def read_all(self) -> pa.Table:
        return self._rows.read_all()

    def read_next_batch(self) -> pa.RecordBatch:
        return self._rows.read_next_batch()

    def read_pandas(self) -> "pd.DataFrame":
        frame: pd.DataFrame = self._rows.read_pandas()
        return frame

    def close(self) -> None:
        self._rows.close()

    def __repr__(self) -> str:
        import duckdb

        first: list[pa.RecordBatch] = []
        for batch in self._rows:
            first.append(batch)
            if sum(map(len, first)) > SHOWN:
                break
        self._rows = pa.RecordBatchReader.from_batches(self.schema, chain(first, self._rows))
        known = pa.Table.from_batches(first, self.schema)
        with duckdb.connect() as db:
            text = str(db.from_arrow(known.slice(0, SHOWN))).rstrip()
        return f"{text}\n(the first {SHOWN} rows; read_all() reads all)" if known.num_rows > SHOWN else text


def query(tables: Mapping[str, View | pa.Table], sql: str) -> QueryResult:
    """The result of one SELECT. It knows these tables, and nothing else.

    It can't write and can't open any file but those of the views. Only a SELECT is taken, without table functions that could do
    more than make rows. Its connection is new and in memory. It has access to no other file, extension or Python object, and its
    settings are locked. Times are UTC.

    Raises:
        ConfigurationError: DuckDB is not installed or has no type for a column, ``sql`` is not one SELECT, or DuckDB can't run
            it; also while reading.
    """
    require("duckdb")
    import duckdb

    connection, sources, paths = duckdb.connect(), list[RowStream](), list[str]()
    try:
        schemas = [one.schema if isinstance(one, pa.Table) else reader_schema(one.spec) for one in tables.values()]
        sql = _with_text(sql, _refuse_others(connection, sql), [field for schema in schemas for field in schema])
        for (name, one), schema in zip(tables.items(), schemas, strict=True):
            files = None if isinstance(one, pa.Table) else files_to_scan(one, "DuckDB")
            if isinstance(one, pa.Table):
                found = connection.from_arrow(one)
            elif files is None:
                sources.append(RowStream(one))
                found = relation_of(connection, sources[-1], schema)
            else:
                found = to_duckdb(one, connection)
                paths += [file.path for some in files.values() for file in some]
            found.create_view(name)
        lock(connection, paths)
        rows = pa.RecordBatchReader.from_stream(_plain(connection.sql(sql)))
    except duckdb.Error as e:
        connection.close()
        raise _error_of(sources) or _unfit_query(e, tables) from e
    except BaseException:
        connection.close()
        raise
    return QueryResult(pa.RecordBatchReader.from_batches(rows.schema, _read(connection, rows, sources)))


def _error_of(sources: Iterable[RowStream]) -> LakeupsertError | None:
    return next((source.error for source in sources if source.error), None)


def _refuse_others(connection: "DuckDBPyConnection", sql: str) -> dict[str, object]:
    """``sql`` as DuckDB parses it. Raises ConfigurationError unless it is one SELECT that only reads tables and makes rows."""
    import duckdb

    kinds = [statement.type for statement in duckdb.extract_statements(sql)]
    if kinds != [duckdb.StatementType.SELECT]:
        found = ", ".join(kind.name for kind in kinds) or "nothing"
        raise _unfit_query(f"expected one SELECT, found {found}")
    [[tree]] = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
    parsed: dict[str, object] = json.loads(tree)
    if parsed["error"]:
        raise _unfit_query(parsed["error_message"])
    others = sorted(set(_table_functions(parsed)) - _MAKES_ROWS)
    if others:
        raise _unfit_query(f"it uses {others[0]}(…). In FROM it may use {', '.join(sorted(_MAKES_ROWS))}, and tables")

    return parsed


def _table_functions(parsed: object) -> Iterator[str]:
    """The names of the table functions in a query that DuckDB has parsed."""
    for node in nodes(parsed):
        if node.get("type") == "TABLE_FUNCTION":
            yield node["function"]["function_name"].lower()


def _with_text(sql: str, parsed: object, fields: Iterable[pa.Field]) -> str:
    """The query with `id = '1'` for `id = 1` where `id` is text, which is what a filter means by it (`read.where`).

    DuckDB would convert the column instead: `01` would equal 1, and `A17` would be an error.
    """
    texts = {field.name.lower() for field in fields if is_text(field.type)}
    numbers = set()
    for node in nodes(parsed):
        sides = [node.get("left"), node.get("right"), *node.get("children", ())] if node.get("type") in _EQUAL else []
        sides = [side for side in sides if isinstance(side, dict)]
        if any(side["class"] == "COLUMN_REF" and side["column_names"][-1].lower() in texts for side in sides):
            numbers |= {side["query_location"] for side in sides if side["class"] == "CONSTANT"}
    written = sql.encode()
    for place in sorted(numbers, reverse=True):
        if found := _INTEGER.match(written, place):
            written = written[:place] + b"'%d'" % int(found[0]) + written[found.end() :]
    return written.decode()


def nodes(parsed: object) -> Iterator[dict[str, Any]]:  # JSON
    """All nodes of a tree that DuckDB has parsed."""
    if isinstance(parsed, dict):
        yield parsed
        parsed = list(parsed.values())
    if isinstance(parsed, list):
        for part in parsed:
            yield from nodes(part)


def lock(connection: "DuckDBPyConnection", paths: Sequence[str]) -> None:
    """Let the connection open these files and no others, and keep it from changing that."""
    # DuckDB makes this folder if a query needs it, and removes it.
    spill = Path(tempfile.gettempdir(), f"lakeupsert-query-{clock.new_id()}")
    settings = {
        "TimeZone": "'UTC'",
        "temp_directory": literal(str(spill)),
        "allowed_paths": f"[{', '.join(map(literal, paths))}]",
        "autoload_known_extensions": "false",
        "python_enable_replacements": "false",
        "enable_external_access": "false",
        "lock_configuration": "true",
    }
    for name, value in settings.items():
        connection.execute(f"SET {name} = {value}")


def _plain(result: "DuckDBPyRelation") -> "DuckDBPyRelation":
    """The result, with text for types that Arrow or Parquet lacks. Raises ConfigurationError if two columns have one name."""
    names = result.columns
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise _unfit_query(f"two columns of its result are called {twice!r}; give one of them another name with AS")
    if not any(type_.id in _WITHOUT_ARROW for type_ in result.types):
        return result
    quoted = list(map(identifier, names))
    kinds = [type_.id for type_ in result.types]
    return result.project(
        ", ".join(
            f"CAST({name} AS VARCHAR) AS {name}" if kind in _WITHOUT_ARROW else name
            for name, kind in zip(quoted, kinds, strict=True)
        )
    )


def _read(
    connection: "DuckDBPyConnection", rows: pa.RecordBatchReader, sources: Iterable[RowStream]
) -> Iterator[pa.RecordBatch]:
    try:
        yield from rows
    except (pa.ArrowException, OSError) as e:  # DuckDB's errors, as they come through Arrow
        raise _error_of(sources) or _unfit_query(e) from e
    finally:
        rows.close()
        connection.close()


def _unfit_query(why: object, tables: Iterable[str] = ()) -> ConfigurationError:
    """``tables``: all of the query, if it may name another one."""
    text = str(why).strip().rstrip(".")
    if "Cannot access file" in text or text.startswith("it uses "):
        step = (
            "join the table with files and other tables in Python, by `Table.to_duckdb(connection)` (docs/engines/DUCKDB.md), or "
            "give DuckDB the rows of `lakeupsert export`"
        )
    elif tables and "Table with name" in text:
        step = f"name the table {' or '.join(map(identifier, tables))}: the query sees no other"
    else:
        step = "give one SELECT in DuckDB's SQL; the table has its own name there, and `lakeupsert schema` lists its columns"
    ends_line = text.endswith("^")  # it marks a place in the line above
    end = "\n" if ends_line else " " if text.endswith(("?", "!")) else ". "
    return ConfigurationError("unfit-query", f"The query can't be run: {text}{end}Nothing was changed.", next=step)
