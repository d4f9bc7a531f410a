"""Streams of rows in key order: several merged into one, and one read up to a key."""

from collections.abc import Iterator, Sequence

import pyarrow as pa

from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.datafiles import to_bytes
from lakeupsert.rows.rank import count_rows_up_to, sort_by_key

RUN_ROWS = 1 << 16
"""Rows of all compressed runs together that are in memory decompressed while they are merged."""


def in_key_order(streams: Sequence[Iterator[pa.RecordBatch]], key: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Merge streams that are in key order into one that is. Every key is in one stream only."""
    for parts in windows(streams, key):
        if len(parts) == 1:
            yield from parts.values()
        else:
            rows = pa.concat_batches(list(parts.values()))
            yield rows.take(sort_by_key(rows, key))


def windows(streams: Sequence[Iterator[pa.RecordBatch]], key: Sequence[str]) -> Iterator[dict[int, pa.RecordBatch]]:
    """Read streams that are in key order side by side: time after time the next rows of each, up to a key that is the same.

    The result has the rows by the stream's number; those of a key are in one window. A stream that has ended is missing.
    """
    heads = {number: head for number, stream in enumerate(streams) if (head := _next(stream)) is not None}
    while len(heads) > 1:
        ends = pa.concat_tables([pa.table(head.select(key).slice(head.num_rows - 1)) for head in heads.values()])
        first = sort_by_key(ends, key)[0].as_py()
        end = [ends[name][first] for name in key]
        counts = {number: count_rows_up_to(head, key, end) for number, head in heads.items()}
        yield {number: heads[number].slice(0, count) for number, count in counts.items()}
        rest = {
            n: head.slice(counts[n]) if counts[n] < head.num_rows else _next(streams[n]) for n, head in heads.items()
        }
        heads = {number: head for number, head in rest.items() if head is not None}
    for number, head in heads.items():
        yield {number: head}
        yield from ({number: rows} for rows in streams[number] if rows.num_rows)


def _next(stream: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    return next((batch for batch in stream if batch.num_rows), None)


def compress(rows: Rows, at_once: int = RUN_ROWS) -> bytes:
    """Rows as a compressed Arrow stream, to be read with `decompress`, so many ``at_once``."""
    return to_bytes(rows, pa.ipc.IpcWriteOptions(compression="lz4"), at_once)


def decompress(data: bytes) -> Iterator[pa.RecordBatch]:
    with pa.ipc.open_stream(data) as reader:
        yield from reader


class KeyOrdered:
    """Rows in key order, read forward once. There is at least one table; the rows of a key may be in two."""

    def __init__(self, tables: Iterator[Rows], key: Sequence[str]) -> None:
        self._tables, self._key = tables, key
        self._held = next(tables)

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
