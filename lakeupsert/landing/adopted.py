"""Files that others wrote and a table adopted: their footers, and their rows under the table's spec."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from lakeupsert.errors import RefusedError
from lakeupsert.landing.formats.blocks import LandingInput, UnreadableFileError
from lakeupsert.landing.formats.parquetfile import stored_schema_of, why_not_in_place
from lakeupsert.rows.arrays import Rows, repeat
from lakeupsert.rows.columns import fill_in_brought_columns
from lakeupsert.rows.datafiles import Near, align, stored_rows
from lakeupsert.rows.statistics import foreign_columns, statistics_of
from lakeupsert.rows.vectors import deleted_positions, drop_deleted
from lakeupsert.storage import ObjectInfo, ObjectStore
from lakeupsert.table.manifest import ColumnStatistics, DataFile
from lakeupsert.table.spec import BATCH, FILE, HAS, PLACE, TableSpec
from lakeupsert.table.types import leaf_places

FILE_RANK, PLACE_RANK = pa.field(FILE, pa.int32()), pa.field(PLACE, pa.int64())
ADOPTED_RANK = (FILE_RANK, PLACE_RANK)
"""Decides between adopted rows of a key with equal ordering values: the place of the file, and of the row in the file."""


@dataclass(frozen=True)
class FileFooter:
    """The footer of a file.

    Attributes:
        schema: columns in the types that a table stores them in.
        nulls: the least number of nulls in each key column; 0 if the file has no statistics.
        statistics: of the columns with these names, which have no ids yet.
    """

    file: DataFile
    schema: pa.Schema
    nulls: dict[str, int]
    statistics: dict[str, ColumnStatistics]


def read_footer(store: ObjectStore, info: ObjectInfo, key: Sequence[str], order_by: Sequence[str]) -> FileFooter:
    """Read one footer. Raises UnreadableFileError, and NotFoundError if the file was deleted."""
    file = LandingInput(info.name, info.size, info.etag, place=0)
    with store.open(info.name) as source:
        schema, footer = stored_schema_of(source, file)
        if why := why_not_in_place(source, file, footer):
            raise UnreadableFileError(info.name, f"{why} Rewrite the file, or land its rows instead.")
    nulls, places = dict.fromkeys(key, 0), leaf_places(schema)
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for name in nulls.keys() & places.keys():
            statistics = group.column(places[name].start).statistics
            if statistics is not None and statistics.has_null_count:
                nulls[name] += statistics.null_count
    found = statistics_of(footer, foreign_columns(schema, (*key, *order_by)))
    statistics = {schema.names[one.id]: one for one in found}
    return FileFooter(DataFile(name=info.name, rows=footer.num_rows, bytes=info.size), schema, nulls, statistics)


def stream_adopted(
    store: ObjectStore,
    file: DataFile,
    spec: TableSpec,
    partition: str,
    number: int,
    near: Near | None = None,
    find: Callable[[Rows], pa.Array] | None = None,
) -> Iterator[Rows]:
    """The rows of an adopted file in the spec's `base_schema` and `ADOPTED_RANK`. Raises RefusedError if a row has no key.

    Args:
        number: its place among the partition's files.
        near: as in `stream_file`.
        find: returns the places of the wanted rows among some, of which it gets the key columns; None: all are wanted.
    """
    deleted = deleted_positions(store, file)
    key = pa.schema([spec.base_schema.field(name) for name in spec.stored_key])
    for at, stored in stored_rows(store, file, spec.base_schema, near, spec):
        if BATCH in stored.schema.names:  # a table before had it (`operations.rebuild`); here its rows are of batch 0
            stored = stored.drop_columns(BATCH)
        rows = drop_deleted(stored.append_column(PLACE, pa.array(np.arange(at, at + stored.num_rows))), deleted, at)
        keys = align(rows.select([name for name in key.names if name in rows.schema.names]), key)
        refuse_null_keys(store, file, spec, keys, partition)
        rows = rows if find is None else rows.take(find(keys))
        places, rows = rows[PLACE], align(rows, spec.base_schema)
        if spec.mode == "columns" and HAS not in stored.schema.names:
            rows = fill_in_brought_columns(rows, spec, stored.schema.names)
        yield rows.append_column(FILE_RANK, repeat(number, pa.int32(), rows)).append_column(PLACE_RANK, places)


def read_adopted(store: ObjectStore, file: DataFile, spec: TableSpec, partition: str) -> Rows:
    """All rows of `stream_adopted`."""
    empty = pa.schema([*spec.base_schema, *ADOPTED_RANK]).empty_table()
    return pa.concat_tables([empty, *stream_adopted(store, file, spec, partition, 0)])


def refuse_null_keys(store: ObjectStore, file: DataFile, spec: TableSpec, rows: Rows, partition: str) -> None:
    """Raise RefusedError if a row of an adopted file has a null in a key column."""
    for name in spec.stored_key:
        nulls = rows[name].null_count
        if nulls:
            raise null_key_error(store, file, name, nulls, partition)


def null_key_error(store: ObjectStore, file: DataFile, column: str, nulls: int, partition: str) -> RefusedError:
    return RefusedError(
        "null-keys",
        f"{store.uri(file.name)}: {nulls} of {file.rows} rows have no value in the key column {column!r}. Rows without a key "
        "can't be adopted.",
        next="give these rows a key, remove them from that file, or set other columns in `key`",
        partition=partition,
    )
