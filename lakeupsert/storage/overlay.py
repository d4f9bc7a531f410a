"""A store with objects of our own over it: what is written lies in a temporary folder, what is below stays as it is."""

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lakeupsert.storage.base import ObjectInfo, ObjectStore
from lakeupsert.storage.local import LocalStore


class OverlayStore(LocalStore):
    """``below``, and over it what was written here; listings tell of ``below`` alone.

    The folder goes with the last reference to the store, at the end of the process, or by `remove`.
    """

    def __init__(self, below: ObjectStore) -> None:
        super().__init__(tempfile.mkdtemp(prefix="lakeupsert-"))
        self._below = below
        self.remove = weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)

    def uri(self, name: str = "") -> str:
        return super().uri(name) if self._is_here(name) else self._below.uri(name)

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        return super().get(name, part) if self._is_here(name) else self._below.get(name, part)

    def head(self, name: str) -> ObjectInfo | None:
        return super().head(name) if self._is_here(name) else self._below.head(name)

    def open(self, name: str, etag: str | None = None) -> Any:
        return super().open(name, etag) if self._is_here(name) else self._below.open(name, etag)

    def list(self, prefix: str, *, limit: int | None = None) -> Iterator[ObjectInfo]:
        return self._below.list(prefix, limit=limit)

    def _is_here(self, name: str) -> bool:
        return Path(self._path(name)).is_file()
