"""The bytes of a landing file: opened, hashed while they are read, and unchanged since they were listed."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from lakeupsert.landing.formats import blocks
from lakeupsert.landing.formats.blocks import (
    ChangedFileError,
    DamagedFileError,
    LandingInput,
    Source,
    UnreadableFileError,
)
from lakeupsert.landing.formats.registry import LandingFormat
from lakeupsert.storage import (
    DamagedObjectError,
    ForeignObjectError,
    NotFoundError,
    ObjectInfo,
    ObjectReader,
    open_listed,
)

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

WHOLE_BYTES = 1 << 26
"""Parquet and ORC files up to this many bytes are read as a whole, because the hash needs all bytes in order."""


@contextmanager
def open_landed(store: ObjectReader, path: str, listed: ObjectInfo | None = None) -> Iterator[pa.NativeFile]:
    """A landing file, as `open_listed` opens it (None: as it is now). Raises DamagedFileError if it is a damaged member of an
    archive, and UnreadableFileError if it is not read there."""
    try:
        with store.open(path) if listed is None else open_listed(store, listed) as source:
            yield source
    except DamagedObjectError as e:
        raise DamagedFileError.because(path, str(e)) from e
    except ForeignObjectError as e:
        raise UnreadableFileError(path, f"{e} Land the file itself there.") from e


class _HashedFile:
    """Hashes a file while it is read, each byte once even if it is read again from the beginning."""

    def __init__(self, source: pa.NativeFile, sha256: "Hash") -> None:
        self._source = source
        self._sha256 = sha256
        self._done = 0

    def read(self, size: int) -> bytes:
        place = self._source.tell()
        data: bytes = self._source.read(size)
        self._sha256.update(memoryview(data)[max(0, self._done - place) :])
        self._done = max(self._done, place + len(data))
        return data

    def seek(self, place: int) -> None:
        self._source.seek(place)


def hashed_source(source: pa.NativeFile, file: LandingInput, kind: LandingFormat, sha256: "Hash") -> Source | None:
    """``source``, hashing the whole file while it is read; None if the file must be read again for its hash."""
    if not kind.seekable:
        return _HashedFile(source, sha256)
    if file.size > WHOLE_BYTES:
        return None
    whole = source.read_buffer()
    sha256.update(whole)
    in_memory: Source = pa.BufferReader(whole)
    return in_memory


def content_hash(store: ObjectReader, path: str, listed: ObjectInfo | None = None) -> str:
    """SHA-256 of a whole object, in hexadecimal digits. Empty if the store can't give its bytes.

    Raises ChangedFileError if the object was deleted, or may have been replaced since it was ``listed``.
    """
    sha256 = hashlib.sha256()
    try:
        hash_object(store, path, listed, sha256)
    except NotFoundError as e:
        raise ChangedFileError(path) from e
    except UnreadableFileError:
        return ""
    if listed is not None and not store.pinned:
        check_unchanged(store, listed)
    return sha256.hexdigest()


def hash_object(store: ObjectReader, path: str, listed: ObjectInfo | None, sha256: "Hash") -> None:
    """Update ``sha256`` with the content of a whole object. Raises what `open_landed` does."""
    with open_landed(store, path, listed) as source:
        while read := source.read(blocks.BLOCK_BYTES):
            sha256.update(read)


def check_unchanged(store: ObjectReader, listed: ObjectInfo) -> None:
    """Raise ChangedFileError if the object was deleted or replaced since it was ``listed``."""
    if store.head(listed.name) != listed:
        raise ChangedFileError(listed.name)
