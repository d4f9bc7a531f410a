"""Translate a filter in SQL to an expression of Arrow or Spark. Every reader returns the same rows for it.

Supported: comparisons, IN, BETWEEN, LIKE (`\\` escapes), IS NULL, AND, OR, NOT, over columns and literals. As in SQL, a row is
left out if the condition is null. Text is in '…' with '' for a quote in it. Column names may be in "…" or `…` and are not case
sensitive. A literal takes the type of the column it is compared with, and is refused if that type can't hold it. An integer that
is compared with text is its digits (`id = 1` is `id = '1'`), but only for =, <> and IN: text has another order than numbers.
Timestamps without a zone are UTC. As in the rank, NaN is greatest and -0.0 equals 0.0.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol, Self, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import sqlglot
from sqlglot import exp

from lakeupsert.errors import ConfigurationError
from lakeupsert.rows.convert import convert
from lakeupsert.table.spec import VERSION_FIELDS
from lakeupsert.table.types import is_number, is_text


class Expression(Protocol):
    """An expression of Arrow or Spark. All operators, also `==`, build another one."""

    def __lt__(self, other: Self, /) -> Self: ...

    def __and__(self, other: Self, /) -> Self: ...

    def __or__(self, other: Self, /) -> Self: ...

    def __invert__(self) -> Self: ...


_Node: TypeAlias = "exp.Expr"  # a name that older versions of sqlglot lack
_Kind: TypeAlias = type[_Node]
"""A comparison, as a class of the parser."""
_COMPARE: dict[_Kind, Callable[[Expression, Expression], Expression]] = {
    exp.EQ: operator.eq,
    exp.NEQ: operator.ne,
    exp.GT: operator.gt,
    exp.GTE: operator.ge,
    exp.LT: operator.lt,
    exp.LTE: operator.le,
}
_MIRRORED: dict[_Kind, _Kind] = {exp.GT: exp.LT, exp.GTE: exp.LTE, exp.LT: exp.GT, exp.LTE: exp.GTE}
_OPPOSITE: dict[_Kind, _Kind] = {
    exp.EQ: exp.NEQ,
    exp.GT: exp.LTE,
    exp.GTE: exp.LT,
    exp.NEQ: exp.EQ,
    exp.LTE: exp.GT,
    exp.LT: exp.GTE,
}
_MOST = 200
"""Comparisons in one filter; an IN counts as one. Arrow simplifies a filter by recursion for every row group, in time that grows
with the square of their number: ten thousand end the process."""
_KNOWN = {"this", "expression", "expressions", "low", "high", "negate", "quoted", "is_string", "to"}
"""Attributes of a parsed node that are understood. Any other one (ESCAPE, SYMMETRIC) changes the meaning, so it is refused."""


class Terms(Protocol):
    """Builds an engine's expressions."""

    def column(self, field: pa.Field) -> Expression: ...

    def literal(self, value: pa.Scalar) -> Expression:
        """A value that is not null."""

    def is_null(self, column: Expression) -> Expression:
        """True or false, never null."""

    def is_nan(self, value: Expression) -> Expression:
        """Null if the value is null."""

    def is_in(self, column: Expression, values: pa.Array) -> Expression:
        """Whether a column equals one of the values. Null or false if the column is null."""

    def like(self, column: Expression, pattern: str) -> Expression:
        """A LIKE pattern in which `\\` stands only before `%`, `_` or itself."""


class ArrowTerms:
    """Expressions of ``pyarrow.compute``. ``names`` maps columns that have other names there."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._names = names or {}

    def column(self, field: pa.Field) -> pc.Expression:
        return self._comparable(pc.field(self._names.get(field.name, field.name)), field.type)

    def literal(self, value: pa.Scalar) -> pc.Expression:
        return self._comparable(pc.scalar(value), value.type)

    @staticmethod
    def _comparable(value: pc.Expression, type_: pa.DataType) -> pc.Expression:
        return value.cast(pa.float32()) if pa.types.is_float16(type_) else value  # pyarrow can't compare float16

    def is_null(self, column: pc.Expression) -> pc.Expression:
        return column.is_null()

    def is_nan(self, value: pc.Expression) -> pc.Expression:
        return pc.is_nan(value)

    def is_in(self, column: pc.Expression, values: pa.Array) -> pc.Expression:
        return pc.is_in(column, value_set=values)

    def like(self, column: pc.Expression, pattern: str) -> pc.Expression:
        return pc.match_like(column, pattern)


@dataclass(frozen=True)
class Conjunct:
    """One of the conditions that must all hold.

    Attributes:
        prunes: statistics of Parquet may decide it. They may not decide about floating columns: a file's maximum leaves out NaN.
        columns: names of the columns in it.
    """

    expression: Expression
    prunes: bool
    columns: frozenset[str]


def parse_where(where: str | None, schema: pa.Schema, terms: Terms) -> list[Conjunct]:
    """Parse a filter into conditions that must all hold; None has none.

    Raises ConfigurationError if something in it is not supported, or if ``schema`` lacks a column.
    """
    if where is None:
        return []
    try:
        # SQLite quotes text as the standard does, and takes both common quotes for names.
        tree = sqlglot.parse_one(where, into=exp.Condition, read="sqlite").unnest()
        parts = list(tree.flatten()) if isinstance(tree, exp.And) else [tree]
        translator = _Translator(where, schema, terms)
        return [translator.conjunct(part) for part in parts]
    except (sqlglot.errors.SqlglotError, UnicodeError) as e:
        raise _unfit_filter(where, "it does not parse as a condition in SQL") from e
    except RecursionError as e:
        raise _unfit_filter(where, "it is nested too deeply") from e


def all_of(conjuncts: Sequence[Conjunct]) -> Expression | None:
    """The conjunction; None if there are no conjuncts."""
    return reduce(operator.and_, [c.expression for c in conjuncts]) if conjuncts else None


class _Translator:
    """Translates one filter."""

    def __init__(self, where: str, schema: pa.Schema, terms: Terms) -> None:
        self._where = where
        self._schema = schema
        self._terms = terms
        self._comparisons = 0

    def conjunct(self, node: _Node) -> Conjunct:
        self._columns: set[str] = set()
        expression = self._condition(node, holds=True)
        prunes = not any(pa.types.is_floating(self._schema.field(name).type) for name in self._columns)
        return Conjunct(expression, prunes, frozenset(self._columns))

    def _condition(self, node: _Node, *, holds: bool) -> Expression:
        """True where the condition is true, or with ``holds`` False where it is false.

        NOT is pushed down to the comparisons, so it does not matter that some engines return false instead of null.
        """
        node = node.unnest()
        if any(value for name, value in node.args.items() if name not in _KNOWN) and not isinstance(node, exp.Column):
            raise self._unsupported(node)
        if node.args.get("negate"):
            holds = not holds
        if isinstance(node, exp.Not):
            return self._condition(node.this, holds=not holds)
        if isinstance(node, exp.And | exp.Or):
            join = operator.and_ if isinstance(node, exp.And) == holds else operator.or_
            return reduce(join, [self._condition(part, holds=holds) for part in node.flatten()])
        if isinstance(node, exp.Binary) and node.__class__ in _COMPARE:
            return self._comparison(node, holds=holds)
        if isinstance(node, exp.Between):
            field = self._field(node.this)
            low, high = self._literal(node.args["low"], field), self._literal(node.args["high"], field)
            if holds:
                return self._compare(exp.GTE, field, low) & self._compare(exp.LTE, field, high)
            return self._compare(exp.LT, field, low) | self._compare(exp.GT, field, high)
        if isinstance(node, exp.In) and node.expressions:
            return self._in(self._field(node.this), node.expressions, holds=holds)
        if isinstance(node, exp.Is) and isinstance(node.expression, exp.Null):
            found = self._terms.is_null(self._column(self._field(node.this)))
        elif isinstance(node, exp.Like) and isinstance(node.expression, exp.Literal):
            found = self._like(self._field(node.this), node.expression.this)
        elif isinstance(node, exp.Column):
            field = self._field(node)
            if not pa.types.is_boolean(field.type):
                raise _unfit_filter(self._where, f"{field.name!r} is {field.type}, not a condition by itself")
            found = self._column(field)
        else:
            raise self._unsupported(node)
        return found if holds else ~found

    def _in(self, field: pa.Field, nodes: Sequence[_Node], *, holds: bool) -> Expression:
        t, values = pa.types, self._literals(nodes, field, equal=True)
        if t.is_floating(field.type) or t.is_decimal32(field.type) or t.is_decimal64(field.type):
            # `is_in` misses NaN and the other zero, and pyarrow has none for small decimals.
            kind, join = (exp.EQ, operator.or_) if holds else (exp.NEQ, operator.and_)
            return reduce(join, [self._compare(kind, field, value) for value in values])
        column = self._column(field)
        found = self._terms.is_in(column, values)
        return found if holds else ~found & ~self._terms.is_null(column)

    def _comparison(self, node: exp.Binary, *, holds: bool) -> Expression:
        kind = node.__class__ if holds else _OPPOSITE[node.__class__]
        left, right = node.left.unnest(), node.right.unnest()
        if isinstance(right, exp.Column) and not isinstance(left, exp.Column):
            left, right, kind = right, left, _MIRRORED.get(kind, kind)
        field = self._field(left)
        if not isinstance(right, exp.Column):
            return self._compare(kind, field, self._literals([right], field, equal=kind in (exp.EQ, exp.NEQ))[0])
        other = self._field(right)
        if not other.type.equals(field.type) or pa.types.is_nested(field.type):
            types = f"{field.name!r} is {field.type} and {other.name!r} is {other.type}"
            raise _unfit_filter(self._where, f"{types}: these types can't be compared")
        return self._compare(kind, field, other)

    def _compare(self, kind: _Kind, field: pa.Field, other: pa.Scalar | pa.Field) -> Expression:
        """Compare a column with a literal or with another column."""
        column = self._column(field)
        value = self._column(other) if isinstance(other, pa.Field) else self._terms.literal(other)
        if not pa.types.is_floating(field.type):
            return _COMPARE[kind](column, value)
        # Engines differ about NaN, and those that order it as the rank does trust a file's maximum, which leaves NaN out. So the
        # plain comparison is only used for conditions that NaN never meets.
        if kind in (exp.NEQ, exp.GT, exp.GTE):
            return ~self._compare(_OPPOSITE[kind], field, other)
        nan, value_nan = self._terms.is_nan(column), self._terms.is_nan(value)
        both: dict[_Kind, Expression] = {
            exp.EQ: nan & value_nan,
            exp.LT: ~nan & value_nan,
            exp.LTE: (nan | ~nan) & value_nan,
        }
        return (_COMPARE[kind](column, value) & ~nan & ~value_nan) | both[kind]

    def _like(self, field: pa.Field, pattern: str) -> Expression:
        if not is_text(field.type):
            raise _unfit_filter(self._where, f"LIKE takes text, and {field.name!r} is {field.type}")
        if "\\" in re.sub(r"\\[\\%_]", "", pattern):
            raise _unfit_filter(self._where, f"in {pattern!r}, `\\` must stand before `%`, `_` or another `\\`")
        return self._terms.like(self._column(field), pattern)

    def _column(self, field: pa.Field) -> Expression:
        self._comparisons += 1
        if self._comparisons > _MOST:
            raise _unfit_filter(self._where, f"it has more than {_MOST} comparisons; `column IN (…)` counts as one")
        self._columns.add(field.name)
        return self._terms.column(field)

    def _field(self, node: _Node) -> pa.Field:
        node = node.unnest()
        if not isinstance(node, exp.Column):
            raise _unfit_filter(self._where, f"{node.sql()!r} is not a column")
        name = ".".join(part.name for part in node.parts)
        # In SQL `a.b` is a table and a column; a column called `a.b` is one part, in quotes.
        found = [f for f in self._schema if f.name.lower() == name.lower()] if len(node.parts) == 1 else []
        if not found:
            quote = "; a name with a dot needs quotes" if len(node.parts) > 1 else ""
            columns, hint = ", ".join(self._schema.names), of_versions(name.lower())
            raise _unfit_filter(self._where, f"there is no column {name!r}; the columns are {columns}{quote}{hint}")
        return found[0]

    def _literal(self, node: _Node, field: pa.Field) -> pa.Scalar:
        return self._literals([node], field)[0]

    def _literals(self, nodes: Sequence[_Node], field: pa.Field, *, equal: bool = False) -> pa.Array:
        """Literals in the type of the column that they are compared with; ``equal``: for equality."""
        texts = pa.array([self._text(node.unnest(), field, equal=equal) for node in nodes], pa.string())
        values, bad = convert(texts, field.type)
        if bad.any():
            raise self._unfit_literal(texts.filter(pa.array(bad))[0].as_py(), field)
        return values

    def _text(self, node: _Node, field: pa.Field, *, equal: bool) -> str:
        t, type_ = pa.types, field.type
        if isinstance(node, exp.Cast) and node.to.this in exp.DataType.TEMPORAL_TYPES:
            node = node.this  # DATE '2020-01-01': the column has the type
        if isinstance(node, exp.Literal) and node.is_string:
            return str(node.this)
        sign, number = ("-", node.this) if isinstance(node, exp.Neg) else ("", node)
        if isinstance(node, exp.Boolean):
            text, fits = str(node.this).lower(), t.is_boolean(type_)
        elif isinstance(number, exp.Literal) and not number.is_string:
            text, fits = sign + number.this, is_number(type_)
            if equal and is_text(type_) and number.is_int:
                text, fits = str(int(text)), True
        else:
            raise self._no_literal(node, field)
        if not fits:
            raise self._unfit_literal(text, field)
        return text

    def _no_literal(self, node: _Node, field: pa.Field) -> ConfigurationError:
        text = node.sql()
        date = text.replace(" ", "")
        if pa.types.is_temporal(field.type) and re.fullmatch(r"\d{4}-\d{1,2}-\d{1,2}", date):
            return _unfit_filter(self._where, f"{field.name!r} is {field.type}, and dates need quotes: '{date}'")
        return _unfit_filter(self._where, f"{text!r} is not a literal")

    def _unfit_literal(self, text: str, field: pa.Field) -> ConfigurationError:
        hint = "; write text in quotes" if is_text(field.type) else ""
        hint = "; write dates in quotes, for example '2024-03-01'" if pa.types.is_temporal(field.type) else hint
        return _unfit_filter(self._where, f"{text!r} is not a valid {field.type}, the type of {field.name!r}{hint}")

    def _unsupported(self, node: _Node) -> ConfigurationError:
        return _unfit_filter(self._where, f"{node.sql()!r} is not supported here")


def of_versions(name: str) -> str:
    """What to add to the columns that are named instead of a missing one, if only readers who ask for versions have that."""
    return f"; {name} needs --versions or versions=True" if name in {field.name for field in VERSION_FIELDS} else ""


def _unfit_filter(where: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        "unfit-filter",
        f"The filter {where!r} can't be used: {why}.",
        next="use columns, literals, =, <>, <, >, IN, BETWEEN, LIKE, IS NULL, AND, OR, NOT; or filter the result",
    )
