"""Debezium's placeholder for a value that did not change and that it did not get, such as PostgreSQL's TOAST, in every type.

Debezium 3.6 writes it as text, as bytes (in JSON base64 or hexadecimal), as a list of one of these, as the list of the
characters' numbers (int[], bigint[], date[]), as a list of one UUID made of it, and as a map of it to itself (hstore).
"""

import base64
import hashlib
import json
import uuid
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.rows.arrays import Mask
from lakeupsert.rows.convert import as_mask, convert
from lakeupsert.table.types import is_list

PLACEHOLDER = "__debezium_unavailable_value"
_BYTES = PLACEHOLDER.encode()
NUMBERS = [*_BYTES]
_SINGLE = (PLACEHOLDER, base64.b64encode(_BYTES).decode(), _BYTES.hex())
_UUID = str(uuid.UUID(bytes=hashlib.md5(_BYTES, usedforsecurity=False).digest(), version=3))
_IN_LIST = (*_SINGLE, _UUID)
_MAP = {PLACEHOLDER: PLACEHOLDER}
_NESTED = (*([one] for one in _IN_LIST), NUMBERS, _MAP, [{"key": PLACEHOLDER, "value": PLACEHOLDER}])
UNAVAILABLE = (*_SINGLE, *(json.dumps(one, separators=(",", ":")) for one in _NESTED))
"""Every form as text: the placeholder itself, or the JSON of a list or a map."""


def is_unavailable(value: object) -> bool:
    """Whether a decoded JSON value is the placeholder in one of its forms."""
    if isinstance(value, dict):
        return value == _MAP
    return value in (_NESTED if isinstance(value, list) else UNAVAILABLE)


def find_unavailable(column: pa.Array) -> Mask:
    """Which values of a column are the placeholder in the form that a column of its type takes."""
    t, type_ = pa.types, column.type
    if _is_text(type_):
        return _is_among(column, UNAVAILABLE)
    if is_list(type_) or t.is_fixed_size_list(type_):
        return _find_lists(column, type_.value_type)
    if t.is_map(type_) and type_.key_type == type_.item_type == pa.string():
        single: Mask = np.diff(column.offsets.to_numpy()) == 1
        return single & _is_among(pc.map_lookup(column, pa.scalar(PLACEHOLDER), "first"), [PLACEHOLDER])
    return np.zeros(len(column), bool)


def _find_lists(column: pa.Array, item: pa.DataType) -> Mask:
    found = np.zeros(len(column), bool)
    sizes = pc.list_value_length(column)
    if _is_text(item):
        single = np.flatnonzero(as_mask(pc.equal(sizes, 1)))
        found[single] = _is_among(column.take(pa.array(single)).flatten(), _IN_LIST)
    numbers = _numbers(item)
    long = np.flatnonzero(as_mask(pc.equal(sizes, len(NUMBERS))))
    if numbers is not None and len(long):
        items = column.take(pa.array(long)).flatten()
        same = as_mask(pc.equal(items, pa.concat_arrays([numbers] * len(long))))
        found[long] |= same.reshape(len(long), len(NUMBERS)).all(axis=1)
    return found


def _numbers(type_: pa.DataType) -> pa.Array | None:
    """The characters' numbers in the type of a list's items; None if it holds no numbers."""
    numbers = pa.array(NUMBERS, pa.int32())
    if pa.types.is_date32(type_):  # of date[] Debezium writes the days since 1970
        return numbers.view(type_)
    values, unfit = convert(numbers, type_)
    return None if unfit.any() else values


def _is_text(type_: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_string(type_) or t.is_large_string(type_) or t.is_binary(type_) or t.is_large_binary(type_))


def _is_among(column: pa.Array, texts: Sequence[str]) -> Mask:
    return as_mask(pc.is_in(column, pa.array(texts, pa.string()).cast(column.type)))
