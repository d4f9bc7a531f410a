"""Checksums of data files: a damaged byte is an error with an address, never another value.

Parquet's own page checksums cover the values of a page, but not its header and not the file's footer. One wrong bit there turns
correct bytes into other rows. So the footer of our files holds a CRC-32 of every `BLOCK_BYTES` before it, and one of itself
(docs/FORMAT.md, "Checksums of data files"). A pack has one of every row group instead, so that damage to one partition's rows is
no other partition's. Pages keep Parquet's checksums too, for other readers.
"""

import base64
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
from isal.isal_zlib import crc32  # zlib's own takes eight times as long, on some machines forty (ADR 0025)
from numpy.typing import NDArray

from lakeupsert.storage.base import Sink
from lakeupsert.storage.remote import PlacedReader

BLOCK_BYTES = 16 << 10
"""Bytes that one checksum covers; reads are rounded up to it. Smaller: footers grow. Larger: reading one column reads more."""
TAIL_BYTES = 64 << 10
"""Bytes to read from the end of a file to find its footer."""
WHOLE_BYTES = 512 << 10
"""A file that is not larger is read as a whole. Larger: who needs one column reads more. Smaller: more reads for all columns."""
BLOCKS, GROUPS, OWN = "lakeupsert.blocks", "lakeupsert.groups", "lakeupsert.crc"
_NO_CRC = "0" * 8
# As Thrift writes them: the key, then a field with the length of the value, then the value.
_CRCS = {
    key: re.compile(re.escape(key.encode()) + rb"\x18[\x80-\xff]*[\x00-\x7f](\d+) ([A-Za-z0-9+/=]*)")
    for key in (BLOCKS, GROUPS)
}
_OWN = re.compile(re.escape(OWN.encode()) + rb"\x18\x08([0-9a-f]{8})")
MAGIC = b"PAR1"


class ChecksumSink(io.RawIOBase):
    """Passes on the bytes of one Parquet file, computes their checksums, and puts these into its footer.

    The caller flushes the row groups, adds `keys` to the footer, closes Arrow's writer, and calls `finish`.

    Args:
        key: `BLOCKS`, or `GROUPS`; then the caller calls `end_group` after each row group.
    """

    def __init__(self, sink: Sink, key: str) -> None:
        self._sink, self._key = sink, key
        self._block = BLOCK_BYTES if key == BLOCKS else sys.maxsize
        self._crcs: list[int] = []
        self._crc, self._left = 0, self._block  # of the block that is not full, and the bytes it still takes
        self._end: bytearray | None = None  # what follows the row groups
        self.bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override] # Arrow passes these two
        self.bytes += len(data)
        if self._end is not None:
            self._end += data
            return len(data)
        view, at = memoryview(data), 0
        while at < len(view):
            piece = view[at : at + self._left]
            self._crc = crc32(piece, self._crc)
            at, self._left = at + len(piece), self._left - len(piece)
            if not self._left:
                self.end_group()
        self._sink.write(data)  # type: ignore[arg-type] # stores take any buffer
        return len(data)

    def end_group(self) -> None:
        """The next bytes count for another checksum."""
        self._crcs.append(self._crc)
        self._crc, self._left = 0, self._block

    def keys(self) -> dict[str, str]:
        """The keys to add to the footer, after all row groups were written."""
        if self._left < self._block:
            self.end_group()
        self._end = bytearray()
        packed = base64.b64encode(np.array(self._crcs, "<u4").tobytes()).decode()
        return {self._key: f"{self.bytes} {packed}", OWN: _NO_CRC}

    def finish(self) -> None:
        """Pass on the end of the file, behind the row groups, with the footer's own checksum filled in."""
        end = self._end or bytearray()
        begin = len(end) - 8 - int.from_bytes(end[-8:-4], "little")
        place = _OWN.search(end, begin)
        if place is None:
            raise RuntimeError("Arrow wrote a footer without the keys that were added")
        end[slice(*place.span(1))] = f"{crc32(memoryview(end)[begin:-8]):08x}".encode()
        self._sink.write(bytes(end))


class CheckedBytes(pa.BufferReader):  # type: ignore[misc] # pyarrow has no types
    """A file in memory whose bytes are verified."""


class CheckedFile(PlacedReader):
    """A file that verifies every block as it is read; its footer is verified already. ``source`` is the underlying file."""

    def __init__(self, source: pa.NativeFile, tail: "Tail") -> None:
        super().__init__(tail.size)
        self.source = source
        self._end, self._crcs, self._tail = tail.end, tail.crcs, tail.data
        self._held, self._held_at = memoryview(b""), 0  # the blocks that the last read verified

    def read(self, size: int = -1) -> bytes | memoryview:
        begin, end = self._go_on(size)
        if end <= self._end:
            return self._blocks(begin, end)
        # Arrow guesses where the footer begins and reads too much. It does not use the bytes in front, so they are not read.
        tail_at = self._size - len(self._tail)
        return bytes(max(0, min(end, tail_at) - begin)) + self._tail[max(0, begin - tail_at) : max(0, end - tail_at)]

    def _blocks(self, begin: int, end: int) -> memoryview:
        """Bytes of the row groups. Several small columns share a block, which is then read and verified once."""
        if not self._held_at <= begin <= end <= self._held_at + len(self._held):
            at = begin // BLOCK_BYTES * BLOCK_BYTES
            self.source.seek(at)
            # Into Arrow's memory: large `bytes` objects cost a young process a page fault every 4 KiB.
            data = self.source.read_buffer(min(self._end, -(-end // BLOCK_BYTES) * BLOCK_BYTES) - at)
            borders = [*range(at, at + data.size, BLOCK_BYTES), at + data.size]
            compare(memoryview(data), self._crcs[at // BLOCK_BYTES :], borders)
            self._held, self._held_at = memoryview(data), at
        return self._held[begin - self._held_at : end - self._held_at]


def compare(data: memoryview, crcs: NDArray[np.uint32], borders: Sequence[int]) -> None:
    """Raise ``pyarrow.ArrowInvalid`` if a part of ``data`` has another checksum. ``borders``: where the parts are in the file."""
    for (at, end), crc in zip(pairwise(borders), crcs[: len(borders) - 1].tolist(), strict=True):
        if crc32(data[at - borders[0] : end - borders[0]]) != crc:
            raise pa.ArrowInvalid(f"the checksum of its bytes {at} to {end} is wrong")


@dataclass(frozen=True)
class Tail:
    """The end of a file with checksums, verified.

    Attributes:
        size: bytes of the file.
        end: bytes of its row groups, which the footer follows.
        crcs: the checksum of each block of the row groups, or of each row group.
        data: the footer, up to the file's end, or more.
    """

    size: int
    end: int
    crcs: NDArray[np.uint32]
    data: memoryview


def read_tail(source: pa.NativeFile, name: str, key: str) -> Tail | None:
    """None if the file has no checksums of ours. Raises ``pyarrow.ArrowInvalid`` if a byte of its footer was changed.

    Other programs may copy all footer keys into their own files, so checksums only count in a file whose footer has ``name``
    as its name.
    """
    size = source.size()
    whole = size <= WHOLE_BYTES or isinstance(source, pa.BufferReader)
    source.seek(0 if whole else size - TAIL_BYTES)
    tail = memoryview(source.read_buffer())  # into Arrow's memory: see `CheckedFile`
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if tail[-4:] != MAGIC or length > size:
        return None  # not Parquet: Arrow reports what is wrong
    if length > len(tail):
        tail = memoryview(source.read_at(length, size - length))
    footer = bytearray(tail[-length:])
    blocks, own = _CRCS[key].search(footer), _OWN.search(footer)
    if (blocks is None and own is None) or name.encode() not in footer:
        return None
    stored = None if own is None else int(own[1], 16)
    if own is not None:
        footer[slice(*own.span(1))] = _NO_CRC.encode()
    if blocks is None or crc32(memoryview(footer)[:-8]) != stored:
        raise pa.ArrowInvalid("the checksum of its footer is wrong")
    end, crcs = int(blocks[1]), np.frombuffer(base64.b64decode(blocks[2]), "<u4")
    return Tail(size, end, crcs, tail if whole else tail[-length:])


def open_checked(source: pa.NativeFile, name: str) -> pa.NativeFile | CheckedBytes | CheckedFile:
    """The same file, with reads that raise ``pyarrow.ArrowInvalid`` if a byte was changed.

    Returns ``source`` itself if it has no checksums: an adopted file. A small file is held in memory and verified as a whole.
    """
    tail = read_tail(source, name, BLOCKS)
    if tail is None:
        return source
    if len(tail.data) == tail.size:
        compare(tail.data[: tail.end], tail.crcs, [*range(0, tail.end, BLOCK_BYTES), tail.end])
        return CheckedBytes(tail.data)
    return CheckedFile(source, tail)
