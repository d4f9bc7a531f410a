"""A pass over files whose rows go to several merges: it copies each row to the piece of its bucket.

Reads     adopted, stored or appended files of a partition, each of them once
Writes    packs of files in pieces, under names of their own. Commits nothing
Repeat    safe: files that no manifest names count for nothing

Without it, each of 128 merges of an adopted partition would read the whole partition. Memory: `HELD_BYTES`, and a block of a
file.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
import pyarrow as pa

from lakeupsert.landing.adopted import ADOPTED_RANK, stream_adopted
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.buckets import cut_into_pieces
from lakeupsert.rows.datafiles import stream_file
from lakeupsert.rows.filewriter import Footer, PackWriter
from lakeupsert.rows.rank import sort_by_key
from lakeupsert.rows.streams import compress, decompress
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.manifest import DataFile, Part
from lakeupsert.table.spec import TableSpec

HELD_BYTES = 256 << 20
"""Compressed bytes that a cut holds before it writes them, at most. More: fewer and larger pieces. Less: a worker needs less
memory."""
PEAK = 3
"""Peak memory of a cut, as a multiple of what it holds."""
LEAST_HELD = 16 << 20

Kind = Literal["adopted", "stored", "appended"]


@dataclass(frozen=True)
class CutTask:
    """Files of one bucket of a partition, to be copied into 2^``bits`` pieces of the partition.

    Attributes:
        kind: how the rows are read and what columns the pieces have: those of `base_schema`, of adopted files also the columns
            that rank them, or those of `arriving_schema`.
        first: of adopted files, the number of the first one among all of the partition.
        up_to, start: as in `merge.MergeTask`.
    """

    partition: str
    kind: Kind
    files: tuple[DataFile, ...]
    first: int
    bits: int
    up_to: int
    start: int

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class CutOutput(msgspec.Struct, frozen=True):
    """The files that replace those of a task, with the same rows, in key order within each piece."""

    files: tuple[DataFile, ...]

    @property
    def objects(self) -> set[str]:
        """Objects in the store that the output names."""
        return {file.name for file in self.files}


Cuts = list[CutOutput | Exception]
"""As `engine.merge.Merged`."""


def cut(store: ObjectStore, spec: TableSpec, spec_version: int, memory_limit: int | None, task: CutTask) -> CutOutput:
    """Do one task. Raises DamagedTableError, StoreUnavailableError, and RefusedError if an adopted row has no key."""
    most = HELD_BYTES if memory_limit is None else max(LEAST_HELD, min(HELD_BYTES, memory_limit // PEAK))
    of, renames = task.files[0], len(spec.renames)
    footer = Footer(spec.table_id, "cut", str(task.up_to), spec_version, task.partition, of.bucket, of.bits, renames)
    held = HeldPieces(spec, columns_of(spec, task.kind), footer, task.bits)
    new_name = partial(TableObjects.new, "cut", task.start, task.partition)
    return CutOutput(write_packs(store, new_name, _rows(store, spec, task), held, most))


def write_packs(
    store: ObjectStore, new_name: Callable[[], str], blocks: Iterable[Rows], held: "HeldPieces", most: int
) -> tuple[DataFile, ...]:
    """Write rows in pieces, one file a pack. A pack is written when ``held`` has ``most`` compressed bytes, and at the end."""
    files = []
    for rows in blocks:
        held.add(rows)
        if held.bytes >= most:
            files.append(held.write(store, new_name()))
    if held.bytes:
        files.append(held.write(store, new_name()))
    return tuple(files)


def columns_of(spec: TableSpec, kind: Kind) -> pa.Schema:
    """The columns of the pieces."""
    if kind == "adopted":
        return pa.schema([*spec.base_schema, *ADOPTED_RANK])
    return spec.base_schema if kind == "stored" else spec.arriving_schema


def _rows(store: ObjectStore, spec: TableSpec, task: CutTask) -> Iterator[Rows]:
    schema = columns_of(spec, task.kind)
    for number, file in enumerate(task.files, task.first):
        if task.kind == "adopted":
            yield from stream_adopted(store, file, spec, task.partition, number)
        else:
            yield from stream_file(store, file, schema, spec=spec)


class HeldPieces:
    """Rows of each of 2^``bits`` pieces, compressed: three times as many fit, and every piece gets larger.

    ``schema`` and ``footer`` are those of the files that it writes; the footer's bucket has all rows.
    """

    def __init__(self, spec: TableSpec, schema: pa.Schema, footer: Footer, bits: int) -> None:
        self._spec, self._schema, self._footer = spec, schema, footer
        self._bits = bits - footer.bits
        self._clear()

    def _clear(self) -> None:
        self.bytes = 0
        self._blocks: list[list[bytes]] = [[] for _ in range(1 << self._bits)]

    def add(self, rows: Rows) -> None:
        self._read = rows.schema
        pieces = cut_into_pieces(rows, self._footer, self._bits, self._spec)
        for blocks, piece in zip(self._blocks, pieces, strict=True):
            if piece.num_rows:
                blocks.append(compress(piece))
                self.bytes += len(blocks[-1])

    def write(self, store: ObjectStore, name: str) -> DataFile:
        """Write what is held, and hold nothing any more."""
        with PackWriter(store, name, self._schema, self._footer, self._spec) as pack:
            file = pack.write_file(map(self._decompress, self._blocks), Part(self._footer.bucket, self._footer.bits))
        self._clear()
        return file

    def _decompress(self, blocks: Sequence[bytes]) -> Rows:
        rows = pa.Table.from_batches(itertools.chain.from_iterable(map(decompress, blocks)), self._read)
        return rows.take(sort_by_key(rows, self._spec.stored_key))
