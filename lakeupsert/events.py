"""What a night does, as it happens: an event for each batch, merge and publish, and for each failure and warning.

Events repeat what chains and results say, for logs, traces and metrics. Nothing in a table depends on them, and nobody reads
them back. `entry`, the write id of a ledger entry, leads from a batch to its merges and to the snapshot that shows it (ADR 0029).
"""

from collections.abc import Callable, Mapping

import msgspec

from lakeupsert import clock


def _now() -> str:
    return clock.now().isoformat(timespec="microseconds")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Something that happened.

    Attributes:
        at: when, in UTC (ISO 8601).
        table: its name; None if the event is about no table, or nobody knows which.
    """

    at: str = msgspec.field(default_factory=_now)
    table: str | None = None


class Work(Event, frozen=True, kw_only=True):
    """Something that was written to a table.

    Attributes:
        batch: the last ledger entry that is in it.
        entry: the write id of that ledger entry; None for adopted files.
        seconds: how long it took. Partitions that are merged in one call have equal shares.
        requests: by kind, those that this process has sent to the store of the table since its event before. So they add up.
    """

    batch: int
    entry: str | None
    seconds: float
    requests: Mapping[str, int]


class BatchCommit(Work, frozen=True, kw_only=True, tag="batch"):
    """A batch was committed.

    Attributes:
        batch_id: the client's name for it.
        partitions: how many it touches.
        bytes_written: compressed bytes of appended files.
        commit_seconds: the part of ``seconds`` in which the commit was made: spec and ledger entry.
    """

    batch_id: str
    files: int
    rows_read: int
    rows_appended: int
    rows_superseded: int
    rows_quarantined: int
    bytes_written: int
    partitions: int
    commit_seconds: float


class Merge(Work, frozen=True, kw_only=True, tag="merge"):
    """A version of a partition was committed.

    Attributes:
        earlier: the write ids of other ledger entries whose rows came in with this merge.
        units: 0, or in how many units it was merged. Each has an event; their bytes are in the sums here, their seconds are not.
        work: the work object that it was rewritten for (`reprocess`, `compact`).
        bytes_read, bytes_written: compressed bytes.
        commit_seconds: the part of ``seconds`` in which the manifest was appended.
    """

    partition: str
    version: int
    rows_in: int
    rows_out: int
    rows_superseded: int
    rows_deleted: int
    rows_refused: int
    bytes_read: int
    bytes_written: int
    engine: str
    strategy: str
    commit_seconds: float
    units: int = 0
    earlier: tuple[str, ...] = ()
    work: str | None = None


class UnitWork(Work, frozen=True, kw_only=True, tag="unit"):
    """One unit of a shared step was done. The last one of a partition is followed by its `merge`.

    Attributes:
        unit: its number, from 0 to ``units`` - 1.
        cut: it cut files for the units that merge; these are counted anew.
    """

    partition: str
    unit: int
    units: int
    cut: bool
    bytes_read: int
    bytes_written: int
    engine: str
    strategy: str


class Publish(Work, frozen=True, kw_only=True, tag="publish"):
    """A snapshot was published.

    Attributes:
        earlier: the write ids of other ledger entries that no snapshot showed before.
        rows: of the table.
        lagging: how many partitions readers see without the newest batches.
    """

    snapshot: int
    partitions_changed: int
    rows: int
    lagging: int
    earlier: tuple[str, ...] = ()


class Failure(Event, frozen=True, kw_only=True, tag="failure"):
    """A partition can't be merged: its last try failed. ``batch`` is the one that it was to be merged up to."""

    partition: str
    batch: int
    engine: str
    message: str
    next: str


class Notice(Event, frozen=True, kw_only=True, tag="warning"):
    """A warning. ``logger`` is the module that gave it, None for a warning of the command."""

    message: str
    logger: str | None = None
    partition: str | None = None


class CommandError(Event, frozen=True, kw_only=True, tag="error"):
    """The error that a command ended with; fields as in the object of `--json`."""

    code: str
    message: str
    exit_code: int
    data_changed: bool
    next: str
    partition: str | None = None


Sink = Callable[[Event], object]
"""Takes each event when it happens, perhaps in several threads at once. What it raises becomes a warning."""
