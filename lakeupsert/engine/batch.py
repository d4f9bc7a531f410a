"""Phase one's row work, the same for every host: landing files in, appended files and reports out. Commits nothing.

    read (landing) -> quarantine what is refused -> (settle early) -> cut by range -> | shuffle | -> settle by G1, sort -> write

A range is a partition, or of a large one the rows whose keys are in one bucket (`AppendJob.bits`). A host runs `split` on
groups of landing files, `Held` and `grouped` on what comes of it, and `settle_and_write` on all rows of a range, or of several.
What these return are small reports; rows never reach the caller.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.config import Reading
from lakeupsert.engine.quarantine import QUARANTINE_SCHEMA, QuarantineWriter
from lakeupsert.engine.reports import FileFailed, FileRead, Report, Written
from lakeupsert.landing.accept import (
    PARTITION,
    ChangedFileError,
    LandingInput,
    RowRules,
    UnplannedColumnError,
    UnreadableFileError,
    preview,
    read_rows,
)
from lakeupsert.rows.datafiles import Footer
from lakeupsert.rows.digest import Digest
from lakeupsert.rows.floor import is_among
from lakeupsert.storage import NotFoundError, ObjectStore
from lakeupsert.table.spec import FILE, TableSpec

RANGE_BYTES = 64 << 20
"""Landing bytes of a range of keys, at most and about: what one task settles, and one unit merges."""
LOOKED_AT = 16
"""Places of a batch at which is looked to find its large partitions, at the least; and one for each `RANGE_BYTES`."""
LINES_BYTES = 1 << 16
"""What is read of a text file for that."""
AT_ONCE = 16


@dataclass(frozen=True)
class AppendJob:
    """Everything that a task needs, wherever it runs; picklable."""

    landing: ObjectStore
    store: ObjectStore
    inputs: tuple[LandingInput, ...]
    reading: Reading
    rules: RowRules
    batch_id: str
    spec_version: int
    start: int
    """How many entries the ledger has; it is in the new files' names."""
    only: frozenset[str] | None = None
    """A batch that is read again for these partitions alone: their rows are written, and nothing to quarantine."""
    left_out: Any = None
    """Of a batch that is read again: keys that merges refused (`floor.refused_by_merges`), whose rows count as superseded now."""
    full: bool = False
    """It is a full extract: what is written tells its greatest order."""
    bits: Mapping[str, int] = field(default_factory=dict)
    """Partitions that are cut: of each, into 2^bits ranges of the hashes of its keys (`rows.buckets`)."""

    compared: float = 1.0
    """The share of the keys, by their hashes, that are looked for in several partitions."""

    @property
    def spec(self) -> TableSpec:
        return self.rules.spec

    def quarantine(self) -> QuarantineWriter:
        footer = Footer(self.spec.table_id, "quarantine", self.batch_id, self.spec_version)
        return QuarantineWriter(self.store, self.start, footer)


def with_ranges(job: AppendJob) -> AppendJob:
    """The job with `bits` for the partitions that get more than `RANGE_BYTES`, the same for every task, host and run.

    How much a partition gets is estimated from its column in some row groups, or some lines, spread evenly over the batch.
    One that is small, and so may be missed, is in one piece.
    """
    if sum(given.size for given in job.inputs) <= RANGE_BYTES:
        return job

    def look(place: tuple[LandingInput, float]) -> dict[str, float]:
        given, stands_for = place
        try:
            rows = preview(job.landing, given, job.reading, job.spec, LINES_BYTES).partitions
        except NotFoundError:  # whoever reads its rows tells
            return {}
        return {name: stands_for * count / sum(rows.values()) for name, count in rows.items()}

    sizes: Counter[str] = Counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for found in pool.map(look, _places(job.inputs)):
            sizes.update(found)
    ranges = {name: ceil(size / RANGE_BYTES) for name, size in sizes.items() if size > RANGE_BYTES}
    return replace(job, bits={name: (count - 1).bit_length() for name, count in sorted(ranges.items())})


def _places(inputs: Sequence[LandingInput]) -> list[tuple[LandingInput, float]]:
    """Row groups, and text files, evenly by bytes; and the bytes of the batch that each stands for."""
    landed = sum(given.size for given in inputs)
    count = max(LOOKED_AT, landed // RANGE_BYTES)
    found: Counter[LandingInput] = Counter()
    begin = 0
    for given in inputs:
        for number in range(ceil(begin * count / landed), ceil((begin + given.size) * count / landed)):
            part = given
            if given.row_groups is not None:
                first, end = given.row_groups
                group = min(end - 1, first + int((number * landed / count - begin) / given.size * (end - first)))
                part = replace(given, row_groups=(group, group + 1))
            found[part] += 1
        begin += given.size
    return [(part, times * landed / count) for part, times in found.items()]


def split(job: AppendJob, inputs: Iterable[LandingInput]) -> Iterator[Report | Any]:
    """Read landing files: reports, and accepted rows as tables of the ranked schema and `PARTITION`."""
    with job.quarantine() as quarantine:
        for given in inputs:
            rows_read = rows_accepted = 0
            names: dict[str, str] = {}
            begins = given.row_groups is None or given.row_groups[0] == 0
            sha256 = hashlib.sha256() if begins else None
            try:
                for rows in read_rows(job.landing, given, job.reading, job.rules, sha256):
                    rows_read += rows.accepted.num_rows + rows.quarantined.num_rows
                    accepted = rows.accepted
                    rows_accepted += accepted.num_rows
                    names |= rows.names
                    if job.only is None:
                        quarantine.write(rows.quarantined)
                    else:
                        accepted = accepted.filter(
                            pc.is_in(accepted[PARTITION], pa.array(sorted(job.only), pa.string()))
                        )
                    accepted, reports = without_refused(job, accepted)
                    yield from reports
                    place = pa.array(np.full(accepted.num_rows, given.place, np.int32))
                    yield accepted.append_column(FILE, place).select([*job.spec.ranked_schema.names, PARTITION])
                content = sha256.hexdigest() if sha256 else None
                operations = job.spec.delete is not None and job.spec.delete.column in names
                renamed = job.spec.under_old_names(names)
                yield FileRead(given.path, rows_read, rows_accepted, content, operations, renamed)
            except UnreadableFileError as e:
                yield FileFailed(
                    given.path, changed=False, reason=e.reason, unplanned=isinstance(e, UnplannedColumnError)
                )
            except ChangedFileError:
                yield FileFailed(given.path, changed=True, reason="it changed or vanished while it was read")
    yield from quarantine.report()


def without_refused(job: AppendJob, rows: Any) -> tuple[Any, list[Written]]:
    """``rows`` but those that are left out, and what is told of these."""
    if job.left_out is None:
        return rows, []
    is_out = is_among(rows, job.left_out, job.spec)
    out, reports = rows.filter(pa.array(is_out)), []
    for partition in pc.unique(out[PARTITION]).to_pylist():
        digest = Digest(job.spec)
        digest.add(out.filter(pc.equal(out[PARTITION], partition)))
        reports.append(Written(partition, digest.rows, digest.rows, str(digest), str(digest), ()))
    return rows.filter(pa.array(~is_out)), reports


def quarantine_files(job: AppendJob, unreadable: dict[str, str]) -> Iterator[Report]:
    """One quarantine row for each file that can't be read at all: path and reason."""
    with job.quarantine() as quarantine:
        n = len(unreadable)
        columns = [["unreadable_file"] * n, list(unreadable.values()), list(unreadable), *([[None] * n] * 3)]
        quarantine.write(pa.table(columns, schema=QUARANTINE_SCHEMA.remove(6)))
    yield from quarantine.report()
