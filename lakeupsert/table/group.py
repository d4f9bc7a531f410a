"""Manifests of many partitions in one object, which a snapshot names (docs/FORMAT.md, "Groups").

No chain has them: each says what a chain's version and the batches behind it come to, and only readers need it.
"""

import msgspec

from lakeupsert.storage import ObjectStore
from lakeupsert.table import metadata
from lakeupsert.table.chain import FORMAT, refuse_newer
from lakeupsert.table.manifest import Manifest

FEATURE = "groups"
"""In `TableSpec.requires` of a table that may have them."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The manifests of partitions whose chains lack these batches, as one snapshot shows them."""

    format: int
    manifests: dict[str, Manifest]


def write_group(store: ObjectStore, name: str, manifests: dict[str, Manifest]) -> None:
    with store.write(name) as sink:
        sink.write(metadata.encode(Group(format=FORMAT, manifests=manifests)))


def read_group(store: ObjectStore, name: str, next: str) -> dict[str, Manifest]:
    """Raises NotFoundError; DamagedTableError with the advice ``next``; ConfigurationError if the object is too new."""
    group = metadata.decode(store.get(name), Group, lambda: store.uri(name), "a group of manifests", next)
    refuse_newer(store.uri(name), group.format)
    return group.manifests
