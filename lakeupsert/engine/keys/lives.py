"""Mode columns: the life of each key of a batch, from its least record to its greatest.

Reads     no object: it gets the rows of a batch, and the records of the same keys in the key index
Writes    nothing
Repeat    safe

An update may have no more than its key, too, and a row consists of several records. The newest record of a living key moves it to
the partition that it names: all records of the batch go there, what is stored follows (`carry`), and a delete stays behind. So
does an older record, if it is newer than the one that named the key's partition; else it is for the key's partition. Once the key
is deleted, a newer record gives it a new life in any partition, and the delete goes there, too: it stops older records.

A key has a row if a record that names its partition is newer than its last delete. A late delete may leave newer updates that
name no partition: they go to quarantine, as they would have if the delete had come first (`unknown_key`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.engine.keys import effects
from lakeupsert.engine.keys.effects import Effect
from lakeupsert.engine.keys.index import HASH, NAMED, NAMING, by_age, with_naming_order
from lakeupsert.engine.merge import AGE
from lakeupsert.landing.partitions import UNPLACED
from lakeupsert.rows.arrays import Indices, Mask, Rows, repeat, with_column, with_value
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.floor import PARTITION
from lakeupsert.rows.rank import sort_by_rank
from lakeupsert.table.ledger import Reason
from lakeupsert.table.spec import DELETE_FLAG, FILE, MOVED_TO, OF_EARLIER_BATCH, PLACE, TableSpec


@dataclass(frozen=True)
class UnknownKeys:
    """How to treat a delete that names no partition, if its key has no record: it is refused, or ``kept`` in ``partition``, where
    it meets no row."""

    partition: str
    kept: bool


_STAYS, _SUPERSEDED, _UNKNOWN_KEY, _UNREADABLE_PARTITION = range(4)
_REASONS: dict[int, Reason] = {_UNKNOWN_KEY: "unknown_key", _UNREADABLE_PARTITION: "unreadable_partition"}

LIVES, DEAD = "lives", "dead"
OLDER, NEWER = "older", "newer"
"""Than the record that named the key's partition, or deleted the key."""
STEPS = {
    (LIVES, "delete here"): {OLDER: "stay", NEWER: "kill"},
    (LIVES, "delete elsewhere"): {OLDER: "copy", NEWER: "copy and kill"},
    (LIVES, "record alone"): {OLDER: "stay", NEWER: "stay"},
    (LIVES, "record here"): {OLDER: "stay", NEWER: "stay"},
    (LIVES, "record elsewhere"): {OLDER: "join", NEWER: "move"},
    (DEAD, "delete here"): {OLDER: "stay", NEWER: "kill"},
    (DEAD, "delete elsewhere"): {OLDER: "lose", NEWER: "kill"},
    (DEAD, "record alone"): {OLDER: "stay", NEWER: "go unknown"},
    (DEAD, "record here"): {OLDER: "stay", NEWER: "revive"},
    (DEAD, "record elsewhere"): {OLDER: "lose", NEWER: "revive"},
}
"""How a record acts on a key that lives or is dead. A delete that names no partition is one for the partition of its key."""


@dataclass
class _Life:
    """One key while its records are walked, the least rank first. A record is its place in `_Lives._both`.

    Attributes:
        rows: the records.
        stored: the record of the index.
        partition: where the key is now, or -1.
        lives: whether the key has a row.
        alive: whether the stored record is one of a row.
        stuck: the key can't leave the partition where it is stored, which can't be read.
        grave: the last delete.
        mover: the last record that took the key to another partition.
        copies: deletes for one more partition: the record and that partition.
        is_newer: the record at hand is newer than the one that named the partition.
        is_newest: it is newer than the stored record.
    """

    rows: Sequence[int]
    stored: int | None
    partition: int
    lives: bool
    alive: bool = False
    stuck: bool = False
    grave: int | None = None
    is_newer: bool = False
    is_newest: bool = False
    mover: int | None = None
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def ends(self) -> bool:
        """A late delete killed what named the partition, and the stored record is newer."""
        return self.is_below_stored and not self.lives

    @property
    def is_below_stored(self) -> bool:
        """Whether the last delete has a lower rank than the stored record of a row."""
        if not self.alive or self.grave is None or self.stored is None:
            return False
        return self.rows.index(self.grave) < self.rows.index(self.stored)


class Lives:
    """Mode columns: follows each key through its records, the least rank first.

    Most keys have one partition, and need no look at single records. Those of the others are walked one by one. If another record
    than the stored one named its partition, it is among them, as a record without a fate.
    """

    def __init__(
        self, rows: Rows, stored: Rows, spec: TableSpec, unknown: UnknownKeys | None, unreadable: Collection[str]
    ) -> None:
        self._rows, self._spec, self._unknown = rows, spec, unknown
        known = stored.append_column(FILE, repeat(OF_EARLIER_BATCH, pa.int32(), stored))
        known = known.append_column(PLACE, repeat(OF_EARLIER_BATCH, pa.int64(), stored))
        naming = with_naming_order(known.filter(stored[NAMING].is_valid()), spec)
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

    def followed(self) -> Iterator[Effect]:
        own, alone = self._codes.copy(), self._codes < 0
        only, contested = self._partition_of_each()
        self._codes[alone] = only[self._keys[alone]]
        ends = np.append(self._begins[1:], len(self._order))
        for key in np.flatnonzero(contested).tolist():
            self._walk(self._order[self._begins[key] : ends[key]][::-1].tolist(), own)
        changes = self._changes(own)
        yield effects.Unknown(self._count)
        yield from self._of_landed(*(of_each[self._first :] for of_each in (own, self._codes, self._fate)))
        if self._left:
            yield effects.Left(self._deletes_of(self._left))
        if self._copies:
            yield effects.Copied(self._deletes_of([(row, to, int(self._codes[row])) for row, to in self._copies]))
        if self._moves:
            places, others = np.array(self._moves, np.int64).T
            yield effects.Moved(self._as_stored(places).append_column(MOVED_TO, self._with_names(others)))
        yield from self._of_ended()
        yield effects.Indexed(changes)

    def _of_landed(self, own: Indices, codes: Indices, fate: Indices) -> Iterator[Effect]:
        """The effects on landed rows: ``own`` has the partitions that they name, or -1, ``codes`` the ones that they get."""
        rows = with_column(self._rows, PARTITION, self._with_names(codes))
        yield effects.Superseded(rows.filter(pa.array(fate == _SUPERSEDED)))
        yield effects.Placed(rows.filter(pa.array((fate == _STAYS) & (own != codes))))
        for one, reason in _REASONS.items():
            if (fate == one).any():
                yield effects.Refused(rows.filter(pa.array(fate == one)), reason)

    def _of_ended(self) -> Iterator[Effect]:
        """The stored records of keys that end, and the deletes that ended them."""
        if not self._ended:
            return
        rows = self._as_stored(np.array([*self._ended]))
        yield effects.Moved(rows.append_column(MOVED_TO, pa.repeat(UNPLACED, rows.num_rows)))
        graves = [(grave, at, at) for stored, grave in self._ended.items() if (at := int(self._codes[stored])) >= 0]
        if graves:
            yield effects.Ended(self._deletes_of(graves))

    def _deletes_of(self, found: Sequence[tuple[int, int, int]]) -> Rows:
        """Deletes of the rank of some records, each with the partition that it is for, and another one in `MOVED_TO`."""
        places, partitions, others = np.array(found, np.int64).T
        rows = with_value(self._as_stored(places), DELETE_FLAG, True)
        rows = with_column(rows, PARTITION, self._with_names(partitions))
        return rows.append_column(MOVED_TO, self._with_names(others))

    def _as_stored(self, places: Indices) -> Rows:
        rows = self._both.take(pa.array(places)).drop_columns([HASH])
        return with_column(rows, PARTITION, self._with_names(self._codes[places]))

    def _with_names(self, codes: Indices) -> pa.Array:
        return pa.array(self._names, pa.string()).take(pa.array(codes, mask=codes < 0))

    def _partition_of_each(self) -> tuple[Indices, Mask]:
        """For each key its partition, if it has one; and whether `_walk` must follow its records."""
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
        arrived = places >= self._first
        counts = (self._fate == _STAYS) & ~np.isin(places, [*self._ended])
        top = self._greatest(counts & (places >= self._stored))
        named = self._greatest(counts & ~self._deletes & (arrived & (own >= 0) | self._named | (places < self._stored)))
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
        life = self._born(rows, own)
        for row in rows:
            if row < self._first:
                life.is_newest |= row == life.stored
                life.is_newer |= row < self._stored or row == life.stored
                continue
            if own[row] < 0:
                self._codes[row] = life.partition
            self._step(life, row, int(own[row]))
        if life.ends:
            self._end(life)
        elif life.mover is None:
            self._copies += life.copies
        else:
            self._move(life)

    def _born(self, rows: Sequence[int], own: Indices) -> _Life:
        """The key as it is stored. The records that a batch has of a new key belong together."""
        stored = next((row for row in rows if self._stored <= row < self._first), None)
        if stored is None:
            partition = next((int(own[row]) for row in rows if own[row] >= 0), -1)
            return _Life(rows, None, partition, lives=partition >= 0, is_newer=True, is_newest=True)
        partition, alive = int(own[stored]), not self._deletes[stored]
        stuck = alive and partition in self._unreadable
        grave = None if alive else stored
        return _Life(rows, stored, partition, lives=alive, alive=alive, stuck=stuck, grave=grave)

    def _step(self, life: _Life, row: int, named: int) -> None:
        """Follow `STEPS`: one record that names the partition ``named``, or none (-1)."""
        elsewhere = named >= 0 and named != life.partition
        if self._deletes[row]:
            event = "delete elsewhere" if elsewhere else "delete here"
        else:
            event = "record elsewhere" if elsewhere else "record here" if named >= 0 else "record alone"
        match STEPS[LIVES if life.lives else DEAD, event][NEWER if life.is_newer else OLDER]:
            case "lose":
                self._fate[row] = _SUPERSEDED
            case "copy":
                life.copies.append((row, life.partition))
            case "kill" | "copy and kill":
                self._kill(life, row)
            case "join":
                self._codes[row] = life.partition
            case "move" if life.stuck:
                self._fate[row] = _UNREADABLE_PARTITION
            case "move":
                life.partition, life.mover = named, row
            case "go unknown":
                self._fate[row] = _UNKNOWN_KEY
            case "revive":
                if life.is_below_stored:
                    life.mover = row  # what is stored is newer than the delete in part, and follows
                elif elsewhere and life.grave is not None:
                    life.copies.append((life.grave, named))
                life.partition, life.lives = named, True

    def _kill(self, life: _Life, row: int) -> None:
        if life.partition < 0 and not self._is_kept(row):
            return
        if life.lives and life.stuck and not life.is_newest:
            self._fate[row] = _UNREADABLE_PARTITION
            return
        left = life.stored if life.is_below_stored and not life.lives else None  # outlives the last delete
        at = life.partition if left is None else int(self._codes[left])
        if (life.lives or left is not None) and at != self._codes[row]:
            life.copies.append((row, at))
        life.partition, life.lives, life.grave = int(self._codes[row]), False, row

    def _end(self, life: _Life) -> None:
        """Of what is stored, a late delete leaves only updates that name no partition: the key is deleted where it is."""
        assert life.stored is not None
        assert life.grave is not None
        for row in life.rows:
            if row >= self._first and self._fate[row] == _STAYS:
                self._codes[row] = self._codes[life.stored]
        self._ended[life.stored] = life.grave

    def _move(self, life: _Life) -> None:
        """Take all that is known of a key to the partition where the batch leaves it, also if it is deleted there."""
        assert life.mover is not None
        for row in life.rows:
            if row >= self._first and self._fate[row] == _STAYS:
                self._codes[row] = life.partition
        stored, partition = life.stored, life.partition
        if stored is None or self._codes[stored] == partition:
            return
        if self._deletes[stored]:
            self._copies.append((stored, partition))
            return
        self._moves.append((stored, partition))
        self._left.append((max(life.mover, stored, key=life.rows.index), int(self._codes[stored]), partition))

    def _is_kept(self, row: int) -> bool:
        """Whether the delete of a key without a record stays; then it has its partition."""
        self._count += 1
        if self._unknown is None or not self._unknown.kept:
            self._fate[row] = _UNKNOWN_KEY
            return False
        self._codes[row] = self._home
        return True
