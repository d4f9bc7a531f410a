"""`backup` and `recover`: a backup is the table of one moment, and stays that, wherever a later one breaks off."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError, DamagedTableError, LakeupsertError, RefusedError, TryAgainError
from lakeupsert.sources.files import SourceFiles
from lakeupsert.table import ledger
from tests.harness.faults import Fault, Killed
from tests.harness.lake import Lake, row
from tests.integration.test_fsck import DAY, made

KINDS: dict[str, dict[str, Any]] = {
    "delta": {"strategy": "delta"},
    "history": {"history": True},
    "key index": {"key_scope": "table"},
    "columns": {"mode": "columns"},
    "delta log": {"publishers": ("delta",)},
}
VACUUMED: dict[str, Any] = {"keep_snapshots": 1, "superseded_retention": "0s"}


def lost(lake: Lake) -> Lake:
    shutil.rmtree(lake.root / "processed")
    lake.reopen()
    return lake


def recovered(lake: Lake, copy: Path, number: int | None = None) -> Lake:
    """The table is lost, and made from a copy."""
    lost(lake).table.recover(str(copy), number)
    lake.reopen()
    assert not lake.table.fsck(deep=True).findings
    return lake


def next_night(lake: Lake) -> list[dict[str, Any]]:
    """A night, and a vacuum. Returns the rows."""
    lake.land("4.jsonl", [row(f"{n:04d}", n % 2, 4, -n) for n in range(1, 300)])
    lake.run()
    lake.table.vacuum(dry=False)
    lake.reopen()
    return lake.rows()


@pytest.mark.few(len(KINDS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_table_continues_from_its_backup(tmp_path: Path, kind: str) -> None:
    lake = made(tmp_path / "lake", **KINDS[kind])
    lake.table.backup(str(tmp_path / "copy"))
    rows = next_night(lake)  # the copy has no part of it
    recovered(lake, tmp_path / "copy").check()
    lake.run()
    assert lake.rows() == rows
    lake.check()


def test_each_backup_copies_what_is_new_and_all_are_kept(tmp_path: Path) -> None:
    lake, copy = made(tmp_path / "lake", **VACUUMED), tmp_path / "copy"
    first = lake.table.backup(str(copy))
    rows = lake.rows()
    again = lake.table.backup(str(copy))
    assert (first.number, first.batch) == (1, len(lake.entries()) - 1)
    assert (first.kept, again.objects, again.bytes, again.number) == (0, 0, 0, 1)
    newest = next_night(lake)
    second = lake.table.backup(str(copy))
    assert 0 < second.objects < first.objects + second.objects // 2
    assert second.number == 2
    assert recovered(lake, copy, 1).rows() == rows
    assert recovered(lake, copy).rows() == newest


@pytest.mark.few(4)
@pytest.mark.parametrize("kept", ["24h", "0s"])
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.long)])
def test_somebody_writes_meanwhile(tmp_path: Path, stride: int, kept: str) -> None:
    """A night and a vacuum come whole before a call of the backup: it is the table as it was before or after them."""
    settings: dict[str, Any] = {"keep_snapshots": 1, "superseded_retention": kept}
    made(tmp_path / "first", **settings).table.close()
    number, struck, outrun = 0, True, 0
    while struck:
        lake = Lake(tmp_path / "first", **settings).copy(tmp_path / "both")
        other = Lake(lake.root, **settings)

        def write(other: Lake = other) -> None:
            other.land("4.jsonl", [row("0003", 1, 4, 3), row("0004", 0, 4, 4)])
            other.run()
            other.table.vacuum(dry=False)

        lake.points.amid(number, write)
        try:
            lake.table.backup(str(tmp_path / "copy"))
        except TryAgainError as e:
            assert e.code == "vacuumed-meanwhile"
            outrun += 1
            lake.table.backup(str(tmp_path / "copy"))
        struck, number = lake.points.struck is not None, number + stride
        lake.points.disarm()
        other.run()
        rows = other.rows()
        other.table.close()
        recovered(lake, tmp_path / "copy").run()
        assert lake.rows() == rows
        lake.table.close()
        shutil.rmtree(tmp_path / "both")
        shutil.rmtree(tmp_path / "copy")
    assert number > 30
    assert bool(outrun) == (kept == "0s")


@pytest.mark.long
def test_a_backup_breaks_off_at_any_call(tmp_path: Path) -> None:
    """The backup before it is whole, and the same command again makes the new one."""
    lake = made(tmp_path / "lake", **VACUUMED)
    lake.table.backup(str(lake.root / "copy"))
    before = lake.rows()
    after = next_night(lake)

    def again(one: Lake) -> None:
        one.table.backup(str(one.root / "copy"))

    def both(one: Lake) -> None:
        other = one.copy(tmp_path / "other")
        assert recovered(other, other.root / "copy", 1).rows() == before
        other.table.close()
        shutil.rmtree(other.root)
        again(one)
        assert recovered(one, one.root / "copy").rows() == after

    assert lake.strike_every_call(Fault.KILL_AFTER, again, both) > 30


@pytest.mark.long
def test_recover_breaks_off_at_any_call(tmp_path: Path) -> None:
    lake = made(tmp_path / "lake")
    lake.table.backup(str(lake.root / "copy"))
    rows = lake.rows()
    lost(lake)

    def again(one: Lake) -> None:
        one.table.recover(str(one.root / "copy"))

    def whole(one: Lake) -> None:
        try:
            again(one)
        except ConfigurationError as e:
            assert e.code == "already-a-table"
        one.reopen()
        assert not one.table.fsck(deep=True).findings
        assert one.rows() == rows
        one.finish_and_check()

    assert lake.strike_every_call(Fault.KILL_AFTER, again, whole) > 15


def refusal(lake: Lake, copy: Path) -> str:
    with pytest.raises(LakeupsertError) as caught:
        lake.table.backup(str(copy))
    return caught.value.code


def test_a_number_that_was_taken_again(tmp_path: Path) -> None:
    """A lost version and the one that repairs it have one name and one size, and are two objects."""
    lake, copy = made(tmp_path / "lake"), tmp_path / "copy"
    lake.table.backup(str(copy))
    rows = lake.rows()
    lake.rebuild_newest_version(DAY)
    assert refusal(lake, copy) == "not-a-backup"
    assert recovered(lake, copy).rows() == rows


@pytest.mark.few(4)
@pytest.mark.parametrize("there", ["a file", "another table", "a copy that was used", "a shorter file"])
def test_an_address_that_has_something_else(tmp_path: Path, there: str) -> None:
    lake, copy = made(tmp_path / "lake"), tmp_path / "copy"
    match there:
        case "a file":
            copy.mkdir()
            (copy / "x").write_text("x")
        case "another table":
            made(tmp_path / "other").table.backup(str(copy))
        case "a copy that was used":
            lake.table.backup(str(copy))
            with contextlib.closing(Table("t", replace(lake.settings, processed=str(copy)))) as used:
                used.run(host="local")
            lake.run()
        case _:
            lake.table.backup(str(copy))
            base = next(copy.glob("d=*/*.parquet"))
            base.write_bytes(base.read_bytes()[:-1])
    assert refusal(lake, copy) == "not-a-backup"


def test_a_damaged_backup_is_not_recovered(tmp_path: Path) -> None:
    lake, copy = made(tmp_path / "lake"), tmp_path / "copy"
    lake.table.backup(str(copy))
    base = next(copy.glob("d=*/*.parquet"))
    base.write_bytes(base.read_bytes()[:-1])
    with pytest.raises(DamagedTableError) as caught:
        lost(lake).table.recover(str(copy))
    assert base.name in caught.value.message
    assert not (lake.root / "processed/_lakeupsert/spec").exists()


def test_where_recover_refuses(tmp_path: Path) -> None:
    lake, copy = made(tmp_path / "lake"), tmp_path / "copy"
    found = []
    for address, number in ((tmp_path / "nothing", None), (copy, 2), (copy, None)):
        with pytest.raises(ConfigurationError) as caught:
            lake.table.recover(str(address), number)
        found.append(caught.value.code)
        lake.table.backup(str(copy))
    assert found == ["no-backup", "no-backup", "already-a-table"]
    lost(lake)
    (lake.root / "processed").mkdir()
    (lake.root / "processed/x").write_text("x")
    with pytest.raises(RefusedError) as refused:
        lake.table.recover(str(copy))
    assert refused.value.code == "not-a-backup"


def test_the_commands(tmp_path: Path) -> None:
    lake, copy = made(tmp_path / "lake"), str(tmp_path / "copy")
    config = ["--config", str(lake.configure()), "--json"]
    done = CliRunner().invoke(main, ["backup", "--output", copy, *config])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)["result"]
    assert (result["number"], result["batch"], result["kept"]) == (1, 3, 0)
    inside = CliRunner().invoke(main, ["backup", "--output", str(lake.root / "processed/copy"), *config])
    assert (inside.exit_code, json.loads(inside.stdout)["error"]["code"]) == (2, "overlapping-zones")
    lost(lake)
    made_again = CliRunner().invoke(main, ["recover", copy, *config])
    assert made_again.exit_code == 0, made_again.output
    assert json.loads(made_again.stdout)["result"]["objects"] == result["objects"]
    lake.reopen()
    lake.finish_and_check()


def continued(lake: Lake, name: str, night: int) -> None:
    lake.land(name, [row(f"b{night}", 0, night, night)])
    lake.run()


def test_a_table_that_went_on_from_an_older_backup_is_another_one(tmp_path: Path) -> None:
    """Its ledger parts from the copy's, also if it is shorter."""
    lake, copy = made(tmp_path / "lake", **VACUUMED), tmp_path / "copy"
    lake.table.backup(str(copy))
    for night in range(4, 8):
        continued(lake, f"{night}.jsonl", night)
    lake.table.vacuum(dry=False)
    lake.table.backup(str(copy))
    rows = lake.rows()
    recovered(lake, copy, 1)
    lake.land("x.jsonl", [row("x4", 0, 4, 4)])
    lake.table.append(host="local")  # an entry of that number and size is in the copy
    assert refusal(lake, copy) == "not-a-backup"
    assert recovered(lake, copy).rows() == rows


def test_the_same_address_after_a_loss_that_broke_a_backup_off(tmp_path: Path) -> None:
    lake, copy = made(tmp_path / "lake"), tmp_path / "copy"
    lake.table.backup(str(copy))
    lake.run()
    lake.table.backup(str(copy))
    newest = min((copy / "_lakeupsert/backups").iterdir())
    newest.unlink()  # as if it had broken off just before its entry
    recovered(lake, copy)
    continued(lake, "other.jsonl", 5)
    assert lake.table.backup(str(copy)).number == 2
    rows = lake.rows()
    assert recovered(lake, copy).rows() == rows


def test_an_entry_that_the_copy_has_lost_is_copied_again(tmp_path: Path) -> None:
    lake, copy = made(tmp_path / "lake"), tmp_path / "copy"
    lake.table.backup(str(copy))
    ledger = sorted((copy / "_lakeupsert/ledger").iterdir())
    ledger[1].unlink()
    assert lake.table.backup(str(copy)).objects == 1
    ledger[2].write_bytes(ledger[2].read_bytes()[:50])
    assert refusal(lake, copy) == "not-a-backup"


def test_unpublished_nights_are_counted_after_a_loss(tmp_path: Path) -> None:
    lake, copy = Lake(tmp_path / "lake"), tmp_path / "copy"
    continued(lake, "0.jsonl", 0)
    for night in (1, 2, 3):
        lake.land(f"{night}.jsonl", [row("a", 0, night, night), row(f"n{night}", 0, night)])
        lake.table.append(host="local")
        lake.table.dedupe()
    lake.table.backup(str(copy))
    lake.table.publish()
    changes = lake.table.snapshots()[0].body.changes
    recovered(lake, copy).table.publish()
    assert lake.table.snapshots()[0].body.changes == changes


def test_positions_of_sources_are_copied_without_leases(tmp_path: Path) -> None:
    lake, copy = made(tmp_path / "lake"), tmp_path / "copy"
    for name in ("shop", "leases"):
        files = SourceFiles(lake.opened, name, ".jsonl")
        assert files.leadership.lead()
        files.begin()
        files.land(b'{"k": "s"}\n', "5")
    lake.table.backup(str(copy))
    versions = copy.glob("_lakeupsert/sources/**/v*")
    assert {p.parent.relative_to(copy).as_posix() for p in versions} == {
        "_lakeupsert/sources/leases/files",
        "_lakeupsert/sources/shop/files",
    }


def test_recover_with_several_specs_breaks_off_among_them(tmp_path: Path) -> None:
    lake, copy = made(tmp_path / "lake"), tmp_path / "copy"
    lake.run()
    lake.table.rename_column("v", "w")
    lake.table.rename_column("w", "v")
    lake.table.backup(str(copy))
    lost(lake)
    lake.points.arm(0, Fault.KILL_AFTER, "create _lakeupsert/spec")
    with contextlib.suppress(Killed):
        lake.table.recover(str(copy))
    assert lake.points.struck is not None
    lake.points.disarm()
    lake.reopen()
    lake.table.recover(str(copy))
    lake.reopen()
    assert not lake.table.fsck(deep=True).findings


def test_the_backup_that_ends_last_is_not_the_newest(tmp_path: Path) -> None:
    """Its walk came before a night, and another backup has that night."""
    lake, copy = made(tmp_path / "lake"), tmp_path / "copy"
    lake.points.arm(-1, Fault.KILL_AFTER)
    lake.table.backup(str(tmp_path / "counted"))
    calls = len(lake.points.seen)
    lake.points.disarm()
    lake.reopen()
    other = Lake(lake.root)

    def write() -> None:
        continued(other, "4.jsonl", 4)
        other.table.backup(str(copy))

    lake.points.amid(calls - 1, write)
    found = lake.table.backup(str(copy))
    assert lake.points.struck is not None
    lake.points.disarm()
    rows = other.rows()
    other.table.close()
    assert (found.number, found.batch) == (1, 4)
    assert recovered(lake, copy).rows() == rows


def test_entries_that_the_last_backup_has_are_read_from_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "HEADERS_TOGETHER", (4,))
    lake, copy = Lake(tmp_path / "lake"), tmp_path / "copy"
    for night in range(9):
        lake.land(f"{night}.jsonl", [row("a", 0, night, night)])
        lake.table.append(host="local")

    def entries_read() -> int:
        lake.reopen()
        lake.points.arm(-1, Fault.KILL_AFTER)
        lake.table.backup(str(copy))
        calls = [
            call for call in lake.points.seen if call.startswith(("get _lakeupsert/ledger", "open _lakeupsert/ledger"))
        ]
        lake.points.disarm()
        return len(calls)

    assert entries_read() >= 20  # walked, and copied
    continued(lake, "9.jsonl", 9)
    assert entries_read() <= 8
    rows = lake.rows()
    assert recovered(lake, copy).rows() == rows
