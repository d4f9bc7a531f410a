"""Both phases on Spark's executors: `--host spark` with engine arrow."""

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.engine.hosted import HostedEngine
from lakeupsert.errors import RefusedError
from lakeupsert.pipeline import dedupe
from lakeupsert.testing.lake import DAY, Lake, row

pytestmark = pytest.mark.usefixtures("spark")
DAYS = 12


@pytest.mark.parametrize("chosen", ["rewrite", "delta"])
def test_nights_equal_the_model(tmp_path: Path, chosen: str) -> None:
    lake = Lake(tmp_path / "lake", strategy=chosen, bucket="8KiB")
    for night in range(3):
        rows = [row(f"k{i:04}", day, 10 * night + i % 3, i + night) for day in range(3) for i in range(night, 900, 7)]
        lake.land(f"{night}.jsonl", [*rows, row("gone", 1, night, op="D" if night == 1 else None)])
        ran = lake.table.run(host="spark")
        assert {(r.engine, r.status) for r in ran.dedupe} == {("arrow", "merged")}
        lake.check()
    lake.table.compact(full=True, host="spark")
    lake.check()
    lake.table.reprocess(source="landing", host="spark")
    lake.check()


@pytest.mark.parametrize("engine", ["arrow", "spark"])
def test_a_damaged_file_fails_its_partition_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    from lakeupsert.engine.spark_window import SparkEngine

    kind = {"arrow": HostedEngine, "spark": SparkEngine}[engine]
    lake = Lake(tmp_path / "lake")
    lake.land("0.jsonl", [row(f"k{i}", day, 1) for day in range(DAYS) for i in range(20)])
    lake.run()
    [damaged] = (tmp_path / "lake/processed/d=2020-01-03").glob("base-*")
    damaged.write_bytes(damaged.read_bytes()[:100])
    lake.land("1.jsonl", [row(f"k{i}", day, 2) for day in range(DAYS) for i in range(0, 20, 2)])
    lake.table.append(host="local")
    calls = []
    merge = kind.merge
    monkeypatch.setattr(kind, "merge", lambda self, *given: (calls.append(len(given[3])), merge(self, *given))[1])
    results = lake.table.dedupe(host="spark", engine=engine)
    assert calls == [DAYS, *[1] * (lake.opened.queue.max_receives - 1)], "the others are merged once"
    assert {r.partition for r in results if r.status == "failed"} == {"d=2020-01-03"}
    assert sum(r.status == "merged" for r in results) == DAYS - 1
    assert damaged.name in lake.table.status().failed["d=2020-01-03"]


def test_a_call_has_so_many_tasks_at_most_and_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake(tmp_path / "lake")
    lake.land("0.jsonl", [row(f"k{i}", day, 1) for day in range(DAYS) for i in range(3)])
    lake.table.append(host="local")
    monkeypatch.setattr(dedupe, "MOST_TASKS", 5)
    merge, calls = HostedEngine.merge, []

    def counted(self: HostedEngine, *given: Any) -> Any:
        committed = sum(
            lake.opened.objects.partition(f"d={DAY + timedelta(day)}").head() is not None for day in range(DAYS)
        )
        calls.append((len(given[3]), committed))
        return merge(self, *given)

    monkeypatch.setattr(HostedEngine, "merge", counted)
    lake.table.dedupe(host="spark")
    assert calls == [(5, 0), (5, 5), (2, 10)]
    lake.table.publish()
    lake.check()


def test_both_hosts_adopt_and_prove_the_same(tmp_path: Path) -> None:
    """Counts, digests, and damage: a lost file, a file of other rows."""
    lakes = {host: Lake(tmp_path / host) for host in ("local", "spark")}
    found = {}
    for host, lake in lakes.items():
        for part in range(3):
            lake.lay(f"part-{part}.parquet", [row(f"k{part}-{i}", day, 1, i) for day in range(DAYS) for i in range(9)])
        adopted = lake.table.adopt(host=host)  # type: ignore[arg-type]
        lake.land("1.jsonl", [row(f"k0-{i}", day, 2) for day in range(DAYS - 1) for i in range(0, 9, 2)])
        lake.run()
        folders = tmp_path / host / "processed"
        next((folders / "d=2020-01-03").glob("base-*")).unlink()
        (other,), (here,) = ((folders / f"d=2020-01-0{day}").glob("base-*") for day in (4, 5))
        other.write_bytes(here.read_bytes()[:50])
        proof = lake.table.reconcile(host=host).proof  # type: ignore[arg-type]
        ids = re.compile(r"base-[^ ]*|/[^ ]*/")
        told = [replace(p, difference=p.difference and ids.sub("FILE", p.difference)) for p in proof]
        found[host] = replace(adopted, snapshot=None), told
    assert found["local"] == found["spark"]
    assert [p.partition for p in found["spark"][1] if not p.balanced] == ["d=2020-01-03", "d=2020-01-04"]


def test_both_hosts_refuse_a_file_without_a_footer(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.lay("part-0.parquet", [row("k", day, 1) for day in range(DAYS)])
    damaged = tmp_path / "processed/d=2020-01-03/part-0.parquet"
    damaged.write_bytes(damaged.read_bytes()[:100])
    for host in ("local", "spark"):
        with pytest.raises(RefusedError, match="2020-01-03") as refused:
            lake.table.adopt(host=host)  # type: ignore[arg-type]
        assert refused.value.code == "unreadable-files"


def test_workers_and_host_spark_exclude_each_other(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    config = str(lake.configure())
    for command in ("dedupe", "compact"):
        done = CliRunner().invoke(main, [command, "--config", config, "--host", "spark", "--workers", "2"])
        assert done.exit_code == 2
        assert "--workers" in done.output


def test_longest_tasks_begin_first_and_small_ones_share(tmp_path: Path) -> None:
    from lakeupsert.engine.spark_host import LEAST_TASK, pack

    sizes = [LEAST_TASK * 8.0, *[LEAST_TASK / 10] * 40, LEAST_TASK * 20.0]
    packs = pack(sizes, tasks=8)
    assert sorted(place for places in packs for place in places) == list(range(len(sizes)))
    assert packs[:2] == [[41], [0]]
    assert len(packs) <= 8
    assert all(sum(sizes[place] for place in places) <= max(LEAST_TASK, sum(sizes) / 8) for places in packs[2:])
