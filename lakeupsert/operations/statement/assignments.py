"""The new values of columns, each by an expression in DuckDB's SQL over the columns of a row.

DuckDB parses the expressions and says which functions there are; its parse tree is checked before anything runs. An expression
can only compute: what it gives depends on the row alone.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING

import pyarrow as pa

from lakeupsert.errors import ConfigurationError
from lakeupsert.phrases import install
from lakeupsert.read.query import lock, nodes
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.convert import READABLE_MOMENTS, convert, unreadable_moments
from lakeupsert.rows.leaves import decode
from lakeupsert.rows.tojson import to_json_values

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_COMPUTES = {
    "BETWEEN", "CASE", "CAST", "COLLATE", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT", "FUNCTION", "LAMBDA",
    "OPERATOR", "TYPE",
}  # fmt: skip
"""Classes of DuckDB's parse tree that an expression may have. Others read tables, look at other rows or are parameters."""
_TELLS_TIME = {"age", "current_localtime", "current_localtimestamp"}
"""Functions that DuckDB lists as consistent, and that may read the clock."""


class Assignments:
    """The expressions of an update, checked. ``texts``: each one, by its column, in the table's order and case."""

    def __init__(self, schema: pa.Schema, expressions: Mapping[str, str]) -> None:
        """``expressions``: by column, whose case does not matter.

        Raises:
            ConfigurationError: DuckDB is not installed, there is no such column, or an expression can't be used.
        """
        try:
            import duckdb
        except ModuleNotFoundError as e:
            raise ConfigurationError(
                "extra-missing",
                "An update computes new values with DuckDB, which is not installed. Nothing was changed.",
                next=install("duckdb"),
            ) from e
        self._duckdb = duckdb
        self._connection: DuckDBPyConnection = duckdb.connect()
        self._schema = schema
        self._by_name = {name.lower(): name for name in schema.names}
        given: dict[str, str] = {}
        for name, text in expressions.items():
            column = self._by_name.get(name.lower())
            if column is None:
                raise ConfigurationError(
                    "unknown-column",
                    f"The table has no column {name!r}. It has: {', '.join(schema.names)}. Nothing was changed.",
                    next="run `lakeupsert schema`, which lists them",
                )
            if column in given:
                raise _unfit(name, text, f"{column!r} is set twice")
            given[column] = text
        self.texts = {name: given[name] for name in schema.names if name in given}
        self._needed: set[str] = set()
        self._expressions = [self._checked(name, text) for name, text in self.texts.items()]
        lock(self._connection, [])

    def of(self, rows: Rows) -> dict[str, pa.Array]:
        """The new value of each column for n rows that have all columns of the schema, in the column's type.

        Raises:
            UnfitValueError: a value does not fit its column's type exactly, or readers can't show it.
            ConfigurationError: DuckDB can't compute an expression, for example because of its types.
        """
        needed = [name for name in self._schema.names if name in self._needed]
        # A relation needs a column, and constants need none of the table's.
        given = rows.select(needed).append_column("_lakeupsert_rows", pa.nulls(rows.num_rows, pa.int8()))
        try:
            found = self._connection.from_arrow(given).select(*self._expressions)
            values = pa.RecordBatchReader.from_stream(found).read_all()
        except (self._duckdb.Error, pa.ArrowException, OSError) as e:
            texts = ", ".join(f"{name} = {text}" for name, text in self.texts.items())
            raise _unfit_text(texts, str(e)) from e
        return {
            name: self._fitted(name, column.combine_chunks())
            for name, column in zip(self.texts, values.columns, strict=True)
        }

    def _fitted(self, name: str, values: pa.Array) -> pa.Array:
        type_ = self._schema.field(name).type
        fitted, unfit = convert(values, type_)
        unreadable = unreadable_moments(fitted)
        if (refused := unfit | unreadable).any():
            at = int(refused.argmax())
            value = to_json_values(decode(values.slice(at, 1)))[0]
            unlike = f"does not fit {type_}, the type of {name!r}, exactly"
            what = f"is nothing that readers can show: {READABLE_MOMENTS}" if unreadable[at] else unlike
            raise UnfitValueError(f"{name} = {value} ({values.type}) {what}", at)
        return fitted

    def _checked(self, column: str, text: str) -> object:
        """The expression, if it computes a value from the row alone."""
        try:
            expression = self._duckdb.SQLExpression(text)  # exactly one, and no clause behind it
        except self._duckdb.Error as e:
            raise _unfit(column, text, str(e)) from e
        # Only parsed, never run. What runs is `expression`.
        [[parsed]] = self._connection.execute("SELECT json_serialize_sql('SELECT ' || ?)", [text]).fetchall()
        tree = json.loads(parsed)
        if tree["error"] or len(tree["statements"]) != 1:
            raise _unfit(column, text, tree.get("error_message", "it is not one expression"))
        for why in self._faults(tree["statements"][0]["node"]["select_list"], frozenset()):
            raise _unfit(column, text, why)
        return expression.alias(column)

    def _faults(self, tree: object, parameters: frozenset[str]) -> Iterator[str]:
        """Why this part of an expression can't be used. ``parameters``: names that are not columns: of lambdas and macros."""
        if isinstance(tree, list):
            for part in tree:
                yield from self._faults(part, parameters)
        if not isinstance(tree, dict):
            return
        kind = tree.get("class")
        if kind is not None and kind not in _COMPUTES:
            yield f"{kind.lower().replace('_', ' ')} is not a computation with the columns of one row"
        elif kind == "COLUMN_REF":
            yield from self._column_faults(tree["column_names"], parameters)
        elif kind == "FUNCTION":
            yield from self._function_faults(tree["function_name"].lower())
        elif kind == "LAMBDA":
            parameters |= {name.lower() for one in nodes(tree["lhs"]) for name in one.get("column_names", ())}
        for part in tree.values():
            yield from self._faults(part, parameters)

    def _column_faults(self, path: list[str], parameters: frozenset[str]) -> Iterator[str]:
        name = path[0]  # the rest are fields of a struct
        if name.lower() in parameters:
            return
        if name.lower() not in self._by_name:
            yield f"the table has no column {name!r}; it has {', '.join(self._schema.names)}"
        else:
            self._needed.add(self._by_name[name.lower()])

    def _function_faults(self, name: str) -> Iterator[str]:
        known = _functions().get(name, [])
        kinds = {kind for kind, *_ in known}
        if "scalar" in kinds and not kinds & {"aggregate", "window"}:
            if name in _TELLS_TIME or any(
                stability != "CONSISTENT" for kind, stability, *_ in known if kind == "scalar"
            ):
                yield f"{name}() does not depend only on the row"
        elif kinds == {"macro"}:
            for _, _, definition, parameters in known:
                [[parsed]] = self._connection.execute(
                    "SELECT json_serialize_sql('SELECT ' || ?)", [definition]
                ).fetchall()
                [statement] = json.loads(parsed)["statements"]
                yield from self._faults(statement["node"]["select_list"], frozenset(map(str.lower, parameters)))
        elif kinds:
            yield f"{name}() is {'an aggregate' if 'aggregate' in kinds else 'not a function of one row'}"
        else:
            yield f"there is no function {name}()"


@cache
def _functions() -> dict[str, list[tuple[str, str, str, list[str]]]]:
    """DuckDB's functions by name: kind, stability, of a macro its definition and parameters. To find one, DuckDB lists all."""
    import duckdb

    found: dict[str, list[tuple[str, str, str, list[str]]]] = {}
    with duckdb.connect() as db:
        for name, *known in db.execute(
            "SELECT function_name, function_type, stability, macro_definition, parameters FROM duckdb_functions()"
        ).fetchall():
            found.setdefault(name, []).append(tuple(known))
    return found


class UnfitValueError(Exception):
    """A new value does not fit its column exactly, or is one that readers can't show. ``at``: the number of its row."""

    def __init__(self, text: str, at: int) -> None:
        super().__init__(text)
        self.text, self.at = text, at


def _unfit(column: str, text: str, why: str) -> ConfigurationError:
    return _unfit_text(f"{column} = {text}", why)


def _unfit_text(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        "unfit-expression",
        f"{text!r} can't be used: {why.strip().splitlines()[0].rstrip('.')}. Nothing was changed.",
        next="set a column to one expression of DuckDB's SQL over columns of the same row, for example "
        '"amount = round(amount * 0.87, 2)"; `lakeupsert schema` lists the columns',
    )
