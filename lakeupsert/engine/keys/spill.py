"""Rows by ranges of their hashes: in memory if there is one range, otherwise in temporary files.

Writes    temporary files, which are deleted when the block ends
Repeat    safe

Memory: the rows of one range. Ranges grow beyond 2^`MOST_BITS` of them.
"""

import numpy as np
import pyarrow as pa

from lakeupsert.engine.keys.index import HASH
from lakeupsert.engine.spilled import Spilled
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.buckets import buckets
from lakeupsert.table.manifest import Part

RANGE_ROWS = 1 << 20
"""Approximate rows of a range, of the index and incoming. More: memory. Less: objects."""
HELD_ROWS = 1 << 17
"""Rows that are cut into ranges in one call: appended files are many and small."""
MOST_BITS = 8
"""Ranges are cut by at most this many bits of the hash; each has an open temporary file."""


def ranges_of(rows: int) -> list[Part]:
    bits = min(MOST_BITS, (rows // RANGE_ROWS).bit_length())
    return [Part(bucket, bits) for bucket in range(1 << bits)]


class Ranges:
    """Rows by ranges of their hashes: in memory if there is one range, otherwise in temporary Arrow files."""

    def __init__(self, rows: int) -> None:
        self.ranges = ranges_of(rows)
        self._bits = self.ranges[0].bits
        self._tables: list[Rows] = []
        self._held = 0
        self._spilled = Spilled()

    def __enter__(self) -> "Ranges":
        self._spilled.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._spilled.__exit__(*error)

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
            self._spilled.add(number, rows.slice(begin, end - begin))

    def take(self, range_: Part) -> Rows | None:
        """Hand out the rows of a range, once. None if there are none."""
        if not self._bits:
            tables, self._tables = self._tables, []
            return pa.concat_tables(tables) if tables else None
        self._spill()
        return self._spilled.take(range_.bucket) if range_.bucket in self._spilled.numbers else None
