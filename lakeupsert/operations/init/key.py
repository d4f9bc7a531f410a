"""How likely columns are a key, by their names, types and values; and whether the rows are a series, one of each date or time.

Reads     nothing: the sample is in memory
Writes    nothing
Repeat    safe
"""

import re
from collections.abc import Sequence
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.types import is_date, is_decimal, is_floating, is_integer, is_string, is_temporal

from lakeupsert.operations.init.sample import Sample
from lakeupsert.operations.init.words import WORDS, is_named, key_rank, words_of
from lakeupsert.rows.arrays import Mask
from lakeupsert.rows.convert import convert

SERIES = 20
"""Rows from which it is a series if each has a date of its own. More: short histories get no key. Fewer: of three rows, each of
another day, nobody knows."""
REGULAR = 0.8
"""The share of steps between times that are equal, if somebody measures at fixed times."""
DENSE, ALIKE = 50, 0.85
"""Numbers of things are given one after the other, so that at least one of so many is taken, or most have as many digits."""

_UNNAMED = re.compile(r"_c\d+")


class KeySigns:
    """Signs that columns of the sample are a key, or are none."""

    def __init__(self, rows: Sample) -> None:
        self.rows = rows
        self.is_measure = cache(self._is_measure)
        self.ascends = cache(self._ascends)

    def doubt(self, names: tuple[str, ...], candidates: Sequence[str]) -> tuple[int, ...]:
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
