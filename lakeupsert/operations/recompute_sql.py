"""The SQL of `reconcile --deep`, and the DuckDB that runs it.

Reads     nothing
Writes    what does not fit into DuckDB's memory, to a temporary folder
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from lakeupsert.errors import ConfigurationError
from lakeupsert.read.arrow import reader_schema
from lakeupsert.table.spec import Ordering, TableSpec

DELETED, NTH, PLACE, BATCH, HAS = (f"_lakeupsert_{name}" for name in ("delete", "nth", "place", "batch", "has"))
"""The last is of mode columns: the names of the columns that a row brings, in small letters."""

MADE = {
    "year": "year({})",
    "month": "strftime({}, '%Y-%m')",
    "date": "CAST({} AS DATE)",
    "hour": "strftime({}, '%Y-%m-%d-%H')",
}

# Files come in ledger order, and the rows of each are inserted in their order, so that rowid ends the rank.
# A key that is published twice has an nth = 2 that matches nothing, and so counts as extra.
COMPARED = """
SELECT {partition}, count(*) FILTER (p.{nth} IS NULL), count(*) FILTER (e.{nth} IS NULL),
       count(*) FILTER (p.{nth} = e.{nth} AND row({expected}) IS DISTINCT FROM row({published}))
FROM ({winners}) e FULL JOIN (SELECT *, row_number() OVER (PARTITION BY {key}) AS {nth} FROM published) p USING ({key}, {nth})
GROUP BY {partition}
"""

# Of keys that a full extract has: deletes that had been forgotten when it came, and what they beat.
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


def import_duckdb() -> Any:
    """The module; ConfigurationError where it is not installed."""
    try:
        import duckdb
    except ModuleNotFoundError as e:
        raise ConfigurationError(
            "extra-missing",
            "`reconcile --deep` recomputes rows with DuckDB, which is not installed. Nothing was done.",
            next="pip install 'lakeupsert[reconcile]'",
        ) from e
    return duckdb


@contextmanager
def connected() -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="lakeupsert-") as scratch:
        settings = {"temp_directory": scratch, "autoinstall_known_extensions": "false"}
        with import_duckdb().connect(config=settings) as db:
            db.execute("SET TimeZone = 'UTC'")
            yield db


def landed_value(name: str, written: dict[str, str], text: bool) -> str:
    """A column's value as it landed, in SQL."""
    return _from_text(f"CAST({identifier(name)} AS VARCHAR)", written[name]) if text else identifier(name)


def _from_text(value: str, type_: str) -> str:
    """What makes a value of ``type_`` of a text, where CAST alone would do something else."""
    if type_ == "TIMESTAMP":  # CAST drops a zone without a word
        return f"TRY_CAST({value} AS TIMESTAMPTZ)"
    if type_ == "BLOB":  # CAST looks for \x41
        return f"encode({value})"
    if type_.startswith(("STRUCT", "MAP")) or type_.endswith("]"):
        return f"TRY_CAST({value} AS JSON)"
    return value


def winners(spec: TableSpec, key: str) -> str:
    """What the rows that landed come to, a row for each ``key``, in SQL."""
    if spec.mode == "rows":
        unique = ", ".join(map(identifier, spec.key)) if spec.key_scope == "table" else key
        return (
            f"SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY {unique} ORDER BY {rank(spec)}) AS {NTH} FROM landed) "
            f"WHERE {NTH} = 1 AND NOT {DELETED}"
        )
    columns, ranks = [f"1 AS {NTH}"], []
    for number, (ordering, ids) in enumerate(spec.columns_of):
        nth = f"{NTH}_{number}"
        by_rank = ", ".join([*ordering(ordering), "rowid DESC"])
        ranks.append(f"row_number() OVER (PARTITION BY {key} ORDER BY {by_rank}) AS {nth}")
        orders = [o.column for o in ordering]
        ordered = " OR ".join(f"{identifier(name)} IS NOT NULL" for name in orders) if spec.groups else "true"
        for name in ids:
            brings = "true" if name in orders else f"list_contains({HAS}, {literal(name.lower())})"
            if spec.nulls == "keep" and name not in orders:
                brings += f" AND {identifier(name)} IS NOT NULL"
            # In a struct, as arg_min passes over nulls.
            value = f"struct_pack(v := CASE WHEN NOT {DELETED} THEN {identifier(name)} END)"
            brought = f"arg_min({value}, {nth}) FILTER ({DELETED} OR (({ordered}) AND {brings}))"
            columns.append(f"({brought}).v AS {identifier(name)}")
    return (
        f"SELECT {key}, {', '.join(columns)} FROM (SELECT *, {', '.join(ranks)} FROM landed) "
        f"GROUP BY {key} HAVING NOT arg_min({DELETED}, {NTH}_0)"
    )


def key_of(spec: TableSpec) -> list[str]:
    return list(dict.fromkeys((*spec.partition_by, *spec.key)))


def rank(spec: TableSpec) -> str:
    """What ORDER BY takes for the rows that landed of a key, greatest first."""
    ties = [DELETED, *spec.content] if spec.ties == "content" else []
    return ", ".join(
        [*ordering(spec.ordering), *(f"{identifier(column)} DESC NULLS LAST" for column in ties), "rowid DESC"]
    )


def ordering(ordering: Sequence[Ordering]) -> Iterator[str]:
    for o in ordering:
        yield f"{identifier(o.column)} {'ASC' if o.ascending else 'DESC'} NULLS {'FIRST' if o.nulls_first else 'LAST'}"


def compared_schema(spec: TableSpec) -> Any:
    """Readers' columns, durations as numbers of their unit: all that DuckDB finds in Parquet, and its INTERVAL ends at
    microseconds."""
    columns = reader_schema(spec)
    return pa.schema([f.with_type(pa.int64()) if pa.types.is_duration(f.type) else f for f in columns])


def identifier(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def literal(value: object) -> str:
    """A literal of DuckDB's SQL."""
    return "'" + str(value).replace("'", "''") + "'"
