"""Which data files may have rows that pass a filter, by the statistics in their manifest entries. No file is opened.

The filter becomes a function of what is known of a file's columns. The result says whether the filter may be true for some row
and whether it may be false for some, so that NOT swaps the two. For all other rows it is null.
"""

import bisect
import operator
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import reduce
from typing import NamedTuple, TypeAlias, cast

import pyarrow as pa

from lakeupsert.read.where import Terms, all_of, parse_where
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.buckets import hash_numbers
from lakeupsert.rows.statistics import has_bounds
from lakeupsert.table.manifest import ColumnStatistics, DataFile
from lakeupsert.table.spec import TableSpec, field_id

Comparable: TypeAlias = int | str | Decimal
"""A value as it is compared: text by its characters, which is the order of their bytes; times as integers."""


class Range(NamedTuple):
    """What is known of a column in a file: no value is below ``least`` or above ``greatest``. None: not known."""

    least: Comparable | None = None
    greatest: Comparable | None = None
    has_nulls: bool = True
    has_values: bool = True


class Chance(NamedTuple):
    """Whether a condition may be true, or false, for some row."""

    true: bool = True
    false: bool = True


Known: TypeAlias = Mapping[int, Range]
"""By field id. Nothing is known of a column that is not there."""
FileTest: TypeAlias = Callable[[DataFile, Mapping[str, pa.Scalar]], bool]
"""Whether a file of a partition, whose columns have these values, may have rows that pass."""


class _Term:
    """A condition of the filter, or a column or literal in it, which has a ``range`` too."""

    def __init__(self, chance: Callable[[Known], Chance], range_: Callable[[Known], Range] = lambda known: Range()):
        self.chance = chance
        self.range = range_

    def __and__(self, other: "_Term") -> "_Term":
        def chance(known: Known) -> Chance:
            one, two = self.chance(known), other.chance(known)
            return Chance(one.true and two.true, one.false or two.false)

        return _Term(chance)

    def __or__(self, other: "_Term") -> "_Term":
        return ~(~self & ~other)

    def __invert__(self) -> "_Term":
        return _Term(lambda known: Chance(*reversed(self.chance(known))))

    def __lt__(self, other: "_Term") -> "_Term":
        return self._compared(
            other,
            lambda one, two: Chance(
                _may(operator.lt, one.least, two.greatest), _may(operator.ge, one.greatest, two.least)
            ),
        )

    def __gt__(self, other: "_Term") -> "_Term":
        return other < self

    def __le__(self, other: "_Term") -> "_Term":
        return ~(other < self)

    def __ge__(self, other: "_Term") -> "_Term":
        return ~(self < other)

    def __eq__(self, other: "_Term") -> "_Term":  # type: ignore[override]
        def chance(one: Range, two: Range) -> Chance:
            meet = _may(operator.le, one.least, two.greatest) and _may(operator.le, two.least, one.greatest)
            return Chance(meet, one.least is None or not one.least == one.greatest == two.least == two.greatest)

        return self._compared(other, chance)

    def __ne__(self, other: "_Term") -> "_Term":  # type: ignore[override]
        return ~(self == other)

    def _compared(self, other: "_Term", chance: Callable[[Range, Range], Chance]) -> "_Term":
        def found(known: Known) -> Chance:
            one, two = self.range(known), other.range(known)
            return chance(one, two) if one.has_values and two.has_values else Chance(true=False, false=False)

        return _Term(found)


def _may(test: Callable[[Comparable, Comparable], bool], one: Comparable | None, two: Comparable | None) -> bool:
    return one is None or two is None or test(one, two)


class _Terms:
    """Builds terms, and remembers which columns are in the filter."""

    def __init__(self) -> None:
        self.columns: dict[int, pa.Field] = {}

    def column(self, field: pa.Field) -> _Term:
        id_ = field_id(field)
        self.columns[id_] = field

        def range_(known: Known) -> Range:
            return known.get(id_, Range())

        def holds(known: Known) -> Chance:  # a column that is a condition by itself
            least, greatest, _, has_values = range_(known)
            return Chance(has_values and greatest is not False, has_values and least is not True)

        return _Term(holds, range_)

    def literal(self, value: pa.Scalar) -> _Term:
        own = _comparable(value)
        return _Term(lambda known: Chance(), lambda known: Range(own, own, has_nulls=False))

    def is_null(self, column: _Term) -> _Term:
        def chance(known: Known) -> Chance:
            own = column.range(known)
            return Chance(own.has_nulls, own.has_values)

        return _Term(chance)

    def is_nan(self, value: _Term) -> _Term:
        return _Term(lambda known: Chance())  # nothing is known of floats

    def is_in(self, column: _Term, values: pa.Array) -> _Term:
        if not has_bounds(values.type):
            return _Term(lambda known: Chance())
        ordered = sorted(value for value in map(_comparable, values) if value is not None)

        def chance(known: Known) -> Chance:
            own = column.range(known)
            first = 0 if own.least is None else bisect.bisect_left(ordered, own.least)
            meets = first < len(ordered) and _may(operator.le, ordered[first], own.greatest)
            return Chance(own.has_values and meets)

        return _Term(chance)

    def like(self, column: _Term, pattern: str) -> _Term:
        start = re.split(r"[%_\\]", pattern, maxsplit=1)[0]

        def chance(known: Known) -> Chance:
            least, greatest, _, has_values = column.range(known)
            from_below = not isinstance(least, str) or least[: len(start)] <= start
            return Chance(
                has_values and from_below and (not isinstance(greatest, str) or start <= greatest[: len(start)])
            )

        return _Term(chance)


def file_test(schema: pa.Schema, where: str | None) -> FileTest:
    """The test of a filter on columns of ``schema``, which have field ids. Raises ConfigurationError if it can't be used."""
    terms = _Terms()
    return _test(terms, cast(_Term | None, all_of(parse_where(where, schema, cast(Terms, terms)))))


def key_test(spec: TableSpec, keys: Rows) -> FileTest:
    """The test whether a file may have one of these keys, given in columns of the table. Of partitions by hash, only those of a
    key may."""
    for one in spec.hash_columns:
        if set(one.hashed) <= set(keys.schema.names) and one.column not in keys.schema.names:
            hashed = hash_numbers([keys[name].combine_chunks() for name in one.hashed], one.count or 1)
            keys = keys.append_column(one.column, hashed)
    terms = _Terms()
    conditions = [terms.is_in(terms.column(spec.schema.field(name)), keys[name]) for name in keys.schema.names]
    return _test(terms, reduce(operator.and_, conditions))


def _test(terms: _Terms, condition: _Term | None) -> FileTest:
    if condition is None:
        return lambda file, values: True
    columns = {id_: field for id_, field in terms.columns.items() if has_bounds(field.type)}

    def may_pass(file: DataFile, values: Mapping[str, pa.Scalar]) -> bool:
        known = {one.id: _range(one, file.rows, columns[one.id].type) for one in file.statistics if one.id in columns}
        for id_, field in columns.items():
            if field.name in values:
                own = _comparable(values[field.name])
                known[id_] = Range(own, own, has_nulls=False)
        return condition.chance(known).true

    return may_pass


def _range(statistics: ColumnStatistics, rows: int, type_: pa.DataType) -> Range:
    bounds = (statistics.least, statistics.greatest)
    low, high = map(_decimal, bounds) if pa.types.is_decimal(type_) else bounds
    return Range(low, high, statistics.nulls > 0, statistics.nulls < rows)


def _decimal(text: object) -> Decimal | None:
    return None if text is None else Decimal(str(text))


def _comparable(value: pa.Scalar) -> Comparable | None:
    """None: values of its type are not compared here."""
    t = pa.types
    if not has_bounds(value.type):
        return None
    if t.is_timestamp(value.type):
        return int(value.value) * {"s": 1_000_000, "ms": 1_000}.get(value.type.unit, 1)
    found: Comparable = value.value if t.is_date(value.type) else value.as_py()
    return found
