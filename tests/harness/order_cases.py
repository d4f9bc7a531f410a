"""Which record of a key wins: one list of cases for the three places that state the order of rows (`rows.rank`, engine spark, and
the SQL of `reconcile --deep`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import permutations
from typing import Any

import pyarrow as pa

from lakeupsert.table.spec import DELETE_FLAG

INT = pa.int64()
Record = dict[str, Any]
"""Values of the ordering columns ``a`` and ``b`` and of ``v``; whether it deletes, in `DELETE_FLAG`."""


@dataclass(frozen=True)
class OrderCase:
    """``ranked``: records of one key, the winner first, whatever order they arrive in.

    Attributes:
        by_arrival: they are equal by their order, so the later one wins.
        type: of the column ``a``.
    """

    name: str
    ranked: Sequence[Record]
    order_by: tuple[str, ...] = ("a",)
    ties: str = "arrival"
    by_arrival: bool = False
    type: pa.DataType = INT

    def __str__(self) -> str:
        return self.name

    def arrivals(self) -> list[tuple[list[Record], Record]]:
        """The records in every order in which they may arrive, with the winner of each."""
        return [
            (list(arrived), arrived[-1] if self.by_arrival else self.ranked[0]) for arrived in permutations(self.ranked)
        ]


def of_a(*values: Any) -> list[Record]:
    return [{"a": value} for value in values]


ORDER_CASES = (
    OrderCase("greatest", of_a(2, 1, None)),
    OrderCase("nulls last", of_a(2, 1, None), ("a desc nulls last",)),
    OrderCase("least", of_a(1, 2, None), ("a asc",)),
    OrderCase("nulls first", of_a(None, 2, 1), ("a nulls first",)),
    OrderCase("least, nulls first", of_a(None, 1, 2), ("a asc nulls first",)),
    OrderCase("first column", [{"a": 1, "b": 2}, {"a": 1, "b": 1}, {"a": 0, "b": 3}], ("a", "b")),
    OrderCase("other first column", [{"a": 0, "b": 3}, {"a": 1, "b": 2}, {"a": 1, "b": 1}], ("b", "a")),
    OrderCase("least, then greatest", [{"a": 0, "b": 3}, {"a": 1, "b": 2}, {"a": 1, "b": 1}], ("a asc", "b")),
    OrderCase("null, whatever follows", [{"a": 0, "b": None}, {"a": None, "b": 9}], ("a", "b")),
    OrderCase("not a number", of_a(math.nan, math.inf, None), type=pa.float64()),
    OrderCase("decimals", of_a(Decimal("2.56"), Decimal("2.55"), Decimal("-3")), type=pa.decimal128(20, 2)),
    OrderCase("tie", [{"a": 1, "v": "x"}, {"a": 1, "v": "y"}], by_arrival=True),
    OrderCase("two nulls", [{"a": None, "v": "x"}, {"a": None, "v": "y"}], by_arrival=True),
    OrderCase("two nulls first", [{"v": "x"}, {"v": "y"}], ("a nulls first",), by_arrival=True),
    OrderCase("both zeros", [{"a": 0.0, "v": "x"}, {"a": -0.0, "v": "y"}], by_arrival=True, type=pa.float64()),
    OrderCase("tie with a delete", [{"a": 1, DELETE_FLAG: True}, {"a": 1, "v": "x"}], by_arrival=True),
    OrderCase("content", [{"a": 1, "b": 1, "v": "y"}, {"a": 1, "b": 1, "v": "x"}], ties="content"),
    OrderCase("content of another column", [{"a": 1, "b": 2, "v": "x"}, {"a": 1, "b": 1, "v": "y"}], ties="content"),
    OrderCase(
        "content of a delete",
        [{"a": 1, "b": 0, "v": "x", DELETE_FLAG: True}, {"a": 1, "b": 1, "v": "y"}],
        ties="content",
    ),
)
