"""The table in a catalog of Hive's kind: each partition points to a manifest, a text object that lists its data files.

Reads     the newest snapshot, the partitions that the catalog has, the manifests of those that changed
Writes    a symlink manifest for each changed partition, then these partitions, then which snapshot is shown
Repeat    safe: each run compares all partitions of the catalog with the snapshot, so it also mends what a crash left

    compare -> manifests -> table -> partitions, in batches -> `lakeupsert.snapshot`

A partition is switched at once. The table is not: while this runs, some partitions show the night and others do not yet. A table
without partition columns points to a manifest itself, so it is switched at once.
Engines that read symlink tables know no deletion vectors, so only partitions without any can be shown.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol
from urllib.parse import unquote

import pyarrow as pa

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, DamagedTableError, RefusedError, TryAgainError
from lakeupsert.publishers import UNFINISHED, TablePublisher, create_once, not_created
from lakeupsert.publishers.hive_types import Column, columns_of, unfit_columns
from lakeupsert.retries import CATALOG_ATTEMPTS, CATALOG_PAUSE_SECONDS
from lakeupsert.storage import NotFoundError, ObjectInfo
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import HOME, WHOLE_TABLE, value_texts
from lakeupsert.table.manifest import Manifest
from lakeupsert.table.snapshot import PartitionVersion, Snapshot
from lakeupsert.table.spec import TableSpec, field_id

INPUT_FORMAT = "org.apache.hadoop.hive.ql.io.SymlinkTextInputFormat"
OUTPUT_FORMAT = "org.apache.hadoop.hive.ql.io.HiveIgnoreKeyTextOutputFormat"
SERDE = "org.apache.hadoop.hive.ql.io.parquet.serde.ParquetHiveSerDe"
TOGETHER = 100
"""Partitions of a request. Glue takes no more."""
TABLE, SNAPSHOT, SPEC = "lakeupsert.table", "lakeupsert.snapshot", "lakeupsert.spec"
"""Parameters: the table's id and the snapshot that it shows; of the table and of each partition, whose columns it has."""
PARAMETERS = {"EXTERNAL": "TRUE", "spark.sql.sources.provider": "lakeupsert"}
"""Of each table. Spark has no such provider, so it refuses the table; otherwise it could take manifests for data, or insert."""
_FOLDER = f"{HOME}/symlink"
_EMPTY = f"{_FOLDER}/empty"
"""The folder of a manifest without files."""

Values = tuple[str, ...]
"""A partition's values as text, in the order of the partition columns."""
Fields = tuple[tuple[int, Column], ...]
"""Columns with their ids: a name that comes back after a drop is another column."""


@dataclass(frozen=True)
class Entry:
    """A partition in the catalog.

    Attributes:
        location: the folder of its manifest.
        spec: the number of the spec whose columns it has; "" if another program made it.
        statistics: parameters by which engines plan, and without which a metastore would look at the folder; not read back.
    """

    location: str
    spec: str
    statistics: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, str]:
        return {SPEC: self.spec, **self.statistics}


@dataclass(frozen=True)
class Shape:
    """What the catalog says of the table beside its partitions."""

    columns: tuple[Column, ...]
    partition_by: tuple[Column, ...]
    location: str


@dataclass(frozen=True)
class Steps:
    """What is to do to the partitions of the catalog."""

    add: Mapping[Values, Entry]
    change: Mapping[Values, Entry]
    gone: Collection[Values]

    def __bool__(self) -> bool:
        return bool(self.add or self.change or self.gone)


class CatalogBusyError(TryAgainError):
    """A catalog refuses a call for the moment, as it changes the table for somebody else. A later comparison may succeed."""


class Catalog(Protocol):
    """One table of a catalog. Each call raises LakeupsertError: `catalog-unreachable`, `catalog-refused`, `catalog-busy`."""

    @property
    def kind(self) -> str:
        """`hive` or `glue`."""

    @property
    def where(self) -> str:
        """The table, for messages."""

    def parameters(self) -> Mapping[str, str] | None:
        """Those of the table; None if there is no such table."""

    def create(self, shape: Shape, parameters: Mapping[str, str]) -> None:
        """Create the table, if nobody was faster."""

    def update(
        self, parameters: Mapping[str, str], columns: Sequence[Column] | None = None, location: str | None = None
    ) -> None:
        """Set parameters, columns and location of the table, all at once; what is not named stays."""

    def drop(self) -> None:
        """Drop the table with its partitions. No file is deleted."""

    def partitions(self) -> Mapping[Values, Entry]:
        """All partitions."""

    def apply(self, steps: Steps, columns: Sequence[Column]) -> list[str]:
        """Take these steps; each batch is tried once. Returns why some were refused, which a later comparison may mend."""


@dataclass(frozen=True)
class SymlinkPublisher(TablePublisher):
    """Keeps one table of a catalog."""

    catalog: Catalog

    def shown(self) -> int | None:
        """The snapshot that was shown last, whole; None if the table is not there, or not ours.

        Some partitions may show a later one, if a publish is under way or broke off. Before the first one is
        whole, it is `UNFINISHED`.
        """
        parameters = self.catalog.parameters()
        if parameters is None or parameters.get(TABLE) != self.newest_spec.table_id:
            return None
        found = _snapshot_in(parameters)
        return UNFINISHED if found is None else found

    def reset(self) -> None:
        """Drop the table. Its manifests stay for `vacuum`, since another catalog may point to them."""
        if self._own_parameters() is not None:
            self.catalog.drop()

    def check(self, newest: Link[Snapshot]) -> None:
        """See `Publisher`."""
        spec, shown = self.spec_of(newest.body), newest.body.partitions
        self._shape(spec)
        self._refuse_unfit(spec, self.table.map_concurrently(lambda p: self.table.version(p, shown[p]), list(shown)))

    def garbage(self, oldest: int, newest: int) -> list[ObjectInfo]:
        """Manifests that no snapshot from ``oldest`` on needs and no partition points to; none if the catalog lacks ``newest``.

        Those of a publish that is under way are among them, so young ones must be kept.
        """
        shown = self.shown()
        if shown is None or shown < newest:
            return []
        numbers = [number for number in self.objects.snapshots.numbers() if number >= oldest]
        links = self.table.map_concurrently(self.objects.snapshots.get, numbers)
        bodies = [link.body for link in links if link is not None]
        needed = {_manifest(p, now) for body in bodies for p, now in body.partitions.items()} | {f"{_EMPTY}/manifest"}
        entries = self.catalog.partitions() if self.newest_spec.partition_by else {}
        pointed = {entry.location for entry in entries.values()}
        return [
            info
            for info in self.objects.store.list(f"{_FOLDER}/")
            if info.name not in needed and self._location(info.name.rpartition("/")[0]) not in pointed
        ]

    def catch_up(self, newest: Link[Snapshot]) -> str | None:
        """Show ``newest``, whatever the catalog shows now. Snapshots before it are skipped.

        Returns which columns have other names there. Raises ConfigurationError (``unfit-for-hive``, ``unfit-for-glue``),
        RefusedError (``foreign-table``), TryAgainError (``catalog-busy``) and DamagedTableError.
        """
        refused: list[str] = []
        for attempt in range(CATALOG_ATTEMPTS):
            if refused:
                clock.sleep(clock.jitter(CATALOG_PAUSE_SECONDS * 2**attempt))
            try:
                parameters = self._own_parameters()
                if not self.spec_of(newest.body).partition_by:
                    if (_snapshot_in(parameters or {}) or 0) > newest.number:
                        newest = self.objects.snapshots.head() or newest
                    if self._show_whole(newest, parameters):
                        return _warning(self.spec_of(newest.body))
                    refused = ["another publisher has just created it"]
                    continue
                steps, refused = self._show(newest.body, parameters)
                if refused:
                    continue
                if not steps and _snapshot_in(parameters or {}) == newest.number:
                    return _warning(self.spec_of(newest.body))
                # Another publisher may have shown a later snapshot meanwhile, and this one partitions of an earlier one again.
                shown, head = self.shown(), None
                if shown is not None and shown > newest.number:
                    head = self.objects.snapshots.head()
                if head is None or head.number <= newest.number:
                    self.catalog.update({SNAPSHOT: str(newest.number)})
                    return _warning(self.spec_of(newest.body))
                newest = head
            except CatalogBusyError as e:
                if attempt == CATALOG_ATTEMPTS - 1:
                    raise
                refused = [e.message]
        raise TryAgainError(
            "catalog-busy",
            f"{self.catalog.where} could not be updated to snapshot {newest.number} in {CATALOG_ATTEMPTS} attempts"
            f"{f': {refused[0]}' if refused else ', because others publish'}. Some partitions may show it already.",
            next=f"run `lakeupsert publish --to {self.catalog.kind}`",
        )

    def _own_parameters(self) -> Mapping[str, str] | None:
        """The parameters of our table; None if there is none. Raises RefusedError if the table there is another program's."""
        parameters = self.catalog.parameters()
        if parameters is not None and parameters.get(TABLE) != self.newest_spec.table_id:
            raise RefusedError(
                "foreign-table",
                f"{self.catalog.where} was not created by this table's publisher: its parameter `{TABLE}` is "
                f"{parameters.get(TABLE)!r}, expected {self.newest_spec.table_id!r}. It was not changed.",
                next=f"choose another `table` in [tables.NAME.{self.catalog.kind}], or drop that one if nobody needs it",
            )
        return parameters

    def _show(self, body: Snapshot, parameters: Mapping[str, str] | None) -> tuple[Steps, list[str]]:
        """Bring table and partitions up to a snapshot. Returns what was to do, and what the catalog refused of it."""
        spec = self.spec_of(body)
        shape = self._shape(spec)
        steps = self._steps(spec, body, self.catalog.partitions() if parameters is not None else {})
        self._write_manifests(spec, body, {*steps.add, *steps.change})
        if parameters is None:
            self.catalog.create(shape, {**PARAMETERS, TABLE: spec.table_id, SPEC: str(body.spec_version)})
            if self._own_parameters() is None:
                return steps, ["the table was dropped while it was filled"]
        elif (before := self._fields(parameters.get(SPEC, ""))) != _fields_of(spec):
            self._refuse_other_columns(before, _fields_of(spec))
            self.catalog.update({SPEC: str(body.spec_version)}, shape.columns)
        return steps, self.catalog.apply(steps, shape.columns) if steps else []

    def _show_whole(self, newest: Link[Snapshot], parameters: Mapping[str, str] | None) -> bool:
        """Bring a table without partitions up to a snapshot, by one call. Returns False if the call created no table, because
        there is one by now."""
        spec, body = self.spec_of(newest.body), newest.body
        shown, folder = body.partitions.get(WHOLE_TABLE), _EMPTY
        if shown is None:  # nothing arrived yet
            self._create(f"{_EMPTY}/manifest", b"")
        else:
            folder = _folder(WHOLE_TABLE, shown)
            self._write_manifests(spec, body, {()})
        shape = replace(self._shape(spec), location=self._location(folder))
        now = {SPEC: str(body.spec_version), SNAPSHOT: str(newest.number), **(_statistics(shown) if shown else {})}
        if parameters is None:
            self.catalog.create(shape, {**PARAMETERS, TABLE: spec.table_id, **now})
            return (self._own_parameters() or {}).get(SNAPSHOT) == now[SNAPSHOT]
        before = self._fields(parameters.get(SPEC, ""))
        if before != _fields_of(spec):
            self._refuse_other_columns(before, _fields_of(spec))
        self.catalog.update(now, shape.columns, shape.location)
        return True

    def _steps(self, spec: TableSpec, body: Snapshot, found: Mapping[Values, Entry]) -> Steps:
        fields_of = cache(self._fields)
        add, change, stay = {}, {}, set()
        for partition, now in body.partitions.items():
            if not now.rows:
                continue
            values = tuple(value_texts(spec, partition).values())
            entry = Entry(self._location(_folder(partition, now)), str(body.spec_version), _statistics(now))
            old = found.get(values)
            if old is None:
                add[values] = entry
            elif old.location != entry.location or fields_of(old.spec) != fields_of(entry.spec):
                change[values] = entry
            stay.add(values)
        return Steps(add, change, [values for values in found if values not in stay])

    def _write_manifests(self, spec: TableSpec, body: Snapshot, changed: Collection[Values]) -> None:
        """Write the manifests of these partitions, after all of them were found fit."""
        names = {p: now for p, now in body.partitions.items() if tuple(value_texts(spec, p).values()) in changed}
        manifests = self.table.map_concurrently(lambda p: self.table.version(p, names[p]), list(names))
        self._refuse_unfit(spec, manifests)

        def write(manifest: Manifest) -> None:
            files = [self._address(file.name) for bucket in manifest.buckets for file in bucket.data]
            name = _manifest(manifest.partition, names[manifest.partition])
            self._create(name, "".join(f"{address}\n" for address in files).encode())

        self.table.map_concurrently(write, manifests)

    def _refuse_unfit(self, spec: TableSpec, manifests: Sequence[Manifest]) -> None:
        """Raise ConfigurationError if readers would show other rows than ours for one of these partitions."""
        files = [(m.partition, file) for m in manifests for bucket in m.buckets for file in bucket.data]

        def refuse(unfit: Iterable[str], have: str, readers: str, next: str) -> None:
            if partitions := sorted({*unfit}):
                first = f"{len(partitions)} partitions have {have} ({partitions[0]} is the first one)"
                raise self._unfit(f"{first}, {readers}", next)

        refuse(
            (partition for partition, file in files if file.deleted),
            "deletion vectors",
            "which readers of symlink tables do not know",
            "run `lakeupsert compact --full`; later merges rewrite",
        )
        refuse(
            (partition for partition, file in files if spec.conversions(file.renames)),
            "files from before a column was retyped",
            "and readers would not convert their values",
            "run `lakeupsert compact --full`, which converts them",
        )
        refuse(
            (partition for partition, file in files if spec.names_in(file.renames) != spec.names_written),
            "files with other column names than newer files",
            "and readers look for one name in all of them",
            "run `lakeupsert reprocess`, which writes all files with one name a column",
        )

    def _refuse_other_columns(self, before: Fields, now: Fields) -> None:
        """Raise ConfigurationError unless the table's columns can change in place: by new ones at the end, and by wider types.
        Otherwise readers would see nulls while partitions are switched."""
        if not before or [(id_, column.name) for id_, column in before] != [
            (id_, column.name) for id_, column in now[: len(before)]
        ]:
            raise self._unfit(
                "columns were dropped, were retyped or changed their place. While the partitions are switched one by one, "
                "readers would see values of other columns, or nulls",
                f"run `lakeupsert publish --to {self.catalog.kind} --reset`, which drops the table and creates it again; "
                "meanwhile readers find no table",
            )

    def _unfit(self, why: str, next: str) -> ConfigurationError:
        return ConfigurationError(
            f"unfit-for-{self.catalog.kind}",
            f"{self.catalog.where} can't show the snapshot: {why}. It was not changed; readers of lakeupsert are not "
            "concerned.",
            next=next,
        )

    def _shape(self, spec: TableSpec) -> Shape:
        unfit = unfit_columns(_as_written(spec, spec.schema))
        if unfit:
            columns = ", ".join(f"{name!r} is {what}" for name, what in unfit.items())
            raise self._unfit(
                f"engines that read it have no type for some columns, or read them wrongly: {columns}",
                f"declare another type in [tables.NAME.schema] of a new table, or remove {self.catalog.kind!r} from "
                "`publishers`",
            )
        by_name = dict(zip(spec.schema.names, columns_of(spec.schema), strict=True))
        return Shape(
            columns_of(_as_written(spec, spec.stored_schema)),
            tuple(by_name[name] for name in spec.partition_by),
            self._location(_FOLDER),
        )

    def _fields(self, number: str) -> Fields:
        """The columns of a spec; none if another program wrote the number."""
        link = self.objects.specs.get(int(number)) if number.isdecimal() else None
        return _fields_of(link.body) if link else ()

    def _address(self, name: str) -> str:
        """The address of an object as engines take it: they do not decode it."""
        uri = self.objects.store.uri(name)
        return unquote(uri) if uri.startswith("file:") else uri

    def _location(self, folder: str) -> str:
        """The address of a folder as Hive's metastore keeps it, so that it compares equal."""
        return self._address(folder).replace("file:///", "file:/", 1)

    def _create(self, name: str, data: bytes) -> None:
        """Create an object whose name says what is in it, if it is absent. Raises DamagedTableError if it says something else."""
        unchanged = f"{self.catalog.where} was not changed."
        for _ in range(CATALOG_ATTEMPTS):
            with suppress(NotFoundError):  # a vacuum may have deleted it meanwhile
                created = create_once(self.objects.store, name, data, self.catalog.kind, unchanged)
                if created or self.objects.store.get(name) == data:
                    return
                raise DamagedTableError(
                    "damaged-object",
                    f"{self.objects.store.uri(name)} lists other files than the version that it is named after: something "
                    f"other than lakeupsert wrote it. {unchanged}",
                    next=f"delete that object, then run `lakeupsert publish --to {self.catalog.kind}`",
                )
        why = f"each of {CATALOG_ATTEMPTS} times, it existed and was deleted before it was read. {unchanged}"
        raise not_created(self.objects.store, name, self.catalog.kind, why)


def batches(items: Sequence[tuple[Values, Entry]]) -> Iterator[Sequence[tuple[Values, Entry]]]:
    """`TOGETHER` at a time."""
    return (items[first : first + TOGETHER] for first in range(0, len(items), TOGETHER))


def _snapshot_in(parameters: Mapping[str, str]) -> int | None:
    number = parameters.get(SNAPSHOT, "")
    return int(number) if number.isdecimal() else None


def _fields_of(spec: TableSpec) -> Fields:
    columns = columns_of(_as_written(spec, spec.stored_schema))
    return tuple(zip(map(field_id, spec.stored_schema), columns, strict=True))


def _as_written(spec: TableSpec, schema: pa.Schema) -> pa.Schema:
    """The schema with the names of data files, which engines look for."""
    return pa.schema([field.with_name(spec.names_written.get(field.name, field.name)) for field in schema])


def _warning(spec: TableSpec) -> str | None:
    others = [
        f"{name!r} is {written!r}" for name, written in spec.names_written.items() if name in spec.stored_schema.names
    ]
    return f"renamed columns have the names of the files there: {', '.join(others)}." if others else None


def _statistics(shown: PartitionVersion) -> dict[str, str]:
    return {"numFiles": str(shown.files), "numRows": str(shown.rows), "totalSize": str(shown.bytes)}


def _folder(partition: str, shown: PartitionVersion) -> str:
    """The version comes first, so that no tool that looks for partitions in folders takes a manifest's for one."""
    return f"{_FOLDER}/{shown.version}-{shown.write_id}/{partition}"


def _manifest(partition: str, shown: PartitionVersion) -> str:
    return f"{_folder(partition, shown)}/manifest"
