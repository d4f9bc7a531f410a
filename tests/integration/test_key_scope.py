"""`key_scope = "table"`: a key has one row in the whole table, also when it races, dies, is restored, adopted or damaged."""

import json
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lakeupsert import Table
from lakeupsert.config import load
from lakeupsert.engine.hosts import LocalHost
from lakeupsert.engine.keys import index, rebuild, spill
from lakeupsert.engine.keys.batch import WrittenBatch
from lakeupsert.errors import ConfigurationError, DamagedTableError, RefusedError, TaskDiedError
from lakeupsert.operations import vacuum
from lakeupsert.pipeline import table_keys
from lakeupsert.pipeline.append import append as append_module
from lakeupsert.pipeline.append.append import append
from lakeupsert.pipeline.append.discover import AppendOptions
from lakeupsert.rows import datafiles, vectors
from lakeupsert.rows.datafiles import read_file
from lakeupsert.storage import StoreUnavailableError, open_store
from lakeupsert.table import metadata
from lakeupsert.table.layout import KEYS
from lakeupsert.table.ledger import LedgerEntry
from tests.harness.faults import FAULTS, Fault, FaultyStore, Killed
from tests.harness.lake import Lake, row
from tests.harness.proof import assert_proved


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake", key_scope="table")


def days(lake: Lake) -> dict[str, list[int]]:
    """The days on which each key has rows."""
    found: dict[str, list[int]] = {}
    for one in lake.rows():
        found.setdefault(one["k"], []).append(one["d"].day - 1)
    return found


def night(lake: Lake, number: int, rows: Sequence[Any]) -> None:
    lake.land(f"{number}.jsonl", rows)
    lake.run()


def objects(lake: Lake) -> set[str]:
    return {f.name for f in open_store(lake.settings.processed).list(f"{KEYS}/")}


def named(entry: LedgerEntry) -> set[str]:
    return {f.name for f in (*entry.keys, *(entry.index.files if entry.index else ()))}


def test_late_record_of_another_partition_brings_no_second_row(lake: Lake) -> None:
    night(lake, 1, [row("a", 1, 5)])
    night(lake, 2, [row("a", 0, 3), row("b", 0, 1)])
    assert days(lake) == {"a": [1], "b": [0]}
    lake.finish_and_check()


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
@pytest.mark.parametrize("each", ["night", "once"])
def test_key_that_goes_on_and_comes_back_is_there_once(tmp_path: Path, strategy: str, each: str) -> None:
    """Published each night, or all at once."""
    lake = Lake(tmp_path, key_scope="table", strategy=strategy)
    for number, day in enumerate((0, 1, 2, 0, 0, 1)):
        lake.land(f"{number}.jsonl", [row("a", day, number, number), row("b", 0, 1, number)])
        if each == "night":
            lake.run()
            assert days(lake) == {"a": [day], "b": [0]}
        else:
            lake.table.append(host="local")
    lake.finish_and_check()
    assert days(lake) == {"a": [1], "b": [0]}


@pytest.mark.parametrize("host", ["local", "spark"])
@pytest.mark.long
def test_feed_of_moving_keys_is_exact_and_recomputed(tmp_path: Path, host: str, request: Any) -> None:
    """With a vacuum, a compaction and a look by DuckDB between the nights."""
    if host == "spark":
        request.getfixturevalue("spark")
    lake = Lake(tmp_path, key_scope="table", superseded_retention="0s", keep_snapshots=1)
    rng = random.Random(7)
    for number in range(3 if host == "spark" else 8):
        rows = []
        for _ in range(60):
            op = rng.choice("UUD")
            ts = None if op == "U" and rng.random() < 0.2 else rng.randrange(12)  # a delete without one is refused
            day = None if op == "D" and rng.random() < 0.5 else rng.randrange(4)
            rows.append(row(f"k{rng.randrange(40)}", day, ts, rng.randrange(99), op=op))
        lake.land(f"{number}.jsonl", rows)
        lake.table.run(host=host, engine=host.replace("local", "arrow"))
        lake.check()
        if number % 2:
            lake.table.compact(full=True)
            lake.table.vacuum(dry=False)
        assert_proved(lake.table)
    lake.finish_and_check()


def test_keys_move_between_files_of_before_and_after_a_rename(lake: Lake) -> None:
    night(lake, 1, [row("a", 0, 5, 1), row("b", 0, 5, 1), row("c", 2, 5, 1)])
    lake.table.rename_column("v", "price")
    for number, moved in enumerate([row("a", 1, 6, 2), row("c", 0, 4, 2), row("b", 0, 3, 9)], 2):
        night(lake, number, [{("price" if name == "v" else name): value for name, value in moved.items()}])
    assert [(r["k"], r["d"].day - 1, r["price"]) for r in lake.rows()] == [("b", 0, 1), ("a", 1, 2), ("c", 2, 1)]
    lake.table.compact(full=True)
    assert [(r["k"], r["d"].day - 1, r["price"]) for r in lake.rows()] == [("b", 0, 1), ("a", 1, 2), ("c", 2, 1)]
    assert not lake.table.reconcile().unbalanced


def test_keys_of_one_hash_are_several_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "key_hashes", lambda rows, spec: np.full(rows.num_rows, 7, np.uint64))
    lake = Lake(tmp_path, key_scope="table")
    night(lake, 1, [row("a", 0, 5, 1), row("b", 1, 2, 1)])
    night(lake, 2, [row("a", 1, 6, 2), row("b", 0, 1, 2), row("c", 2, 0, 2)])
    night(lake, 3, [row("b", 2, 3, 3, op="D"), row("c", 0, 1, 3)])
    lake.finish_and_check()
    assert days(lake) == {"a": [1], "c": [0]}


@pytest.mark.long
def test_index_in_many_ranges_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "RANGE_ROWS", 8)
    monkeypatch.setattr(spill, "MOST_BITS", 4)
    monkeypatch.setattr(datafiles, "FEW_ROWS", 0)  # statistics tell which parts of a file a range needs
    monkeypatch.setattr(vectors, "INLINE_BYTES", 0)
    lake = Lake(tmp_path, key_scope="table")
    rng = random.Random(8)
    for number in range(6):
        night(
            lake, number, [row(f"k{rng.randrange(50)}", rng.randrange(3), rng.randrange(9), number) for _ in range(80)]
        )
        lake.check()
    assert any(len(e.index.files) == 16 for _, e in lake.entries() if e.index)
    lake.finish_and_check()


def test_changes_of_many_nights_hold_in_their_order(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_keys, "MOST_CHANGED", 1000)
    for number, (day, ts) in enumerate([(0, 0), (1, 1), (2, 1), (0, 1), (1, 0), (2, 1), (2, 5), (0, 4)]):
        night(lake, number, [row("a", day, ts, number), row(f"k{number}", 0, 0)])
        lake.check()
    assert sum(entry.index is not None for _, entry in lake.entries()) == 1
    assert days(lake)["a"] == [2]


def test_vacuum_keeps_the_vectors_of_what_is_not_merged(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "INLINE_BYTES", 0)
    monkeypatch.setattr(vacuum, "ORPHANED_PACKS_KEPT", timedelta(0))
    night(lake, 0, [row("a", 0, 5)])
    lake.land("1.jsonl", [row("a", 1, 4), row("b", 1, 4)])
    lake.table.append(host="local")
    lake.table.vacuum(dry=False)
    lake.finish_and_check()
    assert days(lake) == {"a": [0], "b": [1]}


# ---------------------------------------------------------------- races and crashes


def append_amid(lake: Lake, beside: Lake, another: Callable[[], None], at: str) -> None:
    """An append in whose middle ``beside`` does another one."""
    lake.points.amid(0, another, at)
    lake.table.append(host="local")
    assert lake.points.struck
    lake.points.disarm()
    lake.landed |= beside.landed
    lake.refused |= beside.refused
    lake.finish_and_check()


@pytest.mark.parametrize("at", ["create _lakeupsert/ledger", "put _lakeupsert/keys", "put _lakeupsert/data"])
def test_append_that_loses_a_race_looks_its_keys_up_again(lake: Lake, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both move the same keys, the one that commits first with greater orders for some, and lesser ones for others."""
    monkeypatch.setattr(vectors, "INLINE_BYTES", 0)
    night(lake, 0, [*(row(k, 0, 0) for k in "abc"), row("late", 0, 9)])
    lake.land("1.jsonl", [row("a", 1, 5, 1), row("b", 1, 3, 1), row("c", 1, 4, 1), row("late", 1, 8, 1)])
    beside = Lake(lake.root, key_scope="table")

    def another() -> None:
        beside.land("2.jsonl", [row("a", 2, 4, 2), row("b", 2, 4, 2), row("c", 2, 4, 2)])
        (lake.root / "landing" / "1.jsonl").rename(lake.root / "away")
        assert beside.table.append(host="local") is not None
        (lake.root / "away").rename(lake.root / "landing" / "1.jsonl")

    append_amid(lake, beside, another, at)
    assert days(lake) == {"a": [1], "b": [2], "c": [1], "late": [0]}
    assert objects(lake) == {name for _, e in lake.entries() for name in named(e)}, "what lost the race was discarded"
    assert lake.stored_files() <= lake.named_files()


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_append_struck_at_any_call_loses_nothing_and_moves_keys_once(
    lake: Lake, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors, "INLINE_BYTES", 0)
    night(lake, 1, [row("a", 0, 1), row("b", 0, 5), row("c", 1, 5)])
    lake.land("2.jsonl", [row("a", 1, 2), row("b", 1, 4), row("c", 0, 6, op="D"), row("d", 2, 1)])

    def check(struck: Lake) -> None:
        struck.finish_and_check()
        assert days(struck) == {"a": [1], "b": [0], "d": [2]}

    assert lake.strike_every_call(fault, lambda struck: struck.table.append(host="local"), check) > 10


def test_index_of_an_append_that_died_is_deleted_a_day_later(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    night(lake, 1, [row("a", 0, 1)])
    lake.land("2.jsonl", [row("a", 1, 2)])
    lake.points.arm(0, Fault.KILL_BEFORE, "create _lakeupsert/ledger")
    with pytest.raises(BaseException, match="create"):
        lake.table.append(host="local")
    lake.reopen()
    lake.points.disarm()
    orphans = objects(lake) - {name for _, e in lake.entries() for name in named(e)}
    assert orphans
    lake.table.vacuum(dry=False)
    assert orphans <= objects(lake)
    monkeypatch.setattr(vacuum, "ORPHANED_PACKS_KEPT", timedelta(0))
    lake.table.vacuum(dry=False)
    assert not orphans & objects(lake)
    lake.finish_and_check()
    assert days(lake) == {"a": [1]}


def test_vacuum_keeps_the_index_of_the_head_and_no_other(lake: Lake) -> None:
    for number in range(4):
        night(lake, number, [row("a", number % 2, number), row(f"k{number}", 0, 1)])
    lake.table.vacuum(dry=False)
    head = lake.table.objects.ledger.head()
    assert head is not None
    index = table_keys.named_index(lake.opened.history.headers(head.number))
    assert index is not None
    assert objects(lake) == {f.name for f in index.all}
    night(lake, 9, [row("a", 2, 9)])
    lake.finish_and_check()


@pytest.mark.long
def test_append_whose_index_a_vacuum_took_begins_again(lake: Lake) -> None:
    night(lake, 0, [row("a", 0, 0)])
    night(lake, 1, [row("a", 1, 1)])
    lake.land("2.jsonl", [row("a", 2, 2)])
    beside = Lake(lake.root, key_scope="table")

    def another() -> None:
        (lake.root / "landing" / "2.jsonl").rename(lake.root / "away")
        beside.land("1b.jsonl", [row("a", 0, 3), row("b", 0, 3)])
        beside.run()
        beside.table.vacuum(dry=False)
        (lake.root / "away").rename(lake.root / "landing" / "2.jsonl")

    append_amid(lake, beside, another, "open _lakeupsert/keys")
    assert days(lake) == {"a": [0], "b": [0]}


# ---------------------------------------------------------------- made anew


@pytest.mark.long
@pytest.mark.parametrize("merge", [False, True])
def test_withdrawn_batch_moves_no_key(lake: Lake, merge: bool) -> None:
    """After a restore a record is judged by what counts, be the restore merged or not; what was withdrawn may come again."""
    night(lake, 1, [row("a", 0, 1, 1), row("b", 0, 1, 1), row("c", 1, 1, 1, op="D")])
    night(lake, 2, [row("a", 1, 9, 2), row("b", 1, 9, 2, op="D"), row("c", 1, 9, 2)])
    lake.table.restore(0, dry=False)
    if merge:
        lake.run()
    lake.land("3.jsonl", [row("a", 2, 5, 3), row("c", 2, 0, 3)])
    lake.table.append(host="local")
    assert lake.entries()[-1][1].index is not None
    lake.finish_and_check()
    assert days(lake) == {"a": [2], "b": [0]}
    lake.table.append(host="local", again=True)
    lake.finish_and_check()
    assert days(lake) == {"a": [1], "c": [1]}


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_index_that_is_damaged_is_made_anew(lake: Lake, how: str) -> None:
    night(lake, 1, [row("a", 0, 1), row("b", 0, 9)])
    night(lake, 2, [row("a", 1, 2)])
    for name in objects(lake):
        path = Path(lake.settings.processed) / name
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:50])
    lake.land("3.jsonl", [row("a", 2, 3), row("b", 2, 3)])
    lake.table.append(host="local")
    if how == "gone":
        for name in objects(lake):
            (Path(lake.settings.processed) / name).unlink()
    # What is made anew has a batch that is not merged.
    lake.land("4.jsonl", [row("a", 0, 2), row("b", 1, 8), row("c", 1, 8)])
    lake.run()
    lake.finish_and_check()
    assert days(lake) == {"a": [2], "b": [0], "c": [1]}


def test_appended_file_that_is_gone_is_an_error_and_not_an_index_without_its_keys(lake: Lake) -> None:
    night(lake, 1, [row("a", 0, 1)])
    lake.land("2.jsonl", [row("a", 1, 2)])
    lake.table.append(host="local")
    for file in (Path(lake.settings.processed) / "_lakeupsert" / "data").rglob("appended-2-*"):
        file.unlink()
    for name in objects(lake):
        (Path(lake.settings.processed) / name).unlink()
    lake.reopen()  # this process has the pack in memory
    lake.land("3.jsonl", [row("a", 2, 3)])
    with pytest.raises(DamagedTableError):
        lake.table.append(host="local")


def test_adopted_keys_move(tmp_path: Path) -> None:
    lake = Lake(tmp_path, key_scope="table")
    lake.lay("a.parquet", [row("a", 0, 1, 1), row("a", 0, 3, 2), row("b", 1, 5, 1)])
    lake.lay("b.parquet", [row("a", 0, 2, 3)])
    lake.table.adopt()
    assert lake.entries()[0][1].index is not None
    night(lake, 1, [row("a", 1, 2, 4), row("b", 0, 6, 4)])
    lake.finish_and_check()
    assert days(lake) == {"a": [0], "b": [0]}


def test_adopt_refuses_a_key_in_several_partitions(tmp_path: Path) -> None:
    lake = Lake(tmp_path, key_scope="table")
    lake.lay("a.parquet", [row("a", 0, 1, 1), row("b", 0, 1, 1), row("b", 1, 5, 1)])
    before = [found.name for found in open_store(lake.settings.processed).list("")]
    with pytest.raises(RefusedError, match=r"k=b l=0 in d=2020-01-01") as e:
        lake.table.adopt()
    assert e.value.code == "key-in-several-partitions"
    assert [found.name for found in open_store(lake.settings.processed).list("")] == before


def test_a_wrong_bit_in_the_index_moves_no_key_twice(tmp_path: Path) -> None:
    lake = Lake(tmp_path, key_scope="table")
    night(lake, 1, [row(f"k{i}", i % 2, i) for i in range(400)])
    night(lake, 2, [row("a", 0, 1)])
    [index] = [entry.index.files for _, entry in lake.entries() if entry.index][-1]
    path = Path(lake.settings.processed) / index.name
    whole = path.read_bytes()
    path.write_bytes(whole[:2000] + bytes([whole[2000] ^ 16]) + whole[2001:])
    night(lake, 3, [row(f"k{i}", 1 - i % 2, 1000 + i) for i in range(400)])
    lake.check()


def test_quarantined_row_that_is_replayed_moves_its_key(tmp_path: Path) -> None:
    schema = {"k": "string", "l": "int", "d": "date", "ts": "timestamp_ntz", "v": "int", "op": "string"}
    lake = Lake(tmp_path, key_scope="table", schema=schema)
    lake.land("1.jsonl", [row("a", 0, 1, 1), row("b", 0, 3, 1)], [row("a", 1, 2, 1 << 40), row("b", 1, 2, 1 << 40)])
    lake.run()
    lake.mend(lambda r: True, schema={**schema, "v": "bigint"})
    lake.table.append(replay_quarantine=True)
    lake.finish_and_check()
    assert days(lake) == {"a": [1], "b": [0]}


# ---------------------------------------------------------------- made anew by tasks


class Tasks(LocalHost):
    """A host whose tasks share nothing but the store, in this process, so that faults reach them."""

    in_process = False


@pytest.fixture
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many ranges, runs of files, packs and calls of the host."""
    sizes = {"RANGE_ROWS": 8, "MOST_BITS": 3, "RUN_ROWS": 20, "FILE_ROWS": 1, "FILES_A_CALL": 4, "CUT_BYTES": 2000}
    for name, size in sizes.items():
        monkeypatch.setattr(spill if hasattr(spill, name) else rebuild, name, size)


def index_of(lake: Lake) -> list[tuple[int, int, list[dict[str, Any]]]]:
    """Bucket, bits and rows of each file of the index that the last entry with one names."""
    entry = [entry for _, entry in lake.entries() if entry.index][-1]
    assert entry.index is not None
    store, schema = open_store(lake.settings.processed), index.key_schema(lake.table.objects.spec())
    return [(f.bucket, f.bits, read_file(store, f, schema).to_pylist()) for f in entry.index.files]


def lose_index(lake: Lake) -> None:
    for name in objects(lake):
        (Path(lake.settings.processed) / name).unlink()


def lake_without_index(root: Path) -> Lake:
    """Adopted and stored rows, deletes, batches that are not merged, a file to append, and no index."""
    lake = Lake(root, key_scope="table")
    rng = random.Random(3)
    for part in range(4):
        lake.lay(f"{part}.parquet", [row(f"k{i}", i % 5, rng.randrange(9), part) for i in range(part, 60)])
    lake.table.adopt()
    for number in range(1, 5):
        ops = [rng.choice("UUUD") for _ in range(40)]
        rows = [row(f"k{rng.randrange(90)}", rng.randrange(5), rng.randrange(30), number, op=op) for op in ops]
        lake.land(f"{number}.jsonl", rows)
        if number < 3:
            lake.run()
        else:
            lake.table.append(host="local")
    lose_index(lake)
    lake.land("5.jsonl", [row(f"k{i}", 1, 15, 5) for i in range(0, 90, 4)])
    return lake


@pytest.mark.long
@pytest.mark.usefixtures("_small_ranges", "spark")
def test_both_hosts_make_the_same_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When files are adopted, and anew before an append."""
    from lakeupsert.engine.spark_host import SparkHost

    calls, real = [], SparkHost.map
    monkeypatch.setattr(SparkHost, "map", lambda self, *given: (calls.append(len(given[1])), real(self, *given))[1])
    lakes = {"local": lake_without_index(tmp_path / "local")}
    lakes["spark"] = lakes["local"].copy(tmp_path / "spark")
    adopted = {}
    for host, lake in lakes.items():
        lake.table.append(host=host)  # type: ignore[arg-type]
        fresh = Lake(tmp_path / f"adopted {host}", key_scope="table")
        fresh.lay("0.parquet", [row(f"k{i % 50}", i % 5, i % 7, i) for i in range(200)])
        fresh.lay("1.parquet", [row(f"k{i}", i % 5, 9 - i % 7, i) for i in range(80)])
        fresh.table.adopt(host=host)  # type: ignore[arg-type]
        adopted[host] = index_of(fresh)
        for one in (lake, fresh):
            assert objects(one) <= {name for _, e in one.entries() for name in named(e)}, "nothing else is left"
    made = {host: index_of(lake) for host, lake in lakes.items()}
    assert made["local"] == made["spark"]
    assert adopted["local"] == adopted["spark"]
    assert len(made["spark"]) == len(adopted["spark"]) == 8
    assert calls.count(8) == 2, "a task for each range, each time"
    assert sum(len(rows) for _, _, rows in adopted["spark"]) == 80
    lakes["spark"].finish_and_check()


@pytest.mark.usefixtures("_small_ranges", "spark")
def test_both_hosts_refuse_keys_in_several_partitions(tmp_path: Path) -> None:
    """All of them are counted, whatever range they are in, and the folder stays as it was."""
    told = {}
    for host in ("local", "spark"):
        lake = Lake(tmp_path / host, key_scope="table")
        lake.lay("a.parquet", [row(f"k{i}", i % 3, i) for i in range(60)])
        lake.lay("b.parquet", [row(f"k{i}", i % 3 + 1, 99) for i in range(0, 60, 20)])
        before = [found.name for found in open_store(lake.settings.processed).list("")]
        with pytest.raises(RefusedError) as e:
            lake.table.adopt(host=host)  # type: ignore[arg-type]
        assert e.value.code == "key-in-several-partitions"
        assert [found.name for found in open_store(lake.settings.processed).list("")] == before
        told[host] = e.value.message
    assert told["local"] == told["spark"]
    assert " 3 keys" in told["spark"]


@pytest.mark.usefixtures("_small_ranges")
def test_index_made_by_tasks_is_that_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several calls of the host, several packs a task. In one process nothing goes through the store."""
    lake, made, cuts = lake_without_index(tmp_path / "lake"), {}, {}
    for number, host in enumerate((LocalHost(), Tasks())):
        other = lake.copy(tmp_path / str(number))
        other.points.arm(-1, Fault.BEFORE)
        monkeypatch.setattr(append_module, "host_by_name", lambda name, host=host: host)
        append(other.opened, AppendOptions(host="local"))
        cuts[number] = [call for call in other.points.seen if "/cut-" in call]
        made[number] = index_of(other)
    assert made[0] == made[1]
    assert not cuts[0]
    assert len([call for call in cuts[1] if call.startswith("put")]) > 20


@pytest.mark.usefixtures("_small_ranges")
@pytest.mark.parametrize("call", ["put", "open", "list", "delete"])
@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.KILL_AFTER])
@pytest.mark.long
def test_rebuild_that_is_struck_leaves_nothing_that_counts(
    tmp_path: Path, fault: Fault, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error the packs are deleted; those of a process that died are garbage for `vacuum`."""
    lake = lake_without_index(tmp_path / "lake")
    lake.points.arm(2 if call in ("put", "open") else 0, fault, f"{call} {KEYS}/cut-")
    monkeypatch.setattr(append_module, "host_by_name", lambda name: Tasks())
    with suppress(Killed, StoreUnavailableError):
        append(lake.opened, AppendOptions(host="local"))
    assert lake.points.struck is not None
    lake.points.disarm()
    lake.reopen()
    left = {name for name in objects(lake) if "/cut-" in name}
    dies = fault is Fault.KILL_AFTER
    assert bool(left) == (dies or call in ("list", "delete")), "only what the fault kept from being deleted"
    lake.finish_and_check()
    monkeypatch.setattr(vacuum, "ORPHANED_PACKS_KEPT", timedelta(0))
    lake.table.vacuum(dry=False)
    assert not [name for name in objects(lake) if "/cut-" in name]
    lake.finish_and_check()


@pytest.mark.usefixtures("_small_ranges", "spark")
def test_task_that_is_killed_after_its_pack_leaves_nothing_that_counts(tmp_path: Path) -> None:
    class Deadly(FaultyStore):
        @contextmanager
        def write(self, name: str) -> Iterator[Any]:
            with super().write(name) as sink:
                yield sink
            if "/cut-" in name:
                os.kill(os.getpid(), signal.SIGKILL)

    lake = lake_without_index(tmp_path / "lake")
    entries = len(lake.entries())
    lake.opened.resources.store = Deadly(open_store(lake.settings.processed), lake.points)  # type: ignore[misc]
    with pytest.raises(TaskDiedError) as e:
        lake.table.append(host="spark")
    assert e.value.code == "task-died"
    assert len(lake.entries()) == entries
    assert not objects(lake), "the driver deletes packs of tasks that died, too"
    lake.finish_and_check()


# ---------------------------------------------------------------- what is seen of it


def test_planted_second_row_is_found_by_reconcile_deep(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    night(lake, 1, [row("a", 0, 1), row("b", 0, 1)])
    monkeypatch.setattr(WrittenBatch, "add", lambda self, rows, **more: None)
    night(lake, 2, [row("a", 1, 2)])
    assert days(lake) == {"a": [0, 1], "b": [0]}
    checked = lake.table.reconcile(deep=True)
    assert [p.partition for p in checked.unbalanced] == ["d=2020-01-01"]
    assert "1 extra" in str(checked.unbalanced[0])


def test_explain_tells_where_a_key_went(lake: Lake) -> None:
    night(lake, 1, [row("a", 0, 1), row("b", 1, 9)])
    night(lake, 2, [row("a", 1, 2), row("b", 0, 3), row("c", 0, 1)])
    first, second = lake.table.explain({"k": "a", "l": 0}).partitions
    assert first.why.startswith("Moved to d=2020-01-02 by batch 2's record of d=2020-01-02 (2.jsonl): greater ts")
    assert first.versions[0].moved_to == "d=2020-01-02"
    assert second.shown is not None
    late, home = lake.table.explain({"k": "b", "l": 0}).partitions
    assert late.why == "All records lost to a record in another partition."
    assert [v.outcome for v in late.versions] == ["superseded"]
    assert home.shown is not None


def test_table_of_keys_in_partitions_pays_nothing(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.land("1.jsonl", [row("a", 0, 1), row("a", 1, 2)])
    lake.points.arm(-1, Fault.BEFORE)
    lake.run()
    lake.table.vacuum(dry=False)
    assert not [call for call in lake.points.seen if "keys" in call]
    assert not objects(lake)
    entry = lake.entries()[1][1]
    assert not named(entry)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ('ties = "content"', "ties"),
        ('tombstone_retention = "1d"', "tombstone_retention"),
        ('on_failed_partition = "skip"', "on_failed_partition"),
    ],
)
def test_setting_that_can_not_be_had_is_refused(tmp_path: Path, text: str, setting: str) -> None:
    file = tmp_path / "lakeupsert.toml"
    file.write_text(
        f'[tables.t]\nlanding = "l"\nprocessed = "p"\nkey = ["k"]\npartition_by = ["d"]\nkey_scope = "table"\n{text}\n'
    )
    with pytest.raises(ConfigurationError, match=f"{setting} is .*key_scope"):
        load(str(file))


def test_partition_column_in_the_key_is_refused(tmp_path: Path) -> None:
    lake = Lake(tmp_path, key_scope="table", key=("k", "l", "d"))
    lake.land("1.jsonl", [row("a", 0, 1)])
    with pytest.raises(ConfigurationError, match="names the partition column 'd'"):
        lake.run()


@pytest.mark.parametrize(("before", "after"), [("partition", "table"), ("table", "partition")])
def test_key_scope_is_fixed(tmp_path: Path, before: str, after: str) -> None:
    lake = Lake(tmp_path, key_scope=before)
    night(lake, 1, [row("a", 0, 1)])
    lake.land("2.jsonl", [row("a", 1, 2)])
    with pytest.raises(ConfigurationError) as e:
        Lake(tmp_path, key_scope=after).run()
    assert e.value.code == "another-table"


def test_spec_that_requires_what_is_not_known_is_refused(lake: Lake) -> None:
    """As a later lakeupsert may write it: by readers and by writers."""
    night(lake, 1, [row("a", 0, 1)])
    [path] = (lake.root / "processed/_lakeupsert/spec").iterdir()
    spec = json.loads(path.read_bytes())
    del spec["digest"]
    spec["body"]["requires"] = ["geometry"]
    path.write_bytes(metadata.encode(spec))
    lake.reopen()
    for use in (lake.rows, lambda: lake.table.append(host="local"), lambda: lake.table.status()):
        with pytest.raises(
            ConfigurationError, match="has format 2 and requires geometry; this lakeupsert reads format 2 and older"
        ) as e:
            use()
        assert e.value.code == "newer-format"


@pytest.mark.parametrize(
    "step",
    [
        lambda table: table.append(host="local", full="table"),
        lambda table: table.append(host="local", full="partitions"),
        lambda table: table.reprocess(source="landing", host="local"),
    ],
)
def test_what_can_not_be_done_yet_is_refused(lake: Lake, step: Callable[[Table], object]) -> None:
    night(lake, 1, [row("a", 0, 1)])
    lake.land("2.jsonl", [row("b", 0, 1)])
    with pytest.raises((ConfigurationError, RefusedError), match="key_scope"):
        step(lake.table)
    assert len(lake.entries()) == 2


def test_append_whose_own_files_a_vacuum_took_begins_again(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began over a day ago: here orphans are old at once. With an index that must be made anew, too."""
    monkeypatch.setattr(vacuum, "ORPHANED_PACKS_KEPT", timedelta(0))
    night(lake, 0, [row("a", 0, 0)])
    for number, restored in ((1, False), (2, True)):
        if restored:
            lake.table.restore(0, dry=False)
        lake.land(f"{number}.jsonl", [row("a", number, number)])
        beside = Lake(lake.root, key_scope="table")
        call = "open _lakeupsert/data/appended"
        lake.points.amid(0, partial(beside.table.vacuum, dry=False), call)
        lake.table.append(host="local")
        assert lake.points.struck
        lake.finish_and_check()
        assert days(lake) == {"a": [number]}
