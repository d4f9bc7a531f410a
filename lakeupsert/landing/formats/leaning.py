"""What a text column would be but for a few of its values: one `oops` among 5,000 numbers makes all of them text, for good."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.landing.formats.inference import fitting, unify
from lakeupsert.rows.convert import convert, true

SAMPLED = 100
"""Values of a block that tell which type most of them have: free text is seen so at little cost."""

_CODE = r"^[+-]?(0\d|\d{19})\d*(\.\d*)?$"


@dataclass(frozen=True)
class Found:
    """A value as it came, and where: the place in its landing file (see `blocks`)."""

    value: str
    place: int
    path: str


@dataclass(frozen=True)
class Leaning:
    """The type of most values of a column.

    Attributes:
        type: ``pyarrow.DataType``; None where most values are plain text.
        values: how many there are, without nulls.
        unfit: how many of them would go to quarantine under that type.
        first: the first value; ``first_unfit``: the first that is not of the type.
        codes: whether one of them looks like a number and is a code, see `has_codes`.
    """

    type: Any
    values: int
    unfit: int
    first: Found
    first_unfit: Found | None
    codes: bool = False

    @property
    def is_clear(self) -> bool:
        """Whether so few values are unfit that they look like mistakes: at most a tenth of them, or a single one.

        A column with codes is text on purpose: as numbers they would lose digits, and no row would go to quarantine.
        """
        few = max(1, self.values // 10)
        if self.type is None or (self.codes and (pa.types.is_integer(self.type) or pa.types.is_floating(self.type))):
            return False
        return 0 < self.unfit <= few and self.values - self.unfit > 1


def has_codes(text: Any) -> bool:
    """Whether a text looks like a number, but is kept as text on purpose: it begins with a zero, or is too long for int64."""
    return bool(true(pc.match_substring_regex(text, _CODE)).any())


def of_block(valid: Any, bad: Any, type_: Any, found: Callable[[int], Found], *, codes: bool = False) -> Leaning | None:
    """Of values of which the ``bad`` are not of ``type_`` (masks of numpy); None where there is no value.

    ``found`` tells of a row what is in it."""
    there = np.flatnonzero(valid)
    if not len(there):
        return None
    unfit = there[bad[there]]
    first_unfit = found(int(unfit[0])) if len(unfit) else None
    return Leaning(type_, len(there), len(unfit), found(int(there[0])), first_unfit, codes)


def of_text(text: Any, type_: Any, candidates: list[Any], places: Any, path: str) -> Leaning | None:
    """Of the values of a text column, of which ``type_`` holds all; ``candidates`` as in `inference.inferred`."""
    valid = true(text.is_valid())

    def found(row: int) -> Found:
        return Found(text[row].as_py(), int(places[row]), path)

    if not pa.types.is_string(type_):
        return of_block(valid, ~valid, type_, found)
    there = np.flatnonzero(valid)
    some = there[np.linspace(0, len(there) - 1, min(len(there), SAMPLED), dtype=np.int64)]
    sample = text.take(pa.array(some))
    counts = [int(np.count_nonzero(fitting(sample, candidate))) for candidate in candidates]
    if 2 * max(counts) <= len(sample):
        return of_block(valid, valid, None, found, codes=has_codes(sample))
    type_ = candidates[counts.index(max(counts))]
    return of_block(valid, convert(text, type_)[1], type_, found, codes=has_codes(text))


def together(one: Leaning | None, other: Leaning | None) -> Leaning | None:
    """Of the values of both, ``one`` first."""
    if one is None or other is None:
        return one or other
    type_ = None
    if one.type is not None and other.type is not None:
        type_ = unify(one.type, other.type, typed=False)
    if type_ is None or pa.types.is_string(type_):
        one, other = _against(one, other)
        type_ = one.type if one.type is not None else other.type
    first_unfit = one.first_unfit or other.first_unfit
    codes = one.codes or other.codes
    return Leaning(type_, one.values + other.values, one.unfit + other.unfit, one.first, first_unfit, codes)


def _against(one: Leaning, other: Leaning) -> tuple[Leaning, Leaning]:
    """Both, as what they are to the type of that which has more values of its own."""

    def fit(leaning: Leaning) -> int:
        return 0 if leaning.type is None else leaning.values - leaning.unfit

    def none(leaning: Leaning) -> Leaning:
        return replace(leaning, type=None, unfit=leaning.values, first_unfit=leaning.first)

    return (one, none(other)) if fit(one) >= fit(other) else (none(one), other)
