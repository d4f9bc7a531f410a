"""Which partition the records of a batch get that bring their key alone, in a table whose keys are unique in the whole table.

Reads     nothing but rows at hand: those of a batch, and the records that the key index has of the same keys
Writes    nothing; `keyindex` writes what becomes of them
Repeat    safe

    rows of a batch + the index's records -> rows with partitions | superseded | refused, deletes for more partitions, and moves

In mode rows only deletes may come so. Such a delete counts as one for the partition where its key is, or was deleted.

In mode columns an update may bring its key alone, too, and a row consists of several records. The newest record of a living key
moves it to the partition that it names: all records of the batch go there, what is stored follows (`carry`), and a delete stays
behind. So does an older record, if it is newer than the one that named the key's partition; else it is for the key's partition.
If the index does not know which one is newer, the record is refused (`other_partition`). Once the key is deleted, a newer
record gives it a new life in any partition, and the delete goes there, too: it stops older records.

A key has a row if a record that names its partition is newer than its last delete. A late delete may leave updates by the key
alone that are newer: they go to quarantine, as they would have if the delete had come first (`unknown_key`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.merge import AGE
from lakeupsert.landing.partitions import UNPLACED
from lakeupsert.rows.arrays import Column, Hashes, Indices, Mask, Rows
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.floor import PARTITION
from lakeupsert.rows.rank import sort_by_rank
from lakeupsert.table.ledger import Reason
from lakeupsert.table.spec import DELETE_FLAG, FILE, MOVED_TO, OF_EARLIER_BATCH, PLACE, TableSpec

HASH = "_lakeupsert_hash"
ALONE = "_lakeupsert_alone"
"""Boolean column: the row landed without a partition."""
NAMED = "_lakeupsert_named"
"""Boolean column of the index, in mode columns: the record named its partition."""
NAMING = "_lakeupsert_naming"
"""Struct column beside it: the order of the record that named the partition, if that is another one. Null for a deleted key, and
if nobody knows it, because an earlier lakeupsert wrote the row."""


WHY_REFUSED: dict[Reason, str] = {
    "unknown_key": "It has only its key, and the table has no row with this key: none has come, or it was deleted.",
    "other_partition": "Its key's row is in another partition, and has a newer record, which names no partition.",
    "unreadable_partition": "It moves its key from a partition that can't be read.",
}


@dataclass(frozen=True)
class UnknownKeys:
    """What becomes of a delete that brings its key alone, if the key has no record: it is refused, or ``kept`` in ``partition``,
    where it meets no row."""

    partition: str
    kept: bool


@dataclass(frozen=True)
class Placed:
    """The rows of a batch with the partitions that they get.

    Attributes:
        rows: with `PARTITION` and `ALONE`, those that stay.
        superseded: older than the delete of their key, and for another partition than it.
        refused: rows by the reason for their quarantine.
        elsewhere: those of ``rows`` that landed in another partition than the one that they get.
        copies: tables of deletes for one more partition, in `PARTITION`, than their own, in `MOVED_TO`.
        moves: tables of stored records whose keys move from the partition in `PARTITION` to that in `MOVED_TO`.
        left: tables of deletes for the first of these.
        ended: tables of late deletes that killed the record that had named the partition in `PARTITION`. No record is left that
            names one; what is newer than the delete goes to quarantine. They are among the ``moves``, to `UNPLACED`.
        changes: in mode columns, the records of the index that change.
        unknown: how many deletes bring the key alone of a key without a record.
    """

    rows: Rows
    superseded: Rows | None = None
    refused: dict[Reason, Rows] = field(default_factory=dict)
    elsewhere: Rows | None = None
    copies: tuple[Rows, ...] = ()
    moves: tuple[Rows, ...] = ()
    left: tuple[Rows, ...] = ()
    ended: tuple[Rows, ...] = ()
    changes: Rows | None = None
    unknown: int = 0


def place(
    incoming: Rows,
    stored: Rows,
    partitions: Column,
    spec: TableSpec,
    unknown: UnknownKeys | None,
    unreadable: Collection[str] = (),
) -> Placed:
    """Place the rows of a batch. ``incoming`` has all of some keys, and ``stored`` each of these keys once, as the index has it.

    Args:
        partitions: those of the ``incoming`` rows, or `UNPLACED`.
        unknown: None if the batch has no row without a partition.
        unreadable: partitions that no living key can leave; in mode columns.
    """
    alone = pc.equal(partitions, UNPLACED)
    rows = incoming.append_column(PARTITION, partitions).append_column(ALONE, alone)
    if spec.mode == "columns":
        rows = rows.append_column(NAMED, pc.invert(alone))
        return _Lives(rows, stored, spec, unknown, unreadable).placed() if rows.num_rows else Placed(rows)
    if unknown is None or not pc.any(alone).as_py():
        return Placed(rows)
    lonely, others = rows.filter(alone), rows.filter(pc.invert(alone))
    found = _known_partitions(lonely, others, stored, spec)
    is_unknown = found.is_null()
    lonely = with_column(lonely, PARTITION, found.fill_null(unknown.partition))
    count = pc.sum(is_unknown).as_py()
    if unknown.kept or not count:
        return Placed(pa.concat_tables([others, lonely]), unknown=count)
    stay = pa.concat_tables([others, lonely.filter(pc.invert(is_unknown))])
    return Placed(stay, refused={"unknown_key": lonely.filter(is_unknown)}, unknown=count)


def is_among_hashes(rows: Rows, hashes: Hashes) -> Mask:
    """The rows whose `HASH` is one of these, which are sorted."""
    own = rows[HASH].to_numpy()
    if not len(hashes):
        return np.zeros(len(own), bool)
    found: Mask = hashes[np.minimum(np.searchsorted(hashes, own), len(hashes) - 1)] == own
    return found


def with_column(rows: Rows, name: str, column: Column) -> Rows:
    """``rows`` with other values in a column that they have."""
    at = rows.schema.get_field_index(name)
    return rows.set_column(at, rows.schema.field(at), column)


def _known_partitions(lonely: Rows, others: Rows, stored: Rows, spec: TableSpec) -> pa.Array:
    """For each ``lonely`` row the partition of its key's stored record, or else of another record of the batch, or null."""
    hashes = np.unique(lonely[HASH].to_numpy())
    near = [rows.filter(pa.array(is_among_hashes(rows, hashes))) for rows in (others, stored)]
    both = by_age((lonely, *near), [*spec.tombstone_schema.names, PARTITION])
    order, wins = sort_by_rank(both, spec, (AGE,))
    places, keys = order.to_numpy(), np.empty(both.num_rows, np.int64)
    keys[places] = np.cumsum(as_mask(wins)) - 1
    source = np.full(int(keys.max()) + 1, -1)
    ages = both[AGE].to_numpy()[places]
    for age in (1, 2):
        some = places[ages == age][::-1]  # the greatest of a key comes last, and stays
        source[keys[some]] = some
    own = source[keys[: lonely.num_rows]]
    return both[PARTITION].combine_chunks().take(pa.array(own, mask=own < 0))


def by_age(tables: Sequence[Rows], columns: Sequence[str]) -> Rows:
    """The tables, one below the other. `AGE` is a row's table."""
    ages = [pa.repeat(pa.scalar(age, pa.int8()), rows.num_rows) for age, rows in enumerate(tables)]
    return pa.concat_tables(
        [rows.select(columns).append_column(AGE, age) for rows, age in zip(tables, ages, strict=True)],
        promote_options="default",  # a column that can't be null in one of them may be so in another
    )


_STAYS, _SUPERSEDED, _UNKNOWN_KEY, _OTHER_PARTITION, _UNREADABLE_PARTITION = range(5)
_REASONS: dict[int, Reason] = {
    _UNKNOWN_KEY: "unknown_key",
    _OTHER_PARTITION: "other_partition",
    _UNREADABLE_PARTITION: "unreadable_partition",
}


class _Lives:
    """Mode columns: follows each key through its records, the least rank first.

    Most keys have one partition, and need no look at single records. Those of the others are walked one by one. If another record
    than the stored one named its partition, it is among them, as a record without a fate.
    """

    def __init__(
        self,
        rows: Rows,
        stored: Rows,
        spec: TableSpec,
        unknown: UnknownKeys | None,
        unreadable: Collection[str],
    ) -> None:
        self._rows, self._spec, self._unknown = rows, spec, unknown
        known = stored
        for name, type_ in ((FILE, pa.int32()), (PLACE, pa.int64())):
            known = known.append_column(name, pa.repeat(pa.scalar(OF_EARLIER_BATCH, type_), stored.num_rows))
        naming = _with_naming_order(known.filter(stored[NAMING].is_valid()), spec)
        columns = [HASH, *spec.tombstone_schema.names, PARTITION, DELETE_FLAG, FILE, PLACE]
        self._both = by_age((naming, known, rows), columns)
        order, wins = sort_by_rank(self._both, spec, (AGE, FILE, PLACE))
        self._stored, self._first = naming.num_rows, naming.num_rows + stored.num_rows
        self._order, self._begins = order.to_numpy(), np.flatnonzero(as_mask(wins))
        self._keys = np.empty(self._both.num_rows, np.int64)
        self._keys[self._order] = np.cumsum(as_mask(wins)) - 1
        names = self._both[PARTITION].combine_chunks()
        encoded = pc.if_else(pc.equal(names, UNPLACED), None, names).dictionary_encode()
        self._names: list[str] = encoded.dictionary.to_pylist()
        if unknown is not None and unknown.partition not in self._names:
            self._names.append(unknown.partition)
        self._home = self._names.index(unknown.partition) if unknown is not None else -1
        self._codes: Indices = encoded.indices.fill_null(-1).to_numpy().astype(np.int64)
        self._deletes = as_mask(self._both[DELETE_FLAG])
        self._named = np.zeros(self._both.num_rows, bool)
        self._named[self._stored : self._first] = as_mask(stored[NAMED])
        self._unreadable = {code for code, name in enumerate(self._names) if name in unreadable}
        self._fate = np.zeros(self._both.num_rows, np.int8)
        self._copies: list[tuple[int, int]] = []
        self._moves: list[tuple[int, int]] = []
        self._left: list[tuple[int, int, int]] = []
        self._ended: dict[int, int] = {}
        self._count = 0

    def placed(self) -> Placed:
        own, alone = self._codes.copy(), self._codes < 0
        only, contested = self._partition_of_each()
        self._codes[alone] = only[self._keys[alone]]
        ends = np.append(self._begins[1:], len(self._order))
        for key in np.flatnonzero(contested).tolist():
            self._walk(self._order[self._begins[key] : ends[key]][::-1].tolist(), own)
        changes = self._changes(own)
        own, codes, fate = (of_each[self._first :] for of_each in (own, self._codes, self._fate))
        rows = with_column(self._rows, PARTITION, self._with_names(codes))
        by_fate = {one: rows.filter(pa.array(fate == one)) for one in np.unique(fate).tolist()}
        refused = {reason: by_fate[one] for one, reason in _REASONS.items() if one in by_fate}
        return Placed(
            by_fate.get(_STAYS, rows.slice(0, 0)),
            by_fate.get(_SUPERSEDED),
            refused,
            rows.filter(pa.array((fate == _STAYS) & (own >= 0) & (own != codes))),
            self._deletes_of([(row, to, int(self._codes[row])) for row, to in self._copies]),
            (*self._moving(), *self._moving_nowhere()),
            self._deletes_of(self._left),
            self._deletes_of(
                [(grave, at, at) for stored, grave in self._ended.items() if (at := int(self._codes[stored])) >= 0]
            ),
            changes,
            self._count,
        )

    def _deletes_of(self, found: Sequence[tuple[int, int, int]]) -> tuple[Rows, ...]:
        """Deletes of the rank of some records, each with the partition that it is for, and another one in `MOVED_TO`."""
        if not found:
            return ()
        places, partitions, others = np.array(found, np.int64).T
        rows = self._both.take(pa.array(places)).drop_columns([HASH])
        rows = with_column(rows, DELETE_FLAG, pa.repeat(True, rows.num_rows))
        rows = with_column(rows, PARTITION, self._with_names(partitions))
        return (rows.append_column(MOVED_TO, self._with_names(others)),)

    def _moving(self) -> Iterator[Rows]:
        if self._moves:
            places, others = np.array(self._moves, np.int64).T
            yield self._as_stored(places).append_column(MOVED_TO, self._with_names(others))

    def _moving_nowhere(self) -> Iterator[Rows]:
        """The stored records of keys that end."""
        if self._ended:
            rows = self._as_stored(np.array([*self._ended]))
            yield rows.append_column(MOVED_TO, pa.repeat(UNPLACED, rows.num_rows))

    def _as_stored(self, places: Indices) -> Rows:
        rows = self._both.take(pa.array(places)).drop_columns([HASH])
        return with_column(rows, PARTITION, self._with_names(self._codes[places]))

    def _with_names(self, codes: Indices) -> pa.Array:
        return pa.array(self._names, pa.string()).take(pa.array(codes, mask=codes < 0))

    def _partition_of_each(self) -> tuple[Indices, Mask]:
        """For each key its partition, if it has one; and whether its records have to be walked."""
        count, named, deletes = len(self._begins), self._codes >= 0, self._deletes
        low, high = np.full(count, len(self._names)), np.full(count, -1)
        np.minimum.at(low, self._keys[named], self._codes[named])
        np.maximum.at(high, self._keys[named], self._codes[named])
        places = np.arange(len(self._codes))
        arrived, stored = places >= self._first, (places >= self._stored) & (places < self._first)

        def has(which: Mask) -> Mask:
            return np.bincount(self._keys[which], minlength=count) > 0

        dead, killed, updated = has(deletes & ~arrived), has(deletes & arrived), has(~named & ~deletes)
        return low, (low != high) | dead | (killed & (updated | has(stored & ~self._named)))

    def _changes(self, own: Indices) -> Rows:
        """The records of the index that the batch changes."""
        places = np.arange(len(self._codes))
        arrived, stored = places >= self._first, (places >= self._stored) & (places < self._first)
        counts = (self._fate == _STAYS) & ~np.isin(places, [*self._ended])
        top = self._greatest(counts & (places >= self._stored))
        named = self._greatest(counts & ~self._deletes & (arrived & (own >= 0) | self._named | (places < self._stored)))
        rank = np.empty(len(places), np.int64)
        rank[self._order] = places  # the less, the greater
        known = np.full(len(self._begins), True)
        known[self._keys[stored & ~self._deletes & ~self._named]] = False
        known[self._keys[places < self._stored]] = True
        of_stored = np.full(len(self._begins), len(places))
        of_stored[self._keys[stored]] = rank[places[stored]]
        # What named the partition of a stored row is not known: it may be newer than what has come.
        named[~known & (named >= 0) & (rank[named] > of_stored)] = -1
        lives = (top >= 0) & ~self._deletes[top]
        named[~lives] = -1
        new = (top >= 0) & (arrived[top] | ((named >= 0) & arrived[named]))
        codes = self._codes.copy()
        for place, partition in self._moves:
            codes[place] = partition
            new[self._keys[place]] = True
        for place, grave in self._ended.items():
            codes[grave] = codes[place]
        top, named = top[new], named[new]
        rows = with_column(self._both.take(pa.array(top)), PARTITION, self._with_names(codes[top]))
        orders = self._both.select(self._spec.order_by).take(pa.array(np.maximum(named, 0))).combine_chunks()
        absent = pa.array((named < 0) | (named == top))
        columns = [column.combine_chunks() for column in orders.itercolumns()]
        naming = pa.StructArray.from_arrays(columns, names=orders.column_names, mask=absent)
        rows = rows.drop_columns([AGE, FILE, PLACE])
        return rows.append_column(NAMED, pa.array(named == top)).append_column(NAMING, naming)

    def _greatest(self, which: Mask) -> Indices:
        """For each key, the place of the greatest of these records, or -1."""
        found = np.full(len(self._begins), -1)
        some = self._order[which[self._order]]
        keys, first = np.unique(self._keys[some], return_index=True)
        found[keys] = some[first]
        return found

    def _walk(self, rows: Sequence[int], own: Indices) -> None:
        """Place the records of one key, given from the least rank on; ``own``: the partitions that they name, or -1."""
        stored = next((row for row in rows if self._stored <= row < self._first), None)
        alive = stored is not None and not self._deletes[stored]
        if stored is None:  # what the batch brings of a new key belongs together
            partition = next((int(own[row]) for row in rows if own[row] >= 0), -1)
            lives, grave = partition >= 0, None
        else:
            partition, lives, grave = int(own[stored]), alive, None if alive else stored
        stuck = alive and partition in self._unreadable
        # Nobody knows whether a record is newer than the one that named the partition, up to the stored record itself.
        unsure = alive and not self._named[stored] and not any(row < self._stored for row in rows)
        is_newer, is_newest, mover = stored is None, stored is None, None
        copies: list[tuple[int, int]] = []
        for row in rows:
            if row < self._first:
                is_newest |= row == stored
                is_newer |= row < self._stored or row == stored
                continue
            named = int(own[row])
            if named < 0:
                self._codes[row] = partition
            elsewhere = named >= 0 and named != partition
            if self._deletes[row]:
                if partition < 0 and not self._is_kept(row):
                    continue
                if is_newer and not is_newest and lives and stuck:
                    self._fate[row] = _UNREADABLE_PARTITION
                    continue
                if elsewhere and lives:
                    copies.append((row, partition))
                elif elsewhere and not is_newer:
                    self._fate[row] = _SUPERSEDED
                if is_newer:
                    partition, lives, grave = int(self._codes[row]), False, row
            elif lives:
                if elsewhere and is_newer and stuck:
                    self._fate[row] = _UNREADABLE_PARTITION
                elif elsewhere and is_newer:
                    partition, mover = named, row
                elif elsewhere and unsure:
                    self._fate[row] = _OTHER_PARTITION
                elif elsewhere:
                    self._codes[row] = partition
            elif not is_newer:
                self._fate[row] = _SUPERSEDED if elsewhere else _STAYS
            elif named < 0:
                self._fate[row] = _UNKNOWN_KEY
            else:
                if alive and self._is_below(grave, stored, rows):
                    mover = row  # what is stored is newer than the delete in part, and follows
                elif elsewhere and grave is not None:
                    copies.append((grave, named))
                partition, lives = named, True
        if stored is not None and grave is not None and alive and not lives and self._is_below(grave, stored, rows):
            self._end(rows, stored, grave)
        elif mover is None:
            self._copies += copies
        else:
            self._move(rows, stored, mover, partition)

    @staticmethod
    def _is_below(grave: int | None, stored: int | None, rows: Sequence[int]) -> bool:
        """Whether a delete of the batch has a lower rank than the stored record."""
        return grave is not None and stored is not None and rows.index(grave) < rows.index(stored)

    def _end(self, rows: Sequence[int], stored: int, grave: int) -> None:
        """A late delete leaves updates by the key alone of what is stored: the key is deleted where it is."""
        for row in rows:
            if row >= self._first and self._fate[row] == _STAYS:
                self._codes[row] = self._codes[stored]
        self._ended[stored] = grave

    def _move(self, rows: Sequence[int], stored: int | None, mover: int, partition: int) -> None:
        """Take all that is known of a key to the partition where the batch leaves it, also if it is deleted there."""
        for row in rows:
            if row >= self._first and self._fate[row] == _STAYS:
                self._codes[row] = partition
        if stored is None or self._codes[stored] == partition:
            return
        if self._deletes[stored]:
            self._copies.append((stored, partition))
            return
        self._moves.append((stored, partition))
        self._left.append((max(mover, stored, key=rows.index), int(self._codes[stored]), partition))

    def _is_kept(self, row: int) -> bool:
        """Whether the delete of a key without a record stays; then it has its partition."""
        self._count += 1
        if self._unknown is None or not self._unknown.kept:
            self._fate[row] = _UNKNOWN_KEY
            return False
        self._codes[row] = self._home
        return True


def _with_naming_order(stored: Rows, spec: TableSpec) -> Rows:
    """Records of the index as those that named their partitions."""
    orders = stored[NAMING].combine_chunks()
    for name in spec.order_by:
        stored = with_column(stored, name, orders.field(name))
    return stored
