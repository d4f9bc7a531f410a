"""`rebuild`: a table of what is left of one whose metadata is lost. It equals the model, or a warning says what may not."""

import json
import shutil
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError, DamagedTableError, LakeupsertError
from lakeupsert.operations.rebuild.rebuild import RebuildResult
from lakeupsert.pipeline import strategy
from tests.harness.faults import Fault
from tests.harness.lake import Lake, row
from tests.integration.test_fsck import DAY
from tests.integration.test_groups import KEPT, Leader, grouped

KINDS: dict[str, dict[str, Any]] = {
    "rewrite": {"strategy": "rewrite"},
    "delta": {"strategy": "delta"},
    "history": {"history": True},
    "columns": {"mode": "columns"},
    "key index": {"key_scope": "table"},
    "versions": {"versions": True},
    "whole table": {"partition_by": ()},
}
CHAINS = ("spec", "ledger", "partitions", "snapshots")


def made(root: Path, **settings: Any) -> Lake:
    """Two nights with updates, deletes, a late record and a refused row, and a batch that is not merged."""
    lake = Lake(root, **settings)
    for night in (1, 2):
        rows = [row(f"{n:04d}", n % 2, night, n, op="D" if n % 9 == night else None) for n in range(0, 40, night)]
        bad = [{**row("bad", 0, night), "k": None}]
        lake.land(f"{night}.jsonl", [*rows, row("0004", 0, 0, -7)], refused=bad)
        lake.run()
    lake.land("3.jsonl", [row("0001", 1, 3, -1), row("0002", 0, 3, op="D")])
    lake.table.append(host="local")
    lake.reopen()
    return lake


def rows_after(lake: Lake) -> list[dict[str, Any]]:
    """The rows once all batches are merged, in a copy."""
    other = lake.copy(lake.root.with_name("after"))
    other.run()
    rows = other.rows()
    other.table.close()
    return rows


def lose(lake: Lake, *folders: str) -> Path:
    """Move the table elsewhere without these folders of its metadata. Returns the address."""
    lake.table.close()
    lost = lake.root / "lost"
    shutil.move(lake.root / "processed", lost)
    for folder in folders:
        shutil.rmtree(lost / "_lakeupsert" / folder)
    return lost


def rebuilt(lake: Lake, lost: Path) -> RebuildResult:
    lake.reopen()
    before = {path: path.stat().st_mtime_ns for path in lost.rglob("*")}
    found = lake.table.rebuild(str(lost))
    assert {path: path.stat().st_mtime_ns for path in lost.rglob("*")} == before
    check(lake)
    return found


def check(lake: Lake) -> None:
    lake.reopen()
    assert not lake.table.fsck(deep=True).findings
    assert not [one for one in lake.table.reconcile().proof if not one.balanced]


def keys(rows: Iterable[dict[str, Any]]) -> set[tuple[str, int]]:
    return {(one["k"], one["l"]) for one in rows}


def warns(found: RebuildResult, *texts: str) -> bool:
    """Whether one warning has all of these texts."""
    return any(all(text in warning for text in texts) for warning in found.warnings)


def refusal(lake: Lake, lost: Path) -> LakeupsertError:
    lake.reopen()
    with pytest.raises(LakeupsertError) as caught:
        lake.table.rebuild(str(lost))
    return caught.value


@pytest.mark.few(2 * len(KINDS))
@pytest.mark.parametrize("lost", [(), ("spec", "snapshots")], ids=["nothing", "spec and snapshots"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_each_manifest_and_entry_reads(tmp_path: Path, kind: str, lost: tuple[str, ...]) -> None:
    """Nothing is guessed: all acknowledged rows are there, and no landing file counts as new."""
    lake = made(tmp_path / "lake", **KINDS[kind])
    after = rows_after(lake)
    found = rebuilt(lake, lose(lake, *lost))
    assert lake.rows() == after
    assert (found.guessed, found.waiting, found.lost_entries, found.taken) == ({}, (), 0, 3)
    lake.run()
    assert len(lake.entries()) == 1
    lake.land("4.jsonl", [row("0002", 0, 2, 5), row("0003", 1, 9, 5), row("0011", 1, 1, 5)])
    lake.run()
    assert ("0002", 0) not in keys(lake.rows())  # its tombstone is there: the late record loses
    assert all(one.balanced for one in lake.table.reconcile(deep=True).proof)
    lake.table.reprocess(source="stored", host="local")
    check(lake)


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", list(KINDS))
def test_only_data_files_are_left(tmp_path: Path, kind: str) -> None:
    """Deleted keys are back; a warning has their number, or says that nobody knows it. A run takes the landing files again."""
    lake = made(tmp_path / "lake", **KINDS[kind])
    before, after = lake.rows(), rows_after(lake)
    found = rebuilt(lake, lose(lake, *CHAINS))
    rows, doubtful = lake.rows(), sum(one.doubtful for one in found.guessed.values())
    assert [one for one in rows if (one["k"], one["l"]) in keys(before)] == before
    back = keys(rows) - keys(before)
    assert back
    assert len(back) == doubtful or (kind == "delta" and doubtful == 0)
    assert any(f"{doubtful} rows are only in files" in text for text in found.warnings) == bool(doubtful)
    assert any("delete was only in a lost manifest" in text for text in found.warnings)
    assert any("the ledger is lost" in text for text in found.warnings)
    lake.run()
    assert lake.rows() == after
    check(lake)


def newest(lost: Path, folder: str) -> Path:
    return min((lost / "_lakeupsert" / folder).glob("v*.json"))


def test_one_partition_lost_its_newest_manifest(tmp_path: Path) -> None:
    """Its older one looks like the newest. A file that was begun behind it shows that it is not."""
    lake = made(tmp_path / "lake")
    before, after = keys(lake.rows()), rows_after(lake)
    lost = lose(lake, "snapshots")
    newest(lost, f"partitions/{DAY}").unlink()
    found = rebuilt(lake, lost)
    assert [*found.guessed] == [DAY]
    assert found.waiting == (1, 2, 3)  # each touches that partition
    back = keys(one for one in lake.rows() if one["d"] == date(2020, 1, 1)) - before
    assert len(back) == found.guessed[DAY].doubtful > 0
    lake.run()
    assert lake.rows() == after


def test_it_says_that_keys_were_erased(tmp_path: Path) -> None:
    lake = made(tmp_path)
    lake.run()
    listed = tmp_path / "keys.csv"
    listed.write_text("k,l\n0001,0\n")
    lake.table.erase(str(listed), "asked", dry=False)
    lost = lose(lake)
    newest(lost, "partitions/d=2020-01-01").unlink()
    assert [warning for warning in rebuilt(lake, lost).warnings if "erase" in warning]


def test_a_snapshot_shows_a_lost_manifest(tmp_path: Path) -> None:
    lake = made(tmp_path / "lake", strategy="delta")
    lost = lose(lake)
    for path in (lost / f"_lakeupsert/partitions/{DAY}").iterdir():
        path.unlink()
    found = rebuilt(lake, lost)
    assert "which snapshot 1 shows" in found.guessed[DAY].why


def test_a_ledger_entry_is_lost(tmp_path: Path) -> None:
    lake = made(tmp_path / "lake")
    after = rows_after(lake)
    lost = lose(lake)
    sorted((lost / "_lakeupsert/ledger").iterdir())[2].unlink()  # of batch 1
    found = rebuilt(lake, lost)
    assert (found.lost_entries, found.taken) == (1, 2)
    assert lake.rows() == after
    lake.run()
    assert lake.rows() == after


def test_a_merge_that_broke_off_left_some_of_its_rows(tmp_path: Path) -> None:
    """They are the newest, and the rows that it did not come to are not lost for that."""
    lake = made(tmp_path / "lake", partition_by=())
    before = keys(lake.rows()) & keys(lake.rows(0))
    lost = lose(lake, *CHAINS)
    path = max(lost.glob("base-*"), key=lambda one: one.stat().st_mtime_ns)
    rows = pq.ParquetFile(path).read()
    checksums = (b"lakeupsert.blocks", b"lakeupsert.crc")
    texts = {name: text for name, text in rows.schema.metadata.items() if name not in checksums}
    pq.write_table(rows.slice(0, rows.num_rows // 2).replace_schema_metadata(texts), path)
    found = rebuilt(lake, lost)
    assert before <= keys(lake.rows())
    assert found.guessed["whole-table"].doubtful >= rows.num_rows // 2 - 1


def test_rows_of_a_lost_file_are_named(tmp_path: Path) -> None:
    lake = made(tmp_path / "lake")
    lost = lose(lake, *CHAINS)
    for path in (lost / DAY).iterdir():
        path.write_bytes(path.read_bytes()[:-8])
    found = rebuilt(lake, lost)
    assert any("can't be read, and the rows in them are missing" in text for text in found.warnings)


def test_a_damaged_file_that_a_manifest_names(tmp_path: Path) -> None:
    lake = made(tmp_path / "lake")
    lost = lose(lake)
    path = max((lost / DAY).iterdir(), key=lambda one: one.stat().st_mtime_ns)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    error = refusal(lake, lost)
    assert isinstance(error, DamagedTableError)
    path.unlink()  # as it advises
    assert [*rebuilt(lake, lost).guessed] == [DAY]


def test_columns_that_only_the_spec_knows(tmp_path: Path) -> None:
    lake = made(tmp_path / "lake")
    lake.run()
    lake.table.rename_column("v", "w")
    lake.land("4.jsonl", [{**row("0002", 0, 4), "w": 1}])
    lake.run()
    lake.reopen()
    assert refusal(lake, lose(lake, "spec")).code == "columns-unknown"


def test_an_update_that_was_not_merged(tmp_path: Path) -> None:
    """It is merged, if the ledger reads. Otherwise nobody knows it."""
    lake = made(tmp_path / "lake")
    lake.run()
    lake.change("c1", {"v": "v + 1"}, "v > 20", lambda one: {**one, "v": one["v"] + 1} if one["v"] > 20 else None)
    lake.reopen()
    after = rows_after(lake)
    rebuilt(lake, lose(lake))
    assert lake.rows() == after


def test_a_full_extract_that_was_not_merged(tmp_path: Path) -> None:
    lake = made(tmp_path / "lake")
    lake.run()
    lake.land("4.jsonl", [row(f"{n:04d}", n % 2, 5, n) for n in range(0, 40, 3)])
    lake.table.append(host="local", full="table", may_shrink=True)
    lake.reopen()
    after = rows_after(lake)
    found = rebuilt(lake, lose(lake))
    assert found.waiting == ()
    assert lake.rows() == after


def test_a_restore_that_was_not_merged(tmp_path: Path) -> None:
    lake = made(tmp_path / "lake")
    lake.run()
    lake.table.restore(0, dry=False)
    found = rebuilt(lake, lose(lake))
    assert any("rows that it withdrew are in the table" in text for text in found.warnings)


def test_files_that_are_taken_again_undo_statements(tmp_path: Path) -> None:
    """They win ties, in partitions that are known, too. The warning names what they undo, and the files to move away."""
    lake = Lake(tmp_path)
    lake.land("1.jsonl", [row("x", 0, 1, 1), row("gone", 0, 1), row("z", 1, 1, 1)])
    lake.run()
    lake.change("c1", {"v": "v + 100"}, "k = 'x'", lambda one: {**one, "v": 101} if one["k"] == "x" else None)
    lake.change("c2", None, "k = 'gone'", lambda one: one if one["k"] == "gone" else None)
    lake.run()
    lake.table.rename_column("v", "w")
    lost = lose(lake)
    newest(lost, "partitions/d=2020-01-02").unlink()
    found = rebuilt(lake, lost)
    assert warns(found, "ties", "update set v = v + 100", "(batch 2)", "delete where k = 'gone'", "1.jsonl", "'v'")
    (tmp_path / "landing/1.jsonl").unlink()  # as it advises
    lake.run()
    assert [(one["k"], one["w"]) for one in lake.rows()] == [("x", 101), ("z", 1)]


def test_a_batch_without_its_entry_and_landing_file(tmp_path: Path) -> None:
    """The name of its pack shows that more was in the ledger."""
    lake = made(tmp_path / "lake")
    whole = lake.copy(tmp_path / "whole")
    assert not warns(rebuilt(whole, lose(whole)), "appended rows")
    lost = lose(lake)
    newest(lost, "ledger").unlink()
    (lake.root / "landing/3.jsonl").unlink()
    found = rebuilt(lake, lost)
    assert warns(found, "appended rows", "/appended-3-")
    assert not warns(found, "/appended-0-")


def test_files_of_another_program_have_no_order(tmp_path: Path) -> None:
    """No merge made them, so their rows' order decides, as in the lost table. Not their names."""
    lake = Lake(tmp_path)
    lake.lay("a.parquet", [row("x", 0, 9, 99)])
    lake.lay("b.parquet", [row("x", 0, 1, 11), row("y", 0, 1)])
    lake.table.adopt(host="local")
    found = rebuilt(lake, lose(lake, *CHAINS))
    assert [(one["k"], one["v"]) for one in lake.rows()] == [("x", 99), ("y", 0)]
    assert warns(found, "files that no merge made: the order of rows")


def test_a_withdrawn_batch_comes_back(tmp_path: Path) -> None:
    lake = made(tmp_path / "lake")
    lake.run()
    lake.table.restore(0, dry=False)
    lake.run()
    whole = lake.copy(tmp_path / "whole")
    assert not warns(rebuilt(whole, lose(whole)), "a restore withdrew rows of")  # the ledger knows the files
    assert warns(
        rebuilt(lake, lose(lake, "ledger")), "a restore withdrew rows of 2 partitions", "move their landing files"
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("named_by", ["ledger", "snapshots"])
def test_a_partition_of_which_nothing_is_left(tmp_path: Path, named_by: str) -> None:
    lake = Lake(tmp_path)
    lake.lay("a.parquet", [row("x", 0, 1), row("y", 1, 1)])
    lake.table.adopt(host="local")
    lost = lose(lake, "partitions", *({"ledger", "snapshots"} - {named_by}))
    shutil.rmtree(lost / "d=2020-01-02")
    assert warns(rebuilt(lake, lost), "1 partition ", "no file left: d=2020-01-02")


def test_a_full_extract_that_was_merged(tmp_path: Path) -> None:
    """Keys that it lacked can be back, and no tombstone says so."""
    lake = made(tmp_path / "lake")
    lake.land("4.jsonl", [row("0001", 1, 5)])
    lake.table.append(host="local", full="table", may_shrink=True)
    lake.run()
    whole = lake.copy(tmp_path / "whole")
    assert not warns(rebuilt(whole, lose(whole)), "--full")
    assert warns(rebuilt(lake, lose(lake, "partitions")), "batches 4 are full extracts", "can be back", "--full")


def test_nothing_is_lost_of_a_table_with_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot names the manifests, and older groups have named the files that these replaced."""
    monkeypatch.setattr(strategy, "SMALL_BYTES", 0)
    lake = Lake(tmp_path, **KEPT)
    leader = Leader(lake)
    leader.ingest(times=6)
    leader.table.close()
    assert grouped(lake)
    before = lake.rows()
    found = rebuilt(lake, lose(lake))
    assert (found.guessed, found.waiting, found.warnings) == ({}, (), ())
    assert lake.rows() == before


@pytest.mark.long
@pytest.mark.parametrize("lost", [(), CHAINS], ids=["nothing", "chains"])
@pytest.mark.parametrize("kind", ["key index", "whole table"])
def test_it_breaks_off_at_any_call(tmp_path: Path, kind: str, lost: tuple[str, ...]) -> None:
    lake = made(tmp_path / "lake", **KINDS[kind])
    lose(lake, *lost)
    whole = lake.copy(tmp_path / "whole")
    whole.table.rebuild(str(whole.root / "lost"))
    rows = whole.rows()

    def again(one: Lake) -> None:
        one.table.rebuild(str(one.root / "lost"))

    def repeat(one: Lake) -> None:
        try:
            again(one)
        except ConfigurationError as e:
            assert e.code == "already-a-table"
            one.reopen()
            one.table.publish()
        one.reopen()
        assert one.rows() == rows
        assert not one.table.fsck().findings

    assert lake.strike_every_call(Fault.KILL_AFTER, again, repeat) > 15


def test_the_command(tmp_path: Path) -> None:
    lake = made(tmp_path / "lake")
    lost = lose(lake, *CHAINS)
    config = ["--config", str(lake.configure()), "--json"]
    answer = json.loads(CliRunner().invoke(main, ["rebuild", str(lost), *config]).stdout)
    assert answer["result"]["guessed"][DAY]["doubtful"] > 0
    assert answer["warnings"]
    again = CliRunner().invoke(main, ["rebuild", str(lost), *config])
    assert (again.exit_code, json.loads(again.stdout)["error"]["code"]) == (2, "already-a-table")


def test_where_it_refuses(tmp_path: Path) -> None:
    lake = made(tmp_path / "lake")
    assert refusal(lake, lake.root / "processed").code == "already-a-table"
    lost = lose(lake)
    assert refusal(lake, lake.root / "landing").code == "nothing-to-rebuild"
    (lake.root / "processed").mkdir(exist_ok=True)
    (lake.root / "processed/readme.txt").write_text("mine")
    assert refusal(lake, lost).code == "already-a-table"


def test_it_refuses_a_folder_inside_the_other(tmp_path: Path) -> None:
    """The new files would be among the lost ones, or the other way around. Links are followed."""
    lake = made(tmp_path / "lake")
    lost = lose(lake)
    (tmp_path / "link").symlink_to(lost)
    for processed, address in ((tmp_path / "link/new", lost), (lost.parent, lost)):
        lake.settings = msgspec.structs.replace(lake.settings, processed=str(processed))
        assert refusal(lake, address).code == "already-a-table"
    assert not (lost / "new").exists()


def test_it_refuses_data_files_of_another_lost_table(tmp_path: Path) -> None:
    """The first vacuum of the new table would delete them."""
    lake, other = made(tmp_path / "lake"), made(tmp_path / "other")
    lost = lose(lake)
    files = lose(other, *CHAINS)
    shutil.copytree(files / DAY, lake.root / "processed" / DAY)
    assert refusal(lake, lost).code == "already-a-table"
