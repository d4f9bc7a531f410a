"""A work object: the partitions that a reprocess rewrites, and their sources. Immutable; queue messages carry its name."""

from typing import Literal

import msgspec

from lakeupsert.errors import RefusedError
from lakeupsert.storage import NotFoundError, ObjectStore
from lakeupsert.table import metadata
from lakeupsert.table.chain import refuse_newer
from lakeupsert.table.ledger import Touched

Source = Literal["stored", "landing"]
AGAIN = "run `lakeupsert reprocess` again"


class PartitionRewrite(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One partition of a work object.

    Attributes:
        merged: the partition's `merged` when the object was written.
        batches: with source `landing`, what each batch that counts brings to the partition. The files were written again from the
            landing files; no ledger entry names them.
        refused: quarantine objects of the partition's merges, whose rows are left out.
        erased: with source `stored`, keys that are left out, as in `MergeTask`.
    """

    merged: int
    batches: dict[int, Touched]
    refused: tuple[str, ...]
    erased: bytes = b""


class RewriteOrder(msgspec.Struct, frozen=True):
    """``spec_version``: of a published snapshot. Partitions are rewritten under this spec or a newer one."""

    format: int
    source: Source
    partitions: dict[str, PartitionRewrite]
    spec_version: int


def write_order(store: ObjectStore, name: str, work: RewriteOrder) -> None:
    with store.write(name) as sink:
        sink.write(metadata.encode(work))


def read_order(store: ObjectStore, name: str) -> RewriteOrder:
    """Raises RefusedError if the object is gone, DamagedTableError if it is damaged, ConfigurationError if it is too new."""
    try:
        work = metadata.decode(store.get(name), RewriteOrder, lambda: store.uri(name), "a work object", next=AGAIN)
    except NotFoundError as e:
        raise RefusedError(
            "no-work",
            f"{store.uri(name)} is gone. It lists the work of a reprocess; the partition was not changed.",
            next=AGAIN,
        ) from e
    refuse_newer(store.uri(name), work.format)
    return work
