"""Object stores; `open_store` finds the backend of an address."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from lakeupsert.errors import ConfigurationError
from lakeupsert.storage.base import (
    NotFoundError,
    ObjectInfo,
    ObjectStore,
    Requests,
    StoreUnavailableError,
    UnknownOutcomeError,
)
from lakeupsert.storage.local import SCRATCH, LocalStore

__all__ = [
    "SCRATCH",
    "LocalStore",
    "NotFoundError",
    "ObjectInfo",
    "ObjectStore",
    "Requests",
    "StoreUnavailableError",
    "UnknownOutcomeError",
    "open_store",
]


def open_store(address: str) -> ObjectStore:
    """The store whose root is ``address``: a path or ``file://`` (s3:// and abfss:// come with their backends)."""
    scheme = urlsplit(address).scheme if "://" in address else ""
    if scheme == "":
        return LocalStore(Path(address).expanduser())
    if scheme == "file":
        return LocalStore(unquote(urlsplit(address).path))
    raise ConfigurationError(
        "unknown-store",
        f"No backend for {scheme}:// addresses: this version of lakeupsert reads and writes local paths and file:// only.",
        next="name a local path in `landing` and `processed`",
    )
