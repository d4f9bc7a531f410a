"""The type that most values of a text column have: one `oops` among 5,000 numbers makes all of them text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.landing.formats.inference import convert_text, fits, unify
from lakeupsert.rows.arrays import Column, Indices, Mask
from lakeupsert.rows.convert import as_mask

SAMPLED = 100
"""Values of a block that are tried against each type. So few, because free text should cost little."""

_CODE = r"^[+-]?(0\d|\d{19})\d*(\.\d*)?$"


@dataclass(frozen=True)
class Example:
    """One value as it was written, and its place in its landing file (see `blocks`)."""

    value: str
    place: int
    path: str


@dataclass(frozen=True)
class DominantType:
    """The type of most values of a column.

    Attributes:
        type: None if most values are plain text.
        values: number of values, without nulls.
        unfit: how many of them would go to quarantine under that type.
        first: the first value.
        first_unfit: the first value that does not fit the type.
        codes: whether a value looks like a number but is a code, see `has_codes`.
    """

    type: pa.DataType | None
    values: int
    unfit: int
    first: Example
    first_unfit: Example | None
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


def has_codes(text: Column) -> bool:
    """Whether a value looks like a number but must stay text: it begins with a zero, or is too long for int64."""
    return bool(as_mask(pc.match_substring_regex(text, _CODE)).any())


def from_masks(
    valid: Mask, bad: Mask, type_: pa.DataType | None, example: Callable[[int], Example], *, codes: bool = False
) -> DominantType | None:
    """Count the ``valid`` values, and those of them that are ``bad``: not of ``type_``. None if there is no value.

    ``example`` returns the value of a row.
    """
    rows = np.flatnonzero(valid)
    if not len(rows):
        return None
    unfit = rows[bad[rows]]
    first_unfit = example(int(unfit[0])) if len(unfit) else None
    return DominantType(type_, len(rows), len(unfit), example(int(rows[0])), first_unfit, codes)


def from_text(
    text: pa.Array,
    type_: pa.DataType,
    candidates: Sequence[pa.DataType],
    places: Indices,
    path: str,
    written: pa.Array | None = None,
) -> DominantType | None:
    """The same for a text column whose values all fit ``type_``; ``candidates`` as in `inference.infer_type`.

    ``written``: the values as they are in the file, if ``text`` has others.
    """
    valid = as_mask(text.is_valid())

    def example(row: int) -> Example:
        return Example((text if written is None else written)[row].as_py(), int(places[row]), path)

    if not pa.types.is_string(type_):
        return from_masks(valid, ~valid, type_, example)
    rows = np.flatnonzero(valid)
    some = rows[np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED), dtype=np.int64)]
    sample = text.take(pa.array(some))
    counts = [int(np.count_nonzero(fits(sample, candidate))) for candidate in candidates]
    if 2 * max(counts) <= len(sample):
        return from_masks(valid, valid, None, example, codes=has_codes(sample))
    type_ = candidates[counts.index(max(counts))]
    return from_masks(valid, convert_text(text, type_)[1], type_, example, codes=has_codes(text))


def combine(one: DominantType | None, other: DominantType | None) -> DominantType | None:
    """The type of most values of both; ``one`` comes first in file order."""
    if one is None or other is None:
        return one or other
    type_ = None
    if one.type is not None and other.type is not None:
        type_ = unify(one.type, other.type, typed=False)
    if type_ is None or pa.types.is_string(type_):
        one, other = _under_one_type(one, other)
        type_ = one.type if one.type is not None else other.type
    first_unfit = one.first_unfit or other.first_unfit
    codes = one.codes or other.codes
    return DominantType(type_, one.values + other.values, one.unfit + other.unfit, one.first, first_unfit, codes)


def _under_one_type(one: DominantType, other: DominantType) -> tuple[DominantType, DominantType]:
    """Both under the type that fits more values; all values of the other are unfit there."""

    def fit(dominant: DominantType) -> int:
        return 0 if dominant.type is None else dominant.values - dominant.unfit

    def without_type(dominant: DominantType) -> DominantType:
        return replace(dominant, type=None, unfit=dominant.values, first_unfit=dominant.first)

    return (one, without_type(other)) if fit(one) >= fit(other) else (without_type(one), other)
