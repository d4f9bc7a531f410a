"""Strategy delta through the table and its commands: what is written, what readers of every kind see, what damage tells."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert.api import Table
from lakeupsert.cli import main
from lakeupsert.config import TableSettings
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.errors import DamagedTableError
from lakeupsert.operations.reprocess import ReprocessOptions, reprocess
from lakeupsert.pipeline import strategy
from lakeupsert.pipeline.merge.commit import PartitionResult
from lakeupsert.pipeline.stop import WorkerOptions
from lakeupsert.pipeline.workers.worker import drain
from lakeupsert.read import arrow
from lakeupsert.read import spark as spark_reader
from lakeupsert.rows import vectors
from lakeupsert.rows.datafiles import ROW_GROUP_BYTES
from tests.harness.lake import Lake, made_once, row

ROWS = 400


@made_once
def nights(folder: Path) -> Lake:
    """Two partitions with a base and, after two nights of updates, deletes, late rows and inserts, two deltas."""
    lake = Lake(folder, strategy="delta")
    lake.land("0.jsonl", [row(f"k{i:03}", i % 2, 10, i) for i in range(ROWS)])
    lake.run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors, "INLINE_BYTES", 40)  # so that vectors lie in objects too
        for night in (1, 2):
            changed = [row(f"k{i:03}", i % 2, 10 * night + 10, -i) for i in range(night, ROWS, 7)]
            late = [row(f"k{i:03}", i % 2, 5, 0) for i in range(3, ROWS, 11)]
            gone = [row(f"k{i:03}", i % 2, 99, op="D") for i in range(5 * night, 20 * night, 4)]
            lake.land(f"{night}.jsonl", [*changed, *late, *gone, row(f"new{night}", 0, 1), row(f"new{night}", 1, 1)])
            lake.run()
    return lake


@pytest.fixture
def lake(nights: Lake, monkeypatch: pytest.MonkeyPatch) -> Lake:
    monkeypatch.setattr(vectors, "INLINE_BYTES", 40)
    return nights


def command(lake: Lake, *arguments: str) -> Any:
    return CliRunner().invoke(main, [*arguments, "--config", str(lake.configure())])


def test_a_night_writes_what_arrived_and_leaves_the_base(lake: Lake) -> None:
    lake.check()
    for partition in ("d=2020-01-01", "d=2020-01-02"):
        first, *_, last = lake.table.objects.partition(partition).between(-1, 2)
        [old], [new] = first.body.buckets, last.body.buckets
        assert [f.name for f in new.base] == [f.name for f in old.base]
        assert len(new.deltas) == 2
        assert all(f.deleted for f in new.base)
        assert last.body.made["strategy"] == "delta"
        assert sum(f.live for f in new.data) == new.counters.live < sum(f.rows for f in new.data)
    lake.table.vacuum(dry=False)
    lake.check()


@pytest.mark.core
def test_every_reader_leaves_superseded_rows_out(lake: Lake, spark: Any, tmp_path: Path) -> None:
    expected = [tuple(r.values()) for r in lake.rows()]
    assert sorted(map(tuple, lake.table.to_spark(spark).collect())) == sorted(expected)
    for where in ("v < 0", "k > 'k2' AND d = '2020-01-02'", "k LIKE 'new%'"):
        found = duckdb.arrow(lake.table.to_arrow().read_all()).filter(where).fetchall()
        assert found
        assert [tuple(r.values()) for r in lake.table.to_arrow(where=where).read_all().to_pylist()] == found
        assert sorted(map(tuple, lake.table.to_spark(spark, where=where).collect())) == sorted(found)
    lake.land("late.jsonl", [row("k001", 1, 1000, 5)])
    lake.table.append(host="local")
    latest = [tuple(r.values()) for r in lake.rows("latest")]
    assert len(set(latest) - set(expected)) == 1
    assert sorted(map(tuple, lake.table.to_spark(spark, "latest").collect())) == sorted(latest)


@pytest.mark.parametrize("changed", [[1], [1, 2]])
def test_spark_tells_files_of_one_size_apart(changed: list[int], tmp_path: Path, spark: Any) -> None:
    lake = Lake(tmp_path, strategy="delta")
    lake.land("0.jsonl", [row(f"k{i:03}", day, 10, i) for day in range(3) for i in range(50)])
    lake.run()
    lake.land("1.jsonl", [row(f"k{6 + day:03}", day, 20) for day in changed])
    lake.run()
    assert len({file.bytes for file in lake.table.files() if file.name.startswith("d=")}) == 1
    assert sorted(map(tuple, lake.table.to_spark(spark).collect())) == sorted(tuple(r.values()) for r in lake.rows())


@pytest.mark.parametrize("most", [0, spark_reader.BROADCAST_BLOCKS])
def test_spark_looks_up_every_row_of_many_blocks(
    most: int, tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_reader, "BROADCAST_BLOCKS", most)
    lake = Lake(tmp_path, strategy="delta")
    lake.land("0.jsonl", [row(f"k{i:05}", day, 10, i) for day in (0, 1) for i in range(5000)])
    lake.run()
    changed = {0: {*range(62, 66), 1023, 1024, 2047, *range(3072, 4096), 4999}, 1: {0, 1025, 4095, 4096}}
    lake.land("1.jsonl", [row(f"k{i:05}", day, 20, -i - 1) for day, numbers in changed.items() for i in numbers])
    lake.run()
    found = lake.table.to_spark(spark).collect()
    assert len(found) == 10_000
    by_day = [{r.k for r in found if r.v < 0 and r.d == day} for day in sorted({r.d for r in found})]
    assert by_day == [{f"k{i:05}" for i in numbers} for numbers in changed.values()]


def test_spark_scans_natively_and_pushes_down(lake: Lake, spark: Any) -> None:
    frame = lake.table.to_spark(spark, where="v < 0 AND d = '2020-01-01'").select("k")
    text = str(frame._jdf.queryExecution().executedPlan())
    scans = [line for line in text.splitlines() if "FileScan parquet" in line]
    assert scans
    assert all("LessThan(v,0)" in line and "PartitionFilters: [isnotnull(d" in line for line in scans), text
    assert all("ts:" not in line.partition("ReadSchema")[2] for line in scans), "only columns that are asked for"
    assert "BroadcastHashJoin" in text
    assert "Python" not in text
    assert "Arrow" not in text


@pytest.mark.long
def test_files_are_not_handed_to_who_opens_them_alone(lake: Lake) -> None:
    refused = command(lake, "files")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "compact --full" in refused.stderr
    assert command(lake, "compact", "--full").exit_code == 0
    listed = command(lake, "files")
    assert listed.exit_code == 0
    paths = listed.stdout.split()
    assert sum(pq.read_metadata(path).num_rows for path in paths) == len(lake.rows())
    lake.check()


def test_a_vector_that_is_gone_is_told_and_made_anew(lake: Lake) -> None:
    for path in (lake.root / "processed" / "_lakeupsert" / "data").rglob("*.roaring"):
        path.unlink()
    with pytest.raises(DamagedTableError) as e:
        lake.rows()
    assert e.value.code == "damaged-deletion-vector"
    assert e.value.next is not None
    for partition in ("d=2020-01-01", "d=2020-01-02"):
        anew = ("reprocess", "--partition", partition, "--source", "landing", "--host", "local")
        assert command(lake, *anew).exit_code == 0
    lake.reopen()
    assert lake.rows() == lake.expected(lake.entries()[-1][0])


@pytest.mark.few(2)
@pytest.mark.parametrize("adopted", [False, True])
def test_a_key_that_is_called_like_the_leaf_of_another_column(tmp_path: Path, adopted: bool) -> None:
    """Its bounds, and not the leaf's, say which row groups a night may skip."""

    def rows(keys: list[int], version: int) -> pa.Table:
        beside = pa.array([{"b": None if key == 7 else key + 10**9} for key in keys])
        return pa.table({"a": beside, "a.b": keys, "ts": [version] * len(keys)})

    (tmp_path / "landing").mkdir()
    zones = {"landing": str(tmp_path / "landing"), "processed": str(tmp_path / "processed")}
    table = Table("t", TableSettings(**zones, key=("a.b",), partition_by=(), order_by=("ts",), strategy="delta"))
    keys = list(range(2000))
    if adopted:
        (tmp_path / "processed").mkdir()
        pq.write_table(rows(keys, 1), tmp_path / "processed/old.parquet")
        table.adopt()
    else:
        pq.write_table(rows(keys, 1), tmp_path / "landing/1.parquet")
        table.run(host="local")
    pq.write_table(rows([5, 7, 1999], 2), tmp_path / "landing/2.parquet")
    table.run(host="local")
    found = table.to_arrow().read_all()
    assert sorted(found["a.b"].to_pylist()) == keys
    assert sum(found["ts"].to_pylist()) == 2000 + 3


@pytest.mark.long
def test_auto_pays_its_debt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "SMALL_BYTES", 0)
    lake = Lake(tmp_path)
    lake.land("000.jsonl", [row(f"k{i:05}", 0, 0, i) for i in range(20_000)])
    lake.run()
    made = []
    for night in range(1, 13):
        lake.land(f"{night:03}.jsonl", [row(f"k{i:05}", 0, night) for i in range(night, 20_000, 25)])
        made.append(lake.table.run(host="local").dedupe[0])
    lake.check()
    assert {r.strategy for r in made} == {"delta", "rewrite"}
    base = lake.table.files()[0].bytes
    assert sum(r.bytes_written for r in made) < 12 * base / 2


def test_plan_tells_which_partitions_keep_their_base_and_about_what_is_written(lake: Lake) -> None:
    lake.land("9.jsonl", [row(f"k{i:03}", 0, 200, i) for i in range(100)] + [row("x", 5, 1)])
    planned = {p.partition: p for p in lake.table.plan().partitions}
    assert {p: x.strategy for p, x in planned.items()} == {"d=2020-01-01": "delta", "d=2020-01-06": "rewrite"}
    merged = {r.partition: r for r in lake.table.run(host="local").dedupe}
    for partition, found in merged.items():
        assert found.strategy == planned[partition].strategy
        # Files of few rows are footers above all, and what they take is learned from partitions of several files.
        assert 0.4 < found.bytes_written / planned[partition].bytes_written < 2.5


class Meanwhile(ArrowEngine):
    """Something happens between its first merge and that merge's commit."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act: Callable[[], object] | None = act

    def merge(self, *task: Any) -> Any:
        outputs = super().merge(*task)
        if act := self.act:
            self.act = None
            act()
        return outputs


def test_night_whose_partitions_are_compacted_meanwhile(lake: Lake) -> None:
    lake.land("3.jsonl", [row(f"k{i:03}", i % 2, 300, i) for i in range(100)])
    lake.table.append(host="local")
    beside = Table("t", lake.settings)
    engine = Meanwhile(lambda: beside.compact(full=True))
    done: list[PartitionResult] = []
    drain(lake.opened, engine, WorkerOptions(collect=done.append))
    assert engine.act is None
    assert not [r.error for r in done if r.error]
    lake.table.publish()
    lake.check()
    assert len(lake.table.objects.partition("d=2020-01-01").head().body.buckets[0].deltas) == 1


def test_compaction_beside_a_night_that_marks_more_rows(lake: Lake) -> None:
    lake.land("3.jsonl", [row(f"k{i:03}", i % 2, 300, i) for i in range(100)])
    beside = Table("t", lake.settings)
    reprocess(lake.opened, ReprocessOptions())
    engine = Meanwhile(lambda: beside.run(host="local"))
    done: list[PartitionResult] = []
    drain(lake.opened, engine, WorkerOptions(collect=done.append))
    assert engine.act is None
    assert not [r.error for r in done if r.error]
    lake.table.publish()
    lake.check()
    lake.table.vacuum(dry=False)
    lake.check()


def test_arrow_leaves_rows_out_beyond_a_files_first_batch(tmp_path: Path) -> None:
    """A scanner hands out 131,072 rows at a time, so positions count on from batch to batch."""
    landing = tmp_path / "landing"
    landing.mkdir()
    settings = TableSettings(
        landing=str(landing),
        processed=str(tmp_path / "processed"),
        key=("id",),
        partition_by=("day",),
        order_by=("ts",),
        strategy="delta",
    )
    changed = range(150_000, 300_000, 1_000)
    for night, ids in enumerate([range(300_000), changed]):
        rows = pa.table(
            {"id": ids, "day": ["2020-01-01"] * len(ids), "ts": [night] * len(ids), "v": [night] * len(ids)}
        )
        pq.write_table(rows, landing / f"{night}.parquet")
        table = Table("t", settings)
        table.run(host="local")
    found = table.to_arrow().read_all()
    assert found["id"].to_pylist() == list(range(300_000))
    assert [i for i, v in enumerate(found["v"].to_pylist()) if v] == list(changed)


def test_rows_much_larger_than_their_files_are_read_in_turns(tmp_path: Path) -> None:
    """Small files are sorted in one call, unless that takes more memory than a row group."""
    lake = Lake(tmp_path, strategy="delta")
    for night, ids in enumerate([range(3000), range(0, 3000, 100)]):
        lake.land(f"{night}.jsonl", [row(f"k{i:04}", 0, night, i) | {"note": "x" * 20_000} for i in ids])
        lake.run()
    assert sum(file.bytes for file in lake.table.files()) < arrow.SMALL_BYTES
    batches = list(lake.table.to_arrow())
    assert max(batch.nbytes for batch in batches) <= 1.5 * ROW_GROUP_BYTES
    assert pa.Table.from_batches(batches)["k"].to_pylist() == [f"k{i:04}" for i in range(3000)]
