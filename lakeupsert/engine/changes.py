"""What a merge did to the table's keys: inserted, updated, deleted, unchanged, late (docs/SEMANTICS.md, "What a batch changed").

A key that records came for is counted once, by what is stored of it before and after. The two engines bring their rows in
their own ways, and both are counted here.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.compute as pc

from lakeupsert.engine.convert import true
from lakeupsert.engine.rank import sortable
from lakeupsert.table.manifest import NO_CHANGES, Changes
from lakeupsert.table.spec import TableSpec


class Tally:
    """Adds up what happens to keys as their incoming rows meet what is stored; each key is in one call of `meet` at a time.

    A key of which nothing is stored is new, until a later call meets it with what is.
    """

    def __init__(self) -> None:
        self._new_live = self._new_dead = 0
        self._met = NO_CHANGES

    def meet(
        self, starts: Any, ages: Any, deleted: Any, same: Callable[[Any, Any], Any], *, again: bool = False
    ) -> None:
        """n rows sorted by key, greatest rank first; ``starts`` (places, ascending) is where each key begins.

        ``ages``: 0 for a stored row; ``deleted``: it is a delete or tombstone (both numpy, n). ``same`` tells for pairs of places
        whether both rows have the same ordering values. ``again``: the incoming ones are winners of an earlier call.
        """
        is_stored = ages == 0
        came, stored = np.flatnonzero(~is_stored), np.flatnonzero(is_stored)
        # Of each key that rows came for, the place of the greatest of these, and of the greatest that is stored.
        keys, first = np.unique(np.searchsorted(starts, came, "right"), return_index=True)
        begins, ends = starts[keys - 1], np.append(starts[1:], len(ages))[keys - 1]
        came = came[first]
        at = np.searchsorted(stored, begins)
        stored = np.append(stored, len(ages))[at]
        met = stored < ends
        if not again:
            self._new(deleted[came[~met]], 1)
        came, stored, begins = came[met], stored[met], begins[met]
        if not len(came):
            return
        if again:
            self._new(deleted[came], -1)
        before, after = ~deleted[stored], ~deleted[begins]
        repeated = (before == after) & (~before & (came == begins) | same(stored, came))
        late = (stored == begins) & ~repeated
        self._met += Changes(
            inserted=int(np.sum(~before & after)),
            updated=int(np.sum(before & after & ~late & ~repeated)),
            deleted=int(np.sum(before & ~after)),
            unchanged=int(np.sum(repeated)),
            late=int(np.sum(late)),
        )

    def lacking(self, ages: Any, deleted: Any) -> None:
        """Rows that die as a full extract lacks them."""
        self._met += Changes(deleted=int(np.sum((ages == 0) & ~deleted)))

    def refused(self, deleted: Any) -> None:
        """New rows that are not merged."""
        self._new(deleted, -1)

    def _new(self, deleted: Any, sign: int) -> None:
        dead = int(np.sum(deleted))
        self._new_dead += sign * dead
        self._new_live += sign * (len(deleted) - dead)

    def changes(self) -> Changes:
        return self._met + Changes(inserted=self._new_live, unchanged=self._new_dead)


def same_order(rows: Any, spec: TableSpec) -> Callable[[Any, Any], Any]:
    """For `Tally.meet`, of rows (a table with the ordering columns) in its order."""

    def same(one: Any, other: Any) -> Any:
        equal = np.ones(len(one), bool)
        for name in spec.order_by:
            left, right = sortable(rows[name].take(one)), sortable(rows[name].take(other))
            both_null = true(left.is_null()) & true(right.is_null()) if left.null_count and right.null_count else False
            equal &= true(pc.equal(left, right)) | both_null
        return equal

    return same
