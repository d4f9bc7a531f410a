"""A lake whose rows have every type that other engines read, odd partition values, nulls and NaN, for tests of what they show."""

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.api import Table
from lakeupsert.config import TableSettings

PARTITIONS = ("a b", "x=y", "ü", "%41", "2026-01-01")
DAYS = 545
KINDS: Mapping[str, tuple[str, ...]] = {
    "no partition columns": (),
    "by hash": ("bucket(4, id)",),
    "by hash below a date": ("d", "bucket(2, id)"),
}
"""Partitions of `TypedLake.run_changes`, beside those by the values of a column."""
TYPES: dict[str, pa.DataType] = {
    "id": pa.int64(),
    "part": pa.string(),
    "flag": pa.bool_(),
    "tiny": pa.int8(),
    "small": pa.int32(),
    "amount": pa.decimal128(12, 2),
    "real": pa.float32(),
    "ratio": pa.float64(),
    "at": pa.timestamp("us"),
    "at_ms": pa.timestamp("ms"),
    "at_s": pa.timestamp("s"),
    "seen": pa.timestamp("us", "UTC"),
    "day": pa.date32(),
    "name": pa.string(),
    "raw": pa.binary(),
    "tags": pa.list_(pa.string()),
    "spot": pa.struct({"height": pa.float64(), "names": pa.list_(pa.string())}),
    "counts": pa.map_(pa.string(), pa.int64()),
}


def schema_without(*names: str) -> pa.Schema:
    """All columns but these."""
    return pa.schema([(name, type_) for name, type_ in TYPES.items() if name not in names])


def row(number: int, night: int) -> dict[str, object]:
    """Every seventh row has nulls alone beside its key, order and partition."""
    seen = dt.datetime(2026, 1, night, 1, 2, 3, 456_000 + number, dt.UTC)
    moment = seen.replace(tzinfo=None)
    key = {"id": number, "part": PARTITIONS[number % len(PARTITIONS)], "seen": seen}
    if number % 7 == 4:
        return {**dict.fromkeys(TYPES), **key}
    return {
        **key,
        "flag": number % 2 == 0,
        "tiny": -number,
        "small": -number,
        "amount": Decimal(number * night).scaleb(-2) - 5,
        "real": number / 4,
        "ratio": (math.nan, math.inf, -1.25)[number % 3],
        "at": moment,
        "at_ms": moment.replace(microsecond=number * 1000),
        "at_s": moment.replace(microsecond=0),
        "day": dt.date(1969 + number, 12, 31),
        "name": ("", "Zoë", "'quoted'\n")[number % 3],
        "raw": bytes([0, 255, number]),
        "tags": ([], ["a", None, "ü"], None)[number % 3],
        "spot": ({"height": math.nan, "names": ["n"]}, {"height": None, "names": None}, None)[number % 3],
        "counts": ([], [("a", 1), ("ü", None)], None)[number % 3],
    }


def rows(schema: pa.Schema, numbers: Sequence[int], night: int, **columns: Any) -> pa.Table:
    """Rows in the columns of ``schema``, some replaced or added by ``columns``."""
    table = pa.Table.from_pylist([row(number, night) for number in numbers], schema)
    for name, values in columns.items():
        place = table.column_names.index(name) if name in table.column_names else None
        table = table.append_column(name, values) if place is None else table.set_column(place, name, values)
    return table


def days() -> tuple[pa.Table, pa.Table]:
    """Two nights over `DAYS` dates, ``day``; the second one updates a row of each."""
    dates = pa.array([dt.date(2020, 1, 1) + dt.timedelta(days=n) for n in range(DAYS)] * 3)
    ids = pa.array(range(3 * DAYS), pa.int64())
    first = pa.table({"id": ids, "day": dates, "seen": pa.array([1] * len(ids), pa.int64())})
    return first, first.slice(0, DAYS).set_column(2, "seen", pa.array([2] * DAYS, pa.int64()))


class TypedLake:
    """A table below ``folder`` that takes a night at a time."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        (folder / "landing").mkdir(parents=True)
        defaults = {"key": ("id",), "partition_by": ("part",), "order_by": ("seen",)}
        zones = {"landing": str(folder / "landing"), "processed": str(folder / "processed")}
        self.settings = TableSettings(**{**zones, **defaults, **settings})
        self.table = Table("t", self.settings)
        self.folder, self.count = folder, 0

    def land(self, night: pa.Table) -> None:
        self.count += 1
        pq.write_table(night, self.folder / "landing" / f"{self.count}.parquet")

    def run(self, *nights: pa.Table) -> Self:
        for night in nights:
            self.land(night)
            self.table.run(host="local")
        return self

    def run_changes(self, schema: pa.Schema) -> Self:
        """Nights, an update, a delete, a compaction, and a last night. The rows have one more column, the date ``d``."""

        def night(number: int, ids: Sequence[int]) -> pa.Table:
            return rows(schema, ids, number, d=pa.array([dt.date(2020, 1, 1 + n % 3) for n in ids]))

        self.run(night(1, range(24)), night(2, [*range(0, 24, 5), *range(24, 30)]))
        self.table.update({"amount": "amount + 1"}, where="id < 9", dry=False)
        self.table.delete(where="id IN (3, 20)", dry=False)
        self.table.compact(full=True)
        return self.run(night(3, [1, 3, 7, 12, 31]))
