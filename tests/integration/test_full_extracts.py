"""Full extracts: what they delete, what they are refused for, and what upkeep makes of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert.api import Table
from lakeupsert.cli import main
from lakeupsert.engine.batch import AppendJob
from lakeupsert.engine.hosts import LocalHost
from lakeupsert.engine.reports import Report
from lakeupsert.errors import RefusedError
from lakeupsert.pipeline import append as append_module
from lakeupsert.pipeline.append import append
from lakeupsert.pipeline.worker import mark_failed
from lakeupsert.report.nights import observe
from lakeupsert.table.manifest import Changes
from lakeupsert.testing.lake import Lake, row


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(tmp_path, on_failed_partition="skip")
    lake.land("1.jsonl", [row(k, day, 1, 1) for k in "abcdef" for day in (0, 1)])
    lake.run()
    return lake


def keys(lake: Lake) -> list[tuple[str, int, int]]:
    return [(r["k"], r["d"].day, r["v"]) for r in lake.rows()]


def quarantined(lake: Lake) -> int:
    result = lake.table.reconcile(deep=True)
    assert not result.unbalanced
    assert not result.gone
    return sum(p.refused for p in result.proof)


def test_partition_that_an_extract_has_nothing_of_becomes_empty(lake: Lake) -> None:
    lake.land("2.jsonl", [row(k, 0, 2, 2) for k in "abcdefgh"])
    lake.run(full="table", may_shrink=True)
    assert keys(lake) == [(k, 1, 2) for k in "abcdefgh"]
    assert quarantined(lake) == 0


def test_partition_that_is_empty_keeps_its_floor_with_engine_spark(tmp_path: Path, spark: Any) -> None:
    lake = Lake(tmp_path)
    lake.land("1.jsonl", [row("a", 0, 1), row("a", 1, 1)])
    lake.run(engine="spark")
    for night in (2, 3):  # the second finds nothing there
        lake.land(f"{night}.jsonl", [row(k, 0, night) for k in "abc"])
        lake.run(full="table", engine="spark")
    lake.land("4.jsonl", [row("a", 1, 2)])
    lake.run(engine="spark")
    assert keys(lake) == [(k, 1, 0) for k in "abc"]
    assert quarantined(lake) == 1


def test_rows_behind_an_extract_are_judged_by_it_where_both_are_merged_at_once(lake: Lake) -> None:
    """A partition that readers see lagging catches up: an extract, and a late row of a key that it lacks."""
    lake.land("2.jsonl", [row(k, 0, 5, 2) for k in "abcde"])
    lake.table.append(host="local", full="partitions")
    lake.land("3.jsonl", [row("f", 0, 4, 3), row("g", 0, 6, 3)])
    lake.table.append(host="local")
    mark_failed(lake.opened, "d=2020-01-01", 2, "of this test")
    lake.table.publish()
    assert lake.table.status().lagging == ("d=2020-01-01",)
    lake.table.dedupe()
    lake.table.publish()
    assert keys(lake)[:6] == [*((k, 1, 2) for k in "abcde"), ("g", 1, 3)]
    assert quarantined(lake) == 1
    lake.table.reprocess(source="landing", host="local")
    assert keys(lake)[:6] == [*((k, 1, 2) for k in "abcde"), ("g", 1, 3)]
    assert quarantined(lake) == 1


@pytest.mark.usefixtures("tiny_files_split")
@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
@pytest.mark.parametrize("bucket", ["2500B", "256MiB"])
def test_extract_of_many_buckets_and_what_upkeep_does_with_it(tmp_path: Path, strategy: Any, bucket: str) -> None:
    lake = Lake(tmp_path, strategy=strategy, bucket=bucket)
    for night in range(3):
        lake.land(f"{night}.jsonl", [row(f"{k}", 0, night, night) for k in range(40)])
        lake.run()
    lake.land("full.jsonl", [row(f"{k}", 0, 1, 9) for k in range(30)])
    lake.run(full="table")
    assert len(lake.rows()) == 40, "the stored rows are newer than the extract"
    assert lake.table.snapshots()[0].body.changes == Changes(late=30, newer_than_extract=10)
    lake.land("newer.jsonl", [row(f"{k}", 0, 5, 9) for k in range(30)])
    lake.run(full="table")
    expected = [(f"{k}", 1, 9) for k in sorted(map(str, range(30)))]
    assert keys(lake) == expected
    wanted = lake.table.snapshots()[0].number
    lake.table.compact(full=True)
    lake.land("gone.jsonl", [row(f"{k}", 0, 9, 7) for k in range(40)])
    lake.run()
    lake.table.restore(wanted, dry=False)
    lake.run()
    assert keys(lake) == expected
    lake.land("again.jsonl", [row("39", 0, 4, 4)])
    lake.run()
    assert keys(lake) == expected
    assert quarantined(lake) == 1
    lake.table.reprocess(source="landing", host="local")
    assert keys(lake) == expected
    lake.table.vacuum(dry=False)
    assert quarantined(lake) == 1


@pytest.mark.parametrize("engine", ["arrow", "spark"])
def test_rows_that_an_extract_lacks_and_that_are_newer_are_counted(tmp_path: Path, engine: Any, request: Any) -> None:
    """Wherever they are stored: in adopted files, one of which has a key twice, in a base and in a delta. A delete is no row."""
    if engine == "spark":
        request.getfixturevalue("spark")
    lake = Lake(tmp_path, strategy="delta")
    lake.lay("f.parquet", [row("twice", 0, 9), row("twice", 0, 8), row("adopted", 0, 9), row("older", 0, 4)])
    lake.table.adopt()
    lake.land("1.jsonl", [row(k, 0, 5) for k in "abc"])
    lake.table.run(host="local", engine=engine, full="table", may_shrink=True)
    assert lake.table.snapshots()[0].body.changes == Changes(inserted=3, deleted=1, newer_than_extract=2)
    lake.land("2.jsonl", [row("in a delta", 0, 9), row("deleted", 0, 9, op="D"), row("equal", 0, 6)])
    lake.table.run(host="local", engine=engine)
    lake.land("3.jsonl", [row(k, 0, 6) for k in "abc"])
    lake.table.run(host="local", engine=engine, full="table", may_shrink=True)
    assert lake.table.snapshots()[0].body.changes == Changes(updated=3, deleted=1, newer_than_extract=3)
    assert [night.changes.newer_than_extract for night in observe(lake.opened, 100, 0).nights] == [2, 0, 3]


def test_command_warns_of_rows_that_are_newer_than_the_extract(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.land("2.jsonl", [row("x", 0, 9), row("y", 1, 9), *(row(k, 0, 2, 2) for k in "abcde")])
    lake.table.append(host="local")
    lake.land("3.jsonl", [row(k, day, 3, 3) for k in "abcde" for day in (0, 1)])
    monkeypatch.chdir(lake.configure().parent)
    done = CliRunner().invoke(main, ["run", "--host", "local", "--full", "table", "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    merged = answer["result"]["dedupe"]["partitions"]
    assert [p["changes"]["newer_than_extract"] for p in merged] == [1, 1]
    [warning] = answer["warnings"]
    assert "2 rows" in warning
    assert warning in json.loads(CliRunner().invoke(main, ["status", "--json"]).stdout)["warnings"]
    lake.land("4.jsonl", [row("x", 0, 10), row("y", 1, 10)])
    done = CliRunner().invoke(main, ["run", "--host", "local", "--json"])
    assert json.loads(done.stdout)["warnings"] == []


def test_what_is_not_a_whole_extract_is_refused_and_nothing_changes(lake: Lake) -> None:
    before = keys(lake)
    lake.land("2.jsonl", [row("a", 0, 2, 2)])
    with pytest.raises(RefusedError) as shrinks:
        lake.table.append(host="local", full="table")
    assert shrinks.value.code == "full-extract-shrinks"
    assert "1 rows for 2 partitions, which hold 12" in shrinks.value.message
    lake.land("3.jsonl", [row(k, 0, 2, 2) for k in "abcdef"], refused=[{"k": None, "d": "2020-01-01"}])
    with pytest.raises(RefusedError) as incomplete:
        lake.table.append(host="local", full="partitions")
    assert incomplete.value.code == "full-extract-incomplete"
    (lake.root / "landing" / "2.jsonl").unlink()
    (lake.root / "landing" / "3.jsonl").write_text("")
    with pytest.raises(RefusedError) as empty:
        lake.table.append(host="local", full="table", may_shrink=True)
    assert empty.value.code == "empty-full-extract"
    assert keys(lake) == before
    assert len(lake.entries()) == 2


def test_command_tells_why_a_row_is_gone(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.land("2.jsonl", [row(k, 0, 2, 2) for k in "abcde"])
    monkeypatch.chdir(lake.configure().parent)
    done = CliRunner().invoke(main, ["run", "--host", "local", "--full", "partitions", "--json"])
    assert done.exit_code == 0, done.output
    told = CliRunner().invoke(main, ["explain", "k=f", "l=0", "d=2020-01-01", "--json"])
    [found] = json.loads(told.stdout)["result"]["partitions"]
    assert found["why"] == "A full extract lacked the key."
    assert [v["outcome"] for v in found["versions"]] == ["lacking"]
    kept = CliRunner().invoke(main, ["explain", "k=a", "l=0", "d=2020-01-01", "--json"])
    [found] = json.loads(kept.stdout)["result"]["partitions"]
    assert {v["outcome"] for v in found["versions"]} == {"shown", "superseded"}


def test_nothing_of_a_refused_key_counts_when_landing_is_read_again(tmp_path: Path) -> None:
    """Within a batch the row that was refused beat others, which must not win in its place."""
    lake = Lake(tmp_path)
    lake.land("0.jsonl", [row(k, 0, 1) for k in "abcdef"])
    lake.run()
    lake.land("1.jsonl", [row(k, 0, 9) for k in "abcde"])
    lake.run(full="table")
    lake.land("2.jsonl", [row("f", 0, 3), row("f", 0, 4, op="D"), row("g", 0, 3)])
    lake.land("3.jsonl", [row("g", 0, 4)])
    lake.run()
    for _ in range(2):
        assert [k for k, _, _ in keys(lake)] == list("abcde")
        assert quarantined(lake) == 2
        lake.table.reprocess(source="landing", host="local")


def test_partition_that_an_extract_has_nothing_of_is_made_anew_from_landing(lake: Lake) -> None:
    lake.land("2.jsonl", [row(k, 0, 2, 2) for k in "abcdefgh"])
    lake.run(full="table", may_shrink=True)
    before = keys(lake)
    lake.table.reprocess(source="landing", host="local")
    assert keys(lake) == before
    assert lake.table.status().queue.dead == 0
    assert quarantined(lake) == 0


def test_extract_of_which_a_file_is_left_out_is_refused(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    for name, some in (("0.jsonl", "abc"), ("1.jsonl", "def")):
        lake.land(name, [row(k, 0, 1) for k in some])
    lake.run(full="table")
    lake.land("0.jsonl", [row(k, 0, 2) for k in "abc"])
    lake.land("1.jsonl", [row(k, 0, 1) for k in "def"])  # sent again as it was
    with pytest.raises(RefusedError, match=r"1\.jsonl has the content that an earlier batch took") as raised:
        lake.table.append(host="local", full="table")
    assert raised.value.code == "full-extract-incomplete"
    dated = Lake(tmp_path / "dated", landing_dates="%Y-%m-%d")
    dated.land("2020-01-01/0.jsonl", [row("a", 0, 1)])
    dated.land("elsewhere/0.jsonl", [row("b", 0, 1)])
    with pytest.raises(RefusedError, match="1 of 2 files"):
        dated.table.append(host="local", full="table")


def test_rows_that_delete_do_not_count_for_an_extract(lake: Lake) -> None:
    lake.land("2.jsonl", [row(k, 0, 2, op="D") for k in "abcdef"])
    with pytest.raises(RefusedError, match="0 rows for 1 partitions, which hold 6"):
        lake.table.append(host="local", full="partitions")


def test_extract_that_a_restore_withdrew_is_no_feed(lake: Lake) -> None:
    lake.land("2.jsonl", [row(k, 0, 2, 2) for k in "abcde"])
    lake.run(full="partitions")
    lake.table.restore(0, dry=False)
    lake.run()
    with pytest.raises(RefusedError, match=r"was a full extract \(partitions\)"):
        lake.table.append(host="local", again=True)
    lake.table.append(host="local", again=True, full="partitions")
    lake.run()
    assert [k for k, day, _ in keys(lake) if day == 1] == list("abcde")


def test_shrinking_is_about_extracts_alone(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lake.configure().parent)
    done = CliRunner().invoke(main, ["append", "--host", "local", "--may-shrink"])
    assert done.exit_code == 2
    assert "give --full" in done.output


def test_extract_is_compared_with_what_was_published_while_its_rows_were_read(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.land("2.jsonl", [row(f"k{n}", 0, 2) for n in range(100)])
    lake.table.append(host="local")

    class SlowHost(LocalHost):
        def run(self, job: AppendJob, progress: Callable[[str], None] = lambda text: None) -> list[Report]:
            reports = super().run(job, progress)
            elsewhere = Table("t", lake.settings)
            elsewhere.dedupe()
            elsewhere.publish()
            elsewhere.close()
            return reports

    lake.land("3.jsonl", [row(f"k{n}", 0, 3) for n in range(10)])
    monkeypatch.setattr(append_module, "host_by_name", lambda name: SlowHost())
    with pytest.raises(RefusedError) as refused:
        append(lake.opened, "local", full="partitions")
    assert refused.value.code == "full-extract-shrinks"
    assert len(lake.rows()) == 112
