"""Checksums of data files: a damaged byte is an error with an address, never another value.

Parquet has a checksum of each page, which covers its values and neither the header of the page nor the file's footer: one
wrong bit there makes other rows of right bytes. So the footer of a file of ours has a CRC-32 of every `BLOCK_BYTES` before
it, and one of itself (docs/FORMAT.md, "Checksums of data files"). The pages keep theirs, for readers that know nothing of us.
"""

import base64
import io
import re
from typing import Protocol

import numpy as np
import pyarrow as pa
from isal.isal_zlib import crc32  # zlib's own takes eight times as long, on some machines forty (ADR 0025)
from numpy.typing import NDArray

from lakeupsert.storage.remote import PlacedReader

BLOCK_BYTES = 16 << 10
"""What one checksum covers, and so what a read is rounded up to. Less: footers grow. More: who needs one column reads more."""
TAIL_BYTES = 64 << 10
"""Read from the end of a file to find its footer; all of a file that is no larger."""
BLOCKS, OWN = "lakeupsert.blocks", "lakeupsert.crc"
_NO_CRC = "0" * 8
# As Thrift writes them: a key, then in a field of its own the length of the value, then the value.
_BLOCKS = re.compile(re.escape(BLOCKS.encode()) + rb"\x18[\x80-\xff]*[\x00-\x7f](\d+) ([A-Za-z0-9+/=]*)")
_OWN = re.compile(re.escape(OWN.encode()) + rb"\x18\x08([0-9a-f]{8})")
_MAGIC = b"PAR1"


class Sink(Protocol):
    """Where bytes of a file go to."""

    def write(self, data: bytes) -> object: ...


class ChecksumSink(io.RawIOBase):
    """Passes the bytes of one Parquet file on, counts their checksums, and puts these into its footer.

    The caller flushes the row groups, adds `keys` to the footer, closes Arrow's writer, and calls `finish`.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._crcs: list[int] = []
        self._crc, self._left = 0, BLOCK_BYTES  # of the block that is not full, and how much it still takes
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
                self._crcs.append(self._crc)
                self._crc, self._left = 0, BLOCK_BYTES
        self._sink.write(data)  # type: ignore[arg-type] # stores take any buffer
        return len(data)

    def keys(self) -> dict[str, str]:
        """What to add to the footer, once all row groups were written."""
        if self._left < BLOCK_BYTES:
            self._crcs.append(self._crc)
        self._end = bytearray()
        packed = base64.b64encode(np.array(self._crcs, "<u4").tobytes()).decode()
        return {BLOCKS: f"{self.bytes} {packed}", OWN: _NO_CRC}

    def finish(self) -> None:
        """Pass on what follows the row groups, with the footer's own checksum in it."""
        end = self._end or bytearray()
        begin = len(end) - 8 - int.from_bytes(end[-8:-4], "little")
        place = _OWN.search(end, begin)
        if place is None:
            raise RuntimeError("Arrow wrote a footer without the keys that were added")
        end[slice(*place.span(1))] = f"{crc32(memoryview(end)[begin:-8]):08x}".encode()
        self._sink.write(bytes(end))


class CheckedBytes(pa.BufferReader):  # type: ignore[misc] # pyarrow has no types
    """A file in memory whose bytes were compared."""


class CheckedFile(PlacedReader):
    """A file of which every block that is read is compared with its checksum; the footer was. ``source`` is the file itself."""

    def __init__(self, source: pa.NativeFile, size: int, end: int, crcs: NDArray[np.uint32], tail: bytes) -> None:
        super().__init__(size)
        self.source = source
        self._end, self._crcs = end, crcs  # of the row groups
        self._tail = memoryview(tail)
        self._held, self._held_at = memoryview(b""), 0  # the blocks that the last read compared

    def read(self, size: int = -1) -> bytes | memoryview:
        begin, end = self._go_on(size)
        if end <= self._end:
            return self._blocks(begin, end)
        # Arrow guesses where the footer begins and reads more than that. It uses nothing before it, so nothing is read for it.
        tail_at = self._size - len(self._tail)
        return bytes(max(0, min(end, tail_at) - begin)) + self._tail[max(0, begin - tail_at) : max(0, end - tail_at)]

    def _blocks(self, begin: int, end: int) -> memoryview:
        """Bytes of the row groups. Of small columns several share a block, which is then read and compared once."""
        if not self._held_at <= begin <= end <= self._held_at + len(self._held):
            at = begin // BLOCK_BYTES * BLOCK_BYTES
            self.source.seek(at)
            # Into Arrow's memory: large `bytes` cost a young process a page fault every 4 KiB.
            data = self.source.read_buffer(min(self._end, -(-end // BLOCK_BYTES) * BLOCK_BYTES) - at)
            compare(memoryview(data), self._crcs[at // BLOCK_BYTES :], at)
            self._held, self._held_at = memoryview(data), at
        return self._held[begin - self._held_at : end - self._held_at]


def compare(data: memoryview, crcs: NDArray[np.uint32], at: int) -> None:
    """Raises ``pyarrow.ArrowInvalid`` where a block of ``data``, which begins at byte ``at`` of its file, is not what it was."""
    begins = range(0, len(data), BLOCK_BYTES)
    for begin, crc in zip(begins, crcs[: len(begins)].tolist(), strict=True):
        if crc32(data[begin : begin + BLOCK_BYTES]) != crc:
            end = min(begin + BLOCK_BYTES, len(data))
            raise pa.ArrowInvalid(f"the checksum of its bytes {at + begin} to {at + end} is wrong")


def checked(source: pa.NativeFile, name: str) -> pa.NativeFile | CheckedBytes | CheckedFile:
    """The same file, whose reads raise ``pyarrow.ArrowInvalid`` where a byte is not what was written.

    ``source`` itself if it has no checksums, as adopted files and those of an earlier lakeupsert. A small file is in memory, and
    compared as a whole. Whoever writes our rows into a file of his own may take all keys of the footer along: they count in the
    file alone that is called ``name`` there.
    """
    size = source.size()
    tail = source.read_at(min(size, TAIL_BYTES), max(0, size - TAIL_BYTES))
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if tail[-4:] != _MAGIC or length > size:
        return source  # no Parquet: Arrow says what is wrong
    if length > len(tail):
        tail = source.read_at(length, size - length)
    blocks, own = _BLOCKS.search(tail, len(tail) - length), _OWN.search(tail, len(tail) - length)
    if (blocks is None and own is None) or tail.find(name.encode(), len(tail) - length) < 0:
        return source
    footer = bytearray(memoryview(tail)[-length:-8])
    if own is not None:
        begin = len(tail) - length
        footer[own.start(1) - begin : own.end(1) - begin] = _NO_CRC.encode()
    if blocks is None or own is None or crc32(footer) != int(own[1], 16):
        raise pa.ArrowInvalid("the checksum of its footer is wrong")
    end, crcs = int(blocks[1]), np.frombuffer(base64.b64decode(blocks[2]), "<u4")
    if isinstance(source, pa.BufferReader):
        source.seek(0)
        whole = source.read_buffer()
        compare(memoryview(whole)[:end], crcs, 0)
        return CheckedBytes(whole)
    if size <= len(tail):
        compare(memoryview(tail)[:end], crcs, 0)
        return CheckedBytes(tail)
    return CheckedFile(source, size, end, crcs, tail[-length:])
