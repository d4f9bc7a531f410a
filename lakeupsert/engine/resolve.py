"""What a table's rules make of ranked rows: here it is decided what a merge writes, the same for both strategies and engines.

    ranked rows -> versions -> full extracts -> mode columns -> floors -> history -> resolved rows

An engine ranks the rows of some keys and calls `Rules.resolve`; `merge_writer` writes the result. A rule is a class here, and
takes part only in a merge whose task needs it. `rows` does the arithmetic. Engine spark states in SQL what it is compared by:
which row wins, which rows full extracts delete, and which keys are known.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np
import pyarrow as pa

from lakeupsert.engine.merge import AGE, MergeTask
from lakeupsert.rows.arrays import Indices, Mask, Rows, with_column, with_value
from lakeupsert.rows.changes import any_per_key
from lakeupsert.rows.columns import combine_columns, put_counting_first
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.floor import (
    DELETED_AT,
    add_deletion_times,
    find_below,
    find_eras,
    find_forgotten,
    find_missing_keys,
    floor_values,
)
from lakeupsert.rows.rank import mark_versions, sort_by_rank
from lakeupsert.table.spec import BATCH, DELETE_FLAG, FILE, PLACE, TableSpec

KNOWN = "_lakeupsert_known"
"""Boolean column that rows may have: the table stores something under the key, even if no row at hand does. Null counts as no."""
TIES = (AGE, FILE, PLACE)
"""What decides between rows of a key with equal ordering values."""


@dataclass(frozen=True)
class Resolved:
    """What some keys come to. An engine starts it from ranked rows, and each rule returns it changed.

    Attributes:
        rows: the ranked rows, with `AGE`, `DELETE_FLAG`, `FILE` and `PLACE`; then rows that a rule made of them.
        order: places in ``rows`` of the rows that count, by key, greatest rank first.
        wins: for each row in ``order``, whether it is the first of its key.
        winners: for each key, the place of the row that it comes to; that may be a row that a rule made.
        kept_rows: this many of ``rows``, from the first on, are in files that stay (`MergeTask.kept`).
        payload: set if ``rows`` have only the columns that decide: the rows from place ``kept_rows`` on with all their columns.
        killed_by: for each ranked row, the age of the full extract that deletes it, or 0. None: the engine has not decided it.
        lacked: which ranked rows have a key that the full extract of a later batch lacks. None: as with ``killed_by``.
        uses: which ranked rows are part of what their key comes to; None: the winners.
        refused: for each key, whether its row is refused.
        past: rows for the history, with `BATCH`. Made when read, once, so that only a part is in memory.
    """

    rows: Rows
    order: Indices
    wins: Mask
    winners: Indices
    kept_rows: int = 0
    payload: Rows | None = None
    killed_by: Indices | None = None
    lacked: Mask | None = None
    uses: Mask | None = None
    refused: Mask | None = None
    past: Iterable[Rows] = ()

    @cached_property
    def keys(self) -> Indices:
        """For each row in ``order``, the number of its key."""
        return np.cumsum(self.wins) - 1

    @cached_property
    def dead(self) -> Indices:
        """Places of the rows that full extracts delete."""
        return np.flatnonzero(self.killed_by) if self.killed_by is not None else np.empty(0, np.int64)

    @cached_property
    def _changed(self) -> Mask:
        """For each key, whether it comes to something that the files that stay do not have."""
        if self.uses is None:
            return self.winners >= self.kept_rows
        return any_per_key(self.wins, self.uses[self.order] & (self.order >= self.kept_rows))

    @cached_property
    def goes(self) -> Mask:
        """For each key, whether its row is to be written."""
        return self._changed if self.refused is None else self._changed & ~self.refused

    @property
    def turned_away(self) -> Indices:
        """Places of the refused rows."""
        return self.winners[self.refused] if self.refused is not None else np.empty(0, np.int64)

    @property
    def losers(self) -> Indices:
        """Places of the rows that do not win their key."""
        return np.append(self.dead, self.order[~self.wins])

    @property
    def superseded(self) -> Mask:
        """Which rows in ``order`` are in files that stay, and no longer count there."""
        goes = ~self.wins if self.uses is None else self._changed[self.keys]
        return goes & (self.order < self.kept_rows)

    def take(self, places: Indices, columns: list[str], *, shared: bool = False) -> Rows:
        """The rows at these places, with these columns. ``shared``: not copied, if they follow one another."""
        rows = self.rows
        if self.payload is not None:
            rows, places = self.payload, places - self.kept_rows
        rows = rows.select(columns)
        return take_rows(rows, places) if shared else rows.take(pa.array(places))


def take_rows(rows: Rows, places: Indices) -> Rows:
    """The rows at these places; not copied, if they follow one another."""
    if len(places) and (places == np.arange(places[0], places[0] + len(places))).all():
        return rows.slice(places[0], len(places))
    return rows.take(pa.array(places))


def rank(rows: Rows, spec: TableSpec, kept_rows: int = 0, payload: Rows | None = None) -> Resolved:
    """Rank rows in this process. They are all rows of their keys; see `Resolved` for ``kept_rows`` and ``payload``."""
    order, wins = sort_by_rank(rows, spec, TIES)
    places, first = order.to_numpy().view(np.int64), as_mask(wins)
    return Resolved(rows, places, first, places[first], kept_rows, payload)


def one_per_key(rows: Rows) -> Resolved:
    """Rows that are in key order, one for each key."""
    every = np.arange(rows.num_rows)
    return Resolved(rows, every, np.ones(rows.num_rows, bool), every)


class Rule:
    """One rule of one task.

    Attributes:
        needs_losers: `Rules.resolve` must get every row of a key. Else the winners are enough, from an engine that has decided
            `Resolved.killed_by`.
        needs_versions: incoming rows must meet the stored rows with every version of their keys.
        judges_all: keys without incoming rows must be resolved, too.
    """

    needs_losers = needs_versions = judges_all = False

    def __init__(self, spec: TableSpec, task: MergeTask) -> None:
        self._spec, self._task = spec, task

    @staticmethod
    def takes_part(spec: TableSpec, task: MergeTask) -> bool:
        raise NotImplementedError

    def settle(self, found: Resolved) -> Resolved:
        """For incoming rows alone, before they meet the stored rows of their keys."""
        return found

    def apply(self, found: Resolved) -> Resolved:
        """For all rows of some keys."""
        return found


class Versions(Rule):
    """Rows that arrive get their batch's number. Stored rows keep theirs, and so do rows that followed their key. A stored delete
    has none, and gets the last merged number, so that the history ranks it above what it had superseded."""

    @staticmethod
    def takes_part(spec: TableSpec, task: MergeTask) -> bool:
        return spec.versions

    def apply(self, found: Resolved) -> Resolved:
        payload = None if found.payload is None else self._numbered(found.payload)
        return replace(found, rows=self._numbered(found.rows), payload=payload)

    settle = apply

    def _numbered(self, rows: Rows) -> Rows:
        if BATCH not in rows.schema.names:  # only the columns that decide
            return rows
        ages, stored = rows[AGE].to_numpy(), rows[BATCH].to_numpy()
        keeps = ((ages == 0) | (stored > 0)) & ~as_mask(rows[DELETE_FLAG])
        numbers = np.where(keeps, stored, np.array(self._task.numbers)[ages])
        return with_column(rows, BATCH, pa.array(numbers))


class FullExtracts(Rule):
    """A key that a full extract lacks loses its rows up to the extract's greatest order, or all of them if the extract replaces
    what was before it. The rows of such an extract win against older ones."""

    needs_versions = judges_all = True

    @staticmethod
    def takes_part(spec: TableSpec, task: MergeTask) -> bool:
        return bool(task.full)

    def apply(self, found: Resolved) -> Resolved:
        if found.killed_by is not None:
            return found
        spec, task = self._spec, self._task
        ages = found.rows[AGE].to_numpy()
        order = found.order
        if (eras := find_eras(ages, task.full)).any():
            order = order[np.lexsort((np.arange(len(order)), -eras[order], found.keys))]
        missing = find_missing_keys(found.rows, order, found.wins, ages, task.full, spec, task.forgets)
        lives = missing.killed_by[order] == 0
        order, keys = order[lives], found.keys[lives]
        wins = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
        return replace(
            found, order=order, wins=wins, winners=order[wins], killed_by=missing.killed_by, lacked=missing.lacked
        )


class Columns(Rule):
    """Mode columns: each column of a row comes from the record of greatest rank that brings it."""

    needs_losers = True

    @staticmethod
    def takes_part(spec: TableSpec, task: MergeTask) -> bool:
        return spec.mode == "columns"

    def apply(self, found: Resolved) -> Resolved:
        order = put_counting_first(found.rows, self._spec, found.order, found.wins, AGE)
        rows, winners, uses = combine_columns(found.rows, self._spec, order, found.wins, TIES)
        return replace(found, rows=rows, order=order, winners=winners, uses=uses, payload=None)

    settle = apply


class Floors(Rule):
    """A row below what its bucket has forgotten is refused if the table stores nothing under its key.

    A delete is refused too: its tombstone would make a key known again below the floor.
    """

    @staticmethod
    def takes_part(spec: TableSpec, task: MergeTask) -> bool:
        return task.refuses

    def settle(self, found: Resolved) -> Resolved:
        known = np.zeros(found.rows.num_rows, bool)
        known[found.order] = self._known(found)[found.keys]
        return replace(found, rows=found.rows.append_column(KNOWN, pa.array(known)))

    def apply(self, found: Resolved) -> Resolved:
        # A full extract's own rows are never refused: they exist at the source, however old they are.
        extracts = [extract.age for extract in self._task.full]
        late = ~self._known(found) & ~np.isin(found.rows[AGE].to_numpy()[found.winners], extracts)
        if not late.any():
            return found
        rows = found.rows.select(self._spec.order_by).take(pa.array(found.winners[late]))
        late[late] = find_below(rows, self._task.floors, self._spec)
        return replace(found, refused=late)

    def _known(self, found: Resolved) -> Mask:
        """For each key, whether the table stores something under it."""
        stored = found.rows[AGE].to_numpy() == 0
        if KNOWN in found.rows.schema.names:
            stored |= as_mask(found.rows[KNOWN])
        return any_per_key(found.wins, stored[found.order])


class History(Rule):
    """Superseded versions are kept. Among rows with one ordering value only the greatest was ever a version."""

    needs_losers = needs_versions = True

    @staticmethod
    def takes_part(spec: TableSpec, task: MergeTask) -> bool:
        return spec.history

    def apply(self, found: Resolved) -> Resolved:
        return replace(found, past=self._past(found))

    def _past(self, found: Resolved) -> Iterator[Rows]:
        numbers = pa.array(self._task.numbers, pa.int64())
        for rows in chain(self._deleted(found), self._versions(found)):
            yield rows if self._spec.versions else rows.append_column(BATCH, numbers.take(rows[AGE].combine_chunks()))

    def _versions(self, found: Resolved) -> Iterator[Rows]:
        """Versions that another one replaced.

        A winning delete that ends a version is among them, so that readers of the history need no tombstones. A refused key
        has no history.
        """
        rows, order, wins = found.rows, found.order, found.wins
        deleted = as_mask(rows[DELETE_FLAG])[order]
        ends = any_per_key(wins, ~wins & ~deleted)[found.keys]
        if self._task.floors or self._task.forgets:  # a forgotten key may have versions
            ends |= rows[AGE].to_numpy()[order] > 0
        goes = mark_versions(rows, self._spec, order, wins) & (~wins | (deleted & ends))
        if found.refused is not None:
            goes &= ~found.refused[found.keys]
        yield rows.take(pa.array(order[goes]))

    def _deleted(self, found: Resolved) -> Iterator[Rows]:
        """What full extracts delete. The live version, or the known delete, ends at the extract's greatest order; other rows had
        been superseded before."""
        if found.killed_by is None or not len(found.dead):
            return
        ages = found.rows[AGE].to_numpy()
        for extract in self._task.full:
            age, floor = extract.age, extract.order
            present = (ages < age) & ((found.killed_by == 0) | (found.killed_by >= age))
            earlier = rank(found.rows.filter(pa.array(present)), self._spec)
            rows, order = earlier.rows, earlier.order
            dead = found.killed_by[present][order] == age
            yield rows.take(pa.array(order[dead & mark_versions(rows, self._spec, order, earlier.wins)]))
            ends = dead & earlier.wins
            if self._task.forgets:
                ends &= ~find_forgotten(rows, self._task.forgets, age)[order]
            deletes = rows.take(pa.array(order[ends]))
            made: dict[str, object] = {AGE: age, DELETE_FLAG: True, **floor_values(floor, self._spec)}
            if self._spec.versions:
                made[BATCH] = self._task.numbers[age]
            for name, value in made.items():
                deletes = with_value(deletes, name, value)
            yield deletes


_RULES: tuple[type[Rule], ...] = (Versions, FullExtracts, Columns, Floors, History)
"""In the order in which they apply. `Columns` meets only `Versions` of the others: the configuration refuses the rest."""


class Rules:
    """The rules that take part in one task. For ``needs_losers``, ``needs_versions`` and ``judges_all`` see `Rule`."""

    def __init__(self, spec: TableSpec, task: MergeTask) -> None:
        self._rules = [rule(spec, task) for rule in _RULES if rule.takes_part(spec, task)]
        self._forgets = task.forgets
        self.needs_losers = any(rule.needs_losers for rule in self._rules)
        self.needs_versions = any(rule.needs_versions for rule in self._rules)
        self.judges_all = any(rule.judges_all for rule in self._rules)

    def with_times(self, schema: pa.Schema) -> pa.Schema:
        """``schema`` of stored rows, with the column that the rules need of them beside their own."""
        return schema.append(DELETED_AT) if self._forgets else schema

    def add_times(self, rows: Rows) -> Rows:
        """``rows`` of a schema of `with_times`, with the time of each delete in it."""
        return add_deletion_times(rows, rows[AGE], self._forgets) if self._forgets else rows

    def settle(self, found: Resolved) -> Resolved:
        """What incoming rows come to among themselves. Only if no rule needs their versions."""
        assert not self.needs_versions
        for rule in self._rules:
            found = rule.settle(found)
        return found

    def resolve(self, found: Resolved, some: slice = slice(None)) -> Resolved:
        """What all rows of some keys come to, by all rules or by ``some``."""
        for rule in self._rules[some] if found.rows.num_rows else ():
            found = rule.apply(found)
        return found


def resolve_together(spec: TableSpec, given: Sequence[tuple[Rules, Resolved]]) -> list[Resolved]:
    """`Rules.resolve` for several tasks. In mode columns one call combines all their rows: it costs more than a few rows."""
    if spec.mode == "rows" or len(given) < 2:
        return [rules.resolve(found) for rules, found in given]
    ranked = [rules.resolve(found, slice(int(spec.versions))) for rules, found in given]  # the rules before `Columns`
    begins = np.cumsum([0, *(one.rows.num_rows for one in ranked)]).tolist()
    rows, wins = pa.concat_tables([one.rows for one in ranked]), np.concatenate([one.wins for one in ranked])
    order = np.concatenate([one.order + begin for one, begin in zip(ranked, begins, strict=False)])
    order = put_counting_first(rows, spec, order, wins, AGE)
    combined = combine_columns(rows, spec, order, wins, TIES)
    results, key = [], 0
    for one, begin in zip(ranked, begins, strict=False):
        n, keys = one.rows.num_rows, len(one.winners)
        chosen = take_rows(combined.rows, combined.chosen[key : key + keys])
        own, winners = slice(begin, begin + n), n + np.arange(keys)
        rows, uses = pa.concat_tables([one.rows, chosen]), combined.uses[own]
        results.append(replace(one, rows=rows, order=order[own] - begin, winners=winners, uses=uses, payload=None))
        key += keys
    return results
