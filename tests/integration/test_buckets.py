"""Partitions of several buckets through the table: split by merges and compactions, merged in units that workers share."""

import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.engine.hosted import HostedEngine
from lakeupsert.engine.hosts import LocalHost
from lakeupsert.operations import vacuum
from lakeupsert.operations.reconcile import prove
from lakeupsert.operations.reprocess import ReprocessOptions, reprocess
from lakeupsert.pipeline import strategy
from lakeupsert.pipeline.merge import units
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.merge.dedupe import dedupe_partitions, dedupe_unit
from lakeupsert.pipeline.stop import WorkerOptions
from lakeupsert.pipeline.workers import pool as worker_pool
from lakeupsert.pipeline.workers.worker import drain
from lakeupsert.rows.buckets import buckets, key_hashes
from lakeupsert.storage import UnknownOutcomeError
from lakeupsert.table.manifest import Manifest
from tests.harness.faults import FAULTS, Fault
from tests.harness.lake import Lake, made_once, row, split_tiny_files

PARTITION = "d=2020-01-01"
ROWS = 3000
FEW = 500


def manifest(lake: Lake, partition: str = PARTITION) -> Manifest:
    head = lake.table.objects.partition(partition).head()
    assert head is not None
    return head.body


def land_nights(lake: Lake, nights: int = 3) -> None:
    """A first night of many rows, then updates, deletes, late and new rows."""
    lake.land("0.jsonl", [row(f"k{i:05}", 0, 10, i) for i in range(ROWS)])
    lake.run()
    for night in range(1, nights + 1):
        changed = [row(f"k{i:05}", 0, 10 * night + 10, -i) for i in range(night, ROWS, 13)]
        gone = [row(f"k{i:05}", 0, 99, op="D") for i in range(5 * night, ROWS, 97)]
        new = [row(f"new{night}-{i}", 0, 1) for i in range(50)]
        lake.land(f"{night}.jsonl", [*changed, *gone, *new, row(f"k{night:05}", 1, 1)])
        lake.run()
    lake.check()


@pytest.mark.parametrize("chosen", ["rewrite", "delta", "auto"])
@pytest.mark.long
def test_a_partition_is_split_where_it_outgrows_a_bucket(
    tmp_path: Path, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "SMALL_BYTES", 0)
    lake = Lake(tmp_path / "lake", strategy=chosen, bucket="4KiB")
    land_nights(lake)
    body = manifest(lake)
    assert len(body.buckets) >= 4
    spec = lake.table.objects.spec()
    for bucket in body.buckets:
        for file in bucket.data:
            assert (file.bucket, file.bits) == (bucket.bucket, bucket.bits)
            keys = pq.read_table(tmp_path / "lake" / "processed" / file.name)
            assert set(buckets(key_hashes(keys, spec), file.bits)) == {file.bucket}
    keys = [(r["k"], r["l"]) for r in lake.rows() if r["d"] == r["d"].replace(day=1)]
    assert keys == sorted(keys), "readers see key order over all buckets"
    lake.table.compact(full=True)
    lake.check()


@made_once
def appended(folder: Path) -> Lake:
    """A partition of several buckets; a night for it is appended."""
    lake = Lake(folder, bucket="8KiB")
    lake.land("0.jsonl", [row(f"k{i:05}", 0, 10, i) for i in range(ROWS)])
    with pytest.MonkeyPatch.context() as patch:
        split_tiny_files(patch)
        lake.run()
    lake.land(
        "1.jsonl", [row(f"k{i:05}", 0, 20 + i % 2, -i, op="D" if i % 9 == 0 else None) for i in range(0, ROWS, 5)]
    )
    lake.land("2.jsonl", [row(f"k{i:05}", 0, 20, i) for i in range(0, ROWS, 10)])
    lake.table.append(host="local")
    return lake


@pytest.fixture
def shared(appended: Lake, monkeypatch: pytest.MonkeyPatch, tiny_files_split: None) -> Lake:
    """The same, and that night is too much for one worker."""
    monkeypatch.setattr(units, "ALONE_BUCKETS", 1)
    return appended


def wanted(lake: Lake) -> dict[str, int]:
    return {PARTITION: max(number for number, entry in lake.entries() if PARTITION in entry.touched)}


def count_units(lake: Lake, work: str | None = None) -> int:
    """What a worker finds who looks at the whole partition."""
    [plain] = dedupe_partitions(lake.opened, ArrowEngine(), wanted(lake), work)
    assert plain.status == "shared"
    assert len(plain.units) > 2
    return len(plain.units)


def results_left(lake: Lake) -> list[Path]:
    return list((lake.root / "processed/_lakeupsert/units").glob("*/*.json"))


def merge_units(lake: Lake, numbers: Any, work: str | None = None) -> list[str]:
    found = [dedupe_unit(lake.opened, ArrowEngine(), wanted(lake), work, unit=n) for n in numbers]
    return [result.status for of_call in found for result in of_call]


def test_workers_share_a_partition_and_the_last_one_commits(shared: Lake) -> None:
    before, count = manifest(shared), count_units(shared)
    assert merge_units(shared, [*range(1, count), 1]) == ["clean"] * count
    assert manifest(shared) == before
    assert len(results_left(shared)) == count - 1
    assert merge_units(shared, [0]) == ["merged"]
    assert manifest(shared).merged == before.merged + 1
    assert not results_left(shared)
    assert manifest(shared).merged == wanted(shared)[PARTITION]
    assert not results_left(shared)
    shared.finish_and_check()


def test_messages_of_units_bring_a_night_to_its_end(shared: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    merged: list[int] = []
    put = units.UnitResults.put
    monkeypatch.setattr(
        units.UnitResults, "put", lambda self, number, output: (merged.append(number), put(self, number, output))
    )
    results: list[PartitionResult] = []
    drain(shared.opened, ArrowEngine(), WorkerOptions(collect=results.append))
    assert len(merged) > 2
    assert [(r.partition, r.status) for r in results] == [(PARTITION, "merged")]
    shared.finish_and_check()
    shared.table.compact(full=True, workers=2)
    shared.check()


@pytest.mark.long
@pytest.mark.usefixtures("tiny_files_split")
def test_processes_share_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    pool = worker_pool.ProcessPoolExecutor
    monkeypatch.setattr(worker_pool, "ProcessPoolExecutor", lambda *a, **k: begun.append(a) or pool(*a, **k))
    lake = Lake(tmp_path / "lake", bucket="1500B")
    lake.land("0.jsonl", [row(f"k{i:05}", 0, 10, i) for i in range(ROWS)])
    lake.run(workers=2)
    lake.land("1.jsonl", [row(f"k{i:05}", 0, 20, -i) for i in range(0, ROWS, 5)])
    results = lake.table.run(host="local", workers=2).dedupe
    assert [r.status for r in results] == ["merged"]
    assert len(begun) >= 2, "one message became many, and one process did them all"
    lake.check()


@pytest.mark.long
def test_two_workers_that_find_all_units_done_commit_once(shared: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    count = count_units(shared)
    merge_units(shared, range(count - 1))
    others: list[str] = []
    read = units.UnitResults.read

    def meanwhile(self: units.UnitResults) -> Any:
        found = read(self)
        if not others:
            others.append("")
            others[:] = merge_units(shared, [0])
        return found

    monkeypatch.setattr(units.UnitResults, "read", meanwhile)
    assert merge_units(shared, [count - 1]) == ["outdated"]
    assert others == ["merged"]
    shared.finish_and_check()


@pytest.mark.long
def test_a_compaction_in_units_meets_a_night(shared: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.finish_and_check()
    table = shared.opened
    reprocess(table, ReprocessOptions())
    [work] = {lease.message.work for lease in table.resources.queue.receive(10, 0.0)}
    count = count_units(shared, work)
    assert merge_units(shared, range(count - 1), work) == ["clean"] * (count - 1)
    shared.land("3.jsonl", [row(f"k{i:05}", 0, 30, 3) for i in range(7, FEW, 5)])
    shared.table.append(host="local")
    assert "merged" in merge_units(shared, range(count_units(shared)))
    assert merge_units(shared, [count - 1], work) == ["clean"], "what was compacted before the night is of no use"
    shared.run()
    assert manifest(shared).reprocessed == work
    shared.finish_and_check()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vacuum that fences off whoever merges."""
    for kept in ("ORPHANS_KEPT", "UNITS_KEPT"):
        monkeypatch.setattr(vacuum, kept, timedelta(0))


def test_a_vacuum_waits_for_units_of_the_same_day(shared: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacuum, "ORPHANS_KEPT", timedelta(0))
    count = count_units(shared)
    merge_units(shared, range(count - 1))
    shared.table.vacuum(dry=False)
    assert merge_units(shared, [count - 1]) == ["merged"], "what was done counts"
    shared.finish_and_check()


@pytest.mark.usefixtures("hasty")
def test_nobody_commits_units_from_before_a_fence(shared: Lake) -> None:
    count = count_units(shared)
    merge_units(shared, range(count - 1))
    shared.table.vacuum(dry=False)
    assert not results_left(shared)
    assert merge_units(shared, range(count)) == ["clean"] * (count - 1) + ["merged"]
    shared.finish_and_check()


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_units_are_struck_at_every_call(shared: Lake, fault: Fault) -> None:
    def merge(lake: Lake) -> None:
        drain(lake.opened, ArrowEngine(), WorkerOptions())

    assert shared.strike_every_call(fault, merge, Lake.finish_and_check) > 40


@pytest.fixture
def adopted(tmp_path: Path) -> Lake:
    """A partition of two adopted files with the same keys, and a night for it that is not merged."""
    folder = tmp_path / f"lake/processed/{PARTITION}"
    folder.mkdir(parents=True)
    for number in range(2):
        theirs = [
            {n: v for n, v in row(f"k{i:05}", 0, 10, number).items() if n not in ("d", "op")} for i in range(ROWS)
        ]
        schema = pa.schema([("k", "string"), ("l", "int32"), ("ts", pa.timestamp("us")), ("v", "int64")])
        pq.write_table(pa.Table.from_pylist(theirs, schema), folder / f"theirs-{number}.parquet")
    lake = Lake(tmp_path / "lake", bucket="8KiB")
    lake.table.adopt()
    lake.land("1.jsonl", [row("k00001", 0, 20, 7)])
    lake.table.append(host="local")
    return lake


def test_an_adopted_partition_is_split_by_its_first_merge(adopted: Lake) -> None:
    adopted.table.run(host="local")
    assert len(manifest(adopted).buckets) > 2
    proofs = prove(adopted.opened, adopted.table.snapshots()[0], LocalHost())
    assert [(p.rows_live, p.rows_superseded, p.difference, p.by_digest) for p in proofs] == [
        (ROWS, ROWS + 1, None, True)
    ]
    assert {r["v"] for r in adopted.rows()} == {1, 7}


def test_a_cut_that_fails_in_part_leaves_nothing(adopted: Lake, tiny_files_split: None) -> None:
    """The second adopted file is damaged in its rows, so the first one has been cut by then."""
    file = adopted.root / "processed" / PARTITION / "theirs-1.parquet"
    data = bytearray(file.read_bytes())
    data[40:400] = bytes(360)
    file.write_bytes(data)
    before = adopted.stored_files()
    [result] = dedupe_partitions(adopted.opened, HostedEngine(LocalHost(), None), {PARTITION: 1})
    assert result.status == "failed"
    assert adopted.stored_files() == before
    assert not list(adopted.opened.resources.store.list("_lakeupsert/units/"))


def amid_units(lake: Lake, monkeypatch: pytest.MonkeyPatch, what: Callable[[], object]) -> None:
    """Let something happen when the second unit is merged and its result not there yet; then only empty the queue."""
    put, count = units.UnitResults.put, [0]

    def meanwhile(self: units.UnitResults, number: int, output: Any) -> None:
        count[0] += 1
        if count[0] == 2:
            what()
        put(self, number, output)

    monkeypatch.setattr(units.UnitResults, "put", meanwhile)
    drain(lake.opened, ArrowEngine(), WorkerOptions())
    assert count[0] > 2
    assert manifest(lake).merged == wanted(lake)[PARTITION], "the queue is empty, and a batch is not merged"
    lake.table.publish()
    lake.check()


@pytest.mark.usefixtures("hasty")
def test_a_fence_amid_units_leaves_nothing_unmerged(shared: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of units from before it are deleted, so their results count for nobody, also those that come late."""
    amid_units(shared, monkeypatch, lambda: shared.table.vacuum(dry=False))


def test_a_compaction_amid_units_leaves_nothing_unmerged(shared: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    table = shared.opened

    def compact() -> None:
        engine = ArrowEngine()
        monkeypatch.setattr(engine, "shares_units", False)
        reprocess(table, ReprocessOptions())
        [work] = {lease.message.work for lease in table.resources.queue.receive(99, 0.0)} - {None}
        [result] = dedupe_partitions(table, engine, wanted(shared), work)
        assert result.status == "merged"

    amid_units(shared, monkeypatch, compact)


@pytest.mark.parametrize("effect", [True, False])
def test_a_result_whose_create_is_not_answered_is_sent_again(
    shared: Lake, monkeypatch: pytest.MonkeyPatch, effect: bool
) -> None:
    store, lost = shared.opened.resources.store, [0]
    create = store.create

    def silent(name: str, data: bytes) -> bool:
        if "/unit-" in name and not lost[0]:
            lost[0] += 1
            if effect:
                create(name, data)
            raise UnknownOutcomeError(name)
        return create(name, data)

    monkeypatch.setattr(store, "create", silent)
    drain(shared.opened, ArrowEngine(), WorkerOptions())
    assert lost == [1]
    assert manifest(shared).merged == wanted(shared)[PARTITION]
    shared.finish_and_check()


def test_of_two_workers_at_one_unit_the_second_deletes_its_own_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "SMALL_BYTES", 0)
    monkeypatch.setattr(units, "ALONE_BUCKETS", 1)
    lake = Lake(tmp_path / "lake", bucket="8KiB")
    lake.land("0.jsonl", [row(f"k{i:05}", 0, 10, i) for i in range(ROWS)])
    lake.run()
    lake.settings = msgspec.structs.replace(lake.settings, strategy="delta")
    lake.reopen()
    lake.land("1.jsonl", [row(f"k{i:05}", 0, 20, -i) for i in range(0, ROWS, 50)])
    lake.table.append(host="local")
    merge, kept = ArrowEngine.merge, [0]

    def twice(self: ArrowEngine, *given: Any) -> Any:
        monkeypatch.setattr(ArrowEngine, "merge", merge)
        outputs = merge(self, *given)
        kept[0] = len(outputs[0].kept)
        merge_units(lake, [0])
        return outputs

    monkeypatch.setattr(ArrowEngine, "merge", twice)
    merge_units(lake, [0])
    assert kept[0] > 0
    lake.finish_and_check()


LARGE = {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz", "v": "string", "op": "string"}
"""The lake's columns, with text in v."""


def text(rng: random.Random, size: int) -> str:
    """That no codec makes much smaller."""
    return rng.randbytes(size // 2).hex()


def bits_of(lake: Lake) -> list[int]:
    return [bucket.bits for bucket in manifest(lake).buckets]


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("chosen", ["rewrite", "delta", "auto"])
def test_rows_larger_than_a_bucket_do_not_split_it_every_night(tmp_path: Path, chosen: str) -> None:
    rng = random.Random(chosen)
    lake = Lake(tmp_path / "lake", strategy=chosen, bucket="16KB", schema=LARGE)
    small = [row(f"s{i}", 0, 1, str(i)) for i in range(20)]
    for night in range(12):
        large = [row(f"k{i}", 0, night, text(rng, 60_000)) for i in range(2)]
        lake.land(f"{night}.jsonl", [*large, *(small if night == 5 else [])])
        lake.run()
        assert max(bits_of(lake)) <= (1 if night < 5 else 4), f"night {night}: {bits_of(lake)}"
    lake.check()


def test_files_that_are_all_footer_do_not_split_a_bucket(tmp_path: Path) -> None:
    wide = {f"column_with_a_long_name_{i}": "bigint" for i in range(60)}
    lake = Lake(tmp_path / "lake", bucket="1500B", schema={**LARGE, **wide})
    for night in range(4):
        lake.land(f"{night}.jsonl", [row(f"k{i}", 0, night, "x") for i in range(50)])
        lake.run()
    [bucket] = manifest(lake).buckets
    assert sum(f.bytes for f in bucket.base) > 10 * 1500


def versions_of(lake: Lake) -> list[dict[str, Any]]:
    found = lake.table.to_arrow(history=True).read_all().to_pylist()
    return sorted(found, key=lambda r: (r["k"], r["ts"], str(r)))


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("engine", "chosen", "seed"),
    [
        ("arrow", "rewrite", 0),
        ("arrow", "rewrite", 1),
        ("arrow", "delta", 1),
        ("arrow", "delta", 2),
        pytest.param("spark", "auto", 2, marks=pytest.mark.long),
    ],
)
def test_random_nights_of_large_rows_come_to_the_same_with_one_bucket(
    tmp_path: Path, engine: str, chosen: str, seed: int, request: pytest.FixtureRequest
) -> None:
    if engine == "spark":
        request.getfixturevalue("spark")
    rng = random.Random(f"{engine} {chosen} {seed}")
    retention = rng.choice([None, "0d", "90d"])
    settings = {"strategy": chosen, "schema": LARGE, "history": seed == 2, "tombstone_retention": retention}
    many = Lake(tmp_path / "many", bucket=f"{rng.choice([1, 4, 16])}KiB", **settings)
    one = Lake(tmp_path / "one", bucket="1GiB", **settings)
    keys = [f"k{i}" for i in range(rng.choice([3, 12, 60]))]
    for night in range(8 if engine == "arrow" else 4):
        rows = [
            row(rng.choice(keys), 0, rng.randrange(100), text(rng, rng.choice([20, 2_000, 30_000])), op=operation)
            for operation in rng.choices([None, "D"], [5, 1], k=rng.randrange(1, 30))
        ]
        for lake in (many, one):
            lake.land(f"{night}.jsonl", rows)
            lake.table.run(host="local", engine=engine)
            if night % 3 == 2:
                lake.table.compact(full=True)
        assert many.rows() == one.rows()
        assert manifest(many).changes == manifest(one).changes
    assert len(bits_of(one)) == 1
    assert 2 ** max(bits_of(many)) <= 60
    for lake in (many, one):
        assert all(p.balanced for p in prove(lake.opened, lake.table.snapshots()[0], LocalHost()))
    if seed == 2:
        assert versions_of(many) == versions_of(one)
