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
        problem: why it is behind, if it was just tried, or why that is not known.
        warning: about what it has just written.
        known: whether ``snapshot`` and ``behind`` are; if not, they are those of a publisher that shows nothing.
    """

    snapshot: int | None
    behind: int
    problem: LakeupsertError | None = None
    warning: str | None = None
    known: bool = True


def publisher(table: OpenTable, name: str) -> Publisher:
    """Raises ConfigurationError if the table has no such publisher."""
    if name not in table.settings.publishers:
        raise ConfigurationError(
            "no-such-publisher",
            f"Table {table.name!r} has {', '.join(table.settings.publishers) or 'none'} in `publishers`, and not {name!r}.",
            next=f'set `publishers = ["{name}"]` in [tables.{table.name}]',
        )
    # Imported here, because a worker of a table without publishers starts without them.
    settings = table.settings
    if name == "iceberg":
        return _iceberg(table)
    from lakeupsert.publishers.delta import DeltaPublisher

    return DeltaPublisher(
        table.objects,
        settings.retention,
        settings.delta_vectors,
        "timestamp" if settings.delta_timestamps == "utc" else "timestamp_ntz",
        table.version,
        table.map_concurrently,
    )


def _iceberg(table: OpenTable) -> Publisher:
    try:
        from lakeupsert.publishers.iceberg import IcebergPublisher
    except ImportError as e:
        raise ConfigurationError(
            "extra-missing",
            f"The publisher iceberg needs {e.name or e}, which is not installed. Nothing was committed to the Iceberg table.",
            next="pip install 'lakeupsert[iceberg]'",
        ) from e
    assert table.settings.iceberg is not None, "a setting that the publisher requires"
    return IcebergPublisher(table.objects, table.settings.iceberg, table.version, table.map_concurrently)


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
    try:
        shown = publisher(table, name).shown()
    except LakeupsertError as e:
        return PublisherStanding(None, newest + 1, problem or e, known=False)
    return PublisherStanding(shown, max(0, newest - (-1 if shown is None else shown)), problem)
