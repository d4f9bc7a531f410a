"""`lakeupsert capture`: a database flows into a landing zone."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lakeupsert.cli.every_night.signs import health_option, signs_of_life
from lakeupsert.cli.frame import Answer, Call
from lakeupsert.cli.options import log_option
from lakeupsert.cli.program import main
from lakeupsert.config import Config, DatabaseSource, KafkaSource, SourceSettings
from lakeupsert.config.messages import did_you_mean
from lakeupsert.config.sources import password_of
from lakeupsert.errors import ConfigurationError

if TYPE_CHECKING:
    from lakeupsert.pipeline.opened import OpenTable
    from lakeupsert.sources.follow import CaptureOptions

    Follower = Callable[[OpenTable, str, Any, str, CaptureOptions], None]

log = logging.getLogger(__name__)


@main.command()
@click.argument("source", required=False)
@health_option
@log_option
def capture(call: Call, source: str | None, health_file: Path | None) -> Answer:
    """Follow a database or topics of Kafka: land what is there, then each change, until you stop it.

    SOURCE is the name below [sources] in the configuration; leave it out if there is only one. `ingest`, in another process,
    takes the landing files. Start it a second time, on another machine, and that one waits until the first one ends.

    \b
    Example:
      lakeupsert capture shop
    """
    config = call.config()
    name, settings = _source(config, source)
    password = password_of(name, settings)
    from lakeupsert.operations.rounds import Warner
    from lakeupsert.pipeline.opened import OpenTable
    from lakeupsert.sources.follow import CaptureOptions

    landed = {"files": 0, "rows": 0}
    warn = Warner(partial(log.warning, "%s: %s", name))

    def collect(rows: int) -> None:
        landed["files"] += 1
        landed["rows"] += rows

    def behind(messages: int) -> None:
        signs.trouble(name, f"{messages:,} messages behind the end of its topics" if messages else "")

    zone = config.tables[settings.table].landing
    tables = {
        one: OpenTable(one, given, origins=config.origins[one])
        for one, given in config.tables.items()
        if given.landing == zone
    }
    table = tables.pop(settings.table)
    run = _follower(settings, tables.values())
    with signs_of_life(health_file, None) as signs, call.stoppable() as stop:
        trouble = partial(signs.trouble, name)
        options = CaptureOptions(
            stop=stop, alive=signs.alive, collect=collect, warn=warn, behind=behind, trouble=trouble
        )
        run(table, name, settings, password, options)
    text = f"Source {name}: {landed['rows']:,} rows landed in {landed['files']:,} files."
    return Answer(landed, text, json_warnings=tuple(warn.shown_at))


def _follower(settings: SourceSettings, others: Iterable["OpenTable"]) -> "Follower":
    from lakeupsert.extras import needs_extra

    with needs_extra("`capture`", settings.extra, "Nothing was read."):
        if isinstance(settings, KafkaSource):
            from lakeupsert.sources.kafka import follow_topics

            return follow_topics
        from lakeupsert.sources.capture import follow_database
        from lakeupsert.sources.debezium import start_jvm

        start_jvm(settings.jars if isinstance(settings, DatabaseSource) else None)
        return partial(follow_database, others=others)


def _source(config: Config, name: str | None) -> tuple[str, SourceSettings]:
    found = config.sources
    if name is None and len(found) == 1:
        return next(iter(found.items()))
    if name in found:
        return name, found[name]
    listed = ", ".join(found) or "none"
    said = "Name the source to follow." if name is None else f"There is no source {name!r}.{did_you_mean(name, found)}"
    raise ConfigurationError(
        "which-source", f"{said} {config.path} has {listed}.", next="give one of these, or add [sources.NAME]"
    )
