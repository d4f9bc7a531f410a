"""The newest object of a chain is gone: what others know of it tells, and nobody takes the one before for the newest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lakeupsert.errors import DamagedTableError
from lakeupsert.pipeline.stored_objects import Versions
from tests.harness.lake import Lake, made_once, row

DAYS = ("2020-01-01", "2020-01-02")
DAMAGED = f"d={DAYS[0]}"
"""The partition that loses a manifest."""


@made_once
def lake(folder: Path) -> Lake:
    """Two nights that went well: `a` and `b` in each partition."""
    lake = Lake(folder, keep_snapshots=1)
    for night in (1, 2):
        land(lake, night, "ab")
        lake.run()
        if night == 1:
            lake.table.tag("audit")
    return lake


def land(lake: Lake, night: int, keys: str) -> None:
    lake.land(f"{night}.jsonl", [row(key, day, night) for day in (0, 1) for key in keys])


def lose_head(lake: Lake, chain: Versions[Any]) -> Path:
    """Delete a chain's newest object behind the table's back; where it was."""
    number = chain.newest_number()
    assert number is not None
    path = lake.root / "processed" / chain.name(number)
    path.unlink()
    lake.reopen()
    return path


def refused(lake: Lake, path: Path, *calls: Callable[[], object]) -> list[DamagedTableError]:
    """The errors of calls that meet the loss, each as a new process; they name the object."""
    errors = []
    for call in calls:
        with pytest.raises(DamagedTableError) as met:
            call()
        assert (met.value.code, path.name in met.value.message) == ("missing-version", True)
        errors.append(met.value)
        lake.reopen()
    return errors


def seen(lake: Lake) -> set[tuple[str, int]]:
    return {(r["k"], r["ts"].second) for r in lake.rows()}


@pytest.mark.long
def test_newest_snapshot(lake: Lake) -> None:
    """A batch came after it, so the ledger knows it: readers and writers notice, and `publish` shows what is whole."""
    land(lake, 3, "ac")
    lake.table.append(host="local")
    path = lose_head(lake, lake.table.objects.snapshots)
    refused(
        lake,
        path,
        lambda: lake.table.view(),
        lambda: lake.table.view("latest"),
        lambda: lake.table.status(),
        lambda: lake.table.report(),
        lambda: lake.table.append(host="local"),
        lambda: lake.table.reconcile(),
        lambda: lake.table.vacuum(),
        lambda: lake.table.vacuum(dry=False),
        lambda: lake.table.compact(full=True),
        lambda: lake.table.tag("audit", None),
        lambda: lake.table.restore(0),
        lambda: lake.table.run(host="local"),
    )
    published = lake.table.publish()
    assert (published.lost, published.snapshot, published.batch) == (2, 3, 2)
    assert seen(lake) == {("a", 2), ("b", 2)}
    lake.reopen()
    assert lake.table.publish().lost is None
    lake.finish_and_check()
    assert seen(lake) == {("a", 3), ("b", 2), ("c", 3)}


@pytest.mark.long
def test_the_only_snapshot(folder: Path) -> None:
    lake = Lake(folder)
    for night in (1, 2):
        land(lake, night, "ab")
        lake.table.append(host="local")
        if night == 1:
            lake.run()
    path = lose_head(lake, lake.table.objects.snapshots)
    refused(lake, path, lambda: lake.table.view(), lambda: lake.table.status())
    published = lake.table.publish()
    assert (published.lost, published.snapshot, published.batch) == (0, 1, 1)
    lake.finish_and_check()


def test_the_only_snapshot_of_an_adopted_table(folder: Path) -> None:
    """What was adopted is batch 0, and no batch need have touched it since."""
    lake = Lake(folder)
    lake.lay("x.parquet", [row("old", day, 1) for day in (0, 1, 2)])
    lake.table.adopt()
    lake.land("1.jsonl", [row("a", 0, 2)])
    lake.table.append(host="local")
    lose_head(lake, lake.table.objects.snapshots)
    published = lake.table.publish()
    assert (published.lost, published.snapshot, published.rows) == (0, 1, 3)
    lake.finish_and_check()


@pytest.mark.long
def test_what_the_lost_snapshot_may_have_expired_stays_so(folder: Path) -> None:
    """A vacuum may have deleted its files, and the snapshot that told so is gone."""
    lake = Lake(folder, keep_snapshots=2, superseded_retention="0s", strategy="rewrite")
    for night in range(1, 6):
        land(lake, night, "ab")
        lake.run()
    lake.table.vacuum(dry=False)
    kept = {link.number for link in lake.table.snapshots()}
    land(lake, 6, "a")
    lake.table.append(host="local")
    lose_head(lake, lake.table.objects.snapshots)
    lake.table.publish()
    numbers = {link.number for link in lake.table.snapshots()}
    assert numbers - kept == {max(numbers)}
    for number in numbers:
        lake.table.to_arrow(number).read_all()


def test_a_snapshot_that_showed_what_was_compacted(lake: Lake) -> None:
    """Its place is taken with the versions of now: the files of those that the one before it shows may be gone."""
    lake.table.compact(full=True)
    lake.run()
    snapshots = lake.table.objects.snapshots
    shown = snapshots.head()
    land(lake, 3, "a")
    lake.table.append(host="local")
    lose_head(lake, snapshots)
    lake.table.publish()
    now = snapshots.head()
    assert shown is not None
    assert now is not None
    assert now.body.partitions == shown.body.partitions
    lake.finish_and_check()


def test_newest_snapshot_after_vacuum(folder: Path) -> None:
    """The fence of a vacuum is a ledger entry, and knows the snapshot."""
    lake = Lake(folder, keep_snapshots=1, superseded_retention="0s", strategy="rewrite")
    for night in (1, 2):
        land(lake, night, "ab")
        lake.run()
    lake.table.vacuum(dry=False)
    path = lose_head(lake, lake.table.objects.snapshots)
    refused(lake, path, lambda: lake.table.view())


def test_newest_ledger_entry_that_is_published(lake: Lake) -> None:
    path = lose_head(lake, lake.table.objects.ledger)
    land(lake, 3, "ac")
    refused(
        lake, path, lambda: lake.table.append(host="local"), lambda: lake.table.status(), lambda: lake.table.publish()
    )


@pytest.mark.long
def test_newest_ledger_entry_that_is_merged_alone(lake: Lake) -> None:
    """The next batch takes its number. Partitions that merged the lost one do not count the new one as merged."""
    land(lake, 3, "ac")
    lake.table.append(host="local")
    lake.table.dedupe()
    lose_head(lake, lake.table.objects.ledger)
    (lake.root / "landing/3.jsonl").unlink()
    land(lake, 4, "ad")
    lake.table.append(host="local")
    failed = [r for r in lake.table.dedupe() if r.status == "failed"]
    assert {r.partition for r in failed} == {f"d={day}" for day in DAYS}
    with pytest.raises(DamagedTableError) as met:
        lake.table.publish()
    assert met.value.code == "missing-version"
    assert seen(lake) == {("a", 2), ("b", 2)}
    lake.table.reprocess(source="landing", host="local")
    lake.run()
    assert seen(lake) == {("a", 4), ("b", 2), ("d", 4)}
    land(lake, 3, "ac")
    lake.run()
    assert seen(lake) == {("a", 4), ("b", 2), ("c", 3), ("d", 4)}
    assert all(p.balanced for p in lake.table.reconcile(deep=True).proof)


@pytest.mark.long
def test_partitions_that_the_next_batches_do_not_touch(lake: Lake) -> None:
    """They merged the lost entry too, and are met when something is merged into them again, however late."""
    land(lake, 3, "c")
    lake.table.append(host="local")
    lake.table.dedupe()
    lose_head(lake, lake.table.objects.ledger)
    (lake.root / "landing/3.jsonl").unlink()
    lake.land("4.jsonl", [row("d", 0, 4)])
    lake.table.append(host="local")
    [failed] = [r for r in lake.table.dedupe() if r.status == "failed"]
    assert failed.partition == f"d={DAYS[0]}"
    with pytest.raises(DamagedTableError) as met:
        lake.table.to_arrow("latest").read_all()
    assert met.value.partition == f"d={DAYS[0]}"
    lake.table.reprocess(lambda partition: partition == f"d={DAYS[0]}", source="landing", host="local")
    lake.run()
    lake.land("5.jsonl", [row("e", 0, 5)])
    lake.run()
    lake.land("6.jsonl", [row("f", 1, 6)])
    lake.table.append(host="local")
    [failed] = [r for r in lake.table.dedupe() if r.status == "failed"]
    assert failed.partition == f"d={DAYS[1]}"
    lake.table.reprocess(lambda partition: partition == f"d={DAYS[1]}", source="landing", host="local")
    lake.run()
    assert {k for k, _ in seen(lake)} == {"a", "b", "d", "e", "f"}
    assert all(p.balanced for p in lake.table.reconcile(deep=True).proof)


@pytest.mark.long
def test_newest_ledger_entry_whose_number_nobody_took(lake: Lake) -> None:
    """The advice is to append first, which takes its landing files again."""
    land(lake, 3, "ac")
    lake.table.append(host="local")
    lake.table.dedupe()
    lose_head(lake, lake.table.objects.ledger)
    lake.table.append(host="local")
    assert {r.status for r in lake.table.dedupe()} == {"failed"}
    lake.table.reprocess(source="landing", host="local")
    lake.finish_and_check()
    assert seen(lake) == {("a", 3), ("b", 2), ("c", 3)}


def test_newest_spec(lake: Lake) -> None:
    """Without it the next batch would make another one with its number."""
    lake.table.rename_column("v", "value")
    path = lose_head(lake, lake.table.objects.specs)
    land(lake, 3, "ac")
    refused(lake, path, lambda: lake.table.append(host="local"), lambda: lake.table.run(host="local"))


def test_newest_manifest(lake: Lake) -> None:
    path = lose_head(lake, lake.table.objects.partition(DAMAGED))
    refused(lake, path, lambda: lake.table.view().files().__next__(), lambda: list(lake.table.to_arrow()))


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("policy", ["hold", "skip"])
@pytest.mark.parametrize("touched", [True, False], ids=["touched", "untouched"])
def test_no_snapshot_is_published_on_a_missing_manifest(folder: Path, policy: str, touched: bool) -> None:
    """Also if the batch does not touch its partition. With `skip` the others are shown, and the command fails all the same."""
    lake = Lake(folder, keep_snapshots=1, on_failed_partition=policy)
    land(lake, 1, "ab")
    lake.run()
    lose_head(lake, lake.table.objects.partition(DAMAGED))
    [problem] = [f for f in lake.table.doctor() if f.check == "manifests"]
    assert (problem.level, DAMAGED in problem.found) == ("problem", True)
    assert problem.next is not None
    assert f"lakeupsert reprocess --partition {DAMAGED} --source landing" in problem.next

    lake.land("2.jsonl", [row("c", day, 2) for day in ((0, 1) if touched else (1,))])
    for attempt in ("a batch", "nothing new"):
        ran = lake.table.run(host="local")
        assert set(ran.publish.failed) == {DAMAGED}, attempt
        assert f"--partition {DAMAGED}" in ran.publish.failed[DAMAGED]
        assert ran.publish.batch == (2 if policy == "skip" else 1)
        lake.reopen()
    if not touched:
        assert set(lake.table.status().failed) == ({DAMAGED} if policy == "hold" else set())

    lake.table.reprocess(lambda partition: partition == DAMAGED, source="landing", host="local")
    lake.run()
    lake.run()
    assert [f.level for f in lake.table.doctor() if f.check == "manifests"] == ["ok"]
    assert all(p.balanced for p in lake.table.reconcile(deep=True).proof)
    assert seen(lake) == {("a", 1), ("b", 1), ("c", 2)}


def test_manifest_of_an_older_snapshot_is_missed_by_doctor(lake: Lake) -> None:
    """Readers of the newest snapshot do not need it, so nights go on."""
    tagged = lake.table.snapshots()[-1].body.partitions[DAMAGED]
    (lake.root / "processed" / lake.table.objects.partition(DAMAGED).name(tagged.version)).unlink()
    lake.reopen()
    assert [f.level for f in lake.table.doctor() if f.check == "manifests"] == ["problem"]
    land(lake, 3, "c")
    assert not lake.table.run(host="local").publish.failed


def test_the_check_of_manifests_takes_one_list(folder: Path) -> None:
    lake = Lake(folder)
    lists = []
    for night, days in ((1, 10), (2, 1), (3, 1)):
        lake.land(f"{night}.jsonl", [row("a", day, night) for day in range(days)])
        lake.run()
        before = lake.table.requests["list"]
        lake.table.publish()
        lists.append(lake.table.requests["list"] - before)
    assert lists[0] == lists[1] == lists[2] <= 4


def test_newest_manifest_that_no_snapshot_shows(lake: Lake) -> None:
    """Nobody needs it: its batches are merged again."""
    land(lake, 3, "ac")
    lake.table.append(host="local")
    lake.table.dedupe()
    lose_head(lake, lake.table.objects.partition(DAMAGED))
    lake.finish_and_check()
    assert seen(lake) == {("a", 3), ("b", 2), ("c", 3)}


def test_older_snapshot_that_is_gone_is_told_from_one_that_has_expired(lake: Lake) -> None:
    numbers = lake.table.objects.snapshots
    tagged = lake.table.tags()["audit"]
    (lake.root / "processed" / numbers.name(tagged)).unlink()
    lake.reopen()
    with pytest.raises(DamagedTableError) as raised:
        lake.table.view(tagged)
    assert raised.value.code == "missing-version"
    assert numbers.name(tagged) in raised.value.message
    assert [r["k"] for r in lake.rows()] == ["a", "b", "a", "b"]
