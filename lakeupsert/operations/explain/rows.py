"""Find the rows of one key in the files of a partition, or the keys that a part of a key fits, for `explain`.

Reads     the files that manifests and ledger entries name; Parquet's statistics say which row groups can hold the key
Writes    nothing
Repeat    safe
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.read.keys import find_rows
from lakeupsert.rows.arrays import Column, Rows
from lakeupsert.rows.buckets import key_hashes
from lakeupsert.rows.columns import fill_in_brought_columns
from lakeupsert.rows.datafiles import POSITION, align, open_object
from lakeupsert.rows.floor import PARTITION, Extract, Forgetting, is_among, read_refused_keys
from lakeupsert.rows.rank import sort_by_rank
from lakeupsert.rows.tojson import to_json_values
from lakeupsert.rows.vectors import deleted_positions
from lakeupsert.table.chain import Link
from lakeupsert.table.layout import HOME
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.table.manifest import HASH_BITS, DataFile, Manifest, Part
from lakeupsert.table.spec import DELETE_FLAG, FILE, MOVED_FROM, MOVED_TO, OF_EARLIER_BATCH, PLACE, TableSpec

Source = Literal["appended", "adopted", "base", "delta", "tombstone"]

JsonValue = object
"""A value as JSON has it."""
AGE = pa.field("_lakeupsert_age", pa.int64())
"""The number of the row's batch; of a stored row, of the last batch that was merged into it."""
RANK = (pa.field(DELETE_FLAG, pa.bool_()), pa.field(FILE, pa.int32()), pa.field(PLACE, pa.int64()), AGE)
"""The columns that rank a row, beside its ordering columns."""
_FOUND = (pa.field(MOVED_TO, pa.string()), pa.field(MOVED_FROM, pa.string()), pa.field(POSITION, pa.int64()))


@dataclass(frozen=True, eq=False)
class KeyRow:
    """A version: one row with every column that ranks it, and where it is. ``link`` is the batch that brought it, if known."""

    values: Rows
    source: Source
    object: str
    link: Link[LedgerEntry] | None = None
    moved_to: str | None = None
    moved_from: str | None = None
    lost_in_append: bool = False

    def value(self, column: str) -> Any:  # a Python value of the column's type
        return self.values[column][0].as_py()

    @property
    def age(self) -> int:
        return int(self.value(AGE.name))

    @property
    def deletes(self) -> bool:
        return bool(self.value(DELETE_FLAG))

    def texts(self, columns: Sequence[str]) -> dict[str, JsonValue]:
        return {column: to_json_values(self.values[column].combine_chunks())[0] for column in columns}

    @property
    def file(self) -> str | None:
        if self.link is None or self.source != "appended" or self.value(FILE) == OF_EARLIER_BATCH:
            return None
        sources: Sequence[str] = self.link.body.sources
        return sources[int(self.value(FILE))]

    def __str__(self) -> str:
        what = f"record of {self.moved_to}" if self.moved_to else "delete" if self.deletes else "row"
        if self.link is None:
            return f"the stored {what}"
        if self.moved_from:
            return f"batch {self.link.number}'s row from {self.moved_from}"
        where = f" ({self.file})" if self.file else ""
        return f"the adopted {what}" if self.source == "adopted" else f"batch {self.link.number}'s {what}{where}"


State = Literal["shown", "deletes", "won, not published", "pending"]
STATES: tuple[State, ...] = ("shown", "deletes", "won, not published", "pending")
"""The first state that applies is the key's."""
_STATE = "_lakeupsert_state"


@dataclass(frozen=True)
class Match:
    """A key with its partition columns, as JSON has them. ``state``: the outcome of the key's version, as `explain` names it."""

    key: dict[str, object]
    partition: str
    state: State


@dataclass(frozen=True)
class FilePlace:
    """Where the rows of a file stand.

    Attributes:
        age: the batch that its rows have, or the last one that was merged into it.
        link: the batch that brought it, if it is not a stored file; ``number``: its place among the files of that batch.
        manifest: the version that holds a tombstone without a file.
    """

    source: Source
    age: int
    link: Link[LedgerEntry] | None = None
    number: int = 0
    manifest: str = ""


@dataclass
class RowSearch:
    """Finds the rows of ``key``, which has one value for each column, or the keys that it is a part of.

    ``files``: how many were read.
    """

    table: OpenTable
    spec: TableSpec
    key: Mapping[str, Column]
    files: int = 0

    def rows_in(self, file: DataFile, place: FilePlace) -> list[KeyRow]:
        """The rows of the key in a file. Rows without rank columns are ranked by their file and their place in it."""
        if file.pieces:
            [hash_] = key_hashes(pa.table({name: self.key[name] for name in self.spec.stored_key}), self.spec)
            file = file.within(Part(int(hash_), HASH_BITS))
            if not file.rows:
                return []
        self.files += 1
        spec, store, appended = self.spec, self.table.resources.store, place.source == "appended"
        stored = spec.arriving_schema if appended else spec.base_schema
        stored = spec.tombstone_schema if place.source == "tombstone" else stored
        # Rows that lost in `append` are shown, too.
        whole = msgspec.structs.replace(file, deleted=None) if appended else file
        rows = find_rows(store, whole, pa.schema([*stored, *_FOUND]), self.key, spec)
        n = rows.num_rows
        ranks = (np.full(n, place.source == "tombstone"), np.full(n, place.number), np.arange(n), np.full(n, place.age))
        for field, column in zip(RANK, ranks, strict=True):
            if field.name not in rows.schema.names:
                rows = rows.append_column(field, pa.array(column, field.type))
        moved_to, moved_from = rows[MOVED_TO].to_pylist(), rows[MOVED_FROM].to_pylist()
        is_lost = np.isin(rows[POSITION].to_numpy(), deleted_positions(store, file))
        rows = align(rows, pa.schema([*spec.base_schema, *RANK]))
        if spec.mode == "columns" and place.source == "adopted":
            rows = fill_in_brought_columns(rows, spec, self._columns_of(file))
        return [
            KeyRow(
                rows.slice(i, 1),
                place.source,
                file.name or place.manifest,
                place.link,
                moved_to[i],
                moved_from[i],
                bool(is_lost[i]),
            )
            for i in range(n)
        ]

    def _columns_of(self, file: DataFile) -> list[str]:
        """The columns that an adopted file has, by their names of now."""
        with open_object(self.table.resources.store, file.name) as source:
            there, names = set(pq.read_schema(source).names), self.spec.names_in(file.renames)
        return [name for name in self.spec.stored_schema.names if names.get(name, name) in there]

    def matches(
        self,
        partition: str,
        readers: Link[Manifest] | None,
        head: Link[Manifest] | None,
        pending: Sequence[Link[LedgerEntry]],
        folders: Mapping[str, pa.Scalar],
        most: int,
    ) -> tuple[list[Match], int]:
        """The first ``most`` keys that fit, in key order, and how many fit. ``folders``: values of the partition columns."""
        read: set[tuple[str, int | None]] = set()
        tables = []
        for state, file in _candidates(partition, readers, head, pending):
            if file.name and file.place in read:  # both versions have it
                continue
            read.add(file.place)
            self.files += 1
            keys = find_rows(self.table.resources.store, file, self.spec.tombstone_schema, self.key, self.spec)
            rows = keys.select(list(self.spec.stored_key))
            states = np.full(rows.num_rows, STATES.index(state), np.int8)
            tables.append(rows.append_column(_STATE, pa.array(states)))
        if not any(table.num_rows for table in tables):
            return [], 0
        names = list(self.spec.stored_key)
        keys = pa.concat_tables(tables).group_by(names).aggregate([(_STATE, "min")])
        first = keys.sort_by([(name, "ascending") for name in names]).slice(0, most)
        columns = {name: to_json_values(first[name].combine_chunks()) for name in names}
        columns |= {name: to_json_values(pa.repeat(value, first.num_rows)) for name, value in folders.items()}
        ordered = [*self.spec.key, *(name for name in self.spec.partition_by if name not in self.spec.key)]
        found = [
            Match({name: columns[name][i] for name in ordered}, partition, STATES[state])
            for i, state in enumerate(first[f"{_STATE}_min"].to_pylist())
        ]
        return found, keys.num_rows

    def with_stored(
        self, rows: list[KeyRow], partition: str, version: Link[Manifest] | None, uncounted: set[KeyRow]
    ) -> tuple[list[KeyRow], dict[KeyRow, KeyRow]]:
        """Add the stored rows of ``version`` that are copies of none of ``rows``.

        Returns all rows by rank, and the rows that ``version`` stores, each with its stored copy. Of equal rows, a stored one is
        a copy of an ``uncounted`` one last. A key has one stored row or tombstone; only adopted partitions that were never
        merged may hold it twice.
        """
        stored: list[KeyRow] = []
        if version is not None:
            age, home = version.body.merged, f"{HOME}/partitions/{partition} version {version.number}"
            for bucket in version.body.buckets:
                for file in bucket.data:
                    source: Source = "base" if file in bucket.base else "delta"
                    stored += self.rows_in(file, FilePlace(source, age))
                for tombstones in bucket.tombstones:
                    stored += self.rows_in(tombstones, FilePlace("tombstone", age, manifest=home))
        rows = self.ranked(rows)
        standing: dict[KeyRow, KeyRow] = {}
        for copy in stored:
            by_order = copy.deletes or self.spec.mode == "columns"
            same = (self.spec.tombstone_schema if by_order else self.spec.stored_schema).names
            before = (row for row in rows if row not in standing and row.age <= copy.age and not row.lost_in_append)
            equal = [row for row in before if row.deletes == copy.deletes and row.texts(same) == copy.texts(same)]
            standing[min(equal, key=uncounted.__contains__, default=copy)] = copy
        return self.ranked([*rows, *(row for row in standing if row not in rows)]), standing

    def lacking(self, rows: Sequence[KeyRow], counted: Sequence[Link[LedgerEntry]]) -> set[KeyRow]:
        """The rows that a later full extract deleted, because it lacks the key."""
        full = [
            Extract(link.number, link.body.full.order, link.body.full.replaces) for link in counted if link.body.full
        ]
        full = [extract for extract in full if not any(row.age == extract.age for row in rows)]
        return {
            row
            for row in rows
            if any(row.age < extract.age and extract.find_reached(row.values, self.spec).all() for extract in full)
        }

    def refused(self, rows: Sequence[KeyRow], manifests: Sequence[Manifest]) -> set[KeyRow]:
        """The rows that merges put into quarantine."""
        keys = read_refused_keys(self.table.resources.store, manifests, self.spec)
        refused = set()
        for row in rows:
            if row.link is not None and row.source == "appended" and row.link.body.batch_id in keys:
                in_partition = row.values.append_column(PARTITION, pa.array([manifests[0].partition]))
                names = [PARTITION, *self.spec.stored_key]
                if is_among(in_partition, keys[row.link.body.batch_id], names).any():
                    refused.add(row)
        return refused

    def ranked(self, rows: list[KeyRow]) -> list[KeyRow]:
        """The rows, greatest rank first."""
        if not rows:
            return []
        table = pa.concat_tables([row.values for row in rows])
        order, _ = sort_by_rank(table, self.spec, (AGE.name, FILE, PLACE))
        return [rows[i] for i in order.to_pylist()]


def replaced(rows: Sequence[KeyRow], counted: Sequence[Link[LedgerEntry]]) -> set[KeyRow]:
    """The rows that came before a full extract that has the key and replaced everything before it."""
    ages = {row.age for row in rows}
    last = max((x.number for x in counted if x.body.full and x.body.full.replaces and x.number in ages), default=0)
    return {row for row in rows if row.age < last}


def forgotten_before_extract(rows: Sequence[KeyRow], counted: Sequence[Link[LedgerEntry]]) -> set[KeyRow]:
    """The deletes that were forgotten already when a full extract with the key arrived."""
    batches = [link for link in counted if link.number]
    forgets = Forgetting(tuple((link.body.received_at, link.body.retention) for link in batches))
    ages = {row.age for row in rows}
    extracts = [age for age, link in enumerate(batches, 1) if link.body.full and link.number in ages]
    forgotten = {batches[number - 1].number for age in extracts for number in forgets.forgotten_ages(age)}
    return {row for row in rows if row.deletes and row.age in forgotten}


def _candidates(
    partition: str, readers: Link[Manifest] | None, head: Link[Manifest] | None, pending: Sequence[Link[LedgerEntry]]
) -> Iterator[tuple[State, DataFile]]:
    for bucket in readers.body.buckets if readers else ():
        yield from (("shown", file) for file in bucket.data)
        yield from (("deletes", file) for file in bucket.tombstones)
    for bucket in head.body.buckets if head else ():
        yield from (("won, not published", file) for file in (*bucket.data, *bucket.tombstones))
    for link in pending:
        yield from (("pending", file) for file in link.body.touched[partition].files)
