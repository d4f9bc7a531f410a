"""Streams of rows in key order: several merged into one, and one read up to a key."""

import io
from collections.abc import Iterator, Sequence

import pyarrow as pa

from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.rank import count_rows_up_to, sort_by_key

RUN_ROWS = 1 << 16
"""Rows of all compressed runs together that are in memory decompressed while they are merged."""


def in_key_order(streams: Sequence[Iterator[pa.RecordBatch]], key: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Merge streams that are in key order into one that is. Every key is in one stream only."""
    heads = [(head, stream) for stream in streams if (head := _next(stream)) is not None]
    while len(heads) > 1:
        ends = pa.concat_tables([pa.table(head.select(key).slice(head.num_rows - 1)) for head, _ in heads])
        first = sort_by_key(ends, key)[0].as_py()
        end = [ends[name][first] for name in key]
        parts = [(head, stream, count_rows_up_to(head, key, end)) for head, stream in heads]
        rows = pa.Table.from_batches([head.slice(0, n) for head, _, n in parts])
        yield from rows.take(sort_by_key(rows, key)).combine_chunks().to_batches()
        rest = [(head.slice(n) if n < head.num_rows else _next(stream), stream) for head, stream, n in parts]
        heads = [(head, stream) for head, stream in rest if head is not None]
    for head, stream in heads:
        yield head
        yield from stream


def _next(stream: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    return next((batch for batch in stream if batch.num_rows), None)


def compress(rows: Rows, at_once: int = RUN_ROWS) -> bytes:
    """Rows as a compressed Arrow stream, to be read with `decompress`, so many ``at_once``."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(rows, max_chunksize=at_once)
    return sink.getvalue()


def decompress(data: bytes) -> Iterator[pa.RecordBatch]:
    with pa.ipc.open_stream(data) as reader:
        yield from reader


class KeyOrdered:
    """Rows in key order, read forward once.

    Args:
        tables: the rows; the rows of a key may be in two tables.
        schema: of the tables.
    """

    def __init__(self, tables: Iterator[Rows], schema: pa.Schema, key: Sequence[str]) -> None:
        self.schema = schema
        self._tables, self._key = tables, key
        self._held = schema.empty_table()

    def up_to(self, last: Sequence[pa.Scalar]) -> Rows:
        """The next rows whose key is not greater than ``last`` (one scalar per key column)."""
        found = []
        while True:
            count = count_rows_up_to(self._held, self._key, last)
            found.append(self._held.slice(0, count))
            self._held = self._held.slice(count)
            if self._held.num_rows or (following := next(self._tables, None)) is None:
                return pa.concat_tables(found)
            self._held = following

    def rest(self) -> Iterator[Rows]:
        """All rows that are left."""
        yield self._held
        yield from self._tables
