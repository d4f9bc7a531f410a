"""A store on top of another one: new objects go to a temporary folder, and the store below never changes."""

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa

from lakeupsert.storage.base import NOTHING, ObjectInfo, ObjectStore
from lakeupsert.storage.local import LocalStore


class OverlayStore(LocalStore):
    """``below`` and the objects that were written here. Listings only show ``below``.

    The folder is deleted with the last reference to the store, at the end of the process, or by `remove`.
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

    def open(self, name: str, etag: str | None = None) -> pa.NativeFile:
        return super().open(name, etag) if self._is_here(name) else self._below.open(name, etag)

    def clock_ahead(self) -> float | None:
        return self._below.clock_ahead()

    def list(
        self, prefix: str, *, limit: int | None = None, above: Mapping[str, str] = NOTHING
    ) -> Iterator[ObjectInfo]:
        return self._below.list(prefix, limit=limit, above=above)

    def _is_here(self, name: str) -> bool:
        return Path(self._path(name)).is_file()
