"""Both phases on Spark's executors: `--host spark` with engine arrow."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.testing.lake import Lake, row

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


def test_a_damaged_file_fails_its_partition_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lakeupsert.engine import hosted

    lake = Lake(tmp_path / "lake")
    lake.land("0.jsonl", [row(f"k{i}", day, 1) for day in range(DAYS) for i in range(20)])
    lake.run()
    [damaged] = (tmp_path / "lake/processed/d=2020-01-03").glob("base-*")
    damaged.write_bytes(damaged.read_bytes()[:100])
    lake.land("1.jsonl", [row(f"k{i}", day, 2) for day in range(DAYS) for i in range(0, 20, 2)])
    lake.table.append(host="local")
    calls = []
    merge = hosted.HostedEngine.merge
    monkeypatch.setattr(
        hosted.HostedEngine, "merge", lambda self, *given: (calls.append(len(given[3])), merge(self, *given))[1]
    )
    results = lake.table.dedupe(host="spark")
    assert calls == [DAYS, *[1] * (lake.opened.queue.max_receives - 1)], "the others are merged once"
    assert {r.partition for r in results if r.status == "failed"} == {"d=2020-01-03"}
    assert sum(r.status == "merged" for r in results) == DAYS - 1
    assert damaged.name in lake.table.status().failed["d=2020-01-03"]


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
