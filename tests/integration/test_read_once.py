"""What arrives and what was adopted is read about once, however many buckets a partition has: bytes counted at a store."""

import random
import re
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from lakeupsert.pipeline import strategy
from lakeupsert.rows.vectors import INLINE_BYTES
from lakeupsert.storage import open_store
from tests.harness.lake import Lake
from tests.harness.proxy import FaultProxy, fault_proxy
from tests.harness.servers import Server

ROWS = 60_000
COMES = ROWS // 10
KINDS = {
    "appended": "/_lakeupsert/data/appended-",
    "cut": "/cut-",
    "manifest": "/_lakeupsert/partitions/.*/v",
    "adopted": "/part-.*parquet",
}


def keys(numbers: Any) -> pa.Table:
    """Rows with the keys of these numbers, and other values in each night."""
    rng = random.Random(len(numbers))
    return pa.table(
        {
            "k": [f"key-{i:06}" for i in numbers],
            "l": pa.array([0] * len(numbers), pa.int32()),
            "ts": pa.array([datetime(2020, 1, 1)] * len(numbers), pa.timestamp("us")),
            "v": pa.array([rng.randrange(10**9) for _ in numbers], pa.int64()),
            "p": [rng.randbytes(120).hex() for _ in numbers],  # of smaller rows, footers would be most of the bytes
        }
    )


def land(lake: Lake, night: int) -> pa.Table:
    """A tenth of the keys, at a later time; half of them are new."""
    numbers = random.Random(night).sample(range(ROWS - COMES // 2, 2 * ROWS), COMES)
    rows = keys(numbers).set_column(2, "ts", pa.array([datetime(2020, 1, 1) + timedelta(night)] * COMES))
    with open_store(lake.settings.landing).write(f"{night}.parquet") as sink:
        pq.write_table(rows.append_column("d", pa.array([datetime(2020, 1, 1).date()] * COMES)), sink)
    return rows


def newest(*tables: pa.Table) -> dict[str, int]:
    """The value of each key that was landed last."""
    return {k: v for rows in tables for k, v in zip(rows["k"].to_pylist(), rows["v"].to_pylist(), strict=True)}


def read_by(proxy: FaultProxy, step: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """Bytes that the step reads of each kind of object, and how often it reads each manifest."""
    begin = len(proxy.log)
    step()
    gets = [(unquote(e.path), e.bytes) for e in proxy.log[begin:] if e.method == "GET" and e.status in (200, 206)]
    found: Counter[str] = Counter()
    for path, size in gets:
        found.update({kind: size for kind, pattern in KINDS.items() if re.search(pattern, path)})
    return found, Counter(path for path, _ in gets if re.search(KINDS["manifest"] + r"\d", path))


@pytest.mark.parametrize(
    ("bucket", "buckets", "chosen"),
    [
        ("64MiB", 1, "rewrite"),
        pytest.param("600KiB", 16, "rewrite", marks=pytest.mark.long),
        pytest.param("600KiB", 16, "delta", marks=pytest.mark.long),
        pytest.param("80KiB", 128, "delta", marks=pytest.mark.big),
    ],
)
def test_bytes_are_read_about_once(
    bucket: str, buckets: int, chosen: str, versitygw: Server, new_place: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(strategy, "SMALL_BYTES", 0)
    with fault_proxy(versitygw) as proxy:
        place = new_place(proxy.server)
        zones = {"landing": f"{place}/landing", "processed": f"{place}/processed"}
        columns = {
            "k": "string",
            "l": "int",
            "d": "date",
            "ts": "timestamp_ntz",
            "v": "bigint",
            "p": "string",
            "op": "string",
        }
        given = {"bucket": bucket, "strategy": chosen, "schema": columns}
        lake = Lake(tmp_path, **zones, queue=str(tmp_path / "queue.sqlite"), **given)
        adopted = keys(random.Random(0).sample(range(ROWS), ROWS))
        store = open_store(lake.settings.processed)
        for part in range(3):
            with store.write(f"d=2020-01-01/part-{part}.parquet") as sink:
                pq.write_table(adopted.slice(part * ROWS // 3, ROWS // 3), sink)
        lake.table.adopt()
        size = sum(found.size for found in store.list("d=2020-01-01/"))
        landed = [adopted]
        for night in range(1, 4):
            landed.append(land(lake, night))
            came = lake.table.append(host="local")
            assert came is not None
            arrived = sum(f.bytes for t in came.entry.touched.values() for f in t.files)
            lake.reopen()
            found, manifests = read_by(proxy, lambda: lake.table.dedupe(workers=1))
            assert 0 < found["appended"] <= 2 * arrived
            assert max(manifests.values(), default=0) <= 2, "the worker reads a manifest once, and so does publish"
            assert found["adopted"] + found["cut"] <= (3 * size if night == 1 else 0)
            lake.table.publish()
        head = lake.opened.history.objects.partition("d=2020-01-01").head()
        assert head is not None
        assert buckets / 2 <= len(head.body.buckets) <= 2 * buckets
        vectors = [file.deleted for bucket in head.body.buckets for file in bucket.data if file.deleted]
        assert bool(vectors) == (chosen == "delta")
        assert sum(len(vector.inline) for vector in vectors) <= INLINE_BYTES, "a manifest of many buckets stays small"
        rows = lake.table.to_arrow().read_all()
        assert dict(zip(rows["k"].to_pylist(), rows["v"].to_pylist(), strict=True)) == newest(*landed)
        assert pc.count_distinct(rows["k"]).as_py() == rows.num_rows
        assert not list(store.list("_lakeupsert/units/"))
