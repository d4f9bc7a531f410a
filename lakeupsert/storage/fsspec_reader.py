"""A landing zone on any file system of fsspec, for example `sftp://`, `hf://` or `zip://`. It is only read.

Reads     a file of up to 16 MB at once, when it is opened; a larger one by ranges. A replaced file is not noticed before its end
Changes   known by what the file system says of a file: an etag, hash or checksum; else the time of its change, with its size;
          else the size alone (`ObjectInfo.is_by_size`)
Settings  fsspec's own, by environment (`FSSPEC_SFTP_USERNAME`) or files in `~/.config/fsspec`
"""

import lzma
import os
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import pyarrow as pa
from fsspec import AbstractFileSystem
from fsspec.archive import AbstractArchiveFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.config import conf
from fsspec.core import split_protocol, url_to_fs
from fsspec.implementations.cached import CachingFileSystem
from fsspec.registry import available_protocols, get_filesystem_class

from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.storage.base import (
    NOTHING,
    Call,
    DamagedObjectError,
    NotFoundError,
    ObjectInfo,
    Requests,
    last_left_out,
    not_as_listed,
)
from lakeupsert.storage.by_fsspec import failure, info_of
from lakeupsert.storage.remote import PART_BYTES, UNTOUCHED, RangeReader

_SSH = ("sftp", "ssh")
"""For these, sshfs takes every host for the right one, unless it is told to look into ~/.ssh/known_hosts (``()``)."""
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, tarfile.TarError)
"""What archives raise for a member whose bytes are not those that were put in."""
_Info = dict[str, Any]
"""What a file system says of a file. Any: each has its own fields."""


class FsspecReader:
    """See `lakeupsert.storage.base.ObjectReader` for what each method promises."""

    pinned = False

    def __init__(self, address: str) -> None:
        """``address``: a URL of fsspec, also a chained one like `zip://folder::/data/landing.zip`.

        Raises:
            ConfigurationError: it can't be read safely, or fsspec has no such file system.
            ImportError: a package is missing; the message is fsspec's advice.
        """
        _check(address)
        self._address = address
        self.requests = Requests()
        self._kept: tuple[int, AbstractFileSystem, str] | None = None
        # Most file systems have one connection or one open archive, and files with a position.
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type["FsspecReader"], tuple[str]]:
        return FsspecReader, (self._address,)

    def __repr__(self) -> str:
        return f"FsspecReader({self.uri()!r})"

    def uri(self, name: str = "") -> str:
        inner, *outer = self._address.split("::")
        scheme, _, path = inner.partition("://")
        path = "/".join(part for part in (path.rstrip("/"), name) if part)
        return "::".join([f"{scheme}://{path}", *outer])

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        with self.open(name) as file:
            if part is None:
                return bytes(file.read())
            file.seek(part[0])
            return bytes(file.read(part[1]))

    def head(self, name: str) -> ObjectInfo | None:
        with suppress(NotFoundError), self._request("head", name) as fs:
            fs.invalidate_cache()
            info = fs.info(self._path(name))
            return self._info(name, info) if info["type"] == "file" else None
        return None

    def list(
        self, prefix: str, *, limit: int | None = None, above: Mapping[str, str] = NOTHING
    ) -> Iterator[ObjectInfo]:
        self._kept = None  # an open archive would still show the files that it had when it was opened
        found: Sequence[_Info] = ()
        with suppress(NotFoundError), self._request("list", prefix) as fs:
            fs.invalidate_cache()
            found = _find(fs, self._path(prefix.rpartition("/")[0]))
        named = {name: info for info in found if (name := self._name(info["name"]))}  # "": the root, if it is a file
        if not named and not prefix:
            self._check_root()
        names = [name for name in sorted(named) if name.startswith(prefix) and not last_left_out(name, above)]
        infos = (self._sized(name, named[name]) for name in names)
        return islice((info for info in infos if info is not None), limit)

    def open(self, name: str, etag: str | None = None) -> pa.NativeFile:
        info = self.head(name)
        if info is None or etag not in (None, info.etag):
            raise NotFoundError(name)
        with self._request("get", name) as fs:
            file = fs.open(self._path(name), "rb")
            if info.size > PART_BYTES:
                return pa.PythonFile(_OpenFile(self, fs, file, info), "r")
            # At once: some servers of HTTP know no ranges, and a compressed archive is read from its beginning for each.
            with file:
                data = file.read()
        if len(data) != info.size:
            raise not_as_listed(self, info, f"read, it has {len(data):,}")
        return pa.BufferReader(data)

    # -- how

    def _read(self, file: BinaryIO, name: str, start: int, end: int) -> bytes:
        with self._request("get", name):
            file.seek(start)
            return bytes(file.read(end - start))

    def _opened(self) -> tuple[AbstractFileSystem, str]:
        """The file system, and the path of the root in it. Opened once for each process: a fork would share connections."""
        if self._kept is None or self._kept[0] != os.getpid():
            protocols = [protocol for protocol in _SSH if f"{protocol}://" in self._address]
            options = {protocol: {"known_hosts": (), **conf.get(protocol, {})} for protocol in protocols}
            self._kept = (os.getpid(), *url_to_fs(self._address, **options))
        return self._kept[1:]

    def _path(self, name: str) -> str:
        return "/".join(part for part in (self._opened()[1].rstrip("/"), name) if part)

    def _name(self, path: str) -> str:
        return path.strip("/").removeprefix(self._opened()[1].strip("/")).lstrip("/")

    def _sized(self, name: str, listed: _Info) -> ObjectInfo | None:
        """A file of a listing; None if it is gone. Some file systems list names alone (HTTP), or links instead of their files."""
        if listed.get("size") is not None and listed["type"] == "file":
            return info_of(name, listed)
        with suppress(NotFoundError), self._request("head", name) as fs:
            return self._info(name, fs.info(self._path(name)))
        return None

    def _info(self, name: str, info: _Info) -> ObjectInfo:
        if info.get("size") is None:
            raise ConfigurationError(
                "no-landing",
                f"{self.uri(name)}: the server does not report the size, so the file can't be read. {UNTOUCHED}",
                next="use a server that reports it (Content-Length), or copy the files to another landing zone",
            )
        return info_of(name, info)

    def _check_root(self) -> None:
        """Raise ConfigurationError if there is no such folder: its listing is empty too."""
        with suppress(NotFoundError), self._request("head", "") as fs:
            if fs.isdir(self._path("")):
                return
        raise ConfigurationError(
            "no-landing",
            f"There is no folder {self.uri()}, or it can't be listed. {UNTOUCHED}",
            next="create it, or correct `landing`",
        )

    @contextmanager
    def _request(self, call: Call, name: str) -> Iterator[AbstractFileSystem]:
        """The file system, for one call. fsspec does not show how many requests a call takes."""
        self.requests.count(call)
        with self._lock:
            try:
                yield self._opened()[0]
            except FileNotFoundError as e:
                raise NotFoundError(name) from e
            except LakeupsertError:
                raise
            except Exception as e:  # each file system raises its own classes
                fs, self._kept = self._kept and self._kept[1], None
                if fs is not None:
                    fs.clear_instance_cache()  # it may keep a connection that broke, or an archive that is replaced by now
                if call == "get" and isinstance(fs, AbstractArchiveFileSystem) and isinstance(e, _DAMAGED):
                    raise DamagedObjectError(f"{type(e).__name__}: {e}") from e
                raise failure(e, call, self.uri(name)) from e


class _OpenFile(RangeReader):
    def __init__(self, reader: FsspecReader, fs: AbstractFileSystem, file: BinaryIO, info: ObjectInfo) -> None:
        super().__init__(reader, info, partial(reader._read, file, info.name))
        self._fs = fs  # an archive closes with it
        self._file = file

    def close(self) -> None:
        self._file.close()
        super().close()


def _check(address: str) -> None:
    """Refuse what would show a secret in messages, read an old copy, or mean another place elsewhere."""
    links = address.split("::")
    if any(urlsplit(link).password for link in links):
        raise ConfigurationError(
            "credential-in-configuration",
            f"The {split_protocol(address)[0]}:// address has a password, which messages and logs would show. Nothing was done.",
            next="leave it out, and give it to fsspec by environment (FSSPEC_SFTP_PASSWORD) or in ~/.config/fsspec, or use a key",
        )
    for link in links:
        _check_link(address, link, alone=len(links) == 1)
    if len(links) > 1 and "://" not in links[-1] and not Path(links[-1]).is_absolute():
        raise _bad_address(address, "ends in a relative path", "write an absolute path after the last ::")


def _check_link(address: str, link: str, *, alone: bool) -> None:
    protocol = split_protocol(link)[0] or (link if link in available_protocols() else "file")
    if protocol not in available_protocols():
        raise ConfigurationError(
            "unknown-store",
            f"fsspec has no file system for {protocol}:// ({address}). Nothing was done.",
            next="correct the address, or install the package that has this file system of fsspec",
        )
    if protocol in _SSH:
        import sshfs  # noqa: F401  fsspec's own accepts the key of every host, whatever it is told
    kind = get_filesystem_class(protocol)
    if issubclass(kind, CachingFileSystem):
        why = "goes through a cache, which may give an older file than the one that is listed"
        raise _bad_address(address, why, f"leave out {link}")
    if issubclass(kind, AbstractArchiveFileSystem) and alone:
        advice = f"write it as {protocol}://::/path/archive.{protocol}"
        raise _bad_address(address, "does not say where the archive is", advice)


def _bad_address(address: str, why: str, advice: str) -> ConfigurationError:
    return ConfigurationError("bad-setting", f"{address} {why}. Nothing was done.", next=advice)


def _find(fs: AbstractFileSystem, path: str) -> Sequence[_Info]:
    """All files below ``path``. The `find` that file systems inherit leaves out folders that it fails to list."""
    is_async = isinstance(fs, AsyncFileSystem)
    inherited = type(fs)._find is AsyncFileSystem._find if is_async else type(fs).find is AbstractFileSystem.find
    return [*_walk(fs, path)] if inherited else [*fs.find(path, detail=True).values()]


def _walk(fs: AbstractFileSystem, path: str) -> Iterator[_Info]:
    for info in fs.ls(path, detail=True):
        if info["type"] != "directory":
            yield info
        elif info["name"].rstrip("/") != path.rstrip("/"):
            yield from _walk(fs, info["name"])
