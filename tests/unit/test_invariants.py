"""The invariants of the chains of manifests, the ledger and snapshots: each is seen to refuse, and what keeps it passes."""

from typing import Any

import msgspec
import pytest

from lakeupsert.errors import DamagedTableError
from lakeupsert.table.ledger import (
    FullExtract,
    LandingFile,
    LedgerEntry,
    QuarantineFile,
    ReplayedFile,
    RestorePoint,
    Statement,
    Touched,
    check_entry,
)
from lakeupsert.table.manifest import (
    BucketEntry,
    Counters,
    DataFile,
    DeletionVector,
    FailedMark,
    Manifest,
    TombstoneFile,
    check_manifest,
)
from lakeupsert.table.snapshot import PartitionVersion, Snapshot, check_snapshot

replace = msgspec.structs.replace
DAY, OTHER = "day=2020-01-01", "day=2020-01-02"


def refused(error: pytest.ExceptionInfo[DamagedTableError], named: str) -> None:
    assert error.value.code == "broken-invariant"
    assert named in error.value.message


# -- manifests

FILE = DataFile(name=f"{DAY}/base-0-x.parquet", rows=5, bytes=100, deleted=DeletionVector(rows=2, size=10))
TOMBSTONES = TombstoneFile(name="", rows=1, bytes=10)
COUNTERS = Counters(appended=10, live=3, tombstones=1, superseded=2, tombstones_dropped=1, refused=1, withdrawn=2)
BUCKET = BucketEntry(id="0", base=(FILE,), tombstones=(TOMBSTONES,), counters=COUNTERS)
MANIFEST = Manifest(partition=DAY, merged=3, spec_version=0, buckets=(BUCKET,))
EMPTY = BucketEntry(id="1")


@pytest.mark.parametrize(
    "new",
    [
        replace(MANIFEST, merged=4),
        replace(MANIFEST, fence=1),
        replace(MANIFEST, failed=FailedMark(batch=4, reason="why")),
        replace(MANIFEST, buckets=()),
        replace(
            MANIFEST,
            buckets=(replace(BUCKET, bits=1), replace(EMPTY, bits=2, bucket=2), replace(EMPTY, bits=2, bucket=3)),
        ),
    ],
)
def test_manifest_may_follow(new: Manifest) -> None:
    check_manifest(None, MANIFEST)
    check_manifest(MANIFEST, new)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"partition": OTHER}, OTHER),
        ({"merged": 2}, "`merged`"),
        ({"failed": FailedMark(batch=3, reason="why")}, "batch 3"),
        ({"buckets": (replace(BUCKET, bits=1),)}, "[(0, 1)]"),
        ({"buckets": (BUCKET, replace(EMPTY, bits=1))}, "(0, 0), (0, 1)"),
    ],
)
def test_manifest_that_contradicts_its_chain_or_its_buckets_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(DamagedTableError) as error:
        check_manifest(MANIFEST, replace(MANIFEST, **changes))
    refused(error, named)
    assert error.value.partition == changes.get("partition", DAY)


@pytest.mark.parametrize("counter", COUNTERS.__struct_fields__)
def test_bucket_whose_counters_do_not_add_up_is_refused(counter: str) -> None:
    wrong = replace(COUNTERS, **{counter: getattr(COUNTERS, counter) + 1})
    with pytest.raises(DamagedTableError) as error:
        check_manifest(None, replace(MANIFEST, buckets=(replace(BUCKET, counters=wrong),)))
    refused(error, "appended")


@pytest.mark.parametrize(
    "changes",
    [
        {"counters": replace(COUNTERS, live=4, superseded=1)},
        {"counters": replace(COUNTERS, tombstones=0, tombstones_dropped=2)},
        {"base": ()},
        {"deltas": (FILE,)},
        {"tombstones": ()},
        {"base": (replace(FILE, deleted=None),)},
    ],
)
def test_bucket_whose_files_hold_other_rows_than_its_counters_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DamagedTableError) as error:
        check_manifest(None, replace(MANIFEST, buckets=(replace(BUCKET, **changes),)))
    refused(error, "counters")


# -- the ledger

CREATE = LedgerEntry(kind="create", batch_id="create", received_at=1, spec_version=2)
TOUCHED = Touched(files=(FILE,), rows=4, superseded=1, bytes=100)
BATCH = LedgerEntry(
    kind="batch",
    batch_id="a",
    received_at=2,
    spec_version=2,
    files=(LandingFile(path="a.csv", size=1, etag="e", sha256="0", rows=6),),
    touched={DAY: TOUCHED},
    rows_read=6,
    quarantined={"malformed": 2},
    quarantine=(QuarantineFile(name="q", rows=2),),
)
RESTORE = LedgerEntry(
    kind="restore",
    batch_id="r",
    received_at=3,
    spec_version=2,
    touched={DAY: Touched(files=(), rows=0, superseded=0, bytes=0)},
    restored=RestorePoint(snapshot=0, batch=0, versions={DAY: -1}),
)
FENCE = LedgerEntry(kind="fence", batch_id="f", received_at=3, spec_version=2, fence=1)
SCHEMA = LedgerEntry(kind="schema", batch_id="s", received_at=3, spec_version=3)
REPLAY = replace(
    BATCH,
    received_at=3,
    files=(),
    replayed=(ReplayedFile(batch=1, name="q", rows=4), ReplayedFile(batch=1, name="r", rows=2)),
)
STATEMENT = replace(
    BATCH, files=(), rows_read=4, quarantined={}, quarantine=(), statement=Statement(where="v = 1", seen=0, objects=())
)


def test_entries_of_each_kind_may_follow() -> None:
    check_entry(None, CREATE)
    check_entry(CREATE, BATCH)
    for new in (RESTORE, FENCE, SCHEMA, REPLAY):
        check_entry(BATCH, new)
    check_entry(CREATE, STATEMENT)
    check_entry(CREATE, replace(BATCH, touched={DAY: replace(TOUCHED, rows=5, superseded=2, moved=1)}))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (None, BATCH, "kind batch"),
        (CREATE, replace(CREATE, received_at=2), "kind create"),
        (CREATE, replace(BATCH, received_at=1), "stamp 1"),
        (CREATE, replace(BATCH, received_at=0), "stamp 0"),
        (CREATE, replace(BATCH, spec_version=1), "from 2 to 1"),
        (BATCH, replace(RESTORE, restored=None), "kind restore"),
        (BATCH, replace(BATCH, received_at=3, restored=replace(RESTORE.restored, versions={DAY: 0})), "kind batch"),
        (BATCH, replace(RESTORE, rows_read=1, quarantined={"malformed": 1}), "refuses rows: malformed"),
        (BATCH, replace(RESTORE, touched={}), "partitions"),
        (BATCH, replace(RESTORE, restored=replace(RESTORE.restored, versions={DAY: -1, OTHER: -1})), "partitions"),
        (BATCH, replace(SCHEMA, touched=RESTORE.touched), "touches 1 partitions"),
        (BATCH, replace(SCHEMA, rows_read=1, quarantined={"malformed": 1}), "refuses rows: malformed"),
        (BATCH, replace(FENCE, fence=None), "kind fence"),
        (CREATE, replace(BATCH, fence=1), "fence 1"),
        (BATCH, replace(REPLAY, files=BATCH.files), "1 landing files"),
        (BATCH, replace(SCHEMA, replayed=(ReplayedFile(batch=1, name="q", rows=0),)), "kind schema"),
        (BATCH, replace(REPLAY, replayed=REPLAY.replayed[:1]), "4 in what it replays"),
        (BATCH, replace(REPLAY, replayed=REPLAY.replayed[:1] * 2, rows_read=8, quarantined={"malformed": 4}), "twice"),
        (BATCH, replace(FENCE, statement=STATEMENT.statement), "is a statement"),
        (CREATE, replace(STATEMENT, files=BATCH.files), "is a statement"),
        (BATCH, replace(STATEMENT, received_at=3, replayed=REPLAY.replayed[:1]), "is a statement"),
        (CREATE, replace(STATEMENT, full=FullExtract(scope="table", order="")), "is a statement"),
        (CREATE, replace(STATEMENT, rows_read=6, quarantined=BATCH.quarantined), "is a statement"),
        (CREATE, replace(BATCH, rows_read=7), "7 rows read"),
        (CREATE, replace(BATCH, quarantined={}), "0 quarantined"),
        (CREATE, replace(BATCH, touched={DAY: replace(TOUCHED, moved=1)}), "3 appended"),
        (CREATE, replace(BATCH, touched={DAY: replace(TOUCHED, superseded=2)}), "2 superseded"),
        (CREATE, replace(BATCH, touched={DAY: replace(TOUCHED, files=())}), DAY),
    ],
)
def test_entry_that_breaks_one_invariant_is_refused(old: LedgerEntry | None, new: LedgerEntry, named: str) -> None:
    with pytest.raises(DamagedTableError) as error:
        check_entry(old, new)
    refused(error, named)
    assert repr(new.batch_id) in error.value.message
    assert ";" not in error.value.message.partition(": ")[2].partition("It was not written")[0]


# -- snapshots

SHOWN = PartitionVersion(version=4, merged=3, rows=10, bytes=100, files=1, write_id="")
SNAPSHOT = Snapshot(batch=5, spec_version=0, partitions={DAY: SHOWN, OTHER: SHOWN}, lagging=(OTHER,), expired=2)


def test_snapshots_may_follow() -> None:
    check_snapshot(None, SNAPSHOT)
    check_snapshot(SNAPSHOT, SNAPSHOT)
    newer = {DAY: replace(SHOWN, version=5, merged=6), OTHER: SHOWN, "day=2020-01-03": SHOWN}
    check_snapshot(SNAPSHOT, replace(SNAPSHOT, batch=6, partitions=newer, lagging=(), expired=3))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"expired": 1}, "1 after 2"),
        ({"batch": 4}, "from 5 to 4"),
        ({"partitions": {OTHER: SHOWN}}, DAY),
        ({"partitions": {DAY: replace(SHOWN, version=3), OTHER: SHOWN}}, f"{DAY} "),
        ({"partitions": {DAY: replace(SHOWN, merged=2), OTHER: SHOWN}}, f"{DAY} "),
        ({"partitions": {DAY: replace(SHOWN, version=5, merged=6), OTHER: SHOWN}}, "beyond batch 5"),
        ({"lagging": ("day=2020-01-03",)}, "day=2020-01-03"),
    ],
)
def test_snapshot_that_breaks_one_invariant_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(DamagedTableError) as error:
        check_snapshot(SNAPSHOT, replace(SNAPSHOT, **changes))
    refused(error, named)
    assert ";" not in error.value.message.partition(": ")[2].partition("It was not written")[0]
