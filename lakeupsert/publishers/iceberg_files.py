"""The objects of an Iceberg table between its metadata and its files: manifest lists and manifests, as bytes.

A manifest list has the files of all partitions in runs: the partitions in the order of their names, cut where a run would have
more than `MOST_ENTRIES` files. A run has a manifest of data files and, if rows are superseded, one of delete files. The header of
the list says with which partition each manifest begins, so a commit reads and writes the runs with changed partitions alone.
"""

import datetime as dt
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, cast

import fastavro
import msgspec
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

from lakeupsert.config import FormatVersion
from lakeupsert.decoding import convert
from lakeupsert.publishers.iceberg_catalog import RESET
from lakeupsert.publishers.iceberg_types import ColumnMetrics, metrics_of, primitive_types
from lakeupsert.table.layout import partition_of, partition_scalars
from lakeupsert.table.manifest import DataFile
from lakeupsert.table.metadata import damaged
from lakeupsert.table.spec import TableSpec

Read = TypeVar("Read")

MOST_ENTRIES = 4096
"""Files in a manifest. More: a night that touches few partitions writes more. Fewer: a night that touches all writes more
objects, and engines read more."""
_FIRST = "lakeupsert.first"
_MARKS = "lakeupsert.vectors"
"""In the header of a manifest of deletion vectors: the mark of each entry."""
POSITION_DELETES = ".deletes"
"""The ending of objects with position deletes, which are Parquet. Programs that list folders would read `.parquet`."""
MARK_LENGTH = 16
FILE_PATH_ID, POSITION_ID = 2147483546, 2147483545
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
        mark: for a delete file what tells the deletion vector that it shows from others of its data file.
        span: where a deletion vector begins in its object, and its bytes; None: it is a whole object of position deletes.
        snapshot, sequence: when it was added; None: by the snapshot that is written now.
        first_row: the row id of the first row of a data file; None: it gets one from the snapshot that is written now, or the
            table has format version 2.
        metrics: of some columns of a data file, as they were when it was added.
    """

    name: str
    rows: int
    bytes: int
    of: str = ""
    mark: str = ""
    span: tuple[int, int] | None = None
    snapshot: int | None = None
    sequence: int | None = None
    first_row: int | None = None
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
    first_row_id: int | None = None
    content_offset: int | None = None
    content_size_in_bytes: int | None = None

    @property
    def span(self) -> tuple[int, int] | None:
        if self.content_offset is None or self.content_size_in_bytes is None:
            return None
        return self.content_offset, self.content_size_in_bytes

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
    first_row_id: int | None = None


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
        records, header = _read(data, manifest.manifest_path, "a manifest", _Record)
        marks: list[str] | None = json.loads(header.get(_MARKS, "null"))
        next_row, found = manifest.first_row_id, []
        for place, record in enumerate(records):
            if record.status == _DELETED:
                continue
            file, sequence, snapshot = record.data_file, record.sequence_number, record.snapshot_id
            of, first_row = self.name(file.referenced_data_file or ""), file.first_row_id
            if first_row is None and next_row is not None:
                first_row, next_row = next_row, next_row + file.record_count
            found.append(
                Entry(
                    name=self.name(file.file_path),
                    rows=file.record_count,
                    bytes=file.file_size_in_bytes,
                    of=of,
                    mark=marks[place] if marks else of and file.file_path.removesuffix(POSITION_DELETES)[-MARK_LENGTH:],
                    span=file.span,
                    snapshot=manifest.added_snapshot_id if snapshot is None else snapshot,
                    sequence=manifest.sequence_number if sequence is None else sequence,
                    first_row=first_row,
                    metrics=file.metrics,
                )
            )
        return found

    def runs(self, data: bytes, where: str) -> list[Run]:
        """The runs of a manifest list that `manifest_list` wrote; ``where`` is its address."""
        what = "a manifest list of the publisher"
        manifests, header = _read(data, where, what, ManifestFile)
        firsts: list[str] = json.loads(header.get(_FIRST, "[]"))
        if len(firsts) != len(manifests):
            raise damaged(where, what, "it does not say with which partition each manifest begins", next=RESET)
        found: list[Run] = []
        for first, manifest in zip(firsts, manifests, strict=True):
            if found and found[-1].first == first:
                found[-1] = replace(found[-1], manifests=(*found[-1].manifests, manifest))
            else:
                found.append(Run(first, (manifest,)))
        return found


@dataclass(frozen=True)
class FileWriter(FileReader):
    """Writes the files of one snapshot.

    Attributes:
        schema, partitions: the table's, in Iceberg's words.
        version: the format version.
        snapshot, sequence: the snapshot's id and its sequence number.
    """

    spec: TableSpec
    schema: Schema
    partitions: PartitionSpec
    version: FormatVersion
    snapshot: int
    sequence: int

    def data(self, file: DataFile) -> Entry:
        """The entry of a new data file."""
        return Entry(file.name, file.rows, file.bytes, metrics=metrics_of(file, self._types))

    def manifest(
        self, entries: Iterable[Entry], gone: Iterable[Entry], name: str, first_row: int | None
    ) -> tuple[bytes, ManifestFile]:
        """A manifest under that name, and what its list says of it.

        Args:
            entries, gone: all are of one kind; at least one is needed.
            first_row: the row id from which on data files without one get theirs; None: they get none.
        """
        marked = [(_ADDED if entry.snapshot is None else _EXISTING, entry) for entry in entries]
        marked += [(_DELETED, entry) for entry in gone]
        content = _DELETES if marked[0][1].of else _DATA
        header = {
            "schema": self.schema.model_dump_json(),
            "schema-id": str(self.schema.schema_id),
            "partition-spec": f"[{','.join(field.model_dump_json() for field in self.partitions.fields)}]",
            "partition-spec-id": str(self.partitions.spec_id),
            "format-version": str(self.version),
            "content": "deletes" if content else "data",
        }
        if content and self.version == 3:
            header[_MARKS] = json.dumps([entry.mark for _, entry in marked])
        records = [self._record(status, entry) for status, entry in marked]
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
            sequence_number=self.sequence,
            min_sequence_number=min(older, default=self.sequence),
            added_snapshot_id=self.snapshot,
            added_files_count=counts[_ADDED],
            existing_files_count=counts[_EXISTING],
            deleted_files_count=counts[_DELETED],
            added_rows_count=rows[_ADDED],
            existing_rows_count=rows[_EXISTING],
            deleted_rows_count=rows[_DELETED],
            partitions=self._bounds({entry.partition for _, entry in marked}),
            first_row_id=first_row,
        )

    def manifest_list(self, runs: Sequence[Run], parent: int | None) -> bytes:
        header = {
            "snapshot-id": str(self.snapshot),
            "parent-snapshot-id": "null" if parent is None else str(parent),
            "sequence-number": str(self.sequence),
            "format-version": str(self.version),
            _FIRST: json.dumps([run.first for run in runs for _ in run.manifests]),
        }
        listed = [msgspec.to_builtins(m, builtin_types=(bytes,)) for run in runs for m in run.manifests]
        return _avro(_LIST_SCHEMAS[self.version], listed, header)

    @cached_property
    def _types(self) -> Mapping[int, PrimitiveType]:
        return primitive_types(self.schema)

    @cached_property
    def _entry_schema(self) -> object:
        fields = (*DATA_FILE_TYPE[self.version].fields, *([_REFERENCED] if self.version == 2 else []))
        partition = data_file_with_partition(self._partition_type, self.version).fields
        (own,) = (field for field in partition if field.name == "partition")
        file = StructType(*(own if field.name == "partition" else field for field in fields))
        return _avro_schema(manifest_entry_schema_with_data_file(self.version, file), "manifest_entry")

    @cached_property
    def _partition_type(self) -> StructType:
        return self.partitions.partition_type(self.schema)

    def _record(self, status: int, entry: Entry) -> dict[str, object]:
        path = entry.of and self.address(entry.of)
        own = [ColumnMetrics(FILE_PATH_ID, entry.rows, 0, path.encode(), path.encode())] if path else entry.metrics
        file: dict[str, object] = {
            "content": _DELETES if path else _DATA,
            "file_path": self.address(entry.name),
            "file_format": "PUFFIN" if entry.span else "PARQUET",
            "partition": self._values(entry.partition),
            "record_count": entry.rows,
            "file_size_in_bytes": entry.bytes,
            "value_counts": _items((one.id, one.values) for one in own),
            "null_value_counts": _items((one.id, one.nulls) for one in own),
            "lower_bounds": _items((one.id, one.lower) for one in own),
            "upper_bounds": _items((one.id, one.upper) for one in own),
            "referenced_data_file": path or None,
        }
        if self.version == 3:
            at, size = entry.span or (None, None)
            file |= {"first_row_id": entry.first_row, "content_offset": at, "content_size_in_bytes": size}
        return {
            "status": status,
            "snapshot_id": self.snapshot if entry.snapshot is None or status == _DELETED else entry.snapshot,
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


def _avro_schema(schema: Schema, name: str) -> object:
    return fastavro.parse_schema(cast(dict[str, object], AvroSchemaConversion().iceberg_to_avro(schema, name)))


_LIST_SCHEMAS = {version: _avro_schema(MANIFEST_LIST_FILE_SCHEMAS[version], "manifest_file") for version in (2, 3)}


def _avro(schema: object, records: Iterable[object], header: dict[str, str]) -> bytes:
    sink = io.BytesIO()
    fastavro.writer(sink, cast(dict[str, object], schema), records, codec="deflate", metadata=header)
    return sink.getvalue()


def _read(data: bytes, where: str, what: str, type_: type[Read]) -> tuple[list[Read], dict[str, str]]:
    """The records of an object, and its header."""
    try:
        reader = fastavro.reader(io.BytesIO(data))
        return convert(list(reader), list[type_]), reader.metadata  # type: ignore[valid-type]
    except Exception as e:  # whatever a decoder meets in damaged bytes
        raise damaged(where, what, repr(e), next=RESET) from e


def _items(pairs: Iterable[tuple[int, int | bytes | None]]) -> list[dict[str, int | bytes]] | None:
    """A map as manifests have it, without what is not known; None if nothing is."""
    return [{"key": id_, "value": value} for id_, value in pairs if value is not None] or None


def _bytes(type_: PrimitiveType, value: str | int | bool | dt.date) -> bytes:
    return to_bytes(type_, (value - dt.date(1970, 1, 1)).days if isinstance(value, dt.date) else value)
