"""Rows by ranges of their hashes: in memory if there is one range, otherwise in temporary files.

Reads     appended files, pack by pack
Writes    temporary files, which are deleted when the block ends
Repeat    safe

Memory: the rows of one range. Ranges grow beyond 2^`MOST_BITS` of them.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from lakeupsert.engine.keys.index import HASH, Range
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.buckets import buckets
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import DataFile

PACK_BYTES = 64 << 20
"""A pack up to this size is read by one request for all of its files."""
RANGE_ROWS = 1 << 20
"""Approximate rows of a range, of the index and incoming. More: memory. Less: objects."""
HELD_ROWS = 1 << 17
"""Rows that are cut into ranges in one call: appended files are many and small."""
MOST_BITS = 8
"""Ranges are cut by at most this many bits of the hash; each has an open temporary file."""


def ranges_of(rows: int) -> list[Range]:
    bits = min(MOST_BITS, (rows // RANGE_ROWS).bit_length())
    return [Range(bucket, bits) for bucket in range(1 << bits)]


class Ranges:
    """Rows by ranges of their hashes: in memory if there is one range, otherwise in temporary Arrow files."""

    def __init__(self, rows: int) -> None:
        self.ranges = ranges_of(rows)
        self._bits = self.ranges[0].bits
        self._tables: list[Rows] = []
        self._held = 0
        self._writers: dict[int, pa.RecordBatchStreamWriter] = {}

    def __enter__(self) -> "Ranges":
        self._folder = tempfile.TemporaryDirectory(prefix="lakeupsert-") if self._bits else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers.values():
            writer.close()
        if self._folder is not None:
            self._folder.cleanup()

    def add(self, rows: Rows) -> None:
        self._tables.append(rows)
        self._held += rows.num_rows
        if self._bits and self._held >= HELD_ROWS:
            self._spill()

    def _spill(self) -> None:
        if not self._held:
            return
        rows = pa.concat_tables(self._tables)
        self._tables, self._held = [], 0
        numbers = buckets(rows[HASH].to_numpy(), self._bits)
        order = np.argsort(numbers.astype(np.min_scalar_type(1 << self._bits)), kind="stable")
        rows, numbers = rows.take(pa.array(order)), numbers[order]
        for number in np.unique(numbers).tolist():
            begin, end = np.searchsorted(numbers, [number, number + 1]).tolist()
            if number not in self._writers:
                self._writers[number] = pa.ipc.new_stream(
                    self._path(number), rows.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")
                )
            self._writers[number].write_table(rows.slice(begin, end - begin))

    def take(self, range_: Range) -> Rows | None:
        """Hand out the rows of a range, once. None if there are none."""
        if not self._bits:
            tables, self._tables = self._tables, []
            return pa.concat_tables(tables) if tables else None
        self._spill()
        writer = self._writers.pop(range_.bucket, None)
        if writer is None:
            return None
        writer.close()
        with pa.OSFile(self._path(range_.bucket)) as source, pa.ipc.open_stream(source) as reader:
            return reader.read_all()

    def _path(self, number: int) -> str:
        assert self._folder is not None, "there are several ranges"
        return str(Path(self._folder.name) / f"{number}.arrow")


class KeptPacks:
    """A store for files that are read pack by pack. A pack up to `PACK_BYTES` is read once, and kept until the next one."""

    def __init__(self, store: ObjectStore, files: Iterable[DataFile]) -> None:
        self._store = store
        self._sizes: defaultdict[str, int] = defaultdict(int)
        for file in files:
            self._sizes[file.name] = max(self._sizes[file.name], (file.at or 0) + file.bytes)
        self._held = ("", b"")

    def __getattr__(self, name: str) -> Any:  # any other method of the store
        return getattr(self._store, name)

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        if part is None or not part[1] < self._sizes[name] <= PACK_BYTES:
            return self._store.get(name, part)
        if self._held[0] != name:
            self._held = (name, self._store.get(name))
        at, size = part
        return self._held[1][at : at + size]
