"""Topics of a real broker flow into a table: what is produced is landed once, whoever dies and whatever comes."""

import gzip
import io
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fastavro
import msgspec
import pytest

from lakeupsert import Table
from lakeupsert.config import DeleteSettings, KafkaSource, ReadSettings
from lakeupsert.errors import LakeupsertError, RefusedError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.stop import Stop
from lakeupsert.sources.draft import Draft
from lakeupsert.sources.files import SourceFiles
from lakeupsert.sources.messages import line_of
from tests.harness.kafka import Broker
from tests.harness.lake import Lake
from tests.harness.processes import wait_until
from tests.harness.servers import free_port

kafka = pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed")
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic  # noqa: E402

from lakeupsert.sources.follow import CaptureOptions  # noqa: E402
from lakeupsert.sources.kafka import follow_topics  # noqa: E402

pytestmark = pytest.mark.long
QUIET = {"log_level": 2}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("kafka")) as one:
        yield one


class Kafka:
    """Topics of one test, each with the name of the test before its own."""

    def __init__(self, broker: Broker, prefix: str) -> None:
        self.broker, self.prefix = broker, prefix
        self.admin = AdminClient({"bootstrap.servers": broker.address, **QUIET})
        self.producer = kafka.Producer({"bootstrap.servers": broker.address, "linger.ms": 5, **QUIET})

    def create(self, partitions: int = 1, name: str = "t", **config: object) -> str:
        settings = {key.replace("_", "."): str(value) for key, value in {"retention_ms": -1, **config}.items()}
        self.admin.create_topics([NewTopic(self.prefix + name, partitions, 1, config=settings)])[
            self.prefix + name
        ].result(30)
        return self.prefix + name

    def send(self, *values: object, name: str = "t", **more: Any) -> None:
        for value in values:
            data = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
            self.producer.produce(self.prefix + name, data, **more)
        assert self.producer.flush(30) == 0


@pytest.fixture
def topics(broker: Broker, request: pytest.FixtureRequest) -> Kafka:
    return Kafka(broker, f"{abs(hash(request.node.nodeid)):x}-")


class Landing:
    """A lake with a source, and what the source has said."""

    def __init__(
        self, root: Path, topics: Kafka, name: str = "t", more: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        given = {"key": ("id",), "partition_by": (), "order_by": ("ts",), "schema": {"id": "bigint"}, **settings}
        self.lake, self.warnings, self.behind = Lake(root, **given), list[str](), list[int]()
        self.password = ""
        self.source = KafkaSource(
            from_=f"kafka://{topics.broker.address}",
            table="t",
            topics=(topics.prefix + name,),
            seconds=0.2,
            **more or {},
        )

    def follow(self, until: Callable[[], bool], name: str = "events", seconds: float = 30) -> int:
        """Run the source in this process until the condition holds. Returns the number of rows that it landed."""
        stop, rows, end = Stop(), [0], time.monotonic() + seconds

        def watch() -> None:
            try:
                while not until() and time.monotonic() < end and not stop.is_set():
                    time.sleep(0.05)
            finally:
                stop.set()

        def collect(count: int) -> None:
            rows[0] += count

        self.rows = rows
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            options = CaptureOptions(
                stop=stop, collect=collect, warn=self.warnings.append, behind=self.behind.append, leader_seconds=3
            )
            follow_topics(self.lake.opened, name, self.source, self.password, options)
        finally:
            stop.set()
            thread.join()
        return rows[0]

    def land(self, count: int, name: str = "events") -> int:
        """Run the source until it has landed so many rows."""
        self.rows = [0]
        return self.follow(lambda: self.rows[0] >= count, name)

    def merged(self) -> list[dict[str, Any]]:
        self.lake.table.run(host="local", workers=1)
        return self.lake.table.to_arrow().read_all().to_pylist()


def landed(root: Path, name: str = "events") -> list[bytes]:
    """The lines of all landing files, in their order."""
    files = [path.read_bytes() for path in sorted((root / "landing" / name).glob("*.jsonl.gz"))]
    return [line for data in files if data for line in gzip.decompress(data).splitlines()]


def test_values_are_rows_and_kafkas_columns_come_if_the_table_names_them(tmp_path: Path, topics: Kafka) -> None:
    topics.create()
    topics.send(
        {"id": 1, "v": "a"},
        {"id": 2, "v": "b\n"},
        b' {"id": 1,\n "v": "c"} ',
        b'{"id":3}',
        key=b"k",
        timestamp=1_700_000_000_123,
    )
    one = Landing(
        tmp_path, topics, order_by=("__kafka_offset",), schema={"id": "bigint", "__kafka_timestamp": "timestamp"}
    )
    assert one.land(4) == 4
    rows = sorted(one.merged(), key=lambda row: row["id"])
    assert [(row["id"], row["v"], row["__kafka_offset"]) for row in rows] == [(1, "c", 2), (2, "b\n", 1), (3, None, 3)]
    assert {row["__kafka_timestamp"].isoformat() for row in rows} == {"2023-11-14T22:13:20.123000+00:00"}
    assert "__kafka_key" not in rows[0]
    topics.send({"id": 1, "v": "d"})
    assert one.land(1) == 1
    assert [row["v"] for row in one.merged() if row["id"] == 1] == ["d"]


POISON = [
    *(
        b"",
        b" ",
        b"\n" * 5,
        b"7",
        b"null",
        b'"text"',
        b"[{}]",
        b"[1, 2]",
        b"\xff\x00\n{",
        b"\xef\xbb\xbf{}",
        b"{" * 2000,
    ),
    *(b'{"id": 1', b'{"id": 1}\n{"id": 2}', b'{"id": NaN}', b'{"id": "a\nb"}', b'{"a":"}', b'{"id": "\xff"}'),
]


def test_poison_goes_to_quarantine_byte_by_byte_and_stops_nothing(tmp_path: Path, topics: Kafka) -> None:
    topics.create()
    for number, value in enumerate(POISON):
        topics.send(value, {"id": number, "ts": 1})
    for order, quarantine in ((("ts",), "100%"), (("__kafka_offset",), "100%")):
        one = Landing(tmp_path / order[0], topics, order_by=order, quarantine_limit=quarantine)
        assert one.land(2 * len(POISON)) == 2 * len(POISON)
        assert sorted(int(row["id"]) for row in one.merged()) == [*range(len(POISON))]
        refused = one.lake.table.quarantine()
        assert refused.read_all().num_rows == len(POISON)
        lines = [line for line in landed(one.lake.root) if b'"ts"' not in line]
        texts = [json.loads(line).encode(errors="surrogateescape") if line.startswith(b'"') else line for line in lines]
        assert [text.partition(b',"__kafka')[0].rstrip(b"}") for text in texts] == [
            value.rstrip(b"}") for value in POISON
        ]


def test_tombstones_delete_a_key_or_are_counted(tmp_path: Path, topics: Kafka) -> None:
    topics.create()
    for key in (b'{"id": 1}', b"2", b'{"schema": null, "payload": {"id": 3}}', b'"4"', b"5"):
        number = int(re.findall(rb"[0-9]", key)[0])
        topics.send({"id": number, "ts": 1}, None if number < 5 else {"id": 5, "ts": 2}, key=key)
    topics.send(None, key=None)
    counted = Landing(tmp_path / "counted", topics, order_by=("record_timestamp",))
    assert counted.land(6) == 6
    assert [row["id"] for row in sorted(counted.merged(), key=lambda row: row["id"])] == [1, 2, 3, 4, 5]
    assert [text.split()[0] for text in counted.warnings] == ["1"]
    deletes = DeleteSettings(column="__kafka_tombstone", values=("true",))
    one = Landing(tmp_path / "one", topics, order_by=("record_timestamp",), delete=deletes)
    assert one.land(11) == 11
    assert [row["id"] for row in one.merged()] == [5]
    assert one.lake.table.quarantine().read_all()["raw"].to_pylist() == ['"The tombstone of the key None"']
    assert not one.warnings
    events = Landing(tmp_path / "events", topics, read=ReadSettings(envelope="debezium"))
    assert events.land(6) == 6
    assert not events.warnings


def test_only_committed_messages_come_and_the_position_is_behind_marks(tmp_path: Path, topics: Kafka) -> None:
    name = topics.create()
    writer = kafka.Producer({"bootstrap.servers": topics.broker.address, "transactional.id": name, **QUIET})
    writer.init_transactions(30)
    for number, ends in enumerate((writer.abort_transaction, writer.commit_transaction, writer.abort_transaction)):
        writer.begin_transaction()
        writer.produce(name, json.dumps({"id": number, "ts": 1}).encode())
        writer.flush()
        ends(30)
    one = Landing(tmp_path, topics)
    assert one.land(1) == 1
    one.follow(lambda: False, seconds=2)
    position = json.loads(SourceFiles(one.lake.opened, "events", Draft.ending).begin() or "")
    assert position[name]["next"] == {"0": 6}
    assert [row["id"] for row in one.merged()] == [1]


def test_messages_that_the_broker_deleted_are_an_error(tmp_path: Path, topics: Kafka) -> None:
    name = topics.create()
    one = Landing(tmp_path, topics)
    topics.send({"id": 1, "ts": 1})
    assert one.land(1) == 1
    topics.send(*({"id": n, "ts": 1} for n in range(2, 6)))
    topics.admin.delete_records([kafka.TopicPartition(name, 0, 4)])[kafka.TopicPartition(name, 0)].result(30)
    with pytest.raises(RefusedError) as caught:
        one.land(1)
    assert caught.value.code == "messages-lost"
    assert "lacks the message 1 of partition 0: the broker has 4 to 4" in caught.value.message
    assert one.land(1, name="anew") == 1
    assert sorted(row["id"] for row in one.merged()) == [1, 5]


@pytest.mark.parametrize("count", [1, 5], ids=["fewer", "more"])
def test_a_topic_that_was_made_again_is_an_error(tmp_path: Path, topics: Kafka, count: int) -> None:
    name = topics.create()
    one = Landing(tmp_path, topics)
    topics.send({"id": 1, "ts": 1}, {"id": 2, "ts": 1})
    assert one.land(2) == 2
    topics.admin.delete_topics([name])[name].result(30)
    with pytest.raises(LakeupsertError) as gone:
        one.land(1)
    assert gone.value.code == "unknown-topic"
    topics.create()
    topics.send(*({"id": n, "ts": 1} for n in range(3, 3 + count)))
    with pytest.raises(RefusedError) as caught:
        one.land(1)
    assert caught.value.code == "messages-lost"
    assert one.land(count, name="anew") == count
    assert sorted(row["id"] for row in one.merged()) == [*range(1, 3 + count)]


def test_new_partitions_are_read_from_their_beginning(
    tmp_path: Path, topics: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakeupsert.sources.kafka.SOURCE_LOOK_SECONDS", 0.5)
    name = topics.create()
    one = Landing(tmp_path, topics)
    topics.send({"id": 1, "ts": 1})

    def grow() -> bool:
        if one.rows[0] == 1 and not grown:
            grown.append(topics.admin.create_partitions([NewPartitions(name, 3)])[name].result(30))
            newer = Kafka(topics.broker, topics.prefix)  # it knows the new partitions
            for n in range(2, 8):
                newer.send({"id": n, "ts": 1}, partition=n % 3)
        return one.rows[0] == 7

    grown: list[object] = []
    assert one.follow(grow) == 7
    assert sorted(row["id"] for row in one.merged()) == [*range(1, 8)]


def test_how_far_it_is_behind(tmp_path: Path, topics: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakeupsert.sources.kafka.SOURCE_LOOK_SECONDS", 0.2)
    topics.create(2)
    topics.send(*({"id": n, "ts": 1} for n in range(100)))
    one, shown = Landing(tmp_path, topics), list[int | None]()

    def status() -> bool:
        found = Lake(tmp_path, **one.lake.given).table.status().freshness.sources
        shown.extend(source.behind for source in found.values())
        return shown[-1:] == [0]

    assert one.follow(status) == 100
    assert (one.behind[0], one.behind[-1]) == (100, 0)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("secure"), login=("reader", "secret")) as one:
        yield one


@pytest.mark.few(2)
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_a_broker_with_sasl_and_tls(tmp_path: Path, secure: Broker, mechanism: str) -> None:
    topics, properties = Kafka(secure, mechanism), tmp_path / "client.properties"
    topics.create()
    topics.send({"id": 1, "ts": 1})
    given = {"security.protocol": "SASL_SSL", "sasl.mechanism": mechanism, "ssl.ca.location": secure.certificate}
    properties.write_text("".join(f"{name} = {value}\n" for name, value in given.items()))
    one = Landing(tmp_path, topics, more={"properties": str(properties)})
    one.source = msgspec.structs.replace(one.source, from_=f"kafka://reader@{secure.secure}")
    one.password = "secret"
    assert one.land(1) == 1
    assert [row["id"] for row in one.merged()] == [1]
    one.password = "none of it"
    one.follow(lambda: bool(one.warnings), seconds=60)
    assert "uthentication" in one.warnings[0], one.warnings
    assert "none of it" not in one.warnings[0]


def test_a_compacted_topic_gives_the_newest_message_of_each_key(tmp_path: Path, topics: Kafka) -> None:
    name = topics.create(
        cleanup_policy="compact",
        min_cleanable_dirty_ratio=0.01,
        segment_ms=200,
        max_compaction_lag_ms=200,
        delete_retention_ms=0,
    )
    for turn in range(4):
        for n in range(3):
            topics.send({"id": n, "ts": turn}, key=b"%d" % n)
        time.sleep(0.3)
    reader = kafka.Consumer(
        {"bootstrap.servers": topics.broker.address, "group.id": "x", "enable.partition.eof": True, **QUIET}
    )

    def count() -> int:
        topics.send({"id": 9, "ts": 1}, key=b"9")  # compaction never touches the newest segment
        reader.assign([kafka.TopicPartition(name, 0, 0)])
        found = 0
        while (message := reader.poll(5)) is not None and message.error() is None:
            found += json.loads(message.value())["id"] < 9
        return found

    wait_until(lambda: count() == 3, "the topic is compacted")
    reader.close()
    one = Landing(tmp_path, topics)
    one.follow(lambda: one.rows[0] >= 3)
    assert sorted((row["id"], row["ts"]) for row in one.merged()) == [(0, 3), (1, 3), (2, 3), (9, 1)]


class Registry(BaseHTTPRequestHandler):
    """What a schema registry answers: Apicurio 3.3.3 was tried with the same messages."""

    schemas: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        number = int(self.path.rpartition("/")[2])
        is_known = self.path.startswith("/schemas/ids/") and 0 < number <= len(self.schemas)
        self.send_response(200 if is_known else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"schema": json.dumps(self.schemas[number - 1])} if is_known else {}).encode())

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def registry() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def schema(*more: object) -> dict[str, Any]:
    price = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    at = {"type": "long", "logicalType": "timestamp-micros"}
    fields = [{"name": name, "type": type_} for name, type_ in (("id", "long"), ("ts", at), ("price", price), *more)]
    return {"type": "record", "name": "sale", "fields": fields}


def wire(number: int, schema: dict[str, Any], row: dict[str, Any]) -> bytes:
    data = io.BytesIO()
    fastavro.schemaless_writer(data, schema, row)
    return b"\0" + number.to_bytes(4) + data.getvalue()


def test_avro_of_a_registry_keeps_its_types_and_a_new_schema_begins_a_file(
    tmp_path: Path, topics: Kafka, registry: str
) -> None:
    old, new = schema(), schema(("note", ["null", "string"]))
    Registry.schemas = [old, new, {"type": "record", "name": "key", "fields": [{"name": "id", "type": "long"}]}]
    one = Landing(
        tmp_path,
        topics,
        more={"registry": registry},
        order_by=("record_timestamp",),
        delete=DeleteSettings(column="__kafka_tombstone", values=("true",)),
        quarantine_limit="100%",
    )
    topics.create()
    at = datetime(2026, 11, 29, 12, 0, 0, 123456, UTC)
    row = {"id": 1, "ts": at, "price": Decimal("8.70")}
    bad = [
        b"",
        b"\0",
        b"{}",
        wire(9, old, row),
        wire(1, old, row) + b"x",
        wire(1, old, row)[:-1],
        wire(1, old, row)[:5],
    ]
    topics.send(wire(1, old, row), wire(1, old, {**row, "id": 2}), wire(2, new, {**row, "note": "n"}), *bad)
    topics.send(wire(1, old, {**row, "id": 3}), wire(1, old, {**row, "id": 4}))
    topics.send(None, key=wire(3, Registry.schemas[2], {"id": 3}))
    assert one.land(6 + len(bad)) == 6 + len(bad)
    names = [path.name for path in sorted((tmp_path / "landing" / "events").iterdir())]
    assert [name.partition(".")[2] for name in names] == ["avro", "avro", "jsonl.gz", "avro", "jsonl.gz"]
    same = {"ts": at, "price": Decimal("8.70")}
    rows = [{"id": 1, **same, "note": "n"}, {"id": 2, **same, "note": None}, {"id": 4, **same, "note": None}]
    wanted = {"id", "ts", "price", "note"}
    assert [{name: row[name] for name in wanted} for row in sorted(one.merged(), key=lambda row: row["id"])] == rows
    assert one.lake.table.quarantine().read_all().num_rows == len(bad)


def test_a_registry_that_does_not_answer_stops_nothing_for_good(tmp_path: Path, topics: Kafka, registry: str) -> None:
    Registry.schemas = [schema()]
    topics.create()
    topics.send(wire(1, Registry.schemas[0], {"id": 1, "ts": datetime.now(UTC), "price": Decimal(1)}))
    away = Landing(tmp_path, topics, more={"registry": f"http://127.0.0.1:{free_port()}"})
    assert away.follow(lambda: bool(away.warnings)) == 0
    assert "registry" in away.warnings[0]
    here = Landing(tmp_path, topics, more={"registry": registry}, schema={})
    assert here.land(1) == 1
    assert [row["id"] for row in here.merged()] == [1]


def signs(one: Landing, name: str = "events") -> list[tuple[str, str]]:
    """What `doctor` says of the source."""
    with Table.of(OpenTable("t", one.lake.settings, sources={name: one.source})) as table:
        return [(found.level, found.found) for found in table.doctor() if found.check == f"source {name}"]


def test_doctor_looks_at_topics_and_registry_and_lands_nothing(tmp_path: Path, topics: Kafka, registry: str) -> None:
    Registry.schemas = [schema()]
    one = Landing(tmp_path, topics, more={"registry": registry})
    [(level, found)] = signs(one)
    assert level == "problem"
    assert "lacks one of the topics" in found
    topics.create(3)
    [(_, found), (_, answers)] = signs(one)
    assert "3 partitions" in found
    assert "answers" in answers
    away = Landing(tmp_path, topics, more={"registry": f"http://127.0.0.1:{free_port()}"})
    assert [level for level, _ in signs(away)] == ["ok", "problem"]
    topics.send({"id": 1})
    assert Landing(tmp_path, topics).land(1) == 1
    topics.admin.delete_topics([f"{topics.prefix}t"])[f"{topics.prefix}t"].result(30)
    wait_until(lambda: f"{topics.prefix}t" not in topics.admin.list_topics(timeout=10).topics, "it is deleted")
    topics.create()
    [(level, found)] = signs(Landing(tmp_path, topics))
    assert (level, "made again" in found) == ("problem", True)
    assert len(list((tmp_path / "landing/events").iterdir())) == 1
    one.source = KafkaSource(from_=f"kafka://127.0.0.1:{free_port()}", table="t", topics=("t",))
    assert [level for level, _ in signs(one)] == ["problem"]


CONFIG = """
[tables.t]
landing = "landing"
processed = "processed"
key = ["__kafka_partition", "__kafka_offset"]
partition_by = []
quarantine_limit = "100%"

[sources.events]
from = "kafka://{address}"
table = "t"
topics = ["{topic}"]
seconds = 0.1
rows = 500
"""
KILLS = int(os.environ.get("KILLS", "8"))


def test_processes_and_brokers_that_are_killed_again_and_again(tmp_path: Path) -> None:
    """A producer runs meanwhile. Each offset is landed once, with what was produced, poison too."""
    chance = random.Random(41)
    with Broker(tmp_path / "kafka") as broker:
        topics = Kafka(broker, "")
        topic = topics.create(3)
        (tmp_path / "lakeupsert.toml").write_text(CONFIG.format(address=broker.address, topic=topic))
        done, sent = threading.Event(), [0]

        def produce() -> None:
            while not done.is_set():
                for _ in range(200):
                    value = chance.choice(POISON) if chance.random() < 0.02 else b'{"n": %d}' % sent[0]
                    topics.producer.produce(topic, value, key=b"%d" % (sent[0] % 97))
                    sent[0] += 1
                topics.producer.flush(60)
                time.sleep(0.02)

        thread = threading.Thread(target=produce)
        thread.start()
        try:
            for number in range(KILLS):
                process = capture(tmp_path)
                time.sleep(chance.uniform(1, 6))
                if number % 4 == 1:
                    broker.kill()
                    broker.start()
                process.kill()
                process.wait()
        finally:
            done.set()
            thread.join()
        produced = messages(broker, topic)
        process = capture(tmp_path)
        wait_until(lambda: len(landed(tmp_path)) >= len(produced), "everything is landed")
        process.terminate()
        assert process.wait(60) == 75
    assert len(produced) >= sent[0]
    found = [(dict(PLACE.findall(line)), line) for line in landed(tmp_path)]
    rows = {(int(place[b"partition"]), int(place[b"offset"])): line for place, line in found if place}
    assert len(rows) == sum(bool(place) for place, _ in found)
    assert rows == {
        place: line for place, value in produced.items() if b"kafka" in (line := line_of(value, columns(place)))
    }
    others = sorted(line_of(value, columns(place)) for place, value in produced.items() if place not in rows)
    assert others == sorted(line for place, line in found if not place)
    table = Table.open(tmp_path / "lakeupsert.toml")
    table.run(host="local", workers=1)
    refused = table.quarantine().read_all().num_rows
    assert table.to_arrow().read_all().num_rows + refused == len(produced)
    assert 0 < refused < len(produced) / 10


PLACE = re.compile(rb'"__kafka_(partition|offset)":(\d+)')


def columns(place: tuple[int, int]) -> dict[str, object]:
    return {"__kafka_partition": place[0], "__kafka_offset": place[1]}


def capture(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lakeupsert", "capture", "events"]
    with open(folder / "capture.log", "ab") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)


def messages(broker: Broker, topic: str) -> dict[tuple[int, int], bytes]:
    """What the broker has, by partition and offset."""
    settings = {"bootstrap.servers": broker.address, "group.id": "x", "enable.partition.eof": True, **QUIET}
    reader, found, open_ = kafka.Consumer(settings), dict[tuple[int, int], bytes](), {0, 1, 2}
    reader.assign([kafka.TopicPartition(topic, number, 0) for number in open_])
    while open_:
        for message in reader.consume(1000, 1):
            if message.error():
                open_.discard(message.partition())
            else:
                found[message.partition(), message.offset()] = message.value()
    reader.close()
    return found
