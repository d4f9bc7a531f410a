"""`convert` agrees with an oracle that looks at one value at a time; CSV is cut into records as its writers mean it."""

import csv
import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, InvalidOperation
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lakeupsert.config import Reading
from lakeupsert.landing.formats import blocks, csvfile, records
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.landing.formats.inference import FROM_TEXT, infer_type, unify
from lakeupsert.rows.convert import convert
from tests.harness.rounds import TIMES

EXACT = Context(prec=200)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
FIRST, LAST = date(1, 1, 1), date(9999, 12, 31)


@dataclass(frozen=True)
class Bad:
    """The oracle's word for a value that the type does not hold."""


BAD = Bad()

# ---------------------------------------------------------------- the oracle


def oracle(value: Any, source: Any, target: Any) -> Any:
    """A value of type ``source`` in type ``target``, or `BAD`."""
    if value is None:
        return None
    t = pa.types
    if t.is_string(source):
        return from_text(value, target)
    number = as_number(value, source)
    if t.is_integer(target) and isinstance(value, float) and math.isfinite(value):
        return to_exact(Decimal(value), target)  # what it is, and not what it prints
    if number is None:
        return from_moment(value, source, target)
    if t.is_integer(target) or t.is_decimal(target):
        return to_exact(number, target)
    if t.is_floating(target):
        return to_float(value, number, source, target)
    return BAD


def as_number(value: Any, source: Any) -> Any:
    """The exact number of a numeric value (a float means its shortest decimal), or the float that no number equals."""
    if isinstance(value, float):
        single = pa.types.is_float32(source)
        return Decimal(str(np.float32(value)) if single else repr(value)) if math.isfinite(value) else value
    return Decimal(value) if isinstance(value, int | Decimal) and not isinstance(value, bool) else None


def to_exact(number: Any, target: Any) -> Any:
    if isinstance(number, float):
        return BAD
    if pa.types.is_decimal(target):
        digits, scale = target.precision, target.scale
        unscaled = EXACT.multiply(number, Decimal(10) ** scale)
        fits = unscaled == EXACT.to_integral_value(unscaled) and unscaled.copy_abs() < Decimal(10) ** digits
        return Decimal(int(unscaled)).scaleb(-scale, EXACT) if fits else BAD
    unsigned, bits = pa.types.is_unsigned_integer(target), target.bit_width
    low, high = (0, 2**bits) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return int(number) if number == EXACT.to_integral_value(number) and low <= number < high else BAD


def to_float(value: Any, number: Any, source: Any, target: Any) -> Any:
    near = single(value) if pa.types.is_float32(target) else float(value)
    if pa.types.is_integer(source):
        return near if abs(value) <= (2**24 if pa.types.is_float32(target) else 2**53) else BAD
    if pa.types.is_decimal(source):
        shortest = as_number(near, target)
        return near if shortest == number else BAD
    return near if near == value or math.isnan(value) else BAD


def single(value: Any) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def from_text(text: str, target: Any) -> Any:
    t = pa.types
    if t.is_integer(target):
        form = r"[0-9]+" if t.is_unsigned_integer(target) else r"-?[0-9]+"
        return to_exact(Decimal(text), target) if re.fullmatch(form, text) else BAD
    if t.is_floating(target):
        if re.fullmatch(r"[+-]?(nan|inf|infinity)", text, re.IGNORECASE):
            return float(text)
        ok = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text)
        return float(text) if ok and math.isfinite(float(text)) else BAD
    if t.is_decimal(target):
        if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
            return BAD
        try:
            return to_exact(EXACT.create_decimal(text), target)
        except InvalidOperation:
            return BAD
    if t.is_boolean(target):
        return {"true": True, "false": False}.get(text.lower(), BAD)
    if t.is_date(target):
        return a_date(text)
    return a_timestamp(text, target)


def a_date(text: str) -> Any:
    try:
        return date.fromisoformat(text) if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text) else BAD
    except ValueError:
        return BAD


def a_timestamp(text: str, target: Any) -> Any:
    """Ticks since 1970, UTC."""
    parts = re.fullmatch(
        r"([0-9-]{10})(?:[T ]([0-9]{2})(?::([0-9]{2})(?::([0-9]{2})(?:\.([0-9]*))?)?)?"
        r"(Z|[+-][0-9]{2}(?::?[0-9]{2})?)?)?",
        text,
    )
    day = a_date(parts[1]) if parts else BAD
    if parts is None or day is BAD:
        return BAD
    hour, minute, second = (int(p or 0) for p in (parts[2], parts[3], parts[4]))
    zone = parts[6]
    offset = 0
    if zone and zone != "Z":
        hours, minutes = int(zone[1:3]), int(zone[3:].strip(":") or 0)
        if hours > 23 or minutes > 59:
            return BAD
        offset = (hours * 60 + minutes) * 60 * (-1 if zone[0] == "-" else 1)
    if hour > 23 or minute > 59 or second > 59:
        return BAD
    fraction = (parts[5] or "").rstrip("0")
    seconds = (day - date(1970, 1, 1)).days * 86_400 + hour * 3600 + minute * 60 + second - offset
    exact = seconds * 10**9 + int(fraction.ljust(9, "0")) if len(fraction) <= 9 else None
    return BAD if exact is None else to_ticks(exact, target, years=True)


def to_ticks(nanoseconds: int, target: Any, *, years: bool = False) -> Any:
    ticks, rest = divmod(nanoseconds, 10**9 // PER_SECOND[target.unit])
    first, last = ((d - date(1970, 1, 1)).days * 86_400 * 10**9 for d in (FIRST, LAST))
    in_years = first <= nanoseconds < last + 86_400 * 10**9
    return ticks if not rest and -(2**63) <= ticks < 2**63 and (in_years or not years) else BAD


def from_moment(value: Any, source: Any, target: Any) -> Any:
    """``value`` is a date, or the ticks of a timestamp wrapped in a tuple."""
    t = pa.types
    if not t.is_date(target) and not t.is_timestamp(target):
        return BAD
    if isinstance(value, tuple):
        nanoseconds = value[0] * (10**9 // PER_SECOND[source.unit])
        if t.is_timestamp(target):
            return to_ticks(nanoseconds, target)
        days, rest = divmod(nanoseconds, 86_400 * 10**9)
        return days if not rest and -(2**31) <= days < 2**31 else BAD
    return value if t.is_date(target) else to_ticks((value - date(1970, 1, 1)).days * 86_400 * 10**9, target)


# ---------------------------------------------------------------- strategies

INTEGERS = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]
DECIMALS = [pa.decimal128(p, s) for p, s in ((4, 1), (12, 2), (18, 0), (38, 18), (38, 0))] + [pa.decimal256(60, 20)]
TIMESTAMPS = [pa.timestamp(unit, zone) for unit in PER_SECOND for zone in (None, "UTC", "Asia/Tokyo")]
TARGETS = [*INTEGERS, pa.float32(), pa.float64(), *DECIMALS, pa.bool_(), pa.date32(), *TIMESTAMPS]

wide_integers = st.one_of(
    st.integers(-300, 300), st.integers(-(2**65), 2**65), st.sampled_from([2**24, 2**53, 2**53 + 1])
)
plain_numbers = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=2)
digits = st.text("0123456789", max_size=45)
written_numbers = st.one_of(
    plain_numbers.map(str),
    wide_integers.map(str),
    st.floats(width=64).map(repr),
    st.builds("{}{}.{}".format, st.sampled_from(["", "-", "+"]), digits, digits),
    st.builds("{}e{}".format, st.integers(1, 10**20), st.integers(-45, 45)),
    st.text("0123456789-+.eExX infa", max_size=7),
)
a_day = st.dates(FIRST, LAST).map(str)
a_time = st.one_of(
    st.times().map(str),
    st.builds("{:02}:{:02}".format, st.integers(0, 25), st.integers(0, 61)),
    st.builds("10:11:12.{}".format, st.text("01290", max_size=11)),
)
a_zone = st.sampled_from(["", "", "Z", "+02:00", "-1130", "+05", "+24:00", "z", " UTC"])
written_moments = st.one_of(
    a_day,
    st.builds("{}{}{}{}".format, a_day, st.sampled_from("T "), a_time, a_zone),
    st.text("0123-T: Z", max_size=12),
)
texts = st.one_of(
    written_numbers, written_moments, st.sampled_from(["", "true", "FALSE", "True", "t", "0x1F", "é", " 1", "1 "])
)


def of_type(type_: Any) -> st.SearchStrategy[Any]:
    t = pa.types
    if t.is_integer(type_):
        low, high = (
            (0, 2**type_.bit_width)
            if t.is_unsigned_integer(type_)
            else (-(2 ** (type_.bit_width - 1)), 2 ** (type_.bit_width - 1))
        )
        return st.one_of(st.integers(max(low, -300), min(high - 1, 300)), st.integers(low, high - 1))
    if t.is_floating(type_):
        return st.one_of(st.floats(width=type_.bit_width), st.integers(-1000, 1000).map(lambda i: single(i / 4)))
    if t.is_decimal(type_):
        unscaled = st.one_of(
            st.integers(-(10**4), 10**4), st.integers(-(10**type_.precision) + 1, 10**type_.precision - 1)
        )
        return unscaled.filter(lambda i: abs(i) < 10**type_.precision).map(
            lambda i: Decimal(i).scaleb(-type_.scale, EXACT)
        )
    if t.is_date(type_):
        return st.dates(FIRST, LAST)
    if t.is_timestamp(type_):
        day = 86_400 * PER_SECOND[type_.unit]
        ticks = st.one_of(
            st.integers(-(2**63), 2**63 - 1),
            st.integers(-(10**5), 10**5).map(lambda d: d * day),
            st.integers(-(10**10), 10**10),
        )
        return ticks.filter(lambda i: -(2**63) <= i < 2**63).map(lambda i: (i,))
    return texts


SOURCES = [pa.string(), *INTEGERS, pa.float32(), pa.float64(), *DECIMALS, pa.date32(), *TIMESTAMPS]


def array_of(values: list[Any], type_: Any) -> Any:
    if pa.types.is_timestamp(type_):
        return pa.array([v and v[0] for v in values], pa.int64()).view(type_)
    return pa.array(values, type_)


def values_of(array: Any) -> list[Any]:
    """As the oracle tells them: timestamps as ticks."""
    return (array.view(pa.int64()) if pa.types.is_timestamp(array.type) else array).to_pylist()


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, float):
        return found == expected or (math.isnan(found) and math.isnan(expected))
    return type(found) is type(expected) and found == expected


def check(values: list[Any], source: Any, target: Any) -> None:
    out, bad = convert(array_of(values, source), target)
    assert out.type.equals(target)
    out.validate(full=True)
    expected = [oracle(v, source, target) for v in values]
    if pa.types.is_date(target):
        expected = [date(1970, 1, 1) + timedelta(e) if isinstance(e, int) and abs(e) < 700_000 else e for e in expected]
    assert bad.tolist() == [e is BAD for e in expected], (values, source, target)
    if pa.types.is_date(target):
        return check_dates(out, expected)
    for value, found, right in zip(values, values_of(out), expected, strict=True):
        assert same(found, None if right is BAD else right), (value, source, target)
    return None


def check_dates(out: Any, expected: list[Any]) -> None:
    days = [(e - date(1970, 1, 1)).days if isinstance(e, date) else None if e is BAD else e for e in expected]
    assert out.view(pa.int32()).to_pylist() == days


# ---------------------------------------------------------------- the properties


@pytest.mark.few(8)
@pytest.mark.parametrize("source", SOURCES, ids=str)
@settings(max_examples=6 * TIMES, deadline=None)
@given(data=st.data())
def test_convert_agrees_with_the_oracle(source: Any, data: st.DataObject) -> None:
    target = data.draw(st.sampled_from(TARGETS))
    values = data.draw(st.lists(st.one_of(st.none(), of_type(source)), max_size=40))
    if pa.types.is_string(source) and pa.types.is_float32(target):
        return  # the oracle would round twice
    check(values, source, target)


@pytest.mark.few(8)
@pytest.mark.parametrize("target", [t for t in TARGETS if t != pa.float32()], ids=str)
@settings(max_examples=6 * TIMES, deadline=None)
@given(values=st.lists(st.one_of(st.none(), texts), max_size=40))
@example(["-0", "00", None, "0x1F", "1", "0E40", "-.0e-9", ".E1"])
def test_text_agrees_with_the_oracle(target: Any, values: list[str | None]) -> None:
    check(values, pa.string(), target)


@pytest.mark.few(40)
@pytest.mark.parametrize(
    ("values", "source", "target"),
    [
        (
            ["123456789012345678901234567890", "1e30", "1e20", "99999999999999999999.5"],
            pa.string(),
            pa.decimal128(38, 18),
        ),
        ([Decimal("123456789012345678901234567890")], pa.decimal128(38, 0), pa.decimal128(38, 18)),
        ([Decimal("8.70"), Decimal("0.10")], pa.decimal128(12, 2), pa.float64()),
        ([Decimal(2**64 - 1)], pa.decimal128(38, 18), pa.uint64()),
        ([8.7, 8.705, 1e20, 0.1 + 0.2], pa.float64(), pa.decimal128(12, 2)),
        ([5, 10**11], pa.int64(), pa.decimal128(12, 2)),
        (["2026-01-02T03:04:05Z", "2026-01-02T03:04:05", None], pa.string(), pa.timestamp("us", "UTC")),
        (["2026-01-02T03:04:05.123456000", "2026-01-02T03:04:05.1234567"], pa.string(), pa.timestamp("us")),
        (["0001-01-01T00:00:00+10:00", "9999-12-31T23:59:59-01:00", "0000-01-01"], pa.string(), pa.timestamp("us")),
        ([(2**62,), (0,), (86_400,), (1,)], pa.timestamp("s"), pa.date32()),
    ],
)
def test_where_arrow_alone_would_be_wrong(values: list[Any], source: Any, target: Any) -> None:
    check(values, source, target)


@pytest.mark.parametrize("where", [0, 1, 4095, 4096, 70_000, 99_999])
def test_bad_value_is_found_wherever_it_is(where: int) -> None:
    texts = [str(i) for i in range(100_000)]
    texts[where] = "99999999999"
    out, bad = convert(pa.array(texts), pa.int32())
    assert np.flatnonzero(bad).tolist() == [where]
    assert out.to_pylist() == [i if i != where else None for i in range(100_000)]


_MAP = pa.map_(pa.int64(), pa.int64())


@pytest.mark.few(40)
@pytest.mark.parametrize(
    ("array", "type_", "expected"),
    [
        (pa.array(["a", None]).dictionary_encode(), pa.string(), ["a", None]),
        (pa.array(["1", "x"]).dictionary_encode(), pa.int8(), [1, BAD]),
        (pa.RunEndEncodedArray.from_arrays([2, 3], ["1", None]), pa.int64(), [1, 1, None]),
        (pa.array(["a"], pa.string_view()), pa.large_string(), ["a"]),
        (pa.array([b"a", b"\xff"], pa.binary_view()), pa.string(), ["a", BAD]),
        (pa.array([b"ab", b"abc"]), pa.binary(2), [b"ab", BAD]),
        (pa.array(["ab"]), pa.binary(2), [b"ab"]),
        (pa.array([7, None], pa.int8()), pa.string(), ["7", None]),
        (pa.array([True]), pa.string(), ["true"]),
        (pa.array([True]), pa.int8(), [BAD]),
        (pa.array([1], pa.int8()), pa.bool_(), [BAD]),
        (pa.array([1], pa.int64()), pa.timestamp("us"), [BAD]),
        (pa.array([date(2026, 1, 2)]), pa.string(), ["2026-01-02"]),
        (pa.array([10**7], pa.int32()).view(pa.date32()), pa.string(), [BAD]),
        (pa.array(["10:11:12.5", "10:11", "10", "25:00", None]), pa.time32("ms"), [BAD] * 0 or None),
        (pa.array([["a"], None], pa.list_(pa.string_view())), pa.list_(pa.string()), [["a"], None]),
        (pa.array([["1"], ["x"]]), pa.list_(pa.int64()), [[1], BAD]),
        (pa.array([[1], [2, 3], None]).slice(1), pa.list_(pa.int32()), [[2, 3], None]),
        (pa.array([[1]]), pa.large_list(pa.int64()), [BAD]),
        (pa.array([{"a": 1, "b": 2}]), pa.struct([("a", pa.int64())]), [BAD]),
        (pa.array([[(2**40, 1)], [(1, 2)]], _MAP), pa.map_(pa.int32(), pa.int64()), [BAD, [(1, 2)]]),
        (pa.array([[(1, 1)], None, [(2, 2)]], _MAP).slice(1), pa.map_(pa.int32(), pa.int8()), [None, [(2, 2)]]),
        (pa.array([{"a": 1}, None]), pa.struct([("b", pa.int64())]), [BAD, None]),
        (pa.nulls(2), pa.map_(pa.string(), pa.int8()), [None, None]),
        (pa.array([None, None], pa.duration("s")), pa.int8(), [None, None]),
        (pa.array([timedelta(1)]), pa.int8(), [BAD]),
        (pa.array([], pa.string()), pa.int8(), []),
    ],
)
def test_encodings_and_kinds(array: Any, type_: Any, expected: list[Any] | None) -> None:
    out, bad = convert(array, type_)
    assert out.type == type_
    if expected is None:
        assert out.cast(pa.int32()).to_pylist() == [36_672_500, 36_660_000, None, None, None]
        assert bad.tolist() == [False, False, True, True, False]
        return
    assert bad.tolist() == [e is BAD for e in expected]
    assert out.to_pylist() == [None if e is BAD else e for e in expected]


def test_nested_metadata_becomes_the_targets() -> None:
    field = pa.field("element", pa.string(), metadata={"PARQUET:field_id": "7"})
    strict = pa.array([["a"]], pa.list_(pa.field("item", pa.string(), nullable=False)))
    out, bad = convert(strict, pa.list_(field))
    assert out.type.equals(pa.list_(field), check_metadata=True)
    assert not bad.any()


@settings(max_examples=15 * TIMES, deadline=None)
@given(st.lists(st.lists(texts, max_size=6), max_size=4))
@example([["1", "2.5"], ["2026-01-01"]])
def test_inferred_type_holds_every_value_that_it_came_from(parts: list[list[str]]) -> None:
    type_ = pa.null()
    for part in parts:
        type_ = unify(type_, infer_type(pa.array([v or None for v in part], pa.string()), FROM_TEXT), typed=False)
    values = [v or None for part in parts for v in part]
    assert not convert(pa.array(values, pa.string()), type_)[1].any()


# ---------------------------------------------------------------- CSV records


@settings(max_examples=25 * TIMES, deadline=None)
@given(
    st.text(st.sampled_from('QD\n\ra é,"'), max_size=60).map(str.encode)
    | st.binary(max_size=30).map(lambda b: b"Q" + b),
    st.integers(1, 40),
    st.sampled_from([(",", '"'), ("|", "'"), ("^", "]"), ("-", "\\")]),
)
def test_records_are_the_same_by_counting_quotes_and_by_going_through_the_fields(
    data: bytes, size: int, signs: tuple[str, str]
) -> None:
    size %= len(data) + 1
    delimiter, quote = signs
    data = data.replace(b"D", delimiter.encode()).replace(b"Q", quote.encode())
    dialect = csvfile.Csv(Reading(delimiter=delimiter, quote=quote))
    ends, unclosed = dialect.ends_by_field(data, final=True)
    found, found_unclosed = dialect.ends(data, final=True)
    assert (found.tolist(), found_unclosed) == (ends.tolist(), unclosed)
    for known in (
        dialect.ends(data[:size], final=False),
        dialect.ends_by_field(data[:size], final=False),
    ):
        assert known[0].tolist() == [end for end in ends.tolist() if end <= size][: len(known[0])]
        assert not known[1]


class Memory:
    """An Arrow input over bytes that gives a few of them at a time."""

    def __init__(self, data: bytes) -> None:
        self._source = io.BytesIO(data)

    def read(self, size: int) -> bytes:
        return self._source.read(size)


@pytest.fixture(params=[1, 13, 1 << 20])
def _any_block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", request.param)


FIELD = st.text(st.sampled_from('",\n\r aé1'), max_size=6)


@pytest.mark.usefixtures("_any_block_size")
@settings(max_examples=6 * TIMES, deadline=None)
@given(
    rows=st.lists(st.tuples(FIELD, FIELD, FIELD), max_size=12),
    # Python quotes no CR in a file of LF, so only CRLF files may have fields without quotes.
    style=st.sampled_from([("\n", csv.QUOTE_ALL), ("\r", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_MINIMAL)]),
)
def test_what_csv_writes_is_what_we_read(rows: list[tuple[str, str, str]], style: tuple[str, int]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=style[0], quoting=style[1])
    writer.writerows([("a", "b", "c"), *rows])
    data = text.getvalue().encode()
    opened = records.open_blocks(
        csvfile.choose_dialect, Memory(data), LandingInput("f", len(data), "", 0), Reading(), frozenset(["a"])
    )
    read, places = [], []
    for block in opened.blocks:
        assert block.malformed == []
        read += [
            tuple(v or "" for v in row)
            for row in zip(*(block.convert(n, pa.string())[0].to_pylist() for n in "abc"), strict=True)
        ]
        places += block.places.tolist()
    assert read == rows
    assert places == sorted(set(places))
    for place, row in zip(places, rows, strict=True):
        assert next(csv.reader(io.StringIO(data[place:].decode(), newline=""))) == list(row)


@settings(max_examples=15 * TIMES, deadline=None)
@given(
    st.lists(
        st.text(st.sampled_from('",\n\r aé1'), max_size=30).map(str.encode) | st.binary(max_size=8), max_size=4
    ).map(b"".join),
    st.integers(1, 30),
)
def test_any_bytes_give_rows_or_malformed_records_whatever_the_block(data: bytes, size: int) -> None:
    def everything() -> Iterator[Any]:
        file = LandingInput("f", len(data), "", 0)
        for block in records.open_blocks(
            csvfile.choose_dialect, Memory(b"a,b\n" + data), file, Reading(), frozenset()
        ).blocks:
            yield from zip(
                block.places.tolist(), *(block.convert(n, pa.string())[0].to_pylist() for n in "ab"), strict=True
            )
            yield from ((m.place, m.reason, m.raw) for m in block.malformed)

    with pytest.MonkeyPatch.context() as patch:
        whole = sorted(everything(), key=lambda row: row[0])
        patch.setattr(blocks, "BLOCK_BYTES", size)
        assert sorted(everything(), key=lambda row: row[0]) == whole
