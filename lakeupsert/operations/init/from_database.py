"""Propose a configuration for a table of PostgreSQL, from its catalogue: `init --from`.

Reads     the catalogue of the database, by the driver that `capture` uses
Writes    nothing
Repeat    safe
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec

from lakeupsert.config import DatabaseSource, TableSettings, cores, is_remote
from lakeupsert.config.messages import Refusal
from lakeupsert.config.sources import name_of_source, parse_source, password_of, password_variable, refuse_credential
from lakeupsert.extras import needs_extra
from lakeupsert.operations.init.buckets import describe_rule, expression, propose_count
from lakeupsert.operations.init.propose import processed_zone, table_name_of
from lakeupsert.operations.init.translation import Setting, Translation
from lakeupsert.phrases import with_advice

if TYPE_CHECKING:
    from lakeupsert.sources.catalogue import CatalogueTable

_PACKED = 4
"""How many bytes PostgreSQL has for one of Parquet, by a guess."""


def propose_database(address: str, landing: str | None, table: str | None, folder: Path) -> Translation:
    """Settings of a table, and of the source that follows it.

    Args:
        address: as in `from` of a source.
        landing: the landing zone; None: one in ``folder``.
        table: its name in the database, with its schema; None: the only one there.
    """
    name = name_of_source(unquote(urlsplit(address).path[1:]))
    refuse_credential("init --from", name, {"from": address})
    if not address.startswith("postgresql://"):
        Refusal("init", "--from")("the address", address, "expected postgresql://USER@HOST:PORT/DATABASE")
    parse_source("init --from", name, {"from": address, "table": "t", "tables": ["t"]}, {"t": None})
    source = DatabaseSource(from_=address, table="", tables=())
    with needs_extra("`init --from`", source.extra, "Nothing was read."):
        from lakeupsert.sources.catalogue import read_catalogue
        from lakeupsert.sources.debezium import start_jvm

        start_jvm()
        tables = () if table is None else (table,)
        found = read_catalogue(name, msgspec.structs.replace(source, tables=tables), password_of(name, source))
    own, part = table_name_of(found.name.rpartition(".")[2]), f"sources.{found.source_name}"
    zone = landing or str(folder / "landing" / own)
    zone = zone if is_remote(zone) else str(Path(zone).expanduser().absolute())
    taken = f"slot lakeupsert_{name} is there already, so the source is called {found.source_name}: rename the variable, too"
    origin = f"the password comes from {password_variable(found.source_name)}, or set password_file"
    source_settings = (
        Setting(f"{part}.from", address, origin),
        Setting(f"{part}.table", own, ""),
        Setting(f"{part}.tables", (found.name,), ""),
    )
    return Translation(
        table=own,
        settings=(*_settings(found, zone), *source_settings),
        leftovers=(),
        warnings=(
            *(with_advice(*one) for one in found.prepared.warnings),
            *([taken] if found.source_name != name else []),
        ),
        next="`lakeupsert capture`, and in another process `lakeupsert ingest`",
    )


def _settings(found: "CatalogueTable", landing: str) -> Iterator[Setting]:
    yield Setting("landing", landing, "`capture` lands rows and changes here")
    yield Setting("processed", processed_zone(landing, landing), "the table")
    yield Setting("key", ("__source_name", *found.key), "the name of the source, and the primary key or a unique index")
    workers, bucket_bytes = cores(), TableSettings(landing="", processed="", key=(), partition_by=()).bucket_bytes
    number = propose_count(found.bytes / _PACKED, bucket_bytes, workers)
    why = "A change finds its row by the key, also if a date in the row changes"
    if number > 1:
        why += f". {describe_rule(bucket_bytes, workers)}. The number can't be changed later"
    yield Setting("partition_by", (expression(number, found.key),) if number > 1 else (), why)
    yield Setting("order_by", ("__log_position",), "the order of commits in the database")
    if found.prepared.lacks_long:
        why_columns = (
            "PostgreSQL does not send a long value that an update left as it was: the stored one stays, unless the key changes. "
            f"`alter table {found.sql} replica identity full` sends all: run it before the first `capture`, and remove this line"
        )
        yield Setting("mode", "columns", why_columns)
    yield Setting("publishers", ("delta",), "DuckDB and other engines read `processed` as a Delta table")
    yield Setting("read.envelope", "debezium", "")
    yield Setting("delete.column", "__op", "")
    yield Setting("delete.values", ("d",), "")
    for column, type_ in found.times.items():
        with_zone = type_ == "time with time zone"
        why = f"{type_}, for which Delta has no type: " + ("text" if with_zone else "a number since midnight")
        yield Setting(f"schema.{column}", "string" if with_zone else "bigint", why)
