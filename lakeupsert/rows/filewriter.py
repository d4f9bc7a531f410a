"""Writes the Parquet files of a table, with field ids and footer keys."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeupsert.rows import datafiles
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.checksums import BLOCKS, GROUPS, MAGIC, ChecksumSink
from lakeupsert.rows.statistics import StatisticsColumn, statistics_of
from lakeupsert.storage import ObjectStore
from lakeupsert.storage.base import Sink
from lakeupsert.table.manifest import Bucketed, DataFile, PieceEnd
from lakeupsert.table.spec import TableSpec
from lakeupsert.table.types import leaves

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
FOOTER = "lakeupsert."


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

    @classmethod
    def of(cls, file: pq.FileMetaData) -> "Footer":
        """The keys in a file that we wrote."""
        values = footer_keys(file)
        place = values.get("partition"), int(values["bucket"]), int(values["bits"])
        written = values["table"], values["kind"], values["batch"], int(values["spec"])
        return cls(*written, *place, int(values.get("renames", 0)))


def footer_keys(file: pq.FileMetaData) -> dict[str, str]:
    """The keys of a `Footer`, without `FOOTER`; none of a file that others wrote."""
    found = ((name.decode(errors="replace"), text) for name, text in (file.metadata or {}).items())
    return {name.removeprefix(FOOTER): text.decode() for name, text in found if name.startswith(FOOTER)}


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


class Target(Protocol):
    """As much of an `ObjectStore` as writing takes."""

    def write(self, name: str) -> AbstractContextManager[Sink]: ...


class DataFileWriter:
    """Writes rows, given in key order, to files of about ``FILE_BYTES`` each. ``files`` is complete when the block ends.

    A file appears in the store when it is closed. If the block ends with an error, the open file never appears.

    Args:
        schema: the columns that are taken from the rows.
        names: what they are called in the file, where it differs (`TableSpec.names_written`).
        statistics: the columns that `DataFile.statistics` is to have.
    """

    _checksums = BLOCKS

    def __init__(
        self,
        store: Target,
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
        self._written = pa.schema([f.with_name(names.get(f.name, f.name)) for f in schema]) if names else schema
        self._footer = footer
        self._sorted_by = sorted_by
        # A maximum ignores NaN, so readers that rely on it would skip row groups with matching rows.
        self._bounded = [field.name for field in self._written if not pa.types.is_floating(field.type)]
        self._held: list[Rows] = []
        self._held_bytes = 0
        self._open: _OpenFile | None = None
        self._rows = 0

    def __enter__(self) -> Self:
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
                self._open.writer.is_open = False  # or pyarrow would write on as it is destroyed
                self._open.stack.__exit__(kind, error, trace)  # the store drops an unfinished object

    def write(self, rows: Rows) -> None:
        """Add rows. Columns that the file does not have are ignored. Rows are written when a row group is full."""
        self._hold(rows)
        if self._held_bytes >= datafiles.ROW_GROUP_BYTES:
            self._flush()
            if self._row_group_bytes >= FILE_BYTES:
                self._close()

    def _hold(self, rows: Rows) -> None:
        if rows.num_rows == 0:
            return
        columns = [rows.column(name) for name in self.schema.names]
        rows = pa.Table.from_arrays(columns, schema=self._written)
        self._held.append(rows)
        self._held_bytes += rows.nbytes

    @property
    def _row_group_bytes(self) -> int:
        """Of the open file, so far."""
        return int(self._open.sink.tell()) if self._open else len(MAGIC)

    def _flush(self) -> None:
        if not self._held:
            return
        table, size = pa.concat_tables(self._held), self._held_bytes
        self._held, self._held_bytes = [], 0
        here = self._open or self._begin(table)
        groups = max(1, ceil(table.num_rows / ROW_GROUP_ROWS), ceil(size / datafiles.ROW_GROUP_BYTES))
        rows = ceil(table.num_rows / groups)
        for begin in range(0, table.num_rows, rows):
            here.writer.write_table(table.slice(begin, rows), row_group_size=rows)
            if self._checksums == GROUPS:
                here.sink.flush()
                here.checksums.end_group()
        self._rows += table.num_rows

    def _begin(self, first: Rows) -> _OpenFile:
        name = self._new_name()
        stack = ExitStack()
        checksums = ChecksumSink(stack.enter_context(self._store.write(name)), self._checksums)
        sink = pa.BufferedOutputStream(pa.PythonFile(checksums, "w"), BUFFER_BYTES)
        schema = self._written.with_metadata(self._footer.metadata(name))
        footers: list[pq.FileMetaData] = []
        # Parquet numbers sorting columns by leaf. With nested columns, a column's index is not its leaf's number.
        flat = not any(pa.types.is_nested(type_) for type_ in schema.types)
        sorting = [pq.SortingColumn(self.schema.get_field_index(n)) for n in self._sorted_by] if flat else []
        writer = stack.enter_context(
            pq.ParquetWriter(
                sink,
                schema,
                compression="zstd",
                use_dictionary=_dictionary_columns(first),
                write_statistics=self._bounded,
                write_page_index=first.nbytes > PAGE_BYTES,  # with one page it would repeat the column's statistics
                sorting_columns=sorting or None,
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


class PackWriter(DataFileWriter):
    """Writes one pack: a file with the rows of many small files. (Every object costs a put, on a disk a sync.)"""

    _checksums = GROUPS

    def __init__(self, store: ObjectStore, name: str, schema: pa.Schema, footer: Footer, spec: TableSpec) -> None:
        super().__init__(store, lambda: name, schema, footer, spec.stored_key, spec.names_written)
        # Every reader of a file reads the pack's footer. With the bounds of long texts, it can be larger than the rows.
        self._bounded = [spec.names_written.get(column, column) for column in spec.stored_key]

    def write_file(self, pieces: Iterable[Rows], of: Bucketed) -> DataFile:
        """Write rows as whole row groups, and return the file that they are.

        Args:
            pieces: the rows, or 2^n tables: those of each of the 2^n parts of the bucket ``of``.
        """
        rows, begin = self._rows, self._row_group_bytes
        ends: list[PieceEnd] = []
        for piece in pieces:
            self._hold(piece)
            self._flush()
            ends.append(PieceEnd(self._rows - rows, self._row_group_bytes - begin))
        assert self._open is not None, "a file has rows"
        return DataFile(
            name=self._open.name,
            row=rows,
            rows=ends[-1].rows,
            bytes=ends[-1].bytes,
            bucket=of.bucket,
            bits=of.bits,
            renames=self._footer.renames,
            pieces=tuple(ends) if len(ends) > 1 else (),
        )


def _dictionary_columns(first: Rows) -> list[str] | bool:
    """Columns whose first rows contain repeated values. For other columns a dictionary costs time and bytes (ADR 0006).

    Columns of nested and extension types always get a dictionary, because their values can't be counted.
    """
    if first.num_rows < datafiles.FEW_ROWS:
        return False
    sample = first.slice(0, SAMPLED_ROWS)
    names: list[str] = []
    for field in sample.schema:
        if pa.types.is_nested(field.type) or isinstance(field.type, pa.BaseExtensionType):
            names += leaves(field.name, field.type)
        elif pc.count_distinct(sample[field.name]).as_py() <= MOST_DISTINCT * sample.num_rows:
            names.append(field.name)
    return names
