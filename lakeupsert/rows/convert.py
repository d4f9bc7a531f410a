"""Converts values to another type without losing anything.

Arrow's "safe" casts are not enough: some lose digits, fractions or hours without an error (comments below name each case).
Whole columns are cast at once. Single values are examined only if the cast of their column fails.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.rows.arrays import Column, Mask
from lakeupsert.rows.leaves import decode, leaf_types, rows_with
from lakeupsert.table.spec import TypeChange
from lakeupsert.table.types import is_binary, is_text, normalize

Converted = tuple[pa.Array, Mask]
"""Converted values, and which are bad: the type can't hold them, and they are null."""
_FAILURES = (pa.ArrowInvalid, pa.ArrowNotImplementedError)
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31, as days since 1970
_FORMS = {
    "int": r"^-?[0-9]+$",
    "float": r"^[+-]?([0-9.][0-9.eE+-]*$|(?i:inf|nan))",
    "decimal": r"^[+-]?[0-9.][0-9.eE+-]*$",
    "date": r"^\d{4}-\d{2}-\d{2}$",
    "timestamp": r"^\d{4}-\d{2}-\d{2}([T ]|$)",
}
"""Patterns that text must match to convert. They find most bad values before the slow search for single ones."""
_UUID = "(?i)^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$"
_HYPHENS = (8, 12, 16, 20)
"""Digits of a UUID that have a hyphen before them."""
_MOMENTS = ("date", "time", "timestamp")
_ZONED = r"^.{11}[^Z+-]*[Z+-]"  # looks for a zone behind the date, which has a `-` of its own


def convert(array: pa.Array, type_: pa.DataType) -> Converted:
    """Convert the values of ``array`` to ``type_``. n values in, n values out, and a mask of the bad ones, which become null.

    A value is bad if the type can't hold it exactly: a fraction in an integer, nanoseconds in microseconds, a time in a date, a
    number out of range, text that does not parse, text that is not UTF-8. Only text to float rounds to the nearest value. A float
    stands for the shortest decimal that reads back as the same float. Text and timestamps without a zone are UTC. A number never
    converts to a date, and a boolean never to a number.

    Checked by tests/property/test_conversion.py against a slow oracle that converts one value at a time.
    """
    array = decode(array)
    if array.null_count == len(array):
        return pa.nulls(len(array), type_), _none_bad(array)
    source, target = _family(array.type), _family(type_)
    if array.type.equals(type_, check_metadata=True):
        return _validate(array) if target in ("text", "nested") else (array, _none_bad(array))
    if isinstance(type_, pa.JsonType | pa.UuidType):
        stored, bad = convert(as_text(array), type_.storage_type)
        return pa.ExtensionArray.from_storage(type_, stored), bad
    if isinstance(array.type, pa.JsonType | pa.UuidType):
        return convert(as_text(array), type_)
    if source == target == "nested":
        if not array.type.equals(normalize(type_)):
            return _nested_to_nested(array, type_)
        array, bad = _validate(array)
        return array.cast(type_), bad
    step = _STEPS.get((source, target))
    return step(array, type_) if step else _all_bad(array, type_)


def convert_in_steps(array: pa.Array, changes: Sequence[TypeChange]) -> Converted:
    """Convert values by these retypes, one after the other. A value that one of them finds bad is bad, and null."""
    bad = _none_bad(array)
    for change in changes:
        # Narrower values first grow to the type of then, so that a float's text does not depend on when it was rewritten.
        grown = array if array.type.equals(change.before) else array.cast(change.before)
        array, unfit = convert(grown, change.after)
        bad |= unfit
    return array, bad


def as_text(array: pa.Array) -> pa.Array:
    """UUIDs and JSON of Arrow's extension types as text, UUIDs in lower case with hyphens; other values as they are."""
    if isinstance(array.type, pa.JsonType):
        return array.storage
    if not isinstance(array.type, pa.UuidType):
        return array
    stored = pc.fill_null(array.storage, bytes(16))
    digits = np.frombuffer(b"".join(stored.to_pylist()).hex().encode(), np.uint8).reshape(-1, 32)
    texts = np.insert(digits, _HYPHENS, ord("-"), axis=1).tobytes()
    text = pa.Array.from_buffers(pa.binary(36), len(array), [None, pa.py_buffer(texts)])
    return pc.if_else(array.is_valid(), text.cast(pa.binary()).cast(pa.string()), None)


def texts_like(texts: Sequence[str], type_: pa.DataType) -> list[str | None]:
    """For each text, the text that a column of ``type_`` gives for the same value; None if the type can't hold the value.

    A text that differs from its result can never equal a value of the column: a decimal(9,2) gives `1.00`, never `1`.
    """
    values, _ = convert(pa.array(texts, pa.string()), type_)
    return convert(values, pa.string())[0].to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types


READABLE_MOMENTS = "dates are of the years 1 to 9999, times from 00:00:00 to below 24:00:00"


def unreadable_moments(array: pa.Array) -> Mask:
    """Which values have, at any depth, a date, time or timestamp that is not one of the `READABLE_MOMENTS`.

    Arrow and Parquet hold them, but Python, Spark, Trino and others can't read them, and then not the whole column.
    """
    if not any(_family(type_) in _MOMENTS for type_ in leaf_types(array.type)):
        return _none_bad(array)
    return rows_with(array, _is_unreadable)


def _is_unreadable(array: pa.Array) -> Mask:
    family = _family(array.type)
    if family == "time":
        number = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
        return as_mask(pc.or_(pc.less(number, 0), pc.greater_equal(number, 86_400 * _PER_SECOND[array.type.unit])))
    return ~in_our_years(array) if family in _MOMENTS else _none_bad(array)


def as_mask(condition: Column) -> Mask:
    """Where a boolean column is true. Null counts as false."""
    if condition.null_count:  # with few rows, most of the time is the call itself
        condition = pc.fill_null(condition, False)
    mask: Mask = condition.to_numpy(zero_copy_only=False)
    return mask


# -- by families of types


def _family(type_: pa.DataType) -> str:
    t = pa.types
    for name, is_one in (
        ("text", is_text),
        ("int", t.is_integer),
        ("float", t.is_floating),
        ("decimal", t.is_decimal),
        ("date", t.is_date),
        ("timestamp", t.is_timestamp),
        ("bool", t.is_boolean),
        ("binary", is_binary),
        ("time", t.is_time),
        ("nested", t.is_nested),
    ):
        if is_one(type_):
            return name
    return "other"


def _cast(array: pa.Array, type_: pa.DataType) -> Converted:
    """Arrow's safe cast. If it fails, cast ever smaller parts until each bad value is found."""
    bad = _none_bad(array)
    try:
        return array.cast(type_), bad
    except _FAILURES:
        form = _FORMS.get(_family(type_)) if _family(array.type) == "text" else None
        if form:
            bad = as_mask(pc.invert(pc.match_substring_regex(array, form)))
    pieces, waiting = [], list(reversed(_parts(0, _with_nulls(array, bad))))
    while waiting:
        start, part = waiting.pop()
        try:
            pieces.append(part.cast(type_))
        except _FAILURES:
            if len(part) == 1:
                bad[start] = True
                pieces.append(pa.nulls(1, type_))
            else:
                waiting += reversed(_parts(start, part))
    return pa.concat_arrays(pieces), bad


def _nested_to_nested(array: pa.Array, type_: pa.DataType) -> Converted:
    """Convert child by child. Missing struct fields become null. An extra field would be lost, so then all values are bad,
    unless it has the null type."""
    t = pa.types
    if t.is_struct(array.type) and t.is_struct(type_):
        names = [f.name for f in array.type]
        valued = {f.name for f in array.type if not t.is_null(f.type)}
        if len(set(names)) < len(names) or not valued <= {f.name for f in type_}:
            return _all_bad(array, type_)
        children = dict(zip(names, array.flatten(), strict=True))  # unlike field(i), carries the struct's own nulls
        absent = pa.nulls(len(array))
        pieces = [convert(children.get(f.name, absent), f.type) for f in type_]
        bad = np.logical_or.reduce([part_bad for _, part_bad in pieces])
        out = pa.StructArray.from_arrays([part for part, _ in pieces], fields=list(type_), mask=array.is_null())
        return _result(out, bad)
    for is_one, kind in ((t.is_list, pa.ListArray), (t.is_large_list, pa.LargeListArray), (t.is_map, pa.MapArray)):
        if is_one(array.type) and is_one(type_):
            array = array.take(pa.array(np.arange(len(array))))  # drops child values that no list of this slice uses
            if kind is pa.MapArray:
                pieces = [convert(array.keys, type_.key_type), convert(array.items, type_.item_type)]
            else:
                pieces = [convert(array.values, type_.value_type)]
            ends = array.offsets.to_numpy()
            owner = np.repeat(np.arange(len(array)), np.diff(ends))
            bad = _none_bad(array)
            bad[owner[np.logical_or.reduce([part_bad for _, part_bad in pieces])]] = True
            if bad.any():  # a map's key can't be null, not even in a value that is replaced by null
                return _nested_to_nested(_with_nulls(array, bad), type_)[0], bad
            begins = pa.array(ends, mask=np.append(~as_mask(array.is_valid()), False))
            return kind.from_arrays(begins, *(part for part, _ in pieces), type=type_), bad
    return _all_bad(array, type_)


def _validate(array: pa.Array) -> Converted:
    """The array itself. Values are bad if they contain text that is not UTF-8, which the Parquet reader accepts."""
    bad, waiting = _none_bad(array), [(0, array)]
    while waiting:
        start, part = waiting.pop()
        try:
            part.validate(full=True)
        except pa.ArrowInvalid:
            if len(part) == 1:
                bad[start] = True
            else:  # a slice of lists keeps the values of all lists, and their faults
                waiting += [(at, some.take(pa.array(np.arange(len(some))))) for at, some in _parts(start, part)]
    return _with_nulls(array, bad), bad


def _parts(start: int, array: pa.Array) -> list[tuple[int, pa.Array]]:
    """Sixteenths of an array. A failing cast costs a microsecond per bad value, and halves would repeat it more often."""
    size = -(-len(array) // 16)
    return [(start + at, array.slice(at, size)) for at in range(0, len(array), size)]


def _via_text(array: pa.Array, type_: pa.DataType) -> Converted:
    text, unreadable = _cast(array, pa.string())
    out, bad = convert(text, type_)
    return out, bad | unreadable


def _float_to_float(array: pa.Array, type_: pa.DataType) -> Converted:
    out = array.cast(type_)  # silently rounds, and turns values that are too large into infinity
    before, after = array.cast(pa.float64()), out.cast(pa.float64())
    return _result(out, as_mask(pc.and_not(pc.not_equal(before, after), pc.is_nan(before))))


def _decimal_to_decimal(array: pa.Array, type_: pa.DataType) -> Converted:
    array = _wide(array)
    digits = type_.precision - type_.scale
    if array.type.precision - array.type.scale <= digits:
        return _cast(array, type_)
    # pyarrow 26 silently overflows 128 bits when it rescales upwards: 123456789012345678901234567890 as decimal(38,18) becomes
    # 46509284486016680345.84. So values that are too large are removed first.
    limit = pa.scalar(Decimal(10**digits), array.type)
    too_large = as_mask(pc.greater_equal(pc.abs(array), limit))
    out, bad = _cast(_with_nulls(array, too_large), type_)
    return out, bad | too_large


def _decimal_to_int(array: pa.Array, type_: pa.DataType) -> Converted:
    out, bad = _cast(_wide(array), type_)
    if bad.any():  # pyarrow 26 reports "data loss" for decimal(38,18) 18446744073709551615 to uint64: try again as text
        text = _with_nulls(array.cast(pa.string()), ~bad)
        again, bad = convert(pc.replace_substring_regex(text, r"\.0+$", ""), type_)
        out = pc.coalesce(out, again)
    return out, bad


def _decimal_to_float(array: pa.Array, type_: pa.DataType) -> Converted:
    # Through text: pyarrow 26 casts decimal 8.70 to the double 8.700000000000001.
    array = _wide(array)
    out, bad = _via_text(array, type_)
    back, lost = _via_text(out, array.type)
    return _result(out, bad | lost | as_mask(pc.not_equal(array, back)))


def _text_to_int(array: pa.Array, type_: pa.DataType) -> Converted:
    out, bad = _cast(array, type_)
    hexadecimal = pc.or_(pc.starts_with(array, "0x"), pc.starts_with(array, "0X"))  # Arrow reads 0x1F as 31
    return _result(out, bad | as_mask(hexadecimal))


def _text_to_float(array: pa.Array, type_: pa.DataType) -> Converted:
    out, bad = _cast(array, type_)
    too_large = as_mask(pc.is_inf(out.cast(pa.float64())))
    if too_large.any():  # 1e999 is out of range; "inf" is meant to be infinite
        too_large &= ~as_mask(pc.match_substring(array, "inf", ignore_case=True))
    return _result(out, bad | too_large)


def _text_to_decimal(array: pa.Array, type_: pa.DataType) -> Converted:
    array = pc.replace_substring_regex(array, r"^([+-]?[0.]+)[eE][+-]?\d+$", r"\1")  # pyarrow 26 finds 0E40 too large
    out, bad = _cast(array, type_)
    # pyarrow 26 wraps around at 128 bits when it rescales, and loses very small values: "1e30" as decimal(38,18) becomes
    # 18960114910927365649.47, "4e-68" becomes 0. A double is precise enough to detect both.
    about, unfit = _cast(array, pa.float64())
    distance = pc.abs(pc.subtract(_wide(out).cast(pa.float64()), about))
    return _result(out, bad | unfit | as_mask(pc.greater(distance, pc.multiply(pc.abs(about), 1e-9))))


def _text_to_bool(array: pa.Array, type_: pa.DataType) -> Converted:
    words = pa.array(["false", "true"], array.type)  # Arrow's cast also accepts 0 and 1
    place = pc.index_in(pc.utf8_lower(array), words)
    return pc.equal(place, 1), as_mask(pc.and_(pc.is_null(place), array.is_valid()))


def _text_to_date(array: pa.Array, type_: pa.DataType) -> Converted:
    out, bad = _cast(array, type_)
    return _result(out, bad | ~in_our_years(out))


def _text_to_timestamp(array: pa.Array, type_: pa.DataType) -> Converted:
    zoned_type, plain_type = pa.timestamp(type_.unit, "UTC"), pa.timestamp(type_.unit)
    # A cast with the wrong form would fail for every value.
    first = array.slice(pc.index(array.is_valid(), True).as_py(), 1)
    has_zone = as_mask(pc.match_substring_regex(first, _ZONED)).any()
    with suppress(pa.ArrowInvalid):
        out = array.cast(zoned_type if has_zone else plain_type).view(plain_type)
        return _result(out.view(type_), ~in_our_years(out))
    # Some texts have a zone and some have none, or texts have more digits than the unit. Extra zeros are harmless.
    text = pc.replace_substring_regex(array, r"(\.\d*?)0+(\D.*)?$", r"\1\2")
    text = pc.replace_substring_regex(text, r"\.(\D.*)?$", r"\1")
    zoned = as_mask(pc.match_substring_regex(text, _ZONED))
    with_zone, bad = _cast(_with_nulls(text, ~zoned), zoned_type)
    without_zone, unfit = _cast(_with_nulls(text, zoned), plain_type)
    out = pc.coalesce(with_zone.view(plain_type), without_zone)
    return _result(out.view(type_), bad | unfit | ~in_our_years(out))


def _text_to_time(array: pa.Array, type_: pa.DataType) -> Converted:
    moments, bad = _cast(pc.binary_join_element_wise("1970-01-01T", array, ""), pa.timestamp(type_.unit))
    bad |= ~as_mask(pc.or_kleene(pc.match_substring(array, ":"), array.is_null()))  # Arrow reads "10" as ten o'clock
    return _result(moments.cast(type_), bad)


def _text_to_binary(array: pa.Array, type_: pa.DataType) -> Converted:
    is_uuid = pc.match_substring_regex(array, _UUID) if type_ == pa.binary(16) else None
    if is_uuid is None or not as_mask(is_uuid).any():
        return _cast(array, type_)
    parsed = [bytes.fromhex(text.replace("-", "")) for text in array.filter(is_uuid).to_pylist()]
    others, bad = _cast(_with_nulls(array, as_mask(is_uuid)), type_)
    return pc.replace_with_mask(others, pc.fill_null(is_uuid, False), pa.array(parsed, type_)), bad


def _to_timestamp(array: pa.Array, type_: pa.DataType) -> Converted:
    out, bad = _cast(_utc(array) if pa.types.is_timestamp(array.type) else array, pa.timestamp(type_.unit))
    return out.view(type_), bad


def _timestamp_to_date(array: pa.Array, type_: pa.DataType) -> Converted:
    array = _utc(array)
    out, bad = _cast(array, type_)  # silently cuts off the time, and wraps around in far years
    back, lost = _cast(out, array.type)
    return _result(out, bad | lost | as_mask(pc.not_equal(array, back)))


def _moment_to_text(array: pa.Array, type_: pa.DataType) -> Converted:
    far = ~in_our_years(array)  # Arrow writes "<value out of range>"
    out, bad = _cast(_with_nulls(array, far), type_)
    return out, bad | far


_CASTS = {
    "int": ("int", "float", "text"),
    "float": ("int", "text"),
    "decimal": ("text",),
    "bool": ("text",),
    "text": ("text",),
    "binary": ("binary", "text"),
    "date": ("date",),
    "time": ("time", "text"),
}
"""Pairs of families for which Arrow's safe cast is right."""
_STEPS: dict[tuple[str, str], Callable[[pa.Array, pa.DataType], Converted]] = {
    **{(source, target): _cast for source, targets in _CASTS.items() for target in targets},
    ("int", "decimal"): _via_text,  # Arrow requires room for every int64, whatever the values are
    ("float", "float"): _float_to_float,
    ("float", "decimal"): _via_text,  # Arrow rounds
    ("decimal", "decimal"): _decimal_to_decimal,
    ("decimal", "int"): _decimal_to_int,
    ("decimal", "float"): _decimal_to_float,
    ("text", "int"): _text_to_int,
    ("text", "float"): _text_to_float,
    ("text", "decimal"): _text_to_decimal,
    ("text", "bool"): _text_to_bool,
    ("text", "date"): _text_to_date,
    ("text", "timestamp"): _text_to_timestamp,
    ("text", "time"): _text_to_time,
    ("text", "binary"): _text_to_binary,
    ("date", "timestamp"): _to_timestamp,
    ("date", "text"): _moment_to_text,
    ("timestamp", "timestamp"): _to_timestamp,
    ("timestamp", "date"): _timestamp_to_date,
    ("timestamp", "text"): _moment_to_text,
}


# -- small things


def _none_bad(array: pa.Array) -> Mask:
    return np.zeros(len(array), bool)


def _all_bad(array: pa.Array, type_: pa.DataType) -> Converted:
    return pa.nulls(len(array), type_), as_mask(array.is_valid())


def _result(out: pa.Array, bad: Mask) -> Converted:
    return _with_nulls(out, bad), bad


def _with_nulls(array: pa.Array, bad: Mask) -> pa.Array:
    """``array`` with null for each bad value."""
    if not bad.any():
        return array
    return array.take(pa.array(np.arange(len(array)), mask=bad))


def _wide(array: pa.Array) -> pa.Array:
    """A decimal with at least 128 bits. Narrow ones lack kernels, and pyarrow 26 can't cast decimal32 8.00 to int64."""
    type_ = array.type
    return array if type_.bit_width >= 128 else array.cast(pa.decimal128(type_.precision, type_.scale))


def _utc(array: pa.Array) -> pa.Array:
    return array.view(pa.timestamp(array.type.unit))


def in_our_years(array: pa.Array) -> Mask:
    """Values in the years 1 to 9999, and nulls. Other tools can't read dates beyond these years."""
    type_ = array.type
    if pa.types.is_date32(type_):
        first, last, number = _FIRST_DAY, _LAST_DAY, array.view(pa.int32())
    else:
        per_second = 1000 if pa.types.is_date64(type_) else _PER_SECOND[type_.unit]
        first, last = _FIRST_DAY * 86_400 * per_second, (_LAST_DAY + 1) * 86_400 * per_second - 1
        first, last, number = max(first, -(2**63)), min(last, 2**63 - 1), array.view(pa.int64())
    return ~as_mask(pc.or_(pc.less(number, first), pc.greater(number, last)))
