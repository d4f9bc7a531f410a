"""A list of keys, in a file of any format that can land: which rows an `update` or `delete` is for.

Reads     the file, once
Writes    nothing
Repeat    safe

Memory: the list. A row of it has every key column; it may also have partition columns, and then means the key in that partition.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.config import Reading
from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.content import hash_object
from lakeupsert.landing.files import Reader, under_table_names
from lakeupsert.landing.formats.blocks import Block, LandingInput, UnreadableFileError
from lakeupsert.landing.formats.registry import readable_format
from lakeupsert.rows.arrays import Hashes, Indices, Rows
from lakeupsert.rows.buckets import key_hashes
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.rank import sortable
from lakeupsert.storage import NotFoundError, ObjectReader, open_landing, open_store
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.types import type_name

_KEY, _ROW = "_lakeupsert_key", "_lakeupsert_row"


@dataclass(frozen=True)
class KeyList:
    """Keys, each once. ``rows``: their columns, in the types of the table; ``sha256``: of the file."""

    rows: Rows
    sha256: str
    hashes: Hashes


@dataclass(frozen=True)
class Pairs:
    """Rows and keys that are equal: the number of the row and that of the key, of each pair."""

    rows: Indices
    keys: Indices

    @classmethod
    def of(cls, rows: Rows, keys: Rows) -> "Pairs":
        """Compare rows with ``keys``, by all columns of these."""
        names = keys.schema.names
        keys = keys.cast(pa.schema([rows.schema.field(name).remove_metadata() for name in names]))

        def numbered(table: Rows, number: str) -> Rows:
            columns = [*(sortable(table[name]) for name in names), pa.array(np.arange(table.num_rows))]
            return pa.table(columns, [*names, number])

        both = numbered(rows, _ROW).join(numbered(keys, _KEY), names, join_type="inner")
        return cls(both[_ROW].to_numpy(), both[_KEY].to_numpy())


def read_keys(path: str, spec: TableSpec) -> KeyList:
    """Read a list of keys. ``path``: of this machine, or an address of a store.

    Raises ConfigurationError if the file can't be read, or is not a list of keys: it lacks a key column, has other columns than
    those of key and partition, or a value that does not fit or is null.
    """
    local = Path(path).expanduser().absolute()
    folder, _, name = path.rpartition("/") if "://" in path else (str(local.parent), "", local.name)
    try:
        # The user names a file of this machine, so it may be a link.
        store: ObjectReader = open_landing(folder) if "://" in path else open_store(folder)
        found = store.head(name)
        if found is None:
            raise NotFoundError(name)
        file = LandingInput(name, found.size, found.etag, place=0)
        sha256 = hashlib.sha256()
        hash_object(store, name, None, sha256)
        reading = Reading()
        with store.open(name) as source:
            contents = Reader.of(source, file, readable_format(file, reading), reading).blocks(frozenset(spec.key))
            if contents.missing:
                raise _unfit(path, f"it has no column {', '.join(sorted(contents.missing))}, which the key needs")
            tables = [_keys(path, under_table_names(block, spec), spec) for block in contents.blocks]
    except NotFoundError as e:
        raise _unfit(path, f"there is no file {path if '://' in path else local}") from e
    except UnreadableFileError as e:
        raise _unfit(path, e.reason) from e
    if not any(table.num_rows for table in tables):
        raise _unfit(path, "it has no row")
    if len({tuple(table.schema.names) for table in tables}) > 1:
        raise _unfit(path, "some of its rows have partition columns and others have none")
    rows = pa.concat_tables(tables)
    rows = rows.group_by(rows.schema.names).aggregate([]).select(rows.schema.names)
    return KeyList(rows, sha256.hexdigest(), key_hashes(rows, spec) if spec.stored_key else np.zeros(1, np.uint64))


def _keys(path: str, block: Block, spec: TableSpec) -> Rows:
    names = [name for name in spec.schema.names if name in block.names]
    if block.malformed:
        raise _unfit(path, f"one of its records is malformed: {block.malformed[0].reason}")
    for name in block.names:
        if name not in (*spec.key, *spec.partition_by):
            raise _unfit(
                path,
                f"its column {name!r} is not a key column ({', '.join(spec.key)}) or a partition column "
                f"({', '.join(spec.partition_by)}). To change rows to the values of a file, land the file",
            )
    columns = {}
    for name in names:
        type_ = spec.schema.field(name).type
        columns[name], unfit = block.convert(name, type_)
        for mask, what in (
            (unfit, f"does not fit {type_name(type_)}"),
            (as_mask(pc.is_null(columns[name])), "is null"),
        ):
            if mask.any():
                row = int(np.argmax(mask))
                raise _unfit(path, f"{name} = {block.originals(name, [row])[0]!r} {what}")
    return pa.table(columns)


def _unfit(path: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        "unfit-key-list",
        f"{path} can't be used as a list of keys: {why}. Nothing was changed.",
        next="give a file of CSV, JSON lines, Parquet, Avro or ORC with the key columns, and if you like with partition columns",
    )
