"""A table in PostgreSQL's catalogue that is to be followed, for `init --from`. Nothing is created there."""

from dataclasses import dataclass

import msgspec

from lakeupsert.config import DatabaseSource
from lakeupsert.config.messages import did_you_mean
from lakeupsert.config.sources import name_of_source
from lakeupsert.errors import ConfigurationError
from lakeupsert.sources.jdbc import Connection, Prepared
from lakeupsert.sources.postgresql import Postgresql

_TABLES = """select n.nspname || '.' || c.relname, format('%I.%I', n.nspname, c.relname), pg_table_size(c.oid)
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.relkind in ('r', 'p') and n.nspname <> 'information_schema' and n.nspname !~ '^pg_' order by 1"""
_KEYS = """select i.indexrelid, a.attname from pg_index i
    cross join unnest(i.indkey::int2[]) with ordinality as k(number, place)
    join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.number
    where i.indrelid = ?::regclass and i.indisunique and i.indimmediate and i.indisvalid and k.place <= i.indnkeyatts
    and i.indpred is null and i.indexprs is null and not exists (select from pg_attribute n
        where n.attrelid = i.indrelid and n.attnum = any (i.indkey::int2[]) and not n.attnotnull)
    order by i.indisprimary desc, i.indnkeyatts, i.indexrelid, k.place"""
_TIMES = """select attname, atttypid::regtype::text from pg_attribute
    where attrelid = ?::regclass and attnum > 0 and not attisdropped and atttypid in ('time'::regtype, 'timetz'::regtype)"""
_SLOTS = "select slot_name from pg_replication_slots"


@dataclass(frozen=True)
class CatalogueTable:
    """A table that `capture` can follow.

    Attributes:
        sql: the name, as SQL has it.
        source_name: a name for the source, whose slot is free.
        times: the types of columns with a time of day.
    """

    name: str
    sql: str
    source_name: str
    key: tuple[str, ...]
    bytes: int
    times: dict[str, str]
    prepared: Prepared


def read_catalogue(source_name: str, source: DatabaseSource, password: str) -> CatalogueTable:
    """The table of ``source``; if it names none, the only one of the database. Raises what `capture` raises."""
    with Connection(Postgresql.kind, source, password) as database:
        found = {str(name): (str(sql), int(str(size))) for name, sql, size in database.rows(_TABLES)}
        name = _choose(source, found)
        sql, size = found[name]
        keys = database.rows(_KEYS, sql)
        times = {str(column): str(type_) for column, type_ in database.rows(_TIMES, sql)}
        slots = {str(row[0]) for row in database.rows(_SLOTS)}
    longer = name_of_source(f"{source_name}_{name.rpartition('.')[2]}")
    names = (source_name, longer, *(f"{longer}_{number}" for number in range(2, 100)))
    source_name = next(one for one in names if f"lakeupsert_{one}" not in slots)
    followed = Postgresql(source_name, msgspec.structs.replace(source, tables=(name,)), password, "columns")
    prepared = followed.prepare(is_new=True, only_look=True)  # raises all that `capture` would lack
    key = tuple(str(column) for index, column in keys if index == keys[0][0])
    if not key:
        raise ConfigurationError(
            "no-key",
            f"{name} has no primary key and no unique index of NOT NULL columns, so nothing identifies a row.",
            next=f"run `alter table {sql} add primary key (…)`, then the same command again",
        )
    return CatalogueTable(name, sql, source_name, key, size, times, prepared)


def _choose(source: DatabaseSource, found: dict[str, tuple[str, int]]) -> str:
    listed = ", ".join([*list(found)[:10], *(["…"] if len(found) > 10 else [])]) or "none that this user may see"
    [name] = source.tables or (list(found) if len(found) == 1 else [""])
    if name in found:
        return name
    said = f"no table {name!r}.{did_you_mean(name, found)}" if name else "not exactly one table."
    raise ConfigurationError(
        "unknown-table" if name else "which-table",
        f"{source.from_} has {said} Its tables: {listed}. Nothing was written.",
        next="give one of these with --table",
    )
