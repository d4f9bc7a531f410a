"""Deletes that bring their key alone, in a table with `key_scope = "table"`: they find the row, whatever its partition."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert.config import DeleteSettings, ReadSettings, load
from lakeupsert.engine import hosts
from lakeupsert.errors import ConfigurationError, RefusedError
from lakeupsert.pipeline import table_keys
from lakeupsert.table import ledger
from tests.harness.faults import FAULTS, Fault
from tests.harness.lake import Lake, row
from tests.harness.proof import assert_proved


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake", key_scope="table")


def by_key(k: str, ts: int) -> Any:
    """A delete that says nothing but key and order."""
    return row(k, None, ts, op="D")


def night(lake: Lake, number: int, *rows: Any) -> None:
    lake.land(f"{number}.jsonl", rows)
    lake.run()


def places(lake: Lake) -> list[tuple[str, int]]:
    return sorted((one["k"], one["d"].day - 1) for one in lake.rows())


def reconcile(lake: Lake) -> None:
    assert_proved(lake.table)


def unknown(lake: Lake) -> list[int]:
    return [entry.unknown_deletes for _, entry in lake.entries()]


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_delete_finds_the_row_wherever_it_has_moved(tmp_path: Path, strategy: str) -> None:
    lake = Lake(tmp_path, key_scope="table", strategy=strategy)
    night(lake, 1, row("stays", 0, 1), row("goes", 0, 1), row("moved", 0, 1), row("newer", 1, 9), row("gone", 2, 1))
    night(lake, 2, row("moved", 2, 2), row("gone", 2, 2, op="D"))
    night(lake, 3, by_key("goes", 5), by_key("moved", 5), by_key("newer", 5), by_key("gone", 5), by_key("gone", 4))
    assert places(lake) == [("newer", 1), ("stays", 0)]
    assert unknown(lake)[-1] == 0
    assert sum(p.rows_appended for p in [lake.entries()[-1][1]]) == 5, "every delete that landed is counted once"
    night(lake, 4, row("moved", 0, 4), row("gone", 1, 4), row("goes", 1, 6))
    lake.finish_and_check()
    assert places(lake) == [("goes", 1), ("newer", 1), ("stays", 0)]
    reconcile(lake)


def test_file_of_deletes_needs_no_partition_column(tmp_path: Path) -> None:
    """A file by its name, and one with the operation in a column; the order may come in the name, or by arrival."""
    for settings in ({"order_in_name": r"_(\d+)\."}, {"order_by": ("record_timestamp",)}, {}):
        root = tmp_path / str(len(str(settings)))
        lake = Lake(
            root,
            key_scope="table",
            **settings,
            schema={"l": "int", "d": "date", **({"ts": "bigint"} if settings.get("order_in_name") else {})},
            delete=DeleteSettings(column="op", values=("D",), file_prefix="del"),
        )
        head, first, later = ("", "", "") if settings else (",ts", ",1", ",9")
        landing = root / "landing"
        rows = [f"{k},0,2020-01-0{n},1{first}" for n, k in enumerate("abc", 1)]
        (landing / "new_1.csv").write_text("\n".join([f"k,l,d,v{head}", *rows]))
        lake.run()
        (landing / "del_2.csv").write_text(f"k,l{head}\na,0{later}\n")
        (landing / "ops_2.csv").write_text(f"op,k,l{head}\nD,b,0{later}\n")
        lake.run()
        assert places(lake) == [("c", 2)], settings
        reconcile(lake)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_partition_that_is_computed_needs_no_source(tmp_path: Path, kind: str) -> None:
    """Also if the source has formats of dates under `[read]`, which files without it can't have."""
    lake = Lake(
        tmp_path,
        key_scope="table",
        partition_by=("date(at) as d", "bucket(2, k)"),
        schema={"l": "int", "at": "timestamp", "ts": "bigint"},
        read=ReadSettings(dates={"at": "%d.%m.%Y %H:%M %z"}),
    )
    (tmp_path / "landing" / "1.csv").write_text("k,l,at,ts\na,0,01.01.2020 10:00 +0000,1\nb,0,02.01.2020 10:00 Z,1\n")
    lake.run()
    delete = {"k": "a", "l": 0, "ts": 2, "op": "D"}
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([delete]), tmp_path / "landing" / "2.parquet")
    else:
        text = json.dumps(delete) if kind == "jsonl" else "k,l,ts,op\na,0,2,D"
        (tmp_path / "landing" / f"2.{kind}").write_text(text + "\n")
    lake.run()
    assert places(lake) == [("b", 1)]
    reconcile(lake)


@pytest.mark.parametrize("mode", ["rows", "columns"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_empty_text_names_no_partition(tmp_path: Path, kind: str, mode: str) -> None:
    """Debezium invents one in deletes under PostgreSQL's default replica identity. An upsert must name its partition."""
    schema = {"l": "int", "area": "string", "ts": "bigint"}
    lake = Lake(tmp_path, key_scope="table", mode=mode, partition_by=("area", "bucket(2, k)"), schema=schema)
    (tmp_path / "landing" / "1.csv").write_text("k,l,area,ts\na,0,x,1\nb,0,y,1\n")
    lake.run()
    rows = [{"k": k, "l": 0, "area": "", "ts": 2, "op": op} for k, op in (("a", "D"), ("b", "U"))]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "landing" / "2.parquet")
    else:
        (tmp_path / "landing" / "2.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    lake.run()
    assert [(one["k"], one["area"], one["ts"]) for one in lake.rows()] == [("b", "y", 1)]
    assert lake.entries()[-1][1].quarantined == {"bad_partition": 1}
    reconcile(lake)


def test_unknown_key_stays_dead_for_every_partition(lake: Lake) -> None:
    night(lake, 1, row("a", 0, 1))
    night(lake, 2, by_key("x", 5), by_key("y", 5), by_key("z", 5))
    assert unknown(lake)[-1] == 3
    night(lake, 3, row("x", 0, 4), row("y", 2, 4), row("z", 2, 6))
    lake.finish_and_check()
    assert places(lake) == [("a", 0), ("z", 2)]
    reconcile(lake)


@pytest.mark.parametrize("lost", ["the index", "by a restore", "by a vacuum"])
def test_unknown_key_stays_dead_when_the_index_is_made_anew(lake: Lake, lost: str) -> None:
    night(lake, 1, row("a", 0, 1))
    night(lake, 2, by_key("x", 5))
    if lost == "the index":
        for name in [f.name for _, e in lake.entries() for f in e.keys]:
            (Path(lake.settings.processed) / name).unlink()
    else:
        night(lake, 3, row("x", 2, 9), by_key("a", 9))
        lake.table.restore(1, dry=False)
    if lost == "by a vacuum":
        lake.table.compact(full=True)
        lake.table.vacuum(dry=False)
    night(lake, 4, row("x", 1, 4), row("a", 1, 2))
    lake.finish_and_check()
    assert places(lake) == [("a", 1)]


def test_delete_meets_other_records_of_its_batch(lake: Lake) -> None:
    night(lake, 1, row("stored", 0, 1), row("stored too", 0, 1))
    lake.land("2a.jsonl", [row("new", 1, 3), by_key("newer", 3), by_key("stored", 3), row("stored too", 2, 2)])
    lake.land("2b.jsonl", [by_key("new", 4), row("newer", 1, 4), row("stored", 2, 4), by_key("stored too", 3)])
    lake.run()
    assert places(lake) == [("newer", 1), ("stored", 2)]
    assert unknown(lake)[-1] == 0, "the batch itself has a record of each key"
    lake.finish_and_check()
    reconcile(lake)


def test_unknown_key_is_refused_and_replayed_once_its_row_has_come(tmp_path: Path) -> None:
    lake = Lake(tmp_path, key_scope="table", unknown_deletes="quarantine")
    night(lake, 1, row("a", 0, 1))
    lake.land("2.jsonl", [row("b", 0, 1), by_key("a", 5)], [by_key("x", 5), by_key("y", 5)])
    lake.run()
    assert lake.entries()[-1][1].quarantined == {"unknown_key": 2}
    assert places(lake) == [("b", 0)]
    lake.table.append(replay_quarantine=True)
    assert len(lake.entries()) == 3, "a replay leaves what is still unknown"
    night(lake, 3, row("x", 2, 4))
    assert places(lake) == [("b", 0), ("x", 2)]
    lake.passes = lambda one, entry: bool(entry.replayed) and one["k"] == "x"
    lake.table.append(replay_quarantine=True)
    lake.finish_and_check()
    assert places(lake) == [("b", 0)]
    assert lake.entries()[-1][1].quarantined == {"unknown_key": 1}
    lake.mend(lambda one: True, unknown_deletes="keep")
    lake.passes = lambda one, entry: bool(entry.replayed)
    lake.table.append(replay_quarantine=True)
    night(lake, 4, row("y", 2, 4))
    assert places(lake) == [("b", 0)]
    assert not [reasons for _, e in lake.entries()[-2:] for reasons in e.quarantined]


@pytest.mark.parametrize("buffer", [None, 1])
@pytest.mark.parametrize("orders", [(4, 5), (5, 4), (4, 4)])
def test_every_delete_of_an_unknown_key_is_refused(
    tmp_path: Path, orders: tuple[int, int], buffer: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that loses to another delete of its batch: it neither deletes an older row that comes later, nor is it gone."""
    if buffer:
        monkeypatch.setattr(hosts, "HELD_BYTES", buffer)
    lake = Lake(tmp_path, key_scope="table", unknown_deletes="quarantine")
    night(lake, 1, row("a", 0, 1))
    lake.land("2.jsonl", [], [by_key("x", ts) for ts in orders])
    lake.run()
    assert lake.entries()[-1][1].quarantined == {"unknown_key": 2}
    reconcile(lake)
    night(lake, 3, row("x", 2, 3))
    assert places(lake) == [("a", 0), ("x", 2)]
    reconcile(lake)
    lake.passes = lambda one, entry: bool(entry.replayed)
    lake.table.append(replay_quarantine=True)
    lake.finish_and_check()
    assert places(lake) == [("a", 0)]
    assert lake.entries()[-1][1].rows_read == 2
    assert_proved(lake.table, may_lack_sources=True)  # the replayed rows are in no landing file


def test_quarantine_limit_counts_unknown_keys(tmp_path: Path) -> None:
    lake = Lake(tmp_path, key_scope="table", unknown_deletes="quarantine", quarantine_limit=2)
    night(lake, 1, row("a", 0, 1))
    lake.land("2.jsonl", [by_key("a", 5), row("b", 0, 1)], [by_key(k, 5) for k in "xyz"])
    before = lake.stored_files()
    with pytest.raises(RefusedError) as e:
        lake.run()
    assert e.value.code == "quarantine-limit"
    assert "3 unknown_key" in e.value.message
    assert len(lake.entries()) == 2
    [kept] = lake.stored_files() - before
    assert lake.table.quarantine(files=[kept]).read_all()["reason_code"].to_pylist() == ["unknown_key"] * 3
    lake.mend(lambda one: False, quarantine_limit=3)
    lake.finish_and_check()
    assert places(lake) == [("b", 0)]


def test_plan_says_that_it_does_not_foresee_where_keys_are(lake: Lake) -> None:
    night(lake, 1, row("a", 0, 1))
    lake.land("2.jsonl", [by_key("a", 5), by_key("x", 5), row("b", 1, 1)])
    without_day = pa.table({"k": ["a", "x"], "l": [0, 0], "ts": [datetime(2020, 1, 1, 0, 0, 9)] * 2, "op": ["D", "D"]})
    pq.write_table(without_day, lake.root / "landing" / "3.parquet")
    planned = lake.table.plan()
    assert planned.rows == 1
    assert [note for note in planned.notes if note.startswith("4 rows")]


@pytest.mark.long
def test_batch_of_nothing_but_deletes_reads_no_old_batch(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "HEADERS_TOGETHER", (2,))

    def requests(name: str, *rows: Any) -> int:
        lake.land(name, rows)
        lake.reopen()
        lake.table.append(host="local")
        return lake.table.requests["get"]

    for number in range(17):
        requests(f"{number}.jsonl", row("a", 0, number))
    usual = requests("x.jsonl", row("b", 0, 1))
    assert requests("y.jsonl", by_key("b", 9)) <= usual + 4


def test_only_deletes_may_leave_their_partition_out(lake: Lake) -> None:
    night(lake, 1, row("a", 0, 1))
    lake.land("2.jsonl", [row("b", 0, 1)], [row("c", None, 1)])
    lake.run()
    assert lake.entries()[-1][1].quarantined == {"bad_partition": 1}
    (lake.root / "landing" / "3.csv").write_text("k,l,ts,op\nd,0,2020-01-01T00:00:09,U\na,0,2020-01-01T00:00:09,D\n")
    lake.run()
    assert lake.entries()[-1][1].quarantined == {"bad_partition": 1}
    assert places(lake) == [("b", 0)]


def test_table_of_keys_in_partitions_says_what_such_deletes_need(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    night(lake, 1, row("a", 0, 1))
    (tmp_path / "landing" / "2.csv").write_text("k,l,ts,op\na,0,2020-01-01T00:00:09,D\n")
    lake.land("3.jsonl", [], [by_key("a", 9)])
    appended = lake.table.append(host="local")
    assert appended is not None
    assert appended.entry.quarantined == {"bad_partition": 1, "missing_column": 1}
    assert all('key_scope = "table"' in text for text in appended.examples.values())


def test_first_batch_has_nothing_to_delete(lake: Lake) -> None:
    lake.land("1.jsonl", [by_key("a", 5), by_key("b", 5)])
    with pytest.raises(RefusedError) as e:
        lake.run()
    assert e.value.code == "no-partition-yet"
    assert not lake.entries()
    lake.land("2.jsonl", [row("a", 1, 4), row("b", 1, 6)])
    lake.finish_and_check()
    assert places(lake) == [("b", 1)]


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kept", ["keep", "quarantine"])
def test_append_struck_at_any_call_deletes_once(
    tmp_path: Path, fault: Fault, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_keys, "MOST_CHANGED", 0)
    lake = Lake(tmp_path / "lake", key_scope="table", unknown_deletes=kept)
    night(lake, 1, row("a", 0, 1), row("b", 1, 5))
    x = [by_key("x", 3)]
    known = [by_key("a", 2), by_key("b", 4)]
    lake.land("2.jsonl", *((known + x, []) if kept == "keep" else (known, x)))

    def check(struck: Lake) -> None:
        struck.finish_and_check()
        assert places(struck) == [("b", 1)]
        assert unknown(struck)[-1] == 1
        assert struck.stored_files() <= struck.named_files() | orphans(struck)

    assert lake.strike_every_call(fault, lambda struck: struck.table.append(host="local"), check) > 10


def orphans(lake: Lake) -> set[str]:
    """What an append that died leaves for a later vacuum."""
    return {name for name in lake.stored_files() - lake.named_files() if "/data/" in name or "/quarantine/" in name}


@pytest.mark.parametrize(
    ("text", "code", "setting"),
    [
        ('unknown_deletes = "quarantine"', "bad-setting", "unknown_deletes"),
        ('unknown_deletes = "quarantine"\nkey_scope = "table"', "bad-setting", "unknown_deletes"),
        ('unknown_deletes = "drop"\nkey_scope = "table"', "bad-setting", "unknown_deletes"),
        ('delete = { column = "op", values = ["D"], by_key = "all partitions" }', "unknown-setting", "key index"),
    ],
)
def test_setting_without_effect_is_refused(tmp_path: Path, text: str, code: str, setting: str) -> None:
    file = tmp_path / "lakeupsert.toml"
    file.write_text(f'[tables.t]\nlanding = "l"\nprocessed = "p"\nkey = ["k"]\npartition_by = ["d"]\n{text}\n')
    with pytest.raises(ConfigurationError, match=setting) as e:
        load(str(file))
    assert e.value.code == code


def test_explain_shows_a_delete_where_it_deleted(lake: Lake) -> None:
    night(lake, 1, row("a", 2, 1))
    night(lake, 2, by_key("a", 5))
    [found] = lake.table.explain({"k": "a", "l": 0}).partitions
    assert found.partition == "d=2020-01-03"
    assert found.shown is None
    assert {version.batch for version in found.versions} == {1, 2}
    assert {version.moved_to for version in found.versions} == {None}
