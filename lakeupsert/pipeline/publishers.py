"""Let every publisher of `publishers` show what the snapshots show. It runs behind a publish, and never fails it.

Reads     the newest snapshot, and what each publisher has written last
Writes    what the publishers write
Repeat    safe: a publisher goes on from what it has written
"""

from dataclasses import dataclass

from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.publishers import Publisher


@dataclass(frozen=True)
class PublisherStanding:
    """How far a publisher is.

    Attributes:
        snapshot: what its readers see; None: nothing yet.
        behind: how many snapshots it lacks.
        problem: why it is behind, if it was just tried.
        warning: about what it has just written.
    """

    snapshot: int | None
    behind: int
    problem: LakeupsertError | None = None
    warning: str | None = None


def publisher(table: OpenTable, name: str) -> Publisher:
    """Raises ConfigurationError if the table has no such publisher."""
    if name not in table.settings.publishers:
        raise ConfigurationError(
            "no-such-publisher",
            f"Table {table.name!r} has {', '.join(table.settings.publishers) or 'none'} in `publishers`, and not {name!r}.",
            next=f'set `publishers = ["{name}"]` in [tables.{table.name}]',
        )
    from lakeupsert.publishers.delta import DeltaPublisher  # a worker of a table without publishers starts without it

    settings = table.settings
    return DeltaPublisher(
        table.objects,
        settings.retention,
        settings.delta_vectors,
        "timestamp" if settings.delta_timestamps == "utc" else "timestamp_ntz",
        table.version,
        table.map_concurrently,
    )


def catch_up(table: OpenTable) -> dict[str, PublisherStanding]:
    """Bring each publisher up to the newest snapshot. What stops one is in its standing."""
    newest = table.last_snapshot() if table.settings.publishers else None
    if newest is None:
        return {}
    found: dict[str, PublisherStanding] = {}
    for name in table.settings.publishers:
        try:
            warning = publisher(table, name).catch_up(newest)
            found[name] = PublisherStanding(newest.number, 0, warning=warning)
        except LakeupsertError as e:
            found[name] = _standing(table, name, newest.number, e)
    return found


def standings(table: OpenTable) -> dict[str, PublisherStanding]:
    """How far each publisher is; nothing is written."""
    newest = table.known_snapshot
    return {name: _standing(table, name, newest.number if newest else -1) for name in table.settings.publishers}


def _standing(table: OpenTable, name: str, newest: int, problem: LakeupsertError | None = None) -> PublisherStanding:
    shown = publisher(table, name).shown()
    return PublisherStanding(shown, max(0, newest - (-1 if shown is None else shown)), problem)
