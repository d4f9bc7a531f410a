"""The statements that make a table known to an engine: those of the engine's page in docs/engines.

Reads     the settings alone
Writes    nothing
Repeat    safe
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit

from sqlglot import exp

from lakeupsert.config import PublisherName
from lakeupsert.errors import ConfigurationError
from lakeupsert.pipeline.opened import OpenTable

Engine = Literal["athena", "bigquery", "databricks", "duckdb", "snowflake", "spark", "trino"]

_STORES: Mapping[str, tuple[str, ...]] = {
    "athena": ("s3",),
    "bigquery": ("gs",),
    "databricks": ("s3", "abfss", "gs"),
    "snowflake": ("s3", "abfss", "gs"),
}
"""Engines that do not read every store, and those that they read."""
_DIALECTS = {"athena": "hive"}
"""Engines whose statement has the quotes of another one."""


@dataclass(frozen=True)
class Statements:
    """What to type.

    Attributes:
        publisher: which one shows the table to the engine.
        statements: to run in this order; without semicolons.
        replace: names in capitals that are the reader's to choose, each with what it is.
        note: what to know first; "" for nothing.
    """

    engine: Engine
    publisher: PublisherName
    statements: tuple[str, ...]
    replace: Mapping[str, str]
    note: str = ""

    def __str__(self) -> str:
        comments = [f"-- {self.note}"] if self.note else []
        comments += [f"-- Replace {name}: {what}" for name, what in self.replace.items()]
        return "\n".join([*comments, *(f"{statement};" for statement in self.statements)])


def ddl(table: OpenTable, engine: Engine) -> Statements:
    """Raises ConfigurationError if no publisher shows the table to this engine, or the engine does not read the store."""
    uri = table.resources.store.uri().rstrip("/")
    scheme = urlsplit(uri).scheme
    if scheme not in _STORES.get(engine, (scheme,)):
        raise ConfigurationError(
            "no-statement",
            f"{engine} reads tables at {', '.join(f'{name}://' for name in _STORES[engine])}, and table {table.name!r} is at "
            f"{uri}.",
            next=f"read the table with another engine, or export it to a store that {engine} reads",
        )
    address = unquote(uri) if scheme == "file" else uri
    if "delta" in table.settings.publishers:
        return _delta(engine, table.name, address)
    iceberg, hive, glue = table.settings.iceberg, table.settings.hive, table.settings.glue
    if iceberg is not None and engine in ("spark", "trino"):
        return _in_catalog(engine, "iceberg", *iceberg.table.split("."))
    if glue is not None and engine in ("athena", "trino"):
        return _in_catalog(engine, "glue", glue.database, glue.table)
    if hive is not None and engine == "trino":
        return _in_catalog(engine, "hive", hive.database, hive.table)
    raise ConfigurationError(
        "no-statement",
        f"No publisher of table {table.name!r} shows it to {engine}: it has {', '.join(table.settings.publishers) or 'none'}.",
        next=f"add 'delta' to `publishers` in [tables.{table.name}], then `lakeupsert run`",
    )


def _delta(engine: Engine, name: str, address: str) -> Statements:
    """The statements for a Delta table at ``address``, whose parts are literals and names in the engine's quotes."""
    parts, name = urlsplit(address), name.upper() if engine == "snowflake" and name.islower() else name
    values = {
        "name": _name(engine, name),
        "lower": _text(engine, name.lower()),
        "address": _text(engine, address),
        "folder": _text(engine, f"{address}/"),
        "path": _text(engine, address.removeprefix("file://")),
        "in_bucket": _text(engine, f"{parts.path.lstrip('/')}/"),
        "s3a": _text(engine, address.replace("s3://", "s3a://", 1)),
    }
    replace = {
        one: what.format(bucket=f"{parts.scheme}://{parts.netloc}/") for one, what in _REPLACE.get(engine, {}).items()
    }
    return Statements(engine, "delta", tuple(one.format(**values) for one in _DELTA[engine]), replace)


_DELTA: Mapping[Engine, tuple[str, ...]] = {
    "athena": ("CREATE EXTERNAL TABLE {name}\nLOCATION {folder}\nTBLPROPERTIES ('table_type' = 'DELTA')",),
    "bigquery": (
        "CREATE EXTERNAL TABLE DATASET.{name}\nWITH CONNECTION `PROJECT.REGION.CONNECTION`\n"
        "OPTIONS (format = 'DELTA_LAKE', uris = [{address}])",
    ),
    "databricks": ("CREATE TABLE {name} USING delta LOCATION {address}",),
    "duckdb": ("INSTALL delta", "LOAD delta", "CREATE VIEW {name} AS FROM delta_scan({path})"),
    "snowflake": (
        "CREATE CATALOG INTEGRATION IF NOT EXISTS delta_files\n  CATALOG_SOURCE = OBJECT_STORE\n  TABLE_FORMAT = DELTA\n"
        "  ENABLED = TRUE",
        "CREATE ICEBERG TABLE {name}\n  EXTERNAL_VOLUME = 'VOLUME'\n"
        "  CATALOG = 'delta_files'\n  BASE_LOCATION = {in_bucket}\n  AUTO_REFRESH = TRUE",
    ),
    # Open-source Spark reads S3 only by Hadoop's s3a.
    "spark": ("CREATE TABLE {name} USING delta LOCATION {s3a}",),
    "trino": (
        "CALL CATALOG.system.register_table(schema_name => 'SCHEMA', table_name => {lower}, table_location => {address})",
    ),
}
_REPLACE: Mapping[Engine, Mapping[str, str]] = {
    "bigquery": {"DATASET": "yours", "PROJECT.REGION.CONNECTION": "a connection that may read the bucket"},
    "snowflake": {"VOLUME": "an external volume at {bucket}"},
    "trino": {"CATALOG": "a catalog of the connector delta_lake", "SCHEMA": "one of its schemas"},
}
_PLACES = {"iceberg": "an Iceberg catalog", "hive": "the metastore", "glue": "Glue"}


def _in_catalog(engine: Engine, publisher: PublisherName, *path: str) -> Statements:
    """The catalog has the table under this path, so there is nothing to create."""
    # Athena's queries are as Trino's.
    name = ".".join(_name("spark" if engine == "spark" else "trino", part) for part in path)
    note = f"lakeupsert keeps the table in {_PLACES[publisher]}: there is nothing to create"
    if engine == "athena":
        return Statements(engine, publisher, (f"SELECT * FROM {name}",), {}, note)
    kind = "iceberg" if publisher == "iceberg" else "hive"
    replace = {
        "CATALOG": f"a catalog of {'Iceberg' if engine == 'spark' else f'the connector {kind}'} that is the same one"
    }
    return Statements(engine, publisher, (f"SELECT * FROM CATALOG.{name}",), replace, note)


def _name(engine: str, name: str) -> str:
    return exp.to_identifier(name, quoted=True).sql(_DIALECTS.get(engine, engine))


def _text(engine: str, text: str) -> str:
    return exp.Literal.string(text).sql(_DIALECTS.get(engine, engine))
