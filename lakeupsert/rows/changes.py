"""Counts what a merge does to keys: inserted, updated, deleted, unchanged, late (docs/SEMANTICS.md, "What a batch changed").

Each key with incoming records is counted once, by its stored row before and after the merge. Both engines count here.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from lakeupsert.rows.arrays import Indices, Mask, Rows
from lakeupsert.rows.rank import equal_rows
from lakeupsert.table.manifest import NO_CHANGES, Changes
from lakeupsert.table.spec import TableSpec

Equal = Callable[[Indices, Indices], Mask]
"""For n pairs of rows, given by index, whether both have equal values."""


class Tally:
    """Counts what happens to keys as their incoming rows meet the stored ones. All rows of a key belong in one call of `meet`.

    A key without a stored row counts as new, until a later call brings a stored row for it.
    """

    def __init__(self) -> None:
        self._new_live = self._new_dead = 0
        self._met = NO_CHANGES

    def meet(
        self,
        wins: Mask,
        ages: Indices,
        deleted: Mask,
        same: Equal | None = None,
        uses: Mask | None = None,
        *,
        again: bool = False,
    ) -> None:
        """Count n rows, sorted by key, greatest rank first.

        Args:
            wins: the first row of each key.
            ages: 0 for a stored row.
            deleted: deletes and tombstones.
            same: compares rows; None if arrival decides ties, so that an incoming row never repeats the stored one.
            uses: the rows that contribute to their key's result; None: those in ``wins``.
            again: the incoming rows are the winners of an earlier call.
        """
        is_stored = ages == 0
        if not is_stored.any():
            if not again:
                self._new(deleted[wins], 1)
            return
        # For each key with incoming rows: the greatest incoming row and the greatest stored row, as indices.
        came, stored, begins = np.flatnonzero(~is_stored), np.flatnonzero(is_stored), np.flatnonzero(wins)
        keys = np.cumsum(wins)[came] - 1
        first = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
        came, keys = came[first], keys[first]
        begins, ends = begins[keys], np.append(begins[1:], len(ages))[keys]
        stored = np.append(stored, len(ages))[np.searchsorted(stored, begins)]
        met = stored < ends
        if not again:
            self._new(deleted[came[~met]], 1)
        came, stored, begins = came[met], stored[met], begins[met]
        if not len(came):
            return
        if again:
            self._new(deleted[came], -1)
        before, after = ~deleted[stored], ~deleted[begins]
        repeated = ~before & ~after & (came == begins)
        if same is not None:
            repeated |= (before == after) & (deleted[came] == deleted[stored]) & same(stored, came)
        late = (stored == begins) & ~repeated
        if uses is not None:
            late &= ~any_per_key(wins, uses & ~is_stored)[keys[met]]
        self._met += Changes(
            inserted=int(np.sum(~before & after)),
            updated=int(np.sum(before & after & ~late & ~repeated)),
            deleted=int(np.sum(before & ~after)),
            unchanged=int(np.sum(repeated)),
            late=int(np.sum(late)),
        )

    def lacking(self, ages: Indices, deleted: Mask) -> None:
        """Count rows that are deleted because a full extract lacks them."""
        self._met += Changes(deleted=int(np.sum((ages == 0) & ~deleted)))

    def newer_than_extract(self, keys: int) -> None:
        """Count keys that a full extract lacks and whose row stays, because it is newer."""
        self._met += Changes(newer_than_extract=keys)

    def refused(self, deleted: Mask) -> None:
        """Take back new rows that the merge refuses."""
        self._new(deleted, -1)

    def _new(self, deleted: Mask, sign: int) -> None:
        dead = int(np.sum(deleted))
        self._new_dead += sign * dead
        self._new_live += sign * (len(deleted) - dead)

    def changes(self, *, per_partition: bool = True) -> Changes:
        """Everything that was counted. A delete that finds nothing is unchanged, and counted as such, too.

        ``per_partition``: nothing elsewhere has to do with the keys, so a delete that finds no row here finds none.
        """
        dead = self._new_dead
        lone = dead if per_partition else 0
        return self._met + Changes(inserted=self._new_live, unchanged=dead, deletes_without_row=lone)


def any_per_key(wins: Mask, marked: Mask) -> Mask:
    """For each key, whether one of its rows is marked. Rows are sorted by key; ``wins`` marks the first row of each key."""
    return np.logical_or.reduceat(marked, np.flatnonzero(wins))


def content_comparison(rows: Rows, spec: TableSpec) -> Equal | None:
    """The argument ``same`` of `Tally.meet` for these rows."""
    if spec.ties == "arrival":
        return None
    return partial(equal_rows, rows, (*spec.order_by, *spec.content))
