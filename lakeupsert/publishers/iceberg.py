"""The table as an Iceberg table: an Iceberg snapshot for each snapshot, which says in its summary whose it is.

Reads     the table's metadata by its catalog, one manifest list, the manifests of runs with changed partitions, the manifests of
          these partitions, and the snapshots that the Iceberg table lacks
Writes    for each snapshot position deletes or vectors, manifests, a manifest list, then a commit to the catalog; no data file
Repeat    safe; of two publishers one commits a snapshot, and the other one goes on behind it

    load -> next snapshot that it lacks: manifests of changed partitions -> deletes -> manifests -> list -> commit -> load …

The state is what the catalog says, so after a crash the table is behind, and never wrong. Objects that nothing names are garbage.
"""

import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata, TableMetadataV2, TableMetadataV3
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import Snapshot as IcebergSnapshot
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import (
    AddSchemaUpdate,
    AddSnapshotUpdate,
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotsUpdate,
    SetCurrentSchemaUpdate,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableUpdate,
    UpgradeFormatVersionUpdate,
    update_table_metadata,
)
from pyiceberg.typedef import IcebergBaseModel

from lakeupsert import clock
from lakeupsert.config import IcebergSettings
from lakeupsert.errors import ConfigurationError, DamagedTableError
from lakeupsert.publishers import PublishedTable, TablePublisher
from lakeupsert.publishers.iceberg_catalog import RESET, IcebergCatalog, root_address, table_taken
from lakeupsert.publishers.iceberg_files import FileReader, FileWriter
from lakeupsert.publishers.iceberg_snapshot import FOLDER, METADATA, SnapshotObjects, rows_with_new_ids, summary
from lakeupsert.publishers.iceberg_types import UNFIT, iceberg_schema, partition_spec, refuse_other_growth
from lakeupsert.storage import ObjectInfo
from lakeupsert.table.chain import LOST, Link, Lost, until_won
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import HIDDEN_IDS, TableSpec

LAST_COLUMN_ID = HIDDEN_IDS + 1000
"""chDB refuses files with greater field ids. A program that adds a column gives it the next id, which is never one of ours."""
METADATA_KEPT = 10
"""Earlier metadata files that `vacuum` keeps."""
_LIST = f"{METADATA}/snap-"
_SNAPSHOT, _WRITE, _TABLE = "lakeupsert.snapshot", "lakeupsert.write_id", "lakeupsert.table"
"""In the summary of each of our snapshots: its number, its write id and the table's id, which is also a property of the table."""


@dataclass(frozen=True)
class _Head:
    """The Iceberg table as it is, its newest snapshot, and that one's number of ours."""

    table: Table
    metadata: TableMetadataV2 | TableMetadataV3
    snapshot: IcebergSnapshot
    number: int

    def shows(self, link: Link[Snapshot]) -> bool:
        """Whether it is this snapshot, or a later one. Another snapshot may have had its number, and was lost."""
        return self.number > link.number or (self.number == link.number and self._write_id == link.write_id)

    def is_of(self, link: Link[Snapshot] | None) -> bool:
        return link is not None and (self.number, self._write_id) == (link.number, link.write_id)

    @property
    def _write_id(self) -> str | None:
        return None if self.snapshot.summary is None else self.snapshot.summary[_WRITE]


@dataclass(frozen=True)
class IcebergPublisher(TablePublisher):
    """Keeps the Iceberg table of one table."""

    settings: IcebergSettings

    def shown(self) -> int | None:
        """The snapshot that readers of Iceberg see, or that another program's commits began with; None if there is no table."""
        with self._catalog() as catalog:
            table = catalog.load()
        return self._shown(table) if table is not None else None

    def reset(self) -> None:
        """Remove the table from the catalog. Its objects are left to `vacuum`, since somebody may read them."""
        with self._catalog() as catalog:
            try:
                table = catalog.load()
                if table is None:
                    return
                self._refuse_another(table.metadata)
            except DamagedTableError:
                pass  # its metadata is among our objects, and lost
            catalog.drop()

    def check(self, newest: Link[Snapshot]) -> None:
        """See `Publisher`."""
        spec, shown = self._spec(newest), newest.body.partitions
        iceberg_schema(spec, 0)
        self.table.map_concurrently(
            lambda partition: self._objects.buckets(spec, partition, shown[partition]), list(shown)
        )

    def garbage(self, oldest: int, newest: int) -> list[ObjectInfo]:
        """Objects that no Iceberg snapshot from ``oldest`` on needs; none if the table does not show ``newest``, or is not ours
        alone. Those of a commit that is made just now are among them, so young ones must be kept."""
        with self._catalog() as catalog:
            table = catalog.load()
        current = table.current_snapshot() if table is not None else None
        if table is None or current is None or self._shown(table) != newest or self._number(current) is None:
            return []
        reader = FileReader(self._root)
        listed = {reader.name(snapshot.manifest_list) for snapshot in table.metadata.snapshots}
        found = {info.name: info for info in self.objects.store.list(f"{FOLDER}/")}
        lists = [name for name in found if name in listed or (name.startswith(_LIST) and _number_in(name) >= oldest)]
        log = (entry.metadata_file for entry in table.metadata.metadata_log)
        # By the last part, which is unique: a catalog that writes them may spell the address in its own way.
        named = {address.rpartition("/")[2] for address in (table.metadata_location, *log)}
        needed = {*lists, *(name for name in found if name.rpartition("/")[2] in named)}
        manifests = {m.manifest_path: m for name in lists for run in self._objects.runs(name) for m in run.manifests}
        needed |= set(map(reader.name, manifests))
        of_deletes = [manifest for manifest in manifests.values() if manifest.content]
        needed |= {
            entry.name
            for entries in self.table.map_concurrently(self._objects.entries, of_deletes)
            for entry in entries
        }
        return [info for name, info in found.items() if name not in needed]

    def catch_up(self, newest: Link[Snapshot]) -> str | None:
        """Commit each snapshot up to ``newest`` that the table lacks, those that have expired or can't be shown left out.

        Raises ConfigurationError (``unfit-for-iceberg``, ``iceberg-table-taken``), DamagedTableError
        (``foreign-iceberg-commit``) and the errors of `IcebergCatalog`.
        """
        unfit: set[int] = set()
        with self._catalog() as catalog:

            def attempt() -> Lost | None:
                head = self._head(catalog)
                while head is None or not head.shows(newest):
                    link = self._next(head, newest, unfit)
                    try:
                        self._commit(catalog, head, link, newest.body)
                    except ConfigurationError as e:
                        if e.code != UNFIT or link.number == newest.number:
                            raise
                        unfit.add(link.number)
                        continue
                    before, head = head, self._head(catalog)
                    if head is None or (before is not None and head.snapshot == before.snapshot):
                        return LOST
                return None

            until_won(f"The Iceberg table {self.settings.table}", attempt)
        return None

    # -- the table in its catalog

    def _catalog(self) -> closing[IcebergCatalog]:
        return closing(IcebergCatalog(self.settings, self.objects.store))

    @cached_property
    def _root(self) -> str:
        return root_address(self.objects.store)

    @cached_property
    def _objects(self) -> SnapshotObjects:
        return SnapshotObjects(self.table, self._root)

    def _number(self, snapshot: IcebergSnapshot) -> int | None:
        """The number of our snapshot; None if it is another program's."""
        summary = snapshot.summary
        if summary is None or summary[_TABLE] != self.newest_spec.table_id:
            return None
        return int(summary[_SNAPSHOT] or -1)

    def _shown(self, table: Table) -> int | None:
        self._refuse_another(table.metadata)
        by_id = {snapshot.snapshot_id: snapshot for snapshot in table.metadata.snapshots}
        here = table.current_snapshot()
        while here is not None and self._number(here) is None:
            here = by_id.get(here.parent_snapshot_id or -1)
        if here is not None:
            return self._number(here)
        return max((n for n in map(self._number, by_id.values()) if n is not None), default=None)

    def _refuse_another(self, metadata: TableMetadata) -> None:
        if metadata.properties.get(_TABLE) != self.newest_spec.table_id:
            raise table_taken(metadata.location)

    def _head(self, catalog: IcebergCatalog) -> _Head | None:
        table = catalog.load()
        if table is None:
            return None
        self._refuse_another(table.metadata)
        snapshot = table.current_snapshot()
        if snapshot is None:
            raise self._foreign("no longer has a snapshot")
        number = self._number(snapshot)
        if number is None:
            raise self._foreign(f"has snapshot {snapshot.snapshot_id}, which its publisher did not write")
        metadata = table.metadata
        other = metadata.current_schema_id != snapshot.schema_id or metadata.default_spec_id
        if other or not isinstance(metadata, TableMetadataV2 | TableMetadataV3):
            raise self._foreign("has columns, partitions or a format version that its publisher did not write")
        if metadata.format_version > self.settings.format_version:
            raise ConfigurationError(
                "bad-setting",
                f"The Iceberg table {self.settings.table!r} has format version {metadata.format_version}, and "
                f"`format_version` is {self.settings.format_version}. Iceberg has no way back. Nothing was committed to it; "
                "readers of lakeupsert are not affected.",
                next=f"set format_version = 3 in [tables.NAME.iceberg]; or {RESET}",
            )
        return _Head(table, metadata, snapshot, number)

    def _foreign(self, what: str) -> DamagedTableError:
        return DamagedTableError(
            "foreign-iceberg-commit",
            f"The Iceberg table {self.settings.table!r} {what}. Nothing was committed to it; readers of lakeupsert are not "
            "concerned, and readers of Iceberg see what the other program wrote.",
            next=f"find out what wrote it; then {RESET}",
        )

    # -- a commit

    def _next(self, head: _Head | None, newest: Link[Snapshot], unfit: set[int]) -> Link[Snapshot]:
        for number in range(head.number + 1, newest.number) if head else ():
            if newest.body.keeps(number) and number not in unfit and (link := self.objects.snapshots.get(number)):
                return link
        return newest

    def _commit(self, catalog: IcebergCatalog, head: _Head | None, link: Link[Snapshot], newest: Snapshot) -> None:
        """Commit a snapshot behind ``head``; None: register the table with it. Only a new `_head` says whether that was won."""
        spec = self._spec(link)
        moment = int(datetime.fromisoformat(link.written_at).timestamp() * 1000)
        metadata = head.metadata if head else self._first_metadata(spec, moment)
        schema, version = _schema_of(spec, metadata), self.settings.format_version
        id_, sequence = int(clock.new_id()[:16], 16) >> 1, metadata.last_sequence_number + 1
        writer = FileWriter(self._root, spec, schema, partition_spec(spec), version, id_, sequence)
        first_row = _next_row(metadata) if version == 3 else None
        listed = self._objects.runs(writer.name(head.snapshot.manifest_list)) if head else []
        shown, changed = self._objects.write(writer, listed, self._before(head, link), link, first_row)
        listing = f"{_LIST}{link.number}-{clock.new_id()}.avro"
        parent = head.snapshot.snapshot_id if head else None
        self.table.put(listing, writer.manifest_list(shown, parent))
        own = {_SNAPSHOT: str(link.number), _WRITE: link.write_id, _TABLE: self.newest_spec.table_id}
        snapshot = IcebergSnapshot.model_validate(
            {
                "snapshot-id": id_,
                "parent-snapshot-id": parent,
                "sequence-number": sequence,
                # pyiceberg puts its own time into an equal one
                "timestamp-ms": max(moment, metadata.last_updated_ms + 1),
                "manifest-list": writer.address(listing),
                "summary": summary(shown, changed, own),
                "schema-id": schema.schema_id,
                "first-row-id": first_row,
                "added-rows": None if first_row is None else rows_with_new_ids(shown, id_),
            }
        )
        updates = (*self._updates(metadata, schema), *self._snapshot_updates(metadata, snapshot, link.number, newest))
        if head is not None:
            requirements = (
                AssertTableUUID(uuid=metadata.table_uuid),
                AssertRefSnapshotId.model_validate({"ref": MAIN_BRANCH, "snapshot-id": parent}),
            )
            catalog.commit(head.table, requirements, updates)
            return
        name = f"{METADATA}/00000-{uuid.UUID(clock.new_id())}.metadata.json"
        first = update_table_metadata(metadata, updates)
        # That of TableMetadataV3 raises: pyiceberg's own writers do not know all of version 3 yet.
        self.table.put(name, IcebergBaseModel.model_dump_json(first).encode())
        catalog.register(writer.address(name))

    def _spec(self, link: Link[Snapshot]) -> TableSpec:
        *earlier, spec = (found.body for found in self.objects.specs.between(-1, link.body.spec_version))
        refuse_other_growth(spec, earlier)
        return spec

    def _first_metadata(self, spec: TableSpec, moment: int) -> TableMetadataV2 | TableMetadataV3:
        """The metadata of the table without a snapshot."""
        partitions = partition_spec(spec)
        version = self.settings.format_version
        kind, own = (TableMetadataV3, {"next-row-id": 0}) if version == 3 else (TableMetadataV2, {})
        return kind.model_validate(
            {
                **own,
                "format-version": version,
                "location": f"{self._root}/{FOLDER}",
                "table-uuid": uuid.UUID(clock.new_id()),
                "last-updated-ms": moment - 1,
                "last-column-id": LAST_COLUMN_ID,
                "schemas": [iceberg_schema(spec, 0)],
                "current-schema-id": 0,
                "partition-specs": [partitions],
                "default-spec-id": partitions.spec_id,
                "last-partition-id": partitions.last_assigned_field_id,
                "sort-orders": [UNSORTED_SORT_ORDER],
                "default-sort-order-id": UNSORTED_SORT_ORDER.order_id,
            }
        )

    def _updates(self, metadata: TableMetadata, schema: Schema) -> Iterator[TableUpdate]:
        """What changes beside the snapshot: the version, columns, and properties that somebody may have changed."""
        if metadata.format_version != self.settings.format_version:
            yield UpgradeFormatVersionUpdate.model_validate({"format-version": self.settings.format_version})
        if all(known.schema_id != schema.schema_id for known in metadata.schemas):
            yield AddSchemaUpdate(schema=schema)
        if metadata.current_schema_id != schema.schema_id:
            yield SetCurrentSchemaUpdate.model_validate({"schema-id": schema.schema_id})
        properties = {
            "gc.enabled": "false",  # engines delete no file of the table
            "write.metadata.previous-versions-max": str(METADATA_KEPT),
            _TABLE: self.newest_spec.table_id,
        }
        if not properties.items() <= metadata.properties.items():
            yield SetPropertiesUpdate(updates=properties)

    def _snapshot_updates(
        self, metadata: TableMetadata, snapshot: IcebergSnapshot, number: int, newest: Snapshot
    ) -> Iterator[TableUpdate]:
        """The new snapshot, which has ``number`` of ours, becomes the table's. Expired ones go, and those from that number on:
        somebody has rolled them back, or ours were lost."""
        yield AddSnapshotUpdate(snapshot=snapshot)
        main = {"ref-name": MAIN_BRANCH, "type": SnapshotRefType.BRANCH, "snapshot-id": snapshot.snapshot_id}
        yield SetSnapshotRefUpdate.model_validate(main)
        numbers = {known.snapshot_id: self._number(known) for known in metadata.snapshots}
        gone = [id_ for id_, n in numbers.items() if n is None or n >= number or not newest.keeps(n)]
        if gone:
            yield RemoveSnapshotsUpdate.model_validate({"snapshot-ids": gone})

    def _before(self, head: _Head | None, link: Link[Snapshot]) -> Snapshot | None:
        """The snapshot that the table shows, with which ``link`` is compared; None: all partitions are written anew.

        With version 3 this is also so behind a restore. It brings back vectors with fewer rows, and pyiceberg applies all
        vectors of an object that it reads, also those that other objects have replaced. Vectors otherwise only grow.
        """
        before = self.objects.snapshots.get(head.number) if head else None
        if head is None or before is None or not head.is_of(before):  # it has expired, or another one has its number
            return None
        if self.settings.format_version == 3:
            if head.snapshot.first_row_id is None:  # it is of version 2
                return None
            merged = (before.body.partitions[partition].merged for partition in before.body.lagging)
            for number in range(min((before.body.batch, *merged)) + 1, link.body.batch + 1):
                entry = self.objects.ledger.get(number)
                if entry is None or entry.body.restored is not None:
                    return None
        return before.body


def open_publisher(table: PublishedTable) -> IcebergPublisher:
    assert table.settings.iceberg is not None, "the configuration asks for the section"
    return IcebergPublisher(table, table.settings.iceberg)


def _number_in(name: str) -> int:
    """The number of our snapshot in the name of a manifest list."""
    return int(name.removeprefix(_LIST).partition("-")[0])


def _schema_of(spec: TableSpec, metadata: TableMetadata) -> Schema:
    """The columns of a spec as the schema that the table has of them, or else as a new one."""
    schema = iceberg_schema(spec, max(known.schema_id for known in metadata.schemas) + 1)
    return next((known for known in metadata.schemas if known.as_struct() == schema.as_struct()), schema)


def _next_row(metadata: TableMetadata) -> int:
    """The row id that the next new row gets."""
    return (metadata.next_row_id or 0) if isinstance(metadata, TableMetadataV3) else 0
