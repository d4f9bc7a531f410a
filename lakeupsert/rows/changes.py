"""What a merge did to the table's keys: inserted, updated, deleted, unchanged, late (docs/SEMANTICS.md, "What a batch changed").

A key that records came for is counted once, by what is stored of it before and after. The two engines bring their rows in
their own ways, and both are counted here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lakeupsert.rows.rank import equal_rows
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
        self,
        wins: Any,
        ages: Any,
        deleted: Any,
        same: Callable[[Any, Any], Any] | None = None,
        uses: Any = None,
        *,
        again: bool = False,
    ) -> None:
        """n rows sorted by key, greatest rank first; ``wins`` marks the first of each key.

        ``ages``: 0 for a stored row; ``deleted``: it is a delete or tombstone (all numpy, n). ``same`` tells for pairs of places
        whether their rows have equal values; None: arrival decides, and what comes is another row. ``uses`` marks rows that are
        in what their key comes to; None: those that win. ``again``: the incoming rows are winners of an earlier call.
        """
        is_stored = ages == 0
        if not is_stored.any():
            if not again:
                self._new(deleted[wins], 1)
            return
        # Of each key that rows came for, the place of the greatest of these, and of the greatest that is stored.
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
            late &= ~of_keys(wins, uses & ~is_stored)[keys[met]]
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


def of_keys(wins: Any, marked: Any) -> Any:
    """For each key whether one of its rows is marked; n rows sorted by key, ``wins`` marks the first of each (all numpy)."""
    return np.logical_or.reduceat(marked, np.flatnonzero(wins))


def same_content(rows: Any, spec: TableSpec) -> Callable[[Any, Any], Any] | None:
    """For `Tally.meet`, of rows (a table of what decides) in its order; None where arrival decides."""
    if spec.ties == "arrival":
        return None

    return partial(equal_rows, rows, (*spec.order_by, *spec.content))
