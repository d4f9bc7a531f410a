"""Reads files in a pack: one Parquet file with the rows of many small ones, each of them some whole row groups (ADR 0053)."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.rows.arrays import Indices
from lakeupsert.rows.checksums import GROUPS, Tail, compare, read_tail
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import DataFile

KEPT_BYTES = 32 << 20
"""Memory of footers, and of small packs, for each store. Fewer: merges of many partitions read and parse the footers of their
batches' packs more often."""
PARSED = 12
"""How many times its bytes a parsed footer takes: measured for footers of 9 and 41 kB (Arrow 26)."""

AHEAD_BYTES = 1 << 20
"""The most bytes of a pack that are read before they are asked for. More: memory, `AHEAD_PACKS` times. Fewer: requests."""
AHEAD_PACKS = 16
"""How many packs have such bytes in memory. Fewer: who reads more of them in turn reads none ahead."""


@dataclass
class Pack:
    """A pack by its footer, and the bytes of it that were read last.

    Attributes:
        rows, bytes: at which row and byte each row group begins, and where the last one ends.
        memory: its bytes, without ``held``.
        held: bytes, and where they begin; None: those of the tail, which are all of a small pack.
    """

    metadata: pq.FileMetaData
    tail: Tail
    rows: Indices
    bytes: Indices
    memory: int
    held: tuple[int, memoryview] | None = None

    def read(self, store: ObjectStore, name: str, begin: int, end: int) -> memoryview:
        """The bytes from ``begin`` to ``end``. Who reads on where the last request ended gets twice as many by the next one."""
        at, held = self.held or (self.tail.size - len(self.tail.data), self.tail.data)
        if not at <= begin <= end <= at + len(held):
            goes_on = at <= begin <= at + len(held)
            most = begin + min(2 * len(held), AHEAD_BYTES) if goes_on else end
            ahead = int(self.bytes[np.searchsorted(self.bytes, most, "right") - 1])
            at, held = begin, memoryview(store.get(name, (begin, max(ahead, end) - begin)))
            if len(held) <= AHEAD_BYTES:
                self.held = at, held
        return held[begin - at : end - at]


class _Kept(OrderedDict[str, Pack]):
    """The packs of a store that were opened last, and the ``memory`` that they take in bytes."""

    memory = 0


_packs: WeakKeyDictionary[ObjectStore, _Kept] = WeakKeyDictionary()
_lock = Lock()


def open_pack(store: ObjectStore, name: str) -> Pack:
    """The footer of a pack, verified. Raises ``pyarrow.ArrowInvalid`` if it is damaged, and NotFoundError."""
    with _lock:
        kept = _packs.setdefault(store, _Kept())
        pack = kept.get(name)
    if pack is None:
        with store.open(name) as source:
            tail = read_tail(source, name, GROUPS)
        if tail is None:
            raise pa.ArrowInvalid("it does not end with a footer of ours")
        metadata = pq.read_metadata(pa.BufferReader(tail.data))
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        first_columns = (group.column(0) for group in groups[1:])
        begins = [column.dictionary_page_offset or column.data_page_offset for column in first_columns]
        rows = np.cumsum([0, *(group.num_rows for group in groups)])
        memory = len(tail.data) + PARSED * metadata.serialized_size
        pack = Pack(metadata, tail, rows, np.array([0, *begins, tail.end]), memory)
    with _lock:
        kept.memory += 0 if name in kept else pack.memory
        kept[name] = pack
        kept.move_to_end(name)
        if len(kept) > AHEAD_PACKS:
            next(islice(reversed(kept.values()), AHEAD_PACKS, None)).held = None
        while len(kept) > 1 and kept.memory > KEPT_BYTES:
            kept.memory -= kept.popitem(last=False)[1].memory
    return pack


def open_files(store: ObjectStore, files: Sequence[DataFile]) -> tuple[pq.ParquetFile, list[range]]:
    """A pack of which only the row groups of some of its files can be read, and the numbers of these groups, file by file.

    The bytes are verified. Raises what `open_pack` does.
    """
    name = files[0].name
    pack, of_each = open_pack(store, name), []
    parts: list[tuple[int, memoryview]] = []
    for file in files:
        first = file.row or 0
        groups = range(*np.searchsorted(pack.rows, [first, first + file.rows]).tolist())
        ends = pack.bytes[groups.start : groups.stop + 1].tolist()
        data = pack.read(store, name, ends[0], ends[-1])
        try:
            compare(data, pack.tail.crcs[groups.start :], ends)
        except pa.ArrowInvalid:
            with _lock:
                _packs[store].pop(name, None)  # the object may be mended while this process lives
            raise
        parts.append((ends[0], data))
        of_each.append(groups)
    # Arrow counts from the beginning of the object. What is missing there takes addresses, and no memory.
    whole = np.empty(max(begin + len(data) for begin, data in parts), np.uint8)
    for begin, data in parts:
        whole[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
    return pq.ParquetFile(pa.BufferReader(pa.py_buffer(whole)), metadata=pack.metadata), of_each
