"""Phase one's row work, the same for every host: landing files in, appended files and reports out. Commits nothing.

    read (landing) -> quarantine what is refused -> split by partition -> | shuffle | -> settle by G1, sort by key -> write

A host runs `split` on groups of landing files and `settle_and_write` on all rows of a partition, or of a range of its keys.
What both return are small reports; rows never reach the caller.
"""

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.convert import plain
from lakeupsert.engine.datafiles import DataFileWriter, Footer, Pack
from lakeupsert.engine.digest import as_text, hashed_columns, row_hashes
from lakeupsert.engine.landing import (
    PARTITION,
    ChangedFileError,
    LandingInput,
    RowRules,
    Survey,
    UnreadableFileError,
    content_hash,
    read_rows,
)
from lakeupsert.engine.rank import latest
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import NOTHING, QuarantineFile, Touched
from lakeupsert.table.manifest import DataFile, added
from lakeupsert.table.spec import FILE, PLACE, TableSpec

QUARANTINE_SCHEMA = pa.schema(
    [
        pa.field("reason_code", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("position", pa.int64()),
        pa.field("raw", pa.string()),
        pa.field("arrow", pa.binary()),
        pa.field("batch", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True)
class AppendJob:
    """Everything that a task needs, wherever it runs; picklable."""

    landing: ObjectStore
    store: ObjectStore
    inputs: tuple[LandingInput, ...]
    format: str
    rules: RowRules
    batch_id: str
    spec_version: int
    start: int
    """How many entries the ledger has; it is in the new files' names."""
    only: frozenset[str] | None = None
    """A batch that is read again for these partitions alone: their rows are written, and nothing to quarantine."""

    @property
    def spec(self) -> TableSpec:
        return self.rules.spec


class FileRead(msgspec.Struct, frozen=True, tag=True):
    """A landing file, or its part, was read to the end; the part that begins the file knows the content's hash."""

    path: str
    rows: int
    sha256: str | None


class FileFailed(msgspec.Struct, frozen=True, tag=True):
    """A landing file can't be taken: ``changed`` while it was read (next batch), or unreadable (quarantine)."""

    path: str
    changed: bool
    reason: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A quarantine file and the reasons of its rows."""

    file: QuarantineFile
    reasons: dict[str, int]


class Written(msgspec.Struct, frozen=True, tag=True):
    """Rows of one partition went through: ``rows`` in, ``superseded`` lost among themselves, the rest is in ``files``.

    ``digest`` is of all, ``superseded_digest`` of those that lost.
    """

    partition: str
    rows: int
    superseded: int
    digest: str
    superseded_digest: str
    files: tuple[DataFile, ...]


Report = FileRead | FileFailed | Refused | Written


def touched_by(reports: Iterable[Report]) -> dict[str, Touched]:
    """What was written, for each partition."""
    touched: dict[str, Touched] = {}
    for report in reports:
        if isinstance(report, Written):
            before = touched.get(report.partition, NOTHING)
            touched[report.partition] = Touched(
                files=(*before.files, *report.files),
                rows=before.rows + report.rows,
                superseded=before.superseded + report.superseded,
                bytes=before.bytes + sum(f.bytes for f in report.files),
                digest=added((before.digest, report.digest)),
                superseded_digest=added((before.superseded_digest, report.superseded_digest)),
            )
    return dict(sorted(touched.items()))


class Host(Protocol):
    """Where the row work runs."""

    def survey(
        self,
        landing: ObjectStore,
        inputs: Sequence[LandingInput],
        format: str,
        known: Any,
        text_columns: frozenset[str],
    ) -> list[Survey]:
        """`landing.survey` of each file."""

    def run(self, job: AppendJob) -> list[Report]:
        """The row work of the whole batch, once."""


def split(job: AppendJob, inputs: Iterable[LandingInput]) -> Iterator[Report | Any]:
    """Read landing files: reports, and accepted rows as tables of the ranked schema and `PARTITION`."""
    with QuarantineWriter(job) as quarantine:
        for given in inputs:
            rows_read = 0
            try:
                for rows in read_rows(job.landing, given, job.format, job.rules):
                    rows_read += rows.accepted.num_rows + rows.quarantined.num_rows
                    accepted = rows.accepted
                    if job.only is None:
                        quarantine.write(rows.quarantined)
                    else:
                        accepted = accepted.filter(
                            pc.is_in(accepted[PARTITION], pa.array(sorted(job.only), pa.string()))
                        )
                    place = pa.array(np.full(accepted.num_rows, given.place, np.int32))
                    yield accepted.append_column(FILE, place).select([*job.spec.ranked_schema.names, PARTITION])
                begins = given.row_groups is None or given.row_groups[0] == 0
                content = content_hash(job.landing, given.path, given.etag) if begins else None
                yield FileRead(given.path, rows_read, content)
            except UnreadableFileError as e:
                yield FileFailed(given.path, changed=False, reason=e.reason)
            except ChangedFileError:
                yield FileFailed(given.path, changed=True, reason="it changed or vanished while it was read")
    yield from quarantine.report()


def quarantine_files(job: AppendJob, unreadable: dict[str, str]) -> Iterator[Report]:
    """One quarantine row for each file that can't be read at all: path and reason."""
    with QuarantineWriter(job) as quarantine:
        n = len(unreadable)
        columns = [["unreadable_file"] * n, list(unreadable.values()), list(unreadable), *([[None] * n] * 3)]
        quarantine.write(pa.table(columns, schema=QUARANTINE_SCHEMA.remove(6)))
    yield from quarantine.report()


def by_partition(rows: Any) -> Iterator[tuple[str, Any]]:
    """``rows`` cut into one table for each partition, the order of rows kept."""
    encoded = rows[PARTITION].combine_chunks().dictionary_encode()
    order = pc.sort_indices(pa.table({"code": encoded.indices}), sort_keys=[("code", "ascending")])
    sorted_rows = rows.take(order)
    at = 0
    for code, count in enumerate(np.bincount(encoded.indices.to_numpy(), minlength=len(encoded.dictionary))):
        yield encoded.dictionary[code].as_py(), sorted_rows.slice(at, int(count))
        at += int(count)


def settle_and_write(job: AppendJob, tables: Sequence[Any]) -> Iterator[Written]:
    """A file (more where it grows large) for each partition in ``tables``, all in one object (ADR 0008).

    In each there is one row per key, sorted by key.
    """
    spec = job.spec
    rows = pa.concat_tables(tables)
    if rows.num_rows == 0:
        return
    # Partition names are long and few; their numbers sort faster.
    encoded = rows[PARTITION].combine_chunks().dictionary_encode()
    n = len(encoded.dictionary)
    rows = rows.set_column(rows.schema.get_field_index(PARTITION), PARTITION, encoded.indices)
    order, wins = latest(rows, (PARTITION, *spec.stored_key), spec.order_by, (FILE, PLACE))
    winners = rows.take(order.filter(wins))
    came = np.bincount(encoded.indices.to_numpy(), minlength=n)
    stayed = np.bincount(winners[PARTITION].to_numpy(), minlength=n)
    hashes = row_hashes(rows, hashed_columns(spec))[order.to_numpy()]
    begins = np.cumsum(came) - came  # the order is by partition first
    digests = np.add.reduceat(hashes, begins)
    hashes[wins.to_numpy(zero_copy_only=False)] = 0
    lost = np.add.reduceat(hashes, begins)
    row = 0
    done = []
    with Pack(job.store, TableObjects.new_appended(job.start)) as pack:
        for code in range(n):
            partition, kept = encoded.dictionary[code].as_py(), int(stayed[code])
            footer = Footer(spec.table_id, "appended", job.batch_id, job.spec_version, partition)
            at = pack.bytes
            with DataFileWriter(pack, lambda: pack.name, spec.ranked_schema, footer, spec.stored_key) as out:
                out.write(winners.slice(row, kept))
            row += kept
            files = []
            for file in out.files:
                files.append(msgspec.structs.replace(file, at=at))
                at += file.bytes
            digest, lost_digest = as_text(int(digests[code])), as_text(int(lost[code]))
            done.append(Written(partition, int(came[code]), int(came[code]) - kept, digest, lost_digest, tuple(files)))
    yield from done


def key_range(rows: Any, spec: TableSpec, ranges: int) -> Any:
    """A number below ``ranges`` for each row, equal for equal keys; it spreads work and is never stored."""
    total = np.zeros(rows.num_rows, np.uint64)
    for name in spec.stored_key:
        codes = rows[name].combine_chunks().dictionary_encode()
        hashes = [zlib.crc32(str(v).encode()) for v in plain(codes.dictionary)]
        total = total * np.uint64(31) + np.asarray(hashes, np.uint64)[codes.indices.to_numpy()]
    return (total % np.uint64(ranges)).astype(np.int32)


class QuarantineWriter:
    """Collects refused rows of one task in one file, which appears when the task is done with its landing files."""

    def __init__(self, job: AppendJob) -> None:
        footer = Footer(job.spec.table_id, "quarantine", job.batch_id, job.spec_version)
        self._out = DataFileWriter(
            job.store, partial(TableObjects.new_quarantine, job.start), QUARANTINE_SCHEMA, footer, ()
        )
        self._batch_id = job.batch_id
        self._reasons: Counter[str] = Counter()

    def __enter__(self) -> "QuarantineWriter":
        self._out.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._out.__exit__(*error)

    def write(self, rows: Any) -> None:
        if rows.num_rows:
            counts = pc.value_counts(rows["reason_code"].combine_chunks()).to_pylist()
            self._reasons.update({c["values"]: c["counts"] for c in counts})
            if "batch" not in rows.schema.names:  # a row that is tried again keeps that of the batch that read it
                rows = rows.append_column("batch", pa.array([self._batch_id] * rows.num_rows))
            self._out.write(rows.cast(QUARANTINE_SCHEMA))

    def report(self) -> Iterator[Refused]:
        """One report a file; the reasons of all of them stand in the first."""
        reasons = dict(self._reasons)
        for file in self._out.files:
            yield Refused(QuarantineFile(name=file.name, rows=file.rows), reasons)
            reasons = {}
