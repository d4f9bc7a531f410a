"""Which record of a key wins: `rows.rank`, by every tie, null and direction."""

import math
from decimal import Decimal
from itertools import permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lakeupsert.rows.rank import count_rows_up_to, equal_rows, mark_versions, sort_by_key, sort_by_rank, sortable
from lakeupsert.table.roles import DeleteRule
from lakeupsert.table.spec import DELETE_FLAG, TableSpec
from tests.harness.order_cases import ORDER_CASES, OrderCase, Record
from tests.harness.specs import create

TIES = ("file", "place")
INT = pa.int64()


def spec_of(order: pa.DataType = INT, **declared: Any) -> TableSpec:
    schema = pa.schema([("k", pa.string()), ("a", order), ("b", pa.int64()), ("v", pa.string()), ("p", pa.string())])
    given = {"key": ["k"], "order_by": ["a"], "partition_by": ["p"], "delete": None, "stamped": False}
    return create(schema, table_id="t", **{**given, **declared})


def rows_of(records: list[Record], order: pa.DataType = INT) -> pa.Table:
    """The records, each with null for what it does not name; the later one has the later place."""
    types = {"k": pa.string(), "a": order, "b": pa.int64(), "v": pa.string(), "t": pa.int64(), DELETE_FLAG: pa.bool_()}
    types |= dict.fromkeys(TIES, pa.int64())
    defaults: Record = {"k": "k", "file": 0, DELETE_FLAG: False}
    full = [{name: ({**defaults, "place": i} | r).get(name) for name in types} for i, r in enumerate(records)]
    return pa.Table.from_pylist(full, pa.schema(types))


def winner(records: list[Record], spec: TableSpec, order: pa.DataType = INT, **how: Any) -> Record:
    rows = rows_of(records, order)
    indices, wins = sort_by_rank(rows, spec, TIES, **how)
    assert wins.to_pylist() == [True] + [False] * (len(records) - 1)
    return records[indices[0].as_py()]


@pytest.mark.parametrize("case", ORDER_CASES, ids=str)
def test_winner_whatever_the_order_of_arrival(case: OrderCase) -> None:
    spec = spec_of(
        case.type, order_by=case.order_by, ties=case.ties, delete=DeleteRule(column="v", values=("D",), keep=True)
    )
    for arrived, won in case.arrivals():
        found = winner(arrived, spec, case.type)
        assert found is won


@pytest.mark.parametrize(
    ("order_by", "ranked"),
    [
        ("a", [2, 1, None]),
        ("a desc nulls last", [2, 1, None]),
        ("a asc", [1, 2, None]),
        ("a nulls first", [None, 2, 1]),
        ("a asc nulls first", [None, 1, 2]),
    ],
)
def test_each_direction_and_rule_for_null_ranks_values_whatever_their_order(
    order_by: str, ranked: list[int | None]
) -> None:
    spec = spec_of(order_by=[order_by])
    for arrived in permutations(ranked):
        rows = rows_of([{"a": a} for a in arrived])
        order, _ = sort_by_rank(rows, spec, TIES)
        assert rows["a"].take(order).to_pylist() == ranked


def test_equal_order_keeps_the_later_file_then_the_later_place() -> None:
    spec = spec_of()
    places = [(0, 5), (1, 0), (1, 1)]
    for arrived in permutations(places):
        found = winner([{"a": 1, "file": file, "place": place} for file, place in arrived], spec)
        assert (found["file"], found["place"]) == (1, 1)


@pytest.mark.parametrize("type_", [pa.float16(), pa.float32(), pa.float64()])
def test_nan_is_the_greatest_float_and_the_zeros_are_equal(type_: pa.DataType) -> None:
    tiny = [] if type_ == pa.float16() else [1e-30]
    near = [math.nextafter(-2.5, -math.inf)] if type_ == pa.float64() else []
    ascending = [-math.inf, *near, -2.5, -0.5, 0.0, *tiny, 0.5, 2.5, math.inf, math.nan]
    as_type = [np.float16(value) for value in ascending] if type_ == pa.float16() else ascending
    keys = sortable(pa.array(as_type, type_)).to_pylist()
    assert keys == sorted(set(keys))
    zeros = sortable(pa.array([np.float16(0.0), np.float16(-0.0)] if type_ == pa.float16() else [0.0, -0.0], type_))
    assert zeros[0] == zeros[1]
    assert sortable(pa.array([None, ascending[0]], pa.float64())).null_count == 1


@pytest.mark.parametrize("type_", [pa.decimal32(5, 2), pa.decimal64(15, 2), pa.decimal128(20, 2)])
def test_narrow_decimals_rank_by_value_with_several_sort_keys(type_: pa.DataType) -> None:
    """pyarrow 26 sorts decimal32 and decimal64 wrongly if there are several sort keys."""
    ranked = [Decimal(value) / 100 for value in (99_999, 1_000, 900, 256, 255, 1, 0, -1, -300, -99_999)]
    for turn in range(len(ranked)):
        rows = rows_of([{"a": a} for a in ranked[turn:] + ranked[:turn]], type_)
        order, _ = sort_by_rank(rows, spec_of(type_), TIES)
        assert rows["a"].take(order).to_pylist() == ranked


def test_columns_named_first_decide_between_equal_orders_and_never_against_them() -> None:
    spec = spec_of()
    records = [{"a": 1, "t": 2, "v": "first"}, {"a": 1, "t": 1, "v": "later"}]
    assert winner(records, spec, first=["t"])["v"] == "first"
    assert winner([*records, {"a": 2, "t": 0, "v": "greater"}], spec, first=["t"])["v"] == "greater"


def test_each_key_has_one_winner_and_columns_of_by_are_part_of_the_key() -> None:
    records = [
        {"k": k, "a": a, "t": t} for k, a, t in (("y", 1, 0), ("x", 1, 0), ("x", 2, 1), ("y", 3, 0), ("x", 0, 1))
    ]
    rows = rows_of(records)
    order, wins = sort_by_rank(rows, spec_of(), TIES)
    assert [records[i]["k"] + str(records[i]["a"]) for i in order.to_pylist()] == ["x2", "x1", "x0", "y3", "y1"]
    assert wins.to_pylist() == [True, False, False, True, False]
    order, wins = sort_by_rank(rows, spec_of(), TIES, by=["t"])
    assert [(records[i]["t"], records[i]["k"], records[i]["a"]) for i in order.filter(wins).to_pylist()] == [
        (0, "x", 1),
        (0, "y", 3),
        (1, "x", 2),
    ]


def test_keys_side_by_side_that_differ_in_their_first_column_alone_have_a_winner_each() -> None:
    rows = rows_of([{"t": t, "k": "x", "a": a} for t in (0, 1) for a in (1, 2)])
    order, wins = sort_by_rank(rows, spec_of(), TIES, by=["t"])
    won = rows.take(order.filter(wins)).select(["t", "a"]).to_pylist()
    assert won == [{"t": 0, "a": 2}, {"t": 1, "a": 2}]


def test_no_row_has_no_winner() -> None:
    order, wins = sort_by_rank(rows_of([]), spec_of(), TIES)
    assert (len(order), len(wins)) == (0, 0)


def test_versions_are_the_first_rows_of_each_order_of_a_key() -> None:
    spec = spec_of()
    records = [{"k": k, "a": a} for k, a in (("x", 1), ("x", 1), ("x", None), ("x", None), ("y", 1), ("y", 0))]
    rows = rows_of(records)
    order, wins = sort_by_rank(rows, spec, TIES)
    marked = mark_versions(rows, spec, order.to_numpy(), wins.to_numpy(zero_copy_only=False))
    assert [(records[i]["k"], records[i]["a"]) for i in order.filter(pa.array(marked)).to_pylist()] == [
        ("x", 1),
        ("x", None),
        ("y", 1),
        ("y", 0),
    ]


def test_equal_rows_take_null_as_equal_to_null_alone() -> None:
    rows = rows_of([{"a": None, "v": "x"}, {"a": None, "v": "x"}, {"a": 0, "v": "x"}, {"a": 0, "v": None}])
    one, other = np.array([0, 0, 2, 3]), np.array([1, 2, 3, 3])
    assert equal_rows(rows, ["a", "v"], one, other).tolist() == [True, False, False, True]
    known = pa.table({"a": [1, 2, 2]})
    assert equal_rows(known, ["a"], np.array([0, 1]), np.array([1, 2])).tolist() == [False, True]


def test_rows_up_to_a_key_of_two_columns_are_counted() -> None:
    rows = pa.table({"k": ["a", "a", "b", "b"], "n": pa.array([1, 2, 1, 3], pa.int64())})
    assert sort_by_key(rows.take([3, 1, 0, 2]), ["k", "n"]).to_pylist() == [2, 1, 3, 0]
    for last, count in ((("a", 0), 0), (("a", 1), 1), (("a", 9), 2), (("b", 2), 3), (("c", 0), 4)):
        assert count_rows_up_to(rows, ["k", "n"], [pa.scalar(last[0]), pa.scalar(last[1], pa.int32())]) == count
