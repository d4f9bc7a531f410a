"""What the row work of phase one reports. Reports are small; rows never reach the caller."""

from collections.abc import Iterable, Iterator

import msgspec

from lakeupsert.table.ledger import NOTHING, QuarantineFile, Touched
from lakeupsert.table.manifest import DataFile, added


class FileRead(msgspec.Struct, frozen=True, tag=True):
    """A landing file, or its part, was read to the end; the part that begins the file knows the content's hash.

    ``operations``: whether its rows have the column that the delete rule names.
    """

    path: str
    rows: int
    accepted: int
    """How many of the rows the table takes."""
    sha256: str | None
    operations: bool
    renamed: dict[str, str] = {}
    """Columns that it brings under the name that they had before a rename alone, or under an alias of that: what the file calls
    them, and the name of now."""


class FileFailed(msgspec.Struct, frozen=True, tag=True):
    """A landing file can't be taken: ``changed`` while it was read (next batch), or unreadable (quarantine).

    ``unplanned``: it has a column that the table has not, and may be taken after a survey.
    """

    path: str
    changed: bool
    reason: str
    unplanned: bool = False


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A quarantine file, the reasons of its rows, and of each reason a row that tells it to people."""

    file: QuarantineFile
    reasons: dict[str, int]
    examples: dict[str, str]


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
    order: str | None = None
    """Of a full extract, the greatest order of these rows (see `floor`)."""
    live: int = 0
    """How many of the rows in ``files`` are no deletes."""
    keys: bytes = b""
    """Hashes (uint64) of those keys that are compared, of all partitions that were written with this one; see
    `in_several_partitions`."""


Report = FileRead | FileFailed | Refused | Written


def added_up(reports: Iterable[Written]) -> Iterator[Written]:
    """One report for each partition, of them all."""
    for partition, t in touched_by(reports).items():
        yield Written(partition, t.rows, t.superseded, t.digest or "", t.superseded_digest or "", t.files)


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
