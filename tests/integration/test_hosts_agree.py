"""`append --host spark` and `--host local` are one function: the same batch, row for row, and one night exports the same."""

import json
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from lakeupsert.api import Table
from lakeupsert.config import DeleteSettings, TableSettings
from lakeupsert.engine import batch as engine_batch
from lakeupsert.engine import hosts as engine_hosts
from lakeupsert.engine import settle as engine_settle
from lakeupsert.engine import spark_host as engine_spark
from lakeupsert.engine.spark_versions import frame_of
from lakeupsert.rows.buckets import buckets, key_hashes
from lakeupsert.rows.datafiles import read_file
from lakeupsert.storage import open_store


def opened(root: Path, name: str, **settings: Any) -> Table:
    given = {
        "landing": str(root / "landing"),
        "processed": str(root / name),
        "key": ("k", "l"),
        "partition_by": ("d",),
        "order_by": ("ts",),
        "delete": DeleteSettings(column="op", values=("D",)),
        "quarantine_limit": "100%",
        "schema": {"d": "date", "ts": "timestamp_ntz", "l": "bigint"},
    }
    return Table("t", TableSettings(**{**given, **settings}))


def land(folder: Path, night: int) -> None:
    """Three formats, keys that meet within and across files, ties, deletes, and every kind of refusal."""
    folder.mkdir(parents=True, exist_ok=True)

    def rows(file: int, n: int) -> list[dict[str, Any]]:
        return [
            {
                "k": f"k{(i * 7 + file) % 97}",
                "l": i % 2,
                "d": date(2020, 1, 1 + (i * i + night) % 9),
                "ts": f"2020-01-0{1 + (i + night) % 5}T00:00:00",
                "v": i * 1000 + file,
                "op": "D" if (i + file) % 13 == 0 else "U",
            }
            for i in range(n)
        ]

    table = pa.Table.from_pylist(rows(0, 3000))
    stamps = table["ts"].cast(pa.timestamp("us"))
    table = table.set_column(3, "ts", stamps).set_column(1, "l", table["l"].cast(pa.int64()))
    pq.write_table(table, folder / f"a{night}.parquet", row_group_size=500)
    csv = pa.Table.from_pylist(rows(1, 2000))
    pyarrow.csv.write_csv(csv, folder / f"b{night}.csv")
    with (folder / f"b{night}.csv").open("a") as file:
        file.write("too,few\n,0,2020-01-01,2020-01-01T00:00:00,1,U\nk1,0,no date,2020-01-01T00:00:00,1,U\n")
        file.write("k1,0,2020-01-01,2999-01-01T00:00:00,1,U\nk1,0,2020-01-01,,1,D\n")
    lines = [json.dumps({**r, "d": str(r["d"])}) for r in rows(2, 2000)]
    (folder / f"c{night}.jsonl").write_text("\n".join([*lines, "{broken", ""]))
    (folder / f"d{night}.parquet").write_bytes(b"PAR1 is not enough")


def quarantined(table: Table) -> list[tuple[Any, ...]]:
    objects = table.objects
    head = objects.ledger.head()
    assert head is not None
    names = [f.name for link in objects.ledger.between(0, head.number) for f in link.body.quarantine]
    found = [row for name in names for row in pq.read_table(objects.store.open(name)).to_pylist()]
    reasons = [r["reason"].split(" after its receipt")[0] for r in found]  # which names the moment of receipt
    return sorted(
        (r["file"], r["position"] or 0, r["reason_code"], reason, r["raw"] or "")
        for r, reason in zip(found, reasons, strict=True)
    )


@pytest.fixture(params=["as it is", pytest.param("cut small", marks=pytest.mark.long)])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with the sizes of the product, once so small that every cut, flush and key range happens."""
    if request.param == "cut small":
        for name, size in {"TASK_BYTES": 9000, "HELD_BYTES": 20_000, "BLOB_BYTES": 4000, "GROUP_BYTES": 5000}.items():
            monkeypatch.setattr(engine_spark, name, size)
        monkeypatch.setattr(engine_hosts, "HELD_BYTES", 20_000)
        monkeypatch.setattr(engine_batch, "RANGE_BYTES", 10_000)


@pytest.mark.core
@pytest.mark.usefixtures("_sizes")
def test_hosts_agree_on_a_night_of_every_format(tmp_path: Path, spark: Any) -> None:
    tables = {host: opened(tmp_path, host) for host in ("spark", "local")}
    for night in (1, 2):
        land(tmp_path / "landing", night)
        entries = []
        for host, table in tables.items():
            done = table.run(host=host)
            assert done.append is not None
            entries.append(done.append.entry)
        one, other = entries
        assert one.quarantined == other.quarantined
        assert set(one.quarantined) == {
            "malformed", "null_key", "bad_partition", "future_order", "order_missing", "unreadable_file",
        }  # fmt: skip
        assert [(f.path, f.sha256, f.rows) for f in one.files] == [(f.path, f.sha256, f.rows) for f in other.files]
        came = [{p: (t.rows, t.digest) for p, t in entry.touched.items()} for entry in entries]
        assert came[0] == came[1]
        assert quarantined(tables["spark"]) == quarantined(tables["local"])
        rows = {host: table.to_arrow().read_all() for host, table in tables.items()}
        assert rows["spark"].equals(rows["local"])
        assert rows["local"].num_rows > 500
    for table in tables.values():
        found = table.reconcile(deep=True)
        assert not found.unbalanced
        assert all(p.by_digest for p in found.proof)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "partition_by", [("d",), (), pytest.param(("bucket(5, l, k)",), marks=pytest.mark.long)], ids=str
)
def test_one_night_exports_the_same_whatever_host_and_engine(
    tmp_path: Path, partition_by: tuple[str, ...], spark: Any
) -> None:
    """Between the nights an update and a delete change some rows. Rows by hash show the number of their partition."""
    combinations: Sequence[tuple[Any, Any]] = [("spark", "spark"), ("local", "arrow")]
    tables = [
        (host, opened(tmp_path, f"{host}-{engine}", engine=engine, partition_by=partition_by))
        for host, engine in combinations
    ]
    for night in (1, 2):
        land(tmp_path / "landing", night)
        for host, table in tables:
            table.run(host=host)
            assert table.update({"v": "v + 7"}, where="k < 'k3'", dry=False).append is not None
            assert table.delete(where="k >= 'k7' AND l = 1", dry=False).append is not None
    exports = []
    for number, (_, table) in enumerate(tables):
        table.export(tmp_path / f"{number}.jsonl")
        exports.append((tmp_path / f"{number}.jsonl").read_bytes())
    assert exports[0] == exports[1]
    assert len(exports[0]) > 7000


N = 600
KEYS: dict[str, Any] = {
    **{f"{u}int{bits}": pa.array(range(N), pa.int64()) for u in ("", "u") for bits in (16, 32, 64)},
    "int8": pa.array([i % 251 - 125 for i in range(N)], pa.int64()),
    "uint8": pa.array([i % 251 for i in range(N)], pa.int64()),
    "bool": pa.array([i % 2 == 0 for i in range(N)]),
    "date32": pa.array(range(N), pa.int32()).cast(pa.date32()),
    **{f"timestamp[{unit}]": pa.array(range(N), pa.int64()) for unit in ("s", "ms", "us", "ns")},
    "timestamp[us, tz=UTC]": pa.array(range(N), pa.int64()),
    **{f"decimal128({p}, 2)": pa.array([Decimal(i) / 4 for i in range(N)]) for p in (8, 20, 38)},
    "decimal256(50, 2)": pa.array([Decimal(i) / 4 for i in range(N)]),
    "string": pa.array([f"{i:0{i % 30}}ä" for i in range(N)]),
    "large_string": pa.array([f"{i}" for i in range(N)]),
    "binary": pa.array([str(i).encode() for i in range(N)]),
    "fixed_size_binary[4]": pa.array([f"{i:04}".encode() for i in range(N)]),
}
TYPES = {
    **{name: pa.timestamp(name[10:12].rstrip("],")) for name in KEYS if name.startswith("timestamp[")},
    "timestamp[us, tz=UTC]": pa.timestamp("us", "UTC"),
    **{f"decimal128({p}, 2)": pa.decimal128(p, 2) for p in (8, 20, 38)},
    "decimal256(50, 2)": pa.decimal256(50, 2),
    "fixed_size_binary[4]": pa.binary(4),
}


def ranges_of(table: Table) -> dict[str, dict[tuple[int, int], int]]:
    """Rows of the newest batch's files, by partition, bits and bucket; every key is in the bucket that its file names."""
    spec, head = table.objects.spec(), table.objects.ledger.head()
    assert head is not None
    found: dict[str, dict[tuple[int, int], int]] = {}
    for partition, touched in head.body.touched.items():
        of_partition = found.setdefault(partition, {})
        assert len({(f.bits, f.bucket) for f in touched.files}) == len(touched.files)
        for file in touched.files:
            rows = read_file(open_store(table.settings.processed), file, spec.ranked_schema)
            assert rows.num_rows == file.rows > 0
            assert set(buckets(key_hashes(rows, spec), file.bits).tolist()) == {file.bucket}
            of_partition[file.bits, file.bucket] = file.rows
    return found


def land_most_of_one_date(folder: Path, keys: dict[str, Any]) -> None:
    """Two files of every key; nine tenths of the rows are of one date."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {name: values.cast(TYPES.get(name) or pa.type_for_alias(name)) for name, values in keys.items()}
    days = [date(2020, 1, 1 + (i % 10 == 0) * (1 + i % 7)) for i in range(N)]
    for number in range(2):
        stamps = pa.array([number * N + i for i in range(N)], pa.timestamp("us"))
        table = pa.table({**columns, "d": days, "ts": stamps, "v": list(range(N))})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=100, compression="none")


@pytest.mark.few(2)
@pytest.mark.parametrize("key", KEYS)
def test_files_of_a_large_partition_hold_keys_of_their_range_alone(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_batch, "RANGE_BYTES", 3000)
    land_most_of_one_date(tmp_path / "landing", {key: KEYS[key]})
    table = opened(tmp_path, "local", key=(key,), delete=None, schema={})
    table.append(host="local")
    found = ranges_of(table)
    bits = {bits for bits, _ in found.pop("d=2020-01-01")}
    assert len(bits) == 1
    assert bits.pop() > 1
    assert {one for ranges in found.values() for one in ranges} == {(0, 0)}
    table.dedupe()
    assert not table.reconcile().unbalanced


@pytest.mark.usefixtures("_sizes")
def test_hosts_cut_one_date_into_the_same_ranges(tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_batch, "RANGE_BYTES", 30_000)
    land_most_of_one_date(tmp_path / "landing", KEYS)
    tables = {host: opened(tmp_path, host, key=tuple(KEYS), delete=None, schema={}) for host in ("spark", "local")}
    for host, table in tables.items():
        table.append(host=host)
    found = {host: ranges_of(table) for host, table in tables.items()}
    assert found["spark"] == found["local"]
    assert len(found["local"]["d=2020-01-01"]) > 2
    assert sum(sum(ranges.values()) for ranges in found["local"].values()) == N


@pytest.mark.parametrize(("count", "parts"), [(1, 1), (2, 2), (3, 2), (40, 7)])
def test_groups_are_spread_evenly_over_spark_tasks(spark: Any, count: int, parts: int) -> None:
    numbers = pa.table({"number": pa.array(engine_spark.spread(count, parts), pa.int32())})
    frame = frame_of(spark, numbers).repartition(parts, "number")
    found = frame.selectExpr("number", "spark_partition_id() AS part").collect()
    assert sorted((row.number, row.part) for row in found) == sorted(
        (number, i % parts) for i, number in enumerate(numbers["number"].to_pylist())
    )


@pytest.mark.parametrize("versions", [1, 3, 50])
@pytest.mark.parametrize("host", ["local", "spark"])
def test_versions_of_a_key_that_lost_early_are_counted(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, host: Any, versions: int
) -> None:
    """Ties in the ordering column are decided by place, and a row that lost in one task can't win in the next."""
    if host == "spark":
        request.getfixturevalue("spark")
    for engine in (engine_spark, engine_hosts):
        monkeypatch.setattr(engine, "HELD_BYTES", 30_000)
    settled = []
    real = engine_settle.RowBuffer.settle
    monkeypatch.setattr(engine_settle.RowBuffer, "settle", lambda held: (real(held), settled.append(len(held.lost)))[0])
    keys = 3000 // versions
    (tmp_path / "landing").mkdir()
    for file in range(2):
        rows = [{"k": i % keys, "d": f"2020-01-0{1 + i % keys % 3}", "ts": i % 7, "v": i + file} for i in range(3000)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "landing" / f"{file}.parquet")
    settings = {"key": ("k",), "delete": None, "schema": {"d": "date"}}
    table = opened(tmp_path, host, **settings)
    done = table.run(host=host)
    assert done.append is not None
    touched = done.append.entry.touched.values()
    assert sum(t.rows for t in touched) == 6000
    assert sum(t.rows - t.superseded for t in touched) == sum(f.rows for t in touched for f in t.files)
    if host == "local":
        assert any(settled) == (versions > 1)
    proof = table.reconcile(deep=True)
    assert not proof.unbalanced
    assert all(p.by_digest for p in proof.proof)
    best: dict[int, tuple[int, int, int]] = {}
    for file in range(2):
        for i in range(3000):
            best[i % keys] = max(best.get(i % keys, (-1, 0, 0)), (i % 7, file, i))
    assert {r["k"]: r["v"] for r in table.to_arrow().read_all().to_pylist()} == {
        k: i + file for k, (_, file, i) in best.items()
    }
