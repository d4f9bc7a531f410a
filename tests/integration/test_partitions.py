"""Tables of one partition, and partitions by hash of the key: where rows lie, what every command makes of it, what is refused."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from click.testing import CliRunner
from pyarrow import orc

from lakeupsert import Table, clock
from lakeupsert.cli import main
from lakeupsert.errors import ConfigurationError
from lakeupsert.landing.partitions import derived_columns
from lakeupsert.operations.init import apart
from lakeupsert.operations.init.buckets import propose_count
from lakeupsert.operations.init.propose import propose
from lakeupsert.pipeline import strategy
from lakeupsert.pipeline.merge import cuts
from lakeupsert.queue import Message
from lakeupsert.read.view import View, partitions_of
from lakeupsert.rows.buckets import buckets, key_hashes
from lakeupsert.storage import LocalStore
from lakeupsert.table.layout import WHOLE_TABLE, TableObjects
from lakeupsert.table.manifest import BucketEntry, DataFile
from lakeupsert.table.snapshot import PartitionVersion, Snapshot
from tests.harness.lake import DAY, Lake, row
from tests.harness.model import hash_of
from tests.harness.specs import create

WHOLE: tuple[str, ...] = ()
HASHED = ("bucket(4, k)",)
BELOW = ("d", "bucket(2, k, l)")
KINDS = [WHOLE, HASHED, BELOW]
KEYS = [f"k{i}" for i in range(24)]


def nights(lake: Lake) -> Lake:
    """New rows, updates, deletes, late rows."""
    lake.land("0.jsonl", [row(k, i % 3, 5, i) for i, k in enumerate(KEYS)])
    lake.run()
    changed = [row(k, i % 3, 6 + i % 2, 100 + i) for i, k in enumerate(KEYS) if i % 3 == 0]
    gone = [row(k, i % 3, 9, op="D") for i, k in enumerate(KEYS) if i % 5 == 0]
    lake.land("1.jsonl", [*changed, *gone, row("k1", 1, 1, -1)])
    lake.run()
    return lake


def call(lake: Lake, *args: str, code: int = 0) -> Any:
    """The result of a command; with another ``code``, its error."""
    done = CliRunner().invoke(main, [*args, "--config", str(lake.root / "lakeupsert.toml"), "--json"])
    assert done.exit_code == code, done.output
    answer = json.loads(done.stdout)
    return answer["error"] if code == 2 else answer["result"]


def texts(lake: Lake, *args: str) -> str:
    done = CliRunner().invoke(main, [*args, "--config", str(lake.root / "lakeupsert.toml")])
    assert done.exit_code == 0, done.output
    return done.stdout


# ---------------------------------------------------------------- every command


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("partition_by", KINDS, ids=str)
@pytest.mark.parametrize("chosen", ["rewrite", "delta"])
def test_life_of_a_table(
    folder: Path, partition_by: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategy, "SMALL_BYTES", 0)
    lake = nights(Lake(folder / "lake", partition_by=partition_by, strategy=chosen, keep_snapshots=1))
    lake.configure()
    lake.check()
    view = lake.table.view()
    partitions = list(view.snapshot.partitions)
    assert {d["partition"] for d in call(lake, "reconcile", "--deep")["proof"]} == set(partitions)
    assert call(lake, "status")["partitions"] == len(partitions)
    for command in ("status", "history", "plan", "report", "schema", "head"):
        texts(lake, command, *(["--output", str(folder / "report.html")] if command == "report" else []))
    lake.table.reprocess(source="landing", host="local")
    lake.table.reprocess()
    lake.check()
    lake.table.compact(full=True)
    lake.check()
    lake.table.restore(0, dry=False)
    lake.run()
    lake.check()
    lake.table.append(host="local", again=True)
    lake.run()
    lake.check()
    found = lake.table.explain({"k": "k3", "l": 0})
    assert [one.partition for one in found.partitions] == [p for p in partitions if lake_partition(lake, "k3", 0) == p]
    assert lake.table.diff(lake.table.snapshots()[-1].number, "published").deleted >= 0
    for days in (0, 9, 18):
        with clock.use(later(days=days)):
            lake.table.vacuum(dry=False)
    assert lake.stored_files() == {name for p in partitions for name in objects_of(lake, p)}
    lake.check()
    everything = {row_text(r) for r in lake.rows()}
    assert {row_text(r) for r in lake.table.to_duckdb(duckdb.connect()).to_arrow_table().to_pylist()} == everything
    assert {row_text(r) for r in lake.table.to_polars().collect().to_arrow().to_pylist()} == everything
    assert len(lake.table.to_pandas()) == len(everything)
    assert len(lake.table.query("SELECT * FROM t").read_all()) == len(everything)


def objects_of(lake: Lake, partition: str) -> set[str]:
    """What the partition's newest version needs."""
    head = lake.table.objects.partition(partition).head()
    assert head is not None
    return {name for bucket in head.body.buckets for name in bucket.objects}


def lake_partition(lake: Lake, k: str, day: int, line: int = 0) -> str:
    """Where docs/FORMAT.md says that a row is."""
    complete = lake.rules.complete(row(k, day, 0, line=line))
    return "/".join(f"{c}={complete[c]}" for c in lake.rules.partition) or WHOLE_TABLE


def row_text(one: Mapping[str, Any]) -> str:
    return repr(sorted((name, str(value)) for name, value in one.items()))


def later(**time: float) -> clock.Source:
    class Later(clock.Source):
        def now(self) -> Any:
            return super().now() + timedelta(**time)

    return Later()


@pytest.mark.parametrize("partition_by", KINDS, ids=str)
def test_statements_find_their_rows(folder: Path, partition_by: tuple[str, ...]) -> None:
    lake = nights(Lake(folder / "lake", partition_by=partition_by))
    before = {r["k"]: r["v"] for r in lake.rows()}
    keys = folder / "keys.csv"
    keys.write_text("k,l\nk1,0\nk2,0\n")
    assert sum(lake.table.update({"v": "v * 10"}, where="k IN ('k3', 'k4')", dry=False).rows.values()) == 2
    assert sum(lake.table.delete(keys=keys, dry=False).rows.values()) == 2
    expected = {k: v * (10 if k in ("k3", "k4") else 1) for k, v in before.items() if k not in ("k1", "k2")}
    assert {r["k"]: r["v"] for r in lake.rows()} == expected
    assert not lake.table.reconcile(deep=True).unbalanced


@pytest.mark.parametrize(
    "partition_by", [*(pytest.param(k, marks=pytest.mark.long) for k in (WHOLE, HASHED)), BELOW], ids=str
)
def test_every_reader_and_spark_agree(folder: Path, partition_by: tuple[str, ...], spark: Any) -> None:
    lake = nights(Lake(folder / "lake", partition_by=partition_by, strategy="delta", engine="spark"))
    lake.check()
    for where in (None, "k = 'k3'", "d = '2020-01-02' AND k IN ('k1', 'k4') AND l = 0", "v > 100"):
        ours = {row_text(r) for r in lake.table.to_arrow(where=where).read_all().to_pylist()}
        assert {row_text(r.asDict()) for r in lake.table.to_spark(spark, where=where).collect()} == ours
        found = lake.table.to_duckdb(duckdb.connect(), where=where).to_arrow_table().to_pylist()
        assert {row_text(r) for r in found} == ours
        assert {row_text(r) for r in lake.table.to_polars(where=where).collect().to_arrow().to_pylist()} == ours
    lake.land("2.jsonl", [row("k3", 0, 99, 7)])
    lake.table.run(host="spark")
    lake.check()


# ---------------------------------------------------------------- one partition


def test_plan_counts_the_rows_of_every_format(folder: Path) -> None:
    lake = Lake(folder / "lake", partition_by=WHOLE, delete=None)
    rows = pa.table({"k": KEYS, "l": [0] * 24, "ts": pa.array(range(24), pa.timestamp("us"))})
    pq.write_table(rows, folder / "lake/landing/a.parquet")
    orc.write_table(rows.slice(0, 7), folder / "lake/landing/b.orc")
    lake.land("c.jsonl", [row("z", 0, 1)])
    plan = lake.table.plan()
    assert [(p.partition, p.rows) for p in plan.partitions] == [(WHOLE_TABLE, 32)]
    lake.table.run(host="local")
    assert "no partition columns" in lake.table.report()


def test_the_one_partition_has_a_name_and_its_base_files_lie_in_the_tables_folder(folder: Path) -> None:
    lake = nights(Lake(folder / "lake", partition_by=WHOLE))
    lake.configure()
    assert list(lake.table.view().snapshot.partitions) == [WHOLE_TABLE]
    processed = Path(lake.settings.processed)
    base = [f.name for f in lake.table.files()]
    assert base
    assert all(re.fullmatch(r"base-\d+-\w{32}\.parquet", name) for name in base)
    assert (processed / "_lakeupsert/partitions" / WHOLE_TABLE).is_dir()
    footer = pq.read_metadata(processed / base[0]).metadata
    assert footer[b"lakeupsert.partition"].decode() == WHOLE_TABLE
    lake.land("2.jsonl", [row("k1", 0, 99, 7)])
    assert call(lake, "plan")["partitions"][0]["partition"] == WHOLE_TABLE
    lake.table.append(host="local")
    (lease,) = lake.opened.resources.queue.receive(10, 60)
    assert lease.message == Message("t", WHOLE_TABLE, 3)
    lake.opened.resources.queue.ack(lease)
    merged = call(lake, "dedupe", "--partition", WHOLE_TABLE)
    assert [one["partition"] for one in merged["partitions"]] == [WHOLE_TABLE]
    lake.check()


def test_a_listing_of_the_folder_is_exact_after_upkeep(folder: Path) -> None:
    lake = nights(Lake(folder / "lake", partition_by=WHOLE, keep_snapshots=1, superseded_retention="0s"))
    lake.table.compact(full=True)
    lake.table.vacuum(dry=False)
    listed = duckdb.sql(f"SELECT * FROM read_parquet('{lake.settings.processed}/*.parquet')").to_arrow_table()
    assert {row_text(r) for r in listed.to_pylist()} == {row_text(r) for r in lake.rows()}


def test_a_flat_folder_is_adopted_as_it_is(folder: Path) -> None:
    lake = Lake(folder / "lake", partition_by=WHOLE, keep_snapshots=1, superseded_retention="0s")
    lake.lay("a.parquet", [row("a", 0, 1, 1), row("b", 1, 1, 2), row("a", 1, 2, 3)])
    lake.lay("part-0.snappy.parquet", [row("c", 0, 1, 4), row("b", 0, 0, 5)])
    processed = Path(lake.settings.processed)
    (processed / "README.md").write_text("notes")
    before = {path.name: path.read_bytes() for path in processed.iterdir()}
    adopted = lake.table.adopt()
    assert (adopted.files, adopted.partitions, adopted.rows, adopted.left) == (2, 1, 5, ("README.md",))
    assert {name: (processed / name).read_bytes() for name in before} == before
    assert len(lake.rows()) == 5
    lake.check()
    lake.land("1.jsonl", [row("a", 2, 9, 6), row("d", 0, 1, 7)])
    lake.run()
    lake.check()
    assert {r["k"]: r["v"] for r in lake.rows()} == {"a": 6, "b": 2, "c": 4, "d": 7}
    with clock.use(later(days=9)):
        lake.table.vacuum(dry=False)
        lake.table.vacuum(dry=False)
    assert {path.name for path in processed.iterdir() if path.is_file()} == {
        "README.md",
        *(f.name for f in lake.table.files()),
    }


def test_what_a_flat_folder_must_not_hold(folder: Path) -> None:
    lake = Lake(folder / "lake", partition_by=WHOLE)
    lake.lay("2020/a.parquet", [row("a", 0, 1)])
    with pytest.raises(ConfigurationError) as raised:
        lake.table.adopt()
    assert raised.value.code == "not-partitioned"


def test_other_partitions_than_the_one_are_refused(folder: Path) -> None:
    lake = nights(Lake(folder / "lake", partition_by=WHOLE))
    lake.configure()
    for args in (["--partition", "2020-01-01"], ["--partition", "d=2020-01-01"], ["--from", "2020-01-01"]):
        assert call(lake, "reprocess", *args, code=2)["code"] == "not-a-partition"
    hashed = nights(Lake(folder / "hashed", partition_by=BELOW))
    hashed.configure()
    assert call(hashed, "reprocess", "--partition", WHOLE_TABLE, code=2)["code"] == "not-a-partition"
    assert call(hashed, "reprocess", "--partition", "2020-01-01", code=2)["code"] == "not-a-partition"
    whole = call(hashed, "reprocess", "--from", "2020-01-02", "--to", "2020-01-02")
    assert {one.split("/")[0] for one in whole["partitions"]} == {"d=2020-01-02"}
    one = lake_partition(hashed, "k1", 1)
    assert call(hashed, "reprocess", "--partition", one)["partitions"] == [one]


@pytest.mark.parametrize("partition_by", KINDS, ids=str)
def test_an_export_is_a_folder_that_any_engine_reads(folder: Path, partition_by: tuple[str, ...]) -> None:
    lake = nights(Lake(folder / "lake", partition_by=partition_by))
    lake.configure()
    target = folder / "export"
    for more in ([], ["--overwrite"]):
        call(lake, "export", "--output", f"{target}/", *more)
        listed = duckdb.sql(f"SELECT * FROM read_parquet('{target}/**/*.parquet', hive_partitioning = true)")
        assert listed.count("*").fetchall() == [(len(lake.rows()),)]
    assert (target / "part-0.parquet").exists() == (partition_by == WHOLE)


# ---------------------------------------------------------------- by hash


def test_rows_lie_where_the_format_says(folder: Path) -> None:
    lake = nights(Lake(folder / "lake", partition_by=("bucket(5, l, k) as part",)))
    for file in lake.table.files():
        (number,) = re.fullmatch(r"part=(\d)/base-.*", file.name).groups()  # type: ignore[union-attr]
        for one in pq.read_table(Path(lake.settings.processed) / file.name).to_pylist():
            assert hash_of([one["l"], one["k"]]) % 5 == int(number)
    assert {r["part"] for r in lake.rows()} == set(range(5))


def test_a_hash_of_every_type_is_recomputed_by_duckdb(folder: Path) -> None:
    """Where DuckDB has another type for a column, the canonical bytes are still those of the spec's."""
    n = 40
    numbers = pa.array(range(n), pa.int64())
    columns = {
        "text": pa.array([f"ä{i}" * (i % 5) for i in range(n)]),
        "raw": pa.array([bytes([i, 0, 255]) for i in range(n)]),
        "small": pa.array([i - 20 for i in range(n)], pa.int8()),
        "unsigned": pa.array([2**64 - 1 - i for i in range(n)], pa.uint64()),
        "flag": pa.array([i % 2 == 0 for i in range(n)]),
        "day": pa.array([i * 400 for i in range(n)], pa.int32()).view(pa.date32()),
        "at": numbers.view(pa.timestamp("us", "UTC")),
        "seconds": numbers.view(pa.timestamp("s")),
        "nanos": pa.array([i * 10**15 + i for i in range(n)], pa.int64()).view(pa.timestamp("ns")),
        "price": pa.array([Decimal(i).scaleb(-2) - 10 for i in range(n)], pa.decimal128(12, 2)),
        "digits": pa.array([Decimal(10**30 + i) for i in range(n)], pa.decimal128(38, 0)),
    }
    partition_by = (f"bucket(7, {', '.join(columns)}) as all_of_them",)
    lake = Lake(folder / "lake", key=tuple(columns), partition_by=partition_by, schema={}, delete=None)
    pq.write_table(pa.table({**columns, "ts": numbers}), folder / "lake/landing/a.parquet")
    lake.table.run(host="local")
    assert len(lake.table.view().snapshot.partitions) == 7
    found = lake.table.reconcile(deep=True).recomputed
    assert found is not None
    assert len(found.partitions) == 7
    assert all(one.equal for one in found.partitions.values())
    assert lake.table.to_arrow(where="small = -20 AND flag").read_all().num_rows == 1


def test_a_partition_still_spreads_over_its_buckets() -> None:
    """Partitions take the hash modulo their number, buckets its high bits."""
    fields = pa.schema([("k", pa.int64()), ("ts", pa.int64())])
    for count in (64, 100):
        spec = create(
            fields,
            table_id="t",
            key=["k"],
            order_by=["ts"],
            partition_by=[f"bucket({count}, k)"],
            delete=None,
            stamped=False,
        )
        keys = pa.array(range(count * 4000))
        partitions = derived_columns(spec, {"k": keys})["k_bucket"].to_numpy()
        numbers = buckets(key_hashes(pa.table({"k": keys, "ts": keys}), spec), 3)
        table = pa.table({"p": partitions, "b": numbers}).group_by(["p", "b"]).aggregate([([], "count_all")])
        assert len(table) == count * 8
        found = table["count_all"].to_numpy()
        assert found.min() > 0.7 * found.mean()
        assert found.max() < 1.3 * found.mean()


@pytest.mark.long
def test_a_hash_partition_is_split_into_buckets(folder: Path, tiny_files_split: None) -> None:
    lake = Lake(folder / "lake", partition_by=("bucket(3, k)",), bucket="4KiB")
    lake.land("0.jsonl", [row(f"k{i:05}", 0, 1, i) for i in range(6000)])
    lake.run()
    for partition in lake.table.view().snapshot.partitions:
        head = lake.table.objects.partition(partition).head()
        assert head is not None
        assert len(head.body.buckets) >= 4
        assert all(bucket.data for bucket in head.body.buckets)
    lake.check()


def test_a_key_that_moves_between_dates_keeps_its_hash(folder: Path) -> None:
    lake = Lake(folder / "lake", partition_by=("d", "bucket(3, k)"), key_scope="table")
    for night, day in enumerate((0, 2, 1)):
        lake.land(f"{night}.jsonl", [row(k, (day + i) % 3, night, i) for i, k in enumerate(KEYS)])
        lake.run()
        lake.check()
    assert len(lake.rows()) == len(KEYS)


@pytest.mark.parametrize(
    ("settings", "code", "told"),
    [
        ({"partition_by": ("bucket(0, k)",)}, "bad-setting", "0 buckets"),
        ({"partition_by": ("bucket(65537, k)",)}, "bad-setting", "65,537 buckets"),
        ({"partition_by": ("bucket(4, k, k)",)}, "bad-setting", "twice"),
        ({"partition_by": ("bucket(4, v)",)}, "bad-setting", "'v' is not in `key`"),
        ({"partition_by": ("d", "bucket(4, d)"), "key": ("d", "k")}, "bad-setting", "partition column itself"),
        ({"partition_by": ("bucket(4, nothing)",), "key": ("nothing",)}, "missing-column", "nothing"),
        ({"partition_by": ("bucket(k, 4)",)}, "missing-column", "bucket(N, COLUMN, …)"),
        ({"partition_by": ("bucket(4, k)", "bucket(8, k)")}, "bad-setting", "k_bucket"),
        ({"partition_by": ("bucket(4, k) as v",)}, "partition-in-files", "'v'"),
        ({"partition_by": HASHED, "key_scope": "table"}, "bad-setting", "no effect"),
        ({"partition_by": WHOLE, "key_scope": "table"}, "bad-setting", "no effect"),
    ],
)
def test_what_can_not_be_partitioned(folder: Path, settings: dict[str, Any], code: str, told: str) -> None:
    lake = Lake(folder / "lake")
    lake.land("0.jsonl", [row("a", 0, 1)])
    table = Table("t", msgspec.structs.replace(lake.settings, **settings))
    with pytest.raises(ConfigurationError, match=re.escape(told)) as raised:
        table.run(host="local")
    assert raised.value.code == code
    assert not (folder / "lake/processed/_lakeupsert/ledger").exists()


def test_another_number_is_another_table(folder: Path) -> None:
    lake = nights(Lake(folder / "lake", partition_by=HASHED))
    for other in (("bucket(8, k)",), ("bucket(4, k) as part",), WHOLE, ("bucket(4, k, l) as k_bucket",)):
        with pytest.raises(ConfigurationError) as raised:
            Table("t", msgspec.structs.replace(lake.settings, partition_by=other)).run(host="local")
        assert raised.value.code == "another-table"


def test_rows_that_bring_the_hash_or_lack_a_key(folder: Path) -> None:
    lake = nights(Lake(folder / "lake", partition_by=HASHED))
    lake.land("2.jsonl", [row("z", 0, 1)], [{**row("y", 0, 1), "k_bucket": 3}])
    lake.run()
    lake.check()
    assert lake.entries()[-1][1].quarantined == {"bad_type": 1}
    lake.land("3.jsonl", [row("x", 0, 1)], [{**row("y", 0, 1), "k": None}])
    lake.run()
    assert lake.entries()[-1][1].quarantined == {"null_key": 1}
    lake.check()


def test_hashes_of_others_are_not_adopted(folder: Path) -> None:
    lake = Lake(folder / "lake", partition_by=HASHED)
    target = folder / "lake/processed/k_bucket=1/a.parquet"
    target.parent.mkdir(parents=True)
    pq.write_table(pa.table({"k": ["a"], "l": [1], "ts": pa.array([0], pa.timestamp("us"))}), target)
    with pytest.raises(ConfigurationError) as raised:
        lake.table.adopt()
    assert raised.value.code == "hashed-folders"


# ---------------------------------------------------------------- what readers open

DAYS = 545
BY_DAY = 4


@pytest.fixture(scope="module")
def large(module_folder: Path) -> View:
    """545 days of four partitions each. Every one has a file, which is one and the same: a row of key 7."""
    schema = pa.schema([("order_id", pa.int64()), ("d", pa.date32()), ("ts", pa.int64()), ("v", pa.int64())])
    spec = create(
        schema,
        table_id="t",
        key=["order_id"],
        order_by=["ts"],
        partition_by=["d", f"bucket({BY_DAY}, order_id)"],
        delete=None,
        stamped=False,
    )
    names = [f"d={DAY + timedelta(days=day)}/order_id_bucket={n}" for day in range(DAYS) for n in range(BY_DAY)]
    shown = {name: PartitionVersion(version=0, merged=1, rows=1, bytes=1, files=1, write_id="") for name in names}
    pinned = {
        name: [BucketEntry(id="", base=(DataFile(name=f"{name}/base-0-{i:032x}.parquet", rows=1, bytes=900),))]
        for i, name in enumerate(names)
    }

    one = module_folder / "one.parquet"
    pq.write_table(pa.table({"order_id": [7], "ts": [1], "v": [4]}, spec.stored_schema), one)
    for name, (bucket,) in pinned.items():
        (module_folder / name).mkdir(parents=True)
        (module_folder / bucket.base[0].name).hardlink_to(one)
    objects = TableObjects(LocalStore(module_folder))
    return View(objects, spec, Snapshot(batch=1, spec_version=0, partitions=shown), 0, pinned)


def bucket_of(key: int) -> int:
    return int(xxhash.xxh64_intdigest(key.to_bytes(8, "little", signed=True))) % BY_DAY


@pytest.mark.parametrize(
    ("where", "days", "keys"),
    [
        ("order_id = 7", DAYS, [7]),
        ("7 = order_id", DAYS, [7]),
        ("order_id = 7 AND d = '2020-03-01'", 1, [7]),
        ("order_id IN (7, 8, 9) AND d BETWEEN '2020-01-10' AND '2020-01-19'", 10, [7, 8, 9]),
        ("(order_id = 7 OR order_id = -8) AND d >= '2021-01-01'", DAYS - 366, [7, -8]),
        ("order_id = 7 AND v > 3 AND NOT order_id = 8", DAYS, [7]),
        ("order_id = 7 AND order_id = 8", 0, []),
        ("order_id = 7 OR v = 3", DAYS, None),
        ("NOT order_id = 7", DAYS, None),
        ("NOT (order_id <> 7)", DAYS, [7]),
        ("order_id > 7 AND order_id < 9", DAYS, None),
        ("order_id <> 7", DAYS, None),
        ("order_id NOT IN (7)", DAYS, None),
        ("order_id = ts", DAYS, None),
        ("order_id IS NULL", DAYS, None),
        ("order_id_bucket = 2 AND d < '2020-01-11'", 10, None),
    ],
)
def test_files_of_a_filter_at_545_dates_of_four(large: View, where: str, days: int, keys: Sequence[int] | None) -> None:
    wanted = {bucket_of(key) for key in keys} if keys is not None else set(range(BY_DAY))
    if "order_id_bucket" in where:
        wanted = {2}
    found = [file.partition for file in large.files(where)]
    assert len(found) == len(set(found)) == days * len(wanted)
    assert {int(name.rpartition("=")[2]) for name in found} == (wanted if days else set())


def test_a_hash_of_two_columns_needs_both() -> None:
    schema = pa.schema([("a", pa.string()), ("b", pa.int32()), ("ts", pa.int64())])
    spec = create(
        schema,
        table_id="t",
        key=["a", "b"],
        order_by=["ts"],
        partition_by=["bucket(50, a, b)"],
        delete=None,
        stamped=False,
    )
    names = [f"a_bucket={n}" for n in range(50)]
    for where, keys in (
        ("a = 'x' AND b IN (1, 2)", [("x", 1), ("x", 2)]),
        ("a IN ('x', 'y') AND b = 1 AND ts > 0", [("x", 1), ("y", 1)]),
        ("a = 'x'", None),
        ("b = 1 OR a = 'x'", None),
    ):
        expected = names if keys is None else sorted({f"a_bucket={hash_of(key) % 50}" for key in keys})
        assert sorted(partitions_of(spec, names, where)) == sorted(expected), where


@pytest.fixture(scope="module")
def by_key(module_folder: Path) -> Lake:
    lake = Lake(module_folder / "by key", partition_by=("d", "bucket(4, k)"))
    lake.land("0.jsonl", [row(f"k{i}", day, 1, i) for day in range(5) for i in range(40)])
    lake.run()
    lake.configure()
    return lake


WHERE = "k = 'k7' AND d BETWEEN '2020-01-02' AND '2020-01-04'"


def folders(day: int = 0, end: int = 5) -> set[str]:
    number = hash_of(["k7"]) % 4
    return {f"d={DAY + timedelta(days=n)}/k_bucket={number}" for n in range(day, end)}


def test_readers_open_the_folders_of_a_key(by_key: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow, DuckDB, Polars, pandas, `files --where`, `explain`, exports and `latest`."""
    opened: list[str] = []
    store = by_key.table.objects.store

    def spy(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def spied(path: str, *args: Any, **more: Any) -> Any:
            if path.startswith("d="):
                opened.append(path.rpartition("/")[0])
            return call(path, *args, **more)

        return spied

    for name in ("open", "get"):
        monkeypatch.setattr(store, name, spy(name, getattr(store, name)))
    table = by_key.table
    readers: dict[str, Callable[[str], int]] = {
        "arrow": lambda where: table.to_arrow(where=where).read_all().num_rows,
        "duckdb": lambda where: table.to_duckdb(duckdb.connect(), where=where).count("*").fetchall()[0][0],
        "polars": lambda where: table.to_polars(where=where).collect().height,
        "pandas": lambda where: len(table.to_pandas(where=where)),
        "head": lambda where: table.head(9, where=where).num_rows,
    }
    for reader, read in readers.items():
        for where, wanted in ((WHERE, folders(1, 4)), ("k = 'k7'", folders())):
            opened.clear()
            assert read(where) == len(wanted), reader
            assert set(opened) == wanted, reader
    assert {f["partition"] for f in call(by_key, "files", "--where", WHERE)["files"]} == folders(1, 4)
    opened.clear()
    assert {one.partition for one in table.explain({"k": "k7", "l": 0}).partitions} == folders()
    assert set(opened) == folders()
    keys = by_key.root / "keys.csv"
    keys.write_text("k,l\nk7,0\n")
    opened.clear()
    assert sum(table.delete(keys=keys, dry=True).rows.values()) == len(folders())
    assert set(opened) == folders()
    with pytest.raises(ConfigurationError) as raised:
        table.to_duckdb(duckdb.connect(), where="nothing = 1")
    assert raised.value.code == "unfit-filter"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("where", "days", "keys"),
    [
        ("order_id = 7", DAYS, [7]),
        ("order_id = 7 AND d = '2020-03-01'", 1, [7]),
        ("order_id IN (7, 8, 9) AND d BETWEEN '2020-01-10' AND '2020-01-19'", 10, [7, 8, 9]),
        ("order_id > 6", DAYS, None),
    ],
)
def test_spark_plans_at_545_dates_of_four(
    large: View, where: str, days: int, keys: Sequence[int] | None, spark: Any
) -> None:
    from lakeupsert.read.spark import to_spark

    numbers = {bucket_of(key) for key in keys} if keys is not None else set(range(BY_DAY))
    frame = to_spark(spark, large, where=where)
    found = frame.inputFiles()
    assert {int(re.search(r"order_id_bucket=(\d)/", path)[1]) for path in found} == numbers  # type: ignore[index]
    assert len(found) == days * len(numbers)
    assert f"{len(found)} paths" in frame._jdf.queryExecution().executedPlan().toString()
    assert frame.count() == days * len(numbers)


@pytest.mark.long
def test_spark_plans_the_folders_of_a_key(by_key: Lake, spark: Any) -> None:
    for where, wanted in ((WHERE, folders(1, 4)), ("k = 'k7'", folders())):
        frame = by_key.table.to_spark(spark, where=where)
        assert {re.search(r"(d=.*)/base-", path)[1] for path in frame.inputFiles()} == wanted  # type: ignore[index]
        assert frame.count() == len(wanted)


# ---------------------------------------------------------------- how many


@pytest.mark.parametrize(
    ("size", "workers", "number"),
    [(0, 4, 1), (1000, 4, 1), (1001, 4, 4), (4001, 4, 8), (10_000, 3, 12), (1e12, 7, 65_536)],
)
def test_number_of_partitions(size: float, workers: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert propose_count(size, 1000 // cuts.ALONE_BUCKETS, workers) == number


@pytest.mark.long
def test_plan_says_if_another_number_would_suit_far_better(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakeupsert.operations.plan.plan.cores", lambda: 2)
    rows = [row(f"k{i}", 0, 1, i) for i in range(3000)]
    found = {}
    for name, partition_by, bucket in (
        ("many", ("bucket(64, k)",), "1GiB"),
        ("one", WHOLE, "1KiB"),
        ("few", ("d", "bucket(2, k)"), "256B"),
        ("right", WHOLE, "1GiB"),
        ("by date", ("d",), "1KiB"),
    ):
        lake = Lake(folder / name, partition_by=partition_by, bucket=bucket)
        lake.land("0.jsonl", rows)
        before, after = lake.table.plan().notes, ()
        lake.run()
        after = lake.table.plan().notes
        found[name] = [[note for note in notes if "would suit" in note] for notes in (before, after)]
    assert found["right"] == found["by date"] == [[], []]
    assert all("64 partitions by hash" in note and "; one would suit" in note for (note,) in found["many"])
    assert all(re.search(r"one partition, .*`bucket\(\d+, k, l\)` would suit", note) for (note,) in found["one"])
    assert all(re.search(r"2 partitions by hash for each d.*`bucket\(\d+, k\)`", note) for (note,) in found["few"])


def test_init_proposes_a_hash_for_files_that_are_too_large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(apart, "_call", lambda address, table, ended, alive: propose(address, table, ended))
    (folder / "zone").mkdir()
    pq.write_table(pa.table({"id": range(2000), "name": [f"n{i % 7}" for i in range(2000)]}), folder / "zone/a.parquet")

    def proposed() -> Any:
        done = CliRunner().invoke(main, ["init", "zone", "--json", "--dry-run"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)["result"]["proposed"]["partition_by"]

    assert proposed() == []
    monkeypatch.setattr("lakeupsert.operations.init.settings.cores", lambda: 3)
    monkeypatch.setattr("lakeupsert.operations.init.buckets.ALONE_BUCKETS", 1e-5)  # 2,684 bytes
    (number,) = re.fullmatch(r"bucket\((\d+), id\)", proposed()[0]).groups()  # type: ignore[union-attr]
    size = (folder / "zone/a.parquet").stat().st_size
    assert int(number) % 3 == 0
    assert int(number) - 3 < size / 2684.35456 <= int(number)
    assert CliRunner().invoke(main, ["init", "zone"]).exit_code == 0
    table = Table.open("lakeupsert.toml")
    assert table.run(host="local").publish.rows == 2000
    table.close()
