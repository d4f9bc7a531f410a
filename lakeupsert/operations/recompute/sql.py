"""The SQL of `reconcile --deep`, and DuckDB, which runs it.

Reads     nothing
Writes    to a temporary folder what does not fit into DuckDB's memory
Repeat    safe
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import pyarrow as pa

from lakeupsert.extras import needs_extra
from lakeupsert.operations.recompute.text import BYTES
from lakeupsert.read.arrow import reader_schema
from lakeupsert.read.duckdb import identifier, literal
from lakeupsert.table.roles import Ordering
from lakeupsert.table.spec import TableSpec

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

DELETED, NTH, PLACE, BATCH, HAS = (f"_lakeupsert_{name}" for name in ("delete", "nth", "place", "batch", "has"))
"""HAS is for mode columns: the lower-case names of the columns that a row brings."""

PARTITION_FUNCTIONS = {
    "year": "year({})",
    "month": "strftime({}, '%Y-%m')",
    "date": "CAST({} AS DATE)",
    "hour": "strftime({}, '%Y-%m-%d-%H')",
}

# Files are loaded in ledger order, and their rows in the order of the file, so rowid is the last part of the rank.
# A key that is published twice has a row with nth = 2, which matches nothing and so counts as extra.
COMPARED = """
SELECT {partition} count(*) FILTER (p.{nth} IS NULL), count(*) FILTER (e.{nth} IS NULL),
       count(*) FILTER (p.{nth} = e.{nth} AND row({expected}) IS DISTINCT FROM row({published}))
FROM ({winners}) e FULL JOIN (SELECT *, row_number() OVER (PARTITION BY {key}) AS {nth} FROM published) p USING ({key}, {nth})
GROUP BY ALL
"""

# For keys that a full extract has: the deletes that were forgotten when it arrived, and what these beat.
VOID = """
DELETE FROM landed WHERE rowid IN (
    SELECT place FROM (
        SELECT place, {batch}, nth, min(CASE WHEN forgotten THEN nth END) OVER of_key AS first,
               bool_or({batch} = {number}) OVER of_key AS has
        FROM (SELECT *, rowid AS place, {is_forgotten} AS forgotten,
                     row_number() OVER (PARTITION BY {key} ORDER BY {order}) AS nth
              FROM landed)
        WINDOW of_key AS (PARTITION BY {key})
    ) WHERE has AND nth >= first AND {batch} < {number}
)
"""

# Updates by the key alone that a late delete of the batch leaves without a row: the record that had named the partition is dead.
ORPHANED = """
DELETE FROM landed WHERE rowid IN (
    SELECT place FROM (
        SELECT place, {deleted}, nth, min(CASE WHEN {deleted} THEN nth END) OVER of_key AS last_delete,
               min(CASE WHEN {names} AND NOT {deleted} THEN nth END) OVER of_key AS last_named
        FROM (SELECT *, rowid AS place, row_number() OVER (PARTITION BY {key} ORDER BY {order}) AS nth
              FROM landed SEMI JOIN (SELECT {key} FROM landed WHERE {batch} = {number} AND {deleted}) USING ({key}))
        WINDOW of_key AS (PARTITION BY {key})
    ) WHERE NOT {deleted} AND nth < last_delete AND coalesce(last_named > last_delete, true)
)
"""


def import_duckdb() -> ModuleType:
    """Import DuckDB, or raise ConfigurationError if it is not installed."""
    return import_extra("duckdb", "recomputes rows with DuckDB")


def import_extra(name: str, use: str) -> ModuleType:
    """Import a package that `reconcile --deep` uses, or raise ConfigurationError if it is not installed."""
    with needs_extra(f"`reconcile --deep` {use} and", "reconcile"):
        return import_module(name)


@contextmanager
def connect() -> Iterator["DuckDBPyConnection"]:
    """Connect to a database in memory, which uses a temporary folder for what does not fit."""
    with tempfile.TemporaryDirectory(prefix="lakeupsert-") as scratch:
        settings = {"temp_directory": scratch, "autoinstall_known_extensions": "false"}
        with import_duckdb().connect(config=settings) as db:
            db.execute("SET TimeZone = 'UTC'")
            yield db


def landed_value(name: str, types: Mapping[str, str], *, is_text: bool) -> str:
    """The value of a column as it landed, in SQL."""
    value = identifier(name)
    if is_text:
        return _from_text(f"CAST({value} AS VARCHAR)", types[name])
    if types[name] == "BLOB":  # CAST of text interprets \x41, and takes ASCII only
        return f"CASE WHEN typeof({value}) = 'VARCHAR' THEN encode(CAST({value} AS VARCHAR)) ELSE TRY_CAST({value} AS BLOB) END"
    return value


def _from_text(value: str, type_: str) -> str:
    """Converts text to a type for which CAST alone would give another value, in SQL."""
    if type_ == "TIMESTAMP":  # CAST silently drops a time zone
        return f"TRY_CAST({value} AS TIMESTAMPTZ)"
    if type_ in ("DATE", "TIME"):  # CAST takes no Z after it
        return f"regexp_replace({value}, '([0-9])Z$', '\\1')"
    if type_ == "BLOB":  # CAST interprets \x41
        return f"CASE WHEN {value} LIKE '{BYTES}%' THEN CAST(substr({value}, 2) AS BLOB) ELSE encode({value}) END"
    if type_.startswith(("STRUCT", "MAP")) or type_.endswith("]"):
        return f"TRY_CAST({value} AS JSON)"
    return value


def winners(spec: TableSpec, key: str) -> str:
    """The winning row of each ``key`` among those that landed, in SQL."""
    if spec.mode == "rows":
        unique = ", ".join(map(identifier, spec.key)) if spec.key_scope == "table" else key
        return (
            f"SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY {unique} ORDER BY {rank(spec)}) AS {NTH} FROM landed) "
            f"WHERE {NTH} = 1 AND NOT {DELETED}"
        )
    unique, partition, sources = key, [], {source for one in spec.partition_from for source in one.sources}
    if spec.key_scope == "table":  # that of the greatest record that names one
        unique = ", ".join(map(identifier, spec.key))
        names = names_partition(spec)
        partition = [
            f"arg_min({identifier(c)}, {NTH}_0) FILTER ({names} AND NOT {DELETED}) AS {identifier(c)}"
            for c in spec.partition_by
        ]
    columns, ranks = [f"1 AS {NTH}", *partition], []
    for number, (ordering, ids) in enumerate(spec.columns_of):
        nth = f"{NTH}_{number}"
        by_rank = ", ".join([*_order_terms(ordering), "rowid DESC"])
        ranks.append(f"row_number() OVER (PARTITION BY {unique} ORDER BY {by_rank}) AS {nth}")
        orders = [o.column for o in ordering]
        ordered = " OR ".join(f"{identifier(name)} IS NOT NULL" for name in orders) if spec.groups else "true"
        for name in ids:
            brings = "true" if name in orders else f"list_contains({HAS}, {literal(name.lower())})"
            if (spec.nulls == "keep" or name in sources) and name not in orders:
                brings += f" AND {identifier(name)} IS NOT NULL"
            # In a struct, because arg_min ignores nulls.
            value = f"struct_pack(v := CASE WHEN NOT {DELETED} THEN {identifier(name)} END)"
            brought = f"arg_min({value}, {nth}) FILTER ({DELETED} OR (({ordered}) AND {brings}))"
            columns.append(f"({brought}).v AS {identifier(name)}")
    columns.append(f"arg_min({BATCH}, {NTH}_0) AS {BATCH}")
    return (
        f"SELECT {unique}, {', '.join(columns)} FROM (SELECT *, {', '.join(ranks)} FROM landed) "
        f"GROUP BY {unique} HAVING NOT arg_min({DELETED}, {NTH}_0)"
    )


def names_partition(spec: TableSpec) -> str:
    """Whether a row names its partition, in SQL."""
    return " AND ".join(f"{identifier(column)} IS NOT NULL" for column in spec.partition_by)


def key_columns(spec: TableSpec) -> list[str]:
    """The columns that identify a row in the table."""
    return list(dict.fromkeys((*spec.partition_by, *spec.key)))


def rank(spec: TableSpec) -> str:
    """ORDER BY terms for the rows of a key, greatest rank first."""
    ties = [DELETED, *spec.content] if spec.ties == "content" else []
    return ", ".join(
        [*_order_terms(spec.ordering), *(f"{identifier(column)} DESC NULLS LAST" for column in ties), "rowid DESC"]
    )


def _order_terms(ordering: Sequence[Ordering]) -> Iterator[str]:
    for o in ordering:
        yield f"{identifier(o.column)} {'ASC' if o.ascending else 'DESC'} NULLS {'FIRST' if o.nulls_first else 'LAST'}"


def compared_schema(spec: TableSpec) -> pa.Schema:
    """The columns that readers see. Durations are integers, as DuckDB reads them from Parquet: INTERVAL ends at microseconds."""
    columns = reader_schema(spec)
    return pa.schema([f.with_type(pa.int64()) if pa.types.is_duration(f.type) else f for f in columns])
