"""A filter in SQL as an expression of Arrow or of Spark: whichever reader takes it, the rows are the same.

Comparisons, IN, BETWEEN, LIKE (`\\` escapes), IS NULL, AND, OR, NOT, over columns and literals. As in SQL, a row for which the
condition is null is left out. Text is in '…' with '' for a quote in it, a column's name may stand in "…" or `…`; names do
not tell upper from lower case. A literal takes the type of the column it is compared with, and is refused where that type
can't hold it; timestamps without a zone are UTC. As in G1, NaN is greatest and -0.0 equals 0.0.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import sqlglot
from sqlglot import exp

from lakeupsert.errors import ConfigurationError
from lakeupsert.rows.convert import convert

_COMPARE: dict[Any, Callable[[Any, Any], Any]] = {
    exp.EQ: operator.eq,
    exp.NEQ: operator.ne,
    exp.GT: operator.gt,
    exp.GTE: operator.ge,
    exp.LT: operator.lt,
    exp.LTE: operator.le,
}
_MIRRORED = {exp.GT: exp.LT, exp.GTE: exp.LTE, exp.LT: exp.GT, exp.LTE: exp.GTE}
_OPPOSITE = {exp.EQ: exp.NEQ, exp.GT: exp.LTE, exp.GTE: exp.LT, exp.NEQ: exp.EQ, exp.LTE: exp.GT, exp.LT: exp.GTE}
_MOST = 200
"""Comparisons of one filter (an IN is one). Arrow simplifies a filter for every row group, in a time that grows with the
square of their number, and by recursion: ten thousand end the process."""
_KNOWN = {"this", "expression", "expressions", "low", "high", "negate", "quoted", "is_string", "to"}
"""What the parser may tell of a node; more (an ESCAPE, a SYMMETRIC) is refused, for it would change what is meant."""


class Terms(Protocol):
    """What an engine's expressions are made of. Comparisons, `&`, `|` and `~` are operators of what these return."""

    def column(self, field: Any) -> Any:
        """The column of a ``pyarrow.Field``."""

    def literal(self, value: Any) -> Any:
        """A ``pyarrow.Scalar`` that is not null."""

    def is_null(self, column: Any) -> Any:
        """True or false, never null."""

    def is_nan(self, value: Any) -> Any:
        """Null where the value is."""

    def is_in(self, column: Any, values: Any) -> Any:
        """Whether a column equals one of a ``pyarrow.Array``; where it is null, null or false."""

    def like(self, column: Any, pattern: str) -> Any:
        """A LIKE pattern in which `\\` stands only before `%`, `_` or itself."""


class ArrowTerms:
    """``pyarrow.compute.Expression``. ``names``: of columns that go by other names there."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._names = names or {}

    def column(self, field: Any) -> Any:
        return self._comparable(pc.field(self._names.get(field.name, field.name)), field.type)

    def literal(self, value: Any) -> Any:
        return self._comparable(pc.scalar(value), value.type)

    @staticmethod
    def _comparable(value: Any, type_: Any) -> Any:
        return value.cast(pa.float32()) if pa.types.is_float16(type_) else value  # pyarrow compares no halves

    def is_null(self, column: Any) -> Any:
        return column.is_null()

    def is_nan(self, value: Any) -> Any:
        return pc.is_nan(value)

    def is_in(self, column: Any, values: Any) -> Any:
        return pc.is_in(column, value_set=values)

    def like(self, column: Any, pattern: str) -> Any:
        return pc.match_like(column, pattern)


@dataclass(frozen=True)
class Conjunct:
    """One of the conditions that must all hold.

    Attributes:
        columns: the names of those that it is about.
        prunes: Parquet's statistics may decide it. Not where it has a floating column: the greatest value that a file
            tells is the greatest of those that are not NaN.
    """

    expression: Any
    prunes: bool
    columns: frozenset[str]


def parse_where(where: str | None, schema: Any, terms: Terms) -> list[Conjunct]:
    """The condition of ``where``, in parts that must all hold; none where it is None.

    Raises ConfigurationError for what is not supported, and for columns that ``schema`` lacks.
    """
    if where is None:
        return []
    try:
        # SQLite's quotes are the standard's, and it takes both of the usual ones for names.
        tree = sqlglot.parse_one(where, into=exp.Condition, read="sqlite").unnest()
        parts = list(tree.flatten()) if isinstance(tree, exp.And) else [tree]
        translator = _Translator(where, schema, terms)
        return [translator.conjunct(part) for part in parts]
    except (sqlglot.errors.SqlglotError, UnicodeError) as e:
        raise _refused(where, "it does not parse as a condition in SQL") from e
    except RecursionError as e:
        raise _refused(where, "it is nested too deeply") from e


def all_of(conjuncts: Sequence[Conjunct]) -> Any:
    """One expression that holds where all do; None for none."""
    return reduce(operator.and_, [c.expression for c in conjuncts]) if conjuncts else None


class _Translator:
    """Of one filter."""

    def __init__(self, where: str, schema: Any, terms: Terms) -> None:
        self._where = where
        self._schema = schema
        self._terms = terms
        self._comparisons = 0

    def conjunct(self, node: Any) -> Conjunct:
        self._columns: set[str] = set()
        expression = self._condition(node, True)
        prunes = not any(pa.types.is_floating(self._schema.field(name).type) for name in self._columns)
        return Conjunct(expression, prunes, frozenset(self._columns))

    def _condition(self, node: Any, holds: bool) -> Any:
        """Where a condition is true, or (``holds`` is False) where it is false: NOT is carried down to the comparisons.

        So a null may be told as false, which some engines do.
        """
        node = node.unnest()
        if any(value for name, value in node.args.items() if name not in _KNOWN) and not isinstance(node, exp.Column):
            raise self._unsupported(node)
        if node.args.get("negate"):
            holds = not holds
        if isinstance(node, exp.Not):
            return self._condition(node.this, not holds)
        if isinstance(node, exp.And | exp.Or):
            join = operator.and_ if isinstance(node, exp.And) == holds else operator.or_
            return reduce(join, [self._condition(part, holds) for part in node.flatten()])
        if node.__class__ in _COMPARE:
            return self._comparison(node, holds)
        if isinstance(node, exp.Between):
            field = self._field(node.this)
            low, high = self._literal(node.args["low"], field), self._literal(node.args["high"], field)
            if holds:
                return self._compare(exp.GTE, field, low) & self._compare(exp.LTE, field, high)
            return self._compare(exp.LT, field, low) | self._compare(exp.GT, field, high)
        if isinstance(node, exp.In) and node.expressions:
            return self._in(self._field(node.this), node.expressions, holds)
        if isinstance(node, exp.Is) and isinstance(node.expression, exp.Null):
            found = self._terms.is_null(self._column(self._field(node.this)))
        elif isinstance(node, exp.Like) and isinstance(node.expression, exp.Literal):
            found = self._like(self._field(node.this), node.expression.this)
        elif isinstance(node, exp.Column):
            field = self._field(node)
            if not pa.types.is_boolean(field.type):
                raise _refused(self._where, f"{field.name!r} is {field.type} and no condition by itself")
            found = self._column(field)
        else:
            raise self._unsupported(node)
        return found if holds else ~found

    def _in(self, field: Any, nodes: Sequence[Any], holds: bool) -> Any:
        t, values = pa.types, self._literals(nodes, field)
        if t.is_floating(field.type) or t.is_decimal32(field.type) or t.is_decimal64(field.type):
            # NaN and both zeros, and what pyarrow has no `is_in` for
            kind, join = (exp.EQ, operator.or_) if holds else (exp.NEQ, operator.and_)
            return reduce(join, [self._compare(kind, field, value) for value in values])
        column = self._column(field)
        found = self._terms.is_in(column, values)
        return found if holds else ~found & ~self._terms.is_null(column)

    def _comparison(self, node: Any, holds: bool) -> Any:
        kind = node.__class__ if holds else _OPPOSITE[node.__class__]
        left, right = node.left.unnest(), node.right.unnest()
        if isinstance(right, exp.Column) and not isinstance(left, exp.Column):
            left, right, kind = right, left, _MIRRORED.get(kind, kind)
        field = self._field(left)
        if not isinstance(right, exp.Column):
            return self._compare(kind, field, self._literal(right, field))
        other = self._field(right)
        if not other.type.equals(field.type) or pa.types.is_nested(field.type):
            types = f"{field.name!r} is {field.type} and {other.name!r} is {other.type}"
            raise _refused(self._where, f"{types}: they can't be compared")
        return self._compare(kind, field, other)

    def _compare(self, kind: Any, field: Any, other: Any) -> Any:
        """A column with a literal (``pyarrow.Scalar``) or with another column (``pyarrow.Field``)."""
        column = self._column(field)
        value = self._column(other) if isinstance(other, pa.Field) else self._terms.literal(other)
        if not pa.types.is_floating(field.type):
            return _COMPARE[kind](column, value)
        # Engines differ about NaN, and those that follow G1 trust a file's greatest value, which leaves NaN out: so
        # the plain comparison is only ever asked for what NaN never is.
        if kind in (exp.NEQ, exp.GT, exp.GTE):
            return ~self._compare(_OPPOSITE[kind], field, other)
        nan, value_nan = self._terms.is_nan(column), self._terms.is_nan(value)
        both = {exp.EQ: nan & value_nan, exp.LT: ~nan & value_nan, exp.LTE: (nan | ~nan) & value_nan}
        return (_COMPARE[kind](column, value) & ~nan & ~value_nan) | both[kind]

    def _like(self, field: Any, pattern: str) -> Any:
        if not (pa.types.is_string(field.type) or pa.types.is_large_string(field.type)):
            raise _refused(self._where, f"LIKE takes text, and {field.name!r} is {field.type}")
        if "\\" in re.sub(r"\\[\\%_]", "", pattern):
            raise _refused(self._where, f"in {pattern!r}, `\\` must stand before `%`, `_` or another `\\`")
        return self._terms.like(self._column(field), pattern)

    def _column(self, field: Any) -> Any:
        self._comparisons += 1
        if self._comparisons > _MOST:
            raise _refused(self._where, f"it has more than {_MOST} comparisons; `column IN (…)` counts as one")
        self._columns.add(field.name)
        return self._terms.column(field)

    def _field(self, node: Any) -> Any:
        node = node.unnest()
        if not isinstance(node, exp.Column):
            raise _refused(self._where, f"{node.sql()!r} is no column")
        name = ".".join(part.name for part in node.parts)
        # The parts of `a.b` are a table and a column to SQL; a column called `a.b` has one part, in quotes.
        found = [f for f in self._schema if f.name.lower() == name.lower()] if len(node.parts) == 1 else []
        if not found:
            quote = "; a name with a dot needs quotes" if len(node.parts) > 1 else ""
            there_are = ", ".join(self._schema.names)
            raise _refused(self._where, f"there is no column {name!r}; there are {there_are}{quote}")
        return found[0]

    def _literal(self, node: Any, field: Any) -> Any:
        return self._literals([node], field)[0]

    def _literals(self, nodes: Sequence[Any], field: Any) -> Any:
        """Literals in the type of the column that they are compared with (``pyarrow.Array``)."""
        texts = pa.array([self._text(node.unnest(), field) for node in nodes], pa.string())
        values, bad = convert(texts, field.type)
        if bad.any():
            raise self._unfit(texts.filter(pa.array(bad))[0].as_py(), field)
        return values

    def _text(self, node: Any, field: Any) -> str:
        t, type_ = pa.types, field.type
        if isinstance(node, exp.Cast) and node.to.this in exp.DataType.TEMPORAL_TYPES:
            node = node.this  # DATE '2020-01-01': what it is, the column knows
        if isinstance(node, exp.Literal) and node.is_string:
            return str(node.this)
        sign, number = ("-", node.this) if isinstance(node, exp.Neg) else ("", node)
        if isinstance(node, exp.Boolean):
            text, fits = str(node.this).lower(), t.is_boolean(type_)
        elif isinstance(number, exp.Literal) and not number.is_string:
            text, fits = sign + number.this, t.is_integer(type_) or t.is_floating(type_) or t.is_decimal(type_)
        else:
            raise _refused(self._where, f"{node.sql()!r} is no literal")
        if not fits:
            raise self._unfit(text, field)
        return text

    def _unfit(self, text: str, field: Any) -> ConfigurationError:
        is_text = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        hint = "; text is written in quotes" if is_text else ""
        return _refused(self._where, f"{text!r} is no {field.type}, the type of {field.name!r}{hint}")

    def _unsupported(self, node: Any) -> ConfigurationError:
        return _refused(self._where, f"{node.sql()!r} is not supported here")


def _refused(where: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        "unfit-filter",
        f"The filter {where!r} can't be used: {why}.",
        next="use columns, literals, =, <>, <, >, IN, BETWEEN, LIKE, IS NULL, AND, OR, NOT; or filter the result",
    )
