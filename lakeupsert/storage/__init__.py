"""Object stores. `open_store` chooses the backend for an address, `open_landing` also one that can only be read."""

from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lakeupsert.errors import ConfigurationError
from lakeupsert.extras import needs_extra
from lakeupsert.storage.base import (
    DamagedObjectError,
    ForeignObjectError,
    NotFoundError,
    ObjectInfo,
    ObjectReader,
    ObjectStore,
    Requests,
    StoreUnavailableError,
    UnknownOutcomeError,
    open_listed,
)
from lakeupsert.storage.landing_folder import LandingFolder
from lakeupsert.storage.local import SCRATCH, LocalStore

__all__ = [
    "SCRATCH",
    "DamagedObjectError",
    "ForeignObjectError",
    "LocalStore",
    "NotFoundError",
    "ObjectInfo",
    "ObjectReader",
    "ObjectStore",
    "Requests",
    "StoreUnavailableError",
    "UnknownOutcomeError",
    "can_commit",
    "open_landing",
    "open_listed",
    "open_own_folder",
    "open_store",
]

_BACKENDS = {
    "s3": ("lakeupsert.storage.s3", "S3Store", "aws"),
    "adls": ("lakeupsert.storage.adls", "AdlsStore", "azure"),
    "fsspec": ("lakeupsert.storage.by_fsspec", "FsspecStore", "gcs"),
}
"""Module, class and the pip extra that each backend needs."""
_SCHEMES = {"s3": "s3", "s3a": "s3", "abfss": "adls", "abfs": "adls", "az": "adls", "gs": "fsspec", "memory": "fsspec"}
_READER_EXTRAS = {"sftp": "sftp", "ssh": "sftp", "hf": "hf"}
"""The extras of file systems that are only read. Others: fsspec names the package."""


def open_landing(address: str) -> ObjectReader:
    """What is landed at ``address``: any that `open_store` takes, or a URL of fsspec, for example `sftp://` or `zip://`."""
    scheme = _scheme(address)
    if can_commit(address) and scheme != "memory":
        store = open_store(address)
        return LandingFolder(store.root) if isinstance(store, LocalStore) else store
    with needs_extra(address, _READER_EXTRAS.get(scheme, "fsspec")):
        import fsspec  # noqa: F401  an extra
    from lakeupsert.storage.fsspec_reader import FsspecReader

    with needs_extra(address, _READER_EXTRAS.get(scheme)):
        return FsspecReader(address)


def open_own_folder(address: str, folder: str) -> ObjectStore:
    """The store of a landing zone, to land files below ``folder``. Raises ConfigurationError if no batch would read them."""
    store = open_store(address)
    if isinstance(store, LocalStore) and store.leads_out(folder):
        raise ConfigurationError(
            "landing-folder-linked",
            f"{store.uri(folder)} is a link out of the landing zone, which no batch follows. Nothing was started.",
            next="mount the folder there, or remove the link",
        )
    return store


def open_store(address: str) -> ObjectStore:
    """The store whose root is ``address``: a path, ``file://``, ``s3://`` (``s3a``), ``abfss://`` (``abfs``, ``az``), ``gs://``."""
    scheme = _scheme(address)
    if scheme == "":
        return LocalStore(Path(address).expanduser())
    if scheme == "file":
        return LocalStore(unquote(urlsplit(address).path))
    if scheme not in _SCHEMES:
        if _is_only_read(scheme):
            raise ConfigurationError(
                "landing-only",
                f"{scheme}:// can only be a landing zone. A commit needs a store that creates an object only if its name is "
                "free, in one step; with this file system, one writer's commit could replace another's. Nothing was done.",
                next="use a local path, file://, s3://, abfss:// or gs:// here",
            )
        raise ConfigurationError(
            "unknown-store",
            f"{scheme}:// addresses are not supported: this version of lakeupsert reads and writes local paths, file://, s3://, "
            "abfss:// and gs://.",
            next="use a local path or one of these addresses; for a landing zone, also any of fsspec's file systems",
        )
    module, name, extra = _BACKENDS[_SCHEMES[scheme]]
    with needs_extra(address, extra):
        store: ObjectStore = getattr(import_module(module), name)(address)
    return store


def can_commit(address: str) -> bool:
    """Whether the address may be a processed zone. Others may only be landing zones."""
    return _scheme(address) in ("", "file", *_SCHEMES)


def _scheme(address: str) -> str:
    return urlsplit(address).scheme if "://" in address else ""


def _is_only_read(scheme: str) -> bool:
    try:
        from fsspec.registry import available_protocols
    except ImportError:
        return False
    return scheme in available_protocols()
