"""The remains of a table whose metadata is lost: versions that still read, and the data files.

Reads     one listing, each version of the spec and of the ledger, the newest snapshot, the newest manifest of each partition; the
          footers and keys of partitions without one
Writes    nothing
Repeat    safe

A partition is known if its newest manifest reads, each object of that is there, and no file was begun behind it. In all others,
each data file says what its merge made of the keys in it, so the latest file with a key decides (ADR 0075). Only between files
that no merge made, the order of the rows decides.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeupsert.errors import DamagedTableError
from lakeupsert.pipeline.resources import CONCURRENT_REQUESTS
from lakeupsert.rows.arrays import Hashes, Rows
from lakeupsert.rows.buckets import buckets, key_hashes
from lakeupsert.rows.datafiles import open_object, stream_file
from lakeupsert.rows.digest import row_hashes
from lakeupsert.rows.filewriter import footer_keys
from lakeupsert.rows.vectors import without_rows
from lakeupsert.storage import NotFoundError, ObjectInfo, ObjectStore
from lakeupsert.table.chain import Chain, Link
from lakeupsert.table.group import read_group
from lakeupsert.table.layout import (
    DATA,
    GROUPS,
    HOME,
    OWN_NAMES,
    PARTITIONS,
    STATEMENT_ROWS,
    TableObjects,
    partition_of,
)
from lakeupsert.table.ledger import LedgerEntry, active_batches
from lakeupsert.table.manifest import BucketEntry, DataFile, Manifest, TombstoneFile
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import FIELD_ID, RESERVED, TableSpec

Body = TypeVar("Body")
_IDS = pa.binary(16)


@dataclass(frozen=True)
class StoredFile:
    """A data file by its footer.

    Attributes:
        batch: the one up to which its merge had merged; 0: another program wrote the file.
        start: as in `TableObjects.new`.
        spec_version: of the spec that it was written under; -1: unknown.
        ids: the field id of each column that has one.
    """

    file: DataFile
    kind: str
    batch: int
    start: int
    spec_version: int
    schema: pa.Schema
    ids: dict[str, int]

    @property
    def age(self) -> tuple[int, int]:
        """Greater for a later merge."""
        return self.batch, self.start


@dataclass(frozen=True)
class PartitionRemains:
    """The remains of a partition.

    Attributes:
        manifest: its newest one; None: it is not known.
        pending: the batches that it lacks and whose appended files are all there, in order.
        why: it is not known.
        files: its base and delta files and tombstones, if it is not known.
        unreadable: the names of others, which are damaged.
    """

    manifest: Manifest | None
    pending: tuple[Link[LedgerEntry], ...] = ()
    why: str = ""
    files: tuple[StoredFile, ...] = ()
    unreadable: tuple[str, ...] = ()

    @property
    def has_files(self) -> bool:
        return bool(self.files or self.unreadable or (self.manifest and self.manifest.buckets))

    @property
    def is_gone(self) -> bool:
        """Whether only the ledger or a snapshot names it."""
        return not (self.has_files or self.pending) and (self.manifest is None or self.manifest.merged < 0)

    def has(self, batch: int) -> bool:
        """Whether all rows of a batch that touches it are in it."""
        return self.manifest is not None and (
            batch <= self.manifest.merged or any(link.number == batch for link in self.pending)
        )

    def may_have(self, batch: int) -> bool:
        """Whether some rows of a batch that touches it are in it."""
        return self.has(batch) or any(file.batch >= batch for file in self.files)


@dataclass(frozen=True)
class Remains:
    """The remains of a table.

    Attributes:
        spec: the newest one; None if it is lost.
        entries: those of the ledger that read, by number.
        lost_entries: how many others were there at least, by all that names them.
        of_no_entry: files of appended rows whose writer began behind the newest entry that anything names.
        waiting: the entries that count and may not be in every partition that they touch.
        snapshot: the newest one that reads.
        names: of all objects.
    """

    store: ObjectStore
    spec: TableSpec | None
    entries: dict[int, Link[LedgerEntry]]
    lost_entries: int
    of_no_entry: tuple[str, ...]
    snapshot: Link[Snapshot] | None
    partitions: dict[str, PartitionRemains]
    waiting: dict[int, LedgerEntry]
    names: tuple[str, ...] = field(repr=False)


def find_remains(store: ObjectStore) -> Remains:
    """Look at all that is left at an address. Raises ConfigurationError if a later lakeupsert wrote it, StoreUnavailableError."""
    objects, listed = TableObjects(store), {found.name: found for found in store.list("")}
    entries, snapshot = _entries(objects), next(_readable(objects.snapshots), None)
    withdrawn = _withdrawn(entries)
    touching: dict[str, list[Link[LedgerEntry]]] = defaultdict(list)
    for number, link in sorted(entries.items()):
        for partition in link.body.touched if number not in withdrawn else ():
            touching[partition].append(link)
    files: dict[str, list[str]] = defaultdict(list)
    for name in filter(_is_data, listed):
        files[partition_of(name) or ""].append(name)
    chains = {name.removeprefix(PARTITIONS).rpartition("/")[0] for name in listed if name.startswith(PARTITIONS)}
    replaced = _in_groups(objects, listed, snapshot)

    def look(partition: str) -> PartitionRemains:
        known = _known(objects, partition, files.get(partition, []), listed, snapshot, replaced)
        if isinstance(known, str):
            return _guess(store, [listed[name] for name in files.get(partition, [])], known)
        return PartitionRemains(known, tuple(_pending(known, touching.get(partition, []), listed)))

    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        names = sorted(chains | files.keys() | touching.keys() | (snapshot.body.partitions if snapshot else {}).keys())
        partitions = dict(zip(names, pool.map(look, names), strict=True))
    manifests = [one.manifest for one in partitions.values() if one.manifest]
    shown = [snapshot.body] if snapshot else []
    newest = max([*entries, *(one.batch for one in shown), *(one.merged for one in manifests)], default=0)
    starts = {n: TableObjects.start_of(n) or 0 for n in listed if n.rpartition("/")[0] in (DATA, STATEMENT_ROWS)}
    begun = max([newest, *(start - 1 for start in starts.values())])
    spec = next(_readable(objects.specs), None)
    used = [
        *(link.body.spec_version for link in entries.values()),
        *(one.spec_version for one in shown),
        *(one.spec_version for one in manifests),
        *(file.spec_version for one in partitions.values() for file in one.files),
    ]
    return Remains(
        store,
        spec=spec.body if spec is not None and spec.number >= max(used, default=0) else None,
        entries=entries,
        lost_entries=begun + 1 - len(entries),
        of_no_entry=tuple(name for name, start in starts.items() if start > newest),
        snapshot=snapshot,
        partitions=partitions,
        waiting={
            number: link.body
            for number, link in sorted(entries.items())
            if number not in withdrawn and not all(partitions[p].has(number) for p in link.body.touched)
        },
        names=tuple(listed),
    )


def _entries(objects: TableObjects) -> dict[int, Link[LedgerEntry]]:
    """The entries of the ledger that read."""
    numbers = list(objects.ledger.numbers())
    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        found = pool.map(partial(_read, objects.ledger), numbers)
        return {number: link for number, link in zip(numbers, found, strict=True) if link is not None}


def _withdrawn(entries: Mapping[int, Link[LedgerEntry]]) -> set[int]:
    """The batches that restores withdrew, as far as the entries before the first lost one say."""
    first_lost = next(number for number in range(len(entries) + 1) if number not in entries)
    whole = [(number, entries[number].body) for number in range(first_lost)]
    return {number for number, entry in whole if entry.kind == "batch"} - active_batches(whole)


def _pending(
    manifest: Manifest, touching: Sequence[Link[LedgerEntry]], listed: Mapping[str, ObjectInfo]
) -> Iterator[Link[LedgerEntry]]:
    """The batches that a partition lacks, up to the first one that this call can't merge."""
    for link in touching:
        if link.number <= max(manifest.merged, 0):
            continue
        files = link.body.touched[manifest.partition].files
        is_gone = any(name not in listed for file in files for name in file.objects)
        # A restore goes back to a version of before. Behind a floor, a merge would refuse rows.
        if link.body.restored or is_gone or any(bucket.floor for bucket in manifest.buckets):
            return
        yield link


def _in_groups(objects: TableObjects, listed: Iterable[str], snapshot: Link[Snapshot] | None) -> set[str]:
    """The objects in groups of manifests up to the ``snapshot``, which replaced the ones that it does not show."""
    found = set[str]()
    for name in listed:
        if snapshot and name.startswith(f"{GROUPS}/") and (TableObjects.start_of(name) or 0) <= snapshot.number:
            with suppress(DamagedTableError, NotFoundError):
                found.update(*(one.objects for one in read_group(objects.store, name, "").values()))
    return found


def _readable(chain: Chain[Body]) -> Iterator[Link[Body]]:
    """The versions that read, newest first."""
    for number in chain.numbers():
        if (link := _read(chain, number)) is not None:
            yield link


def _read(chain: Chain[Body], number: int) -> Link[Body] | None:
    with suppress(DamagedTableError):
        return chain.get(number)
    return None


def _is_data(name: str) -> bool:
    """Whether it is a base file, a delta, tombstones, or a Parquet file of another program that was adopted."""
    if OWN_NAMES.fullmatch(name):
        return name.rpartition("/")[2].startswith(("base-", "delta-", "tombstones-"))
    hidden = any(part.startswith(("_", ".")) for part in name.split("/"))
    return name.endswith(".parquet") and not hidden and not name.startswith(f"{HOME}/")


def _known(
    objects: TableObjects,
    partition: str,
    files: Sequence[str],
    listed: Mapping[str, ObjectInfo],
    snapshot: Link[Snapshot] | None,
    replaced: set[str],
) -> Manifest | str:
    """The newest manifest of a partition that has these ``files``, some of them ``replaced``, or why it is not known."""
    shown = snapshot.body.partitions.get(partition) if snapshot else None
    try:
        head = objects.partition(partition).head()
        if head and shown and shown.group and shown.version == head.number:
            head = objects.grouped(partition, shown)
    except DamagedTableError as e:
        return e.message
    if snapshot and shown and snapshot.body.lost(partition, head):
        return f"its manifest {shown.version} is missing, which snapshot {snapshot.number} shows"
    if head is None:  # it has no version yet, or lost all of them
        return "it has no manifest" if files else Manifest(partition=partition, merged=-1, spec_version=0)
    for file in (f for b in head.body.buckets for f in (*b.data, *b.tombstones)):
        for name in file.objects:
            found = listed.get(name)
            if found is None or (name == file.name and found.size != file.bytes):
                return f"{name} is {'missing' if found is None else f'of {found.size:,} bytes, not {file.bytes:,}'}"
    for name in files:
        start = TableObjects.start_of(name)
        if start is not None and start > head.number and name not in head.body.objects | replaced:
            return f"{name} was written behind its newest manifest, so a newer one may be lost"
    return head.body


def _guess(store: ObjectStore, infos: Sequence[ObjectInfo], why: str) -> PartitionRemains:
    files, unreadable = [], []
    for info in infos:
        try:
            files.append(read_stored_file(store, info))
        except DamagedTableError:
            unreadable.append(info.name)
    ordered = tuple(sorted(files, key=lambda one: (one.age, one.file.name)))
    return PartitionRemains(None, (), why, ordered, tuple(unreadable))


def read_stored_file(store: ObjectStore, info: ObjectInfo) -> StoredFile:
    """Read the footer of a data file. Raises DamagedTableError."""
    with open_object(store, info.name) as source, pq.ParquetFile(source) as parquet:
        footer, schema = parquet.metadata, parquet.schema_arrow
    own = footer_keys(footer)
    if own.get("file") != info.name:
        own = {}  # of another program, which may have copied the keys
    kind = own.get("kind", "base")
    make = TombstoneFile if kind == "tombstones" else DataFile
    file = make(
        name=info.name,
        rows=footer.num_rows,
        bytes=info.size,
        bucket=int(own.get("bucket", 0)),
        bits=int(own.get("bits", 0)),
        renames=int(own.get("renames", 0)),
    )
    numbers = {field.name: (field.metadata or {}).get(FIELD_ID) for field in schema}
    ids = {name: int(number) for name, number in numbers.items() if number and not name.startswith(RESERVED)}
    start = TableObjects.start_of(info.name) or 0
    return StoredFile(file, kind, int(own.get("batch", 0)), start, int(own.get("spec", -1)), schema, ids)


def is_of_rebuild(store: ObjectStore, info: ObjectInfo) -> bool:
    """Whether a rebuild wrote a file, which is then of batch 0."""
    try:
        one = read_stored_file(store, info) if OWN_NAMES.fullmatch(info.name) else None
    except DamagedTableError:
        return False
    return one is not None and one.batch == 0 <= one.spec_version


@dataclass(frozen=True)
class Settled:
    """The files of a partition without a manifest, in which each key is once.

    Attributes:
        doubtful: rows that later merges of their bucket lack: their keys were deleted, or such a merge broke off.
    """

    bucket: BucketEntry
    doubtful: int


def settle_by_merge(store: ObjectStore, spec: TableSpec, files: Sequence[StoredFile]) -> Settled:
    """Let the latest file with a key decide. ``files`` in the order of their merges."""
    schema = pa.schema([spec.base_schema.field(name) for name in spec.stored_key])
    seen, doubtful, kept = pa.array([], _IDS), 0, list[DataFile]()
    for stored in reversed(files):
        keys = pa.concat_tables([schema.empty_table(), *stream_file(store, stored.file, schema)])
        ids, hashes = _ids(keys, spec)
        later = np.asarray(pc.is_in(ids, value_set=seen))
        if stored.kind != "tombstones":
            rewritten = [one.file for one in files if one.kind == "base" and one.age > stored.age]
            doubtful += int(np.count_nonzero(~later & _covered(hashes, rewritten)))
        if not later.all():
            kept.insert(0, without_rows(stored.file, np.flatnonzero(later)))
        if stored.age > (0, 0):  # otherwise no merge made it
            seen = pa.concat_arrays([seen, ids])
    dead = tuple(file for file in kept if isinstance(file, TombstoneFile))
    return Settled(
        BucketEntry(id="", settled=False, base=tuple(f for f in kept if f not in dead), tombstones=dead), doubtful
    )


def _ids(keys: Rows, spec: TableSpec) -> tuple[pa.Array, Hashes]:
    """Two hashes of each key, which identify it together; and the one of buckets."""
    hashes = key_hashes(keys, spec)
    both = np.stack([hashes, row_hashes(keys, spec.stored_key)], axis=1)
    return pa.FixedSizeBinaryArray.from_buffers(_IDS, len(keys), [None, pa.py_buffer(both.tobytes())]), hashes


def _covered(hashes: Hashes, files: Sequence[DataFile]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which of the keys are in a bucket of one of the files."""
    found = np.zeros(len(hashes), bool)
    for bucket, bits in {(file.bucket, file.bits) for file in files}:
        found |= buckets(hashes, bits) == bucket
    return found
