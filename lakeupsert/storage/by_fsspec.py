"""Other stores through fsspec, if the backend's creates are exclusive: Google Cloud Storage (`gs://`); memory, for tests.

Commits   `create` is fsspec's `pipe_file(mode="create")`. With gcsfs the server decides. Other fsspec backends look first and
          then write, which is not safe; run `doctor`, which races every store, before you use one. A backend may repeat a create
          by itself and find its own object. So if the stored bytes equal the sent ones, the outcome is unknown, and the caller
          reads back.
Reads     by ranges; a replaced object is not noticed
Settings  credentials and endpoint are the backend's own, for example from `gcloud auth application-default login`
"""

import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import islice
from typing import Any

import fsspec
import pyarrow as pa

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.storage.base import (
    NOTHING,
    SIZE_ONLY,
    Call,
    NotFoundError,
    ObjectInfo,
    Requests,
    Sink,
    StoreUnavailableError,
    UnknownOutcomeError,
    last_left_out,
    parts_of,
)
from lakeupsert.storage.remote import PROBE, UNTOUCHED, Conditions, RangeReader

_ETAG = ("etag", "ETag", "generation", "blob_id", "sha", "hex", "CRC", "Content-MD5")
"""The backends' names for what changes with the content: an etag, a hash, a checksum."""
_MODIFIED = (
    *("mtime", "updated", "LastModified", "last_modified", "Last-Modified", "modified", "modify", "last_write_time"),
    "created",
)
"""The backends' names for the time of the last change. Memory's objects are created again."""
_NO_LIBRARY = re.compile("Unable to load lib(hdfs|jvm)")
_REFUSAL = re.compile("Forbidden|[Aa]uthentication|HostKey|Permission ?[Dd]enied")


class FsspecStore:
    """See `lakeupsert.storage.base.ObjectStore` for what each method promises."""

    pinned = False

    def __init__(self, address: str) -> None:
        self._scheme, _, path = address.partition("://")
        if self._scheme == "gs":
            import gcsfs  # noqa: F401  fsspec would import it later, with a less clear error
        self._prefix = f"{path.strip('/')}/"
        self._bucket = self._prefix.partition("/")[0]
        # gcsfs would look for credentials, which an emulator does not need.
        self._options = {"token": "anon"} if self._scheme == "gs" and os.environ.get("STORAGE_EMULATOR_HOST") else {}
        self.requests = Requests()
        self._conditions = Conditions()

    def __repr__(self) -> str:
        return f"FsspecStore({self.uri()!r})"

    def uri(self, name: str = "") -> str:
        return f"{self._scheme}://{self._prefix}{name}".rstrip("/")

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        parts_of(name)  # may come from a message; `open` also reads landing files, with names like a//b
        return self._read(name, part[0], sum(part)) if part else self._read(name)

    def head(self, name: str) -> ObjectInfo | None:
        return self._look("head", name)

    def create(self, name: str, data: bytes) -> bool:
        parts_of(name)
        if self._emulator is not None:
            self._conditions.prove(self, self._create_other, self._emulator)
        return self._create(name, data)

    @property
    def _emulator(self) -> str | None:
        """Google's own server is believed; an emulator has to show that it keeps conditions."""
        return os.environ.get("STORAGE_EMULATOR_HOST") or None if self._scheme == "gs" else None

    def _create_other(self, name: str, data: bytes) -> bool:
        """`_create`, always with bytes of its own: equal ones would be an unknown outcome."""
        return self._create(name, data or clock.new_id().encode())

    def _create(self, name: str, data: bytes) -> bool:
        try:
            with self._request("create", name) as fs:
                fs.pipe_file(self._prefix + name, data, mode="create")
        except FileExistsError:
            if self.get(name) == data:
                raise UnknownOutcomeError(f"{self.uri(name)} exists and holds the bytes that were sent") from None
            return False
        except StoreUnavailableError as e:
            raise UnknownOutcomeError(e.message) from e
        return True

    @contextmanager
    def write(self, name: str) -> Iterator[Sink]:
        parts_of(name)
        self._conditions.prove_before_write(self, self._create_other, self._emulator)
        with tempfile.NamedTemporaryFile(prefix="lakeupsert-") as whole:
            yield whole
            whole.flush()
            with self._request("put", name) as fs:
                fs.put_file(whole.name, self._prefix + name)

    def list(
        self, prefix: str, *, limit: int | None = None, above: Mapping[str, str] = NOTHING
    ) -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        files: dict[str, dict[str, Any]] = {}
        with suppress(NotFoundError), self._request("list", prefix) as fs:
            files = fs.find(self._prefix + folder, detail=True)
        if not files and self._scheme == "gs":
            self._see_bucket()
        names = (each["name"].lstrip("/").removeprefix(self._prefix) for each in files.values())
        infos = sorted(map(info_of, names, files.values()), key=lambda info: info.name)
        infos = [i for i in infos if i.name.startswith(prefix) and not i.name.startswith(PROBE)]
        return islice((i for i in infos if not last_left_out(i.name, above)), limit)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(NotFoundError), self._request("delete", name) as fs:
                fs.rm_file(self._prefix + name)

    def open(self, name: str, etag: str | None = None) -> pa.NativeFile:
        there = self._look("get", name)
        if there is None or etag not in (None, there.etag):
            raise NotFoundError(name)
        return pa.PythonFile(RangeReader(self, there, partial(self._read, name)), "r")

    def clock_ahead(self) -> float | None:
        return None  # fsspec shows no answers

    # -- how

    def _read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        with self._request("get", name) as fs:
            try:
                return bytes(fs.cat_file(self._prefix + name, start=start, end=end))
            except Exception as e:
                if getattr(e, "code", None) != 416:  # the range is behind the end
                    raise
                return b""

    def _look(self, call: Call, name: str) -> ObjectInfo | None:
        with suppress(NotFoundError), self._request(call, name) as fs:
            info = fs.info(self._prefix + name)
            return info_of(name, info) if info["type"] == "file" else None
        return None

    def _see_bucket(self) -> None:
        """Raise if the bucket does not exist: its listing is empty too."""
        with self._request("head", "") as fs:
            if not fs.exists(self._bucket):
                raise self._no_bucket()

    def _no_bucket(self) -> ConfigurationError:
        return ConfigurationError(
            "no-bucket",
            f"There is no bucket {self._bucket!r} for {self.uri()}. {UNTOUCHED}",
            next="create it, or correct its name",
        )

    @contextmanager
    def _request(self, call: Call, name: str) -> Iterator[fsspec.AbstractFileSystem]:
        """The backend. Its errors become errors by what the operator does next."""
        self.requests.count(call)
        try:
            # fsspec keeps one per process. Listings are not cached, because others write too.
            yield fsspec.filesystem(self._scheme, use_listings_cache=False, **self._options)
        except FileNotFoundError as e:
            if call in ("create", "put"):  # the bucket is missing
                raise self._no_bucket() from e
            raise NotFoundError(name) from e
        except (FileExistsError, LakeupsertError):
            raise
        except Exception as e:  # each backend raises its own classes
            raise failure(e, call, self.uri(name)) from e


def failure(error: Exception, call: Call, uri: str) -> LakeupsertError:
    """The error for one of a backend, by what the operator does next."""
    status = getattr(error, "code", None) or getattr(error, "status", None)
    said = f"{type(error).__name__}: {error}"
    if library := _NO_LIBRARY.search(said):  # Arrow goes on with every place where it looked
        return ConfigurationError(
            "extra-missing",
            f"{uri} needs Hadoop's own client, libhdfs, and Java. Here Arrow was {library[0].lower()}. {UNTOUCHED}",
            next="install both, and set JAVA_HOME, HADOOP_HOME and CLASSPATH (to what `hadoop classpath --glob` prints); or copy "
            "the files to a folder or a bucket, and name that",
        )
    if status in (401, 403) or isinstance(error, PermissionError) or _REFUSAL.search(said):
        return ConfigurationError(
            "not-permitted",
            f"Not permitted: {call} of {uri}: {error}. {UNTOUCHED}",
            next="give this identity the right to read, create and list there, or correct its credentials",
        )
    return StoreUnavailableError(
        "store-unreachable",
        f"{uri}: {call} failed: {said}. {UNTOUCHED}",
        next="check the network, the address and the credentials, then run the same command again",
    )


def info_of(name: str, info: dict[str, Any]) -> ObjectInfo:  # Any: each backend has its own fields
    """What a backend says of the object ``name``."""
    size, stamp = info["size"], next((info[key] for key in _MODIFIED if info.get(key)), None)
    modified = _seconds(stamp)
    by_time = SIZE_ONLY.format(size) if stamp is None else f"{modified or stamp} {size}"
    etag = next((str(info[key]) for key in _ETAG if info.get(key) not in (None, "")), by_time)
    return ObjectInfo(name, size, etag, modified)


def _seconds(stamp: str | float | datetime | None) -> float:
    """0 for a time that is not known or not understood."""
    if isinstance(stamp, str):
        for parse in (datetime.fromisoformat, parsedate_to_datetime):
            with suppress(ValueError):
                return parse(stamp).timestamp()
        return 0.0
    return stamp.timestamp() if isinstance(stamp, datetime) else float(stamp or 0)
