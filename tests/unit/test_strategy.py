"""Strategies: what a night may write, and what a reader may have to read, over many nights."""

import itertools
import random
from typing import Any

import pyarrow as pa
import pytest

from lakeupsert.pipeline import strategy
from lakeupsert.pipeline.strategy import (
    MOST_BITS,
    MOST_DEBT,
    SMALL_BYTES,
    TOGETHER,
    Incoming,
    SplitRule,
    worth_compacting,
)
from lakeupsert.rows.datafiles import BARE_BYTES, COLUMN_BYTES
from lakeupsert.table.manifest import BucketEntry, DataFile, DeletionVector

BASE = 100 * SMALL_BYTES

NO_LIMIT = SplitRule(bucket_bytes=1 << 60, file_bytes=0, most_bits=MOST_BITS)
"""These buckets are not to be split."""


def file(name: str, bytes: int, superseded: int = 0) -> DataFile:
    deleted = DeletionVector(rows=superseded, size=1, inline=b"x") if superseded else None
    return DataFile(name=name, rows=max(1, bytes // 100), bytes=bytes, deleted=deleted)


def coming(bytes: float) -> Incoming:
    return Incoming(bytes=bytes, rows=max(1, bytes // 100))


def nights(chosen: Any, sizes: list[int]) -> list[tuple[BucketEntry, int]]:
    """The bucket after each night of so many bytes that are all updates of the base; and what that night wrote."""
    bucket, played = BucketEntry(id="0", base=(file("b", BASE),)), []
    for number, came in enumerate(sizes):
        kept, folded = NO_LIMIT.in_place(chosen, bucket, coming(came))
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
    assert max(bucket.debt for bucket, _ in played) <= MOST_DEBT * BASE
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
        assert max(bucket.debt for bucket, _ in played) <= MOST_DEBT * BASE
        assert max(len(bucket.deltas) for bucket, _ in played) <= (TOGETHER - 1) * 10


def test_delta_never_writes_the_base_and_rewrite_nothing_else() -> None:
    assert all(bucket.base[0].name == "b" and bucket.deltas for bucket, _ in nights("delta", [BASE // 3] * 20))
    assert all(not bucket.deltas and written == BASE for bucket, written in nights("rewrite", [1] * 5))


def test_small_and_unsettled_and_empty_buckets_are_rewritten() -> None:
    small = BucketEntry(id="0", base=(file("b", SMALL_BYTES - 1),), deltas=(file("d", 10),))
    assert NO_LIMIT.in_place("auto", small, coming(1)) == ((), small.deltas)
    assert NO_LIMIT.in_place("delta", small, coming(1))[0]
    unsettled = BucketEntry(id="0", base=(file("b", BASE),), settled=False)
    assert NO_LIMIT.in_place("delta", unsettled, coming(1)) == ((), ())
    assert NO_LIMIT.in_place("delta", BucketEntry(id=""), coming(1)) == ((), ())


def test_compact_takes_what_owes_much_before_a_night_has_to() -> None:
    for bucket, _ in itertools.islice(nights("auto", [BASE // 50] * 40), 40):
        owes = bucket.debt > MOST_DEBT / 2 * BASE
        assert worth_compacting(bucket, full=False) == owes
        assert worth_compacting(bucket, full=True) == bool(bucket.deltas)
    small = BucketEntry(id="0", base=(file("b", strategy.SMALL_BYTES - 1),), deltas=(file("d", 10),))
    assert worth_compacting(small, full=False)


def rule(bucket_bytes: int, file_bytes: int = 0, most_bits: int = MOST_BITS) -> SplitRule:
    return SplitRule(bucket_bytes, file_bytes, most_bits)


def test_a_bucket_that_outgrew_twice_its_limit_is_written_anew_and_split() -> None:
    base = DataFile(name="b", rows=10, bytes=100)
    bucket = BucketEntry(id="", base=(base,))
    assert rule(60).in_place("delta", bucket, Incoming(20, 2)) == ((base,), ())
    assert rule(60).in_place("delta", bucket, Incoming(21, 2)) == ((), ())
    came = Incoming(20, 2)
    assert [rule(limit).extra_bits(bucket, came) for limit in (120, 119, 60, 30, 29)] == [0, 1, 1, 2, 3]


def test_a_bucket_is_never_split_into_more_parts_than_it_has_rows() -> None:
    one, few = (BucketEntry(id="", base=(DataFile(name="b", rows=n, bytes=60_000 * n),)) for n in (1, 5))
    assert rule(16_000).extra_bits(one, Incoming(0, 0)) == 0
    assert rule(16_000).extra_bits(one, Incoming(60_000, 1)) == 0, "the row that comes may be the stored one's update"
    assert rule(16_000).extra_bits(few, Incoming(60_000, 1)) == 2
    assert rule(16_000).extra_bits(one, Incoming(600_000, 10)) == 3
    assert rule(16_000).in_place("delta", one, Incoming(60_000, 1))[0] == one.base, "written anew, it stays as large"


def test_bytes_of_a_file_that_are_not_rows_split_nothing() -> None:
    bucket = BucketEntry(id="", base=(DataFile(name="b", rows=64, bytes=3_000),))
    assert rule(1_000).extra_bits(bucket, Incoming(500, 64)) == 2
    assert rule(1_000, file_bytes=2_500).extra_bits(bucket, Incoming(500, 64)) == 0
    assert rule(1_000, file_bytes=2_500).extra_bits(bucket, Incoming(6_500, 64)) == 2


def test_a_rule_knows_what_a_file_takes_and_how_many_parts_a_partition_can_have() -> None:
    types = [pa.string(), pa.int64(), pa.struct({"a": pa.int32(), "b": pa.list_(pa.string())})]
    buckets = [BucketEntry(id="", bucket=n, bits=1, base=(file("b", 500),)) for n in range(2)]
    assert SplitRule.of(99, types, buckets, 3) == SplitRule(99, BARE_BYTES + 4 * COLUMN_BYTES, 3)
    assert SplitRule.of(99, types, buckets, 100).most_bits == 6
    assert SplitRule.of(99, types, [], 2**50).most_bits == MOST_BITS


@pytest.mark.parametrize("bits", [MOST_BITS, 33, 63, 64])
def test_no_bucket_gets_more_bits_than_there_may_be(bits: int) -> None:
    bucket = BucketEntry(id="", bits=bits, base=(DataFile(name="b", rows=1 << 20, bytes=1 << 40),))
    assert rule(1 << 20).extra_bits(bucket, Incoming(0, 0)) == 0


def deep(path: int, bits: int, rows: int, bytes: int) -> list[BucketEntry]:
    """What splits leave that go after some rows for so many bits: these, and an empty bucket beside each step."""
    beside = [BucketEntry(id="", bucket=path >> (bits - b) ^ 1, bits=b) for b in range(1, bits + 1)]
    return [*beside, BucketEntry(id="", bucket=path, bits=bits, base=(DataFile(name="b", rows=rows, bytes=bytes),))]


@pytest.mark.parametrize("bits", [1, 31, 53, 63, 64])
@pytest.mark.parametrize("high", [True, False])
def test_what_was_split_too_far_is_joined(bits: int, high: bool) -> None:
    [one] = rule(16_000, most_bits=0).join(deep(((1 << bits) - 1) * high, bits, 1, 60_000))
    assert (one.bucket, one.bits, [f.name for f in one.data]) == (0, 0, ["b"])


def test_buckets_are_joined_where_they_are_far_smaller_together() -> None:
    def of(sizes: list[int]) -> list[BucketEntry]:
        return [BucketEntry(id="", bucket=n, bits=2, base=(file(str(n), size),)) for n, size in enumerate(sizes)]

    def joined(sizes: list[int]) -> list[tuple[int, int]]:
        return [(b.bucket, b.bits) for b in rule(4_000).join(of(sizes))]

    assert joined([200, 300, 400, 100]) == [(0, 0)]
    assert joined([200, 300, 400, 200]) == [(0, 1), (1, 1)]
    assert joined([900, 300, 400, 200]) == [(0, 2), (1, 2), (1, 1)]
    assert rule(4_000).join(of([900, 300, 900, 200])) == of([900, 300, 900, 200])


def test_records_of_one_column_count_as_the_rows_that_they_are_written_as() -> None:
    bucket = BucketEntry(id="0", base=(file("b", BASE),))
    rows = BASE // 100
    assert NO_LIMIT.in_place("auto", bucket, coming(BASE // 100))[0] == bucket.base
    assert NO_LIMIT.in_place("auto", bucket, Incoming(BASE // 100, rows).as_whole_rows(bucket))[0] == ()
    assert Incoming(BASE // 100, 10).as_whole_rows(bucket).bytes == BASE // 100
