"""`fsck`: whole tables have no finding, damage has one. `fault/test_damage.py` asks it about every object of other tables."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.errors import TryAgainError
from lakeupsert.operations import needed
from lakeupsert.operations.reprocess import ReprocessOptions, reprocess
from lakeupsert.storage import LocalStore
from lakeupsert.table import metadata
from tests.harness.faults import Fault
from tests.harness.lake import Lake, row, split_tiny_files
from tests.integration.test_reconcile import double, tamper

DAY = "d=2020-01-01"


def made(root: Path, **settings: Any) -> Lake:
    """Two nights with updates, deletes and a refused row, and a batch that is not merged."""
    lake = Lake(root, **settings)
    for night in (1, 2):
        rows = [row(f"{n:04d}", n % 2, night, n, op="D" if n % 9 == night else None) for n in range(0, 400, night)]
        bad = [{**row("bad", 0, night), "k": None}]
        lake.land(f"{night}.jsonl", rows, refused=bad)
        lake.run()
    lake.land("3.jsonl", [row("0001", 1, 3, -1)])
    lake.table.append(host="local")
    lake.reopen()
    return lake


def change_some(lake: Lake) -> None:
    lake.run()
    lake.change("c1", {"v": "v + 1"}, "v > 300", lambda one: {**one, "v": one["v"] + 1} if one["v"] > 300 else None)


def found(lake: Lake, *, deep: bool = True) -> list[tuple[str, str]]:
    """Who needs the damaged objects, and the codes of the errors."""
    lake.reopen()
    return [(one.needed_by, one.error.code) for one in lake.table.fsck(deep=deep).findings]


def edit(lake: Lake, change: Callable[[Any], None], partition: str = DAY) -> None:
    """Change the newest manifest; its digest is right again."""
    path = min((lake.root / "processed/_lakeupsert/partitions" / partition).glob("v*.json"))
    document = json.loads(path.read_bytes())
    change(document["body"])
    path.write_bytes(metadata.encode({name: value for name, value in document.items() if name != "digest"}))


WHOLE: dict[str, dict[str, Any]] = {
    "rewrite": {"strategy": "rewrite"},
    "delta": {"strategy": "delta"},
    "history": {"history": True, "bucket": "1500B"},
    "columns": {"mode": "columns"},
    "key index": {"key_scope": "table"},
    "versions": {"versions": True, "partition_by": ()},
    "forgetting": {"tombstone_retention": "0s"},
}


@pytest.mark.few(len(WHOLE))
@pytest.mark.parametrize("kind", list(WHOLE))
def test_a_whole_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    split_tiny_files(monkeypatch)
    lake = made(tmp_path, **WHOLE[kind])
    if kind != "history":  # its versions have orders of their own
        change_some(lake)
    lake.run()
    lake.table.restore(1, dry=False)  # it is not merged yet
    lake.reopen()
    assert not lake.table.fsck(deep=True).findings
    lake.run()
    lake.table.vacuum(dry=False)
    lake.reopen()
    before = dict(lake.table.requests)
    checked = lake.table.fsck(deep=True)
    assert not checked.findings
    assert checked.snapshots
    assert checked.files
    assert checked.bytes
    writes = {call: lake.table.requests[call] - before.get(call, 0) for call in ("put", "create", "delete")}
    assert writes == {"put": 0, "create": 0, "delete": 0}


def test_two_rows_of_one_key(tmp_path: Path) -> None:
    lake = made(tmp_path)
    tamper(lake, DAY, double(3))
    assert found(lake, deep=False) == []
    assert found(lake) == [("snapshot 1", "damaged-data-file")]
    assert "reprocess" in lake.table.fsck(deep=True).findings[0].error.next


def test_rows_that_are_not_there(tmp_path: Path) -> None:
    lake = made(tmp_path)

    def change(body: Any) -> None:
        body["buckets"][0]["base"][0]["rows"] += 1

    edit(lake, change)
    assert found(lake) == [("snapshot 1", "damaged-data-file")]


def test_buckets_whose_files_were_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split_tiny_files(monkeypatch)
    lake = made(tmp_path, bucket="1500B")

    def change(body: Any) -> None:
        one, other = body["buckets"][:2]
        one["base"], other["base"] = other["base"], one["base"]

    edit(lake, change)
    assert {code for _, code in found(lake)} == {"damaged-data-file"}


def test_a_version_that_took_the_number_of_a_lost_one(tmp_path: Path) -> None:
    lake = made(tmp_path)

    def change(body: Any) -> None:
        body["merged"] -= 1

    edit(lake, change)
    assert found(lake, deep=False) == [("snapshot 1", "missing-version")]


def test_history_that_is_older_than_its_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split_tiny_files(monkeypatch)
    lake = Lake(tmp_path, history=True, bucket="1500B")
    for night, rows in enumerate((range(20), range(20), range(20, 900)), 1):
        lake.land(f"{night}.jsonl", [row(f"{n:04d}", 0, night, n) for n in rows])
        lake.run()
    [head] = lake.table.objects.heads([DAY]).values()
    assert any(bucket.bits and bucket.history for bucket in head.body.buckets)
    assert found(lake) == []


def test_the_newest_snapshot_is_lost(tmp_path: Path) -> None:
    lake = made(tmp_path)
    min((lake.root / "processed/_lakeupsert/snapshots").glob("v*.json")).unlink()
    assert [code for _, code in found(lake, deep=False)] == ["missing-version"]


def test_an_older_snapshot_is_lost(tmp_path: Path) -> None:
    lake = made(tmp_path)
    max((lake.root / "processed/_lakeupsert/snapshots").glob("v*.json")).unlink()
    lake.reopen()
    [finding] = lake.table.fsck().findings
    assert (finding.needed_by, finding.error.code) == ("snapshot 0", "missing-version")
    assert "or leave it" in finding.error.next


def test_an_unfinished_reprocess_lost_its_packs(tmp_path: Path) -> None:
    lake = made(tmp_path)
    before = {*(tmp_path / "processed/_lakeupsert/data").iterdir()}
    plan = reprocess(lake.opened, ReprocessOptions(lambda name: name == DAY, source="landing", host="local"))
    assert found(lake) == []
    for path in {*(tmp_path / "processed/_lakeupsert/data").iterdir()} - before:
        path.unlink()
    assert {*found(lake)} == {("a reprocess", "damaged-data-file")}
    (tmp_path / "processed" / str(plan.work)).write_bytes(b"{")
    assert found(lake) == [("a reprocess", "damaged-object")]


def test_each_file_is_read_once(tmp_path: Path) -> None:
    lake = made(tmp_path, strategy="delta")
    lake.points.arm(-1, Fault.KILL_AFTER)
    lake.table.fsck(deep=True)
    files = [call for call in lake.points.seen if ".parquet" in call]
    lake.points.disarm()
    assert files
    assert len(files) == len({*files})


def test_a_replayed_quarantine_file_is_needed(tmp_path: Path) -> None:
    """A restore to before the replay brings it back."""
    lake = made(tmp_path)
    lake.mend(lambda one: one["l"] is not None, schema={**lake.settings.schema, "l": "bigint"})
    for path in (lake.root / "processed/_lakeupsert/quarantine").iterdir():
        path.unlink()
    assert [who for who, _ in found(lake, deep=False)] == ["`quarantine`", "`quarantine`"]


@pytest.mark.few(2)
@pytest.mark.parametrize("folder", ["statements", "keys"])
def test_a_byte_of_a_file_that_is_no_data_file(tmp_path: Path, folder: str) -> None:
    lake = made(tmp_path, key_scope="table")
    change_some(lake)
    path = max((lake.root / "processed/_lakeupsert" / folder).iterdir(), key=lambda one: one.stat().st_size)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    assert {code for _, code in found(lake)} == {"damaged-data-file"}


def test_rows_of_a_batch_that_waits(tmp_path: Path) -> None:
    lake = made(tmp_path)
    pack = max((lake.root / "processed/_lakeupsert/data").glob("*.pack"), key=lambda path: path.stat().st_mtime_ns)
    pack.unlink()
    assert found(lake, deep=False) == [("the merge of batch 3", "damaged-data-file")]


def test_an_object_that_was_created_after_the_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake, listed = made(tmp_path), LocalStore.list

    def old(store: LocalStore, prefix: str, **options: Any) -> Any:
        return (one for one in listed(store, prefix, **options) if prefix or not one.name.endswith(".parquet"))

    monkeypatch.setattr(LocalStore, "list", old)
    assert found(lake) == []


def test_a_vacuum_that_may_be_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have deleted what is missing since `fsck` began."""
    lake = made(tmp_path, keep_snapshots=1, superseded_retention="0s")
    lake.run()  # and vacuums
    Path(lake.table.files()[0].path).unlink()
    with pytest.raises(TryAgainError) as caught:
        found(lake)
    assert caught.value.code == "vacuumed-meanwhile"
    monkeypatch.setattr(needed, "VACUUM_SECONDS", 0)
    assert [code for _, code in found(lake)] == ["damaged-data-file"]


def test_the_command(tmp_path: Path) -> None:
    lake = made(tmp_path)
    config = ["--config", str(lake.configure())]
    sound = CliRunner().invoke(main, ["fsck", *config, "--json"])
    assert sound.exit_code == 0
    assert json.loads(sound.stdout)["result"]["findings"] == []
    assert CliRunner().invoke(main, ["fsck", *config, "--host", "spark"]).exit_code == 2  # it would have no effect
    files = [*(lake.root / "processed" / DAY).glob("base-*")]
    for path in files:
        path.write_bytes(path.read_bytes()[:-1])
    damaged = CliRunner().invoke(main, ["fsck", *config, "--json"])
    answer = json.loads(damaged.stdout)
    assert (damaged.exit_code, answer["error"]["code"], answer["error"]["partition"]) == (1, "objects-damaged", DAY)
    findings = answer["result"]["findings"]
    assert [one["needed_by"] for one in findings] == ["snapshot 1", "snapshot 0"][: len(findings)]
    assert all("reprocess" in one["next"] for one in findings)
    assert len(findings) == len(files)
