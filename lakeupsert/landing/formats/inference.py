"""Infer the type of a column of text, and unify the types that several files have for one column."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.rows.arrays import Column, Mask
from lakeupsert.rows.convert import Converted, as_mask, convert
from lakeupsert.table.types import widen

_DATE = r"\d{4}-\d{2}-\d{2}"
_TIME = r"[T ]\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?"
_ZONE = r"(Z|[+-]\d{2}(:?\d{2})?)"
_ZONED = pa.timestamp("us", "UTC")
_INT = r"-?(0|[1-9]\d{0,17})"  # not 0042, which is a code; not 19 digits, which is an id that may pass int64
_PATTERNS = {
    pa.bool_(): r"(?i)(true|false)",
    pa.int64(): _INT,
    pa.float64(): rf"({_INT}\.?|-?(0|[1-9]\d{{0,17}})?\.\d+)([eE][+-]?\d+)?",
    pa.date32(): f"{_DATE}Z?",
    _ZONED: _DATE + _TIME + _ZONE,
    pa.timestamp("us"): f"{_DATE}({_TIME}{_ZONE}?)?",
}
_NUMBERS = [pa.int64(), pa.float64()]
TEMPORAL = [pa.date32(), _ZONED, pa.timestamp("us")]
FROM_TEXT = [pa.bool_(), *_NUMBERS, *TEMPORAL]


_NUMBER_WITH = r"^([+-]?\d*)\{}(\d*(?:[eE][+-]?\d+)?)$"
THOUSANDS = r"[+-]?[1-9]\d{0,2}(?:\.\d{3})+,\d*"
"""1.234,50: here the points can only separate thousands."""


def with_points(text: Column) -> Column:
    """Text in which numbers have a decimal comma, with points in these numbers. 1.234,50 becomes 1234.50. 1.5 and 1.234,
    which are no numbers there, become 1,5 and 1,234."""
    grouped = pc.match_substring_regex(text, f"^{THOUSANDS}$")
    if as_mask(grouped).any():
        text = pc.if_else(grouped, pc.replace_substring(text, ".", ""), text)
    with_point = as_mask(pc.match_substring_regex(text, _NUMBER_WITH.format(".")))
    pointed = pc.replace_substring_regex(text, _NUMBER_WITH.format(","), r"\1.\2")
    if not with_point.any():
        return pointed
    return pc.if_else(pa.array(with_point), pc.replace_substring(text, ".", ","), pointed)


def convert_text(text: pa.Array, type_: pa.DataType) -> Converted:
    """`convert` for text of a landing file: dates and times may end in Z, as Debezium writes them (isostring), and booleans may
    be t and f, as PostgreSQL writes them."""
    if (pa.types.is_date(type_) or pa.types.is_time(type_)) and as_mask(pc.ends_with(text, "Z")).any():
        text = pc.replace_substring_regex(text, r"([0-9])Z$", r"\1")
    if pa.types.is_boolean(type_):
        text = pc.replace_substring_regex(pc.replace_substring_regex(text, "^t$", "true"), "^f$", "false")
    return convert(text, type_)


def infer_type(text: Column, candidates: Sequence[pa.DataType]) -> pa.DataType:
    """The first of ``candidates`` that every value of ``text`` is written as and converts to; string if there is none.

    The null type if there are no values. ``candidates`` are types of `FROM_TEXT`, in its order: narrower types first.
    """
    text = text.drop_null()
    if not len(text):
        return pa.null()
    for type_ in candidates:
        # The first value rules out most types, before all values are looked at.
        if _written_as(text.slice(0, 1), type_) and _written_as(text, type_) and not convert_text(text, type_)[1].any():
            return type_
    return pa.string()


def fits(text: Column, type_: pa.DataType) -> Mask:
    """Which values of ``text`` are written as a type of `FROM_TEXT` and convert to it."""
    fit: Mask = as_mask(pc.match_substring_regex(text, f"^({_PATTERNS[type_]})$")) & ~convert_text(text, type_)[1]
    return fit


def _written_as(text: Column, type_: pa.DataType) -> bool:
    return bool(np.all(as_mask(pc.match_substring_regex(text, f"^({_PATTERNS[type_]})$"))))


def unify(a: pa.DataType, b: pa.DataType, *, typed: bool) -> pa.DataType:
    """One type for a column that is ``a`` in one file and ``b`` in another. The order matters only for ``typed`` files.

    If no type holds both: for ``typed`` files ``a`` stays, and values of ``b`` that don't convert go to quarantine; for text
    files, which have no types of their own, the column is text.
    """
    if pa.types.is_null(a) or pa.types.is_null(b):
        return b if pa.types.is_null(a) else a
    if not typed and pa.types.is_struct(a) and pa.types.is_struct(b):
        both = {f.name: f.type for f in a}
        for f in b:
            both[f.name] = unify(both.get(f.name, pa.null()), f.type, typed=typed)
        return pa.struct(list(both.items()))
    if not typed and pa.types.is_list(a) and pa.types.is_list(b):
        return pa.list_(unify(a.value_type, b.value_type, typed=typed))
    for wider, narrower in ((widen(a, b), a), (widen(b, a), b)):
        if not wider.equals(narrower):
            return wider
    if a.equals(b):
        return a
    kinds = {_kind(a), _kind(b)}
    if kinds == {"int", "float"}:
        return pa.float64()
    if typed:
        return a
    # A column has a zone only if every value has one.
    return pa.timestamp("us") if kinds <= {"date", "timestamp"} else pa.string()


def _kind(type_: pa.DataType) -> str:
    t = pa.types
    kinds = {"int": t.is_integer, "float": t.is_floating, "date": t.is_date, "timestamp": t.is_timestamp}
    return next((kind for kind, is_one in kinds.items() if is_one(type_)), str(type_))


def known_part(type_: pa.DataType) -> pa.DataType | None:
    """``type_`` without fields that have the null type: no row has a value there. None if nothing is left.

    A list without items, and an object of which no field has a value, are values all the same. So that they can be stored, their
    items and fields are text.
    """
    t = pa.types
    if t.is_null(type_):
        return None
    if t.is_struct(type_):
        fields = [(f.name, known) for f in type_ if (known := known_part(f.type)) is not None]
        return pa.struct(fields) if fields else without_nulls(type_)
    return pa.list_(known_part(type_.value_type) or pa.string()) if t.is_list(type_) else type_


def without_nulls(type_: pa.DataType) -> pa.DataType:
    """``type_`` with string for every null type in it: the type of a column that no file had a value for."""
    t = pa.types
    if t.is_null(type_):
        return pa.string()
    if t.is_struct(type_):
        return pa.struct([(f.name, without_nulls(f.type)) for f in type_])
    return pa.list_(without_nulls(type_.value_type)) if t.is_list(type_) else type_
