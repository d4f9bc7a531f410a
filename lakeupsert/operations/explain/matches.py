"""Find the keys that a part of a key fits, in one partition: stored keys, and keys that wait to be merged.

Reads     key and ordering columns of the files that the manifests and the ledger name; statistics exclude row groups
Writes    nothing
Repeat    safe, also during a night
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from lakeupsert.pipeline.opened import OpenTable
from lakeupsert.read.keys import find_rows
from lakeupsert.rows.arrays import Column
from lakeupsert.rows.tojson import to_json_values
from lakeupsert.table.chain import Link
from lakeupsert.table.ledger import LedgerEntry
from lakeupsert.table.manifest import DataFile, Manifest
from lakeupsert.table.spec import TableSpec

State = Literal["shown", "deletes", "won, not published", "pending"]
STATES: tuple[State, ...] = ("shown", "deletes", "won, not published", "pending")
"""By precedence: a key gets the first of these that it is."""
_STATE = "_lakeupsert_state"


@dataclass(frozen=True)
class Match:
    """A key with its partition columns, as JSON has them. ``state``: the outcome of the key's version, as `explain` names it."""

    key: dict[str, object]
    partition: str
    state: State


@dataclass
class MatchSearch:
    """``values``: one value for each given column of the key. ``files``: how many were read."""

    table: OpenTable
    spec: TableSpec
    values: Mapping[str, Column]
    files: int = 0

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
            if file.name and (file.name, file.at) in read:  # both versions have it
                continue
            read.add((file.name, file.at))
            self.files += 1
            keys = find_rows(self.table.store, file, self.spec.tombstone_schema, self.values, self.spec)
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
