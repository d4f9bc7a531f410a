"""`make test-big`: an adopted partition of 4 GB, settled by one worker that may use 1 GB."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.harness.lake import Lake, row

pytestmark = pytest.mark.big
PARTITION = "d=2020-01-01"
FILES, ROWS_OF_A_FILE, GROUP = 16, 1_000_000, 125_000
PAYLOAD = 240
LIMIT = 1 << 30
SCHEMA = pa.schema([("k", "string"), ("l", "int32"), ("ts", pa.timestamp("us")), ("v", "int64"), ("p", pa.binary())])
WORKER = """
import json, sys
from pathlib import Path
from lakeupsert.api import Table
from lakeupsert.pipeline.workers import drain_queues
drain_queues.limit_bytes = lambda: 1 << 30
table = Table.open(sys.argv[1])
results = table.dedupe(workers=1)
[line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
statuses = [result.status for result in results]
print(json.dumps({"peak": int(line.split()[1]) << 10, "statuses": statuses, "read": sum(r.bytes_read for r in results)}))
"""


def rows_of(keys: np.ndarray, time: int, payload: bytes) -> pa.Table:
    count = len(keys)
    fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(PAYLOAD), count, [None, pa.py_buffer(payload)])
    columns = {
        "k": pa.array(keys).cast(pa.string()),
        "l": pa.array(np.zeros(count, np.int32)),
        "ts": pa.array(np.full(count, time), pa.int64()).cast(pa.timestamp("us")),
        "v": pa.array(keys),
        "p": fixed.cast(pa.binary()),
    }
    return pa.table(columns, schema=SCHEMA)


def adopted_files(folder: Path) -> int:
    """Write files of random rows in steps; each key is there twice, and its later row wins. Returns their bytes."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    keys = rng.permutation(FILES * ROWS_OF_A_FILE) // 2
    for number in range(FILES):
        of_file = keys[number * ROWS_OF_A_FILE : (number + 1) * ROWS_OF_A_FILE]
        with pq.ParquetWriter(folder / f"part-{number:02}.parquet", SCHEMA, compression="zstd") as out:
            for begin in range(0, ROWS_OF_A_FILE, GROUP):
                n = of_file[begin : begin + GROUP]
                out.write_table(rows_of(n, number, rng.bytes(PAYLOAD * len(n))))
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_worker_of_one_gigabyte_settles_four(tmp_path: Path) -> None:
    columns = {
        "k": "string",
        "l": "int",
        "d": "date",
        "ts": "timestamp_ntz",
        "v": "bigint",
        "p": "binary",
        "op": "string",
    }
    lake = Lake(tmp_path / "lake", schema=columns, bucket="256MiB")
    size = adopted_files(lake.root / "processed" / PARTITION)
    assert size > 3.8e9
    lake.table.adopt()
    lake.land("1.jsonl", [row("7", 0, 99, -1)])
    lake.table.append(host="local")
    config = lake.configure()
    done = subprocess.run([sys.executable, "-c", WORKER, config], stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(done.stdout)
    print(f"{size / 1e9:.2f} GB adopted, {told['read'] / 1e9:.2f} GB read, peak {told['peak'] / 2**20:.0f} MiB")
    assert set(told["statuses"]) == {"merged"}
    assert told["peak"] < LIMIT
    assert told["read"] <= 3 * size
    lake.reopen()
    lake.table.publish()
    head = lake.opened.history.objects.partition(PARTITION).head()
    assert head is not None
    assert len(head.body.buckets) >= 16
    assert head.body.rows == FILES * ROWS_OF_A_FILE // 2
    total = sum(pc.sum(batch["v"]).as_py() or 0 for batch in lake.table.to_arrow())
    expected = sum(range(FILES * ROWS_OF_A_FILE // 2))
    assert total == expected - 7 - 1, "every key once, and what came for key 7"
