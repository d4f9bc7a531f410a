"""Spark and a table on S3: reads through S3A, appends and merges through our own store."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyspark
import pytest

from lakeupsert import sparkenv
from lakeupsert.retries import STORE_ATTEMPTS
from tests.harness import servers
from tests.harness.lake import Lake, row
from tests.harness.processes import wait_until
from tests.harness.proxy import FaultProxy, Rule
from tests.harness.servers import HOST, Server, free_port, serve

NIGHTS = [
    [row("a", 0, 1, 1), row("b", 0, 1, 1), row("a", 1, 1, 1), row("c", 1, 5, 1)],
    [row("a", 0, 2, 2), row("b", 0, 2, 2, op="D"), row("c", 1, 4, 2), row("d", 2, 1, 2)],
]


@pytest.fixture(scope="session")
def s3a(request: pytest.FixtureRequest) -> Any:
    """The Spark session, with the jars that read S3."""
    servers.require(servers.HADOOP_JARS, "`make servers` gets it (Maven)")
    return request.getfixturevalue("spark")


@pytest.fixture
def proxy(versitygw: Server, new_proxy: Callable[[Server], FaultProxy]) -> FaultProxy:
    """In front of a server, to see what is asked of it."""
    return new_proxy(versitygw)


@pytest.fixture
def lake(proxy: FaultProxy, new_bucket: Callable[[Server], str], tmp_path: Path) -> Lake:
    bucket = new_bucket(proxy.server)
    zones = {"landing": f"s3://{bucket}/landing", "processed": f"s3://{bucket}/processed"}
    return Lake(tmp_path, **zones, queue=str(tmp_path / "queue.sqlite"))


def bucket_of(lake: Lake) -> str:
    return lake.settings.processed.split("/")[2]


def found(frame: Any) -> list[dict[str, Any]]:
    return [r.asDict() for r in frame.orderBy("d", "k", "l").collect()]


def executed(frame: Any) -> str:
    return str(frame._jdf.queryExecution().executedPlan())


# ---------------------------------------------------------------- reads


@pytest.mark.long
def test_scan_of_40_partitions_is_native_and_pruned(lake: Lake, proxy: FaultProxy, s3a: Any) -> None:
    lake.land("quarter.jsonl", [row(k, day, day, v) for day in range(40) for v, k in enumerate("abc")])
    lake.run()
    proxy.log.clear()
    rows = [r.asDict() for r in lake.table.to_spark(s3a).collect()]
    kinds = Counter(f"{'list' if 'list-type' in event.path else event.method}" for event in proxy.log)
    print(f"\n{len(rows)} rows of 40 partitions: {dict(kinds)}")
    assert sorted(rows, key=lambda r: (r["d"], r["k"])) == lake.rows() == lake.expected(1)

    one = lake.table.to_spark(s3a).where("d = '2020-02-01' AND v > 1").select("k", "v")
    plan = executed(one)
    print(plan)
    assert "FileScan parquet" in plan
    assert "InMemoryFileIndex(40 paths)[s3a://" in plan
    assert "GreaterThan(v,1)" in plan.split("PushedFilters: ")[1]
    assert "d#" in plan.split("PartitionFilters: ")[1].split("PushedFilters")[0]
    assert "ReadSchema: struct<k:string,v:bigint>" in plan
    assert "Python" not in plan
    proxy.log.clear()
    assert [r.asDict() for r in one.collect()] == [{"k": "c", "v": 2}]
    read = {event.path.split("/")[-2] for event in proxy.log if event.method == "GET"}
    assert read == {"d%3D2020-02-01"}, "the scan opens the files of one partition"
    proxy.log.clear()
    assert lake.table.to_spark(s3a, where="d = '2020-02-01' AND v > 1").select("v").collect() == [(2,)]
    asked = {event.path for event in proxy.log if "d%3D" in event.path and "_lakeupsert" not in event.path}
    assert all("d%3D2020-02-01" in path for path in asked), "not even the names of others are asked for"


@pytest.mark.long
def test_snapshots_and_latest_are_read_as_of_a_local_table(lake: Lake, s3a: Any) -> None:
    for number, rows in enumerate(NIGHTS):
        lake.land(f"{number}.jsonl", rows)
        lake.run()
    lake.land("late.jsonl", [row("a", 0, 9, 9), row("z", 4, 1, 9)])
    lake.table.append(host="local")
    for snapshot in (0, 1, "published", "latest"):
        for where in (None, "v = 2", "d = '2020-01-01'", "d = '1999-01-01'"):
            frame = lake.table.to_spark(s3a, snapshot, where)
            assert found(frame) == lake.table.to_arrow(snapshot, where).read_all().to_pylist(), (snapshot, where)
    assert found(lake.table.to_spark(s3a, "latest")) == lake.expected(3)


@pytest.mark.long
def test_partitions_of_any_name_are_found(lake: Lake, s3a: Any) -> None:
    lake.mend(lambda row: False, schema={**lake.settings.schema, "d": "string"})
    values = ["a b", "a%20b", "a+b", "{a,b}", "[a]*?", "a/b", "a:b", "ä=🦆", "\\d", "#?", "a."]
    lake.land("0.jsonl", [{**row(str(n), 0, 1, n), "d": value} for n, value in enumerate(values)])
    lake.run()
    frame = lake.table.to_spark(s3a).orderBy("v")
    assert [r.d for r in frame.collect()] == values
    assert sorted(found(frame), key=lambda r: r["v"]) == sorted(lake.rows(), key=lambda r: r["v"])


def test_settings_of_the_session_go_first(lake: Lake, proxy: FaultProxy, versitygw: Server, s3a: Any) -> None:
    """The session names the server's own address, and boto3's settings that of the proxy."""
    lake.land("0.jsonl", NIGHTS[0])
    lake.run()
    name = f"fs.s3a.bucket.{bucket_of(lake)}.endpoint"
    s3a.conf.set(name, versitygw.url)
    try:
        proxy.log.clear()
        assert found(lake.table.to_spark(s3a)) == lake.expected(1)
    finally:
        s3a.conf.unset(name)
    assert proxy.log, "the manifests are read by boto3"
    assert not any("base-" in event.path for event in proxy.log)


def test_scan_changes_no_setting_of_the_session(lake: Lake, s3a: Any) -> None:
    lake.land("0.jsonl", NIGHTS[0])
    lake.run()
    before = sorted(map(tuple, s3a.sql("SET").collect()))
    assert lake.table.to_spark(s3a).count() == 4
    assert sorted(map(tuple, s3a.sql("SET").collect())) == before


def test_where_boto3_uses_a_profile_s3a_may_use_one(lake: Lake, s3a: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads it by itself; the JVM of these tests began without, and finds its keys in its environment."""
    lake.land("0.jsonl", NIGHTS[0])
    lake.run()
    (key, access), (secret_key, secret) = servers.CREDENTIALS.items()
    profile = lake.root / "credentials"
    profile.write_text(f"[night]\naws_access_key_id = {access}\naws_secret_access_key = {secret}\n")
    monkeypatch.delenv(key)
    monkeypatch.delenv(secret_key)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.setenv("AWS_PROFILE", "night")
    assert found(lake.table.to_spark(s3a)) == lake.expected(1)


# ---------------------------------------------------------------- writes


def test_host_and_engine_spark_write_to_s3(
    lake: Lake, proxy: FaultProxy, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in proxy.server.env.items():
        monkeypatch.setitem(spark.sparkContext.environment, name, value)  # of its Python processes
    for number, rows in enumerate(NIGHTS):
        lake.land(f"{number}.jsonl", rows, refused=[{**row("x", 1, 1), "v": "no number"}])
        lake.run(host="spark", engine="spark")
        lake.check()
    lake.finish_and_check()


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Spark's own cluster, of two machines as Spark sees it: it runs no speculative copy where the task runs already."""
    sparkenv.prepare()
    program, port = Path(pyspark.__file__).parent / "bin" / "spark-class", free_port()
    small = {"SPARK_DAEMON_MEMORY": "128m"}
    address = f"spark://{HOST}:{port}"

    def command(what: str, port: int, host: str) -> list[str | Path]:
        name = f"org.apache.spark.deploy.{what.lower()}.{what}"
        return [program, name, "--host", host, "--port", str(port), "--webui-port", "0"]

    with ExitStack() as stack:
        stack.enter_context(serve(command("Master", port, HOST), port, folder / "master.log", small))
        for host in (HOST, "localhost"):
            own, port = ["--cores", "1", "--memory", "1g", "--work-dir", folder / host, address], free_port()
            log = folder / f"{host}.log"
            stack.enter_context(serve([*command("Worker", port, host), *own], port, log, small))
        yield address


def tasks(events: Path) -> list[tuple[str, bool]]:
    """How each task ended, and whether it was a speculative copy."""
    files = [f for f in events.rglob("*") if f.is_file() and not f.name.startswith(("appstatus", "."))]
    told = [json.loads(line) for f in files for line in f.read_text().splitlines()]
    ends = [event for event in told if event["Event"] == "SparkListenerTaskEnd"]
    return [(event["Task End Reason"]["Reason"], event["Task Info"]["Speculative"]) for event in ends]


@pytest.mark.crash
def test_failed_and_speculative_tasks_of_an_append_leave_unnamed_files_only(lake: Lake, proxy: FaultProxy) -> None:
    """The one task that writes a night fails after its put was done; in the next night its put is late, and a copy starts."""

    def append(night: int, rule: Rule, *settings: str) -> list[tuple[str, bool]]:
        lake.land(f"{night}.jsonl", [row(k, day, night, night) for day in range(4) for k in "abc"])
        events = lake.root / f"events {night}"
        events.mkdir()
        (lake.root / "spark-defaults.conf").write_text(
            f"spark.master {address}\nspark.executor.memory 512m\nspark.driver.memory 512m\nspark.executor.cores 1\n"
            "spark.driver.host 127.0.0.1\nspark.driver.bindAddress 127.0.0.1\nspark.default.parallelism 1\n"
            f"spark.eventLog.enabled true\nspark.eventLog.compress false\nspark.eventLog.dir {events.as_uri()}\n"
            + "\n".join(settings)
        )
        proxy.rules = (rule,)
        done = subprocess.run(
            [str(Path(sys.executable).with_name("lakeupsert")), "append", "--host", "spark"],
            cwd=lake.root,
            env={**os.environ, "SPARK_CONF_DIR": str(lake.root)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return tasks(events)

    def unnamed() -> int:
        return len(lake.stored_files() - lake.named_files())

    data = "/_lakeupsert/data/"
    lake.configure()
    with cluster(lake.root) as address:
        ended = append(1, Rule("lose", "PUT", data, times=STORE_ATTEMPTS))
        assert [end for end in ended if end != ("Success", False)] == [("ExceptionFailure", False)]
        assert unnamed() == 1
        late = Rule("delay", "PUT", data, times=1, seconds=20)
        ended = append(2, late, "spark.speculation true", "spark.speculation.task.duration.threshold 1s")
        assert any(speculative for _, speculative in ended)
        wait_until(lambda: unnamed() >= 2, "the late put arrives, after the night was committed")
    assert [entry.touched["d=2020-01-01"].rows for _, entry in lake.entries()[1:]] == [3, 3]
    lake.finish_and_check()
