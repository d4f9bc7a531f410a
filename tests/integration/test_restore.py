"""Going back by going on: what a restore withdraws, brings back, and how it ends a night that can't be merged."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError, LakeupsertError, RefusedError
from tests.harness.faults import Fault, Killed
from tests.harness.lake import Lake, made_once, row


@made_once
def lake(folder: Path) -> Lake:
    """Three published nights: a row, its deletion, and a late older record that the deletion keeps dead."""
    lake = Lake(folder)
    for night, rows in enumerate([[row("a", 0, 5, 1)], [row("a", 0, 7, 2, op="D")], [row("a", 0, 6, 3)]], 1):
        lake.land(f"{night}.jsonl", rows)
        lake.run()
    return lake


def values(lake: Lake, snapshot: Any = "published") -> list[int]:
    return [r["v"] for r in lake.rows(snapshot)]


def test_restore_goes_back_and_forth_and_keeps_the_deletion(lake: Lake) -> None:
    plan = lake.table.restore(0)
    assert (plan.withdrawn, plan.brought_back, plan.entry) == ({2: 1, 3: 1}, {}, None)
    assert len(lake.entries()) == 4, "dry: nothing is written"

    lake.table.restore(0, dry=False)
    lake.finish_and_check()
    assert values(lake) == [1]

    lake.table.restore(1, dry=False)
    lake.land("4.jsonl", [row("a", 0, 6, 4)])  # older than the deletion that has come back
    lake.finish_and_check()
    assert values(lake) == []
    assert [values(lake, n) for n in range(3)] == [[1], [], []], "time travel sees what was"


def test_a_restore_shows_the_counts_of_what_it_went_back_to(tmp_path: Path) -> None:
    """A partition that came later stays listed, as its chain goes on, and readers see nothing of it."""
    lake = Lake(tmp_path)
    for night in range(3):
        lake.land(f"{night}.jsonl", [row("a", day, night) for day in range(night + 1)])
        lake.run()
    lake.table.restore(0, dry=False)
    lake.run()
    lake.configure()
    options = ["--config", str(tmp_path / "lakeupsert.toml"), "--json"]
    told = json.loads(CliRunner().invoke(main, ["history", *options]).stdout)["result"]["snapshots"]
    assert [(s["number"], s["partitions"], s["rows"]) for s in told] == [(3, 1, 1), (2, 3, 3), (1, 2, 2), (0, 1, 1)]
    assert told[0]["bytes"] == told[-1]["bytes"]
    status = json.loads(CliRunner().invoke(main, ["status", *options]).stdout)["result"]
    assert (status["partitions"], status["rows"], status["dirty"]) == (1, 1, 0)
    lake.finish_and_check()


def test_withdrawn_files_come_again_only_when_they_are_asked_for(lake: Lake) -> None:
    lake.table.restore(0, dry=False)
    lake.run()
    assert lake.table.append(host="local") is None
    again = lake.table.append(host="local", again=True)
    assert again is not None
    assert [f.path for f in again.entry.files] == ["2.jsonl", "3.jsonl"]
    assert lake.table.append(host="local", again=True) is None
    lake.finish_and_check()
    assert values(lake) == []


def test_restore_ends_a_night_that_fails_under_hold(lake: Lake) -> None:
    lake.land("4.jsonl", [row("a", 0, 9, 4)])
    appended = lake.table.append(host="local")
    assert appended is not None
    pack = lake.root / "processed" / appended.entry.touched["d=2020-01-01"].files[0].name
    pack.write_bytes(b"damaged")
    assert lake.table.run(host="local").publish.failed
    snapshot = lake.table.snapshots()[0].number

    lake.table.restore(snapshot, dry=False)
    ran = lake.table.run(host="local")

    assert not ran.publish.failed
    assert ran.publish.batch == 5
    assert values(lake) == []


@pytest.mark.long
def test_restore_needs_nothing_of_a_manifest_that_is_gone(lake: Lake) -> None:
    """Beside a batch that comes before anybody merged it; one alone is still not merged behind what is left."""
    (lake.root / "processed" / lake.table.objects.partition("d=2020-01-01").name(2)).unlink()
    lake.land("4.jsonl", [row("b", 0, 1, 4)])
    lake.run()
    assert "version 2" in lake.table.publish().failed["d=2020-01-01"]
    lake.table.restore(1, dry=False)
    lake.land("5.jsonl", [row("a", 0, 9, 5)])
    lake.run()
    assert values(lake) == [5]
    assert lake.rows() == lake.expected(6)
    assert all(p.balanced for p in lake.table.reconcile().proof)


def test_restore_to_a_snapshot_that_lags_across_a_restore_is_refused(tmp_path: Path) -> None:
    """It would have to go to the version which that restore named, whose files nothing keeps."""
    lake = Lake(tmp_path, on_failed_partition="skip")
    for night in (1, 2):
        lake.land(f"{night}.jsonl", [row("a", 0, night, night), row("q", 1, night, night)])
        lake.run()
    lake.table.restore(0, dry=False)
    first = next((tmp_path / "processed/_lakeupsert/partitions/d=2020-01-01").glob("v*9.json"))
    shutil.move(first, tmp_path / "aside")
    for _ in range(5):  # as often as a message is received before it is given up
        lake.run()
    lagging = lake.table.snapshots()[0]
    assert lagging.body.lagging == ("d=2020-01-01",)
    lake.land("4.jsonl", [row("a", 0, 0, 4), row("q", 1, 9, 4)])
    lake.table.append(host="local")
    shutil.move(tmp_path / "aside", first)
    with pytest.raises(RefusedError) as refused:
        lake.table.restore(lagging.number, dry=False)
    assert refused.value.code == "snapshot-lags"
    lake.reopen()
    lake.run()
    assert lake.rows() == lake.expected(lake.entries()[-1][0])


def test_a_lost_race_begins_the_restore_again(lake: Lake) -> None:
    """A batch that came meanwhile is withdrawn too, in whatever partition it is."""
    beside = Lake(lake.root)
    beside.landed = lake.landed
    beside.land("4.jsonl", [row("z", 5, 1, 4)])
    lake.points.amid(0, lambda: beside.table.append(host="local"), "create")
    plan = lake.table.restore(0, dry=False)
    assert sorted(plan.withdrawn) == [2, 3, 4]
    lake.finish_and_check()
    assert values(lake) == [1]


def test_tags_name_snapshots_for_every_reader(lake: Lake) -> None:
    lake.table.tag("good", 0)
    lake.land("4.jsonl", [row("b", 0, 1, 4)])
    lake.run()
    assert values(lake, "good") == [1]
    assert lake.table.restore("good").withdrawn.keys() == {2, 3, 4}
    lake.table.tag("good", None)
    with pytest.raises(ConfigurationError) as unknown:
        lake.rows("good")
    assert unknown.value.code == "unknown-snapshot"
    with pytest.raises(ConfigurationError) as unfit:
        lake.table.tag("latest")
    assert unfit.value.code == "unfit-tag"


@pytest.mark.long
def test_the_command_is_dry_unless_it_is_told_yes(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lake.root)
    lake.configure()
    lake.table.close()
    run = CliRunner().invoke
    assert run(main, ["publish", "--tag", "end"]).exit_code == 0
    told = run(main, ["restore", "0"])
    assert (told.exit_code, "2 batches (2 to 3, 2 rows)" in told.stdout) == (0, True), told.output
    assert "--yes" in told.stdout
    assert values(lake) == []
    done = run(main, ["restore", "0", "--yes", "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert values(lake) == [1]
    assert "nothing to do" in run(main, ["restore", "0", "--yes"]).stdout
    assert "end" in run(main, ["history"]).stdout
    assert run(main, ["restore", "end", "--yes", "--workers", "1"]).exit_code == 0
    assert values(lake) == []


@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.KILL_BEFORE])
def test_a_restore_that_sent_no_message_is_finished_when_it_is_repeated(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    lake.points.arm(0, fault, "queue send")
    with pytest.raises((LakeupsertError, Killed)) as ended:
        lake.table.restore(0, dry=False)
    assert isinstance(ended.value, Killed) or ended.value.data_changed, "the ledger has it"
    lake.points.disarm()
    lake.reopen()
    assert values(lake) == []
    monkeypatch.chdir(lake.root)
    lake.configure()
    lake.table.close()
    run = CliRunner().invoke
    told = run(main, ["restore", "0"]).stdout
    assert ("nothing to do" in told, "readers still see 1 partition as before" in told) == (False, True), told
    assert values(lake) == []
    done = run(main, ["restore", "0", "--yes", "--workers", "1"])
    assert (done.exit_code, values(lake)) == (0, [1]), done.output
    assert len(lake.entries()) == 5, "the table was restored once"
    assert "nothing to do" in run(main, ["restore", "0", "--yes"]).stdout
    lake.finish_and_check()
