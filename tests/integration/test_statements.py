"""Update and delete: which rows, what they become, which record wins afterwards, and what happens beside a night."""

import json
import shutil
from collections.abc import Callable
from datetime import date, time
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError, LakeupsertError, RefusedError
from lakeupsert.operations.statement import rows as statement_rows
from lakeupsert.operations.statement.statement import StatementResult
from lakeupsert.table.ledger import Statement, check_entry
from tests.harness.faults import FAULTS, Fault
from tests.harness.lake import Lake, row


def gone(row: Any) -> Any:
    return {**row, "op": "D"}


def raised(where: Callable[[Any], bool], add: int = 10) -> Callable[[Any], Any]:
    return lambda row: {**row, "v": row["v"] + add} if where(row) else None


def removed(where: Callable[[Any], bool]) -> Callable[[Any], Any]:
    return lambda row: gone(row) if where(row) else None


def is_a(row: Any) -> bool:
    return bool(row["k"] == "a")


def values(lake: Lake, snapshot: int | str = "published") -> list[tuple[str, int, int]]:
    return [(r["k"], r["d"].day, r["v"]) for r in lake.rows(snapshot)]


def packs(lake: Lake) -> set[str]:
    return {p.name for p in (lake.root / "processed/_lakeupsert/statements").rglob("*.pack")}


def assert_proved(lake: Lake) -> None:
    checked = lake.table.reconcile(deep=True)
    assert not checked.unbalanced
    assert not checked.gone
    lake.check()


@pytest.fixture(params=["rewrite", "delta"])
def lake(tmp_path: Path, request: pytest.FixtureRequest) -> Lake:
    """Two days with the keys a and b, ordered by `ts`."""
    lake = Lake(tmp_path, strategy=request.param)
    lake.land("1.jsonl", [row(k, day, 2, v) for day in (0, 1) for v, k in enumerate("ab")])
    lake.run()
    return lake


def test_an_update_changes_the_rows_of_the_filter_alone(lake: Lake) -> None:
    done = lake.change(
        "raise", {"v": "v + 10"}, "k = 'a' and d = '2020-01-02'", raised(lambda r: is_a(r) and r["d"].day == 2)
    )
    assert values(lake) == [("a", 1, 0), ("b", 1, 1), ("a", 2, 10), ("b", 2, 1)]
    assert done.rows == {"d=2020-01-02": 1}
    assert done.append is not None
    assert done.append.entry.rows_read == done.append.entry.rows_appended == 1
    assert done.publish is not None
    assert done.publish.snapshot == 1
    changes = lake.table.snapshots()[0].body.changes
    assert (changes.updated, changes.inserted, changes.late) == (1, 0, 0)
    assert_proved(lake)


def test_a_delete_holds_against_older_records(lake: Lake) -> None:
    lake.change("forget", None, "k = 'a'", removed(is_a))
    assert values(lake) == [("b", 1, 1), ("b", 2, 1)]
    lake.land("2.jsonl", [row("a", 0, 1, 7)])
    lake.run()
    assert values(lake) == [("b", 1, 1), ("b", 2, 1)]
    assert_proved(lake)


@pytest.mark.few(2)
@pytest.mark.parametrize(("ts", "wins"), [(1, False), (2, True), (3, True)])
@pytest.mark.parametrize("deletes", [False, True])
def test_a_record_that_lands_later_wins_with_the_same_order_or_a_greater_one(
    lake: Lake, ts: int, wins: bool, deletes: bool
) -> None:
    change = removed(is_a) if deletes else raised(is_a)
    lake.change("change", None if deletes else {"v": "v + 10"}, "k = 'a'", change)
    lake.land("2.jsonl", [row("a", 0, ts, 5)])
    lake.run()
    assert (("a", 1, 5) in values(lake)) is wins
    assert_proved(lake)


def test_a_table_without_a_delete_rule_takes_deletes(tmp_path: Path) -> None:
    """Also while a batch that has no column for them is not merged yet."""
    schema = {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz", "v": "bigint"}
    for ties in ("arrival", "content"):
        lake = Lake(tmp_path / ties, delete=None, schema=schema, ties=ties)
        records = [{c: v for c, v in row(k, day, 1).items() if c != "op"} for day in (0, 1) for k in "ab"]
        lake.land("1.jsonl", records)
        lake.run()
        lake.land("2.jsonl", [{**records[2], "v": 5}])
        lake.table.append(host="local")
        assert lake.table.delete(where="k = 'a' and d = '2020-01-01'", dry=False).rows == {"d=2020-01-01": 1}
        assert values(lake) == [("b", 1, 0), ("a", 2, 5), ("b", 2, 0)]
        assert not lake.table.reconcile(deep=True).unbalanced
        spec = lake.table.objects.specs.head()
        assert spec is not None
        assert spec.body.statements


def test_a_stamped_row_gets_a_new_stamp(tmp_path: Path) -> None:
    lake = Lake(tmp_path, order_by=("record_timestamp",), schema={"k": "string", "l": "int", "d": "date"}, history=True)
    lake.land("1.jsonl", [{"k": "a", "l": 0, "d": "2020-01-01", "v": 1}, {"k": "b", "l": 0, "d": "2020-01-01", "v": 2}])  # type: ignore[dict-item]
    lake.run()
    before = lake.rows()
    done = lake.table.update({"v": "v * 2"}, where="k = 'a'", dry=False)
    after = lake.rows()
    assert [r["v"] for r in after] == [2, 2]
    assert after[0]["record_timestamp"] > before[0]["record_timestamp"]
    assert after[1] == before[1]
    assert done.append is not None
    lake.table.delete(where="k = 'b'", dry=False)
    history = lake.table.to_arrow(history=True).read_all().to_pylist()
    versions = [(r["k"], r["v"], r["valid_to"] is None) for r in history]
    assert versions == [("a", 2, True), ("a", 1, False), ("b", 2, False)]
    assert not lake.table.reconcile(deep=True).unbalanced
    lake.table.reprocess(source="landing", host="local")
    assert lake.rows() == after[:1]


@pytest.mark.long
def test_an_update_of_mode_columns_brings_what_it_sets(tmp_path: Path) -> None:
    """A late record still fills in what the update has not set, and no later one takes the update for its own."""
    lake = Lake(tmp_path, mode="columns", schema={**SCHEMA, "w": "bigint"})
    lake.land("1.jsonl", [{**row("a", 0, 1), "v": 1, "w": 1}])
    lake.land("2.jsonl", [{c: v for c, v in row("a", 0, 5, 5).items() if c != "op"}])
    lake.run()
    lake.table.update({"v": "v + w"}, where="k = 'a'", dry=False)
    assert [(r["v"], r["w"]) for r in lake.rows()] == [(6, 1)]
    late = {"k": "a", "l": 0, "d": "2020-01-01", "ts": "2020-01-01T00:00:03", "v": 9, "w": 9}
    (tmp_path / "landing/3.jsonl").write_text(json.dumps(late) + "\n")
    lake.run()
    assert [(r["v"], r["w"]) for r in lake.rows()] == [(6, 9)]
    for _ in range(2):
        checked = lake.table.reconcile(deep=True)
        assert not checked.unbalanced
        lake.table.reprocess(source="landing", host="local")
        assert [(r["v"], r["w"]) for r in lake.rows()] == [(6, 9)]
    lake.table.delete(where="w = 9", dry=False)
    (tmp_path / "landing/4.jsonl").write_text(json.dumps({**late, "v": 8}) + "\n")
    lake.run()
    assert lake.rows() == []
    assert not lake.table.reconcile(deep=True).unbalanced


SCHEMA = {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz", "v": "bigint", "op": "string"}


def test_an_update_of_a_group_has_the_order_of_the_group(tmp_path: Path) -> None:
    groups = '[tables.t.groups.shipping]\norder_by = ["shipped_at"]\ncolumns = ["carrier"]\n'
    table = opened(
        tmp_path, f'order_by = ["ordered_at"]\nmode = "columns"\n{TYPES}ordered_at = "bigint"\n{GROUPED}{groups}'
    )
    orders = "id,day,ordered_at,amount\n1,2020-01-01,10,100\n2,2020-01-01,10,200\n"
    night(
        table, tmp_path, {"1/orders.csv": orders, "1/shipping.csv": "id,day,shipped_at,carrier\n1,2020-01-01,5,DHL\n"}
    )
    table.update({"carrier": "lower(carrier)", "amount": "amount + 1"}, where="id = '1'", dry=False)
    late = {"2/shipping.csv": "id,day,shipped_at,carrier\n1,2020-01-01,4,UPS\n2,2020-01-01,4,UPS\n"}
    night(table, tmp_path, late)
    found = table.to_arrow().read_all().to_pylist()
    assert [(r["id"], r["amount"], r["carrier"]) for r in found] == [("1", 101, "dhl"), ("2", 200, "UPS")]
    night(table, tmp_path, {"3/shipping.csv": "id,day,shipped_at,carrier\n1,2020-01-01,5,TNT\n3,2020-01-01,5,TNT\n"})
    assert next(r["carrier"] for r in table.to_arrow().read_all().to_pylist()) == "TNT"
    assert not table.reconcile(deep=True).unbalanced
    with pytest.raises(RefusedError) as refused:
        table.update({"amount": "1"}, where="id = '3'", dry=False)
    assert refused.value.code == "unfit-new-value"
    with pytest.raises(ConfigurationError) as unsupported:
        table.delete(where="id = '3'")
    assert unsupported.value.code == "delete-of-groups"


def test_an_order_in_file_names_stays(tmp_path: Path) -> None:
    table = opened(tmp_path, "order_by = [\"sequence\"]\norder_in_name = '_(\\d+)'\n")
    night(table, tmp_path, {"a_5.csv": "id,day,price\n1,2020-01-01,10\n2,2020-01-01,20\n"})
    table.update({"price": "price + 7"}, where="id = '1'", dry=False)
    table.delete(where="id = '2'", dry=False)
    night(table, tmp_path, {"a_4.csv": "id,day,price\n1,2020-01-01,11\n2,2020-01-01,21\n"})
    for source in ("stored", "landing"):
        assert table.to_arrow(columns=["id", "price", "sequence"]).read_all().to_pylist() == [
            {"id": "1", "price": 17, "sequence": 5}
        ]
        assert not table.reconcile(deep=True).unbalanced
        table.reprocess(source=source, host="local")  # type: ignore[arg-type]


@pytest.mark.long
def test_keys_of_the_whole_table(tmp_path: Path) -> None:
    lake = Lake(tmp_path, key_scope="table")
    lake.land("1.jsonl", [row("a", 0, 2, 1), row("b", 1, 2, 2)])
    lake.run()
    lake.change("raise", {"v": "v + 10"}, "k is not null", raised(lambda r: True))
    lake.change("forget", None, "k = 'b'", removed(lambda r: r["k"] == "b"))
    lake.land("2.jsonl", [row("a", 1, 3, 5), row("b", 0, 1, 6)])  # one moves, the other is late wherever it comes
    lake.run()
    assert values(lake) == [("a", 2, 5)]
    lake.finish_and_check()
    assert not lake.table.reconcile(deep=True).unbalanced


# ---------------------------------------------------------------- once, and whole


@pytest.mark.long
def test_a_batch_id_counts_once(lake: Lake) -> None:
    first = lake.change("raise", {"v": "v + 10"}, "k = 'a'", raised(is_a))
    again = lake.change("raise", {"v": "v + 10"}, "k = 'a'", raised(is_a))
    assert (first.repeated, again.repeated) == (False, True)
    assert first.append is not None
    assert again.append is not None
    assert again.append.number == first.append.number
    assert again.rows == first.rows
    assert values(lake)[0] == ("a", 1, 10)
    for other in (
        lambda: lake.table.update({"v": "v + 11"}, where="k = 'a'", batch_id="raise"),
        lambda: lake.table.update({"v": "v + 10"}, where="k = 'b'", batch_id="raise"),
        lambda: lake.table.delete(where="k = 'a'", batch_id="raise"),
        lambda: lake.table.delete(where="k = 'a'", batch_id=lake.entries()[1][1].batch_id),
    ):
        with pytest.raises(ConfigurationError) as refused:
            other()
        assert refused.value.code == "batch-id-taken"
    lake.table.restore(0, dry=False)
    with pytest.raises(ConfigurationError) as refused:
        lake.table.update({"v": "v + 10"}, where="k = 'a'", batch_id="raise")
    assert refused.value.code == "batch-id-taken"
    lake.finish_and_check()
    lake.land("2.jsonl", [row("c", 0, 2)])
    with pytest.raises(ConfigurationError) as refused:
        lake.table.append(host="local", batch_id="raise")
    assert refused.value.code == "batch-id-taken"


@pytest.mark.long
def test_a_restore_withdraws_and_brings_back_a_statement(lake: Lake) -> None:
    lake.change("raise", {"v": "v + 10"}, "k = 'a'", raised(is_a))
    lake.change("forget", None, "k = 'b'", removed(lambda r: r["k"] == "b"))
    for snapshot, expected in ((0, [0, 1]), (1, [10, 1]), (2, [10])):
        lake.table.restore(snapshot, dry=False)
        lake.finish_and_check()
        assert [v for _, day, v in values(lake) if day == 1] == expected
        assert_proved(lake)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("key_scope", ["partition", pytest.param("table", marks=pytest.mark.long)])
def test_struck_at_every_call_it_is_done_once(tmp_path: Path, fault: Fault, key_scope: str) -> None:
    lake = Lake(tmp_path / "lake", key_scope=key_scope)
    lake.land("1.jsonl", [row(k, day, 2, 1) for k, day in (("a", 0), ("b", 1))])
    lake.run()

    def raise_all(struck: Lake) -> None:
        struck.change("raise", {"v": "v + 10"}, "k is not null", raised(lambda r: True))

    def finish(struck: Lake) -> None:
        raise_all(struck)
        struck.finish_and_check()
        assert values(struck) == [("a", 1, 11), ("b", 2, 11)]

    assert lake.strike_every_call(fault, raise_all, finish) > 10


def test_a_dry_call_writes_nothing(lake: Lake) -> None:
    before = {str(p): p.stat().st_mtime_ns for p in lake.root.rglob("*")}
    update = lake.table.update({"v": "v + 10"}, where="k = 'a'")
    assert update.rows == {"d=2020-01-01": 1, "d=2020-01-02": 1}
    assert update.before is not None
    assert update.after is not None
    assert (update.before["v"].to_pylist(), update.after["v"].to_pylist()) == ([0, 0], [10, 10])
    assert update.after.drop_columns("v").equals(update.before.drop_columns("v"))
    assert (update.append, update.publish) == (None, None)
    delete = lake.table.delete(where="k = 'a'")
    assert (delete.rows, delete.after) == (update.rows, None)
    assert {str(p): p.stat().st_mtime_ns for p in lake.root.rglob("*")} == before


def test_no_row_no_batch(lake: Lake) -> None:
    before = len(lake.entries())
    for done in (
        lake.table.update({"v": "v + 10"}, where="k = 'c'", dry=False),
        lake.table.delete(where="d = '1999-01-01'", dry=False),
    ):
        assert (done.rows, done.before, done.append) == ({}, None, None)
    assert len(lake.entries()) == before
    assert packs(lake) == set()


def test_many_rows_are_written_in_chunks(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_rows, "CHUNK_BYTES", 1)
    lake.land("2.jsonl", [row(f"{n:03d}", 0, 1, n) for n in range(50)])
    lake.run()
    lake.change("raise", {"v": "v + 10"}, "k is not null", raised(lambda r: True))
    assert len(packs(lake)) >= 2, "at least one for each partition"
    assert_proved(lake)


# ---------------------------------------------------------------- beside a night


def test_rows_with_a_batch_that_is_not_published_are_refused_or_read_with_it(lake: Lake) -> None:
    lake.land("2.jsonl", [row("a", 0, 3, 5)])
    lake.table.append(host="local")
    before = packs(lake), len(lake.entries())
    for dry in (True, False):
        with pytest.raises(RefusedError) as refused:
            lake.table.update({"v": "v + 10"}, where="k = 'a'", dry=dry)
        assert (refused.value.code, refused.value.partition) == ("unpublished-batch", "d=2020-01-01")
    assert (packs(lake), len(lake.entries())) == before
    elsewhere = lake.table.update({"v": "v + 10"}, where="k = 'a' and d = '2020-01-02'")
    assert elsewhere.warnings == ()
    [warning] = lake.table.delete(where="v = 5").warnings
    assert "d=2020-01-01" in warning
    lake.change("raise", {"v": "v + 10"}, "k = 'a'", raised(is_a), snapshot="latest")
    assert values(lake) == [("a", 1, 15), ("b", 1, 1), ("a", 2, 10), ("b", 2, 1)]
    assert_proved(lake)


class Beside:
    """Another process appends once, before a statement's ledger entry."""

    def __init__(self, lake: Lake, rows: list[Any], *, whole: bool = False) -> None:
        self._lake, self._whole = lake, whole
        lake.land("beside.jsonl", rows)
        lake.points.amid(0, self._append, "create _lakeupsert/ledger")

    def _append(self) -> None:
        beside = Lake(self._lake.root, **self._lake.given)
        beside.table.run(host="local") if self._whole else beside.table.append(host="local")
        beside.table.close()


def test_an_append_to_a_row_s_partition_is_never_overwritten(lake: Lake) -> None:
    """The ledger's race is lost, and the statement reads the rows again."""
    Beside(lake, [row("a", 0, 2, 5)])
    lake.change("raise", {"v": "v + 10"}, "k = 'a'", raised(is_a), snapshot="latest")
    assert values(lake) == [("a", 1, 15), ("b", 1, 1), ("a", 2, 10), ("b", 2, 1)]
    assert_proved(lake)
    assert len(packs(lake)) == 1, "what was written first is deleted"


def test_an_append_to_a_row_s_partition_refuses_what_readers_do_not_see(lake: Lake) -> None:
    Beside(lake, [row("a", 0, 2, 5)])
    with pytest.raises(RefusedError) as refused:
        lake.change("raise", {"v": "v + 10"}, "k = 'a'", raised(is_a))
    assert refused.value.code == "unpublished-batch"
    lake.finish_and_check()
    assert values(lake)[0] == ("a", 1, 5)
    assert packs(lake) == set()


def test_a_night_that_is_published_meanwhile_is_seen(lake: Lake) -> None:
    Beside(lake, [row("a", 0, 2, 5)], whole=True)
    lake.change("raise", {"v": "v + 10"}, "k = 'a'", raised(is_a))
    assert values(lake)[0] == ("a", 1, 15)
    assert_proved(lake)


def test_an_append_to_another_partition_does_not_matter(lake: Lake) -> None:
    lake.change(
        "first", {"v": "v + 0"}, "k = 'a' and d = '2020-01-01'", raised(lambda r: is_a(r) and r["d"].day == 1, 0)
    )
    Beside(lake, [row("a", 1, 2, 5)])
    where = "k = 'a' and d = '2020-01-01'"
    done = lake.change("raise", {"v": "v + 10"}, where, raised(lambda r: is_a(r) and r["d"].day == 1))
    assert done.append is not None
    assert done.append.number == done.statement.seen + 2, "behind the other one, with the rows that were read before it"
    assert values(lake) == [("a", 1, 10), ("b", 1, 1), ("a", 2, 5), ("b", 2, 1)]
    assert_proved(lake)


# ---------------------------------------------------------------- where its rows are


@pytest.mark.long
def test_vacuum_keeps_the_rows_of_statements_and_a_rebuild_finds_them(lake: Lake) -> None:
    lake.change("raise", {"v": "v + 10"}, "k = 'a'", raised(is_a))
    lake.change("forget", None, "k = 'b' and d = '2020-01-01'", removed(lambda r: r["k"] == "b" and r["d"].day == 1))
    lake.settings = msgspec.structs.replace(lake.settings, keep_snapshots=1, superseded_retention="0s")
    lake.reopen()
    lake.land("2.jsonl", [row("c", 0, 2, 7)])
    lake.run()
    kept = packs(lake)
    assert len(kept) == 2
    assert not list((lake.root / "processed/_lakeupsert/data").glob("appended-*")), "those of landing files are gone"
    shown = values(lake)
    assert shown == [("a", 1, 10), ("c", 1, 7), ("a", 2, 10), ("b", 2, 1)]
    assert_proved(lake)
    assert set(lake.table.reprocess(source="landing", host="local").plan.heads) == {"d=2020-01-01", "d=2020-01-02"}
    assert values(lake) == shown
    assert_proved(lake)
    lake.table.vacuum(dry=False)
    assert packs(lake) == kept


def test_a_pack_that_is_gone_is_named(lake: Lake) -> None:
    lake.change("raise", {"v": "v + 10"}, "d = '2020-01-01'", raised(lambda r: r["d"].day == 1))
    shutil.rmtree(lake.root / "processed/_lakeupsert/statements")
    with pytest.raises(RefusedError) as refused:
        lake.table.reprocess(source="landing", host="local")
    assert refused.value.code == "source-gone"
    checked = lake.table.reconcile(deep=True)
    assert [*checked.gone] == [2]
    assert checked.recomputed is not None
    assert [*checked.recomputed.partitions] == ["d=2020-01-02"]
    lake.check()


def test_explain_names_the_statement(lake: Lake) -> None:
    lake.change("raise", {"v": "v + 10"}, "k = 'a'", raised(is_a))
    explained = lake.table.explain({"k": "a", "l": 0}, "2020-01-01")
    [partition] = explained.partitions
    assert partition.versions[0].batch == 2
    assert partition.versions[0].file == "update set v = v + 10 where k = 'a'"


def test_a_statement_in_the_ledger_has_no_other_source(lake: Lake) -> None:
    lake.change("raise", {"v": "v + 10"}, "k = 'a'", raised(is_a))
    entries = dict(lake.entries())
    statement = entries[2].statement
    assert isinstance(statement, Statement)
    assert (statement.set, statement.where, statement.seen) == ({"v": "v + 10"}, "k = 'a'", 1)
    wrong: list[dict[str, Any]] = [{"files": entries[1].files}, {"kind": "restore"}, {"quarantined": {"bad_type": 1}}]
    for changed in wrong:
        with pytest.raises(LakeupsertError) as refused:
            check_entry(entries[1], msgspec.structs.replace(entries[2], **changed))
        assert refused.value.code == "broken-invariant"


# ---------------------------------------------------------------- which rows


def write_keys(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        names = list(rows[0])
        path.write_text("\n".join([",".join(names), *(",".join(str(r[n]) for n in names) for r in rows)]) + "\n")
    else:
        path.write_text("".join(json.dumps(r, default=str) + "\n" for r in rows))
    return str(path)


@pytest.mark.parametrize("name", ["keys.csv", "keys.jsonl", "keys.parquet"])
def test_a_list_of_keys(lake: Lake, name: str) -> None:
    listed = [{"k": "a", "l": 0}, {"k": "a", "l": 0}, {"k": "nobody", "l": 0}]
    keys = write_keys(lake.root / name, listed)
    done = lake.table.delete(keys=keys)
    assert done.rows == {"d=2020-01-01": 1, "d=2020-01-02": 1}
    assert (done.keys, done.unseen_keys, len(done.warnings)) == (2, 1, 1)
    assert lake.table.delete(keys=keys, where="d = '2020-01-02'").rows == {"d=2020-01-02": 1}
    in_partition = write_keys(lake.root / f"in-{name}", [{"d": "2020-01-02", "l": 0, "k": "a"}])
    lake.statements["forget"] = removed(lambda r: is_a(r) and r["d"].day == 2)
    first = lake.table.delete(keys=in_partition, dry=False, batch_id="forget")
    assert (first.rows, first.warnings) == ({"d=2020-01-02": 1}, ())
    assert values(lake) == [("a", 1, 0), ("b", 1, 1), ("b", 2, 1)]
    assert lake.table.delete(keys=in_partition, dry=False, batch_id="forget").repeated
    with pytest.raises(ConfigurationError) as refused:
        lake.table.delete(keys=keys, dry=False, batch_id="forget")
    assert refused.value.code == "batch-id-taken"
    assert_proved(lake)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("keys.csv", "k\na\n"),
        ("keys.csv", "k,l,v\na,0,1\n"),
        ("keys.csv", "k,l\na,zero\n"),
        ("keys.csv", "k,l\na,\n"),
        ("keys.csv", "k,l\n"),
        ("keys.jsonl", '{"k": "a", "l": 0}\n{"k": "a"\n'),
        ("keys.jsonl", '{"k": "a", "l": 0}\n{"k": "a"}\n'),
        ("keys.parquet", "no Parquet"),
        ("keys.txt", "k,l\na,0\n"),
        ("", ""),
    ],
)
def test_what_is_no_list_of_keys(lake: Lake, name: str, text: str) -> None:
    path = lake.root / (name or "nosuch.csv")
    if name:
        path.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        lake.table.delete(keys=path)
    assert refused.value.code == "unfit-key-list"
    assert str(path) in refused.value.message


def test_only_partitions_and_files_that_may_have_rows_are_read(tmp_path: Path) -> None:
    """Files of the others are gone, and nobody notices."""
    lake = Lake(tmp_path)
    lake.land("1.jsonl", [row(k, day, 2) for day, k in enumerate("abc")])
    lake.run()
    keys = write_keys(tmp_path / "keys.csv", [{"k": "b", "l": 0}])
    for day in (1, 3):
        for path in (tmp_path / f"processed/d=2020-01-{day:02d}").glob("*.parquet"):
            path.unlink()
    assert lake.table.update({"v": "1"}, where="d = '2020-01-02'").rows == {"d=2020-01-02": 1}
    assert lake.table.delete(where="k = 'b'").rows == {"d=2020-01-02": 1}
    assert lake.table.delete(keys=keys).rows == {"d=2020-01-02": 1}
    with pytest.raises(LakeupsertError):
        lake.table.delete(where="v = 0")


def test_adopted_rows_that_repeat_a_key_are_refused(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.lay("1.parquet", [row("a", 0, 1, 1), row("b", 0, 1, 1), row("a", 1, 1, 1)])
    lake.lay("2.parquet", [row("a", 0, 2, 2)])
    lake.table.adopt()
    for where in ("k = 'a' and d = '2020-01-01'", "v = 1 and k = 'a' and d = '2020-01-01'"):
        with pytest.raises(RefusedError) as refused:
            lake.table.delete(where=where)
        assert (refused.value.code, refused.value.partition) == ("repeated-keys", "d=2020-01-01")
    lake.change(
        "raise", {"v": "v + 10"}, "k = 'b' or d = '2020-01-02'", raised(lambda r: r["k"] == "b" or r["d"].day == 2)
    )
    assert values(lake) == [("a", 1, 2), ("b", 1, 11), ("a", 2, 11)]
    assert_proved(lake)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "values", "code"),
    [
        ({}, {"k": "'c'"}, "column-in-use"),
        ({}, {"K": "'c'"}, "column-in-use"),
        ({}, {"d": "d + 1"}, "column-in-use"),
        ({}, {"ts": "ts"}, "column-in-use"),
        ({}, {}, "nothing-to-set"),
        ({}, {"nosuch": "1"}, "unknown-column"),
        ({}, {"v": "(select 1)"}, "unfit-expression"),
        ({}, {"v": 1}, "unfit-expression"),
        ({}, "v = 1", "unfit-expression"),
        ({}, {"v": "v / 2"}, "unfit-new-value"),
        ({}, {"v": "'word'"}, "unfit-new-value"),
        ({"ties": "content"}, {"v": "1"}, "content-decides"),
        ({"history": True}, {"v": "1"}, "history-needs-order"),
        ({"history": True}, None, "history-needs-order"),
        ({"mode": "columns", "nulls": "keep"}, {"v": "null"}, "unfit-new-value"),
    ],
)
def test_refused_statement(tmp_path: Path, settings: Any, values: Any, code: str) -> None:
    lake = Lake(tmp_path, **settings)
    lake.land("1.jsonl", [row("a", 0, 2, 1)])
    lake.run()
    for dry in (True, False):
        with pytest.raises(LakeupsertError) as refused:
            change(lake.table, values, dry)
        assert refused.value.code == code
        assert refused.value.next
    assert len(lake.entries()) == 2
    assert packs(lake) == set()


def change(table: Table, values: dict[str, str] | None, dry: bool) -> StatementResult:
    if values is None:
        return table.delete(where="k = 'a'", dry=dry)
    return table.update(values, where="k = 'a'", dry=dry)


UNREADABLE: dict[pa.DataType, tuple[str, ...]] = {
    pa.date32(): ("date '2020-01-01' + 3000000", "date 'infinity'", "date '-infinity'", "date '0001-01-01' - 1"),
    pa.timestamp("us", "UTC"): ("timestamptz '2020-01-01 00:00:00+00' + interval 9000 years", "timestamptz 'infinity'"),
    pa.timestamp("ms"): ("timestamp '2020-01-01' + interval 9000 years",),
    pa.time64("us"): ("time '24:00:00'",),
    pa.time32("s"): ("time '24:00:00'",),
    pa.list_(pa.date32()): ("[date '2020-01-01', date 'infinity']",),
    pa.struct({"t": pa.time64("us")}): ("{'t': time '24:00:00'}",),
}


@pytest.mark.parametrize("mode", ["rows", "columns"])
def test_an_update_takes_no_value_that_readers_can_not_show(tmp_path: Path, mode: str) -> None:
    table = opened(tmp_path, f'order_by = ["version"]\nmode = "{mode}"\n')
    zeros = {
        f"c{i}": pa.array(
            [[0] if pa.types.is_list(type_) else {"t": 0} if pa.types.is_struct(type_) else 0, None], type_
        )
        for i, type_ in enumerate(UNREADABLE)
    }
    (tmp_path / "landing").mkdir()
    usual = pa.table({"id": ["a", "b"], "day": ["2020-01-01"] * 2, "version": [1, 1], **zeros})
    pq.write_table(usual, tmp_path / "landing/1.parquet")
    table.run(host="local")
    for i, (type_, expressions) in enumerate(UNREADABLE.items()):
        for number, expression in enumerate(expressions):
            values = {f"c{i}": f"case id when 'b' then {expression} end"}
            with pytest.raises(RefusedError) as refused:
                table.update(values, where="version = 1", dry=number % 2 == i % 2)
            assert refused.value.code == "unfit-new-value", (type_, expression)
            assert f"Row id=b of day=2020-01-01: c{i} = " in refused.value.message
    good = {"c0": "date '9999-12-31'", "c3": "time '23:59:59.999999'", "c5": "[date '0001-01-01']"}
    table.update(good, where="id = 'a'", dry=False)
    first, second = table.to_arrow(columns=["c0", "c3", "c5"]).read_all().to_pylist()
    assert first == {"c0": date(9999, 12, 31), "c3": time(23, 59, 59, 999999), "c5": [date(1, 1, 1)]}
    assert not any(second.values())


def test_a_delete_wins_by_content(tmp_path: Path) -> None:
    lake = Lake(tmp_path, ties="content")
    lake.land("1.jsonl", [row("a", 0, 2, 1), row("b", 0, 2, 1)])
    lake.run()
    lake.table.delete(where="k = 'a'", dry=False)
    lake.land("2.jsonl", [row("a", 0, 2, 9)])
    lake.run()
    assert values(lake) == [("b", 1, 1)]
    assert not lake.table.reconcile(deep=True).unbalanced


def test_without_rows_or_a_table(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    with pytest.raises(ConfigurationError) as refused:
        lake.table.delete(where="k = 'a'")
    assert refused.value.code == "no-table-yet"
    lake.land("1.jsonl", [row("a", 0, 2, 1)])
    lake.run()
    for call in (lambda: lake.table.delete(), lambda: lake.table.update({"v": "1"})):
        with pytest.raises(ConfigurationError) as refused:
            call()
        assert refused.value.code == "no-rows-chosen"
    with pytest.raises(ConfigurationError) as refused:
        lake.table.delete(where="nosuch = 1")
    assert refused.value.code == "unfit-filter"


def test_computed_partitions_and_renamed_columns(tmp_path: Path) -> None:
    table = opened(tmp_path, f'order_by = ["version"]\npartition_by = ["date(at) as day"]\n{TYPES}at = "timestamp"\n')
    records = "id,at,version,price\na,2020-01-01T23:30:00Z,1,10\nb,2020-01-02T23:30:00Z,1,20\n"
    night(table, tmp_path, {"1.csv": records})
    table.rename_column("price", "cost")
    with pytest.raises(ConfigurationError) as refused:
        table.update({"at": "at"}, where="id = 'a'")
    assert refused.value.code == "column-in-use"
    table.update({"cost": "cost + 1"}, where="cost = 10", dry=False)
    table.delete(where="id = 'b'", dry=False)
    for source in ("stored", "landing"):
        assert [(r["id"], r["cost"]) for r in table.to_arrow().read_all().to_pylist()] == [("a", 11)]
        checked = table.reconcile(deep=True)
        assert not checked.unbalanced
        assert not checked.gone
        table.reprocess(source=source, host="local")  # type: ignore[arg-type]
    table.rename_column("cost", "amount")
    table.drop_column("amount")
    night(table, tmp_path, {"2.csv": "id,at,version\nc,2020-01-01T00:00:00Z,1\n"})
    assert not table.reconcile(deep=True).unbalanced


@pytest.mark.parametrize("sets_null", [False, True])
def test_every_type_survives_what_is_set_beside_it(tmp_path: Path, sets_null: bool) -> None:
    """Only the columns of an expression pass through DuckDB."""
    (tmp_path / "landing").mkdir()
    landed = pa.table(
        {
            "id": pa.array([1, 2]),
            "day": pa.array(["2020-01-01"] * 2),
            "version": pa.array([1, 1]),
            "nanos": pa.array([1, None], pa.timestamp("ns", "UTC")),
            "time": pa.array([1, None], pa.time64("ns")),
            "wide": pa.array([12345, None], pa.decimal256(70, 2)),
            "many": pa.array([[{"x": 1}], None]),
            "bytes": pa.array([b"\x00\xff", None]),
            "v": pa.array([1.5, None], pa.float32()),
        }
    )
    pq.write_table(landed, tmp_path / "landing/1.parquet")
    table = opened(tmp_path, 'order_by = ["version"]\n')
    table.run(host="local")
    before = table.to_arrow().read_all()
    done = table.update({"v": "null" if sets_null else "v * 2"}, where="id = 1", dry=False)
    after = table.to_arrow().read_all()
    assert after.drop_columns("v").equals(before.drop_columns("v"))
    assert after.schema == before.schema
    assert after["v"].to_pylist() == [None if sets_null else 3.0, None]
    assert done.before is not None


# ---------------------------------------------------------------- from the command line


TYPES = "[tables.t.schema]\n"
GROUPED = 'shipped_at = "bigint"\ncarrier = "string"\n'


def opened(root: Path, settings: str) -> Table:
    usual = "" if "partition_by" in settings else 'partition_by = ["day"]\n'
    file = root / "lakeupsert.toml"
    file.write_text(
        f'[tables.t]\nlanding = "landing"\nprocessed = "processed"\nkey = ["id"]\nquarantine_limit = "100%"\n{usual}{settings}'
    )
    return Table.open(file)


def night(table: Table, root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / "landing" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    table.run(host="local")


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., Any]:
    """A table of two orders, and calls of the command line on it, each with its JSON."""
    table = opened(tmp_path, 'order_by = ["version"]\n[tables.t.schema]\namount = "decimal(9,2)"\n')
    night(table, tmp_path, {"1.csv": "id,day,version,amount\n7,2020-01-01,1,10.00\n8,2020-07-07,1,5.00\n"})

    def run(*arguments: str, exit_code: int = 0) -> Any:
        done = CliRunner().invoke(main, [*arguments, "--config", str(tmp_path / "lakeupsert.toml"), "--json"])
        assert done.exit_code == exit_code, done.output
        return json.loads(done.stdout)

    return run


def test_commands(call: Callable[..., Any]) -> None:
    update = ("update", "--set", "amount = round(amount * 0.87, 2)", "--where", "id in ('7', '8')")
    dry = call(*update)["result"]
    assert (dry["rows"], dry["batch"], dry["publish"]) == (2, None, None)
    assert dry["partitions"] == {"day=2020-01-01": 1, "day=2020-07-07": 1}
    [first, *_] = dry["sample"]
    assert (first["before"]["amount"], first["after"]["amount"]) == ("10.00", "8.70")
    done = call(*update, "--yes", "--batch-id", "discount")["result"]
    assert (done["batch"], done["publish"]["snapshot"], done["repeated"]) == (2, 1, False)
    again = call(*update, "--yes", "--batch-id", "discount")["result"]
    assert (again["batch"], again["repeated"], again["publish"]["snapshot"]) == (2, True, 1)
    assert [r["amount"] for r in call("head")["result"]["rows"]] == ["8.70", "4.35"]
    deleted = call("delete", "--where", "id = '7'", "--yes")["result"]
    assert (deleted["rows"], deleted["sample"][0]["after"]) == (1, None)
    nothing = call("delete", "--where", "id = '7'", "--yes")["result"]
    assert (nothing["rows"], nothing["batch"]) == (0, None)
    assert [r["id"] for r in call("head")["result"]["rows"]] == ["8"]


def test_texts_of_the_commands(call: Callable[..., Any], tmp_path: Path) -> None:
    def text(*arguments: str) -> str:
        done = CliRunner().invoke(main, [*arguments, "--config", str(tmp_path / "lakeupsert.toml")])
        assert done.exit_code == 0, done.output
        return done.stdout

    dry = text("update", "--set", "amount = amount - 1", "--where", "id = '7'")
    assert "new amount" in dry
    assert "10.00" in dry
    assert "9.00" in dry
    assert "--yes" in dry
    assert "--yes" not in text("update", "--set", "amount = amount - 1", "--where", "id = '7'", "--yes")
    assert "no row matches" in text("delete", "--where", "id = '9'")
    assert "5.00" in text("delete", "--where", "id = '8'", "--yes")


@pytest.mark.parametrize(
    ("arguments", "code", "exit_code"),
    [
        (("update", "--where", "id = '7'"), "usage", 2),
        (("update", "--set", "amount", "--where", "id = '7'"), "usage", 2),
        (("update", "--set", "amount =", "--where", "id = '7'"), "usage", 2),
        (("update", "--set", "amount = 1", "--set", "amount = 2", "--where", "id = '7'"), "usage", 2),
        (("update", "--set", "amount = 1", "--snapshot", "3", "--where", "id = '7'"), "usage", 2),
        (("update", "--set", "amount = 1"), "no-rows-chosen", 2),
        (("update", "--set", "id = 1", "--where", "id = '7'"), "column-in-use", 2),
        (("update", "--set", "amount = now()", "--where", "id = '7'"), "unfit-expression", 2),
        (("update", "--set", "amount = amount / 3", "--where", "id = '7'", "--yes"), "unfit-new-value", 1),
        (("delete",), "no-rows-chosen", 2),
        (("delete", "--from", "nosuch.csv"), "unfit-key-list", 2),
        (("delete", "--where", "id ="), "unfit-filter", 2),
    ],
)
def test_commands_with_bad_input(
    call: Callable[..., Any], arguments: tuple[str, ...], code: str, exit_code: int
) -> None:
    error = call(*arguments, exit_code=exit_code)["error"]
    assert error["code"] == code
    assert error["next"]
    assert not error["data_changed"]
    assert len(call("head")["result"]["rows"]) == 2
