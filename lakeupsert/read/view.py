"""A snapshot of the table: its schema, its partitions, and the files to open for a filter.

Readers never list folders: a snapshot names manifests, and manifests name files. So a reader sees one whole night, even while
workers write the next one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, time
from functools import cached_property, reduce
from itertools import islice
from operator import and_, index
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.fs import LocalFileSystem

from lakeupsert.errors import ConfigurationError, DamagedTableError
from lakeupsert.phrases import when
from lakeupsert.read.hashed import hash_values
from lakeupsert.read.skipping import file_test
from lakeupsert.read.where import ArrowTerms, all_of, parse_where
from lakeupsert.rows.vectors import Positions
from lakeupsert.table import metadata
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import TableObjects, partition_scalars
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.table.manifest import BucketEntry, DataFile, Manifest
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import VERSION_FIELDS, TableSpec, field_id

MANIFESTS_AHEAD = 32
"""Requests at the same time for the manifests of a table on a remote store. A reader of one partition sends one."""


@dataclass(frozen=True)
class ViewFile:
    """One file that a reader of the snapshot opens.

    Attributes:
        only: the rows at these positions, all of them live, are to be read; None: all live rows.
    """

    partition: str
    uri: str
    file: DataFile
    only: Positions | None = None

    @property
    def name(self) -> str:
        """Relative to the table."""
        return self.file.name

    @property
    def rows(self) -> int:
        """Rows that a reader sees: those that the deletion vector does not mark."""
        return self.file.live

    @property
    def bytes(self) -> int:
        return self.file.bytes

    @property
    def superseded(self) -> int:
        """Rows that the deletion vector marks. A program that ignores the vector reads them too."""
        return self.file.rows - self.file.live

    @property
    def path(self) -> str:
        """Where other programs on this machine open the file: a plain path if it is local, a URL if it is remote."""
        return plain_path(self.uri)


@dataclass(frozen=True)
class SnapshotFigures:
    """A snapshot in figures. No manifest and no data file is read for them.

    Attributes:
        batch: the newest batch that readers see.
        partitions: those that have rows.
        rows: rows that readers see.
        bytes: of all files that the partitions need, those for merges included.
    """

    number: int
    published_at: datetime
    batch: int
    partitions: int
    rows: int
    bytes: int

    @classmethod
    def of(cls, link: Link[Snapshot]) -> "SnapshotFigures":
        body, published_at = link.body, datetime.fromisoformat(link.written_at)
        return cls(link.number, published_at, body.batch, body.partitions_with_rows, body.rows, body.bytes)


@dataclass(frozen=True)
class View:
    """The table as of one snapshot.

    Attributes:
        number: of the snapshot; None if it is in no chain. Then the view is `latest`, or nothing was published yet and there are
            no rows.
        pinned: the buckets of partitions for which the snapshot names no version.
        stamps: the receipt stamp of each batch, by ledger number, if rows have the columns `VERSION_FIELDS`; None: they do not.
    """

    objects: TableObjects
    spec: TableSpec
    snapshot: Snapshot
    number: int | None
    pinned: Mapping[str, Sequence[BucketEntry]] = field(default_factory=dict)
    stamps: pa.Array | None = None

    @classmethod
    def open(cls, objects: TableObjects, newest_spec: TableSpec, snapshot: str | int | date = "published") -> "View":
        """See `choose`."""
        return cls.of(objects, newest_spec, choose(objects, snapshot))

    @classmethod
    def of(cls, objects: TableObjects, newest_spec: TableSpec, link: Link[Snapshot] | None) -> "View":
        """The view of a snapshot; None: nothing was published yet."""
        if link is None:
            return cls(objects, newest_spec, Snapshot(batch=0, spec_version=0), None)
        spec = objects.specs.get(link.body.spec_version)
        if spec is None:
            raise DamagedTableError(
                "missing-version",
                f"Snapshot {link.number} needs spec version {link.body.spec_version}, which is missing.",
                next="restore the objects below _lakeupsert/spec from a backup or from the bucket's object versions",
            )
        return cls(objects, spec.body, link.body, link.number)

    def with_versions(self, headers: Callable[[int], Sequence[LedgerEntry]]) -> "View":
        """The view with rows that have the columns `VERSION_FIELDS`.

        ``headers`` returns the ledger entries from 0 to a number. Raises ConfigurationError if the table does not store them.
        """
        if not self.spec.versions:
            raise ConfigurationError(
                "no-versions",
                "The table does not store which batch a row came with. Nothing was read.",
                next="create a new table with `versions = true`, and load the landing files into it; `lakeupsert explain` shows "
                "the batches of one key",
            )
        entries = headers(self.snapshot.batch) if self.snapshot.partitions else ()
        stamps = pa.array([entry.received_at for entry in entries], pa.int64())
        return replace(self, stamps=stamps.cast(pa.timestamp("us", "UTC")))

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns that readers see, with field ids."""
        return self.spec.schema if self.stamps is None else pa.schema([*self.spec.schema, *VERSION_FIELDS])

    def partitions(self, where: str | None, schema: pa.Schema | None = None) -> Iterator[str]:
        """See `partitions_of`."""
        return partitions_of(self.spec, self.snapshot.partitions, where, self.schema if schema is None else schema)

    def files(self, where: str | None = None, only: str | None = None) -> Iterator[ViewFile]:
        """The files to open for the filter, by partition and key; with ``only``, those of one partition.

        Left out are files whose statistics rule out that a row passes.
        """
        may_pass = file_test(self.schema, where)
        for partition, buckets in self._buckets_of(self.partitions(where) if only is None else iter([only])):
            values = partition_scalars(self.spec, partition) if where else {}
            for bucket in buckets:
                yield from self._files(partition, (file for file in bucket.data if may_pass(file, values)))

    def is_settled(self, partition: str) -> bool:
        """Whether no key can have several rows in a partition. Adopted files that were never merged may repeat one."""
        return all(bucket.settled for bucket in self._buckets(partition))

    def retyped(self) -> bool:
        """Whether a column of the table, or a field of one, has had another type, which old files then have."""
        types = {field_id(field): field.type for field in self.spec.schema}
        return not all(
            field.type.equals(types.get(field_id(field), field.type))
            for old in self._earlier_specs
            for field in old.schema
        )

    def has_new_columns(self) -> bool:
        """Whether the table once had fewer columns, so that old files may lack some."""
        ids = {field_id(field) for field in self.spec.schema}
        return any(ids - {field_id(field) for field in old.schema} for old in self._earlier_specs)

    @cached_property
    def _earlier_specs(self) -> list[TableSpec]:
        return [link.body for n in range(self.snapshot.spec_version) if (link := self.objects.specs.get(n))]

    def history(self, partition: str) -> Iterator[ViewFile]:
        """The partition's history files."""
        for bucket in self._buckets(partition):
            yield from self._files(partition, bucket.history)

    def _files(self, partition: str, files: Iterable[DataFile]) -> Iterator[ViewFile]:
        return (ViewFile(partition, self.objects.store.uri(file.name), file) for file in files)

    def _buckets_of(self, partitions: Iterator[str]) -> Iterator[tuple[str, Sequence[BucketEntry]]]:
        """Each partition with its buckets. From a remote store, `MANIFESTS_AHEAD` manifests are read at a time."""
        if self.objects.store.uri().startswith("file:"):
            yield from ((partition, self._buckets(partition)) for partition in partitions)
            return
        with ThreadPoolExecutor(MANIFESTS_AHEAD) as pool:
            while some := [*islice(partitions, MANIFESTS_AHEAD)]:
                contexts = [copy_context() for _ in some]  # spans of what the threads do are below the caller's
                found = pool.map(lambda context, partition: context.run(self._buckets, partition), contexts, some)
                yield from zip(some, found, strict=True)

    def _buckets(self, partition: str) -> Sequence[BucketEntry]:
        return self.pinned[partition] if partition in self.pinned else self.manifest(partition).body.buckets

    def manifest(self, partition: str, known: Link[Manifest] | None = None) -> Link[Manifest]:
        """The version of a partition that the snapshot shows. ``known``: one that was read before, and may be that one."""
        shown, chain = self.snapshot.partitions[partition], self.objects.partition(partition)
        if shown.group is not None:
            return self.objects.grouped(partition, shown)
        manifest = known if known and known.number == shown.version else chain.get(shown.version)
        if manifest is None or manifest.body.merged != shown.merged:
            named_by = "`latest`" if self.number is None else f"Snapshot {self.number}"
            lost = self.snapshot.lost(partition, chain.head())
            raise self.objects.missing(partition, shown.version, named_by, lost=lost)
        return manifest


def partitions_of(
    spec: TableSpec, names: Iterable[str], where: str | None, schema: pa.Schema | None = None
) -> Iterator[str]:
    """The partitions that may have a row that passes the filter, in the order of their values.

    ``schema`` has the columns that the filter may name; default: those of the spec.
    """
    schema = spec.schema if schema is None else schema
    hashes = hash_values(spec, where, schema)
    values = {p: partition_scalars(spec, p) for p in names}
    values = {p: own for p, own in values.items() if all(own[c].as_py() in hashes[c] for c in hashes)}
    ordered = sorted(values, key=lambda p: ([value.as_py() for value in values[p].values()], p))
    condition = all_of(parse_where(where, schema, ArrowTerms()))
    if condition is None:
        yield from ordered
        return
    import pyarrow.dataset as ds  # see `read.arrow`

    # The partition columns alone rule partitions out, before any manifest is opened.
    format_, nowhere = ds.ParquetFileFormat(), LocalFileSystem()
    fragments = [
        format_.make_fragment(str(i), nowhere, partition_expression=partition_expression(values[name]))
        for i, name in enumerate(ordered)
    ]
    dataset = ds.FileSystemDataset(fragments, schema, format_, nowhere)
    yield from (ordered[int(fragment.path)] for fragment in dataset.get_fragments(condition))


def partition_expression(values: Mapping[str, pa.Scalar]) -> pc.Expression:
    """The condition that partition columns have these values; true if there are none."""
    return reduce(and_, (pc.field(column) == value for column, value in values.items()), pc.scalar(True))


def latest_has_no_files() -> ConfigurationError:
    """The error if a caller asks for the files of `latest`."""
    return ConfigurationError(
        "latest-has-no-files",
        "`latest` is merged while it is read: its files are temporary and vanish with the reader.",
        next="export it (`lakeupsert export --snapshot latest`), read it with to_arrow or to_spark, or list the files of "
        "`published`",
    )


def plain_path(uri: str) -> str:
    """A `file:` URL as a path. Other URLs have nothing encoded in them, and are returned as they are."""
    return unquote(urlsplit(uri).path) if uri.startswith("file:") else uri


def newest_snapshot(objects: TableObjects) -> Link[Snapshot] | None:
    """The newest snapshot. Raises DamagedTableError if the ledger names a newer one, which then is lost.

    The ledger is read first: a snapshot exists before an entry names it. The ledger's head is only read if it is newer than
    the snapshot.
    """
    last = objects.ledger.newest_number()
    head = objects.snapshots.head()
    if last is not None and last > (head.body.batch if head else -1):
        entry = objects.ledger.get(last)
        known = entry.body.snapshot if entry else None
        if known is not None and known > (head.number if head else -1):
            raise objects.missing_snapshot(known, last, head.number if head else None)
    return head


def choose(objects: TableObjects, snapshot: str | int | date) -> Link[Snapshot] | None:
    """Find a snapshot by number, by tag, or by time (the newest that was published until then).

    ``"published"`` is the newest one; None if there is none. A date, also as text, is its first moment in UTC.
    """
    if isinstance(snapshot, bool) or not (isinstance(snapshot, str | date) or hasattr(snapshot, "__index__")):
        raise ConfigurationError(
            "unknown-snapshot",
            f"A snapshot can't be chosen by {snapshot!r}, a {type(snapshot).__name__}.",
            next='give "published", a number, a tag, a date or a time; `lakeupsert history` lists the snapshots',
        )
    head = newest_snapshot(objects)
    if snapshot == "published":
        return head
    if head is None:
        raise ConfigurationError(
            "unknown-snapshot",
            f"There is no snapshot {snapshot}: nothing was published yet.",
            next="run `lakeupsert run` first; until then `published` has no rows",
        )
    wanted = _parse(snapshot, head) if isinstance(snapshot, str) else snapshot
    if not isinstance(wanted, date):
        wanted = index(wanted)  # also an integer of numpy
    if isinstance(wanted, date):
        if not isinstance(wanted, datetime):
            wanted = datetime.combine(wanted, time())
        moment = wanted if wanted.tzinfo else wanted.replace(tzinfo=UTC)
        link, after = _newest_until(objects, moment)
        if link is None:
            raise _no_snapshot(f"no snapshot from before {when(moment)}, or it has expired", head)
        if after is not None and after > link.number + 1:
            tags = ", ".join(repr(tag) for tag, number in head.body.tags.items() if number == link.number)
            raise _no_snapshot(
                f"no record of the newest snapshot at {when(moment)}: {link.number + 1} to {after - 1} are "
                f"expired and gone; the nearest before them is {link.number}{tags and f', tagged {tags}'}",
                head,
            )
        wanted = link.number
    elif 0 <= wanted <= head.number:
        link = objects.snapshots.get(wanted)
    else:
        raise _no_snapshot(f"no snapshot {wanted}", head)
    if link is None or not head.body.keeps(wanted):
        newest = newest_snapshot(objects)  # a vacuum may have expired it since the head was read
        if newest is not None and newest.body.keeps(wanted):
            raise DamagedTableError(
                "missing-version",
                f"Snapshot {wanted} has not expired, but it is missing: {objects.store.uri(objects.snapshots.name(wanted))}. "
                "Something other than lakeupsert deleted it. Newer snapshots do not need it.",
                next=f"{metadata.FROM_BACKUP}; `lakeupsert history` lists the snapshots that can be read",
            )
        raise expired_snapshot(wanted, newest)
    return link


def _newest_until(objects: TableObjects, moment: datetime) -> tuple[Link[Snapshot] | None, int | None]:
    """The newest existing snapshot that was published until then, and the number of the next one that exists."""
    after = None
    for number in objects.snapshots.numbers():
        link = objects.snapshots.get(number)
        if link is not None and datetime.fromisoformat(link.written_at) <= moment:
            return link, after
        after = number
    return None, after


def expired_snapshot(number: int, head: Link[Snapshot] | None) -> ConfigurationError:
    oldest = f"the oldest one that is kept is {head.body.expired}" if head else "there is none"
    return ConfigurationError(
        "expired-snapshot",
        f"Snapshot {number} has expired, and its files may be gone; {oldest}.",
        next="see `lakeupsert history`; to keep snapshots longer, tag them (`publish --tag`) or raise `keep_snapshots`",
    )


def _parse(text: str, head: Link[Snapshot]) -> int | datetime:
    if text in head.body.tags:
        return head.body.tags[text]
    if text.isascii() and text.isdecimal():
        return int(text)
    try:
        return datetime.fromisoformat(text)
    except ValueError as e:
        tags = f"; tags are {', '.join(head.body.tags)}" if head.body.tags else ""
        raise ConfigurationError(
            "unknown-snapshot",
            f"{text!r} is not a snapshot{tags}.",
            next='give "published", a number, a tag or a time such as 2026-01-31T04:00:00Z; `lakeupsert history` lists them',
        ) from e


def _no_snapshot(what: str, head: Link[Snapshot]) -> ConfigurationError:
    return ConfigurationError(
        "unknown-snapshot",
        f"There is {what}; the newest is {head.number}, published {when(head.written_at)}.",
        next="see `lakeupsert history` for the snapshots that are kept",
    )
