"""Python lists, dicts and nulls as Arrow's nested arrays take them."""

from collections.abc import Iterable, Sequence, Sized
from itertools import chain
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lakeupsert.rows.arrays import Mask

Item = TypeVar("Item")


def nulls(values: Sequence[object]) -> Mask:
    """Which values are null."""
    return np.fromiter((v is None for v in values), bool, len(values))


def flatten(values: Iterable[Iterable[Item] | None]) -> list[Item]:
    """The items of all lists, one after another; for dicts the keys."""
    return list(chain.from_iterable(v for v in values if v is not None))


def lengths(values: Sequence[Sized | None]) -> NDArray[np.int64]:
    return np.fromiter((0 if v is None else len(v) for v in values), np.int64, len(values))


def offsets(values: Sequence[Sized | None], kind: type[pa.Array]) -> pa.Array:
    """Offsets as pyarrow's list arrays take them; null for a null list."""
    ends = np.concatenate(([0], np.cumsum(lengths(values))))
    return pa.array(ends, pa.int64() if kind is pa.LargeListArray else pa.int32(), mask=np.append(nulls(values), False))
