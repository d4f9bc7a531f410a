"""Reports of phase one's row work. Tasks return these small values to the caller, never rows."""

from collections.abc import Iterable, Sequence

import msgspec

from lakeupsert.landing.origins import Origins
from lakeupsert.table.ledger import NOTHING, QuarantineFile, Touched
from lakeupsert.table.manifest import DataFile, add_digests


class FileRead(msgspec.Struct, frozen=True, tag=True):
    """A landing file, or a range of its row groups, was read to the end.

    Attributes:
        accepted: rows that the table takes.
        sha256: hash of the whole content; only the part that begins the file has it.
        operations: the file has the column that the delete rule names.
        renamed: columns that the file has only under a name from before a rename, or under an alias of that name: from the
            name in the file to the current one.
        snapshots: those of a change feed that the table's order may misplace, and `noted_positions` (`batch.doubtful_snapshots`).
        skipped: messages without a row, by their kind.
        waiting: columns that the table lacks, since no row has a value there.
        hollow_deletes, incomplete_creates, contrary: as in `landing.accept.CheckedRows`.
        origins: see `landing.origins`.
        refused: places of refused rows, if the batch's text decides types (`AppendJob.inferred`).
    """

    path: str
    rows: int
    accepted: int
    sha256: str | None
    operations: bool
    renamed: dict[str, str] = {}
    snapshots: tuple[str, ...] = ()
    skipped: dict[str, int] = {}
    waiting: tuple[str, ...] = ()
    hollow_deletes: int = 0
    incomplete_creates: int = 0
    refused: tuple[int, ...] = ()
    origins: Origins = Origins()
    contrary: dict[str, int] = {}


class FileFailed(msgspec.Struct, frozen=True, tag=True):
    """A landing file can't be read. It either changed while it was read (left to the next batch) or is unreadable (quarantine).

    Attributes:
        damaged: the store can't give its bytes.
        unplanned: the file has a column that the table lacks; the batch may take it after a survey.
    """

    path: str
    changed: bool
    reason: str
    unplanned: bool = False
    damaged: bool = False


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A quarantine file, with its rows counted by reason and one example row for each reason."""

    file: QuarantineFile
    reasons: dict[str, int]
    examples: dict[str, str]


class Written(msgspec.Struct, frozen=True, tag=True):
    """Rows of one partition were settled. Of ``rows`` that came, ``superseded`` lost to another one; ``files`` has the rest.

    Attributes:
        digest: of all rows that came; ``superseded_digest`` is of those that lost.
        order: of a full extract, the greatest order among these rows (see `rows.floor`).
        live: rows in ``files`` that are not deletes.
        keys: hashes (uint64) of the compared keys of every partition written together with this one; see
            `settle.count_keys_in_several_partitions`.
        misplaced: keys of every partition written together with this one that keep an older event (`misplaced`).
    """

    partition: str
    rows: int
    superseded: int
    digest: str
    superseded_digest: str
    files: tuple[DataFile, ...]
    order: str | None = None
    live: int = 0
    keys: bytes = b""
    misplaced: int = 0


Report = FileRead | FileFailed | Refused | Written


def appended_names(reports: Iterable[Report]) -> set[str]:
    """The names of the appended files."""
    return {file.name for report in reports if isinstance(report, Written) for file in report.files}


def written_names(reports: Sequence[Report]) -> set[str]:
    """The names of all files that were written: appended ones, and those of quarantine."""
    return appended_names(reports) | {report.file.name for report in reports if isinstance(report, Refused)}


def total_by_partition(reports: Sequence[Written]) -> list[Written]:
    """One report for each partition. ``order``, ``live`` and ``keys`` are not kept, ``misplaced`` is in the first."""
    totals = [
        Written(partition, t.rows, t.superseded, t.digest or "", t.superseded_digest or "", t.files)
        for partition, t in touched_by(reports).items()
    ]
    misplaced = sum(report.misplaced for report in reports)
    return [msgspec.structs.replace(totals[0], misplaced=misplaced), *totals[1:]] if misplaced else totals


def touched_by(reports: Iterable[Report]) -> dict[str, Touched]:
    """What was written to each partition, in the order of their names."""
    touched: dict[str, Touched] = {}
    for report in reports:
        if isinstance(report, Written):
            before = touched.get(report.partition, NOTHING)
            touched[report.partition] = Touched(
                files=(*before.files, *report.files),
                rows=before.rows + report.rows,
                superseded=before.superseded + report.superseded,
                bytes=before.bytes + sum(f.bytes for f in report.files),
                digest=add_digests((before.digest, report.digest)),
                superseded_digest=add_digests((before.superseded_digest, report.superseded_digest)),
            )
    return dict(sorted(touched.items()))
