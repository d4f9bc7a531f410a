"""Types for columns that come as text, and one type for a column that several files have."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.rows.convert import convert, true
from lakeupsert.table.types import widened

_DATE = r"\d{4}-\d{2}-\d{2}"
_TIME = r"[T ]\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?"
_ZONE = r"(Z|[+-]\d{2}(:?\d{2})?)"
_ZONED = pa.timestamp("us", "UTC")
_INT = r"-?(0|[1-9]\d{0,17})"  # not 0042, which is a code; not 19 digits, which is an id that may pass int64
_PATTERNS = {
    pa.bool_(): r"(?i)(true|false)",
    pa.int64(): _INT,
    pa.float64(): rf"({_INT}\.?|-?(0|[1-9]\d{{0,17}})?\.\d+)([eE][+-]?\d+)?",
    pa.date32(): _DATE,
    _ZONED: _DATE + _TIME + _ZONE,
    pa.timestamp("us"): f"{_DATE}({_TIME}{_ZONE}?)?",
}
_NUMBERS = [pa.int64(), pa.float64()]
TEMPORAL = [pa.date32(), _ZONED, pa.timestamp("us")]
FROM_TEXT = [pa.bool_(), *_NUMBERS, *TEMPORAL]


def inferred(text: Any, candidates: list[Any]) -> Any:
    """The first of ``candidates`` that every value of ``text`` is written as and converts to; string where none is.

    Null where there are no values. ``candidates`` are of `FROM_TEXT`, in its order: an earlier one is the narrower.
    """
    text = text.drop_null()
    if not len(text):
        return pa.null()
    for type_ in candidates:
        # The first value rules out most types, before all values are looked at.
        if _written_as(text.slice(0, 1), type_) and _written_as(text, type_) and not convert(text, type_)[1].any():
            return type_
    return pa.string()


def fitting(text: Any, type_: Any) -> Any:
    """A mask (numpy) of the values of ``text`` that are written as a type of `FROM_TEXT` and convert to it."""
    written = true(pc.match_substring_regex(text, f"^({_PATTERNS[type_]})$"))
    return written & ~convert(text, type_)[1]


def _written_as(text: Any, type_: Any) -> bool:
    return bool(np.all(true(pc.match_substring_regex(text, f"^({_PATTERNS[type_]})$"))))


def unify(a: Any, b: Any, typed: bool) -> Any:
    """One type for a column that is ``a`` in one place and ``b`` in another; the order matters only where ``typed``.

    Typed are Parquet files: where nothing holds both, ``a`` stays, and values of ``b`` that don't convert go to
    quarantine. Text has no types of its own: where nothing holds both, it is what it was, text.
    """
    if pa.types.is_null(a) or pa.types.is_null(b):
        return b if pa.types.is_null(a) else a
    if not typed and pa.types.is_struct(a) and pa.types.is_struct(b):
        both = {f.name: f.type for f in a}
        for f in b:
            both[f.name] = unify(both.get(f.name, pa.null()), f.type, typed)
        return pa.struct(list(both.items()))
    if not typed and pa.types.is_list(a) and pa.types.is_list(b):
        return pa.list_(unify(a.value_type, b.value_type, typed))
    for wider, narrower in ((widened(a, b), a), (widened(b, a), b)):
        if not wider.equals(narrower):
            return wider
    if a.equals(b):
        return a
    kinds = {_kind(a), _kind(b)}
    if kinds == {"int", "float"}:
        return pa.float64()
    if typed:
        return a
    # A zone holds for a column only where every value has one.
    return pa.timestamp("us") if kinds <= {"date", "timestamp"} else pa.string()


def _kind(type_: Any) -> str:
    t = pa.types
    kinds = {"int": t.is_integer, "float": t.is_floating, "date": t.is_date, "timestamp": t.is_timestamp}
    return next((kind for kind, is_one in kinds.items() if is_one(type_)), str(type_))


def without_nulls(type_: Any) -> Any:
    """``type_`` with string for every null type in it: what a column is where no file had a value."""
    t = pa.types
    if t.is_null(type_):
        return pa.string()
    if t.is_struct(type_):
        return pa.struct([(f.name, without_nulls(f.type)) for f in type_])
    return pa.list_(without_nulls(type_.value_type)) if t.is_list(type_) else type_
