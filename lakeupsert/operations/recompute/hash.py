"""The hash of key columns, computed a second time for `reconcile --deep`: from docs/FORMAT.md, "Buckets", with another XXH64.

Reads     nothing
Writes    nothing
Repeat    safe
"""

from collections.abc import Callable, Iterator, Sequence
from decimal import Context
from inspect import Parameter, Signature

import pyarrow as pa

from lakeupsert.operations.recompute.sql import import_extra
from lakeupsert.rows.arrays import Column

_EXACT = Context(prec=100)
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def hash_function(types: Sequence[pa.DataType], count: int) -> Callable[..., pa.Array]:
    """The hash of columns modulo ``count``, as a function of one column for each of ``types``; null where a value is null."""
    digest = import_extra("xxhash", "hashes the keys of this table with xxhash").xxh64_intdigest

    def numbers(*columns: Column) -> pa.Array:
        parts = zip(*(_canonical(column, type_) for column, type_ in zip(columns, types, strict=True)), strict=True)
        return pa.array([None if None in key else digest(b"".join(key)) % count for key in parts], pa.int32())

    parameters = [Parameter(f"column{place}", Parameter.POSITIONAL_ONLY) for place in range(len(types))]
    numbers.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # by which DuckDB counts them
    return numbers


def _canonical(column: Column, type_: pa.DataType) -> Iterator[bytes | None]:
    """The canonical bytes of each value of a column of ``type_``, which DuckDB may have in a similar type."""
    t = pa.types
    if t.is_decimal(type_):
        width = 32 if type_.precision > 38 else 16
        for value in column.to_pylist():
            yield None if value is None else _number(int(value.scaleb(type_.scale, _EXACT)), width)
    elif t.is_date(type_):
        yield from map(_word, column.cast(pa.date32()).cast(pa.int32()).to_pylist())
    elif t.is_timestamp(type_):
        kept = _PER_SECOND["ns" if type_.unit == "ns" else "us"]
        for value in column.cast(pa.int64()).to_pylist():
            yield _word(None if value is None else value * kept // _PER_SECOND[column.type.unit])
    elif t.is_integer(type_) or t.is_boolean(type_):
        yield from map(_word, column.to_pylist())
    else:
        for value in column.to_pylist():
            data = value.encode() if isinstance(value, str) else value
            yield None if data is None else _number(len(data), 8) + data + bytes(-len(data) % 8)


def _word(value: int | None) -> bytes | None:
    return None if value is None else _number(value % 2**64, 8, signed=False)


def _number(value: int, width: int, *, signed: bool = True) -> bytes:
    return value.to_bytes(width, "little", signed=signed)
