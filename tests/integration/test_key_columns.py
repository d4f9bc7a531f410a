"""`mode = "columns"` with `key_scope = "table"`: updates and deletes by the key alone, of rows that several records make."""

import base64
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert import Table
from lakeupsert.cli import main
from lakeupsert.config import DeleteSettings, ReadSettings, TableSettings, load
from lakeupsert.engine import batch
from lakeupsert.engine.by_name import HostName
from lakeupsert.engine.keys import spill
from lakeupsert.errors import ConfigurationError, DamagedTableError
from lakeupsert.pipeline import table_keys
from lakeupsert.storage import open_store
from lakeupsert.table.layout import KEYS
from tests.harness.faults import FAULTS, Fault
from tests.harness.lake import Lake
from tests.harness.lake import row as row_of
from tests.harness.model import counts_at
from tests.harness.proof import assert_proved
from tests.harness.rounds import TIMES

Record = Mapping[str, Any]
COLUMNS = ("u", "v", "w")
SCHEMA = {"k": "string", "day": "date", "ts": "int", **dict.fromkeys(COLUMNS, "int")}


class Nights:
    """A table `t`, its landing zone, and every record that it took, in the order of their arrival."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.by_batch: dict[int, list[Record]] = {}
        self.files = 0
        given = {
            "key": ("k",),
            "partition_by": ("day",),
            "order_by": ("ts",),
            "mode": "columns",
            "key_scope": "table",
            "schema": SCHEMA,
            "delete": DeleteSettings(column="op", values=("D",)),
            "quarantine_limit": "100%",
            **settings,
        }
        self.settings = TableSettings(landing=str(root / "landing"), processed=str(root / "processed"), **given)
        (root / "landing").mkdir(parents=True)
        self.table = Table("t", self.settings)

    def append(self, *records: Record, host: HostName = "local") -> dict[str, list[Record]]:
        """Append a file; returns the refused records by reason."""
        self.files += 1
        lines = [json.dumps(record) for record in records]
        name = f"{self.files:03d}.jsonl"
        (self.root / "landing" / name).write_text("\n".join(lines) + "\n")
        appended = self.table.append(host=host)
        assert appended is not None
        places, at = {}, 0
        for record, line in zip(records, lines, strict=True):
            places[at] = record
            at += len(line) + 1
        refused: dict[str, list[Record]] = {}
        stored: list[Record] = []
        for row in self.quarantined([f.name for f in appended.entry.quarantine]):
            if row["position"] is None:
                assert row["reason_code"] == "unknown_key"
                stored.append(json.loads(row["raw"]))
            else:
                refused.setdefault(row["reason_code"], []).append(places.pop(row["position"]))
        self.by_batch[appended.number] = list(places.values())
        counts = {reason: len(rows) for reason, rows in refused.items()}
        if stored:
            counts["unknown_key"] = counts.get("unknown_key", 0) + len(stored)
        assert appended.entry.quarantined == counts
        assert appended.entry.orphans == len(stored)
        return refused

    @property
    def taken(self) -> list[Record]:
        """The records of the batches that count now, in the order of their arrival."""
        ledger = self.table.objects.ledger
        entries = {link.number: link.body for link in ledger.between(-1, ledger.newest_number())}
        taken: list[Record] = []
        for number in dict.fromkeys([0, *counts_at(entries, max(entries))]):
            taken = without_orphans([*taken, *self.by_batch.get(number, ())])
        return taken

    def adopt(self, *records: Record) -> None:
        """Adopt files with these rows, of which none has the key of another."""
        columns = pa.schema([("k", pa.string()), *((name, pa.int32()) for name in ("ts", *COLUMNS))])
        for day in {record["day"] for record in records}:
            folder = self.root / "processed" / f"day={day}"
            folder.mkdir(parents=True)
            rows = [{name: record.get(name) for name in columns.names} for record in records if record["day"] == day]
            pq.write_table(pa.Table.from_pylist(rows, columns), folder / "old.parquet")
        self.table.adopt()
        self.by_batch[0] = [{**dict.fromkeys(COLUMNS), **record} for record in records]

    def night(self, *records: Record) -> dict[str, list[Record]]:
        refused = self.append(*records)
        self.table.run(host="local")
        return refused

    def quarantined(self, names: Sequence[str]) -> list[dict[str, Any]]:
        return [row for name in names for row in pq.read_table(self.root / "processed" / name).to_pylist()]

    def rows(self) -> list[dict[str, Any]]:
        return [{name: value for name, value in row.items() if name != "at"} for row in self.whole_rows()]

    def whole_rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.table.to_arrow().read_all().to_pylist()
        return sorted(({**row, "day": str(row["day"])} for row in rows), key=lambda row: str(row["k"]))

    def check(self) -> None:
        assert self.rows() == expected(self.taken)
        self.reconcile()

    def reconcile(self) -> None:
        assert_proved(self.table, may_lack_sources=True)


def since_delete(records: Sequence[Record]) -> list[Record]:
    """The records of a key that are newer than its last delete, the greatest last."""
    ranked = sorted(records, key=lambda record: record["ts"])  # stable: by arrival
    deletes = [n for n, record in enumerate(ranked) if record.get("op") == "D"]
    return ranked[deletes[-1] + 1 :] if deletes else ranked


def without_orphans(taken: Sequence[Record]) -> list[Record]:
    """Without the updates by the key alone that a late delete leaves without a record that names their partition."""
    orphans: list[Record] = []
    for key in {record["k"] for record in taken}:
        since = since_delete([record for record in taken if record["k"] == key])
        if not any(record.get("day") for record in since):
            orphans += since
    return [record for record in taken if not any(record is one for one in orphans)]


def expected(taken: Sequence[Record]) -> list[dict[str, Any]]:
    """Each column of a key is that of its greatest record that brings it, since the key was last deleted."""
    rows = []
    for key in sorted({record["k"] for record in taken}):
        since = since_delete([record for record in taken if record["k"] == key])
        if not since:
            continue
        row: dict[str, Any] = {"k": key, **dict.fromkeys(COLUMNS)}
        for record in since:
            row |= {name: value for name, value in record.items() if name in ("ts", *COLUMNS)}
        row["day"] = [record["day"] for record in since if record.get("day")][-1]
        rows.append({name: row[name] for name in SCHEMA})
    return rows


def full(k: str, day: int, ts: int, **columns: int) -> Record:
    return {"k": k, "day": f"2020-01-0{day}", "ts": ts, **columns}


def update(k: str, ts: int, **columns: int) -> Record:
    return {"k": k, "ts": ts, **columns}


def delete(k: str, ts: int, **more: Any) -> Record:
    return {"k": k, "ts": ts, "op": "D", **more}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 5 * TIMES))])
def test_random_records_come_to_what_was_taken_of_them(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, with keys that are deleted and come again elsewhere, with merges, compactions and lost indexes between."""
    rng = random.Random(seed)
    monkeypatch.setattr(table_keys, "MOST_CHANGED", rng.choice([0, 9]))
    if seed % 3 == 0:
        monkeypatch.setattr(spill, "RANGE_ROWS", 4)
        monkeypatch.setattr(spill, "MOST_BITS", 3)
    nights = Nights(tmp_path, strategy=rng.choice(["rewrite", "delta"]), versions=rng.random() < 0.3)
    if adopted := rng.random() < 0.3:
        nights.adopt(*(full(key, rng.randrange(1, 4), rng.randrange(30), v=rng.randrange(99)) for key in "abcxyz"))
    for number in range(10):
        nights.append(*random_records(rng, first=not number and not adopted))
        if rng.random() < 0.6:
            nights.table.run(host="local")
            if rng.random() < 0.3:
                nights.table.compact(full=True)
            assert nights.rows() == expected(nights.taken)
        if rng.random() < 0.2:
            lose_index(nights)
        if rng.random() < 0.2 and (snapshots := nights.table.snapshots()):
            nights.table.restore(rng.choice(snapshots).number, dry=False)
    nights.table.run(host="local")
    nights.check()


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
@pytest.mark.parametrize("engine", ["arrow", "spark"])
def test_engines_count_a_deleted_row_once(
    tmp_path: Path, engine: Any, strategy: Any, request: pytest.FixtureRequest
) -> None:
    """An update that is greater than the delete stays without a row, and ranks below the delete."""
    if engine == "spark":
        request.getfixturevalue("spark")
    nights = Nights(tmp_path, strategy=strategy)
    nights.append(full("a", 3, 16, u=1), update("a", 19, u=2))
    nights.table.run(host="local", engine=engine)
    nights.append(full("a", 3, 5))
    nights.table.run(host="local", engine=engine)
    nights.append(delete("a", 17), full("a", 2, 9), full("a", 3, 12, v=3))
    merged = nights.table.run(host="local", engine=engine).dedupe
    assert {(one.changes.deleted, one.changes.late) for one in merged} == {(1, 0)}
    assert not nights.rows()


def all_in_the_end(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What the table shows of all records, whatever way they came, once those in quarantine were tried again."""
    keys = {record["k"] for record in records}
    named = {k for k in keys if any(r.get("day") for r in since_delete([r for r in records if r["k"] == k]))}
    return expected([record for record in records if record["k"] in named])


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3 * TIMES))
def test_all_ways_of_the_same_records_end_in_one_table(seed: int, tmp_path: Path) -> None:
    """In any order and split, with restores and files taken again, lost indexes, adopted rows, rewrites and replays between."""
    rng = random.Random(seed)
    computed = rng.random() < 0.5
    nights = Nights(
        tmp_path, strategy=rng.choice(["rewrite", "delta"]), keep_snapshots=99, **(COMPUTED if computed else {})
    )
    times = iter(rng.sample(range(99), 60))
    records: list[Record] = []
    if not computed and rng.random() < 0.4:
        adopted = (full(key, rng.randrange(1, 4), next(times), v=rng.randrange(99)) for key in "abx")
        records += [{**dict.fromkeys(COLUMNS), **record} for record in adopted]
        nights.adopt(*records)
    for number in range(rng.randrange(4, 9)):
        batch = [{**record, "ts": next(times)} for record in random_records(rng, first=not number and not records)[:5]]
        records += batch
        nights.append(*(at_noon(record) for record in batch) if computed else batch)
        disturb(nights, rng)
    while nights.table.append(host="local", again=True) or nights.table.append(replay_quarantine=True):
        pass
    nights.table.run(host="local")
    assert nights.rows() == all_in_the_end(records)
    if computed:
        assert all(str(r["at"].date()) == r["day"] for r in nights.whole_rows())
    nights.reconcile()


def disturb(nights: Nights, rng: random.Random) -> None:
    if rng.random() < 0.7:
        nights.table.run(host="local")
    snapshots = nights.table.snapshots()
    match rng.randrange(9):
        case 0 | 1 if snapshots:
            nights.table.restore(rng.choice(snapshots).number, dry=False)
            if rng.random() < 0.5:
                nights.table.append(host="local", again=True)
        case 2 | 3:
            lose_index(nights)
        case 4:
            nights.table.append(replay_quarantine=True)
        case 5 if snapshots:
            nights.table.run(host="local")
            nights.table.reprocess(host="local")
        case 6 if snapshots:
            nights.table.run(host="local")
            nights.table.compact(full=True)
            nights.table.vacuum(dry=False)


COMPUTED: Mapping[str, Any] = {
    "partition_by": ("date(at) as day",),
    "schema": {"k": "string", "at": "timestamp", "ts": "int", **dict.fromkeys(COLUMNS, "int")},
}


def at_noon(record: Record) -> Record:
    """The record with the column that its day is computed from."""
    rest = {name: value for name, value in record.items() if name != "day"}
    return rest | {"at": f"{record['day']}T12:00:00Z"} if record.get("day") else rest


@pytest.mark.parametrize("how", ["nothing", "restore", "lost index", "files again", "rewritten"])
def test_older_records_are_taken_whatever_became_of_the_index(how: str, tmp_path: Path) -> None:
    """Rows know which record named their partition: `a` by its newest record, `b` by an older one."""
    nights = Nights(tmp_path)
    nights.night(full("a", 2, 5, u=1), full("b", 2, 5, u=1), update("b", 9, v=9), full("c", 1, 5))
    if how in ("restore", "files again"):
        nights.night(full("c", 1, 6), update("c", 7, w=7))
        nights.table.restore(0, dry=False)
        if how == "files again":
            assert nights.table.append(host="local", again=True) is not None
    elif how == "lost index":
        lose_index(nights)
    elif how == "rewritten":
        nights.table.reprocess(host="local")
        lose_index(nights)
    assert not nights.night(full("a", 1, 3, w=3), full("b", 1, 3, w=3), full("c", 3, 2, w=2))
    assert not nights.night(full("b", 3, 7, u=7))
    assert [[row[name] for name in ("k", "day", "ts", *COLUMNS)] for row in nights.rows()[:2]] == [
        ["a", "2020-01-02", 5, 1, None, 3],
        ["b", "2020-01-03", 9, 7, 9, 3],
    ]
    nights.reconcile()


V1: Record = {"k": "a", "day": "2020-01-01", "ts": 1, "u": 1}
V3: Record = {"k": "a", "ts": 3, "op": "D"}
V5: Record = {"k": "a", "ts": 5, "v": 5}
SPLITS = ([3], [1, 2], [2, 1], [1, 1, 1])


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
@pytest.mark.parametrize("computed", [False, True])
def test_late_delete_leaves_no_row_to_an_update_by_key(strategy: str, computed: bool, tmp_path: Path) -> None:
    """A row, an update by the key alone, and a delete between the two in rank: no row, and the update waits."""
    for n, (order, split) in enumerate(itertools.product(itertools.permutations([V1, V3, V5]), SPLITS[computed::2])):
        nights = Nights(tmp_path / str(n), strategy=strategy, **(COMPUTED if computed else {}))
        land = at_noon if computed else dict
        nights.night(land(full("z", 1, 1)))
        ends = [*itertools.accumulate(split)]
        for begin, end in zip([0, *ends], ends, strict=False):
            nights.night(*(land(record) for record in order[begin:end]))
        assert [r["k"] for r in nights.rows()] == ["z"], (order, split)
        waits = nights.table.quarantine().read_all().to_pylist()
        assert [(w["reason_code"], json.loads(w["raw"])["v"]) for w in waits] == [("unknown_key", 5)], (order, split)
        nights.reconcile()
        assert not nights.night(land(full("a", 2, 4, w=4)))
        assert nights.table.append(replay_quarantine=True) is not None
        nights.table.run(host="local")
        [row, _] = nights.rows()
        assert [row[name] for name in ("day", "ts", *COLUMNS)] == ["2020-01-02", 5, None, 5, 4], (order, split)
        nights.table.close()


@pytest.mark.long
def test_spark_reads_and_merges_the_same(tmp_path: Path, spark: Any) -> None:
    rng = random.Random(1)
    nights = Nights(tmp_path, engine="spark")
    for number in range(3):
        nights.append(*random_records(rng, first=not number), host="spark")
        nights.table.run(host="spark")
        assert nights.rows() == expected(nights.taken)
    nights.check()


def random_records(rng: random.Random, *, first: bool) -> list[Record]:
    records = []
    for _ in range(rng.randrange(1, 9) + 6 * first):
        key, ts, day = rng.choice("abcde"), rng.randrange(30), rng.randrange(1, 4)
        columns = {name: rng.randrange(99) for name in COLUMNS if rng.random() < 0.5}
        kinds = [
            full(key, day, ts, **columns),
            full(key, day, ts, **columns),
            update(key, ts, **columns),
            update(key, ts, **columns),
            delete(key, ts),
            delete(key, ts, day=f"2020-01-0{day}"),
        ]
        records.append(kinds[0] if first else rng.choice(kinds))
    return records


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(2 * TIMES))
def test_keys_that_stay_take_every_update_in_any_order(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    nights = Nights(tmp_path)
    home = {key: rng.randrange(1, 4) for key in "abcdefgh"}
    records: list[Record] = []
    for ts in range(60):
        key = rng.choice([*home])
        columns = {name: rng.randrange(99) for name in COLUMNS if rng.random() < 0.5}
        records.append(full(key, home[key], ts, **columns) if rng.random() < 0.3 else update(key, ts, **columns))
    rng.shuffle(records)
    first = [full(key, day, -1) for key, day in home.items()]
    assert not nights.night(*first)
    for begin in range(0, len(records), 13):
        assert not nights.night(*records[begin : begin + 13])
    nights.check()


def test_update_by_key_keeps_what_it_does_not_bring(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    nights.night(full("a", 1, 1, u=1, v=1), full("b", 2, 1, u=1, v=1))
    assert not nights.night(update("a", 2, v=2), update("b", 3, u=3), update("b", 2, u=2, w=2))
    assert [(r["k"], r["day"], r["u"], r["v"], r["w"]) for r in nights.rows()] == [
        ("a", "2020-01-01", 1, 2, None),
        ("b", "2020-01-02", 3, 1, 2),
    ]
    nights.check()


def test_new_key_comes_in_parts_of_one_batch(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    assert not nights.night(update("a", 1, u=1), full("a", 2, 2, v=2), update("a", 3, w=3))
    assert [(r["day"], r["u"], r["v"], r["w"]) for r in nights.rows()] == [("2020-01-02", 1, 2, 3)]
    nights.check()


def test_update_before_its_row_waits_in_quarantine(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    nights.night(full("z", 1, 1))
    assert nights.night(update("a", 5, v=5), update("z", 5, v=6)) == {"unknown_key": [update("a", 5, v=5)]}
    assert nights.table.append(replay_quarantine=True) is None
    nights.night(full("a", 2, 1, u=1, v=1))
    replayed = nights.table.append(replay_quarantine=True)
    assert replayed is not None
    assert replayed.entry.quarantined == {}
    nights.table.run(host="local")
    assert [(r["k"], r["day"], r["u"], r["v"], r["w"]) for r in nights.rows()] == [
        ("a", "2020-01-02", 1, 5, None),
        ("z", "2020-01-01", None, 6, None),
    ]


def test_living_key_moves_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    nights.night(full("a", 1, 1, u=1), full("b", 1, 1, u=1))
    assert not nights.night(update("a", 5, v=5))
    assert not nights.night(full("a", 2, 8, w=8))
    assert [(r["k"], r["day"], r["u"], r["v"], r["w"]) for r in nights.rows()] == [
        ("a", "2020-01-02", 1, 5, 8),
        ("b", "2020-01-01", 1, None, None),
    ]
    assert not nights.night(update("a", 6, u=6, w=6)), "it is compared with the part that it would replace"
    assert not nights.night(full("a", 1, 9)), "and back"
    assert [(r["k"], r["day"], r["u"], r["v"], r["w"]) for r in nights.rows()] == [
        ("a", "2020-01-01", 6, 5, 8),
        ("b", "2020-01-01", 1, None, None),
    ]
    assert not nights.night(full("a", 3, 8, v=8), full("b", 2, 0, v=0)), "older than what named the partition"
    assert [(r["k"], r["day"], r["u"], r["v"], r["w"]) for r in nights.rows()] == [
        ("a", "2020-01-01", 6, 8, 8),
        ("b", "2020-01-01", 1, 0, None),
    ]
    nights.check()


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_append_struck_at_any_call_moves_once(tmp_path: Path, fault: Fault) -> None:
    lake = Lake(tmp_path / "lake", key_scope="table", mode="columns")
    lake.land("1.jsonl", [row_of("a", 0, 1, 1), row_of("b", 1, 1, 1)])
    lake.run()
    moving = [row_of("a", 1, 2), row_of("b", 0, 2)]
    lake.land("2.jsonl", [{name: record[name] for name in ("k", "l", "d", "ts")} for record in moving])

    def check(struck: Lake) -> None:
        struck.run()
        assert sorted((one["k"], one["d"].day, one["v"]) for one in struck.rows()) == [("a", 2, 1), ("b", 1, 1)]
        assert struck.table.reconcile(deep=True).unbalanced == []

    assert lake.strike_every_call(fault, lambda struck: struck.table.append(host="local"), check) > 10


def test_keys_stay_in_a_partition_that_cant_be_read(tmp_path: Path) -> None:
    """Until it is mended; whatever else came lands."""
    nights = Nights(tmp_path)
    nights.night(full("a", 1, 1, u=1), full("b", 2, 1, u=1), full("c", 1, 1))
    [stored] = (tmp_path / "processed/day=2020-01-01").glob("base-*")
    whole = stored.read_bytes()
    stored.write_bytes(whole[:100])
    refused = nights.append(
        full("a", 2, 5, v=5), update("a", 4, w=4), full("b", 3, 5, v=5), full("c", 3, 6), delete("c", 5)
    )
    assert refused == {"unreadable_partition": [full("a", 2, 5, v=5)]}
    stored.write_bytes(whole)
    nights.table.run(host="local")
    assert [(r["k"], r["day"][-1], r["u"], r["v"], r["w"]) for r in nights.rows()] == [
        ("a", "1", 1, None, 4),
        ("b", "3", 1, 5, None),
        ("c", "3", None, None, None),
    ]
    assert nights.table.append(replay_quarantine=True) is not None
    nights.table.run(host="local")
    moved = nights.rows()[0]
    assert [moved[name] for name in ("k", "day", *COLUMNS)] == ["a", "2020-01-02", 1, 5, 4]
    nights.reconcile()


@pytest.mark.long
def test_buckets_that_keys_do_not_leave_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_files_split: None
) -> None:
    """A damaged file there does not matter to them. If a key of its bucket leaves too, all keys of the partition stay."""
    monkeypatch.setattr(batch, "RANGE_BYTES", 400)
    nights = Nights(tmp_path, bucket="1KiB")
    keys = [sha256(bytes([i])).hexdigest() for i in range(40)]
    nights.night(*(full(key, 1, 1, u=1) for key in keys))
    nights.night(*(update(key, 2, v=2) for key in keys))
    buckets = nights.table.objects.partition("day=2020-01-01").head().body.buckets
    paths = [tmp_path / "processed" / file.name for bucket in buckets for file in bucket.data]
    stored = {path: path.read_bytes() for path in paths}
    own = {path for path in stored if keys[0] in pq.read_table(path)["k"].to_pylist()}
    assert (len(own), len(stored) > 2) == (1, True)
    for path in stored.keys() - own:
        path.write_bytes(b"")
    assert not nights.append(full(keys[0], 2, 5, w=3))
    assert nights.append(*(full(key, 2, 5) for key in keys[1:])).keys() == {"unreadable_partition"}
    for path, whole in stored.items():
        path.write_bytes(whole)
    nights.table.run(host="local")
    for ts, (day, some) in enumerate([(3, keys[::3]), (1, keys[::2]), (2, keys[::5])], 6):
        assert not nights.append(*(full(key, day, ts) for key in some)), "from files that are not merged yet, too"
    nights.table.run(host="local")
    nights.check()


def test_wrong_index_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nights = Nights(tmp_path)
    nights.night(full("a", 1, 1, u=1), full("b", 2, 1))
    monkeypatch.setattr(table_keys, "carried_rows", wrong_once(table_keys.carried_rows))
    assert not nights.night(full("a", 2, 5, v=5))
    assert nights.table.objects.ledger.head().body.index.up_to == 1
    nights.check()


def test_older_record_moves_a_key_if_it_is_newer_than_the_one_that_named_its_partition(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    nights.night(full("a", 1, 3, u=1))
    nights.night(update("a", 9, v=9))
    assert not nights.night(full("a", 2, 5, u=5), update("a", 2, v=2, w=2))
    assert not nights.night(full("a", 3, 4, u=4, w=4))
    assert [(r["day"], r["u"], r["v"], r["w"]) for r in nights.rows()] == [("2020-01-02", 5, 9, 4)]
    nights.check()


@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_last_delete_of_a_batch_reaches_the_row_from_any_partition(strategy: str, tmp_path: Path) -> None:
    """An update by the key alone (5) is between two deletes of a later batch (3, 7), which name any partition or none."""
    nights = Nights(tmp_path, strategy=strategy)
    keys = {f"{days}": days for days in itertools.product((None, 2, 3), (None, 2, 3), (None, 1, 2, 3))}
    nights.night(*(full(k, 2, 1, u=1) for k in keys), full("other", 1, 1), full("another", 3, 1))
    nights.night(*(update(k, 5, v=5) for k in keys))
    deletes = [delete(k, ts, **on(day)) for k, days in keys.items() for ts, day in zip((3, 7), days, strict=False)]
    assert not nights.night(*deletes, *(full(k, again, 9, w=9) for k, (*_, again) in keys.items() if again))
    nights.check()
    assert len(nights.rows()) == 2 + 27, "each key that came again has one row"


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("strategy", ["rewrite", "delta"])
def test_row_that_late_records_move_keeps_its_batch(strategy: str, merged: bool, tmp_path: Path) -> None:
    """The update by the key alone of batch 2 stays the newest record, whether or not its row was stored when it moved."""
    nights = Nights(tmp_path, strategy=strategy, versions=True)
    take = nights.night if merged else nights.append
    late = [full("a", 2, 5, u=5), full("a", 3, 6), full("a", 1, 7, w=7)]
    for record in [full("a", 1, 1, u=1), update("a", 9, v=9), *late]:
        assert not take(record)
    nights.table.run(host="local")
    [row] = nights.table.to_arrow(versions=True).read_all().to_pylist()
    assert [row[name] for name in ("ts", *COLUMNS, "_lakeupsert_batch")] == [9, 5, 9, 7, 2]
    nights.check()


def on(day: int | None) -> Record:
    return {} if day is None else {"day": f"2020-01-0{day}"}


def test_key_moves_more_than_once_in_a_batch(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    nights.night(full("a", 1, 1, u=1), full("b", 1, 1, u=1), full("c", 1, 1, u=1))
    records = [full("a", 3, 6, v=6), full("a", 2, 5, u=5), full("b", 2, 5, v=5), full("b", 1, 6, w=6)]
    records += [full("c", 2, 5), delete("c", 6), full("c", 3, 7, v=7), full("new", 1, 5, u=5), full("new", 2, 6, v=6)]
    assert not nights.night(*records)
    assert [(r["k"], r["day"][-1], r["u"], r["v"], r["w"]) for r in nights.rows()] == [
        ("a", "3", 5, 6, None),
        ("b", "1", 1, 5, 6),
        ("c", "3", None, 7, None),
        ("new", "2", 5, 6, None),
    ]
    assert nights.table.objects.ledger.head().body.keys_moved == 2, "the others had nothing stored, or came back"
    nights.check()


@pytest.mark.parametrize("keep", [False, True])
def test_replayed_record_has_an_operation_that_the_rule_declares(keep: bool, tmp_path: Path) -> None:
    rule = DeleteSettings(column="op", values=("D",), upserts=("U", "I"), keep=keep)
    nights = Nights(tmp_path, delete=rule, unknown_deletes="quarantine")
    nights.night({**full("z", 1, 1), "op": "I"})
    assert nights.night({**update("a", 5, v=5), "op": "U"}, {**update("b", 5, v=5), "op": "D"}).keys() == {
        "unknown_key"
    }
    assert nights.table.append(replay_quarantine=True) is None
    nights.night({**full("a", 2, 1, u=1), "op": "I"}, {**full("b", 2, 1, u=1), "op": "I"})
    replayed = nights.table.append(replay_quarantine=True)
    assert replayed is not None
    assert not replayed.entry.quarantined
    nights.table.run(host="local")
    assert [(r["k"], r["u"], r["v"], r.get("op")) for r in nights.rows()] == [
        ("a", 1, 5, "U" if keep else None),
        ("z", None, None, "I" if keep else None),
    ]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["columns", "rows"])
def test_replay_takes_some_rows_of_a_file_and_keeps_the_others(mode: str, tmp_path: Path) -> None:
    nights = Nights(tmp_path, mode=mode, unknown_deletes="quarantine")
    nights.night(full("z", 1, 1))
    op = "D" if mode == "rows" else "U"
    keys = "abcdef"
    nights.night(*({**update(key, 5, v=number), "op": op} for number, key in enumerate(keys)))
    for come in ("be", "a", "cf", "d"):
        nights.night(*(full(key, 2, 1, u=1, v=9) for key in come))
        assert nights.table.append(replay_quarantine=True) is not None
        assert nights.table.append(replay_quarantine=True) is None
    nights.table.run(host="local")
    assert [(r["k"], r["v"]) for r in nights.rows() if r["k"] != "z"] == (
        [] if mode == "rows" else [(key, number) for number, key in enumerate(keys)]
    )
    assert nights.table.quarantine().read_all().num_rows == 0


def test_replayed_record_that_fits_and_has_no_row_stays_for_that_reason(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    nights.night(full("z", 1, 1))
    nights.night(update("a", 5, u=3_000_000_000), update("z", 5, u=3_000_000_000))
    nights.settings = msgspec.structs.replace(nights.settings, schema={**SCHEMA, "u": "bigint"})
    nights.table = Table("t", nights.settings)
    replayed = nights.table.append(replay_quarantine=True)
    assert replayed is not None
    assert replayed.entry.quarantined == {"unknown_key": 1}
    [row] = nights.table.quarantine().read_all().to_pylist()
    assert (row["reason_code"], json.loads(row["raw"])["k"]) == ("unknown_key", "a")


def test_replayed_record_keeps_the_name_of_its_file(tmp_path: Path) -> None:
    """The name has the order, or says that all records of the file are deletes."""
    nights = Nights(
        tmp_path,
        order_by=("n",),
        order_in_name=r"_(\d+)\.",
        delete=DeleteSettings(file_prefix="del"),
        unknown_deletes="quarantine",
        schema={"k": "string", "day": "date", "n": "int", "u": "int"},
    )

    def night(**files: Sequence[Record]) -> None:
        for name, records in files.items():
            text = "".join(json.dumps(record) + "\n" for record in records)
            (tmp_path / "landing" / f"{name}.jsonl").write_text(text)
        nights.table.run(host="local")

    night(new_1=[{"k": "z", "day": "2020-01-01"}])
    night(del_2=[{"k": "a"}], del_7=[{"k": "b"}], change_3=[{"k": "c"}], change_8=[{"k": "a"}])
    assert nights.table.quarantine().read_all().num_rows == 4
    night(new_5=[{"k": key, "day": "2020-01-01", "u": 1} for key in "abc"])
    assert nights.table.append(replay_quarantine=True) is not None
    nights.table.run(host="local")
    assert [(r["k"], r["n"]) for r in nights.rows()] == [("a", 8), ("c", 5), ("z", 1)]


def test_replay_behind_a_restore_makes_the_index_anew(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    nights.night(full("z", 1, 1))
    nights.night(update("a", 5, v=5), update("b", 5, v=5))
    nights.night(full("a", 1, 1))
    restored = nights.table.snapshots()[0].number
    nights.night(full("b", 1, 1))
    nights.table.restore(restored, dry=False)
    replayed = nights.table.append(replay_quarantine=True)
    assert replayed is not None
    assert replayed.entry.quarantined == {"unknown_key": 1}
    assert nights.table.append(replay_quarantine=True) is None
    nights.table.run(host="local")
    assert [(r["k"], r["v"]) for r in nights.rows()] == [("a", 5), ("z", None)]


def test_replay_with_a_lost_index_makes_it_anew(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    nights.night(full("z", 1, 1))
    nights.night(update("a", 5, v=5), update("b", 5, v=5))
    nights.night(full("a", 1, 1))
    lose_index(nights)
    replayed = nights.table.append(replay_quarantine=True)
    assert replayed is not None
    assert replayed.entry.quarantined == {"unknown_key": 1}
    nights.table.run(host="local")
    assert [(r["k"], r["v"]) for r in nights.rows()] == [("a", 5), ("z", None)]


def test_update_without_the_source_of_its_partition_keeps_it(tmp_path: Path) -> None:
    """In a text file every record has the column: null names no partition, and the row's value has made the one that it is in."""
    schema = {"k": "string", "at": "timestamp", "ts": "int", "u": "int"}
    nights = Nights(tmp_path, partition_by=("date(at) as day",), schema=schema)
    landing = tmp_path / "landing"
    (landing / "1.csv").write_text("k,at,ts,u\na,2020-01-01T10:00:00Z,1,1\nb,2020-01-02T10:00:00Z,1,1\n")
    nights.table.run(host="local")
    (landing / "2.csv").write_text("k,at,ts,u\na,,2,2\nb,2020-01-02T12:00:00Z,2,2\n")
    nights.table.run(host="local")
    rows = nights.table.to_arrow(columns=["k", "at", "u"]).read_all().to_pylist()
    assert [(r["k"], f"{r['at']:%d %H}", r["u"]) for r in rows] == [("a", "01 10", 2), ("b", "02 12", 2)]
    nights.reconcile()


def test_explain_names_no_file_for_a_delete_that_was_copied(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    nights.night(full("a", 1, 1, u=1))
    nights.night(delete("a", 3))
    nights.night(full("b", 1, 1), full("a", 2, 5, u=5))
    [there] = [one for one in nights.table.explain({"k": "a"}).partitions if one.partition == "day=2020-01-02"]
    assert [(v.file, v.place) for v in there.versions if v.delete] == [(None, None)]
    assert {v.file for v in there.versions if not v.delete} == {"003.jsonl"}
    config = tmp_path / "lakeupsert.toml"
    lines = [f'{name} = "{getattr(nights.settings, name)}"' for name in ("landing", "processed", "mode", "key_scope")]
    lists = ['key = ["k"]', 'partition_by = ["day"]', 'order_by = ["ts"]', 'delete = {column = "op", values = ["D"]}']
    config.write_text("\n".join(["[tables.t]", *lines, *lists]))
    text = CliRunner().invoke(main, ["explain", "k=a", "--config", str(config)]).stdout
    assert "adopted" not in text
    assert "in no file, written by this batch to delete the key here" in " ".join(text.split())


def test_null_brought_by_an_update_is_a_value_and_survives_a_replay(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    nights.night(full("z", 1, 1))
    nights.night({"k": "a", "ts": 5, "v": None})
    nights.night(full("a", 2, 1, u=1, v=1))
    assert nights.table.append(replay_quarantine=True) is not None
    nights.table.run(host="local")
    assert [(r["u"], r["v"]) for r in nights.rows() if r["k"] == "a"] == [(1, None)]


@pytest.mark.parametrize("mode", ["columns", "rows"])
def test_events_of_debezium_with_postgresqls_default_replica_identity(mode: str, tmp_path: Path) -> None:
    """A delete has the key alone in `before`, and an update has no value for a long text that did not change."""
    placeholder = "__debezium_unavailable_value"

    def event(op: str, lsn: int, before: Record | None, after: Record | None) -> Record:
        return {"op": op, "before": before, "after": after, "ts_ms": lsn, "source": {"lsn": lsn}}

    nights = Nights(
        tmp_path,
        mode=mode,
        order_by=("__source_lsn",),
        schema={"k": "string", "day": "date", "text": "string", "n": "int"},
        read=ReadSettings(envelope="debezium"),
        format="jsonl",
        delete=DeleteSettings(column="__op", values=("d",)),
    )
    a, b = ({"k": k, "day": f"2020-01-0{day}", "text": "long", "n": 1} for day, k in enumerate("ab", 1))
    assert not nights.night(event("c", 1, None, a), event("c", 2, None, b))
    refused = nights.night(
        event("u", 3, None, {**a, "text": placeholder, "n": 2}),
        event("d", 4, {"k": "b"}, None),
        event("d", 4, {"k": "x"}, None),
    )
    assert refused.keys() == ({"bad_type"} if mode == "rows" else set())
    assert [(r["k"], r["text"], r["n"]) for r in nights.rows()] == [("a", "long", 2 if mode == "columns" else 1)]
    nights.reconcile()


def test_unavailable_value_is_known_in_bytes_and_lists(tmp_path: Path) -> None:
    placeholder = "__debezium_unavailable_value"
    in_json = base64.b64encode(placeholder.encode()).decode()
    schema = {"k": "string", "day": "date", "ts": "int", "data": "binary", "n": "int"}
    nights = Nights(tmp_path, schema=schema)
    columns = pa.schema([("k", "string"), ("day", pa.date32()), ("ts", "int32"), ("data", "binary"), ("n", "int32")])
    columns = columns.append(pa.field("list", pa.list_(pa.string())))
    full_row: Record = {"k": "a", "day": date(2020, 1, 1), "ts": 1, "data": b"x", "n": 1, "list": ["x", "y"]}
    pq.write_table(pa.Table.from_pylist([full_row], columns), tmp_path / "landing" / "1.parquet")
    nights.table.run(host="local")
    other = {**full_row, "ts": 2, "data": placeholder.encode(), "n": 2, "list": [placeholder]}
    pq.write_table(pa.Table.from_pylist([other], columns), tmp_path / "landing" / "2.parquet")
    lines: list[Record] = [
        {"data": in_json, "n": 3},
        {"list": [placeholder], "data": placeholder},
        {"list": placeholder, "n": placeholder},
    ]
    text = "".join(json.dumps({"k": "a", "ts": ts, **line}) + "\n" for ts, line in enumerate(lines, 3))
    (tmp_path / "landing" / "3.jsonl").write_text(text)
    nights.table.run(host="local")
    [found] = nights.rows()
    assert {name: found[name] for name in ("ts", "data", "n", "list")} == {
        "ts": 5,
        "data": b"x",
        "n": 3,
        "list": ["x", "y"],
    }
    nights.reconcile()


def test_groups_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "lakeupsert.toml"
    file.write_text(
        '[tables.t]\nlanding = "l"\nprocessed = "p"\nkey = ["k"]\npartition_by = ["d"]\nkey_scope = "table"\nmode = "columns"\n'
        '[tables.t.groups.g]\norder_by = ["at"]\ncolumns = ["c"]\n'
    )
    with pytest.raises(ConfigurationError, match=r"groups is .*key_scope") as e:
        load(str(file))
    assert e.value.code == "bad-setting"


def wrong_once(read: Callable[..., Any]) -> Callable[..., Any]:
    """``read``, which the first time finds another index than the partition."""
    tries = iter([DamagedTableError("broken-invariant", "a key has no row", next="")])

    def called(*given: Any) -> Any:
        for error in tries:
            raise error
        return read(*given)

    return called


def lose_index(nights: Nights) -> None:
    for found in open_store(nights.settings.processed).list(f"{KEYS}/"):
        (nights.root / "processed" / found.name).unlink()
