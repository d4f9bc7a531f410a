"""`append --host spark` and `--host local` are one function: the same batch, row for row, and one night exports the same."""

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from lakeupsert.api import Table
from lakeupsert.config import DeleteSettings, TableSettings
from lakeupsert.engine import spark as engine_spark


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
    objects = table._table.objects
    head = objects.ledger.head()
    assert head is not None
    names = [f.name for link in objects.ledger.between(0, head.number) for f in link.body.quarantine]
    found = [row for name in names for row in pq.read_table(objects.store.open(name)).to_pylist()]
    reasons = [r["reason"].split(" after its receipt")[0] for r in found]  # which names the moment of receipt
    return sorted(
        (r["file"], r["position"] or 0, r["reason_code"], reason, r["raw"] or "")
        for r, reason in zip(found, reasons, strict=True)
    )


@pytest.fixture(params=["as it is", "cut small"])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with the sizes of the product, once so small that every cut, flush and key range happens."""
    if request.param == "cut small":
        for name, size in {"TASK_BYTES": 9000, "HELD_BYTES": 20_000, "BLOB_BYTES": 4000, "RANGE_BYTES": 50_000}.items():
            monkeypatch.setattr(engine_spark, name, size)


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


def test_one_night_exports_the_same_whatever_host_and_engine(tmp_path: Path, spark: Any) -> None:
    combinations: Sequence[tuple[Any, Any]] = [("spark", "spark"), ("spark", "arrow"), ("local", "arrow")]
    tables = [(host, engine, opened(tmp_path, f"{host}-{engine}")) for host, engine in combinations]
    for night in (1, 2):
        land(tmp_path / "landing", night)
        for host, engine, table in tables:
            table.run(host=host, engine=engine)
    exports = []
    for number, (_, _, table) in enumerate(tables):
        table.export(tmp_path / f"{number}.jsonl")
        exports.append((tmp_path / f"{number}.jsonl").read_bytes())
    assert exports[0] == exports[1] == exports[2]
    assert len(exports[0]) > 10_000
