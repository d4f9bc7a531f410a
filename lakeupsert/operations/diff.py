"""Compare two snapshots: which keys were inserted, updated and deleted between them.

Reads     the manifests of partitions whose versions differ, and of their data files those that both snapshots do not share
Writes    nothing
Repeat    safe, also during a night; the same two snapshots give the same answer

Both are read under the newer of their specs: a renamed or retyped column is the same column, a new one is null before, a dropped
one is not compared. Both are in key order, so both are read side by side, a few batches at a time. Only adopted files that no
merge has settled are not: such a partition is in memory as a whole.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from lakeupsert.errors import DamagedTableError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.read.arrow import batches, reader_schema, scans
from lakeupsert.read.keys import key_condition
from lakeupsert.read.view import View, ViewFile, partitions_of
from lakeupsert.rows.arrays import Indices, Mask, Rows
from lakeupsert.rows.rank import equal_rows, sort_by_key, sort_by_rank
from lakeupsert.rows.streams import windows
from lakeupsert.rows.tojson import to_json_values
from lakeupsert.rows.vectors import deleted_positions
from lakeupsert.table.layout import TableObjects
from lakeupsert.table.snapshot import PartitionVersion, Snapshot
from lakeupsert.table.spec import PLACE, TableSpec, field_id

Change = Literal["inserted", "updated", "deleted"]
CHANGES: tuple[Change, ...] = ("inserted", "updated", "deleted")
Views: TypeAlias = tuple[View, View]
"""Before and after, with one spec."""


@dataclass(frozen=True)
class PartitionDifference:
    """How many keys differ in one partition.

    Attributes:
        repeated: rows of adopted files that are not compared, because the same files have a newer row of their key.
    """

    partition: str
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    repeated: int = 0


@dataclass(frozen=True)
class Difference:
    """What differs between two views.

    Attributes:
        partitions: those in which something differs, in their order.
        not_compared: columns that one of the views shows and the newer spec lacks, by the name in that view.
    """

    partitions: tuple[PartitionDifference, ...]
    not_compared: tuple[str, ...]

    @property
    def inserted(self) -> int:
        return sum(one.inserted for one in self.partitions)

    @property
    def updated(self) -> int:
        return sum(one.updated for one in self.partitions)

    @property
    def deleted(self) -> int:
        return sum(one.deleted for one in self.partitions)

    @property
    def total(self) -> int:
        return self.inserted + self.updated + self.deleted


def difference_by_rewrite(table: OpenTable, partition: str, number: int, work: str | None) -> Difference | str:
    """The difference that the first version of a work object after version ``number`` made; or why that is unknown."""
    chain = table.history.objects.partition(partition)
    before = chain.get(number)
    while (after := chain.get(number := number + 1)) and after.body.reprocessed != work:
        before = after
    if before is None or after is None or before.body.merged != after.body.merged:
        return f"{partition} was not rewritten at the batch that it had."
    return difference_of(table, partition, before.number, after.number)


def difference_of(
    table: OpenTable, partition: str, before: int | PartitionVersion, after: int | PartitionVersion
) -> Difference | str:
    """What differs between two versions of a partition; or why that is unknown."""
    spec = table.history.existing_spec()

    def view(one: int | PartitionVersion) -> View:
        shown = PartitionVersion.of(table.history.version(partition, one), one) if isinstance(one, int) else one
        return View(table.history.objects, spec, Snapshot(batch=0, spec_version=0, partitions={partition: shown}), None)

    try:
        return diff(table.name, view(before), view(after))
    except DamagedTableError as e:
        return e.message


def diff(
    name: str,
    before: View,
    after: View,
    key: Mapping[str, object] | None = None,
    collect: Callable[[Rows], object] | None = None,
) -> Difference:
    """Count the keys of table ``name`` that ``after`` has and ``before`` lacks (inserted), and so on.

    A key is one row in each partition, so a row that moved to another partition is deleted in one and inserted in the other.

    Args:
        key: only keys with these values in some of the key and partition columns.
        collect: takes tables of the keys that differ, by partition and key: ``change`` (`CHANGES`), ``partition``, and as structs
            the ``key`` and its whole row ``before`` and ``after``, null if there is none.

    Raises:
        ConfigurationError: ``key`` names another column, or a value does not fit.
        DamagedTableError: a manifest or data file is missing or damaged.
    """
    views = under_newer_spec(before, after)
    newer = views[0].spec
    where = key_condition(name, newer, key) if key else None
    kept = newer.names_by_id
    dropped = {f.name: None for view in (before, after) for f in view.spec.schema if field_id(f) not in kept}
    found = []
    for partition in changed_partitions(views, where):
        pairs, repeated = compare_partition(views, where, partition)
        counts = Counter[Change]()
        for some in pairs:
            counts.update(dict(zip(CHANGES, some.counts, strict=True)))
            if collect is not None:
                collect(some.table(partition, newer))
        one = PartitionDifference(partition, counts["inserted"], counts["updated"], counts["deleted"], repeated)
        if one != PartitionDifference(partition):
            found.append(one)
    return Difference(tuple(found), tuple(dropped))


def under_newer_spec(before: View, after: View) -> Views:
    newer = max(before, after, key=lambda view: view.snapshot.spec_version).spec
    return replace(before, spec=newer), replace(after, spec=newer)


def changed_partitions(views: Views, where: str | None) -> Iterator[str]:
    """Partitions that may have a row of the filter, and another version in each view, in their order."""
    before, after = (view.snapshot.partitions for view in views)
    for partition in partitions_of(views[0].spec, {*before, *after}, where):
        shown = [of[partition] for of in (before, after) if partition in of]
        versions = {(one.version, one.merged) for one in shown}
        if len(shown) == 1 or len(versions) == 2 or any(partition in view.pinned for view in views):
            yield partition


def compare_partition(views: Views, where: str | None, partition: str) -> tuple[Iterator["Pairs"], int]:
    """The keys that differ, some at a time in their order, and `PartitionDifference.repeated`."""
    spec = views[0].spec
    files = [list(v.files(where, partition)) if partition in v.snapshot.partitions else [] for v in views]
    streams, repeated = [], 0
    for view, own in zip(views, _without_shared(views, files), strict=True):
        rows, older = _in_key_order(view, own, where)
        streams.append(rows)
        repeated += older
    empty = reader_schema(spec).empty_table()

    def compare() -> Iterator[Pairs]:
        for window in windows(streams, spec.stored_key):
            old, new = (pa.Table.from_batches([window[n]]) if n in window else empty for n in range(2))
            pairs = _compare(old, new, spec)
            if len(pairs.before):
                yield pairs

    return compare(), repeated


def _without_shared(views: Views, files: Sequence[Sequence[ViewFile]]) -> tuple[list[ViewFile], list[ViewFile]]:
    """The files of both views without rows that both show: a file never changes, only which of its rows are superseded."""
    by_place = [{file.file.place: file for file in of} for of in files]
    own: tuple[list[ViewFile], list[ViewFile]] = ([], [])
    for here, there in ((0, 1), (1, 0)):
        for place, file in by_place[here].items():
            other = by_place[there].get(place)
            if other is None:
                own[here].append(file)
            elif _vector(file) != _vector(other):
                dead = deleted_positions(views[here].objects.store, file.file)
                dead_there = deleted_positions(views[there].objects.store, other.file)
                only = np.setdiff1d(dead_there, dead, assume_unique=True)
                own[here].extend([replace(file, only=only)] if len(only) else [])
    return own


def _vector(file: ViewFile) -> str | None:
    return file.file.deleted.identity if file.file.deleted else None


def _in_key_order(view: View, files: Sequence[ViewFile], where: str | None) -> tuple[Iterator[pa.RecordBatch], int]:
    """The rows of files of one partition, and how many rows of adopted files are left out for a newer one of their key."""
    rows = batches(view, iter(files), scans(view.spec, where))
    if all(TableObjects.start_of(file.name) is not None for file in files):
        return rows, 0
    whole = pa.Table.from_batches(rows, reader_schema(view.spec))
    ranked = whole.append_column(PLACE, pa.array(np.arange(whole.num_rows)))
    order, wins = sort_by_rank(ranked, view.spec, (PLACE,))
    newest = whole.take(order.filter(wins))
    return iter(newest.combine_chunks().to_batches()), whole.num_rows - newest.num_rows


@dataclass(frozen=True)
class Pairs:
    """The keys that differ among some ``rows``. For each, the index of its row before and after, or -1."""

    rows: Rows
    before: Indices
    after: Indices

    @property
    def counts(self) -> tuple[int, int, int]:
        """As `CHANGES`."""
        inserted, deleted = int((self.before < 0).sum()), int((self.after < 0).sum())
        return inserted, len(self.before) - inserted - deleted, deleted

    def table(self, partition: str, spec: TableSpec) -> Rows:
        """See ``collect`` of `diff`."""
        kind = np.select([self.before < 0, self.after < 0], [0, 2], 1)
        key = self.rows.select(list(spec.key)).take(pa.array(np.maximum(self.before, self.after)))
        return pa.table(
            {
                "change": pa.array(CHANGES).take(pa.array(kind)),
                "partition": pa.repeat(partition, len(kind)),
                "key": _structs(key, np.zeros(len(kind), bool)),
                "before": self._side(self.before),
                "after": self._side(self.after),
            }
        )

    def _side(self, places: Indices) -> pa.StructArray:
        return _structs(self.rows.take(pa.array(places, mask=places < 0)), places < 0)


def _structs(rows: Rows, absent: Mask) -> pa.StructArray:
    columns = [column.combine_chunks() for column in rows.columns]
    return pa.StructArray.from_arrays(columns, fields=list(rows.schema), mask=pa.array(absent))


def _compare(old: Rows, new: Rows, spec: TableSpec) -> Pairs:
    """Find the keys whose rows differ. Each key is at most once in ``old`` and in ``new``."""
    rows = pa.concat_tables([old, new])
    order = sort_by_key(rows, spec.stored_key).to_numpy().astype(np.int64)  # stable: the old row of a key comes first
    begins = np.append(True, ~equal_rows(rows, spec.stored_key, order[1:], order[:-1]))[: len(order)]
    first, following = order[begins], np.append(order[1:], -1)[begins]
    paired = ~np.append(begins[1:], True)[begins]
    is_old = first < old.num_rows
    before = np.where(is_old, first, -1)
    after = np.where(paired, following, np.where(is_old, -1, first))
    others = [name for name in rows.schema.names if name not in (*spec.stored_key, *spec.partition_by)]
    paired[paired] = _are_equal(rows, others, before[paired], after[paired])
    return Pairs(rows, before[~paired], after[~paired])


def _are_equal(rows: Rows, names: Sequence[str], one: Indices, other: Indices) -> Mask:
    """As `equal_rows`, also for columns of nested types, which Arrow does not compare."""
    odd = [
        n for n in names if pa.types.is_nested(t := rows.schema.field(n).type) or isinstance(t, pa.BaseExtensionType)
    ]
    equal = equal_rows(rows, [name for name in names if name not in odd], one, other)
    for name in odd:
        at = np.flatnonzero(equal)
        sides = (to_json_values(rows[name].take(pa.array(side[at])).combine_chunks()) for side in (one, other))
        equal[at] = [left == right for left, right in zip(*sides, strict=True)]
    return equal
