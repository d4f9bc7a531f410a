"""Folders that hold a table in a format of its own: which of its files hold its rows, only the log beside them says.

A program that takes every Parquet file of such a folder also takes rows that were deleted or replaced there.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from lakeupsert.errors import LakeupsertError
from lakeupsert.storage import LocalStore, ObjectReader, can_commit, open_store

_LOGS = {
    "Delta": ("_delta_log/", r"_delta_log/"),
    "Hudi": (".hoodie/", r"\.hoodie/"),
    "Iceberg": ("metadata/", r"metadata/[^/]+\.metadata\.json(?:\.gz)?$"),
    "lakeupsert": ("_lakeupsert/ledger/", r"_lakeupsert/ledger/"),
}
"""For each format: the folder of its log, and the names below the table's folder that only such a table has."""
_SIGN = re.compile("|".join(rf"(?:^|/)(?P<{name}>{sign})" for name, (_, sign) in _LOGS.items()))


@dataclass(frozen=True)
class TableLog:
    """The log of a table. ``place``: its address, or its name below the folder that was looked at."""

    format: str
    place: str

    def __str__(self) -> str:
        return f"{'an' if self.format == 'Iceberg' else 'a'} {self.format} table ({self.place})"


def log_of(name: str) -> TableLog | None:
    """The table whose log has an object of this name."""
    sign = _SIGN.search(name)
    if sign is None or sign.lastgroup is None:
        return None
    place = name[: sign.end()] if name[: sign.end()].endswith("/") else f"{name[: sign.end()].rpartition('/')[0]}/"
    return TableLog(sign.lastgroup, place)


def holds_a_table(log: TableLog) -> str:
    """The warning for a landing zone that holds a table of another format, or is inside one."""
    return (
        f"the landing zone is or holds {log}. Its files are taken as they are: rows that it has deleted or replaced come too, "
        "and rows of files that it rewrites come again. Land what it exports, or its change feed, instead"
    )


def find_log(names: Iterable[str]) -> TableLog | None:
    return next(filter(None, map(log_of, names)), None)


def log_in(store: ObjectReader) -> TableLog | None:
    """The log directly in a folder, by a LIST for each format."""
    return find_log(info.name for folder, _ in _LOGS.values() for info in store.list(folder))


def log_above(address: str) -> TableLog | None:
    """The log of a table that the folder is a part of, in one of the folders above it. Those that can't be read are left out."""
    for parent in _parents(address) if can_commit(address) else ():
        with suppress(LakeupsertError, OSError):
            store = open_store(parent)
            found = log_in(store)
            if found is not None:
                return TableLog(found.format, store.uri(found.place.rstrip("/")))
    return None


def likely_log_above(address: str) -> TableLog | None:
    """As `log_above`, but in a bucket by at most one LIST: of Iceberg's log above `data`, of Delta's above a partition."""
    if not can_commit(address) or isinstance(open_store(address), LocalStore):
        return log_above(address)
    url = urlsplit(address)
    parts = url.path.rstrip("/").split("/")
    at = next((i for i, part in enumerate(parts) if part == "data" or "=" in part), 0)
    if not at:
        return None
    with suppress(LakeupsertError, OSError):
        store = open_store(urlunsplit(url._replace(path="/".join(parts[:at]))))
        found = find_log(
            o.name for o in store.list(_LOGS["Iceberg" if parts[at] == "data" else "Delta"][0], limit=1000)
        )
        return found and TableLog(found.format, store.uri(found.place.rstrip("/")))
    return None


def _parents(address: str) -> Iterator[str]:
    """The folders above an address, up to the root or the bucket."""
    store = open_store(address)
    if isinstance(store, LocalStore):
        yield from map(str, Path(store.root).parents)
        return
    url = urlsplit(address)
    path = url.path.rstrip("/")
    while path:
        path = path.rpartition("/")[0]
        yield urlunsplit(url._replace(path=path))
