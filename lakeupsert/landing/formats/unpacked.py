"""The text of a landing file: decompressed, by the ending of its name, and decoded to UTF-8.

Read from the beginning, some bytes at a time. Memory follows the bytes that are asked for, not what the file unpacks to. A
place in a text file is a byte of this text.
"""

import codecs
import io
import lzma
import struct
import zlib
from typing import Protocol

import pyarrow as pa

from lakeupsert.landing.formats import blocks
from lakeupsert.landing.formats.blocks import LandingInput, Source, UnreadableFileError, unreadable_if_damaged
from lakeupsert.landing.formats.limits import check_unpacked

_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".lz4": "lz4", ".zip": "zip"}
_READ_BYTES = 1 << 16
_STEP_BYTES = 1 << 13  # read by a decompressor at once: an estimate counts them all as rows
UNDECODABLE = "lakeupsert"
"""The name in `codecs` of our handler for bytes that an encoding does not have."""
XZ_MEMORY = 1 << 28
"""Most bytes of memory for the decompressor of xz, which each file sets; a file of `xz -9` needs a quarter of this."""


class ReadAhead:
    """Reads a file from its beginning in few large parts, however small the reads: on a remote store each part is a request.

    The first parts are small, for callers that look only at the beginning. ``tell`` returns how far callers have read.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._begin()

    @classmethod
    def of(cls, source: Source) -> "ReadAhead":
        return source if isinstance(source, cls) else cls(source)

    def _begin(self) -> None:
        self._held, self._at, self._place, self._next = b"", 0, 0, _READ_BYTES

    def read(self, size: int) -> bytes:
        if size < 0:
            raise ValueError(f"a length of {size}")
        parts = []
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
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> None:
        self._source.seek(place)
        self._begin()


def compression_of(path: str) -> str | None:
    """gzip, bz2, xz, zstd, lz4 or zip, by the ending of the name."""
    return _COMPRESSIONS.get(_ending(path))


def without_compression(path: str) -> str:
    """The name without the ending of a compression: its own ending tells the format."""
    return path[: len(path) - len(_ending(path))]


def is_plain(path: str, encoding: str) -> bool:
    """Whether the file is neither compressed nor in another encoding: its bytes are its text."""
    return not _ending(path) and is_utf8(encoding)


def open_text(source: Source, file: LandingInput, encoding: str) -> Source:
    """The text of ``source``. `seek` only goes back to the beginning. Where UTF-8 is expected, text may also be UTF-16 with a
    byte order mark, as Excel writes it.

    A byte that is not valid in ``encoding`` becomes one that is not valid in UTF-8, in the same record.
    """
    if not is_plain(file.path, encoding):
        ahead, compression = ReadAhead.of(source), compression_of(file.path)
        source = _DecompressedText(ahead, file, compression) if compression else ahead
    return _DecodedText(source, file, encoding)


def _ending(path: str) -> str:
    return next((ending for ending in _COMPRESSIONS if path.lower().endswith(ending)), "")


def is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")  # readers of text pass over a byte order mark


def is_utf16(head: bytes) -> bool:
    """Whether a file begins with the byte order mark of UTF-16, which is not UTF-8."""
    return head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def read_varint(source: Source) -> int | None:
    """A number whose bytes say which is the last; None at the end. Raises EOFError if it is cut off."""
    value = shift = 0
    while byte := source.read(1):
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
        shift += 7
    if shift:
        raise EOFError("it is cut off")
    return None


def unpack_snappy(data: bytes, largest: int) -> bytes:
    """A block of Snappy. Raises ValueError if it says that it holds more than ``largest`` bytes."""
    size = read_varint(io.BytesIO(data)) or 0  # Arrow needs the unpacked size, which the data begins with
    if size > largest:
        raise ValueError(f"a block of {size} bytes")
    text: bytes = pa.decompress(data, size, "snappy", asbytes=True)
    return text


class _DecompressedText:
    """Decompressed text. Several streams in one file, as `cat` and parallel compressors write them, are one text."""

    def __init__(self, source: Source, file: LandingInput, compression: str) -> None:
        self._source = source
        self._file = file
        self._compression = compression
        self._begin()

    def _begin(self) -> None:
        self._unpacked = 0
        self._stream: _Zip | _Xz | pa.CompressedInputStream
        if self._compression == "zip":
            self._stream = _Zip(self._source)
        elif self._compression == "xz":  # Arrow has neither
            self._stream = _Xz(self._source)
        else:
            self._stream = pa.CompressedInputStream(_UnclosableSource(self._source), self._compression)

    def read(self, size: int) -> bytes:
        try:
            with unreadable_if_damaged(self._file, self._compression, EOFError, lzma.LZMAError, zlib.error, _ZipError):
                text: bytes = self._stream.read(size)
        except UnreadableFileError as e:
            if type(e.__cause__) is _SeveralMembersError:
                raise UnreadableFileError(self._file.path, several_members(self._file.path)) from e
            raise
        self._unpacked += len(text)
        check_unpacked(self._file, self._unpacked)
        return text

    def seek(self, place: int) -> None:
        self._source.seek(place)
        self._begin()


class _UnclosableSource:
    """Keeps the file open when Arrow's stream, at its end, closes what it reads."""

    closed = False

    def __init__(self, source: Source) -> None:
        self._source = source

    def read(self, size: int) -> bytes:
        return self._source.read(min(size, _STEP_BYTES))

    def close(self) -> None:
        pass


class _Xz:
    """Decompresses xz, several streams in a row too."""

    def __init__(self, source: Source) -> None:
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


class _ZipError(Exception):
    """An archive that can't be read from its beginning."""


class _SeveralMembersError(_ZipError):
    pass


class _Member(Protocol):
    """What zlib's decompressor has."""

    @property
    def eof(self) -> bool: ...
    @property
    def unconsumed_tail(self) -> bytes: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Stored:
    """As zlib's decompressor, of bytes that are not compressed."""

    def __init__(self, size: int) -> None:
        self.unconsumed_tail = b""
        self._left, self.unused_data, self.eof = size, b"", not size

    def decompress(self, data: bytes, size: int) -> bytes:
        text, rest = data[: min(size, self._left)], data[min(size, self._left) :]
        self._left -= len(text)
        self.eof = not self._left
        self.unused_data, self.unconsumed_tail = (rest, b"") if self.eof else (b"", rest)
        return text


class _Zip:
    """Decompresses the only member of a zip archive. `zipfile` starts at the end of an archive; this starts at its beginning, so
    a file is read and hashed once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._crc = 0
        self._member: _Member | None = None
        self._is_checked = False

    def read(self, size: int) -> bytes:
        member = self._member = self._member or self._begin()
        text = b""
        while not text and not member.eof:
            given = member.unconsumed_tail or self._source.read(_STEP_BYTES)
            if not given:
                raise EOFError("Truncated archive")
            text = member.decompress(given, size)
            self._crc = zlib.crc32(text, self._crc)
        if member.eof and not self._is_checked:
            self._is_checked = True
            self._check_end(member.unused_data)
        return text

    def _begin(self) -> "_Member":
        head = self._exactly(4)
        if head != b"PK\x03\x04":
            raise _ZipError("it has no member" if head == b"PK\x05\x06" else "it is not a zip archive")
        _, self._flags, method, _, _, _, size, _, *lengths = struct.unpack("<5H3I2H", self._exactly(26))
        self._exactly(sum(lengths))
        if self._flags & 1:
            raise _ZipError("its member is encrypted")
        if method == 8:
            return zlib.decompressobj(-15)
        if method or self._flags & 8 or size == 0xFFFFFFFF:
            raise _ZipError(f"its member is compressed by method {method}, or has no size; deflate can be read")
        return _Stored(size)

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            if not (more := self._source.read(size - len(found))):
                raise EOFError("Truncated archive")
            found += more
        return found

    def _check_end(self, rest: bytes) -> None:
        """Behind the member are its sizes, if its header lacks them, and the directory, whose first entry has its checksum."""
        while more := self._source.read(_READ_BYTES):
            rest = (rest + more)[: 2 * _READ_BYTES]  # a comment has fewer bytes
        places = (0, 12, 16, 20, 24) if self._flags & 8 else (0,)
        place = next((at for at in places if rest[at : at + 4] in (b"PK\x01\x02", b"PK\x03\x04")), len(rest))
        if rest[place : place + 4] == b"PK\x03\x04":
            raise _SeveralMembersError
        entry, end = rest[place : place + 46], place + 46
        end += sum(struct.unpack("<3H", entry[28:34])) if len(entry) == 46 else 0
        ending = rest[end : end + 22]
        is_whole = ending[:4] == b"PK\x06\x06" or (
            len(ending) == 22 and len(rest) == end + 22 + int.from_bytes(ending[20:], "little")
        )
        if not is_whole:
            raise EOFError("Truncated archive")
        if entry[16:20] != self._crc.to_bytes(4, "little"):
            raise _ZipError("its member has another checksum than its directory says")


def several_members(path: str) -> str:
    """Why an archive is unreadable that may hold several files."""
    return (
        "It is a zip archive, which may hold several files. Unpack it, compress each file by itself (.csv.zip, .gz, .zst), or "
        f'make the archive a separate landing zone: `landing = "zip://::/path/{path.rpartition("/")[2]}"`.'
    )


class _DecodedText:
    """Text of any encoding, in UTF-8."""

    def __init__(self, text: Source, file: LandingInput, encoding: str) -> None:
        self._text = text
        self._file = file
        self._encoding = encoding
        self._begin()

    def _begin(self) -> None:
        self._begins = True
        self._decoder = None if is_utf8(self._encoding) else codecs.getincrementaldecoder(self._encoding)(UNDECODABLE)

    def read(self, size: int) -> bytes:
        while True:
            read = self._text.read(max(size, 2) if self._begins else size)
            if self._begins and self._decoder is None and is_utf16(read):
                self._decoder = codecs.getincrementaldecoder("utf-16")(UNDECODABLE)
            self._begins = False
            if self._decoder is None:
                return read
            try:
                text = self._decoder.decode(read, final=not read).encode(errors="surrogateescape")
            except UnicodeError as e:  # for example UTF-16 without a byte order mark
                raise UnreadableFileError(self._file.path, f"Not readable as {self._encoding}: {e}") from e
            if text or not read:
                return text

    def seek(self, place: int) -> None:
        self._text.seek(place)
        self._begin()


def _as_surrogates(error: UnicodeError) -> tuple[str, int]:
    """Put a byte that UTF-8 never has before each byte that can't be decoded: several such bytes may else be a character."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "".join("\udcff" + chr(0xDC80 | byte) for byte in error.object[error.start : error.end]), error.end


codecs.register_error(UNDECODABLE, _as_surrogates)
