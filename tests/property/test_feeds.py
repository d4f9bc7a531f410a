"""Change feeds in any order: however their records are shuffled, repeated and split into batches, the table is one and the same.

A round is one spec and fifty partitions, each a feed of its own, merged twice from different batches, in different ways: by
rewrite, by delta, with compaction between. Both must show what a few lines of Python say. `make test-random` runs twenty
times as many.
"""

import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cmp_to_key
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.engine.batch import AppendJob
from lakeupsert.engine.keys.index import IndexTarget, StoredIndex
from lakeupsert.engine.keys.lives import UnknownKeys
from lakeupsert.engine.keys.settle import settle
from lakeupsert.engine.merge import Engine, MergeOutput, MergeTask
from lakeupsert.engine.reports import Written, touched_by
from lakeupsert.engine.settle import settle_and_write
from lakeupsert.landing.accept import RowRules
from lakeupsert.landing.partitions import UNPLACED
from lakeupsert.operations.statement.assignments import Assignments
from lakeupsert.operations.statement.rows import Changes as StatementChanges
from lakeupsert.operations.statement.rows import RowChoice
from lakeupsert.read.history import history_schema, history_to_arrow
from lakeupsert.read.view import View
from lakeupsert.rows.columns import find_brought_columns
from lakeupsert.rows.datafiles import read_file
from lakeupsert.rows.floor import PARTITION, Extract, Forgetting, greatest_floor
from lakeupsert.storage import LocalStore
from lakeupsert.table.layout import WHOLE_TABLE, TableObjects
from lakeupsert.table.manifest import BucketEntry, Changes, DataFile, TombstoneFile
from lakeupsert.table.roles import ColumnGroup, DeleteRule, Ordering
from lakeupsert.table.snapshot import PartitionVersion, Snapshot
from lakeupsert.table.spec import DELETE_FLAG, FILE, HAS, PLACE, TableSpec
from tests.harness.rounds import TIMES
from tests.harness.spark import collect
from tests.harness.specs import create

ROUNDS = 6 * TIMES
"""Of all tests of many feeds together."""
FEEDS = 15
MEMORY = Path("/dev/shm")


def seeds(rounds: int, *more: pytest.MarkDecorator) -> list[Any]:
    """Of so many rounds; what one in twenty makes is made by engine spark, too, and at least the first. ``more`` marks these."""
    by_both = [pytest.param(n, id=f"{n}-both engines", marks=[pytest.mark.spark, *more]) for n in range(0, rounds, 20)]
    return [*range(rounds), *by_both]


@pytest.fixture
def engines(request: Any) -> list[Engine]:
    found: list[Engine] = [ArrowEngine()]
    if request.node.get_closest_marker("spark"):
        request.getfixturevalue("spark")
        from lakeupsert.engine.spark_window import SparkEngine

        found.append(SparkEngine())
    return found


Record = dict[str, Any]
ORDERS: dict[str, tuple[Any, list[Any]]] = {
    "n": (pa.int64(), [-1, 0, 1, 2, None]),
    "f": (pa.float64(), [-math.inf, -1.5, -0.0, 0.0, 2.5, math.nan, None]),
    "s": (pa.string(), ["", "9", "10", "ä", None]),
    "t": (pa.timestamp("us"), [0, 1, 1_577_836_800_000_000, None]),
}
CONTENT: dict[str, tuple[Any, list[Any]]] = {
    "v": (pa.int32(), [1, 2, None]),
    "w": (pa.string(), ["a", "b", None]),
    "x": (pa.float32(), [0.0, -0.0, math.nan, None]),
}


ALL = {**CONTENT, **ORDERS}


def ordering(rng: random.Random) -> list[str]:
    names = rng.sample(list(ORDERS), rng.choice([1, 1, 2, 3]))
    return [f"{n}{rng.choice(['', ' asc', ' desc'])}{rng.choice(['', ' nulls first', ' nulls last'])}" for n in names]


def spec_of(
    rng: random.Random,
    ties: Literal["arrival", "content"] | None = None,
    key_scope: Literal["partition", "table"] = "partition",
    history: bool = False,
) -> TableSpec:
    columns = [pa.field("k", pa.int32())]
    columns += [pa.field(name, type_) for name, (type_, _) in {**CONTENT, **ORDERS}.items()]
    order_by = ordering(rng)
    partition_by = ["part"] if key_scope == "table" else rng.choice([["part"], ["part"], [f"bucket({FEEDS}, k)"], []])
    if partition_by == ["part"]:
        columns.append(pa.field("part", pa.int32()))
    if history:
        order_by[0] = order_by[0].split()[0]
    return create(
        pa.schema(columns),
        table_id="t",
        key=["k"],
        order_by=order_by,
        partition_by=partition_by,
        delete=DeleteRule(column="op", values=("D",)),
        stamped=False,
        ties=ties or rng.choice(["arrival", "content"]),
        key_scope=key_scope,
        history=history,
    )


def partitions_of(spec: TableSpec) -> list[str]:
    """The names of `FEEDS` partitions, or of the only one. A merge does not look whether rows by hash belong there."""
    return [f"{column}={n}" for column in spec.partition_by for n in range(FEEDS)] or [WHOLE_TABLE]


def size_of(spec: TableSpec) -> tuple[int, int]:
    """Keys and most records of a feed: of many small ones, or of the only one."""
    return (3, 14) if spec.partition_by else (20, 100)


def comparable(value: Any) -> Any:
    """NaN is above all numbers, and -0.0 is 0.0."""
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value + 0.0)
    return value


def compared(spec: TableSpec, one: Record, other: Record) -> int:
    """-1, 0 or 1: whether one loses to the other; 0 where arrival decides."""

    def by(name: str, ascending: bool = False, nulls_first: bool = False) -> int:
        a, b = comparable(one[name]), comparable(other[name])
        if a is None or b is None:
            return ((b is None) - (a is None)) * (-1 if nulls_first else 1)
        return ((a > b) - (a < b)) * (-1 if ascending else 1)

    orders = [text.split() for text in (str(o) for o in spec.ordering)]
    found = [by(name, "asc" in rules, "first" in rules) for name, *rules in orders]
    if spec.ties == "content":
        names = sorted({*CONTENT, *ORDERS} - set(spec.order_by))
        found += [one["deleted"] - other["deleted"], *map(by, names)]
    return next((difference for difference in found if difference), 0)


def expected(spec: TableSpec, records: Sequence[Record]) -> list[str]:
    return sorted(shown(row) for row in newest(spec, records).values() if not row["deleted"])


def newest(spec: TableSpec, records: Sequence[Record]) -> dict[int, Record]:
    """The record of greatest rank of each key; ``records`` in the order of their arrival."""
    best: dict[int, Record] = {}
    for record in records:
        if record["k"] not in best or compared(spec, best[record["k"]], record) <= 0:
            best[record["k"]] = record
    return best


def shown(row: Record) -> str:
    return repr([comparable(row[name]) for name in ("k", *CONTENT, *ORDERS)])


def feed(spec: TableSpec, rng: random.Random, keys: int = 3, most: int = 14) -> list[Record]:
    """Records of few keys. Where arrival would decide between two of them, the second is left out."""
    records: list[Record] = []
    for _ in range(rng.randint(2, most)):
        record = {name: rng.choice(values) for name, (_, values) in {**CONTENT, **ORDERS}.items()}
        record |= {"k": rng.randrange(keys), "deleted": rng.random() < 0.25}
        record["x"] = None if record["x"] is None else float(record["x"])
        add_without_rival(spec, records, record)
    return records


def add_without_rival(spec: TableSpec, records: list[Record], record: Record) -> None:
    rivals = [r for r in records if r["k"] == record["k"] and not compared(spec, r, record)]
    if not rivals or spec.ties == "content":
        records.append(record)


def batches(records: Sequence[Record], rng: random.Random) -> list[list[Record]]:
    """The records in any order, some of them twice, in two or three batches; two of these meet on a key."""
    shuffled = [*records, *rng.choices(records, k=rng.randint(0, 3))]
    rng.shuffle(shuffled)
    parts: list[list[Record]] = [[] for _ in range(rng.choice([2, 3]))]
    for record in shuffled:
        rng.choice(parts).append(record)
    parts[0].append(records[0])
    parts[1].append(next(r for r in records if r["k"] == records[0]["k"]))
    return parts


@dataclass
class Pile:
    """What is stored of one partition. ``came``: the records that wait, ``memory``: what the others make."""

    base: tuple[DataFile, ...] = ()
    deltas: tuple[DataFile, ...] = ()
    tombstones: tuple[TombstoneFile, ...] = ()
    history: tuple[DataFile, ...] = ()
    version: int = 0
    waiting: list[tuple[DataFile, ...]] = field(default_factory=list)
    came: list[Record] = field(default_factory=list)
    memory: "Memory" = field(default_factory=lambda: Memory())

    def task(self, partition: str, way: str) -> MergeTask:
        """Merge what waits by ``rewrite`` or by ``delta``, of whose deltas some may be folded; or, ``compact``, without it."""
        merged = () if way == "compact" else tuple(self.waiting)
        kept = (*self.base, *self.deltas) if way == "delta" and self.base else ()
        folded = self.deltas if way == "fold" and self.base else ()
        if folded:
            kept = self.base
        return MergeTask(
            partition,
            () if kept else self.base,
            self.tombstones,
            merged,
            self.version + 1,
            self.version,
            deltas=folded if kept else self.deltas,
            kept=kept,
            history=() if way == "fold" else self.history,
            folded=self.history if way == "fold" else (),
            numbers=(self.version, *[self.version + 1] * len(merged)),
        )

    def after(self, task: MergeTask, out: MergeOutput) -> "Pile":
        base = {file.name for file in self.base}
        kept = [[file for file in out.kept if (file.name in base) == is_base] for is_base in (True, False)]
        written = ((), out.written) if task.kept else (out.written, ())
        return replace(
            self,
            base=(*kept[0], *written[0]),
            deltas=(*kept[1], *written[1]),
            tombstones=out.tombstones,
            history=out.history,
            version=self.version + 1,
            waiting=[],
        )


def merged(
    spec: TableSpec,
    engine: Engine,
    feeds: dict[str, list[list[Record]]],
    rng: random.Random,
    store: LocalStore,
    piles: dict[str, "Pile"] | None = None,
) -> dict[str, "Pile"]:
    """What each partition is once its batches are merged, one or several at a time, with what waits in ``piles``."""
    piles = piles or {partition: Pile() for partition in feeds}
    last = max(map(len, feeds.values())) - 1
    for number in range(last + 1):
        appended(store, spec, number, feeds, piles)
        for partition, parts in feeds.items():
            piles[partition].came.extend(parts[number] if number < len(parts) else [])
        ways = {
            p: rng.choice(["rewrite", "delta", "delta", "fold", "compact"])
            for p in piles
            if number == last or rng.random() < 0.7
        }
        for again in (False, True):
            if again:  # a compaction has merged nothing
                ways = {p: "delta" for p, way in ways.items() if way == "compact" and number == last}
            tasks = {p: piles[p].task(p, way) for p, way in ways.items()}
            for (p, task), out in zip(tasks.items(), engine.merge(store, spec, 0, list(tasks.values())), strict=True):
                pile, after = piles[p], piles[p].after(task, out)
                if ways[p] == "compact":
                    piles[p] = replace(after, waiting=pile.waiting)
                    continue
                assert out.changes == pile.memory.merge(spec, pile.came)
                piles[p] = replace(after, came=[])
    assert not any(pile.waiting for pile in piles.values())
    return piles


def stored(spec: TableSpec, piles: dict[str, Pile], store: LocalStore) -> dict[str, list[str]]:
    found = {}
    for partition, pile in piles.items():
        files = (*pile.base, *pile.deltas)
        found[partition] = sorted(shown(r) for f in files for r in rows_of(store, f, spec))
    return found


def rows_of(store: LocalStore, file: DataFile, spec: TableSpec) -> list[Record]:
    schema = spec.stored_schema
    at = schema.get_field_index("t")
    plain = read_file(store, file, schema).set_column(at, "t", read_file(store, file, schema)["t"].cast(pa.int64()))
    rows: list[Record] = plain.to_pylist()
    return rows


def appended(
    store: LocalStore, spec: TableSpec, number: int, feeds: dict[str, list[list[Record]]], piles: dict[str, Pile]
) -> None:
    for partition, touched in touched_by(written(store, spec, number, feeds)).items():
        piles[partition].waiting.append(touched.files)


def written(store: LocalStore, spec: TableSpec, number: int, feeds: dict[str, list[list[Record]]]) -> list[Written]:
    columns: dict[str, list[Any]] = {name: [] for name in (*spec.ranked_schema.names, PARTITION)}
    for partition, parts in feeds.items():
        for place, record in enumerate(parts[number] if number < len(parts) else []):
            rank = {DELETE_FLAG: record["deleted"], FILE: 0, PLACE: place, PARTITION: partition}
            rank[HAS] = record.get("brings")
            for name, values in columns.items():
                values.append(rank[name] if name in rank else record[name])
    if HAS in columns:
        brings = columns.pop(HAS)
        types = {
            name: pa.array(values, spec.schema.field(name).type) for name, values in columns.items() if name in ALL
        }
        columns[HAS], unfit = find_brought_columns(
            types, lambda name: np.array([name in of_it for of_it in brings]), spec
        )
        assert not any(rows.any() for rows in unfit.values())
    schema = pa.schema([*spec.ranked_schema, pa.field(PARTITION, pa.string())])
    job = AppendJob(store, store, (), "parquet", RowRules(spec, 0), "b", 0, number)
    return list(settle_and_write(job, [pa.table(columns, schema=schema)]))


@pytest.mark.parametrize("seed", seeds(ROUNDS * 2 // 5, pytest.mark.long))
def test_any_order_split_and_repetition_make_the_same_table(
    seed: int, engines: list[Engine], tmp_path_factory: Any
) -> None:
    rng = random.Random(seed)
    spec = spec_of(rng)
    feeds = {partition: feed(spec, rng, *size_of(spec)) for partition in partitions_of(spec)}
    wanted = {partition: expected(spec, records) for partition, records in feeds.items()}
    for engine in engines:
        for _ in range(2):
            arrived = {partition: batches(records, rng) for partition, records in feeds.items()}
            store = LocalStore(tmp_path_factory.mktemp("pile"))
            piles = merged(spec, engine, arrived, rng, store)
            assert stored(spec, piles, store) == wanted, (spec.ordering, spec.ties)


# ---------------------------------------------------------------- histories


def versions_of(spec: TableSpec, records: Sequence[Record], alive: Collection[Record] = ()) -> list[str]:
    """Every version, with its ends; between equal orders the greatest record, and of these the last, was ever one."""
    kept: dict[int, list[Record]] = {}
    for record in records:
        of_key = kept.setdefault(record["k"], [])
        rival = next((r for r in of_key if not by_order(spec, r, record)), None)
        if rival is not None and compared(spec, rival, record) > 0:
            continue
        of_key[:] = [r for r in of_key if r is not rival] + [record]
    found = []
    for of_key in kept.values():
        of_key.sort(key=cmp_to_key(lambda one, other: by_order(spec, one, other)))
        for version, after in zip(of_key, [*of_key[1:], None], strict=True):
            if not version["deleted"]:
                begin = spec.order_by[0]
                lives = any(version is row for row in alive)
                found.append(ended(version, version[begin], None if lives or after is None else after[begin]))
    return sorted(found)


def ended(row: Record, begin: Any, end: Any) -> str:
    return shown(row) + repr([comparable(begin), comparable(end)])


def view_of(spec: TableSpec, piles: dict[str, Pile], store: LocalStore) -> View:
    buckets = {p: [BucketEntry(id="", base=x.base, deltas=x.deltas, history=x.history)] for p, x in piles.items()}
    shown_as = dict.fromkeys(piles, PartitionVersion(version=-1, merged=1, rows=0, bytes=0, files=1, write_id=""))
    return View(TableObjects(store), spec, Snapshot(batch=1, spec_version=0, partitions=shown_as), None, buckets)


def histories(spec: TableSpec, piles: dict[str, Pile], store: LocalStore, spark: Any = None) -> dict[str, list[str]]:
    """What readers of the history find."""
    view = view_of(spec, piles, store)
    if spark is None:
        rows = history_to_arrow(view).read_all()
    else:
        from lakeupsert.read.spark import history_to_spark

        frame = history_to_spark(spark, view)
        rows = collect(frame.select([f"`{name}`" for name in history_schema(view).names])).cast(history_schema(view))
    for name in {"t", *(["valid_from", "valid_to"] if spec.order_by[0] == "t" else [])}:
        rows = rows.set_column(rows.schema.get_field_index(name), name, rows[name].cast(pa.int64()))
    found: dict[str, list[str]] = {p: [] for p in piles}
    for row in rows.to_pylist():
        name = "".join(f"{column}={row[column]}" for column in spec.partition_by) or WHOLE_TABLE
        found[name].append(ended(row, row["valid_from"], row["valid_to"]))
    return {p: sorted(of_it) for p, of_it in found.items()}


@pytest.mark.parametrize("seed", seeds(ROUNDS // 5, pytest.mark.long))
def test_any_order_split_and_repetition_make_the_same_history(
    seed: int, engines: list[Engine], tmp_path_factory: Any, request: Any
) -> None:
    rng = random.Random(f"history {seed}")
    spec = spec_of(rng, history=True)
    feeds = {partition: feed(spec, rng, *size_of(spec)) for partition in partitions_of(spec)}
    alive = {partition: expected(spec, records) for partition, records in feeds.items()}
    wanted = {partition: versions_of(spec, records) for partition, records in feeds.items()}
    assert sum(map(len, wanted.values())) > sum(map(len, alive.values())) + len(feeds)
    for engine in engines:
        for _ in range(2):
            arrived = {partition: batches(records, rng) for partition, records in feeds.items()}
            store = LocalStore(tmp_path_factory.mktemp("pile"))
            piles = merged(spec, engine, arrived, rng, store)
            assert stored(spec, piles, store) == alive, (spec.ordering, spec.ties)
            assert histories(spec, piles, store) == wanted, (spec.ordering, spec.ties)
    if len(engines) > 1:
        assert histories(spec, piles, store, request.getfixturevalue("spark")) == wanted, (spec.ordering, spec.ties)


# ---------------------------------------------------------------- updates and deletes by a statement

WHERE = "v = 1 OR w IS NULL"
SET = {"v": "coalesce(v, 0) + 10", "w": "NULL"}


def stated(spec: TableSpec, row: Record, kind: str) -> list[Record]:
    """The record of a statement about the row: in its order, and it comes later."""
    if row["deleted"] or not (row["v"] == 1 or row["w"] is None):
        return []
    return [{**row, "deleted": True} if kind == "delete" else {**row, "v": (row["v"] or 0) + 10, "w": None}]


def append_statement(
    spec: TableSpec, piles: dict[str, Pile], store: LocalStore, where: str, values: dict[str, str] | None
) -> None:
    """The batch of an update, or without ``values`` of a delete, as `lakeupsert.operations.statement.statement` writes it."""
    job = AppendJob(store, store, (), "parquet", RowRules(spec, 0), "b", 0, 0)
    changes = StatementChanges(spec, Assignments(spec.schema, values) if values else None, job)
    for chosen in RowChoice(view_of(spec, piles, store), where, None).rows():
        changes.add(chosen)
    changes.flush()
    for partition, touched in touched_by(changes.reports).items():
        piles[partition].waiting.append(touched.files)


@pytest.mark.parametrize("kind", ["update", "delete"])
@pytest.mark.parametrize("seed", seeds(ROUNDS // 5, pytest.mark.long))
def test_a_statement_stands_between_the_records_before_and_after_it(
    seed: int, kind: str, engines: list[Engine], tmp_path_factory: Any
) -> None:
    """Any order, split and repetition of the records before it lets it see the same rows, and any of the records after it makes
    the same table. Some of the latter came before, too: they are like any others."""
    rng = random.Random(f"{kind} {seed}")
    spec = msgspec.structs.replace(spec_of(rng, ties="arrival" if kind == "update" else None), statements=True)
    before = {partition: feed(spec, rng, *size_of(spec)) for partition in partitions_of(spec)}
    after = {partition: feed(spec, rng, *size_of(spec)) for partition in before}
    between: dict[str, list[Record]] = {}
    for partition, records in before.items():
        for record in rng.choices(records, k=3):
            add_without_rival(spec, after[partition], record)
        rows = newest(spec, records).values()
        between[partition] = [record for row in rows for record in stated(spec, row, kind)]
    wanted = {p: expected(spec, [*before[p], *between[p], *after[p]]) for p in before}
    if spec.partition_by:  # the only feed of a table may be of two records
        assert sum(map(len, between.values())) > 5
        if wanted == {p: expected(spec, [*before[p], *after[p]]) for p in before}:
            pytest.skip("the records after the statement hide it")
    for engine in engines:
        store = LocalStore(tmp_path_factory.mktemp("pile"))
        piles = merged(spec, engine, {p: batches(records, rng) for p, records in before.items()}, rng, store)
        append_statement(spec, piles, store, WHERE, SET if kind == "update" else None)
        for partition, pile in piles.items():
            pile.came.extend(between[partition])
        piles = merged(spec, engine, {p: batches(records, rng) for p, records in after.items()}, rng, store, piles)
        assert stored(spec, piles, store) == wanted, (spec.ordering, spec.ties)


# ---------------------------------------------------------------- one row a key in the whole table


@pytest.mark.parametrize("seed", seeds(ROUNDS, pytest.mark.long))
def test_any_order_split_and_repetition_make_the_same_table_of_keys_that_move(
    seed: int, engines: list[Engine], tmp_path_factory: Any
) -> None:
    rng = random.Random(f"in the table {seed}")
    spec = spec_of(rng, "arrival", "table")
    records = [{**record, "home": f"part={rng.randrange(6)}"} for record in feed(spec, rng, keys=20, most=200)]
    for record in records:
        if record["deleted"] and rng.random() < 0.5:
            record["home"] = UNPLACED
    best: dict[int, Record] = {}
    for record in records:
        if record["k"] not in best or compared(spec, best[record["k"]], record) < 0:
            best[record["k"]] = record
    wanted = sorted((r["home"], shown(r)) for r in best.values() if not r["deleted"])
    for engine in engines:
        for _ in range(2):
            assert merged_in_table(spec, engine, batches(records, rng), rng, tmp_path_factory.mktemp("pile")) == wanted


def nothing_to_carry(moves: pa.Table) -> pa.Table:
    raise AssertionError("in mode rows a record is a whole row")


def merged_in_table(
    spec: TableSpec, engine: Engine, arrived: Sequence[list[Record]], rng: random.Random, folder: Path
) -> list[tuple[str, str]]:
    """The rows that live, with their partitions, after the batches met a key index and were merged, one or several at a time."""
    store, piles = LocalStore(folder), {f"part={n}": Pile() for n in range(6)}
    index = StoredIndex()
    for number, came in enumerate(arrived):
        feeds = {p: [[r for r in came if r["home"] == p]] for p in (*piles, UNPLACED)}
        touched = touched_by(written(store, spec, 0, feeds))
        to = IndexTarget(store, spec, 0, "b", number)
        unknown = UnknownKeys(rng.choice([*piles]), kept=True)
        fold = rng.random() < 0.5
        settled = settle(to, touched, index, fold=fold, carry=nothing_to_carry, unknown=unknown)
        if settled.index is not None:
            index = StoredIndex(settled.index)
        index = StoredIndex(index.files, (*index.deltas, *settled.keys))
        rows = {p: t.rows - t.superseded for p, t in settled.touched.items()}
        assert rows == {p: sum(f.live for f in t.files) for p, t in settled.touched.items()}
        assert sum(t.rows - t.moved for t in settled.touched.values()) == len(came)
        for partition, t in settled.touched.items():
            piles[partition].waiting.append(t.files)
        ways = {p: rng.choice(["rewrite", "delta", "fold"]) for p in piles if rng.random() < 0.5}
        merge_piles(spec, engine, piles, ways, store)
    merge_piles(spec, engine, piles, dict.fromkeys(piles, "delta"), store)
    files = [(p, f) for p, pile in piles.items() for f in (*pile.base, *pile.deltas)]
    return sorted((p, shown(r)) for p, f in files for r in rows_of(store, f, spec))


def merge_piles(
    spec: TableSpec, engine: Engine, piles: dict[str, Pile], ways: dict[str, str], store: LocalStore
) -> None:
    tasks = {p: piles[p].task(p, way) for p, way in ways.items()}
    for (p, task), out in zip(tasks.items(), engine.merge(store, spec, 0, list(tasks.values())), strict=True):
        piles[p] = piles[p].after(task, out)


# ---------------------------------------------------------------- deletes that are forgotten, and full extracts


@dataclass
class Memory:
    """One partition, as merges leave it: what lives, which keys are known to be deleted since when, what is forgotten."""

    live: dict[int, Record] = field(default_factory=dict)
    deleted: dict[int, tuple[Record, int]] = field(default_factory=dict)
    floor: Record | None = None
    refused: int = 0
    dropped: int = 0
    past: list[Record] = field(default_factory=list)

    def merge(
        self,
        spec: TableSpec,
        records: Sequence[Record],
        received: int = 0,
        before: int = 0,
        full: Record | None = None,
        replaces: bool = False,
    ) -> Changes:
        """What it changes; ``full``: the record of greatest order, where these are a full extract, which may replace all."""
        changes: Counter[str] = Counter()
        replaced: dict[int, Record] = {}
        if replaces:
            replaced = {**self.live, **{key: record for key, (record, _) in self.deleted.items()}}
            changes["deleted"] += len(self.live.keys() - {record["k"] for record in records})
            self.live, self.deleted, self.floor = {}, {}, None
        if full is not None:
            lacking = {*self.live, *self.deleted} - {record["k"] for record in records}
            for key in lacking:
                if by_order(spec, self.live.get(key) or self.deleted[key][0], full) > 0:
                    changes["newer_than_extract"] += key in self.live
                else:
                    self.past.append({**full, "k": key, "deleted": True})
                    changes["deleted"] += key in self.live
                    self.live.pop(key, None)
                    self.deleted.pop(key, None)
        best: dict[int, Record] = {}
        for record in records:
            if record["k"] not in best or compared(spec, best[record["k"]], record) <= 0:
                best[record["k"]] = record
        for key, record in best.items():
            stored = self.live.get(key) or (self.deleted[key][0] if key in self.deleted else None)
            is_late = stored is None and self.floor is not None and by_order(spec, record, self.floor) < 0
            if is_late and full is None:
                self.refused += 1
                continue
            self.past += [r for r in records if r["k"] == key]
            changes[self.change(spec, key, stored, record, replaced.get(key))] += 1
            changes["deletes_without_row"] += record["deleted"] and stored is None and key not in replaced
            if stored is None or compared(spec, stored, record) <= 0:
                self.live.pop(key, None)
                self.deleted.pop(key, None)
                if record["deleted"]:
                    self.deleted[key] = record, received
                else:
                    self.live[key] = record
        for key, (record, since) in list(self.deleted.items()):
            if since < before:
                del self.deleted[key]
                self.dropped += 1
                self.raise_floor(spec, record)
        if full is not None:
            self.raise_floor(spec, full)
        return Changes(**changes)

    def change(
        self, spec: TableSpec, key: int, stored: Record | None, record: Record, replaced: Record | None = None
    ) -> str:
        if replaced is not None and not replaced["deleted"]:
            return "deleted" if record["deleted"] else "updated"
        if stored is None:
            return "unchanged" if record["deleted"] else "inserted"
        difference = compared(spec, stored, record)
        if stored["deleted"] and record["deleted"]:
            difference = by_order(spec, stored, record)  # a tombstone has no content
        if difference > 0:
            return "late"
        if (key in self.live) == record["deleted"]:
            return "deleted" if record["deleted"] else "inserted"
        again = spec.ties == "content" and difference == 0
        return "unchanged" if record["deleted"] or again else "updated"

    def raise_floor(self, spec: TableSpec, record: Record) -> None:
        if self.floor is None or by_order(spec, self.floor, record) < 0:
            self.floor = record


def by_order(spec: TableSpec, one: Record, other: Record) -> int:
    return compared(msgspec.structs.replace(spec, ties="arrival"), one, other)


def greatest_of(spec: TableSpec, records: Sequence[Record]) -> Record:
    return max(records, key=cmp_to_key(lambda one, other: by_order(spec, one, other)))


def order_of(spec: TableSpec, record: Record) -> str:
    columns = {name: pa.array([record[name]], spec.schema.field(name).type) for name in spec.order_by}
    return greatest_floor((), pa.table(columns), spec) or ""


@pytest.mark.parametrize("seed", seeds(ROUNDS // 5, pytest.mark.long))
def test_what_is_forgotten_or_lacking_is_refused_when_it_comes_late(
    seed: int, engines: list[Engine], tmp_path_factory: Any
) -> None:
    rng = random.Random(f"forgotten {seed}")
    history = rng.random() < 0.5
    spec = spec_of(rng, ties="arrival", history=history)
    feeds = {partition: [feed(spec, rng, keys=16) for _ in range(4)] for partition in partitions_of(spec)}
    ways = {(p, n): rng.choice(["rewrite", "delta"]) for p in feeds for n in range(4)}
    stamps, retention = [100, 110, 120, 130], [rng.choice([0, 0, 10]) for _ in range(4)]
    full = {(p, n): greatest_of(spec, feeds[p][n]) for p in feeds for n in range(4) if rng.random() < 0.2}
    replaces = {place: not history and rng.random() < 0.5 for place in full}
    memories = {partition: Memory() for partition in feeds}
    changes: dict[tuple[str, int], Changes] = {}
    for number in range(4):
        for partition, parts in feeds.items():
            extract, replaced = full.get((partition, number)), replaces.get((partition, number), False)
            changes[partition, number] = memories[partition].merge(
                spec, parts[number], stamps[number], stamps[number] - retention[number], extract, replaced
            )
    if spec.partition_by:  # the only partition of a table may have none of these
        assert sum(memory.refused for memory in memories.values()) > 5
        assert sum(memory.dropped for memory in memories.values()) > 5
        assert any(found.newer_than_extract for found in changes.values())
    for engine in engines:
        store = LocalStore(tmp_path_factory.mktemp("pile"))
        piles = {partition: Pile() for partition in feeds}
        counted = dict.fromkeys(feeds, (0, 0))
        floors: dict[str, str | None] = {}
        for number in range(4):
            appended(store, spec, number, feeds, piles)
            tasks = {}
            for partition, pile in piles.items():
                extract, replaced = full.get((partition, number)), replaces.get((partition, number), False)
                floor = None if replaced else floors.get(partition)
                tasks[partition] = replace(
                    pile.task(partition, "rewrite" if extract else ways[partition, number]),
                    full=(Extract(1, order_of(spec, extract), replaced),) if extract else (),
                    floors=(floor,) if floor else (),
                    forgets=Forgetting(((stamps[number], retention[number]),) * len(pile.waiting)),
                    sources=((str(number), ("file",)),) * len(pile.waiting),
                )
            for (p, task), out in zip(tasks.items(), engine.merge(store, spec, 0, list(tasks.values())), strict=True):
                assert out.changes == changes[p, number]
                piles[p] = piles[p].after(task, out)
                floors[p] = out.floor
                counted[p] = (counted[p][0] + out.refused, counted[p][1] + out.dropped)
        for partition, memory in memories.items():
            files = (*piles[partition].base, *piles[partition].deltas)
            found = sorted(shown(r) for f in files for r in rows_of(store, f, spec))
            assert found == sorted(map(shown, memory.live.values())), (partition, spec.ordering)
            assert counted[partition] == (memory.refused, memory.dropped)
        if spec.history:
            wanted = {
                partition: versions_of(spec, memory.past, memory.live.values())
                for partition, memory in memories.items()
            }
            assert histories(spec, piles, store) == wanted, spec.ordering


# ---------------------------------------------------------------- records that bring some of the columns


def spec_of_columns(rng: random.Random) -> TableSpec:
    """With deletes, or with groups: one that is ordered by ``n`` and has ``v``, and perhaps one that ``t`` orders, with ``w``."""
    columns = [pa.field("k", pa.int32()), pa.field("part", pa.int32())]
    columns += [pa.field(name, type_) for name, (type_, _) in ALL.items()]
    groups = [
        ColumnGroup(name="one", order_by=(rng.choice(["n", "n asc"]),), columns=("v",)),
        ColumnGroup(name="two", order_by=("t", "f"), columns=("w",)),
    ][: rng.choice([0, 1, 2])]
    orders = rng.choice(["s", "s asc", "f, s"]) if len(groups) < 2 else "s"
    return create(
        pa.schema(columns),
        table_id="t",
        key=["k"],
        order_by=orders.split(", "),
        partition_by=["part"],
        delete=None if groups else DeleteRule(column="op", values=("D",)),
        stamped=False,
        mode="columns",
        nulls=rng.choice(["overwrite", "keep"]),
        groups=tuple(groups),
    )


def groups_of(spec: TableSpec) -> list[tuple[tuple[Ordering, ...], list[str]]]:
    """Ordering and columns of the row, and of each group."""
    named = [(g.ordering, [*(o.column for o in g.ordering), *g.columns]) for g in spec.groups]
    others = [name for name in ALL if not any(name in names for _, names in named)]
    return [(spec.ordering, others), *named]


def beats(ordering: Sequence[Ordering], one: Record, other: Record) -> int:
    """As `compared`, by these columns."""
    like = msgspec.structs.replace(
        spec_of(random.Random(0), "arrival"),
        order_by=tuple(o.column for o in ordering),
        ascending=tuple(o.column for o in ordering if o.ascending),
        nulls_first=(),
    )
    return compared(like, one, other)


def is_ordered(spec: TableSpec, ordering: Sequence[Ordering], record: Record) -> bool:
    return not spec.groups or any(record[o.column] is not None for o in ordering)


def feed_of_columns(spec: TableSpec, rng: random.Random) -> list[Record]:
    """Records that bring some columns, of which no two have equal orders in a group that both bring."""
    records: list[Record] = []
    for _ in range(rng.randint(2, 14)):
        record = {name: rng.choice(values) for name, (_, values) in ALL.items()}
        record["x"] = None if record["x"] is None else float(record["x"])
        brings = {name for name in ALL if rng.random() < 0.5}
        for ordering, names in groups_of(spec):
            orders = {o.column for o in ordering}
            if spec.groups and rng.random() < 0.4:
                record |= dict.fromkeys(orders, None)
            ordered = is_ordered(spec, ordering, record)
            brings = brings | orders if ordered else brings - set(names)
        record |= {name: None for name in ALL if name not in brings}
        record |= {"k": rng.randrange(3), "deleted": spec.delete is not None and rng.random() < 0.2, "brings": brings}
        own = [o for o, _ in groups_of(spec) if is_ordered(spec, o, record)]
        rivals = [r for r in records if r["k"] == record["k"]]
        if own and not any(is_ordered(spec, o, r) and not beats(o, r, record) for r in rivals for o in own):
            records.append(record)
    return records


def row_of(spec: TableSpec, records: Sequence[Record]) -> tuple[Record | None, list[Record]]:
    """What records of one key come to, in the order of their arrival; and those that it is made of."""
    row: Record = {"k": records[0]["k"]}
    used: list[Record] = []

    def greatest_of_them(ordering: Sequence[Ordering], some: Sequence[Record]) -> Record:
        best = some[0]
        for record in some[1:]:
            best = record if beats(ordering, best, record) <= 0 else best
        return best

    for ordering, names in groups_of(spec):
        there = [r for r in records if is_ordered(spec, ordering, r)]
        for name in names:
            bring = [
                r
                for r in there
                if r["deleted"]
                or name in [o.column for o in ordering]
                or (name in r["brings"] and (spec.nulls == "overwrite" or r[name] is not None))
            ]
            best = greatest_of_them(ordering, bring) if bring else None
            row[name] = None if best is None or best["deleted"] else best[name]
            used += [best] if best is not None else []
    newest = greatest_of_them(spec.ordering, records)
    if newest["deleted"]:
        return None, [newest]
    deletes = [r for r in records if r["deleted"]]
    used += [newest, *([greatest_of_them(spec.ordering, deletes)] if deletes else [])]
    return row, used


@pytest.mark.parametrize("seed", seeds(ROUNDS // 5, pytest.mark.long))
def test_each_column_is_that_of_the_greatest_record_that_brings_it(
    seed: int, engines: list[Engine], tmp_path_factory: Any
) -> None:
    rng = random.Random(f"columns {seed}")
    spec = spec_of_columns(rng)
    feeds = {f"part={n}": records for n in range(FEEDS) if (records := feed_of_columns(spec, rng))}
    wanted = {partition: shown_of_columns(spec, records) for partition, records in feeds.items()}
    for engine in engines:
        for _ in range(2):
            arrived = {partition: batches(records, rng) for partition, records in feeds.items()}
            store = LocalStore(tmp_path_factory.mktemp("pile"))
            piles = {partition: Pile() for partition in feeds}
            before: dict[str, list[Record]] = {partition: [] for partition in feeds}
            merge_columns(spec, engine, arrived, rng, store, piles, before)
            assert stored(spec, piles, store) == wanted, (spec.ordering, spec.groups, spec.nulls)


def rows_of_columns(spec: TableSpec, records: Sequence[Record]) -> list[Record]:
    found = [row_of(spec, [r for r in records if r["k"] == key])[0] for key in {r["k"] for r in records}]
    return [row for row in found if row is not None]


def shown_of_columns(spec: TableSpec, records: Sequence[Record]) -> list[str]:
    return sorted(map(shown, rows_of_columns(spec, records)))


def merge_columns(
    spec: TableSpec,
    engine: Engine,
    arrived: dict[str, list[list[Record]]],
    rng: random.Random,
    store: LocalStore,
    piles: dict[str, Pile],
    before: dict[str, list[Record]],
) -> None:
    """Merge each batch as it comes, with what waits in ``piles``; and add its records to those that came ``before``."""
    for number in range(3):
        appended(store, spec, number, arrived, piles)
        ways = {p: rng.choice(["rewrite", "delta", "delta", "fold"]) for p in piles}
        tasks = {p: piles[p].task(p, way) for p, way in ways.items()}
        outputs = engine.merge(store, spec, 0, list(tasks.values()))
        for (p, task), out in zip(tasks.items(), outputs, strict=True):
            came = [*piles[p].came, *(arrived[p][number] if number < len(arrived[p]) else [])]
            assert out.changes == changed(spec, before[p], came), (p, number, ways[p])
            before[p] += came
            piles[p] = replace(piles[p].after(task, out), came=[])
        compacted = {p: pile.task(p, "compact") for p, pile in piles.items() if rng.random() < 0.3}
        outputs = engine.merge(store, spec, 0, list(compacted.values()))
        for (p, task), out in zip(compacted.items(), outputs, strict=True):
            piles[p] = piles[p].after(task, out)


@pytest.mark.parametrize("seed", seeds(ROUNDS // 5, pytest.mark.long))
def test_an_update_brings_the_columns_that_it_sets(seed: int, engines: list[Engine], tmp_path_factory: Any) -> None:
    """In the order of the row, or of the columns' group; for any order, split and repetition of the records before it, and of
    those after it."""
    rng = random.Random(f"update of columns {seed}")
    spec = msgspec.structs.replace(spec_of_columns(rng), statements=True)
    feeds = [{f"part={n}": feed_of_columns(spec, rng) for n in range(FEEDS // 2)} for _ in range(2)]
    feeds = [{p: records for p, records in feed.items() if all(other[p] for other in feeds)} for feed in feeds]
    between = {p: [r for row in rows_of_columns(spec, of_p) for r in set_v(spec, row)] for p, of_p in feeds[0].items()}
    assert sum(map(len, between.values())) > 5
    wanted = {p: shown_of_columns(spec, [*feeds[0][p], *between[p], *feeds[1][p]]) for p in feeds[0]}
    assert wanted != {p: shown_of_columns(spec, [*feeds[0][p], *feeds[1][p]]) for p in feeds[0]}
    for engine in engines:
        store = LocalStore(tmp_path_factory.mktemp("pile"))
        piles = {partition: Pile() for partition in wanted}
        before: dict[str, list[Record]] = {partition: [] for partition in wanted}
        for number, feed in enumerate(feeds):
            if number:
                append_statement(spec, piles, store, "v IS NOT NULL", {"v": "v + 10"})
                for partition, pile in piles.items():
                    pile.came.extend(between[partition])
            merge_columns(spec, engine, {p: batches(r, rng) for p, r in feed.items()}, rng, store, piles, before)
        assert stored(spec, piles, store) == wanted, (spec.ordering, spec.groups, spec.nulls)


def set_v(spec: TableSpec, row: Record) -> list[Record]:
    """The record of an update about the row: it brings `v`, the order of the row, and that of the group of `v`."""
    if row["v"] is None:
        return []
    orders = {o.column for o in spec.ordering}
    orders |= {o.column for ordering, names in groups_of(spec) if "v" in names for o in ordering}
    brings = {*orders, "v"}
    return [
        {name: row[name] if name in brings else None for name in ALL}
        | {"v": row["v"] + 10, "k": row["k"], "deleted": False, "brings": brings}
    ]


def changed(spec: TableSpec, before: Sequence[Record], came: Sequence[Record]) -> Changes:
    changes: Counter[str] = Counter()
    for key in {r["k"] for r in came}:
        there = [{**r, "new": False} for r in before if r["k"] == key]
        new = [{**r, "new": True} for r in came if r["k"] == key]
        lived = there and row_of(spec, there)[0]
        row, used = row_of(spec, [*there, *new])
        if not lived or row is None:
            what = "inserted" if row else "deleted" if lived else "unchanged"
            tombstone_stays = not lived and not row and there and not any(r["new"] for r in used)
            changes["late" if tombstone_stays and not is_same(spec, used[0], new) else what] += 1
            changes["deletes_without_row"] += not row and not there
        else:
            changes["updated" if any(r["new"] for r in used) else "late"] += 1
    return Changes(**changes)


def is_same(spec: TableSpec, tombstone: Record, new: Sequence[Record]) -> bool:
    return any(r["deleted"] and not beats(spec.ordering, r, tombstone) for r in new)
