"""Open a table by its folder or address, without a configuration: its spec says what it is. For reading only.

Reads     the newest spec
Writes    nothing
Repeat    safe
"""

from pathlib import Path, PurePosixPath

from lakeupsert.config import FILE_NAME, TableSettings, is_remote
from lakeupsert.errors import ConfigurationError
from lakeupsert.pipeline.declared import settings_of
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.table.layout import HOME


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
    table = OpenTable(name, zone, by_folder=True)
    head = table.history.objects.specs.head()
    if head is None:
        lost = table.history.objects.ledger.newest_number() is not None
        raise table.history.no_table_yet() if lost else _no_table(address)
    return OpenTable(name, settings_of(head.body, address), by_folder=True, resources=table.resources)


def _no_table(address: str) -> ConfigurationError:
    why, advice = "", f"give the folder that {HOME} is in (`processed` of the configuration), or a {FILE_NAME}"
    if (Path(address) / FILE_NAME).is_file():
        why, advice = f", and has a {FILE_NAME}", f"open {Path(address) / FILE_NAME}"
    message = f"{address} is not the folder of a table: it has no {HOME}/spec{why}."
    return ConfigurationError("no-table-yet", message, next=advice)
