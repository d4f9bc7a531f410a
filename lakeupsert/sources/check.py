"""The state of a source for `doctor`: all that `capture` looks at before it begins, and how far behind it is.

Reads     the newest entry of the source's chain; the database, or the brokers and the registry
Writes    nothing
Repeat    safe, also while `capture` follows the source
"""

from collections.abc import Iterator
from contextlib import closing

from lakeupsert.config import DatabaseSource, KafkaSource, SourceSettings
from lakeupsert.config.sources import password_of, password_variable
from lakeupsert.decoding import decoder_of
from lakeupsert.extras import needs_extra
from lakeupsert.phrases import count
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.sources.draft import ENDING
from lakeupsert.sources.files import SourceFiles

Sign = tuple[str, str | None]
"""Something that was found about a source, and how to mend it; None: it is right."""


def check_source(table: OpenTable, name: str, source: SourceSettings) -> Iterator[Sign]:
    """Raises the errors of `capture`, and TryAgainError where it would try again."""
    password = password_of(name, source)
    if source.password_file is None and source.server.username:
        yield f"{password_variable(name)} is {'set' if password else 'not set, so no password is sent'}", None
    head = SourceFiles(table, name, ENDING).find_head()
    position = head.body.after if head else None
    with needs_extra("`capture`", source.extra, "Nothing was read."):
        if isinstance(source, DatabaseSource):
            yield from _check_database(table, name, source, password, position)
        elif isinstance(source, KafkaSource):
            yield from _check_topics(source, password, position)


def _check_database(
    table: OpenTable, name: str, source: DatabaseSource, password: str, position: str | None
) -> Iterator[Sign]:
    from lakeupsert.sources.capture import DATABASES, Place, refuse_added_tables
    from lakeupsert.sources.debezium import start_jvm
    from lakeupsert.sources.postgresql import MUCH_LOG

    place = decoder_of(Place).decode(position) if position is not None else Place(tables=source.tables)
    refuse_added_tables(source, place)
    start_jvm(source.jars)
    database = DATABASES[source.server.scheme](name, source, password, table.settings.mode)
    prepared = database.prepare(place.stream, is_new=position is None, only_look=True)
    yield from prepared.warnings
    yield f"{source.from_} can be followed: {', '.join(source.tables)}", None
    start = f"`lakeupsert capture {name}`"
    if position is None:
        yield f"nothing was read yet: {start} begins with a snapshot", None
        return
    if source.server.scheme != "postgresql":  # keeps no log for it
        return
    kept = database.kept_log()
    log = f"the server keeps {kept / 1e6:,.0f} MB of its log for it"
    if prepared.is_read:
        yield (
            f"a program follows it, and {log}",
            "end transactions that are open for long" if kept > MUCH_LOG else None,
        )
    else:
        yield f"no program follows it, and {log}", f"start {start}, or drop its slot if you give it up"


def _check_topics(source: KafkaSource, password: str, position: str | None) -> Iterator[Sign]:
    from lakeupsert.sources.avro import HEAD_BYTES
    from lakeupsert.sources.kafka import Topics, properties_of, registry_of

    properties = properties_of(source, password)
    registry = registry_of(source, properties)
    with closing(Topics(source, properties, position)) as topics:
        topics.look()
        partitions = sum(len(topic.next) for topic in topics.position.values())
    yield f"{source.from_} has {', '.join(source.topics)}, with {count(partitions, 'partition')}", None
    if registry is not None:
        registry.read(bytes(HEAD_BYTES))  # asks for a schema that is not there
        yield f"the registry {source.registry} answers", None
