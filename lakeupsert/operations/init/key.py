"""Find the key: how likely columns are one, by their names, types and values, and which combinations are unique.

Reads     nothing: the sample is in memory
Writes    nothing
Repeat    safe
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.types import is_date, is_decimal, is_floating, is_integer, is_string, is_temporal

from lakeupsert.operations.init.sample import Sample
from lakeupsert.operations.init.words import WORDS, Choice, is_named, key_rank, left_open, name_list, percent, words_of
from lakeupsert.phrases import count
from lakeupsert.rows.arrays import Indices, Mask
from lakeupsert.rows.convert import convert

SERIES = 20
"""Rows from which it is a series if each has a date of its own. More: short histories get no key. Fewer: of three rows, each of
another day, nobody knows."""
REGULAR = 0.8
"""The share of steps between times that are equal, if somebody measures at fixed times."""
DENSE, ALIKE = 50, 0.85
"""Numbers of things are given one after the other, so that at least one of so many is taken, or most have as many digits."""

THIN = 100
"""With fewer rows that can be compared with others of their partition, a unique key gets a warning."""
CANDIDATES = 10
"""How many columns are tried in pairs as a key."""
ENOUGH = 50_000
"""Rows that show that columns are not a key. Only what is a key among these is tried on all rows."""
TRIPLE_ROWS, ANCHORS, MOST_COLUMNS = 1000, 2, 20
"""If no pair is a key, and so many rows can be compared (fewer are soon unique by chance), columns are tried by threes: one of
them is among the `ANCHORS` with the most distinct values."""

_UNNAMED = re.compile(r"_c\d+")


class KeySigns:
    """Signs that columns of the sample are a key, or are none."""

    def __init__(self, rows: Sample) -> None:
        self.rows = rows
        self.is_measure = cache(self._is_measure)
        self.ascends = cache(self._ascends)

    def doubt(self, names: Sequence[str], candidates: Sequence[str]) -> tuple[int, ...]:
        """The less, the likelier a key: a measure is unique by accident; then by names, length, types and place, since keys are
        mostly first."""
        moments = sum(is_temporal(self.rows.values[n].type) for n in names)
        places = sum(candidates.index(n) for n in names)
        return self.measures(names), self.unlike(names), len(names), moments, sum(map(key_rank, names)), places

    def measures(self, names: Sequence[str]) -> int:
        return sum(map(self.is_measure, names))

    def unlike(self, names: Sequence[str]) -> int:
        """How many of them are not named like a key."""
        return sum(not is_named(n, "key") for n in names)

    def _is_measure(self, name: str) -> bool:
        """Whether two rows may well have the same value although they are different things: amounts, and times of events."""
        values = self.rows.values[name]
        if _UNNAMED.fullmatch(name) and not all(map(_UNNAMED.fullmatch, self.rows.values)):
            return True  # R and pandas number the rows of each file in a column without a name
        if is_named(name, "key") or is_date(values.type) or is_string(values.type):
            return False
        if is_temporal(values.type):
            return not self.is_regular(name)
        if is_floating(values.type) or (is_decimal(values.type) and values.type.scale):
            return True
        return is_named(name, "measure") or (is_integer(values.type) and not self._is_numbered(name))

    def _is_numbered(self, name: str) -> bool:
        values = self.rows.values[name].drop_null().unique()
        if not len(values):
            return True
        ends = pc.min_max(values)
        digits = pc.value_counts(pc.utf8_length(convert(values, pa.string())[0])).field("counts")
        dense = ends["max"].as_py() - ends["min"].as_py() < DENSE * len(values)
        return bool(dense or pc.max(digits).as_py() >= ALIKE * len(values))

    def _ascends(self, name: str) -> bool:
        """Whether numbers grow from row to row, as those of new orders do and those of their customers do not."""
        values = self.rows.values[name]
        if not is_integer(values.type) or values.null_count:
            return False
        same_file = np.diff(self.rows.file) == 0
        return bool((np.diff(values.to_numpy())[same_file] >= 0).mean() >= ALIKE) if same_file.any() else False

    def is_clock(self, name: str) -> bool:
        """Whether it says when something was measured, although its name may also be that of a time of change."""
        return words_of(name) <= WORDS["clock"] and self.is_regular(name)

    def is_regular(self, name: str) -> bool:
        """Whether the times of a column are those of a clock, not of events."""
        times, bad = convert(self.rows.values[name], pa.timestamp("us"))
        steps = np.diff(np.sort(times.drop_null().unique().cast(pa.int64()).to_numpy()))
        return (
            not bad.any() and len(steps) > 1 and np.unique(steps, return_counts=True)[1].max() >= REGULAR * len(steps)
        )

    def series(self, name: str, use: Mask, *, is_day: bool) -> list[str] | None:
        """The key if the rows of ``use`` are a series: a file has one row for each day (``is_day``) or regular time ``name``, and
        no other column tells rows apart. With it, columns that may name the series: of text, with one value here."""
        rows, values = self.rows, self.rows.values
        count, others = int(use.sum()), [n for n in values if n != name]
        if count < SERIES or self._of_file([name], use) < count:
            return None
        if not is_day and not self.is_regular(name):
            return None
        texts = [n for n in others if is_string(values[n].type)]
        if any(is_named(n, "key") for n in others) or any(self._of_file([n], use) == count for n in texts):
            return None
        return [*(n for n in texts if rows.distinct(n) == 1 and not values[n].null_count), name]

    def _of_file(self, names: Sequence[str], use: Mask) -> int:
        """How many combinations of a file and a value there are."""
        return len(np.unique(self.rows.group(names, self.rows.file)[use]))


@dataclass(frozen=True)
class Compared:
    """The rows that show which columns are a key.

    Attributes:
        use: which rows: not exact copies, updates and rows with nothing to compare with.
        scope: a number for each row; rows with the same number can't have the same key.
        where: that in words.
    """

    use: Mask
    scope: Indices
    where: str

    @classmethod
    def of(cls, rows: Sample, inserts: Mask, partition: Sequence[str], *, is_table: bool) -> "Compared":
        """``inserts``: the rows of which each key can have only one; ``is_table``: in all files together, not only in each."""
        files = None if is_table else rows.file
        every, scope = rows.fresh & inserts & rows.present(partition), rows.group(partition, files)
        alone = np.bincount(scope[every], minlength=scope.max(initial=0) + 1)[scope] <= 1  # a lone row is always unique
        use = every & ~alone
        if not use.any() and every.sum() >= SERIES:  # what tells all rows of a file apart does so in each partition
            return cls(every, rows.group([], files), "within one file")
        return cls(
            use, scope, "within " + " and ".join(f"one {x}" for x in ([] if is_table else ["file"]) + [*partition])
        )


@dataclass(frozen=True)
class KeySearch:
    """Finds the key among ``candidates``.

    Attributes:
        orders: the columns that may say which row is newer, the likeliest first.
        is_whole: the sample has all rows of all files.
    """

    signs: KeySigns
    candidates: Sequence[str]
    compared: Compared
    partition: Sequence[str]
    orders: Sequence[str]
    is_whole: bool

    def choose(self) -> Choice:
        signs, where = self.signs, self.compared.where
        compared = int(self.compared.use.sum())
        if not compared or not self.candidates:
            named = [n for n in self.candidates if is_named(n, "key")]
            why = f"no two rows can be compared {where}" if self.candidates else "no column can be a key"
            return _open(why + (f"; by their names, {name_list(named)} may be in it" if named else ""))
        shares = self._shares_of_distinct()
        unique = sorted((c for c, s in shares.items() if s == 1), key=self._likeliest)
        closest = sorted((c for c, s in shares.items() if s < 1), key=lambda c: (-shares[c], self._doubt(c)))
        others = ", ".join(f"{' + '.join(c)} {percent(shares[c])}" for c in closest[:3])
        rows = count(compared, "row")
        if not unique or signs.unlike(unique[0]):  # pairs of others may be unique because each update changes them
            updated = self._updated_key([c for c in shares if not signs.unlike(c)])
            if updated is not None:
                return updated
        if not unique:
            return _open(f"no combination of columns is unique {where} ({rows} compared); closest: {others}")
        key = unique[0]
        if signs.measures(key) == len(key):
            why = (
                f"only {' + '.join(key)} is unique {where} ({rows} compared): a measure or a time, which may come twice"
            )
            return _open(f"{why}; not unique: {others}" if others else why)
        if signs.unlike(key) and not self.is_whole:
            found = ", ".join(" + ".join(c) for c in unique[:4])
            return _open(
                f"{found}: unique {where} in the sample ({rows} compared), but not all rows were read, and no name says key"
            )
        evidence = [
            f"{' + '.join(key)}: unique {where}, {rows} compared",
            *repeats(signs.rows, key, self.partition),
            *([f"not unique, with the share of distinct values: {others}"] if others else []),
            *([f"unique too: {', '.join(' + '.join(c) for c in unique[1:4])}"] if unique[1:] else []),
        ]
        thin = f"key {name_list(key)} has thin evidence: only {rows} could be compared"
        unlike = (
            f"key {name_list(key)} is unique in the sample, but is not named like a key: check it. `run` counts rows that "
            "repeat a key as superseded"
        )
        warnings = (*([thin] if compared < THIN else []), *([unlike] if signs.unlike(key) else []))
        return Choice(list(key), tuple(evidence), warnings)

    def _doubt(self, names: Sequence[str]) -> tuple[int, ...]:
        return self.signs.doubt(names, self.candidates)

    def _likeliest(self, names: Sequence[str]) -> tuple[int, ...]:
        *before, places = self._doubt(names)
        return *before, len(names) == 1 and not self.signs.ascends(*names), places

    def _shares_of_distinct(self) -> dict[tuple[str, ...], float]:
        """The share of distinct values within each scope, of columns, and if none is a key also of pairs of columns."""
        rows, use = self.signs.rows, np.flatnonzero(self.compared.use)
        some = use[:ENOUGH]

        def share_of(names: Sequence[str], of: Indices) -> float:
            of = of[rows.present(names)[of]]
            ids = rows.group(names, self.compared.scope, of)  # counted from 0
            return int(ids.max(initial=-1) + 1) / max(1, len(of))

        def share(names: Sequence[str]) -> float:
            """Of all rows, unless some of them show already that it is not a key."""
            found = share_of(names, some)
            return found if found < 1 or len(some) == len(use) else share_of(names, use)

        shares: dict[tuple[str, ...], float] = {(n,): share([n]) for n in self.candidates}
        if any(s == 1 and is_named(n, "key") for (n,), s in shares.items()):
            return shares
        parts = sorted((c for c, s in shares.items() if s < 1), key=lambda c: (*self._doubt(c)[:2], -shares[c]))
        likeliest = sorted(parts[:CANDIDATES], key=self._doubt)
        shares |= {(a, b): share([a, b]) for (a,), (b,) in combinations(likeliest, 2)}
        found = any(s == 1 and self.signs.measures(c) < len(c) for c, s in shares.items())
        if not found and len(use) >= TRIPLE_ROWS:
            anchors = set(sorted(self.candidates, key=lambda n: (self.signs.is_measure(n), -shares[n,]))[:ANCHORS])
            wide = sorted(self.candidates, key=lambda n: self._doubt([n]))[:MOST_COLUMNS]
            shares |= {names: share(names) for names in combinations(wide, 3) if anchors & set(names)}
        return shares

    def _updated_key(self, named: Sequence[tuple[str, ...]]) -> Choice | None:
        """A key of a feed that has updates of one row in one file: rows that repeat it there differ in an ordering column.

        ``named``: combinations of columns that are named like keys. None if no such combination is a key, or if most rows would
        be gone, as with the name of a sensor in its readings.
        """
        sample = self.signs.rows
        for names in sorted(named, key=lambda names: self.signs.doubt(names, list(sample.values))):
            rows = self.compared.use & sample.present(names)
            ids = sample.group(names, self.compared.scope)
            left = len(np.unique(ids[rows]))
            again = int(rows.sum()) - left
            order = next((o for o in self.orders if len(np.unique(sample.group([o], ids)[rows])) == left + again), None)
            if order is None or not again or left < again:
                continue
            updates = f"{count(again, 'row')} of {rows.sum():,} repeat {' + '.join(names)} within one file"
            why = f"{updates}, each with another {order}: updates of a row, of which the newest stays"
            warning = (
                f"key {name_list(names)}: {updates}, and a table keeps only the newest of them. If they are different things, "
                "add a column in which they differ"
            )
            return Choice(list(names), (why, *repeats(sample, names, self.partition)), (warning,))
        return None


def repeats(rows: Sample, key: Sequence[str], partition: Sequence[str]) -> Iterator[str]:
    """Keys that are there again in other files are updates; in another partition, they are other rows."""
    use = rows.fresh & rows.present([*key, *partition])
    alone, parted = rows.group(key)[use], rows.group([*key, *partition])[use]
    pairs, firsts = np.unique(parted, return_index=True)
    if repeated := len(parted) - len(pairs):
        yield f"{count(repeated, 'row')} {'repeats' if repeated == 1 else 'repeat'} a key: the newest row stays"
    if moved := int((np.unique(alone[firsts], return_counts=True)[1] > 1).sum()):
        yield f"{count(moved, 'key')} {'is' if moved == 1 else 'are'} in more than one partition, with a row in each"


def _open(why: str) -> Choice:
    return left_open("key is left open", why)
