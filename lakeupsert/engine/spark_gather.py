"""Engine spark, after the window: tasks read the rows that they need from their files by position, and write what these come to.

Files are sorted by key, as the ranked rows are, so each file is read forward once.
"""

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa

from lakeupsert.engine.merge import AGE, MergeOutput, MergeTask
from lakeupsert.engine.merge_writer import MergeWriter
from lakeupsert.engine.resolve import KNOWN, Resolved, Rules
from lakeupsert.landing.adopted import read_adopted
from lakeupsert.rows.arrays import Indices, Mask, Rows
from lakeupsert.rows.changes import Tally
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.datafiles import stream_file
from lakeupsert.rows.digest import digest_text
from lakeupsert.rows.vectors import deleted_positions
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import DataFile
from lakeupsert.table.spec import DELETE_FLAG, FILE, PLACE, TableSpec


@dataclass(frozen=True)
class Source:
    """One file of a merge.

    Attributes:
        unit: the task's number in the call.
        number: the file's number in the task; files in ``kept`` come first.
        age: 0 for a stored file, then 1, 2, … for the batches.
    """

    unit: int
    number: int
    file: DataFile
    age: int


def gather(
    store: ObjectStore,
    spec: TableSpec,
    spec_version: int,
    task: MergeTask,
    sources: Sequence[Source],
    ranked: Sequence[pa.RecordBatch],
) -> MergeOutput:
    """Write what the ranked rows of a task come to. Raises the first error that reading its files raised."""
    for batch in ranked:
        if batch["error"].null_count < batch.num_rows:
            raise pickle.loads(batch["error"].drop_null()[0].as_py())
    return _Gatherer(store, spec, task, sources).run(spec_version, ranked)


class _Gatherer:
    """Reads the rows that one task needs by position, and writes what they come to; adds up the losers.

    Those are the winners, or all rows if a rule needs the losers. Files are sorted by key too, so each is read forward once;
    only adopted files that were not cut are in memory as a whole.
    """

    def __init__(self, store: ObjectStore, spec: TableSpec, task: MergeTask, sources: Sequence[Source]) -> None:
        self._store, self._spec, self._task = store, spec, task
        self._rules = Rules(spec, task)
        self._schema = self._rules.with_times(spec.base_schema)
        self._cursors: list[_Cursor | Rows] = [
            _Cursor(stream_file(store, msgspec.structs.replace(s.file, deleted=None), self._schema, spec=spec))
            if s.age or task.settled or task.cut
            else read_adopted(store, s.file, spec, task.partition).select(spec.base_schema.names)
            for s in sources
        ]

    def run(self, spec_version: int, ranked: Iterable[pa.RecordBatch]) -> MergeOutput:
        spec, task, rules = self._spec, self._task, self._rules
        lost = lost_sum = adopted_sum = 0
        superseded: list[list[Indices]] = [[] for _ in task.kept]
        counted: list[Rows] = []
        used: list[Mask] = []
        tally = Tally()
        with MergeWriter(self._store, spec, spec_version, task, rules, tally) as out:
            for batch in _whole_keys(ranked) if rules.needs_losers else ranked:
                wins, hashes = batch["nth"].to_numpy() == 1, batch["hash"].to_numpy().view(np.uint64)
                lost += int(np.count_nonzero(~wins))
                lost_sum += int(hashes[~wins].sum())
                source, row = batch["source"].to_numpy(), batch["row"].to_numpy()
                adopted_sum += int(hashes[source < len(task.base) + len(task.tombstones)].sum())
                counted.append(pa.table(batch.select(["nth", "age", "deleted", "version"])))
                goes = ~wins
                needed = batch if rules.needs_losers else batch.filter(pa.array(wins & (source >= len(task.kept))))
                if needed.num_rows:
                    by_source = np.lexsort((needed["row"].to_numpy(), needed["source"].to_numpy()))
                    found = rules.resolve(self._read(needed, by_source))
                    out.write(found)
                    # A loser may be part of what its key comes to, and another row its first.
                    if found.uses is not None:
                        used.append(found.uses[found.order])
                        at = by_source[found.order]
                        counted[-1] = counted[-1].take(at).set_column(0, "nth", [np.where(found.wins, 1, 2)])
                        goes, source, row = found.superseded, source[at], row[at]
                for number, positions in enumerate(superseded):
                    positions.append(row[goes & (source == number)])
            if counted:
                _count(spec, tally, pa.concat_tables(counted), np.concatenate(used) if used else None)
        positions = [
            np.sort(np.concatenate([deleted_positions(self._store, file).astype(np.int64), *found]))
            for file, found in zip(task.kept, superseded, strict=True)
        ]
        return out.output(lost, digest_text(lost_sum), None if task.settled else digest_text(adopted_sum), positions)

    def _read(self, batch: pa.RecordBatch | Rows, by_source: Indices) -> Resolved:
        """The rows that a batch names, as Spark ranked them. ``by_source``: its places in the order of files and positions."""
        task = self._task
        source, row = batch["source"].to_numpy(), batch["row"].to_numpy()
        found = [self._cursors[s].take(np.sort(row[source == s])) for s in np.unique(source)]
        # Files that adopt brought lack the column of times.
        more = self._schema is not self._spec.base_schema
        rows = pa.concat_tables([*found, self._schema.empty_table()], promote_options="default" if more else "none")
        columns = ((DELETE_FLAG, "deleted"), (AGE, "age"), (FILE, "file"), (PLACE, "place"), (KNOWN, "known"))
        for name, column in columns:
            rows = rows.append_column(name, batch[column].take(pa.array(by_source)))
        nth = batch["nth"].to_numpy()
        order, wins = np.argsort(by_source, kind="stable")[nth > 0], nth[nth > 0] == 1
        return Resolved(
            self._rules.add_times(rows),
            order,
            wins,
            winners=order[wins],
            kept_rows=int(np.count_nonzero(source < len(task.kept))),
            killed_by=batch["killed_by"].to_numpy()[by_source],
            lacked=as_mask(batch["lacked"])[by_source] if task.full else None,
        )


def _whole_keys(ranked: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch | Rows]:
    """The same rows, in batches that do not cut the rows of a key."""
    held: list[pa.RecordBatch] = []
    for batch in ranked:
        begins = np.flatnonzero(as_mask(batch["begins"]))
        if len(begins) and (held or begins[-1]):
            yield pa.Table.from_batches([*held, batch.slice(0, begins[-1])]).combine_chunks()
            held = []
        held.append(batch.slice(begins[-1]) if len(begins) else batch)
    if held:
        yield pa.Table.from_batches(held).combine_chunks()


def _count(spec: TableSpec, tally: Tally, ranked: Rows, uses: Mask | None) -> None:
    """``uses`` marks rows that are part of what their key comes to; None: the winners."""
    nth, ages, deleted, versions = (ranked[name].to_numpy() for name in ("nth", "age", "deleted", "version"))
    dies = nth == 0
    tally.lacking(ages[dies], deleted[dies])
    nth, ages, deleted, versions = (column[~dies] for column in (nth, ages, deleted, versions))
    by_content = (lambda one, other: versions[one] == versions[other]) if spec.ties == "content" else None
    tally.meet(nth == 1, ages, deleted, by_content, uses)


class _Cursor:
    """Reads a file forward and hands out rows by position."""

    def __init__(self, blocks: Iterator[Rows]) -> None:
        self._blocks = blocks
        self._block: Rows | None = None
        self._begin = 0

    def take(self, rows: Indices) -> Rows:
        """The rows at these positions, which ascend and are all above those of the call before."""
        found = []
        while len(rows):
            if self._block is None or rows[0] >= self._begin + self._block.num_rows:
                self._begin += self._block.num_rows if self._block is not None else 0
                self._block = next(self._blocks)
                continue
            here = int(np.searchsorted(rows, self._begin + self._block.num_rows))
            found.append(self._block.take(pa.array(rows[:here] - self._begin)))
            rows = rows[here:]
        return pa.concat_tables(found)
