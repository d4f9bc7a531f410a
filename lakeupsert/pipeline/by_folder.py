"""Open a table by its folder or address, without a configuration: its spec says what it is. For reading only.

Reads     the newest spec
Writes    nothing
Repeat    safe
"""

from pathlib import Path, PurePosixPath

import msgspec

from lakeupsert.config import FILE_NAME, DeleteSettings, GroupSettings, TableSettings, is_remote
from lakeupsert.errors import ConfigurationError
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.table.layout import HOME
from lakeupsert.table.spec import TableSpec


def is_folder(address: str) -> bool:
    """Whether this is the place of a table rather than a configuration file, which ends in ``.toml`` wherever it is."""
    if is_remote(address):
        return not address.endswith(".toml")
    return address.startswith("file:") or Path(address).expanduser().is_dir()


def open_folder(address: str, name: str | None, profile: str | None) -> OpenTable:
    """The table at ``address``, by default named as its folder.

    Raises ConfigurationError if no table is there (``no-table-yet``), or if a profile is given, which would have no effect.
    """
    if profile is not None:
        raise ConfigurationError(
            "bad-setting",
            f"{address} is the folder of a table. Profile {profile!r} would have no effect: only configurations have profiles.",
            next=f"open {FILE_NAME} with the profile, or the folder without it",
        )
    if not is_remote(address) and not address.startswith("file:"):
        address = str(Path(address).expanduser().absolute())
    zone = TableSettings(landing=address, processed=address, key=(), partition_by=())
    name = name or PurePosixPath(address.rstrip("/").rpartition("://")[2]).name or "table"
    table = OpenTable(name, zone, read_only=True)
    head = table.objects.specs.head()
    if head is None:
        lost = table.objects.ledger.newest_number() is not None
        raise table.no_table_yet() if lost else _no_table(address)
    table.settings = _settings_of(head.body, address)
    return table


def _settings_of(spec: TableSpec, address: str) -> TableSettings:
    """What the spec says in the words of a configuration. ``landing`` has none, so it is the folder itself, which no output may
    be in either."""
    functions = {one.column: str(one) for one in spec.partition_from}
    return TableSettings(
        landing=address,
        processed=address,
        key=spec.key,
        partition_by=tuple(functions.get(column, column) for column in spec.partition_by),
        order_by=tuple(map(str, spec.ordering)),
        order_in_name=spec.order_in_name,
        ties=spec.ties,
        mode=spec.mode,
        nulls=spec.nulls,
        groups={one.name: GroupSettings(order_by=one.order_by, columns=one.columns) for one in spec.groups},
        key_scope=spec.key_scope,
        history=spec.history,
        versions=spec.versions,
        delete=DeleteSettings(**msgspec.structs.asdict(spec.delete)) if spec.delete else None,
    )


def _no_table(address: str) -> ConfigurationError:
    why, advice = "", f"give the folder that {HOME} is in (`processed` of the configuration), or a {FILE_NAME}"
    if (Path(address) / FILE_NAME).is_file():
        why, advice = f", and has a {FILE_NAME}", f"open {Path(address) / FILE_NAME}"
    message = f"{address} is not the folder of a table: it has no {HOME}/spec{why}."
    return ConfigurationError("no-table-yet", message, next=advice)
