"""Which partitions by hash may have a row that passes a filter: those of the values that it allows.

`order_id = 7` and `order_id IN (7, 8)` allow a few values of a column, whose hashes say in which partitions such rows are. A
column of which a filter says nothing of the kind may have any value.
"""

from collections.abc import Collection, Mapping
from itertools import product
from math import prod
from typing import TypeAlias, cast

import pyarrow as pa

from lakeupsert.read.where import Terms, all_of, parse_where
from lakeupsert.rows.buckets import hash_numbers
from lakeupsert.table.spec import TableSpec

MOST_KEYS = 100_000
"""Keys that are hashed for a filter. More would be spread over nearly all partitions."""
Allowed: TypeAlias = Mapping[str, frozenset[pa.Scalar]]
"""The values of columns with which a row may pass. A column that is not there may have any value."""


class _Term:
    """A condition of the filter, or a column or a literal in it."""

    def __init__(self, allowed: Allowed, column: str | None = None, literal: pa.Scalar | None = None):
        self.allowed = allowed
        self.column = column
        self.literal = literal

    def __and__(self, other: "_Term") -> "_Term":
        one, two = self.allowed, other.allowed
        return _Term({**one, **two, **{name: one[name] & two[name] for name in one.keys() & two.keys()}})

    def __or__(self, other: "_Term") -> "_Term":
        one, two = self.allowed, other.allowed
        return _Term({name: one[name] | two[name] for name in one.keys() & two.keys()})

    def __eq__(self, other: "_Term") -> "_Term":  # type: ignore[override]
        if self.column is None or other.literal is None:
            return _ANY
        return _Term({self.column: frozenset([other.literal])})

    def _says_nothing(self, other: object = None) -> "_Term":
        return _ANY

    __invert__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _says_nothing  # type: ignore[assignment]


_ANY = _Term({})


class _Terms:
    def column(self, field: pa.Field) -> _Term:
        return _Term({}, column=field.name)

    def literal(self, value: pa.Scalar) -> _Term:
        return _Term({}, literal=value)

    def is_in(self, column: _Term, values: pa.Array) -> _Term:
        return _Term({column.column or "": frozenset(values)})

    def _says_nothing(self, *of: object) -> _Term:
        return _ANY

    is_null = is_nan = like = _says_nothing


def hash_values(spec: TableSpec, where: str | None, schema: pa.Schema) -> dict[str, Collection[int]]:
    """The values of the partition columns that are hashes, with which a row may pass the filter; without columns that may have
    any. ``schema``: of the columns that the filter may name."""
    if where is None or not spec.hash_columns:
        return {}
    condition = cast(_Term, all_of(parse_where(where, schema, cast(Terms, _Terms()))))
    found: dict[str, Collection[int]] = {}
    for one in spec.hash_columns:
        values = [condition.allowed.get(name) for name in one.sources]
        known = [of_column for of_column in values if of_column is not None]
        if len(known) == len(values) and prod(map(len, known)) <= MOST_KEYS:
            keys = zip(*product(*known), strict=True)
            types = [spec.schema.field(name).type for name in one.sources]
            columns = [pa.array(of_column, type_) for of_column, type_ in zip(keys, types, strict=False)]
            found[one.column] = set(hash_numbers(columns, one.count or 1).to_pylist()) if columns else set()
    return found
