"""The columns of a file in SQL of DuckDB, for `reconcile --deep`: values, deletes, and which columns a row has.

Reads     the descriptions of DuckDB's relations
Writes    functions of a connection of DuckDB
Repeat    safe
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.formats.unavailable import NUMBERS, UNAVAILABLE
from lakeupsert.operations.recompute.hash import hash_function
from lakeupsert.operations.recompute.sql import (
    BATCH,
    DELETED,
    HAS,
    PARTITION_FUNCTIONS,
    PLACE,
    compared_schema,
    import_duckdb,
    landed_value,
)
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.read.duckdb import identifier, literal
from lakeupsert.rows.arrays import Column, Indices
from lakeupsert.rows.convert import convert_in_steps
from lakeupsert.rows.leaves import decode
from lakeupsert.table.layout import partition_scalars
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.table.roles import PartitionColumn
from lakeupsert.table.spec import TableSpec, TypeChange

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_UNAVAILABLE_IN_DUCKDB = (
    *(one.replace('"', "").replace(":", "=").replace(",", ", ") for one in UNAVAILABLE),
    *(f"[{', '.join(f'{number}{end}' for number in NUMBERS)}]" for end in (".0", ".00")),
    f"[{', '.join(str(date(1970, 1, 1) + timedelta(days)) for days in NUMBERS)}]",
)
"""Lists and maps of `UNAVAILABLE` as DuckDB writes them: without quotes, also numbers as floats, and as dates."""


@dataclass(frozen=True)
class Source:
    """A file to be inserted.

    Attributes:
        entry, file: the batch, and the file's name in it.
        relation: a table, in SQL, with ``columns`` and the row's ``place``.
        is_text: all columns are text.
        given: in mode columns, the columns that its rows have, if they are not all of ``columns``.
        partition: of an adopted file, whose partition columns are in the folder's name.
        is_delete: of a file with types, whether a row's operation deletes, in SQL.
    """

    entry: LedgerEntry
    file: str
    relation: str
    columns: Sequence[str]
    place: str
    is_text: bool = False
    given: Sequence[str] | None = None
    partition: str | None = None
    is_delete: str | None = None


class LandedColumns:
    """The columns of `landed`, as expressions over the relation of a file. ``types``: DuckDB's, of each that readers see."""

    def __init__(self, table: OpenTable, spec: TableSpec, db: "DuckDBPyConnection") -> None:
        self._table, self._spec, self._db = table, spec, db
        self.types = duckdb_types(spec)
        self._retypes: dict[TypeChange, str] = {}
        for one in spec.hash_columns:
            types = [self.types[name] for name in one.hashed]
            function = hash_function([spec.schema.field(name).type for name in one.hashed], one.count or 1)
            db.create_function(_hash_name(one), function, types, "INTEGER", type="arrow", null_handling="special")

    def select(self, source: Source, number: int) -> str:
        """The rows of a file of batch ``number``, with their `PLACE`."""
        has = HAS
        if not source.is_text:
            renamed = self.new_names(source.entry)
            names = sorted(set(map(str.lower, source.columns if source.given is None else source.given)))
            each = (self._has(source, name, renamed.get(name, name)) for name in names)
            has = f"list_filter(CAST([{', '.join(each)}] AS VARCHAR[]), lambda name: name IS NOT NULL)"
        return (
            f"SELECT {', '.join(self._values(source))}, {self._deletes(source)} AS {DELETED}, {number} AS {BATCH}, "
            f"{has} AS {HAS}, {source.place} AS {PLACE} FROM {source.relation}"
        )

    def _has(self, source: Source, name: str, new_name: str) -> str:
        """The name of a column that a row has, or NULL if its value stands for one that is unavailable, in SQL."""
        if self._spec.mode == "rows" or name not in map(str.lower, source.columns):
            return literal(new_name)
        texts = ", ".join(map(literal, (*UNAVAILABLE, *_UNAVAILABLE_IN_DUCKDB)))
        return f"CASE WHEN CAST({identifier(name)} AS VARCHAR) IN ({texts}) THEN NULL ELSE {literal(new_name)} END"

    def _values(self, source: Source) -> Iterator[str]:
        """The value of each column that readers see, in SQL."""
        spec = self._table.history.spec(source.entry.spec_version)
        old_names = self._spec.names_at(len(spec.renames))
        old_types, retypes = duckdb_types(spec), self._spec.conversions(len(spec.renames))
        present = set(map(str.lower, source.columns))  # DuckDB ignores case, too
        for new_name, type_ in self.types.items():
            name = old_names.get(new_name, new_name)
            if source.partition is None:
                derived = self._derived(source, name, old_types)
            else:
                scalars = partition_scalars(self._spec, source.partition)
                derived = literal(scalars[name].as_py()) if name in scalars else None
            value = derived or "NULL"
            if derived is None and name.lower() in present and name in old_types:
                value = self._landed(source, name, old_types)
                if self._spec.takes_key_alone and name in self._spec.partition_by and type_ == "VARCHAR":
                    value = f"NULLIF({value}, '')"  # names no partition
            # A value of a column that was widened since, for example a FLOAT, gets the type that it had.
            value = f"TRY_CAST({value} AS {old_types.get(name, type_)})"
            for change in retypes.get(new_name, ()):
                value = self._retyped(value, change)
            yield f"TRY_CAST({value} AS {type_}) AS {identifier(new_name)}"

    def _retyped(self, value: str, change: TypeChange) -> str:
        """A value after a retype, in SQL. Arrow converts it, because DuckDB's casts round, and trim blanks."""

        def convert_all(values: pa.ChunkedArray) -> pa.Array:
            return convert_in_steps(values.combine_chunks(), [change])[0]

        before, after = (_duckdb_type(type_) or "" for type_ in change)
        if change not in self._retypes:
            name = self._retypes[change] = f"lakeupsert_retype_{len(self._retypes)}"
            self._db.create_function(name, convert_all, [before], after, type="arrow", null_handling="special")
        return f"{self._retypes[change]}(TRY_CAST({value} AS {before}))"

    def _landed(self, source: Source, name: str, types: dict[str, str]) -> str:
        """The value of a column of the file, in SQL."""
        reading = source.entry.reading  # adopted rows and those of a statement have none
        formats = reading.settings.date_formats(name) if reading and source.partition is None else ()
        if formats and types[name].startswith(("DATE", "TIMESTAMP")) and self._is_written(source, name):
            # A format with a time fits no date, and formats that differ are refused by `append`. DuckDB's %z does not know Z.
            raw, fmt = f"CAST({identifier(name)} AS VARCHAR)", f"[{', '.join(map(literal, formats))}]"
            return f"coalesce(try_strptime({raw}, {fmt}), try_strptime(regexp_replace({raw}, '[zZ]$', '+00'), {fmt}))"
        return landed_value(name, types, is_text=source.is_text)

    def _is_written(self, source: Source, name: str) -> bool:
        """Whether a file has a column, as text or integers. A delete by the key may lack the source of its partition."""
        described = self._db.execute(f"DESCRIBE SELECT * FROM {source.relation}").fetchall()
        return any(t == "VARCHAR" or "INT" in t for column, t, *_ in described if column.lower() == name.lower())

    def _deletes(self, source: Source) -> str:
        rule = self._spec.delete
        if DELETED in source.columns:  # of a statement
            return DELETED
        if rule is None or source.partition is not None:
            return "false"
        if rule.file_prefix and source.file.rpartition("/")[2].startswith(rule.file_prefix):
            return "true"
        if self.operation_in(source.columns) is None or not (rule.not_null or rule.values):
            return "false"
        if rule.column is None:
            return f"({identifier(rule.not_null or '')} IS NOT NULL)"
        values = ", ".join(map(literal, rule.values))
        return source.is_delete or f"coalesce({identifier(rule.column)} IN ({values}), false)"

    def operation_in(self, names: Iterable[str]) -> str | None:
        """The name of the operation column among ``names``, which may differ in case."""
        column = self._spec.delete.operation if self._spec.delete else None
        return next((name for name in names if column and name.lower() == column.lower()), None)

    def has_delete_value(self, column: Column, places: Indices | None, place: str) -> str:
        """Whether the row at ``place`` has a value in ``column`` that deletes, in SQL. ``places``: of the column's values; None
        counts from 0.

        Arrow converts values to text, as docs/SEMANTICS.md says: DuckDB's text of floats, decimals and times differs, and DuckDB
        does not know a column's unit and zone.
        """
        rule = self._spec.delete
        if rule is None or rule.not_null or pa.types.is_nested(column.type):  # `append` refused nested values: no text
            return "false"
        texts = pc.cast(decode(column), options=pc.CastOptions(pa.string(), allow_invalid_utf8=True))
        found = pc.indices_nonzero(pc.is_in(texts, pa.array(rule.values, pa.string()))).to_numpy()
        self._db.register(
            "deletes", pa.table({"place": pa.array(found if places is None else places[found], pa.int64())})
        )
        return f"{place} IN (SELECT place FROM deletes)"

    def new_names(self, entry: LedgerEntry) -> dict[str, str]:
        """The lower-case names of columns that were renamed since a batch, by those in the batch; empty for dropped columns."""
        renamed = self._spec.changed_names(len(self._table.history.spec(entry.spec_version).renames))
        return {old.lower(): (new or "").lower() for old, new in renamed.items()}

    def _derived(self, source: Source, name: str, types: dict[str, str]) -> str | None:
        """The value of a column that is not read from the rows, in SQL; None for other columns."""
        spec, entry = self._spec, source.entry
        partition = next((one for one in spec.partition_from if one.column == name), None)
        if partition is not None and partition.function == "bucket":
            values = (
                f"TRY_CAST({self._landed(source, column, types)} AS {types[column]})" for column in partition.hashed
            )
            return f"{identifier(_hash_name(partition))}({', '.join(values)})"
        if partition is not None:
            column = partition.source or ""
            type_ = types[column]
            moment = f"TRY_CAST({self._landed(source, column, types)} AS {type_})"
            if type_ in ("TIMESTAMP_NS", "TIMESTAMPTZ_NS"):  # DuckDB rounds them towards 1970
                nanos = f"epoch_ns(CAST({moment} AS TIMESTAMP_NS))"
                moment = f"make_timestamp(({nanos} - ({nanos} % 1000000000 + 1000000000) % 1000000000) // 1000)"
            return PARTITION_FUNCTIONS[partition.function or ""].format(moment)
        if name not in spec.order_by or entry.kind != "batch":
            return None
        if spec.stamped:
            return literal(entry.received.isoformat())
        found = re.search(spec.order_in_name, source.file.rpartition("/")[2]) if spec.order_in_name else None
        return literal(found[1]) if found else None


def duckdb_types(spec: TableSpec) -> dict[str, str]:
    """DuckDB's type of each column that readers see."""
    types = {}
    for column in compared_schema(spec):
        type_ = _duckdb_type(column.type)
        if type_ is None or "INTERVAL" in type_:  # a duration within a list or a struct
            raise ConfigurationError(
                "unfit-for-duckdb",
                f"Column {column.name!r} is {column.type}, which DuckDB does not support. Nothing was recomputed.",
                next="run `lakeupsert reconcile` without --deep",
            )
        types[column.name] = type_
    return types


@cache
def _duckdb_type(type_: pa.DataType) -> str | None:
    """DuckDB's name of a type, None for one that it does not support. Kept, since each column of each partition asks."""
    duckdb = import_duckdb()  # its default database: to make one for each type takes longer than a small table
    with duckdb.cursor() as db:
        try:
            return str(db.from_arrow(pa.schema([("c", type_)]).empty_table()).types[0])
        except duckdb.Error:
            return None


def _hash_name(computed: PartitionColumn) -> str:
    return f"lakeupsert_{computed.column}"
