"""The superseded rows of data files in Iceberg's words, made from their deletion vectors: position deletes, one object a data
file, for format version 2; for version 3 the vectors themselves, many in a Puffin object."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert import clock
from lakeupsert.engine.runs import runs
from lakeupsert.publishers import VECTOR_OBJECT_BYTES, PublishedTable
from lakeupsert.publishers.iceberg_files import FILE_PATH_ID, MARK_LENGTH, POSITION_DELETES, POSITION_ID, Entry
from lakeupsert.rows.vectors import Positions, deleted_positions, frame, vector_bytes
from lakeupsert.table.manifest import DataFile
from lakeupsert.table.spec import FIELD_ID

_MAGIC = b"PFA1"
_ROW_POSITION_ID = 2147483645
"""Iceberg's field id of a row's position in its file."""
_LISTED_BYTES = 300
"""More than what the footer of a Puffin object has of a vector beside the address."""
_SCHEMA = pa.schema(
    [
        pa.field("file_path", pa.string(), nullable=False, metadata={FIELD_ID: str(FILE_PATH_ID).encode()}),
        pa.field("pos", pa.int64(), nullable=False, metadata={FIELD_ID: str(POSITION_ID).encode()}),
    ]
)


@dataclass(frozen=True)
class DeleteWriter(ABC):
    """Writes the superseded rows of data files.

    Attributes:
        address: of an object in the store.
        prefix: with which the names of new objects begin.
    """

    table: PublishedTable
    address: Callable[[str], str]
    prefix: str

    @abstractmethod
    def write(self, files: Sequence[DataFile]) -> dict[str, Entry]:
        """Returns an entry for each file by its name. Each file must have a deletion vector."""


class PositionDeletes(DeleteWriter):
    """Writes an object for each data file, because Polars' own reader wants it."""

    def write(self, files: Sequence[DataFile]) -> dict[str, Entry]:
        return {entry.of: entry for entry in self.table.map_concurrently(self._write, files)}

    def _write(self, file: DataFile) -> Entry:
        positions = deleted_positions(self.table.objects.store, file)
        body, mark = position_deletes(self.address(file.name), positions), mark_of(file)
        # A name that could return might be deleted by a vacuum that saw it unused.
        name = f"{self.prefix}{clock.new_id()}-{mark}{POSITION_DELETES}"
        self.table.put(name, body)
        return Entry(name, len(positions), len(body), of=file.name, mark=mark)


class Puffins(DeleteWriter):
    """Writes deletion vectors into few objects."""

    def write(self, files: Sequence[DataFile]) -> dict[str, Entry]:
        blobs = self.table.map_concurrently(self._blob, files)
        packs = list(runs(zip(files, blobs, strict=True), lambda pair: pair[1].most_bytes, VECTOR_OBJECT_BYTES))
        return {entry.of: entry for entries in self.table.map_concurrently(self._write, packs) for entry in entries}

    def _blob(self, file: DataFile) -> "VectorBlob":
        assert file.deleted is not None
        data = frame(vector_bytes(self.table.objects.store, file, file.deleted))
        return VectorBlob(self.address(file.name), file.deleted.rows, data)

    def _write(self, pack: Sequence[tuple[DataFile, "VectorBlob"]]) -> list[Entry]:
        files, blobs = zip(*pack, strict=True)
        body, name = puffin(blobs), f"{self.prefix}{clock.new_id()}.puffin"
        self.table.put(name, body)
        return [
            Entry(name, blob.rows, len(body), of=file.name, mark=mark_of(file), span=(at, len(blob.data)))
            for file, blob, at in zip(files, blobs, _begins(blobs), strict=True)
        ]


class VectorBlob(NamedTuple):
    """A deletion vector in a Puffin object.

    Attributes:
        of: the address of its data file.
        rows: how many are superseded.
        data: as `rows.vectors.frame` makes it.
    """

    of: str
    rows: int
    data: bytes

    @property
    def most_bytes(self) -> int:
        """What it takes of an object, whose footer has its address."""
        return len(self.data) + len(self.of.encode()) + _LISTED_BYTES


def puffin(blobs: Sequence[VectorBlob]) -> bytes:
    """A Puffin object with these vectors."""
    listed = [
        {
            "type": "deletion-vector-v1",
            "fields": [_ROW_POSITION_ID],
            "snapshot-id": -1,
            "sequence-number": -1,
            "offset": at,
            "length": len(blob.data),
            "properties": {"referenced-data-file": blob.of, "cardinality": str(blob.rows)},
        }
        for blob, at in zip(blobs, _begins(blobs), strict=True)
    ]
    footer = msgspec.json.encode({"blobs": listed, "properties": {"created-by": "lakeupsert"}})
    flags = bytes(4)
    content = (_MAGIC, *(blob.data for blob in blobs))
    return b"".join((*content, _MAGIC, footer, len(footer).to_bytes(4, "little"), flags, _MAGIC))


def position_deletes(address: str, positions: Positions) -> bytes:
    """The position deletes of the data file at ``address``."""
    places = pa.DictionaryArray.from_arrays(np.zeros(len(positions), np.int32), [address])
    table = pa.table([places.cast(pa.string()), pa.array(positions.astype(np.int64))], schema=_SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=["file_path"])
    return cast(bytes, sink.getvalue().to_pybytes())


def mark_of(file: DataFile) -> str:
    """Tells the deletion vector of a file from its others."""
    assert file.deleted is not None
    return hashlib.sha256(file.deleted.identity.encode()).hexdigest()[:MARK_LENGTH]


def _begins(blobs: Sequence[VectorBlob]) -> list[int]:
    """Where each begins in its object."""
    return list(accumulate((len(blob.data) for blob in blobs[:-1]), initial=len(_MAGIC)))
