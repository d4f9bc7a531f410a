"""Find the files that have some keys, among all that readers or later commands need.

Reads     the metadata that is needed (`needed`); key columns of data files, superseded rows included; quarantine files; landing
          files that batches took
Writes    nothing
Repeat    safe
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeupsert.engine.batch import read_landing
from lakeupsert.engine.hosts import LocalHost
from lakeupsert.errors import DamagedTableError
from lakeupsert.landing.formats.blocks import LandingInput
from lakeupsert.landing.partitions import UNPLACED
from lakeupsert.operations.needed import Needed, NeededBucket
from lakeupsert.operations.reprocess import Batch, job_of
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.table_keys import named_index
from lakeupsert.rows.arrays import Mask, Rows
from lakeupsert.rows.buckets import buckets, key_hashes
from lakeupsert.rows.datafiles import open_object, stream_file
from lakeupsert.rows.floor import PARTITION, is_among
from lakeupsert.rows.rank import sortable
from lakeupsert.rows.tojson import to_json_values
from lakeupsert.storage import ObjectStore
from lakeupsert.table.layout import QUARANTINE, STATEMENT_ROWS, partition_scalars
from lakeupsert.table.manifest import DataFile
from lakeupsert.table.spec import TableSpec

VALUES = re.compile(r"[^\s,;|\"']+")
"""Words of a refused row that is not JSON."""


class Keys:
    """The keys to erase, each once, and whether rows and texts have one of them.

    Args:
        rows: the key columns, and the partition columns if each key is erased in its partition only.

    Attributes:
        columns, hashes: as `Erasure` has them.
    """

    def __init__(self, rows: Rows, spec: TableSpec) -> None:
        self.rows, self.spec, self.columns = rows, spec, tuple(rows.schema.names)
        self.hashes = tuple(f"{hash_:016x}" for hash_ in sorted(key_hashes(rows, spec, self.columns).tolist()))
        self._names = [name for name in spec.key if name in rows.schema.names]
        texts = zip(*(map(str, to_json_values(rows[name].combine_chunks())) for name in self._names), strict=True)
        self._texts: defaultdict[str, list[frozenset[str]]] = defaultdict(list)
        for text in texts:
            self._texts[text[0]].append(frozenset(text))

    def within(self, partition: str) -> Rows:
        """The keys that a partition may have, by the key columns in its files."""
        rows = self.rows
        for name, value in ({} if partition == UNPLACED else partition_scalars(self.spec, partition)).items():
            if name in rows.schema.names:
                rows = rows.filter(pc.equal(rows[name], value.cast(rows.schema.field(name).type)))
        columns = list(self.spec.stored_key)
        return rows.select(columns).group_by(columns).aggregate([]).select(columns) if columns else rows.select([])

    def find_raw(self, rows: Sequence[str | None]) -> Mask:
        """Which refused rows have all values of a key somewhere."""
        return np.array([raw is not None and self._has(raw) for raw in rows], bool)

    def _has(self, raw: str) -> bool:
        try:
            words = set(_values(json.loads(raw)))
        except ValueError:
            words = set(VALUES.findall(raw))
        return any(key <= words for word in words & self._texts.keys() for key in self._texts[word])


def _values(value: object) -> Iterator[str]:
    """The texts of all values in a JSON value."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _values(one)
    else:
        yield str(value)


@dataclass
class Found:
    """The objects that have a key.

    Attributes:
        partitions: those whose newest version has some, and these keys, by the key columns in its files.
        older: versions that only a snapshot before the newest needs: the partition, and who needs it.
        statements: packs of rows of updates and deletes.
        keys: files of the key index.
        quarantine, landing: names of quarantine files and of landing files.
        needed: the walk.
    """

    needed: Needed
    partitions: dict[str, Rows] = field(default_factory=dict)
    older: dict[str, str] = field(default_factory=dict)
    statements: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    quarantine: set[str] = field(default_factory=set)
    landing: set[str] = field(default_factory=set)

    @property
    def is_there(self) -> bool:
        """Whether something is to be rewritten or deleted, by more than a vacuum."""
        return any((self.partitions, self.statements, self.keys, self.quarantine, self.landing))


def find(table: OpenTable, keys: Keys, *, landing: bool, progress: Callable[[str], None]) -> Found:
    """Look for the keys everywhere. ``landing``: also in the landing files that are still there.

    Raises DamagedTableError if an object that is needed is missing or damaged.
    """
    needed = Needed(table, _refuse_damage, progress)
    found, store = Found(needed), table.resources.store
    for bucket in needed.buckets():
        there = _keys_in(store, bucket, keys.within(bucket.partition))
        if not there.num_rows:
            continue
        names = {file.name for file in bucket.entry.data}
        if any(name.startswith(STATEMENT_ROWS) for name in names):
            found.statements |= names
        elif bucket.needed_by == f"snapshot {needed.snapshots[0]}":
            before = found.partitions.get(bucket.partition, there.slice(0, 0))
            found.partitions[bucket.partition] = pa.concat_tables([before, there])
        else:
            found.older[bucket.partition] = bucket.needed_by
    progress("searching the key index and quarantine")
    found.keys = _in_index(table, keys)
    refused = {file.name: _refused_from(store, file.name, keys) for file in store.list(f"{QUARANTINE}/")}
    found.quarantine = {name for name, files in refused.items() if files}
    if landing:
        found.landing = _in_landing(table, keys, frozenset().union(*refused.values()), progress)
    return found


def _refuse_damage(needed_by: str, error: DamagedTableError) -> None:
    raise error


def _keys_in(store: ObjectStore, bucket: NeededBucket, keys: Rows) -> Rows:
    """Those of the keys that the files of a bucket have, also as superseded rows, as deletes or as versions."""
    entry, spec = bucket.entry, bucket.spec
    if keys.num_rows and spec.stored_key:
        keys = keys.filter(pa.array(buckets(key_hashes(keys, spec), entry.bits) == entry.bucket))
    schema = pa.schema([spec.schema.field(name) for name in spec.stored_key])
    found = [schema.empty_table()]
    for file in (*entry.data, *entry.tombstones, *entry.history) if keys.num_rows else ():
        found.append(_rows_of(store, file, schema, keys, spec))
        if not spec.stored_key:  # the partition is the key
            return keys
    both = pa.concat_tables(found)
    return both.group_by(both.schema.names).aggregate([]) if both.num_rows else both


def _rows_of(store: ObjectStore, file: DataFile, schema: pa.Schema, keys: Rows, spec: TableSpec) -> Rows:
    """The rows of a file with one of the keys, superseded ones included."""
    whole = msgspec.structs.replace(file, deleted=None)
    near = {name: sortable(keys[name].cast(schema.field(name).type)).combine_chunks() for name in schema.names}
    blocks = stream_file(store, whole, schema, near, spec=spec)
    found = [rows.filter(pa.array(is_among(rows, keys, schema.names))) for rows in blocks]
    return pa.concat_tables([schema.empty_table(), *found])


def _in_index(table: OpenTable, keys: Keys) -> set[str]:
    """Files of the key index that have one of the keys."""
    ledger, spec = table.history.ledger_head(), keys.spec
    index = named_index(table.history.headers(ledger.number)) if ledger and spec.key_scope == "table" else None
    schema = pa.schema([spec.schema.field(name) for name in spec.key])
    columns = keys.rows.select(list(spec.key))
    store = table.resources.store
    return {file.name for file in (index.all if index else ()) if _rows_of(store, file, schema, columns, spec).num_rows}


def _refused_from(store: ObjectStore, name: str, keys: Keys) -> frozenset[str]:
    """The landing files of the rows with one of the keys in a quarantine file."""
    with open_object(store, name) as source:
        rows = pq.read_table(source, columns=["file", "raw"])
    return frozenset(rows["file"].filter(pa.array(keys.find_raw(rows["raw"].to_pylist()))).to_pylist())


def _in_landing(table: OpenTable, keys: Keys, refused: frozenset[str], progress: Callable[[str], None]) -> set[str]:
    """Landing files that batches took, that are still there, and that gave a row with one of the keys, or refused ones."""
    found, landing, history = set[str](), table.resources.landing, table.history
    ledger = history.ledger_head()
    for number in range(ledger.number + 1 if ledger else 0):
        [link] = history.entries(number - 1, number)
        for place, file in enumerate(link.body.files):
            there = landing.head(file.path)
            if there is None or file.path in found:
                continue
            progress(f"searching {landing.uri(file.path)}")
            batch = Batch(number, link.body, frozenset(link.body.touched))
            part = LandingInput(file.path, there.size, there.etag, place)
            job = replace(job_of(table, LocalHost(), batch, (part,), 0, {}), erased=())
            for rows in read_landing(job, job.inputs):
                if isinstance(rows, pa.Table) and _has_key(rows, keys):
                    found.add(file.path)
            if file.path in refused:
                found.add(file.path)
    return found


def _has_key(rows: Rows, keys: Keys) -> bool:
    for partition in pc.unique(rows[PARTITION]).to_pylist():
        wanted = keys.within(partition)
        own = rows.filter(pc.equal(rows[PARTITION], partition))
        if wanted.num_rows and is_among(own, wanted, keys.spec.stored_key).any():
            return True
    return False
