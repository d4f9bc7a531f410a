"""Messages of Kafka as landing files, without a broker: what a file has, its position says, for every partition."""

import gzip
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fastavro
import pytest

from lakeupsert.config import KafkaSource
from lakeupsert.pipeline.stop import Stop
from lakeupsert.sources.follow import CaptureOptions
from lakeupsert.sources.messages import line_of, refused_line
from tests.harness.lake import Lake

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed")

from lakeupsert.sources import kafka
from lakeupsert.sources.avro import Schema


@pytest.mark.parametrize(
    ("value", "more", "line"),
    [
        (b'{"a": 1}', {}, b'{"a": 1}'),
        (b' {"a": 1, "n": 1.50}\r\n', {"b": 2}, b'{"a": 1, "n": 1.50,"b":2}'),
        (b"{ }", {"b": 2}, b'{"b":2}'),
        (b'{"a":\n1}', {}, b'{"a": 1}'),
        (b'{"a":1', {"b": 2}, b'{"a":1'),
        (b'{"a":"}', {"b": 2}, b'{"a":","b":2}'),
        (b"[{}]", {}, b'"[{}]"'),
        (b"", {}, b'""'),
        (b"\xff\n{", {}, b'"\\udcff\\n{"'),
        (b'{"a":1}\n{"a":2}', {}, b'"{\\"a\\":1}\\n{\\"a\\":2}"'),
    ],
)
def test_a_value_is_one_line(value: bytes, more: dict[str, object], line: bytes) -> None:
    assert line_of(value, more) == line
    assert json.loads(refused_line(value)).encode(errors="surrogateescape") == value


class Broker:
    """Two partitions that become three, with messages whose schema is that of the number in their value."""

    partitions: ClassVar[int] = 2
    assigned: ClassVar[dict[int, int]] = {}

    def __init__(self, settings: object) -> None: ...

    def close(self) -> None: ...

    def describe_topics(self, names: object, request_timeout: float) -> dict[str, Any]:
        parts = [SimpleNamespace(id=number) for number in range(self.partitions)]
        return {"t": SimpleNamespace(result=lambda: SimpleNamespace(topic_id="x", partitions=parts))}

    def get_watermark_offsets(self, partition: object, timeout: float = 0) -> tuple[int, int]:
        return 0, 9

    def list_offsets(self, wanted: dict[Any, Any], request_timeout: float) -> dict[Any, Any]:
        return {one: SimpleNamespace(result=lambda: SimpleNamespace(offset=9)) for one in wanted}

    def incremental_assign(self, found: list[Any]) -> None:
        for one in found:
            assert one.partition not in self.assigned
            self.assigned[one.partition] = one.offset


class Message(SimpleNamespace):
    """A message of `confluent_kafka`, whose parts are functions."""

    def __init__(self, partition: int, offset: int, value: bytes) -> None:
        parts = {
            "topic": "t",
            "partition": partition,
            "offset": offset,
            "value": value,
            "key": None,
            "timestamp": (0, 0),
        }
        super().__init__(**{name: lambda found=found: found for name, found in parts.items()})


class Files:
    """Takes landing files, and sees that each position is behind as many messages as landed."""

    leadership = SimpleNamespace(lead=lambda: True)

    def __init__(self) -> None:
        self.count, self.files = 0, 0

    def land(self, data: bytes, after: str, ending: str) -> None:
        if ending == ".avro":
            self.count += sum(1 for _ in fastavro.reader(io.BytesIO(data)))
        elif data:
            self.count += len(gzip.decompress(data).splitlines())
        self.files += bool(data)
        assert sum(json.loads(after)["t"]["next"].values()) == self.count


def test_a_position_is_behind_what_its_file_has_also_if_the_schema_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AdminClient", "Consumer"):
        monkeypatch.setattr(kafka, name, Broker)
    monkeypatch.setattr(Broker, "assigned", {})
    source = KafkaSource(from_="kafka://h:1", table="t", topics=("t",), rows=3, registry="http://h")
    topics = kafka.Topics(source, {}, None)
    topics.look()
    assert (Broker.assigned, topics.behind) == ({0: 0, 1: 0}, 18)
    monkeypatch.setattr(Broker, "partitions", 3)
    topics.look()
    assert (Broker.assigned, topics.behind) == ({0: 0, 1: 0, 2: 0}, 27)
    files, lake = Files(), Lake(tmp_path)
    landing = kafka.TopicsToFiles(lake.opened, files, source, "", CaptureOptions(stop=Stop()))  # type: ignore[arg-type]
    text = {"type": "record", "name": "r", "fields": [{"name": "a", "type": "long"}]}
    schemas = [Schema(json.dumps(text).encode(), fastavro.parse_schema(text)) for _ in range(2)]
    reads = {b"\0\0\0\0\1\2": (schemas[0], 1), b"\0\0\0\0\2\2": (schemas[1], 1)}
    landing._registry = SimpleNamespace(read=reads.get)  # type: ignore[assignment]
    landing._topics, landing._landed, landing._draft = topics, None, kafka.Draft(9, 3, 99)
    for offset in range(4):
        for partition in range(3):
            for value in [[*reads, b"bad"][(partition * 7 + offset) % 3]]:
                landing._take(Message(partition, offset, value))
    for offset in range(4, 12):
        landing._take(Message(0, offset, next(iter(reads))))
    landing._land()
    assert files.count == 20
    assert 9 < files.files < 20
