"""Parquet files of a table, read back under the current spec. `filewriter` writes them."""

import errno
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeupsert.errors import DamagedTableError
from lakeupsert.rows import packs
from lakeupsert.rows.arrays import Indices, Rows
from lakeupsert.rows.checksums import CheckedBytes, CheckedFile, open_checked
from lakeupsert.rows.convert import convert_in_steps
from lakeupsert.rows.vectors import deleted_positions, drop_deleted
from lakeupsert.storage import NotFoundError, ObjectStore, StoreUnavailableError
from lakeupsert.table import metadata
from lakeupsert.table.layout import HOME, STATEMENT_ROWS, partition_of, rebuild_command
from lakeupsert.table.manifest import DataFile, PieceEnd, TombstoneFile
from lakeupsert.table.spec import BATCH, DELETE_FLAG, TableSpec
from lakeupsert.table.types import leaf_places, leaves

ROW_GROUP_BYTES = 32 << 20
"""Uncompressed bytes of a row group, and of the part of a base file that a merge holds in memory."""
FEW_ROWS = 500
EXPANSION = 3
"""Decoded bytes for each compressed byte, if the schema does not give a column's width. ADR 0012 has data where it is more."""
BARE_BYTES = 1100
"""Bytes of a file apart from its rows, without `COLUMN_BYTES`; measured with 1 to 100 columns."""
COLUMN_BYTES = 320
"""What each column adds to `BARE_BYTES`."""
TEXT_BYTES = 16
"""Minimum decoded bytes of a value whose type has no fixed width."""
_COMPARED_BY_STATISTICS = (pa.types.is_integer, pa.types.is_date32, pa.types.is_string, pa.types.is_large_string)
POSITION = "_lakeupsert_position"
"""Integer column that `stream_file` adds on demand: the row's position in its file, including superseded rows."""

Near = Mapping[str, pa.Array | slice]
"""Columns, each with values of it, or with a slice from the least to the greatest value."""


def decoded_width(type_: pa.DataType) -> int:
    """Decoded bytes of a value."""
    try:
        return int(type_.bit_width + 7) // 8
    except ValueError:
        return TEXT_BYTES


def bytes_without_rows(types: Iterable[pa.DataType]) -> int:
    """About how many bytes a file with columns of these types has beside its rows."""
    return BARE_BYTES + COLUMN_BYTES * sum(len(leaves("", type_)) for type_ in types)


def to_bytes(rows: Rows, options: pa.ipc.IpcWriteOptions | None = None, at_once: int | None = None) -> bytes:
    """Rows as an Arrow IPC stream. (Pickling a slice would include its whole parent.)"""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_table(rows, max_chunksize=at_once)
    return sink.getvalue()


def from_bytes(data: bytes | memoryview | pa.Buffer) -> Rows:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()


def read_file(store: ObjectStore, file: DataFile, schema: pa.Schema, spec: TableSpec | None = None) -> Rows:
    """All live rows of one of our files, in columns of ``schema`` (see `stream_file`)."""
    return pa.concat_tables(list(stream_file(store, file, schema, spec=spec)) or [schema.empty_table()])


def stream_file(
    store: ObjectStore,
    file: DataFile,
    schema: pa.Schema,
    near: Near | None = None,
    first: int = 0,
    spec: TableSpec | None = None,
) -> Iterator[Rows]:
    """The live rows of one of our files, in file order, in tables of about ``ROW_GROUP_BYTES``.

    Args:
        schema: the columns to read. A column `POSITION` gets each row's position in the file, counted from ``first``.
        near: row groups that contain none of the values of a column may be skipped.
        spec: knows what columns are called in the file, and which were retyped since. Not needed to read only key and ordering
            columns, or others that decide between rows, because these never change.
    """
    deleted = deleted_positions(store, file)
    for at, rows in stored_rows(store, file, schema, near, spec):
        if POSITION in schema.names:
            places = np.arange(first + at, first + at + rows.num_rows)
            rows = rows.append_column(schema.field(POSITION), pa.array(places))
        yield drop_deleted(align(rows, schema), deleted, at)


def stored_rows(
    store: ObjectStore, file: DataFile, schema: pa.Schema, near: Near | None, spec: TableSpec | None
) -> Iterator[tuple[int, Rows]]:
    """The rows that `stream_file` reads, before it fits them to the schema: tables with superseded rows and with no more columns
    of ``schema`` than the file has, each with the position of its first row."""
    names = spec.names_in(file.renames) if spec else {}
    for at, rows in _decode_file(store, file, [names.get(name, name) for name in schema.names], near):
        yield at, as_of_now(rows, spec, file.renames) if spec else rows


def read_together(
    store: ObjectStore, files: Sequence[DataFile], schema: pa.Schema, spec: TableSpec
) -> tuple[Rows, Indices]:
    """The live rows of some files of one pack, in columns of ``schema``, and for each row the number of its file among ``files``,
    which were written after equally many renames."""
    renames, sizes = files[0].renames, [file.rows for file in files]
    names = spec.names_in(renames)
    deleted = [deleted_positions(store, file) for file in files]
    with explain_damage(store, files[0].name):
        parquet, groups = packs.open_files(store, files)
        columns = [names.get(name, name) for name in schema.names]
        rows = parquet.read_row_groups([*itertools.chain.from_iterable(groups)], columns, use_threads=False)
    rows, numbers = align(as_of_now(rows, spec, renames), schema), np.repeat(np.arange(len(files)), sizes)
    begins = np.cumsum([0, *sizes]).astype(np.uint64)
    dead = np.concatenate([own + begin for own, begin in zip(deleted, begins, strict=False)])
    return drop_deleted(rows, dead, 0), np.delete(numbers, dead)


def _decode_file(
    store: ObjectStore, file: DataFile, columns: list[str], near: Near | None
) -> Iterator[tuple[int, Rows]]:
    """The rows of a file as they are stored: tables, each with the position of its first row."""
    if isinstance(file, TombstoneFile) and file.inline:
        yield 0, from_bytes(file.inline)
        return
    if file.row is not None:
        with explain_damage(store, file.name):
            parquet, [groups] = packs.open_files(store, [file])
            yield from _decode(parquet, groups, columns, near)
    elif file.at is not None:
        with explain_damage(store, file.name):
            yield from _decode_pieces(pa.py_buffer(store.get(file.name, (file.at, file.bytes))), file, columns, near)
    else:
        with open_object(store, file.name) as source:
            yield from _decode_whole(source, columns, near)


def _decode_pieces(
    data: pa.Buffer, file: DataFile, columns: list[str], near: Near | None
) -> Iterator[tuple[int, Rows]]:
    """The rows of a file in a pack of format 1, which is one Parquet file or one for each piece."""
    first = at = 0
    for end in file.pieces or (PieceEnd(file.rows, file.bytes),):
        if end.bytes > at:
            piece = open_checked(pa.BufferReader(data.slice(at, end.bytes - at)), file.name)
            yield from ((first + place, rows) for place, rows in _decode_whole(piece, columns, near))
        first, at = end.rows, end.bytes


def _decode_whole(source: pa.NativeFile, columns: list[str], near: Near | None) -> Iterator[tuple[int, Rows]]:
    """The rows of one Parquet file."""
    with pq.ParquetFile(
        source,
        # Adopted files may have INT96.
        coerce_int96_timestamp_unit="us",
        # One request to an object store for a row group; local files need none.
        pre_buffer=not isinstance(getattr(source, "source", source), pa.OSFile | pa.BufferReader),
        page_checksum_verification=not isinstance(source, CheckedBytes | CheckedFile),
    ) as parquet:
        yield from _decode(parquet, range(parquet.num_row_groups), columns, near)


def _decode(
    parquet: pq.ParquetFile, groups: range, columns: list[str], near: Near | None
) -> Iterator[tuple[int, Rows]]:
    """The rows of some consecutive row groups."""
    # With few rows, examining the columns one by one takes longer than reading them.
    few = sum(parquet.metadata.row_group(number).num_rows for number in groups) <= FEW_ROWS
    rows, runs = (FEW_ROWS, [(0, list(groups))]) if few else _runs(parquet, groups, columns, near)
    for at, run in runs:
        for batch in parquet.iter_batches(batch_size=rows, row_groups=run, columns=columns, use_threads=False):
            yield at, pa.Table.from_batches([batch])
            at += batch.num_rows


def _runs(
    parquet: pq.ParquetFile, numbers: range, columns: list[str], near: Near | None
) -> tuple[int, list[tuple[int, list[int]]]]:
    """How many rows of these columns to read at once; runs of consecutive row groups, each with its first row."""
    groups = [parquet.metadata.row_group(number) for number in numbers]
    total = read = max(1, sum(g.total_byte_size for g in groups))
    is_small = len(groups) == 1 and total <= ROW_GROUP_BYTES
    # Most files in most nights are small. Examining their columns takes longer than reading them.
    places = {} if is_small and not near else leaf_places(parquet.schema_arrow)
    if not is_small:
        leaves_read = [at for name in columns for at in places.get(name, ())]
        read = max(1, sum(group.column(at).total_uncompressed_size for group in groups for at in leaves_read))
    rows = max(1024, ROW_GROUP_BYTES * sum(g.num_rows for g in groups) // read)
    # Repeated text is small in the file and large in memory. Our own row groups were cut by their size in memory.
    rows = min(rows, max((g.num_rows for g in groups), default=1) * total // read)
    begins = [0, *itertools.accumulate(g.num_rows for g in groups)]
    wanted = [*range(len(groups))]
    for name, values in (near or {}).items():
        chunks = [groups[i].column(places[name].start) for i in wanted]
        wanted = [i for i, may in zip(wanted, _may_hold(chunks, values), strict=True) if may]
    runs = [[i for _, i in run] for _, run in itertools.groupby(enumerate(wanted), lambda pair: pair[1] - pair[0])]
    return rows, [(begins[run[0]], [numbers[i] for i in run]) for run in runs]


def _may_hold(chunks: list[pq.ColumnChunkMetaData], values: pa.Array | slice) -> Iterator[bool]:
    """Whether each of a column's chunks may contain one of the values, judged by its statistics."""
    if isinstance(values, slice):
        low, high = values.start, values.stop
    elif any(is_one(values.type) for is_one in _COMPARED_BY_STATISTICS):
        low, high = pc.min_max(values).as_py().values()
    else:
        yield from itertools.repeat(True, len(chunks))
        return
    for statistics in (chunk.statistics for chunk in chunks):
        if statistics is None or not statistics.has_min_max:
            yield True
        elif low is None or statistics.min > high or statistics.max < low:
            yield False  # most groups of a large file, if keys lie side by side
        elif isinstance(values, slice):
            yield True
        else:
            least, greatest = (pa.scalar(value, values.type) for value in (statistics.min, statistics.max))
            among = pc.and_(pc.greater_equal(values, least), pc.less_equal(values, greatest))
            yield bool(pc.any(among).as_py())


@contextmanager
def open_object(store: ObjectStore, name: str, partition: str | None = None) -> Iterator[pa.NativeFile]:
    """Open one of our objects for reading.

    Args:
        partition: the one to name in an error; None: the one whose folder holds the object.
    Raises:
        DamagedTableError: the object is missing or not Parquet.
        StoreUnavailableError: the disk or mount failed.
    """
    with explain_damage(store, name, partition), store.open(name) as source:
        yield open_checked(source, name)


@contextmanager
def explain_damage(store: ObjectStore, name: str, partition: str | None = None) -> Iterator[None]:
    """Raise the errors of `open_object` for what goes wrong with one of our objects in the block."""
    try:
        yield
    except (NotFoundError, pa.ArrowInvalid, OSError) as e:
        if isinstance(e, OSError) and e.errno not in (None, errno.ENOENT):
            raise StoreUnavailableError(
                "store-unreachable",
                f"{store.uri(name)} could not be read: {e}.",
                next="check the disk or mount, then run the same command again",
            ) from e
        problem = (
            "is missing" if isinstance(e, NotFoundError) else f"can't be read: {' '.join(str(e).split()).rstrip('. ')}"
        )
        advice = metadata.FROM_BACKUP
        stored = partition_of(name)
        if stored is not None:
            advice += f", or rebuild the partition from its landing files: `{rebuild_command(stored)}`"
        elif name.startswith((f"{HOME}/data/", f"{STATEMENT_ROWS}/")):
            given = ", give the update or delete again" if name.startswith(f"{STATEMENT_ROWS}/") else ""
            advice += (
                f", or withdraw all unpublished batches{given} and load their landing files again: "
                "`lakeupsert restore published --yes`, then `lakeupsert append --again`"
            )
        raise DamagedTableError(
            "damaged-data-file",
            f"Data file {store.uri(name)} {problem}. {'Its manifest' if stored else 'The metadata of the table'} names it, so "
            "something other than lakeupsert deleted or changed it.",
            next=advice,
            partition=partition or stored,
        ) from e


def as_of_now(rows: Rows, spec: TableSpec, renames: int) -> Rows:
    """Rows of a file that was written after so many renames, under the names of now, and with columns that were retyped since
    converted. A value that does not convert is null; its row is in quarantine (ADR 0038)."""
    now = {then: name for name, then in spec.names_in(renames).items()}
    if now:
        rows = rows.rename_columns([now.get(name, name) for name in rows.schema.names])
    for name, changes in spec.conversions(renames).items():
        at = rows.schema.get_field_index(name)
        if at >= 0:
            chunks = [convert_in_steps(chunk, changes)[0] for chunk in rows.column(at).chunks]
            rows = rows.set_column(at, name, pa.chunked_array(chunks, changes[-1].after))
    return rows


def align(rows: Rows, schema: pa.Schema) -> Rows:
    """Rows under a newer schema: its column order, nulls for missing columns and struct fields, wider types."""
    if rows.schema.equals(schema):
        return rows
    columns = []
    for field in schema:
        at = rows.schema.get_field_index(field.name)
        if field.name == DELETE_FLAG and at < 0:
            columns.append(pa.repeat(pa.scalar(False), rows.num_rows))
        elif field.name == BATCH and at < 0:  # adopted files, and appended ones, whose rows get theirs in the merge
            columns.append(pa.repeat(pa.scalar(0, field.type), rows.num_rows))
        elif at < 0:
            columns.append(pa.nulls(rows.num_rows, field.type))
        elif rows.schema.field(at).type.equals(field.type):
            columns.append(rows.column(at))
        else:
            columns.append(pc.cast(rows.column(at), field.type))
    return pa.Table.from_arrays(columns, schema=schema)
