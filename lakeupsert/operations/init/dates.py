"""Choose the formats of a column of dates from its different values. What the values do not settle is left to a person."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import combinations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.landing.formats.dates import DateFormat
from lakeupsert.operations.init.words import Choice
from lakeupsert.phrases import count
from lakeupsert.rows.arrays import Column, Indices, Mask
from lakeupsert.rows.convert import as_mask, convert

MOST = 0.9
"""The share of values that are of one kind, if the others are mistakes."""
_TRIED = 500
"""Different values of a column that decide which formats are tried on all of them."""
_FEW = 0.01
"""The share of rows from which values of a second format are evidence for it; at least two. Fewer are slips: the default
`quarantine_limit` lets them pass to quarantine."""
_NEAR = timedelta(days=31)
"""So near to the other dates of a column a date is likely."""
_LIKE_DATE = r"^(?:[A-Za-z]{3,9} )?\d{1,4}[-/. ]?[A-Za-z0-9].{2,30}$"
_DAYS = (
    "%Y-%m-%d", "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y.%m.%d", "%Y%m%d", "%d/%m/%y",
    "%m/%d/%y", "%d.%m.%y", "%d-%m-%y", "%d %b %Y", "%d-%b-%Y", "%d-%b-%y", "%b %d %Y", "%b %d, %Y", "%d %B %Y",
    "%B %d, %Y",
)  # fmt: skip
_TIMES = (
    "", " %H:%M", " %H:%M:%S", "T%H:%M:%S", " %H:%M:%S.%f", "T%H:%M:%S.%f", "T%H:%M:%S%z", " %I:%M %p", " %I:%M:%S %p",
)  # fmt: skip
_FORMATS = tuple(DateFormat(day + time) for time in _TIMES for day in _DAYS)
_ISO = frozenset("%Y-%m-%d" + time for time in _TIMES if "%p" not in time)
"""What is read without `dates`."""


@dataclass(frozen=True, eq=False)
class _Fit:
    """What a format reads of the different values of a column: timestamps, null for a value that is not written so."""

    format: DateFormat
    moments: pa.Array

    @cached_property
    def mask(self) -> Mask:
        return as_mask(self.moments.is_valid())


def formats_that_fit(words: Column) -> list[_Fit]:
    """The formats in which some of a column's different values are written; none if most are no dates."""
    tried = words.take(pa.array(np.linspace(0, len(words) - 1, min(len(words), _TRIED), dtype=np.int64)))
    if not len(words) or as_mask(pc.match_substring_regex(tried, _LIKE_DATE)).mean() < MOST:
        return []
    formats = [one for one in _FORMATS if _read(one, tried).mask.any()]
    fit = [_read(one, words) for one in formats]
    covered = _read_by(fit) if fit else np.zeros(1, bool)
    return fit if covered.mean() >= MOST else []


def _read(format_: DateFormat, words: Column) -> _Fit:
    return _Fit(format_, convert(format_.to_iso(words), pa.timestamp("us"))[0])


def choose_formats(name: str, values: Column) -> Choice | None:
    """The formats of a column of text; None if it has no dates, or only such as need no format.

    Of two formats that read a value differently, one is chosen if a value decides (25/03/2024 has one meaning), or with a warning
    if only by that one the dates are near the others of the column. Otherwise both stay, so that no value is read wrongly: those
    with two meanings are refused until a person decides.
    """
    counted = pc.value_counts(values)
    words, rows = counted.field("values"), counted.field("counts").to_numpy()
    words, fit = _without_slips(words, rows)
    evidence: list[str] = []
    warnings: list[str] = []
    unclear: list[_Fit] = []
    for one, other in combinations(fit, 2):
        both = one.mask & other.mask & as_mask(pc.not_equal(one.moments, other.moments))
        if both.any() and one in fit and other in fit:
            found = _decide(name, one, other, words, [f for f in fit if f not in (one, other)])
            evidence += found.evidence
            warnings += found.warnings
            if found.value is None:
                unclear += [one, other]
            else:
                fit.remove(other if found.value is one else one)
    kept = _fewest(fit, unclear)
    formats = [one.format.text for one in kept]
    if _ISO.issuperset(formats):
        return None
    shares = ", ".join(f"{one.format.text} {int(one.mask.sum()):,}" for one in kept)
    slips = np.logical_not(as_mask(pc.is_in(counted.field("values"), words.filter(pa.array(_read_by(kept))))))
    if slips.any():
        example = counted.field("values")[int(np.flatnonzero(slips)[0])].as_py()
        warnings.append(
            f"{name}: {rows[slips].sum():,} of {rows.sum():,} values are not written as {' or '.join(formats)}, for example "
            f"{example!r}: such rows go to quarantine. If it is a date, add its format to `dates`"
        )
    by_values = f"{name}, by its {count(len(words), 'different value')}: {shares}"
    return Choice(formats, (by_values, *evidence), tuple(warnings))


def _without_slips(words: Column, rows: Indices) -> tuple[Column, list[_Fit]]:
    """The values, less the few of other formats than the commonest; and the formats that fit."""
    fit = formats_that_fit(words)
    if not fit:
        return words, fit
    usual = max(fit, key=lambda one: int(rows[one.mask].sum()))
    others = _read_by(fit) & ~usual.mask
    if not others.any() or rows[others].sum() >= max(2, _FEW * rows.sum()):
        return words, fit
    words = words.filter(pa.array(~others))
    return words, formats_that_fit(words)


def _read_by(fit: Sequence[_Fit]) -> Mask:
    mask: Mask = np.logical_or.reduce([one.mask for one in fit])
    return mask


def _decide(name: str, one: _Fit, other: _Fit, words: Column, others: Sequence[_Fit]) -> Choice:
    """Which of two formats that read values differently holds, if that is known."""
    both = one.mask & other.mask & as_mask(pc.not_equal(one.moments, other.moments))
    example = words[int(np.flatnonzero(both)[0])].as_py()
    for right, wrong in ((one, other), (other, one)):
        alone = np.flatnonzero(right.mask & ~wrong.mask)
        if len(alone) and not (wrong.mask & ~right.mask).any():
            decisive = words[int(alone[0])].as_py()
            return Choice(right, (f"{decisive!r} is a date by {right.format.text}, not by {wrong.format.text}",))
    meant = f"{name}: {example!r} may be {one.format.text} or {other.format.text}"
    if not (one.mask & ~other.mask).any():
        near = [fit for fit in (one, other) if _is_near(fit.moments.filter(pa.array(both)), others)]
        if len(near) == 1:
            why = f"{meant}; by {near[0].format.text} it is near the other dates of the column"
            return Choice(near[0], (why,), (f"{why}: check it",))
    warning = (
        f"{meant}, and the sample does not show which: such values are refused (ambiguous_date). Leave only the correct format "
        "in `dates`"
    )
    return Choice(None, (), (warning,))


def _is_near(moments: pa.Array, others: Sequence[_Fit]) -> bool:
    known = (
        pa.chunked_array([one.moments for one in others], pa.timestamp("us"))
        if others
        else pa.nulls(0, pa.timestamp("us"))
    )
    ends, own = pc.min_max(known), pc.min_max(moments)
    if not ends["min"].is_valid:
        return False
    return bool(own["min"].as_py() >= ends["min"].as_py() - _NEAR and own["max"].as_py() <= ends["max"].as_py() + _NEAR)


def _fewest(fit: Sequence[_Fit], unclear: Sequence[_Fit]) -> list[_Fit]:
    """The unclear formats, and the fewest others that read all values that any format reads."""
    kept = [one for one in fit if one in unclear]
    open_ = _read_by(fit) if fit else np.zeros(0, bool)
    for one in kept:
        open_ = open_ & ~one.mask
    while open_.any():
        best = max(fit, key=lambda one: int((one.mask & open_).sum()))
        kept.append(best)
        open_ = open_ & ~best.mask
    return sorted(kept, key=lambda one: -int(one.mask.sum()))
