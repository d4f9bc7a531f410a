"""The objects of an Iceberg table below its metadata: manifest lists, manifests and position deletes, as bytes.

A manifest list has the files of all partitions in runs: the partitions in the order of their names, cut where a run would have
more than `MOST_ENTRIES` files. A run has a manifest of data files and, if rows are superseded, one of delete files. The header of
the list says with which partition each manifest begins, so a commit reads and writes the runs with changed partitions alone.
"""

import datetime as dt
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar, cast

import fastavro
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.conversions import to_bytes
from pyiceberg.manifest import (
    DATA_FILE_TYPE,
    MANIFEST_LIST_FILE_SCHEMAS,
    data_file_with_partition,
    manifest_entry_schema_with_data_file,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField, PrimitiveType, StringType, StructType
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

from lakeupsert.publishers.iceberg_stats import ColumnMetrics, IcebergStats
from lakeupsert.rows.vectors import Positions
from lakeupsert.table.layout import partition_of, partition_scalars
from lakeupsert.table.manifest import DataFile
from lakeupsert.table.metadata import damaged
from lakeupsert.table.spec import FIELD_ID, TableSpec

Read = TypeVar("Read")

MOST_ENTRIES = 4096
"""Files in a manifest. More: a night that touches few partitions writes more. Fewer: a night that touches all writes more
objects, and engines read more."""
_FIRST = "lakeupsert.first"
_VERSION: Literal[2] = 2
_FILE_PATH, _POS = 2147483546, 2147483545
"""Iceberg's field ids of the columns of position deletes."""
_REFERENCED = NestedField(143, "referenced_data_file", StringType(), required=False)
_EXISTING, _ADDED, _DELETED = 0, 1, 2
_DATA, _DELETES = 0, 1
"""What a manifest or a file in it holds."""


@dataclass(frozen=True)
class Entry:
    """A file of the table.

    Attributes:
        name: the object's.
        rows: for a delete file the number of superseded rows.
        of: for a delete file the name of its data file; empty for a data file.
        snapshot, sequence: when it was added; None: by the snapshot that is written now.
        metrics: of some columns of a data file, as they were when it was added.
    """

    name: str
    rows: int
    bytes: int
    of: str = ""
    snapshot: int | None = None
    sequence: int | None = None
    metrics: tuple[ColumnMetrics, ...] = ()

    @property
    def partition(self) -> str:
        return partition_of(self.of or self.name) or ""


class _Bounds(msgspec.Struct, frozen=True):
    """Of a partition column in a manifest."""

    contains_null: bool
    contains_nan: bool | None
    lower_bound: bytes | None
    upper_bound: bytes | None


class _Count(msgspec.Struct, frozen=True):
    """An item of a map in a manifest."""

    key: int
    value: int


class _Bound(msgspec.Struct, frozen=True):
    """An item of a map in a manifest."""

    key: int
    value: bytes


class _DataFile(msgspec.Struct, frozen=True):
    file_path: str
    record_count: int
    file_size_in_bytes: int
    referenced_data_file: str | None = None
    value_counts: tuple[_Count, ...] | None = None
    null_value_counts: tuple[_Count, ...] | None = None
    lower_bounds: tuple[_Bound, ...] | None = None
    upper_bounds: tuple[_Bound, ...] | None = None

    @property
    def metrics(self) -> tuple[ColumnMetrics, ...]:
        nulls = {one.key: one.value for one in self.null_value_counts or ()}
        lower = {one.key: one.value for one in self.lower_bounds or ()}
        upper = {one.key: one.value for one in self.upper_bounds or ()}
        return tuple(
            ColumnMetrics(one.key, one.value, nulls[one.key], lower.get(one.key), upper.get(one.key))
            for one in self.value_counts or ()
        )


class _Record(msgspec.Struct, frozen=True):
    """An entry as a manifest has it."""

    status: int
    snapshot_id: int | None
    sequence_number: int | None
    data_file: _DataFile


class ManifestFile(msgspec.Struct, frozen=True):
    """A manifest as its list names it, in Iceberg's words. ``content`` is 1 if it has delete files."""

    manifest_path: str
    manifest_length: int
    partition_spec_id: int
    content: int
    sequence_number: int
    min_sequence_number: int
    added_snapshot_id: int
    added_files_count: int
    existing_files_count: int
    deleted_files_count: int
    added_rows_count: int
    existing_rows_count: int
    deleted_rows_count: int
    partitions: list[_Bounds] | None = None
    key_metadata: bytes | None = None


@dataclass(frozen=True)
class Run:
    """Consecutive partitions and their manifests. ``first``: the name of the first partition."""

    first: str
    manifests: tuple[ManifestFile, ...]


@dataclass(frozen=True)
class FileReader:
    """Reads the files of one table.

    Attributes:
        root: the table's address, to which names are relative. Iceberg's paths are absolute, and not escaped.
    """

    root: str

    def address(self, name: str) -> str:
        return f"{self.root}/{name}"

    def name(self, address: str) -> str:
        return address.removeprefix(f"{self.root}/")

    def entries(self, manifest: ManifestFile, data: bytes) -> list[Entry]:
        """The files of a manifest, without those that it says are gone."""
        found = []
        for record in _records(data, manifest.manifest_path, "a manifest", _Record):
            file, sequence, snapshot = record.data_file, record.sequence_number, record.snapshot_id
            if record.status != _DELETED:
                found.append(
                    Entry(
                        name=self.name(file.file_path),
                        rows=file.record_count,
                        bytes=file.file_size_in_bytes,
                        of=self.name(file.referenced_data_file or ""),
                        snapshot=manifest.added_snapshot_id if snapshot is None else snapshot,
                        sequence=manifest.sequence_number if sequence is None else sequence,
                        metrics=file.metrics,
                    )
                )
        return found

    def runs(self, data: bytes, where: str) -> list[Run]:
        """The runs of a manifest list that `manifest_list` wrote; ``where`` is its address."""
        what = "a manifest list of the publisher"
        manifests = _records(data, where, what, ManifestFile)
        firsts: list[str] = json.loads(fastavro.reader(io.BytesIO(data)).metadata.get(_FIRST, "[]"))
        if len(firsts) != len(manifests):
            raise damaged(where, what, "it does not say with which partition each manifest begins")
        found: list[Run] = []
        for first, manifest in zip(firsts, manifests, strict=True):
            if found and found[-1].first == first:
                found[-1] = replace(found[-1], manifests=(*found[-1].manifests, manifest))
            else:
                found.append(Run(first, (manifest,)))
        return found


@dataclass(frozen=True)
class FileWriter(FileReader):
    """Writes the files of one table. ``schema``, ``partitions``: the table's, in Iceberg's words."""

    spec: TableSpec
    schema: Schema
    partitions: PartitionSpec

    def data(self, file: DataFile) -> Entry:
        """The entry of a new data file."""
        return Entry(file.name, file.rows, file.bytes, metrics=self._stats.metrics(file))

    def manifest(
        self, entries: Iterable[Entry], gone: Iterable[Entry], name: str, snapshot: int, sequence: int
    ) -> tuple[bytes, ManifestFile]:
        """A manifest under that name, and what its list says of it. All files are of one kind; at least one is needed."""
        marked = [(_ADDED if entry.snapshot is None else _EXISTING, entry) for entry in entries]
        marked += [(_DELETED, entry) for entry in gone]
        content = _DELETES if marked[0][1].of else _DATA
        header = {
            "schema": self.schema.model_dump_json(),
            "schema-id": str(self.schema.schema_id),
            "partition-spec": f"[{','.join(field.model_dump_json() for field in self.partitions.fields)}]",
            "partition-spec-id": str(self.partitions.spec_id),
            "format-version": str(_VERSION),
            "content": "deletes" if content else "data",
        }
        records = [self._record(status, entry, snapshot) for status, entry in marked]
        data = _avro(self._entry_schema, records, header)
        older = [entry.sequence for status, entry in marked if status == _EXISTING and entry.sequence is not None]
        counts, rows = [0, 0, 0], [0, 0, 0]
        for status, entry in marked:
            counts[status] += 1
            rows[status] += entry.rows
        return data, ManifestFile(
            manifest_path=self.address(name),
            manifest_length=len(data),
            partition_spec_id=self.partitions.spec_id,
            content=content,
            sequence_number=sequence,
            min_sequence_number=min(older, default=sequence),
            added_snapshot_id=snapshot,
            added_files_count=counts[_ADDED],
            existing_files_count=counts[_EXISTING],
            deleted_files_count=counts[_DELETED],
            added_rows_count=rows[_ADDED],
            existing_rows_count=rows[_EXISTING],
            deleted_rows_count=rows[_DELETED],
            partitions=self._bounds({entry.partition for _, entry in marked}),
        )

    def manifest_list(self, runs: Sequence[Run], snapshot: int, parent: int | None, sequence: int) -> bytes:
        header = {
            "snapshot-id": str(snapshot),
            "parent-snapshot-id": "null" if parent is None else str(parent),
            "sequence-number": str(sequence),
            "format-version": str(_VERSION),
            _FIRST: json.dumps([run.first for run in runs for _ in run.manifests]),
        }
        listed = [msgspec.to_builtins(m, builtin_types=(bytes,)) for run in runs for m in run.manifests]
        return _avro(_LIST_SCHEMA, listed, header)

    def deletes(self, name: str, positions: Positions) -> bytes:
        """The position deletes of the data file ``name``."""
        places = pa.DictionaryArray.from_arrays(np.zeros(len(positions), np.int32), [self.address(name)])
        table = pa.table([places.cast(pa.string()), pa.array(positions.astype(np.int64))], schema=_DELETES_SCHEMA)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", use_dictionary=["file_path"])
        return cast(bytes, sink.getvalue().to_pybytes())

    @cached_property
    def _stats(self) -> IcebergStats:
        return IcebergStats(self.schema)

    @cached_property
    def _entry_schema(self) -> object:
        fields = (*DATA_FILE_TYPE[_VERSION].fields, _REFERENCED)
        partition = data_file_with_partition(self._partition_type, _VERSION).fields
        (own,) = (field for field in partition if field.name == "partition")
        file = StructType(*(own if field.name == "partition" else field for field in fields))
        return _avro_schema(manifest_entry_schema_with_data_file(_VERSION, file), "manifest_entry")

    @cached_property
    def _partition_type(self) -> StructType:
        return self.partitions.partition_type(self.schema)

    def _record(self, status: int, entry: Entry, snapshot: int) -> dict[str, object]:
        path = entry.of and self.address(entry.of)
        own = [ColumnMetrics(_FILE_PATH, entry.rows, 0, path.encode(), path.encode())] if path else entry.metrics
        file: dict[str, object] = {
            "content": _DELETES if path else _DATA,
            "file_path": self.address(entry.name),
            "file_format": "PARQUET",
            "partition": self._values(entry.partition),
            "record_count": entry.rows,
            "file_size_in_bytes": entry.bytes,
            "value_counts": _items((one.id, one.values) for one in own),
            "null_value_counts": _items((one.id, one.nulls) for one in own),
            "lower_bounds": _items((one.id, one.lower) for one in own),
            "upper_bounds": _items((one.id, one.upper) for one in own),
            "referenced_data_file": path or None,
        }
        return {
            "status": status,
            "snapshot_id": snapshot if entry.snapshot is None or status == _DELETED else entry.snapshot,
            "sequence_number": entry.sequence,
            "file_sequence_number": entry.sequence,
            "data_file": file,
        }

    def _values(self, partition: str) -> dict[str, object]:
        """A partition's values under the names that they have in Avro."""
        values = [value.as_py() for value in partition_scalars(self.spec, partition).values()]
        return dict(zip(self._avro_names, values, strict=True))

    @cached_property
    def _avro_names(self) -> list[str]:
        schema = AvroSchemaConversion().iceberg_to_avro(Schema(*self._partition_type.fields), "partition")
        fields: list[dict[str, str]] = cast(dict[str, list[dict[str, str]]], schema)["fields"]
        return [field["name"] for field in fields]

    def _bounds(self, partitions: Iterable[str]) -> list[_Bounds]:
        values = [partition_scalars(self.spec, partition) for partition in partitions]
        found = []
        for field in self._partition_type.fields:
            column = [of[field.name].as_py() for of in values]
            type_ = cast(PrimitiveType, field.field_type)
            found.append(_Bounds(False, None, _bytes(type_, min(column)), _bytes(type_, max(column))))
        return found


_DELETES_SCHEMA = pa.schema(
    [
        pa.field("file_path", pa.string(), nullable=False, metadata={FIELD_ID: str(_FILE_PATH).encode()}),
        pa.field("pos", pa.int64(), nullable=False, metadata={FIELD_ID: str(_POS).encode()}),
    ]
)


def _avro_schema(schema: Schema, name: str) -> object:
    return fastavro.parse_schema(cast(dict[str, object], AvroSchemaConversion().iceberg_to_avro(schema, name)))


_LIST_SCHEMA = _avro_schema(MANIFEST_LIST_FILE_SCHEMAS[_VERSION], "manifest_file")


def _avro(schema: object, records: Iterable[object], header: dict[str, str]) -> bytes:
    sink = io.BytesIO()
    fastavro.writer(sink, cast(dict[str, object], schema), records, codec="deflate", metadata=header)
    return sink.getvalue()


def _records(data: bytes, where: str, what: str, type_: type[Read]) -> list[Read]:
    try:
        return msgspec.convert(list(fastavro.reader(io.BytesIO(data))), list[type_])  # type: ignore[valid-type]
    except Exception as e:  # whatever a decoder meets in damaged bytes
        raise damaged(where, what, repr(e)) from e


def _items(pairs: Iterable[tuple[int, int | bytes | None]]) -> list[dict[str, int | bytes]] | None:
    """A map as manifests have it, without what is not known; None if nothing is."""
    return [{"key": id_, "value": value} for id_, value in pairs if value is not None] or None


def _bytes(type_: PrimitiveType, value: str | int | bool | dt.date) -> bytes:
    return to_bytes(type_, (value - dt.date(1970, 1, 1)).days if isinstance(value, dt.date) else value)
