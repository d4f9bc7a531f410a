"""Landing files of Parquet: types from the footer, rows by row group."""

from collections.abc import Collection, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.landing.formats import blocks
from lakeupsert.landing.formats.blocks import (
    ArrowBlock,
    Contents,
    LandingInput,
    check_names,
    find_missing,
    select_names,
    unreadable_if_damaged,
)
from lakeupsert.rows.convert import decode
from lakeupsert.table.types import normalize

_LARGE_ROW_GROUP = 1 << 28
_STREAM_BYTES = 1 << 18


def schema_of(source: pa.NativeFile, file: LandingInput) -> tuple[pa.Schema, pq.FileMetaData]:
    """The columns in the types that a table stores them in, without metadata; and the footer."""
    parquet = _open(source, file)
    return pa.schema([(f.name, normalize(f.type)) for f in parquet.schema_arrow]), parquet.metadata


def open_blocks(
    source: pa.NativeFile, file: LandingInput, required: frozenset[str], only: Collection[str] | None = None
) -> Contents:
    parquet = _open(source, file)
    return Contents(find_missing(required, parquet.schema_arrow.names), _blocks(parquet, file, only))


def _open(source: pa.NativeFile, file: LandingInput) -> pq.ParquetFile:
    with unreadable_if_damaged(file, "Parquet"):
        footer = pq.read_metadata(source)
        source.seek(0)
        row_groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
        # Few large reads if a row group, as it is stored, fits into memory; else many small ones.
        large = any(_stored_bytes(group) > _LARGE_ROW_GROUP for group in row_groups)
        parquet = pq.ParquetFile(
            source,
            metadata=footer,
            pre_buffer=not large,
            buffer_size=_STREAM_BYTES if large else 0,
            # Spark still writes INT96; in nanoseconds the year 9999 would silently become 1816.
            coerce_int96_timestamp_unit="us",
            # Spark writes checksums; without this a damaged page would be read as wrong values.
            page_checksum_verification=True,
        )
    check_names(file.path, parquet.schema_arrow.names)
    return parquet


def _blocks(parquet: pq.ParquetFile, file: LandingInput, only: Collection[str] | None) -> Iterator[ArrowBlock]:
    footer = parquet.metadata
    first, last = file.row_groups or (0, footer.num_row_groups)
    place = sum(footer.row_group(i).num_rows for i in range(first))
    wanted = None if only is None else select_names(parquet.schema_arrow.names, only)
    for i in range(first, last):  # one at a time: the reader keeps the buffers of all row groups of a call
        group = footer.row_group(i)
        row_bytes = group.total_byte_size / max(group.num_rows, 1)
        rows = max(1, min(blocks.BLOCK_ROWS, int(blocks.BLOCK_BYTES / max(row_bytes, 1))))
        batches = parquet.iter_batches(batch_size=rows, row_groups=[i], columns=wanted)
        while True:
            with unreadable_if_damaged(file, "Parquet"):
                batch = next(batches, None)
                if batch is None:
                    break
                columns = dict(zip(batch.schema.names, map(decode, batch.columns), strict=True))
            yield ArrowBlock(columns, np.arange(place, place + batch.num_rows))
            place += batch.num_rows


def _stored_bytes(group: pq.RowGroupMetaData) -> int:
    return sum(group.column(i).total_compressed_size for i in range(group.num_columns))
