"""A store that keeps small objects in memory which never change, for a process that reads them again and again."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from re import Pattern
from threading import Lock

import pyarrow as pa

from lakeupsert.storage.base import ObjectStore, Sink

KEPT_BYTES = 64 << 20
"""The objects in memory, those used last. More: memory of a process that runs for months. Fewer: merges read deltas and bases
again."""
SMALL_BYTES = 1 << 20
"""The largest object that is kept. Larger: few bases take the place of many deltas. Smaller: each merge reads its base again."""


class KeepingStore:
    """``below``, and small objects with ``names`` of objects that are written once, as they were written or opened here."""

    def __init__(self, below: ObjectStore, names: Pattern[str]) -> None:
        self._below, self._names = below, names
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()
        self.requests, self.pinned, self.uri = below.requests, below.pinned, below.uri
        self.get, self.head, self.list, self.create = below.get, below.head, below.list, below.create
        self.delete, self.clock_ahead = below.delete, below.clock_ahead

    def __reduce__(self) -> tuple[type["KeepingStore"], tuple[ObjectStore, Pattern[str]]]:
        return KeepingStore, (self._below, self._names)

    def open(self, name: str, etag: str | None = None) -> pa.NativeFile:
        kept = self._kept.get(name)
        if kept is None:
            source = self._below.open(name, etag)
            if source.size() > SMALL_BYTES or not self._names.fullmatch(name):
                return source
            with source:
                kept = source.read()
        self._keep(name, kept)
        return pa.BufferReader(kept)

    @contextmanager
    def write(self, name: str) -> Iterator[Sink]:
        with self._below.write(name) as sink:
            copied = _Copied(sink) if self._names.fullmatch(name) else None
            yield copied or sink
        if copied:
            self._keep(name, bytes(copied.data))

    def forget(self) -> None:
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    def _keep(self, name: str, data: bytes) -> None:
        if len(data) > SMALL_BYTES:
            return
        with self._lock:
            self._bytes += len(data) - len(self._kept.pop(name, b""))
            self._kept[name] = data
            while self._bytes > KEPT_BYTES:
                self._bytes -= len(self._kept.popitem(last=False)[1])


class _Copied:
    """A sink, and a copy of what was written to it, which ends once it is too large to be kept."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self.data = sink, bytearray()

    def write(self, data: bytes) -> object:
        if len(self.data) <= SMALL_BYTES:
            self.data += data
        return self._sink.write(data)
