"""Phase one's row work, the same on every host: landing files to appended files and reports. Commits nothing.

Reads     landing files, each of them once
Writes    appended files and quarantine files, under names of their own
Repeat    safe: files that no ledger entry names count for nothing

    read (landing) -> quarantine refused rows -> (settle early) -> cut by range -> | shuffle | -> settle by rank, sort -> write

A range is a partition; in a large partition it is the rows whose keys fall into one bucket (`AppendJob.bits`). A host calls
`read_landing` on groups of landing files, passes the rows through `settle.RowBuffer` and `settle.group_by_range`, and then calls
`settle.settle_and_write` on all rows of one range or of several.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import ceil, log2

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.config import Reading
from lakeupsert.engine.quarantine import QuarantineWriter
from lakeupsert.engine.reports import FileFailed, FileRead, Report, Written
from lakeupsert.landing.accept import RowRules, read_rows
from lakeupsert.landing.formats.blocks import (
    ChangedFileError,
    DamagedFileError,
    LandingInput,
    UnplannedColumnError,
    UnreadableFileError,
)
from lakeupsert.landing.formats.positions import AFTER_A_COMMIT, EVENT_TIMES, LOG_POSITION, NO_COMMIT, noted_positions
from lakeupsert.landing.glimpse import preview
from lakeupsert.landing.origins import Origins
from lakeupsert.landing.partitions import UNPLACED
from lakeupsert.landing.refusals import REFUSED_SCHEMA
from lakeupsert.rows.arrays import Mask, Rows
from lakeupsert.rows.buckets import key_hashes
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.datafiles import EXPANSION, bytes_without_rows
from lakeupsert.rows.digest import Digest
from lakeupsert.rows.filewriter import Footer, PackWriter
from lakeupsert.rows.floor import PARTITION, is_among
from lakeupsert.storage import NotFoundError, ObjectReader, ObjectStore
from lakeupsert.table.erasure import ErasedKeys
from lakeupsert.table.layout import FileKind, TableObjects, partition_scalars
from lakeupsert.table.spec import FILE, TableSpec

ERASED = "row of an erased key"
"""A kind of `FileRead.skipped`."""
RANGE_BYTES = 64 << 20
"""Approximate limit of a key range in landing bytes. One task settles a range, and one unit merges it."""
MIN_PREVIEWS = 16
"""Places of a batch that are previewed to find its large partitions; more if there are more than so many `RANGE_BYTES`."""
PREVIEW_BYTES = 1 << 16
"""Bytes of a text file that a preview reads."""
PREVIEW_THREADS = 16


@dataclass(frozen=True)
class AppendJob:
    """What a task needs, wherever it runs; picklable.

    Attributes:
        start: how many entries the ledger had; the names of new files contain it.
        only: set if a batch is read again for these partitions alone. Their rows are written; nothing is quarantined.
        left_out: of a batch that is read again, the keys that merges refused (`floor.read_refused_keys`). Their rows count
            as superseded.
        pack: the kind of the packs of appended rows.
        full: the batch is a full extract, so reports have its greatest order.
        bits: partitions that are cut into 2^bits ranges of key hashes (`rows.buckets`).
        stored_bits: the most bits of the stored buckets of a partition. Its ranges are written in pieces of as many bits.
        bucket_bytes: the setting `bucket`: rows of more bytes are cut as if they were stored already; None: they are not.
        compared: share of the keys, by hash, that are compared between partitions (`settle.count_keys_in_several_partitions`).
        inferred: the spec has types by the text of this batch.
        erased: rows of these keys count as superseded, and are not written.
    """

    landing: ObjectReader
    store: ObjectStore
    inputs: tuple[LandingInput, ...]
    reading: Reading
    rules: RowRules
    batch_id: str
    spec_version: int
    start: int
    only: frozenset[str] | None = None
    left_out: Rows | None = None
    pack: FileKind = "appended"
    full: bool = False
    bits: Mapping[str, int] = field(default_factory=dict)
    stored_bits: Mapping[str, int] = field(default_factory=dict)
    bucket_bytes: int | None = None
    compared: float = 1.0
    inferred: bool = False
    erased: tuple[ErasedKeys, ...] = ()

    @property
    def spec(self) -> TableSpec:
        return self.rules.spec

    def footer(self, kind: FileKind) -> Footer:
        return Footer(self.spec.table_id, kind, self.batch_id, self.spec_version, renames=len(self.spec.renames))

    def new_pack(self) -> PackWriter:
        name, spec = TableObjects.new(self.pack, self.start), self.spec
        return PackWriter(self.store, name, spec.pack_schema, self.footer("appended"), spec)

    def piece_bits(self, partition: str, rows: Rows) -> int:
        """Into how many pieces, 2^bits, to cut the rows of a range. Each reader of a piece reads what a file has beside its rows,
        too, so no piece gets fewer bytes of rows than that."""
        size, bits = rows.nbytes / EXPANSION, self.bits.get(partition, 0)
        wanted = self.stored_bits.get(partition, 0)
        if self.bucket_bytes:
            wanted = max(wanted, ceil(log2(max(1, size * 2**bits / self.bucket_bytes))))
        most = int(log2(max(1, size / max(1, bytes_without_rows(self.spec.ranked_schema.types)))))
        return max(0, min(wanted - bits, most))

    def quarantine(self) -> QuarantineWriter:
        return QuarantineWriter(self.store, self.start, self.footer("quarantine"))

    def of_wanted_partitions(self, rows: Rows) -> Rows:
        """``rows``, if the job has `only` the rows of those partitions."""
        if self.only is None:
            return rows
        return rows.filter(pc.is_in(rows[PARTITION], pa.array(sorted(self.only), pa.string())))


@dataclass(frozen=True)
class _Preview:
    """A place in a batch, and how many bytes of the batch it stands for."""

    file: LandingInput
    bytes: float


def choose_ranges(job: AppendJob) -> AppendJob:
    """The job with `bits` for every partition that receives more than `RANGE_BYTES`. All tasks, hosts and runs get the same.

    The bytes of a partition are estimated from its column, in row groups or lines spread evenly over the batch. A small
    partition may be missed, and stays in one piece.
    """
    if sum(file.size for file in job.inputs) <= RANGE_BYTES:
        return job

    def bytes_by_partition(sample: _Preview) -> dict[str, float]:
        try:
            rows = preview(job.landing, sample.file, job.reading, job.spec, PREVIEW_BYTES).partitions
        except NotFoundError:  # reading its rows will report it
            return {}
        return {name: sample.bytes * count / sum(rows.values()) for name, count in rows.items()}

    sizes: Counter[str] = Counter()
    with ThreadPoolExecutor(PREVIEW_THREADS) as pool:
        for found in pool.map(bytes_by_partition, _previews(job.inputs)):
            sizes.update(found)
    ranges = {name: ceil(size / RANGE_BYTES) for name, size in sizes.items() if size > RANGE_BYTES}
    return replace(job, bits={name: (count - 1).bit_length() for name, count in sorted(ranges.items())})


def _previews(inputs: Sequence[LandingInput]) -> list[_Preview]:
    """Row groups, and text files, spread evenly over the batch's bytes."""
    total = sum(file.size for file in inputs)
    count = max(MIN_PREVIEWS, total // RANGE_BYTES)
    times: Counter[LandingInput] = Counter()
    begin = 0
    for file in inputs:
        for number in range(ceil(begin * count / total), ceil((begin + file.size) * count / total)):
            part = file
            if file.row_groups is not None:
                first, end = file.row_groups
                group = min(end - 1, first + int((number * total / count - begin) / file.size * (end - first)))
                part = replace(file, row_groups=(group, group + 1))
            times[part] += 1
        begin += file.size
    return [_Preview(part, n * total / count) for part, n in times.items()]


def read_landing(job: AppendJob, inputs: Iterable[LandingInput]) -> Iterator[Report | Rows]:
    """Read landing files. Yields reports, and accepted rows as tables with the ranked schema and `PARTITION`."""
    known = {*job.spec.schema.names, *([job.spec.delete.operation] if job.spec.delete else [])}
    with job.quarantine() as quarantine:
        for file in inputs:
            rows_read = rows_accepted = hollow = incomplete = 0
            names: dict[str, str] = {}
            snapshots: set[str] = set()
            skipped, contrary = Counter[str](), Counter[str]()
            refused: list[int] = []
            origins = Origins()
            begins = file.row_groups is None or file.row_groups[0] == 0
            sha256 = hashlib.sha256() if begins else None
            try:
                for rows in read_rows(job.landing, file, job.reading, job.rules, sha256):
                    rows_read += rows.accepted.num_rows + rows.quarantined.num_rows
                    rows_accepted += rows.accepted.num_rows
                    names |= rows.names
                    snapshots |= doubtful_snapshots(rows.accepted, job.spec)
                    skipped.update(rows.skipped)
                    contrary.update(rows.contrary)
                    hollow += rows.hollow_deletes
                    incomplete += rows.incomplete_creates
                    origins |= rows.origins
                    if job.only is None:
                        quarantine.write(rows.quarantined)
                    if job.inferred:
                        refused += rows.quarantined["position"].to_pylist()
                    accepted = job.of_wanted_partitions(rows.accepted)
                    if (erased := find_erased(job, accepted)).any():
                        skipped[ERASED] += int(np.count_nonzero(erased))
                    accepted, reports = drop_left_out(job, accepted, erased)
                    yield from reports
                    yield ranked_rows(job, accepted, file.place)
                content = sha256.hexdigest() if sha256 else None
                operations = job.spec.delete is not None and job.spec.delete.operation in names
                renamed = job.spec.under_old_names(names)
                waiting = tuple(names.keys() - known) if rows_accepted else ()
                counts = hollow, incomplete, tuple(refused), origins, dict(contrary)
                found = tuple(sorted(snapshots)), dict(skipped), waiting, *counts
                yield FileRead(file.path, rows_read, rows_accepted, content, operations, renamed, *found)
            except UnreadableFileError as e:
                unplanned, damaged = (isinstance(e, kind) for kind in (UnplannedColumnError, DamagedFileError))
                yield FileFailed(file.path, changed=False, reason=e.reason, unplanned=unplanned, damaged=damaged)
            except ChangedFileError:
                yield FileFailed(file.path, changed=True, reason="it changed or vanished while it was read")
    yield from quarantine.reports()


def doubtful_snapshots(rows: Rows, spec: TableSpec) -> set[str]:
    """Snapshots of Debezium, by their events in ``rows``, that the table's order may misplace.

    These are `incremental` if times order the events, since its rows have the time at which they were sent; and
    `noted_positions`, since a snapshot that a connector without a history begins with is below every change.
    """
    first = spec.order_by[0]
    if first == LOG_POSITION:
        positions = rows[LOG_POSITION].cast(pa.string())
        of_snapshots = pc.starts_with(positions, NO_COMMIT)
        lowest = pc.min(positions.filter(pc.greater_equal(positions, AFTER_A_COMMIT))).as_py()
        return noted_positions([*pc.unique(positions.filter(of_snapshots)).to_pylist(), lowest or ""])
    if "__source_snapshot" not in rows.schema.names or first not in EVENT_TIMES:
        return set()
    return {"incremental"} & set(pc.unique(rows["__source_snapshot"].cast(pa.string())).to_pylist())


def ranked_rows(job: AppendJob, accepted: Rows, place: int) -> Rows:
    """Accepted rows of the file at this place in the batch, with the ranked schema and `PARTITION`."""
    file = pa.array(np.full(accepted.num_rows, place, np.int32))
    return accepted.append_column(FILE, file).select([*job.spec.ranked_schema.names, PARTITION])


def with_partition(rows: Rows, spec: TableSpec, partition: str) -> Rows:
    """``rows`` with the partition columns, as `TableSpec.pack_schema` has them. In `UNPLACED` they are null."""
    values = {} if partition == UNPLACED else partition_scalars(spec, partition)
    for column in (spec.schema.field(name) for name in spec.partition_by):
        value = values.get(column.name, pa.scalar(None, column.type))
        rows = rows.append_column(column, pa.repeat(value, rows.num_rows))
    return rows


def find_erased(job: AppendJob, rows: Rows) -> Mask:
    """Which rows have a key of `erased`."""
    found: Mask = np.zeros(rows.num_rows, bool)
    partitions = rows[PARTITION].combine_chunks() if job.erased else None
    wanted = [(keys.columns, np.array(keys.hashes, np.uint64)) for keys in job.erased]
    for partition in pc.unique(partitions).to_pylist() if partitions is not None else ():
        places = np.flatnonzero(as_mask(pc.equal(partitions, partition)))
        own = with_partition(rows.take(pa.array(places)), job.spec, partition)
        for columns, erased in wanted:
            if partition != UNPLACED or {*columns}.isdisjoint(job.spec.partition_by):
                found[places] |= np.isin(key_hashes(own, job.spec, columns), erased)
    return found


def drop_left_out(job: AppendJob, rows: Rows, erased: Mask) -> tuple[Rows, list[Written]]:
    """``rows`` without those whose keys are `left_out` or ``erased``, and reports that count these as superseded."""
    is_left_out = erased
    if job.left_out is not None:
        is_left_out = erased | is_among(rows, job.left_out, [PARTITION, *job.spec.stored_key])
    if not is_left_out.any():
        return rows, []
    superseded, reports = rows.filter(pa.array(is_left_out)), []
    for partition in pc.unique(superseded[PARTITION]).to_pylist():
        digest = Digest(job.spec)
        digest.add(superseded.filter(pc.equal(superseded[PARTITION], partition)))
        reports.append(Written(partition, digest.rows, digest.rows, str(digest), str(digest), ()))
    return rows.filter(pa.array(~is_left_out)), reports


def quarantine_unreadable(job: AppendJob, unreadable: Mapping[str, str]) -> list[Report]:
    """Write one quarantine row for each file that can't be read at all, given as path and reason."""
    with job.quarantine() as quarantine:
        n = len(unreadable)
        columns = [["unreadable_file"] * n, list(unreadable.values()), list(unreadable), *([[None] * n] * 4)]
        quarantine.write(pa.table(columns, schema=REFUSED_SCHEMA))
    return [*quarantine.reports()]
