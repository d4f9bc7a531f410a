"""Addresses of folders and queues: absolute, canonical, and apart from each other."""

import os
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from lakeupsert.config.types import TableSettings
from lakeupsert.errors import ConfigurationError


def canonical_address(address: str) -> str:
    """A canonical address, for comparisons: links resolved, one name per scheme, a slash at the end."""
    scheme, _, rest = address.rpartition("://")
    if scheme in ("", "file", "sqlite"):
        address = os.path.realpath(unquote(urlsplit(address).path) if scheme else address)
    elif scheme == "s3a":
        address = f"s3://{rest}"
    elif scheme in ("abfss", "abfs", "az"):
        from lakeupsert.storage import azureaccount  # imports pyarrow

        address = azureaccount.place(address)
    return address.rstrip("/") + "/"


def is_remote(address: str) -> bool:
    """Whether the address is not on a file system of this machine."""
    return "://" in address and not address.startswith("file:")


def absolute_address(path: str, address: str) -> str:
    try:
        if urlsplit(address).scheme and "://" in address:
            return address
        local = Path(address).expanduser()
    except (ValueError, RuntimeError) as e:  # brackets that are not of an IPv6 address; ~NAME of nobody
        raise ConfigurationError(
            "bad-setting",
            f"{path}: {address!r} can't be an address: {e}",
            next="write a path, or an address such as s3://bucket/prefix",
        ) from e
    if "://" in path and not local.is_absolute():
        raise ConfigurationError(
            "relative-path",
            f"{path} contains the relative path {address!r}, but a configuration read from a URL must use absolute paths.",
            next="write an absolute path, or a URL like s3://bucket/prefix",
        )
    return os.path.normpath(Path(path).parent / local)


def refuse_in_zones(settings: TableSettings, output: str) -> None:
    """Raise ConfigurationError if an output would be in the landing or the processed zone of the table."""
    place = canonical_address(output)
    for zone in (settings.landing, settings.processed):
        if place.startswith(canonical_address(zone)):
            raise ConfigurationError(
                "overlapping-zones",
                f"--output {output} is inside {zone}, a zone of the table: the next run would take it for landing files, or a "
                "vacuum for its own. Nothing was written.",
                next="give an --output outside of both zones",
            )


def _overlap(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def refuse_overlaps(path: str, tables: dict[str, TableSettings]) -> None:
    """Two tables in one place would merge each other's rows. A table inside its landing zone would load its own files."""

    def refuse(code: str, found: str, instead: str) -> NoReturn:
        raise ConfigurationError(code, f"{path}: {found}", next=instead)

    queue_by: dict[str, str] = {}
    for name, settings in tables.items():
        landing, processed = canonical_address(settings.landing), canonical_address(settings.processed)
        for other, others in tables.items():
            elsewhere = canonical_address(others.processed)
            if _overlap(landing, elsewhere):
                zones = f"landing of [tables.{name}], {settings.landing}, and processed of [tables.{other}], {others.processed}"
                instead = "put landing and processed into separate folders"
                refuse("overlapping-zones", f"{zones}, overlap: one is inside the other.", instead)
            if other != name and _overlap(processed, elsewhere):
                equal = f"the processed paths of tables {name!r} and {other!r} are equal, or one is inside the other"
                both = f"{settings.processed} and {others.processed}"
                refuse("shared-processed", f"{equal}: {both}.", "give each table its own processed path")
        own = f"{processed}_lakeupsert/queue.sqlite" if settings.queue == "auto" else settings.queue
        for address in (own, settings.large.queue) if settings.large else (own,):
            queue = canonical_address(address).rstrip("/")
            owner = queue_by.get(queue)
            queue_by[queue] = name
            if owner == name:
                found = f"table {name!r} has one queue for all partitions, {queue}; the messages that a worker passes on to Spark"
                refuse("shared-queue", f"{found} would come back to it.", f"give [tables.{name}.large] its own queue")
            if owner is not None:
                found = f"tables {owner!r} and {name!r} have the same queue, {queue}; the workers of one would move the messages"
                instead = "give each table its own queues, or leave out `queue`"
                refuse("shared-queue", f"{found} of the other to the dead letters.", instead)
