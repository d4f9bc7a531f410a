"""What is said of a batch: what it changed, however its partitions got there, and keys that are in several of them."""

from pathlib import Path
from typing import Any

import pytest

from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.pipeline.append import append
from lakeupsert.pipeline.merge.dedupe import dedupe_partitions
from lakeupsert.pipeline.workers.worker import mark_failed
from lakeupsert.report.nights import observe
from lakeupsert.table.manifest import Changes
from tests.harness.lake import Lake, row

DAY = "d=2020-01-01"
FIRST = [row("a", 0, 1), row("b", 0, 1), row("c", 1, 1)]
SECOND = [row("a", 0, 2), row("b", 0, 2, op="D"), row("c", 1, 0)]


def changed(lake: Lake) -> list[Changes]:
    """By each snapshot, newest first."""
    return [link.body.changes for link in lake.table.snapshots()]


def by_batch(lake: Lake) -> list[Changes]:
    """As the report has it."""
    return [night.changes for night in observe(lake.opened, 100, 0).nights]


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_snapshot_of_several_batches_has_the_changes_of_all(tmp_path: Path, strategy: Any) -> None:
    lake = Lake(tmp_path, strategy=strategy)
    for number, rows in enumerate([FIRST, SECOND]):
        lake.land(f"{number}.jsonl", rows)
        lake.table.append(host="local")
    table = lake.opened
    dedupe_partitions(table, ArrowEngine(), {DAY: 1})
    mark_failed(table.history, DAY, 2, "a version that merges nothing")
    lake.table.dedupe()
    lake.table.publish()
    assert by_batch(lake) == [Changes(inserted=3), Changes(updated=1, deleted=1, late=1)]
    assert changed(lake) == [Changes(inserted=3, updated=1, deleted=1, late=1)]


def test_what_merges_no_batch_changes_nothing(tmp_path: Path) -> None:
    lake = Lake(tmp_path, strategy="delta")
    for number, rows in enumerate([FIRST, SECOND]):
        lake.land(f"{number}.jsonl", rows)
        lake.run()
    lake.table.compact(full=True)
    lake.table.reprocess(source="landing", host="local")
    heads = lake.table.objects.heads(["d=2020-01-01", "d=2020-01-02"])
    assert {p: head.body.changes for p, head in heads.items()} == {
        "d=2020-01-01": Changes(updated=1, deleted=1),
        "d=2020-01-02": Changes(late=1),
    }
    lake.table.tag("tagged")
    lake.land("2.jsonl", [row("a", 0, 3)])
    lake.run()
    counted = [Changes(inserted=3), Changes(updated=1, deleted=1, late=1), Changes(updated=1)]
    assert by_batch(lake) == counted
    assert [c for c in reversed(changed(lake)) if c != Changes()] == counted
    assert len(changed(lake)) > len(counted)


def test_after_a_restore_a_batch_is_counted_by_what_was_restored(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    for number, rows in enumerate([FIRST, SECOND]):
        lake.land(f"{number}.jsonl", rows)
        lake.run()
    lake.table.restore(0, dry=False)
    lake.land("2.jsonl", [row("b", 0, 3), row("x", 0, 1)])
    lake.run()
    assert changed(lake)[0] == Changes(inserted=1, updated=1)


def test_what_a_restore_withdrew_before_it_was_shown_is_not_counted(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("0.jsonl", [row("a", 0, 1)])
    lake.run()
    lake.land("1.jsonl", [row("x", 0, 2), row("a", 0, 2, op="D"), row("z", 1, 2)])
    lake.table.append(host="local")
    dedupe_partitions(lake.opened, ArrowEngine(), {DAY: 2})  # the other partition is slow
    lake.table.restore(0, dry=False)
    lake.run()
    assert changed(lake)[0] == Changes()
    lake.finish_and_check()


@pytest.mark.parametrize("engine", ["arrow", "spark"])
def test_adopted_rows_that_stay_in_a_table_that_forgets(tmp_path: Path, engine: Any, request: Any) -> None:
    if engine == "spark":
        request.getfixturevalue("spark")
    lake = Lake(tmp_path, tombstone_retention="1h")
    lake.lay("f.parquet", [row("a", 0, 2), row("b", 0, 2)])
    lake.table.adopt()
    lake.table.publish()
    lake.land("0.jsonl", [row("b", 0, 1)])
    lake.table.run(host="local", engine=engine)
    assert changed(lake)[0] == Changes(late=1)


# ---------------------------------------------------------------- keys in several partitions


def scattered(lake: Lake, rows: list[Any], host: Any = "local") -> int:
    lake.land("0.jsonl", rows)
    appended = lake.table.append(host=host)
    assert appended is not None
    return appended.scattered


MOVED = [
    *(row("stays", 0, second) for second in (1, 2)),
    *(row("in two", day, 1) for day in (1, 2)),
    *(row("in three", day, 1) for day in (0, 1, 2)),
    *(row("other line", day, 1, line=day) for day in (0, 1)),
    *(row("moved by its source", 0, 1), row("moved by its source", 0, 2, op="D"), row("moved by its source", 1, 2)),
]


def test_key_that_came_for_several_partitions_is_told(tmp_path: Path) -> None:
    assert scattered(Lake(tmp_path), MOVED) == 2


def test_key_that_names_its_partition_is_in_one(tmp_path: Path) -> None:
    assert scattered(Lake(tmp_path, key=("k", "l", "d")), MOVED) == 0


@pytest.mark.parametrize("host", ["local", "spark"])
def test_of_a_large_batch_some_keys_stand_for_all(
    tmp_path: Path, host: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host == "spark":
        request.getfixturevalue("spark")
    rows = [row(str(key), day, 1) for key in range(4000) for day in range(3 if key % 4 == 0 else 1)]
    lake = Lake(tmp_path)
    lake.land("size.jsonl", rows)
    size = (tmp_path / "landing/size.jsonl").stat().st_size
    (tmp_path / "landing/size.jsonl").unlink()
    monkeypatch.setattr(append, "COMPARED_BYTES", size // 8)
    assert scattered(lake, rows, host) == pytest.approx(1000, rel=0.3)
