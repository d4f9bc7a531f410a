"""What the footers of an ORC file say about its dates, its timestamps and its size, which pyarrow does not pass on.

https://orc.apache.org/specification/ORCv1/ has the messages, in the encoding of Protocol
Buffers, and the numbers of their fields.
"""

import io
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from lakeupsert.landing.formats.unpacked import read_varint, unpack_snappy

_TAIL = 1 << 14
_LARGEST = 1 << 26
"""Most bytes of a footer, unpacked."""
_JAVA = 0
_UNKNOWN, _HYBRID = 0, 1
Fields = dict[int, list[int | bytes]]
"""The values of each field of a message: integers, or bytes for texts and messages."""


@dataclass(frozen=True)
class OrcFooter:
    """What the writer did.

    Attributes:
        old_calendar: dates are in the hybrid calendar.
        by_java: it was ORC's library for Java, which Spark, Hive and Flink use.
        zones: the writer's time zone of each stripe; "" if none is stored.
        text_bytes: of all texts and binaries, however often they are repeated, as its statistics say. Writers may leave them out.
    """

    old_calendar: bool
    by_java: bool
    zones: list[str]
    text_bytes: int


def read_footer(source: pa.NativeFile) -> OrcFooter:
    """Raises ValueError, IndexError, EOFError, OverflowError or what decompressors raise if the file is damaged."""
    size = source.size()
    source.seek(max(0, size - _TAIL))
    tail = source.read(_TAIL)
    begin = len(tail) - 1 - tail[-1]
    post = _fields(tail[begin:-1])
    length, kind = _number(post, 1), _number(post, 2)
    if begin < length:
        source.seek(size - 1 - tail[-1] - length)
        footer = source.read(length)
    else:
        footer = tail[begin - length : begin]
    fields = _fields(_unpack(footer, kind))
    zones = []
    for stripe in map(_fields, fields.get(3, [])):
        if sum(_number(stripe, field) for field in (1, 2, 3, 4)) > size:
            raise ValueError("a stripe ends behind the end of the file")
        source.seek(sum(_number(stripe, field) for field in (1, 2, 3)))
        zones.append(_text(_fields(_unpack(source.read(_number(stripe, 4)), kind)), 3))
    by_java = _number(fields, 9) == _JAVA
    calendar = _number(fields, 11)
    # ORC 1.5 and older do not say it, nor do writers that know one calendar only.
    is_old = calendar == _HYBRID or (calendar == _UNKNOWN and by_java)
    return OrcFooter(is_old, by_java, zones, sum(map(_text_bytes, map(_fields, fields.get(7, [])))))


def _text_bytes(column: Fields) -> int:
    """The bytes of all values of a column by its statistics: the sum is field 3 of text statistics, field 1 of binary ones."""
    [*_, zigzag] = 0, *(_number(_fields(column[kind][-1]), total) for kind, total in ((4, 3), (8, 1)) if kind in column)
    return zigzag >> 1


def _number(fields: Fields, field: int) -> int:
    value = fields.get(field, [0])[-1]
    if not isinstance(value, int):
        raise ValueError(f"field {field} of a footer is not a number")
    return value


def _text(fields: Fields, field: int) -> str:
    value = fields.get(field, [b""])[-1]
    return value.decode() if isinstance(value, bytes) else ""


def _fields(data: bytes | int) -> Fields:
    """A message of Protocol Buffers."""
    if isinstance(data, int):
        raise ValueError("the footer has a number where a message of Protocol Buffers must be")
    found: Fields = {}
    source = io.BytesIO(data)
    while (tag := read_varint(source)) is not None:
        field, wire = divmod(tag, 8)
        if wire not in (0, 1, 2, 5):
            raise ValueError(f"a footer has a field of kind {wire}")
        number = {1: 8, 5: 4}.get(wire) or read_varint(source)
        value = number if number is None or wire == 0 else source.read(number)
        if number is None or value is None or (isinstance(value, bytes) and len(value) < number):
            raise ValueError("a footer is cut off")
        found.setdefault(field, []).append(value)
    return found


def _unpack(data: bytes, kind: int) -> bytes:
    """The bytes of a footer, which is compressed in chunks."""
    if kind == 0:
        return data
    if kind not in _KINDS:
        raise ValueError(f"compression of kind {kind} is not supported")
    parts, at = [], 0
    while at < len(data):
        header = int.from_bytes(data[at : at + 3], "little")
        chunk = data[at + 3 : at + 3 + (header >> 1)]
        parts.append(chunk if header & 1 else _KINDS[kind](chunk))
        at += 3 + (header >> 1)
    return b"".join(parts)


def _unpack_lz4(data: bytes) -> bytes:
    """A block of LZ4, which does not say how many bytes it holds: pyarrow has to know."""
    out, at = bytearray(), 0

    def length(first: int) -> int:
        nonlocal at
        total = first
        while first == 15:
            total += data[at]
            first, at = (15 if data[at] == 255 else 0), at + 1
        return total

    while at < len(data):
        token, at = data[at], at + 1
        literals = length(token >> 4)
        out += data[at : at + literals]
        at += literals
        if at >= len(data):
            break
        distance, at = int.from_bytes(data[at : at + 2], "little"), at + 2
        for _ in range(length(token & 15) + 4):
            out.append(out[-distance])
        if len(out) > _LARGEST:
            raise ValueError("a footer is too large")
    return bytes(out)


def _stream(name: str) -> Callable[[bytes], bytes]:
    return lambda data: pa.CompressedInputStream(pa.BufferReader(data), name).read(_LARGEST)


_KINDS: dict[int, Callable[[bytes], bytes]] = {
    1: lambda data: zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, _LARGEST),
    2: lambda data: unpack_snappy(data, _LARGEST),
    4: _unpack_lz4,
    5: _stream("zstd"),
    6: _stream("brotli"),
}
