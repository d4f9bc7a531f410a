"""A folder in which others write. Of it, only files that are there themselves are read.

They could otherwise let us copy a file into the table that we may read and they may not. A pipe would stop the reader for ever.
"""

import os
import stat

import pyarrow as pa

from lakeupsert.storage.base import FOREIGN, ForeignObjectError, ObjectInfo
from lakeupsert.storage.local import LocalStore


class LandingFolder(LocalStore):
    """Lists foreign names too, so that somebody hears of them. To read one raises ForeignObjectError."""

    def __repr__(self) -> str:
        return f"LandingFolder({self.root!r})"

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        self._refuse(name)
        return super().get(name, part)

    def head(self, name: str) -> ObjectInfo | None:
        return ObjectInfo(name, 0, FOREIGN, 0.0) if self._is_foreign(self._path(name)) else super().head(name)

    def open(self, name: str, etag: str | None = None) -> pa.NativeFile:
        self._refuse(name)
        return super().open(name, etag)

    def _refuse(self, name: str) -> None:
        # Its folder may have become a link since it was listed.
        if self._is_foreign(self._path(name)) or self.leads_out(name):
            raise ForeignObjectError(f"It is not in the landing zone itself: {os.path.realpath(self._path(name))}.")

    def _is_foreign(self, path: str) -> bool:
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            return False  # gone, or what the caller says better
        if stat.S_ISLNK(mode):
            return self._is_outside(path)
        return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
