"""A table whose zones are on S3 or in Azure Storage: nights, upkeep and commands as on a local disk, on each server."""

import contextlib
import gzip
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from lakeupsert.cli import main
from lakeupsert.errors import TryAgainError
from lakeupsert.storage import open_store, remote
from tests.harness.faults import Fault, Killed
from tests.harness.lake import Lake, row
from tests.harness.proxy import FaultProxy, Rule, fault_proxy, refuse
from tests.harness.servers import Server

NewPlace = Callable[[Server], str]
NewProxy = Callable[[Server], FaultProxy]
NIGHTS = [
    [row("a", 0, 1, 1), row("b", 0, 1, 1), row("a", 1, 1, 1), row("c", 1, 5, 1)],
    [row("a", 0, 2, 2), row("b", 0, 2, 2, op="D"), row("c", 1, 4, 2), row("d", 2, 1, 2)],
    [row("b", 0, 1, 3), row("e", 0, 1, 3), row("c", 1, 6, 3)],
]


def new_lake(root: Path, place: str, **settings: Any) -> Lake:
    zones = {"landing": f"{place}/landing", "processed": f"{place.replace('s3:', 's3a:')}/processed"}
    return Lake(root, **zones, queue=str(root / "queue.sqlite"), **settings)


@pytest.fixture
def lake(store_server: Server, new_place: NewPlace, tmp_path: Path) -> Lake:
    return new_lake(tmp_path, new_place(store_server))


@pytest.mark.core
def test_nights_equal_the_model(lake: Lake) -> None:
    for number, rows in enumerate(NIGHTS):
        lake.land(f"{number}.jsonl", rows, refused=[{**row("x", 1, 1), "v": "no number"}])
        lake.run()
        lake.check()
    lake.land("last.jsonl", [row("z", 0, 9)])
    lake.table.append(host="local")
    assert "z" in {r["k"] for r in lake.rows("latest")}
    lake.finish_and_check()


@pytest.mark.core
def test_night_keeps_to_its_budget_of_requests(lake: Lake) -> None:
    """Each step in a process of its own, so that it reads once what its worker needs of the table and the batch."""
    lake.land("0.jsonl", NIGHTS[0])
    lake.run()
    lake.land("1.jsonl", NIGHTS[1])
    files, touched, old, probe = 1, 3, 2, 1  # before its first create a process sees whether conditions hold
    spec = snapshot = ledger = batch = sign = 1
    since_the_beginning = 1  # ledger entries that no checkpoint has yet

    assert requests_of(lake, lambda: lake.table.append(host="local")) == {
        "list": snapshot + ledger + spec + sign + 1,  # a page of the landing listing
        "get": snapshot
        + ledger
        + since_the_beginning
        + spec
        + sign  # of the first batch
        + files,  # JSON lines are read once
        "head": probe,  # on a server that is not the vendor's own
        "put": 1,
        "create": 1 + probe + 2 * sign,
    }
    assert requests_of(lake, lambda: lake.table.dedupe()) == {
        "list": spec + snapshot + 1,  # all manifests
        "get": spec
        + snapshot
        + batch
        + old
        + (1 + old),  # heads; the batch's pack, which is small, and base files of a row group
        "head": probe,
        "put": touched,
        "create": touched + probe,
    }
    assert requests_of(lake, lambda: lake.table.publish()) == {
        "list": ledger + snapshot + 1,  # all manifests
        "get": snapshot + batch + touched,
        "head": probe,
        "create": 1 + probe,
    }


def requests_of(lake: Lake, step: Callable[[], object]) -> Counter[str]:
    """What a new process that does this asks of both zones."""
    lake.reopen()
    step()
    stores = lake.opened.resources.store, lake.opened.resources.landing
    return +sum((Counter(store.requests.as_dict()) for store in stores), Counter[str]())


def test_upkeep_and_proof(lake: Lake) -> None:
    for number, rows in enumerate(NIGHTS):
        lake.land(f"{number}.jsonl", rows)
        lake.run()
    proved = lake.table.reconcile(deep=True)
    assert proved.proof
    assert all(p.balanced for p in proved.proof)
    assert not proved.gone
    lake.table.restore(0, dry=False)
    lake.finish_and_check()
    lake.table.vacuum(dry=False)
    lake.check()


# -- what goes wrong on the way


@pytest.fixture(params=["versitygw", "azurite"])
def server(request: pytest.FixtureRequest) -> Server:
    """One of each cloud in turn."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def proxy(server: Server, new_proxy: NewProxy) -> FaultProxy:
    return new_proxy(server)


@pytest.fixture
def night(proxy: FaultProxy, new_place: NewPlace, tmp_path: Path) -> Callable[[], Lake]:
    """Makes a lake behind the proxy, in a new place each time, with one night landed."""
    place, numbers = new_place(proxy.server), count()

    def land() -> Lake:
        number = str(next(numbers))
        lake = new_lake(tmp_path / number, f"{place}/{number}")
        lake.land("0.jsonl", NIGHTS[0])
        return lake

    return land


@pytest.mark.long
def test_night_that_dies_at_a_write_is_finished_by_the_next(night: Callable[[], Lake]) -> None:
    writes = ("create", "put")
    lake = night()
    lake.points.arm(-1, Fault.BEFORE, writes)
    lake.run()
    for number, call in enumerate(lake.points.seen):
        for fault in (Fault.KILL_BEFORE, Fault.KILL_AFTER):
            lake = night()
            lake.points.arm(number, fault, writes)
            with pytest.raises(Killed):
                lake.run()
            lake.points.disarm()
            lake.reopen()
            try:
                lake.finish_and_check()
            except Exception as e:
                e.add_note(f"{call}: {fault.value}")
                raise


@pytest.mark.long
def test_night_whose_answers_are_lost_goes_on(proxy: FaultProxy, night: Callable[[], Lake]) -> None:
    lake = night()
    proxy.log.clear()
    lake.run()
    writes = sum(event.method == "PUT" for event in proxy.log)
    for number in range(writes):
        lake = night()
        proxy.log.clear()
        proxy.rules = (Rule("lose", "PUT", skip=number, times=1),)
        lake.run()
        assert proxy.struck("lose") == 1
        proxy.rules = ()
        lake.finish_and_check()
        assert [n for n, e in lake.entries() if e.kind == "batch"] == [1], "the batch was appended again"


@pytest.mark.long
def test_one_answer_in_ten_is_lost(proxy: FaultProxy, night: Callable[[], Lake]) -> None:
    lake = night()
    proxy.rules = (Rule("lose", chance=0.1), refuse(503, "SlowDown", chance=0.1))
    for number, rows in enumerate(NIGHTS[1:], 1):
        lake.land(f"{number}.jsonl", rows)
        with contextlib.suppress(TryAgainError):
            lake.run()
    assert proxy.struck("lose") > 5
    proxy.rules = ()
    lake.finish_and_check()


@pytest.mark.long
def test_first_night_over_the_limit_of_a_store_is_slower_and_whole(
    versitygw: Server, new_place: NewPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that takes 30 requests a second, and a process that begins at 2.76 times as many: of S3's 5,500, 15,185."""
    limit = 30
    monkeypatch.setattr(remote, "START_RATE", limit * 15_185 / 5_500)
    body = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
    with fault_proxy(versitygw) as proxy:
        lake = new_lake(tmp_path, new_place(proxy.server))
        lake.land("0.jsonl", [row(key, day, 1, 1) for day in range(24) for key in "ab"])
        proxy.log.clear()
        proxy.rules = (Rule("answer", status=503, body=body, above=limit),)
        lake.run()
        proxy.rules = ()
        refused = proxy.struck("answer")
        assert 0 < refused < len(proxy.log) / 5
        lake.check()
        assert lake.rows() == lake.expected(1)


def test_filter_on_any_column_asks_for_no_file_without_such_rows(
    versitygw: Server, new_place: NewPlace, tmp_path: Path
) -> None:
    with fault_proxy(versitygw) as proxy:
        lake = new_lake(tmp_path, new_place(proxy.server))
        lake.land("0.jsonl", [row(f"k{i:04}", day, 1, day * 1000 + i) for day in range(10) for i in range(1000)])
        lake.run()

        def costs(where: str | None) -> tuple[int, int]:
            """Requests for data files, and the bytes of the answers."""
            proxy.log.clear()
            lake.table.to_arrow(where=where).read_all()
            files = [event for event in proxy.log if event.method == "GET" and "/base-" in event.path]
            return len(files), sum(event.bytes for event in files)

        requests, size = costs(None)
        some_requests, some_bytes = costs("v BETWEEN 3900 AND 4100")
        assert (requests, some_requests) == (10, 2)
        assert some_bytes < size / 4
        assert costs("v < 0 OR ts IS NULL") == (0, 0)


# -- commands

COMMANDS = [
    "plan",
    "run --host local",
    "status",
    "history",
    "files",
    "doctor",
    "explain k=a l=0",
    "quarantine",
    "head 2",
    "query from(t)",
    "diff 0 latest --rows",
    "update --set v=v+1 --where l=0 --yes",
    "delete --where l=7 --yes",
    "reconcile --deep",
    "compact --full",
    "restore 0 --yes",
    "run --host local",
    "vacuum --yes",
    "export --output out.parquet",
]


def configure(place: str) -> None:
    Path("lakeupsert.toml").write_text(
        f"""[tables.t]
        landing = "{place}/landing"
        processed = "{place}/processed"
        queue = "queue.sqlite"
        key = ["k", "l"]
        partition_by = ["d"]
        order_by = ["ts"]
        delete = {{column = "op", values = ["D"]}}
        schema = {{k = "string", l = "int", d = "date", ts = "timestamp_ntz", v = "bigint", op = "string"}}
        """
    )


@pytest.mark.core
def test_every_command_takes_a_table_there(
    store_server: Server, new_place: NewPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = new_place(store_server)
    new_lake(tmp_path, place).land("0.jsonl", NIGHTS[0])
    proposed = command("init", f"{place}/landing", "--dry-run")["proposed"]
    assert (proposed["landing"], proposed["processed"]) == (f"{place}/landing", f"{place}/processed")
    configure(place)
    for line in COMMANDS:
        command(*line.split())
    assert pq.read_table("out.parquet").num_rows == 4


def test_configuration_lies_there_too(
    store_server: Server, new_place: NewPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = new_place(store_server)
    new_lake(tmp_path, place).land("0.jsonl", NIGHTS[0])
    address = f"{place}/conf/lakeupsert.toml"
    for missing in (address, f"{place}"):
        result = CliRunner().invoke(main, ["status", "--config", missing, "--json"])
        assert result.exit_code == 2
        assert missing in json.loads(result.stdout)["error"]["message"]
    configure(place)
    text = Path("lakeupsert.toml").read_text().replace('"queue.sqlite"', f'"{tmp_path}/queue.sqlite"')
    Path("lakeupsert.toml").unlink()
    with open_store(f"{place}/conf").write("lakeupsert.toml") as sink:
        sink.write(text.encode())
    assert command("run", "--host", "local", "--config", address)["publish"]["rows"] == 4
    assert command("config", "--config", address)["path"] == address


def test_existing_folder_is_adopted(
    store_server: Server, new_place: NewPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = new_place(store_server)
    lake = new_lake(tmp_path, place)
    with lake.opened.resources.store.write("d=2020-01-01/part-0.parquet") as sink:
        pq.write_table(pa.table({"k": ["a"], "l": pa.array([0], pa.int32()), "ts": [row("a", 0, 1)["ts"]]}), sink)
    configure(place)
    assert command("adopt", f"{place}/processed")["rows"] == 1


@pytest.mark.long
def test_spark_tasks_append(
    server: Server, new_place: NewPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = new_place(server)
    lake = new_lake(tmp_path, place)
    lake.land("0.jsonl", NIGHTS[0])
    configure(place)
    # A process of its own, since Spark's workers have the environment with which its JVM began.
    program = "from lakeupsert.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "run", "--host", "spark", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["result"]["requests"]["put"] >= 3
    lake.check()


@pytest.mark.long
def test_spark_without_the_jars_is_told_which(server: Server, new_place: NewPlace, tmp_path: Path) -> None:
    place = new_place(server)
    lake = new_lake(tmp_path, place)
    lake.land("0.jsonl", NIGHTS[0])
    lake.run()
    lake.configure()
    jar = "hadoop-azure" if place.startswith("az:") else "hadoop-aws"
    script = f"""
from pyspark.sql import SparkSession
from lakeupsert import Table
from lakeupsert.errors import ConfigurationError
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
try:
    Table.open("lakeupsert.toml").to_spark(spark)
except ConfigurationError as e:
    hadoop = spark._jvm.org.apache.hadoop.util.VersionInfo.getVersion()
    assert e.code == "no-hadoop-jar", e
    assert f"spark.jars.packages=org.apache.hadoop:{jar}:{{hadoop}}," in e.next, e
    print("told")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=lake.root, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout.splitlines()[-1:] == ["told"], done.stdout + done.stderr[-2000:]


def command(*args: str) -> Any:
    result = CliRunner().invoke(main, [*args, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["result"]


@pytest.mark.core
def test_server_that_refuses_the_end_of_a_small_object_loses_no_row(
    versitygw: Server, new_proxy: NewProxy, new_place: NewPlace, tmp_path: Path
) -> None:
    """As rclone serve s3 1.75.2 and gofakes3 1.2.0 do: a suffix range longer than the object is answered with 416."""
    proxy = new_proxy(versitygw)
    lake = new_lake(tmp_path, new_place(proxy.server), quarantine_limit="0%")
    lake.land("first.jsonl", [row("a", 0, 0)])
    lake.run()
    proxy.rules = (replace(refuse(416, "InvalidRange", "GET"), having="range: bytes=-"),)
    lines = "k,l,d,ts,v,op\nb,1,2020-01-01,2020-01-01T00:00:01,1,U\n"
    store = open_store(lake.settings.landing)
    bodies = {"b.csv": lines.encode(), "b.csv.gz": gzip.compress(lines.replace("b,1", "g,1").encode())}
    for name, body in bodies.items():
        with store.write(name) as sink:
            sink.write(body)
    with store.write("c.parquet") as sink:
        pq.write_table(pa.Table.from_pylist([row("c", 0, 1, 7)]), sink)
    lake.reopen()
    lake.table.run(host="local", workers=1)
    assert sorted(r["k"] for r in lake.rows()) == ["a", "b", "c", "g"]
