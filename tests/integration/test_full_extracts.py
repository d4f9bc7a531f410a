"""Full extracts: what they delete, what they are refused for, and what upkeep makes of them."""

import json
import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert.api import Table
from lakeupsert.cli import main
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.engine.batch import AppendJob
from lakeupsert.engine.hosts import LocalHost
from lakeupsert.engine.reports import Report
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.pipeline.append import append as append_module
from lakeupsert.pipeline.append.append import append
from lakeupsert.pipeline.append.discover import AppendOptions
from lakeupsert.pipeline.merge.dedupe import dedupe_partitions
from lakeupsert.pipeline.workers.worker import mark_failed
from lakeupsert.report.nights import observe
from lakeupsert.table.manifest import Changes
from tests.harness.lake import Lake, row
from tests.harness.rounds import TIMES


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


@pytest.mark.long
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
    mark_failed(lake.opened.history, "d=2020-01-01", 2, "of this test")
    lake.table.publish()
    assert lake.table.status().lagging == ("d=2020-01-01",)
    lake.table.dedupe()
    lake.table.publish()
    assert keys(lake)[:6] == [*((k, 1, 2) for k in "abcde"), ("g", 1, 3)]
    assert quarantined(lake) == 1
    lake.table.reprocess(source="landing", host="local")
    assert keys(lake)[:6] == [*((k, 1, 2) for k in "abcde"), ("g", 1, 3)]
    assert quarantined(lake) == 1


@pytest.mark.long
@pytest.mark.few(2)
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


@pytest.mark.parametrize("by", [("d", "bucket(8, k)"), ("bucket(8, k)",)], ids=["below a date", "alone"])
def test_hash_partitions_do_not_limit_the_scope_of_an_extract(tmp_path: Path, by: tuple[str, ...]) -> None:
    lake = Lake(tmp_path, partition_by=by)
    lake.land("1.jsonl", [row(k, int(k in "xyz"), 1) for k in "abcdefxyz"])
    lake.run()
    others = [(k, 2, 0) for k in "xyz"] if "d" in by else []
    lake.land("2.jsonl", [row("a", 0, 2, 2)])
    with pytest.raises(RefusedError, match="it has 1 rows") as refused:
        lake.run(full="partitions")
    assert refused.value.code == "full-extract-shrinks"
    lake.run(full="partitions", may_shrink=True)
    assert sorted(keys(lake)) == [("a", 1, 2), *others]
    assert quarantined(lake) == 0


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
    assert "1 rows, but its 2 partitions in the table have 12" in shrinks.value.message
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


@pytest.mark.long
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
    with pytest.raises(RefusedError, match="0 rows, but its 1 partition in the table have 6"):
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


def test_withdrawn_files_are_one_extract_only_if_they_were_one_batch(lake: Lake) -> None:
    lake.land("2.jsonl", [row("new", 0, 2, 2)])
    lake.run()
    for name, some in (("3.jsonl", "abc"), ("4.jsonl", "def")):
        lake.land(name, [row(k, 0, 3, 3) for k in some])
    lake.run(full="partitions")
    assert [k for k, day, _ in keys(lake) if day == 1] == list("abcdef")
    before = lake.table.snapshots()[1].number
    for wanted in (0, before):  # two batches, then one of which a file is gone
        lake.table.restore(wanted, dry=False)
        lake.run()
        if wanted:
            lake.table.append(host="local", again=True, full="partitions")
            lake.table.restore(wanted, dry=False)
            (lake.root / "landing" / "4.jsonl").unlink()
        with pytest.raises(RefusedError, match="no withdrawn batch had exactly these") as refused:
            lake.table.append(host="local", again=True, full="partitions")
        assert refused.value.code == "full-extract-incomplete"


def test_shrinking_is_about_extracts_alone(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lake.configure().parent)
    done = CliRunner().invoke(main, ["append", "--host", "local", "--may-shrink"])
    assert done.exit_code == 2
    assert "give --full" in done.output


@pytest.mark.long
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
        append(lake.opened, AppendOptions(host="local", full="partitions"))
    assert refused.value.code == "full-extract-shrinks"
    assert len(lake.rows()) == 112


def test_append_that_an_extract_overtakes_obeys_its_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake(tmp_path, landing_dates="%Y-%m-%d")
    lake.land("2020-01-01/1.jsonl", [row(k, 0, 1) for k in "abcdef"])
    lake.run()

    class SlowHost(LocalHost):
        def run(self, job: AppendJob, progress: Callable[[str], None] = lambda text: None) -> list[Report]:
            monkeypatch.undo()
            elsewhere = Table("t", lake.settings)
            elsewhere.append(host="local", full="table", received=(date(2020, 1, 1), date(2020, 1, 1)))
            elsewhere.close()
            return super().run(job, progress)

    lake.land("2020-01-01/full.jsonl", [row(k, 0, 9, 2) for k in "abcdef"])
    lake.land("2020-01-02/late.jsonl", [row("a", 2, 5, 3), row("b", 2, 9, 3)])
    monkeypatch.setattr(append_module, "host_by_name", lambda name: SlowHost())
    append(lake.opened, AppendOptions(host="local", received=(date(2020, 1, 2), date(2020, 1, 2))))
    lake.run()
    assert keys(lake) == [*((k, 1, 2) for k in "abcdef"), ("b", 3, 3)]
    assert quarantined(lake) == 1


@pytest.mark.long
def test_floor_of_a_new_partition_costs_no_request_for_each_night(tmp_path: Path) -> None:
    """A worker reads one entry more than it reads anyway: that of the extract."""
    lake = Lake(tmp_path, partition_by=("d", "bucket(64, k)"))
    counts = []
    for night in range(0, 40, 2):
        lake.land(f"{night:02}.jsonl", [row("a", 0, 100 + night, night)])
        lake.run(full="partitions")
        lake.land(f"{night + 1:02}.jsonl", [row(f"late{night}", 0, 50)])
        lake.table.append(host="local")
        number, entry = lake.entries()[-1]
        lake.reopen()
        lake.points.seen.clear()
        dedupe_partitions(lake.opened, ArrowEngine(), dict.fromkeys(entry.touched, number))
        counts.append(len(lake.points.seen))
        lake.table.publish()
    assert keys(lake) == [("a", 1, 38)]
    assert quarantined(lake) == 20
    assert counts[-1] <= counts[1], counts
    assert any(touched.extract for touched in lake.table.objects.ledger.head().body.touched.values())


# ---------------------------------------------------------------- extracts that replace everything before them


def changes(lake: Lake) -> Changes:
    """Of the newest snapshot."""
    return lake.table.snapshots()[0].body.changes


@pytest.mark.few(1)
@pytest.mark.usefixtures("tiny_files_split")
@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
@pytest.mark.parametrize("bucket", ["256MiB", "2500B"])
def test_table_is_exactly_the_extract_that_replaces_it(tmp_path: Path, strategy: Any, bucket: str) -> None:
    """However its partition is split, and after all that upkeep does with it."""
    lake = Lake(tmp_path, strategy=strategy, bucket=bucket, full_extract="replace")
    for night in (10, 20, 30):
        lake.land(f"{night}.jsonl", [row(f"{k}", 0, night, night) for k in range(40)])
        lake.run()
    lake.land("deleted.jsonl", [row(f"{k}", 0, 40, op="D") for k in range(5)])
    lake.run()
    lake.land("high.jsonl", [row(f"{k}", 0, 9, 9) for k in range(30)])
    lake.run(full="table")
    assert keys(lake) == [(k, 1, 9) for k in sorted(map(str, range(30)))]
    assert changes(lake) == Changes(inserted=5, updated=25, deleted=10)
    wanted = lake.table.snapshots()[0].number
    lake.land("low.jsonl", [row(f"{k}", 0, 5, 5) for k in range(30)])
    lake.run(full="table")
    expected = [(k, 1, 5) for k in sorted(map(str, range(30)))]
    assert (keys(lake), changes(lake)) == (expected, Changes(updated=30))
    lake.table.compact(full=True)
    for again in range(2):
        # Above the order of the last extract, not of the one before; then below both.
        expected = sorted([*expected, (f"new {again}", 1, 1)])
        lake.land(f"late {again}.jsonl", [row(f"new {again}", 0, 6, 1), row("35", 0, 4, 1), row("1", 0, 4, 1)])
        lake.run()
        assert (keys(lake), quarantined(lake)) == (expected, again + 1)
        assert changes(lake) == Changes(inserted=1, late=1)
        lake.table.reprocess(source="landing", host="local")
        assert (keys(lake), quarantined(lake)) == (expected, again + 1)
    lake.table.restore(wanted, dry=False)
    lake.run()
    assert keys(lake) == [(k, 1, 9) for k in sorted(map(str, range(30)))]
    lake.land("late.jsonl", [row("36", 0, 8), row("37", 0, 9)])
    lake.run()
    assert [k for k, _, v in keys(lake) if not v] == ["37"]
    assert quarantined(lake) == 1


@pytest.mark.parametrize("engine", ["arrow", "spark"])
def test_extract_replaces_what_is_newer_in_its_scope(tmp_path: Path, engine: Any, request: Any) -> None:
    if engine == "spark":
        request.getfixturevalue("spark")
    lake = Lake(tmp_path, full_extract="replace", strategy="delta")
    lake.lay("f.parquet", [row("a", day, ts) for day in (0, 1, 2) for ts in (7, 8)])
    lake.table.adopt()
    lake.land("1.jsonl", [row(k, day, 9, op=op) for k, op in (("b", None), ("c", "D")) for day in (0, 1, 2)])
    lake.table.run(host="local", engine=engine)
    lake.land("2.jsonl", [row(k, 0, 2, 2) for k in "abc"])
    lake.table.run(host="local", engine=engine, full="partitions")
    others = [(k, day, 0) for day in (2, 3) for k in "ab"]
    assert keys(lake) == [*((k, 1, 2) for k in "abc"), *others]
    assert changes(lake) == Changes(inserted=1, updated=2)
    lake.land("3.jsonl", [row(k, 1, 1, 3, op=op) for k, op in (("a", "D"), ("b", None), ("c", "D"), ("d", None))])
    lake.table.run(host="local", engine=engine, full="table", may_shrink=True)
    assert keys(lake) == [("b", 2, 3), ("d", 2, 3)]
    assert changes(lake) == Changes(inserted=1, updated=1, deleted=6, unchanged=1)
    assert quarantined(lake) == 0


@pytest.mark.long
def test_extract_replaces_a_statement_and_a_statement_changes_an_extract(tmp_path: Path) -> None:
    lake = Lake(tmp_path, full_extract="replace")
    for night in (1, 2):
        lake.land(f"{night}.jsonl", [row(k, 0, 10 - night, night) for k in "abc"])
        lake.run(full="table")
        assert keys(lake) == [(k, 1, night) for k in "abc"]
        lake.table.update({"v": "v + 10"}, where="k = 'a'", dry=False, workers=1)
        lake.table.delete(where="k = 'b'", dry=False, workers=1)
        assert keys(lake) == [("a", 1, night + 10), ("c", 1, night)]
    lake.land("3.jsonl", [row("b", 0, 8, 3), row("d", 0, 7, 3)])
    lake.run()
    assert keys(lake) == [("a", 1, 12), ("b", 1, 3), ("c", 1, 2)], "b was deleted at the order that it comes with"
    assert quarantined(lake) == 1


@pytest.mark.long
def test_extract_that_replaces_forgets_what_was_forgotten(tmp_path: Path) -> None:
    """A floor of deletes of the future would send every new key to quarantine."""
    lake = Lake(tmp_path, full_extract="replace", tombstone_retention="0s")
    for number, rows in enumerate([[row("a", 0, 90)], [row("a", 0, 91, op="D")], []]):
        lake.land(f"{number}.jsonl", [*rows, row("b", 0, number)])
        lake.run()
    lake.land("3.jsonl", [row("c", 0, 50)])
    lake.run()
    assert (keys(lake), quarantined(lake)) == ([("b", 1, 0)], 1)
    lake.land("4.jsonl", [row("a", 0, 5), row("b", 0, 1, 4)])
    lake.run(full="table")
    lake.land("5.jsonl", [row("a", 0, 6, op="D"), row("c", 0, 6), row("d", 0, 4)])
    lake.run()
    expected = [("b", 1, 4), ("c", 1, 0)]
    assert (keys(lake), quarantined(lake)) == (expected, 2)
    lake.table.reprocess(source="landing", host="local")
    lake.land("6.jsonl", [row("e", 0, 7)])
    lake.run()
    assert (keys(lake), quarantined(lake)) == ([*expected, ("e", 1, 0)], 2)
    for number, record in enumerate([row("a", 0, 20, op="D"), row("f", 0, 21), row("a", 0, 30)], 7):
        lake.land(f"{number}.jsonl", [record])
        lake.run()
    lake.table.reprocess(source="landing", host="local")
    lake.land("10.jsonl", [row("g", 0, 19)])
    lake.run()
    assert [k for k, _, _ in keys(lake)] == list("abcef")
    assert quarantined(lake) == 3


@pytest.mark.long
def test_each_extract_keeps_the_setting_of_its_append(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("0.jsonl", [row(k, 0, 9) for k in "abcd"])
    lake.run()
    lake.land("1.jsonl", [row(k, 0, 3, 1) for k in "abc"])
    lake.table.append(host="local", full="table")
    lake.mend(lambda row: False, full_extract="replace")
    lake.run()
    assert keys(lake) == [(k, 1, 0) for k in "abcd"]
    assert changes(lake) == Changes(late=3, newer_than_extract=1)
    lake.land("2.jsonl", [row(k, 0, 2, 2) for k in "abc"])
    lake.table.append(host="local", full="table")
    assert [(r["k"], r["v"]) for r in lake.rows("latest")] == [(k, 2) for k in "abc"]
    lake.mend(lambda row: False, full_extract="merge")
    lake.run()
    assert keys(lake) == [(k, 1, 2) for k in "abc"]
    lake.land("3.jsonl", [row("a", 0, 1), row("b", 0, 1)])
    lake.run(full="table", may_shrink=True)
    assert keys(lake) == [(k, 1, 2) for k in "abc"]
    assert changes(lake) == Changes(late=2, newer_than_extract=1)
    lake.table.reprocess(source="landing", host="local")
    assert keys(lake) == [(k, 1, 2) for k in "abc"]
    assert quarantined(lake) == 0


@pytest.mark.parametrize("engine", ["arrow", "spark"])
def test_what_an_extract_replaced_dies_with_its_row(tmp_path: Path, engine: Any, request: Any) -> None:
    """A rebuild merges all of them at once: the later extract reaches the row that replaced one of a greater order."""
    if engine == "spark":
        request.getfixturevalue("spark")
    lake = Lake(tmp_path, full_extract="replace")
    for night, rows in enumerate([[("a", 1), ("d", 9)], [("a", 2), ("d", 1)]]):
        lake.land(f"{night}.jsonl", [row(k, 0, ts, night) for k, ts in rows])
        lake.run(full="table")
    lake.mend(lambda row: False, full_extract="merge")
    lake.land("2.jsonl", [row("a", 0, 5, 2)])
    lake.run(full="table", may_shrink=True)
    assert keys(lake) == [("a", 1, 2)]
    lake.table.reprocess(source="landing", host="local", engine=engine)
    assert keys(lake) == [("a", 1, 2)]
    assert quarantined(lake) == 0


def test_lagging_partition_merges_two_extracts_and_a_restore_at_once(tmp_path: Path) -> None:
    lake = Lake(tmp_path, full_extract="replace", on_failed_partition="skip")
    lake.land("1.jsonl", [row(k, day, 9, 1) for k in "abcd" for day in (0, 1)])
    lake.run()
    for number, some in ((2, "abc"), (3, "abd")):
        lake.land(f"{number}.jsonl", [row(k, day, 5 - number, number) for k in some for day in (0, 1)])
        lake.table.append(host="local", full="partitions")
    mark_failed(lake.opened.history, "d=2020-01-01", 3, "of this test")
    dedupe_partitions(lake.opened, ArrowEngine(), {"d=2020-01-02": 3})
    lake.table.publish()
    assert lake.table.status().lagging == ("d=2020-01-01",)
    lagging = lake.table.snapshots()[0].number
    lake.land("4.jsonl", [row("a", day, 8, 4) for day in (0, 1)])
    lake.run()
    lake.table.restore(lagging, dry=False)
    lake.run()
    assert keys(lake) == [(k, day, 3) for day in (1, 2) for k in "abd"]
    assert quarantined(lake) == 0


def test_command_tells_which_rows_an_extract_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake(tmp_path, full_extract="replace")
    lake.land("1.jsonl", [row("a", 0, 9), row("b", 0, 9), row("c", 0, 9, op="D")])
    lake.run()
    lake.land("2.jsonl", [row("a", 0, 2), row("c", 0, 2)])
    lake.run(full="table")
    monkeypatch.chdir(lake.configure().parent)

    def told(key: str) -> tuple[list[str], str]:
        done = CliRunner().invoke(main, ["explain", f"k={key}", "l=0", "--json"])
        [found] = json.loads(done.stdout)["result"]["partitions"]
        return [v["outcome"] for v in found["versions"]], found["why"]

    for key in "ac":
        outcomes, why = told(key)
        assert outcomes == ["replaced", "shown", "shown"]
        assert "A full extract with the key replaced what was before it." in why
    assert told("b") == (["lacking"], "A full extract lacked the key.")


@pytest.mark.parametrize(
    "other",
    [
        {"ties": "content"},
        {"history": True},
        {"mode": "columns"},
        {"key_scope": "table"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_setting_is_refused_beside_what_it_contradicts(lake: Lake, other: dict[str, Any]) -> None:
    path = lake.configure(full_extract="replace", on_failed_partition="hold", **other)
    done = CliRunner().invoke(main, ["config", "--config", str(path), "--json"])
    error = json.loads(done.stdout)["error"]
    assert (done.exit_code, error["code"]) == (2, "bad-setting")
    assert "full_extract is 'replace'; not supported with" in error["message"]


def test_setting_is_refused_where_arrival_decides(tmp_path: Path) -> None:
    files = tmp_path / "landing" / "1.csv"
    lake = Lake(tmp_path, order_by=("record_timestamp",), schema={"d": "date"}, delete=None)
    files.write_text("k,l,d\na,0,2020-01-01\n")
    for _ in range(2):  # a new table, then one that exists
        lake.mend(lambda row: False, full_extract="replace")
        with pytest.raises(ConfigurationError, match="arrival decides") as refused:
            lake.table.append(host="local")
        assert refused.value.code == "bad-setting"
        lake.mend(lambda row: False, full_extract="merge")
        lake.run()


Came = tuple[str, int, int, str | None]
"""Key, order, value, and ``D`` for a delete."""


@dataclass
class Day:
    """A partition as a dict: its rows with order and value, the orders of its deletes, and its floor."""

    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    deleted: dict[str, int] = field(default_factory=dict)
    floor: int = -1

    def take(self, came: list[Came], extract: int | None = None, *, replaces: bool = False) -> Counter[str]:
        """Merge a batch, and say what it changes. ``extract``: the greatest order of a full extract."""
        changed: Counter[str] = Counter()
        best: dict[str, Came] = {}
        for record in came:
            if record[0] not in best or best[record[0]][1] <= record[1]:
                best[record[0]] = record
        if extract is not None:
            self.floor = extract if replaces else max(self.floor, extract)
            for key in {*self.rows, *self.deleted} - best.keys():
                if replaces or self.order_of(key) <= extract:
                    changed["deleted"] += key in self.rows
                    self.drop(key)
                else:
                    changed["newer_than_extract"] += key in self.rows
        for key, order, value, op in best.values():
            known = key in self.rows or key in self.deleted
            if not known and extract is None and order < self.floor:
                continue
            if known and self.order_of(key) > order and not replaces:
                changed["late"] += 1
                continue
            was = key in self.rows
            self.drop(key)
            if op:
                self.deleted[key] = order
                changed["deleted" if was else "unchanged"] += 1
                changed["deletes_without_row"] += not known
            else:
                self.rows[key] = order, value
                changed["updated" if was else "inserted"] += 1
        return changed

    def order_of(self, key: str) -> int:
        return self.rows[key][0] if key in self.rows else self.deleted[key]

    def drop(self, key: str) -> None:
        self.rows.pop(key, None)
        self.deleted.pop(key, None)


@dataclass
class Days:
    """Days, and the floor of those that have no record yet."""

    days: dict[int, Day] = field(default_factory=dict)
    floor: int = -1

    def day(self, number: int) -> Day:
        return self.days.setdefault(number, Day(floor=self.floor))


class Nights:
    """A lake, and what it should show, as some random nights leave both. A day is one partition, or one for each hash."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        bucket, strategy = rng.choice(["2500B", "256MiB"]), rng.choice(["rewrite", "delta"])
        by = rng.choice([("d",), ("d", "bucket(3, k)")])
        self.lake, self.rng, self.night = (
            Lake(root, bucket=bucket, strategy=strategy, partition_by=by, keep_snapshots=99),
            rng,
            0,
        )
        self.model = Days()
        self.published: dict[int, Days] = {}
        self.landed: dict[str, list[tuple[int, Came]]] = {}

    @property
    def days(self) -> dict[int, Day]:
        return self.model.days

    def append(self) -> Counter[str]:
        rng, self.night = self.rng, self.night + 1
        days = min(4, 1 + self.night // 2)  # later ones come into being after extracts
        records = [
            (rng.randrange(days), (rng.choice("abcd"), rng.randint(0, 9), self.night, rng.choice([None, None, "D"])))
            for _ in range(rng.randint(1, 6))
        ]
        self.landed[f"{self.night:03}.jsonl"] = records
        self.lake.land(f"{self.night:03}.jsonl", [row(k, day, ts, v, op=op) for day, (k, ts, v, op) in records])
        scope, replaces = rng.choice([None, None, "table", "partitions"]), rng.random() < 0.5
        self.lake.mend(lambda row: False, full_extract="replace" if replaces else "merge")
        self.lake.table.append(host="local", full=scope, may_shrink=scope is not None)
        extract = max(record[1] for _, record in records) if scope else None
        touched = {day for day, _ in records} | (self.days.keys() if scope == "table" else set())
        changed: Counter[str] = Counter()
        for day in touched:
            came = [record for of, record in records if of == day]
            changed += self.model.day(day).take(came, extract, replaces=replaces and scope is not None)
        if scope == "table" and extract is not None:
            self.model.floor = extract if replaces else max(self.model.floor, extract)
        return changed

    def publish(self) -> None:
        wanted = [
            (key, day + 1, value)
            for day in sorted(self.days)
            for key, (_, value) in sorted(self.days[day].rows.items())
        ]
        if self.rng.random() < 0.3:
            assert sorted(((r["k"], r["d"].day, r["v"]) for r in self.lake.rows("latest")), key=by_day) == wanted
        self.lake.run()
        assert sorted(keys(self.lake), key=by_day) == wanted
        self.published[self.lake.table.snapshots()[0].number] = deepcopy(self.model)

    def change(self) -> None:
        key, deletes = self.rng.choice("abcd"), self.rng.random() < 0.5
        given: Any = {"where": f"k = '{key}'", "dry": False, "workers": 1}
        self.lake.table.delete(**given) if deletes else self.lake.table.update({"v": "v + 100"}, **given)
        for day in self.days.values():
            if key in day.rows:
                order, value = day.rows[key]
                day.take([(key, order, value + 100, "D" if deletes else None)])
        self.publish()

    def restore(self) -> None:
        number = self.rng.choice(list(self.published))
        self.lake.table.restore(number, dry=False)
        self.model = deepcopy(self.published[number])
        self.publish()

    def again(self) -> None:
        """Take the files of withdrawn batches as one, if none of them was an extract."""
        try:
            done = self.lake.table.append(host="local", again=True)
        except RefusedError as refused:
            assert refused.code == "full-extract-incomplete"
            return
        came = [record for file in done.entry.files for record in self.landed[file.path]] if done else []
        for day in {day for day, _ in came}:
            self.model.day(day).take([record for of, record in came if of == day])
        self.publish()


def by_day(key: tuple[str, int, int]) -> tuple[int, str]:
    return key[1], key[0]


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.usefixtures("tiny_files_split")
@pytest.mark.parametrize("seed", range(6 * TIMES))
def test_random_nights_with_extracts_of_both_kinds_are_a_dict(seed: int, tmp_path: Path) -> None:
    nights = Nights(tmp_path, random.Random(seed))
    for _ in range(6):
        changed = nights.append()
        if nights.rng.random() < 0.3:
            nights.append()
            nights.publish()
        else:
            nights.publish()
            assert changes(nights.lake) == Changes(**changed)
        if nights.rng.random() < 0.3:
            nights.change()
        match nights.rng.randint(0, 10):
            case 0 | 1:
                nights.restore()
            case 2:
                nights.lake.table.compact(full=True)
                nights.lake.table.vacuum(dry=False)
            case 5:
                nights.restore()
                nights.again()
            case 3 | 4:
                nights.lake.table.reprocess(source="landing", host="local")
        nights.publish()
    quarantined(nights.lake)
