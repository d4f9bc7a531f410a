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
    """The store whose root is ``address``: a path, ``file://``, or ``s3://`` (also written ``s3a://``)."""
    scheme = urlsplit(address).scheme if "://" in address else ""
    if scheme == "":
        return LocalStore(Path(address).expanduser())
    if scheme == "file":
        return LocalStore(unquote(urlsplit(address).path))
    if scheme in ("s3", "s3a"):
        try:
            from lakeupsert.storage.s3 import S3Store  # brings boto3
        except ModuleNotFoundError as e:
            raise ConfigurationError(
                "extra-missing",
                f"{address} needs boto3, which is not installed. Nothing was done.",
                next="pip install 'lakeupsert[aws]'",
            ) from e
        return S3Store(address)
    raise ConfigurationError(
        "unknown-store",
        f"No backend for {scheme}:// addresses: this version of lakeupsert reads and writes local paths, file:// and s3://.",
        next="name a local path or an s3:// address in `landing` and `processed`",
    )
