"""Python lists, dicts and nulls as Arrow's nested arrays take them."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa


def nulls(values: Sequence[Any]) -> Any:
    """A mask of the values that are null."""
    return np.fromiter((v is None for v in values), bool, len(values))


def flat(values: Iterable[Any]) -> list[Any]:
    """The items of all lists, one after another; of dicts the keys."""
    return list(chain.from_iterable(v for v in values if v is not None))


def lengths(values: Sequence[Any]) -> Any:
    return np.fromiter((0 if v is None else len(v) for v in values), np.int64, len(values))


def offsets(values: Sequence[Any], kind: Any) -> Any:
    """Offsets as pyarrow's list arrays take them: null where the list is."""
    ends = np.concatenate(([0], np.cumsum(lengths(values))))
    return pa.array(ends, pa.int64() if kind is pa.LargeListArray else pa.int32(), mask=np.append(nulls(values), False))
