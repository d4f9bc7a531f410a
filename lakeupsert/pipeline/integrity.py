"""Damage that a command finds before it builds on it: something other than lakeupsert deleted objects."""

from collections.abc import Callable, Mapping

from lakeupsert.errors import DamagedTableError
from lakeupsert.pipeline.history import History
from lakeupsert.table import metadata
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import GROUPS, Manifests, TableObjects, rebuild_command
from lakeupsert.table.manifest import Manifest
from lakeupsert.table.snapshot import Snapshot


def refuse_another_entry(history: History, manifest: Manifest, snapshot: Snapshot | None) -> None:
    """Raises DamagedTableError if the ledger entry that ``manifest`` merged last is missing or was replaced by another one,
    whose batch would count as merged here.

    A version that ``snapshot`` shows was checked when it was published; it is not checked again.
    """
    shown = snapshot.partitions.get(manifest.partition) if snapshot else None
    if manifest.entry is None or (shown is not None and shown.merged >= manifest.merged):
        return
    link = history.entry(manifest.merged)
    if link is not None and link.write_id == manifest.entry:
        return
    rebuild, again = f"`{rebuild_command(manifest.partition)}`", "which takes the landing files of that entry again"
    repair = (
        f"run `lakeupsert append`, {again}, then {rebuild}, then `lakeupsert run`"
        if link is None
        else f"run {rebuild}, then `lakeupsert run`, {again}"
    )
    raise DamagedTableError(
        "missing-version",
        f"{manifest.partition} has merged ledger entry {manifest.merged}, which "
        f"{'is missing' if link is None else 'was replaced by another one of the same number'}: "
        f"{history.objects.store.uri(history.objects.ledger.name(manifest.merged))}. Something other than lakeupsert deleted "
        "it. The partition was not changed.",
        next=f"{metadata.FROM_BACKUP}; without one, {repair}. Other partitions may have merged it too: `lakeupsert "
        "reconcile` names each partition that does not balance",
        partition=manifest.partition,
    )


def missing_manifests(
    objects: TableObjects, snapshots: Mapping[int, Snapshot], listed: Manifests | None = None
) -> dict[str, DamagedTableError]:
    """The partitions of which one of these snapshots names a manifest that is missing, with the error for it.

    An absent one is asked for before it counts as missing: listings of network file systems may be old. ``listed`` has looked
    for all that are not known to be stored; None: a new listing does.
    """
    absent = (listed or objects.list_manifests(snapshots.values())).absent
    return {
        partition: objects.missing(partition, shown.version, f"Snapshot {number}", lost=number == max(snapshots))
        for number, snapshot in sorted(snapshots.items())
        for partition, shown in snapshot.partitions.items()
        if (name := objects.partition(partition).name(shown.version)) in absent and objects.store.head(name) is None
    }


def missing_groups(objects: TableObjects, snapshots: Mapping[int, Snapshot]) -> dict[str, DamagedTableError]:
    """The same for groups. `publish` does not ask: what it needs is in the chains, and the next batch needs no group."""
    shown = {
        (partition, version.group.name)
        for snapshot in snapshots.values()
        for partition, version in snapshot.partitions.items()
        if version.group is not None
    }
    stored = {info.name for info in objects.store.list(f"{GROUPS}/")} if shown else set()
    return {
        partition: objects.missing_group(partition, name)
        for partition, name in sorted(shown)
        if name not in stored and objects.store.head(name) is None
    }


def extend_snapshots(
    history: History, build: Callable[[Link[Snapshot] | None], Snapshot | None]
) -> Link[Snapshot] | None:
    """As `Chain.extend`; raises DamagedTableError if the newest snapshot is missing, since its number would be taken."""
    history.last_snapshot()
    history.ledger_head()
    return history.objects.snapshots.extend(build)
