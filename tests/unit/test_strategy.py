"""Strategies: what a night may write, and what a reader may have to read, over many nights."""

import itertools
import random
from typing import Any

import pytest

from lakeupsert.pipeline import strategy
from lakeupsert.pipeline.strategy import (
    MOST_DEBT,
    SMALL_BYTES,
    TOGETHER,
    as_whole_rows,
    bits_more,
    debt,
    in_place,
    worth_compacting,
)
from lakeupsert.table.manifest import BucketEntry, DataFile, DeletionVector

BASE = 100 * SMALL_BYTES

NO_LIMIT = 1 << 60
"""These buckets are not to be split."""


def file(name: str, bytes: int, superseded: int = 0) -> DataFile:
    deleted = DeletionVector(rows=superseded, size=1, inline=b"x") if superseded else None
    return DataFile(name=name, rows=max(1, bytes // 100), bytes=bytes, deleted=deleted)


def nights(chosen: Any, sizes: list[int]) -> list[tuple[BucketEntry, int]]:
    """The bucket after each night of so many bytes that are all updates of the base; and what that night wrote."""
    bucket, played = BucketEntry(id="0", base=(file("b", BASE),)), []
    for number, came in enumerate(sizes):
        kept, folded = in_place(chosen, bucket, came, NO_LIMIT)
        if not kept:
            written = BASE
            bucket = BucketEntry(id="1", base=(file("b", BASE),))
        else:
            written = came + sum(f.bytes for f in folded)
            dead = (bucket.base[0].deleted.rows if bucket.base[0].deleted else 0) + came // 100
            deltas = (*(f for f in kept if f not in bucket.base), file(f"d{number}", written))
            bucket = BucketEntry(id="2", base=(file("b", BASE, dead),), deltas=deltas)
        played.append((bucket, written))
    return played


@pytest.mark.parametrize("share", [1000, 200, 50, 10])
def test_auto_writes_and_reads_within_its_bounds(share: int) -> None:
    came = BASE // share
    played = nights("auto", [came] * 400)
    assert max(debt(bucket) for bucket, _ in played) <= MOST_DEBT * BASE
    sizes = 1
    while TOGETHER**sizes * came < MOST_DEBT * BASE:
        sizes += 1
    assert max(len(bucket.deltas) for bucket, _ in played) <= (TOGETHER - 1) * sizes
    # An update is a byte in a delta and one in the base that is dead, so the debt grows twice as fast as what came.
    assert sum(written for _, written in played) / (400 * came) <= 1 + sizes + 2 / MOST_DEBT
    assert any(bucket.deltas for bucket, _ in played)


def test_bounds_hold_whatever_comes() -> None:
    rng = random.Random(7)
    for _ in range(50):
        played = nights("auto", [int(BASE * 10 ** rng.uniform(-5, 0.2)) for _ in range(100)])
        assert max(debt(bucket) for bucket, _ in played) <= MOST_DEBT * BASE
        assert max(len(bucket.deltas) for bucket, _ in played) <= (TOGETHER - 1) * 10


def test_delta_never_writes_the_base_and_rewrite_nothing_else() -> None:
    assert all(bucket.base[0].name == "b" and bucket.deltas for bucket, _ in nights("delta", [BASE // 3] * 20))
    assert all(not bucket.deltas and written == BASE for bucket, written in nights("rewrite", [1] * 5))


def test_small_and_unsettled_and_empty_buckets_are_rewritten() -> None:
    small = BucketEntry(id="0", base=(file("b", SMALL_BYTES - 1),), deltas=(file("d", 10),))
    assert in_place("auto", small, 1, NO_LIMIT) == ((), small.deltas)
    assert in_place("delta", small, 1, NO_LIMIT)[0]
    unsettled = BucketEntry(id="0", base=(file("b", BASE),), settled=False)
    assert in_place("delta", unsettled, 1, NO_LIMIT) == ((), ())
    assert in_place("delta", BucketEntry(id=""), 1, NO_LIMIT) == ((), ())


def test_compact_takes_what_owes_much_before_a_night_has_to() -> None:
    for bucket, _ in itertools.islice(nights("auto", [BASE // 50] * 40), 40):
        owes = debt(bucket) > MOST_DEBT / 2 * BASE
        assert worth_compacting(bucket, full=False) == owes
        assert worth_compacting(bucket, full=True) == bool(bucket.deltas)
    small = BucketEntry(id="0", base=(file("b", strategy.SMALL_BYTES - 1),), deltas=(file("d", 10),))
    assert worth_compacting(small, full=False)


def test_a_bucket_that_outgrew_twice_its_limit_is_written_anew_and_split() -> None:
    base = DataFile(name="b", rows=10, bytes=100)
    bucket = BucketEntry(id="", base=(base,))
    assert in_place("delta", bucket, 20, 60) == ((base,), ())
    assert in_place("delta", bucket, 21, 60) == ((), ())
    assert [bits_more(bucket, 20, limit) for limit in (120, 119, 60, 30, 29)] == [0, 1, 1, 2, 3]


def test_records_of_one_column_count_as_the_rows_that_they_are_written_as() -> None:
    bucket = BucketEntry(id="0", base=(file("b", BASE),))
    rows = BASE // 100
    assert in_place("auto", bucket, BASE // 100, NO_LIMIT)[0] == bucket.base
    assert in_place("auto", bucket, as_whole_rows(bucket, BASE // 100, rows), NO_LIMIT)[0] == ()
    assert as_whole_rows(bucket, BASE // 100, 10) == BASE // 100
