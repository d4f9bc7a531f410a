"""Check the objects of a table: is each one there that another one needs, and does it hold what that one says?

Reads     all metadata that is needed (`needed`), and leases. With a host also each data file and quarantine file, whole
Writes    nothing
Repeat    safe

A finding is the error that the first command to need the object would end with. Objects that nobody needs are not read.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.engine.attempts import all_or_raise
from lakeupsert.engine.count import count_rows
from lakeupsert.engine.hosts import Host, map_counted
from lakeupsert.engine.runs import runs
from lakeupsert.errors import DamagedTableError, RefusedError
from lakeupsert.operations.arrived import newest_arrived
from lakeupsert.operations.needed import Needed, NeededBucket
from lakeupsert.operations.reconcile import BUCKETS_A_CALL
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.rows.arrays import Hashes, Rows
from lakeupsert.rows.buckets import key_hashes
from lakeupsert.rows.datafiles import explain_damage, open_object, stream_file
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import HOME, KEYS, QUARANTINE, rebuild_command
from lakeupsert.table.manifest import HASH_BITS, BucketEntry, DataFile
from lakeupsert.table.spec import TableSpec


@dataclass(frozen=True)
class Finding:
    """An object that is missing or damaged.

    Attributes:
        needed_by: for example ``snapshot 7``, the newest that needs it.
        error: names the object and says what is wrong with it; its ``next`` says how to repair it.
    """

    needed_by: str
    error: DamagedTableError


@dataclass(frozen=True)
class FsckResult:
    """The objects that were checked, and the findings.

    Attributes:
        snapshots: the numbers of the kept ones, newest first.
        metadata: how many specs, ledger entries, snapshots, manifests and groups.
        files: how many data files, deletion vectors, quarantine files, and objects of the key index.
        bytes: of these files.
    """

    snapshots: tuple[int, ...]
    metadata: int
    files: int
    bytes: int
    findings: tuple[Finding, ...]


def fsck(
    table: OpenTable, host: Host | None = None, *, progress: Callable[[str], None] = lambda text: None
) -> FsckResult:
    """Check each object that readers of a kept snapshot or the next commands need.

    ``host`` reads all data files. Without one, their sizes are compared with the listing.
    Raises ConfigurationError if there is no table yet, and StoreUnavailableError. A missing or damaged object raises nothing.
    """
    findings: dict[str, Finding] = {}

    def found(needed_by: str, error: DamagedTableError) -> None:
        findings.setdefault(error.message, Finding(needed_by, error))

    needed = Needed(table, found, progress)
    store = table.resources.store
    for run in runs(needed.buckets(), lambda bucket: 1, BUCKETS_A_CALL):
        if host is None:
            continue
        sizes = [float(sum(file.bytes for file in bucket.entry.data)) for bucket in run]
        errors = all_or_raise(map_counted(host, store, partial(_read_bucket, store), run, sizes))
        for bucket, wrong in zip(run, errors, strict=True):
            for error in wrong:
                found(bucket.needed_by, error)
    for name in sorted(needed.files) if host else ():
        if name.startswith((f"{QUARANTINE}/", f"{KEYS}/")):
            needed.look(
                "`quarantine`" if name.startswith(QUARANTINE) else "`append`", partial(_read_whole, store, name)
            )
    _check_leases(table, needed)
    _check_works(table, needed)
    needed.look("`reconcile`", partial(newest_arrived, store, needed.batch))
    return FsckResult(
        snapshots=needed.snapshots,
        metadata=len(needed.metadata),
        files=len(needed.files),
        bytes=sum(needed.sizes[name] for name in needed.files),
        findings=tuple(findings.values()),
    )


def _check_leases(table: OpenTable, needed: Needed) -> None:
    objects = table.history.objects
    needed.look("`ingest`", objects.leases.head)
    needed.look("`append`", objects.reading.head)
    needed.look("`maintain`", objects.upkeep.head)
    for name in sorted({name.split("/")[2] for name in needed.sizes if name.startswith(f"{HOME}/sources/")}):
        needed.look(f"`capture {name}`", objects.source(name).head)
        needed.look(f"`capture {name}`", objects.leases_of_source(name).head)


def _check_works(table: OpenTable, needed: Needed) -> None:
    """The packs that an unfinished reprocess from landing files needs."""
    for name in sorted(name for name in needed.sizes if name.startswith(f"{HOME}/units/reprocess-")):
        order = None
        with suppress(RefusedError):  # it has ended meanwhile
            order = needed.look("a reprocess", partial(table.history.work, name))
        for partition, rewrite in order.partitions.items() if order else ():
            head = needed.look("a reprocess", table.history.objects.partition(partition).head)
            if head is None or head.body.reprocessed == name:
                continue
            packs = {file.name for touched in rewrite.batches.values() for file in touched.files}
            for gone in sorted(packs - needed.sizes.keys()):
                needed.look("a reprocess", partial(_raise_gone, table, name, gone, partition))


def _raise_gone(table: OpenTable, work: str, pack: str, partition: str) -> None:
    uri = table.resources.store.uri
    raise DamagedTableError(
        "damaged-data-file",
        f"{uri(pack)} is missing. {uri(work)} names it, the list of an unfinished reprocess. No partition is changed by that.",
        next=f"run `{rebuild_command(partition)}`, which reads the landing files again",
        partition=partition,
    )


def _read_whole(store: ObjectStore, name: str) -> None:
    with open_object(store, name) as source, pq.ParquetFile(source) as file:
        for _ in file.iter_batches():
            pass


def _read_bucket(store: ObjectStore, bucket: NeededBucket) -> Sequence[DamagedTableError]:
    """The damage in the bytes of its files, or else in the keys in them. Each file is read once."""
    entry, spec, errors = bucket.entry, bucket.spec, list[DamagedTableError]()

    def read(file: DataFile) -> Iterator[Rows]:
        dead, past = file in entry.tombstones, file in entry.history
        schema = spec.tombstone_schema if dead else spec.history_schema if past else spec.base_schema
        try:
            yield from _read_file(store, file, schema, spec, entry)
        except DamagedTableError as e:
            errors.append(e)

    for file in entry.history:
        for _ in read(file):
            pass
    wrong = count_rows(store, spec, entry, read).wrong
    return errors or [
        DamagedTableError(
            "damaged-data-file",
            f"{bucket.partition}: {sentence}.",
            next=f"run `{rebuild_command(bucket.partition)}`, which rewrites it from landing files",
            partition=bucket.partition,
        )
        for sentence in wrong
    ]


def _read_file(
    store: ObjectStore, file: DataFile, schema: pa.Schema, spec: TableSpec, bucket: BucketEntry
) -> Iterator[Rows]:
    found = 0
    with explain_damage(store, file.name):
        for rows in stream_file(store, file, schema, spec=spec):
            found += rows.num_rows
            is_split = bucket.settled and bucket.bits and file not in bucket.history  # which stays as it is at a split
            if is_split and not _all_in(bucket, key_hashes(rows, spec)):
                raise pa.ArrowInvalid(f"it has keys that are not of its bucket, {bucket.bucket} of {2**bucket.bits}")
            yield rows
        if found != file.live:
            raise pa.ArrowInvalid(f"it has {found:,} rows, not {file.live:,}")


def _all_in(bucket: BucketEntry, hashes: Hashes) -> bool:
    return bool((hashes >> np.uint64(HASH_BITS - bucket.bits) == bucket.bucket).all())
