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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lakeupsert.config import Reading
from lakeupsert.engine.batch import read_landing
from lakeupsert.engine.hosts import LocalHost
from lakeupsert.engine.replay import blocks_of
from lakeupsert.engine.reports import FileFailed
from lakeupsert.landing.content import content_hash
from lakeupsert.landing.files import apply_aliases, under_table_names
from lakeupsert.landing.formats.blocks import LandingInput, UnreadableFileError
from lakeupsert.landing.formats.dates import dated
from lakeupsert.landing.partitions import UNPLACED
from lakeupsert.operations.needed import Needed, NeededBucket, refuse_damage
from lakeupsert.operations.reprocess import Batch, job_of
from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.pipeline.table_keys import named_index
from lakeupsert.rows.arrays import Mask, Rows
from lakeupsert.rows.buckets import buckets, key_hashes
from lakeupsert.rows.convert import as_mask
from lakeupsert.rows.datafiles import open_object, stream_file
from lakeupsert.rows.floor import PARTITION, is_among
from lakeupsert.rows.rank import sortable
from lakeupsert.rows.tojson import to_json_values
from lakeupsert.storage import ObjectInfo, ObjectStore
from lakeupsert.table.layout import QUARANTINE, STATEMENT_ROWS, partition_scalars
from lakeupsert.table.ledger import active_batches
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
        yield str(value).strip()


@dataclass
class Found:
    """The objects that have a key.

    Attributes:
        partitions: those whose newest version has some, and these keys, by the key columns in its files.
        older: versions that only a snapshot before the newest needs: the partition, and who needs it.
        statements: packs of rows of updates and deletes.
        keys: files of the key index.
        quarantine, landing: names of quarantine files and of landing files.
        unsearched: landing files that can't be searched or must stay, with the reason.
        needed: the walk.
    """

    needed: Needed
    partitions: dict[str, Rows] = field(default_factory=dict)
    older: dict[str, str] = field(default_factory=dict)
    statements: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    quarantine: set[str] = field(default_factory=set)
    landing: set[str] = field(default_factory=set)
    unsearched: dict[str, str] = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        """Whether one of the keys is somewhere."""
        return any((self.partitions, self.older, self.statements, self.keys, self.quarantine, self.landing))


def find(table: OpenTable, keys: Keys, *, landing: bool, progress: Callable[[str], None]) -> Found:
    """Look for the keys everywhere. ``landing``: also in the landing files that are still there.

    Raises DamagedTableError if an object that is needed is missing or damaged.
    """
    needed = Needed(table, refuse_damage, progress)
    found, store = Found(needed), table.resources.store
    for bucket in needed.buckets():
        there = needed.look(bucket.needed_by, partial(_keys_in, store, bucket, keys.within(bucket.partition)))
        if there is None or not there.num_rows:
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
    found.keys = needed.look("`append`", partial(_in_index, table, keys)) or set()
    refused = {name: _refused_from(table, name, keys) for name in sorted(f.name for f in store.list(f"{QUARANTINE}/"))}
    found.quarantine = {name for name, files in refused.items() if files}
    if landing:
        _find_in_landing(table, keys, frozenset().union(*refused.values()), found, progress)
    return found


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


def _refused_from(table: OpenTable, name: str, keys: Keys) -> frozenset[str]:
    """The landing files of the rows with one of the keys in a quarantine file."""
    with open_object(table.resources.store, name) as source:
        rows = pq.read_table(source)
    return frozenset(rows["file"].filter(pa.array(find_refused(rows, keys, table.history.reading))).to_pylist())


def find_refused(rows: Rows, keys: Keys, reading: Reading) -> Mask:
    """Which rows of a quarantine file may have one of the keys: by the key columns that can be read, or by all its texts."""
    found = keys.find_raw(rows["raw"].to_pylist())
    for quarantined in blocks_of(rows, reading):
        block = quarantined.block
        with suppress(UnreadableFileError):
            block = apply_aliases(block, quarantined.file, reading)
        block = under_table_names(dated(block, reading), keys.spec)
        fits, known = np.ones(len(block.places), bool), np.zeros(len(block.places), bool)
        for name in keys.spec.key:
            values, unfit = block.convert(name, keys.spec.schema.field(name).type)
            unknown = unfit | as_mask(pc.is_null(values))
            among = as_mask(pc.is_in(sortable(pa.chunked_array([values])), sortable(keys.rows[name])))
            fits &= unknown | among
            known |= ~unknown
        found[block.places] |= fits & known
    return found


def _find_in_landing(
    table: OpenTable, keys: Keys, refused: frozenset[str], found: Found, progress: Callable[[str], None]
) -> None:
    """Look in the landing files that batches took and that are as they were then; others may have new rows."""
    landing, history = table.resources.landing, table.history
    entries = [link.body for link in history.entries(-1, found.needed.batch)]
    counting = set(active_batches(enumerate(entries)))
    for number, entry in enumerate(entries):
        for place, file in enumerate(entry.files):
            there = landing.head(file.path)
            if there is None or file.path in found.landing:
                continue
            progress(f"searching {landing.uri(file.path)}")
            is_same = there.is_same(file.size, file.etag) or content_hash(landing, file.path) == file.sha256
            if not file.sha256:
                found.unsearched[file.path] = (
                    "landing files that no batch could read: look at them, and delete them yourself"
                )
            elif not is_same:
                found.unsearched[file.path] = (
                    "landing files that changed since a batch took them: run the next night first"
                )
            else:
                try:
                    is_in = file.path in refused or _is_in(
                        table, keys, Batch(number, entry, frozenset(entry.touched)), place, there
                    )
                except UnreadableFileError:
                    found.unsearched[file.path] = "landing files that a batch could read, and that can't be read now"
                    continue
                if is_in and number in counting:
                    found.landing.add(file.path)
                elif is_in:
                    found.unsearched[file.path] = "landing files of withdrawn batches, which have other rows, too"


def _is_in(table: OpenTable, keys: Keys, batch: Batch, place: int, there: ObjectInfo) -> bool:
    """Whether a landing file gave a row with one of the keys. Raises UnreadableFileError if it can't be read now."""
    part = LandingInput(there.name, there.size, there.etag, place)
    job = job_of(table, LocalHost(), batch, (part,), 0, {})
    for rows in read_landing(job, job.inputs):
        if isinstance(rows, FileFailed):
            raise UnreadableFileError(rows.path, rows.reason)
        if isinstance(rows, pa.Table) and _has_key(rows, keys):
            return True
    return False


def _has_key(rows: Rows, keys: Keys) -> bool:
    for partition in pc.unique(rows[PARTITION]).to_pylist():
        wanted = keys.within(partition)
        own = rows.filter(pc.equal(rows[PARTITION], partition))
        if wanted.num_rows and is_among(own, wanted, keys.spec.stored_key).any():
            return True
    return False
