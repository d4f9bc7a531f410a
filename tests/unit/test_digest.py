"""Hashes of rows: what docs/FORMAT.md says, value by value; and what must not change them."""

import math
import random
import struct
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakeupsert.rows.digest import row_hashes

MOD = 2**64
TEXTS = ["", "a", "a\0", "ä", "12345678", "123456789", "🦆" * 40]
VALUES: dict[Any, list[Any]] = {
    pa.int8(): [-128, 0, 127],
    pa.int64(): [-(2**63), -1, 0, 2**63 - 1],
    pa.uint64(): [0, 2**64 - 1],
    pa.bool_(): [True, False],
    pa.float32(): [0.0, -0.0, 1.5, -math.inf, math.nan],
    pa.float64(): [0.0, -0.0, -2.5, math.nan, math.inf],
    pa.decimal32(5, 2): [Decimal("-3.00"), Decimal("999.99")],
    pa.decimal128(38, 10): [Decimal("-1"), Decimal("1234567890123456789012345678.0000000001")],
    pa.decimal256(60, 3): [Decimal("-2.5"), Decimal(10) ** 50],
    pa.date32(): [date(1, 1, 1), date(9999, 12, 31)],
    pa.timestamp("ms"): [datetime(1900, 1, 1), datetime(2020, 1, 1)],
    pa.timestamp("us", "UTC"): [datetime(1900, 1, 1), datetime(2020, 1, 1, 0, 0, 0, 1)],
    pa.timestamp("ns"): [-1, 1_577_836_800_000_000_001],
    pa.duration("us"): [timedelta(days=-1), timedelta(0)],
    pa.string(): TEXTS,
    pa.large_string(): TEXTS,
    pa.binary(): [text.encode() for text in TEXTS],
    pa.binary(2): [b"\x00\xff", b"ab"],
    pa.null(): [],
}


def words(value: Any, type_: Any) -> list[int]:
    """The table of docs/FORMAT.md for one value, as pyarrow gives it to Python."""
    t = pa.types
    if value is None:
        return [0xA0761D6478BD642F]
    if isinstance(value, str | bytes):
        data = value.encode() if isinstance(value, str) else value
        return [len(data), *(int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8))]
    if isinstance(value, Decimal):
        sign, digits, exponent = value.as_tuple()
        unscaled = int("".join(map(str, digits))) * (-1) ** sign
        rests = [unscaled * pow(10, exponent, prime) % prime for prime in (2**31 - 1, 2**31 - 19)]
        return [rests[0] * 2**32 + rests[1]]
    if t.is_floating(type_):
        bits = 0x7FF8000000000000 if math.isnan(value) else struct.unpack("<Q", struct.pack("<d", value + 0.0))[0]
        return [bits ^ 0x7FFFFFFFFFFFFFFF if bits >> 63 else bits]
    return [int(value) % MOD]


def by_hand(columns: list[tuple[Any, Any]]) -> int:
    h = 0
    for value, type_ in columns:
        for word in words(value, type_):
            h = (h ^ word) * 0x9FB21C651E98DF25 % MOD
            h ^= h >> 32
    h = h * 0xD6E8FEB86659FD93 % MOD
    return h ^ (h >> 32)


def plain(array: Any) -> list[Any]:
    """Python's values; of dates and times the number in the unit that FORMAT names."""
    t, type_ = pa.types, array.type
    if not t.is_temporal(type_):
        return array.to_pylist()  # type: ignore[no-any-return]  # pyarrow ships no types
    numbers = array.view(pa.int32() if type_.bit_width == 32 else pa.int64()).to_pylist()
    factor = {"s": 10**6, "ms": 1000}.get(type_.unit, 1) if t.is_timestamp(type_) else 1
    return [None if n is None else n * factor for n in numbers]


@pytest.mark.parametrize("seed", range(20))
def test_hashes_are_what_the_format_says(seed: int) -> None:
    rng = random.Random(seed)
    types = rng.sample(list(VALUES), 3)
    arrays = [pa.array([rng.choice([*VALUES[t], None]) for _ in range(50)], t) for t in types]
    table = pa.table(dict(zip("abc", arrays, strict=True)))
    expected = [by_hand(list(zip(row, types, strict=True))) for row in zip(*map(plain, arrays), strict=True)]
    assert row_hashes(table, "abc").tolist() == expected
    cut = pa.concat_tables([table.slice(0, 7), table.slice(7, 1), table.slice(8)])
    assert row_hashes(cut, "abc").tolist() == expected
    assert row_hashes(table.slice(13, 20), "abc").tolist() == expected[13:33]
    assert row_hashes(table.slice(50), "abc").tolist() == []


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        (pa.int8(), pa.int64()),
        (pa.uint16(), pa.int32()),
        (pa.uint8(), pa.uint64()),
        (pa.float32(), pa.float64()),
        (pa.decimal32(5, 2), pa.decimal128(12, 4)),
        (pa.decimal128(12, 2), pa.decimal256(60, 20)),
        (pa.timestamp("s"), pa.timestamp("us")),
        (pa.string(), pa.large_string()),
        (pa.binary(), pa.large_binary()),
    ],
    ids=str,
)
def test_widened_columns_keep_their_hashes(narrow: Any, wide: Any) -> None:
    values: list[Any] = [0, 1, 100]
    if narrow in (pa.string(), pa.binary()):
        values = ["", "1", "7" * 9]
    array = pa.array([None, *values], narrow)
    one, other = (row_hashes(pa.table({"a": a}), ["a"]) for a in (array, array.cast(wide)))
    assert np.array_equal(one, other)
    assert len(set(one.tolist())) == 4, "null is no value"


def test_place_of_a_value_matters() -> None:
    table = pa.table({"a": ["x", "y", "", "xy"], "b": ["y", "x", "xy", ""]})
    assert len(set(row_hashes(table, ["a", "b"]).tolist())) == 4
