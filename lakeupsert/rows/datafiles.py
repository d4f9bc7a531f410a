"""Parquet files of a table: written with field ids and footer keys, read back under the current spec."""

import errno
import io
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import ceil
from types import MappingProxyType, TracebackType

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeupsert.errors import DamagedTableError
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.checksums import CheckedBytes, CheckedFile, ChecksumSink, open_checked
from lakeupsert.rows.convert import convert_in_steps
from lakeupsert.rows.statistics import StatisticsColumn, statistics_of
from lakeupsert.rows.vectors import deleted_positions, drop_deleted
from lakeupsert.storage import NotFoundError, ObjectStore, StoreUnavailableError
from lakeupsert.table import metadata
from lakeupsert.table.layout import HOME, STATEMENT_ROWS, partition_of, rebuild_command
from lakeupsert.table.manifest import DataFile, PieceEnd, TombstoneFile
from lakeupsert.table.spec import BATCH, DELETE_FLAG, TableSpec
from lakeupsert.table.types import leaves

ROW_GROUP_BYTES = 32 << 20
"""Uncompressed bytes of a row group, and of the part of a base file that a merge holds in memory."""
ROW_GROUP_ROWS = 1 << 17
"""Maximum rows of a row group, so that a column of numbers is one page. Larger: a merge that looks up few keys reads more of the
base. Smaller: reading a narrow table takes more requests."""
FILE_BYTES = 512 << 20
"""Compressed bytes after which a base file is closed and the next one is started."""
PAGE_BYTES = 1 << 20
"""Uncompressed bytes of a page (pyarrow's default). A smaller table has one page per column."""
BUFFER_BYTES = 64 << 10
"""Bytes to collect before they pass through Python. Arrow writes the header and the body of each page separately."""
SAMPLED_ROWS = 250
MOST_DISTINCT = 0.8
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
FOOTER = "lakeupsert."
POSITION = "_lakeupsert_position"
"""Integer column that `stream_file` adds on demand: the row's position in its file, including superseded rows."""

Near = tuple[str, pa.Array | slice]
"""A column and values of it, or a slice from the least to the greatest value."""


@dataclass(frozen=True)
class Footer:
    """The keys in the footer of every file that we write. If the metadata is lost, they say where a file belongs."""

    table: str
    kind: str
    batch: str
    spec_version: int
    partition: str | None = None
    bucket: int = 0
    bits: int = 0
    renames: int = 0

    def metadata(self, name: str) -> dict[str, str]:
        values = {
            "table": self.table,
            "file": name,
            "kind": self.kind,
            "batch": self.batch,
            "bucket": str(self.bucket),
            "bits": str(self.bits),
            "spec": str(self.spec_version),
            "renames": str(self.renames) if self.renames else None,
            "partition": self.partition,
        }
        return {FOOTER + k: v for k, v in values.items() if v is not None}


class Pack:
    """An object that holds many small files, each a complete Parquet file. (Every object costs a put, on a disk a sync.)

    A `DataFileWriter` writes to it as to a store. The object appears in its own store when the block ends.
    """

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.name = name
        self.bytes = 0
        self._object = store.write(name)

    def __enter__(self) -> "Pack":
        self._sink = self._object.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._object.__exit__(kind, error, trace)

    @contextmanager
    def write(self, name: str) -> Iterator[pa.NativeFile]:
        buffer = pa.BufferOutputStream()
        yield buffer
        file = buffer.getvalue()
        self._sink.write(file)
        self.bytes += file.size


@dataclass(frozen=True)
class _OpenFile:
    """A file that is being written: the object in the store (``stack`` closes it), its checksums, a buffer, Arrow's writer, and
    where that puts the footer in the end."""

    name: str
    stack: ExitStack
    sink: pa.NativeFile
    checksums: ChecksumSink
    writer: pq.ParquetWriter
    footers: list[pq.FileMetaData]


class DataFileWriter:
    """Writes rows, given in key order, to files of about ``FILE_BYTES`` each. ``files`` is complete when the block ends.

    A file appears in the store when it is closed. If the block ends with an error, the open file never appears.

    Args:
        schema: the columns that are taken from the rows.
        names: what they are called in the file, where it differs (`TableSpec.names_written`).
        statistics: the columns that `DataFile.statistics` is to have.
    """

    def __init__(
        self,
        store: ObjectStore | Pack,
        new_name: Callable[[], str],
        schema: pa.Schema,
        footer: Footer,
        sorted_by: tuple[str, ...],
        names: Mapping[str, str] = MappingProxyType({}),
        statistics: Sequence[StatisticsColumn] = (),
    ) -> None:
        self.files: list[DataFile] = []
        self._statistics = statistics
        self._store = store
        self._new_name = new_name
        self.schema = schema
        self._written = pa.schema([field.with_name(names.get(field.name, field.name)) for field in schema])
        self._footer = footer
        # Parquet numbers sorting columns by leaf. With nested columns, a column's index is not its leaf's number.
        flat = not any(pa.types.is_nested(type_) for type_ in schema.types)
        self._sorting = [pq.SortingColumn(schema.get_field_index(n)) for n in sorted_by] if flat else []
        self._held: list[Rows] = []
        self._held_bytes = 0
        self._open: _OpenFile | None = None
        self._rows = 0

    def __enter__(self) -> "DataFileWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._flush()
                self._close()
        except BaseException:
            kind, error, trace = sys.exc_info()
            raise
        finally:
            if self._open is not None:
                self._open.stack.__exit__(kind, error, trace)  # the store drops an unfinished object

    def write(self, rows: Rows) -> None:
        """Add rows. Columns that the file does not have are ignored. Rows are written when a row group is full."""
        if rows.num_rows == 0:
            return
        columns = [rows.column(name) for name in self.schema.names]
        rows = pa.Table.from_arrays(columns, schema=self._written)
        self._held.append(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        table = pa.concat_tables(self._held)
        self._held, self._held_bytes = [], 0
        here = self._open or self._begin(table)
        groups = max(1, ceil(table.num_rows / ROW_GROUP_ROWS), ceil(table.nbytes / ROW_GROUP_BYTES))
        here.writer.write_table(table, row_group_size=ceil(table.num_rows / groups))
        self._rows += table.num_rows
        if here.sink.tell() >= FILE_BYTES:
            self._close()

    def _begin(self, first: Rows) -> _OpenFile:
        name = self._new_name()
        stack = ExitStack()
        checksums = ChecksumSink(stack.enter_context(self._store.write(name)))
        sink = pa.BufferedOutputStream(pa.PythonFile(checksums, "w"), BUFFER_BYTES)
        schema = self._written.with_metadata(self._footer.metadata(name))
        footers: list[pq.FileMetaData] = []
        writer = stack.enter_context(
            pq.ParquetWriter(
                sink,
                schema,
                compression="zstd",
                use_dictionary=_dictionary_columns(first),
                # A maximum ignores NaN, so readers that rely on it would skip row groups with matching rows.
                write_statistics=[f.name for f in schema if not pa.types.is_floating(f.type)],
                write_page_index=first.nbytes > PAGE_BYTES,  # with one page it would repeat the column's statistics
                sorting_columns=self._sorting or None,
                write_page_checksum=True,
                metadata_collector=footers,
            )
        )
        self._open = _OpenFile(name, stack, sink, checksums, writer, footers)
        return self._open

    def _close(self) -> None:
        if self._open is None:
            return
        here, self._open = self._open, None
        with here.stack:
            here.sink.flush()
            here.writer.add_key_value_metadata(here.checksums.keys())
            here.writer.close()
            here.sink.flush()
            here.checksums.finish()
        footer = self._footer
        size = here.checksums.bytes
        file = DataFile(name=here.name, rows=self._rows, bytes=size, bucket=footer.bucket, bits=footer.bits)
        found = statistics_of(here.footers[0], self._statistics) if self._statistics else ()
        self.files.append(msgspec.structs.replace(file, renames=footer.renames, statistics=found))
        self._rows = 0


def write_to_pack(pack: Pack, rows: Rows, schema: pa.Schema, footer: Footer, spec: TableSpec) -> list[DataFile]:
    """Write ``rows``, in key order, to one file in the pack, or to several if there are many rows."""
    at, files = pack.bytes, []
    with DataFileWriter(pack, lambda: pack.name, schema, footer, spec.stored_key, spec.names_written) as out:
        out.write(rows)
    for file in out.files:
        files.append(msgspec.structs.replace(file, at=at))
        at += file.bytes
    return files


def write_in_pieces(
    pack: Pack, pieces: Iterable[Rows], bits: int, schema: pa.Schema, footer: Footer, spec: TableSpec
) -> DataFile:
    """Write 2^``bits`` tables to one file in the pack: the parts of the footer's bucket, in their order."""
    at, count = pack.bytes, 0
    ends: list[PieceEnd] = []
    for number, rows in enumerate(pieces, footer.bucket << bits):
        of_piece = replace(footer, bucket=number, bits=footer.bits + bits)
        files = write_to_pack(pack, rows, schema, of_piece, spec)
        if len(files) > 1:
            raise ValueError(f"{rows.num_rows} rows do not fit into one piece")
        count += sum(file.rows for file in files)
        ends.append(PieceEnd(count, pack.bytes - at))
    return DataFile(
        name=pack.name,
        rows=count,
        bytes=pack.bytes - at,
        at=at,
        bucket=footer.bucket,
        bits=footer.bits,
        renames=footer.renames,
        pieces=tuple(ends) if bits else (),
    )


def decoded_width(type_: pa.DataType) -> int:
    """Decoded bytes of a value."""
    try:
        return int(type_.bit_width + 7) // 8
    except ValueError:
        return TEXT_BYTES


def bytes_without_rows(types: Iterable[pa.DataType]) -> int:
    """About how many bytes a file with columns of these types has beside its rows."""
    return BARE_BYTES + COLUMN_BYTES * sum(len(leaves("", type_)) for type_ in types)


def _dictionary_columns(first: Rows) -> list[str] | bool:
    """Columns whose first rows contain repeated values. For other columns a dictionary costs time and bytes (ADR 0006).

    Columns of nested and extension types always get a dictionary, because their values can't be counted.
    """
    if first.num_rows < FEW_ROWS:
        return False
    sample = first.slice(0, SAMPLED_ROWS)
    names: list[str] = []
    for field in sample.schema:
        if pa.types.is_nested(field.type) or isinstance(field.type, pa.BaseExtensionType):
            names += leaves(field.name, field.type)
        elif pc.count_distinct(sample[field.name]).as_py() <= MOST_DISTINCT * sample.num_rows:
            names.append(field.name)
    return names


def to_bytes(rows: Rows) -> bytes:
    """Rows as an Arrow IPC stream. (Pickling a slice would include its whole parent.)"""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
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
        near: row groups that contain none of these values may be skipped.
        spec: knows what columns are called in the file, and which were retyped since. Not needed to read only key and ordering
            columns, or others that decide between rows, because these never change.
    """
    deleted = deleted_positions(store, file)
    names = spec.names_in(file.renames) if spec else {}
    for at, rows in _decode_file(store, file, [names.get(name, name) for name in schema.names], near):
        rows = as_of_now(rows, spec, file.renames) if spec else rows
        if POSITION in schema.names:
            places = np.arange(first + at, first + at + rows.num_rows)
            rows = rows.append_column(schema.field(POSITION), pa.array(places))
        yield drop_deleted(align(rows, schema), deleted, at)


def _decode_file(
    store: ObjectStore, file: DataFile, columns: list[str], near: Near | None
) -> Iterator[tuple[int, Rows]]:
    """The rows of a file as they are stored: tables, each with the position of its first row."""
    if isinstance(file, TombstoneFile) and file.inline:
        yield 0, from_bytes(file.inline)
        return
    part = None if file.at is None else (file.at, file.bytes)
    if not file.pieces:
        with open_object(store, file.name, part) as source:
            yield from _decode(source, columns, near)
        return
    first = at = 0
    with explain_damage(store, file.name):
        data = pa.py_buffer(store.get(file.name, part))  # all pieces by one request
        for end in file.pieces:
            if end.bytes > at:
                source = open_checked(pa.BufferReader(data.slice(at, end.bytes - at)), file.name)
                yield from ((first + place, rows) for place, rows in _decode(source, columns, near))
            first, at = end.rows, end.bytes


def _decode(source: pa.NativeFile, columns: list[str], near: Near | None) -> Iterator[tuple[int, Rows]]:
    """The rows of one Parquet file."""
    with pq.ParquetFile(
        source,
        # Adopted files may have INT96. Pre-buffering reads a row group in one request to an object store; local files need none.
        coerce_int96_timestamp_unit="us",
        pre_buffer=not isinstance(getattr(source, "source", source), pa.OSFile | pa.BufferReader),
        page_checksum_verification=not isinstance(source, CheckedBytes | CheckedFile),
    ) as parquet:
        # With few rows, examining the columns one by one takes longer than reading them.
        few = parquet.metadata.num_rows <= FEW_ROWS
        rows, runs = (FEW_ROWS, [(0, None)]) if few else _runs(parquet.metadata, columns, near)
        for at, run in runs:
            for batch in parquet.iter_batches(batch_size=rows, row_groups=run, columns=columns, use_threads=False):
                yield at, pa.Table.from_batches([batch])
                at += batch.num_rows


def _runs(metadata: pq.FileMetaData, columns: list[str], near: Near | None) -> tuple[int, list[tuple[int, list[int]]]]:
    """How many rows of these columns to read at once; runs of consecutive row groups, each with its first row."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    total = max(1, sum(g.total_byte_size for g in groups))
    # True of most files in most nights. Examining their columns takes longer than reading them.
    read = total if len(groups) == 1 and total <= ROW_GROUP_BYTES else max(1, _bytes_of(groups, set(columns)))
    rows = max(1024, ROW_GROUP_BYTES * metadata.num_rows // read)
    # Repeated text is small in the file and large in memory. Our own row groups were cut by their size in memory.
    rows = min(rows, max((g.num_rows for g in groups), default=1) * total // read)
    begins = [0, *itertools.accumulate(g.num_rows for g in groups)]
    wanted = [i for i, group in enumerate(groups) if near is None or _may_hold(group, near)]
    runs = [[i for _, i in run] for _, run in itertools.groupby(enumerate(wanted), lambda pair: pair[1] - pair[0])]
    return rows, [(begins[run[0]], run) for run in runs]


def _bytes_of(groups: list[pq.RowGroupMetaData], columns: set[str]) -> int:
    """Uncompressed bytes of these columns."""
    chunks = (group.column(i) for group in groups for i in range(group.num_columns))
    return sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.partition(".")[0] in columns)


def _may_hold(group: pq.RowGroupMetaData, near: Near) -> bool:
    """Whether a row group may contain one of the values, judged by its statistics."""
    name, values = near
    if not isinstance(values, slice) and not any(is_one(values.type) for is_one in _COMPARED_BY_STATISTICS):
        return True
    column = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema == name)
    statistics = column.statistics
    if statistics is None or not statistics.has_min_max:
        return True
    if isinstance(values, slice):
        return bool(statistics.min <= values.stop and statistics.max >= values.start)
    low, high = (pa.scalar(value, values.type) for value in (statistics.min, statistics.max))
    return bool(pc.any(pc.and_(pc.greater_equal(values, low), pc.less_equal(values, high))).as_py())


@contextmanager
def open_object(
    store: ObjectStore, name: str, part: tuple[int, int] | None = None, partition: str | None = None
) -> Iterator[pa.NativeFile]:
    """Open one of our objects for reading.

    Args:
        part: where the file begins in the object, and how many bytes it has; None: the whole object.
        partition: the partition to name in an error; None: the one whose folder holds the object.
    Raises:
        DamagedTableError: the object is missing or not Parquet.
        StoreUnavailableError: the disk or mount failed.
    """
    with (
        explain_damage(store, name, partition),
        store.open(name) if part is None else pa.BufferReader(store.get(name, part)) as source,
    ):
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
            f"Data file {store.uri(name)} {problem}. Its manifest names it, so something other than lakeupsert "
            "deleted or changed it.",
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
