"""The text of a landing file as its readers take it: decompressed, by the ending of its name, and in UTF-8.

Read from the beginning, some bytes at a time, in memory that follows what is asked for and not what it unpacks to. A place in
a text file is a byte of this text.
"""

import codecs
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from lakeupsert.landing.formats import blocks
from lakeupsert.landing.formats.blocks import LandingInput, UnreadableFileError

_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".lz4": "lz4"}
_READ_BYTES = 1 << 16
_STEP_BYTES = 1 << 13  # to a decompressor: what it has waiting belongs to no row yet, and an estimate goes by places
UNDECODABLE = "lakeupsert"
"""What `codecs` call how we decode what an encoding does not have."""
XZ_MEMORY = 1 << 28
"""Most bytes that a file's settings may make the decompressor of xz take; `xz -9` makes it take a quarter of this."""


class ReadAhead:
    """A file that is read from its beginning in few large parts, whatever is asked for: to a remote store each is a request.

    The first parts are small, for who looks at the beginning alone. ``tell`` is the place up to which was asked.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._begin()

    @classmethod
    def of(cls, source: Any) -> "ReadAhead":
        return source if isinstance(source, cls) else cls(source)

    def _begin(self) -> None:
        self._held, self._at, self._place, self._next = b"", 0, 0, _READ_BYTES

    def read(self, size: int) -> bytes:
        if size < 0:
            raise ValueError(f"a length of {size}")
        found = []
        while size:
            if self._at == len(self._held):
                self._held, self._at = self._source.read(max(size, min(self._next, blocks.BLOCK_BYTES))), 0
                self._next *= 2
                if not self._held:
                    break
            part = self._held[self._at : self._at + size]
            self._at += len(part)
            self._place += len(part)
            size -= len(part)
            found.append(part)
        return found[0] if len(found) == 1 else b"".join(found)

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> None:
        self._source.seek(place)
        self._begin()


def compression_of(path: str) -> str | None:
    """By the name's ending: gzip, bz2, xz, zstd, lz4."""
    return _COMPRESSIONS.get(_ending(path))


def without_compression(path: str) -> str:
    """The name that says what is inside."""
    return path[: len(path) - len(_ending(path))]


def is_plain(path: str, encoding: str) -> bool:
    """Whether a file's bytes are those of its text."""
    return not _ending(path) and is_utf8(encoding)


def unpacked(source: Any, file: LandingInput, encoding: str) -> Any:
    """What reads like ``source``, and is its text; `seek` takes it back to the beginning.

    A byte that ``encoding`` does not have is one that UTF-8 does not have either, in the same record.
    """
    if is_plain(file.path, encoding):
        return source
    ahead, compression = ReadAhead.of(source), compression_of(file.path)
    text = _Decompressed(ahead, file, compression) if compression else ahead
    return text if is_utf8(encoding) else _Decoded(text, file, encoding)


def _ending(path: str) -> str:
    return next((ending for ending in _COMPRESSIONS if path.lower().endswith(ending)), "")


def is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")  # readers of text pass over a byte order mark


class _Decompressed:
    """Streams that follow one another, as `cat` and parallel compressors make them, are one text."""

    def __init__(self, source: Any, file: LandingInput, compression: str) -> None:
        self._source = source
        self._file = file
        self._compression = compression
        self._begin()

    def _begin(self) -> None:
        if self._compression == "xz":
            self._stream: Any = _Xz(self._source)
        else:
            self._stream = pa.CompressedInputStream(_KeptOpen(self._source), self._compression)

    def read(self, size: int) -> bytes:
        with self._failures():
            return self._stream.read(size)  # type: ignore[no-any-return]  # pyarrow ships no types

    def seek(self, place: int) -> None:
        self._source.seek(place)
        self._begin()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, EOFError, lzma.LZMAError) as e:
            if isinstance(e, OSError) and e.errno is not None:
                raise  # the disk or the network, not the file
            reason = f"Not readable as {self._compression} ({self._file.size} bytes): {e}"
            raise UnreadableFileError(self._file.path, reason[:500]) from e


class _KeptOpen:
    """A file for Arrow's stream, which in the end closes what it read."""

    closed = False

    def __init__(self, source: Any) -> None:
        self._source = source

    def read(self, size: int) -> Any:
        return self._source.read(min(size, _STEP_BYTES))

    def close(self) -> None:
        pass


class _Xz:
    """xz, which Arrow does not have."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._one: lzma.LZMADecompressor | None = None

    def read(self, size: int) -> bytes:
        while True:
            if self._one is None or self._one.eof:
                given = (self._one.unused_data if self._one else b"") or self._source.read(_STEP_BYTES)
                if not given:
                    return b""
                self._one = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
            else:
                given = self._source.read(_STEP_BYTES) if self._one.needs_input else b""
                if self._one.needs_input and not given:
                    raise EOFError("Truncated compressed stream")
            if text := self._one.decompress(given, size):
                return text


class _Decoded:
    """Text of another encoding, in UTF-8."""

    def __init__(self, text: Any, file: LandingInput, encoding: str) -> None:
        self._text = text
        self._file = file
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder(encoding)(UNDECODABLE)

    def read(self, size: int) -> bytes:
        while True:
            read = self._text.read(size)
            try:
                found = self._decoder.decode(read, final=not read).encode(errors="surrogateescape")
            except UnicodeError as e:  # such as UTF-16 without a byte order mark
                raise UnreadableFileError(self._file.path, f"Not readable as {self._encoding}: {e}") from e
            if found or not read:
                return found

    def seek(self, place: int) -> None:
        self._text.seek(place)
        self._decoder.reset()


def _as_surrogates(error: UnicodeError) -> tuple[str, int]:
    """Each byte that can't be decoded behind one that never is in UTF-8: as they are, several together may be a character."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "".join("\udcff" + chr(0xDC80 | byte) for byte in error.object[error.start : error.end]), error.end


codecs.register_error(UNDECODABLE, _as_surrogates)
