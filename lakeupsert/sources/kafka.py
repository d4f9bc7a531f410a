"""Topics of Kafka flow into the landing zone of a table.

Reads     all partitions of the topics, in no consumer group; schemas from a registry
Writes    landing files, each with the position behind it (`sources.files`)
Repeat    safe: the next process begins behind the last landing file

    begin -> look: partitions, and whether each topic is still the same -> read -> land when it is due, and so on
               '------------------------- every few seconds --------------------------'

A message that can't be a row becomes one that goes to quarantine. A message that the broker no longer has stops the source.
"""

import base64
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import javaproperties
import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from lakeupsert import clock
from lakeupsert.config import KafkaSource
from lakeupsert.decoding import decoder_of
from lakeupsert.errors import ConfigurationError, RefusedError, TryAgainError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.retries import SOURCE_ANSWER_SECONDS, SOURCE_LOOK_SECONDS
from lakeupsert.sources.avro import HEAD_BYTES, AvroDraft, Registry
from lakeupsert.sources.draft import Draft
from lakeupsert.sources.files import SourceFiles
from lakeupsert.sources.follow import CaptureOptions, follow
from lakeupsert.sources.messages import COLUMNS, TOMBSTONE, key_of, line_of, refused_line, tombstone_line

log = logging.getLogger(__name__)
_MANY = 10_000
_WAIT_SECONDS = 0.1


def follow_topics(table: OpenTable, name: str, source: KafkaSource, password: str, options: CaptureOptions) -> None:
    """Land the messages of a source's topics until `stop` is set. Raises RefusedError if some are lost."""
    files = SourceFiles(table, name, Draft.ending, options.leader_seconds)
    follow(name, files, TopicsToFiles(table, files, source, password, options).run, options)


class Topic(msgspec.Struct):
    """A part of the position: which topic of that name it is, and the next offset of each partition."""

    id: str
    next: dict[int, int]


class Topics:
    """The messages of all partitions, from a position on.

    Attributes:
        position: behind the messages that the caller has called `done`.
        behind: how many messages, and marks of transactions, the topics had behind it at the last `look`.
    """

    def __init__(self, source: KafkaSource, properties: dict[str, str], position: str | None) -> None:
        self._names, self._server = list(source.topics), source.from_
        self.position = decoder_of(dict[str, Topic]).decode(position) if position else {}
        self._reason, self.behind = "", 0
        own = {
            "group.id": "lakeupsert",  # the library asks for one; without a subscription no broker hears of it
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
        self._admin = AdminClient({**properties, "logger": log, "error_cb": self._note})
        self._consumer = Consumer({**properties, **own, "logger": log, "error_cb": self._note})
        self._assigned: set[tuple[str, int]] = set()
        self.close = self._consumer.close

    def _note(self, error: KafkaError) -> None:
        self._reason = error.str()

    def look(self) -> None:
        """Read from partitions that are new, see that each topic is the one of the position, and how far behind that is."""
        try:
            found = self._admin.describe_topics(TopicCollection(self._names), request_timeout=SOURCE_ANSWER_SECONDS)
            for name, future in found.items():
                topic = future.result()
                known = self.position.setdefault(name, Topic(id=str(topic.topic_id), next={}))
                if known.id != str(topic.topic_id):
                    raise self._lost(name, "was deleted and made again since the last message that was read")
                for one in (TopicPartition(name, partition.id) for partition in topic.partitions):
                    if one.partition not in known.next:
                        known.next[one.partition] = self._consumer.get_watermark_offsets(one, SOURCE_ANSWER_SECONDS)[0]
                    one.offset = known.next[one.partition]
                    if (name, one.partition) not in self._assigned:
                        self._consumer.incremental_assign([one])
                        self._assigned.add((name, one.partition))
            latest = {TopicPartition(*one): OffsetSpec.latest() for one in self._assigned}
            ends = self._admin.list_offsets(latest, request_timeout=SOURCE_ANSWER_SECONDS)
            left = (end.result().offset - self.position[one.topic].next[one.partition] for one, end in ends.items())
            self.behind = sum(max(0, messages) for messages in left)
        except KafkaException as e:
            if e.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise ConfigurationError(
                    "unknown-topic",
                    f"{self._server} lacks one of the topics {', '.join(self._names)}. Nothing more was read.",
                    next="correct `topics`, or create the topic",
                ) from e
            raise self._unreachable(e.args[0]) from e

    def read(self) -> Iterator[Message]:
        """The next messages; none if no one comes for a moment."""
        for message in self._consumer.consume(_MANY, _WAIT_SECONDS):
            error = message.error()
            if error is None:
                yield message
            elif error.code() == KafkaError._PARTITION_EOF:  # also behind marks of transactions, which no one reads
                self.position[message.topic()].next[message.partition()] = message.offset()
            elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                low, high = self._consumer.get_watermark_offsets(TopicPartition(message.topic(), message.partition()))
                have = f"the broker has {low} to {high - 1}" if high > low else "the broker has none"
                why = f"lacks the message {message.offset()} of partition {message.partition()}: {have}"
                raise self._lost(message.topic(), why)
            elif not error.retriable():
                raise self._unreachable(error)

    def done(self, message: Message) -> None:
        self.position[message.topic()].next[message.partition()] = message.offset() + 1

    def _lost(self, topic: str, why: str) -> RefusedError:
        return RefusedError(
            "messages-lost",
            f"{self._server}: topic {topic} {why}. Messages between are lost. Nothing more was read.",
            next="load what is missing from elsewhere, then rename the source: it reads its topics from their beginning",
        )

    def _unreachable(self, error: KafkaError) -> TryAgainError:
        self._admin.poll(0)  # it hands over what `_note` takes, for example that the password is wrong
        why = f"{error.str()}. {self._reason}".rstrip(". ")
        return TryAgainError(
            "kafka-unreachable", f"{self._server}: {why}.", next="start the command again when the brokers answer"
        )


class TopicsToFiles:
    """Lands the messages of a source's topics."""

    def __init__(
        self, table: OpenTable, files: SourceFiles, source: KafkaSource, password: str, options: CaptureOptions
    ) -> None:
        self._files, self._source, self._options = files, source, options
        self._properties = properties_of(source, password)
        settings = table.settings
        named = {name.lower() for name in table.declaration.named_columns} if settings.read.envelope is None else set()
        self._columns = frozenset(named.intersection(COLUMNS))
        self._key, self._deletes, self._enveloped = settings.key, TOMBSTONE in named, settings.read.envelope is not None
        self._registry = registry_of(source, self._properties)
        self._tombstones = 0

    def run(self) -> None:
        """Land messages until `stop` is set, or until this process no longer reads the source."""
        options, begun = self._options, self._files.begin()
        with closing(Topics(self._source, self._properties, begun)) as topics:
            self._topics, self._landed, looked_at = topics, begun, float("-inf")
            self._draft = Draft(*self._limits)
            while not options.stop.is_set():
                options.alive()
                if not self._files.leadership.lead():
                    return
                is_time = clock.elapsed() - looked_at >= SOURCE_LOOK_SECONDS
                if is_time:
                    topics.look()
                    self._files.leadership.behind, self._files.leadership.trouble = topics.behind, ""
                    options.behind(topics.behind)
                    looked_at = clock.elapsed()
                for message in topics.read():
                    self._take(message)
                if self._draft.is_due or (is_time and not self._draft.rows):
                    self._land()
            self._land()

    @property
    def _limits(self) -> tuple[float, int, int]:
        return self._source.seconds, self._source.rows, self._source.most_bytes

    def _take(self, message: Message) -> None:
        value, schema = message.value(), None
        if value is None and not self._deletes:
            self._count_tombstone()
            self._topics.done(message)
            return
        if value is None:
            read = self._registry and self._registry.read(message.key() or b"")
            record = tombstone_line(read[1] if read else key_of(message.key()), self._key, self._more(message))
        elif self._registry is None:
            record = line_of(value, self._more(message))
        elif read := self._registry.read(value):
            schema, record = read[0], value[HEAD_BYTES:]
        else:
            record = refused_line(value)
        if schema is not getattr(self._draft, "schema", None):
            self._land()
            self._draft = AvroDraft(schema, *self._limits) if schema else Draft(*self._limits)
        self._draft.add(record)
        self._topics.done(message)
        if self._draft.is_full:
            self._land()

    def _more(self, message: Message) -> dict[str, object]:
        if not self._columns:
            return {}
        kind, stamp = message.timestamp()
        key = message.key()
        text = None if key is None else key.decode(errors="backslashreplace")
        values = (message.topic(), message.partition(), message.offset(), stamp if kind else None, text)
        return {name: value for name, value in zip(COLUMNS, values, strict=True) if name in self._columns}

    def _count_tombstone(self) -> None:
        self._tombstones += 1
        if not self._enveloped and f"{self._tombstones}".rstrip("0") == "1":  # the first, the tenth, the hundredth
            self._options.warn(
                f"{self._tombstones} tombstones (messages without a value) were skipped: no row was deleted. If they shall "
                f'delete rows, set `[delete] column = "{TOMBSTONE}"` and `values = ["true"]` for the table.'
            )

    def _land(self) -> None:
        rows, position = self._draft.rows, msgspec.json.encode(self._topics.position).decode()
        if rows or position != self._landed:
            self._files.land(self._draft.take(), position, self._draft.ending)
            self._landed = position
        if rows:
            self._options.collect(rows)


def registry_of(source: KafkaSource, properties: dict[str, str]) -> Registry | None:
    """The source's registry. Its login is taken out of the ``properties``, where librdkafka has no such one."""
    headers = {}
    if user := properties.pop("basic.auth.user.info", None):
        headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
    return None if source.registry is None else Registry(source.registry, headers)


def properties_of(source: KafkaSource, password: str) -> dict[str, str]:
    """The settings of librdkafka: those of the file, and what the source says itself."""
    given = javaproperties.loads(Path(source.properties).read_text("utf-8")) if source.properties else {}
    servers = source.from_.partition("://")[2].rpartition("@")[2]
    user = source.server.username
    login = {"sasl.username": user, "sasl.password": password} if user else {}
    return {"bootstrap.servers": servers, "log_level": "2", **login, **given}
