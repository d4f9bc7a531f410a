"""Phase two's row work: what an engine gets, returns and writes. Engines `arrow` and `spark_window` agree row by row.

Reads     stored, tombstone and appended files of one bucket
Writes    base, delta, tombstone, history and quarantine files, under names of their own. Commits nothing
Repeat    safe: files that no manifest names count for nothing
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from lakeupsert.engine.cut import Cuts, CutTask
from lakeupsert.rows.floor import Extract, Forgetting
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import NO_CHANGES, NO_ROWS, Changes, DataFile, TombstoneFile
from lakeupsert.table.spec import TableSpec

AGE = "_lakeupsert_age"
"""Integer column of rows in a merge: 0 for a stored row, then 1, 2, … for the batches in ledger order."""


@dataclass(frozen=True)
class MergeTask:
    """One bucket of one partition, to be merged with the appended files of some batches.

    A file may belong to a larger bucket, for example the one that is split. Only its rows in this bucket count.

    Attributes:
        base: base files in key order, to be rewritten.
        deltas: files to be rewritten whose rows supersede nothing in ``base`` and are not superseded. Together with ``base``
            they have one row per key.
        tombstones: deleted keys, to be rewritten.
        kept: stored files that stay, bases or deltas (strategy delta). Deletion vectors mark superseded rows in them, and winners
            go to a new delta. If empty, everything is written to a new base (strategy rewrite).
        batches: for each batch, in ledger order, its appended files. A key may be in several of them; their rank columns decide.
        up_to: the batch that `merged` will be.
        start: how many versions the partition's chain has; the names of new files contain it.
        cut: the files in ``base`` are not settled and were cut (`engine.cut`): their rows have `landing.adopted.ADOPTED_RANK`.
        settled: the stored files have each key once, in key order. If False they were adopted, and are settled like incoming
            rows; between equal ordering values the later file wins, and within a file the later row.
        floors: the greatest orders among tombstones that the bucket has forgotten (see `rows.floor`), unless an extract replaces
            them.
        forgets: which tombstones to forget now; None: none.
        sources: for each batch its id and the files that its rows came from, to quarantine rows below a floor. If empty, no row
            is refused.
        full: the batches that are full extracts, in ledger order. A key that an extract lacks loses its earlier rows. Such a task
            has nothing in ``kept``.
        history, folded: files of superseded versions that stay, and those that are rewritten together with the new versions.
        numbers: the ledger numbers of what is stored and of each batch, for tables with a history or `versions`.
        erased: keys whose rows, tombstones and versions are left out, as an Arrow IPC stream of the key columns in files. They
            count as superseded. Such a task has no batch and nothing in ``kept`` and ``history``.
    """

    partition: str
    base: tuple[DataFile, ...]
    tombstones: tuple[TombstoneFile, ...]
    batches: tuple[tuple[DataFile, ...], ...]
    up_to: int
    start: int
    settled: bool = True
    cut: bool = False
    deltas: tuple[DataFile, ...] = ()
    kept: tuple[DataFile, ...] = ()
    bucket: int = 0
    bits: int = 0
    floors: tuple[str, ...] = ()
    forgets: Forgetting | None = None
    sources: tuple[tuple[str, tuple[str, ...]], ...] = ()
    full: tuple[Extract, ...] = ()
    history: tuple[DataFile, ...] = ()
    folded: tuple[DataFile, ...] = ()
    numbers: tuple[int, ...] = ()
    erased: bytes = b""

    @property
    def refuses(self) -> bool:
        """Whether a row below a floor is refused if the table stores nothing under its key."""
        return bool(self.floors and self.sources)

    @property
    def floors_after(self) -> list[str]:
        """The floors after the merge, without those of tombstones that it forgets."""
        last = max((n for n, extract in enumerate(self.full) if extract.replaces), default=0)
        return [*self.floors, *(extract.order for extract in self.full[last:])]

    @property
    def strategy(self) -> Literal["rewrite", "delta"]:
        return "delta" if self.kept else "rewrite"

    @property
    def stored(self) -> tuple[DataFile, ...]:
        """All files of live rows."""
        return (*self.kept, *self.base, *self.deltas)

    @property
    def read(self) -> list[DataFile]:
        """All files that the merge reads."""
        return [*self.stored, *self.tombstones, *itertools.chain.from_iterable(self.batches)]

    @property
    def bytes(self) -> int:
        """Compressed bytes that the merge reads, at most: of files in ``kept`` it reads key and ordering columns alone."""
        return sum(f.bytes for f in (*self.read, *self.folded))


@dataclass(frozen=True)
class MergeOutput:
    """What replaces the bucket.

    Attributes:
        written: new files of live rows in key order: a base or a delta, by the task's strategy.
        tombstones: deleted keys.
        superseded, superseded_digest: rows that lost to a greater one.
        adopted: digest of all stored rows, if they had to be settled.
        kept: files of the task's ``kept`` that still have live rows, with their new deletion vectors.
        dropped, dropped_digest: tombstones that were forgotten.
        refused, refused_digest: rows that were refused, and are in the objects ``quarantine``.
        floor: see `rows.floor.greatest_floor`.
        changes: what became of the keys in the task's batches.
        history: all history files of the bucket.
    """

    written: tuple[DataFile, ...]
    tombstones: tuple[TombstoneFile, ...]
    superseded: int
    superseded_digest: str = NO_ROWS
    adopted: str | None = None
    kept: tuple[DataFile, ...] = ()
    dropped: int = 0
    dropped_digest: str = NO_ROWS
    refused: int = 0
    refused_digest: str = NO_ROWS
    floor: str | None = None
    quarantine: tuple[str, ...] = ()
    changes: Changes = NO_CHANGES
    history: tuple[DataFile, ...] = ()

    @property
    def objects(self) -> set[str]:
        """Objects in the store that the output names."""
        files = (*self.kept, *self.written, *self.tombstones, *self.history)
        return {*self.quarantine, *(name for file in files for name in file.objects)}


Merged = list[MergeOutput | Exception]
"""One output for each task, in their order, or the error that the task raised."""


class Engine(Protocol):
    """Keeps the row of greatest rank of every key. A stored row loses a tie; a winning delete becomes a tombstone.

    Attributes:
        partitions_per_call: how many partitions a worker passes to one call. Small if a call costs nothing, so that workers
            finish together.
        memory_limit: bytes that a merge may take; None if there is no limit or the engine spills.
        shares_units: whether several workers share a partition that is too big for one. False if a call already spreads
            over machines.
    """

    name: str
    partitions_per_call: int
    memory_limit: int | None
    shares_units: bool

    def memory_of(self, spec: TableSpec, task: MergeTask) -> int:
        """Estimate of the bytes of memory that the merge takes at its peak."""

    def merge(self, store: ObjectStore, spec: TableSpec, spec_version: int, tasks: Sequence[MergeTask]) -> Merged:
        """Writes files; commits nothing."""

    def cut(self, store: ObjectStore, spec: TableSpec, spec_version: int, tasks: Sequence[CutTask]) -> Cuts:
        """`engine.cut.cut` for each task."""
