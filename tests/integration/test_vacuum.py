"""What vacuum deletes and what it keeps: by who may still need it, and at any point of it the table stays whole."""

import shutil
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import clock
from lakeupsert.cli import main
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.errors import ConfigurationError, DamagedTableError
from lakeupsert.operations.reprocess import ReprocessOptions, reprocess
from lakeupsert.operations.vacuum import VacuumMemory, vacuum
from lakeupsert.pipeline.merge.dedupe import dedupe_partitions
from lakeupsert.read.arrow import to_arrow
from lakeupsert.table.layout import TableObjects
from tests.harness.damage import damage
from tests.harness.faults import FAULTS, Fault
from tests.harness.lake import Lake, row


class PassingTime(clock.Source):
    passed = timedelta()

    def now(self) -> datetime:
        return super().now() + self.passed


@pytest.fixture
def time() -> Iterator[PassingTime]:
    source = PassingTime()
    with clock.use(source):
        yield source


def night(lake: Lake, number: int, days: int = 2) -> None:
    lake.land(f"{number}.jsonl", [row(k, day, number, number) for day in range(days) for k in "ab"])
    lake.run()


def nights(root: Path, number: int, **settings: object) -> Lake:
    lake = Lake(root, **settings)
    for n in range(1, number + 1):
        night(lake, n)
    return lake


def orphan(lake: Lake, partition: str = "d=2020-01-01") -> str:
    """A file of a merge that died before its commit; its name."""
    name = f"{partition}/base-0-{'0' * 32}.parquet"
    processed = lake.root / "processed"
    (processed / partition).mkdir(exist_ok=True)
    shutil.copy(next((processed / "d=2020-01-01").glob("base-*")), processed / name)
    return name


def base_files(lake: Lake) -> set[str]:
    return {f for f in lake.stored_files() if f.endswith(".parquet")}


def test_files_of_a_merge_that_may_still_run_stay_for_an_hour(tmp_path: Path, time: PassingTime) -> None:
    lake = nights(tmp_path, 1)
    lake.land("2.jsonl", [row("a", 7, 2, 2)])
    lake.table.append(host="local")
    names = {orphan(lake), orphan(lake, "d=2020-01-08")}  # the second one was never merged
    for hours, stays in ((0, names), (2, set())):
        time.passed = timedelta(hours=hours)
        lake.table.vacuum(dry=False)
        assert names & base_files(lake) == stays
    lake.finish_and_check()


def test_without_retention_only_files_of_the_kept_snapshot_are_left(tmp_path: Path) -> None:
    """Superseded files are younger than those of a merge that may still run, and go nevertheless."""
    lake = nights(tmp_path, 3, keep_snapshots=1, superseded_retention="0s", strategy="rewrite")
    lake.table.vacuum(dry=False)
    assert len(base_files(lake)) == 2
    lake.finish_and_check()


def test_only_what_kept_snapshots_show_is_left(tmp_path: Path, time: PassingTime) -> None:
    lake = nights(tmp_path, 6, keep_snapshots=2)
    lake.table.tag("second", 1)
    before = lake.stored_files()

    dry = lake.table.vacuum()
    assert dry.expired == (0, 2, 3)
    assert not dry.garbage, "they expire now, so who reads them has a day"
    assert lake.stored_files() == before

    lake.table.vacuum(dry=False)
    time.passed += timedelta(hours=23)
    assert not lake.table.vacuum(dry=False).garbage
    time.passed += timedelta(hours=2)
    done = lake.table.vacuum(dry=False)

    assert {g.name for g in done.garbage} == before - lake.stored_files()
    assert len(base_files(lake)) == 2 * 3, "of two partitions the files of snapshots 1, 4 and 5"
    assert not [f for f in lake.stored_files() if f.endswith(".pack")]
    assert [link.number for link in lake.table.snapshots()] == [5, 4, 1]
    assert {r["v"] for r in lake.rows("second")} == {2}
    with pytest.raises(ConfigurationError) as expired:
        lake.rows(3)
    assert expired.value.code == "expired-snapshot"
    with pytest.raises(ConfigurationError):
        lake.table.restore(3)
    lake.check()


def test_old_versions_are_trimmed_after_seven_days_and_the_table_goes_on(tmp_path: Path, time: PassingTime) -> None:
    lake = nights(tmp_path, 5, keep_snapshots=1)
    lake.table.vacuum(dry=False)
    time.passed += timedelta(days=8)
    lake.table.vacuum(dry=False)
    home = tmp_path / "processed/_lakeupsert"
    assert len(list((home / "partitions/d=2020-01-01").glob("v*"))) == 2, "the newest that is shown, and the fence"
    assert len(list((home / "snapshots").glob("v*"))) == 2, "the newest, and the one that says what is expired"
    night(lake, 6)
    lake.finish_and_check()
    # Files have the time of this machine, so the signs of that night are old, too.
    assert not [g for g in lake.table.vacuum().garbage if "/reading/" not in g.name]


def test_a_second_vacuum_finds_nothing_and_writes_nothing(tmp_path: Path, time: PassingTime) -> None:
    lake = nights(tmp_path, 3, keep_snapshots=1)
    for _ in range(2):
        lake.table.vacuum(dry=False)
        time.passed += timedelta(days=8)
    lake.table.vacuum(dry=False)
    lake.reopen()
    entries = lake.entries()
    assert not lake.table.vacuum(dry=False).garbage
    assert lake.table.requests["create"] == 0
    assert lake.entries() == entries


def test_one_that_remembers_finds_what_a_new_one_finds_and_reads_only_what_is_new(
    tmp_path: Path, time: PassingTime
) -> None:
    lake = nights(tmp_path, 1, keep_snapshots=2)
    table, reads, deleted, versions = lake.table._table, [], 0, Counter[str]()
    memory = VacuumMemory.of(table)
    for number in range(2, 20):
        night(lake, number)
        if number == 5:
            lake.table.tag("fifth")
        if number in (8, 11):
            lake.table.restore("fifth" if number == 8 else lake.table.snapshots()[1].number, dry=False)
            lake.run()
        if number == 14:
            lake.table.tag("fifth", None)
        time.passed += timedelta(hours=5)
        dry = lake.table.vacuum()
        lake.points.arm(-1, Fault.BEFORE)
        lake.points.seen.clear()
        done = vacuum(table, dry=False, memory=memory)
        reads.append(
            sum("get _lakeupsert/snapshots" in call or "get _lakeupsert/ledger" in call for call in lake.points.seen)
        )
        versions.update(call for call in lake.points.seen if "get _lakeupsert/partitions" in call)
        assert {g.name for g in done.garbage} == {g.name for g in dry.garbage}
        deleted += len(done.garbage)
    assert deleted > 20
    assert max(reads[9:]) <= max(reads[:9]), (
        "of snapshots and the ledger, the later nights read no more than the first ones"
    )
    assert max(versions.values()) == 2, "once, and once more as the version that a fence follows"
    lake.finish_and_check()


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_struck_at_every_call_and_repeated_it_leaves_all_that_lives_and_no_garbage(
    tmp_path: Path, time: PassingTime, fault: Fault
) -> None:
    first = nights(tmp_path / "first", 4, keep_snapshots=1)
    first.table.vacuum(dry=False)
    night(first, 5)
    added = orphan(first)
    first.table.vacuum(dry=False)
    time.passed += timedelta(days=8)
    whole = first.copy(tmp_path / "whole")
    whole.table.vacuum(dry=False)
    left = whole.stored_files()
    assert added not in left

    def check(lake: Lake) -> None:
        lake.check()
        lake.table.vacuum(dry=False)
        assert lake.stored_files() == left
        lake.check()

    assert first.strike_every_call(fault, lambda lake: lake.table.vacuum(dry=False), check) > 20


def test_what_others_put_there_stays(tmp_path: Path, time: PassingTime) -> None:
    lake = nights(tmp_path, 2, keep_snapshots=1)
    theirs = [
        tmp_path / "processed" / name for name in ("d=2020-01-01/mine.parquet", "notes.txt", "other/base-1.parquet")
    ]
    for file in theirs:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    for _ in range(2):
        lake.table.vacuum(dry=False)
        time.passed += timedelta(days=8)
    lake.table.vacuum(dry=False)
    assert all(file.read_text() == "mine" for file in theirs)


def test_with_no_retention_who_lists_folders_reads_the_last_night(tmp_path: Path) -> None:
    """Strategy rewrite with one snapshot: after each run the folder holds what readers see, and nothing else."""
    lake = Lake(tmp_path, keep_snapshots=1, superseded_retention="0s")
    for number in range(1, 4):
        night(lake, number)
        listed = duckdb.sql(
            f"SELECT k, v FROM read_parquet('{tmp_path}/processed/**/*.parquet') ORDER BY ALL"
        ).fetchall()
        assert listed == sorted((r["k"], r["v"]) for r in lake.rows())


def test_a_restore_that_is_not_merged_keeps_what_it_goes_back_to(tmp_path: Path, time: PassingTime) -> None:
    """Its partition fails, so the others are published without it, night after night, until the snapshot expires."""
    lake = nights(tmp_path, 3, keep_snapshots=1, on_failed_partition="skip")
    lake.table.restore(0, dry=False)
    chain = lake.opened.history.objects.partition("d=2020-01-01")
    first = tmp_path / "processed" / chain.name(0)
    shutil.move(first, tmp_path / "aside")
    for number in range(4, 7):
        lake.land(f"{number}.jsonl", [row("z", 1, number, number)])
        for _ in range(5):
            lake.run()
    shutil.move(tmp_path / "aside", first)
    assert lake.table.snapshots()[0].body.lagging == ("d=2020-01-01",)
    name = orphan(lake)
    for _ in range(3):
        lake.table.vacuum(dry=False)
        time.passed += timedelta(days=8)
    assert name not in base_files(lake)
    lake.reopen()
    lake.run()
    assert lake.rows() == lake.expected(max(n for n, e in lake.entries() if e.kind != "fence"))
    assert not lake.table.snapshots()[0].body.lagging


def test_batches_that_a_kept_snapshot_lags_behind_stay(tmp_path: Path, time: PassingTime) -> None:
    """A restore to that snapshot has to merge them."""
    lake = Lake(tmp_path, keep_snapshots=3, on_failed_partition="skip")
    night(lake, 1)
    lake.land("2.jsonl", [row("a", 0, 2, 2), row("a", 1, 2, 2)])
    appended = lake.table.append(host="local")
    assert appended is not None
    mend = damage(tmp_path / "processed", appended.entry.touched["d=2020-01-01"].files[0])
    for _ in range(5):
        lake.run()
    lagging = lake.table.snapshots()[0]
    assert lagging.body.lagging == ("d=2020-01-01",)
    mend()
    lake.run()
    night(lake, 3)
    time.passed += timedelta(days=8)
    lake.table.vacuum(dry=False)
    lake.table.restore(lagging.number, dry=False)
    lake.reopen()
    lake.run()
    assert lake.rows() == lake.expected(lake.entries()[-1][0])


def test_the_command_is_dry_unless_it_is_told_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lake = nights(tmp_path, 3)
    lake.table.close()
    lake.configure(keep_snapshots=1, superseded_retention="0s")
    before = lake.stored_files()
    told = CliRunner().invoke(main, ["vacuum"])
    assert (told.exit_code, "would expire" in told.stdout, "--yes" in told.stdout) == (0, True, True), told.output
    assert lake.stored_files() == before
    done = CliRunner().invoke(main, ["vacuum", "--yes"])
    assert (done.exit_code, "4 objects" in done.stdout) == (0, True), done.output
    assert len(base_files(lake)) == 2


def test_who_reads_latest_keeps_its_versions_as_long_as_those_of_snapshots(tmp_path: Path) -> None:
    """They were never in a snapshot: the next night's version is what is published."""
    lake = nights(tmp_path, 1)
    lake.land("2.jsonl", [row("a", 0, 2, 2)])
    lake.table.append(host="local")
    lake.table.dedupe()
    view = lake.table.view("latest")
    expected = lake.expected(view.snapshot.batch)
    night(lake, 3)
    lake.table.vacuum(dry=False)
    assert to_arrow(view).read_all().to_pylist() == expected


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.long)])
def test_two_vacuums_at_once_delete_the_same_and_fail_at_nothing(
    tmp_path: Path, time: PassingTime, stride: int
) -> None:
    """The second one comes whole before each call of the first, or before each fifth."""
    first = nights(tmp_path / "first", 4, keep_snapshots=1)
    first.table.vacuum(dry=False)
    night(first, 5)
    first.table.vacuum(dry=False)
    time.passed += timedelta(days=8)
    number, struck = 0, True
    while struck:
        lake = first.copy(tmp_path / "both")
        other = Lake(lake.root, keep_snapshots=1)
        lake.points.amid(number, lambda other=other: other.table.vacuum(dry=False))
        lake.table.vacuum(dry=False)
        struck, number = lake.points.struck is not None, number + stride
        lake.points.disarm()
        lake.check()
        assert len(base_files(lake)) == 2
        other.table.close()
        lake.table.close()
        shutil.rmtree(tmp_path / "both")
    assert number > 20


def test_a_work_object_that_cannot_be_read_stops_no_vacuum(tmp_path: Path, time: PassingTime) -> None:
    lake = nights(tmp_path, 3, keep_snapshots=1, superseded_retention="0s")
    work = tmp_path / "processed/_lakeupsert/units/reprocess-0.json"
    work.parent.mkdir(exist_ok=True)
    work.write_text("{")
    lake.table.vacuum(dry=False)
    assert work.exists(), "of a later version, perhaps"
    time.passed += timedelta(days=8)
    lake.table.vacuum(dry=False)
    assert not work.exists()


@pytest.mark.parametrize(("hours", "again"), [(2, 0), (25, 1)])
@pytest.mark.few(2)
def test_an_append_that_vacuums_cross_begins_again_only_where_its_files_may_be_gone(
    tmp_path: Path, time: PassingTime, hours: int, again: int
) -> None:
    lake = nights(tmp_path, 1)
    orphan(lake)
    lake.land("2.jsonl", [row("a", 0, 2, 2)])
    beside = Lake(tmp_path, **lake.given)
    began = len(lake.entries())

    def vacuum() -> None:
        time.passed += timedelta(hours=hours)
        beside.table.vacuum(dry=False)
        assert [entry.kind for _, entry in beside.entries()[began:]] == ["fence"]

    lake.points.amid(0, vacuum, "create _lakeupsert/ledger")
    appended = lake.table.append(host="local")
    assert appended is not None
    (pack,) = appended.entry.touched["d=2020-01-01"].files
    assert TableObjects.start_of(pack.name) == began + again
    lake.finish_and_check()


def test_of_a_partition_that_rests_nothing_is_read(tmp_path: Path, time: PassingTime) -> None:
    lake = nights(tmp_path, 2, keep_snapshots=1)
    for _ in range(2):
        lake.table.vacuum(dry=False)
        time.passed += timedelta(days=8)
    lake.land("many.jsonl", [row(k, day, 1, 1, op=op) for day in range(20) for k, op in (("a", None), ("b", "D"))])
    lake.run()
    for _ in range(2):
        lake.table.vacuum(dry=False)
        time.passed += timedelta(days=8)
    lake.table.vacuum(dry=False)
    lake.reopen()
    lake.points.arm(10**6, Fault.BEFORE)
    lake.table.vacuum(dry=False)
    read = [name for name in lake.points.seen if name.startswith("get _lakeupsert/partitions")]
    assert not read

    added = orphan(lake)
    time.passed += timedelta(hours=2)
    assert [g.name for g in lake.table.vacuum(dry=False).garbage] == [added]


def test_a_snapshot_that_expires_meanwhile_gets_no_tag(tmp_path: Path) -> None:
    lake = nights(tmp_path, 3, keep_snapshots=1)
    beside = Lake(tmp_path, **lake.given)
    lake.points.amid(0, lambda: beside.table.vacuum(dry=False), "create _lakeupsert/snapshots")
    with pytest.raises(ConfigurationError) as expired:
        lake.table.tag("first", 0)
    assert expired.value.code == "expired-snapshot"
    assert not lake.table.snapshots()[0].body.tags


def with_adopted(tmp_path: Path) -> tuple[Lake, Path]:
    """A table that has merged an adopted file of 2020-01-01, and that file."""
    folder = tmp_path / "processed/d=2020-01-01"
    folder.mkdir(parents=True)
    adopted = [{n: v for n, v in row(k, 0, 0, 7).items() if n not in ("d", "op")} for k in "az"]
    schema = pa.schema([("k", "string"), ("l", "int32"), ("ts", pa.timestamp("us")), ("v", "int64")])
    pq.write_table(pa.Table.from_pylist(adopted, schema), folder / "theirs.parquet")
    lake = Lake(tmp_path, keep_snapshots=1)
    lake.table.adopt()
    night(lake, 1)
    return lake, folder / "theirs.parquet"


def test_a_reprocess_of_other_partitions_keeps_no_adopted_file(tmp_path: Path, time: PassingTime) -> None:
    lake, theirs = with_adopted(tmp_path)
    reprocess(lake.opened, ReprocessOptions(lambda name: name == "d=2020-01-02", source="landing", host="local"))
    for _ in range(3):
        lake.table.vacuum(dry=False)
        time.passed += timedelta(days=2)
    assert not theirs.exists()


def test_a_reprocess_that_waits_for_its_workers_keeps_adopted_files_and_later_batches(
    tmp_path: Path, time: PassingTime
) -> None:
    lake, theirs = with_adopted(tmp_path)
    table = lake.opened
    reprocess(table, ReprocessOptions(source="landing", host="local"))
    lake.land("2.jsonl", [row("b", 0, 2, 2)])
    appended = lake.table.append(host="local")
    assert appended is not None
    dedupe_partitions(table, ArrowEngine(), {"d=2020-01-01": appended.number})
    lake.table.publish()
    before = lake.rows()
    for _ in range(2):
        lake.table.vacuum(dry=False)
        time.passed += timedelta(days=2)
    lake.table.vacuum(dry=False)
    assert theirs.exists()

    lake.reopen()
    merged = [r for r in lake.table.dedupe() if r.status == "merged"]
    assert "d=2020-01-01" in {r.partition for r in merged}
    assert not [r for r in merged if r.status == "failed"]
    lake.run()
    assert lake.rows() == before
    for _ in range(2):
        lake.table.vacuum(dry=False)
        time.passed += timedelta(days=2)
    lake.table.vacuum(dry=False)
    assert not theirs.exists()
    assert lake.rows() == before


def test_a_lost_manifest_stops_it_before_anything_goes(tmp_path: Path, time: PassingTime) -> None:
    lake = nights(tmp_path, 3, keep_snapshots=1)
    chain = lake.opened.history.objects.partition("d=2020-01-01")
    (tmp_path / "processed" / chain.name(2)).unlink()
    before = lake.stored_files()
    for _ in range(2):
        with pytest.raises(DamagedTableError, match="d=2020-01-01") as lost:
            lake.table.vacuum(dry=False)
        assert lost.value.code == "missing-version"
        time.passed += timedelta(days=8)
    assert lake.stored_files() == before
    assert max(chain.numbers()) == 1


def test_copies_that_an_operator_keeps_are_not_its_own(tmp_path: Path, time: PassingTime) -> None:
    lake = nights(tmp_path, 2, keep_snapshots=1)
    folder = tmp_path / "processed/d=2020-01-01"
    copies = [folder.with_name("d=2020-01-01.bak"), folder.parent / "backup/d=2020-01-01"]
    for copy in copies:
        shutil.copytree(folder, copy)
    (kept,) = (f for f in folder.iterdir() if f.name.startswith("base-1"))
    shutil.copy(kept, folder / f"{kept.name}.bak")
    for _ in range(3):
        lake.table.vacuum(dry=False)
        time.passed += timedelta(days=8)
    assert all(len(list(copy.iterdir())) == 2 for copy in copies)
    assert (folder / f"{kept.name}.bak").exists()
    assert sorted(p.name for p in (tmp_path / "processed/_lakeupsert/partitions").iterdir()) == [
        "d=2020-01-01",
        "d=2020-01-02",
    ]


def test_what_a_killed_writer_left_unfinished_goes(tmp_path: Path, time: PassingTime) -> None:
    lake = nights(tmp_path, 1)
    unfinished = tmp_path / "processed/_lakeupsert/tmp/unfinished"
    unfinished.write_bytes(b"half of it")
    assert not lake.table.vacuum(dry=False).garbage
    time.passed += timedelta(hours=25)
    assert 10 in [g.bytes for g in lake.table.vacuum(dry=False).garbage]
    assert not unfinished.exists()


def test_of_the_signs_of_runs_the_newest_stays(tmp_path: Path, time: PassingTime) -> None:
    signs = (lake := nights(tmp_path, 2)).opened.history.objects.reading
    newest, *earlier = signs.numbers()
    assert earlier
    lake.table.vacuum(dry=False)
    assert [*signs.numbers()] == [newest, *earlier], "they are young"
    time.passed += timedelta(days=8)
    lake.table.vacuum(dry=False)
    assert [*signs.numbers()] == [newest]


def test_dry_it_names_what_it_would_delete(tmp_path: Path) -> None:
    """With no retention, what expires now goes now."""
    lake = nights(tmp_path, 3)
    lake.table.close()
    again = Lake(tmp_path, keep_snapshots=1, superseded_retention="0s")
    told = {g.name for g in again.table.vacuum().garbage}
    assert told
    assert told == {g.name for g in again.table.vacuum(dry=False).garbage}


@pytest.mark.long
def test_a_lost_ledger_entry_stops_every_writer(tmp_path: Path) -> None:
    """Its number would be taken again, by a batch that nobody would merge."""
    lake = nights(tmp_path, 2)
    entry = tmp_path / "processed" / lake.table.objects.ledger.name(2)
    lost = entry.read_bytes()
    entry.unlink()
    lake.land("3.jsonl", [row("c", 0, 3)])
    for step in (
        lambda: lake.table.run(host="local"),
        lambda: lake.table.append(host="local"),
        lambda: lake.table.append(replay_quarantine=True),
        lambda: lake.table.vacuum(dry=False),
    ):
        lake.reopen()
        with pytest.raises(DamagedTableError, match="batch 2") as refused:
            step()
        assert refused.value.code == "missing-version"
    assert not entry.exists()
    entry.write_bytes(lost)
    lake.finish_and_check()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_vacuum_reads_no_manifest_where_nothing_can_go(tmp_path: Path, time: PassingTime, strategy: str) -> None:
    """Neither right after nights, nor once all but the kept snapshots expired: listings and snapshots say what is needed."""

    def manifests(lake: Lake) -> tuple[int, int]:
        lake.reopen()
        lake.points.arm(-1, Fault.BEFORE)
        lake.points.seen.clear()
        garbage = lake.table.vacuum(dry=True).garbage
        return len(garbage), sum("get" in call and "/partitions/" in call for call in lake.points.seen)

    lake = nights(tmp_path, 4, strategy=strategy, keep_snapshots=2)
    assert manifests(lake) == (0, 0)
    stray = lake.root / "processed" / orphan(lake)
    time.passed = timedelta(hours=2)
    assert manifests(lake)[0] == 1, "an orphan in one of two partitions"
    stray.unlink()
    time.passed = timedelta(hours=25)
    lake.table.vacuum(dry=False)
    time.passed = timedelta(hours=50)
    assert manifests(lake)[0] > 0
    lake.table.vacuum(dry=False)
    lake.check()
    assert manifests(lake) == (0, 0)
    night(lake, 5, days=1)
    assert manifests(lake) == (0, 0)
