"""Lines that wait until their landing file is due: compressed, and on the disk if they are many."""

from collections.abc import Iterator
from tempfile import SpooledTemporaryFile

from isal import isal_zlib

from lakeupsert import clock

ENDING = ".jsonl.gz"
_IN_MEMORY = 1 << 24
_GZIP = 31  # zlib's number for a window of 32 kB in gzip's format


class Draft:
    """The next landing file of JSON lines. It is due by the time since its first line, by rows, or by bytes of lines.

    A source asks `is_due` behind a whole transaction only, so a transaction is in one file, however large it is.
    """

    ending = ENDING

    def __init__(self, seconds: float, rows: int, size: int) -> None:
        self._seconds, self._most_rows, self._most_bytes = seconds, rows, size
        self._begin()

    def _begin(self) -> None:
        self._file = SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - `take` closes it
        self._gzip = isal_zlib.compressobj(1, wbits=_GZIP)
        self._begun, self.rows, self._bytes = 0.0, 0, 0

    def add(self, line: bytes) -> None:
        """Add a line, without its end."""
        if not self.rows:
            self._begun = clock.elapsed()
        self._write(line)
        self.rows += 1
        self._bytes += len(line)

    def _write(self, line: bytes) -> None:
        self._file.write(self._gzip.compress(line + b"\n"))

    def _end(self) -> None:
        self._file.write(self._gzip.flush())

    def lines(self) -> Iterator[bytes]:
        """The lines that wait now, also if more are added meanwhile."""
        self._file.write(self._gzip.flush(isal_zlib.Z_SYNC_FLUSH))
        self._file.seek(0)
        data, reader = self._file.read(), isal_zlib.decompressobj(_GZIP)
        return iter(reader.decompress(data).splitlines())

    @property
    def is_full(self) -> bool:
        return self.rows >= self._most_rows or self._bytes >= self._most_bytes

    @property
    def is_due(self) -> bool:
        return self.rows > 0 and (self.is_full or clock.elapsed() - self._begun >= self._seconds)

    def take(self) -> bytes:
        """The file, which has ended; nothing if it had no line. The next one begins."""
        data = b""
        if self.rows:
            self._end()
            self._file.seek(0)
            data = self._file.read()
        self._file.close()
        self._begin()
        return data
