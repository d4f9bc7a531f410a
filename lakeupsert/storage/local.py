"""A folder as an object store: durable, atomic, safe between the processes of one machine, and on NFS with link(2).

An object appears by link(2) from a complete, synced temporary file. So a crash never leaves a partial object under its final name
(as `O_EXCL` on that name would), and of two creators one gets EEXIST. The folder is synced after the link, because a power cut
could otherwise undo a commit that was already reported.
"""

import errno
import os
import posixpath
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from lakeupsert import clock
from lakeupsert.errors import ConfigurationError
from lakeupsert.storage.base import (
    FOREIGN,
    NOTHING,
    NotFoundError,
    ObjectInfo,
    Requests,
    Sink,
    StoreUnavailableError,
    UnknownOutcomeError,
    parts_of,
)

SCRATCH = "_lakeupsert/tmp"
"""Folder of unfinished objects. It is below the root, because link(2) can't cross file systems, and hidden from listings of other
folders. Files of killed writers stay until a vacuum."""
_QUOTED = re.compile(rb"[^\w.~/-]", re.ASCII)
"""Bytes of a path that are escaped in a URL."""


class LocalStore:
    """See `lakeupsert.storage.base.ObjectStore` for what each method promises."""

    pinned = False  # others can overwrite a file while it is read

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(root)
        self.requests = Requests()
        self._scratch = os.path.join(self.root, *SCRATCH.split("/"))
        self._known_folders: set[str] = set()

    def __repr__(self) -> str:
        return f"LocalStore({self.root!r})"

    def uri(self, name: str = "") -> str:
        # As `Path.as_uri`, in a sixth of its time: planning needs one for each file.
        return "file://" + _QUOTED.sub(lambda byte: b"%%%02X" % byte[0][0], os.fsencode(self._path(name))).decode()

    def get(self, name: str, part: tuple[int, int] | None = None) -> bytes:
        self.requests.count("get")
        start, size = part or (0, -1)
        # A buffer would only cost time; but without one, a read of more than 2 GB may be cut short.
        with self._failures(name, reads=True), open(self._path(name), "rb", -1 if part else 0) as f:
            f.seek(start)
            return f.read(size)

    def head(self, name: str) -> ObjectInfo | None:
        self.requests.count("head")
        try:
            with self._failures(name, reads=True):
                status = os.stat(self._path(name))
        except NotFoundError:
            return None
        return _info(name, status) if stat.S_ISREG(status.st_mode) else None

    def create(self, name: str, data: bytes) -> bool:
        self.requests.count("create")
        path = self._path(name)
        if os.path.lexists(path):
            return False
        with self._failures(name), self._temporary() as f:
            f.write(data)
            if not self._link(f, path):
                return False
            try:
                _sync_folder(os.path.dirname(path))
            except OSError as e:  # the link exists, but a power cut may undo it
                raise UnknownOutcomeError(path) from e
            return True

    @contextmanager
    def write(self, name: str) -> Iterator[Sink]:
        self.requests.count("put")
        path = self._path(name)
        with self._failures(name), self._temporary() as f:
            yield f
            if not self._link(f, path):
                raise FileExistsError(errno.EEXIST, "a name that should be unique is taken", path)
            _sync_folder(os.path.dirname(path))

    def list(
        self, prefix: str, *, limit: int | None = None, above: Mapping[str, str] = NOTHING
    ) -> Iterator[ObjectInfo]:
        self.requests.count("list")
        folder, _, start = prefix.rpartition("/")
        with self._failures(prefix, reads=True):
            yield from islice(self._walk(folder, start, above), limit)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.requests.count("delete")
            with self._failures(name):
                _remove(self._path(name))

    def open(self, name: str, etag: str | None = None) -> pa.NativeFile:
        self.requests.count("get")
        with self._failures(name, reads=True):
            file = pa.OSFile(self._path(name), "rb")
        if etag is not None and _info(name, os.fstat(file.fileno())).etag != etag:
            file.close()
            raise NotFoundError(name)
        return file

    def clock_ahead(self) -> float | None:
        """The file system's clock, on NFS that of the server, is seen by the time of a new file."""
        folder = next(path for path in (Path(self._scratch), *Path(self._scratch).parents) if path.is_dir())
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")
                file.flush()
                return clock.now().timestamp() - os.fstat(file.fileno()).st_mtime
        except OSError:  # this user may not write there
            return None

    # -- how

    def _path(self, name: str) -> str:
        return os.path.join(self.root, *parts_of(name))

    @contextmanager
    def _temporary(self) -> Iterator[BinaryIO]:
        self._make_folder(self._scratch)
        path = os.path.join(self._scratch, clock.new_id())
        try:
            with open(path, "xb") as f:
                yield f
        finally:
            _remove(path)

    def _link(self, f: BinaryIO, path: str) -> bool:
        """Sync the file and link it to ``path``, without a sync of the folder. Returns whether the name was free."""
        f.flush()
        os.fsync(f.fileno())
        self._make_folder(os.path.dirname(path))
        try:
            os.link(f.name, path)
        except FileExistsError:
            return False
        except OSError as e:
            if e.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            raise ConfigurationError(
                "no-hard-links",
                f"The file system of {self.root} does not support hard links ({e.strerror}); FAT, exFAT and some network shares "
                "do not. lakeupsert needs link(2) to make objects appear complete. Earlier commits are untouched.",
                next="put the processed zone on a file system with hard links, for example ext4, XFS, APFS or NFS",
            ) from e
        _remove(f.name)  # the object's etag changes by that: whoever lists it should see the last one
        return True

    def _make_folder(self, folder: str) -> None:
        if folder in self._known_folders:
            return
        parent, beside = os.path.dirname(folder), [folder]
        if os.path.isdir(folder):
            # One sync covers all folders here, of which there may be one per partition.
            with os.scandir(parent) as scan:
                beside += [entry.path for entry in scan if _is_folder(entry)]
        else:
            self._make_folder(parent)
            os.makedirs(folder, exist_ok=True)
        # Also if another process created it: a power cut could lose the folder with everything committed in it.
        _sync_folder(parent)
        self._known_folders.update(beside)

    def _walk(self, folder: str, start: str, above: Mapping[str, str], *, linked: bool = False) -> Iterator[ObjectInfo]:
        """The objects below a folder whose next part begins with ``start``, ordered by their whole names.

        A link to a folder is followed only if it leads out of the root, and below it (``linked``) no other link is. So no object
        has two names, and no listing is endless. A foreign link is listed as itself.
        """
        path, least = self._path(folder), posixpath.basename(above.get(folder, ""))
        found = []
        try:
            with os.scandir(path) as scan:
                for entry in scan:
                    # a folder sorts as "name/", as in the names of the objects below it
                    key = entry.name + "/" * _is_folder(entry)
                    if entry.name.startswith(start) and key > least:
                        is_foreign = not _is_plain(entry) and self._is_foreign(entry.path)
                        found.append((entry.name if is_foreign else key, entry, is_foreign))
        except (FileNotFoundError, NotADirectoryError):
            return
        for key, entry, is_foreign in sorted(found, key=itemgetter(0)):
            name = f"{folder}/{entry.name}" if folder else entry.name
            if key.endswith("/"):
                link = entry.is_symlink()
                if entry.path != self._scratch and not (link and (linked or self._leads_inside(entry.path))):
                    yield from self._walk(name, "", above, linked=linked or link)
                continue
            try:
                info = entry.stat(follow_symlinks=not is_foreign)
            except OSError as e:
                if e.errno in (errno.ENOENT, errno.ELOOP):
                    continue  # deleted during the listing, or a link to itself
                raise
            if is_foreign:
                yield ObjectInfo(name, 0, FOREIGN, info.st_mtime)
            elif stat.S_ISREG(info.st_mode):
                yield _info(name, info)

    def leads_out(self, name: str) -> bool:
        """Whether an object, or a folder of objects, is elsewhere, by a link somewhere in its path."""
        return self._is_outside(self._path(name))

    def _is_outside(self, path: str) -> bool:
        root = os.path.realpath(self.root)
        return os.path.commonpath([root, os.path.realpath(path)]) != root

    def _is_foreign(self, path: str) -> bool:
        """Whether `list` shows what is at a path as foreign."""
        return False

    def _leads_inside(self, link: str) -> bool:
        root, target = os.path.realpath(self.root), os.path.realpath(link)
        return os.path.commonpath([root, target]) in (root, target)

    @contextmanager
    def _failures(self, name: str, *, reads: bool = False) -> Iterator[None]:
        """Turn errors of the operating system into errors by what the operator does next."""
        try:
            yield
        except OSError as e:
            if reads and isinstance(e, FileNotFoundError | NotADirectoryError | IsADirectoryError):
                raise NotFoundError(name) from e
            # In a listing, the folder that can't be read.
            where = e.filename if reads and isinstance(e.filename, str) else os.path.join(self.root, name)
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreUnavailableError(
                    "disk-full",
                    f"No space to write {where}: {e.strerror}. Earlier commits are untouched.",
                    next="free space on that file system, then run the same command again",
                ) from e
            if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                beside = "" if os.path.isdir(where) else f", and the other files of {os.path.dirname(where)}"
                # Arrow puts its own text in place of the system's.
                why, need = os.strerror(e.errno), f"read {where}{beside}" if reads else f"read and write {self.root}"
                raise ConfigurationError(
                    "not-permitted",
                    f"Not permitted: {where}: {why} (user {os.geteuid()}). Earlier commits are untouched.",
                    next=f"give this user the right to {need}, then run the same command again",
                ) from e
            if e.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
                raise StoreUnavailableError(
                    "store-unreachable",
                    f"{where} could not be reached: {e.strerror}.",
                    next="check the disk or mount, then run the same command again",
                ) from e
            raise


def _info(name: str, status: os.stat_result) -> ObjectInfo:
    # The time of the last change of the inode, too: whoever rewrites a file in place can set back only that of its content.
    etag = f"{status.st_mtime_ns}-{status.st_ino}-{status.st_ctime_ns}"
    return ObjectInfo(name, status.st_size, etag, status.st_mtime)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # `isdir` has an answer for a link to itself, too.
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))


def _is_plain(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)
