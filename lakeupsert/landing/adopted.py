"""Files that others wrote and a table adopted: what their footers tell, and their rows under the table's spec."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from lakeupsert.errors import RefusedError
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.landing.formats.parquetfile import schema_of
from lakeupsert.rows.columns import with_brought
from lakeupsert.rows.datafiles import opened, read_file
from lakeupsert.storage import ObjectInfo, ObjectStore
from lakeupsert.table.manifest import DataFile
from lakeupsert.table.spec import TableSpec


@dataclass(frozen=True)
class Footing:
    """What the footer of a file tells.

    Attributes:
        schema: columns (``pyarrow.Schema``) under the types that a table keeps them in.
        nulls: how many nulls each of the columns asked for has at least; a file without statistics tells of none.
    """

    file: DataFile
    schema: Any
    nulls: dict[str, int]


def footing(store: ObjectStore, found: ObjectInfo, columns: Sequence[str]) -> Footing:
    """Read one footer. Raises UnreadableFileError, and NotFoundError where it is gone."""
    with store.open(found.name) as source:
        schema, footer = schema_of(source, LandingInput(found.name, found.size, found.etag, place=0))
    nulls = dict.fromkeys(columns, 0)
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            statistics = column.statistics
            if column.path_in_schema in nulls and statistics is not None and statistics.has_null_count:
                nulls[column.path_in_schema] += statistics.null_count
    return Footing(DataFile(name=found.name, rows=footer.num_rows, bytes=found.size), schema, nulls)


def adopted_rows(store: ObjectStore, file: DataFile, spec: TableSpec, partition: str) -> Any:
    """All rows of an adopted file as a table of the spec's `base_schema`; refuses those without a key."""
    rows = read_file(store, file, spec.base_schema, spec)
    if spec.mode == "columns":
        with opened(store, file.name) as source:
            there = pq.read_schema(source).names
        then = spec.names_in(file.renames)
        rows = with_brought(rows, spec, [name for name in spec.stored_schema.names if then.get(name, name) in there])
    refuse_null_keys(store, file, spec, rows, partition)
    return rows


def refuse_null_keys(store: ObjectStore, file: DataFile, spec: TableSpec, rows: Any, partition: str) -> None:
    for name in spec.stored_key:
        nulls = rows[name].null_count
        if nulls:
            raise null_keys(store, file, name, nulls, partition)


def null_keys(store: ObjectStore, file: DataFile, column: str, nulls: int, partition: str) -> RefusedError:
    return RefusedError(
        "null-keys",
        f"{store.uri(file.name)}: {nulls} of {file.rows} rows have no value in the key column {column!r}, and a row without "
        "a key can't be told from another.",
        next="give these rows a key, or take them out of that file, or name other columns in `key`",
        partition=partition,
    )
