"""Count what the files of a bucket hold, and check their keys: the row work of `reconcile`, done where a `Host` says."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakeupsert.errors import DamagedTableError
from lakeupsert.rows.arrays import Rows
from lakeupsert.rows.datafiles import stream_file
from lakeupsert.rows.digest import Digest, row_hashes
from lakeupsert.rows.rank import sortable
from lakeupsert.storage import ObjectStore
from lakeupsert.table.manifest import BucketEntry, DataFile, add_digests
from lakeupsert.table.spec import TableSpec


@dataclass(frozen=True)
class StoredRows:
    """Rows in files, and digests of their key and ordering columns.

    Attributes:
        wrong: what is wrong with files or with the keys in them, in sentences without a full stop.
    """

    live: int
    live_digest: str
    tombstones: int
    tombstone_digest: str
    wrong: tuple[str, ...]


def total(counts: Sequence[StoredRows]) -> StoredRows:
    """Those of several buckets together."""
    return StoredRows(
        live=sum(c.live for c in counts),
        live_digest=_sum(c.live_digest for c in counts),
        tombstones=sum(c.tombstones for c in counts),
        tombstone_digest=_sum(c.tombstone_digest for c in counts),
        wrong=tuple(dict.fromkeys(sentence for c in counts for sentence in c.wrong)),
    )


def _sum(digests: Iterable[str]) -> str:
    found = add_digests(digests)
    assert found is not None, "every digest is known"
    return found


def count_rows(
    store: ObjectStore,
    spec: TableSpec,
    bucket: BucketEntry,
    read: Callable[[DataFile], Iterator[Rows]] | None = None,
) -> StoredRows:
    """Count the rows of a bucket's files. Damage is a finding. Raises StoreUnavailableError.

    ``read``: yields the rows of a file, with key and ordering columns; None reads only these.
    """
    live, tombstones = Digest(spec), Digest(spec)
    wrong: list[str] = []
    other_hashes = np.empty(0, np.uint64)  # of keys in files that were read before
    deltas = [((delta,), live) for delta in bucket.deltas]
    runs = [(bucket.tombstones, tombstones), *deltas, (bucket.base, live)]
    try:
        for number, (files, digest) in enumerate(runs, 1):
            last = spec.tombstone_schema.empty_table()
            run_hashes = []
            for file in files:
                for rows in read(file) if read else stream_file(store, file, spec.tombstone_schema):
                    rows = rows.select(spec.tombstone_schema.names)
                    digest.add(rows)
                    if not bucket.settled:
                        continue
                    name = file.name or "tombstones in the manifest"
                    if not _ascends(pa.concat_tables([last, rows]), spec.stored_key):
                        wrong.append(f"{name}: keys are not unique, or not in order")
                    hashes = row_hashes(rows, spec.stored_key)
                    if len(other_hashes) and np.isin(hashes, other_hashes).any():
                        wrong.append(f"{name}: rows whose keys are deleted, or in a delta")
                    if number < len(runs):
                        run_hashes.append(hashes)
                    last = rows.slice(max(0, rows.num_rows - 1))
            other_hashes = np.concatenate([other_hashes, *run_hashes])
    except DamagedTableError as e:
        wrong.append(e.message)
    return StoredRows(live.rows, str(live), tombstones.rows, str(tombstones), tuple(dict.fromkeys(wrong)))


def _ascends(rows: Rows, key: Sequence[str]) -> bool:
    """Whether each key is greater than that of the row before; a null never is."""
    ascends = None
    for name in reversed(key):
        column = sortable(rows[name])
        before, after = column.slice(0, max(0, len(column) - 1)), column.slice(1)
        less = pc.less(before, after)
        ascends = less if ascends is None else pc.or_(less, pc.and_(pc.equal(before, after), ascends))
    return bool(pc.all(ascends, skip_nulls=False, min_count=0).as_py())
