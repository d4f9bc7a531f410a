"""Object stores. `open_store` chooses the backend for an address."""

from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lakeupsert.errors import ConfigurationError
from lakeupsert.phrases import install_extra
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

_BACKENDS = {
    "s3": ("lakeupsert.storage.s3", "S3Store", "aws"),
    "adls": ("lakeupsert.storage.adls", "AdlsStore", "azure"),
    "fsspec": ("lakeupsert.storage.by_fsspec", "FsspecStore", "gcs"),
}
"""Module, class and the pip extra that each backend needs."""
_SCHEMES = {"s3": "s3", "s3a": "s3", "abfss": "adls", "abfs": "adls", "az": "adls", "gs": "fsspec", "memory": "fsspec"}


def open_store(address: str) -> ObjectStore:
    """The store whose root is ``address``: a path, ``file://``, ``s3://`` (``s3a``), ``abfss://`` (``abfs``, ``az``), ``gs://``."""
    scheme = urlsplit(address).scheme if "://" in address else ""
    if scheme == "":
        return LocalStore(Path(address).expanduser())
    if scheme == "file":
        return LocalStore(unquote(urlsplit(address).path))
    if scheme not in _SCHEMES:
        raise ConfigurationError(
            "unknown-store",
            f"{scheme}:// addresses are not supported: this version of lakeupsert reads and writes local paths, file://, s3://, "
            "abfss:// and gs://.",
            next="use a local path or one of these addresses in `landing` and `processed`",
        )
    module, name, extra = _BACKENDS[_SCHEMES[scheme]]
    try:
        store: ObjectStore = getattr(import_module(module), name)(address)
    except ImportError as e:
        raise ConfigurationError(
            "extra-missing",
            f"{address} needs {e.name or e}, which is not installed. Nothing was done.",
            next=install_extra(extra),
        ) from e
    return store
