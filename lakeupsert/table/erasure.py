"""A record of an erasure: what one call of `erase` set out to erase, and whether nothing of it is left. Immutable."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec

from lakeupsert import clock
from lakeupsert.storage import ObjectInfo, ObjectStore
from lakeupsert.table import metadata
from lakeupsert.table.chain import FORMAT, refuse_newer
from lakeupsert.table.layout import ERASURES


@dataclass(frozen=True)
class ErasedKeys:
    """Keys by the hashes (docs/FORMAT.md, "Buckets") of these columns: those of the key, and perhaps of the partition."""

    columns: tuple[str, ...]
    hashes: tuple[int, ...]


class Erasure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call.

    Attributes:
        at: when it began, or when it found nothing left (ISO 8601, UTC).
        reason: as it was given.
        batch: the newest batch then.
        columns, keys: see `ErasedKeys`. Hashes are 16 hexadecimal digits, in ascending order.
        partitions: those whose newest version had one of the keys.
        statements, landing: packs of statements, and landing files, that had one and are deleted as a whole.
        quarantine: quarantine files that had one and are redacted.
        ended: the call found nothing left.
    """

    format: int = FORMAT
    at: str
    reason: str
    batch: int
    columns: tuple[str, ...]
    keys: tuple[str, ...]
    partitions: tuple[str, ...] = ()
    statements: tuple[str, ...] = ()
    landing: tuple[str, ...] = ()
    quarantine: tuple[str, ...] = ()
    ended: bool = False

    def is_of(self, columns: tuple[str, ...], keys: tuple[str, ...]) -> bool:
        return (self.columns, self.keys) == (columns, keys)


def write_erasure(store: ObjectStore, erasure: Erasure) -> str:
    """Returns the name of the record."""
    name = f"{ERASURES}/erasure-{clock.new_id()}.json"
    with store.write(name) as sink:
        sink.write(metadata.encode(erasure))
    return name


def read_erasures(store: ObjectStore) -> Iterator[tuple[ObjectInfo, Erasure]]:
    """All records of a table. Raises DamagedTableError."""
    for found in store.list(f"{ERASURES}/erasure-"):
        where = store.uri(found.name)
        erasure = metadata.decode(store.get(found.name), Erasure, partial(str, where), "the record of an erasure")
        refuse_newer(where, erasure.format)
        yield found, erasure


def unite(erasures: Iterable[Erasure]) -> tuple[ErasedKeys, ...]:
    """Their keys, once for the same columns."""
    found: dict[tuple[str, ...], set[int]] = {}
    for one in erasures:
        found.setdefault(one.columns, set()).update(int(key, 16) for key in one.keys)
    return tuple(ErasedKeys(columns, tuple(sorted(keys))) for columns, keys in found.items())
