"""The table that every writer of `make test-writers` writes, as far as it has the types; and values in text that is the same in
every language.

Whole numbers are decimal text, bytes hexadecimal text, dates days from 1970-01-01, times and timestamps nanoseconds. Run with a
file as argument, it writes the table there in JSON, by column.
"""

import json
import sys
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

ROWS = 10
"""The last row has null in every column but `id`."""
DAYS = ("0001-01-01", "1500-02-28", "1582-10-04", "1582-10-15", "1899-12-31", "1969-12-31", "1970-01-01", "2024-02-29")
DAYS = (*DAYS, "9999-12-31")
CLOCKS = ("0001-01-01T00:00:00", "1582-10-04T12:00:00.001", "1889-12-31T23:59:59.999", "1969-12-31T23:59:59.500")
CLOCKS = (*CLOCKS, "1970-01-01T00:00:00", "2024-03-31T02:30:00.123", "9999-12-31T23:59:59.999")
TEXTS = ("", 'say "hi"', "two\nlines", "a\r\nb\tc", "ß€😀\u0301", " blanks ", "null", "a,b;c|d", "\\N 'x' \\\"")
UUIDS = ("80000000-0000-0000-0000-000000000005", "00000000-0000-0000-0000-000000000001")


def _days(text: str) -> int:
    return (date.fromisoformat(text) - date(1970, 1, 1)).days


def _nanos(text: str, more: int = 0) -> str:
    since = datetime.fromisoformat(text) - datetime(1970, 1, 1)
    return str(since // timedelta(microseconds=1) * 1000 + more)


def _whole(bits: int, *, signed: bool = True) -> list[str]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return [str(low), str(high), "0", "1", "99"]


def _decimals(precision: int, scale: int) -> list[str]:
    most = "9" * (precision - scale) + "." + "9" * scale
    return [text + "0" * (scale - 2) for text in ("0.29", "-1.00", "12.34", "-0.01")] + [most, "-" + most]


_MOMENTS = {
    "ms": [_nanos(text) for text in CLOCKS],
    "us": [_nanos(text, 456_000) for text in CLOCKS],
    "ns": [_nanos(text, 456_789) for text in (*CLOCKS[2:6], "1678-01-01T00:00:00", "2262-01-01T00:00:00.001")],
}
_TIMES = {"ms": 1_000_000, "us": 1000, "ns": 1}
VALUES: dict[str, list[Any]] = {
    "bool": [True, False],
    **{f"int{bits}": _whole(bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": _whole(bits, signed=False) for bits in (8, 16, 32, 64)},
    "float32": ["0.5", "-0.0", "Infinity", "NaN", "-3.4028234663852886e+38", "1.401298464324817e-45"],
    "float64": ["0.1", "-0.0", "-Infinity", "NaN", "1.7976931348623157e+308", "5e-324"],
    "decimal_9_2": _decimals(9, 2),
    "decimal_18_4": _decimals(18, 4),
    "decimal_38_10": _decimals(38, 10),
    "text": list(TEXTS),
    "binary": ["", "00", "fffe00", "c3a9"],
    "date": [str(_days(text)) for text in DAYS],
    **{f"time_{unit}": [str(n // to * to) for n in (0, 1, 86_399_999_999_999)] for unit, to in _TIMES.items()},
    **{f"ts_{unit}{zone}": moments for unit, moments in _MOMENTS.items() for zone in ("", "_utc")},
    "uuid": list(UUIDS),
    "json": ['{"a":[1,"é"]}', "[]"],
    "enum": ["b", "a"],
    "list": [["1", None, str(-(2**63))], [], [None]],
    "lists": [[["a", ""], [], None], [], [[None]]],
    "days": [[str(_days(text)) for text in DAYS], [], [None]],
    "struct": [{"a": "1", "b": "x"}, {"a": None, "b": None}, {"a": str(2**63 - 1), "b": ""}],
    "map": [{"k": "1", "": None}, {}],
}
VALUES = {
    "id": list(map(str, range(ROWS))),
    **{name: [*(values[i % len(values)] for i in range(ROWS - 1)), None] for name, values in VALUES.items()},
}
TYPES: dict[str, pa.DataType] = {
    "id": pa.int64(),
    "bool": pa.bool_(),
    **{f"{sign}int{bits}": pa.type_for_alias(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float32": pa.float32(),
    "float64": pa.float64(),
    "decimal_9_2": pa.decimal128(9, 2),
    "decimal_18_4": pa.decimal128(18, 4),
    "decimal_38_10": pa.decimal128(38, 10),
    "text": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "time_ms": pa.time32("ms"),
    "time_us": pa.time64("us"),
    "time_ns": pa.time64("ns"),
    **{f"ts_{unit}": pa.timestamp(unit) for unit in _TIMES},
    **{f"ts_{unit}_utc": pa.timestamp(unit, "UTC") for unit in _TIMES},
    "uuid": pa.string(),
    "json": pa.string(),
    "enum": pa.string(),
    "list": pa.list_(pa.int64()),
    "lists": pa.list_(pa.list_(pa.string())),
    "days": pa.list_(pa.date32()),
    "struct": pa.struct([("a", pa.int64()), ("b", pa.string())]),
    "map": pa.map_(pa.string(), pa.int64()),
}
"""The types of a table's columns."""


def as_text(values: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Values of Arrow in the form of `VALUES`."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    type_, t = values.type, pa.types
    if t.is_dictionary(type_):
        return as_text(values.cast(type_.value_type))
    if t.is_date(type_):
        return [None if one is None else str(one) for one in values.cast(pa.date32()).cast(pa.int32()).to_pylist()]
    if t.is_timestamp(type_) or t.is_time(type_):
        unit = {"s": 10**9, **_TIMES}[type_.unit]
        ints = values.cast(pa.int32() if t.is_time32(type_) else pa.int64()).to_pylist()
        return [None if one is None else str(one * unit) for one in ints]
    if t.is_map(type_):
        pairs = [map(as_text, one.values.flatten()) if one.is_valid else None for one in values]
        return [one and dict(zip(*one, strict=True)) for one in pairs]
    if t.is_struct(type_):
        fields = {field.name: as_text(values.field(i)) for i, field in enumerate(type_)}
        nulls = values.is_null().to_pylist()
        return [None if null else {n: f[i] for n, f in fields.items()} for i, null in enumerate(nulls)]
    if t.is_list(type_) or t.is_large_list(type_):
        return [as_text(one.values) if one.is_valid else None for one in values]
    return [None if one is None else _as_text(one) for one in values.to_pylist()]


def _as_text(one: Any) -> Any:
    if isinstance(one, bytes):
        return one.hex()
    if isinstance(one, float):
        return repr(one).replace("inf", "Infinity").replace("nan", "NaN")
    return one if isinstance(one, bool | str) else f"{one:f}" if hasattr(one, "scaleb") else str(one)


def as_arrow(name: str, type_: pa.DataType | None = None) -> pa.Array:
    """A column of `VALUES`, in its type in a table or another."""
    type_ = type_ or TYPES[name]
    return pa.array([None if one is None else _as_python(one, TYPES[name]) for one in VALUES[name]], type_)


def _as_python(one: Any, type_: pa.DataType) -> Any:
    if one is None:
        return None
    if pa.types.is_list(type_):
        return [_as_python(each, type_.value_type) for each in one]
    if pa.types.is_map(type_):
        return [(key, _as_python(value, type_.item_type)) for key, value in one.items()]
    if pa.types.is_struct(type_):
        return {field.name: _as_python(one[field.name], field.type) for field in type_}
    if pa.types.is_timestamp(type_) or pa.types.is_time(type_):
        return int(one) // _TIMES[type_.unit]
    if pa.types.is_binary(type_):
        return bytes.fromhex(one)
    if pa.types.is_decimal(type_):
        return Decimal(one)
    if pa.types.is_floating(type_):
        return float(one)
    return int(one) if pa.types.is_integer(type_) or pa.types.is_date(type_) else one


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(VALUES))
