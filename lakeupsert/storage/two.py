"""Reads of one store, writes to another."""

from lakeupsert.storage.base import ObjectReader, ObjectStore


class TwoStores:
    """Objects are read from ``source`` and written to ``target``; nothing changes in ``source``."""

    def __init__(self, source: ObjectReader, target: ObjectStore) -> None:
        self._source, self._target = source, target
        self.requests, self.pinned, self.uri = target.requests, source.pinned, source.uri
        self.get, self.head, self.list, self.open = source.get, source.head, source.list, source.open
        self.create, self.write, self.delete = target.create, target.write, target.delete
        self.clock_ahead = target.clock_ahead

    def __reduce__(self) -> tuple[type["TwoStores"], tuple[ObjectReader, ObjectStore]]:
        return TwoStores, (self._source, self._target)
