"""A record of an erasure: what one call of `erase` set out to erase, and whether nothing of it is left. Immutable."""

import hashlib
from collections.abc import Iterator
from functools import partial

import msgspec
import pyarrow as pa

from lakeupsert import clock
from lakeupsert.storage import ObjectInfo, ObjectStore
from lakeupsert.table import metadata
from lakeupsert.table.chain import FORMAT, refuse_newer
from lakeupsert.table.layout import ERASURES


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """One call.

    Attributes:
        at: when it began, or when it found nothing left (ISO 8601, UTC).
        reason: as it was given.
        salt: random text before each key, as it is hashed.
        keys: for each key the SHA-256 of ``salt`` and of its values, as JSON has them.
        partitions: those whose newest version had one of the keys.
        statements, landing: packs of statements, and landing files, that had one and are deleted as a whole.
        quarantine: quarantine files that had one and are redacted.
        ended: the call found nothing left.
    """

    format: int = FORMAT
    at: str
    reason: str
    salt: str
    keys: tuple[str, ...]
    partitions: tuple[str, ...] = ()
    statements: tuple[str, ...] = ()
    landing: tuple[str, ...] = ()
    quarantine: tuple[str, ...] = ()
    ended: bool = False

    def is_of(self, keys: pa.Table) -> bool:
        return self.keys == hash_keys(keys, self.salt)


def hash_keys(keys: pa.Table, salt: str) -> tuple[str, ...]:
    """For each key its hash, in the order of the hashes."""
    return tuple(sorted(hashlib.sha256(salt.encode() + _text(key)).hexdigest() for key in keys.to_pylist()))


def _text(key: dict[str, object]) -> bytes:
    return msgspec.json.encode({name: str(value) for name, value in key.items()}, order="sorted")


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
