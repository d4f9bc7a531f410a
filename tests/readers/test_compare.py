"""What `compare` and `canonical` tell of rows, without a reader."""

import datetime as dt
from decimal import Decimal

import pyarrow as pa

from tests.harness.readers import Difference, canonical, compare

NAN = float("nan")
ROWS = pa.table(
    {
        "id": [1, 2, 3],
        "ratio": [NAN, None, 0.5],
        "tags": [["a"], [], None],
        "counts": pa.array([[("x", 1), ("y", 2)], [], None], pa.map_(pa.string(), pa.int64())),
        "spot": [{"at": NAN, "name": "n"}, {"at": None, "name": None}, None],
    }
)


def test_rows_in_another_order_are_the_same() -> None:
    other = ROWS.take([2, 0, 1]).select(["spot", "counts", "tags", "ratio", "id"])
    swapped = pa.array([None, [("y", 2), ("x", 1)], []], ROWS["counts"].type)
    assert compare(other.set_column(1, "counts", swapped), ROWS, ["id"]).exact


def test_missing_unexpected_and_doubled_rows() -> None:
    found = pa.concat_tables([ROWS.slice(1), ROWS.slice(2), pa.table({"id": [9]})], promote_options="default")
    assert compare(found, ROWS, ["id"]) == Difference(missing=((1,),), unexpected=((9,),), twice=((3,),))


def test_a_second_row_of_a_key_with_other_values_is_twice() -> None:
    stale = ROWS.slice(2).set_column(1, "ratio", [[0.25]])
    assert compare(pa.concat_tables([ROWS, stale]), ROWS, ["id"]) == Difference(twice=((3,),))


def test_other_values_by_column() -> None:
    found = ROWS.set_column(1, "ratio", [[1.0, None, 0.5]]).set_column(2, "tags", [[["a"], None, None]])
    assert compare(found, ROWS, ["id"]).values == (((1,), "ratio", 1.0, "NaN"), ((2,), "tags", None, ()))


def test_null_is_no_empty_list_and_no_struct_of_nulls() -> None:
    nulls = pa.array([{"at": NAN, "name": "n"}, None, None], ROWS["spot"].type)
    assert [value[1] for value in compare(ROWS.set_column(4, "spot", nulls), ROWS, ["id"]).values] == ["spot"]


def test_columns() -> None:
    found = ROWS.drop(["tags"]).append_column("more", pa.array([1, 2, 3]))
    assert compare(found, ROWS, ["id"]).columns == ("-tags", "+more")


def test_types_of_readers_become_one() -> None:
    moment = dt.datetime(2026, 1, 2, 3, 4, 5, 6)
    found = canonical(
        pa.table(
            {
                "naive": pa.array([moment], pa.timestamp("ns")),
                "zone": pa.array([moment], pa.timestamp("us", "Europe/Berlin")),
                "text": pa.array(["a"]).dictionary_encode(),
                "view": pa.array([b"a"], pa.binary_view()),
                "small": pa.array([1], pa.uint8()),
                "real": pa.array([0.5], pa.float32()),
                "money": pa.array([Decimal("1.50")], pa.decimal128(9, 2)),
                "nested": pa.array([[{"a": 1}]], pa.large_list(pa.struct([pa.field("a", pa.int32(), nullable=False)]))),
            }
        )
    )
    assert found.schema.types == [
        pa.timestamp("us", "UTC"),
        pa.timestamp("us", "UTC"),
        pa.string(),
        pa.binary(),
        pa.int64(),
        pa.float64(),
        pa.decimal128(9, 2),
        pa.list_(pa.struct([("a", pa.int64())])),
    ]
    assert found["naive"].to_pylist() == [moment.replace(tzinfo=dt.UTC)]
