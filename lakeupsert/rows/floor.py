"""Floors: how a bucket forgets old deletes, and which late rows it must refuse from then on.

The merge of a batch drops tombstones that are older than the batch's `tombstone_retention`. The bucket then keeps a floor: the
greatest order among the dropped tombstones. A row below the floor whose key is not stored may have been deleted, so the merge
refuses it. The merge also refuses a delete below the floor, because its tombstone would make the key known again. Rows of known
keys are compared with the stored row as usual. The greatest floor of a partition's buckets holds in all of them.

A full extract deletes missing keys in the same way: their rows up to the extract's greatest order die, and that order becomes
the floor. No tombstones are written for these keys. An extract that replaces what was before it deletes them whatever their
order, and its own rows win against older ones. Its greatest order is then the only floor.

The floor of an extract holds in its whole scope: a partition that comes later starts with it (`Touched.extract`).
"""

import base64
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.rows.arrays import Column, Indices, Mask, Rows
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.datafiles import from_bytes, read_file, to_bytes
from lakeupsert.rows.rank import sort_key, sortable
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import DataFile, Manifest
from lakeupsert.table.roles import Ordering
from lakeupsert.table.spec import DELETE_FLAG, TableSpec

DELETED_AT = pa.field("_lakeupsert_deleted_at", pa.int64())
"""Column of tombstone files in tables that forget deletes: the receipt stamp of the batch that deleted the key."""
PARTITION = "_lakeupsert_partition"
"""Text column of rows that are not yet split by partition: the name of the partition's folder."""
_REFUSED = pa.schema([("batch", pa.string()), ("arrow", pa.binary())])


@dataclass(frozen=True)
class Forgetting:
    """Which tombstones a merge drops. All times are in microseconds, UTC.

    Attributes:
        batches: for each merged batch, in order: its receipt stamp, and how long deletes stay known when it is merged
            (`LedgerEntry.retention`; None: for ever).
    """

    batches: tuple[tuple[int, int | None], ...]

    def before(self, age: int) -> int:
        """The merge of batch number ``age`` finds deletes received before this time forgotten. 0: no delete can be forgotten, so
        unknown times of receipt do not matter."""
        return max((max(1, at - kept) for at, kept in self.batches[: age - 1] if kept is not None), default=0)

    @property
    def dropped_before(self) -> int:
        """Tombstones received before this time are dropped at the end of the merge."""
        return self.before(len(self.batches) + 1)

    @property
    def stamps(self) -> list[int | None]:
        """When deletes count as received: first for stored deletes without a known time, then for each batch.

        Time during which deletes are kept for ever does not count. Deletes from such a time count as received with the first
        later batch that has a retention; None if there is no such batch yet.
        """
        backwards: list[int | None] = [None]
        for at, kept in reversed(self.batches):
            backwards.append(backwards[-1] if kept is None else at)
        return [backwards[-1], *reversed(backwards[1:])]

    def forgotten_ages(self, age: int) -> list[int]:
        """Numbers of the batches whose deletes are forgotten when batch number ``age`` is merged."""
        before = self.before(age)
        return [number for number, at in enumerate(self.stamps[1:], 1) if at is not None and at < before]


def read_refused_keys(store: ObjectStore, manifests: Iterable[Manifest], spec: TableSpec) -> dict[str, Rows]:
    """The keys that merges refused, by batch id. Columns: `PARTITION`, the partition columns and the key columns.

    No row of such a key in the batch counts. That includes rows that lost to the refused row and are not in quarantine.
    """
    refused: dict[str, list[Rows]] = defaultdict(list)
    names = [*spec.partition_by, *spec.stored_key]
    for manifest in manifests:
        for name in manifest.quarantine:
            rows = read_file(store, DataFile(name=name, rows=0, bytes=0), _REFUSED)
            batches = np.array(rows["batch"].to_pylist(), object)
            keys = pa.concat_tables([from_bytes(s).select(names) for s in rows["arrow"].to_pylist() if s is not None])
            keys = keys.append_column(PARTITION, pa.repeat(pa.scalar(manifest.partition), keys.num_rows))
            for batch in set(batches):
                refused[batch].append(keys.filter(pa.array(batches == batch)))
    return {batch: pa.concat_tables(tables, promote_options="permissive") for batch, tables in refused.items()}


def is_among(rows: Rows, keys: Rows, columns: Sequence[str]) -> Mask:
    """Which rows have in these columns the values of a row of ``keys``. Without columns, all have."""
    near: Mask = np.ones(rows.num_rows, bool)
    if not columns:
        return near
    for name in columns:
        near &= as_mask(pc.is_in(sortable(rows[name]), sortable(keys[name].cast(rows.schema.field(name).type))))
    candidates = rows.select(columns).filter(pa.array(near)).to_pylist()
    if not candidates:
        return near
    wanted = {tuple(key.values()) for key in keys.select(columns).to_pylist()}
    near[near] = [tuple(key.values()) in wanted for key in candidates]
    return near


def add_deletion_times(rows: Rows, ages: Indices, forgets: Forgetting) -> Rows:
    """``rows`` with `DELETED_AT` filled in: a stored tombstone's own value, otherwise the one from `Forgetting.stamps`.

    ``ages``: 0 for a stored row, then 1, 2, … for the batches.
    """
    of_age = pa.array(forgets.stamps, DELETED_AT.type).take(ages)
    at = rows.schema.get_field_index(DELETED_AT.name)
    return rows.set_column(at, DELETED_AT, pc.coalesce(rows[DELETED_AT.name], of_age))


def find_forgotten(rows: Rows, forgets: Forgetting, age: int) -> Mask:
    """Which rows (with `DELETED_AT`) are deletes that are forgotten when batch number ``age`` is merged."""
    return as_mask(rows[DELETE_FLAG]) & as_mask(pc.less(rows[DELETED_AT.name], forgets.before(age)))


def greatest_floor(floors: Sequence[str], rows: Rows, spec: TableSpec) -> str | None:
    """The greatest of some floors and of the orders of some rows, as a floor; None if there are neither."""
    known = [_orders(floor, spec) for floor in floors]
    orders = pa.concat_tables([*known, rows.select(spec.order_by)]).cast(_schema(spec))
    if not orders.num_rows:
        return None
    first = _greatest_first(orders, spec)[0].as_py()
    return base64.b64encode(to_bytes(orders.slice(first, 1).combine_chunks())).decode()


def rank_floors(floors: Sequence[str], spec: TableSpec) -> list[int]:
    """The places of some floors in an order that begins with a greatest one."""
    places = np.empty(len(floors), np.int64)
    places[_greatest_first(pa.concat_tables([_orders(floor, spec) for floor in floors]), spec)] = range(len(floors))
    found: list[int] = places.tolist()
    return found


def _greatest_first(orders: Rows, spec: TableSpec) -> pa.Array:
    columns = {f"o{i}": sortable(orders[name]) for i, name in enumerate(spec.order_by)}
    keys = [sort_key(name, ordering) for name, ordering in zip(columns, spec.ordering, strict=True)]
    return pc.sort_indices(pa.table(columns), sort_keys=keys)


def find_below(rows: Rows, floors: Sequence[str], spec: TableSpec) -> Mask:
    """Which rows have an order below one of these floors. With `ties` content also an equal order, which a delete would win."""
    mask: Mask = np.zeros(rows.num_rows, bool)
    for floor in floors:
        loses, equal = _compare(rows, floor, spec)
        mask |= loses | equal if spec.ties == "content" else loses
    return mask


@dataclass(frozen=True)
class Extract:
    """A full extract among the batches of a merge.

    Attributes:
        age: the number of its batch: 1, 2, …
        order: the greatest order of its rows, as a floor.
        replaces: nothing of earlier batches counts, whatever its order.
    """

    age: int
    order: str
    replaces: bool = False

    def find_reached(self, rows: Rows, spec: TableSpec) -> Mask:
        """Which rows of earlier batches it deletes if it lacks their keys."""
        return np.ones(rows.num_rows, bool) if self.replaces else np.logical_or(*_compare(rows, self.order, spec))


@dataclass(frozen=True)
class MissingKeys:
    """What full extracts do to n rows.

    Attributes:
        killed_by: for each row, the age of the first extract that deletes it, or 0.
        lacked: which rows have a key that a later extract lacks.
    """

    killed_by: Indices
    lacked: Mask


def find_missing_keys(
    rows: Rows,
    order: Indices,
    wins: Mask,
    ages: Indices,
    full: Sequence[Extract],
    spec: TableSpec,
    forgets: Forgetting | None,
) -> MissingKeys:
    """Find the rows that full extracts delete because they lack the key.

    What a row had replaced dies with it, whatever its order. If an extract has a key, it also removes the key's deletes that were
    forgotten by then, and all rows below these.

    Args:
        rows: all rows of some keys.
        order, wins: what `rank.sort_by_rank` returns for them, with rows of a later era first (`find_eras`).
        ages: 0 for a stored row, then 1, 2, … for the batches.
    """
    key, rank = np.empty((2, rows.num_rows), np.int64)
    key[order], rank[order] = np.cumsum(wins) - 1, np.arange(rows.num_rows)
    killed_by, lacked = np.zeros(rows.num_rows, np.int64), np.zeros(rows.num_rows, bool)
    replaced = any(extract.replaces for extract in full)
    for extract in full:
        has = np.zeros(rows.num_rows, bool)
        has[key[ages == extract.age]] = True
        lacked |= ~has[key] & (ages < extract.age)
        dies = ~has[key] & extract.find_reached(rows, spec)
        if replaced:  # a row that it reaches may have replaced greater ones, which go with it
            dies |= _with_all_below(dies & (ages < extract.age), key, rank)
        if forgets is not None:
            void = (killed_by == 0) & has[key] & find_forgotten(rows, forgets, extract.age)
            dies |= _with_all_below(void, key, rank)
        killed_by[(killed_by == 0) & (ages < extract.age) & dies] = extract.age
    return MissingKeys(killed_by, lacked)


def _with_all_below(which: Mask, keys: Indices, ranks: Indices) -> Mask:
    """These rows, and those of their keys that rank below them."""
    first = np.full(len(keys), len(keys))
    np.minimum.at(first, keys[which], ranks[which])
    found: Mask = ranks >= first[keys]
    return found


def find_eras(ages: Indices, full: Sequence[Extract]) -> Indices:
    """For each row, how many extracts that replace what was before them came up to its batch. A row of a later era wins."""
    return np.searchsorted([extract.age for extract in full if extract.replaces], ages, side="right")


def floor_values(floor: str, spec: TableSpec) -> dict[str, pa.Scalar]:
    """The values of a floor, by ordering column."""
    orders = _orders(floor, spec)
    return {name: orders[name][0] for name in spec.order_by}


def _compare(rows: Rows, floor: str, spec: TableSpec) -> tuple[Mask, Mask]:
    """Which rows have an order below ``floor``, and which have the same order."""
    order = _orders(floor, spec)
    below, equal = np.zeros(rows.num_rows, bool), np.ones(rows.num_rows, bool)
    for ordering in spec.ordering:
        column, value = sortable(rows[ordering.column]), sortable(order[ordering.column])[0]
        loses, same = _against(column, value, ordering)
        below |= equal & loses
        equal &= same
    return below, equal


def _against(column: Column, value: pa.Scalar, ordering: Ordering) -> tuple[Mask, Mask]:
    """Which values of a column lose against a scalar, and which equal it."""
    absent = as_mask(column.is_null())
    if not value.is_valid:
        return (~absent if ordering.nulls_first else np.zeros(len(column), bool)), absent
    loses = pc.greater(column, value) if ordering.ascending else pc.less(column, value)
    return np.where(absent, not ordering.nulls_first, as_mask(loses)), as_mask(pc.equal(column, value))


def _orders(floor: str, spec: TableSpec) -> Rows:
    return from_bytes(base64.b64decode(floor)).cast(_schema(spec))  # a type may have been widened since


def _schema(spec: TableSpec) -> pa.Schema:
    return pa.schema([(name, spec.schema.field(name).type) for name in spec.order_by])
