"""What manifests and snapshots say of their files: parts of files, figures, objects, digests."""

from typing import Any

import msgspec
import pytest

from lakeupsert.table.chain import Link
from lakeupsert.table.manifest import (
    NO_ROWS,
    WHOLE,
    BucketEntry,
    Counters,
    DataFile,
    DeletionVector,
    Manifest,
    Part,
    PieceEnd,
    TombstoneFile,
    add_digests,
    first_hash,
    share,
)
from lakeupsert.table.snapshot import Grouped, PartitionVersion, Snapshot

DAY = "d=2020-01-01"
ENDS = (PieceEnd(1, 10), PieceEnd(3, 30), PieceEnd(3, 30), PieceEnd(10, 100))
PACKED = DataFile(name="pack", rows=10, bytes=100, at=1000, row=50, bucket=1, bits=1, pieces=ENDS)
VECTOR = DeletionVector(rows=4, size=7, name="vectors", at=3)


@pytest.mark.parametrize(
    ("of", "within", "part"),
    [
        (WHOLE, WHOLE, 1.0),
        (Part(2, 2), Part(1, 1), 1.0),
        (Part(1, 2), Part(1, 1), 0.0),
        (Part(1, 1), Part(2, 2), 0.5),
        (Part(1, 1), Part(6, 3), 0.25),
        (Part(1, 1), Part(1, 2), 0.0),
    ],
)
def test_share_is_the_part_of_a_buckets_keys_that_another_has(of: Part, within: Part, part: float) -> None:
    assert share(of, within) == part


def test_buckets_begin_where_their_hashes_do() -> None:
    assert [first_hash(part) for part in (WHOLE, Part(1, 1), Part(3, 2))] == [0, 1 << 63, 3 << 62]


@pytest.mark.parametrize(
    ("of", "changes"),
    [
        (Part(2, 2), {"rows": 3, "bytes": 30, "at": 1000, "row": 50, "bucket": 2, "bits": 2, "pieces": ENDS[:2]}),
        (
            Part(3, 2),
            {"rows": 7, "bytes": 70, "at": 1030, "row": 53, "bucket": 3, "bits": 2}
            | {"pieces": (PieceEnd(0, 0), PieceEnd(7, 70))},
        ),
        (Part(5, 3), {"rows": 2, "bytes": 20, "at": 1010, "row": 51, "bucket": 5, "bits": 3, "pieces": ()}),
        (Part(11, 4), {"rows": 2, "bytes": 20, "at": 1010, "row": 51, "bucket": 5, "bits": 3, "pieces": ()}),
    ],
)
def test_part_of_a_file_has_the_pieces_of_its_bucket(of: Part, changes: dict[str, Any]) -> None:
    assert PACKED.within(of) == msgspec.structs.replace(PACKED, **changes)
    alone = msgspec.structs.replace(PACKED, at=None, row=None)
    assert alone.within(of) == msgspec.structs.replace(alone, **{**changes, "at": None, "row": None})


@pytest.mark.parametrize("of", [WHOLE, Part(1, 1)])
def test_file_that_a_bucket_has_whole_is_not_cut(of: Part) -> None:
    assert PACKED.within(of) is PACKED


def test_file_is_read_by_the_pieces_that_have_rows_unless_a_vector_counts_through_them() -> None:
    assert [(part.bucket, part.bits, part.rows, part.at) for part in PACKED.in_pieces] == [
        (4, 3, 1, 1000),
        (5, 3, 2, 1010),
        (7, 3, 7, 1030),
    ]
    for whole in (
        msgspec.structs.replace(PACKED, deleted=VECTOR),
        msgspec.structs.replace(PACKED, pieces=()),
        msgspec.structs.replace(PACKED, pieces=ENDS[3:]),
    ):
        assert whole.in_pieces == [whole]
        assert whole.within(Part(2, 2)) is whole
    halves = msgspec.structs.replace(PACKED, pieces=ENDS[2:])
    assert [part.rows for part in halves.in_pieces] == [3, 7]


def test_place_of_a_file_is_its_row_or_its_byte_or_the_begin() -> None:
    file = DataFile(name="f", rows=1, bytes=1)
    assert file.place == ("f", 0)
    assert msgspec.structs.replace(file, at=5).place == ("f", 5)
    assert msgspec.structs.replace(file, at=5, row=2).place == ("f", 2)


def test_vectors_of_a_file_are_told_apart() -> None:
    small = DeletionVector(rows=1, size=2, inline=b"ab")
    others = [msgspec.structs.replace(small, **change) for change in ({"inline": b"ac"}, {"rows": 2})]
    stored = [VECTOR, msgspec.structs.replace(VECTOR, at=4), msgspec.structs.replace(VECTOR, name="v")]
    assert len({vector.identity for vector in (small, *others, *stored)}) == 6
    assert small.identity == "9e83486d:1"


def test_digests_add_up_in_64_bits_and_are_unknown_with_an_unknown_one() -> None:
    assert add_digests(["f" * 16, f"{2:016x}"]) == f"{1:016x}"
    assert add_digests([NO_ROWS, f"{2**64 - 1:016x}"]) == "f" * 16
    assert add_digests([]) == NO_ROWS
    assert add_digests([NO_ROWS, None]) is None


MANIFEST = Manifest(
    partition=DAY,
    merged=3,
    spec_version=0,
    buckets=(
        BucketEntry(
            id="0",
            bits=1,
            base=(DataFile(name="base", rows=10, bytes=101, deleted=VECTOR), DataFile(name="more", rows=1, bytes=50)),
            deltas=(DataFile(name="delta", rows=2, bytes=30), DataFile(name="later", rows=2, bytes=5)),
            tombstones=(TombstoneFile(name="dead", rows=1, bytes=3), TombstoneFile(name="", rows=1, bytes=2)),
            history=(DataFile(name="past", rows=9, bytes=9),),
            counters=Counters(appended=13, live=11, tombstones=2),
        ),
        BucketEntry(id="1", bits=2, bucket=2),
        BucketEntry(id="2", bits=2, bucket=3, deltas=(DataFile(name="pack", rows=1, bytes=1),)),
    ),
)


def test_manifest_knows_its_rows_bytes_and_objects() -> None:
    assert MANIFEST.buckets[0].debt == 30 + 5 + 101 * 4 / 10
    assert MANIFEST.objects == {"base", "vectors", "more", "delta", "later", "dead", "past", "pack"}
    assert (MANIFEST.rows, MANIFEST.bytes, MANIFEST.files) == (12, 101 + 7 + 50 + 30 + 5 + 3 + 2 + 1, 8)
    empty = Manifest(partition=DAY, merged=0, spec_version=0)
    assert (empty.rows, empty.bytes, empty.files) == (0, 0, 0)


def test_snapshot_has_the_figures_of_the_manifests_that_it_shows() -> None:
    shown = PartitionVersion.of(MANIFEST, 4, "0123456789")
    figures = {"rows": 12, "bytes": 199, "files": 8, "bits": 2, "deltas": 2, "debt": 76}
    assert shown == PartitionVersion(version=4, merged=3, write_id="01234567", **figures)
    empty = PartitionVersion.of(Manifest(partition=DAY, merged=0, spec_version=0), 0)
    assert empty == PartitionVersion(version=0, merged=0, rows=0, bytes=0, files=0, write_id="")
    snapshot = Snapshot(batch=3, spec_version=0, partitions={"a": shown, "b": shown, "c": empty})
    assert (snapshot.rows, snapshot.bytes, snapshot.partitions_with_rows, snapshot.manifests) == (24, 398, 2, 11)
    assert snapshot.bits == {"a": 2, "b": 2}
    one = msgspec.structs.replace(shown, rows=1)
    assert msgspec.structs.replace(snapshot, partitions={"a": one}).partitions_with_rows == 1


def test_snapshot_keeps_what_did_not_expire_and_what_has_a_tag() -> None:
    snapshot = Snapshot(batch=3, spec_version=0, expired=4, tags={"here": 1})
    assert [number for number in range(6) if snapshot.keeps(number)] == [1, 4, 5]


@pytest.mark.parametrize(("number", "merged", "lost"), [(4, 3, False), (5, 4, False), (3, 3, True), (4, 2, True)])
def test_version_is_lost_if_the_head_is_older(number: int, merged: int, lost: bool) -> None:
    shown = PartitionVersion.of(MANIFEST, 4)
    head = Link(number, "", None, "", msgspec.structs.replace(MANIFEST, merged=merged), 0.0)
    snapshot = Snapshot(batch=3, spec_version=0, partitions={DAY: shown})
    assert snapshot.lost(DAY, head) is lost
    assert snapshot.lost(DAY, None)
    assert not snapshot.lost("another", None)
    grouped = msgspec.structs.replace(shown, group=Grouped(name="g", merged=2))
    in_group = msgspec.structs.replace(snapshot, partitions={DAY: grouped})
    assert in_group.lost(DAY, head) is (number < 4)


@pytest.mark.parametrize("change", [{"batch": 4}, {"partitions": {}}, {"lagging": (DAY,)}])
def test_snapshots_that_readers_can_tell_apart_do_not_show_the_same(change: dict[str, Any]) -> None:
    snapshot = Snapshot(batch=3, spec_version=0, partitions={DAY: PartitionVersion.of(MANIFEST, 4)})
    assert snapshot.shows(msgspec.structs.replace(snapshot, tags={"here": 1}, expired=1))
    assert not snapshot.shows(msgspec.structs.replace(snapshot, **change))
