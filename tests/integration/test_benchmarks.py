"""The benchmarks' small forms: workloads are what they say, what is not exact is told, and models do what they claim."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import amplification, key_index
from benchmarks.peers import sides as peers
from benchmarks.peers.__main__ import place, unavailable
from benchmarks.peers.processes import PeakMemory
from benchmarks.rows import settings
from benchmarks.scale import iceberg, lake, model, workers
from benchmarks.stream.feed import Feed
from benchmarks.workload import TPCHGEN, WORKLOADS, Size, Workload, make
from lakeupsert.engine.merge import MergeTask
from lakeupsert.operations.plan.prices import Prices
from lakeupsert.pipeline.declared import Declaration
from lakeupsert.pipeline.merge.cuts import cuts_of
from lakeupsert.pipeline.merge.state import PartitionState
from lakeupsert.pipeline.merge.steps import Step
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.table.manifest import DataFile, Manifest

ROOT = Path(__file__).parents[2]
SIDES = ["plain", "ours-delta"]
NATIVE = [name for name, side in peers.SIDES.items() if not side.missing() and "pyspark" not in side.versions]
SMALL = Size(partitions=40, rows_per_partition=100, batch_rows=1500, nights=2, scale_factor=0.001)


def newest_rows(folder: Path, workload: Workload, nights: int) -> str:
    """DuckDB's window over everything that came, without what `make` knows about it."""
    files = [folder / "base.parquet", *(folder / f"night-{n}.parquet" for n in range(1, nights + 1))]
    key = ", ".join((workload.partition, *workload.key))
    return f"""SELECT * FROM (
            FROM read_parquet({[str(file) for file in files]})
            QUALIFY row_number() OVER (PARTITION BY {key} ORDER BY record_timestamp DESC) = 1
        ) WHERE {workload.visible}"""


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("name", WORKLOADS)
def test_expected_figures_are_those_of_a_window_over_all_that_came(name: str, tmp_path: Path) -> None:
    if name == "tpch" and not TPCHGEN.exists():
        pytest.skip("`make peers` gets tpchgen-cli")
    workload = make(name, replace(WORKLOADS[name].size, **vars(SMALL)), tmp_path)
    assert len(workload.nights) == SMALL.nights
    for number, night in enumerate(workload.nights, start=1):
        seen = f"SELECT {', '.join(workload.figures.values())} FROM ({newest_rows(tmp_path, workload, number)})"
        for query, expected in ((seen, night.full), (f"{seen} WHERE {workload.filter}", night.filtered)):
            assert workload.comparable(duckdb.sql(query).fetchall()[0]) == expected
            assert int(expected["rows"]) > 0
        assert pq.read_schema(tmp_path / night.file) == pq.read_schema(tmp_path / "base.parquet")
        came = f"FROM '{tmp_path / night.file}'"
        assert duckdb.sql(f"SELECT count(*), count(DISTINCT {workload.partition}) {came}").fetchall() == [
            (night.rows, night.touched)
        ]


@pytest.mark.long
def test_nights_change_what_their_workloads_are_named_for(tmp_path: Path) -> None:
    def first_night(name: str) -> tuple[float, Workload]:
        """The share of its keys that are new, and the workload."""
        workload = make(name, replace(WORKLOADS[name].size, **vars(SMALL)), tmp_path / name)
        keys = f"(FROM '{tmp_path / name}/night-1.parquet' SELECT DISTINCT ON (order_id) *)"
        return duckdb.sql(f"SELECT avg(CASE WHEN op = 'I' THEN 1 ELSE 0 END) FROM {keys}").fetchall()[0][0], workload

    new, _ = first_night("today")
    assert new == pytest.approx(0.99, abs=0.01)
    new, night = first_night("night")
    assert new == pytest.approx(0.4, abs=0.05)
    assert night.nights[0].touched == SMALL.partitions + 1
    new, reprocess = first_night("reprocess")
    assert new == 0
    assert reprocess.nights[0].touched == 30


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Plain Spark and ours over three nights, of which the last is expected to have one row less than it has."""
    folder = tmp_path_factory.mktemp("peers")
    size = replace(WORKLOADS["night"].size, partitions=6, rows_per_partition=500, batch_rows=40, nights=3)
    workload = place(folder, "night", size) / "workload"
    make("night", size, workload)
    written = json.loads((workload / "workload.json").read_text())
    rows = int(written["nights"][2]["filtered"]["rows"])
    written["nights"][2]["filtered"]["rows"] = str(rows - 1)
    (workload / "workload.json").write_text(json.dumps(written))
    return folder, benchmark(folder)


def benchmark(folder: Path, workload: str = "night", sides: Sequence[str] = SIDES) -> subprocess.CompletedProcess[str]:
    size = ["--partitions", "6", "--rows-per-partition", "500", "--batch-rows", "40", "--nights", "3"]
    command = [sys.executable, "-m", "benchmarks.peers", workload, "--sides", *sides, *size]
    places = ["--work", str(folder), "--results", str(folder / "results")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, *places], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def results(folder: Path, workload: str = "night") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"results/{workload}.json").read_text())["sides"]
    return found


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("workload", ["night", "receipts"])
def test_sides_without_spark_and_floors_are_exact(workload: str, tmp_path: Path) -> None:
    done = benchmark(tmp_path, workload, NATIVE)
    assert done.returncode == 0, done.stderr
    sides = results(tmp_path, workload)
    assert sides.keys() == set(NATIVE) >= {"ours-local-delta", "floor-rewrite-arrow", "floor-delta-polars"}
    assert all(side["exact"] and side["cpu_seconds"] > 0 for side in sides.values())
    table = (tmp_path / f"results/{workload}.md").read_text().split("| side | versions |")[0].splitlines()
    for strategy in ("rewrite", "delta"):
        times = [row.split(" | ")[2:5:2] for row in table if row.startswith(f"| floor-{strategy}-")]
        assert [min(float(cell) for cell in column) for column in zip(*times, strict=True)] == [1.0, 1.0]


def test_sampling_of_memory_says_what_it_took() -> None:
    with PeakMemory() as peak:
        pass
    assert (peak.mb > 0, peak.cpu_seconds > 0) == (True, True)


def test_side_that_is_missing_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make("night", replace(WORKLOADS["night"].size, **vars(SMALL)), tmp_path)
    monkeypatch.setitem(peers.SIDES, "deltalite", replace(peers.SIDES["deltalite"], python=tmp_path / "python"))
    refused = unavailable("deltalite", workload)
    assert refused is not None
    assert "Python 3.12" in refused


@pytest.mark.long
@pytest.mark.spark
def test_each_side_is_compared_after_each_night(ran: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = ran
    assert done.returncode == 1, done.stderr
    sides = results(folder)
    assert list(sides) == SIDES
    for side in sides.values():
        first, second, third = side["nights"].values()
        assert first["wrong"] == second["wrong"] == {}
        assert third["wrong"].keys() == {read for read in third["read_seconds"] if read.startswith("filtered")}
        for wrong in third["wrong"].values():
            (found, expected) = wrong.pop("rows")
            assert (int(found), wrong) == (int(expected) + 1, {})
        assert not side["exact"]
        assert second["bytes_written"] > 0
        assert second["peak_mb"] > 0
        assert side["counted"] == [2, 3]
    plain, delta = (side["nights"]["2"]["bytes_written"] for side in sides.values())
    assert delta < plain  # a rewrite writes more than plain Spark: it appends first, and keeps manifests
    assert (folder / "results/night.md").read_text().count("| NO |") == len(SIDES)


@pytest.mark.long
@pytest.mark.spark
def test_results_that_are_there_are_kept(ran: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = ran
    places = list(folder.glob("night-*/results/*/night-3.json"))
    assert len(places) == len(SIDES)
    for path in places:
        path.write_text(json.dumps({**json.loads(path.read_text()), "wrong": {}}))
    done = benchmark(folder)
    assert done.returncode == 0, done.stderr
    assert all(side["exact"] for side in results(folder).values())


@pytest.fixture
def nights_of_deltas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small partitions, where the benchmark would have large ones; the folder of its results."""
    monkeypatch.setattr(amplification, "WORK", tmp_path / "work")
    monkeypatch.setattr(amplification, "RESULTS", tmp_path)
    monkeypatch.setattr(amplification, "ROWS", 2000)
    monkeypatch.setattr(amplification, "COMPACT_EVERY", 3)
    monkeypatch.setattr(sys, "argv", ["amplification", "--strategy", "delta", "--nights", "4"])
    return tmp_path


@pytest.mark.long
def test_nights_of_deltas_tell_what_was_written_and_read(nights_of_deltas: Path) -> None:
    assert amplification.main() == 0
    first, second, third, fourth = json.loads((nights_of_deltas / "amplification-delta.json").read_text())
    assert [night["different"] for night in (first, second, third, fourth)] == [0, 0, 0, 0]
    assert first["deltas"] == fourth["deltas"] - third["deltas"] == 3
    assert first["written"] < third["written"]  # the third night compacts
    assert third["read_amplification"] < second["read_amplification"]


@pytest.mark.long
def test_rows_that_are_not_those_of_the_night_fail_the_nights_of_deltas(
    nights_of_deltas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = amplification.Table.to_arrow
    monkeypatch.setattr(amplification.Table, "to_arrow", lambda table: read(table, table.snapshots()[1].number))
    assert amplification.main() == 1


@pytest.mark.long
def test_workers_on_a_far_store_merge_every_partition() -> None:
    measured = workers.measured(2, 2, 8)
    assert (measured["requests"] > 8, measured["held"]) == (True, 0)


def test_far_store_holds_calls_beyond_a_second_of_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(workers.LIMITS, "read", 8)
    monkeypatch.setattr(workers, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(workers.time, "monotonic", lambda: 100.0)
    far = workers.FarStore(stretch=2)
    for call in [*["get"] * 8, "put", "queue", "list", "open"]:
        with far.at(f"{call} x"):
            pass
    assert far.held == 2


@pytest.fixture
def measured() -> dict[str, dict[str, dict[str, float]]]:
    """What the parts of `benchmarks.scale` that the model needs may have found."""
    append = {"append_processor": 1.0, "append_mb_read": 20.0, "append_mb_written": 10.0}
    each = {"mb_stored": 1000.0, "mb_landed": 10.0, **append}
    delta = {**each, "dedupe_processor": 4.0, "dedupe_mb_read": 190.0, "dedupe_mb_written": 10.0}
    rewrite = {**each, "dedupe_processor": 20.0, "dedupe_mb_read": 1000.0, "dedupe_mb_written": 1000.0}
    return {
        "rows": {
            "5 delta scattered": delta,
            "5 delta clustered": {**delta, "dedupe_mb_read": 19.0},
            "5 rewrite scattered": rewrite,
            "1 delta scattered": {},
        },
        "adoption": {"5": {"processor": 8.2, "mb_adopted": 100.0, "mb_read": 200.0, "mb_written": 210.0}},
        "peers": {
            "iceberg-cow": {"small": 10.0, "large": 40.0, "more_rows": 10_000_000},
            "iceberg-mor": {"small": 10.0, "large": 12.0, "more_rows": 10_000_000},
        },
    }


def test_model_multiplies_what_was_measured(measured: Any) -> None:
    scattered, clustered = (model.night("delta", keys, measured) for keys in ("scattered", "clustered"))
    assert scattered.mb_read == pytest.approx(0.19 * lake.TABLE_MB + 2 * lake.NIGHT_MB)
    assert scattered.mb_written == clustered.mb_written == pytest.approx(2 * lake.NIGHT_MB)
    assert scattered.requests["get"] > clustered.requests["get"]
    rewrite = model.night("rewrite", "scattered", measured)
    assert rewrite.mb_written == pytest.approx(lake.TABLE_MB + lake.NIGHT_MB)
    assert rewrite.processor == pytest.approx(0.1 * lake.NIGHT_MB + 0.01 * 2 * lake.TABLE_MB)
    auto = model.night("auto", "scattered", measured)
    assert auto.mb_written - scattered.mb_written == pytest.approx((4 + model.SIZES) * lake.NIGHT_MB)
    prices = Prices(as_of="today", thousand_requests={"put": 1.0}, compute_second=2.0)
    assert rewrite.cost(prices) == pytest.approx(round(rewrite.requests["put"]) / 1000 + rewrite.worker_seconds)
    assert "Not reckoned" in next(model.report({}, prices))


def test_model_cuts_what_is_adopted_as_a_merge_does(measured: Any, tmp_path: Path) -> None:
    columns = pa.schema({"k": pa.string(), "ts": pa.timestamp("us"), "amount": pa.int64(), "d": pa.date32()})
    spec = Declaration("t", settings(tmp_path, "auto"), {}).new_spec(columns)
    size = int(lake.ADOPTED_FILE_MB * 1e6)
    base = tuple(DataFile(name=str(n), rows=10**7, bytes=size) for n in range(model.ADOPTED_FILES))
    buckets = range(model.BUCKETS)
    merge = MergeTask("d=2026-01-01", base, (), (), 1, 1, settled=False, bits=len(buckets).bit_length() - 1)
    manifest = Manifest(partition=merge.partition, merged=0, spec_version=0)
    tasks = tuple(replace(merge, bucket=n) for n in buckets)
    state = PartitionState(head=None, base=manifest, pending=(), active=frozenset(), up_to=1)
    cuts = cuts_of(Step(**vars(state), spec=spec, tasks=tasks, bucket_bytes=int(model.BUCKET_MB * 1e6)))
    assert len(cuts) == model.CUTS
    assert sum(cut.task.bytes for cut in cuts) == pytest.approx(lake.PARTITION_MB * 1e6, rel=0.01)
    first = model.adoption(measured)
    assert (first.mb_read, first.mb_written) == pytest.approx((2 * lake.TABLE_MB, 2.1 * lake.TABLE_MB))
    assert first.requests["get"] > lake.PARTITIONS * len(cuts) * model.BUCKETS


def test_model_reckons_iceberg_by_what_its_nights_took(measured: Any) -> None:
    found = iceberg.efforts(0.19, measured["peers"])
    rows = lake.PARTITIONS * lake.PARTITION_ROWS
    assert found["Iceberg: night, copy-on-write"].processor == pytest.approx(3e-6 * rows)
    assert found["Iceberg: night, copy-on-write"].mb_written == lake.TABLE_MB
    assert found["Iceberg: night, merge-on-read"].processor == pytest.approx(2e-7 * rows)
    assert found["Iceberg: night, merge-on-read"].mb_written == lake.NIGHT_MB
    assert found["Iceberg: add_files"].mb_read == 0
    lines = list(model.report(measured, Prices(as_of="today")))
    assert sum(line.startswith("| Iceberg") for line in lines) == len(found)
    lines = list(model.report({**measured, "peers": {}}, Prices(as_of="today")))
    assert not any(line.startswith("| Iceberg") for line in lines)


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["rows", "columns"])
def test_keys_that_move_are_counted_by_their_benchmark(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_index, "PARTITIONS", 4)
    given = SimpleNamespace(host="local", mode=mode, keys=500, rows=100, batches=2)
    assert key_index.measured("text", given, tmp_path / "work").startswith("| text | 510 | ")
    monkeypatch.setattr(LedgerEntry, "keys_moved", 4)
    with pytest.raises(SystemExit, match="4 keys moved, and 5 were to move"):
        key_index.measured("int64", given, tmp_path / "work")


@pytest.mark.long
def test_stream_is_compared_with_duckdb_row_by_row(tmp_path: Path) -> None:
    small = ["--minutes", "0.05", "--every", "1", "--look", "0.1", "--warm", "1", "--parts", "1", "--rates", "40"]
    size = ["--partitions", "13", "--touched", "2", "--base-rows", "30"]
    command = [sys.executable, "-m", "benchmarks.stream", *small, *size]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [run] = json.loads((tmp_path / "benchmarks/results/stream.json").read_text())["runs"]
    [part] = run["parts"]
    assert (run["different"], part["files"]) == (0, 3)
    assert all(
        part[figure] > 0 for figure in ("batches", "cpu", "bytes", "requests", "objects", "memory_mb", "descriptors")
    )
    assert part["latest_p50"] < part["published_p50"] < 30


def test_stream_finds_a_row_that_is_missing_and_one_that_differs(tmp_path: Path) -> None:
    feed = Feed(files=2, rows=100, partitions=13, touched=3, base_rows=20)
    folder, table = feed.make(tmp_path), tmp_path / "table.parquet"
    landed = [str(folder / name) for name in ("base.parquet", *feed.names)]
    newest = f"""FROM read_parquet({landed}) QUALIFY row_number() OVER (
        PARTITION BY transaction_date, order_id ORDER BY record_timestamp DESC) = 1"""
    changed = (
        "CASE WHEN order_id = (SELECT min(order_id) FROM newest WHERE op <> 'D') THEN quantity + 1 ELSE quantity END"
    )
    for rows, different in (("*", 0), (f"* REPLACE ({changed} AS quantity)", 2)):
        duckdb.sql(
            f"COPY (WITH newest AS ({newest}) SELECT {rows} FROM newest WHERE op <> 'D') TO '{table}' (FORMAT parquet)"
        )
        assert feed.differences(folder, feed.names, table) == different
    assert feed.differences(folder, feed.names[:1], table) > 50
