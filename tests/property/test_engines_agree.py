"""Engines agree row by row: 120 generated partitions of five tables of different types, each table one Spark job."""

import math
import random
import struct
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from lakeupsert.config import Reading
from lakeupsert.engine import arrow, merge_writer
from lakeupsert.engine.arrow import ArrowEngine
from lakeupsert.engine.batch import AppendJob
from lakeupsert.engine.cut import CutTask, Kind, cut
from lakeupsert.engine.merge import MergeOutput, MergeTask
from lakeupsert.engine.reports import touched_by
from lakeupsert.engine.settle import settle_and_write
from lakeupsert.landing.accept import RowRules
from lakeupsert.operations.statement.assignments import Assignments
from lakeupsert.operations.statement.rows import Changes, RowChoice
from lakeupsert.read.view import View
from lakeupsert.rows.datafiles import read_file
from lakeupsert.rows.floor import PARTITION, Extract, Forgetting, greatest_floor
from lakeupsert.storage import LocalStore
from lakeupsert.table.layout import WHOLE_TABLE, TableObjects
from lakeupsert.table.manifest import BucketEntry, DataFile, Part, add_digests
from lakeupsert.table.roles import DeleteRule
from lakeupsert.table.snapshot import PartitionVersion, Snapshot
from lakeupsert.table.spec import DELETE_FLAG, FILE, PLACE, TableSpec
from tests.harness.specs import create

PARTITIONS = 24
NAN = float("nan")

# Few values a column, so that keys and ordering values meet; the edges of each type are among them.
VALUES: dict[Any, list[Any]] = {
    pa.string(): ["", "a", "A", "ä", "a\u0308", "🦆", "\uffff", "𝔸", "a b", "9", "10"],
    pa.large_string(): ["x", "y", "ü"],
    pa.binary(): [b"", b"\x00", b"\xff", b"a"],
    pa.binary(2): [b"\x00\x00", b"\xff\x01", b"ab"],
    pa.bool_(): [True, False],
    pa.int8(): [-128, 0, 127],
    pa.int64(): [-(2**63), -1, 0, 1, 2**63 - 1],
    pa.uint64(): [0, 1, 2**64 - 1],
    pa.float32(): [0.0, -0.0, 1.5, math.inf, -math.inf, NAN],
    pa.float64(): [
        0.0,
        -0.0,
        5e-324,
        -1.5,
        math.inf,
        -math.inf,
        NAN,
        struct.unpack("<d", b"\x01" + b"\x00" * 5 + b"\xf8\xff")[0],
    ],
    pa.decimal32(5, 2): [Decimal("-3.00"), Decimal("2.00"), Decimal("999.99")],
    pa.decimal64(15, 3): [Decimal("-1.500"), Decimal("0.001"), Decimal("7")],
    pa.decimal128(12, 2): [Decimal("-1.50"), Decimal("0.00"), Decimal("9999999999.99")],
    pa.decimal128(38, 10): [Decimal("-1"), Decimal("0.0000000001")],
    pa.decimal256(60, 3): [Decimal("1"), Decimal("-2.5")],
    pa.date32(): [date(1, 1, 1), date(1582, 10, 10), date(2020, 2, 29), date(9999, 12, 31)],
    pa.timestamp("us"): [datetime(1, 1, 1), datetime(1900, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999)],
    pa.timestamp("us", tz="UTC"): [datetime(1969, 12, 31, tzinfo=UTC), datetime(2020, 1, 1, tzinfo=UTC)],
    pa.timestamp("ns"): [-1, 0, 1, 1_577_836_800_000_000_001],
    pa.time64("us"): [0, 86_399_999_999],
    pa.duration("us"): [timedelta(0), timedelta(days=-1), timedelta(microseconds=1)],
    pa.list_(pa.int32()): [[], [1, None], None],
    pa.map_(pa.string(), pa.int64()): [[], [("a", 1)], [("a", None), ("b", 2)]],
    pa.struct([("x", pa.int32()), ("y", pa.list_(pa.string()))]): [{"x": 1, "y": ["a"]}, {"x": None, "y": None}, None],
    pa.float16(): [0.5, -2.0],
}

TABLES = {
    "text key, float order": ({"k": pa.string()}, {"o": pa.float64()}),
    "composite key, two orders": (
        {"k": pa.string(), "n": pa.int64(), "f": pa.binary(2)},
        {"o": pa.timestamp("us"), "p": pa.float32()},
    ),
    "decimal and date key, text order": ({"k": pa.decimal128(12, 2), "d": pa.date32()}, {"o": pa.string()}),
    "nanoseconds": ({"k": pa.timestamp("ns")}, {"o": pa.timestamp("ns"), "p": pa.decimal128(38, 10)}),
    "unsigned, boolean and zoned key": (
        {"k": pa.uint64(), "b": pa.bool_(), "z": pa.timestamp("us", tz="UTC")},
        {"o": pa.time64("us"), "p": pa.int8()},
    ),
    "small decimals and binary key": (
        {"k": pa.decimal32(5, 2), "l": pa.decimal64(15, 3), "b": pa.binary()},
        {"o": pa.duration("us"), "p": pa.decimal32(5, 2)},
    ),
}


PARTITION_BY = {
    "text key, float order": [],
    "composite key, two orders": [f"bucket({PARTITIONS}, n, k) as part"],
}
"""Of these tables; the others have a column `part`."""
VERSIONS = ("composite key, two orders", "nanoseconds")
"""The tables whose rows have their batches."""


def spec_of(key: dict[str, Any], order: dict[str, Any], types: Iterable[Any] = VALUES, **declared: Any) -> TableSpec:
    declared = {"partition_by": ["part"], **declared}
    payload = [pa.field(f"v{i}", type_) for i, type_ in enumerate(types)]
    columns = [pa.field(n, t) for n, t in {**key, **order}.items()]
    part = [pa.field("part", pa.int32())] if declared["partition_by"] == ["part"] else []
    schema = pa.schema([*columns, *part, *payload])
    return create(
        schema,
        table_id="t",
        key=list(key),
        order_by=list(order),
        delete=DeleteRule(column="op", values=("D",)),
        stamped=False,
        **declared,
    )


def generated(spec: TableSpec, rng: random.Random, file: int, partition: str) -> Any:
    """Up to 40 rows of one landing file, ready to be settled."""
    n = rng.choice([0, 1, 5, 40])
    columns = {}
    for field in spec.stored_schema:
        values = VALUES[field.type]
        nulls = [] if field.name in spec.key else [None]
        columns[field.name] = pa.array([rng.choice([*values, *nulls]) for _ in range(n)], field.type)
    columns[DELETE_FLAG] = pa.array([rng.random() < 0.2 for _ in range(n)], pa.bool_())
    columns[FILE] = pa.array([file] * n, pa.int32())
    columns[PLACE] = pa.array(range(n), pa.int64())
    columns[PARTITION] = pa.array([partition] * n, pa.string())
    schema = pa.schema([*spec.ranked_schema, pa.field(PARTITION, pa.string())])
    return pa.table(columns, schema=schema)


def appended(
    store: LocalStore, spec: TableSpec, rng: random.Random, count: int = PARTITIONS
) -> dict[str, tuple[DataFile, ...]]:
    """One batch for each of ``count`` partitions, or tables without partitions. Sometimes it comes in two calls, as from two
    tasks: then a key is in two files."""
    job = AppendJob(store, store, (), Reading(), RowRules(spec, 0), "b", 0, 0)
    files: dict[str, tuple[DataFile, ...]] = {}
    names = [f"part={p}" for p in range(count)]
    for file in range(2):
        for together in [names] if spec.partition_by else [[name] for name in names]:
            tables = [generated(spec, rng, file, p if spec.partition_by else WHOLE_TABLE) for p in together]
            for done in settle_and_write(job, tables):
                name = done.partition if spec.partition_by else together[0]
                files[name] = files.get(name, ()) + done.files
    return files


def stated(store: LocalStore, spec: TableSpec, partition: str, out: MergeOutput, number: int) -> tuple[DataFile, ...]:
    """The batch of an update of what a merge left of a partition, or of a delete."""
    shown_as = {partition: PartitionVersion(version=-1, merged=1, rows=0, bytes=0, files=1, write_id="")}
    pinned = {partition: [BucketEntry(id="", base=out.written)]}
    view = View(TableObjects(store), spec, Snapshot(batch=1, spec_version=0, partitions=shown_as), None, pinned)
    job = AppendJob(store, store, (), Reading(), RowRules(spec, 0), "b", 0, 0)
    changes = Changes(spec, Assignments(spec.schema, SET) if number % 2 else None, job)
    for chosen in RowChoice(view, WHERE, None).rows():
        changes.add(chosen)
    changes.flush()
    return tuple(file for touched in touched_by(changes.reports).values() for file in touched.files)


@cache
def rows(store: LocalStore, files: tuple[DataFile, ...], schema: Any) -> list[str]:
    """Rows in their order; repr, so that NaN equals NaN and 0.0 is not -0.0."""
    return [repr(r) for f in files for r in read_file(store, f, schema).to_pylist()]


WHERE, SET = "v4 = true OR v5 < 0", {"v0": "upper(v0)", "v4": "NOT v4", "v19": "NULL"}
SOME = ("composite key, two orders",)
"""In `make test`, with half of the partitions."""


@pytest.mark.core
@pytest.mark.parametrize("name", [*SOME, *(pytest.param(n, marks=pytest.mark.long) for n in TABLES if n not in SOME)])
def test_engines_agree_on_generated_tables(
    name: str, tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "MOST_PART_BITS", 2)
    rng = random.Random(name)
    spec = spec_of(*TABLES[name], partition_by=PARTITION_BY.get(name, ["part"]), versions=name in VERSIONS)
    spec = msgspec.structs.replace(spec, statements=True)
    store = LocalStore(tmp_path)
    count = PARTITIONS // 2 if name in SOME else PARTITIONS
    first, second, third = (appended(store, spec, rng, count) for _ in range(3))
    partitions = [f"part={p}" for p in range(count)]
    called = {p: p if spec.partition_by else WHOLE_TABLE for p in partitions}
    begun = [MergeTask(called[p], (), (), (first.get(p, ()),), 1, 0, numbers=(0, 1)) for p in partitions]
    half = len(begun) // 2
    stored = ArrowEngine().merge(store, spec, 0, begun[:half])
    monkeypatch.setattr(merge_writer, "INLINE_BYTES", 0)  # tombstones of the other half go into files
    stored += ArrowEngine().merge(store, spec, 0, begun[half:])
    between = [
        stated(store, spec, called[p], out, n) for n, (p, out) in enumerate(zip(partitions, stored, strict=True))
    ]
    assert sum(file.rows for files in between for file in files) > count
    seconds = [(said, second.get(p, ())) for p, said in zip(partitions, between, strict=True)]
    both = [(*batches, third.get(p, ())) for p, batches in zip(partitions, seconds, strict=True)]
    rewrites = [
        MergeTask(called[p], out.written, out.tombstones, batches, 4, 1, numbers=(1, 2, 3, 4))
        for p, out, batches in zip(partitions, stored, both, strict=True)
    ]
    assert len([f for t in rewrites for f in t.tombstones if f.name]) >= 3, "the generator makes too few deletes"
    assert len([f for t in rewrites for f in t.tombstones if f.inline]) >= 3
    unsettled = [
        MergeTask(called[p], first.get(p, ()), (), (second.get(p, ()),), 2, 1, settled=False, numbers=(0, 2))
        for p in partitions[: count // 5]
    ]
    merged = agreed(store, spec, [*rewrites, *unsettled])
    agreed_when_cut(store, spec, unsettled, merged[len(rewrites) :])

    # A split: both halves together are the whole.
    halves = [replace(task, bucket=b, bits=1) for task in [*rewrites, *unsettled] for b in (0, 1)]
    for whole, *of_it in zip(merged, *[iter(agreed(store, spec, halves))] * 2, strict=True):
        for name_of, schema in (("written", spec.base_schema), ("tombstones", spec.tombstone_schema)):
            found = [r for half in of_it for r in rows(store, getattr(half, name_of), schema)]
            assert sorted(found) == sorted(rows(store, getattr(whole, name_of), schema))
        assert sum(half.superseded for half in of_it) == whole.superseded
        assert add_digests(half.superseded_digest for half in of_it) == whole.superseded_digest
        assert add_digests(half.adopted for half in of_it) == whole.adopted
        assert {f.bucket for f in of_it[1].written} <= {1}
    del merged[len(rewrites) :]

    # The same by deltas, and where there are two, some of them folded: in the end the same rows live.
    deltas = [
        MergeTask(called[p], (), out.tombstones, batches, 3, 1, kept=out.written, numbers=(1, 2, 3))
        for p, out, batches in zip(partitions, stored, seconds, strict=True)
    ]
    thirds = []
    for p, task, out in zip(partitions, deltas, agreed(store, spec, deltas), strict=True):
        folded = rng.choice([(), out.written]) if task.kept and out.kept else ()
        kept = (*out.kept, *(f for f in out.written if f not in folded))
        batch = third.get(p, ())
        thirds.append(
            MergeTask(task.partition, (), out.tombstones, (batch,), 4, 2, deltas=folded, kept=kept, numbers=(3, 4))
        )
    assert len([t for t in thirds if t.deltas]) >= 3
    assert len([t for t in thirds if len(t.kept) > 1]) >= 3
    for rewritten, task, twice in zip(merged, thirds, agreed(store, spec, thirds), strict=True):
        live = rows(store, (*twice.kept, *twice.written), spec.base_schema)
        assert sorted(live) == sorted(rows(store, rewritten.written, spec.base_schema)), task
        buried = [rows(store, out.tombstones, spec.tombstone_schema) for out in (twice, rewritten)]
        assert buried[0] == buried[1], task


def agreed(store: LocalStore, spec: TableSpec, tasks: list[MergeTask]) -> list[MergeOutput]:
    """What both engines make of the tasks, and of each third task engine arrow in parts, and in Spark's tasks."""
    from lakeupsert.engine.hosted import HostedEngine
    from lakeupsert.engine.spark_host import SparkHost
    from lakeupsert.engine.spark_window import SparkEngine

    one = ArrowEngine().merge(store, spec, 0, tasks)
    other = SparkEngine().merge(store, spec, 0, tasks)
    some = tasks[::3]
    in_parts = ArrowEngine(memory_limit=0).merge(store, spec, 0, some)
    in_tasks = HostedEngine(SparkHost(), None).merge(store, spec, 0, some)
    for task, a, *others in zip(some, one[::3], in_parts, in_tasks, strict=True):
        for c in others:
            assert rows(store, a.written, spec.base_schema) == rows(store, c.written, spec.base_schema), task
            assert rows(store, a.tombstones, spec.tombstone_schema) == rows(store, c.tombstones, spec.tombstone_schema)
            assert (a.superseded_digest, a.adopted, a.changes) == (c.superseded_digest, c.adopted, c.changes)
    for task, a, b in zip(tasks, one, other, strict=True):
        for found, expected in ((a.kept, b.kept), (a.written, b.written)):
            assert rows(store, found, spec.base_schema) == rows(store, expected, spec.base_schema), task
        assert [f.name for f in a.kept] == [f.name for f in b.kept], task
        assert rows(store, a.tombstones, spec.tombstone_schema) == rows(store, b.tombstones, spec.tombstone_schema), (
            task
        )
        assert (a.superseded, a.superseded_digest, a.adopted) == (b.superseded, b.superseded_digest, b.adopted)
        assert (a.adopted is None) == task.settled
    return one


def agreed_when_cut(store: LocalStore, spec: TableSpec, unsettled: list[MergeTask], merged: list[MergeOutput]) -> None:
    """Engines make the same of adopted and appended files that were cut into four pieces, for both halves of a partition."""
    halves = []
    for task in unsettled:

        def pieces(kind: Kind, files: tuple[DataFile, ...], task: MergeTask = task) -> tuple[DataFile, ...]:
            order = CutTask(task.partition, kind, files, first=0, bits=2, up_to=2, start=1)
            return cut(store, spec, 0, None, order).files if files else ()

        base, *batches = pieces("adopted", task.base), *(pieces("appended", files) for files in task.batches)
        for half in (Part(0, 1), Part(1, 1)):

            def own(files: tuple[DataFile, ...], half: Part = half) -> tuple[DataFile, ...]:
                return tuple(part for file in files if (part := file.within(half)).rows)

            of_half = replace(
                task, bucket=half.bucket, bits=1, base=own(base), batches=tuple(map(own, batches)), cut=True
            )
            halves.append(of_half)
    for whole, *of_it in zip(merged, *[iter(agreed(store, spec, halves))] * 2, strict=True):
        found = [r for half in of_it for r in rows(store, half.written, spec.base_schema)]
        assert sorted(found) == sorted(rows(store, whole.written, spec.base_schema))
        assert add_digests(half.adopted for half in of_it) == whole.adopted
        assert add_digests(half.superseded_digest for half in of_it) == whole.superseded_digest


def test_engines_agree_on_versions_that_full_extracts_end(tmp_path: Path, spark: Any) -> None:
    """Most keys are lacking in an extract, so many have no living row, also the last key that Spark hands over."""
    from lakeupsert.engine.spark_window import SparkEngine

    rng = random.Random(1)
    spec = spec_of({"k": pa.string()}, {"o": pa.int8()}, [pa.int64()], history=True, ties="content")
    store = LocalStore(tmp_path)
    batches = [appended(store, spec, rng) for _ in range(4)]
    low, high = (str(greatest_floor([], pa.table({"o": pa.array([o], pa.int8())}), spec)) for o in (0, 127))
    tasks = [
        MergeTask(
            part,
            (),
            (),
            tuple(batch.get(part, ()) for batch in batches),
            4,
            0,
            full=(Extract(2, low), Extract(4, high)),
            numbers=(0, 1, 2, 3, 4),
        )
        for part in (f"part={p}" for p in range(PARTITIONS))
    ]
    one, other = (engine.merge(store, spec, 0, tasks) for engine in (ArrowEngine(), SparkEngine()))
    for task, a, b in zip(tasks, one, other, strict=True):
        assert sorted(rows(store, a.history, spec.history_schema)) == sorted(
            rows(store, b.history, spec.history_schema)
        ), task
        assert (a.superseded, a.superseded_digest, a.changes) == (b.superseded, b.superseded_digest, b.changes)
    assert sum(f.rows for out in one for f in out.history) > PARTITIONS
    assert sum(out.changes.newer_than_extract for out in one) > 5


def test_extracts_in_one_merge_make_what_they_make_one_by_one(tmp_path: Path, spark: Any) -> None:
    """Six batches, of which two to four are full extracts of either kind. Where deletes are forgotten, only engines are compared:
    one by one, a delete that is forgotten meets no later row."""
    from lakeupsert.engine.spark_window import SparkEngine

    rng = random.Random(2)
    spec = spec_of({"k": pa.string()}, {"o": pa.int8()}, [pa.int64()])
    store = LocalStore(tmp_path)
    batches = [appended(store, spec, rng) for _ in range(6)]
    orders = {o: str(greatest_floor([], pa.table({"o": pa.array([o], pa.int8())}), spec)) for o in (-128, 0, 127)}
    tasks, stepwise = [], []
    for part in (f"part={p}" for p in range(PARTITIONS)):
        full = {
            age: Extract(age, orders[rng.choice([-128, 0, 127])], rng.random() < 0.5)
            for age in sorted(rng.sample(range(2, 7), rng.choice([2, 3, 4])))
        }
        kept = rng.choice([None, 0, 15])
        received = [(10 * age, kept) for age in range(1, 7)]
        out = MergeOutput((), (), 0)
        for age, batch in enumerate(batches, 1):
            task = MergeTask(
                part,
                out.written,
                out.tombstones,
                (batch.get(part, ()),),
                age,
                age,
                full=(replace(full[age], age=1),) if age in full else (),
                floors=(out.floor,) if out.floor and not (age in full and full[age].replaces) else (),
                forgets=Forgetting((received[age - 1],)) if kept is not None else None,
            )
            [out] = ArrowEngine().merge(store, spec, 0, [task])
        stepwise.append(out)
        tasks.append(
            MergeTask(
                part,
                (),
                (),
                tuple(batch.get(part, ()) for batch in batches),
                6,
                0,
                full=tuple(full.values()),
                forgets=Forgetting(tuple(received)) if kept is not None else None,
            )
        )
    both = (ArrowEngine().merge(store, spec, 0, tasks), SparkEngine().merge(store, spec, 0, tasks))
    for task, a, b, step in zip(tasks, *both, stepwise, strict=True):
        for other in (b, *([step] if task.forgets is None else [])):
            assert rows(store, a.written, spec.stored_schema) == rows(store, other.written, spec.stored_schema), task
            assert rows(store, a.tombstones, spec.tombstone_schema) == rows(
                store, other.tombstones, spec.tombstone_schema
            ), task
        assert (a.superseded, a.superseded_digest, a.changes, a.floor) == (
            b.superseded,
            b.superseded_digest,
            b.changes,
            b.floor,
        )
    assert sum(f.rows for out in both[0] for f in out.written) > PARTITIONS
