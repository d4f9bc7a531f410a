"""Landing files of Parquet: types from the footer, rows by row group."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.landing.formats import blocks
from lakeupsert.landing.formats.blocks import (
    ArrowBlock,
    LandingInput,
    Opened,
    UnreadableFileError,
    absent,
    among,
    check_names,
)
from lakeupsert.rows.convert import decoded
from lakeupsert.table.types import normal

_LARGE_ROW_GROUP = 1 << 28
_STREAM_BYTES = 1 << 18


def schema_of(source: Any, file: LandingInput) -> tuple[Any, Any]:
    """The columns under the types that we keep them in (``pyarrow.Schema``, no metadata), and the footer."""
    opened = _open(source, file)
    arrow = opened.schema_arrow
    return pa.schema([(f.name, normal(f.type)) for f in arrow]), opened.metadata


def open_blocks(
    source: Any, file: LandingInput, required: frozenset[str], only: Collection[str] | None = None
) -> Opened:
    opened = _open(source, file)
    return Opened(absent(required, opened.schema_arrow.names), _blocks(opened, file, only))


def _open(source: Any, file: LandingInput) -> Any:
    with _failures(file):
        footer = pq.read_metadata(source)
        source.seek(0)
        row_groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
        # Few large reads where a row group fits into memory as it lies in the file; else many small ones.
        large = any(_stored_bytes(group) > _LARGE_ROW_GROUP for group in row_groups)
        opened = pq.ParquetFile(
            source,
            metadata=footer,
            pre_buffer=not large,
            buffer_size=_STREAM_BYTES if large else 0,
            # Spark writes INT96 still, and as nanoseconds the year 9999 would silently become 1816.
            coerce_int96_timestamp_unit="us",
            # Spark writes checksums; without this a damaged page would be rows of wrong values.
            page_checksum_verification=True,
        )
    check_names(file.path, opened.schema_arrow.names)
    return opened


def _blocks(opened: Any, file: LandingInput, only: Collection[str] | None) -> Iterator[ArrowBlock]:
    footer = opened.metadata
    first, last = file.row_groups or (0, footer.num_row_groups)
    place = sum(footer.row_group(i).num_rows for i in range(first))
    wanted = None if only is None else among(opened.schema_arrow.names, only)
    for i in range(first, last):  # one after another: the reader keeps what it has buffered of all it was asked for
        group = footer.row_group(i)
        row_bytes = group.total_byte_size / max(group.num_rows, 1)
        rows = max(1, min(blocks.BLOCK_ROWS, int(blocks.BLOCK_BYTES / max(row_bytes, 1))))
        batches = opened.iter_batches(batch_size=rows, row_groups=[i], columns=wanted)
        while True:
            with _failures(file):
                batch = next(batches, None)
                if batch is None:
                    break
                columns = dict(zip(batch.schema.names, map(decoded, batch.columns), strict=True))
            yield ArrowBlock(columns, np.arange(place, place + batch.num_rows))
            place += batch.num_rows


def _stored_bytes(group: Any) -> int:
    return sum(group.column(i).total_compressed_size for i in range(group.num_columns))


@contextmanager
def _failures(file: LandingInput) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as e:
        if isinstance(e, OSError) and e.errno is not None:
            raise  # the disk or the network, not the file
        raise UnreadableFileError(file.path, f"Not readable as Parquet ({file.size} bytes): {e}"[:500]) from e
