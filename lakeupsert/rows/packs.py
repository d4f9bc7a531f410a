"""Reads files in a pack: one Parquet file with the rows of many small ones, each of them some whole row groups (ADR 0053)."""

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.rows.arrays import Indices
from lakeupsert.rows.checksums import GROUPS, Tail, compare, read_tail
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import DataFile

KEPT_BYTES = 16 << 20
"""Bytes of footers, and of small packs, that stay in memory for each store. More: a parsed footer takes several times its bytes.
Fewer: merges of many partitions read and parse the footers of their batches' packs more often."""


@dataclass(frozen=True)
class Pack:
    """A pack by its footer.

    Attributes:
        rows, bytes: at which row and byte each row group begins, and where the last one ends.
    """

    metadata: pq.FileMetaData
    tail: Tail
    rows: Indices
    bytes: Indices


_packs: WeakKeyDictionary[ObjectStore, OrderedDict[str, Pack]] = WeakKeyDictionary()
_lock = Lock()


def open_pack(store: ObjectStore, name: str) -> Pack:
    """The footer of a pack, verified. Raises ``pyarrow.ArrowInvalid`` if it is damaged, and NotFoundError."""
    with _lock:
        pack = _packs.setdefault(store, OrderedDict()).pop(name, None)
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
        pack = Pack(metadata, tail, rows, np.array([0, *begins, tail.end]))
    with _lock:
        kept = _packs[store]
        kept[name] = pack
        while len(kept) > 1 and sum(len(one.tail.data) for one in kept.values()) > KEPT_BYTES:
            kept.popitem(last=False)
    return pack


def open_file(store: ObjectStore, file: DataFile) -> tuple[pq.ParquetFile, range]:
    """A pack of which only the row groups of one file can be read, and the numbers of these. One request; none for a small pack.

    The bytes are verified. Raises what `open_pack` does.
    """
    pack, first = open_pack(store, file.name), file.row or 0
    groups = range(*np.searchsorted(pack.rows, [first, first + file.rows]).tolist())
    ends = pack.bytes[groups.start : groups.stop + 1].tolist()
    begin, end = ends[0], ends[-1]
    is_held = len(pack.tail.data) == pack.tail.size  # a small pack, which was read with its footer
    data = pack.tail.data[begin:end] if is_held else memoryview(store.get(file.name, (begin, end - begin)))
    try:
        compare(data, pack.tail.crcs[groups.start :], ends)
    except pa.ArrowInvalid:
        with _lock:
            _packs[store].pop(file.name, None)  # the object may be mended while this process lives
        raise
    # Arrow counts from the beginning of the object. What is missing there takes addresses, and no memory.
    whole = np.empty(end, np.uint8)
    whole[begin:] = np.frombuffer(data, np.uint8)
    return pq.ParquetFile(pa.BufferReader(pa.py_buffer(whole)), metadata=pack.metadata), groups
