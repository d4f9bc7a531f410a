"""Deletion vectors: the superseded rows of a data file, so that the file itself never changes.

A vector is a Roaring bitmap of row positions, in the bytes that Delta and Iceberg use (docs/FORMAT.md, "Deletion vectors").
Exports to both copy these bytes.
"""

import zlib
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyroaring import BitMap64

from lakeupsert.errors import DamagedTableError
from lakeupsert.rows.arrays import Indices, Rows
from lakeupsert.storage import NotFoundError, ObjectStore
from lakeupsert.table import metadata
from lakeupsert.table.layout import partition_of, rebuild_command
from lakeupsert.table.manifest import DataFile, DeletionVector

Positions = NDArray[np.uint64]
"""Positions of rows in a data file, ascending, counted from 0."""
MAGIC = (1681511377).to_bytes(4, "little")
INLINE_BYTES = 4 << 10
"""A commit stores its vectors in its manifest if they have no more bytes than this in total. Larger: manifests grow, which every
publish and reader reads. Smaller: more merges write one more object, and every reader reads it."""


def deleted_positions(store: ObjectStore, file: DataFile) -> Positions:
    """The positions of the superseded rows of a file.

    Raises:
        DamagedTableError: the vector is missing or damaged.
    """
    vector = file.deleted
    if vector is None:
        return np.empty(0, np.uint64)
    data = vector_bytes(store, file, vector)
    try:
        positions = np.asarray(BitMap64.deserialize(bytes(data[4:])).to_array(), np.uint64)
        if len(positions) != vector.rows or (len(positions) and positions[-1] >= file.rows):
            raise ValueError(f"it has {len(positions)} positions up to {positions[-1:]}, expected {vector.rows}")
    except ValueError as e:
        raise _damaged(store, file, e) from e
    return positions


def vector_bytes(store: ObjectStore, file: DataFile, vector: DeletionVector) -> bytes:
    """The bytes of the vector of a file. Raises DamagedTableError if they are missing or damaged."""
    try:
        data = vector.inline or store.get(vector.name, (vector.at, vector.size))
        if vector.crc is not None and zlib.crc32(data) != vector.crc:
            raise ValueError("its checksum is wrong")
        if data[:4] != MAGIC:
            raise ValueError(f"it begins with {bytes(data[:4])!r}")
    except (NotFoundError, ValueError) as e:
        raise _damaged(store, file, e) from e
    return data


def frame(data: bytes) -> bytes:
    """Make of a vector what Delta and Iceberg have among others in an object: its length, the vector, its CRC-32."""
    return len(data).to_bytes(4) + data + zlib.crc32(data).to_bytes(4)


def _damaged(store: ObjectStore, file: DataFile, why: Exception) -> DamagedTableError:
    partition = partition_of(file.name)
    rebuild = f", or rebuild the partition from its landing files: `{rebuild_command(partition)}`" if partition else ""
    return DamagedTableError(
        "damaged-deletion-vector",
        f"The deletion vector of {store.uri(file.name)} can't be read: {why}. Something other than lakeupsert deleted or changed "
        "it.",
        next=metadata.FROM_BACKUP + rebuild,
        partition=partition,
    )


def drop_deleted(rows: Rows | pa.RecordBatch, deleted: Positions, at: int) -> Rows | pa.RecordBatch:
    """``rows``, which begin at position ``at`` of their file, without the positions in ``deleted``."""
    if not len(deleted):
        return rows
    dead = deleted[np.searchsorted(deleted, at) : np.searchsorted(deleted, at + rows.num_rows)]
    if not len(dead):
        return rows
    lives = np.ones(rows.num_rows, bool)
    lives[(dead - np.uint64(at)).astype(np.int64)] = False
    return rows.filter(pa.array(lives))


def keep_only(rows: pa.RecordBatch, wanted: Positions, at: int) -> pa.RecordBatch:
    """Of ``rows``, which begin at position ``at`` of their file, those at the positions ``wanted``."""
    here = wanted[np.searchsorted(wanted, at) : np.searchsorted(wanted, at + rows.num_rows)]
    return rows.take(pa.array(here - np.uint64(at)))


def mark_deleted(
    store: ObjectStore, files: Sequence[DataFile], superseded: Sequence[Indices], new_name: Callable[[], str]
) -> list[DataFile]:
    """``files`` with the rows superseded that are in ``superseded``, for each file all positions, also those of its vector.

    Files without a remaining live row are left out.
    """
    result = []
    for file, dead in zip(files, superseded, strict=True):
        if len(dead) < file.rows:
            result.append(without_rows(file, dead) if len(dead) > file.rows - file.live else file)
    [result] = store_vectors(store, [result], new_name)
    return result


def without_rows(file: DataFile, superseded: Indices) -> DataFile:
    """``file`` with an inline vector of all these positions."""
    bitmap = BitMap64(np.asarray(superseded, np.uint64))
    bitmap.run_optimize()
    data = MAGIC + bytes(bitmap.serialize())
    return msgspec.structs.replace(file, deleted=DeletionVector(rows=len(superseded), size=len(data), inline=data))


def store_vectors(
    store: ObjectStore, files: Sequence[Sequence[DataFile]], new_name: Callable[[], str]
) -> list[list[DataFile]]:
    """The same lists of files. If their inline vectors have many bytes in total, these are in one new object."""
    result = [list(of_list) for of_list in files]
    inline = [file.deleted.inline for of_list in files for file in of_list if file.deleted]
    if sum(map(len, inline)) <= INLINE_BYTES:
        return result
    name, at = new_name(), 0
    with store.write(name) as sink:
        sink.write(b"".join(inline))
    for of_list in result:
        for number, file in enumerate(of_list):
            if file.deleted and (data := file.deleted.inline):
                vector = msgspec.structs.replace(file.deleted, name=name, at=at, inline=b"", crc=zlib.crc32(data))
                of_list[number] = msgspec.structs.replace(file, deleted=vector)
                at += len(data)
    return result
