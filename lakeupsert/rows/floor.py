"""What a bucket may forget of its deletes, and what it then no longer knows of rows that come late.

A tombstone that is older than the `tombstone_retention` of a batch is dropped by its merge, and the bucket keeps a floor: the
greatest order that it dropped. Of a key that nothing is stored of, a row below the floor may be one that was deleted, so it is
refused, and so is a delete, whose tombstone would make the key a known one. Known keys are compared with what is stored, as
ever. The greatest floor of a partition's buckets holds in all of them.

A full extract deletes what it lacks in the same way: of all other keys the rows up to its greatest order die, and that order
is the floor from then on. No tombstone is written for a key.
"""

import base64
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.rows.convert import true
from lakeupsert.rows.datafiles import from_bytes, from_metadata, read_file, to_bytes
from lakeupsert.rows.rank import sortable
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import DataFile, Manifest
from lakeupsert.table.spec import DELETE_FLAG, Ordering, TableSpec

DELETED_AT = pa.field("_lakeupsert_deleted_at", pa.int64())
"""Column of tombstone files of tables that forget: the receipt stamp of the batch that deleted the key."""


PARTITION = "_lakeupsert_partition"
"""Text column of rows that are not cut by partition yet: the folder's name."""
_REFUSED = pa.schema([("batch", pa.string()), ("arrow", pa.binary())])


@dataclass(frozen=True)
class Forgetting:
    """Which tombstones a merge drops. All in microseconds, moments UTC.

    Attributes:
        batches: of those that are merged, in their order, the receipt stamp, and how long each lets deletes be known
            (`LedgerEntry.retention`; None: for ever).
    """

    batches: tuple[tuple[int, int | None], ...]

    def before(self, age: int) -> int:
        """Deletes that were received before this moment are forgotten when the batch of ``age`` comes; 0: none can be, and the
        moments of those that it is not known of need not be either."""
        return max((max(1, at - kept) for at, kept in self.batches[: age - 1] if kept is not None), default=0)

    @property
    def dropped_before(self) -> int:
        """Tombstones from before this moment are dropped when all is merged."""
        return self.before(len(self.batches) + 1)

    @property
    def stamps(self) -> list[int | None]:
        """When deletes count as received: stored ones of which it is not known, then those of each batch.

        Time in which deletes are known for ever does not count: what was deleted then was received with the first batch that
        lets it be known for some time only. None: there is no such batch yet.
        """
        found: list[int | None] = [None]
        for at, kept in reversed(self.batches):
            found.append(found[-1] if kept is None else at)
        return [found[-1], *reversed(found[1:])]

    def forgotten_ages(self, age: int) -> list[int]:
        """Ages of the batches whose deletes are forgotten when that of ``age`` comes."""
        before = self.before(age)
        return [of_it for of_it, at in enumerate(self.stamps[1:], 1) if at is not None and at < before]


def refused_by_merges(store: ObjectStore, manifests: Iterable[Manifest], spec: TableSpec) -> dict[str, Any]:
    """The keys that merges refused, by batch id: tables of the partition's name, the partition columns and the key columns.

    Nothing of such a key in the batch counts, also what lost to the row that was refused and is not in quarantine.
    """
    found: dict[str, list[Any]] = defaultdict(list)
    names = [*spec.partition_by, *spec.stored_key]
    for manifest in manifests:
        for name in manifest.quarantine:
            rows = read_file(store, DataFile(name=name, rows=0, bytes=0), _REFUSED)
            batches = np.array(rows["batch"].to_pylist(), object)
            keys = pa.concat_tables([from_bytes(s).select(names) for s in rows["arrow"].to_pylist() if s is not None])
            keys = keys.append_column(PARTITION, pa.repeat(pa.scalar(manifest.partition), keys.num_rows))
            for batch in set(batches):
                found[batch].append(keys.filter(pa.array(batches == batch)))
    return {batch: pa.concat_tables(tables, promote_options="permissive") for batch, tables in found.items()}


def is_among(rows: Any, keys: Any, spec: TableSpec) -> Any:
    """A mask (numpy) of the rows, which have `PARTITION` and the key columns, whose key is one of those."""
    names = [PARTITION, *spec.stored_key]
    near = np.ones(rows.num_rows, bool)
    for name in names:
        near &= true(pc.is_in(sortable(rows[name]), sortable(keys[name].cast(rows.schema.field(name).type))))
    wanted = {tuple(key.values()) for key in keys.select(names).to_pylist()}
    candidates = rows.select(names).filter(pa.array(near)).to_pylist()
    near[near] = [tuple(key.values()) in wanted for key in candidates]
    return near


def since(rows: Any, ages: Any, forgets: Forgetting) -> Any:
    """``rows`` with `DELETED_AT`, where it is known: a stored tombstone's own, or what `Forgetting.stamps` tells.

    ``ages``: 0 for a stored row, then 1, 2, … for the batches.
    """
    of_age = pa.array(forgets.stamps, DELETED_AT.type).take(ages)
    at = rows.schema.get_field_index(DELETED_AT.name)
    return rows.set_column(at, DELETED_AT, pc.coalesce(rows[DELETED_AT.name], of_age))


def forgotten(rows: Any, forgets: Forgetting, age: int) -> Any:
    """A mask (numpy) of the rows, which have `DELETED_AT`, that are deletes and forgotten when the batch of ``age`` comes."""
    return true(rows[DELETE_FLAG]) & true(pc.less(rows[DELETED_AT.name], forgets.before(age)))


def greatest(floors: Sequence[str], rows: Any, spec: TableSpec) -> str | None:
    """The greatest of these floors and of the orders of these rows (a table with the ordering columns); None of nothing."""
    known = [_orders(floor, spec) for floor in floors]
    orders = pa.concat_tables([*known, rows.select(spec.order_by)]).cast(_schema(spec))
    if not orders.num_rows:
        return None
    columns = {f"o{i}": sortable(orders[name]) for i, name in enumerate(spec.order_by)}
    keys = [
        (name, "ascending" if o.ascending else "descending", "at_start" if o.nulls_first else "at_end")
        for name, o in zip(columns, spec.ordering, strict=True)
    ]
    first = pc.sort_indices(pa.table(columns), sort_keys=keys)[0].as_py()
    return base64.b64encode(to_bytes(orders.slice(first, 1).combine_chunks())).decode()


def below(rows: Any, floors: Sequence[str], spec: TableSpec) -> Any:
    """A mask (numpy) of the rows whose order is below one of these floors; or the same, where a delete would win by content."""
    found = np.zeros(rows.num_rows, bool)
    for floor in floors:
        loses, equal = _compared(rows, floor, spec)
        found |= loses | equal if spec.ties == "content" else loses
    return found


def up_to(rows: Any, floor: str, spec: TableSpec) -> Any:
    """A mask (numpy) of the rows whose order is that of ``floor`` or below it."""
    loses, equal = _compared(rows, floor, spec)
    return loses | equal


def lacking(
    rows: Any,
    order: Any,
    wins: Any,
    ages: Any,
    full: Sequence[tuple[int, str]],
    spec: TableSpec,
    forgets: Forgetting | None,
) -> Any:
    """Which rows full extracts delete, as they lack the keys.

    Of n rows in the order of `rank.latest`, all that there are of some keys, and with ages (0 for a stored row): for each the
    place in ``full`` of the first extract that deletes it, or -1 (all but ``order`` and ``wins`` numpy). Of a key that an extract
    has, the deletes that had been forgotten when it came are taken away, and what was below them.
    """
    key, rank = np.empty((2, rows.num_rows), np.int64)
    key[order.to_numpy()], rank[order.to_numpy()] = np.cumsum(true(wins)) - 1, np.arange(rows.num_rows)
    killed_by = np.full(rows.num_rows, -1)
    for number, (age, floor) in enumerate(full):
        has = np.zeros(rows.num_rows, bool)
        has[key[ages == age]] = True
        dies = ~has[key] & up_to(rows, floor, spec)
        if forgets is not None:
            void = (killed_by < 0) & has[key] & forgotten(rows, forgets, age)
            greatest_void = np.full(rows.num_rows, rows.num_rows)
            np.minimum.at(greatest_void, key[void], rank[void])
            dies |= rank >= greatest_void[key]
        killed_by[(killed_by < 0) & (ages < age) & dies] = number
    return killed_by


def scalars(floor: str, spec: TableSpec) -> dict[str, Any]:
    """The ordering columns' values (``pyarrow.Scalar``) of a floor."""
    orders = _orders(floor, spec)
    return {name: orders[name][0] for name in spec.order_by}


def _compared(rows: Any, floor: str, spec: TableSpec) -> tuple[Any, Any]:
    """Masks (numpy) of the rows whose order is below ``floor``, and of those that have the same one."""
    order = _orders(floor, spec)
    below, equal = np.zeros(rows.num_rows, bool), np.ones(rows.num_rows, bool)
    for ordering in spec.ordering:
        column, value = sortable(rows[ordering.column]), sortable(order[ordering.column])[0]
        loses, same = _against(column, value, ordering)
        below |= equal & loses
        equal &= same
    return below, equal


def _against(column: Any, value: Any, ordering: Ordering) -> tuple[Any, Any]:
    """Masks of where a column's values lose against a scalar, and where they are equal to it."""
    absent = true(column.is_null())
    if not value.is_valid:
        return (~absent if ordering.nulls_first else np.zeros(len(column), bool)), absent
    loses = pc.greater(column, value) if ordering.ascending else pc.less(column, value)
    return np.where(absent, not ordering.nulls_first, true(loses)), true(pc.equal(column, value))


def _orders(floor: str, spec: TableSpec) -> Any:
    return from_metadata(base64.b64decode(floor)).cast(_schema(spec))  # a type may have been widened since


def _schema(spec: TableSpec) -> Any:
    return pa.schema([(name, spec.schema.field(name).type) for name in spec.order_by])
