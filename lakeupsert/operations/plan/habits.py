"""Learn from the last nights: how large rows and partitions become, and how long a night takes.

Reads     the last snapshots, the ledger entries between them, one manifest a night
Writes    nothing
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.pipeline.history import History
from lakeupsert.rows.arrays import Rows
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.table.snapshot import Snapshot
from lakeupsert.table.spec import TableSpec

NIGHTS = 7
"""How many nights are learned from; each costs two or three requests."""
POINTS = 500
"""Points that a line is fitted to; of more, every so many is taken."""
WAITED = timedelta(minutes=1)
"""If the first merge began this long after its batch, workers started later: that time is not part of a run."""


@dataclass(frozen=True)
class Line:
    """y = base + slope * x; neither is negative."""

    base: float = 0.0
    slope: float = 0.0

    def at(self, x: float) -> float:
        return self.base + self.slope * x

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> "Line":
        """The median line through pairs of points (Theil and Sen), which one odd night does not move.

        It grows at most in proportion, since the slope between points that are close together is chance.
        """
        if len(points) > POINTS:
            points = [points[i * len(points) // POINTS] for i in range(POINTS)]
        x, y = np.array([p[0] for p in points], float), np.array([p[1] for p in points], float)
        x, y = x[x > 0], y[x > 0]
        if not len(x):
            return cls()
        steepest = float(np.median(y / x))
        i, j = np.triu_indices(len(x), 1)
        apart = x[i] != x[j]
        i, j = i[apart], j[apart]
        slope = float(np.median((y[j] - y[i]) / (x[j] - x[i]))) if len(i) else steepest
        slope = min(max(0.0, slope), steepest)
        return cls(max(0.0, float(np.median(y - slope * x))), slope)


@dataclass(frozen=True)
class Sizes:
    """Sizes in this table.

    Attributes:
        appended, stored: bytes by number of rows, of what a batch brings for a partition, and of a partition.
        growth: rows that a partition gains for each row that arrives: 1 if all keys are new, below 0 with deletes.
        kept: the share of rows that do not lose to another row of their batch.
        objects: how many objects a batch is written to.
    """

    appended: Line = field(default_factory=Line)
    stored: Line = field(default_factory=Line)
    growth: float = 1.0
    kept: float = 1.0
    objects: int = 1


@dataclass(frozen=True)
class Night:
    """One snapshot, the one ``before`` it, and the batches between them."""

    before: Snapshot
    after: Link[Snapshot]
    batches: Sequence[Link[LedgerEntry]]


def last_batches(history: History, up_to: int) -> list[Link[LedgerEntry]]:
    headers = enumerate(history.headers(up_to))
    numbers = [number for number, entry in headers if entry.kind == "batch" and entry.statement is None]
    return [link for number in numbers[-NIGHTS:] for link in history.entries(number - 1, number)]


def last_nights(history: History) -> list[Night]:
    """The last nights that were published, newest first, without those that include a restore."""
    nights: list[Night] = []
    after = history.last_snapshot()
    for _ in range(2 * NIGHTS):  # vacuums and tags append snapshots that show nothing new
        if after is None or len(nights) == NIGHTS:
            break
        older = history.objects.snapshots.get(after.number - 1) if after.number else None
        if older is None and after.number:
            break  # trimmed
        before = older.body if older else Snapshot(batch=0, spec_version=0)
        batches = history.entries(before.batch, after.body.batch)
        if any(link.body.touched for link in batches) and not any(link.body.restored for link in batches):
            nights.append(Night(before, after, batches))
        after = older
    return nights


def learn_append_part(nights: Sequence[Night]) -> float | None:
    """The part of a night's time that its append took: the median of those nights that published one batch."""
    parts = []
    for night in nights:
        batches = [link for link in night.batches if link.body.touched]
        if len(batches) == 1:
            received = batches[0].body.received
            committed, published = (datetime.fromisoformat(x.written_at) for x in (batches[0], night.after))
            if received <= committed < published:
                parts.append((committed - received) / (published - received))
    return float(np.median(parts)) if parts else None


def learn_sizes(
    spec: TableSpec, nights: Sequence[Night], batches: Sequence[LedgerEntry], sample: Sequence[tuple[float, float]]
) -> Sizes:
    touched = [t for entry in batches for t in entry.touched.values() if t.files]
    # A file of one row shows what a footer takes; nights that only brought large partitions would make it look like nothing.
    smallest = (
        1.0,
        float(parquet_bytes(pa.table([pa.nulls(1, f.type) for f in spec.stored_schema], spec.stored_schema))),
    )
    appended = [(float(sum(f.rows for f in t.files)), float(t.bytes)) for t in touched] or list(sample)
    shown = nights[0].after.body.partitions.values() if nights else ()
    stored = [(float(s.rows), float(s.bytes)) for s in shown if s.rows] or appended
    arrived = gained = 0
    for night in nights:
        for partition in {p for link in night.batches for p in link.body.touched} & night.before.partitions.keys():
            gained += night.after.body.partitions[partition].rows - night.before.partitions[partition].rows
            brought = (link.body.touched[partition] for link in night.batches if partition in link.body.touched)
            arrived += sum(f.rows for one in brought for f in one.files)
    accepted = sum(t.rows for t in touched)
    return Sizes(
        appended=Line.through([smallest, *appended]),
        stored=Line.through([smallest, *stored]),
        growth=min(1.0, gained / arrived) if arrived else 1.0,
        kept=1 - sum(t.superseded for t in touched) / accepted if accepted else 1.0,
        objects=max(1, len({f.name for t in batches[-1].touched.values() for f in t.files})) if batches else 1,
    )


def parquet_bytes(rows: Rows) -> int:
    """The size of these rows as a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd")
    return int(sink.getvalue().size)


def learn_seconds(
    objects: TableObjects,
    nights: Sequence[Night],
    batches: Sequence[Link[LedgerEntry]],
    landing_bytes: int,
    merge_bytes: int,
) -> float | None:
    """Seconds of append, by landing bytes, plus those of the other steps, by bytes read and written, as in these nights.

    Returns None if no night had such a step.
    """
    appends, merges = [], []
    for link in batches:
        seconds = (datetime.fromisoformat(link.written_at) - link.body.received).total_seconds()
        appends.append((float(sum(f.size for f in link.body.files)), seconds))
    for night in nights:
        published = datetime.fromisoformat(night.after.written_at)
        merges.append((float(_merge_bytes(night)), (published - _start_of_merges(objects, night)).total_seconds()))
    if (landing_bytes and not appends) or (merge_bytes and not merges):
        return None
    return (Line.through(appends).at(landing_bytes) if landing_bytes else 0.0) + (
        Line.through(merges).at(merge_bytes) if merge_bytes else 0.0
    )


def _merge_bytes(night: Night) -> int:
    brought = {p: t.bytes for link in night.batches for p, t in link.body.touched.items()}
    shown = [x.partitions[p] for x in (night.before, night.after.body) for p in brought if p in x.partitions]
    return sum(brought.values()) + sum(s.bytes for s in shown)


def _start_of_merges(objects: TableObjects, night: Night) -> datetime:
    """When phase two of the night began: with its batch, or when workers started. They start with the first partition."""
    last = [link for link in night.batches if link.body.touched][-1]
    committed = datetime.fromisoformat(last.written_at)
    first = next(iter(last.body.touched))
    shown = night.after.body.partitions.get(first)
    version = objects.partition(first).get(shown.version) if shown else None
    if version is None or "seconds" not in version.body.made:
        return committed
    began = datetime.fromisoformat(version.written_at) - timedelta(seconds=float(version.body.made["seconds"]))
    return began if began - committed > WAITED else committed
