"""A Spark stream into a table by `Table.foreach_batch`: each batch once, wherever the driver dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakeupsert import clock
from lakeupsert.engine import spark_landing
from lakeupsert.errors import ConfigurationError
from lakeupsert.retries import LEASE_SECONDS
from lakeupsert.storage import ObjectStore
from tests.harness.faults import Fault, Killed
from tests.harness.lake import Lake, row
from tests.harness.processes import wait_until

SCHEMA = "k string, l int, d date, ts timestamp_ntz, v bigint, op string"
BATCHES = 2


class Source:
    """Files of JSON lines, a micro-batch each, and the stream that reads them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[Any] = []
        (folder / "source").mkdir(parents=True)

    def write(self, number: int, rows: list[Any]) -> None:
        lines = [json.dumps(one, default=str) for one in rows]
        target = self.folder / "source" / f"{number:03}.jsonl"
        target.with_suffix(".tmp").write_text("\n".join(lines))
        os.utime(target.with_suffix(".tmp"), (number, number))  # Spark takes the oldest first
        target.with_suffix(".tmp").rename(target)
        self.rows += rows

    def run(self, spark: Any, lake: Lake, tasks: int = 2) -> None:
        """Take all that is there; raises what ends the query."""

        def take(rows: Any, number: int) -> None:
            try:
                lake.table.foreach_batch(rows.repartition(tasks), number)
            except Killed as e:  # py4j passes on no others
                raise RuntimeError("killed") from e

        stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).option("pathGlobFilter", "*.jsonl")
        writer = stream.json(str(self.folder / "source")).writeStream.foreachBatch(take)
        query = writer.option("checkpointLocation", str(self.folder / "checkpoint")).trigger(availableNow=True).start()
        query.awaitTermination()


def numbered(number: int) -> list[Any]:
    """Rows of a file: a key that each file has, and some of its own."""
    return [row("same", 0, number, number), *(row(f"n{number}.{i}", i % 2, number, i) for i in range(5))]


def check(lake: Lake, source: Source, batches: int) -> None:
    lake.reopen()
    entries = [entry for _, entry in lake.entries() if entry.kind == "batch"]
    assert len({entry.batch_id for entry in entries}) == len(entries) == batches
    assert sum(entry.rows_appended for entry in entries) == len(source.rows)
    newest = {(one["k"], one["l"]): one["v"] for one in sorted(source.rows, key=lambda one: one["ts"])}
    assert {(one["k"], one["l"]): one["v"] for one in lake.rows()} == newest


@pytest.fixture
def source(tmp_path: Path) -> Source:
    found = Source(tmp_path)
    for number in range(1, BATCHES + 1):
        found.write(number, numbered(number))
    return found


@pytest.mark.core
@pytest.mark.few(1)
@pytest.mark.parametrize("fault", [Fault.KILL_AFTER, Fault.KILL_BEFORE])
@pytest.mark.parametrize("call", ["create _lakeupsert/ledger", "queue send", "create _lakeupsert/snap"])
def test_a_batch_counts_once_wherever_the_driver_dies(
    spark: Any, tmp_path: Path, source: Source, call: str, fault: Fault
) -> None:
    """Also if Spark cuts the repeated batch into other files, and if retention has removed the files of the first try."""
    lake = Lake(tmp_path)
    lake.points.arm(1, fault, call)
    with pytest.raises(Exception, match="killed"):
        source.run(spark, lake, tasks=2)
    lake.points.disarm()
    lake.reopen()
    shutil.rmtree(tmp_path / "landing" / "_spark")
    source.run(spark, lake, tasks=3)
    check(lake, source, BATCHES)


@pytest.mark.core
def test_another_append_does_not_look_at_files_of_a_stream(spark: Any, tmp_path: Path, source: Source) -> None:
    lake = Lake(tmp_path)
    lake.points.arm(0, Fault.KILL_BEFORE, "create _lakeupsert/ledger")
    with pytest.raises(Exception, match="killed"):
        source.run(spark, lake)
    lake.points.disarm()
    lake.reopen()
    assert list((tmp_path / "landing").rglob("*.parquet")) != []
    assert lake.table.append(host="local") is None
    source.run(spark, lake)
    check(lake, source, BATCHES)


def test_a_new_checkpoint_is_another_query(spark: Any, tmp_path: Path, source: Source) -> None:
    lake = Lake(tmp_path)
    source.run(spark, lake)
    shutil.rmtree(tmp_path / "checkpoint")
    source.run(spark, lake)
    entries = [entry for _, entry in lake.entries() if entry.kind == "batch"]
    assert len({entry.batch_id for entry in entries}) == len(entries) == 2 * BATCHES


@pytest.mark.parametrize(
    "settings", [{"landing_dates": "%Y-%m-%d"}, {"format": "csv"}, {"landing": "http://127.0.0.1/x"}]
)
def test_a_table_that_can_not_take_a_stream_says_so(
    spark: Any, tmp_path: Path, source: Source, settings: dict[str, Any]
) -> None:
    lake = Lake(tmp_path, **settings)
    with pytest.raises(Exception, match="can't take batches of this stream"):
        source.run(spark, lake)
    assert lake.entries() == []


@pytest.mark.core
def test_rows_that_are_of_no_stream_are_refused(spark: Any, tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        lake.table.foreach_batch(spark.range(3), 0)
    assert caught.value.code == "not-streamable"


class Frame:
    """What of a DataFrame tells its query and run."""

    def __init__(self, run: str = "run") -> None:
        self.sparkSession, self._sc, self.run = self, self, run  # Spark's names

    def getLocalProperty(self, name: str) -> str:  # noqa: N802 - Spark's name
        return {"sql.streaming.queryId": "query", "spark.jobGroup.id": self.run}[name]


def landing_at(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Tasks that write to this disk."""

    def land(rows: Any, landing: ObjectStore, folder: str) -> list[str]:
        name = f"{folder}{clock.new_id()}.parquet"
        (root / name).parent.mkdir(parents=True)
        columns = [field.split() for field in SCHEMA.split(", ")]
        types = {"string": pa.string(), "int": pa.int32(), "date": pa.date32(), "bigint": pa.int64()}
        schema = pa.schema([(column, types.get(type_, pa.timestamp("us"))) for column, type_ in columns])
        pq.write_table(pa.Table.from_pylist([row("k", 0, 1, 1)], schema), root / name)
        return [name]

    monkeypatch.setattr(spark_landing, "land", land)


def test_executors_that_have_another_disk_lose_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake(tmp_path)
    landing_at(monkeypatch, tmp_path / "another")
    with pytest.raises(ConfigurationError, match="finds 0 of the 1 files") as found:
        lake.table.foreach_batch(Frame(), 0)  # type: ignore[arg-type]
    assert found.value.code == "not-streamable"
    assert lake.entries() == []


def test_a_second_call_in_a_micro_batch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake(tmp_path)
    landing_at(monkeypatch, tmp_path / "landing")
    lake.table.foreach_batch(Frame(), 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="call it once"):
        lake.table.foreach_batch(Frame(), 0)  # type: ignore[arg-type]
    lake.table.foreach_batch(Frame("the query was started again"), 0)  # type: ignore[arg-type]
    lake.table.foreach_batch(Frame(), 1)  # type: ignore[arg-type]
    assert [entry.batch_id for _, entry in lake.entries() if entry.kind == "batch"] == [
        "spark-query-0",
        "spark-query-1",
    ]


def test_a_partition_that_can_not_be_merged_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lake = Lake(tmp_path)
    landing_at(monkeypatch, tmp_path / "landing")
    lake.table.foreach_batch(Frame(), 0)  # type: ignore[arg-type]
    for path in (tmp_path / "processed").rglob("*.parquet"):
        path.write_bytes(b"x" * path.stat().st_size)
    lake.reopen()
    published = lake.table.foreach_batch(Frame(), 1)  # type: ignore[arg-type]
    assert [*published.failed] == ["d=2020-01-01"]
    assert "readers do not see the newest rows of d=2020-01-01" in caplog.text
    assert "Next: " in caplog.text


@pytest.mark.crash
def test_a_driver_that_is_killed_again_and_again(tmp_path: Path, source: Source) -> None:
    """SIGKILL of a real driver, in the middle of whatever it does. The next one waits for the messages that it held."""
    lake = Lake(tmp_path)
    for kill in range(int(os.environ.get("KILLS", "3"))):
        for number in range(BATCHES + 1 + 3 * kill, BATCHES + 4 + 3 * kill):
            source.write(number, numbered(number))
        before = len(lake.entries())
        driver = subprocess.Popen([sys.executable, "-m", __name__, str(tmp_path)])
        try:
            wait_until(
                lambda before=before: len(lake.entries()) > before, "it takes a batch", patience=3 * LEASE_SECONDS
            )
            clock.sleep(clock.jitter(1.0))
        finally:
            driver.send_signal(signal.SIGKILL)
            driver.wait()
    subprocess.run([sys.executable, "-m", __name__, str(tmp_path)], check=True)
    check(lake, source, len(list((tmp_path / "source").glob("*.jsonl"))))


def _main(folder: Path) -> None:
    from pyspark.sql import SparkSession

    builder = (
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config("spark.log.level", "ERROR")
    )
    source = object.__new__(Source)
    source.folder = folder
    source.run(builder.config("spark.sql.shuffle.partitions", "2").getOrCreate(), Lake(folder))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
