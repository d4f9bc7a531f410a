"""A work object: which partitions a reprocess writes anew, and from what. Immutable; the queue's messages carry its name."""

from typing import Literal

import msgspec

from lakeupsert.errors import RefusedError
from lakeupsert.storage import NotFoundError, ObjectStore
from lakeupsert.table import metadata
from lakeupsert.table.ledger import Touched

Source = Literal["stored", "landing"]
AGAIN = "run `lakeupsert reprocess` again"


class Rebuilt(msgspec.Struct, frozen=True, kw_only=True):
    """One partition: the `merged` that it had, and with source `landing` what each batch that counts there brought for it,
    without the rows in ``refused``, quarantine objects of its merges.

    Their files were made from landing anew; no ledger entry names them.
    """

    merged: int
    batches: dict[int, Touched] = {}
    refused: tuple[str, ...] = ()


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """``spec_version``: that of a snapshot which was published; partitions are written under it, or a newer one."""

    format: int = 1
    source: Source
    partitions: dict[str, Rebuilt]
    spec_version: int = 0


def write_work(store: ObjectStore, name: str, work: Work) -> None:
    with store.write(name) as sink:
        sink.write(metadata.encode(work))


def read_work(store: ObjectStore, name: str) -> Work:
    """Raises RefusedError where it is gone, or of a later version; DamagedTableError where it is damaged."""
    try:
        work = metadata.decode(store.get(name), Work, lambda: store.uri(name), "a work object", next=AGAIN)
        reason = None if work.format == 1 else f"has format {work.format}, and this lakeupsert reads 1"
    except NotFoundError:
        reason = "is gone"
    if reason is not None:
        raise RefusedError(
            "no-work",
            f"{store.uri(name)} {reason}. It says what a reprocess has to do; the partition stays as it is.",
            next=AGAIN,
        )
    return work
