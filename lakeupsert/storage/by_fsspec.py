"""Other stores through fsspec, where its backend creates exclusively for real: Google Cloud Storage (`gs://`); memory, for tests.

Commits   `create` is fsspec's `pipe_file(mode="create")`. gcsfs lets the server decide; other backends of fsspec look first and
          write then, and keep no race. `doctor` races every store, and is to be asked before one is used.
          A backend may send a create again by itself and meet its own object: where what is there is what was sent, the
          outcome is unknown, and the caller reads back.
Reads     by ranges; an object that is replaced meanwhile is not noticed
Settings  credentials and endpoint are the backend's own, such as those of `gcloud auth application-default login`
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any

import fsspec
import pyarrow as pa

from lakeupsert.errors import ConfigurationError, LakeupsertError
from lakeupsert.storage.base import (
    Call,
    NotFoundError,
    ObjectInfo,
    Requests,
    StoreUnavailableError,
    UnknownOutcomeError,
    parts_of,
)
from lakeupsert.storage.remote import UNTOUCHED, RangeReader

_MODIFIED = ("mtime", "updated", "LastModified", "last_modified", "created")
"""What backends call it."""
_ETAG = ("etag", "ETag", "generation")


class FsspecStore:
    """See `lakeupsert.storage.base.ObjectStore` for what each method promises."""

    pinned = False

    def __init__(self, address: str) -> None:
        self._scheme, _, path = address.partition("://")
        if self._scheme == "gs":
            import gcsfs  # noqa: F401  fsspec would import it later, and tell it less plainly
        self._prefix = f"{path.strip('/')}/"
        self._bucket = self._prefix.partition("/")[0]
        # gcsfs would look for credentials that an emulator has no use for.
        self._options = {"token": "anon"} if self._scheme == "gs" and os.environ.get("STORAGE_EMULATOR_HOST") else {}
        self.requests = Requests()

    def __repr__(self) -> str:
        return f"FsspecStore({self.uri()!r})"

    def uri(self, name: str = "") -> str:
        return f"{self._scheme}://{self._prefix}{name}".rstrip("/")

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        parts_of(name)  # it may come from a message; `open` reads landing files, whose names others chose, such as a//b
        return self._read(name, part[0], sum(part)) if part else self._read(name)

    def head(self, name: str) -> ObjectInfo | None:
        return self._found("head", name)

    def create(self, name: str, data: bytes) -> bool:
        parts_of(name)
        try:
            with self._asked("create", name) as fs:
                fs.pipe_file(self._prefix + name, data, mode="create")
        except FileExistsError:
            if self.get(name) == data:
                raise UnknownOutcomeError(f"{self.uri(name)} is there, and what it holds is what was sent") from None
            return False
        except StoreUnavailableError as e:
            raise UnknownOutcomeError(e.message) from e
        return True

    @contextmanager
    def write(self, name: str) -> Iterator[Any]:
        parts_of(name)
        with tempfile.NamedTemporaryFile(prefix="lakeupsert-") as whole:
            yield whole
            whole.flush()
            with self._asked("put", name) as fs:
                fs.put_file(whole.name, self._prefix + name)

    def list(self, prefix: str, *, limit: int | None = None) -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        found: dict[str, Any] = {}
        with suppress(NotFoundError), self._asked("list", prefix) as fs:
            found = fs.find(self._prefix + folder, detail=True)
        if not found and self._scheme == "gs":
            self._see_bucket()
        infos = sorted((self._info(each) for each in found.values()), key=lambda info: info.name)
        return islice((info for info in infos if info.name.startswith(prefix)), limit)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(NotFoundError), self._asked("delete", name) as fs:
                fs.rm_file(self._prefix + name)

    def open(self, name: str, etag: str | None = None) -> Any:
        there = self._found("get", name)
        if there is None or etag not in (None, there.etag):
            raise NotFoundError(name)

        return pa.PythonFile(RangeReader(partial(self._read, name), there.size, b"", 0), "r")

    # -- how

    def _read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        with self._asked("get", name) as fs:
            try:
                return bytes(fs.cat_file(self._prefix + name, start=start, end=end))
            except Exception as e:
                if getattr(e, "code", None) != 416:  # it has no such bytes
                    raise
                return b""

    def _found(self, call: Call, name: str) -> ObjectInfo | None:
        with suppress(NotFoundError), self._asked(call, name) as fs:
            found = fs.info(self._prefix + name)
            return self._info(found) if found["type"] == "file" else None
        return None

    def _see_bucket(self) -> None:
        """A listing of no bucket is empty, too."""
        with self._asked("head", "") as fs:
            if not fs.exists(self._bucket):
                raise self._no_bucket()

    def _no_bucket(self) -> ConfigurationError:
        return ConfigurationError(
            "no-bucket",
            f"There is no bucket {self._bucket!r} for {self.uri()}. {UNTOUCHED}",
            next="create it, or correct its name",
        )

    @contextmanager
    def _asked(self, call: Call, name: str) -> Iterator[Any]:
        """The backend; what it raises becomes what the operator does next."""
        self.requests.count(call)
        try:
            # fsspec keeps one for each process. Its listings are not kept, as others write too.
            yield fsspec.filesystem(self._scheme, use_listings_cache=False, **self._options)
        except FileNotFoundError as e:
            if call in ("create", "put"):  # it is the place that is not there
                raise self._no_bucket() from e
            raise NotFoundError(name) from e
        except (FileExistsError, LakeupsertError):
            raise
        except Exception as e:  # each backend has its own
            if getattr(e, "code", None) in (401, 403) or isinstance(e, PermissionError) or "Forbidden" in str(e):
                raise ConfigurationError(
                    "not-permitted",
                    f"Not permitted: {call} of {self.uri(name)}: {e}. {UNTOUCHED}",
                    next="give this identity the right to read, create and list there, or correct its credentials",
                ) from e
            raise StoreUnavailableError(
                "store-unreachable",
                f"{self.uri(name)}: {call} failed: {type(e).__name__}: {e}. {UNTOUCHED}",
                next="check the network, the address and the credentials, then run the same command again",
            ) from e

    def _info(self, found: dict[str, Any]) -> ObjectInfo:
        name = found["name"].lstrip("/").removeprefix(self._prefix)
        modified = next((_seconds(found[key]) for key in _MODIFIED if found.get(key)), 0.0)
        etag = next((str(found[key]) for key in _ETAG if found.get(key)), str(modified))
        return ObjectInfo(name, found["size"], etag, modified)


def _seconds(stamp: Any) -> float:
    if isinstance(stamp, str):
        stamp = datetime.fromisoformat(stamp)
    return stamp.timestamp() if isinstance(stamp, datetime) else float(stamp)
