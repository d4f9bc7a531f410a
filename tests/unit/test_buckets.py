"""Hashes of keys: the reference XXH64 over the canonical bytes of docs/FORMAT.md, and what must not change them."""

import json
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakeupsert.operations.recompute.hash import hash_function
from lakeupsert.read.hashed import hash_values
from lakeupsert.rows.buckets import BLOCK_ROWS, buckets, hash_numbers, key_hashes
from lakeupsert.rows.convert import convert
from lakeupsert.rows.digest import row_hashes
from lakeupsert.rows.words import FEW, LONG_BYTES
from lakeupsert.table.spec import TableSpec
from tests.harness.specs import create

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden/buckets.json").read_text())


def spec_of(*types: Any) -> TableSpec:
    """A table with key columns k0, k1, … of these types."""
    names = [f"k{i}" for i in range(len(types))]
    fields = [*zip(names, types, strict=True), ("ts", pa.int64()), ("day", pa.date32())]
    of = {"key": names, "order_by": ["ts"], "partition_by": ["day"], "delete": None, "stamped": False}
    return create(pa.schema(fields), table_id="t", **of)  # type: ignore[arg-type]


def hashed(spec: TableSpec, *columns: Any) -> list[int]:
    table = pa.table({f"k{i}": column for i, column in enumerate(columns)})
    return key_hashes(table, spec).tolist()  # type: ignore[no-any-return]  # numpy's Any


def type_of(name: str) -> Any:
    kind, _, rest = name.rstrip(")]").replace("[", "(").partition("(")
    if not rest:
        return pa.type_for_alias(kind)
    if kind == "fixed_size_binary":
        return pa.binary(int(rest))
    if kind == "timestamp":
        return pa.timestamp(*rest.split(", "))
    return getattr(pa, kind)(*map(int, rest.split(", ")))


def array_of(type_: Any, values: list[Any]) -> Any:
    if pa.types.is_decimal(type_):
        return pa.array([Decimal(v).scaleb(-type_.scale, Context(prec=80)) for v in values], type_)
    if pa.types.is_temporal(type_):
        return pa.array(values, pa.int32() if type_.bit_width == 32 else pa.int64()).view(type_)
    if "binary" in str(type_):
        values = [bytes.fromhex(v) for v in values]
    return pa.array(values, type_)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: "+".join(case["types"]))
def test_hashes_are_those_of_the_reference(case: dict[str, Any]) -> None:
    types = [type_of(name) for name in case["types"]]
    columns = [array_of(t, list(values)) for t, values in zip(types, zip(*case["keys"], strict=True), strict=True)]
    spec, expected = spec_of(*types), [int(h, 16) for h in case["hashes"]]
    assert hashed(spec, *columns) == expected
    assert hashed(spec, *[pa.concat_arrays([c[1:], c])[len(c) - 1 :] for c in columns]) == expected, "sliced"
    cut = [[c[:at], c[at:at], c[at:]] for at, c in enumerate(columns)]
    assert hashed(spec, *map(pa.chunked_array, cut)) == expected, "in chunks that differ by column"


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: "+".join(case["types"]))
def test_partitions_by_hash_are_those_of_the_reference(case: dict[str, Any]) -> None:
    types = [type_of(name) for name in case["types"]]
    columns = [array_of(t, list(values)) for t, values in zip(types, zip(*case["keys"], strict=True), strict=True)]
    for count, numbers in case["partitions"].items():
        assert hash_numbers(columns, int(count)).to_pylist() == numbers
        assert hash_function(types, int(count))(*columns).to_pylist() == numbers, "as `reconcile --deep` computes it"


ONE_COLUMN = [case for case in GOLDEN if len(case["types"]) == 1 and "binary" not in case["types"][0]]


@pytest.mark.parametrize("case", ONE_COLUMN, ids=lambda case: f"{case['types'][0]} {len(case['keys'])}")
def test_a_filter_finds_the_partition_of_a_key_of_any_type(case: dict[str, Any]) -> None:
    type_ = type_of(case["types"][0])
    fields = pa.schema([("k", type_), ("ts", pa.int64())])
    of = {"key": ["k"], "order_by": ["ts"], "partition_by": ["bucket(1000, k)"], "delete": None, "stamped": False}
    spec = create(fields, table_id="t", **of)  # type: ignore[arg-type]
    keys = array_of(type_, [key for (key,) in case["keys"]])
    texts, _ = convert(keys, pa.string())
    found = 0
    for key, again, text, number in zip(
        keys, convert(texts, type_)[0], texts.to_pylist(), case["partitions"]["1000"], strict=True
    ):
        if key == again:  # outside the years 1 to 9999 there is no text, and before 1894 Zurich's zone has seconds
            literal = text if pa.types.is_boolean(type_) else "'{}'".format(text.replace("'", "''"))
            forms = f"k = {literal}", f"k IN ({literal}) AND ts > 0", f"ts = 1 AND {literal} = k"
            assert hash_values(spec, forms[found % 3], spec.schema) == {"k_bucket": {number}}
            found += 1
    assert found


def test_a_key_that_no_row_can_have_is_in_no_partition() -> None:
    texts, days = pa.array(["a", None, "b"]), pa.array([0, 0, 1], pa.int64()).view(pa.date64())
    assert hash_numbers([texts], 4).is_valid().to_pylist() == [True, False, True]
    assert hash_numbers([texts, days], 4).is_valid().to_pylist() == [True, False, False], "a time of day in a date64"
    assert hash_numbers([pa.nulls(2, pa.string())], 4).null_count == 2
    assert hash_numbers([pa.array([], pa.string())], 4).to_pylist() == []


def test_every_type_that_a_key_may_have_has_a_golden_vector() -> None:
    seen = {type_of(name).id for case in GOLDEN for name in case["types"]}
    key_types = [*INTEGERS, pa.bool_(), pa.date32(), pa.date64(), pa.timestamp("us"), pa.string(), pa.large_string()]
    key_types += [
        pa.binary(),
        pa.large_binary(),
        pa.binary(3),
        pa.decimal32(5),
        pa.decimal64(5),
        pa.decimal128(5),
        pa.decimal256(5),
    ]
    assert seen == {t.id for t in key_types}


INTEGERS = [getattr(pa, f"{u}int{bits}")() for u in ("", "u") for bits in (8, 16, 32, 64)]
SAME = [
    *[([0, 1, 127], type_, pa.int64()) for type_ in INTEGERS],
    *[([-128, -1], type_, pa.int64()) for type_ in INTEGERS[:4]],
    *[
        ([Decimal("-2.50"), Decimal("999.99")], type_, pa.decimal128(38, 2))
        for type_ in (pa.decimal32(5, 2), pa.decimal64(9, 2), pa.decimal128(5, 2), pa.decimal256(38, 2))
    ],
    *[([-86_400, 0, 1], pa.timestamp(unit, zone), pa.timestamp("us")) for unit in ("s", "ms") for zone in (None, "UTC")],
    ([-86_400, 0, 1], pa.timestamp("us", "Asia/Tokyo"), pa.timestamp("us")),
    (["", "ä", "x" * 40], pa.large_string(), pa.string()),
    ([b"", b"\0", b"x" * 40], pa.large_binary(), pa.binary()),
    ([b"abc", b"\0\0\0"], pa.binary(3), pa.binary()),
    ([0, 1], pa.date64(), pa.date32()),
]  # fmt: skip


@pytest.mark.parametrize(("values", "one", "other"), SAME, ids=str)
def test_the_same_value_has_the_same_hash_in_another_type(values: list[Any], one: Any, other: Any) -> None:
    if pa.types.is_timestamp(one):
        left, right = (pa.array(values, pa.timestamp("s")).cast(t) for t in (one, other))
    elif pa.types.is_date(one):
        left, right = (pa.array(values, pa.int32()).view(pa.date32()).cast(t) for t in (one, other))
    else:
        left, right = pa.array(values, one), pa.array(values, other)
    assert left.type == one
    assert hashed(spec_of(one), left) == hashed(spec_of(other), right)


@pytest.mark.parametrize(
    ("column", "type_"),
    [
        (pa.array([7], pa.int8()), pa.int64()),
        (pa.array([7], pa.int64()), pa.int8()),
        (pa.array([Decimal("2.5")], pa.decimal32(2, 1)), pa.decimal128(12, 4)),
        (pa.array([Decimal("2.5000")], pa.decimal256(60, 4)), pa.decimal64(12, 1)),
        (pa.array([1_577_836_800_000_001_000], pa.timestamp("ns")), pa.timestamp("us", "UTC")),
        (pa.array([1_577_836_800], pa.timestamp("s", "UTC")), pa.timestamp("ns")),
        (pa.array(["x"]).dictionary_encode(), pa.large_string()),
    ],
    ids=str,
)
def test_a_column_in_another_type_is_hashed_as_the_specs(column: Any, type_: Any) -> None:
    assert hashed(spec_of(type_), column) == hashed(spec_of(type_), column.cast(type_))


@pytest.mark.parametrize(
    ("column", "type_"),
    [
        (pa.array([1], pa.timestamp("ns")), pa.timestamp("us")),
        (pa.array([1], pa.date64()), pa.date64()),
        (pa.array([300]), pa.int8()),
        (pa.array([Decimal("2.55")]), pa.decimal128(12, 1)),
        (pa.array([2**62], pa.timestamp("s")), pa.timestamp("us")),
        (pa.array([1, None]), pa.int64()),
        (pa.array(["x", None]), pa.string()),
    ],
    ids=str,
)
def test_what_the_specs_type_cannot_hold_is_refused(column: Any, type_: Any) -> None:
    with pytest.raises(ValueError, match=r"would lose|not in range|truncate|out of bounds|null values|Rescaling"):
        hashed(spec_of(type_), column)


def test_nanoseconds_that_are_no_microsecond_keep_keys_apart() -> None:
    assert len(set(hashed(spec_of(pa.timestamp("ns")), pa.array([1000, 1001, 1999, 2000], pa.timestamp("ns"))))) == 4


def test_bytes_belong_to_their_column_and_zeros_to_their_value() -> None:
    spec = spec_of(pa.string(), pa.string())
    assert len(set(hashed(spec, ["x", "y", "", "xy", "x\0", "x"], ["y", "x", "xy", "", "y", "\0y"]))) == 6


def test_a_hash_does_not_depend_on_the_rows_around() -> None:
    """Rows are hashed in blocks, and sorted by length in them."""
    rng = np.random.default_rng(1)
    texts = np.array(["x" * n for n in range(70)], object)[rng.integers(0, 70, 2 * BLOCK_ROWS + 3)]
    numbers = rng.integers(0, 9, len(texts))
    spec = spec_of(pa.string(), pa.int32(), pa.string())
    table = pa.table({"k0": texts, "k1": numbers, "k2": texts[::-1]})
    together = key_hashes(table, spec)
    for at in (0, 1, BLOCK_ROWS - 1, BLOCK_ROWS, len(texts) - 1):
        assert key_hashes(table.slice(at, 1), spec).tolist() == [together[at]]
    distinct = set(zip(texts, numbers.tolist(), texts[::-1], strict=True))
    assert len(set(together.tolist())) == len(distinct)


@pytest.mark.parametrize("size", [LONG_BYTES - 40, LONG_BYTES + 1, 3 * LONG_BYTES])
def test_long_values_have_the_same_hash_one_by_one(size: int) -> None:
    """A few of the longest are hashed without numpy, and those of equal length together."""
    texts = ["y" * (size + n % 9) for n in range(9 * FEW)] + ["z"]
    spec = spec_of(pa.string(), pa.int64(), pa.binary())
    table = pa.table({"k0": texts, "k1": [7] * len(texts), "k2": [b"ab"] * len(texts)})
    assert len(set(key_hashes(table, spec).tolist())) == 10
    assert len(set(row_hashes(table, ["k0", "k1", "k2"]).tolist())) == 10


def test_partition_columns_of_the_key_are_no_part_of_it() -> None:
    fields = pa.schema([("id", pa.int64()), ("day", pa.date32()), ("ts", pa.int64())])
    of = {"table_id": "t", "order_by": ["ts"], "partition_by": ["day"], "delete": None, "stamped": False}
    table = pa.table({"id": [1, 2], "ts": [1, 1]})
    with_day, without = (create(fields, key=key, **of) for key in (["day", "id"], ["id"]))  # type: ignore[arg-type]
    assert key_hashes(table, with_day).tolist() == key_hashes(table, without).tolist()


def test_a_bucket_is_the_top_bits() -> None:
    hashes = np.array([0, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)
    assert [buckets(hashes, bits).tolist() for bits in (0, 1, 2)] == [[0] * 4, [0, 0, 1, 1], [0, 1, 2, 3]]


def test_no_rows_have_no_hashes() -> None:
    assert hashed(spec_of(pa.string()), pa.array([], pa.string())) == []
