"""`append --host spark` takes 2 GB of landing files with 512 MB of driver memory, in several tasks each way (`make test-big`)."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

FILES = 8
FILE_BYTES = 260 << 20
DATES = 60


def land(folder: Path) -> int:
    """Incompressible rows of about 100 bytes; returns how many. A tenth of all rows is of one date."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    rows = FILE_BYTES // 96
    first = np.datetime64(date(2024, 1, 1))
    for number in range(FILES):
        days = np.where(rng.random(rows) < 0.1, 0, rng.integers(0, DATES, rows))
        payload = pa.FixedSizeBinaryArray.from_buffers(pa.binary(72), rows, [None, pa.py_buffer(rng.bytes(72 * rows))])
        table = pa.table(
            {
                "id": pa.array(rng.integers(0, 2**62, rows)),
                "transaction_date": pa.array(first + days),
                "record_timestamp": pa.array(rng.integers(0, 2**50, rows)).cast(pa.timestamp("us")),
                "payload": payload,
            }
        )
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=200_000, compression="none")
    return rows * FILES


def tasks_by_stage(events: Path) -> dict[int, list[dict[str, Any]]]:
    stages = defaultdict(list)
    for file in events.rglob("*"):
        if file.is_file() and not file.name.startswith(("appstatus", ".")):
            for line in file.read_text().splitlines():
                event = json.loads(line)
                if event["Event"] == "SparkListenerTaskEnd":
                    stages[event["Stage ID"]].append(event["Task Metrics"])
    return stages


@pytest.mark.big
def test_two_gigabytes_pass_through_a_small_driver(tmp_path: Path) -> None:
    rows = land(tmp_path / "landing")
    landed = sum(f.stat().st_size for f in (tmp_path / "landing").iterdir())
    assert landed > 2e9
    (tmp_path / "lakeupsert.toml").write_text(
        '[tables.big]\nlanding = "landing"\nprocessed = "processed"\nkey = ["id"]\npartition_by = ["transaction_date"]\n'
    )
    (tmp_path / "events").mkdir()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text(
        "spark.master local[2]\nspark.driver.memory 512m\nspark.eventLog.enabled true\n"
        f"spark.eventLog.dir {(tmp_path / 'events').as_uri()}\nspark.eventLog.compress false\n"
        "spark.driver.host 127.0.0.1\nspark.driver.bindAddress 127.0.0.1\n"
    )
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lakeupsert")), "append", "--host", "spark", "--json"],
        cwd=tmp_path,
        env={**os.environ, "SPARK_CONF_DIR": str(tmp_path / "conf")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (batch,) = json.loads(done.stdout)["result"]["batches"]
    assert batch["rows_appended"] == batch["rows_read"] == rows
    assert len(batch["touched_partitions"]) == DATES
    stages = [tasks for _, tasks in sorted(tasks_by_stage(tmp_path / "events").items())]
    read, written = stages[-2], stages[-1]
    assert len(read) > 8
    assert len(written) > 8
    sent = sum(t["Shuffle Write Metrics"]["Shuffle Bytes Written"] for t in read)
    received = sum(
        t["Shuffle Read Metrics"]["Local Bytes Read"] + t["Shuffle Read Metrics"]["Remote Bytes Read"] for t in written
    )
    assert landed * 0.9 < sent <= received * 1.01
    assert sum(t["Shuffle Read Metrics"]["Total Records Read"] > 0 for t in written) > 8
    print(
        f"{rows} rows, {landed / 1e9:.2f} GB; {len(read)} tasks read, {sent / 1e9:.2f} GB shuffled, {len(written)} wrote"
    )
